"""Write a table to train on from photos: every person with every prompt, or with --prompts-each some of them.

python examples/photo_table.py --photos people --prompts prompts.txt --out people.csv

A folder in --photos has one person's photos; pictures in --photos itself are one person's. {name} in a prompt becomes
the folder's name. Then:
python tools/check_dataset.py --config configs/wan22_face_photos.yaml --faces PACK data.file_name=people.csv
"""

import csv
import io
import random
from pathlib import Path

from rewardfl import command_line, data, outputs
from rewardfl.config import schema
from rewardfl.data.metadata import photo_files


def write_table():
    target = outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=[args.prompts])
    target.check()
    prompts = [row.prompt for row in data.load_metadata(args.prompts, "--prompts")]
    folders = [args.photos, *sorted(args.photos.glob("*"))]
    people = [folder for folder in folders if folder.is_dir() and photo_files(".", folder)]
    if not people:
        raise ValueError(f"--photos {args.photos}: has no pictures and no folders of pictures; name another folder")
    lines, text = [("prompt", "photos", "person")], io.StringIO()
    for folder in people:
        dice, count = random.Random(folder.name), args.prompts_each or len(prompts)
        chosen = sorted(dice.sample(range(len(prompts)), min(count, len(prompts))))
        name = folder.resolve().name
        lines += [(prompts[i].replace("{name}", name), folder.absolute(), name) for i in chosen]
    csv.writer(text).writerows(lines)
    target.write(text.getvalue().encode())
    print(f"{args.out}: {len(people)} people, {len(lines) - 1} rows")


parser = command_line.Parser(__doc__)
count = command_line.option_type(schema.Count)
for option in ("--photos", "--prompts", "--out"):
    parser.add_argument(option, type=Path, required=True)
parser.add_argument("--prompts-each", type=count, metavar="N", help="prompts drawn for each person (default: all)")
command_line.add_overwrite_option(parser)
args = parser.parse_args()
raise SystemExit(command_line.exit_code(write_table))
