"""Policy, optimizer, learning-rate schedule and weight average, fresh or restored from a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rewardfl import forward_rl
from rewardfl.backbones.protocol import Backbone, Experts
from rewardfl.config import GrpoTrainConfig
from rewardfl.config.schema import ForwardConfig
from rewardfl.memory import sharding
from rewardfl.noise import noise_seed
from rewardfl.optim import Average, OldPolicy, learning_rate_factor
from rewardfl.training import invariants
from rewardfl.training.distributed import Distributed
from rewardfl.training.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The trained model with its optimizer and learning-rate schedule."""

    policy: nn.Module  # the experts as accelerate wraps them
    parameters: list[nn.Parameter]
    optimizer: AcceleratedOptimizer
    scheduler: LambdaLR
    trained: Mapping[str, nn.Module]  # the trained experts by name
    weights: invariants.Weights


def make_learner(
    train: GrpoTrainConfig,
    job: Distributed,
    backbone: Backbone,
    model: Experts,
    trained: Mapping[str, nn.Module],
    steps: int,
    restored: TrainState | None,
) -> Learner:
    """Build AdamW and its schedule over the loaded adapters, or restore them. steps: the run's total."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
    # a plain scheduler: accelerate's steps once per process
    scheduler = LambdaLR(optimizer, learning_rate_factor(train.lr_scheduler_type, train.warmup_steps, steps))
    invariants.check_loaded(job.accelerator, model)
    policy, optimizer, parameters = job.prepare(model, optimizer, backbone.block_classes)
    watched = invariants.Weights(job.accelerator, model)
    if restored is not None:
        job.load_optimizer_state(optimizer, parameters, restored.optimizer)
        load_schedule(scheduler, restored.scheduler, train)
    return Learner(
        policy=policy, parameters=parameters, optimizer=optimizer, scheduler=scheduler, trained=trained, weights=watched
    )


def load_schedule(scheduler: LambdaLR, state: dict[str, Any], train: GrpoTrainConfig) -> None:
    """Restore a scheduler's state_dict, with the configuration's learning rate and weight decay, which may be new."""
    step = state["last_epoch"]
    rates = [train.learning_rate * factor(step) for factor in scheduler.lr_lambdas]
    scheduler.load_state_dict(state | {"base_lrs": [train.learning_rate] * len(rates), "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group |= {"initial_lr": train.learning_rate, "lr": rate, "weight_decay": train.weight_decay}


def make_average(decay: float, parameters: Sequence[nn.Parameter], restored: TrainState | None) -> Average:
    """Build the moving average of the parameters, and restore it when resuming. decay: after a warm-up from 0.1."""
    average = Average(parameters, decay=decay)
    if restored is not None:
        average.load_state_dict(restored.average)
        average.shadow_params = list(map(sharding.shard_like, average.shadow_params, parameters))
    return average


def make_old_policy(
    forward: ForwardConfig, largest: float, parameters: Sequence[nn.Parameter], restored: TrainState | None
) -> OldPolicy:
    """Build the old policy of forward-process reinforcement, or restore it. largest: of forward_rl.old_decay."""
    start, rate = forward.old_policy.start, forward.old_policy.rate
    old = OldPolicy(parameters, partial(forward_rl.old_decay, start=start, rate=rate, largest=largest))
    if restored is not None and restored.old_policy is not None:
        old.shadow_params = list(map(sharding.shard_like, restored.old_policy, parameters))
    return old


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators for user rewards by step, so that a resumed run agrees."""
    set_seed(noise_seed(seed, step, f"process {rank}") % 2**32)
