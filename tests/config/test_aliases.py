"""Older names of keys load to the same run as today's."""

import json
import re

import pytest
import yaml
from conftest import ROOT
from test_schema import REQUIRED

from rewardfl import config
from rewardfl.config import ConfigError

SHIPPED = yaml.safe_load((ROOT / "tests/config/shipped_f297b06.yaml").read_text())
# the tiny worlds' have other values today, or are gone
CHANGED = {file for file in SHIPPED if file.startswith("configs/tiny_")}


def load(script_section, *overrides):
    return config.parse(REQUIRED | ({script_section: {}} if script_section else {}), overrides)


@pytest.mark.parametrize("file", sorted(SHIPPED.keys() - CHANGED))
def test_a_shipped_configuration_is_still_the_same_run(file):
    today = config.load(ROOT / file)
    old = config.parse(SHIPPED[file])
    memory = {"preset": None} | today.train.memory.model_dump() | {"preset": None}
    assert config.to_dict(old)["train"].pop("memory") == memory
    assert config.to_dict(old) | {"train": None} == config.to_dict(today) | {"train": None}


@pytest.mark.parametrize("file", sorted(CHANGED))
def test_a_shipped_configuration_of_the_tiny_worlds_still_loads(file):
    assert config.parse(SHIPPED[file]).run.output_dir


@pytest.mark.parametrize("section, old, new", [
    ("", "train.decode_caches=offload", "train.memory.decode_caches=offload"),
    ("", "experts.untrained=fp8", "train.memory={untrained: fp8}"),
    ("", "reward.motion_weight=0.5", "reward.terms.face_motion.weight=0.5"),
    ("", "reward.motion_weight=0", ""), ("", "lora.lora_base_model=dit2 model.max_timestep_boundary=1", ""),
    ("", "reward.name=motion reward.reward_weight=2",
     "reward.terms.score={name: motion, weight: 2, mean: 0.54, std: 0.16}"),
    ("", "reward.others={a: {name: motion}} reward.others.a.weight=1", "reward.terms.a={name: motion, weight: 1}"),
    ("", "reward.terms.a.name=motion reward.others={}", ""),
    ("", "reward.terms.motion.weight=1 reward.terms.motion=null", ""),
    ("", "sample.gradient_mode=bridge sample.coupling=0.5", "sample.gradient_mode=bridge:0.5"),
    ("", "train.num_train_epochs=3", "train.max_steps=3 epochs"), ("", "train.num_train_epochs=1", ""),
    ("", "reward.terms.score.mean=0.3 reward.terms.score.std=1 reward.name=motion",
     "reward.terms.score={name: motion, mean: 0.3, std: 1}"),
    ("", "train.max_steps=7 train.num_train_epochs=3", "train.max_steps=7"),
    ("", "train.max_steps=7 train.num_train_epochs=3 train.max_steps=null", "train.max_steps=3 epochs"),
    ("", "sample.coupling=0.5 sample.gradient_mode=bridge", "sample.gradient_mode=bridge:0.5"),
    ("grpo", "grpo.window_size=3 grpo.window=random", "grpo.window.size=3"),
    ("grpo", "grpo.clip_range_high=2e-5 grpo.clip_range=1e-5", "grpo.clip_range=[1e-5, 2e-5]"),
    ("", "reward.kl_gradient=through_trajectory", "reward.kl_gradient=reference_constant"),
    (
        "grpo",
        "reward.motion_weight=0.5 reward.coverage_weight=1", "reward.terms.score.parts={motion: 0.5, coverage: 1}",
    ),
    ("grpo", "grpo.window=list grpo.window_steps=[2,3]", "grpo.window={steps: [2, 3]}"),
    ("grpo", "grpo.window=fraction", "grpo.window.fraction=0.6"),
    ("grpo", "grpo.clip_range=1e-5 grpo.clip_range_high=2e-5", "grpo.clip_range=[1e-5, 2e-5]"),
    ("grpo", "grpo.window=random grpo.window_size=3 grpo.window_bounds=[1,5]", "grpo.window={size: 3, within: [1, 5]}"),
    ("grpo", "grpo.clip_range=1e-5 grpo.samples_on=cpu", "grpo.clip_range=1e-5 train.memory.samples_on=cpu"),
    ("grpo", "grpo.advantage_std=none grpo.advantage_of=per_reward", "grpo.advantage={std: none, of: per_reward}"),
    ("forward", "forward.objective=awm forward.old_decay=0.4 forward.old_anchor=1",
     "forward.objective=awm forward.old_policy={decay: 0.4, anchor: 1}"),
])  # fmt: skip
def test_an_older_name_says_the_same(section, old, new):
    both = [load(section, *(re.split(r" (?=[a-z]+\.[\w.]+=)", text) if text else ())) for text in (old, new)]
    settings = [config.to_dict(cfg) for cfg in both]
    if section == "grpo":
        for values in settings:
            window = values["grpo"]["window"]
            window["size"] = window["size"] or 2  # its default
    assert settings[0] == settings[1]


@pytest.mark.parametrize("section, overrides, message", [
    ("", ["model.max_timestep_boundary=0.9"], "max_timestep_boundary must be 1"),
    ("", ["lora.lora_base_model=dit"], "lora_base_model must be model.trainable_models 'dit2', got 'dit'"),
    ("", ["sample.coupling=0.5"], "sample.coupling is for gradient_mode bridge, got 'chain'"),
    ("grpo", ["grpo.window_size=3", "grpo.window.size=4"], "grpo.window_size is an older form of 'grpo.window.size=4'"),
    ("grpo", ["grpo.window={size: 4}", "grpo.window_bounds=[1,5]"], "grpo.window_bounds is an older form of"),
    ("grpo", ["grpo.clip_range_high=2e-5", "grpo.clip_range=[1e-5,3e-5]"], "grpo.clip_range_high is an older form of"),
    ("", ["sample.coupling=0.5", "sample.gradient_mode=bridge:0.3"], "sample.coupling is an older form of"),
    ("", ["train.max_steps='5 epochs'", "train.num_train_epochs=3"], "train.num_train_epochs is an older form of"),
    ("grpo", ["grpo.window=blah"], "section 'grpo.window' must hold keys, got 'blah'"),
    ("", ["reward.terms.score=null"], "reward.terms must be keys and values with score, which may have weight 0"),
    ("", ["train.memory.preset=[1]"], "train.memory.preset must be 'fast', "),
    ("", ["run.logging_steps=5"], "run.logging_steps was removed: every step is logged; delete the key"),
    ("grpo", ["grpo.window={size: 2, fraction: 0.5}"], "grpo.window has size and fraction; remove all but one"),
])  # fmt: skip
def test_an_old_key_without_its_effect_is_refused(section, overrides, message):
    with pytest.raises(ConfigError) as error:
        load(section, *overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_both_names_of_a_key_is_refused():
    raw = REQUIRED | {"train": {"decode_caches": "keep", "memory": {"decode_caches": "offload"}}}
    with pytest.raises(ConfigError, match="train.decode_caches is an older name of train.memory.decode_caches, which"):
        config.parse(raw)


@pytest.mark.parametrize("overrides, values", [
    (["train.memory=24gb"], {"trained": "cpu_swap", "untrained": "cpu_swap", "decode_caches": "segment"}),
    (["train.memory.preset=24gb", "train.memory.trained=gpu"], {"trained": "gpu", "untrained": "cpu_swap"}),
    (["train.memory=80gb"], {"active_graphs": "keep_on_device", "kept_chunks": 2}),
    (["train.memory=80gb", "data.num_frames=1", "model.trainable_models=dit,dit2"],
     {"kept_chunks": 0, "untrained": "gpu"}),
    (["train.memory=80gb", "sample.gradient_mode=endpoint", "train.ema_decay=0.5", "reward.kl_weight=0"],
     {"active_graphs": "replay"}),
    (["train.memory=fast"], {"use_gradient_checkpointing": False}),
])  # fmt: skip
def test_a_memory_preset_sets_what_fits_and_is_not_given(overrides, values):
    memory = load("", *overrides).train.memory.model_dump()
    assert values.items() <= memory.items()


def test_saved_settings_are_read_by_todays_keys():
    old = json.loads(json.dumps(SHIPPED["configs/wan22_face_24gb.yaml"]))
    assert config.read_saved(old)["train"]["memory"]["decode_caches"] == "segment"
    old["sample"] |= {"gradient_mode": "last", "mid_timestep": 2}  # refused today
    assert config.read_saved(old)["sample"]["mid_timestep"] == 4
