"""Cases and findings of tools/doctor.py, and the checks that run the model: velocities, and one update."""

import argparse
import csv
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import ModelMixin, WanTransformer3DModel
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import rewardfl
from rewardfl import config, data, trust
from rewardfl.backbones.protocol import Backbone, Experts, Schedule, Shape
from rewardfl.backbones.wan import files as wan_files
from rewardfl.backbones.wan.backbone import Wan
from rewardfl.estimate.measure import measure
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.files import escape_control
from rewardfl.memory import attention, offload
from rewardfl.noise import draw_noise
from rewardfl.training.timer import peak_memory_gb
from rewardfl.training.workload import Workload
from rewardfl.weights import wan_names

Status = Literal["ok", "differs", "could not be done"]
OK: Status = "ok"
DIFFERS: Status = "differs"
NOT_DONE: Status = "could not be done"

# Tolerated difference of velocities where we mostly fuse a distillation, which diffusers' adapter adds to every product
# instead. The tests' small network shows 4e-7 and 7e-3, and 0.2 without the distillation.
FUSED = {torch.float32: 1e-4, torch.bfloat16: 0.03}

LORA_LEAVES = (".lora_down.weight", ".lora_up.weight", ".lora_A.weight", ".lora_B.weight", ".alpha")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parts of a configuration that are checked, its model by the headers, and the first rows of its data."""

    args: argparse.Namespace
    script: str  # that trains it
    settings: Mapping[str, str]  # for the page
    one_update: Sequence[str]  # overrides for a run of one update
    work: Workload  # of that update
    attention_backend: str
    faces: Sequence[config.RewardSpec]  # of face rewards
    backbone: Backbone
    rows: Sequence[data.Row]
    device: torch.device
    load: Callable[[data.Row], data.Example]  # at the configured size
    make_schedule: Callable[[Shape], Schedule]  # for the latents' shape


@dataclass(frozen=True)
class Finding:
    """The result of a check, a line for the user, and figures by name."""

    status: Status
    line: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@torch.no_grad()
def check_weights(case: Case) -> Finding:
    """Compare each expert's velocity of the same noise with that of the weights as diffusers loads them.

    Return DIFFERS where it is not the same to the last bit (with a distillation: within FUSED), or does not repeat
    itself.
    """
    run_expert, why_not, line, status = make_velocity(case), not_comparable(case.backbone), "", OK
    table = {name: compare_velocities(case, name, run_expert, compare=not why_not) for name in case.backbone.experts}
    for name, record in table.items():
        distance, allowed = record.get("from diffusers'", record["repeated"]), record["repeated"]
        if isinstance(case.backbone, Wan) and name in distillations(case.backbone):
            allowed = max(allowed, FUSED[case.backbone.dtype])
        if not distance <= allowed:  # NaN differs, too
            line, status = f"{name}'s velocity differs by {distance:.1e} of its largest value; ", DIFFERS
    line += f"not compared with diffusers' loading: {why_not}" if why_not else "compared with diffusers' loading"
    if (largest := max(record.get("with a graph", 0.0) for record in table.values())) > 0:
        line += f"; with a graph the velocity differs by {largest:.1e}: if Flow-GRPO's check of the ratio stops, set "
        line += "model.attention_backend: _native_flash"
    return Finding(status, line, {"experts": table, "peak memory, GB": peak_memory_gb(case.device)})


def make_velocity(case: Case) -> Callable[[str, ModelMixin], Tensor]:
    """Return a function for an expert's velocity of the first row's noise, at the first step of the expert."""
    backbone, row, num_frames = case.backbone, case.rows[0], case.work.video.num_frames
    example = case.load(row)
    conditioning = dict(backbone.text_encoder(case.device)(row.prompt))
    conditioning |= backbone.image_encoder(case.device)(example.image, num_frames)
    shape = backbone.latent_shape(*example.size, num_frames)
    schedule = case.make_schedule(shape)
    noise = draw_noise((1, *shape), 0, case.device)

    def run_expert(name: str, expert: ModelMixin) -> Tensor:
        step = schedule.experts.index(name) if name in schedule.experts else 0
        x = noise.clone().requires_grad_(torch.is_grad_enabled())
        experts = Experts(dict.fromkeys(backbone.experts, expert))
        return backbone.velocity(experts, x, step, schedule, conditioning).detach()

    return run_expert


def max_rel_error(values: Tensor, reference: Tensor) -> float:
    return float((values - reference).abs().max() / reference.abs().max())


def compare_velocities(
    case: Case, name: str, run_expert: Callable[[str, ModelMixin], Tensor], *, compare: bool
) -> dict[str, float]:
    """Return the distances of an expert's velocities: the largest difference over the largest absolute value.

    Our loading is repeated, and a trained expert runs with a graph, which may mean another attention kernel. With
    `compare`, diffusers' loading follows. One model is in memory at a time.
    """
    work, expert = case.work, place_expert(case, name, case.backbone.load_expert)
    ours = run_expert(name, expert)
    distances = {"repeated": max_rel_error(run_expert(name, expert), ours)}
    if work.checkpointing:
        checkpointing = offload.checkpointing(case.device, work.offload_inputs, work.keep_attention)
        expert.enable_gradient_checkpointing(checkpointing)
    if name in work.trained:
        with torch.enable_grad():
            distances["with a graph"] = max_rel_error(run_expert(name, expert), ours)
    del expert
    if compare and isinstance(case.backbone, Wan):
        stock = place_expert(case, name, partial(load_stock, case.backbone))
        distances["from diffusers'"] = max_rel_error(ours, run_expert(name, stock))
    return distances


def place_expert(case: Case, name: str, load: Callable[[str], ModelMixin]) -> ModelMixin:
    """Load an expert with the run's placement and attention, without other rounding."""
    free_memory()  # of the previous expert
    expert, work = load(name), case.work
    if case.attention_backend != attention.NATIVE:
        expert.set_attention_backend(case.attention_backend)
    swapped = (work.trained_placement if name in work.trained else work.placement) == "cpu_swap"
    return offload.move_expert(expert, "cpu_swap" if swapped else "gpu", case.device, case.backbone.block_classes)


def free_memory() -> None:
    """Release memory without references, of Python and of the GPU."""
    gc.collect()  # the swapping of blocks holds circular references
    torch.cuda.empty_cache()


def distillations(backbone: Wan) -> dict[str, Path]:
    """Return the files of the distillation by expert."""
    return {name: Path(path) for name, path in zip(backbone.experts, backbone.source.distilled, strict=False) if path}


def layout_of(backbone: Wan) -> wan_files.Layout:
    assert backbone.layout is not None  # it was opened from files
    return backbone.layout


def not_comparable(backbone: Backbone) -> str:
    """Return the reason why diffusers cannot load all of the weights (a DoRA, changed norms); empty where it can."""
    if not isinstance(backbone, Wan):
        return "this is no Wan model"
    loras, files = distillations(backbone).values(), wan_files.files(layout_of(backbone))
    if any(file.suffix != ".safetensors" for file in (*loras, *(f for name in backbone.experts for f in files[name]))):
        return "a file is no .safetensors"
    for path in loras:
        with safe_open(path, "pt") as file:
            names, scaled_elsewhere = list(file.keys()), "lora_adapter_metadata" in (file.metadata() or {})
        if scaled_elsewhere or not all(n.startswith("diffusion_model.") and n.endswith(LORA_LEAVES) for n in names):
            return "diffusers reads less of the distillation"
    return ""


def load_stock(backbone: Wan, name: str) -> ModelMixin:
    """Load an expert as diffusers does, and a distillation as its pipelines' load_lora_weights."""
    layout, part, dtype = layout_of(backbone), backbone.variant.parts[name], backbone.dtype
    if layout.experts[name] == [layout.configs / part]:
        expert = WanTransformer3DModel.from_pretrained(layout.configs / part, torch_dtype=dtype, local_files_only=True)
    else:
        tensors = {key: value for file in wan_files.files(layout)[name] for key, value in load_file(file).items()}
        expert = WanTransformer3DModel.from_single_file(
            tensors, config=str(layout.configs), subfolder=part, local_files_only=True
        )  # not torch_dtype, which would round the parts that from_pretrained keeps in float32
    for key, parameter in expert.named_parameters():
        # a copy: tensors mapped from a file have odd addresses, and a CPU's sums differ
        parameter.data = parameter.data.to(torch.float32 if wan_names.stays_float32(key) else dtype, copy=True)
    if path := distillations(backbone).get(name):
        # in float32: diffusers scales the factors in the precision that they come in
        values = {key: value.float() for key, value in load_file(path).items()}
        WanLoraLoaderMixin.load_lora_into_transformer(WanLoraLoaderMixin.lora_state_dict(values), expert)
    return expert.eval().requires_grad_(False)


def check_step(case: Case) -> Finding:
    """Measure the script's first update on these clips, for Flow-GRPO an epoch of the fewest groups.

    Return DIFFERS where the script fails, and where a GPU's peak is above the estimated need.
    """
    script = Path(rewardfl.__file__).parents[1] / case.script
    if not script.is_file():
        return Finding(NOT_DONE, f"{case.script} is not next to the package; run the tool from a checkout")
    free_memory()
    with tempfile.TemporaryDirectory(prefix="rewardfl-doctor-", dir=case.args.out.parent) as temporary:
        folder, table, log = (Path(temporary).resolve() / name for name in ("run", "clips.csv", "run.log"))
        write_table(case.rows, table)
        paths = [f"run.output_dir={json.dumps(str(folder))}", f"data.file_name={json.dumps(str(table))}"]
        command = [sys.executable, str(script), "--config", case.args.config, *trust.permission_arguments()]
        environment = os.environ | ({"ACCELERATE_USE_CPU": "true"} if case.device.type == "cpu" else {})
        with log.open("w") as output:
            result = subprocess.run(
                [*command, *case.one_update, *paths], stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        if result.returncode:
            lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()] or ["no word"]
            print(escape_control("\n".join(lines[-30:])), file=sys.stderr)
            return Finding(DIFFERS, f"{case.script} ended with {result.returncode}: {lines[-1]}")
        metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return compare_with_estimate(case, metrics)


def write_table(rows: Sequence[data.Row], path: Path) -> None:
    """Write a metadata.csv of the rows, with absolute paths."""
    lines: list[list[object]] = [["prompt", *rows[0].files, "height", "width"]]
    lines += [[r.prompt, *(f.resolve() if f else "" for f in r.files.values()), *(r.size or ("", ""))] for r in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)


def compare_with_estimate(case: Case, metrics: Mapping[str, Any]) -> Finding:
    """Compare the update with its estimate. metrics: its line of metrics.jsonl."""
    costs, videos = measure(case.work.video), case.work.spans[0].of_process
    needs = memory(costs, case.work)
    seconds = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    peak, gpu = metrics["memory/peak_gb"], case.device.type == "cuda"
    facts = {
        "peak memory, GB": peak,
        "estimated, GB": {phase: amount / 1e9 for phase, amount in needs.by_phase.items()},
        "estimated in host memory, GB": {name: amount / 1e9 for name, amount in needs.host.items()},
        "TFLOP/s": videos * sum(flops(costs, case.work).values()) / 1e12 / seconds["step"],
        "seconds by phase": seconds,
    }
    line = f"{seconds['step']:.1f} s for {videos:g} videos, peak {peak:.2f} GB"
    line += f", estimated {needs.peak / 1e9:.2f}" if gpu else " of the whole process on a CPU"
    if gpu and peak * 1e9 > needs.peak + RESERVE:
        return Finding(DIFFERS, f"{line}, which with {RESERVE / 1e9:g} to spare is too little", facts)
    return Finding(OK, line, facts)
