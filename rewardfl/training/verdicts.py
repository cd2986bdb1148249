"""The verdict of a run: the terms that judge, the moves of an update, and their metrics."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl import verdict
from rewardfl.backbones.protocol import Conditioning, Velocity
from rewardfl.config.schema import SampleConfig, VerdictConfig
from rewardfl.reward_flow import Trajectory, ascend, endpoint_change
from rewardfl.rewards.scoring import Term, score_safely
from rewardfl.training.distributed import Distributed
from rewardfl.training.samples import Batch, Sample
from rewardfl.verdict import Choice, VerdictState


@dataclass(frozen=True)
class Move:
    """What one forward pass of B samples learns, on the device."""

    batch: Batch
    velocity: Velocity  # the policy's
    trajectory: Trajectory  # of the averaged policy, with its single step
    shift: Tensor  # (B, C, T, h, w) move of x0, 0 for a sample without one
    choice: Choice

    def change(self) -> Tensor:
        """Return by how much the policy's x0 differs from the rollout's, as `shift`."""
        return endpoint_change(self.velocity, self.trajectory, self.batch.schedule.sigmas)


@dataclass(frozen=True, kw_only=True)
class MoveJudge:
    """The verdict of a run on moves of its samples' clean latents."""

    sample: SampleConfig
    terms: Mapping[int, Term]  # those that count or that `pareto` lists, by their position among the run's
    samples: Sequence[Sample]
    state: VerdictState
    decode: Callable[[Tensor, Conditioning], Tensor]
    job: Distributed
    always_learns: bool  # without a move, too: from the averaged policy or the data anchor

    @property
    def settings(self) -> VerdictConfig:
        return self.sample.verdict or VerdictConfig()

    def moves(self, x0: Tensor, grad_x0: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Return no move and those by each length (1 + K, B, ...), and whether the reward has a gradient, (B,) bool.

        x0, grad_x0, share: as in reward_flow.ascend.
        """
        shifts, rises = zip(*[ascend(x0, grad_x0, length, share) for length in self.sample.lengths], strict=True)
        return torch.stack([torch.zeros_like(x0), *shifts]), rises[-1]

    def score(self, batch: Batch, x0: Tensor) -> Tensor:
        """Decode and score clean latents (B, C, T, h, w) without a graph: (B, T) float64, NaN for an invalid score."""
        with torch.no_grad():
            video, scores = self.decode(x0, batch.conditioning).float(), []
            for i, term in self.terms.items():
                references = [self.samples[row].references[i] for row in batch.rows]
                output = score_safely(term.reward, video, references).output
                scores.append(output.score.double().masked_fill(~output.valid, torch.nan))
        return self.job.broadcast_in_clip(torch.stack(scores, 1).to(x0.device))

    def choose(
        self, batch: Batch, velocity: Velocity, trajectory: Trajectory, shifts: Tensor, scores: Tensor, rises: Tensor
    ) -> Move:
        """Return what a pass learns. shifts, rises: of `moves`; scores: (1 + K, B, T), of `score` for each shift."""
        slacks = [self.settings.pareto.get(term.label, torch.inf) for term in self.terms.values()]
        choice = verdict.choose(
            torch.tensor(batch.rows, device=scores.device), rises, scores,
            caps=scores.new_tensor([[self._cap(row, term) for term in self.terms.values()] for row in batch.rows]),
            scale=self._scale.to(scores), slacks=scores.new_tensor(slacks),
            prices=verdict.price(scores.new_tensor(self.sample.lengths), self.state.tau),
        )  # fmt: skip
        shift = shifts[choice.move, torch.arange(len(rises), device=rises.device)]
        return Move(batch, velocity, trajectory, shift, choice)

    def loss_weights(self, choice: Choice, everywhere: Choice) -> Tensor:
        """Return the weights (B,) of a pass's samples in the loss. everywhere: the choices of all passes, processes."""
        return verdict.loss_weights(choice.accepted, everywhere.accepted, self.settings.keep)

    def rests(self, choices: Choice) -> bool:
        """Return whether an update has nothing to learn. choices: of all passes of all processes."""
        return not (self.always_learns or bool(choices.accepted.any()))

    def finish(self, moves: Sequence[Move], choices: Choice) -> dict[str, float]:
        """Return the metrics of an update, and learn from it: tau, and the rows' scores. Collective.

        choices: of all moves of all processes. After the optimizer's step, one pass of each process is measured again.
        """
        measured = max(moves, key=lambda move: int(move.choice.accepted.sum()))
        realised = self.job.gather(self._realised(measured))
        accepted, moved = choices.accepted, choices.change[choices.accepted]  # moved: (N, T)
        numbers = {
            "accepted": accepted.double(), "can_gain": choices.can_gain.double(),
            "length": moved.new_tensor(self.sample.lengths)[choices.move[accepted] - 1],
            "realised_move": realised[:, 0], "realised_gain": realised[:, 1], "tau": moved.new_tensor(self.state.tau),
        }  # fmt: skip
        for i, term in enumerate(self.terms.values()):
            numbers[f"gain/{term.label}"] = moved[:, i]
            numbers[f"largest_fall/{term.label}"] = torch.cat([-moved[:, i], moved.new_zeros(1)]).max()
            numbers[f"refused/{term.label}"] = choices.refused[:, i]
        self._record(choices)
        self.state.adapt(accepted[choices.can_gain].tolist())
        return {f"verdict/{name}": float(values.nanmean()) for name, values in numbers.items()}

    def _realised(self, move: Move) -> Tensor:
        """Return the shares (B, 2) of the moves, and of their gains, that the policy has now; NaN without a move.

        The first is the change of x0 along the move, over the move.
        """
        choice, shift = move.choice, move.shift.flatten(1)
        with torch.no_grad():
            change = move.change()
            scores = self.score(move.batch, move.trajectory.x0 + change)
        values = verdict.value(torch.stack([choice.score, scores]), choice.caps, self._scale.to(scores))
        along = (change.flatten(1) * shift).sum(1) / shift.square().sum(1)
        shares = torch.stack([along.double(), (values[1] - values[0]) / choice.gain], 1)
        return shares.masked_fill(~choice.accepted[:, None], torch.nan)

    def _record(self, choices: Choice) -> None:
        """Add the valid scores of the terms whose caps are quantiles."""
        for row, scores in zip(choices.row.tolist(), choices.score.tolist(), strict=True):
            for term, score in zip(self.terms.values(), scores, strict=True):
                if math.isfinite(score) and term.weight and not self._has_cap(term):
                    self.state.record(self.samples[row].row.id, term.label, score)

    @property
    def _scale(self) -> Tensor:
        """Return the terms' weights in units of their deviations, (T,) float64."""
        return torch.tensor([term.weight / term.std for term in self.terms.values()], dtype=torch.float64)

    def _has_cap(self, term: Term) -> bool:
        return term.reward.has_cap or term.label in self.settings.caps

    def _cap(self, row: int, term: Term) -> float:
        """Return the cap of a term for a row; infinite where the reward ends at one itself."""
        if self._has_cap(term):
            return self.settings.caps.get(term.label, torch.inf)
        return self.state.cap(self.samples[row].row.id, term.label)
