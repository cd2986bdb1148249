"""Write a table of pairs, to train on by forward.objective dpo, from votes on which of two clips is better.

python examples/vote_table.py --votes votes.csv --out pairs.csv

votes.csv has the columns a, b, vote (a, b or tie), prompt and perhaps image; paths are relative to its folder. Votes on
the same clips and prompt are added up. Train with reward.terms.score.weight=0 forward.group_size=2.
"""

import csv
import io
from collections import Counter
from pathlib import Path

from rewardfl import command_line, data, outputs

VOTES = {"a": 1, "b": -1, "tie": 0}


def write_table():
    target = outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=[args.votes])
    target.check()
    data.load_metadata(args.votes, "--votes")  # refuses a file that holds no table with prompts
    margins, lines, text = Counter(), [("chosen", "rejected", "prompt", "image")], io.StringIO()
    with args.votes.open(newline="", encoding="utf-8-sig") as file:
        for row in (reader := csv.DictReader(file, restval="")):
            a, b, image = (row.get(name) and args.votes.absolute().parent / row[name] for name in ("a", "b", "image"))
            where = f"--votes {args.votes}: line {reader.line_num}"
            if row.get("vote") not in VOTES or not (a and b) or a == b:
                raise ValueError(f"{where}: needs a clip a, another clip b, and vote a, b or tie; mend or remove it")
            if missing := [path for path in (a, b, image) if path and not path.is_file()]:
                raise ValueError(f"{where}: no such file: {missing[0]}; mend or remove the line")
            margin = VOTES[row["vote"]]
            margins[min(a, b), max(a, b), row["prompt"], image] += margin if a < b else -margin
    for (first, second, prompt, image), margin in margins.items():
        lines += [(*((first, second) if margin > 0 else (second, first)), prompt, image)] if margin else []
    if len(lines) == 1:
        raise ValueError(f"--votes {args.votes}: has no pair with a winner; add votes")
    csv.writer(text).writerows(lines)
    target.write(text.getvalue().encode())
    print(f"{args.out}: {len(lines) - 1} pairs; {len(margins) - len(lines) + 1} ties are left out")


parser = command_line.Parser(__doc__)
for option in ("--votes", "--out"):
    parser.add_argument(option, type=Path, required=True)
command_line.add_overwrite_option(parser)
args = parser.parse_args()
raise SystemExit(command_line.exit_code(write_table))
