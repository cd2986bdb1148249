"""A reward that another process computes, on this machine or another: the client of tools/serve_reward.py.

The wire format is at the top of rewardfl/reward_wire.py, how to set it up in docs/rewards_remote.md.
"""

import http.client
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import torch
from torch import Tensor

from .. import data
from ..reward_wire import (
    CONTENT_TYPE,
    ENVELOPE_BYTES,
    VERSION,
    Clip,
    WireError,
    pack_request,
    unpack_answer,
)
from .base import Reward, RewardOutput

MAX_ANSWER_BYTES = 1 << 24  # a few numbers per clip; a server that sends more is not ours
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a retry


class RewardServerError(RuntimeError):
    """The reward server cannot be used; the message has the url, what happened and what to do."""


class RemoteReward(Reward):
    """Sends clips and prompts as uint8 frames to the server at `url`, takes its scores. No gradient.

    timeout: seconds for one request, waiting for its turn at the server included. retries: after the first try, for
    connections that fail, timeouts and 5xx. token_env: the environment variable with the server's token; no secret
    stands in a config. frames: "all", or n for every n-th frame from the first. send_reference: the real clip goes
    along, for a reward that compares with it. max_bytes: of one request; a batch is split into requests below it and
    below what the server takes.

    A sample is invalid when its reference is None, its pixels are not finite (it is not sent), or the server says so
    or scores it with a number that is not finite. Anything else that goes wrong is a RewardServerError.
    """

    name = "remote"
    differentiable = False
    uses_prompt = True
    concurrent = True
    licence = "the served reward's"
    range = "the served reward's"

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        retries: int = 4,
        token_env: str = "",
        frames: str | int = "all",
        send_reference: bool = False,
        max_bytes: int = 400_000_000,
    ):
        super().__init__()
        if frames != "all" and (not _is_number(frames) or frames != int(frames) or frames < 1):
            raise ValueError(f"reward.frames must be all, or n >= 1 for every n-th frame, got {frames!r}")
        if not _is_number(max_bytes) or max_bytes < 1:
            raise ValueError(f"reward.max_bytes must be a number of bytes, got {max_bytes!r}")
        self.stride = 1 if frames == "all" else int(frames)
        self.send_reference = send_reference
        self.max_bytes = int(max_bytes)
        self.client = Client(url, timeout, retries, token_env)

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """prompt: (n,) uint8, its UTF-8; with send_reference also frames: (F', H, W, 3) uint8 of the real clip."""
        kept = {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8)}
        return kept | {"frames": self._frames(video)} if self.send_reference else kept

    def fingerprint(self) -> dict[str, object]:
        """Which frames of the real clip are kept; the server takes no part in it."""
        return {"name": self.name, "frames": self.stride if self.send_reference else None}

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        if len(batch) != len(video):
            raise ValueError(f"{len(video)} videos need as many references, got {len(batch)}")
        limit = min(self.max_bytes, self.client.max_bytes)
        # pixels that are not finite would become some colour or other
        clips = {
            i: self._clip(clip, reference)
            for i, (clip, reference) in enumerate(zip(video, batch, strict=True))
            if reference is not None and clip.isfinite().all()
        }
        score, valid = torch.zeros(len(video)), torch.zeros(len(video), dtype=torch.bool)
        parts: dict[str, Tensor] = {}
        for group in split({i: clip.nbytes for i, clip in clips.items()}, limit):
            score[group], valid[group], measured = self.client.score([clips[i] for i in group])
            for name, values in measured.items():
                parts.setdefault(name, torch.full((len(video),), math.nan))[group] = values
        return RewardOutput(
            score.to(video.device),
            valid.to(video.device),
            {name: values.to(video.device) for name, values in parts.items()},
        )

    def _clip(self, video: Tensor, reference: Mapping[str, Tensor]) -> Clip:
        prompt = bytes(reference["prompt"].tolist()).decode()
        return Clip(self._frames(video), prompt, reference["frames"].cpu() if self.send_reference else None)

    def _frames(self, video: Tensor) -> Tensor:
        return data.to_uint8(video[:, :: self.stride]).cpu().contiguous()


def split(sizes: Mapping[int, int], limit: int) -> Iterator[list[int]]:
    """Samples, by their clips' bytes, in groups whose requests stay below `limit` bytes.

    ValueError for a clip that alone does not.
    """
    group: list[int] = []
    used = ENVELOPE_BYTES
    for sample, nbytes in sizes.items():
        if ENVELOPE_BYTES + nbytes > limit:
            raise ValueError(
                f"reward.max_bytes (or what the server takes, --max-mb) is {limit}, one clip has {nbytes} bytes: raise "
                "it, or send fewer frames (reward.frames: 4)"
            )
        if used + nbytes > limit:
            yield group
            group, used = [], ENVELOPE_BYTES
        group.append(sample)
        used += nbytes
    if group:
        yield group


class Client:
    """Requests to one reward server, tried again where that may help.

    Redirects are not followed and proxies of the environment not used: token and clips go to `url` and nowhere else.
    """

    def __init__(self, url: str, timeout: float, retries: int, token_env: str):
        self.url, self.address = url.rstrip("/"), _address(url)
        if not _is_number(timeout) or timeout <= 0:
            raise ValueError(f"reward.timeout must be seconds above 0, got {timeout!r}")
        if not _is_number(retries) or retries != int(retries) or retries < 0:
            raise ValueError(f"reward.retries must be a whole number, 0 or more, got {retries!r}")
        self.timeout, self.retries, self.token_env = timeout, int(retries), token_env
        self.token = token_of(token_env, "reward.token_env") if token_env else ""
        self.sleep: Callable[[float], None] = time.sleep
        self.random = random.Random()  # the global one belongs to the training, which resumes exactly
        self._max_bytes = 0

    @property
    def max_bytes(self) -> int:
        """Of a request, as the server says; asked once."""
        if not self._max_bytes:
            self._max_bytes = self.health()["max_bytes"]
        return self._max_bytes

    def health(self) -> dict[str, object]:
        """status, reward, version, max_bytes, as GET /health says; RewardServerError for any other answer."""
        answer = self._ask("GET", "/health", b"")
        try:
            health = json.loads(answer)
        except (ValueError, RecursionError):
            health = None
        if not isinstance(health, dict) or health.get("version") != VERSION or not _is_number(health.get("max_bytes")):
            raise RewardServerError(
                f"reward.url {self.url}: GET /health should answer JSON with version {VERSION} and max_bytes, got "
                f"{answer[:80]!r}; is that a reward server (tools/serve_reward.py) of the same release?"
            )
        return health

    def score(self, clips: Sequence[Clip]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """score (B,) float32, valid (B,) bool, parts {name: (B,) float32}; RewardServerError if there is none."""
        answer = self._ask("POST", "/score", pack_request(clips))
        try:
            return unpack_answer(answer, len(clips))
        except WireError as error:
            raise RewardServerError(
                f"reward.url {self.url}: the answer to {len(clips)} clips is wrong: {error}; the server breaks the "
                "format of rewardfl/reward_wire.py"
            ) from None

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        """The body of the first answer that is no error."""
        trouble = ""
        for attempt in range(self.retries + 1):
            if attempt:
                self.sleep(delay(attempt, self.random.random()))
            try:
                status, answer = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                trouble = self._trouble(error)
                continue
            if status == 200:
                return answer
            if status < 500:
                raise RewardServerError(f"reward.url {self.url}: {method} {path}: {self._refusal(status, answer)}")
            trouble = f"status {status}: {_message(answer)}; see the server's log"
        raise RewardServerError(
            f"reward.url {self.url}: {method} {path} failed {self.retries + 1} times (reward.retries); the last time: "
            f"{trouble}"
        )

    def _once(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of one answer; OSError or HTTPException where there is none in time."""
        deadline = time.monotonic() + self.timeout
        connection = self._connection()
        try:
            connection.connect()
            # A server that refuses the request closes while we still send: its answer says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self.address.path.rstrip("/") + path, body, self._headers(body))
            sock = connection.sock
            sock.settimeout(_left(deadline))
            response = connection.getresponse()
            answer = b""
            while not response.isclosed():
                sock.settimeout(_left(deadline))  # or a server that sends a byte now and then holds us for ever
                block = response.read1(1 << 16)
                if not block:
                    break
                answer += block
                if len(answer) > MAX_ANSWER_BYTES:
                    raise RewardServerError(
                        f"reward.url {self.url}: {method} {path}: an answer of more than {MAX_ANSWER_BYTES} bytes; "
                        "is that a reward server?"
                    )
            if response.length:
                raise http.client.IncompleteRead(answer, response.length)
            return response.status, answer
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        secure = self.address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return kind(self.address.hostname, self.address.port, timeout=self.timeout)

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"Content-Type": CONTENT_TYPE} if body else {}
        return headers | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    def _trouble(self, error: OSError | http.client.HTTPException) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"no answer in {self.timeout:g} s: raise reward.timeout, or send less at a time (reward.max_bytes, "
                "reward.frames)"
            )
        if isinstance(error, ConnectionRefusedError):
            return "connection refused: nothing listens there; start tools/serve_reward.py, or mend reward.url"
        return f"{type(error).__name__}: {error}; does tools/serve_reward.py run there? see its log"

    def _refusal(self, status: int, answer: bytes) -> str:
        said = f"status {status}: {_message(answer)}"
        if status == 401:
            now = f"now {self.token_env}" if self.token_env else "not set"
            return f"{said}; set reward.token_env ({now}) to the environment variable that holds the server's token"
        if status == 413:
            return f"{said}; lower reward.max_bytes, or raise --max-mb of the server"
        return f"{said}; is that a reward server (tools/serve_reward.py) of the same release?"


def delay(attempt: int, jitter: float) -> float:
    """Seconds before retry `attempt` = 1, 2, ...: doubling; jitter in [0, 1) spreads clients that failed together."""
    return min(FIRST_DELAY * 2 ** (attempt - 1), LONGEST_DELAY) * (0.5 + jitter / 2)


def token_of(variable: str, setting: str) -> str:
    """The token in an environment variable; ValueError, naming `setting`, for none or one that no header can hold."""
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"{setting}: the environment variable {variable!r} is not set; export {variable}=<the token>")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{setting}: the token in {variable!r} must be ASCII without spaces or line breaks")
    return token


def _address(url: str) -> SplitResult:
    """The parts of a server's url, checked."""
    try:
        address = urlsplit(url)
        plain = all("!" <= character <= "~" for character in url) and not (address.query or address.fragment)
        usable = plain and address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable or address.username is not None:
        raise ValueError(f"reward.url must be like http://127.0.0.1:8400, got {url!r}")
    return address


def _left(deadline: float) -> float:
    """Seconds up to the deadline; TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _message(answer: bytes) -> str:
    """The server's own words: the error of its JSON, else the start of what it sent."""
    try:
        said = json.loads(answer)
    except (ValueError, RecursionError):
        said = None
    return str(said["error"]) if isinstance(said, dict) and "error" in said else repr(answer[:80])
