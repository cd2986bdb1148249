"""What is measured of one video."""

import numpy as np
import pytest
import torch
from conftest import ROOT

from rewardfl import data
from rewardfl.evaluation import judging
from rewardfl.rewards import face
from rewardfl.rewards.pixels.measures import video_motion

WORLD = ROOT / "assets" / "tiny_world"


def test_a_real_clips_frames_are_left_out_of_their_pool():
    embeddings = torch.nn.functional.normalize(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), dim=1)
    with_itself = (embeddings @ embeddings.mean(0)).tolist()
    curve = judging.leave_one_out([*with_itself, 0.3], [True] * 5 + [False], 5)
    for i in range(5):
        others = torch.cat([embeddings[:i], embeddings[i + 1 :]])
        assert curve[i] == pytest.approx(float((others @ embeddings[i]).mean()), abs=1e-6)
    assert curve[5] == 0.3  # no face of this frame is in the pool
    assert np.mean(curve[:5]) == pytest.approx(face.identity.self_similarity(embeddings), abs=1e-6)


def test_a_real_clip_is_measured_by_its_own_frames():
    row = data.load_metadata(WORLD / "eval" / "metadata.csv")[0]
    example = data.load_example(row, 64, 64, 9)
    judge = face.FaceIdentity(WORLD / "faces" / "judge", 128)
    judges = judging.Judges(faces={"held_out": judge}, terms=[], periods=(8,), device="cpu")
    references, pools, _ = judging.prepare_row(judges, row, example, skip=False)
    record = judging.judge_real(judges, example, references, pools)
    pool, figures = judge.pool(example.video), record["figures"]
    motion = video_motion(data.to_uint8(example.video).contiguous().numpy(), pool.boxes.numpy())
    assert [figures[f"motion/{key}"] for key in motion] == pytest.approx([*motion.values()])
    assert figures["held_out/cap"] == pytest.approx(pool.cap) == figures["held_out/face_sim"]
    assert figures["held_out/speed"] == pool.speed and figures["canary/saturation"] > 0
    assert 10 < record["face_width"] < 64 and references.size == (64, 64)
    mouth = judging.mouth_movement(references.patches["mouth"])
    still = judging.with_motion(references, {"mouth": torch.zeros(())})
    silent = judging.judge_video(judges, example.video, still)["figures"]
    assert figures["motion/mouth"] == silent["motion/silent_mouth"] == mouth
    assert judging.measure_motion(judges, references, example.video, "") == {"mouth": mouth}
    assert judging.measure_motion(judges, references, torch.zeros(3, 9, 64, 64), "") == {}
    black = judging.judge_video(judges, torch.full((3, 9, 64, 64), -1.0), references)
    assert black["figures"]["held_out/face_sim"] == 0 and black["curves"]["held_out"] == [0] * 8
    assert black["figures"]["motion/face_flow"] is None and not any(black["detected"]["held_out"])
    grey = torch.zeros(3, 9, 64, 64)
    faceless = data.Example(size=(64, 64), video=grey, image=grey[:, 0], reference=grey)
    with pytest.raises(data.DataError, match="no face was found"):
        judging.prepare_row(judges, row, faceless, skip=False)
