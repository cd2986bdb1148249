"""The command tools/serve_reward.py: check its arguments, build the reward, serve until a signal."""

import argparse
import logging
import math
import signal
import sys
import threading

from rewardfl import command_line, rewards
from rewardfl.files import escape_control
from rewardfl.reward_server.server import DRAIN_SECONDS, RewardServer, Service, check_host
from rewardfl.rewards.remote.client import read_token

STOPPED, NO_ADDRESS, REFUSED = 0, 1, 2  # exit codes


def run(args: argparse.Namespace) -> int:
    """Serve a reward and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        args.device = command_line.resolve_device(args.device)
        server = listen(args)
    except (ValueError, TypeError, RuntimeError, FileNotFoundError) as error:
        print(escape_control(f"error: {error}"), file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"error: --host {args.host} --port {args.port}: {error}", file=sys.stderr)
        return NO_ADDRESS
    serve(server)
    return STOPPED


def listen(args: argparse.Namespace) -> RewardServer:
    """Build the server, bound to its address. Raise ValueError, TypeError or RuntimeError for wrong settings."""
    if args.batch < 1:
        raise ValueError(f"--batch must be 1 or more, got {args.batch}")
    if not 1e-6 <= args.max_mb < math.inf:
        raise ValueError(f"--max-mb must be a number of 1e6 bytes, above 0 and finite, got {args.max_mb}")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be 0 (a free one) to 65535, got {args.port}")
    try:
        token = read_token(args.token_env) if args.token_env else ""
    except ValueError as error:
        raise ValueError(f"--token-env must be {error}") from None
    check_host(args.host, token)  # before weights load
    reward = rewards.build(args.reward, dict(args.settings), "--settings")
    return RewardServer((args.host, args.port), Service(reward, args.device, args.batch, int(args.max_mb * 1e6), token))


def serve(server: RewardServer) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # a daemon thread: a reward that hangs does not keep the process alive
    running = threading.Thread(target=server.run, name="serve", daemon=True)
    running.start()
    host, port = server.address
    print(f"serving {server.service.reward.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    stop.wait()
    server.stop()
    running.join(DRAIN_SECONDS + 5)
