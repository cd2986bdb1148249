"""Both scripts on small random text-to-image models, whose mathematics test_contract.py checks."""

import shutil

import numpy as np
import pytest
import test_distributed as distributed
import torch
from conftest import run_tool
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from image_pipelines import SIDE, random_flux, random_flux2_klein, random_qwen_image, random_sd3, random_z_image
from lora_dialects import read_adapter
from runs import GRPO_FAST, RED, call, launch, launch_grpo, metrics

from rewardfl import backbones, data, lora
from rewardfl.backbones.image import qwen_image, z_image
from rewardfl.backbones.image.flux import pack
from rewardfl.backbones.protocol import Adapter, Experts, Schedule, Source
from rewardfl.estimate import measure
from rewardfl.noise import draw_noise
from rewardfl.training import setup_model
from rewardfl.weights.shards import InputError
from rewardfl_tools import generate

pytestmark = pytest.mark.slow(210)

PROMPTS = ["a red ball", "a blue ball", "a ball", "the ball and the red ball"]
# by model.model_name: its builder, and its embedded guidance
MODELS = {
    "sd3": (random_sd3, None), "flux": (random_flux, 3.5), "qwen_image": (random_qwen_image, None),
    "flux2_klein": (random_flux2_klein, None), "z_image": (random_z_image, None),
}  # fmt: skip
FIRST_LAYER = {"z_image": "layers.0.attention.to_q"}
TOKENS = {
    "qwen_image": qwen_image.TOKENS,
    "z_image": z_image.TOKENS,
}  # for the estimate, of prompts that are not padded


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            MODELS[name][0]().save_pretrained(folders[name] / "model")
            (folders[name] / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS, ""]))
        return folders[name]

    return folder


def settings(name, folder):
    """What a configuration says of the model and its prompts."""
    guidance = MODELS[name][1]
    return [
        f"model.model_name={name}", f"model.model_paths={folder / 'model'}", "model.trainable_models=dit", *RED,
        f"data.file_name={folder / 'prompts.csv'}", f"data.cache_dir={folder / 'cache'}", "data.num_frames=1",
        f"data.height={SIDE}", f"data.width={SIDE}", "sample.shift=null", "reward.others={}", "reward.motion_weight=0",
        *([] if guidance is None else [f"model.embedded_guidance={guidance}"]),
    ]  # fmt: skip


SHORT = {("reward_fl", "flux"), ("reward_fl", "qwen_image"), ("flow_grpo", "qwen_image")}  # of few tokens
LEARNING = [
    pytest.param(how, name, marks=[] if (how, name) in SHORT else pytest.mark.long)
    for how in ("reward_fl", "flow_grpo")
    for name in MODELS
]


@pytest.mark.parametrize("how, name", LEARNING)
def test_a_colour_is_learned(folder_of, name, how, tmp_path):
    common = [
        *settings(name, folder_of(name)), "train.learning_rate=2e-2", "train.warmup_steps=0", "train.max_steps=24",
        "run.save_steps=24", f"run.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    if how == "reward_fl":
        launch(*common, "reward.kl_weight=0", "sample.noises_per_sample=1")
    else:
        launch_grpo(*common, "grpo.group_size=4", "grpo.groups=4", "train.per_device_train_batch_size=8")
    scores = [line["reward/mean"] for line in metrics(tmp_path / "run")]
    first, last = (sum(four) / 4 for four in (scores[:4], scores[-4:]))
    assert last > first + {"reward_fl": 0.01, "flow_grpo": 0.002}[how], scores
    (shown,) = (tmp_path / "run" / "samples" / "step-000024").iterdir()
    assert shown.name == "00.png" and data.read_picture(shown).shape == (SIDE, SIDE, 3)
    state = read_adapter(tmp_path / "run" / "checkpoints" / "step-000024" / "transformer" / lora.WEIGHTS_NAME)
    assert any(layer.startswith(FIRST_LAYER.get(name, "transformer_blocks.0.attn.to_q")) for layer in state)


def test_generate_is_the_stock_pipeline(folder_of, tmp_path):
    """Of the noise that the seed gives; 8 bits of rounding."""
    name, guidance = "flux", 3.5
    folder = folder_of(name) / "model"
    words = ["--model-name", name, "--model", folder, "--prompt", PROMPTS[0], "--height", SIDE, "--width", 2 * SIDE]
    words += ["--num-frames", 1, "--steps", 4, "--shift", "null", "--dtype", "float32", "--seed", 5]
    words += ["--embedded-guidance", guidance]
    run_tool(generate.main, *words, "--out", tmp_path / "new" / "ball.png")
    source = Source(model_paths=str(folder), dtype="float32", embedded_guidance=guidance)
    noise = draw_noise((1, *backbones.open(name, source).latent_shape(SIDE, 2 * SIDE, 1)), 5)[:, :, 0]
    stock = random_flux()(
        prompt=PROMPTS[0], height=SIDE, width=2 * SIDE, num_inference_steps=4, output_type="pt", latents=pack(noise),
        guidance_scale=guidance,
    ).images[0]  # fmt: skip
    ours = data.read_picture(tmp_path / "new" / "ball.png").permute(2, 0, 1) / 255
    assert (ours - stock).abs().max() < 1 / 255


@pytest.mark.parametrize("name", ["qwen_image", "flux2_klein", pytest.param("z_image", marks=pytest.mark.long)])
def test_the_estimate_knows_every_type_of_block(folder_of, name):
    """Weights, adapter and FLOPs of the real network, whose blocks differ."""
    source = Source(model_paths=str(folder_of(name) / "model"), dtype="float32", embedded_guidance=MODELS[name][1])
    backbone = backbones.open(name, source)
    short = {"q", "o", "add_k", "o_mlp"} & backbone.layer_names.keys()
    targets = tuple(backbone.layer_names[name] for name in sorted(short))
    parts, shape = backbone.on_meta(SIDE, 2 * SIDE, 1), backbone.latent_shape(SIDE, 2 * SIDE, 1)
    predicted = measure.measure_expert(
        parts.experts["transformer"], torch.float32, backbone.block_classes, Adapter(4, targets)
    )
    model = backbone.load_expert("transformer")
    assert predicted.weights == measure.nbytes([*model.parameters(), *model.buffers()])
    schedule = backbone.schedule(4, None, shape)
    conditioning = backbone.text_encoder(torch.device("cpu"))(PROMPTS[0])
    if name in TOKENS:
        conditioning = {
            key: torch.cat([value] * TOKENS[name], 1)[:, : TOKENS[name]] for key, value in conditioning.items()
        }
    assert {k: v.shape for k, v in conditioning.items()} == {k: v.shape for k, v in parts.conditioning.items()}
    x, network = torch.randn(1, *shape), Experts({"transformer": model})
    with torch.no_grad(), measure.Living([]) as living:
        velocity = backbone.velocity(network, x, 0, schedule, conditioning)
    assert velocity.shape == x.shape and living.flops.total() == predicted.forward_frozen
    lora.inject(model, 4, 4, list(targets), seed=0)
    assert predicted.adapter_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    decoder = measure.measure_chunks(parts.decoder, parts.vae)
    assert len(decoder) == 1 and decoder[0].backward > decoder[0].forward > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name, launcher", [("flux", "fsdp2"), ("z_image", "ddp")])
def test_two_processes_are_one(folder_of, name, launcher, tmp_path):
    """With two types of blocks, whose text and image streams are gathered one block at a time; and with lists."""
    words = [
        "train_flow_grpo.py", "--config", "tests/grpo.yaml", *GRPO_FAST,
        *settings(name, folder_of(name)),
        "grpo.group_size=4", "train.per_device_train_batch_size=1", "grpo.kl_weight=0.01",
        "train.max_steps=2", "run.save_steps=2", "train.warmup_steps=0", "train.max_grad_norm=0.01",
    ]  # fmt: skip
    runs = []
    for launched in ("cpu", launcher):
        folder = tmp_path / launched
        distributed.run(launched, folder, words, BREAK_GRADIENT="-1:-1")
        runs.append(folder / "train_flow_grpo.py")
    actual, expected = (metrics(run) for run in runs)
    keys = ("grad_norm", "reward/mean", "reward/std_in_group", "policy/kl")
    distributed.assert_same_lines(actual[-2:], expected[-2:], keys, rel=1e-3)
    distributed.assert_same_adapter(*runs, "step-000002")


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.num_frames=5", "data.num_frames must be 1, got 5"),
        (f"data.height={SIDE + 4}", f"data.height must be a multiple of 8, at most 96, got {SIDE + 4}"),
        ("model.embedded_guidance=3.5", "model.embedded_guidance: "),
        ("model.model_name=flux", "set model.model_name to the model that it is"),
        ("model.trainable_models=dit2", "model.trainable_models"),
        ("train.context_parallel=2", "train.context_parallel 2: this model does not split its tokens; set it to 1"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(folder_of, monkeypatch, capsys, override, message, tmp_path):
    words = [*settings("sd3", folder_of("sd3")), f"run.output_dir={tmp_path / 'run'}", "train.max_steps=1"]
    monkeypatch.setattr(setup_model, "load_experts", None)
    code, _, error = call(monkeypatch, capsys, "--trust-code", *words, override)
    assert code == 2 and message in error, error
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("name", TOKENS)
def test_prompts_of_several_lengths_are_one_batch(folder_of, name):
    """What is padded is masked: each velocity equals that of its own batch."""
    backbone = backbones.open(name, Source(model_paths=str(folder_of(name) / "model"), dtype="float32"))
    encode, model = backbone.text_encoder(torch.device("cpu")), backbone.load_expert("transformer")
    conditioning = [encode(prompt) for prompt in ("a ball", PROMPTS[-1])]
    both = backbone.collate(conditioning)
    assert (
        both["mask"].sum(1).tolist() == [values["text"].shape[1] for values in conditioning] and not both["mask"].all()
    )
    shape = backbone.latent_shape(SIDE, SIDE, 1)
    schedule, x = backbone.schedule(4, None, shape), torch.randn(2, *shape)
    network = Experts({"transformer": model})
    with torch.no_grad():
        together = backbone.velocity(network, x, 1, schedule, both)
        alone = [backbone.velocity(network, x[i : i + 1], 1, schedule, conditioning[i]) for i in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_a_given_shift_is_the_same_for_all_sizes():
    backbone = backbones.describe("flux", Source(model_paths="FLUX.1-dev", embedded_guidance=3.5))
    fixed = [backbone.schedule(4, 3.0, backbone.latent_shape(side, side, 1)).sigmas for side in (32, 512)]
    assert torch.equal(*fixed)
    s = torch.tensor([1, 0.75, 0.5, 0.25])
    torch.testing.assert_close(fixed[0], torch.cat([3 * s / (1 + 2 * s), torch.zeros(1)]))


def test_a_shift_by_size_and_steps_and_guidance_of_a_distilled_model(tmp_path):
    """As in the stock pipeline, above 4300 tokens, too; guidance of a distilled model is noted."""
    pipe = random_flux2_klein(distilled=True)
    pipe.save_pretrained(tmp_path)
    backbone = backbones.describe("flux2_klein", Source(model_paths=str(tmp_path)))
    for steps, side in ((4, 32), (28, 128), (50, 264)):
        mu = compute_empirical_mu((side // 2) ** 2, steps)
        pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        assert torch.equal(backbone.schedule(steps, None, (4, 1, side, side)).sigmas, pipe.scheduler.sigmas)
    (line,) = backbone.differences(None, 4.0)
    assert "sample.guidance_scale is 4" in line and "distilled" in line and backbone.differences(None, 1.0) == []


def test_a_web_page_for_a_file_of_the_folder_is_named(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("sd3") / "model", tmp_path / "model")
    (folder / "tokenizer" / "vocab.json").write_text("<!DOCTYPE html><html>")
    with pytest.raises(InputError, match="tokenizer/vocab.json.* web page"):
        backbones.open("sd3", Source(model_paths=str(folder)))


def test_a_schedule_that_does_not_fall_is_refused():
    """Qwen-Image's for one step is not a number: its time shift divides 0 by 0."""
    backbone = backbones.describe("qwen_image", Source(model_paths="Qwen-Image"))
    shape = backbone.latent_shape(512, 512, 1)
    assert len(backbone.schedule(2, None, shape)) == 2
    with pytest.raises(
        InputError, match="^sample.num_inference_steps: 1 steps give this model the sigmas nan, 0, which"
    ):
        backbone.schedule(1, None, shape)
    sigmas = torch.tensor([1.0, 0.5, 0.5, 0.0])
    with pytest.raises(InputError, match="^sample.num_inference_steps: 3 steps"):
        Schedule(sigmas, 1000 * sigmas[:-1], ("transformer",) * 3)
