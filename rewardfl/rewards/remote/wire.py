"""What a reward server and its clients say to each other: safetensors and JSON over HTTP, never pickle.

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
    errors   JSON {"error": <what is wrong and what to do>} with status
             400 malformed, more than MAX_CLIPS clips or MAX_FRAMES frames, 401 no or a wrong token, 404 no such path,
             405 another method, 413 beyond max_bytes, 415 another content type, 500 the reward failed,
             503 busy (with Retry-After), shutting down or a body too slow: ask again

A server holds a few bodies in memory, PLACES here, and lets the other requests wait; 503 with `Retry-After: <seconds>`
tells a client that there was no place in time.

A server with a token wants `Authorization: Bearer <token>` on /score; /health is open. This file imports torch and
safetensors alone: a server in an environment of its own can be built on a copy of it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

VERSION = 1
PLACES = 4  # bodies that a server holds at a time: one is scored, the next ones arrive meanwhile
MAX_CLIPS = 256  # of one request
MAX_FRAMES = 16_384  # of one request, those of the real clips counted too: a reward may take its time for each
CONTENT_TYPE = "application/x-safetensors"
# The library takes headers of 100 MB, which cost gigabytes once parsed; ours hold a few names and the prompts.
MAX_HEADER_BYTES = 1 << 22
DTYPES = {"U8": torch.uint8, "BOOL": torch.bool, "F32": torch.float32}  # all that the format uses


class WireError(ValueError):
    """A body that is not what it should be; the message says what is wrong."""


@dataclass(frozen=True)
class Clip:
    """What is sent of one sample. The clips of one request have frames of one shape."""

    frames: Tensor  # (F, H, W, 3) uint8 RGB
    prompt: str
    reference: Tensor | None = None  # (F', H', W', 3) uint8 RGB

    @property
    def nbytes(self) -> int:
        """At most so many bytes of a request's body."""
        pixels = self.frames.nbytes + (0 if self.reference is None else self.reference.nbytes)
        # A control character takes 7 bytes once escaped in JSON that is a string in JSON; "reference.<i>" about 150.
        return pixels + 7 * len(self.prompt.encode()) + 200

    @property
    def frame_count(self) -> int:
        return len(self.frames) + (0 if self.reference is None else len(self.reference))


ENVELOPE_BYTES = 400  # of a request's body beside its clips


def pack_request(clips: Sequence[Clip]) -> bytes:
    """The body of POST /score for one or more clips."""
    tensors = {"video": torch.stack([clip.frames for clip in clips])}
    for i, clip in enumerate(clips):
        if clip.reference is not None:
            tensors[f"reference.{i}"] = clip.reference.contiguous()
    request = {"version": VERSION, "prompts": [clip.prompt for clip in clips]}
    return save(tensors, {"request": json.dumps(request, ensure_ascii=False)})


def unpack_request(body: bytes) -> list[Clip]:
    """The clips of a request; WireError for anything that is not as the format says."""
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
        raise WireError(f"unknown tensor {min(tensors)!r}: beside 'video' there is reference.0 .. {len(video) - 1}")
    clips = [Clip(*parts) for parts in zip(video, prompts, references.values(), strict=True)]
    if (frames := sum(clip.frame_count for clip in clips)) > MAX_FRAMES:
        raise WireError(f"{frames} frames; at most {MAX_FRAMES} are taken in one request")
    return clips


def pack_answer(score: Tensor, valid: Tensor, parts: dict[str, Tensor]) -> bytes:
    """The body of the answer: all tensors (B,)."""
    tensors = {"score": score.float(), "valid": valid.to(torch.uint8)}
    tensors |= {f"part.{name}": values.float() for name, values in parts.items()}
    return save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})


def unpack_answer(body: bytes, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """score (B,) float32, valid (B,) bool, parts of `count` clips; WireError for anything but that.

    A score that is not finite makes its clip invalid, and an invalid clip scores 0.
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
    """The tensors of safetensors bytes, of the format's dtypes, and their metadata; WireError for anything else."""
    size = int.from_bytes(body[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise WireError(f"a safetensors header of {size} bytes; at most {MAX_HEADER_BYTES} are taken")
    try:
        # checks offsets, shapes against bytes, and that the header is JSON of the right form
        entries = safetensors.deserialize(body)
    except safetensors.SafetensorError as error:
        raise WireError(f"not safetensors: {error}") from None
    header = json.loads(body[8 : 8 + size])
    return {name: _tensor(name, entry) for name, entry in entries}, header.get("__metadata__", {})


def _tensor(name: str, entry: dict) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise WireError(f"tensor {name!r} has dtype {entry['dtype']}; the format knows {', '.join(DTYPES)}")
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    if not entry["data"]:  # which torch.frombuffer refuses
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(entry["data"], dtype=dtype).reshape(shape)


def _prompts(metadata: dict[str, str], count: int) -> list[str]:
    if "request" not in metadata:
        raise WireError("the metadata lack the key 'request'")
    try:
        request = json.loads(metadata["request"])
    except (ValueError, RecursionError) as error:
        raise WireError(f"metadata key 'request' is not JSON: {error}") from None
    if not isinstance(request, dict) or request.get("version") != VERSION:
        raise WireError(f"metadata key 'request' must be an object with version {VERSION}, got {str(request)[:80]}")
    prompts = request.get("prompts")
    if not isinstance(prompts, list) or len(prompts) != count or not all(isinstance(text, str) for text in prompts):
        raise WireError(f"'prompts' in metadata key 'request' must be {count} strings, got {str(prompts)[:80]}")
    return prompts


def _values(tensors: dict[str, Tensor], name: str, count: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    values = tensors.get(name)
    if values is None or values.shape != (count,) or values.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise WireError(f"tensor {name!r} must be ({count},) {wanted}, got {_describe(values)}")
    return values


def _are_frames(frames: Tensor, dims: int) -> bool:
    return frames.ndim == dims and frames.shape[-1] == 3 and math.prod(frames.shape) > 0


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
