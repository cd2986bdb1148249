"""The noised videos of an update, and whose velocities they carry."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rewardfl import anchor, flow, forward_rl
from rewardfl.backbones.protocol import Schedule, Velocity
from rewardfl.group_plan import Member
from rewardfl.optim import OldPolicy, averaged
from rewardfl.training.forward_draws import make_draws
from rewardfl.training.samples import CleanRollout

SCHEDULE = Schedule(flow.linear_sigmas(4, 5.0), 1000 * flow.linear_sigmas(4, 5.0)[:-1], ("high", "high", "low", "low"))
SHAPE = (2, 1, 2, 2)


class Policy(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))


# the velocity is the policy's weight times x
BACKBONE = SimpleNamespace(velocity=lambda model, x, step, schedule, given: model.weight * x)


def rollout(rows):
    """Videos of the given rows, in groups by row."""
    members = [Member(row, row, n, 200 + n, 0, 100 + row) for n, row in enumerate(rows)]
    x0 = torch.stack([torch.full(SHAPE, float(row)) for row in rows])
    requested = torch.ones(len(rows), dtype=torch.bool)
    return CleanRollout(
        members=members, is_requested=requested, conditioning={}, schedule=SCHEDULE, shape=(1, *SHAPE), x0=x0
    )


MOMENTS = {"steps": (2, 3), "seed": 0, "whole_range": True}


@contextlib.contextmanager
def reference_of(policy):
    """Take a reference whose velocity is x."""
    with torch.no_grad():
        policy.weight.fill_(1.0)
        yield
        policy.weight.fill_(3.0)


def draw(rollouts, step=7, needs_old=True, objective="nft", advantages=None):
    plan = SimpleNamespace(
        draws=2, active=(2, 3), run=SimpleNamespace(seed=0), whole_range=True, needs_old=needs_old, needs_base=False,
        group=SimpleNamespace(objective=objective, beta=0.5),
    )  # fmt: skip
    policy = Policy(3.0)
    parameters = [policy.weight]
    old = OldPolicy(parameters, lambda update: 0.5)
    old.shadow_params[0].fill_(2.0)
    draws, old_velocity = make_draws(
        plan, step, rollouts, advantages or [torch.tensor(rollout.members[0].row) for rollout in rollouts],
        lambda conditioning, schedule: Velocity(
            backbone=BACKBONE, model=policy, conditioning=conditioning, schedule=schedule
        ),
        lambda: averaged(old, parameters), lambda: reference_of(policy), torch.device("cpu"),
    )  # fmt: skip
    assert policy.weight == 3.0  # the swap is undone
    return draws, old_velocity


def test_a_draw_is_x0_with_noise_at_its_moment():
    draws, old_velocity = draw([rollout([1, 2]), rollout([5, 6])])
    assert [each.is_last for each in draws] == [False, True] * 2
    assert [float(each.sigma) for each in draws[:2]] == [
        float(SCHEDULE.at(m).sigmas[0]) for m in anchor.draw_moments(2, update=7, **MOMENTS)
    ]
    for each in draws:
        torch.testing.assert_close(each.x, (1 - each.sigma) * each.x0 + each.sigma * (each.target + each.x0))
        assert torch.equal(each.old, 2 * each.x) and torch.equal(each.velocity(each.x), 3 * each.x)
    assert torch.equal(old_velocity, draws[0].old)
    assert forward_rl.deviation(draws[0].velocity(draws[0].x), old_velocity).item() == pytest.approx(0.5)


def test_only_the_first_draw_is_compared_if_no_loss_needs_the_old_policy():
    draws, old_velocity = draw([rollout([1, 2])], needs_old=False)
    assert [each.old for each in draws] == [None, None] and torch.equal(old_velocity, 2 * draws[0].x)


def test_noises_depend_only_on_group_draw_and_update():
    together, _ = draw([rollout([1, 2, 1])])
    by_row = [draw([rollout([row])])[0] for row in (1, 2, 1)]
    for n in range(2):
        assert torch.equal(together[n].target, torch.cat([draws[n].target for draws in by_row]))
    noises = [each.target + each.x0 for each in (*together, *draw([rollout([1, 2, 1])], step=8)[0])]
    for noise in noises:
        torch.testing.assert_close(noise[0], noise[2])
        assert not torch.allclose(noise[0], noise[1])
    assert not any(torch.allclose(a, b) for a, b in itertools.combinations(noises, 2))


def test_the_videos_of_a_pair_share_noise_and_have_its_logit():
    """One video in each pass: group 1 has a rejected and a chosen one, and group 2 no pair."""
    videos = [rollout([1]), replace(rollout([1]), x0=torch.full((1, *SHAPE), -4.0)), rollout([2]), rollout([2])]
    draws, _ = draw(videos, needs_old=False, objective="dpo", advantages=[torch.tensor([a]) for a in (-1.0, 1, 0, 0)])
    for rejected, chosen, *others in (draws[::2], draws[1::2]):
        assert chosen.sigma == rejected.sigma
        torch.testing.assert_close(chosen.target + chosen.x0, rejected.target + rejected.x0)
        errors = [[((w * d.x - d.target) ** 2).mean().item() for w in (3, 1)] for d in (chosen, rejected)]
        assert [float(d.reference) for d in (chosen, rejected)] == pytest.approx([errors[0][1], errors[1][1]])
        logit = -0.5 / 2 * ((errors[0][0] - errors[0][1]) - (errors[1][0] - errors[1][1]))
        assert [float(d.logit) for d in (chosen, rejected, *others)] == pytest.approx([logit, logit, 0, 0])
