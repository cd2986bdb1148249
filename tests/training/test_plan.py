"""What `resolve` makes of a configuration, on the tiny world."""

import pytest
import torch
from conftest import ROOT

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Source
from rewardfl.config import ConfigError
from rewardfl.training import plan

TINY = backbones.describe("wan2_2", Source(model_paths=str(ROOT / "assets/tiny_world/pipeline")))
FACE, GRPO = "tests/face.yaml", "tests/grpo.yaml"
SUPERVISED = ["reward.terms={score: {weight: 0}}", "reward.kl_weight=0", "train.early_stop=null"]
BATCH = ["train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=3"]


def resolve(file, *overrides, processes=1):
    return plan.resolve(config.load(ROOT / file, list(overrides)), TINY, processes, here=False)


def resolve_active(steps, trained, mode):
    """Resolve eight steps, the first three of which are the high-noise expert's."""
    changes = [f"sample.active_steps={steps}", f"sample.gradient_mode={mode}", f"model.trainable_models={trained}"]
    return resolve(FACE, *changes)


@pytest.mark.parametrize("steps, trained, mode", [
    ([2, 3], "dit,dit2", "chain"), ([0, 3], "dit,dit2", "drtune"), ([2, 5, 7], "dit", "bridge"),
    ([0, 1], "dit", "drtune"), ([3], "dit2", "chain"),
])  # fmt: skip
def test_active_steps_that_train(steps, trained, mode):
    assert resolve_active(steps, trained, mode).active == tuple(steps)


@pytest.mark.parametrize("steps, trained, mode, message", [
    ([4, 7], "dit", "chain", "model.trainable_models: high_noise is used at none of the steps .4, 7."),
    ([4, 7], "dit,dit2", "chain", "model.trainable_models: high_noise is used at none of the steps .4, 7."),
    # frozen steps before the first trained one: no expert takes the gradient that they pass on
    ([2, 3, 4], "dit2", "chain", r"sample.active_steps: the active steps .2. of .2, 3, 4. give.*take .3, 4."),
    ([0, 2, 7], "dit2", "bridge", "the active steps .0, 2. of .0, 2, 7. give no gradient .*take .7."),
    # frozen steps that pass nothing on
    ([2, 3, 4], "dit", "drtune", "the active steps .3, 4. of .2, 3, 4. give no gradient .*take .2."),
])  # fmt: skip
def test_active_steps_that_do_not(steps, trained, mode, message):
    with pytest.raises(ConfigError, match=message):
        resolve_active(steps, trained, mode)


def test_the_plan_of_reward_feedback_learning():
    run = resolve(FACE, *BATCH, processes=4)
    assert run.active == (4, 5, 6, 7) and run.experts == ("high_noise",) * 3 + ("low_noise",) * 5
    assert run.clips_at_once == 24 and run.trained == ("low_noise",) and not run.supervised
    assert run.backwards_per_update == 3 * 4
    anchored = [*BATCH, "anchor.weight=1", "anchor.draws=5"]
    assert resolve(FACE, *anchored).backwards_per_update == 3 * (4 + 5)
    supervised = resolve(FACE, *anchored, *SUPERVISED)
    assert supervised.supervised and supervised.backwards_per_update == 3 * 5
    assert run.forwards_per_velocity == 1 and resolve(FACE, "sample.guidance_scale=3").forwards_per_velocity == 2


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
    message = "reward.reward_model_path judges at least 2 frames, and data.num_frames is 1"
    with pytest.raises(ConfigError, match=message):
        resolve(FACE, "data.num_frames=1", "reward.motion_weight=1", "reward.held_out_model_path=null")


def test_a_reward_gets_the_models_frame_rate():
    align = "{align: {name: video_align, settings: {checkpoint_dir: x, model_dir: x, prompt_file: x}}}"
    cfg = config.load(ROOT / FACE, ["data.fps=null", f"reward.terms={align}"])
    model = backbones.describe("wan2_2_ti2v", Source())
    assert plan.find_rewards(cfg, model, here=False)[-1][0].settings["fps"] == model.frame_rate == 24


def test_the_batch_that_is_checked():
    assert resolve(FACE, *BATCH, "train.train_batch_size=24", processes=4).clips_at_once == 24
    split = [*BATCH, "train.context_parallel=2"]
    assert resolve(FACE, *split, "train.train_batch_size=12", processes=4).clips_at_once == 12
    with pytest.raises(ConfigError, match=r"is 24, but .* 2 x .* 3 x 4 processes / context_parallel 2 = 12; change"):
        resolve(FACE, *split, "train.train_batch_size=24", processes=4)
    with pytest.raises(ConfigError, match="train.context_parallel 2 does not divide the 3 processes"):
        resolve(FACE, *split, processes=3)


def test_the_steps_of_the_kl():
    assert resolve(FACE, "reward.kl_weight=1", "reward.kl_steps=[5,7]").kl_steps == (5, 7)
    assert resolve(FACE, "reward.kl_weight=1").kl_steps == (4, 5, 6, 7)
    assert resolve(FACE, "reward.kl_weight=0").kl_steps == ()
    assert resolve(FACE, "reward.kl_steps=last").kl_steps == (7,)


def test_the_last_active_steps_keep_their_graphs():
    kept = "train.memory.active_graphs=keep_on_device"
    assert resolve(FACE).graphs_of == () and resolve(FACE, kept, processes=4).graphs_of == (4, 5, 6, 7)
    assert resolve(FACE, kept, "train.memory.kept_steps=1").graphs_of == (7,)
    with pytest.raises(ConfigError, match="train.memory.kept_steps is 5, but there are 4 steps with a gradient"):
        resolve(FACE, kept, "train.memory.kept_steps=5")
    assert resolve(FACE, "train.memory.kept_chunks=5", "data.num_frames=9").memory.kept_chunks == 5
    with pytest.raises(ConfigError, match="kept_chunks is 6, but there are 5 chunks"):
        resolve(FACE, "train.memory.kept_chunks=6", "data.num_frames=9")
