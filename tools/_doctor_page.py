"""What every check of tools/doctor.py is given and what it gives, and the page that is made of all of them."""

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rewardfl import data
from rewardfl.backbones.seam import Backbone
from rewardfl.config import AnyConfig
from rewardfl.files import atomic_write, printable
from rewardfl.run import work

OK, DIFFERS, NOT_DONE = "ok", "differs", "could not be done"
WHAT_IS_IN_IT = (
    "In this page: versions, the card, sizes and digests of files under their last two names, measured numbers. Not in "
    "it: other folders, host and user, prompts, pictures, values of settings but for those below."
)


@dataclass(frozen=True)
class Case:
    """What is looked at: a configuration, its model by the headers, and the first rows of its data, which are read."""

    config: str
    overrides: Sequence[str]
    cfg: AnyConfig
    backbone: Backbone
    rows: Sequence[data.Row]
    device: torch.device
    out: Path
    digests: bool = True  # whether whole files are read for their sha256

    @property
    def clips(self) -> list[data.Row]:
        """Those of the rows that name a real clip."""
        return [row for row in self.rows if row.video is not None]

    def place(self, expert: str) -> str:
        """gpu or cpu_swap: where an expert's weights are to live, as offload.place takes it, without other rounding."""
        trained = expert in work.trained_experts(self.cfg, self.backbone.experts)
        where = self.cfg.experts.trained if trained else self.cfg.experts.untrained
        return "cpu_swap" if where == "cpu_swap" else "gpu"


@dataclass(frozen=True)
class Finding:
    """What a check has found. said: the result in a line. facts: figures by name; a list of records is a table."""

    status: str  # OK, DIFFERS or NOT_DONE
    said: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def write(case: Case, findings: Mapping[str, Finding]) -> None:
    """OUT/doctor.md and OUT/doctor.json, whole or not at all. OSError when the disk does not take them."""
    found = {
        name: {"status": one.status, "said": plain(one.said), **_plain_facts(one.facts)}
        for name, one in findings.items()
    }
    page = {"configuration": configured(case), **found}
    atomic_write(case.out / "doctor.json", json.dumps(page, indent=2, allow_nan=False) + "\n")
    atomic_write(case.out / "doctor.md", "\n".join(_markdown(page)) + "\n")


def configured(case: Case) -> dict[str, Any]:
    """The settings that the page shows: numbers and words of ours, no path and no text of the user's."""
    cfg = case.cfg
    size = f"{cfg.data.height} x {cfg.data.width}" if cfg.data.max_pixels is None else f"{cfg.data.max_pixels} pixels"
    return {
        "script": cfg.script,
        "model_name": cfg.model.model_name,
        "dtype": cfg.model.dtype,
        "size": f"{size} x {cfg.data.num_frames} frames",
        "steps": cfg.sample.num_inference_steps,
        "shift": cfg.sample.shift,
        "guidance_scale": cfg.sample.guidance_scale,
        "trainable_models": cfg.model.trainable_models,
        "experts": f"trained {cfg.experts.trained}, untrained {cfg.experts.untrained}",
        "distilled": bool(cfg.model.distill_lora_high or cfg.model.distill_lora_low),
        "lora_rank": cfg.lora.lora_rank,
        "clips looked at": len(case.rows),
        "device": case.device.type,
    }


def plain(text: str) -> str:
    """The text in a line without the names of folders above the current one, of the user's home and of the host."""
    text = printable(" ".join(text.split()))
    for folder, name in ((Path.cwd(), "."), (Path.home(), "~")):
        if len(folder.parts) > 1:  # "/" is nobody's
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", name, text)
    text = re.sub(r"(?<![\w./~-])(?:/[^\s/:,;'\"()]+)+(/[^\s/:,;'\"()]+/[^\s/:,;'\"()]+)", r"...\1", text)
    host = platform.node()
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "(host)", text) if host else text


def _plain_facts(value: Any) -> Any:
    """The facts as JSON has them: texts as `plain` gives them, what is no finite number as null."""
    if isinstance(value, Mapping):
        return {name: _plain_facts(one) for name, one in value.items()}
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Sequence):
        return [_plain_facts(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(page: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    checks = {name: facts for name, facts in page.items() if "status" in facts}
    worst = DIFFERS if any(facts["status"] == DIFFERS for facts in checks.values()) else OK
    yield from (f"# rewardfl doctor: {worst}", "", WHAT_IS_IN_IT, "")
    yield from ("| check | result | in a line |", "|---|---|---|")
    yield from (f"| {name} | {facts['status']} | {_cell(facts['said'])} |" for name, facts in checks.items())
    for name, facts in page.items():
        yield from ("", f"## {name}", "")
        tables = {key: value for key, value in facts.items() if isinstance(value, list) and _is_table(value)}
        shown = {key: value for key, value in facts.items() if key not in tables and key not in ("status", "said")}
        yield from (f"- {key}: {_words(value)}" for key, value in shown.items())
        for key, records in tables.items():
            columns = list(dict.fromkeys(column for record in records for column in record))
            yield from ("", f"{key}:", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
            yield from (
                f"| {' | '.join(_cell(_words(record.get(column))) for column in columns)} |" for record in records
            )


def _is_table(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items()) or "-"
    return ", ".join(map(_words, value)) or "-" if isinstance(value, list) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
