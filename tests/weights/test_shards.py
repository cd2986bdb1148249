"""Headers, indices and shards that are damaged: one line that names the file, and nothing written."""

import json
import shutil

import pytest
from merging_world import convert, join, merge, refuse
from safetensors.torch import load_file, save_file

pytest_plugins = "merging_world"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


def to_bytes(content):
    """Return the bytes of text, bytes or a JSON value."""
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    return text.encode() if isinstance(text, str) else text


def entry(**changes):
    """Return the header of one tensor of six float32, with changes."""
    return {"transformer.proj_out.diff": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


HEADERS = {  # what the safetensors library refuses, and what it lets through
    "a list": [], "deep": "[" * 100_000, "empty": b"", "dtype: unknown": entry(dtype="F33"),
    "offsets: hole": entry(data_offsets=[4, 28]), "only metadata": {"__metadata__": {"format": "pt"}},
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_damaged_headers_are_refused(world, tmp_path, header):
    path, content = tmp_path / "low.safetensors", to_bytes(HEADERS[header])
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(24))
    lora, out = world / "pytorch_lora_weights.safetensors", tmp_path / "new.safetensors"
    assert str(path) in refuse(join, out, "--input", path)
    assert str(path) in refuse(merge, out, "--base", path, "--lora", f"{lora}@low")
    assert str(path) in refuse(convert, out, "--lora", path, "--to", "comfy")


INDICES = {
    "no JSON": "{", "no map": {}, "map: list": {"weight_map": []}, "shard: number": {"weight_map": {"a": 5}},
    "shard: above": {"weight_map": {"a": "../x.safetensors"}},
}  # fmt: skip


@pytest.mark.parametrize("content", INDICES)
def test_damaged_indices_are_refused(world, tmp_path, content):
    shutil.copytree(world / "pipeline" / "transformer_2", tmp_path / "low")
    index = tmp_path / "low" / INDEX
    index.write_bytes(to_bytes(INDICES[content]))
    for source in (index, index.parent):
        assert str(index) in refuse(join, tmp_path / "new", "--input", source)


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= change
    (folder / INDEX).write_text(json.dumps(index))


def first_tensor(path):
    return next(iter(load_file(path).items()))


# {what: (a change of a folder with these shards, the message)}
DAMAGES = {
    "cut off": (lambda folder, a, b: a.write_bytes(a.read_bytes()[:-10]), "cut off"),
    "longer": (lambda folder, a, b: a.write_bytes(a.read_bytes() + b"x"), "not fully covered"),
    "missing shard": (lambda folder, a, b: b.unlink(), "does not exist"),
    "missing without index": (lambda folder, a, b: [b.unlink(), (folder / INDEX).unlink()], "are given"),
    "doubled tensor": (lambda folder, a, b: save_file(load_file(a) | dict([first_tensor(b)]), a), "is in"),
    "tensor nowhere": (lambda folder, a, b: change_index(folder, {"blocks.9.ghost": a.name}), "in none of"),
    "wrong shard": (lambda folder, a, b: change_index(folder, {first_tensor(a)[0]: b.name}), "says"),
    "two indices": (lambda folder, a, b: shutil.copy(folder / INDEX, folder / f"a.{INDEX}"), "2 index"),
    "empty": (lambda folder, a, b: [path.unlink() for path in folder.iterdir()], "0 .safetensors"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_incomplete_and_surplus_shards_are_refused(expert, tmp_path, what):
    expert.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    change, message = DAMAGES[what]
    change(tmp_path / "sharded", *sorted((tmp_path / "sharded").glob("*.safetensors"))[:2])
    assert message in refuse(join, tmp_path / "out.safetensors", "--input", tmp_path / "sharded")
