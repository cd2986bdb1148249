"""Stochastic rollouts: against diffusers' step by step, and against themselves when they are scored again."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from rewardfl import flow, reward_flow, sde
from rewardfl.scheduler import FlowMatchSDEScheduler

SIGMAS = flow.linear_sigmas(6, 5.0)
KERNELS = [sde.Kernel("flow", 0.7, SIGMAS), sde.Kernel("dance", 0.3, SIGMAS), sde.Kernel("cps", 0.8, SIGMAS)]
SHAPE = (3, 2, 3, 4)


def network(weight):
    return lambda x, step: torch.tanh(weight * x + SIGMAS[step])


def noise(step):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


X = noise(100)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kind)
@pytest.mark.parametrize("window", [(0, 1), (1, 3)])
def test_a_rollout_is_the_schedulers(kernel, window):
    """FlowMatchSDEScheduler, itself held to closed forms, stepped with the same noise."""
    x0, steps = sde.rollout(network(0.5), X, kernel, window, noise)
    scheduler = FlowMatchSDEScheduler(shift=5.0, kind=kernel.kind, noise_level=kernel.noise_level, noise_window=window)
    scheduler.set_timesteps(6)
    x = X
    for i, t in enumerate(scheduler.timesteps):
        v = network(0.5)(x, i)
        if i in window:
            mean, std = flow.transition(
                kernel.kind, x, v, SIGMAS[i], SIGMAS[i + 1], kernel.noise_level, sigma_cap=SIGMAS[1]
            )
            out = scheduler.step(v, t, x, next_sample=mean + std * noise(i))
            step = steps[i]
            assert torch.equal(step.x, x) and torch.equal(step.x_next, out.prev_sample) and step.std == out.std
            assert torch.equal(step.mean, out.mean) and torch.equal(step.log_prob, out.log_prob)
        else:
            out = scheduler.step(v, t, x)
        x = out.prev_sample
    assert steps.keys() == set(window) and torch.equal(x0, x)


def test_without_a_window_it_is_diffusers_euler():
    x0, steps = sde.rollout(network(0.5), X, KERNELS[0], (), noise)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=SIGMAS[:-1].double().numpy())
    x = X
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(network(0.5)(x, i), t, x).prev_sample
    assert not steps
    torch.testing.assert_close(x0, x)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kind)
def test_the_score_of_the_same_weights_is_the_same_bits_and_has_a_gradient(kernel):
    _, steps = sde.rollout(network(0.5), X, kernel, (1, 2), noise)
    weight = torch.tensor(0.5, requires_grad=True)
    for i, step in steps.items():
        mean, log_prob = sde.score(network(weight), step, i, kernel)
        assert torch.equal(mean, step.mean) and torch.equal(log_prob, step.log_prob)
        (gradient,) = torch.autograd.grad(log_prob.sum(), weight)
        assert gradient != 0
        _, other = sde.score(network(0.51), step, i, kernel)
        assert (other != step.log_prob).all()


def test_a_rollout_may_start_at_its_window():
    kernel, window = KERNELS[0], (2, 3)
    before = reward_flow.rollout(network(0.5), X, SIGMAS[:3], keep=()).x0
    complete, steps = sde.rollout(network(0.5), X, kernel, window, noise)
    rest, again = sde.rollout(network(0.5), before, kernel, window, noise, start=2)
    assert torch.equal(complete, rest) and all(torch.equal(steps[i].x_next, again[i].x_next) for i in window)


def test_a_step_moves_with_all_that_it_holds():
    _, steps = sde.rollout(network(0.5), X, KERNELS[0], (1,), noise)
    moved = steps[1].to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.std == steps[1].std


def test_what_is_only_measured_keeps_no_graph():
    has_graph = []

    def reference(x, step):
        has_graph.append(torch.is_grad_enabled())
        return x

    sde.kl_floor(reference, X, KERNELS[0], (1, 2))
    sde.reference_mean(reference, KERNELS[0], X, 1)
    assert has_graph and not any(has_graph)
