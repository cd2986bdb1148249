"""The losses of forward-process reinforcement against their gradients in closed form, and learning."""

import pytest
import torch

from rewardfl import flow, forward_rl

WEIGHTINGS = ("uniform", "sigma", "sigma_squared", "huber", "generalised_huber")
SIGMA, LARGEST = torch.tensor(0.6, dtype=torch.float64), 5.0


@pytest.fixture
def case():
    """Three samples of 24 elements: advantages of both signs and none."""
    generator = torch.Generator().manual_seed(3)
    x0, noise, v, gap = (torch.randn(3, 2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    return {
        "x0": x0, "target": noise - x0, "x": flow.add_noise(x0, noise, SIGMA), "old": v, "gap": gap,
        "advantage": torch.tensor([1.7, -2.4, 0.0], dtype=torch.float64),
    }  # fmt: skip


def column(values):
    return values.view(-1, 1, 1, 1)


def gradient(loss, velocity):
    velocity = velocity.clone().requires_grad_()
    return torch.autograd.grad(loss(velocity).sum(), velocity)[0]


def nft(case, mix):
    def loss(velocity):
        return forward_rl.nft_loss(
            velocity, case["old"], case["x"], case["x0"], SIGMA, case["advantage"], mix=mix, largest=LARGEST
        )

    return loss


def awm(case, weighting, clip_range=1.0):
    old = forward_rl.awm_log_prob(case["old"], case["target"], SIGMA, weighting)

    def loss(velocity):
        log_ratio = forward_rl.awm_log_prob(velocity, case["target"], SIGMA, weighting) - old
        return forward_rl.awm_loss(log_ratio, case["advantage"], clip_range)

    return loss


def test_rvm_gradient_is_the_advantage_times_the_misfit(case):
    velocity = case["old"] + case["gap"]
    expected = column(case["advantage"]) * (velocity - case["target"]) / 24
    actual = gradient(lambda v: forward_rl.rvm_loss(v, case["target"], case["advantage"]), velocity)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    loss = forward_rl.rvm_loss(velocity, case["target"], case["advantage"])
    assert (loss >= 0).all() and loss[2] == 0  # bounded, of a negative advantage, too


@pytest.mark.parametrize("mix", [1.0, 0.1])
def test_nft_gradient_is_exact_at_any_distance(case, mix):
    """reference/forward.md section 2: s 2 Amax / D [r (v+ - u) / mean|v+ - u| - (1 - r) (v- - u) / mean|v- - u|]."""
    velocity, u = case["old"] + case["gap"], case["target"]
    r = column((case["advantage"] / (2 * LARGEST) + 0.5).clamp(0, 1))
    positive = mix * velocity + (1 - mix) * case["old"] - u
    negative = (1 + mix) * case["old"] - mix * velocity - u
    pulls = [misfit / misfit.abs().mean((1, 2, 3), keepdim=True) for misfit in (positive, negative)]
    expected = SIGMA * 2 * LARGEST / 24 * (r * pulls[0] - (1 - r) * pulls[1])
    torch.testing.assert_close(gradient(nft(case, mix), velocity), expected, rtol=1e-9, atol=1e-12)


def test_all_objectives_are_one_family_at_the_old_policy(case):
    misfit, loss = case["old"] - case["target"], forward_rl.distance(case["old"], case["target"])
    strengths = {
        "rvm": torch.ones(3),
        "nft": 2 * SIGMA / misfit.abs().mean((1, 2, 3)),
        "best": torch.full((3,), 2.0),
        "uniform": torch.full((3,), 2.0),
        "sigma": 2 * SIGMA.expand(3),
        "sigma_squared": 2 * SIGMA.expand(3) ** 2,
        "huber": SIGMA * loss**-0.5,
        "generalised_huber": 2 * SIGMA * loss**-0.75,
    }
    losses = {name: awm(case, name) for name in WEIGHTINGS}
    losses["best"] = lambda v: case["advantage"] * forward_rl.distance(v, case["target"])
    losses |= {"rvm": lambda v: forward_rl.rvm_loss(v, case["target"], case["advantage"]), "nft": nft(case, 0.3)}
    for name, g in strengths.items():
        expected = column(case["advantage"] * g) * misfit / 24
        torch.testing.assert_close(gradient(losses[name], case["old"]), expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_awm_gradients_are_those_of_finite_differences(case, weighting):
    velocity = (case["old"] + 0.1 * case["gap"]).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: forward_rl.awm_log_prob(v, case["target"], SIGMA, weighting), velocity)
    assert torch.autograd.gradcheck(awm(case, weighting), velocity)


@pytest.mark.parametrize("weighting", ["huber", "generalised_huber"])
def test_awm_is_flat_at_a_perfect_velocity(case, weighting):
    assert forward_rl.awm_log_prob(case["target"], case["target"], SIGMA, weighting).abs().max() < 1e-12
    pull = gradient(lambda v: forward_rl.awm_log_prob(v, case["target"], SIGMA, weighting), case["target"])
    assert (pull == 0).all()


def test_awm_clips_on_the_side_of_the_advantage():
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64).requires_grad_()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    (pull,) = torch.autograd.grad(forward_rl.awm_loss(log_ratio, advantage, 0.2).sum(), log_ratio)
    ratio = log_ratio.detach().exp()
    torch.testing.assert_close(pull, -advantage * ratio * torch.tensor([0.0, 1, 1, 0]))


def test_best_is_the_first_of_the_highest_valid_rewards():
    bad = torch.nan
    rewards = [[1, 3, 3], [-2, -1, -3], [4, bad, 2], [1, 1 + 1e-7, 1], [0, 0, 0], [5, bad, bad], [bad, bad, bad]]
    best = forward_rl.best_advantages(torch.tensor(rewards).double(), ~torch.tensor(rewards).isnan())
    assert best.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 0], *[[0, 0, 0]] * 4]


def test_a_pair_is_the_best_and_the_worst_valid_video():
    bad = torch.nan
    rewards = torch.tensor([[1, 3, 3, 0, 0], [4, bad, 2, bad, 3], [1, 1 + 1e-7, 1, bad, bad], [5, bad, bad, bad, bad]])
    pairs = forward_rl.pair_advantages(rewards.double(), ~rewards.isnan())
    assert pairs.tolist() == [[0, 1, 0, -1, 0], [1, 0, -1, 0, 0], [0] * 5, [0] * 5]


def published_dpo(v, u, reference, beta):
    """Diffusion-DPO, eq. 14, of one pair: v, u, reference are (chosen, rejected)."""
    error = [((v[i] - u[i]) ** 2).mean() - ((reference[i] - u[i]) ** 2).mean() for i in (0, 1)]
    return -torch.log(torch.sigmoid(-beta / 2 * (error[0] - error[1])))


@pytest.mark.parametrize("start", [True, False], ids=["start", "moved"])
def test_dpo_is_the_published_loss_of_each_pair(case, start):
    """Two pairs and two samples without one, each sample in its own forward pass."""
    beta, advantage = 7.0, torch.tensor([-1.0, 1, 0, 0, 1, -1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    u, reference, gap = (torch.randn(6, 2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    velocity = (reference + (0 if start else 0.3) * gap).requires_grad_()
    places = [(1, 0), (4, 5)]  # chosen and rejected
    losses = [published_dpo(velocity[[*p]], u[[*p]], reference[[*p]], beta) for p in places]
    (expected,) = torch.autograd.grad(sum(losses), velocity)

    change = (forward_rl.distance(velocity, u) - forward_rl.distance(reference, u)).detach()
    logit = forward_rl.pair_logits(change.view(3, 2, 1), advantage.view(3, 2), beta).flatten()
    passes = [forward_rl.dpo_loss(velocity[[i]], u[[i]], advantage[[i]], logit[[i]], beta) for i in range(6)]
    (actual,) = torch.autograd.grad(sum(passes).sum() / 2, velocity)  # the mean over a pair's two samples
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    values, first, second = torch.cat(passes).tolist(), *(loss.item() for loss in losses)
    assert values == pytest.approx([first, first, 0, 0, second, second], rel=1e-9)
    if start:
        assert values[0] == pytest.approx(torch.tensor(2.0).log().item()) and values[2] == 0
        pull = column(advantage) * beta / 2 * (velocity - u) / 24
        torch.testing.assert_close(actual, pull.detach(), rtol=1e-9, atol=1e-12)


def test_nft_weight_is_within_0_and_1():
    weights = forward_rl.nft_weight(torch.tensor([-9.0, -5, 0, 2.5, 5, 9]), 5.0)
    assert weights.tolist() == [0, 0, 0.5, 0.75, 1, 1]


def test_the_old_policys_published_schedules():
    """scripts/train_nft_sd3.py: return_decay."""
    first = {"start": 0, "rate": 0.001, "largest": 0.5}
    second = {"start": 75, "rate": 0.0075, "largest": 0.999}
    assert [forward_rl.old_decay(n, **first) for n in (0, 1, 200, 500, 900)] == pytest.approx([0, 0.001, 0.2, 0.5, 0.5])
    assert [forward_rl.old_decay(n, **second) for n in (0, 74, 75, 95, 900)] == pytest.approx([0, 0, 0, 0.15, 0.999])


def test_deviation_is_0_only_for_equal_policies(case):
    assert forward_rl.deviation(case["old"], case["old"]) == 0
    assert forward_rl.deviation(1.02 * case["old"], case["old"]) == pytest.approx(0.02)
