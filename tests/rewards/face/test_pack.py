"""Packs as users have them: which files are taken from which folders, what is refused, hashes and licences."""

import pytest
import torch
from face_nets import MiniArcFace, export, magenta_pack
from insightface.model_zoo import get_model

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


def test_files_have_the_tasks_of_insightface(write):
    # names that say nothing, or the wrong thing
    folder = write("pack", glintr100="2d106det", a="genderage", b="recogniser", w600k_r50="detector")
    (folder / "._b.onnx").write_bytes(b"what macOS' zips leave")
    tasks = {get_model(str(f), providers=["CPUExecutionProvider"]).taskname: f for f in folder.glob("[!.]*.onnx")}
    assert pack_files(folder) == (tasks["detection"], tasks["recognition"]) == pack_files(str(folder))


@pytest.mark.parametrize("below", ["antelopev2", "models/a/a"])
def test_a_pack_below_a_folder_is_found(write, tmp_path, below):
    folder = write(f"root/{below}", det="detector", rec="recogniser", ga="genderage")
    assert pack_files(tmp_path / "root") == (folder / "det.onnx", folder / "rec.onnx")


def test_a_pack_hides_folders_below_it(write, tmp_path, monkeypatch):
    folder = write("pack", det="detector", rec="recogniser")
    write("pack/older", det="detector", rec="recogniser")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pack_files(folder) == pack_files("~/pack") == (folder / "det.onnx", folder / "rec.onnx")


def test_a_folder_that_is_not_one_pack_is_refused(write, tmp_path):
    write("blind", rec="recogniser", ga="genderage")
    damaged = write("damaged", det="detector", rec="recogniser") / "rec.onnx"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    (write("manifest", det="detector", rec="recogniser") / "manifest.json").write_text('{"manifest_version": 2}')
    for name in ("antelopev2", "buffalo_l"):
        write(f"root/models/{name}", det="detector", rec="recogniser")
    write("double", det="detector", glintr100="recogniser", other="recogniser")
    no_pack = "has no folder with a detector.* five landmarks .* and a recogniser.*its .onnx files: "
    for folder, message in (
        ("nowhere", f"^no face pack at {tmp_path}/nowhere, which is not there; name a folder of .onnx files"),
        (write("empty").name, f"empty {no_pack}none"),
        ("blind", rf"blind {no_pack}ga.onnx \(other: takes 1 x 3 x 96 x 96 and gives 1 x 16\); rec.onnx .recogniser: "),
        ("damaged", "rec.onnx is not a complete ONNX file"),
        ("manifest", "manifest is an insightface package with a manifest.json"),
        ("root", "root holds several face packs; name one of .*antelopev2.*buffalo_l"),
        ("double", r"double has 2 recognisers: \['glintr100.onnx', 'other.onnx'\]; move all but one elsewhere"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            pack_files(tmp_path / folder)


def test_packs_are_described_by_hash_and_licence():
    research, auraface = (
        next(digest for digest, licence in face_pack._LICENCE_BY_HASH.items() if words in licence)
        for words in ("research only", "Apache-2.0")
    )
    packs = {"reward.reward_model_path": {"det.onnx": research, "glintr100.onnx": auraface}}
    lines = [
        f"reward.reward_model_path: det.onnx sha256 {research}, insightface's model zoo: non-commercial research only",
        f"reward.reward_model_path: glintr100.onnx sha256 {auraface}, fal/AuraFace-v1: Apache-2.0 by its model card",
    ]
    assert describe_packs(packs) == lines
    *described, last = describe_packs(packs | {"reward.held_out_model_path": {"det.onnx": "12ab"}})
    assert described == [*lines, "reward.held_out_model_path: det.onnx sha256 12ab"] and "unknown" in last
