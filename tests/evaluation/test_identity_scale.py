"""Identity kept: its ends and its interval against plain loops, and what an evaluation makes of it."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, run_tool
from diffusers import AutoencoderKLWan
from runs import CONFIG, QUICK, launch, launch_grpo, metrics, table
from test_judging import ARMS, JUDGE, pair, real, record, summary

from rewardfl import config, data
from rewardfl.evaluation.figures import find_identity_scale, place_on_scale
from rewardfl.rewards import face
from rewardfl.rewards.face.identity_kept import FEWEST
from rewardfl.training import evaluation
from rewardfl_tools import evaluate

PEOPLE = "abcdefghij"
WORLD = ROOT / "assets" / "tiny_world"


def through_vae(names=PEOPLE, people=None, spread=0.6):
    """Return records of real clips through the VAE whose faces lie around each person's own direction."""
    random = torch.Generator().manual_seed(0)
    records = []
    for row, person in zip(names, people or names, strict=True):
        direction = torch.randn(16, generator=random)
        face, pool = (direction + spread * torch.randn(16, generator=random) for _ in range(2))
        face, pool = 0.9 * face / face.norm(), pool / pool.norm()
        line = record(row, "vae", None, face_sim=float(face @ pool))
        records.append(line | {"person": person, "embedding": {JUDGE: face.tolist()}, "pool": {JUDGE: pool.tolist()}})
    return records


def test_the_ends_are_the_definitions():
    records = through_vae()
    scale = find_identity_scale(records, JUDGE)
    for line in records:
        pool = np.array(line["pool"][JUDGE])
        others = [pool @ np.array(other["embedding"][JUDGE]) for other in records if other is not line]
        assert scale.another[line["person"]] == pytest.approx(np.mean(others), abs=1e-6)
        assert scale.through_vae[line["person"]] == pytest.approx(pool @ np.array(line["embedding"][JUDGE]), abs=1e-6)
    for end, place in ((scale.through_vae, 1.0), (scale.another, 0.0)):
        assert place_on_scale(scale, end) == {key: pytest.approx(place, abs=1e-6) for key in ("mean", "low", "high")}
    copy = place_on_scale(scale, {person: value + 0.1 for person, value in scale.through_vae.items()})
    assert copy["low"] > 1


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
    assert place_on_scale(scale, values, lower)["mean"] == pytest.approx(
        place["mean"] - place_on_scale(scale, lower)["mean"]
    )


def test_a_report_has_it_beside_the_cosine():
    records = [line for person in PEOPLE for line in pair(person, 0, 0.3, 0.5)]
    report = summary(*through_vae(), *records)
    scale = find_identity_scale(through_vae(), JUDGE)
    base, latest = (arm["figures"][f"{JUDGE}/identity_kept"]["mean"] for arm in report["arms"])
    length = np.mean(list(scale.through_vae.values())) - np.mean(list(scale.another.values()))
    assert latest - base == pytest.approx(0.2 / length)
    change = report["arms"][1]["compared"][f"{JUDGE}/identity_kept"]
    assert change["difference"]["mean"] == pytest.approx(latest - base) and change["people_with_more"] == 1
    ends = report["identity_scale"]["recognisers"][JUDGE]
    assert ends["real_through_vae"]["mean"] - ends["another_person"]["mean"] == pytest.approx(length)
    assert report["identity_scale"]["missing"] == ""
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
    records = [line for name, person in zip(names, people, strict=True) for line in pair(name, 0, 0.3, 0.5)]
    owners = dict(zip(names, people, strict=True))
    records = [line | {"person": owners[line["row"]]} for line in [*records, *(real(name) for name in names)]]
    report = summary(*vae, *records)
    assert report["people"] == 6 and report["clips"] == 12
    assert report["identity_scale"]["missing"] == f"it takes {FEWEST} people, and there are 6"
    assert f"{JUDGE}/identity_kept" not in report["arms"][0]["figures"]


@pytest.mark.parametrize(
    ("clips", "reason"), [(0, "there is no model"), (9, "there is no model"), (10, "no more like")]
)
def test_a_scale_that_is_missing_says_why(clips, reason):
    """No clip has been through the VAE, one has not, or the VAE loses everybody."""
    vae = through_vae()[:clips]
    for line in vae:
        line["figures"][f"{JUDGE}/face_sim"] = -1.0
    report = summary(*vae, *(line for person in PEOPLE for line in pair(person, 0, 0.3, 0.5)))
    assert report["identity_scale"]["recognisers"] == {}
    assert reason in report["identity_scale"]["missing"]
    assert all(f"{JUDGE}/identity_kept" not in arm["figures"] for arm in report["arms"])
    assert [arm["name"] for arm in report["arms"]] == [arm.name for arm in ARMS]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Eight people, the base and a step's adapter, judged by the run's recognisers and one more."""
    folder = tmp_path_factory.mktemp("evaluated")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    table(folder / "metadata.csv", "eval", FEWEST)
    words = ["--run", folder / "run", "--out", folder / "out", "--judge", f"third={WORLD / 'faces' / 'reward'}"]
    call([*words, "--data", folder / "metadata.csv", "--seeds", "1", "--device", "cpu"])
    return folder


def call(words):
    with contextlib.chdir(ROOT):
        return run_tool(evaluate.main, *words)


def read_report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow(20)
def test_an_evaluation_has_it_by_every_recogniser(evaluated):
    report = read_report(evaluated / "out")
    assert list(report["real"]["per_frame"]) == ["reward", "held_out", "third"]
    for arm in report["arms"]:
        places = {name: arm["figures"][f"{name}/identity_kept"] for name in ("reward", "held_out", "third")}
        assert places["reward"] == places["third"] != places["held_out"]  # the third is the first once more
        assert all(0 < interval["mean"] < 1.05 for interval in places.values())
    assert "FaceSim by third changes" in (evaluated / "out" / "report.html").read_text()
    clip = report["per_clip"][0]
    assert clip["real"]["figures"]["third/face_sim"] == clip["real"]["figures"]["reward/face_sim"]


@pytest.mark.slow(20)
def test_the_upper_end_is_the_stock_vaes_clip(evaluated):
    """Encoded and decoded by diffusers alone, and scored by the reward's recogniser."""
    cfg = config.load(str(CONFIG), [*QUICK])
    records = [json.loads(line) for line in (evaluated / "out" / "records.jsonl").read_text().splitlines()]
    line = next(line for line in records if line["arm"] == "vae")
    row = data.load_metadata(evaluated / "metadata.csv")[line["index"]]
    example = data.load_example(row, cfg.data.height, cfg.data.width, cfg.data.num_frames)
    vae = AutoencoderKLWan.from_pretrained(WORLD / "pipeline" / "vae")
    with torch.no_grad():
        video = vae.decode(vae.encode(example.video[None]).latent_dist.mode()).sample[0].clamp(-1, 1)
    identity = face.FaceIdentity(WORLD / "faces" / "reward", cfg.reward.det_size)
    score = identity.score(video, identity.pool(example.reference).embeddings)
    assert line["figures"]["reward/face_sim"] == pytest.approx(float(score.mean), abs=1e-4)


@pytest.mark.slow(20)
def test_videos_of_another_tool_have_it_too(evaluated, tmp_path):
    """Real clips through the VAE, as other videos, are at 1 but for the codec. No run or training data is there."""
    shutil.copytree(evaluated / "out" / "videos" / "vae", tmp_path / "copies")
    words = ["--config", CONFIG, "--videos", tmp_path / "copies", "--out", tmp_path / "out", "--device", "cpu"]
    call([*words, "--data", evaluated / "metadata.csv", *QUICK, f"data.file_name={tmp_path / 'nowhere.csv'}"])
    report = read_report(tmp_path / "out")
    places = report["arms"][0]["figures"]
    assert [places[f"{name}/identity_kept"]["mean"] for name in ("reward", "held_out")] == pytest.approx(
        [1, 1], abs=0.1
    )
    assert report["settings"]["model"].keys() == {"vae"}


@pytest.mark.slow(20)
def test_training_measures_it_on_the_held_out_clips(evaluated, tmp_path, monkeypatch):
    """Between the ends that the evaluation has found for the same people. No video has a graph."""
    evaluate_in_training = evaluation.evaluate

    def watch(*arguments):
        *others, generate, scales = arguments

        def generate_without_graph(row, n):
            assert not torch.is_grad_enabled()
            return generate(row, n)

        return evaluate_in_training(*others, generate_without_graph, scales)

    monkeypatch.setattr(evaluation, "evaluate", watch)
    launch_grpo(
        f"run.output_dir={tmp_path}", "train.max_steps=1", "reward.name=face_identity", "reward.others={}",
        f"reward.reward_model_path={WORLD / 'faces' / 'reward'}",
        f"reward.held_out_model_path={WORLD / 'faces' / 'judge'}",
        f"evaluation.eval_clips={evaluated / 'metadata.csv'}",
    )  # fmt: skip
    ends = read_report(evaluated / "out")["identity_scale"]["recognisers"]
    for line in (metrics(tmp_path)[0], metrics(tmp_path)[-1]):
        for judge, where in (("reward", "eval"), ("held_out", "eval/held_out")):
            another = ends[judge]["another_person"]["mean"]
            length = ends[judge]["real_through_vae"]["mean"] - another
            expected = (line[f"{where}/face_score"] - another) / length
            assert line[f"{where}/identity_kept"] == pytest.approx(expected, abs=1e-4)
