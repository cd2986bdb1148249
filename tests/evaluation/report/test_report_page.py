"""report.html and the text for a terminal, from reports as evaluate makes them."""

import base64
import json
import re

import pytest
from evaluation_records import ARMS, JUDGE, finished, pair, real, record, summary
from html_page import Document

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import format_interval
from rewardfl.evaluation.report.report_page import format_report, report_page, worst_first
from rewardfl.evaluation.report.verdicts import meaning

pytestmark = pytest.mark.slow(20)


@pytest.fixture
def evaluation(tmp_path):
    """A report of three people and three arms, and a folder of their videos, 3000 bytes each; b is the worst."""
    arms = [*ARMS, Arm(name="latest_x0.5", steps=8, adapter="adapter", strength=0.5)]
    face_sim = {"a": 0.7, "b": 0.4, "c": 0.6}
    records = [line for name, value in face_sim.items() for line in pair(name, 0, 0.5, value, nonrigid=0.009)]
    records += [record(name, "latest_x0.5", face_sim=0.55) for name in face_sim]
    records += [real(name) for name in face_sim]
    for line in records:
        line["file"] = f"videos/{line['arm']}/{line['row']}.mp4"
        path = tmp_path / line["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{line['arm']} of {line['row']}".ljust(3000).encode())
    return finished(summary(*records, arms=arms)), tmp_path


def test_the_page_is_complete_and_needs_no_network(evaluation):
    report, folder = evaluation
    text = report_page(report, folder)
    page = Document(text)
    assert page.wrong == []
    assert page.values("href", "poster", "data", "srcset", "action") == []
    assert len(page.videos) == 12 and all(source.startswith("data:video/mp4;base64,") for source in page.videos)
    assert len(page.values("src")) == 12 + 1  # FaceSim along the clip
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket", text) and "default-src 'none'" in text
    assert base64.b64decode(page.videos[0].partition(",")[2]).startswith(b"real of b")
    for name in report["arms"][1]["figures"]:
        assert meaning(name, [JUDGE]).says in page.text, name
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Is the person kept? By the held-out judge", "Does it still move?",
        "Canaries: was the reward hacked?", "FaceSim along the clip",
        "The clips, the worst first", "Where this is from",
    ]  # fmt: skip
    assert page.text.index("latest keeps") < page.text.index("Is the person kept?")
    assert all(words in page.text for words in ("rewardfl 9.9", "evaluate.py --run x", "held_out's w.onnx 12"))
    intervals = [format_interval(dict.fromkeys(("mean", "low", "high"), value)) for value in (0.0123, 0.5, 351.2, 0.0)]
    assert [text.split()[0] for text in intervals] == ["0.0123", "0.500", "351.2", "0.000"]


def test_a_page_of_one_arm_has_no_verdict(tmp_path):
    page = Document(report_page(finished(summary(record("a", "base"), arms=ARMS[:1])), tmp_path))
    assert page.wrong == [] and "nothing to compare it with" in page.text


def test_the_text_shows_figures_and_changes():
    records = [line for name in "ab" for seed in (0, 1) for line in pair(name, seed, 0.5, 0.6)]
    text = format_report(summary(*records))
    assert "2 people, 4 clips" in text and "Is the person kept? By the held-out judge" in text
    for figure, change in (
        ("optical flow", "1.000 [1.000, 1.000]   base x 1.000 [1.000, 1.000]"),
        ("FaceSim", "0.600 [0.600, 0.600]   base +0.100 [+0.100, +0.100]"),
    ):
        assert re.search(f"{figure} +{re.escape(change)}", text.partition("latest, against base")[2])


def test_a_start_comes_after_what_was_trained_from_it(tmp_path):
    start = Arm(name="start", steps=8, adapter="adapter", origin="sft")
    records = [*pair("a", 0, 0.4, 0.6), record("a", "start", face_sim=0.58)]
    report = finished(summary(*records, arms=[ARMS[0], start, ARMS[1]]))
    text, page = format_report(report), Document(report_page(report, tmp_path)).text
    assert page.index("latest keeps") < page.index("start keeps") < page.index("Is the person kept?")
    assert "start +0.0200" in page and "start +0.0200" in text
    assert text.index("identity kept:") < text.index("latest keeps") < text.index("start keeps")


def test_names_are_text(evaluation):
    report, folder = evaluation
    evil = '<script>alert("x")</script>&amp;\''
    for clip in report["per_clip"]:
        clip["id"] = evil + clip["id"]
    report = json.loads(json.dumps(report).replace("latest_x0.5", evil.replace('"', '\\"')))
    report["command"], report["settings"] = ["x", evil], {"data": {evil: evil}}
    page = Document(report_page(report, folder))
    assert page.wrong == [] and page.tags.count("script") == 1
    assert evil + "b, noise 0" in page.text and page.text.count(evil) > 8


def test_the_worst_clips_are_embedded_up_to_the_limit(evaluation):
    report, folder = evaluation
    assert [clip["id"] for clip in worst_first(report)] == ["b", "c", "a"]
    size = len(report_page(report, folder).encode())
    for limit, inside in ((size + 3000, 3), (size - 1000, 2), (size - 20_000, 1), (size - 40_000, 0)):
        text = report_page(report, folder, limit)
        videos = Document(text).videos
        assert len(text.encode()) <= limit and sum(video.startswith("data:") for video in videos) == 4 * inside
        linked = [video for video in videos if not video.startswith("data:")]
        assert all((folder / video).is_file() for video in linked) and len(videos) == 12
        assert (f"the worst {inside} of 3 clips" in text) == (inside < 3)
    assert linked[0] == "videos/real/b.mp4"


def test_a_page_says_which_video_is_missing(evaluation):
    report, folder = evaluation
    (folder / "videos/latest/b.mp4").unlink()
    del report["per_clip"][0]["arms"]["latest"]
    text = report_page(report, folder)
    assert Document(text).wrong == [] and text.count("no longer where it was") == 1
    assert [clip["id"] for clip in worst_first(report)] == ["b", "c", "a"] and text.count("<figure") == 11
