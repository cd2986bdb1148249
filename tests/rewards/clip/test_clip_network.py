"""CLIP-based rewards against the published formulas, computed from the same files by other code."""

import json
import shutil

import clip_files
import numpy as np
import pytest
import torch
from clip_files import CONTEXT, SIZE
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.autograd import gradcheck
from transformers import CLIPModel, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rewardfl import rewards
from rewardfl.data import to_uint8
from rewardfl.rewards.clip import scorers
from rewardfl.rewards.clip.network import preprocess

PROMPT = "the dancer and the sea, the end."
NAMES = ("aesthetic", "clip_score", "hpsv2", "pickscore")


def smooth_video(seed, frames=4, height=60, width=88):
    """(3, F, H, W) whose frames differ in colour and form, of integer levels, so that PIL sees the same picture."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(3, frames, 7, 9, generator=generator)
    video = nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    return (video * 255).round() / 127.5 - 1


VIDEO = smooth_video(1)


def pictures(video):
    return [Image.fromarray(frame.numpy()) for frame in to_uint8(video)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    clip_files.write_clip(folder / "clip")
    clip_files.write_clip(folder / "large", projection=768)
    clip_files.write_clip(folder / "pickscore", activation="gelu", eos_token_id=2)  # as old configs have it
    clip_files.write_head(folder / "head.pth")
    clip_files.write_open_clip(folder / "hps.pt")
    clip_files.write_tokenizer(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorers, "VIT_H_14", clip_files.OPEN_CLIP)
        yield folder


def settings(files, name):
    return {
        "aesthetic": {"model_dir": files / "large", "head": files / "head.pth"},
        "clip_score": {"model_dir": files / "clip"},
        "hpsv2": {"checkpoint": files / "hps.pt", "tokenizer_dir": files / "tokenizer"},
        "pickscore": {"model_dir": files / "pickscore", "tokenizer_dir": files / "tokenizer"},
    }[name]


@pytest.fixture(scope="module")
def built(files):
    return {name: rewards.build(name, settings(files, name)) for name in NAMES}


@torch.no_grad()
def published(files, name, video, prompt):
    """(F,) scores as the authors' code gives them for PIL images."""
    images = pictures(video)
    if name == "hpsv2":
        state = torch.load(files / "hps.pt")["state_dict"]
        ids = CLIPTokenizer.from_pretrained(files / "tokenizer")(prompt).input_ids
        tokens = torch.tensor([ids + [0] * (CONTEXT - len(ids))])
        pixels = torch.stack([hps_pixels(image) for image in images])
        return (clip_files.open_clip_image(state, pixels) @ clip_files.open_clip_text(state, tokens).T)[:, 0]
    folder = settings(files, name)["model_dir"]
    model = CLIPModel.from_pretrained(folder)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    pixels = processor(images, return_tensors="pt").pixel_values
    tokens = CLIPTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")(
        [prompt], padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt"
    )
    output = model(pixel_values=pixels, **tokens)
    if name == "aesthetic":
        return clip_files.write_head(files / "head.pth")(output.image_embeds)[:, 0]
    if name == "pickscore":
        return output.logits_per_image[:, 0]
    return 100 * (output.image_embeds @ output.text_embeds.T)[:, 0].clamp(min=0)


def hps_pixels(image):
    """HPSv2's transform on one image: floats first, longest edge to SIZE, black around, normalised."""
    scale = SIZE / max(image.size)
    size = tuple(round(edge * scale) for edge in image.size)
    channels = [Image.fromarray(np.asarray(channel, np.float32) / 255) for channel in image.split()]
    small = np.stack([np.asarray(channel.resize(size, Image.BICUBIC)) for channel in channels])
    square = np.zeros((3, SIZE, SIZE), np.float32)
    left, top = (SIZE - size[0]) // 2, (SIZE - size[1]) // 2
    square[:, top : top + size[1], left : left + size[0]] = small
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    return torch.from_numpy((square - mean[:, None, None]) / std[:, None, None])


# 2e-3 of the cosine for PIL's rounding, which HPSv2 does without, and a hundred times that for a hundred times the
# cosine; quick_gelu in place of gelu moves HPSv2 by less than 2e-3
TOLERANCE = {"aesthetic": 2e-3, "clip_score": 0.2, "hpsv2": 1e-5, "pickscore": 0.2}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("video", [VIDEO, smooth_video(2, 3, 100, 50), smooth_video(3, 2, 20, 30)], ids="wts")
def test_the_score_is_the_published_one(files, built, name, video):
    reward = built[name]
    expected = published(files, name, video, PROMPT)[1:]
    output = reward(video[None], [reward.reference(video, PROMPT)])
    assert output.valid.tolist() == [True] and output.score.dtype == torch.float32
    torch.testing.assert_close(output.score[0], expected.mean(), atol=TOLERANCE[name], rtol=0)
    torch.testing.assert_close(output.parts["frame_min"][0], expected.min(), atol=TOLERANCE[name], rtol=0)


@pytest.mark.parametrize("shape", [(90, 130), (130, 90), (30, 35)])
def test_preprocessing_is_pils_but_for_its_rounding(shape):
    """On noise, the worst case: at most one level in any pixel."""
    levels = torch.randint(0, 256, (2, 3, *shape), generator=torch.Generator().manual_seed(0))
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    images = [Image.fromarray(frame.permute(1, 2, 0).byte().numpy()) for frame in levels]
    expected = processor(images, return_tensors="pt").pixel_values
    difference = (preprocess(levels / 127.5 - 1, SIZE) - expected).abs()
    assert difference.max() < 1.01 / 255 / 0.26 and difference.mean() < 0.35 / 255 / 0.26


def test_pixels_outside_the_range_are_clipped():
    frames = (4 * VIDEO.transpose(0, 1)).requires_grad_()
    pixels = preprocess(frames, SIZE)
    torch.testing.assert_close(pixels, preprocess(frames.clamp(-1, 1), SIZE))
    (gradient,) = torch.autograd.grad(pixels.sum(), frames)
    assert not gradient[frames.abs() > 1].any() and gradient.any()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_equals_finite_differences(files, name):
    reward = rewards.build(name, settings(files, name) | {"chunk": 2, "pooling": "worst-2"}).double()
    video = (0.8 * VIDEO[None]).double().requires_grad_()  # clear of -1 and 1, where the clipping has a kink
    reference = reward.reference(video[0].detach(), PROMPT)
    (gradient,) = torch.autograd.grad(reward(video, [reference]).score.sum(), video)
    assert (gradient[:, :, 0] == 0).all() and gradient[:, :, 1:].abs().sum() > 0
    assert gradcheck(lambda x: reward(x, [reference]).score, video, eps=1e-5, atol=0, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("eos", [None, 2])
def test_an_embedding_does_not_depend_on_eos_of_the_config(tmp_path, eos):
    folder = clip_files.write_clip(tmp_path / "clip", eos_token_id=eos)
    model, tokenizer = CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    model.text_model.eos_token_id = len(tokenizer) - 1
    reward = rewards.build("clip_score", {"model_dir": folder})
    for prompt in (PROMPT, "and " * 40):
        padded = {"padding": "max_length", "max_length": CONTEXT, "truncation": True, "return_tensors": "pt"}
        with torch.no_grad():
            features = model.get_text_features(tokenizer(prompt, **padded).input_ids).pooler_output[0]
        expected = nn.functional.normalize(features, dim=-1)
        torch.testing.assert_close(reward.reference(VIDEO, prompt)["text"], expected, atol=1e-5, rtol=0)


def test_scales_are_settings(files, built):
    with pytest.raises(ValueError, match="reward 'clip_score' compares a clip with its prompt, which is empty"):
        built["clip_score"].reference(VIDEO)
    for name, setting, factor in (("pickscore", {"divisor": 26}, 1 / 26), ("clip_score", {"weight": 2.5}, 1 / 40)):
        reference, scaled = built[name].reference(VIDEO, PROMPT), rewards.build(name, settings(files, name) | setting)
        score = built[name](VIDEO[None], [reference]).score
        torch.testing.assert_close(scaled(VIDEO[None], [reference]).score, factor * score)
    assert scaled.from_cosine(torch.tensor([-0.2, 0.2])).tolist() == pytest.approx([0, 0.5])


def test_models_are_frozen_and_identified(files, built, tmp_path):
    for reward in built.values():
        assert not any(parameter.requires_grad for parameter in reward.parameters())
        assert not any(module.training for module in reward.children())
    assert built["aesthetic"].fingerprint() == {"name": "aesthetic"}
    same = rewards.build("clip_score", settings(files, "clip_score") | {"frames": 1})
    assert same.fingerprint() == built["clip_score"].fingerprint()
    other = rewards.build("clip_score", {"model_dir": clip_files.write_clip(tmp_path / "other", seed=1)})
    assert other.fingerprint() != same.fingerprint()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def keep_vision(path):
    save_file({name: value for name, value in load_file(path).items() if "text" not in name}, path)


WRONG_FILES = [
    ("clip_score", lambda f: (f / "clip/config.json").unlink(), "clip/config.json does not exist"),
    ("clip_score", lambda f: truncate(f / "clip/model.safetensors"), "is cut off, damaged"),
    ("clip_score", lambda f: keep_vision(f / "clip/model.safetensors"), r"lack \d+ tensors, such as text_model"),
    ("clip_score", lambda f: edit_json(f / "clip/config.json", model_type="siglip"), "type 'siglip'; 'clip' is needed"),
    ("hpsv2", lambda f: edit_json(f / "tokenizer/vocab.json", more=62), "has 63 tokens, the model knows 62"),
    ("hpsv2", lambda f: torch.save({"a": torch.ones(1)}, f / "hps.pt"), "no tensors by name under 'state_dict'"),
    ("aesthetic", lambda f: torch.save({"a": torch.ones(1)}, f / "head.pth"), "is not the head .* such as 0.bias"),
    ("aesthetic", lambda f: clip_files.write_clip(f / "large"), "embeds images in 24 numbers, not 768"),
]


@pytest.mark.parametrize("name, spoil, message", WRONG_FILES)
def test_wrong_files_are_refused(files, tmp_path, name, spoil, message):
    folder = shutil.copytree(files, tmp_path / "files")
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        rewards.build(name, settings(folder, name))


def test_a_half_precision_checkpoint_is_loaded_in_float32(files, tmp_path):
    state = torch.load(files / "hps.pt")["state_dict"]
    torch.save({"state_dict": {key: value.half() for key, value in state.items()}}, tmp_path / "hps.pt")
    model = scorers.load_open_clip(tmp_path / "hps.pt")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
