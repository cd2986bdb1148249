"""Conditioning, experts and sampler against the stock diffusers pipeline."""

import dataclasses

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from pipelines import (
    FRAMES,
    HEIGHT,
    I2V,
    WIDTH,
    LinearFlowEuler,
    backbone_of,
    encode,
    encode_text,
    experts_of,
    latent_shape,
)  # fmt: skip

from rewardfl import backbones, data, reward_flow
from rewardfl.backbones.protocol import Source, Velocity
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.variants import TWO_EXPERTS
from rewardfl.noise import draw_noise
from rewardfl.weights.shards import InputError

PROMPT = "a person with short dark hair, talking"


def picture(seed=4):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()), data.to_float(pixels[None])[:, 0]


def stock(pipe, steps, image=None, prompt=PROMPT, guidance_scale=1.0, shift=5.0, **arguments):
    """A stock pipeline call on our schedule."""
    pipe.scheduler = LinearFlowEuler.from_config(FlowMatchEulerDiscreteScheduler(shift=shift).config)
    return pipe(
        image=image or picture()[0], prompt=prompt, height=HEIGHT, width=WIDTH, num_frames=FRAMES,
        num_inference_steps=steps, guidance_scale=guidance_scale, **arguments,
    ).frames  # fmt: skip


# a timestep of exactly 900 is in each but the last; 14 steps at shift 5 are 9/14 of the way
@pytest.mark.parametrize("shift, steps", [(3.0, 20), (5.0, 14), (5.0, 8)])
def test_the_expert_of_each_step_is_the_pipelines(pipe, shift, steps):
    schedule, called = wan.schedule(steps, shift, I2V.experts, 0.9), []
    for name, part in TWO_EXPERTS.items():
        pipe.components[part].register_forward_pre_hook(lambda *_, name=name: called.append(name))
    pipe.register_to_config(boundary_ratio=0.9)
    stock(pipe, steps, shift=shift, output_type="latent")
    assert list(schedule.experts) == called
    tie = schedule.sigmas.eq(torch.tensor(0.9)).nonzero().flatten().tolist()
    assert (steps, shift) == (8, 5.0) or [schedule.experts[i] for i in tie] == ["high_noise"]
    assert len(schedule) == steps == len(schedule.timesteps) == len(schedule.sigmas) - 1


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_a_batch_is_the_pipelines_samples(pipe, guidance):
    """Two images and two prompts at once; the pipeline makes them one after the other."""
    experts, schedule = experts_of(pipe), wan.schedule(4, 5.0, I2V.experts, 0.9)
    jobs = [(PROMPT, 4, 1), ("blinking", 5, 2)]  # prompt, seed of the picture, seed of the noise
    shape = latent_shape(pipe, HEIGHT, WIDTH, FRAMES)
    noise = torch.cat([draw_noise(shape, seed) for _, _, seed in jobs])
    both = backbone_of(pipe).collate([encode(pipe, prompt, picture(seed)[1], FRAMES) for prompt, seed, _ in jobs])
    velocity = Velocity(
        backbone=backbone_of(pipe), model=experts, conditioning=both, schedule=schedule,
        negative={"text": encode_text(pipe, "glasses")}, guidance=guidance,
    )  # fmt: skip
    actual = reward_flow.rollout(velocity, noise, schedule.sigmas, ()).x0
    for i, (prompt, seed, _) in enumerate(jobs):
        expected = stock(
            pipe, 4, picture(seed)[0], prompt, guidance, negative_prompt="glasses", latents=noise[i : i + 1].clone(),
            output_type="latent",
        )  # fmt: skip
        # the batch changes only how sums are split
        torch.testing.assert_close(actual[i : i + 1], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(actual[0], actual[1], atol=0.1)


def test_clips_of_other_sizes_are_refused(pipe):
    def check(*size, spatial=8, temporal=4, positions=64, max_pixels=None):
        sizes = {"spatial": spatial, "pixels_per_token": 2 * spatial, "temporal": temporal, "positions": positions}
        dataclasses.replace(backbone_of(pipe), **sizes).check_clips(*size, max_pixels)

    check(480, 832, 81)
    check(482, 8, 81, max_pixels=256)  # the sides are not used
    for frames in (80, 1):
        with pytest.raises(InputError, match=rf"^data.num_frames must be 4k\+1 .*from 5 to .*{frames}$"):
            check(480, 832, frames)
    with pytest.raises(InputError) as error:
        check(482, 8, 81)
    assert str(error.value).splitlines() == [
        "data.height must be a multiple of 16, at most 1024, got 482",
        "data.width must be a multiple of 16, at most 1024, got 8",
    ]
    with pytest.raises(InputError, match="^data.max_pixels gives .* of 16, this model takes multiples of 32"):
        check(704, 1280, 81, spatial=16, max_pixels=256)
    # beyond the positions the rotary embedding would end in the middle of the first forward pass
    check(96, 96, 21, positions=6)
    check(480, 480, 21, positions=6, max_pixels=96 * 96)
    with pytest.raises(InputError, match="^data.num_frames must be .*to 21, got 25"):
        check(96, 96, 25, positions=6)
    with pytest.raises(InputError, match=f"^data.max_pixels must be at most {96 * 96}, got"):
        check(96, 96, 21, positions=6, max_pixels=112 * 112)


def test_another_model_name_is_refused():
    with pytest.raises(InputError, match="model.model_name must be wan2_2 or .*, got 'wan2_1', did you mean 'wan2_2'"):
        backbones.describe("wan2_1", Source())
