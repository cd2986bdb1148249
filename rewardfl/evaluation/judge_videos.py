"""Are people kept, and do they still move? The work of tools/evaluate.py, from its options to the report.

What is sampled is in _arms, what is measured of a video in _judging, what is kept of it in _records, the order of the
work in _study, what is made of many records in _figures.
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
from rewardfl.backbones.protocol import Backbone
from rewardfl.data import cache
from rewardfl.evaluation import judge_images, video_files
from rewardfl.evaluation.arms import Arm, check_adapter, names_of, plan_arms, run_config
from rewardfl.evaluation.figures import Reading, summarise
from rewardfl.evaluation.judging import identify, judges_of
from rewardfl.evaluation.processes import Processes, connected
from rewardfl.evaluation.records import FORMAT, SETTINGS, Settings, agree, record_file
from rewardfl.evaluation.report.pictures import draw_pictures
from rewardfl.evaluation.report.report_page import report_page
from rewardfl.evaluation.report.table import format_report
from rewardfl.evaluation.study import Study
from rewardfl.evaluation.video_files import PEOPLE
from rewardfl.files import atomic_write, model_digest, printable
from rewardfl.merging import output
from rewardfl.rewards.face.identity_kept import FEWEST
from rewardfl.training import setup_model
from rewardfl.training.resume import digest_base_model

# of the configuration: what decides how a video is sampled or a clip is read. Files are told by digests.
SAMPLING = ("data.height", "data.width", "data.num_frames", "data.max_pixels", "data.fps", "sample.", "model.dtype")

MANY = ("config", "videos", "strengths", "judge", "protocol", "dino")  # options for videos alone

REPORTS = ("report.json", "report.html", "grid.png", "curves.png", "front.png")  # written when all is judged


def run(args: argparse.Namespace) -> int:
    """Judge, report, draw: the exit code."""
    with connected() as processes, ExitStack() as lock:
        args.device = processes.own(command_line.device(args.device))
        return judge_all(args, processes, lock)


def judge_all(args: argparse.Namespace, processes: Processes, lock: ExitStack) -> int:
    """Judge everything. lock: entered once the folder is held against other evaluations."""
    overrides = [*args.overrides, f"data.file_name={json.dumps(args.data)}"]
    cfg = config.load(args.config, overrides) if args.config else run_config(args.run, overrides)
    share = machine.threads_of_process(cfg.run.cpu_threads, processes.count)
    torch.set_num_threads(min(torch.get_num_threads(), share))
    folder = output.Folder(args.out or args.run / "evaluation", "rewardfl evaluate 1")
    arms = arms_of(args, cfg)
    for arm in arms:
        if arm.adapter is not None:
            check_adapter(arm.adapter)
    output.check_inputs("--out", folder.path, inputs_of(args, arms))
    if cfg.data.num_frames == 1:
        return judge_image_model(cfg, arms, args, folder, processes, lock)
    rows = rows_of(cfg, args, processes)
    files = {arm.name: video_files.files_of(arm.videos, rows) for arm in arms if arm.videos is not None}
    judges = judges_of(cfg, args)
    enough = len({row.who for row in rows}) >= FEWEST
    backbone, problem = open_backbone(cfg, arms) if enough or any(arm.videos is None for arm in arms) else (None, "")
    if problem and processes.main:
        print(printable(f"note: identity kept cannot be measured: {problem}"))
    through_vae = enough and backbone is not None
    base = {} if backbone is None else digest_parts(backbone, arms)
    settings = settings_of(cfg, rows, arms, base, identify(judges, cfg, args.dino))
    study = Study(cfg, folder.path, tuple(arms), judges, processes, files)
    names = study.names(rows, args.seeds)
    records = [str(record_file(Path(), rank)) for rank in range(processes.count)]  # these grow, and get no hash
    processes.run_on_main(partial(take, folder, [*names, *records], settings, args.force, lock), (ValueError, OSError))
    rows = study.read_real(rows, args.seeds, through_vae)
    if through_vae:
        study.judge_through_vae(backbone, rows, torch.device(args.device))
    study.sample(backbone, rows, args)
    study.judge_files(rows)
    processes.wait()
    if processes.main:
        folder.claim(REPORTS)
        finish(study, rows, settings, Reading(args.face_sizes, args.threshold))
        folder.remove(study.prepared(rows))
        folder.seal([*REPORTS, *names, SETTINGS])
    return 0


def arms_of(args: argparse.Namespace, cfg: config.AnyConfig) -> list[Arm]:
    """What is sampled, if there is a run, and what other tools have made. ValueError for strengths that are said twice.

    Without --adapter the run's latest checkpoint, unless videos of other tools take its place.
    """
    usual = cfg.sample.num_inference_steps
    given = [(Path(path), strength) for path, strength in args.adapter or ()]
    if args.strengths and any(strength != 1 for _, strength in given):
        raise ValueError("--strengths: an --adapter names a strength of its own; give one or the other")
    if not given and not args.videos:
        given = [(args.run / "checkpoints" / "latest", 1.0)]
    adapters = [(path, one) for path, strength in given for one in args.strengths or [strength]]
    sampled = plan_arms(adapters, args.steps or [usual], usual) if args.run else []
    names = names_of(args.videos)
    if taken := {arm.name for arm in sampled} & set(names):
        raise ValueError(f"--videos: an adapter is called {min(taken)}, too; name the folder otherwise")
    made = [Arm(name, videos=folder) for name, folder in zip(names, args.videos, strict=True)]
    return [*sampled, *made]


def open_backbone(cfg: config.AnyConfig, arms: Sequence[Arm]) -> tuple[Backbone | None, str]:
    """Return the model, or None and why it cannot be opened, where nothing is sampled from it.

    Raise what start.open_model does where something is. Videos of other tools need the VAE alone, and no training data.
    """
    if any(arm.videos is None for arm in arms):
        return setup_model.open_model(cfg), ""
    try:
        backbone = backbones.open(cfg.model.model_name, setup_model.model_source(cfg))
        backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
        return backbone, ""
    except (ValueError, OSError) as error:
        return None, str(error)


def digest_parts(backbone: Backbone, arms: Sequence[Arm]) -> dict[str, str]:
    """Return digests of the model's parts that the records depend on: of the VAE alone where nothing is sampled."""
    if any(arm.videos is None for arm in arms):
        return digest_base_model(backbone)
    return {"vae": model_digest(backbone.weight_files()["vae"])}


def rows_of(cfg: config.AnyConfig, args: argparse.Namespace, processes: Processes) -> list[data.Row]:
    """The rows of the table, as far as the headers of their files tell. DataError and ValueError for what is wrong."""
    rows = data.load_metadata(args.data, "--data")
    if alone := [row.line for row in rows if row.video is None]:
        raise ValueError(f"--data: line {alone[0]} of {args.data} names no video, and real clips are what is compared")
    looks = [data.look_at(row, cfg.data.num_frames, cfg.data.fps) for row in rows]
    problems = [(row.line, one) for row, look in zip(rows, looks, strict=True) for one in look.problems]
    good, bad = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    if processes.main:
        for line in (*(f"note: {note}" for note in data.notes(rows)), *(f"skipped: {line}" for line in bad)):
            print(printable(line))
    return good


def settings_of(
    cfg: config.AnyConfig,
    rows: Sequence[data.Row],
    arms: Sequence[Arm],
    base: Mapping[str, str],
    judges: Mapping[str, str],
) -> Settings:
    """All that the records depend on, in words that may be compared. base: the model's parts, by digests."""
    files = {row.id: model_digest([path for path in row.files.values() if path]) for row in rows}
    sampling = {key: value for key, value in config.flat(cfg).items() if key.startswith(SAMPLING)}
    return {
        "records": {"format": str(FORMAT)},
        "data": {"--data": cache.digest({"files": files})[:16]},
        "sampling": sampling,
        "model": base,
        "judges": judges,
        "adapters": {arm.name: model_digest([arm.adapter])[:16] for arm in arms if arm.adapter is not None},
        "videos": {arm.name: model_digest([arm.videos])[:16] for arm in arms if arm.videos is not None},
    }


def inputs_of(args: argparse.Namespace, arms: Sequence[Arm]) -> Iterator[Path]:
    """Yield all inputs: files, and folders that hold nothing else."""
    yield Path(args.config) if args.config else args.run / "run.json"
    yield from args.judge.values()
    yield Path(args.data)
    for row in data.load_metadata(args.data, "--data"):
        yield from (Path(path) for path in row.files.values() if path)
    yield from (path for arm in arms for path in (arm.adapter, arm.videos) if path)


def take(folder: output.Folder, names: Sequence[str], settings: Settings, force: bool, lock: ExitStack) -> None:
    """Hold the folder and list the names that are going to be written there. force: remove an earlier evaluation.

    Raise Refused for a file in their way, and for records of other settings.
    """
    folder.check([*names, *REPORTS, SETTINGS])
    lock.enter_context(folder.locked())
    if force:
        folder.remove(folder.listed())
    merged = agree(folder.path, settings)
    folder.claim([*names, SETTINGS])
    atomic_write(folder.path / SETTINGS, json.dumps(merged, indent=2) + "\n")


def judge_image_model(
    cfg: config.AnyConfig,
    arms: Sequence[Arm],
    args: argparse.Namespace,
    folder: output.Folder,
    processes: Processes,
    lock: ExitStack,
) -> int:
    """An image model's one adapter. ValueError for options that are for videos alone."""
    if given := [f"--{name}" for name in MANY if getattr(args, name) not in (None, [], {}, ["ours"])]:
        raise ValueError(f"{given[0]}: is for videos, and data.num_frames is 1; remove it")
    if len(arms) > 2 or processes.count > 1:
        raise ValueError("--adapter: images are judged by one process, before and after one adapter; name one")
    lock.enter_context(folder.locked())
    return judge_images.run(cfg, arms[-1], args, folder)


def finish(study: Study, rows: Sequence[data.Row], settings: Settings, reading: Reading) -> None:
    """Write the report, draw and print."""
    out, records = study.out, study.join(rows)
    report = summarise(records, study.arms, reading)
    plain = {block: dict(values) for block, values in settings.items()}
    report |= {"command": sys.argv, "version": __version__, "settings": plain}
    atomic_write(out / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    shown = [row.index for row in rows[:PEOPLE]]
    pictures = draw_pictures(report, out, study.arms, records, shown)
    atomic_write(out / "report.html", report_page(report, out))
    print(format_report(report))
    print(f"\nreport: {out / 'report.html'}, {out / 'report.json'}")
    print(f"pictures: {', '.join(map(str, pictures))}\nvideos: {out / 'videos'}")
