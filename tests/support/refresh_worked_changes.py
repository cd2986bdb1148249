"""Renew the diffs of docs/change_the_algorithm.md after the code around them has changed.

python tests/support/refresh_worked_changes.py

git finds each hunk again by its own lines. A hunk whose lines are no longer in the file is printed: edit it by hand in
the page, with any line numbers, and run this again.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "change_the_algorithm.md"


def renew(match: re.Match) -> str:
    """Return a diff block with today's line numbers and context."""
    paths, lines = re.findall("^--- a/(.*)$", match[1], re.M), []
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            for side in "ab":
                (copy := Path(folder, side, path)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, copy)
        git = {"cwd": folder, "text": True, "capture_output": True}
        patch = re.sub("^--- a/(.*)$", r"diff --git a/\1 b/\1\n\g<0>", match[1], flags=re.M)  # for --recount
        apply = ["git", "apply", "-C1", "--recount", "--directory=b", "-"]
        done = subprocess.run(apply, input=patch, **git)
        if done.returncode != 0:
            sys.exit(done.stderr)
        for path in paths:
            diff = ["git", "diff", "--no-index", "--no-prefix", "-U1", f"a/{path}", f"b/{path}"]
            lines += subprocess.run(diff, **git).stdout.splitlines()[2:]  # without git's own two lines
    return "\n".join(["```diff", *(re.sub(r"^(@@.*@@).*", r"\1", line).rstrip() for line in lines), "```"])


if __name__ == "__main__":
    PAGE.write_text(re.sub(r"^```diff\n(.*?)^```", renew, PAGE.read_text(), flags=re.M | re.S))
