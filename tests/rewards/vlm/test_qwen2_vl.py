"""VideoAlign and HPSv3 against transformers' own processor and model, PEFT's layers, and heads written here."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import vlm_files
from PIL import Image
from test_clip_network import pictures, smooth_video, truncate
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from rewardfl import config, rewards
from rewardfl.rewards.vlm import hpsv3, video_align
from rewardfl.rewards.vlm.video_align import read_training_config, sampled_frames

PROMPT, OTHER = "the child, waving", "a {zebra}"
PUBLISHED = 256 * 28 * 28  # pixels of a frame; most tests show a sixteenth of it
# Qwen2-VL-Instruct's turns
TEMPLATE = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


VIDEO = smooth_video(1, 5)


@pytest.fixture(scope="module", autouse=True)
def shrunk():
    """Small frames, and the digests of our own questions in place of the authors'."""
    assert hpsv3.PIXELS == PUBLISHED and video_align.MIN_PIXELS == PUBLISHED / 2
    clip, frame = map(vlm_files.digest, (vlm_files.VIDEO_QUESTION, "".join(vlm_files.FRAME_QUESTION)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_align, "CLIP_QUESTION", replace(video_align.CLIP_QUESTION, digest=clip))
        patch.setattr(hpsv3, "FRAME_QUESTION", replace(hpsv3.FRAME_QUESTION, digest=frame))
        patch.setattr(hpsv3, "PIXELS", vlm_files.PIXELS)
        patch.setattr(video_align, "MIN_PIXELS", vlm_files.PIXELS // 2)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of all files, and of each scorer transformers' model and tokenizer."""
    folder = tmp_path_factory.mktemp("vlm")
    qwen = vlm_files.write_qwen(folder / "qwen")
    vlm_files.write_questions(folder)
    video = vlm_files.write_video_align(folder / "video_align", qwen, video_align.CLIP_QUESTION.score_tokens)
    return folder, video, vlm_files.write_hpsv3(folder / "HPSv3.safetensors", qwen, hpsv3.FRAME_QUESTION.score_tokens)


@pytest.fixture(scope="module")
def files(written):
    return written[0]


def settings(files, name, **others):
    paths = {
        "video_align": {
            "checkpoint_dir": files / "video_align", "prompt_file": files / "prompt_template.py", "fps": 16,
        },
        "hpsv3": {"checkpoint": files / "HPSv3.safetensors", "prompt_file": files / "data_collator_qwen.py"},
    }[name]  # fmt: skip
    return paths | {"model_dir": files / "qwen", "dtype": "float32"} | others


def build(files, name, **others):
    return rewards.build(name, settings(files, name, **others))


def encode(tokenizer, vision, count, text):
    """Return tokens (1, L) of the chat with `count` placeholders of a picture."""
    turns = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"<|vision_start|>{vision * count}<|vision_end|>{text}"},
    ]
    chat = tokenizer.apply_chat_template(turns, chat_template=TEMPLATE, tokenize=False)
    return tokenizer(chat, return_tensors="pt").input_ids


def hidden_states(model, tokens, **inputs):
    """Return (L, D) of transformers' model at the positions 0, 1, 2, ..."""
    positions = torch.arange(tokens.shape[1]).expand(3, 1, -1)
    return model(input_ids=tokens, position_ids=positions, **inputs).last_hidden_state[0]


def video_patches(video, frames, size):
    """Patches of a video as transformers' processor makes them of images, two frames to a patch, and the grid.

    VideoAlign resizes by torchvision: torch's bicubic on bytes, clipped and rounded.
    """
    levels = (video[:, frames].transpose(0, 1) + 1) * 127.5
    levels = F.interpolate(levels, size, mode="bicubic", antialias=True).clamp(0, 255).round().byte()
    images = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in levels]
    inputs = Qwen2VLImageProcessorPil()(images, return_tensors="pt")
    patches = inputs.pixel_values.view(len(frames) // 2, 2, -1, 3, 2, 14, 14)  # pair, its image, patch, channel, twice
    patches = torch.stack([patches[:, 0, :, :, 0], patches[:, 1, :, :, 0]], 3).reshape(-1, 3 * 2 * 14 * 14)
    return patches, torch.tensor([[len(frames) // 2, *inputs.image_grid_thw[0, 1:].tolist()]])


@torch.no_grad()
def published_parts(model, tokenizer, video, prompt, frames):
    """(3,) normalised vq, mq, ta as inference.py and trainer.py of VideoAlign have them."""
    inner = model.base_model.model if "Peft" in type(model).__name__ else model
    size = smart_resize(*video.shape[2:], 28, vlm_files.PIXELS // 2, vlm_files.PIXELS)
    patches, grid = video_patches(video, frames, size)
    text = vlm_files.VIDEO_QUESTION.format(text_prompt=prompt)
    tokens = encode(tokenizer, "<|video_pad|>", len(patches) // 4, text)
    states = hidden_states(inner.model, tokens, pixel_values_videos=patches, video_grid_thw=grid)
    logits = inner.rm_head(states)
    special = tokenizer.convert_tokens_to_ids(list(video_align.CLIP_QUESTION.score_tokens))
    rows = logits[torch.isin(tokens[0], torch.tensor(special))]
    raw = rows.diagonal() if rows.shape[1] == 3 else rows[:, 0]
    return torch.stack([
        (value - vlm_files.NORM[f"{part}_mean"]) / vlm_files.NORM[f"{part}_std"]
        for part, value in zip(("VQ", "MQ", "TA"), raw, strict=True)
    ])  # fmt: skip


@torch.no_grad()
def published_mu(model, tokenizer, video, prompt):
    """(F,) mu of each frame as HPSv3's inference.py has it: PIL's resize, within transformers' processor."""
    text = vlm_files.FRAME_QUESTION[0].format(text_prompt=prompt) + vlm_files.FRAME_QUESTION[1]
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": vlm_files.PIXELS, "longest_edge": vlm_files.PIXELS})
    scores = []
    for picture in pictures(video):
        inputs = processor(picture, return_tensors="pt")
        tokens = encode(tokenizer, "<|image_pad|>", len(inputs.pixel_values) // 4, text)
        states = hidden_states(model.model, tokens, **inputs)
        scores.append(model.rm_head(states[tokens[0] == tokenizer.convert_tokens_to_ids("<|Reward|>")])[0, 0])
    return torch.stack(scores)


@pytest.mark.parametrize(
    "outputs, old_names, lora", [(3, True, True), (1, True, True), (3, False, True), (3, True, False)]
)
def test_video_align_scores_as_published(files, tmp_path, outputs, old_names, lora):
    folder, score_tokens = tmp_path / "published", video_align.CLIP_QUESTION.score_tokens
    scorer = vlm_files.write_video_align(folder, files / "qwen", score_tokens, outputs, old_names=old_names, lora=lora)
    reward = build(files, "video_align", checkpoint_dir=folder)
    results = []
    for seed, prompt in ((1, PROMPT), (1, OTHER), (3, PROMPT)):
        video = smooth_video(seed, 5, 84, 112)
        results.append(published_parts(*scorer, video, prompt, [0, 1, 3, 4]))
        output = reward(video[None], [reward.reference(video, prompt)])
        parts = torch.stack([output.parts[name][0] for name in ("vq", "mq", "ta")])
        torch.testing.assert_close(parts, results[-1], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(output.score[0], parts.sum())
    assert (results[0] - results[2]).abs().min() > 1e-3 and (results[0] - results[1])[2].abs() > 1e-3


@pytest.mark.parametrize("shape", [(100, 50), (180, 320)])
def test_video_align_resizes_as_published_but_for_rounding(written, shape):
    files, scorer, _ = written
    video = smooth_video(2, 4, *shape)
    reward = build(files, "video_align")
    parts = reward.score_parts(video, reward.reference(video, PROMPT)["tokens"])
    torch.testing.assert_close(parts, published_parts(*scorer, video, PROMPT, [0, 1, 2, 3]), atol=3e-2, rtol=0)


@pytest.mark.parametrize("shape, tolerance", [((112, 112), 2e-5), ((700, 300), 3e-2), ((20, 30), 3e-2)])
def test_hpsv3_scores_as_published(written, shape, tolerance):
    files, _, scorer = written
    reward = build(files, "hpsv3", frames="all", first_frame=True, chunk=2)
    video = smooth_video(2, 3, *shape)
    expected = published_mu(*scorer, video, PROMPT)
    output = reward(video[None], [reward.reference(video, PROMPT)])
    torch.testing.assert_close(output.score[0], expected.mean(), atol=tolerance, rtol=0)
    torch.testing.assert_close(output.parts["frame_min"][0], expected.min(), atol=tolerance, rtol=0)
    assert expected.max() - expected.min() > 0.1
    assert (expected - published_mu(*scorer, video, OTHER)).abs().max() > 0.1


@pytest.mark.parametrize(
    "count, fps, frames, expected",
    [
        (81, 16, None, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),  # 10.1 at two a second
        (17, 16, None, [0, 5, 11, 16]), (5, 16, None, [0, 1, 3, 4]), (3, 16, None, [0, 2]),  # at least four
        (81, 16, 5, [0, 27, 53, 80]),  # half to even
        (7, 16, 40, [0, 1, 2, 4, 5, 6]),
    ],
)  # fmt: skip
def test_frames_are_sampled_evenly(count, fps, frames, expected):
    assert sampled_frames(count, fps, 2.0, frames) == expected


@pytest.mark.parametrize("chosen, fps", [({}, 24), ({"fps": 8}, 8)])
def test_a_run_passes_its_frame_rate(files, chosen, fps):
    values = {key: value for key, value in settings(files, "video_align").items() if key != "fps"} | chosen
    spec = config.RewardSpec(
        key="reward.terms.score.name", label="score", name="video_align", settings=values, weight=1.0
    )
    ((resolved, _),) = rewards.resolve_rewards([spec], 24)
    assert resolved.settings["fps"] == fps


@pytest.mark.parametrize("name", ["video_align", "hpsv3"])
def test_the_gradient_equals_finite_differences(files, name):
    reward = build(files, name, frames=4 if name == "video_align" else 2).double()
    video = (0.8 * VIDEO[None]).double().requires_grad_()  # clear of -1 and 1, where the clipping has a kink
    reference = reward.reference(video[0].detach(), PROMPT)
    output = reward(video, [reference])
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    frames = [0, 1, 3, 4] if name == "video_align" else [1, 4]
    assert gradient.isfinite().all() and gradient.abs().sum((0, 1, 3, 4)).nonzero()[:, 0].tolist() == frames
    # transformers computes rotations and RMSNorm in float32: the step is large for float64
    direction, step = gradient / gradient.norm(), 2e-3
    with torch.no_grad():
        up, down = (reward(video + sign * step * direction, [reference]).score.item() for sign in (1, -1))
    assert (up - down) / (2 * step) == pytest.approx(gradient.norm().item(), rel=1e-3)


def test_checkpointing_gives_the_same_gradient(files):
    gradients = []
    for checkpointing, runs in ((True, 2), (False, 1)):
        reward, calls = build(files, "video_align", checkpointing=checkpointing), []
        for blocks in (reward.judge.model.visual.blocks, reward.judge.model.language_model.layers):
            blocks[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        video = VIDEO[None].clone().requires_grad_()
        gradients += torch.autograd.grad(reward(video, [reward.reference(VIDEO, PROMPT)]).score.sum(), video)
        assert len(calls) == 2 * runs
    torch.testing.assert_close(*gradients, atol=1e-8, rtol=1e-5)


def test_parts_are_weighed(files):
    reward = build(files, "video_align", parts={"ta": 0.5, "mq": 2})
    output = reward(VIDEO[None], [reward.reference(VIDEO, PROMPT)])
    torch.testing.assert_close(output.score, 2 * output.parts["mq"] + 0.5 * output.parts["ta"])
    with pytest.warns(UserWarning, match="only vq turns videos into animation"):
        assert build(files, "video_align", parts={"vq": 1}).chosen.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="at least one of the weights of vq, mq and ta"):
        build(files, "video_align", parts={"vq": 0})


@pytest.mark.parametrize("name", ["video_align", "hpsv3"])
def test_bfloat16_is_the_default_and_scores_are_float32(files, name):
    exact, values = build(files, name), settings(files, name)
    del values["dtype"]
    reward = rewards.build(name, values)
    assert reward.judge.model.dtype == torch.bfloat16 and next(reward.head.parameters()).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in reward.parameters())
    assert not any(module.training for module in reward.children())
    score, expected = (each(VIDEO[None], [each.reference(VIDEO, PROMPT)]).score for each in (reward, exact))
    torch.testing.assert_close(score, expected, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("name", ["video_align", "hpsv3"])
def test_questions_depend_on_prompt_and_files(files, tmp_path, name):
    reward = build(files, name)
    with pytest.raises(ValueError, match=f"reward '{name}' compares a clip with its prompt, which is empty"):
        reward.reference(VIDEO)
    with pytest.raises(ValueError, match="in it, which Qwen2-VL reserves for itself"):
        reward.reference(VIDEO, f"a {reward.judge.question.score_tokens[-1]} dog")
    assert build(files, name).fingerprint() == reward.fingerprint()
    other = tmp_path / "other.py"
    other.write_text(settings(files, name)["prompt_file"].read_text() + "\n")
    assert build(files, name, prompt_file=other).fingerprint() != reward.fingerprint()


def edit(path, section="", **values):
    """Change keys of a section of a JSON file, or of the file; None deletes a key."""
    content = json.loads(path.read_text())
    target = content[section] if section else content
    target.update(values)
    for key in [key for key, value in target.items() if value is None]:
        del target[key]
    path.write_text(json.dumps(content))


def test_the_lora_has_the_factor_of_the_configuration(files, tmp_path):
    path = tmp_path / "model_config.json"
    shutil.copy(files / "video_align" / path.name, path)
    assert read_training_config(path).lora_factor == vlm_files.ALPHA / vlm_files.RANK
    edit(path, "peft_lora_config", use_rslora=True)
    assert read_training_config(path).lora_factor == vlm_files.ALPHA / vlm_files.RANK**0.5


def replace_text(path, old, new):
    path.write_text(path.read_text().replace(old, new))


CONFIG, STEP = "video_align/model_config.json", "video_align/checkpoint-11352"
WRONG_FILES = [
    (lambda f: replace_text(f / "prompt_template.py", "import", "def ("), "cannot be read as"),
    (lambda f: replace_text(f / "prompt_template.py", "\\nI", "\\ni"), "is not the text of"),
    (lambda f: (f / "qwen/tokenizer.json").unlink(), "<|video_pad|> is None, not config.json's 264"),
    (lambda f: truncate(f / "qwen/tokenizer.json"), "is not JSON, or cut off"),
    (lambda f: edit(f / "qwen/config.json", model_type="qwen3"), "'qwen3'; 'qwen2_vl' is needed"),
    (lambda f: edit(f / "qwen/config.json", "vision_config", mlp_ratio=3), "such as visual.blocks.0.mlp"),
    (lambda f: truncate(f / STEP / "model.pth"), "model.pth cannot be read as a torch file: it is cut off"),
    (lambda f: shutil.rmtree(f / STEP), "is not a scorer with this head"),  # the other step's is empty
    (lambda f: [shutil.rmtree(path) for path in f.glob("*/checkpoint-*")], "has no folder checkpoint-"),
    (lambda f: edit(f / CONFIG, "data_config", prompt_template_type="simple"), "on another question"),
    (lambda f: edit(f / CONFIG, "inference_config", MQ_std=None), "lacks 'MQ_std', which"),
    (lambda f: (f / CONFIG).unlink(), "model_config.json does not exist"),
]


@pytest.mark.parametrize("spoil, message", WRONG_FILES)
def test_wrong_files_are_refused(files, tmp_path, spoil, message):
    folder = shutil.copytree(files, tmp_path / "files")
    spoil(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        build(folder, "video_align")
