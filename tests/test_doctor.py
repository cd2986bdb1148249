"""tools/doctor.py on the tiny world and on files in the published layouts: what is fine, and what is made to differ."""

import csv
import dataclasses
import hashlib
import json
import math
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wan_files
import zygote
from conftest import ROOT, measured_before, run_tool
from diffusers import WanTransformer3DModel
from pipelines import random_variant
from runs import CONFIG, FAST, GRPO_CONFIG, GRPO_FAST, SMALL, WORLD
from safetensors.torch import load_file, save_file

from rewardfl import backbones, config, data
from rewardfl.backbones.seam import Source
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.run.work import work_of
from rewardfl_tools import _doctor, _doctor_models, _doctor_page, _doctor_step, doctor, plan_run

STATUSES = {"ok", "differs", "could not be done"}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # configurations name their files from there


def call(out, *arguments, configuration=CONFIG, expect=0):
    """(what the tool prints, its doctor.json) with the first two clips of the world, small."""
    text = run_tool(
        doctor.main, "--config", configuration, "--out", out, "--clips", 2, "--device", "cpu", *arguments, *SMALL,
        expect=expect,
    )  # fmt: skip
    page = out / "doctor.json"
    return text, json.loads(page.read_text()) if page.is_file() else None


def checks(page):
    return {name: facts["status"] for name, facts in page.items() if "status" in facts}


@pytest.fixture(scope="module")
def fine(tmp_path_factory):
    """A page of all checks that run in this process."""
    out = tmp_path_factory.mktemp("fine") / "doctor"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return out, *call(out, "--skip", "step")


def test_on_the_tiny_world_everything_is_as_expected(fine):
    out, text, page = fine
    assert checks(page) == dict.fromkeys(("environment", "files", "stock", "faces", "base"), "ok")
    assert all(f"{name}: ok: " in text for name in checks(page)) and text.endswith(f"page: {out / 'doctor.md'}\n")
    assert [step["network"] for step in page["stock"]["steps"]] == [0, 0, 0, 0]
    assert [step["expert"] for step in page["stock"]["steps"]] == ["high_noise"] * 2 + ["low_noise"] * 2
    assert page["stock"]["final latents, relative distance"] == 0 and page["stock"]["frames, PSNR in dB"] > 100
    written = (out / "doctor.md").read_text()
    assert all(f"| {name} | ok |" in written and f"\n## {name}\n" in written for name in checks(page))


def test_digests_and_headers_are_the_files_own(fine):
    _, _, page = fine
    records = {record["file"]: record for record in page["files"]["files"]}
    file = WORLD / "pipeline" / "transformer_2" / "diffusion_pytorch_model.safetensors"
    record, content = records["transformer_2/diffusion_pytorch_model.safetensors"], file.read_bytes()
    assert record["sha256"] == hashlib.sha256(content).hexdigest() and record["bytes"] == len(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert record["tensors"] == len(header.keys() - {"__metadata__"}) and record["dtypes"] == {"F16": record["tensors"]}
    packs = {f"{pack}/{net}.onnx" for pack in ("reward", "judge") for net in ("detector", "recogniser")}
    assert packs <= records.keys() and all(records[name]["dtypes"]["FLOAT"] > 9 for name in packs)
    assert "transformer.num_layers 4, published 40" in page["files"]["unlike the published model"]


def test_the_figures_of_the_base_model_are_those_of_its_videos(fine):
    """By the networks alone, on the videos that were written, which a codec has changed a little."""
    out, _, page = fine
    cfg = config.load(CONFIG, SMALL)
    row = data.load_metadata(cfg.data.file_name)[0]
    case = _doctor_page.Case(CONFIG, [], cfg, None, [row], CPU, out)
    beside = data.read_video(out / "base" / "line0002.mp4")
    assert beside.shape == (5, 32, 64, 3)
    found = {record["pack"]: record for record in page["base"]["likeness"] if record["line"] == row.line}
    example = data.load_example(row, 32, 32, 5)
    for label, identity in _doctor.identities(case).items():
        pool = identity.pool(example.reference)
        score = identity.score(data.to_float(beside[:, :, 32:]), pool.embeddings)
        assert found[label]["real clip"] == pytest.approx(pool.cap, abs=1e-6)
        assert found[label]["FaceSim"] == pytest.approx(float(score.mean), abs=0.15)
        quarters = [found[label][f"{which} quarter"] for which in ("first", "last")]
        assert quarters != [found[label]["FaceSim"]] * 2
    motion = page["base"]["motion"][0]
    assert 0 < motion["sharpness"] < motion["sharpness of real"]  # a quarter of the size it was trained at


def test_the_page_names_neither_folders_nor_people(fine, monkeypatch, tmp_path):
    out, _, page = fine
    written = (out / "doctor.md").read_text() + json.dumps(page)
    prompts = {row.prompt for row in data.load_metadata(config.load(CONFIG).data.file_name)}
    assert not [word for word in (str(Path.home()), str(ROOT), str(out), *prompts) if word in written]
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platform, "node", lambda: "gpu-7.example.org")
    told = _doctor_page.plain(
        f"no file {ROOT}/models/x.onnx, /home/somebody/a b/y or /mnt/secret/team/pack/z.onnx\non gpu-7.example.org, "
        "7 of 3/4; https://a.org/b/c/d"
    )
    assert told == ("no file ./models/x.onnx, ~/a b/y or .../pack/z.onnx on (host), 7 of 3/4; https://a.org/b/c/d")
    assert _doctor_page.plain(f"{ROOT}2/x") == f".../{ROOT.name}2/x"


def scaled(load):
    """from_pretrained whose second expert has one tensor by 1.01."""

    def loaded(folder, **how):
        expert = load(folder, **how)
        if Path(folder).name == "transformer_2":
            expert.blocks[0].attn1.to_q.weight.data *= 1.01
        return expert

    return loaded


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_a_changed_weight_of_the_stock_pipeline_is_seen(monkeypatch, tmp_path, dtype):
    monkeypatch.setattr(WanTransformer3DModel, "from_pretrained", scaled(WanTransformer3DModel.from_pretrained))
    text, page = call(tmp_path / "doctor", "--only", "stock", f"model.dtype={dtype}", expect=1)
    assert checks(page) == {"stock": "differs"} and "stock: differs: the low_noise expert's answer at step" in text
    steps = page["stock"]["steps"]
    assert [step["network"] > 0 for step in steps] == [False, False, True, True]
    assert [step["ours again"] for step in steps] == [0] * 4


def test_in_bfloat16_the_networks_are_equal_and_the_latents_differ_by_rounding(tmp_path):
    _, page = call(tmp_path / "doctor", "--only", "stock", "model.dtype=bfloat16")
    found = page["stock"]
    assert found["status"] == "ok" and [step["network"] for step in found["steps"]] == [0] * 4
    assert 0 < found["final latents, relative distance"] < 0.03 and 30 < found["frames, PSNR in dB"] < 100


def test_another_expert_is_seen(monkeypatch, tmp_path):
    """The stock pipeline with its border at .7 asks the first expert at sigma .833, too."""
    real = _doctor_models.pipeline_class
    moved = lambda name: lambda **given: real(name)(**given | {"boundary_ratio": 0.7})  # noqa: E731
    monkeypatch.setattr(_doctor_models, "pipeline_class", moved)
    text, page = call(tmp_path / "doctor", "--only", "stock", expect=1)
    assert "step 2 is low_noise's here and high_noise's there" in text
    assert [step["stock's"] for step in page["stock"]["steps"]] == ["high_noise"] * 3 + ["low_noise"]


@pytest.mark.parametrize(
    "name", [name if name == "wan2_2" else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS]
)
def test_every_wan_model_is_compared(tmp_path, name):
    """With the weights as diffusers loads them; a text-to-video model from a prompt alone."""
    random_variant(name).save_pretrained(tmp_path / "model")
    cfg = config.load(CONFIG, [*SMALL, f"model.model_name={name}", "model.trainable_models=dit"])
    row = data.load_metadata(cfg.data.file_name)[0]
    if VARIANTS[name].image == "none":
        row = dataclasses.replace(row, video=None)
    backbone = backbones.open(name, Source(str(tmp_path / "model"), dtype="float32"))
    found = _doctor_models.stock(_doctor_page.Case(CONFIG, [], cfg, backbone, [row], CPU, tmp_path))
    assert found.status == "ok" and "as diffusers loads them" in found.said
    assert {step["expert"] for step in found.facts["steps"]} == set(backbone.experts)
    assert found.facts["final latents, relative distance"] == 0


def test_one_expert_at_a_time():
    class Answer(torch.nn.Module):
        def forward(self, x, return_dict):
            return (x + 1,)

    loaded = []
    experts = _doctor_models.OneAtATime(lambda name: loaded.append(name) or Answer())
    for name in ("a", "a", "b", "a"):
        assert experts(name, x=torch.ones(1)) == 2
        assert list(experts.held) == [name] and list(experts.children()) == []
    assert loaded == ["a", "b", "a"]


# ---- the published layouts ----


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A wan22_paths.json of files as Wan-AI publishes them."""
    folder, pipe = tmp_path_factory.mktemp("original"), wan_files.small_pipeline()
    files, configs = wan_files.write_original(pipe, folder / "files"), wan_files.write_configs(pipe, folder / "configs")
    path = folder / "wan22_paths.json"
    path.write_text(json.dumps(wan_files.paths(files, configs)))
    return path


def test_published_files_of_the_original_layout(original, tmp_path):
    _, page = call(tmp_path / "doctor", "--only", "files,stock", f"model.model_paths={original}")
    assert checks(page) == {"files": "ok", "stock": "ok"}
    records = page["files"]["files"]
    shards = [record for record in records if record["part"] == "high_noise"]
    assert len(shards) == 3 and sum(record["tensors"] for record in shards) == len(wan_files.original_expert_names())
    assert all(set(record["dtypes"]) == {"F32"} for record in shards)
    (text,) = [record for record in records if record["file"].endswith("models_t5_umt5-xxl-enc-bf16.pth")]
    assert set(text["dtypes"]) == {"bfloat16"}
    assert "as diffusers loads them" in page["stock"]["weights of the stock pipeline"]


@pytest.mark.long
def test_published_files_of_the_original_layout_in_bfloat16(original, tmp_path):
    """As the A14B is trained: diffusers' loader and ours keep the same parts in float32."""
    settings = [f"model.model_paths={original}", "model.dtype=bfloat16"]
    _, page = call(tmp_path / "doctor", "--only", "stock", *settings)
    assert checks(page) == {"stock": "ok"}
    assert "as diffusers loads them" in page["stock"]["weights of the stock pipeline"]


def test_published_files_in_diffusers_layout_and_without_digests(tmp_path):
    folder = wan_files.write_diffusers(wan_files.small_pipeline(), tmp_path / "model", torch.bfloat16)
    settings = [f"model.model_paths={folder}", "model.dtype=bfloat16"]
    _, page = call(tmp_path / "doctor", "--only", "files,stock", "--no-digests", *settings)
    assert checks(page) == {"files": "ok", "stock": "ok"}
    records = page["files"]["files"]
    assert not any("sha256" in record for record in records) and page["files"]["seconds to read all files"] is None
    dtypes = {kind for record in records if record["part"] == "low_noise" for kind in record["dtypes"]}
    assert dtypes == {"BF16", "F32"}  # with its islands
    assert "as diffusers loads them" in page["stock"]["weights of the stock pipeline"]


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """(settings of a model with a distillation for each expert in Lightning's form, the files)."""
    folder, pipe = tmp_path_factory.mktemp("distilled"), wan_files.small_pipeline()
    model = wan_files.write_diffusers(pipe, folder / "model", torch.float32)
    files = {}
    for seed, part in enumerate(("transformer", "transformer_2")):
        values = wan_files.lightning(pipe.components[part], seed)
        files[part] = wan_files.write_lightning(values, folder / f"{part}.safetensors")
    chosen = [f"model.model_paths={model}"]
    chosen += [
        f"model.distill_lora_{which}={path}" for which, path in zip(("high", "low"), files.values(), strict=True)
    ]
    return chosen, files


@pytest.mark.parametrize(
    "dtype, mode",
    [("float32", "fuse"), ("bfloat16", "fuse"), pytest.param("float32", "adapter", marks=pytest.mark.long)],
)
def test_a_distillation_is_compared_with_diffusers_own_adapter(distilled, tmp_path, dtype, mode):
    settings = [*distilled[0], f"model.dtype={dtype}", f"model.distill_lora_mode={mode}"]
    _, page = call(tmp_path / "doctor", "--only", "stock", *settings)
    found = page["stock"]
    assert found["status"] == "ok" and "as diffusers loads them" in found["weights of the stock pipeline"]
    least, most = {"float32": (0, 1e-5), "bfloat16": (1e-4, 0.03)}[dtype]
    assert all(least <= step["network"] <= most for step in found["steps"])
    assert all(step["by the distillation"] > 0.2 for step in found["steps"])
    assert "its distillation moves it by" in found["said"]


@pytest.mark.long
def test_a_distillation_of_one_expert_alone(distilled, tmp_path):
    _, page = call(tmp_path / "doctor", "--only", "stock", *distilled[0][:1], distilled[0][2])
    moved = [step["by the distillation"] > 0 for step in page["stock"]["steps"]]
    assert page["stock"]["status"] == "ok" and moved == [False, False, True, True]


@pytest.mark.parametrize(
    "dtype, factor",
    [("float32", 0.8), *(pytest.param("bfloat16", factor, marks=pytest.mark.long) for factor in (0.8, 0.0))],
)
def test_a_distillation_that_is_not_the_same_differs(distilled, monkeypatch, tmp_path, dtype, factor):
    real = _doctor_models.WanLoraLoaderMixin.lora_state_dict

    def weaker(values):
        changed = all(torch.equal(values[key], value.float()) for key, value in second.items())
        return {
            key: value * (factor if changed and "lora_B" in key else 1.0) for key, value in real(dict(values)).items()
        }

    second = load_file(distilled[1]["transformer_2"])

    monkeypatch.setattr(_doctor_models.WanLoraLoaderMixin, "lora_state_dict", weaker)
    text, page = call(tmp_path / "doctor", "--only", "stock", *distilled[0], f"model.dtype={dtype}", expect=1)
    assert checks(page) == {"stock": "differs"} and "stock: differs: the low_noise expert's answer at step" in text


def test_a_distillation_that_diffusers_reads_in_part_is_not_compared_so(distilled, tmp_path):
    state = load_file(distilled[1]["transformer"])
    state["diffusion_model.head.head.diff_b"] = torch.zeros(64)
    save_file(state, tmp_path / "high_noise.safetensors")
    settings = [*distilled[0], f"model.distill_lora_high={tmp_path / 'high_noise.safetensors'}"]
    _, page = call(tmp_path / "doctor", "--only", "stock", *settings)
    assert page["stock"]["status"] == "ok" and all(step["network"] == 0 for step in page["stock"]["steps"])
    assert "the same loaded weights in both, since diffusers reads less of the distillation" in page["stock"]["said"]


def test_a_damaged_pickle_differs(original, tmp_path):
    folder = shutil.copytree(original.parent, tmp_path / "copy")
    vae = folder / "files" / "Wan2.1_VAE.pth"
    vae.write_bytes(vae.read_bytes()[:-5000])
    paths = wan_files.paths(folder / "files", folder / "configs")
    (folder / "wan22_paths.json").write_text(json.dumps(paths))
    chosen = ["--only", "files,stock", f"model.model_paths={folder / 'wan22_paths.json'}"]
    text, page = call(tmp_path / "doctor", *chosen, expect=1)
    assert checks(page) == {"files": "differs", "stock": "differs"}
    assert "Wan2.1_VAE.pth" in page["files"]["said"] and "Wan2.1_VAE.pth" in page["stock"]["said"]


# ---- faces ----


def test_a_face_pack_that_answers_otherwise_is_seen(monkeypatch, tmp_path):
    """Of files beside the world's, whose check tests/runs.py remembers."""
    real, pack = _doctor.identities, shutil.copytree(WORLD / "faces" / "judge", tmp_path / "judge")

    def changed(case):
        found = real(case)
        weight = next(one for one in found["held_out"].recogniser.buffers() if one.ndim == 4)
        weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        return found

    monkeypatch.setattr(_doctor, "identities", changed)
    chosen = ["--only", "faces", f"reward.held_out_model_path={pack}"]
    text, page = call(tmp_path / "doctor", *chosen, expect=1)
    assert checks(page) == {"faces": "differs"} and "faces: differs: held_out: face parity" in text
    assert "cosine distance" in page["faces"]["parity of reward"]
    assert page["faces"]["parity of held_out"].endswith("/judge/recogniser.onnx']")


def test_a_clip_without_a_face_is_seen(tmp_path):
    grey = torch.full((9, 64, 64, 3), 127, dtype=torch.uint8)
    data.write_video(tmp_path / "grey.mp4", grey, 8)
    (tmp_path / "clips.csv").write_text("video,prompt\ngrey.mp4,nobody\n")
    settings = ["--only", "faces,base", f"data.file_name={tmp_path / 'clips.csv'}"]
    text, page = call(tmp_path / "doctor", *settings, expect=1)
    assert "faces: differs: reward: no face in the clip of line 2" in text
    assert [record["coverage"] for record in page["faces"]["clips"]] == [0, 0]
    assert page["base"]["likeness"] == [] and page["base"]["status"] == "ok"


# ---- the base model ----


@pytest.mark.parametrize("value, said", [(math.nan, "is not finite"), (0.0, "reward finds no face in the video")])
def test_a_base_model_that_makes_no_picture_is_seen(monkeypatch, tmp_path, value, said):
    blank = lambda case, images, sizes: {line: torch.full((3, 5, 32, 32), value) for line in images}  # noqa: E731
    monkeypatch.setattr(_doctor_models, "sampled", blank)
    text, page = call(tmp_path / "doctor", "--only", "base", expect=1)
    assert checks(page) == {"base": "differs"} and f"{said} of line 2" in text or said in text


def test_guided_clips_of_two_sizes_are_sampled_an_expert_at_a_time(monkeypatch, tmp_path):
    """The same as each alone, with all experts there."""
    from rewardfl import groups, reward_flow
    from rewardfl.backbones.seam import Experts, Velocity
    from rewardfl.run import start, work

    settings = [*SMALL, "sample.guidance_scale=3", "sample.negative_prompt=blinking", "experts.untrained=cpu_swap"]
    cfg = config.load(CONFIG, settings)
    backbone = start.open_model(cfg)
    rows = data.load_metadata(cfg.data.file_name)[:2]
    case = _doctor_page.Case(CONFIG, [], cfg, backbone, rows, CPU, tmp_path)
    sizes = {rows[0].line: (32, 32), rows[1].line: (32, 48)}
    images = {row.line: data.load_example(row, *sizes[row.line], 5).image for row in rows}
    loaded = []
    real = type(backbone).load_expert
    monkeypatch.setattr(type(backbone), "load_expert", lambda self, name: loaded.append(name) or real(self, name))
    videos = _doctor_models.sampled(case, images, sizes)
    assert loaded == ["high_noise", "low_noise"]
    experts = Experts({name: backbone.load_expert(name) for name in backbone.experts})
    encode = backbone.text_encoder(CPU)
    for row in rows:
        shape = backbone.latent_shape(*sizes[row.line], 5)
        told = encode(row.prompt) | backbone.image_encoder(CPU)(images[row.line], 5)
        schedule = work.schedule_of(cfg, backbone, shape)
        velocity = Velocity(backbone, experts, told, schedule, encode("blinking"), 3.0)
        noise = groups.noise((1, *shape), groups.noise_seed(_doctor_models.SEED, 0, row.id))
        x0 = reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0
        torch.testing.assert_close(videos[row.line], backbone.load_decoder(CPU).decode(x0, told)[0], rtol=0, atol=1e-5)


# ---- one update ----


def forked(command, **how):
    """subprocess.run of a script, by the tests' own server."""
    process = zygote.Process(
        command[1:], env=how["env"] | {"OMP_NUM_THREADS": "1"}, stdout=how["stdout"], stderr=subprocess.STDOUT
    )
    return SimpleNamespace(returncode=process.wait())


@pytest.fixture
def forking(monkeypatch):
    monkeypatch.setattr(_doctor_step.subprocess, "run", forked)


@pytest.mark.parametrize(
    "configuration, settings",
    [
        (CONFIG, FAST),
        pytest.param(GRPO_CONFIG, [*GRPO_FAST, "train.per_device_train_batch_size=4"], marks=pytest.mark.long),
    ],
)
def test_one_update_is_measured_beside_the_estimate(forking, tmp_path, configuration, settings):
    """In Flow-GRPO four videos of two groups, as a forward pass takes four and a group has two."""
    out = tmp_path / "doctor"
    text, page = call(out, "--only", "step", *settings, configuration=configuration)
    found = page["step"]
    assert found["status"] == "ok" and (out / "run" / "checkpoints" / "step-000001").is_dir()
    (line,) = [
        json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines() if '"step": 1' in line
    ]
    phases = {record["phase"]: record for record in found["phases"]}
    assert {f"time/{name}": record["seconds"] for name, record in phases.items()} == {
        key: value for key, value in line.items() if key.startswith("time/")
    }
    assert found["peak memory, GB"] == line["memory/peak_gb"]
    rest = phases["step"]["TFLOP"] - sum(phases[name]["TFLOP"] for name in ("rollout", "decode", "replay"))
    assert abs(rest) < 1e-6 * phases["step"]["TFLOP"]
    videos = 1 if configuration == CONFIG else 4
    assert f" s for {videos} videos" in text
    run = json.loads((out / "run" / "run.json").read_text())["config"]
    assert run["train"]["max_steps"] == 1 and run["data"]["height"] == 32
    if configuration == GRPO_CONFIG:
        assert run["grpo"]["groups"] == 2 and run["grpo"]["group_size"] == 2
    plan = run_tool(plan_run.main, "--config", configuration, *settings, *SMALL, "--gpu-memory", 80)
    assert f"{found['estimated peak, GB'] * 1e3:.1f} MB   in " in plan


@pytest.mark.long
def test_a_page_may_be_made_again(forking, tmp_path):
    """The run of an earlier one is replaced."""
    out = tmp_path / "doctor"
    for steps in (2, 3):
        settings = [*FAST, f"sample.mid_timestep={steps}"]
        _, page = call(out, "--only", "step", *settings)
        assert page["step"]["status"] == "ok"
        run = json.loads((out / "run" / "run.json").read_text())
        assert run["config"]["sample"]["mid_timestep"] == steps


def test_a_script_that_refuses_differs_with_its_own_words(forking, tmp_path):
    others = "{words: {name: pickscore, weight: 1, settings: {model_dir: no/such/place}}}"
    text, page = call(tmp_path / "doctor", "--only", "step", *FAST, f"reward.others={others}", expect=1)
    assert checks(page) == {"step": "differs"}
    assert "train_reward_fl.py ended with 2: error: reward.others.words.settings" in text


@pytest.mark.parametrize("peak, status", [(0.06, "ok"), (1.9, "ok"), (2.5, "differs")])
def test_a_gpu_peak_above_the_estimate_differs(monkeypatch, tmp_path, peak, status):
    monkeypatch.setattr(_doctor_step, "measure", measured_before)
    cfg = config.load(CONFIG, SMALL)
    backbone = backbones.open("wan2_2", Source(cfg.model.model_paths, dtype="float32"))
    case = _doctor_page.Case(CONFIG, [], cfg, backbone, [], torch.device("cuda"), tmp_path)
    measured = {"time/step": 2.0, "time/replay": 1.0, "memory/peak_gb": peak, "reward/mean": 0.5, "grad_norm": 1.0}
    found = _doctor_step.compared(case, work_of(cfg, backbone, 2, 1, 1), measured)
    assert found.status == status and f"peak {peak:.2f} GB, estimated 0.06" in found.said


@pytest.mark.long
def test_one_update_in_a_process_of_its_own(tmp_path):
    _, page = call(tmp_path / "doctor", "--only", "step", *FAST)
    assert page["step"]["status"] == "ok" and page["step"]["phases"]


def test_the_table_of_the_update_is_the_rows_own(tmp_path):
    row = data.load_metadata(config.load(CONFIG).data.file_name)[0]
    alone = dataclasses.replace(row, video=None, prompt='of "one", a\nprompt', size=(32, 48))
    _doctor_step.write_table([row, alone], tmp_path / "clips.csv")
    with (tmp_path / "clips.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2
    first, second = data.load_metadata(tmp_path / "clips.csv")
    assert first.video.samefile(row.video) and first.prompt == row.prompt and first.size is None
    assert second.video is None and second.size == (32, 48)


# ---- the tool ----


@pytest.mark.parametrize(
    "settings, named",
    [
        (["reward.reward_model_path=no/pack"], "no/pack"),
        (["model.model_paths=no/model"], "no/model"),
        (["data.file_name=no/clips.csv"], "no/clips.csv"),
        (["train.learning_rat=1"], "learning_rat"),
        (
            ["reward.others={x: {name: lost.py:Mine}}"],
            "x.name: lost.py:Mine is code of lost.py; --trust",
        ),
    ],
)
def test_what_training_refuses_is_refused_and_nothing_written(tmp_path, settings, named):
    text, page = call(tmp_path / "doctor", *settings, expect=2)
    assert named in text and text.startswith("error: ") and page is None and not (tmp_path / "doctor").exists()


def test_a_clip_that_is_not_there_is_refused_or_passed_over(tmp_path):
    clip = next((WORLD / "train").rglob("*.mp4"))
    (tmp_path / "clips.csv").write_text(f"video,prompt\ngone.mp4,a\n{clip},b\n")
    settings = ["--only", "environment", f"data.file_name={tmp_path / 'clips.csv'}"]
    text, _ = call(tmp_path / "doctor", *settings, expect=2)
    assert "gone.mp4" in text
    _, page = call(tmp_path / "doctor", *settings, "data.skip_bad_rows=true")
    assert page["configuration"]["clips looked at"] == 1


def test_a_folder_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    text, _ = call(tmp_path, "--only", "environment", expect=2)
    assert "--out" in text and [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_checks_are_chosen_by_name(tmp_path):
    assert tuple(_doctor.CHECKS) == doctor.CHECKS
    _, page = call(tmp_path / "doctor", "--only", "files,environment")
    assert list(checks(page)) == ["environment", "files"]
    assert "no check 'file'" in call(tmp_path / "doctor", "--skip", "file", expect=2)[0]
    assert "--clips" in call(tmp_path / "doctor", "--clips", 0, expect=2)[0]


def test_what_the_machine_cannot_do_is_said_and_the_others_go_on(monkeypatch, tmp_path):
    def too_much(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setitem(_doctor.CHECKS, "files", too_much)
    text, page = call(tmp_path / "doctor", "--only", "environment,files,faces")
    assert checks(page) == {"environment": "ok", "files": "could not be done", "faces": "ok"}
    assert "files: could not be done: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB\n" in text


def test_a_driver_that_this_torch_cannot_use_differs(monkeypatch, tmp_path):
    answer = SimpleNamespace(returncode=0, stdout="550.54.15\n550.54.15\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: answer if command[0] == "nvidia-smi" else real(command, **how)
    )
    text, page = call(tmp_path / "doctor", "--only", "environment", expect=1)
    assert checks(page) == {"environment": "differs"} and page["environment"]["driver"] == "550.54.15"
    text, _ = call(tmp_path / "other", "--only", "environment", "--device", "cuda", expect=2)
    assert "--device" in text


def test_an_image_model_has_what_can_be_checked_of_it(tmp_path):
    """No stock pipeline's steps and no clips."""
    text = run_tool(
        doctor.main, "--config", ROOT / "configs" / "tiny_image_flow_grpo.yaml", "--out", tmp_path / "doctor",
        "--skip", "step",
    )  # fmt: skip
    page = json.loads((tmp_path / "doctor" / "doctor.json").read_text())
    skipped = dict.fromkeys(("stock", "faces", "base"), "could not be done")
    assert checks(page) == {"environment": "ok", "files": "ok"} | skipped
    assert "there is no such comparison for sd3" in text


def test_figures_that_are_no_numbers_are_null(tmp_path):
    facts = {"a": math.nan, "table": [{"x": math.inf, "y": "a|b"}, {"x": 1.5}], "words": ["p", "q"], "yes": True}
    cfg = config.load(CONFIG)
    case = _doctor_page.Case(CONFIG, [], cfg, None, [], CPU, tmp_path)
    _doctor_page.write(case, {"one": _doctor_page.Finding("ok", "it|is", facts)})
    page = json.loads((tmp_path / "doctor.json").read_text())["one"]
    assert page["a"] is None and page["table"] == [{"x": None, "y": "a|b"}, {"x": 1.5}]
    written = (tmp_path / "doctor.md").read_text()
    assert "| one | ok | it\\|is |" in written and "| x | y |\n|---|---|\n| - | a\\|b |\n| 1.5 | - |" in written
    assert "- a: -" in written and "- words: p, q" in written and "- yes: yes" in written
