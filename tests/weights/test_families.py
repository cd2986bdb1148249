"""The words for models: a LoRA whose metadata names another family is refused."""

import json

import pytest
from lora_dialects import DIALECTS, peft_metadata
from merging_world import merge
from safetensors.torch import load_file, save_file

from rewardfl import lora
from rewardfl.backbones.wan import load as wan_load
from rewardfl.weights import families
from rewardfl.weights.shards import InputError

pytest_plugins = "merging_world"


@pytest.mark.parametrize(
    "text, family",
    [
        ("flux-1-dev/lora", "FLUX.1"), ("flux1", "FLUX.1"), ("flux2", "FLUX.2"), ("FLUX.2-klein-base-4B", "FLUX.2"),
        ("stable-diffusion-3-m/lora", "SD3"), ("sd35", "SD3"), ("sdxl_base_v1-0", "Stable Diffusion 1, 2 or XL"),
        ("wan2.1-t2v-1.3b/lora", "Wan"), ("wan21", "Wan"), ("WanTransformer3DModel", "Wan"),
        ("qwen_image", "Qwen-Image"), ("Flux2Transformer2DModel", "FLUX.2"), ("FluxTransformer2DModel", "FLUX.1"),
        ("SD3Transformer2DModel", "SD3"), ("Z-Image-Turbo", "Z-Image"), ("hunyuan-video", "HunyuanVideo"),
        ("transformer", None), ("swan", None), ("flux-to-wan2.1", None),
    ],
)  # fmt: skip
def test_words_name_a_family(text, family):
    assert families.stated_family(text) == family


def write_lora(folder, values, metadata, dialect="d5"):
    """Write a LoRA with this metadata, or with this peft configuration for a folder."""
    path = DIALECTS[dialect](folder, values)
    if path.is_dir():
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | metadata))
    else:
        save_file(load_file(path), path, metadata)
    return path


@pytest.mark.parametrize(
    "dialect, metadata",
    [
        ("d5", {"modelspec.architecture": "flux-1-dev/lora"}), ("d5", {"ss_base_model_version": "sd3"}),
        ("d5", {"base_model_name_or_path": "Qwen/Qwen-Image"}),
        ("d3", {"base_model_name_or_path": "black-forest-labs/FLUX.2-dev"}),
        ("d1", peft_metadata(base_model_name_or_path="stabilityai/stable-diffusion-3.5-medium")),
    ],
)  # fmt: skip
def test_another_family_is_refused(expert, values, tmp_path, dialect, metadata):
    """By readers of adapters and of distillation LoRAs."""
    path = write_lora(tmp_path, values, metadata, dialect)
    for read in (
        lambda: lora.read_for(expert, path),
        lambda: wan_load.read_distilled(("high_noise", "low_noise"), "", str(path)),
    ):
        with pytest.raises(InputError, match=r"by its metadata .*, not for Wan"):
            read()


def test_merging_prints_what_a_lora_was_trained_on(pipeline, values, tmp_path):
    path = write_lora(tmp_path, values, {"modelspec.architecture": "wan2.1-t2v-1.3b/lora"})
    text = merge("--base", pipeline / "transformer_2", "--lora", path, "--out", tmp_path / "out", "--dry-run")
    assert f"note: {path} was trained on wan2.1-t2v-1.3b (modelspec.architecture)" in text
