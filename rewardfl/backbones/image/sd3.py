"""Stable Diffusion 3 and 3.5: three text encoders, one network on unpacked latents.

Its conditioning: text (B, 77 + 256, d), CLIP's two embeddings side by side and T5's after them; pooled (B, p).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.loaders import SD3LoraLoaderMixin
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from rewardfl.backbones.image.pipeline import (
    ATTENTION,
    EXPERT,
    JOINT,
    Configs,
    ImageModelSpec,
    describe,
    open,
    pixels_per_latent,
    prompt_tokens,
)
from rewardfl.backbones.protocol import Conditioning

CLIP_TOKENS, T5_TOKENS = 77, 256  # prompts' padded lengths in diffusers' pipeline; a tokenizer may allow less


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    length = min(T5_TOKENS, pipe.tokenizer_3.model_max_length)
    text, _, pooled, _ = pipe.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=length, device=device
    )
    return {"text": text, "pooled": pooled}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "timestep": times,
        "encoder_hidden_states": conditioning["text"],
        "pooled_projections": conditioning["pooled"],
    }


def _longest_side(configs: Configs) -> int:
    """Return the longest side of images in pixels, by the network's number of positions."""
    config = configs[EXPERT]
    return config["pos_embed_max_size"] * config["patch_size"] * pixels_per_latent(configs)


def _conditioning_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    short = prompt_tokens(configs, "tokenizer", CLIP_TOKENS)
    long = prompt_tokens(configs, "tokenizer_3", T5_TOKENS)
    ids = {"text_encoder": short, "text_encoder_2": short, "text_encoder_3": long}
    tokens = {name: torch.zeros(1, length, dtype=torch.long, device="meta") for name, length in ids.items()}
    clips = [encoders[name](tokens[name], output_hidden_states=True) for name in ("text_encoder", "text_encoder_2")]
    t5 = encoders["text_encoder_3"](tokens["text_encoder_3"])[0]
    text = torch.cat([output.hidden_states[-2] for output in clips], -1)
    text = nn.functional.pad(text, (0, t5.shape[-1] - text.shape[-1]))
    return {"text": torch.cat([text, t5], -2), "pooled": torch.cat([output[0] for output in clips], -1)}


SD3 = ImageModelSpec(
    published="Stable Diffusion 3",
    pipeline="StableDiffusion3Pipeline",
    mixin=SD3LoraLoaderMixin,
    transformer=SD3Transformer2DModel,
    block_classes=("JointTransformerBlock",),
    layer_names={
        **ATTENTION, "ffn.0": "ff.net.0.proj", "ffn.2": "ff.net.2", **JOINT,
    },
    encoders={
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
    },
    tokenizers=("tokenizer", "tokenizer_2", "tokenizer_3"),
    encode=_encode,
    ask=_model_inputs,
    answer=lambda output, x: output,
    sigmas=lambda steps: None,
    longest_side=_longest_side,
    told_on_meta=_conditioning_on_meta,
)  # fmt: skip

open, describe = partial(open, SD3), partial(describe, SD3)
