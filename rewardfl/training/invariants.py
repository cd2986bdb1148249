"""What must hold while a script trains, checked while it trains. A run that breaks one of these stops and says which.

    a gradient of exactly 0 has a reason: no sample of the update had anything to learn from   GradientMissing
    all processes hold the same trained weights, after the first update and at every save      WeightsDiffer
    the base model is what it was when training began, at the same places                      BaseChanged

Each has an exit code of its own. Each is decided on numbers that are the same on all processes: all stop together.
"""

from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from rewardfl.backbones.protocol import Experts


class InvariantError(RuntimeError):
    """Something that must hold in every run does not. The message says what, and where to look."""

    exit_code = 1


class GradientMissing(InvariantError):
    """The update's samples had something to learn from, and no parameter got a gradient."""

    exit_code = 3


class WeightsDiffer(InvariantError):
    """The processes do not train one model."""

    exit_code = 4


class BaseChanged(InvariantError):
    """Frozen weights are not what they were."""

    exit_code = 5


def no_signal(step: int, norm: float, signals: Tensor) -> float:
    """1.0 where the update's gradient norm is exactly 0 for a reason, else 0.0: the metric train/no_signal.

    signals: bool, of all samples of all processes: whether it had a cotangent, an advantage that was not clipped away,
    or a KL divergence. GradientMissing where the norm is 0 although one of them had.
    """
    if norm == 0 and signals.any():
        raise GradientMissing(
            f"step {step}: the gradient norm is exactly 0 although {int(signals.sum())} of {len(signals)} samples had "
            "something to learn from: no trained parameter took part in the backward pass, or its gradients were never "
            "reduced. This is an error in the code or in a wrapper around it; nothing was learned in this step"
        )
    return float(norm == 0)


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(P,) int64 on the CPU: of each tensor the sum of its bits read as integers, modulo 2^64.

    Each is computed where the tensor lies, the base model's without a copy. The sum is exact in whatever order it is
    taken, so equal weights give equal sums on every device, and any single changed element gives another. Of a tensor
    that FSDP keeps in parts it is that of the part which is here.
    """
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return torch.tensor([_bit_sum(part.detach()) for part in local], dtype=torch.int64)


def _bit_sum(tensor: Tensor) -> int:
    octets = tensor.contiguous().view(-1).view(torch.uint8)  # parameters are contiguous: no copy
    if octets.storage_offset() % 8:  # in DeepSpeed's buffer they begin at any multiple of four bytes
        octets = octets.clone()
    whole = len(octets) // 8 * 8
    # eight bytes at a time: on a CPU integers of any other width are summed 20 times slower
    words, rest = octets[:whole].view(torch.int64).sum(), octets[whole:].sum(dtype=torch.int64)
    return int(words + rest)


def frozen_parameters(model: Experts) -> dict[str, Tensor]:
    """By name; frozen experts may stand outside of the modules."""
    named: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    for name, expert in model.outside.items():
        named |= {f"{name}.{key}": value for key, value in expert.named_parameters()} if expert is not None else {}
    return named


def check_loaded(accelerator: Accelerator, model: Experts) -> None:
    """WeightsDiffer unless all processes have loaded the same base model. Before `prepare`, while each has all of it.

    DDP does not send the base around (see distributed.prepare), and would not tell: two nodes may hold other files.
    """
    base = frozen_parameters(model)
    differ = _differ(accelerator, bit_sums(list(base.values())))
    if differ.any():
        raise WeightsDiffer(
            f"the base model is not the same on all {accelerator.num_processes} processes: {int(differ.sum())} of "
            f"{len(base)} frozen parameters differ, the first is {_first(base, differ)}; model.model_paths (or a "
            "distillation LoRA) leads to other files on some node"
        )


class Weights:
    """The weights of a run under watch, from when training begins.

    model: as it is after accelerator.prepare has seen it.
    """

    def __init__(self, accelerator: Accelerator, model: Experts):
        self.accelerator = accelerator
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.base = frozen_parameters(model)
        self.base_sums = bit_sums(list(self.base.values()))

    def check(self, step: int) -> None:
        """Stop where the base has changed, or the processes' trained weights differ. On all processes.

        Under FSDP no process has all of a trained parameter, and there is nothing to compare.
        """
        changed = bit_sums(list(self.base.values())) != self.base_sums
        everywhere = _of_all(self.accelerator, changed.long()).any(0)
        if everywhere.any():
            raise BaseChanged(
                f"step {step}: {int(everywhere.sum())} of {len(self.base)} frozen parameters of the base model are not "
                f"what they were when training began, the first is {_first(self.base, everywhere)}. The reference of "
                "the KL and the adapter that is saved would belong to another model"
            )
        if self.accelerator.distributed_type == DistributedType.FSDP:
            return
        differ = _differ(self.accelerator, bit_sums(list(self.trained.values())))
        if differ.any():
            raise WeightsDiffer(
                f"step {step}: {int(differ.sum())} of {len(self.trained)} trained parameters are not the same on all "
                f"{self.accelerator.num_processes} processes, the first is {_first(self.trained, differ)}: each would "
                "go on to train a model of its own. Their gradients were not reduced"
            )


def _of_all(accelerator: Accelerator, values: Tensor) -> Tensor:
    """(processes, P) what each has of (P,) values."""
    return accelerator.gather(values.to(accelerator.device)).view(accelerator.num_processes, -1).cpu()


def _differ(accelerator: Accelerator, sums: Tensor) -> Tensor:
    """(P,) bool: which of them are not the same on all processes."""
    everyones = _of_all(accelerator, sums)
    return (everyones != everyones[0]).any(0)


def _first(named: Mapping[str, Tensor], chosen: Tensor) -> str:
    return list(named)[int(chosen.nonzero()[0])]
