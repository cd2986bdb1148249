"""The checks of tools/doctor.py: the machine, and one update. They write one page."""

import argparse
import csv
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import yaml

import rewardfl
from rewardfl import command_line, config, data, machine, outputs, trust
from rewardfl.estimate.measure import measure
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.files import atomic_write, escape_control
from rewardfl.training import cli, plan, setup_run
from rewardfl.training.run_folder import git_commit, library_versions
from rewardfl.training.setup_workload import make_workload
from rewardfl.training.workload import Workload

SHOWN = (
    "model.model_name", "model.dtype", "model.attention_backend", "model.trainable_models", "train.memory",
    "lora.lora_rank", "data.height", "data.width", "data.max_pixels", "data.num_frames",
    "sample.num_inference_steps", "sample.shift", "sample.guidance_scale",
)  # fmt: skip
ONE_UPDATE = (
    "train.max_steps=1", "run.sample_videos=0", "run.log_with=none", "run.resume_from_checkpoint=false",
    "run.resume_with_changes=[]", "run.keep_last=null",
)  # fmt: skip
OK, DIFFERS = "ok", "differs"


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parts of a configuration that are checked, the first rows of its data, and a run of one update on them."""

    args: argparse.Namespace
    script: str  # that trains it
    settings: Mapping[str, str]  # for the page, and digests of the model's files
    rows: Sequence[data.Row]
    one_update: Sequence[str]  # overrides
    work: Workload  # the work of that update


@dataclass(frozen=True)
class Finding:
    """The result of a check, a line for the user, and figures by name."""

    status: str
    line: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Run the checks, write the page after each, and return the exit code. An error of a check is DIFFERS."""
    case = open_case(args)
    findings: dict[str, Finding] = {}
    for name in [args.only] if args.only else CHECKS:
        try:
            findings[name] = CHECKS[name](case)
        except (*cli.REFUSALS, OSError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            findings[name] = Finding(DIFFERS, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        write_page(case, findings)
        print(escape_control(f"{name}: {findings[name].status}: {findings[name].line}"), flush=True)
    print(f"page: {args.out}")
    return int(any(finding.status == DIFFERS for finding in findings.values()))


def open_case(args: argparse.Namespace) -> Case:
    """Open the case. Raise, before anything is written, the errors that training would raise."""
    cfg = config.load(args.config, args.overrides)
    args.device = command_line.resolve_device(args.device)
    backbone = plan.open_model(cfg)
    rows = data.load_metadata(cfg.data.file_name)[: args.clips]
    problems = [(row.line, row.problem) for row in rows if row.problem]
    rows, _ = data.usable_rows(rows, problems, skip_bad_rows=cfg.data.skip_bad_rows)
    files = [*(row.files.values() for row in rows), *backbone.weight_files.values()]
    inputs = [Path(args.config), Path(cfg.data.file_name), *(path for paths in files for path in paths if path)]
    outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=inputs).check()
    if isinstance(cfg, config.GroupRunConfig):  # an epoch of the fewest groups
        section = "forward" if isinstance(cfg, config.ForwardRlConfig) else "grpo"
        batch = cfg.train.per_device_train_batch_size
        steps = {"groups": batch // math.gcd(batch, cfg.group.group_size), "updates_per_epoch": 1, "inner_epochs": 1}
        first = ["evaluation.eval_clips=null", *(f"{section}.{key}={value}" for key, value in steps.items())]
    else:
        first = ["train.train_batch_size=null"]  # it counts the clips of all processes
    one_update = [*args.overrides, *ONE_UPDATE, *first]
    first_cfg = config.load(args.config, one_update)
    work = make_workload(plan.resolve(first_cfg, backbone, 1), backbone, rows)
    values = config.flat(config.to_dict(cfg))
    settings = {"script": cfg.script} | {key: value for key, value in values.items() if key in SHOWN}
    settings |= setup_run.digest_base_model(backbone)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return Case(args=args, script=cfg.script, settings=settings, rows=rows, one_update=one_update, work=work)


def write_page(case: Case, findings: Mapping[str, Finding]) -> None:
    """Write the page, completely or not at all."""
    worst = DIFFERS if any(finding.status == DIFFERS for finding in findings.values()) else OK
    lines = [f"# rewardfl doctor: {worst}", "", "| check | result | in a line |", "|---|---|---|"]
    lines += [f"| {n} | {f.status} | {anonymise(f.line).replace('|', '/')} |" for n, f in findings.items()]
    for name, facts in {"configuration": case.settings, **{n: f.facts for n, f in findings.items()}}.items():
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
    sees = torch.cuda.is_available()
    card = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if sees else "no GPU"
    facts = {
        "system": f"{platform.system()} {platform.machine()}, {machine.usable_cores()} cores",
        "driver, CUDA of torch": [driver, torch.version.cuda],
        "onnxruntime providers": onnxruntime.get_available_providers(),
        "versions": library_versions((*setup_run.VERSIONED, "insightface", "onnxruntime", "onnxruntime-gpu")),
        "git commit": git_commit(Path(__file__).parent),
        "free disk, GB": shutil.disk_usage(case.args.out.parent).free / 1e9,
        "host memory, GB": machine.usable_memory() / 1e9,
        "free and total memory of the first GPU, GB": [n / 1e9 for n in torch.cuda.mem_get_info()] if sees else None,
    }
    line = f"python {platform.python_version()}, torch {torch.__version__}, {card}"
    if driver and not sees:
        return Finding(DIFFERS, f"{line}; torch cannot use the driver {driver}: see pytorch.org", facts)
    return Finding(OK, line, facts)


def check_step(case: Case) -> Finding:
    """Measure the script's first update on these clips. Return DIFFERS if the script fails."""
    script = Path(rewardfl.__file__).parents[1] / case.script
    if not script.is_file():
        return Finding(DIFFERS, f"{script.name} is not next to the package; run the tool from a checkout")
    torch.cuda.empty_cache()  # for the script
    with tempfile.TemporaryDirectory(prefix="rewardfl-doctor-", dir=case.args.out.parent) as temporary:
        folder, table, log = (Path(temporary).resolve() / name for name in ("run", "clips.csv", "run.log"))
        write_table(case.rows, table)
        paths = [f"run.output_dir={json.dumps(str(folder))}", f"data.file_name={json.dumps(str(table))}"]
        command = [sys.executable, script, "--config", case.args.config, *trust.permission_arguments()]
        environment = os.environ | ({"ACCELERATE_USE_CPU": "true"} if case.args.device == "cpu" else {})
        with log.open("w") as output:
            result = subprocess.run([*command, *case.one_update, *paths], stdout=output, stderr=output, env=environment)
        if result.returncode:
            lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()] or ["no word"]
            print(escape_control("\n".join(lines[-30:])), file=sys.stderr)
            return Finding(DIFFERS, f"{script.name} ended with {result.returncode}: {lines[-1]}")
        metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return compare_with_estimate(case, metrics)


def write_table(rows: Sequence[data.Row], path: Path) -> None:
    """Write a metadata.csv of the rows, with absolute paths."""
    lines: list[list[object]] = [["prompt", *rows[0].files, "height", "width"]]
    lines += [[r.prompt, *(f.resolve() if f else "" for f in r.files.values()), *(r.size or ("", ""))] for r in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)


def compare_with_estimate(case: Case, metrics: Mapping[str, Any]) -> Finding:
    """Compare an update's line of metrics.jsonl with its estimate; a GPU's peak above the estimate is DIFFERS."""
    costs, videos = measure(case.work.video), case.work.spans[0].of_process
    needs, peak, gpu = memory(costs, case.work), metrics["memory/peak_gb"], case.args.device == "cuda"
    seconds = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    facts = {
        "peak memory, GB": peak,
        "estimated, GB": {phase: amount / 1e9 for phase, amount in needs.by_phase.items()},
        "estimated in host memory, GB": {name: amount / 1e9 for name, amount in needs.host.items()},
        "TFLOP/s": videos * sum(flops(costs, case.work).values()) / 1e12 / seconds["step"],
        "seconds by phase": seconds,
    }
    line = f"{seconds['step']:.1f} s for {videos:g} videos, peak {peak:.2f} GB"
    line += f", estimated {needs.peak / 1e9:.2f}" if gpu else " of the process on a CPU"
    if gpu and peak * 1e9 > needs.peak + RESERVE:
        return Finding(DIFFERS, f"{line}, which with {RESERVE / 1e9:g} to spare is too little", facts)
    return Finding(OK, line, facts)


CHECKS = {"environment": check_machine, "step": check_step}
