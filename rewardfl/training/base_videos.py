"""The base model's own videos: motion for the rewards and latents for the data anchor of a row without a clip."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl.data import cache
from rewardfl.data.cache import Cache, Key
from rewardfl.rewards import Reward
from rewardfl.rewards.base import Reference
from rewardfl.rewards.scoring import Term
from rewardfl.training.clip_scan import reference_key
from rewardfl.training.distributed import Distributed
from rewardfl.training.samples import Sample
from rewardfl.training.shard import read_entry


@torch.no_grad()
def add_motion(
    store: Cache,
    job: Distributed,
    samples: Sequence[Sample],
    rows: Sequence[int],
    terms: Sequence[Term],
    generate: Callable[[int, int], tuple[int, Tensor, Tensor]],
    sampler: Key,
    noises: int,
) -> list[Sample]:
    """Return the samples, with the base model's motion in the references of `rows`. Collective.

    generate: (row, noise) -> (row, the base model's video (3, F, H, W), its latents). sampler: identifies its model,
    settings and seed.
    The motion is a mean over the row's noises 0 .. `noises` - 1, and is cached; so are the latents of noise 0 where the
    sample names a cache entry for them.
    """
    if not rows:
        return list(samples)
    rewards = [i for i, term in enumerate(terms) if term.reward.measures_motion]

    def key_of(row: int, i: int) -> Key:
        reference = reference_key(samples[row].clip, terms[i].reward, samples[row].row.prompt)
        names = {"id": samples[row].row.id, "prompt": samples[row].row.prompt, "noises": noises}
        return {"kind": "motion", "reference": cache.digest(reference), "sampler": cache.digest(sampler), **names}

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
            motion = average_motion(terms[i].reward, sample.references[i], videos, sample.row.prompt)
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


def average_motion(
    reward: Reward, reference: Reference, videos: Sequence[Tensor], prompt: str
) -> dict[str, Tensor] | None:
    """Return what Reward.with_motion changes in a reference, means over the videos; None where none can be used."""
    results = [reward.with_motion(reference, video, prompt) for video in videos]
    changes = [
        {name: value for name, value in result.items() if reference is None or value is not reference.get(name)}
        for result in results
        if result is not None
    ]
    names = dict.fromkeys(name for change in changes for name in change)
    means = {name: torch.stack([c[name].float() for c in changes if name in c]).nanmean(0) for name in names}
    return means if changes else None
