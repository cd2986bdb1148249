"""A grid of runs and their front: the work of tools/sweep.py."""

import argparse
import csv
import io
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import yaml
from matplotlib import pyplot as plt

from rewardfl import config as configuration
from rewardfl import data
from rewardfl.config import AnyConfig
from rewardfl.files import atomic_write, printable
from rewardfl.run.checkpoint import FREE_KEYS

JUDGED, FAILED, REFUSED, STOPPED = 0, 1, 2, 130  # exit codes
FIGURES = ("gain", "flow", "face_flow", "pixel_change", "sharpness", "speed", "nonrigid", "reversals")
LABELS = {
    "gain": "FaceSim gain", "flow": "flow", "face_flow": "face flow", "pixel_change": "pixel change",
    "sharpness": "sharpness", "speed": "landmark speed", "nonrigid": "non-rigid", "reversals": "reversals",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Settings of the grid, under a name that is also a folder's."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A point with one seed: its folder, its whole configuration, and the overrides that give it."""

    point: Point
    seed: int
    folder: Path
    cfg: AnyConfig
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """What evaluate says of one quantity, with its 95 % interval over people; over several seeds the means of these."""

    mean: float
    low: float
    high: float


PARTS = ("mean", "low", "high")
NOTHING = Figure(math.nan, math.nan, math.nan)  # where no clip could be measured


@dataclass(frozen=True)
class Result:
    """A point's figures, means over its judged seeds, and the worst seed's of each: the highest of reversals."""

    point: Point
    seeds: tuple[int, ...]
    mean: dict[str, Figure]
    worst: dict[str, float]


def run(args: argparse.Namespace) -> int:
    """Train, judge, draw: the exit code."""
    try:
        points = product(read_points(args.points), [grid_values(text) for text in args.grid])
        runs = plan(args, points)
        data.load_metadata(args.data)
    except (configuration.ConfigError, data.DataError, ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return REFUSED
    launch = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(args.launch)]
    if args.dry_run:
        for one in runs:
            print(shlex.join(training(one, launch, args.config)))
        return JUDGED
    work = partial(train_and_judge, launch=launch, config=args.config, table=args.data, noises=args.noises)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(work, one) for one in runs]
        try:
            judged = [future.result() for future in futures]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # the runs have had the same signal and save themselves
            print("stopped; the same command goes on from there", file=sys.stderr)
            return STOPPED
    done = [one for one, whole in zip(runs, judged, strict=True) if whole]
    of_point = {point: {one.seed: read_figures(one.folder) for one in done if one.point == point} for point in points}
    results = [combined(point, by_seed) for point, by_seed in of_point.items() if by_seed]
    if results:
        write_front(results, args.motion, args.out)
    return JUDGED if all(judged) else FAILED


# --------------------------------------------------------------------------------------------------------------------
# What is to be run


def grid_values(text: str) -> list[Point]:
    """The points of KEY=VALUE,VALUE; commas in brackets belong to a value. ValueError for anything else."""
    key, _, values = text.partition("=")
    depth, pieces = 0, [""]
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    pieces = [piece.strip() for piece in pieces]
    if not re.fullmatch(r"\w+\.\w+", key) or depth != 0 or not all(pieces):
        raise ValueError(f"--grid {text!r} must have the form section.key=value,value,...")
    return [Point(f"{key.partition('.')[2]}={piece}", (f"{key}={piece}",)) for piece in pieces]


def read_points(path: Path | None) -> list[Point]:
    """The points that a YAML file lists; without one a single point without settings."""
    if path is None:
        return [Point("", ())]
    try:
        listed = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--points: {path} is not valid YAML: {' '.join(str(error).split())}") from None
    for one in listed if isinstance(listed, list) and listed else [None]:
        whole = isinstance(one, dict) and one.keys() == {"name", "overrides"} and isinstance(one["overrides"], list)
        if not whole or not isinstance(one["name"], str) or not all(isinstance(text, str) for text in one["overrides"]):
            raise ValueError(
                f"--points: {path} must be a list of {{name: text, overrides: [section.key=value, ...]}}, got {one!r}"
            )
    return [Point(one["name"], tuple(one["overrides"])) for one in listed]


def product(points: Sequence[Point], grids: Sequence[Sequence[Point]]) -> list[Point]:
    """Every point with every value of every grid. ValueError where two would have one folder."""
    found = []
    for parts in itertools.product(points, *grids):
        name = ",".join(part.name for part in parts if part.name) or "base"
        folder = re.sub(r"[^\w.,=+-]+", "_", name)[:150]
        found.append(Point(folder, tuple(itertools.chain.from_iterable(part.overrides for part in parts))))
    names = [point.name for point in found]
    if twice := sorted({name for name in names if names.count(name) > 1 or name in ("cache", ".", "..")}):
        raise ValueError(f"--grid, --points: the name {twice[0]!r} is given twice or is no folder's; choose another")
    return found


def plan(args: argparse.Namespace, points: Sequence[Point]) -> list[Run]:
    """The runs of all points, seed by seed, each with a configuration that is checked."""
    try:
        seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else [None]
    except ValueError:
        raise ValueError(f"--seeds {args.seeds!r} must be whole numbers, such as 42,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {args.seeds!r} names a seed twice")
    return [_run(args, point, seed) for seed in seeds for point in points]


def _run(args: argparse.Namespace, point: Point, seed: int | None) -> Run:
    overrides = [*args.overrides, *point.overrides]
    cfg = configuration.load(args.config, overrides)
    seed = cfg.run.seed if seed is None else seed
    folder = args.out / point.name / f"seed{seed}"
    overrides += [f"run.seed={seed}", f"run.output_dir={json.dumps(str(folder))}"]
    if cfg.data.cache_dir is None:  # what is computed of the clips is the same for all
        overrides.append(f"data.cache_dir={json.dumps(str(args.out / 'cache'))}")
    cfg = configuration.load(args.config, overrides)
    if cfg.reward.reward_model_path is None and cfg.reward.held_out_model_path is None:
        raise ValueError("reward.held_out_model_path names no face pack, and runs are judged by faces; name one")
    if not Path(cfg.script).is_file():
        raise ValueError(f"{cfg.script} is not here; call this in the folder that holds it")
    if changed := [key for key in _differing(folder, cfg) if key not in FREE_KEYS]:
        raise ValueError(f"{folder} holds a run of another {', '.join(changed)}; set it back, or give another --out")
    return Run(point, seed, folder, cfg, tuple(overrides))


def _differing(folder: Path, cfg: AnyConfig) -> list[str]:
    """The keys in which the run in the folder, if there is one, is not of this configuration."""
    path = folder / "run.json"
    if not path.is_file():
        return []
    old, new = json.loads(path.read_text())["config"], configuration.to_dict(cfg)
    keys = [
        (section, key) for section in old.keys() | new.keys() for key in old.get(section, {}) | new.get(section, {})
    ]
    return sorted(f"{s}.{k}" for s, k in keys if old.get(s, {}).get(k) != new.get(s, {}).get(k))


# --------------------------------------------------------------------------------------------------------------------
# Training and judging


def training(one: Run, launch: Sequence[str], config: str) -> list[str]:
    """The command that trains a run, or goes on with it."""
    return [*launch, one.cfg.script, "--config", config, *one.overrides]


def train_and_judge(one: Run, launch: Sequence[str], config: str, table: str, noises: int) -> bool:
    """Whether the run is trained and judged in the end; what it says is in the log beside its folder."""
    judging = ["--run", str(one.folder), "--data", table, "--seeds", str(noises)]
    if not _differing(one.folder, one.cfg) and _report(one.folder).get("command", [""])[1:] == judging:
        print(f"{one.folder}: is judged already", flush=True)
        return True
    log = one.folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(one.folder / "evaluation", ignore_errors=True)  # of other settings
    commands = {"training": training(one, launch, config),
                "judging": [sys.executable, "-m", "rewardfl_tools.evaluate", *judging]}  # fmt: skip
    with log.open("a") as out:
        for what, command in commands.items():
            print(f"{one.folder}: {what}", flush=True)
            print(f"$ {shlex.join(command)}", file=out, flush=True)
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
            if code != 0:
                print(printable(f"{one.folder}: {what} has failed (exit code {code}): {log}"), file=sys.stderr)
                return False
    return True


def _report(folder: Path) -> dict:
    path = folder / "evaluation" / "report.json"
    return json.loads(path.read_text()) if path.is_file() else {}


# --------------------------------------------------------------------------------------------------------------------
# The front


def read_figures(folder: Path) -> dict[str, Figure]:
    """Evaluate's report: the gain, and after over before of each motion and of sharpness, by the held-out judge.

    Without one, by the reward's own recogniser. reversals is after minus before, and has no interval.
    """
    report = _report(folder)
    judges, motion = report["recognisers"], report["motion"]
    judge = judges.get("held_out") or next(iter(judges.values()))
    found = {"gain": judge["gain"]["relative"], **motion["after_to_before"], **judge["motion_after_to_before"]}
    turns = [motion["reversals"][arm] for arm in ("before", "after")]
    found["reversals"] = None if None in turns else {"mean": turns[1] - turns[0], "low": math.nan, "high": math.nan}
    return {key: Figure(*(found[key][part] for part in PARTS)) if found[key] else NOTHING for key in FIGURES}


def combined(point: Point, by_seed: dict[int, dict[str, Figure]]) -> Result:
    """Means over the seeds, of the interval's ends too: the people are the same, so seeds do not narrow it."""

    def mean(key: str, part: str) -> float:
        return sum(getattr(figures[key], part) for figures in by_seed.values()) / len(by_seed)

    means = {key: Figure(*(mean(key, part) for part in PARTS)) for key in FIGURES}
    worst = {}
    for key in FIGURES:
        values = [figures[key].mean for figures in by_seed.values()]
        extreme = max(values) if key == "reversals" else min(values)
        worst[key] = math.nan if any(map(math.isnan, values)) else extreme
    return Result(point, tuple(by_seed), means, worst)


def front(places: Sequence[tuple[float, float]]) -> list[int]:
    """Which of (gain, motion) no other one beats, by rising gain.

    One is beaten by what has at least as much of both and more of one. More motion than before is worth no more: it may
    be trembling. A place with a NaN is on no front.
    """
    worth = [(gain, min(motion, 1.0)) for gain, motion in places]
    known = [i for i, place in enumerate(worth) if not any(map(math.isnan, place))]

    def beaten(i: int) -> bool:
        return any(worth[j] != worth[i] and all(a >= b for a, b in zip(worth[j], worth[i], strict=True)) for j in known)

    return sorted((i for i in known if not beaten(i)), key=lambda i: worth[i])


def write_front(results: Sequence[Result], motion: str, out: Path) -> None:
    """front.csv, front.md and front.png; prints the table."""
    best = front([(result.mean["gain"].mean, result.mean[motion].mean) for result in results])
    text = table(results, best)
    atomic_write(out / "front.md", text)
    atomic_write(out / "front.csv", csv_text(results, best))
    draw(results, best, motion, out / "front.png")
    print(f"\n{text}\n{out / 'front.csv'}\n{out / 'front.png'}")


def table(results: Sequence[Result], best: Sequence[int]) -> str:
    """A Markdown table: means over the seeds, in brackets the worst seed's; bold what no other point beats."""
    lines = [f"| settings | seeds | {' | '.join(LABELS[key] for key in FIGURES)} |", "|---" * (2 + len(FIGURES)) + "|"]
    for i, result in enumerate(results):
        cells = []
        for key in FIGURES:
            scale, shape = (100, "{:+.1f} %") if key == "gain" else (1, "{:+.3f}" if key == "reversals" else "{:.3f}")
            shown, worst = shape.format(scale * result.mean[key].mean), shape.format(scale * result.worst[key])
            cells.append(shown if len(result.seeds) == 1 else f"{shown} ({worst})")
        name = f"**{result.point.name}**" if i in best else result.point.name
        lines.append(f"| {name} | {', '.join(map(str, result.seeds))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def csv_text(results: Sequence[Result], best: Sequence[int]) -> str:
    """A line per point: mean, low, high and worst of every figure, whether it is on the front, and its overrides."""
    parts = (*PARTS, "worst")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "seeds", "front", *(f"{key}_{part}" for key in FIGURES for part in parts), "overrides"])
    for i, result in enumerate(results):
        figures = [
            f"{value:.5f}" for key in FIGURES
            for value in (*vars(result.mean[key]).values(), result.worst[key])
        ]  # fmt: skip
        seeds = " ".join(map(str, result.seeds))
        writer.writerow([result.point.name, seeds, int(i in best), *figures, " ".join(result.point.overrides)])
    return text.getvalue()


def draw(results: Sequence[Result], best: Sequence[int], motion: str, path: Path) -> None:
    """Gain against motion with 95 % intervals over people; the front as a line."""
    figure, axis = plt.subplots(figsize=(9, 6))
    for i, result in enumerate(results):
        x, y = result.mean["gain"], result.mean[motion]
        reach = [[[abs(one.mean - one.low)], [abs(one.high - one.mean)]] for one in (x, y)]
        colour = "tab:blue" if i in best else "tab:grey"
        axis.errorbar(x.mean, y.mean, reach[1], reach[0], marker="o", color=colour, elinewidth=0.7, alpha=0.9)
        axis.annotate(result.point.name, (x.mean, y.mean), textcoords="offset points", xytext=(5, 5), fontsize=7)
    line = [(results[i].mean["gain"].mean, results[i].mean[motion].mean) for i in best]
    axis.plot([x for x, _ in line], [y for _, y in line], color="tab:blue", linewidth=1.2)
    axis.axhline(1, color="black", linestyle=":", linewidth=0.8)
    axis.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    axis.set(xlabel="FaceSim gain by the judge", ylabel=f"{LABELS[motion]}, after / before")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
