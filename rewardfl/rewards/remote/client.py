"""A reward that another process computes, on this machine or another: the client of tools/serve_reward.py.

wire.py describes the format, docs/rewards_remote.md the setup.
"""

import math
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import httpx
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.config.schema import Count, Positive, Whole, must_be
from rewardfl.files import escape_control
from rewardfl.rewards.base import Reference, Reward, RewardOutput, Unavailable
from rewardfl.rewards.frames import to_uint8_frames
from rewardfl.rewards.remote import wire
from rewardfl.rewards.remote.wire import Clip
from rewardfl.rewards.settings import on_this_machine

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a retry


class RewardServerError(RuntimeError):
    """The reward server cannot be used; the message has the url, the problem and advice."""


class ServerUnavailableError(RewardServerError, Unavailable):
    """The server is down, busy or does not respond in time."""


def read_token(variable: str) -> str:
    """Return the token in an environment variable. Raise ValueError if it is missing or no header can hold it."""
    token = os.environ.get(variable, "")
    if not re.fullmatch("[!-~]+", token):
        raise ValueError(f"the name of an environment variable that is set to ASCII: export {variable}=<the token>")
    return token


_is_url = re.compile(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:[1-9]\d{0,4})?(/[!\"$->@-~]*)?", re.ASCII).fullmatch


class RemoteReward(Reward):
    """Scores of the server at `url` for clips, sent as uint8 frames, and prompts; without gradient.

    timeout: seconds without a byte from the server. retries: after the first try, for failed connections, timeouts and
    5xx. token_env: the environment variable with the server's token. frames: "all", or n for every n-th frame from the
    first. send_reference: send the real clip, too. max_bytes: of one request; a larger batch is split. parallel:
    batches that one process sends at a time; docs/rewards_remote.md has the memory that they take.

    A sample whose reference is None or whose pixels are not finite is invalid and is not sent. A sample is also invalid
    when the server marks it so or its score is not finite. Other problems raise RewardServerError.
    """

    name = "remote"
    differentiable = False
    uses_prompt = True
    concurrent = True
    licence = "the served reward's"
    range = "the served reward's"

    def __init__(
        self,
        url: Annotated[str, must_be("like http://127.0.0.1:8400", lambda url: _is_url(url))],
        timeout: Positive = 300.0,
        retries: Whole = 4,
        token_env: Annotated[str, on_this_machine(read_token)] | Literal[""] = "",
        frames: Literal["all"] | Count = "all",
        *,
        send_reference: bool = False,
        max_bytes: Count = 400_000_000,
        parallel: Count = 4,
    ):
        super().__init__()
        self.url, self.token = url.rstrip("/"), read_token(token_env) if token_env else ""
        self.timeout, self.retries = timeout, retries
        self.stride = 1 if frames == "all" else frames
        self.send_reference = send_reference
        self.max_bytes, self.parallel = max_bytes, parallel
        self.sleep: Callable[[float], None] = time.sleep
        self.random = random.Random()  # the global one belongs to the training, which resumes exactly
        self._tls = ssl.create_default_context()  # the system's certificates

    @classmethod
    def comparison(cls, settings: Mapping[str, Any]) -> str:
        return "clip" if settings.get("send_reference") else "nothing"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return prompt (n,) uint8, its UTF-8; with send_reference also frames (F', H, W, 3) uint8 of the real clip."""
        reference = {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8)}
        if self.send_reference:
            reference["frames"] = data.to_uint8(video[:, :: self.stride]).cpu().contiguous()
        return reference

    def fingerprint(self) -> dict[str, object]:
        """Return the selection of the real clip's frames; the reference does not depend on the server."""
        return {"name": self.name, "frames": self.stride if self.send_reference else None}

    def held(self, video: Tensor, batch: Sequence[Reference]) -> tuple[Tensor, Sequence[Reference]]:
        """Return the frames to send, (B, F', H, W, 3) uint8, and references, as to_uint8_frames."""
        return to_uint8_frames(video, batch, slice(None, None, self.stride))

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        """Score videos (B, 3, F, H, W) in [-1, 1], or the output of `held` for them, on the CPU."""
        frames, references = (video, batch) if video.dtype == torch.uint8 else self.held(video, batch)
        clips = {
            i: Clip(frames[i], bytes(values["prompt"].tolist()).decode(), values.get("frames"))
            for i, values in enumerate(references)
            if values is not None
        }
        score, valid = torch.zeros(len(video)), torch.zeros(len(video), dtype=torch.bool)
        parts: dict[str, Tensor] = {}
        for group, body in pack_requests(clips, self.max_bytes, self.place) if clips else ():
            response = self._request(body)
            try:
                score[group], valid[group], group_parts = wire.unpack_answer(response, len(group))
            except wire.WireError as error:
                advice = "is that tools/serve_reward.py of this release?"
                raise self._error(f"the response breaks the format: {error}; {advice}") from None
            for name, values in group_parts.items():
                parts.setdefault(name, torch.full((len(video),), math.nan))[group] = values
        return RewardOutput(score, valid, parts)

    def _request(self, body: bytes) -> bytes:
        """Send POST /score until its status is 200, and return the response's body. Ignore redirects and proxies."""
        headers = {"Content-Type": wire.CONTENT_TYPE}
        headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        for attempt in range(self.retries + 1):
            if attempt:  # jitter spreads the clients
                self.sleep(min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE) * (0.5 + self.random.random()))
            status = 0
            try:
                response = httpx.post(
                    self.url + "/score", content=body, headers=headers, timeout=self.timeout, verify=self._tls,
                    trust_env=False,
                )  # fmt: skip
                message = escape_control(response.text[:1000]).replace("\n", " ")
                status, problem = response.status_code, f"status {response.status_code}: {message}"
            except httpx.TimeoutException:
                problem = f"no response in {self.timeout:g} s ({self.place}.timeout)"
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            if status == 200:
                return response.content
            if 0 < status < 500:
                raise self._error(f"POST /score: {problem}")
        # 500: the reward raised, maybe for one clip
        error_class = RewardServerError if status == 500 else ServerUnavailableError
        advice = f"look at the server's log, and whether {self.url}/health replies to this machine"
        raise self._error(f"POST /score failed {attempt + 1} times; the last time: {problem}; {advice}", error_class)

    def _error(self, message: str, error_class: type[RewardServerError] = RewardServerError) -> RewardServerError:
        return error_class(f"{self.place}.url {self.url}: {message}")


def pack_requests(clips: Mapping[int, Clip], limit: int, place: str) -> Iterator[tuple[list[int], bytes]]:
    """Yield the keys of clips and the body of their request, halved until each has at most `limit` bytes.

    Raise ValueError for a clip that is too large by itself. place: the key of the settings, for messages.
    """
    body = wire.pack_request(list(clips.values()))
    if len(body) <= limit:
        yield list(clips), body
    elif len(clips) == 1:
        raise ValueError(
            f"{place}.max_bytes is {limit}, and a request with one clip has {len(body)} bytes; raise it, or send fewer "
            f"frames ({place}.frames: 4)"
        )
    else:
        for half in (list(clips)[: len(clips) // 2], list(clips)[len(clips) // 2 :]):
            yield from pack_requests({i: clips[i] for i in half}, limit, place)
