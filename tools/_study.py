"""The work of an evaluation: a video is judged when it is made, leaves a line and a file, and is forgotten.

Real clips come first: their rows' videos are compared with what is kept of them. Whatever has a record is passed over,
so that a command that was stopped goes on. Several processes take turns at the real clips and at the batches.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import config, data
from rewardfl.backbones import seam
from rewardfl.backbones.seam import Backbone, Conditioning
from rewardfl.data import cache
from rewardfl.data.cache import Cache
from rewardfl.files import printable
from rewardfl.run import prepare, start
from rewardfl_tools import _arms, _evaluate_pictures, _records
from rewardfl_tools._arms import Arm, Job
from rewardfl_tools._judging import Judges, judge_real, judge_video
from rewardfl_tools._processes import Processes
from rewardfl_tools._records import REAL, Key, Record


@dataclass(frozen=True)
class Study:
    """An evaluation under way. files: of the videos of other tools, by arm and (row id, number of the noise)."""

    cfg: config.AnyConfig
    out: Path
    arms: tuple[Arm, ...]
    judges: Judges
    processes: Processes
    files: Mapping[str, Mapping[tuple[str, int], Path]]

    @cached_property
    def records(self) -> dict[Key, Record]:
        """What was known when this process came; its own later ones are not among these."""
        return _records.read(self.out)

    @cached_property
    def writer(self) -> _records.Writer:
        return _records.open_own(self.out, self.processes.rank)

    @cached_property
    def store(self) -> Cache:
        """What videos are compared with, and what the model is told, by row: until the evaluation is done."""
        return Cache(self.out / "prepared")

    def jobs(self, arm: Arm, rows: Sequence[data.Row], seeds: int) -> list[Job]:
        """The videos of an arm: of one that is sampled all noises, of another tool's what it has made."""
        if arm.videos is None:
            return [(row, seed) for seed in range(seeds) for row in rows]
        return [(row, seed) for row in rows for of_row, seed in sorted(self.files[arm.name]) if of_row == row.id]

    def lacks(self, arm: Arm, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs that no record tells of."""
        return [(row, seed) for row, seed in jobs if (row.id, arm.name, seed) not in self.records]

    def read_real(self, rows: Sequence[data.Row], seeds: int) -> list[data.Row]:
        """Judge the real clips, one at a time, and keep what their videos are compared with: the rows with a face.

        DataError for clips that cannot be read, unless data.skip_bad_rows: then they are said.
        """
        needed = {row.id for arm in self.arms for row, _ in self.lacks(arm, self.jobs(arm, rows, seeds))}
        todo = [
            row
            for row in rows
            if (row.id, REAL, None) not in self.records
            or (row.id in needed and not self.store.path(compared_with(row)).is_file())
        ]
        broken, faceless = [], []
        share = self.processes.share
        for row in tqdm(share.of(todo), desc="real clips", disable=share.quiet):
            try:
                problem = self._read_real(row)
            except data.DataError as error:
                broken.append((row.line, str(error)))
                continue
            faceless += [(row.line, problem)] * bool(problem)
        broken, faceless = self.processes.gather(broken), sorted(self.processes.gather(faceless))
        good, bad = data.usable_rows(rows, broken, self.cfg.data.skip_bad_rows)
        hidden = {line for line, _ in faceless}
        for line in (*bad, *(f"line {line}: {problem}" for line, problem in faceless)) if self.processes.main else ():
            print(printable(f"skipped: {line}"))
        if not (usable := [row for row in good if row.line not in hidden]):
            raise ValueError(f"--data: no clip of {self.cfg.data.file_name} shows a face")
        return usable

    def _read_real(self, row: data.Row) -> str:
        """Judge a row's real clip: why it is of no use, else empty."""
        example = start.example_of(self.cfg, row)
        fps = self.cfg.data.fps or data.frame_rate(row.video)
        real = judge_real(self.judges, row, example, fps)
        if isinstance(real, str):
            return real
        self.store.put(compared_with(row), real.kept | {"image": example.image})
        if (row.id, REAL, None) not in self.records:
            self._keep(row, REAL, None, example.video, fps)
            name = {"arm": REAL, "seed": None, "steps": 0, "decoded": True, "file": str(file_of(row, REAL, None))}
            self.writer.add(head(row) | name | real.record)
        return ""

    def _keep(self, row: data.Row, arm: str, seed: int | None, video: Tensor, fps: float) -> None:
        """Write the video (3, F, H, W), to look at, and of a person's first one what the grid may show."""
        path = self.out / file_of(row, arm, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_video(path, video, fps)
        if not seed:
            _evaluate_pictures.write_strip(_evaluate_pictures.strip_file(self.out, row.index, arm), video)

    def sample(self, backbone: Backbone | None, rows: Sequence[data.Row], args: argparse.Namespace) -> None:
        """Sample and judge what no record tells of; the model is loaded once for each adapter, if at all."""
        waiting = [(arm, self.jobs(arm, rows, args.seeds)) for arm in self.arms if arm.videos is None]
        waiting = [(arm, jobs) for arm, jobs in waiting if self.lacks(arm, jobs)]
        if not waiting:
            return
        device, share = torch.device(args.device), self.processes.share
        self._tell(backbone, sorted({job[0] for _, jobs in waiting for job in jobs}, key=lambda row: row.index), device)
        sizes = {row: tuple(record["size"]) for (row, arm, _), record in _records.read(self.out).items() if arm == REAL}
        adapters = list(dict.fromkeys(arm.adapter for arm, _ in waiting if arm.adapter is not None)) or [None]
        progress = tqdm(total=len(waiting) * len(waiting[0][1]), desc="evaluating", disable=share.quiet)
        for adapter in adapters:
            model, decoder = _arms.load_model(backbone, adapter, args.experts, device)
            sampler = _arms.Sampler(self.cfg, backbone, model, decoder, self._told, sizes, device)
            for arm, jobs in waiting:
                if arm.adapter == adapter or (arm.adapter is None and adapter == adapters[0]):
                    for batch in share.of(_arms.batches(jobs, sizes, args.batch)):
                        self._sample(sampler, arm, batch)
                        progress.update(len(batch) * share.processes)
            del model, decoder, sampler  # before the next one is loaded
        progress.close()

    @torch.no_grad()
    def _tell(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Encode what the model is told of the rows, where that is not kept yet: this process's share, and all wait."""
        rows = [row for row in rows if not self.store.path(told_of(row.id)).is_file()]
        if mine := self.processes.share.of(rows):
            asked = ((row, prepare.read(self.store, compared_with(row))["image"]) for row in mine)
            for row_id, conditioning in _arms.encoded(self.cfg, backbone, asked, device):
                self.store.put(told_of(row_id), conditioning)
        self.processes.wait()

    def _told(self, row_id: str) -> Conditioning:
        return seam.to(prepare.read(self.store, told_of(row_id)), self.judges.device)

    @torch.no_grad()
    def _sample(self, sampler: _arms.Sampler, arm: Arm, batch: Sequence[Job]) -> None:
        """A batch of an arm, unless all is known. One that was cut off is sampled whole: bits depend on its size."""
        wanted = self.lacks(arm, batch)
        if not wanted:
            return
        for (row, seed), video in zip(batch, sampler.sample(batch, arm), strict=True):
            if (row, seed) in wanted:
                fps = self.cfg.data.fps or data.frame_rate(row.video)
                self._keep(row, arm.name, seed, video, fps)
                self._judge(row, arm, seed, video, fps, str(file_of(row, arm.name, seed)))

    def judge_files(self, rows: Sequence[data.Row]) -> None:
        """Judge the videos of other tools, at the real clip's size and number of frames, one at a time."""
        for arm in self.arms:
            jobs = self.lacks(arm, self.jobs(arm, rows, 0)) if arm.videos is not None else []
            for row, seed in tqdm(self.processes.share.of(jobs), desc=arm.name, disable=self.processes.share.quiet):
                path = self.files[arm.name][row.id, seed]
                frames = data.read_clip(
                    path, self.cfg.data.height, self.cfg.data.width, self.cfg.data.num_frames, self.cfg.data.max_pixels,
                    self.cfg.data.fps,
                )  # fmt: skip
                size = prepare.read(self.store, compared_with(row))["image"].shape[1:]
                video = data.to_float(data.fit(frames, *size))
                if not seed:
                    strip = _evaluate_pictures.strip_file(self.out, row.index, arm.name)
                    _evaluate_pictures.write_strip(strip, video)
                fps = self.cfg.data.fps or data.frame_rate(path)
                self._judge(row, arm, seed, video.to(self.judges.device), fps, str(path.absolute()))

    def _judge(self, row: data.Row, arm: Arm, seed: int, video: Tensor, fps: float, file: str) -> None:
        """Judge a video (3, F, H, W) in [-1, 1] and write its record."""
        kept = prepare.read(self.store, compared_with(row))
        made = {"arm": arm.name, "seed": seed, "steps": arm.steps, "decoded": arm.videos is not None, "file": file}
        self.writer.add(head(row) | made | judge_video(self.judges, video, kept, fps))


def head(row: data.Row) -> dict:
    """The beginning of each record of a row."""
    return {"row": row.id, "line": row.line, "index": row.index}


def file_of(row: data.Row, arm: str, seed: int | None) -> Path:
    """Where a video is written, below the evaluation's folder, named as --videos takes it."""
    return Path("videos") / arm / (f"{row.index:03d}.mp4" if seed is None else f"{row.index:03d}_seed{seed}.mp4")


def compared_with(row: data.Row) -> cache.Key:
    return {"kind": "compared_with", "row": row.id}


def told_of(row_id: str) -> cache.Key:
    return {"kind": "told", "row": row_id}
