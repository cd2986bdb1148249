"""Remote rewards: the same scores as at home, and what happens when the server is down, slow, wary or lies."""

import json
import logging
import math
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from conftest import ROOT
from remote_rewards import Likeness
from safetensors.torch import save

from rewardfl import command_line, data, reward_server, rewards
from rewardfl.reward_server import server
from rewardfl.reward_server.server import RewardServer
from rewardfl.rewards.remote import RemoteReward, RewardServerError, wire
from rewardfl.rewards.remote.client import pack_requests
from rewardfl.rewards.remote.wire import Clip, WireError
from rewardfl.rewards.scoring import score_safely
from rewardfl_tools import serve_reward

PROMPTS = ["a person, talking", "", "eine Frau in München", "他在说话", 'quotes " and \\ and \x01']
MB = 1_000_000


def frames(count, shape=(4, 6, 8), seed=0):
    """(count, F, H, W, 3) uint8; the first pixel bright, so that Likeness calls them valid."""
    made = torch.randint(0, 256, (count, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    made[:, 0, 0, 0] = 200
    return made


def videos(made):
    return torch.stack([data.to_float(clip) for clip in made]).contiguous()


VIDEO, REAL = videos(frames(5)), videos(frames(5, (5, 4, 6), seed=1))


@contextmanager
def serving(reward, batch=2, max_bytes=10 * MB, token=""):
    serves = RewardServer(("127.0.0.1", 0), reward, "cpu", batch, max_bytes, token)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(serves.run)
        try:
            yield f"http://127.0.0.1:{serves.address[1]}"
        finally:
            serves.stop()
            running.result(20)


@contextmanager
def scripted(*answers, tls=None):
    """The url of a server whose answers are the (status, body) or functions of the handler given. tls: its context."""
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


def remote(url, **settings):
    """A RemoteReward that notes its waits in `waits` instead of waiting."""
    reward = RemoteReward(**{"url": url, "timeout": 10, **settings})
    reward.waits = []
    reward.sleep = reward.waits.append
    return reward


def score(reward, video=VIDEO, prompts=PROMPTS):
    return reward(video, [reward.reference(real, prompt) for real, prompt in zip(REAL, prompts, strict=False)])


def at_home(video=VIDEO, prompts=PROMPTS, real=REAL):
    reward = Likeness()
    return reward(video, [reward.reference(*each) for each in zip(real, prompts, strict=True)])


def assert_same(output, expected):
    """Compare bit for bit. No score may be counted as not finite."""
    assert not output.parts.pop("nonfinite", torch.zeros(1)).any()
    torch.testing.assert_close(vars(output), vars(expected), rtol=0, atol=0, equal_nan=True)


def answer_of(**tensors):
    """Return a body of POST /score's answer as a server might make it."""
    tensors = {"score": (0.5, 0.25), "valid": (True, True)} | tensors
    return save({name.replace("_", ".", 1): torch.as_tensor(value) for name, value in tensors.items()})


@pytest.mark.parametrize("max_bytes", [400 * MB, 1300], ids=["one request", "split"])
@pytest.mark.parametrize("send_reference", [False, True])
def test_scores_are_those_at_home_bit_for_bit(send_reference, max_bytes):
    likeness = Likeness()
    with serving(likeness) as url:
        output = score(remote(url, send_reference=send_reference, max_bytes=max_bytes))
    real = REAL if send_reference else REAL[:, :, :0]
    assert_same(output, at_home(real=real))
    assert set(output.parts) == {"mean", "real"} and output.valid.all()
    assert output.parts["real"].isnan().all() != send_reference
    assert sum(likeness.batches) == 5 and max(likeness.batches) <= 2
    assert (len(likeness.batches) == 3) == (max_bytes > 1300)


def test_invalid_samples_score_zero_and_the_others_as_if_alone():
    """The same from what a waiting call holds: the frames that are sent, one byte a channel."""
    video, prompts = videos(frames(5)), PROMPTS.copy()
    video[1, 0, 0, 0, 0] = -1  # the server's own word for invalid
    video[2, 1, 2, 1, 1] = float("nan")  # never sent
    prompts[4] = "not finite"
    with serving(Likeness()) as url:
        reward = remote(url, frames=2)
        references = [None, *(reward.reference(*pair) for pair in zip(REAL[1:], prompts[1:], strict=True))]
        pixels, left = reward.held(video, references)
        outputs = reward(video, references), reward(pixels, left)
    assert pixels.dtype == torch.uint8 and pixels.shape == (5, 2, 6, 8, 3) and pixels.device.type == "cpu"
    assert [one is None for one in left] == [True, False, True, False, False]
    for output in outputs:
        assert output.valid.tolist() == [False, False, False, True, False]
        assert output.score[~output.valid].tolist() == [0, 0, 0, 0]
        assert output.score[3] == at_home(video[:, :, ::2].contiguous(), real=REAL[:, :, :0]).score[3]
        assert output.parts["mean"].isnan().tolist() == [True, True, True, False, True]


def test_down():
    """The server is down for each sample, so they are not tried one by one."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    reward = remote(f"http://127.0.0.1:{port}", retries=3)
    state = random.getstate()
    result = score_safely(reward, VIDEO, [reward.reference(real, "") for real in REAL])
    assert result.failed.all()
    start = f"ServerUnavailableError: settings.url {reward.url}: POST /score failed 4 times; the last time: ConnectErr"
    assert result.problems[0].startswith(start) and f"whether {reward.url}/health answers" in result.problems[0]
    assert [0.25 * 2**i <= wait <= 0.75 * 2**i for i, wait in enumerate(reward.waits)] == [True] * 3
    assert random.getstate() == state, "the training's random numbers"


def cut_off(handler):
    handler.reply(200, answer_of(), **{"Content-Length": "100000"})


@pytest.mark.parametrize("fault", [(502, b"{}"), cut_off, lambda handler: handler.wfile.write(b"SSH-2")])
def test_an_error_of_the_server_is_tried_again(fault):
    with scripted(fault, lambda handler: handler.connection.close(), (200, answer_of())) as url:
        reward = remote(url)
        assert score(reward, VIDEO[:2], PROMPTS[:2]).score.tolist() == [0.5, 0.25]
        assert len(reward.waits) == 2


def test_a_reward_that_fails_may_do_so_for_one_sample():
    said = "status 500: reward likeness failed: RuntimeError: no memory for that"
    with serving(Likeness()) as url:
        reward = remote(url, retries=1)
        references = [reward.reference(*each) for each in zip(REAL, ["a", "b", "fails", "c", "d"], strict=True)]
        result = score_safely(reward, VIDEO, references)
    assert result.failed.tolist() == [False, False, True, False, False]
    assert "failed 2 times" in result.problems[0] and said in result.problems[0] and len(reward.waits) == 2


def test_a_reward_that_compares_is_refused_a_request_without_real_clips():
    with serving(rewards.build("motion", {})) as url:
        with pytest.raises(RewardServerError, match="status 400: .* real clip; set the client's send_reference: true"):
            score(remote(url))
        assert score(remote(url, send_reference=True)).valid.all()


@pytest.mark.parametrize("status", [302, 404])
def test_a_refusal_is_not_tried_again(status):
    """What it says is one line of the message, without escapes."""
    refusal = json.dumps({"error": "no\n\x1b[31m" + "x" * 5000}).encode()
    elsewhere = {"Location": "http://127.0.0.1:1/"}
    with scripted(lambda handler: handler.reply(status, refusal, **elsewhere)) as url:
        reward = remote(url)
        said = rf"settings.url {url}: POST /score: status {status}: no\\n\\x1b\[31mx{{5}}"
        with pytest.raises(RewardServerError, match=said) as error:
            score(reward, VIDEO[:1], PROMPTS[:1])
        assert not reward.waits and str(error.value).isprintable() and len(str(error.value)) < 1500


def test_unauthorised(monkeypatch):
    monkeypatch.setenv("MINE", "wrong-token")
    with serving(Likeness(), token="right-token") as url:
        for settings in ({}, {"token_env": "MINE"}):
            reward = remote(url, **settings)
            with pytest.raises(RewardServerError, match="status 401: .*; set the client.s token_env") as error:
                score(reward)
            assert not reward.waits and "wrong-token" not in str(error.value)
        monkeypatch.setenv("MINE", "right-token")
        assert score(remote(url, token_env="MINE")).valid.all()


def test_too_big_for_the_client_and_for_the_server():
    with serving(Likeness(), max_bytes=1500) as url:
        with pytest.raises(ValueError, match=r"settings.max_bytes is 700, .* one clip has \d+ bytes; raise it, or"):
            score(remote(url, max_bytes=700))
        with pytest.raises(RewardServerError, match="status 413: .* more than 1500 bytes .*; lower .* max_bytes"):
            score(remote(url))
        assert score(remote(url, max_bytes=1500)).valid.all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (answer_of(score=(0.5,)), r"tensor 'score' must be \(2\) float32 .*, got \(1,\) float32"),
        (save({"score": torch.zeros(2)}), "tensor 'valid' must be .* got none"),
        (answer_of(part_x=(1, 2)), r"tensor 'part.x' must be \(2\) float32 .*, got \(2,\) int64"),
        (answer_of(other=(0.0, 0.0)), "unknown tensor 'other'"),
        (b"<html>hello</html>", "a safetensors header of"),
    ],
)
def test_lies(body, message):
    with scripted((200, body)) as url:
        reward = remote(url)
        with pytest.raises(RewardServerError, match=f"{url}: the answer to 2 clips breaks the format: .*{message}"):
            score(reward, VIDEO[:2], PROMPTS[:2])
        assert not reward.waits


def test_a_score_that_is_not_finite_is_invalid():
    score, valid, _ = wire.unpack_answer(answer_of(score=(math.nan, 0.5)), 2)
    assert (score.tolist(), valid.tolist()) == ([0, 0.5], [False, True])


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
def test_settings_that_cannot_work(setting, values, monkeypatch):
    for name, token in {"EMPTY": "", "TWO_LINES": "a\nX: y", "NOT_ASCII": "ä"}.items():
        monkeypatch.setenv(name, token)
    for value in values:
        with pytest.raises(ValueError, match=rf"^settings.{setting} must be .*, got [^\n]*$"):
            rewards.build("remote", {"url": "http://127.0.0.1:8400", setting: value})


def test_https_is_spoken_and_certificates_are_checked(tmp_path):
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = {"keyout": tmp_path / "key", "out": tmp_path / "certificate"}
    subprocess.run([*make.split(), "-keyout", files["keyout"], "-out", files["out"]], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["out"], files["keyout"])
    with scripted((200, answer_of()), tls=tls) as url:
        reward = remote(url, retries=0)
        with pytest.raises(RewardServerError, match="CERTIFICATE_VERIFY_FAILED"):
            score(reward, VIDEO[:2], PROMPTS[:2])
        reward._tls.load_verify_locations(files["out"])
        assert score(reward, VIDEO[:2], PROMPTS[:2]).valid.all()


# What version 1 said before its server and client were rebuilt on libraries: a client's request and a server's answer.
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


def test_the_bytes_on_the_wire_are_those_of_version_1(monkeypatch):
    bodies = []
    pack = wire.pack_request
    monkeypatch.setattr(wire, "pack_request", lambda clips: bodies.append(pack(clips)) or bodies[-1])
    with scripted((200, ANSWER)) as url:
        reward = remote(url, send_reference=True)
        video = torch.linspace(-1, 1, 6).reshape(1, 3, 2, 1, 1)
        output = reward(video, [reward.reference(torch.zeros(3, 1, 1, 1), 'ä"\n')])
    assert (output.score.tolist(), output.valid.tolist(), output.parts["x"].tolist()) == ([0.5], [True], [2.0])
    assert bodies == [REQUEST]
    (clip,) = wire.unpack_request(REQUEST)
    assert clip.prompt == 'ä"\n' and clip.frames.shape == (2, 1, 1, 3) and clip.reference.tolist() == [[[[128] * 3]]]
    made = wire.pack_answer(torch.tensor([0.5]), torch.tensor([True]), {"x": torch.tensor([2.0])})
    assert made == ANSWER


def test_a_batch_is_split_by_the_bytes_of_its_requests():
    clips = {i: Clip(pixels, "x") for i, pixels in enumerate(frames(5, (1, 10, 10)))}
    sizes = [len(wire.pack_request(list(clips.values())[:count])) for count in range(1, 6)]
    for limit, groups in ((sizes[4], [[0, 1, 2, 3, 4]]), (sizes[4] - 1, [[0, 1], [2, 3, 4]])):
        requests = list(pack_requests([*clips], clips, limit, "p"))
        assert [group for group, _ in requests] == groups and all(len(body) <= limit for _, body in requests)
    assert list(pack_requests([], {}, 1, "p")) == []
    with pytest.raises(
        ValueError, match=f"p.max_bytes is {sizes[0] - 1}, and a request with one clip has {sizes[0]} b"
    ):
        list(pack_requests([*clips], clips, sizes[0] - 1, "p"))


def request_of(request=None, count=2, **tensors):
    """Return a body of POST /score with `count` clips."""
    tensors = {"video": frames(count, (1, 1, 1))} | {name.replace("_", "."): value for name, value in tensors.items()}
    return save(tensors, {"request": json.dumps(request or {"version": 1, "prompts": ["a"] * count})})


F4 = b'{"video":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'  # a type that torch does not know
MALFORMED = [
    ((1 << 40).to_bytes(8, "little") + b"{}", "a safetensors header of 1099511627776 bytes"),
    (len(F4).to_bytes(8, "little") + F4 + b"1", "not safetensors: 'F4'"),
    (REQUEST[:-1], "not safetensors"),
    (save({"clip": frames(2)}), "tensor 'video' must be .* got none"),
    (request_of(video=frames(2).float()), "'video' must be .* got .* float32"),
    (request_of(video=frames(2)[:0]), "'video' must be .* without empty axes"),
    (request_of(reference_2=frames(2)[0]), "unknown tensor 'reference.2'"),
    (request_of(reference_0=frames(2)), r"'reference.0' must be \(F, H, W, 3\)"),
    (save({"video": frames(2)}, {"request": "[" * 100_000}), "must be JSON with version 1"),
    (request_of({"version": 2, "prompts": ["a", "b"]}), "must be JSON with version 1"),
    *((request_of({"version": 1, "prompts": it}), "prompts, 2 strings, got") for it in (["a"], 5, "ab", ["a", 1])),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED)
def test_malformed_bodies_are_refused(body, message):
    with pytest.raises(WireError, match=message):
        wire.unpack_request(body)


def connect(url, sent=b""):
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(sent)
    return closing(connection)


POST = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: {wire.CONTENT_TYPE}\r\n"


def ask(url, path="/score", content=None, method="POST", **headers):
    """The server's answer to httpx; None leaves a header out."""
    headers = {"Content-Type": wire.CONTENT_TYPE} | {name.replace("_", "-"): text for name, text in headers.items()}
    headers = {name: text for name, text in headers.items() if text is not None}
    return httpx.request(method, url + path, content=content, headers=headers, trust_env=False)


def test_errors_are_json_over_the_wire():
    with serving(Likeness(), token="t", max_bytes=100) as url:
        for token in (None, "Bearer tt", "Basic t", b"Bearer \xe4"):
            assert ask(url, content=bytes(5), Authorization=token).status_code == 401
        cases = {404: {"path": "/"}, 405: {"method": "PUT"}, 413: {"content": bytes(101)}, 400: {"content": b"hello"}}
        for status, request in cases.items():
            answer = ask(url, **{"Authorization": "Bearer t"} | request)
            assert answer.status_code == status and answer.json()["error"], request
        health = ask(url, "/health", method="GET")
        assert health.json() == {"status": "ok", "reward": "likeness", "version": 1, "max_bytes": 100}
        for nonsense in (b"nonsense\r\n\r\n", b"x" * 70_000):
            with connect(url, nonsense) as connection:
                assert connection.recv(12) == b"HTTP/1.1 400"


def test_a_request_waits_for_its_turn_and_is_not_scored_once_its_client_has_left(monkeypatch):
    """A client that stalls in its request holds nobody up."""
    scoring, release, scores = threading.Event(), threading.Event(), RewardServer.score

    def score_later(server, body):
        scoring.set()
        assert release.wait(30)
        return scores(server, body)

    monkeypatch.setattr(RewardServer, "score", score_later)
    likeness, stalled = Likeness(), f"{POST}Content-Length: 100\r\n\r\nhalf".encode()
    with serving(likeness) as url, connect(url, stalled), ThreadPoolExecutor(1) as pool:
        first = pool.submit(score, remote(url), VIDEO[:1], PROMPTS[:1])
        assert scoring.wait(30)
        with pytest.raises(RewardServerError, match=r"no answer in 0.2 s \(settings.timeout\)"):
            score(remote(url, timeout=0.2, retries=0), VIDEO[:1], PROMPTS[:1])
        release.set()
        assert first.result().valid.all() and score(remote(url), VIDEO[:1], PROMPTS[:1]).valid.all()
    assert likeness.batches == [1, 1]


def test_one_line_of_log_per_request_without_what_was_in_it(caplog):
    caplog.set_level(logging.INFO)
    with serving(Likeness(), token="t0ken") as url:
        ask(url, content=b"xyz", Authorization="Bearer gue55")
        ask(url, "/health", method="GET")
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines) and any("this server needs its token" in line for line in lines)
    assert [line[-3:] for line in lines if line.startswith("127.0.0.1:")] == ["401", "200"]
    assert not any(secret in "".join(lines) for secret in ("t0ken", "gue55", "xyz"))


def tool(monkeypatch, capsys, *arguments):
    """Exit code and what was printed as an error."""
    monkeypatch.setattr(sys, "argv", ["serve_reward.py", *map(str, arguments)])
    return serve_reward.main(), capsys.readouterr().err


OWN = str(ROOT / "tests" / "support" / "remote_rewards.py") + ":Likeness"


def test_the_tool_refuses_what_cannot_work(monkeypatch, capsys):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    cases = {
        ("--settings", "gain=two"): "--settings.gain must be a number, got 'two'",
        ("--settings", "gains=2", "--host", "0.0.0.0"): "--host 0.0.0.0: without a token",
        ("--settings", "gains=2", "--host", ""): "without a token",
        ("--token-env", "NO_TOKEN"): "--token-env must be the name of an environment variable that is set",
        ("--device", "abacus"): "abacus",
        ("--settings", "gain=["): "--settings 'gain=[' is not valid YAML",
    }
    for arguments, message in cases.items():
        code, error = tool(monkeypatch, capsys, "--trust-code", "--reward", OWN, *arguments)
        assert code == command_line.REFUSED and message in error, arguments
    for arguments in (("--batch", "0"), ("--port", "99999"), ("--max-mb", "nan")):
        with pytest.raises(SystemExit, match="2"):
            tool(monkeypatch, capsys, "--reward", OWN, *arguments)
        assert f"error: {arguments[0]}: must be " in capsys.readouterr().err
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        code, error = tool(monkeypatch, capsys, "--trust-code", "--reward", OWN, "--port", port)
    assert code == command_line.REFUSED and f"--port {port}: " in error


def test_without_its_libraries_the_tool_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, server.__name__)
    monkeypatch.delattr(reward_server, "server")
    code, error = tool(monkeypatch, capsys, "--reward", "motion")
    assert code == command_line.REFUSED and error.count("\n") == 1 and "pip install starlette uvicorn" in error


@pytest.mark.slow(2)
def test_a_reward_that_hangs_does_not_keep_the_server_from_stopping(monkeypatch):
    monkeypatch.setattr(server, "DRAIN_SECONDS", 1)
    hangs, scores = threading.Event(), threading.Event()
    monkeypatch.setattr(RewardServer, "score", lambda *_: scores.set() or hangs.wait(30))
    with ThreadPoolExecutor(1) as pool:
        with serving(Likeness()) as url:
            running = pool.submit(ask, url, content=b"xyz")
            assert scores.wait(10)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        hangs.set()
        assert running.result().status_code == 500


@pytest.mark.long
def test_in_another_process(monkeypatch):
    script = ROOT / "tools" / "serve_reward.py"
    arguments = ["--trust-code", "--reward", OWN, "--settings", "gain=1", "seconds=0.3", "--port", 0, "--batch", 3]
    monkeypatch.setenv("MINE", "s3cret")
    command = [sys.executable, script, *arguments, "--token-env", "MINE", "--device", "cpu"]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving likeness at http://127.0.0.1:"), process.stderr.read()
        reward = remote(line.split()[-1], token_env="MINE", send_reference=True, retries=0)
        assert_same(score(reward), at_home())
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(score, reward)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert_same(running.result(), at_home())
        output, log = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == command_line.DONE, log
    assert "Traceback" not in log and "s3cret" not in log and log.count("5 clips") == 2
