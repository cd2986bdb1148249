"""Serve a reward to trainings on this machine or others, for `reward.name: remote` (docs/rewards_remote.md).

    python tools/serve_reward.py --reward face_identity --settings pack_dir=models/antelopev2 --device cuda
    REWARD_TOKEN=... python tools/serve_reward.py --trust-code --reward my_reward.py:Mine \\
        --host 0.0.0.0 --token-env REWARD_TOKEN

Stops on Ctrl-C or SIGTERM, after answering the running requests. Exits with 0 then, 2 when the settings cannot work,
1 when the address cannot be had.
"""

import argparse
import sys

import yaml

from rewardfl import command_line, trust

MISSING = 2  # exit code, as for settings that cannot work


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--reward", required=True, help="a name, as reward.name in a config")
    parser.add_argument("--settings", nargs="*", default=[], type=setting, metavar="key=value", help="of the reward")
    parser.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    parser.add_argument("--port", type=int, default=8400, help="0 takes a free one and says which")
    parser.add_argument("--token-env", default="", metavar="VAR", help="environment variable with the token to ask for")
    parser.add_argument("--max-mb", type=float, default=512, help="of a request, in 1e6 bytes; up to 4 are in memory")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--batch", type=int, default=4, help="clips scored at a time")
    trust.add_option(parser)
    args = parser.parse_args()
    try:
        from rewardfl.reward_server import serving  # here, so that --help and mistakes need no torch
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        print(f"error: {error}; a reward server needs: pip install starlette uvicorn", file=sys.stderr)
        return MISSING
    return serving.run(args)


def setting(text: str) -> tuple[str, object]:
    """Parse key=value, the value as in YAML."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting; write key=value")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: the value is no YAML: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
