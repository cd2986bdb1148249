"""examples/photo_table.py: a table of photos and prompts, as training reads it."""

from conftest import ROOT, run_python
from PIL import Image

from rewardfl import data


def test_photos_and_prompts_become_a_table(tmp_path):
    for name in ("anna/1.png", "anna/2.jpg", "bo/1.png", "bo/notes.txt", "empty/notes.txt"):
        (tmp_path / "people" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "people" / name, "PNG")
    (tmp_path / "prompts.txt").write_text('{name} talks, "loud"\n{name} nods\nrain\n')

    def run(*arguments):
        command = [ROOT / "examples" / "photo_table.py", "--prompts", "prompts.txt", "--out", "t.csv", *arguments]
        return run_python(command, cwd=tmp_path, env=None)

    done = run("--photos", "people", "--prompts-each", "2")
    assert done.returncode == 0 and done.stdout == "t.csv: 2 people, 4 rows\n", done.stderr
    rows = data.load_metadata(tmp_path / "t.csv")
    assert [row.person for row in rows] == ["anna", "anna", "bo", "bo"] and rows[0].prompt != rows[1].prompt
    assert {row.prompt for row in rows if row.person == "bo"} <= {'bo talks, "loud"', "bo nods", "rain"}
    assert [path.name for path in rows[0].photos] == ["1.png", "2.jpg"] and len(rows[2].photos) == 1
    refused = [
        run("--photos", "people"),
        run("--photos", "gone", "--overwrite"),
        run("--photos", "people/empty", "--overwrite"),
    ]
    assert [done.returncode for done in refused] == [2, 2, 2] and "t.csv exists" in refused[0].stderr
    assert all(done.stderr.count("\n") == 1 and "--photos" in done.stderr for done in refused[1:])
    assert len(data.load_metadata(tmp_path / "t.csv")) == 4
