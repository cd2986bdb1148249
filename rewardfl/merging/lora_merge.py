"""Merging LoRAs into a checkpoint: the work of tools/merge_lora.py."""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardfl import command_line
from rewardfl.files import sha256
from rewardfl.merging import merge_tensors, writing
from rewardfl.merging.output import Output
from rewardfl.merging.writing import OutputFiles, TensorFile
from rewardfl.weights import image_names, lora_files, merge, shards
from rewardfl.weights.lora_files import Lora
from rewardfl.weights.shards import InputError

_TOOL = "rewardfl merge_lora 1"
EXPERTS = {"high": "high_noise", "low": "low_noise"}
# the experts' folders in pipelines
Folders = dict[str | None, str]  # {expert of the base, None for an image model's: its folder}; "." where it is the base
LAYOUTS: tuple[Folders, ...] = (
    {"high_noise": "transformer", "low_noise": "transformer_2"},
    {"high_noise": "high_noise_model", "low_noise": "low_noise_model"},
    {"high_noise": "transformer"},  # a single expert has the folder of the first of two
)
Plans = dict[str | None, merge_tensors.Plan]


@dataclass(frozen=True, kw_only=True)
class LoraOption:
    """A --lora of the command line, with the LoRAs in its file. has_strength: whether the text names the strength."""

    text: str
    path: Path
    strength: float
    loras: list[Lora]
    has_strength: bool


Routing = dict[str | None, list[tuple[Lora, LoraOption]]]  # {expert of the base: its LoRAs}


def run(args: argparse.Namespace) -> None:
    """Merge LoRAs into a checkpoint. Raise InputError with nothing written."""
    options = [read_loras(text, args.alpha) for text in args.lora]
    layout = next((each for each in LAYOUTS if all((args.base / name).is_dir() for name in each.values())), None)
    if layout and (args.rename != "keep" or args.out.suffix == ".safetensors" or args.expert):
        raise InputError(
            f"--base {args.base} is a pipeline: the output is a pipeline folder with the same names. For one expert as "
            f"a file or with other names give --base {args.base / list(layout.values())[-1]}"
        )
    bases, folders = open_bases(args, layout)
    config = args.base / "config.json" if args.base.is_dir() else args.base.with_name("config.json")
    read_files = [file for base in bases.values() for file in base.files]
    for option in options:
        read_files += [option.path, *(file for lora in option.loras for file in lora.files)]
    output = Output(args, _TOOL, [args.base, config, *read_files])
    routed = route(options, list(bases))
    digests = list_merged(routed, bases)
    plans = {
        expert: merge_tensors.plan_merge(
            bases[expert], [(lora, option.strength) for lora, option in loras], args.dtype, args.rename
        )
        for expert, loras in routed.items()
        if loras or args.dtype != "keep"
    }
    report = describe(args, options, routed, plans)
    for line in report["lines"]:
        print(command_line.one_line(line))
    for expert, plan in plans.items():
        warn_of_loss(expert, plan, report)
    metadata = {"format": "pt", "rewardfl": _TOOL}
    metadata |= {f"rewardfl_{key}": value for key, value in report["record"].items()}
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
    output.finish(files, report)


def open_bases(args: argparse.Namespace, layout: Folders | None) -> tuple[dict[str | None, shards.Checkpoint], Folders]:
    """Open {expert: its checkpoint}, and return its folders. The expert of an image model is None."""
    folders = layout or {EXPERTS.get(args.expert) or lora_files.expert_in_path(args.base.absolute()): "."}
    bases = {expert: shards.open_checkpoint(args.base / folder) for expert, folder in folders.items()}
    for expert, base in bases.items():
        shards.check_unquantised(base)
        if models := image_names.match_models(base):
            if args.expert or len(bases) > 1:
                raise InputError(f"{base.path} is {' or '.join(models)}, which has no experts; leave --expert away")
            return {None: base}, {None: folders[expert]}
    return bases, folders


def read_loras(text: str, alpha: float | None) -> LoraOption:
    """Read the LoRAs of PATH[@high|@low][:strength], with their experts set where the text names one."""
    (path, strength), expert = command_line.parse_path_and_strength(text), None
    has_strength = path != text
    if match := re.fullmatch(r"(.+)@(high|low)", path):
        path, expert = match[1], EXPERTS[match[2]]
    loras = lora_files.read_lora(path, alpha)
    if expert and lora_files.WAN not in loras[0].models:
        raise InputError(f"--lora {text}: {' and '.join(loras[0].models)} have no experts; give --lora {path}")
    loras = lora_files.assign_expert(loras, expert)
    if not 1e-6 <= abs(strength) <= 1000:
        raise InputError(f"--lora {text}: strength {strength:g} must be of a size between 1e-6 and 1000")
    return LoraOption(text=text, path=Path(path), strength=strength, loras=loras, has_strength=has_strength)


def route(options: list[LoraOption], experts: list[str | None]) -> Routing:
    """Assign LoRAs to the base's experts.

    Raise InputError if an expert is unknown, or a LoRA has no expert in the base.
    """
    routed: Routing = {expert: [] for expert in experts}
    for option in options:
        targets = [match_expert(option.text, lora, experts, alone=len(option.loras) == 1) for lora in option.loras]
        if routed.keys().isdisjoint(targets):
            raise InputError(f"--lora {option.text} has nothing for the base")
        for lora, expert in zip(option.loras, targets, strict=True):
            if expert in routed:
                routed[expert].append((lora, option))
    return routed


def list_merged(routed: Routing, bases: Mapping[str | None, shards.Checkpoint]) -> dict[str | None, list[str]]:
    """Return {expert: the digests of all LoRAs in its output}.

    Raise InputError for a LoRA that would count twice, unless its strength is written.
    """
    merged = {}
    for expert, loras in routed.items():
        metadata, digests = bases[expert].metadata, [lora_files.content_digest(lora) for lora, _ in loras]
        for (lora, option), digest in zip(loras, digests, strict=True):
            is_in_base = lora_files.is_merged(lora, metadata)
            if not option.has_strength and (is_in_base or digests.count(digest) > 1):
                where = f"merged into {bases[expert].path} already" if is_in_base else "the same as another --lora"
                raise InputError(
                    f"--lora {option.text} is {where}; leave it out, or write a strength for each (PATH:1.0) to add it "
                    "again"
                )
        merged[expert] = [*metadata.get(lora_files.MERGED, "").split(), *digests]
    return merged


def match_expert(text: str, lora: Lora, experts: list[str | None], *, alone: bool) -> str | None:
    """Return the base's expert that a LoRA is for; the LoRA's own expert for the other half of a pair."""
    if lora.expert in experts and lora.expert is not None:
        return lora.expert
    if len(experts) == 2:
        raise InputError(
            f"--lora {text}: neither its keys nor a name such as ..._high_noise say which expert it is for; write "
            "PATH@high or PATH@low (before a :strength), or give it twice for both"
        )
    if not alone:
        if experts[0] is None:
            raise InputError(f"--lora {text} holds both experts; say which one the base is: --expert high or low")
        return lora.expert
    if None not in (lora.expert, experts[0]):
        raise InputError(
            f"--lora {text} is for the {lora.expert} expert, the base is {experts[0]}; if a name is wrong, write "
            "PATH@high or PATH@low, or --expert for the base"
        )
    return experts[0]


def describe(args: argparse.Namespace, options: list[LoraOption], routed: Routing, plans: Plans) -> dict:
    """Return the plan as lines for the user, a record for the file's metadata and figures for --json."""
    lines, record = [], {"base": command_line.one_line(str(args.base)), "dtype": args.dtype}
    for number, option in enumerate(options):
        for lora in option.loras:
            ranks = sorted({update.rank for update in lora.updates.values() if update.down is not None})
            scales = sorted({update.scale for update in lora.updates.values() if update.down is not None})
            expert = f", {lora.expert}" if lora.expert else ""
            text = (
                f"{lora.path}: {len(lora.updates)} modules, rank {span(ranks)}, scale {span(scales)}, alpha from "
                f"{lora.alpha_source}, strength {option.strength:g}, for {' or '.join(lora.models)}{expert}"
            )
            lines.append(text)
            stored = f"{command_line.one_line(text)}; sha256 {sha256(lora.path)}"
            record[f"lora_{number}_{lora.expert or 'model'}"] = stored
            lines += [f"note: {note}" for note in lora.notes]
        if all(merge.changes_nothing(lora) for lora in option.loras):
            lines.append(f"WARNING: {option.text} is zero everywhere: an adapter before its first step?")
    for expert, plan in plans.items():
        lines.append(
            f"{expert or 'base'}: {len(plan.merged)} of {len(plan.base.tensors)} tensors change, "
            f"{plan.naming} names, {command_line.format_bytes(sum(part.nbytes for part in plan.parts))}"
        )
        lines += [f"note: {note}" for lora, _ in routed[expert] for note in merge.variant_notes(lora, plan.base)]
    lines += [f"{expert}: no LoRA for it, taken as it is" for expert, loras in routed.items() if not loras]
    return {"lines": lines, "record": record, "kept": {}}


def span(values: Sequence[float]) -> str:
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}..{values[-1]:g}" if values else "none"


def warn_of_loss(expert: str | None, plan: merge_tensors.Plan, report: dict) -> None:
    """Print the share of the update that the stored dtype holds, and add it to the report."""
    loss = merge_tensors.estimate_loss(plan)
    if not loss.intended:
        return
    name, unchanged = expert or "base", loss.unchanged / loss.elements
    print(f"{name}: update kept {loss.share:.1%}, error {loss.relative_error:.1%} of it, {unchanged:.1%} unchanged")
    report["kept"][name] = {"share": loss.share, "relative_error": loss.relative_error, "unchanged": unchanged}
    if loss.share < 0.9:
        dtypes = sorted({part.dtype for part in plan.parts})
        print(
            f"WARNING: {name} keeps only {loss.share:.0%} of the update: steps below the spacing of {'/'.join(dtypes)} "
            "are lost. Merge with --dtype fp32 or fp16, from an fp32 base if there is one, or use the LoRA unmerged"
        )


def other_files(base: Path, merged: set[str]) -> Iterator[tuple[Path, Path]]:
    """Yield a pipeline's files without the merged experts' weights, and their paths in the output.

    Follow symbolic links, as in a hub cache. Raise InputError for devices and circles of links.
    """

    def walk(source: Path, target: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
        if source.is_file():
            yield source, target
        elif source.is_dir() and source.resolve() not in above:
            for child in sorted(source.iterdir()):
                yield from walk(child, target / child.name, (*above, source.resolve()))
        else:
            raise InputError(f"{source} is neither a file nor a folder, or a link to a folder that holds it; remove it")

    for child in sorted(base.iterdir()):
        if child.name not in merged and not child.name.startswith("."):
            yield from walk(child, Path(child.name), (base.resolve(),))
    for folder in sorted(merged):
        if (base / folder / "config.json").is_file():
            yield base / folder / "config.json", Path(folder, "config.json")
