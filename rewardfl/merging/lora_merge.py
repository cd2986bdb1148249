"""Merging LoRAs into a checkpoint. Refused with nothing written: the work of tools/merge_lora.py."""

import argparse
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardfl import command_line
from rewardfl.files import sha256
from rewardfl.merging import merge_tensors, writing
from rewardfl.merging.output import MANIFEST, Output, check_space, existing
from rewardfl.weights import image_names, lora_files, merge, shards
from rewardfl.weights.lora_files import FLOAT32, Lora
from rewardfl.weights.shards import Refused

TOOL = "rewardfl merge_lora 1"

EXPERTS = {"high": "high_noise", "low": "low_noise"}

# how pipelines name their experts' folders
LAYOUTS = (
    {"high_noise": "transformer", "low_noise": "transformer_2"},
    {"high_noise": "high_noise_model", "low_noise": "low_noise_model"},
    {"high_noise": "transformer"},  # the only one, by the name that its folder would have beside another
)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")  # files that nobody edits: links to them save the room


@dataclass(frozen=True)
class Given:
    """One --lora of the command line, read."""

    text: str
    path: Path
    strength: float
    loras: list[Lora]


def run(args: argparse.Namespace) -> None:
    """Merging LoRAs into a checkpoint. Refused with nothing written."""
    output = Output(args.out, args.json, args.force, TOOL)
    given = [read_loras(text, args.alpha) for text in args.lora]
    layouts = (layout for layout in LAYOUTS if all((args.base / folder).is_dir() for folder in layout.values()))
    layout = next(layouts, None)
    if layout and (args.rename != "keep" or output.is_file or args.expert):
        raise Refused(
            f"--base {args.base} is a pipeline: the output is a pipeline folder with the same names. For one expert as "
            f"a file or with other names give --base {args.base / list(layout.values())[-1]}"
        )
    bases, layout = open_bases(args, layout)
    config = args.base / "config.json" if args.base.is_dir() else args.base.with_name("config.json")
    read_files = [file for base in bases.values() for file in base.files]
    read_files += [file for one in given for file in (one.path, *(f for lora in one.loras for f in lora.files))]
    output.check([args.base, config, *read_files])
    routed = route(given, list(bases))
    plans = {
        expert: merge_tensors.plan_merge(bases[expert], loras, args.dtype, args.rename)
        for expert, loras in routed.items()
        if loras or args.dtype != "keep"
    }
    largest = {one.text: max(merge.check_finite(lora) for lora in one.loras) for one in given}
    report = describe(args, given, routed, plans, largest)
    for line in report["lines"]:
        print(command_line.one_line(line))
    rest = list(other_files(args.base, {layout[expert] for expert in plans})) if layout else []
    write_merged(
        args, output, layout, plans, rest, config if args.rename == "keep" and config.is_file() else None, report
    )


def open_bases(
    args: argparse.Namespace, layout: dict[str | None, str] | None
) -> tuple[dict[str | None, shards.Checkpoint], dict[str | None, str] | None]:
    """{expert: its checkpoint}, and {expert: its folder} of a pipeline. The expert of an image model is None."""
    folders = layout or {EXPERTS.get(args.expert) or lora_files.expert_in_path(args.base.absolute()): "."}
    bases = {expert: shards.open_checkpoint(args.base / folder) for expert, folder in folders.items()}
    for base in bases.values():
        shards.check_unquantised(base)
        if models := image_names.base_models(base):
            if args.expert or len(bases) > 1:
                raise Refused(f"{base.path} is {' or '.join(models)}, which has no experts; leave --expert away")
            return {None: base}, layout and {None: "transformer"}
    return bases, layout


def read_loras(text: str, alpha: float | None) -> Given:
    """PATH[@high|@low][:strength] -> the LoRAs in it, with their experts set where the text names one."""
    (path, strength), expert = command_line.parse_path_and_strength(text), None
    if found := re.fullmatch(r"(.+)@(high|low)", path):
        path, expert = found[1], EXPERTS[found[2]]
    loras = lora_files.read_lora(path, alpha)
    if expert and lora_files.WAN not in loras[0].models:
        raise Refused(f"--lora {text}: {' and '.join(loras[0].models)} have no experts; give --lora {path}")
    loras = lora_files.assign(loras, expert)
    for scale in {1.0} | {update.scale for lora in loras for update in lora.updates.values()}:
        if not FLOAT32.tiny <= abs(strength * scale) <= FLOAT32.max:
            raise Refused(f"--lora {text}: strength {strength:g} times scale {scale:g} is 0 or infinite in float32")
    return Given(text, Path(path), strength, loras)


def route(given: list[Given], experts: list[str | None]) -> dict[str | None, list[tuple[Lora, float]]]:
    """{expert of the base: its LoRAs and strengths}. Refused where a half's place is unknown or not in the base.

    experts: both for a pipeline, else the one that the base is, None if nothing says which.
    """
    routed: dict[str | None, list[tuple[Lora, float]]] = {expert: [] for expert in experts}
    for one in given:
        placed = False
        for lora in one.loras:
            expert = assign_experts(one.text, lora, experts, alone=len(one.loras) == 1)
            if expert in routed:
                routed[expert].append((lora, one.strength))
                placed = True
        if not placed:
            raise Refused(f"--lora {one.text} has nothing for the base")
    return routed


def assign_experts(text: str, lora: Lora, experts: list[str | None], alone: bool) -> str | None:
    """The base's expert that a LoRA belongs to; the LoRA's own, not in the base, for the other half of a pair."""
    if lora.expert in experts and lora.expert is not None:
        return lora.expert
    if len(experts) == 2:
        raise Refused(
            f"--lora {text}: neither its keys nor a name such as ..._high_noise say which expert it is for; write "
            "PATH@high or PATH@low (before a :strength), or give it twice for both"
        )
    if not alone:
        if experts[0] is None:
            raise Refused(f"--lora {text} holds both experts; say which one the base is: --expert high or low")
        return lora.expert
    if None not in (lora.expert, experts[0]):
        raise Refused(
            f"--lora {text} is for the {lora.expert} expert, the base is {experts[0]}; if a name is wrong, write "
            "PATH@high or PATH@low, or --expert for the base"
        )
    return experts[0]


def describe(
    args: argparse.Namespace,
    given: list[Given],
    routed: dict[str | None, list[tuple[Lora, float]]],
    plans: dict[str | None, merge_tensors.Plan],
    largest: dict[str, float],
) -> dict:
    """What is about to happen: lines for the user, a record for the file's metadata, figures for --json."""
    lines, record = [], {"base": command_line.one_line(str(args.base)), "dtype": args.dtype}
    for number, one in enumerate(given):
        for lora in one.loras:
            ranks = sorted({update.rank for update in lora.updates.values() if update.down is not None})
            scales = sorted({update.scale for update in lora.updates.values() if update.down is not None})
            text = (
                f"{lora.path}: {len(lora.updates)} modules, rank {span(ranks)}, scale {span(scales)}, alpha from "
                f"{lora.alpha_source}, strength {one.strength:g}, {whose(lora)}; keys like {lora.dialect}"
            )
            lines.append(text)
            record[f"lora_{number}_{lora.expert or 'model'}"] = (
                command_line.one_line(text) + f"; sha256 {sha256(lora.path)}"
            )
            lines += [f"note: {note}" for note in lora.notes]
        if largest[one.text] == 0:
            lines.append(f"WARNING: {one.text} is zero everywhere: an adapter before its first step?")
    for expert, plan in plans.items():
        lines += [f"note: {note}" for note in plan.base.notes]
        lines.append(
            f"{expert or 'base'}: {len(plan.merged)} of {len(plan.base.tensors)} tensors change, "
            f"{plan.naming} names, {command_line.gigabytes(sum(part.nbytes for part in plan.parts))}"
        )
    lines += [f"{expert}: no LoRA for it, taken as it is" for expert, loras in routed.items() if not loras]
    return {"lines": lines, "record": record, "kept": {}}


def whose(lora: Lora) -> str:
    """The model, or its expert, that a LoRA is for, in words."""
    if lora_files.WAN in lora.models:
        return f"expert {lora.expert or 'not named'}"
    return f"of {' or '.join(lora.models)}"


def span(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}..{values[-1]:g}"


def warn_of_loss(expert: str | None, kept: merge_tensors.MergeLoss, plan: merge_tensors.Plan, report: dict) -> None:
    """Print how much of the update the stored dtype holds."""
    if not kept.intended:
        return
    name = expert or "base"
    unchanged = kept.unchanged / kept.elements
    line = f"{name}: update kept {kept.share:.1%}, error {kept.relative_error:.1%} of it, {unchanged:.1%} unchanged"
    print(line)
    report["kept"][name] = {"share": kept.share, "relative_error": kept.relative_error, "unchanged": unchanged}
    if kept.share < 0.9:
        dtypes = sorted({part.dtype for part in plan.parts})
        print(
            f"WARNING: {name} keeps only {kept.share:.0%} of the update: steps below the spacing of {'/'.join(dtypes)} "
            "are lost. Merge with --dtype fp32 or fp16, from an fp32 base if there is one, or use the LoRA unmerged"
        )


def other_files(base: Path, merged: set[str]) -> Iterator[tuple[Path, Path]]:
    """(file, its place in the output) of all that a pipeline holds beside the experts that are written anew.

    Through symbolic links, as in a hub cache. Refused for what is neither a file nor a folder.
    """

    def walk(source: Path, place: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
        if source.is_file():
            yield source, place
        elif source.is_dir() and source.resolve() not in above:
            for child in sorted(source.iterdir()):
                yield from walk(child, place / child.name, (*above, source.resolve()))
        else:
            raise Refused(f"{source} is neither a file nor a folder, or a link to a folder that holds it; remove it")

    for child in sorted(base.iterdir()):
        if child.name not in (*merged, MANIFEST) and not child.name.startswith("."):
            yield from walk(child, Path(child.name), (base.resolve(),))
    for folder in sorted(merged):
        if (base / folder / "config.json").is_file():
            yield base / folder / "config.json", Path(folder, "config.json")


def write_merged(
    args: argparse.Namespace,
    output: Output,
    layout: dict[str, str] | None,
    plans: dict[str | None, merge_tensors.Plan],
    rest: list[tuple[Path, Path]],
    config: Path | None,
    report: dict,
) -> None:
    """Write and verify the output, or with --dry-run say what would be. rest: a pipeline's other files."""
    tensors = sum(part.nbytes for plan in plans.values() for part in plan.parts)
    device = existing(args.out.parent).stat().st_dev
    # weights on the output's file system become links
    copies = [file.stat() for file, _ in rest if file.suffix not in WEIGHTS or file.stat().st_dev != device]
    total = tensors + sum(one.st_size for one in copies)
    output.make_room(total, args.dry_run)
    if args.dry_run:
        for expert, plan in plans.items():
            warn_of_loss(expert, merge_tensors.estimate_kept(plan), plan, report)
        print(f"dry run: nothing written; {command_line.gigabytes(total)} would be")
        output.write_report(report)
        return
    metadata = {"format": "pt", "rewardfl": TOOL}
    metadata |= {f"rewardfl_{key}": value for key, value in report["record"].items()}
    if layout:
        write_pipeline(args, output, {layout[expert]: plan for expert, plan in plans.items()}, rest, metadata)
    else:
        (plan,) = plans.values()
        with writing.progress_bar(plan.parts, str(args.out)) as bar:
            output.write_model(plan.parts, metadata, args.max_shard_size, bar.update, config)
    for expert, plan in plans.items():
        if plan.merged:
            warn_of_loss(expert, plan.kept, plan, report)
    if args.verify:
        for expert, plan in plans.items():
            place = args.out / layout[expert] if layout else args.out
            with writing.progress_bar(plan.parts, f"verifying {place}") as bar:
                merge_tensors.verify_merge(plan, shards.open_checkpoint(place), bar.update)
        print("verified: copies are equal byte by byte, merged rows equal base + LoRA")
    print(command_line.one_line(f"written: {args.out}"))
    output.write_report(report)


def write_pipeline(
    args: argparse.Namespace,
    output: Output,
    plans: dict[str, merge_tensors.Plan],
    rest: list[tuple[Path, Path]],
    metadata: dict[str, str],
) -> None:
    """The pipeline with its merged experts, by folder. Other weights are hard-linked, everything small is copied.

    A link shares its content with the base, so what people edit (configurations, tokenizer) must be a copy. Weights
    become copies too where the disk has no links.
    """
    with output.folder() as folder:
        copies = [(source, place) for source, place in rest if not linked(source, folder / place)]
        nbytes = sum(part.nbytes for plan in plans.values() for part in plan.parts)
        check_space(args.out, nbytes + sum(source.stat().st_size for source, _ in copies))
        for source, place in copies:
            shutil.copyfile(source, folder / place)
        for name, plan in plans.items():
            (folder / name).mkdir(exist_ok=True)
            with writing.progress_bar(plan.parts, name) as bar:
                writing.write_folder(folder / name, plan.parts, metadata, args.max_shard_size, bar.update)


def linked(source: Path, target: Path) -> bool:
    """Make the folder of `target`, and it a link to `source` if that holds weights and the disk can; whether it did."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix not in WEIGHTS:
        return False
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links: the copy that follows tells what else it may be
        return False
    return True
