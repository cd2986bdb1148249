"""train_flow_grpo.py as a user runs it, on the embedded tiny world."""

import dataclasses
import json
import re
import weakref

import pytest
import torch
from conftest import ROOT
from diffusers.training_utils import EMAModel
from runs import HELD_OUT, SWAPPED, WORLD, adapter, call, call_grpo, launch_grpo, metrics, watch

from rewardfl import data, grpo, reward_flow, sde
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.training import checkpoint, logger
from rewardfl.training.distributed import Distributed

pytestmark = pytest.mark.slow(200)

REWARDS = ROOT / "tests" / "support" / "grpo_rewards.py"


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of two epochs of four updates each that nothing interrupts, with a judge."""
    run = tmp_path_factory.mktemp("straight") / "run"
    launch_grpo(f"run.output_dir={run}", *EPOCHS, JUDGE, HELD_OUT, "train.max_steps=8")
    return run


JUDGE = f"reward.held_out_model_path={WORLD}/faces/judge"
# two updates share an epoch, which is gone through twice; an evaluation and a checkpoint after each
EPOCHS = [
    "grpo.updates_per_epoch=2", "grpo.inner_epochs=2", "run.save_steps=4", "grpo.kl_weight=0.01",
    "evaluation.eval_steps=4", "evaluation.eval_inference_steps=2", "train.warmup_steps=0",
]  # fmt: skip


def test_a_run_leaves_what_the_design_says(straight):
    lines = metrics(straight)
    assert [line["step"] for line in lines] == list(range(9))
    assert [line.get("epoch") for line in lines] == [None, 0, 0, 0, 0, 1, 1, 1, 1]
    keys = {
        "actor/loss", "grad_norm", "lr", "reward/mean", "reward/std_in_group", "reward/valid_fraction", "reward/score",
        "reward/failed", "group/zero_variance", "policy/ratio", "policy/ratio_std", "policy/clip_fraction",
        "policy/clip_fraction_positive", "policy/clip_fraction_negative", "policy/approximate_kl", "policy/kl",
    }  # fmt: skip
    assert all(keys <= line.keys() for line in lines[1:])
    # the first update of an epoch is on-policy, exactly; the others are not
    assert [line["policy/ratio_std"] == 0 for line in lines[1:]] == [True, False, False, False] * 2
    assert lines[1]["policy/ratio"] == 1 and lines[1]["policy/kl"] == 0 < lines[2]["policy/kl"]
    assert [("eval/score" in line) for line in lines] == [True, *[False] * 3, True, *[False] * 3, True]
    assert lines[0]["eval/score"] != lines[4]["eval/score"] != lines[8]["eval/score"]
    assert (straight / "checkpoints" / "latest").resolve().name == "step-000008"
    clip = data.read_video(straight / "samples" / "step-000008" / "00.mp4")
    assert clip.shape == (5, 32, 64, 3)  # real | generated


def test_averaged_weights_are_saved_with_the_trained_ones(straight):
    state = checkpoint.load_state(straight / "checkpoints" / "step-000004")
    saved = adapter(straight, 4)
    average = sorted(float(p.double().sum()) for p in state["average"]["shadow_params"])
    assert average == pytest.approx(sorted(float(p.double().sum()) for p in saved.values()), abs=1e-12)
    pairs = zip(state["parameters"], state["average"]["shadow_params"], strict=True)
    assert any(not torch.equal(last, averaged) for last, averaged in pairs)


# -- rewards that fail


@pytest.mark.parametrize(
    "reward, failed, note", [("Raises", 0.5, "RuntimeError: the judge is not at home (2 samples)"), ("Nan", 0.0, "")]
)
def test_an_invalid_sample_leaves_its_group(tmp_path, reward, failed, note):
    reward = [f"reward.terms.score.name={REWARDS}:{reward}", "grpo.groups=1", "grpo.group_size=4"]
    run = launch_grpo(f"run.output_dir={tmp_path}", *reward, "train.max_steps=1")
    (line,) = metrics(tmp_path)
    assert line["reward/valid_fraction"] == 0.5 and line["reward/failed"] == failed and line["grad_norm"] > 0
    assert note in run.stdout and ("reward.terms.score: " in run.stdout) == bool(note)


def test_a_reward_that_hangs_only_fails(tmp_path):
    others = json.dumps({"slow": {"name": f"{REWARDS}:Hangs", "weight": 0}})
    run = launch_grpo(f"run.output_dir={tmp_path}", "train.max_steps=1", f"reward.others={others}")
    (line,) = metrics(tmp_path)
    assert line["reward/valid_fraction"] == 1 and line["reward/failed"] == 1 and line["grad_norm"] > 0
    assert "reward.terms.slow: no answer within 0.5 s (4 samples)" in run.stdout


def train(run, *settings, max_steps=1):
    """Return the finished run, whatever its exit code."""
    return launch_grpo(f"run.output_dir={run}", f"train.max_steps={max_steps}", *settings, check=False)


@pytest.mark.parametrize(
    "settings",
    [
        ["grpo.sde=dance", "grpo.noise_level=0.3", "grpo.objective=clip", "grpo.advantage.std=global"],
        ["grpo.sde=cps", "grpo.window={steps: [3]}", "train.memory.samples_on=cpu"],
        ["sample.guidance_scale=2", "sample.negative_prompt=ugly", "grpo.window=fraction", "grpo.kl_weight=0.1"],
        ["model.trainable_models=dit,dit2", "grpo.window.size=4", "grpo.advantage.std=none"],
        SWAPPED,
    ],
)
def test_other_settings_begin_on_policy(tmp_path, settings):
    launch_grpo(f"run.output_dir={tmp_path}", "train.max_steps=1", *settings)
    (line,) = metrics(tmp_path)
    assert line["grad_norm"] > 0 and line["policy/ratio"] == 1 and line["policy/ratio_std"] == 0


def test_another_policy_than_the_rollouts_stops_the_run(monkeypatch, tmp_path):
    """Latents that are kept in bfloat16: the second step starts elsewhere than it did."""
    narrow = lambda step, device: dataclasses.replace(step, x=step.x.bfloat16().float())  # noqa: E731
    monkeypatch.setattr(sde.Step, "to", narrow)
    run = train(tmp_path)
    assert run.returncode == 2
    for words in ("before the first update the ratio must be 1", "step 2: ", "step 3: ", "narrower dtype"):
        assert words in run.stderr
    assert not metrics(tmp_path)  # nothing was updated


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(monkeypatch, tmp_path):
    backward = Distributed.backward
    monkeypatch.setattr(Distributed, "backward", lambda job, loss: backward(job, loss * torch.nan))
    monkeypatch.setattr(logger, "MAX_WITHOUT_EFFECT", 1)
    with pytest.raises(SystemExit, match="stopped at step 2: 2 updates in a row were not finite"):
        train(tmp_path, max_steps=4)
    assert [line["grad_norm"] for line in metrics(tmp_path)] == [None, None]


def test_members_of_one_noise_share_the_steps_before_the_window(monkeypatch, tmp_path):
    """Groups of four in passes of two: the second pass of a group has nothing to compute before its window."""
    seen, spread = {True: [], False: []}, {}

    def record(_, velocity, x, sigmas, *more, **settings):
        seen[same].append((len(x), len(sigmas) - 1))

    watch(monkeypatch, reward_flow, "rollout", record)
    for same in (True, False):
        settings = ["grpo.group_size=4", f"grpo.same_noise_in_group={same}", "run.sample_videos=0"]
        assert train(tmp_path / str(same), *settings).returncode == 0
        spread[same] = metrics(tmp_path / str(same))[0]["reward/std_in_group"]
    assert seen == {True: [(1, 2)] * 2, False: [(2, 2)] * 4}
    assert 0 < spread[True] < spread[False]  # members differ less if only the noise of two late steps differs


def test_evaluation_is_the_ode_of_the_averaged_weights(monkeypatch, tmp_path):
    """An average that never moves evaluates as the base model does."""
    settings = [
        HELD_OUT, "evaluation.eval_steps=1", "run.sample_videos=0",
        "evaluation.eval_inference_steps=1", "train.learning_rate=1e-2", "train.warmup_steps=0",
    ]  # fmt: skip
    monkeypatch.setattr(EMAModel, "step", lambda self, parameters: None)
    assert train(tmp_path, *settings).returncode == 0
    before, after = ({k: v for k, v in line.items() if "eval/" in k} for line in metrics(tmp_path))
    assert before == after and before


# -- what is refused


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["grpo.window={steps: [4]}"], "usable are the steps of dit2 (model.trainable_models) but"),
        (["model.trainable_models=dit,dit2", "grpo.window.within=[0, 2]"], "low_noise is used at none of"),
        (["lora.lora_target_modules=q,kk"], "lora.lora_target_modules: 'kk' matches no linear layer"),
    ],
)
def test_settings_are_refused_before_anything_loads(tmp_path, overrides, message):
    run = train(tmp_path, *overrides)
    assert run.returncode == 2 and message in run.stderr and not (tmp_path / "metrics.jsonl").exists()


def test_held_out_clips_are_read_before_anything_loads(tmp_path):
    (tmp_path / "held_out.csv").write_text("video,prompt\nlost.mp4,a person\n")
    run = train(tmp_path / "run", f"evaluation.eval_clips={tmp_path / 'held_out.csv'}")
    words = ("evaluation.eval_clips", "1 of 1 rows", "line 2: ", "lost.mp4")
    assert run.returncode == 2 and all(word in run.stderr for word in words)


def test_each_script_refuses_the_others_configuration(monkeypatch, capsys):
    for start, config in ((call, "tiny_flow_grpo"), (call_grpo, "tiny_face")):
        code, _, error = start(monkeypatch, capsys, "--config", f"configs/{config}.yaml")
        assert code == 2 and re.search("(has a|has no) section grpo.*, so it is for train_.*, not train_", error)


@pytest.mark.parametrize("objective", ["clip", "guard"])
def test_the_scripts_loss_is_the_papers(monkeypatch, tmp_path, objective):
    """Against the formulas, in two updates on the same samples: the range clips some of them, and the KL counts."""
    scores, losses, references, advantages = [], [], [], []

    def seen_transition(result, *_):
        if not torch.is_grad_enabled():
            references.append(result[0])

    watch(monkeypatch, sde, "score", lambda result, _, *step: scores.append((*step, *result)))
    watch(monkeypatch, sde.Kernel, "transition", seen_transition)
    watch(monkeypatch, grpo, "advantages", lambda result, *_, **settings: advantages.extend(result[0].split(2)))
    watch(monkeypatch, Distributed, "backward", lambda _, job, loss: losses.append(loss.detach()))
    launch_grpo(
        f"run.output_dir={tmp_path}", f"grpo.objective={objective}", "grpo.inner_epochs=2", "train.max_steps=2",
        "grpo.clip_range=1e-5", "grpo.clip_range_high=2e-5", "grpo.kl_weight=0.3", "train.learning_rate=0.05",
        "train.warmup_steps=0", "run.sample_videos=0",
    )  # fmt: skip
    # two rollouts of two samples, each scored at both steps of the window, in two updates
    assert len(scores) == len(losses) == 8 and len(advantages) == 2
    clipped = 0
    for n, ((step, i, kernel, mean, log_prob), loss) in enumerate(zip(scores, losses, strict=True)):
        advantage = advantages[n // 2 % 2].double()
        if objective == "clip":
            ratio = (log_prob - step.log_prob).exp()
        else:  # GRPO-Guard: the drift along the noise that was drawn
            noise = (step.x_next - step.mean) / step.std
            ratio = ((mean - step.mean) * noise).double().flatten(1).mean(1).exp()
        inside = ratio.clamp(1 - 1e-5, 1 + 2e-5)
        clipped += int((ratio != inside).sum())
        expected = torch.minimum(advantage * ratio, advantage * inside).mean().neg()
        if objective == "guard":
            expected = expected / float(kernel.sigmas[i] - kernel.sigmas[i + 1])
        policy, base = (torch.distributions.Normal(m.double(), step.std) for m in (mean, references[-8:][n]))
        expected = expected + 0.3 * torch.distributions.kl_divergence(policy, base).mean()
        # a part of an update: two rollouts at two steps
        torch.testing.assert_close(4 * loss, expected.detach(), rtol=2e-5, atol=1e-9)
    assert 0 < clipped < 16 and metrics(tmp_path)[1]["policy/kl"] > 0


def test_no_video_is_held_during_updates(monkeypatch, tmp_path):
    """Of 480x832x81 each takes 0.4 GB, at the moment at which most is needed."""
    videos, alive = [], []
    watch(monkeypatch, WanDecoder, "decode", lambda video, *_: videos.append(weakref.ref(video)))
    update = lambda *_, **__: alive.append(sum(video() is not None for video in videos))  # noqa: E731
    watch(monkeypatch, Distributed, "gradient_reduction", update)
    launch_grpo(f"run.output_dir={tmp_path}", "train.max_steps=2", "run.sample_videos=0")
    assert len(videos) == 4 and alive == [0, 0]


def test_every_group_may_have_a_window_of_its_own(monkeypatch, tmp_path):
    """Flash-GRPO: one stochastic step per group. A resumed run draws the same ones."""
    drawn = []
    watch(monkeypatch, sde, "rollout", lambda _, v, x, kernel, window, *more, **settings: drawn.append(window))
    launch_grpo(
        f"run.output_dir={tmp_path}", "grpo.window.per_group=true", "grpo.window.size=1", "grpo.groups=4",
        "train.max_steps=3", "run.sample_videos=0", "sample.num_inference_steps=8",
    )  # fmt: skip
    assert len(drawn) == 12 and all(len(window) == 1 for window in drawn)
    assert any(len(set(drawn[i : i + 4])) > 1 for i in (0, 4, 8))
    assert all(line["policy/ratio"] == 1 for line in metrics(tmp_path))
