"""Serve a reward to trainings on this machine or others, for the reward `remote` (docs/rewards_remote.md).

    python tools/serve_reward.py --reward face_identity --settings pack_dir=models/antelopev2 --device cuda
    REWARD_TOKEN=... python tools/serve_reward.py --trust-code --reward my_reward.py:Mine \\
        --host 0.0.0.0 --token-env REWARD_TOKEN

Stops on Ctrl-C or SIGTERM, after the running requests, with exit code 0; 2: the settings or the address cannot be used.
"""

import sys
from typing import Annotated

from pydantic import Field

from rewardfl import command_line, trust
from rewardfl.config.schema import Count, Positive

Port = Annotated[int, Field(ge=0, le=65535)]


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--reward", required=True, help="a name, as reward.terms.score.name in a config")
    parser.add_argument("--settings", nargs="*", default=[], metavar="key=value", help="of the reward")
    parser.add_argument("--host", default="127.0.0.1", help="another address than this machine's own needs a token")
    port, positive, count = map(command_line.option_type, (Port, Positive, Count))
    parser.add_argument("--port", type=port, default=8400, help="0 takes a free one and prints it")
    parser.add_argument("--token-env", default="", metavar="VAR", help="environment variable with the token to ask for")
    text = "of a request, in 1e6 bytes; up to 4 are in memory"
    parser.add_argument("--max-mb", type=positive, default=512, help=text)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--batch", type=count, default=4, help="clips scored at a time")
    trust.add_option(parser)
    args = parser.parse_args()
    try:
        return command_line.run("rewardfl.reward_server.server:serve_reward", args)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        print(f"error: {error}; a reward server needs: pip install starlette uvicorn", file=sys.stderr)
        return command_line.REFUSED


if __name__ == "__main__":
    sys.exit(main())
