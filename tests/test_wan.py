"""Conditioning, experts and sampler against the stock diffusers pipeline."""

import json

import pytest
import torch
from conftest import FRAMES, HEIGHT, WIDTH, random_pipeline
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from rewardfl import data, decode, flow, reward_flow, wan, wan_load
from rewardfl.shards import Refused

PROMPT = "a person with short dark hair, talking"


def picture():
    pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()), data.to_float(pixels[None])[:, 0]


def stock(pipe, steps, **arguments):
    """A stock pipeline call on our schedule."""
    pipe.scheduler = wan.LinearFlowEuler.from_config(FlowMatchEulerDiscreteScheduler(shift=5.0).config)
    return pipe(
        image=picture()[0], prompt=PROMPT, height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=steps,
        guidance_scale=1.0, **arguments,
    ).frames  # fmt: skip


def ours(pipe, steps, noise):
    experts = wan.Experts(pipe.transformer, pipe.transformer_2, pipe.config.boundary_ratio)
    conditioning = wan.encode(pipe, PROMPT, picture()[1], FRAMES)
    return reward_flow.rollout(wan.Velocity(experts, conditioning), noise, flow.linear_sigmas(steps, 5.0), keep=()).x0


@pytest.mark.parametrize("steps", [4, 8])
def test_sampler_equals_the_pipeline_bit_for_bit(pipe, steps):
    noise = data.noise(wan.latent_shape(pipe, HEIGHT, WIDTH, FRAMES), seed=7)
    expected = stock(pipe, steps, latents=noise.clone(), output_type="latent")
    actual = ours(pipe, steps, noise)
    assert torch.equal(actual, expected)
    video = stock(pipe, steps, latents=noise.clone(), output_type="pt")  # (1, F, 3, H, W) in [0, 1]
    torch.testing.assert_close(decode.decode(pipe.vae, actual).transpose(1, 2) / 2 + 0.5, video, rtol=0, atol=1e-6)


def test_both_experts_and_every_input_matter(pipe):
    """The parity above would hold for a model that ignores its inputs; this one does not."""
    noise = data.noise(wan.latent_shape(pipe, HEIGHT, WIDTH, FRAMES), seed=7)
    experts = wan.Experts(pipe.transformer, pipe.transformer_2, 0.9)
    one = wan.encode(pipe, PROMPT, picture()[1], FRAMES)
    other_text = wan.encode(pipe, "glasses", picture()[1], FRAMES)
    other_image = wan.encode(pipe, PROMPT, -picture()[1], FRAMES)
    with torch.no_grad():
        for sigma in (torch.tensor(0.95), torch.tensor(0.5)):
            base = wan.Velocity(experts, one)(noise, sigma)
            assert not torch.allclose(wan.Velocity(experts, other_text)(noise, sigma), base, atol=1e-4)
            assert not torch.allclose(wan.Velocity(experts, other_image)(noise, sigma), base, atol=1e-4)
        swapped = wan.Experts(pipe.transformer_2, pipe.transformer, 0.9)
        assert not torch.allclose(wan.Velocity(swapped, one)(noise, sigma), base, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 4, 8, 20, 40])
def test_schedule_equals_diffusers_given_the_sigmas(steps):
    scheduler = wan.LinearFlowEuler.from_config(FlowMatchEulerDiscreteScheduler(shift=5.0).config)
    scheduler.set_timesteps(steps)
    sigmas = flow.linear_sigmas(steps, 5.0)
    assert torch.equal(scheduler.sigmas, sigmas)
    assert torch.equal(scheduler.timesteps, 1000 * sigmas[:-1])


def test_expert_by_sigma():
    experts = [wan.expert_at(sigma, 0.9) for sigma in flow.linear_sigmas(8, 5.0)[:-1]]
    assert experts == ["high_noise"] * 3 + ["low_noise"] * 5
    assert wan.expert_at(torch.tensor(0.9), 0.9) == "high_noise"  # at the boundary; float32 0.9 is below 0.9


def test_a_batch_is_its_samples(pipe):
    experts = wan.Experts(pipe.transformer, pipe.transformer_2, 0.9)
    conditions = [wan.encode(pipe, prompt, picture()[1], FRAMES) for prompt in (PROMPT, "blinking")]
    shape = wan.latent_shape(pipe, HEIGHT, WIDTH, FRAMES)
    noise = torch.cat([data.noise(shape, seed) for seed in (1, 2)])
    sigmas = flow.linear_sigmas(4, 5.0)
    both = reward_flow.rollout(wan.Velocity(experts, wan.Conditioning.stack(conditions)), noise, sigmas, ()).x0
    for i, condition in enumerate(conditions):
        single = reward_flow.rollout(wan.Velocity(experts, condition), noise[i : i + 1], sigmas, ()).x0
        torch.testing.assert_close(both[i : i + 1], single, rtol=1e-4, atol=1e-5)


def test_load_pipeline(tmp_path, pipe):
    pipe.save_pretrained(tmp_path / "model")
    loaded = wan_load.load_pipeline(wan_load.find(str(tmp_path / "model")), torch.float32)
    assert not any(
        p.requires_grad for m in (loaded.transformer, loaded.vae, loaded.text_encoder) for p in m.parameters()
    )
    assert not loaded.text_encoder.training  # T5 has dropout
    noise = data.noise(wan.latent_shape(pipe, HEIGHT, WIDTH, FRAMES), seed=7)
    torch.testing.assert_close(ours(loaded, 4, noise), ours(pipe, 4, noise), rtol=1e-4, atol=1e-4)
    half = wan_load.load_pipeline(wan_load.find(str(tmp_path / "model")), torch.bfloat16)
    assert half.transformer.dtype == torch.bfloat16
    assert half.transformer.scale_shift_table.dtype == torch.float32  # diffusers' float32 islands stay

    with pytest.raises(Refused, match="no model_index.json"):
        wan_load.load_pipeline(wan_load.find(str(tmp_path)), torch.float32)
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": None}))
    with pytest.raises(Refused, match="no boundary_ratio"):
        wan_load.load_pipeline(wan_load.find(str(tmp_path / "model")), torch.float32)


def test_another_tokenizer_folder_is_used(tmp_path):
    pipe = random_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer").rename(tmp_path / "tokenizer")
    with pytest.raises(Refused, match="has no tokenizer folder"):
        wan_load.load_pipeline(wan_load.find(str(tmp_path / "model")), torch.float32)
    loaded = wan_load.load_pipeline(wan_load.find(str(tmp_path / "model"), str(tmp_path / "tokenizer")), torch.float32)
    assert loaded.tokenizer(PROMPT).input_ids == pipe.tokenizer(PROMPT).input_ids
