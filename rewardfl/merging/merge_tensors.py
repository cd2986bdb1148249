"""A checkpoint with LoRAs merged into it: the tensors to write, the loss of rounding, and verification of the output.

A bfloat16 file cannot hold a small update whatever the arithmetic: a weight that moves by less than half its spacing
does not move. So `MergeLoss` measures the part that survives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl.merging.writing import Part, copy_entry
from rewardfl.weights import merge, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, as_bytes
from rewardfl.weights.merge import Updates
from rewardfl.weights.shards import Checkpoint, Entry, InputError

STORED_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --dtype
SAMPLE_ROWS = 64  # for the estimate of the loss, from each merged tensor


@dataclass(kw_only=True)
class MergeLoss:
    """The part of the intended update that the file holds, over sampled rows: <realised, intended> / |intended|^2."""

    along: float = 0.0  # <realised, intended>
    intended: float = 0.0  # |intended|^2
    error: float = 0.0  # |realised - intended|^2
    unchanged: int = 0
    elements: int = 0

    def add(self, before: Tensor, merged: Tensor, after: Tensor) -> None:
        """Add rows, all float32. before: the base's; merged: unrounded; after: as stored."""
        intended, realised = (merged - before).double(), (after - before).double()
        self.along += float((realised * intended).sum())
        self.intended += float(intended.square().sum())
        self.error += float((realised - intended).square().sum())
        self.unchanged += int((after == before).sum())
        self.elements += before.numel()

    def add_products(self, intended: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        """Add a LoRA's (up, down) as intended and as stored, by products of their small sides."""

        def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
            return float(((a[0].T @ b[0]) * (a[1] @ b[1].T)).sum())

        pairs = [tuple(factor.flatten(1).double() for factor in pair) for pair in (intended, stored)]
        along, square = inner(pairs[0], pairs[1]), inner(pairs[0], pairs[0])
        self.along += along
        self.intended += square
        self.error += max(0.0, square - 2 * along + inner(pairs[1], pairs[1]))

    @property
    def share(self) -> float:
        """Return 1 when the file moved as far as the LoRA says, on average; nan when the LoRA moves nothing."""
        return self.along / self.intended if self.intended else float("nan")

    @property
    def relative_error(self) -> float:
        return (self.error / self.intended) ** 0.5 if self.intended else float("nan")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tensors to write for one expert. merged: {tensor by its name in the base: its updates with strengths}."""

    base: Checkpoint
    parts: list[Part]
    merged: Mapping[str, Updates]
    naming: str  # the base's names: diffusers or original


def plan_merge(base: Checkpoint, loras: Sequence[tuple[Lora, float]], dtype: str, names: str) -> Plan:
    """Return the parts of the merged checkpoint.

    dtype: keep | fp32 | bf16 | fp16; names: keep | diffusers | original | comfy. bf16 and fp16 leave in float32 the
    tensors that diffusers keeps there. Raise InputError if an update does not fit (rewardfl/weights/merge.py).
    """
    merged = merge.updates_by_tensor(base, loras)
    models, naming, commons = merge.match_names(base)
    is_wan = models == (WAN,)
    if not is_wan and names in ("original", "comfy"):
        raise InputError(f"{base.path} is {' or '.join(models)}; --rename {names} knows the names of {WAN} alone")
    parts = []
    for name, entry in base.tensors.items():
        common, updates = commons[name], merged.get(name, [])
        stored = entry.dtype
        if dtype != "keep":
            stored = "F32" if is_wan and wan_names.stays_float32(common) else STORED_DTYPES[dtype]
        new_name = wan_names.output_name(common, name, names)
        if updates or stored != entry.dtype:
            pieces = _merged_pieces(entry, updates, stored)
            parts.append(Part(name=new_name, dtype=stored, shape=entry.shape, pieces=pieces))
        else:
            parts.append(copy_entry(entry, new_name))
    return Plan(base=base, parts=parts, merged=merged, naming=naming)


def _merged_pieces(entry: Entry, updates: Updates, stored: str) -> Callable[[], Iterator[memoryview]]:
    """Return the pieces of a tensor with its updates, or cast without one, rounded once to the stored dtype."""

    def pieces() -> Iterator[memoryview]:
        loaded = merge.load_updates(entry, updates)
        for first, count in merge.row_blocks(entry):
            # a copy, which torch aligns, gives the same bits again: `verify` makes every piece twice
            rows = merge.add_updates(entry, loaded, merge.read_rows(entry, first, count).clone(), first)
            rounded = rows.to(TORCH_DTYPES[stored])
            if not bool(torch.isfinite(rounded).all()):
                merged = " after merging" if updates else ""
                raise InputError(
                    f"{entry.file}: {entry.name}{merged} has nan, or values beyond what {stored} can hold; use --dtype "
                    "fp32 or bf16"
                )
            yield as_bytes(rounded)

    return pieces


def estimate_loss(plan: Plan) -> MergeLoss:
    """Estimate the loss from a few rows of every merged tensor. A DoRA of the inputs needs all rows."""
    loss = MergeLoss()
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        if name in plan.merged:
            count = min(SAMPLE_ROWS, entry.rows)
            first = (entry.rows - count) // 2
            before = merge.read_rows(entry, first, count)
            merged = merge.add_updates(entry, merge.load_updates(entry, plan.merged[name]), before.clone(), first)
            loss.add(before, merged, merged.to(TORCH_DTYPES[part.dtype]).float())
    return loss
