"""FLUX.2 klein: Qwen3's text features, one network on packed latents, a VAE that normalises them patch by patch.

Its latents are the VAE's, of 32 channels, as they are sampled: normalised. The stock pipeline holds the same numbers as
patches of 128 channels. Its conditioning: text (B, 512, 3 d), three of the encoder's layers side by side.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.loaders import Flux2LoraLoaderMixin
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from rewardfl.backbones import images
from rewardfl.backbones.flux import pack, unpack
from rewardfl.backbones.images import EXPERT, PATCH, Configs, Kind
from rewardfl.backbones.seam import Conditioning, ExpertOnMeta, Shape

TOKENS, LAYERS = 512, (9, 18, 27)  # the length that diffusers' pipeline pads prompts to; of the text encoder


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, _ = pipe.encode_prompt(prompt, device=device, max_sequence_length=TOKENS, text_encoder_out_layers=LAYERS)
    return {"text": text}


def _ask(x: Tensor, times: Tensor, told: Conditioning, guidance: float | None) -> dict[str, Any]:
    def places(*sizes: int) -> Tensor:  # time, height, width, word
        return torch.cartesian_prod(*(torch.arange(n, device=x.device) for n in sizes)).expand(len(x), -1, -1)

    return {
        "hidden_states": pack(x),
        "timestep": times.to(x.dtype) / 1000,  # rounded twice, as the pipeline does
        "guidance": None if guidance is None else times.new_full((len(x),), guidance),
        "encoder_hidden_states": told["text"],
        "txt_ids": places(1, 1, 1, told["text"].shape[1]),
        "img_ids": places(1, x.shape[2] // PATCH, x.shape[3] // PATCH, 1),
    }


def _mu(tokens: int, steps: int, scheduler: Mapping[str, Any]) -> float:
    """By diffusers' compute_empirical_mu: between two lines, those of 10 and of 200 steps; the latter for large images.

    The order of the operations is diffusers', to the last bit.
    """
    at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    slope = (at_200 - at_10) / 190.0
    return slope * steps + (at_200 - 200.0 * slope)


def _decode(vae: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
    """The VAE's batch normalisation is never run: its statistics are those of the latents that the network knows."""
    flat = latents.squeeze(2)
    mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    flat = unpack(pack(flat) * std.to(flat) + mean.to(flat), flat)
    return vae.decode(flat, return_dict=False)[0].unsqueeze(2)


def _told_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # with its cache, which `encode` does without: transformers looks into the numbers of a mask otherwise
    hidden = encoders["text_encoder"](ids, output_hidden_states=True).hidden_states
    return {"text": torch.cat([hidden[layer] for layer in LAYERS], -1)}


def _network_on_meta(configs: Configs, dtype: torch.dtype, shape: Shape) -> tuple[ExpertOnMeta, ...]:
    """Two kinds of blocks: of two streams, and of one. What modulates them is shared by all blocks of a kind."""
    config = configs[EXPERT]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = shape[2] // PATCH * (shape[3] // PATCH)
    empty = partial(torch.empty, dtype=dtype, device="meta")
    x, time = empty(1, shape[0], *shape[2:], requires_grad=True), torch.empty(1, device="meta")
    told = {"text": empty(1, TOKENS, config["joint_attention_dim"])}
    asked = _ask(x, time, told, 1.0 if config["guidance_embeds"] else None)
    hidden, context, both = (empty(1, n, width, requires_grad=True) for n in (tokens, TOKENS, TOKENS + tokens))
    of_image, of_text, of_both = (empty(1, n * width) for n in (6, 6, 3))
    rotary = tuple(torch.empty(TOKENS + tokens, config["attention_head_dim"], device="meta") for _ in range(2))
    kinds = {
        "num_layers": (
            "transformer_blocks",
            (hidden, context),
            (of_image, of_text),
            lambda block: list(block(hidden, context, of_image, of_text, rotary)),
        ),
        "num_single_layers": (
            "single_transformer_blocks",
            (both,),
            (of_both,),
            lambda block: [block(both, None, of_both, rotary)],
        ),
    }
    return tuple(
        ExpertOnMeta(
            count=config[key],
            tokens=tokens + TOKENS,
            build=partial(
                images.empty_as_trained,
                Flux2Transformer2DModel,
                {**config, **{other: int(other == key) for other in kinds}},
                dtype,
            ),
            x=x,
            run=lambda model: model(**asked, return_dict=False)[0],
            blocks=attrgetter(name),
            block_inputs=inputs,
            block_shared=(*shared, *rotary),
            run_block=run,
        )
        for key, (name, inputs, shared, run) in kinds.items()
        if config[key]
    )


FLUX2_KLEIN = Kind(
    published="FLUX.2 klein",
    pipeline="Flux2KleinPipeline",
    mixin=Flux2LoraLoaderMixin,
    transformer=Flux2Transformer2DModel,
    block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    layer_names={
        **images.ATTENTION, "ffn.0": "ff.linear_in", "ffn.2": "ff.linear_out", **images.JOINT,
        "qkv_mlp": "to_qkv_mlp_proj", "o_mlp": "attn.to_out",
    },
    encoders={"text_encoder": Qwen3ForCausalLM},
    encode=_encode,
    ask=_ask,
    answer=unpack,
    vae=AutoencoderKLFlux2,
    decode=_decode,
    mu=_mu,
    network_on_meta=_network_on_meta,
    told_on_meta=_told_on_meta,
)  # fmt: skip

open, describe = partial(images.open, FLUX2_KLEIN), partial(images.describe, FLUX2_KLEIN)
