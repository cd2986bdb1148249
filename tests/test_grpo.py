"""Advantages and objectives against independent arithmetic, the ratio, and learning."""

import math
import statistics

import numpy as np
import pytest
import torch
from test_group_plan import epoch_of

from rewardfl import flow, grpo, sde


def random_rewards(groups=5, size=4, rewards=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (groups * size,) if rewards is None else (groups * size, rewards)
    ids = torch.arange(groups).repeat_interleave(size)[torch.randperm(groups * size, generator=generator)]
    return 3 + torch.randn(shape, generator=generator), ids * 10 - 7  # ids need be neither dense nor sorted


def plain(rewards, ids, std, clip=5.0, valid=None):
    """The same advantages with Python lists and the statistics module."""
    rewards, ids = rewards.double().tolist(), ids.tolist()
    valid = [True] * len(ids) if valid is None else valid.tolist()
    out = []
    for i in range(len(ids)):
        peers = [rewards[j] for j in range(len(ids)) if ids[j] == ids[i] and valid[j]]
        if not valid[i] or len(set(peers)) < 2:
            out.append(0.0)
            continue
        a = rewards[i] - statistics.fmean(peers)
        if std == "group":
            a /= statistics.pstdev(peers) + 1e-4
        if std == "global":
            a /= statistics.pstdev([r for r, ok in zip(rewards, valid, strict=True) if ok]) + 1e-4
        if std == "max_group":
            groups = [[rewards[j] for j in range(len(ids)) if ids[j] == i and valid[j]] for i in set(ids)]
            a /= max(statistics.pstdev(group) for group in groups if group) + 1e-4
        out.append(max(-clip, min(clip, a)))
    return out


@pytest.mark.parametrize("std", ["group", "global", "max_group", "none"])
@pytest.mark.parametrize("clip", [5.0, 0.8])
def test_advantages_are_the_textbooks(std, clip):
    rewards, ids = random_rewards()
    valid = torch.ones(20, dtype=torch.bool)
    valid[[0, 3, 8]] = False
    rewards[ids == -7] = 0.1  # a group that does not vary
    rewards[0] = math.nan
    ours, logged = grpo.advantages(rewards, ids, group_size=4, std=std, clip=clip, valid=valid)
    assert ours.dtype == torch.float32
    assert ours.tolist() == pytest.approx(plain(rewards, ids, std, clip, valid), abs=1e-6)
    assert float(ours.abs().max()) == pytest.approx(clip) if clip < 1 else float(ours.abs().max()) > 0.8
    assert logged["reward/valid_fraction"] == pytest.approx(17 / 20)
    assert logged["reward/mean"] == pytest.approx(statistics.fmean(rewards[valid].tolist()), abs=1e-6)
    per_group = [statistics.pstdev(rewards[valid & (ids == i)].tolist()) for i in ids.unique()]
    assert logged["reward/std_in_group"] == pytest.approx(statistics.fmean(per_group), abs=1e-6)
    assert logged["group/zero_variance"] == pytest.approx(1 / 5)


def test_invalid_samples_count_nowhere():
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    rewards = torch.tensor([1.0, 2, 3, math.inf, 5, math.nan, math.nan, math.nan, *[math.nan] * 4])
    valid = rewards.isfinite()
    for std in ("group", "global", "max_group", "none"):
        ours, logged = grpo.advantages(rewards, ids, group_size=4, valid=valid, std=std)
        assert ours[:3].sum() == pytest.approx(0, abs=1e-6) and ours[0] < 0 < ours[2]
        assert ours[3:].tolist() == [0] * 9  # one valid member has nobody to be compared with
        assert logged["group/zero_variance"] == pytest.approx(2 / 3)
        assert logged["reward/mean"] == pytest.approx(11 / 4)
        assert logged["reward/std_in_group"] == pytest.approx(math.sqrt(2 / 3) / 2)  # group 2 has no reward at all
        none, logged = grpo.advantages(rewards, ids, group_size=4, valid=torch.zeros_like(valid), std=std)
        assert none.tolist() == [0] * 12 and math.isnan(logged["reward/mean"])
        assert math.isnan(logged["reward/std_in_group"]) and logged["reward/valid_fraction"] == 0


@pytest.mark.parametrize("reward", [0.1, -0.1])
def test_equal_rewards_give_exactly_nothing(reward):
    rewards = torch.full((3,), reward, dtype=torch.float64)
    assert rewards.mean() != reward  # rounded
    ours, logged = grpo.advantages(rewards, torch.zeros(3, dtype=torch.long), group_size=3, std="none")
    assert ours.tolist() == [0, 0, 0] and logged["group/zero_variance"] == 1


def test_several_rewards_are_summed_before_or_after_normalising():
    rewards, ids = random_rewards(rewards=2)
    rewards[:, 1] *= 100
    weights = (1.0, 0.5)
    summed, logged = grpo.advantages(rewards, ids, group_size=4, weights=weights)
    total = rewards.double() @ torch.tensor(weights).double()
    assert summed.tolist() == pytest.approx(plain(total, ids, "group"), abs=1e-5)
    assert logged["reward/mean"] == pytest.approx(float(total.mean()))
    for std, clip in (("group", 1e9), ("global", 1e9), ("none", 1e9), ("group", 0.3)):
        settings = {"combine": "per_reward", "clip": clip, "std": std}
        apart, _ = grpo.advantages(rewards, ids, group_size=4, weights=weights, **settings)
        columns = [plain(rewards[:, k], ids, std, 1e9) for k in range(2)]
        expected = [max(-clip, min(clip, a + 0.5 * b)) for a, b in zip(*columns, strict=True)]  # the sum is clipped
        assert apart.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-4)
    # a group is idle when no reward varies: of two where one varies, the other adds exactly nothing
    flat, ids = torch.tensor([[0.1, 1.0], [0.1, 2.0], [0.3, 7.0], [0.3, 7.0]]), torch.tensor([0, 0, 1, 1])
    ours, logged = grpo.advantages(flat, ids, group_size=2, weights=(1.0, 2.0), combine="per_reward")
    assert ours.tolist() == pytest.approx([-2, 2, 0, 0], abs=1e-3) and logged["group/zero_variance"] == 0.5


def gaussian_log_prob(x, mean, std):
    return torch.distributions.Normal(mean, std).log_prob(x).flatten(1).mean(1)


def transition(batch=6, shape=(3, 4), change=0.3, std=0.4, seed=0, dtype=torch.float64):
    """x_next drawn from the old policy, and the new policy's mean, with graph."""
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(batch, *shape, generator=generator, dtype=dtype)

    old_mean, eps = noise(), noise()
    mean = (old_mean + change * std * noise()).requires_grad_()
    return mean, old_mean, std, old_mean + std * eps, eps


RANGE = dict(clip_low=0.05, clip_high=0.1)


def policy_loss(
    objective, log_prob, old_log_prob, advantage, *, clip_low, clip_high, mean=None, old_mean=None, std=1.0, dt=None,
    normalised=True, reference_mean=None, kl_weight=0.0,
):  # fmt: skip
    """(loss, what policy_statistics takes) of one step, as train_flow_grpo.py has it (test_train_flow_grpo.py)."""
    mean = log_prob[:, None] if mean is None else mean
    step = sde.Step(x=mean, x_next=mean, mean=old_mean, std=std, log_prob=old_log_prob)
    ratio = grpo.log_ratio(objective, log_prob, mean, step, "flow" if normalised else "cps").exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)).mean()
    loss = loss / abs(dt) if objective == "guard" else loss
    kl = torch.zeros_like(log_prob)
    if kl_weight != 0:
        kl = flow.transition_kl(mean, reference_mean, std)
        loss = loss + kl_weight * kl.mean()
    samples = {"advantage": advantage, "ratio": ratio, "kl": kl, "log_prob": log_prob, "old_log_prob": old_log_prob}
    samples = {name: value.detach() for name, value in samples.items()}
    return loss, samples | {"clipped": grpo.clip_mask(samples["ratio"], advantage, clip_low, clip_high)}


def test_clip_is_the_textbook_formula():
    mean, old_mean, std, x_next, _ = transition(change=0.6)
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 3.0], dtype=torch.float64)
    log_prob, old = gaussian_log_prob(x_next, mean, std), gaussian_log_prob(x_next, old_mean, std)
    loss, samples = policy_loss("clip", log_prob, old, advantage, **RANGE)
    (ours,) = torch.autograd.grad(loss, mean, retain_graph=True)
    ratio = (log_prob - old).exp()
    objective = torch.minimum(ratio * advantage, ratio.clip(0.95, 1.1) * advantage).mean()
    (textbook,) = torch.autograd.grad(-objective, mean)
    torch.testing.assert_close(loss, -objective)
    torch.testing.assert_close(ours, textbook)
    silent = (textbook == 0).flatten(1).all(1) & (advantage != 0)
    assert (samples["clipped"] == silent).all() and 0 < silent.sum() < 5
    logged = grpo.policy_statistics(samples)
    assert logged["policy/approximate_kl"] == pytest.approx(float(((log_prob - old).detach() ** 2 / 2).mean()))


@pytest.mark.parametrize("normalised", [True, False])
def test_guard_is_the_mean_of_drift_times_noise(normalised):
    """Against numpy, which sees the rollout's noise and no log-probability at all."""
    mean, old_mean, std, x_next, eps = transition(change=1.0)
    dt, advantage = -0.05, torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 3.0], dtype=torch.float64)

    def score(m):  # CPS leaves out the normaliser
        return gaussian_log_prob(x_next, m, std) if normalised else -((x_next - m) ** 2).flatten(1).mean(1)

    loss, samples = policy_loss(
        "guard", score(mean), score(old_mean), advantage,
        clip_low=0.02, clip_high=0.03, mean=mean, old_mean=old_mean, std=std, dt=dt, normalised=normalised,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, mean)
    drift, noise, a = (t.detach().numpy() for t in (mean - old_mean, eps, advantage))
    ratio = np.exp((drift * noise).mean((1, 2)))
    expected = np.maximum(-a * ratio, -a * np.clip(ratio, 0.98, 1.03)).mean() / 0.05
    alive = ~((a > 0) & (ratio > 1.03) | (a < 0) & (ratio < 0.98))
    slope = -(a * ratio * alive)[:, None, None] * noise / noise[0].size / 6 / 0.05
    np.testing.assert_allclose(samples["ratio"].numpy(), ratio, rtol=1e-12)
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-9, atol=1e-12)
    assert (samples["clipped"].numpy() == ~alive).all() and 0 < alive.sum() < 6


def test_the_plain_clip_silences_one_sign_at_size_and_guard_neither():
    """4096 dimensions and a change of 20 %: log r = -0.02 +- 0.003, so a clip range of 0.01 hears only A > 0."""
    mean, old_mean, std, x_next, _ = transition(batch=400, shape=(4096,), change=0.2, dtype=torch.float32)
    advantage = torch.tensor([1.0, -1.0]).repeat(200)
    log_prob, old = gaussian_log_prob(x_next, mean, std), gaussian_log_prob(x_next, old_mean, std)
    ranges = dict(clip_low=0.01, clip_high=0.01)
    _, plain_clip = policy_loss("clip", log_prob, old, advantage, **ranges)
    _, guard = policy_loss("guard", log_prob, old, advantage, **ranges, mean=mean, old_mean=old_mean, std=std, dt=-0.1)
    biased, centred = plain_clip["ratio"].log(), guard["ratio"].log()
    assert float(biased.mean()) == pytest.approx(-(0.2**2) / 2, rel=0.02)
    assert float(biased.std()) == pytest.approx(0.2 / 64, rel=0.1)
    assert float(centred.mean()) == pytest.approx(0, abs=4 * 0.4 * 0.2 / 64 / 20)  # 4 standard errors
    assert float(centred.std()) == pytest.approx(0.4 * 0.2 / 64, rel=0.1)
    logged = grpo.policy_statistics(plain_clip)
    assert logged["policy/clip_fraction_negative"] == 1 and logged["policy/clip_fraction_positive"] == 0
    logged = grpo.policy_statistics(guard)
    assert logged["policy/clip_fraction"] == 0 and logged["policy/ratio"] == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("sde", ["flow", "dance", "cps"])
@pytest.mark.parametrize("objective", ["clip", "guard"])
def test_the_first_update_is_reinforce(objective, sde):
    """A float32 network, rolled out and replayed: ratio exactly 1, the gradient of -mean(A * mean-form density)."""
    generator = torch.Generator().manual_seed(0)
    network = torch.nn.Linear(12, 12)
    x, noise = (torch.randn(6, 12, generator=generator) for _ in range(2))
    advantage = torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 3.0])
    arguments = (0.9, 0.8, 0.7, 0.95)
    dt = flow.coefficients(sde, *arguments).dt
    with torch.no_grad():
        old_mean, std = flow.transition(sde, x, network(x), *arguments)
        x_next = flow.sample(old_mean, std, noise)
        old = flow.log_prob(sde, x_next, old_mean, std)
    mean, _ = flow.transition(sde, x, network(x), *arguments)
    log_prob = flow.log_prob(sde, x_next, mean, std)
    loss, samples = policy_loss(
        objective, log_prob, old, advantage, clip_low=1e-6, clip_high=1e-6, mean=mean, old_mean=old_mean, std=std,
        dt=dt, normalised=sde != "cps", reference_mean=old_mean, kl_weight=0.1,
    )  # fmt: skip
    assert samples["ratio"].tolist() == [1] * 6 and not samples["clipped"].any() and not samples["kl"].any()
    assert loss.dtype == samples["kl"].dtype == torch.float64  # float32 would resolve 1e-7 of a ratio
    ours = torch.autograd.grad(loss, [*network.parameters()], retain_graph=True)
    # guard's ratio and KL of two Gaussians are of the density, whatever is scored
    density = -((x_next - mean) ** 2).mean(1) / (2 * std**2)
    if objective == "clip":
        weight, scored = 1.0, log_prob if sde != "cps" else density * 2 * std**2
    else:
        weight, scored = std / abs(dt), density
    reinforce = torch.autograd.grad(-weight * (advantage * scored).mean(), [*network.parameters()])
    torch.testing.assert_close(ours, reinforce, rtol=1e-5, atol=1e-6)


def test_clipped_by_sign_of_the_advantage():
    ratio = torch.tensor([1.2, 1.2, 0.8, 0.8, 1.07, 0.98, 1.2, 0.8])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    log_prob = ratio.log().requires_grad_()
    loss, samples = policy_loss("clip", log_prob, torch.zeros(8), advantage, **RANGE)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert samples["clipped"].tolist() == [True, False, False, True, False, False, False, False]
    assert (gradient == 0).tolist() == [True, False, False, True, False, False, True, True]
    logged = grpo.policy_statistics(samples)
    assert logged["policy/clip_fraction"] == pytest.approx(2 / 8)
    assert logged["policy/clip_fraction_positive"] == logged["policy/clip_fraction_negative"] == pytest.approx(1 / 3)
    assert logged["policy/ratio"] == pytest.approx(float(ratio.mean()))
    assert logged["policy/ratio_std"] == pytest.approx(statistics.pstdev(ratio.tolist()), rel=1e-5)
    assert logged["policy/approximate_kl"] == pytest.approx(float((ratio.log() ** 2 / 2).mean()))
    assert grpo.policy_statistics({name: v[:1] for name, v in samples.items()})["policy/clip_fraction_negative"] == 0


def test_check_ratio_names_the_steps_and_the_causes():
    """Three steps of five forward passes, two samples each."""
    old = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))

    def check(changed, tolerance, steps=(0, 1, 2)):
        steps = torch.tensor(steps)[None, :, None].expand(5, 3, 2).flatten()
        return grpo.check_ratio(changed.flatten(), old.flatten(), tolerance, steps)

    assert check(old.clone(), 0.0) == {0: 0, 1: 0, 2: 0}
    changed = old.clone()
    changed[2, 1, 1] += 0.25
    assert check(changed, 0.3) == pytest.approx({0: 0, 1: 0.25, 2: 0}, abs=1e-6)
    with pytest.raises(grpo.RatioError, match=r"step 2: 0, step 4: 0.25, step 5: 0 \(tolerance 0.1\)") as error:
        check(changed, 0.1, steps=[2, 4, 5])
    causes = ("dropout", "batches of another size", "dtype", "CFG", "adapter state", "attention_backend: _native_flash")
    for cause in causes:
        assert cause in str(error.value)
    changed[2, 1, 1] = math.nan
    with pytest.raises(grpo.RatioError, match="step 1: nan"):
        check(changed, 1e9)


@pytest.mark.parametrize("objective", ["clip", "guard", "clip with kl"])
def test_a_gaussian_policy_learns_a_black_box_reward(objective):
    """Two rows with other targets; the reward is a number without gradient; two updates per rollout."""
    name, with_kl = objective.split()[0], objective.endswith("kl")
    targets, std, dt = torch.tensor([[1.0, -1.0], [-0.5, 0.8]]), 0.3, -0.3
    means = torch.zeros(2, 2, requires_grad=True)
    optimizer = torch.optim.SGD([means], lr=0.1)
    rewards_of_epochs = []
    for epoch in range(200):
        members = epoch_of(2, epoch=epoch, group_size=8, groups=2, sample_ids=["a", "b"])
        rows = torch.tensor([m.row for m in members])
        old_mean = means[rows].detach()
        noise = torch.stack([torch.randn(2, generator=torch.Generator().manual_seed(m.step_seed)) for m in members])
        x_next = old_mean + std * noise
        reward = -(x_next - targets[rows]).square().sum(1).sqrt().round(decimals=1)
        advantage, logged = grpo.advantages(reward, torch.tensor([m.group_id for m in members]), group_size=8)
        rewards_of_epochs.append(logged["reward/mean"])
        old = gaussian_log_prob(x_next, old_mean, std)
        for _ in range(2):
            mean = means[rows]
            loss, _ = policy_loss(
                name, gaussian_log_prob(x_next, mean, std), old, advantage, clip_low=0.2, clip_high=0.2,
                mean=mean, old_mean=old_mean, std=std, dt=dt,
                reference_mean=torch.zeros_like(mean), kl_weight=0.4 if with_kl else 0.0,
            )  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, last = statistics.fmean(rewards_of_epochs[:3]), statistics.fmean(rewards_of_epochs[-10:])
    distance = float((means.detach() - targets).norm(dim=1).mean())
    if with_kl:  # the anchor keeps it between its start and the targets
        assert -0.9 < last < -0.55 and 0.35 < distance < 0.8
    else:  # -0.38 is the mean distance that the policy's own noise leaves
        assert first < -1.0 and last > -0.46 and distance < 0.25
