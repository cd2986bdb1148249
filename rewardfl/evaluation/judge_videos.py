"""Evaluation of videos (tools/evaluate.py), from its options to the report: identity, motion and canaries.

`arms` plans and samples, `judging` measures a video, `records` stores the result, `study` orders the work, `figures`
summarises many records.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from rewardfl import __version__, backbones, command_line, config, data, machine
from rewardfl.data import cache
from rewardfl.evaluation import judge_images
from rewardfl.evaluation.arms import Arm, check_adapter, find_videos, load_config, plan_arms, unique_names
from rewardfl.evaluation.figures import summarise
from rewardfl.evaluation.judging import list_dependencies, load_judges, measured_rewards
from rewardfl.evaluation.processes import Processes, connected
from rewardfl.evaluation.records import FORMAT, SETTINGS, TOOL, Settings, merge_settings, record_file
from rewardfl.evaluation.report.pictures import PEOPLE, draw_pictures
from rewardfl.evaluation.report.report_page import report_page
from rewardfl.evaluation.report.tables import format_report
from rewardfl.evaluation.study import Study
from rewardfl.files import atomic_write, digest_files, escape_control
from rewardfl.merging import output
from rewardfl.rewards import resolve_rewards
from rewardfl.rewards.face.identity_kept import FEWEST
from rewardfl.training import plan, setup_model
from rewardfl.training.setup_run import digest_base_model

# keys of the configuration that decide how videos are sampled and clips are read, without paths: files have digests
SAMPLING = ("data.height", "data.width", "data.num_frames", "data.max_pixels", "data.fps", "sample.", "model.dtype")

MANY = ("config", "videos", "strengths", "judge", "protocol", "dino")  # options that image models do not have

REPORTS = ("report.json", "report.html", "grid.png", "curves.png", "front.png")  # written at the end


def run(args: argparse.Namespace) -> int:
    """Judge, report and draw; return the exit code."""
    with connected() as processes, ExitStack() as lock:
        args.device = processes.local_device(command_line.resolve_device(args.device))
        return judge_all(args, processes, lock)


def judge_all(args: argparse.Namespace, processes: Processes, lock: ExitStack) -> int:
    """Judge all arms; return the exit code. The folder's lock against other evaluations enters `lock`."""
    cfg = load_config(args)
    threads = machine.threads_of_process(cfg.run.cpu_threads, processes.count)
    torch.set_num_threads(min(torch.get_num_threads(), threads))
    folder = output.Folder(args.out or args.run / "evaluation", TOOL)
    arms = make_arms(args, cfg.sample.num_inference_steps)
    for arm in arms:
        if arm.adapter is not None:
            check_adapter(arm.adapter)
    output.check_inputs("--out", folder.path, list_inputs(args, arms))
    if cfg.data.num_frames == 1:
        check_images(args, arms, processes)
        lock.enter_context(folder.locked())
        return judge_images.run(args, arms[-1], folder)
    rows = load_rows(cfg.data, args, processes)
    files = {arm.name: find_videos(arm.videos, rows) for arm in arms if arm.videos is not None}
    rewards = resolve_rewards(measured_rewards(cfg.reward, config.list_reward_specs(cfg)))
    plan.check_frames(cfg.data.num_frames, rewards)
    judges = load_judges(cfg.reward, rewards, args)
    backbone, base = None, {}
    enough_people = len({row.who for row in rows}) >= FEWEST
    if any(arm.videos is None for arm in arms):
        backbone = setup_model.open_model(cfg)
        base = digest_base_model(backbone)
    elif enough_people:  # other tools' videos need only the VAE
        try:
            backbone = backbones.open(cfg.model.model_name, setup_model.model_source(cfg))
            backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
            base = {"vae": digest_files(backbone.weight_files["vae"])}
        except (ValueError, OSError) as error:
            backbone = None
            if processes.main:
                print(escape_control(f"note: identity kept cannot be measured: {error}"))
    sampling = {key: value for key, value in config.flat(cfg).items() if key.startswith(SAMPLING)}
    settings = make_settings(sampling, rows, arms, base, list_dependencies(judges, cfg.reward.det_size, args.dino))
    study = Study(
        args=args, clips=cfg.data, sampling=cfg.sample, out=folder.path, arms=tuple(arms), judges=judges,
        processes=processes, files=files,
    )  # fmt: skip
    names = study.names(rows)
    records = [str(record_file(Path(), rank)) for rank in range(processes.count)]  # these grow: no hash
    processes.run_on_main(partial(take_folder, folder, [*names, *records], settings, force=args.force, lock=lock))
    rows = study.read_real(rows, backbone if enough_people else None)
    if backbone is not None:
        study.sample(backbone, rows)
    study.judge_files(rows)
    processes.wait()
    if processes.main:
        folder.claim(REPORTS)
        finish(study, rows, settings)
        folder.remove(study.prepared(rows))
        folder.seal([*REPORTS, *names, SETTINGS])
    return 0


def make_arms(args: argparse.Namespace, usual: int) -> list[Arm]:
    """Return the sampled arms of the run, if there is one, and the arms of other tools' videos.

    Without --adapter and --videos sample the run's latest checkpoint. usual: the run's number of steps. Raise
    ValueError for strengths that are named twice, and for a name that two arms would have.
    """
    named = [(Path(path), strength) for path, strength in args.adapter or ()]
    if args.strengths and any(strength != 1 for _, strength in named):
        raise ValueError("--strengths: an --adapter names a strength of its own; give one or the other")
    if not named and not args.videos:
        named = [(args.run / "checkpoints" / "latest", 1.0)]
    adapters = [(path, strength) for path, default in named for strength in args.strengths or [default]]
    sampled = plan_arms(adapters, args.steps or [usual], usual) if args.run else []
    names = unique_names(args.videos)
    if taken := {arm.name for arm in sampled} & set(names):
        raise ValueError(f"--videos: an adapter is called {min(taken)}, too; name the folder otherwise")
    return [*sampled, *(Arm(name=name, videos=folder) for name, folder in zip(names, args.videos, strict=True))]


def load_rows(clips: config.DataConfig, args: argparse.Namespace, processes: Processes) -> list[data.Row]:
    """Load the rows with valid file headers. Raise DataError or ValueError for bad rows, unless data.skip_bad_rows."""
    rows = data.load_metadata(args.data, "--data")
    if missing := [row.line for row in rows if row.video is None]:
        raise ValueError(
            f"--data: line {missing[0]} of {args.data} names no video, and real clips are what is compared"
        )
    headers = [data.inspect_row(row, clips.num_frames, clips.fps) for row in rows]
    problems = [(row.line, text) for row, header in zip(rows, headers, strict=True) for text in header.problems]
    good, bad = data.usable_rows(rows, problems, skip_bad_rows=clips.skip_bad_rows)
    if processes.main:
        for line in (*(f"note: {note}" for note in data.notes(rows)), *(f"skipped: {line}" for line in bad)):
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


def list_inputs(args: argparse.Namespace, arms: Sequence[Arm]) -> Iterator[Path]:
    """Yield all input files, and folders that hold only inputs."""
    yield Path(args.config) if args.config else args.run / "run.json"
    yield from args.judge.values()
    yield Path(args.data)
    for row in data.load_metadata(args.data, "--data"):
        yield from (Path(path) for path in row.files.values() if path)
    yield from (path for arm in arms for path in (arm.adapter, arm.videos) if path)


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


def check_images(args: argparse.Namespace, arms: Sequence[Arm], processes: Processes) -> None:
    """Raise ValueError for options that only videos have, more than one adapter, and several processes."""
    if options := [f"--{name}" for name in MANY if getattr(args, name) not in (None, [], {}, ["ours"])]:
        raise ValueError(f"{options[0]}: is for videos, and data.num_frames is 1; remove it")
    if len(arms) > 2 or processes.count > 1:
        raise ValueError("--adapter: images are judged by one process, before and after one adapter; name one")


def finish(study: Study, rows: Sequence[data.Row], settings: Settings) -> None:
    """Write the report and the pictures, and print the figures."""
    out, records = study.out, study.join(rows)
    report = summarise(records, study.arms, study.args.face_sizes, study.args.threshold)
    report |= {"command": sys.argv, "version": __version__, "settings": settings}
    atomic_write(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    shown = [row.index for row in rows[:PEOPLE]]
    pictures = draw_pictures(report, out, [record for record in records if record["index"] in shown], study.read_file)
    atomic_write(out / "report.html", report_page(report, out))
    print(format_report(report))
    print(f"\nreport: {out / 'report.html'}, {out / 'report.json'}")
    print(f"pictures: {', '.join(map(str, pictures))}\nvideos: {out / 'videos'}")
