"""The statistics of a report, on records whose figures are known."""

import json

import numpy as np
import pytest
import torch
from evaluation_records import ARMS, JUDGE, PEOPLE, pair, real, record, summary, through_vae

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import find_identity_scale, place_on_scale, record_figures
from rewardfl.evaluation.report.report_page import format_report
from rewardfl.rewards.face.identity_kept import FEWEST


def interval(value):
    return {"mean": pytest.approx(value), "low": pytest.approx(value), "high": pytest.approx(value)}


def mean(value):
    return {"mean": pytest.approx(value)}


def difference(value, people_with_more):
    return {"difference": interval(value), "people_with_more": people_with_more, "left_out": 0}


def pairs(seeds=(0,), **figures):
    return [line for person in "ab" for seed in seeds for line in pair(person, seed, 0.5, 0.6, **figures)]


GAIN = [*pair("a", 0, 0.4, 0.6), *pair("b", 0, 0.6, 0.8)]
ONE_NOISE_EACH = [*pair("a", 0, 0.4, 0.5), record("a", "latest", 1, face_sim=0.9)]
FROZEN = [*pairs((0, 1)), record("c", "base", nonrigid=0.0), record("c", "latest", nonrigid=0.0)]  # c has no half
FROZEN[1]["figures"][f"{JUDGE}/nonrigid"], FROZEN[5]["figures"][f"{JUDGE}/nonrigid"] = 0.0049, 0.0051
NO_FACE = pair("a", 0, 0.5, 0.0, face_flow=None, flow=0.5)
CANARIES = pairs(red=0.53, green=0.46, grid=3.0, saturation=0.3)
MOVES = [
    *pair("a", 0, 0.5, 0.6, flow=0.5), *pair("a", 1, 0.5, 0.6, flow=0.7), *pair("b", 0, 0.5, 0.6, reversals=-0.6),
]  # fmt: skip
REWARD = pair("a", 0, 0.5, 0.6)
REWARD[0]["figures"]["rewards/flow"], REWARD[1]["figures"]["rewards/flow"] = 0.1, -0.8


@pytest.mark.parametrize(
    "records, place, expected",
    [
        (GAIN, "arms 1 compared held_out/face_sim", difference(0.2, 1.0)),
        (GAIN, "real figures held_out/cap", interval(0.9)), (GAIN, "arms 0 figures held_out/face_sim", mean(0.5)),
        (GAIN, "arms 1 figures held_out/last_quarter", mean(0.7)),
        (GAIN, "arms 1 per_frame held_out", [pytest.approx(0.7)] * 8),
        (GAIN, "arms 0 against", None), (GAIN, "arms 1 against", "base"),
        # a noise that only one arm has counts in neither
        (ONE_NOISE_EACH, "arms 1 compared held_out/face_sim difference", interval(0.1)),
        (ONE_NOISE_EACH, "arms 1 compared held_out/face_sim left_out", 1),
        (FROZEN, "arms 1 frozen_share", mean(0.25)),  # half of a's clips, and none of b's
        # ratios of means over people
        (MOVES, "real figures motion/flow", interval(4)), (MOVES, "arms 1 figures motion/flow", mean(0.8)),
        (MOVES, "arms 1 compared motion/flow ratio", pytest.approx({"mean": 0.8, "low": 0.6, "high": 1.0})),
        (MOVES, "arms 1 compared motion/reversals difference", pytest.approx({"mean": 0.1, "low": 0.0, "high": 0.2})),
        # a clip without a face is left out of the face's flow only
        ([*NO_FACE, *pair("b", 0, 0.5, 0.6, face_flow=1.0)], "arms 1 compared motion/face_flow ratio", mean(0.5)),
        ([*NO_FACE, *pair("b", 0, 0.5, 0.6, face_flow=1.0)], "arms 1 compared motion/flow ratio", mean(0.75)),
        (CANARIES, "arms 1 colour_shift", interval(0.05)),
        (CANARIES, "arms 1 compared canary/grid ratio", interval(3)),
        (CANARIES, "arms 1 compared canary/red", difference(0.03, 1.0)),
        # a reward may be called like a motion: its score may go through 0, so it has no ratio
        (REWARD, "arms 1 compared rewards/flow", difference(-0.9, 0.0)),
    ],
)  # fmt: skip
def test_a_figure_of_the_report(records, place, expected):
    part = json.loads(json.dumps(summary(*records), allow_nan=False))  # other readers of JSON know no NaN
    for key in place.split():
        part = part[int(key) if key.isdigit() else key]
    if isinstance(expected, dict) and [*expected] == ["mean"]:
        part = {"mean": part["mean"]}
    assert part == expected


def test_more_noises_of_the_same_people_do_not_narrow_the_interval():
    values = torch.linspace(0.3, 0.8, 6).tolist()
    one, two = (
        [line for n, v in zip("abcdef", values, strict=True) for seed in range(count) for line in pair(n, seed, v, v)]
        for count in (1, 2)
    )
    figures = [summary(*records)["arms"][0]["figures"][f"{JUDGE}/face_sim"] for records in (one, two)]
    assert figures[0] == pytest.approx(figures[1])
    spread = float(np.std(values, ddof=1)) / 6**0.5
    assert figures[0]["high"] - figures[0]["low"] == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_arms_without_a_common_clip_are_not_compared():
    apart = summary(record("a", "base", 0), record("a", "latest", 1))
    assert apart["arms"][1]["compared"][f"{JUDGE}/face_sim"] is None
    assert "latest and base have no clip in common" in format_report(json.loads(json.dumps(apart, allow_nan=False)))


def test_the_shape_of_a_curve():
    def shape(curve):
        figures = record_figures(record("a", "base", curve=curve))
        return {name.removeprefix(f"{JUDGE}/"): value for name, value in figures.items()}

    figures = shape([0.9 - 0.02 * i for i in range(20)])
    assert (figures["drift"], figures["worst_tenth"], figures["last_quarter"]) == pytest.approx((-0.02, 0.53, 0.56))
    noisy = np.random.default_rng(0).uniform(size=13)
    assert shape(noisy)["drift"] == pytest.approx(np.polyfit(np.arange(13), noisy, 1)[0])
    assert "drift" not in shape([0.5]) and shape([0.4, 0.8])["worst_tenth"] == 0.4
    assert shape([0.4, 0.41, 0.5, 0.1])["above_threshold"] == 0.5


MORE_STEPS = [Arm(name="base_20steps", steps=20), Arm(name="latest_20steps", steps=20, adapter="adapter")]
VIDEOS = [Arm(name="first", videos="first"), Arm(name="second", videos="second")]


@pytest.mark.parametrize(
    "arms, bases",
    [
        ([*ARMS, *MORE_STEPS], [None, "base", None, "base_20steps"]), ([ARMS[0], *VIDEOS], [None, "base", "base"]),
        (VIDEOS, [None, "first"]),
    ],
)  # fmt: skip
def test_every_arm_is_compared_with_the_base_of_its_steps(arms, bases):
    values = dict(zip((arm.name for arm in arms), (0.4, 0.5, 0.6, 0.9), strict=False))
    report = summary(*(record("a", name, face_sim=value) for name, value in values.items()), arms=arms)["arms"]
    assert [arm["against"] for arm in report] == bases
    change = report[-1]["compared"][f"{JUDGE}/face_sim"]["difference"]
    assert change == interval(values[arms[-1].name] - values[bases[-1]])


# ---- identity kept


def test_the_ends_of_identity_kept_are_their_definitions():
    records = through_vae()
    scale = find_identity_scale(records, JUDGE)
    for line in records:
        pool = np.array(line["pool"][JUDGE])
        others = [pool @ np.array(other["embedding"][JUDGE]) for other in records if other is not line]
        assert scale.another[line["person"]] == pytest.approx(np.mean(others), abs=1e-6)
        assert scale.through_vae[line["person"]] == pytest.approx(pool @ np.array(line["embedding"][JUDGE]), abs=1e-6)
    for end, place in ((scale.through_vae, 1.0), (scale.another, 0.0)):
        assert place_on_scale(scale, end) == {key: pytest.approx(place, abs=1e-6) for key in ("mean", "low", "high")}


def test_the_interval_draws_a_person_for_both_ends():
    scale = find_identity_scale(through_vae(), JUDGE)
    random = np.random.default_rng(1)
    values = dict(zip(PEOPLE, random.uniform(0.2, 0.8, len(PEOPLE)).tolist(), strict=True))
    top = np.array([values[person] - scale.another[person] for person in PEOPLE])
    length = np.array([scale.through_vae[person] - scale.another[person] for person in PEOPLE])
    drawn = random.integers(0, len(PEOPLE), (20_000, len(PEOPLE)))
    ends = np.quantile(top[drawn].mean(1) / length[drawn].mean(1), [0.025, 0.975])
    place = place_on_scale(scale, values)
    assert place["mean"] == pytest.approx(top.mean() / length.mean())
    assert [place["low"], place["high"]] == pytest.approx(ends.tolist(), abs=0.02)
    lower = {person: value - 0.1 for person, value in values.items()}
    change = place["mean"] - place_on_scale(scale, lower)["mean"]
    assert place_on_scale(scale, values, lower)["mean"] == pytest.approx(change)


def test_a_report_has_identity_kept_next_to_the_cosine():
    report = summary(*through_vae(), *(line for person in PEOPLE for line in pair(person, 0, 0.3, 0.5)))
    base, latest = (arm["figures"][f"{JUDGE}/identity_kept"]["mean"] for arm in report["arms"])
    ends = {end: value["mean"] for end, value in report["identity_scale"]["recognisers"][JUDGE].items()}
    assert latest - base == pytest.approx(0.2 / (ends["real_through_vae"] - ends["another_person"]))
    change = report["arms"][1]["compared"][f"{JUDGE}/identity_kept"]
    assert change["difference"]["mean"] == pytest.approx(latest - base) and change["people_with_more"] == 1
    assert report["real"]["figures"][f"{JUDGE}/identity_kept"]["mean"] > latest


def test_rows_of_one_person_are_one_person():
    """Neither in the other people's mean nor in the bootstrap do two rows of a person count as two people."""
    names, people = "abcdefghijkl", [*PEOPLE[:6], *PEOPLE[:6]]
    vae = through_vae(names, people)
    scale = find_identity_scale(vae, JUDGE)
    faces, pools = (
        {p: np.mean([line[key][JUDGE] for line in vae if line["person"] == p], 0) for p in people}
        for key in ("embedding", "pool")
    )
    others = [pools["a"] @ faces[other] for other in faces if other != "a"]
    assert scale.another["a"] == pytest.approx(np.mean(others), abs=1e-6)
    ceilings = [line["figures"][f"{JUDGE}/face_sim"] for line in vae if line["person"] == "a"]
    assert len(ceilings) == 2 and scale.through_vae["a"] == pytest.approx(np.mean(ceilings))
    owners = dict(zip(names, people, strict=True))
    records = [line for name in names for line in (real(name), *pair(name, 0, 0.3, 0.5))]
    report = summary(*vae, *(line | {"person": owners[line["row"]]} for line in records))
    assert report["people"] == 6 and report["clips"] == 12
    assert report["identity_scale"]["missing"] == f"it takes {FEWEST} people, and there are 6"


@pytest.mark.parametrize("clips, reason", [(9, "there is no model"), (10, "no more like")])
def test_a_scale_that_is_missing_says_why(clips, reason):
    """One clip has not been through the VAE, or the VAE loses everybody."""
    vae = through_vae()[:clips]
    for line in vae:
        line["figures"][f"{JUDGE}/face_sim"] = -1.0
    report = summary(*vae, *(line for person in PEOPLE for line in pair(person, 0, 0.3, 0.5)))
    assert report["identity_scale"]["recognisers"] == {} and reason in report["identity_scale"]["missing"]
    assert all(f"{JUDGE}/identity_kept" not in arm["figures"] for arm in report["arms"])
