"""Metrics of rewards and their keys."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rewardfl.rewards.base import NONFINITE
from rewardfl.rewards.scoring import RewardResult, Term, concat_results

Batches = Sequence[Sequence[RewardResult]]  # by batch, then by term


def means(
    terms: Sequence[Term], batches: Batches, where: str, taken: Collection[str], score: str = "score"
) -> dict[str, float]:
    """Return the means over the samples of all batches and processes that have a value.

    where: `reward` or `eval`. The first term's score is <where>/<score>, another term's is <where>/<label>. Parts are
    <where>/<label>/<part>. The first term's parts are <where>/<part>, and actor/face_score, unless that is the judge's
    key, a term's key or one of `taken`, the script's own keys.
    """
    names = [score, *(term.label for term in terms[1:])]
    columns = _concat_by_term(terms, batches)
    metrics = {f"{where}/{name}": _scores(result).nanmean().item() for name, result in zip(names, columns, strict=True)}
    taken = {*taken, *metrics, f"{where}/held_out"}
    for i, (term, result) in enumerate(zip(terms, columns, strict=True)):
        for name, part in result.output.parts.items():
            key = f"{where}/{name}" if i == 0 else f"{where}/{term.label}/{name}"
            if key == "reward/face_score":
                key = "actor/face_score"
            metrics[f"{where}/{term.label}/{name}" if key in taken else key] = part.nanmean().item()
    return metrics


def deviations(terms: Sequence[Term], batches: Batches, where: str) -> dict[str, float]:
    """Return <where>/<label>_std, the deviation of each term's score over the valid samples."""
    metrics = {}
    for term, result in zip(terms, _concat_by_term(terms, batches), strict=True):
        scores = _scores(result)
        metrics[f"{where}/{term.label}_std"] = float(scores[~scores.isnan()].std(correction=0))
    return metrics


def failed_fraction(batches: Batches) -> float:
    """Return the fraction, in [0, 1], of samples for which a reward raised or timed out."""
    failed = [torch.stack([result.failed for result in batch]).any(0) for batch in batches]
    return float(torch.cat(failed).float().mean())


def count_problems(terms: Sequence[Term], batches: Batches) -> dict[str, int]:
    """Return the messages of failed samples, "<the reward's key>: <message>", with their counts."""
    pairs = [pair for batch in batches for pair in zip(terms, batch, strict=True)]
    return dict(Counter(f"{term.key}: {problem}" for term, result in pairs for problem in result.problems))


def explain_no_judged_sample(terms: Sequence[Term], batches: Batches, *, by_all: bool) -> str:
    """Return one line on why no sample was judged; "" where one was, and without a term that has a weight.

    by_all: whether all terms with a weight must judge a sample, as groups are compared by their sum, or one is enough.
    """
    columns = zip(terms, _concat_by_term(terms, batches), strict=True)
    trained = [(term, result) for term, result in columns if term.weight > 0]
    valid = [result.output.valid for _, result in trained]
    if not trained or (torch.stack(valid).all(0) if by_all else torch.stack(valid).any(0)).any():
        return ""
    return "; ".join(_count_samples(term, result) for term, result in trained)


def _count_samples(term: Term, result: RewardResult) -> str:
    valid, failed = int(result.output.valid.sum()), int(result.failed.sum())
    nonfinite = int(result.output.parts.get(NONFINITE, torch.zeros(1)).nansum())
    last = f"; its last error: {result.problems[-1]}" if result.problems else ""
    return (
        f"{term.key} ({type(term.reward).__qualname__}) judged {valid} of {len(result.failed)} samples, {failed} "
        f"failed, {nonfinite} had a score that is not finite{last}"
    )


def _concat_by_term(terms: Sequence[Term], batches: Batches) -> list[RewardResult]:
    return [concat_results([batch[i] for batch in batches]) for i in range(len(terms))]


def _scores(result: RewardResult) -> Tensor:
    return result.output.score.where(result.output.valid, torch.nan)
