"""The committed images keep their promises, their judges see what is drawn, and they can be rebuilt."""

import json

import pytest
import torch
from conftest import ROOT, run_python

import tiny_pipeline
from rewardfl import rewards
from rewardfl.rewards.scenes import checker
from rewardfl.rewards.scenes.checker import SCENES, Thing
from tiny_images import drawing, model

IMAGES = ROOT / "assets" / "tiny_images"
FIGURES = json.loads((IMAGES / "figures.json").read_text())


def judges():
    weights = {"weights_file": IMAGES / "judge.safetensors"}
    return {
        "checker": rewards.build("rewardfl.rewards.scenes.checker:SceneChecker", {}),
        "judge": rewards.build("rewardfl.rewards.scenes.judge:SceneJudge", weights),
    }


@pytest.mark.parametrize("name", ["checker", "judge"])
def test_a_judge_finds_what_is_drawn(name):
    """On pictures and prompts that neither has seen."""
    drawn, images = drawing.draw_scenes(100, torch.Generator().manual_seed(77), held_out=True)
    one = judges()[name]
    output = one(images[:, :, None], [one.reference(images[:0], scene.prompt) for scene in drawn])
    assert output.valid.all() and output.parts["right"].mean() >= 0.95 and output.score.mean() >= 0.97


@pytest.mark.parametrize("name", ["checker", "judge"])
def test_a_judge_knows_each_kind_of_mistake(name):
    """The picture of another prompt is worth what the two prompts have in common."""
    red, blue = Thing(colour="red", shape="circle", x=0.25, y=0.5), Thing(colour="blue", shape="square", x=0.75, y=0.5)
    places = {
        "a red circle left of a blue square": 1.0,
        "a red circle and a blue square": 1.0,
        "a red circle right of a blue square": 2 / 3,  # the place
        "a red circle above a blue square": 2 / 3,
        "a red square left of a blue square": 1.5 / 3,  # the shape, and so the place
        "a green circle and a blue square": 1.5 / 2,  # the colour
        "a green circle and a yellow square": 1 / 2,
        "a red circle": 1 / 2,  # one too many
        "two red circles": 1 / 2,
        "three red circles": 1 / 3,  # a blue square is neither red nor a circle
        "three green triangles": 0.0,
    }
    one = judges()[name]
    image = drawing.draw_scene([red, blue], torch.Generator().manual_seed(0))[:, None]
    for prompt, wanted in places.items():
        output = one(image[None], [one.reference(image, prompt)])
        assert output.score.item() == pytest.approx(wanted, abs=1e-6), prompt
        assert output.parts["right"].item() == (wanted == 1), prompt


def test_nothing_is_no_object():
    grey, broken = torch.full((1, 3, 1, 32, 32), 0.9), torch.full((1, 3, 1, 32, 32), torch.nan)
    for one in judges().values():
        told = one.reference(grey[0], "a red circle")
        assert one(grey, [told]).score.item() == 0
        assert not one(broken, [told]).valid.any() and not one(grey, [None]).valid.any()
        with pytest.raises(ValueError, match="'a dog'"):
            one.reference(grey[0], "a dog")


def test_prompts_are_split_as_the_files_say():
    train, held_out = ((IMAGES / f"{name}.txt").read_text().splitlines() for name in ("train", "eval"))
    assert {*train} | {*held_out} == {*SCENES} and not {*train} & {*held_out}
    drawn = {scene.prompt for scene in drawing.draw_places(2000, torch.Generator().manual_seed(1))[0]}
    assert drawn <= {*train}
    for part in (train, held_out):
        assert {drawing.form(SCENES[prompt]) for prompt in part} >= {"number", "two", "relation"}
    words = {word for prompt in train for word in prompt.split()}
    assert {word for prompt in held_out for word in prompt.split()} <= words


def test_every_prompt_fits_the_text_encoders():
    for tokenizer in (model._new_clip_tokenizer(), model._new_t5_tokenizer()):
        lengths = [len(tokenizer(prompt).input_ids) for prompt in SCENES]
        assert max(lengths) <= model.TOKENS
        assert all(tokenizer.unk_token_id not in tokenizer(prompt).input_ids[1:-1] for prompt in SCENES)


@pytest.mark.long
def test_the_base_draws_what_the_figures_say():
    """It obeys in part: enough to learn from, and far from all."""
    pipe = tiny_pipeline.load_pipeline(IMAGES)
    generator = torch.Generator().manual_seed(5)
    wanted, _ = drawing.draw_places(64, generator, held_out=True)
    images = tiny_pipeline.sample(pipe, [scene.prompt for scene in wanted], 32, 32, generator)
    right = [
        checker.score_scene(one, judges()["checker"].things_in(image))[1]
        for one, image in zip(wanted, images, strict=True)
    ]
    assert abs(sum(right) / 64 - FIGURES["checker/base"]["all"]) < 0.15  # two standard errors of the two shares


def test_it_is_small():
    assert sum(path.stat().st_size for path in IMAGES.rglob("*") if path.is_file()) < 6e6


@pytest.mark.slow(30)
@pytest.mark.long
def test_the_tool_builds_it_from_a_seed(tmp_path):
    run = run_python(["assets/build/make_tiny_images.py", "--quick", "--out", tmp_path / "images"], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    made = {path.relative_to(tmp_path / "images") for path in (tmp_path / "images").rglob("*") if path.is_file()}
    kept = {path.relative_to(IMAGES) for path in IMAGES.rglob("*") if path.is_file()}
    assert kept <= made
    for name in ("train.txt", "eval.txt"):
        assert (tmp_path / "images" / name).read_text() == (IMAGES / name).read_text()
