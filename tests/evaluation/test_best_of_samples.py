"""examples/best_of_samples.py: the table of each row's best own sample."""

import json

from conftest import ROOT, run_python

from rewardfl.data import load_metadata


def test_the_table_names_each_rows_best_sample(tmp_path):
    (tmp_path / "rows.csv").write_text('video,prompt,image\na.mp4,"one, two",a.png\nb.mp4,b,\nc.mp4,c,\n')
    common = {"line": 2, "index": 0, "person": "", "steps": 8, "decoded": False, "curves": {}, "detected": {}}
    scores, text = ((0.2, 0.7, 0.7), (None, -0.1, -0.3), (0.4, 0.4, None)), ""  # in the third row none is the best
    for row, of_row in zip(load_metadata(tmp_path / "rows.csv"), scores, strict=True):
        for seed, score in enumerate(of_row):
            sample = {"row": row.id, "arm": "base", "seed": seed, "file": f"{row.index}_{seed}.mp4"}
            text += json.dumps(common | sample | {"figures": {"x": score}}) + "\n"
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "records.jsonl").write_text(text)
    command = [ROOT / "examples" / "best_of_samples.py", "--samples", "samples", "--data", "rows.csv", "--out", "t.csv"]
    words = {"x --random 1": "", "x": "error: --out t.csv exists", "x --force": "", "y --force": "error: --by: no row"}
    for by, error in words.items():
        done = run_python([*command, "--by", *by.split()], cwd=tmp_path)
        assert done.returncode == 2 * bool(error) and done.stderr.startswith(error) and done.stderr.count("\n") < 2
    first, second = load_metadata(tmp_path / "t.csv")
    assert [first.video, second.video] == [tmp_path / "samples" / name for name in ("0_1.mp4", "1_1.mp4")]
    assert (first.prompt, first.image, first.reference_video) == ("one, two", tmp_path / "a.png", tmp_path / "a.mp4")
