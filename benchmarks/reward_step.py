"""One update of Reward FL in several modes, side by side in one run: seconds, bytes, copies and gradients.

    python benchmarks/reward_step.py --config configs/wan22_face_80gb.yaml [section.key=value ...] [--steps 2]
        [--modes full_graph,replay,keep_on_host,swap] [--memory-cap GB] [--layers N] [--heads N]
        [--vae-channels N] [--rates "RTX 4090,copies=12"] [--vary section.key=value,value ...] [--json FILE]

It needs no weights, clips or faces: the model has random weights and the configured one's shape (the published one's
where its folder is not there), which --layers, --heads and --vae-channels make smaller. --vary measures every mode at
each of these values of a setting. The modes, next to the configuration as it is (as_configured):

    full_graph    autograd through all active steps and the decoder; the blocks are checkpointed
    replay        one step's graph at a time, and one decoder chunk's
    keep_on_host  the graphs of the rollout's active steps, with the blocks' inputs in host memory
    keep_on_device  the same, with these on the GPU
    keep_all      keep_on_device, and the decoder's graph is kept, too
    swap          replay with these in host memory, and the trained expert's weights
    supervised    no reward: the flow-matching loss of one draw, forward and backward

A GPU's bytes are its allocator's; --memory-cap gives that so many GB. A CPU stands for a GPU with its host: bytes are
those of the tensors that live, without those in host memory (offload, swap), and a copy between the two is counted. Its
seconds are those of the process, so that other processes hardly change them.
Planned seconds are at --rates, which are by default those of the GPU; of a CPU they say something with its own only.
"""

import argparse
import contextlib
import copy
import gc
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from rewardfl import backbones, config, flow, lora, reward_flow
from rewardfl.backbones import stock
from rewardfl.backbones.protocol import DTYPES, Backbone, Conditioning, Experts, Velocity
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.config import RewardFlConfig
from rewardfl.estimate import needs
from rewardfl.estimate.measure import Costs, Living
from rewardfl.estimate.measure import measure as measure_costs
from rewardfl.estimate.rates import Rates, parse_rates
from rewardfl.estimate.report import rates_on
from rewardfl.memory import offload
from rewardfl.training import model_files, plan
from rewardfl.training.run_folder import git_commit, library_versions
from rewardfl.training.workload import Workload, make_workload

EXACT = [
    "sample.gradient_mode=chain", "reward.kl_gradient=reference_constant",
    "reward.kl_steps=null",
]  # fmt: skip
RESIDENT = [
    "train.memory.trained=gpu", "train.memory.active_graphs=replay", "train.memory.kept_steps=null",
    "train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=false",
]  # fmt: skip
SUPERVISED = [
    "reward.terms={score: {weight: 0}}", "reward.kl_weight=0", "anchor.weight=1",
    "anchor.target=data",
]  # fmt: skip
ON_DEVICE = [
    "train.memory.trained=gpu", "train.memory.active_graphs=keep_on_device",
    "train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=false",
]  # fmt: skip
IN_HOST = ["train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=true"]
MODES = {
    "full_graph": RESIDENT,
    "replay": RESIDENT,
    "keep_on_device": ON_DEVICE,
    "keep_all": ON_DEVICE,  # and all chunks of the decoder
    "keep_on_host": ["train.memory.trained=gpu", "train.memory.active_graphs=keep_on_host", *IN_HOST],
    "swap": [
        "train.memory.trained=cpu_swap", "train.memory.active_graphs=replay", "train.memory.kept_steps=null", *IN_HOST,
    ],
    "supervised": [*RESIDENT, *SUPERVISED],
    "as_configured": [],
}  # fmt: skip
PHASES = {
    "rollout": ["rollout"], "decode": ["decode"], "decode VJP": ["decode VJP"],
    "replay": ["replay forward", "replay recompute", "replay backward", "reference"], "data anchor": ["data anchor"],
    "optimizer": [],
}  # fmt: skip  # by estimate.needs.flops
ADAPTED = 0.02  # std of a new adapter's B: with B = 0 its A has no gradient, and there is no KL
NOTE = """Random weights and conditioning. The reward is analytic: a random cotangent of the frames. Face networks, text
encoder, VAE encoder and distillation take no part. Seconds are medians of the updates behind the first. Bytes are
the first update's on a CPU, and all updates' maximum on a GPU; GB is 1e9 bytes. `plan` is what rewardfl.estimate says;
its TFLOP are those of the tensors' shapes, so that a repeated computation counts twice."""


class Counted(Living):
    """Counts the tensors that live on the device, and the bytes that are copied to it and back.

    On a CPU the device holds the outputs of operators; no operator makes memory of the host.
    """

    def __init__(self, device: torch.device):
        super().__init__([])
        self.device, self.copied_in, self.copied_out = device, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.copy_.default:
            self._copied(args[1], args[0])
        elif func is torch.ops.aten._to_copy.default:
            self._copied(args[0], out)
        return out

    def _copied(self, source: Tensor, target: Tensor) -> None:
        on_device = [self._on_device(tensor) for tensor in (source, target)]
        self.copied_in += target.nbytes if on_device == [False, True] else 0
        self.copied_out += source.nbytes if on_device == [True, False] else 0

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda if self.device.type == "cuda" else tensor.untyped_storage()._cdata in self.storages


@dataclass(frozen=True)
class Meter:
    """Seconds and peak bytes of one update by phase. counted: None for seconds only, then peaks are 0 on a CPU."""

    device: torch.device
    counted: Counted | None
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.counted:
            self.counted.peak = self.counted.now
        clock = time.perf_counter if gpu else time.process_time
        begin = clock()
        with self.counted or contextlib.nullcontext():
            yield
        if gpu:
            torch.cuda.synchronize(self.device)
        self.seconds[name] = clock() - begin
        peak = self.counted.peak if self.counted else 0
        self.peaks[name] = torch.cuda.max_memory_allocated(self.device) if gpu else peak


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the FLOP/s of a large square matrix product, the best of six."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    meter, best = Meter(device, None), math.inf
    for _ in range(6):
        with meter("product"):
            a @ b
        best = min(best, meter.seconds["product"])
    return 2 * size**3 / best


def highest_rss() -> int:
    """Return the maximum bytes of host memory of the process since VmHWM was reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def resize(backbone: Backbone, layers: int | None, heads: int | None, vae_channels: int | None, home: Path) -> Path:
    """Write the model's configurations with other numbers of blocks, heads and channels; None keeps a number."""
    folder = home / "model"
    for part in (*backbone.variant.parts.values(), "vae", "text_encoder"):
        shape = stock.read_config(backbone.folder, part)
        more = {}
        if part == "vae":
            more = {} if vae_channels is None else {"base_dim": vae_channels, "decoder_base_dim": vae_channels}
        elif part != "text_encoder":
            more = {} if layers is None else {"num_layers": layers}
            if heads is not None:
                width = shape["ffn_dim"] * heads // shape["num_attention_heads"]
                more |= {"num_attention_heads": heads, "ffn_dim": width}
        (folder / part).mkdir(parents=True)
        changed = {key: value for key, value in more.items() if key in shape}
        (folder / part / "config.json").write_text(json.dumps(shape | changed))
    (folder / "model_index.json").write_text(json.dumps(stock.read_config(backbone.folder, "model_index")))
    return folder


def fill(model: nn.Module, device: torch.device, home: torch.device, seed: int) -> None:
    """Give a meta model weights that keep activations' scale, drawn on `device` and stored on `home`."""
    generator, state = torch.Generator(device).manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.numel() == max(parameter.shape):
            value.fill_(0 if name.endswith("bias") else 1)  # 1 for a norm's weight
        else:
            value.normal_(0, math.prod(parameter.shape[1:]) ** -0.5, generator=generator)
        state[name] = value.to(home)
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()


def new_expert(
    cfg: RewardFlConfig, backbone: Backbone, name: str, device: torch.device, checkpointed: Callable | None
) -> nn.Module:
    """Build an expert, placed as `train.memory` says. checkpointed: calls a trained expert's blocks; None: frozen."""
    dims = stock.read_config(backbone.folder, backbone.variant.parts[name])
    expert: WanTransformer3DModel = wan.new_expert(dims, DTYPES[cfg.model.dtype], dims["num_layers"], None)
    where = cfg.train.memory.untrained if checkpointed is None else cfg.train.memory.trained
    home = torch.device("cpu") if where == "cpu_swap" else device
    fill(expert, device, home, cfg.run.seed)
    expert.rope = WanRotaryPosEmbed(dims["attention_head_dim"], dims["patch_size"], dims["rope_max_seq_len"]).to(home)
    if checkpointed is not None:
        rank, targets = cfg.lora.lora_rank, lora.target_modules(cfg.lora.lora_target_modules, backbone.layer_names)
        lora.inject(expert, rank, cfg.lora.lora_alpha or rank, targets, cfg.run.seed)
        generator = torch.Generator().manual_seed(cfg.run.seed)
        for parameter_name, parameter in expert.named_parameters():
            if "lora_B" in parameter_name:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data = (ADAPTED * rank**-0.5 * drawn).to(parameter)
        if cfg.train.memory.use_gradient_checkpointing:
            expert.enable_gradient_checkpointing(checkpointed)
    return offload.move_expert(expert, where, device, backbone.block_classes)


def new_decoder(cfg: RewardFlConfig, backbone: Backbone, device: torch.device) -> WanDecoder:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(stock.read_config(backbone.folder, "vae"))
    vae.encoder = vae.quant_conv = None
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(DTYPES[cfg.model.dtype])
    fill(vae, device, device, cfg.run.seed)
    return WanDecoder(vae, frame_given=backbone.variant.image == "frame")


@dataclass(frozen=True, kw_only=True)
class Update:
    """Inputs of an update, the same in every mode."""

    cfg: RewardFlConfig
    velocity: Velocity
    decoder: WanDecoder
    x: Tensor  # (B, C, T, h, w), the noise
    cotangent: Callable[[Tensor], Tensor]  # a video -> the gradient of the loss without the KL

    @property
    def active(self) -> tuple[int, ...]:
        return config.active_steps(self.cfg)

    @property
    def kl_weight(self) -> float:
        return self.cfg.reward.kl_weight / len(self.x)


def replay_update(update: Update, meter: Meter) -> None:
    """Run the update as train_reward_fl.py does."""
    cfg, velocity, decoder, x = update.cfg, update.velocity, update.decoder, update.x
    sigmas, conditioning = velocity.schedule.sigmas, velocity.conditioning
    count = 0 if cfg.train.memory.active_graphs == "replay" else cfg.train.memory.kept_steps or len(update.active)
    graphs_of = update.active[len(update.active) - count :]
    graphs = reward_flow.KeptGraphs(graphs_of, offload.graph_context(cfg.train.memory.active_graphs, x.device))
    first = velocity.schedule.handover if cfg.train.memory.untrained == "boundary_cache" else 0
    with meter("rollout"):
        trajectory = reward_flow.rollout(velocity, x, sigmas, update.active, first, graphs)
    with meter("decode"):
        settings = cfg.train.memory.decode_caches, cfg.train.memory.kept_chunks
        decoded = decoder.decode_with_caches(trajectory.x0, conditioning, *settings)
    grad_video = update.cotangent(decoded.video.float())
    with meter("decode VJP"):
        grad_x0 = decoder.vjp(trajectory.x0, grad_video, decoded, conditioning)
    del decoded, grad_video
    with meter("replay"):
        reward_flow.replay(
            velocity, trajectory, sigmas, update.active, grad_x0, cfg.sample.coupling,
            reference=velocity.reference, kl_weight=update.kl_weight, kl_gradient=cfg.reward.kl_gradient,
            kl_steps=config.kl_steps(cfg),
        )  # fmt: skip


def full_graph(update: Update, meter: Meter) -> None:
    """Run the update with one graph from the first active step to the frames, by autograd."""
    velocity, x, kl = update.velocity, update.x, 0.0
    sigmas, active = velocity.schedule.sigmas, update.active
    first = velocity.schedule.handover if update.cfg.train.memory.untrained == "boundary_cache" else 0
    with meter("forward"):
        for i in range(first, len(sigmas) - 1):
            with torch.set_grad_enabled(i in active):  # the other steps' velocities are constants
                v = velocity(x, i)
            if i in active and update.kl_weight:
                with torch.no_grad():
                    v_reference = velocity.reference(x, i)
                kl = kl + flow.velocity_kl(v, v_reference, sigmas[i]).sum() / len(active)
            x = flow.euler_step(x, v, sigmas[i], sigmas[i + 1])
        video = decode_whole(update.decoder, x, velocity.conditioning).float()
    cotangent = update.cotangent(video)
    with meter("backward"):
        ((video * cotangent).sum() + update.kl_weight * kl).backward()


def supervised(update: Update, meter: Meter) -> None:
    """Run the flow-matching loss of one noise at the first active step, the latents standing for a clip's."""
    velocity, step = update.velocity, update.active[0]
    with meter("data anchor"):
        v = velocity(update.x, step)
        (v * update.x).mean().backward()


def decode_whole(decoder: WanDecoder, latents: Tensor, conditioning: Conditioning) -> Tensor:
    """Decode to (B, 3, F, H, W) by diffusers' loop over the latent frames."""
    if decoder.frame_given:
        latents = torch.cat([conditioning["image"].to(latents), latents], 2)
    vae = decoder.vae
    latents = latents.to(vae.dtype)
    mean, std = (latents.new_tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    return vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model and the inputs of one video, the same in all modes."""

    backbone: Backbone
    costs: Costs
    latents: Tensor  # (B, C, T, h, w)
    conditioning: Conditioning


def plan_work(cfg: RewardFlConfig, backbone: Backbone) -> Workload:
    """Count the work of one process."""
    return make_workload(plan.resolve(cfg, backbone, 1, here=False), backbone, None)


def make_size(cfg: RewardFlConfig, backbone: Backbone, device: torch.device) -> Size:
    """Draw the latents and conditioning of a configuration's batch."""
    work = plan_work(cfg, backbone)
    generator, video = torch.Generator(device).manual_seed(cfg.run.seed), work.video
    parts = backbone.on_meta(video.height, video.width, video.num_frames)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(work.batch, *shape, generator=generator, device=device)

    conditioning = {name: draw(value.shape[1:]).to(value.dtype) for name, value in parts.conditioning.items()}
    costs = measure_costs(video)
    return Size(backbone=backbone, costs=costs, latents=draw(costs.shape), conditioning=conditioning)


def measure(mode: str, size: Size, cfg: RewardFlConfig, steps: int, rates: Rates) -> tuple[dict[str, Any], Tensor]:
    """Measure a mode; return its figures and its first gradient, flat, float32, in host memory."""
    gc.collect()  # the hooks of the mode before are in reference cycles
    torch.cuda.empty_cache()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: man 5 proc
    device, backbone, counted = size.latents.device, size.backbone, Counted(size.latents.device)
    work = replace(plan_work(cfg, backbone), reward_bytes=0)
    checkpointed = offload.checkpointing(device, inputs_on_host=cfg.train.memory.use_gradient_checkpointing_offload)
    with counted:
        untrained = [work.untrained] if work.untrained else []
        cached = cfg.train.memory.untrained == "boundary_cache"  # such an expert is then absent
        experts = {} if cached else {name: new_expert(cfg, backbone, name, device, None) for name in untrained}
        experts |= {name: new_expert(cfg, backbone, name, device, copy.copy(checkpointed)) for name in work.trained}
        model = Experts({name: experts[name] for name in backbone.experts if name in experts}, untrained)
        decoder = new_decoder(cfg, backbone, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.train.learning_rate, weight_decay=cfg.train.weight_decay)

    def cotangent(video: Tensor) -> Tensor:
        generator = torch.Generator(device).manual_seed(cfg.run.seed)
        return torch.randn(video.shape, generator=generator, device=device) / video.numel()

    velocity = Velocity(
        backbone=backbone,
        model=model,
        conditioning=size.conditioning,
        schedule=plan.make_schedule(cfg.sample, backbone, size.latents.shape[1:]),
    )
    update = Update(cfg=cfg, velocity=velocity, decoder=decoder, x=size.latents, cotangent=cotangent)
    updates, gradient = [], torch.empty(0)
    torch.cuda.empty_cache()  # do not count what building the networks left
    counted.copied_in = counted.copied_out = 0
    for i in range(1 + steps):
        meter = Meter(device, counted if i == 0 else None)
        updates_of = {"full_graph": full_graph, "supervised": supervised}
        updates_of.get(mode, replay_update)(update, meter)
        if i == 0:
            gradient = torch.cat([parameter.grad.flatten().cpu() for parameter in parameters])
        with meter("optimizer"):
            nn.utils.clip_grad_norm_(parameters, cfg.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        updates.append(meter)
    figures = {
        "mode": mode,
        "rows": phase_rows(updates, size.costs, work, rates),
        "copied_in": counted.copied_in, "copied_out": counted.copied_out, "rss": highest_rss(),
    }  # fmt: skip
    return figures, gradient


def phase_rows(updates: Sequence[Meter], costs: Costs, work: Workload, rates: Rates) -> list[dict[str, Any]]:
    """Return a row for each phase, with the plan's numbers if it has that phase, and one for the complete update."""
    planned_flops, planned_seconds = needs.flops(costs, work), needs.seconds(costs, work, rates)
    memory, table = needs.memory(costs, work), []
    planned = set(updates[0].seconds) <= set(PHASES)
    for name in updates[0].seconds:
        seconds = statistics.median(update.seconds[name] for update in updates[1:])
        row = {"phase": name, "seconds": seconds, "peak": max(update.peaks[name] for update in updates)}
        if planned:
            row["plan_flops"] = work.batch * sum(planned_flops[part] for part in PHASES[name])
            row["plan_seconds"] = work.batch * sum(planned_seconds[part][0] for part in PHASES[name])
            phase = "replay" if name == "data anchor" else name
            row["plan_bytes"] = memory.of(phase) if phase in memory.phases else sum(memory.resident.values())
        table.append(row)
    wholes = {key: max if key in ("peak", "plan_bytes") else sum for key in table[0] if key != "phase"}
    return [*table, {"phase": "update"} | {key: whole(row[key] for row in table) for key, whole in wholes.items()}]


def side_by_side(
    size: Size, modes: Sequence[str], load: Callable[[str], RewardFlConfig], steps: int, rates: Rates
) -> Iterator[dict[str, Any]]:
    """Yield every mode's figures; print one line for a mode that does not fit, and leave it out."""
    first: Tensor | None = None
    for mode in modes:
        try:
            figures, gradient = measure(mode, size, load(mode), steps, rates)
        except torch.OutOfMemoryError as error:
            print(f"**{mode}**: {str(error).splitlines()[0]}\n", flush=True)
            continue
        first = gradient if first is None else first
        difference = float((gradient - first).abs().max() / first.abs().max())
        yield figures | {"gradient_difference": difference, "norm": float(gradient.norm())}


def gb(amount: float | None) -> str:
    return f"{amount / 1e9:.4g}" if amount else "-"


def summary(modes: Sequence[Mapping[str, Any]], peak_flops: float, cap: float | None) -> Iterator[str]:
    """Yield a Markdown table with a row for each mode."""
    columns = "mode, s/step, / first, peak GB, first /, plan GB, in GB, out GB, host GB, TFLOP/s, of matmul's, gradient"
    yield f"| {columns.replace(', ', ' | ')} |"
    yield 12 * "|---" + "|"
    first = modes[0]["rows"][-1]
    for mode in modes:
        whole = mode["rows"][-1]
        seconds, peak, flops = whole["seconds"], whole["peak"], whole.get("plan_flops")
        speed = f"{flops / seconds / 1e12:.3g} | {flops / seconds / peak_flops:.0%}" if flops else "- | -"
        over = " (over the cap)" if cap and peak > 1e9 * cap else ""
        yield (
            f"| {mode['mode']} | {seconds:.3g} | {seconds / first['seconds']:.2f} | {gb(peak)}{over} | "
            f"{first['peak'] / peak:.2f} | {gb(whole.get('plan_bytes'))} | {gb(mode['copied_in'])} | "
            f"{gb(mode['copied_out'])} | {gb(mode['rss'])} | {speed} | {mode['gradient_difference']:.2g} |"
        )


def by_phase(mode: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown table with a row for each phase of a mode."""
    yield f"\n**{mode['mode']}**, gradient's norm {mode['norm']:.6g}\n"
    yield "| phase | s | plan s | s / plan | TFLOP, plan | TFLOP/s | peak GB | plan GB | peak / plan |"
    yield 9 * "|---" + "|"
    for row in mode["rows"]:
        flops, planned, seconds = row.get("plan_flops"), row.get("plan_bytes"), row["seconds"]
        computed = f"{flops / 1e12:.4g} | {flops / 1e12 / seconds:.3g}" if flops else "- | -"
        ratio = f"{row['peak'] / planned:.3f}" if planned else "-"
        time = f"{expected:.3g} | {seconds / expected:.2f}" if (expected := row.get("plan_seconds")) else "- | -"
        yield f"| {row['phase']} | {seconds:.3g} | {time} | {computed} | {gb(row['peak'])} | {gb(planned)} | {ratio} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--modes", default="full_graph,replay,keep_on_host,swap", help="the first is compared with")
    parser.add_argument("--steps", type=int, default=2, help="updates whose time is taken, after one whose is not")
    parser.add_argument("--memory-cap", type=float, metavar="GB", help="what a GPU may give; on a CPU only said")
    parser.add_argument("--layers", type=int, help="blocks of each expert")
    parser.add_argument("--heads", type=int, help="attention heads of each expert, which set its width")
    parser.add_argument("--vae-channels", type=int, help="the VAE's channels at full size")
    parser.add_argument("--rates", type=parse_rates, help="of the planned seconds, in TFLOP/s and GB/s")
    parser.add_argument("--vary", metavar="section.key=value,value ...", help="all modes at each of these values")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the printed figures to FILE")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    args.modes = args.modes.split(",")
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        parser.error(f"--modes: {unknown[0]!r} is none of {', '.join(MODES)}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.memory_cap and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * args.memory_cap / total), device)
    key, _, values = (args.vary or "").partition("=")
    points = [f"{key}={value}" for value in values.split(",")] if args.vary else [""]
    base = config.load(args.config, [*args.overrides, *filter(None, points[:1])])
    peak_flops = matmul_flops(DTYPES[base.model.dtype], device)
    is_gpu, rates = device.type == "cuda", args.rates or rates_on(device)
    report = {
        "command": shlex.join(["python", "benchmarks/reward_step.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} thr.",
        **library_versions(("torch", "diffusers", "peft")),
        "commit": git_commit(Path(__file__).parent),
        "seed": base.run.seed,
        "matmul TFLOP/s": peak_flops / 1e12,
        "planned at": str(rates),
    }
    print("\n".join(f"- {name}: {value}" for name, value in report.items()) + f"\n\n{NOTE}\n", flush=True)
    report["sizes"] = []
    with tempfile.TemporaryDirectory() as home:
        described = backbones.describe(base.model.model_name, model_files.model_source(base.model))
        folder = resize(described, args.layers, args.heads, args.vae_channels, Path(home))
        for point in points:
            more = [*args.overrides, *filter(None, [point]), f"model.model_paths={folder}"]

            def load(mode: str, more: Sequence[str] = more) -> RewardFlConfig:
                settings = [*more, *(EXACT if mode != "as_configured" else []), *MODES[mode]]
                cfg = config.load(args.config, settings)
                if mode != "keep_all":
                    return cfg
                chunks = described.latent_shape(cfg.data.height, cfg.data.width, cfg.data.num_frames)[1]
                return config.load(args.config, [*settings, f"train.memory.kept_chunks={chunks}"])

            cfg = load(args.modes[0])
            size = make_size(cfg, backbones.describe(cfg.model.model_name, model_files.model_source(cfg.model)), device)
            shape = "x".join(map(str, size.latents.shape))
            tokens = max(expert.tokens for expert in size.costs.experts.values())
            steps = len(config.active_steps(cfg))
            print(f"{point} latents {shape}, {tokens} tokens, {steps} active steps\n".lstrip(), flush=True)
            entry = {"vary": point, "latents": shape, "tokens": tokens, "active_steps": steps, "modes": []}
            report["sizes"].append(entry)
            for figures in side_by_side(size, args.modes, load, args.steps, rates):
                entry["modes"].append(figures)
                print("\n".join(by_phase(figures)), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(report, indent=2) + "\n")
            print("\n" + "\n".join(summary(entry["modes"], peak_flops, args.memory_cap)) + "\n", flush=True)


if __name__ == "__main__":
    main()
