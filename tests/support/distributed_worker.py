"""One process of tests/integration/test_distributed.py: training scripts, watched.

argv: OUT and then, for each run, -- SCRIPT and the script's own arguments. Writes OUT/rank-<n>.json, of each run: the
distributed type, the process count, the wrapper, the velocities that `replay` computes, every update's gradient norm,
and a digest of the trained parameters after it. In the first run BREAK_GRADIENT=<rank>:<update>
makes that rank's gradients of that update infinite; in train_reward_fl.py NOBODY_ON=<row> takes the face from a clip,
after all checks. FSDP_ON_CPU=true tells accelerate that these processes without a GPU are some with: it
knows FSDP only there. SPLIT_ON_CPU=true tells diffusers the same, whose enable_parallelism divides by their number, and
gives the second of two processes of a clip a wrong gradient of its reward, which must not count.
Rank 0 saves the gradients of all updates as GRADIENTS/<n>.pt, where that folder is named.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

from rewardfl import reward_flow
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.memory import sharding
from rewardfl.training import setup_data
from rewardfl.training.distributed import Distributed


def digest(parameters):
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in sharding.gather_to_cpu(parameters))).hexdigest()


@contextlib.contextmanager
def watched(seen, faceless, breaking):
    """Within, what a script does is written to `seen`; with the faults that the environment names."""
    prepare, step, backward = Distributed.prepare, Distributed.step, Distributed.backward
    replay, find_samples = reward_flow.replay, setup_data.find_samples
    rank, update = (int(n) for n in os.environ["BREAK_GRADIENT"].split(":")) if breaking else (-1, -1)

    def watched_prepare(job, model, optimizer, block_classes):
        policy, optimizer, parameters = prepare(job, model, optimizer, block_classes)
        seen.update(type=job.accelerator.distributed_type.value, processes=job.world)
        seen.update(wrapper=type(policy).__name__, updates=[])
        return policy, optimizer, parameters

    def watched_step(job, optimizer, parameters, max_norm):
        before = digest(parameters)
        clip = job.accelerator.clip_grad_norm_

        def watched_clip(*arguments):  # the gradients are reduced by now
            if (folder := os.environ.get("GRADIENTS")) and job.main:
                path = Path(folder) / f"{len(list(Path(folder).iterdir()))}.pt"
                torch.save([None if p.grad is None else p.grad.clone() for p in parameters], path)
            return clip(*arguments)

        job.accelerator.clip_grad_norm_ = watched_clip
        norm = step(job, optimizer, parameters, max_norm)
        job.accelerator.clip_grad_norm_ = clip
        after = digest(parameters)
        left = sum(p.grad is not None and bool(sharding.full_tensor(p.grad).any()) for p in parameters)
        seen["updates"].append({"norm": norm, "digest": after, "moved": before != after, "gradients_left": left})
        return norm

    def watched_backward(job, loss):
        broken = job.rank == rank and len(seen["updates"]) == update
        backward(job, loss * torch.inf if broken else loss)

    def watched_replay(velocity, *arguments, **more):
        def counted(x, step):
            seen["replayed"] = seen.get("replayed", 0) + 1
            return velocity(x, step)

        return replay(counted, *arguments, **more)

    def faulty_find(clips, rows, terms, *arguments):
        samples = find_samples(clips, rows, terms, *arguments)
        if not samples:  # held out
            return samples
        row = int(os.environ["NOBODY_ON"])
        samples[row] = dataclasses.replace(samples[row], references=(None,) * len(terms))
        return samples

    Distributed.prepare, Distributed.step, Distributed.backward = watched_prepare, watched_step, watched_backward
    reward_flow.replay = watched_replay
    setup_data.find_samples = faulty_find if faceless else find_samples
    try:
        yield
    finally:
        Distributed.prepare, Distributed.step, Distributed.backward = prepare, step, backward
        reward_flow.replay, setup_data.find_samples = replay, find_samples


def fsdp_on_cpu():
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU and state.num_processes > 1
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main():
    if os.environ.get("FSDP_ON_CPU") == "true":
        fsdp_on_cpu()
    if os.environ.get("SPLIT_ON_CPU") == "true":
        torch.accelerator.device_count = lambda: 1
        vjp, odd = WanDecoder.vjp, int(os.environ.get("RANK", "0")) % 2
        WanDecoder.vjp = lambda *arguments: vjp(*arguments) * (1 + odd)
    Accelerator.end_training = lambda self: None  # it would disconnect the processes, and the next run needs them
    out, *words = sys.argv[1:]
    accounts = []
    for _, run in itertools.groupby(words, lambda word: word == "--"):
        script, *arguments = run
        if script == "--":
            continue
        accounts.append({})
        sys.argv = [script, *arguments]
        try:
            with watched(accounts[-1], script == "train_reward_fl.py", breaking=len(accounts) == 1):
                accounts[-1]["code"] = importlib.import_module(script.removesuffix(".py")).main()
        except BaseException:  # shown; the process ends here
            traceback.print_exc()
            accounts[-1]["code"] = 1
            break
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(accounts))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(accounts[-1]["code"])  # gloo may abort at interpreter exit


if __name__ == "__main__":
    main()
