"""Read and check the LoRA that a run starts from (lora.init_from)."""

from collections.abc import Sequence

from rewardfl import lora
from rewardfl.backbones.protocol import Adapter, Backbone
from rewardfl.config.schema import LoraConfig
from rewardfl.weights import lora_files, merge
from rewardfl.weights.shards import InputError


def read_initial_adapters(
    settings: LoraConfig, backbone: Backbone, names: Sequence[str], targets: Sequence[str]
) -> dict[str, lora_files.Lora]:
    """Read the headers of lora.init_from, and return {expert: the LoRA that its adapter starts from}; {} without.

    names: the trained experts. targets: the layers with an adapter. Raise InputError where the experts, rank, alpha,
    layers or shapes differ from the run's.
    """
    if settings.init_from is None:
        return {}
    where = f"lora.init_from: {settings.init_from}"
    loras = lora_files.read_lora(settings.init_from)
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
        _check_init(where, adapter, rank, alpha, backbone.adapter_shapes(expert, layers))
    return by_expert


def _check_init(where: str, adapter: lora_files.Lora, rank: int, alpha: float, expected: dict[str, tuple]) -> None:
    """Raise InputError unless the LoRA has this rank and alpha, and exactly the `expected` tensors, {name: shape}."""
    shapes = {}
    for name, update in adapter.updates.items():
        if update.down is None or update.up is None or len(update.sources()) > 2:
            raise InputError(f"{where}: {name} has more than a low-rank update, such as a bias or a magnitude")
        if update.rank != rank or update.scale != alpha / rank:
            raise InputError(
                f"{where} has rank {update.rank} and alpha {update.scale * update.rank:g} in {name}, this run "
                f"lora.lora_rank {rank} and lora.lora_alpha {alpha:g}; set them to the same"
            )
        shapes[f"{name}.lora_A.{lora.POLICY}.weight"] = tuple(update.down.shape)
        shapes[f"{name}.lora_B.{lora.POLICY}.weight"] = tuple(update.up.shape)
    if differing := sorted(shapes.items() ^ expected.items()):
        name, shape = differing[0]
        other = f"{name} of shape {shape} is only in one of the two"
        raise InputError(f"{where} has other layers than lora.lora_target_modules gives in this model: {other}")
    merge.check_finite(adapter)
