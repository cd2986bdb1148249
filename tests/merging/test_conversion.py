"""tools/convert_lora.py: what it writes loads where it says, and means the same."""

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from lora_dialects import ALPHA, DIALECTS, RANK, SCALE, products
from merging_world import convert, refuse
from pipelines import LAYERS, random_pipeline, save_adapter
from safetensors.torch import load_file, save_file

from rewardfl import lora
from rewardfl.weights import shards, wan_names

pytest_plugins = "merging_world"


@pytest.mark.parametrize("to", ("comfy", "diffusers"))
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_to_both_formats(values, dialect, to, tmp_path):
    source, out = DIALECTS[dialect](tmp_path, values), tmp_path / "out.safetensors"
    convert("--lora", source, "--to", to, "--out", out, "--verify")
    written = products(out)
    assert written.keys() == values.keys()
    for name, (down, up) in values.items():
        torch.testing.assert_close(written[name], SCALE * up @ down)


def comfy_loads(expert):
    """Return the LoRA keys that comfy/lora.py loads for Wan: its tensors' names, without the end .weight."""
    keys = set()
    for name in (f"diffusion_model.{wan_names.to_original(name)}" for name in expert.state_dict()):
        ends = [".diff", ".lora_down.weight", ".lora_up.weight", ".alpha", ".dora_scale"]
        ends += [".diff_b"] if name.endswith(".weight") else []
        keys |= {name.removesuffix(".weight") + end for end in ends}
    return keys


def test_comfy_keys_are_what_comfy_reads(values, tmp_path):
    source = load_file(DIALECTS["d5"](tmp_path, values)) | {
        "diffusion_model.blocks.0.norm3.diff": torch.rand(24),
        "diffusion_model.blocks.1.diff_m": torch.rand(1, 6, 24),
        "diffusion_model.head.diff_m": torch.rand(1, 2, 24),
        "diffusion_model.blocks.1.self_attn.q.diff_b": torch.rand(24),
        "diffusion_model.blocks.0.self_attn.q.lora_magnitude_vector": torch.rand(24),
        "diffusion_model.blocks.0.self_attn.q.lora_B.bias": torch.rand(24),
    }
    save_file(source, tmp_path / "all.safetensors")
    convert("--lora", tmp_path / "all.safetensors", "--to", "comfy", "--out", tmp_path / "out.safetensors", "--verify")
    state = load_file(tmp_path / "out.safetensors")
    assert state.keys() <= comfy_loads(random_pipeline().transformer_2) and len(state) == 3 * len(values) + 6
    for table in ("blocks.1", "head"):
        stem = f"diffusion_model.{table}"
        assert torch.equal(state[f"{stem}.modulation.diff"], source[f"{stem}.diff_m"])
    assert all(float(value) == RANK for name, value in state.items() if name.endswith(".alpha"))
    stem = "diffusion_model.blocks.0.self_attn.q"
    down, up = values["blocks.0.attn1.to_q"]
    torch.testing.assert_close(state[f"{stem}.lora_up.weight"] @ state[f"{stem}.lora_down.weight"], SCALE * up @ down)
    assert state[f"{stem}.dora_scale"].shape == (24, 1)
    torch.testing.assert_close(state[f"{stem}.diff_b"], SCALE * source[f"{stem}.lora_B.bias"])
    out = tmp_path / "new.safetensors"
    assert "--to comfy" in refuse(convert, out, "--lora", tmp_path / "all.safetensors", "--to", "diffusers")


@pytest.mark.parametrize("to", ("comfy", "diffusers"))
def test_our_checkpoint_loads_in_diffusers_again(tmp_path, to):
    pipe, plain = random_pipeline(), random_pipeline()
    checkpoint, out = tmp_path / "step-000001", tmp_path / "face"
    for part, seed in (("transformer", 1), ("transformer_2", 2)):
        lora.inject(pipe.components[part], RANK, ALPHA, LAYERS, seed)
        generator = torch.Generator().manual_seed(seed)
        for parameter in pipe.components[part].parameters():
            if parameter.requires_grad:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        save_adapter(pipe.components[part], checkpoint / part)
    convert("--lora", checkpoint, "--to", to, "--out", out, "--verify")
    high, low = {
        "comfy": ("face_high_noise.safetensors", "face_low_noise.safetensors"),
        "diffusers": (f"transformer/{lora.WEIGHTS_NAME}", f"transformer_2/{lora.WEIGHTS_NAME}"),
    }[to]
    plain.load_lora_weights(str(out / high))
    plain.load_lora_weights(str(out / low), load_into_transformer_2=True)
    assert isinstance(plain, WanImageToVideoPipeline) and isinstance(plain.transformer, WanTransformer3DModel)
    x = torch.randn(1, 34, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    text = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    for part in ("transformer", "transformer_2"):
        with torch.no_grad():
            expected = pipe.components[part](x, torch.tensor([500.0]), text, return_dict=False)[0]
            actual = plain.components[part](x, torch.tensor([500.0]), text, return_dict=False)[0]
        assert (actual - expected).abs().max() <= 2e-6
    if to == "diffusers":
        (exported,) = lora.read_lora(out / low)
        assert exported.alpha_source.startswith("the configuration")
        assert {update.scale for update in exported.updates.values()} == {1.0}


@pytest.mark.parametrize("to", ("comfy", "diffusers"))
def test_ranks_that_differ_keep_their_scale(values, tmp_path, to):
    """Most layers have the rank of peft's configuration, one has a pattern."""
    state, out = load_file(DIALECTS["d5"](tmp_path, values)), tmp_path / "out.safetensors"
    stem, (down, up) = "diffusion_model.blocks.0.self_attn.q", values["blocks.0.attn1.to_q"]
    state |= {f"{stem}.lora_down.weight": down[:2].clone(), f"{stem}.lora_up.weight": up[:, :2].clone()}
    save_file(state, tmp_path / "low.safetensors")
    convert("--lora", tmp_path / "low.safetensors", "--to", to, "--out", out, "--verify")
    torch.testing.assert_close(products(out)["blocks.0.attn1.to_q"], ALPHA / 2 * up[:, :2] @ down[:2])


@pytest.mark.parametrize("shape", ((-1, 1), (1, -1)))
def test_a_magnitude_keeps_its_axis(values, tmp_path, shape):
    """On a square layer only the shape says which; peft has none of the inputs."""
    down, up = values["blocks.0.attn1.to_q"]
    stem = "diffusion_model.blocks.0.self_attn.q"
    magnitude = torch.rand(24).reshape(shape)
    state = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.dora_scale": magnitude}
    save_file(state, tmp_path / "low.safetensors")
    lora = ["--lora", tmp_path / "low.safetensors"]
    text = convert(*lora, "--to", "comfy", "--out", tmp_path / "comfy.safetensors", "--verify")
    # for outputs, ComfyUI computes another thing
    assert ("note: blocks.0.attn1.to_q is a DoRA of the outputs" in text) == (shape == (-1, 1))
    assert torch.equal(load_file(tmp_path / "comfy.safetensors")[f"{stem}.dora_scale"], magnitude)
    out = tmp_path / "diffusers.safetensors"
    if shape == (1, -1):
        assert "blocks.0.attn1.to_q is of the inputs" in refuse(convert, out, *lora, "--to", "diffusers")
    else:
        convert(*lora, "--to", "diffusers", "--out", out, "--verify")
        (stored,) = (value for key, value in load_file(out).items() if "magnitude" in key)
        assert torch.equal(stored, magnitude.flatten())


def test_a_convolution_with_a_magnitude_loads_in_diffusers(tmp_path):
    """peft's own merge of what we write is the DoRA of the convolution."""
    model = random_pipeline().transformer_2
    base = model.patch_embedding.weight.data.clone()
    down, up = 0.1 * torch.randn(2, *base.shape[1:]), torch.randn(len(base), 2, 1, 1, 1)
    magnitude = (1 + torch.rand(len(base), 1, 1, 1, 1)) * base.square().sum((1, 2, 3, 4), keepdim=True).sqrt()
    state = {"lora_A.weight": down, "lora_B.weight": up, "dora_scale": magnitude}
    save_file({f"patch_embedding.{key}": value for key, value in state.items()}, tmp_path / "low.safetensors")
    for to, shape in (("comfy", (24, 1, 1, 1, 1)), ("diffusers", (1, 24, 1, 1, 1))):
        out = tmp_path / f"{to}.safetensors"
        convert("--lora", tmp_path / "low.safetensors", "--to", to, "--out", out, "--verify")
        (stored,) = (value for key, value in load_file(out).items() if "magnitude" in key or "dora_scale" in key)
        assert stored.shape == shape
    model.load_lora_adapter(load_file(out), prefix="transformer")
    model.fuse_lora()
    moved = base + torch.einsum("or,rcthw->octhw", up.flatten(1), down)
    expected = magnitude * moved / moved.square().sum((1, 2, 3, 4), keepdim=True).sqrt()
    torch.testing.assert_close(model.patch_embedding.base_layer.weight, expected, rtol=1e-5, atol=1e-6)


def test_dtype_and_overflow(values, tmp_path):
    source = DIALECTS["d5"](tmp_path, values)
    convert("--lora", source, "--to", "comfy", "--out", tmp_path / "half.safetensors", "--dtype", "bf16", "--verify")
    assert {e.dtype for e in shards.read_header(tmp_path / "half.safetensors")[0].values()} == {"BF16"}
    huge = DIALECTS["d5"](tmp_path, {name: (down, 1e12 * up) for name, (down, up) in values.items()})
    out = tmp_path / "out.safetensors"
    assert "use --dtype fp32" in refuse(convert, out, "--lora", huge, "--to", "comfy", "--dtype", "fp16")


@pytest.mark.parametrize("to", ("comfy", "diffusers"))
@pytest.mark.parametrize("size", (1, 2e-5, 2e-8))
@pytest.mark.parametrize("dtype, tolerance", [("fp16", 2e-3), ("bf16", 8e-3)])
def test_a_small_update_arrives(values, tmp_path, to, size, dtype, tolerance):
    """fp16 has no numbers below 6e-8: the factors share their size. alpha 1 at a rank of 64 brings more of it."""
    small = {name: (down, size * up) for name, (down, up) in values.items()}
    source, out = DIALECTS["d10"](tmp_path, small), tmp_path / "out.safetensors"
    text = convert("--lora", source, "--to", to, "--out", out, "--dtype", dtype, "--verify")
    for name, (down, up) in small.items():
        expected = SCALE * up.double() @ down.double()
        assert (products(out)[name].double() - expected).norm() < tolerance * expected.norm()
    assert "WARNING" not in text


def test_a_loss_that_cannot_be_avoided_is_warned_of(tmp_path):
    """A difference has no factors."""
    save_file({"blocks.0.norm2.diff": 3e-8 * torch.randn(24)}, tmp_path / "low.safetensors")
    for dtype, is_lost in (("fp16", True), ("bf16", False)):
        out = tmp_path / f"{dtype}.safetensors"
        text = convert("--lora", tmp_path / "low.safetensors", "--to", "comfy", "--out", out, "--dtype", dtype)
        assert ("loses part of diffusion_model.blocks.0.norm3.diff; use --dtype fp32" in text) == is_lost


def test_one_file_per_expert(values, tmp_path):
    source, both = DIALECTS["d5"](tmp_path, values), tmp_path / "both"
    for part in ("transformer", "transformer_2"):
        (both / part).mkdir(parents=True)
        DIALECTS["d1"](both / part, values)
    assert "which expert" in refuse(convert, tmp_path / "folder", "--lora", source, "--to", "comfy")
    assert "both experts" in refuse(convert, tmp_path / "a.safetensors", "--lora", both, "--to", "comfy")
    convert("--lora", both, "--to", "comfy", "--out", tmp_path / "folder")
    names = ["folder_high_noise.safetensors", "folder_low_noise.safetensors"]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == names
