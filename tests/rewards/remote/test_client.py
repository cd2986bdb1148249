"""The client of a reward server: what it sends, retries and refuses, against scripted servers."""

import math
import random
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from remote_rewards import PROMPTS, REAL, VIDEO, make_frames
from safetensors.torch import save

from rewardfl import rewards
from rewardfl.rewards.remote import RemoteReward, RewardServerError, wire
from rewardfl.rewards.remote.client import pack_requests
from rewardfl.rewards.scoring import score_safely

ANSWER = save({"score": torch.tensor([0.5, 0.25]), "valid": torch.tensor([True, True])})


@contextmanager
def scripted_server(*answers, tls=None):
    """Yield the url of a server with these answers, (status, body) or functions of the handler. tls: its context."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.close_connection = True
            answer = left.pop(0)
            answer(self) if callable(answer) else self.reply(*answer)

        def reply(self, status, body, **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with ThreadPoolExecutor(1) as pool, server:
        pool.submit(server.serve_forever, 0.01)
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
            assert not left, f"{len(left)} answers were not used"
        finally:
            server.shutdown()


def make_client(url, **settings):
    """Return a RemoteReward that notes its pauses in `pauses` instead of waiting."""
    reward = RemoteReward(**{"url": url, "timeout": 10, **settings})
    reward.pauses = []
    reward.sleep = reward.pauses.append
    return reward


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
    assert result.problems[0].startswith(start) and f"whether {reward.url}/health answers" in result.problems[0]
    assert [0.25 * 2**i <= pause <= 0.75 * 2**i for i, pause in enumerate(reward.pauses)] == [True] * 3
    assert random.getstate() == state, "the training's random numbers"


def cut_off(handler):
    handler.reply(200, ANSWER, **{"Content-Length": "100000"})


@pytest.mark.parametrize("fault", [(502, b"{}"), cut_off, lambda handler: handler.wfile.write(b"SSH-2")])
def test_an_error_of_the_server_is_tried_again(fault):
    with scripted_server(fault, lambda handler: handler.connection.close(), (200, ANSWER)) as url:
        reward = make_client(url)
        assert score_two(reward).score.tolist() == [0.5, 0.25]
        assert len(reward.pauses) == 2


@pytest.mark.parametrize("status", [302, 404])
def test_a_refusal_is_not_tried_again(status):
    refusal, elsewhere = b"no\n\x1b[31m" + b"x" * 5000, {"Location": "http://127.0.0.1:1/"}
    with scripted_server(lambda handler: handler.reply(status, refusal, **elsewhere)) as url:
        reward = make_client(url)
        message = rf"settings.url {url}: POST /score: status {status}: no \\x1b\[31mx{{5}}"
        with pytest.raises(RewardServerError, match=message) as error:
            score_two(reward)
        assert not reward.pauses and str(error.value).isprintable() and len(str(error.value)) < 1500


def test_a_malformed_answer_is_not_tried_again():
    with scripted_server((200, b"<html>hello</html>")) as url:
        reward = make_client(url)
        with pytest.raises(RewardServerError, match=f"{url}: the answer to 2 clips breaks the format: not safetensors"):
            score_two(reward)
        assert not reward.pauses


@pytest.mark.parametrize(
    ("setting", "values"),
    {
        "url": [None, "127.0.0.1:8400", "http://", "ftp://host", "http://host:port", "http://user:secret@host"]
        + ["http://host/?x=1", "http://host/a b"],
        "timeout": [0, math.inf],
        "frames": [0, "some", 1.5],
        "token_env": [5, "NOT_SET", "EMPTY", "TWO_LINES", "NOT_ASCII"],
    }.items(),
)
def test_wrong_settings_are_refused(setting, values, monkeypatch):
    for name, token in {"EMPTY": "", "TWO_LINES": "a\nX: y", "NOT_ASCII": "ä"}.items():
        monkeypatch.setenv(name, token)
    for value in values:
        with pytest.raises(ValueError, match=rf"^settings.{setting} must be .*, got [^\n]*$"):
            rewards.build("remote", {"url": "http://127.0.0.1:8400", setting: value})


def test_certificates_are_checked(tmp_path):
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = {"keyout": tmp_path / "key", "out": tmp_path / "certificate"}
    subprocess.run([*make.split(), "-keyout", files["keyout"], "-out", files["out"]], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["out"], files["keyout"])
    with scripted_server((200, ANSWER), tls=tls) as url:
        reward = make_client(url, retries=0)
        with pytest.raises(RewardServerError, match="CERTIFICATE_VERIFY_FAILED"):
            score_two(reward)
        reward._tls.load_verify_locations(files["out"])
        assert score_two(reward).valid.all()


def test_a_batch_is_split_by_the_bytes_of_its_requests():
    clips = {i: wire.Clip(frames, "x") for i, frames in enumerate(make_frames(5, (1, 10, 10)))}
    sizes = [len(wire.pack_request(list(clips.values())[:count])) for count in range(1, 6)]
    for limit, groups in ((sizes[4], [[0, 1, 2, 3, 4]]), (sizes[4] - 1, [[0, 1], [2, 3, 4]])):
        requests = list(pack_requests([*clips], clips, limit, "p"))
        assert [group for group, _ in requests] == groups and all(len(body) <= limit for _, body in requests)
    with pytest.raises(ValueError, match=f"p.max_bytes is {sizes[0] - 1}, .* one clip has {sizes[0]} bytes; raise it"):
        list(pack_requests([*clips], clips, sizes[0] - 1, "p"))
