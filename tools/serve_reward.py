"""Serve a reward to trainings on this machine or others, for `reward.name: remote` (docs/rewards_remote.md).

    python tools/serve_reward.py --reward face_identity --settings pack_dir=models/antelopev2 --device cuda
    REWARD_TOKEN=... python tools/serve_reward.py --reward my_reward.py:Mine --host 0.0.0.0 --token-env REWARD_TOKEN

Stops on Ctrl-C or SIGTERM, after answering what is being scored. Exits with 0 then, 2 when the settings cannot work,
1 when the address cannot be had.
"""

import argparse
import logging
import math
import signal
import sys
import threading

import torch
import yaml

from rewardfl import rewards
from rewardfl.rewards.remote.client import token_of

try:
    from rewardfl.rewards.remote.server import DRAIN_SECONDS, RewardServer, Service, check_host
except ModuleNotFoundError as error:
    if error.name.partition(".")[0] not in ("h11", "starlette", "uvicorn"):
        raise
    print(f"error: {error}; a reward server needs: pip install h11 starlette uvicorn", file=sys.stderr)
    sys.exit(2)

STOPPED, NO_ADDRESS, REFUSED = 0, 1, 2  # exit codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", required=True, help="a name, as reward.name in a config")
    parser.add_argument("--settings", nargs="*", default=[], type=setting, metavar="key=value", help="of the reward")
    parser.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    parser.add_argument("--port", type=int, default=8400, help="0 takes a free one and says which")
    parser.add_argument("--token-env", default="", metavar="VAR", help="environment variable with the token to ask for")
    parser.add_argument("--max-mb", type=float, default=512, help="of a request, in 1e6 bytes; up to 4 are in memory")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=4, help="clips scored at a time")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        server = listen(args)
    except (ValueError, TypeError, RuntimeError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"error: --host {args.host} --port {args.port}: {error}", file=sys.stderr)
        return NO_ADDRESS
    serve(server)
    return STOPPED


def setting(text: str) -> tuple[str, object]:
    """key=value, the value as in YAML."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting; write key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: the value is no YAML: {error}") from None


def listen(args: argparse.Namespace) -> RewardServer:
    """The server, bound to its address; ValueError, TypeError or RuntimeError for settings that cannot work."""
    if args.batch < 1:
        raise ValueError(f"--batch must be 1 or more, got {args.batch}")
    if not 1e-6 <= args.max_mb < math.inf:
        raise ValueError(f"--max-mb must be a number of 1e6 bytes, above 0 and finite, got {args.max_mb}")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be 0 (a free one) to 65535, got {args.port}")
    token = token_of(args.token_env, "--token-env") if args.token_env else ""
    check_host(args.host, token)  # before weights load
    reward = rewards.build(args.reward, dict(args.settings))
    return RewardServer((args.host, args.port), Service(reward, args.device, args.batch, int(args.max_mb * 1e6), token))


def serve(server: RewardServer) -> None:
    """Until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # a daemon: a reward that hangs does not keep the process alive
    running = threading.Thread(target=server.run, name="serve", daemon=True)
    running.start()
    host, port = server.address
    print(f"serving {server.service.reward.name} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    stop.wait()
    server.stop()
    running.join(DRAIN_SECONDS + 5)


if __name__ == "__main__":
    sys.exit(main())
