"""Files that a configuration names: missing paths, damaged face packs, networks that the held-out judge shares."""

import pytest
from face_nets import magenta_pack

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.training import model_files

REQUIRED = {
    "run": {"output_dir": "out"},
    "model": {"model_paths": "weights/wan"},
    "data": {"file_name": "clips/metadata.csv"},
    "reward": {"reward_model_path": "weights/antelopev2"},
}


def check_files(*overrides):
    cfg = config.parse(REQUIRED, overrides)
    model_files.check_files(cfg.data, cfg.model, cfg.lora, cfg.reward)


def check_networks(*overrides):
    cfg = config.parse(REQUIRED, overrides)
    model_files.check_shared_networks(cfg.reward, config.list_reward_specs(cfg))


def change(file, letter=b"a"):
    """Give an ONNX file other bytes: a protobuf message takes its doc_string, field 6, from the last one written."""
    file.write_bytes(file.read_bytes() + b"\x32\x01" + letter)


def another_pack(folder, letter=b"a"):
    for file in magenta_pack(folder).glob("*.onnx"):
        change(file, letter)
    return folder


def test_each_missing_path_and_each_damaged_pack_has_a_line(tmp_path):
    pipeline, pack, judge = tmp_path / "pipe", tmp_path / "pack", tmp_path / "judge"
    paths = {
        "data.file_name": tmp_path / "m.csv", "model.model_paths": pipeline,
        "model.tokenizer_path": tmp_path / "tokens", "reward.reward_model_path": pack,
        "reward.held_out_model_path": judge,
    }  # fmt: skip
    overrides = [f"{key}={path}" for key, path in paths.items()]
    with pytest.raises(ConfigError) as error:
        check_files(*overrides, "reward.det_size=64")
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == list(paths) and all(str(tmp_path) in line for line in lines)
    for folder in (pipeline, tmp_path / "tokens"):
        folder.mkdir()
    for file in (pipeline / "model_index.json", tmp_path / "m.csv"):
        file.touch()
    magenta_pack(pack / "antelopev2")
    another_pack(judge / "models" / "buffalo_l")
    check_files(*overrides, "reward.det_size=64")
    with pytest.raises(ConfigError, match="^reward.reward_model_path: .* only takes .64, 64. pixels, det_size is 640"):
        check_files(*overrides)
    (pack / "antelopev2" / "rec.onnx").unlink()
    with pytest.raises(ConfigError, match=r"^reward.reward_model_path: .*pack has no folder with .* a recogniser"):
        check_files(*overrides)


@pytest.mark.parametrize("shared, task", [("det.onnx", "detector"), ("rec.onnx", "recogniser")])
@pytest.mark.parametrize("key, overrides", [
    ("reward.reward_model_path", ["{key}={pack}"]),
    ("reward.second_model_path", ["reward.reward_model_path={other}", "{key}={pack}"]),
    ("reward.terms.more.settings.pack_dir", [
        "reward.terms.score.name=motion", "reward.reward_model_path=null",
        "reward.terms.more={{name: face_identity, weight: 0.1, settings: {{pack_dir: {pack}}}}}",
    ]),
])  # fmt: skip
def test_a_judge_that_shares_a_network_is_refused(tmp_path, shared, task, key, overrides):
    """Wherever the trained pack is. A pack that is only measured may be the judge's."""
    pack, judge = magenta_pack(tmp_path / "pack"), another_pack(tmp_path / "judge")
    (judge / shared).write_bytes((pack / shared).read_bytes())
    other, held_out = another_pack(tmp_path / "other", b"b"), f"reward.held_out_model_path={judge}"
    overrides = [override.format(key=key, pack=pack, other=other) for override in overrides]
    with pytest.raises(ConfigError) as refused:
        check_networks(*overrides, held_out)
    message = str(refused.value)
    assert message.startswith(f"reward.held_out_model_path: the {task} {judge / shared} ")
    assert all(words in message for words in (f"{pack / shared} of {key}", "det_500m.onnx", "w600k_r50.onnx"))
    if "terms" in key:
        check_networks(*(override.replace("weight: 0.1", "weight: 0") for override in overrides), held_out)
    change(judge / shared)
    check_networks(*overrides, held_out)


def test_a_second_recogniser_is_another_than_the_first(tmp_path):
    first, second = (magenta_pack(tmp_path / name) for name in ("first", "second"))
    both = [f"reward.reward_model_path={first}", f"reward.second_model_path={second}"]
    with pytest.raises(ConfigError, match=f"^reward.second_model_path: the recogniser {second / 'rec.onnx'} "):
        check_networks(*both)
    change(second / "rec.onnx")
    check_networks(*both)
