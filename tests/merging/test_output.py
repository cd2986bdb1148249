"""Where the merging tools write, and that no input is lost."""

import errno
import json
import os
import shutil
import stat
import sys

import pytest
from conftest import run_tool
from safetensors.torch import load_file
from tqdm import tqdm

from rewardfl import command_line
from rewardfl.weights import shards
from rewardfl_tools import convert_lora, generate, merge_lora, merge_shards

pytest_plugins = "merging_world"
TOOLS = {"merge_lora": merge_lora, "merge_shards": merge_shards, "convert_lora": convert_lora}


@pytest.fixture
def place(tmp_path):
    """A folder of the test's own, with something of the user's beside the output."""
    (tmp_path / "beside.txt").write_text("mine")
    return tmp_path


def call(tool, world, *arguments, expect=0):
    """One of the tools over the world's files, of one expert; returns what it printed."""
    expert, lora = world / "pipeline" / "transformer_2", world / "comfy.safetensors"
    given = {
        "merge_lora": ["--base", expert, "--lora", lora],
        "merge_shards": ["--input", expert],
        "convert_lora": ["--lora", lora, "--to", "comfy"],
    }[tool]
    text = run_tool(TOOLS[tool].main, *given, *arguments, expect=expect)
    assert "Traceback" not in text
    return text


def snapshot(folder):
    """{path: what it is and holds} of all below a folder, links and devices as themselves."""
    found = {}
    for place, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = os.path.join(place, name)
            status = os.lstat(path)
            content = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            found[os.path.relpath(path, folder)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


def refused(tool, world, place, *arguments):
    """Exit 2 in one line, and nothing anywhere is another than before."""
    before = snapshot(place), snapshot(world)
    text = call(tool, world, *arguments, expect=2)
    assert (snapshot(place), snapshot(world)) == before
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ("out", "out.safetensors"))
def test_overwrite_replaces_an_edited_output_and_the_report(world, place, tool, name):
    out, report = place / name, place / "report.json"
    call(tool, world, "--out", out, "--json", report)
    assert json.loads(report.read_bytes())["tool"] == f"rewardfl {tool} 1"
    before = snapshot(place)
    assert "--overwrite" in refused(tool, world, place, "--out", out)
    assert "--overwrite" in refused(tool, world, place, "--out", place / "b.safetensors", "--json", report)
    (out / "thesis.txt" if out.is_dir() else out).write_text("edited")
    report.write_text("edited")
    call(tool, world, "--out", out, "--json", report, "--force", "--verify", "--dtype", "fp16")  # an alias
    assert snapshot(place).keys() == before.keys() and snapshot(place) != before
    assert json.loads(report.read_bytes())["tool"]


def test_outputs_and_inputs_do_not_overlap(world, place):
    """Equal, one in the other, by another spelling, through a link, and a shard that only an index names."""
    base = place / "base"
    shutil.copytree(world / "pipeline", base)
    (place / "alias").symlink_to("base")
    lora = world / "comfy.safetensors"
    index = base / "transformer_2" / "model.safetensors.index.json"
    (weights,) = (base / "transformer_2").glob("*.safetensors")
    index.write_text(json.dumps({"weight_map": {name: weights.name for name in load_file(weights)}}))
    for source, out in (
        (base, base), (base, place), (base, base / "vae" / ".." / "x"), (place / "alias", base / "merged"),
        (index, weights), (index, base / "transformer_2"), (weights, weights), (index, base),
    ):  # fmt: skip
        before = snapshot(place)
        arguments = ["--base", source, "--lora", f"{lora}@low", "--out", out, "--overwrite"]
        text = run_tool(merge_lora.main, *arguments, *([] if source.is_dir() else ["--expert", "low"]), expect=2)
        assert "another place" in text or "pipeline" in text and out == weights, (source, out, text)
        assert snapshot(place) == before


# The report


def test_a_report_harms_neither_base_nor_output(world, place):
    """Not even with --overwrite."""
    out = place / "out"
    base = place / "base"
    shutil.copytree(world / "pipeline" / "transformer_2", base)
    lora = place / "low.safetensors"
    shutil.copy(world / "comfy.safetensors", lora)
    (weights,) = base.glob("*.safetensors")
    (place / "link.json").symlink_to(base / "config.json")
    os.mkfifo(place / "fifo.json")
    for source, report in (
        (base, weights), (base, base / "new.json"), (weights, base / "config.json"), (base, out / "report.json"),
        (base, lora), (base, place),
        (base, place / "link.json"), (base, place / "fifo.json"), (base, place / "beside.txt" / "report.json"),
    ):  # fmt: skip
        before = snapshot(place)
        arguments = ["--base", source, "--expert", "low", "--lora", lora, "--out", out, "--overwrite", "--json", report]
        for extra in ([], ["--dry-run"]):
            assert f"--json {report}" in run_tool(merge_lora.main, *arguments, *extra, expect=2), report
            assert snapshot(place) == before


# What killed runs left


@pytest.mark.parametrize("name", ("out", "out.safetensors"))
def test_a_write_that_breaks_off_leaves_the_earlier_output(world, place, monkeypatch, name):
    """The next run names what a killed one left, and leaves it."""
    out, stray = place / name, place / f"{name}.tmp-host-1"
    call("merge_shards", world, "--out", out)
    stray.write_text("half")
    before = snapshot(place)
    with monkeypatch.context() as full:
        full.setattr(shards.Entry, "read_into", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call("merge_shards", world, "--out", out, "--overwrite")
    assert snapshot(place) == before
    assert f"note: {stray}" in call("merge_shards", world, "--out", out, "--overwrite", "--verify")
    assert sorted(path.name for path in place.iterdir()) == sorted(["beside.txt", name, stray.name])


# What a pipeline's other files become


def merged_pipeline(world, out):
    run_tool(merge_lora.main, "--base", world / "pipeline", "--lora", world / "comfy.safetensors", "--out", out)


def test_weights_are_links_and_what_people_edit_are_copies(world, place):
    out = place / "merged"
    merged_pipeline(world, out)
    base = world / "pipeline"
    merged = "transformer_2/diffusion_pytorch_model.safetensors"
    for path in (path for path in base.rglob("*") if path.is_file() and not path.match(merged)):
        there = out / path.relative_to(base)
        assert there.read_bytes() == path.read_bytes()
        assert there.samefile(path) == (path.suffix == ".safetensors"), path
    config = base / "scheduler" / "scheduler_config.json"
    before = config.read_bytes()
    with (out / "scheduler" / "scheduler_config.json").open("r+") as file:
        file.write("edited in place")
    assert config.read_bytes() == before


def test_without_links_weights_are_copies(world, place, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    merged_pipeline(world, place / "merged")
    for path in (world / "pipeline" / "vae").iterdir():
        copy = place / "merged" / "vae" / path.name
        assert copy.read_bytes() == path.read_bytes() and not copy.samefile(path)


@pytest.mark.parametrize("kind", ("FIFO", "link to nothing", "link upwards"))
def test_a_base_with_what_cannot_be_copied_is_refused(world, place, kind):
    base, out = place / "base", place / "out"
    shutil.copytree(world / "pipeline", base)
    odd = base / "vae" / "odd"
    os.mkfifo(odd) if kind == "FIFO" else odd.symlink_to(".." if kind == "link upwards" else "nowhere")
    lora = world / "comfy.safetensors"
    assert str(odd) in run_tool(merge_lora.main, "--base", base, "--lora", lora, "--out", out, expect=2)
    assert not out.exists() and not list(place.glob("*.tmp-*"))


def test_a_merged_pipeline_is_a_base_again(world, place):
    first, second = place / "first", place / "second"
    merged_pipeline(world, first)
    lora = f"{world / 'comfy.safetensors'}:1"  # it is merged a second time
    run_tool(merge_lora.main, "--base", first, "--lora", lora, "--out", second, "--verify")
    names = [{path.relative_to(each) for path in each.rglob("*")} for each in (world / "pipeline", first, second)]
    assert names[0] == names[1] == names[2]


# ---- exit codes


@pytest.mark.parametrize(
    "error, code, line",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("--x: no"), 2, "error: --x: no"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), 2, "error: a/b: Read-only file system"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk: No space left on device"),
    ],
)
def test_an_error_is_one_line_after_the_bar(capsys, error, code, line):
    def work():
        with tqdm([1, 2], file=sys.stderr) as bar:
            for _ in bar:
                raise error

    assert command_line.exit_code(work) == code
    assert capsys.readouterr().err.splitlines()[-1] == line


GENERATE = ["--model", "x", "--prompt", "x", "--out", "x.mp4"]


@pytest.mark.parametrize(
    "words",
    [
        ["--shift", "nan"], ["--guidance", "-1"], ["--adapter", "x:1e999"], ["--fps", "0"], ["--steps", "100000"],
        ["--height", "0"], ["--num-frames", "0"], ["--seed", "-1"], ["--negative-prompt", "x"],
    ],
)  # fmt: skip
def test_generates_options_are_those_of_the_schema(words):
    (line,) = run_tool(generate.main, *GENERATE, *words, expect=2).splitlines()
    assert line.startswith(f"error: {words[0]}: ")
