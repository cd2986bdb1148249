"""A reward that another process computes, on this machine or another: the client of tools/serve_reward.py.

The wire format is at the top of wire.py in this folder, how to set it up in docs/rewards_remote.md.
"""

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import httpx
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.config.schema import Count, NonNegative, Positive, Whole, must_be
from rewardfl.rewards.base import Reward, RewardOutput, Unavailable
from rewardfl.rewards.remote.wire import (
    CONTENT_TYPE,
    ENVELOPE_BYTES,
    MAX_CLIPS,
    MAX_FRAMES,
    PLACES,
    VERSION,
    Clip,
    WireError,
    pack_request,
    unpack_answer,
)
from rewardfl.rewards.settings import on_this_machine

MAX_ANSWER_BYTES = 1 << 24  # a few numbers per clip; a server that sends more is not ours
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0  # seconds before a retry


class RewardServerError(RuntimeError):
    """The reward server cannot be used; the message has the url, what happened and what to do."""


class ServerAwayError(RewardServerError, Unavailable):
    """It is down, busy or does not answer in time."""


def read_token(variable: str) -> str:
    """Return the token in an environment variable. ValueError for none or one that no header can hold."""
    token = os.environ.get(variable, "")
    if not token:
        raise ValueError(f"the name of an environment variable that is set: export {variable}=<the token>")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError("the name of an environment variable whose token is ASCII without spaces or line breaks")
    return token


def _is_url(url: str) -> bool:
    try:
        address = urlsplit(url)
        plain = all("!" <= character <= "~" for character in url) and not (address.query or address.fragment)
        usable = plain and address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is no number
        return False
    return bool(usable) and address.username is None


Url = Annotated[str, must_be("like http://127.0.0.1:8400", _is_url)]
TokenVariable = Annotated[str, on_this_machine(read_token)]


class RemoteReward(Reward):
    """Sends clips and prompts as uint8 frames to the server at `url`, takes its scores. No gradient.

    timeout: seconds for one request, from connecting to the answer's last byte, however the bytes come. wait: seconds
    for which a request is put to a busy server again and again. retries: after the first try, for connections that
    fail, timeouts and 5xx. token_env: the environment variable with the server's token; no secret stands in a config.
    frames: "all", or n for every n-th frame from the first. send_reference: the real clip goes along, for a reward that
    compares with it. max_bytes: of one request; a batch is split into requests below it and below what the server
    takes (bytes, clips, frames). parallel: batches that one process sends at a time, as many more wait as uint8 frames
    (see blackbox). These nine parameters are the reward's settings in a config.

    A sample is invalid when its reference is None, its pixels are not finite (it is not sent), or the server says so
    or scores it with a number that is not finite. Anything else that goes wrong is a RewardServerError.

    Host memory of a process, at most: `parallel` batches under way in four copies of their frames while a request is
    packed, as many waiting in one, and one on its way there: (5 * parallel + 2) * B * (bytes of a clip's frames).
    """

    name = "remote"
    differentiable = False
    uses_prompt = True
    concurrent = True
    licence = "the served reward's"
    range = "the served reward's"

    def __init__(
        self,
        url: Url,
        timeout: Positive = 120.0,
        retries: Whole = 4,
        token_env: TokenVariable | Literal[""] = "",
        frames: Literal["all"] | Count = "all",
        send_reference: bool = False,
        max_bytes: Count = 400_000_000,
        parallel: Count = PLACES,
        wait: NonNegative = 600.0,
    ):
        super().__init__()
        self.stride = 1 if frames == "all" else frames
        self.send_reference = send_reference
        self.max_bytes, self.parallel = max_bytes, parallel
        self.client = Client(url, timeout, retries, token_env, wait)

    @property
    def place(self) -> str:
        """Where the configuration has these settings; the client's messages name them there."""
        return self.client.place

    @place.setter
    def place(self, place: str) -> None:
        self.client.place = place

    @property
    def compares_with(self) -> str:
        return "clip" if self.send_reference else "nothing"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """prompt: (n,) uint8, its UTF-8; with send_reference also frames: (F', H, W, 3) uint8 of the real clip."""
        kept = {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8)}
        return kept | {"frames": self._frames(video)} if self.send_reference else kept

    def fingerprint(self) -> dict[str, object]:
        """Which frames of the real clip are kept; the server takes no part in it."""
        return {"name": self.name, "frames": self.stride if self.send_reference else None}

    def held(
        self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor] | None]]:
        """The frames that are sent, (B, F', H, W, 3) uint8: a quarter of the pixels' bytes, or less."""
        # pixels that are not finite would become some colour or other
        finite = video.flatten(1).isfinite().all(1).tolist()
        frames = torch.stack([self._frames(clip) for clip in video])
        return frames, [reference if fine else None for reference, fine in zip(batch, finite, strict=True)]

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        """video: (B, 3, F, H, W) in [-1, 1], or what `held` made of it."""
        frames, references = (video, batch) if video.dtype == torch.uint8 else self.held(video, batch)
        clips = {i: self._clip(frames[i], found) for i, found in enumerate(references) if found is not None}
        score, valid = torch.zeros(len(video)), torch.zeros(len(video), dtype=torch.bool)
        parts: dict[str, Tensor] = {}
        limit = min(self.max_bytes, self.client.max_bytes)
        for group in split(clips, limit, self.place):
            score[group], valid[group], measured = self.client.score([clips[i] for i in group])
            for name, values in measured.items():
                parts.setdefault(name, torch.full((len(video),), math.nan))[group] = values
        return RewardOutput(
            score.to(video.device),
            valid.to(video.device),
            {name: values.to(video.device) for name, values in parts.items()},
        )

    def _clip(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Clip:
        prompt = bytes(reference["prompt"].tolist()).decode()
        return Clip(frames, prompt, reference["frames"].cpu() if self.send_reference else None)

    def _frames(self, video: Tensor) -> Tensor:
        return data.to_uint8(video[:, :: self.stride]).cpu().contiguous()


def split(clips: Mapping[int, Clip], limit: int, place: str) -> Iterator[list[int]]:
    """Samples in groups, each a request of at most `limit` bytes, MAX_CLIPS clips and MAX_FRAMES frames.

    ValueError for a clip that alone is too big. place: where the settings stand.
    """
    group: list[int] = []
    size = frames = 0
    for sample, clip in clips.items():
        if ENVELOPE_BYTES + clip.nbytes > limit:
            raise ValueError(
                f"{place}.max_bytes (or what the server takes, --max-mb) is {limit}, one clip has {clip.nbytes} bytes: "
                f"raise it, or send fewer frames ({place}.frames: 4)"
            )
        size, frames = size + clip.nbytes, frames + clip.frame_count
        if group and (ENVELOPE_BYTES + size > limit or frames > MAX_FRAMES or len(group) == MAX_CLIPS):
            yield group
            group, size, frames = [], clip.nbytes, clip.frame_count
        group.append(sample)
    if group:
        yield group


class Client:
    """Requests to one reward server, tried again where that may help.

    Redirects are not followed and proxies of the environment not used: token and clips go to `url` and nowhere else.
    """

    def __init__(self, url: str, timeout: float, retries: int, token_env: str, wait: float):
        self.url = url.rstrip("/")
        self.timeout, self.retries, self.token_env, self.wait = timeout, retries, token_env, wait
        self.token = read_token(token_env) if token_env else ""
        self.place = "settings"  # in the configuration, for messages
        self.sleep: Callable[[float], None] = time.sleep
        self.random = random.Random()  # the global one belongs to the training, which resumes exactly
        self._max_bytes = 0
        self._tls = ssl.create_default_context()  # the system's certificates

    @property
    def max_bytes(self) -> int:
        """The most bytes of a request, as the server says; it is asked once."""
        if not self._max_bytes:
            self._max_bytes = self.health()["max_bytes"]
        return self._max_bytes

    def health(self) -> dict[str, Any]:
        """status, reward, version, max_bytes, as GET /health says; RewardServerError for any other answer."""
        answer = self._ask("GET", "/health", b"")
        health = _json(answer)
        if not isinstance(health, dict) or health.get("version") != VERSION or "max_bytes" not in health:
            raise self._error(
                f"GET /health should answer JSON with version {VERSION} and max_bytes, got {answer[:80]!r}; is that a "
                "reward server (tools/serve_reward.py) of the same release?"
            )
        return health

    def score(self, clips: Sequence[Clip]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """score (B,) float32, valid (B,) bool, parts {name: (B,) float32}; RewardServerError if there is none."""
        answer = self._ask("POST", "/score", pack_request(clips))
        try:
            return unpack_answer(answer, len(clips))
        except WireError as error:
            raise self._error(
                f"the answer to {len(clips)} clips is wrong: {error}; the server breaks the format of "
                "rewardfl/rewards/remote/wire.py"
            ) from None

    def _ask(self, method: str, path: str, body: bytes) -> bytes:
        """The body of the first answer that is no error."""
        failures, began = 0, time.monotonic()
        while True:
            status = None
            try:
                status, answer, retry_after = asyncio.run(self._once(method, path, body))
            except (TimeoutError, httpx.TransportError) as error:
                trouble = self._trouble(error)
            else:
                if status == 200:
                    return answer
                if status < 500:
                    raise self._error(f"{method} {path}: {self._refusal(status, answer)}")
                trouble = f"status {status}: {_message(answer)}; see the server's log"
                if status == 503 and retry_after is not None:  # busy with others; no failure, and cheap to ask again
                    if time.monotonic() - began < self.wait:
                        self.sleep(_seconds(retry_after) * (0.5 + self.random.random()))
                        continue
                    busy = f"{method} {path}: busy for {self.wait:g} s ({self.place}.wait): {trouble}"
                    raise self._error(busy, ServerAwayError)
            failures += 1
            if failures > self.retries:
                often = f"{method} {path} failed {failures} times ({self.place}.retries); the last time: {trouble}"
                # 500: the reward raised, maybe for one clip
                raise self._error(often, RewardServerError if status == 500 else ServerAwayError)
            self.sleep(delay(failures, self.random.random()))

    async def _once(self, method: str, path: str, body: bytes) -> tuple[int, bytes, str | None]:
        """Status, body and Retry-After of one answer; TimeoutError where it is not complete in time."""
        async with (
            asyncio.timeout(self.timeout),  # of the whole: httpx's own begins again at every byte
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=None) as client,
            client.stream(method, self.url + path, headers=self._headers(body), content=body) as response,
        ):
            answer = b""
            async for block in response.aiter_raw():
                answer += block
                if len(answer) > MAX_ANSWER_BYTES:
                    raise self._error(f"an answer of more than {MAX_ANSWER_BYTES} bytes; is that a reward server?")
            return response.status_code, answer, response.headers.get("Retry-After")

    def _error(self, message: str, kind: type[RewardServerError] = RewardServerError) -> RewardServerError:
        return kind(f"{self.place}.url {self.url}: {message}")

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity"}
        if body:
            headers["Content-Type"] = CONTENT_TYPE
        return headers | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    def _trouble(self, error: TimeoutError | httpx.TransportError) -> str:
        if isinstance(error, TimeoutError):
            return (
                f"no answer in {self.timeout:g} s: raise {self.place}.timeout, or send less at a time "
                f"({self.place}.max_bytes, {self.place}.frames)"
            )
        if isinstance(error, httpx.ConnectError):
            return f"no connection ({error}); start tools/serve_reward.py, or mend {self.place}.url"
        return f"{type(error).__name__}: {error}; does tools/serve_reward.py run there? see its log"

    def _refusal(self, status: int, answer: bytes) -> str:
        said = f"status {status}: {_message(answer)}"
        if status == 401:
            now = f"now {self.token_env}" if self.token_env else "not set"
            variable = "the environment variable that holds the server's token"
            return f"{said}; set {self.place}.token_env ({now}) to {variable}"
        if status == 413:
            return f"{said}; lower {self.place}.max_bytes, or raise --max-mb of the server"
        return f"{said}; is that a reward server (tools/serve_reward.py) of the same release?"


def _seconds(retry_after: str) -> float:
    """What a server asks for; it may also name a date."""
    return min(float(retry_after), LONGEST_DELAY) if re.fullmatch(r"\d{1,9}", retry_after) else FIRST_DELAY


def delay(attempt: int, jitter: float) -> float:
    """Seconds before retry `attempt` = 1, 2, ...: doubling; jitter in [0, 1) spreads clients that failed together."""
    return min(FIRST_DELAY * 2 ** (attempt - 1), LONGEST_DELAY) * (0.5 + jitter / 2)


def _message(answer: bytes) -> str:
    """The server's own words, as one line: the error of its JSON, else the start of what it sent."""
    said = _json(answer)
    if not isinstance(said, dict) or "error" not in said:
        return repr(answer[:80])
    return "".join(character if character.isprintable() else "?" for character in str(said["error"])[:1000])


def _json(answer: bytes) -> object:
    """What an answer says; None where it is no JSON."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None
