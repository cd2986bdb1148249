"""Both scripts, and generating with what they saved, on a small random model of each Wan but the first."""

import numpy as np
import pytest
import torch
from conftest import run_tool
from lora_dialects import read_adapter
from PIL import Image
from pipelines import random_variant
from runs import RED, launch, launch_grpo, metrics

from rewardfl import backbones, data, lora
from rewardfl.backbones.protocol import Source
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.data import clips
from rewardfl.evaluation import generation
from rewardfl_tools import convert_lora, generate, merge_lora

OTHERS = [name for name, variant in VARIANTS.items() if name != "wan2_2"]
REWARD = ["reward.terms.score.name=motion", "reward.reward_model_path=null", "reward.held_out_model_path=null"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            random_variant(name).save_pretrained(folders[name])
        return folders[name]

    return folder


def model(name, folder):
    trained = "dit,dit2" if len(VARIANTS[name].experts) > 1 else "dit"
    return [f"model.model_name={name}", f"model.model_paths={folder}", f"model.trainable_models={trained}"]


def adapters(run, step, name):
    files = [
        run / "checkpoints" / f"step-{step:06d}" / part / lora.WEIGHTS_NAME for part in VARIANTS[name].parts.values()
    ]
    return {f"{file.parent.name}.{key}": value for file in files for key, value in read_adapter(file).items()}


def test_videos_are_generated_at_the_models_frame_rate(folder_of, monkeypatch, tmp_path):
    """sample_fps of Wan-AI's configurations. Latents that are not finite are no video."""
    for name in VARIANTS:
        assert backbones.describe(name, Source()).frame_rate == (24 if "ti2v" in name else 16)
    name = "wan2_2_ti2v_text"
    small = ["--height=32", "--width=32", "--num-frames=5", "--steps=1", "--device=cpu", "--dtype=float32"]
    small += ["--model", folder_of(name), "--model-name", name, "--prompt=x"]
    for options, rate in ([], 24), (["--fps=8"], 8):
        out = tmp_path / f"{rate}.mp4"
        run_tool(generate.main, *small, *options, "--out", out)
        assert clips.read_video_header(out, 5).rate == rate
    monkeypatch.setattr(generation, "draw_noise", lambda shape, *_: torch.full(shape, torch.inf))
    text = run_tool(generate.main, *small, "--out", tmp_path / "inf.mp4", expect=2)
    assert "error: the latents are not finite" in text and not (tmp_path / "inf.mp4").exists()


@pytest.mark.slow(2)
def test_prompts_alone_train_a_text_to_video_model(folder_of, tmp_path):
    """With rewards of the video and its prompt; a face needs a picture."""
    table = tmp_path / "prompts.csv"
    table.write_text("prompt\na red ball\na blue ball\na ball\n")
    rest = [*model("wan2_2_ti2v_text", folder_of("wan2_2_ti2v_text")), f"data.file_name={table}"]
    run = tmp_path / "reward"
    launch(*rest, *RED, "train.max_steps=2", f"run.output_dir={run}")
    first, second = metrics(run)
    assert first["grad_norm"] > 0 and second["reward/mean"] != first["reward/mean"]
    (shown,) = (run / "samples" / "step-000002").glob("*.mp4")
    assert data.read_video(shown).shape == (5, 32, 32, 3)  # only the video: there is no real one next to it
    assert clips.read_video_header(shown, 5).rate == 24  # this model's, as no data.fps is set
    done = launch(*rest, "--dry-run", f"run.output_dir={tmp_path / 'refused'}", check=False)
    lacks = "reward.reward_model_path compares with a picture, and the row names none (photos, image"
    assert done.returncode == 2 and f"lines 2, 3, 4 (3 rows): {lacks}" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_both_scripts_train_and_what_they_saved_is_shown_and_merged(folder_of, tmp_path, name):
    folder = folder_of(name)
    # every step replayed, so that each expert has one
    rest = [*model(name, folder), *REWARD, "sample.mid_timestep=0", "reward.kl_weight=1", "run.save_steps=1"]
    rest += [f"lora.lora_target_modules={','.join(VARIANTS[name].layer_names)}"]  # Wan2.1's view of the image, too
    whole = tmp_path / "whole"
    launch(*rest, "train.max_steps=3", f"run.output_dir={whole}")
    assert all(value.any() for value in adapters(whole, 3, name).values())  # nothing stayed where it began
    rows = metrics(whole)
    assert rows[0]["actor/kl_loss"] == 0 < rows[-1]["actor/kl_loss"] and all(row["grad_norm"] > 0 for row in rows)

    run = tmp_path / "grpo"
    launch_grpo(*model(name, folder), "train.max_steps=1", f"run.output_dir={run}")
    (row,) = metrics(run)
    assert row["grad_norm"] > 0 and row["policy/ratio"] == 1

    image, video = tmp_path / "image.png", tmp_path / "video.npy"
    Image.new("RGB", (32, 32), (180, 140, 120)).save(image)
    settings = {
        "model": folder, "model-name": name, "prompt": "a person", "height": 32, "width": 32,
        "num-frames": 5, "steps": 2, "out": video, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    settings |= {"image": image} if VARIANTS[name].image != "none" else {}
    checkpoint, merged = whole / "checkpoints" / "latest", tmp_path / "merged"
    comfy, shown = tmp_path / "comfy", {}
    run_tool(convert_lora.main, "--lora", checkpoint, "--to", "comfy", "--out", comfy, "--verify")
    run_tool(merge_lora.main, "--base", folder, "--lora", comfy, "--out", merged, "--dtype", "fp32")
    for arm, changed in (("base", {}), ("adapted", {"adapter": checkpoint}), ("merged", {"model": merged})):
        run_tool(generate.main, *(f"--{key}={value}" for key, value in (settings | changed).items()))
        shown[arm] = np.load(video).astype(int)
        video.unlink()
    assert shown["base"].shape == (5, 32, 32, 3) and not np.array_equal(shown["base"], shown["adapted"])
    assert abs(shown["adapted"] - shown["merged"]).max() <= 1  # of 255
