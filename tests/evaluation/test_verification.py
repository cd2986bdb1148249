"""Thresholds, equal error rates and the scale of photos on hand-made cosines, and what a report makes of them."""

import numpy as np
import pytest
import scipy.stats
import torch
from evaluation_records import ARMS, JUDGE, pair, real

from rewardfl.evaluation import verification
from rewardfl.evaluation.figures import rank_correlations, summarise
from rewardfl.evaluation.report.report_page import format_report
from rewardfl.rewards.face.identity_kept import Scale


@pytest.mark.parametrize("count, passing", [(50, 0), (100, 1), (299, 2)])
def test_one_percent_of_other_people_pass(count, passing):
    cosines = torch.randperm(count, generator=torch.Generator().manual_seed(0)) / count
    assert (cosines > verification.find_threshold(cosines)).sum() == passing


def test_the_equal_error_rate():
    apart, similar = (torch.tensor([0.6, 0.7, 0.8]), torch.tensor([0.1, 0.2])), torch.tensor([0.1, 0.2, 0.4, 0.5])
    pairs = [apart, apart[::-1], (similar, similar), (torch.tensor([0.3, 0.6, 0.7, 0.8]), similar)]
    assert [verification.equal_error_rate(*pair) for pair in pairs] == pytest.approx([0, 1, 0.5, 0.25])


def make_people(counts):
    random = torch.Generator().manual_seed(1)
    shapes = {name: torch.randn(2, count + 1, 16, generator=random) for name, count in counts.items()}
    vectors = {name: torch.nn.functional.normalize(x[:1, :1] + x[:, 1:] / 2, dim=-1) for name, x in shapes.items()}
    return {name: verification.PersonFaces(raw, 0.8 * drawn) for name, (raw, drawn) in vectors.items()}


def test_the_ends_of_the_scale_of_photos():
    """Against loops over pairs. x has no place; c has one photo and takes the middle of the upper ends."""
    people = make_people({"a": 3, "b": 2, "c": 1, "x": 2})
    scale = verification.find_photo_scale(people, ["a", "b", "c"])
    for name in scale.another:
        pool = people[name].pictures.numpy()
        others = [people[other].through_vae.numpy() for other in {*"abcx"} - {name}]
        means = [np.mean([[v @ p for p in pool] for v in drawn]) for drawn in others]
        assert scale.another[name] == pytest.approx(np.mean(means), abs=1e-6)
    for name, count in (("a", 3), ("b", 2)):
        pictures, drawn = people[name]
        pairs = [float(drawn[i] @ pictures[j]) for i in range(count) for j in range(count) if i != j]
        assert scale.through_vae[name] == pytest.approx(np.mean(pairs), abs=1e-6)
    assert scale.through_vae["c"] == pytest.approx((scale.through_vae["a"] + scale.through_vae["b"]) / 2)


def test_other_people_are_ten_and_never_oneself():
    people = make_people(dict.fromkeys("abcdefghijk", 2))
    expected = torch.cat([people[name].pictures for name in people if name != "a"]) @ people["a"].pictures.mean(0)
    verified = verification.verify_arms({JUDGE: people}, ["a"])
    assert torch.allclose(verified.impostors[JUDGE], expected, atol=1e-6)
    assert verified.thresholds[JUDGE] == pytest.approx(float(expected.max()))
    few = verification.verify_arms({JUDGE: {name: people[name] for name in "abcdefghij"}}, ["a"])
    assert "10 other people are needed, and there are 9" in few.missing and not few.thresholds and not few.scales


def test_the_rank_correlation_of_both_scales():
    places = np.random.default_rng(0).uniform(size=(2, 9))
    names = [f"{JUDGE}/identity_kept", f"{JUDGE}/identity_kept_photos"]
    arms = [{"figures": dict(zip(names, ({"mean": x} for x in pair), strict=True))} for pair in places.T]
    expected = {JUDGE: pytest.approx(scipy.stats.spearmanr(*places).statistic)}
    assert rank_correlations([*arms, {"figures": {}}], [JUDGE]) == expected
    assert rank_correlations(arms[:2], [JUDGE]) == {}


def test_a_report_of_photos_and_of_a_mixed_table():
    """b has a clip in the mixed one, so no place on the scale of photos."""
    records = [line for person in "ab" for line in pair(person, 0, 0.5, 0.6 if person == "a" else 0.8)]
    impostors, scales = {JUDGE: torch.tensor([0.1, 0.55])}, {JUDGE: Scale({"a": 0.1}, {"a": 0.9})}
    verified = verification.Verification(impostors=impostors, thresholds={JUDGE: 0.55}, scales=scales)
    photos, mixed = (summarise([*clips, *records], ARMS, verified) for clips in ([], [real("b")]))
    base, latest = (arm["figures"] for arm in photos["arms"])
    assert (base[f"{JUDGE}/accepted"]["mean"], latest[f"{JUDGE}/accepted"]["mean"]) == (0, 1)
    assert photos["verification"]["equal_error_rate"][JUDGE] == {"base": 0.25, "latest": 0.0}
    assert photos["real"] == {"figures": {}, "per_frame": {JUDGE: []}} and photos["people"] == 2
    text = format_report(photos)
    assert "real clips" not in text and "2 clips have no real clip" in text and "above FaceSim 0.550" in text
    assert "identity kept:" not in text and "latest 0.000; identity kept on photos: 0 is FaceSim 0.100" in text
    for report in (photos, mixed):
        place = report["arms"][1]["figures"][f"{JUDGE}/identity_kept_photos"]["mean"]
        change = report["arms"][1]["compared"][f"{JUDGE}/identity_kept_photos"]["difference"]["mean"]
        assert (place, change) == pytest.approx((0.5 / 0.8, 0.1 / 0.8))
    for line in records:
        line["figures"][f"{JUDGE}/face_sim_photos"] = 0.3  # next to a clip
    figures = summarise([real("a"), *records], ARMS, verified)["arms"][0]["figures"]
    assert figures[f"{JUDGE}/identity_kept_photos"]["mean"] == pytest.approx(0.2 / 0.8)
    assert ["real" in clip for clip in mixed["per_clip"]] == [False, True] and mixed["clips_without_real"] == 1
    assert "it takes 8 people, and there are 1" in mixed["identity_scale"]["missing"]
    assert "real clips" in format_report(mixed)
