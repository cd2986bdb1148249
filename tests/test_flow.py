"""Schedules and Euler steps against closed forms and diffusers."""

import math

import pytest
import torch

from rewardfl import flow


def test_sigmas_are_lightnings_schedule():
    # Wan2.2-Lightning's trained timesteps, 8 steps and 4 steps, shift 5
    expected = [1000, 972.2222, 937.5, 892.8571, 833.3333, 750, 625, 416.6667, 0]
    assert flow.linear_sigmas(8, 5.0).mul(1000).tolist() == pytest.approx(expected, abs=1e-3)
    assert flow.linear_sigmas(4, 5.0).mul(1000).tolist() == pytest.approx([1000, 937.5, 833.3333, 625, 0], abs=1e-3)


def test_sigmas_are_rounded_once_from_float64():
    sigmas = flow.linear_sigmas(40, 5.0)
    assert sigmas.dtype == torch.float32
    for i, sigma in enumerate(sigmas.tolist()):
        s = 1 - i / 40
        exact = torch.tensor(5 * s / (1 + 4 * s), dtype=torch.float64)
        assert sigma == pytest.approx(float(exact), abs=6e-8)
    with pytest.raises(ValueError, match="num_steps >= 1"):
        flow.linear_sigmas(0, 5.0)


def test_euler_lands_on_gaussian_data():
    """Data N(m, s^2) have the exact velocity (noise - x0 given x); integrating it must give N(m, s^2)."""
    mean, std = 1.5, 0.4
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    sigmas = flow.linear_sigmas(250, 1.0)
    for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
        variance = (1 - sigma) ** 2 * std**2 + sigma**2
        posterior_noise = sigma * (x - (1 - sigma) * mean) / variance
        posterior_x0 = mean + (1 - sigma) * std**2 * (x - (1 - sigma) * mean) / variance
        x = flow.euler_step(x, posterior_noise - posterior_x0, sigma, sigma_next)
    assert float(x.mean()) == pytest.approx(mean, abs=0.02)
    assert float(x.std()) == pytest.approx(std, abs=0.02)


def test_predict_x0_inverts_the_mixture():
    x0, noise, sigma = torch.randn(2, 3), torch.randn(2, 3), torch.tensor(0.6)
    x = (1 - sigma) * x0 + sigma * noise
    torch.testing.assert_close(flow.predict_x0(x, noise - x0, sigma), x0)


def test_velocity_kl_is_a_gaussian_kl_per_dimension():
    v, v_ref, sigma, h = torch.randn(2, 5, 7), torch.randn(2, 5, 7), torch.tensor(0.7), 0.2
    ours = flow.velocity_kl(v, v_ref, sigma)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(h * v, h * sigma), normal(h * v_ref, h * sigma))
    torch.testing.assert_close(ours, kl.flatten(1).mean(1))
    assert math.isclose(float(flow.velocity_kl(v, v, sigma).sum()), 0.0)
