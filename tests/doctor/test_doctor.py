"""tools/doctor.py on the tiny world and on files in the published layouts: what is fine, and what is made to differ."""

import csv
import dataclasses
import json
import math
import platform
import re
import shutil
import subprocess
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wan_files
import yaml
from conftest import ROOT, measured_before, run_tool
from diffusers import WanTransformer3DModel
from pipelines import random_variant
from runs import CONFIG, FAST, GRPO_CONFIG, GRPO_FAST, SMALL, WORLD

from rewardfl import config, data
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.doctor import checks
from rewardfl.doctor.checks import CHECKS, Finding, anonymise, write_page
from rewardfl_tools import doctor

pytestmark = pytest.mark.slow(140)

SWAPPED = ("experts.trained=cpu_swap", "experts.untrained=cpu_swap", "train.use_gradient_checkpointing=true")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # configurations name their files from there


def call(out, only, *arguments, configuration=CONFIG, expect=0):
    """Return what the tool prints, and {check: its section} of its page of the world's first two clips, small."""
    chosen = [word for name in only for word in ("--only", name)]
    text = run_tool(
        doctor.main, "--config", configuration, "--out", out, "--clips", 2, "--device", "cpu", *chosen, *arguments,
        *SMALL, expect=expect,
    )  # fmt: skip
    return text, page(out) if out.is_file() else None


def page(out):
    text = out.read_text()
    lines = re.findall(r"^\| (\w+) \| (ok|differs|could not be done) \| (.*) \|$", text, re.M)
    sections = {name: yaml.safe_load(facts) for name, facts in re.findall(r"## (\w+)\n\n```yaml\n(.*?)```", text, re.S)}
    return {name: (sections[name] or {}) | {"status": status, "line": line} for name, status, line in lines}


def opened(tmp_path, settings=(), configuration=CONFIG):
    """Return the case of the first clip of a configuration of the tiny world."""
    overrides = [*SMALL, *settings]
    args = SimpleNamespace(
        config=str(configuration), overrides=overrides, device="cpu", out=tmp_path / "page.md", clips=1
    )
    return checks.open_case(args)


def test_on_the_tiny_world_everything_is_as_expected_and_the_page_names_no_person(tmp_path):
    out = tmp_path / "new" / "page.md"
    text, found = call(out, ["environment", "weights", "faces"])
    assert {name: facts["status"] for name, facts in found.items()} == dict.fromkeys(
        ("environment", "weights", "faces"), "ok"
    )
    assert all(f"{name}: ok: " in text for name in found) and text.endswith(f"page: {out}\n")
    experts = found["weights"]["experts"]
    assert list(experts) == ["high_noise", "low_noise"]
    assert all(set(record.values()) == {0} for record in experts.values())
    assert [len(record) for record in experts.values()] == [2, 3]  # the second one is trained
    assert found["weights"]["line"] == "compared with diffusers' loading"
    assert len(found["faces"]["clips"]) == 4 and "cosine distance" in found["faces"]["parity"][0]
    prompts = {row.prompt for row in data.load_metadata(config.load(CONFIG).data.file_name)}
    assert not [word for word in (str(Path.home()), str(ROOT), *prompts) if word in out.read_text()]


def test_folders_and_hosts_are_replaced(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platform, "node", lambda: "gpu-7.example.org")
    told = anonymise(f"no file {ROOT}/x.onnx, /home/somebody/a b/y on gpu-7.example.org: 0.123456789, 2.13.0, 3.0")
    assert told == "no file ./x.onnx, ~/a b/y on (host): 0.1235, 2.13.0, 3.0"


def test_what_is_there_is_not_replaced(tmp_path):
    (tmp_path / "doctor.md").write_text("mine")
    for out in (tmp_path, tmp_path / "doctor.md"):
        assert "--out" in run_tool(doctor.main, "--config", CONFIG, "--out", out, "--only", "environment", expect=2)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


# ---- weights


def test_a_changed_weight_is_seen(monkeypatch, tmp_path):
    """One tensor of the second expert, as diffusers loads it, times 1.01."""
    real = WanTransformer3DModel.from_pretrained

    def scaled(folder, **how):
        expert = real(folder, **how)
        if Path(folder).name == "transformer_2":
            expert.blocks[0].attn1.to_q.weight.data *= 1.01
        return expert

    monkeypatch.setattr(WanTransformer3DModel, "from_pretrained", scaled)
    text, found = call(tmp_path / "page.md", ["weights"], expect=1)
    assert "weights: differs: low_noise's velocity differs by" in text
    assert [record["from diffusers'"] > 0 for record in found["weights"]["experts"].values()] == [False, True]


def test_attention_that_is_another_kernel_with_a_graph_is_measured(monkeypatch, tmp_path):
    """As a GPU's dispatcher may choose: planted in the attention of diffusers' processors."""
    from diffusers.models.transformers import transformer_wan

    real = transformer_wan.dispatch_attention_fn

    def other(query, *rest, **settings):
        return real(query, *rest, **settings) * (1 + 1e-3 * query.requires_grad)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", other)
    text, found = call(tmp_path / "page.md", ["weights"], configuration=GRPO_CONFIG)
    assert found["weights"]["status"] == "ok" and "model.attention_backend: _native_flash" in text
    assert 1e-6 < found["weights"]["experts"]["low_noise"]["with a graph"] < 1e-2


def test_one_expert_is_in_memory_at_a_time(monkeypatch, tmp_path, native_again):
    """Ours and diffusers' in turn, with the weights swapped; the attention of both is the run's."""
    case, alive, most = opened(tmp_path, [*SWAPPED, "model.attention_backend=_native_math"]), [], []
    real = checks.offload.move_expert

    def place(expert, where, *rest):
        alive.append(weakref.ref(expert))
        most.append(sum(one() is not None for one in alive))
        used = {str(block.attn1.processor._attention_backend) for block in expert.blocks}
        assert where == "cpu_swap" and used == {"AttentionBackendName._NATIVE_MATH"}
        return real(expert, where, *rest)

    monkeypatch.setattr(checks.offload, "move_expert", place)
    assert checks.check_weights(case).status == "ok" and most == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "name", [name if name == "wan2_2" else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS]
)
def test_every_wan_model_is_compared(tmp_path, name):
    random_variant(name).save_pretrained(tmp_path / "model")
    one = ["model.trainable_models=dit"] if len(VARIANTS[name].experts) == 1 else []
    case = opened(tmp_path, [f"model.model_name={name}", f"model.model_paths={tmp_path / 'model'}", *one])
    if VARIANTS[name].image == "none":
        case = dataclasses.replace(case, rows=[dataclasses.replace(case.rows[0], video=None)])
    found = checks.check_weights(case)
    assert found.status == "ok" and found.line == "compared with diffusers' loading"
    assert list(found.facts["experts"]) == list(case.backbone.experts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_original_files_are_compared_without_their_distillation(tmp_path, dtype):
    """With diffusers' own loader, which keeps the same parts in float32."""
    pipe, path = wan_files.small_pipeline(), tmp_path / "wan22_paths.json"
    files, configs = wan_files.write_original(pipe, tmp_path / "f"), wan_files.write_configs(pipe, tmp_path / "c")
    path.write_text(json.dumps(wan_files.paths(files, configs)))
    lora = wan_files.write_lightning(wan_files.lightning(pipe.transformer, 0), tmp_path / "high_noise.safetensors")
    settings = [f"model.model_paths={path}", f"model.dtype={dtype}", f"model.distill_lora_high={lora}"]
    _, found = call(tmp_path / "page.md", ["weights"], *settings)
    assert found["weights"]["line"] == "compared with diffusers' loading"
    assert [record["from diffusers'"] for record in found["weights"]["experts"].values()] == [0, 0]


# ---- faces


def test_a_face_pack_that_answers_otherwise_is_seen(monkeypatch, tmp_path):
    pack = shutil.copytree(WORLD / "faces" / "judge", tmp_path / "judge")  # a folder whose check is not cached
    real = checks.build_terms

    def changed(*given):
        terms = real(*given)
        judge = next(term.reward.identity for term in terms if term.label == "held_out")
        weight = next(one for one in judge.recogniser.buffers() if one.ndim == 4)
        weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        return terms

    monkeypatch.setattr(checks, "build_terms", changed)
    text, found = call(tmp_path / "page.md", ["faces"], f"reward.held_out_model_path={pack}", expect=1)
    assert found["faces"]["status"] == "differs" and "FaceParityError: held_out: face parity" in text


def test_a_clip_without_a_face_is_seen(tmp_path):
    data.write_video(tmp_path / "grey.mp4", torch.full((9, 64, 64, 3), 127, dtype=torch.uint8), 8)
    (tmp_path / "clips.csv").write_text("video,prompt\ngrey.mp4,nobody\n")
    text, _ = call(tmp_path / "page.md", ["faces"], f"data.file_name={tmp_path / 'clips.csv'}", expect=1)
    assert "no face in the clip of line 2" in text


# ---- one update


@pytest.mark.parametrize(
    "configuration, settings, videos",
    [(CONFIG, FAST, 1), (GRPO_CONFIG, [*GRPO_FAST, "train.per_device_train_batch_size=4"], 4)],
)
def test_one_update_is_started_and_leaves_the_page_alone(monkeypatch, tmp_path, configuration, settings, videos):
    """In Flow-GRPO four videos of two groups, as a forward pass takes four and a group has two."""
    seen = []

    def run(command, **how):
        if not command[1].endswith(".py"):
            return SimpleNamespace(returncode=1, stdout="")
        cfg = config.load(command[3], [word for word in command[4:] if word != "--trust-code"])
        seen.append(cfg)
        Path(cfg.run.output_dir).mkdir()
        line = {"time/step": 2.0, "time/replay": 1.0, "memory/peak_gb": 0.5, "reward/mean": 0.5, "grad_norm": 1.0}
        Path(cfg.run.output_dir, "metrics.jsonl").write_text(json.dumps(line))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(checks.subprocess, "run", run)
    monkeypatch.setattr(checks, "measure", measured_before)
    text, found = call(tmp_path / "page.md", ["step"], *settings, configuration=configuration)
    (cfg,) = seen
    assert cfg.train.max_steps == 1 and cfg.data.height == 32
    assert configuration == CONFIG or (cfg.grpo.groups, cfg.grpo.group_size) == (2, 2)
    assert f"step: ok: 2.0 s for {videos} videos, peak 0.50 GB" in text
    assert found["step"]["seconds by phase"] == {"step": 2.0, "replay": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize("peak, status", [(0.06, "ok"), (1.9, "ok"), (2.5, "differs")])
def test_a_gpu_peak_above_the_estimate_differs(monkeypatch, tmp_path, peak, status):
    monkeypatch.setattr(checks, "measure", measured_before)
    case = dataclasses.replace(opened(tmp_path), device=torch.device("cuda"))
    found = checks.compare_with_estimate(case, {"time/step": 2.0, "memory/peak_gb": peak})
    assert found.status == status and f"peak {peak:.2f} GB, estimated 0.07" in found.line


@pytest.mark.long
def test_one_update_in_a_process_of_its_own(tmp_path):
    _, found = call(tmp_path / "page.md", ["step"], *FAST)
    assert found["step"]["status"] == "ok" and found["step"]["seconds by phase"]["rollout"] > 0


def test_a_script_that_refuses_differs_with_its_own_words(monkeypatch, tmp_path):
    def run(command, stdout, **how):
        stdout.write("one\nerror: reward.others.words: no\n\n")
        return SimpleNamespace(returncode=2)

    monkeypatch.setattr(checks.subprocess, "run", run)
    text, _ = call(tmp_path / "page.md", ["step"], *FAST, expect=1)
    assert "step: differs: train_reward_fl.py ended with 2: error: reward.others.words: no" in text and "one\n" in text


def test_the_table_of_the_update_is_the_rows_own(tmp_path):
    row = data.load_metadata(config.load(CONFIG).data.file_name)[0]
    alone = dataclasses.replace(row, video=None, prompt='of "one", a\nprompt', size=(32, 48))
    checks.write_table([row, alone], tmp_path / "clips.csv")
    with (tmp_path / "clips.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2
    first, second = data.load_metadata(tmp_path / "clips.csv")
    assert first.video.samefile(row.video) and first.prompt == row.prompt and first.size is None
    assert second.video is None and second.size == (32, 48)


# ---- the tool


@pytest.mark.parametrize(
    "settings, named",
    [
        (["reward.reward_model_path=no/pack"], "no/pack"),
        (["model.model_paths=no/model"], "no/model"),
        (["data.file_name=no/clips.csv"], "no/clips.csv"),
        (["reward.others={x: {name: lost.py:Mine}}"], "x.name: lost.py:Mine is code of lost.py; --trust"),
        (["--device", "cuda"], "--device"),
        (["--clips", "0"], "--clips"),
    ],
)
def test_what_training_refuses_is_refused_and_nothing_written(monkeypatch, tmp_path, settings, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text, found = call(tmp_path / "new" / "page.md", [], *settings, expect=2)
    assert named in text and "error: " in text and found is None and not (tmp_path / "new").exists()


def test_what_the_machine_cannot_do_is_said_and_the_other_checks_are_done(monkeypatch, tmp_path):
    def too_much(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setitem(CHECKS, "weights", too_much)
    assert tuple(CHECKS) == doctor.CHECKS
    text, found = call(tmp_path / "page.md", ["weights", "environment", "faces"])
    assert [facts["status"] for facts in found.values()] == ["ok", "could not be done", "ok"]
    assert "weights: could not be done: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB\n" in text


def test_a_driver_that_this_torch_cannot_use_differs(monkeypatch, tmp_path):
    answer, real = SimpleNamespace(returncode=0, stdout="550.54.15\n550.54.15\n"), subprocess.run
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: answer if command[0] == "nvidia-smi" else real(command, **how)
    )
    text, found = call(tmp_path / "page.md", ["environment"], expect=1)
    assert "torch cannot use the driver 550.54.15" in text and found["environment"]["status"] == "differs"


def test_an_image_model_has_what_can_be_checked_of_it(tmp_path):
    """Its velocity with a graph, but no other loading, and no clips."""
    configuration = ROOT / "configs" / "tiny_words_flow_grpo.yaml"
    out, chosen = tmp_path / "page.md", ["--only", "weights", "--only", "faces"]
    run_tool(doctor.main, "--config", configuration, "--out", out, "--device", "cpu", *chosen)
    found = page(out)
    assert found["weights"]["line"] == "not compared with diffusers' loading: this is no Wan model"
    assert found["faces"]["status"] == "could not be done"


def test_the_page_takes_any_figure_and_any_words(tmp_path):
    facts = {"a": math.nan, "table": [{"x": 1.5, "y": "a|b"}, {"x": 2}], "words": ["p", "```"], "yes": True}
    write_page(opened(tmp_path), {"one": Finding("ok", "it|is", facts)})
    found = page(tmp_path / "page.md")["one"]
    assert math.isnan(found["a"]) and found["table"] == [{"x": 1.5, "y": "a|b"}, {"x": 2}]
    assert found["words"] == ["p", "´´´"] and found["line"] == "it/is"
