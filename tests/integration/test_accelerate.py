"""Replay through accelerate is plain autograd over the global batch, whatever its split; the naive scaling is not."""

from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import run_python
from replay_worker import ACTIVE, CASES, KL_WEIGHT, batch_of
from runs import environment
from test_reward_flow import assert_same, autograd_gradients, lora_model

pytestmark = pytest.mark.slow(90)

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{case: [each rank's result]} of two processes."""
    out = tmp_path_factory.mktemp("replay")
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    run = run_python([*launcher, str(HERE / "replay_worker.py"), str(out)], env=environment())
    files = {case: [out / f"{'-'.join(map(str, case))}-{rank}.pt" for rank in range(2)] for case in CASES}
    missing = [str(file) for ranks in files.values() for file in ranks if not file.exists()]
    assert not missing, run.stderr[-3000:]
    return {case: [torch.load(file, weights_only=True) for file in ranks] for case, ranks in files.items()}


@cache
def expected(count, coupling):
    """Plain autograd of the mean loss over samples 0..count-1, one process, one graph."""
    pipe, model = lora_model(torch.float64)
    conditioning, x = batch_of(list(range(count)), pipe)
    summed, _, _ = autograd_gradients(pipe, model, conditioning, x, ACTIVE[coupling], coupling, KL_WEIGHT, "exact")
    return {name: gradient / count for name, gradient in summed.items()}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_the_global_batch(results, case):
    accumulation, batch, coupling, naive, _, per_clip = case
    ranks = results[case]
    assert [r["synchronised"] for r in ranks] == [1] * len(ranks)
    right = expected(accumulation * batch * len(ranks) // per_clip, coupling)
    for result in ranks:
        if naive:
            with pytest.raises(AssertionError, match="relative difference"):
                assert_same(result["gradients"], right, 1e-2)
        else:
            assert_same(result["gradients"], right, 1e-9)
