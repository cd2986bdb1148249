"""Merge LoRAs into a Wan checkpoint, in constant memory, and say how much of the update arrived.

    python tools/merge_lora.py --base Wan2.2-I2V-A14B-Diffusers --lora outputs/face/checkpoints/latest --out merged
    python tools/merge_lora.py --base wan/low_noise_model --lora face.safetensors:0.8 --out low.safetensors --dtype fp16

The base is a pipeline folder (diffusers, or Wan-AI's with high_noise_model/ and low_noise_model/), an expert's folder,
an index.json or a single file, with diffusers' or the original names. A LoRA is PATH[@high|@low][:strength]; any tool's
names are read. Each half goes to its expert; what cannot be placed is refused. Exit codes: 0 merged and every key
used, 2 refused with nothing written, 1 a disk error.
"""

import argparse
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import _common  # noqa: E402

from rewardfl import lora_files, merge, shards  # noqa: E402
from rewardfl.files import atomic_directory, sha256  # noqa: E402
from rewardfl.lora_files import Lora  # noqa: E402
from rewardfl.shards import Refused  # noqa: E402

TOOL = "rewardfl merge_lora 1"
EXPERTS = {"high": "high_noise", "low": "low_noise"}
# how pipelines name their experts' folders
LAYOUTS = (
    {"high_noise": "transformer", "low_noise": "transformer_2"},
    {"high_noise": "high_noise_model", "low_noise": "low_noise_model"},
)


@dataclass(frozen=True)
class Given:
    """One --lora of the command line, read."""

    text: str
    strength: float
    loras: list[Lora]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--lora", action="append", required=True, metavar="PATH[@high|@low][:strength]")
    parser.add_argument("--expert", choices=tuple(EXPERTS), help="which the base is, where its name does not say")
    parser.add_argument("--alpha", type=float, help="alpha of LoRAs that do not tell theirs (default: their rank)")
    _common.add_layout_options(parser)
    _common.add_output_options(parser)
    args = parser.parse_args()

    given = [read(text, args.alpha) for text in args.lora]
    layout = pipeline_layout(args.base)
    if layout and (args.rename != "keep" or args.out.suffix == ".safetensors" or args.expert):
        raise Refused(
            f"--base {args.base} is a pipeline: the output is a pipeline folder with the same names. For one expert as "
            f"a file or with other names give --base {args.base / layout['low_noise']}"
        )
    inputs = [args.base] + [lora.path for one in given for lora in one.loras]
    _common.check_output(args.out, inputs, args.force)

    if layout:
        bases = {expert: shards.open_checkpoint(args.base / folder) for expert, folder in layout.items()}
    else:
        expert = EXPERTS.get(args.expert) or lora_files.expert_in_path(args.base.absolute())
        bases = {expert: shards.open_checkpoint(args.base)}
    routed = route(given, list(bases))
    plans = {}
    for expert, loras in routed.items():
        if loras:
            plans[expert] = merge.plan(bases[expert], loras, args.dtype, args.rename)
        elif args.dtype != "keep":
            plans[expert] = merge.plan(bases[expert], [], args.dtype, args.rename)
    largest = {one.text: max(merge.check_finite(lora) for lora in one.loras) for one in given}

    report = describe(args, given, routed, plans, largest)
    for line in report["lines"]:
        print(line)
    total = sum(part.nbytes for plan in plans.values() for part in plan.parts)
    _common.check_space(args.out, total)
    if args.dry_run:
        for expert, plan in plans.items():
            warn_of_loss(expert, merge.estimate_kept(plan), plan, report)
        print(f"dry run: nothing written; {_common.gigabytes(total)} would be")
        _common.write_report(args.json, report)
        return

    metadata = {"format": "pt", "rewardfl": TOOL}
    metadata |= {f"rewardfl_{key}": value for key, value in report["record"].items()}
    if layout:
        write_pipeline(args, layout, plans, metadata)
    else:
        (plan,) = plans.values()
        config = args.base / "config.json" if args.base.is_dir() else args.base.parent / "config.json"
        keep_config = args.rename == "keep" and config.is_file()
        with _common.progress_bar(plan.parts, str(args.out)) as bar:
            shards.write_model(
                args.out, plan.parts, metadata, args.max_shard_size, bar.update, config if keep_config else None
            )
    for expert, plan in plans.items():
        if plan.merged:
            warn_of_loss(expert, plan.kept, plan, report)
    if args.verify:
        for expert, plan in plans.items():
            place = args.out / layout[expert] if layout else args.out
            with _common.progress_bar(plan.parts, f"verifying {place}") as bar:
                merge.verify(plan, shards.open_checkpoint(place), bar.update)
        print("verified: copies are equal byte by byte, merged rows equal base + LoRA")
    print(f"written: {args.out}")
    _common.write_report(args.json, report)


def read(text: str, alpha: float | None) -> Given:
    """PATH[@high|@low][:strength] -> the LoRAs in it, with their experts set where the text names one."""
    path, strength = text, 1.0
    if found := re.fullmatch(r"(.+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", path):
        path, strength = found[1], float(found[2])
    expert = None
    if found := re.fullmatch(r"(.+)@(high|low)", path):
        path, expert = found[1], EXPERTS[found[2]]
    if strength == 0:
        raise Refused(f"--lora {text}: strength 0 merges nothing; leave it out")
    return Given(text, strength, lora_files.assign(lora_files.read_lora(path, alpha), expert))


def pipeline_layout(base: Path) -> dict[str, str] | None:
    """{expert: folder} when `base` is a pipeline with two experts."""
    for layout in LAYOUTS:
        if all((base / folder).is_dir() for folder in layout.values()):
            return layout
    return None


def route(given: list[Given], experts: list[str | None]) -> dict[str | None, list[tuple[Lora, float]]]:
    """{expert of the base: its LoRAs and strengths}. Refused where a half's place is unknown or not in the base.

    experts: both for a pipeline, else the one that the base is, None if nothing says which.
    """
    routed: dict[str | None, list[tuple[Lora, float]]] = {expert: [] for expert in experts}
    for one in given:
        placed = False
        for lora in one.loras:
            expert = place(one.text, lora, experts, alone=len(one.loras) == 1)
            if expert in routed:
                routed[expert].append((lora, one.strength))
                placed = True
        if not placed:
            raise Refused(f"--lora {one.text} has nothing for the base")
    return routed


def place(text: str, lora: Lora, experts: list[str | None], alone: bool) -> str | None:
    """The base's expert that a LoRA belongs to; the LoRA's own, not in the base, for the other half of a pair."""
    if lora.expert in experts and lora.expert is not None:
        return lora.expert
    if len(experts) == 2:
        raise Refused(
            f"--lora {text}: neither its keys nor its name say which expert it is for; write PATH@high or PATH@low "
            "(before a :strength)"
        )
    if not alone:
        if experts[0] is None:
            raise Refused(f"--lora {text} holds both experts; say which one the base is: --expert high or low")
        return lora.expert
    if None not in (lora.expert, experts[0]):
        raise Refused(f"--lora {text} is for the {lora.expert} expert, the base is {experts[0]}")
    return experts[0]


def describe(
    args: argparse.Namespace,
    given: list[Given],
    routed: dict[str | None, list[tuple[Lora, float]]],
    plans: dict[str | None, merge.Plan],
    largest: dict[str, float],
) -> dict:
    """What is about to happen: lines for the user, a record for the file's metadata, figures for --json."""
    lines, record = [], {"base": str(args.base), "dtype": args.dtype}
    for number, one in enumerate(given):
        for lora in one.loras:
            ranks = sorted({update.rank for update in lora.updates.values() if update.down is not None})
            scales = sorted({update.scale for update in lora.updates.values() if update.down is not None})
            text = (
                f"{lora.path}: {len(lora.updates)} modules, rank {span(ranks)}, scale {span(scales)}, alpha from "
                f"{lora.alpha_source}, strength {one.strength:g}, expert {lora.expert or 'not named'}; keys like "
                f"{lora.dialect}"
            )
            lines.append(text)
            record[f"lora_{number}_{lora.expert or 'model'}"] = f"{text}; sha256 {sha256(lora.path)}"
        if largest[one.text] == 0:
            lines.append(f"WARNING: {one.text} is zero everywhere: an adapter before its first step?")
    for expert, plan in plans.items():
        lines += [f"note: {note}" for note in plan.base.notes]
        lines.append(
            f"{expert or 'base'}: {len(plan.merged)} of {len(plan.base.tensors)} tensors change, "
            f"{plan.naming} names, {_common.gigabytes(sum(part.nbytes for part in plan.parts))}"
        )
    lines += [f"{expert}: no LoRA for it, taken as it is" for expert, loras in routed.items() if not loras]
    return {"lines": lines, "record": record, "kept": {}}


def span(values: list[float]) -> str:
    if not values:
        return "none"
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g}..{values[-1]:g}"


def warn_of_loss(expert: str | None, kept: merge.Kept, plan: merge.Plan, report: dict) -> None:
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


def write_pipeline(
    args: argparse.Namespace, layout: dict[str, str], plans: dict[str | None, merge.Plan], metadata: dict[str, str]
) -> None:
    """The pipeline with its merged experts; everything else is hard-linked, or copied across file systems."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(args.out) as folder:
        written = {layout[expert] for expert in plans}
        for child in sorted(args.base.iterdir()):
            if child.name not in written and not child.name.startswith("."):
                link(child, folder / child.name)
        for expert, plan in plans.items():
            place = folder / layout[expert]
            place.mkdir()
            with _common.progress_bar(plan.parts, layout[expert]) as bar:
                shards.write_folder(place, plan.parts, metadata, args.max_shard_size, bar.update)
            config = args.base / layout[expert] / "config.json"
            if config.is_file():
                shutil.copyfile(config, place / "config.json")


def link(source: Path, target: Path) -> None:
    """Links to files, through symbolic links as in a hub cache; folders are made anew."""
    if source.is_dir():
        target.mkdir()
        for child in sorted(source.iterdir()):
            link(child, target / child.name)
        return
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


if __name__ == "__main__":
    _common.run(main)
