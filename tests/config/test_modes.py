"""A word that the schema has and the code has no branch for raises: it does not train what another word means."""

import ast
import inspect
from types import SimpleNamespace as Record
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import train_forward_rl
from rewardfl import config, flow, forward_rl, group_plan, grpo, reward_flow
from rewardfl.backbones.protocol import Schedule, Velocity
from rewardfl.backbones.wan import load
from rewardfl.backbones.wan.backbone import DTYPES
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.config import SECTIONS
from rewardfl.memory import offload
from rewardfl.optim import learning_rate_factor
from rewardfl.rewards.face.reward import FaceIdentityReward
from rewardfl.training import plan, setup_rewards
from rewardfl.training.anchors import Anchors
from rewardfl.windows import Windows, draw_window

WORD: Any = "new"
CPU, X, ONE = torch.device("cpu"), torch.zeros(2, 1, 1, 2, 2), torch.ones(2)
SCHEDULE = Schedule(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1000.0, 500.0]), ("high", "high"))
BACKBONE = Record(velocity=lambda *arguments: X)
STEP = Record(log_prob=ONE, mean=X, std=1.0)
GEOMETRY = Record(forwards_per_update=1, forwards=1, world=1, batch=1, spread=WORD)


def train_by(word):
    """Call the loss of train_forward_rl.py, a function within its `train`, with an objective."""
    tree = ast.parse(inspect.getsource(train_forward_rl))
    (loss,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "policy_loss")
    names = vars(train_forward_rl) | {"forward": Record(objective=word), "plan": Record(advantage_scale=1.0)}
    exec(compile(ast.Module([loss], []), "policy_loss", "exec"), names)
    return names["policy_loss"](Record(old=X), X, ONE)


CONSUMERS = {
    "model.distill_lora_mode": lambda word: load.load_pipeline(Record(variant=None), {}, torch.float32, (), word),
    "model.dtype": lambda word: DTYPES[word],
    "experts.trained": lambda word: offload.move_expert(torch.nn.Linear(1, 1), word, CPU, ()),
    "experts.untrained": lambda word: offload.move_expert(torch.nn.Linear(1, 1), word, CPU, ()),
    "sample.gradient_mode": lambda word: config.resolve_coupling(
        Record(sample=Record(gradient_mode=word, coupling=None))
    ),
    "sample.guidance_gradient": lambda word: Velocity(
        backbone=BACKBONE,
        model=None,
        conditioning={},
        schedule=SCHEDULE,
        negative={},
        guidance=2.0,
        guidance_gradient=word,
    )(X, 0),
    "reward.motion_reference": lambda word: setup_rewards.takes_base_motion(
        Record(reward=Record(motion_reference=word)), Record(offers=())
    ),
    "reward.people": lambda word: FaceIdentityReward.part_names.fget(Record(people=word)),
    "reward.kl_gradient": lambda word: reward_flow.replay(
        None, None, SCHEDULE.sigmas, (0,), X, 1.0, kl_gradient=word, backward=torch.Tensor.backward
    ),
    "anchor.sigmas": lambda word: plan.anchor_steps(Record(anchor=Record(sigmas=word)), SCHEDULE, ["high"]),
    "anchor.target": lambda word: Anchors._draw(
        Record(settings=Record(target=word), backbone=BACKBONE, device=CPU), None, {}, SCHEDULE, [0, 1], X
    ),
    "train.lr_scheduler_type": lambda word: learning_rate_factor(word, 0, 1),
    "train.decode_caches": lambda word: WanDecoder.decode_with_caches(Record(_whole=lambda x, given: x), X, None, word),
    "train.active_graphs": lambda word: offload.graph_context(word, CPU),
    "grpo.spread": lambda word: group_plan.positions(GEOMETRY, 0),
    "grpo.advantage_std": lambda word: grpo.advantages(ONE, torch.zeros(2), group_size=2, std=word),
    "grpo.advantage_of": lambda word: grpo.advantages(ONE, torch.zeros(2), group_size=2, combine=word),
    "grpo.sde": lambda word: flow.coefficients(word, 1.0, 0.5, 0.5, 0.9),
    "grpo.window": lambda word: draw_window(Windows(kind=word, usable=(0, 1)), 0, 0),
    "grpo.objective": lambda word: grpo.log_ratio(word, ONE, X, STEP),
    "forward.objective": train_by,
    "forward.sigmas": lambda word: plan.drawn_steps(Record(forward=Record(sigmas=word)), SCHEDULE, ["high"]),
    "forward.weighting": lambda word: forward_rl.awm_log_prob(X, X, ONE, word),
}
# the same consumer, a dictionary in the scripts' first lines, accelerate's own check, a number or list instead
OTHERS = {"forward.spread", "forward.advantage_std", "forward.advantage_of", "forward.samples_on", "grpo.samples_on"}
OTHERS |= {"run.log_with", "reward.cap", "reward.kl_steps", "sample.noises_per_sample"}


def words(kind):
    """Return the texts of a type's Literals."""
    inner = [word for argument in get_args(kind) if not isinstance(argument, str) for word in words(argument)]
    return [word for word in get_args(kind) if isinstance(word, str)] if get_origin(kind) is Literal else inner


def test_every_choice_of_the_schema_has_a_row_above():
    fields = {
        f"{section}.{key}": field.annotation
        for sections in SECTIONS.values()
        for section, kind in sections.items()
        for key, field in kind.model_fields.items()
    }
    assert {key for key, kind in fields.items() if words(kind)} == CONSUMERS.keys() | OTHERS


@pytest.mark.parametrize("key", CONSUMERS)
def test_a_word_without_a_branch_raises(monkeypatch, key):
    monkeypatch.setattr(grpo, "AdvantageStd", Literal[*get_args(grpo.AdvantageStd), WORD])
    monkeypatch.setattr(flow, "_KINDS", (*flow._KINDS, WORD))
    with pytest.raises((AssertionError, KeyError, ValueError), match=WORD):
        CONSUMERS[key](WORD)
