"""VBench's subject consistency on a small random ViT, against its definition frame by frame; its dynamic degree."""

import json

import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTModel

from rewardfl.evaluation.vbench import class_tokens, dynamic_degree, fastest_flow, load_dino, subject_consistency


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, patch_size=16)
    path = tmp_path_factory.mktemp("dino")
    ViTModel(config, add_pooling_layer=False).save_pretrained(path)
    return path


@pytest.mark.parametrize("height,width", [(224, 224), (224, 336)])
def test_equals_the_definition(folder, height, width):
    """Frames whose shorter side is 224 are not resized: only the network and the two cosines are left."""
    frames = np.random.default_rng(0).integers(0, 255, (4, height, width, 3), np.uint8)
    frames[2] = frames[1]
    model = load_dino(str(folder), "cpu")
    seen = []
    for frame in frames:
        pixels = (frame / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
        batch = torch.tensor(pixels).permute(2, 0, 1)[None].float()
        seen.append(model(batch, interpolate_pos_encoding=True).last_hidden_state[0, 0])
    cosine = torch.nn.CosineSimilarity(dim=0)
    expected = [(max(0, cosine(seen[i], seen[i - 1])) + max(0, cosine(seen[i], seen[0]))) / 2 for i in (1, 2, 3)]
    assert subject_consistency(model, frames) == pytest.approx(float(sum(expected) / 3), abs=1e-5)
    assert subject_consistency(model, frames[[0, 0, 0]]) == pytest.approx(1, abs=1e-5)
    assert class_tokens(model, frames[:1, :64, :96]).shape == (1, 32)  # is enlarged


def test_other_networks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--dino.*is missing"):
        load_dino(str(tmp_path), "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="of a model 'clip'"):
        load_dino(str(tmp_path), "cpu")


def shifting(pixels, frames=17, size=64):
    """Noise that moves to the right by so many pixels a frame."""
    noise = np.random.default_rng(0).integers(0, 255, (size // 4, frames * 8 + size // 4, 3), np.uint8)
    large = np.kron(noise, np.ones((4, 4, 1), np.uint8))
    return np.stack([large[:, round(i * pixels) : round(i * pixels) + size] for i in range(frames)])


def test_dynamic_degree_is_vbenchs_rule():
    """6 min(H, W) / 256 pixels are 1.5 here, in a quarter of the pairs of every second frame at 16 a second."""
    assert dynamic_degree(shifting(2), 16) and not dynamic_degree(shifting(0), 16)
    assert dynamic_degree(shifting(1), 16) and not dynamic_degree(shifting(1), 8)  # 2 pixels a pair, and 1
    assert dynamic_degree(shifting(2), 8) and not dynamic_degree(shifting(2), 4)  # at 4 a second twice as far is asked
    mixed = np.concatenate([shifting(2)[:3], np.repeat(shifting(2)[2:3], 14, 0)])
    assert not dynamic_degree(mixed, 8)  # two of 17 frames' pairs, four are asked
    field = np.zeros((10, 10, 2))
    field[0, :5] = [3, 4]
    assert fastest_flow(field) == 5 and fastest_flow(field, 0.1) == 2.5
