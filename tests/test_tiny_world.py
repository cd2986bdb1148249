"""The committed world keeps its promises, its networks are what the real ones are, and it can be rebuilt.

How good the assets are is asked by long tests alone.
"""

import dataclasses
import hashlib
import json
import sys

import numpy as np
import pytest
import torch
import zygote
from conftest import ROOT
from insightface.app import FaceAnalysis
from insightface.utils import face_align

from rewardfl import data
from rewardfl.backbones.wan import files as layouts
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.rewards import face
from rewardfl.rewards.face.onnx_file import read_graph
from rewardfl_tools import make_tiny_world
from rewardfl_tools.tiny_world import faces, measure, people, strangers, vae, video

WORLD = ROOT / "assets" / "tiny_world"
PACKS = ("reward", "judge")


def eval_clips(count):
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")[:count]
    return [data.load_example(row, 64, 64, 9).video for row in rows]


@pytest.mark.parametrize("pack", PACKS)
def test_insightface_reads_the_pack_and_agrees(pack):
    """insightface's own app on our files: same face, same landmarks, same crop, same embedding."""
    app = FaceAnalysis(name=str(WORLD / "faces" / pack), providers=["CPUExecutionProvider"])
    app.prepare(ctx_id=-1, det_size=(128, 128))
    ours = face.FaceIdentity(WORLD / "faces" / pack, det_size=128)
    clip = eval_clips(1)[0]
    frame = clip[:, 4]
    bgr = np.ascontiguousarray(data.to_uint8(frame[:, None])[0].numpy()[..., ::-1])
    (theirs,) = app.get(bgr)
    (mine,) = ours.detector.detect(frame[None])
    assert np.abs(mine.landmarks[0].numpy() - theirs.kps).max() < 0.2  # px; cv2 resizes 8-bit pixels in fixed point
    crop = face.align(frame[None], face.similarity_transform(mine.landmarks[:1], face.ARCFACE_TEMPLATE))
    expected = face_align.norm_crop(bgr, mine.landmarks[0].numpy())[..., ::-1].astype(np.float32) / 127.5 - 1
    assert np.abs(crop[0].permute(1, 2, 0).numpy() - expected).mean() < 0.01  # interpolation in 1/32 px steps
    with torch.no_grad():
        embedding = ours.recogniser(crop)[0].numpy()
    assert float(embedding @ theirs.normed_embedding) > 0.999


def test_size_and_metadata():
    assert sum(file.stat().st_size for file in WORLD.rglob("*") if file.is_file()) <= 24e6
    hashes = {}
    for part, count in (("train", 48), ("eval", 24)):
        assert (WORLD / part / "metadata.csv").read_text().splitlines()[0] == "video,prompt"
        rows = data.load_metadata(WORLD / part / "metadata.csv")
        data.check_rows(rows, 9, skip_bad_rows=False)
        hashes[part] = {hashlib.sha256(row.video.read_bytes()).hexdigest() for row in rows}
        assert len(hashes[part]) == count
    assert not hashes["train"] & hashes["eval"]


@pytest.mark.long
@pytest.mark.parametrize("pack", PACKS)
def test_detector_finds_faces_and_their_landmarks(pack):
    detector = face.FaceDetector(WORLD / "faces" / pack / "detector.onnx", det_size=128)
    figures = measure.detection(detector, seed=4321, count=20)
    assert figures["found"] >= 0.98 and figures["landmark_error"] <= 0.03


def test_the_packs_share_no_file_and_no_architecture():
    """What fools the reward's networks is to be seen by the judge's."""
    operators = {}
    for pack in PACKS:
        graph, _ = read_graph(WORLD / "faces" / pack / "detector.onnx")
        convolutions = [node for node in graph.node if node.op_type == "Conv"]
        groups = {a.i for node in convolutions for a in node.attribute if a.name == "group"}
        operators[pack] = {node.op_type for node in graph.node}, max(groups) > 1
    assert "PRelu" in operators["reward"][0] and "PRelu" not in operators["judge"][0]
    assert (operators["reward"][1], operators["judge"][1]) == (False, True)  # separable
    files = [file for pack in PACKS for file in (WORLD / "faces" / pack).glob("*.onnx")]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == len(files) == 4


@pytest.mark.long
@pytest.mark.parametrize("pack", PACKS)
def test_recognisers_tell_strangers_apart(pack):
    recogniser = face.FaceRecogniser(WORLD / "faces" / pack / "recogniser.onnx")
    strangers = people.draw_people(80, torch.Generator().manual_seed(98765))
    figures = faces.verification(recogniser, strangers, torch.Generator().manual_seed(1))
    assert figures["auc"] >= 0.97


@pytest.mark.long
@pytest.mark.parametrize(
    "name, folder, boundary, channels", [("wan2_2", "pipeline", 0.9, 34), ("wan2_2_ti2v", "pipeline_ti2v", None, 16)]
)
@torch.no_grad()
def test_vae_reconstructs_held_out_clips(name, folder, boundary, channels):
    pipe = wan_load.load_pipeline(layouts.find_files(VARIANTS[name], str(WORLD / folder)), torch.float32)
    assert (pipe.config.boundary_ratio, pipe.transformer.config.in_channels) == (boundary, channels)
    assert pipe.vae.config.is_residual == pipe.config.expand_timesteps == (name == "wan2_2_ti2v")
    clips = torch.stack(eval_clips(6))
    again = pipe.vae.decode(pipe.vae.encode(clips).latent_dist.mode()).sample
    assert vae.psnr(again, clips) >= 22


def test_both_bases_drift():
    """They lose the person along the clip, as far as the committed figures say, and move on."""
    figures = json.loads((WORLD / "figures.json").read_text())
    for said in (figures, figures["ti2v"]):
        for pack in PACKS:
            likeness = said[pack]["base"]["per_frame"]
            assert likeness[0] > 0.75 and likeness[-1] < 0.5 and said[pack]["usable"] == 24
            assert said[pack]["base"]["speed_ratio"] > 0.4 and said[pack]["reconstructed"]["face_sim"] > 0.9


@pytest.mark.parametrize("network", [lambda: vae.new_vae(4, (1, 1, 2)), lambda: vae.new_residual_vae(4)])
def test_single_frame_convolutions_are_exact(network):
    torch.manual_seed(0)
    network = network()
    frame = torch.randn(2, 3, 1, 32, 32)
    with torch.no_grad():
        expected = vae.raw_decode(network, network.encode(frame).latent_dist.mode())
        with vae.single_frames():
            actual = vae.raw_decode(network, network.encode(frame).latent_dist.mode())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_drifting_people_start_as_themselves():
    generator = torch.Generator().manual_seed(0)
    traits = people.draw_people(50, generator)
    path = people.drifting(traits, generator)
    assert path.shape == (50, 9, len(people.TRAITS)) and torch.equal(path[:, 0], traits)
    amount = 1 - (path[:, -1, 0] - 0.5) / (traits[:, 0] - 0.5)  # 1: the average face
    assert 0 < float(amount.min()) < 0.3 < 0.8 < float(amount.max()) <= 1
    kept = [people.TRAITS.index("beard"), people.TRAITS.index("glasses")]
    assert torch.equal(path[:, -1, kept], traits[:, kept])


@pytest.mark.long
def test_quick_rebuild(tmp_path):
    """Every stage of tools/make_tiny_world.py with next to no training."""
    run = zygote.run(["tools/make_tiny_world.py", "--quick", "--out", tmp_path / "world"], cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    for file in (
        "figures.json",
        "contact_sheet.png",
        "pipeline/model_index.json",
        "pipeline_ti2v/model_index.json",
        "faces/judge/recogniser.onnx",
    ):
        assert (tmp_path / "world" / file).stat().st_size > 0
    assert len(data.load_metadata(tmp_path / "world" / "train" / "metadata.csv")) == 4
    assert "training low" in run.stdout


@pytest.mark.long
def test_strangers_are_found_and_told_apart(tmp_path, monkeypatch):
    """People of another drawing program, as a table that evaluate reads, by the world's own face packs."""
    command = ["make_tiny_world.py", "--strangers", tmp_path, "--count", 6, "--seed", 2, "--out", WORLD]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    make_tiny_world.main()
    rows = data.load_metadata(tmp_path / "metadata.csv")
    data.check_rows(rows, people.NUM_FRAMES, skip_bad_rows=False)
    assert len(rows) == 6 and (tmp_path / "contact_sheet.png").stat().st_size > 1000
    assert {word for row in rows for word in row.prompt.replace(",", "").split()} <= set(video.WORDS)
    figures = json.loads((tmp_path / "figures.json").read_text())
    for pack in PACKS:
        assert figures[pack]["found"] >= 0.9 and figures[pack]["people"] == 6
        assert figures[pack]["alike"] > 0.75 > 0.4 > figures[pack]["different"]


def test_strangers_depend_on_their_seed_and_number_alone(tmp_path):
    def hashes(name, count, seed):
        strangers.write_strangers(tmp_path / name, count, seed)
        return [
            hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted((tmp_path / name / "videos").iterdir())
        ]

    three = hashes("three", 3, 0)
    assert hashes("two", 2, 0) == three[:2] and len({*three, *hashes("other", 3, 1)}) == 6


def test_strangers_move_blink_and_talk():
    """In every motion something moves; the shut eyes and the open mouth are in the pixels."""
    rng = np.random.default_rng(0)
    person = strangers.draw_stranger(rng)
    motions = [strangers.draw_motion(rng) for _ in range(20)]
    assert all(len({(pose.x, pose.y, pose.yaw) for pose in poses}) == people.NUM_FRAMES for poses, _ in motions)
    words = {word for _, action in motions for word in action.split(", ")}
    assert words == {"talking", "silent", "turning left", "turning right", "facing the camera", "blinking"}
    still = strangers.Pose(x=31.5, y=34.0, scale=22.0, roll=0.0, yaw=0.0, nod=0.0, blink=0.0, mouth=0.0)
    poses = [still, dataclasses.replace(still, blink=1.0), dataclasses.replace(still, mouth=1.0)]
    rest, blinking, talking = strangers.render(person, poses, np.random.default_rng(1)).int()
    eyes, mouth = (slice(22, 38), slice(10, 54)), (slice(38, 56), slice(16, 48))
    assert (blinking - rest)[eyes].abs().max() > 60 and (blinking - rest)[mouth].abs().max() == 0
    assert (talking - rest)[mouth].abs().max() > 60 and (talking - rest)[eyes].abs().max() == 0
