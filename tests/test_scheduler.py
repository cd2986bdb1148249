"""The SDE scheduler inside the stock pipeline, against our samplers and diffusers' own schedulers."""

import json
import re

import pytest
import torch
from conftest import ROOT
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from pipelines import FRAMES, HEIGHT, I2V, WIDTH, LinearFlowEuler, backbone_of, encode, experts_of, latent_shape
from test_backbone import PROMPT, picture

from rewardfl import flow
from rewardfl.backbones.protocol import Velocity
from rewardfl.backbones.wan import model as wan
from rewardfl.noise import draw_noise
from rewardfl.scheduler import FlowMatchSDEScheduler

STOCHASTIC = ["flow", "dance", "cps"]
STOCK = FlowMatchEulerDiscreteScheduler(shift=5.0).config
LINEAR = FlowMatchSDEScheduler(shift=5.0).config


class Recording(FlowMatchSDEScheduler):
    """Keeps what the stock pipelines drop: they take `step(...)[0]`."""

    def step(self, model_output, timestep, sample, return_dict=True):
        assert not return_dict
        output = super().step(model_output, timestep, sample)
        self.records.append((sample, output))
        return (output.prev_sample,)


def sampled(pipe, scheduler):
    """Latents (1, 16, T, h, w) that the stock pipeline ends with."""
    pipe.scheduler = scheduler
    noise = draw_noise(latent_shape(pipe, HEIGHT, WIDTH, FRAMES), seed=7)
    return pipe(
        image=picture()[0], prompt=PROMPT, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=4,
        guidance_scale=1.0, latents=noise, output_type="latent",
    ).frames  # fmt: skip


def ready(steps=4, **arguments):
    """A scheduler with a schedule, and what to step it with: velocity and sample (2, 3, 4)."""
    scheduler = FlowMatchSDEScheduler(shift=5.0, **arguments)
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(0)
    velocity, sample = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    return scheduler, velocity, sample


def seeded(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# ---- in the stock pipeline ----


def test_without_noise_the_pipeline_samples_by_euler_steps(pipe):
    expected = sampled(pipe, LinearFlowEuler.from_config(STOCK))
    assert torch.equal(sampled(pipe, FlowMatchSDEScheduler.from_config(LINEAR, noise_level=0.0)), expected)
    for arguments in ({"kind": "ode"}, {"noise_window": []}):
        assert ready(4, **arguments)[0].noise_window == ()
    torch.manual_seed(0)
    assert not torch.allclose(sampled(pipe, FlowMatchSDEScheduler.from_config(LINEAR)), expected, atol=1e-2)


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_the_pipelines_latents_replay_to_the_same_log_prob(pipe, sde):
    """Both experts in the window; the velocity of the replay is ours, at the latents that the pipeline went through."""
    scheduler = Recording.from_config(LINEAR, kind=sde, noise_window=[1, 2])
    scheduler.records = []
    torch.manual_seed(1)
    final = sampled(pipe, scheduler)
    experts = experts_of(pipe)
    schedule = wan.schedule(4, 5.0, I2V.experts, pipe.config.boundary_ratio)
    velocity = Velocity(
        backbone=backbone_of(pipe), model=experts, conditioning=encode(pipe, PROMPT, picture()[1], FRAMES),
        schedule=schedule,
    )  # fmt: skip
    assert {schedule.experts[i] for i in (1, 2)} == {"high_noise", "low_noise"}
    latents = [sample for sample, _ in scheduler.records] + [final]
    for i, (sample, recorded) in enumerate(scheduler.records):
        if i not in (1, 2):
            assert recorded.log_prob is None and recorded.std == 0
            assert torch.equal(recorded.mean, latents[i + 1])
            continue
        with torch.no_grad():
            v = velocity(sample, i)
            replayed = FlowMatchSDEScheduler.step(
                scheduler, v, scheduler.timesteps[i], sample, step_index=i, next_sample=latents[i + 1]
            )
        assert torch.equal(replayed.log_prob, recorded.log_prob)
        assert torch.equal(torch.exp(replayed.log_prob - recorded.log_prob), torch.ones(1, dtype=torch.float64))
        assert torch.equal(replayed.mean, recorded.mean) and replayed.std == recorded.std > 0
        assert torch.equal(replayed.prev_sample, latents[i + 1])
        assert not torch.equal(recorded.mean, latents[i + 1])


def test_the_guides_example_runs(monkeypatch):
    """The code block of docs/flow_grpo.md, as it stands there."""
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "flow_grpo.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    assert names["video"].shape == (9, 64, 64, 3) and names["pipe"].scheduler.noise_window == (0, 1)


# ---- schedules ----


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"shift": 3.0}, {}),  # SD3, FLUX.1-schnell
        ({"use_dynamic_shifting": True, "max_shift": 0.9, "shift_terminal": 0.02}, {"mu": 0.7}),  # Qwen-Image
    ],
)
def test_given_sigmas_are_the_stock_schedulers(config, arguments):
    stock = FlowMatchEulerDiscreteScheduler(**config)
    ours = FlowMatchSDEScheduler.from_config(stock.config, noise_level=0.0)
    samples = []
    for scheduler in (stock, ours):
        scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 6, 6).tolist(), **arguments)  # as the pipelines pass them
        scheduler.set_begin_index(0)
        sample = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
        for t in scheduler.timesteps:
            sample = scheduler.step(torch.tanh(sample), t, sample, return_dict=False)[0]
        samples.append(sample)
    assert torch.equal(ours.sigmas, stock.sigmas) and torch.equal(*samples)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    "config",
    [
        {"shift": 3.0},  # SD3's and SD3.5's
        *({"shift": 3.0, f"use_{name}_sigmas": True} for name in ("karras", "exponential", "beta")),
        {"shift": 3.0, "shift_terminal": 0.1},
        {"use_dynamic_shifting": True, "shift_terminal": 0.02, "use_karras_sigmas": True},
    ],
)
def test_the_config_of_a_stock_scheduler_keeps_its_schedule(config, steps, tmp_path):
    stock = FlowMatchEulerDiscreteScheduler(**config)
    mu = {"mu": 0.7} if "use_dynamic_shifting" in config else {}
    stock.set_timesteps(steps, **mu)
    stock.save_pretrained(tmp_path)
    ours = FlowMatchSDEScheduler.from_pretrained(tmp_path, noise_level=0.0)
    if not stock.sigmas.isfinite().all():
        with pytest.raises(ValueError, match="do not walk down from at most 1: take more steps"):
            ours.set_timesteps(steps, **mu)
        return
    for scheduler in (ours, FlowMatchSDEScheduler.from_config(ours.config)):
        scheduler.set_timesteps(steps, **mu)
        assert torch.equal(scheduler.sigmas, stock.sigmas) and torch.equal(scheduler.timesteps, stock.timesteps)


def test_the_config_of_another_scheduler_is_refused(tmp_path):
    UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0).save_pretrained(tmp_path)  # Wan's scheduler
    with pytest.raises(ValueError, match="UniPCMultistepScheduler makes its sigmas in another way"):
        FlowMatchSDEScheduler.from_pretrained(tmp_path)


def test_config_round_trip(tmp_path, caplog):
    scheduler = FlowMatchSDEScheduler.from_config(LINEAR, kind="cps", noise_level=0.8, noise_window=[1, 2])
    scheduler.save_config(tmp_path)
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert saved["_class_name"] == "FlowMatchSDEScheduler"
    assert (saved["kind"], saved["noise_level"], saved["noise_window"], saved["shift"]) == ("cps", 0.8, [1, 2], 5.0)
    loaded = FlowMatchSDEScheduler.from_pretrained(tmp_path)
    loaded.set_timesteps(4)
    assert loaded.noise_window == (1, 2) and loaded.config.kind == "cps" and loaded.config.noise_level == 0.8
    assert torch.equal(loaded.sigmas, flow.linear_sigmas(4, 5.0))
    assert torch.equal(loaded.timesteps, 1000 * loaded.sigmas[:-1]) and loaded.num_inference_steps == 4
    assert not caplog.records  # diffusers warns of keys that a class does not take


# ---- the noise window ----


def test_a_window_of_several_drawn_steps():
    """The default window is all inference steps but the last."""
    assert ready(10)[0].noise_window == tuple(range(9)) and ready(1)[0].noise_window == ()
    scheduler, velocity, sample = ready(10, noise_window=[3, 1])
    outputs = [scheduler.step(velocity, t, sample, seeded(0, 1)) for t in scheduler.timesteps]
    assert [i for i, output in enumerate(outputs) if output.log_prob is not None] == [1, 3]


# ---- steps ----


@pytest.mark.parametrize("sde", STOCHASTIC)
def test_a_step_is_the_transition_of_its_index(sde):
    scheduler, velocity, sample = ready(4, kind=sde, noise_level=0.6)
    for i in range(3):
        output = scheduler.step(velocity, scheduler.timesteps[i], sample, seeded(i, i + 1))
        arguments = (scheduler.sigmas[i], scheduler.sigmas[i + 1], 0.6, scheduler.sigmas[1])
        mean, std = flow.transition(sde, sample, velocity, *arguments)
        noise = torch.cat([torch.randn(1, 3, 4, generator=generator) for generator in seeded(i, i + 1)])
        assert torch.equal(output.mean, mean) and output.std == std
        assert torch.equal(output.prev_sample, flow.sample(mean, std, noise))
        assert torch.equal(output.log_prob, flow.log_prob(sde, output.prev_sample, mean, std))
    final = scheduler.step(velocity, scheduler.timesteps[3], sample)
    assert final.log_prob is None and final.std == 0
    assert torch.equal(final.prev_sample, flow.euler_step(sample, velocity, scheduler.sigmas[3], scheduler.sigmas[4]))


def test_a_replay_differentiates_the_velocity_and_leaves_the_count():
    scheduler, velocity, sample = ready()
    first = scheduler.step(velocity, scheduler.timesteps[0], sample, seeded(0, 1))
    policy = velocity.clone().requires_grad_()
    replayed = scheduler.step(
        policy, scheduler.timesteps[0], sample, step_index=0, next_sample=first.prev_sample, return_dict=False
    )
    assert replayed[0] is first.prev_sample and torch.equal(replayed[3], first.log_prob)
    replayed[3].sum().backward()
    c = flow.coefficients("flow", scheduler.sigmas[0], scheduler.sigmas[1], 0.7, scheduler.sigmas[1])
    expected = (first.prev_sample - first.mean) / c.std**2 * c.velocity / velocity[0].numel()
    torch.testing.assert_close(policy.grad, expected)
    assert scheduler.step_index == 1
    with pytest.raises(ValueError, match="step 3 is deterministic: next_sample has no density"):
        scheduler.step(velocity, scheduler.timesteps[3], sample, step_index=3, next_sample=sample)


def test_the_sample_keeps_its_dtype_and_is_scored_as_stored():
    """A bfloat16 pipeline stores bfloat16: what is scored is what a replay will find."""
    scheduler, velocity, sample = ready()
    half, t = sample.bfloat16(), scheduler.timesteps[1]
    output = scheduler.step(velocity.bfloat16(), t, half, seeded(0, 1), step_index=1)
    assert output.prev_sample.dtype == torch.bfloat16 and output.mean.dtype == torch.float32
    arguments = (scheduler.sigmas[1], scheduler.sigmas[2], 0.7, scheduler.sigmas[1])
    mean, _ = flow.transition("flow", half.float(), velocity.bfloat16().float(), *arguments)
    assert torch.equal(output.mean, mean)
    replayed = scheduler.step(velocity.bfloat16(), t, half, step_index=1, next_sample=output.prev_sample)
    assert torch.equal(replayed.log_prob, output.log_prob)
    assert torch.equal(output.log_prob, flow.log_prob("flow", output.prev_sample.float(), output.mean, output.std))
    # a bfloat16 network does not round float32 latents
    assert scheduler.step(velocity.bfloat16(), t, sample, step_index=1).prev_sample.dtype == torch.float32


def test_steps_are_counted_not_looked_up():
    """Two steps of one rounded timestep, which a search by value would merge; a step out of turn is an error."""
    scheduler, velocity, sample = ready()
    with pytest.raises(ValueError, match="step 0 is timestep 1000, got 937.5: steps are counted"):
        scheduler.step(velocity, scheduler.timesteps[1], sample)
    scheduler.set_begin_index(2)
    output = scheduler.step(velocity, scheduler.timesteps[2], sample)
    assert scheduler.step_index == 3 and output.std == pytest.approx(
        flow.coefficients("flow", scheduler.sigmas[2], scheduler.sigmas[3], 0.7, scheduler.sigmas[1]).std
    )
    scheduler.step(velocity, scheduler.timesteps[3], sample)
    scheduler.set_timesteps(4)  # starts again
    scheduler.timesteps = torch.full((4,), 999)  # int64, as UniPC's, and all alike
    assert len({scheduler.step(velocity, t, sample).std for t in scheduler.timesteps}) == 4
