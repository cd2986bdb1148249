"""One update of the training script at the configuration's size, measured, beside its estimate."""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rewardfl
from rewardfl import config, data, trust
from rewardfl.config import FlowGrpoConfig
from rewardfl.estimate.measure import measure
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.run import work
from rewardfl.run.work import Work
from rewardfl_tools._doctor_page import DIFFERS, NOT_DONE, OK, Case, Finding

# of the script's timers: what of the estimate's parts they cover
PHASES = {
    "rollout": ("rollout",),
    "decode": ("decode", "decode VJP"),
    "replay": ("replay forward", "replay recompute", "replay backward", "reference"),
}
ONE_UPDATE = [
    "train.max_steps=1", "run.sample_videos=0", "run.log_with=none", "run.resume_from_checkpoint=false",
    "run.resume_with_changes=[]", "run.keep_last=null",
]  # fmt: skip
ONE_PROCESS = ["train.train_batch_size=null"]  # of train_reward_fl.py: which counts the clips of all processes
# of train_flow_grpo.py
ONE_EPOCH = ["grpo.updates_per_epoch=1", "grpo.inner_epochs=1", "evaluation.eval_clips=null"]


def step(case: Case) -> Finding:
    """The script's own first update, in a process of its own: of Flow-GRPO an epoch of one group (or the
    fewest that fill whole forward passes).

    On the clips that are looked at, over and over where an update takes more. A first update has what libraries do
    once in it. Differs where the script ends otherwise than it should, and where a GPU's peak is above what the
    estimate says that a GPU must have; that of a CPU is the whole process's, and no GPU's.
    """
    script = Path(rewardfl.__file__).parents[1] / case.cfg.script
    if not script.is_file():
        return Finding(NOT_DONE, f"{case.cfg.script} is not beside the package; run the tool from a checkout")
    folder, table = case.out / "run", case.out / "clips.csv"
    if folder.exists():  # of an earlier page
        shutil.rmtree(folder)
    write_table(case.rows, table)
    own = [*ONE_EPOCH, f"grpo.groups={groups(case.cfg)}"] if isinstance(case.cfg, FlowGrpoConfig) else ONE_PROCESS
    paths = [f"run.output_dir={json.dumps(str(folder))}", f"data.file_name={json.dumps(str(table))}"]
    overrides = [*case.overrides, *ONE_UPDATE, *own, *paths]
    cfg = config.load(case.config, overrides)
    asked = work.work_of(cfg, case.backbone, len(case.rows), 1, processes=1)
    log = case.out / "run.log"
    command = [sys.executable, str(script), "--config", case.config, *trust.arguments(), *overrides]
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment(case))
    if done.returncode:
        lines = log.read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "without a word")
        return Finding(DIFFERS, f"{case.cfg.script} ended with {done.returncode}: {said}", {"log": str(log)})
    measured = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return compared(case, asked, measured)


def groups(cfg: FlowGrpoConfig) -> int:
    """One, or the fewest that fill whole forward passes."""
    return cfg.train.per_device_train_batch_size // math.gcd(cfg.train.per_device_train_batch_size, cfg.grpo.group_size)


def environment(case: Case) -> dict[str, str]:
    return os.environ | ({"ACCELERATE_USE_CPU": "true"} if case.device.type == "cpu" else {})


def write_table(rows: Sequence[data.Row], path: Path) -> None:
    """A metadata.csv of these rows, with absolute paths."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", *rows[0].files, "height", "width"])
        for row in rows:
            files = [named.resolve() if named else "" for named in row.files.values()]
            writer.writerow([row.prompt, *files, *(row.size or ("", ""))])


def compared(case: Case, asked: Work, measured: Mapping[str, Any]) -> Finding:
    """What the update took beside what was estimated for it. measured: its line of metrics.jsonl."""
    costs, videos = measure(asked.video), asked.spans[0].of_process
    parts, needs = flops(costs, asked), memory(costs, asked)
    seconds = {name.removeprefix("time/"): value for name, value in measured.items() if name.startswith("time/")}
    table = []
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        amount = videos * sum(parts.get(part, 0.0) for part in PHASES.get(name, ())) / 1e12
        if name == "step":
            amount = videos * sum(parts.values()) / 1e12
        table.append({"phase": name, "seconds": value, "TFLOP": amount or None, "TFLOP/s": amount / value or None})
    peak, estimated, gpu = measured["memory/peak_gb"], needs.peak / 1e9, case.device.type == "cuda"
    facts = {
        "update": f"{videos:g} videos of {asked.video.height} x {asked.video.width} x {asked.video.num_frames} at most",
        "peak memory, GB": peak,
        "estimated peak, GB": estimated,
        "estimated, GB": {phase: amount / 1e9 for phase, amount in needs.by_phase.items()},
        "estimated in host memory, GB": {name: amount / 1e9 for name, amount in needs.host.items()},
        "reward": measured["reward/mean"],
        "gradient norm": measured["grad_norm"],
        "phases": table,
    }
    whose = (
        f"peak {peak:.2f} GB, estimated {estimated:.2f}" if gpu else f"peak {peak:.2f} GB of the whole process on a CPU"
    )
    said = f"{seconds['step']:.1f} s for {videos:g} videos, {whose}"
    if gpu and peak * 1e9 > needs.peak + RESERVE:
        return Finding(DIFFERS, f"{said}, which with {RESERVE / 1e9:g} to spare is too little", facts)
    return Finding(OK, said, facts)
