"""Clips that are both trained on and evaluated; base videos that are sampled again."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Source
from rewardfl.config import ConfigError
from rewardfl.data import Row
from rewardfl.data.cache import Cache
from rewardfl.training.plan import resolve
from rewardfl.training.samples import Sample
from rewardfl.training.setup_data import add_base_motion, check_held_out
from rewardfl.training.shard import Shard


def rows(*names):
    return [
        Row(index=i, line=i + 2, id=name, video=Path("clips") / f"{name}.mp4", prompt=f"a {name}")
        for i, name in enumerate(names)
    ]


def test_evaluation_on_the_trained_clips_only_is_refused():
    """Under whatever name the table has. A note counts some of them."""
    trained = rows("a", "b", "c")
    again = [dataclasses.replace(row, video=row.video.absolute(), table="evaluation.eval_clips") for row in trained]
    for held_out in (again, again[::-1], again[1:]):
        with pytest.raises(ConfigError, match="evaluation.eval_clips: all of its rows are in data.file_name, too"):
            check_held_out(trained, held_out)
    (note,) = check_held_out(trained, rows("c", "d"))
    assert note == "note: 1 of 2 rows of evaluation.eval_clips are trained on, too"
    other_prompt = [dataclasses.replace(row, prompt="another") for row in trained]
    for held_out in (rows("d"), other_prompt, []):
        assert check_held_out(trained, held_out) == []


def sample_of(name):
    row = SimpleNamespace(id=name, prompt="talking", video=None, rejected=None, offers=("picture",))
    return Sample(row=row, clip={}, size=(32, 32), references=())


def test_another_boundary_or_row_is_sampled_again(tmp_path):
    """Without a reward that measures motion the anchor takes the first noise's, and only of rows to train on."""
    generated, store = [], Cache(tmp_path)
    job = SimpleNamespace(run_on_main=lambda find, errors: find(), wait=lambda: None, shard=Shard(0, 1, quiet=True))

    def generate(samples, row, noise):
        generated.append((samples[row].row.id, noise))
        return row, torch.zeros(3, 1, 2, 2), torch.full((1, 1), float(len(generated)))

    source = Source(model_paths=str(ROOT / "assets" / "tiny_world" / "pipeline"), dtype="float32")
    for boundary, names, latents in ((0.9, "a", [1]), (0.8, "a", [2]), (0.9, "ba", [3, 1])):
        settings = ["anchor.weight=1", "anchor.target=reference", f"model.min_timestep_boundary={boundary}"]
        cfg = config.load(ROOT / "tests" / "face.yaml", settings)
        run_plan = resolve(cfg, backbones.describe("wan2_2", source), 1, here=False)
        tables, point = ([sample_of(name) for name in names], [sample_of("held out")]), SimpleNamespace(base={})
        samples, held_out = add_base_motion(run_plan, job, store, [], point, generate, *tables)
        assert [float(store.get(sample.base_latents)["latents"]) for sample in samples] == latents
        assert held_out[0].base_latents is None
    assert generated == [("a", 0), ("a", 0), ("b", 0)]
