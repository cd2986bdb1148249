"""FLUX.1: two text encoders, one network on packed latents, guidance that the network is told (dev) or none (schnell).

Its conditioning: text (B, 512, d) of T5; pooled (B, p) of CLIP.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from rewardfl.backbones import images
from rewardfl.backbones.images import EXPERT, PATCH, Configs, Kind
from rewardfl.backbones.seam import Conditioning, ExpertOnMeta, Shape

CLIP_TOKENS, T5_TOKENS = 77, 512  # the lengths that diffusers' pipeline pads prompts to


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, pooled, _ = pipe.encode_prompt(prompt, None, device=device, max_sequence_length=T5_TOKENS)
    return {"text": text, "pooled": pooled}


def _ask(x: Tensor, times: Tensor, told: Conditioning, guidance: float | None) -> dict[str, Any]:
    tokens = pack(x)
    height, width = x.shape[2] // PATCH, x.shape[3] // PATCH
    places = torch.zeros(height, width, 3, device=x.device, dtype=x.dtype)
    places[..., 1] += torch.arange(height, device=x.device, dtype=x.dtype)[:, None]
    places[..., 2] += torch.arange(width, device=x.device, dtype=x.dtype)
    return {
        "hidden_states": tokens,
        "timestep": times.to(x.dtype) / 1000,  # rounded twice, as the pipeline does
        "guidance": None if guidance is None else times.new_full((len(x),), guidance),
        "pooled_projections": told["pooled"],
        "encoder_hidden_states": told["text"],
        "txt_ids": x.new_zeros(told["text"].shape[1], 3),
        "img_ids": places.flatten(0, 1),
    }


def pack(x: Tensor) -> Tensor:
    """(B, C, h, w) -> (B, hw / 4, 4 C): the four latents of a patch side by side."""
    batch, channels, height, width = x.shape
    patches = x.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // PATCH**2, channels * PATCH**2)


def unpack(tokens: Tensor, x: Tensor) -> Tensor:
    """The tokens in the shape of x, (B, C, h, w)."""
    batch, channels, height, width = x.shape
    patches = tokens.view(batch, height // PATCH, width // PATCH, channels, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(x.shape)


def _told_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    lengths = {"text_encoder": CLIP_TOKENS, "text_encoder_2": T5_TOKENS}
    tokens = {name: torch.zeros(1, length, dtype=torch.long, device="meta") for name, length in lengths.items()}
    found = {name: encoders[name](tokens[name]) for name in lengths}
    return {"text": found["text_encoder_2"][0], "pooled": found["text_encoder"].pooler_output}


def _network_on_meta(configs: Configs, dtype: torch.dtype, shape: Shape) -> tuple[ExpertOnMeta, ...]:
    """Two kinds of blocks: of two streams, and of one."""
    config = configs[EXPERT]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = shape[2] // PATCH * (shape[3] // PATCH)
    empty = partial(torch.empty, dtype=dtype, device="meta")
    x, time = empty(1, shape[0], *shape[2:], requires_grad=True), torch.empty(1, device="meta")
    told = {
        "text": empty(1, T5_TOKENS, config["joint_attention_dim"]),
        "pooled": empty(1, config["pooled_projection_dim"]),
    }
    asked = _ask(x, time, told, 1.0 if config["guidance_embeds"] else None)
    hidden, context = empty(1, tokens, width, requires_grad=True), empty(1, T5_TOKENS, width, requires_grad=True)
    embedding = empty(1, width)
    rotary = [torch.empty(T5_TOKENS + tokens, config["attention_head_dim"], device="meta") for _ in range(2)]
    layers = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"}
    return tuple(
        ExpertOnMeta(
            count=config[key],
            tokens=tokens + T5_TOKENS,
            build=partial(
                images.empty_as_trained,
                FluxTransformer2DModel,
                {**config, **{other: int(other == key) for other in layers.values()}},
                dtype,
            ),
            x=x,
            run=lambda model: model(**asked, return_dict=False)[0],
            blocks=attrgetter(name),
            block_inputs=(hidden, context),
            block_shared=(embedding, *rotary),
            run_block=lambda block: list(block(hidden, context, embedding, tuple(rotary))),
        )
        for name, key in layers.items()
        if config[key]
    )


FLUX = Kind(
    published="FLUX.1",
    pipeline="FluxPipeline",
    mixin=FluxLoraLoaderMixin,
    transformer=FluxTransformer2DModel,
    block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    layer_names={
        **images.ATTENTION, "ffn.0": "ff.net.0.proj", "ffn.2": "ff.net.2", **images.JOINT, "mlp": "proj_mlp",
    },
    encoders={"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel},
    tokenizers=("tokenizer", "tokenizer_2"),
    encode=_encode,
    ask=_ask,
    answer=unpack,
    network_on_meta=_network_on_meta,
    told_on_meta=_told_on_meta,
)  # fmt: skip

open, describe = partial(images.open, FLUX), partial(images.describe, FLUX)
