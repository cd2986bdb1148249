"""Configurations of foreign LoRAs: peft merges its adapter as we do, or we refuse what we cannot merge, by name."""

import json
from dataclasses import fields

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from rewardfl import lora
from rewardfl.backbones.wan import load as wan_load
from rewardfl.weights import adapter_config, lora_files, merge, shards
from rewardfl.weights.shards import InputError

pytest_plugins = "merging_world"
NAME = "blocks.0.attn1.to_q"


def load_base(world):
    return WanTransformer3DModel.from_pretrained(world / "pipeline" / "transformer_2")


def ours(world, path):
    """Return the merged weights by our reader."""
    base = shards.open_checkpoint(world / "pipeline" / "transformer_2")
    updates = merge.updates_by_tensor(base, [(one, 1.0) for one in lora_files.read_lora(path)])
    return {
        name: merge.merge_tensor(entry, updates.get(name, []), torch.float32) for name, entry in base.tensors.items()
    }


def foreign(world, folder, name="adapter_model.safetensors", **changes):
    """Write peft's adapter of the tests under another name, or with another configuration. Return its path."""
    (adapter,) = world.glob("*/adapter_model.safetensors")
    folder.mkdir(exist_ok=True)
    save_file(load_file(adapter), folder / name)
    config = LoraConfig(r=4, lora_alpha=2).to_dict() | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder / name


OPTIONS = {
    "plain": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "bias": {"lora_bias": True},
    "patterns": {"rank_pattern": {"attn1.to_q": 3}, "alpha_pattern": {"blocks.1.attn1.to_q": 5.0}},
    "excluded": {"exclude_modules": ["attn2.to_q"]}, "dropout": {"lora_dropout": 0.1},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "blocks"},
}  # fmt: skip
OPTIONS |= {str(init): {"init_lora_weights": init} for init in ("gaussian", "orthogonal", "mica", False)}


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_adapter_is_merged_as_peft_does(world, kind, tmp_path):
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "ffn.net.0.proj"], **OPTIONS[kind])
    torch.manual_seed(0)
    model = get_peft_model(load_base(world), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = 0.3 * torch.randn(parameter.shape)
            parameter.data = parameter.data * (1 + noise.abs()) if "magnitude" in name else parameter.data + noise
    model.save_pretrained(tmp_path / "low_noise")
    path = tmp_path / "low_noise" / "adapter_model.safetensors"
    wanted = PeftModel.from_pretrained(load_base(world), path.parent).merge_and_unload().state_dict()
    for name, value in ours(world, path).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=name)


CHANGES = [
    *({"init_lora_weights": init} for init in ("pissa", "pissa_niter_16", "corda", "olora", "loftq", "lora_ga", "new")),
    {"layer_replication": [[0, 2], [1, 2]]}, {"alora_invocation_tokens": [1, 2]}, {"use_qalora": True},
    {"peft_type": "LOHA"}, {"modules_to_save": ["proj_out"]}, {"bias": "all"}, {"fan_in_fan_out": True},
    {"megatron_config": {"a": 1}}, {"trainable_token_indices": [1]}, {"target_parameters": ["x"]},
    {"use_bdlora": {"a": 1}}, {"arrow_config": {"a": 1}}, {"kasa_config": {"a": 1}}, {"monteclora_config": {"a": 1}},
    {"velora_config": {"a": 1}}, {"ensure_weight_tying": True}, {"of_the_future": "x"}, {"of_the_future": 1},
    {"r": 8}, {"r": "4"}, {"rank_pattern": ["to_q"]}, {"use_dora": True}, {"lora_bias": True},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_may_change_the_tensors_meaning_is_refused_by_name(world, change, tmp_path):
    (key,) = change
    path = foreign(world, tmp_path / "low_noise", **change)
    with pytest.raises(InputError, match="rank|'r' of" if key == "r" else key):
        lora_files.read_lora(path)
    config = {f"transformer.{key}": value for key, value in (LoraConfig(r=4, lora_alpha=2).to_dict() | change).items()}
    save_file(load_file(path), tmp_path / "one.safetensors", {"lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(InputError, match="rank|'r' of" if key == "r" else key):
        lora_files.read_lora(tmp_path / "one.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"of_the_future": None}, {"of_the_future": False}, {"of_the_future": {}}, {"peft_type": None},
        {"exclude_modules": ["x"]}, {"revision": "main"}, {"eva_config": {"rho": 2.0}}, {"init_lora_weights": "eva"},
        {"task_type": "FEATURE_EXTRACTION"}, {"runtime_config": {"ephemeral_gpu_offload": True}}, {"r": None},
    ],
    ids=str,
)  # fmt: skip
def test_harmless_keys_are_read_over(world, change, tmp_path):
    (one,) = lora_files.read_lora(foreign(world, tmp_path / "low_noise", **change))
    assert one.updates[NAME].scale == 0.5 and one.alpha_source == "the configuration (4)"


def test_every_key_of_peft_has_a_rule():
    """A new release of peft with new keys: decide for each whether it is harmless."""
    refused = {
        "fan_in_fan_out", "modules_to_save", "megatron_config", "trainable_token_indices", "velora_config",
        "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "target_parameters",
        "use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying",
    }  # fmt: skip
    read = adapter_config.AdapterConfig.model_fields.keys()
    rules = adapter_config._HARMLESS | read | adapter_config._ALLOWED.keys() | refused
    assert {one.name for one in fields(LoraConfig)} == rules


@pytest.mark.parametrize("reader", ["distillation", "attached adapter"])
def test_all_readers_refuse_alike(world, reader, tmp_path):
    config = LoraConfig(r=4, lora_alpha=2, init_lora_weights="pissa").to_dict()
    path = tmp_path / lora.WEIGHTS_NAME
    state = {f"transformer.{NAME}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    metadata = {f"transformer.{key}": value for key, value in config.items()}
    save_file(state, path, {"lora_adapter_metadata": json.dumps(metadata)})
    with pytest.raises(InputError, match="init_lora_weights"):
        if reader == "distillation":
            wan_load.read_distilled(("high_noise", "low_noise"), "", str(path))
        else:
            lora.read_for(load_base(world), path)


@pytest.mark.parametrize(
    "name, neighbour, prefix, changes, scale",
    [
        ("adapter_model.safetensors", False, "base_model.model.", {}, 0.5),
        ("renamed.safetensors", False, "base_model.model.", {}, 0.5),  # its ranks are those of the configuration
        ("other_tool.safetensors", True, "base_model.model.", {}, 1.0),
        ("other_tool.safetensors", False, "base_model.model.", {"r": 2, "lora_alpha": 64}, 1.0),
        ("other_tool.safetensors", False, "base_model.model.", {"r": None}, 1.0),
        ("other_tool.safetensors", False, "", {}, 1.0),  # of the same rank, with names that are not peft's
    ],
)  # fmt: skip
def test_a_configuration_counts_for_its_own_file(world, name, neighbour, prefix, changes, scale, tmp_path):
    path = foreign(world, tmp_path, name, **changes)
    save_file({prefix + key.removeprefix("base_model.model."): value for key, value in load_file(path).items()}, path)
    if neighbour:
        foreign(world, tmp_path, **changes)
    (one,) = lora_files.read_lora(path)
    assert {update.scale for update in one.updates.values()} == {scale}
    assert ("is not read" in " ".join(one.notes)) == (scale == 1)
