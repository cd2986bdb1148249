"""Policy, optimizer, learning-rate schedule and weight average, fresh or restored from a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rewardfl import config as configuration
from rewardfl.backbones.protocol import Backbone, Experts
from rewardfl.config import AnyConfig
from rewardfl.memory import sharding
from rewardfl.noise import noise_seed
from rewardfl.optim import Average, learning_rate_factor
from rewardfl.training import invariants
from rewardfl.training.distributed import Distributed
from rewardfl.training.state import RunState


@dataclass(frozen=True)
class Learner:
    """What is trained, and what moves it."""

    policy: nn.Module  # what is called to train: the experts, or what wraps them
    parameters: list[nn.Parameter]
    optimizer: AcceleratedOptimizer
    scheduler: LambdaLR
    trained: Mapping[str, nn.Module]  # the trained experts by name
    watched: invariants.Weights


def make_learner(
    cfg: AnyConfig,
    job: Distributed,
    backbone: Backbone,
    model: Experts,
    trained: Mapping[str, nn.Module],
    steps: int,
    resumed: RunState,
) -> Learner:
    """AdamW and its schedule over the adapters, whose first weights are in place; where the checkpoint left them.

    steps: of the whole run.
    """
    train = cfg.train
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
    # a plain scheduler: accelerate's steps once per process
    factor = learning_rate_factor(train.lr_scheduler_type, train.warmup_steps, steps)
    scheduler = LambdaLR(optimizer, factor)
    invariants.check_loaded(job.accelerator, model)
    policy, optimizer, parameters = job.prepare(model, optimizer, backbone.block_classes)
    watched = invariants.Weights(job.accelerator, model)
    if resumed.state:
        job.load_optimizer_state(optimizer, parameters, resumed.state.pop("optimizer"))
        load_schedule(scheduler, resumed.state.pop("scheduler"), train)
    return Learner(policy, parameters, optimizer, scheduler, trained, watched)


def load_schedule(scheduler: LambdaLR, state: dict[str, Any], train: configuration.GrpoTrainConfig) -> None:
    """Go on with a scheduler's state_dict, at the configuration's rate and weight decay, which may be others than then.

    Where they are not, this changes nothing, to the last bit.
    """
    step = state["last_epoch"]
    rates = [train.learning_rate * factor(step) for factor in scheduler.lr_lambdas]
    scheduler.load_state_dict(state | {"base_lrs": [train.learning_rate] * len(rates), "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group |= {"initial_lr": train.learning_rate, "lr": rate, "weight_decay": train.weight_decay}


def make_average(decay: float, parameters: Sequence[nn.Parameter], resumed: RunState) -> Average:
    """The average of the parameters, which are in place; where the checkpoint left it.

    decay: weight of the old average at each of its steps, to which that rises from 0.1.
    """
    average = Average(parameters, decay=decay)
    if resumed.state:
        average.load_state_dict(resumed.state.pop("average"))
        average.shadow_params = list(map(sharding.shard_like, average.shadow_params, parameters))
    return average


def average_state(average: Average, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """What going on takes where a checkpoint's adapter is an average. On all processes, which may hold parts of it."""
    shadows = {"shadow_params": sharding.gather_to_cpu(average.shadow_params)}
    return {"parameters": sharding.gather_to_cpu(parameters), "average": average.state_dict() | shadows}


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Python's, numpy's and torch's own generators, which nothing here draws from but a reward of the user's may.

    A function of the step, so that a resumed run draws what it would have drawn.
    """
    set_seed(noise_seed(seed, step, f"process {rank}") % 2**32)
