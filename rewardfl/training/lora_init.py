"""Read and check the LoRA that a run starts from (lora.init_from)."""

from rewardfl import lora
from rewardfl.backbones.protocol import Adapter, Backbone
from rewardfl.config import AnyConfig
from rewardfl.training import plan
from rewardfl.weights import lora_files, merge
from rewardfl.weights.shards import Refused

# Model and adapter


def read_initial_adapters(cfg: AnyConfig, backbone: Backbone) -> dict[str, lora_files.Lora]:
    """{expert: the LoRA that its adapter starts from} of lora.init_from, by their headers; empty without one.

    Refused where they are not of the trained experts, or not of the adapter's rank, alpha, layers and shapes.
    """
    if cfg.lora.init_from is None:
        return {}
    names, where = plan.trained_experts(cfg, backbone.experts), f"lora.init_from: {cfg.lora.init_from}"
    found = lora_files.read_lora(cfg.lora.init_from)
    if len(found) == len(names) == 1 and found[0].expert is None:
        found = lora_files.assign(found, names[0])
    if {one.expert for one in found} != set(names):
        has = ", ".join(sorted(one.expert or "unknown" for one in found))
        raise Refused(
            f"{where} is for {has}, model.trainable_models {cfg.model.trainable_models} for {', '.join(names)}; give "
            "an adapter of these experts"
        )
    rank, alpha = cfg.lora.lora_rank, cfg.lora.lora_alpha or cfg.lora.lora_rank
    adapter = Adapter(rank, tuple(plan.lora_targets(cfg, backbone)))
    for one in found:
        _check_init(where, one, rank, alpha, backbone.adapter_shapes(one.expert, adapter))
    return {one.expert: one for one in found}


def _check_init(where: str, given: lora_files.Lora, rank: int, alpha: float, wanted: dict[str, tuple]) -> None:
    """Refused unless the LoRA is one of this rank and alpha, with exactly the `wanted` tensors, {name: shape}."""
    shapes = {}
    for name, update in given.updates.items():
        if update.sources().keys() != {"down", "up"}:
            raise Refused(f"{where}: {name} has more than a low-rank update; an adapter has no bias and no magnitude")
        if update.rank != rank or update.scale != alpha / rank:
            raise Refused(
                f"{where} has rank {update.rank} and alpha {update.scale * update.rank:g} in {name}, this run "
                f"lora.lora_rank {rank} and lora.lora_alpha {alpha:g}; set them to the same"
            )
        shapes[f"{name}.lora_A.{lora.POLICY}.weight"] = tuple(update.down.shape)
        shapes[f"{name}.lora_B.{lora.POLICY}.weight"] = tuple(update.up.shape)
    if differing := sorted(shapes.items() ^ wanted.items()):
        name, shape = differing[0]
        raise Refused(
            f"{where} has other layers, or other shapes, than lora.lora_target_modules gives in this model, for "
            f"instance {name} of shape {shape} in one of the two"
        )
    merge.check_finite(given)
