"""The reward server with its client: equal scores, errors, turns, tokens, and the tool that starts it."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import httpx
import pytest
import torch
from conftest import ROOT
from remote_rewards import PROMPTS, REAL, VIDEO, ScaledMean, make_client, make_frames, make_videos

from rewardfl import command_line, reward_server, rewards
from rewardfl.reward_server import server
from rewardfl.reward_server.server import RewardServer
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.scoring import score_safely
from rewardfl_tools import serve_reward

MB = 1_000_000


@contextmanager
def serving(reward, batch=2, max_bytes=10 * MB, token=""):
    reward_server = RewardServer(("127.0.0.1", 0), reward, "cpu", batch, max_bytes, token)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(reward_server.run)
        try:
            yield f"http://127.0.0.1:{reward_server.address[1]}"
        finally:
            reward_server.stop()
            running.result(20)


def score(reward, video=VIDEO, prompts=PROMPTS, real=REAL):
    return reward(video, [reward.reference(*pair) for pair in zip(real, prompts, strict=False)])


def assert_same(output, expected):
    """Compare bit for bit. No score may be counted as not finite."""
    assert not output.parts.pop("nonfinite", torch.zeros(1)).any()
    torch.testing.assert_close(vars(output), vars(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("max_bytes", [400 * MB, 1300], ids=["one request", "split"])
@pytest.mark.parametrize("send_reference", [False, True])
def test_scores_are_the_local_rewards_bit_for_bit(send_reference, max_bytes):
    served = ScaledMean()
    with serving(served) as url:
        output = score(make_client(url, send_reference=send_reference, max_bytes=max_bytes))
    assert_same(output, score(ScaledMean(), real=REAL if send_reference else REAL[:, :, :0]))
    assert set(output.parts) == {"mean", "real"} and output.valid.all()
    assert sum(served.batches) == 5 and max(served.batches) <= 2
    assert (len(served.batches) == 3) == (max_bytes > 1300)


def test_invalid_samples_score_zero_and_leave_the_others():
    video, prompts = make_videos(make_frames(5)), PROMPTS.copy()
    video[1, 0, 0, 0, 0] = -1  # invalid for the served reward
    video[2, 1, 2, 1, 1] = float("nan")  # never sent
    prompts[4] = "not finite"
    with serving(ScaledMean()) as url:
        reward = make_client(url, frames=2)
        references = [None, *(reward.reference(*pair) for pair in zip(REAL[1:], prompts[1:], strict=True))]
        pixels, queued = reward.held(video, references)
        outputs = reward(video, references), reward(pixels, queued)
    assert pixels.dtype == torch.uint8 and pixels.shape == (5, 2, 6, 8, 3) and pixels.device.type == "cpu"
    assert [reference is None for reference in queued] == [True, False, True, False, False]
    local = score(ScaledMean(), video[:, :, ::2].contiguous(), real=REAL[:, :, :0])
    for output in outputs:
        assert output.valid.tolist() == [False, False, False, True, False]
        assert output.score.tolist() == [0, 0, 0, local.score[3], 0]
        assert output.parts["mean"].isnan().tolist() == [True, False, True, False, True]


def test_a_reward_that_fails_costs_one_sample():
    message = 'status 500: {"error":"reward scaled_mean failed: RuntimeError: no memory for that"}'
    with serving(ScaledMean()) as url:
        reward = make_client(url, retries=1)
        references = [reward.reference(*pair) for pair in zip(REAL, ["a", "b", "fails", "c", "d"], strict=True)]
        result = score_safely(reward, VIDEO, references)
    assert result.failed.tolist() == [False, False, True, False, False]
    assert "failed 2 times" in result.problems[0] and message in result.problems[0]


def test_a_reward_that_compares_needs_the_real_clips():
    with serving(rewards.build("motion", {})) as url:
        with pytest.raises(RewardServerError, match="status 400: .* real clip; set the client's send_reference: true"):
            score(make_client(url))
        assert score(make_client(url, send_reference=True)).valid.all()


def test_a_wrong_token_is_refused(monkeypatch):
    monkeypatch.setenv("TOKEN", "wrong-token")
    with serving(ScaledMean(), token="right-token") as url:
        for settings in ({}, {"token_env": "TOKEN"}):
            with pytest.raises(RewardServerError, match="status 401: .*; set the client's token_env") as error:
                score(make_client(url, **settings))
            assert "wrong-token" not in str(error.value)
        monkeypatch.setenv("TOKEN", "right-token")
        assert score(make_client(url, token_env="TOKEN")).valid.all()


def test_requests_that_are_too_large_are_refused():
    with serving(ScaledMean(), max_bytes=1500) as url:
        with pytest.raises(RewardServerError, match="status 413: .* more than 1500 bytes .*; lower .* max_bytes"):
            score(make_client(url))
        assert score(make_client(url, max_bytes=1500)).valid.all()


def connect(url, content):
    connection = socket.create_connection(("127.0.0.1", int(url.split(":")[-1])), timeout=5)
    connection.sendall(content)
    return closing(connection)


def request(url, path="/score", content=None, method="POST", **headers):
    return httpx.request(method, url + path, content=content, headers=headers, trust_env=False)


def test_errors_are_json():
    with serving(ScaledMean(), token="t", max_bytes=100) as url:
        cases = {
            404: {"path": "/"}, 405: {"method": "PUT"}, 413: {"content": bytes(101)}, 400: {"content": b"hello"},
            401: {"Authorization": b"Bearer \xe4"},
        }  # fmt: skip
        for status, options in cases.items():
            response = request(url, **{"Authorization": "Bearer t"} | options)
            assert response.status_code == status and response.json()["error"], options
        health = request(url, "/health", method="GET")
        assert health.json() == {"status": "ok", "reward": "scaled_mean", "version": 1, "max_bytes": 100}
        with connect(url, b"nonsense\r\n\r\n") as connection:
            assert connection.recv(12) == b"HTTP/1.1 400"


def test_a_request_is_not_scored_once_its_client_has_left(monkeypatch):
    """A client that stalls in its request does not hold up the others."""
    scoring, release, run_score = threading.Event(), threading.Event(), RewardServer.score

    def score_later(server, body):
        scoring.set()
        assert release.wait(30)
        return run_score(server, body)

    monkeypatch.setattr(RewardServer, "score", score_later)
    served, stalled = ScaledMean(), b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"
    with serving(served) as url, connect(url, stalled), ThreadPoolExecutor(1) as pool:
        first = pool.submit(score, make_client(url), VIDEO[:1], PROMPTS[:1])
        assert scoring.wait(30)
        with pytest.raises(RewardServerError, match=r"no response in 0.2 s \(settings.timeout\)"):
            score(make_client(url, timeout=0.2, retries=0), VIDEO[:1], PROMPTS[:1])
        release.set()
        assert first.result().valid.all() and score(make_client(url), VIDEO[:1], PROMPTS[:1]).valid.all()
    assert served.batches == [1, 1]


def test_the_log_has_one_line_per_request_and_no_secrets(caplog):
    caplog.set_level(logging.INFO)
    with serving(ScaledMean(), token="t0ken") as url:
        request(url, content=b"xyz", Authorization="Bearer gue55")
        request(url, "/health", method="GET")
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines) and any("this server needs its token" in line for line in lines)
    assert [line[-3:] for line in lines if line.startswith("127.0.0.1:")] == ["401", "200"]
    assert not any(secret in "".join(lines) for secret in ("t0ken", "gue55", "xyz"))


REWARD = f"{ROOT}/tests/support/remote_rewards.py:ScaledMean"


def run_tool(monkeypatch, capsys, *arguments):
    """Return the exit code and standard error."""
    monkeypatch.setattr(sys, "argv", ["serve_reward.py", *map(str, arguments)])
    return serve_reward.main(), capsys.readouterr().err


def test_the_tool_refuses_wrong_options(monkeypatch, capsys):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    cases = {
        ("--settings", "gain=two"): "--settings.gain must be a number, got 'two'",
        ("--settings", "gains=2", "--host", "0.0.0.0"): "--host 0.0.0.0: without a token",
        ("--token-env", "NO_TOKEN"): "--token-env must be the name of an environment variable that is set",
        ("--device", "abacus"): "abacus",
    }
    for arguments, message in cases.items():
        code, error = run_tool(monkeypatch, capsys, "--trust-code", "--reward", REWARD, *arguments)
        assert code == command_line.REFUSED and message in error, arguments
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        code, error = run_tool(monkeypatch, capsys, "--trust-code", "--reward", REWARD, "--port", port)
    assert code == command_line.REFUSED and f"--port {port}: " in error


def test_the_tool_names_missing_libraries(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, server.__name__)
    monkeypatch.delattr(reward_server, "server")
    code, error = run_tool(monkeypatch, capsys, "--reward", "motion")
    assert code == command_line.REFUSED and error.count("\n") == 1 and "pip install starlette uvicorn" in error


@pytest.mark.slow(2)
def test_a_reward_that_hangs_does_not_keep_the_server_alive(monkeypatch):
    monkeypatch.setattr(server, "DRAIN_SECONDS", 1)
    release, scoring = threading.Event(), threading.Event()
    monkeypatch.setattr(RewardServer, "score", lambda *_: scoring.set() or release.wait(30))
    with ThreadPoolExecutor(1) as pool:
        with serving(ScaledMean()) as url:
            running = pool.submit(request, url, content=b"xyz")
            assert scoring.wait(10)
            start = time.monotonic()
        assert time.monotonic() - start < 5
        release.set()
        assert running.result().status_code == 500


@pytest.mark.long
def test_a_server_in_another_process_ends_on_sigterm(monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cret")
    options = ["--trust-code", "--reward", REWARD, "--settings", "gain=1", "seconds=0.3", "--port", "0", "--batch", "3"]
    command = [sys.executable, str(ROOT / "tools" / "serve_reward.py"), *options, "--token-env", "TOKEN"]
    process = subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving scaled_mean at http://127.0.0.1:"), process.stderr.read()
        reward = make_client(line.split()[-1], token_env="TOKEN", send_reference=True, retries=0)
        assert_same(score(reward), score(ScaledMean()))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(score, reward)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert_same(running.result(), score(ScaledMean()))
        _, log = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == command_line.DONE, log
    assert "Traceback" not in log and "s3cret" not in log and log.count("5 clips") == 2
