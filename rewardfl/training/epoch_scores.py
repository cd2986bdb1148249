"""The rewards and advantages of an epoch's rollouts, over all processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rewardfl import forward_rl, grpo
from rewardfl.config.schema import ForwardConfig, GroupConfig
from rewardfl.rewards import RewardError, async_scoring
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.scoring import RewardResult, Term
from rewardfl.training.distributed import Distributed
from rewardfl.training.samples import Rollout


@dataclass(frozen=True, kw_only=True)
class EpochScores:
    """The result of `score_epoch`."""

    advantages: Sequence[Tensor]  # (B,) of each forward pass of this process, on its device
    replaced: Tensor  # (N,) bool of all processes: whether another clip replaces one whose cache entries are lost
    metrics: dict[str, float]  # epoch, reward/* and group/*
    why_nothing: str  # why no sample was judged by all trained rewards; "" where one was
    trained_groups: Tensor  # (groups,) bool, without those that hardly differ


def score_epoch(
    job: Distributed,
    terms: Sequence[Term],
    results: Sequence[list[RewardResult]],
    rollouts: Sequence[Rollout],
    group: GroupConfig,
    part_weights: Mapping[str, float],
    epoch: int,
    *,
    first: bool,
) -> EpochScores:
    """Compare each video with its group. Collective.

    results: of the terms, by forward pass. first: of this start of the run. Raise RewardError if no sample of the first
    epoch was judged by all terms with a weight.
    """
    stacked = [async_scoring.stack_rewards(terms, each, part_weights) for each in results]
    rewards, valid, weights = zip(*stacked, strict=True)
    requested = torch.cat([rollout.is_requested for rollout in rollouts])
    positions = torch.tensor([m.group_id * group.group_size + m.member for each in rollouts for m in each.members])
    local = (torch.cat(rewards), positions, torch.cat(valid) & requested, ~requested)
    rewards, positions, valid, replaced = (x.cpu() for x in job.gather([x.to(job.device) for x in local]))
    by_group = positions.argsort().view(-1, group.group_size)
    trained = grpo.wide_groups(rewards[by_group], valid[by_group], weights[0], group.advantage.smallest_spread)
    counts = valid & trained[positions // group.group_size]
    compare = partial(
        grpo.advantages, rewards, positions // group.group_size, group_size=group.group_size, std=group.advantage.std,
        combine=group.advantage.of, weights=weights[0], clip=group.advantage.clip,
    )  # fmt: skip
    advantages, metrics = compare(valid=valid)
    if not trained.all():  # the metrics describe all groups
        advantages, _ = compare(valid=counts)
    if isinstance(group, ForwardConfig) and group.objective in ("best", "dpo"):
        total = rewards.double() @ rewards.new_tensor(weights[0], dtype=torch.float64)
        choose = {"best": forward_rl.best_advantages, "dpo": forward_rl.pair_advantages}[group.objective]
        chosen = choose(total[by_group], valid[by_group])
        advantages[by_group] = chosen.float()
        metrics["group/zero_variance"] = float((chosen == 0).all(1).double().mean())
        advantages[~counts] = 0
    sizes = [len(rollout.members) for rollout in rollouts]
    first_row = job.rank * len(requested)
    everywhere = job.gather_lists(list(results))
    metrics |= {"epoch": epoch, "reward/failed": reward_metrics.failed_fraction(everywhere)}
    metrics |= reward_metrics.means(terms, everywhere, "reward", {*metrics, "data/replaced"})
    for problem, count in reward_metrics.count_problems(terms, everywhere).items():
        job.print(f"{problem} ({count} samples)")
    why = reward_metrics.explain_no_judged_sample(terms, everywhere, by_all=True)
    if why and first:
        raise RewardError(f"not one sample of the epoch was judged by all trained rewards; {why}")
    return EpochScores(
        advantages=advantages[first_row : first_row + len(requested)].to(job.device).split(sizes),
        replaced=replaced,
        metrics=metrics,
        why_nothing=why,
        trained_groups=trained,
    )


@dataclass(frozen=True, kw_only=True)
class UpdateResults:
    """The results of an update of reward feedback learning, by pass and term, over all processes."""

    by_pass: Sequence[Sequence[RewardResult]]
    problems: Mapping[str, int]  # messages of failed samples, with their counts
    why_nothing: str  # why no sample was judged; "" where one was


def explain_results(terms: Sequence[Term], results: Sequence[Sequence[RewardResult]]) -> UpdateResults:
    """Return the results with what the metrics say of failures. results: by pass and term."""
    why = reward_metrics.explain_no_judged_sample(terms, results, by_all=False)
    return UpdateResults(by_pass=results, problems=reward_metrics.count_problems(terms, results), why_nothing=why)
