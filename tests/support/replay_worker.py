"""One process of tests/integration/test_accelerate.py: one update's gradients, written to OUT/<case>-<rank>.pt.

argv: OUT. Every case is a global batch of accumulation x batch x processes samples; each sample's noise and
conditioning are a function of its number alone. `naive` leaves accelerate's division in place, the error that
the test must see. `kept_steps` is the number of active steps whose graphs are the rollout's.
With two processes per clip, diffusers' enable_parallelism is told of a GPU, which it wants to count.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from pipelines import FRAMES, HEIGHT, WIDTH, backbone_of, latent_shape
from test_reward_flow import SCHEDULE, gradients, lora_model, quadratic_reward

from rewardfl import reward_flow
from rewardfl.backbones.protocol import Conditioning, Velocity
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.memory import context_parallel
from rewardfl.training.distributed import Distributed

ACTIVE = {0.0: [3, 4, 5], 0.2: [3, 4, 5], 1.0: [1, 3, 5]}  # by coupling; step 1 belongs to the other expert
KL_WEIGHT = 0.7
# accumulation, batch, coupling, naive, kept, processes per clip
CASES = [
    (2, 1, 1.0, True, 0, 1),
    *((ga, batch, c, False, 0, 1) for ga, batch in ((1, 2), (2, 1)) for c in (0.0, 0.2, 1.0)),
    *((2, 1, 1.0, False, kept_steps, 1) for kept_steps in (1, 3)),
    (1, 2, 1.0, False, 0, 2), (2, 1, 0.2, False, 0, 2),
]  # fmt: skip


def sample(number: int, pipe) -> tuple[Conditioning, torch.Tensor]:
    g = torch.Generator().manual_seed(number)
    shape = latent_shape(pipe, HEIGHT, WIDTH, FRAMES)
    text, image, x = (
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((1, 8, 32), (1, 18, *shape[2:]), shape)
    )
    return {"text": text, "image": image}, x


def batch_of(numbers: list[int], pipe) -> tuple[Conditioning, torch.Tensor]:
    conditions, noises = zip(*(sample(n, pipe) for n in numbers), strict=True)
    return backbone_of(pipe).collate(conditions), torch.cat(noises)


def update(
    accumulation: int, batch: int, coupling: float, naive: bool, kept_steps: int, per_clip: int
) -> tuple[dict, int]:
    """Gradients of one update after their reduction, and how many backwards accelerate synchronised."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    active = ACTIVE[coupling]
    job = Distributed(1.0)
    job.reduce_in_backward(accumulation * len(active))
    pipe, model = lora_model(torch.float64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    policy, optimizer, parameters = job.prepare(model, torch.optim.AdamW(trained), ())
    reduced: list[dict] = []
    optimizer.optimizer.register_step_pre_hook(lambda *_: reduced.append(gradients(model)))
    if per_clip > 1:
        mesh = context_parallel.make_mesh(job.device, job.world, per_clip)
        for expert in model.inside.values():
            expert.enable_gradient_checkpointing()
            context_parallel.split_tokens(expert, mesh)
    per_process, synchronised = accumulation * batch, 0

    def backward(loss):
        nonlocal synchronised
        synchronised += job.accelerator.sync_gradients
        (job.accelerator if naive else job).backward(loss)

    for micro in range(accumulation):
        first = (micro * (job.world // per_clip) + job.rank // per_clip) * batch
        conditioning, x = batch_of(list(range(first, first + batch)), pipe)
        velocity = Velocity(backbone=backbone_of(pipe), model=policy, conditioning=conditioning, schedule=SCHEDULE)
        graphs = reward_flow.KeptGraphs(active[len(active) - kept_steps :])
        trajectory = reward_flow.rollout(velocity, x, SCHEDULE.sigmas, active, with_graphs=graphs)
        decoded = WanDecoder(pipe.vae).decode_with_caches(trajectory.x0)
        video = decoded.video.requires_grad_()
        (grad_video,) = torch.autograd.grad(-quadratic_reward(video).sum() / per_process, video)
        grad_x0 = WanDecoder(pipe.vae).vjp(trajectory.x0, grad_video, decoded)
        reward_flow.replay(
            velocity, trajectory, SCHEDULE.sigmas, active, grad_x0, coupling,
            reference=velocity.reference, kl_weight=KL_WEIGHT / per_process, kl_gradient="exact", backward=backward,
            micro_batch=lambda: job.accumulate(policy),
        )  # fmt: skip
    job.step(optimizer, parameters, 1e9)
    return reduced[0], synchronised


def main() -> None:
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1
    rank = int(os.environ.get("RANK", "0"))
    for case in CASES:
        grads, synchronised = update(*case)
        result = {"gradients": grads, "synchronised": synchronised}
        torch.save(result, Path(sys.argv[1]) / f"{'-'.join(map(str, case))}-{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit


if __name__ == "__main__":
    main()
