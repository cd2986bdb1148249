"""tools/evaluate.py on small random text-to-image models."""

import json

import pytest
import torch
from conftest import run_tool
from image_pipelines import SIDE, random_sd3
from runs import COLOUR, launch_grpo
from test_pipeline import PROMPTS, settings

from rewardfl import backbones, data
from rewardfl.backbones.image import pipeline
from rewardfl.backbones.protocol import Source
from rewardfl.evaluation import arms, image_report
from rewardfl.noise import draw_noise, noise_seed
from rewardfl_tools import evaluate

pytestmark = pytest.mark.slow(60)

OWN_REWARD = """
import torch
from rewardfl.rewards import Reward, RewardOutput

class LikeTheClip(Reward):
    name = "like_the_clip"

    def reference(self, video, prompt=""):
        return {"mean": video.mean()[None]}

class Broken(Reward):
    name = "broken"

    def forward(self, video, batch):
        raise RuntimeError("out of order")

class TwoReaders(Reward):
    name = "two_readers"
    compares_with = "nothing"
    evaluation_settings = {"second": True}

    def __init__(self, *, second: bool = False):
        super().__init__()
        self.second_opinion = ("one", "other") if second else ()

    def reference(self, video, prompt=""):
        return {"other": torch.tensor(0.5 * ("red" in prompt) + 1.0 * ("blue" in prompt))}

    def forward(self, video, batch):
        other = {"other": torch.stack([one["other"] for one in batch])} if self.second_opinion else {}
        ones = torch.ones(len(batch))
        return RewardOutput(ones, ones.bool(), {"one": ones / 2, **other})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a folder with a model and a table of prompts."""
    folder = tmp_path_factory.mktemp("sd3")
    random_sd3().save_pretrained(folder / "model")
    (folder / "prompts.csv").write_text("\n".join(["prompt", *PROMPTS, ""]))
    return folder


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A run of two steps."""
    run = tmp_path_factory.mktemp("trained")
    launch_grpo(
        *settings("sd3", model), "train.learning_rate=5e-2", "train.warmup_steps=0", "train.max_steps=2",
        f"run.output_dir={run}", "grpo.group_size=2", "grpo.groups=4",
        f"reward.others={{blue: {{name: {COLOUR}, weight: 0, settings: {{red: -0.5, green: -0.5, blue: 1.0}}}}}}",
    )  # fmt: skip
    (run / "own.py").write_text(OWN_REWARD)
    (run / "sizes.csv").write_text("prompt,height,width\na ball,,\na ball,36,32\na ball,32,\n,32,32\n")
    return run


def evaluate_run(run, table, *words, expect=0):
    start = ("--trust-code", "--run", run, "--data", table, "--device", "cpu", "--seeds", 1)
    return run_tool(evaluate.main, *start, *words, expect=expect)


def test_evaluate_says_what_became_of_the_pictures(model, trained):
    """Its scores are those of the stock pipeline's pictures; the judges that the run watches are there, too."""
    words = [trained, model / "prompts.csv", "--seeds", 2, "--batch", 3]
    output = evaluate_run(*words)
    report = json.loads((trained / "evaluation" / "report.json").read_text())
    assert report["prompts"] == len(PROMPTS) and report["pairs"] == 2 * len(PROMPTS)
    assert "score (trained on)" in output and "blue\n" in output and "better after" in output
    pairs = report["per_pair"]
    pipe, pair = random_sd3(), pairs[1]
    (row,) = [row for row in data.load_metadata(model / "prompts.csv") if row.line == pair["line"]]
    backbone = backbones.open("sd3", Source(model_paths=str(model / "model"), dtype="float32"))
    noise = draw_noise((1, *backbone.latent_shape(SIDE, SIDE, 1)), noise_seed(pair["seed"], 0, row.id))[:, :, 0]
    steps = json.loads((trained / "run.json").read_text())["config"]["sample"]["num_inference_steps"]

    def redness():
        image = pipe(
            row.prompt, height=SIDE, width=SIDE, num_inference_steps=steps, output_type="pt", latents=noise,
            guidance_scale=1.0,
        ).images  # fmt: skip
        return (image.mean((0, 2, 3)) * torch.tensor([1.0, -0.5, -0.5])).sum().item()

    assert pair["score/before"] == pytest.approx(redness(), abs=1e-4)
    pipe.load_lora_weights(str(trained / "checkpoints" / "latest" / "transformer"))
    assert pair["score/after"] == pytest.approx(redness(), abs=1e-4)
    for arm in ("base", "latest"):
        assert data.read_picture(trained / "evaluation" / "images" / arm / "000_seed0.png").shape == (SIDE, SIDE, 3)
    assert data.read_picture(trained / "evaluation" / "grid.png").shape[2] == 3
    assert "reward.terms.score judges" in evaluate_run(*words, "reward.terms.score.name=motion", expect=2)


def test_what_evaluate_cannot_judge_is_refused_before_weights_load(model, trained, monkeypatch):
    monkeypatch.setattr(pipeline.ImageModel, "_load", None)
    for words, output in (
        (
            [f"reward.others={{own: {{name: '{trained}/own.py:LikeTheClip', weight: 0}}}}"],
            "reward.terms.own compares",
        ),
        (["reward.others={flow: {name: optical_flow, weight: 0}}"], "reward.terms.flow judges at least 2 frames"),
        (["--data", trained / "sizes.csv"], "line 4: height and width must be whole numbers"),
        (["--others", "x"], "--others: is for videos"),
    ):
        assert output in evaluate_run(trained, model / "prompts.csv", *words, expect=2)


def test_evaluate_names_a_reward_that_fails_and_judges_each_size(model, trained):
    own = f"reward.others={{own: {{name: '{trained}/own.py:Broken', weight: 0}}}}"
    output = evaluate_run(trained, model / "prompts.csv", own, "--force", expect=2)
    assert "error: reward.terms.own: RuntimeError: out of order" in output
    (trained / "two.csv").write_text("prompt,height,width\na ball,,\na ball,32,64\nbad,36,32\n")
    output = evaluate_run(trained, trained / "two.csv", "data.skip_bad_rows=true", "--force")
    assert "skipped: line 4: height must be a multiple of 8" in output and "2 prompts, 2 pairs" in output
    files = sorted((trained / "evaluation" / "images" / "latest").iterdir())
    assert [data.read_picture(file).shape for file in files] == [(SIDE, SIDE, 3), (SIDE, 2 * SIDE, 3)]
    assert "nonfinite" not in str(json.loads((trained / "evaluation/report.json").read_text())["figures"].keys())


def test_arms_of_images_share_their_noises(model, trained, monkeypatch):
    """Start, strengths and step counts. A second call samples no picture again."""
    out = trained / "arms"
    words = [trained, model / "prompts.csv", "--out", out, "--strengths", "0,1", "--steps", "2,3"]
    words.append(f"lora.init_from={trained}/checkpoints/latest")
    evaluate_run(*words)
    records = (out / "records.jsonl").read_text()
    assert len(records.splitlines()) == 8 * len(PROMPTS)
    report = json.loads((out / "report.json").read_text())
    tail = "" if any(arm["name"] == "latest" for arm in report["arms"]) else "_2steps"
    by_name = {arm["name"]: arm for arm in report["arms"]}
    assert len(by_name) == 6 and by_name[f"latest_x0{tail}"]["against"] == f"base{tail}"
    start = by_name[f"start{tail}"]
    assert start["figures"] == by_name[f"latest{tail}"]["figures"] and start["origin"].endswith("latest")
    assert report["figures"] == report["arms"][0]["figures"] and not report["arms"][0]["origin"]
    for name, arm in by_name.items():
        score = arm["figures"]["score"]
        assert (score["before"] == score["after"] and score["win_rate"]["mean"] == 0.5) == ("x0" in name), name
    monkeypatch.setattr(arms, "load_model", None)
    evaluate_run(*words)
    assert (out / "records.jsonl").read_text() == records and not (out / "prepared").exists()


def test_evaluate_shows_pictures_whose_second_reader_disagrees(model, trained):
    """An evaluation's settings are the reward's own, if the configuration has none."""
    (table := trained / "three.csv").write_text("prompt\na ball\na red ball\na blue ball\n")
    own = f"reward.terms.readers.name={trained}/own.py:TwoReaders"
    folder = trained / "evaluation"
    output = evaluate_run(trained, table, own, "--force")
    assert "readers/one above readers/other: 1 pictures before, 1 after (disagreements.png)" in output
    assert json.loads((folder / "report.json").read_text())["disagreements"] == {
        "readers/one above readers/other": {"before": 1, "after": 1},  # scores of 0, 0.5 and 1 against 0.5
        "readers/other above readers/one": {"before": 1, "after": 1},
    }
    shown = data.read_picture(folder / "disagreements.png")
    ones = [data.read_picture(folder / "images" / "latest" / f"{row:03d}_seed0.png") for row in (0, 2)]
    scale, width = round(image_report.SIDE / SIDE), image_report.SIDE + 8
    for i, picture in enumerate(ones):
        large = picture.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        assert (shown[16 : 16 + len(large), i * width + 4 :][:, : large.shape[1]] == large).all()
    output = evaluate_run(trained, table, own, "reward.terms.readers.settings.second=false", "--force")
    assert "disagree" not in output and not (folder / "disagreements.png").exists()
