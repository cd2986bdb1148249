"""Evaluation of videos (tools/evaluate.py), from its options to the report: identity, motion and canaries.

`arms` plans and samples, `judging` measures a video, `records` stores the result, `study` orders the work, `figures`
summarises many records.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from rewardfl import __version__, backbones, command_line, config, data, machine
from rewardfl.data import cache
from rewardfl.evaluation import judge_images, processes
from rewardfl.evaluation.arms import Arm, find_videos, load_config, make_arms, read_start
from rewardfl.evaluation.figures import summarise
from rewardfl.evaluation.judging import list_dependencies, load_judges, measured_rewards
from rewardfl.evaluation.metric_curves import read_metrics
from rewardfl.evaluation.processes import connected
from rewardfl.evaluation.records import FORMAT, SETTINGS, TOOL, Settings, merge_settings, record_file
from rewardfl.evaluation.report.pictures import PEOPLE, draw_pictures
from rewardfl.evaluation.report.report_page import format_report, report_page
from rewardfl.evaluation.study import Study
from rewardfl.files import atomic_write, digest_files, escape_control
from rewardfl.merging import output
from rewardfl.rewards import resolve_rewards
from rewardfl.rewards.face.identity_kept import FEWEST
from rewardfl.rewards.registry import ResolvedReward
from rewardfl.training import plan, setup_model, setup_rewards
from rewardfl.training.setup_run import digest_base_model
from rewardfl.training.shard import Shard

# keys of the configuration that decide how videos are sampled and clips are read, without paths: files have digests
SAMPLING = ("data.height", "data.width", "data.num_frames", "data.max_pixels", "data.fps", "sample.", "model.dtype")

MANY = ("config", "videos", "strengths", "judge", "protocol", "dino")  # options that image models do not have

REPORTS = ("report.json", "report.html", "grid.png", "curves.png", "front.png")  # written at the end


def run(args: argparse.Namespace) -> int:
    """Judge, report and draw; return the exit code."""
    with connected() as share, ExitStack() as lock:
        device = command_line.resolve_device(args.device)
        args.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device
        return judge_all(args, share, lock)


def judge_all(args: argparse.Namespace, share: Shard, lock: ExitStack) -> int:
    """Judge all arms; return the exit code. The folder's lock against other evaluations enters `lock`."""
    cfg, main = load_config(args), not share.quiet
    threads = machine.threads_of_process(cfg.run.cpu_threads, share.processes)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    folder = output.Folder(args.out or args.run / "evaluation", TOOL)
    usual, adapters = cfg.sample.num_inference_steps, args.adapter or []
    arms = make_arms(adapters, args.strengths, args.steps or [usual], usual, args.videos, args.run, cfg.lora.init_from)
    rows = data.load_metadata(args.data, "--data")
    source = Path(args.config) if args.config else args.run / "run.json"
    read = [path for row in rows for path in row.files.values() if path]
    folders = [path for arm in arms for path in (arm.adapter, arm.videos) if path]
    output.check_inputs("--out", folder.path, [source, *args.judge.values(), Path(args.data), *read, *folders])
    if cfg.data.num_frames == 1:
        check_images(vars(args), arms, share.processes)
        lock.enter_context(folder.locked())
        return judge_images.run(args, arms[-1], folder)
    rewards = resolve_rewards(measured_rewards(cfg.reward, config.list_reward_specs(cfg, for_evaluation=True)))
    rows = check_rows(rows, cfg.data, rewards, quiet=share.quiet)
    files = {arm.name: find_videos(arm.videos, rows) for arm in arms if arm.videos is not None}
    plan.check_frames(cfg.data.num_frames, rewards)
    judges = load_judges(cfg.reward, rewards, args)
    backbone, base, starts = None, {}, {}
    enough_people = len({row.who for row in rows}) >= FEWEST
    if any(arm.videos is None for arm in arms):
        backbone = setup_model.open_model(cfg)
        base = digest_base_model(backbone)
        if start := cfg.lora.init_from:
            trained, targets = plan.trained_experts(cfg, backbone.experts), plan.lora_targets(cfg, backbone)
            starts[Path(start)] = read_start(cfg.lora, backbone, trained, targets, args.run)
    elif enough_people:  # other tools' videos need only the VAE
        try:
            backbone = backbones.open(cfg.model.model_name, setup_model.model_source(cfg))
            backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
            base = {"vae": digest_files(backbone.weight_files["vae"])}
        except (ValueError, OSError) as error:
            backbone = None
            if main:
                print(escape_control(f"note: identity kept cannot be measured: {error}"))
    sampling = {key: value for key, value in config.flat(cfg).items() if key.startswith(SAMPLING)}
    settings = make_settings(sampling, rows, arms, base, list_dependencies(judges, cfg.reward.det_size, args.dino))
    study = Study(
        seeds=args.seeds, batch=args.batch, experts=args.experts, clips=cfg.data, sampling=cfg.sample, out=folder.path,
        arms=tuple(arms), judges=judges, share=share, files=files, starts=starts,
    )  # fmt: skip
    names = study.names(rows)
    records = [str(record_file(Path(), rank)) for rank in range(share.processes)]  # these grow: no hash
    take = partial(take_folder, folder, [*names, *records], settings, force=args.force, lock=lock)
    processes.run_on_main(take, main=main)
    rows = study.read_real(rows, backbone if enough_people else None)
    if backbone is not None:
        study.sample(backbone, rows)
    study.judge_files(rows)
    processes.gather([])  # wait for all
    if main:
        folder.claim(REPORTS)
        finish(study, rows, settings, args)
        folder.remove(study.prepared(rows))
        folder.seal([*REPORTS, *names, SETTINGS])
    return 0


def check_rows(
    rows: Sequence[data.Row], clips: config.DataConfig, rewards: Sequence[ResolvedReward], *, quiet: bool
) -> list[data.Row]:
    """Return the rows with usable headers and prompts. Raise DataError or ValueError for others, if not skipped."""
    if missing := [row.line for row in rows if row.video is None]:
        raise ValueError(f"--data: line {missing[0]} names no video, and only rows with a video are compared")
    headers = [data.inspect_row(row, clips.num_frames, clips.fps) for row in rows]
    problems = [(row.line, text) for row, header in zip(rows, headers, strict=True) for text in header.problems]
    classes = {reward.key: cls for reward, cls in rewards}
    problems += [(row.line, text) for row in rows for text in setup_rewards.unusable_prompts(row, classes)]
    good, bad = data.usable_rows(rows, problems, skip_bad_rows=clips.skip_bad_rows)
    for line in (*(f"note: {note}" for note in data.notes(rows)), *(f"skipped: {line}" for line in bad)):
        if not quiet:
            print(escape_control(line))
    return good


def make_settings(
    sampling: Mapping[str, str],
    rows: Sequence[data.Row],
    arms: Sequence[Arm],
    base: Mapping[str, str],
    judges: Mapping[str, str],
) -> Settings:
    """Return all that the records depend on, as text that can be compared. base: digests of the model's parts."""
    files = {row.id: digest_files([path for path in row.files.values() if path]) for row in rows}
    return {
        "records": {"format": str(FORMAT)},
        "data": {"--data": cache.digest({"files": files})[:16]},
        "sampling": sampling,
        "model": base,
        "judges": judges,
        "adapters": {arm.name: digest_files([arm.adapter])[:16] for arm in arms if arm.adapter is not None},
        "videos": {arm.name: digest_files([arm.videos])[:16] for arm in arms if arm.videos is not None},
    }


def take_folder(
    folder: output.Folder, names: Sequence[str], settings: Settings, *, force: bool, lock: ExitStack
) -> None:
    """Lock the folder and claim the names that are going to be written. force: remove an earlier evaluation.

    Raise InputError for an existing file of another origin, and for records of other settings.
    """
    folder.check([*names, *REPORTS, SETTINGS])
    lock.enter_context(folder.locked())
    if force:
        folder.remove(folder.listed())
    merged = merge_settings(folder.path, settings)
    folder.claim([*names, SETTINGS])
    atomic_write(folder.path / SETTINGS, json.dumps(merged, indent=2) + "\n")


def check_images(options: Mapping[str, object], arms: Sequence[Arm], processes: int) -> None:
    """Raise ValueError for options that only videos have, more than one adapter, and several processes."""
    if wrong := [f"--{name}" for name in MANY if options[name] not in (None, [], {}, ["ours"])]:
        raise ValueError(f"{wrong[0]}: is for videos, and data.num_frames is 1; remove it")
    if sum(not arm.origin for arm in arms) > 2 or processes > 1:
        raise ValueError("--adapter: images are judged by one process, before and after one adapter; name one")


def finish(study: Study, rows: Sequence[data.Row], settings: Settings, args: argparse.Namespace) -> None:
    """Write the report and the pictures, and print the figures."""
    out, records = study.out, study.join(rows)
    report = summarise(records, study.arms, args.face_sizes, args.threshold)
    report |= {"command": sys.argv, "version": __version__, "settings": settings}
    atomic_write(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    shown = [row.index for row in rows[:PEOPLE]]
    pictures = draw_pictures(report, out, [record for record in records if record["index"] in shown], study.read_file)
    metrics = read_metrics(args.run) if args.run and (args.run / "metrics.jsonl").is_file() else []
    atomic_write(out / "report.html", report_page(report, out, metrics=metrics))
    print(format_report(report))
    print(f"report: {out / 'report.html'}, {out / 'report.json'}")
    print(f"pictures: {', '.join(map(str, pictures))}\nvideos: {out / 'videos'}")
