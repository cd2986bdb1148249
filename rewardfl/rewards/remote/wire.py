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
             400 malformed, more than MAX_CLIPS clips or MAX_FRAMES frames, 401 no or a wrong token, 404 no such path,
             405 another method, 413 beyond max_bytes, 415 another content type, 500 the reward failed,
             503 busy (with Retry-After), shutting down or a body too slow: ask again

A server holds PLACES bodies in memory and lets other requests wait; one that waited too long gets 503 with
`Retry-After: <seconds>`. A server with a token requires `Authorization: Bearer <token>` on /score; /health is open.

This file imports only torch and safetensors, so that a server in another environment can use a copy of it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

WIRE_VERSION = 1

MAX_BODIES = 4  # bodies that a server holds at a time: one is scored while the next ones arrive

MAX_CLIPS = 256  # of one request

MAX_FRAMES = 16_384  # of one request, real clips included: a limit of the time that scoring takes

CONTENT_TYPE = "application/x-safetensors"

ENVELOPE_BYTES = 400  # of a request's body without its clips

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

    @property
    def nbytes(self) -> int:
        """Return an upper bound of the clip's bytes in a request's body."""
        pixels = self.frames.nbytes + (0 if self.reference is None else self.reference.nbytes)
        # a control character takes 7 bytes, escaped in JSON within JSON; the header of "reference.<i>" about 150
        return pixels + 7 * len(self.prompt.encode()) + 200

    @property
    def frame_count(self) -> int:
        return len(self.frames) + (0 if self.reference is None else len(self.reference))


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
    video = tensors.pop("video", None)
    if video is None or video.dtype != torch.uint8 or not _are_frames(video, 5):
        raise WireError(f"tensor 'video' must be (B, F, H, W, 3) uint8 without empty axes, got {_describe(video)}")
    if len(video) > MAX_CLIPS:
        raise WireError(f"{len(video)} clips; at most {MAX_CLIPS} are taken in one request")
    prompts = _prompts(metadata, len(video))
    references = {f"reference.{i}": tensors.pop(f"reference.{i}", None) for i in range(len(video))}
    for name, reference in references.items():
        if reference is not None and (reference.dtype != torch.uint8 or not _are_frames(reference, 4)):
            raise WireError(f"tensor {name!r} must be (F, H, W, 3) uint8, got {_describe(reference)}")
    if tensors:
        raise WireError(f"unknown tensor {min(tensors)!r}: next to 'video' there is reference.0 .. {len(video) - 1}")
    clips = [Clip(*parts) for parts in zip(video, prompts, references.values(), strict=True)]
    if (frames := sum(clip.frame_count for clip in clips)) > MAX_FRAMES:
        raise WireError(f"{frames} frames; at most {MAX_FRAMES} are taken in one request")
    return clips


def pack_answer(score: Tensor, valid: Tensor, parts: dict[str, Tensor]) -> bytes:
    """Return the body of the answer; all tensors are (B,)."""
    tensors = {"score": score.float(), "valid": valid.to(torch.uint8)}
    tensors |= {f"part.{name}": values.float() for name, values in parts.items()}
    return save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})


def unpack_answer(body: bytes, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return score (B,) float32, valid (B,) bool and parts of `count` clips; raise WireError for another body.

    A score that is not finite makes its clip invalid. An invalid clip scores 0.
    """
    tensors, _ = _read(body)
    score = _values(tensors, "score", count, (torch.float32,))
    valid = _values(tensors, "valid", count, (torch.uint8, torch.bool)).bool() & score.isfinite()
    parts = {}
    for name in sorted(tensors.keys() - {"score", "valid"}):
        if not name.startswith("part."):
            raise WireError(f"unknown tensor {name!r}: there is score, valid and part.<name>")
        parts[name.removeprefix("part.")] = _values(tensors, name, count, (torch.float32,))
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
    try:
        request = json.loads(metadata["request"])
        version, prompts = request["version"], request["prompts"]
    except (ValueError, LookupError, TypeError, RecursionError):
        version, prompts = None, []
    is_list = isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts)
    if version != WIRE_VERSION or not is_list or len(prompts) != count:
        raise WireError(
            f"metadata key 'request' must be JSON with version {WIRE_VERSION} and prompts, {count} strings, got "
            f"{metadata.get('request', 'nothing')[:80]}"
        )
    return list(prompts)


def _values(tensors: dict[str, Tensor], name: str, count: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    values = tensors.get(name)
    if values is None or values.shape != (count,) or values.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise WireError(f"tensor {name!r} must be ({count},) {names}, got {_describe(values)}")
    return values


def _are_frames(frames: Tensor, dims: int) -> bool:
    return frames.ndim == dims and frames.shape[-1] == 3 and math.prod(frames.shape) > 0


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
