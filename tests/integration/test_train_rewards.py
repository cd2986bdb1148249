"""Both scripts with other rewards than the face, several at a time, a user's own, and one in another process."""

import contextlib
import json
import math
import re
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT
from runs import (
    COLOUR,
    FAST,
    GRPO_FAST,
    RED,
    adapter,
    call,
    call_grpo,
    environment,
    equal_tensors,
    launch,
    launch_grpo,
    metrics,
)

from rewardfl import config, rewards
from rewardfl.rewards import build_terms, resolve_rewards
from rewardfl.rewards.settings import setting_types
from rewardfl.training import logger, setup_model

pytestmark = pytest.mark.slow(190)

OWN = ROOT / "tests" / "support" / "grpo_rewards.py"


def others(**terms):
    return f"reward.others={json.dumps(terms)}"  # JSON is YAML


@contextlib.contextmanager
def served(reward, output):
    """Yield the url of a reward server in another process, which prints it into the file `output`."""
    command = [sys.executable, "tools/serve_reward.py", "--trust-code", "--reward", reward]
    command += ["--port", "0", "--device", "cpu"]
    with output.open("w") as file:
        server = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        while not (url := re.search(r"(http://[\d.]+:\d+).*\n", output.read_text())):
            assert server.poll() is None, output.read_text()
            time.sleep(0.05)
        yield url[1]
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_a_sum_of_rewards_and_some_that_only_measure(tmp_path):
    """The face, a colour and a user's class are trained; a server in another process only measures."""
    with served(COLOUR, tmp_path / "server") as url:
        launch(
            "--trust-code", f"run.output_dir={tmp_path / 'run'}", "train.max_steps=2",
            others(
                red={"name": COLOUR, "weight": 0.5, "mean": 0.1, "std": 0.2},
                contrast={"name": "examples/my_reward.py:Contrast", "weight": 0.3, "settings": {"target": 0.25}},
                far={"name": "remote", "settings": {"url": url}},
            ),
        )  # fmt: skip
    first = metrics(tmp_path / "run")[0]
    assert first["reward/far"] == pytest.approx(first["reward/red"], abs=2e-3)  # the server sees levels of 8 bits
    assert first["reward/contrast"] > 0 and math.isfinite(first["reward/held_out"])
    assert first["reward/valid_fraction"] == 1
    score = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["reward"]["terms"]["score"]
    face = score["weight"] * (first["reward/mean"] - score["mean"]) / score["std"]
    red, user = 0.5 * (first["reward/red"] - 0.1) / 0.2, 0.3 * first["reward/contrast"]
    assert first["actor/kl_loss"] == 0 and first["actor/loss"] == pytest.approx(-face - red - user, rel=1e-4)


ODD = """
from rewardfl.rewards import Reward, RewardOutput

class Odd(Reward):
    name, differentiable = "odd", True

    def forward(self, video, batch):
        return RewardOutput(video.mean(), video.new_ones(len(video)).bool(), {})

class Mean(Odd):
    def forward(self, video, batch):
        return RewardOutput(video.mean()[None], video.new_ones(len(video)).bool(), {})
"""


LATE = f"{ODD}\nclass Late(Odd):\n    def forward(self, video, batch):\n        raise KeyError('no such key')"


@pytest.mark.parametrize("start, fast, name", [(call, FAST, "Odd"), (call_grpo, GRPO_FAST, "Mean")])
def test_a_broken_reward_is_refused_before_the_model_loads(monkeypatch, capsys, tmp_path, start, fast, name):
    """Mean gives what one video asks for, and GRPO_FAST takes two at a time."""
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.setattr(setup_model, "load_experts", lambda *_: pytest.fail("the model was loaded"))
    odd = others(x={"name": f"{tmp_path / 'odd.py'}:{name}"})
    code, _, error = start(monkeypatch, capsys, *fast, f"run.output_dir={tmp_path / 'run'}", "--trust-code", odd)
    assert code == 2 and f"reward.terms.x: reward {name}: score must be a tensor of one value per video" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_error_of_a_reward_is_only_a_note(monkeypatch, capsys, tmp_path):
    (tmp_path / "odd.py").write_text(LATE)
    monkeypatch.setattr(setup_model, "load_experts", lambda *_: pytest.exit("far enough"))
    late = others(x={"name": f"{tmp_path / 'odd.py'}:Late"})
    with pytest.raises(pytest.exit.Exception):
        call(monkeypatch, capsys, *FAST, f"run.output_dir={tmp_path / 'run'}", "--trust-code", late)
    assert "note: reward.terms.x does not judge the first clip: KeyError: 'no such key'" in capsys.readouterr().out


ONE_STEP = ["--trust-code", *RED, "reward.terms.score.std=0.1", "reward.terms.score.mean=0", "train.max_steps=1"]
ONE_STEP.append("run.sample_videos=0")


def test_labels_and_parts_change_no_other_value(tmp_path):
    """Parts and labels that have names of the script's own values leave these values as they are."""
    runs = {
        "plain": [f"reward.terms.score.name={OWN}:Unnamed"],
        "parts": [f"reward.terms.score.name={OWN}:Names"],
        "labels": [
            f"reward.terms.score.name={OWN}:Unnamed",
            others(**{name: {"name": COLOUR} for name in ("kl", "valid", "row", "finite", "replaced", "total")}),
        ],
    }
    lines = {}
    for name, settings in runs.items():
        launch("--trust-code", f"run.output_dir={tmp_path / name}", *ONE_STEP, *settings)
        (lines[name],) = metrics(tmp_path / name)
    plain = lines["plain"]
    assert {"actor/loss", "actor/kl_loss", "reward/mean", "reward/valid_fraction", "data/replaced"} <= plain.keys()
    assert {key.removeprefix("reward/") for key in plain if "reward/" in key} <= {*config.RESERVED_METRICS, "nonfinite"}
    for name, line in lines.items():
        assert {key: line[key] for key in plain} == plain, name
        assert equal_tensors(adapter(tmp_path / name, 1), adapter(tmp_path / "plain", 1))
    for name in ("mean", "valid_fraction", "failed", "held_out"):
        assert lines["parts"][f"reward/score/{name}"] == 100
    assert lines["parts"]["reward/kl"] == 100 and "reward/held_out" not in lines["parts"]
    labels = lines["labels"]
    assert labels["reward/kl"] == labels["reward/row"] == pytest.approx(labels["reward/total"])


def test_the_documented_yaml_is_what_the_config_takes(tmp_path):
    """The block of docs/rewards_remote.md, through config.load and the registry, in both scripts."""
    page = (ROOT / "docs" / "rewards_remote.md").read_text()
    (block,) = re.findall(r"```yaml\n(reward:\n.*?)```", page, re.DOTALL)
    shared = "run: {output_dir: out}\nmodel: {model_paths: m}\nlora: {}\ndata: {file_name: d}\nsample: {}\ntrain: {}\n"
    for section in ("", "grpo: {}\n"):
        (tmp_path / "run.yaml").write_text(shared + section + block)
        cfg = config.load(tmp_path / "run.yaml")
        first, judge = build_terms(resolve_rewards(config.list_reward_specs(cfg)), torch.device("cpu"))
        assert first.reward.url == "http://127.0.0.1:8400" and not first.reward.send_reference
        assert judge.reward.url == "http://127.0.0.1:8401" and judge.reward.send_reference
        assert (first.reward.place, judge.reward.place) == (
            "reward.terms.score.settings",
            "reward.terms.judge.settings",
        )
    # every setting of the page's table is one of the reward's, and the other way round
    table = page[: page.index("## What goes wrong")]
    settings = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(settings) == sorted(setting_types(rewards.find_reward("remote")))


def test_what_is_only_measured_may_fail(monkeypatch, capsys, tmp_path):
    """A server that is down from the first step on is named once and counted, and training continues."""
    far = others(far={"name": "remote", "settings": {"url": "http://127.0.0.1:9", "retries": 0}})
    settings = [*FAST, f"run.output_dir={tmp_path}", *ONE_STEP, "train.max_steps=2", far]
    code, out, error = call(monkeypatch, capsys, *settings)
    assert code == 0, error
    assert [(line["reward/failed"], line["reward/far"]) for line in metrics(tmp_path)] == [(1, None)] * 2
    assert all(line["grad_norm"] > 0 and line["reward/valid_fraction"] == 1 for line in metrics(tmp_path))
    assert out.count("reward.terms.far.settings.url http://127.0.0.1:9: ") == 1


def test_a_first_update_without_a_judged_sample_stops_the_run(monkeypatch, capsys, tmp_path):
    settings = [*FAST, *ONE_STEP, "--trust-code", f"reward.terms.score.name={OWN}:Never", "train.max_steps=4"]
    settings.append(f"run.output_dir={tmp_path}")
    code, out, error = call(monkeypatch, capsys, *settings)
    assert code == 2
    words = "1 update in a row taught nothing; reward.terms.score (Never) judged 0 of 1 samples"
    stopped = f"error: stopped at step 1: {words}"
    assert error.splitlines()[-1].startswith(stopped)
    assert [line["reward/valid_fraction"] for line in metrics(tmp_path)] == [0]
    assert out.count("not one sample was judged (1 in a row)") == 1


def test_flow_grpo_stops_without_a_judged_sample(monkeypatch, capsys, tmp_path):
    """In the first epoch of a start at once; later after several updates."""
    run = tmp_path / "dies"
    settings = [*GRPO_FAST, "--trust-code", "run.sample_videos=0", "train.max_steps=4"]
    monkeypatch.setattr(logger, "MAX_WITHOUT_EFFECT", 1)
    settings += [f"run.output_dir={run}", f"reward.terms.score.name={OWN}:Dies"]
    code, out, error = call_grpo(monkeypatch, capsys, *settings)
    assert code == 2 and "stopped at step 3: 2 updates in a row taught nothing; reward.terms.score (Dies)" in error
    assert [line["reward/valid_fraction"] for line in metrics(run)] == [1, 0, 0]
    assert [line["grad_norm"] > 0 for line in metrics(run)] == [True, False, False]
    first = metrics(run)[0]  # parts do not change the script's own values
    assert first["reward/score/failed"] == first["reward/score/mean"] == first["reward/kl"] == 100
    assert first["reward/failed"] == 0 and first["reward/mean"] == pytest.approx(first["reward/score"], abs=2)
    assert out.count("step 2: not one sample was judged (1 in a row); ") == 1


def test_flow_grpo_trains_on_a_sum_with_a_server(tmp_path):
    """The server scores next to the rollouts."""
    with served(COLOUR, tmp_path / "server") as url:
        contrast = {"name": "examples/my_reward.py:Contrast", "weight": 1.0, "settings": {"target": 0.25}}
        settings = [
            "train.max_steps=1",
            "reward.terms.score.name=remote",
            f"reward.terms.score.settings={json.dumps({'url': url})}",
        ]
        settings += ["reward.terms.score.weight=2", others(contrast=contrast, red={"name": COLOUR})]
        launch_grpo(f"run.output_dir={tmp_path / 'run'}", *settings)
    (line,) = metrics(tmp_path / "run")
    assert line["reward/score"] == pytest.approx(line["reward/red"], abs=2e-3)  # the server sees levels of 8 bits
    assert line["reward/mean"] == pytest.approx(2 * line["reward/score"] + line["reward/contrast"], rel=1e-5)
    assert line["reward/valid_fraction"] == 1 and line["reward/failed"] == 0 < line["grad_norm"]
