"""Qwen-Image: a vision-language model's text features, one network on packed latents, a VAE of Wan's kind.

Its conditioning: text (B, T, d) of as many tokens as the longest prompt of the batch has; mask (B, T), which are there.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.loaders import QwenImageLoraLoaderMixin
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

from rewardfl.backbones import images
from rewardfl.backbones.flux import pack, unpack
from rewardfl.backbones.images import EXPERT, PATCH, Configs, Kind
from rewardfl.backbones.seam import Conditioning, ExpertOnMeta, Shape

TOKENS = 128  # of a prompt, for the estimate alone: prompts are as long as they are


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, _ = pipe.encode_prompt(prompt, device=device)
    return {"text": text, "mask": torch.ones(text.shape[:2], dtype=torch.long, device=device)}


def _ask(x: Tensor, times: Tensor, told: Conditioning, guidance: float | None) -> dict[str, Any]:
    frame = [(1, x.shape[2] // PATCH, x.shape[3] // PATCH)]
    mask = told["mask"]
    return {
        "hidden_states": pack(x),
        "timestep": times.to(x.dtype) / 1000,  # rounded twice, as the pipeline does
        "guidance": None if guidance is None else times.new_full((len(x),), guidance),
        "encoder_hidden_states": told["text"],
        "encoder_hidden_states_mask": None if mask.all() else mask,  # as the pipeline does it: other kernels with one
        "img_shapes": [frame] * len(x),
    }


def _guide(velocity: Tensor, away: Tensor, scale: float) -> Tensor:
    """Guidance that leaves each token's length as it was."""
    towards, away = pack(velocity.squeeze(2)), pack(away.squeeze(2))
    guided = away + scale * (towards - away)
    guided = guided * (towards.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    return unpack(guided, velocity.squeeze(2)).unsqueeze(2)


def _decode(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return vae.decode(latents / (1 / std).to(latents) + mean.to(latents), return_dict=False)[0]


def _told_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    model: Any = encoders["text_encoder"].model  # its eyes stay closed
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    text = model.language_model(input_ids=ids).last_hidden_state
    return {"text": text, "mask": torch.ones(1, TOKENS, dtype=torch.long, device="meta")}


def _network_on_meta(configs: Configs, dtype: torch.dtype, shape: Shape) -> tuple[ExpertOnMeta, ...]:
    config = configs[EXPERT]
    head, width = config["attention_head_dim"], config["num_attention_heads"] * config["attention_head_dim"]
    tokens = shape[2] // PATCH * (shape[3] // PATCH)
    empty = partial(torch.empty, dtype=dtype, device="meta")
    x, time = empty(1, shape[0], *shape[2:], requires_grad=True), torch.empty(1, device="meta")
    inputs = {
        "hidden_states": pack(x),
        "timestep": time,
        "encoder_hidden_states": empty(1, TOKENS, config["joint_attention_dim"]),
        "img_shapes": [[(1, shape[2] // PATCH, shape[3] // PATCH)]],
    }
    hidden, context = empty(1, tokens, width, requires_grad=True), empty(1, TOKENS, width, requires_grad=True)
    embedding = empty(1, width)
    rotary = [torch.empty(n, head // 2, dtype=torch.complex64, device="meta") for n in (tokens, TOKENS)]
    return (
        ExpertOnMeta(
            count=config["num_layers"],
            tokens=tokens + TOKENS,
            build=partial(images.empty_as_trained, QwenImageTransformer2DModel, {**config, "num_layers": 1}, dtype),
            x=x,
            run=lambda model: model(**inputs, return_dict=False)[0],
            blocks=lambda model: model.transformer_blocks,
            block_inputs=(hidden, context),
            block_shared=(embedding, *rotary),
            run_block=lambda block: list(block(hidden, context, None, embedding, tuple(rotary))),
        ),
    )


QWEN_IMAGE = Kind(
    published="Qwen-Image",
    pipeline="QwenImagePipeline",
    mixin=QwenImageLoraLoaderMixin,
    transformer=QwenImageTransformer2DModel,
    block_classes=("QwenImageTransformerBlock",),
    layer_names={
        **images.ATTENTION, "ffn.0": "img_mlp.net.0.proj", "ffn.2": "img_mlp.net.2", **images.JOINT,
    },
    encoders={"text_encoder": Qwen2_5_VLForConditionalGeneration},
    encode=_encode,
    ask=_ask,
    answer=unpack,
    guide=_guide,
    vae=AutoencoderKLQwenImage,
    decode=_decode,
    network_on_meta=_network_on_meta,
    told_on_meta=_told_on_meta,
)  # fmt: skip

open, describe = partial(images.open, QWEN_IMAGE), partial(images.describe, QWEN_IMAGE)
