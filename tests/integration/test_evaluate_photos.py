"""tools/evaluate.py on rows of photos, and next to a row with a clip, with other people's pictures."""

import pytest
import torch
from conftest import run_tool
from runs import WORLD, launch
from test_evaluate_runs import call, read

from rewardfl import data
from rewardfl.evaluation import arms
from rewardfl_tools import compare_runs

pytestmark = pytest.mark.slow(60)

JUDGE = WORLD / "faces" / "judge"
PHOTOS = "prompt,video,photos,person\nx,,world/eval/photos/000,000\nx,,world/eval/photos/001,001\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    (folder / "world").symlink_to(WORLD)
    (folder / "table.csv").write_text(PHOTOS)
    (folder / "others").write_text("prompt,photos\n" + "".join(f"x,world/train/photos/{i:03d}\n" for i in range(10)))
    return folder


def words(folder, table, *more):
    words = ["--run", folder / "run", "--data", folder / table, "--out", folder / "out" / table, "--device", "cpu"]
    judge = f"face: {{name: face_judge, settings: {{pack_dir: {JUDGE}, det_size: 128}}}}"
    return [
        *words, *more, "--seeds", "1", "data.height=64", "data.width=64", f"data.skip_bad_rows={table == 'mixed.csv'}",
        f"reward.others={{flow: {{name: optical_flow}}, {judge}}}",
    ]  # fmt: skip


def test_a_table_of_photos_and_a_clip(folder, monkeypatch):
    """A row has both; another has one usable photo, which takes its cap from the other rows."""
    data.write_picture(folder / "grey.png", torch.full((1, 64, 64, 3), 90, dtype=torch.uint8))
    rows = "x,world/eval/videos/002.mp4,world/eval/photos/002,\nx,,world/eval/photos/003/0.jpg;grey.png,\n"
    (folder / "mixed.csv").write_text(PHOTOS + rows)
    arguments = words(folder, "mixed.csv", "--others", folder / "others")
    text, out = call(arguments), folder / "out" / "mixed.csv"
    report = read(out)[0]
    base, latest = (arm["figures"] for arm in report["arms"])
    clips = {"real" in clip: clip["arms"]["base"]["figures"] for clip in report["per_clip"]}
    assert clips[False]["rewards/flow"] == pytest.approx(1) != clips[True]["rewards/flow"]
    assert "look/face" in clips[True].keys() - clips[False].keys()
    for clip in report["per_clip"]:
        figures = [arm["figures"] for arm in clip["arms"].values()]
        (name,) = (name for name in figures[0] if name.endswith("mouth"))  # the same in all arms
        assert all(name in arm and "motion/displacement" in arm and "rewards/face" in arm for arm in figures)
        assert ("real" in clip) == ("held_out/face_sim_photos" in figures[0])
    assert report["arms"][1]["compared"]["motion/displacement"]["ratio"]["mean"] == pytest.approx(1, abs=0.1)
    assert "skipped: line 5: " in text and "grey.png: no face was found in it" in text
    assert base["base/distance"]["mean"] == 0 < latest["base/distance"]["mean"] < 0.1
    for judge in ("reward", "held_out"):
        assert 0 < report["verification"]["thresholds"][judge] < 0.8
        assert {f"{judge}/accepted", f"{judge}/identity_kept_photos"} < base.keys()
        ends = report["photo_scale"]["recognisers"][judge]
        assert ends["another_person"]["mean"] < 0.3 < ends["real_through_vae"]["mean"] < 1
    assert "3 clips have no real clip" in text and "3 clips have no real clip" in (out / "report.html").read_text()
    monkeypatch.setattr(arms, "load_model", None)  # nothing is sampled again
    call(arguments)
    assert read(out)[0] == report


def test_few_people_are_not_verified(folder):
    text, out = call(words(folder, "table.csv")), folder / "out" / "table.csv"
    assert "missing, 10 other people are needed, and there are 1; name pictures of more by --others" in text
    assert read(out)[0]["real"]["figures"] == {} and not (out / "videos" / "real").exists()
    run_tool(compare_runs.main, out, out, "--out", folder / "page.html")


def test_bad_photos_are_one_line(folder):
    (folder / "bad.csv").write_text(f"{PHOTOS}x,,grey.png,grey\n")
    (folder / "none.csv").write_text("prompt\nx\n")
    text = call(words(folder, "bad.csv"), expect=2)
    assert "line 4" in text and "grey.png: no face was found in it" in text and "data.skip_bad_rows" in text
    assert "neither a video nor pictures" in call(words(folder, "none.csv"), expect=2)
    (folder / "grey").mkdir()
    (folder / "grey.png").rename(folder / "grey" / "1.png")
    assert "1.png: no face" in call(words(folder, "table.csv", "--overwrite", "--others", folder / "grey"), expect=2)
