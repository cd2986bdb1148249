"""Records of a run's network passes and videos, for the estimate of time and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rewardfl.backbones.protocol import Adapter, Backbone, DecodeCaches
from rewardfl.memory.sharding import Sharding


@dataclass(frozen=True, kw_only=True)
class Video:
    """The model, size and adapter of a generated video."""

    backbone: Backbone
    height: int
    width: int
    num_frames: int
    adapter: Adapter | None


@dataclass(frozen=True)
class Span:
    """A part of the run, and the number of videos that it trains on, in all and by process."""

    name: str
    videos: float
    of_process: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The passes, videos and settings of a run that determine its time and memory.

    Passes are forward passes of one video through an expert, by the expert's name; means where epochs differ.
    """

    video: Video
    trained: tuple[str, ...]  # experts
    untrained: str | None  # the other expert
    rollout: Mapping[str, float] = field(default_factory=dict)  # passes without a graph
    replay: Mapping[str, float] = field(default_factory=dict)  # passes with a graph
    backward_passes: Mapping[str, float] = field(default_factory=dict)  # through these graphs
    reference: Mapping[str, float] = field(default_factory=dict)  # passes without a graph and without the adapter
    anchor: Mapping[str, float] = field(default_factory=dict)  # passes of the data anchor, with a graph
    anchor_to_reference: bool = False  # each of these with a second pass, without a graph
    graphs: int = 1  # passes whose graphs live together
    reward_gradient: bool = False  # the reward's gradient goes back through the decoder
    averages: int = 0  # moving averages of the adapter that are kept
    samples_in_flight: int = 0  # videos of one process that are stored until an epoch's updates
    latents_kept: Mapping[str, int] = field(default_factory=dict)  # stored latents of each, by samples_on
    latents_of_update: int = 0  # further latents on the GPU, of one process in an update
    spans: tuple[Span, ...] = ()
    steps: int | None = None  # updates of the run
    base_videos: int = 0  # made without the adapter before training, in all
    base: Mapping[str, float] = field(default_factory=dict)  # passes of one of them, without a graph
    reward_bytes: int = 0  # bytes of the reward networks' weights, where they are on disk
    processes: int = 1  # one for each GPU
    processes_per_clip: int = 1  # each with a part of the tokens
    sharding: Sharding = "none"  # over the processes

    # settings that trade memory for time; estimate.advice has their keys
    trained_placement: Literal["gpu", "cpu_swap"] = "gpu"  # placement of the trained experts' frozen weights
    untrained_placement: Literal["gpu", "cpu_swap", "fp8", "boundary_cache"] = "gpu"
    checkpointing: bool = True
    offload_inputs: bool = False
    batch: int = 1
    decode_caches: DecodeCaches = "keep"
    kept_chunks: int = 0  # the number of last chunks that keep the decoding's graphs
    active_experts: tuple[str, ...] = ()  # the expert of each step with a gradient; where graphs can be kept
    kept_steps: int = 0  # the number of last such steps that keep the rollout's graphs
    samples_on: Literal["gpu", "cpu"] = "gpu"
    group_section: Literal["grpo", "forward"] = "grpo"  # section of the configuration, for samples_on
