"""The wire format of a reward server and its clients: safetensors and JSON over HTTP, never pickle.

    POST /score    body: safetensors (application/x-safetensors), at most as many bytes as the server allows
                   "video"          (B, F, H, W, 3) uint8, RGB: the clips to score, in [0, 255]
                   "reference.<i>"  (F', H', W', 3) uint8, RGB, optional: the real clip behind clip i
                   metadata key "request": {"version": 1, "prompts": [B strings]} as JSON
             200   body: safetensors
                   "score"          (B,) float32
                   "valid"          (B,) uint8 or bool; where it is 0 the score means nothing
                   "part.<name>"    (B,) float32, any number of them, for the log; NaN where not measured
    GET /health
             200   JSON {"status": "ok", "reward": <name>, "version": 1, "max_bytes": <of a request's body>}
    errors   JSON {"error": <the problem and advice>} with status
             400 malformed, 401 no or a wrong token, 404 no such path, 405 another method, 413 beyond max_bytes,
             500 the reward failed, 503 too many connections: ask again

A server scores one request after another. A server with a token requires `Authorization: Bearer <token>` on /score;
/health is open.

This file imports only torch and safetensors, so that a server in another environment can use a copy of it.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

WIRE_VERSION = 1
CONTENT_TYPE = "application/x-safetensors"
# The library accepts headers of 100 MB, which take gigabytes once parsed; ours hold a few names and the prompts.
MAX_HEADER_BYTES = 1 << 22


class WireError(ValueError):
    """A body breaks the format; the message names the problem."""


@dataclass(frozen=True)
class Clip:
    """One sample of a request. The frames of all clips of a request have one shape."""

    frames: Tensor  # (F, H, W, 3) uint8 RGB
    prompt: str
    reference: Tensor | None = None  # (F', H', W', 3) uint8 RGB


def pack_request(clips: Sequence[Clip]) -> bytes:
    """Return the body of POST /score for one or more clips."""
    tensors = {"video": torch.stack([clip.frames for clip in clips])}
    for i, clip in enumerate(clips):
        if clip.reference is not None:
            tensors[f"reference.{i}"] = clip.reference.contiguous()
    request = {"version": WIRE_VERSION, "prompts": [clip.prompt for clip in clips]}
    return save(tensors, {"request": json.dumps(request, ensure_ascii=False)})


def unpack_request(body: bytes) -> list[Clip]:
    """Return the clips of a request; raise WireError for a body that breaks the format."""
    tensors, metadata = _read(body)
    video = _take(tensors, "video", ("B", "F", "H", "W", 3), torch.uint8)
    names = [f"reference.{i}" for i in range(len(video))]
    references = [_take(tensors, name, ("F", "H", "W", 3), torch.uint8) if name in tensors else None for name in names]
    return [Clip(*parts) for parts in zip(video, _prompts(metadata, len(video)), references, strict=True)]


def pack_answer(score: Tensor, valid: Tensor, parts: dict[str, Tensor]) -> bytes:
    """Return the body of the response; all tensors are (B,)."""
    tensors = {"score": score.float(), "valid": valid.to(torch.uint8)}
    tensors |= {f"part.{name}": values.float() for name, values in parts.items()}
    return save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})


def unpack_answer(body: bytes, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return score (B,) float32, valid (B,) bool and parts of `count` clips; raise WireError for another body.

    A score that is not finite makes its clip invalid. An invalid clip scores 0.
    """
    tensors, _ = _read(body)
    score = _take(tensors, "score", (count,), torch.float32)
    valid = _take(tensors, "valid", (count,), torch.uint8, torch.bool).bool() & score.isfinite()
    names = [name for name in sorted(tensors) if name.startswith("part.")]
    parts = {name.removeprefix("part."): _take(tensors, name, (count,), torch.float32) for name in names}
    return score.where(valid, 0), valid, parts


def _read(body: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of safetensors bytes and their metadata; raise WireError for other bytes."""
    size = int.from_bytes(body[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise WireError(f"a safetensors header of {size} bytes; at most {MAX_HEADER_BYTES} are taken")
    try:
        tensors = load(body)  # it checks offsets, shapes against bytes, and the header's JSON
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not know
        raise WireError(f"not safetensors: {error}") from None
    return tensors, json.loads(body[8 : 8 + size]).get("__metadata__", {})


def _prompts(metadata: dict[str, str], count: int) -> list[str]:
    text = metadata.get("request", "nothing")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        request = json.loads(text)
        if request["version"] == WIRE_VERSION and [type(prompt) for prompt in request["prompts"]] == [str] * count:
            return list(request["prompts"])
    expected = f"JSON with version {WIRE_VERSION} and prompts, {count} strings"
    raise WireError(f"metadata key 'request' must be {expected}, got {text[:80]}")


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int | str, ...], *dtypes: torch.dtype) -> Tensor:
    """Remove and return a tensor. Raise WireError for another dtype or shape; a name in `shape` stands for a length."""
    if name not in tensors:
        raise WireError(f"tensor {name!r} is missing")
    tensor = tensors.pop(name)
    sizes = tuple(n if isinstance(size, int) else size for size, n in zip(shape, tensor.shape, strict=False))
    if tensor.numel() and tensor.dtype in dtypes and tensor.ndim == len(shape) and sizes == shape:
        return tensor
    expected = f"({', '.join(map(str, shape))}) {' or '.join(map(str, dtypes))} without empty axes"
    actual = f"{tuple(tensor.shape)} {tensor.dtype}"
    raise WireError(f"tensor {name!r} must be {expected}, got {actual}".replace("torch.", ""))
