"""What is logged of rewards: under which keys, and that nothing of the script's own can be named away."""

import math

import pytest
import torch
from grpo_rewards import Names

from rewardfl.rewards import Reward, RewardOutput, metrics
from rewardfl.rewards.scoring import RewardResult, Term, failure


def term(label="score", weight=1.0, key="reward.name"):
    return Term(key=key, label=label, reward=Reward(), weight=weight, mean=0.0, std=1.0)


def said(*scores, valid=None, parts=None, **more):
    valid = [True] * len(scores) if valid is None else valid
    parts = {name: torch.tensor(values) for name, values in ((parts or {}) | more).items()}
    return RewardResult(RewardOutput(torch.tensor(scores), torch.tensor(valid), parts), torch.zeros(len(scores)).bool())


NAN = math.nan
OWN = {"reward/mean": 7.0, "reward/valid_fraction": 0.5, "reward/std_in_group": 3.0}


def test_keys_are_those_of_the_design_and_every_other_term_has_its_own():
    terms = [term(), term("held_out", 0.0), term("red", 0.5)]
    face = {"face_score": [0.5, 0.25], "coverage": [1.0, 0.0], "motion": [2.0, NAN], "nonfinite": [0.0, 0.0]}
    judged = [
        [said(0.5, 0.25, **face), said(0.5, 0.5, motion=[3.0, 5.0]), said(1.0, 0.0, valid=[True, False])],
        [said(1.5, valid=[True], **{name: values[:1] for name, values in face.items()}), said(2.0, motion=[NAN]),
         said(3.0)],
    ]  # fmt: skip
    assert metrics.means(terms, judged, "reward", OWN) == {
        "reward/score": 0.75, "reward/held_out": 1.0, "reward/red": 2.0, "actor/face_score": pytest.approx(5 / 12),
        "reward/coverage": pytest.approx(2 / 3), "reward/motion": 2.0, "reward/nonfinite": 0.0,
        "reward/held_out/motion": 4.0,
    }  # fmt: skip
    first = metrics.means(terms, judged, "reward", {"reward/valid_fraction": 1.0}, score="mean")
    assert first["reward/mean"] == 0.75 and "reward/score" not in first
    evaluated = metrics.means(terms, judged, "eval", ())
    assert evaluated["eval/score"] == 0.75 and evaluated["eval/face_score"] == pytest.approx(5 / 12)
    assert metrics.deviations(terms, judged, "eval") == {
        "eval/score_std": pytest.approx(torch.tensor([0.5, 0.25, 1.5]).std(correction=0).item()),
        "eval/held_out_std": pytest.approx(math.sqrt(0.5)), "eval/red_std": 1.0,
    }  # fmt: skip


def test_no_part_takes_the_key_of_anything_else():
    terms = [term(), term("red", 0.0), term("score_of_red", 0.0)]
    parts = {name: [100.0] for name in Names.parts}
    judged = [[said(1.0, parts=parts), said(2.0, parts=parts), said(3.0)]]
    found = metrics.means(terms, judged, "reward", OWN)
    assert not found.keys() & OWN.keys() and len(found) == 3 + 2 * len(Names.parts)
    assert (found["reward/score"], found["reward/red"], found["reward/score_of_red"]) == (1, 2, 3)
    assert found["reward/score/mean"] == found["reward/score/red"] == found["reward/score/held_out"] == 100
    assert "reward/held_out" not in found and found["reward/kl"] == found["reward/red/kl"] == 100
    as_mean = metrics.means(terms, judged, "reward", {"reward/valid_fraction": 1.0}, score="mean")
    assert as_mean["reward/mean"] == 1 and as_mean["reward/score/mean"] == as_mean["reward/score"] == 100
    own = {"eval/failed": 0.0} | metrics.deviations(terms, judged, "eval")
    evaluated = metrics.means(terms, judged, "eval", own)
    assert not evaluated.keys() & own.keys() and evaluated["eval/score"] == 1
    assert evaluated["eval/score/score_std"] == evaluated["eval/score/failed"] == evaluated["eval/mean"] == 100


def test_what_failed_and_why_nothing_could_be_judged():
    terms = [term(), term("far", 0.0, "reward.others.far"), term("red", 0.5, "reward.others.red")]
    lost = said(0.0, 0.0, valid=[False, False], nonfinite=[1.0, 0.0])
    judged = [[lost, failure(2, "OSError: gone"), lost], [failure(1, "KeyError: x"), said(1.0), failure(1, "late")]]
    assert metrics.count_problems(terms, judged) == {
        "reward.others.far: OSError: gone": 2, "reward.name: KeyError: x": 1, "reward.others.red: late": 1,
    }  # fmt: skip
    assert metrics.failed_fraction(judged) == 1 and metrics.failed_fraction([[lost, said(1.0, 1.0)]]) == 0
    judged_by_one = [*judged, [lost, lost, said(1.0, 0.0, valid=[True, False])]]
    assert metrics.explain_no_judged_sample(terms, judged_by_one, by_all=False) == ""
    judged_in_turn = [[said(1.0, 0.0, valid=[True, False]), lost, said(0.0, 1.0, valid=[False, True])]]
    why = metrics.explain_no_judged_sample(terms, judged_in_turn, by_all=True)
    assert "reward.name (Reward) judged 1 of 2 samples" in why and "reward.others.red (Reward) judged 1 of 2" in why
    why = metrics.explain_no_judged_sample(terms, [*judged, judged[1]], by_all=False)
    account = "judged 0 of 4 samples, 2 failed, 2 invalid, 1 of them with a score that is not finite; its last error: "
    assert f"reward.name (Reward) {account}KeyError: x; " in why and why.endswith("; its last error: late")
    assert "far" not in why and "\n" not in why
    assert metrics.explain_no_judged_sample(terms[1:2], [[lost]], by_all=True) == ""  # no trained reward
