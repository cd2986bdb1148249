"""LoRA adapters on a model's experts: inject, switch off for the reference, load from a checkpoint."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from diffusers import ModelMixin
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from rewardfl.memory.sharding import full_tensor
from rewardfl.weights import adapter_config
from rewardfl.weights.lora_files import WEIGHTS_NAME, Lora, load_tensor, read_lora
from rewardfl.weights.shards import InputError

POLICY = "default"  # the trained adapter's name in peft
DISTILLED = "distilled"  # a distillation LoRA's: part of the base model


def target_modules(names: str, short_names: Mapping[str, str]) -> list[str]:
    """Return diffusers' module names of a comma-separated list of short names (`short_names`) or diffusers' names."""
    return [short_names.get(name.strip(), name.strip()) for name in names.split(",")]


def check_targets(targets: Sequence[str], linear_layers: Sequence[str], short_names: Mapping[str, str]) -> None:
    """Raise InputError for a target (diffusers' name) that is neither a linear layer's name nor the end of one."""
    for target in targets:
        if not any(_matches(target, name) for name in linear_layers):
            examples = list(short_names.values()) or list(linear_layers)[:3]
            short = f"{', '.join(short_names)} or " if short_names else ""
            raise InputError(
                f"lora.lora_target_modules: {target[:80]!r} matches no linear layer of the transformer; "
                f"use {short}diffusers names such as {', '.join(examples)}"
            )


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


class MasterLinear(nn.Linear):
    """A linear layer that casts its weight, of higher precision, and computes in its input's dtype.

    The backward pass keeps the input itself, shared with neighbouring layers, and no copy in the weight's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class PreciseLinear(nn.Linear):
    """A linear layer that casts its input, and computes and returns in its weight's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


def _compute_as(linear_class: type[nn.Linear], layer: BaseTunerLayer, adapter: str) -> None:
    """Replace an adapter's matrices by layers of a class, with the same parameters; peft stops casting inputs."""
    for matrices in (layer.lora_A, layer.lora_B):
        weight = matrices[adapter].weight
        with torch.device("meta"):
            linear = linear_class(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight
        matrices[adapter] = linear
    layer.cast_input_dtype_enabled = False


def inject(model: ModelMixin, rank: int, alpha: float, targets: list[str], seed: int) -> None:
    """Freeze `model` and add a trainable LoRA, in float32 for any dtype of the base; it changes nothing yet (B = 0).

    A bfloat16 LoRA would lose most updates: an Adam step of 2.5e-6 on a weight of 0.01 is below its rounding. It still
    computes in the base's dtype. Raise InputError for a target that matches no module of the blocks.
    """
    modules, layers = dict(model.named_modules()), _linear_layers(model)
    check_targets(targets, layers, {})
    names: list[str] = []
    for target in targets:
        matches = [name for name in modules if _matches(target, name)]
        # a target may also end the name of a list of layers, which peft refuses
        names += [target] if set(matches) <= set(layers) else [name for name in matches if name in layers]
    model.requires_grad_(requires_grad=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), adapter_name=POLICY)
    for layer in _layers(model):  # peft activates only the last adapter; a distillation LoRA must stay on
        layer._active_adapter = [name for name in (DISTILLED, POLICY) if name in layer.lora_A]
        if POLICY in layer.lora_A:
            _compute_as(MasterLinear, layer, POLICY)
    cast_training_params(model, torch.float32)


def _linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, BaseTunerLayer))]


def attach_frozen(model: ModelMixin, distilled: Lora) -> None:
    """Add a distillation LoRA, which fits the model, to policy and reference; it is never trained or saved.

    Raise InputError if it holds more than plain low-rank updates.
    """
    for name, update in distilled.updates.items():
        if update.sources().keys() != {"down", "up"}:
            raise InputError(
                f"{distilled.path}: {name} has more than a low-rank update (a bias, a difference or a DoRA magnitude); "
                "set model.distill_lora_mode: fuse"
            )
    ranks = {name: update.rank for name, update in distilled.updates.items()}
    alphas = {name: update.scale * update.rank for name, update in distilled.updates.items()}
    config = LoraConfig(
        r=max(ranks.values()), lora_alpha=1, target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=alphas
    )
    model.add_adapter(config, adapter_name=DISTILLED)
    for name in distilled.updates:
        layer = model.get_submodule(name)
        # float32 as in the trained adapter; peft makes them in the base's dtype
        layer.lora_A[DISTILLED].float()
        layer.lora_B[DISTILLED].float()
        _compute_as(PreciseLinear, layer, DISTILLED)
    set_peft_model_state_dict(model, _peft_state(distilled), adapter_name=DISTILLED)
    model.requires_grad_(requires_grad=False)


def _layers(model: nn.Module) -> list[BaseTunerLayer]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextlib.contextmanager
def reference(model: nn.Module) -> Iterator[None]:
    """Disable the policy adapter within the context; other adapters (a distillation LoRA) stay on.

    Only peft's list of active adapters changes: peft's disable and enable also set requires_grad of every adapter. A
    checkpointed forward is recomputed with the adapters active then. Backpropagate a forward made within the context
    within it (as protocol.Velocity.reference does), and one made outside, outside.
    """
    active = [(layer, list(layer.active_adapters)) for layer in _layers(model)]
    for layer, names in active:
        layer._active_adapter = [name for name in names if name != POLICY]
    try:
        yield
    finally:
        for layer, names in active:
            layer._active_adapter = names


def set_strength(model: nn.Module, strength: float) -> None:
    """Scale the policy adapter, if the model has one, to `strength` times its trained effect."""
    for layer in _layers(model):
        if POLICY in layer.lora_A:
            layer.set_scale(POLICY, strength)


def adapter_state(model: ModelMixin) -> dict[str, Tensor]:
    """Return the policy adapter's full weights on the CPU by diffusers name (blocks.0.attn1.to_q.lora_A.weight, ...).

    Collective: under FSDP each process has a part of them.
    """
    state = get_peft_model_state_dict(model, adapter_name=POLICY)
    return {name: full_tensor(value.detach()).cpu().contiguous() for name, value in state.items()}


def order_metadata(path: Path) -> None:
    """Order a safetensors file's metadata by name, so that equal adapters are equal files.

    safetensors keeps metadata in a hash map, whose order differs each time. The header is padded as in safetensors.
    """
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def read_for(model: ModelMixin, path: str | Path) -> list[Lora]:
    """Read LoRAs that must be for a model, by its own layers' names, too. Raise InputError as read_lora."""
    family = adapter_config.stated_family(type(model).__name__) or type(model).__name__
    return read_lora(path, base={family: _linear_layers(model)})


def check_fits(where: str, adapter: Lora, rank: int, alpha: float, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise InputError unless a LoRA has this rank and alpha, and exactly these tensors of peft's, {name: shape}."""
    actual: dict[str, tuple[int, ...]] = {}
    for name, update in adapter.updates.items():
        if update.sources().keys() != {"down", "up"}:
            raise InputError(f"{where}: {name} has more than a low-rank update, such as a bias or a magnitude")
        if update.rank != rank or update.scale != alpha / rank:
            raise InputError(
                f"{where} has rank {update.rank} and alpha {update.scale * update.rank:g} in {name}, this run "
                f"lora.lora_rank {rank} and lora.lora_alpha {alpha:g}; set them to the same"
            )
        up, down = update.factors
        actual |= {f"{name}.lora_A.weight": tuple(down.shape), f"{name}.lora_B.weight": tuple(up.shape)}
    expected = {name: tuple(shape) for name, shape in shapes.items()}
    if differing := sorted(actual.items() ^ expected.items()):
        name, shape = differing[0]
        other = f"{name} of shape {shape} is only in one of the two"
        raise InputError(f"{where} has other layers than lora.lora_target_modules gives in this model: {other}")


def load_adapter(model: ModelMixin, folder: Path) -> None:
    """Fill an injected adapter from an expert's checkpoint folder. Raise InputError for other rank, alpha or layers."""
    (adapter,) = read_for(model, folder / WEIGHTS_NAME)
    _fill(model, adapter)


def _fill(model: ModelMixin, adapter: Lora) -> None:
    """Fill an injected adapter with a LoRA. Raise InputError as check_fits."""
    config, shapes = model.peft_config[POLICY], {name: value.shape for name, value in adapter_state(model).items()}
    check_fits(str(adapter.path), adapter, config.r, config.lora_alpha, shapes)
    start_from(model, adapter)


def start_from(model: ModelMixin, adapter: Lora) -> None:
    """Fill an injected adapter with a LoRA of its rank, scale and layers (fitting is checked at start)."""
    set_peft_model_state_dict(model, _peft_state(adapter), adapter_name=POLICY)


def _peft_state(adapter: Lora) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, update in adapter.updates.items():
        up, down = update.factors
        state |= {f"{name}.lora_A.weight": load_tensor(down), f"{name}.lora_B.weight": load_tensor(up)}
    return state


def attach_adapter(model: ModelMixin, adapter: Lora) -> None:
    """Add a LoRA of one rank and alpha to a plain transformer, for inference. Raise InputError for another one."""
    pairs = {(update.rank, update.scale) for update in adapter.updates.values() if update.down is not None}
    if len(pairs) != 1 or any(update.sources().keys() != {"down", "up"} for update in adapter.updates.values()):
        raise InputError(
            f"{adapter.path} has more than low-rank updates of one rank and alpha; merge it with tools/merge_lora.py"
        )
    ((rank, scale),) = pairs
    inject(model, rank, scale * rank, sorted(adapter.updates), seed=0)
    _fill(model, adapter)
