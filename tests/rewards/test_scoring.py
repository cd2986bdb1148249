"""Several rewards: their weighted sum, rewards that only measure, and the configuration's keys for them."""

import pytest
import torch

from rewardfl import config
from rewardfl.rewards import Reward, RewardError, RewardOutput, build_terms, registry, resolve_rewards
from rewardfl.rewards.scoring import Term, score_terms

USERS_CLASS = f"{__file__}:Brightness"
BASE = {
    "run": {"output_dir": "out"}, "model": {"model_paths": "m"}, "lora": {}, "data": {"file_name": "d.csv"},
    "sample": {}, "train": {},
}  # fmt: skip
FACE = {"reward_model_path": "a", "held_out_model_path": "b"}
VIDEO = torch.rand(3, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1


class Brightness(Reward):
    """Mean of a power of the video; the sample whose reference is None is not valid."""

    name, differentiable = "brightness", True

    def __init__(self, power: int = 1):
        super().__init__()
        self.power = power

    def forward(self, video, batch):
        valid = torch.tensor([reference is not None for reference in batch])
        return RewardOutput((video**self.power).flatten(1).mean(1) * valid, valid, {})


class Raises(Brightness):
    def forward(self, video, batch):
        raise OSError("no server")


def make_term(reward, weight, mean=0.0, std=1.0):
    return Term(key="reward.terms.x", label="x", reward=reward, weight=weight, mean=mean, std=std)


def make_terms():
    return [make_term(Brightness(), 0.5, 0.1, 2.0), make_term(Brightness(2), 3.0), make_term(Brightness(3), 0.0)]


def weighted_sum(terms, results):
    """Return what train_reward_fl.py trains on; test_train_rewards.py compares its loss."""
    pairs = [(term, result.output) for term, result in zip(terms, results, strict=True) if term.weight > 0]
    return sum(term.weight * (output.score - term.mean) / term.std * output.valid for term, output in pairs)


def test_the_weighted_sum_has_its_gradient():
    video = VIDEO.clone().requires_grad_()
    results = score_terms(make_terms(), video, [({}, {}, {})] * 3)
    means = [(VIDEO**power).flatten(1).mean(1) for power in (1, 2, 3)]
    for result, mean in zip(results, means, strict=True):
        torch.testing.assert_close(result.output.score.detach(), mean)
    total = weighted_sum(make_terms(), results)
    torch.testing.assert_close(total.detach(), 0.5 * (means[0] - 0.1) / 2 + 3 * means[1])
    (gradient,) = torch.autograd.grad(total.sum(), video)
    torch.testing.assert_close(gradient, (0.25 + 6 * VIDEO) / VIDEO[0].numel())
    assert not results[2].output.score.requires_grad  # measured without a graph


def test_only_a_trained_reward_may_raise():
    terms = [make_terms()[0], make_term(Raises(), 0.0)]
    video = VIDEO.clone().requires_grad_()
    first, failed = score_terms(terms, video, [({}, {})] * 3)
    assert first.output.score.requires_grad and not first.failed.any()
    assert failed.failed.all() and not failed.output.valid.any() and failed.problems == ("OSError: no server",) * 3
    torch.testing.assert_close(weighted_sum(terms, [first, failed]), weighted_sum(terms[:1], [first]))
    with pytest.raises(OSError, match="no server"):
        score_terms([terms[0], make_term(Raises(), 0.1)], video, [({}, {})] * 3)


def test_an_invalid_sample_keeps_the_other_rewards():
    video = VIDEO.clone().requires_grad_()
    results = score_terms(make_terms(), video, [({}, {}, {}), (None, {}, {}), ({}, None, {})])
    (gradient,) = torch.autograd.grad(weighted_sum(make_terms(), results).sum(), video)
    expected = torch.stack([0.25 + 6 * VIDEO[0], 6 * VIDEO[1], torch.full_like(VIDEO[2], 0.25)]) / VIDEO[0].numel()
    torch.testing.assert_close(gradient, expected)


def test_rewards_that_cannot_be_trained_are_refused():
    class Blind(Brightness):
        differentiable = False

    weighted, measured = (
        config.RewardSpec(key="reward.terms.x", label="x", name="blind", settings={}, weight=weight)
        for weight in (1, 0)
    )
    with pytest.raises(RewardError, match="reward.terms.x: blind has no gradient.*measure it .weight 0."):
        registry.check_trainable([(weighted, Blind)])
    with pytest.raises(RewardError, match="nothing is trained"):
        registry.check_trainable([(measured, Blind)])
    registry.check_trainable([(weighted, Brightness), (measured, Blind)])


def list_specs(reward, **options):
    return config.list_reward_specs(config.parse(BASE | {"reward": reward}), **options)


@pytest.mark.usefixtures("trusts_code")
def test_terms_are_built_from_a_configuration():
    others = {"square": {"name": USERS_CLASS, "weight": 2, "std": 4, "settings": {"power": 2}}}
    reward = {"name": USERS_CLASS, "reward_weight": 0.3, "reward_mean": 0.2, "reward_std": 0.1, "others": others}
    terms = build_terms(resolve_rewards(list_specs(reward)), torch.device("cpu"))
    assert [(term.label, term.weight, term.mean, term.std, term.reward.power) for term in terms] == [
        ("score", 0.3, 0.2, 0.1, 1), ("square", 2.0, 0.0, 4.0, 2),
    ]  # fmt: skip
    clips = {"reward": {"name": USERS_CLASS, "reward_weight": 0, "kl_weight": 0}, "anchor": {"weight": 1}}
    supervised = config.parse(BASE | clips)  # it scores nothing, but its pictures can be judged
    assert config.list_reward_specs(supervised) == []
    assert [spec.label for spec in config.list_reward_specs(supervised, for_evaluation=True)] == ["score"]
    others["square"]["settings"] = {"powr": 2}
    with pytest.raises(RewardError, match=r"unknown key 'reward.terms.square.settings.powr'"):
        resolve_rewards(list_specs(reward))


def test_keys_of_faces_are_settings_of_both_recognisers():
    reward, judge = list_specs(FACE | {"cap": 0.5, "second_model_path": "c", "people": "all", "min_face_size": 30.0})
    people = {"people": "all", "min_face_size": 30}
    assert reward.settings == people | {"pack_dir": "a", "cap": 0.5, "det_size": 640, "second_pack_dir": "c"}
    assert judge.settings.items() >= (people | {"pack_dir": "b", "cap": "none"}).items()
    assert "second_pack_dir" not in judge.settings and (reward.weight, judge.weight) == (0.1, 0)


def test_face_motion_takes_the_face_pack_of_the_section():
    clip, face = {"name": "clip_score", "weight": 0.1}, FACE | {"det_size": 128}
    assert [spec.label for spec in list_specs(face | {"others": {"clip": clip}})] == ["score", "held_out", "clip"]
    _, _, motion, _ = list_specs(face | {"others": {"clip": clip}, "motion_weight": 0.2})
    assert motion == config.RewardSpec(
        key="reward.terms.face_motion", label="face_motion", name="face_motion", weight=0.2,
        settings={"pack_dir": "a", "det_size": 128},
    )  # fmt: skip


CLIP = {"name": "clip_score"}


@pytest.mark.parametrize(
    "reward, message",
    [
        ({"name": "face_identity"}, "reward.reward_model_path is required for face_identity"),
        (FACE | {"settings": {"x": 1}}, "reward.terms.score.settings.*face_identity takes none"),
        (CLIP | {"others": {"x": CLIP | {"wight": 1}}}, "unknown key 'reward.terms.x.wight', did you mean 'weight'"),
        (CLIP | {"second_model_path": "c"}, "^reward.second_model_path "),
        (CLIP | {"people": "all"}, "^reward.people "),
    ],
)
def test_wrong_keys_of_rewards_are_refused(reward, message):
    with pytest.raises(config.ConfigError, match=message):
        list_specs(reward)


@pytest.mark.parametrize("label", ["mean", "score_std", "red_std", "", "a/b", "a.b", "line\n", "a\x1b[31m"])
def test_labels_that_are_no_metric_names_or_taken_are_refused(label):
    with pytest.raises(config.ConfigError, match="^reward.terms") as error:
        list_specs(CLIP | {"others": {"red": CLIP, label: CLIP}})
    assert str(error.value).isprintable()
    (_, term) = list_specs(CLIP | {"others": {"rot-grün_2": CLIP}})
    assert (term.label, term.key) == ("rot-grün_2", "reward.terms.rot-grün_2")
