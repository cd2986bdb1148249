"""Notes on prompts whose end no text encoder reads."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from rewardfl import data
from rewardfl.backbones.protocol import Backbone
from rewardfl.rewards.registry import ResolvedReward

MOST_PROMPTS = 10_000  # that are counted of a table
MOST_CHARACTERS = 32  # of a prompt, for each token of the limit
SPECIAL_TOKENS = 3  # tokens around a prompt; every other token has a byte or more


def prompt_notes(rows: Sequence[data.Row], backbone: Backbone, rewards: Sequence[ResolvedReward]) -> list[str]:
    """Return a note for each text encoder of the model and the rewards that cuts prompts of the rows.

    Rewards whose tokenizer cannot be loaded are left out: building them reports that.
    """
    limits = [(f"the model's {folder.name}", folder, most) for folder, most in backbone.prompt_limits().items()]
    for spec, cls in rewards:
        try:
            limits += [(spec.key, folder, most) for folder, most in cls.prompt_limits(spec.settings).items()]
        except OSError:
            continue
    return [note for limit in limits if (note := _note(rows, *limit))]


def _note(rows: Sequence[data.Row], reader: str, tokenizer: Path, most: int) -> str:
    candidates = [row for row in rows if len(row.prompt.encode()) + SPECIAL_TOKENS > most][:MOST_PROMPTS]
    if not candidates:
        return ""
    try:
        encode = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError):
        return ""
    tokens = encode([row.prompt[: most * MOST_CHARACTERS] for row in candidates], verbose=False).input_ids
    cut = [(row.line, len(ids)) for row, ids in zip(candidates, tokens, strict=True) if len(ids) > most]
    if not cut:
        return ""
    line, count = cut[0]
    among = f", of the first {MOST_PROMPTS} long ones," if len(candidates) == MOST_PROMPTS else ""
    return (
        f"{len(cut)} of {len(rows)} rows{among} have a prompt of more tokens than the {most} that {reader} reads, the "
        f"first is line {line} with {count}; the rest of it has no effect there: shorten it, or put what matters first"
    )
