"""A text-to-image pipeline like Stable Diffusion 3, of a few megabytes, and its training by flow matching."""

import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tiny_world.build import Stages
from tiny_world.vae import learning_rate
from tiny_world.video import Log

LATENT_CHANNELS, SHIFT = 8, 3.0
CLIP_WIDTH, TEXT_WIDTH = 32, 64
TRAINED = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
UNPROMPTED = 0.1  # share of pictures without their prompt, for classifier-free guidance

Draw = Callable[[int, torch.Generator], tuple[list[str], Tensor]]  # returns prompts and pictures, as many as asked for


def new_clip_tokenizer(tokens: Sequence[str], length: int) -> CLIPTokenizer:
    """Return a tokenizer of `tokens` without merges, and the two special tokens, for prompts of `length`."""
    vocabulary = [*tokens, "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
        (Path(folder) / "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=length)


def _new_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    end = tokenizer.eos_token_id
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=CLIP_WIDTH, intermediate_size=2 * CLIP_WIDTH, num_hidden_layers=2,
        num_attention_heads=2, projection_dim=CLIP_WIDTH, max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config)


def _new_t5(words: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=words, d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=1, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=16,
    )  # fmt: skip
    return T5EncoderModel(config)


def new_vae(height: int) -> AutoencoderKL:
    """Return an untrained VAE with 4 x 4 pixels per latent."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48), layers_per_block=1, latent_channels=LATENT_CHANNELS, norm_num_groups=8,
        sample_size=height, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0,
    )  # fmt: skip


def _new_transformer(width: int, layers: int, heads: int, head_dim: int = 16) -> SD3Transformer2DModel:
    """Return an untrained transformer whose blocks start as the identity, by zeros."""
    model = SD3Transformer2DModel(
        sample_size=width // 4, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_layers=layers,
        attention_head_dim=head_dim, num_attention_heads=heads, caption_projection_dim=heads * head_dim,
        joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=2 * CLIP_WIDTH, pos_embed_max_size=16,
        qk_norm="rms_norm",
    )  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ("norm1" in name or "norm_out" in name or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def new_pipeline(
    vae: AutoencoderKL, letters: CLIPTokenizer, words: T5Tokenizer, width: int, layers: int, heads: int
) -> StableDiffusion3Pipeline:
    """Return an untrained pipeline for pictures of `width` pixels, with the tokenizers of CLIP and T5."""
    pipe = StableDiffusion3Pipeline(
        transformer=_new_transformer(width, layers, heads), scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae, text_encoder=_new_clip(letters), tokenizer=letters, text_encoder_2=_new_clip(letters),
        tokenizer_2=letters, text_encoder_3=_new_t5(len(words)), tokenizer_3=words,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def train_vae(
    vae: AutoencoderKL, draw: Draw, steps: int, seed: int, log: Log, batch: int = 32, lr: float = 3e-3
) -> None:
    """Train by reconstruction of pictures and a tiny KL."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=1e-4)
    start, running = time.time(), 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        images = draw(batch, generator)[1]
        posterior = vae.encode(images).latent_dist
        error = vae.decode(posterior.sample(generator), return_dict=False)[0] - images
        kl = 1e-5 * posterior.kl().mean() / posterior.mean[0].numel()
        loss = error.square().mean() + 0.1 * error.abs().mean() + kl
        vae.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        running += (float(error.detach().square().mean()) - running) * (1 if step == 0 else 0.03)
        if step % 100 == 0:
            log(f"vae {step} {time.time() - start:.0f}s psnr {10 * math.log10(4 / running):.2f}")


@torch.no_grad()
def set_latent_statistics(vae: AutoencoderKL, draw: Draw, seed: int, count: int = 256) -> None:
    """Write the latents' mean and one over their standard deviation over `count` pictures into the VAE's config."""
    images = draw(count, torch.Generator().manual_seed(seed))[1]
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in images.split(64)])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


def prompt_ids(pipe: StableDiffusion3Pipeline, prompts: list[str]) -> dict[str, Tensor]:
    """Return the ids (N, length) of CLIP's tokenizer and of T5's."""
    options = {"padding": "max_length", "return_tensors": "pt", "truncation": True}
    tokenizers = {"clip": pipe.tokenizer, "t5": pipe.tokenizer_3}
    return {name: tokenizer(prompts, **options).input_ids for name, tokenizer in tokenizers.items()}


def encode(pipe: StableDiffusion3Pipeline, ids: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the pipeline's text (N, 2 length, d) and pooled (N, p) embeddings, with a graph."""
    clips = [encoder(ids["clip"], output_hidden_states=True) for encoder in (pipe.text_encoder, pipe.text_encoder_2)]
    hidden = torch.cat([output.hidden_states[-2] for output in clips], -1)
    t5 = pipe.text_encoder_3(ids["t5"])[0]
    text = torch.cat([nn.functional.pad(hidden, (0, TEXT_WIDTH - hidden.shape[-1])), t5], 1)
    return text, torch.cat([output[0] for output in clips], -1)


@torch.no_grad()
def training_set(
    pipe: StableDiffusion3Pipeline, draw: Draw, count: int, seed: int, log: Log
) -> tuple[Tensor, dict[str, Tensor]]:
    """Draw pictures; return normalised float16 latents (count, C, h, w) and the ids of their prompts."""
    generator = torch.Generator().manual_seed(seed)
    latents: list[Tensor] = []
    prompts: list[str] = []
    for start in range(0, count, 500):
        texts, images = draw(min(500, count - start), generator)
        latent = pipe.vae.encode(images).latent_dist.mode()
        latents.append(((latent - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).half())
        prompts += texts
        if start % 5000 == 0:
            log(f"pictures {start}/{count}")
    return torch.cat(latents), prompt_ids(pipe, prompts)


def train_transformer(
    pipe: StableDiffusion3Pipeline,
    parts: nn.Module,
    pictures: tuple[Tensor, dict[str, Tensor]],
    steps: int,
    seed: int,
    log: Log,
    batch: int = 64,
    lr: float = 2e-3,
) -> nn.Module:
    """Train the pipeline's `parts` by flow matching; return the exponential moving average of their weights."""
    average = copy.deepcopy(parts.train())
    # not Muon: its bfloat16 takes most of a step on a CPU without such instructions
    optimizer = torch.optim.AdamW(parts.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=1e-3)
    latents, ids = pictures
    empty = prompt_ids(pipe, [""])
    generator = torch.Generator().manual_seed(seed)
    start, running = time.time(), 0.0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        rows = torch.randint(0, len(latents), (batch,), generator=generator)
        unprompted = (torch.rand(batch, generator=generator) < UNPROMPTED)[:, None]
        batch_ids = {name: torch.where(unprompted, empty[name], value[rows]) for name, value in ids.items()}
        clean = latents[rows].float()
        s = torch.rand(batch, generator=generator)
        sigma = SHIFT * s / (1 + (SHIFT - 1) * s)
        noise = torch.randn(clean.shape, generator=generator)
        x = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
        text, pooled = encode(pipe, batch_ids)
        velocity = pipe.transformer(x, text, pooled, 1000 * sigma, return_dict=False)[0]
        loss = (velocity - (noise - clean)).square().mean()
        parts.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        decay = min(0.998, (step + 1) / (step + 20))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(parts.parameters()), 1 - decay)
        running += (float(loss.detach()) - running) * (1 if step == 0 else 0.02)
        if step % 100 == 0:
            log(f"transformer {step} {time.time() - start:.0f}s loss {running:.4f}")
    return average.eval()


def train_round(
    pipe: StableDiffusion3Pipeline,
    stages: Stages,
    name: str,
    draw: Draw,
    pictures: int,
    steps: int,
    seed: int,
    batch: int = 64,
) -> None:
    """Train the transformer and the text encoders as the stage `name`, on new pictures and with a new schedule."""

    def train(parts: nn.Module) -> nn.Module:
        pool = training_set(pipe, draw, pictures, seed, stages.log)
        return train_transformer(pipe, parts, pool, steps, seed + 1, stages.log, batch)

    trained = stages.train(name, nn.ModuleDict({part: pipe.components[part] for part in TRAINED}), train)
    pipe.register_modules(**dict(trained.named_children()))


def load_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """Load the written pipeline in float32."""
    pipe = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(
    pipe: StableDiffusion3Pipeline, prompts: list[str], height: int, width: int, generator: torch.Generator
) -> Tensor:
    """Sample images (N, 3, height, width) in [-1, 1] as the configurations of the tiny words do."""
    return (
        pipe(
            prompts, height=height, width=width, num_inference_steps=10, guidance_scale=1.0,
            max_sequence_length=pipe.tokenizer_3.model_max_length, output_type="pt", generator=generator,
        ).images * 2 - 1
    )  # fmt: skip
