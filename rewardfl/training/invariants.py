"""Invariants that are checked during training. A run that breaks one stops with an error and an exit code.

Each is decided on numbers that are equal on all processes: all stop together.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from rewardfl.backbones.protocol import Experts


class InvariantError(RuntimeError):
    """An invariant of every run is broken. The message names it, and where to look."""

    exit_code = 1


class GradientMissing(InvariantError):
    """No parameter got a gradient although samples of the update had something to learn from."""

    exit_code = 3


class WeightsDiffer(InvariantError):
    """The processes do not train one model."""

    exit_code = 4


class BaseChanged(InvariantError):
    """Frozen weights have changed."""

    exit_code = 5


def no_signal(step: int, norm: float, signals: Tensor) -> float:
    """Return the metric train/no_signal: 1.0 where the update's gradient norm is exactly 0 for a reason, else 0.0.

    signals: (N,) bool over all processes, whether the sample had something to learn from. Raise GradientMissing if the
    norm is 0 although one had.
    """
    if norm == 0 and signals.any():
        raise GradientMissing(
            f"step {step}: the gradient norm is exactly 0 although {int(signals.sum())} of {len(signals)} samples had "
            "something to learn from; this is an error in the code or in a wrapper around it"
        )
    return float(norm == 0)


def check_contrast(step: int, norm: float, deviation: float, advantages: Tensor) -> None:
    """Raise GradientMissing if an update with an advantage left the policy's velocity exactly the old policy's.

    norm: of the gradient; an update with nan or inf was skipped. deviation: forward_rl.deviation after the optimizer's
    step. advantages: (N,) of all processes.
    """
    if math.isfinite(norm) and deviation == 0 and advantages.any():
        raise GradientMissing(
            f"step {step}: policy/deviation is exactly 0 after an update that had advantages: the policy's velocity is "
            "the old policy's, so that nothing is learned. The adapter that the optimizer changes is not the one that "
            "the forward pass uses, or both policies share their weights"
        )


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor's bits, read as integers modulo 2^64: (P,) int64 on the CPU.

    It is exact in any order, and any single changed element changes it. Under FSDP it is of the local part.
    """
    sums = []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        octets = local.detach().contiguous().view(-1).view(torch.uint8)
        if octets.storage_offset() % 8:  # DeepSpeed's buffer aligns to four bytes
            octets = octets.clone()
        # int64 words and a tail: a CPU sums any other width 20 times slower
        tail = len(octets) // 8 * 8
        sums.append(int(octets[:tail].view(torch.int64).sum() + octets[tail:].sum(dtype=torch.int64)))
    return torch.tensor(sums, dtype=torch.int64)


def frozen_parameters(model: Experts) -> dict[str, Tensor]:
    """Return the frozen parameters by name, of experts outside of the modules, too."""
    named: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    for name, expert in model.outside.items():
        named |= {f"{name}.{key}": value for key, value in expert.named_parameters()} if expert is not None else {}
    return named


def check_loaded(accelerator: Accelerator, model: Experts) -> None:
    """Raise WeightsDiffer unless all processes, before sharding, have loaded the same model and adapters."""
    loaded = frozen_parameters(model) | dict(model.named_parameters())
    differ = _differ(accelerator, bit_sums(list(loaded.values())))
    if differ.any():
        raise WeightsDiffer(
            f"the model is not the same on all processes ({_list(loaded, differ)}); give every node the same files in "
            "model.model_paths, distillation LoRAs, lora.init_from and checkpoints"
        )


class Weights:
    """The trained and frozen weights of a prepared model, with the base's checksums from when training began."""

    def __init__(self, accelerator: Accelerator, model: Experts):
        self.accelerator = accelerator
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.base = frozen_parameters(model)
        self.base_sums = bit_sums(list(self.base.values()))

    def check(self, step: int) -> None:
        """Raise BaseChanged or WeightsDiffer where the base has changed or trained weights differ. Collective."""
        changed = bit_sums(list(self.base.values())) != self.base_sums
        everywhere = _gather_rows(self.accelerator, changed.long()).any(0)
        if everywhere.any():
            parameters = _list(self.base, everywhere)
            raise BaseChanged(f"step {step}: {parameters} of the base are not what they were when training began")
        if self.accelerator.distributed_type == DistributedType.FSDP:
            return  # no process has all of a trained parameter
        differ = _differ(self.accelerator, bit_sums(list(self.trained.values())))
        if differ.any():
            raise WeightsDiffer(f"step {step}: {_list(self.trained, differ)} are not the same on all processes")


def _gather_rows(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Gather the (P,) values of all processes as (processes, P)."""
    return accelerator.gather(values.to(accelerator.device)).view(accelerator.num_processes, -1).cpu()


def _differ(accelerator: Accelerator, sums: Tensor) -> Tensor:
    """Return (P,) bool: the sums that are not equal on all processes."""
    gathered = _gather_rows(accelerator, sums)
    return (gathered != gathered[0]).any(0)


def _list(named: Mapping[str, Tensor], mask: Tensor) -> str:
    return f"{int(mask.sum())} of {len(named)} parameters ({list(named)[int(mask.nonzero()[0])]}, ...)"
