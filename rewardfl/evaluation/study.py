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
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning
from rewardfl.data import cache
from rewardfl.data.cache import Cache
from rewardfl.evaluation import video_files
from rewardfl.evaluation.arms import NEGATIVE, Arm, Job, Sampler, batches, encode_inputs, load_model
from rewardfl.evaluation.judging import FACE, Judges, judge_real, judge_through_vae, judge_video
from rewardfl.evaluation.processes import Processes
from rewardfl.evaluation.records import REAL, VAE, WAY_OUT, Key, Record, Writer, join, key_of, read_records
from rewardfl.files import printable
from rewardfl.training import clip_scan
from rewardfl.training.shard import read_entry


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
        return read_records(self.out)

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.out, self.processes.rank)

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

    def read_real(self, rows: Sequence[data.Row], seeds: int, through_vae: bool) -> list[data.Row]:
        """Judge the real clips, one at a time, and keep what their videos are compared with: the rows with a face.

        through_vae: whether they are going to be compared with themselves through the VAE, too.
        DataError for clips that cannot be read, unless data.skip_bad_rows: then they are said.
        """
        jobs = [(arm, self.jobs(arm, rows, seeds)) for arm in self.arms]
        # of an arm that lacks one video all rows: batches are sampled whole
        needed = {row.id for arm, of_arm in jobs if self.lacks(arm, of_arm) for row, _ in of_arm}
        needed |= {row.id for row in rows if through_vae and (row.id, VAE, None) not in self.records}
        share = self.processes.share
        todo = [
            row
            for row in share.take(rows)
            if (row.id, REAL, None) not in self.records
            or (row.id in needed and self.store.get(comparison_key(row)) is None)
        ]
        broken, faceless = [], []
        with tqdm(todo, desc="real clips", disable=share.quiet) as bar:
            for row in bar:
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
        example = clip_scan.load_sized_example(self.cfg, row)
        fps = self.cfg.data.fps or data.frame_rate(row.video)
        real = judge_real(self.judges, row, example, fps)
        if isinstance(real, str):
            return real
        record, kept = real
        self.store.put(comparison_key(row), kept | {"image": example.image})
        if (row.id, REAL, None) not in self.records:
            self._keep(row, REAL, None, example.video, fps)
            name = {"arm": REAL, "seed": None, "steps": 0, "decoded": True, "file": str(video_file(row, REAL, None))}
            self.writer.add(head(row) | name | record)
        return ""

    def _keep(self, row: data.Row, arm: str, seed: int | None, video: Tensor, fps: float) -> None:
        """Write the video (3, F, H, W), to look at, and of a person's first one what the grid may show."""
        path = self.out / video_file(row, arm, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_video(path, video, fps)
        if not seed:
            video_files.write_strip(video_files.strip_file(self.out, row.index, arm), video)

    @torch.no_grad()
    def judge_through_vae(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Judge the real clips that the model's VAE has encoded and decoded: the upper end of identity kept."""
        share = self.processes.share
        missing = [row for row in share.take(rows) if (row.id, VAE, None) not in self.records]
        if not missing:
            return
        encode_video, encode_image = backbone.video_encoder(device), backbone.image_encoder(device)
        decoder = backbone.load_decoder(device)
        for row in tqdm(missing, desc="through the VAE", disable=share.quiet):
            example = clip_scan.load_sized_example(self.cfg, row)
            conditioning = encode_image(example.image, self.cfg.data.num_frames)
            video = decoder.decode(encode_video(example.video[None]), conditioning)[0].float()
            fps = self.cfg.data.fps or data.frame_rate(row.video)
            self._keep(row, VAE, None, video, fps)
            record = judge_through_vae(self.judges, video, read_entry(self.store, comparison_key(row)), fps)
            name = {"arm": VAE, "seed": None, "steps": 0, "decoded": False, "file": str(video_file(row, VAE, None))}
            self.writer.add(head(row) | name | record)

    def sample(self, backbone: Backbone | None, rows: Sequence[data.Row], args: argparse.Namespace) -> None:
        """Sample and judge what no record tells of; the model is loaded once for each adapter, if at all."""
        waiting = [(arm, self.jobs(arm, rows, args.seeds)) for arm in self.arms if arm.videos is None]
        waiting = [(arm, jobs) for arm, jobs in waiting if self.lacks(arm, jobs)]
        if not waiting:
            return
        device, share = torch.device(args.device), self.processes.share
        self._tell(backbone, sorted({job[0] for _, jobs in waiting for job in jobs}, key=lambda row: row.index), device)
        sizes = {row: tuple(record["size"]) for (row, arm, _), record in read_records(self.out).items() if arm == REAL}
        adapters = list(dict.fromkeys(arm.adapter for arm, _ in waiting if arm.adapter is not None)) or [None]
        tasks = [(arm, batch) for arm, jobs in waiting for batch in share.take(batches(jobs, sizes, args.batch))]
        total = len(waiting) * len(waiting[0][1])
        with tqdm(total=total, desc="evaluating", disable=share.quiet) as bar:
            for adapter in adapters:
                model, decoder = load_model(backbone, adapter, args.experts, device)
                sampler = Sampler(self.cfg, backbone, model, decoder, self._told, sizes, device)
                for arm, batch in tasks:
                    if (arm.adapter or adapters[0]) == adapter:  # the base comes with the first
                        self._sample(sampler, arm, batch)
                        bar.update(len(batch) * share.processes)
                del model, decoder, sampler  # before the next one is loaded

    @torch.no_grad()
    def _tell(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Encode what the model is told of the rows, where that is not kept yet: this process's share, and all wait."""
        # shared out before looking: another process may have written while this one comes
        if missing := [row for row in self.processes.share.take(rows) if self.store.get(prompt_key(row.id)) is None]:
            asked = ((row, read_entry(self.store, comparison_key(row))["image"]) for row in missing)
            for row_id, conditioning in encode_inputs(self.cfg, backbone, asked, device):
                self.store.put(prompt_key(row_id), conditioning)
        self.processes.wait()

    def _told(self, row_id: str) -> Conditioning:
        return protocol.move_to(read_entry(self.store, prompt_key(row_id)), self.judges.device)

    @torch.no_grad()
    def _sample(self, sampler: Sampler, arm: Arm, batch: Sequence[Job]) -> None:
        """A batch of an arm, unless all is known. One that was cut off is sampled whole: bits depend on its size."""
        wanted = self.lacks(arm, batch)
        if not wanted:
            return
        for (row, seed), video in zip(batch, sampler.sample(batch, arm), strict=True):
            if (row, seed) in wanted:
                fps = self.cfg.data.fps or data.frame_rate(row.video)
                self._keep(row, arm.name, seed, video, fps)
                self._judge(row, arm, seed, video, fps, str(video_file(row, arm.name, seed)))

    def judge_files(self, rows: Sequence[data.Row]) -> None:
        """Judge the videos of other tools, at the real clip's size and number of frames, one at a time."""
        for arm in self.arms:
            jobs = self.lacks(arm, self.jobs(arm, rows, 0)) if arm.videos is not None else []
            share = self.processes.share
            with tqdm(share.take(jobs), desc=arm.name, disable=share.quiet) as bar:
                for row, seed in bar:
                    self._judge_file(row, arm, seed)

    def _judge_file(self, row: data.Row, arm: Arm, seed: int) -> None:
        path, settings = self.files[arm.name][row.id, seed], self.cfg.data
        frames = data.read_clip(
            path, settings.height, settings.width, settings.num_frames, settings.max_pixels, settings.fps
        )
        size = read_entry(self.store, comparison_key(row))["image"].shape[1:]
        video = data.to_float(data.fit(frames, *size))
        if not seed:
            video_files.write_strip(video_files.strip_file(self.out, row.index, arm.name), video)
        fps = settings.fps or data.frame_rate(path)
        self._judge(row, arm, seed, video.to(self.judges.device), fps, str(path.absolute()))

    def _judge(self, row: data.Row, arm: Arm, seed: int, video: Tensor, fps: float, file: str) -> None:
        """Judge a video (3, F, H, W) in [-1, 1] and write its record."""
        kept = read_entry(self.store, comparison_key(row))
        made = {"arm": arm.name, "seed": seed, "steps": arm.steps, "decoded": arm.videos is not None, "file": file}
        self.writer.add(head(row) | made | judge_video(self.judges, video, kept, fps))

    def join(self, rows: Sequence[data.Row]) -> list[Record]:
        """Return the records of these rows, sorted, from the one file that is left of all processes.

        A record's place and file are what this command gives them: whoever edits the file names no other one. Raise
        ValueError for a record without the figures of these judges.
        """
        by_id, files = {row.id: row for row in rows}, self.files
        records = []
        for record in join(self.out):
            row, arm, seed = key_of(record)
            if row not in by_id or (arm in files and (row, seed) not in files[arm]):
                continue
            names = {f"{judge}/{key}" for judge in self.judges.faces for key in FACE}
            if record["curves"].keys() != self.judges.faces.keys() or not names <= record["figures"].keys():
                raise ValueError(f"{self.out}: a record of {row} lacks figures of the judges; {WAY_OUT}")
            path = files[arm][row, seed].absolute() if arm in files else video_file(by_id[row], arm, seed)
            records.append(record | head(by_id[row]) | {"file": str(path)})
        return records

    def names(self, rows: Sequence[data.Row], seeds: int) -> list[str]:
        """Return all files that are written while videos are judged, below the evaluation's folder."""
        jobs: list[tuple[str, data.Row, int | None]] = [(arm, row, None) for row in rows for arm in (REAL, VAE)]
        jobs += [(arm.name, row, seed) for arm in self.arms for row, seed in self.jobs(arm, rows, seeds)]
        videos = [str(video_file(row, arm, seed)) for arm, row, seed in jobs if arm not in self.files]
        strips = [video_files.strip_file(Path(), row.index, arm) for arm, row, seed in jobs if not seed]
        return [*videos, *map(str, strips), *self.prepared(rows)]

    def prepared(self, rows: Sequence[data.Row]) -> list[str]:
        """Return the files of the store, which are gone when the evaluation is done."""
        keys = [key for row in rows for key in (comparison_key(row), prompt_key(row.id))]
        return [str(self.store.path(key).relative_to(self.out)) for key in (*keys, prompt_key(NEGATIVE))]


def head(row: data.Row) -> dict:
    """The beginning of each record of a row."""
    return {"row": row.id, "line": row.line, "index": row.index, "person": row.who}


def video_file(row: data.Row, arm: str, seed: int | None) -> Path:
    """Where a video is written, below the evaluation's folder, named as --videos takes it."""
    return Path("videos") / arm / (f"{row.index:03d}.mp4" if seed is None else f"{row.index:03d}_seed{seed}.mp4")


def comparison_key(row: data.Row) -> cache.Key:
    return {"kind": "compared_with", "row": row.id}


def prompt_key(row_id: str) -> cache.Key:
    return {"kind": "told", "row": row_id}
