"""The names of Wan's tensors are diffusers' own, one to one, and LoRAs may use all forms of them."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from rewardfl.weights import lora_files, wan_names


@pytest.mark.parametrize("image_dim, count", [(None, 1095), (1280, 1303)])
def test_names_are_those_of_diffusers_converter(image_dim, count):
    """All tensors of Wan2.2-I2V-A14B, and of Wan2.1-I2V with its image projections."""
    with torch.device("meta"):
        model = WanTransformer3DModel(
            in_channels=36, image_dim=image_dim, added_kv_proj_dim=5120 if image_dim else None
        )
    names = list(model.state_dict())
    assert len(names) == count
    converted = convert_wan_transformer_to_diffusers({wan_names.to_original(name): name for name in names})
    assert all(new == name for new, name in converted.items())
    assert [wan_names.to_diffusers(wan_names.to_original(name)) for name in names] == names
    for name in names:
        module = name.removesuffix(".weight").removesuffix(".bias")
        original = wan_names.to_original(module)
        for alias in (module, original, original.replace(".", "_")):
            assert lora_files.resolve_name(alias) == module
