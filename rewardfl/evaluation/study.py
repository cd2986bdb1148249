"""Order of an evaluation: real clips first, then videos, each judged when it is sampled, with a record and a file.

A video with a record is skipped, so a stopped command resumes. Several processes share the clips and the batches.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from rewardfl import data
from rewardfl.backbones.protocol import Backbone
from rewardfl.config import DataConfig
from rewardfl.data import cache
from rewardfl.evaluation import arms, judging, records
from rewardfl.evaluation.arms import Arm, Files, InferencePlacement, Job, Sampler, Sampling
from rewardfl.evaluation.figures import find_bases
from rewardfl.evaluation.records import REAL, VAE, Record
from rewardfl.evaluation.verification import People
from rewardfl.files import escape_control
from rewardfl.training.clip_scan import load_sized_example
from rewardfl.training.shard import Shard
from rewardfl.weights.lora_files import Lora
from rewardfl.weights.shards import InputError


@contextmanager
def connected() -> Iterator[Shard]:
    """Connect the processes of torchrun or accelerate over gloo, and yield this one's share; without them, all."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shard(0, 1)
        return
    # a process waits for the slowest one; a launcher ends all when one has failed
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Shard(dist.get_rank(), dist.get_world_size(), quiet=dist.get_rank() > 0)
    finally:
        dist.destroy_process_group()


def gather(items: list) -> list:
    """Concatenate the items of all processes, which must all call this; wait for all."""
    if not dist.is_initialized():
        return items
    lists: list = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def run_on_main(work: Callable[[], None], share: Shard) -> None:
    """Call `work` on the main process, and raise its refusal on all processes."""
    errors: list[Exception] = []
    if not share.quiet:
        try:
            work()
        except (ValueError, OSError) as error:
            errors = [error]
    for error in gather(errors):
        raise error


@dataclass(frozen=True, kw_only=True)
class Study:
    """A running evaluation. seeds, batch, experts: as the options. files: other tools' videos by arm."""

    seeds: int
    batch: int
    experts: InferencePlacement
    clips: DataConfig
    sampling: Sampling
    out: Path
    arms: tuple[Arm, ...]
    judges: judging.Judges
    share: Shard
    files: Mapping[str, Files]
    fps: float  # frame rate of the videos that it writes
    starts: Mapping[Path, Mapping[str, Lora]]  # lora.init_from as training reads it, by its path
    references: dict[str, judging.References] = field(default_factory=dict)  # by row id, of `read_rows`

    @cached_property
    def present(self) -> dict[records.RecordKey, Record]:
        """Return the records from when this process started, without its own later ones."""
        return records.read_records(self.out)

    @cached_property
    def writer(self) -> records.Writer:
        return records.Writer(self.out, self.share.rank)

    @cached_property
    def store(self) -> cache.Cache:
        """Return the store of the base's motion, which stays: more arms may follow."""
        return cache.Cache(self.out / "prepared")

    def jobs(self, arm: Arm, rows: Sequence[data.Row]) -> list[Job]:
        """Return the videos of an arm: all noises of a sampled one, the existing files of another tool's."""
        if arm.videos is None:
            return [(row, seed) for seed in range(self.seeds) for row in rows]
        return [(row, seed) for row in rows for row_id, seed in sorted(self.files[arm.name]) if row_id == row.id]

    def missing(self, arm: Arm, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without a record."""
        return [(row, seed) for row, seed in jobs if (row.id, arm.name, seed) not in self.present]

    @torch.no_grad()
    def read_rows(self, rows: Sequence[data.Row], vae: Backbone | None) -> list[data.Row]:
        """Find the references of the rows, judge real clips, with `vae` also through it, and return the usable rows.

        Raise DataError for clips that cannot be read or show no face, unless data.skip_bad_rows: then print them.
        """
        problems, notes, references, through_vae = [], [], [], None
        # batches are sampled completely, so an arm that lacks one video needs the references of all rows
        is_waiting = any(self.missing(arm, self.jobs(arm, rows)) for arm in self.arms)
        for row in tqdm(self.share.take(rows), desc="real clips", disable=self.share.quiet):
            real = (REAL, *([VAE] if vae else [])) if self.judges.faces and row.video else ()
            unjudged = [arm for arm in real if (row.id, arm, None) not in self.present]
            if not unjudged and not is_waiting:
                continue
            try:
                example = load_sized_example(self.clips, row)
                skip = self.clips.skip_bad_rows
                compared, pools, note = judging.prepare_row(self.judges, row, example, skip=skip)
            except data.DataError as error:
                problems.append((row.line, str(error)))
                continue
            notes += [(row.line, f"line {row.line}: {note}")] if note else []
            references.append((row.id, compared))
            video = example.video
            if video is not None and REAL in unjudged:
                self._add(row, Arm(name=REAL), None, video, judging.judge_real(self.judges, example, compared, pools))
            if video is not None and vae is not None and VAE in unjudged:
                through_vae = through_vae or self._load_vae(vae)
                video = through_vae(video, example.image)
                record = judging.judge_video(self.judges, video, compared, keep_vectors=True)
                self._add(row, Arm(name=VAE), None, video, record)
        problems, notes, references = (gather(items) for items in (problems, notes, references))
        usable, bad = data.usable_rows(rows, problems, skip_bad_rows=self.clips.skip_bad_rows)
        for line in () if self.share.quiet else (*bad, *(note for _, note in sorted(notes))):
            print(escape_control(f"skipped: {line}"))
        self.references.update(references)
        for term in self.judges.terms if is_waiting else ():  # one photo may take its cap from the other rows
            row_terms = [self.references[row.id].terms for row in usable]
            completed = term.reward.complete([terms.get(term.label) for terms in row_terms])
            for terms, reference in zip(row_terms, completed, strict=True):
                terms[term.label] = reference
        return usable

    def _load_vae(self, backbone: Backbone) -> judging.VaePass:
        """Load the VAE and return a function of a video (3, F, H, W) and its image, which encodes and decodes it."""
        device = torch.device(self.judges.device)
        encode_video, encode_image = backbone.video_encoder(device), backbone.image_encoder(device)
        decoder = backbone.load_decoder(device)

        def through_vae(video: Tensor, image: Tensor | None) -> Tensor:
            conditioning = encode_image(image, video.shape[1])
            return decoder.decode(encode_video(video[None]), conditioning)[0].float()

        return through_vae

    @torch.no_grad()
    def embed_people(self, rows: Sequence[data.Row], others: Sequence[data.Row], vae: Backbone | None) -> People:
        """Return, on the main process, the faces of each person's first row, with `vae` also of photos through it."""
        people: People = {name: {} for name in self.judges.faces}

        def embed() -> None:
            through_vae = self._load_vae(vae) if vae is not None and any(row.pictures for row in rows) else None
            for who, row in tqdm({row.who: row for row in reversed([*rows, *others])}.items(), desc="people"):
                try:
                    faces, note = judging.embed_person(self.judges, row, self.clips, through_vae)
                except data.DataError as error:
                    if not self.clips.skip_bad_rows:
                        raise data.DataError(f"{row.table}: line {row.line}: {error}") from None
                    faces, note = {}, str(error)
                if note and row in others:  # the rows' own are printed before
                    print(escape_control(f"skipped: {who}: {note}"))
                for name in faces:
                    people[name][who] = faces[name]

        if people:
            run_on_main(embed, self.share)
        return people

    def file(self, row: data.Row, arm: str, seed: int | None) -> Path:
        """Return a video's file: relative to the evaluation's folder and named as --videos takes it, or absolute."""
        if arm in self.files and seed is not None:
            return self.files[arm][row.id, seed].absolute()
        folder, suffix = ("videos", "mp4") if self.judges.faces else ("images", "png")
        return Path(folder, arm, f"{row.index:03d}{'' if seed is None else f'_seed{seed}'}.{suffix}")

    def _add(self, row: data.Row, arm: Arm, seed: int | None, video: Tensor, record: Record) -> None:
        """Write the record of a video (3, F, H, W), and the video unless it is another tool's."""
        file = self.file(row, arm.name, seed)
        if arm.videos is None:
            (self.out / file).parent.mkdir(parents=True, exist_ok=True)
            if self.judges.faces:
                data.write_video(self.out / file, video, self.fps)
            else:
                data.write_picture(self.out / file, video)
        if seed is not None and self.judges.faces:
            frames, base = (self._read_frames(row, each, seed) for each in (arm, find_bases(self.arms)[arm.steps]))
            if frames is not None and base is not None:
                distance = (frames.float() - base.float()).square().mean() / base.float().var()
                record["figures"] |= judging.finite({"base/distance": float(distance)})
        decoded = arm.name == REAL or arm.videos is not None
        source = {"arm": arm.name, "seed": seed, "steps": arm.steps, "decoded": decoded, "file": str(file)}
        self.writer.add(head(row) | source | record)

    def _judge(self, row: data.Row, arm: Arm, seed: int, video: Tensor) -> None:
        """Judge a video (3, F, H, W) in [-1, 1] and write its record."""
        references = self.references[row.id]
        if self.judges.faces and "clip" not in row.offers:
            base = find_bases(self.arms)[arm.steps]
            if arm is base:
                measured = judging.measure_motion(self.judges, references, video, row.prompt)
                self.store.put(motion_key(row, base, seed), measured)
            if (motion := self.store.get(motion_key(row, base, seed))) is None:
                raise InputError(
                    f"{self.out}: the motion of {base.name} is missing, line {row.line}; {records.WAY_OUT}"
                )
            references = judging.with_motion(references, motion)
        self._add(row, arm, seed, video, judging.judge_video(self.judges, video, references))

    def _read_frames(self, row: data.Row, arm: Arm, seed: int) -> Tensor | None:
        """Return the frames (F, H, W, 3) uint8 of an arm's file, fitted if of another tool; None without the file."""
        path = (row, seed) in self.jobs(arm, [row]) and self.out / self.file(row, arm.name, seed)
        if not path or not path.is_file():
            return None
        return data.read_video(path) if arm.videos is None else self.read_file(path, row)

    @torch.no_grad()
    def sample(self, backbone: Backbone, rows: Sequence[data.Row]) -> None:
        """Sample and judge the videos without a record, in full batches: bits depend on their size."""
        sizes = {row_id: references.size for row_id, references in self.references.items()}
        tasks = [
            (arm, batch)
            for arm in self.arms
            if arm.videos is None and self.missing(arm, self.jobs(arm, rows))
            for batch in self.share.take(arms.batches(self.jobs(arm, rows), sizes, self.batch))
            if self.missing(arm, batch)
        ]
        if not tasks:
            return
        device = torch.device(self.judges.device)
        inputs = {row.id: (row, self.references[row.id].image) for _, batch in tasks for row, _ in batch}
        conditioning = arms.encode_inputs(self.sampling, self.clips.num_frames, backbone, inputs.values(), device)
        adapters: list[Path | None] = list(dict.fromkeys(arm.adapter for arm, _ in tasks if arm.adapter)) or [None]
        for adapter in adapters:
            loras = adapter and self.starts.get(adapter, adapter)
            model, decoder = arms.load_model(backbone, loras, self.experts, device)
            sampler = Sampler(
                sampling=self.sampling, num_frames=self.clips.num_frames, backbone=backbone, experts=model,
                decoder=decoder, conditioning=conditioning, sizes=sizes, device=device,
            )  # fmt: skip
            # the first adapter's model samples the base
            chosen = [task for task in tasks if (task[0].adapter or adapters[0]) == adapter]
            for arm, batch in tqdm(chosen, desc="sampling", disable=self.share.quiet):
                for (row, seed), video in zip(batch, sampler.sample(batch, arm), strict=True):
                    if self.missing(arm, [(row, seed)]):
                        self._judge(row, arm, seed, video)
            del model, decoder, sampler  # before the next one is loaded

    def judge_files(self, rows: Sequence[data.Row]) -> None:
        """Judge other tools' videos at the real clip's size and number of frames, one at a time."""
        for arm in self.arms:
            gather([])  # wait for all: the base's videos are needed
            jobs = self.missing(arm, self.jobs(arm, rows)) if arm.videos is not None else []
            for row, seed in tqdm(self.share.take(jobs), desc=arm.name, disable=self.share.quiet):
                frames = self.read_file(self.files[arm.name][row.id, seed], row)
                self._judge(row, arm, seed, data.to_float(frames).to(self.judges.device))

    def read_file(self, path: Path, row: data.Row | None = None) -> Tensor:
        """Return the frames (F, H, W, 3) uint8 of another tool's video that are judged, fitted to a row's size."""
        clips = self.clips
        frames = data.read_clip(path, clips.height, clips.width, clips.num_frames, clips.max_pixels, clips.fps)
        return frames if row is None else data.fit(frames, *self.references[row.id].size)

    def join(self, rows: Sequence[data.Row]) -> list[Record]:
        """Join the records of all processes, and return these rows', with names of files that no edit can change."""
        by_id, files, joined = {row.id: row for row in rows}, self.files, []
        for record in records.join_records(self.out):
            row, arm, seed = record["row"], record["arm"], record["seed"]
            if row in by_id and (arm not in files or (row, seed) in files[arm]):
                joined.append(record | head(by_id[row]) | {"file": str(self.file(by_id[row], arm, seed))})
        return joined

    def names(self, rows: Sequence[data.Row]) -> list[str]:
        """Return all files that judging writes, relative to the evaluation's folder."""
        videos = [self.file(row, arm, None) for row in rows for arm in (REAL, VAE) if self.judges.faces]
        sampled = [(arm, job) for arm in self.arms if arm.videos is None for job in self.jobs(arm, rows)]
        videos += [self.file(row, arm.name, seed) for arm, (row, seed) in sampled]
        bases = find_bases(self.arms).values() if self.judges.faces else ()
        keys = [motion_key(row, base, seed) for base in bases for row, seed in self.jobs(base, rows)]
        return [*map(str, videos), *(str(self.store.path(key).relative_to(self.out)) for key in keys)]


def head(row: data.Row) -> dict:
    """Return the part that all records of a row share."""
    return {"row": row.id, "line": row.line, "index": row.index, "person": row.who}


def motion_key(row: data.Row, base: Arm, seed: int) -> cache.Key:
    return {"kind": "motion", "row": row.id, "base": base.name, "seed": seed}
