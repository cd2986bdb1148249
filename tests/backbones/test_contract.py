"""The contract of every registered backbone. A tenant is a small random model, and its stock pipeline."""

import dataclasses
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    QwenImageImg2ImgPipeline,
    WanPipeline,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.wan.pipeline_wan_video2video import retrieve_latents
from image_pipelines import random_flux, random_flux2_klein, random_qwen_image, random_sd3, random_z_image
from PIL import Image
from pipelines import FRAMES, HEIGHT, WIDTH, LinearFlowEuler, random_variant
from torch import nn

from rewardfl import backbones, data, flow, lora, reward_flow, sde
from rewardfl.backbones.image.flux import pack, unpack
from rewardfl.backbones.image.pipeline import ImageModel
from rewardfl.backbones.image.sd3 import SD3
from rewardfl.backbones.protocol import Backbone, Experts, Source, Velocity
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.noise import draw_noise

CPU = torch.device("cpu")
PROMPT, NEGATIVE, STEPS, SHIFT = "a person with short dark hair, talking", "blinking", 6, 5.0
SEED, WORDS = 7, 12
ENCODED = {}


def aligned(pipe):
    """Copy the weights into torch's own memory: at a mapped file's odd addresses MKL may add in another order."""
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            for parameter in component.parameters():
                parameter.data = parameter.data.clone()
    return pipe


@dataclass
class Tenant:
    """A model's folder, and how its stock pipeline samples from it."""

    name: str
    folder: Path
    pipeline: type
    frame_given: bool = False  # the first latent frame is the image, and not sampled
    embedded_guidance: float | None = None  # FLUX.1-dev's input

    def open(self, dtype: str = "float32") -> Backbone:
        return backbones.open(
            self.name, Source(model_paths=str(self.folder), dtype=dtype, embedded_guidance=self.embedded_guidance)
        )

    def stock(self, dtype: torch.dtype = torch.float32):
        pipe = aligned(self.pipeline.from_pretrained(self.folder, torch_dtype=dtype))
        pipe.set_progress_bar_config(disable=True)
        # running Euler on our sigmas
        pipe.scheduler = LinearFlowEuler.from_config(FlowMatchEulerDiscreteScheduler(shift=SHIFT).config)
        return pipe

    def encode(self, pipe, video):
        """Return the latents that the stock video-to-video pipeline begins with, without noise."""
        encoded = retrieve_latents(pipe.vae.encode(video), sample_mode="argmax")
        mean = torch.tensor(pipe.vae.config.latents_mean).view(1, -1, 1, 1, 1)
        latents = (encoded - mean) / torch.tensor(pipe.vae.config.latents_std).view(1, -1, 1, 1, 1)
        return latents[:, :, 1:] if self.frame_given else latents

    @property
    def guided_bits(self) -> float:
        """How far a guided step may be from the stock pipeline's; more than 0 where that asks with a doubled batch."""
        return 0.0

    def sample(self, pipe, noise, guidance, output_type):
        pixels = data.to_uint8(image()[:, None])[0]
        if self.frame_given:  # whatever stands there
            noise = torch.cat([torch.ones_like(noise[:, :, :1]), noise], 2)
        picture = {} if self.pipeline is WanPipeline else {"image": Image.fromarray(pixels.numpy())}
        return pipe(
            **picture, prompt=PROMPT, negative_prompt=NEGATIVE, height=HEIGHT, width=WIDTH,
            num_frames=FRAMES, num_inference_steps=STEPS, guidance_scale=guidance, latents=noise.clone(),
            output_type=output_type,
        ).frames  # fmt: skip


@dataclass
class ImageTenant(Tenant):
    """A text-to-image model, which we sample with its own scheduler."""

    guided_bits = 1e-6  # one doubled batch
    editing = FluxImg2ImgPipeline  # the stock pipeline that encodes pictures

    def encode(self, pipe, video):
        return self.editing._encode_vae_image(pipe, video[:, :, 0], None).unsqueeze(2)

    def stock(self, dtype: torch.dtype = torch.float32):
        pipe = self.pipeline.from_pretrained(self.folder, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        if self.name == "sd3":
            pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=SHIFT)
        return pipe

    def sample(self, pipe, noise, guidance, output_type):
        latents, scales = self.settings(noise[:, :, 0].clone(), guidance)
        images = pipe(
            prompt=PROMPT, negative_prompt=NEGATIVE, height=HEIGHT, width=WIDTH, num_inference_steps=STEPS,
            latents=latents, output_type=output_type, **scales,
        ).images  # fmt: skip
        if output_type == "latent":
            return self.unpack(images, noise[:, :, 0]).unsqueeze(2)
        return images.unsqueeze(1)

    def settings(self, latents, guidance):
        """Return the latents as the pipeline takes them, and its arguments of guidance."""
        return latents, {"guidance_scale": guidance}

    def unpack(self, latents, like):
        return latents


@dataclass
class PackedTenant(ImageTenant):
    """With a shift by the image's size, and latents packed to tokens."""

    guided_bits = 0.0
    unpack = staticmethod(unpack)

    def settings(self, latents, guidance):
        return pack(latents), {"guidance_scale": self.embedded_guidance, "true_cfg_scale": guidance}


@dataclass
class KleinTenant(PackedTenant):
    """Its pipeline takes patches, encodes an empty negative prompt if there is none, and returns no latents."""

    def encode(self, pipe, video):
        return nn.functional.pixel_shuffle(pipe._encode_vae_image(video[:, :, 0], None), 2).unsqueeze(2)

    def sample(self, pipe, noise, guidance, output_type):
        latents = []

        def keep(pipe, step, time, inputs):
            latents.append(inputs["latents"])
            return inputs

        images = pipe(
            prompt=PROMPT, negative_prompt_embeds=pipe.encode_prompt(NEGATIVE)[0], height=HEIGHT, width=WIDTH,
            num_inference_steps=STEPS, guidance_scale=guidance, output_type=output_type, callback_on_step_end=keep,
            latents=nn.functional.pixel_unshuffle(noise[:, :, 0], 2),
        ).images  # fmt: skip
        return unpack(latents[-1], noise[:, :, 0]).unsqueeze(2) if output_type == "latent" else images.unsqueeze(1)


@dataclass
class QwenTenant(PackedTenant):
    """Its VAE takes videos."""

    def encode(self, pipe, video):
        return QwenImageImg2ImgPipeline._encode_vae_image(pipe, video, None)


@dataclass
class ZImageTenant(ImageTenant):
    """Its pipeline calls no guidance 0."""

    def settings(self, latents, guidance):
        return latents, {"guidance_scale": 0 if guidance == 1 else guidance}


IMAGE_TENANTS = {
    "sd3": (random_sd3, ImageTenant, {}), "flux": (random_flux, PackedTenant, {"embedded_guidance": 2.5}),
    "qwen_image": (random_qwen_image, QwenTenant, {}), "flux2_klein": (random_flux2_klein, KleinTenant, {}),
    "z_image": (random_z_image, ZImageTenant, {}),
}  # fmt: skip


def tenant_of(name, folder):
    if name in VARIANTS:
        make, tenant, more = partial(random_variant, name), Tenant, {"frame_given": VARIANTS[name].image == "frame"}
    else:
        make, tenant, more = IMAGE_TENANTS[name]
    pipe = make()
    pipe.save_pretrained(folder)
    return tenant(name, folder, type(pipe), **more)


# two experts and channels, one and a given frame, an image
SHORT = ("wan2_2", "wan2_2_ti2v", "sd3", "flux", "qwen_image", "flux2_klein", "z_image")
FULL = ("wan2_2", "sd3")  # all tests; the others show that their specs are right
# layers without a gradient: the last block's text output is not used
UNUSED = {"SD3Transformer2DModel": "blocks.2.attn.add_q_proj"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in backbones.MODULES],
)
def tenant(request, tmp_path_factory):
    return tenant_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def backbone(tenant):
    return tenant.open()


@pytest.fixture
def complete(tenant):
    """Skip a test of what all backbones share unless the tenant is one of FULL."""
    if tenant.name not in FULL:
        pytest.skip("wan2_2 and sd3 are enough")


def image():
    """(3, H, W) in [-1, 1], at values that 8 bits keep."""
    pixels = torch.randint(0, 256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    return data.to_float(pixels[None])[:, 0]


def experts_of(backbone, *, adapted=False, dtype=None):
    """All experts; adapted: with a LoRA that changes something."""
    loaded = {name: backbone.load_expert(name) for name in backbone.experts}
    for i, expert in enumerate(loaded.values()):
        if adapted:
            lora.inject(expert, 2, 3.0, list(backbone.layer_names.values()), seed=i)
            for k, parameter in enumerate(p for p in expert.parameters() if p.requires_grad):
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k))
        if dtype is not None:
            expert.to(dtype)
    return Experts(loaded), loaded


def frames_of(backbone):
    return 1 if isinstance(backbone, ImageModel) else FRAMES


def noise_of(backbone, batch=1):
    shape = backbone.latent_shape(HEIGHT, WIDTH, frames_of(backbone))
    return torch.cat([draw_noise((1, *shape), SEED + i) for i in range(batch)])


def schedule_of(backbone):
    shift = None if isinstance(backbone, ImageModel) and backbone.spec is not SD3 else SHIFT
    return backbone.schedule(STEPS, shift, backbone.latent_shape(HEIGHT, WIDTH, frames_of(backbone)))


def conditioning_of(backbone, batch=1, prompt=PROMPT, *, short=False):
    """Encode once for each backbone. short: cut the padding of prompts; FLUX.1's gradients take a sixth of the time."""
    if id(backbone) not in ENCODED:
        text, seen = backbone.text_encoder(CPU), backbone.image_encoder(CPU)(image(), frames_of(backbone))
        ENCODED[id(backbone)] = {PROMPT: text(PROMPT) | seen, NEGATIVE: text(NEGATIVE), "backbone": backbone}
    values = ENCODED[id(backbone)][prompt]
    if short:
        values = values | {name: values[name][:, :WORDS] for name in ("text", "mask") if name in values}
    return backbone.collate([values] * batch)


def velocity_of(backbone, experts, batch=1, guidance=1.0, *, short=False):
    return Velocity(
        backbone=backbone, model=experts, schedule=schedule_of(backbone), guidance=guidance,
        conditioning=conditioning_of(backbone, batch, short=short),
        negative=conditioning_of(backbone, prompt=NEGATIVE, short=short),
    )  # fmt: skip


def gradients(experts):
    gradients = {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}
    unused = [UNUSED.get(type(expert).__name__, "none") for expert in experts.inside.values()]
    down = [name for name in gradients if "lora_A" in name and not any(layer in name for layer in unused)]
    assert down and all(bool(gradients[name].any()) for name in down)
    return gradients


def assert_close(actual, expected, relative):
    assert actual.keys() == expected.keys()
    norm = torch.cat([value.flatten() for value in expected.values()]).norm()
    difference = torch.cat([(actual[name] - expected[name]).flatten() for name in expected])
    assert difference.norm() <= relative * norm


def test_tokens_and_blocks_are_the_networks(backbone):
    _, _, height, width = backbone.latent_shape(HEIGHT, WIDTH, frames_of(backbone))
    assert HEIGHT / height == WIDTH / width == backbone.pixels_per_token / 2  # all of them pack 2 x 2 latents
    classes = {type(module).__name__ for module in backbone.load_expert(backbone.experts[0]).modules()}
    assert set(backbone.block_classes) <= classes


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_the_ode_is_the_stock_pipelines_bit_for_bit(tenant, backbone, guidance):
    noise, schedule = noise_of(backbone), schedule_of(backbone)
    experts, _ = experts_of(backbone)
    ours = reward_flow.rollout(velocity_of(backbone, experts, guidance=guidance), noise, schedule.sigmas, keep=()).x0
    stock = tenant.sample(tenant.stock(), noise, guidance, "latent")
    if tenant.frame_given:
        assert torch.equal(stock[:, :, :1], conditioning_of(backbone)["image"])
    stock = stock[:, :, tenant.frame_given :]
    if guidance == 1:
        assert torch.equal(ours, stock)
    assert (ours - stock).norm() <= tenant.guided_bits * stock.norm()
    assert len(schedule) == STEPS and schedule.sigmas[-1] == 0 and set(schedule.experts) == set(backbone.experts)


def test_the_network_gets_the_stock_pipelines_inputs(tenant, monkeypatch):
    """All inputs of the first step, and the times of as many steps as are usual, to the bit of bfloat16.

    Rounding a time once instead of twice gives others. A network that copies its latents takes no time.
    """
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 28)
    backbone, pipe = tenant.open("bfloat16"), tenant.stock(torch.bfloat16)

    def replace(network, calls):
        forward = network.forward

        def record(self, *arguments, **inputs):
            named = inspect.signature(forward).bind(*arguments, **inputs).arguments.items()
            lists = {name: value if isinstance(value, list) else [value] for name, value in named}
            calls.append({name: [x.clone() for x in xs] for name, xs in lists.items() if torch.is_tensor(xs[0])})
            latents = dict(named).get("x", dict(named).get("hidden_states"))
            if isinstance(latents, list):
                return (latents,)
            return (latents[:, : self.config.out_channels] if latents.ndim > 3 else latents,)

        network.forward = MethodType(record, network)

    stock, ours = [], []
    for name, part in pipe.components.items():
        if name.startswith("transformer") and part is not None:
            replace(part, stock)
    noise = noise_of(backbone).to(torch.bfloat16)  # the stock pipeline rounds its latents
    tenant.sample(pipe, noise, 1.0, "latent")
    experts, loaded = experts_of(backbone)
    for expert in loaded.values():
        replace(expert, ours)
    velocity = velocity_of(backbone, experts)
    with torch.no_grad():
        for i in range(STEPS):
            velocity(noise.float(), i)
    assert len(ours) == len(stock) == STEPS and ours[0].keys() == stock[0].keys()
    for actual, expected in zip(ours, stock, strict=True):
        for name in actual if expected is stock[0] else {"timestep", "t"} & actual.keys():
            assert all(torch.equal(a.to(b), b) for a, b in zip(actual[name], expected[name], strict=True)), name


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("differentiated", ["both", "conditional"])
def test_replay_is_autograd_through_the_chain(backbone, differentiated):
    """For a random cotangent of x0, two samples, steps of every expert, with the KL; guided, by its formula."""
    schedule, active, guidance = schedule_of(backbone), [1, 3, 5], 3.5
    x = noise_of(backbone, 2).double()
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    experts, _ = experts_of(backbone, adapted=True, dtype=torch.float64)
    model = dataclasses.replace(backbone, dtype=torch.float64)
    towards = dataclasses.replace(velocity_of(backbone, experts, 2, short=True), backbone=model)
    negative = conditioning_of(backbone, 2, NEGATIVE, short=True)
    away = dataclasses.replace(towards, conditioning=towards.conditioning | negative)

    def guided(y, i):
        constant = away(y, i)
        return model.guide(towards(y, i), constant if differentiated == "both" else constant.detach(), guidance)

    y, kl = x, 0.0
    for i in range(STEPS):
        v = guided(y, i)
        if i in active:
            with lora.reference(experts):
                reference = guided(y, i)
            kl = kl + flow.velocity_kl(v, reference, schedule.sigmas[i]) / len(active)
        y = y + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * (v if i in active else v.detach())
    ((g * y).sum() + 0.3 * kl.sum()).backward()
    expected = gradients(experts)
    experts.zero_grad()
    velocity = dataclasses.replace(towards, guidance=guidance, guidance_gradient=differentiated)
    trajectory = reward_flow.rollout(velocity, x, schedule.sigmas, active)
    reward_flow.replay(
        velocity, trajectory, schedule.sigmas, active, g, 1.0,
        reference=velocity.reference, kl_weight=0.3, kl_gradient="exact",
    )  # fmt: skip
    assert_close(gradients(experts), expected, 1e-9)


def test_a_clips_latents_are_the_stock_pipelines(tenant, backbone, monkeypatch):
    """Those of the posterior's mode: where the stock pipeline draws from the posterior, it is made to take its mode."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    video = torch.rand(2, 3, frames_of(backbone), HEIGHT, WIDTH, generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    latents = backbone.video_encoder(CPU)(video)
    pipe = tenant.stock()
    with torch.no_grad():
        expected = tenant.encode(pipe, video)
        pixels = video if pipe.vae.__class__ in (AutoencoderKLWan, AutoencoderKLQwenImage) else video[:, :, 0]
        back = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mode()).sample.clamp(-1, 1).view_as(video)
    assert latents.shape == (2, *backbone.latent_shape(HEIGHT, WIDTH, frames_of(backbone)))
    assert latents.dtype == torch.float32
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-6)
    encode_image = backbone.image_encoder(CPU)
    conditioning = backbone.collate([encode_image(clip[:, 0], clip.shape[1]) for clip in video])
    decoded = backbone.load_decoder(CPU).decode(latents, conditioning)
    torch.testing.assert_close(decoded, back, rtol=0, atol=1e-4)  # a hundredth of a level: the order of float32 sums


def test_the_decoders_pullback_is_its_derivative(backbone):
    """Against finite differences of decode; and decode is the stock pipeline's pixels."""
    decoder, x, conditioning = backbone.load_decoder(CPU), 0.5 * noise_of(backbone), conditioning_of(backbone)
    decoded = decoder.decode_with_caches(x, conditioning=conditioning)
    assert torch.equal(decoded.video, decoder.decode(x, conditioning))
    generator = torch.Generator().manual_seed(2)
    g, d = torch.randn(decoded.video.shape, generator=generator), torch.randn(x.shape, generator=generator)
    inside = decoded.video.abs() < 0.9  # far from where pixels are clamped
    grad = decoder.vjp(x, g * inside, decoded, conditioning)
    eps = 1e-3
    there, back = (decoder.decode(x + way * eps * d, conditioning) for way in (1, -1))
    slope = ((there - back) / (2 * eps) * g * inside).sum()
    assert float((grad * d).sum()) == pytest.approx(float(slope), rel=2e-2)


def test_the_ratio_of_a_replayed_rollout_is_exactly_one(backbone):
    experts, _ = experts_of(backbone, adapted=True)
    velocity, schedule = velocity_of(backbone, experts, batch=2, short=True), schedule_of(backbone)
    kernel, window = sde.Kernel("flow", 0.7, schedule.sigmas), (1, 4)
    draw = torch.Generator().manual_seed(3)
    x = noise_of(backbone, 2)
    _, steps = sde.rollout(velocity, x, kernel, window, lambda i: torch.randn(x.shape, generator=draw))
    for i in window:
        _, log_prob = sde.score(velocity, steps[i], i, kernel)
        assert torch.equal(log_prob.detach(), steps[i].log_prob)


@pytest.mark.usefixtures("complete")
def test_the_adapter_off_is_the_base_and_checkpointing_changes_nothing(backbone):
    plain, _ = experts_of(backbone)
    experts, loaded = experts_of(backbone, adapted=True)
    x = noise_of(backbone)
    for i in (0, STEPS - 1):
        with torch.no_grad():
            base = velocity_of(backbone, plain, short=True)(x, i)
            assert torch.equal(velocity_of(backbone, experts, short=True).reference(x, i), base)
            assert not torch.allclose(velocity_of(backbone, experts, short=True)(x, i), base, atol=1e-4)
    both = []
    for checkpointing in (False, True):
        for expert in loaded.values():
            if checkpointing:
                expert.enable_gradient_checkpointing()
            expert.zero_grad()
        for i in (0, STEPS - 1):
            velocity_of(backbone, experts, short=True)(x, i).square().sum().backward()
        both.append(gradients(experts))
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_a_saved_adapter_gives_the_stock_pipeline_our_pixels(tenant, backbone, tmp_path):
    experts, loaded = experts_of(backbone, adapted=True)
    for name, expert in loaded.items():
        backbone.save_adapter(name, expert, tmp_path, lora.adapter_state(expert))
    noise, schedule = noise_of(backbone), schedule_of(backbone)
    x0 = reward_flow.rollout(velocity_of(backbone, experts), noise, schedule.sigmas, keep=()).x0
    ours = backbone.load_decoder(CPU).decode(x0, conditioning_of(backbone))
    pipe = tenant.stock()
    for folder in sorted(path for path in tmp_path.iterdir()):
        pipe.load_lora_weights(folder, **({"load_into_transformer_2": True} if folder.name.endswith("_2") else {}))
    expected = tenant.sample(pipe, noise, 1.0, "pt").transpose(1, 2) * 2 - 1
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    again, plain = experts_of(backbone)
    backbone.attach_adapters(plain, tmp_path)
    with torch.no_grad():
        ours, expected = (velocity_of(backbone, network)(noise, 0) for network in (experts, again))
    assert torch.equal(ours, expected)
