"""Loaders against diffusers' own, on files in the published layouts; the network is walled off throughout."""

import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import wan_files
from conftest import ROOT
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from huggingface_hub import constants
from PIL import Image
from pipelines import I2V, latent_shape, random_variant
from safetensors.torch import load_file, save_file
from test_backbone import picture, stock
from transformers import CLIPVisionModel

from benchmarks import load as load_benchmark
from rewardfl import backbones, data, lora
from rewardfl.backbones.protocol import Source
from rewardfl.backbones.stock import new_on_meta, read_config
from rewardfl.backbones.wan import files as files_module
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan import variants
from rewardfl.backbones.wan.variants import TWO_EXPERTS, VARIANTS
from rewardfl.noise import draw_noise
from rewardfl.weights.shards import InputError
from rewardfl_tools import generate

pytestmark = pytest.mark.slow(100)

MODULES = ("transformer", "transformer_2", "vae", "text_encoder")
DTYPES = [torch.float32, torch.bfloat16]
HUB = ",".join(f"{wan_files.REPOSITORY}:{pattern}" for pattern in (
    "high_noise_model/diffusion_pytorch_model*.safetensors", "low_noise_model/diffusion_pytorch_model*.safetensors",
    "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth",
))  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """The hub's own offline switch is off, so that only the code under test keeps it from being asked."""

    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


class Files:
    """The small model, and where it lies in each layout."""

    def __init__(self, root: Path):
        self.pipe = wan_files.small_pipeline()
        self.fp32 = wan_files.write_diffusers(self.pipe, root / "fp32", torch.float32)
        self.bf16 = wan_files.write_diffusers(self.pipe, root / "bf16", torch.bfloat16)
        self.original = wan_files.write_original(self.pipe, root / "original")
        self.configs = wan_files.write_configs(self.pipe, root / "configs")
        self.lightning = {
            expert: wan_files.lightning(self.pipe.components[part], seed)
            for seed, (expert, part) in enumerate(TWO_EXPERTS.items())
        }
        self.loras = {
            expert: str(wan_files.write_lightning(values, root / "Lightning" / f"{expert}_model.safetensors"))
            for expert, values in self.lightning.items()
        }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("wan"))


@pytest.fixture
def write_paths(files, tmp_path):
    """Writes a wan22_paths.json, with the named parts changed, and gives its path."""

    def write(**changed):
        path = tmp_path / "wan22_paths.json"
        path.write_text(json.dumps(wan_files.paths(files.original, files.configs, changed)))
        return str(path)

    return write


def everything(module):
    """Parameters and buffers, those that no file holds too."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def assert_same_modules(actual, expected, modules=MODULES):
    for name in modules:
        actual_values, expected_values = everything(actual.components[name]), everything(expected.components[name])
        assert actual_values.keys() == expected_values.keys(), name
        for key in expected_values:
            assert actual_values[key].dtype == expected_values[key].dtype, (name, key)
            assert torch.equal(actual_values[key], expected_values[key]), (name, key)
        assert set(actual.components[name].state_dict()) == set(expected.components[name].state_dict())
        assert not any(parameter.requires_grad for parameter in actual_values.values())
        assert not actual.components[name].training


def from_pretrained(folder, dtype):
    return WanImageToVideoPipeline.from_pretrained(folder, torch_dtype=dtype)


def load_layout(layout, dtype, **arguments):
    return wan_load.load_pipeline(layout, files_module.open_experts(layout), dtype, **arguments)


def find(variant=I2V, **paths):
    return files_module.find_files(variant, Source(**paths))


def load(model, dtype, variant=I2V, **arguments):
    return load_layout(find(variant, model_paths=str(model)), dtype, **arguments)


# -- layouts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_diffusers_folder_equals_from_pretrained(files, stored, dtype):
    folder = getattr(files, stored)
    loaded = load(folder, dtype)
    assert_same_modules(loaded, from_pretrained(folder, dtype))
    assert loaded.config.boundary_ratio == 0.9
    islands = {name for name, value in loaded.transformer.named_parameters() if value.dtype == torch.float32}
    assert {"scale_shift_table", "blocks.0.norm2.weight", "blocks.1.scale_shift_table"} <= islands
    assert ("blocks.0.attn1.to_q.weight" in islands) == (dtype == torch.float32)


def one_file(files, folder):
    """Each expert as a single file with original names, behind ComfyUI's prefix."""
    names = {}
    for name in ("high_noise_model", "low_noise_model"):
        state = {}
        for file in sorted((files.original / name).glob("*.safetensors")):
            state |= {f"model.diffusion_model.{key}": value for key, value in load_file(file).items()}
        names[name] = f"wan2.2_i2v_{name.removesuffix('_model')}_14B.safetensors"  # relative to the json file
        save_file(state, folder / names[name])
    return names


FORMS = {
    "folders": lambda files, folder: {},
    "shards": lambda files, folder: {
        name: [str(file) for file in sorted((files.original / name).glob("*.safetensors"))]
        for name in ("high_noise_model", "low_noise_model")
    },
    "comfy": one_file,
    "diffusers names": lambda files, folder: {
        "high_noise_model": str(files.fp32 / "transformer"), "low_noise_model": str(files.fp32 / "transformer_2"),
        "text_encoder": str(files.fp32 / "text_encoder"), "vae": str(files.fp32 / "vae"),
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_original_files_equal_from_pretrained(files, write_paths, tmp_path, form):
    model = write_paths(**FORMS[form](files, tmp_path))
    for dtype in DTYPES if form == "folders" else DTYPES[1:]:
        loaded = load(model, dtype)
        assert_same_modules(loaded, from_pretrained(files.fp32, dtype))
    assert loaded.tokenizer("a person").input_ids == files.pipe.tokenizer("a person").input_ids


@pytest.fixture
def hub(files, monkeypatch):
    """The original files in the hub's cache, with the published configurations, here small."""
    monkeypatch.setattr(files_module, "published", lambda _: files.configs)
    monkeypatch.setattr(files_module, "snapshot_download", lambda repository, **_: str(files.original))


@pytest.mark.parametrize("form", ["list", "hub"])
def test_published_configurations_are_those_of_a_list_and_of_the_hub(files, hub, tmp_path, form):
    """A list is in the order high, low, text encoder, VAE."""
    entries = wan_files.paths(files.original, files.configs) | FORMS["shards"](files, tmp_path)
    (tmp_path / "list.json").write_text(json.dumps([entries[key] for key in I2V.original_parts]))
    paths = {"origin_paths": HUB} if form == "hub" else {"model_paths": str(tmp_path / "list.json")}
    layout = find(**paths, tokenizer_path=entries["tokenizer"])
    assert layout.tokenizer == Path(entries["tokenizer"])
    assert_same_modules(load_layout(layout, torch.bfloat16), from_pretrained(files.fp32, torch.bfloat16))
    assert form == "list" or find(**paths).tokenizer.name == "umt5-xxl"


def test_published_configurations_are_the_real_models():
    """By name and size; every figure is from the model's card and diffusers' conversion script."""
    config = read_config(files_module.published(I2V), "transformer_2")
    with torch.device("meta"):
        expert = WanTransformer3DModel.from_config(config)
        vae = AutoencoderKLWan.from_config(read_config(files_module.published(I2V), "vae"))
    assert sum(parameter.numel() for parameter in expert.parameters()) == 14_288_901_184
    assert len(expert.state_dict()) == 1095
    assert set(wan_files.original_expert(wan.empty_expert(config))) == set(wan_files.original_expert_names(40))
    assert set(wan_files.original_vae(vae)) == set(wan_files.original_vae_names())
    assert sum(parameter.numel() for parameter in vae.parameters()) == 126_892_531


# -- the hub


def test_files_come_from_the_local_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="not in the local hub cache; fetch it by `hf download"):
        find(origin_paths=HUB)


PATHS_FILES = {  # content of a wan22_paths.json: message
    "{": "is not JSON",
    '["a", "b"]': "no text_encoder; no vae; Wan2.2-I2V-A14B takes high_noise_model, low_noise_model",
    '["a", "b", "c", "d", "e"]': "takes high_noise_model, .*, vae, as an object .* or as a list in this order",
    # its keys are those that are taken; of its paths, the first is the first to be missed
    (ROOT / "examples" / "wan22_paths.json").read_text():
        "high_noise_model: .*Wan2.2-I2V-A14B/high_noise_model does not exist",
}  # fmt: skip
HUB_PATHS = {
    "high_noise_model/*.safetensors": "must be owner/repository:pattern",
    f"{wan_files.REPOSITORY}:weights.pth": "with one of high_noise, low_noise, t5, vae in the pattern, each once",
    f"{wan_files.REPOSITORY}:Wan2.1_VAE.pth": "names no high_noise_model, low_noise_model, text_encoder",
    HUB.replace("Wan2.1_VAE.pth", "*vae*"): "matches 0 files",
}


@pytest.mark.parametrize("content, message", [*PATHS_FILES.items(), *HUB_PATHS.items()])
def test_names_of_files_are_refused(hub, tmp_path, content, message):
    (tmp_path / "wan22_paths.json").write_text(content)
    paths = {"origin_paths": content} if content in HUB_PATHS else {"model_paths": str(tmp_path / "wan22_paths.json")}
    with pytest.raises(InputError, match=message):
        find(**paths)


# -- distillation


@pytest.fixture
def distilled(files):
    return wan_load.read_distilled(I2V.experts, files.loras["high_noise"], files.loras["low_noise"])


def test_fused_distillation_is_exact(files, write_paths, distilled):
    """base + alpha/r up @ down, rounded once: within half a spacing of float64's. Rounding first is not."""
    for dtype, slack in ((torch.float32, 1.0), (torch.bfloat16, 1e-3)):
        fused, base = load(write_paths(), dtype, distilled=distilled), files.pipe
        twice = 0
        for expert, part in TWO_EXPERTS.items():
            values = files.lightning[expert]
            for name, value in fused.components[part].named_parameters():
                module = name.removesuffix(".weight")
                original = base.components[part].get_parameter(name)
                if module not in values or not name.endswith(".weight"):
                    assert torch.equal(value, original.to(value.dtype)), name
                    continue
                down, up, alpha = values[module]
                exact = original.double() + alpha / wan_files.RANK * up.double() @ down.double()
                half = torch.finfo(dtype).eps / 2 * torch.exp2(exact.abs().log2().floor())
                assert ((value.double() - exact).abs() <= (1 + slack) * half + 1e-7).all(), name
                early = original.to(dtype) + (alpha / wan_files.RANK * up @ down).to(dtype)
                twice += int(((early.double() - exact).abs() > (1 + slack) * half + 1e-7).sum())
        assert dtype == torch.float32 or twice > 100


def velocity(model, sigma=0.5):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 36, 3, 4, 4, generator=generator).to(model.dtype)
    text = torch.randn(1, 6, 32, generator=generator).to(model.dtype)
    return model(x, torch.tensor([1000 * sigma]), text, return_dict=False)[0]


def test_adapter_is_the_fused_model_in_policy_and_reference(files, write_paths, distilled):
    fused = load(write_paths(), torch.float32, distilled=distilled)
    pipe = load(write_paths(), torch.float32, distilled=distilled, distill_mode="adapter")
    plain = load(write_paths(), torch.float32)
    for part in TWO_EXPERTS.values():
        model = pipe.components[part]
        base = velocity(model).detach()
        torch.testing.assert_close(base, velocity(fused.components[part]), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base, velocity(plain.components[part]), atol=1e-2)

        lora.inject(model, 3, 6.0, lora.target_modules("q,k,ffn.0", variants.LAYERS), seed=0)
        assert torch.equal(velocity(model), base)  # the policy starts at zero, the distillation stays on
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        policy = velocity(model).detach()
        assert not torch.allclose(policy, base, atol=1e-3)
        with lora.reference(model):
            assert torch.equal(velocity(model), base)


def test_adapter_stays_float32_on_a_bfloat16_base(files, write_paths, distilled):
    expert = load(write_paths(), torch.bfloat16, distilled=distilled, distill_mode="adapter").transformer
    for name, (down, _, alpha) in files.lightning["high_noise"].items():
        layer = expert.get_submodule(name)
        assert layer.scaling["distilled"] == alpha / wan_files.RANK
        assert torch.equal(layer.lora_A["distilled"].weight, down)  # float32
    assert velocity(expert).dtype == torch.bfloat16


def test_distillations_that_do_not_fit_are_refused(files, write_paths, tmp_path):
    high, low = files.loras["high_noise"], files.loras["low_noise"]
    with pytest.raises(InputError, match="have each other's names; swap or"):
        wan_load.read_distilled(I2V.experts, low, high)
    (lora,) = wan_load.read_distilled(I2V.experts, "", high)  # the key outranks the name of a file
    assert lora.expert == "low_noise"
    values = {"blocks.0.attn1.to_q": (torch.ones(4, 20), torch.ones(20, 4), 4.0)}
    odd = str(wan_files.write_lightning(values, tmp_path / "high_noise.safetensors"))
    with pytest.raises(InputError, match="to_q"):
        load(write_paths(), torch.float32, distilled=wan_load.read_distilled(I2V.experts, odd, ""))
    save_file(load_file(low) | {"diffusion_model.blocks.0.norm3.diff_b": torch.zeros(24)}, tmp_path / "low.safetensors")
    with pytest.raises(InputError, match="more than a low-rank update .* set model.distill_lora.mode: fuse"):
        odd = wan_load.read_distilled(I2V.experts, "", str(tmp_path / "low.safetensors"))
        load(write_paths(), torch.float32, distilled=odd, distill_mode="adapter")


# -- refusals


def edit_json(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def network(**changed):
    """Changes a folder's configuration of the high-noise expert."""
    return lambda folder: edit_json(folder / "transformer" / "config.json", **changed)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def same_experts(folder):
    shutil.rmtree(folder / "transformer_2")
    shutil.copytree(folder / "transformer", folder / "transformer_2")


def make_ti2v(folder):
    edit_json(folder / "model_index.json", expand_timesteps=True, transformer_2=[None, None])
    edit_json(folder / "transformer" / "config.json", in_channels=16)
    shutil.rmtree(folder / "transformer_2")


DAMAGED = {
    "truncated shard": (lambda d: cut(first_shard(d / "transformer_2")), "transformer_2/.* is cut off"),
    "same expert twice": (same_experts, "are the same weights; Wan2.2 has a high-noise and a low-noise expert"),
    "no tokenizer": (lambda d: shutil.rmtree(d / "tokenizer"), "tokenizer has no tokenizer.json or spiece.model"),
    "pointer as tokenizer": (lambda d: pointer(d / "tokenizer" / "tokenizer.json"), "tokenizer.json is a Git LFS"),
    "no config": (lambda d: (d / "transformer" / "config.json").unlink(), "transformer/config.json is missing"),
    "no boundary": (
        lambda d: edit_json(d / "model_index.json", boundary_ratio=None), "has no boundary_ratio between its two"
    ),
    "TI2V-5B": (make_ti2v, "is Wan2.2-TI2V-5B; set .*: wan2_2_ti2v"),
    "T2V": (network(in_channels=16), "is Wan2.2-T2V-A14B; set model.model_name: wan2_2_t2v"),
    "another family": (network(_class_name="SD3Transformer2DModel", in_channels=16), "is another model; give the"),
    "surplus tensor": (network(num_layers=1), "has a surplus blocks.1"),
    "other size": (network(ffn_dim=40), r"ffn.net.0.* is \(32.*, that of .* is \(40"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_or_other_folder_is_refused(files, tmp_path, damage):
    """From headers, before any weight is read."""
    change, message = DAMAGED[damage]
    folder = shutil.copytree(files.fp32, tmp_path / "model")
    change(folder)
    with pytest.raises(InputError, match=message):
        backbones.open("wan2_2", Source(model_paths=str(folder)))


@pytest.mark.parametrize("part, file", [("vae", "diffusion_pytorch_model"), ("text_encoder", "model")])
def test_a_text_encoder_or_vae_without_a_tensor_is_refused(files, tmp_path, part, file):
    """The libraries would fill in random numbers."""
    folder = shutil.copytree(files.fp32, tmp_path / part)
    for path in (folder / part).glob("*.safetensors*"):
        path.unlink()
    *others, (name, _) = files.pipe.components[part].state_dict().items()
    save_file({key: value.clone() for key, value in others}, folder / part / f"{file}.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"lacks {name}"):
        load(folder, torch.float32)


def as_original_files(name, folder):
    """(a model of one expert, the json that names its parts in the original layout)."""
    pipe = random_variant(name)
    pipe.save_pretrained(folder / "pipeline")
    state = convert_wan_transformer_to_diffusers({old: old for old in expert_names(pipe.transformer.config)})
    expected = pipe.transformer.state_dict()
    assert state.keys() == expected.keys()
    parts = {"text_encoder": "pipeline/text_encoder", "tokenizer": "pipeline/tokenizer", "configs": "pipeline"}
    wan_files.write_shards({old: expected[new].clone() for new, old in state.items()}, folder / "expert")
    if name == "wan2_1_i2v":
        encoder = wan_files.original_image_encoder(pipe.image_encoder)
        torch.save(encoder, folder / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")
        parts |= {"image_encoder": "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth", "vae": "pipeline/vae"}
    else:
        torch.save(wan_files.original_residual_vae(pipe.vae), folder / "Wan2.2_VAE.pth")
        parts |= {"vae": "Wan2.2_VAE.pth"}
    (folder / "paths.json").write_text(json.dumps(parts | {"transformer": "expert"}))
    return pipe, folder / "paths.json"


def expert_names(config):
    names = wan_files.original_expert_names(config.num_layers)
    if config.image_dim is None:
        return names
    for i in range(config.num_layers):
        stem = f"blocks.{i}.cross_attn"
        names += wan_files.with_leaves([f"{stem}.k_img", f"{stem}.v_img"], ("weight", "bias"))
        names += [f"{stem}.norm_k_img.weight"]
    return names + wan_files.with_leaves([f"img_emb.proj.{i}" for i in (0, 1, 3, 4)], ("weight", "bias"))


@pytest.mark.parametrize("name", ["wan2_2_ti2v", "wan2_1_i2v"])
def test_original_files_of_models_with_parts_of_their_own(tmp_path, name):
    """TI2V-5B's residual VAE, and Wan2.1-I2V's CLIP: every tensor in its place, and what CLIP sees the same."""
    stock, paths = as_original_files(name, tmp_path)
    pipe = load(paths, torch.float32, VARIANTS[name])
    for part in ("transformer", "vae", *(["image_encoder"] if name == "wan2_1_i2v" else [])):
        ours, expected = pipe.components[part].state_dict(), stock.components[part].state_dict()
        assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours), part
    if name == "wan2_1_i2v":
        picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
        assert torch.equal(pipe.encode_image(picture, "cpu"), stock.encode_image(picture, "cpu"))
        (tmp_path / "paths.json").write_text(json.dumps(json.loads(paths.read_text()) | {"image_encoder": ""}))
        with pytest.raises(
            InputError, match="no image_encoder; Wan2.1-I2V-14B takes transformer, text_encoder, vae, image"
        ):
            find(VARIANTS[name], model_paths=str(paths))
    else:
        state = torch.load(tmp_path / "Wan2.2_VAE.pth", weights_only=True)
        gone = "encoder.downsamples.0.downsamples.0.residual.2.weight"
        torch.save({key: value for key, value in state.items() if key != gone}, tmp_path / "Wan2.2_VAE.pth")
        with pytest.raises(InputError, match="lacks encoder.down_blocks.0.resnets.0.conv1.weight"):
            load(paths, torch.float32, VARIANTS[name])


def test_the_published_clip_has_the_tensors_of_its_file():
    """393 of them, as models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth holds without its text side."""
    config = read_config(files_module.published(VARIANTS["wan2_1_i2v"]), "image_encoder")
    original = wan_files.original_image_encoder(new_on_meta(CLIPVisionModel, config))
    assert len(original) == 393 and original["visual.pos_embedding"].shape == (1, 257, 1280)


def expert(folder, state):
    """Write the high-noise expert with these tensors; return its entry of the json file."""
    save_file(state, folder / "high_noise.safetensors")
    return {"high_noise_model": "high_noise.safetensors"}


FP8 = {
    "blocks.0.self_attn.q.weight": torch.zeros(24, 24).to(torch.float8_e4m3fn),
    "blocks.0.self_attn.q.scale_weight": torch.tensor(0.1),
}


ORIGINAL = {
    "no Wan model": (
        lambda f, d: expert(d, {"conv_in.weight": torch.zeros(4)}), "conv_in.weight are not those of a Wan transformer"
    ),
    "fp8": (
        lambda f, d: expert(d, wan_files.original_expert(f.pipe.transformer) | FP8),
        r"is quantised \(tensor .*\): it cannot be trained on as it is; give the fp32, fp16 or bf16 files",
    ),
    "swapped": (
        lambda f, d: {
            "high_noise_model": str(f.original / "low_noise_model"),
            "low_noise_model": str(f.original / "high_noise_model"),
        },
        "is given as the high_noise expert, its name says low_noise; swap the two",
    ),
    "missing": (lambda f, d: {"vae": "nowhere.pth"}, "vae: .*nowhere.pth does not exist"),
    "two VAEs": (lambda f, d: {"vae": [str(f.original / "Wan2.1_VAE.pth")] * 2}, "vae must be one path, it lists 2"),
    "unknown key": (lambda f, d: {"image_encoder": "x"}, "unknown key 'image_encoder'"),
    "no tokenizer": (lambda f, d: {"tokenizer": ""}, "tokenizer_path: is empty, and these original files come without"),
    "empty tokenizer": (lambda f, d: {"tokenizer": str(d)}, "has no tokenizer.json or spiece.model; give the folder"),
    "configs": (lambda f, d: {"configs": str(d)}, "config.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", ORIGINAL)
def test_other_original_files_are_refused(files, write_paths, tmp_path, case):
    change, message = ORIGINAL[case]
    with pytest.raises(InputError, match=message):
        backbones.open("wan2_2", Source(model_paths=write_paths(**change(files, tmp_path))))


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_a_bad_pickle_is_refused(files, write_paths, tmp_path, part):
    state = torch.load(wan_files.paths(files.original, files.configs)[part], weights_only=True)
    name = next(name for name in state if name.endswith(".weight"))
    torch.save(state | {name: torch.zeros(3)}, tmp_path / "bad.pth")
    with pytest.raises(InputError, match=rf"is \(3,\), that of the config.json of {part}"):
        load(write_paths(**{part: str(tmp_path / "bad.pth")}), torch.float32)


def test_forms_of_a_vae_file_that_may_change_once_it_is_loaded(files, write_paths, tmp_path):
    """Files are mapped while they are read."""
    expected = from_pretrained(files.fp32, torch.float32)
    state = wan_files.original_vae(files.pipe.vae)
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    shutil.copy(files.original / "Wan2.1_VAE.pth", tmp_path / "vae.pth")
    save_file(state, tmp_path / "vae.safetensors")
    save_file(files.pipe.vae.state_dict(), tmp_path / "diffusers.safetensors")
    for name in ("old.pth", "vae.pth", "vae.safetensors", "diffusers.safetensors"):
        loaded = load(write_paths(vae=name), torch.float32)
        with (tmp_path / name).open("r+b") as file:
            file.write(bytes((tmp_path / name).stat().st_size))
        assert_same_modules(loaded, expected, ("vae",))


def test_a_model_reports_its_boundary_and_distillation(files):
    """Latents that the first expert leaves in the cache depend on its distillation."""
    source = Source(model_paths=str(files.fp32), boundary=0.875, distilled=(files.loras["high_noise"], ""))
    backbone = backbones.open("wan2_2", source)
    assert backbone.differences(3.0, 1.0) == ["model.min_timestep_boundary is 0.875, the checkpoint says 0.9"]
    assert backbones.describe("wan2_2", Source(model_paths=str(files.fp32))).differences(5.0, 1.0) == []
    assert backbone.parts_of("high_noise") == ["high_noise", "distill_high", "fuse"]
    assert backbone.parts_of("low_noise") == ["low_noise"]


def test_files_without_configurations_have_the_published_ones(monkeypatch, tmp_path):
    folder, paths = ROOT / "assets" / "tiny_world" / "pipeline", tmp_path / "wan22_paths.json"
    for content, expected in (([], None), ({"configs": ""}, None), ({"configs": str(folder)}, folder)):
        paths.write_text(json.dumps(content))
        assert files_module.find_configs(I2V, str(paths)) == (expected or files_module.published(I2V))
    monkeypatch.chdir(folder)  # no path is not the folder that the command is started in
    assert files_module.find_configs(I2V, "") == files_module.published(I2V)


# -- use


def test_generate_from_original_files_with_guidance_and_distillation(files, write_paths, tmp_path, monkeypatch):
    """tools/generate.py against the stock pipeline with Lightning attached by diffusers itself."""
    _, image = picture()
    Image.fromarray(data.to_uint8(image[:, None])[0].numpy()).save(tmp_path / "face.png")
    videos = []
    monkeypatch.setattr(data, "encode_video", lambda video, fps: videos.append(video) or b"")
    command = f"generate.py --model {write_paths()} --image {tmp_path}/face.png --height 32 --width 32 --num-frames 5"
    command += " --steps 4"
    command += f" --seed 5 --dtype float32 --device cpu --out {tmp_path}/x.mp4 --guidance 3.5 --negative-prompt glasses"
    command += f" --distill-lora-high {files.loras['high_noise']} --distill-lora-low {files.loras['low_noise']}"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--prompt", "a person, talking"])
    assert generate.main() == 0

    pipe = from_pretrained(files.fp32, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(files.loras["high_noise"], adapter_name="high")
    pipe.load_lora_weights(files.loras["low_noise"], adapter_name="low", load_into_transformer_2=True)
    noise = draw_noise(latent_shape(pipe, 32, 32, 5), seed=5)
    arguments = {"negative_prompt": "glasses", "latents": noise, "output_type": "pt"}
    expected = stock(pipe, 4, prompt="a person, talking", guidance_scale=3.5, **arguments)[0].transpose(0, 1) * 2 - 1
    torch.testing.assert_close(videos[0], expected, rtol=0, atol=4e-3)  # half of a level of 8 bits


# -- memory


@pytest.mark.long
def test_host_memory_peaks_below_1_3_experts(tmp_path):
    """benchmarks/load.py on 0.46 GB of float32 files and a LoRA; what the libraries hold before is subtracted."""
    config, distilled = load_benchmark.write(tmp_path, layers=6, width=1024)
    figures = load_benchmark.in_own_process(config, tmp_path / "original", str(distilled))
    assert figures["expert_gb"] > 0.2
    assert 0.95 < figures["peak_over_expert"] < 1.3, figures
