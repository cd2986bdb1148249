"""Thresholds, equal error rates and the scale of photos on hand-made cosines, and what a report makes of them."""

import numpy as np
import pytest
import torch
from test_judging import ARMS, JUDGE, pair, real, summary

from rewardfl import data
from rewardfl.evaluation.figures import summarise
from rewardfl.evaluation.report.report_page import format_report, make_tables
from rewardfl.evaluation.verification import (
    Faces,
    Verification,
    equal_error_rate,
    find_photo_scale,
    find_threshold,
    impostor_cosines,
    load_others,
    verify,
)
from rewardfl.rewards.face.identity_kept import Scale


@pytest.mark.parametrize("count, passing", [(50, 0), (100, 1), (299, 2)])
def test_one_percent_of_other_people_pass(count, passing):
    cosines = torch.arange(count)[torch.randperm(count, generator=torch.Generator().manual_seed(0))] / count
    threshold = find_threshold(cosines)
    assert (cosines > threshold).sum() == passing and threshold == pytest.approx((count - 1 - passing) / count)


@pytest.mark.parametrize(
    "own, others, rate",
    [
        ([0.6, 0.7, 0.8], [0.1, 0.2, 0.3], 0.0), ([0.1, 0.2], [0.6, 0.7], 1.0), ([0.3, 0.5], [0.3, 0.5], 0.5),
        ([0.3, 0.6, 0.7, 0.8], [0.1, 0.2, 0.4, 0.5], 0.25), ([0.3] + [0.9] * 9, [0.1] * 4 + [0.5], 0.15),
    ],
)  # fmt: skip
def test_the_equal_error_rate(own, others, rate):
    assert equal_error_rate(torch.tensor(own), torch.tensor(others)) == pytest.approx(rate)


def make_people(counts):
    random = torch.Generator().manual_seed(1)
    people = {}
    for name, count in counts.items():
        direction = torch.randn(16, generator=random)
        vectors = torch.nn.functional.normalize(direction + 0.5 * torch.randn(2, count, 16, generator=random), dim=-1)
        people[name] = Faces(vectors[0], 0.8 * vectors[1])
    return people


def test_the_ends_of_the_scale_of_photos():
    """Against loops over pairs. x is another person, who has no place; c has one photo and takes the middle end."""
    people = make_people({"a": 3, "b": 2, "c": 1, "x": 2})
    scale = find_photo_scale(people, ["a", "b", "c"])
    for name in "abc":
        pool = people[name].pictures.numpy()
        means = [
            np.mean([[v @ p for p in pool] for v in people[other].through_vae.numpy()])
            for other in people
            if other != name
        ]
        assert scale.another[name] == pytest.approx(np.mean(means), abs=1e-6)
    for name in "ab":
        pictures, drawn = (vectors.numpy() for vectors in people[name])
        pairs = [drawn[i] @ pictures[j] for i in range(len(drawn)) for j in range(len(drawn)) if i != j]
        assert scale.through_vae[name] == pytest.approx(np.mean(pairs), abs=1e-6)
    assert scale.through_vae["c"] == pytest.approx((scale.through_vae["a"] + scale.through_vae["b"]) / 2)
    assert scale.another.keys() == {"a", "b", "c"}
    assert find_photo_scale(make_people({"a": 1, "b": 1}), ["a", "b"]) is None


def test_other_people_are_ten_and_never_oneself():
    people = make_people(dict.fromkeys("abcdefghijk", 2))
    cosines = impostor_cosines(people, ["a"])
    expected = torch.cat([people[name].pictures for name in people if name != "a"]) @ people["a"].pictures.mean(0)
    assert torch.allclose(cosines, expected, atol=1e-6)
    verified = verify({JUDGE: people}, ["a"])
    assert verified.thresholds[JUDGE] == pytest.approx(float(cosines.max())) and verified.missing == ""
    few = verify({JUDGE: {name: people[name] for name in "abcdefghij"}}, ["a"])
    assert "10 other people are needed, and there are 9" in few.missing and "--others" in few.missing
    assert not few.thresholds and not few.scales


def test_others_are_folders_or_pictures_or_a_table(tmp_path):
    for name in (
        "many/a/1.png",
        "many/a/2.png",
        "many/b/1.png",
        "flat/1.png",
        "flat/2.jpg",
        "flat/notes.txt",
        "none/x",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "table.csv").write_text("prompt,photos,person\nx,many/a,a\n")
    row = data.Row(index=0, line=2, id="0", video=None, prompt="x", photos=(tmp_path / "many" / "b" / "1.png",))
    found = {name: load_others(tmp_path / name, [row]) for name in ("many", "flat", "table.csv")}
    assert {name: [len(each.photos) for each in rows] for name, rows in found.items()} == {
        "many": [2], "flat": [1, 1], "table.csv": [2],
    }  # fmt: skip
    assert load_others(None, [row]) == [] and found["table.csv"][0].who != "a"
    with pytest.raises(data.DataError, match="--others: .*none shows no other people"):
        load_others(tmp_path / "none", [row])


VERIFIED = Verification(
    impostors={JUDGE: torch.tensor([0.1, 0.55])}, thresholds={JUDGE: 0.55},
    scales={JUDGE: Scale({"a": 0.1, "b": 0.1}, {"a": 0.9, "b": 0.9})},
)  # fmt: skip


def test_a_report_of_photos_has_no_real_clips():
    records = [line for person in "ab" for line in pair(person, 0, 0.5, 0.6)]
    report = summarise(records, ARMS, VERIFIED)
    base, latest = (arm["figures"] for arm in report["arms"])
    assert latest[f"{JUDGE}/identity_kept_photos"]["mean"] == pytest.approx(0.5 / 0.8)
    assert (base[f"{JUDGE}/accepted"]["mean"], latest[f"{JUDGE}/accepted"]["mean"]) == (0, 1)
    assert report["arms"][1]["compared"][f"{JUDGE}/accepted"]["difference"]["mean"] == 1
    assert report["verification"]["equal_error_rate"][JUDGE] == {"base": 0.25, "latest": 0.0}
    assert report["real"] == {"figures": {}, "per_frame": {JUDGE: []}} and report["people"] == 2
    assert all(len(table["head"]) == 3 and ("real clips", "") not in table["head"] for table in make_tables(report))
    text = format_report(report)
    assert "real clips" not in text and "2 clips have no real clip" in text and "above FaceSim 0.550" in text
    assert (
        "identity kept:" not in text and "base 0.250, latest 0.000; identity kept on photos: 0 is FaceSim 0.100" in text
    )


def test_in_a_mixed_table_each_person_has_the_scale_of_their_rows():
    """b has a clip, and no place on the scale of photos; eight clips would give the other scale."""
    records = [line for person in "ab" for line in pair(person, 0, 0.5, 0.6 if person == "a" else 0.8)]
    verified = Verification(scales={JUDGE: Scale({"a": 0.1}, {"a": 0.9})}, missing="too few")
    report = summarise([real("b"), *records], ARMS, verified)
    arm = report["arms"][1]
    assert arm["figures"][f"{JUDGE}/identity_kept_photos"]["mean"] == pytest.approx(0.5 / 0.8)
    assert arm["compared"][f"{JUDGE}/identity_kept_photos"]["difference"]["mean"] == pytest.approx(0.1 / 0.8)
    assert ["real" in clip for clip in report["per_clip"]] == [False, True] and report["clips_without_real"] == 1
    assert "it takes 8 people, and there are 1" in report["identity_scale"]["missing"]
    assert format_report(report).count("missing, too few") == 1
    assert summary(*records)["verification"]["missing"] == ""
