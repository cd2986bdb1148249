"""A word that the schema has and the code has no branch for raises: it does not train what another word means."""

import ast
import inspect
from types import SimpleNamespace as Record
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import train_forward_rl
from rewardfl import flow, forward_rl, grpo, reward_flow
from rewardfl.backbones.protocol import Schedule, Velocity
from rewardfl.backbones.wan import load
from rewardfl.backbones.wan.backbone import DTYPES
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.config import SECTIONS
from rewardfl.config.schema import SampleConfig, Section
from rewardfl.memory import offload
from rewardfl.optim import learning_rate_factor
from rewardfl.rewards.face.reward import FaceIdentityReward
from rewardfl.training import plan, setup_rewards
from rewardfl.training.anchors import Anchors

WORD: Any = "new"
CPU, X, ONE = torch.device("cpu"), torch.zeros(2, 1, 1, 2, 2), torch.ones(2)
SCHEDULE = Schedule(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([1000.0, 500.0]), ("high", "high"))
BACKBONE = Record(velocity=lambda *arguments: X)
STEP = Record(log_prob=ONE, mean=X, std=1.0)


def train_by(word):
    """Call the loss of train_forward_rl.py, a function within its `train`, with an objective."""
    tree = ast.parse(inspect.getsource(train_forward_rl))
    (loss,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "policy_loss")
    names = vars(train_forward_rl) | {"forward": Record(objective=word), "plan": Record(advantage_scale=1.0)}
    exec(compile(ast.Module([loss], []), "policy_loss", "exec"), names)
    return names["policy_loss"](Record(old=X, advantage=ONE), X)


CONSUMERS = {
    "model.distill_lora.mode": lambda word: load.load_pipeline(Record(variant=None), {}, torch.float32, (), word),
    "model.dtype": lambda word: DTYPES[word],
    "train.memory.trained": lambda word: offload.move_expert(torch.nn.Linear(1, 1), word, CPU, ()),
    "train.memory.untrained": lambda word: offload.move_expert(torch.nn.Linear(1, 1), word, CPU, ()),
    "sample.gradient_mode": lambda word: SampleConfig.coupling.fget(Record(gradient_mode=word)),
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
        Record(reward=Record(motion_reference=word)), Record(offers=(), rejected=None)
    ),
    "reward.people": lambda word: FaceIdentityReward.part_names.fget(Record(people=word)),
    "reward.kl_gradient": lambda word: reward_flow.replay(
        None, None, SCHEDULE.sigmas, (0,), X, 1.0, kl_gradient=word, backward=torch.Tensor.backward
    ),
    "anchor.sigmas": lambda word: plan.anchor_steps(Record(sigmas=word), SCHEDULE, ["high"], ()),
    "anchor.target": lambda word: Anchors._draw(
        Record(plan=Record(anchor=Record(target=word)), conditions=Record(backbone=BACKBONE), device=CPU),
        None,
        {},
        SCHEDULE,
        [0, 1],
        X,
    ),
    "train.lr_scheduler_type": lambda word: learning_rate_factor(word, 0, 1),
    "train.memory.decode_caches": lambda word: WanDecoder.decode_with_caches(
        Record(_whole=lambda x, given: x), X, None, word
    ),
    "train.memory.active_graphs": lambda word: offload.graph_context(word, CPU),
    "grpo.advantage.std": lambda word: grpo.advantages(ONE, torch.zeros(2), group_size=2, std=word),
    "grpo.advantage.of": lambda word: grpo.advantages(ONE, torch.zeros(2), group_size=2, combine=word),
    "grpo.sde": lambda word: flow.coefficients(word, 1.0, 0.5, 0.5, 0.9),
    "grpo.objective": lambda word: grpo.log_ratio(word, ONE, X, STEP),
    "forward.objective": train_by,
    "forward.sigmas": lambda word: plan.drawn_steps(Record(forward=Record(sigmas=word)), SCHEDULE, ["high"]),
    "forward.weighting": lambda word: forward_rl.awm_log_prob(X, X, ONE, word),
}
# the same consumer, a dictionary in the scripts' first lines, accelerate's own check, a number or list instead
OTHERS = {"forward.advantage.std", "forward.advantage.of", "train.memory.samples_on", "train.memory.preset"}
OTHERS |= {"run.log_with", "reward.cap", "reward.kl_steps", "sample.noises_per_sample"}


def words(annotation):
    """Return the texts of a type's Literals."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for argument in get_args(annotation) for word in words(argument)]


def flat(sections):
    """Return {section.key: type}, those of nested sections included."""
    fields = {
        f"{name}.{key}": field.annotation
        for name, section in sections.items()
        for key, field in section.model_fields.items()
    }
    nested = {key: field for key, field in fields.items() if isinstance(field, type) and issubclass(field, Section)}
    return fields | flat(nested) if nested else fields


def test_every_choice_of_the_schema_has_a_row_above():
    fields = {key: field for sections in SECTIONS.values() for key, field in flat(sections).items()}
    assert {key for key, field in fields.items() if words(field)} == CONSUMERS.keys() | OTHERS


@pytest.mark.parametrize("key", CONSUMERS)
def test_a_word_without_a_branch_raises(key):
    with pytest.raises((AssertionError, KeyError, ValueError), match=WORD):
        CONSUMERS[key](WORD)
