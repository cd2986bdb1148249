"""LoRA files of every tool that trains Wan, SD3, FLUX.1 or Qwen-Image: one reader for all names, one normal form.

Each tool has its names of modules, its place for alpha and its mark of the expert. `read_lora` resolves every key or
refuses the file: a skipped key is an update that is silently lost.
"""

import hashlib
import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewardfl.file_kinds import first_line, foreign_path_hint, wrong_kind
from rewardfl.weights import adapter_config, image_names, shards, wan_names
from rewardfl.weights.adapter_config import AdapterConfig
from rewardfl.weights.image_names import ModuleSlice
from rewardfl.weights.shards import Entry, InputError, abbreviate

MERGED = "rewardfl_merged"  # in a merged checkpoint's metadata: the content_digest of each LoRA in it
WEIGHTS_NAME = "pytorch_lora_weights.safetensors"  # diffusers' name of a LoRA file

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32,
}  # fmt: skip

# what may precede a module's name; two of the prefixes mean the low-noise expert
_LOW_NOISE = ("pipe.dit2.", "transformer_2.")
_PREFIXES = (
    r"((?P<low>pipe\.dit2\.|transformer_2\.)|pipe\.dit\.|transformer\.|base_model\.model\.|(model\.)?diffusion_model\.|"
    r"lora_unet__?|lora_transformer_)*"
)

# the end of a key and the role of its tensor; an adapter's name may precede `.weight`
_ROLES = [
    (r"\.(?:lora_A|lora_down|lora\.down|down)(?:\.[\w-]+)?\.weight", "down"),
    (r"\.(?:lora_B|lora_up|lora\.up|up)(?:\.[\w-]+)?\.weight", "up"),
    (r"\.lora_B(?:\.[\w-]+)?\.bias", "up_bias"),
    (r"\.alpha", "alpha"),
    (r"\.diff", "diff"),
    (r"\.diff_b", "diff_b"),
    (r"\.diff_m", "diff_m"),
    (r"\.dora_scale", "dora_scale"),
    (r"\.lora_magnitude_vector(?:\.[\w-]+)?(?:\.weight)?", "magnitude"),
]
WAN = "Wan"
_FLOAT32 = torch.finfo(torch.float32)  # a scale must fit into it

# errors of torch.load on a damaged file: its readers of zip and pickle check little
_DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, RuntimeError, ValueError, LookupError,
    TypeError, AttributeError, AssertionError, ArithmeticError, OSError,
)  # fmt: skip
_Source = Entry | Tensor
Base = Mapping[str, Collection[str]]
_Key = tuple[str, str, str | None]  # bare module name, role and expert of a LoRA's key


def load_tensor(source: _Source) -> Tensor:
    """Load a tensor in float32 on the CPU. Raise InputError for a dtype that is not known."""
    if isinstance(source, Tensor):
        return source.float()
    if source.dtype not in TORCH_DTYPES:
        raise InputError(f"{source.file}: tensor {source.name} has dtype {source.dtype}; give the LoRA unquantised")
    raw = torch.empty(source.nbytes, dtype=torch.uint8)  # aligned by torch: the last bit of products depends on it
    if len(raw):
        source.read_into(raw.numpy().data)
    return raw.view(TORCH_DTYPES[source.dtype]).reshape(source.shape).float()


def as_bytes(values: Tensor) -> memoryview:
    """Return the bytes of a tensor as a safetensors file holds them."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class Update:
    """A LoRA's change of one module, named as in diffusers: weight += scale * up @ down, and so on.

    up: (out, r, ...), down: (r, in, ...). A `magnitude` makes it a DoRA of the outputs (the weight's rows) or, where
    wd_on_output is False, of the inputs (its columns). `diff` is added to the weight, or to the table of a module
    `...scale_shift_table`; `diff_b` is added to the bias.
    """

    module: str
    down: _Source | None = None
    up: _Source | None = None
    scale: float = 1.0
    up_bias: _Source | None = None
    magnitude: _Source | None = None
    wd_on_output: bool = True
    diff: _Source | None = None
    diff_b: _Source | None = None

    @property
    def factors(self) -> tuple[_Source, _Source]:
        """Return (up, down) of an update that has them."""
        assert self.up is not None and self.down is not None
        return self.up, self.down

    @property
    def rank(self) -> int:
        return self.factors[1].shape[0]

    def sources(self) -> dict[str, _Source]:
        named = {role: getattr(self, role) for role in ("down", "up", "up_bias", "magnitude", "diff", "diff_b")}
        return {role: source for role, source in named.items() if source is not None}

    def biases(self) -> list[tuple[_Source, float]]:
        """Return the tensors added to the bias, and their factors: peft scales up_bias as the product, not diff_b."""
        scaled = [(self.up_bias, self.scale), (self.diff_b, 1.0)]
        return [(source, factor) for source, factor in scaled if source is not None]


@dataclass(frozen=True, kw_only=True)
class Lora:
    """One expert's updates."""

    path: Path
    models: tuple[str, ...]  # whose names the keys are; several where they share them
    expert: str | None  # None where the file does not say it, or the model has one expert
    updates: dict[str, Update]
    alpha_source: str  # text for users
    notes: tuple[str, ...] = ()
    expert_by_name: bool = False  # the file's name gives the expert, not its keys
    statements: Mapping[str, str] = field(default_factory=dict)  # by adapter_config.read_statements

    @property
    def is_wan(self) -> bool:
        return WAN in self.models

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that were read: the LoRA's, and peft's configuration next to it, if there."""
        config = self.path.with_name(adapter_config.CONFIG_NAME)
        return (self.path, config) if config.is_file() else (self.path,)


def _flat(table: Mapping[str, str]) -> dict[str, str]:
    """Return {either name with underscores for its dots, as kohya writes it: diffusers' name}; all are unique."""
    return {alias.replace(".", "_"): new for old, new in table.items() for alias in (old, new)}


_FLAT_BLOCK, _FLAT_TOP = _flat(wan_names.BLOCK), _flat(wan_names.TOP)


def resolve_name(name: str) -> str | None:
    """Return diffusers' name of a LoRA's module; the LoRA may use either naming, with dots or all underscores."""
    table, prefix = _FLAT_TOP, ""
    if block := re.fullmatch(r"blocks[_.](\d+)[_.](.+)", name):
        table, prefix, name = _FLAT_BLOCK, f"blocks.{block[1]}.", block[2]
    module = table.get(name.replace(".", "_"))
    return None if module is None else prefix + module


def _split(key: str) -> _Key:
    """Split a LoRA's key; the role is empty when its ending is not known."""
    for ending, role in _ROLES:
        if match := re.fullmatch(f"{_PREFIXES}(?P<name>.+?){ending}", key):
            name, expert = match["name"], "low_noise" if match["low"] else None
            # the table that the original code calls `modulation`, in a block or the head
            return (f"{name}.modulation", "diff", expert) if role == "diff_m" else (name, role, expert)
    return key, "", None


def expert_in_path(path: Path) -> str | None:
    """Return the expert by a file's name or the folders around it; None when they name none, or both.

    A bare `high` or `low` does not count: it may mean quality, rank, light or memory.
    """
    for part in (path.stem, path.parent.name, path.parent.parent.name):
        if part in ("transformer", "transformer_2"):
            return "low_noise" if part == "transformer_2" else "high_noise"
        words = set(re.findall(r"(?<![a-z])(high|low)[ _-]?noise(?![a-z])", part.lower()))
        if words:
            return f"{words.pop()}_noise" if len(words) == 1 else None
    return None


def read_lora(path: str | Path, alpha: float | None = None, base: Base | None = None) -> list[Lora]:
    """Read and check all LoRAs of a file or folder, one per expert, in the normal form.

    path: a .safetensors or torch file, a peft adapter folder, a folder with one LoRA file, or a checkpoint of
    a training script. alpha: used if the file lacks it (default: the rank). base: {the only model that it may be
    for: its layers, to read their names, too}. Raise InputError for a key that no module has, text encoders and
    methods such as LoKr. So too for parts that are missing or disagree, and values that are not finite.
    """
    path = Path(path)
    if path.is_dir():
        return [lora for file in _files_in(path) for lora in read_lora(file, alpha, base)]
    if not path.is_file():
        raise InputError(f"no LoRA at {path.absolute()}{foreign_path_hint(path)}")
    sources, metadata = _open(path)
    loras = _parse(path, sources, metadata, alpha, base or {})
    if infinite := [key for key, source in sources.items() if not bool(torch.isfinite(load_tensor(source)).all())]:
        raise InputError(f"{path}: {infinite[0]} has values that are nan or infinite; give an earlier checkpoint")
    return loras


def _parse(
    path: Path, sources: Mapping[str, _Source], metadata: Mapping[str, str], alpha: float | None, base: Base
) -> list[Lora]:
    keys = {key: _split(key) for key in sources}
    if not keys:
        raise InputError(f"{path} holds no tensors")
    rows = _count_rows(keys, sources)
    ranks = {key: sources[key].shape[0] for key, (_, role, _) in keys.items() if role == "down" and sources[key].shape}
    models, slices = _find_modules(path, keys, rows, base)
    by_expert: dict[str | None, dict[str, dict[str, _Source]]] = {}
    names: dict[str, str] = {}  # names of the modules in this file
    both = any(key.startswith(_LOW_NOISE) for key in sources)
    for key, (name, role, expert) in keys.items():
        if both and expert is None:
            expert = "high_noise"  # `transformer.` next to `transformer_2.`
        for part in slices[name]:
            roles = by_expert.setdefault(expert, {}).setdefault(part.module, {})
            if role in roles:
                raise InputError(f"{path}: two keys give the {role} of {part.module}, the second is {key}")
            roles[role] = _take_rows(path, key, role, sources[key], part, rows.get(name, 0))
            names[part.module] = name
    loras = []
    for expert, modules in by_expert.items():
        component = "transformer_2" if both and expert == "low_noise" else "transformer"
        config, note = adapter_config.read_adapter_config(path, metadata, component, ranks)
        alphas = _Alphas(path=path, config=config, names=names, kohya=_read_kohya(path, metadata), fallback=alpha)
        updates = {module: _update(path, module, roles, alphas) for module, roles in modules.items()}
        alphas.check_parts(updates)
        by_name = expert_in_path(path.absolute()) if WAN in models and expert is None else None
        base_key = adapter_config.STATEMENT_KEYS[2]
        trained_on = config.base_model_name_or_path or metadata.get(base_key, "")
        statements = adapter_config.read_statements({**metadata, base_key: trained_on})
        lora = Lora(
            path=path, models=_stated_models(path, models, statements), statements=statements,
            expert=expert or by_name, updates=updates,
            alpha_source=", ".join(f"{source} ({count})" for source, count in alphas.used.items()) or "no products",
            notes=() if note is None else (note,), expert_by_name=by_name is not None,
        )  # fmt: skip
        loras.append(lora)
    return loras


def _stated_models(path: Path, models: tuple[str, ...], statements: Mapping[str, str]) -> tuple[str, ...]:
    """Return the one of the models that the metadata names, if any. Raise InputError if it names another."""
    for key, text in statements.items():
        family = adapter_config.stated_family(text)
        if family is not None and family not in models:
            raise InputError(
                f"{path} is for {family} by its metadata ({key}: {abbreviate(text)}), not for {' or '.join(models)}"
            )
        models = (family,) if family else models
    return models


def content_digest(lora: Lora) -> str:
    """Return a digest of a LoRA's values with their scale: equal under other names and metadata."""
    digest = hashlib.blake2b(digest_size=16)
    for module, update in sorted(lora.updates.items()):
        for role, source in sorted(update.sources().items()):
            scale = update.scale if role in ("up", "up_bias") else 1.0
            digest.update(f"{module} {role}".encode())
            digest.update(as_bytes(load_tensor(source) * scale))
    return digest.hexdigest()


def is_merged(lora: Lora, metadata: Mapping[str, str]) -> bool:
    """Return whether a checkpoint's metadata lists a LoRA among those merged into it."""
    return MERGED in metadata and content_digest(lora) in metadata[MERGED]


def _count_rows(keys: Mapping[str, _Key], sources: Mapping[str, _Source]) -> dict[str, int]:
    """Return {name of a module: its outputs}, by its `up` or, without one, by its other tensors."""
    rows: dict[str, int] = {}
    for key, (name, role, _) in keys.items():
        if role not in ("down", "alpha") and (role == "up" or name not in rows):
            rows[name] = (sources[key].shape or (1,))[0]
    return rows


def _find_modules(
    path: Path, keys: Mapping[str, _Key], rows: Mapping[str, int], base: Base
) -> tuple[tuple[str, ...], dict[str, tuple[ModuleSlice, ...]]]:
    """Return (the models that have all of the names, {name: its modules in them}). Raise InputError if none has."""
    models = [*(base or (*image_names.IMAGE_MODELS, WAN))]
    slices: dict[str, dict[str, tuple[ModuleSlice, ...]]] = {}
    for key, (name, role, expert) in keys.items():
        outputs, before = rows.get(name, image_names.ALL_ROWS), models
        may_be_image = role and expert is None and models != [WAN] and not name.startswith("blocks")
        slices[name] = image_names.find_modules(name, outputs) if may_be_image else {}
        if role and (module := resolve_name(name)) is not None:
            slices[name][WAN] = (ModuleSlice(module),)
        slices[name] |= {model: (ModuleSlice(name),) for model, layers in base.items() if role and name in layers}
        models = [model for model in models if model in slices[name]]
        if not models:
            names = f"{' or '.join(before)}, whose names other keys have" if len(slices) > 1 else "a transformer"
            raise InputError(
                f"{path}: {abbreviate(key)} (as {abbreviate(name)}, {outputs} rows) names no module of {names}. LoRAs "
                f"of {WAN}, {', '.join(image_names.IMAGE_MODELS)} are read, without text encoders, LoKr or LoHa; merge "
                "others by the tool that trained them, or with pipe.fuse_lora"
            )
    if any(parts[model] != parts[models[0]] for parts in slices.values() for model in models):
        raise InputError(f"{path} may be of {' or '.join(models)}, whose layers differ; write diffusers' names")
    return tuple(models), {name: parts[models[0]] for name, parts in slices.items()}


def _take_rows(path: Path, key: str, role: str, source: _Source, part: ModuleSlice, rows: int) -> _Source:
    """Return the rows of a tensor that belong to a module, where the file fuses several layers into one."""
    if not part.rows or role in ("down", "alpha"):
        return source
    if source.shape[:1] != (rows,):
        raise InputError(
            f"{path}: {key} has shape {abbreviate(tuple(source.shape))}, but its layer has {rows} outputs, those of "
            f"{part.module} and others; give magnitudes and biases of the outputs"
        )
    return load_tensor(source)[list(part.rows)]


def _files_in(folder: Path) -> list[Path]:
    """Return a folder's LoRA files: our checkpoint's, one per expert, peft's adapter, a pair by name, or the only."""
    ours = [folder / part / WEIGHTS_NAME for part in ("transformer", "transformer_2")]
    if files := [file for file in ours if file.is_file()]:
        return files
    for name in (WEIGHTS_NAME, "adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    if (folder / "checkpoints" / "latest").is_dir():
        raise InputError(f"{folder} is a run; give one of its checkpoints, such as {folder / 'checkpoints' / 'latest'}")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 2 and {expert_in_path(file) for file in files} == {"high_noise", "low_noise"}:
        return files  # as Lightning and tools/convert_lora.py lay them out
    if len(files) != 1:
        raise InputError(f"{folder} holds {len(files)} safetensors files; name the LoRA that you mean")
    return files


def _open(path: Path) -> tuple[dict[str, _Source], dict[str, str]]:
    if path.suffix == ".safetensors" or not wrong_kind(path, "safetensors"):
        tensors, metadata = shards.read_header(path)
        return {**tensors}, metadata
    state = read_torch(path)
    if quantised := [key for key, value in state.items() if value.dtype not in TORCH_DTYPES.values()]:
        raise InputError(f"{path}: tensor {quantised[0]} is {state[quantised[0]].dtype}; give the LoRA unquantised")
    return {**state}, {}


def check_torch(path: Path) -> None:
    """Raise InputError unless a file begins as a torch file does, and is not cut off if it is a zip."""
    shards.require_file(path, "torch")
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    if is_zip and not zipfile.is_zipfile(path):
        raise InputError(f"{path} cannot be read as a torch file: it is cut off; get it again")


def load_torch(path: Path) -> Any:
    """Load a torch file, mapped. Raise InputError for a damaged file, for code and for another type of file."""
    check_torch(path)
    try:  # files from before torch 1.6 are no zip, and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGED as error:
        raise InputError(f"{path} cannot be read as a torch file: {first_line(error)}; get it again") from None


def read_torch(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a torch file by name, mapped. Raise InputError as load_torch, and for other contents."""
    state = load_torch(path)
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise InputError(f"{path} is not a flat dictionary of tensors; give a state dict")
    return state


def _update(path: Path, module: str, roles: dict[str, _Source], alphas: "_Alphas") -> Update:
    shape = {role: tuple(source.shape) for role, source in roles.items()}
    for role in roles:
        partner = "down" if role == "up" else "up"
        if role not in ("diff", "diff_b") and partner not in roles:
            raise InputError(f"{path}: {module} has {role} {shape[role]} but no {partner}; the file is incomplete")
    values = {role: source for role, source in roles.items() if role not in ("alpha", "dora_scale")}
    scale, wd_on_output = 1.0, True
    if "down" in roles:
        up, down = shape["up"], shape["down"]
        if min(len(up), len(down)) < 2 or up[1] != down[0] or not down[0]:
            raise InputError(f"{path}: {module} has down {down} and up {up}; their ranks must agree and be at least 1")
        scale = alphas.scale(module, down[0], roles.get("alpha"))
        for role in {"dora_scale", "magnitude"} & roles.keys():
            values["magnitude"] = roles[role]
            wd_on_output = _is_of_outputs(path, module, role, shape)
    return Update(module=module, scale=scale, wd_on_output=wd_on_output, **values)


def _is_of_outputs(path: Path, module: str, role: str, shape: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a magnitude is of the outputs, not of the inputs. Raise InputError if its shape does not say.

    LyCORIS and OneTrainer keep the weight's number of dimensions in dora_scale: (out, 1, ...) for wd_on_output, else
    (1, in, 1, ...). peft's lora_magnitude_vector is of the outputs: (out,), for a convolution (1, out, 1, ...), and as
    a renamed dora_scale (out, 1, ...).
    """
    ones = (1,) * (len(shape["down"]) - 2)
    out, inputs = shape["up"][0], shape["down"][1]
    if role == "dora_scale":
        allowed = {(1, inputs, *ones): False, (out, 1, *ones): True}
    else:
        allowed = {(out,): True, (out, 1, *ones): True} | ({(1, out, *ones): True} if ones else {})
    if shape[role] not in allowed:
        name = "dora_scale" if role == "dora_scale" else "lora_magnitude_vector"
        raise InputError(f"{path}: the {name} of {module} is {shape[role]}; it must be one of {sorted(allowed)}")
    return allowed[shape[role]]


def _read_kohya(path: Path, metadata: Mapping[str, str]) -> tuple[float, float] | None:
    """Return (ss_network_alpha, ss_network_dim); None where one of them is missing."""
    texts = [metadata.get(key, "None") for key in ("ss_network_alpha", "ss_network_dim")]
    if not {"None", "Dynamic"}.isdisjoint(texts):
        return None
    try:
        alpha, rank = map(float, texts)
        alpha / rank
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{path}: ss_network_alpha and ss_network_dim are {abbreviate(texts)}, no numbers") from None
    return alpha, rank


@dataclass(kw_only=True)
class _Alphas:
    """The sources of each module's scale alpha / rank (rslora: alpha / sqrt(rank)), and those used so far."""

    path: Path
    config: AdapterConfig
    names: Mapping[str, str]  # names of the modules in the file
    kohya: tuple[float, float] | None  # alpha and rank
    fallback: float | None
    used: Counter[str] = field(default_factory=Counter)

    def scale(self, module: str, rank: int, key: _Source | None) -> float:
        if key is not None and prod(key.shape) != 1:
            raise InputError(f"{self.path}: .alpha of {module} has shape {tuple(key.shape)}; it must be one number")
        if self.config.ranks and rank not in self.config.ranks:
            raise InputError(f"{self.path}: {module} has rank {rank}, its configuration {sorted(self.config.ranks)}")
        alphas = {
            "the .alpha keys": None if key is None else float(load_tensor(key).reshape(())),
            "the configuration": self.config.stored_alpha(self.names[module]),
            "ss_network_alpha / ss_network_dim": self.kohya and self.kohya[0] * rank / self.kohya[1],
            "--alpha": self.fallback,
            "nowhere: alpha = rank": float(rank),
        }
        source, alpha = next((source, alpha) for source, alpha in alphas.items() if alpha is not None)
        for other in ("the configuration", "--alpha"):
            if alphas[other] not in (None, alpha):
                raise InputError(
                    f"{self.path}: {module} has alpha {alpha:g} by {source}, {alphas[other]:g} by {other}; remove one"
                )
        scale = alpha / rank**0.5 if self.config.use_rslora else alpha / rank
        if not _FLOAT32.tiny <= scale <= _FLOAT32.max:
            raise InputError(
                f"{self.path}: alpha of {module} is {alpha:g} (from {source}), must be above 0 and within float32"
            )
        self.used[source] += 1
        return scale

    def check_parts(self, updates: Mapping[str, Update]) -> None:
        """Raise InputError if the configuration names DoRA or biases and their tensors are missing."""
        low_rank = {name: update for name, update in updates.items() if update.down is not None}
        plain = [name for name, update in low_rank.items() if update.magnitude is None]
        if self.config.use_dora and plain:
            raise InputError(f"{self.path} is incomplete: by use_dora {plain[0]} has a magnitude, and it has none")
        if self.config.lora_bias and all(update.up_bias is None for update in low_rank.values()):
            raise InputError(f"{self.path} is incomplete: by lora_bias it has biases, and it has none")


def assign_expert(loras: list[Lora], expert: str | None) -> list[Lora]:
    """Return the LoRAs with the user's expert, if one. Raise InputError if keys or file names mean another."""
    if expert is None:
        return loras
    for lora in loras:
        if lora.expert not in (None, expert) and not (lora.expert_by_name and len(loras) == 1):
            raise InputError(f"{lora.path} is for the {lora.expert} expert, not for {expert}")
    return [replace(lora, expert=expert) for lora in loras]
