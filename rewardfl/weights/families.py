"""The model that a LoRA was trained on, by words in its metadata and configuration. No torch here."""

import re
from collections.abc import Mapping

# keys of a file's metadata or of peft's configuration whose text names the model; the last one's is a path
STATEMENT_KEYS = ("modelspec.architecture", "ss_base_model_version", "base_model_name_or_path")

# {family, named as in image_names.IMAGE_MODELS: the words that mean it}
_FAMILIES = {
    "Wan": r"(?<![a-z])wan(?![a-z])|wan(video|transformer)",
    "FLUX.1": r"flux(?![^a-z0-9]*2(?![0-9]))",
    "FLUX.2": r"flux[^a-z0-9]*2(?![0-9])",
    "SD3": r"((?<![a-z])sd|stable[^a-z0-9]?diffusion)[^a-z0-9]?v?3",
    "Qwen-Image": r"qwen[^a-z0-9]?image",
    "Z-Image": r"(?<![a-z])z[^a-z0-9]?image",
    "Stable Diffusion 1, 2 or XL": r"((?<![a-z])sd|stable[^a-z0-9]?diffusion)[^a-z0-9]?v?(1|2|xl)",
    "HunyuanVideo": r"hunyuan|framepack", "Chroma": r"(?<![a-z])chroma",  # whose layers FLUX.1 has, too
}  # fmt: skip


def stated_family(text: str) -> str | None:
    """Return the family that a text names, such as a class or a path; None if it names none, or several."""
    families = [family for family, pattern in _FAMILIES.items() if re.search(pattern, text.lower())]
    return families[0] if len(families) == 1 else None


def read_statements(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return {key: its text} of the keys that name a model; of a path or repository only the last name."""
    return {
        key: metadata[key].rstrip("/").split("/")[-1 if key == STATEMENT_KEYS[2] else 0]
        for key in STATEMENT_KEYS
        if metadata.get(key)
    }
