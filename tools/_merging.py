"""A checkpoint with LoRAs merged into it: what to write, how much of it arrives, and a second look at what was written.

A bfloat16 file cannot hold a small update whatever the arithmetic: a weight that moves by less than half its spacing
does not move. So `Kept` measures what survived.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import Lock

import torch
from torch import Tensor

from rewardfl.weights import merge, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, Update, as_bytes, load_tensor
from rewardfl.weights.shards import Checkpoint, Entry, Refused
from rewardfl_tools._writing import Part, copy_of

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --dtype
ADDING = Lock()  # of one Kept, to which the tensors of a plan add in threads
SAMPLE_ROWS = 64  # of each merged tensor, for the dry run's estimate and for verification


@dataclass
class Kept:
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
    kept: Kept = field(default_factory=Kept)


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
    kept = Kept()
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


def _merging(
    entry: Entry, updates: Sequence[tuple[Update, float]], stored: str, kept: Kept
) -> Callable[[], Iterator[Callable[[], memoryview]]]:
    """The pieces of a tensor with its updates, or with none, in another dtype; what arrives is added to `kept`."""

    def pieces() -> Iterator[Callable[[], memoryview]]:
        add = merge.adder(entry, updates)
        blocks = list(merge.row_blocks(entry))
        sampled = blocks[len(blocks) // 2] if updates else None

        def merged(first: int, count: int) -> memoryview:
            torch.set_num_threads(1)  # of this thread: torch's own would wait for each other at every operation
            rows = merge.read_rows(entry, first, count)
            before = rows[:SAMPLE_ROWS].clone() if (first, count) == sampled else None
            rows = add(rows, first)
            if before is not None:
                wanted = rows[:SAMPLE_ROWS]
                with ADDING:
                    kept.add(before, wanted, wanted.to(TORCH_DTYPES[stored]).float())
            return to_bytes(rows, stored, f"{entry.name} of {entry.file}{' after merging' if updates else ''}")

        return (partial(merged, *block) for block in blocks)

    return pieces


def estimate_kept(plan: Plan) -> Kept:
    """What the plan would keep, from a few rows of every merged tensor; writes nothing.

    Reads little, but all of a tensor whose DoRA is of the inputs.
    """
    kept = Kept()
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        if name in plan.merged:
            count = min(SAMPLE_ROWS, entry.rows)
            first = (entry.rows - count) // 2
            before = merge.read_rows(entry, first, count)
            wanted = merge.adder(entry, plan.merged[name])(before.clone(), first)
            kept.add(before, wanted, wanted.to(TORCH_DTYPES[part.dtype]).float())
    return kept


# ------------------------------------------------------------------------------------------------------------
# A second look at what was written


def verify(plan: Plan, written: Checkpoint, progress: Callable[[int], object]) -> None:
    """Compare the output with base and LoRAs: copies byte by byte, merged tensors by rows computed in float64.

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
            if any(a() != b() for a, b in zip(entry.pieces(), output.pieces(), strict=True)):
                raise Refused(f"{written.path}: {part.name} is not a copy of {entry.name} in {entry.file}")
        else:
            for first, count in merge.row_blocks(entry):
                wanted = merge.read_rows(entry, first, count).to(TORCH_DTYPES[output.dtype]).float()
                if not torch.equal(wanted, merge.read_rows(output, first, count)):
                    raise Refused(f"{written.path}: {part.name} is not {entry.name} rounded to {output.dtype}")
        progress(part.nbytes)


def _verify_merged(entry: Entry, updates: Sequence[tuple[Update, float]], output: Entry) -> None:
    """Some rows from both ends and the middle, by the formula and in float64, not by the code that merged them."""
    total = entry.rows
    count = min(8, total)
    lengths = [None if update.wd_on_output else _column_lengths(entry, update) for update, _ in updates]
    for first in sorted({0, (total - count) // 2, total - count}):
        rows = slice(first, first + count)
        base = merge.read_rows(entry, first, count).double()
        wanted = base.clone()
        for (update, strength), columns in zip(updates, lengths, strict=True):
            if entry.name.endswith(".bias"):
                for source, factor in update.biases():
                    wanted += strength * factor * load_tensor(source).double().reshape(-1, 1)[rows]
                continue
            if update.down is not None:
                up, down = (load_tensor(source).double().flatten(1) for source in (update.up, update.down))
                new = base + update.scale * (up[rows] @ down)
                if update.magnitude is not None and columns is None:
                    length = new.square().sum(1, keepdim=True).sqrt()
                    new = load_tensor(update.magnitude).double().reshape(-1, 1)[rows] * new / length
                elif update.magnitude is not None:
                    kernel = (-1, entry.shape[1], prod(entry.shape[2:]))
                    magnitude = load_tensor(update.magnitude).double().reshape(-1, 1)
                    new = (magnitude * new.reshape(kernel) / columns).reshape(new.shape)
                wanted += strength * (new - base)
            if update.diff is not None:
                wanted += strength * load_tensor(update.diff).double().reshape(total, -1)[rows]
        found = merge.read_rows(output, first, count).double()
        spacing = torch.finfo(TORCH_DTYPES[output.dtype]).eps * wanted.abs().clamp(min=1e-6)
        largest = float(((found - wanted).abs() - spacing).max())
        if largest > 1e-6:
            raise Refused(f"{output.file}: {output.name} is not base + LoRA (off by {largest:.3g} beyond rounding)")


def _column_lengths(entry: Entry, update: Update) -> Tensor:
    """(in, 1): what merge.column_lengths computes, all in float64."""
    up, down = load_tensor(update.up).double().flatten(1), load_tensor(update.down).double().flatten(1)
    squares = torch.zeros(entry.shape[1], 1, dtype=torch.float64)
    for first, count in merge.row_blocks(entry):
        new = merge.read_rows(entry, first, count).double() + update.scale * (up[first : first + count] @ down)
        squares += new.reshape(count, entry.shape[1], -1).square().sum((0, 2)).reshape(-1, 1)
    return squares.sqrt()
