"""Learning rates, the averaged weights and the old policy."""

import pytest
import torch

from rewardfl.optim import Average, OldPolicy, averaged, learning_rate_factor


def test_learning_rates_warm_up_and_end_at_zero():
    factors = {schedule: learning_rate_factor(schedule, 2, 6) for schedule in ("constant_with_warmup", "cosine")}
    assert [factors["constant_with_warmup"](step) for step in range(4)] == [0.5, 1, 1, 1]
    expected = [0.5, 1, 1, 0.85355, 0.5, 0.14645, 0, 0]
    assert [factors["cosine"](step) for step in range(8)] == pytest.approx(expected, abs=1e-5)


def test_the_average_warms_up_as_documented():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    ema, average = Average(parameters, decay=0.9), torch.zeros(2)
    for n in range(100):
        parameters[0].data.fill_(float(n))
        ema.step(parameters)
        decay = min(0.9, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * n
        torch.testing.assert_close(ema.shadow_params[0], average)  # the first ones show the warm-up
    with pytest.raises(RuntimeError), averaged(ema, parameters):
        torch.testing.assert_close(parameters[0].data, average)
        raise RuntimeError
    assert parameters[0].tolist() == [99, 99]
    resumed = Average(parameters, decay=0.5)
    resumed.load_state_dict(ema.state_dict())
    assert resumed.decay == 0.9 and resumed.optimization_step == 100
    torch.testing.assert_close(resumed.shadow_params[0], average)


def test_the_old_policy_follows_by_its_share():
    weight = torch.nn.Parameter(torch.tensor([1.0, 0.1]))
    old = OldPolicy([weight], lambda update: 0.0 if update < 3 else 0.75)
    weight.data = torch.tensor([0.3, 1e-9])
    old.follow(2)
    assert torch.equal(old.shadow_params[0], weight)  # to the bit, which a weighted mean would not be
    weight.data += 1
    old.follow(3)
    torch.testing.assert_close(old.shadow_params[0], weight.detach() - 0.75)
