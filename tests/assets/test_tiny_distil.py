"""The tiny world's four-step LoRAs: files like Wan2.2-Lightning's, and a sampler that is nearer to its teacher."""

import re

import make_tiny_world
import pytest
import torch
from conftest import ROOT, run_tool
from diffusers import WanImageToVideoPipeline
from safetensors.torch import load_file

from rewardfl import backbones, reward_flow
from rewardfl.backbones.protocol import Experts, Source, Velocity
from rewardfl.noise import draw_noise
from tiny_world import distil

WORLD = ROOT / "assets" / "tiny_world"
FILES = [WORLD / "lightning" / f"{noise}_noise_model.safetensors" for noise in ("high", "low")]


def open_world(files=("", "")):
    """Return the committed pipeline's backbone and its experts, with the LoRAs of two files fused."""
    source = Source(model_paths=str(WORLD / "pipeline"), dtype="float32", distilled=tuple(map(str, files)))
    backbone = backbones.open("wan2_2", source)
    return backbone, Experts({name: backbone.load_expert(name) for name in backbone.experts})


def test_the_files_have_lightnings_names_and_are_small():
    assert sum(path.stat().st_size for path in FILES) <= 1e6
    key = r"diffusion_model\.blocks\.[0-3]\.((self|cross)_attn\.[qkvo]|ffn\.[02])\.(lora_(down|up)\.weight|alpha)"
    for names in map(load_file, FILES):
        assert len(names) == 4 * 10 * 3 and all(re.fullmatch(key, name) for name in names)


def test_diffusers_loads_what_we_fuse():
    (_, experts), (_, plain) = open_world(FILES), open_world()
    pipe = WanImageToVideoPipeline.from_pretrained(WORLD / "pipeline", torch_dtype=torch.float32)
    for i, path in enumerate(FILES):
        pipe.load_lora_weights(path, load_into_transformer_2=i == 1, adapter_name=path.stem)
    pipe.fuse_lora(components=["transformer", "transformer_2"])
    pipe.unload_lora_weights()
    for name, expert in (("high_noise", pipe.transformer), ("low_noise", pipe.transformer_2)):
        ours, stock, base = (dict(each.state_dict()) for each in (experts.inside[name], expert, plain.inside[name]))
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        assert all(not torch.equal(ours[key], base[key]) for key in base if key.endswith("ffn.net.2.weight"))


@pytest.mark.long
@torch.no_grad()
def test_four_distilled_steps_are_nearer_to_the_teachers_many():
    (plain, base), (_, distilled) = open_world(), open_world(FILES)
    conditioning = plain.collate(distil.read_conditioning(plain, WORLD / "validation" / "metadata.csv")[:4])
    shape, ends = plain.latent_shape(80, 80, 9), []
    for experts, steps in ((base, 32), (base, 4), (distilled, 4)):
        velocity = Velocity(
            backbone=plain, model=experts, conditioning=conditioning, schedule=plain.schedule(steps, 5.0, shape)
        )
        ends.append(reward_flow.rollout(velocity, draw_noise((4, *shape), 7), velocity.schedule.sigmas, ()).x0)
    before, after = (float((end - ends[0]).square().mean()) for end in ends[1:])
    assert after < 0.65 * before


@pytest.mark.long
def test_the_tool_writes_the_same_files_again(tmp_path):
    assert f"{tmp_path}/pipeline is missing" in run_tool(make_tiny_world.main, "--distil", "--out", tmp_path, expect=2)
    contents = []
    (tmp_path / "train").mkdir()
    (tmp_path / "pipeline").symlink_to(WORLD / "pipeline")
    table = "\n".join((WORLD / "train" / "metadata.csv").read_text().splitlines()[:3])
    (tmp_path / "train" / "metadata.csv").write_text(table.replace("videos/", f"{WORLD}/train/videos/"))
    for _ in range(2):
        distil.distil(tmp_path, 1, 3, log=print)
        contents.append([(tmp_path / "lightning" / path.name).read_bytes() for path in FILES])
    assert contents[0] == contents[1] and contents[0][0] != contents[0][1]
