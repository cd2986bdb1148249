"""The run's configuration: one YAML file plus `section.key=value` overrides, checked before anything loads.

The dataclasses below are the schema and the reference: a field's comment says what it means, its type says
what it may be. Relative paths are relative to the directory the command is started in. There are two schemas,
RunConfig of train_reward_fl.py and GrpoConfig of train_flow_grpo.py; the section `grpo` tells a file of the second.

When a run goes on, its keys must be what they were, but for those that are marked: Free, ByContent (a path: what it
leads to must be what it was), IfNamed (in run.resume_with_changes), Alike (from one of the values to another).
"""

import dataclasses
import difflib
import json
import math
import os
import re
import types
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from rewardfl.rewards.face import pack as face_pack


class ConfigError(ValueError):
    """A setting that cannot work. The message has one line per problem: the key, the value, the way out."""


@dataclass(frozen=True)
class Range:
    """Which values a setting may take, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Resumed:
    """What a key may do when a run goes on. Without such a mark it must be as it was."""

    words: str


@dataclass(frozen=True)
class Alike:
    """Values that compute the same numbers: a run may go on with one for the other."""

    values: tuple[str, ...]


T = TypeVar("T")
FREE = Resumed("may change: it is no part of what is computed")
BY_CONTENT = Resumed("a path, which may change: what it leads to is compared")
IF_NAMED = Resumed("may change, or its content, when run.resume_with_changes names it, which run.json then lists")
Free = Annotated[T, FREE]
ByContent = Annotated[T, BY_CONTENT]
IfNamed = Annotated[T, IF_NAMED]


def _between(low: float, high: float) -> Range:
    return Range(f"in {low:,}..{high:,}", lambda value: low <= value <= high)


def _at_most(high: float) -> Range:
    return Range(f"at most {high:,}", lambda value: value <= high)


def _one_line(text: str) -> bool:
    return "\n" not in text and "\t" not in text  # _convert refuses the other control characters everywhere


# The upper ends are far above what anybody trains with. They keep a slip of the finger (1e30) from being found when
# memory or float32 runs out, hours later.
_SIZE = Range("0 or of a size in 1e-12..1e12", lambda value: value == 0 or 1e-12 <= abs(value) <= 1e12)
Count = Annotated[int, Range("at least 1", lambda value: value >= 1), _at_most(1_000_000_000)]
Whole = Annotated[int, Range("0 or more", lambda value: value >= 0), _at_most(1_000_000_000)]
Seed = Annotated[int, Range("in 0..2**63 - 1", lambda value: 0 <= value < 2**63)]
Batch = Annotated[Count, _at_most(10_000)]
Steps = Annotated[Count, _at_most(100_000)]
Denoising = Annotated[Count, _at_most(1_000)]  # sampling steps: the model knows 1000 timesteps
Positive = Annotated[float, Range("greater than 0", lambda value: value > 0), _SIZE]
NonNegative = Annotated[float, Range("0 or more", lambda value: value >= 0), _SIZE]
Share = Annotated[float, Range("in 0..1", lambda value: 0 <= value <= 1)]
Side = Annotated[Count, _at_most(16_384)]
Pixels = Annotated[int, Range("at least 256 (16 x 16)", lambda value: value >= 256), _at_most(16_384**2)]
Setting = str | bool | int | float | None
Text = Annotated[
    str, Range("a text that is not empty", lambda value: value.strip() != ""), Range("a text of one line", _one_line)
]
Line = Annotated[str, Range("a text of one line", _one_line)]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Of both scripts. A step is one optimizer update."""

    # Folder for run.json, metrics.jsonl, checkpoints/ and samples/. Holds one run.
    output_dir: Free[Text]
    # Seed of the data order, of every sample's noise and of the adapter's initial values.
    seed: Seed = 42
    # A checkpoint and the sample videos are written every this many steps (and after the last one); Flow-GRPO writes
    # them at the end of the epoch that these steps fall into.
    save_steps: Free[Count] = 25
    # Only the last this many checkpoints are kept, and the one that checkpoints/best points at; null keeps all.
    keep_last: Free[Count | None] = None
    # Metrics reach the console and the tracker every this many steps; metrics.jsonl has every step.
    logging_steps: Free[Count] = 1
    # "auto" goes on from the latest complete checkpoint in output_dir and starts anew when there is none;
    # a path names a checkpoint (.../checkpoints/step-000025); false starts anew.
    resume_from_checkpoint: Free[Text | Literal[False]] = "auto"
    # Keys marked IfNamed that may differ from what run.json says when a run goes on, such as [train.learning_rate].
    # Each change is printed and listed in run.json (key, old, new, step). May stay when nothing differs any more.
    resume_with_changes: Free[tuple[str, ...]] = ()
    # Tracker beside metrics.jsonl, of the first process. wandb has to be installed (pip install wandb).
    log_with: Free[Literal["tensorboard", "wandb", "none"]] = "tensorboard"
    # How many clips of sample videos are written at each save.
    sample_videos: Free[Whole] = 2
    # Threads per process when there is no GPU; null divides the cores among the processes (accelerate launch
    # would leave each with one), at most four for each core of the machine. As on another machine, their number changes
    # the rounding.
    cpu_threads: Free[Count | None] = None


@dataclass(frozen=True, kw_only=True)
class Model:
    # The only family so far: Wan2.2 image-to-video A14B and models of its shape.
    model_name: Literal["wan2_2"] = "wan2_2"
    # Pipeline folder in diffusers layout (model_index.json, transformer/, transformer_2/, vae/, ...), or a
    # wan22_paths.json that names the original files (examples/wan22_paths.json). Empty: the next key says.
    model_paths: ByContent[Line] = ""
    # Instead of model_paths: original files in hub repositories, "repository:pattern, ..." with high_noise,
    # low_noise, t5 and VAE in the patterns. Taken from the local hub cache; fetched only with allow_download.
    model_id_with_origin_paths: ByContent[str] = ""
    # Whether what the hub cache lacks may be downloaded.
    allow_download: Free[bool] = False
    # Tokenizer folder; empty takes the model's own (original files have none but on the hub).
    tokenizer_path: ByContent[Line] = ""
    # Distillation LoRAs (Wan2.2-Lightning, one file per expert, any tool's names), part of the base model.
    distill_lora_high: ByContent[Line] = ""
    distill_lora_low: ByContent[Line] = ""
    # fuse: added to the weights in the file's precision, before the one rounding to `dtype`. adapter: kept
    # beside them and answering in policy and reference alike; slower, and exact whatever `dtype` is.
    distill_lora_mode: Literal["fuse", "adapter"] = "fuse"
    # Experts whose adapter is trained, comma separated: dit (high noise), dit2 (low noise).
    trainable_models: Text = "dit2"
    # Sigma at or above which the high-noise expert answers; null takes the pipeline's boundary_ratio.
    min_timestep_boundary: Share | None = None
    # Upper end of the high-noise expert's sigmas; anything but 1 is refused, nothing else could answer there.
    max_timestep_boundary: float = 1.0
    # What the frozen weights are loaded as. The adapter is always float32.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Of train_reward_fl.py."""

    # Where the expert that is not trained lives. gpu: beside the trained one. cpu_swap: in host memory, its
    # blocks are copied to the GPU one ahead of their turn. fp8: on the GPU in 8 bits, half the size, its weights
    # rounded by about 3 %. boundary_cache: nowhere while training; the latents that it hands over at the boundary
    # are computed once per clip and noise, and read from the cache (needs sample.noises_per_sample: n).
    untrained: Annotated[Literal["gpu", "cpu_swap", "fp8", "boundary_cache"], Alike(("gpu", "cpu_swap"))] = "gpu"


@dataclass(frozen=True, kw_only=True)
class GrpoPlacement:
    """Of train_flow_grpo.py, whose every rollout starts from new noise: nothing at the boundary could be cached."""

    # As in Placement.
    untrained: Annotated[Literal["gpu", "cpu_swap", "fp8"], Alike(("gpu", "cpu_swap"))] = "gpu"


@dataclass(frozen=True, kw_only=True)
class Lora:
    # Which models carry the adapter; null means trainable_models, and nothing else is offered.
    lora_base_model: Free[str | None] = None
    # Rank of the update; the A14B's layers, of 5120 inputs, have no use for a higher one than that.
    lora_rank: Annotated[Count, _at_most(5_120)] = 32
    # The update is scaled by lora_alpha / lora_rank; null means lora_rank, a scale of 1.
    lora_alpha: Annotated[Positive, _at_most(100_000)] | None = None
    # Adapted layers, comma separated: Wan's short names or diffusers' (to_q, to_out.0, ffn.net.2, ...).
    lora_target_modules: Text = "q,k,v,o,ffn.0,ffn.2"
    # A checkpoint folder (.../checkpoints/latest) or an adapter's file or folder, of another run or tool, of the same
    # rank, alpha and layers: the adapter starts from its weights, the optimizer and the steps start anew. The KL's
    # reference stays the base model without an adapter. A run that goes on from a checkpoint of its own does not read
    # it, but its content must be what it was. null: the adapter starts from zero.
    init_from: ByContent[IfNamed[Text | None]] = None


@dataclass(frozen=True, kw_only=True)
class Data:
    # metadata.csv with the columns video and prompt, and if you like image (the model's input instead of the clip's
    # first frame) and reference_video (the clip that the face is taken from; motion is compared with it, too).
    # Paths are relative to the file. examples/metadata.csv shows one, tools/check_dataset.py checks one.
    file_name: ByContent[Text]
    # Pixels; clips are resized to cover height x width and cropped at the centre. Multiples of 16.
    height: Side = 480
    width: Side = 832
    # Instead of height and width, which are then not used: every clip keeps its own shape and is scaled down to at
    # most this many pixels, both sides multiples of 16. A forward pass takes clips of one size.
    max_pixels: Pixels | None = None
    # Frames used of each clip, from its start: 4k + 1 for the Wan VAE.
    num_frames: Annotated[Count, _at_most(10_000)] = 81
    # Frames taken per second of a clip, by their times (Wan was trained at 16); clips that have fewer are refused.
    # null: the frames as they are stored, whatever their rate.
    fps: Annotated[Positive, _between(0.1, 1_000)] | None = None
    # Folder for what is computed once per clip: text embeddings, image latents, face pools, boundary latents. null:
    # <run.output_dir>/cache. Runs may share one; all processes must see the same.
    cache_dir: Free[Text | None] = None
    # Leave out rows that cannot be used (and say which) instead of stopping with a list of them; of a clip whose cache
    # entries are lost during the run, train on the next one instead, and count it (data/replaced).
    skip_bad_rows: Free[bool] = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    # Sampling steps from pure noise to the clean video.
    num_inference_steps: Denoising = 8
    # Shift of the sigma schedule: shift*s / (1 + (shift - 1)*s) over linspace(1, 0, steps + 1).
    shift: Annotated[Positive, _between(0.01, 100)] = 5.0


@dataclass(frozen=True, kw_only=True)
class Sample(Schedule):
    """Of train_reward_fl.py."""

    # First and last step (from 0) that carry gradient. If final_timestep is not the last step, sampling ends
    # there with the x0 prediction.
    mid_timestep: Whole = 4
    final_timestep: Whole = 7
    # The steps that carry gradient as an increasing list within 0..final_timestep, instead of mid..final.
    active_steps: tuple[int, ...] | None = None
    # How the reward's gradient travels back from one active step to the one before: chain (exactly), bridge
    # (damped), drtune (not at all); last differentiates final_timestep alone, whatever mid_timestep says.
    gradient_mode: Literal["chain", "bridge", "drtune", "last"] = "chain"
    # Weight of that path; null takes the mode's: chain 1, bridge 0.2, drtune 0, last 1. Only bridge takes
    # another, between 0 and 1.
    coupling: Share | None = None
    # "fresh": new noise each time a clip comes up; n: each clip has n noises, used in turn, so that what the
    # steps before the first active one compute can be cached.
    noises_per_sample: Literal["fresh"] | Batch = "fresh"


@dataclass(frozen=True, kw_only=True)
class GrpoSample(Schedule):
    """Of train_flow_grpo.py."""

    # Scale of classifier-free guidance in rollout, replay and reference alike; 1 is none, takes half the time, and is
    # what distilled models and reinforcement learning do best with.
    guidance_scale: Annotated[Positive, _at_most(100)] = 1.0
    # What guidance leads away from.
    negative_prompt: str = ""

    @property
    def final_timestep(self) -> int:
        """A rollout always takes every step."""
        return self.num_inference_steps - 1


@dataclass(frozen=True, kw_only=True)
class GrpoTerm:
    # A reward as in reward.name.
    name: Text
    # Its part in what is trained, weight * score. 0: it is only measured.
    weight: NonNegative = 0.0
    # Arguments of the reward.
    settings: dict[str, Setting] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Term(GrpoTerm):
    # What is trained is weight * (score - mean) / std.
    mean: float = 0.0
    std: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Of both scripts."""

    # What is trained: likeness of the generated face to the face of the real clip (face_identity), another reward that
    # `python -m rewardfl.rewards` lists, or a class of your own, package.module:Class or path/to/file.py:Class.
    name: Text = "face_identity"
    # Arguments of a reward other than face_identity, whose are the keys below.
    settings: IfNamed[dict[str, Setting]] = dataclasses.field(default_factory=dict)
    # Folder with one face detector and one recogniser (.onnx): antelopev2, buffalo_l, AuraFace; the folder around
    # it that the zip unpacks to and an insightface root (models/antelopev2) will do.
    reward_model_path: ByContent[Text | None] = None
    # A second such folder that only judges (metric reward/held_out) and is never trained on; null: no judge.
    held_out_model_path: ByContent[IfNamed[Text | None]] = None
    # Side in pixels of the square that frames are fitted into for face detection.
    det_size: Annotated[Count, _at_most(4_096)] = 640
    # Likeness above the cap is not paid for. self_similarity: the real clip's own mean pairwise likeness.
    cap: IfNamed[Literal["self_similarity", "none"] | float] = "self_similarity"
    # Faces embedded at a time; a smaller number takes less memory, and rounds otherwise.
    recogniser_chunk: IfNamed[Count] = 8
    # A warning is logged when the mean motion, as a ratio to the real clip's, falls below this.
    motion_alarm: Free[NonNegative] = 0.8


@dataclass(frozen=True, kw_only=True)
class Reward(Rewards):
    """Of train_reward_fl.py."""

    # More rewards by any label, which the metrics carry (reward/<label>): trained with their weight, or only measured.
    others: IfNamed[dict[str, Term]] = dataclasses.field(default_factory=dict)
    # loss = -reward_weight * (reward - reward_mean) / reward_std + kl_weight * KL. The mean and std are those
    # of the untrained model's reward, so that reward_weight means the same for every recogniser.
    reward_weight: IfNamed[NonNegative] = 0.1
    reward_mean: IfNamed[float] = 0.54
    reward_std: IfNamed[Positive] = 0.16
    # 0 skips the reference model's forward passes.
    kl_weight: IfNamed[NonNegative] = 1.0
    # Whether the KL's gradient also travels back along the trajectory, or only into the step it is taken at.
    kl_gradient: IfNamed[Literal["through_trajectory", "fixed_trajectory"]] = "through_trajectory"


@dataclass(frozen=True, kw_only=True)
class GrpoReward(Rewards):
    """Of train_flow_grpo.py, where a reward needs no gradient."""

    # More rewards by any label, which the metrics carry (reward/<label>): trained with their weight, or only measured.
    others: IfNamed[dict[str, GrpoTerm]] = dataclasses.field(default_factory=dict)
    # Part of reward.name in the weighted sum.
    reward_weight: IfNamed[NonNegative] = 1.0
    # Of face_identity: added to what is trained are coverage_weight * (share of frames in which a face is found) and
    # motion_weight * (motion as a ratio to the real clip's, at most 1). Neither has a gradient; here both can be paid.
    coverage_weight: IfNamed[NonNegative] = 0.0
    motion_weight: IfNamed[NonNegative] = 0.0
    # Seconds after which a reward that runs beside the rollouts (such as `remote`) has failed for its samples.
    reward_timeout: Free[Annotated[Positive, _at_most(1_000_000)]] = 600.0


@dataclass(frozen=True, kw_only=True)
class GrpoTrain:
    """Of both scripts; the defaults are train_flow_grpo.py's."""

    # Peak learning rate of AdamW.
    learning_rate: IfNamed[Annotated[Positive, _at_most(1)]] = 1e-4
    # After warmup: constant (both spellings), or cosine down to 0 at the last step.
    lr_scheduler_type: Annotated[
        IfNamed[Literal["constant", "constant_with_warmup", "cosine"]], Alike(("constant", "constant_with_warmup"))
    ] = "constant"
    # Steps of linear warmup from 0; 0 is none.
    warmup_steps: IfNamed[Whole] = 10
    # AdamW's decoupled weight decay.
    weight_decay: IfNamed[Annotated[NonNegative, _at_most(1)]] = 0.0
    # Steps (optimizer updates) in all; null takes num_train_epochs passes over the data. A run may go on to another
    # number of them; under a cosine, which they stretch, only if run.resume_with_changes says so.
    max_steps: Free[IfNamed[Steps | None]] = None
    # Passes over the data when max_steps is null.
    num_train_epochs: Free[IfNamed[Annotated[Count, _at_most(10_000)]]] = 1
    # Clips per process and forward pass.
    per_device_train_batch_size: Free[Batch] = 1
    # Gradients are scaled down to this norm when they exceed it.
    max_grad_norm: IfNamed[Positive] = 1.0
    # Recompute activations in the backward pass instead of keeping them.
    use_gradient_checkpointing: Free[bool] = True
    # Keep what checkpointing stores (the blocks' inputs) in host memory until the backward pass.
    use_gradient_checkpointing_offload: Free[bool] = False
    # Steps in a row that may be skipped for a loss or gradient that is not finite; one more stops the run.
    max_nonfinite: Free[Whole] = 3


@dataclass(frozen=True, kw_only=True)
class Train(GrpoTrain):
    """Of train_reward_fl.py."""

    # As in GrpoTrain; the reward's own gradient is far less noisy than a policy gradient, and drifts sooner.
    learning_rate: IfNamed[Annotated[Positive, _at_most(1)]] = 2.5e-6
    # Forward passes per process and step.
    gradient_accumulation_steps: Free[Batch] = 1
    # Clips per step over all processes, as a check: must equal per device x accumulation x processes.
    train_batch_size: Free[Count | None] = None
    # The VAE decoder's caches between decode and its backward pass. keep: on the GPU; offload: in host memory;
    # segment: every few chunks' only, the others are recomputed (one decode more).
    decode_caches: Free[Literal["keep", "offload", "segment"]] = "keep"


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """Of train_flow_grpo.py. An epoch rolls out groups * group_size samples and trains on them."""

    # Rollouts of one clip (prompt and image), which are compared with each other.
    group_size: Annotated[int, Range("at least 2", lambda value: value >= 2), _at_most(1_000)] = 16
    # Groups per epoch, over all processes.
    groups: Batch = 48
    # Where the members of a group are rolled out: contiguous, in a row on as few processes as possible; spread, on all.
    spread: Free[Literal["contiguous", "spread"]] = "contiguous"
    # All members of a group start from the same noise, and differ by the noise of the SDE steps alone. The steps before
    # the window are then computed once per group.
    same_noise_in_group: bool = False
    # Updates that share an epoch's samples, each taking a part of them. The ratio is 1 in the first alone.
    updates_per_epoch: Batch = 1
    # Times that an epoch's samples are gone through.
    inner_epochs: Batch = 1

    # How the stochastic steps draw: flow (Flow-GRPO), dance (DanceGRPO) or cps (Flow-CPS), with this much noise.
    sde: Literal["flow", "dance", "cps"] = "flow"
    noise_level: IfNamed[Annotated[Positive, _between(0.001, 10)]] = 0.7
    # Which steps are stochastic, and trained; the others are steps of the ODE. list: window_steps. random: window_size
    # steps in a row, drawn anew in each epoch. fraction: window_fraction of them, drawn anew in each epoch.
    window: Literal["list", "random", "fraction"] = "random"
    # For list.
    window_steps: tuple[int, ...] | None = None
    # For random.
    window_size: Denoising = 2
    # For fraction.
    window_fraction: Share = 0.6
    # First and last + 1 of the steps that random and fraction draw from; null is all. Steps of an expert that is not
    # trained and the last step, whose noise nothing would remove, are never drawn.
    window_bounds: tuple[int, ...] | None = None
    # What a rollout leaves for the replay (latents and conditioning of the window) is kept here until the update.
    samples_on: Free[Literal["gpu", "cpu"]] = "gpu"

    # guard: GRPO-Guard's ratio without its bias, every step weighted by 1/dt. clip: PPO's, for images (at the size of
    # a video its bias silences every sample of negative advantage).
    objective: Literal["guard", "clip"] = "guard"
    # The ratio is clipped to 1 - clip_range .. 1 + clip_range_high (null: clip_range). Not transferable between
    # objectives, resolutions and kinds of sde.
    clip_range: IfNamed[Annotated[float, Range("between 0 and 1", lambda value: 0 < value < 1)]] = 2e-6
    clip_range_high: IfNamed[Positive | None] = None
    # Weight of the KL divergence of the steps from those of the untrained model; 0 skips its forward passes.
    kl_weight: IfNamed[NonNegative] = 0.0
    # What (reward - mean of the group) is divided by: the group's own standard deviation, that of all the epoch's
    # rewards, or nothing.
    advantage_std: IfNamed[Literal["group", "global", "none"]] = "group"
    # Several rewards: normalise their weighted sum, or each one before summing (a reward of small spread is heard too).
    advantage_of: IfNamed[Literal["sum", "per_reward"]] = "sum"
    advantage_clip: IfNamed[Positive] = 5.0
    # Largest |log-probability of the replay - of the rollout| before an epoch's first update; more stops the run.
    # null: 0 in float32, 0.1 * clip_range in bfloat16.
    ratio_tolerance: Free[NonNegative | None] = None
    # The averaged weights, which are evaluated, shown and saved: weight of the old average at each update (rising from
    # 0.1 to this). 0: the last weights themselves.
    ema_decay: Annotated[float, Range("in 0..1, 1 excluded", lambda value: 0 <= value < 1)] = 0.9


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Of train_flow_grpo.py: held-out clips, sampled without noise (ODE) with the averaged weights."""

    # metadata.csv of clips that are not trained on; null: no evaluation, and sample videos of training clips. Measure
    # by a reward that is not trained on, too: reward.held_out_model_path, or one of reward.others with weight 0.
    eval_clips: ByContent[IfNamed[Text | None]] = None
    # Every this many steps (at the end of the epoch that these fall into), before the first and after the last.
    eval_steps: Free[Count] = 50
    # Sampling steps; null takes sample.num_inference_steps.
    eval_inference_steps: IfNamed[Denoising | None] = None
    # Videos per clip, each from a noise of its own, the same ones every time.
    eval_noises: IfNamed[Batch] = 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Of train_reward_fl.py."""

    run: Run
    model: Model
    experts: Placement = Placement()
    lora: Lora
    data: Data
    sample: Sample
    reward: Reward
    train: Train


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Of train_flow_grpo.py."""

    run: Run
    model: Model
    experts: GrpoPlacement = GrpoPlacement()
    lora: Lora
    data: Data
    sample: GrpoSample
    reward: GrpoReward
    train: GrpoTrain
    grpo: Grpo
    evaluation: Evaluation = Evaluation()


AnyConfig = RunConfig | GrpoConfig
SCRIPTS = {RunConfig: "train_reward_fl.py", GrpoConfig: "train_flow_grpo.py"}
EXPERTS = {"dit": "high_noise", "dit2": "low_noise"}
COUPLING = {"chain": 1.0, "bridge": 0.2, "drtune": 0.0, "last": 1.0}
SECTIONS = {schema: get_type_hints(schema) for schema in SCRIPTS}
# section.key -> its marks: Range, Resumed, Alike
MARKS = {
    f"{section}.{key}": get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for sections in SECTIONS.values()
    for section, kind in sections.items()
    for key, hint in get_type_hints(kind, include_extras=True).items()
}


# ------------------------------------------------------------------------------------------------------------
# Reading


def load(path: str | Path, overrides: Sequence[str] = (), schema: type | None = None) -> AnyConfig:
    """The checked configuration of YAML file `path` with `section.key=value` overrides (YAML values) applied.

    schema: RunConfig or GrpoConfig, of the script that asks; None takes the file's.

    Raises ConfigError for a file that cannot be read or is another script's, unknown or missing keys, wrong types,
    values out of range and combinations that cannot work.
    """
    raw = _read(Path(path))
    of_file = GrpoConfig if "grpo" in raw else RunConfig
    if schema not in (None, of_file):
        has = "has a" if of_file is GrpoConfig else "has no"
        raise ConfigError(f"{path} {has} section grpo, so it is for {SCRIPTS[of_file]}, not {SCRIPTS[schema]}")
    return parse(raw, overrides)


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> AnyConfig:
    """`load` of what a file would hold: {section: {key: value}}, as in run.json's "config"."""
    schema = GrpoConfig if "grpo" in raw else RunConfig
    known = SECTIONS[schema]
    problems = [problem for text in overrides for problem in _override(raw, text, known)]
    sections = {}
    problems += [_unknown_section(name, known) for name in raw if name not in known]
    for name, section in known.items():
        sections[name], found = _build(section, raw.get(name, {}), name, known)
        problems += found
    _stop_at(problems)
    cfg = schema(**sections)
    _stop_at(_conflicts(cfg))
    return cfg


def to_dict(cfg: AnyConfig) -> dict[str, dict[str, Any]]:
    """{section: {key: value}} of plain JSON and YAML values."""
    sections = dataclasses.asdict(cfg)
    return {name: {key: _plain(value) for key, value in section.items()} for name, section in sections.items()}


def flat(cfg: AnyConfig) -> dict[str, str]:
    """{section.key: value} as text, which every tracker takes."""
    return {f"{section}.{key}": str(value) for section, keys in to_dict(cfg).items() for key, value in keys.items()}


def dump(cfg: AnyConfig) -> str:
    """YAML text with every key written out; `load` reads it back to the same configuration."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _stop_at(problems: Sequence[str], most: int = 30) -> None:
    """ConfigError with the problems, a line each, of which the first `most` are written out."""
    if problems:
        more = [f"... and {len(problems) - most} more problems"] if len(problems) > most else []
        raise ConfigError("\n".join([*problems[:most], *more]))


def _shown(value: Any) -> str:
    """`value` as messages show it: on one line, without control characters, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# What is read is bounded before it is built: in bytes, in values (an alias counts as all that it stands for) and in
# levels. The longest configuration of ours has 150 values on 5 levels.
MOST_BYTES, MOST_VALUES, MOST_LEVELS = 1_000_000, 5_000, 20

_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader for null, bool, int, float, str, lists and mappings alone: a date stays a text.

    Of two equal keys, SafeLoader silently keeps the last; this one refuses the second, also where `<<` brings it.
    """

    yaml_constructors = {
        tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag in {*_TAGS, None}
    }
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in patterns if tag in {*_TAGS, _MERGE}]
        for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):  # `!!map text` is none
            self.flatten_mapping(node)
            keys = [key.value for key, _ in node.value]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise _refusal(f"{_shown(key)} is given twice; remove one", node.value[i][0])
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ArithmeticError, LookupError, ValueError) as error:  # what yaml's constructors raise for `!!int abc`
            kind = node.tag.rpartition(":")[2]
            raise _refusal(f"{_shown(node.value)} cannot be read as {kind}", node) from error
        if type(value) is int and value.bit_length() > 64:
            raise _refusal(f"{_shown(node.value)} is a number of more than 64 bits", node)
        return value


def _refusal(problem: str, at: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _check_extent(text: str) -> None:
    """YAMLError unless what `text` stands for stays within MOST_VALUES and MOST_LEVELS. Nothing is built for it."""
    still_open: list[list] = []  # [anchor, values, levels] of the lists and mappings around this event
    named: dict[str, tuple[int, int]] = {}  # anchor -> (values, levels)
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            still_open.append([event.anchor, 1, 1])
            if len(still_open) > MOST_LEVELS:
                raise _refusal(f"lists and mappings in more than {MOST_LEVELS} levels", event)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, values, levels = still_open.pop()
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == outer for outer, _, _ in still_open):
                raise _refusal(f"{_shown(event.anchor)} stands within itself", event)
            anchor, (values, levels) = None, named.get(event.anchor, (1, 1))  # what is not named, the loader refuses
        elif isinstance(event, yaml.ScalarEvent):
            anchor, values, levels = event.anchor, 1, 1
        else:
            continue
        if anchor is not None:
            named[anchor] = values, levels
        if still_open:
            outer = still_open[-1]
            outer[1], outer[2] = outer[1] + values, max(outer[2], levels + 1)
            if outer[1] > MOST_VALUES or len(still_open) + levels > MOST_LEVELS:
                raise _refusal(f"more than {MOST_VALUES} values or {MOST_LEVELS} levels, aliases written out", event)


def _parse(text: str, where: str) -> Any:
    """What YAML `text` stands for. ConfigError with the line, in one line, for what is not valid."""
    try:
        _check_extent(text)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{where} is not valid YAML: line {line}: no text holds the character {error.character:#04x}"
        ) from error
    except yaml.MarkedYAMLError as error:
        problem = " ".join(" ".join(filter(None, (error.context, error.problem))).split())[:150]
        problem = problem if problem.isprintable() else repr(problem)
        raise ConfigError(f"{where} is not valid YAML: line {error.problem_mark.line + 1}: {problem}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"config file not found: {path}")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, a configuration at most {MOST_BYTES}")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: is not UTF-8 (byte {content[error.start]:#04x}); save it as UTF-8"
        ) from error
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold sections ({', '.join(SECTIONS[RunConfig])}) with keys beneath them")
    return raw


def _override(raw: dict[str, Any], text: str, sections: Mapping[str, type]) -> list[str]:
    """Put "section.key=value" into `raw`; the problems that kept it from going there."""
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not equals:
        return [f"override {_shown(text)} must have the form section.key=value"]
    if section not in sections:
        return [_unknown_section(section, sections)]
    if not dot or not key:
        return [f"override {_shown(text)} must name a key: {section}.<key>=value"]
    if not isinstance(raw.setdefault(section, {}), dict):
        return []  # _build says what is wrong with the section
    raw[section][key] = _parse(value, f"override {_shown(text)}")
    return []


def _unknown_section(name: str, sections: Mapping[str, type]) -> str:
    place = _place(name, sections)
    if place is not None:
        return f"{name} -> {place}.{name}: settings live in sections, move it there"
    if name in SECTIONS[GrpoConfig]:
        return f"section {name} is for {SCRIPTS[GrpoConfig]}, whose files have a section grpo; remove it"
    return f"unknown section {_shown(name)}{_did_you_mean(name, sections)}; sections are {', '.join(sections)}"


def _unknown_key(section: str, key: str, known: Sequence[str], sections: Mapping[str, type]) -> str:
    place = _place(key, sections)
    if place is not None:
        return f"{section}.{key} -> {place}.{key}: the key belongs to another section, move it there"
    for schema, others in SECTIONS.items():
        if _place(key, others) is not None and others is not sections:
            return f"{section}.{key} is a setting of {SCRIPTS[schema]} alone; remove it"
    return f"unknown key {_shown(f'{section}.{key}')}{_did_you_mean(key, known)}"


def _place(key: str, sections: Mapping[str, type]) -> str | None:
    """The section that has a key of this name."""
    return next((name for name, kind in sections.items() if key in get_type_hints(kind)), None)


def _did_you_mean(word: Any, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(word)[:80], list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _build(section: type, raw: Any, name: str, sections: Mapping[str, type]) -> tuple[Any, list[str]]:
    """(section object or None, problems) from the section's raw mapping; sections: all of the schema."""
    if not isinstance(raw, dict):
        return None, [f"section {name!r} must hold keys, got {_shown(raw)}; write them beneath it or remove the line"]
    hints = get_type_hints(section, include_extras=True)
    problems = [_unknown_key(name, key, list(hints), sections) for key in raw if key not in hints]
    values = {}
    for field in dataclasses.fields(section):
        key = f"{name}.{field.name}"
        if field.name in raw:
            try:
                values[field.name] = _convert(raw[field.name], hints[field.name], key)
            except ConfigError as error:
                problems.append(str(error))
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(f"{key} is required; write it in the file or pass {key}=...")
    return (None if problems else section(**values)), problems


_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # Unicode's control characters, halves of pairs, ends of lines and paragraphs


class _Mismatch(ConfigError):
    """The value is of another type: the next member of a union may still take it."""


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as `kind`, an annotation of the dataclasses above. Text such as 1e-5 becomes a float."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Annotated:
        converted = _convert(value, members[0], key)
        for allowed in (mark for mark in members[1:] if isinstance(mark, Range)):
            if not allowed.holds(converted):
                raise ConfigError(f"{key} must be {allowed.words}, got {_shown(converted)}")
        return converted
    if origin in (types.UnionType, Union):
        return _convert_union(value, kind, key)
    if origin is Literal:
        if any(value == member and type(value) is type(member) for member in members):
            return value
        hint = _did_you_mean(value, [str(member) for member in members])
        raise _Mismatch(f"{key} must be one of {', '.join(map(str, members))}; got {_shown(value)}{hint}")
    if origin is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        for name in value:
            if not name.isprintable() or not 1 <= len(name) <= 80:
                raise ConfigError(f"{key} takes names of 1 to 80 printable characters, got {_shown(name)}")
        return {name: _convert(item, members[1], f"{key}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        built, problems = _build(kind, value, key, {})
        _stop_at(problems)
        return built
    if origin is tuple and isinstance(value, list) and all(type(member) is members[0] for member in value):
        return tuple(value)
    if kind is float and type(value) in (int, float, str):
        return _to_float(value, key)
    if type(value) is kind:  # type() and not isinstance: True is an int to isinstance
        if kind is str and any(unicodedata.category(c) in _NO_TEXT and c not in "\n\t" for c in value):
            raise ConfigError(f"{key} must be free of control characters, got {_shown(value)}")
        return value
    raise _Mismatch(f"{key}: expected {_words(kind)}, got {_shown(value)}")


def _convert_union(value: Any, kind: Any, key: str) -> Any:
    for member in get_args(kind):
        try:
            return _convert(value, member, key)
        except _Mismatch:
            continue
    raise _Mismatch(f"{key}: expected {_words(kind)}, got {_shown(value)}")


def _to_float(value: int | float | str, key: str) -> float:
    try:
        number = float(value)
    except (OverflowError, ValueError) as error:
        raise _Mismatch(f"{key}: expected float, got {_shown(value)}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{key} must be a finite number, got {_shown(value)}")
    if number != 0 and not 1e-30 <= abs(number) <= 1e30:  # float32 would make it 0 or infinite, here or in a product
        raise ConfigError(f"{key} must be 0 or of a size in 1e-30..1e30, got {_shown(value)}")
    return number


def _words(kind: Any) -> str:
    origin, members = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(members[0])
    if origin is Literal:
        return " or ".join(map(str, members)).replace("False", "false")
    if origin is tuple:
        return f"list of {_words(members[0])}"
    if origin is dict:
        return "keys and values"
    if origin in (types.UnionType, Union):
        return " or ".join(map(_words, members))
    return "null" if kind is types.NoneType else kind.__name__


# ------------------------------------------------------------------------------------------------------------
# Settings that depend on each other


def _conflicts(cfg: AnyConfig) -> list[str]:
    shared = [
        *_resume_conflicts(cfg),
        *_path_conflicts(cfg),
        *_model_conflicts(cfg),
        *_placement_conflicts(cfg),
        *_reward_conflicts(cfg.reward),
        *_checkpointing_conflicts(cfg.train),
    ]
    if isinstance(cfg, GrpoConfig):
        return [*shared, *_grpo_conflicts(cfg)]
    return [*_step_conflicts(cfg.sample), *_coupling_conflicts(cfg.sample), *shared, *_cache_conflicts(cfg)]


def _resume_conflicts(cfg: AnyConfig) -> Iterator[str]:
    known = flat(cfg)
    for key in cfg.run.resume_with_changes:
        if key not in known:
            yield f"run.resume_with_changes: there is no key {key!r}{_did_you_mean(key, list(known))}"
        elif FREE in MARKS[key] and IF_NAMED not in MARKS[key]:
            yield f"run.resume_with_changes: {key} may change without being named; remove it"
        elif IF_NAMED not in MARKS[key]:
            yield (
                f"run.resume_with_changes: {key} cannot change in a run; a new run in another run.output_dir can start "
                "from this one's adapter: lora.init_from"
            )
    if cfg.run.resume_with_changes and cfg.run.resume_from_checkpoint is False:
        yield "run.resume_with_changes does nothing with run.resume_from_checkpoint: false; remove one of them"


_PATHS = {
    "run": ("output_dir", "resume_from_checkpoint"),
    "model": ("model_paths", "tokenizer_path", "distill_lora_high", "distill_lora_low"),
    "data": ("file_name", "cache_dir"),
    "reward": ("name", "reward_model_path", "held_out_model_path"),
    "evaluation": ("eval_clips",),
}


def _path_conflicts(cfg: AnyConfig) -> Iterator[str]:
    """What no file system takes: it would be a traceback at the first look at the file."""
    sections = to_dict(cfg)
    for section, keys in _PATHS.items():
        for key in keys:
            value = sections.get(section, {}).get(key) or ""
            if len(os.fsencode(value)) > 4000 or any(len(os.fsencode(part)) > 255 for part in value.split("/")):
                yield f"{section}.{key} is too long for the name of a file: {_shown(value)}"


def _step_conflicts(sample: Sample) -> Iterator[str]:
    last, steps, active = sample.final_timestep, sample.num_inference_steps, sample.active_steps
    if last >= steps:
        yield f"sample.final_timestep must be at most {steps - 1} for {steps} sampling steps, got {last}"
    if active is None:
        if sample.mid_timestep > last and sample.gradient_mode != "last":
            yield f"sample.mid_timestep must be at most final_timestep {last}, got {sample.mid_timestep}"
        return
    listed = list(active)
    if not listed or listed != sorted(set(listed)):
        yield f"sample.active_steps must be an increasing list of steps, got {_shown(listed)}"
    elif listed[0] < 0 or listed[-1] > last:
        yield f"sample.active_steps must lie in 0..{last} (final_timestep), got {_shown(listed)}"
    elif sample.gradient_mode == "last" and listed != [last]:
        yield (
            f"sample.gradient_mode last differentiates final_timestep {last} alone, got active_steps "
            f"{_shown(listed)}; remove active_steps, or take gradient_mode chain"
        )


def _coupling_conflicts(sample: Sample) -> Iterator[str]:
    mode, coupling = sample.gradient_mode, sample.coupling
    if coupling is None:
        return
    if mode == "bridge" and not 0 < coupling < 1:
        yield (
            f"sample.coupling of gradient_mode bridge must lie between 0 and 1, got {coupling:g}; "
            "1 is gradient_mode chain, 0 is drtune"
        )
    if mode != "bridge" and coupling != COUPLING[mode]:
        yield (
            f"sample.coupling of gradient_mode {mode} is {COUPLING[mode]:g}, got {coupling:g}; "
            "remove it, or take gradient_mode bridge for values between 0 and 1"
        )


def _model_conflicts(cfg: AnyConfig) -> Iterator[str]:
    if bool(cfg.model.model_paths) == bool(cfg.model.model_id_with_origin_paths):
        given = "both are" if cfg.model.model_paths else "neither is"
        yield f"model.model_paths or model.model_id_with_origin_paths must be given, {given}"
    if cfg.model.allow_download and not cfg.model.model_id_with_origin_paths:
        yield "model.allow_download is for model.model_id_with_origin_paths, which is empty; remove it"
    if cfg.model.distill_lora_mode == "adapter" and not (cfg.model.distill_lora_high or cfg.model.distill_lora_low):
        yield "model.distill_lora_mode adapter needs model.distill_lora_high or model.distill_lora_low"
    chosen = _names(cfg.model.trainable_models)
    for name in chosen:
        if name not in EXPERTS:
            hint = _did_you_mean(name, EXPERTS)
            yield f"model.trainable_models takes {', '.join(EXPERTS)} (comma separated); got {_shown(name)}{hint}"
    if len(set(chosen)) < len(chosen):
        yield f"model.trainable_models names a model twice: {_shown(cfg.model.trainable_models)}"
    if cfg.lora.lora_base_model is not None and set(_names(cfg.lora.lora_base_model)) != set(chosen):
        yield (
            f"lora.lora_base_model must be model.trainable_models {_shown(cfg.model.trainable_models)} (training "
            f"without an adapter is not offered), got {_shown(cfg.lora.lora_base_model)}; remove it"
        )
    if cfg.model.max_timestep_boundary != 1:
        yield (
            f"model.max_timestep_boundary must be 1, got {cfg.model.max_timestep_boundary:g}: no expert "
            "would answer above it; remove it. The experts' border is model.min_timestep_boundary"
        )


# reward/<name> of the scripts themselves, and of face_identity's parts where alarms and documents mean those
OWN_METRICS = ("mean", "std_in_group", "valid_fraction", "failed", "score", "held_out", "coverage", "motion")


def _reward_conflicts(reward: Rewards) -> Iterator[str]:
    if reward.name == "face_identity" and reward.reward_model_path is None:
        yield "reward.reward_model_path is required for face_identity; name the folder of a face pack"
    if reward.name == "face_identity" and reward.settings:
        names = _shown(list(reward.settings))
        yield f"reward.settings: face_identity takes none, its keys stand in reward itself; got {names}"
    for label in reward.others:
        if not re.fullmatch(r"[\w-]+", label):
            yield f"reward.others: label {label!r} names the metric reward/<label>; use letters, digits, _ and - alone"
        spread_of = label.removesuffix("_std")  # eval/<label>_std is what eval/<label> varies by
        if label in OWN_METRICS or (spread_of != label and spread_of in ("score", "held_out", *reward.others)):
            yield f"reward.others.{label}: the metrics have a key of that name already; choose another label"


def _placement_conflicts(cfg: AnyConfig) -> Iterator[str]:
    untrained = cfg.experts.untrained
    if untrained != "gpu" and len(trainable_experts(cfg)) != 1:
        yield f"experts.untrained {untrained} needs one expert that is not trained; set model.trainable_models to one"
    if untrained == "fp8" and cfg.model.distill_lora_mode == "adapter":
        yield "experts.untrained fp8 takes no adapter; set model.distill_lora_mode: fuse"


def _cache_conflicts(cfg: RunConfig) -> Iterator[str]:
    if cfg.experts.untrained != "boundary_cache":
        return
    if trainable_experts(cfg) != ("low_noise",):
        yield "experts.untrained boundary_cache is for training dit2 alone; set model.trainable_models: dit2"
    if cfg.sample.noises_per_sample == "fresh":
        yield (
            "experts.untrained boundary_cache needs a number of noises per clip, sample.noises_per_sample is "
            "fresh; set it to, for example, 4"
        )


def _checkpointing_conflicts(train: GrpoTrain) -> Iterator[str]:
    if train.use_gradient_checkpointing_offload and not train.use_gradient_checkpointing:
        yield (
            "train.use_gradient_checkpointing_offload keeps what gradient checkpointing stores; set "
            "train.use_gradient_checkpointing: true, or remove it"
        )


def _grpo_conflicts(cfg: GrpoConfig) -> Iterator[str]:
    grpo, steps = cfg.grpo, cfg.sample.num_inference_steps
    if steps < 2:
        yield "sample.num_inference_steps must be at least 2: the last step is never stochastic"
    if grpo.sde == "cps" and grpo.noise_level > 1:
        yield f"grpo.noise_level of sde cps must be at most 1, got {grpo.noise_level:g}"
    if (grpo.window == "list") != (grpo.window_steps is not None):
        yield "grpo.window_steps and grpo.window: list go together; set both, or neither"
    bounds = grpo.window_bounds
    if bounds is not None and grpo.window == "list":
        yield "grpo.window_bounds are for grpo.window random and fraction; remove them, or window: list"
    if bounds is not None and not (len(bounds) == 2 and 0 <= bounds[0] < bounds[1] <= steps):
        yield f"grpo.window_bounds must be two numbers [first, last + 1] within 0..{steps}, got {_shown(list(bounds))}"
    per_epoch, wanted = grpo.updates_per_epoch * grpo.inner_epochs, cfg.train.max_steps or 0
    if wanted % per_epoch:
        near = " or ".join(str(n) for n in (wanted - wanted % per_epoch, wanted - wanted % per_epoch + per_epoch) if n)
        yield f"train.max_steps must be whole epochs of {per_epoch} updates, got {wanted}; try {near}"
    if cfg.reward.name != "face_identity" and (cfg.reward.coverage_weight or cfg.reward.motion_weight):
        name = _shown(cfg.reward.name)
        yield f"reward.coverage_weight and motion_weight are for face_identity, not {name}; remove them"
    trained = [cfg.reward.reward_weight, *(term.weight for term in cfg.reward.others.values())]
    if not any(weight > 0 for weight in trained):
        yield "reward.reward_weight is 0, and so are the weights of reward.others: nothing is trained"
    if cfg.sample.guidance_scale == 1 and cfg.sample.negative_prompt:
        yield "sample.negative_prompt does nothing without guidance; set sample.guidance_scale, or remove it"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


# ------------------------------------------------------------------------------------------------------------
# What settings mean together


def active_steps(cfg: RunConfig) -> tuple[int, ...]:
    """The sampling steps that carry gradient, increasing; gradient_mode last: final_timestep alone."""
    sample = cfg.sample
    if sample.gradient_mode == "last":
        return (sample.final_timestep,)
    if sample.active_steps is not None:
        return sample.active_steps
    return tuple(range(sample.mid_timestep, sample.final_timestep + 1))


def resolved_coupling(cfg: RunConfig) -> float:
    """Weight in 0..1 of the gradient that one active step hands to the one before it."""
    if cfg.sample.coupling is not None:
        return cfg.sample.coupling
    return COUPLING[cfg.sample.gradient_mode]


@dataclass(frozen=True, kw_only=True)
class WantedReward:
    """One reward as rewards.build takes it; key: where it stands in the configuration; label: in the metrics."""

    key: str
    label: str
    name: str
    settings: dict[str, Any]
    weight: float
    mean: float = 0.0
    std: float = 1.0


def wanted_rewards(cfg: AnyConfig) -> list[WantedReward]:
    """What is trained first, then the held-out judge if there is one, then the others."""
    reward = cfg.reward
    is_face = reward.name == "face_identity"
    face = {"det_size": reward.det_size, "chunk": reward.recogniser_chunk}
    own = {"pack_dir": reward.reward_model_path, "cap": reward.cap} | face if is_face else reward.settings
    key = "reward.reward_model_path" if is_face else "reward.name"
    normal = {"mean": reward.reward_mean, "std": reward.reward_std} if isinstance(cfg, RunConfig) else {}
    wanted = [
        WantedReward(key=key, label="score", name=reward.name, settings=own, weight=reward.reward_weight, **normal)
    ]
    if reward.held_out_model_path is not None:
        judge = {"pack_dir": reward.held_out_model_path, "cap": "none"} | face
        wanted.append(
            WantedReward(
                key="reward.held_out_model_path", label="held_out", name="face_identity", settings=judge, weight=0.0
            )
        )
    for label, term in reward.others.items():
        wanted.append(WantedReward(key=f"reward.others.{label}", label=label, **vars(term)))
    return wanted


def trainable_experts(cfg: AnyConfig) -> tuple[str, ...]:
    """("high_noise",), ("low_noise",) or both in this order."""
    chosen = _names(cfg.model.trainable_models)
    return tuple(expert for name, expert in EXPERTS.items() if name in chosen)


# ------------------------------------------------------------------------------------------------------------
# Checks that need more than the file: the number of processes, the disk, the model


def check_batch(cfg: RunConfig, num_processes: int) -> int:
    """Clips per step over all processes. ConfigError when train_batch_size asks for another number."""
    train = cfg.train
    per_device, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    per_pass = per_device * num_processes
    global_batch, wanted = per_pass * accumulation, train.train_batch_size
    if wanted is None or wanted == global_batch:
        return global_batch
    near = sorted({wanted // per_pass, -(-wanted // per_pass)} - {0})
    ways = ", ".join(f"gradient_accumulation_steps {n} gives {n * per_pass}" for n in near)
    raise ConfigError(
        f"train.train_batch_size is {wanted}, but per_device_train_batch_size {per_device} x "
        f"gradient_accumulation_steps {accumulation} x {num_processes} processes = {global_batch}; {ways}"
    )


def check_threads(cpu_threads: int | None, cores: int) -> None:
    """ConfigError for more threads than four for each of the machine's cores: 100,000 crash torch."""
    if cpu_threads is not None and cpu_threads > 4 * cores:
        raise ConfigError(
            f"run.cpu_threads must be at most {4 * cores} on this machine of {cores} cores, got {cpu_threads}; set it "
            f"to {cores}, or to null"
        )


def check_paths(cfg: AnyConfig) -> None:
    """ConfigError naming every file or folder of the configuration that is not there."""
    problems = []
    if not Path(cfg.data.file_name).is_file():
        problems.append(f"data.file_name: no such file: {cfg.data.file_name}")
    model = Path(cfg.model.model_paths)
    if cfg.model.model_paths and not (model / "model_index.json").is_file() and not model.is_file():
        problems.append(
            f"model.model_paths: no diffusers pipeline (model_index.json) in {model}, and no such json file"
        )
    for key in ("distill_lora_high", "distill_lora_low"):
        path = getattr(cfg.model, key)
        if path and not Path(path).exists():
            problems.append(f"model.{key}: no such file or folder: {path}")
    if cfg.lora.init_from and not Path(cfg.lora.init_from).exists():
        problems.append(f"lora.init_from: no such file or folder: {cfg.lora.init_from}")
    if cfg.model.tokenizer_path and not Path(cfg.model.tokenizer_path).is_dir():
        problems.append(f"model.tokenizer_path: no such folder: {cfg.model.tokenizer_path}")
    for key in ("reward_model_path", "held_out_model_path"):
        folder = getattr(cfg.reward, key)
        try:
            if folder is not None:
                face_pack.pack_files(folder)
        except (OSError, ValueError) as error:
            problems.append(f"reward.{key}: {error}")
    _stop_at(problems)


def vae_factors(model_folder: str | Path) -> tuple[int, int]:
    """(spatial, temporal) compression of the pipeline folder's VAE, from vae/config.json; 8 and 4 for Wan."""
    path = Path(model_folder) / "vae" / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.model_paths: {path} is missing; model_paths must be a diffusers pipeline folder")
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)


def boundary_ratio(model_folder: str | Path) -> float:
    """The sigma at or above which the pipeline folder's high-noise expert answers, from model_index.json."""
    config = json.loads((Path(model_folder) / "model_index.json").read_text(encoding="utf-8"))
    if config.get("boundary_ratio") is None:
        raise ConfigError(
            f"model.model_paths: {model_folder} has no boundary_ratio, so it is no Wan2.2 A14B pipeline with two "
            "experts; TI2V-5B and Wan2.1 are not supported"
        )
    return config["boundary_ratio"]


def boundary_of(cfg: AnyConfig, model_folder: str | Path) -> float:
    """The sigma at or above which the high-noise expert answers: the configuration's, else the pipeline folder's."""
    given = cfg.model.min_timestep_boundary
    return boundary_ratio(model_folder) if given is None else given


def check_geometry(
    height: int, width: int, num_frames: int, spatial: int, temporal: int, patch: int = 2, max_pixels: int | None = None
) -> None:
    """ConfigError unless the VAE and the transformer can take clips of this size.

    spatial, temporal: the VAE's compression factors; patch: the transformer's spatial patch size. With max_pixels
    height and width are not used.
    """
    problems = []
    # 16 is what diffusers' Wan pipeline demands of every model, so that the trained one can be used there.
    multiple = math.lcm(16, spatial * patch)
    if max_pixels is not None and multiple != 16:
        problems.append(
            f"data.max_pixels gives sides in multiples of 16, this VAE takes multiples of {multiple}; remove "
            "max_pixels and set data.height and data.width"
        )
    for key, size in {"height": height, "width": width}.items():
        if size % multiple and max_pixels is None:
            near = _neighbours(size, multiple, 0)
            problems.append(f"data.{key} must be a multiple of {multiple}, got {size}; try {near}")
    # One latent frame would be the given image alone: nothing generated, nothing to reward.
    if num_frames % temporal != 1 % temporal or num_frames <= 1:
        near = _neighbours(num_frames, temporal, 1)
        problems.append(f"data.num_frames must be {temporal}k+1 for this VAE, got {num_frames}; try {near}")
    _stop_at(problems)


def _neighbours(value: int, multiple: int, offset: int) -> str:
    """The numbers multiple * k + offset (k >= 1) next to `value`, in words."""
    below = (value - offset) // multiple
    return " or ".join(str(multiple * k + offset) for k in (below, below + 1) if k >= 1)


def check_active_experts(
    active: Sequence[int], answering: Sequence[str], trained: Sequence[str], coupling: float
) -> None:
    """ConfigError when a trained expert answers at no active step, or an active step gives nothing a gradient.

    answering: the expert of each step; coupling: of the gradient that an active step hands to the one before it. A
    frozen expert's step has no gradient of its own: it is of use only in handing one on to a trained expert's.
    """
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(answering))
    asked = {answering[i] for i in active}
    idle = [name for name, expert in EXPERTS.items() if expert in trained and expert not in asked]
    if idle:
        useful = ",".join(name for name, expert in EXPERTS.items() if expert in asked)
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no active step of {list(active)} and would not "
            f"learn (expert by step: {table}); train {useful}, or change sample.mid_timestep or sample.active_steps"
        )
    own = [i for i in active if answering[i] in trained]
    useless = [i for i in active if i not in own and (coupling == 0 or i < own[0])]
    if useless:
        raise ConfigError(
            f"sample.mid_timestep, sample.active_steps: the active steps {useless} of {list(active)} would give no "
            f"gradient, since model.trainable_models does not train their expert (expert by step: {table}) and they "
            f"hand none on to an earlier step that is trained; take {[i for i in active if i not in useless]}, or "
            "train both experts: model.trainable_models=dit,dit2"
        )
