"""The model that a LoRA was trained on, by words in its metadata and configuration. No torch here."""

import re
from collections.abc import Mapping

# keys of a file's metadata or of peft's configuration whose text names the model
STATEMENT_KEYS = ("modelspec.architecture", "ss_base_model_version", "base_model_name_or_path")

# {family, named as in image_names.LORA_MODULES: the words that mean it}
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

# groups of words for variants of a family; two words of one group differ
_VARIANTS = (
    r"ti2v|t2v|i2v|flf2v|s2v|vace|animate", r"(?<=wan)[^a-z0-9]*2[^a-z0-9]*[12](?![0-9])", r"1[._]3b|14b|[459]b",
    r"schnell|dev|kontext|krea|klein", r"medium|large", r"(?<=image)[^a-z0-9]edit|(?<=image)[^a-z0-9]turbo",
)  # fmt: skip


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


def other_variants(statements: Mapping[str, str], base: str) -> list[str]:
    """Return the words for another variant than `base`'s, a text such as a path; none for what it leaves open."""
    words = []
    for text in statements.values():
        for group in _VARIANTS:
            stated, actual = (
                re.sub(r"[^a-z0-9]", "", match[0]) if match else ""
                for match in (re.search(group, each.lower()) for each in (text, base))
            )
            if stated and actual and stated != actual:
                words.append(f"{text} ({stated}, not {actual})")
    return words
