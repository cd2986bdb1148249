"""The checks of a run's processes, files and clips before anything loads."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from face_nets import magenta_pack, marked

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.data import Row
from rewardfl.training import model_files, setup_processes
from rewardfl.training.checkpoint import WriteError
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.setup_data import check_held_out
from rewardfl.training.setup_processes import check_sharding
from rewardfl.training.setup_run import check_can_create, open_run

REQUIRED = {
    "run": {"output_dir": "out"},
    "model": {"model_paths": "weights/wan"},
    "data": {"file_name": "clips/metadata.csv"},
    "reward": {"reward_model_path": "weights/antelopev2"},
}


def load(*overrides):
    return config.parse(REQUIRED, overrides)


def check_files(cfg):
    model_files.check_files(cfg.data, cfg.model, cfg.lora, cfg.reward)


def check_networks(*overrides):
    cfg = load(*overrides)
    model_files.check_shared_networks(cfg.reward, config.list_reward_specs(cfg))


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(setup_processes, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ConfigError, match="run.log_with: wandb is not installed; pip install wandb, or set"):
        cfg = load("run.log_with=wandb")
        setup_processes.connect_processes(cfg.run, cfg.model, cfg.experts, cfg.train, 1)


@pytest.mark.parametrize(
    "setting", ["experts.trained=cpu_swap", "train.compile_blocks=true", "train.context_parallel=2"]
)
def test_what_sharded_weights_exclude(setting):
    def check(cfg, sharding):
        check_sharding(cfg.experts, cfg.train, config.processes_per_clip(cfg), sharding)

    check(load(setting), "none")
    for sharding in ("zero2", "fsdp2"):
        message = f"^{setting.partition('=')[0]} .*{sharding}.*configs/accelerate/ddp.yaml"
        with pytest.raises(ConfigError, match=message):
            check(load(setting), sharding)
        check(load(), sharding)


def test_check_paths(tmp_path):
    pipeline, pack, judge = tmp_path / "pipe", tmp_path / "pack", tmp_path / "judge"
    paths = {
        "data.file_name": tmp_path / "m.csv", "model.model_paths": pipeline,
        "model.tokenizer_path": tmp_path / "tokens", "reward.reward_model_path": pack,
        "reward.held_out_model_path": judge,
    }  # fmt: skip
    overrides = [f"{key}={path}" for key, path in paths.items()]
    cfg = load(*overrides, "reward.det_size=64")
    with pytest.raises(ConfigError) as error:
        check_files(cfg)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == list(paths) and all(str(tmp_path) in line for line in lines)
    for folder in (pipeline, pack, judge, tmp_path / "tokens"):
        folder.mkdir()
    for file in (pipeline / "model_index.json", tmp_path / "m.csv"):
        file.touch()
    magenta_pack(pack / "antelopev2")
    for file in magenta_pack(judge / "models" / "buffalo_l").glob("*.onnx"):
        marked(file)
    check_files(cfg)
    with pytest.raises(ConfigError, match="^reward.reward_model_path: .* only takes .64, 64. pixels, det_size is 640"):
        check_files(load(*overrides))
    (pack / "antelopev2" / "rec.onnx").unlink()
    with pytest.raises(ConfigError, match=r"^reward.reward_model_path: .*pack has no folder with .* a recogniser"):
        check_files(cfg)


@pytest.mark.parametrize("shared,task", [("det.onnx", "detector"), ("rec.onnx", "recogniser")])
def test_a_judge_that_shares_a_file_is_refused(tmp_path, shared, task):
    """Wherever the trained pack is; a measured pack may be the judge's."""
    pack, judge = magenta_pack(tmp_path / "pack"), magenta_pack(tmp_path / "judge")
    for file in judge.glob("*.onnx"):
        if file.name != shared:
            marked(file)
    held_out = f"reward.held_out_model_path={judge}"
    trained = {
        "reward.reward_model_path": [f"reward.reward_model_path={pack}"],
        "reward.others.more.settings.pack_dir": [
            "reward.name=motion", "reward.reward_model_path=null",
            f"reward.others={{more: {{name: face_identity, weight: 0.1, settings: {{pack_dir: {pack}}}}}}}",
        ],
    }  # fmt: skip
    for key, overrides in trained.items():
        with pytest.raises(ConfigError) as refused:
            check_networks(*overrides, held_out)
        assert str(refused.value).startswith(f"reward.held_out_model_path: the {task} {judge / shared} ")
        assert all(
            words in str(refused.value) for words in (key, str(pack / shared), "det_500m.onnx", "w600k_r50.onnx")
        )
    measured = [one.replace("weight: 0.1", "weight: 0") for one in trained["reward.others.more.settings.pack_dir"]]
    check_networks(*measured, held_out)
    marked(judge / shared)
    check_networks(*trained["reward.reward_model_path"], held_out)


def test_a_second_recogniser_is_another_than_the_first_and_the_judges(tmp_path):
    pack, second, judge = (magenta_pack(tmp_path / name) for name in ("pack", "second", "judge"))
    both = [f"reward.reward_model_path={pack}", f"reward.second_model_path={second}"]
    with pytest.raises(ConfigError) as refused:
        check_networks(*both)
    assert str(refused.value).startswith(f"reward.second_model_path: the recogniser {second / 'rec.onnx'} ")
    marked(second / "rec.onnx")
    check_networks(*both)
    check_networks(both[0])
    for file in judge.glob("*.onnx"):
        marked(file)
    for task, file in (("recogniser", "rec.onnx"), ("detector", "det.onnx")):
        marked(second / file)  # as the judge's is: the same bytes
        with pytest.raises(ConfigError) as refused:
            check_networks(*both, f"reward.held_out_model_path={judge}")
        assert str(refused.value).startswith(f"reward.held_out_model_path: the {task} {judge / file} ")
        assert f"{second / file} of reward.second_model_path" in str(refused.value)


def rows(*names):
    return [
        Row(index=i, line=i + 2, id=name, video=Path("clips") / f"{name}.mp4", prompt=f"a {name}")
        for i, name in enumerate(names)
    ]


def test_evaluated_clips_that_are_trained_on():
    """All of them are refused, under whatever name the table has; some are said."""
    trained = rows("a", "b", "c")
    again = [dataclasses.replace(row, video=row.video.absolute(), table="evaluation.eval_clips") for row in trained]
    for held_out in (again, again[::-1], again[1:]):
        with pytest.raises(ConfigError, match="evaluation.eval_clips: all of its rows are in data.file_name, too"):
            check_held_out(trained, held_out)
    (note,) = check_held_out(trained, rows("c", "d"))
    assert note == "note: 1 of 2 rows of evaluation.eval_clips are trained on, too"
    other_prompt = [dataclasses.replace(row, prompt="another") for row in trained]
    for held_out in (rows("d"), other_prompt, []):
        assert check_held_out(trained, held_out) == []


@pytest.mark.parametrize("folder", ["/dev/null/x", "file/x", "/proc/x"])
def test_a_folder_that_cannot_be_made_is_one_line_before_anything_loads(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConfigError, match=f"^data.cache_dir {folder} cannot be written .*; name another folder$"):
        check_can_create("data.cache_dir", Path(folder))
    check_can_create("data.cache_dir", Path("new/cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["checkpoints", "samples", "logs", "cache"])
def test_a_run_whose_folders_cannot_be_made_does_not_open(tmp_path, name):
    (tmp_path / name).touch()
    job = SimpleNamespace(run_on_main=lambda take, _: take())
    backbone = SimpleNamespace(weight_files={}, settings=dict)
    for folder in (None, RunFolder()):
        with pytest.raises((ConfigError, WriteError), match=f"{tmp_path / name}( cannot be written|: File exists)"):
            open_run(config.to_dict(load(f"run.output_dir={tmp_path}")), folder, job, backbone)
