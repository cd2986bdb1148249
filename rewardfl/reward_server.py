"""Serves a reward over HTTP: what tools/serve_reward.py runs. The wire format is at the top of reward_wire.py.

Service knows nothing of sockets; RewardServer and its handler know nothing of rewards.
"""

import hmac
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn

import torch
from torch import Tensor

from rewardfl import data, reward_wire
from rewardfl.reward_wire import Clip
from rewardfl.rewards import Reward, RewardOutput

log = logging.getLogger(__name__)

WAIT_SECONDS = 10  # for a place among the bodies in memory; less than a client waits to be told to go on
RETRY_AFTER_SECONDS = 1  # is asked of clients that got none; they have waited here already
BODY_SECONDS = 120  # for a body to arrive
IDLE_SECONDS = 30  # for a line of the request, or for the client to take the answer
LINGER_SECONDS = 1.0
DRAIN_SECONDS = 60  # for what is being scored when the server is told to stop

# All that goes wrong in a reward, the device's memory (RuntimeError) included; it is the client's to know of.
REWARD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Refused(Exception):
    """A request that is answered with an error: status, message, and seconds after which to ask again, if any."""

    def __init__(self, status: int, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Service:
    """A reward that answers requests, one at a time on its device, in micro-batches of `batch` clips.

    max_bytes: of a request's body. token: what /score asks for, "" for nothing.
    """

    def __init__(self, reward: Reward, device: str | torch.device, batch: int, max_bytes: int, token: str = ""):
        self.reward, self.device = reward.to(device).eval(), torch.device(device)
        self.batch, self.max_bytes, self.token = batch, max_bytes, token
        self._device_is_ours = threading.Lock()

    def health(self) -> bytes:
        """The JSON that GET /health answers."""
        state = {"status": "ok", "reward": self.reward.name, "version": reward_wire.VERSION}
        return json.dumps(state | {"max_bytes": self.max_bytes}).encode()

    def admit(self, headers: Message) -> int:
        """Bytes of a scoring request's body, from its headers alone; Refused when it is not to be read."""
        if self.token and not _same(headers.get("Authorization", ""), f"Bearer {self.token}"):
            raise Refused(401, "this server wants its token: Authorization: Bearer <token>")
        if headers.get_content_type() != reward_wire.CONTENT_TYPE:
            raise Refused(415, f"Content-Type must be {reward_wire.CONTENT_TYPE}, got {headers.get('Content-Type')}")
        lengths = headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in headers:
            raise Refused(411, "Content-Length is missing; a body in chunks is not taken")
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            raise Refused(400, f"Content-Length must be one number, got {', '.join(lengths)}")
        length = int(lengths[0])
        if length > self.max_bytes:
            raise Refused(413, f"a body of {length} bytes; this server takes at most {self.max_bytes} (--max-mb)")
        return length

    def score(self, body: bytes) -> tuple[bytes, int]:
        """The answer to the body of POST /score, and the number of clips; Refused for one that cannot be scored."""
        try:
            clips = reward_wire.unpack_request(body)
        except reward_wire.WireError as error:
            raise Refused(400, str(error)) from None
        try:
            with self._device_is_ours:
                outputs = [self._score(clips[i : i + self.batch]) for i in range(0, len(clips), self.batch)]
            return reward_wire.pack_answer(*_joined(outputs)), len(clips)
        except REWARD_ERRORS as error:
            log.exception("reward %s failed", self.reward.name)
            hint = (
                ""
                if clips[0].reference is not None
                else "; the request held no real clips (the client's send_reference)"
            )
            raise Refused(500, f"reward {self.reward.name} failed: {type(error).__name__}: {error}{hint}") from None

    @torch.no_grad()
    def _score(self, clips: list[Clip]) -> RewardOutput:
        """Of one micro-batch, on the CPU. ValueError for an output that is none."""
        references = [self._reference(clip) for clip in clips]
        output = self.reward(torch.stack([self._video(clip.frames) for clip in clips]), references)
        found = {"score": output.score, "valid": output.valid} | output.parts
        for name, values in found.items():
            if values.shape != (len(clips),):
                raise ValueError(f"its {name} must be ({len(clips)},), got {tuple(values.shape)}")
        parts = {name: values.float().cpu() for name, values in output.parts.items()}
        return RewardOutput(output.score.float().cpu(), output.valid.bool().cpu(), parts)

    def _reference(self, clip: Clip) -> dict[str, Tensor] | None:
        """What the reward keeps of the clip's prompt, and of its real clip: of no frames where none was sent."""
        no_frames = clip.frames[:0]
        kept = self.reward.reference(self._video(no_frames if clip.reference is None else clip.reference), clip.prompt)
        if kept is None and clip.reference is None:
            raise ValueError("it compares with the real clip")
        return kept

    def _video(self, frames: Tensor) -> Tensor:
        """(3, F, H, W) in [-1, 1] on the device."""
        return data.to_float(frames.to(self.device)).contiguous()


def _joined(outputs: list[RewardOutput]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """score, valid and parts of all micro-batches."""
    names = outputs[0].parts.keys()
    parts = {name: torch.cat([output.parts[name] for output in outputs]) for name in names}
    return torch.cat([output.score for output in outputs]), torch.cat([output.valid for output in outputs]), parts


def _same(given: str, expected: str) -> bool:
    """Equality in a time that does not tell how much of it was right."""
    return hmac.compare_digest(given.encode(), expected.encode())


def check_host(host: str, token: str) -> None:
    """ValueError for an address that others can reach, unless there is a token."""
    if host != "localhost" and not token and not _is_loopback(host):
        raise ValueError(
            f"--host {host}: without a token the server listens on this machine only (127.0.0.1); name the environment "
            "variable that holds one with --token-env"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may resolve to anything
        return False


# ------------------------------------------------------------------------------------------------------------
# Sockets


class RewardServer(ThreadingMixIn, TCPServer):
    """Listens at (host, port), a thread for each request; port 0 takes a free one, see server_address."""

    allow_reuse_address = True
    daemon_threads = True  # a client that went to sleep does not keep the process alive
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], service: Service):
        check_host(address[0], service.token)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.service = service
        self._places = threading.Semaphore(reward_wire.PLACES)
        self._stopping = threading.Event()
        super().__init__(address, Handler)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests whose bodies are in memory; Refused when none comes free."""
        if not self._places.acquire(timeout=WAIT_SECONDS):
            raise Refused(503, f"busy: no place came free in {WAIT_SECONDS} s; ask again", RETRY_AFTER_SECONDS)
        try:
            if self._stopping.is_set():
                raise Refused(503, "shutting down")
            yield
        finally:
            self._places.release()

    def stop(self) -> None:
        """Take no more requests, answer those being scored, close. From another thread than serve_forever's."""
        self.shutdown()
        self._stopping.set()
        deadline = time.monotonic() + DRAIN_SECONDS
        for _ in range(reward_wire.PLACES):
            self._places.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request per connection."""

    server: RewardServer
    note = ""  # for the log
    timeout = IDLE_SECONDS
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # or what is no HTTP is answered without a status
    server_version, sys_version = "rewardfl", ""

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError as error:
            log.info("%s went away: %s", self.address_string(), error)

    def do_GET(self) -> None:
        try:
            if self.path != "/health":
                raise Refused(404, "there is GET /health and POST /score")
            self._answer(200, "application/json", self.server.service.health())
        except Refused as refused:
            self._refuse(refused)

    def do_POST(self) -> None:
        start = time.monotonic()
        try:
            if self.path != "/score":
                raise Refused(404, "there is GET /health and POST /score")
            length = self.server.service.admit(self.headers)
            with self.server.place():
                answer, count = self.server.service.score(self._body(length))
                self.note = f"{count} clips, {length / 1e6:.1f} MB, {time.monotonic() - start:.2f} s"
                self._answer(200, reward_wire.CONTENT_TYPE, answer)
        except Refused as refused:
            self._refuse(refused)

    def handle_expect_100(self) -> bool:
        return True  # _body says Continue, once it is sure that the body is wanted

    def _body(self, length: int) -> bytes:
        """TimeoutError, which the base class logs, when it does not arrive; Refused when it is cut off."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        deadline = time.monotonic() + BODY_SECONDS
        blocks, missing = [], length
        while missing:
            self.connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            block = self.rfile.read1(min(missing, 1 << 20))
            if not block:
                raise Refused(400, f"the body ended {missing} bytes early")
            blocks.append(block)
            missing -= len(block)
        self.connection.settimeout(IDLE_SECONDS)
        return b"".join(blocks)

    def _refuse(self, refused: Refused) -> None:
        self.note = str(refused)
        self._error(refused.status, str(refused), refused.retry_after)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request."""
        self._error(code, message or self.responses[code][0])

    def _error(self, status: int, message: str, retry_after: int | None = None) -> None:
        self._answer(status, "application/json", json.dumps({"error": message}).encode(), retry_after)
        self._discard()

    def _answer(self, status: int, content_type: str, body: bytes, retry_after: int | None = None) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")  # on which the base class acts
        self.end_headers()
        self.wfile.write(body)

    def _discard(self) -> None:
        """Throw away what is on its way, for a moment: closing on unread bytes would take the answer back."""
        deadline = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            while time.monotonic() < deadline and self.rfile.read1(1 << 16):
                pass

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """The one line of a request: from where, what, status; clips, bytes and time, or what was wrong."""
        self.log_message("%s %s %s", self.requestline, int(code), self.note)

    def log_message(self, format: str, *args: object) -> None:
        # ascii: a client does not get to write lines of its own
        log.info("%s %s", self.address_string(), ascii(format % args))
