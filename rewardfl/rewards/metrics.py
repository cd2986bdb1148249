"""What is logged of rewards, and under which keys.

A script keeps its own metrics in a record of its own; what a reward or a label is called cannot reach them.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rewardfl.rewards.base import RewardError
from rewardfl.rewards.contract import NONFINITE
from rewardfl.rewards.scoring import RewardResult, Term, concat_results


def means(
    terms: Sequence[Term],
    judged: Sequence[Sequence[RewardResult]],
    where: str,
    taken: Collection[str],
    score: str = "score",
) -> dict[str, float]:
    """Metrics of what all processes' rewards said, each the mean over the samples that have a value.

    judged: of each batch, by term. where: `reward` or `eval`. The first term's score is <where>/<score>, another's
    <where>/<label>. Parts are <where>/<label>/<part>, except the first term's: those are <where>/<part>, and
    actor/face_score, unless that is the judge's key, one of the terms' or one of `taken`, the script's own.

    RewardError when two processes' parts of one reward have other names.
    """
    of_all = [concat_results([each[i] for each in judged]) for i in range(len(terms))]
    names = [score, *(term.label for term in terms[1:])]
    found = {f"{where}/{name}": _mean(_scores(one)) for name, one in zip(names, of_all, strict=True)}
    taken = {*taken, *found, f"{where}/held_out"}
    for i, (term, one) in enumerate(zip(terms, of_all, strict=True)):
        _check_names(term, [each[i] for each in judged])
        for name, part in one.output.parts.items():
            key = f"{where}/{name}" if i == 0 else f"{where}/{term.label}/{name}"
            if key == "reward/face_score":
                key = "actor/face_score"
            found[f"{where}/{term.label}/{name}" if key in taken else key] = _mean(part)
    return found


def deviations(terms: Sequence[Term], judged: Sequence[Sequence[RewardResult]], where: str) -> dict[str, float]:
    """<where>/<label>_std of each term's score, over the samples that have one."""
    found = {}
    for i, term in enumerate(terms):
        scores = _scores(concat_results([each[i] for each in judged]))
        found[f"{where}/{term.label}_std"] = float(scores[~scores.isnan()].std(correction=0))
    return found


def failed_fraction(judged: Sequence[Sequence[RewardResult]]) -> float:
    """The share of samples for which some reward raised or was too late, in 0..1."""
    return float(torch.cat([torch.stack([one.failed for one in each]).any(0) for each in judged]).float().mean())


def problems(terms: Sequence[Term], judged: Sequence[Sequence[RewardResult]]) -> dict[str, int]:
    """What was said of samples for which a reward failed, each with their number and the reward's key before it."""
    verdicts = [pair for each in judged for pair in zip(terms, each, strict=True)]
    return dict(Counter(f"{term.key}: {problem}" for term, one in verdicts for problem in one.problems))


def why_nothing_was_judged(terms: Sequence[Term], judged: Sequence[Sequence[RewardResult]]) -> str:
    """Return one line on what the rewards that are trained on made of the samples; "" where one scored a sample."""
    accounts = []
    for i, term in enumerate(terms):
        if term.weight > 0:
            verdict = concat_results([each[i] for each in judged])
            valid, failed = int(verdict.output.valid.sum()), int(verdict.failed.sum())
            if valid:
                return ""
            nonfinite = int(verdict.output.parts.get(NONFINITE, torch.zeros(1)).nan_to_num().sum())
            first = f"; the first problem: {verdict.problems[0]}" if verdict.problems else ""
            accounts.append(
                f"{term.key} ({type(term.reward).__qualname__}): {valid} of {len(verdict.failed)} samples valid, "
                f"{failed} failed, {nonfinite} scores not finite{first}"
            )
    return "; ".join(accounts)


def _scores(one: RewardResult) -> Tensor:
    return one.output.score.where(one.output.valid, torch.nan)


def _mean(values: Tensor) -> float:
    return float(values.nanmean())


def _check_names(term: Term, judged: Sequence[RewardResult]) -> None:
    found = {frozenset(one.output.parts) - {NONFINITE}: None for one in judged}
    names = [", ".join(sorted(each)) for each in found if each]  # none at all: nothing could be scored there
    if len(names) > 1:
        raise RewardError(
            f"{term.key}: reward {type(term.reward).__qualname__} must name its parts alike in all processes, they are "
            f"{' in one and '.join(names[:2])} in another"
        )
