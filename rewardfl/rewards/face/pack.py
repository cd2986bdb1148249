"""Face packs: their detector and recogniser files, hashes and licences.

A file's task follows from the inputs and outputs of its graph by insightface's rule (model_zoo/model_zoo.py).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from rewardfl.file_kinds import foreign_path_hint
from rewardfl.files import sha256
from rewardfl.rewards.face.onnx_module import graph_inputs, read_graph, value_shape
from rewardfl.rewards.settings import PathSetting, on_this_machine
from rewardfl.weights import shards

Task = Literal["detector", "recogniser", "other"]
TASKS: tuple[Task, ...] = ("detector", "recogniser")
_DEPTH = 3  # ~/.insightface / models / antelopev2 / antelopev2 / *.onnx: insightface's zip nests its folder twice


def pack_files(pack_dir: str | Path) -> tuple[Path, Path]:
    """Return the detector's and the recogniser's file in a pack folder, or in the only pack below it.

    Files of other tasks (landmarks, gender and age) are ignored. Raise FileNotFoundError when the folder or one of the
    two files is missing. Raise ValueError for several packs or several files of one task, or for a damaged file.
    """
    root = Path(pack_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"no face pack at {root.absolute()}, which is {'a file' if root.exists() else 'not there'}; name a folder "
            f"of .onnx files, a detector and a recogniser{foreign_path_hint(root)}"
        )
    folders: dict[Path, dict[Path, Task]] = {}
    for file in sorted(file for depth in range(_DEPTH + 1) for file in root.glob("*/" * depth + "*.onnx")):
        if not file.name.startswith("."):  # macOS' zips hold a hidden ._glintr100.onnx for each file
            folders.setdefault(file.parent, {})[file] = _task(file)
    packs = [folder for folder, tasks in folders.items() if set(tasks.values()).issuperset(TASKS)]
    packs = [root] if root in packs else packs
    if not packs:
        tasks = {file: task for folder in folders.values() for file, task in folder.items()}
        files = [f"{file.relative_to(root)} ({task}: {_describe(file)})" for file, task in tasks.items()]
        raise FileNotFoundError(
            f"{root} has no folder with a detector, which gives scores, boxes and five landmarks in nine outputs "
            "(scrfd_10g_bnkps.onnx) or twelve (face_detection_yunet_2023mar.onnx), and a recogniser, which has one "
            f"112 x 112 input and one output (glintr100.onnx); its .onnx files: {'; '.join(files) or 'none'}"
        )
    if len(packs) > 1:
        raise ValueError(f"{root} holds several face packs; name one of {[str(pack) for pack in packs]}")
    _refuse_manifest(packs[0])
    files = [[file for file, file_task in folders[packs[0]].items() if file_task == task] for task in TASKS]
    for task, names in zip(TASKS, files, strict=True):
        if len(names) > 1:
            raise ValueError(
                f"{packs[0]} has {len(names)} {task}s: {[file.name for file in names]}; move all but one elsewhere"
            )
    return files[0][0], files[1][0]


def _check_pack(folder: str) -> None:
    try:
        pack_files(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"the folder of a face pack: {error}") from error


PackFolder = Annotated[PathSetting, on_this_machine(_check_pack)]


def _task(path: Path) -> Task:
    """Return the task of a network by insightface's rule on the graph's inputs and outputs."""
    graph = read_graph(path)
    if len(graph.output) >= 5:
        return "detector"
    shapes = [value_shape(value) for value in graph_inputs(graph)]
    if len(shapes) != 1 or len(graph.output) != 1 or len(shapes[0]) != 4:
        return "other"  # two inputs: a face swapper
    height, width = shapes[0][2:]
    square = height is not None and height == width and height >= 112 and height % 16 == 0
    return "recogniser" if square and height != 192 else "other"


def _describe(path: Path) -> str:
    """Return the shapes that an .onnx file takes and gives."""
    graph = read_graph(path)
    takes, gives = (
        ", ".join(" x ".join(str(side or "?") for side in value_shape(value)) or "()" for value in values)
        for values in (graph_inputs(graph), graph.output)
    )
    return f"takes {takes} and gives {gives}"


def _refuse_manifest(folder: Path) -> None:
    """Raise ValueError for insightface 2's packages, whose manifest sets unsupported pre-processing."""
    manifest = folder / "manifest.json"
    if manifest.is_file() and shards.read_json_object(manifest).get("manifest_version") == 2:
        raise ValueError(f"{folder} is an insightface package with a {manifest.name}; use antelopev2 or buffalo_l")


def shared_file(first_pack: str | Path, second_pack: str | Path) -> tuple[str, Path, Path] | None:
    """Return (detector or recogniser, its file in each pack) if both packs have the same bytes, else None."""
    for task, first, second in zip(TASKS, pack_files(first_pack), pack_files(second_pack), strict=True):
        if sha256(first) == sha256(second):
            return task, first, second
    return None


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """Return {file name: sha256 of its bytes, hexadecimal}; run.json records the reward's weights with it."""
    return {file.name: sha256(file) for file in files}


# face_recognition_sface_2021dec.onnx of github.com/opencv/opencv_zoo
SFACE = "0ba9fbfa01b5270c96627c4ef784da859931e02f04419c829e83484087c34e79"
_INSIGHTFACE = "insightface's model zoo: non-commercial research only"

_LICENCE_BY_HASH = {
    # scrfd_10g_bnkps.onnx of antelopev2 and of AuraFace, det_10g.onnx of buffalo_l: the same file
    "5838f7fe053675b1c7a08b633df49e7af5495cee0493c7dcf6697200b85b5b91": _INSIGHTFACE,
    "5e4447f50245bbd7966bd6c0fa52938c61474a04ec7def48753668a9d8b4ea3a": _INSIGHTFACE,  # det_500m.onnx, buffalo_s
    "4ab1d6435d639628a6f3e5008dd4f929edf4c4124b1a7169e1048f9fef534cdf": _INSIGHTFACE,  # glintr100.onnx, antelopev2
    "4c06341c33c2ca1f86781dab0e829f88ad5b64be9fba56e56bc9ebdefc619e43": _INSIGHTFACE,  # w600k_r50.onnx, buffalo_l
    "9cc6e4a75f0e2bf0b1aed94578f144d15175f357bdc05e815e5c4a02b319eb4f": _INSIGHTFACE,  # w600k_mbf.onnx, buffalo_s
    "a7933ea5330113b01c9b60351d8f4c33003f145d8470ac5f0e52ee2effe25c60": "fal/AuraFace-v1: Apache-2.0 by its model card",
    "8f2383e4dd3cfbb4553ea8718107fc0423210dc964f9f4280604804ed2552fa4": "OpenCV's model zoo, YuNet: MIT",
    SFACE: "OpenCV's model zoo, SFace: Apache-2.0",
}


def is_sface(path: str | Path) -> bool:
    """Return whether the file is the published SFace; its graph may look like an ArcFace."""
    return sha256(path) == SFACE


def describe_packs(packs: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each file of packs, with hash and licence. packs: {setting of a pack: its `file_hashes`}."""
    lines, unknown = [], False
    for setting, files in packs.items():
        for name, digest in files.items():
            licence = _LICENCE_BY_HASH.get(digest, "")
            lines.append(f"{setting}: {name} sha256 {digest}" + (licence and f", {licence}"))
            unknown |= not licence
    return lines + ["the licence of face weights without one here is unknown; check where they are from"] * unknown
