"""Z-Image: Qwen3's text features, one network on a list of samples, which tells time and direction the other way round.

Its conditioning: text (B, T, d) of as many tokens as the longest prompt of the batch has; mask (B, T), which are there.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.loaders import ZImageLoraLoaderMixin
from torch import Tensor, nn
from transformers import Qwen3Model

from rewardfl.backbones import images
from rewardfl.backbones.images import EXPERT, PATCH, Configs, Kind
from rewardfl.backbones.seam import Adapter, Conditioning, ExpertOnMeta, Shape

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


def _answer(output: Sequence[Tensor], x: Tensor) -> Tensor:
    return -torch.stack(list(output)).squeeze(2)  # it answers x0 - noise


def _guide(velocity: Tensor, away: Tensor, scale: float) -> Tensor:
    """Guidance at the pipeline's scale, 1 less than the field's: it counts what is added to the velocity."""
    return velocity + scale * (velocity - away)


def _longest_side(configs: Configs) -> int:
    """The longest side that images may have in pixels, by the rows and columns that the network can tell apart."""
    return min(configs[EXPERT]["axes_lens"][1:]) * PATCH * images.pixels_per_latent(configs)


def _told_on_meta(configs: Configs, encoders: Mapping[str, nn.Module]) -> Conditioning:
    ids = torch.zeros(1, PADDED, dtype=torch.long, device="meta")
    text = encoders["text_encoder"](ids, output_hidden_states=True).hidden_states[-2]
    return {"text": text[:, :TOKENS], "mask": torch.ones(1, TOKENS, dtype=torch.long, device="meta")}


def _one_block(
    config: Mapping[str, Any], dtype: torch.dtype, kept: str, adapter: Adapter | None
) -> ZImageTransformer2DModel:
    """A network of one block, of the list called `kept`, on the meta device."""
    model = images.empty(ZImageTransformer2DModel, {**config, "n_layers": 1, "n_refiner_layers": 1})
    for name in {"noise_refiner", "context_refiner", "layers"} - {kept}:
        setattr(model, name, nn.ModuleList())
    return images.on_meta_as_trained(model, dtype, adapter)


def _network_on_meta(configs: Configs, dtype: torch.dtype, shape: Shape) -> tuple[ExpertOnMeta, ...]:
    """Three kinds of blocks: for the image alone, for the text alone, which are told no time, and for both."""
    config = configs[EXPERT]
    width, head = config["dim"], config["dim"] // config["n_heads"]
    tokens = -(shape[2] // PATCH * (shape[3] // PATCH) // -MULTIPLE) * MULTIPLE
    empty = partial(torch.empty, dtype=dtype, device="meta")
    x, time = empty(*shape, requires_grad=True), torch.empty(1, device="meta")
    text, embedding = empty(TOKENS, config["cap_feat_dim"]), empty(1, min(width, 256))
    kinds = {
        "noise_refiner": (config["n_refiner_layers"], tokens, (embedding,)),
        "context_refiner": (config["n_refiner_layers"], TOKENS, ()),
        "layers": (config["n_layers"], tokens + TOKENS, (embedding,)),
    }

    def expert(kept: str, count: int, length: int, told: tuple[Tensor, ...]) -> ExpertOnMeta:
        hidden = empty(1, length, width, requires_grad=True)
        rotary = torch.empty(1, length, head // 2, dtype=torch.complex64, device="meta")
        return ExpertOnMeta(
            count=count,
            tokens=tokens + TOKENS,
            build=partial(_one_block, config, dtype, kept),
            x=x,
            run=lambda model: model([x], time, [text], return_dict=False)[0][0],
            blocks=attrgetter(kept),
            block_inputs=(hidden,),
            block_shared=(rotary, *told),
            run_block=lambda block: [block(hidden, None, rotary, *told)],
        )

    return tuple(expert(kept, *rest) for kept, rest in kinds.items() if rest[0])


Z_IMAGE = Kind(
    published="Z-Image",
    pipeline="ZImagePipeline",
    mixin=ZImageLoraLoaderMixin,
    transformer=ZImageTransformer2DModel,
    block_classes=("ZImageTransformerBlock",),
    layer_names={
        **images.ATTENTION, "ffn.0": "feed_forward.w1", "ffn.2": "feed_forward.w2", "ffn.3": "feed_forward.w3",
    },
    encoders={"text_encoder": Qwen3Model},
    encode=_encode,
    ask=_ask,
    answer=_answer,
    guide=_guide,
    sigmas=lambda steps: torch.linspace(1, 1 / steps, steps).tolist(),  # float32, as the pipeline's own
    longest_side=_longest_side,
    network_on_meta=_network_on_meta,
    told_on_meta=_told_on_meta,
)  # fmt: skip

open, describe = partial(images.open, Z_IMAGE), partial(images.describe, Z_IMAGE)
