"""rewardfl/weights/families.py: the words for models, and LoRAs of another family, values or count are refused."""

import json

import pytest
import torch
from conftest import run_tool
from lora_dialects import ALPHA, DIALECTS, RANK, peft_metadata, weights
from safetensors.torch import load_file, save_file

from rewardfl import backbones, lora
from rewardfl.backbones.protocol import Source
from rewardfl.backbones.wan import load as wan_load
from rewardfl.config.schema import LoraConfig
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.weights import families, lora_files, shards
from rewardfl_tools import convert_lora, merge_lora

pytest_plugins = "merging_world"


@pytest.mark.parametrize(
    "text, family",
    [
        ("flux-1-dev/lora", "FLUX.1"), ("flux1", "FLUX.1"), ("FLUX.1-Kontext-dev", "FLUX.1"), ("flux2", "FLUX.2"),
        ("FLUX.2-klein-base-4B", "FLUX.2"), ("stable-diffusion-3-m/lora", "SD3"), ("sd3.5", "SD3"), ("sd35", "SD3"),
        ("stable-diffusion-xl-v1-base/lora", "Stable Diffusion 1, 2 or XL"), ("wan2.1-t2v-1.3b/lora", "Wan"),
        ("sdxl_base_v1-0", "Stable Diffusion 1, 2 or XL"), ("wan_2.2_14b", "Wan"), ("wan21", "Wan"),
        ("Wan2.2-I2V-A14B-Diffusers", "Wan"), ("WanTransformer3DModel", "Wan"), ("qwen_image", "Qwen-Image"),
        ("Flux2Transformer2DModel", "FLUX.2"), ("FluxTransformer2DModel", "FLUX.1"), ("Z-Image-Turbo", "Z-Image"),
        ("SD3Transformer2DModel", "SD3"), ("hunyuan-video", "HunyuanVideo"), ("transformer", None), ("swan", None),
        ("flux-to-wan2.1", None), ("None", None),
    ],
)  # fmt: skip
def test_words_for_families(text, family):
    assert families.stated_family(text) == family


@pytest.mark.parametrize(
    "text, base, variant",
    [
        ("wan2.1-t2v-1.3b/lora", "wan2.2 i2v", "t2v, not i2v"), ("Wan2.2-I2V-A14B", "wan2.2 i2v 14b", None),
        ("wan_2.2_14b", "wan2.2 i2v", None), ("wan2.1", "wan2.2 i2v", "21, not 22"),
        ("flux-1-dev", "x FLUX.1-dev", None),
        ("flux-1-dev", "FLUX.1-schnell", "dev, not schnell"), ("flux-1-dev", "transformer", None),
        ("stable-diffusion-3.5-large", "stable-diffusion-3.5-medium", "large, not medium"),
    ],
)  # fmt: skip
def test_words_for_variants(text, base, variant):
    words = families.other_variants({"modelspec.architecture": text}, base)
    assert bool(words) == bool(variant) and (variant is None or variant in words[0])


def write_lora(folder, values, metadata, dialect="d5"):
    """Write a LoRA with this metadata, and peft's configuration for a folder."""
    path = DIALECTS[dialect](folder, values)
    if path.is_dir():
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | metadata))
    else:
        save_file(load_file(path), path, metadata)
    return path


def merge(pipeline, out, *loras, expect=0):
    options = [text for path in loras for text in ("--lora", path)]
    return run_tool(merge_lora.main, "--base", pipeline / "transformer_2", *options, "--out", out, expect=expect)


FOREIGN = [
    ("d5", {"modelspec.architecture": "flux-1-dev/lora"}), ("d5", {"ss_base_model_version": "sd3"}),
    ("d5", {"base_model_name_or_path": "Qwen/Qwen-Image"}),
    ("d3", {"base_model_name_or_path": "black-forest-labs/FLUX.2-dev"}),
    ("d1", peft_metadata(base_model_name_or_path="stabilityai/stable-diffusion-3.5-medium")),
]  # fmt: skip


@pytest.mark.parametrize("dialect, metadata", FOREIGN)
@pytest.mark.parametrize("tool", ["merge", "convert", "distil", "attach"])
def test_another_family_is_refused(pipeline, expert, values, tmp_path, dialect, metadata, tool):
    path = write_lora(tmp_path, values, metadata, dialect)
    with pytest.raises(shards.InputError, match=r"by its metadata .*, not for Wan"):
        if tool == "attach":
            lora.read_for(expert, path)
        wan_load.read_distilled(("high_noise", "low_noise"), "", str(path))
    out = tmp_path / "out.safetensors"
    if tool == "merge":
        assert "by its metadata" in merge(pipeline, out, path, expect=2)
    elif tool == "convert":
        run_tool(convert_lora.main, "--lora", path, "--to", "comfy", "--out", out, expect=2)
    assert not out.exists()


def test_another_variant_is_noted(pipeline, values, tmp_path):
    path = write_lora(tmp_path, values, {"modelspec.architecture": "wan2.1-t2v-1.3b/lora"})
    assert "note: " in (text := merge(pipeline, tmp_path / "a.safetensors", path)) and "t2v, not i2v" in text
    path = write_lora(tmp_path, values, {"ss_base_model_version": "wan2.2_i2v", "modelspec.architecture": "mine"})
    assert "trained on" not in merge(pipeline, tmp_path / "b.safetensors", path)


def test_no_lora_that_is_merged_is_added_again(pipeline, values, tmp_path):
    """As a distillation, a start of training, or an adapter of generate and evaluate."""
    path, part, merged = DIALECTS["d5"](tmp_path, values), tmp_path / "step" / "transformer_2", tmp_path / "merged"
    part.mkdir(parents=True)
    DIALECTS["d1"](part, values)
    settings = LoraConfig(init_from=str(path), lora_rank=RANK, lora_alpha=ALPHA)
    run_tool(merge_lora.main, "--base", pipeline, "--lora", f"{path}@low", "--out", merged)
    backbone = backbones.open("wan2_2", Source(model_paths=str(merged)))
    for read in (
        lambda: backbones.open("wan2_2", Source(model_paths=str(merged), distilled=("", str(path)))),
        lambda: read_initial_adapters(settings, backbone, ["low_noise"], [*values]),
        lambda: backbone.attach_adapters({"low_noise": backbone.empty_expert("low_noise")}, part.parent),
    ):
        with pytest.raises(shards.InputError, match=f"is merged into {merged}/transformer_2.* already"):
            read()


def test_values_that_are_not_finite_name_file_and_tensor(expert, values, tmp_path):
    state = load_file(path := DIALECTS["d1"](tmp_path, values))
    name = next(name for name in state if name.endswith("lora_A.weight"))
    state[name][0, 0] = torch.inf
    save_file(state, path, peft_metadata())
    for read in (lora_files.read_lora, lambda path: lora.read_for(expert, path)):
        with pytest.raises(shards.InputError, match=f"{path.name}: {name} has values that are nan or infinite"):
            read(path)


def test_a_lora_counts_once(pipeline, values, tmp_path):
    path, out = DIALECTS["d5"](tmp_path, values), tmp_path / "out.safetensors"
    run_tool(convert_lora.main, "--lora", path, "--to", "diffusers", "--out", copy := tmp_path / "copy.safetensors")
    assert "the same as another --lora" in merge(pipeline, out, path, path, expect=2)
    assert "the same as another --lora" in merge(pipeline, out, f"{path}:1.0", copy, expect=2)
    merge(pipeline, tmp_path / "twice.safetensors", f"{path}:1.0", f"{copy}:1")
    (tmp_path / "other").mkdir()
    other = DIALECTS["d5"](tmp_path / "other", {name: (down, -up) for name, (down, up) in values.items()})
    first, second = tmp_path / "first_low_noise", tmp_path / "second_low_noise"
    merge(pipeline, first / "transformer_2", path)
    merge(first, second / "transformer_2", other)
    for base in (first, second):
        assert "already" in merge(base, out, copy, expect=2)
    merge(first, out, f"{path}:1")
    name = "blocks.0.attn1.to_q.weight"
    before, once = (weights(folder / "transformer_2")[name] for folder in (pipeline, first))
    torch.testing.assert_close(load_file(out)[name] - once, once - before, rtol=1e-3, atol=1e-5)
