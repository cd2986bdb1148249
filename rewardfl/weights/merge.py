"""Merging LoRAs into the tensors of a checkpoint, a few rows at a time: in float32 with one rounding at the end."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rewardfl.weights import image_names, shards, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, Update, load_tensor
from rewardfl.weights.shards import BLOCK_BYTES, Checkpoint, Entry, InputError

# adds to rows in place; arguments: the rows, the base's rows, and the slice of the tensor that they are
_Term = Callable[[Tensor, Tensor, slice], Tensor]

Updates = Sequence[tuple[Update, float]]  # of a tensor, with their strengths


def check_finite(lora: Lora) -> float:
    """Return the largest magnitude of `up`, `diff` and biases; 0 before training.

    Raise InputError for nan or infinity.
    """
    largest = 0.0
    for update in lora.updates.values():
        for role, source in update.sources().items():
            values = load_tensor(source)
            if not bool(torch.isfinite(values).all()):
                raise InputError(f"{lora.path}: {role} of {update.module} has values that are nan or infinite")
            if role not in ("down", "magnitude"):
                largest = max(largest, float(values.abs().max()))
    return largest


def list_additions(update: Update, names: Collection[str]) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Return {tensor of the base, by diffusers' name: the (kind, shape) of each addition}. names: the base's."""
    additions = defaultdict(list)
    weight = update.module if update.module in names else f"{update.module}.weight"
    if update.down is not None:
        additions[weight].append(("up @ down", (update.factors[0].shape[0], *update.factors[1].shape[1:])))
    if update.diff is not None:
        additions[weight].append(("diff", tuple(update.diff.shape)))
    for source, _ in update.biases():
        additions[f"{update.module}.bias"].append(("bias", tuple(source.shape)))
    return additions


def check_fits(lora: Lora, update: Update, names: Mapping[str, Entry]) -> None:
    """Raise InputError when the base lacks a tensor of the update, or has one of another shape."""
    for target, additions in list_additions(update, names).items():
        if target not in names:
            raise InputError(
                f"{lora.path}: the base has no {target} for the LoRA's {update.module}; it was trained on another "
                "model (with more blocks, or as Wan2.1-I2V has image projections that Wan2.2 lacks)"
            )
        shape = names[target].shape
        if 0 in shape:
            raise InputError(f"{names[target].file}: {names[target].name} is {shape}; there is nothing to merge into")
        for kind, added in additions:
            if added != shape:
                raise InputError(f"{lora.path}: {kind} of {update.module} is {added}, the base's {target} is {shape}")


def match_names(base: Checkpoint) -> tuple[tuple[str, ...], str, dict[str, str]]:
    """Return (the models that the base may be, diffusers | original, {tensor: its diffusers name}).

    Image models share names, so a fragment may fit several. Raise InputError when the names fit no model.
    """
    if models := image_names.match_models(base):
        return models, "diffusers", {name: name for name in base.tensors}
    naming, commons = wan_names.detect_naming(base)
    return (WAN,), naming, commons


def updates_by_tensor(base: Checkpoint, loras: Sequence[tuple[Lora, float]]) -> Mapping[str, Updates]:
    """Return {tensor of the base: its updates with their strengths}. Raise InputError where one does not fit."""
    shards.check_unquantised(base)
    models, _, commons = match_names(base)
    by_diffusers_name = {commons[name]: entry for name, entry in base.tensors.items()}
    merged: dict[str, list[tuple[Update, float]]] = {}
    for lora, strength in loras:
        if set(models).isdisjoint(lora.models):
            raise InputError(
                f"{lora.path} has the names of {' or '.join(lora.models)}, the base {base.path} is "
                f"{' or '.join(models)}; give the base that it was trained on"
            )
        for update in lora.updates.values():
            check_fits(lora, update, by_diffusers_name)
            for target in list_additions(update, by_diffusers_name):
                merged.setdefault(by_diffusers_name[target].name, []).append((update, strength))
    return merged


def row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of blocks of about BLOCK_BYTES in bfloat16, twice that in float32."""
    rows = max(1, BLOCK_BYTES // max(1, 2 * prod(entry.shape[1:])))
    for first in range(0, entry.rows, rows):
        yield first, min(rows, entry.rows - first)


def read_rows(entry: Entry, first: int, count: int) -> Tensor:
    """Read `count` rows from row `first` on, as (count, -1) float32."""
    return torch.frombuffer(entry.read(first, count), dtype=TORCH_DTYPES[entry.dtype]).reshape(count, -1).float()


def load_terms(entry: Entry, update: Update, strength: float) -> Iterator[_Term]:
    """Yield the additions of an update to rows of a tensor, with the update's tensors loaded."""
    if entry.name.endswith(".bias"):
        for source, factor in update.biases():
            yield _full(load_tensor(source).reshape(-1, 1), strength * factor)
        return
    if update.down is not None:
        up, down = (load_tensor(factor).flatten(1) for factor in update.factors)
        if update.magnitude is None:
            yield lambda rows, base, chosen: rows.addmm_(up[chosen], down, alpha=update.scale * strength)
        else:
            yield _dora(entry, update, load_tensor(update.magnitude).reshape(-1, 1), up, down, strength)
    if update.diff is not None:
        yield _full(load_tensor(update.diff).reshape(entry.rows, -1), strength)


def _full(values: Tensor, factor: float) -> _Term:
    return lambda rows, base, chosen: rows.add_(values[chosen], alpha=factor)


def _dora(entry: Entry, update: Update, magnitude: Tensor, up: Tensor, down: Tensor, strength: float) -> _Term:
    """Return the term W' = m (W + s BA) / |W + s BA| (DoRA, arXiv 2402.09353, eq. 5) by rows or by columns."""
    if not update.wd_on_output:
        factors = magnitude.flatten() / column_norms(entry, up, down, update.scale)
        factors = factors.repeat_interleave(prod(entry.shape[2:]))  # a convolution's kernel

    def term(rows: Tensor, base: Tensor, chosen: slice) -> Tensor:
        direction = torch.addmm(base, up[chosen], down, alpha=update.scale)
        by_rows = update.wd_on_output
        direction *= magnitude[chosen] / direction.norm(dim=1, keepdim=True) if by_rows else factors
        return rows.add_(direction - base, alpha=strength)

    return term


def make_adder(entry: Entry, updates: Updates) -> Callable[[Tensor, int], Tensor]:
    """Return add(rows, first), which merges in place into a base tensor's rows from row `first` on."""
    loaded = [term for update, strength in updates for term in load_terms(entry, update, strength)]
    keeps_base = any(update.magnitude is not None for update, _ in updates)

    def add(rows: Tensor, first: int) -> Tensor:
        base = rows.clone() if keeps_base else rows
        for term in loaded:
            term(rows, base, slice(first, first + len(rows)))
        return rows

    return add


def column_norms(entry: Entry, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Return |W + scale * up @ down| of each input over all outputs and the kernel, (in,) float32. Read all of W."""
    squares = torch.zeros(entry.shape[1], dtype=torch.float64)
    for first, count in row_blocks(entry):
        direction = torch.addmm(read_rows(entry, first, count), up[first : first + count], down, alpha=scale)
        squares += direction.double().square().sum(0).reshape(entry.shape[1], -1).sum(1)
    return squares.sqrt().float()


def merge_tensor(entry: Entry, updates: Updates, dtype: torch.dtype) -> Tensor:
    """Return a whole tensor of the file with the updates added in float32, rounded once to `dtype`.

    Only a few rows are held next to it.
    """
    add = make_adder(entry, updates)
    result = torch.empty(entry.shape, dtype=dtype)
    rows = result.view(entry.rows, -1)
    for first, count in row_blocks(entry):
        rows[first : first + count] = add(read_rows(entry, first, count), first)
    return result
