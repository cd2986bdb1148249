"""Order of an evaluation: each video is judged when it is sampled, and leaves a record and a file.

Real clips come first: they give the references of their rows' videos. A video with a record is skipped, so a stopped
command resumes. Several processes share the real clips and the batches.
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
from rewardfl.evaluation.records import REAL, VAE, WAY_OUT, Key, Record, Writer, join_records, read_records, record_key
from rewardfl.files import escape_control
from rewardfl.training import clip_scan
from rewardfl.training.shard import read_entry


@dataclass(frozen=True, kw_only=True)
class Study:
    """A running evaluation. files: other tools' videos by arm and (row id, number of the noise)."""

    cfg: config.AnyConfig
    out: Path
    arms: tuple[Arm, ...]
    judges: Judges
    processes: Processes
    files: Mapping[str, Mapping[tuple[str, int], Path]]

    @cached_property
    def records(self) -> dict[Key, Record]:
        """The records from when this process started, without its own later ones."""
        return read_records(self.out)

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.out, self.processes.rank)

    @cached_property
    def store(self) -> Cache:
        """References and conditioning by row, until the evaluation is done."""
        return Cache(self.out / "prepared")

    def jobs(self, arm: Arm, rows: Sequence[data.Row], seeds: int) -> list[Job]:
        """Return the videos of an arm: all noises of a sampled one, the existing files of another tool's."""
        if arm.videos is None:
            return [(row, seed) for seed in range(seeds) for row in rows]
        return [(row, seed) for row in rows for row_id, seed in sorted(self.files[arm.name]) if row_id == row.id]

    def lacks(self, arm: Arm, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without a record."""
        return [(row, seed) for row, seed in jobs if (row.id, arm.name, seed) not in self.records]

    def read_real(self, rows: Sequence[data.Row], seeds: int, through_vae: bool) -> list[data.Row]:
        """Judge the real clips, one at a time, store the references of their rows, and return the rows with a face.

        through_vae: whether the clips are going to be judged through the VAE, too. Raise DataError for clips that
        cannot be read, unless data.skip_bad_rows: then print them.
        """
        jobs = [(arm, self.jobs(arm, rows, seeds)) for arm in self.arms]
        # batches are sampled whole, so an arm that lacks one video needs all its rows
        needed = {row.id for arm, arm_jobs in jobs if self.lacks(arm, arm_jobs) for row, _ in arm_jobs}
        needed |= {row.id for row in rows if through_vae and (row.id, VAE, None) not in self.records}
        share = self.processes.share
        todo = [
            row
            for row in share.take(rows)
            if (row.id, REAL, None) not in self.records
            or (row.id in needed and self.store.get(comparison_key(row)) is None)
        ]
        broken, faceless = [], []
        for row in tqdm(todo, desc="real clips", disable=share.quiet):
            try:
                if problem := self._read_real(row):
                    faceless.append((row.line, problem))
            except data.DataError as error:
                broken.append((row.line, str(error)))
        broken, faceless = self.processes.gather(broken), sorted(self.processes.gather(faceless))
        good, bad = data.usable_rows(rows, broken, skip_bad_rows=self.cfg.data.skip_bad_rows)
        if self.processes.main:
            for problem in (*bad, *(f"line {line}: {problem}" for line, problem in faceless)):
                print(escape_control(f"skipped: {problem}"))
        hidden = {line for line, _ in faceless}
        if not (usable := [row for row in good if row.line not in hidden]):
            raise ValueError(f"--data: no clip of {self.cfg.data.file_name} shows a face")
        return usable

    def _read_real(self, row: data.Row) -> str:
        """Judge a row's real clip; return why it cannot be used, empty where it can."""
        example = clip_scan.load_sized_example(self.cfg, row)
        fps = self.cfg.data.fps or data.frame_rate(row.video)
        real = judge_real(self.judges, row, example, fps)
        if isinstance(real, str):
            return real
        record, references = real
        self.store.put(comparison_key(row), references | {"image": example.image})
        if (row.id, REAL, None) not in self.records:
            self._write(row, REAL, None, example.video, fps)
            source = {"arm": REAL, "seed": None, "steps": 0, "decoded": True, "file": str(video_file(row, REAL, None))}
            self.writer.add(head(row) | source | record)
        return ""

    def _write(self, row: data.Row, arm: str, seed: int | None, video: Tensor, fps: float) -> None:
        """Write the video (3, F, H, W), and of a row's first one the strip for the grid."""
        path = self.out / video_file(row, arm, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_video(path, video, fps)
        if not seed:
            video_files.write_strip(video_files.strip_file(self.out, row.index, arm), video)

    @torch.no_grad()
    def judge_through_vae(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Judge the real clips after the model's VAE has encoded and decoded them: the upper end of identity kept."""
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
            self._write(row, VAE, None, video, fps)
            record = judge_through_vae(self.judges, video, read_entry(self.store, comparison_key(row)), fps)
            source = {"arm": VAE, "seed": None, "steps": 0, "decoded": False, "file": str(video_file(row, VAE, None))}
            self.writer.add(head(row) | source | record)

    def sample(self, backbone: Backbone | None, rows: Sequence[data.Row], args: argparse.Namespace) -> None:
        """Sample and judge the videos without a record. Load the model once for each adapter, if at all."""
        sampled = [(arm, self.jobs(arm, rows, args.seeds)) for arm in self.arms if arm.videos is None]
        waiting = [(arm, jobs) for arm, jobs in sampled if self.lacks(arm, jobs)]
        if not waiting:
            return
        device, share = torch.device(args.device), self.processes.share
        needed = sorted({row for _, jobs in waiting for row, _ in jobs}, key=lambda row: row.index)
        self._encode(backbone, needed, device)
        sizes = {row: tuple(record["size"]) for (row, arm, _), record in read_records(self.out).items() if arm == REAL}
        adapters = list(dict.fromkeys(arm.adapter for arm, _ in waiting if arm.adapter is not None)) or [None]
        tasks = [(arm, batch) for arm, jobs in waiting for batch in share.take(batches(jobs, sizes, args.batch))]
        total = len(waiting) * len(waiting[0][1])
        with tqdm(total=total, desc="evaluating", disable=share.quiet) as bar:
            for adapter in adapters:
                model, decoder = load_model(backbone, adapter, args.experts, device)
                sampler = Sampler(
                    cfg=self.cfg, backbone=backbone, experts=model, decoder=decoder, told=self._conditioning,
                    sizes=sizes, device=device,
                )  # fmt: skip
                for arm, batch in tasks:
                    if (arm.adapter or adapters[0]) == adapter:  # the first adapter's model samples the base
                        self._sample(sampler, arm, batch)
                        bar.update(len(batch) * share.processes)
                del model, decoder, sampler  # before the next one is loaded

    @torch.no_grad()
    def _encode(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Encode and store the missing conditioning of this process's share of the rows; wait for all processes."""
        # take the share first: other processes write while this one looks
        if missing := [row for row in self.processes.share.take(rows) if self.store.get(prompt_key(row.id)) is None]:
            inputs = ((row, read_entry(self.store, comparison_key(row))["image"]) for row in missing)
            for row_id, conditioning in encode_inputs(self.cfg, backbone, inputs, device):
                self.store.put(prompt_key(row_id), conditioning)
        self.processes.wait()

    def _conditioning(self, row_id: str) -> Conditioning:
        return protocol.move_to(read_entry(self.store, prompt_key(row_id)), self.judges.device)

    @torch.no_grad()
    def _sample(self, sampler: Sampler, arm: Arm, batch: Sequence[Job]) -> None:
        """Sample a batch unless all its records exist. Sample an incomplete one whole: bits depend on its size."""
        missing = self.lacks(arm, batch)
        if not missing:
            return
        for (row, seed), video in zip(batch, sampler.sample(batch, arm), strict=True):
            if (row, seed) in missing:
                fps = self.cfg.data.fps or data.frame_rate(row.video)
                self._write(row, arm.name, seed, video, fps)
                self._judge(row, arm, seed, video, fps, str(video_file(row, arm.name, seed)))

    def judge_files(self, rows: Sequence[data.Row]) -> None:
        """Judge other tools' videos at the real clip's size and number of frames, one at a time."""
        share = self.processes.share
        for arm in self.arms:
            jobs = self.lacks(arm, self.jobs(arm, rows, 0)) if arm.videos is not None else []
            for row, seed in tqdm(share.take(jobs), desc=arm.name, disable=share.quiet):
                self._judge_file(row, arm, seed)

    def _judge_file(self, row: data.Row, arm: Arm, seed: int) -> None:
        path, cfg = self.files[arm.name][row.id, seed], self.cfg.data
        frames = data.read_clip(path, cfg.height, cfg.width, cfg.num_frames, cfg.max_pixels, cfg.fps)
        size = read_entry(self.store, comparison_key(row))["image"].shape[1:]
        video = data.to_float(data.fit(frames, *size))
        if not seed:
            video_files.write_strip(video_files.strip_file(self.out, row.index, arm.name), video)
        fps = cfg.fps or data.frame_rate(path)
        self._judge(row, arm, seed, video.to(self.judges.device), fps, str(path.absolute()))

    def _judge(self, row: data.Row, arm: Arm, seed: int, video: Tensor, fps: float, file: str) -> None:
        """Judge a video (3, F, H, W) in [-1, 1] and write its record."""
        references = read_entry(self.store, comparison_key(row))
        source = {"arm": arm.name, "seed": seed, "steps": arm.steps, "decoded": arm.videos is not None, "file": file}
        self.writer.add(head(row) | source | judge_video(self.judges, video, references, fps))

    def join(self, rows: Sequence[data.Row]) -> list[Record]:
        """Join the records of all processes into one file, and return those of these rows, sorted.

        Compute index and file of each record again, so an edited file cannot name another one. Raise ValueError for
        a record without the figures of these judges.
        """
        by_id, files, records = {row.id: row for row in rows}, self.files, []
        names = {f"{judge}/{key}" for judge in self.judges.faces for key in FACE}
        for record in join_records(self.out):
            row, arm, seed = record_key(record)
            if row not in by_id or (arm in files and (row, seed) not in files[arm]):
                continue
            if record["curves"].keys() != self.judges.faces.keys() or not names <= record["figures"].keys():
                raise ValueError(f"{self.out}: a record of {row} lacks figures of the judges; {WAY_OUT}")
            path = files[arm][row, seed].absolute() if arm in files else video_file(by_id[row], arm, seed)
            records.append(record | head(by_id[row]) | {"file": str(path)})
        return records

    def names(self, rows: Sequence[data.Row], seeds: int) -> list[str]:
        """Return all files that judging writes, relative to the evaluation's folder."""
        jobs: list[tuple[str, data.Row, int | None]] = [(arm, row, None) for row in rows for arm in (REAL, VAE)]
        jobs += [(arm.name, row, seed) for arm in self.arms for row, seed in self.jobs(arm, rows, seeds)]
        videos = [str(video_file(row, arm, seed)) for arm, row, seed in jobs if arm not in self.files]
        strips = [video_files.strip_file(Path(), row.index, arm) for arm, row, seed in jobs if not seed]
        return [*videos, *map(str, strips), *self.prepared(rows)]

    def prepared(self, rows: Sequence[data.Row]) -> list[str]:
        """Return the files of the store, which are removed at the end."""
        keys = [key for row in rows for key in (comparison_key(row), prompt_key(row.id))]
        return [str(self.store.path(key).relative_to(self.out)) for key in (*keys, prompt_key(NEGATIVE))]


def head(row: data.Row) -> dict:
    """Return the part that all records of a row share."""
    return {"row": row.id, "line": row.line, "index": row.index, "person": row.who}


def video_file(row: data.Row, arm: str, seed: int | None) -> Path:
    """Return the file of a video, relative to the evaluation's folder and named as --videos takes it."""
    return Path("videos") / arm / (f"{row.index:03d}.mp4" if seed is None else f"{row.index:03d}_seed{seed}.mp4")


def comparison_key(row: data.Row) -> cache.Key:
    return {"kind": "compared_with", "row": row.id}


def prompt_key(row_id: str) -> cache.Key:
    return {"kind": "told", "row": row_id}
