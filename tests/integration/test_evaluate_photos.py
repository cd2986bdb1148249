"""tools/evaluate.py on rows of photos, alone and next to a row with a clip, with other people's pictures."""

import shutil

import pytest
import torch
from conftest import run_tool
from runs import WORLD, launch
from test_evaluate_runs import call, left

from rewardfl import data
from rewardfl.evaluation import arms
from rewardfl_tools import compare_runs

pytestmark = pytest.mark.slow(60)

PHOTOS = "prompt,video,photos,person\na person,,world/eval/photos/000,000\na person,,world/eval/photos/001,001\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one step, tables, and two photos each of ten other people."""
    folder = tmp_path_factory.mktemp("photos")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    (folder / "world").symlink_to(WORLD)
    (folder / "photos.csv").write_text(PHOTOS)
    (folder / "mixed.csv").write_text(f"{PHOTOS}a person,world/eval/videos/002.mp4,,\n")
    for person in sorted((WORLD / "train" / "photos").iterdir())[:10]:
        (folder / "others" / person.name).mkdir(parents=True)
        for photo in sorted(person.iterdir())[:2]:
            shutil.copy(photo, folder / "others" / person.name)
    return folder


def words(folder, table, *more):
    return ["--run", folder / "run", "--data", folder / table, "--seeds", "1", "--device", "cpu", *more, "data.height=64", "data.width=64",
            "reward.others={flow: {name: optical_flow}, judged: {name: face_judge, settings: {pack_dir: "
            f"{WORLD}/faces/judge}}}}}}"]  # fmt: skip


def test_a_table_of_photos_and_a_clip(folder, monkeypatch):
    out = folder / "out"
    arguments = words(folder, "mixed.csv", "--others", folder / "others", "--out", out)
    text = call(arguments)
    report = left(out)[0]
    base, latest = report["arms"]
    clips = {clip["id"]: clip["arms"]["base"]["figures"] for clip in report["per_clip"] if "real" not in clip}
    assert len(clips) == 2 and all(figures["rewards/flow"] == pytest.approx(1) for figures in clips.values())
    assert not any("look/face" in figures for figures in clips.values())
    assert [clip["arms"]["base"]["figures"]["look/face"] < 1 for clip in report["per_clip"] if "real" in clip] == [True]
    assert base["figures"]["base/distance"]["mean"] == 0 < latest["figures"]["base/distance"]["mean"] < 0.1
    for judge in ("reward", "held_out"):
        assert 0 < report["verification"]["thresholds"][judge] < 0.8
        ends = report["photo_scale"]["recognisers"][judge]
        assert ends["another_person"]["mean"] < 0.3 < ends["real_through_vae"]["mean"] < 1
        assert {f"{judge}/accepted", f"{judge}/identity_kept_photos"} <= base["figures"].keys()
    assert "2 clips have no real clip" in text and "2 clips have no real clip" in (out / "report.html").read_text()
    monkeypatch.setattr(arms, "load_model", None)  # nothing is sampled again
    call(arguments)
    assert left(out)[0] == report


def test_photos_alone(folder):
    out = folder / "alone"
    text = call(words(folder, "photos.csv", "--out", out))
    report = left(out)[0]
    assert "missing, 10 other people are needed, and there are 1; name pictures of more by --others" in text
    assert report["real"]["figures"] == {} and not (out / "videos" / "real").exists() and report["people"] == 2
    assert report["arms"][0]["figures"]["held_out/face_sim"]["mean"] > 0
    run_tool(compare_runs.main, out, out, "--out", folder / "page.html")


def test_bad_photos_are_one_line(folder):
    data.write_picture(folder / "grey.png", torch.full((64, 64, 3), 90, dtype=torch.uint8)[None])
    (folder / "bad.csv").write_text(f"{PHOTOS}a person,,grey.png,grey\n")
    (folder / "none.csv").write_text("prompt\na person\n")
    text = call(words(folder, "bad.csv", "--out", folder / "bad"), expect=2)
    assert "line 4" in text and "grey.png: no face was found in it" in text and "data.skip_bad_rows" in text
    assert "neither a video nor pictures" in call(words(folder, "none.csv", "--out", folder / "bad"), expect=2)
    text = call(words(folder, "photos.csv", "--others", folder / "grey.png", "--out", folder / "bad2"), expect=2)
    assert text.startswith("error: ") and "grey.png" in text
