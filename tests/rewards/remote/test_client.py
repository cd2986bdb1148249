"""The client of a reward server: what it sends, retries and refuses."""

import random
import socket
import ssl
from contextlib import closing

import httpx
import pytest
import torch
from remote_rewards import PROMPTS, REAL, VIDEO, make_client, make_frames
from safetensors.torch import save

from rewardfl import rewards
from rewardfl.rewards.remote import RewardServerError, wire
from rewardfl.rewards.remote.client import pack_requests
from rewardfl.rewards.scoring import score_safely

ANSWER = save({"score": torch.tensor([0.5, 0.25]), "valid": torch.tensor([True, True])})


@pytest.fixture
def responses(monkeypatch):
    """Yield the responses of the server, httpx.Response or an exception; all must be used."""
    left = []

    def post(url, *, content, headers, timeout, verify, trust_env):
        assert url == "http://host/score" and headers["Content-Type"] == wire.CONTENT_TYPE and timeout == 10
        assert verify.verify_mode == ssl.CERT_REQUIRED and verify.check_hostname and not trust_env
        response = left.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    monkeypatch.setattr(httpx, "post", post)
    yield left
    assert not left


def score_two(reward):
    return reward(VIDEO[:2], [reward.reference(*pair) for pair in zip(REAL[:2], PROMPTS[:2], strict=True)])


def test_a_server_that_is_down_fails_every_sample_at_once():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    reward = make_client(f"http://127.0.0.1:{port}", retries=3)
    state = random.getstate()
    result = score_safely(reward, VIDEO, [reward.reference(real, "") for real in REAL])
    assert result.failed.all()
    start = f"ServerUnavailableError: settings.url {reward.url}: POST /score failed 4 times; the last time: ConnectErr"
    assert result.problems[0].startswith(start) and f"whether {reward.url}/health replies" in result.problems[0]
    assert [0.25 * 2**i <= pause <= 0.75 * 2**i for i, pause in enumerate(reward.pauses)] == [True] * 3
    assert random.getstate() == state, "the training's random numbers"


def test_an_error_of_the_server_is_tried_again(responses):
    errors = httpx.RemoteProtocolError("cut off"), httpx.ReadTimeout("late"), httpx.Response(502)
    responses.extend([*errors, httpx.Response(200, content=ANSWER)])
    reward = make_client("http://host/")
    assert score_two(reward).score.tolist() == [0.5, 0.25]
    assert len(reward.pauses) == 3


@pytest.mark.parametrize(
    "status, body, message",
    [
        (302, b"", "POST /score: status 302: $"),
        (404, b"no\n\x1b[31m" + b"x" * 5000, r"POST /score: status 404: no \\x1b\[31mx{5}"),
        (200, b"<html>hello</html>", "the response breaks the format: a safetensors header of"),
    ],
)
def test_a_refusal_is_not_tried_again(responses, status, body, message):
    responses.append(httpx.Response(status, content=body))
    reward = make_client("http://host")
    with pytest.raises(RewardServerError, match=f"^settings.url http://host: {message}") as error:
        score_two(reward)
    assert not reward.pauses and str(error.value).isprintable() and len(str(error.value)) < 1500


@pytest.mark.parametrize(
    ("setting", "values"),
    {
        "url": ["127.0.0.1:8400", "ftp://host", "http://host:port", "http://user:secret@host", "http://host/?x=1"],
        "frames": [0, "some"],
        "token_env": ["NOT_SET", "TWO_LINES"],
    }.items(),
)
def test_wrong_settings_are_refused(setting, values, monkeypatch):
    monkeypatch.setenv("TWO_LINES", "a\nX: y")
    for value in values:
        with pytest.raises(ValueError, match=rf"^settings.{setting} must be .*, got [^\n]*$"):
            rewards.build("remote", {"url": "http://127.0.0.1:8400", setting: value})


def test_a_batch_is_split_by_the_bytes_of_its_requests():
    clips = {i: wire.Clip(frames, "x") for i, frames in enumerate(make_frames(5, (1, 10, 10)))}
    sizes = [len(wire.pack_request(list(clips.values())[:count])) for count in range(1, 6)]
    for limit, groups in ((sizes[4], [[0, 1, 2, 3, 4]]), (sizes[4] - 1, [[0, 1], [2, 3, 4]])):
        requests = list(pack_requests(clips, limit, "p"))
        assert [group for group, _ in requests] == groups and all(len(body) <= limit for _, body in requests)
    with pytest.raises(ValueError, match=f"p.max_bytes is {sizes[0] - 1}, .* one clip has {sizes[0]} bytes; raise it"):
        list(pack_requests(clips, sizes[0] - 1, "p"))
