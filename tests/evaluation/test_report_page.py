"""report.html and the page of tools/compare_runs.py, from reports as evaluate makes them; nothing is sampled."""

import base64
import json
import re
from contextlib import suppress
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from conftest import ROOT, run_tool
from matplotlib.figure import Figure
from test_judging import ARMS, JUDGE, pair, real, record, summary

from rewardfl.evaluation import comparison
from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.records import FORMAT
from rewardfl.evaluation.report import pictures
from rewardfl.evaluation.report.report_page import digits, figure_cell, format_report, report_page, worst_first
from rewardfl.evaluation.report.verdicts import FEW, MEANINGS, meaning, verdict
from rewardfl_tools import compare_runs

pytestmark = pytest.mark.slow(20)

VOID = {"meta", "input", "br", "link", "img"}
NAMES = "abcdefghi"  # people enough for no warning of few
SETTINGS = {
    "records": {"format": str(FORMAT)}, "data": {"--data": "ab"}, "sampling": {"sample.shift": "5"},
    "model": {"network": "n"}, "judges": {"held_out's w.onnx": "12"}, "adapters": {"latest": "cd"}, "videos": {},
}  # fmt: skip


class Document(HTMLParser):
    """What a page is made of: unclosed tags, attributes by name, text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.attributes, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.wrong += [] if self.open and self.open[-1] == tag else [tag]
        self.open = self.open[:-1]

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def values(self, *names):
        return [value for name, value in self.attributes if name in names]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def videos(page):
    return [one for one in page.values("src") if not one.startswith("data:image/png;base64,")]


def finished(report, **settings):
    return report | {"command": ["evaluate.py", "--run", "x"], "version": "9.9", "settings": SETTINGS | settings}


def changed(gain=0.1, spread=0.02, **figures):
    """A report of nine people with this gain, differently large, and these figures of the second arm."""
    found = [pair(name, 0, 0.5, 0.5 + gain + spread * (i - 4) / 4, **figures) for i, name in enumerate(NAMES)]
    return finished(summary(*sum(found, [])))


def said(report):
    return verdict(report, report["arms"][1])


# ---- the verdict


@pytest.mark.parametrize(
    "low, high, person, words",
    [
        (0.05, 0.2, 1, "latest keeps the person more than base: FaceSim by the held-out judge changes by +0.100 [+0"),
        (-0.2, -0.1, -1, "latest keeps the person less than base: "),
        (-0.1, 0.1, 0, "Whether latest keeps the person more than base cannot be told: "),
        (0.0, 0.2, 0, "Whether"), (1e-6, 0.2, 1, "latest"), (-0.2, 0.0, 0, "Whether"), (-0.2, -1e-6, -1, "latest"),
    ],
)  # fmt: skip
def test_the_person_is_kept_if_the_interval_is_on_one_side_of_0(low, high, person, words):
    report = changed()
    report["arms"][1]["compared"][f"{JUDGE}/face_sim"]["difference"] |= {"low": low, "high": high}
    result = said(report)
    assert result.person == person and result.sentences[0].startswith(words) and "9 people" in result.sentences[0]
    assert result.moves and "The motion is kept" in result.sentences[1] and result.warnings == ()


def test_nothing_is_said_of_what_stands_still_or_has_no_base(tmp_path):
    still = {"speed": 0.0, "nonrigid": 0.0, "flow": 0.0, "face_flow": 0.0}
    clips = [record(name, arm, **still) for name in NAMES for arm in ("base", "latest")]
    assert said(finished(summary(*clips))).moves is None
    page = Document(report_page(finished(summary(record("a", "base"), arms=ARMS[:1])), tmp_path))
    assert page.wrong == [] and "nothing to compare it with" in page.text


@pytest.mark.parametrize(
    "figure, well, badly, words",
    [
        (f"{JUDGE}/speed", 0.0187, 0.0185, "Landmark speed is 0.925"), (f"{JUDGE}/nonrigid", 0.0094, 0.0092, "Non-r"),
        ("motion/flow", 0.951, 0.949, "Optical flow is 0.949 of"), ("motion/face_flow", 1.91, 1.89, "Face flow is"),
        ("motion/sharpness", 50 * 0.951, 50 * 0.949, "Sharpness is 0.949 of the base's (healthy: 0.95 and more"),
        ("motion/reversals", -0.781, -0.779, "Reversals is +0.021 from the base's (healthy: 0.02 at most"),
        ("motion/pixel_change", 0.1099, 0.1101, "Pixel change is 1.101"),
        ("motion/pixel_change", 0.0901, 0.0899, "Pixel change"), ("canary/grid", 1.49, 1.51, "Grid energy"),
        ("canary/saturation", 0.249, 0.251, "Saturation"), ("canary/saturation", 0.161, 0.159, "Saturation"),
        ("canary/red", 0.549, 0.551, "Mean red"), ("canary/blue", 0.451, 0.449, "Mean b"),
    ],
)  # fmt: skip
def test_figures_outside_their_healthy_values_are_marked(figure, well, badly, words):
    """Four of them decide whether the motion is kept."""
    block, key = figure.split("/")
    healthy, lost = (changed(**{key: value}) for value in (well, badly))
    assert said(healthy).moves and figure_cell(healthy["arms"][1], figure, [JUDGE]).problem == ""
    assert figure_cell(lost["arms"][1], figure, [JUDGE]).problem.startswith(words)
    is_motion = key in ("speed", "nonrigid", "flow", "face_flow")
    assert said(lost).sentences[1].startswith("Motion is lost: " if is_motion else "The motion is kept")
    assert said(lost).moves != is_motion and said(lost).warnings == ()


@pytest.mark.parametrize("frozen, people, marked", [(1, NAMES, False), (2, NAMES, True), (2, NAMES + "j", False)])
def test_frozen_clips_are_marked(frozen, people, marked):
    """Two noises each: 1/18 and 2/18; 2/20 is the border, and 0.1 in float32 is more."""
    clips = [
        pair(name, seed, 0.5, 0.6, nonrigid=0.004 if i < frozen and not seed else 0.0105)
        for i, name in enumerate(people)
        for seed in (0, 1)
    ]
    arm = finished(summary(*sum(clips, [])))["arms"][1]
    assert ("healthy" in figure_cell(arm, "frozen_share", [JUDGE]).problem) == marked


def test_few_people_are_warned_of():
    for names, few in ((NAMES[:FEW], False), (NAMES[: FEW - 1], True)):
        report = finished(summary(*sum((pair(name, 0, 0.5, 0.6) for name in names), [])))
        assert (f"{FEW - 1} people are few, and intervals over fewer than {FEW}" in format_report(report)) == few
    assert f"With {FEW} to 24 people they cover only 90 to 93 %." in (ROOT / "docs" / "evaluate.md").read_text()


def test_a_recogniser_that_was_trained_against_is_warned_of():
    alone = json.loads(json.dumps(changed()).replace(JUDGE, "reward"))
    assert any("no held-out judge" in line for line in said(alone).warnings)


@pytest.mark.parametrize(
    "trained, judge, hacked", [(0.06, 0.029, True), (0.06, 0.031, False), (0.049, 0.01, False), (0.051, 0.01, True)]
)
def test_a_gain_of_which_the_judge_sees_less_than_half_is_warned_of(trained, judge, hacked):
    report = changed(0.02, 0.001)
    report["real"]["per_frame"] = {name: report["real"]["per_frame"][JUDGE] for name in ("reward", JUDGE)}
    changes = report["arms"][1]["compared"]
    changes["reward/face_sim"] = {"difference": {"mean": trained}}
    changes[f"{JUDGE}/face_sim"]["difference"]["mean"] = judge
    assert any("may be hacked" in line for line in said(report).warnings) == hacked


def test_healthy_values_are_those_of_the_guide():
    """docs/motion.md, "Reading the figures", has the thresholds of the page, too."""
    text = (ROOT / "docs" / "motion.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z][^|]*) \| ([^|]*\d[^|]*) \|", text, re.M))
    low = {name: figure.low for name, figure in MEANINGS.items()}
    assert rows["flow"] == f"{low['motion/flow']:g} and more" and low["motion/face_flow"] == 0.95
    assert rows["landmark speed, non-rigid"] == f"{low['face/speed']:g} and more"
    assert low["face/nonrigid"] == low["face/speed"] and rows["sharpness"] == f"{low['motion/sharpness']:g} and more"
    assert rows["pixel change"] == "{:g} to {:g}".format(*MEANINGS["motion/pixel_change"][2:])
    assert rows["reversals"].endswith(f"+ {MEANINGS['motion/reversals'].high:g}")


# ---- the page


@pytest.fixture
def started():
    """A report of nine people whose run began with a start, from which it gains a tenth of all."""
    start = Arm(name="start", steps=8, adapter=ROOT, origin="sft (trained by supervised fine-tuning)")
    clips = [one for name in NAMES for one in pair(name, 0, 0.4, 0.6, flow=0.96)]
    clips += [record(name, "start", face_sim=0.58) for name in NAMES]
    return finished(summary(*clips, arms=[ARMS[0], start, ARMS[1]]))


def test_a_run_is_judged_by_what_it_adds_to_its_start(started, tmp_path):
    _, start, arm = started["arms"]
    result = verdict(started, arm)
    assert result.sentences[0].startswith(f"latest keeps the person more than the run's start, {start['origin']}: ")
    assert "changes by +0.020 [+0.020, +0.020]" in result.sentences[0]
    assert "From base it changes by: latest 0.200 [0.200, 0.200], start 0.180 [" in result.sentences[0]
    assert "optical flow is 0.960 [0.960, 0.960]" in result.sentences[1]
    assert "more than base" in verdict(started, started["arms"][1]).sentences[0]
    assert started["per_clip"][0]["arms"]["latest"]["figures"][f"{JUDGE}/face_sim"] == 0.6
    page = Document(report_page(started, tmp_path, metrics=[{"step": 1, "actor/data_loss": 0.1}]))
    assert page.text.index("latest keeps") < page.text.index("start keeps") < page.text.index("Is the person kept?")
    assert "supervised" in page.text and "start +0.0200" in page.text and "While it trained" in page.text
    text = format_report(started)
    assert text.index("identity kept:") < text.index("latest keeps") < text.index("start keeps")
    changes = arm["over_start"][f"{JUDGE}/face_sim"]["difference"]
    changes |= {"mean": -0.01, "low": -0.02, "high": -0.001}
    assert verdict(started, arm).person == -1 and "less than the run's start" in verdict(started, arm).sentences[0]
    assert "start" not in said(changed()).sentences[0] and "over_start" not in changed()["arms"][1]


def test_the_curves_show_the_trained_terms(monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "draw_curves", lambda panels, label: drawn.append([*panels]) or b"png")
    line = {"step": 1, "reward/mean": 0.9, "reward/flow": 0.5, "actor/data_loss": 0.1, "actor/kl_loss": 0.0, "lr": 1.0}
    assert pictures.draw_training({"a": [line]}) == b"png" and pictures.draw_training({"a": []}) == b""
    assert drawn == [["reward/mean", "reward/flow", "actor/data_loss"]]


@pytest.fixture
def evaluation(tmp_path):
    """A report of three people and three arms, and a folder of their videos, 3000 bytes each; b is the worst."""
    arms = [*ARMS, Arm(name="latest_x0.5", steps=8, adapter=ROOT, strength=0.5)]
    likeness = {"a": 0.7, "b": 0.4, "c": 0.6}
    records = [one for name, value in likeness.items() for one in pair(name, 0, 0.5, value, nonrigid=0.009)]
    records += [record(name, "latest_x0.5", face_sim=0.55) for name in likeness]
    records += [real(name) for name in likeness]
    for one in records:
        one["file"] = f"videos/{one['arm']}/{one['row']}.mp4"
        path = tmp_path / one["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{one['arm']} of {one['row']}".ljust(3000).encode())
    return finished(summary(*records, arms=arms)), tmp_path


def test_the_page_is_whole_and_asks_no_network(evaluation):
    report, folder = evaluation
    text = report_page(report, folder)
    page = Document(text)
    assert page.wrong == []
    assert page.values("href", "poster", "data", "srcset", "action") == []
    sources = videos(page)
    assert len(sources) == 12 and all(source.startswith("data:video/mp4;base64,") for source in sources)
    assert len(page.values("src")) == 12 + 1  # FaceSim along the clip
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket", text) and "default-src 'none'" in text
    assert base64.b64decode(sources[0].partition(",")[2]).startswith(b"real of b")
    for name in report["arms"][1]["figures"]:
        assert meaning(name, [JUDGE]).says in page.text, name
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "Is the person kept? By the held-out judge", "Does it still move?",
        "Canaries: was the reward hacked?", "FaceSim along the clip",
        "The clips, the worst first", "Where this is from",
    ]  # fmt: skip
    assert page.text.index("latest keeps") < page.text.index("Is the person kept?")
    assert all(words in page.text for words in ("rewardfl 9.9", "evaluate.py --run x", "held_out's w.onnx 12"))
    shown = [digits(dict.fromkeys(("mean", "low", "high"), value))[0] for value in (0.0123, 0.5, 351.2, 0.0)]
    assert shown == ["0.0123", "0.500", "351.2", "0.000"]


def test_names_are_text(evaluation):
    report, folder = evaluation
    evil = '<script>alert("x")</script>&amp;\''
    for clip in report["per_clip"]:
        clip["id"] = evil + clip["id"]
    named = json.loads(json.dumps(report).replace("latest_x0.5", evil.replace('"', '\\"')))
    named["command"], named["settings"] = ["x", evil], {"data": {evil: evil}}
    page = Document(report_page(named, folder))
    assert page.wrong == [] and page.tags.count("script") == 1
    assert evil + "b, noise 0" in page.text and page.text.count(evil) > 8


def test_the_worst_come_first_and_the_limit_leaves_the_others_beside_the_page(evaluation):
    report, folder = evaluation
    assert [clip["id"] for clip in worst_first(report)] == ["b", "c", "a"]
    whole = len(report_page(report, folder).encode())
    for limit, inside in ((whole + 3000, 3), (whole - 1000, 2), (whole - 20_000, 1), (whole - 40_000, 0)):
        text = report_page(report, folder, limit)
        sources = videos(Document(text))
        assert len(text.encode()) <= limit and sum(one.startswith("data:") for one in sources) == 4 * inside
        linked = [one for one in sources if not one.startswith("data:")]
        assert all((folder / one).is_file() for one in linked) and len(sources) == 12
        assert (f"the worst {inside} of 3 clips" in text) == (inside < 3)
    assert linked[0] == "videos/real/b.mp4"


def test_a_video_that_is_gone_and_an_arm_that_lacks_a_clip_are_said(evaluation):
    report, folder = evaluation
    (folder / "videos/latest/b.mp4").unlink()
    del report["per_clip"][0]["arms"]["latest"]
    text = report_page(report, folder)
    assert Document(text).wrong == [] and text.count("no longer where it was") == 1
    assert [clip["id"] for clip in worst_first(report)] == ["b", "c", "a"] and text.count("<figure") == 11


def test_charts_take_any_name(evaluation, monkeypatch):
    report, _ = evaluation
    report["arms"][1]["name"] = name = "_latest $\\frac$"  # to matplotlib no entry of a legend, and a formula
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *to, **how: drawn.append(figure) or save(figure, *to, **how))
    pictures.draw_face_sim({JUDGE: pictures.face_sim_curves(report, JUDGE)})
    axis = drawn[0].axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["base", name, "latest_x0.5", "real clips"]
    assert axis.get_title() == "FaceSim by the held-out judge" and axis.get_ylim() == (0, 1)
    assert [*axis.lines[1].get_ydata()] == report["arms"][1]["per_frame"][JUDGE]


# ---- comparing


def write_report(folder, report):
    (folder / "report.json").write_text(json.dumps(report))


@pytest.fixture
def runs(tmp_path):
    """Two runs that were evaluated alike, a and b."""
    for name, gain in (("a", 0.1), ("b", 0.2)):
        folder = tmp_path / name / "evaluation"
        folder.mkdir(parents=True)
        report = changed(gain) | {"settings": SETTINGS | {"model": {"n": name}}}
        write_report(folder, report)
    return tmp_path


def test_two_runs_on_one_page(runs, monkeypatch):
    drawn, draw_curves = {}, pictures.draw_curves

    def watch(panels, *arguments, **settings):
        drawn.update({title: [curve.name for curve in curves if curve.points] for title, curves in panels.items()})
        return draw_curves(panels, *arguments, **settings)

    monkeypatch.setattr(pictures, "draw_curves", watch)
    text = run_tool(compare_runs.main, runs / "a", runs / "b" / "evaluation", "--out", runs / "page.html")
    assert "page.html" in text
    page = Document((runs / "page.html").read_text())
    assert page.wrong == [] and videos(page) == page.values("href") == []
    assert "a: latest" in page.text and "evaluation: latest" in page.text
    assert "+0.100 [" in page.text and "+0.200 [" in page.text
    assert drawn == {  # the base once
        "FaceSim by the held-out judge": ["a: base", "a: latest", "evaluation: latest", "real clips"]
    }
    assert len(page.values("src")) == 1


@pytest.mark.parametrize(
    "block, name", [("data", "--data"), ("sampling", "sample.shift"), ("judges", "held_out's w.onnx")]
)
def test_unlike_evaluations_are_refused(runs, block, name):
    folder = runs / "b" / "evaluation"
    report = json.loads((folder / "report.json").read_text())
    report["settings"][block][name] = "other"
    write_report(folder, report)
    words = [runs / "a", runs / "b", "--out", runs / "page.html"]
    text = run_tool(compare_runs.main, *words, expect=2)
    assert f"{block}: {name} was" in text and not (runs / "page.html").exists()


def test_what_is_no_evaluation_is_refused(runs):
    out = ("--out", runs / "page.html")
    text = run_tool(compare_runs.main, runs / "a", runs, *out, expect=2)
    assert f"{runs}: holds no report.json" in text
    folder = runs / "b" / "evaluation"
    report = json.loads((folder / "report.json").read_text())
    text = run_tool(compare_runs.main, runs / "a", *out, expect=2)
    assert "name two or more" in text
    (folder / "report.json").write_text(json.dumps(report | {"settings": SETTINGS | {"records": {"format": "0"}}}))
    text = run_tool(compare_runs.main, runs / "a", runs / "b", *out, expect=2)
    assert "is not a report on videos by this version of evaluate.py; evaluate again" in text


WRONG = [None, [], "x", -1, 1e308, {"a": 1}]
PLACES = [
    ("people",), ("command",), ("settings",), ("settings", "data"), ("settings", "model", "n"), ("real",),
    ("real", "per_frame"), ("real", "per_frame", JUDGE), ("arms",), ("arms", 0), ("arms", 1, "name"),
    ("arms", 1, "against"), ("arms", 1, "figures"), ("arms", 1, "figures", "look/face"), ("arms", 1, "per_frame"),
    ("arms", 1, "per_frame", JUDGE, 0), ("arms", 1, "compared"), ("arms", 1, "compared", f"{JUDGE}/face_sim"),
    ("arms", 1, "compared", "motion/flow", "ratio"), ("arms", 1, "compared", "motion/flow", "difference", "low"),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_any_other_content_is_refused_or_drawn(runs, monkeypatch, place):
    monkeypatch.setattr(pictures, "draw_curves", lambda *_, **settings: b"")
    evaluations, page = [runs / "a", runs / "b"], runs / "page.html"
    args = SimpleNamespace(evaluations=evaluations, first=None, out=page, overwrite=True)
    for wrong in WRONG:
        report = part = json.loads((runs / "a" / "evaluation" / "report.json").read_text())
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = wrong
        write_report(runs / "b" / "evaluation", report)
        with suppress(ValueError):  # the tool's one line
            comparison.run(args)


@pytest.mark.parametrize("content", ["", "{", "null", "[1]", "[" * 100_000, '{"people": 3, "settings": null}', "\xff"])
def test_any_other_file_is_one_line(runs, content):
    path = runs / "b" / "evaluation" / "report.json"
    path.write_bytes(content.encode("latin-1"))
    text = run_tool(compare_runs.main, runs / "a", runs / "b", "--out", runs / "page.html", expect=2)
    assert text.startswith(f"error: {path}: is not a report on videos") and text.count("\n") == 1


@pytest.mark.parametrize("place", ["own.html", "a/evaluation/report.json", "a"])
def test_a_page_replaces_nothing_without_a_word(runs, place):
    (runs / "own.html").write_text("<p>mine</p>")
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    text = run_tool(compare_runs.main, runs / "a", runs / "b", "--out", runs / place, expect=2)
    assert text.startswith(f"error: --out {runs / place} ")
    assert before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
