"""The rewards of an epoch: a sample counts as judged only if all trained rewards have a score for it."""

from types import SimpleNamespace

import pytest
import torch

from rewardfl.config.schema import GrpoConfig
from rewardfl.group_plan import Member
from rewardfl.rewards import Reward, RewardError, RewardOutput
from rewardfl.rewards.scoring import RewardResult, Term, failure
from rewardfl.training.epoch_scores import score_epoch
from rewardfl.training.samples import Rollout

JOB = SimpleNamespace(
    device="cpu", rank=0, gather=lambda tensors: tensors, gather_lists=lambda items: items, print=print
)


def score(remote_weight, *, first):
    members = [Member(0, 0, n, 0, 0, 0) for n in range(2)]
    rollout = Rollout(members=members, is_requested=torch.ones(2).bool(), conditioning={}, schedule=None)
    face = RewardResult(RewardOutput(torch.tensor([0.0, 1.0]), torch.ones(2).bool(), {}), torch.zeros(2).bool())
    terms = [
        Term(key=key, label=label, reward=Reward(), weight=weight, mean=0.0, std=1.0)
        for key, label, weight in (("reward.name", "score", 1.0), ("reward.others.far", "far", remote_weight))
    ]
    results = [[face, failure(2, "ConnectError: refused")]]
    return score_epoch(JOB, terms, results, [rollout], GrpoConfig(group_size=2), {}, 0, first=first)


def test_a_dead_reward_next_to_a_working_one_leaves_no_judged_sample():
    account = "reward.name .Reward. judged 2 of 2 .* reward.others.far .Reward. judged 0 of 2 samples, 2 failed"
    with pytest.raises(RewardError, match=f"{account}.*; its last error: ConnectError: refused"):
        score(0.5, first=True)
    assert "judged 0 of 2" in score(0.5, first=False).why_nothing
    assert score(0.0, first=True).why_nothing == ""  # only measured
