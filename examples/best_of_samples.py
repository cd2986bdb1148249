"""Write a table of each row's best own sample, to train on as data: a reward's rival where there are no clips.

python examples/best_of_samples.py --samples OUT_OF_EVALUATE --data ITS_DATA --by reward/face_sim --out best.csv
"""

import csv
import io
import random
from pathlib import Path

from rewardfl import command_line, data, outputs
from rewardfl.evaluation.records import read_records


def write_table():
    target = outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=[args.samples, args.data])
    target.check()
    lines, text = [("video", "image", "reference_video", "prompt", "person")], io.StringIO()
    samples = [record for record in read_records(args.samples).values() if record["arm"] == "base"]
    for row in data.load_metadata(args.data, "--data"):
        scores = [(s["figures"].get(args.by), -s["seed"], s["file"]) for s in samples if s["row"] == row.id]
        scores = [score for score in scores if score[0] is not None]
        if scores and max(scores)[0] - min(scores)[0] > 1e-6 * abs(max(scores)[0]):
            sample = max(scores) if args.random is None else random.Random(f"{args.random}/{row.id}").choice(scores)
            paths = [args.samples / sample[2], row.image, row.reference_video or row.video]
            lines.append((*(path and path.absolute() for path in paths), row.prompt, row.person))
    if len(lines) == 1:
        raise ValueError(f"--by: no row has base samples that differ by {args.by}; name another figure of the records")
    csv.writer(text).writerows(lines)
    target.write(text.getvalue().encode())


parser = command_line.Parser(__doc__)
for option in ("--samples", "--data", "--out"):
    parser.add_argument(option, type=Path, required=True)
parser.add_argument("--by", required=True, metavar="FIGURE", help="of the records, such as held_out/face_sim")
parser.add_argument("--random", type=int, metavar="SEED", help="take any of these samples: the control")
command_line.add_overwrite_option(parser)
args = parser.parse_args()
raise SystemExit(command_line.exit_code(write_table))
