"""One of two processes of test_distributed.py: test_replay_under_fully_shard. argv: OUT. Rank 0 writes error.txt."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from replay_worker import ACTIVE, KL_WEIGHT, batch_of
from test_reward_flow import SIGMAS, lora_model, replay_gradients
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def gradients(numbers: list[int], shard: bool) -> dict[str, torch.Tensor]:
    """Of the summed loss of these samples, reduced to the mean over processes where sharded."""
    pipe, model = lora_model(torch.float64)
    if shard:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for expert in (pipe.transformer, pipe.transformer_2):
            for block in expert.blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    conditioning, x = batch_of(numbers, pipe)
    found = replay_gradients(
        pipe, model, conditioning, x, ACTIVE[1.0], 1.0, KL_WEIGHT, "fixed_trajectory", SIGMAS
    )[0]  # fmt: skip
    return {name: gradient.full_tensor() if shard else gradient for name, gradient in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    right, sharded = gradients(list(range(world)), False), gradients([rank], True)
    assert right.keys() == sharded.keys()
    error = max(float((world * sharded[name] - right[name]).norm() / right[name].norm()) for name in right)
    if rank == 0:
        (Path(sys.argv[1]) / "error.txt").write_text(f"{world} {error}")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit


if __name__ == "__main__":
    main()
