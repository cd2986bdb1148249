"""Z-Image: one network on a list of samples, with reversed time and velocity.

Its conditioning: text (B, T, d), T the tokens of the batch's longest prompt; mask (B, T) of the tokens of each prompt.
"""

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.loaders import ZImageLoraLoaderMixin
from torch import Tensor
from transformers import Qwen3Model

from rewardfl.backbones.image.pipeline import ATTENTION, PATCH, ImageModelSpec
from rewardfl.backbones.protocol import Conditioning

# A prompt's padded length in the text encoder of diffusers' pipeline, and its length for the estimate; the network's
# prompts are not padded.
PADDED, TOKENS = 512, 128


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    (text,), _ = pipe.encode_prompt(
        prompt, device=device, do_classifier_free_guidance=False, max_sequence_length=PADDED
    )
    return {"text": text[None], "mask": torch.ones(1, len(text), dtype=torch.long, device=device)}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    lengths = conditioning["mask"].sum(1).tolist()
    return {
        "x": list(x.unsqueeze(2)),
        "t": (1000 - times) / 1000,  # from 0, noise, to 1
        "cap_feats": [text[:length] for text, length in zip(conditioning["text"], lengths, strict=True)],
    }


def _guide(velocity: Tensor, away: Tensor, scale: float) -> Tensor:
    """Apply guidance; the pipeline's scale is the usual one less 1."""
    return velocity + scale * (velocity - away)


Z_IMAGE = ImageModelSpec(
    published="Z-Image",
    pipeline="ZImagePipeline",
    mixin=ZImageLoraLoaderMixin,
    transformer=ZImageTransformer2DModel,
    block_classes=("ZImageTransformerBlock",),
    layer_names={**ATTENTION, "ffn.0": "feed_forward.w1", "ffn.2": "feed_forward.w2", "ffn.3": "feed_forward.w3"},
    encoders={"text_encoder": Qwen3Model},
    encode=_encode,
    inputs=_model_inputs,
    velocity=lambda output, x: -torch.stack(list(output)).squeeze(2),  # the output is x0 - noise
    guide=_guide,
    sigmas=lambda steps: torch.linspace(1, 1 / steps, steps).tolist(),  # float32, as the pipeline's own
    longest_side=lambda network: min(network["axes_lens"][1:]) * PATCH,  # rows and columns
    tokens=lambda limits: {"text_encoder": PADDED},
    prompt_tokens={"tokenizer": PADDED - 3},  # "<|im_start|>user\n" comes before the prompt
    shapes=lambda network, tokens: {"text": (TOKENS, network["cap_feat_dim"]), "mask": (TOKENS,)},
    streams=("x",),
)  # fmt: skip
