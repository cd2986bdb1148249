"""The models that can be trained, by their `model.model_name`. Each is imported on demand."""

import importlib

from rewardfl.backbones.protocol import Backbone, Source
from rewardfl.config import did_you_mean
from rewardfl.weights.shards import InputError

_WAN = "rewardfl.backbones.wan.backbone"
MODULES = dict.fromkeys(("wan2_2", "wan2_2_t2v", "wan2_2_ti2v", "wan2_2_ti2v_text", "wan2_1_i2v", "wan2_1_t2v"), _WAN)
MODULES |= {  # module and specification
    "sd3": "rewardfl.backbones.image.sd3:SD3",
    "flux": "rewardfl.backbones.image.flux:FLUX",
    "qwen_image": "rewardfl.backbones.image.qwen_image:QWEN_IMAGE",
    "flux2_klein": "rewardfl.backbones.image.flux2:FLUX2_KLEIN",
    "z_image": "rewardfl.backbones.image.z_image:Z_IMAGE",
}


def open(name: str, source: Source) -> Backbone:
    """Open a model by its files' headers. Raise InputError for a file that cannot be used."""
    if spec := _image_spec(name):
        return importlib.import_module("rewardfl.backbones.image.pipeline").open_image_model(spec, name, source)
    return importlib.import_module(_WAN).open_wan(name, source)


def describe(name: str, source: Source) -> Backbone:
    """Return the model of a folder's configurations, without weights; without such a folder the published one."""
    if spec := _image_spec(name):
        return importlib.import_module("rewardfl.backbones.image.pipeline").describe_image_model(spec, name, source)
    return importlib.import_module(_WAN).describe_wan(name, source)


def _image_spec(name: str):
    """Return the specification of an image model, None for a Wan."""
    if name not in MODULES:
        hint = did_you_mean(name, MODULES) or "; set it to one of them"
        raise InputError(f"model.model_name must be {' or '.join(MODULES)}, got {name[:80]!r}{hint}")
    module, _, spec = MODULES[name].partition(":")
    return getattr(importlib.import_module(module), spec) if spec else None
