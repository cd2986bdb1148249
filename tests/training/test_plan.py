"""What `resolve` makes of a configuration, for the published model and the tiny world."""

import pytest
import torch
from conftest import ROOT

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Source
from rewardfl.config import ConfigError
from rewardfl.training import plan

PUBLISHED = backbones.describe("wan2_2", Source())
TRAINED = {("high_noise",): "dit", ("low_noise",): "dit2", ("high_noise", "low_noise"): "dit,dit2"}
MODES = {1.0: "chain", 0.2: "bridge", 0.0: "drtune"}


def check_active(active, trained, coupling):
    """Of eight steps, the first three of which are the high-noise expert's."""
    settings = [
        f"sample.active_steps={list(active)}",
        f"sample.gradient_mode={MODES[coupling]}",
        f"model.trainable_models={TRAINED[trained]}",
    ]
    plan.resolve(config.load(ROOT / "configs" / "wan22_face.yaml", settings), PUBLISHED, 1, here=False)


HIGH, LOW, BOTH = ("high_noise",), ("low_noise",), ("high_noise", "low_noise")


@pytest.mark.parametrize(
    "active,trained,coupling",
    [
        ((4, 5, 6, 7), LOW, 1.0), ((2, 3), BOTH, 1.0), ((0, 3), BOTH, 0.0), ((2, 3), HIGH, 1.0), ((2, 5, 7), HIGH, 0.2),
        ((0, 1), HIGH, 0.0), ((3,), LOW, 1.0),
    ],
)  # fmt: skip
def test_active_steps_that_train(active, trained, coupling):
    check_active(active, trained, coupling)


@pytest.mark.parametrize(
    "active,trained,coupling,words",
    [
        ((4, 7), HIGH, 1.0, ["high_noise is used at none of the steps [4, 7]"]),
        ((4, 7), BOTH, 1.0, ["high_noise is used at none of the steps [4, 7]"]),
        ((0, 1), LOW, 1.0, ["low_noise is used at none of the steps [0, 1]"]),
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
        check_active(active, trained, coupling)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def resolve(file, *overrides, processes=1):
    cfg = config.load(ROOT / file, list(overrides))
    return plan.resolve(cfg, TINY, processes, here=False)


TINY = backbones.describe("wan2_2", Source(model_paths=str(ROOT / "assets/tiny_world/pipeline")))
FACE, GRPO = "tests/face.yaml", "tests/grpo.yaml"
ALONE = ["reward.terms={score: {weight: 0}}", "reward.kl_weight=0"]
ALONE += ["train.early_stop=null"]


def test_the_plan_of_reward_feedback_learning():
    batch = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3"]
    anchored = [*batch, "anchor.weight=1", "anchor.draws=5"]
    run = resolve(FACE, *batch, processes=4)
    assert run.active == (4, 5, 6, 7) and run.experts == ("high_noise",) * 3 + ("low_noise",) * 5
    assert run.clips_at_once == 24 and run.trained == ("low_noise",) and not run.supervised
    assert run.backwards_per_update == 3 * 4
    assert resolve(FACE, *anchored).backwards_per_update == 3 * (4 + 5)
    supervised = resolve(FACE, *anchored, *ALONE)
    assert supervised.supervised and supervised.backwards_per_update == 3 * 5


def test_the_plan_of_flow_grpo():
    settings = ["grpo.groups=6", "grpo.group_size=4", "grpo.updates_per_epoch=3", "grpo.inner_epochs=2"]
    run = resolve(
        GRPO,
        *settings,
        *["train.max_steps=12", "train.per_device_train_batch_size=2", "anchor.weight=1", "anchor.draws=5"],
    )
    assert run.updates_per_epoch == 6 and run.geometry.forwards_per_update == 4
    assert run.backwards_per_update == 4 * (len(run.window(0)) + 5)
    assert {run.window(epoch) for epoch in range(50)} == set(run.draw_windows(50 * 6))
    assert set().union(*run.draw_windows(None)) <= set(run.active)


@pytest.mark.parametrize("guidance, forwards", [(1, 1), (3.5, 2)])
def test_guidance_takes_two_forwards(guidance, forwards):
    assert resolve(FACE, f"sample.guidance_scale={guidance}").forwards_per_velocity == forwards


def test_steps_of_a_run():
    passes = ["train.max_steps=null", "train.num_train_epochs=3", "train.gradient_accumulation_steps=2"]
    run = resolve(FACE, "train.per_device_train_batch_size=2", *passes, processes=2)
    assert run.count_steps(20) == 8  # 60 visits, 8 at a time
    assert resolve(FACE, "train.max_steps=7").count_steps(20) == 7


def test_a_schedule_ends_at_the_final_timestep():
    run = resolve(FACE, "sample.final_timestep=6", "sample.mid_timestep=4")
    schedule = run.schedule(TINY.latent_shape(64, 64, 9))
    assert len(schedule) == len(run.experts) == 7 and schedule.sigmas[-1] == 0
    assert torch.equal(schedule.sigmas[:7], resolve(FACE).schedule(TINY.latent_shape(64, 64, 9)).sigmas[:7])
    assert 0.9 <= schedule.at(2.999).sigmas[0] < schedule.sigmas[2]  # the boundary of the expert of step 2


def test_the_largest_size():
    clips = config.DataConfig(file_name="x.csv", height=64, width=96)
    assert plan.largest_size(clips, ()) == plan.largest_size(clips, [None, (32, 64)]) == (64, 96)
    assert plan.largest_size(clips, [None, (96, 96), (128, 64)]) == (96, 96)
    assert plan.largest_size(clips, [(32, 64)]) == (32, 64)
    area = config.DataConfig(file_name="x.csv", max_pixels=6400)
    assert plan.largest_size(area, [None]) == (80, 80)


def test_a_reward_needs_its_frames():
    with pytest.raises(
        ConfigError, match="reward.reward_model_path judges at least 2 frames, and data.num_frames is 1"
    ):
        resolve(FACE, "data.num_frames=1", "reward.motion_weight=1", "reward.held_out_model_path=null")


def test_a_reward_gets_the_models_frame_rate():
    align = "{align: {name: video_align, settings: {checkpoint_dir: x, model_dir: x, prompt_file: x}}}"
    cfg = config.load(ROOT / FACE, ["data.fps=null", f"reward.terms={align}"])
    model = backbones.describe("wan2_2_ti2v", Source())
    assert plan.find_rewards(cfg, model, here=False)[-1][0].settings["fps"] == model.frame_rate == 24


def test_the_batch_that_is_checked():
    geometry = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3"]
    assert resolve(FACE, *geometry, "train.train_batch_size=24", processes=4).clips_at_once == 24
    message = "train.train_batch_size is 20, but per_device_train_batch_size 2 x .* 3 x 4 processes = 24"
    with pytest.raises(ConfigError, match=message):
        resolve(FACE, *geometry, "train.train_batch_size=20", processes=4)
    split = [*geometry, "train.context_parallel=2"]
    assert resolve(FACE, *split, "train.train_batch_size=12", processes=4).clips_at_once == 12
    with pytest.raises(ConfigError, match=r"3 x 4 processes / context_parallel 2 = 12; change one"):
        resolve(FACE, *split, "train.train_batch_size=24", processes=4)
    with pytest.raises(ConfigError, match="train.context_parallel 2 does not divide the 3 processes"):
        resolve(FACE, *split, processes=3)


def test_the_steps_of_the_kl():
    steps = ["sample.mid_timestep=4", "sample.final_timestep=7"]
    assert resolve(FACE, *steps, "reward.kl_weight=1").kl_steps == (4, 5, 6, 7)
    assert resolve(FACE, *steps, "reward.kl_weight=1", "reward.kl_steps=[5,7]").kl_steps == (5, 7)
    assert resolve(FACE, *steps, "reward.kl_weight=0").kl_steps == ()
    assert resolve(FACE, *steps, "reward.kl_steps=last").kl_steps == (7,)


def test_the_last_active_steps_keep_their_graphs():
    steps, kept = ["sample.mid_timestep=4", "sample.final_timestep=7"], "train.memory.active_graphs=keep_on_device"
    assert resolve(FACE, *steps).graphs_of == ()
    assert resolve(FACE, *steps, kept, processes=4).graphs_of == (4, 5, 6, 7)
    assert resolve(FACE, *steps, kept, "train.memory.kept_steps=1").graphs_of == (7,)
    with pytest.raises(ConfigError, match="train.memory.kept_steps is 5, but there are 4 steps with a gradient"):
        resolve(FACE, *steps, kept, "train.memory.kept_steps=5")
    assert resolve(FACE, "train.memory.kept_chunks=5", "data.num_frames=9").memory.kept_chunks == 5
    with pytest.raises(ConfigError, match="kept_chunks is 6, but there are 5 chunks"):
        resolve(FACE, "train.memory.kept_chunks=6", "data.num_frames=9")
