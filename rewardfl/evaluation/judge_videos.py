"""Evaluation of videos or images (tools/evaluate.py), from its options to the report."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rewardfl import __version__, backbones, command_line, config, data, lora, machine, outputs
from rewardfl.backbones.protocol import Backbone, Source
from rewardfl.config.schema import ModelConfig
from rewardfl.data import cache
from rewardfl.evaluation import image_report
from rewardfl.evaluation.arms import Arm, find_videos, load_config, make_arms, read_start
from rewardfl.evaluation.figures import make_table, summarise
from rewardfl.evaluation.judging import list_dependencies, load_judges, measured_rewards
from rewardfl.evaluation.records import FORMAT, SETTINGS, Settings, merge_settings, record_file
from rewardfl.evaluation.report.pictures import PEOPLE, draw_grid
from rewardfl.evaluation.report.report_page import format_report, render, report_page
from rewardfl.evaluation.study import Study, connected, gather, run_on_main
from rewardfl.evaluation.verification import People, load_others, verify_arms
from rewardfl.files import atomic_write, digest_files, escape_control
from rewardfl.rewards import resolve_rewards
from rewardfl.rewards.face.identity_kept import FEWEST
from rewardfl.rewards.scoring import Term
from rewardfl.training import model_files, plan, setup_rewards
from rewardfl.training.setup_run import digest_base_model
from rewardfl.training.shard import Shard

# keys of the configuration that decide how videos are sampled and clips are read, without paths: files have digests
SAMPLING = ("data.height", "data.width", "data.num_frames", "data.max_pixels", "data.fps", "sample.", "model.dtype")


def evaluate_run(args: argparse.Namespace) -> int:
    """Judge, report and draw; return the exit code."""
    with connected() as share, ExitStack() as lock:
        device = command_line.resolve_device(args.device)
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
        return judge_all(args, share, lock)


def judge_all(args: argparse.Namespace, share: Shard, lock: ExitStack) -> int:
    """Judge all arms; return the exit code. The folder's lock against other evaluations enters `lock`."""
    cfg = load_config(args)
    threads = machine.threads_of_process(cfg.run.cpu_threads, share.processes)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    folder = outputs.Folder(args.out or args.run / "evaluation", args.overwrite)
    usual, adapters = cfg.sample.num_inference_steps, args.adapter or []
    arms = make_arms(adapters, args.strengths, args.steps or [usual], usual, args.videos, args.run, cfg.lora.init_from)
    of_images = cfg.data.num_frames == 1
    described = None if of_images else backbones.describe(cfg.model.model_name, Source())
    rows = data.load_metadata(args.data, "--data")
    rows = data.assign_images(rows, cfg.run.seed) if described and described.takes_image else rows
    others = load_others(args.others, rows)
    read = [Path(args.config) if args.config else args.run / "run.json", *args.judge.values(), Path(args.data)]
    read += [path for row in (*rows, *others) for path in row.files.values() if path]
    read += [path for arm in arms for path in (arm.adapter, arm.videos) if path]
    outputs.check_inputs("--out", folder.path, read)
    if of_images and (wrong := [f"--{name}" for name in ("config", "videos", "judge", "others") if vars(args)[name]]):
        raise ValueError(f"{wrong[0]}: is for videos, and data.num_frames is 1; remove it")
    fps = cfg.data.fps or (described.frame_rate if described else 1.0)
    rewards = resolve_rewards(measured_rewards(cfg.reward, config.list_reward_specs(cfg, for_evaluation=True)), fps)
    rewards = [(replace(spec, settings={**cls.evaluation_settings, **spec.settings}), cls) for spec, cls in rewards]
    plan.check_frames(cfg.data.num_frames, rewards)
    backbone = plan.open_model(cfg) if any(arm.videos is None for arm in arms) else None
    judges = load_judges(cfg.reward, rewards, args, of_images=of_images)
    rows = check_rows(rows, cfg.data, judges.terms, backbone, quiet=share.quiet)
    files = {arm.name: find_videos(arm.videos, rows) for arm in arms if arm.videos is not None}
    base, starts = {}, {}
    enough_people = not of_images and len({row.who for row in rows if row.video}) >= FEWEST
    if backbone is not None:
        base = digest_base_model(backbone)
        if start := cfg.lora.init_from:
            trained = plan.trained_experts(cfg, backbone.experts)
            starts[Path(start)] = read_start(cfg.lora, backbone, trained, args.run)
        expert = backbone.empty_expert(backbone.experts[0])
        for adapter in {arm.adapter for arm in arms if arm.adapter} - starts.keys():
            for file in adapter.glob(f"*/{lora.WEIGHTS_NAME}"):  # now, not after the real clips and the base
                lora.read_for(expert, file)
    elif enough_people or any(row.video is None for row in rows):  # other tools' videos need only the VAE
        backbone, base = open_vae(cfg.model, cfg.data, quiet=share.quiet)
    dependencies = list_dependencies(judges, cfg.reward.det_size)
    settings = make_settings(config.flat(config.to_dict(cfg)), rows, arms, base, dependencies)
    study = Study(
        seeds=args.seeds, batch=args.batch, experts=args.experts, clips=cfg.data, sampling=cfg.sample, out=folder.path,
        arms=tuple(arms), judges=judges, share=share, files=files, fps=fps, starts=starts,
    )  # fmt: skip
    records = [str(record_file(Path(), rank)) for rank in range(share.processes)]
    reports = ("report.json", "grid.png", image_report.DISAGREEMENTS if of_images else "report.html")
    names = [*study.names(rows), *records, *reports, SETTINGS]
    run_on_main(partial(take_folder, folder, names, settings, lock), share)
    rows = study.read_rows(rows, backbone if enough_people else None)
    people = study.embed_people(rows, others, backbone)
    if backbone is not None:
        study.sample(backbone, rows)
    study.judge_files(rows)
    gather([])  # wait for all
    if not share.quiet:
        finish(study, rows, people, {"command": sys.argv, "version": __version__, "settings": settings})
    return 0


def open_vae(model: ModelConfig, clips: config.DataConfig, *, quiet: bool) -> tuple[Backbone | None, dict[str, str]]:
    """Return the model and its VAE's digest; none, with a note, if it cannot be opened."""
    try:
        backbone = backbones.open(model.model_name, model_files.model_source(model))
        backbone.check_clips(clips.height, clips.width, clips.num_frames, clips.max_pixels)
        return backbone, {"vae": digest_files(backbone.weight_files["vae"])}
    except (ValueError, OSError) as error:
        if not quiet:
            print(escape_control(f"note: identity kept cannot be measured: {error}"))
        return None, {}


def check_rows(
    rows: Sequence[data.Row], clips: config.DataConfig, terms: Sequence[Term], backbone: Backbone | None, *, quiet: bool
) -> list[data.Row]:
    """Return the rows with usable headers and prompts. Raise DataError or ValueError for others, if not skipped."""
    takes_image = backbone is not None and backbone.takes_image
    missing = [row.line for row in rows if row.video is None and not row.pictures]
    if missing and clips.num_frames > 1:
        raise ValueError(f"--data: line {missing[0]} names neither a video nor pictures to compare with; add them")
    rewards, problems = {term.key: term.reward for term in terms}, []
    for row in rows:
        texts = [*data.inspect_row(row, clips.num_frames, clips.fps, takes_image=takes_image).problems]
        if clips.num_frames == 1:  # for videos the figure is left out, or the motion is the base's
            texts += setup_rewards.missing_columns(row, {key: each.compares_with for key, each in rewards.items()})
        texts += setup_rewards.unusable_prompts(row, rewards)
        texts += [plan.size_problem(clips, backbone, row.size)] if backbone is not None else []
        problems += [(row.line, text) for text in texts if text]
    good, bad = data.usable_rows(rows, problems, skip_bad_rows=clips.skip_bad_rows)
    notes = [f"note: {note}" for note in data.notes(rows)] + [f"skipped: {line}" for line in bad]
    for line in () if quiet else notes:
        print(escape_control(line))
    return good


def make_settings(
    values: Mapping[str, str],
    rows: Sequence[data.Row],
    arms: Sequence[Arm],
    base: Mapping[str, str],
    judges: Mapping[str, str],
) -> Settings:
    """Return all that the records depend on, as text that can be compared. base: digests of the model's parts.

    values: of the configuration by key. A verdict samples no video, and evaluations from before it are continued.
    """
    files = {row.id: digest_files([path for path in row.files.values() if path]) for row in rows}
    return {
        "records": {"format": str(FORMAT)},
        "data": {"--data": cache.digest({"files": files})[:16]},
        "sampling": {
            key: value
            for key, value in values.items()
            if key.startswith(SAMPLING) and not key.startswith("sample.verdict")
        },
        "model": base,
        "judges": judges,
        "adapters": {arm.name: digest_files([arm.adapter])[:16] for arm in arms if arm.adapter is not None},
        "videos": {arm.name: digest_files([arm.videos])[:16] for arm in arms if arm.videos is not None},
    }


def take_folder(folder: outputs.Folder, names: Sequence[str], settings: Settings, lock: ExitStack) -> None:
    """Lock the folder and claim the names to write, or raise InputError. --overwrite removes an earlier evaluation."""
    folder.check(names)
    lock.enter_context(folder.locked())
    if folder.overwrite:
        folder.remove([*names, *(folder.listed() or ())])
    merged = merge_settings(folder.path, settings)
    folder.claim(names)
    atomic_write(folder.path / SETTINGS, json.dumps(merged, indent=2) + "\n")


def finish(study: Study, rows: Sequence[data.Row], people: People, about: dict) -> None:
    """Write the report and the pictures, and print the figures."""
    out, records = study.out, study.join(rows)
    if study.judges.faces:
        report = summarise(records, study.arms, verify_arms(people, {row.who for row in rows})) | about
        shown = [row.index for row in rows[:PEOPLE]]
        draw_grid(report, out, [record for record in records if record["index"] in shown], study.read_file)
        atomic_write(out / "report.html", report_page(report, out))
        text, page, folder = format_report(report), f"{out / 'report.html'}, ", "videos"
    else:
        table, prompts = make_table(records, [arm.name for arm in study.arms]), {row.id: row.prompt for row in rows}
        images = image_report.ImageReport(table=table, arms=study.arms, prompts=prompts, terms=study.judges.terms)
        report = images.summarise() | about
        images.draw(out)
        text, page, folder = render("images.txt", {"report": report}), "", "images"
    atomic_write(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(f"{text}\nreport: {page}{out / 'report.json'}\npictures: {out / 'grid.png'}, {out / folder}")
