"""Notes on prompts that are longer than the text encoders of the model and the rewards read."""

from types import SimpleNamespace

import clip_files
import pytest
import torch
from conftest import ROOT

from rewardfl import backbones, config, data, rewards
from rewardfl.backbones.protocol import Source
from rewardfl.training.prompt_limits import prompt_notes

NO_LIMIT = SimpleNamespace(prompt_limits=dict)
LONG = "a person turns to the left " * 200


def rows_with(*prompts):
    return [data.Row(index=i, line=i + 2, id=str(i), video=None, prompt=text) for i, text in enumerate(prompts)]


def test_the_text_encoder_of_wan_reads_512_tokens():
    backbone = backbones.open("wan2_2", Source(model_paths=str(ROOT / "assets" / "tiny_world" / "pipeline")))
    assert list(backbone.prompt_limits().values()) == [512]
    (note,) = prompt_notes(rows_with("short", LONG, f"{LONG} and smiles"), backbone, ())
    assert note.startswith("2 of 3 rows have a prompt of more tokens than the 512 that the model's tokenizer reads")
    assert "the first is line 3 with 2601" in note
    prompts = ["a " * count for count in range(600)]
    cut = [prompt_notes(rows_with(prompt), backbone, ()) != [] for prompt in prompts].index(True)
    encode = backbone.text_encoder(torch.device("cpu"))
    shorter, fits, longer = (encode(prompts[count])["text"] for count in (cut - 2, cut - 1, cut))
    assert torch.equal(fits, longer) and not torch.equal(shorter, fits)
    described = backbones.describe("wan2_2", Source())
    assert prompt_notes(rows_with(LONG), described, ()) == []


@pytest.mark.parametrize("name", ["clip_score", "hpsv2"])
def test_rewards_by_clip_read_what_their_model_takes(tmp_path, name):
    """The published 77 tokens, or the 24 of this model."""
    clip_files.write_clip(tmp_path / "clip")
    settings, most = {"model_dir": tmp_path / "clip"}, 24
    if name == "hpsv2":
        settings, most = {"checkpoint": "x", "tokenizer_dir": tmp_path / "clip"}, 77
    spec = config.RewardSpec(key="reward.terms.it", label="it", name=name, settings=settings, weight=1.0)
    reward = (spec, rewards.find_reward(name))
    (note,) = prompt_notes(rows_with("ab " * 100, "ab"), NO_LIMIT, [reward])
    assert note.startswith(f"1 of 2 rows have a prompt of more tokens than the {most} that reward.terms.it reads")
    assert prompt_notes(rows_with("ab"), NO_LIMIT, [reward]) == []
