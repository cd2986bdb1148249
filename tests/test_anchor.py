"""The data anchor: its gradient against autograd, its moments, and both scripts with it, or with nothing else."""

import contextlib
import csv
import dataclasses
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from pipelines import backbone_of
from runs import adapter, launch, launch_grpo, metrics, table
from test_reward_flow import SCHEDULE, assert_same, autograd_gradients, conditioning, gradients, lora_model
from test_reward_flow import replay_gradients as replayed
from test_train_reward_fl import write

from rewardfl import anchor, backbones, config, data, flow, lora
from rewardfl.backbones.protocol import Source, Velocity
from rewardfl.backbones.wan import model
from rewardfl.config import ConfigError
from rewardfl.data.cache import Cache, CacheError
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import plan
from rewardfl.training.anchors import Anchors
from rewardfl.training.conditions import Conditions
from rewardfl.training.samples import Batch, Sample

ANCHOR = ["anchor.weight=1", "anchor.draws=2", "anchor.measured_clips=2"]
SUPERVISED = [*ANCHOR, "reward.terms.score.weight=0", "reward.kl_weight=0"]
ALONE = [*SUPERVISED, "reward.motion_weight=0", "reward.others={}"]


def draws_of(pipe, model, cond, x0, moments):
    drawn = []
    for n, moment in enumerate(moments):
        at = SCHEDULE.at(moment)
        velocity = Velocity(backbone=backbone_of(pipe), model=model, conditioning=cond, schedule=at)
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(n), dtype=x0.dtype)
        drawn.append(anchor.Draw(velocity=lambda x, v=velocity: v(x, 0), sigma=at.sigmas[0], noise=noise))
    return drawn


def test_replay_and_anchor_equal_one_graph():
    """The anchor's loss of a sample of weight 0 is 0."""
    results = []
    for run in (autograd_gradients, replayed):
        pipe, model = lora_model(torch.float64)
        cond, x = conditioning(3, torch.float64, pipe)
        x0 = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)
        weights = torch.tensor([0.7, 0.2, 0.0], dtype=x.dtype)
        draws = draws_of(pipe, model, cond, x0, [3.0, 4.5])
        if run is autograd_gradients:
            total = 0
            for draw in draws:
                noisy = flow.add_noise(x0, draw.noise, draw.sigma)
                total = total + ((draw.velocity(noisy) - draw.noise + x0) ** 2).flatten(1).mean(1) / 2
            (weights * total).sum().backward()
        else:
            losses = anchor.accumulate(draws, x0, weights)
        run(pipe, model, cond, x, [3, 4, 5], 1.0, 0.7, "exact")
        results.append(gradients(model))
    torch.testing.assert_close(losses, total.detach() * (weights > 0))
    assert_same(results[1], results[0], 1e-7)  # diffusers' norms round to float32 inside


def test_the_loss_is_the_distance_to_the_datas_velocity():
    x0, noise = torch.randn(2, 2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).unbind()
    sigma = torch.tensor(0.75)

    def misfit(velocity, reference=None):
        return anchor.velocity_misfit(anchor.Draw(velocity=velocity, sigma=sigma, noise=noise, reference=reference), x0)

    assert misfit(lambda x: (x - x0) / sigma).abs().max() < 1e-12  # x leads back to x0
    torch.testing.assert_close(misfit(torch.zeros_like), (noise - x0).square().flatten(1).mean(1))
    assert not misfit(torch.ones_like, reference=torch.ones_like).any()


def test_a_row_without_a_clip_is_anchored_at_the_bases_latents(tmp_path):
    """The loss is the mean square of the difference that the adapter makes to the velocity at the noised latents."""
    pipe, policy = lora_model(torch.float32)
    inputs, x0 = conditioning(1, torch.float32, pipe)
    row, device = SimpleNamespace(id="anna", video=None), torch.device("cpu")
    sample = Sample(row=row, clip={}, size=(32, 32), references=(), base_latents={"kind": "base_latents"})
    backbone, digests = backbone_of(pipe), dict.fromkeys(("text", "image", "untrained", "dtype"), "")
    conditions = Conditions(store=Cache(tmp_path), backbone=backbone, num_frames=5, **digests)
    conditions.store.put(sample.base_latents, {"latents": x0})
    settings = config.AnchorConfig(weight=1, target="reference", draws=2)
    run_plan = SimpleNamespace(anchor=settings, anchor_steps=(3, 4), run=SimpleNamespace(seed=1))
    anchors = Anchors(plan=run_plan, conditions=conditions, samples=[sample], device=device)
    batch = Batch(rows=[0], replaced=[False], conditioning=inputs, x=x0, schedule=SCHEDULE, start_step=0)
    job = SimpleNamespace(accumulate=lambda policy: contextlib.nullcontext(), backward=torch.Tensor.backward)
    outcome = anchors.accumulate(job, policy, batch, 7, 1.0)
    (loss,), anchored = outcome.loss, outcome.has_clip
    expected = []
    for n, moment in enumerate(anchor.draw_moments(2, (3, 4), 1, 7, whole_range=False)):
        at = SCHEDULE.at(moment)
        velocity = Velocity(backbone=backbone, model=policy, conditioning=inputs, schedule=at)
        noisy = flow.add_noise(x0, draw_noise(x0.shape, noise_seed(1, 7, "anchor/anna/0", n), device), at.sigmas[0])
        with lora.reference(policy):
            base = velocity(noisy, 0)
        expected.append((velocity(noisy, 0) - base).square().mean())
    assert anchored.tolist() == [True] and loss > 1e-4
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_moments_go_through_the_steps_in_turn():
    first = anchor.draw_moments(4, [4, 5, 6, 7], 42, 1, whole_range=False)
    assert sorted(first) == [4, 5, 6, 7] and first == anchor.draw_moments(4, [4, 5, 6, 7], 42, 1, whole_range=False)
    assert len({tuple(anchor.draw_moments(4, [4, 5, 6, 7], 42, update, whole_range=False)) for update in range(20)}) > 5
    assert sorted(anchor.draw_moments(6, [4, 7], 42, 1, whole_range=False)) == [4, 4, 4, 7, 7, 7]
    for update in range(200):
        low, high = anchor.draw_moments(2, [3, 4], 42, update, whole_range=True)
        assert 3 <= low < 4 <= high < 5


def test_a_moment_lies_between_steps():
    at = SCHEDULE.at(4.0)
    assert at.sigmas.tolist() == [float(SCHEDULE.sigmas[4]), 0] and torch.equal(at.timesteps, SCHEDULE.timesteps[4:5])
    half = SCHEDULE.at(1.5)
    assert float(half.sigmas[0]) == pytest.approx(float(SCHEDULE.sigmas[1] + SCHEDULE.sigmas[2]) / 2)
    assert half.experts == (SCHEDULE.experts[1],) and torch.equal(half.timesteps, 1000 * half.sigmas[:1])


def test_no_moment_is_beyond_its_experts_boundary():
    uncut, cut = (model.schedule(8, 5.0, ("high", "low"), boundary) for boundary in (0.9, 0.9))
    uncut = dataclasses.replace(uncut, boundary=0.0)
    step = cut.handover - 1
    moments = (step + torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).tolist()
    before, after = ([float(schedule.at(moment).sigmas[0]) for moment in moments] for schedule in (uncut, cut))
    assert min(before) < 0.9 <= min(after) and min(after) < 0.901 and max(after) <= float(cut.sigmas[step])
    assert all(new == old for old, new in zip(before, after, strict=True) if old > 0.9001)  # the others keep their bits
    assert all(torch.equal(uncut.at(moment).sigmas, cut.at(moment).sigmas) for moment in (0.7, step + 1.9, 7.99))


# -- the scripts


@pytest.mark.slow(15)
def test_supervised_fine_tuning_lowers_the_data_loss(tmp_path):
    """Without a face pack, a rollout or a reward."""
    settings = [
        *SUPERVISED, "anchor.sigmas=trained_range", "anchor.draws=4", "train.warmup_steps=0",
        "reward.reward_model_path=null",
        "reward.held_out_model_path=null", "train.learning_rate=3e-3", "run.save_steps=6", "train.max_steps=12",
    ]  # fmt: skip
    out = launch(f"run.output_dir={tmp_path / 'run'}", *settings).stdout
    assert "supervised fine-tuning: trained on the clips alone" in out
    lines = metrics(tmp_path / "run")
    assert not any(key.startswith("reward/") or key == "time/rollout" for line in lines for key in line)
    assert all(line["actor/loss"] == pytest.approx(line["actor/anchor_loss"]) for line in lines)
    measured = {line["step"]: line["actor/data_loss"] for line in lines if "actor/data_loss" in line}
    assert list(measured) == [1, 6, 12] and measured[12] < 0.97 * measured[1]
    straight = adapter(tmp_path / "run", 12)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000012")
    launch(f"run.output_dir={tmp_path / 'run'}", *settings)
    resumed = adapter(tmp_path / "run", 12)
    assert all(torch.equal(resumed[name], value) for name, value in straight.items())


@pytest.mark.slow(15)
@pytest.mark.parametrize("start", [launch, launch_grpo])
def test_the_anchor_next_to_a_reward(tmp_path, start):
    """It changes the gradient and not the first video."""
    settings = ["train.max_steps=1", "run.sample_videos=0", "reward.held_out_model_path=null"]
    start(f"run.output_dir={tmp_path / 'without'}", *settings)
    start(f"run.output_dir={tmp_path / 'with'}", *settings, *ANCHOR)
    (without,), (line,) = metrics(tmp_path / "without"), metrics(tmp_path / "with")
    assert line["reward/mean"] == without["reward/mean"] and "actor/anchor_loss" not in without
    assert line["actor/loss"] == pytest.approx(without["actor/loss"] + line["actor/anchor_loss"], abs=1e-6)
    assert line["grad_norm"] != without["grad_norm"] and math.isfinite(line["actor/data_loss"])


@pytest.mark.slow(15)
def test_rows_without_a_clip_have_no_anchor(tmp_path):
    """The first row has an image and a face; if no row has a clip, an anchor is refused."""
    text = table(tmp_path / "some.csv", "train", 2).read_text()
    _, (first, _), (second, prompt) = csv.reader(text.splitlines())
    Image.fromarray(data.read_video(tmp_path / first, 1)[0].numpy()).save(tmp_path / "face.png")
    head, without = ["video", "prompt", "image", "reference_video"], ["", prompt, "face.png", first]
    run = [f"data.file_name={tmp_path / 'metadata.csv'}", "train.max_steps=1", "run.sample_videos=0", "anchor.weight=1"]
    write(tmp_path / "metadata.csv", [head, without, [second, prompt, "", ""]])
    done = launch(f"run.output_dir={tmp_path / 'run'}", *run, "train.per_device_train_batch_size=2")
    assert "1 of 2 rows name no video and have no anchor (anchor.weight)" in done.stdout
    (line,) = metrics(tmp_path / "run")
    assert line["reward/valid_fraction"] == 1 and 0 < line["actor/anchor_loss"] < 1
    supervised = launch(f"run.output_dir={tmp_path / 'two'}", *run, *SUPERVISED, check=False)
    assert supervised.returncode == 2 and "fits the clip of a row, and the row names none (video)" in supervised.stderr
    write(tmp_path / "metadata.csv", [head, without])
    refused = launch(f"run.output_dir={tmp_path / 'three'}", *run, check=False)
    assert refused.returncode == 2 and "anchor.weight: no row names a video" in refused.stderr


def test_every_trained_expert_must_be_reached():
    """By the anchor's steps if nothing else trains: steps 4 to 7 are the low-noise expert's."""
    backbone = backbones.describe("wan2_2", Source(model_paths="assets/tiny_world/pipeline"))

    def check(*settings):
        plan.resolve(config.load("tests/face.yaml", [*ALONE, *settings]), backbone, 1)

    check("model.trainable_models=dit", "anchor.sigmas=trained_range")
    check("model.trainable_models=dit,dit2", "anchor.sigmas=[1, 5]")
    with pytest.raises(ConfigError, match=r"would not be trained .*, or change anchor.sigmas"):
        check("model.trainable_models=dit")
    with pytest.raises(ConfigError, match=r"no trained expert is used at the steps \[1\]"):
        check("anchor.sigmas=[1, 5]")


def test_a_clip_without_latents_is_an_error_or_skipped(capsys):
    def lost(sample):
        raise CacheError("latents are missing")

    row = SimpleNamespace(id="0", video="a.mp4")
    conditions = SimpleNamespace(clip_latents=lost, latent_shape=lambda sample: (2, 1, 4, 4))
    settings = {"conditions": conditions, "samples": [SimpleNamespace(row=row)], "device": torch.device("cpu")}
    raises, skips = (SimpleNamespace(data=SimpleNamespace(skip_bad_rows=skip)) for skip in (False, True))
    with pytest.raises(CacheError):
        Anchors(plan=raises, **settings).latents([0])
    latents, has_clip = Anchors(plan=skips, **settings).latents([0])
    assert not latents.any() and has_clip.tolist() == [False]
    assert "skipped: 0 has no anchor: latents are missing" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "settings,message",
    [
        (["anchor.sigmas=[3,2]"], "anchor.sigmas must be steps in increasing order"),
        (["anchor.sigmas=[2,8]"], r"anchor.sigmas must lie in 0..7"),
        (["reward.reward_model_path=null", "anchor.weight=1"], "reward.reward_model_path is required"),
        ([*ALONE, "train.early_stop={}"], "train.early_stop needs videos"),
        ([*ALONE, "anchor.target=reference"], "anchor.target reference is where the model starts"),
        ([*ALONE, "train.memory.untrained=boundary_cache",
        "sample.noises_per_sample=2"], "boundary_cache needs rollouts"),
    ],
)  # fmt: skip
def test_anchors_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config.load("tests/face.yaml", settings)
