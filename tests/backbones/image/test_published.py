"""The published configurations of image models, and the recipes that name them, without any weights."""

import inspect
import json

import diffusers
import pytest
import torch
import transformers
from conftest import ROOT

from rewardfl import backbones, config, lora
from rewardfl.backbones import stock
from rewardfl.backbones.image.pipeline import PUBLISHED
from rewardfl.backbones.protocol import Source
from rewardfl.training import model_files
from rewardfl.weights.shards import InputError

# What the published files hold. Halves of a size in bytes are of index files (16 bits a number) that the repository
# lllyasviel/stable-diffusion-webui-forge keeps; the others are counts that public code states of models and headers.
HELD = {
    ("stable-diffusion-3.5-medium", "transformer"): 2_469_663_936,  # 2,243,171,520 and the table of positions
    ("stable-diffusion-3.5-medium", "text_encoder"): 123_650_304,
    ("stable-diffusion-3.5-medium", "text_encoder_2"): 694_659_840,
    ("stable-diffusion-3.5-medium", "text_encoder_3"): 9_524_621_312 // 2,
    ("stable-diffusion-3.5-medium", "vae"): 83_819_683,
    ("FLUX.1-dev", "transformer"): 23_802_816_640 // 2,
    ("FLUX.1-dev", "text_encoder"): 123_060_480,
    ("FLUX.1-dev", "text_encoder_2"): 9_524_621_312 // 2,
    ("FLUX.1-dev", "vae"): 83_819_683,
    ("Qwen-Image", "transformer"): 20_430_401_088,
    ("Qwen-Image", "text_encoder"): 8_292_166_656,
    ("Qwen-Image", "vae"): 126_892_531,
    ("FLUX.2-klein-base-4B", "transformer"): 3_875_544_576,
    ("FLUX.2-klein-base-4B", "text_encoder"): 4_022_468_096,
    ("FLUX.2-klein-base-4B", "vae"): 84_046_115 + 257,  # and the batch normalisation's statistics
    ("FLUX.2-klein-base-9B", "transformer"): 9_078_581_248,
    ("FLUX.2-klein-base-9B", "text_encoder"): 8_190_735_360,
    ("FLUX.2-klein-base-9B", "vae"): 84_046_115 + 257,
    ("Z-Image", "transformer"): 6_154_908_736,
    ("Z-Image", "text_encoder"): 4_022_468_096,
    ("Z-Image", "vae"): 83_819_683,
}
# by model.model_name: a published model, and its embedded guidance
MODELS = {
    "sd3": ("stable-diffusion-3.5-medium", None), "flux": ("FLUX.1-dev", 3.5), "qwen_image": ("Qwen-Image", None),
    "flux2_klein": ("FLUX.2-klein-base-4B", None), "z_image": ("Z-Image", None),
}  # fmt: skip
RECIPES = (
    "sd35_flow_grpo", "sd35_reward_fl", "flux_flow_grpo", "flux_reward_fl", "qwen_image_flow_grpo",
    "flux2_klein_flow_grpo", "z_image_flow_grpo",
)  # fmt: skip


CONFIGS = {path.stem: json.loads(path.read_text()) for path in PUBLISHED.iterdir()}


def unknown_keys(cls, config):
    """Return the keys of a configuration that a class of diffusers would ignore."""
    return set(config) - {*inspect.signature(cls.__init__).parameters, "_class_name"}


@pytest.mark.parametrize("folder, part", HELD)
def test_sizes_are_those_of_the_published_files(folder, part):
    library, name = CONFIGS[folder]["model_index"][part]
    settings = CONFIGS[folder][part]
    cls = getattr({"diffusers": diffusers}.get(library, transformers), name)
    assert library == "transformers" or (not unknown_keys(cls, settings) and settings["_class_name"] == name)
    model = stock.new_on_meta(cls, settings)
    saved = model.state_dict().keys()
    buffers = [value for name, value in model.named_buffers() if name in saved]
    assert sum(value.numel() for value in [*model.parameters(), *buffers]) == HELD[folder, part]


def test_the_files_are_complete():
    """The parts that model_index.json names, but for the tokenizers, and nothing else."""
    assert CONFIGS.keys() == {model for model, _ in HELD}
    for model, configs in CONFIGS.items():
        named = {name for name, value in configs["model_index"].items() if isinstance(value, list)}
        parts = configs.keys() - {"model_index"}
        assert parts == {part for part in named if not part.startswith("tokenizer")}
        assert parts == {part for other, part in HELD if other == model} | {"scheduler"}
        scheduler = configs["scheduler"]
        assert not unknown_keys(getattr(diffusers, scheduler["_class_name"]), scheduler)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_described_by_the_name_of_its_path(name, tmp_path):
    published, guidance = MODELS[name]
    source = Source(model_paths=str(tmp_path / published), embedded_guidance=guidance)
    backbone = backbones.describe(name, source)
    assert backbone.described_by().startswith(f"{PUBLISHED / published}.json (published; ")
    assert backbone.latent_shape(512, 512, 1)[1:] == (1, 64, 64)
    with pytest.raises(InputError, match=f"model.model_paths: .*{published} has no weights"):
        backbones.open(name, source)
    (tmp_path / published).mkdir()  # an existing folder is used as it is
    for read_model in (backbones.describe, backbones.open):
        with pytest.raises(InputError, match="model.model_paths: .*no model_index.json"):
            read_model(name, source)


def test_a_path_that_names_no_model_is_refused(tmp_path):
    for read_model in (backbones.describe, backbones.open):
        with pytest.raises(InputError, match="model.model_paths: .*FLUX.1-def") as refused:
            read_model("flux", Source(model_paths=str(tmp_path / "FLUX.1-def"), embedded_guidance=3.5))
        assert all(folder in str(refused.value) for folder, _ in HELD)
    with pytest.raises(InputError, match="model.model_name: flux .*QwenImagePipeline"):
        backbones.describe("flux", Source(model_paths=str(tmp_path / "Qwen-Image"), embedded_guidance=3.5))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_what_the_model_has(name):
    cfg = config.load(ROOT / "configs" / f"{name}.yaml")
    backbone = backbones.describe(cfg.model.model_name, model_files.model_source(cfg.model))
    targets = lora.target_modules(cfg.lora.lora_target_modules, backbone.layer_names)
    lora.check_targets(targets, backbone.linear_layers(), backbone.layer_names)
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    assert cfg.sample.shift is None and cfg.model.trainable_models == "dit"


def test_the_four_steps_of_the_recipe_are_those_that_it_names():
    """Of linspace(1, 0, 5) at shift 3, by the formula of sample.shift; diffusers' own range ends at 0.003."""
    cfg = config.load(ROOT / "configs" / "sd35_reward_fl.yaml")
    backbone = backbones.describe("sd3", model_files.model_source(cfg.model))
    schedule = backbone.schedule(cfg.sample.num_inference_steps, None, backbone.latent_shape(512, 512, 1))
    even = torch.linspace(1, 0, 5)
    assert schedule.until(cfg.sample.final_timestep).sigmas == pytest.approx(3 * even / (1 + 2 * even), abs=4e-3)
