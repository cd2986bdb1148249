"""Packs as users have them: which files are taken from which folders, what is refused, hashes and licences."""

import re

import onnx
import pytest
import torch
from face_nets import MiniArcFace, export, magenta_pack
from insightface.model_zoo import get_model
from onnx import TensorProto, helper

from rewardfl.rewards.face import pack as face_pack
from rewardfl.rewards.face.pack import describe_packs, pack_files


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """{task: bytes} of files as they lie in antelopev2."""
    folder = magenta_pack(tmp_path_factory.mktemp("parts"))
    files = {"detector": folder / "det.onnx", "recogniser": folder / "rec.onnx"}
    for name, side in {"2d106det": 192, "genderage": 96}.items():
        files[name] = export(MiniArcFace(side), torch.randn(1, 3, side, side), folder / f"{name}.onnx")
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.fixture
def write(parts, tmp_path):
    """write("a/b", file="task", ...) puts the files into tmp_path / "a/b"."""

    def write(folder, **tasks):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, task in tasks.items():
            (tmp_path / folder / f"{name}.onnx").write_bytes(parts[task])
        return tmp_path / folder

    return write


def test_files_are_told_apart_as_by_insightface(write):
    # names that say nothing, or the wrong thing
    folder = write("pack", glintr100="2d106det", a="genderage", b="recogniser", w600k_r50="detector")
    (folder / "._b.onnx").write_bytes(b"what macOS' zips leave")
    tasks = {get_model(str(f), providers=["CPUExecutionProvider"]).taskname: f for f in folder.glob("[!.]*.onnx")}
    assert pack_files(folder) == (tasks["detection"], tasks["recognition"])
    assert pack_files(str(folder)) == (folder / "w600k_r50.onnx", folder / "b.onnx")


@pytest.mark.parametrize("below", ["antelopev2", "antelopev2/antelopev2", "models/antelopev2", "models/a/a"])
def test_folders_around_a_pack(write, tmp_path, below):
    folder = write(f"root/{below}", det="detector", rec="recogniser", ga="genderage")
    assert pack_files(tmp_path / "root") == (folder / "det.onnx", folder / "rec.onnx")


def test_a_pack_hides_what_lies_below_it(write):
    folder = write("pack", det="detector", rec="recogniser")
    write("pack/older", det="detector", rec="recogniser")
    assert pack_files(folder) == (folder / "det.onnx", folder / "rec.onnx")


def test_home(write, tmp_path, monkeypatch):
    folder = write(".insightface/models/antelopev2", det="detector", rec="recogniser")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pack_files("~/.insightface/models/antelopev2") == (folder / "det.onnx", folder / "rec.onnx")
    assert pack_files("~/.insightface") == (folder / "det.onnx", folder / "rec.onnx")


def test_what_is_no_pack(write, tmp_path):
    with pytest.raises(FileNotFoundError, match="no face pack at .*nowhere: it is a folder of .onnx files"):
        pack_files(tmp_path / "nowhere")
    nothing = "has no folder with a detector.* and a recogniser.*Its .onnx files: "
    with pytest.raises(FileNotFoundError, match=f"empty {nothing}none"):
        pack_files(write("empty"))
    with pytest.raises(FileNotFoundError, match=f"blind {nothing}ga.onnx .*has been found; rec.onnx is a rec"):
        pack_files(write("blind", rec="recogniser", ga="genderage"))
    write("apart/one", det="detector"), write("apart/two", rec="recogniser")
    with pytest.raises(FileNotFoundError, match="one/det.onnx is a detector; two/rec.onnx is a recogniser"):
        pack_files(tmp_path / "apart")
    file = write("pack", det="detector", rec="recogniser") / "rec.onnx"
    with pytest.raises(FileNotFoundError, match="no face pack at .*rec.onnx: it is a folder .*; unpack a zip first"):
        pack_files(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="rec.onnx .* is not a whole ONNX file"):
        pack_files(file.parent)


SEEN = {  # by file: side of its input, shapes of its outputs, what the message says of it
    "version-RFB-320.onnx": (240, [(1, 4420, 2), (1, 4420, 4)], "UltraFace .*without the five landmarks"),
    "blazeface.onnx": (128, [(1, 896, 16), (1, 896, 1)], "BlazeFace: six landmarks"),
    "pnet.onnx": (12, [(1, 2, "h", "w"), (1, 4, "h", "w")], "one of MTCNN's three networks"),
    "onet.onnx": (48, [("n", 4), ("n", 10), ("n", 2)], "one of MTCNN's three networks"),
    "2d106det.onnx": (192, [(1, 212)], "landmarks or attributes of a face that has been found"),
}


def named(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


@pytest.mark.parametrize("file", SEEN)
def test_what_is_there_instead_of_a_detector_is_described(file, tmp_path):
    side, shapes, words = SEEN[file]
    outputs = [named(f"y{i}", shape) for i, shape in enumerate(shapes)]
    nodes = [helper.make_node("Identity", ["x"], [output.name]) for output in outputs]
    graph = helper.make_graph(nodes, "g", [named("x", (1, 3, side, side))], outputs)
    onnx.save(helper.make_model(graph), tmp_path / file)
    given = ", ".join(" x ".join("?" if isinstance(n, str) else str(n) for n in shape) for shape in shapes)
    described = rf"{file} \(takes 1 x 3 x {side} x {side}, gives {re.escape(given)}\) .*{words}"
    with pytest.raises(FileNotFoundError, match=f"has no folder with a detector.*{described}"):
        pack_files(tmp_path)


def test_what_could_be_meant_twice(write, tmp_path):
    for name in ("antelopev2", "buffalo_l"):
        write(f"root/models/{name}", det="detector", rec="recogniser")
    with pytest.raises(ValueError, match="root holds several face packs; name one of .*antelopev2.*buffalo_l"):
        pack_files(tmp_path / "root")
    folder = write("two", det="detector", glintr100="recogniser", other="recogniser")
    with pytest.raises(ValueError, match=r"two has 2 recognisers: \['glintr100.onnx', 'other.onnx'\]; a pack has one"):
        pack_files(folder)


def test_packages_with_other_preprocessing_are_refused(write):
    folder = write("pack", det="detector", rec="recogniser")
    (folder / "manifest.json").write_text('{"name": "an older pack"}')
    assert pack_files(folder) == (folder / "det.onnx", folder / "rec.onnx")
    (folder / "manifest.json").write_text('{"manifest_version": 2}')
    with pytest.raises(ValueError, match="pack is an insightface package with a manifest.json"):
        pack_files(folder)


def test_hashes_and_licences_are_said_once():
    research, auraface = (
        next(digest for digest, licence in face_pack._LICENCE_BY_HASH.items() if words in licence)
        for words in ("research only", "Apache-2.0")
    )
    lines = describe_packs(
        {
            "reward.reward_model_path": {"det.onnx": research, "glintr100.onnx": auraface},
            "reward.held_out_model_path": {"det.onnx": research, "glintr100.onnx": "12ab", "mine.onnx": "34cd"},
        }
    )
    assert lines[:2] == [
        f"reward.reward_model_path: det.onnx sha256 {research}",
        f"reward.reward_model_path: glintr100.onnx sha256 {auraface}",
    ]
    det, aura, unknown, mine = lines[5:]  # one each, though det.onnx is in both packs
    assert det.startswith("licence of det.onnx: weights of insightface") and "non-commercial research only" in det
    assert aura == "licence of glintr100.onnx: weights of fal/AuraFace-v1: Apache-2.0 by its model card"
    assert unknown == "licence of glintr100.onnx: weights of unknown origin; check their licence"
    assert mine == "licence of mine.onnx: weights of unknown origin; check their licence"
