"""Rows that say their own height and width: two sizes in one run, of images and of videos."""

from functools import partial

import pytest
import torch
from image_pipelines import SIDE, random_flux
from lora_dialects import read_adapter
from runs import CONFIG, call, equal_tensors, launch, launch_grpo, metrics, watch
from test_pipeline import PROMPTS, folder_of, settings  # noqa: F401  (a fixture)

from rewardfl import config, data, lora, reward_flow, sde
from rewardfl.backbones.image.flux import pack
from rewardfl.backbones.protocol import Experts, Velocity
from rewardfl.rewards import build_terms
from rewardfl.training import batches, setup_data, setup_run
from rewardfl.training import run as run_module

pytestmark = [pytest.mark.slow(180), pytest.mark.usefixtures("trusts_code")]

SIZES = [(SIDE, SIDE), (SIDE, 2 * SIDE)]  # the rows' sizes in turn; data.height and data.width are the first


def write(path, rows, columns="prompt,height,width"):
    path.write_text("\n".join([columns, *rows, ""]))
    return f"data.file_name={path}"


def two_sizes(folder):
    """The first two rows have the usual size, the other two the second."""
    row_sizes = ["", "", *[f"{SIZES[1][0]},{SIZES[1][1]}"] * 2]
    rows = [f"{prompt},{size or ','}" for prompt, size in zip(PROMPTS, row_sizes, strict=True)]
    return write(folder / "sizes.csv", rows)


def adapter(run):
    return read_adapter(run / "checkpoints" / "step-000002" / "transformer" / lora.WEIGHTS_NAME)


def seen_by(monkeypatch, module):
    """The latents' height and width, and the second sigma, of each rollout from now on."""
    seen = []

    def record(_, velocity, x, sigmas, *rest, **named):
        table = sigmas.sigmas if module is sde else sigmas
        seen.append((tuple(x.shape[-2:]), round(float(table[1]), 4)))

    watch(monkeypatch, module, "rollout", record)
    return seen


@pytest.mark.parametrize("how", ["reward_fl", "flow_grpo"])
def test_two_sizes_train_and_resume(folder_of, how, tmp_path, monkeypatch):  # noqa: F811
    """In batches of two, each of one size, whose sigmas are its own."""
    words = [
        *settings("flux", folder_of("flux")), two_sizes(tmp_path), f"data.cache_dir={tmp_path / 'cache'}",
        "train.per_device_train_batch_size=2", "train.warmup_steps=0", "run.sample_videos=4", "run.save_steps=1",
    ]  # fmt: skip
    run = partial(launch, *words, "reward.kl_weight=1e-3") if how == "reward_fl" else partial(launch_grpo, *words)
    with monkeypatch.context() as watching:
        seen = seen_by(watching, reward_flow if how == "reward_fl" else sde)
        out = run("train.max_steps=2", f"run.output_dir={tmp_path / 'straight'}").stdout
    small, large = ((height // 4, width // 4) for height, width in SIZES)
    of_size = dict(seen)
    assert set(of_size) == {small, large} and len(set(seen)) == 2  # a size's sigmas are the same each time
    assert of_size[large] > of_size[small]  # FLUX.1's shift grows with the size
    assert f"sizes (height x width): {SIDE} x {SIDE} (2 rows), {SIDE} x {2 * SIDE} (2 rows)" in out
    assert f"{of_size[large]:6.4f}" in out  # the table is the largest's
    shown = sorted((tmp_path / "straight" / "samples" / "step-000002").glob("0*.png"))
    assert [data.read_picture(path).shape[:2] for path in shown] == [SIZES[0]] * 2 + [SIZES[1]] * 2

    for steps in (1, 2):
        run(f"train.max_steps={steps}", f"run.output_dir={tmp_path / 'resumed'}")
    straight, resumed = (metrics(tmp_path / name) for name in ("straight", "resumed"))
    assert straight == resumed and all(line["grad_norm"] > 0 for line in straight[-2:])
    assert equal_tensors(*(adapter(tmp_path / name) for name in ("straight", "resumed")))


def open_samples(words):
    """(configuration, model, samples, conditions), as the scripts open them."""
    cfg = config.load(CONFIG, words)
    headers = run_module.read_headers(cfg, None)
    backbone, job, run_plan, store = headers.backbone, headers.job, headers.plan, setup_data.open_cache(headers.plan)
    terms = build_terms(run_plan.rewards, job.device)
    samples = setup_data.find_samples(cfg.data, headers.rows.train, terms, store, job)
    conditions = setup_data.make_conditions(run_plan, backbone, setup_run.digest_base_model(backbone), store)
    setup_data.fill_conditions(cfg.sample, conditions, samples, job)
    return run_plan, backbone, samples, conditions


def test_latents_of_each_size_are_the_stock_pipelines(folder_of, tmp_path):  # noqa: F811
    """One prompt at both sizes, through what training starts a batch from; the cache keeps the sizes apart."""
    places = [f"data.cache_dir={tmp_path / 'cache'}", f"run.output_dir={tmp_path / 'run'}"]
    table = write(tmp_path / "one.csv", [f"{PROMPTS[0]},{height},{width}" for height, width in SIZES])
    words = [*settings("flux", folder_of("flux")), *places, "sample.num_inference_steps=4", "sample.mid_timestep=2"]
    run_plan, backbone, samples, conditions = open_samples([*words, "sample.final_timestep=3", table])
    assert [sample.size for sample in samples] == SIZES
    assert samples[0].clip != samples[1].clip and samples[0].row.id != samples[1].row.id
    device = torch.device("cpu")
    starts = batches.BatchBuilder(plan=run_plan, conditions=conditions, samples=samples, device=device)
    model, pipe = Experts({"transformer": backbone.load_expert("transformer")}), random_flux()
    for row, (height, width) in enumerate(SIZES):
        batch = starts.batch([(0, row)])
        velocity = Velocity(backbone=backbone, model=model, conditioning=batch.conditioning, schedule=batch.schedule)
        ours = reward_flow.rollout(velocity, batch.x, batch.schedule.sigmas, keep=()).x0
        stock = pipe(
            prompt=PROMPTS[0], height=height, width=width, num_inference_steps=4, latents=pack(batch.x[:, :, 0]),
            guidance_scale=3.5, output_type="latent",
        ).images  # fmt: skip
        torch.testing.assert_close(pack(ours[:, :, 0]), stock, rtol=1e-5, atol=1e-5)


MULTIPLE = "must be a multiple of 8, at most 96, got"
REFUSED = [
    ("prompt,width", "a ball,32", "height and width must be whole numbers of pixels from 1 to 16384, got '' and '32'"),
    ("prompt,height,width", "a ball,104,36", f"height {MULTIPLE} 104; width {MULTIPLE} 36"),
    ("prompt,image,height,width", "a ball,a.png,32,32", "height and width next to image: only rows of just a prompt"),
]


@pytest.mark.parametrize("columns, row, message", REFUSED)
def test_an_impossible_size_is_refused(folder_of, monkeypatch, capsys, columns, row, message, tmp_path):  # noqa: F811
    table = write(tmp_path / "sizes.csv", [f"a red ball{',' * columns.count(',')}", row], columns)
    words = [*settings("sd3", folder_of("sd3")), table, f"run.output_dir={tmp_path / 'run'}", "--trust-code"]
    monkeypatch.setattr(run_module, "open_run", None)  # before anything loads or is written
    code, _, error = call(monkeypatch, capsys, *words)
    assert code == 2 and "1 of 2 rows cannot be used" in error and f"\nline 3: {message}" in error, error
