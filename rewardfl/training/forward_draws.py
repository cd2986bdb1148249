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
    reference: Tensor  # (B,), the misfit of DPO's reference; 0 without one
    logit: Tensor  # (B,), forward_rl.pair_logits; 0 without pairs

    @torch.no_grad()
    def deviation(self, old: Tensor) -> Tensor:
        """Return forward_rl.deviation (1,) of the policy as it is now from a velocity of the old policy at x."""
        return forward_rl.deviation(self.velocity(self.x), old)[None]


def keep_trained(
    job: Distributed, plan: ForwardRlPlan, rollouts: Sequence[CleanRollout], scored: EpochScores
) -> tuple[list[CleanRollout], EpochScores]:
    """Return what the updates train on: all rollouts, or as many videos of each group as plan.training has. Collective.

    These are rollouts of one video, on the CPU: those with an advantage, or without any the first ones, of advantage 0.
    plan.training says which process has which. scored: with all advantages.
    """
    if plan.training == plan.geometry:
        return list(rollouts), scored
    videos, count = [], plan.training.group_size  # (group, whether it has no advantage, member), advantage, video
    for rollout, advantages in zip(rollouts, scored.advantages, strict=True):
        for i, (member, advantage) in enumerate(zip(rollout.members, advantages.tolist(), strict=True)):
            if advantage != 0 or member.member < count:
                inputs = protocol.move_to(protocol.select_rows(rollout.conditioning, [i]), "cpu")
                requested, x0 = rollout.is_requested[[i]], rollout.x0[[i]].cpu()
                video = replace(rollout, members=[member], is_requested=requested, conditioning=inputs, x0=x0)
                videos.append(((member.group_id, advantage == 0, member.member), advantage, video))
    if plan.training.world > 1:  # a group may be on two processes
        videos = job.gather_lists(videos)
    groups = itertools.groupby(sorted(videos, key=lambda video: video[0]), key=lambda video: video[0][0])
    chosen = [video for _, group in groups for video in itertools.islice(group, count)]
    share = [chosen[i] for positions in group_plan.positions(plan.training, job.rank) for i in positions]
    advantages = [torch.tensor([advantage], device=job.device) for _, advantage, _ in share]
    return [video for _, _, video in share], replace(scored, advantages=advantages)


@torch.no_grad()
def make_draws(
    plan: ForwardRlPlan,
    update: int,
    rollouts: Sequence[CleanRollout],
    advantages: Sequence[Tensor],
    get_velocity: Callable[[Conditioning, Schedule], Velocity],
    old_weights: Callable[[], contextlib.AbstractContextManager],
    reference_weights: Callable[[], contextlib.AbstractContextManager],
    device: torch.device,
) -> tuple[list[ForwardDraw], Tensor]:
    """Return the draws of an update, of each rollout in turn, and the old policy's velocity of the first.

    Call it before a graph is alive. update: its index in the run. advantages: (B,) by rollout. get_velocity: of the
    policy. old_weights, reference_weights: the contexts of the old policy and of DPO's reference.

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
        base, zeros = velocity.reference(x, 0) if plan.needs_base else None, torch.zeros(len(x), device=device)
        draws.append(
            ForwardDraw(
                rollout=rollout, is_last=n == len(moments) - 1, velocity=partial(velocity, step=0), sigma=sigma, x=x,
                x0=x0, target=noise - x0, base=base, advantage=advantage, reference=zeros, logit=zeros,
            )
        )  # fmt: skip
    with old_weights():
        old_velocities = [draw.velocity(draw.x) for draw in (draws if plan.needs_old else draws[:1])]
    if plan.needs_old:
        draws = [replace(draw, old=velocity) for draw, velocity in zip(draws, old_velocities, strict=True)]
    if plan.group.objective == "dpo" and len(rollouts) > 1:  # one: no group of any process is trained on
        errors = torch.stack([forward_rl.distance(draw.velocity(draw.x), draw.target) for draw in draws])
        with reference_weights():
            references = torch.stack([forward_rl.distance(draw.velocity(draw.x), draw.target) for draw in draws])
        change = (errors - references).view(-1, 2, plan.draws)  # plan.training: two passes in a row are of one group
        logits = forward_rl.pair_logits(change, torch.stack([*advantages]).view(-1, 2), plan.group.beta).reshape(-1, 1)
        draws = [replace(d, reference=r, logit=z) for d, r, z in zip(draws, references, logits, strict=True)]
    return draws, old_velocities[0]
