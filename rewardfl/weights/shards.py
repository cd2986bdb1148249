"""Safetensors checkpoints as tables of byte ranges, by their checked headers. No torch here.

The format: a length, a JSON header, the tensors' bytes (https://github.com/huggingface/safetensors, section Format).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import Repr
from typing import Any

from safetensors import SafetensorError, safe_open

from rewardfl.file_kinds import FileKind, foreign_path_hint, wrong_kind

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

BLOCK_BYTES = 1 << 20  # bytes of a file, read and written at a time

QUANTISED_LEAVES = ("scale_weight", "scale_input", "weight_scale", "comfy_quant", "scaled_fp8")  # scale tensors' names

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")  # the end of a shard's name, with their number

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class InputError(ValueError):
    """An input that a tool will not work on. The message names the input, the reason and the way out."""


def abbreviate(value: object) -> str:
    """Return a value from a file for a message, never longer than a line."""
    return _SHORT.repr(value)


def parse_json(text: str | bytes, what: str) -> Any:
    """Return the value of `text`. Raise InputError, naming `what`, unless it is JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of 5000 digits, brackets without end
        raise InputError(f"{what} is not JSON, or cut off: {abbreviate(str(error))}") from None


def parse_json_object(text: str | bytes, what: str) -> dict:
    """Return the JSON object in `text`. Raise InputError, naming `what`, for another value."""
    value = parse_json(text, what)
    if not isinstance(value, dict):
        raise InputError(f"{what} is {abbreviate(value)}, not a JSON object")
    return value


def require_file(path: Path, *kinds: FileKind) -> None:
    """Raise InputError unless a file is there and may be of these types by its first bytes."""
    if not path.is_file():  # opening a FIFO would wait for a writer
        raise InputError(f"{path.absolute()} does not exist, or is no file{foreign_path_hint(path)}")
    if words := wrong_kind(path, *kinds):
        raise InputError(f"{path} {words}")


def read_json_object(path: Path) -> dict:
    """Return the JSON object in a file. Raise InputError for a missing file and another content."""
    require_file(path, "text")
    return parse_json_object(path.read_bytes(), str(path))


def check_folder(folder: Path) -> None:
    """Raise InputError for a configuration or tokenizer file in a folder that is of another type, or damaged."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            content = read_json_object(path)
            if path.name == "tokenizer.json" and "model" not in content:
                raise InputError(f"{path} is not a tokenizer: it has no key `model`; get it again")
        elif path.suffix == ".txt":
            require_file(path, "text")
        elif path.suffix == ".model":
            require_file(path)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a safetensors file; offset is from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    @property
    def rows(self) -> int:
        """Return the number of slices along the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one slice along the first dimension; a scalar is one row."""
        return ITEM_BYTES[self.dtype] * prod(self.shape[1:])

    def read(self, first_row: int = 0, rows: int | None = None) -> bytearray:
        """Read the bytes of `rows` slices along the first dimension (all by default), from `first_row` on."""
        buffer = bytearray(self.nbytes if rows is None else rows * self.row_bytes)
        self.read_into(buffer, first_row * self.row_bytes)
        return buffer

    def pieces(self) -> Iterator[bytearray]:
        """Yield all bytes, BLOCK_BYTES at a time."""
        for start in range(0, self.nbytes, BLOCK_BYTES):
            buffer = bytearray(min(BLOCK_BYTES, self.nbytes - start))
            self.read_into(buffer, start)
            yield buffer

    def read_into(self, buffer: bytearray | memoryview, start: int = 0) -> None:
        """Fill the buffer with the tensor's bytes from byte `start` on. Raise OSError if the file ends before."""
        with self.file.open("rb") as file:
            file.seek(self.offset + start)
            if file.readinto(buffer) < len(buffer):
                raise OSError(f"{self.file} ended while it was read; did something overwrite it?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of one model by name, over all of its files."""

    path: Path
    tensors: Mapping[str, Entry]
    files: tuple[Path, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raise InputError for a damaged or another file."""
    require_file(path, "safetensors")
    try:
        with safe_open(path, "np"):
            pass  # it checks the header, and that the tensors fill the file
    except SafetensorError as error:
        why = abbreviate(str(error).removeprefix("Error while deserializing header: "))
        form = f"({path.stat().st_size} bytes) is cut off, damaged or not a safetensors file"
        raise InputError(f"{path} {form}: {why}; get it again") from None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json_object(file.read(length), f"the header of {path}")
    metadata = header.pop("__metadata__", None) or {}
    entries = {}
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = tensor["dtype"], tuple(tensor["shape"])
        if dtype not in ITEM_BYTES:
            raise InputError(f"{path}: tensor {abbreviate(name)} is {dtype}, which is not known here")
        offset = 8 + length + tensor["data_offsets"][0]
        entries[name] = Entry(name=name, dtype=dtype, shape=shape, file=path, offset=offset)
    return entries, metadata


def open_checkpoint(source: Path | list[Path]) -> Checkpoint:
    """Open the model in a file, an index.json, a folder that holds either, or a list of shards, by checked headers.

    Raise InputError for missing, damaged or surplus shards, another index, and a folder with more than one model.
    """
    if isinstance(source, list):
        checkpoint = _join(source[0].parent, source, {})
    elif source.is_dir():
        return open_checkpoint(_model_in(source))
    elif source.name.endswith(".index.json"):
        weight_map = _read_index(source)
        checkpoint = _join(source, [source.with_name(name) for name in sorted(set(weight_map.values()))], weight_map)
    else:
        checkpoint = _join(source, [source], {})
    if not checkpoint.tensors:
        raise InputError(f"{checkpoint.path} holds no tensors")
    return checkpoint


def _model_in(folder: Path) -> Path | list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    if len(indices) > 1:
        raise InputError(f"{folder} holds {len(indices)} index files ({indices[0].name}, {indices[1].name}); name one")
    if indices:
        return indices[0]
    if len(files) != 1 and not all(_SHARD.search(file.name) for file in files) or not files:
        raise InputError(f"{folder} holds {len(files)} .safetensors files and no index.json; name the model's file")
    return files[0] if len(files) == 1 else files


def _read_index(path: Path) -> dict[str, str]:
    """Return {tensor: name of a file next to the index}."""
    weight_map = read_json_object(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[^/\\]+\.safetensors", name) for name in names):
        raise InputError(f"{path} has no weight_map of tensors to files next to it; it is not an index of shards")
    return dict(weight_map or {})


def _join(path: Path, files: list[Path], weight_map: dict[str, str]) -> Checkpoint:
    """Join the tensors of all shards. Raise InputError if they differ from a weight_map that is not empty."""
    tensors: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        if (number := _SHARD.search(file.name)) and int(number[1]) != len(files):
            raise InputError(f"{file} is one of {int(number[1])} shards; {len(files)} are given: give their folder")
        entries, more = read_header(file)
        for name, entry in entries.items():
            if name in tensors:
                raise InputError(f"tensor {name} is in {tensors[name].file} and in {file}; one of them does not belong")
            if weight_map and weight_map.get(name) != file.name:
                raise InputError(f"tensor {name} is in {file}, but {path.name} says {weight_map.get(name, 'nothing')}")
            tensors[name] = entry
        metadata |= more
    if lost := [name for name in weight_map if name not in tensors]:
        raise InputError(f"tensor {lost[0]} is in {path.name} but in none of its shards ({len(lost)} such)")
    return Checkpoint(path=path, tensors=tensors, files=tuple(files), metadata=metadata)


def check_unquantised(
    base: Checkpoint,
    why: str = "most of an update would be lost. Merge into the fp32, fp16 or bf16 checkpoint and quantise the result",
) -> None:
    """Raise InputError for fp8, int8 and other quantised checkpoints, by dtype or by their scale tensors."""
    for name, entry in base.tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf in QUANTISED_LEAVES or entry.dtype not in ("F64", "F32", "F16", "BF16"):
            raise InputError(f"{entry.file} is quantised (tensor {name}, {entry.dtype}): {why}")
