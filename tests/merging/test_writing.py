"""Tests of the merging tools' outputs, beyond what tests/test_outputs.py tests of any target."""

import errno
import json
import os
import shutil

import pytest
from conftest import run_tool
from safetensors.torch import load_file

from rewardfl.weights import shards
from rewardfl_tools import convert_lora, merge_lora, merge_shards

pytest_plugins = "merging_world"
TOOLS = {"merge_lora": merge_lora, "merge_shards": merge_shards, "convert_lora": convert_lora}


@pytest.fixture
def place(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    return tmp_path


def call(tool, world, *arguments, expect=0):
    """Run a tool over the world's files of one expert; return what it printed."""
    expert, lora = world / "pipeline" / "transformer_2", world / "comfy.safetensors"
    inputs = {
        "merge_lora": ["--base", expert, "--lora", lora],
        "merge_shards": ["--input", expert],
        "convert_lora": ["--lora", lora, "--to", "comfy"],
    }[tool]
    return run_tool(TOOLS[tool].main, *inputs, *arguments, expect=expect)


def snapshot(folder):
    """Return {path: its mode, number, time and bytes} of all below a folder, links and devices as themselves."""
    paths = sorted(folder.rglob("*"))
    contents = [path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in paths]
    stats = [(each.st_mode, each.st_ino, each.st_mtime_ns) for each in map(os.lstat, paths)]
    return dict(zip(paths, zip(stats, contents, strict=True), strict=True))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ("out", "out.safetensors"))
def test_overwrite_replaces_an_edited_output(world, place, tool, name):
    out = place / name
    call(tool, world, "--out", out)
    before = snapshot(place), snapshot(world)
    assert "--overwrite" in call(tool, world, "--out", out, expect=2)
    assert (snapshot(place), snapshot(world)) == before
    (out / "thesis.txt" if out.is_dir() else out).write_text("edited")
    call(tool, world, "--out", out, "--force", "--verify", "--dtype", "fp16")  # an alias
    assert snapshot(place).keys() == before[0].keys() and snapshot(place) != before[0]


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_replaces_its_own_input(world, place, tool):
    """Nor a file that only an index or a folder names, nor an input behind a link, not even with --overwrite."""
    shutil.copytree(world / "pipeline" / "transformer_2", place / "base")
    shutil.copytree(world / "peft", place / "peft")
    (weights,), lora = (place / "base").glob("*.safetensors"), place / "peft"
    index = place / "base" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: weights.name for name in load_file(weights)}}))
    adapter = [lora / "adapter_model.safetensors", lora / "adapter_config.json", lora / "x.safetensors"]
    base = [weights, place / "base" / "config.json"]
    source, paths = {
        "merge_lora": (["--base", index, "--lora", f"{lora}@low", "--expert", "low"], [*base, *adapter]),
        "merge_shards": (["--input", index], base),
        "convert_lora": (["--lora", lora, "--to", "comfy"], adapter),
    }[tool]
    (place / "link").symlink_to(paths[0].parent)
    (place / "link.safetensors").symlink_to(place / "notes.txt")
    before = snapshot(place)
    for path in (*paths, place / "link" / paths[0].name, place, place / "link.safetensors"):
        for extra in ([], ["--dry-run"]):
            text = run_tool(TOOLS[tool].main, *source, "--out", path, "--overwrite", *extra, expect=2)
            assert f"--out {path} " in text, path
    assert snapshot(place) == before


@pytest.mark.parametrize("name", ("out", "out.safetensors"))
def test_a_write_that_breaks_off_leaves_the_earlier_output(world, place, monkeypatch, name):
    out = place / name
    call("merge_shards", world, "--out", out)
    before = snapshot(place)
    with monkeypatch.context() as full:
        full.setattr(shards.Entry, "read_into", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call("merge_shards", world, "--out", out, "--overwrite")
    assert snapshot(place) == before


@pytest.mark.parametrize("has_links", (True, False))
def test_weights_are_links_and_what_people_edit_are_copies(world, place, monkeypatch, has_links):
    def no_links(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    base, out, merged = world / "pipeline", place / "merged", "transformer_2/diffusion_pytorch_model.safetensors"
    run_tool(merge_lora.main, "--base", base, "--lora", world / "comfy.safetensors", "--out", out)
    for path in (path for path in base.rglob("*") if path.is_file() and not path.match(merged)):
        output = out / path.relative_to(base)
        assert output.read_bytes() == path.read_bytes()
        assert output.samefile(path) == (has_links and path.suffix == ".safetensors"), path


@pytest.mark.parametrize("target", ("FIFO", "nowhere", ".."))
def test_a_base_with_a_device_or_a_bad_link_is_refused(world, place, target):
    base, out = place / "base", place / "out"
    shutil.copytree(world / "pipeline", base)
    odd = base / "vae" / "odd"
    os.mkfifo(odd) if target == "FIFO" else odd.symlink_to(target)
    lora = world / "comfy.safetensors"
    assert str(odd) in run_tool(merge_lora.main, "--base", base, "--lora", lora, "--out", out, expect=2)
    assert not out.exists() and not list(place.glob("*.tmp-*"))
