"""LoRAs of SD3, FLUX.1 and Qwen-Image are merged and converted as diffusers does, or refused."""

import functools

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from image_pipelines import random_flux, random_qwen_image, random_sd3
from lora_dialects import AB, ALPHA, DOWN_UP, RANK, ROLL, SCALE, lora_tensors, peft_metadata, products, weights
from merging_world import convert, merge, refuse
from safetensors.torch import load_file, save_file

from rewardfl.weights import image_names, lora_files, shards

MAKE = {"SD3": random_sd3, "FLUX.1": random_flux, "Qwen-Image": random_qwen_image}
# layers that an adapter changes
LAYERS = {
    "SD3": "T.0.attn.to_q T.0.attn2.to_out.0 T.1.attn.add_k_proj T.1.ff.net.0.proj T.2.norm1_context.linear proj_out",
    "FLUX.1": "T.0.attn.to_q T.1.attn.to_add_out T.1.ff.net.2 single_T.1.attn.to_v single_T.0.proj_mlp x_embedder",
    "Qwen-Image": "T.0.attn.to_q T.1.attn.to_add_out T.1.img_mod.1 T.0.txt_mlp.net.0.proj T.0.attn.add_v_proj",
    # diffusers reads only OneTrainer's names of attention
    "OneTrainer": "T.1.attn.to_add_out T.1.attn.to_out.0 single_T.1.attn.to_v T.0.attn.add_k_proj x_embedder",
}
LAYERS = {model: names.replace("T.", "transformer_blocks.").split() for model, names in LAYERS.items()}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function from a model's name to its pipeline's folder."""

    @functools.cache
    def folder(model):
        path = tmp_path_factory.mktemp("pipeline") / model
        MAKE[model]().save_pretrained(path)
        return path

    return folder


def pair(shape, seed=0):
    """(down, up) of a layer with a weight of this shape."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(RANK, shape[1], generator=generator) / shape[1] ** 0.5
    return down, torch.randn(shape[0], RANK, generator=generator)


KOHYA = [
    "double_blocks.0.img_attn.qkv", "double_blocks.1.txt_attn.qkv", "double_blocks.0.img_attn.proj",
    "double_blocks.1.txt_mlp.2", "double_blocks.0.img_mod.lin", "single_blocks.1.linear2",
    "single_blocks.0.modulation.lin",
]  # fmt: skip
XLABS = ["double_blocks.0.processor.qkv_lora1", "double_blocks.1.processor.qkv_lora2"]
XLABS += ["double_blocks.1.processor.proj_lora1", "double_blocks.0.processor.proj_lora2"]


def named(layers, **form):
    """A dialect with diffusers' names of LAYERS; of these or of other layers under that name."""

    def tensors(base):
        halves = {name: pair(base[f"{name}.weight"].shape, len(name)) for name in LAYERS[layers]}
        return lora_tensors(halves, **({"prefix": "transformer.", "ends": AB} | form))

    return tensors


def original(names, **form):
    """A dialect with the original names of layers of FLUX.1; kohya's by default."""

    def tensors(base):
        halves = {}
        for name in names:
            modules = [place.module for place in image_names.find_modules(name, image_names.ALL_ROWS)["FLUX.1"]]
            shapes = [base[f"{module}.weight"].shape for module in modules]
            halves[name] = pair((sum(shape[0] for shape in shapes), shapes[0][1]), len(name))
        return lora_tensors(halves, **({"prefix": "lora_unet_", "flat": True} | form))

    return tensors


# {(model, dialect): its tensors for the base's weights}; diffusers reads each
DIALECTS = {
    ("SD3", "diffusers"): named("SD3"), ("FLUX.1", "diffusers"): named("FLUX.1"),
    ("FLUX.1", "ai-toolkit"): named("FLUX.1", scale=SCALE), ("FLUX.1", "alpha keys"): named("FLUX.1", alpha=ALPHA),
    ("FLUX.1", "kohya"): original(KOHYA, alpha=ALPHA), ("FLUX.1", "kohya without alpha"): original(KOHYA),
    ("FLUX.1", "comfy"): original(KOHYA, prefix="diffusion_model.", flat=False, alpha=ALPHA),
    ("FLUX.1", "OneTrainer"): named("OneTrainer", prefix="lora_transformer_", ends=DOWN_UP, alpha=ALPHA, flat=True),
    ("FLUX.1", "xlabs"): original(XLABS, prefix="", flat=False, ends=("down", "up")),
    ("Qwen-Image", "diffusers"): named("Qwen-Image"),
    ("Qwen-Image", "ai-toolkit"): named("Qwen-Image", prefix="diffusion_model.", scale=SCALE),
    ("Qwen-Image", "lightning"): named("Qwen-Image", prefix="", ends=DOWN_UP, alpha=ALPHA),
    ("Qwen-Image", "kohya"): named("Qwen-Image", prefix="lora_unet_", ends=DOWN_UP, alpha=ALPHA, flat=True),
    ("Qwen-Image", "DiffSynth"): named("Qwen-Image", prefix="", scale=SCALE, ends=ROLL),
}  # fmt: skip


def write(folder_of, model, dialect, path):
    base = weights(folder_of(model) / "transformer")
    state = DIALECTS[model, dialect](base)
    save_file(state, path, peft_metadata(target_modules=LAYERS[model]) if dialect == "diffusers" else {})
    return base


@pytest.mark.parametrize(
    "model, transformer, settings",
    [
        ("SD3", SD3Transformer2DModel, {"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}),
        ("FLUX.1", FluxTransformer2DModel, {"guidance_embeds": True}),
        ("Qwen-Image", QwenImageTransformer2DModel, {}),
    ],
)  # fmt: skip
def test_full_models_have_these_modules(model, transformer, settings):
    """SD3 and SD3.5, FLUX.1-dev and -schnell, Qwen-Image: each tensor has a place, by both forms of its name."""
    with torch.device("meta"):
        names = list(transformer(**settings).state_dict())
    checkpoint = shards.Checkpoint(path=None, tensors=dict.fromkeys(names), files=(), metadata={})
    assert image_names.match_models(checkpoint) == (model,)
    for name in {name.removesuffix(".weight").removesuffix(".bias") for name in names}:
        for alias in (name, name.replace(".", "_")):
            assert image_names.find_modules(alias, 8)[model] == (image_names.ModuleSlice(name),)


ORIGINAL = {  # {layer of FLUX.1 as its original code or XLabs calls it: (outputs, how many modules hold it)}
    "vector_in.in_layer": (30, 1), "guidance_in.out_layer": (30, 1), "final_layer.linear": (30, 1),
    "final_layer.adaLN_modulation.1": (6144, 1), "double_blocks.18.txt_attn.qkv": (9216, 3),
    "double_blocks.0.img_mod.lin": (30, 1), "single_blocks.37.linear1": (21504, 4), "single_blocks.0.linear2": (30, 1),
    "double_blocks.3.processor.qkv_lora1": (9216, 3), "single_blocks.3.processor.proj_lora": (30, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINAL)
def test_original_names_are_those_of_diffusers_converter(name, tmp_path):
    """At FLUX.1's size, of rank one with a different number in each row."""
    rows, modules = ORIGINAL[name]
    form = {"prefix": "lora_unet_", "flat": True, "alpha": None if "final" in name else 0.5}  # which diffusers drops
    form = {"ends": ("down", "up")} if "processor" in name else form
    save_file(lora_tensors({name: (torch.ones(1, 1), torch.randn(rows, 1))}, **form), tmp_path / "lora.safetensors")
    updates = products(tmp_path / "lora.safetensors")
    converted = FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "lora.safetensors"))
    assert len(updates) == modules and len(converted) == 2 * modules
    for key, down in converted.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            assert torch.equal(updates[module], converted[key.replace("_A.", "_B.")] @ down), module


@pytest.mark.parametrize(
    "converted",
    [
        {"transformer.x_embedder.lora_B.weight": torch.arange(7.0)[:, None]},  # a row is lost
        {"transformer.x_embedder.lora_B.weight": torch.ones(8, 1)},
        {"transformer.magic.lora_B.weight": torch.arange(8.0)[:, None]},
        {},
    ],
)
def test_rows_that_a_converter_drops_or_mangles_are_refused(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(FluxLoraLoaderMixin, "lora_state_dict", lambda state: converted)
    save_file(halves("lora_unet_txt_in", 8) | halves("lora_unet_vector_in_in_layer", 8), tmp_path / "lora.safetensors")
    image_names._flux_places.cache_clear()
    with pytest.raises(shards.InputError, match="names no module of"):
        lora_files.read_lora(tmp_path / "lora.safetensors")
    image_names._flux_places.cache_clear()


@pytest.mark.parametrize("model, dialect", DIALECTS)
def test_merged_is_what_diffusers_fuses(folder_of, model, dialect, tmp_path):
    path, out = tmp_path / "lora.safetensors", tmp_path / "merged"
    base = write(folder_of, model, dialect, path)
    text = merge("--base", folder_of(model), "--lora", path, "--out", out, "--verify")
    assert model in text and "high_noise" not in text
    convert("--lora", path, "--to", "diffusers", "--out", tmp_path / "converted", "--verify")
    merged, pipe = weights(out / "transformer"), MAKE[model]()
    for lora_file in (path, tmp_path / "converted" / "transformer"):
        pipe.load_lora_weights(str(lora_file))
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        fused = pipe.transformer.state_dict()
        assert merged.keys() == fused.keys()
        for name, value in fused.items():
            torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-5, msg=name)
        pipe.transformer.load_state_dict(base)
    changed = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    assert len(changed) >= 5 and changed == {f"{name}.weight" for name in products(path)}
    type(pipe).from_pretrained(out)


def test_biases_and_magnitudes_of_a_fused_layer_are_divided(folder_of, tmp_path):
    folder, path, out = folder_of("FLUX.1") / "transformer", tmp_path / "lora.safetensors", tmp_path / "out.safetensors"
    base, stem = weights(folder), "lora_unet_double_blocks_0_img_attn_qkv"
    state = original(["double_blocks.0.img_attn.qkv"], alpha=ALPHA)(base)
    state |= {f"{stem}.dora_scale": 1 + torch.rand(96, 1), f"{stem}.diff_b": torch.randn(96)}
    save_file(state, path)
    merge("--base", folder, "--lora", path, "--out", out, "--verify")

    def fused(tensors, leaf):
        return torch.cat([tensors[f"transformer_blocks.0.attn.to_{letter}.{leaf}"] for letter in "qkv"])

    merged = load_file(out)
    moved = fused(base, "weight") + SCALE * state[f"{stem}.lora_up.weight"] @ state[f"{stem}.lora_down.weight"]
    expected = state[f"{stem}.dora_scale"] * moved / moved.norm(dim=1, keepdim=True)
    torch.testing.assert_close(fused(merged, "weight"), expected, rtol=1e-5, atol=1e-5)
    biases = fused(merged, "bias") - fused(base, "bias")
    torch.testing.assert_close(biases, state[f"{stem}.diff_b"], rtol=1e-5, atol=1e-5)
    assert "--to diffusers" in refuse(convert, tmp_path / "new.safetensors", "--lora", path, "--to", "comfy")
    save_file(state | {f"{stem}.dora_scale": torch.rand(1, 32)}, path)
    text = refuse(merge, tmp_path / "new.safetensors", "--base", folder, "--lora", path)
    assert "dora_scale has shape (1, 32), but its layer has 96 outputs" in text


@pytest.mark.parametrize("model", MAKE)
def test_comfy_reads_diffusers_names_without_alpha(folder_of, model, tmp_path):
    """ComfyUI's comfy/lora.py maps transformer.<name>, and adds lora_B @ lora_A if there is no .alpha."""
    write(folder_of, model, "diffusers", tmp_path / "lora.safetensors")
    out = tmp_path / "face"
    text = convert("--lora", tmp_path / "lora.safetensors", "--to", "comfy", "--out", out)
    assert f"ComfyUI reads diffusers' names of {model}" in text.replace("SD3 and FLUX.1", model)
    state = load_file(out / "face.safetensors")
    assert len(state) == 2 * len(LAYERS[model])
    for name, value in products(tmp_path / "lora.safetensors").items():
        up, down = state[f"transformer.{name}.lora_B.weight"], state[f"transformer.{name}.lora_A.weight"]
        torch.testing.assert_close(up @ down, value, rtol=1e-5, atol=1e-6)


def halves(stem, out=32, inside=32, ends=DOWN_UP):
    return {f"{stem}.{ends[0]}.weight": torch.ones(RANK, inside), f"{stem}.{ends[1]}.weight": torch.ones(out, RANK)}


QKV, PROJ = "lora_unet_double_blocks_0_img_attn_qkv", "lora_unet_double_blocks_0_img_attn_proj"
T0 = "transformer.transformer_blocks.0"
# (tensors, the message); the last four are refused for the base only
REFUSED = [
    (halves(f"{T0}.attn.to_q") | halves(f"{T0}.ff.linear_in"), "whose names other keys have"),  # FLUX.2, in part
    (halves("lora_unet_single_blocks_0_linear1", 27 * 32), "864 rows) names no module"),  # FLUX.2 of kohya
    (halves("lora_unet_img_in"), "may be of FLUX.1 or Qwen-Image"),
    (halves(PROJ) | halves("lora_te1_text_model_encoder_layers_0_mlp_fc1"), "lora_te1_text_model_encoder_layers_0_mlp"),
    ({f"{QKV}.lora_down.weight": torch.ones(RANK, 32)}, "transformer_blocks.0.attn.to_q has down (4, 32) but no up"),
    (halves("double_blocks.0.img_attn.qkv", 96) | halves(f"{T0}.attn.to_k"), "two keys give the"),
    ({f"{PROJ}.lokr_w1": torch.ones(4, 4)}, "lokr_w1"),
    (halves(QKV.replace("0", "7"), 96), "transformer_blocks.7.attn.to_q"),
    (halves(QKV, 192), "(64, 32)"),
    (halves(f"{T0}.img_mlp.net.2", 32, 128), "is for Qwen-Image, the base"),
    (halves("diffusion_model.blocks.0.self_attn.q"), "is for Wan, the base"),
]


@pytest.mark.parametrize("state, message", REFUSED, ids=[message for _, message in REFUSED])
def test_loras_that_are_refused_by_name(folder_of, state, message, tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file(state, path)
    text = refuse(merge, tmp_path / "merged", "--base", folder_of("FLUX.1"), "--lora", path)
    assert message in text and "lora.safetensors" in text
    if message not in [other for _, other in REFUSED[-4:]]:
        with pytest.raises(shards.InputError) as error:
            lora_files.read_lora(path)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("double_blocks.0.img_attn.qkv.weight", "original names"),
        ("transformer_blocks.0.attn.magic.weight", "attn.magic.weight has no place in FLUX.1"),
        ("x_embedder.scale_weight", "quantised"),
        (None, "are not those of a Wan transformer"),
    ],
)
def test_bases_that_are_refused_by_name(folder_of, name, message, tmp_path):
    base, path = write(folder_of, "FLUX.1", "kohya", tmp_path / "lora.safetensors"), tmp_path / "base.safetensors"
    state = {f"layer.{i}": torch.ones(1) for i in range(3)} if name is None else base | {name: torch.ones(1)}
    save_file(state, path)
    out = tmp_path / "out.safetensors"
    text = refuse(merge, out, "--base", path, "--lora", tmp_path / "lora.safetensors")
    assert message in text and "base.safetensors" in text


def test_an_image_model_has_no_experts(folder_of, tmp_path):
    path, base, out = tmp_path / "my_low_noise.safetensors", folder_of("FLUX.1") / "transformer", tmp_path / "out"
    write(folder_of, "FLUX.1", "kohya", path)
    for lora, options, message in (
        (f"{path}@high", [], "FLUX.1 have no experts"),
        (path, ["--expert", "low"], "leave --expert away"),
        (path, ["--rename", "comfy"], "knows the names of Wan only"),
    ):
        assert message in refuse(merge, out, "--base", base, "--lora", lora, *options)
    assert "for FLUX.1\n" in merge("--base", base, "--lora", path, "--out", out)  # though the file's name says low
    convert("--lora", path, "--to", "diffusers", "--out", tmp_path / "converted")
    assert [each.name for each in (tmp_path / "converted").iterdir() if each.is_dir()] == ["transformer"]
