"""Both scripts on small random text-to-image models, whose mathematics test_contract.py asks about."""

import json
import shutil

import numpy as np
import pytest
import test_distributed as distributed
import torch
from conftest import run_tool
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from image_pipelines import SIDE, random_flux, random_flux2_klein, random_qwen_image, random_sd3, random_z_image
from lora_dialects import read_adapter
from runs import COLOUR, CONFIG, GRPO_FAST, RED, call, launch, launch_grpo, metrics

from rewardfl import backbones, config, data, lora
from rewardfl.backbones.image import pipeline, qwen_image, z_image
from rewardfl.backbones.image.flux import pack
from rewardfl.backbones.protocol import Adapter, Experts, Schedule, Source
from rewardfl.estimate import measure
from rewardfl.evaluation import arms, image_report
from rewardfl.evaluation.records import Writer
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import model_files, setup_model
from rewardfl.weights.shards import InputError
from rewardfl_tools import evaluate, generate

pytestmark = pytest.mark.slow(210)

PROMPTS = ["a red ball", "a blue ball", "a ball", "the ball and the red ball"]
# how one is made, what it is told
MODELS = {
    "sd3": (random_sd3, None), "flux": (random_flux, 3.5), "qwen_image": (random_qwen_image, None),
    "flux2_klein": (random_flux2_klein, None), "z_image": (random_z_image, None),
}  # fmt: skip
FIRST_LAYER = {"z_image": "layers.0.attention.to_q"}
TOKENS = {"qwen_image": qwen_image.TOKENS, "z_image": z_image.TOKENS}  # of an estimate, where prompts are as they are


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            MODELS[name][0]().save_pretrained(made[name] / "model")
            (made[name] / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS, ""]))
        return made[name]

    return folder


def settings(name, folder):
    """What a configuration says of the model and its prompts."""
    told = MODELS[name][1]
    return [
        f"model.model_name={name}", f"model.model_paths={folder / 'model'}", "model.trainable_models=dit", *RED,
        f"data.file_name={folder / 'prompts.csv'}", f"data.cache_dir={folder / 'cache'}", "data.num_frames=1",
        f"data.height={SIDE}", f"data.width={SIDE}", "sample.shift=null", "reward.others={}", "reward.motion_weight=0",
        *([] if told is None else [f"model.embedded_guidance={told}"]),
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
    said = run_tool(generate.main, *words, "--num-frames", 5, "--out", tmp_path / "b.png", expect=2)
    assert "num_frames" in said and not (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("qwen_image", "flux2_klein") else pytest.mark.long) for n in MODELS]
)
def test_the_estimate_knows_every_kind_of_block(folder_of, name):
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
    told = backbone.text_encoder(torch.device("cpu"))(PROMPTS[0])
    if name in TOKENS:
        told = {key: torch.cat([value] * TOKENS[name], 1)[:, : TOKENS[name]] for key, value in told.items()}
    assert {k: v.shape for k, v in told.items()} == {k: v.shape for k, v in parts.conditioning.items()}
    x, network = torch.randn(1, *shape), Experts({"transformer": model})
    with torch.no_grad(), measure.Living([]) as living:
        velocity = backbone.velocity(network, x, 0, schedule, told)
    assert velocity.shape == x.shape and living.flops.total() == predicted.forward_frozen
    lora.inject(model, 4, 4, list(targets), seed=0)
    assert predicted.adapter_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    decoder = measure.measure_chunks(parts.decoder, parts.vae)
    assert len(decoder) == 1 and decoder[0].backward > decoder[0].forward > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name, kind", [("flux", "ddp"), ("flux", "fsdp2"), ("z_image", "ddp"), ("z_image", "fsdp2")])
def test_two_processes_are_one(folder_of, name, kind, tmp_path):
    """A network of two kinds of blocks, whose text and image streams both are gathered one block at a time; and one
    that takes lists and gives one."""
    words = [
        "train_flow_grpo.py", "--config", "tests/grpo.yaml", *GRPO_FAST,
        *settings(name, folder_of(name)),
        "grpo.group_size=4", "grpo.spread=spread", "train.per_device_train_batch_size=1", "grpo.kl_weight=0.01",
        "train.max_steps=2", "run.save_steps=2", "train.warmup_steps=0", "train.max_grad_norm=0.01",
    ]  # fmt: skip
    found = []
    for launched in ("cpu", kind):
        folder = tmp_path / launched
        distributed.run(launched, folder, words, BREAK_GRADIENT="-1:-1")
        found.append(folder / "train_flow_grpo.py")
    mine, theirs = (metrics(run) for run in found)
    keys = ("grad_norm", "reward/mean", "reward/std_in_group", "policy/kl")
    distributed.assert_same_lines(mine[-2:], theirs[-2:], keys, rel=1e-3)
    distributed.assert_same_adapter(*found, "step-000002")


@pytest.mark.parametrize(
    "override, said",
    [
        ("data.num_frames=5", "data.num_frames must be 1, got 5"),
        (f"data.height={SIDE + 4}", f"data.height must be a multiple of 8, at most 96, got {SIDE + 4}"),
        ("model.embedded_guidance=3.5", "model.embedded_guidance: "),
        ("model.min_timestep_boundary=0.9", "model.min_timestep_boundary: "),
        ("model.model_name=flux", "set model.model_name to the model that it is"),
        ("model.trainable_models=dit2", "model.trainable_models"),
        ("lora.lora_target_modules=nothing", "lora.lora_target_modules"),
        ("train.context_parallel=2", "train.context_parallel 2: this model does not split its tokens; set it to 1"),
        ("reward.name=motion", "reward.name judges at least 2 frames, and data.num_frames is 1"),
    ],
)
def test_what_does_not_fit_is_refused(folder_of, monkeypatch, capsys, override, said, tmp_path):
    words = [*settings("sd3", folder_of("sd3")), f"run.output_dir={tmp_path / 'run'}", "train.max_steps=1"]
    monkeypatch.setattr(setup_model, "load_experts", None)
    code, _, error = call(monkeypatch, capsys, "--trust-code", *words, override)
    assert code == 2 and said in error, error
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("name", TOKENS)
def test_prompts_of_several_lengths_are_one_batch(folder_of, name):
    """What is padded is masked: each answer is that of its prompt alone."""
    backbone = backbones.open(name, Source(model_paths=str(folder_of(name) / "model"), dtype="float32"))
    encode, model = backbone.text_encoder(torch.device("cpu")), backbone.load_expert("transformer")
    told = [encode(prompt) for prompt in ("a ball", PROMPTS[-1])]
    both = backbone.collate(told)
    assert both["mask"].sum(1).tolist() == [one["text"].shape[1] for one in told] and not both["mask"].all()
    shape = backbone.latent_shape(SIDE, SIDE, 1)
    schedule, x = backbone.schedule(4, None, shape), torch.randn(2, *shape)
    network = Experts({"transformer": model})
    with torch.no_grad():
        together = backbone.velocity(network, x, 1, schedule, both)
        alone = [backbone.velocity(network, x[i : i + 1], 1, schedule, told[i]) for i in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_a_shift_by_size_and_a_fixed_one(folder_of):
    cfg = config.load(CONFIG, settings("flux", folder_of("flux")))
    backbone = backbones.open("flux", model_files.model_source(cfg.model))
    small, large = (backbone.schedule(4, None, backbone.latent_shape(side, side, 1)).sigmas for side in (32, 512))
    assert (large[1:-1] > small[1:-1]).all()
    fixed = [backbone.schedule(4, 3.0, backbone.latent_shape(side, side, 1)).sigmas for side in (32, 512)]
    assert torch.equal(*fixed)
    s = torch.tensor([1, 0.75, 0.5, 0.25])
    torch.testing.assert_close(fixed[0], torch.cat([3 * s / (1 + 2 * s), torch.zeros(1)]))


@pytest.mark.parametrize("steps, side", [(4, 32), (28, 128), (50, 128), (4, 264), (50, 264)])  # above 4300 tokens
def test_a_shift_by_size_and_steps_is_the_stock_pipelines(folder_of, steps, side):
    backbone = backbones.open(
        "flux2_klein", Source(model_paths=str(folder_of("flux2_klein") / "model"), dtype="float32")
    )
    scheduler = random_flux2_klein().scheduler
    mu = compute_empirical_mu((side // 2) ** 2, steps)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    assert torch.equal(backbone.schedule(steps, None, (4, 1, side, side)).sigmas, scheduler.sigmas)


def test_guidance_of_a_distilled_model_is_told(tmp_path):
    random_flux2_klein(distilled=True).save_pretrained(tmp_path)
    backbone = backbones.describe("flux2_klein", Source(model_paths=str(tmp_path)))
    (line,) = backbone.differences(None, 4.0)
    assert "sample.guidance_scale is 4" in line and "distilled" in line and backbone.differences(None, 1.0) == []


def test_evaluate_says_what_became_of_the_pictures(folder_of, tmp_path, monkeypatch):
    """Its scores are those of the stock pipeline's pictures; the judges that the run watches are there, too."""
    folder, run_folder = folder_of("sd3"), tmp_path / "run"
    launch_grpo(
        *settings("sd3", folder), "train.learning_rate=5e-2", "train.warmup_steps=0", "train.max_steps=2",
        f"run.output_dir={run_folder}", "grpo.group_size=2", "grpo.groups=4",
        f"reward.others={{blue: {{name: {COLOUR}, weight: 0, settings: {{red: -0.5, green: -0.5, blue: 1.0}}}}}}",
    )  # fmt: skip
    words = [run_folder, folder / "prompts.csv", "--seeds", 2, "--batch", 3]
    said = evaluate_run(*words)
    report = json.loads((run_folder / "evaluation" / "report.json").read_text())
    assert report["prompts"] == len(PROMPTS) and report["pairs"] == 2 * len(PROMPTS)
    assert "score (trained on)" in said and "blue\n" in said and "better after" in said
    pairs = report["per_pair"]
    pipe, pair = random_sd3(), pairs[1]
    (row,) = [row for row in data.load_metadata(folder / "prompts.csv") if row.line == pair["line"]]
    backbone = backbones.open("sd3", Source(model_paths=str(folder / "model"), dtype="float32"))
    noise = draw_noise((1, *backbone.latent_shape(SIDE, SIDE, 1)), noise_seed(pair["seed"], 0, row.id))[:, :, 0]
    steps = json.loads((run_folder / "run.json").read_text())["config"]["sample"]["num_inference_steps"]

    def redness():
        image = pipe(
            row.prompt, height=SIDE, width=SIDE, num_inference_steps=steps, output_type="pt", latents=noise,
            guidance_scale=1.0,
        ).images  # fmt: skip
        return (image.mean((0, 2, 3)) * torch.tensor([1.0, -0.5, -0.5])).sum().item()

    assert pair["score/before"] == pytest.approx(redness(), abs=1e-4)
    pipe.load_lora_weights(str(run_folder / "checkpoints" / "latest" / "transformer"))
    assert pair["score/after"] == pytest.approx(redness(), abs=1e-4)
    for arm in ("base", "latest"):
        assert data.read_picture(run_folder / "evaluation" / "images" / arm / "000_seed0.png").shape == (SIDE, SIDE, 3)
    assert data.read_picture(run_folder / "evaluation" / "grid.png").shape[2] == 3
    assert "reward.name" in evaluate_run(*words, "reward.name=motion", expect=2)


OWN_REWARD = """
import torch
from rewardfl.rewards import Reward, RewardOutput

class LikeTheClip(Reward):
    name = "like_the_clip"

    def reference(self, video, prompt=""):
        return {"mean": video.mean()[None]}

class Broken(Reward):
    name = "broken"

    def forward(self, video, batch):
        raise RuntimeError("out of order")

class TwoReaders(Reward):
    name = "two_readers"
    compares_with = "nothing"
    evaluation_settings = {"second": True}

    def __init__(self, *, second: bool = False):
        super().__init__()
        self.second_opinion = ("one", "other") if second else ()

    def reference(self, video, prompt=""):
        return {"other": torch.tensor(0.5 * ("red" in prompt) + 1.0 * ("blue" in prompt))}

    def forward(self, video, batch):
        other = {"other": torch.stack([one["other"] for one in batch])} if self.second_opinion else {}
        ones = torch.ones(len(batch))
        return RewardOutput(ones, ones.bool(), {"one": ones / 2, **other})
"""


def test_a_web_page_for_a_file_of_the_folder_is_named(folder_of, tmp_path):
    for part, name in (("vae", "notes.txt"), ("text_encoder", "generation_config.json"), ("tokenizer", "vocab.json")):
        folder = shutil.copytree(folder_of("sd3") / "model", tmp_path / part)
        (folder / part / name).write_text("<!DOCTYPE html><html>")
        with pytest.raises(InputError, match=f"{folder / part / name}.* web page"):
            backbones.open("sd3", Source(model_paths=str(folder)))


@pytest.fixture(scope="module")
def untrained(folder_of, tmp_path_factory):
    """A run of one step."""
    run = tmp_path_factory.mktemp("untrained")
    launch_grpo(*settings("sd3", folder_of("sd3")), "train.max_steps=1", f"run.output_dir={run}")
    (run / "own.py").write_text(OWN_REWARD)
    (run / "sizes.csv").write_text("prompt,height,width\na ball,,\na ball,36,32\na ball,32,\n,32,32\n")
    (run / "clip.csv").write_text("prompt,video\na ball,gone.mp4\n")
    return run


@pytest.mark.parametrize(
    "words, said",
    [
        (["--adapter", "RUN/nowhere"], "RUN/nowhere: holds no */"),
        (["reward.others={own: {name: 'RUN/own.py:LikeTheClip', weight: 0}}"], "reward.others.own compares"),
        (["reward.others={flow: {name: optical_flow, weight: 0}}"], "reward.others.flow judges at least 2 frames"),
        (["--data", "RUN/sizes.csv"], "line 4: height and width must be whole numbers"),
        (["--data", "RUN/sizes.csv"], "line 5: empty prompt"),
        (["--data", "RUN/clip.csv"], "line 2: RUN/gone.mp4: no such file"),
        (["--data", "RUN/nowhere.csv"], "--data: no such file: RUN/nowhere.csv"),
        (["--out", "RUN"], "--out RUN is, contains or is inside the input RUN/run.json"),
    ],
)
def test_what_evaluate_cannot_judge_is_refused_before_weights_load(folder_of, untrained, monkeypatch, words, said):
    monkeypatch.setattr(pipeline.ImageModel, "_load", None)
    words, said = ([word.replace("RUN", str(untrained)) for word in words], said.replace("RUN", str(untrained)))
    assert said in evaluate_run(untrained, folder_of("sd3") / "prompts.csv", *words, expect=2)


def evaluate_run(run, table, *words, expect=0):
    start = ("--trust-code", "--run", run, "--data", table, "--device", "cpu", "--seeds", 1)
    return run_tool(evaluate.main, *start, *words, expect=expect)


def test_evaluate_names_a_reward_that_fails_and_judges_each_size(folder_of, untrained):
    own = f"reward.others={{own: {{name: '{untrained}/own.py:Broken', weight: 0}}}}"
    said = evaluate_run(untrained, folder_of("sd3") / "prompts.csv", own, "--force", expect=2)
    assert "error: reward.others.own: RuntimeError: out of order" in said
    (untrained / "two.csv").write_text("prompt,height,width\na ball,,\na ball,32,64\nbad,36,32\n")
    said = evaluate_run(untrained, untrained / "two.csv", "data.skip_bad_rows=true", "--force")
    assert "skipped: line 4: height must be a multiple of 8" in said and "2 prompts, 2 pairs" in said
    files = sorted((untrained / "evaluation" / "images" / "latest").iterdir())
    assert [data.read_picture(file).shape for file in files] == [(SIDE, SIDE, 3), (SIDE, 2 * SIDE, 3)]
    assert "nonfinite" not in str(json.loads((untrained / "evaluation/report.json").read_text())["figures"].keys())


def test_arms_of_images_share_their_noises_and_resume(folder_of, untrained, monkeypatch):
    """Start, strengths and step counts. What a stopped evaluation has judged is not sampled again."""
    out, count, add = untrained / "arms", [], Writer.add
    words = [untrained, folder_of("sd3") / "prompts.csv", "--out", out, "--strengths", "0,1", "--steps", "2,3"]
    words.append(f"lora.init_from={untrained}/checkpoints/latest")

    def stop(self, record):
        count.append(record)
        if len(count) > 3:
            raise KeyboardInterrupt
        add(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", stop)
        evaluate_run(*words, expect=130)
    begun = (out / "records.jsonl").read_text()
    evaluate_run(*words)
    records = (out / "records.jsonl").read_text()
    assert len(begun.splitlines()) == 3 and len(records.splitlines()) == 8 * len(PROMPTS)
    assert {*begun.splitlines()} <= {*records.splitlines()}
    report = json.loads((out / "report.json").read_text())
    tail = "" if any(arm["name"] == "latest" for arm in report["arms"]) else "_2steps"
    by_name = {arm["name"]: arm for arm in report["arms"]}
    assert len(by_name) == 6 and by_name[f"latest_x0{tail}"]["against"] == f"base{tail}"
    start = by_name[f"start{tail}"]
    assert start["figures"] == by_name[f"latest{tail}"]["figures"] and start["origin"].endswith("latest")
    assert report["figures"] == report["arms"][0]["figures"] and not report["arms"][0]["origin"]
    for name, arm in by_name.items():
        score = arm["figures"]["score"]
        assert (score["before"] == score["after"] and score["win_rate"]["mean"] == 0.5) == ("x0" in name), name
    with monkeypatch.context() as patch:
        patch.setattr(arms, "load_model", None)
        evaluate_run(*words)
    assert (out / "records.jsonl").read_text() == records and not (out / "prepared").exists()


def test_evaluate_shows_pictures_whose_second_reader_disagrees(folder_of, untrained):
    """An evaluation's settings are the reward's own, if the configuration has none."""
    (table := untrained / "three.csv").write_text("prompt\na ball\na red ball\na blue ball\n")
    own = f"reward.others.readers.name={untrained}/own.py:TwoReaders"
    folder = untrained / "evaluation"
    said = evaluate_run(untrained, table, own, "--force")
    assert "readers/one above readers/other: 1 pictures before, 1 after (disagreements.png)" in said
    assert json.loads((folder / "report.json").read_text())["disagreements"] == {
        "readers/one above readers/other": {"before": 1, "after": 1},  # scores of 0, 0.5 and 1 against 0.5
        "readers/other above readers/one": {"before": 1, "after": 1},
    }
    shown = data.read_picture(folder / "disagreements.png")
    ones = [data.read_picture(folder / "images" / "latest" / f"{row:03d}_seed0.png") for row in (0, 2)]
    scale, width = round(image_report.SIDE / SIDE), image_report.SIDE + 8
    for i, picture in enumerate(ones):
        large = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        assert (shown[16 : 16 + len(large), i * width + 4 :][:, : large.shape[1]] == large).all()
    said = evaluate_run(untrained, table, own, "reward.others.readers.settings.second=false", "--force")
    assert "disagree" not in said and not (folder / "disagreements.png").exists()


def test_a_schedule_that_does_not_fall_is_refused():
    """Qwen-Image's for one step is not a number: its time shift divides 0 by 0."""
    backbone = backbones.describe("qwen_image", Source(model_paths="Qwen-Image"))
    shape = backbone.latent_shape(512, 512, 1)
    assert len(backbone.schedule(2, None, shape)) == 2
    with pytest.raises(
        InputError, match="^sample.num_inference_steps: 1 steps give this model the sigmas nan, 0, which"
    ):
        backbone.schedule(1, None, shape)
    for sigmas in ([1.0, 0.5, 0.5, 0.0], [0.5, 1.0, 0.0], [float("inf"), 1.0, 0.0]):
        sigmas = torch.tensor(sigmas)
        with pytest.raises(InputError, match="^sample.num_inference_steps: . steps"):
            Schedule(sigmas, 1000 * sigmas[:-1], ("one",) * (len(sigmas) - 1))
