"""The rewards of an epoch: a sample counts as judged only if all trained rewards have a score for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rewardfl.config.schema import ForwardConfig, GrpoConfig
from rewardfl.group_plan import Geometry, Member
from rewardfl.rewards import Reward, RewardError, RewardOutput
from rewardfl.rewards.scoring import RewardResult, Term, failure
from rewardfl.training.epoch_scores import score_epoch
from rewardfl.training.forward_draws import keep_trained
from rewardfl.training.samples import CleanRollout, Rollout

JOB = SimpleNamespace(
    device="cpu", rank=0, gather=lambda tensors: tensors, gather_lists=lambda items: items, print=print
)


def score(remote_weight, *, first, requested=(True, True)):
    members = [Member(0, 0, n, 0, 0, 0) for n in range(2)]
    rollout = Rollout(members=members, is_requested=torch.tensor(requested), conditioning={}, schedule=None, shape=())
    face = RewardResult(RewardOutput(torch.tensor([0.0, 1.0]), torch.ones(2).bool(), {}), torch.zeros(2).bool())
    terms = [
        Term(key=key, label=label, reward=Reward(), weight=weight, mean=0.0, std=1.0)
        for key, label, weight in (
            ("reward.terms.score.name", "score", 1.0),
            ("reward.terms.far", "far", remote_weight),
        )
    ]
    results = [[face, failure(2, "ConnectError: refused")]]
    return score_epoch(JOB, terms, results, [rollout], GrpoConfig(group_size=2), {}, 0, first=first)


def test_a_dead_reward_next_to_a_working_one_leaves_no_judged_sample():
    account = (
        "reward.terms.score.name .Reward. judged 2 of 2 .* reward.terms.far .Reward. judged 0 of 2 samples, 2 failed"
    )
    with pytest.raises(RewardError, match=f"{account}.*; its last error: ConnectError: refused"):
        score(0.5, first=True)
    assert "judged 0 of 2" in score(0.5, first=False).why_nothing
    assert score(0.0, first=True).why_nothing == ""  # only measured


def test_a_replaced_sample_does_not_count_in_its_group():
    scored = score(0.0, first=True)
    assert torch.cat(list(scored.advantages)).tolist() != [0, 0] and scored.replaced.tolist() == [False, False]
    scored = score(0.0, first=True, requested=(True, False))
    assert torch.cat(list(scored.advantages)).tolist() == [0, 0] and scored.replaced.tolist() == [False, True]


@pytest.mark.parametrize("std", ["group", "global", "max_group"])
@pytest.mark.parametrize("objective", ["rvm", "best"])
def test_groups_that_hardly_differ_count_in_no_deviation(std, objective):
    """The choice against a loop; the other groups' advantages are the same in an epoch without these."""
    rewards = torch.tensor([[0.0, 4, 2], [2.5, 9, 1], [3, 5, 0], [2, 7, 5]])
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 1]]).bool()
    term = Term(key="", label="score", reward=Reward(), weight=2.0, mean=0.0, std=1.0)

    def score_rows(rows, limit):
        members, yes = [Member(0, i // 3, i % 3, 0, 0, 0) for i in range(3 * len(rows))], torch.ones(3 * len(rows)) > 0
        rollout = Rollout(members=members, is_requested=yes, conditioning={}, schedule=None, shape=())
        result = RewardResult(RewardOutput(rewards[rows].flatten(), valid[rows].flatten(), {}), ~yes)
        advantage = {"std": std, "smallest_spread": limit}
        group = ForwardConfig(group_size=3, groups=len(rows), objective=objective, advantage=advantage)
        scored = score_epoch(JOB, [term], [[result]], [rollout], group, {}, 0, first=True)
        return scored, scored.advantages[0].view(-1, 3)

    everything = score_rows([0, 1, 2, 3], 0.0)[0]
    values = [[2 * float(r) for r, ok in zip(*pair, strict=True) if ok] for pair in zip(rewards, valid, strict=True)]
    for limit in (0.0, 3.0, 3.1, 8.0, 8.1):  # the spreads are 8, 3, 4 and 0
        rows = [row for row in range(4) if max(values[row]) - min(values[row]) >= limit]
        scored, advantages = score_rows([0, 1, 2, 3], limit)
        assert scored.trained_groups.nonzero().flatten().tolist() == rows and scored.metrics == everything.metrics
        assert not advantages[~scored.trained_groups].any()
        assert not rows or torch.equal(advantages[rows], score_rows(rows, 0.0)[1])


@pytest.mark.parametrize("objective, shares", [
    ("best", [([[2, 2]], [1]), ([[4, 4]], [0])]),
    ("dpo", [([[0, 0], [2, 2]], [-1, 1]), ([[4, 4], [5, 5]], [0, 0])]),
])  # fmt: skip
def test_chosen_videos_of_each_group_stay_whichever_process_has_them(objective, shares):
    """A video's number is its position. In group 0 the member 2 is the best, 0 the worst, in group 1 all are equal."""
    rollouts, sent, yes = [], [], torch.ones(4).bool()
    for numbers in ((0, 3), (1, 2)):  # the members of two processes
        members = [Member(0, group, n, 0, 0, 0) for group in (0, 1) for n in numbers]
        x0 = torch.tensor([[4 * member.group_id + member.member] for member in members])
        videos = {"conditioning": {"n": x0}, "schedule": None, "shape": (), "x0": x0}
        rollouts.append(CleanRollout(members=members, is_requested=yes, **videos))
    terms = [Term(key="", label="score", reward=Reward(), weight=weight, mean=0.0, std=1.0) for weight in (1.0, 2.0)]
    scores = torch.tensor([[[1.0, 5, 5, 5], [0, 0, 0, 0]], [[4, 3, 5, 5], [0, 1, 0, 0]]])  # by process and term
    results = [[RewardResult(RewardOutput(each, yes, {}), ~yes) for each in process] for process in scores]
    group = ForwardConfig(group_size=4, groups=2, objective=objective)
    scored = score_epoch(JOB, terms, results, rollouts, group, {}, 0, first=True)
    share = Geometry(group_size=len(shares[0][1]), groups=2, world=2)
    plan = SimpleNamespace(training=share, geometry=Geometry(group_size=4, groups=2, world=2, batch=4))
    sides = [([rollouts[rank]], replace(scored, advantages=[scored.advantages[rank]])) for rank in (0, 1)]
    for side in sides:
        with pytest.raises(KeyError):  # what it sends
            keep_trained(SimpleNamespace(gather_lists=lambda items: sent.extend(items) or {}["received"]), plan, *side)
    for rank, (side, expected) in enumerate(zip(sides, shares, strict=True)):
        job = SimpleNamespace(rank=rank, device="cpu", gather_lists=lambda _: sent)
        videos, share_scores = keep_trained(job, plan, *side)
        numbers = [[int(video.x0), int(video.conditioning["n"])] for video in videos]
        assert (numbers, torch.cat(share_scores.advantages).tolist()) == expected
    assert scored.metrics["group/zero_variance"] == 0.5
