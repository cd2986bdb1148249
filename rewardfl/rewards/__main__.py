"""Look at rewards: which there are, and what they say about video files.

python -m rewardfl.rewards
python -m rewardfl.rewards score --reward aesthetic --settings model_dir=... head=... -- videos/*.mp4
python -m rewardfl.rewards score --reward pickscore --settings model_dir=... --prompt "a dancer" -- videos/*.mp4
python -m rewardfl.rewards score --reward motion --metadata data/metadata.csv -- outputs/*.mp4
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rewardfl import data, trust
from rewardfl.files import escape_control, protect_console
from rewardfl.rewards import REWARDS, Reward, build, find_reward
from rewardfl.rewards.settings import parse_settings

_COLUMNS = ("name", "differentiable", "range", "weights", "licence")


def main(arguments: Sequence[str] | None = None) -> int:
    protect_console()
    parser = argparse.ArgumentParser(
        prog="python -m rewardfl.rewards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", metavar="score")
    score = commands.add_parser("score", help="score video files")
    score.add_argument("--reward", required=True, help="a name of the table, module:Class or file.py:Class")
    score.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="the reward's own settings")
    about = score.add_mutually_exclusive_group()
    about.add_argument("--prompt", default="", help="of all videos")
    about.add_argument(
        "--metadata", help="metadata.csv: prompt and real clip of each video, found by the file's name without suffix"
    )
    score.add_argument("--reference", help="real clip that all videos are compared with (default: each with itself)")
    score.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    score.add_argument("videos", nargs="+", metavar="VIDEO")
    trust.add_option(score)
    args = parser.parse_args(arguments)
    if args.command is None:
        classes = [find_reward(name) for name in sorted(REWARDS)]
        print(table([{column: str(getattr(cls, column)) or "-" for column in _COLUMNS} for cls in classes]))
        return 0
    try:
        reward = build(args.reward, parse_settings(args.settings), "--settings").to(args.device)
        print(table(score_files(reward, args)))
    except (ValueError, OSError) as error:
        print(escape_control(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


@torch.no_grad()
def score_files(reward: Reward, args: argparse.Namespace) -> list[dict[str, str]]:
    """Score the videos of the command line; return table rows of file, score (- for invalid) and parts."""
    rows = {row.video.stem: row for row in data.load_metadata(args.metadata) if row.video} if args.metadata else {}
    results = []
    for path in args.videos:
        prompt, real = args.prompt, args.reference
        if args.metadata:
            if Path(path).stem not in rows:
                raise ValueError(f"{path}: no row of --metadata has a video of that name")
            row = rows[Path(path).stem]
            prompt, real = row.prompt, real or row.reference_video or row.video
        video, clip = (data.to_float(data.read_video(file)).to(args.device) for file in (path, real or path))
        output = reward(video[None], [reward.reference(clip, prompt)])
        score = f"{output.score.item():.4f}" if output.valid.item() else "-"
        parts = {name: f"{part.item():.4f}" for name, part in output.parts.items()}
        results.append({"video": path, "score": score, **parts})
    return results


def table(rows: Sequence[dict[str, str]]) -> str:
    """Return rows of the same keys as aligned columns below the keys."""
    lines = [list(rows[0]), *([row[key] for key in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
