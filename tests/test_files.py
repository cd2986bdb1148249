"""Files and folders that are written completely or not at all, and the lock of a folder."""

import os

import pytest
from test_outputs import ENTRIES

from rewardfl import files


@pytest.mark.parametrize("entry", ["file", "FIFO", "link", "link to a folder", "link to nothing"])
def test_a_folder_replaces_only_a_folder(tmp_path, entry):
    ENTRIES[entry](tmp_path / "out")
    with pytest.raises(FileExistsError), files.atomic_directory(tmp_path / "out"):
        pytest.fail("the block ran")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("entry", ["link", "link to nothing", "FIFO", "folder"])
def test_a_lock_is_only_a_file(tmp_path, entry):
    ENTRIES[entry](tmp_path / "lock")
    with pytest.raises(FileExistsError, match="is a link, or of"):
        files.lock(tmp_path / "lock")
    assert os.listdir(tmp_path) == ["lock"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    replace, calls = os.replace, []

    def fail_once(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        replace(*paths)

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(OSError, match="gone"), files.atomic_directory(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]
