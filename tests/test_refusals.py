"""What the mathematics refuses, before a wrong index or option becomes a wrong number."""

import math

import pytest
import torch

from rewardfl import flow, group_plan, grpo
from rewardfl.group_plan import Geometry
from rewardfl.scheduler import FlowMatchSDEScheduler
from rewardfl.windows import Windows, draw_window

X, REWARDS, IDS = torch.zeros(2, 3), torch.arange(8.0), torch.arange(8) // 4
WITH_NAN = torch.tensor([math.nan, *range(7)])


def advantages(rewards=REWARDS, ids=IDS):
    return grpo.advantages(rewards, ids, group_size=4)


def draw(rule, usable=range(8), **settings):
    return draw_window(Windows(rule=rule, usable=usable, **settings), 0, 0)


def schedule(**arguments):
    FlowMatchSDEScheduler(shift=5.0, **arguments).set_timesteps(4)


def plan(world, batch, group_size, groups, **more):
    geometry = Geometry(world=world, batch=batch, group_size=group_size, groups=groups, **more)
    return group_plan.plan(0, 0, geometry, ["a"], 0)


REFUSED = [
    ("one of ode, flow, dance, cps, got 'sde'", lambda: flow.coefficients("sde", 0.5, 0.4, 0.7, 0.9)),
    (r"walks sigma down .*, got 0 to 0", lambda: flow.coefficients("dance", 0.0, 0.0, 0.7, 0.9)),
    (r"walks sigma down .*, got 0.4 to 0.5", lambda: flow.coefficients("dance", 0.4, 0.5, 0.7, 0.9)),
    (r"walks sigma down .*, got 1.1 to 0.5", lambda: flow.coefficients("flow", 1.1, 0.5, 0.7, 0.9)),
    (r"walks sigma down .*, got 0.5 to -0.1", lambda: flow.coefficients("ode", 0.5, -0.1, 0.7, 0.9)),
    ("has no density: leave it out", lambda: flow.log_prob("flow", X, X, 0.0)),
    ("has no density: leave it out", lambda: flow.log_prob("cps", X, X, math.nan)),
    ("has no density: leave it out", lambda: flow.transition_kl(X, X, 0.0)),
    (r"must have 4 members, but they have \[1, 1, .*: gather", lambda: advantages(ids=torch.arange(8))),
    ("1 of 8 valid rewards are not finite; mark such samples valid=False", lambda: advantages(WITH_NAN)),
    (r"usable \[0, 1, 2\].*got \[2, 7\]", lambda: draw("list", usable=[0, 1, 2], steps=[2, 7])),
    (r"each once, got \[1, 1\]", lambda: draw("list", steps=[1, 1])),
    (r"each once, got \[\]", lambda: draw("list")),
    (r"no 3 steps in a row .* \[2, 4\]", lambda: draw("random", usable=[0, 2, 4, 6], size=3, bounds=(1, 5))),
    (r"no 1 steps in a row among the usable \[\]", lambda: draw("fraction", usable=[0, 1], bounds=(3, 5))),
    ("groups 5 x group_size 3 = .* 2 x batch 2 = .* a multiple of 4$", lambda: plan(2, 2, 3, 5)),
    ("groups 4 x group_size 3 = .* 2 x batch 5 = .* a multiple of 10$", lambda: plan(2, 5, 3, 4)),
    ("groups 5 x group_size 4 = .* 3 x batch 2 = .* a multiple of 3$", lambda: plan(3, 2, 4, 5)),
    ("updates must divide the 12 forward passes of a process, got 5", lambda: plan(2, 1, 4, 6, updates=5)),
    (r"noise_window \[1, 4\]: there are steps 0 to 3", lambda: schedule(noise_window=[1, 4])),
    (r"noise_window \[-1\]: there are steps 0 to 3", lambda: schedule(noise_window=[-1])),
    (r"noise_window \[2, 3\]: cps makes step 3 deter", lambda: schedule(noise_window=[2, 3], kind="cps")),
    ("kind must be one of ode, flow, dance, cps, got 'sde'", lambda: schedule(kind="sde")),
    ("invert_sigmas and stochastic_sampling .* not supported", lambda: schedule(invert_sigmas=True)),
    ("invert_sigmas and stochastic_sampling .* not supported", lambda: schedule(stochastic_sampling=True)),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_cannot_work_is_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
