"""Scan the rows of metadata files, and cache the clips' conditioning, latents and references."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data
from rewardfl.backbones.protocol import Backbone, Conditioning, Decoder, Experts, move_to
from rewardfl.config import ConfigError, DataConfig
from rewardfl.config.schema import SharedSampleConfig
from rewardfl.data.cache import Cache, Key, digest
from rewardfl.rewards.scoring import Term
from rewardfl.training import batches, clip_scan, plan, setup_rewards
from rewardfl.training.anchors import Anchors
from rewardfl.training.conditions import Conditions
from rewardfl.training.distributed import Distributed
from rewardfl.training.evaluation import DeployedSampler
from rewardfl.training.prompt_limits import prompt_notes
from rewardfl.training.samples import Rows, Sample
from rewardfl.training.shard import map_shared, read_entry
from rewardfl.training.state import ResumePoint

# keys of section `sample` that a video of the base model depends on
SAMPLER_KEYS = {*SharedSampleConfig.model_fields, "final_timestep", "noises_per_sample"}


def size_notes(clips: DataConfig, rows: Sequence[data.Row]) -> list[str]:
    """Return a note on the number of rows by generated size, where some have a size of their own."""
    if not any(row.size for row in rows):
        return []
    counts = Counter(row.size or (clips.height, clips.width) for row in rows)
    listed = [f"{height} x {width} ({count} rows)" for (height, width), count in counts.most_common(5)]
    listed += ["..."] if len(counts) > 5 else []
    return [f"sizes (height x width): {', '.join(listed)}; the sigmas and the estimate below are of the largest"]


def scan_rows(run_plan: plan.RunPlan, job: Distributed, backbone: Backbone) -> Rows:
    """Read the headers of all clips; check the columns that rewards need. Raise the DataErrors of usable_rows."""
    table = data.load_metadata(run_plan.data.file_name)
    rows, messages = _scan_table(run_plan, table, job, backbone, pairs=run_plan.pairs)
    messages += _anchor_notes(run_plan, rows)
    held_out: list[data.Row] = []
    if isinstance(run_plan, plan.GroupPlan) and run_plan.evaluation.eval_clips:
        table = data.load_metadata(run_plan.evaluation.eval_clips, "evaluation.eval_clips")
        held_out, more = _scan_table(run_plan, table, job, backbone)
        messages += [*more, *check_held_out(rows, held_out)]
    return Rows(rows, held_out, messages)


def check_held_out(rows: Sequence[data.Row], held_out: Sequence[data.Row]) -> list[str]:
    """Return a note on clips both trained on and evaluated. Raise ConfigError if none is held out."""

    def content(row: data.Row) -> tuple[str | Path, ...]:
        return (row.prompt, *(path.resolve() for path in row.files.values() if path is not None))

    trained = {content(row) for row in rows}
    shared = sum(content(row) in trained for row in held_out)
    if held_out and shared == len(held_out):
        raise ConfigError(
            "evaluation.eval_clips: all of its rows are in data.file_name, too; name other clips, or null"
        )
    return [f"note: {shared} of {len(held_out)} rows of evaluation.eval_clips are trained on, too"] if shared else []


def _scan_table(
    run_plan: plan.RunPlan, rows: Sequence[data.Row], job: Distributed, backbone: Backbone, *, pairs: bool = False
) -> tuple[list[data.Row], list[str]]:
    """Return (usable rows, messages). pairs: of clips, which no reward compares with."""
    clips, rewards = run_plan.data, [] if pairs else run_plan.rewards
    rows = data.assign_images(rows, run_plan.run.seed) if backbone.takes_image else rows
    inspect = partial(data.inspect_row, num_frames=clips.num_frames, fps=clips.fps, takes_image=backbone.takes_image)
    infos = map_shared(inspect, rows, job.shard, job.gather_lists, "headers")
    needs = {
        reward.key: cls.comparison(reward.settings)
        for i, (reward, cls) in enumerate(rewards)
        if reward.weight > 0 or reward.guards or i == 0
    }
    classes, split = {reward.key: cls for reward, cls in rewards}, run_plan.processes_per_clip
    bad_sizes = {size: plan.size_problem(clips, backbone, size, split) for size in {row.size for row in rows}}
    problems = []
    for row, info in zip(rows, infos, strict=True):
        texts = [*info.problems, bad_sizes[row.size]]
        if not row.problem:
            texts += setup_rewards.missing_columns(row, needs) + setup_rewards.unusable_prompts(row, classes)
            if row.video is None and run_plan.supervised:
                texts.append("supervised fine-tuning fits the clip of a row, and the row names none (video)")
            if pairs and row.rejected is None:
                texts.append(
                    "objective dpo without a reward takes columns chosen and rejected; fill them, or set a weight"
                )
            if row.rejected is not None and not pairs:
                texts.append(
                    "chosen and rejected are for objective dpo with all reward.terms of weight 0; empty the cells"
                )
        problems += [(row.line, text) for text in texts if text]
    good, bad = data.usable_rows(rows, problems, skip_bad_rows=clips.skip_bad_rows)
    messages, table = [f"skipped: {line}" for line in bad], rows[0].table
    setup_rewards.check_caps(good, rewards)
    if bad:
        messages.append(f"note: {table}: {len(rows) - len(good)} of {len(rows)} rows are left out (data.skip_bad_rows)")
    for reward, cls in rewards:
        if targets := [repr(target) for row in good[:5] if (target := cls.prompt_target(row.prompt))]:
            messages.append(f"{reward.key}: {cls.name} looks for {', '.join(targets)} in the first rows of {table}")
    lines = {row.line for row in good}
    good_infos = [info for row, info in zip(rows, infos, strict=True) if row.line in lines]
    sizes = (clips.height, clips.width, clips.max_pixels, clips.fps, backbone.frame_rate)
    notes = [*data.notes(good), *data.clip_notes(good, good_infos, *sizes), *size_notes(clips, good)]
    notes += prompt_notes(good, backbone, rewards) + setup_rewards.reference_notes(run_plan, good)
    return good, [*messages, *(f"note: {table}: {note}" for note in notes)]


def _anchor_notes(run_plan: plan.RunPlan, rows: Sequence[data.Row]) -> list[str]:
    """Return notes on rows without a clip to anchor at. Raise DataError if no row has an anchor."""
    without = [row for row in rows if row.video is None] if run_plan.anchor.weight else []
    base = sum(setup_rewards.takes_base_latents(run_plan, row) for row in without)
    if without and len(without) == len(rows) and not base:
        more = ", or anchor.target to reference" * any(setup_rewards.takes_base_motion(run_plan, row) for row in rows)
        raise data.DataError(f"anchor.weight: no row names a video, so no clip to anchor at; set it to 0{more}")
    counts = {"no anchor (anchor.weight)": len(without) - base, "an anchor at a video of the base model": base}
    rows_of = f"of {len(rows)} rows name no video and have"
    return [f"note: {rows[0].table}: {count} {rows_of} {what}" for what, count in counts.items() if count]


def open_cache(run_plan: plan.RunPlan) -> Cache:
    """Open the cache of values that are computed once per clip."""
    return Cache(run_plan.data.cache_dir or f"{run_plan.run.output_dir}/cache")


def find_samples(
    clips: DataConfig, rows: Sequence[data.Row], terms: Sequence[Term], store: Cache, job: Distributed
) -> list[Sample]:
    """Read the clips of scan_rows once, cache the rewards' references, and print the rows that are left out."""
    if not rows:
        return []
    rewards = [term.reward for term in terms]
    size = {name: getattr(clips, name) for name in ("height", "width", "num_frames", "max_pixels", "fps")}
    hashes = clip_scan.hash_files(rows, job.shard, job.gather_lists)
    problems = [(row.line, problem) for row in rows for problem in setup_rewards.missing_references(row, terms)]
    bad_lines = {line for line, _ in problems}
    good = [row for row in rows if row.line not in bad_lines]
    keys = {row.line: clip_scan.clip_key(row, hashes, size) for row in good}
    load = partial(clip_scan.load_sized_example, clips)
    skip = clips.skip_bad_rows
    scans = job.gather_lists(
        clip_scan.scan_clips(store, good, keys, load, rewards, job.device, job.shard, skip_photos=skip)
    )
    problems += [(scan.line, scan.problem) for scan in scans if scan.problem]
    rows, bad = data.usable_rows(rows, problems, skip_bad_rows=skip)
    for line in [*bad, *(f"line {scan.line}: {scan.skipped}" for scan in scans if scan.skipped)]:
        job.print(f"skipped: {line}")
    return clip_scan.load_samples(store, rows, keys, scans, rewards)


def make_conditions(run_plan: plan.RunPlan, backbone: Backbone, base: Mapping[str, str], store: Cache) -> Conditions:
    """Return the cached conditioning of clips. base: of `digest_base_model`."""
    first = " ".join(base.get(part, part) for part in backbone.parts_of(backbone.experts[0]))
    # two models with one VAE condition differently on an image
    image = " ".join([run_plan.model.model_name, *(base[part] for part in ("vae", "image_encoder") if part in base)])
    return Conditions(
        store=store, backbone=backbone, text=base["text_encoder"], image=image, untrained=first,
        dtype=run_plan.model.dtype, num_frames=run_plan.data.num_frames,
    )  # fmt: skip


def fill_clip_latents(
    run_plan: plan.RunPlan, conditions: Conditions, samples: Sequence[Sample], job: Distributed
) -> None:
    """Cache the latents of pairs, or of the clips that the data anchor trains on or measures. Collective."""
    clips = [sample for sample in samples if sample.row.video is not None]
    if run_plan.pairs:
        clips += [sample.rejected for sample in samples]
    elif not run_plan.anchor.weight:
        clips = clips[: run_plan.anchor.measured_clips]
    load = partial(clip_scan.load_video, run_plan.data)
    conditions.fill_latents(clips, lambda sample: load(sample.row), job.device, job.shard)
    job.wait()


def make_anchors(
    run_plan: plan.RunPlan, conditions: Conditions, samples: Sequence[Sample], device: torch.device
) -> Anchors:
    """Build the run's data anchor. samples: with their base_latents (add_base_motion)."""
    return Anchors(plan=run_plan, conditions=conditions, samples=samples, device=device)


def make_batch_builder(
    run_plan: plan.RunPlan, conditions: Conditions, samples: Sequence[Sample], job: Distributed
) -> batches.BatchBuilder | None:
    """Build the builder of batches, and cache its boundary latents. Return None for a script with groups."""
    if not isinstance(run_plan, plan.RewardFlPlan):
        return None
    builder = batches.BatchBuilder(plan=run_plan, conditions=conditions, samples=samples, device=job.device)
    if builder.cached:
        builder.fill(job.shard)
        job.wait()
    return builder


def add_base_motion(
    run_plan: plan.RunPlan,
    job: Distributed,
    store: Cache,
    terms: Sequence[Term],
    resume_point: ResumePoint,
    generate: Callable[[Sequence[Sample], int, int], tuple[int, Tensor, Tensor]],
    *tables: Sequence[Sample],
) -> list[list[Sample]]:
    """Return the samples of tables, with the base model's motion where `takes_base_motion`. Collective.

    Those of the first table have base_latents where `takes_base_latents`. generate: (samples of a table, row, noise) ->
    (row, the base model's video (3, F, H, W), its latents).
    """
    sampler = {
        "base": dict(resume_point.base),
        "sample": run_plan.sample.model_dump(mode="json", include=SAMPLER_KEYS),
        "dtype": run_plan.model.dtype,
        "boundary": run_plan.model.min_timestep_boundary,
        "seed": run_plan.run.seed,
    }

    def with_latents(sample: Sample) -> Sample:
        names = {"id": sample.row.id, "prompt": sample.row.prompt, "clip": digest(sample.clip)}
        key = {"kind": "base_latents", "sampler": digest(sampler), **names}
        return replace(sample, base_latents=key) if setup_rewards.takes_base_latents(run_plan, sample.row) else sample

    noises, completed = run_plan.base_noises, []
    for samples in ([with_latents(sample) for sample in tables[0]], *tables[1:]):
        rows = [i for i, sample in enumerate(samples) if setup_rewards.takes_base_motion(run_plan, sample.row)]
        videos = partial(generate, samples)
        completed.append(_add_motion(store, job, samples, rows, terms, videos, sampler, noises))
    return completed


@torch.no_grad()
def _add_motion(
    store: Cache,
    job: Distributed,
    samples: Sequence[Sample],
    rows: Sequence[int],
    terms: Sequence[Term],
    generate: Callable[[int, int], tuple[int, Tensor, Tensor]],
    sampler: Key,
    noises: int,
) -> list[Sample]:
    """Return the samples, with the base model's motion in the references of `rows`.

    It is a mean over the row's noises 0 .. `noises` - 1, and is cached; so are the latents of noise 0 where the sample
    names a cache entry for them. sampler: identifies the model, its settings and seed.
    """
    if not rows:
        return list(samples)
    rewards = [i for i, term in enumerate(terms) if term.reward.measures_motion]

    def key_of(row: int, i: int) -> Key:
        reference = clip_scan.reference_key(samples[row].clip, terms[i].reward, samples[row].row.prompt)
        names = {"id": samples[row].row.id, "prompt": samples[row].row.prompt, "noises": noises}
        return {"kind": "motion", "reference": digest(reference), "sampler": digest(sampler), **names}

    def find_missing() -> list[int]:
        keys = {row: [samples[row].base_latents, *(key_of(row, i) for i in rewards)] for row in rows}
        return [row for row in rows if any(key and store.get(key) is None for key in keys[row])]

    missing = job.run_on_main(find_missing, ())
    for row, in_shard in tqdm(job.shard.padded(missing), desc="base videos", disable=job.shard.quiet):
        videos, sample = list[Tensor](), samples[row]
        for noise in range(noises if rewards else 1):
            _, video, x0 = generate(row, noise)
            videos.append(video.float())
            if noise == 0 and in_shard and sample.base_latents:
                store.put(sample.base_latents, {"latents": x0.float()})
        for i in rewards if in_shard else ():
            motion = clip_scan.average_motion(terms[i].reward, sample.references[i], videos, sample.row.prompt)
            store.put(key_of(row, i), {"usable": torch.tensor(motion is not None), **(motion or {})})
    job.wait()
    completed = list(samples)
    for row in rows:
        references = list(samples[row].references)
        for i in rewards:
            motion = read_entry(store, key_of(row, i))
            references[i] = {**(references[i] or {}), **motion} if motion.pop("usable") else None
        completed[row] = replace(samples[row], references=tuple(references))
    return completed


def fill_conditions(
    sample: SharedSampleConfig, conditions: Conditions, samples: Sequence[Sample], job: Distributed
) -> Conditioning | None:
    """Compute the missing conditioning. Return the negative prompt's on the device, or None without guidance."""
    guided = sample.guidance_scale != 1
    conditions.fill(samples, job.device, job.shard, [sample.negative_prompt] if guided else [])
    job.wait()
    return move_to(conditions.text_conditioning(sample.negative_prompt), job.device) if guided else None


def make_sampler(
    run_plan: plan.RunPlan,
    job: Distributed,
    conditions: Conditions,
    decoder: Decoder,
    model: Experts,
    negative: Conditioning | None,
    builder: batches.BatchBuilder | None,
) -> DeployedSampler | batches.TrainingSampler:
    """Build the sampler of evaluations, sample videos and the base's videos. negative: of fill_conditions."""
    if builder is not None:
        return batches.TrainingSampler(builder=builder, model=model, decoder=decoder, negative=negative)
    assert isinstance(run_plan, plan.GroupPlan)
    return DeployedSampler(
        plan=run_plan, model=model, decoder=decoder, conditions=conditions, negative=negative, device=job.device
    )
