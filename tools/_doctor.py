"""The work of tools/doctor.py: the checks one after the other, and those of machine, files and faces."""

import argparse
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import psutil
import torch

from rewardfl import backbones, config, data
from rewardfl.backbones.seam import Source
from rewardfl.files import printable, sha256
from rewardfl.rewards import FaceIdentityReward, build_terms, find_terms
from rewardfl.rewards.face import FaceIdentity, FacePool
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.onnx_file import read_graph
from rewardfl.rewards.face.pack import describe_packs, file_hashes, pack_files
from rewardfl.run import start
from rewardfl.run.checkpoint import git_commit, library_versions
from rewardfl.weights import lora_files, shards
from rewardfl.weights.shards import Refused
from rewardfl_tools import _common, _doctor_models, _doctor_page, _doctor_step
from rewardfl_tools._doctor_page import DIFFERS, NOT_DONE, OK, Case, Finding

PAGE = "doctor.json"
SECOND_OPINION = ("insightface", "onnxruntime", "onnxruntime-gpu", "opencv-python", "opencv-python-headless")
SMALL_FACE = 40  # pixels: narrower ones are said, as recognisers see crops of 112
MOST_SETTINGS = 8  # of the model's configuration that are listed where they are not the published ones
# what a check runs into on a machine that it does not know, beside what it says itself of the input
MACHINE = (OSError, torch.OutOfMemoryError, torch.AcceleratorError)


def run(args: argparse.Namespace) -> int:
    """All checks that are asked for, each written down when it is done: the exit code."""
    try:
        case = open_case(args)
    except (*start.REFUSALS, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    findings: dict[str, Finding] = {}
    for name in args.checks:
        began = time.perf_counter()
        found = look(CHECKS[name], case)
        findings[name] = replace(found, facts={**found.facts, "seconds": time.perf_counter() - began})
        _doctor_page.write(case, findings)
        _doctor_models.give_back()
        print(printable(f"{name}: {found.status}: {found.said}"), flush=True)
    print(f"page: {case.out / 'doctor.md'}")
    return 1 if any(found.status == DIFFERS for found in findings.values()) else 0


def open_case(args: argparse.Namespace) -> Case:
    """What is looked at. Raised before anything is written: what training would refuse of configuration and headers."""
    cfg = config.load(args.config, args.overrides)
    device = torch.device(_common.device(args.device))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise config.ConfigError("--device: this torch sees no GPU; give cpu, or leave it out")
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / PAGE).is_file():
        raise config.ConfigError(f"--out: {args.out} holds something else than an earlier page; name a new folder")
    backbone = start.open_model(cfg)
    start.find_rewards(cfg, backbone)
    rows = first_rows(cfg, backbone.takes_image, args.clips)
    args.out.mkdir(parents=True, exist_ok=True)
    return Case(args.config, args.overrides, cfg, backbone, rows, device, args.out, not args.no_digests)


def first_rows(cfg: config.AnyConfig, takes_image: bool, count: int) -> list[data.Row]:
    """The first `count` rows that can be used, whose frames are decoded for it. DataError as training raises it."""
    rows = data.load_metadata(cfg.data.file_name)
    checked = (cfg.data.num_frames, cfg.data.fps, takes_image)
    if cfg.data.skip_bad_rows:
        good = list(islice((row for row in rows if not data.row_problems(row, *checked)), count))
        if good:
            return good
    rows, _ = data.check_rows(rows[:count], cfg.data.num_frames, False, cfg.data.fps, takes_image)
    return rows


def look(check: Callable[[Case], Finding], case: Case) -> Finding:
    """What the check finds; what is wrong with the input differs, and what the machine cannot do could not be done."""
    try:
        return check(case)
    except (*start.REFUSALS, *MACHINE) as error:
        words = str(error).splitlines() or [""]
        return Finding(NOT_DONE if isinstance(error, MACHINE) else DIFFERS, f"{type(error).__name__}: {words[0]}")


# ------------------------------------------------------------------------------------------------------------
# The machine


def environment(case: Case) -> Finding:
    """Versions, card and driver; differs where there is a driver, and this torch cannot use its GPU."""
    driver, sees = gpu_driver(), torch.cuda.is_available()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "CUDA of this torch": torch.version.cuda,
        "driver": driver,
        "GPU": "none",
        "onnxruntime providers": onnxruntime.get_available_providers(),
        "versions": library_versions((*start.VERSIONED, *SECOND_OPINION)),
        "git commit": git_commit(Path(__file__).parent),
        "free disk, GB": shutil.disk_usage(case.out).free / 1e9,
        "free memory, GB": psutil.virtual_memory().available / 1e9,
        "memory, GB": psutil.virtual_memory().total / 1e9,
        "cores": psutil.cpu_count(),
    }
    if sees:
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
            "free memory of the first GPU, GB": free / 1e9,
            "memory of the first GPU, GB": total / 1e9,
        }
    said = f"python {facts['python']}, torch {facts['torch']}, {facts['GPU'] if sees else 'no GPU'}"
    if driver and not sees:
        return Finding(
            DIFFERS, f"{said}; a driver {driver} is there, and this torch cannot use it: see pytorch.org", facts
        )
    return Finding(OK, said, facts)


def gpu_driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi is not there or finds no GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.split("\n")[0].strip() if found.returncode == 0 else None


# ------------------------------------------------------------------------------------------------------------
# Files


def files(case: Case) -> Finding:
    """Size, digest and header of every file. The model's were opened by their headers before anything else was done.

    Differs where a file cannot be read as what it is; a model of another shape than the published one is told.
    """
    began, table = time.perf_counter(), []
    for part, paths in weight_files(case):
        table += [described(part, file, case.digests) for path in paths for file in files_in(path)]
    seconds, began = time.perf_counter() - began, time.perf_counter()
    identity = start.identify(case.backbone)
    problems = [f"{record['file']}: {record['problem']}" for record in table if "problem" in record]
    other, size = unlike_published(case), sum(record["bytes"] for record in table)
    facts = {
        "configuration of the model": case.backbone.described_by(),
        "unlike the published model": other if other is None else other[:MOST_SETTINGS],
        "seconds to read all files": seconds if case.digests else None,
        "seconds to identify the model as run.json does": time.perf_counter() - began,
        "base_model of run.json": identity,
        "notes of the start": case.backbone.differences(case.cfg.sample.shift, case.cfg.sample.guidance_scale),
        "licences": [line for line in describe_packs(pack_hashes(case)) if line.startswith("licence")],
        "files": table,
    }
    if problems:
        return Finding(DIFFERS, problems[0], facts)
    if other is None:
        shape = "no published configuration is known"
    elif other:
        shape = f"another shape than the published model's ({other[0]})"
    else:
        shape = "the published model's shape"
    digests = f", read in {seconds:.0f} s" if case.digests else ", without sha256"
    return Finding(
        OK,
        f"{len(table)} files, {_common.gigabytes(size)}{digests}; experts as their configuration has them, {shape}",
        facts,
    )


def weight_files(case: Case) -> Iterator[tuple[str, list[Path]]]:
    """(part, its files and folders) of the model, the face packs, and what the rewards' settings lead to."""
    yield from case.backbone.weight_files().items()
    named = set()
    for one in config.wanted_rewards(case.cfg):
        for setting, value in one.settings.items():
            path = Path(value) if isinstance(value, str) else Path()
            is_word = len(path.parts) < 2 and not path.suffix  # a folder of that name may be there by chance
            if not is_word and path not in named and path.exists():
                named.add(path)
                yield f"{one.label}.{setting}", list(pack_files(path)) if setting.endswith("pack_dir") else [path]


def files_in(path: Path) -> list[Path]:
    """The file, or those below the folder but for what tools keep there for themselves (.cache)."""
    if path.is_file():
        return [path]
    below = sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def described(part: str, file: Path, digest: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"part": part, "file": "/".join(file.parts[-2:]), "bytes": file.stat().st_size}
    try:
        dtypes = dtypes_of(file)
        record |= {"tensors": sum(dtypes.values()) or None, "dtypes": dict(dtypes)}
    except (Refused, ValueError) as error:
        record["problem"] = str(error)
    return record | ({"sha256": sha256(file)} if digest else {})


def dtypes_of(file: Path) -> Counter[str]:
    """How many tensors of which dtype a file holds, by its header; of other files than weights nothing.

    Refused or ValueError for a damaged one. Pickles of other things than flat tensors are not weights of ours.
    """
    if file.suffix == ".safetensors":
        return Counter(entry.dtype for entry in shards.read_header(file)[0].values())
    if file.suffix == ".onnx":
        graph, _ = read_graph(file)
        return Counter(onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer)
    if file.suffix == ".pth":
        return Counter(str(tensor.dtype).removeprefix("torch.") for tensor in lora_files.read_torch(file).values())
    return Counter()


def unlike_published(case: Case) -> list[str] | None:
    """Settings of the model's parts that are not the published model's, with both values; None where none is known."""
    try:
        published = backbones.describe(case.cfg.model.model_name, Source()).settings()
    except Refused:  # image models are told by their folder's name
        return None
    found = []
    for part, theirs in published.items():
        mine = case.backbone.settings().get(part)
        pairs = {key: (mine.get(key), value) for key, value in theirs.items()} if isinstance(theirs, dict) else {}
        pairs = pairs or {"": (mine, theirs)}
        found += [
            f"{part}.{key}".rstrip(".") + f" {one}, published {other}"
            for key, (one, other) in pairs.items()
            if one != other
        ]
    return found


# ------------------------------------------------------------------------------------------------------------
# Faces


def pack_hashes(case: Case) -> dict[str, dict[str, str]]:
    """{setting: {file: sha256}} of the face packs that the configuration names."""
    packs = {
        "reward_model_path": case.cfg.reward.reward_model_path,
        "held_out_model_path": case.cfg.reward.held_out_model_path,
    }
    return {f"reward.{key}": file_hashes(pack_files(folder)) for key, folder in packs.items() if folder}


def identities(case: Case) -> dict[str, FaceIdentity]:
    """{reward or held_out: the networks} of the face rewards, on the device. RewardError as training raises it."""
    faces = [one for one in config.wanted_rewards(case.cfg) if one.name in ("face_identity", "face_judge")]
    terms = build_terms(find_terms(faces), case.device)
    packs = {term.label: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    return {"reward" if label == "score" else label: identity for label, identity in packs.items()}


@torch.no_grad()
def faces(case: Case) -> Finding:
    """Each pack beside insightface's on the first clip, and what it finds in the clips.

    Differs where insightface sees something else, and where a clip shows no face.
    """
    packs = identities(case)
    if not packs or not case.clips:
        return Finding(NOT_DONE, "the configuration names no face pack" if case.clips else "no row names a video")
    clips = {row.line: start.example_of(case.cfg, row).reference.to(case.device) for row in case.clips}
    facts: dict[str, Any] = {}
    problems, skipped, table = [], [], []
    for label, identity in packs.items():
        try:
            parity = face_parity.check(identity, next(iter(clips.values())))
            facts[f"parity of {label}"] = str(parity)
            skipped += [f"{label}: {parity}"] if parity.skipped else []
        except face_parity.FaceParityError as error:
            facts[f"parity of {label}"] = str(error)
            problems.append(f"{label}: {error}")
        pools = {line: identity.pool(clip) for line, clip in clips.items()}
        problems += [f"{label}: no face in the clip of line {line}" for line, pool in pools.items() if pool is None]
        table += [{"pack": label, "line": line, **seen(pool)} for line, pool in pools.items()]
    facts["clips"] = table
    if problems:
        return Finding(DIFFERS, problems[0], facts)
    widths = [float(record["mean width, px"]) for record in table]
    narrow = sum(width < SMALL_FACE for width in widths)
    small = f", {narrow} of {len(widths)} narrower than {SMALL_FACE} px" if narrow else ""
    said = f"a face in all {len(clips)} clips, {min(widths):.0f} to {max(widths):.0f} px wide{small}"
    if skipped:
        return Finding(NOT_DONE, f"{skipped[0]}; {said}", facts)
    return Finding(OK, f"as insightface sees it; {said}", facts)


def seen(pool: FacePool | None) -> dict[str, Any]:
    """What a pack finds in a clip, whose boxes are in its frames' pixels."""
    if pool is None:
        return {"coverage": 0.0}
    widths = pool.boxes[:, 2] - pool.boxes[:, 0]
    return {
        "coverage": pool.coverage,
        "mean width, px": float(widths.mean()),
        "least width, px": float(widths.min()),
        "self-similarity": pool.cap,
        "landmark speed": pool.speed,
        "non-rigid": pool.nonrigid,
    }


CHECKS: dict[str, Callable[[Case], Finding]] = {
    "environment": environment,
    "files": files,
    "stock": _doctor_models.stock,
    "faces": faces,
    "base": lambda case: _doctor_models.base(case, identities(case)),
    "step": _doctor_step.step,
}
