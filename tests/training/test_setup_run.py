"""Folders of a run that cannot be made are refused before anything loads."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from test_model_files import REQUIRED

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.training.checkpoint import WriteError
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.setup_run import check_can_create, open_run


@pytest.mark.parametrize("folder", ["/dev/null/x", "file/x", "/proc/x"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=f"^data.cache_dir {folder} cannot be written .*; name another folder$"):
        check_can_create("data.cache_dir", Path(folder))
    check_can_create("data.cache_dir", Path("new/cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["checkpoints", "samples", "logs", "cache"])
@pytest.mark.parametrize("folder", [None, RunFolder()], ids=["dry run", "start"])
def test_a_run_whose_folders_cannot_be_made_does_not_open(tmp_path, name, folder):
    (tmp_path / name).touch()
    job = SimpleNamespace(run_on_main=lambda take, _: take())
    backbone = SimpleNamespace(weight_files={}, settings=dict)
    settings = config.to_dict(config.parse(REQUIRED, [f"run.output_dir={tmp_path}"]))
    with pytest.raises((ConfigError, WriteError), match=f"{tmp_path / name}( cannot be written|: File exists)"):
        open_run(settings, folder, job, backbone)
