"""The checks of tools/doctor.py: machine, weights, faces and one update. They write one page."""

import argparse
import csv
import gc
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnxruntime
import psutil
import torch
import yaml
from diffusers import ModelMixin, WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

import rewardfl
from rewardfl import backbones, command_line, config, data, outputs, trust
from rewardfl.backbones.protocol import Backbone, Experts, Schedule, Shape
from rewardfl.backbones.wan.backbone import Wan
from rewardfl.estimate.measure import measure
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.files import atomic_write, escape_control
from rewardfl.memory import attention, offload
from rewardfl.noise import draw_noise
from rewardfl.rewards import FaceIdentityReward, build_terms, resolve_rewards
from rewardfl.rewards.face import parity as face_parity
from rewardfl.training import cli, clip_scan, setup_model, setup_run
from rewardfl.training.plan import resolve
from rewardfl.training.run_folder import git_commit, library_versions
from rewardfl.training.setup_run import digest_base_model
from rewardfl.training.setup_workload import make_workload
from rewardfl.training.timer import peak_memory_gb
from rewardfl.training.workload import Workload
from rewardfl.weights import wan_names

SHOWN = (
    "model.model_name", "model.dtype", "model.attention_backend", "model.trainable_models", "experts.trained",
    "experts.untrained", "lora.lora_rank", "data.height", "data.width", "data.max_pixels", "data.num_frames",
    "sample.num_inference_steps", "sample.shift", "sample.guidance_scale",
)  # fmt: skip

ONE_UPDATE = (
    "train.max_steps=1", "run.sample_videos=0", "run.log_with=none", "run.resume_from_checkpoint=false",
    "run.resume_with_changes=[]", "run.keep_last=null",
)  # fmt: skip
ONE_EPOCH = ("updates_per_epoch=1", "inner_epochs=1")  # of the section with the groups

# errors of a check that come from the machine
MACHINE = (OSError, torch.OutOfMemoryError, torch.AcceleratorError)

Status = Literal["ok", "differs", "could not be done"]
OK: Status = "ok"
DIFFERS: Status = "differs"
NOT_DONE: Status = "could not be done"


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
    base: Backbone  # the same without a distillation
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


def run(args: argparse.Namespace) -> int:
    """Run the checks, write the page after each, and return the exit code. Wrong input counts as DIFFERS."""
    try:
        case = open_case(args)
    except (*cli.REFUSALS, OSError) as error:
        print(escape_control(f"error: {error}"), file=sys.stderr)
        return 2
    findings: dict[str, Finding] = {}
    for name in (name for name in CHECKS if name in (args.only or CHECKS)):
        began = time.perf_counter()
        try:
            finding = CHECKS[name](case)
        except (*cli.REFUSALS, *MACHINE) as error:
            line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            finding = Finding(NOT_DONE if isinstance(error, MACHINE) else DIFFERS, line)
        findings[name] = replace(finding, facts={**finding.facts, "seconds": time.perf_counter() - began})
        write_page(case, findings)
        print(escape_control(f"{name}: {finding.status}: {finding.line}"), flush=True)
    print(f"page: {case.args.out}")
    return int(any(finding.status == DIFFERS for finding in findings.values()))


def open_case(args: argparse.Namespace) -> Case:
    """Open the case. Raise, before anything is written, the errors that training would raise."""
    cfg = config.load(args.config, args.overrides)
    device = torch.device(command_line.resolve_device(args.device))
    backbone = setup_model.open_model(cfg)
    plan = resolve(cfg, backbone, 1)
    rows = data.load_metadata(cfg.data.file_name)[: args.clips]
    inspect = partial(data.inspect_row, takes_image=backbone.takes_image)
    problems = [(row.line, text) for row in rows for text in inspect(row, cfg.data.num_frames, cfg.data.fps).problems]
    rows, _ = data.usable_rows(rows, problems, skip_bad_rows=cfg.data.skip_bad_rows)
    inputs = [path for row in rows for path in row.files.values() if path]
    inputs += [Path(args.config), Path(cfg.data.file_name)]
    inputs += [file for files in backbone.weight_files.values() for file in files]
    outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=inputs).check()
    if isinstance(cfg, config.GroupRunConfig):
        batch = cfg.train.per_device_train_batch_size
        section = "forward" if isinstance(cfg, config.ForwardRlConfig) else "grpo"
        one_group = f"{section}.groups={batch // math.gcd(batch, cfg.group.group_size)}"
        first = ["evaluation.eval_clips=null", one_group, *(f"{section}.{setting}" for setting in ONE_EPOCH)]
    else:
        first = ["train.train_batch_size=null"]  # it counts the clips of all processes
    one_update = [*args.overrides, *ONE_UPDATE, *first]
    first_cfg = config.load(args.config, one_update)
    work = make_workload(first_cfg, resolve(first_cfg, backbone, 1), backbone, rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return Case(
        args=args,
        script=cfg.script,
        settings={key: value for key, value in config.flat(cfg).items() if key in SHOWN},
        one_update=one_update,
        work=work,
        attention_backend=cfg.model.attention_backend,
        faces=[spec for spec in config.list_reward_specs(cfg) if spec.name in ("face_identity", "face_judge")],
        backbone=backbone,
        base=backbones.open(cfg.model.model_name, replace(setup_model.model_source(cfg), distilled=("", ""))),
        rows=rows,
        device=device,
        load=partial(clip_scan.load_sized_example, cfg.data),
        make_schedule=plan.schedule,
    )


def write_page(case: Case, findings: Mapping[str, Finding]) -> None:
    """Write the page, whole or not at all. Raise OSError for errors of the disk."""
    shown = {"script": case.script, **case.settings, "clips": str(len(case.rows)), **digest_base_model(case.backbone)}
    worst = DIFFERS if any(finding.status == DIFFERS for finding in findings.values()) else OK
    lines = [f"# rewardfl doctor: {worst}", "", "| check | result | in a line |", "|---|---|---|"]
    lines += [f"| {n} | {f.status} | {anonymise(f.line).replace('|', '/')} |" for n, f in findings.items()]
    for name, facts in {"configuration": shown, **{n: finding.facts for n, finding in findings.items()}}.items():
        text = yaml.safe_dump(dict(facts), sort_keys=False, default_flow_style=None, width=160, allow_unicode=True)
        lines += ["", f"## {name}", "", "```yaml", *map(anonymise, text.splitlines()), "```"]
    atomic_write(case.args.out, "\n".join(lines) + "\n")


def anonymise(text: str) -> str:
    """Return the line without the current folder, the user's home and the host; numbers with four digits."""
    text = escape_control(text).replace("`", "´")
    for word, name in ((str(Path.cwd()), "."), (str(Path.home()), "~"), (platform.node(), "(host)")):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", name, text) if len(word) > 1 else text
    return re.sub(r"\b\d+\.\d{5,}(e[-+]\d+)?\b", lambda number: f"{float(number[0]):.4g}", text)


def check_machine(case: Case) -> Finding:
    """Return versions, card and driver. Return DIFFERS where there is a driver and this torch cannot use its GPU."""
    command, driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], ""
    if shutil.which(command[0]):
        result = subprocess.run(command, capture_output=True, text=True)
        driver = "" if result.returncode else result.stdout.split("\n")[0].strip()
    sees, host = torch.cuda.is_available(), psutil.virtual_memory()
    card = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if sees else "no GPU"
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "driver, CUDA of torch": [driver, torch.version.cuda],
        "onnxruntime providers": onnxruntime.get_available_providers(),
        "versions": library_versions((*setup_run.VERSIONED, "insightface", "onnxruntime", "onnxruntime-gpu")),
        "git commit": git_commit(Path(__file__).parent),
        "free disk, GB": shutil.disk_usage(case.args.out.parent).free / 1e9,
        "free and whole memory, GB": [host.available / 1e9, host.total / 1e9],
        "the same of the first GPU": [amount / 1e9 for amount in torch.cuda.mem_get_info()] if sees else None,
    }
    line = f"python {platform.python_version()}, torch {torch.__version__}, {card}"
    if driver and not sees:
        return Finding(DIFFERS, f"{line}; torch cannot use the driver {driver}: see pytorch.org", facts)
    return Finding(OK, line, facts)


@torch.no_grad()
def check_faces(case: Case) -> Finding:
    """Compare each pack with insightface's on the first clip, and return its faces in all clips.

    Return DIFFERS where a clip shows no face. Raise FaceParityError where insightface detects something else.
    """
    terms = {term.label: term.reward for term in build_terms(resolve_rewards(case.faces), case.device)}
    packs = {label: reward.identity for label, reward in terms.items() if isinstance(reward, FaceIdentityReward)}
    rows = [row for row in case.rows if row.video is not None]
    if not packs or not rows:
        return Finding(NOT_DONE, "the configuration names no face pack" if rows else "no row names a video")
    clips = {row.line: case.load(row).reference.to(case.device) for row in rows}
    lines = face_parity.check_packs(packs, next(iter(clips.values())))
    table: list[dict[str, Any]] = []
    for (label, identity), (number, clip) in itertools.product(packs.items(), clips.items()):
        if (pool := identity.pool(clip)) is None:
            return Finding(DIFFERS, f"{label}: no face in the clip of line {number}", {"parity": lines})
        width = float((pool.boxes[:, 2] - pool.boxes[:, 0]).mean())
        figures = {"width, px": width, "coverage": pool.coverage, "self-similarity": pool.cap}
        table.append({"pack": label, "line": number, **figures})
    line, status = f"a face in all {len(clips)} clips", OK
    for skipped in (line for line in lines if "skipped" in line):
        line, status = skipped, NOT_DONE
    return Finding(status, line, {"parity": lines, "clips": table})


@torch.no_grad()
def check_weights(case: Case) -> Finding:
    """Compare each expert's velocity of the same noise with that of the weights as diffusers loads them.

    Return DIFFERS where it is not the same to the last bit, or does not repeat itself. A distillation is left out.
    """
    run_expert, why_not, line, status = make_velocity(case), not_comparable(case.base), "", OK
    table = {name: compare_velocities(case, name, run_expert, compare=not why_not) for name in case.base.experts}
    for name, record in table.items():
        distance = record.get("from diffusers'", record["repeated"])
        if not distance <= record["repeated"]:  # NaN differs, too
            line, status = f"{name}'s velocity differs by {distance:.1e} of its largest value; ", DIFFERS
    line += f"not compared with diffusers' loading: {why_not}" if why_not else "compared with diffusers' loading"
    if (largest := max(record.get("with a graph", 0.0) for record in table.values())) > 0:
        line += f"; with a graph the velocity differs by {largest:.1e}: if Flow-GRPO's check of the ratio stops, set "
        line += "model.attention_backend: _native_flash"
    return Finding(status, line, {"experts": table, "peak memory, GB": peak_memory_gb(case.device)})


def make_velocity(case: Case) -> Callable[[str, ModelMixin], Tensor]:
    """Return a function for an expert's velocity of the first row's noise, at the first step of the expert."""
    backbone, row, num_frames = case.base, case.rows[0], case.work.video.num_frames
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
    work, expert = case.work, place_expert(case, name, case.base.load_expert)
    ours = run_expert(name, expert)
    distances = {"repeated": max_rel_error(run_expert(name, expert), ours)}
    if work.checkpointing:
        expert.enable_gradient_checkpointing(offload.checkpointing(case.device, inputs_on_host=work.offload_inputs))
    if name in work.trained:
        with torch.enable_grad():
            distances["with a graph"] = max_rel_error(run_expert(name, expert), ours)
    del expert
    if compare:
        stock = place_expert(case, name, partial(load_stock, case.base))
        distances["from diffusers'"] = max_rel_error(ours, run_expert(name, stock))
    return distances


def place_expert(case: Case, name: str, load: Callable[[str], ModelMixin]) -> ModelMixin:
    """Load an expert with the run's placement and attention, without other rounding."""
    free_memory()  # of the previous expert
    expert, work = load(name), case.work
    if case.attention_backend != attention.NATIVE:
        expert.set_attention_backend(case.attention_backend)
    swapped = (work.trained_placement if name in work.trained else work.untrained_placement) == "cpu_swap"
    return offload.move_expert(expert, "cpu_swap" if swapped else "gpu", case.device, case.base.block_classes)


def free_memory() -> None:
    """Release memory without references, of Python and of the GPU."""
    gc.collect()  # the swapping of blocks holds circular references
    torch.cuda.empty_cache()


def not_comparable(backbone: Backbone) -> str:
    """Return the reason why diffusers cannot load the weights; empty where it can."""
    if not isinstance(backbone, Wan):
        return "this is no Wan model"
    files = [file for name in backbone.experts for file in backbone.weight_files[name]]
    return "" if all(file.suffix == ".safetensors" for file in files) else "a file is no .safetensors"


def load_stock(backbone: Backbone, name: str) -> ModelMixin:
    """Load an expert as diffusers does."""
    folder, part, dtype = backbone.folder, backbone.parts[name], backbone.dtype
    if backbone.weight_files[name][0].parent == folder / part:
        expert = WanTransformer3DModel.from_pretrained(folder / part, torch_dtype=dtype, local_files_only=True)
    else:
        tensors = {key: value for file in backbone.weight_files[name] for key, value in load_file(file).items()}
        expert = WanTransformer3DModel.from_single_file(
            tensors, config=str(folder), subfolder=part, local_files_only=True
        )  # not torch_dtype, which would round the parts that from_pretrained keeps in float32
    for key, parameter in expert.named_parameters():
        # a copy: tensors mapped from a file have odd addresses, and a CPU's sums differ
        parameter.data = parameter.data.to(torch.float32 if wan_names.stays_float32(key) else dtype, copy=True)
    return expert.eval().requires_grad_(requires_grad=False)


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


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "environment": check_machine,
    "weights": check_weights,
    "faces": check_faces,
    "step": check_step,
}
