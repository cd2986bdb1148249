"""The tiny world's four-step LoRAs: what Wan2.2-Lightning's files are, and a sampler that is nearer to its teacher."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_tool
from diffusers import WanImageToVideoPipeline
from safetensors import safe_open

from rewardfl import backbones, groups, reward_flow
from rewardfl.backbones.seam import Experts, Schedule, Source, Velocity
from rewardfl.flow import linear_sigmas
from rewardfl_tools import make_tiny_world
from rewardfl_tools.tiny_world import distil

WORLD = ROOT / "assets" / "tiny_world"
FILES = tuple(WORLD / "lightning" / f"{noise}_noise_model.safetensors" for noise in ("high", "low"))


def open_world(*files):
    """The committed pipeline, with LoRAs fused or plain."""
    distilled = (*map(str, files or ("", "")), "fuse")
    return backbones.open("wan2_2", Source(model_paths=str(WORLD / "pipeline"), dtype="float32", distilled=distilled))


def load_experts(backbone):
    return Experts({name: backbone.load_expert(name) for name in backbone.experts})


def test_the_files_have_lightnings_names_and_are_small():
    assert sum(path.stat().st_size for path in FILES) <= 1e6
    for path in FILES:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
        layers = [
            f"diffusion_model.blocks.{block}.{layer}"
            for block in range(4)
            for layer in (*(f"{kind}_attn.{x}" for kind in ("self", "cross") for x in "qkvo"), "ffn.0", "ffn.2")
        ]
        roles = ("lora_down.weight", "lora_up.weight", "alpha")
        assert names == {f"{layer}.{role}" for layer in layers for role in roles}


def test_diffusers_loads_what_we_fuse():
    ours = load_experts(open_world(*FILES)).state_dict()
    plain = load_experts(open_world()).state_dict()
    pipe = WanImageToVideoPipeline.from_pretrained(WORLD / "pipeline", torch_dtype=torch.float32)
    for path, second in zip(FILES, (False, True), strict=True):
        pipe.load_lora_weights(path, load_into_transformer_2=second, adapter_name=path.stem)
    pipe.fuse_lora(components=["transformer", "transformer_2"])
    pipe.unload_lora_weights()
    for name, expert in (("high_noise", pipe.transformer), ("low_noise", pipe.transformer_2)):
        for key, value in expert.state_dict().items():
            torch.testing.assert_close(ours[f"inside.{name}.{key}"], value, rtol=1e-5, atol=1e-6)
        changed = f"inside.{name}.blocks.0.attn1.to_q.weight"
        assert float((ours[changed] - plain[changed]).abs().max()) > 1e-3


def test_the_target_is_the_teachers_way_and_the_student_walks_its_own():
    """Of dx/dsigma = x and of a student that answers twice the teacher's velocity."""
    seen, sigmas = [], linear_sigmas(distil.STEPS * distil.SUBSTEPS, 5.0)
    teacher = SimpleNamespace(reference=lambda x, step: x, schedule=Schedule(sigmas, sigmas[:-1], ("one",) * 16))
    weight = torch.tensor(2.0, requires_grad=True)

    class Student:
        schedule = Schedule(linear_sigmas(4, 5.0), sigmas[:4], ("one",) * 4)

        def __call__(self, x, step):
            seen.append(x)
            return weight * x

    steps = distil.Steps(Student(), teacher)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    growth = (1 + sigmas[4:9].diff()).prod()
    torch.testing.assert_close(steps.target(x, 1), (growth - 1) * x / (sigmas[8] - sigmas[4]))
    misfits = distil.fit_steps(steps, x)
    torch.testing.assert_close(seen[1], x * (1 + 2 * sigmas[:5:4].diff()))
    rates = [float(((1 + sigmas[i : i + 5].diff()).prod() - 1) / (sigmas[i + 4] - sigmas[i])) for i in (0, 4, 8, 12)]
    expected = [float(((2 - rate) * state).square().mean()) for rate, state in zip(rates, seen, strict=True)]
    assert misfits == pytest.approx(expected, rel=1e-4)
    slopes = [float((2 * (2 - rate) * state.square()).mean()) for rate, state in zip(rates, seen, strict=True)]
    assert float(weight.grad) == pytest.approx(sum(slopes), rel=1e-4)


@pytest.mark.long
@torch.no_grad()
def test_four_distilled_steps_are_nearer_to_the_teachers_many(count=4):
    plain, distilled = open_world(), open_world(*FILES)
    rows = distil.read_conditioning(plain, WORLD / "validation" / "metadata.csv")[:count]
    shape = plain.latent_shape(80, 80, 9)
    noise = groups.noise((count, *shape), seed=7)

    def sample(backbone, steps):
        schedule = backbone.schedule(steps, 5.0, shape)
        velocity = Velocity(backbone, load_experts(backbone), backbone.collate(rows), schedule)
        return reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0

    goal = sample(plain, 32)
    distances = [float((sample(backbone, 4) - goal).square().mean()) for backbone in (distilled, plain)]
    assert distances[0] < 0.65 * distances[1]


def test_the_tool_writes_the_same_files_again(tmp_path):
    """Of two people, in one update."""
    (tmp_path / "train").mkdir()
    (tmp_path / "pipeline").symlink_to(WORLD / "pipeline")
    lines = (WORLD / "train" / "metadata.csv").read_text().splitlines()[:3]
    (tmp_path / "train" / "metadata.csv").write_text("\n".join(lines).replace("videos/", f"{WORLD}/train/videos/"))
    written = []
    for _ in range(2):
        distil.distil(tmp_path, 1, 3, lambda text: None)
        written.append([(tmp_path / "lightning" / path.name).read_bytes() for path in FILES])
    assert written[0] == written[1] and written[0][0] != written[0][1]


def test_a_folder_without_a_pipeline_is_refused(tmp_path, monkeypatch):
    message = run_tool(make_tiny_world.main, "--distil", "--out", tmp_path, expect=2)
    assert f"error: --distil: no pipeline in {tmp_path}; give the folder of a built world as --out" in message
