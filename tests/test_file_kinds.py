"""Every loader names a wrong file by its first bytes; paths of other systems have a hint."""

import io

import pytest
import torch

from rewardfl import data
from rewardfl.file_kinds import foreign_path_hint, wrong_kind
from rewardfl.rewards.clip.network import load_tokenizer, load_weights
from rewardfl.rewards.face.onnx_module import read_graph
from rewardfl.weights import lora_files, shards


def pickled(value):
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


WRONG = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a Git LFS pointer"),
    "page": (b"\xef\xbb\xbf\n<!DOCTYPE html><html><body>restricted</body></html>", "a web page"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(200), "a GGUF file"),
    "archive": (b"PK\3\4" + bytes(200), "an archive"),
    "empty": (b"", r"is empty \(0 bytes\)"),
}
TEXT, TORCH = (b"Entry not found", "a text file.*Entry not found"), (pickled({}), "a torch file")
LOADERS = {
    "model.safetensors": shards.read_header,
    "models_t5.pth": lora_files.read_torch,
    "head.pth": load_weights,
    "det.onnx": read_graph,
    "config.json": shards.read_json_object,
    "adapter_config.json": lambda path: shards.check_folder(path.parent),
    "spiece.model": lambda path: shards.check_folder(path.parent),
    "merges.txt": lambda path: load_tokenizer(None, path.parent),
    "metadata.csv": data.load_metadata,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_wrong_file_is_named(tmp_path, name):
    wrong = dict(WRONG)
    if not name.endswith((".csv", ".txt", ".json")):
        wrong["text"] = TEXT
    if not name.endswith(".pth"):
        wrong["torch"] = TORCH
    if name.endswith(".csv"):
        del wrong["empty"]  # a table without rows
    for content, message in wrong.values():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.*{message}") as error:
            LOADERS[name](tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_file_of_the_right_type_passes(tmp_path):
    """The length in a safetensors file's first bytes may look like a pickle."""
    path = tmp_path / "model"
    path.write_bytes(b"\x80\x02" + bytes(6) + b"{}")
    assert wrong_kind(path).startswith("is a safetensors file") and wrong_kind(path, "safetensors") == ""


class Code:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize("load", [lora_files.read_torch, load_weights])
def test_code_in_a_torch_file_is_not_run(tmp_path, load, capsys):
    (tmp_path / "code.pth").write_bytes(pickled({"a": Code()}))
    with pytest.raises(ValueError, match="code.pth cannot be read as a torch file: it holds code") as error:
        load(tmp_path / "code.pth")
    assert "weights_only" not in str(error.value) and not capsys.readouterr().out


@pytest.mark.parametrize(
    "path, words",
    [
        (r"C:\clips\a.mp4", "Windows"), ("data/D:/a.mp4", "Windows"), (r"clips\a.mp4", "Windows"),
        ("data/~/a.mp4", "in full"), ("$HOME/a.mp4", "in full"), ("data/https:/host/a.mp4", "address"),
        ("s3://bucket/a.mp4", "address"), ("data/a.mp4", ""), ("data/a: b~.mp4", ""),
    ],
)  # fmt: skip
def test_paths_of_other_systems_have_a_hint(tmp_path, path, words):
    assert words in foreign_path_hint(path) and bool(words) == bool(foreign_path_hint(path))
    with pytest.raises(data.DataError, match=f"no such file.*{words}"):
        data.read_video(tmp_path / path)
