"""Identity kept in evaluations of a run of the tiny world, of other tools' videos, and in training."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLWan
from runs import CONFIG, QUICK, WORLD, launch, launch_grpo, metrics, table
from test_evaluate_runs import call

from rewardfl import config, data
from rewardfl.rewards import face
from rewardfl.rewards.face.identity_kept import FEWEST

pytestmark = pytest.mark.slow(60)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Eight people, the base and a step's adapter, judged by the run's recognisers and one more."""
    folder = tmp_path_factory.mktemp("evaluated")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    table(folder / "metadata.csv", "eval", FEWEST)
    words = ["--run", folder / "run", "--out", folder / "out", "--judge", f"third={WORLD / 'faces' / 'reward'}"]
    call([*words, "--data", folder / "metadata.csv", "--seeds", "1", "--device", "cpu"])
    return folder


def read_report(folder):
    return json.loads((folder / "report.json").read_text())


def test_every_recogniser_has_a_scale(evaluated):
    report = read_report(evaluated / "out")
    assert list(report["real"]["per_frame"]) == ["reward", "held_out", "third"]
    for arm in report["arms"]:
        places = {name: arm["figures"][f"{name}/identity_kept"] for name in ("reward", "held_out", "third")}
        assert places["reward"] == places["third"] != places["held_out"]  # the third is the first once more
        assert all(0 < interval["mean"] < 1.05 for interval in places.values())
    assert "FaceSim by third changes" in (evaluated / "out" / "report.html").read_text()
    clip = report["per_clip"][0]
    assert clip["real"]["figures"]["third/face_sim"] == clip["real"]["figures"]["reward/face_sim"]


def test_the_upper_end_is_the_stock_vaes_clip(evaluated):
    """Encoded and decoded by diffusers, and scored by the reward's recogniser."""
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


def test_videos_of_another_tool_have_a_scale(evaluated, tmp_path):
    """Real clips through the VAE, as other videos, are at 1 but for the codec. No run or training data is there."""
    shutil.copytree(evaluated / "out" / "videos" / "vae", tmp_path / "copies")
    words = ["--config", CONFIG, "--videos", tmp_path / "copies", "--out", tmp_path / "out", "--device", "cpu"]
    call([*words, "--data", evaluated / "metadata.csv", *QUICK, f"data.file_name={tmp_path / 'nowhere.csv'}"])
    report = read_report(tmp_path / "out")
    places = [report["arms"][0]["figures"][f"{name}/identity_kept"]["mean"] for name in ("reward", "held_out")]
    assert places == pytest.approx([1, 1], abs=0.1)
    assert report["settings"]["model"].keys() == {"vae"}


def test_training_measures_identity_kept_as_evaluate(evaluated, tmp_path):
    """Between the ends that the evaluation measured of the same people."""
    launch_grpo(
        f"run.output_dir={tmp_path}", "train.max_steps=1", "reward.terms.score.name=face_identity", "reward.others={}",
        f"reward.reward_model_path={WORLD / 'faces' / 'reward'}",
        f"reward.held_out_model_path={WORLD / 'faces' / 'judge'}",
        f"evaluation.eval_clips={evaluated / 'metadata.csv'}",
    )  # fmt: skip
    ends = read_report(evaluated / "out")["identity_scale"]["recognisers"]
    for line in (metrics(tmp_path)[0], metrics(tmp_path)[-1]):
        for judge, prefix in (("reward", "eval"), ("held_out", "eval/held_out")):
            another = ends[judge]["another_person"]["mean"]
            length = ends[judge]["real_through_vae"]["mean"] - another
            expected = (line[f"{prefix}/face_score"] - another) / length
            assert line[f"{prefix}/identity_kept"] == pytest.approx(expected, abs=1e-4)
