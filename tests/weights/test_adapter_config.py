"""Configurations of foreign LoRAs: peft merges its adapter as we do, or we refuse what we cannot merge, by name."""

import json
from dataclasses import fields

import pytest
import torch
from diffusers import WanTransformer3DModel
from lora_dialects import DIALECTS, MODULES, RANK, peft_metadata
from merging_world import merge as merge_tool
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from rewardfl import lora
from rewardfl.backbones.wan import load as wan_load
from rewardfl.weights import adapter_config, lora_files, merge, shards
from rewardfl.weights.shards import InputError

pytest_plugins = "merging_world"
NAME = "blocks.0.attn1.to_q"


def write_adapter(world, folder, name="adapter_model.safetensors", **changes):
    """Write peft's adapter under a name, with a changed configuration. Return its path."""
    folder.mkdir(exist_ok=True)
    save_file(load_file(world / "peft" / "adapter_model.safetensors"), folder / name)
    config = LoraConfig(r=4, lora_alpha=2).to_dict() | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder / name


OPTIONS = {
    "rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "bias": {"lora_bias": True},
    "patterns": {"rank_pattern": {"attn1.to_q": 3}, "alpha_pattern": {"blocks.1.attn1.to_q": 5.0}},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "blocks"}, "mica": {"init_lora_weights": "mica"},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_adapter_is_merged_as_peft_does(pipeline, option, tmp_path):
    def load_base():
        return WanTransformer3DModel.from_pretrained(pipeline / "transformer_2")

    config = LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "ffn.net.0.proj"], **OPTIONS[option])
    torch.manual_seed(0)
    model = get_peft_model(load_base(), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = 0.3 * torch.randn(parameter.shape)
            parameter.data = parameter.data * (1 + noise.abs()) if "magnitude" in name else parameter.data + noise
    model.save_pretrained(tmp_path / "low_noise")
    path = tmp_path / "low_noise" / "adapter_model.safetensors"
    expected = PeftModel.from_pretrained(load_base(), path.parent).merge_and_unload().state_dict()
    base = shards.open_checkpoint(pipeline / "transformer_2")
    updates = merge.updates_by_tensor(base, [(adapter, 1.0) for adapter in lora_files.read_lora(path)])
    for name, entry in base.tensors.items():
        merged = merge.merge_tensor(entry, updates.get(name, []), torch.float32)
        torch.testing.assert_close(merged, expected[name], rtol=1e-5, atol=1e-5, msg=name)


CHANGES = [
    {"init_lora_weights": "pissa"}, {"init_lora_weights": "new"}, {"layer_replication": [[0, 2], [1, 2]]},
    {"peft_type": "LOHA"}, {"modules_to_save": ["proj_out"]}, {"bias": "all"}, {"of_the_future": 1},
    {"r": "4"}, {"rank_pattern": ["to_q"]}, {"use_dora": True}, {"lora_bias": True},
    {"use_rslora": "false"}, *({"lora_alpha": alpha} for alpha in ("abc", True, 1e300, 1e-300, float("nan"), 0)),
    *({"alpha_pattern": pattern} for pattern in (["to_q"], {"to_q": "4"}, {"to_(q": 4})),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change)[:60])
def test_unknown_and_damaged_keys_are_refused_by_name(world, change, tmp_path):
    """In peft's file, and in a LoRA's metadata as diffusers writes them."""
    (key,) = change
    name = {"r": "'r' of", "lora_alpha": "alpha"}.get(key, key)
    path = write_adapter(world, tmp_path / "low_noise", **change)
    with pytest.raises(InputError, match=name):
        lora_files.read_lora(path)
    config = {f"transformer.{key}": value for key, value in (LoraConfig(r=4, lora_alpha=2).to_dict() | change).items()}
    save_file(load_file(path), tmp_path / "low.safetensors", {"lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(InputError, match=name):
        lora_files.read_lora(tmp_path / "low.safetensors")


@pytest.mark.parametrize("text", ("[]", "{", "[" * 100_000))
def test_a_configuration_must_be_a_json_object(world, tmp_path, text):
    path = write_adapter(world, tmp_path / "low_noise")
    path.with_name("adapter_config.json").write_text(text)
    with pytest.raises(InputError, match=r"adapter_config\.json is"):
        lora_files.read_lora(path)
    save_file(load_file(path), path, {"lora_adapter_metadata": text})
    with pytest.raises(InputError, match="lora_adapter_metadata is"):
        lora_files.read_lora(path)


@pytest.mark.parametrize(
    "change",
    [{"of_the_future": None}, {"of_the_future": {}}, {"eva_config": {"rho": 2.0}}, {"init_lora_weights": "eva"}],
    ids=str,
)
def test_harmless_keys_are_read_over(world, change, tmp_path):
    (adapter,) = lora_files.read_lora(write_adapter(world, tmp_path / "low_noise", **change))
    assert adapter.updates[NAME].scale == 0.5 and adapter.alpha_source == "the configuration (4)"


def test_every_key_of_peft_has_a_rule():
    """A new release of peft with new keys: decide for each whether it is harmless."""
    refused = {
        "fan_in_fan_out", "modules_to_save", "megatron_config", "trainable_token_indices", "velora_config",
        "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "target_parameters",
        "use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying",
    }  # fmt: skip
    read = adapter_config.AdapterConfig.model_fields.keys()
    rules = adapter_config._HARMLESS | read | adapter_config._ALLOWED.keys() | refused
    assert {key.name for key in fields(LoraConfig)} == rules


@pytest.mark.parametrize(
    "name, neighbour, prefix, changes, scale",
    [
        ("adapter_model.safetensors", False, "base_model.model.", {}, 0.5),
        ("renamed.safetensors", False, "base_model.model.", {}, 0.5),  # the configuration has its ranks
        ("other_tool.safetensors", True, "base_model.model.", {}, 1.0),
        ("other_tool.safetensors", False, "base_model.model.", {"r": 2, "lora_alpha": 64}, 1.0),
        ("other_tool.safetensors", False, "base_model.model.", {"r": None}, 1.0),
        ("other_tool.safetensors", False, "", {}, 1.0),  # the same rank, with other names than peft's
    ],
)  # fmt: skip
def test_a_configuration_counts_for_its_own_file(world, name, neighbour, prefix, changes, scale, tmp_path):
    path = write_adapter(world, tmp_path, name, **changes)
    save_file({prefix + key.removeprefix("base_model.model."): value for key, value in load_file(path).items()}, path)
    if neighbour:
        write_adapter(world, tmp_path, **changes)
    (adapter,) = lora_files.read_lora(path)
    assert {update.scale for update in adapter.updates.values()} == {scale}
    assert ("is not read" in " ".join(adapter.notes)) == (scale == 1)


PATTERNS = (
    {"^to_q": 8.0}, {"attn1.to_q": 8.0, "to_q": 2.0}, {"to_q": 2.0, "attn1.to_q": 8.0}, {r"ffn\.net\.2": 7}, {"o_q": 8},
    {"0.attn1.to_q": 8, "locks.0.attn1.to_q": 9}, {r"^blocks\.1\.attn2\.to_out\.0$": 3, "0": 5}, {"to_[qk]": 9},
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_alpha_pattern_as_peft_matches_it(values, tmp_path, pattern):
    """peft's own function is the second opinion."""
    path = DIALECTS["d1"](tmp_path, values)
    config = {"transformer.lora_alpha": 1.0, "transformer.alpha_pattern": pattern}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(config)})
    (adapter,) = lora_files.read_lora(path)
    for _, name in MODULES:
        alpha = pattern.get(get_pattern_key(pattern, name), 1.0)
        assert adapter.updates[name].scale == alpha / RANK, name


@pytest.mark.parametrize(
    "text, family",
    [
        ("flux-1-dev/lora", "FLUX.1"), ("flux1", "FLUX.1"), ("flux2", "FLUX.2"), ("FLUX.2-klein-base-4B", "FLUX.2"),
        ("stable-diffusion-3-m/lora", "SD3"), ("sd35", "SD3"), ("sdxl_base_v1-0", "Stable Diffusion 1, 2 or XL"),
        ("wan2.1-t2v-1.3b/lora", "Wan"), ("wan21", "Wan"), ("qwen_image", "Qwen-Image"), ("Z-Image-Turbo", "Z-Image"),
        ("Flux2Transformer2DModel", "FLUX.2"), ("swan", None), ("flux-to-wan2.1", None),
    ],
)  # fmt: skip
def test_words_name_a_family(text, family):
    assert adapter_config.stated_family(text) == family


def write_lora(folder, values, metadata):
    path = DIALECTS["d5"](folder, values)
    save_file(load_file(path), path, metadata)
    return path


@pytest.mark.parametrize(
    "metadata",
    [
        {"modelspec.architecture": "flux-1-dev/lora"}, {"base_model_name_or_path": "Qwen/Qwen-Image"},
        peft_metadata(base_model_name_or_path="stabilityai/stable-diffusion-3.5-medium"),
    ],
)  # fmt: skip
def test_another_family_is_refused(expert, values, tmp_path, metadata):
    """By readers of adapters and of distillation LoRAs."""
    path = write_lora(tmp_path, values, metadata)
    for read in (
        lambda: lora.read_for(expert, path),
        lambda: wan_load.read_distilled(("high_noise", "low_noise"), "", str(path)),
    ):
        with pytest.raises(InputError, match=r"by its metadata .*, not for Wan"):
            read()


def test_merging_prints_what_a_lora_was_trained_on(pipeline, values, tmp_path):
    path = write_lora(tmp_path, values, {"modelspec.architecture": "wan2.1-t2v-1.3b/lora"})
    text = merge_tool("--base", pipeline / "transformer_2", "--lora", path, "--out", tmp_path / "out", "--dry-run")
    assert f"note: {path} was trained on wan2.1-t2v-1.3b (modelspec.architecture)" in text
