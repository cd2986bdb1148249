"""Older names of keys: `modernise` translates a file or an override that has them.

The seeds' names are for ever, the others for one release.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewardfl.config.schema import shown

MEMORY_KEYS = (
    "use_gradient_checkpointing", "use_gradient_checkpointing_offload", "decode_caches", "kept_chunks", "active_graphs",
    "kept_steps",
)  # fmt: skip
RENAMED = {  # {old: new}
    "experts.trained": "train.memory.trained",
    "experts.untrained": "train.memory.untrained",
    **{f"train.{key}": f"train.memory.{key}" for key in MEMORY_KEYS},
    **{f"{group}.samples_on": "train.memory.samples_on" for group in ("grpo", "forward")},
    **{
        f"{group}.advantage_{key}": f"{group}.advantage.{key}"
        for group in ("grpo", "forward")
        for key in ("std", "of", "clip", "scale")
    },
    "forward.old_decay": "forward.old_policy.decay",
    "forward.old_decay_rate": "forward.old_policy.rate",
    "forward.old_decay_start": "forward.old_policy.start",
    "forward.old_anchor": "forward.old_policy.anchor",
    "model.distill_lora_high": "model.distill_lora.high",
    "model.distill_lora_low": "model.distill_lora.low",
    "model.distill_lora_mode": "model.distill_lora.mode",
    "reward.others": "reward.terms",
    "reward.motion_weight": "reward.terms.face_motion.weight",
    "reward.name": "reward.terms.score.name",
    "reward.settings": "reward.terms.score.settings",
    "reward.reward_weight": "reward.terms.score.weight",
    "reward.reward_mean": "reward.terms.score.mean",
    "reward.reward_std": "reward.terms.score.std",
    "reward.coverage_weight": "reward.terms.score.parts.coverage",
    "grpo.window_size": "grpo.window.size",
    "grpo.window_fraction": "grpo.window.fraction",
    "grpo.window_bounds": "grpo.window.within",
    "grpo.window_per_group": "grpo.window.per_group",
}
_WINDOW = r"grpo\.window(\.|=\s*\{)"
DEPENDENT = {  # {older key whose meaning another key decides: override that says the same in today's form}
    "grpo.clip_range_high": r"grpo\.clip_range=\s*\[",
    "grpo.window_bounds": _WINDOW,
    "grpo.window_fraction": _WINDOW,
    "grpo.window_size": _WINDOW,
    "grpo.window_steps": _WINDOW,
    "sample.coupling": r"sample\.gradient_mode=\s*[\"']?bridge:",
    "train.num_train_epochs": r"train\.max_steps=.*epoch",
}
_VALUES = {  # {key: {old value: new value}}
    "train.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "reward.kl_gradient": {"through_trajectory": "reference_constant"},
}
_COUPLING = {"chain": 1, "drtune": 0, "last": 1, "endpoint": 1}  # the only ones that these modes take


def modernise(
    sections: Mapping[str, Any], before: Mapping[str, Any], *, groups: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return (the sections with today's keys, problems).

    before: what an override is applied to, or {}. groups: for a script with groups.
    """
    new: dict[str, Any] = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in sections.items()}
    problems: list[str] = []
    if isinstance(memory := find(new, "train.memory"), str):
        new["train"]["memory"] = {"preset": memory}
    for key, values in _VALUES.items():
        if isinstance(value := find(new, key), str) and value in values:
            _put(new, key, values[value])
    _rename_window(new, before)
    _rename_steps(new, before)
    problems += _drop_constants(new, before)
    problems += _rename_rewards(new, before, groups=groups)
    if isinstance(changes := find(new, "run.resume_with_changes"), list):
        new["run"]["resume_with_changes"] = [_changed_key(key) for key in changes]
    for old, name in RENAMED.items():
        if _has(new, old):
            value = _pop(new, old)
            if _has(new, name):
                problems.append(f"{old} is an older name of {name}, which is given, too; remove {old}")
            _put(new, name, value)
    if new.get("experts") == {}:
        del new["experts"]
    return new, problems


def order(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the overrides, with the keys of DEPENDENT last, problems): both forms of one setting are refused."""
    keys = [text.partition("=")[0] for text in overrides]
    problems = [
        f"{key} is an older form of {shown(text)}, which is given, too; remove {key}"
        for key in keys
        for text in overrides
        if key in DEPENDENT and re.match(DEPENDENT[key], text)
    ]
    return sorted(overrides, key=lambda text: text.partition("=")[0] in DEPENDENT), problems


def _changed_key(key: object) -> object:
    """Return the section and key that an older name in run.resume_with_changes means."""
    return ".".join(RENAMED[key].split(".")[:2]) if isinstance(key, str) and key in RENAMED else key


def merge(sections: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put `changes` into `sections`, key by key; a value that holds keys keeps its others."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(sections.get(key), dict):
            sections[key] = dict(sections[key])
            merge(sections[key], value)
        else:
            sections[key] = value


def _rename_window(new: dict[str, Any], before: Mapping[str, Any]) -> None:
    mode, steps = find(new, "grpo.window"), _pop(new, "grpo.window_steps")
    if steps is not None:
        new["grpo"]["window"] = {"steps": steps, "size": None, "fraction": None, "within": None}
    elif mode in ("random", "fraction"):
        key, default = ("size", 2) if mode == "random" else ("fraction", 0.6)
        others = {"steps", "size", "fraction"} - {key}
        for other in others:
            new["grpo"].pop(f"window_{other}", None)
        new["grpo"]["window"] = dict.fromkeys(others)
        if not _has(new, f"grpo.window_{key}"):
            new["grpo"]["window"][key] = default
    high = _pop(new, "grpo.clip_range_high")
    if high is not None:
        low = find(new, "grpo.clip_range") or find(before, "grpo.clip_range") or 2e-6
        new["grpo"]["clip_range"] = [low[0] if isinstance(low, list) and low else low, high]


def _rename_steps(new: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Say num_train_epochs by max_steps. A number of steps, of the file too, outranked the epochs; null left them."""
    epochs, earlier = _pop(new, "train.num_train_epochs"), find(before, "train.max_steps")
    if _has(new, "train.max_steps"):
        replaced = find(new, "train.max_steps") is None
    else:
        replaced = epochs is not None and not isinstance(earlier, int)
    if replaced and epochs is None and isinstance(earlier, str):
        new["train"]["max_steps"] = earlier
    elif replaced:
        _put(new, "train.max_steps", "1 epoch" if epochs in (None, 1) else f"{epochs} epochs")


def _drop_constants(new: dict[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Drop keys whose only valid value is the default. Return a line for each other value."""
    problems = []
    if (boundary := _pop(new, "model.max_timestep_boundary")) not in (None, 1, "1"):
        problems.append(
            f"model.max_timestep_boundary must be 1: no expert is used above it, got {shown(boundary)}; remove it"
        )
    trained = find(new, "model.trainable_models") or find(before, "model.trainable_models") or "dit2"
    if (changes := _pop(new, "lora.lora_base_model")) is not None and _names(changes) != _names(trained):
        problems.append(
            f"lora.lora_base_model must be model.trainable_models {shown(trained)}, got {shown(changes)}; remove it"
        )
    coupling = _pop(new, "sample.coupling")
    mode = str(find(new, "sample.gradient_mode") or find(before, "sample.gradient_mode") or "chain")
    if coupling is not None and not isinstance(coupling, int | float):
        problems.append(f"sample.coupling must be a number, got {shown(coupling)}")
    elif coupling is not None and mode.startswith("bridge"):
        new["sample"]["gradient_mode"] = f"bridge:{float(coupling):g}" if coupling != 0.2 else "bridge"
    elif coupling is not None and coupling != _COUPLING.get(mode):
        problems.append(
            f"sample.coupling is for gradient_mode bridge, got {shown(mode)}; set gradient_mode: bridge:WEIGHT"
        )
    return problems


def _names(text: object) -> set[str]:
    return {name.strip() for name in str(text).split(",")}


def _rename_rewards(new: dict[str, Any], before: Mapping[str, Any], *, groups: bool) -> list[str]:
    reward = new.get("reward")
    if not isinstance(reward, dict):
        return []
    if "name" in reward and not groups:  # the defaults were face_identity's for every reward
        reward.setdefault("reward_mean", find(before, "reward.terms.score.mean", 0.54))
        reward.setdefault("reward_std", find(before, "reward.terms.score.std", 0.16))
    motion, others = reward.pop("motion_weight", None), reward.pop("others", None)
    if motion is not None and groups:
        _put(new, "reward.terms.score.parts.motion", motion)
    elif motion is not None:
        _put(new, "reward.terms.face_motion", {"weight": motion} if motion else None)
    reward = new["reward"]
    if not isinstance(others, dict | None):
        return [f"reward.others must be keys and values, got {shown(others)}"]
    if others is not None and isinstance(reward.get("terms", {}), dict):
        reward["terms"] = {**reward.get("terms", {}), **others}
    return []


def find(sections: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value at section.key, or the default without one, or if a section does not hold keys."""
    value: Any = sections
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def _has(sections: Mapping[str, Any], key: str) -> bool:
    outer, _, last = key.rpartition(".")
    return isinstance(mapping := find(sections, outer), dict) and last in mapping


def _pop(sections: dict[str, Any], key: str) -> Any:
    outer, _, last = key.rpartition(".")
    return mapping.pop(last, None) if isinstance(mapping := find(sections, outer), dict) else None


def _put(sections: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = key.split(".")
    mapping = sections
    for part in outer:
        mapping[part] = mapping = dict(mapping[part]) if isinstance(mapping.get(part), dict) else {}
    mapping[last] = value
