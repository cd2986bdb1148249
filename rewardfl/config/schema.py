"""The schema of a configuration: field types, sections, and the checks of each.

The models below are the reference: a field's comment says its meaning, its type says its values. Relative paths start
at the directory of the command. Each script has its complete configuration: RewardFlConfig, FlowGrpoConfig and
ForwardRlConfig. The older names of keys are in aliases.py, and which keys may change when a run resumes is in
resuming.py.
"""

import difflib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from rewardfl.config.resuming import FREE, NAMED


class Section(BaseModel):
    """Settings, read strictly: true is not 1, 1.0 is not an integer, and an unknown key raises."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def conflicts(self) -> Iterator[str]:
        """Yield a line for each combination of settings that cannot work: the keys, the values, the way out."""
        yield from ()


# (section, its name, keys, whether the run reads them, what they need)
Readers = list[tuple[Section, str, tuple[str, ...], bool, str]]


def _unread(readers: Readers) -> Iterator[str]:
    """Yield a line for each key that differs from its default and that nothing in this run reads."""
    for section, name, keys, is_read, need in readers:
        for key in keys if not is_read else ():
            if getattr(section, key) != type(section).model_fields[key].default:
                yield f"{name}.{key} does nothing without {need}; set it, or remove {key}"


_T = TypeVar("_T")


def must_be(words: str, holds: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that raises ValueError(`words`) unless `holds(value)`."""

    def check(value: _T) -> _T:
        if not holds(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


def _from_text(value: object) -> object:
    """Convert text such as 1e-5 to a number; YAML 1.1 reads it as text because it has no dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_plain(text: str) -> bool:
    """Return whether `text` has no control character, lone surrogate or Unicode line end, except \\n and \\t."""
    return not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t" for c in text)


def _is_path(text: str) -> bool:
    """Return whether a file system takes it; the first access to a longer path would end in a traceback."""
    return len(os.fsencode(text)) <= 4000 and all(len(os.fsencode(part)) <= 255 for part in text.split("/"))


# The upper ends are far above any real setting. They catch a typo (1e30) before memory or float32 runs out.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Whole = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
BatchSize = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=100_000)]
Denoising = Annotated[int, Field(ge=1, le=1_000)]  # sampling steps: the model has 1000 timesteps
StepIndex = Annotated[int, Field(ge=0, le=999)]  # index of a sampling step, from 0
Side = Annotated[int, Field(ge=1, le=16_384)]
DetectionSide = Annotated[int, Field(ge=32, le=4_096, multiple_of=32)]  # multiples of a face detector's coarsest stride
Pixels = Annotated[int, Field(ge=16 * 16, le=16_384**2)]
# float32 would make a smaller or larger number 0 or infinite, here or in a product
Number = Annotated[
    float,
    BeforeValidator(_from_text),
    Field(allow_inf_nan=False),
    must_be("0 or of a size in 1e-30..1e30", lambda value: value == 0 or 1e-30 <= abs(value) <= 1e30),
]
_not_tiny = must_be("0 or at least 1e-12", lambda value: not 0 < value < 1e-12)
Positive = Annotated[Number, Field(gt=0, le=1e12), _not_tiny]
NonNegative = Annotated[Number, Field(ge=0, le=1e12), _not_tiny]
Share = Annotated[Number, Field(ge=0, le=1)]
ClipRange = Annotated[Number, Field(gt=0, lt=1)]
_is_bridge = re.compile(r"bridge:0?\.\d{1,6}").fullmatch
Bridge = Annotated[
    str,
    must_be(
        "chain, bridge, bridge:WEIGHT (between 0 and 1), drtune, last or endpoint",
        lambda text: _is_bridge(text) and float(text[7:]),
    ),
]
_are_epochs = re.compile(r"[1-9]\d{0,3} epochs?").fullmatch
Epochs = Annotated[str, must_be("a whole number, or epochs, such as 3 epochs", _are_epochs)]
FrameRate = Annotated[Number, Field(ge=0.1, le=1_000)]
# a score's mean and deviation: beyond these limits, weight * (score - mean) / std would be a constant
Mean = Annotated[Number, Field(ge=-1e6, le=1e6)]
Deviation = Annotated[Number, Field(ge=1e-6, le=1e6)]
Cap = Literal["self_similarity", "none"] | Annotated[Number, Field(gt=0, le=1)]
PlainText = Annotated[str, must_be("free of control characters", _is_plain)]
_Line = Annotated[PlainText, must_be("a text of one line", lambda text: "\n" not in text and "\t" not in text)]
Text = Annotated[_Line, must_be("a text that is not empty", lambda text: text.strip() != "")]
_fits = must_be("short enough for the name of a file", _is_path)
PathLine = Annotated[_Line, _fits]
PathText = Annotated[Text, _fits]
Off = Annotated[Literal[False], BeforeValidator(lambda value: None if value == 0 and value is not False else value)]
Listed = Annotated[tuple[_T, ...], Field(strict=False)]  # a strict tuple would not take a YAML list
StepList = Annotated[
    Listed[int],
    must_be(
        "steps in increasing order, from 0 on",
        lambda steps: steps and steps[0] >= 0 and list(steps) == sorted(set(steps)),
    ),
]
Length = Annotated[Number, Field(gt=0, le=1)]
Lengths = Annotated[
    Listed[Length],
    must_be("lengths in increasing order", lambda values: values and list(values) == sorted(set(values))),
]
ClipRanges = Annotated[Listed[ClipRange], must_be("one number or [low, high]", lambda values: len(values) == 2)]
Name = Annotated[
    str, must_be("a name of 1 to 80 printable characters", lambda name: name.isprintable() and 1 <= len(name) <= 80)
]
_is_label = re.compile(r"[\w-]{1,80}").fullmatch  # it names the metric reward/<label>
Label = Annotated[str, must_be("a name of 1 to 80 letters, digits, _ and -", lambda text: _is_label(text) is not None)]
Setting = PlainText | bool | int | Number | dict[Name, Number] | None


def shown(value: object) -> str:
    """Return `repr(value)` for a message: one line, without control characters, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return the end of a message with the name that `word` may be a typo of, or ""."""
    close = difflib.get_close_matches(str(word)[:80], list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


TRAINABLE = ("dit", "dit2")  # a model's experts by falling sigma; a model with one expert has the first
ExpertNames = Annotated[
    str, must_be("dit or dit2 or both", lambda text: sorted(_names(text)) in (["dit"], ["dit2"], [*TRAINABLE]))
]
SPLIT_ATTENTION = ("native", "_native_cudnn", "_native_flash", "flash")  # work with train.context_parallel
COUPLING = {"chain": 1.0, "bridge": 0.2, "drtune": 0.0, "last": 1.0, "endpoint": 1.0}
MEMORY, TERMS = "train.memory", "reward.terms"  # in messages
GUIDANCE, VIDEOS = "guidance (a sample.guidance_scale but 1)", "videos (a data.num_frames above 1)"
ONE_STEP = ("last", "endpoint")  # gradient modes of one active step
# reward/<name> of the scripts themselves, and of face_identity's parts that alarms and documents mean
RESERVED_METRICS = ("mean", "std_in_group", "valid_fraction", "failed", "score", "held_out", "coverage", "motion")


class RunConfig(Section):
    """Section `run` of all scripts. A step is one optimizer update."""

    # Folder for run.json, metrics.jsonl, checkpoints/ and samples/. Holds one run.
    output_dir: PathText
    # Seed of the data order, of every sample's noise and of the adapter's initial values.
    seed: Seed = 42
    # Steps between checkpoints with sample videos; also after the last step. With groups at the epoch's end.
    save_steps: Count = 25
    # Number of last checkpoints to keep, next to the one of checkpoints/best; null keeps all.
    keep_last: Count | None = None
    # "auto" resumes from the latest complete checkpoint in output_dir, or starts from step 0 without one; a path names
    # a checkpoint (.../checkpoints/step-000025); false starts from step 0.
    resume_from_checkpoint: PathText | Off = "auto"
    # Keys (resuming.py: NAMED) that may differ from run.json when a run resumes, such as [train.learning_rate]. Each
    # change is printed and listed in run.json.
    resume_with_changes: Listed[str] = ()
    # Tracker next to metrics.jsonl, on the first process. wandb has to be installed (pip install wandb).
    log_with: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    # Sample videos written at each save.
    sample_videos: Annotated[int, Field(ge=0, le=1_000)] = 2
    # Threads per process without a GPU. null divides the usable cores (at most the container's CPU quota) among the
    # processes. The number changes the rounding.
    cpu_threads: Annotated[Count, Field(le=1_024)] | None = None


class DistillLoraConfig(Section):
    """`model.distill_lora`: LoRAs of a distillation to few steps (Wan2.2-Lightning), in any tool's names."""

    # One file per expert.
    high: PathLine = ""
    low: PathLine = ""
    # fuse: merged in the LoRA's precision, then rounded once to model.dtype. adapter: separate from the weights, active
    # in policy and reference; slower, and exact for every dtype.
    mode: Literal["fuse", "adapter"] = "fuse"

    def __bool__(self) -> bool:
        return bool(self.high or self.low)


class ModelConfig(Section):
    """Section `model` of all scripts."""

    # The model: one of rewardfl.backbones.MODULES. wan2_2 is Wan2.2 image-to-video A14B; docs/running_wan.md, 2.
    model_name: Text = "wan2_2"
    # Pipeline folder in diffusers layout (model_index.json, transformer/, transformer_2/, vae/, ...), or a
    # wan22_paths.json that names the original files (examples/wan22_paths.json). Empty: see the next key.
    model_paths: PathLine = ""
    # Instead of model_paths: original files in hub repositories, "repository:pattern, ..." with high_noise,
    # low_noise, t5 and VAE in the patterns. Taken from the local hub cache, which `hf download` fills.
    model_id_with_origin_paths: PlainText = ""
    # Tokenizer folder; empty takes the model's own (original files have none but on the hub).
    tokenizer_path: PathLine = ""
    # Distillation LoRAs, part of the base model.
    distill_lora: DistillLoraConfig = DistillLoraConfig()
    # Experts whose adapter is trained, comma separated: dit (high noise, or the only one), dit2 (low noise).
    trainable_models: ExpertNames = "dit2"
    # Lowest sigma of the high-noise expert; null takes the pipeline's boundary_ratio, if it has one.
    min_timestep_boundary: Share | None = None
    # Guidance input of a guidance-distilled network (FLUX.1-dev: 3.5); null for others.
    embedded_guidance: Annotated[Number, Field(ge=0, le=100)] | None = None
    # Attention backend by diffusers' name: native is torch's choice; flash and _flash_3 need their packages. The start
    # raises for one with a wrong gradient on this machine (rewardfl/memory/attention.py: check_backward).
    attention_backend: Text = "native"
    # Type of the frozen weights. The adapter is always float32.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def conflicts(self) -> Iterator[str]:
        if bool(self.model_paths) == bool(self.model_id_with_origin_paths):
            which = "both are" if self.model_paths else "neither is"
            yield f"model.model_paths or model.model_id_with_origin_paths must be given, {which}"


class MemoryConfig(Section):
    """`train.memory` of all scripts: what waits where, or is computed again.

    Only `untrained` fp8 and boundary_cache change numbers. A preset sets the keys that are not given, as far
    as they fit the run: PRESETS.
    """

    preset: Literal["fast", "80gb", "24gb", "16gb"] | None = None
    # Place of the trained expert's frozen weights. gpu: on the GPU. cpu_swap: in host memory, one copy per process;
    # blocks are copied to the GPU one ahead of their turn, in the forward and the backward pass (needs
    # use_gradient_checkpointing; not with FSDP2 or ZeRO-2).
    trained: Literal["gpu", "cpu_swap"] = "gpu"
    # Place of the untrained expert. gpu, cpu_swap: as for `trained`. fp8: on the GPU in 8 bits, half the size, weights
    # rounded by about 3 %.
    untrained: Literal["gpu", "cpu_swap", "fp8"] = "gpu"
    # Recompute activations in the backward pass instead of keeping them.
    use_gradient_checkpointing: bool = True
    # Keep the checkpoints (the blocks' inputs) in host memory until the backward pass.
    use_gradient_checkpointing_offload: bool = False


class RewardFlMemoryConfig(MemoryConfig):
    """`train.memory` of train_reward_fl.py."""

    # As above. boundary_cache: not loaded while training; its latents at the boundary are computed once per clip and
    # noise, and cached (needs sample.noises_per_sample: n).
    untrained: Literal["gpu", "cpu_swap", "fp8", "boundary_cache"] = "gpu"  # type: ignore[assignment]  # never written
    # The VAE decoder's caches between decode and its backward pass. keep: on the GPU; offload: in host memory;
    # segment: in host memory for every few chunks only, the others are recomputed (one decode more).
    decode_caches: Literal["keep", "offload", "segment"] = "keep"
    # Latent frames of a video, the last ones, whose decoder graph stays until the backward pass. Each saves a second
    # forward pass, and takes 3.4 GB at 480x832 but none of the caches' 1.9 GB.
    kept_chunks: Annotated[int, Field(ge=0, le=1000)] = 0
    # Stored of the steps with a gradient. replay: their latents; each step is recomputed with a graph in the backward
    # pass. keep_on_host and keep_on_device: the graphs of the rollout, which saves one forward pass of each step. They
    # hold the blocks' inputs, 13.4 GB for each step at 480x832x81, in host memory or on the GPU.
    active_graphs: Literal["replay", "keep_on_host", "keep_on_device"] = "replay"
    # Steps whose graphs are kept, the last ones with a gradient; the others are replayed. null: all.
    kept_steps: Count | None = None


class GroupMemoryConfig(MemoryConfig):
    """`train.memory` of the scripts with groups."""

    # Memory for an epoch's latents and conditioning between rollout and update.
    samples_on: Literal["gpu", "cpu"] = "gpu"


_SWAP = {"trained": "cpu_swap", "untrained": "cpu_swap", "use_gradient_checkpointing_offload": True}
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"use_gradient_checkpointing": False},
    "80gb": {"untrained": "cpu_swap", "active_graphs": "keep_on_device", "kept_chunks": 2, "decode_caches": "offload"},
    "24gb": _SWAP | {"decode_caches": "segment"},
    "16gb": _SWAP | {"decode_caches": "segment", "samples_on": "cpu"},
}


class LoraConfig(Section):
    """Section `lora` of all scripts."""

    # Rank of the update, at most the 5120 inputs of the A14B's layers.
    lora_rank: Annotated[int, Field(ge=1, le=5_120)] = 32
    # The update is scaled by lora_alpha / lora_rank; null means lora_rank, a scale of 1.
    lora_alpha: Annotated[Positive, Field(le=100_000)] | None = None
    # Adapted layers, comma separated: Wan's short names or diffusers' (to_q, to_out.0, ffn.net.2, ...).
    lora_target_modules: Text = "q,k,v,o,ffn.0,ffn.2"
    # A checkpoint folder (.../checkpoints/latest) or an adapter's file or folder, of another run or tool, of the same
    # rank, alpha and layers: the adapter starts from its weights, the optimizer and the steps start from zero. The KL's
    # reference stays the base model without an adapter. A resumed run does not read it, but its content must not have
    # changed. null: the adapter starts from zero.
    init_from: PathText | None = None


class DataConfig(Section):
    """Section `data` of all scripts."""

    # metadata.csv with the columns video and prompt, and optionally image (the model's input instead of the clip's
    # first frame), reference_video (the clip for the face and for motion), photos (of the person: a folder, or pictures
    # between semicolons) and person (a name). A prompt with photos needs no clip. A row with a prompt only may have its
    # own height and width. For forward.objective dpo without a reward: chosen and rejected, two clips of one prompt.
    # Paths are relative to the file. Example: examples/metadata.csv; tools/check_dataset.py checks one.
    file_name: PathText
    # Pixels, multiples of 16; clips are resized to cover height x width and cropped at the centre. For rows with
    # only a prompt, the columns height and width count instead.
    height: Side = 480
    width: Side = 832
    # Instead of height and width: every clip keeps its shape and is scaled down to at most this many pixels, both sides
    # multiples of 16. A forward pass takes clips of one size.
    max_pixels: Pixels | None = None
    # Frames used of each clip, from its start: 4k + 1 for the Wan VAE.
    num_frames: Annotated[int, Field(ge=1, le=10_000)] = 81
    # Frames per second taken from a clip, by their times; clips with fewer cannot be used. null: all stored frames, as
    # if their rate were the model's (Wan 16, Wan2.2-TI2V-5B 24). Videos are written at this rate.
    fps: FrameRate | None = None
    # Folder for text embeddings, image latents, face pools and boundary latents, computed once per clip. null:
    # <run.output_dir>/cache. Runs may share it; all processes must see the same folder.
    cache_dir: PathText | None = None
    # Skip and list unusable rows instead of stopping. A clip whose cache entries are lost during the run is replaced
    # by the next one and counted (data/replaced).
    skip_bad_rows: bool = False


class SharedSampleConfig(Section):
    """Keys of section `sample` in all scripts."""

    # Sampling steps from pure noise to the clean video.
    num_inference_steps: Denoising = 8
    # Shift of the sigma schedule: shift*s / (1 + (shift - 1)*s) over linspace(1, 0, steps + 1). Image models use the
    # range of their own scheduler; null takes its shift, which may depend on the image's size (FLUX.1-dev).
    shift: Annotated[Number, Field(ge=0.01, le=100)] | None = 5.0
    # Scale of classifier-free guidance in rollout, replay and reference; 1 is none, takes half the time and suits
    # distilled models and reinforcement learning. Models that are not distilled need guidance.
    guidance_scale: Annotated[Positive, Field(le=100)] = 1.0
    # Prompt of guidance's unconditional pass.
    negative_prompt: PlainText = ""


class VerdictConfig(Section):
    """`sample.verdict`: which moves of gradient_mode endpoint are learned (verdict.py). Each costs a decode and scores.

    A sample learns the move whose gain of the weighted, normalised and capped reward exceeds its price the most.
    """

    # Weight of staying at the averaged policy's x0 for a sample without such a move, against 1 for the moves; 0: none.
    # The moves, too, hold the policy there, and short ones more than they move it. With train.ema_decay 0 the videos
    # are the policy's, and nothing holds it.
    keep: NonNegative = 10.0
    # A move costs endpoint_length^2 / (2 tau). This is the first tau: it adapts to 30 to 60 % of samples with a move.
    tau: Positive = 0.01
    # {label of a term: the score above which nothing is gained}. By default a face's own cap; for a reward without one
    # the .75 quantile of the row's scores so far.
    caps: dict[Label, Number] = Field(default_factory=dict)
    # {label of a term, also of weight 0: slack}. A move that lowers its score by more than the slack is refused.
    pareto: dict[Label, NonNegative] = Field(default_factory=dict)


class SampleConfig(SharedSampleConfig):
    """Section `sample` of train_reward_fl.py."""

    # First and last step (from 0) with a gradient. If final_timestep is not the last step, sampling ends there with the
    # x0 prediction.
    mid_timestep: StepIndex = 4
    final_timestep: StepIndex = 7
    # Steps with a gradient, as an increasing list within 0..final_timestep, instead of mid..final.
    active_steps: StepList | None = None
    # How the reward's gradient travels back from one active step to the one before: chain (exactly), bridge
    # (damped to 0.2, or bridge:WEIGHT), drtune (not at all); last and endpoint differentiate only final_timestep.
    # endpoint moves every sample equally far up its reward, from videos of the averaged weights (DiffusionOPSD).
    gradient_mode: Literal["chain", "bridge", "drtune", "last", "endpoint"] | Bridge = "chain"
    # How far gradient_mode endpoint goes up the reward, as a share of the latents' norm. A verdict takes several.
    endpoint_length: Length | Lengths = 0.1
    # Decode and score each move of gradient_mode endpoint before it is learned; null: learn every one.
    verdict: VerdictConfig | None = None
    # "fresh": new noise at each visit of a clip; n: each clip has n noises, used in turn, so that the steps before the
    # first active one can be cached.
    noises_per_sample: Literal["fresh"] | BatchSize = "fresh"
    # Differentiated part of a guided velocity: both passes (exactly), or only the conditional one, with the negative
    # prompt's velocity as a constant: half the backward and half the graph, and another gradient.
    guidance_gradient: Literal["both", "conditional"] = "both"

    @property
    def lengths(self) -> tuple[float, ...]:
        """Return the lengths of the moves of gradient_mode endpoint, increasing."""
        return self.endpoint_length if isinstance(self.endpoint_length, tuple) else (self.endpoint_length,)

    @property
    def coupling(self) -> float:
        """Return the weight in 0..1 of the gradient from one active step to the one before it."""
        mode, _, weight = self.gradient_mode.partition(":")
        return float(weight) if weight else COUPLING[mode]

    def conflicts(self) -> Iterator[str]:
        last, steps, mode = self.final_timestep, self.num_inference_steps, self.gradient_mode
        if last >= steps:
            yield f"sample.final_timestep must be at most {steps - 1} for {steps} sampling steps, got {last}"
        if self.active_steps is not None:
            yield from _late_steps("sample.active_steps", self.active_steps, last)
            if mode in ONE_STEP and self.active_steps != (last,):
                yield f"sample.active_steps does nothing in gradient_mode {mode}; remove it"
        elif self.mid_timestep > last and mode not in ONE_STEP:
            yield f"sample.mid_timestep must be at most final_timestep {last}, got {self.mid_timestep}"


class WholeSampleConfig(SharedSampleConfig):
    """Section `sample` of the scripts with groups: any number of steps."""

    @property
    def final_timestep(self) -> int:
        """Return the last step: a rollout always takes every step."""
        return self.num_inference_steps - 1


class TermConfig(Section):
    """One of `reward.terms` of all scripts."""

    # A reward that `python -m rewardfl.rewards` lists, or a class of your own, package.module:Class or
    # path/to/file.py:Class. By default face_identity as score, and the label for others.
    name: PathText
    # Weight in the trained sum; 0: only measured. By default that of the section for score, and 0 for others.
    weight: NonNegative
    # Arguments of the reward. face_identity takes none, its keys are in section reward; face_motion without a
    # pack_dir has that section's reward_model_path and det_size.
    settings: dict[Name, Setting] = Field(default_factory=dict)


class RewardFlTermConfig(TermConfig):
    """One of `reward.terms` of train_reward_fl.py."""

    # The trained term is weight * (score - mean) / std. Both describe the untrained model's reward, so that a weight
    # has one meaning for every recogniser. By default 0.54 and 0.16 for face_identity as score, 0 and 1 for others.
    mean: Mean
    std: Deviation


class PartWeights(Section):
    """`reward.terms.score.parts`: parts of face_identity without a gradient, weighted into the sum."""

    # Share of frames with a face.
    coverage: NonNegative = 0.0
    # Motion as a ratio to the real clip's, at most 1.
    motion: NonNegative = 0.0


class GroupTermConfig(TermConfig):
    """One of `reward.terms` of the scripts with groups."""

    # For face_identity as score.
    parts: PartWeights = PartWeights()


class SharedRewardConfig(Section):
    """Keys of section `reward` in all scripts."""

    DEFAULT_WEIGHT: ClassVar[float]  # the label score's

    # Rewards by label, with metrics reward/<label>. score is the first one and always there: by default the identity
    # similarity of the generated face to the real clip's (face_identity).
    terms: dict[Label, TermConfig] = Field({}, validate_default=True)
    # Folder with one face detector and one recogniser (.onnx): antelopev2, buffalo_l, AuraFace; also the folder that
    # the zip unpacks to, or an insightface root (models/antelopev2).
    reward_model_path: PathText | None = None
    # A second such folder for the held-out judge (metrics reward/held_out and reward/held_out/...), never trained on;
    # null: no judge. It must share neither the detector's nor the recogniser's file with a trained pack.
    held_out_model_path: PathText | None = None
    # Another such folder, or null: each cosine of face_identity is then the mean over both recognisers on the same
    # crops. It must share no file with the judge's, and no recogniser with reward_model_path.
    second_model_path: PathText | None = None
    # Scored people of face_identity and of the judge, by the real clip's first frame with a face. largest: the largest
    # face; all: every face, each with its own pool and cap, and the mean is trained.
    people: Literal["largest", "all"] = "largest"
    # Faces of that frame narrower than this many pixels, in frames of the training size, are ignored; clips without a
    # larger face are rejected. Generated faces may have any size.
    min_face_size: NonNegative = 0.0
    # Side in pixels of the square that frames are fitted into for face detection.
    det_size: DetectionSide = 640
    # Identity similarity above the cap is not rewarded. self_similarity: the mean pairwise similarity of the frames of
    # the real clip, or of the row's photos; one photo takes the median of the other rows'.
    cap: Cap = "self_similarity"
    # What motion is compared with. clip: the row's clip, or without one the base model's own video of the row (adapter
    # off, the run's sampler, made before training); base: that video for every row.
    motion_reference: Literal["clip", "base"] = "clip"
    # Number of such videos of a row; the mean of their motion counts. sample.noises_per_sample: n takes its n noises.
    base_noises: Annotated[int, Field(ge=1, le=64)] = 2

    @field_validator("terms", mode="before")
    @classmethod
    def _fill_terms(cls, terms: object) -> object:
        """Put the first reward and all defaults into the terms; null removes a term of the file."""
        if not isinstance(terms, dict):
            return terms
        chosen: dict[str, Any] = {"score": {}, **terms}
        if chosen["score"] is None:
            raise ValueError("keys and values with score, which may have weight 0 but cannot be removed")
        filled = {label: cls._fill(label, term) if isinstance(term, dict) else term for label, term in chosen.items()}
        return {label: term for label, term in filled.items() if term is not None}

    @classmethod
    def _fill(cls, label: str, term: dict[str, Any]) -> dict[str, Any]:
        first = label == "score"
        name = term.get("name", "face_identity" if first else label)
        return {"name": name, "weight": cls.DEFAULT_WEIGHT if first else 0.0} | term

    @property
    def others(self) -> dict[str, TermConfig]:
        """Return the terms but the first."""
        return {label: term for label, term in self.terms.items() if label != "score"}

    @property
    def is_trained(self) -> bool:
        """Return whether a term has a weight."""
        return any(term.weight for term in self.terms.values())

    def conflicts(self) -> Iterator[str]:
        name = self.terms["score"].name
        if name == "face_identity" and self.terms["score"].settings:
            names = shown(list(self.terms["score"].settings))
            yield f"{TERMS}.score.settings: face_identity takes none, its keys are in section reward; got {names}"
        for label in self.others:
            base = label.removesuffix("_std")  # eval/<label>_std is the deviation of eval/<label>
            if label in RESERVED_METRICS or (base != label and base in ("score", "held_out", *self.others)):
                yield f"{TERMS}.{label}: the metrics have a key of that name already; choose another label"


class RewardConfig(SharedRewardConfig):
    """Section `reward` of train_reward_fl.py."""

    DEFAULT_WEIGHT: ClassVar[float] = 0.1

    # As in SharedRewardConfig. loss = -sum of the terms + kl_weight * KL.
    terms: dict[Label, RewardFlTermConfig] = Field({}, validate_default=True)  # type: ignore[assignment]

    @classmethod
    def _fill(cls, label: str, term: dict[str, Any]) -> dict[str, Any]:
        filled = super()._fill(label, term)
        measured = label == "score" and filled["name"] == "face_identity"  # by docs/rewards.md, on real clips
        return {"mean": 0.54 if measured else 0.0, "std": 0.16 if measured else 1.0} | filled

    # 0 skips the reference model's forward passes.
    kl_weight: NonNegative = 1.0
    # Steps with a gradient over which the KL is a mean: each takes one forward pass of the reference. last: the last of
    # them; null: all.
    kl_steps: Literal["last"] | StepList | None = None
    # How the KL's gradient travels back along the trajectory to earlier active steps: exact (the gradient of the KL,
    # inactive steps held fixed), fixed_trajectory (not at all) or reference_constant (as in ROLL: the reference's
    # velocity is a constant).
    kl_gradient: Literal["exact", "fixed_trajectory", "reference_constant"] = "reference_constant"


class GrpoRewardConfig(SharedRewardConfig):
    """Section `reward` of train_flow_grpo.py and train_forward_rl.py, where a reward needs no gradient."""

    DEFAULT_WEIGHT: ClassVar[float] = 1.0

    # As in SharedRewardConfig.
    terms: dict[Label, GroupTermConfig] = Field({}, validate_default=True)  # type: ignore[assignment]

    @property
    def part_weights(self) -> dict[str, float]:
        """Return {part of the first reward: its weight} for the parts that are trained next to its score."""
        return {part: weight for part, weight in self.terms["score"].parts if weight > 0}

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for label, term in self.terms.items():
            if term.parts != PartWeights() and (label != "score" or term.name != "face_identity"):
                yield f"{TERMS}.{label}.parts are for face_identity as score; remove them"


class AnchorConfig(Section):
    """Section `anchor` of all scripts: the flow-matching loss on the real clips, next to the reward (anchor.py).

    A row without a video has no such loss, except by target reference. Without reward and KL, train_reward_fl.py is
    supervised fine-tuning by it.
    """

    # Weight of the velocity's mean squared error in the loss; 0: no anchor.
    weight: NonNegative = 0.0
    # Sigmas, each with its noise, of each clip in an update: each takes one forward and one backward pass.
    draws: Annotated[int, Field(ge=1, le=1_000)] = 1
    # Where on the schedule: active, the steps that the policy's loss trains (in Flow-GRPO those that windows draw);
    # trained_range, any sigma of the trained experts' steps; or a list of denoising steps.
    sigmas: Literal["active", "trained_range"] | StepList = "active"
    # Target of the velocity: data, the velocity to the real clip; reference, the velocity of the model without its
    # adapter at the same point, for a distilled model, whose velocity is not the data's, and for a row without a clip:
    # the point is of the base model's own video, made as for reward.motion_reference. As data it would teach its drift.
    target: Literal["data", "reference"] = "data"
    # Training clips whose loss is measured at the first step and at every save, always with the same sigmas and
    # noises (actor/data_loss). A rise by more than a tenth is an alarm, and counts in train.early_stop. 0: none.
    measured_clips: Annotated[int, Field(ge=0, le=10_000)] = 0


class EarlyStopConfig(Section):
    """`train.early_stop` of all scripts: when the held-out judge ends a run (alarms.py: broken_guards).

    The updates are cut into windows. The run ends, as after its last step, when each of `patience` full windows in a
    row breaks a guard, compared with the run's first window. The guards read the trained videos' reward/held_out and
    reward/held_out/... They are `motion` and `grid`, and three more: the mean of reward/held_out fell by more than the
    standard deviation of the first window's updates; it gained less than half of the trained face score's gain;
    reversals, saturation or mean colours moved as far as for a warning.
    """

    # Updates in a window, and windows in a row that must break a guard. The first one should end before drift begins.
    window: Annotated[Count, Field(ge=2)] = 5
    patience: Count = 2
    # Smallest share of the first flow, landmark motion, sharpness and coverage; 0 turns these guards off.
    motion: Share = 0.8
    # Largest ratio of grid to its first value.
    grid: Annotated[Positive, Field(ge=1)] = 1.5


class GrpoTrainConfig(Section):
    """Section `train` of all scripts."""

    # Peak learning rate of AdamW.
    learning_rate: Annotated[Positive, Field(le=1)] = 1e-4
    # After warmup: constant, or cosine down to 0 at the last step.
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    # Steps of linear warmup from 0; 0 is none.
    warmup_steps: Whole = 10
    # AdamW's decoupled weight decay.
    weight_decay: Annotated[NonNegative, Field(le=1)] = 0.0
    # Steps (optimizer updates) in all, or "3 epochs", passes over the data. A run may resume with another number; under
    # a cosine, which it stretches, only if run.resume_with_changes names it.
    max_steps: Steps | Epochs = "1 epoch"
    # Clips per process and forward pass.
    per_device_train_batch_size: BatchSize = 1
    # Largest norm of the gradient; a larger one is scaled down to it.
    max_grad_norm: Positive = 1.0
    # What waits where.
    memory: GroupMemoryConfig = GroupMemoryConfig()
    # Compile the experts' blocks at their first call: fewer and larger kernels, with other rounding. Takes minutes at
    # the start, and again for clips of another size. Not with fp8, FSDP2 or ZeRO-2.
    compile_blocks: bool = False
    # When the held-out judge ends the run, with exit code 0 and a checkpoint; null: never. With groups, at an
    # epoch's end. An ended run resumes when this is null or more patient.
    early_stop: EarlyStopConfig | None = None

    @property
    def steps(self) -> int | None:
        """Return the number of updates; None if it is one of epochs."""
        return self.max_steps if isinstance(self.max_steps, int) else None

    @property
    def epochs(self) -> int:
        """Return the number of passes over the data, if `steps` is None."""
        return int(str(self.max_steps).split()[0])

    def conflicts(self) -> Iterator[str]:
        memory = self.memory
        if memory.trained == "cpu_swap" and not memory.use_gradient_checkpointing:
            yield f"{MEMORY}.trained cpu_swap needs {MEMORY}.use_gradient_checkpointing: true; set it, or trained: gpu"
        if memory.untrained == "fp8" and self.compile_blocks:
            yield f"train.compile_blocks does not go with {MEMORY}.untrained fp8; set {MEMORY}.untrained: cpu_swap"
        rule, steps = self.early_stop, self.steps
        if rule is not None and steps is not None and steps < rule.window * (rule.patience + 1):
            needed = f"{rule.patience} + 1 (patience) windows of {rule.window} updates"
            yield f"train.early_stop needs {needed}, train.max_steps {steps} are fewer; make one of them smaller"


class TrainConfig(GrpoTrainConfig):
    """Section `train` of train_reward_fl.py."""

    # As in GrpoTrainConfig. The reward's gradient is far less noisy than a policy gradient, and drifts sooner.
    learning_rate: Annotated[Positive, Field(le=1)] = 2.5e-6
    # Forward passes per process and step.
    gradient_accumulation_steps: BatchSize = 1
    # Clips per step over all processes, as a check: must equal per device x accumulation x processes.
    train_batch_size: Count | None = None
    # As in GrpoTrainConfig.
    memory: RewardFlMemoryConfig = RewardFlMemoryConfig()  # type: ignore[assignment]  # never written
    # Processes that compute each clip together, for Wan models without sharding. In the experts each has a part of the
    # tokens, which divides activations and time; decoder and rewards work on the full clip in all of them. It must
    # divide the processes, the tokens and the attention heads. The backend native computes attention again to go back.
    context_parallel: Annotated[Count, Field(le=64)] = 1
    # Decay of an average of the weights (rising from 0.1 to this), which sample videos and checkpoints use. 0: the last
    # weights. Training and judging do not use it, except in gradient_mode endpoint, whose videos are the average's.
    ema_decay: Annotated[Number, Field(ge=0, lt=1)] = 0.0

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        graphs, offload = self.memory.active_graphs, f"{MEMORY}.use_gradient_checkpointing_offload"
        if graphs == "keep_on_host" and not self.memory.use_gradient_checkpointing_offload:
            yield f"{MEMORY}.active_graphs keep_on_host needs {offload}: true; set it"
        if graphs == "keep_on_device" and self.memory.use_gradient_checkpointing_offload:
            yield f"{MEMORY}.active_graphs keep_on_device needs {offload}: false; set it"
        if self.context_parallel > 1 and graphs != "replay":
            yield f"train.context_parallel does not go with {MEMORY}.active_graphs; set active_graphs: replay"
        if self.context_parallel > 1 and self.compile_blocks:
            yield "train.context_parallel does not go with train.compile_blocks; set compile_blocks: false"


class AdvantageConfig(Section):
    """`grpo.advantage` and `forward.advantage`: how a group's rewards become advantages."""

    # Divisor of (reward - mean of the group): the standard deviation of the group, of all the epoch's rewards, the
    # largest of the epoch's groups, or 1.
    std: Literal["group", "global", "max_group", "none"] = "group"
    # Several rewards: normalise the weighted sum, or each reward first (so that a small deviation counts as much).
    of: Literal["sum", "per_reward"] = "sum"
    # Largest absolute advantage.
    clip: Positive = 5.0
    # Groups whose best and worst valid weighted sums of rewards differ by less are not trained on, and count in no
    # deviation. 0: train on every group.
    smallest_spread: NonNegative = 0.0


class ForwardAdvantageConfig(AdvantageConfig):
    """`forward.advantage`."""

    # As above; by default all the epoch's rewards, as in the published code of rvm, nft and awm.
    std: Literal["group", "global", "max_group", "none"] = "global"
    # Factor of the clipped advantage; null takes the objective's: rvm 0.1, awm 1 / clip. nft has no factor.
    scale: Positive | None = None


class GroupConfig(Section):
    """Keys of the sections `grpo` and `forward`. An epoch rolls out groups * group_size samples and trains on them."""

    # Rollouts of one clip (prompt and image), which are compared with each other.
    group_size: Annotated[int, Field(ge=2, le=1_000)] = 16
    # Groups per epoch, over all processes.
    groups: BatchSize = 48
    # Updates per pass over an epoch's samples, each with a part of them.
    updates_per_epoch: BatchSize = 1
    # Passes over an epoch's samples.
    inner_epochs: BatchSize = 1
    # How rewards become advantages.
    advantage: AdvantageConfig = AdvantageConfig()
    # Decay of the averaged weights (rising from 0.1 to this), which evaluation, sample videos and checkpoints use.
    # 0: the last weights.
    ema_decay: Annotated[Number, Field(ge=0, lt=1)] = 0.9


class WindowConfig(Section):
    """`grpo.window`: which steps are stochastic. One of steps, size and fraction; size 2 without any."""

    # These steps, in every epoch.
    steps: Listed[int] | None = None
    # Number of steps in a row, drawn in each epoch.
    size: Denoising | None = None
    # Share of all steps, drawn in each epoch.
    fraction: Annotated[Share, Field(gt=0)] | None = None
    # [first, last + 1] of the steps that size and fraction draw from; null is all. Steps of an untrained expert and the
    # last step, whose noise no step would remove, are never drawn.
    within: Annotated[Listed[int], must_be("two numbers [first, last + 1]", lambda ends: len(ends) == 2)] | None = None
    # Each group draws its own window, instead of one for all groups of the epoch: Flash-GRPO with size 1. For one
    # trained expert, and a batch that divides group_size.
    per_group: bool = False

    @property
    def rule(self) -> Literal["list", "random", "fraction"]:
        """Return how the steps are chosen."""
        return "list" if self.steps is not None else "random" if self.fraction is None else "fraction"

    def conflicts(self) -> Iterator[str]:
        chosen = [key for key in ("steps", "size", "fraction") if getattr(self, key) is not None]
        if len(chosen) > 1:
            yield f"grpo.window has {' and '.join(chosen)}; remove all but one of them"


class GrpoConfig(GroupConfig):
    """Section `grpo` of train_flow_grpo.py. With several updates per epoch, the ratio is 1 only in the first."""

    # All members of a group start from the same noise and differ only by the SDE steps' noise. The steps before the
    # window are then computed once per group.
    same_noise_in_group: bool = False

    # Kernel of the stochastic steps: flow (Flow-GRPO), dance (DanceGRPO) or cps (Flow-CPS), with this much noise.
    sde: Literal["flow", "dance", "cps"] = "flow"
    noise_level: Annotated[Number, Field(ge=0.001, le=10)] = 0.7
    # Largest deviation of one step's noise, for flow and dance; null: no limit. LongCat has 0.45.
    max_std: Annotated[Number, Field(ge=0.001, le=10)] | None = None
    # The stochastic steps, which are trained; the others are steps of the ODE.
    window: WindowConfig = WindowConfig()
    # guard: GRPO-Guard's ratio without its bias, every step weighted by 1/dt. clip: PPO's, for images (at the size of
    # a video its bias silences every sample of negative advantage).
    objective: Literal["guard", "clip"] = "guard"
    # The ratio is clipped to 1 - clip_range .. 1 + clip_range; [low, high] are two of them. Not transferable between
    # objectives, resolutions and values of sde.
    clip_range: ClipRange | ClipRanges = 2e-6
    # Weight of the KL divergence from the untrained model, over the trained steps; 0 skips its forward passes.
    kl_weight: NonNegative = 0.0

    @property
    def clip_ends(self) -> tuple[float, float]:
        """Return how far the ratio may go below and above 1."""
        low, high = (self.clip_range, self.clip_range) if isinstance(self.clip_range, float) else self.clip_range
        return low, high

    def conflicts(self) -> Iterator[str]:
        yield from self.window.conflicts()
        if self.sde == "cps" and self.noise_level > 1:
            yield f"grpo.noise_level of sde cps must be at most 1, got {self.noise_level:g}"


class OldPolicyConfig(Section):
    """`forward.old_policy`: at the end of an epoch it keeps a share of itself and takes the rest from the policy.

    The share is rate * (updates so far - start), within 0..decay.
    """

    # null takes the objective's: nft 0.5, awm 0.3; rvm, best and dpo 0, the policy at the start of the epoch.
    decay: Annotated[Share, Field(lt=1)] | None = None
    rate: NonNegative = 0.001
    start: Whole = 0
    # Weight of mean((v - v_old)^2), the distance from the old policy's velocity.
    anchor: NonNegative = 0.0


class ForwardConfig(GroupConfig):
    """Section `forward` of train_forward_rl.py. The members of a group start from different noises."""

    # rvm: the velocity's regression, weighted by the signed advantage. nft: DiffusionNFT, two branches around the old
    # policy. awm: AWM's clipped ratio of likelihoods. best: plain regression on each group's best video, as on
    # data. dpo: each group's best video against its worst. For a model distilled to few steps rvm (docs/forward_rl.md).
    objective: Literal["rvm", "nft", "awm", "best", "dpo"] = "rvm"
    # Sigmas, each with its noise, of each video in an update: each takes one forward and one backward pass.
    draws: Annotated[int, Field(ge=1, le=1_000)] = 2
    # Where on the schedule: steps, the sigmas of the trained experts' denoising steps, in turn, which the sampler asks
    # for; trained_range, any sigma between these steps; or a list of denoising steps.
    sigmas: Literal["steps", "trained_range"] | StepList = "steps"
    # The old policy makes the videos.
    old_policy: OldPolicyConfig = OldPolicyConfig()
    # Weight of mean((v - v_base)^2), the distance from the velocity of the model without its adapter. The old policy's
    # is old_policy.anchor, the data anchor's anchor.weight.
    base_anchor: NonNegative = 0.0
    # As in GroupConfig.
    advantage: ForwardAdvantageConfig = ForwardAdvantageConfig()
    # For nft: the distance of its branches from the old policy, its authors' beta.
    mix: Annotated[Share, Field(gt=0)] = 1.0
    # For awm: its likelihood as a function of the regression's loss l (forward_rl.awm_log_prob).
    weighting: Literal["uniform", "sigma", "sigma_squared", "huber", "generalised_huber"] = "generalised_huber"
    # For awm: the ratio is clipped to 1 - clip_range .. 1 + clip_range.
    clip_range: Annotated[Share, Field(gt=0)] = 1.0
    # For dpo: the loss falls until a pair's errors, means over elements, have moved apart by a few times 1 / beta since
    # the start of the run. Published betas of errors that are sums do not transfer.
    beta: Positive = 1000.0


class EvaluationConfig(Section):
    """Section `evaluation` of the scripts with groups: held-out clips, sampled by the ODE with the averaged weights."""

    # metadata.csv of held-out clips; null: no evaluation, and sample videos of training clips. Measure by a held-out
    # reward, too: reward.held_out_model_path, or one of reward.terms with weight 0.
    eval_clips: PathText | None = None
    # Steps between evaluations (at the epoch's end); also before the first step and after the last.
    eval_steps: Count = 50
    # Sampling steps; null takes sample.num_inference_steps.
    eval_inference_steps: Denoising | None = None
    # Videos per clip, each from its own noise, the same in each evaluation.
    eval_noises: BatchSize = 1


class RewardFlConfig(Section):
    """The complete configuration of train_reward_fl.py."""

    script: ClassVar[str] = "train_reward_fl.py"

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig
    data: DataConfig
    sample: SampleConfig
    reward: RewardConfig
    anchor: AnchorConfig
    train: TrainConfig

    def conflicts(self) -> Iterator[str]:
        yield from _shared_conflicts(self)
        yield from _unread(self._readers())
        steps, active = self.reward.kl_steps, active_steps(self)
        if steps not in (None, "last") and self.reward.kl_weight == 0:
            yield "reward.kl_steps needs a reward.kl_weight above 0; set it, or remove kl_steps"
        if steps not in (None, "last") and not {*steps} <= {*active}:
            yield f"reward.kl_steps must be some of the steps with a gradient {list(active)}, got {list(steps)}"
        if self.sample.gradient_mode == "endpoint" and not is_supervised(self):
            yield from self._endpoint_conflicts()
        if self.train.context_parallel > 1 and self.data.max_pixels is not None:
            yield "train.context_parallel divides the tokens of one size; set data.height and width, not max_pixels"
        if self.train.context_parallel > 1 and self.model.attention_backend not in SPLIT_ATTENTION:
            names = ", ".join(SPLIT_ATTENTION)
            yield f"train.context_parallel needs a model.attention_backend of {names}; take one of them"
        if self.train.memory.untrained != "boundary_cache":
            return
        needs = f"{MEMORY}.untrained boundary_cache needs"
        if is_supervised(self):
            yield f"{needs} rollouts, and supervised fine-tuning (anchor.weight alone) makes none; set it to cpu_swap"
        if trained_positions(self) != (1,):
            yield f"{needs} the training of dit2 alone; set model.trainable_models: dit2"
        if self.sample.noises_per_sample == "fresh":
            yield f"{needs} a number of noises per clip; set sample.noises_per_sample to, for example, 4"
        if self.sample.guidance_scale != 1:
            yield f"{needs} sampling without guidance; set sample.guidance_scale: 1, or untrained: cpu_swap"

    def _readers(self) -> Readers:
        sample, memory, mode = self.sample, self.train.memory, self.sample.gradient_mode
        has_kl, has_graphs = self.reward.kl_weight > 0, memory.active_graphs != "replay"
        return [
            (self.reward, "reward", ("kl_gradient",), has_kl, "a reward.kl_weight above 0"),
            (sample, "sample", ("mid_timestep",), mode not in ONE_STEP, "a sample.gradient_mode of several steps"),
            (sample, "sample", ("endpoint_length", "verdict"), mode == "endpoint", "gradient_mode endpoint"),
            (sample, "sample", ("guidance_gradient",), sample.guidance_scale != 1, GUIDANCE),
            (memory, MEMORY, ("kept_steps",), has_graphs, "active_graphs keep_on_host or keep_on_device"),
            (memory, MEMORY, ("kept_chunks",), self.data.num_frames > 1, VIDEOS),
        ]

    def _endpoint_conflicts(self) -> Iterator[str]:
        """Yield the settings that gradient_mode endpoint excludes."""
        needs = "sample.gradient_mode endpoint"
        if self.train.ema_decay == 0 and self.sample.verdict is None:
            yield f"{needs} makes its videos by averaged weights; set train.ema_decay, for example to 0.5"
        if self.sample.verdict is not None:
            has_average = self.train.ema_decay > 0
            yield from _unread([(self.sample.verdict, "sample.verdict", ("keep",), has_average, "a train.ema_decay")])
        if self.reward.kl_weight != 0:
            yield f"{needs} stays near the averaged weights and has no KL; set reward.kl_weight: 0"
        if self.train.memory.active_graphs != "replay":
            yield f"{needs} has no graphs in its rollout; set {MEMORY}.active_graphs: replay"
        if self.sample.verdict is None and len(self.sample.lengths) > 1:
            yield f"{needs} takes one endpoint_length without sample.verdict; name one, or set verdict: {{}}"
        for key in ("caps", "pareto") if self.sample.verdict else ():
            labels, terms = getattr(self.sample.verdict, key), self.reward.terms
            for label in labels.keys() - terms.keys():
                hint = did_you_mean(label, terms) or "; name one of them"
                yield f"sample.verdict.{key}.{label} is not one of reward.terms ({', '.join(terms)}){hint}"
            for label in labels.keys() & terms.keys() if key == "caps" else ():
                if terms[label].weight == 0:
                    yield f"sample.verdict.caps.{label} does nothing for a term of weight 0; remove it"


class GroupRunConfig(Section):
    """Sections of the two scripts that compare the rollouts of a group: every reward may be a black box."""

    script: ClassVar[str]

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig
    data: DataConfig
    sample: WholeSampleConfig
    reward: GrpoRewardConfig
    anchor: AnchorConfig
    train: GrpoTrainConfig
    evaluation: EvaluationConfig

    @property
    def group(self) -> GroupConfig:
        """Return the section with the groups."""
        raise NotImplementedError


class FlowGrpoConfig(GroupRunConfig):
    """The complete configuration of train_flow_grpo.py."""

    script: ClassVar[str] = "train_flow_grpo.py"

    grpo: GrpoConfig

    @property
    def group(self) -> GrpoConfig:
        return self.grpo

    def conflicts(self) -> Iterator[str]:
        yield from _shared_conflicts(self)
        yield from _epoch_conflicts(self)
        window = self.grpo.window
        yield from _unread(
            [
                (window, "grpo.window", ("per_group", "within"), window.steps is None, "a size or fraction"),
                (self.grpo, "grpo", ("max_std",), self.grpo.sde != "cps", "sde flow or dance"),
            ]
        )
        batch = self.train.per_device_train_batch_size
        if self.grpo.window.per_group and self.grpo.group_size % batch:
            yield (
                f"grpo.window.per_group needs passes of one group: train.per_device_train_batch_size {batch} must "
                f"divide grpo.group_size {self.grpo.group_size}"
            )


class ForwardRlConfig(GroupRunConfig):
    """The complete configuration of train_forward_rl.py."""

    script: ClassVar[str] = "train_forward_rl.py"

    forward: ForwardConfig

    @property
    def group(self) -> ForwardConfig:
        return self.forward

    def conflicts(self) -> Iterator[str]:
        yield from _shared_conflicts(self)
        yield from _epoch_conflicts(self)
        yield from _unread(self._readers())
        if self.forward.objective == "nft" and self.model.distill_lora:
            yield (
                "forward.objective nft makes a distilled model worse (docs/forward_rl.md), and model.distill_lora "
                "names its distillation; set forward.objective: rvm"
            )
        yield from _late_steps("forward.sigmas", self.forward.sigmas, self.sample.final_timestep)
        if takes_pairs(self) and self.forward.group_size != 2:
            yield "forward.group_size must be 2 without a reward's weight (pairs of the table); set it, or a weight"

    def _readers(self) -> Readers:
        forward, objective, old = self.forward, self.forward.objective, self.forward.old_policy
        takes_all, of_rollouts = objective not in ("best", "dpo"), ("per_device_train_batch_size", "early_stop")
        others = "objective rvm, nft or awm"
        moves = bool(objective in ("nft", "awm") if old.decay is None else old.decay)
        return [
            (self.train, "train", of_rollouts, not takes_pairs(self), "a reward's weight above 0"),
            (forward, "forward", ("mix",), objective == "nft", "objective nft"),
            (forward, "forward", ("weighting", "clip_range"), objective == "awm", "objective awm"),
            (forward, "forward", ("beta",), objective == "dpo", "objective dpo"),
            (forward, "forward", ("old_policy",), takes_all, others),
            (forward.advantage, "forward.advantage", ("std", "of", "clip", "scale"), takes_all, others),
            (forward.advantage, "forward.advantage", ("smallest_spread",), not takes_pairs(self), "rollouts"),
            (forward.advantage, "forward.advantage", ("scale",), objective != "nft", "objective rvm or awm"),
            (old, "forward.old_policy", ("rate", "start"), moves, "a decay above 0"),
        ]


AnyConfig = RewardFlConfig | FlowGrpoConfig | ForwardRlConfig
# {complete configuration: {section: its model}}
SECTIONS: dict[type[AnyConfig], dict[str, type[Section]]] = {
    schema: {section: cast(type[Section], field.annotation) for section, field in schema.model_fields.items()}
    for schema in (RewardFlConfig, FlowGrpoConfig, ForwardRlConfig)
}


def _shared_conflicts(cfg: AnyConfig) -> Iterator[str]:
    yield from _resume_conflicts(cfg)
    yield from _unread(_shared_readers(cfg))
    if (
        cfg.reward.terms["score"].name == "face_identity"
        and cfg.reward.reward_model_path is None
        and not scores_nothing(cfg)
    ):
        yield "reward.reward_model_path is required for face_identity; name the folder of a face pack"
    if is_supervised(cfg) and cfg.train.early_stop is not None:
        yield "train.early_stop needs videos; supervised fine-tuning (anchor.weight alone) makes none, so remove it"
    if is_supervised(cfg) and cfg.anchor.target == "reference":
        yield "anchor.target reference is where the model starts, so anchor.weight alone trains nothing; set it to data"
    yield from _late_steps("anchor.sigmas", cfg.anchor.sigmas, cfg.sample.final_timestep)
    if cfg.train.early_stop is not None and cfg.reward.held_out_model_path is None:
        yield "train.early_stop needs a held-out judge; set reward.held_out_model_path, or remove train.early_stop"
    untrained = cfg.train.memory.untrained
    if untrained != "gpu" and len(trained_positions(cfg)) != 1:
        yield f"{MEMORY}.untrained {untrained} needs one expert that is not trained; set model.trainable_models to one"
    if untrained == "fp8" and cfg.model.distill_lora.mode == "adapter":
        yield f"{MEMORY}.untrained fp8 takes no distillation's adapter; set model.distill_lora.mode: fuse"


def _late_steps(key: str, steps: str | tuple[int, ...], last: int) -> Iterator[str]:
    if not isinstance(steps, str) and steps[-1] > last:
        yield f"{key} must lie in 0..{last} (the sampling steps), got {shown(list(steps))}"


def _shared_readers(cfg: AnyConfig) -> Readers:
    face, has_judge = cfg.reward.terms["score"].name == "face_identity", cfg.reward.held_out_model_path is not None
    anchored, guided = cfg.anchor.weight > 0 or cfg.anchor.measured_clips > 0, cfg.sample.guidance_scale != 1
    distill, memory = cfg.model.distill_lora, cfg.train.memory
    stored = memory.use_gradient_checkpointing
    return [
        (cfg.anchor, "anchor", ("draws", "target", "sigmas"), anchored, "an anchor.weight or anchor.measured_clips"),
        (cfg.data, "data", ("fps",), cfg.data.num_frames > 1, VIDEOS),
        (distill, "model.distill_lora", ("mode",), bool(distill), "model.distill_lora.high or low"),
        (cfg.reward, "reward", ("cap", "second_model_path"), face, "face_identity as reward.terms.score"),
        (cfg.reward, "reward", ("people", "min_face_size"), face or has_judge, "face_identity or a judge"),
        (cfg.sample, "sample", ("negative_prompt",), guided, GUIDANCE),
        (memory, MEMORY, ("use_gradient_checkpointing_offload",), stored, f"{MEMORY}.use_gradient_checkpointing"),
    ]


def _epoch_conflicts(cfg: GroupRunConfig) -> Iterator[str]:
    if not cfg.reward.is_trained and not takes_pairs(cfg):
        yield "reward.terms: no weight is above 0, so nothing is trained; set one"
    evaluation, keys = cfg.evaluation, ("eval_inference_steps", "eval_noises")
    has_clips = evaluation.eval_clips is not None
    yield from _unread([(evaluation, "evaluation", keys, has_clips, "evaluation.eval_clips")])
    per_epoch, max_steps = cfg.group.updates_per_epoch * cfg.group.inner_epochs, cfg.train.steps or 0
    if max_steps % per_epoch:
        below = max_steps - max_steps % per_epoch
        near = " or ".join(str(n) for n in (below, below + per_epoch) if n)
        yield f"train.max_steps must be whole epochs of {per_epoch} updates, got {max_steps}; try {near}"


def _resume_conflicts(cfg: AnyConfig) -> Iterator[str]:
    keys = [f"{section}.{key}" for section, model in SECTIONS[type(cfg)].items() for key in model.model_fields]
    changeable = NAMED & {*keys}
    for key in cfg.run.resume_with_changes:
        if key in FREE - NAMED:
            yield f"run.resume_with_changes: {key} may change without being named; remove it"
        elif key not in changeable:
            hint = did_you_mean(key, changeable) or "; start a new run by lora.init_from"
            yield f"run.resume_with_changes: {shown(key)} cannot change in a run{hint}"


def active_steps(cfg: RewardFlConfig) -> tuple[int, ...]:
    """Return the sampling steps with a gradient, increasing; only final_timestep for some gradient_modes."""
    sample = cfg.sample
    if sample.gradient_mode in ONE_STEP:
        return (sample.final_timestep,)
    if sample.active_steps is not None:
        return sample.active_steps
    return tuple(range(sample.mid_timestep, sample.final_timestep + 1))


def kl_steps(cfg: RewardFlConfig) -> tuple[int, ...]:
    """Return the steps over which the KL is a mean; none without a KL."""
    steps, active = cfg.reward.kl_steps, active_steps(cfg)
    if cfg.reward.kl_weight == 0:
        return ()
    return active[-1:] if steps == "last" else steps or active


def is_supervised(cfg: AnyConfig) -> bool:
    """Return whether the data anchor is the entire loss: no reward has a weight, and there is no KL."""
    if not isinstance(cfg, RewardFlConfig) or cfg.anchor.weight == 0:
        return False
    return cfg.reward.kl_weight == 0 and not cfg.reward.is_trained


def takes_pairs(cfg: Section) -> bool:
    """Return whether the run trains on pairs of the table: objective dpo, and no reward has a weight."""
    if not isinstance(cfg, ForwardRlConfig) or cfg.forward.objective != "dpo":
        return False
    return not cfg.reward.is_trained and not cfg.reward.part_weights


def scores_nothing(cfg: AnyConfig) -> bool:
    """Return whether the run makes no video to score."""
    return is_supervised(cfg) or (takes_pairs(cfg) and cast(ForwardRlConfig, cfg).evaluation.eval_clips is None)


def processes_per_clip(cfg: AnyConfig) -> int:
    """Return the number of processes that compute each clip together."""
    return cfg.train.context_parallel if isinstance(cfg, RewardFlConfig) else 1


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """Arguments of rewards.build for one reward. key: its configuration key; label: its name in the metrics."""

    key: str
    label: str
    name: str
    settings: dict[str, Any]
    weight: float
    mean: float = 0.0
    std: float = 1.0
    guards: bool = False  # may no move lower it? sample.verdict.pareto


def list_reward_specs(cfg: AnyConfig, pixels_per_token: int = 0, *, for_evaluation: bool = False) -> list[RewardSpec]:
    """List the first reward, then the held-out judge if it is configured, then the other terms.

    A run that makes no video to score has an empty list, unless it is for_evaluation. pixels_per_token: the period of
    the grid that the judge measures; 0: it measures none.
    """
    if scores_nothing(cfg) and not for_evaluation:
        return []
    reward = cfg.reward
    face: dict[str, Any] = {"det_size": reward.det_size}
    who = {"people": reward.people, "min_face_size": reward.min_face_size}
    specs = [_reward_spec(reward, "score")]
    if specs[0].name == "face_identity":
        settings = {"pack_dir": reward.reward_model_path, "cap": reward.cap} | face | who
        settings |= {"second_pack_dir": reward.second_model_path}
        specs = [replace(specs[0], key="reward.reward_model_path", settings=settings)]
    if reward.held_out_model_path is not None:
        key = "reward.held_out_model_path"
        judge = {"pack_dir": reward.held_out_model_path, "cap": "none", "grid_period": pixels_per_token} | face | who
        specs.append(RewardSpec(key=key, label="held_out", name="face_judge", settings=judge, weight=0.0))
    specs += [_reward_spec(reward, label) for label in reward.others]
    verdict = cfg.sample.verdict if isinstance(cfg, RewardFlConfig) else None
    return [replace(spec, guards=verdict is not None and spec.label in verdict.pareto) for spec in specs]


def _reward_spec(reward: SharedRewardConfig, label: str) -> RewardSpec:
    """Return a term as RewardSpec."""
    term = reward.terms[label]
    settings = term.settings
    if term.name == "face_motion" and "pack_dir" not in settings:
        settings = {"pack_dir": reward.reward_model_path, "det_size": reward.det_size} | settings
    mean, std = (term.mean, term.std) if isinstance(term, RewardFlTermConfig) else (0.0, 1.0)
    key = f"{TERMS}.{label}"
    return RewardSpec(key=key, label=label, name=term.name, settings=settings, weight=term.weight, mean=mean, std=std)


def second_pack_key(key: str) -> str:
    """Return the configuration key of the second pack of the face_identity that is configured at `key`."""
    return "reward.second_model_path" if key == "reward.reward_model_path" else f"{key}.settings.second_pack_dir"


def trained_positions(cfg: AnyConfig) -> tuple[int, ...]:
    """Return the indices in TRAINABLE of the trained experts."""
    names = _names(cfg.model.trainable_models)
    return tuple(i for i, name in enumerate(TRAINABLE) if name in names)


def count_base_noises(cfg: AnyConfig) -> int:
    """Return the number of the base model's videos of a row: of the noises that the run repeats, or base_noises."""
    repeated = cfg.sample.noises_per_sample if isinstance(cfg, RewardFlConfig) else "fresh"
    return cfg.reward.base_noises if repeated == "fresh" else repeated
