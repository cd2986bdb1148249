"""Headers, indices and LoRA metadata that no tool should write: one line, exit 2, the file named, nothing written."""

import json
import os
import shutil

import pytest
import torch
from conftest import run_tool
from lora_dialects import DIALECTS, MODULES
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from rewardfl.weights import lora_files
from rewardfl_tools import convert_lora, merge_lora, merge_shards

pytest_plugins = "merging_world"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
DEEP = "[" * 100_000
DIGITS = "9" * 5000  # more than Python turns into a number


def refused(main, damaged, out, *arguments):
    """Exit 2 with one line that names the damaged file; neither an output nor a temporary. Returns the line."""
    before = sorted(out.parent.rglob("*"))
    text = run_tool(main, *arguments, "--out", out, expect=2)
    (line,) = [line for line in text.splitlines() if "Warning" not in line and not line.startswith("  ")]
    assert line.startswith("error: ") and str(damaged) in line and len(line) < 2100
    assert sorted(out.parent.rglob("*")) == before
    return line


def not_merged(world, tmp_path, damaged, lora=None):
    base = world / "pipeline" / "transformer_2"
    return refused(merge_lora.main, damaged, tmp_path / "new", "--base", base, "--lora", lora or damaged)


def file_of(path, header, data=b""):
    """A file with this header, which is text, bytes or a JSON value."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    header = header.encode() if isinstance(header, str) else header
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(**changes):
    """The header of one tensor of six float32, with changes."""
    return {"transformer.proj_out.diff": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


HEADERS = {  # what the safetensors library refuses, and what it lets through
    "a list": [], "deep": DEEP, "digits": DIGITS, "not UTF-8": b'{"\xff": 1}', "empty": b"",
    "dtype: unknown": entry(dtype="F33"), "shape: huge": entry(shape=[10**40, 0]),
    "offsets: hole": entry(data_offsets=[4, 28]),
    "surrogate in a name": entry() | {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [24, 24]}},
    "a name twice": '{"a": {}, "a": {}}', "only metadata": {"__metadata__": {"format": "pt"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADERS)
def test_damaged_headers(world, tmp_path, kind):
    path = file_of(tmp_path / "low.safetensors", HEADERS[kind], bytes(24))
    lora = world / "pytorch_lora_weights.safetensors"
    for name in ("out", "out.safetensors"):
        out = tmp_path / "new" / name
        out.parent.mkdir(exist_ok=True)
        refused(merge_shards.main, path, out, "--input", path)
        refused(merge_lora.main, path, out, "--base", path, "--lora", f"{lora}@low")
    refused(merge_lora.main, path, out, "--base", world / "pipeline" / "transformer_2", "--lora", path)
    for to in ("comfy", "diffusers"):
        refused(convert_lora.main, path, out, "--lora", path, "--to", to)


def test_a_fifo_among_the_shards_is_no_endless_wait(world, tmp_path):
    shutil.copytree(world / "pipeline" / "transformer_2", tmp_path / "low")
    for file in (tmp_path / "low").glob("*.safetensors"):
        file.unlink()
        os.mkfifo(file)
        refused(merge_shards.main, file, tmp_path / "new", "--input", tmp_path / "low")


INDICES = {
    "a list": [], "no JSON": "{", "not UTF-8": b"\xff\xfe{", "no map": {}, "map: list": {"weight_map": []},
    "map: empty": {"weight_map": {}}, "shard: number": {"weight_map": {"a": 5}},
    "shard: above": {"weight_map": {"a": "../x.safetensors"}},
}  # fmt: skip


@pytest.mark.parametrize("kind", INDICES)
def test_damaged_indices(world, tmp_path, kind):
    given = INDICES[kind]
    shutil.copytree(world / "pipeline" / "transformer_2", tmp_path / "low")
    index = tmp_path / "low" / INDEX
    text = given if isinstance(given, (str, bytes)) else json.dumps(given)
    index.write_bytes(text.encode() if isinstance(text, str) else text)
    for source in (index, index.parent):
        refused(merge_shards.main, index, tmp_path / "new", "--input", source)


CONFIGS = {
    "a list": [], "no JSON": "{", "deep": DEEP, "alpha: text": {"lora_alpha": "abc"},
    "alpha: true": {"lora_alpha": True},
    "alpha: 1e300": {"lora_alpha": 1e300}, "alpha: 1e-300": {"lora_alpha": 1e-300},
    "alpha: NaN": {"lora_alpha": float("nan")}, "alpha: 0": {"lora_alpha": 0}, "alpha: long": {"lora_alpha": 10**400},
    "pattern: list": {"alpha_pattern": ["to_q"]}, "pattern: alpha": {"alpha_pattern": {"to_q": "4"}},
    "hostile": {"alpha_pattern": {"(.*)*(.*)*y": 3}}, "pattern: class": {"alpha_pattern": {"to_[qk]": 4}},
    "pattern: empty": {"alpha_pattern": {"": 4}}, "pattern: long": {"alpha_pattern": {"(a+)+" * 100_000: 4}},
    "rslora: text": {"use_rslora": "false"}, "dora: number": {"use_dora": 5},
}  # fmt: skip
WORDS = {"alpha": "alpha", "pattern": "alpha", "hostile": "(.*)*(.*)*y"}


@pytest.mark.parametrize("place", ("metadata", "adapter_config.json", "component"))
@pytest.mark.parametrize("kind", CONFIGS)
def test_damaged_lora_metadata(world, tmp_path, kind, place):
    given, state = CONFIGS[kind], load_file(world / "pytorch_lora_weights.safetensors")
    path = damaged = tmp_path / "low" / "adapter_model.safetensors"
    path.parent.mkdir()
    if place == "component" and isinstance(given, dict):
        given = {f"transformer.{key}": value for key, value in given.items()}
    text = given if isinstance(given, str) else json.dumps(given)
    if place == "adapter_config.json":
        save_file(state, path)
        path.with_name(place).write_text(text)
        damaged = path.parent
    else:
        save_file(state, path, {"lora_adapter_metadata": text})
    line = not_merged(world, tmp_path, damaged, path)
    assert WORDS.get(kind.partition(":")[0], "") in line
    refused(convert_lora.main, damaged, tmp_path / "new.safetensors", "--lora", path, "--to", "comfy")


@pytest.mark.parametrize("alpha", (torch.ones(2), torch.tensor(-1.0), torch.tensor(1e300).double()))
def test_damaged_alpha_keys(world, tmp_path, values, alpha):
    path = DIALECTS["d5"](tmp_path, values)
    save_file(load_file(path) | {"diffusion_model.blocks.0.self_attn.q.alpha": alpha}, path)
    line = not_merged(world, tmp_path, path)
    assert "blocks.0.attn1.to_q" in line and "alpha" in line


@pytest.mark.parametrize(
    "alpha, rank", [("2", "0"), ("2", "-4"), ("2", "nan"), ("abc", "4"), ("1e300", "4"), ("0", "4")]
)
def test_damaged_kohya_metadata(world, tmp_path, values, alpha, rank):
    path = DIALECTS["d10_metadata"](tmp_path, values)
    save_file(load_file(path), path, {"ss_network_alpha": alpha, "ss_network_dim": rank})
    assert "ss_network" in not_merged(world, tmp_path, path)


def test_kohyas_alpha_is_of_its_rank(tmp_path, values):
    """Each layer has the scale of the metadata's rank, whatever its own."""
    path = DIALECTS["d10_metadata"](tmp_path, values)
    save_file(load_file(path), path, {"ss_network_alpha": "2", "ss_network_dim": "8"})
    (lora,) = lora_files.read_lora(path)
    assert {update.scale for update in lora.updates.values()} == {0.25}


@pytest.mark.parametrize("strength", ("1e39", "1e-46", "0"))
def test_strengths_beyond_float32(world, tmp_path, strength):
    path = world / "pytorch_lora_weights.safetensors"
    given = f"{path}@low:{strength}"
    assert f":{strength}" in not_merged(world, tmp_path, path, given)
    given = ["--lora", tmp_path / "lora.pth", f"--alpha={strength}", "--to", "comfy"]
    torch.save({"proj_out.lora_A.weight": torch.ones(1, 24), "proj_out.lora_B.weight": torch.ones(4, 1)}, given[1])
    refused(convert_lora.main, given[1], tmp_path / "new.safetensors", *given)


def shapes(down, up, **more):
    stem = "transformer.blocks.0.attn1.to_q"
    state = {f"{stem}.lora_A.weight": torch.ones(down), f"{stem}.lora_B.weight": torch.ones(up)}
    return state | {f"{stem}.{key}": torch.ones(shape) for key, shape in more.items()}


@pytest.mark.parametrize(
    "state",
    [
        shapes((), (24, 1)), shapes((4,), (24, 4)), shapes((0, 24), (24, 0)), shapes((4, 24), (24,)),
        shapes((4, 24), (24, 4, 3, 3)), shapes((4, 24), (24, 5)), shapes((4, 24), ()),
        {"blocks.0.norm2.lora_A.weight": torch.ones(4), "blocks.0.norm2.lora_B.weight": torch.ones(24, 4)},
        {"transformer." * 100_000 + "x.diff": torch.ones(1)}, {"x\n\x1b[31m.diff": torch.ones(1)},
    ],
)  # fmt: skip
def test_lora_tensors_of_odd_shapes_and_names(world, tmp_path, state):
    path = tmp_path / "low.safetensors"
    save_file(state, path)
    not_merged(world, tmp_path, path)
    refused(convert_lora.main, path, tmp_path / "new.safetensors", "--lora", path, "--to", "comfy", "--verify")


@pytest.mark.parametrize("kind", ("legacy", "zip"))
def test_torch_files_of_both_formats_are_read(world, values, tmp_path, kind):
    """Before torch 1.6 a file was no zip: it cannot be mapped."""
    path = DIALECTS["d9"](tmp_path, values)
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=kind == "zip")
    (lora,) = lora_files.read_lora(path)
    assert torch.equal(lora.updates["blocks.0.attn1.to_q"].down, values["blocks.0.attn1.to_q"][0])


@pytest.mark.parametrize("content", (b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"garbage", b"\x80\x02cos\nsystem\n."))
@pytest.mark.parametrize("name", ("low.pt", "low.pth", "low.bin", "low.txt"))
def test_damaged_torch_files(world, tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    not_merged(world, tmp_path, path)


@pytest.mark.parametrize(
    "state",
    [
        [torch.ones(1)], {"a": 5}, {5: torch.ones(1)},
        {"proj_out.diff": torch.ones(4, 24, dtype=torch.complex64)},
        {"proj_out.diff": torch.ones(4, 24).to(torch.float8_e4m3fn)},
    ],
)  # fmt: skip
def test_torch_files_of_other_things(world, tmp_path, state):
    torch.save(state, path := tmp_path / "low.pt")
    not_merged(world, tmp_path, path)


PATTERNS = (
    {"to_q": 8.0}, {"^to_q": 8.0}, {"attn1.to_q": 8.0, "to_q": 2.0}, {"to_q": 2.0, "attn1.to_q": 8.0},
    {"blocks.0.attn1.to_q": 3}, {"^blocks.1.ffn.net.0.proj": 3, "proj": 5}, {r"ffn\.net\.2": 7}, {"o_q": 8},
    {"0.attn1.to_q": 8, "locks.0.attn1.to_q": 9}, {"to_out.0$": 3}, {r"^blocks\.1\.attn2\.to_out\.0$": 3, "0": 5},
    {"net.2": 4, "^ffn.net.2": 9}, {"to_k": 3, "to_q": 5}, {"attn2": 8, "attn2.to_out": 9, "2": 4},
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_alpha_pattern_as_peft_matches_it(values, tmp_path, pattern):
    """peft's own function is the second opinion."""
    path = DIALECTS["d1"](tmp_path, values)
    config = {"transformer.lora_alpha": 1.0, "transformer.alpha_pattern": pattern}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(config)})
    (lora,) = lora_files.read_lora(path)
    for _, name in MODULES:
        alpha = pattern.get(get_pattern_key(pattern, name), 1.0)
        assert lora.updates[name].scale == alpha / 4, name


def test_alpha_pattern_with_original_names_and_unused_entries(values, tmp_path):
    """Trainers on the original code; and peft keeps entries that match nothing, which is worth a line."""
    path = DIALECTS["d6"](tmp_path, values)
    config = {"lora_alpha": 1.0, "alpha_pattern": {"self_attn.q": 8.0, "typo": 3.0}}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(config)})
    (lora,) = lora_files.read_lora(path)
    assert lora.updates["blocks.0.attn1.to_q"].scale == 2 and lora.updates["blocks.0.ffn.net.2"].scale == 0.25
    (note,) = lora.notes
    assert "typo" in note and str(path) in note
    out = tmp_path / "out.safetensors"
    assert "note: " + note in run_tool(convert_lora.main, "--lora", path, "--to", "comfy", "--out", out)
