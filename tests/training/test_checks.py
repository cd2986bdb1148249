import dataclasses
from pathlib import Path

import pytest
from face_nets import magenta_pack, marked

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.data import Row
from rewardfl.training import checks, setup_model

REQUIRED = {
    "run": {"output_dir": "out"},
    "model": {"model_paths": "weights/wan"},
    "data": {"file_name": "clips/metadata.csv"},
    "reward": {"reward_model_path": "weights/antelopev2"},
}


def load(*overrides):
    return config.parse(REQUIRED, overrides)


def check_sharding(sharding, *overrides):
    cfg = load(*overrides)
    checks.check_sharding(cfg.experts, cfg.train, sharding)


def check_judge(cfg):
    checks.check_judge(cfg.reward, config.list_reward_specs(cfg))


def test_check_batch():
    geometry = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3"]
    assert checks.check_batch(load().train, 1) == 1
    assert checks.check_batch(load(*geometry).train, 4) == 24
    assert checks.check_batch(load(*geometry, "train.train_batch_size=24").train, 4) == 24
    message = (
        "train.train_batch_size is 20, but per_device_train_batch_size 2 x gradient_accumulation_steps 3 x "
        "4 processes = 24; gradient_accumulation_steps 2 gives 16, gradient_accumulation_steps 3 gives 24"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        checks.check_batch(load(*geometry, "train.train_batch_size=20").train, 4)
    with pytest.raises(ConfigError, match="= 24; gradient_accumulation_steps 1 gives 8$"):
        checks.check_batch(load(*geometry, "train.train_batch_size=3").train, 4)


@pytest.mark.parametrize("setting", ["experts.trained=cpu_swap", "train.compile_blocks=true"])
def test_what_waits_in_host_memory_is_not_shared_out(setting):
    check_sharding("none", setting)
    for sharding in ("zero2", "fsdp2"):
        with pytest.raises(
            ConfigError, match=f"^{setting.partition('=')[0]} .*{sharding}.*configs/accelerate/ddp.yaml"
        ):
            check_sharding(sharding, setting)
        check_sharding(sharding)


def test_check_paths(tmp_path):
    pipeline, pack, judge = tmp_path / "pipe", tmp_path / "pack", tmp_path / "judge"
    overrides = [
        f"model.model_paths={pipeline}",
        f"model.tokenizer_path={tmp_path / 'tokens'}",
        f"data.file_name={tmp_path / 'm.csv'}",
        f"reward.reward_model_path={pack}",
        f"reward.held_out_model_path={judge}",
        "reward.det_size=64",
    ]
    cfg = load(*overrides)
    with pytest.raises(ConfigError) as error:
        setup_model.check_files(cfg)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data.file_name",
        "model.model_paths",
        "model.tokenizer_path",
        "reward.reward_model_path",
        "reward.held_out_model_path",
    ]
    assert all(str(tmp_path) in line for line in lines)
    for folder in (pipeline, pack, judge, tmp_path / "tokens"):
        folder.mkdir()
    for file in (pipeline / "model_index.json", tmp_path / "m.csv"):
        file.touch()
    magenta_pack(pack / "antelopev2")
    for file in magenta_pack(judge / "models" / "buffalo_l").glob("*.onnx"):
        marked(file)
    setup_model.check_files(cfg)
    (pack / "antelopev2" / "rec.onnx").unlink()
    with pytest.raises(ConfigError, match=r"^reward.reward_model_path: .*pack has no folder with .* a recogniser"):
        setup_model.check_files(cfg)


@pytest.mark.parametrize("shared,task", [("det.onnx", "detector"), ("rec.onnx", "recogniser")])
def test_a_judge_that_shares_a_file_is_refused(tmp_path, shared, task):
    """Wherever the pack is that is trained on; one that is only measured may be the judge's."""
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
            check_judge(load(*overrides, held_out))
        assert str(refused.value).startswith(f"reward.held_out_model_path: the {task} {judge / shared} ")
        assert all(
            words in str(refused.value) for words in (key, str(pack / shared), "det_500m.onnx", "w600k_r50.onnx")
        )
    measured = [one.replace("weight: 0.1", "weight: 0") for one in trained["reward.others.more.settings.pack_dir"]]
    check_judge(load(*measured, held_out))
    marked(judge / shared)
    check_judge(load(*trained["reward.reward_model_path"], held_out))


def test_a_second_recogniser_is_another_than_the_first_and_the_judges(tmp_path):
    pack, second, judge = (magenta_pack(tmp_path / name) for name in ("pack", "second", "judge"))
    both = [f"reward.reward_model_path={pack}", f"reward.second_model_path={second}"]
    with pytest.raises(ConfigError) as refused:
        checks.check_second_recogniser(load(*both).reward)
    assert str(refused.value).startswith(f"reward.second_model_path: the recogniser {second / 'rec.onnx'} ")
    marked(second / "rec.onnx")
    checks.check_second_recogniser(load(*both).reward)
    checks.check_second_recogniser(load(both[0]).reward)
    for file in judge.glob("*.onnx"):
        marked(file)
    for task, file in (("recogniser", "rec.onnx"), ("detector", "det.onnx")):
        marked(second / file)  # as the judge's is: the same bytes
        with pytest.raises(ConfigError) as refused:
            check_judge(load(*both, f"reward.held_out_model_path={judge}"))
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
        with pytest.raises(ConfigError, match="evaluation.eval_clips: all of its . rows are rows of data.file_name"):
            checks.check_held_out(trained, held_out)
    (note,) = checks.check_held_out(trained, rows("c", "d"))
    assert note == "note: 1 of 2 rows of evaluation.eval_clips are trained on, too"
    other_prompt = [dataclasses.replace(row, prompt="another") for row in trained]
    for held_out in (rows("d"), other_prompt, []):
        assert checks.check_held_out(trained, held_out) == []


def test_a_detector_that_does_not_take_det_size(tmp_path):
    """Found before anything else is made."""
    (tmp_path / "m.csv").touch()
    paths = [f"model.model_paths={tmp_path}", f"data.file_name={tmp_path / 'm.csv'}"]
    paths += [f"reward.reward_model_path={magenta_pack(tmp_path / 'pack')}"]
    setup_model.check_files(load(*paths, "reward.det_size=64"))
    with pytest.raises(ConfigError, match="^reward.reward_model_path: .* only takes .64, 64. pixels, det_size is 640"):
        setup_model.check_files(load(*paths))
