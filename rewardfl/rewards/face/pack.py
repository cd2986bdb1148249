"""Face packs: their detector and recogniser files, hashes and licences.

A file's task follows from the inputs and outputs of its graph, never from its name: insightface's rule
(model_zoo/model_zoo.py, ModelRouter). insightface's packs (antelopev2, buffalo_l and others), AuraFace, and a folder of
OpenCV's YuNet and SFace all work.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from rewardfl.files import sha256
from rewardfl.rewards.face.onnx_file import graph_inputs, read_graph, value_shape
from rewardfl.rewards.settings import PathSetting, on_this_machine

TASKS = ("detector", "recogniser")
MAX_LISTED = 4  # files, and outputs of a network, in a message
OTHER_FORMATS = (".tflite", ".caffemodel", ".param", ".pb", ".pt", ".pth", ".mnn", ".task")

_DEPTH = 3  # ~/.insightface / models / antelopev2 / antelopev2 / *.onnx: insightface's zip nests its folder twice


def pack_files(pack_dir: str | Path) -> tuple[Path, Path]:
    """Return the detector's and the recogniser's file in a pack folder, or in the only pack below it.

    pack_dir: the folder of the .onnx files, the folder around it that an unpacked zip leaves, or an insightface root
    (models/<pack>/). Files of other tasks (landmarks, gender and age) are ignored.

    Raise FileNotFoundError when the folder or one of the two files is missing. Raise ValueError for several packs or
    several files of one task, for a zip, or for a damaged file.
    """
    root = Path(pack_dir).expanduser()
    if root.is_file():
        advice = _unzip(root) if root.suffix == ".zip" else f"name the folder {root.parent}"
        raise ValueError(f"{root} is a file; a face pack is a folder of .onnx files: {advice}")
    if not root.is_dir():
        raise FileNotFoundError(
            f"no face pack at {root}: it is a folder of .onnx files, a detector and a recogniser{_zips(root)}"
        )
    folders = _search(root, _DEPTH)
    packs = [folder for folder, files in folders.items() if set(files.values()).issuperset(TASKS)]
    if not packs:
        raise FileNotFoundError(_nothing_usable(root, folders))
    if len(packs) > 1:
        raise ValueError(f"{root} holds several face packs; name one of {[str(pack) for pack in packs]}")
    return _only(packs[0], folders[packs[0]], "detector"), _only(packs[0], folders[packs[0]], "recogniser")


def _check_pack(folder: str) -> None:
    try:
        pack_files(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"the folder of a face pack: {error}") from error


PackFolder = Annotated[PathSetting, on_this_machine(_check_pack)]


def _search(folder: Path, depth: int) -> dict[Path, dict[Path, str]]:
    """Return {folder: {.onnx file: task}} of this folder and those below. Skip the folders below a pack."""
    # macOS' zips hold a hidden ._glintr100.onnx for each file
    files = {file: _task(file) for file in sorted(folder.glob("*.onnx")) if not file.name.startswith(".")}
    folders = {folder: files} if files else {}
    if set(files.values()).issuperset(TASKS):
        _refuse_manifest(folder)
    elif depth:
        for subfolder in sorted(path for path in folder.iterdir() if path.is_dir()):
            folders |= _search(subfolder, depth - 1)
    return folders


def _task(path: Path) -> str:
    """Return detector, recogniser or other, by insightface's rule on the graph's inputs and outputs."""
    graph, _ = read_graph(path)
    if len(graph.output) >= 5:
        return "detector"
    inputs = graph_inputs(graph)
    if len(inputs) != 1 or len(graph.output) != 1 or len(value_shape(inputs[0])) != 4:
        return "other"  # two inputs: a face swapper
    height, width = value_shape(inputs[0])[2:]
    square = height is not None and height == width
    return "recogniser" if square and height >= 112 and height % 16 == 0 and height != 192 else "other"


def _only(folder: Path, files: dict[Path, str], task: str) -> Path:
    candidates = [file for file, file_task in files.items() if file_task == task]
    if len(candidates) > 1:
        raise ValueError(
            f"{folder} has {len(candidates)} {task}s: {[file.name for file in candidates]}; a pack has one "
            f"(insightface would take {candidates[0].name}), so move the others to a folder of their own"
        )
    return candidates[0]


def _nothing_usable(root: Path, folders: dict[Path, dict[Path, str]]) -> str:
    """Return the message that no folder at or below root is a pack."""
    tasks = {str(file.relative_to(root)): task for files in folders.values() for file, task in files.items()}
    missing = [task for task in TASKS if task not in tasks.values()]
    if not missing:
        used = [name for name, task in tasks.items() if task in TASKS]
        return f"{root} has no folder with both a detector and a recogniser: put these into one: {used}"
    return (
        f"{root} has no {' and no '.join(missing)} among its .onnx files {list(tasks)}{_describe_files(root, folders)};"
        " a detector has nine outputs (scrfd_10g_bnkps.onnx) or twelve (face_detection_yunet_2023mar.onnx), a "
        f"recogniser one 112 x 112 input and one output (glintr100.onnx){_zips(root)}"
    )


def _describe_files(root: Path, folders: dict[Path, dict[Path, str]]) -> str:
    """Return a clause for each network at or below root: its probable kind, and why it cannot be used."""
    clauses = [f"{file.relative_to(root)} {describe_network(file)}" for files in folders.values() for file in files]
    unread = sorted(file for file in root.rglob("*") if file.suffix in OTHER_FORMATS)
    clauses += [f"{file.relative_to(root)} is no .onnx file, and others are not read" for file in unread[:MAX_LISTED]]
    return "".join(f"; {clause}" for clause in clauses)


def describe_network(path: Path) -> str:
    """Return the inputs, outputs and probable kind of an .onnx file, and why it is no usable detector."""
    graph, _ = read_graph(path)
    inputs, outputs = ([value_shape(value) for value in values] for values in (graph_inputs(graph), graph.output))
    more = ", ..." if len(outputs) > MAX_LISTED else ""
    gives = ", ".join(_describe_shape(shape) or "()" for shape in outputs[:MAX_LISTED]) + more
    return f"(takes {' and '.join(map(_describe_shape, inputs))}, gives {gives}) {_kind(inputs, outputs)}"


def _describe_shape(shape: list[int | None]) -> str:
    return " x ".join("?" if side is None else str(side) for side in shape)


def _kind(inputs: list[list[int | None]], outputs: list[list[int | None]]) -> str:
    """Describe in words the probable kind of a network with these shapes."""
    side = inputs[0][-1] if inputs and inputs[0] else None
    flat = sorted(shape[-1] or 0 for shape in outputs if len(shape) in (2, 3))
    maps = sorted(shape[1] or 0 for shape in outputs if len(shape) == 4)
    if len(outputs) == 1 and len(inputs) == 1 and len(outputs[0]) in (0, 2):
        if side == 112:
            return "looks like a recogniser, which finds no faces"
        return "looks like a network for landmarks or attributes of a face that has been found"
    if flat == [2, 4] and len(outputs[0]) == 3:
        return "looks like UltraFace (RFB, slim): boxes without the five landmarks by which a face is cut out"
    if flat == [1, 16]:
        return "looks like BlazeFace: six landmarks, which are others than the five by which a face is cut out"
    if (flat in ([2, 4], [2, 4, 10]) and len(outputs[0]) == 2) or maps == [2, 4]:
        return "looks like one of MTCNN's three networks, a cascade: each gives a part of the answer"
    if flat == [2, 4, 10]:
        return "looks like RetinaFace with other anchors than SCRFD's"
    if len(outputs) == 6:
        return "looks like SCRFD without landmarks: take the file whose name has bnkps in it"
    if len(outputs) == 1 and len(outputs[0]) == 3:
        return "looks like a YOLO, whose rows are not read here"
    return "is of no layout that is read here"


def _zips(root: Path) -> str:
    """Return how to unpack the zips in the folder and <folder>.zip next to it; "" without any."""
    sibling = root.with_name(f"{root.name}.zip")
    return "".join(f"; {_unzip(path)}" for path in sorted(root.glob("*.zip")) + [sibling] * sibling.is_file())


def _unzip(path: Path) -> str:
    folder = path.with_suffix("")
    return f"unpack it with `unzip {path} -d {folder}` and name {folder}"


def _refuse_manifest(folder: Path) -> None:
    """Raise ValueError for insightface 2's packages, whose manifest sets unsupported pre-processing."""
    manifest = folder / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")).get("manifest_version") == 2:
        raise ValueError(
            f"{folder} is an insightface package with a {manifest.name}, whose pre-processing is not known here; "
            "use antelopev2, buffalo_l or AuraFace"
        )


def shared_file(first_pack: str | Path, second_pack: str | Path) -> tuple[str, Path, Path] | None:
    """Return (detector or recogniser, its file in each pack) where both packs have the same bytes, else None.

    Raise the errors of `pack_files`.
    """
    for task, first, second in zip(TASKS, pack_files(first_pack), pack_files(second_pack), strict=True):
        if first.stat().st_size == second.stat().st_size and sha256(first) == sha256(second):
            return task, first, second
    return None


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """Return {file name: sha256 of its bytes, hexadecimal}; run.json records the reward's weights with it."""
    return {file.name: sha256(file) for file in files}


# face_recognition_sface_2021dec.onnx of github.com/opencv/opencv_zoo
SFACE = ("0ba9fbfa01b5270c96627c4ef784da859931e02f04419c829e83484087c34e79",)
_INSIGHTFACE = "insightface's model zoo: non-commercial research only"
_AURAFACE = "fal/AuraFace-v1: Apache-2.0 by its model card"
_YUNET = "OpenCV's model zoo, YuNet: MIT"
_SFACE = "OpenCV's model zoo, SFace: Apache-2.0"

_LICENCE_BY_HASH = {
    # scrfd_10g_bnkps.onnx of antelopev2 and of AuraFace, det_10g.onnx of buffalo_l: the same file
    "5838f7fe053675b1c7a08b633df49e7af5495cee0493c7dcf6697200b85b5b91": _INSIGHTFACE,
    "5e4447f50245bbd7966bd6c0fa52938c61474a04ec7def48753668a9d8b4ea3a": _INSIGHTFACE,  # det_500m.onnx, buffalo_s
    "4ab1d6435d639628a6f3e5008dd4f929edf4c4124b1a7169e1048f9fef534cdf": _INSIGHTFACE,  # glintr100.onnx, antelopev2
    "4c06341c33c2ca1f86781dab0e829f88ad5b64be9fba56e56bc9ebdefc619e43": _INSIGHTFACE,  # w600k_r50.onnx, buffalo_l
    "9cc6e4a75f0e2bf0b1aed94578f144d15175f357bdc05e815e5c4a02b319eb4f": _INSIGHTFACE,  # w600k_mbf.onnx, buffalo_s
    "a7933ea5330113b01c9b60351d8f4c33003f145d8470ac5f0e52ee2effe25c60": _AURAFACE,  # glintr100.onnx
    "8f2383e4dd3cfbb4553ea8718107fc0423210dc964f9f4280604804ed2552fa4": _YUNET,  # face_detection_yunet_2023mar.onnx
} | dict.fromkeys(SFACE, _SFACE)
_INSIGHTFACE_NAMES = ("scrfd_", "det_10g", "det_2.5g", "det_500m", "glintr100", "w600k_")


def is_sface(path: str | Path) -> bool:
    """Return whether the file is the published SFace; its graph may look like an ArcFace."""
    return sha256(Path(path)) in SFACE


def describe_packs(packs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return lines with the hashes and licences of packs. packs: {setting of a pack: its `file_hashes`}.

    The hash determines the licence. A name alone does not: AuraFace's recogniser has the name of antelopev2's.
    """
    lines = [f"{setting}: {name} sha256 {digest}" for setting, files in packs.items() for name, digest in files.items()]
    names = {digest: name for files in packs.values() for name, digest in files.items()}
    return lines + [f"licence of {name}: {_licence(name, digest)}" for digest, name in names.items()]


def _licence(name: str, digest: str) -> str:
    if digest in _LICENCE_BY_HASH:
        return f"weights of {_LICENCE_BY_HASH[digest]}"
    if name.startswith(_INSIGHTFACE_NAMES):
        return f"named as in {_INSIGHTFACE}, but sha256 {digest[:12]} is unknown here; check the licence of its weights"
    return f"weights of unknown origin (sha256 {digest[:12]}); check their licence"
