"""The overview of a run and its table of sigmas, on the tiny world."""

from types import SimpleNamespace

import pytest
from conftest import ROOT
from pipelines import I2V

from rewardfl import backbones, config, flow
from rewardfl.backbones.protocol import Source
from rewardfl.backbones.wan import model as wan
from rewardfl.training import plan, setup_summary

SCHEDULE = wan.schedule(8, 5.0, I2V.experts, 0.9)
SIGMAS, EXPERTS = tuple(SCHEDULE.sigmas.tolist()), SCHEDULE.experts  # three steps of high noise, five of low
TINY = ROOT / "tests" / "grpo.yaml"
SIX = ["grpo.groups=6", "grpo.same_noise_in_group=false", "grpo.window.within=null"]  # overrides of TINY
TINY_MODEL = backbones.describe("wan2_2", Source(model_paths=str(ROOT / "assets/tiny_world/pipeline"), dtype="float32"))


def overview(*overrides, clips=None, processes=1):
    cfg = config.load(TINY, [*SIX, *overrides])
    rows = None if clips is None else [SimpleNamespace(size=None, offers=("clip",))] * clips
    return setup_summary.overview(plan.resolve(cfg, TINY_MODEL, processes), TINY_MODEL, rows)


def test_overview():
    settings = ["grpo.updates_per_epoch=2", "grpo.inner_epochs=2", "sample.guidance_scale=2"]
    text = overview(*settings, "train.per_device_train_batch_size=4", clips=48, processes=3)
    assert "6 groups x 8 = 48 samples = 4 forwards x 4 batch x 3 processes\n" in text
    assert "updates: 2 per epoch x 2 inner epochs = 4, each of 24 samples\n" in text
    assert "the run: 40 updates = 10 epochs = 60 groups = 1.25 x 48 clips\n" in text
    assert "SDE: flow, noise level 0.7, window 2 of [3, 4, 5, 6], drawn in each epoch: [4, 5], [3, 4], [5, 6], " in text


def cells(step, *overrides):
    cfg = config.load(TINY, [*SIX, "grpo.window.within=[3, 6]", *overrides])
    windows = plan.make_windows(cfg, EXPERTS, ["low_noise"])
    return setup_summary.sigma_table(SCHEDULE, windows.drawable, cfg.grpo)[1 + step].split()


def test_sigma_table():
    """step, sigma, timestep, expert, window, and std, weight and noise."""
    assert cells(0) == ["0", "1.0000", "1000.000", "high_noise", "-", "0.7000", "0.0397", "1.038"]
    for sde in ("flow", "dance", "cps"):
        step = flow.coefficients(sde, SIGMAS[6], SIGMAS[7], 0.7, SIGMAS[1])
        expected = [step.std, flow.gradient_weight(sde, step), flow.noise_scale_error(step, SIGMAS[6], SIGMAS[7])]
        assert [float(cell) for cell in cells(6, f"grpo.sde={sde}")[5:]] == pytest.approx(expected, abs=6e-4)
    assert [cells(i, "grpo.sde=cps")[7] for i in range(7)] == ["1.000"] * 7  # cps leaves the noise that it should
    assert cells(7)[5:] == ["0.3819", "1.3584", "-"] and cells(7, "grpo.sde=cps")[5:] == ["0.0000", "-", "-"]
    assert [cells(i)[4] for i in range(8)] == ["-"] * 3 + ["drawn"] * 3 + ["-"] * 2
    assert cells(3, "grpo.window={steps: [3]}")[4] == "trained"
    face = setup_summary.sigma_table(SCHEDULE, (4, 5, 6, 7))
    assert face[3].split() == ["2", "0.9375", "937.500", "high_noise", "-"]
    assert [line.split()[4] for line in face[1:]] == ["-"] * 4 + ["replayed"] * 4
    stored = setup_summary.sigma_table(SCHEDULE, (4, 5, 6, 7), graphs_of=(6, 7))
    assert [line.split()[4] for line in stored[5:]] == ["replayed"] * 2 + ["kept"] * 2
