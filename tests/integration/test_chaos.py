"""Runs that are killed at random moments, told to stop, or meet a full disk: nothing is lost or left behind.

CHAOS_KILLS=10 kills each script ten times (`make chaos`).
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from random import Random
from unittest import mock

import pytest
import torch
from conftest import ROOT
from runs import (
    FAST,
    GRPO_FAST,
    HELD_OUT,
    WORLD,
    assert_same_run,
    call,
    call_grpo,
    command,
    environment,
    free_port,
    launch,
    launch_forward,
    launch_grpo,
    metrics,
    table,
)

from rewardfl import data
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.rewards import async_scoring
from rewardfl.training import checkpoint, logger
from rewardfl.training.distributed import Distributed
from rewardfl.training.run_folder import RunFolder

KILLS = int(os.environ.get("CHAOS_KILLS", "0"))
pytestmark = [pytest.mark.timeout(1800 if KILLS else 600), pytest.mark.slow(230)]
LAST = 10 + 2 * KILLS  # a life lasts for two steps or so
STEPS = [f"train.max_steps={LAST}", "run.save_steps=2", "run.keep_last=2"]
INNER = 2 if KILLS else 1
EPOCH = 2 * INNER  # updates
GRPO_LAST = EPOCH * (2 + KILLS)  # or for an epoch
EPOCHS = [  # several updates, and an evaluation after each epoch
    f"train.max_steps={GRPO_LAST}", f"run.save_steps={EPOCH}", "grpo.updates_per_epoch=2", f"grpo.inner_epochs={INNER}",
    "run.sample_videos=0", HELD_OUT, f"evaluation.eval_steps={EPOCH}", "evaluation.eval_inference_steps=1",
]  # fmt: skip


def strays(run):
    return [path for path in run.rglob("*") if ".tmp-" in path.name]


def assert_same(run, straight, step):
    """Metrics, adapter and links of a run to the last bit, and no more files than it should have."""
    assert_same_run(run, straight, step)
    for name in ("latest", "best"):
        assert (run / "checkpoints" / name).resolve().name == (straight / "checkpoints" / name).resolve().name
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in straight.iterdir())
    assert not strays(run)


def lines(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def started(arguments):
    """A process that does not outlive the block."""
    command = [sys.executable, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_lines(process, run, count):
    while process.poll() is None and lines(run) < count:
        time.sleep(0.005)


def killed(arguments, run, dice):
    """Start, and kill at a random moment: while it starts, or within half a second of one of its next two lines.

    Whether it was killed: it may have been done before.
    """
    count = lines(run)
    with started(arguments) as process:
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0, 8))
        else:
            wait_for_lines(process, run, count + dice.choice([1, 1, 2]))
            time.sleep(dice.uniform(0, 0.5))
        process.kill()
        output = process.communicate()[0]
    assert process.returncode in (-9, 0), output[-3000:]
    return process.returncode == -9


@pytest.fixture(scope="module")
def straight_grpo(tmp_path_factory):
    run = tmp_path_factory.mktemp("straight_grpo") / "run"
    launch_grpo(f"run.output_dir={run}", *EPOCHS)
    return run


OLD_POLICY = ["forward.objective=nft", "forward.old_policy.rate=0.1", *(s.replace("grpo.", "forward.") for s in EPOCHS)]
SCRIPTS = {
    "train_reward_fl.py": (launch, STEPS, LAST), "train_flow_grpo.py": (launch_grpo, EPOCHS, GRPO_LAST),
    "train_forward_rl.py": (launch_forward, OLD_POLICY, GRPO_LAST),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_killed_run_resumes(script, tmp_path):
    """SIGKILL after the first checkpoint, then at random moments, resumed each time."""
    (start, settings, last), run, straight, dice = SCRIPTS[script], tmp_path / "run", tmp_path / "straight", Random(8)
    start(f"run.output_dir={straight}", *settings)
    arguments = command(script, f"run.output_dir={run}", *settings)
    with started(arguments) as process:
        wait_for_lines(process, run, EPOCH + 2)  # past the first save
    assert (run / "checkpoints" / "latest").exists()
    assert sum(killed(arguments, run, dice) for _ in range(KILLS)) >= 0.5 * KILLS
    start(f"run.output_dir={run}", *settings)
    assert_same(run, straight, last)


# -- in this process, where the moment can be chosen


def send_sigterm(monkeypatch, owner, name, when):
    """This process is sent SIGTERM in the call of owner.name that `when` is true of."""
    function = getattr(owner, name)

    def telling(*arguments, **settings):
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # until the thread has seen it
        return function(*arguments, **settings)

    monkeypatch.setattr(owner, name, telling)


def test_sigterm_in_the_updates_finishes_the_epoch(straight_grpo, monkeypatch, capsys, tmp_path):
    """And the same command goes on to what an uninterrupted run would have been."""
    settings = [*GRPO_FAST, f"run.output_dir={tmp_path}", *EPOCHS, "run.save_steps=100"]
    send_sigterm(monkeypatch, logger.MetricsFile, "append", lambda _self, step, _values: step == EPOCH - 1)
    code, out, _ = call_grpo(monkeypatch, capsys, *settings)
    assert code == 143 and f"SIGTERM: stopped after step {EPOCH}; the same command resumes it" in out
    assert metrics(tmp_path) == metrics(straight_grpo)[: EPOCH + 1]
    assert checkpoint.find_checkpoint(tmp_path, "auto").name == f"step-{EPOCH:06d}"
    monkeypatch.undo()
    logger.MetricsFile(tmp_path / "metrics.jsonl").append(EPOCH + 1, {"actor/loss": 123.0})  # begun, and killed
    code, out, _ = call_grpo(monkeypatch, capsys, *settings)
    assert code == 0 and f"step-{EPOCH:06d} at step {EPOCH}" in out
    assert_same(tmp_path, straight_grpo, GRPO_LAST)


def test_sigterm_in_the_rollouts_saves_the_epoch_before(monkeypatch, capsys, tmp_path):
    settings = [*GRPO_FAST, f"run.output_dir={tmp_path}", "train.max_steps=2", "run.save_steps=100"]
    calls = []
    # two passes an epoch: the third call is the first of the second epoch
    send_sigterm(monkeypatch, async_scoring, "submit", lambda *_: calls.append(1) or len(calls) == 3)
    code, out, _ = call_grpo(monkeypatch, capsys, *settings)
    assert code == 143 and "stopped after step 1" in out and len(calls) == 3
    assert not (tmp_path / "samples").exists()
    assert checkpoint.find_checkpoint(tmp_path, "auto").name == "step-000001" and len(metrics(tmp_path)) == 1


NOISY = """
import random, numpy, torch
from examples.toys import Colour

class Noisy(Colour):
    def forward(self, video, references):
        video = video + 0.1 * torch.randn_like(video) + random.random() * numpy.random.rand()
        return super().forward(video, references)
"""


def test_a_resumed_reward_draws_the_same_numbers(monkeypatch, capsys, tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    settings = [
        *FAST, "run.sample_videos=0", "run.save_steps=1",
        "--trust-code", f"reward.terms.score.name={tmp_path / 'noisy.py'}:Noisy", "reward.reward_model_path=null",
        "reward.held_out_model_path=null", "train.max_steps=2", f"run.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert call(monkeypatch, capsys, *settings)[0] == 0
    straight = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    assert "at step 1" in call(monkeypatch, capsys, *settings)[1]
    assert metrics(tmp_path / "run") == straight


# -- faults


def test_a_full_disk_costs_one_checkpoint(monkeypatch, capsys, tmp_path):
    """The first checkpoint and the second sample video cannot be written."""
    settings = [*FAST, f"run.output_dir={tmp_path}", "train.max_steps=2", "run.save_steps=1"]
    full = OSError(errno.ENOSPC, "No space left on device")
    failing = mock.Mock(side_effect=[full, *[mock.DEFAULT] * 9], wraps=checkpoint._save_state)
    monkeypatch.setattr(checkpoint, "_save_state", failing)
    failing = mock.Mock(side_effect=[mock.DEFAULT, full, *[mock.DEFAULT] * 9], wraps=data.write_video)
    monkeypatch.setattr(data, "write_video", failing)
    code, out, _ = call(monkeypatch, capsys, *settings)
    assert code == 0 and len(metrics(tmp_path)) == 2
    assert "warning: step 1: " in out and "step-000001 could not be written (No space left on device)" in out
    assert "warning: step 2: " in out and "00.mp4 could not be written (No space left on device); training" in out
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best", "latest", "step-000002"]
    assert not strays(tmp_path)


def loses_images(monkeypatch, tmp_path, count, fast=FAST):
    """Settings for a run in tmp_path on two clips; `count` of them cannot be read from the cache after a step."""
    append, cache = logger.MetricsFile.append, tmp_path / "cache"

    def losing(self, step, values):
        append(self, step, values)
        for path in sorted((cache / "image").rglob("*.safetensors"))[:count]:
            path.write_bytes(b"\0" * 100)

    monkeypatch.setattr(logger.MetricsFile, "append", losing)
    clips = table(tmp_path / "metadata.csv", "train", 2)
    places = [f"run.output_dir={tmp_path}", f"data.cache_dir={cache}", f"data.file_name={clips}"]
    return [*fast, *places, "run.sample_videos=2", "run.save_steps=1"]


def test_a_lost_cache_entry_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    settings = [*loses_images(monkeypatch, tmp_path, 2), "train.max_steps=2"]
    code, _, error = call(monkeypatch, capsys, *settings)
    assert code == 2 and "was prepared and is missing or damaged" in error
    assert "start the same command again" in error
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.jsonl").unlink()
    code, _, error = call(monkeypatch, capsys, *settings, "data.skip_bad_rows=true")
    assert code == 2 and re.search("no clip of the size of .*.mp4#.* can be read from the cache any more", error)
    monkeypatch.undo()
    code, out, _ = call(monkeypatch, capsys, *settings)
    assert code == 0 and "at step 1" in out and len(metrics(tmp_path)) == 2


def test_another_clip_stands_in_for_a_lost_one(monkeypatch, capsys, tmp_path):
    settings = [*loses_images(monkeypatch, tmp_path, 1), "train.max_steps=3", "data.skip_bad_rows=true"]
    code, out, error = call(monkeypatch, capsys, *settings, "train.per_device_train_batch_size=2")
    assert code == 0 and len(re.findall("skipped: .*[01].mp4#.*: .* is missing or damaged", out + error)) >= 2
    assert [line["data/replaced"] for line in metrics(tmp_path)] == [0, 1, 1]
    assert all(line["reward/valid_fraction"] == 1 and line["grad_norm"] > 0 for line in metrics(tmp_path))
    clips = [data.read_video(tmp_path / "samples" / "step-000003" / name) for name in ("00.mp4", "01.mp4")]
    assert torch.equal(*clips)  # both show the remaining clip


@pytest.mark.long
def test_members_of_a_lost_clip_leave_their_group(monkeypatch, capsys, tmp_path):
    """The groups have different clips: the remaining one is trained on."""
    settings = [*loses_images(monkeypatch, tmp_path, 1, GRPO_FAST), "train.max_steps=2", "data.skip_bad_rows=true"]
    code, out, _ = call_grpo(monkeypatch, capsys, *settings)
    lines = metrics(tmp_path)
    assert code == 0 and [line["data/replaced"] for line in lines] == [0, 2]
    assert [line["reward/valid_fraction"] for line in lines] == [1, 0.5] and lines[1]["grad_norm"] > 0


def test_the_samples_of_a_gradient_that_is_not_finite_are_named(monkeypatch, capsys, tmp_path):
    """The second step's second clip comes back from the decoder with one; the third's appear in the backward pass."""
    pull_back, backward, batch_of = WanDecoder.vjp, Distributed.backward, data.one_shape_batch
    calls, batches = [], []

    def broken(decoder, x0, grad_video, decoded, conditioning):
        calls.append(1)
        gradient = pull_back(decoder, x0, grad_video, decoded, conditioning)
        if len(calls) == 2:
            gradient[1, 0, 0, 0, 0] = torch.inf
        return gradient

    monkeypatch.setattr(WanDecoder, "vjp", broken)
    monkeypatch.setattr(
        Distributed, "backward", lambda job, loss: backward(job, loss * torch.nan if len(calls) == 3 else loss)
    )
    monkeypatch.setattr(data, "one_shape_batch", lambda *a: batches.append(batch_of(*a)) or batches[-1])
    code, out, _ = call(
        monkeypatch, capsys, *FAST, f"run.output_dir={tmp_path}", "train.max_steps=4", "run.sample_videos=0",
        "train.per_device_train_batch_size=2",
    )  # fmt: skip
    assert code == 0 and [line["grad_norm"] is None for line in metrics(tmp_path)] == [False, True, True, False]
    ids = [line.split(",")[0] for line in (WORLD / "train" / "metadata.csv").read_text().splitlines()[1:]]
    (_, bad), (third, fourth) = ([ids[row].split("/")[-1] for _, row in batch] for batch in batches[1:3])
    skips = re.findall(r"step (.): gradient norm (?:nan|inf), skipped \((.) in a row\); it became so (.*)", out)
    assert [line[:2] for line in skips] == [("2", "1"), ("3", "2")]
    assert re.fullmatch(f"before the backward pass, of [^,]*{bad}#[^,]*", skips[0][2])
    assert re.fullmatch(f"in the backward pass of [^,]*{third}#[^,]*, [^,]*{fourth}#[^,]*", skips[1][2])


# -- two starts on one folder


def test_a_folder_in_use_is_refused_by_both_processes(tmp_path):
    """Only the first process looks at the folder; the other ends with it, and does not wait in a collective.

    Started without a launcher, which would end the other one itself.
    """
    both = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [sys.executable, *command("train_reward_fl.py", f"run.output_dir={tmp_path}")]
    with RunFolder() as run_folder:
        run_folder.take(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        environments = [both | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
        streams = {"stderr": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen(arguments, cwd=ROOT, env=env, **streams) for env in environments]
        for process in ranks:
            _, error = process.communicate(timeout=240)
            assert process.returncode == 2 and "Traceback" not in error, error[-3000:]
            assert f"run.output_dir {tmp_path} is in use by another process" in error
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# -- two processes, of which one is hit


def hit(tmp_path, how, *settings):
    """(the finished job, time.time() of the hit): rank 1 does `how` in its third call of the reward."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.replace("HIT", how))
    run = launch(
        f"run.output_dir={tmp_path / 'run'}", f"reward.terms.score.name={reward}:Hit", "--trust-code",
        "train.max_steps=100",
        "reward.reward_model_path=null", "reward.held_out_model_path=null", *settings, processes=2, check=False,
    )  # fmt: skip
    return run, float((tmp_path / "hit").read_text())


REWARD = """
import os, pathlib, signal, time
from examples.toys import Colour

class Hit(Colour):
    calls = 0

    def forward(self, *arguments, **settings):
        Hit.calls += 1
        if os.environ.get("RANK") == "1" and Hit.calls == 3:
            (pathlib.Path(__file__).parent / "hit").write_text(str(time.time()))
            HIT
        return super().forward(*arguments, **settings)
"""


@pytest.mark.long
def test_a_rank_that_raises_brings_the_job_down(tmp_path):
    """With its message, before torchrun would kill the others (30 s)."""
    run, when = hit(tmp_path, "raise RuntimeError('the reward of rank 1 is broken')")
    assert run.returncode != 0 and "the reward of rank 1 is broken" in run.stderr
    assert time.time() - when < 25


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    run, _ = hit(tmp_path, "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)")
    assert "SIGTERM: stopped after step" in run.stdout and run.returncode != 0
    last = metrics(tmp_path / "run")[-1]["step"]
    assert last < 10 and checkpoint.find_checkpoint(tmp_path / "run", "auto").name == f"step-{last:06d}"
    exits = run.stderr.count("exitcode  : 143") + run.stderr.count("exitcode: 143")
    # torch's launcher may want to kill a process that has just gone, and fails then before it reports
    assert exits >= 1 or "ProcessLookupError" in run.stderr
