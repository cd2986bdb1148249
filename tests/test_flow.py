"""Schedules and Euler steps against closed forms and diffusers."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rewardfl import flow


def test_sigmas_are_lightnings_schedule():
    # Wan2.2-Lightning's trained timesteps, 8 steps and 4 steps, shift 5
    expected = [1000, 972.2222, 937.5, 892.8571, 833.3333, 750, 625, 416.6667, 0]
    assert flow.linear_sigmas(8, 5.0).mul(1000).tolist() == pytest.approx(expected, abs=1e-3)
    assert flow.linear_sigmas(4, 5.0).mul(1000).tolist() == pytest.approx([1000, 937.5, 833.3333, 625, 0], abs=1e-3)
    sigmas = flow.linear_sigmas(40, 5.0)
    assert sigmas.dtype == torch.float32 and sigmas.tolist() == pytest.approx(exact_sigmas(40, 5.0), abs=6e-8)


def test_velocity_kl_is_a_gaussian_kl_per_dimension():
    v, v_ref, sigma, h = torch.randn(2, 5, 7), torch.randn(2, 5, 7), torch.tensor(0.7), 0.2
    ours = flow.velocity_kl(v, v_ref, sigma)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(h * v, h * sigma), normal(h * v_ref, h * sigma))
    torch.testing.assert_close(ours, kl.flatten(1).mean(1))
    assert math.isclose(float(flow.velocity_kl(v, v, sigma).sum()), 0.0)


# ---- stochastic transitions ----

SIGMAS = flow.linear_sigmas(10, 5.0)
STOCHASTIC = ["flow", "dance", "cps"]


def step_arguments(i, noise_level=0.7, sigmas=SIGMAS):
    return sigmas[i], sigmas[i + 1], noise_level, sigmas[1]


def exact_sigmas(steps, shift):
    """linear_sigmas before they are rounded to float32."""
    return [shift * s / (1 + (shift - 1) * s) for s in (1 - i / steps for i in range(steps + 1))]


def batch(dtype=torch.float32, size=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 5, 7, generator=generator, dtype=dtype) for _ in range(3)]


def gaussian_velocity(x, sigma, mean, std):
    """The exact velocity, noise - x0 given x, of data N(mean, std^2)."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    centred = x - (1 - sigma) * mean
    return (sigma - (1 - sigma) * std**2) * centred / variance - mean


def propagated(sde, noise_level, steps, shift, mean=1.5, std=0.4):
    """(mean, std) of the last sample, data N(mean, std^2): their exact velocity is affine in x, and so is a step."""
    sigmas = exact_sigmas(steps, shift)
    m, variance = 0.0, 1.0
    for i in range(steps):
        c = flow.coefficients(sde, *step_arguments(i, noise_level, sigmas))
        at_zero = gaussian_velocity(0.0, sigmas[i], mean, std)
        gain = c.x + c.velocity * (gaussian_velocity(1.0, sigmas[i], mean, std) - at_zero)
        m, variance = gain * m + c.velocity * at_zero, gain**2 * variance + c.std**2
    return m, math.sqrt(variance)


@pytest.mark.parametrize(
    ("sde", "noise_level"), [("ode", 0.0), ("flow", 0.3), ("flow", 0.7), ("dance", 0.3), ("dance", 0.7)]
)
def test_more_steps_come_to_the_data(sde, noise_level):
    """Four times the steps, a quarter of the error in std, or less; the mean is exact at any number."""
    moments = [propagated(sde, noise_level, steps, 5.0) for steps in (100, 400, 1600)]
    assert [m for m, _ in moments] == pytest.approx([1.5] * 3, abs=1e-9)
    errors = [abs(std / 0.4 - 1) for _, std in moments]
    assert errors[0] / errors[1] > 3.7 and errors[1] / errors[2] > 3.7 and errors[2] < 0.004


@pytest.mark.parametrize(("noise_level", "low"), [(0.3, 0.028), (0.7, 0.148), (1.0, 0.293)])
def test_cps_does_not_come_to_the_data(noise_level, low):
    """It draws the same share of the noise anew at each of ever more steps: std ends low, at any number of them."""
    errors = [1 - propagated("cps", noise_level, steps, 1.0)[1] / 0.4 for steps in (800, 3200, 12800)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(low, abs=2e-3) and errors[1] - errors[2] < 2e-3
    assert propagated("cps", noise_level, 800, 1.0)[0] == pytest.approx(1.5, abs=1e-9)


@pytest.mark.parametrize(
    ("sde", "step", "mean", "std", "score"),
    [
        ("flow", 0, -67.304455, 0.70000, -0.63483),
        ("flow", 5, -81.892221, 0.35000, 0.04655),
        ("dance", 0, -88.359875, 0.13229, 0.81146),
        ("dance", 5, -86.738309, 0.20207, 0.52324),
        ("cps", 0, -42.215381, 0.85918, -0.28622),
        ("cps", 5, -56.761218, 0.59400, -0.16132),
    ],
)
def test_steps_are_those_of_the_published_code(sde, step, mean, std, score):
    """Numbers computed by flow_grpo, DanceGRPO, FlowCPS, Flow-Factory and UniRL (which agree) from the same tensors.

    Shift 3, 10 steps, noise level 0.7; the sum of the mean, std, and the first sample's score. The tensors are stored:
    torch.randn's last digits depend on the processor.
    """
    tensors = load_file(Path(__file__).parent / "published_steps.safetensors")
    x, v, noise = (tensors[name].double() for name in ("x", "v", "noise"))
    our_mean, our_std = flow.transition(sde, x, v, *step_arguments(step, 0.7, flow.linear_sigmas(10, 3.0)))
    assert float(our_mean.sum()) == pytest.approx(mean, abs=2e-6)
    assert our_std == pytest.approx(std, abs=5e-6)
    scores = flow.log_prob(sde, x - 0.05 * v + 0.1 * noise, our_mean, our_std)
    assert float(scores[0]) == pytest.approx(score, abs=6e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_kernels_are_the_published_formulas(shift):
    """Flow-GRPO's mean with std_dev_t, DanceGRPO's with the score, FlowCPS's with x0 and x1; scores, in float64."""
    x, v, noise = batch(torch.float64)
    sigmas, a = exact_sigmas(10, shift), 0.7
    for i in range(1, 10):
        sigma, after = sigmas[i], sigmas[i + 1]
        dt = after - sigma
        std_dev_t = math.sqrt(sigma / (1 - sigma)) * a
        drift = v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
        pull = -(x - (x - sigma * v) * (1 - sigma)) / sigma**2
        std = after * math.sin(a * math.pi / 2)
        expected = {
            "flow": (x * (1 + std_dev_t**2 / (2 * sigma) * dt) + drift, std_dev_t * math.sqrt(-dt)),
            "dance": (x + dt * v - 0.5 * a**2 * pull * dt, a * math.sqrt(-dt)),
            "cps": ((x - sigma * v) * (1 - after) + (x + (1 - sigma) * v) * math.sqrt(after**2 - std**2), std),
        }
        for sde, (mean, std) in expected.items():
            our_mean, our_std = flow.transition(sde, x, v, *step_arguments(i, a, sigmas))
            torch.testing.assert_close(our_mean, mean, rtol=1e-12, atol=1e-12)
            assert our_std == pytest.approx(std, rel=1e-12)
            if std > 0:
                squares = (noise**2).flatten(1).mean(1)
                score = -(std**2) * squares if sde == "cps" else -squares / 2 - math.log(std * math.sqrt(2 * math.pi))
                ours = flow.log_prob(sde, mean + std * noise, our_mean, our_std)
                torch.testing.assert_close(ours, score, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_a_ceiling_on_the_noise_lowers_its_level(sde):
    """LongCat: g is at most max_std / sqrt(-dt); below the ceiling nothing changes."""
    for i in range(9):
        free = flow.coefficients(sde, *step_arguments(i, 0.7))
        assert flow.coefficients(sde, *step_arguments(i, 0.7), 1.01 * free.std) == free
        held = flow.coefficients(sde, *step_arguments(i, 0.7), 0.5 * free.std)
        assert held.std == pytest.approx(0.5 * free.std)
        lower = flow.coefficients(sde, *step_arguments(i, 0.35))  # std is proportional to the level
        assert (held.x, held.velocity) == pytest.approx((lower.x, lower.velocity))


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_without_noise_every_kind_is_the_euler_step(sde):
    x, v, _ = batch()
    for i in range(10):
        euler = flow.euler_step(x, v, SIGMAS[i], SIGMAS[i + 1])
        for arguments in ((sde, x, v, *step_arguments(i, 0.0)), ("ode", x, v, *step_arguments(i))):
            mean, std = flow.transition(*arguments)
            assert torch.equal(mean, euler) and std == 0
        mean, std = flow.transition(sde, x, v, *step_arguments(i, 1e-4))
        torch.testing.assert_close(mean, euler, rtol=0, atol=1e-6)
        assert 0 <= std < 2e-4


def test_dt_is_the_float32_difference_of_float32_sigmas():
    sigma, after = torch.tensor(0.7), torch.tensor(0.1)
    dt = flow.coefficients("dance", sigma, after, 0.7, 0.9).dt
    assert dt == float(after - sigma) != float(after) - float(sigma)
    for sde in STOCHASTIC:  # the cps formula would round 0.3 - 0.9 differently
        assert flow.coefficients(sde, 0.9, 0.3, 0.0, 0.9) == flow.Coefficients(
            x=1.0, velocity=0.3 - 0.9, std=0.0, dt=0.3 - 0.9
        )


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_log_prob_and_kl_are_torchs(sde):
    x, v, noise = batch(torch.float64)
    mean, std = flow.transition(sde, x, v, *step_arguments(3))
    other, _ = flow.transition(sde, x, v + 0.1 * noise, *step_arguments(3))
    x_next = flow.sample(mean, std, noise)
    normal = torch.distributions.Normal(mean, std)
    ours, exact = flow.log_prob(sde, x_next, mean, std), dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, normal.log_prob(x_next).flatten(1).mean(1), **exact)
    kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(other, std))
    torch.testing.assert_close(flow.transition_kl(mean, other, std), kl.flatten(1).mean(1), **exact)
    assert flow.transition_kl(mean, other, std)[0] != flow.transition_kl(mean, other, std)[1]  # by sample


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_a_batch_of_two_is_two_of_one_bit_for_bit(sde):
    x, v, noise = batch()
    for i in range(9):
        mean, std = flow.transition(sde, x, v, *step_arguments(i))
        x_next = flow.sample(mean, std, noise)
        log_prob = flow.log_prob(sde, x_next, mean, std)
        for b in (slice(0, 1), slice(1, 2)):
            mean_b, std_b = flow.transition(sde, x[b], v[b], *step_arguments(i))
            assert torch.equal(flow.sample(mean_b, std_b, noise[b]), x_next[b])
            assert torch.equal(flow.log_prob(sde, x_next[b], mean_b, std_b), log_prob[b])
        assert mean.dtype == x_next.dtype == torch.float32
        x = x_next


def test_log_prob_resolves_what_a_clip_range_of_1e_6_asks_for():
    """At 1.58 float32 has a grain of 1.2e-7; the mean over elements is taken, and kept, in float64."""
    generator = torch.Generator().manual_seed(0)
    mean, noise, direction = (torch.randn(8, 100_000, generator=generator) for _ in range(3))
    x_next = flow.sample(mean, 0.05, noise)
    moved = mean + 1e-5 * direction
    ratio = flow.log_prob("flow", x_next, moved, 0.05) - flow.log_prob("flow", x_next, mean, 0.05)
    before, after = ((x_next - m).double().square().mean(1) / (2 * 0.05**2) for m in (mean, moved))
    torch.testing.assert_close(ratio, before - after, rtol=0, atol=1e-9)
    assert ratio.abs().max() < 1e-5


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_gradient_of_log_prob(sde):
    x, v, noise = batch(torch.float64)
    mean, std = flow.transition(sde, x, v, *step_arguments(3))
    x_next = flow.sample(mean, std, noise)

    def score(velocity):
        return flow.log_prob(sde, x_next, *flow.transition(sde, x, velocity, *step_arguments(3)))

    velocity = (v + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(score, velocity, eps=1e-5, atol=1e-9)

    on_policy = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(on_policy).sum(), on_policy)
    rms_noise = noise.square().mean().sqrt()
    rms = gradient.square().mean().sqrt() * noise[0].numel() / rms_noise
    assert float(rms) == pytest.approx(flow.gradient_weight(sde, flow.coefficients(sde, *step_arguments(3))), rel=1e-9)


def test_gradient_weights_over_the_schedule():
    """Measured from the published code (shift 5, 10 steps): the last flow step pulls 46 times as hard as the first."""

    def weights(sde, noise_level, steps=10):
        steps = [flow.coefficients(sde, *step_arguments(i, noise_level)) for i in range(steps)]
        return [flow.gradient_weight(sde, step) for step in steps]

    flow_weights, dance_weights = weights("flow", 0.7), weights("dance", 0.3)
    assert (flow_weights[0], flow_weights[9]) == pytest.approx((0.031, 1.43), abs=5e-3)
    assert (dance_weights[0], dance_weights[9]) == pytest.approx((0.49, 2.15), abs=5e-3)
    assert flow_weights == sorted(flow_weights)
    cps_weights = weights("cps", 0.7, 9)
    assert max(cps_weights) / min(cps_weights) < 7


@pytest.mark.parametrize(
    ("sde", "noise_level", "expected"),
    [
        ("flow", 0.7, {0: 1.036, 1: 1.054, 2: 1.021, 6: 1.026, 7: 1.054, 8: 1.198}),
        ("dance", 0.3, {0: 1.000, 7: 1.004, 8: 1.026}),
        ("cps", 0.7, dict.fromkeys(range(9), 1.000)),
        ("ode", 0.7, dict.fromkeys(range(9), 1.000)),
    ],
)
def test_noise_scale_errors_over_the_schedule(sde, noise_level, expected):
    """Measured from the published code (shift 5): why Flow-SDE rollouts look noisy, and its late steps worst."""
    steps = [step_arguments(i, noise_level) for i in range(9)]
    errors = [flow.noise_scale_error(flow.coefficients(sde, *step), *step[:2]) for step in steps]
    assert [errors[i] for i in expected] == pytest.approx([*expected.values()], abs=6e-4)
