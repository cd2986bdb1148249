"""Rewards by name, users' classes, the contract of their output, and the command line."""

import csv
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from rewardfl import data, rewards
from rewardfl.rewards import REWARDS, Reward, RewardOutput, __main__, find_reward
from rewardfl.rewards.base import attach_checks
from rewardfl.rewards.settings import parse_settings

VIDEO = 1.8 * torch.rand(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0)) - 0.9
pytestmark = pytest.mark.usefixtures("trusts_code")
EXAMPLE, COLOUR = ROOT / "examples" / "my_reward.py", f"{ROOT}/examples/toys.py:Colour"


def test_every_reward_has_its_attributes():
    for name in REWARDS:
        cls = find_reward(name)
        assert cls.name == name and issubclass(cls, Reward) and cls.__doc__
        assert cls.range and cls.licence and isinstance(cls.differentiable, bool)
    without_gradient = [name for name in REWARDS if not find_reward(name).differentiable]
    assert without_gradient == ["face_judge", "ocr", "remote"]
    with_prompt = {"clip_score", "hpsv2", "hpsv3", "ocr", "pickscore", "remote", "video_align"}
    assert {name for name in REWARDS if find_reward(name).uses_prompt} == with_prompt


@pytest.mark.long
def test_transformers_is_imported_on_use():
    code = (
        "import sys; from rewardfl.rewards import build; build('motion', {}); sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("asthetic", {}, "'asthetic' is not a reward, did you mean 'aesthetic'?; choose from aesthetic, "),
        (COLOUR, {"rd": 1}, "unknown key 'settings.rd', did you mean 'red'?; it takes red, green, blue, "),
        ("motion", {"chunk": 1}, "unknown key 'settings.chunk'; it takes none"),
        ("aesthetic", {"head": "x"}, "settings.model_dir is required"),
        ("nowhere.py:Mine", {}, "reward 'nowhere.py:Mine' cannot be imported ([Errno 2] No such file"),
        (
            "nowhere:Mine",
            {},
            "reward 'nowhere:Mine' cannot be imported (No module named 'nowhere'); install the missing",
        ),
        (
            "rewardfl.rewards.base:Rewards",
            {},
            "is not a subclass of rewardfl.rewards.Reward with",
        ),
    ],
)
def test_wrong_names_and_settings_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        rewards.build(name, settings)


def test_an_empty_setting_is_an_empty_text():
    assert parse_settings(["token_env=", "frames=4", "a=b=c"]) == {"token_env": "", "frames": 4, "a": "b=c"}


def test_the_example_is_a_reward(monkeypatch):
    built = rewards.build(f"{EXAMPLE}:Contrast", {"target": 0.25})
    assert built.target == 0.25 and built.fingerprint() == {"name": "my_contrast"}
    video = torch.cat([VIDEO, torch.zeros_like(VIDEO[:1])]).requires_grad_()
    output = built(video, [built.reference(VIDEO[0], "a prompt"), {}, {}])
    grey = video.detach()[:, :, 1:].mean(1).flatten(1)
    assert output.valid.tolist() == [True, True, False]
    torch.testing.assert_close(output.score, grey.std(1) / 0.25)
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    assert "nonfinite" in output.parts  # build attaches the checks
    assert gradient.isfinite().all() and (gradient[2] == 0).all() and (gradient[:2, :, 1:] != 0).all()
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    assert rewards.build("my_reward:Contrast", {}).target == 0.5


def reward_that_returns(make, *, has_gradient=True):
    class Custom(Reward):
        name = "custom"
        differentiable = has_gradient

        def forward(self, video, batch):
            return make(video)

    return attach_checks(Custom())


def plain(video):
    return video.mean((1, 2, 3, 4))


YES = torch.tensor([True, True])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda v: plain(v), "must return a RewardOutput, it returned a Tensor"),
        (lambda v: RewardOutput(plain(v).tolist(), YES, {}), "score must be a tensor of .* got a list"),
        (lambda v: RewardOutput(plain(v), YES.float(), {}), "score must be floating point, valid bool"),
        (lambda v: RewardOutput(plain(v), YES, {"a": v}), r"parts\['a'\] must be a tensor of .* got shape \(2, 3"),
        (lambda v: RewardOutput(plain(v), YES, {"a/b": torch.ones(2)}), r"parts\['a/b'\] is not a name for a metric"),
        (lambda v: RewardOutput(plain(v).detach(), YES, {}), "says that it is differentiable, but its score has no"),
    ],
)
def test_wrong_outputs_name_the_class(make, message):
    with pytest.raises(ValueError, match=rf"reward .*Custom.*{message}"):
        reward_that_returns(make)(VIDEO.clone().requires_grad_(), [{}, {}])


def test_a_score_without_need_of_a_gradient_passes():
    def detached(video):
        return RewardOutput(plain(video).detach(), YES, {})

    video = VIDEO.clone().requires_grad_()
    reward_that_returns(detached, has_gradient=False)(video, [{}, {}])
    reward_that_returns(detached)(VIDEO, [{}, {}])
    reward_that_returns(lambda v: RewardOutput(torch.zeros(2), ~YES, {}))(video, [{}, {}])


@pytest.mark.parametrize("bad", [math.nan, 5.0], ids=["nan", "invalid"])
def test_invalid_samples_have_no_score_and_gradient(bad):
    def make(video):
        valid, counted = torch.tensor([bad != 5, True]), torch.tensor([math.nan, 1.0])  # by a server
        return RewardOutput(plain(video) * torch.tensor([bad, 1.0]), valid, {"nonfinite": counted})

    video = VIDEO.clone().requires_grad_()
    output = reward_that_returns(make)(video, [{}, {}])
    assert output.valid.tolist() == [False, True] and output.score[0] == 0 and output.score[1] != 0
    assert output.parts["nonfinite"].tolist() == [bad != 5, 1]
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    assert gradient.isfinite().all() and (gradient[0] == 0).all() and (gradient[1] != 0).all()


def test_other_gradients_to_the_video_stay():
    video = VIDEO.clone().requires_grad_()
    output = reward_that_returns(lambda v: RewardOutput(plain(v) * math.nan, YES, {}))(video, [{}, {}])
    (gradient,) = torch.autograd.grad(output.score.sum() + video.sum(), video)
    assert torch.equal(gradient, torch.ones_like(video))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    torch.manual_seed(0)
    moving = torch.nn.functional.interpolate(torch.rand(3, 5, 4, 4) * 2 - 1, (32, 32), mode="bilinear")
    data.write_video(folder / "moving.mp4", moving, fps=8)
    data.write_video(folder / "still.mp4", moving[:, :1].expand(-1, 5, -1, -1), fps=8)
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("video", "prompt"), ("moving.mp4", "a child"), ("still.mp4", "a stone")])
    (folder / "made").mkdir()
    data.write_video(folder / "made" / "moving.mp4", 0.5 * moving, fps=8)
    return folder


def call(capsys, *arguments):
    code = __main__.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_lists_every_reward(capsys):
    code, out, _ = call(capsys)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["name", "differentiable", "range", "weights", "licence"]
    assert [line.split()[0] for line in lines[1:]] == sorted(REWARDS)
    assert re.search(r"^motion +True +\[0, 1\] +- +this project's$", out, re.MULTILINE)


def scores(out):
    return [line.split()[1] for line in out.splitlines()[1:]]


def test_files_are_scored(capsys, clips):
    moving, still = clips / "moving.mp4", clips / "still.mp4"
    settings = ("--settings", "red=0", "green=1", "blue=0", "--")
    code, out, _ = call(capsys, "score", "--trust-code", "--reward", COLOUR, *settings, moving)
    video = data.to_float(data.read_video(moving))
    assert code == 0 and float(scores(out)[0]) == pytest.approx(((video[1, 1:] + 1) / 2).mean().item(), abs=1e-4)
    # without a real clip, a clip is compared with itself
    assert scores(call(capsys, "score", "--reward", "motion", moving, still)[1]) == ["1.0000", "-"]
    out = call(capsys, "score", "--reward", "motion", "--reference", moving, clips / "made" / "moving.mp4")[1]
    assert float(scores(out)[0]) == pytest.approx(0.5, abs=0.1)


def test_metadata_gives_prompt_and_real_clip(capsys, clips, monkeypatch):
    table = clips / "metadata.csv"
    video = clips / "made" / "moving.mp4"
    code, out, _ = call(capsys, "score", "--reward", "motion", "--metadata", table, video)
    assert code == 0 and float(scores(out)[0]) == pytest.approx(0.5, abs=0.1)
    prompts = []
    monkeypatch.setattr(find_reward("motion"), "reference", lambda _, video, prompt="": prompts.append(prompt))
    assert call(capsys, "score", "--reward", "motion", "--metadata", table, video, clips / "still.mp4")[0] == 0
    assert call(capsys, "score", "--reward", "motion", "--prompt", "a wave", video)[0] == 0
    assert prompts == ["a child", "a stone", "a wave"]


def test_mistakes_are_one_line_on_stderr(capsys, clips):
    for arguments, message in (
        (["x.mp4"], f"error: {Path.cwd()}/x.mp4: no such file"),
        (["--settings", "red", "--", "x.mp4"], "error: --settings 'red': write key=value"),
        (["--metadata", clips / "metadata.csv", "x.mp4"], "x.mp4: no row of --metadata has a video of that name"),
    ):
        code, _, err = call(capsys, "score", "--reward", "motion", *arguments)
        assert code == 2 and message in err
