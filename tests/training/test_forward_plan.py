"""The plan of train_forward_rl.py: steps that are drawn, defaults of the objectives, what is refused."""

import pytest
from conftest import ROOT

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Source
from rewardfl.config import ConfigError
from rewardfl.training import plan

PUBLISHED = backbones.describe("wan2_2", Source())
CONFIG = ROOT / "configs" / "wan22_forward.yaml"


def resolve(*settings, processes=1):
    return plan.resolve(config.load(CONFIG, settings), PUBLISHED, processes, here=False)


def test_the_steps_of_the_trained_expert_are_drawn():
    run = resolve("anchor.draws=3", processes=2)
    assert run.active == run.anchor_steps == (3, 4, 5, 6, 7) and not run.whole_range
    # 256 videos in two updates on two processes, one at a time; two draws each, and three of the anchor
    assert run.backwards_per_update == 64 * (2 + 3) and run.count_steps(100) == 180
    assert resolve("forward.sigmas=[4, 6]").active == (4, 6)
    run = resolve("forward.sigmas=trained_range")
    assert run.whole_range and run.schedule(PUBLISHED.latent_shape(480, 832, 81)).at(2.999).sigmas[0] >= 0.9
    best = resolve("forward.objective=best", "anchor.draws=3", processes=2)  # 32 groups
    assert best.backwards_per_update == 8 * (2 + 3) and best.training.samples == 32
    pairs = resolve("forward.objective=dpo", "anchor.draws=3", processes=2)
    assert pairs.backwards_per_update == 16 * (2 + 3) and pairs.training.samples == 64 and pairs.old_decay == 0
    both = resolve("model.trainable_models=dit,dit2", "forward.sigmas=[2, 3]", "anchor.weight=0")
    assert both.active == (2, 3)


# pairs come from a table
NO_REWARD = "reward.terms={score: {weight: 0}}"
UNDISTILLED = ["model.distill_lora.high=", "model.distill_lora.low="]


@pytest.mark.parametrize("settings, scale, decay", [
    ((), 0.1, 0.0), (("forward.objective=awm", "forward.advantage.clip=4"), 0.25, 0.3),
    (("forward.objective=nft", *UNDISTILLED), 1.0, 0.5), (("forward.objective=best",), 1.0, 0.0),
    (("forward.advantage.scale=0.5", "forward.old_policy.decay=0.9"), 0.5, 0.9),
])  # fmt: skip
def test_defaults_are_the_objectives(settings, scale, decay):
    run = resolve(*settings)
    assert run.advantage_scale == scale and run.old_decay == decay


@pytest.mark.parametrize("settings, words", [
    (["forward.objective=nft"], ["nft makes a distilled model worse", "forward.objective: rvm"]),
    (["forward.sigmas=[1, 4]"], ["forward.sigmas: no trained expert is used at the steps [1]", "[3, 4, 5, 6, 7]"]),
    (["forward.sigmas=[4, 3]"], ["forward.sigmas must be steps in increasing order"]),
    (["forward.sigmas=[8]"], ["forward.sigmas must lie in 0..7"]),
    (["model.trainable_models=dit,dit2", "forward.sigmas=[4]"], ["high_noise is used at none of the steps [4]"]),
    (["forward.mix=0.1"], ["forward.mix does nothing without objective nft; set it, or remove mix"]),
    (["forward.objective=best", "forward.advantage.clip=1"], ["advantage.clip does nothing without objective rvm"]),
    (["forward.objective=dpo", "forward.old_policy.anchor=1"], ["old_policy does nothing without objective"]),
    (["forward.beta=10"], ["forward.beta does nothing without objective dpo; set it, or remove beta"]),
    (["forward.objective=best", "forward.groups=3"], ["a multiple of 2 (processes x updates_per_epoch), got 3"]),
    (["forward.objective=dpo", NO_REWARD], ["forward.group_size must be 2 without a reward's weight"]),
    (["forward.objective=dpo", NO_REWARD, "train.per_device_train_batch_size=4"], ["does nothing without a reward's"]),
    ([NO_REWARD], ["reward.terms: no weight is above 0"]),
    (["forward.old_policy.rate=0.1"], ["old_policy.rate does nothing without a decay above 0"]),
    (["train.max_steps=3"], ["train.max_steps must be whole epochs of 2 updates, got 3; try 2 or 4"]),
    (["forward.groups=3", "train.per_device_train_batch_size=5"], ["forward.groups, group_size, updates_per_epoch"]),
    (["grpo.kl_weight=1"], ["grpo is for train_flow_grpo.py, whose file has a section grpo; remove it"]),
])  # fmt: skip
def test_what_cannot_train_is_refused(settings, words):
    with pytest.raises(ConfigError) as refused:
        resolve(*settings)
    assert all(word in str(refused.value) for word in words), str(refused.value)
