"""The committed world keeps its promises, its networks are what the real ones are, and it can be rebuilt.

How good the assets are is asked by long tests alone.
"""

import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import ROOT, run_python
from insightface.app import FaceAnalysis
from insightface.utils import face_align

from rewardfl import data
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan.files import find_files
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.rewards import face
from rewardfl.rewards.face.onnx_file import read_graph
from tiny_world import faces, measure, people, strangers, vae, video

pytestmark = pytest.mark.slow(130)

WORLD = ROOT / "assets" / "tiny_world"
PACKS = ("reward", "judge")


def eval_clips(count):
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")[:count]
    return [data.load_example(row, people.SIZE, people.SIZE, 9).video for row in rows]


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
    assert sum(file.stat().st_size for file in WORLD.rglob("*") if file.is_file()) <= 36e6
    hashes = {}
    for part, count in (("train", 48), ("validation", 24), ("eval", 48)):
        assert (WORLD / part / "metadata.csv").read_text().splitlines()[0] == "video,prompt"
        rows = data.load_metadata(WORLD / part / "metadata.csv")
        data.check_rows(rows, 9, skip_bad_rows=False)
        hashes[part] = {hashlib.sha256(row.video.read_bytes()).hexdigest() for row in rows}
        assert len(hashes[part]) == count
    assert len(set.union(*hashes.values())) == 48 + 24 + 48


@pytest.mark.long
@pytest.mark.parametrize("pack", PACKS)
def test_detector_finds_faces_and_their_landmarks(pack):
    detector = face.FaceDetector(WORLD / "faces" / pack / "detector.onnx", det_size=128)
    figures = measure.detection(detector, seed=4321, count=20)
    assert figures["found"] >= 0.98 and figures["landmark_error"] <= 0.03


def test_the_packs_share_no_file_and_no_architecture():
    """What fools the reward's networks is to be seen by the judge's."""
    operators = {}
    for pack, file in itertools.product(PACKS, ("detector", "recogniser")):
        graph, _ = read_graph(WORLD / "faces" / pack / f"{file}.onnx")
        convolutions = [node for node in graph.node if node.op_type == "Conv"]
        groups = {a.i for node in convolutions for a in node.attribute if a.name == "group"}
        operators[pack, file] = {node.op_type for node in graph.node}
        assert (max(groups) > 1) == (pack == "judge" or file == "recogniser")  # separable, or one weight per place
    for file in ("detector", "recogniser"):
        assert "PRelu" in operators["reward", file] and "PRelu" not in operators["judge", file]
    files = [file for pack in PACKS for file in (WORLD / "faces" / pack).glob("*.onnx")]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == len(files) == 4


def test_inner_face_is_blind_to_colour_and_hair():
    """What its reward is paid for is the face, which recognisers of others see, too."""
    crops, others = torch.rand(2, 2, 3, 112, 112, generator=torch.Generator().manual_seed(0)) * 2 - 1
    other_hair = torch.where(faces.inner_face() == 0, others, crops)
    seen = {}
    for pack in ("reward", "inner_face"):
        recogniser = face.FaceRecogniser(WORLD / "faces" / pack / "recogniser.onnx")
        with torch.no_grad():
            plain, turned, other = (recogniser(x) for x in (crops, crops.flip(1), other_hair))
        seen[pack] = [(plain * changed).sum(1).min() for changed in (turned, other)]
    assert seen["inner_face"][0] > 0.9999 and max(seen["reward"]) < 0.99
    assert seen["inner_face"][1] > seen["reward"][1]


@pytest.mark.long
@pytest.mark.parametrize("pack", [*PACKS, "inner_face"])
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
    pipe = wan_load.load_pipeline(find_files(VARIANTS[name], str(WORLD / folder)), torch.float32)
    assert (pipe.config.boundary_ratio, pipe.transformer.config.in_channels) == (boundary, channels)
    assert pipe.vae.config.is_residual == pipe.config.expand_timesteps == (name == "wan2_2_ti2v")
    clips = torch.stack(eval_clips(6))
    again = pipe.vae.decode(pipe.vae.encode(clips).latent_dist.mode()).sample
    assert vae.psnr(again, clips) >= 32


def test_drift_is_what_the_judges_see():
    """By the committed figures the base drifts, the cured model does not, and VAE and motion cost little."""
    figures = json.loads((WORLD / "figures.json").read_text())
    assert {*PACKS, "fr_feature", "mobilefacenet"} <= figures["identity"].keys()
    for judge in ("fr_feature", "mobilefacenet"):
        base, cured = (figures["identity_kept"][judge][model] for model in ("base", "cured"))
        assert base <= 0.4 and cured >= base + 0.3 and cured >= (base + 1) / 2
        found = figures["identity"][judge]
        assert found["through_vae"]["face_sim"] >= 0.92 * found["real"]["face_sim"]
        # 1 and 0.8 are wanted: docs/results/tiny_world.md
        assert found["through_vae"]["rank_1"] > 0.97 and found["through_vae"]["kept"] == pytest.approx(1)
        assert all(found[model]["speed_over_real"] > 0.7 for model in ("base", "cured"))
    assert all(figures["flow_over_real"][model] >= 0.8 for model in ("base", "cured"))


def test_drifting_people_turn_into_a_stock_face_of_their_skin_in_the_first_third():
    generator = torch.Generator().manual_seed(0)
    traits = people.draw_people(400, generator)
    path = people.drift(traits, generator)
    assert path.shape == (400, 9, len(people.TRAITS)) and torch.equal(path[:, 0], traits)
    assert torch.equal(path[:, 3], path[:, 8])
    held = [people.TRAITS.index(name) for name in people.HELD]
    assert torch.equal(path[:, -1, held], traits[:, held])
    others = [i for i in range(len(people.TRAITS)) if i not in held]
    steps = (path[:, -1] - traits)[:, others]
    drifts = steps.abs().sum(1) > 0
    assert 0.83 < float(drifts.float().mean()) < 0.92  # seven in eight
    stock, skin = people.draw_stock_faces(), people.TRAITS.index("skin")
    dark = stock[:, skin].argmax()  # 1 is the darkest skin
    own = stock[torch.where(traits[:, skin] > 0.5, dark, 1 - dark)]
    way = (own - traits)[:, others]
    amount = (steps * way).sum(1) / way.square().sum(1)
    assert float((steps - amount[:, None] * way).abs().max()) < 1e-5
    assert 0.6 <= float(amount[drifts].min()) < 0.62 and 0.68 < float(amount.max()) <= 0.7001


def test_clips_with_and_without_drift_differ_by_the_drift_alone():
    clips, drifting, prompts = people.draw_clips(2, 3)
    assert clips.shape == drifting.shape == (2, 3, 9, people.SIZE, people.SIZE) and len(set(prompts)) == 2
    assert torch.equal(clips[:, :, 0], drifting[:, :, 0])
    corner = (slice(None), slice(None), slice(None), slice(0, 6), slice(0, 6))
    assert float((clips[corner] - drifting[corner]).abs().mean()) < 0.01  # the scene
    assert (clips - drifting)[:, :, 3:].abs().mean() > 0.05
    assert torch.equal(people.draw_clips(2, 3)[1], drifting) and not torch.equal(people.draw_clips(2, 4)[0], clips)


def test_the_prompt_tells_the_motion():
    generator = torch.Generator().manual_seed(0)
    motion, words = people.draw_motion(300, generator)
    sweep, pan = motion.yaw[:, -1] - motion.yaw[:, 0], motion.x[:, -1] - motion.x[:, 0]
    for value, word, other in (
        (sweep, "turning right", "turning left"), (pan, "moving right", "moving left"),
    ):  # fmt: skip
        right = torch.tensor([word in each for each in words])
        left = torch.tensor([other in each for each in words])
        assert float(value[right].min()) > float(value[~right & ~left].max())
        assert float(value[left].max()) < float(value[~right & ~left].min())
    for value, word in ((motion.mouth, "talking"), (motion.blink, "blinking")):
        assert [float(each.max()) > 0.5 for each in value] == [word in each for each in words]
    assert {word for each in words for word in each.replace(",", "").split()} <= set(video.WORDS)


@pytest.mark.long
def test_quick_rebuild(tmp_path):
    """Every stage of make_tiny_world.py with next to no training."""
    run = run_python(["assets/build/make_tiny_world.py", "--quick", "--out", tmp_path / "world"], cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    for file in ("figures.json", "pipeline_ti2v/model_index.json", "faces/judge/recogniser.onnx"):
        assert (tmp_path / "world" / file).stat().st_size > 0
    assert len(data.load_metadata(tmp_path / "world" / "train" / "metadata.csv")) == 4
    assert "training low" in run.stdout


def test_strangers_move_blink_and_talk():
    """In every motion something moves; the shut eyes and the open mouth are in the pixels."""
    rng = np.random.default_rng(0)
    person = strangers.draw_stranger(rng)
    motions = [strangers.draw_motion(rng) for _ in range(20)]
    assert all(len({(pose.x, pose.y, pose.yaw) for pose in poses}) == people.NUM_FRAMES for poses in motions)
    still = strangers.Pose(x=39.5, y=42.0, scale=27.0, roll=0.0, yaw=0.0, nod=0.0, blink=0.0, mouth=0.0)
    poses = [still, dataclasses.replace(still, blink=1.0), dataclasses.replace(still, mouth=1.0)]
    rest, blinking, talking = strangers.render(person, poses, np.random.default_rng(1)).int()
    eyes, mouth = (slice(28, 47), slice(12, 68)), (slice(48, 70), slice(20, 60))
    assert (blinking - rest)[eyes].abs().max() > 60 and (blinking - rest)[mouth].abs().max() == 0
    assert (talking - rest)[mouth].abs().max() > 60 and (talking - rest)[eyes].abs().max() == 0


def test_clips_of_strangers_come_with_prompts_that_the_models_know(tmp_path):
    strangers.write_clips(tmp_path, 12, seed=1)
    rows = data.load_metadata(tmp_path / "metadata.csv")
    assert {word for row in rows for word in row.prompt.replace(",", "").split()} <= set(video.WORDS)
    assert data.load_example(rows[0], 80, 80, 9).video.shape == (3, 9, 80, 80)
    rng = np.random.default_rng([1, 3])
    person, poses = strangers.draw_stranger(rng), strangers.draw_motion(rng)
    turned = [dataclasses.replace(pose, yaw=0.3 - 0.06 * i) for i, pose in enumerate(poses)]
    assert "turning left" in strangers.describe(person, turned)
    assert "turning right" in strangers.describe(person, turned[::-1])
