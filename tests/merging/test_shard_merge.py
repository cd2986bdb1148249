"""tools/merge_shards.py: every byte accounted for, loaders agree, and a plain copy needs no torch."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from merging_world import join, refuse
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rewardfl.weights import shards

pytest_plugins = "merging_world"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def sharded(expert, tmp_path):
    expert.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


def same(path, state):
    loaded = load_file(path)
    return loaded.keys() == state.keys() and all(torch.equal(loaded[name], value) for name, value in state.items())


def files(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("source", ("folder", "index", "list", "list without index"))
def test_every_form_of_input_gives_one_file(expert, sharded, tmp_path, source):
    inputs = {"folder": [sharded], "index": [sharded / INDEX]}
    if source == "list without index":
        (sharded / INDEX).unlink()
    out = tmp_path / "out" / "model.safetensors"
    assert "verified" in join("--input", *inputs.get(source, files(sharded)), "--out", out, "--verify")
    assert same(out, expert.state_dict())
    with safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_bytes_are_those_of_the_safetensors_library(expert, tmp_path):
    state = {n: v.half() if "attn1" in n else v for n, v in expert.state_dict().items()}  # wider items come first
    save_file(state, tmp_path / "library.safetensors", {"format": "pt"})
    join("--input", tmp_path / "library.safetensors", "--out", tmp_path / "ours.safetensors")
    ours, library = (shards.read_header(tmp_path / f"{name}.safetensors")[0] for name in ("ours", "library"))
    assert list(ours) == list(library)  # in the order of their bytes
    assert all(ours[name].read() == library[name].read() for name in ours)
    assert all(entry.offset % 8 == 0 or entry.dtype != "F64" for entry in ours.values())


def test_reshard_and_back(expert, sharded, tmp_path):
    out = tmp_path / "small"
    join("--input", sharded, "--out", out, "--max-shard-size", "40KB")
    assert len(files(out)) > len(files(sharded))
    assert all(file.stat().st_size < 40e3 + 8e3 for file in files(out))
    loaded = WanTransformer3DModel.from_pretrained(out)  # the index, the names and config.json fit
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in loaded.state_dict().items())
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expert.state_dict().values())
    join("--input", out, "--out", tmp_path / "again.safetensors")
    assert same(tmp_path / "again.safetensors", expert.state_dict())


def test_an_index_that_would_hide_the_output_is_refused(sharded, tmp_path):
    (tmp_path / f"out.safetensors{INDEX.rpartition('.safetensors')[2]}").write_text("{}")
    assert "in the way" in refuse(join, tmp_path / "out.safetensors", "--input", sharded, "--overwrite")


@pytest.mark.parametrize("names", ("original", "comfy", "diffusers"))
def test_renamed_files_load_in_diffusers(expert, sharded, tmp_path, names):
    out, back = tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    join("--input", sharded, "--out", out, "--rename", names, "--verify")
    state = load_file(out)
    assert all(name.startswith("model.diffusion_model.") for name in state) == (names == "comfy")
    if names != "diffusers":
        state = convert_wan_transformer_to_diffusers(state)  # diffusers' own converter is the second opinion
    assert state.keys() == expert.state_dict().keys()
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in state.items())
    loaded = WanTransformer3DModel.from_single_file(out, config=str(sharded), local_files_only=True)
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in loaded.state_dict().items())
    join("--input", out, "--out", back, "--rename", "diffusers")
    assert same(back, expert.state_dict())


@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_dtype_and_names_in_one_pass(expert, sharded, tmp_path, dtype):
    out = tmp_path / "out.safetensors"
    join("--input", sharded, "--out", out, "--rename", "original", "--dtype", dtype, "--verify")
    state = convert_wan_transformer_to_diffusers(load_file(out))
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    loaded = WanTransformer3DModel.from_pretrained(sharded, torch_dtype=torch_dtype).state_dict()
    assert {name: value.dtype for name, value in state.items()} == {name: value.dtype for name, value in loaded.items()}
    assert all(torch.equal(state[name], loaded[name]) for name in loaded)


def test_a_copy_imports_no_torch(sharded, tmp_path):
    """Its memory is the interpreter's: torch alone would take 220 MiB."""
    code = (
        "import sys\nfrom rewardfl_tools import merge_shards\n"
        "try: sys.exit(merge_shards.main())\n"
        "finally: assert 'torch' not in sys.modules"
    )
    for rename in ("keep", "original"):
        command = [sys.executable, "-c", code, "--input", sharded, "--out", tmp_path / rename, "--rename", rename]
        done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and (tmp_path / rename).is_dir(), done.stderr


def test_a_quantised_model_is_copied_but_not_cast(tmp_path):
    path, out = tmp_path / "fp8.safetensors", tmp_path / "out.safetensors"
    save_file({"blocks.0.self_attn.q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, path)
    text = refuse(join, out, "--input", path, "--dtype", "bf16")
    assert "fp8.safetensors is quantised" in text and "--dtype keep" in text and "update" not in text
    join("--input", path, "--out", out)


def test_other_models_are_joined_but_not_renamed(tmp_path):
    path, out = tmp_path / "umt5.safetensors", tmp_path / "copy.safetensors"
    save_file({"encoder.weight": torch.ones(3), "shared.weight": torch.zeros(2, 2)}, path)
    join("--input", path, "--out", out)
    assert same(out, load_file(path))
    assert "Wan transformer" in refuse(join, tmp_path / "out.safetensors", "--input", path, "--dtype", "fp16")


def test_a_full_disk_is_refused(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    assert "free" in refuse(join, tmp_path / "out.safetensors", "--input", sharded)


def test_a_dry_run_writes_nothing(sharded, tmp_path):
    out = tmp_path / "out.safetensors"
    assert "dry run: nothing written" in join("--input", sharded, "--out", out, "--dtype", "fp16", "--dry-run")
    assert not out.exists()
