"""Serves a reward over HTTP: what tools/serve_reward.py runs. The wire format is at the top of wire.py.

Service judges headers and bodies; RewardServer, a Starlette application under uvicorn, knows nothing of rewards.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h11
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from rewardfl import data
from rewardfl.rewards.base import Reward
from rewardfl.rewards.remote import wire
from rewardfl.rewards.remote.wire import Clip
from rewardfl.rewards.terms import Judged, joined

log = logging.getLogger(__name__)

WAIT_SECONDS = 10  # for a place among the bodies in memory; less than a client waits to be told to go on
ASK_AGAIN = {"Retry-After": "1"}  # seconds; it is asked of clients that got none; they have waited here already
# A body arrives within BODY_SECONDS and is never more than BODY_LAG_SECONDS behind BODY_BYTES_PER_SECOND: a client that
# takes a place and sends nothing, or a byte now and then, has lost it again after these few seconds.
BODY_SECONDS, BODY_LAG_SECONDS, BODY_BYTES_PER_SECOND = 120.0, 5.0, 100_000
MAX_CONNECTIONS = 256  # at a time, with and without a token
HEAD_SECONDS = 10  # for a request's line and headers, from when the client connects
MAX_HEAD_BYTES = 1 << 16
IDLE_SECONDS = 30  # for the client to take the answer
LINGER_SECONDS = 1.0
DRAIN_SECONDS = 60  # for what is being scored when the server is told to stop

# All that goes wrong in a reward, the device's memory (RuntimeError) included; it is the client's to know of.
REWARD_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Service:
    """A reward that answers requests, one at a time on its device, in micro-batches of `batch` clips.

    reward: one of rewards.build, whose answers are checked. max_bytes: of a request's body. token: what /score asks
    for, "" for nothing.
    """

    def __init__(self, reward: Reward, device: str | torch.device, batch: int, max_bytes: int, token: str = ""):
        self.reward, self.device = reward.to(device).eval(), torch.device(device)
        self.batch, self.max_bytes, self.token = batch, max_bytes, token
        self._device_is_ours = threading.Lock()

    def health(self) -> bytes:
        """The JSON that GET /health answers."""
        state = {"status": "ok", "reward": self.reward.name, "version": wire.VERSION}
        return json.dumps(state | {"max_bytes": self.max_bytes}).encode()

    def admit(self, headers: Headers) -> int:
        """Bytes of a scoring request's body, from its headers alone; HTTPException when it is not to be read."""
        given, wanted = headers.get("Authorization", ""), f"Bearer {self.token}"
        # in a time that does not tell how much of it was right
        if self.token and not hmac.compare_digest(given.encode(), wanted.encode()):
            raise HTTPException(401, "this server wants its token: Authorization: Bearer <token>")
        if headers.get("Content-Type", "").partition(";")[0].strip().lower() != wire.CONTENT_TYPE:
            raise HTTPException(415, f"Content-Type must be {wire.CONTENT_TYPE}, got {headers.get('Content-Type')}")
        if "Content-Length" not in headers or "Transfer-Encoding" in headers:
            raise HTTPException(411, "Content-Length is missing; a body in chunks is not taken")
        length = int(headers["Content-Length"])  # h11 has refused what is not one whole number
        if length > self.max_bytes:
            raise HTTPException(413, f"a body of {length} bytes; this server takes at most {self.max_bytes} (--max-mb)")
        return length

    def score(self, body: bytes) -> tuple[bytes, int]:
        """The answer to the body of POST /score, and the number of clips; HTTPException where there is none."""
        try:
            clips = wire.unpack_request(body)
        except wire.WireError as error:
            raise HTTPException(400, str(error)) from None
        try:
            with self._device_is_ours:
                outputs = [self._score(clips[i : i + self.batch]) for i in range(0, len(clips), self.batch)]
            output = joined(outputs).output
            return wire.pack_answer(output.score, output.valid, output.parts), len(clips)
        except REWARD_ERRORS as error:
            log.exception("reward %s failed", self.reward.name)
            sent = clips[0].reference is not None
            hint = "" if sent else "; the request held no real clips (the client's send_reference)"
            said = f"reward {self.reward.name} failed: {type(error).__name__}: {error}{hint}"
            raise HTTPException(500, said) from None

    @torch.no_grad()
    def _score(self, clips: list[Clip]) -> Judged:
        """What the reward says of one micro-batch, at rest."""
        references = [self._reference(clip) for clip in clips]
        output = self.reward(torch.stack([self._video(clip.frames) for clip in clips]), references)
        return Judged(output, torch.zeros(len(clips)).bool()).at_rest()

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


def check_host(host: str, token: str) -> None:
    """ValueError for an address that others can reach, unless there is a token."""
    ours = host == "localhost"
    with suppress(ValueError):  # another name: it may resolve to anything
        ours = ours or ipaddress.ip_address(host).is_loopback
    if not ours and not token:
        raise ValueError(
            f"--host {host}: without a token the server listens on this machine only (127.0.0.1); name the environment "
            "variable that holds one with --token-env"
        )


# ------------------------------------------------------------------------------------------------------------
# HTTP


class RewardServer:
    """Listens at (host, port); port 0 takes a free one, see `address`. OSError for an address that cannot be had."""

    def __init__(self, address: tuple[str, int], service: Service):
        check_host(address[0], service.token)
        self.service = service
        self._places = asyncio.Semaphore(wire.PLACES)
        self._app = Starlette(
            routes=[Route("/health", self._health), Route("/score", self._score, methods=["POST"])],
            exception_handlers={HTTPException: _refused},  # type: ignore[dict-item]  # it is called with no other
        )
        self._app.router.redirect_slashes = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            http=Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            headers=[("Connection", "close"), ("Server", "rewardfl")],  # one request per connection
            server_header=False,
            proxy_headers=False,  # or a client may choose the address that the log names
            log_config=None,
            log_level="error",
            access_log=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)

    def run(self) -> None:
        """Until `stop`, then until what is being scored is answered. In the main thread also until a signal."""
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Take no more requests, answer those being scored, end `run`; from any thread."""
        self._uvicorn.should_exit = True

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, and one line of log per request: what, status; clips and time, or what was wrong.

        What is still on its way behind a refusal is thrown away for a moment: closing on it would take the answer back.
        """
        status, more = 0, True

        async def receive_noted() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def send_noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if more and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while more:
                            await receive_noted()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_noted, send_noted)
        asked = f"{scope['method']} {scope['raw_path'][:200].decode()} HTTP/{scope['http_version']}"
        _log(scope["client"], f"{asked} {status} {scope['state'].get('note', '')}")

    async def _health(self, request: Request) -> Response:
        return Response(self.service.health(), media_type="application/json")

    async def _score(self, request: Request) -> Response:
        start = time.monotonic()
        length = self.service.admit(request.headers)
        async with self._place():
            body = await _body(request, length)
            try:
                answer, count = await run_in_threadpool(self.service.score, body)
            except asyncio.CancelledError:  # by uvicorn, when it is told to stop and DRAIN_SECONDS are over
                raise HTTPException(503, "shutting down") from None
        request.state.note = f"{count} clips, {length / 1e6:.1f} MB, {time.monotonic() - start:.2f} s"
        return Response(answer, media_type=wire.CONTENT_TYPE)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among the requests whose bodies are in memory; HTTPException when none comes free."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise HTTPException(503, f"busy: no place came free in {WAIT_SECONDS} s; ask again", ASK_AGAIN) from None
        try:
            if self._uvicorn.should_exit:
                raise HTTPException(503, "shutting down")
            yield
        finally:
            self._places.release()


async def _body(request: Request, length: int) -> bytes:
    """A request's body; HTTPException when it does not arrive in time or is cut off. Waiting for it says Continue."""
    start, arrived, blocks = asyncio.get_running_loop().time(), 0, []
    try:
        async with asyncio.timeout_at(start + min(BODY_SECONDS, BODY_LAG_SECONDS)) as deadline:
            async for block in request.stream():
                blocks.append(block)
                arrived += len(block)
                deadline.reschedule(start + min(BODY_SECONDS, BODY_LAG_SECONDS + arrived / BODY_BYTES_PER_SECOND))
    except TimeoutError:
        # 503: the client is to try again
        raise HTTPException(503, f"the body came too slowly: {arrived} of {length} bytes; send it again") from None
    except ClientDisconnect:
        raise HTTPException(400, f"the client went away after {arrived} of {length} bytes") from None
    return b"".join(blocks)


async def _refused(request: Request, error: HTTPException) -> Response:
    request.state.note = error.detail
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class Protocol(H11Protocol):
    """uvicorn's connection with the limits that uvicorn lacks, and JSON as the answer to what is no HTTP.

    Uses the attributes connections, cycle and conn and the method send_400_response, as of uvicorn 0.54.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self.abort = self.loop.call_later(HEAD_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            _log(self.client, f"hung up: {MAX_CONNECTIONS} connections are open")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        head_awaited = self.cycle is None
        super().data_received(data)
        if head_awaited and self.cycle is not None:
            self.abort.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._abort_unless_taken()

    def _abort_unless_taken(self) -> None:
        self.abort.cancel()
        self.abort = self.loop.call_later(IDLE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # a body that breaks off in the middle of a chunk, while or after it is answered
            self.transport.abort()
            return
        body = json.dumps({"error": msg}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self._abort_unless_taken()
        _log(self.client, f"400 {msg}")


def _log(client: tuple[str, int] | None, line: str) -> None:
    # ascii: a client does not get to write lines of its own
    log.info("%s %s", client[0] if client else "-", ascii(line))
