"""The verdict on moves up a reward: each is decoded and scored before it is learned. After MEND, arXiv 2610.05954.

    y_j = x0 + d_j,  |d_j| = length_j |x0|                   moves of several lengths along the reward's gradient
    value(y) = sum_t weight_t / std_t min(score_t(y), cap_t)
    learned: argmax_j value(y_j) - length_j^2 / (2 tau), if it is above value(x0); otherwise no move
    L = mean over samples with a move of mean((x0_v - x0 - d)^2)  +  keep * mean over the others of mean((x0_v - x0)^2)

x0_v is the policy's, x0 the averaged policy's. A move is refused if one of its scores is invalid, or if it lowers a
listed term by more than its slack. The paper's caps are quantiles over the samples of one prompt, and its lengths are
absolute; here they are the terms' own, and shares of |x0|.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CAP_QUANTILE, FEWEST_SCORES = 0.75, 4  # the cap of a term without one, of so many scores of a row or more
# Adam's: moves are short, so 25 % of the tiny world's gradients are below its usual 1e-8. MEND's code has this value.
ADAM_EPSILON = 1e-12
RECENT, LEAST_ACCEPTED, MOST_ACCEPTED, TAU_FACTOR = 32, 0.3, 0.6, 1.5  # see VerdictState.adapt


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The verdict on B samples, with scores of T terms."""

    row: Tensor  # (B,) indices of samples
    move: Tensor  # (B,) index of the length, from 1; 0 without a move
    can_gain: Tensor  # (B,) bool: its scores are valid, one is below its cap, and the reward has a gradient there
    score: Tensor  # (B, T) float64 of x0, NaN for an invalid one
    caps: Tensor  # (B, T) float64
    gain: Tensor  # (B,) rise of the value by the move, 0 without one
    change: Tensor  # (B, T) change of the scores by the move, 0 without one
    refused: Tensor  # (B, T) share of its moves that each term refuses

    @property
    def accepted(self) -> Tensor:
        """Return whether a sample has a move, (B,) bool."""
        return self.move > 0


def price(lengths: Tensor, tau: float) -> Tensor:
    """Return the gain of the normalised reward that a move must exceed, by its length, a share of |x0|."""
    return lengths**2 / (2 * tau)


def value(scores: Tensor, caps: Tensor, scale: Tensor) -> Tensor:
    """Return the capped and weighted sum of scores (..., T), up to a constant. caps: (B, T); scale: (T,) weight / std.

    A term of scale 0 does not count, whatever its score.
    """
    return torch.where(scale != 0, scale * torch.minimum(scores, caps), 0).sum(-1)


def choose(
    row: Tensor, rises: Tensor, scores: Tensor, *, caps: Tensor, scale: Tensor, prices: Tensor, slacks: Tensor
) -> Choice:
    """Return the best move of each sample that gains more than its price, among those that no term refuses.

    row: (B,). rises: (B,) bool, whether the reward has a gradient there. scores: (1 + K, B, T) of x0 and then of its K
    moves, NaN for an invalid one. caps: (B, T), infinite without one. scale: (T,), 0 for a term without a weight.
    prices: (K,). slacks: (T,), infinite for a term that may fall.
    """
    start, moved = scores[0], scores[1:]
    refused = ~moved.isfinite() | (moved < start - slacks)  # (K, B, T)
    values = value(scores.nan_to_num(), caps, scale)
    can_gain = start.isfinite().all(-1) & rises & ((start < caps) & (scale != 0)).any(-1)
    net = (values[1:] - values[0] - prices[:, None]).masked_fill(refused.any(-1) | ~can_gain, -torch.inf)
    best, index = net.max(0)
    move = torch.where(best > 0, index + 1, 0)
    here = torch.arange(len(row), device=row.device)
    return Choice(
        row=row, move=move, can_gain=can_gain, score=start, caps=caps, gain=values[move, here] - values[0],
        change=torch.where(move[:, None] > 0, scores[move, here] - start, 0), refused=refused.double().mean(0),
    )  # fmt: skip


def loss_weights(accepted: Tensor, everywhere: Tensor, keep: float) -> Tensor:
    """Return the weight of each sample's mean square in L, (B,) float32.

    accepted: (B,) bool, of one pass. everywhere: (N,) bool, of all passes of all processes.
    """
    moves, others = (mask.sum().clamp(min=1) for mask in (everywhere, ~everywhere))
    return torch.where(accepted, 1 / moves, keep / others)


@dataclass(kw_only=True)
class VerdictState:
    """What the verdict learns in a run; equal on all processes.

    tau: the price's. recent: whether the last samples that could gain were moved, since tau changed. scores: {row's id:
    {label of a term: its scores so far}}, for the terms without a cap.
    """

    tau: float
    recent: list[bool] = field(default_factory=list)
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def adapt(self, accepted: Sequence[bool]) -> None:
        """Follow an update's samples that could gain: change tau when too few or too many of the last were moved.

        tau rises where fewer than LEAST_ACCEPTED of RECENT samples were, and falls where more than MOST_ACCEPTED were.
        After a change the count begins again.
        """
        self.recent = [*self.recent, *accepted][-RECENT:]
        share = sum(self.recent) / RECENT
        if len(self.recent) == RECENT and not LEAST_ACCEPTED <= share <= MOST_ACCEPTED:
            self.tau *= TAU_FACTOR if share < LEAST_ACCEPTED else 1 / TAU_FACTOR
            self.recent = []

    def cap(self, row: str, label: str) -> float:
        """Return the CAP_QUANTILE of a row's scores so far; infinite for fewer than FEWEST_SCORES."""
        scores = self.scores.get(row, {}).get(label, [])
        if len(scores) < FEWEST_SCORES:
            return torch.inf
        return torch.tensor(scores, dtype=torch.float64).quantile(CAP_QUANTILE).item()

    def record(self, row: str, label: str, score: float) -> None:
        """Add a score of a row by a term."""
        self.scores.setdefault(row, {}).setdefault(label, []).append(score)
