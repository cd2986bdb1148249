"""Where the merging tools write: only an earlier output of theirs is replaced, and nothing of the user's is lost."""

import errno
import io
import json
import os
import shutil
import stat
import sys
from dataclasses import replace
from xml.etree import ElementTree

import av
import cv2
import numpy as np
import pytest
import torch
from conftest import run_tool
from PIL import Image
from safetensors.torch import load_file
from tqdm import tqdm

from rewardfl import command_line, data
from rewardfl.files import atomic_directory
from rewardfl.merging import output
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


MAKE = {
    "file": lambda path: path.write_text("precious"),
    "empty folder": lambda path: path.mkdir(),
    "folder": lambda path: (path.mkdir(), (path / "thesis.txt").write_text("x")),
    "link to a folder": lambda path: path.symlink_to("."),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "FIFO": os.mkfifo,
}


@pytest.mark.parametrize("name", ("out", "out.safetensors"))
@pytest.mark.parametrize("kind", MAKE)
def test_force_replaces_nothing_that_is_not_ours(world, place, kind, name):
    out = place / name
    MAKE[kind](out)
    assert str(out) in refused("merge_shards", world, place, "--out", out, "--force")
    refused("merge_shards", world, place, "--out", out)


@pytest.mark.parametrize("kind", MAKE)
def test_force_replaces_no_folder_that_holds_anything_else(world, place, kind):
    """An earlier output with something of the user's in it, or edited since, or with a link in place of a file."""
    out = place / "out"
    for name in ("added", "config.json"):
        call("merge_shards", world, "--out", out)
        (out / name).unlink(missing_ok=True)
        MAKE[kind](out / name)
        assert name in refused("merge_shards", world, place, "--out", out, "--force")
        shutil.rmtree(out)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ("out", "out.safetensors"))
def test_force_replaces_an_earlier_output(world, place, tool, name):
    out = place / name
    call(tool, world, "--out", out)
    before = snapshot(place)
    assert "--force" in refused(tool, world, place, "--out", out)
    for part in (path for path in out.rglob("*.safetensors") if tool != "convert_lora"):
        part.unlink()  # missing files are no obstacle
    call(tool, world, "--out", out, "--force", "--verify", "--dtype", "fp16")
    assert snapshot(place).keys() == before.keys() and snapshot(place) != before
    (place / f"link{out.suffix}").symlink_to(out)
    refused(tool, world, place, "--out", place / f"link{out.suffix}", "--force")
    another = next(one for one in TOOLS if one != tool)
    assert str(out) in refused(another, world, place, "--out", out, "--force")  # of another tool


@pytest.mark.parametrize("manifest", ("[]", "{", "[" * 100000, '{"tool": "rewardfl merge_shards 1"}', "null", ""))
def test_a_damaged_manifest_makes_the_folder_foreign(world, place, manifest):
    out = place / "out"
    call("merge_shards", world, "--out", out)
    (out / output.MANIFEST).write_text(manifest)
    assert output.MANIFEST in refused("merge_shards", world, place, "--out", out, "--force")


def test_what_came_to_the_place_while_writing_is_kept(world, place, monkeypatch):
    """A merge takes minutes: the check at its start is not enough."""
    write = output.writing.write_file

    def slowly(*arguments):
        for name in ("out", "out.safetensors"):
            (place / name).write_text("mine")
        return write(*arguments)

    monkeypatch.setattr(output.writing, "write_file", slowly)
    for name in ("out", "out.safetensors"):
        call("merge_shards", world, "--out", place / name, expect=2)
        assert (place / name).read_text() == "mine" and not list(place.glob("*.tmp-*"))
        for path in ("out", "out.safetensors"):
            (place / path).unlink()


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
        arguments = ["--base", source, "--lora", f"{lora}@low", "--out", out, "--force"]
        text = run_tool(merge_lora.main, *arguments, *([] if source.is_dir() else ["--expert", "low"]), expect=2)
        assert "another place" in text or "pipeline" in text and out == weights, (source, out, text)
        assert snapshot(place) == before


@pytest.mark.parametrize("out", (".", "..", "/", "beside.txt/out", "beside.txt/out.safetensors", "dangling/out"))
def test_outputs_without_a_place(world, place, monkeypatch, out):
    monkeypatch.chdir(place)
    (place / "dangling").symlink_to("nowhere")
    assert f"--out {out}" in refused("merge_shards", world, place, "--out", out, "--force")


# The report


def test_a_report_harms_neither_base_nor_output(world, place):
    """Not even with --force."""
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
        arguments = ["--base", source, "--expert", "low", "--lora", lora, "--out", out, "--force", "--json", report]
        for extra in ([], ["--dry-run"]):
            assert f"--json {report}" in run_tool(merge_lora.main, *arguments, *extra, expect=2), report
            assert snapshot(place) == before


@pytest.mark.parametrize("tool", TOOLS)
def test_a_report_replaces_an_earlier_report_alone(world, place, tool):
    report = place / "report.json"
    for content in ("notes", "{}", '{"tool": 3}', "[" * 100000):
        report.write_text(content)
        line = refused(tool, world, place, "--out", place / "out.safetensors", "--json", report)
        assert str(report) in line and "move it away" in line
        refused(tool, world, place, "--out", place / "out.safetensors", "--json", report, "--force")
    report.unlink()
    call(tool, world, "--out", place / "out.safetensors", "--json", report, "--force")
    assert json.loads(report.read_bytes())["tool"] == f"rewardfl {tool} 1"
    call(tool, world, "--out", place / "second.safetensors", "--json", report)


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
            call("merge_shards", world, "--out", out, "--force")
    assert snapshot(place) == before
    assert f"note: {stray}" in call("merge_shards", world, "--out", out, "--force", "--verify")
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
    odd.symlink_to("..") if kind == "link upwards" else MAKE[kind](odd)
    lora = world / "comfy.safetensors"
    assert str(odd) in run_tool(merge_lora.main, "--base", base, "--lora", lora, "--out", out, expect=2)
    assert not out.exists() and not list(place.glob("*.tmp-*"))


def test_a_merged_pipeline_is_a_base_again(world, place):
    first, second = place / "first", place / "second"
    merged_pipeline(world, first)
    lora = f"{world / 'comfy.safetensors'}:1"  # it is merged a second time
    run_tool(merge_lora.main, "--base", first, "--lora", lora, "--out", second, "--verify")
    listed = json.loads((second / output.MANIFEST).read_text())
    assert {path.relative_to(second).as_posix() for path in second.rglob("*") if path.is_file()} == {
        *listed["files"], output.MANIFEST,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ("file", "FIFO", "link to a folder", "link to nothing"))
def test_a_folder_is_written_over_no_link_and_no_file(place, kind):
    """files.atomic_directory, which checkpoints use too: a link to a folder left a stray behind."""
    MAKE[kind](place / "out")
    before = snapshot(place)
    with pytest.raises(FileExistsError), atomic_directory(place / "out"):
        pytest.fail("the block ran")
    assert snapshot(place) == before


# ---- the rule for tools that do not merge: one file, and a folder that is filled bit by bit


def contents():
    """A file of each kind, and what its reader gives."""
    frames = np.arange(5 * 16 * 16 * 3, dtype=np.uint8).reshape(5, 16, 16, 3)
    npy, png = io.BytesIO(), io.BytesIO()
    np.save(npy, frames)
    Image.fromarray(frames[0]).save(png, "png")
    return {
        "npy": (npy.getvalue(), lambda path: np.load(path)),
        "png": (png.getvalue(), lambda path: cv2.imread(str(path))),
        "mp4": (
            data.encode_video(torch.from_numpy(frames), 8),
            lambda path: np.stack([frame.to_ndarray(format="rgb24") for frame in av.open(str(path)).decode(video=0)]),
        ),
        "svg": (b"<svg xmlns='x'><g/></svg>", lambda path: len(ElementTree.parse(path).getroot())),
        "html": (b"<p>x</p>", lambda path: path.read_text().startswith("<p>x</p>")),
    }


@pytest.mark.parametrize("suffix", contents())
def test_a_file_is_replaced_where_it_is_as_the_tool_wrote_it(tmp_path, suffix):
    content, read = contents()[suffix]
    path = tmp_path / "new" / f"x.{suffix}"
    (tmp_path / f"plain.{suffix}").write_bytes(content)
    file = output.File(option="--out", path=path, tool="rewardfl a", inputs=())
    file.write(content)
    file.write(content)
    assert np.array_equal(read(path), read(tmp_path / f"plain.{suffix}"))
    whole = path.read_bytes()
    for other in (replace(file, tool="rewardfl b"), replace(file, inputs=(path,)), replace(file, inputs=(tmp_path,))):
        with pytest.raises(shards.InputError, match=f"--out {path}"):
            other.write(content)
    for edited in (content, whole + b"x", whole[:3] + b"x" + whole[3:], b""):
        path.write_bytes(edited)
        with pytest.raises(shards.InputError, match="move it away"):
            file.write(content)
        assert path.read_bytes() == edited
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")
    with pytest.raises(shards.InputError, match="is no folder"):
        file.write(content)


NAMES = ("report.html", "videos/base/000.mp4")


@pytest.fixture
def filled(tmp_path):
    """A folder of a finished tool."""
    folder = output.Folder(tmp_path / "out", "rewardfl evaluate 1")
    folder.path.mkdir()
    folder.claim(NAMES)
    (folder.path / "videos" / "base").mkdir(parents=True)
    for name in NAMES:
        (folder.path / name).write_text("ours")
    folder.seal([*NAMES, "never written"])
    return folder


def test_a_folder_is_filled_again(filled):
    filled.check(NAMES)
    filled.claim(NAMES)
    (filled.path / NAMES[0]).write_text("half")  # and then it is killed
    filled.claim(NAMES)
    filled.remove(filled.listed())
    assert [path.name for path in filled.path.iterdir()] == [output.MANIFEST] and filled.listed() == {}


def link(path):
    elsewhere = shutil.copytree(path.parent, path.parents[3] / "elsewhere")
    shutil.rmtree(path.parent)
    path.parent.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("edited"),
        lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
        lambda path: (shutil.rmtree(path.parent), path.parent.write_text("file")),
        link,
    ],
    ids=["edited", "linked", "a file for a folder", "a linked folder"],
)
def test_what_is_no_longer_ours_is_in_the_way_and_stays(filled, change):
    change(filled.path / NAMES[1])
    (filled.path / "videos" / "holiday.mp4").write_text("mine")
    before = {path: path.read_bytes() for path in filled.path.parent.rglob("*") if path.is_file()}
    with pytest.raises(shards.InputError, match="videos/base.* is in the way.*move it away, or give another"):
        filled.claim(NAMES)
    assert before == {path: path.read_bytes() for path in filled.path.parent.rglob("*") if path.is_file()}
    filled.remove(filled.listed())
    left = {path: path.read_bytes() for path in filled.path.parent.rglob("*") if path.is_file()}
    assert before.items() - left.items() <= {
        (filled.path / n, before[filled.path / n]) for n in (NAMES[0], output.MANIFEST)
    }


@pytest.mark.parametrize("name", ["../mine.txt", "{out}/../mine.txt", "link/mine.txt"])
def test_a_manifest_cannot_give_away_what_lies_elsewhere(filled, name):
    mine = filled.path.parent / "mine.txt"
    mine.write_text("mine")
    (filled.path / "link").symlink_to("..")
    manifest = json.loads((filled.path / output.MANIFEST).read_text())
    manifest["files"] |= {name.format(out=filled.path): None}
    (filled.path / output.MANIFEST).write_text(json.dumps(manifest))
    filled.remove(filled.listed())
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("content", ['{"a": 1}', "x", '{"tool": "rewardfl merge_lora 1", "folders": [], "files": {}}'])
def test_a_folder_of_something_else_is_refused(tmp_path, content):
    (tmp_path / output.MANIFEST).write_text(content)
    with pytest.raises(shards.InputError, match="not an output of this tool"):
        output.Folder(tmp_path, "rewardfl evaluate 1").claim(["x"])
    assert (tmp_path / output.MANIFEST).read_text() == content


def test_one_process_fills_a_folder(tmp_path):
    folder = output.Folder(tmp_path / "out", "rewardfl evaluate 1")
    with folder.locked(), pytest.raises(shards.InputError, match="another process"), folder.locked():
        pass
    with folder.locked():
        pass


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


@pytest.mark.parametrize("name", ["mine.mp4", "folder", "x.gif", "image.png", "model/x.mp4"])
def test_generate_replaces_only_what_it_wrote(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").mkdir()
    for file in ("mine.mp4", "image.png"):
        (tmp_path / file).write_text("mine")
    arguments = ["--model", tmp_path / "model", "--image", tmp_path / "image.png", "--device", "cpu", "--prompt", "x"]
    (line,) = run_tool(generate.main, *arguments, "--out", tmp_path / name, expect=2).splitlines()
    assert line.startswith("error: --out") and name in line and "diffusers" not in line
    assert (tmp_path / "mine.mp4").read_text() == (tmp_path / "image.png").read_text() == "mine"
