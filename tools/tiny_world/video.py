"""The tiny world's video models: tokenizer, text encoder and Wan2.2-shaped experts, trained by flow matching.

The base is trained on clips in which most people slowly turn into the average face. So it has learned both
to keep a person and to lose one, and it samples between the two: it drifts.
"""

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from rewardfl_tools.tiny_world.people import NUM_FRAMES, SIZE, describe, draw_motion, draw_people, drifting, render
from rewardfl_tools.tiny_world.vae import LATENT_CHANNELS, TEMPORAL

BOUNDARY, SHIFT = 0.9, 5.0
TEXT_DIM, TEXT_LENGTH, SHORT_TEXT = 32, 512, 32
WORDS = """a person with short long blond brown dark hair and beard glasses
    talking silent turning left right facing the camera blinking""".split()  # noqa: SIM905


def new_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer of the captions' words, with letters for everything else; nothing is downloaded."""
    letters = "abcdefghijklmnopqrstuvwxyz.,'-0123456789"
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    vocabulary += [("\u2581" + word, -2.0) for word in WORDS] + [(letter, -6.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def new_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """A small UMT5 with random weights: fixed features of the words, enough to tell captions apart."""
    config = UMT5Config(
        vocab_size=vocabulary, d_model=TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=32,
    )  # fmt: skip
    return UMT5EncoderModel(config).eval()


def new_expert(layers: int, heads: int = 4, head_dim: int = 32) -> WanTransformer3DModel:
    width = heads * head_dim
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=head_dim, num_layers=layers,
        ffn_dim=2 * width,
        in_channels=2 * LATENT_CHANNELS + TEMPORAL, out_channels=LATENT_CHANNELS, text_dim=TEXT_DIM, freq_dim=256,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
    )  # fmt: skip


class ShortTextAttention(WanAttnProcessor):
    """Cross-attention over SHORT_TEXT tokens, equal to that over 512: the last of them stands for all the padding."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        bias = torch.zeros(1, 1, 1, SHORT_TEXT, dtype=hidden_states.dtype)
        bias[..., -1] = math.log(TEXT_LENGTH - SHORT_TEXT + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, bias, rotary_emb)


@dataclass(frozen=True)
class Clips:
    """What an expert is trained on: normalised latents and conditions (N, C, T, h, w), text (N, SHORT_TEXT, d).

    condition None: the first latent frame is the given one, as in Wan2.2-TI2V-5B.
    """

    latents: Tensor
    condition: Tensor | None
    text: Tensor


@torch.no_grad()
def encode_latents(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return (vae.encode(video).latent_dist.mode() - mean) / std


def training_set(pipe: WanImageToVideoPipeline, count: int, seed: int, log) -> Clips:
    """Render, caption and encode `count` clips, with what the pipeline's transformer is told of their first frame."""
    generator = torch.Generator().manual_seed(seed)
    latents, conditions, texts = [], [], []
    grey = torch.zeros(1, 3, NUM_FRAMES - 1, SIZE, SIZE)
    for start in range(0, count, 50):
        part = min(50, count - start)
        people = draw_people(part, generator)
        motion, actions = draw_motion(part, generator)
        video = render(drifting(people, generator), motion, generator)[0]
        latents.append(encode_latents(pipe.vae, video).half())
        if not pipe.config.expand_timesteps:
            image = torch.cat([video[:, :, :1], grey.expand(part, -1, -1, -1, -1)], 2)
            condition = encode_latents(pipe.vae, image)
            mask = torch.zeros(part, TEMPORAL, *condition.shape[2:])
            mask[:, :, 0] = 1
            conditions.append(torch.cat([mask, condition], 1).half())
        prompts = [f"{person}, {action}" for person, action in zip(describe(people), actions, strict=True)]
        with torch.no_grad():
            texts.append(pipe._get_t5_prompt_embeds(prompts, max_sequence_length=SHORT_TEXT))
        if start % 500 == 0:
            log(f"clips {start}/{count}")
    return Clips(torch.cat(latents), torch.cat(conditions) if conditions else None, torch.cat(texts))


def sigma_ranges() -> dict[str, tuple[float, float]]:
    """{expert: the range of the unshifted sigmas at which it answers}; "only" answers at all of them."""
    split = BOUNDARY / (SHIFT - (SHIFT - 1) * BOUNDARY)  # where the unshifted sigma reaches the boundary
    return {"high": (split, 1.0), "low": (0.0, split), "only": (0.0, 1.0)}


def network_input(x: Tensor, clean: Tensor, condition: Tensor | None, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """(what the transformer is given, its timesteps): those of each token where the first latent frame is given."""
    if condition is not None:
        return torch.cat([x, condition], 1), 1000 * sigma
    height, width = x.shape[3] // 2, x.shape[4] // 2  # of tokens
    timesteps = (1000 * sigma)[:, None].repeat(1, x.shape[2] * height * width)
    timesteps[:, : height * width] = 0
    return torch.cat([clean[:, :, :1], x[:, :, 1:]], 2), timesteps


def train_expert(
    expert: WanTransformer3DModel,
    clips: Clips,
    name: str,
    steps: int,
    seed: int,
    log,
    lr: float = 1.5e-3,
    batch: int = 16,
) -> WanTransformer3DModel:
    """Flow matching in the range of the expert (sigma_ranges); the exponential moving average of the weights."""
    given = int(clips.condition is None)  # latent frames that are not generated
    expert.train()
    for block in expert.blocks:
        block.attn2.set_processor(ShortTextAttention())
    average = copy.deepcopy(expert)
    # Muon on the blocks' matrices: at the same time it was ahead of AdamW alone (docs/log.md)
    matrices = [p for name, p in expert.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    others = [p for name, p in expert.named_parameters() if p.ndim != 2 or not name.startswith("blocks.")]
    optimizers = (
        torch.optim.Muon(matrices, lr=lr, weight_decay=1e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=1e-3),
    )
    generator = torch.Generator().manual_seed(seed)
    start, running = time.time(), None
    low, high = sigma_ranges()[name]
    for step in range(steps):
        rate = lr * min(1, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 1e-6
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        rows = torch.randint(0, len(clips.latents), (batch,), generator=generator)
        x0, text = clips.latents[rows].float(), clips.text[rows]
        condition = None if clips.condition is None else clips.condition[rows].float()
        s = low + (high - low) * torch.rand(batch, generator=generator)
        sigma = SHIFT * s / (1 + (SHIFT - 1) * s)  # as a shifted schedule visits them
        noise = torch.randn(x0.shape, generator=generator)
        x = (1 - sigma.view(-1, 1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1, 1) * noise
        with torch.autocast("cpu", torch.bfloat16):
            velocity = expert(*network_input(x, x0, condition, sigma), text, return_dict=False)[0]
        loss = (velocity.float() - (noise - x0))[:, :, given:].square().mean()
        expert.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(0.998, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(expert.parameters()), 1 - decay)
        value = float(loss.detach())
        running = value if running is None else 0.98 * running + 0.02 * value
        if step % 100 == 0:
            log(f"{name} {step} {time.time() - start:.0f}s loss {running:.4f}")
    for block in average.blocks:
        block.attn2.set_processor(WanAttnProcessor())
    return average.eval()


def new_pipeline(vae: AutoencoderKLWan, layers: tuple[int, int]) -> WanImageToVideoPipeline:
    """The pipeline around a VAE, with untrained experts of (high-noise, low-noise) layers."""
    tokenizer = new_tokenizer()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return WanImageToVideoPipeline(
        tokenizer=tokenizer, text_encoder=new_text_encoder(len(tokenizer)), vae=vae, scheduler=scheduler,
        transformer=new_expert(layers[0]), transformer_2=new_expert(layers[1]), boundary_ratio=BOUNDARY,
        image_processor=None, image_encoder=None,
    )  # fmt: skip


def converted(pipe: WanImageToVideoPipeline, vae: AutoencoderKLWan) -> WanImageToVideoPipeline:
    """A pipeline of Wan2.2-TI2V-5B's kind: the low-noise expert, which no longer sees a condition, around another VAE.

    The expert has to be trained on; what it knows of people is a start.
    """
    old = pipe.transformer_2
    config = dict(old.config) | {"in_channels": LATENT_CHANNELS}
    weights = old.state_dict()
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"][:, :LATENT_CHANNELS].clone()
    only = WanTransformer3DModel.from_config(config)
    only.load_state_dict(weights)
    return WanImageToVideoPipeline(
        tokenizer=pipe.tokenizer, text_encoder=pipe.text_encoder, vae=vae, scheduler=pipe.scheduler, transformer=only,
        transformer_2=None, boundary_ratio=None, expand_timesteps=True, image_processor=None, image_encoder=None,
    )  # fmt: skip


def save_pipeline(pipe: WanImageToVideoPipeline, folder: Path) -> None:
    """save_pretrained with float16 weights, which halves the files; they are loaded as float32."""
    for part in (pipe.transformer, pipe.transformer_2, pipe.vae, pipe.text_encoder):
        for parameter in () if part is None else part.parameters():
            parameter.data = parameter.data.half()
    pipe.save_pretrained(folder)
