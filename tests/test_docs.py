"""What the documents tell a new user to do, done."""

import fnmatch
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT

from rewardfl import config
from rewardfl.backbones.wan import files as layouts

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
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("wan22_*.yaml"))


def test_tests_that_documents_name_exist():
    known = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    documents = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md")]
    for document in documents:
        for name in set(re.findall(r"\btest_[a-z0-9_]+\b", document.read_text())):
            there = (ROOT / "tests" / f"{name}.py").is_file() or re.search(rf"def {name}", known)
            assert there, f"{document.name} names {name}"


def guide(heading):
    """The chapter of docs/guide.md under `## heading`."""
    text = (ROOT / "docs" / "guide.md").read_text()
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
    wanted = [name for name in REPOSITORIES[command[2]] if fnmatch.fnmatch(name, options.get("--include", "*"))]
    assert wanted, command
    for name in wanted:
        path = Path(options["--local-dir"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_find_what_the_guide_downloads(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    for command in commands(guide("2. Model")):
        follow(command)
    cfg = config.load(ROOT / "configs" / name)
    layout = layouts.find(cfg.model.model_paths, cfg.model.tokenizer_path)
    for expert, (folder,) in layout.experts.items():
        assert {path.name for path in folder.iterdir()} == set(EXPERT), expert
    for expert, path in {"high": cfg.model.distill_lora_high, "low": cfg.model.distill_lora_low}.items():
        assert Path(path).is_file() and expert in Path(path).name and "I2V" in path
    packs = [cfg.reward.reward_model_path, cfg.reward.held_out_model_path]
    assert all(f"| {Path(pack).name} " in guide("3. Faces") for pack in packs)


def test_what_the_guide_fetches_is_not_for_git():
    ignored = (ROOT / ".gitignore").read_text().split()
    targets = {Path(command[-1]).parts[0] for command in commands(guide("2. Model"))}
    assert targets == {"models"} and "/models/" in ignored


def test_every_key_of_the_paths_file_is_explained():
    assert all(f"`{key}`" in guide("2. Model") for key in (*layouts.KEYS, "tokenizer", "configs"))
