"""Time and memory of one update on one GPU, by phase, beside the estimate. Needs no weights, clips or faces.

    python benchmarks/step.py --config configs/wan22_face_80gb.yaml [--steps 2] [section.key=value ...] [--json FILE]
        [--compare section.key=value[,section.key=value ...]] [--compare ...]

The model has random weights and the configured one's shape (the published one's where its folder is not there); the
update has one micro-batch. Each --compare is measured, too, in the same process. The CPU reports no bytes.
"""

import argparse
import contextlib
import gc
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn

from rewardfl import backbones, config, lora, offload, reward_flow
from rewardfl.backbones.seam import DTYPES, Backbone, Experts, Velocity
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan import variants
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.backbones.wan.variants import TWO_EXPERTS
from rewardfl.estimate import needs
from rewardfl.estimate.measure import Costs
from rewardfl.estimate.measure import measure as measure_costs
from rewardfl.estimate.report import TFLOPS
from rewardfl.run import checkpoint, start, work

PHASES = {
    "rollout": ["rollout"], "decode": ["decode"], "decode VJP": ["decode VJP"],
    "replay": ["replay forward", "replay recompute", "replay backward", "reference"], "optimizer": [],
}  # fmt: skip  # with what estimate.needs.flops calls their parts
NOTE = """Random weights and conditioning. The reward is analytic: a random cotangent of the frames; face networks, text
encoder, VAE encoder and distillation take no part. A first update is left out; seconds are the others' medians, bytes
their maxima. Peak is of torch's allocator, GB is 1e9 bytes; the optimizer's estimate is what is resident."""
Measured = dict[str, tuple[float, int]]  # by phase: seconds, peak bytes (0 where there is no GPU)


def fill(model: nn.Module, device: torch.device, home: torch.device, seed: int) -> None:
    """Give a model on the meta device weights that keep activations' scale: drawn on `device`, kept at `home`."""
    generator, state = torch.Generator(device).manual_seed(seed), {}
    for name, wanted in model.named_parameters():
        value = torch.empty(wanted.shape, dtype=wanted.dtype, device=device)
        if wanted.numel() == max(wanted.shape):
            value.fill_(0 if name.endswith("bias") else 1)  # else a norm's weight
        else:
            value.normal_(0, math.prod(wanted.shape[1:]) ** -0.5, generator=generator)
        state[name] = value.to(home)
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()


def new_expert(
    cfg: config.RewardFlConfig, backbone: Backbone, name: str, device: torch.device, trained: bool
) -> nn.Module:
    """An expert as training has it: with adapter and checkpointing, or without, where `experts` says."""
    made = WanTransformer3DModel.load_config(backbone.layout.configs, subfolder=TWO_EXPERTS[name])
    expert = wan.new_expert(made, DTYPES[cfg.model.dtype], made["num_layers"], None)
    where = cfg.experts.trained if trained else cfg.experts.untrained
    home = torch.device("cpu") if where == "cpu_swap" else device
    fill(expert, device, home, cfg.run.seed)
    expert.rope = WanRotaryPosEmbed(made["attention_head_dim"], made["patch_size"], made["rope_max_seq_len"]).to(home)
    if not trained:
        return offload.place(expert, where, device, backbone.block_classes)
    rank, targets = cfg.lora.lora_rank, lora.target_modules(cfg.lora.lora_target_modules, variants.LAYERS)
    lora.inject(expert, rank, cfg.lora.lora_alpha or rank, targets, cfg.run.seed)
    if cfg.train.use_gradient_checkpointing_offload:
        expert.enable_gradient_checkpointing(offload.InputsOnHost(device))
    elif cfg.train.use_gradient_checkpointing:
        expert.enable_gradient_checkpointing()
    return offload.place(expert, where, device, backbone.block_classes)


def new_decoder(cfg: config.RewardFlConfig, configs: Path, device: torch.device) -> AutoencoderKLWan:
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(configs, subfolder="vae"))
    vae.encoder = vae.quant_conv = None
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(DTYPES[cfg.model.dtype])
    fill(vae, device, device, cfg.run.seed)
    return vae


@contextlib.contextmanager
def phase(found: Measured, name: str, device: torch.device) -> Iterator[None]:
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    yield
    if gpu:
        torch.cuda.synchronize(device)
    found[name] = time.perf_counter() - start, torch.cuda.max_memory_allocated(device) if gpu else 0


def update(
    cfg: config.RewardFlConfig, asked: work.Work, velocity: Velocity, vae: AutoencoderKLWan,
    optimizer: torch.optim.Optimizer, x: Tensor, generator: torch.Generator,
) -> tuple[Measured, float]:  # fmt: skip
    """What train_reward_fl.py does from the latents x on, and the norm of the gradient."""
    found, sigmas, device = {}, velocity.schedule.sigmas, x.device
    active = config.active_steps(cfg)
    first = velocity.schedule.handover if asked.placement == "boundary_cache" else 0
    with_graph = offload.InputsOnHost(device).whole_graph if asked.keeps_graphs else None
    with phase(found, "rollout", device):
        trajectory = reward_flow.rollout(velocity, x, sigmas, active, first, with_graph)
    with phase(found, "decode", device):
        decoded = WanDecoder(vae).decode_with_caches(trajectory.x0, asked.decode_caches)
    video = decoded.video.float()  # alive during the VJP, as in training
    grad_video = torch.randn(video.shape, generator=generator, device=device) / video.numel()
    with phase(found, "decode VJP", device):
        grad_x0 = WanDecoder(vae).vjp(trajectory.x0, grad_video, decoded)
    del decoded, video, grad_video
    with phase(found, "replay", device):
        reward_flow.replay(
            velocity, trajectory, sigmas, active, grad_x0, config.resolved_coupling(cfg),
            reference=velocity.reference, kl_weight=cfg.reward.kl_weight / len(x), kl_gradient=cfg.reward.kl_gradient,
        )  # fmt: skip
    with phase(found, "optimizer", device):
        norm = float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], cfg.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, norm


def measure(name: str, cfg: config.RewardFlConfig, steps: int, device: torch.device) -> dict[str, Any]:
    gc.collect()  # of the variant before: hooks refer to their modules in circles
    torch.cuda.empty_cache()
    held, backbone = torch.cuda.memory_allocated(), backbones.describe(cfg.model.model_name, start.model_source(cfg))
    configs = backbone.layout.configs
    asked = replace(work.work_of(cfg, backbone, None, None, 1), pack_bytes=0)
    cost, untrained = measure_costs(asked.video), [asked.untrained] if asked.untrained else []
    cached = cfg.experts.untrained == "boundary_cache"  # there is no such expert then
    experts = {expert: None if cached else new_expert(cfg, backbone, expert, device, False) for expert in untrained}
    experts |= {expert: new_expert(cfg, backbone, expert, device, True) for expert in asked.trained}
    model = Experts({name: experts[name] for name in TWO_EXPERTS}, untrained)
    vae, parameters = new_decoder(cfg, configs, device), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=cfg.train.learning_rate, weight_decay=cfg.train.weight_decay)
    generator, batch = torch.Generator(device).manual_seed(cfg.run.seed), asked.batch
    made = experts[asked.trained[0]].config
    shapes = cost.shape, (wan.TEXT_LENGTH, made.text_dim), (made.in_channels - made.out_channels, *cost.shape[1:])
    x, text, image = (torch.randn(batch, *shape, generator=generator, device=device) for shape in shapes)
    conditioning = {"text": text.to(DTYPES[cfg.model.dtype]), "image": image}
    velocity = Velocity(backbone, model, conditioning, work.schedule_of(cfg, backbone))
    torch.cuda.empty_cache()  # what building left is not to count as reserved
    found = [update(cfg, asked, velocity, vae, optimizer, x, generator) for _ in range(1 + steps)]
    tokens, shape = cost.experts[asked.trained[0]].tokens, "x".join(map(str, cost.shape))
    clips = f"{batch} x latents {shape}, {tokens} tokens; {backbone.described_by()}"
    return {
        "name": name, "clips": clips, "rows": beside_plan([phases for phases, _ in found[1:]], cost, asked),
        "plan_seconds": batch * sum(needs.flops(cost, asked).values()) / TFLOPS / 1e12,
        "norm": found[0][1],  # of the first gradient
        "held": held, "reserved": torch.cuda.memory_reserved(),  # bytes of the allocator, before and in the end
    }  # fmt: skip


def beside_plan(updates: Sequence[Measured], cost: Costs, asked: work.Work) -> list[dict[str, Any]]:
    """A row for each phase, and one for the whole update."""
    planned_flops, memory, rows = needs.flops(cost, asked), needs.memory(cost, asked), []
    for name, parts in PHASES.items():
        seconds, peaks = zip(*(phases[name] for phases in updates), strict=True)
        flops = asked.batch * sum(planned_flops[part] for part in parts)
        planned = memory.of(name) if name in memory.phases else sum(memory.resident.values())
        row = {"seconds": statistics.median(seconds), "peak": max(peaks), "plan_flops": flops, "plan_bytes": planned}
        rows.append({"phase": name} | row)
    wholes = {"seconds": sum, "peak": max, "plan_flops": sum, "plan_bytes": max}
    return [*rows, {"phase": "update"} | {key: whole(row[key] for row in rows) for key, whole in wholes.items()}]


def table(variant: dict[str, Any], first: dict[str, Any]) -> Iterator[str]:
    """Markdown, with ratios to the first variant's figures."""
    yield f"**{variant['name']}**: {variant['clips']}\n"
    yield "| phase | s | / first | TFLOP, plan | TFLOP/s | peak GB | / first | GB, plan | peak / plan |"
    yield 9 * "|---" + "|"
    for row, other in zip(variant["rows"], first["rows"], strict=True):
        seconds, peak, flops, planned = (row[key] for key in ("seconds", "peak", "plan_flops", "plan_bytes"))
        work = f"{flops / 1e12:.4g} | {flops / 1e12 / seconds:.3g}" if flops else "- | -"
        ratios = (f"{peak / other['peak']:.2f}", f"{peak / planned:.2f}") if peak else "--"
        memory = f"{gb(peak)} | {ratios[0]} | {gb(planned)} | {ratios[1]}"
        yield f"| {row['phase']} | {seconds:.3g} | {seconds / other['seconds']:.2f} | {work} | {memory} |"
    seconds, norm, held, reserved = (variant[key] for key in ("plan_seconds", "norm", "held", "reserved"))
    yield f"\nPlanned: {seconds:.3g} s at {TFLOPS:g} TFLOP/s. Allocator: {gb(held)} GB before, reserved "
    yield f"{gb(reserved)} in the end. Gradient norm of the first update: {norm:.6g}.\n"


def gb(amount: int) -> str:
    return f"{amount / 1e9:.3g}" if amount else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=2, help="updates that are measured, after one that is not")
    parser.add_argument("--compare", action="append", default=[], metavar="section.key=value[,section.key=value ...]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there what is printed")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    settings = {"as configured": []} | {text: re.split(r",(?=\w+\.\w+=)", text) for text in args.compare}
    chosen = {name: config.load(args.config, args.overrides + more) for name, more in settings.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "command": shlex.join(["python", "benchmarks/step.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        **checkpoint.library_versions(("torch", "diffusers", "peft")),
        "commit": checkpoint.git_commit(Path(__file__).parent),
        "seed": chosen["as configured"].run.seed,
    }
    print("\n".join(f"- {key}: {value}" for key, value in report.items()) + f"\n\n{NOTE}\n", flush=True)
    report["variants"] = measured = []
    for name, cfg in chosen.items():
        try:
            measured.append(measure(name, cfg, args.steps, device))
        except torch.OutOfMemoryError as error:
            print(f"**{name}**: {error}\n", flush=True)
            continue
        print("\n".join(table(measured[-1], measured[0])), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
