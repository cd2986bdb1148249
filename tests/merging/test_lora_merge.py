"""tools/merge_lora.py: every dialect merges to the same weights, what cannot be merged is refused, no half files."""

import json
import os
import shutil

import pytest
import torch
from conftest import run_tool
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from lora_dialects import ALPHA, DIALECTS, RANK, SCALE, factors, peft_metadata, weights
from safetensors.torch import load_file, save_file
from wan_files import original_expert

from rewardfl.files import sha256
from rewardfl.merging import lora_merge, merge_tensors, writing
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl_tools import merge_lora, merge_shards

pytest_plugins = "merging_world"
pytestmark = pytest.mark.slow(50)


def run(*arguments, expect=0):
    return run_tool(merge_lora.main, *arguments, expect=expect)


def refuse(out, *arguments):
    """Runs the tool, which must refuse and leave nothing; returns its message."""
    text = run(*arguments, "--out", out, expect=2)
    assert not out.exists() and "Traceback" not in text
    assert not list(out.parent.glob("*.tmp-*"))
    return text


def refuse_state(pipeline, tmp_path, state):
    """Refuses to merge a LoRA of these tensors, and names its file; returns the message."""
    save_file(state, tmp_path / "low.safetensors")
    lora = ["--lora", tmp_path / "low.safetensors"]
    text = refuse(tmp_path / "out.safetensors", "--base", pipeline / "transformer_2", *lora)
    assert "low.safetensors" in text
    return text


def expected_weights(before, values, strength=1.0):
    """base + strength * scale * up @ down, by plain torch."""
    after = dict(before)
    for name, (down, up) in values.items():
        after[f"{name}.weight"] = before[f"{name}.weight"] + strength * SCALE * (up @ down)
    return after


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_names_are_those_of_diffusers_converter():
    """All 1095 tensors of the real model and the 1303 of Wan2.1-I2V, one to one, by diffusers' own converter."""
    for image_dim, count in ((None, 1095), (1280, 1303)):
        with torch.device("meta"):
            model = WanTransformer3DModel(
                in_channels=36, image_dim=image_dim, added_kv_proj_dim=5120 if image_dim else None
            )
        names = list(model.state_dict())
        assert len(names) == count
        converted = convert_wan_transformer_to_diffusers({wan_names.to_original(name): name for name in names})
        assert all(new == name for new, name in converted.items())
        assert [wan_names.to_diffusers(wan_names.to_original(name)) for name in names] == names
        for name in names:
            module = name.removesuffix(".weight").removesuffix(".bias")
            original = wan_names.to_original(module)
            for alias in (module, original, original.replace(".", "_")):
                assert lora_files.resolve_name(alias) == module


def test_both_experts_in_one_file(pipeline, values, tmp_path):
    state, metadata = {}, {}
    down, up = values["blocks.0.attn1.to_q"]
    for component, factor in (("transformer", 1.0), ("transformer_2", 3.0)):
        state[f"{component}.blocks.0.attn1.to_q.lora_A.weight"] = down * factor
        state[f"{component}.blocks.0.attn1.to_q.lora_B.weight"] = up.clone()
        metadata |= {f"{component}.r": RANK, f"{component}.lora_alpha": ALPHA * factor}
    save_file(state, tmp_path / "both.safetensors", {"lora_adapter_metadata": json.dumps(metadata)})
    out = tmp_path / "out"
    run("--base", pipeline, "--lora", tmp_path / "both.safetensors", "--out", out, "--verify")
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
    run("--base", base, "--lora", f"{lora}@low" if layout == "wan-ai" else lora, "--out", out, "--verify")
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
    run("--base", base, "--lora", f"{first}:0.5", "--lora", f"{other}@low:-1.25e0", "--out", out, "--verify")
    wanted = expected_weights(expected_weights(expert.state_dict(), values, 0.5), second, -1.25)
    assert_same(load_file(out), wanted)


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
    wanted = dict(model) | {target: model[target] + 0.5 * state[key] for key, target in targets.items()}
    factors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0)}
    state |= {f"patch_embedding.{key}": value for key, value in factors.items()}
    save_file({f"diffusion_model.{key}": value for key, value in state.items()}, tmp_path / "low_diff.safetensors")
    lora = f"{tmp_path / 'low_diff.safetensors'}:0.5"
    run("--base", pipeline / "transformer_2", "--lora", lora, "--out", tmp_path / "out.safetensors", "--verify")
    product = torch.einsum("or,rcthw->octhw", up.flatten(1), down)
    wanted["patch_embedding.weight"] = conv + 0.5 * 0.5 * product
    assert_same(load_file(tmp_path / "out.safetensors"), wanted)


def lengths(values, axis):
    """|values| per output (axis 0) or per input (axis 1), in the number of dimensions that `values` has."""
    return values.square().sum([i for i in range(values.ndim) if i != axis], keepdim=True).sqrt()


Q, CONV = "blocks.0.attn1.to_q", "patch_embedding"


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
    monkeypatch.setattr(merge, "BLOCK_BYTES", 1000)  # a few rows
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
    given = ["--lora", f"{tmp_path / 'other.safetensors'}:-0.1", "--lora", f"{tmp_path / 'dora.safetensors'}:0.7"]
    run("--base", pipeline / "transformer_2", *given, "--out", out, "--verify")
    moved = base.double() + 0.5 * (up.flatten(1) @ down.flatten(1)).reshape(base.shape).double()
    wanted = base.double() + 0.7 * (magnitude.double() * moved / lengths(moved, axis) - base.double()) - 0.1
    torch.testing.assert_close(load_file(out)[f"{name}.weight"].double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"dora_scale": (24,)}, {"dora_scale": (1, 24, 1)}, {"dora_scale": (1, 23)},
        {"lora_magnitude_vector": (1, 24)}, {"lora_magnitude_vector": (24,), "dora_scale": (24, 1)},
    ],
)  # fmt: skip
def test_magnitudes_that_do_not_say_their_axis_are_refused(pipeline, values, tmp_path, given):
    """A square layer takes 24 values along both axes."""
    down, up = values[Q]
    state = {f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}
    text = refuse_state(
        pipeline, tmp_path, state | {f"{Q}.{ending}": torch.ones(shape) for ending, shape in given.items()}
    )
    assert Q in text and all(ending in text for ending in given)


def test_alpha_and_where_it_came_from(pipeline, values, tmp_path):
    base, out = pipeline / "transformer_2", tmp_path / "out.safetensors"
    for dialect, source in (
        ("d1", "the configuration"),
        ("d5", "the .alpha keys"),
        ("d3", "the configuration"),
        ("d10_metadata", "ss_network_alpha"),
        ("d6", "nowhere: alpha = rank"),
    ):
        lora = DIALECTS[dialect](tmp_path, values)
        assert source in run("--base", base, "--lora", f"{lora}@low", "--out", out, "--dry-run")
    assert "--alpha" in run("--base", base, "--lora", lora, "--out", out, "--alpha", 8, "--dry-run")
    assert not out.exists()


def test_alphas_that_disagree(pipeline, values, tmp_path):
    base, out = pipeline / "transformer_2", tmp_path / "out.safetensors"
    state = load_file(DIALECTS["d5"](tmp_path, values))
    save_file(state, tmp_path / "two.safetensors", peft_metadata(7.0))
    text = refuse(out, "--base", base, "--lora", tmp_path / "two.safetensors")
    assert "alpha 2 by the .alpha keys, 7 by the configuration" in text
    text = refuse(out, "--base", base, "--lora", DIALECTS["d5"](tmp_path, values), "--alpha", "3")
    assert "alpha 2 by the .alpha keys, 3 by --alpha" in text


def test_a_small_update_in_bfloat16_is_reported_lost(pipeline, values, tmp_path):
    bf16, fp32 = tmp_path / "bf16.safetensors", pipeline / "transformer_2"
    run_tool(merge_shards.main, "--input", fp32, "--out", bf16, "--dtype", "bf16")
    tiny = {name: (down, 2e-4 * up) for name, (down, up) in values.items()}
    lora = DIALECTS["d5"](tmp_path, tiny)
    report = tmp_path / "report.json"
    options = ["--lora", lora, "--json", report, "--overwrite", "--out"]
    for extra in (["--dry-run"], []):
        text = run("--base", bf16, "--expert", "low", *options, tmp_path / f"out{len(extra)}.safetensors", *extra)
        assert "WARNING" in text and "--dtype fp32" in text
        assert json.loads(report.read_text())["kept"]["low_noise"]["share"] < 0.7
    out = tmp_path / "kept.safetensors"
    assert "WARNING" not in run("--base", fp32, *options, out)
    assert json.loads(report.read_text())["kept"]["low_noise"]["share"] > 0.999
    assert_same(load_file(out), expected_weights(weights(fp32), tiny))


def test_metadata_says_what_was_merged(pipeline, values, tmp_path):
    lora, out = DIALECTS["d5"](tmp_path, values), tmp_path / "out.safetensors"
    run("--base", pipeline / "transformer_2", "--lora", f"{lora}:0.5", "--out", out)
    metadata = shards.read_header(out)[1]
    assert metadata["format"] == "pt" and str(pipeline) in metadata["rewardfl_base"]
    (record,) = (value for key, value in metadata.items() if key.startswith("rewardfl_lora_0"))
    assert sha256(lora) in record and "strength 0.5" in record and "scale 0.5" in record
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


KEY = "diffusion_model.blocks.0.self_attn.q"
# {what: (its tensors, None: without this one; what is said)}
BROKEN = {
    "missing half": (lambda down, up: {f"{KEY}.lora_up.weight": None}, "no up"),
    "unmatched key": (lambda down, up: {f"{KEY[:-2]}.magic.lora_up.weight": torch.zeros(4, 4)}, "magic"),
    "unknown ending": (lambda down, up: {f"{KEY}.gate": torch.zeros(4)}, "gate"),
    "no such block": (
        lambda down, up: {f"{KEY.replace('.0.', '.7.')}.lora_{name}.weight": half
                          for name, half in (("up", up.clone()), ("down", down.clone()))}, "blocks.7"
    ),
    "rank": (lambda down, up: {f"{KEY}.lora_up.weight": up[:, :3].contiguous()}, "ranks"),
    "shape": (lambda down, up: {f"{KEY}.lora_down.weight": down[:, :5].contiguous()}, "up @ down"),
    "nan": (lambda down, up: {f"{KEY}.lora_up.weight": up.index_fill(0, torch.tensor(0), torch.nan)}, "that are nan"),
    "lokr": (lambda down, up: {f"{KEY}.lokr_w1": torch.zeros(4, 4)}, "lokr_w1"),
    "twice": (lambda down, up: {"blocks.0.attn1.to_q.lora_A.weight": down.clone()}, "two keys"),
    "image projection": (
        lambda down, up: {"diffusion_model.blocks.0.cross_attn.k_img.diff_b": torch.zeros(24)}, "Wan2.1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*BROKEN, "empty"])
def test_broken_loras_are_refused(pipeline, values, tmp_path, kind):
    state = load_file(DIALECTS["d5"](tmp_path, values))
    change, message = BROKEN.get(kind, (lambda down, up: dict.fromkeys(state), "no tensors"))
    state |= change(state[f"{KEY}.lora_down.weight"], state[f"{KEY}.lora_up.weight"])
    left = {name: value for name, value in state.items() if value is not None}
    assert message in refuse_state(pipeline, tmp_path, left)


def test_experts_that_do_not_fit(pipeline, values, tmp_path):
    lora = DIALECTS["d5"](tmp_path, values)
    out = tmp_path / "out"
    assert "@high or" in refuse(out, "--base", pipeline, "--lora", lora)  # nothing says which
    high = tmp_path / "my_high_noise_lora.safetensors"
    shutil.copy(lora, high)
    text = refuse(out, "--base", pipeline / "transformer_2", "--lora", high)
    assert "high_noise" in text and "low_noise" in text and "PATH@high" in text
    base = tmp_path / "somewhere.safetensors"
    shutil.copy(next((pipeline / "transformer_2").glob("*.safetensors")), base)
    both = tmp_path / "both"
    for part in ("transformer", "transformer_2"):
        (both / part).mkdir(parents=True)
        shutil.copy(DIALECTS["d1"](tmp_path, values), both / part)
    assert "not for low_noise" in refuse(out, "--base", pipeline, "--lora", f"{both}@low")
    assert "--expert" in refuse(out, "--base", base, "--lora", both)
    run("--base", base, "--lora", both, "--expert", "low", "--out", out)


@pytest.mark.parametrize(
    "name, meaning",
    [
        ("wan2.2_i2v_A14b_low_noise_lora.safetensors", "low_noise"), ("HighNoise.safetensors", "high_noise"),
        ("low_noise_model/x.safetensors", "low_noise"), ("low_rank/face.safetensors", None),
        ("transformer_2/pytorch_lora_weights.safetensors", "low_noise"), ("high_quality_face.safetensors", None),
        ("high_noise_and_low_noise.safetensors", None), ("lownoises.safetensors", None),
    ],
)  # fmt: skip
def test_only_published_names_speak_of_an_expert_and_the_user_outranks_them(pipeline, values, tmp_path, name, meaning):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(DIALECTS["d5"](tmp_path, values), path)
    (lora,) = lora_files.read_lora(path)
    assert lora.expert == meaning
    for word in ("high", "low"):
        (lora,) = lora_merge.read_loras(f"{path}@{word}:0.5", None).loras
        assert lora.expert == f"{word}_noise"
    if meaning is None:
        text = refuse(tmp_path / "out", "--base", pipeline, "--lora", path)
        assert "PATH@high or PATH@low" in text and name in text


@pytest.mark.parametrize("name", ("face.sft", "0123456789abcdef", "face.safetensors.bin"))
def test_a_lora_is_read_by_its_content(values, tmp_path, name):
    path = shutil.copy(DIALECTS["d5"](tmp_path, values), tmp_path / name)
    (lora,) = lora_files.read_lora(path)
    assert lora.updates.keys() == values.keys()
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(shards.InputError, match="cut off, damaged or not a safetensors file"):
        lora_files.read_lora(path)


def test_a_base_of_another_model_is_refused(pipeline, values, tmp_path):
    base, state = tmp_path / "low.safetensors", weights(pipeline / "transformer_2")
    save_file({f"layer.{i}.weight": value for i, value in enumerate(state.values())}, base)
    lora = DIALECTS["d5"](tmp_path, values)
    assert "not those of a Wan" in refuse(tmp_path / "out.safetensors", "--base", base, "--lora", lora)


def test_fp16_overflow_leaves_nothing(pipeline, values, tmp_path):
    huge = {name: (down, 1e6 * up) for name, (down, up) in values.items()}
    lora = DIALECTS["d5"](tmp_path, huge)
    out = tmp_path / "out.safetensors"
    assert "fp32" in refuse(out, "--base", pipeline / "transformer_2", "--lora", lora, "--dtype", "fp16")


def test_verify_finds_what_is_wrong(pipeline, values, tmp_path):
    """A merged tensor and a copied one, each changed after the write by one bit that matters."""
    (lora,) = lora_files.read_lora(DIALECTS["d5"](tmp_path, values))
    plan = merge_tensors.plan_merge(shards.open_checkpoint(pipeline / "transformer_2"), [(lora, 1.0)], "keep", "keep")
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


def test_an_adapter_that_was_never_trained_is_pointed_out(pipeline, values, tmp_path):
    lora = DIALECTS["d5"](tmp_path, {name: (down, 0 * up) for name, (down, up) in values.items()})
    arguments = ["--base", pipeline / "transformer_2", "--lora", lora, "--out", tmp_path / "out.safetensors"]
    assert "zero everywhere" in run(*arguments)


def test_a_run_folder_and_a_missing_file_are_explained(pipeline, tmp_path):
    (tmp_path / "run" / "checkpoints" / "latest").mkdir(parents=True)
    for name, message in (("run", "checkpoints/latest"), ("absent.safetensors", "no LoRA")):
        lora = ["--lora", tmp_path / name]
        assert message in refuse(tmp_path / "o.safetensors", "--base", pipeline / "transformer_2", *lora)
