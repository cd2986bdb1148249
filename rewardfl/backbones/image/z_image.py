"""Z-Image: Qwen3's text features, one network on a list of samples, which tells time and direction the other way round.

Its conditioning: text (B, T, d) of as many tokens as the longest prompt of the batch has; mask (B, T), which are there.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.loaders import ZImageLoraLoaderMixin
from torch import Tensor, nn
from transformers import Qwen3Model

from rewardfl.backbones.image.pipeline import (
    ATTENTION,
    EXPERT,
    PATCH,
    Configs,
    ImageModelSpec,
    describe,
    open,
    pixels_per_latent,
)
from rewardfl.backbones.protocol import Conditioning

# The length to which diffusers' pipeline pads a prompt for the text encoder alone, and that of a prompt for the
# estimate: prompts are as long as they are. The network pads both streams of tokens to multiples of 32.
PADDED, TOKENS, MULTIPLE = 512, 128, 32


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    (text,), _ = pipe.encode_prompt(
        prompt, device=device, do_classifier_free_guidance=False, max_sequence_length=PADDED
    )
    return {"text": text[None], "mask": torch.ones(1, len(text), dtype=torch.long, device=device)}


def _ask(x: Tensor, times: Tensor, told: Conditioning, guidance: float | None) -> dict[str, Any]:
    lengths = told["mask"].sum(1).tolist()
    return {
        "x": list(x.unsqueeze(2)),
        "t": (1000 - times) / 1000,  # from 0, noise, to 1
        "cap_feats": [text[:length] for text, length in zip(told["text"], lengths, strict=True)],
    }


def _guide(velocity: Tensor, away: Tensor, scale: float) -> Tensor:
    """Guidance at the pipeline's scale, 1 less than the field's: it counts what is added to the velocity."""
    return velocity + scale * (velocity - away)


def _longest_side(configs: Configs) -> int:
    """The longest side that images may have in pixels, by the rows and columns that the network can tell apart."""
    return min(configs[EXPERT]["axes_lens"][1:]) * PATCH * pixels_per_latent(configs)


def _told_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    ids = torch.zeros(1, PADDED, dtype=torch.long, device="meta")
    text = encoders["text_encoder"](ids, output_hidden_states=True).hidden_states[-2]
    return {"text": text[:, :TOKENS], "mask": torch.ones(1, TOKENS, dtype=torch.long)}


Z_IMAGE = ImageModelSpec(
    published="Z-Image",
    pipeline="ZImagePipeline",
    mixin=ZImageLoraLoaderMixin,
    transformer=ZImageTransformer2DModel,
    block_classes=("ZImageTransformerBlock",),
    layer_names={
        **ATTENTION, "ffn.0": "feed_forward.w1", "ffn.2": "feed_forward.w2", "ffn.3": "feed_forward.w3",
    },
    encoders={"text_encoder": Qwen3Model},
    encode=_encode,
    ask=_ask,
    answer=lambda output, x: -torch.stack(list(output)).squeeze(2),  # it answers x0 - noise
    guide=_guide,
    sigmas=lambda steps: torch.linspace(1, 1 / steps, steps).tolist(),  # float32, as the pipeline's own
    longest_side=_longest_side,
    told_on_meta=_told_on_meta,
    streams=("x",),
)  # fmt: skip

open, describe = partial(open, Z_IMAGE), partial(describe, Z_IMAGE)
