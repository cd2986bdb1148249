"""LoRA files of every tool that trains Wan: one reader for all their names, one normal form.

What the files call a module, where they keep alpha and how they say which expert they mean differs between
diffusers, peft, ComfyUI, DiffSynth, ROLL, musubi/kohya, VideoX-Fun and others. `read_lora` resolves every key or
refuses the file: a key that is skipped is an update that is silently lost. torch only, so that the merge tools stay
small; tensors are read when they are needed.
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from rewardfl import shards, wan_names
from rewardfl.shards import Entry, Refused

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"  # diffusers' name of a LoRA file
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32,
}  # fmt: skip

# what tools put before a module's name; the two that name the low-noise expert say so
_CONTAINERS = {
    "pipe.dit2.": "low_noise",
    "transformer_2.": "low_noise",
    "pipe.dit.": None,
    "transformer.": None,
    "base_model.model.": None,
    "model.diffusion_model.": None,
    "diffusion_model.": None,
    "lora_unet__": None,
    "lora_unet_": None,
}
# what ends a key, after the module's name: the role of the tensor. An adapter's name may stand before `.weight`.
_ROLES = [
    (r"\.(?:lora_A|lora_down|lora\.down)(?:\.[\w-]+)?\.weight", "down"),
    (r"\.(?:lora_B|lora_up|lora\.up)(?:\.[\w-]+)?\.weight", "up"),
    (r"\.lora_B(?:\.[\w-]+)?\.bias", "up_bias"),
    (r"\.alpha", "alpha"),
    (r"\.diff", "diff"),
    (r"\.diff_b", "diff_b"),
    (r"\.diff_m", "diff_m"),
    (r"\.(?:dora_scale|lora_magnitude_vector(?:\.[\w-]+)?(?:\.weight)?)", "magnitude"),
]
_FOREIGN = r"\.(?:lokr_|hada_|oft_|boft|lora_mid|set_weight|w_norm|b_norm|reshape_weight|on_input|vera_|lora_E)"

Source = Entry | Tensor


def load(source: Source) -> Tensor:
    """The tensor, in float32 on the CPU."""
    if isinstance(source, Tensor):
        return source.float()
    if source.dtype not in TORCH_DTYPES:
        raise Refused(f"{source.file}: tensor {source.name} has dtype {source.dtype}; give the LoRA unquantised")
    values = torch.frombuffer(source.read(), dtype=TORCH_DTYPES[source.dtype])
    return values.reshape(source.shape).float()


def as_bytes(values: Tensor) -> memoryview:
    """The bytes of a tensor as a safetensors file holds them."""
    return memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Update:
    """What a LoRA does to one module, named as in diffusers: weight += scale * up @ down, and so on.

    A `magnitude` makes it a DoRA. `diff` and `diff_b` are added to weight and bias, `diff` of a module
    `...scale_shift_table` to the table itself. up: (out, r, ...), down: (r, in, ...).
    """

    module: str
    down: Source | None = None
    up: Source | None = None
    scale: float = 1.0
    up_bias: Source | None = None
    magnitude: Source | None = None
    diff: Source | None = None
    diff_b: Source | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def sources(self) -> dict[str, Source]:
        named = {role: getattr(self, role) for role in ("down", "up", "up_bias", "magnitude", "diff", "diff_b")}
        return {role: source for role, source in named.items() if source is not None}


@dataclass(frozen=True)
class Lora:
    """One expert's updates. expert: high_noise, low_noise or None where the file does not say."""

    path: Path
    expert: str | None
    updates: dict[str, Update]
    alpha_source: str  # where the scale comes from, for the user to see
    dialect: str  # a sample key
    notes: tuple[str, ...] = field(default=())


# ------------------------------------------------------------------------------------------------------------
# Names


def resolve(name: str) -> str | None:
    """diffusers' name of the module that a LoRA calls `name`, in either naming, with dots or all underscores."""
    if wan_names.to_original(name) is not None:
        return name
    if (found := wan_names.to_diffusers(name)) is not None:
        return found
    return _flattened(name)


def _flattened(name: str) -> str | None:
    """Undo kohya's replacement of dots by underscores, by exact lookup: every flattened name is unique."""
    if found := re.fullmatch(r"blocks[_.](\d+)[_.](.+)", name):
        return _FLAT_BLOCK[found[2]].format(found[1]) if found[2] in _FLAT_BLOCK else None
    return _FLAT_TOP.get(name)


def _flat_tables() -> tuple[dict[str, str], dict[str, str]]:
    block = {
        alias.replace(".", "_"): "blocks.{}." + new for old, new in wan_names.BLOCK.items() for alias in (old, new)
    }
    top = {alias.replace(".", "_"): new for old, new in wan_names.TOP.items() for alias in (old, new)}
    return block, top


_FLAT_BLOCK, _FLAT_TOP = _flat_tables()


def _split(key: str) -> tuple[str, str, str | None] | None:
    """(bare module name, role, expert) of a LoRA key; None when its ending is not known."""
    for pattern, role in _ROLES:
        if found := re.fullmatch(r"(.+?)" + pattern, key):
            name, expert = found[1], None
            while container := next((c for c in _CONTAINERS if name.startswith(c)), None):
                name, expert = name.removeprefix(container), _CONTAINERS[container] or expert
            return name, role, expert
    return None


def expert_in_path(path: Path) -> str | None:
    """The expert that a file's name or the folders around it speak of; None when they name none, or both."""
    for part in (path.stem, path.parent.name, path.parent.parent.name):
        if part in ("transformer", "transformer_2"):
            return "low_noise" if part == "transformer_2" else "high_noise"
        words = set(re.findall(r"(?<![a-z])(high|low)(?=[^a-z]|noise|$)", part.lower()))
        if words:
            return f"{words.pop()}_noise" if len(words) == 1 else None
    return None


# ------------------------------------------------------------------------------------------------------------
# Reading


def read_lora(path: str | Path, alpha: float | None = None) -> list[Lora]:
    """All LoRAs that a file or folder holds, one per expert, in the normal form.

    path: a .safetensors or torch file, a peft adapter folder, a folder with one LoRA file, or a checkpoint of
    train_reward_fl.py. alpha: used where the file says nothing (else alpha is the rank). Refused: keys that no
    Wan module answers to, missing halves, ranks that disagree, LoKr, LoHa and other maths, contradicting alphas.
    """
    path = Path(path)
    if path.is_dir():
        return [lora for file in _files_in(path) for lora in read_lora(file, alpha)]
    if not path.is_file():
        raise Refused(f"no LoRA at {path}")
    sources, metadata = _open(path)
    config = path.parent / "adapter_config.json"
    adapter_config = json.loads(config.read_text()) if config.is_file() else {}
    sorted_keys: dict[str | None, dict[str, dict[str, Source]]] = {}
    both = any(key.startswith(("transformer_2.", "pipe.dit2.")) for key in sources)
    for key, source in sources.items():
        if re.search(_FOREIGN, key) or key.startswith("lycoris_"):
            raise Refused(
                f"{path}: {key} belongs to LoKr, LoHa, OFT or another method; only LoRA, DoRA and full differences "
                "can be merged. Merge it with the tool that trained it"
            )
        parts = _split(key)
        module = resolve(parts[0]) if parts else None
        if parts and parts[1] == "diff_m":  # on the block, or on the head, whose table is the top level's
            module = "scale_shift_table" if parts[0] == "head" else f"{parts[0]}.scale_shift_table"
            module = module if wan_names.to_original(module) else None
        if not parts or module is None:
            raise Refused(
                f"{path}: {key} names no module of a Wan transformer (as {parts[0] if parts else key!r}); nothing was "
                "merged, because a key that is skipped is lost silently"
            )
        role, expert = ("diff" if parts[1] == "diff_m" else parts[1]), parts[2]
        if both and expert is None:
            expert = "high_noise"  # `transformer.` next to `transformer_2.`
        found = sorted_keys.setdefault(expert, {}).setdefault(module, {})
        if role in found:
            raise Refused(f"{path}: two keys give the {role} of {module}, the second is {key}")
        found[role] = source
    if not sorted_keys:
        raise Refused(f"{path} holds no tensors")
    loras = []
    for expert, modules in sorted_keys.items():
        component = "transformer_2" if both and expert == "low_noise" else "transformer"
        alphas = _Alphas(path, metadata, adapter_config, component, alpha)
        updates = {module: _update(path, module, roles, alphas) for module, roles in modules.items()}
        loras.append(
            Lora(path, expert or expert_in_path(path.absolute()), updates, alphas.summary(), next(iter(sources)))
        )
    return loras


def _files_in(folder: Path) -> list[Path]:
    """The LoRA files of a folder: our checkpoint's one per expert, peft's adapter, a pair by name, or the only one."""
    ours = [folder / part / WEIGHTS_NAME for part in ("transformer", "transformer_2")]
    if found := [file for file in ours if file.is_file()]:
        return found
    for name in (WEIGHTS_NAME, "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    if (folder / "checkpoints" / "latest").is_dir():
        raise Refused(f"{folder} is a run; give one of its checkpoints, such as {folder / 'checkpoints' / 'latest'}")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 2 and {expert_in_path(file) for file in files} == {"high_noise", "low_noise"}:
        return files  # as Lightning and tools/convert_lora.py lay them out
    if len(files) != 1:
        raise Refused(f"{folder} holds {len(files)} safetensors files; name the LoRA that you mean")
    return files


def _open(path: Path) -> tuple[dict[str, Source], dict[str, str]]:
    if path.suffix == ".safetensors":
        return shards.read_header(path)
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise Refused(f"{path} is not a flat dictionary of tensors; give the LoRA's state dict")
    return state, {}


def _update(path: Path, module: str, roles: dict[str, Source], alphas: "_Alphas") -> Update:
    shape = {role: tuple(source.shape) for role, source in roles.items()}
    for one, other in (("down", "up"), ("up", "down"), ("up_bias", "up"), ("alpha", "up"), ("magnitude", "up")):
        if one in roles and other not in roles:
            raise Refused(f"{path}: {module} has {one} {shape[one]} but no {other}; the file is incomplete")
    scale = 1.0
    if "down" in roles:
        if len(shape["up"]) < 2 or shape["up"][1] != shape["down"][0]:
            raise Refused(
                f"{path}: {module} has down {shape['down']} and up {shape['up']}; their ranks (rows of down, columns "
                "of up) must agree"
            )
        scale = alphas.scale(module, shape["down"][0], roles.get("alpha"))
    values = {role: source for role, source in roles.items() if role != "alpha"}
    return Update(module, scale=scale, **values)


class _Alphas:
    """Where each module's scale alpha / rank (rslora: alpha / sqrt(rank)) comes from, and what was used."""

    def __init__(
        self, path: Path, metadata: dict[str, str], adapter_config: dict, component: str, fallback: float | None
    ):
        self.path, self.fallback = path, fallback
        self.used: dict[str, int] = {}
        self.config, self.config_name = adapter_config, "adapter_config.json"
        if "lora_adapter_metadata" in metadata:
            stored = json.loads(metadata["lora_adapter_metadata"])
            found = {k.removeprefix(f"{component}."): v for k, v in stored.items() if k.startswith(f"{component}.")}
            self.config, self.config_name = found or stored, "the file's metadata"
        self.kohya = metadata.get("ss_network_alpha"), metadata.get("ss_network_dim")

    def scale(self, module: str, rank: int, key: Source | None) -> float:
        stored = self._stored(module)
        alpha, source = float(rank), "nowhere: alpha = rank"
        if key is not None:
            alpha, source = float(load(key).reshape(())), "the .alpha keys"
            if stored is not None and stored != alpha:
                raise Refused(
                    f"{self.path}: {module} has .alpha {alpha:g}, {self.config_name} says lora_alpha {stored:g}; "
                    "remove the one that is wrong"
                )
        elif stored is not None:
            alpha, source = stored, self.config_name
        elif self.kohya[0] not in (None, "None") and self.kohya[1] not in (None, "None", "Dynamic"):
            alpha, source = float(self.kohya[0]) * rank / float(self.kohya[1]), "ss_network_alpha / ss_network_dim"
        elif self.fallback is not None:
            alpha, source = self.fallback, "--alpha"
        if not source.startswith(("nowhere", "--alpha")) and self.fallback not in (None, alpha):
            raise Refused(f"{self.path}: {source} say alpha {alpha:g} for {module}, --alpha says {self.fallback:g}")
        if not alpha > 0:
            raise Refused(
                f"{self.path}: alpha of {module} is {alpha:g} (from {source}); tools read 0 as rank or as nothing, so "
                "write the alpha that was trained with"
            )
        self.used[source] = self.used.get(source, 0) + 1
        return alpha / rank**0.5 if self.config.get("use_rslora") else alpha / rank

    def _stored(self, module: str) -> float | None:
        """lora_alpha of peft's configuration, with its per-module pattern."""
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            # as peft.utils.get_pattern_key does; trainers on the original code wrote original names
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (module, wan_names.to_original(module))):
                return float(value)
        alpha = self.config.get("lora_alpha")
        return None if alpha is None else float(alpha)

    def summary(self) -> str:
        return ", ".join(f"{source} ({count})" for source, count in self.used.items()) or "no low-rank updates"


def assign(loras: list[Lora], expert: str | None) -> list[Lora]:
    """The LoRAs with their expert set to `expert` where they do not name one. Refused where they name another."""
    if expert is None:
        return loras
    for lora in loras:
        if lora.expert not in (None, expert):
            raise Refused(f"{lora.path} is for the {lora.expert} expert, not for {expert}")
    return [replace(lora, expert=expert) for lora in loras]
