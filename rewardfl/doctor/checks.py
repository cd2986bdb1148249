"""The page of tools/doctor.py, the sequence of the checks, and the checks of machine and faces."""

import argparse
import itertools
import math
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import psutil
import torch
import yaml

from rewardfl import command_line, config, data
from rewardfl.doctor import models
from rewardfl.doctor.models import DIFFERS, NOT_DONE, OK, Case, Finding
from rewardfl.files import atomic_write, escape_control
from rewardfl.rewards import FaceIdentityReward, build_terms, resolve_rewards
from rewardfl.rewards.face import parity as face_parity
from rewardfl.training import cli, clip_scan, saving, setup_model, setup_rewards
from rewardfl.training.plan import make_schedule
from rewardfl.training.resume import digest_base_model
from rewardfl.training.run_folder import git_commit, library_versions
from rewardfl.training.workload import make_workload

SHOWN = (
    "model.model_name", "model.dtype", "model.attention_backend", "model.trainable_models", "experts.trained",
    "experts.untrained", "lora.lora_rank", "data.height", "data.width", "data.max_pixels", "data.num_frames",
    "sample.num_inference_steps", "sample.shift", "sample.guidance_scale",
)  # fmt: skip

ONE_UPDATE = (
    "train.max_steps=1", "run.sample_videos=0", "run.log_with=none", "run.resume_from_checkpoint=false",
    "run.resume_with_changes=[]", "run.keep_last=null",
)  # fmt: skip
ONE_EPOCH = ("grpo.updates_per_epoch=1", "grpo.inner_epochs=1", "evaluation.eval_clips=null")

# errors of a check that come from the machine
MACHINE = (OSError, torch.OutOfMemoryError, torch.AcceleratorError)


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
    if args.out.exists():
        raise config.ConfigError(f"--out: {args.out} is there; name a new file")
    backbone = setup_model.open_model(cfg)
    setup_rewards.find_rewards(cfg, backbone)
    rows = data.load_metadata(cfg.data.file_name)[: args.clips]
    inspect = partial(data.inspect_row, takes_image=backbone.takes_image)
    problems = [(row.line, text) for row in rows for text in inspect(row, cfg.data.num_frames, cfg.data.fps).problems]
    rows, _ = data.usable_rows(rows, problems, skip_bad_rows=cfg.data.skip_bad_rows)
    if isinstance(cfg, config.FlowGrpoConfig):
        batch = cfg.train.per_device_train_batch_size
        first = [*ONE_EPOCH, f"grpo.groups={batch // math.gcd(batch, cfg.grpo.group_size)}"]
    else:
        first = ["train.train_batch_size=null"]  # it counts the clips of all processes
    one_update = [*args.overrides, *ONE_UPDATE, *first]
    work = make_workload(config.load(args.config, one_update), backbone, len(rows), 1, processes=1)
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
        rows=rows,
        device=device,
        load=partial(clip_scan.load_sized_example, cfg),
        make_schedule=partial(make_schedule, cfg, backbone),
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
        "versions": library_versions((*saving.VERSIONED, "insightface", "onnxruntime", "onnxruntime-gpu")),
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


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "environment": check_machine,
    "weights": models.check_weights,
    "faces": check_faces,
    "step": models.check_step,
}
