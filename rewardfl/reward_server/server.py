"""A reward over HTTP, for tools/serve_reward.py. rewards/remote/wire.py describes the format."""

import argparse
import asyncio
import hmac
import logging
import signal
import socket
import threading
import time

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from rewardfl import command_line, data, rewards
from rewardfl.rewards.base import Reward
from rewardfl.rewards.remote import wire
from rewardfl.rewards.remote.client import read_token
from rewardfl.rewards.remote.wire import Clip
from rewardfl.rewards.scoring import RewardResult, concat_results
from rewardfl.rewards.settings import parse_settings

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # at a time, with and without a token; uvicorn refuses further ones with 503
DRAIN_SECONDS = 60  # for running requests when the server stops


class RewardServer:
    """A reward over HTTP at (host, port); port 0 takes a free one, see `address`.

    It scores requests one at a time on the device, in micro-batches of `batch` clips. max_bytes: of a request's body.
    token: required for /score, "" for none. Raises OSError for an unavailable address.
    """

    def __init__(
        self,
        address: tuple[str, int],
        reward: Reward,
        device: str | torch.device,
        batch: int,
        max_bytes: int,
        token: str,
    ):
        self.reward, self.device = reward.to(device).eval(), device
        self.batch, self.max_bytes, self.token = batch, max_bytes, token
        self._device_lock = asyncio.Lock()
        app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._score, methods=["POST"])],
            exception_handlers={HTTPException: _refuse},  # type: ignore[dict-item]  # called with this type only
        )
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._uvicorn = uvicorn.Server(uvicorn.Config(
            app, http="h11", ws="none", loop="asyncio", lifespan="off", server_header=False, log_config=None,
            proxy_headers=False,  # otherwise a client may choose the address in the log
            limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=DRAIN_SECONDS,
        ))  # fmt: skip

    def run(self) -> None:
        """Serve until `stop`, in the main thread also until a signal; then complete the running requests."""
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run` from any thread: take no more requests and complete the running ones."""
        self._uvicorn.should_exit = True

    def score(self, body: bytes) -> tuple[bytes, int]:
        """Return the response to the body of POST /score, and the number of clips. Raise HTTPException for an error."""
        try:
            clips = wire.unpack_request(body)
        except wire.WireError as error:
            raise HTTPException(400, str(error)) from None
        if self.reward.compares_with != "nothing" and clips[0].reference is None:
            message = f"reward {self.reward.name} compares with the real clip; set the client's send_reference: true"
            raise HTTPException(400, message)
        try:
            results = [self._score_batch(clips[i : i + self.batch]) for i in range(0, len(clips), self.batch)]
        except Exception as error:  # the reward may be the user's code
            log.exception("reward %s failed", self.reward.name)
            raise HTTPException(500, f"reward {self.reward.name} failed: {type(error).__name__}: {error}") from None
        output = concat_results(results).output
        return wire.pack_answer(output.score, output.valid, output.parts), len(clips)

    @torch.no_grad()
    def _score_batch(self, clips: list[Clip]) -> RewardResult:
        reals = [clip.frames[:0] if clip.reference is None else clip.reference for clip in clips]
        prompts = [clip.prompt for clip in clips]
        references = [self.reward.reference(self._video(real), text) for real, text in zip(reals, prompts, strict=True)]
        output = self.reward(torch.stack([self._video(clip.frames) for clip in clips]), references)
        return RewardResult(output, torch.zeros(len(clips)).bool()).at_rest()

    def _video(self, frames: Tensor) -> Tensor:
        """Convert frames (F, H, W, 3) uint8 to (3, F, H, W) in [-1, 1] on the device."""
        return data.to_float(frames.to(self.device)).contiguous()

    async def _health(self, request: Request) -> Response:
        state = {"status": "ok", "reward": self.reward.name, "version": wire.WIRE_VERSION, "max_bytes": self.max_bytes}
        return JSONResponse(state)

    async def _score(self, request: Request) -> Response:
        start = time.monotonic()
        token, expected = request.headers.get("Authorization", ""), f"Bearer {self.token}"
        # in constant time, so that the time does not reveal the token
        if self.token and not hmac.compare_digest(token.encode(), expected.encode()):
            raise HTTPException(401, "this server needs its token (Authorization: Bearer); set the client's token_env")
        body = bytearray()
        try:
            async for block in request.stream():
                body += block
                if len(body) > self.max_bytes:
                    message = f"a body of more than {self.max_bytes} bytes (--max-mb of this server)"
                    raise HTTPException(413, f"{message}; lower the client's max_bytes")
            async with self._device_lock:
                if await request.is_disconnected():  # it has asked again since
                    raise ClientDisconnect
                content, count = await run_in_threadpool(self.score, bytes(body))
        except ClientDisconnect:
            raise HTTPException(400, "the client went away") from None
        log.info("%d clips, %.1f MB, %.2f s", count, len(body) / 1e6, time.monotonic() - start)
        return Response(content, media_type=wire.CONTENT_TYPE)


async def _refuse(request: Request, error: HTTPException) -> Response:
    # ascii: a client cannot write line breaks into the log
    log.info("%d %s", error.status_code, ascii(error.detail))
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def serve_reward(args: argparse.Namespace) -> int:
    """Serve a reward until SIGTERM or SIGINT and return the exit code. Raise ValueError for wrong settings."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        token = read_token(args.token_env) if args.token_env else ""
    except ValueError as error:
        raise ValueError(f"--token-env must be {error}") from None
    if args.host not in ("127.0.0.1", "::1", "localhost") and not token:
        advice = "the environment variable that holds one with --token-env"
        raise ValueError(f"--host {args.host}: without a token only 127.0.0.1 is served; name {advice}")
    device = command_line.resolve_device(args.device)
    reward = rewards.build(args.reward, parse_settings(args.settings), "--settings")
    try:
        server = RewardServer((args.host, args.port), reward, device, args.batch, int(args.max_mb * 1e6), token)
    except OSError as error:
        raise ValueError(f"--host {args.host} --port {args.port}: {error}; choose another address") from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # a daemon thread: a reward that hangs does not keep the process alive
    running = threading.Thread(target=server.run, name="serve", daemon=True)
    running.start()
    host, port = server.address
    print(f"serving {reward.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    stop.wait()
    server.stop()
    running.join(DRAIN_SECONDS + 5)
    return command_line.DONE
