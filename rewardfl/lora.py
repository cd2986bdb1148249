"""LoRA adapters on a model's experts: inject, switch off for the reference, load what a run has saved."""

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
from safetensors import safe_open
from torch import Tensor, nn

from rewardfl.memory.sharding import full_tensor
from rewardfl.weights import adapter_config
from rewardfl.weights.lora_files import Lora, load_tensor
from rewardfl.weights.shards import Refused

POLICY = "default"  # the name of the adapter that is trained
DISTILLED = "distilled"  # of one that belongs to the base model
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"


def target_modules(names: str, short_names: Mapping[str, str]) -> list[str]:
    """diffusers' module names of a comma-separated list of such names, or short ones: {short name: diffusers' name}."""
    return [short_names.get(name.strip(), name.strip()) for name in names.split(",")]


def check_targets(targets: Sequence[str], linear_layers: Sequence[str], short_names: Mapping[str, str]) -> None:
    """Refused when one of the targets (diffusers' names, as from target_modules) is no layer's name, or its end."""
    for target in targets:
        if not any(_is_meant(target, name) for name in linear_layers):
            examples = list(short_names.values()) or list(linear_layers)[:3]
            short = f"{', '.join(short_names)} or " if short_names else ""
            raise Refused(
                f"lora.lora_target_modules: {target[:80]!r} matches no linear layer of the transformer; "
                f"use {short}diffusers names such as {', '.join(examples)}"
            )


def _is_meant(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


class MasterLinear(nn.Linear):
    """A linear layer that computes in its input's dtype, by a cast of its weight, which may be of a higher precision.

    The gradient of the weight has the weight's own dtype. For the backward pass it keeps its input as it came, which
    the layers beside it keep, too, and no copy of it in the weight's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class PreciseLinear(nn.Linear):
    """A linear layer that computes in its weight's dtype, by a cast of its input, and answers in that dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


def _compute_as(kind: type[nn.Linear], layer: BaseTunerLayer, adapter: str) -> None:
    """Let an adapter's matrices be of this kind, with the same parameters; peft casts the layer's input no more."""
    for matrices in (layer.lora_A, layer.lora_B):
        weight = matrices[adapter].weight
        with torch.device("meta"):
            linear = kind(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = weight
        matrices[adapter] = linear
    layer.cast_input_dtype_enabled = False


def inject(model: ModelMixin, rank: int, alpha: float, targets: list[str], seed: int) -> None:
    """Freeze `model` and add a trainable LoRA, in float32 whatever the base's dtype; it changes nothing yet (B = 0).

    A bfloat16 LoRA would lose most updates: an Adam step of 2.5e-6 on a weight of 0.01 is below its rounding. It
    computes in the base's dtype all the same, from one cast for each forward pass: docs/results/lora_dtype.md.
    Refused when a target matches no module of the blocks.
    """
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if isinstance(module, (nn.Linear, BaseTunerLayer))]
    check_targets(targets, layers, {})
    meant = {target: [name for name in modules if _is_meant(target, name)] for target in targets}
    # what ends the name of one block's layer may end that of another's list of layers, which peft does not take
    names = [
        name
        for target, found in meant.items()
        for name in ([target] if set(found) <= set(layers) else [one for one in found if one in layers])
    ]
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names), adapter_name=POLICY)
    for layer in _layers(model):  # peft activates the last adapter alone; a distillation stays on beside it
        layer._active_adapter = [name for name in (DISTILLED, POLICY) if name in layer.lora_A]
        if POLICY in layer.lora_A:
            _compute_as(MasterLinear, layer, POLICY)
    cast_training_params(model, torch.float32)


def attach_frozen(model: ModelMixin, distilled: Lora) -> None:
    """Add a distillation LoRA that answers in policy and reference alike and is never trained or saved.

    Refused when it holds more than plain low-rank updates, or does not fit the model.
    """
    odd = [name for name, update in distilled.updates.items() if update.sources().keys() != {"down", "up"}]
    if odd:
        raise Refused(
            f"{distilled.path}: {odd[0]} has more than a low-rank update (a bias, a difference or a DoRA magnitude); "
            "set model.distill_lora_mode: fuse"
        )
    modules = dict(model.named_modules())
    for name, update in distilled.updates.items():
        shape = (update.up.shape[0], *update.down.shape[1:])
        if name not in modules or tuple(modules[name].weight.shape) != shape:
            raise Refused(f"{distilled.path}: {name} of shape {shape} is no layer of the model; it is for another one")
    ranks = {name: update.rank for name, update in distilled.updates.items()}
    alphas = {name: update.scale * update.rank for name, update in distilled.updates.items()}
    config = LoraConfig(
        r=max(ranks.values()), lora_alpha=1, target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=alphas
    )
    model.add_adapter(config, adapter_name=DISTILLED)
    for name in distilled.updates:
        layer = model.get_submodule(name)
        # float32 whatever the base's dtype, as the trained adapter is: peft makes them in the base's
        layer.lora_A[DISTILLED].float()
        layer.lora_B[DISTILLED].float()
        _compute_as(PreciseLinear, layer, DISTILLED)
    set_peft_model_state_dict(model, _matrices(distilled), adapter_name=DISTILLED)
    model.requires_grad_(False)


def _layers(model: nn.Module) -> list[BaseTunerLayer]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


@contextlib.contextmanager
def reference(model: nn.Module) -> Iterator[None]:
    """Within, the policy adapter does not answer; other adapters (a distillation LoRA) stay on.

    Only peft's list of active adapters changes: peft's own disable and enable touch requires_grad of every
    adapter. A checkpointed forward recomputes with whatever is active then: one made within is backpropagated within
    (seam.Velocity.reference does this), one made outside is backpropagated outside.
    """
    layers = _layers(model)
    active = [list(layer.active_adapters) for layer in layers]
    for layer, names in zip(layers, active, strict=True):
        layer._active_adapter = [name for name in names if name != POLICY]
    try:
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer._active_adapter = names


def set_strength(model: nn.Module, strength: float) -> None:
    """Let the policy adapter, where the model has one, count `strength` times what it was trained to; 1: as it was."""
    for layer in _layers(model):
        if POLICY in layer.lora_A:
            layer.set_scale(POLICY, strength)


def adapter_state(model: ModelMixin) -> dict[str, Tensor]:
    """The policy adapter's weights by diffusers name (blocks.0.attn1.to_q.lora_A.weight, ...), whole, on the CPU.

    On all processes: under FSDP each has a part of them.
    """
    state = get_peft_model_state_dict(model, adapter_name=POLICY)
    return {name: full_tensor(value.detach()).cpu().contiguous() for name, value in state.items()}


def order_metadata(path: Path) -> None:
    """Bring a safetensors file's metadata into the order of its names, so that equal adapters are equal files.

    safetensors keeps metadata in a hash map, whose order differs each time. The header is padded as it does it.
    """
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def load_adapter(model: ModelMixin, folder: Path) -> None:
    """Fill an injected adapter from an expert's folder of a checkpoint. ValueError: other rank, alpha or layers."""
    state, metadata = read_adapter(folder / WEIGHTS_NAME)
    config = model.peft_config[POLICY]
    if metadata["r"] != config.r or metadata["lora_alpha"] != config.lora_alpha:
        raise ValueError(
            f"{folder / WEIGHTS_NAME} has rank {metadata['r']} and alpha {metadata['lora_alpha']}, the run's config "
            f"lora.lora_rank {config.r} and lora.lora_alpha {config.lora_alpha}; they must be the same"
        )
    expected = adapter_state(model)
    if state.keys() != expected.keys():
        raise ValueError(
            f"{folder / WEIGHTS_NAME} covers other layers than lora.lora_target_modules, for instance "
            f"{sorted(state.keys() ^ expected.keys())[0]!r}"
        )
    set_peft_model_state_dict(model, state, adapter_name=POLICY)


def start_from(model: ModelMixin, given: Lora) -> None:
    """Fill an injected adapter with a LoRA of its rank, scale and layers (start.init_adapters has compared them)."""
    set_peft_model_state_dict(model, _matrices(given), adapter_name=POLICY)


def _matrices(given: Lora) -> dict[str, Tensor]:
    """By peft's names."""
    state: dict[str, Tensor] = {}
    for name, one in given.updates.items():
        state |= {f"{name}.lora_A.weight": load_tensor(one.down), f"{name}.lora_B.weight": load_tensor(one.up)}
    return state


def read_adapter(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Weights by diffusers name without the `transformer.` prefix, and the peft configuration saved with them."""
    if not path.is_file():
        raise FileNotFoundError(f"no adapter at {path}")
    with safe_open(path, "pt") as file:
        state = {name.removeprefix("transformer."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config, _ = adapter_config.read_adapter_config(path, file.metadata(), "transformer", {})
        metadata = json.loads(file.metadata()[adapter_config.IN_FILE])
    if config.alphas or len(config.ranks) > 1 or config.use_rslora or config.use_dora or config.lora_bias:
        raise Refused(f"{path} has more than one rank and alpha for all layers; merge it with tools/merge_lora.py")
    return state, {name.removeprefix("transformer."): value for name, value in metadata.items()}


def attach_adapter(model: ModelMixin, folder: Path) -> None:
    """Add a saved adapter to a plain transformer, for inference."""
    _, metadata = read_adapter(folder / WEIGHTS_NAME)
    inject(model, metadata["r"], metadata["lora_alpha"], sorted(metadata["target_modules"]), seed=0)
    load_adapter(model, folder)
