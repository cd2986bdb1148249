"""LoRA files of every tool that trains Wan, SD3, FLUX.1 or Qwen-Image: one reader for all names, one normal form.

What the files call a module, where they keep alpha and how they say which expert they mean differs between
diffusers, peft, ComfyUI, ai-toolkit, DiffSynth, ROLL, musubi/kohya, OneTrainer, XLabs, VideoX-Fun and others.
`read_lora` resolves every key or refuses the file: a key that is skipped is an update that is silently lost. torch
only, so that the merge tools stay small; tensors are read when they are needed.
"""

import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rewardfl.weights import adapter_config, image_names, shards, wan_names
from rewardfl.weights.adapter_config import AdapterConfig
from rewardfl.weights.image_names import Place
from rewardfl.weights.shards import Entry, Refused, quoted

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
    "lora_transformer_": None,
}
# what ends a key, after the module's name: the role of the tensor. An adapter's name may stand before `.weight`.
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
_FOREIGN = r"\.(?:lokr_|hada_|oft_|boft|lora_mid|set_weight|w_norm|b_norm|reshape_weight|on_input|vera_|lora_E)"
_TEXT_ENCODER = r"(?:text_encoders?|text_encoder_\d|lora_te\d?)[._]"
WAN = "Wan"
_READ = f"LoRAs of {WAN}, {', '.join(image_names.MODULES)} are read"

_LONGEST_KEY = 500  # characters; the longest key of a Wan module has about 90
FLOAT32 = torch.finfo(torch.float32)  # what a scale must fit into
# what torch.load raises for a damaged file: its readers of zip and pickle check little
_DAMAGED = (
    pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError, RuntimeError, ValueError, LookupError,
    TypeError, AttributeError, AssertionError, ArithmeticError, OSError,
)  # fmt: skip

Source = Entry | Tensor


def load_tensor(source: Source) -> Tensor:
    """The tensor, in float32 on the CPU."""
    if isinstance(source, Tensor):
        return source.float()
    if source.dtype not in TORCH_DTYPES:
        raise Refused(f"{source.file}: tensor {source.name} has dtype {source.dtype}; give the LoRA unquantised")
    values = torch.frombuffer(source.read(), dtype=TORCH_DTYPES[source.dtype])
    return values.reshape(source.shape).float()


def as_bytes(values: Tensor) -> memoryview:
    """The bytes of a tensor as a safetensors file holds them."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Update:
    """What a LoRA does to one module, named as in diffusers: weight += scale * up @ down, and so on.

    A `magnitude` makes it a DoRA: of the outputs (the weight's rows) or, where wd_on_output is False, of the inputs
    (its columns). `diff` and `diff_b` are added to weight and bias, `diff` of a module `...scale_shift_table` to the
    table itself. up: (out, r, ...), down: (r, in, ...).
    """

    module: str
    down: Source | None = None
    up: Source | None = None
    scale: float = 1.0
    up_bias: Source | None = None
    magnitude: Source | None = None
    wd_on_output: bool = True
    diff: Source | None = None
    diff_b: Source | None = None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def sources(self) -> dict[str, Source]:
        named = {role: getattr(self, role) for role in ("down", "up", "up_bias", "magnitude", "diff", "diff_b")}
        return {role: source for role, source in named.items() if source is not None}

    def biases(self) -> list[tuple[Source, float]]:
        """What is added to the bias, and its factor: peft scales its own as the product, diff_b is taken as it is."""
        given = [(self.up_bias, self.scale), (self.diff_b, 1.0)]
        return [(source, factor) for source, factor in given if source is not None]


@dataclass(frozen=True)
class Lora:
    """One expert's updates. expert: high_noise, low_noise or None where the file does not say, or the model has none.

    models: whose names the keys are; several where they share them.
    """

    path: Path
    models: tuple[str, ...]
    expert: str | None
    updates: dict[str, Update]
    alpha_source: str  # where the scale comes from, for the user to see
    dialect: str  # a sample key
    notes: tuple[str, ...] = ()
    expert_by_name: bool = False  # of the file or its folder, not by its keys

    @property
    def files(self) -> tuple[Path, ...]:
        """What was read: the LoRA's file, and peft's configuration where it lies beside it."""
        config = self.path.with_name(adapter_config.CONFIG_NAME)
        return (self.path, config) if config.is_file() else (self.path,)


# Names


def _flat(table: Mapping[str, str]) -> dict[str, str]:
    """{either name with underscores for its dots, as kohya writes it: diffusers' name}; each of them is unique."""
    return {alias.replace(".", "_"): new for old, new in table.items() for alias in (old, new)}


_FLAT_BLOCK, _FLAT_TOP = _flat(wan_names.BLOCK), _flat(wan_names.TOP)


def resolve(name: str) -> str | None:
    """diffusers' name of the module that a LoRA calls `name`, in either naming, with dots or all underscores."""
    if wan_names.to_original(name) is not None:
        return name
    if (renamed := wan_names.to_diffusers(name)) is not None:
        return renamed
    if found := re.fullmatch(r"blocks[_.](\d+)[_.](.+)", name):
        return f"blocks.{found[1]}.{_FLAT_BLOCK[found[2]]}" if found[2] in _FLAT_BLOCK else None
    return _FLAT_TOP.get(name)


def _split(key: str) -> tuple[str, str, str | None] | None:
    """(bare module name, role, expert) of a LoRA key; None when its ending is not known."""
    if len(key) > _LONGEST_KEY:
        return None
    for pattern, role in _ROLES:
        if found := re.fullmatch(r"(.+?)" + pattern, key):
            name, expert = found[1], None
            while container := next((c for c in _CONTAINERS if name.startswith(c)), None):
                name, expert = name.removeprefix(container), _CONTAINERS[container] or expert
            if role == "diff_m":  # on the block, or on the head: of the table that the original calls so
                name, role = f"{name}.modulation", "diff"
            return name, role, expert
    return None


def expert_in_path(path: Path) -> str | None:
    """Return the expert that a file's name or the folders around it speak of; None when they name none, or both.

    Only published forms count: high_noise, low-noise-model, HighNoise, and the folders of pipelines. `high` and `low`
    alone are words for quality, rank, light or memory, too.
    """
    for part in (path.stem, path.parent.name, path.parent.parent.name):
        if part in ("transformer", "transformer_2"):
            return "low_noise" if part == "transformer_2" else "high_noise"
        words = set(re.findall(r"(?<![a-z])(high|low)[ _-]?noise(?![a-z])", part.lower()))
        if words:
            return f"{words.pop()}_noise" if len(words) == 1 else None
    return None


# Reading


def read_lora(path: str | Path, alpha: float | None = None) -> list[Lora]:
    """All LoRAs that a file or folder holds, one per expert, in the normal form.

    path: a .safetensors or torch file, a peft adapter folder, a folder with one LoRA file, or a checkpoint of
    a training script. alpha: used where the file says nothing (else alpha is the rank). Refused: keys that no module
    of one of the models answers to, those of text encoders, missing halves, ranks that disagree, LoKr, LoHa and other
    maths, contradicting alphas.
    """
    path = Path(path)
    if path.is_dir():
        return [lora for file in _files_in(path) for lora in read_lora(file, alpha)]
    if not path.is_file():
        raise Refused(f"no LoRA at {path}")
    sources, metadata = _open(path)
    keys = {key: _parse(path, key) for key in sources}
    if not keys:
        raise Refused(f"{path} holds no tensors")
    rows = _rows(keys, sources)
    ranks = {key: sources[key].shape[0] for key, (_, role, _) in keys.items() if role == "down" and sources[key].shape}
    models, places = _placed(path, keys, rows)
    sorted_keys: dict[str | None, dict[str, dict[str, Source]]] = {}
    called: dict[str, str] = {}  # a module's name in this file
    both = any(key.startswith(("transformer_2.", "pipe.dit2.")) for key in sources)
    for key, (name, role, expert) in keys.items():
        if both and expert is None:
            expert = "high_noise"  # `transformer.` next to `transformer_2.`
        for place in places[name]:
            found = sorted_keys.setdefault(expert, {}).setdefault(place.module, {})
            if role in found:
                raise Refused(f"{path}: two keys give the {role} of {place.module}, the second is {key}")
            found[role] = _part(path, key, role, sources[key], place, rows.get(name, 0))
            called[place.module] = name
    loras = []
    for expert, modules in sorted_keys.items():
        component = "transformer_2" if both and expert == "low_noise" else "transformer"
        config, note = adapter_config.read_adapter_config(path, metadata, component, ranks)
        alphas = _Alphas(path, config, metadata, called, alpha)
        updates = {module: _update(path, module, roles, alphas) for module, roles in modules.items()}
        alphas.check_parts(updates)
        notes = tuple(line for line in (note, config.unused_pattern(path, called)) if line)
        named = expert_in_path(path.absolute()) if WAN in models and expert is None else None
        dialect = next(iter(sources))
        loras.append(Lora(path, models, expert or named, updates, alphas.summary(), dialect, notes, named is not None))
    return loras


def _parse(path: Path, key: str) -> tuple[str, str, str | None]:
    """(bare module name, role, expert) of a LoRA key. Refused when it is no part of a transformer's LoRA."""
    if re.match(_TEXT_ENCODER, key):
        raise Refused(
            f"{path}: {key[:_LONGEST_KEY]} belongs to a text encoder; only LoRAs of the transformer are read, and a "
            "part that is skipped is lost silently. Merge it with diffusers (pipe.load_lora_weights, pipe.fuse_lora)"
        )
    if re.search(_FOREIGN, key) or key.startswith("lycoris_"):
        raise Refused(
            f"{path}: {key} belongs to LoKr, LoHa, OFT or another method; only LoRA, DoRA and full differences "
            "can be merged. Merge it with the tool that trained it"
        )
    return _split(key) or (key, "", None)


def _rows(keys: Mapping[str, tuple[str, str, str | None]], sources: Mapping[str, Source]) -> dict[str, int]:
    """Return {name of a module: how many outputs it has}, by its `up` or, without one, by its other tensors."""
    rows: dict[str, int] = {}
    for key, (name, role, _) in keys.items():
        if role not in ("down", "alpha") and (role == "up" or name not in rows):
            rows[name] = (sources[key].shape or (1,))[0]
    return rows


def _placed(
    path: Path, keys: Mapping[str, tuple[str, str, str | None]], rows: Mapping[str, int]
) -> tuple[tuple[str, ...], dict[str, tuple[Place, ...]]]:
    """(the models all of whose modules have such names, {name: where the module is in them}). Refused: none has."""
    models: list[str] | None = None
    found: dict[str, dict[str, tuple[Place, ...]]] = {}
    for key, (name, role, expert) in keys.items():
        outputs = rows.get(name, image_names.ALL_ROWS)
        found[name] = image_names.places_of(name, outputs) if role and expert is None else {}
        if role and (module := resolve(name)) is not None:
            found[name][WAN] = (Place(module),)
        before, models = models, [model for model in models or found[name] if model in found[name]]
        if not models:
            if other := image_names.elsewhere(one for one, _, _ in keys.values()):
                raise Refused(f"{path}: {key[:_LONGEST_KEY]} and others speak of {other}; {_READ}")
            whose = f"{' or '.join(before)}, whose names other keys have" if before else f"a transformer; {_READ}"
            raise Refused(
                f"{path}: {key[:_LONGEST_KEY]} (as {quoted(name)}, {outputs} rows) names no module of {whose}; nothing "
                "was merged, because a key that is skipped is lost silently"
            )
    assert models
    if any(places[model] != places[models[0]] for places in found.values() for model in models):
        raise Refused(f"{path} may be of {' or '.join(models)}, which call different layers so; write diffusers' names")
    return tuple(models), {name: places[models[0]] for name, places in found.items()}


def _part(path: Path, key: str, role: str, source: Source, place: Place, rows: int) -> Source:
    """What of a tensor belongs to the place: some of its rows, where the file has several layers in one."""
    if not place.rows or role in ("down", "alpha"):
        return source
    if source.shape[:1] != (rows,):
        raise Refused(
            f"{path}: {key} has shape {quoted(tuple(source.shape))}, but its layer has {rows} outputs, those of "
            f"{place.module} and others; give magnitudes and biases of the outputs"
        )
    if isinstance(source, Tensor) or len(place.rows) > 1:
        values = load_tensor(source)
        return torch.cat([values[part.start : part.stop] for part in place.rows])
    (part,) = place.rows
    return replace(source, shape=(len(part), *source.shape[1:]), offset=source.offset + part.start * source.row_bytes)


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
    if path.suffix == ".safetensors" or shards.is_safetensors(path):
        tensors, metadata = shards.read_header(path)
        return {**tensors}, metadata
    state = read_torch(path)
    for key, value in state.items():
        if value.layout != torch.strided or value.is_meta or value.dtype not in TORCH_DTYPES.values():
            raise Refused(f"{path}: tensor {key} is {value.dtype}, {value.layout}; give the LoRA unquantised and dense")
    return {**state}, {}


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch file by name, mapped. Refused: a damaged file, and one of anything else, such as code."""
    try:  # files from before torch 1.6 are no zip, and cannot be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGED as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refused(f"{path}, read as a torch file, is damaged or holds code, which is not run: {why}") from None
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise Refused(f"{path} is not a flat dictionary of tensors; give a state dict")
    return state


def _update(path: Path, module: str, roles: dict[str, Source], alphas: "_Alphas") -> Update:
    shape = {role: tuple(source.shape) for role, source in roles.items()}
    for one, other in (
        ("down", "up"), ("up", "down"), ("up_bias", "up"), ("alpha", "up"), ("magnitude", "up"), ("dora_scale", "up"),
    ):  # fmt: skip
        if one in roles and other not in roles:
            raise Refused(f"{path}: {module} has {one} {shape[one]} but no {other}; the file is incomplete")
    values = {role: source for role, source in roles.items() if role not in ("alpha", "dora_scale")}
    scale, wd_on_output = 1.0, True
    if "down" in roles:
        up, down = shape["up"], shape["down"]
        if min(len(up), len(down)) < 2 or up[1] != down[0] or not down[0]:
            raise Refused(
                f"{path}: {module} has down {down} and up {up}; their ranks (rows of down, columns of up) must agree "
                "and be at least 1"
            )
        if any(size != 1 for size in up[2:]):
            raise Refused(f"{path}: up of {module} is {up}, not a 1x1 kernel")
        scale = alphas.scale(module, down[0], roles.get("alpha"))
        if "dora_scale" in roles:
            if "magnitude" in roles:
                raise Refused(f"{path}: {module} has a dora_scale and a lora_magnitude_vector; remove one")
            values["magnitude"] = roles["dora_scale"]
            wd_on_output = _on_output(path, module, shape)
        elif "magnitude" in roles:
            _check_peft_magnitude(path, module, shape)
    return Update(module, scale=scale, wd_on_output=wd_on_output, **values)


def _on_output(path: Path, module: str, shape: dict[str, tuple[int, ...]]) -> bool:
    """Whether a dora_scale is of the outputs, rather than of the inputs. Refused when its shape does not say.

    LyCORIS and OneTrainer keep the weight's number of dimensions, so that a square layer is no riddle: (out, 1, ...)
    by wd_on_output=True, the norm over all inputs; (1, in, 1, ...) by wd_on_output=False (and before the option came,
    and by OneTrainer's default), the norm over all outputs. Nobody defines one of a single dimension, and broadcasting
    would read it as one of the inputs: refused.
    """
    given, ones = shape["dora_scale"], (1,) * (len(shape["down"]) - 2)
    rows, columns = (shape["up"][0], 1, *ones), (1, shape["down"][1], *ones)
    if given not in (rows, columns):
        raise Refused(
            f"{path}: the dora_scale of {module} is {given}; it must be {rows} (of the outputs) or {columns} (of the "
            "inputs)"
        )
    return given == rows


def _check_peft_magnitude(path: Path, module: str, shape: dict[str, tuple[int, ...]]) -> None:
    """Refused unless a lora_magnitude_vector has one value per output: peft knows no other (DoraLinearLayer).

    (out,) for a linear layer; (1, out, 1, ...) for a convolution, by the same definition. A tool that renamed a
    LyCORIS dora_scale may leave (out, 1, ...). Two dimensions that begin with 1 may be a dora_scale of the inputs under
    peft's name, and peft never writes them for a linear layer: refused.
    """
    given, out, ones = shape["magnitude"], shape["up"][0], (1,) * (len(shape["down"]) - 2)
    allowed = [(out,), (out, 1, *ones)] + ([(1, out, *ones)] if ones else [])
    if given not in allowed:
        raise Refused(
            f"{path}: the lora_magnitude_vector of {module} is {given}; peft's has one value for each of the {out} "
            f"outputs, {(1, out, *ones) if ones else (out,)}. Values of the inputs belong into a dora_scale of shape "
            f"{(1, shape['down'][1], *ones)}"
        )


class _Alphas:
    """Where each module's scale alpha / rank (rslora: alpha / sqrt(rank)) comes from, and what was used."""

    def __init__(
        self,
        path: Path,
        config: AdapterConfig,
        metadata: dict[str, str],
        called: dict[str, str],
        fallback: float | None,
    ):
        self.path, self.config, self.called, self.fallback = path, config, called, fallback
        self.used: dict[str, int] = {}
        self.kohya = self._read_kohya(metadata)

    def _read_kohya(self, metadata: dict[str, str]) -> tuple[float, float] | None:
        """(ss_network_alpha, ss_network_dim), None where one of them is not given."""
        texts = {key: metadata.get(key, "None") for key in ("ss_network_alpha", "ss_network_dim")}
        if not {"None", "Dynamic"}.isdisjoint(texts.values()):
            return None
        values = []
        for key, text in texts.items():
            try:
                values.append(float(text))
            except ValueError:
                raise Refused(f"{self.path}: {key} is {quoted(text)}, not a number") from None
        if not values[1] > 0:
            raise Refused(f"{self.path}: ss_network_dim is {quoted(texts['ss_network_dim'])}; a rank is at least 1")
        return values[0], values[1]

    def scale(self, module: str, rank: int, key: Source | None) -> float:
        if key is not None and prod(key.shape) != 1:
            raise Refused(f"{self.path}: .alpha of {module} has shape {tuple(key.shape)}; it must be one number")
        stored = self.config.stored_alpha(self.called[module])
        if self.config.ranks and rank not in self.config.ranks:
            raise Refused(
                f"{self.path}: {module} has rank {rank}, {self.config.name} states {sorted(self.config.ranks)}; "
                "they do not belong together"
            )
        given = {
            "the .alpha keys": None if key is None else float(load_tensor(key).reshape(())),
            self.config.name: stored,
            "ss_network_alpha / ss_network_dim": self.kohya and self.kohya[0] * rank / self.kohya[1],
            "--alpha": self.fallback,
            "nowhere: alpha = rank": float(rank),
        }
        source, alpha = next((source, alpha) for source, alpha in given.items() if alpha is not None)
        if key is not None and stored not in (None, alpha):
            raise Refused(
                f"{self.path}: {module} has .alpha {alpha:g}, {self.config.name} says lora_alpha {stored:g}; "
                "remove the one that is wrong"
            )
        if self.fallback not in (None, alpha):
            raise Refused(f"{self.path}: {source} say alpha {alpha:g} for {module}, --alpha says {self.fallback:g}")
        scale = alpha / rank**0.5 if self.config.use_rslora else alpha / rank
        if not FLOAT32.tiny <= scale <= FLOAT32.max:
            raise Refused(
                f"{self.path}: alpha of {module} is {alpha:g} (from {source}); it must be above 0 (which tools read as "
                "rank or as nothing) and within float32: write the alpha that was trained with"
            )
        self.used[source] = self.used.get(source, 0) + 1
        return scale

    def check_parts(self, updates: Mapping[str, Update]) -> None:
        """Refused where the configuration speaks of DoRA or of biases and the tensors for them are missing."""
        low_rank = {name: update for name, update in updates.items() if update.down is not None}
        plain = [name for name, update in low_rank.items() if update.magnitude is None]
        if self.config.use_dora and plain:
            raise Refused(
                f"{self.path}: {self.config.name} says use_dora, but {plain[0]} has no magnitude; the file "
                "is incomplete"
            )
        if self.config.lora_bias and all(update.up_bias is None for update in low_rank.values()):
            raise Refused(f"{self.path}: {self.config.name} says lora_bias, but the file holds none; it is incomplete")

    def summary(self) -> str:
        return ", ".join(f"{source} ({count})" for source, count in self.used.items()) or "no low-rank updates"


def assign(loras: list[Lora], expert: str | None) -> list[Lora]:
    """Return the LoRAs with the expert that the user gives, if one: it outranks the name of a single file.

    Refused where keys, or the places of several files, say another.
    """
    if expert is None:
        return loras
    for lora in loras:
        if lora.expert not in (None, expert) and not (lora.expert_by_name and len(loras) == 1):
            raise Refused(f"{lora.path} is for the {lora.expert} expert, not for {expert}")
    return [replace(lora, expert=expert) for lora in loras]
