"""The keys and values of rewards' metrics, and why no sample was judged."""

import math

import pytest
import torch
from grpo_rewards import Names

from rewardfl.rewards import Reward, RewardOutput, metrics
from rewardfl.rewards.scoring import RewardResult, Term, failure

NAN = math.nan
SCRIPT_KEYS = {"reward/mean": 7.0, "reward/valid_fraction": 0.5, "reward/std_in_group": 3.0}


def make_term(label="score", weight=1.0, key="reward.terms.score.name"):
    return Term(key=key, label=label, reward=Reward(), weight=weight, mean=0.0, std=1.0)


def result(*scores, valid=None, parts=None, **more):
    valid = torch.tensor([True] * len(scores) if valid is None else valid)
    parts = {name: torch.tensor(values) for name, values in ((parts or {}) | more).items()}
    return RewardResult(RewardOutput(torch.tensor(scores), valid, parts), torch.zeros(len(scores)).bool())


def test_metrics_are_means_over_valid_samples():
    terms = [make_term(), make_term("held_out", 0.0), make_term("red", 0.5)]
    first = {"face_score": [0.5, 0.25], "coverage": [1.0, 0.0], "motion": [2.0, NAN], "nonfinite": [0.0, 0.0]}
    second = {name: values[:1] for name, values in first.items()}
    batches = [
        [result(0.5, 0.25, **first), result(0.5, 0.5, motion=[3.0, 5.0]), result(1.0, 0.0, valid=[True, False])],
        [result(1.5, **second), result(2.0, motion=[NAN]), result(3.0)],
    ]
    assert metrics.means(terms, batches, "reward", SCRIPT_KEYS) == {
        "reward/score": 0.75, "reward/held_out": 1.0, "reward/red": 2.0, "actor/face_score": pytest.approx(5 / 12),
        "reward/coverage": pytest.approx(2 / 3), "reward/motion": 2.0, "reward/nonfinite": 0.0,
        "reward/held_out/motion": 4.0,
    }  # fmt: skip
    as_mean = metrics.means(terms, batches, "reward", {"reward/valid_fraction": 1.0}, score="mean")
    assert as_mean["reward/mean"] == 0.75 and "reward/score" not in as_mean
    evaluated = metrics.means(terms, batches, "eval", ())
    assert evaluated["eval/score"] == 0.75 and evaluated["eval/face_score"] == pytest.approx(5 / 12)
    assert metrics.deviations(terms, batches, "eval") == {
        "eval/score_std": pytest.approx(torch.tensor([0.5, 0.25, 1.5]).std(correction=0).item()),
        "eval/held_out_std": pytest.approx(math.sqrt(0.5)), "eval/red_std": 1.0,
    }  # fmt: skip


def test_no_part_takes_the_key_of_anything_else():
    terms = [make_term(), make_term("red", 0.0), make_term("score_of_red", 0.0)]
    parts = {name: [100.0] for name in Names.parts}
    batches = [[result(1.0, parts=parts), result(2.0, parts=parts), result(3.0)]]
    values = metrics.means(terms, batches, "reward", SCRIPT_KEYS)
    assert not values.keys() & SCRIPT_KEYS.keys() and len(values) == 3 + 2 * len(Names.parts)
    assert (values["reward/score"], values["reward/red"], values["reward/score_of_red"]) == (1, 2, 3)
    assert values["reward/score/mean"] == values["reward/score/red"] == values["reward/score/held_out"] == 100
    assert "reward/held_out" not in values and values["reward/kl"] == values["reward/red/kl"] == 100
    as_mean = metrics.means(terms, batches, "reward", {"reward/valid_fraction": 1.0}, score="mean")
    assert as_mean["reward/mean"] == 1 and as_mean["reward/score/mean"] == as_mean["reward/score"] == 100
    script_keys = {"eval/failed": 0.0} | metrics.deviations(terms, batches, "eval")
    evaluated = metrics.means(terms, batches, "eval", script_keys)
    assert not evaluated.keys() & script_keys.keys() and evaluated["eval/score"] == 1
    assert evaluated["eval/score/score_std"] == evaluated["eval/score/failed"] == evaluated["eval/mean"] == 100


def test_failures_are_counted_and_explained():
    terms = [make_term(), make_term("far", 0.0, "reward.terms.far"), make_term("red", 0.5, "reward.terms.red")]
    lost = result(0.0, 0.0, valid=[False, False], nonfinite=[1.0, 0.0])
    half, other_half = result(1.0, 0.0, valid=[True, False]), result(0.0, 1.0, valid=[False, True])
    late = [failure(1, "KeyError: x"), result(1.0), failure(1, "late")]
    batches = [[lost, failure(2, "OSError: gone"), lost], late]
    assert metrics.count_problems(terms, batches) == {
        "reward.terms.far: OSError: gone": 2, "reward.terms.score.name: KeyError: x": 1, "reward.terms.red: late": 1,
    }  # fmt: skip
    assert metrics.failed_fraction(batches) == 1 and metrics.failed_fraction([[lost, half]]) == 0
    assert metrics.explain_no_judged_sample(terms, [*batches, [lost, lost, half]], by_all=False) == ""
    why = metrics.explain_no_judged_sample(terms, [[half, lost, other_half]], by_all=True)
    assert "reward.terms.score.name (Reward) judged 1 of 2" in why and "reward.terms.red (Reward) judged 1 of 2" in why
    why = metrics.explain_no_judged_sample(terms, [*batches, late], by_all=False)
    counts = "judged 0 of 4 samples, 2 failed, 1 had a score that is not finite; its last error: "
    assert f"reward.terms.score.name (Reward) {counts}KeyError: x; " in why and why.endswith("; its last error: late")
    assert "far" not in why and "\n" not in why
    assert metrics.explain_no_judged_sample(terms[1:2], [[lost]], by_all=True) == ""  # no trained reward
