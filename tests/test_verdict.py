import math
import random

import pytest
import torch

from rewardfl import reward_flow, verdict
from rewardfl.verdict import VerdictState
from tests.test_reward_flow import endpoint_step, gradients

LENGTHS = torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)


def choose_by_brute_force(scores, caps, weights, stds, lengths, tau, slacks, rises):
    """Return the index of one sample's best move, 0 for none, and whether it could gain.

    scores: [of x0, of each move], NaN if invalid.
    """
    if not rises or any(math.isnan(score) for score in scores[0]):
        return 0, False
    if all(score >= cap for score, cap, weight in zip(scores[0], caps, weights, strict=True) if weight):
        return 0, False

    def value(row):
        return sum(
            weight / std * (cap if score > cap else score)
            for score, cap, weight, std in zip(row, caps, weights, stds, strict=True)
            if weight
        )

    best, index = 0.0, 0
    for j, row in enumerate(scores[1:]):
        if any(math.isnan(score) for score in row):
            continue
        if any(now < was - slack for now, was, slack in zip(row, scores[0], slacks, strict=True)):
            continue
        gain = value(row) - value(scores[0]) - lengths[j] ** 2 / (2 * tau)
        if gain > best:
            best, index = gain, j + 1
    return index, True


@pytest.mark.parametrize("tau", [0.02, 0.1, 10.0])
def test_the_choice_is_that_of_a_brute_force_loop(tau):
    """A term without a weight that may not fall, caps, invalid scores, no gradient; 400 samples."""
    draw, count = random.Random(3), 400
    weights, stds, slacks = [1.0, 0.5, 0.0], [0.2, 1.0, 1.0], [math.inf, 0.1, 0.02]
    scores = [[[draw.gauss(0.5, 0.15) for _ in weights] for _ in range(count)] for _ in range(4)]
    for column in range(3):
        for j in range(4):
            for row in scores[j]:
                row[column] = math.nan if draw.random() < 0.05 else row[column]
    caps = [[draw.choice([0.4, 0.6, math.inf]), draw.choice([0.5, math.inf]), math.inf] for _ in range(count)]
    rises = [draw.random() < 0.9 for _ in range(count)]
    expected = [
        choose_by_brute_force(
            [each[b] for each in scores], caps[b], weights, stds, LENGTHS.tolist(), tau, slacks, rises[b]
        )
        for b in range(count)
    ]
    weight, std = torch.tensor(weights, dtype=torch.float64), torch.tensor(stds, dtype=torch.float64)
    choice = verdict.choose(
        torch.arange(count), torch.tensor(rises), torch.tensor(scores, dtype=torch.float64),
        caps=torch.tensor(caps, dtype=torch.float64), scale=weight / std, prices=verdict.price(LENGTHS, tau),
        slacks=torch.tensor(slacks, dtype=torch.float64),
    )  # fmt: skip
    assert [*zip(choice.move.tolist(), choice.can_gain.tolist(), strict=True)] == expected
    assert len({*choice.move.tolist()}) > 2
    taken = torch.tensor(scores, dtype=torch.float64)[choice.move, torch.arange(count)]
    moved = choice.accepted
    torch.testing.assert_close(choice.change[moved], (taken - choice.score)[moved], rtol=0, atol=0)
    assert (choice.gain[moved] > 0).all() and (choice.change[~moved] == 0).all() and (choice.gain[~moved] == 0).all()


def judge(scores, *, caps=math.inf, tau=math.inf, slack=math.inf, rises=True):
    """Return the verdict on one sample by one term. scores: of x0 and of its moves."""
    stacked = torch.tensor(scores, dtype=torch.float64).view(-1, 1, 1)
    return verdict.choose(
        torch.tensor([7]), torch.tensor([rises]), stacked, caps=stacked.new_full((1, 1), caps),
        scale=stacked.new_ones(1), prices=verdict.price(LENGTHS[: len(scores) - 1], tau),
        slacks=stacked.new_full((1,), slack),
    )  # fmt: skip


def test_a_move_that_gains_nothing_is_not_learned():
    """Without a price, too: a move equal to x0 gains exactly 0. Of equal moves the shortest is learned."""
    assert judge([0.3, 0.3, 0.3]).move.item() == 0 and judge([0.3, 0.3, 0.3]).gain.item() == 0
    assert judge([0.3, 0.5, 0.5, 0.5]).move.item() == 1
    assert judge([0.3, 0.2, 0.1]).can_gain.item()
    assert not judge([0.3, 0.4], rises=False).can_gain.item()


def test_a_sample_at_its_cap_makes_no_move():
    at, below = judge([0.5, 0.9], caps=0.5), judge([0.4, 0.9], caps=0.5)
    assert at.move.item() == 0 and not at.can_gain.item()
    assert below.move.item() == 1 and below.gain.item() == pytest.approx(0.1) and below.change.item() == 0.5


def test_what_is_invalid_is_refused_and_counted():
    assert judge([math.nan, 0.9]).move.item() == 0 and not judge([math.nan, 0.9]).can_gain.item()
    first = judge([0.1, math.nan, 0.2, math.nan])
    assert first.move.item() == 2 and first.refused.item() == pytest.approx(2 / 3)
    assert judge([0.5, 0.4], slack=0.1).refused.item() == 0 and judge([0.5, 0.3], slack=0.1).refused.item() == 1


def test_the_price_grows_with_the_square_of_the_length():
    assert verdict.price(LENGTHS, 0.1).tolist() == pytest.approx([0.05, 0.2, 0.8])
    assert judge([0.0, 0.06, 0.2, 0.3], tau=0.1).move.item() == 1  # net: 0.01, 0, -0.5
    assert judge([0.0, 0.06, 0.2, 0.3], tau=1.0).move.item() == 3  # net: 0.055, 0.18, 0.22


def test_tau_follows_the_share_of_accepted_moves():
    """By 1.5 outside of 0.3 to 0.6, not before 32 samples, and these count once."""
    state = VerdictState(tau=1.0)
    state.adapt([False] * 31)
    assert state.tau == 1
    state.adapt([True] * 9)  # 9 of the last 32 are 0.28
    assert state.tau == 1.5 and state.recent == []
    state.adapt([True] * 10 + [False] * 22)
    assert state.tau == 1.5 and len(state.recent) == 32
    state.adapt([True] * 22)  # with the 22 before, 22 of 32
    assert state.tau == 1.0 and state.recent == []
    state.adapt([])
    assert state.tau == 1.0


def test_the_cap_is_a_quantile_of_one_rows_scores():
    state = VerdictState(tau=1.0)
    for score in (0.1, 0.4, 0.2):
        state.record("anna", "style", score)
    assert state.cap("anna", "style") == math.inf  # three are too few
    state.record("anna", "style", 0.3)
    for score in (5.0, 6.0, 7.0, 8.0):
        state.record("ben", "style", score)
        state.record("anna", "other", score)
    assert state.cap("anna", "style") == pytest.approx(0.325)
    assert state.cap("ben", "style") == pytest.approx(7.25)


def test_twice_the_length_is_twice_the_gradient():
    """At the velocity of the rollout. The endpoint's own loss divides by the length, which cancels."""
    rewards, norms, self_normalised = torch.tensor([1.0, 0.2, 3.0], dtype=torch.float64), [], []
    for length in (0.1, 0.2):
        model, velocity, trajectory, sigmas, grad_x0 = endpoint_step(rewards)
        with torch.no_grad():
            trajectory.velocities[5] = velocity(trajectory.latents[5], 5)
        shift, rises = reward_flow.ascend(trajectory.x0, grad_x0, length, 1.0)
        assert rises.all()
        error = (reward_flow.endpoint_change(velocity, trajectory, sigmas) - shift).square().flatten(1).mean(1)
        (verdict.loss_weights(rises, rises, 10.0) * error).sum().backward()
        norms.append(torch.cat([grad.flatten() for grad in gradients(model).values()]))
        model.zero_grad()
        reward_flow.replay_endpoint(velocity, trajectory, sigmas, grad_x0, length, 1.0)
        self_normalised.append(torch.cat([grad.flatten() for grad in gradients(model).values()]))
    torch.testing.assert_close(norms[1], 2 * norms[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(self_normalised[1], self_normalised[0], rtol=1e-9, atol=1e-12)


def test_the_loss_is_a_mean_over_moves_and_a_mean_over_the_others():
    """Whatever the passes and processes."""
    accepted = torch.tensor([True, False, False, True, False])
    error = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    weights = torch.cat([verdict.loss_weights(part, accepted, 10.0) for part in accepted.split([2, 1, 2])])
    assert float((weights * error).sum()) == pytest.approx((1 + 4) / 2 + 10 * (2 + 3 + 5) / 3)
    nothing = torch.zeros(2, dtype=torch.bool)
    assert verdict.loss_weights(nothing, nothing, 10.0).tolist() == [5, 5]
    assert verdict.loss_weights(~nothing, ~nothing, 10.0).tolist() == [0.5, 0.5]
