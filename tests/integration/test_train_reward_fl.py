"""train_reward_fl.py and the tools as a user runs them, on the embedded tiny world."""

import csv
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline
from PIL import Image
from pipelines import LinearFlowEuler, latent_shape
from runs import CACHE, FAST, PACKS, RED, WORLD, adapter, assert_same_run, call, equal_tensors, launch, metrics, watch

from rewardfl import data, lora, reward_flow, verdict
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.data.clips import read_video_header
from rewardfl.evaluation import generation
from rewardfl.noise import draw_noise
from rewardfl.training import checkpoint, verdicts
from rewardfl.training.distributed import Distributed
from rewardfl_tools import generate

pytestmark = pytest.mark.slow(220)

# -- runs


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of six steps that nothing interrupts."""
    run = tmp_path_factory.mktemp("straight") / "run"
    launch(f"run.output_dir={run}", "train.max_steps=6", "run.save_steps=3")
    return run


def test_a_run_leaves_what_the_design_says(straight):
    lines = metrics(straight)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    keys = {
        "actor/loss", "actor/face_score", "actor/kl_loss", "reward/mean", "reward/coverage", "reward/motion",
        "reward/held_out", "reward/valid_fraction", "grad_norm", "grad_norm/step_2", "grad_norm/step_3", "lr",
        *(f"reward/held_out/{part}" for part in ("flow", "face_flow", "pixel_change", "sharpness", "reversals")),
        *(f"reward/held_out/{part}" for part in ("grid", "saturation", "red", "green", "blue")),
    }  # fmt: skip
    assert keys <= lines[0].keys()
    assert lines[0]["actor/kl_loss"] == 0 and lines[-1]["actor/kl_loss"] > 0  # B starts at zero
    assert all(line["reward/valid_fraction"] == 1 and line["grad_norm"] > 0 for line in lines)
    assert [line["lr"] for line in lines[:4]] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])  # warmup is applied
    assert (straight / "checkpoints" / "latest").resolve().name == "step-000006"
    record = json.loads((straight / "run.json").read_text())
    assert record["config"]["lora"]["lora_rank"] == 4 and torch.__version__.startswith(record["versions"]["torch"])
    assert record["face_packs"].keys() == {f"reward.{name}" for name in PACKS}
    clip = data.read_video(straight / "samples" / "step-000006" / "00.mp4")
    assert clip.shape == (5, 32, 64, 3)  # real | generated


def test_it_learns(clips, tmp_path):
    """Two people with one noise each: three updates must raise their own score, by the judge too."""
    path, rows = clips
    write(path, rows[:3])
    launch(
        f"run.output_dir={tmp_path / 'run'}", f"data.file_name={path}", "sample.noises_per_sample=1",
        "train.max_steps=6", "train.per_device_train_batch_size=2", "train.warmup_steps=0", "reward.kl_weight=0",
        "train.learning_rate=3e-3",
    )  # fmt: skip
    lines = metrics(tmp_path / "run")
    for key, gain in {"actor/face_score": 0.05, "reward/held_out": 0.02}.items():
        assert lines[-1][key] > lines[0][key] + gain


def test_clips_of_several_shapes_and_all_columns(clips, tmp_path):
    """Two clips are 64 x 80, one is 64 x 64 and at twice the rate; batches of two of one shape."""
    path, rows = clips
    for video, _ in rows[2:]:
        frames = data.read_video(tmp_path / video)
        wide = torch.nn.functional.pad(frames, (0, 0, 8, 8), mode="constant", value=90)
        data.write_video(tmp_path / video, wide, 8)
    data.write_video(tmp_path / rows[1][0], data.read_video(tmp_path / rows[1][0]), 16)
    Image.fromarray(data.read_video(tmp_path / rows[1][0], 1)[0].numpy()).save(tmp_path / "face.png")
    write(path, [
        [*rows[0], "image", "reference_video", "negative_prompt"], [*rows[1], "", "", "ugly"],
        [*rows[2], "face.png", "", ""], [*rows[3], "", rows[1][0], ""],
    ])  # fmt: skip
    settings = [
        f"run.output_dir={tmp_path / 'run'}", f"data.file_name={path}", "data.max_pixels=5120", "data.fps=8",
        "data.num_frames=5", "train.max_steps=2", "run.sample_videos=2", "sample.gradient_mode=last",
        "reward.kl_weight=0", "sample.mid_timestep=4",
    ]  # fmt: skip
    run = launch(*settings, "train.per_device_train_batch_size=2")
    assert len(re.findall(r"note: data.file_name \(.*\): 1 of 3 rows have a negative_prompt", run.stdout)) == 1
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2 and all(line["grad_norm"] > 0 and line["reward/valid_fraction"] == 1 for line in lines)
    outputs = tmp_path / "run" / "samples" / "step-000002"
    assert data.read_video(outputs / "00.mp4").shape == (5, 64, 128, 3)  # real | generated
    assert data.read_video(outputs / "01.mp4").shape == (5, 64, 160, 3)
    assert read_video_header(outputs / "00.mp4", 5).rate == 8
    other = ["train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=2", "train.max_steps=3"]
    refused = launch(*settings, *other, check=False)
    assert refused.returncode == 2 and "trained on 2 clips of one size per forward pass" in refused.stderr


# -- going on


def cut(straight, run, step):
    """A copy of a run as if it had been killed after the checkpoint of `step`."""
    shutil.copytree(straight, run, symlinks=True)
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return run


def test_what_computes_the_same_may_change(straight, tmp_path):
    """Memory for time, other places, other paths to the same content: the rest of the run is the same, bit for bit."""
    run = cut(straight, tmp_path / "run", 3)
    for name, target in {"world": WORLD, "model": WORLD / "pipeline", "cache": CACHE, "packs": WORLD / "faces"}.items():
        (tmp_path / name).symlink_to(target)
    shutil.copy(f"{CACHE}/metadata.csv", tmp_path / "other.csv")
    launch(
        f"run.output_dir={run}", "train.max_steps=6", "run.save_steps=2", "train.memory.decode_caches=segment",
        "train.memory.kept_chunks=2", "train.memory.use_gradient_checkpointing=true",
        "train.memory.use_gradient_checkpointing_offload=true",
        "train.memory.untrained=cpu_swap", "lora.lora_base_model=dit2",
        "data.skip_bad_rows=true", f"data.cache_dir={tmp_path / 'cache'}", f"data.file_name={tmp_path / 'other.csv'}",
        f"model.model_paths={tmp_path / 'model'}", f"model.tokenizer_path={WORLD}/pipeline/tokenizer",
        f"reward.reward_model_path={tmp_path}/packs/reward", f"reward.held_out_model_path={tmp_path}/packs/judge",
    )  # fmt: skip
    assert_same_run(run, straight, 6)
    assert json.loads((run / "run.json").read_text())["changes"] == []


def test_other_content_is_refused(monkeypatch, capsys, clips, tmp_path):
    """Of the clips, by name and in order, and of the face packs; before weights load, and nothing is changed."""
    path, rows = clips
    write(path, rows)
    settings = [*FAST, f"run.output_dir={tmp_path / 'run'}", f"data.file_name={path}", "run.sample_videos=0"]
    assert call(monkeypatch, capsys, *settings, "train.max_steps=1")[0] == 0
    refuse_weights(monkeypatch)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()

    def refusal(*overrides):
        code, _, error = call(monkeypatch, capsys, *settings, "train.max_steps=2", *overrides)
        assert code == 2 and (tmp_path / "run" / "metrics.jsonl").read_text() == before
        return error

    write(path, [rows[0], rows[2], rows[1], rows[3]])
    assert "something else in data.file_name: in another order" in refusal()
    write(path, rows[:3])
    assert f"something else in data.file_name: 1 gone, new or of other content ({rows[3][0]}#" in refusal()
    write(path, rows)
    assert "trained on 1 clips per update" in refusal("train.gradient_accumulation_steps=3")
    error = refusal(f"reward.reward_model_path={WORLD}/faces/judge", "reward.held_out_model_path=null")
    assert "something else in reward.held_out_model_path: 2 gone, new or of other content (" in error


# breaks at any loss of motion, or any more grid: what one clip after another does
TOUCHY = "train.early_stop={window: 2, patience: 1, motion: 1, grid: 1}"


def test_a_run_that_its_judge_ends_is_finished(straight, monkeypatch, capsys, tmp_path):
    """It leaves what a run of as many steps leaves, resumed or not; another rule lets it go on as if nothing was."""
    settings = [*FAST, "run.save_steps=3", "run.sample_videos=0", "train.max_steps=6"]
    runs = {tmp_path / "run": "no checkpoint became", cut(straight, tmp_path / "resumed", 3): ""}
    for run, best in runs.items():  # by this rule no checkpoint becomes best, but one was before it was set
        code, out, _ = call(monkeypatch, capsys, *settings, f"run.output_dir={run}", TOUCHY)
        assert code == 0 and "stopped at step 4: train.early_stop: " in out
        assert (f"{best} {run}/checkpoints/best;" if best else f"{run}/checkpoints/best is step-000003;") in out
        assert metrics(run) == metrics(straight)[:4]
    assert equal_tensors(adapter(tmp_path / "run", 4), adapter(tmp_path / "resumed", 4))
    code, out, _ = call(monkeypatch, capsys, *settings, f"run.output_dir={run}", TOUCHY)
    assert code == 0 and "nothing to train: " in out and "train.early_stop=null" in out
    assert metrics(run) == metrics(straight)[:4]
    call(monkeypatch, capsys, *settings, f"run.output_dir={run}")
    assert_same_run(run, straight, 6)


def test_endpoint_rolls_out_with_the_average(monkeypatch, capsys, tmp_path):
    """A run that was resumed has the same weights, bit for bit."""
    settings = [*FAST, "sample.gradient_mode=endpoint", "train.ema_decay=0.9", "reward.kl_weight=0"]
    settings += ["sample.mid_timestep=4", "run.save_steps=2", "run.sample_videos=0", "train.max_steps=3"]
    run, resumed, gaps = tmp_path / "run", tmp_path / "resumed", []

    def compare(_, velocity, trajectory, *others, **hooks):
        ((step, x),) = trajectory.latents.items()
        with torch.no_grad():
            gaps.append(float((velocity(x, step) - trajectory.velocities[step]).abs().max()))

    watch(monkeypatch, reward_flow, "replay_endpoint", compare)
    assert call(monkeypatch, capsys, *settings, f"run.output_dir={run}")[0] == 0
    assert gaps[0] == 0 and gaps[1] > 0 and gaps[2] > 0
    assert call(monkeypatch, capsys, *settings, f"run.output_dir={cut(run, resumed, 2)}")[0] == 0
    assert_same_run(resumed, run, 3)


def test_a_verdict_scores_every_move_and_resumes(monkeypatch, capsys, tmp_path):
    """Moves are chosen by scores without a graph of what they decode to; a resumed run is the same, bit for bit."""
    settings = [
        *FAST, *RED, "--trust-code", "sample.gradient_mode=endpoint", "train.ema_decay=0.9", "reward.kl_weight=0",
        "sample.mid_timestep=4", "sample.endpoint_length=[0.01,0.3]", "sample.verdict={tau: 0.5}",
        "sample.verdict.pareto.change=0.01",
        "reward.terms.change={name: motion, weight: 0}", "run.save_steps=3", "run.sample_videos=0", "train.max_steps=7",
        "train.per_device_train_batch_size=2",
    ]  # fmt: skip
    run, resumed, seen = tmp_path / "run", tmp_path / "resumed", []

    def look(move, verdict, batch, velocity, trajectory, shifts, scores, rises):
        assert not scores.requires_grad and scores.shape == (3, 2, 2) and rises.all()
        seen.append((move.choice, scores))

    watch(monkeypatch, verdicts.MoveJudge, "choose", look)
    code, out, error = call(monkeypatch, capsys, *settings, f"run.output_dir={run}")
    assert code == 0, error
    assert "verdict: 2 moves of each video are decoded and scored, and the video again; tau 0.5, keep 10; change" in out
    assert len(seen) == 7
    for line, (choice, scores) in zip(metrics(run), seen, strict=True):
        moved, here = choice.accepted, torch.arange(2)
        change = scores[choice.move, here] - scores[0]
        assert (change[moved][:, 0] > 0).all() and (change[:, 1] >= -0.01).all()
        assert line["verdict/accepted"] == pytest.approx(moved.double().mean().item())
        assert line["verdict/gain/score"] is None or line["verdict/gain/score"] > 0
    lines = metrics(run)
    assert any(line["verdict/accepted"] > 0 and 0 < line["verdict/realised_move"] < 2 for line in lines)
    state = checkpoint.load_state(run / "checkpoints" / "latest")["verdict"]
    assert sum(len(scores["score"]) for scores in state["scores"].values()) == 14 and state["recent"]
    assert call(monkeypatch, capsys, *settings, f"run.output_dir={cut(run, resumed, 3)}")[0] == 0
    assert_same_run(resumed, run, 7)
    assert checkpoint.load_state(resumed / "checkpoints" / "latest")["verdict"] == state


def test_an_update_without_a_move_leaves_the_weights(monkeypatch, capsys, tmp_path):
    """Adam's moments of the updates before would move them on, where no averaged policy holds them."""
    settings = [
        *FAST, *RED, "--trust-code", "sample.gradient_mode=endpoint", "reward.kl_weight=0", "sample.mid_timestep=4",
        "sample.endpoint_length=0.01", "sample.verdict={tau: 100}", "run.save_steps=1", "run.sample_videos=0",
        "train.max_steps=4",
    ]  # fmt: skip
    choose, run = verdict.choose, tmp_path / "run"

    def refuse_the_third(*arguments, **more):
        refuse_the_third.calls += 1
        choice = choose(*arguments, **more)
        return dataclasses.replace(choice, move=0 * choice.move) if refuse_the_third.calls == 3 else choice

    refuse_the_third.calls = 0
    monkeypatch.setattr(verdict, "choose", refuse_the_third)
    assert call(monkeypatch, capsys, *settings, f"run.output_dir={run}")[0] == 0
    assert [line["verdict/accepted"] for line in metrics(run)] == [1, 1, 0, 1]
    saved = [adapter(run, step) for step in (1, 2, 3, 4)]
    assert [equal_tensors(*pair) for pair in itertools.pairwise(saved)] == [False, True, False]


def test_another_learning_rate_and_weight(straight, monkeypatch, capsys, tmp_path):
    run, groups = cut(straight, tmp_path / "run", 3), []
    changes = ["train.learning_rate=5e-4", "train.weight_decay=0.5", "reward.kl_weight=3", "train.max_steps=4"]
    settings = [*FAST, f"run.output_dir={run}", "run.sample_videos=0", *changes]
    keys = ["reward.kl_weight", "train.learning_rate", "train.weight_decay"]
    code, _, error = call(monkeypatch, capsys, *settings)
    assert code == 2 and f"run.resume_with_changes=[{','.join(keys)}]" in error and metrics(run) == metrics(straight)

    def record(_, job, optimizer, *arguments):
        groups.append({key: optimizer.param_groups[0][key] for key in ("lr", "weight_decay")})

    watch(monkeypatch, Distributed, "step", record)
    code, out, _ = call(monkeypatch, capsys, *settings, f"run.resume_with_changes=[{','.join(keys)}]")
    assert code == 0 and "changed at step 3: train.learning_rate 0.001 -> 0.0005" in out
    assert [line["lr"] for line in metrics(run)[2:]] == [1e-3, 5e-4]
    assert groups == [{"lr": 5e-4, "weight_decay": 0.5}]


def test_a_run_starts_from_another_ones_adapter(straight, monkeypatch, capsys, tmp_path):
    """At a rate that moves nothing: the adapter is the given one, the reference is not."""
    start = straight / "checkpoints" / "latest"
    settings = [
        f"run.output_dir={tmp_path / 'run'}", f"lora.init_from={start}", "train.learning_rate=1e-12",
        "train.warmup_steps=0", "run.sample_videos=0", "train.max_steps=1",
    ]  # fmt: skip
    launch(*settings)
    (line,) = metrics(tmp_path / "run")
    assert line["actor/kl_loss"] > 0 and line["lr"] == 1e-12
    actual, expected = adapter(tmp_path / "run", 1), adapter(straight, 6)
    assert all((actual[name] - expected[name]).abs().max() < 2e-12 for name in actual | expected)
    digests = json.loads((tmp_path / "run" / "run.json").read_text())["init_from"]
    assert digests.keys() == {"low_noise"}
    # a resumed run does not read it, but it must have the same content
    refuse_weights(monkeypatch)
    other = ["train.max_steps=2", f"lora.init_from={straight / 'checkpoints' / 'step-000003'}"]
    code, _, error = call(monkeypatch, capsys, *FAST, *settings, *other)
    assert code == 2 and "something else in lora.init_from: 1 gone, new or of other content (low_noise)" in error
    file = shutil.copy(start / "transformer_2" / lora.WEIGHTS_NAME, tmp_path / "low_noise.safetensors")
    with pytest.raises(pytest.fail.Exception, match="weights were loaded"):
        call(monkeypatch, capsys, *FAST, *settings, "train.max_steps=2", f"lora.init_from={file}")


@pytest.mark.parametrize(
    "settings, message",
    [
        (["lora.lora_rank=8"], "has rank 4 and alpha 4 in blocks.0."),
        (["lora.lora_target_modules=q,k,v"], "lora.lora_target_modules"),
        (["model.trainable_models=dit,dit2", "sample.mid_timestep=0"], "is for low_noise, model.trainable_models for"),
    ],
)
def test_adapters_that_do_not_fit(straight, monkeypatch, capsys, no_weights, tmp_path, settings, message):
    settings = [f"run.output_dir={tmp_path / 'run'}", f"lora.init_from={straight}/checkpoints/latest", *settings]
    code, _, error = call(monkeypatch, capsys, "--dry-run", *FAST, *settings)
    assert code == 2 and message in error and error.count("\n") == 1


# -- the tools on the run's adapter


def test_generate_equals_stock_diffusers(straight, tmp_path, monkeypatch, capsys):
    """The adapter of the run in a stock pipeline, against tools/generate.py."""
    frame = data.read_video(WORLD / "eval" / "videos" / "000.mp4", 1)[0].numpy()
    Image.fromarray(frame).save(tmp_path / "face.png")
    trained, videos = straight / "checkpoints" / "latest", []
    monkeypatch.setattr(data, "encode_video", lambda video, fps: videos.append(video) or b"")
    for chosen in (["--adapter", str(trained)], [], ["--adapter", f"{trained}:0"], ["--adapter", f"{trained}:0.5"]):
        command = (
            f"generate.py --model {WORLD}/pipeline --image {tmp_path}/face.png --height 80 --width 80 --num-frames 9"
        )
        command += f" --steps 4 --dtype float32 --device cpu --seed 5 --overwrite --out {tmp_path}/out.mp4"
        monkeypatch.setattr(sys, "argv", [*command.split(), "--prompt", "a person, talking", *chosen])
        assert generate.main() == 0, capsys.readouterr().err
    ours, base, off, half = videos
    assert torch.equal(off, base)

    pipe = WanImageToVideoPipeline.from_pretrained(WORLD / "pipeline", dtype=torch.float32)
    pipe.load_lora_weights(trained / "transformer_2", load_into_transformer_2=True)
    pipe.scheduler = LinearFlowEuler.from_config(FlowMatchEulerDiscreteScheduler(shift=5.0).config)
    noise = draw_noise(latent_shape(pipe, 80, 80, 9), seed=5)
    for strength, video in ((1.0, ours), (0.5, half)):
        pipe.transformer_2.set_adapters(pipe.transformer_2.active_adapters(), strength)
        stock = pipe(
            image=Image.fromarray(frame), prompt="a person, talking", height=80, width=80, num_frames=9,
            num_inference_steps=4, guidance_scale=1.0, latents=noise, output_type="pt",
        ).frames[0]  # fmt: skip
        torch.testing.assert_close(video, stock.transpose(0, 1) * 2 - 1, rtol=0, atol=1e-3)
    assert float((base - ours).abs().max()) > 2e-3  # the adapter matters
    assert float((half - ours).abs().max()) > 1.5e-3 and float((half - base).abs().max()) > 1.5e-3


def test_generate_writes_what_the_name_says(tmp_path, monkeypatch, capsys):
    """An mp4 to look at; an array or PNG files that hold the pixels; nothing is replaced, nothing is guessed."""
    video = torch.rand(3, 5, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pixels, outputs = data.to_uint8(video).numpy(), []

    def call(out):
        command = f"generate.py --model m --image i --prompt p --fps 8 --out {out}"
        monkeypatch.setattr(sys, "argv", command.split())
        monkeypatch.setattr(generation, "generate", lambda args: outputs.append(args) or video)
        return generate.main(), capsys.readouterr()

    for name in ("new/a.mp4", "new/a.npy", "new/frames"):
        code, printed = call(tmp_path / name)
        assert code == 0 and printed.out.strip() == str(tmp_path / name)
    assert data.read_video(tmp_path / "new" / "a.mp4").shape == (5, 32, 48, 3)
    assert read_video_header(tmp_path / "new" / "a.mp4", 5).rate == 8
    assert np.array_equal(np.load(tmp_path / "new" / "a.npy"), pixels)
    frames = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "new" / "frames").iterdir())]
    assert np.array_equal(np.stack(frames), pixels)
    for name in ("a.mov", "new/frames", "new"):
        outputs.clear()
        code, printed = call(tmp_path / name)
        assert code == 2 and "--out" in printed.err and str(tmp_path / name) in printed.err and not outputs


# -- bad input: refused before weights load, with the way out


@pytest.fixture
def no_weights(monkeypatch):
    refuse_weights(monkeypatch)


def refuse_weights(monkeypatch):
    monkeypatch.setattr(wan_load, "load_pipeline", lambda *_: pytest.fail("weights were loaded"))


@pytest.fixture
def clips(tmp_path):
    """A copy of three training clips that a test may spoil: (metadata path, its rows)."""
    with (WORLD / "train" / "metadata.csv").open() as file:
        rows = list(csv.reader(file))[:4]
    (tmp_path / "videos").mkdir()
    for video, _ in rows[1:]:
        shutil.copy(WORLD / "train" / video, tmp_path / video)
    return tmp_path / "metadata.csv", rows


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_face_packs_are_compared_with_insightface(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(wan_load, "load_pipeline", lambda *_: pytest.exit("far enough"))
    with pytest.raises(pytest.exit.Exception):
        call(monkeypatch, capsys, *FAST, f"run.output_dir={tmp_path / 'run'}")
    out = capsys.readouterr().out
    for setting in PACKS:
        assert out.count(f"reward.{setting}: face parity with insightface: box and landmarks 0.0") == 1
        assert out.count(f"reward.{setting}: ") == 3  # and two hashes
    files = [file for pack in ("reward", "judge") for file in (WORLD / "faces" / pack).glob("*.onnx")]
    digests = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert out.count("the licence of face weights") == 1 and all(f"sha256 {digest}" in out for digest in digests)


def test_dry_run_prints_the_plan(monkeypatch, capsys, no_weights, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "--dry-run", f"run.output_dir={tmp_path / 'run'}")
    assert code == 0 and not (tmp_path / "run").exists()
    assert "4 per process x 1 accumulation x 1 processes = 4 clips per step" in out
    assert "   2  0.9375    937.500  high_noise  -" in out
    assert "   7  0.4167    416.667  low_noise   replayed" in out
    assert "500 tokens" in out and "memory of one GPU" in out
    assert "\nfits: 0.0 MB of " in out and "on the GPU" not in out  # there is none
    assert out.count("note:") == out.count("clips are trained on at 8") == 1
    changes = ["model.min_timestep_boundary=0.875", "train.warmup_steps=999"]
    _, out, _ = call(monkeypatch, capsys, "--dry-run", f"run.output_dir={tmp_path / 'run'}", *changes)
    assert "note: train.warmup_steps 999 do not end within the run's " in out
    assert "note: model.min_timestep_boundary is 0.875, the checkpoint says 0.9" in out


def test_no_video_is_held_during_replay(monkeypatch, tmp_path):
    """Neither the frames, nor the graph of the reward that refers to them."""
    videos, alive = [], []

    def seen_replay(*_, **settings):
        alive.append(sum(video() is not None for video in videos))

    watch(monkeypatch, WanDecoder, "decode_with_caches", lambda decoded, *_: videos.append(weakref.ref(decoded.video)))
    watch(monkeypatch, reward_flow, "replay", seen_replay)
    others = ["sample.gradient_mode=drtune", "reward.kl_gradient=fixed_trajectory", "train.lr_scheduler_type=cosine"]
    launch(f"run.output_dir={tmp_path}", "train.max_steps=2", "run.sample_videos=0", *others)
    assert len(videos) == 2 and alive == [0, 0] and all(line["grad_norm"] > 0 for line in metrics(tmp_path))
