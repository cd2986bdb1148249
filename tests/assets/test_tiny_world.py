"""The committed world keeps its promises, its networks are what the real ones are, and it can be rebuilt.

How good the assets are is tested by long tests only.
"""

import csv
import hashlib
import itertools
import json

import make_tiny_world
import pytest
import torch
from conftest import ROOT, run_python, run_tool

from rewardfl import backbones, data
from rewardfl.backbones.protocol import Source
from rewardfl.rewards import face
from rewardfl.rewards.face.onnx_module import read_graph
from tiny_world import faces, measure, people, vae

pytestmark = pytest.mark.slow(130)

WORLD = ROOT / "assets" / "tiny_world"
PACKS = ("reward", "judge")


def eval_clips(count):
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")[:count]
    return [data.load_example(row, people.SIZE, people.SIZE, 9).video for row in rows]


def test_size_and_metadata():
    assert sum(file.stat().st_size for file in WORLD.rglob("*") if file.is_file()) <= 36e6
    hashes = {}
    for part, count in (("train", 48), ("validation", 24), ("eval", 48), ("train_drift", 48)):
        assert (WORLD / part / "metadata.csv").read_text().splitlines()[0] == "video,prompt"
        rows = data.load_metadata(WORLD / part / "metadata.csv")
        assert not any(data.inspect_row(row, 9).problems for row in rows)
        hashes[part] = {hashlib.sha256(row.video.read_bytes()).hexdigest() for row in rows}
        assert len(hashes[part]) == count
    assert len(set.union(*hashes.values())) >= 48 + 24 + 48 + 42  # six clips have no drift


def test_photos_and_their_tables():
    files = sorted(WORLD.glob("*/photos/*/*.jpg"))
    assert len(files) == 600 and sum(file.stat().st_size for file in files) <= 2e6
    assert len({data.read_picture(file).shape for file in files}) > 300
    for part in ("train", "validation", "eval"):
        table = csv.DictReader((WORLD / part / "photos.csv").read_text().splitlines())
        for row, cells in zip(data.load_metadata(WORLD / part / "metadata.csv"), table, strict=True):
            assert cells == dict(prompt=row.prompt, image="", photos=f"photos/{row.video.stem}", person=row.video.stem)
            assert len(list((WORLD / part / cells["photos"]).glob("[0-4].jpg"))) == people.PHOTOS


def test_photos_are_drawn_again_without_training(tmp_path):
    run_tool(make_tiny_world.main, "--photos", "--quick", "--out", tmp_path, expect=None)
    photos = list(tmp_path.glob("*/photos/*/*.jpg"))
    assert len(photos) == 8 * people.PHOTOS and not any(tmp_path.glob("train/videos"))
    for path in photos:  # another processor rounds differently
        drawn, committed = (data.read_picture(file).float() for file in (path, WORLD / path.relative_to(tmp_path)))
        assert (drawn - committed).abs().mean() < 1
    _, mouths = people.draw_photos(torch.rand(len(people.TRAITS)), torch.Generator().manual_seed(0))
    assert mouths.sort().values.tolist() == [0, 0.25, 0.5, 0.75, 1]  # shut to open


@pytest.mark.long
@pytest.mark.parametrize("part", ["train", "validation", "eval"])
def test_photos_show_the_person_of_the_clip(part):
    """The cosines are inner_face's; the detectors of both packs find every face."""
    packs = [face.FaceIdentity(WORLD / "faces" / name, faces.DET_SIZE) for name in (*PACKS, "inner_face")]
    photos, clips = [], []  # embeddings
    for row in data.load_metadata(WORLD / part / "metadata.csv"):
        for file in sorted((WORLD / part / "photos" / row.video.stem).iterdir()):
            still = data.to_float(data.read_picture(file)[None]).expand(-1, 2, -1, -1)
            pools = [pack.pool(still) for pack in packs]
            assert all(pools), f"no face in {file}"
            photos.append(pools[-1].embeddings[0])
        clips.append(packs[-1].pool(data.load_example(row, people.SIZE, people.SIZE, 9).video).embeddings.mean(0))
    vectors, person = torch.stack(photos), torch.arange(len(photos)) // people.PHOTOS
    photo, clip = (vectors @ vectors.T).fill_diagonal_(-1), vectors @ torch.stack(clips).T
    in_photo, in_clip = person[:, None] == person, person[:, None] == torch.arange(len(clips))  # the same person
    cosines = (photo[in_photo & (photo > -1)], clip[in_clip], photo[~in_photo], clip[~in_clip])
    means = [values.mean().item() for values in cosines]
    nearest = [(index == person).float().mean().item() for index in (person[photo.argmax(1)], clip.argmax(1))]
    print(f"{part}: photos, clip of the person {means[:2]}, of others {means[2:]}; nearest {nearest}")
    assert min(means[:2]) > 0.8 and max(means[2:]) < 0.05 and min(nearest) > 0.99


@pytest.mark.long
def test_training_clips_drift_as_the_base_learned_it():
    clean, drifting = (data.load_metadata(WORLD / part / "metadata.csv") for part in ("train", "train_drift"))
    assert [row.prompt for row in clean] == [row.prompt for row in drifting]
    judge, late = measure.load_judges(WORLD)["judge"], []
    for rows in zip(clean, drifting, strict=True):
        clips = [data.load_example(row, people.SIZE, people.SIZE, 9).video for row in rows]
        first = judge.pool(clips[0][:, :1].expand(-1, 2, -1, -1)).embeddings
        late.append([judge.score(clip, first).per_frame[-4:].mean() for clip in clips])
    stays, drifts = torch.tensor(late).T
    assert stays.mean() > 0.75 and drifts.mean() < 0.4 and (stays - drifts > 0.1).sum() == 42  # seven of eight


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
        graph = read_graph(WORLD / "faces" / pack / f"{file}.onnx")
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
    pipe = backbones.open(name, Source(model_paths=str(WORLD / folder), dtype="float32")).load(None)
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
        measured = figures["identity"][judge]
        assert measured["through_vae"]["face_sim"] >= 0.92 * measured["real"]["face_sim"]
        # 1 and 0.8 are wanted: docs/results/tiny_world.md
        assert measured["through_vae"]["rank_1"] > 0.97 and measured["through_vae"]["kept"] == pytest.approx(1)
        assert all(measured[model]["speed_over_real"] > 0.7 for model in ("base", "cured"))
    assert all(figures["flow_over_real"][model] >= 0.8 for model in ("base", "cured"))


@pytest.mark.nightly
def test_quick_rebuild(tmp_path):
    """Every stage of make_tiny_world.py with next to no training."""
    run = run_python(["assets/build/make_tiny_world.py", "--quick", "--out", tmp_path / "world"], cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    for file in ("figures.json", "pipeline_ti2v/model_index.json", "faces/judge/recogniser.onnx", "eval/photos.csv"):
        assert (tmp_path / "world" / file).stat().st_size > 0
    assert len(data.load_metadata(tmp_path / "world" / "train" / "metadata.csv")) == 4
    assert "training low" in run.stdout
