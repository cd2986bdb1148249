"""Outputs: a new path, or one that --overwrite names; an evaluation's folder; never an input, never a link."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rewardfl import outputs
from rewardfl.outputs import MARK, Folder, Target
from rewardfl.weights.shards import InputError


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


ENTRIES = {
    "file": lambda path: path.write_text("mine"),
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("thesis.txt"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to(".."),
    "FIFO": os.mkfifo,
}


@pytest.fixture
def thesis(tmp_path):
    (tmp_path / "thesis.txt").write_text("thesis")
    return tmp_path / "thesis.txt"


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_existing_path_is_refused_or_replaced(tmp_path, thesis, entry, is_folder):
    path = tmp_path / "out"
    ENTRIES[entry](path)
    for overwrite in (False, True):
        target = Target(option="--out", path=path, overwrite=overwrite, is_folder=is_folder)
        if overwrite and entry == ("folder" if is_folder else "file"):
            target.check()
            with target.fill() as new:
                (new / "a").write_text("ours") if is_folder else new.write(b"ours")
            assert (path / "a" if is_folder else path).read_text() == "ours"
        else:
            with pytest.raises(InputError, match=f"^--out {path} .*; give another name"):
                target.check()
    assert thesis.read_text() == "thesis" and sorted(os.listdir(tmp_path)) == ["out", "thesis.txt"]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_path_that_appears_meanwhile_stays(tmp_path, is_folder):
    target = Target(option="--out", path=tmp_path / "new" / "out", overwrite=False, is_folder=is_folder)
    target.check()
    with pytest.raises(InputError, match="exists"), target.fill():
        ENTRIES["folder" if is_folder else "file"](target.path)
    assert os.listdir(tmp_path / "new") == ["out"] and not (is_folder and any(target.path.iterdir()))


@pytest.mark.parametrize("out", ["a/in", "a", "a/in/x", "hard", "alias/in/x", "linked", "b/../a/in"])
def test_no_input_is_an_output(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
    source = Path("a/in")
    source.mkdir() if out.endswith("x") else source.write_text("input")
    Path("alias").symlink_to("a")
    Path("linked").symlink_to("a/in")
    if not source.is_dir():
        Path("hard").hardlink_to(source)
    target = Target(option="--out", path=Path(out), overwrite=True, inputs=[Path("b"), source])
    with pytest.raises(InputError, match=f"--out {out} is, contains or is inside the input a/in; write to another"):
        target.check()
    with pytest.raises(InputError, match="is inside the input"):
        outputs.check_inputs("--out", Path(out), [tmp_path / "a" / "in"])


@pytest.mark.parametrize("out", [".", "..", "/", "loop/x", "thesis.txt/x", "here"])
def test_an_impossible_path_is_refused(tmp_path, thesis, monkeypatch, out):
    """The last one is the current folder, by its name."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "here" if out == "here" else Path(out if out in (".", "..", "/") else tmp_path / out)
    with pytest.raises(InputError, match="^--out "):
        Target(option="--out", path=path, overwrite=True, is_folder=True).check()


NAMES = ("report.html", "videos/base/000.mp4")


@pytest.fixture
def folder(tmp_path, thesis):
    """A finished evaluation with a file of the user's."""
    folder = Folder(tmp_path / "out", overwrite=False)
    with folder.locked():
        folder.claim(NAMES)
    (folder.path / "videos" / "base").mkdir(parents=True)
    for name in (*NAMES, "videos/holiday.mp4"):
        (folder.path / name).write_text("ours" if name in NAMES else "mine")
    return folder


def test_an_evaluation_continues_in_its_folder_edited_or_not(folder):
    (folder.path / NAMES[0]).write_text("edited")
    with folder.locked():
        folder.claim([NAMES[0], "grid.png"])  # an earlier process has claimed the other one
    assert folder.listed() == ["grid.png", *NAMES]
    folder.remove(folder.listed())
    assert folder.listed() == []
    assert {path.name for path in contents(folder.path)} == {"holiday.mp4", MARK, "rewardfl.lock"}


@pytest.mark.parametrize("mark", [None, "{", '{"files": {"a": null}}'])
def test_a_folder_without_its_mark_needs_overwrite(folder, mark):
    path = folder.path / MARK
    path.unlink() if mark is None else path.write_text(mark)
    with pytest.raises(InputError, match=f"has content and no {MARK}; .*--overwrite"), folder.locked():
        pytest.fail("the folder was taken")
    taken = Folder(folder.path, overwrite=True)
    with taken.locked():
        taken.remove(NAMES)
        taken.claim(NAMES)
    assert taken.listed() == [*NAMES] and (folder.path / "videos" / "holiday.mp4").read_text() == "mine"
    assert not (folder.path / NAMES[0]).exists()


def test_a_file_in_the_way_needs_overwrite(folder):
    (folder.path / "grid.png").write_text("mine")
    with pytest.raises(InputError, match="grid.png is in the way; .*--overwrite"):
        folder.claim(["grid.png"])
    Folder(folder.path, overwrite=True).claim(["grid.png"])
    assert "grid.png" in folder.listed()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["../thesis.txt", "{out}/../thesis.txt", "up/thesis.txt", "link", "", ".", "/"])
def test_no_listed_name_leads_out(folder, thesis, name, overwrite):
    (folder.path / "up").symlink_to("..")
    (folder.path / "link").symlink_to(thesis)
    name = name.format(out=folder.path)
    (folder.path / MARK).write_text(json.dumps({"files": [*NAMES, name]}))
    before, again = contents(thesis.parent), Folder(folder.path, overwrite)
    for work in (again.check, again.claim, lambda _: again.remove([name])):
        with pytest.raises(InputError, match=f"is outside the folder, or a link .* remove the name from {MARK}"):
            work(NAMES)
    assert contents(thesis.parent) == before and (folder.path / "link").is_symlink()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "entry, name", [(entry, NAMES[1]) for entry in ("link", "folder", "FIFO")] + [("link to nothing", "videos/base")]
)
def test_a_file_never_replaces_a_link_a_folder_or_a_device(folder, entry, name, overwrite):
    path = folder.path / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    ENTRIES[entry](path)
    with pytest.raises(InputError, match="is outside the folder, or a link or something else is in its way"):
        Folder(folder.path, overwrite).claim(NAMES)


def test_one_process_fills_a_folder(tmp_path):
    folder = Folder(tmp_path / "out", overwrite=False)
    with folder.locked(), pytest.raises(InputError, match="another process"), folder.locked():
        pass
    with folder.locked():
        pass
