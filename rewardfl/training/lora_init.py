"""Read and check the LoRA that a run starts from (lora.init_from)."""

from collections.abc import Sequence

from rewardfl import lora
from rewardfl.backbones.protocol import Adapter, Backbone
from rewardfl.config.schema import LoraConfig
from rewardfl.weights import lora_files
from rewardfl.weights.shards import InputError


def read_initial_adapters(
    settings: LoraConfig, backbone: Backbone, names: Sequence[str], targets: Sequence[str]
) -> dict[str, lora_files.Lora]:
    """Read the headers of lora.init_from, and return {expert: the LoRA that its adapter starts from}; {} without.

    names: the trained experts. targets: the layers with an adapter. Raise InputError if one differs from the run's.
    """
    if settings.init_from is None:
        return {}
    where = f"lora.init_from: {settings.init_from}"
    loras = lora.read_for(backbone.empty_expert(names[0]), settings.init_from)
    if len(loras) == len(names) == 1 and loras[0].expert is None:
        loras = lora_files.assign_expert(loras, names[0])
    by_expert = {adapter.expert: adapter for adapter in loras if adapter.expert is not None}
    if by_expert.keys() != set(names):
        has = ", ".join(sorted(adapter.expert or "unknown" for adapter in loras))
        raise InputError(
            f"{where} is for {has}, model.trainable_models for {', '.join(names)}; give an adapter of these experts"
        )
    rank, alpha = settings.lora_rank, settings.lora_alpha or settings.lora_rank
    layers = Adapter(rank, tuple(targets))
    for expert, adapter in by_expert.items():
        named = backbone.adapter_shapes(expert, layers).items()
        shapes = {name.replace(f".{lora.POLICY}.", "."): shape for name, shape in named}
        lora.check_fits(where, adapter, rank, alpha, shapes)
        backbone.check_not_merged(expert, adapter)
    return by_expert
