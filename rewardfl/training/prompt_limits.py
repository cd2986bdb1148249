"""Notes on prompts whose end no text encoder reads."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from transformers import AutoTokenizer

from rewardfl import data
from rewardfl.backbones.protocol import Backbone
from rewardfl.rewards.registry import ResolvedReward

MOST_CHARACTERS = 32  # characters of a prompt, for each token of the limit
SPECIAL_TOKENS = 3  # tokens around a prompt; every other token has a byte or more


def prompt_notes(rows: Sequence[data.Row], backbone: Backbone, rewards: Sequence[ResolvedReward]) -> list[str]:
    """Return a note for each text encoder of the model and the rewards that cuts prompts of the rows.

    Tokenizers that cannot be loaded are left out: loading the model or the reward reports that.
    """
    limits = [(f"the model's {folder.name}", folder, most) for folder, most in backbone.prompt_limits().items()]
    for spec, cls in rewards:
        with suppress(OSError):
            limits += [(spec.key, folder, most) for folder, most in cls.prompt_limits(spec.settings).items()]
    return [
        f"{len(cut)} of {len(rows)} rows have a prompt of more tokens than the {most} that {reader} reads, the first "
        f"is line {cut[0][0]} with {cut[0][1]}; the rest has no effect there: shorten it, or put what matters first"
        for reader, folder, most in limits
        if (cut := _cut_rows(rows, folder, most))
    ]


def _cut_rows(rows: Sequence[data.Row], tokenizer: Path, most: int) -> list[tuple[int, int]]:
    """Return (line, tokens) of the rows whose prompts have more than `most` tokens."""
    with suppress(OSError, ValueError):
        if long := [row for row in rows if len(row.prompt.encode()) + SPECIAL_TOKENS > most]:
            encode = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            tokens = encode([row.prompt[: most * MOST_CHARACTERS] for row in long], verbose=False).input_ids
            return [(row.line, len(ids)) for row, ids in zip(long, tokens, strict=True) if len(ids) > most]
    return []
