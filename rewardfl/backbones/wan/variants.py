"""The published Wan models that can be trained, and their differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# the names of Wan's original code, as Alibaba's ROLL and DiffSynth configure them
LAYERS = {
    "q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
}  # fmt: skip

TWO_EXPERTS = {"high_noise": "transformer", "low_noise": "transformer_2"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model, of any size."""

    published: str  # its name
    parts: Mapping[str, str] = field(default_factory=lambda: {"transformer": "transformer"})  # as Backbone.parts
    # how a clip's first frame is an input: as channels next to the noisy ones, or as the first latent frame
    image: Literal["none", "channels", "frame"] = "none"
    clip: bool = False  # whether CLIP's features of the first frame are an input, too
    token_times: bool = False  # whether each token has its own timestep
    frame_rate: float = 16.0  # sample_fps of its configuration in Wan-AI's code

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.parts)

    @property
    def layer_names(self) -> Mapping[str, str]:
        """Return {short name: diffusers' name} of the layers that a LoRA adapts."""
        # the attention to CLIP's features
        return LAYERS | {"k_img": "add_k_proj", "v_img": "add_v_proj"} if self.clip else LAYERS

    @property
    def original_parts(self) -> tuple[str, ...]:
        """Return the keys of a json file with the original files; the experts first, in their order."""
        experts = [f"{name}_model" for name in self.parts] if len(self.parts) > 1 else ["transformer"]
        return (*experts, "text_encoder", "vae", *(["image_encoder"] if self.clip else []))

    def in_channels(self, transformer: Mapping[str, Any], temporal: int) -> int:
        """Return a network's input channels; temporal: the VAE's factor, which is the mask's channels."""
        latents: int = transformer["out_channels"]
        return 2 * latents + temporal if self.image == "channels" else latents


# by model.model_name
VARIANTS = {
    "wan2_2": Variant(published="Wan2.2-I2V-A14B", parts=TWO_EXPERTS, image="channels"),
    "wan2_2_t2v": Variant(published="Wan2.2-T2V-A14B", parts=TWO_EXPERTS),
    "wan2_2_ti2v": Variant(published="Wan2.2-TI2V-5B", image="frame", token_times=True, frame_rate=24.0),
    # the same model without an image
    "wan2_2_ti2v_text": Variant(published="Wan2.2-TI2V-5B", token_times=True, frame_rate=24.0),
    "wan2_1_i2v": Variant(published="Wan2.1-I2V-14B", image="channels", clip=True),
    "wan2_1_t2v": Variant(published="Wan2.1-T2V"),
}
