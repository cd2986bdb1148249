"""Order of an evaluation: each video is judged when it is sampled, and leaves a record and a file.

Real clips come first: they give the references of their rows' videos. A video with a record is skipped, so a stopped
command resumes. Several processes share the real clips and the batches.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning
from rewardfl.config import DataConfig
from rewardfl.data import cache
from rewardfl.evaluation import arms, judging, processes, records
from rewardfl.evaluation.arms import Arm, Files, InferencePlacement, Job, Sampler, Sampling
from rewardfl.evaluation.figures import find_bases
from rewardfl.evaluation.records import REAL, VAE, Record
from rewardfl.evaluation.verification import Faces
from rewardfl.files import escape_control
from rewardfl.training.clip_scan import load_sized_example
from rewardfl.training.shard import Shard, read_entry
from rewardfl.weights.lora_files import Lora

ThroughVae = Callable[[Tensor, Tensor | None], Tensor]  # a video (3, F, H, W) and its image -> the decoded video

STILL = 5  # frames of a photo that goes through a VAE, of which the last counts: it is of a second latent frame


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
    fps: float  # of the videos that it writes
    starts: Mapping[Path, Mapping[str, Lora]]  # lora.init_from as training reads it, by its path
    others: Sequence[data.Row]  # of --others
    has_scale: tuple[bool, bool]  # whether the VAE is needed, for the clips and for the photos of rows without one

    @cached_property
    def present(self) -> dict[records.RecordKey, Record]:
        """Return the records from when this process started, without its own later ones."""
        return records.read_records(self.out)

    @cached_property
    def writer(self) -> records.Writer:
        return records.Writer(self.out, self.share.rank)

    @cached_property
    def store(self) -> cache.Cache:
        """Return the store of references and conditioning by row, until the evaluation is done."""
        return cache.Cache(self.out / "prepared")

    @cached_property
    def kept(self) -> cache.Cache:
        """Return the store of embedded pictures and of the base's motion, which later commands need."""
        return cache.Cache(self.out / "references")

    def jobs(self, arm: Arm, rows: Sequence[data.Row]) -> list[Job]:
        """Return the videos of an arm: all noises of a sampled one, the existing files of another tool's."""
        if arm.videos is None:
            return [(row, seed) for seed in range(self.seeds) for row in rows]
        return [(row, seed) for row in rows for row_id, seed in sorted(self.files[arm.name]) if row_id == row.id]

    def lacks(self, arm: Arm, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs without a record."""
        return [(row, seed) for row, seed in jobs if (row.id, arm.name, seed) not in self.present]

    @torch.no_grad()
    def read_rows(self, rows: Sequence[data.Row], vae: Backbone | None) -> list[data.Row]:
        """Store the references of the rows, one at a time, and return the usable rows. Judge real clips if faces are.

        vae: the model whose VAE encodes and decodes them for the scales of identity kept. Raise DataError for unusable
        files, unless data.skip_bad_rows: then print them.
        """
        share, skip = self.share, self.clips.skip_bad_rows
        problems: tuple[list[tuple[str, int, str]], ...] = ([], [], [])
        broken, left_out, faceless = problems
        load_vae = functools.cache(lambda: self._load_vae(vae))
        # batches are sampled whole, so an arm that lacks one video needs the references of all its rows
        waiting = [jobs for arm in self.arms if self.lacks(arm, jobs := self.jobs(arm, rows))]
        needed = {row.id for jobs in waiting for row, _ in jobs}
        for row in tqdm(share.take([*rows, *self.others]), desc="references", disable=share.quiet):
            try:
                problem = self._read_row(row, load_vae, is_needed=row.id in needed)
                left_out += [(row.table, row.line, problem)] if problem else []
            except judging.NoFaceError as error:
                faceless.append((row.table, row.line, str(error)))
            except data.DataError as error:
                broken.append((row.table, row.line, str(error)))
        broken, left_out, faceless = (sorted(processes.gather(lines)) for lines in problems)
        printed = [f"line {line}: {problem}" for _, line, problem in (*left_out, *faceless)]
        for table in filter(None, (self.others, rows)):
            refused = [
                (line, problem)
                for name, line, problem in (*broken, *([] if skip else left_out))
                if name == table[0].table
            ]
            good, bad = data.usable_rows(table, refused, skip_bad_rows=skip)
            printed += bad
        for problem in printed if not share.quiet else ():
            print(escape_control(f"skipped: {problem}"))
        hidden = {(name, line) for name, line, _ in faceless}
        if not (usable := [row for row in good if (row.table, row.line) not in hidden]):
            raise ValueError(f"--data: no clip of {self.clips.file_name} shows a face")
        return usable

    def _read_row(self, row: data.Row, load_vae: Callable[[], ThroughVae], *, is_needed: bool) -> str:
        """Store a row's references and pictures, and judge its clip. Return why photos are left out."""
        judges, of_table, by_photos = self.judges, row not in self.others, row.video is None
        is_judged = judges.faces and of_table and not by_photos
        lacking = [arm for arm in (REAL, VAE)[: self.has_scale[0] + 1] if (row.id, arm, None) not in self.present]
        is_stored = not is_needed or self.store.get(comparison_key(row)) is not None
        is_embedded = not judges.faces or self.kept.get(self.pictures_key(row)) is not None
        if is_stored and is_embedded and not (is_judged and lacking):
            return ""
        problem, photos = "", list[Tensor]()
        if judges.faces and by_photos:
            references, photos, problem = judging.pool_photos(judges, row)
        if of_table or not by_photos:
            example = load_sized_example(self.clips, row)
            if not judges.faces or by_photos:
                reference = example.reference.to(judges.device)
                references = references | judging.find_references(judges.terms, row, reference, photos)
            else:
                record, references = judging.judge_real(judges, row, example, self.fps)
            image = {} if example.image is None else {"image": example.image}
            self.store.put(comparison_key(row), references | image | {"size": torch.tensor(example.size)})
        if judges.faces:
            self._keep_pictures(row, references, photos, load_vae)
        if is_judged and REAL in lacking:
            self._add(row, Arm(name=REAL), None, judging.real_video(example), record)
        if is_judged and VAE in lacking:
            video = load_vae()(judging.real_video(example), example.image)
            record = judging.judge_video(judges, video, references, keep_vectors=True)
            self._add(row, Arm(name=VAE), None, video, record)
        return problem

    def _keep_pictures(
        self,
        row: data.Row,
        references: judging.References,
        photos: Sequence[Tensor],
        load_vae: Callable[[], ThroughVae],
    ) -> None:
        """Keep the embeddings of the row's pictures, and of its photos through the VAE."""
        clips, stills, entry = self.clips, [], dict[str, Tensor]()
        for photo in photos if self.has_scale[1] else ():
            size = data.clip_size((photo.shape[1], photo.shape[2]), clips.height, clips.width, clips.max_pixels)
            still = data.to_float(data.fit(data.to_uint8(photo[:, None]), *size)).repeat(1, STILL, 1, 1)
            stills.append(load_vae()(still, still[:, 0])[:, -1])
        for name, identity in self.judges.faces.items():
            pictures = references[f"pool/{name}"]
            vectors = [identity.embed_photo(still) for still in stills]
            drawn = [torch.zeros_like(pictures[0]) if vector is None else vector for vector in vectors]
            entry |= {name: pictures, f"{name}/through_vae": torch.stack(drawn) if drawn else pictures[:0]}
        self.kept.put(self.pictures_key(row), entry)

    def _load_vae(self, backbone: Backbone | None) -> ThroughVae:
        """Load the VAE and return a function that encodes and decodes a video, given its first image."""
        assert backbone is not None  # has_scale
        device = torch.device(self.judges.device)
        encode_video, encode_image = backbone.video_encoder(device), backbone.image_encoder(device)
        decoder = backbone.load_decoder(device)

        def through_vae(video: Tensor, image: Tensor | None) -> Tensor:
            conditioning = encode_image(image, video.shape[1])
            return decoder.decode(encode_video(video[None]), conditioning)[0].float()

        return through_vae

    def people(self, rows: Sequence[data.Row]) -> dict[str, dict[str, Faces]]:
        """Return the pictures of each person's first row, of these rows and of --others, by recogniser and person."""
        people: dict[str, dict[str, Faces]] = {name: {} for name in self.judges.faces}
        for row in (*rows, *self.others):
            who = f"--others: {row.who}" if row in self.others else row.who
            for name, entry in ((name, self.kept.get(self.pictures_key(row))) for name in people):
                if entry is not None and who not in people[name]:
                    people[name][who] = Faces(entry[name], entry[f"{name}/through_vae"], row not in self.others)
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
            record["figures"]["base/distance"] = judging.relative_distance(frames, base)
        decoded = arm.name == REAL or arm.videos is not None
        source = {"arm": arm.name, "seed": seed, "steps": arm.steps, "decoded": decoded, "file": str(file)}
        self.writer.add(head(row) | source | record)

    def _judge(self, row: data.Row, arm: Arm, seed: int, video: Tensor) -> None:
        """Judge a video (3, F, H, W) in [-1, 1] and write its record."""
        references = read_entry(self.store, comparison_key(row))
        if self.judges.faces and "clip" not in row.offers:
            base = find_bases(self.arms)[arm.steps]
            if arm is base:
                motion = judging.measure_motion(self.judges.terms, references, video, row.prompt)
                self.kept.put(motion_key(row, base, seed), motion)
            references |= self.kept.get(motion_key(row, base, seed)) or {}
        judge = judging.judge_video if self.judges.faces else judging.judge_image
        self._add(row, arm, seed, video, judge(self.judges, video, references))

    def _read_frames(self, row: data.Row, arm: Arm, seed: int) -> Tensor | None:
        """Return the frames (F, H, W, 3) uint8 of an arm's file, fitted if of another tool; None without the file."""
        if (row, seed) not in self.jobs(arm, [row]):
            return None
        path = self.out / self.file(row, arm.name, seed)
        if arm.videos is not None:
            return data.fit(self.read_file(path), *self.size(row))
        return data.read_video(path) if path.is_file() else None

    def sample(self, backbone: Backbone, rows: Sequence[data.Row]) -> None:
        """Sample and judge the videos without a record. Load the model once for each adapter, if at all."""
        sampled = [(arm, self.jobs(arm, rows)) for arm in self.arms if arm.videos is None]
        waiting = [(arm, jobs) for arm, jobs in sampled if self.lacks(arm, jobs)]
        if not waiting:
            return
        share, device = self.share, torch.device(self.judges.device)
        needed = sorted({row for _, jobs in waiting for row, _ in jobs}, key=lambda row: row.index)
        self._encode(backbone, needed, device)
        sizes = {row.id: self.size(row) for row in needed}
        adapters: list[Path | None] = list(dict.fromkeys(arm.adapter for arm, _ in waiting if arm.adapter)) or [None]
        tasks = [(arm, batch) for arm, jobs in waiting for batch in share.take(arms.batches(jobs, sizes, self.batch))]
        total = len(waiting) * len(waiting[0][1])
        with tqdm(total=total, desc="evaluating", disable=share.quiet) as bar:
            for adapter in adapters:
                loras = adapter and self.starts.get(adapter, adapter)
                model, decoder = arms.load_model(backbone, loras, self.experts, device)
                sampler = Sampler(
                    sampling=self.sampling, num_frames=self.clips.num_frames, backbone=backbone, experts=model,
                    decoder=decoder, conditioning=self._conditioning, sizes=sizes, device=device,
                )  # fmt: skip
                for arm, batch in tasks:
                    if (arm.adapter or adapters[0]) == adapter:  # the first adapter's model samples the base
                        self._sample(sampler, arm, batch)
                        bar.update(len(batch) * share.processes)
                del model, decoder, sampler  # before the next one is loaded

    def size(self, row: data.Row) -> tuple[int, int]:
        """Return height and width of the row's videos."""
        height, width = read_entry(self.store, comparison_key(row))["size"].tolist()
        return height, width

    @torch.no_grad()
    def _encode(self, backbone: Backbone, rows: Sequence[data.Row], device: torch.device) -> None:
        """Encode and store the missing conditioning of this process's share of the rows; wait for all processes."""
        # take the share first: other processes write while this one looks
        if missing := [row for row in self.share.take(rows) if self.store.get(prompt_key(row.id)) is None]:
            inputs = ((row, read_entry(self.store, comparison_key(row)).get("image")) for row in missing)
            encoded = arms.encode_inputs(self.sampling, self.clips.num_frames, backbone, inputs, device)
            for row_id, conditioning in encoded:
                self.store.put(prompt_key(row_id), conditioning)
        processes.gather([])  # wait for all

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
                self._judge(row, arm, seed, video)

    def judge_files(self, rows: Sequence[data.Row]) -> None:
        """Judge other tools' videos at the real clip's size and number of frames, one at a time."""
        share = self.share
        for arm in self.arms:
            processes.gather([])  # wait for all: the base's videos are needed
            jobs = self.lacks(arm, self.jobs(arm, rows)) if arm.videos is not None else []
            for row, seed in tqdm(share.take(jobs), desc=arm.name, disable=share.quiet):
                path = self.files[arm.name][row.id, seed]
                video = data.to_float(data.fit(self.read_file(path), *self.size(row))).to(self.judges.device)
                self._judge(row, arm, seed, video)

    def read_file(self, path: Path) -> Tensor:
        """Return the frames (F, H, W, 3) uint8 of another tool's video that are judged."""
        clips = self.clips
        return data.read_clip(path, clips.height, clips.width, clips.num_frames, clips.max_pixels, clips.fps)

    def join(self, rows: Sequence[data.Row]) -> list[Record]:
        """Join the records of all processes into one file, and return those of these rows, sorted.

        Compute index and file of each record again, so an edited file cannot name another one. Raise ValueError for
        a record without the figures of these judges.
        """
        by_id, files, joined = {row.id: row for row in rows}, self.files, []
        for record in records.join_records(self.out):
            row, arm, seed = record["row"], record["arm"], record["seed"]
            if row not in by_id or (arm in files and (seed is None or (row, seed) not in files[arm])):
                continue
            if record["curves"].keys() != self.judges.faces.keys():
                raise ValueError(f"{self.out}: a record of {row} lacks figures of the judges; {records.WAY_OUT}")
            joined.append(record | head(by_id[row]) | {"file": str(self.file(by_id[row], arm, seed))})
        return joined

    def names(self, rows: Sequence[data.Row]) -> list[str]:
        """Return all files that judging writes, relative to the evaluation's folder."""
        videos = [self.file(row, arm, None) for row in rows for arm in (REAL, VAE) if self.judges.faces]
        for arm in self.arms:
            if arm.videos is None:
                videos += [self.file(row, arm.name, seed) for row, seed in self.jobs(arm, rows)]
        keys = [self.pictures_key(row) for row in (*rows, *self.others) if self.judges.faces]
        for base in find_bases(self.arms).values() if self.judges.faces else ():
            keys += [motion_key(row, base, seed) for row, seed in self.jobs(base, rows)]
        kept = [str(self.kept.path(key).relative_to(self.out)) for key in keys]
        return [*map(str, videos), *kept, *self.prepared(rows)]

    def prepared(self, rows: Sequence[data.Row]) -> list[str]:
        """Return the files of the store, which are removed at the end."""
        keys = [key for row in rows for key in (comparison_key(row), prompt_key(row.id))]
        return [str(self.store.path(key).relative_to(self.out)) for key in (*keys, prompt_key(arms.NEGATIVE))]

    def pictures_key(self, row: data.Row) -> cache.Key:
        return {"kind": "pictures", "table": row.table, "row": row.id, "through_vae": self.has_scale[1]}


def motion_key(row: data.Row, base: Arm, seed: int) -> cache.Key:
    return {"kind": "motion", "row": row.id, "base": base.name, "seed": seed}


def head(row: data.Row) -> dict:
    """Return the part that all records of a row share."""
    return {"row": row.id, "line": row.line, "index": row.index, "person": row.who}


def comparison_key(row: data.Row) -> cache.Key:
    return {"kind": "compared_with", "row": row.id}


def prompt_key(row_id: str) -> cache.Key:
    return {"kind": "prompt", "row": row_id}
