"""Where experts, caches and activations live, and what a warm cache saves, on whole runs."""

import shutil
from dataclasses import replace

import pytest
import torch
from lora_dialects import read_adapter
from runs import FAST, GRPO_FAST, assert_same_run, call, call_grpo, launch

from rewardfl import data, lora
from rewardfl.backbones.protocol import Schedule
from rewardfl.backbones.wan import load as wan_load
from rewardfl.data import cache
from rewardfl.data.cache import Cache
from rewardfl.rewards import Reward
from rewardfl.training import clip_scan
from rewardfl.training.conditions import Conditions
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Shard

pytestmark = pytest.mark.slow(70)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run with two noises per clip, everything on the device."""
    run = tmp_path_factory.mktemp("plain") / "run"
    launch(f"run.output_dir={run}", f"data.cache_dir={run}/cache", *TWO_NOISES)
    return run


TWO_NOISES = ["train.max_steps=2", "sample.noises_per_sample=2", "train.memory.use_gradient_checkpointing=false"]
HOST = [
    "train.memory.untrained=cpu_swap", "train.memory.trained=cpu_swap", "train.memory.decode_caches=offload",
    "train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=true",
]  # fmt: skip
KEPT = [*HOST, "train.memory.active_graphs=keep_on_host"]
BOUNDARY = ["train.memory.untrained=boundary_cache", "train.memory.decode_caches=segment"]


def assert_same(run, plain):
    assert_same_run(run, plain, 2)
    name = "samples/step-000002/00.mp4"
    assert (data.read_video(run / name).int() - data.read_video(plain / name).int()).abs().max() <= 1


@pytest.mark.parametrize("settings", [HOST, pytest.param(KEPT, marks=pytest.mark.long)], ids=["replay", "graphs kept"])
def test_what_waits_in_host_memory_changes_nothing(plain, tmp_path, settings):
    launch(*TWO_NOISES, *settings, f"data.cache_dir={plain / 'cache'}", f"run.output_dir={tmp_path}")
    assert_same(tmp_path, plain)


def test_an_untrained_expert_in_8_bits(tmp_path, monkeypatch, capsys):
    settings = ["train.memory.untrained=fp8", f"run.output_dir={tmp_path}", "train.max_steps=1"]
    code, _, error = call_grpo(monkeypatch, capsys, *GRPO_FAST, *settings)
    assert code == 0, error


def test_both_experts_train(tmp_path):
    """Steps on both sides of the boundary: each expert's adapter learns and is saved in its own folder."""
    settings = ["model.trainable_models=dit,dit2", "sample.mid_timestep=1", "train.max_steps=1"]
    launch(f"run.output_dir={tmp_path / 'run'}", *settings)
    states = [
        read_adapter(tmp_path / "run/checkpoints/latest" / part / lora.WEIGHTS_NAME)
        for part in ("transformer", "transformer_2")
    ]
    for state in states:
        assert max(value.abs().max() for name, value in state.items() if "lora_B" in name) > 0
    # an update of 1e-3 from matrices of their own: the same start would leave them at most 2e-3 apart
    shared = [name for name in states[0].keys() & states[1].keys() if "lora_A" in name]
    assert shared and all((states[0][name] - states[1][name]).abs().max() > 0.05 for name in shared)


def only_the_first(read):
    def first(row, *arguments, **settings):
        assert row.index == 0
        return read(row, *arguments, **settings)

    return first


def test_a_warm_cache_loads_the_decoder_and_the_trained_expert_alone(plain, tmp_path, monkeypatch, capsys):
    """And boundary latents from it, or caches of the decoder made anew, change nothing."""
    cache = shutil.copytree(plain / "cache", tmp_path / "cache")
    loaded, load = [], wan_load.load_pipeline
    monkeypatch.setattr(wan_load, "load_pipeline", lambda *a: loaded.append(a[-1]) or load(*a))
    monkeypatch.setattr(data, "load_example", only_the_first(data.load_example))  # to compare faces, and to be shown

    def run(name):
        loaded.clear()
        arguments = [*FAST, *TWO_NOISES, *BOUNDARY, f"data.cache_dir={cache}", f"run.output_dir={tmp_path / name}"]
        assert call(monkeypatch, capsys, *arguments)[0] == 0
        assert_same(tmp_path / name, plain)
        return [part for parts in loaded for part in parts]

    entry = next((cache / "text").rglob("*.safetensors"))
    entry.write_bytes(entry.read_bytes()[:-1])  # a damaged entry is made anew
    assert run("first") == ["text_encoder", "high_noise", "vae_decoder", "low_noise"]
    assert run("warm") == ["vae_decoder", "low_noise"]


def schedule_to(sigmas):
    """A schedule whose first expert hands over at the last of these."""
    sigmas = torch.cat([sigmas, torch.zeros(1)])
    return Schedule(sigmas, 1000 * sigmas[:-1], ("first",) * (len(sigmas) - 2) + ("second",))


def test_whatever_an_entry_depends_on_makes_it_another(tmp_path):
    for name in ("a.mp4", "b.mp4", "a.png"):
        (tmp_path / name).write_text(name)
    row = data.Row(index=0, line=2, id="id", video=tmp_path / "a.mp4", prompt="a person")
    size = {"height": 64, "width": 64, "num_frames": 9, "max_pixels": None, "fps": None}
    sigmas = torch.tensor([1.0, 0.95, 0.9])

    class Judge(Reward):
        name, differentiable = "judge", True

    judge, other_judge, reader = Judge(), Judge(), Judge()
    other_judge.name = "other"
    reader.uses_prompt = True

    def hashes(row):
        return clip_scan.hash_files([row], Shard(0, 1, quiet=True), list)

    def digests(
        row=row, size=size, text="t", image="v", untrained="h", dtype="float32", seed=1, sigmas=sigmas, by=judge
    ):  # fmt: skip
        clip = clip_scan.clip_key(row, hashes(row), size)
        sample = Sample(row=row, clip=clip, size=(64, 64), references=())
        conditions = Conditions(
            store=Cache(tmp_path), backbone=None, text=text, image=image, untrained=untrained, dtype=dtype, num_frames=9
        )
        return {
            "clip": cache.digest(clip),
            "face": cache.digest(clip_scan.reference_key(clip, by, row.prompt)),
            "text": cache.digest(conditions._text_key(sample.row.prompt)),
            "image": cache.digest(conditions._image_key(sample)),
            "boundary": cache.digest(conditions._boundary_key(sample, seed, schedule_to(sigmas))),
        }

    before = digests()
    assert digests() == before
    everything = set(before)
    for changed, other in [
        (digests(row=replace(row, prompt="a child")), {"text", "boundary"}),
        (digests(row=replace(row, video=tmp_path / "b.mp4")), everything - {"text"}),
        (digests(row=replace(row, image=tmp_path / "a.png")), everything - {"text"}),
        (digests(row=replace(row, reference_video=tmp_path / "b.mp4")), everything - {"text"}),
        (digests(row=replace(row, index=5, line=7, id="elsewhere")), set()),
        *((digests(size=size | {key: 32}), everything - {"text"}) for key in size),
        (digests(text="u"), {"text", "boundary"}),
        (digests(image="w"), {"image", "boundary"}),
        (digests(untrained="i"), {"boundary"}),
        (digests(dtype="bfloat16"), {"text", "image", "boundary"}),
        (digests(seed=2), {"boundary"}),
        (digests(sigmas=sigmas[:2]), {"boundary"}),
        (digests(by=other_judge), {"face"}),
    ]:
        assert {kind for kind in before if changed[kind] != before[kind]} == other
    asked = digests(by=reader)
    changed = digests(by=reader, row=replace(row, prompt="a child"))
    assert {kind for kind in asked if changed[kind] != asked[kind]} == {"face", "text", "boundary"}
    # a cache keeps its entries from version to version: this changes with data.cache.FORMAT alone
    pictured = replace(row, image=tmp_path / "a.png")
    assert digests(row=pictured)["clip"] == "8a879804e7d9dd84e8abef3b808ee383"
