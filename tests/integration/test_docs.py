"""What the documents tell a new user to do, done, and what they point at, looked up."""

import argparse
import fnmatch
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, run_tool
from pipelines import I2V

from rewardfl import command_line, config, rewards
from rewardfl.backbones.wan.files import find_files
from rewardfl.training import arguments, model_files
from rewardfl_tools import plan_run

# The files that the guide's commands fetch, as the repositories have them.
SHARDS = [f"diffusion_pytorch_model-0000{i}-of-00006.safetensors" for i in range(1, 7)]
EXPERT = ["config.json", "diffusion_pytorch_model.safetensors.index.json", *SHARDS]
LIGHTNING = ("Wan2.2-I2V-A14B-4steps-lora-rank64-Seko-V1", "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1")
REPOSITORIES = {
    "Wan-AI/Wan2.2-I2V-A14B": [
        *(f"{noise}_noise_model/{file}" for noise in ("high", "low") for file in EXPERT),
        "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth", "configuration.json", "README.md",
        *(f"google/umt5-xxl/{name}" for name in ("spiece.model", "tokenizer.json", "tokenizer_config.json")),
    ],
    "lightx2v/Wan2.2-Lightning": [
        *(f"{folder}/{noise}_noise_model.safetensors" for folder in LIGHTNING for noise in ("high", "low")),
        "README.md",
    ],
}  # fmt: skip
# configurations of the model that the guide fetches
CONFIGS = sorted(
    path.name for path in (ROOT / "configs").glob("wan2*.yaml") if config.load(path).model.model_name == "wan2_2"
)


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PLACES = (
    r"`((?:(?:rewardfl|tools|tests|benchmarks|configs|examples|assets|docs)/|train_\w+\.py)[\w./-]*)(?:: ([^`]+))?`"
)


def named(text):
    """{"the file or room" or "the file or room: name"} of the places in the code that a document names in backticks."""
    return {
        f"{place}: {name}" if name else place
        for place, names in re.findall(PLACES, text)
        for name in (names.split(", ") if names else [""])
    }


def is_there(place):
    """Whether a file or room is there, and defines the name: a function, a class, a field or a constant."""
    path, _, name = place.partition(": ")
    if not (ROOT / path).exists():
        return False
    files = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*.py")
    defines = rf"^\s*(def|class) {re.escape(name)}\b|^\s*{re.escape(name)}\b.*[:=]"
    return not name or any(re.search(defines, file.read_text(), re.M) for file in files)


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(document):
    """The links of a document, but those to other sites, that lead to no file or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        text = path.read_text() if anchor and path.is_file() else ""
        anchors = {slug(found) for found in re.findall(r"^#+ (.*)$", text, re.M)}
        if not path.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    return broken


def test_every_link_leads_somewhere(tmp_path):
    assert {document: broken for document in DOCUMENTS if (broken := broken_links(document))} == {}
    document = tmp_path / "a.md"
    document.write_text("# One, two\n[1](#one-two) [2](#one) [3](b.md) [4](a.md#one-two) [5](https://x.org/b.md)\n")
    assert broken_links(document) == ["#one", "b.md"]


def test_no_document_is_out_of_reach():
    """From the README every page can be reached by links."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        document = waiting.pop()
        reached.add(document)
        targets = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", document.read_text())
        paths = [(document.parent / target).resolve() for target in targets]
        waiting += [path for path in paths if path.is_file() and path not in reached]
    assert {path.name for path in DOCUMENTS if path not in reached} == set()


def test_what_documents_name_exists():
    for document in DOCUMENTS:
        if document.name not in ("log.md", "CHANGELOG.md"):  # histories
            assert [place for place in sorted(named(document.read_text())) if not is_there(place)] == [], document.name
    places = named("`rewardfl/flow.py: transition, nothing` `rewardfl/gone.py` `rewardfl/training/: Shard`")
    assert len(places) == 4
    assert {place for place in places if not is_there(place)} == {"rewardfl/flow.py: nothing", "rewardfl/gone.py"}


def test_tests_that_documents_name_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for document in (path for path in DOCUMENTS if path.name != "log.md"):
        for name in set(re.findall(r"\btest_[a-z0-9_]+\b", document.read_text())):
            there = any((ROOT / "tests").rglob(f"{name}.py")) or re.search(rf"def {name}", tests)
            assert there, f"{document.name} names {name}"


def test_every_setting_of_flow_grpo_is_explained():
    text, sections = (ROOT / "docs" / "flow_grpo.md").read_text(), config.SECTIONS[config.FlowGrpoConfig]
    keys = [key for section in ("grpo", "evaluation") for key in sections[section].model_fields]
    assert [key for key in keys if not re.search(rf"\b{key}\b", text)] == []


def test_keys_that_documents_name_exist():
    """`section.key`, of either script, in backticks: with a value or without."""
    sections = [section for schema in config.SECTIONS.values() for section in schema.items()]
    for document in (path for path in DOCUMENTS if path.name not in ("log.md", "CHANGELOG.md")):
        for section, key in set(re.findall(r"`(\w+)\.(?!json`|lock`)(\w+)(?:[:=][^`]*)?`", document.read_text())):
            fields = [schema.model_fields for name, schema in sections if name == section]
            assert not fields or any(key in names for names in fields), f"{document.name} names {section}.{key}"


@pytest.mark.check
def test_every_reward_and_objective_is_described():
    grpo, forward = (
        get_args(config.SECTIONS[schema][section].model_fields["objective"].annotation)
        for schema, section in ((config.FlowGrpoConfig, "grpo"), (config.ForwardRlConfig, "forward"))
    )
    for document, names in (("rewards.md", rewards.REWARDS), ("flow_grpo.md", grpo), ("forward_rl.md", forward)):
        text = (ROOT / "docs" / document).read_text()
        assert [name for name in names if f"`{name}`" not in text] == [], document
    assert [name for name in forward if not re.search(rf"^{name}  ", text, re.M)] == [], "a loss has no formula"


def test_what_is_brought_over_from_others_is_a_configuration():
    blocks = re.findall(r"^```yaml$(.*?)^```$", (ROOT / "docs" / "compare.md").read_text(), re.M | re.S)
    read = [config.parse(yaml.safe_load(block)) for block in blocks]
    assert [cfg.run.output_dir for cfg in read] == ["outputs/from_roll", "outputs/from_unirl"]


CHANGES = ["a", "b", "c", "d"]  # (e) adds one file: test_the_reward_that_is_written_from_nothing_works


def worked_change(letter):
    """(its patch, its bash blocks) of a chapter of docs/change_the_algorithm.md."""
    text = (ROOT / "docs" / "change_the_algorithm.md").read_text()
    (chapter,) = re.findall(rf"^## \({letter}\).*?(?=^## )", text, re.M | re.S)
    patch, scripts = (re.findall(rf"^```{tag}$\n(.*?)^```$", chapter, re.M | re.S) for tag in ("diff", "bash"))
    return "".join(patch), scripts


@pytest.mark.check
@pytest.mark.parametrize("letter", CHANGES)
def test_a_worked_change_applies_to_the_code_as_it_is(letter):
    patch, _ = worked_change(letter)
    done = subprocess.run(["git", "apply", "--check", "-"], input=patch, text=True, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, f"{done.stderr}run `python tests/support/refresh_worked_changes.py` to renew the page"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("letter", CHANGES)
def test_a_worked_change_does_what_is_said_of_it(tmp_path, letter):
    """Its commands, in a copy of the code with its patch: of three adapters two are equal. No other test breaks."""
    patch, scripts = worked_change(letter)
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "assets", "outputs"))
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    outcomes = []
    for script in scripts:
        commands = script.replace("/tmp/", f"{tmp_path}/").replace("python ", f"{sys.executable} ")
        done = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": ""}
        )
        outcomes.append((done.returncode, re.findall(r"^([0-9a-f]{64})  ", done.stdout, re.M), done.stderr))
    (code, adapters, error), *refusals = outcomes
    assert code == 0 and (letter == "d" or (len(adapters) == 3 and adapters[0] == adapters[1] != adapters[2])), error
    assert [code for code, _, _ in refusals] == [2] * (letter == "a"), refusals
    fast = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not long and not nightly and not check"]
    done = subprocess.run(
        fast, cwd=tmp_path, text=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.usefixtures("trusts_code")
def test_the_reward_that_is_written_from_nothing_works(tmp_path):
    text = (ROOT / "docs" / "change_the_algorithm.md").read_text()
    (code,) = [block for block in re.findall(r"^```python$(.*?)^```$", text, re.M | re.S) if "class Sharpness" in block]
    path = tmp_path / "sharpness.py"
    path.write_text(code)
    reward = rewards.build(f"{path}:Sharpness", {"limit": 1.5})
    clip = torch.rand(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5
    video = torch.stack([clip, 0.5 * clip, 2 * clip]).requires_grad_()
    output = reward(video, [reward.reference(clip)] * 3)
    assert output.score.tolist() == pytest.approx([1, 0.5, 1.5]) and output.valid.all()
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    # the last is at its limit
    assert gradient[0, :, 1:].any() and not gradient[:, :, 0].any() and not gradient[2].any()
    assert reward.reference(torch.zeros(3, 4, 8, 8)) is None and not reward(video[:1], [None]).valid.any()


def guide(heading):
    """The chapter of docs/running_wan.md under `## heading`."""
    text = (ROOT / "docs" / "running_wan.md").read_text()
    return re.search(rf"^## {heading}$(.*?)^## ", text, re.M | re.S)[1]


def commands(text):
    """The lines of the bash blocks, as lists of words."""
    blocks = re.findall(r"^```bash$(.*?)^```$", text, re.M | re.S)
    return [shlex.split(line, comments=True) for block in blocks for line in block.strip().splitlines()]


def follow(command):
    """`hf download` and `cp` in the current folder; downloaded files are empty."""
    if command[0] == "cp":
        shutil.copy(ROOT / command[1], command[2])
        return
    assert command[:2] == ["hf", "download"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    names = [name for name in REPOSITORIES[command[2]] if fnmatch.fnmatch(name, options.get("--include", "*"))]
    assert names, command
    for name in names:
        path = Path(options["--local-dir"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class ParsedError(Exception):
    """The command line was accepted."""


def parse(words, monkeypatch):
    """Give a command of this repository to its own parser, and its configuration to the schema."""
    if words[:2] == ["accelerate", "launch"]:
        launch = launch_command_parser().parse_args(words[2:])
        assert (ROOT / launch.config_file).is_file()
        words = [launch.training_script, *launch.training_script_args]
    elif words[0] == "python":
        words = words[1:]
    if words[0] in ("-c", "-m") or not words[0].endswith(".py"):
        return 0
    accepted = []

    def stop(original):
        return lambda *args: accepted.append(original(*args)) or (_ for _ in ()).throw(ParsedError)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words)
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(command_line.Parser, name, stop(getattr(argparse.ArgumentParser, name)))
        if words[0].startswith("train_"):
            accepted.append(arguments.parse_arguments(""))
        else:
            with pytest.raises(ParsedError):
                importlib.import_module(f"rewardfl_tools.{Path(words[0]).stem}").main()
    options = vars(accepted[0])
    if options.get("config"):
        config.load(ROOT / options["config"], options.get("overrides", ()))
    return 1


def test_commands_of_the_guide_are_parsed(monkeypatch):
    """By the parsers of accelerate, the scripts and the tools."""
    text = (ROOT / "docs" / "running_wan.md").read_text()
    assert sum(parse(words, monkeypatch) for words in commands(text) if words) >= 8
    complete = ["python", "tools/convert_lora.py", "--lora", "x", "--to", "comfy", "--out", "y"]
    assert parse(complete, monkeypatch) == 1
    with pytest.raises(SystemExit):
        parse([*complete, "--expert", "high"], monkeypatch)


def test_the_guides_plan_gives_its_figures():
    text = (ROOT / "docs" / "running_wan.md").read_text()
    (words,) = [words[2:] for words in commands(text) if "tools/plan_run.py" in words]
    last = run_tool(plan_run.main, *words).splitlines()[-1]
    gpu, host = re.search(r": ([\d.]+ GB) a GPU, and ([\d.]+ GB) in host memory for 8 processes", text).groups()
    assert f"fits: {gpu} of 80.0 GB on the GPU, {host} of 512.0 GB in host memory for 8 processes" in last


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_find_what_the_guide_downloads(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for command in commands(guide("2. Model")):
        follow(command)
    cfg = config.load(ROOT / "configs" / name)
    layout = find_files(I2V, model_files.model_source(cfg.model))
    for expert, (folder,) in layout.experts.items():
        assert {path.name for path in folder.iterdir()} == set(EXPERT), expert
    if config.is_supervised(cfg):  # neither a distillation nor a face pack
        return
    for expert, path in {"high": cfg.model.distill_lora.high, "low": cfg.model.distill_lora.low}.items():
        assert Path(path).is_file() and expert in Path(path).name and "I2V" in path
    packs = [cfg.reward.reward_model_path, cfg.reward.held_out_model_path]
    assert all(f"| {Path(pack).name} " in guide("3. Faces") for pack in packs)
