"""tools/merge_lora.py: every layout and dialect merges to the same weights, and nothing half is left."""

import json
import shutil

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from lora_dialects import ALPHA, DIALECTS, RANK, SCALE, factors, weights
from merging_world import convert, join, merge, refuse
from safetensors.torch import load_file, save_file
from wan_files import original_expert

from rewardfl.files import sha256
from rewardfl.merging import lora_merge, writing
from rewardfl.weights import lora_files, shards
from rewardfl.weights import merge as weight_merge

pytest_plugins = "merging_world"
pytestmark = pytest.mark.slow(50)
Q, CONV = "blocks.0.attn1.to_q", "patch_embedding"


def expected_weights(before, values, strength=1.0):
    """Return base + strength * scale * up @ down, by plain torch."""
    after = dict(before)
    for name, (down, up) in values.items():
        after[f"{name}.weight"] = before[f"{name}.weight"] + strength * SCALE * (up @ down)
    return after


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_both_experts_in_one_file(pipeline, values, tmp_path):
    state, metadata = {}, {}
    down, up = values["blocks.0.attn1.to_q"]
    for component, factor in (("transformer", 1.0), ("transformer_2", 3.0)):
        state[f"{component}.blocks.0.attn1.to_q.lora_A.weight"] = down * factor
        state[f"{component}.blocks.0.attn1.to_q.lora_B.weight"] = up.clone()
        metadata |= {f"{component}.r": RANK, f"{component}.lora_alpha": ALPHA * factor}
    save_file(state, tmp_path / "both.safetensors", {"lora_adapter_metadata": json.dumps(metadata)})
    out = tmp_path / "out"
    merge("--base", pipeline, "--lora", tmp_path / "both.safetensors", "--out", out, "--verify")
    for component, factor in (("transformer", 1.0), ("transformer_2", 9.0)):
        name = "blocks.0.attn1.to_q.weight"
        delta = weights(out / component)[name] - weights(pipeline / component)[name]
        torch.testing.assert_close(delta, factor * SCALE * (up @ down), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ("original", "comfy", "index", "wan-ai"))
def test_every_layout_of_the_base(pipeline, expert, values, layout, tmp_path):
    base, lora, out = tmp_path / "base_low", DIALECTS["d5"](tmp_path, values), tmp_path / "out"
    prefix = "model.diffusion_model." if layout == "comfy" else ""
    original = {prefix + name: value for name, value in original_expert(expert).items()}
    if layout == "index":
        expert.save_pretrained(base, max_shard_size="60KB")
        assert len(list(base.glob("*.safetensors"))) > 2
        base = base / "diffusion_pytorch_model.safetensors.index.json"
    for folder in {"wan-ai": ("high_noise_model", "low_noise_model"), "index": ()}.get(layout, (".",)):
        (base / folder).mkdir(parents=True)
        save_file(original, base / folder / "wan.safetensors")
    merge("--base", base, "--lora", f"{lora}@low" if layout == "wan-ai" else lora, "--out", out, "--verify")
    merged = weights(out / "low_noise_model" if layout == "wan-ai" else out)
    if layout != "index":
        assert merged.keys() == original.keys()
        merged = convert_wan_transformer_to_diffusers(merged)
    assert_same(merged, expected_weights(expert.state_dict(), values))
    if layout == "wan-ai":
        assert_same(weights(out / "high_noise_model"), original)


def test_several_loras_and_strengths(pipeline, expert, values, tmp_path):
    first = DIALECTS["d5"](tmp_path, values)
    second = factors(expert, 1)
    (tmp_path / "second").mkdir()
    other = DIALECTS["d10"](tmp_path / "second", second)
    out = tmp_path / "out.safetensors"
    base = pipeline / "transformer_2"
    merge("--base", base, "--lora", f"{first}:0.5", "--lora", f"{other}@low:-1.25e0", "--out", out, "--verify")
    expected = expected_weights(expected_weights(expert.state_dict(), values, 0.5), second, -1.25)
    assert_same(load_file(out), expected)


def test_full_differences_bias_modulation_norm_and_convolution(pipeline, expert, tmp_path):
    """.diff, .diff_b, diff_m and a LoRA on the 3-D convolution, as LightX2V and Lightning files have them."""
    model = expert.state_dict()
    g = torch.Generator().manual_seed(0)

    conv = model["patch_embedding.weight"]
    down, up = torch.randn(2, *conv.shape[1:], generator=g), torch.randn(conv.shape[0], 2, 1, 1, 1, generator=g)
    targets = {
        "blocks.0.norm3.diff": "blocks.0.norm2.weight",
        "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
        "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "blocks.1.diff_m": "blocks.1.scale_shift_table",
        "blocks.1.self_attn.q.diff_b": "blocks.1.attn1.to_q.bias",
        "head.head.diff": "proj_out.weight",
    }
    state = {key: torch.randn(model[target].shape, generator=g) for key, target in targets.items()}
    expected = dict(model) | {target: model[target] + 0.5 * state[key] for key, target in targets.items()}
    factors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0)}
    state |= {f"patch_embedding.{key}": value for key, value in factors.items()}
    save_file({f"diffusion_model.{key}": value for key, value in state.items()}, tmp_path / "low_diff.safetensors")
    lora = f"{tmp_path / 'low_diff.safetensors'}:0.5"
    merge("--base", pipeline / "transformer_2", "--lora", lora, "--out", tmp_path / "out.safetensors", "--verify")
    product = torch.einsum("or,rcthw->octhw", up.flatten(1), down)
    expected["patch_embedding.weight"] = conv + 0.5 * 0.5 * product
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def lengths(values, axis):
    """Return |values| per output (axis 0) or per input (axis 1), in the number of dimensions that `values` has."""
    return values.square().sum([i for i in range(values.ndim) if i != axis], keepdim=True).sqrt()


@pytest.mark.parametrize(
    "name, ending, axis, shape",
    [
        (Q, "lora_magnitude_vector", 0, (-1,)), (Q, "lora_magnitude_vector.default.weight", 0, (-1,)),
        (Q, "lora_magnitude_vector", 0, (-1, 1)), (Q, "dora_scale", 0, (-1, 1)), (Q, "dora_scale", 1, (1, -1)),
        (CONV, "dora_scale", 0, (-1, 1, 1, 1, 1)), (CONV, "dora_scale", 1, (1, -1, 1, 1, 1)),
        (CONV, "lora_magnitude_vector", 0, (1, -1, 1, 1, 1)),
    ],
)  # fmt: skip
def test_dora_with_strength_and_another_lora(pipeline, expert, tmp_path, monkeypatch, name, ending, axis, shape):
    """peft's magnitude has one value per output by definition, LyCORIS' says by its shape which axis it is of."""
    monkeypatch.setattr(weight_merge, "BLOCK_BYTES", 1000)  # a few rows
    base, generator = expert.state_dict()[f"{name}.weight"], torch.Generator().manual_seed(0)
    down = torch.randn(2, *base.shape[1:], generator=generator)
    up = torch.randn(len(base), 2, *[1] * (base.ndim - 2), generator=generator)
    magnitude = lengths(base, axis)
    magnitude = magnitude * (0.5 + torch.rand(magnitude.shape, generator=generator))
    state = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up, f"{name}.{ending}": magnitude.reshape(shape)}
    state[f"{name}.alpha"] = torch.tensor(1.0)  # of rank 2: half of the product
    save_file(state, tmp_path / "dora.safetensors")
    save_file({f"{name}.diff": torch.ones(base.shape)}, tmp_path / "other.safetensors")
    out = tmp_path / "out.safetensors"
    loras = ["--lora", f"{tmp_path / 'other.safetensors'}:-0.1", "--lora", f"{tmp_path / 'dora.safetensors'}:0.7"]
    merge("--base", pipeline / "transformer_2", *loras, "--out", out, "--verify")
    moved = base.double() + 0.5 * (up.flatten(1) @ down.flatten(1)).reshape(base.shape).double()
    expected = base.double() + 0.7 * (magnitude.double() * moved / lengths(moved, axis) - base.double()) - 0.1
    torch.testing.assert_close(load_file(out)[f"{name}.weight"].double(), expected, rtol=1e-6, atol=1e-6)


def test_a_small_update_in_bfloat16_is_reported_lost(pipeline, values, tmp_path):
    bf16, fp32, out = tmp_path / "bf16.safetensors", pipeline / "transformer_2", tmp_path / "out.safetensors"
    join("--input", fp32, "--out", bf16, "--dtype", "bf16")
    tiny = {name: (down, 2e-4 * up) for name, (down, up) in values.items()}
    lora = DIALECTS["d5"](tmp_path, tiny)
    text = merge("--base", bf16, "--expert", "low", "--lora", lora, "--out", out, "--dry-run")
    assert "WARNING: low_noise keeps only" in text and "--dtype fp32" in text and not out.exists()
    text = merge("--base", fp32, "--lora", lora, "--out", out)
    assert "WARNING" not in text and "low_noise: update kept 100.0%, error 0.0%" in text
    assert_same(load_file(out), expected_weights(weights(fp32), tiny))


def test_metadata_says_what_was_merged(pipeline, values, tmp_path):
    lora, out = DIALECTS["d5"](tmp_path, values), tmp_path / "out.safetensors"
    merge("--base", pipeline / "transformer_2", "--lora", f"{lora}:0.5", "--out", out)
    metadata = shards.read_header(out)[1]
    assert metadata["format"] == "pt" and str(pipeline) in metadata["rewardfl_base"]
    (record,) = (value for key, value in metadata.items() if key.startswith("rewardfl_lora_0"))
    assert sha256(lora) in record and "strength 0.5" in record and "scale 0.5" in record


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda down, up: {f"blocks.7.attn1.to_q.lora_{half}.weight": {"A": down, "B": up}[half] for half in "AB"},
         "the base has no blocks.7.attn1.to_q.weight"),
        (lambda down, up: {f"{Q}.lora_A.weight": down[:, :5].contiguous(), f"{Q}.lora_B.weight": up},
         f"up @ down of {Q} is (24, 5)"),
        (lambda down, up: {f"{Q}.diff_b": torch.ones(23)}, f"bias of {Q} is (23,)"),
        (lambda down, up: {"blocks.0.attn2.add_k_proj.diff_b": torch.zeros(24)}, "Wan2.1"),
    ],
    ids=["block", "shape", "bias", "image projection"],
)  # fmt: skip
def test_a_lora_that_does_not_fit_the_base_is_refused(pipeline, values, tmp_path, change, message):
    path = tmp_path / "low.safetensors"
    save_file(change(*values[Q]), path)
    text = refuse(merge, tmp_path / "out.safetensors", "--base", pipeline / "transformer_2", "--lora", path)
    assert message in text and str(path) in text


@pytest.mark.parametrize("strength", ("1e39", "1e-46", "0"))
def test_a_strength_has_limits(world, tmp_path, strength):
    lora = f"{world / 'comfy.safetensors'}@low:{strength}"
    text = refuse(merge, tmp_path / "out", "--base", world / "pipeline" / "transformer_2", "--lora", lora)
    assert f":{strength}" in text


def test_a_lora_counts_once(pipeline, values, tmp_path):
    path, out, copy = DIALECTS["d5"](tmp_path, values), tmp_path / "out.safetensors", tmp_path / "copy.safetensors"
    convert("--lora", path, "--to", "diffusers", "--out", copy)
    base = ["--base", pipeline / "transformer_2"]
    for first, second in ((path, path), (f"{path}:1.0", copy), (path, f"{copy}:1.0")):
        assert "the same as another --lora" in refuse(merge, out, *base, "--lora", first, "--lora", second)
    merge(*base, "--lora", f"{path}:1.0", "--lora", f"{copy}:1", "--out", tmp_path / "twice.safetensors")
    (tmp_path / "other").mkdir()
    other = DIALECTS["d5"](tmp_path / "other", {name: (down, -up) for name, (down, up) in values.items()})
    first, second = tmp_path / "first_low_noise", tmp_path / "second_low_noise"
    merge(*base, "--lora", path, "--out", first / "transformer_2")
    merge("--base", first / "transformer_2", "--lora", other, "--out", second / "transformer_2")
    for folder in (first, second):
        assert "already" in refuse(merge, out, "--base", folder / "transformer_2", "--lora", copy)
    merge("--base", first / "transformer_2", "--lora", f"{path}:1", "--out", out)
    before, once = (weights(folder / "transformer_2")[f"{Q}.weight"] for folder in (pipeline, first))
    torch.testing.assert_close(load_file(out)[f"{Q}.weight"] - once, once - before, rtol=1e-3, atol=1e-5)


def test_experts_that_do_not_fit_are_refused(pipeline, values, tmp_path):
    lora, high, base = DIALECTS["d5"](tmp_path, values), tmp_path / "my_high_noise_lora.safetensors", tmp_path / "base"
    out, both = tmp_path / "out", tmp_path / "both"
    assert "PATH@high or PATH@low" in refuse(merge, out, "--base", pipeline, "--lora", lora)  # nothing names one
    shutil.copy(lora, high)
    text = refuse(merge, out, "--base", pipeline / "transformer_2", "--lora", high)
    assert "is for the high_noise expert, the base is low_noise" in text and "PATH@high" in text
    for part in ("transformer", "transformer_2"):
        (both / part).mkdir(parents=True)
        shutil.copy(DIALECTS["d1"](tmp_path, values), both / part)
    assert "not for low_noise" in refuse(merge, out, "--base", pipeline, "--lora", f"{both}@low")
    shutil.copytree(pipeline / "transformer_2", base)
    assert "--expert" in refuse(merge, out, "--base", base, "--lora", both)
    merge("--base", base, "--lora", both, "--expert", "low", "--out", out)


def test_fp16_overflow_leaves_nothing(pipeline, values, tmp_path):
    huge = {name: (down, 1e6 * up) for name, (down, up) in values.items()}
    lora = DIALECTS["d5"](tmp_path, huge)
    out = tmp_path / "out.safetensors"
    assert "fp32" in refuse(merge, out, "--base", pipeline / "transformer_2", "--lora", lora, "--dtype", "fp16")


def test_verify_finds_a_wrong_bit(pipeline, values, tmp_path):
    """In a merged tensor and in a copied one."""
    (lora,) = lora_files.read_lora(DIALECTS["d5"](tmp_path, values))
    plan = lora_merge.plan_merge(shards.open_checkpoint(pipeline / "transformer_2"), [(lora, 1.0)], "keep", "keep")
    merged, out = writing.TensorFile(plan.parts, {}), tmp_path / "out.safetensors"
    for name in ("blocks.0.attn1.to_q.weight", "proj_out.bias"):
        with out.open("wb") as file:
            writing.write_file(file, merged, lambda count: None)
        writing.verify(out, merged, lambda count: None)
        content = bytearray(out.read_bytes())
        content[shards.read_header(out)[0][name].offset + 3] ^= 0x40
        out.write_bytes(content)
        with pytest.raises(shards.InputError, match=f"{name} differs"):
            writing.verify(out, merged, lambda count: None)


def test_an_expert_without_a_lora_is_cast_too(pipeline, values, tmp_path):
    lora, out = DIALECTS["d5"](tmp_path, values), tmp_path / "out"
    merge("--base", pipeline, "--lora", f"{lora}@low", "--out", out, "--dtype", "bf16")
    for part in ("transformer", "transformer_2"):
        assert weights(out / part)["proj_out.weight"].dtype == torch.bfloat16
