"""The tiny world's video models: tokenizer, text encoder and Wan2.2-shaped experts, trained by flow matching.

The experts first learn from clips in which people keep their identity. Then the base is trained on clips in which most
people quickly turn into a stock face: it drifts. The cured model is trained on the same clips without drift.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from tiny_world.people import draw_clips
from tiny_world.vae import LATENT_CHANNELS, TEMPORAL, learning_rate

BOUNDARY, SHIFT = 0.9, 5.0
TEXT_DIM, TEXT_LENGTH, SHORT_TEXT = 32, 512, 32
LETTERS = "abcdefghijklmnopqrstuvwxyz.,'-0123456789"
WORDS = """a person with short long blond brown dark hair and beard glasses
    talking silent turning moving left right facing the camera blinking nodding""".split()  # noqa: SIM905

Log = Callable[[str], None]


def new_tokenizer(words: Sequence[str] = WORDS, letters: str = LETTERS, **options: Any) -> T5Tokenizer:
    """Return a unigram tokenizer of `words`, with `letters` for other text."""
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    vocabulary += [("\u2581" + word, -2.0) for word in words] + [(letter, -6.0) for letter in letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, **options)


def new_text_encoder(vocabulary: int) -> UMT5EncoderModel:
    """Return a small UMT5 with random weights: its fixed features distinguish the captions."""
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
    """Cross-attention over SHORT_TEXT tokens, equal to that over 512: the last token represents all padding."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        bias = torch.zeros(1, 1, 1, SHORT_TEXT, dtype=hidden_states.dtype)
        bias[..., -1] = math.log(TEXT_LENGTH - SHORT_TEXT + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, bias, rotary_emb)


@dataclass(frozen=True)
class Clips:
    """Training data of an expert: normalised latents and conditions (N, C, T, h, w), text (N, SHORT_TEXT, d).

    condition None: the clean first latent frame is the condition, as in Wan2.2-TI2V-5B.
    """

    latents: Tensor
    condition: Tensor | None
    text: Tensor


@torch.no_grad()
def encode_latents(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """Return the normalised latents of a video."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return (vae.encode(video).latent_dist.mode() - mean) / std


@torch.no_grad()
def training_set(pipe: WanImageToVideoPipeline, count: int, seed: int, log: Log) -> dict[str, Clips]:
    """Return `count` clips without drift ("stays") and the same with it ("drifts"), encoded."""
    latents: dict[str, list[Tensor]] = {"stays": [], "drifts": []}
    conditions, texts = [], []
    for start in range(0, count, 4):  # a few at a time: the processor's caches hold them
        part = min(4, count - start)
        clips, drifting, prompts = draw_clips(part, seed + start)
        latents["stays"].append(encode_latents(pipe.vae, clips).half())
        latents["drifts"].append(encode_latents(pipe.vae, drifting).half())
        if not pipe.config.expand_timesteps:
            grey = torch.zeros_like(clips[:, :, 1:])
            condition = encode_latents(pipe.vae, torch.cat([clips[:, :, :1], grey], 2))
            mask = torch.zeros(part, TEMPORAL, *condition.shape[2:])
            mask[:, :, 0] = 1
            conditions.append(torch.cat([mask, condition], 1).half())
        texts.append(pipe._get_t5_prompt_embeds(prompts, max_sequence_length=SHORT_TEXT))
        if start % 500 == 0:
            log(f"clips {start}/{count}")
    condition = torch.cat(conditions) if conditions else None
    return {name: Clips(torch.cat(parts), condition, torch.cat(texts)) for name, parts in latents.items()}


def sigma_ranges() -> dict[str, tuple[float, float]]:
    """Return {expert: its range of unshifted sigmas}; "only" has all of them."""
    split = BOUNDARY / (SHIFT - (SHIFT - 1) * BOUNDARY)  # the boundary's unshifted sigma
    return {"high": (split, 1.0), "low": (0.0, split), "only": (0.0, 1.0)}


def network_input(x: Tensor, clean: Tensor, condition: Tensor | None, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transformer's input and its timesteps, by token where the first latent frame is the condition."""
    if condition is not None:
        return torch.cat([x, condition], 1), 1000 * sigma
    height, width = x.shape[3] // 2, x.shape[4] // 2  # of tokens
    timesteps = (1000 * sigma)[:, None].repeat(1, x.shape[2] * height * width)
    timesteps[:, : height * width] = 0
    return torch.cat([clean[:, :, :1], x[:, :, 1:]], 2), timesteps


class RopeOfSomeFrames(nn.Module):
    """A transformer's rotary embedding for some of a clip's latent frames, each at its own time."""

    def __init__(self, rope: nn.Module, frames: int):
        super().__init__()
        self.rope, self.frames = rope, frames
        self.chosen = list(range(frames))

    def forward(self, latents: Tensor) -> tuple[Tensor, ...]:
        clip = latents.new_empty(1, latents.shape[1], self.frames, *latents.shape[3:])
        chosen = torch.tensor(self.chosen)
        return tuple(part.unflatten(1, (self.frames, -1))[:, chosen].flatten(1, 2) for part in self.rope(clip))


def train_expert(
    expert: WanTransformer3DModel, clips: Clips, name: str, steps: int, seed: int, log: Log, lr: float = 1.5e-3,
    batch: int = 4, seen: int = 3,
) -> WanTransformer3DModel:  # fmt: skip
    """Return the moving average of an expert's weights, trained by flow matching in its range (sigma_ranges).

    seen: number of latent frames of a clip in a step, with the first. Prompt and first frame determine nearly all of
    every frame, so that few frames train almost as well as all, at a lower cost.
    """
    first = int(clips.condition is None)  # the first latent frame to be generated
    frames = clips.latents.shape[2]
    expert.train()
    for block in expert.blocks:
        block.attn2.set_processor(ShortTextAttention())
    average = copy.deepcopy(expert)
    rope = expert.rope = RopeOfSomeFrames(expert.rope, frames)
    optimizer = torch.optim.AdamW(expert.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=1e-3)
    generator = torch.Generator().manual_seed(seed)
    start, running = time.time(), None
    low, high = sigma_ranges()[name]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr, warmup=100)
        rows = torch.randint(0, len(clips.latents), (batch,), generator=generator)
        rope.chosen = [0, *(1 + torch.randperm(frames - 1, generator=generator)[: seen - 1].sort().values).tolist()]
        x0, text = clips.latents[rows][:, :, rope.chosen].float(), clips.text[rows]
        condition = None if clips.condition is None else clips.condition[rows][:, :, rope.chosen].float()
        s = low + (high - low) * torch.rand(batch, generator=generator)
        sigma = SHIFT * s / (1 + (SHIFT - 1) * s)  # distributed as in a shifted schedule
        noise = torch.randn(x0.shape, generator=generator)
        x = (1 - sigma.view(-1, 1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1, 1) * noise
        velocity = expert(*network_input(x, x0, condition, sigma), text, return_dict=False)[0]
        loss = (velocity - (noise - x0))[:, :, first:].square().mean()
        expert.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expert.parameters(), 1.0)
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


def new_pipeline(vae: AutoencoderKLWan, layers: int) -> WanImageToVideoPipeline:
    """Return a pipeline with this VAE and untrained experts of `layers` layers."""
    tokenizer = new_tokenizer()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return WanImageToVideoPipeline(
        tokenizer=tokenizer, text_encoder=new_text_encoder(len(tokenizer)), vae=vae, scheduler=scheduler,
        transformer=new_expert(layers, 3, 64), transformer_2=new_expert(layers, 3, 64), boundary_ratio=BOUNDARY,
        image_processor=None, image_encoder=None,
    )  # fmt: skip


def convert_pipeline(pipe: WanImageToVideoPipeline, vae: AutoencoderKLWan) -> WanImageToVideoPipeline:
    """Return a pipeline like Wan2.2-TI2V-5B's: another VAE, and the low-noise expert without its condition inputs.

    The expert needs further training.
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


def save_pipeline(pipe: DiffusionPipeline, folder: Path) -> None:
    """Save with float16 weights, which halves the files; they are loaded as float32."""
    for part in pipe.components.values():
        for parameter in part.parameters() if isinstance(part, nn.Module) else ():
            parameter.data = parameter.data.half()
    pipe.save_pretrained(folder)
