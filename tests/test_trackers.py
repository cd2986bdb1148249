"""TensorBoard for real; Weights & Biases offline where it is installed, and a stand-in everywhere."""

import sys
import types
from importlib import metadata

import pytest
import torch
from runs import call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rewardfl import data
from rewardfl.run import trackers

CONFIG = {"run.seed": "42", "train.max_steps": "None"}


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "00.mp4"
    data.write_video(path, torch.arange(9, dtype=torch.uint8)[:, None, None, None].expand(9, 16, 32, 3) * 25, 8)
    return path


def shown(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return events


def test_tensorboard_and_a_resumed_run(tmp_path, clip):
    tracker = trackers.open_tracker("tensorboard", tmp_path, CONFIG, 0)
    for step in (1, 2, 3):
        tracker.log(step, {"actor/loss": step / 2, "grad_norm": float("nan")})
    tracker.videos(2, clip.parent)
    tracker.close()
    events = shown(tmp_path / "logs")
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    (image,) = events.Images("samples/00")
    assert image.step == 2 and (image.width, image.height) == (4 * 32, 16)  # four frames in a row
    resumed = trackers.open_tracker("tensorboard", tmp_path, CONFIG, 2)  # killed in step 3, which is done again
    resumed.log(3, {"actor/loss": 7.0})
    resumed.close()
    assert [(e.step, e.value) for e in shown(tmp_path / "logs").Scalars("actor/loss")] == [(1, 0.5), (2, 1.0), (3, 7.0)]


def test_no_tracker(tmp_path, clip):
    tracker = trackers.open_tracker("none", tmp_path, CONFIG, 0)
    tracker.log(1, {"a": 1.0})
    tracker.videos(1, clip.parent)
    tracker.close()
    assert list(tmp_path.iterdir()) == [clip]


def test_a_folder_that_cannot_be_written_drops_the_tracker(tmp_path):
    (tmp_path / "logs").touch()
    message = "run.log_with: tensorboard failed and is dropped, training goes on .*metrics.jsonl and samples/ have"
    with pytest.warns(UserWarning, match=message):
        tracker = trackers.open_tracker("tensorboard", tmp_path, CONFIG, 0)
    tracker.log(1, {"a": 1.0})
    tracker.close()


def test_a_tracker_that_fails_later_is_dropped_once(tmp_path, clip, monkeypatch, recwarn):
    tracker = trackers.open_tracker("tensorboard", tmp_path, CONFIG, 0)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracker.writer, "add_scalar", fail)
    for step in (1, 2):
        tracker.log(step, {"a": 1.0})
    tracker.videos(2, clip.parent)
    tracker.close()
    assert len(calls) == 1 and [str(w.message) for w in recwarn if "is dropped" in str(w.message)] == [
        "run.log_with: tensorboard failed and is dropped, training goes on (OSError: [Errno 28] No space left on "
        "device); metrics.jsonl and samples/ have everything, a restart tries it again"
    ]


# -- wandb


class StandIn:
    """As much of wandb as is called, with what it was called with."""

    class Error(Exception):
        pass

    def __init__(self):
        self.inits, self.logged, self.fail = [], [], False
        self.Video = lambda path, format: (path, format)

    def init(self, **arguments):
        self.inits.append(arguments)
        if self.fail:
            raise self.Error("No API key")
        run = types.SimpleNamespace(id=arguments["id"] or f"id{len(self.inits)}", finish=lambda: None)
        run.log, run.define_metric = self.logged.append, lambda *a, **k: None
        return run


@pytest.fixture
def stand_in(monkeypatch):
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_goes_on_with_its_run(tmp_path, clip, stand_in):
    for first_step in (0, 0, 5):  # two runs that start anew, and one that goes on
        tracker = trackers.open_tracker("wandb", tmp_path, CONFIG, first_step)
        tracker.log(first_step + 1, {"a": 1.0})
    tracker.videos(6, clip.parent)
    assert [(each["id"], each["resume"]) for each in stand_in.inits] == [(None, None), (None, None), ("id2", "allow")]
    assert stand_in.logged[-2:] == [{"step": 6, "a": 1.0}, {"step": 6, "samples/00": (str(clip), "mp4")}]
    assert (tmp_path / "wandb_run_id").read_text() == "id2\n"


def test_wandb_without_a_key_is_dropped(tmp_path, stand_in):
    stand_in.fail = True
    with pytest.warns(UserWarning, match="wandb failed and is dropped, .*Error: No API key"):
        tracker = trackers.open_tracker("wandb", tmp_path, CONFIG, 0)
    tracker.log(1, {})
    assert len(stand_in.inits) == 1


def test_wandb_offline(tmp_path, clip, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for first_step in (0, 2):
        tracker = trackers.open_tracker("wandb", tmp_path, CONFIG, first_step)
        tracker.log(first_step + 1, {"actor/loss": 0.5, "grad_norm": float("nan")})
        tracker.videos(first_step + 1, clip.parent)
        ids.append(tracker.run.id)
        tracker.close()
        assert not tracker.dropped
    assert ids[0] == ids[1] == (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 2
    assert len(list((tmp_path / "wandb").rglob("*.mp4"))) == 2
    assert issubclass(wandb.Error, Exception)


def test_wandb_that_is_not_installed_is_refused_before_anything_loads(monkeypatch, capsys, tmp_path):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(trackers.metadata, "version", missing)
    code, _, error = call(monkeypatch, capsys, "run.log_with=wandb", f"run.output_dir={tmp_path / 'run'}")
    assert code == 2 and "error: run.log_with is wandb, which is not installed: pip install wandb, or set" in error
    assert not (tmp_path / "run").exists()
