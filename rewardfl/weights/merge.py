"""Merging LoRAs into the tensors of a checkpoint, a few rows at a time: in float32 with one rounding at the end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from rewardfl.weights import image_names, shards, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, Update, load_tensor
from rewardfl.weights.shards import BLOCK_BYTES, Checkpoint, Entry, InputError

Updates = Sequence[tuple[Update, float]]  # a tensor's updates, with their strengths


def find_targets(lora: Lora, update: Update, names: Mapping[str, Entry]) -> set[str]:
    """Return the tensors that an update changes, by diffusers' names. names: the base's tensors by these names."""
    weight = update.module if update.module in names else f"{update.module}.weight"
    additions = [(f"{update.module}.bias", "bias", tuple(source.shape)) for source, _ in update.biases()]
    if update.down is not None:
        additions.append((weight, "up @ down", (update.factors[0].shape[0], *update.factors[1].shape[1:])))
    if update.diff is not None:
        additions.append((weight, "diff", tuple(update.diff.shape)))
    for target, part, shape in additions:
        if target not in names:
            raise InputError(
                f"{lora.path}: the base has no {target}; it was trained on another model (with more blocks, or with "
                "Wan2.1-I2V's image projections)"
            )
        if names[target].shape != shape:
            raise InputError(f"{lora.path}: {part} of {update.module} is {shape}, {target} is {names[target].shape}")
    return {target for target, *_ in additions}


def match_names(base: Checkpoint) -> tuple[tuple[str, ...], str, dict[str, str]]:
    """Return (the models that the base may be, diffusers | original, {tensor: its diffusers name})."""
    if models := image_names.match_models(base):
        return models, "diffusers", {name: name for name in base.tensors}
    naming, commons = wan_names.detect_naming(base)
    return (WAN,), naming, commons


def updates_by_tensor(base: Checkpoint, loras: Sequence[tuple[Lora, float]]) -> Mapping[str, Updates]:
    """Return {tensor of the base: its updates with their strengths}. Raise InputError if one does not fit."""
    shards.check_unquantised(base)
    models, _, commons = match_names(base)
    by_diffusers_name = {commons[name]: entry for name, entry in base.tensors.items()}
    merged: dict[str, list[tuple[Update, float]]] = {}
    for lora, strength in loras:
        if set(models).isdisjoint(lora.models):
            stated = f" by its metadata {dict(lora.statements)}" if lora.statements else ""
            raise InputError(
                f"{lora.path} is for {' or '.join(lora.models)}{stated}, the base {base.path} is "
                f"{' or '.join(models)}; give the base that it was trained on"
            )
        for update in lora.updates.values():
            for target in find_targets(lora, update, by_diffusers_name):
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


def load_updates(entry: Entry, updates: Updates) -> Updates:
    """Load the updates' tensors. A magnitude of the inputs becomes the factors of the moved weight's columns."""
    loaded = []
    for update, strength in updates:
        tensors: dict[str, Any] = {role: load_tensor(source) for role, source in update.sources().items()}
        if update.magnitude is not None and not update.wd_on_output:
            up, down = (tensors[role].flatten(1) for role in ("up", "down"))
            factors = tensors["magnitude"].flatten() / column_norms(entry, up, down, update.scale)
            tensors["magnitude"] = factors.repeat_interleave(prod(entry.shape[2:]))  # a convolution's kernel
        loaded.append((replace(update, **tensors), strength))
    return loaded


def add_updates(entry: Entry, updates: Updates, rows: Tensor, first: int) -> Tensor:
    """Merge updates that are loaded in place into a tensor's rows, (count, -1), from row `first` on.

    A DoRA is W' = m (W + s BA) / |W + s BA| (arXiv 2402.09353, eq. 5), by rows or by columns.
    """
    base = rows.clone() if any(update.magnitude is not None for update, _ in updates) else rows
    part = slice(first, first + len(rows))
    for update, strength in updates:
        if entry.name.endswith(".bias"):
            for source, factor in update.biases():
                rows.add_(load_tensor(source).reshape(-1, 1)[part], alpha=strength * factor)
            continue
        if update.down is not None:
            up, down = (load_tensor(factor).flatten(1) for factor in update.factors)
            if update.magnitude is None:
                rows.addmm_(up[part], down, alpha=update.scale * strength)
            else:
                moved = torch.addmm(base, up[part], down, alpha=update.scale)
                factors = load_tensor(update.magnitude)
                if update.wd_on_output:
                    factors = factors.reshape(-1, 1)[part] / moved.norm(dim=1, keepdim=True)
                rows.add_(moved * factors - base, alpha=strength)
        if update.diff is not None:
            rows.add_(load_tensor(update.diff).reshape(entry.rows, -1)[part], alpha=strength)
    return rows


def column_norms(entry: Entry, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """Return |W + scale * up @ down| of each input over all outputs and the kernel, (in,) float32. Read all of W."""
    squares = torch.zeros(entry.shape[1], dtype=torch.float64)
    for first, count in row_blocks(entry):
        direction = torch.addmm(read_rows(entry, first, count), up[first : first + count], down, alpha=scale)
        squares += direction.double().square().sum(0).reshape(entry.shape[1], -1).sum(1)
    return squares.sqrt().float()


def merge_tensor(entry: Entry, updates: Updates, dtype: torch.dtype) -> Tensor:
    """Return a full tensor of the file with the updates added in float32, rounded once to `dtype`."""
    loaded = load_updates(entry, updates)
    result = torch.empty(entry.shape, dtype=dtype)
    rows = result.view(entry.rows, -1)
    for first, count in row_blocks(entry):
        rows[first : first + count] = add_updates(entry, loaded, read_rows(entry, first, count), first)
    return result
