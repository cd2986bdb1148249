"""Records of a running evaluation: one JSON line per judged video, and the settings they depend on.

A line has these keys. The real clip has arm `real`, seed null, and also face_width in pixels. Arm `vae` is the real
clip encoded and decoded by the model's VAE: seed null, with embedding and pool by recogniser (`judging.judge_video`
with keep_vectors).

    row, line, index   the row of the table: its id, its line, its position
    person             column `person`, else the row's id
    arm, seed, steps   how the video was sampled; steps 0 for another tool's video
    decoded            whether its pixels went through a video codec
    file               the video: relative to the evaluation's folder, absolute where it is elsewhere
    figures            {name: number, null where there was nothing to measure}; a name is block/figure
    curves             {recogniser: FaceSim of frames 1 .. F - 1}
    detected           {recogniser: whether its detector found the face, frames 0 .. F - 1}

Each process appends to its own file; the main process joins them at the end.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rewardfl.files import atomic_write, open_to_append
from rewardfl.weights.shards import InputError

Record = dict[str, Any]

RecordKey = tuple[str, str, int | None]  # row id, arm, seed

Settings = Mapping[str, Mapping[str, str]]  # block -> name -> value

REAL, VAE = "real", "vae"

FORMAT = 6  # raise it when a figure is added or computed in another way: such records must not be compared

FILE, SETTINGS = "records.jsonl", "settings.json"

GROWING = ("model", "adapters", "videos")  # blocks of the settings that may gain and lose names

WAY_OUT = "give --out another folder, or --overwrite to remove that evaluation"

FACE = ("face_sim", "coverage", "speed", "nonrigid")  # the figures of a recogniser

KEYS = {"row", "line", "index", "person", "arm", "seed", "steps", "decoded", "file", "figures", "curves", "detected"}


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in a text; empty for any other text."""
    with suppress(ValueError, RecursionError):
        return value if isinstance(value := json.loads(text), dict) else {}
    return {}


def record_file(out: Path, rank: int) -> Path:
    """Return the file to which the process of this rank appends."""
    return out / FILE if rank == 0 else out / f"records-{rank}.jsonl"


def read_records(out: Path) -> dict[RecordKey, Record]:
    """Return all records of the folder, without truncated lines. Raise InputError for another line."""
    records: dict[RecordKey, Record] = {}
    for path in _files(out):
        *lines, _ = path.read_bytes().split(b"\n")  # the last is empty or truncated
        for i, text in enumerate(lines, 1):
            record = parse_object(text)
            if KEYS - record.keys():
                raise InputError(f"{path}: line {i} is not a record; {WAY_OUT}")
            records[record["row"], record["arm"], record["seed"]] = record
    return records


class Writer:
    """Appends complete records to the file of a process, which it first writes again without a truncated line."""

    def __init__(self, out: Path, rank: int):
        self.path = record_file(out, rank)
        content = self.path.read_bytes() if self.path.is_file() else b""
        atomic_write(self.path, content[: content.rfind(b"\n") + 1])

    def add(self, record: Record) -> None:
        with open_to_append(self.path, buffering=0) as file:  # one system call: a kill leaves a full line or nothing
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def join_records(out: Path) -> list[Record]:
    """Write all records, sorted, to one file, as one process would have, remove the other files, return them."""
    first = {REAL: 0, VAE: 1}
    records = list(read_records(out).values())
    records.sort(key=lambda line: (line["index"], first.get(line["arm"], 2), line["arm"], line["seed"] or 0))
    atomic_write(out / FILE, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    for path in _files(out):
        if path.name != FILE:
            path.unlink()
    return records


def _files(out: Path) -> list[Path]:
    return [path for path in (out / FILE, *sorted(out.glob("records-[0-9]*.jsonl"))) if path.is_file()]


def merge_settings(out: Path, settings: Settings) -> Settings:
    """Merge settings into the folder's; GROWING blocks may gain names. Raise InputError if any other block differs."""
    path = out / SETTINGS
    old: Settings = parse_object(path.read_bytes()) if path.is_file() else {}
    if not old and _files(out):
        raise InputError(f"{out} holds records, and no {SETTINGS} that says of what; {WAY_OUT}")
    if old and (problem := describe_difference(old, settings)):
        raise InputError(f"{out} holds records of other settings: {problem}; {WAY_OUT}")
    return {block: {**old.get(block, {}), **values} for block, values in settings.items()}


def describe_difference(old: Settings, new: Settings) -> str:
    """Describe the first setting that differs; empty where none does."""
    for block in dict.fromkeys((*old, *new)):
        was, now = old.get(block, {}), new.get(block, {})
        for name in dict.fromkeys((*was, *now)):
            if was.get(name) != now.get(name) and (block not in GROWING or (name in was and name in now)):
                return f"{block}: {name} was {was.get(name, 'not there')}, and is {now.get(name, 'not there')}"
    return ""
