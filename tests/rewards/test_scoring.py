"""Several rewards at a time: the sum, what is only measured, what is refused."""

import pytest
import torch

from rewardfl import config
from rewardfl.rewards import Reward, RewardError, RewardOutput, build_terms, registry, resolve_rewards
from rewardfl.rewards.scoring import Term, score_terms

OWN = f"{__file__}:Brightness"  # a user's own class in a file
BASE = {
    "run": {"output_dir": "out"}, "model": {"model_paths": "m"}, "lora": {}, "data": {"file_name": "d.csv"},
    "sample": {}, "train": {},
}  # fmt: skip
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


def total(terms, judged):
    """What train_reward_fl.py trains on; test_train_rewards.py compares its loss."""
    pairs = [(term, one.output) for term, one in zip(terms, judged, strict=True) if term.weight > 0]
    return sum(term.weight * (output.score - term.mean) / term.std * output.valid for term, output in pairs)


def terms():
    return [
        Term(key="reward.name", label="score", reward=Brightness(), weight=0.5, mean=0.1, std=2.0),
        Term(key="reward.others.square", label="square", reward=Brightness(2), weight=3.0, mean=0.0, std=1.0),
        Term(key="reward.others.cube", label="cube", reward=Brightness(3), weight=0.0, mean=0.0, std=1.0),
    ]


def test_the_sum_and_its_gradient():
    video = VIDEO.clone().requires_grad_()
    judged = score_terms(terms(), video, [({}, {}, {})] * 3)
    means = [(VIDEO**power).flatten(1).mean(1) for power in (1, 2, 3)]
    for one, mean in zip(judged, means, strict=True):
        torch.testing.assert_close(one.output.score.detach(), mean)
    gained = total(terms(), judged)
    torch.testing.assert_close(gained.detach(), 0.5 * (means[0] - 0.1) / 2 + 3 * means[1])
    (gradient,) = torch.autograd.grad(gained.sum(), video)
    torch.testing.assert_close(gradient, (0.25 + 6 * VIDEO) / VIDEO[0].numel())
    assert not judged[2].output.score.requires_grad  # measured without a graph


class Raises(Brightness):
    def forward(self, video, batch):
        raise OSError("nobody is there")


def test_a_reward_that_only_measures_costs_nothing_but_its_own_numbers():
    def of(weight):
        return [
            terms()[0],
            Term(key="reward.others.far", label="far", reward=Raises(), weight=weight, mean=0.0, std=1.0),
        ]

    video = VIDEO.clone().requires_grad_()
    first, far = score_terms(of(0.0), video, [({}, {})] * 3)
    assert first.output.score.requires_grad and not first.failed.any()
    assert far.failed.all() and not far.output.valid.any() and far.problems == ("OSError: nobody is there",) * 3
    torch.testing.assert_close(total(of(0.0), [first, far]), total(of(0.0)[:1], [first]))
    with pytest.raises(OSError, match="nobody is there"):  # one that is trained on is never missed silently
        score_terms(of(0.1), video, [({}, {})] * 3)


def test_a_sample_that_one_reward_cannot_score_is_scored_by_the_others():
    video = VIDEO.clone().requires_grad_()
    gained = total(terms(), score_terms(terms(), video, [({}, {}, {}), (None, {}, {}), ({}, None, {})]))
    (gradient,) = torch.autograd.grad(gained.sum(), video)
    count = VIDEO[0].numel()
    torch.testing.assert_close(gradient[1], 6 * VIDEO[1] / count)
    torch.testing.assert_close(gradient[2], torch.full_like(VIDEO[2], 0.25 / count))


def test_what_cannot_be_trained_is_refused():
    class Blind(Brightness):
        differentiable = False

    def wanted(weight):
        return config.RewardSpec(key="reward.others.x", label="x", name="blind", settings={}, weight=weight)

    with pytest.raises(RewardError, match="reward.others.x: blind has no gradient.*measure it .weight 0."):
        registry.check_trainable([(wanted(0.1), Blind)])
    with pytest.raises(RewardError, match="nothing is trained"):
        registry.check_trainable([(wanted(0), Blind)])
    registry.check_trainable([(wanted(1), Brightness), (wanted(0), Blind)])


@pytest.mark.usefixtures("trusts_code")
def test_terms_of_a_configuration():
    others = {"square": {"name": OWN, "weight": 2, "std": 4, "settings": {"power": 2}}}
    reward = {"name": OWN, "reward_weight": 0.3, "reward_mean": 0.2, "reward_std": 0.1, "others": others}
    wanted = config.list_reward_specs(config.parse(BASE | {"reward": reward}))
    built = build_terms(resolve_rewards(wanted), torch.device("cpu"))
    assert [(term.label, term.weight, term.mean, term.std, term.reward.power) for term in built] == [
        ("score", 0.3, 0.2, 0.1, 1), ("square", 2.0, 0.0, 4.0, 2),
    ]  # fmt: skip
    clips = {"reward": {"name": OWN, "reward_weight": 0, "kl_weight": 0}, "anchor": {"weight": 1}}
    supervised = config.parse(BASE | clips)  # it scores nothing, but its pictures can be judged
    assert config.list_reward_specs(supervised) == []
    assert [spec.label for spec in config.list_reward_specs(supervised, for_evaluation=True)] == ["score"]
    face = config.parse(BASE | {"reward": {"reward_model_path": "a", "held_out_model_path": "b", "cap": 0.5}})
    own, judge = config.list_reward_specs(face)
    who = {"people": "largest", "min_face_size": 0}
    assert own.settings == {
        "pack_dir": "a", "cap": 0.5, "det_size": 640, "chunk": 8, "second_pack_dir": None,
    } | who and own.weight == 0.1  # fmt: skip
    assert who.items() <= judge.settings.items() and "second_pack_dir" not in judge.settings
    assert judge.settings["pack_dir"] == "b" and judge.settings["cap"] == "none" and judge.weight == 0
    others["square"]["settings"] = {"powr": 2}
    with pytest.raises(RewardError, match=r"unknown key 'reward.others.square.settings.powr'"):
        resolve_rewards(config.list_reward_specs(config.parse(BASE | {"reward": reward})))
    for change, message in [
        ({"name": "face_identity"}, "reward.reward_model_path is required for face_identity"),
        ({"name": "face_identity", "reward_model_path": "a", "settings": {"x": 1}}, "face_identity takes none"),
        ({"others": {"x": {"weight": 1}}}, "reward.others.x.name is required"),
        ({"others": {"x": {"name": "b", "wight": 1}}}, "unknown key 'reward.others.x.wight', did you mean 'weight'"),
        ({"others": ["x"]}, "reward.others must be keys and values"),
    ]:
        with pytest.raises(config.ConfigError, match=message):
            config.parse(BASE | {"reward": reward | change})


def test_motion_beside_the_face():
    """motion_weight of reward feedback learning is a term of its own; 0 is none."""
    red = {"name": "clip_score", "weight": 0.1}
    face = {"reward_model_path": "a", "held_out_model_path": "b", "det_size": 128, "recogniser_chunk": 3}

    def wanted(**reward):
        return config.list_reward_specs(config.parse(BASE | {"reward": face | reward}))

    assert [one.label for one in wanted(others={"red": red})] == ["score", "held_out", "red"]
    _, _, motion, _ = wanted(others={"red": red}, motion_weight=0.2)
    settings = {"pack_dir": "a", "det_size": 128, "chunk": 3}
    assert motion == config.RewardSpec(
        key="reward.motion_weight", label="face_motion", name="face_motion", settings=settings, weight=0.2
    )
    assert len(wanted(others={"face_motion": red})) == 3
    for change, key in [
        ({"others": {"face_motion": red}}, "reward.others.face_motion"),
        ({"name": "clip_score"}, "reward.motion_weight"),
    ]:
        with pytest.raises(config.ConfigError, match=f"^{key}"):
            wanted(motion_weight=0.2, **change)


def test_labels():
    for label in ("mean", "score", "held_out", "motion", "failed", "score_std", "red_std"):  # another metric's name
        with pytest.raises(config.ConfigError, match=f"^reward.others.{label}: "):
            config.parse(with_others("red", label))
    for label in ("", "a b", "a/b", "a.b", "line\n", "a\x1b[31m"):  # no piece of a key
        with pytest.raises(config.ConfigError, match="^reward.others.* must be a name of 1 to 80 letters") as error:
            config.parse(with_others(label))
        assert repr(label) in str(error.value) and str(error.value).isprintable()
    for label in ("kl", "total", "std", "rot-grün_2"):
        (_, term) = config.list_reward_specs(config.parse(with_others(label)))
        assert (term.label, term.key) == (label, f"reward.others.{label}")


def with_others(*labels):
    others = {label: {"name": "clip_score"} for label in labels}
    return BASE | {"reward": {"name": "clip_score", "others": others}}


def test_settings_of_faces_are_refused_where_nothing_reads_them():
    settings = {"second_model_path": "c", "people": "all", "min_face_size": 30.0}
    face = {"reward_model_path": "a", "held_out_model_path": "b"}
    own, judge = config.list_reward_specs(config.parse(BASE | {"reward": face | settings}))
    assert (own.settings["people"], own.settings["min_face_size"]) == ("all", 30)
    assert (judge.settings["people"], judge.settings["min_face_size"]) == ("all", 30)
    assert own.settings["second_pack_dir"] == "c"
    for key, value in settings.items():
        with pytest.raises(config.ConfigError, match=f"^reward.{key} "):
            config.parse(BASE | {"reward": {"name": "clip_score", key: value}})
    judged = config.parse(BASE | {"reward": {"name": "clip_score", "held_out_model_path": "b", "people": "all"}})
    assert config.list_reward_specs(judged)[1].settings["people"] == "all"
    for key, value in (("people", "both"), ("min_face_size", -1.0)):
        with pytest.raises(config.ConfigError, match=f"^reward.{key} "):
            config.parse(BASE | {"reward": face | {key: value}})
