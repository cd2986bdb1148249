"""What must hold in every run: each invariant is broken here once, and the run stops with its exit code."""

import copy
import types

import pytest
import torch
from accelerate import Accelerator
from runs import FAST, GRPO_FAST, call, call_grpo, metrics
from torch import nn

from rewardfl.training import invariants
from rewardfl.training.distributed import Distributed

pytestmark = pytest.mark.slow(60)

SHORT = ["train.max_steps=2", "run.sample_videos=0", "reward.held_out_model_path=null"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (7, 3), (64, 5)])
def test_bit_sums_see_every_element(dtype, shape):
    """Against Python's own integers; and each element's smallest possible change is seen."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    (bit_sum,) = invariants.bit_sums([tensor]).tolist()
    content = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    tail = len(content) // 8 * 8
    words = [int.from_bytes(bytes(content[i : i + 8]), "little") for i in range(0, tail, 8)]
    assert bit_sum % 2**64 == (sum(words) + sum(content[tail:])) % 2**64
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1).view(torch.uint8)[i * tensor.element_size()] ^= 1
        assert invariants.bit_sums([other]).tolist() != [bit_sum]


def test_bit_sums_of_a_view_that_begins_anywhere():
    """As DeepSpeed lays parameters into one buffer: they begin at any multiple of four bytes."""
    buffer = torch.randn(101)
    changed = buffer.clone()
    changed[50] += 1  # only in the second view
    sums = [invariants.bit_sums([whole[start : start + 50] for start in (0, 1, 51)]) for whole in (buffer, changed)]
    assert (sums[0] == sums[1]).tolist() == [True, False, True]
    assert invariants.bit_sums([]).shape == (0,)


def test_no_signal():
    some, none = torch.tensor([False, True]), torch.tensor([False, False])
    assert invariants.no_signal(3, 0.5, some) == invariants.no_signal(3, float("nan"), some) == 0.0
    assert invariants.no_signal(3, 0.5, none) == 0.0  # the weight of something else
    assert invariants.no_signal(3, 0.0, none) == 1.0
    with pytest.raises(invariants.GradientMissing, match="step 3: .* 1 of 2 samples"):
        invariants.no_signal(3, 0.0, some)


class Two(nn.Module):
    """Two layers, frozen and trained, a frozen expert outside, and an expert that is not loaded."""

    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.outside = {"high_noise": nn.Linear(3, 3).requires_grad_(False), "low_noise": None}


@pytest.mark.parametrize("name", ["frozen.bias", "high_noise.bias"])
def test_a_changed_base_is_named(name):
    model = Two()
    weights = invariants.Weights(Accelerator(cpu=True), model)
    model.trained.weight.data += 1
    weights.check(1)
    bias = invariants.frozen_parameters(model)[name]
    bias.data[1] = torch.nextafter(bias.data[1], torch.tensor(9.0))
    with pytest.raises(invariants.BaseChanged, match=f"step 2: 1 of 4 parameters .{name}"):
        weights.check(2)


def two_processes(other):
    """Return an accelerator of two processes; other: what the second one gathers, by its length."""
    return types.SimpleNamespace(
        device=torch.device("cpu"), num_processes=2, distributed_type="MULTI_GPU",
        gather=lambda values: torch.cat([values, other[len(values)]]),
    )  # fmt: skip


def test_processes_that_differ_are_named():
    """The second's weights are one bit away."""
    model = Two()
    other = copy.deepcopy(model)
    other.trained.weight.data[0, 0] = torch.nextafter(other.trained.weight.data[0, 0], torch.tensor(9.0))
    sums = {4: torch.zeros(4, dtype=torch.long), 2: invariants.bit_sums([other.trained.weight, other.trained.bias])}
    weights = invariants.Weights(two_processes(sums), model)
    with pytest.raises(invariants.WeightsDiffer, match="step 5: 1 of 2 parameters .trained.weight"):
        weights.check(5)
    model.trained.load_state_dict(other.trained.state_dict())
    weights.check(5)


def test_processes_that_loaded_other_files_are_named():
    model = Two()
    with pytest.raises(invariants.WeightsDiffer, match="[56] of 6 parameters .frozen.weight.*model.model_paths"):
        invariants.check_loaded(two_processes({6: torch.zeros(6, dtype=torch.long)}), model)
    loaded = invariants.frozen_parameters(model) | dict(model.named_parameters())  # an adapter may differ, too
    invariants.check_loaded(two_processes({6: invariants.bit_sums(list(loaded.values()))}), model)


def test_a_run_whose_gradients_go_missing_stops(monkeypatch, capsys, tmp_path):
    """As when the backward passes never reach the parameters that are trained."""
    step = Distributed.step

    def without_gradients(job, optimizer, parameters, max_norm):
        for parameter in parameters:
            parameter.grad.zero_()
        return step(job, optimizer, parameters, max_norm)

    monkeypatch.setattr(Distributed, "step", without_gradients)
    code, _, error = call_grpo(monkeypatch, capsys, *GRPO_FAST, *SHORT, f"run.output_dir={tmp_path}")
    assert code == invariants.GradientMissing.exit_code == 3 and "step 1" in error
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_processes_are_compared_after_the_first_update_and_at_every_save(monkeypatch, capsys, tmp_path):
    checked = []
    monkeypatch.setattr(invariants.Weights, "check", lambda self, step: checked.append(step))
    steps = ["train.max_steps=4", "run.save_steps=2", "run.sample_videos=0"]
    assert call(monkeypatch, capsys, *FAST, *steps, f"run.output_dir={tmp_path}")[0] == 0
    assert checked == [1, 2, 4] and all("train/no_signal" in line for line in metrics(tmp_path))
