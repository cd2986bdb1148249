"""Renew the diffs of docs/change_the_algorithm.md after the code around them has changed.

python tests/support/refresh_worked_changes.py

Each hunk is found again by its own lines and written with today's line numbers and context. A hunk whose lines are no
longer in the file is printed: edit it by hand in the page, with any line numbers, and run this again.
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "change_the_algorithm.md"
CONTEXT = 1  # unchanged lines around each change


def split_files(block: str) -> list[tuple[str, list[list[str]]]]:
    """Return (path, hunks) of a diff block; a hunk is its lines with their first character."""
    files: list[tuple[str, list[list[str]]]] = []
    for line in block.splitlines():
        if line.startswith("--- "):
            files.append((line.removeprefix("--- a/"), []))
        elif line.startswith("@@"):
            files[-1][1].append([])
        elif not line.startswith("+++ "):
            files[-1][1][-1].append(line or " ")
    return files


def apply_hunk(lines: list[str], hunk: list[str]) -> list[str] | None:
    """Return the lines with the hunk applied where its old lines are, with as little context as finds one place."""
    for skip in range(CONTEXT + 1):
        body = hunk[skip : len(hunk) - skip]
        old, new = ([line[1:] for line in body if line[:1] in f" {sign}"] for sign in "-+")
        places = [i for i in range(len(lines) - len(old) + 1) if lines[i : i + len(old)] == old] if old else []
        if len(places) == 1:
            return lines[: places[0]] + new + lines[places[0] + len(old) :]
    return None


def main() -> int:
    """Rewrite the page; return 1 where a hunk has no place in the code."""
    lost = []

    def renew(match: re.Match) -> str:
        parts = []
        for path, hunks in split_files(match[1]):
            before = (ROOT / path).read_text().splitlines() if (ROOT / path).is_file() else []
            after = before
            for hunk in hunks:
                changed = apply_hunk(after, hunk)
                lost.extend([] if changed else ["\n".join([path, *hunk])])
                after = changed or after
            parts += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=CONTEXT, lineterm="")
        return "```diff\n" + "".join(f"{line.rstrip()}\n" for line in parts) + "```"

    text = re.sub(r"^```diff\n(.*?)^```", renew, PAGE.read_text(), flags=re.M | re.S)
    if lost:
        print("no place in the code for:\n\n" + "\n\n".join(lost), file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
