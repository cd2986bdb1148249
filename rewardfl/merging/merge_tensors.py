"""A checkpoint with LoRAs merged into it: what to write, how much of it arrives, and a second look at what was written.

A bfloat16 file cannot hold a small update whatever the arithmetic: a weight that moves by less than half its spacing
does not move. So `Kept` measures what survived.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rewardfl.merging.writing import Part, copy_of
from rewardfl.weights import merge, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, Update, as_bytes
from rewardfl.weights.shards import Checkpoint, Entry, Refused

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --dtype

SAMPLE_ROWS = 64  # of each merged tensor, for the dry run's estimate and for verification


@dataclass
class MergeLoss:
    """How much of the intended update arrived in the file, over sampled rows: <realised, intended> / |intended|^2."""

    along: float = 0.0  # <realised, intended>
    intended: float = 0.0  # |intended|^2
    error: float = 0.0  # |realised - intended|^2
    unchanged: int = 0
    elements: int = 0

    def add(self, before: Tensor, wanted: Tensor, after: Tensor) -> None:
        """before: stored weights; wanted: merged, unrounded; after: as stored. All float32."""
        intended, realised = (wanted - before).double(), (after - before).double()
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
        along, whole = inner(pairs[0], pairs[1]), inner(pairs[0], pairs[0])
        self.along += along
        self.intended += whole
        self.error += max(0.0, whole - 2 * along + inner(pairs[1], pairs[1]))

    @property
    def share(self) -> float:
        """1 when the file moved as far as the LoRA says, on average; nan when the LoRA moves nothing."""
        return self.along / self.intended if self.intended else float("nan")

    @property
    def relative_error(self) -> float:
        return (self.error / self.intended) ** 0.5 if self.intended else float("nan")


@dataclass(frozen=True)
class Plan:
    """What to write for one expert. `merged`: target tensor (name in the base) -> its updates with strengths."""

    base: Checkpoint
    parts: list[Part]
    merged: dict[str, list[tuple[Update, float]]]
    naming: str  # of the base: diffusers or original
    kept: MergeLoss = field(default_factory=MergeLoss)


def plan_merge(base: Checkpoint, loras: Sequence[tuple[Lora, float]], dtype: str, names: str) -> Plan:
    """Parts of the merged checkpoint. dtype: keep | fp32 | bf16 | fp16; names: keep | diffusers | original | comfy.

    bf16 and fp16 leave those tensors in float32 that diffusers keeps in float32. Refused for whatever does not
    fit (see rewardfl/weights/merge.py).
    """
    merged = merge.updates_by_tensor(base, loras)
    models, naming, commons = merge.base_names(base)
    is_wan = models == (WAN,)
    if not is_wan and names in ("original", "comfy"):
        raise Refused(f"{base.path} is {' or '.join(models)}; --rename {names} knows the names of {WAN} alone")
    kept = MergeLoss()
    parts = []
    for name, entry in base.tensors.items():
        common, updates = commons[name], merged.get(name, [])
        stored = entry.dtype
        if dtype != "keep":
            stored = "F32" if is_wan and wan_names.stays_float32(common) else DTYPES[dtype]
        new_name = wan_names.output_name(common, name, names)
        if updates or stored != entry.dtype:
            parts.append(Part(new_name, stored, entry.shape, _merging(entry, updates, stored, kept)))
        else:
            parts.append(copy_of(entry, new_name))
    return Plan(base, parts, merged, naming, kept)


def to_bytes(values: Tensor, dtype: str, what: str) -> memoryview:
    """The values rounded once to the stored dtype. Refused when they do not fit into it."""
    rounded = values.to(TORCH_DTYPES[dtype])
    # a sum is finite only if all its terms are, and takes a tenth of the time of looking at each of them
    if not bool(rounded.sum(dtype=torch.float32).isfinite()) and not bool(torch.isfinite(rounded).all()):
        raise Refused(f"{what} has values beyond what {dtype} can hold, or nan; use --dtype fp32 or bf16")
    return as_bytes(rounded)


def _stored(values: Tensor, dtype: str) -> Tensor:
    return values.to(TORCH_DTYPES[dtype]).float()


def _merging(
    entry: Entry, updates: Sequence[tuple[Update, float]], stored: str, kept: MergeLoss
) -> Callable[[], Iterator[memoryview]]:
    """The pieces of a tensor with its updates, or with none, in another dtype; what arrives is added to `kept`."""

    def pieces() -> Iterator[memoryview]:
        add = merge.adder(entry, updates)
        blocks = list(merge.row_blocks(entry))
        sampled = blocks[len(blocks) // 2] if updates else None
        for first, count in blocks:
            rows = merge.read_rows(entry, first, count)
            before = rows[:SAMPLE_ROWS].clone() if (first, count) == sampled else None
            rows = add(rows, first)
            if before is not None:
                wanted = rows[:SAMPLE_ROWS]
                kept.add(before, wanted, _stored(wanted, stored))
            yield to_bytes(rows, stored, f"{entry.name} of {entry.file}{' after merging' if updates else ''}")

    return pieces


def estimate_kept(plan: Plan) -> MergeLoss:
    """What the plan would keep, from a few rows of every merged tensor; writes nothing.

    Reads little, but all of a tensor whose DoRA is of the inputs.
    """
    kept = MergeLoss()
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        if name in plan.merged:
            count = min(SAMPLE_ROWS, entry.rows)
            first = (entry.rows - count) // 2
            before = merge.read_rows(entry, first, count)
            wanted = merge.adder(entry, plan.merged[name])(before.clone(), first)
            kept.add(before, wanted, _stored(wanted, part.dtype))
    return kept


def verify_merge(plan: Plan, written: Checkpoint, progress: Callable[[int], object]) -> None:
    """Compare the output with base and LoRAs: copies byte by byte, merged tensors by rows computed again.

    Refused (the output is wrong) at the first difference beyond the rounding of the stored dtype.
    """
    names = {part.name for part in plan.parts}
    if surplus := written.tensors.keys() ^ names:
        raise Refused(f"{written.path} and the plan differ in tensor {sorted(surplus)[0]}")
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        output = written.tensors[part.name]
        if (output.dtype, output.shape) != (part.dtype, part.shape):
            raise Refused(f"{written.path}: {part.name} is {output.dtype} {output.shape}")
        if name in plan.merged:
            _verify_merged(entry, plan.merged[name], output)
        elif output.dtype == entry.dtype:
            if any(a != b for a, b in zip(entry.pieces(), output.pieces(), strict=True)):
                raise Refused(f"{written.path}: {part.name} is not a copy of {entry.name} in {entry.file}")
        elif not all(
            torch.equal(_stored(merge.read_rows(entry, *rows), output.dtype), merge.read_rows(output, *rows))
            for rows in merge.row_blocks(entry)
        ):
            raise Refused(f"{written.path}: {part.name} is not {entry.name} rounded to {output.dtype}")
        progress(part.nbytes)


def _verify_merged(entry: Entry, updates: Sequence[tuple[Update, float]], output: Entry) -> None:
    """Compare the first, the middle and the last block of rows with base + LoRA, computed again."""
    add, blocks = merge.adder(entry, updates), list(merge.row_blocks(entry))
    for first, count in {blocks[0], blocks[len(blocks) // 2], blocks[-1]}:
        wanted = add(merge.read_rows(entry, first, count), first)
        spacing = torch.finfo(TORCH_DTYPES[output.dtype]).eps * wanted.abs().clamp(min=1e-6)
        largest = float(((merge.read_rows(output, first, count) - wanted).abs() - spacing).max())
        if largest > 1e-6:
            raise Refused(f"{output.file}: {output.name} is not base + LoRA (off by {largest:.3g} beyond rounding)")
