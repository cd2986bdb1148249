"""The wire format: its bytes, and bodies that break it."""

import json
import math

import pytest
import torch
from remote_rewards import make_frames
from safetensors.torch import save

from rewardfl.rewards.remote import wire

# the bytes of version 1: a request and a response
REQUEST = (
    b'\xd8\0\0\0\0\0\0\0{"__metadata__":{"request":"{\\"version\\": 1, \\"prompts\\": [\\"\xc3\xa4\\\\\\"\\\\n\\"]}"},'
    b'"reference.0":{"dtype":"U8","shape":[1,1,1,3],"data_offsets":[0,3]},'
    b'"video":{"dtype":"U8","shape":[1,2,1,1,3],"data_offsets":[3,9]}}       \x80\x80\x80\x00f\xcc3\x99\xff'
)
ANSWER = (
    b'\xb0\0\0\0\0\0\0\0{"part.x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"score":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},'
    b'"valid":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}}    \0\0\0@\0\0\0?\x01'
)


def test_the_bytes_of_version_1_stay():
    (clip,) = wire.unpack_request(REQUEST)
    assert clip.prompt == 'ä"\n' and clip.frames.shape == (2, 1, 1, 3) and clip.reference.tolist() == [[[[128] * 3]]]
    assert wire.pack_request([clip]) == REQUEST
    score, valid, parts = wire.unpack_answer(ANSWER, 1)
    assert (score.tolist(), valid.tolist(), parts["x"].tolist()) == ([0.5], [True], [2.0])
    assert wire.pack_answer(score, valid, parts) == ANSWER


def make_request(request=None, count=2, **tensors):
    """Return a body of POST /score with `count` clips."""
    tensors = {"video": make_frames(count, (1, 1, 1))} | {
        key.replace("_", "."): value for key, value in tensors.items()
    }
    return save(tensors, {"request": json.dumps(request or {"version": 1, "prompts": ["a"] * count})})


F4 = b'{"video":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'  # a type that torch does not know
MALFORMED = [
    (len(F4).to_bytes(8, "little") + F4 + b"1", "not safetensors: 'F4'"),
    (b"<html>hello</html>", "a safetensors header of"),
    (save({"clip": make_frames(2)}), "tensor 'video' is missing"),
    (make_request(video=make_frames(2).float()), "'video' must be .* got .* float32"),
    (make_request(video=make_frames(2)[:0]), "'video' must be .* without empty axes"),
    (make_request(reference_0=make_frames(2)), r"'reference.0' must be \(F, H, W, 3\)"),
    (save({"video": make_frames(2)}, {"request": "[" * 100_000}), "must be JSON with version 1"),
    (make_request({"version": 2, "prompts": ["a", "b"]}), "must be JSON with version 1"),
    *((make_request({"version": 1, "prompts": it}), "prompts, 2 strings, got") for it in (["a"], 5, ["a", 1])),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED)
def test_a_malformed_request_is_refused(body, message):
    with pytest.raises(wire.WireError, match=message):
        wire.unpack_request(body)


def make_answer(**tensors):
    """Return a response for two clips, as a server might send it."""
    tensors = {"score": (0.5, 0.25), "valid": (True, True)} | tensors
    return save({name.replace("_", ".", 1): torch.as_tensor(value) for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (make_answer(score=(0.5,)), r"tensor 'score' must be \(2\) float32 .*, got \(1,\) float32"),
        (save({"score": torch.zeros(2)}), "tensor 'valid' is missing"),
        (make_answer(part_x=(1, 2)), r"tensor 'part.x' must be \(2\) float32 .*, got \(2,\) int64"),
    ],
)
def test_a_malformed_answer_is_refused(body, message):
    with pytest.raises(wire.WireError, match=message):
        wire.unpack_answer(body, 2)


def test_a_score_that_is_not_finite_is_invalid():
    score, valid, _ = wire.unpack_answer(make_answer(score=(math.nan, 0.5)), 2)
    assert (score.tolist(), valid.tolist()) == ([0, 0.5], [False, True])
