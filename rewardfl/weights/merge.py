"""Merging LoRAs into a checkpoint, a few rows of one tensor at a time.

All arithmetic is float32 with one rounding at the end. A bfloat16 file cannot hold a small update whatever the
arithmetic: a weight that moves by less than half its spacing does not move. So `Kept` measures what survived.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import Lock

import torch
from torch import Tensor

from rewardfl.weights import image_names, shards, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, Update, as_bytes, load_tensor
from rewardfl.weights.shards import BLOCK_BYTES, Checkpoint, Entry, Part, Refused, copy_of

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --dtype
# adds to rows of a tensor in place; it is given them, as the base has them, and which of the tensor's rows they are
Term = Callable[[Tensor, Tensor, slice], Tensor]
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


# ------------------------------------------------------------------------------------------------------------
# Checks: everything that headers and the LoRA's values can tell, before a byte is written


def check_finite(lora: Lora) -> float:
    """Largest magnitude of the `up`, `diff` and bias tensors, which is 0 for a LoRA that was never trained.

    Refused when any of the LoRA's values is nan or infinite.
    """
    largest = 0.0
    for update in lora.updates.values():
        for role, source in update.sources().items():
            values = load_tensor(source)
            if not bool(torch.isfinite(values).all()):
                raise Refused(f"{lora.path}: {role} of {update.module} has values that are nan or infinite")
            if role not in ("down", "magnitude"):
                largest = max(largest, float(values.abs().max()))
    return largest


def changes(update: Update, names: Collection[str]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """{tensor of the base, by diffusers' name: what the update adds to it, in words, and its shape}."""
    found = defaultdict(list)
    weight = update.module if update.module in names else f"{update.module}.weight"
    if update.down is not None:
        found[weight].append(("up @ down", (update.up.shape[0], *update.down.shape[1:])))
    if update.diff is not None:
        found[weight].append(("diff", tuple(update.diff.shape)))
    for source, _ in update.biases():
        found[f"{update.module}.bias"].append(("bias", tuple(source.shape)))
    return found


def check_fits(lora: Lora, update: Update, names: Mapping[str, Entry]) -> None:
    """Refused when the base has no such tensor, or one of another shape."""
    for target, added in changes(update, names).items():
        if target not in names:
            raise Refused(
                f"{lora.path}: the base has no {target} for the LoRA's {update.module}; it was trained on another "
                "model (with more blocks, or as Wan2.1-I2V has image projections that Wan2.2 lacks)"
            )
        shape = names[target].shape
        if 0 in shape:
            raise Refused(f"{names[target].file}: {names[target].name} is {shape}; there is nothing to merge into")
        for what, given in added:
            if given != shape:
                raise Refused(f"{lora.path}: {what} of {update.module} is {given}, the base's {target} is {shape}")


# ------------------------------------------------------------------------------------------------------------
# Planning


def base_names(base: Checkpoint) -> tuple[tuple[str, ...], str, dict[str, str]]:
    """(what models the base may be, diffusers | original, {tensor: its diffusers name}).

    Image models share names, so fragments of them may be several. Refused when the names are those of no model.
    """
    if models := image_names.base_models(base):
        return models, "diffusers", {name: name for name in base.tensors}
    naming, commons = wan_names.naming(base)
    return (WAN,), naming, commons


def plan_merge(base: Checkpoint, loras: Sequence[tuple[Lora, float]], dtype: str, names: str) -> Plan:
    """Parts of the merged checkpoint. dtype: keep | fp32 | bf16 | fp16; names: keep | diffusers | original | comfy.

    bf16 and fp16 leave those tensors in float32 that diffusers keeps in float32. Refused for whatever does not
    fit (see the checks above).
    """
    shards.check_unquantised(base)
    models, naming, commons = base_names(base)
    is_wan = models == (WAN,)
    if not is_wan and names in ("original", "comfy"):
        raise Refused(f"{base.path} is {' or '.join(models)}; --rename {names} knows the names of {WAN} alone")
    by_diffusers_name = {commons[name]: entry for name, entry in base.tensors.items()}
    merged: dict[str, list[tuple[Update, float]]] = {}
    for lora, strength in loras:
        if set(models).isdisjoint(lora.models):
            raise Refused(
                f"{lora.path} has the names of {' or '.join(lora.models)}, the base {base.path} is "
                f"{' or '.join(models)}; give the base that it was trained on"
            )
        for update in lora.updates.values():
            check_fits(lora, update, by_diffusers_name)
            for target in changes(update, by_diffusers_name):
                merged.setdefault(by_diffusers_name[target].name, []).append((update, strength))
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


# ------------------------------------------------------------------------------------------------------------
# Arithmetic


def row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of pieces of about BLOCK_BYTES in bfloat16, twice that while they are merged."""
    total = entry.rows
    rows = max(1, BLOCK_BYTES // max(1, 2 * prod(entry.shape[1:])))
    for first in range(0, total, rows):
        yield first, min(rows, total - first)


def read_rows(entry: Entry, first: int, count: int) -> Tensor:
    """(count, everything else flattened) float32."""
    flat = torch.frombuffer(entry.read(first, count), dtype=TORCH_DTYPES[entry.dtype])
    return flat.reshape(count, -1).float()


def to_bytes(values: Tensor, dtype: str, what: str) -> memoryview:
    """The values rounded once to the stored dtype. Refused when they do not fit into it."""
    rounded = values.to(TORCH_DTYPES[dtype])
    # a sum is finite only if all its terms are, and takes a tenth of the time of looking at each of them
    if not bool(rounded.sum(dtype=torch.float32).isfinite()) and not bool(torch.isfinite(rounded).all()):
        raise Refused(f"{what} has values beyond what {dtype} can hold, or nan; use --dtype fp32 or bf16")
    return as_bytes(rounded)


def terms(entry: Entry, update: Update, strength: float) -> Iterator[Term]:
    """What an update adds to rows of a tensor, loaded."""
    if entry.name.endswith(".bias"):
        for source, factor in update.biases():
            yield _full(load_tensor(source).reshape(-1, 1), strength * factor)
        return
    if update.down is not None:
        up, down = load_tensor(update.up).flatten(1), load_tensor(update.down).flatten(1)
        if update.magnitude is None:
            yield lambda rows, base, chosen: rows.addmm_(up[chosen], down, alpha=update.scale * strength)
        else:
            yield _dora(entry, update, up, down, strength)
    if update.diff is not None:
        yield _full(load_tensor(update.diff).reshape(entry.rows, -1), strength)


def _full(values: Tensor, factor: float) -> Term:
    return lambda rows, base, chosen: rows.add_(values[chosen], alpha=factor)


def _dora(entry: Entry, update: Update, up: Tensor, down: Tensor, strength: float) -> Term:
    """W' = m (W + s BA) / |W + s BA| (DoRA, arXiv 2402.09353, eq. 5) by rows or by columns."""
    magnitude = load_tensor(update.magnitude).reshape(-1, 1)
    if not update.wd_on_output:
        factors = magnitude.flatten() / column_lengths(entry, up, down, update.scale)
        factors = factors.repeat_interleave(prod(entry.shape[2:]))  # a convolution's kernel

    def term(rows: Tensor, base: Tensor, chosen: slice) -> Tensor:
        direction = torch.addmm(base, up[chosen], down, alpha=update.scale)
        by_rows = update.wd_on_output
        direction *= magnitude[chosen] / direction.norm(dim=1, keepdim=True) if by_rows else factors
        return rows.add_(direction - base, alpha=strength)

    return term


def adder(entry: Entry, updates: Sequence[tuple[Update, float]]) -> Callable[[Tensor, int], Tensor]:
    """add(rows, first): a base tensor's rows from row `first` -> the merged rows, in place. The updates are loaded."""
    loaded = [term for update, strength in updates for term in terms(entry, update, strength)]
    keeps_base = any(update.magnitude is not None for update, _ in updates)

    def add(rows: Tensor, first: int) -> Tensor:
        base = rows.clone() if keeps_base else rows
        for term in loaded:
            term(rows, base, slice(first, first + len(rows)))
        return rows

    return add


def column_lengths(entry: Entry, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """(in,) float32: |W + scale * up @ down| of each input, over all outputs and the kernel; reads the whole tensor."""
    squares = torch.zeros(entry.shape[1], dtype=torch.float64)
    for first, count in row_blocks(entry):
        direction = torch.addmm(read_rows(entry, first, count), up[first : first + count], down, alpha=scale)
        squares += direction.double().square().sum(0).reshape(entry.shape[1], -1).sum(1)
    return squares.sqrt().float()


def _merging(
    entry: Entry, updates: Sequence[tuple[Update, float]], stored: str, kept: Kept
) -> Callable[[], Iterator[Callable[[], memoryview]]]:
    """The pieces of a tensor with its updates, or with none, in another dtype; what arrives is added to `kept`."""

    def pieces() -> Iterator[Callable[[], memoryview]]:
        add = adder(entry, updates)
        blocks = list(row_blocks(entry))
        sampled = blocks[len(blocks) // 2] if updates else None

        def merged(first: int, count: int) -> memoryview:
            torch.set_num_threads(1)  # of this thread: torch's own would wait for each other at every operation
            rows = read_rows(entry, first, count)
            before = rows[:SAMPLE_ROWS].clone() if (first, count) == sampled else None
            rows = add(rows, first)
            if before is not None:
                wanted = rows[:SAMPLE_ROWS]
                with ADDING:
                    kept.add(before, wanted, wanted.to(TORCH_DTYPES[stored]).float())
            return to_bytes(rows, stored, f"{entry.name} of {entry.file}{' after merging' if updates else ''}")

        return (partial(merged, *block) for block in blocks)

    return pieces


def merged_tensor(entry: Entry, updates: Sequence[tuple[Update, float]], dtype: torch.dtype) -> Tensor:
    """A whole tensor in memory of its own: the file's, with the updates added in float32, rounded once to `dtype`.

    Beside it only a few rows are held. torch aligns it, which the last bit of matrix products depends on.
    """
    add = adder(entry, updates)
    result = torch.empty(entry.shape, dtype=dtype)
    rows = result.view(entry.rows, -1)
    for first, count in row_blocks(entry):
        rows[first : first + count] = add(read_rows(entry, first, count), first)
    return result


def estimate_kept(plan: Plan) -> Kept:
    """What the plan would keep, from a few rows of every merged tensor; writes nothing.

    Reads little, but all of a tensor whose DoRA is of the inputs.
    """
    kept = Kept()
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        if name in plan.merged:
            count = min(SAMPLE_ROWS, entry.rows)
            first = (entry.rows - count) // 2
            before = read_rows(entry, first, count)
            wanted = adder(entry, plan.merged[name])(before.clone(), first)
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
            for first, count in row_blocks(entry):
                wanted = read_rows(entry, first, count).to(TORCH_DTYPES[output.dtype]).float()
                if not torch.equal(wanted, read_rows(output, first, count)):
                    raise Refused(f"{written.path}: {part.name} is not {entry.name} rounded to {output.dtype}")
        progress(part.nbytes)


def _verify_merged(entry: Entry, updates: Sequence[tuple[Update, float]], output: Entry) -> None:
    """Some rows from both ends and the middle, by the formula and in float64, not by the code that merged them."""
    total = entry.rows
    count = min(8, total)
    lengths = [None if update.wd_on_output else _column_lengths(entry, update) for update, _ in updates]
    for first in sorted({0, (total - count) // 2, total - count}):
        rows = slice(first, first + count)
        base = read_rows(entry, first, count).double()
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
        found = read_rows(output, first, count).double()
        spacing = torch.finfo(TORCH_DTYPES[output.dtype]).eps * wanted.abs().clamp(min=1e-6)
        largest = float(((found - wanted).abs() - spacing).max())
        if largest > 1e-6:
            raise Refused(f"{output.file}: {output.name} is not base + LoRA (off by {largest:.3g} beyond rounding)")


def _column_lengths(entry: Entry, update: Update) -> Tensor:
    """(in, 1): what `column_lengths` computes, all in float64."""
    up, down = load_tensor(update.up).double().flatten(1), load_tensor(update.down).double().flatten(1)
    squares = torch.zeros(entry.shape[1], 1, dtype=torch.float64)
    for first, count in row_blocks(entry):
        new = read_rows(entry, first, count).double() + update.scale * (up[first : first + count] @ down)
        squares += new.reshape(count, entry.shape[1], -1).square().sum((0, 2)).reshape(-1, 1)
    return squares.sqrt()
