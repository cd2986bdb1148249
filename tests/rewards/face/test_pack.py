"""Packs as users have them: which files are taken from which folders, what is refused, hashes and licences."""

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


def test_what_is_no_pack(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=f"no face pack at {tmp_path}/nowhere, which is not there; name a folder of .onnx files"
    ):
        pack_files("nowhere")
    nothing = "has no folder with a detector.* and a recogniser.*its .onnx files: "
    with pytest.raises(FileNotFoundError, match=f"empty {nothing}none"):
        pack_files(write("empty"))
    with pytest.raises(FileNotFoundError, match=f"blind {nothing}ga.onnx .other: takes .*; rec.onnx .recogniser: "):
        pack_files(write("blind", rec="recogniser", ga="genderage"))
    write("apart/one", det="detector"), write("apart/two", rec="recogniser")
    with pytest.raises(FileNotFoundError, match="one/det.onnx .detector: .*; two/rec.onnx .recogniser: "):
        pack_files(tmp_path / "apart")
    file = write("pack", det="detector", rec="recogniser") / "rec.onnx"
    with pytest.raises(FileNotFoundError, match="no face pack at .*rec.onnx, which is a file; name a folder"):
        pack_files(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="rec.onnx .* is not a whole ONNX file"):
        pack_files(file.parent)


def named(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def test_what_is_there_instead_of_a_detector_is_described(tmp_path):
    """UltraFace: boxes without the landmarks by which a face is cut out."""
    outputs = [named("y0", (1, 4420, 2)), named("y1", ("n", 4420, 4))]
    nodes = [helper.make_node("Identity", ["x"], [output.name]) for output in outputs]
    graph = helper.make_graph(nodes, "g", [named("x", (1, 3, 240, 240))], outputs)
    onnx.save(helper.make_model(graph), tmp_path / "RFB.onnx")
    described = r"RFB.onnx \(other: takes 1 x 3 x 240 x 240 and gives 1 x 4420 x 2, \? x 4420 x 4\)"
    with pytest.raises(FileNotFoundError, match=f"has no folder with a detector.* five landmarks .*{described}"):
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


def test_hashes_and_licences():
    research, auraface = (
        next(digest for digest, licence in face_pack._LICENCE_BY_HASH.items() if words in licence)
        for words in ("research only", "Apache-2.0")
    )
    known = {"reward.reward_model_path": {"det.onnx": research, "glintr100.onnx": auraface}}
    lines = describe_packs(known | {"reward.held_out_model_path": {"det.onnx": "12ab", "mine.onnx": "34cd"}})
    det, aura, *unknown, last = lines
    assert det == (
        f"reward.reward_model_path: det.onnx sha256 {research}, insightface's model zoo: non-commercial research only"
    )
    assert aura.endswith(f"glintr100.onnx sha256 {auraface}, fal/AuraFace-v1: Apache-2.0 by its model card")
    assert unknown == [
        f"reward.held_out_model_path: {file}" for file in ("det.onnx sha256 12ab", "mine.onnx sha256 34cd")
    ]
    assert "unknown" in last and describe_packs(known) == [det, aura]
