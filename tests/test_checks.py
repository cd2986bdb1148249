import pytest
from face_nets import magenta_pack

from rewardfl import config
from rewardfl.config import ConfigError
from rewardfl.run import checks

REQUIRED = {
    "run": {"output_dir": "out"},
    "model": {"model_paths": "weights/wan"},
    "data": {"file_name": "clips/metadata.csv"},
    "reward": {"reward_model_path": "weights/antelopev2"},
}


def load(*overrides):
    return config.parse(REQUIRED, overrides)


def test_check_batch():
    geometry = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3"]
    assert checks.check_batch(load(), 1) == 1
    assert checks.check_batch(load(*geometry), 4) == 24
    assert checks.check_batch(load(*geometry, "train.train_batch_size=24"), 4) == 24
    message = (
        "train.train_batch_size is 20, but per_device_train_batch_size 2 x gradient_accumulation_steps 3 x "
        "4 processes = 24; gradient_accumulation_steps 2 gives 16, gradient_accumulation_steps 3 gives 24"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        checks.check_batch(load(*geometry, "train.train_batch_size=20"), 4)
    with pytest.raises(ConfigError, match="= 24; gradient_accumulation_steps 1 gives 8$"):
        checks.check_batch(load(*geometry, "train.train_batch_size=3"), 4)


def test_check_paths(tmp_path):
    pipeline, pack, judge = tmp_path / "pipe", tmp_path / "pack", tmp_path / "judge"
    overrides = [
        f"model.model_paths={pipeline}",
        f"model.tokenizer_path={tmp_path / 'tokens'}",
        f"data.file_name={tmp_path / 'm.csv'}",
        f"reward.reward_model_path={pack}",
        f"reward.held_out_model_path={judge}",
    ]
    cfg = load(*overrides)
    with pytest.raises(ConfigError) as error:
        checks.check_paths(cfg)
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
    magenta_pack(judge / "models" / "buffalo_l")
    checks.check_paths(cfg)
    (pack / "antelopev2" / "rec.onnx").unlink()
    with pytest.raises(ConfigError, match=r"^reward.reward_model_path: .*pack has no recogniser among its .onnx files"):
        checks.check_paths(cfg)


def test_check_threads():
    checks.check_threads(None, 2)
    checks.check_threads(8, 2)
    with pytest.raises(ConfigError, match="run.cpu_threads must be at most 8 .* got 100000"):
        checks.check_threads(100_000, 2)


def test_vae_factors(tmp_path):
    with pytest.raises(ConfigError, match="model.model_paths: .*vae/config.json is missing"):
        checks.vae_factors(tmp_path)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    assert checks.vae_factors(tmp_path) == (8, 4)
    (tmp_path / "vae" / "config.json").write_text('{"scale_factor_spatial": 16, "scale_factor_temporal": 2}')
    assert checks.vae_factors(tmp_path) == (16, 2)


def test_boundary_ratio(tmp_path):
    (tmp_path / "model_index.json").write_text('{"boundary_ratio": 0.9}')
    assert checks.boundary_ratio(tmp_path) == 0.9
    (tmp_path / "model_index.json").write_text('{"boundary_ratio": null}')
    with pytest.raises(ConfigError, match="model.model_paths: .* has no boundary_ratio, so it is no Wan2.2 A14B"):
        checks.boundary_ratio(tmp_path)


def test_check_geometry():
    checks.check_geometry(480, 832, 81, spatial=8, temporal=4)
    checks.check_geometry(64, 48, 17, spatial=8, temporal=4)
    checks.check_geometry(64, 64, 2, spatial=4, temporal=1)
    with pytest.raises(ConfigError, match=r"^data.num_frames must be 4k\+1 for this VAE, got 80; try 77 or 81$"):
        checks.check_geometry(480, 832, 80, spatial=8, temporal=4)
    for frames in (1, 3):
        with pytest.raises(ConfigError, match=rf"got {frames}; try 5$"):
            checks.check_geometry(480, 832, frames, spatial=8, temporal=4)
    with pytest.raises(ConfigError, match="got 1; try 2$"):
        checks.check_geometry(480, 832, 1, spatial=8, temporal=1)
    with pytest.raises(ConfigError) as error:
        checks.check_geometry(482, 8, 81, spatial=8, temporal=4)
    assert str(error.value).splitlines() == [
        "data.height must be a multiple of 16, got 482; try 480 or 496",
        "data.width must be a multiple of 16, got 8; try 16",
    ]
    with pytest.raises(ConfigError, match="data.height must be a multiple of 32, got 720; try 704 or 736"):
        checks.check_geometry(720, 1280, 81, spatial=16, temporal=4)
    checks.check_geometry(482, 8, 81, spatial=8, temporal=4, max_pixels=256)  # the sides are not used
    with pytest.raises(
        ConfigError, match="^data.max_pixels gives sides in multiples of 16, this VAE takes multiples of 32"
    ):
        checks.check_geometry(704, 1280, 81, spatial=16, temporal=4, max_pixels=256)


ANSWERING = ("high_noise",) * 3 + ("low_noise",) * 5
HIGH, LOW, BOTH = ("high_noise",), ("low_noise",), ("high_noise", "low_noise")


@pytest.mark.parametrize(
    "active,trained,coupling",
    [
        ((4, 5, 6, 7), LOW, 1.0), ((2, 3), BOTH, 1.0), ((0, 3), BOTH, 0.0), ((2, 3), HIGH, 1.0), ((2, 5, 7), HIGH, 0.2),
        ((0, 1), HIGH, 0.0), ((3,), LOW, 1.0),
    ],
)  # fmt: skip
def test_active_steps_that_train(active, trained, coupling):
    checks.check_active_experts(active, ANSWERING, trained, coupling)


@pytest.mark.parametrize(
    "active,trained,coupling,words",
    [
        ((4, 7), HIGH, 1.0, ["model.trainable_models: dit answers at no active step", "train dit2"]),
        ((4, 7), BOTH, 1.0, ["model.trainable_models: dit answers at no active step", "train dit2"]),
        ((0, 1), LOW, 1.0, ["model.trainable_models: dit2 answers at no active step", "train dit"]),
        # frozen steps before the first trained one: nobody takes the gradient that they hand on
        ((2, 3, 4), LOW, 1.0, ["sample.mid_timestep", "[2] of [2, 3, 4]", "take [3, 4]"]),
        ((0, 2, 7), LOW, 0.2, ["sample.active_steps", "[0, 2] of [0, 2, 7]", "take [7]"]),
        # frozen steps that hand nothing on
        ((2, 3, 4), HIGH, 0.0, ["[3, 4] of [2, 3, 4]", "take [2]"]),
        ((1, 3), LOW, 0.0, ["[1] of [1, 3]", "take [3]"]),
    ],
)
def test_active_steps_that_do_not(active, trained, coupling, words):
    with pytest.raises(ConfigError) as refused:
        checks.check_active_experts(active, ANSWERING, trained, coupling)
    assert all(word in str(refused.value) for word in words), str(refused.value)
