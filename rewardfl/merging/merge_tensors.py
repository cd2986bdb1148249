"""A checkpoint with LoRAs merged into it: the tensors to write, the loss of rounding, and verification of the output.

A bfloat16 file cannot hold a small update whatever the arithmetic: a weight that moves by less than half its spacing
does not move. So `estimate_loss` measures the part that survives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rewardfl.merging.writing import Part, copy_entry
from rewardfl.weights import merge, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, as_bytes
from rewardfl.weights.merge import Updates
from rewardfl.weights.shards import Checkpoint, Entry, InputError

STORED_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # --dtype
SAMPLE_ROWS = 64  # for the estimate of the loss, from each merged tensor


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
        raise InputError(f"{base.path} is {' or '.join(models)}; --rename {names} knows the names of {WAN} only")
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


def estimate_loss(plan: Plan) -> tuple[float, float] | None:
    """Estimate how much of the update the stored dtypes hold, from a few rows of every merged tensor.

    Return (<realised, intended> / |intended|^2, |realised - intended| / |intended|); None for an update of zeros. The
    first is 1 if the file moves as far as the LoRA says, on average. A DoRA of the inputs needs all rows.
    """
    projection, square, error = 0.0, 0.0, 0.0
    for (name, entry), part in zip(plan.base.tensors.items(), plan.parts, strict=True):
        if name in plan.merged:
            count = min(SAMPLE_ROWS, entry.rows)
            first = (entry.rows - count) // 2
            before = merge.read_rows(entry, first, count)
            merged = merge.add_updates(entry, merge.load_updates(entry, plan.merged[name]), before.clone(), first)
            intended = (merged - before).double()
            realised = (merged.to(TORCH_DTYPES[part.dtype]).float() - before).double()
            projection += float((realised * intended).sum())
            square += float(intended.square().sum())
            error += float((realised - intended).square().sum())
    return (projection / square, (error / square) ** 0.5) if square else None
