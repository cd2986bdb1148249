"""tools/merge_shards.py: every byte accounted for, loaders agree, and a plain copy needs no torch."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_tool
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rewardfl.weights import shards
from rewardfl_tools import merge_shards

pytest_plugins = "merging_world"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@pytest.fixture
def sharded(expert, tmp_path):
    expert.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


def run(*arguments, expect=0):
    return run_tool(merge_shards.main, *arguments, expect=expect)


def same(path, state):
    loaded = load_file(path)
    return loaded.keys() == state.keys() and all(torch.equal(loaded[name], value) for name, value in state.items())


def files(folder):
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("source", ("folder", "index", "list", "list without index", "single file"))
def test_one_file_from_every_kind_of_input(expert, sharded, tmp_path, source):
    given = {"folder": [sharded], "index": [sharded / INDEX], "list": files(sharded)}.get(source, [sharded])
    if source == "list without index":
        (sharded / INDEX).unlink()
    elif source == "single file":
        expert.save_pretrained(tmp_path / "one")
        given = files(tmp_path / "one")
    out = tmp_path / "out" / "model.safetensors"
    assert "verified" in run("--input", *given, "--out", out, "--verify")
    assert same(out, expert.state_dict())
    with safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_bytes_are_those_of_the_safetensors_library(expert, tmp_path):
    state = {n: v.half() if "attn1" in n else v for n, v in expert.state_dict().items()}  # wider items come first
    save_file(state, tmp_path / "theirs.safetensors", {"format": "pt"})
    run("--input", tmp_path / "theirs.safetensors", "--out", tmp_path / "ours.safetensors")
    ours, theirs = (shards.read_header(tmp_path / f"{name}.safetensors")[0] for name in ("ours", "theirs"))
    assert list(ours) == list(theirs)  # in the order of their bytes
    assert all(ours[name].read() == theirs[name].read() for name in ours)
    assert all(entry.offset % 8 == 0 or entry.dtype != "F64" for entry in ours.values())


def test_reshard_and_back(expert, sharded, tmp_path):
    out = tmp_path / "small"
    run("--input", sharded, "--out", out, "--max-shard-size", "40KB")
    assert len(files(out)) > len(files(sharded))
    assert all(file.stat().st_size < 40e3 + 8e3 for file in files(out))
    loaded = WanTransformer3DModel.from_pretrained(out)  # the index, the names and config.json fit
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in loaded.state_dict().items())
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expert.state_dict().values())
    run("--input", out, "--out", tmp_path / "again.safetensors")
    assert same(tmp_path / "again.safetensors", expert.state_dict())


@pytest.mark.parametrize("names", ("original", "comfy", "diffusers"))
def test_renamed_files_load_in_diffusers(expert, sharded, tmp_path, names):
    out, back = tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    run("--input", sharded, "--out", out, "--rename", names, "--verify")
    state = load_file(out)
    assert all(name.startswith("model.diffusion_model.") for name in state) == (names == "comfy")
    if names != "diffusers":
        state = convert_wan_transformer_to_diffusers(state)  # diffusers' own converter is the second opinion
    assert state.keys() == expert.state_dict().keys()
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in state.items())
    loaded = WanTransformer3DModel.from_single_file(out, config=str(sharded), local_files_only=True)
    assert all(torch.equal(value, expert.state_dict()[name]) for name, value in loaded.state_dict().items())
    run("--input", out, "--out", back, "--rename", "diffusers")
    assert same(back, expert.state_dict())


@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_dtype_and_names_in_one_pass(expert, sharded, tmp_path, dtype):
    out = tmp_path / "out.safetensors"
    run("--input", sharded, "--out", out, "--rename", "original", "--dtype", dtype, "--verify")
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


def test_a_quantised_model_cannot_be_cast(tmp_path):
    path = tmp_path / "fp8.safetensors"
    save_file({"blocks.0.self_attn.q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, path)
    text = run("--input", path, "--out", tmp_path / "out.safetensors", "--dtype", "bf16", expect=2)
    assert "fp8.safetensors is quantised" in text and "--dtype keep" in text and "update" not in text
    run("--input", path, "--out", tmp_path / "out.safetensors")


def test_other_models_can_be_joined_but_not_renamed(tmp_path):
    save_file({"encoder.weight": torch.ones(3), "shared.weight": torch.zeros(2, 2)}, tmp_path / "umt5.safetensors")
    run("--input", tmp_path / "umt5.safetensors", "--out", tmp_path / "copy.safetensors")
    assert same(tmp_path / "copy.safetensors", load_file(tmp_path / "umt5.safetensors"))
    out = tmp_path / "out.safetensors"
    assert "Wan transformer" in run("--input", tmp_path / "umt5.safetensors", "--out", out, "--dtype", "fp16", expect=2)


def damage(folder, kind):
    """Breaks a sharded folder; returns what to give as --input."""
    first, second = files(folder)[:2]
    index = json.loads((folder / INDEX).read_text())
    if kind == "cut off":
        first.write_bytes(first.read_bytes()[:-10])
    elif kind == "longer":
        first.write_bytes(first.read_bytes() + b"x")
    elif kind == "missing shard":
        second.unlink()
    elif kind == "missing of a list":
        (folder / INDEX).unlink()
        return files(folder)[1:]
    elif kind == "doubled tensor":
        save_file(load_file(first) | dict([next(iter(load_file(second).items()))]), first)
    elif kind == "tensor nowhere":
        index["weight_map"]["blocks.9.ghost"] = first.name
    elif kind == "wrong shard":
        name = next(iter(shards.read_header(first)[0]))
        index["weight_map"][name] = second.name
    elif kind == "surplus file":
        shutil.copy(first, folder / "merged.safetensors")
    elif kind == "two indices":
        shutil.copy(folder / INDEX, folder / "model.safetensors.index.json")
    elif kind == "empty":
        for file in [*files(folder), folder / INDEX]:
            file.unlink()
    if kind in ("tensor nowhere", "wrong shard"):
        (folder / INDEX).write_text(json.dumps(index))
    return [folder]


@pytest.mark.parametrize(
    "kind, message",
    [
        ("cut off", "cut off"), ("longer", "not fully covered"), ("missing shard", "does not exist"),
        ("missing of a list", "are given"), ("doubled tensor", "is in"),
        ("tensor nowhere", "in none of"), ("wrong shard", "says"),
        ("surplus file", "merged.safetensors"), ("two indices", "2 index"),
        ("empty", "0 .safetensors"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_refused(sharded, tmp_path, kind, message):
    out = tmp_path / "out.safetensors"
    text = run("--input", *damage(sharded, kind), "--out", out, expect=2)
    assert message in text and not out.exists() and not list(tmp_path.glob("*.tmp-*"))


def test_an_index_that_would_hide_the_output_is_refused(sharded, tmp_path):
    stale = tmp_path / "stale" / "diffusion_pytorch_model.safetensors"
    stale.parent.mkdir()
    (stale.parent / INDEX).write_text("{}")
    assert "in the way" in run("--input", sharded, "--out", stale, "--force", expect=2)
    assert not stale.exists()


def test_no_room_on_the_disk(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    out = tmp_path / "out.safetensors"
    assert "free" in run("--input", sharded, "--out", out, expect=2) and not out.exists()


def test_dry_run_and_report(sharded, tmp_path):
    out, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    run("--input", sharded, "--out", out, "--dtype", "fp16", "--dry-run", "--json", report)
    assert not out.exists()
    figures = json.loads(report.read_text())
    assert figures["bytes_out"] < figures["bytes_in"] and set(figures["dtypes"]) == {"F16", "F32"}
