"""Updates of two gloo processes that share each clip's tokens, against those of one process.

diffusers' enable_parallelism is made to believe in a GPU. The model is the tiny world's with its 192 channels in two
attention heads instead of three, which two processes can share.
"""

import json
import shutil

import pytest
import torch
from conftest import ROOT, run_python
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from runs import CACHE, CONFIG, FAST, WORLD, call, launch_environment, launcher, metrics, table

from rewardfl.config.schema import SPLIT_ATTENTION

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow(100)]

SPLIT = "train.context_parallel=2"
COMMON = [
    "train_reward_fl.py", "--config", CONFIG, *FAST, "train.max_steps=1", "train.warmup_steps=0", "run.save_steps=1",
    "anchor.weight=0.5", "anchor.measured_clips=3", "run.sample_videos=3",
    f"data.file_name={table(f'{CACHE}/four.csv', 'train', 4)}",
]  # fmt: skip
# the reward's gradient and the KL's go through both experts' steps, of which one or two are trained
BOTH = [
    "model.trainable_models=dit,dit2", "sample.mid_timestep=1", "sample.final_timestep=2", "reward.kl_gradient=exact",
    "train.memory.use_gradient_checkpointing=false",
]  # fmt: skip
SWAPPED = [
    "model.trainable_models=dit", "sample.mid_timestep=1", "sample.final_timestep=3", "train.memory.trained=cpu_swap",
    "train.memory.untrained=cpu_swap", "train.memory.use_gradient_checkpointing=true",
    "train.memory.use_gradient_checkpointing_offload=true", "reward.kl_gradient=fixed_trajectory",
]  # fmt: skip
RUNS = {"both": BOTH, "swapped": SWAPPED}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_heads") / "pipeline"
    shutil.copytree(WORLD / "pipeline", folder)
    for part in ("transformer", "transformer_2"):
        file = folder / part / "config.json"
        config = json.loads(file.read_text()) | {"num_attention_heads": 2, "attention_head_dim": 96}
        file.write_text(json.dumps(config))
    return folder


def updates(out, pipeline, processes, *overrides):
    """Run all RUNS in `processes` processes; return, of each, rank 0's gradients and the first line of metrics."""
    watcher = [str(ROOT / "tests" / "support" / "distributed_worker.py"), str(out)]
    for name, settings in RUNS.items():
        places = [f"model.model_paths={pipeline}", f"run.output_dir={out / name}"]
        watcher += ["--", *COMMON, *settings, *overrides, *places]
    launcher_name = "cpu" if processes == 1 else "ddp"
    command = launcher(launcher_name, *watcher, options=("--num_processes", str(processes)))
    (folder := out / "gradients").mkdir(parents=True)
    settings = {"SPLIT_ON_CPU": "true", "GRADIENTS": str(folder), "NOBODY_ON": "3", "BREAK_GRADIENT": "-1:0"}
    done = run_python(command, cwd=ROOT, env=launch_environment(launcher_name, **settings), timeout=800)
    assert len(list(out.glob("rank-*.json"))) == processes, done.stdout[-2000:] + done.stderr[-4000:]
    accounts = json.loads((out / "rank-0.json").read_text())
    assert [account["code"] for account in accounts] == [0] * len(RUNS), done.stdout[-2000:] + done.stderr[-4000:]
    assert {account["processes"] for account in accounts} == {processes}
    return {name: (torch.load(folder / f"{i}.pt"), metrics(out / name)[0]) for i, name in enumerate(RUNS)}


def assert_same_updates(actual, right):
    for name, (gradients, line) in actual.items():
        largest = max(gradient.abs().max() for gradient in right[name][0])
        assert largest > 0
        apart = [float((a - b).abs().max() / largest) for a, b in zip(gradients, right[name][0], strict=True)]
        assert max(apart) < 1e-5, (name, max(apart))  # float32: tests/integration/test_accelerate.py has 1e-9
        measured = {key: value for key, value in right[name][1].items() if value is not None}
        assert line == {**right[name][1], **{key: pytest.approx(value, rel=1e-5) for key, value in measured.items()}}


def test_two_processes_of_one_clip_make_the_update_of_one(pipeline, tmp_path):
    single = updates(tmp_path / "one", pipeline, 1, "train.gradient_accumulation_steps=2")
    shared = updates(tmp_path / "two", pipeline, 2, "train.gradient_accumulation_steps=2", SPLIT)
    assert_same_updates(shared, single)
    assert len(list((tmp_path / "two" / "both" / "samples" / "step-000001").iterdir())) == 3


@pytest.mark.nightly
def test_two_clips_of_two_processes_each(pipeline, tmp_path):
    single = updates(tmp_path / "one", pipeline, 1, "train.gradient_accumulation_steps=2")
    assert_same_updates(updates(tmp_path / "four", pipeline, 4, SPLIT), single)


def test_diffusers_has_these_backends_in_parallel():
    assert set(SPLIT_ATTENTION) <= _AttentionBackendRegistry._supports_context_parallel


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([], "train.context_parallel 2 does not divide the 3 attention heads"),
        (["train.context_parallel=3", "data.num_frames=7"], "train.context_parallel 3 does not divide the 64 tokens"),
    ],
)
def test_an_uneven_share_is_refused(monkeypatch, capsys, tmp_path, overrides, message):
    settings = [*COMMON[3:], SPLIT, *overrides, f"run.output_dir={tmp_path}", "--dry-run"]
    code, _, error = call(monkeypatch, capsys, *settings)
    assert code == 2 and message in error
