"""The noised videos of an update of forward-process reinforcement, with the velocities that the policy's is held to."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rewardfl import anchor, flow, forward_rl, group_plan
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning, Schedule, Velocity
from rewardfl.copies import to_device
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training.distributed import Distributed
from rewardfl.training.epoch_scores import EpochScores
from rewardfl.training.plan import ForwardRlPlan
from rewardfl.training.samples import CleanRollout


@dataclass(frozen=True, kw_only=True)
class ForwardDraw:
    """One draw of sigma and noise for the B videos of a forward pass. All tensors but sigma are (B, C, T, h, w)."""

    rollout: CleanRollout
    is_last: bool  # the last draw of its rollout in this update
    velocity: Callable[[Tensor], Tensor]  # the policy's at sigma, without guidance
    sigma: Tensor
    x: Tensor  # the clean latents with noise
    x0: Tensor
    target: Tensor  # noise - x0
    old: Tensor | None = None  # velocity of the old policy at x
    base: Tensor | None = None  # velocity of the model without its adapter at x
    advantage: Tensor  # (B,)

    @torch.no_grad()
    def deviation(self, old: Tensor) -> Tensor:
        """Return forward_rl.deviation (1,) of the policy as it is now from a velocity of the old policy at x."""
        return forward_rl.deviation(self.velocity(self.x), old)[None]


def keep_trained(
    job: Distributed, rollouts: Sequence[CleanRollout], scored: EpochScores, training: group_plan.Geometry
) -> tuple[list[CleanRollout], EpochScores]:
    """Return what the updates train on: all rollouts, or of objective best one video of each group. Collective.

    These are rollouts of one video, on the CPU: the best one, of advantage 1, or without one the first, of advantage 0.
    training: says which process has which groups; a group_size of 1 stands for best. scored: with all advantages.
    """
    if training.group_size > 1:
        return list(rollouts), scored
    videos: dict[int, tuple[float, int, CleanRollout]] = {}  # {group: advantage, - member, video}
    for rollout, advantages in zip(rollouts, scored.advantages, strict=True):
        for i, (member, advantage) in enumerate(zip(rollout.members, advantages.tolist(), strict=True)):
            if advantage > 0 or member.group_id not in videos:
                inputs = protocol.move_to(protocol.select_rows(rollout.conditioning, [i]), "cpu")
                requested, x0 = rollout.is_requested[[i]], rollout.x0[[i]].cpu()
                video = replace(rollout, members=[member], is_requested=requested, conditioning=inputs, x0=x0)
                videos[member.group_id] = advantage, -member.member, video
    if training.world > 1:  # a group may be on two processes
        videos = dict(sorted(job.gather_lists([*videos.items()]), key=lambda item: item[1][:2]))  # the best comes last
    share = [videos[i] for positions in group_plan.positions(training, job.rank) for i in positions]
    advantages = [torch.tensor([advantage], device=job.device) for advantage, _, _ in share]
    return [video for _, _, video in share], replace(scored, advantages=advantages)


@torch.no_grad()
def make_draws(
    plan: ForwardRlPlan,
    update: int,
    rollouts: Sequence[CleanRollout],
    advantages: Sequence[Tensor],
    get_velocity: Callable[[Conditioning, Schedule], Velocity],
    old_weights: Callable[[], contextlib.AbstractContextManager],
    device: torch.device,
) -> tuple[list[ForwardDraw], Tensor]:
    """Return the draws of an update, of each rollout in turn, and the old policy's velocity of the first.

    Call it before a graph is alive. update: its index in the run. advantages: (B,) by rollout. get_velocity: of the
    policy. old_weights: the context of the old policy.

    All members of a group have the same noise, which depends only on the group, the update and the draw. Advantages
    add up to 0 in a group, so most of the noise cancels in the gradient, and its expectation stays (the gradient is a
    third shorter on the tiny world, docs/results/tiny_forward.md).
    """
    moments = anchor.draw_moments(plan.draws, plan.active, plan.run.seed, update, whole_range=plan.whole_range)
    pairs, draws = zip(rollouts, advantages, strict=True), []
    for (rollout, advantage), (n, moment) in itertools.product(pairs, enumerate(moments)):
        velocity, x0 = get_velocity(rollout.conditioning, rollout.schedule.at(moment)), to_device(rollout.x0, device)
        sigma = velocity.schedule.sigmas[0]
        seeds = [noise_seed(member.group_seed, update, "forward", n) for member in rollout.members]
        noise = torch.cat([draw_noise((1, *x0.shape[1:]), seed, device) for seed in seeds])
        x = flow.add_noise(x0, noise, sigma)
        base = velocity.reference(x, 0) if plan.needs_base else None
        draws.append(
            ForwardDraw(
                rollout=rollout, is_last=n == len(moments) - 1, velocity=partial(velocity, step=0), sigma=sigma, x=x,
                x0=x0, target=noise - x0, base=base, advantage=advantage,
            )
        )  # fmt: skip
    with old_weights():
        old_velocities = [draw.velocity(draw.x) for draw in (draws if plan.needs_old else draws[:1])]
    if plan.needs_old:
        draws = [replace(draw, old=velocity) for draw, velocity in zip(draws, old_velocities, strict=True)]
    return draws, old_velocities[0]
