"""tools/compare_runs.py: evaluations on one page, and two groups of arms of one evaluation."""

import json

import pytest
from conftest import run_tool
from evaluation_records import ARMS, JUDGE, PEOPLE, SETTINGS, changed, real, record, summary, through_vae
from html_page import Document

from rewardfl.evaluation.records import Writer
from rewardfl_tools import compare_runs

# ---- two groups of arms

FACE_FLOW = dict(zip(PEOPLE, range(1, 11), strict=True))  # differs between people


def face_flow(person, arm, gain=0.0):
    return record(person, arm, face_flow=FACE_FLOW[person] + gain, face_sim=0.03 * FACE_FLOW[person])


def write_records(folder, records):
    for line in [*through_vae(), *map(real, PEOPLE), *records]:
        Writer(folder, 0).add(line)
    return folder


def read_table(folder, first, second):
    text = run_tool(compare_runs.main, folder, "--first", first, "--second", second)
    return {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}


def test_people_are_paired_by_name_and_missing_ones_are_listed(tmp_path):
    """Arms that lack different people: the others are equal, so every difference is 0."""
    arms = {"base": "", "a": "d", "b": "g"}
    records = [face_flow(person, arm) for arm, missing in arms.items() for person in PEOPLE if person not in missing]
    rows = read_table(write_records(tmp_path, records), "a", "b")
    assert rows["motion/face_flow over the base's"].endswith("| 1.000 | 1.000 | +0.000 [+0.000, +0.000] |")
    assert rows[f"identity kept ({JUDGE})"].endswith("| +0.000 [+0.000, +0.000] |")
    assert [name for name in rows if "left out" in name and "d, g (motion/face_flow" in name]


def test_groups_are_averaged_and_agree_with_the_report(tmp_path):
    records = [face_flow(person, "base") for person in PEOPLE]
    latest = [face_flow(person, "latest", gain=1.0) for person in PEOPLE]
    other = [face_flow(person, "other", gain=0.5) for person in PEOPLE]
    rows = read_table(write_records(tmp_path, [*records, *latest, *other]), "latest,other", "base")
    assert "| 1.136 | 1.000 | +0.136 [" in rows["motion/face_flow over the base's"]  # 0.75 of a mean of 5.5
    rows = read_table(tmp_path, "latest", "base")
    compared = summary(*through_vae(), *map(real, PEOPLE), *records, *latest, arms=ARMS)["arms"][1]["compared"]
    labels = {"motion/reversals": "motion/reversals", f"identity kept ({JUDGE})": f"{JUDGE}/identity_kept"}
    for name, figure in labels.items():
        change = compared[figure]["difference"]
        assert f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]" in rows[name]


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--first", "a"], "give both"), (["--first", "a", "--second", "b", "--out", "x"], "give both"),
        (["--first", "gone", "--second", "base"], "has no arm gone"),
        (["--first", "b", "--second", "c"], "no person in common"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_compared_are_refused(tmp_path, options, problem):
    clips = [("base", PEOPLE), ("b", "ab"), ("c", "cd")]
    write_records(tmp_path, [face_flow(person, arm) for arm, people in clips for person in people])
    error = run_tool(compare_runs.main, tmp_path, *options, expect=2)
    assert error.startswith("error: --first, --second: ") and problem in error and error.count("\n") == 1


# ---- evaluations on one page


@pytest.fixture
def runs(tmp_path):
    """Two runs that were evaluated alike, a and b."""
    for name, gain in (("a", 0.1), ("b", 0.2)):
        write_report(tmp_path / name, changed(gain) | {"settings": SETTINGS | {"model": {"n": name}}})
    return tmp_path


def write_report(run, report):
    (run / "evaluation").mkdir(parents=True, exist_ok=True)
    (run / "evaluation" / "report.json").write_text(json.dumps(report))


def test_two_runs_are_on_one_page(runs):
    text = run_tool(compare_runs.main, runs / "a", runs / "b" / "evaluation", "--out", runs / "page.html")
    assert "page.html" in text
    page = Document((runs / "page.html").read_text())
    assert page.wrong == [] and page.videos == page.values("href") == []
    assert "a: latest" in page.text and "evaluation: latest" in page.text
    assert "+0.100 [" in page.text and "+0.200 [" in page.text
    assert len(page.values("src")) == 1


def test_unlike_evaluations_are_refused(runs):
    for block in ("data", "sampling", "judges"):
        (name,) = SETTINGS[block]
        write_report(runs / "b", changed() | {"settings": SETTINGS | {block: {name: "other"}}})
        text = run_tool(compare_runs.main, runs / "a", runs / "b", "--out", runs / "page.html", expect=2)
        assert f"{block}: {name} was" in text and not (runs / "page.html").exists()


def test_a_single_or_missing_evaluation_and_a_page_that_exists_are_refused(runs):
    (runs / "page.html").write_text("text")
    for folders, out, problem in (
        (["a"], "new.html", "name two or more"), (["a", "."], "new.html", f"{runs}: holds no report.json"),
        (["a", "b"], "page.html", "page.html exists"), (["a", "b"], "a", "is, contains or is inside the input"),
    ):  # fmt: skip
        command = [*(runs / folder for folder in folders), "--out", runs / out]
        assert problem in run_tool(compare_runs.main, *command, expect=2)
    assert (runs / "page.html").read_text() == "text"


OLD = json.dumps(changed() | {"settings": SETTINGS | {"records": {"format": "0"}}})


@pytest.mark.parametrize("content", [OLD, "[1]", '{"people": 3, "settings": null}'])
def test_a_file_that_is_not_a_report_is_refused(runs, content):
    path = runs / "b" / "evaluation" / "report.json"
    path.write_text(content)
    text = run_tool(compare_runs.main, runs / "a", runs / "b", "--out", runs / "page.html", expect=2)
    assert text == f"error: {path}: is not a report on videos by this version of evaluate.py; evaluate again\n"
