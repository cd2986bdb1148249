"""Records of judged videos with figures that a test chooses, and reports made of them."""

import numpy as np
import torch

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import summarise
from rewardfl.evaluation.records import FORMAT

JUDGE, PEOPLE = "held_out", "abcdefghij"
ARMS = [Arm(name="base", steps=8), Arm(name="latest", steps=8, adapter="adapter")]
FIGURES = {
    JUDGE: {"face_sim": 0.5, "coverage": 1.0, "speed": 0.02, "nonrigid": 0.01},
    "motion": {"flow": 1.0, "face_flow": 2.0, "pixel_change": 0.1, "sharpness": 50.0, "reversals": -0.8},
    "canary": {"grid": 1.0, "saturation": 0.2, "red": 0.5, "green": 0.5, "blue": 0.5},
}
SETTINGS = {
    "records": {"format": str(FORMAT)}, "data": {"--data": "ab"}, "sampling": {"sample.shift": "5"},
    "model": {"network": "n"}, "judges": {"held_out's w.onnx": "12"}, "adapters": {"latest": "cd"}, "videos": {},
}  # fmt: skip


def record(person, arm, seed=0, curve=None, **figures):
    """Return a record with FIGURES, some replaced. Its FaceSim is the mean of the curve."""
    curve = [figures.get("face_sim", FIGURES[JUDGE]["face_sim"])] * 8 if curve is None else curve
    figures["face_sim"] = float(np.mean(curve))
    named = {f"{block}/{key}": figures.get(key, v) for block, keys in FIGURES.items() for key, v in keys.items()}
    place = {"row": person, "line": 2, "index": ord(person[0]), "person": person, "arm": arm, "seed": seed}
    place |= {"steps": 8, "decoded": False, "file": "x.mp4"}
    return place | {"figures": named, "curves": {JUDGE: curve}, "detected": {JUDGE: [True] * 9}}


def real(person, **figures):
    line = record(person, "real", None, **{"flow": 4.0, "face_sim": 0.9} | figures)
    line["figures"][f"{JUDGE}/cap"] = 0.9
    return line | {"face_width": 60.0}


def pair(person, seed, before, after, **figures):
    return [record(person, "base", seed, face_sim=before), record(person, "latest", seed, face_sim=after, **figures)]


def through_vae(names=PEOPLE, people=None, spread=0.6):
    """Return records of real clips through the VAE whose faces lie around each person's direction."""
    random, records = torch.Generator().manual_seed(0), []
    for row, person in zip(names, people or names, strict=True):
        direction = torch.randn(16, generator=random)
        face, pool = (direction + spread * torch.randn(16, generator=random) for _ in range(2))
        face, pool = 0.9 * face / face.norm(), pool / pool.norm()
        line = record(row, "vae", None, face_sim=float(face @ pool))
        records.append(line | {"person": person, "embedding": {JUDGE: face.tolist()}, "pool": {JUDGE: pool.tolist()}})
    return records


def summary(*records, arms=ARMS):
    """Return the report of records, with real clips of all rows."""
    rows = dict.fromkeys(line["row"] for line in records if line["arm"] != "real")
    with_clip = {line["row"] for line in records if line["arm"] == "real"}
    return summarise([*records, *(real(row) for row in rows if row not in with_clip)], arms)


def finished(report):
    """Return a report with the keys that judging adds."""
    return report | {"command": ["evaluate.py", "--run", "x"], "version": "9.9", "settings": SETTINGS}


def changed(gain=0.1, spread=0.02, people="abcdefghi", **figures):
    """Return a report of people with about this gain of FaceSim, and these figures of the second arm."""
    clips = [pair(name, 0, 0.5, 0.5 + gain + spread * (i - 4) / 4, **figures) for i, name in enumerate(people)]
    return finished(summary(*sum(clips, [])))
