"""Both scripts on a small random text-to-image model, whose mathematics test_backbones.py asks about."""

import pytest
from image_pipelines import SIDE, random_sd3
from runs import launch, launch_grpo, metrics

from rewardfl import data, lora

RED = ["reward.name=colour", "reward.reward_model_path=null", "reward.held_out_model_path=null"]
PROMPTS = ["a red ball", "a blue ball", "a ball", "the ball and the red ball"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """What a configuration says of the model and its prompts."""
    folder = tmp_path_factory.mktemp("sd3")
    random_sd3().save_pretrained(folder / "model")
    (folder / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS, ""]))
    return [
        "model.model_name=sd3", f"model.model_paths={folder / 'model'}", "model.trainable_models=dit", *RED,
        f"data.file_name={folder / 'prompts.csv'}", f"data.cache_dir={folder / 'cache'}", "data.num_frames=1",
        f"data.height={SIDE}", f"data.width={SIDE}", "sample.shift=3",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["reward_fl", "flow_grpo"])
def test_a_colour_is_learned(model, how, tmp_path):
    settings = [
        "train.learning_rate=2e-2", "train.warmup_steps=0", "train.max_steps=12", "run.save_steps=12",
        f"run.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    if how == "reward_fl":
        launch(*model, *settings, "reward.kl_weight=0", "sample.noises_per_sample=1")
    else:
        launch_grpo(*model, *settings, "grpo.group_size=4", "grpo.groups=4", "train.per_device_train_batch_size=8")
    scores = [line["reward/mean"] for line in metrics(tmp_path / "run")]
    first, last = (sum(four) / 4 for four in (scores[:4], scores[-4:]))
    assert last > first + {"reward_fl": 0.015, "flow_grpo": 0.004}[how], scores
    (shown,) = (tmp_path / "run" / "samples" / "step-000012").iterdir()
    assert shown.name == "00.png" and data.read_picture(shown).shape == (SIDE, SIDE, 3)
    state, _ = lora.read_adapter(tmp_path / "run" / "checkpoints" / "step-000012" / "transformer" / lora.WEIGHTS_NAME)
    assert any(name.startswith("transformer_blocks.0.attn2.to_q") for name in state)
