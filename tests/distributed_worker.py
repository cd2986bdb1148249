"""One process of tests/test_distributed.py: a training script, watched.

argv: OUT SCRIPT and the script's own arguments. Writes OUT/rank-<n>.json: the distributed type, the process count, the
wrapper, every update's gradient norm, and a digest of the trained parameters after it. BREAK_GRADIENT=<rank>:<update>
makes that rank's gradients of that update infinite; NOBODY_ON=<row> takes the face from a clip, after all checks.
FSDP_ON_CPU=true tells accelerate that these processes without a GPU are some with: it knows FSDP only there.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from rewardfl import distributed, setup


def digest(parameters):
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in distributed.gathered(parameters))).hexdigest()


def watch(seen):
    prepare, step, backward = distributed.prepare, distributed.step, distributed.backward
    rank, update = (int(n) for n in os.environ.get("BREAK_GRADIENT", "-1:-1").split(":"))

    def watched_prepare(accelerator, model, optimizer):
        policy, optimizer, parameters = prepare(accelerator, model, optimizer)
        seen.update(type=accelerator.distributed_type.value, processes=accelerator.num_processes)
        seen.update(wrapper=type(policy).__name__, updates=[])
        return policy, optimizer, parameters

    def watched_step(accelerator, optimizer, parameters, max_norm):
        before = digest(parameters)
        norm = step(accelerator, optimizer, parameters, max_norm)
        after = digest(parameters)
        left = sum(p.grad is not None and bool(distributed.whole(p.grad).any()) for p in parameters)
        seen["updates"].append({"norm": norm, "digest": after, "moved": before != after, "gradients_left": left})
        return norm

    def watched_backward(accelerator, loss):
        broken = accelerator.process_index == rank and len(seen["updates"]) == update
        backward(accelerator, loss * torch.inf if broken else loss)

    find_samples, faceless = setup.find_samples, int(os.environ.get("NOBODY_ON", "-1"))

    def watched_find(cfg, rows, terms, store, device, share, gather):
        samples, problems = find_samples(cfg, rows, terms, store, device, share, gather)
        if faceless >= 0:
            samples[faceless] = dataclasses.replace(samples[faceless], references=(None,) * len(terms))
        return samples, problems

    setup.find_samples = watched_find
    distributed.prepare, distributed.step, distributed.backward = watched_prepare, watched_step, watched_backward


def fsdp_on_cpu():
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU and state.num_processes > 1
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def main():
    if os.environ.get("FSDP_ON_CPU") == "true":
        fsdp_on_cpu()
    out, script, *arguments = sys.argv[1:]
    seen = {}
    watch(seen)
    sys.argv = [script, *arguments]
    try:
        seen["code"] = importlib.import_module(script.removesuffix(".py")).main()
    except BaseException:  # shown; the process ends here
        traceback.print_exc()
        seen["code"] = 1
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(seen["code"])  # gloo may abort at interpreter exit


if __name__ == "__main__":
    main()
