"""Merging LoRAs into a checkpoint: the work of tools/merge_lora.py.

A bfloat16 file cannot hold a small update: a weight that moves by less than half its spacing does not move. So
`estimate_loss` measures the part that survives.
"""

import argparse
import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rewardfl import command_line
from rewardfl.files import sha256
from rewardfl.merging import writing
from rewardfl.merging.writing import STORED_DTYPES, Output, OutputFiles, Part, TensorFile, copy_entry
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, WAN, Lora, as_bytes
from rewardfl.weights.merge import Updates
from rewardfl.weights.shards import Checkpoint, Entry, InputError

_TOOL = "rewardfl merge_lora 1"
SAMPLE_ROWS = 64  # for the estimate of the loss, from each merged tensor
EXPERTS = {"high": "high_noise", "low": "low_noise"}
Folders = dict[str | None, str]  # {expert of the base, None for an image model's: its folder}; "." for the base itself
# the experts' folders in pipelines
LAYOUTS: tuple[Folders, ...] = (
    {"high_noise": "transformer", "low_noise": "transformer_2"},
    {"high_noise": "high_noise_model", "low_noise": "low_noise_model"},
    {"high_noise": "transformer"},  # a single expert has the folder of the first of two
)


@dataclass(frozen=True, kw_only=True)
class LoraOption:
    """A --lora of the command line, with the LoRAs in its file. has_strength: whether the text names the strength."""

    text: str
    path: Path
    strength: float
    loras: list[Lora]
    has_strength: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tensors to write for one expert. merged: {tensor by its name in the base: its updates with strengths}."""

    base: Checkpoint
    parts: list[Part]
    merged: Mapping[str, Updates]
    naming: str  # the base's names: diffusers or original


Routing = dict[str | None, list[tuple[Lora, LoraOption]]]  # {expert of the base: its LoRAs}


def merge_lora(args: argparse.Namespace) -> None:
    """Merge LoRAs into a checkpoint. Raise InputError with nothing written."""
    options = [read_loras(text, args.alpha) for text in args.lora]
    layout = next((each for each in LAYOUTS if all((args.base / name).is_dir() for name in each.values())), None)
    if layout and (args.rename != "keep" or args.out.suffix == ".safetensors" or args.expert):
        raise InputError(
            f"--base {args.base} is a pipeline, and so is the output; for a file or other names give --base "
            f"{args.base / list(layout.values())[-1]}"
        )
    bases, folders = open_bases(args, layout)
    config = args.base / "config.json" if args.base.is_dir() else args.base.with_name("config.json")
    read_files = [file for base in bases.values() for file in base.files]
    for option in options:
        read_files += [option.path, *(file for lora in option.loras for file in lora.files)]
    output = Output(args, [args.base, config, *read_files])
    routed = route(options, list(bases))
    digests = list_merged(routed, bases)
    plans = {}
    for expert, loras in routed.items():
        if loras or args.dtype != "keep":
            strengths = [(lora, option.strength) for lora, option in loras]
            plans[expert] = plan_merge(bases[expert], strengths, args.dtype, args.rename)
    metadata = {"format": "pt", "rewardfl": _TOOL, "rewardfl_base": command_line.one_line(str(args.base))}
    metadata |= describe_loras(options)
    for expert in routed:
        if expert in plans:
            print_plan(expert or "base", plans[expert])
        else:
            print(f"{expert}: no LoRA for it, taken as it is")
    merged = {
        folders[expert]: TensorFile(plan.parts, metadata | {lora_files.MERGED: " ".join(digests[expert])})
        for expert, plan in plans.items()
    }
    if layout:
        files: OutputFiles = {name.as_posix(): path for path, name in other_files(args.base, set(merged))}
        for folder, weights in merged.items():
            files |= writing.shard(weights, args.max_shard_size, folder)
    else:
        files = output.model_files(merged["."], config)
    output.finish(files)


def open_bases(args: argparse.Namespace, layout: Folders | None) -> tuple[dict[str | None, Checkpoint], Folders]:
    """Open {expert: its checkpoint}, and return its folders. The expert of an image model is None."""
    folders = layout or {EXPERTS.get(args.expert) or lora_files.expert_in_path(args.base.absolute()): "."}
    bases = {expert: shards.open_checkpoint(args.base / folder) for expert, folder in folders.items()}
    for expert, base in bases.items():
        shards.check_unquantised(base)
        if (models := merge.match_names(base)[0]) != (WAN,):
            if args.expert or len(bases) > 1:
                raise InputError(f"{base.path} is {' or '.join(models)}, which has no experts; leave --expert away")
            return {None: base}, {None: folders[expert]}
    return bases, folders


def read_loras(text: str, alpha: float | None) -> LoraOption:
    """Read the LoRAs of PATH[@high|@low][:strength], with their experts set if the text names one."""
    (path, strength), expert = command_line.parse_path_and_strength(text), None
    has_strength = path != text
    if match := re.fullmatch(r"(.+)@(high|low)", path):
        path, expert = match[1], EXPERTS[match[2]]
    loras = lora_files.read_lora(path, alpha)
    if expert and not loras[0].is_wan:
        raise InputError(f"--lora {text}: {' and '.join(loras[0].models)} have no experts; give --lora {path}")
    loras = lora_files.assign_expert(loras, expert)
    if not 1e-6 <= abs(strength) <= 1000:
        raise InputError(f"--lora {text}: strength {strength:g} must be of a size between 1e-6 and 1000")
    return LoraOption(text=text, path=Path(path), strength=strength, loras=loras, has_strength=has_strength)


def route(options: list[LoraOption], experts: list[str | None]) -> Routing:
    """Assign LoRAs to the base's experts. Raise InputError if an expert is unknown, or not in the base."""
    routed: Routing = {expert: [] for expert in experts}
    for option in options:
        for lora in option.loras:
            expert = match_expert(option, lora, experts)
            if expert in routed:
                routed[expert].append((lora, option))
    return routed


def match_expert(option: LoraOption, lora: Lora, experts: list[str | None]) -> str | None:
    """Return the base's expert that a LoRA is for; the LoRA's own expert for the other half of a pair."""
    if lora.expert in experts and lora.expert is not None:
        return lora.expert
    if len(experts) == 2:
        raise InputError(
            f"--lora {option.text} does not say its expert; write PATH@high or PATH@low, or give it twice for both"
        )
    if len(option.loras) > 1:
        if experts[0] is None:
            raise InputError(f"--lora {option.text} holds both experts; give --expert high or low for the base")
        return lora.expert
    if None not in (lora.expert, experts[0]):
        raise InputError(
            f"--lora {option.text} is for the {lora.expert} expert, the base is {experts[0]}; for a wrong name write "
            "PATH@high or PATH@low, or --expert for the base"
        )
    return experts[0]


def list_merged(routed: Routing, bases: Mapping[str | None, Checkpoint]) -> dict[str | None, list[str]]:
    """Return {expert: the digests of all LoRAs in it}. Raise InputError for one that counts twice by mistake."""
    merged = {}
    for expert, loras in routed.items():
        digests = [lora_files.content_digest(lora) for lora, _ in loras]
        merged[expert] = [*bases[expert].metadata.get(lora_files.MERGED, "").split(), *digests]
        for (_, option), digest in zip(loras, digests, strict=True):
            if merged[expert].count(digest) > 1 and not option.has_strength:
                raise InputError(
                    f"--lora {option.text} is merged into {bases[expert].path} already, or the same as another --lora; "
                    "write strengths (PATH:1.0) to add it again"
                )
    return merged


def describe_loras(options: list[LoraOption]) -> dict[str, str]:
    """Print the origin of each LoRA; return the lines by their keys in the output's metadata."""
    record = {}
    for number, option in enumerate(options):
        for lora in option.loras:
            ranks = sorted({update.rank for update in lora.updates.values() if update.down is not None})
            scales = sorted({update.scale for update in lora.updates.values() if update.down is not None})
            expert = f", {lora.expert}" if lora.expert else ""
            line = command_line.one_line(
                f"{lora.path}: {len(lora.updates)} modules, rank {span(ranks)}, scale {span(scales)}, alpha from "
                f"{lora.alpha_source}, strength {option.strength:g}, for {' or '.join(lora.models)}{expert}"
            )
            record[f"rewardfl_lora_{number}_{lora.expert or 'model'}"] = f"{line}; sha256 {sha256(lora.path)}"
            models = [f"{lora.path} was trained on {model} ({key})" for key, model in lora.statements.items()]
            print(line, *(command_line.one_line(f"note: {note}") for note in (*lora.notes, *models)), sep="\n")
    return record


def span(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}..{values[-1]:g}" if values else "none"


def print_plan(name: str, plan: Plan) -> None:
    """Print what changes, the share of the update that the stored dtype holds, and a warning if it is small."""
    size = command_line.format_bytes(sum(part.nbytes for part in plan.parts))
    print(f"{name}: {len(plan.merged)} of {len(plan.base.tensors)} tensors change, {plan.naming} names, {size}")
    loss = estimate_loss(plan)
    if loss is None:
        if plan.merged:
            print(f"WARNING: the update of {name} is zero everywhere: an adapter before its first step?")
        return
    share, error = loss
    print(f"{name}: update kept {share:.1%}, error {error:.1%} of it")
    if share < 0.9:
        dtypes = sorted({part.dtype for part in plan.parts})
        print(
            f"WARNING: {name} keeps only {share:.0%} of the update: steps below the spacing of {'/'.join(dtypes)} "
            "are lost. Merge with --dtype fp32 or fp16, from an fp32 base if there is one, or use the LoRA unmerged"
        )


def other_files(base: Path, merged: set[str]) -> Iterator[tuple[Path, Path]]:
    """Yield a pipeline's files without the merged experts' weights, and their paths in the output."""
    for name in sorted(glob.glob("**", root_dir=base, recursive=True)):  # no hidden ones
        source, path = base / name, Path(name)
        if source.is_dir() or path.parts[0] in merged and path.parts[1:] != ("config.json",):
            continue
        if not source.is_file():
            raise InputError(f"{source} is neither a file nor a folder; remove it")
        yield source, path


def plan_merge(base: Checkpoint, loras: Sequence[tuple[Lora, float]], dtype: str, names: str) -> Plan:
    """Return the parts of the merged checkpoint. dtype: --dtype; names: --rename.

    bf16 and fp16 leave in float32 the tensors that diffusers keeps there.
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
                raise InputError(f"{entry.file}: {entry.name} does not fit into {stored}; use --dtype fp32 or bf16")
            yield as_bytes(rounded)

    return pieces


def estimate_loss(plan: Plan) -> tuple[float, float] | None:
    """Estimate how much of the update the stored dtypes hold, from a few rows of every merged tensor.

    Return (<realised, intended> / |intended|^2, |realised - intended| / |intended|); None for an update of zeros.
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
