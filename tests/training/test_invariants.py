"""A run that breaks what must hold stops, with an exit code of its own: each is broken here once, on purpose."""

import copy
import types

import pytest
import torch
from accelerate import Accelerator
from runs import FAST, GRPO_FAST, call, call_grpo, launch, launch_grpo, metrics
from torch import nn

from rewardfl.training import invariants
from rewardfl.training.distributed import Distributed

pytestmark = pytest.mark.slow(120)

SHORT = ["train.max_steps=2", "run.sample_videos=0", "reward.held_out_model_path=null"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (64, 5)])
def test_bit_sums_see_every_element(dtype, shape):
    """Against Python's own integers; and each element's smallest possible change is seen."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    (found,) = invariants.bit_sums([tensor]).tolist()
    content = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    whole = len(content) // 8 * 8
    words = [int.from_bytes(bytes(content[i : i + 8]), "little") for i in range(0, whole, 8)]
    assert found % 2**64 == (sum(words) + sum(content[whole:])) % 2**64
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[i * tensor.element_size()] ^= 1
        assert invariants.bit_sums([other]).tolist() != [found]


def test_bit_sums_of_a_view_that_begins_anywhere():
    """As DeepSpeed lays parameters into one buffer: they begin at any multiple of four bytes."""
    buffer = torch.randn(101)
    views = [buffer[start : start + 50] for start in (0, 1, 51)]
    changed = buffer.clone()
    changed[50] += 1  # of the second alone
    others = [changed[start : start + 50] for start in (0, 1, 51)]
    assert (invariants.bit_sums(views) == invariants.bit_sums(others)).tolist() == [True, False, True]
    assert invariants.bit_sums([]).shape == (0,)


def test_no_signal():
    some, none = torch.tensor([False, True]), torch.tensor([False, False])
    assert invariants.no_signal(3, 0.5, some) == invariants.no_signal(3, float("nan"), some) == 0.0
    assert invariants.no_signal(3, 0.5, none) == 0.0  # weight of something else; not this check's business
    assert invariants.no_signal(3, 0.0, none) == 1.0
    with pytest.raises(invariants.GradientMissing, match="step 3: .* 1 of 2 samples"):
        invariants.no_signal(3, 0.0, some)


class Two(nn.Module):
    """Shaped as the seam's Experts: a frozen and a trained layer inside, a frozen expert outside, and one away."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.outside = {"high_noise": nn.Linear(3, 3).requires_grad_(False), "low_noise": None}


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_changed_base_is_named(place):
    model = Two()
    watched = invariants.Weights(Accelerator(cpu=True), model)
    model.trained.weight.data += 1
    watched.check(1)
    layer = model.frozen if place == "inside" else model.outside["high_noise"]
    layer.bias.data[1] = torch.nextafter(layer.bias.data[1], torch.tensor(9.0))
    with pytest.raises(invariants.BaseChanged, match="step 2: 1 of 4 parameters") as stopped:
        watched.check(2)
    assert ("frozen.bias" if place == "inside" else "high_noise.bias") in str(stopped.value)


def test_processes_that_differ_are_named():
    """Two processes of which the second's weights are one bit away; the gather of both is played."""
    model, other = Two(), None
    other = copy.deepcopy(model)
    other.trained.weight.data[0, 0] = torch.nextafter(other.trained.weight.data[0, 0], torch.tensor(9.0))
    theirs = {4: torch.zeros(4, dtype=torch.long), 2: invariants.bit_sums([other.trained.weight, other.trained.bias])}
    pair = types.SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, distributed_type="MULTI_GPU",
        gather=lambda values: torch.cat([values, theirs[len(values)]]),
    )  # fmt: skip
    watched = invariants.Weights(pair, model)
    with pytest.raises(invariants.WeightsDiffer, match="step 5: 1 of 2 parameters .trained.weight"):
        watched.check(5)
    model.trained.load_state_dict(other.trained.state_dict())
    watched.check(5)


def test_processes_that_loaded_other_files_are_named():
    model, theirs = Two(), torch.zeros(6, dtype=torch.long)
    pair = types.SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, gather=lambda values: torch.cat([values, theirs])
    )
    with pytest.raises(invariants.WeightsDiffer, match="[56] of 6 parameters .frozen.weight.*model.model_paths"):
        invariants.check_loaded(pair, model)
    loaded = invariants.frozen_parameters(model) | dict(model.named_parameters())  # an adapter may differ, too
    theirs = invariants.bit_sums(list(loaded.values()))
    invariants.check_loaded(pair, model)


SCRIPTS = [(launch, call, FAST), (launch_grpo, call_grpo, GRPO_FAST)]


@pytest.mark.parametrize("_,call_script,fast", SCRIPTS, ids=["reward_fl", "flow_grpo"])
def test_a_run_whose_gradients_go_missing_stops(monkeypatch, capsys, tmp_path, _, call_script, fast):
    """As when the backward passes never reach the parameters that are trained."""
    step = Distributed.step

    def after_the_loss(job, optimizer, parameters, max_norm):
        for parameter in parameters:
            parameter.grad.zero_()
        return step(job, optimizer, parameters, max_norm)

    monkeypatch.setattr(Distributed, "step", after_the_loss)
    code, _, err = call_script(monkeypatch, capsys, *fast, *SHORT, f"run.output_dir={tmp_path}")
    assert code == invariants.GradientMissing.exit_code == 3 and "step 1" in err
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("_,call_script,fast", SCRIPTS, ids=["reward_fl", "flow_grpo"])
def test_a_run_that_changes_its_base_stops(monkeypatch, capsys, tmp_path, _, call_script, fast):
    step = Distributed.step

    def careless(job, optimizer, parameters, max_norm):
        for frozen in seen["base"].values():
            frozen.data.mul_(1.001)
        return step(job, optimizer, parameters, max_norm)

    seen, weights = {}, invariants.Weights

    def watched(accelerator, model):
        made = weights(accelerator, model)
        seen["base"] = made.base
        return made

    monkeypatch.setattr(invariants, "Weights", watched)
    monkeypatch.setattr(Distributed, "step", careless)
    code, _, err = call_script(monkeypatch, capsys, *fast, *SHORT, f"run.output_dir={tmp_path}")
    assert code == invariants.BaseChanged.exit_code == 5 and "step 1" in err
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("_,call_script,fast", SCRIPTS, ids=["reward_fl", "flow_grpo"])
def test_the_processes_are_compared_after_the_first_update_and_at_every_save(
    monkeypatch, capsys, tmp_path, _, call_script, fast
):
    checked = []
    monkeypatch.setattr(invariants.Weights, "check", lambda self, step: checked.append(step))
    steps = ["train.max_steps=3", "run.save_steps=2", "run.sample_videos=0"]
    assert call_script(monkeypatch, capsys, *fast, *steps, f"run.output_dir={tmp_path}")[0] == 0
    assert checked == [1, 2, 3]
    assert [("train/no_signal" in line) for line in metrics(tmp_path)] == 3 * [True]


def test_a_gradient_of_zero_with_a_reason_is_counted_and_training_goes_on(tmp_path):
    """Every clip is above the cap and there is no KL: nothing to learn, and no error."""
    launch(
        f"run.output_dir={tmp_path}", "train.max_steps=2", "reward.cap=0.01", "reward.kl_weight=0",
        "run.sample_videos=0",
    )  # fmt: skip
    lines = metrics(tmp_path)
    assert [(line["train/no_signal"], line["grad_norm"]) for line in lines] == [(1.0, 0.0)] * 2


def test_groups_of_equal_rewards_are_counted_and_training_goes_on(monkeypatch, tmp_path):
    launch_grpo(
        f"run.output_dir={tmp_path}", "train.max_steps=1", "run.sample_videos=0",
        "reward.settings={red: 0.0, green: 0.0, blue: 0.0}",
    )  # fmt: skip
    (line,) = metrics(tmp_path)
    assert line["group/zero_variance"] == 1 and line["train/no_signal"] == 1 and line["grad_norm"] == 0
