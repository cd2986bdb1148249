"""tools/doctor.py on the tiny world: the checks that pass, and faults that they find."""

import csv
import dataclasses
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT, measured_before, run_tool
from runs import CONFIG, FAST, GRPO_CONFIG, GRPO_FAST, SMALL

from rewardfl import config, data
from rewardfl.doctor import checks
from rewardfl.doctor.checks import Finding, anonymise
from rewardfl_tools import doctor

pytestmark = pytest.mark.slow(40)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # configurations name their files from there


def call(out, only, *arguments, configuration=CONFIG, expect=0):
    """Return what the tool prints, and {check: its section} of its page of the world's first two clips, small."""
    chosen = ["--only", only] if only else []
    text = run_tool(
        doctor.main, "--config", configuration, "--out", out, "--clips", 2, "--device", "cpu", *chosen, *arguments,
        *SMALL, expect=expect,
    )  # fmt: skip
    return text, page(out) if out.is_file() else None


def page(out):
    text = out.read_text()
    lines = re.findall(r"^\| (\w+) \| (ok|differs) \| (.*) \|$", text, re.M)
    sections = {name: yaml.safe_load(facts) for name, facts in re.findall(r"## (\w+)\n\n```yaml\n(.*?)```", text, re.S)}
    return {name: (sections[name] or {}) | {"status": status, "line": line} for name, status, line in lines}


def open_case(tmp_path):
    """Return the case of the first clip of the tiny world."""
    out = tmp_path / "page.md"
    args = SimpleNamespace(config=CONFIG, overrides=SMALL, device="cpu", out=out, clips=1, overwrite=False)
    return checks.open_case(args)


def test_the_tiny_world_passes_and_the_page_names_no_person(tmp_path):
    out = tmp_path / "new" / "page.md"
    text, sections = call(out, "environment")
    assert [(name, section["status"]) for name, section in sections.items()] == [("environment", "ok")]
    assert "environment: ok: " in text and text.endswith(f"page: {out}\n")
    prompts = {row.prompt for row in data.load_metadata(config.load(CONFIG).data.file_name)}
    assert not [word for word in (str(Path.home()), str(ROOT), *prompts) if word in out.read_text()]


def test_folders_and_hosts_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platform, "node", lambda: "gpu-7.example.org")
    line = anonymise(f"no file {ROOT}/x.onnx, /home/somebody/a b/y on gpu-7.example.org: 0.123456789, 2.13.0, 3.0")
    assert line == "no file ./x.onnx, ~/a b/y on (host): 0.1235, 2.13.0, 3.0"


@pytest.mark.parametrize("arguments, message", [
    (["reward.reward_model_path=no/pack"], "no/pack"), (["model.model_paths=no/model"], "no/model"),
    (["data.file_name=no/clips.csv"], "no/clips.csv"), (["--device", "cuda"], "--device"), (["--clips", "0"], "--cli"),
    (["reward.others={x: {name: lost.py:Mine}}"], "x.name: lost.py:Mine is code of lost.py; --trust"),
    (["--out", "{folder}"], "--out"), (["--out", "{folder}/mine.md"], "--out"),
])  # fmt: skip
def test_refused_input_leaves_everything_as_it_was(monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "mine.md").write_text("mine")
    arguments = [word.format(folder=tmp_path) if word.startswith("{folder") else word for word in arguments]
    text, sections = call(tmp_path / "new" / "page.md", "", *arguments, expect=2)
    assert message in text and "error: " in text and sections is None
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_an_error_of_one_check_leaves_the_others(monkeypatch, tmp_path):
    def fail(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(checks, "CHECKS", {"environment": fail, "step": lambda case: Finding("ok", "done")})
    text, sections = call(tmp_path / "page.md", "", expect=1)
    assert [section["status"] for section in sections.values()] == ["differs", "ok"]
    assert "environment: differs: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB\n" in text


def test_a_driver_that_this_torch_cannot_use_differs(monkeypatch, tmp_path):
    answer, real = SimpleNamespace(returncode=0, stdout="550.54.15\n550.54.15\n"), subprocess.run
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: answer if command[0] == "nvidia-smi" else real(command, **how)
    )
    text, sections = call(tmp_path / "page.md", "environment", expect=1)
    assert "torch cannot use the driver 550.54.15" in text and sections["environment"]["status"] == "differs"


@pytest.mark.parametrize("configuration, settings, videos", [
    (CONFIG, FAST, 1), (GRPO_CONFIG, [*GRPO_FAST, "train.per_device_train_batch_size=4"], 4),
])  # fmt: skip
def test_one_update_leaves_only_the_page(monkeypatch, tmp_path, configuration, settings, videos):
    """In Flow-GRPO four videos of two groups, as a forward pass takes four and a group has two."""
    seen = []

    def run(command, **how):
        cfg = config.load(command[3], [word for word in command[4:] if word != "--trust-code"])
        seen.append(cfg)
        Path(cfg.run.output_dir).mkdir()
        line = {"time/step": 2.0, "time/replay": 1.0, "memory/peak_gb": 0.5, "reward/mean": 0.5, "grad_norm": 1.0}
        Path(cfg.run.output_dir, "metrics.jsonl").write_text(json.dumps(line))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(checks.subprocess, "run", run)
    monkeypatch.setattr(checks, "measure", measured_before)
    text, sections = call(tmp_path / "page.md", "step", *settings, configuration=configuration)
    (cfg,) = seen
    assert cfg.train.max_steps == 1 and cfg.data.height == 32
    assert configuration == CONFIG or (cfg.grpo.groups, cfg.grpo.group_size) == (2, 2)
    assert f"step: ok: 2.0 s for {videos} videos, peak 0.50 GB" in text
    assert sections["step"]["seconds by phase"] == {"step": 2.0, "replay": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.long
def test_one_update_of_the_script(tmp_path):
    _, sections = call(tmp_path / "page.md", "step", *FAST)
    assert sections["step"]["status"] == "ok" and sections["step"]["seconds by phase"]["rollout"] > 0


def test_a_script_that_refuses_differs_with_its_last_line(monkeypatch, tmp_path):
    def run(command, stdout, **how):
        stdout.write("one\nerror: reward.others.words: no\n\n")
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(checks.subprocess, "run", run)
    text, _ = call(tmp_path / "page.md", "step", *FAST, expect=1)
    assert "step: differs: train_reward_fl.py ended with 2: error: reward.others.words: no" in text and "one\n" in text


@pytest.mark.parametrize("peak, status", [(0.06, "ok"), (1.9, "ok"), (2.5, "differs")])
def test_a_gpu_peak_above_the_estimate_differs(monkeypatch, tmp_path, peak, status):
    monkeypatch.setattr(checks, "measure", measured_before)
    case = open_case(tmp_path)
    case.args.device = "cuda"
    finding = checks.compare_with_estimate(case, {"time/step": 2.0, "memory/peak_gb": peak})
    assert finding.status == status and f"peak {peak:.2f} GB, estimated 0.07" in finding.line


def test_the_table_of_the_update_holds_its_rows(tmp_path):
    row = data.load_metadata(config.load(CONFIG).data.file_name)[0]
    prompt_row = dataclasses.replace(row, video=None, prompt='of "one", a\nprompt', size=(32, 48))
    checks.write_table([row, prompt_row], tmp_path / "clips.csv")
    with (tmp_path / "clips.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2
    first, second = data.load_metadata(tmp_path / "clips.csv")
    assert first.video.samefile(row.video) and first.prompt == row.prompt and first.size is None
    assert second.video is None and second.size == (32, 48)
