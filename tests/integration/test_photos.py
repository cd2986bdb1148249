"""Rows with photos in the place of a clip: the three scripts train on them, and motion is compared with the base's."""

import itertools
import json
import math

import pytest
import torch
import wan_files
from conftest import ROOT, run_python
from PIL import Image
from pipelines import random_variant
from runs import FACE_ALONE, RED, WORLD, assert_same_run, launch, launch_forward, launch_grpo, metrics

PHOTOS = WORLD / "train" / "photos"
PACK = WORLD / "faces" / "inner_face"
ROWS = {
    "a clip": "{world}/train/videos/000.mp4,,",
    "a clip and photos": "{world}/train/videos/001.mp4,,{world}/train/photos/001",
    "photos and an image": ",{world}/train/photos/002/0.jpg,{world}/train/photos/002",
    "photos": ",,{world}/train/photos/003",
    "an image": ",{world}/train/photos/004/1.jpg,",
}
pytestmark = pytest.mark.slow(60)
FACE = [
    "reward.terms.score.name=face_identity", f"reward.reward_model_path={PACK}",
    f"reward.held_out_model_path={WORLD}/faces/judge",
    "reward.base_noises=1", "data.height=48", "data.width=48", "run.sample_videos=0", "train.warmup_steps=0",
]  # fmt: skip


def write_table(folder, *rows):
    (folder / "world").symlink_to(WORLD)  # noise is drawn by these names
    lines = [f"{row.format(world='world')},talking" for row in rows or ROWS.values()]
    (folder / "rows.csv").write_text("\n".join(["video,image,photos,prompt", *lines]))
    return f"data.file_name={folder / 'rows.csv'}"


GROUP = "reward.others={flow: {name: optical_flow, weight: 1}}"
MOTION = ["reward.motion_weight=0.5", GROUP]
ANCHOR = ["anchor.weight=1", "anchor.target=reference"]
SCRIPTS = {
    "reward_fl": (launch, MOTION, "train.per_device_train_batch_size"),
    "flow_grpo": (launch_grpo, [GROUP], "grpo.groups"),
    "forward_rl": (launch_forward, [GROUP], "forward.groups"),
}
TEXT = ["model.model_name=wan2_2_ti2v_text", "model.trainable_models=dit", "data.height=32", "data.width=32"]
UNSEEN = ["reward.terms.score.weight=0", "reward.motion_weight=0"]  # random weights draw no face
TABLES = {  # rows, and settings
    "all": ([*ROWS.values()], ANCHOR),
    "one image": ([ROWS["an image"]], ["reward.cap=0.8"]),
    "prompt of text to video": ([",,"], [*TEXT, *RED, UNSEEN[1]]),
    "photos of text to video": ([ROWS["photos"]], [*TEXT, *UNSEEN, *ANCHOR]),
}


@pytest.mark.parametrize("table", ["all", *(pytest.param(name, marks=pytest.mark.long) for name in [*TABLES][1:])])
@pytest.mark.parametrize("script", SCRIPTS)
def test_rows_of_all_types_train(script, table, tmp_path):
    (start, settings, count), (rows, more) = SCRIPTS[script], TABLES[table]
    run, without = tmp_path / "run", sum(row.startswith(",") for row in rows)
    common = [*FACE, write_table(tmp_path, *rows), f"data.cache_dir={tmp_path}/cache", f"run.output_dir={run}"]
    if text := TEXT[0] in more:
        random_variant("wan2_2_ti2v_text").save_pretrained(tmp_path / "model")
        common.append(f"model.model_paths={tmp_path}/model")
    steps = ["train.max_steps=1", "run.save_steps=1", f"{count}={len(rows)}"]
    output = start(*common, *settings, *more, *steps).stdout.replace(f"data.file_name ({tmp_path}/rows.csv): ", "")
    assert f"note: motion is compared with 1 videos of the base model for each of {without} rows" in output
    assert "no face was found" not in output  # the packs' check has a photo to look at
    line = metrics(run)[0]
    assert line["grad_norm"] > 0 and (text or line["reward/valid_fraction"] == 1)
    assert text or all(math.isfinite(line[f"reward/held_out/{name}"]) for name in ("motion_speed", "flow", "sharpness"))
    assert (tmp_path / "cache" / "motion").is_dir()
    anchored = without if ANCHOR[0] in more else 0
    assert (f"{anchored} of {len(rows)} rows name no video and have an anchor at a video" in output) == (anchored > 0)
    assert len([*tmp_path.glob("cache/base_latents/*/*")]) == anchored


def test_the_untrained_adapter_moves_as_the_base(tmp_path):
    """Of a row that repeats one noise, the first update's video is the base's: every ratio of motion is 1."""
    table = write_table(tmp_path, ROWS["photos"])
    once = [f"run.output_dir={tmp_path / 'run'}", "sample.noises_per_sample=1", "reward.motion_reference=base"]
    launch(*FACE, table, *MOTION, *once, "train.max_steps=1", "run.save_steps=1")
    line = metrics(tmp_path / "run")[0]
    for name in ("motion_speed", "motion_nonrigid", "held_out/motion_speed", "held_out/flow", "flow/ratio"):
        assert line[f"reward/{name}"] == pytest.approx(1, abs=1e-5), name
    assert line["reward/flow/reversals"] == pytest.approx(0, abs=1e-5)


def test_a_resumed_run_is_the_same(tmp_path):
    settings = [*FACE, write_table(tmp_path), *MOTION, *ANCHOR, "run.save_steps=1", "train.lr_scheduler_type=constant"]
    launch(*settings, f"run.output_dir={tmp_path / 'straight'}", "train.max_steps=2")
    for steps in (1, 2):
        launch(*settings, f"run.output_dir={tmp_path / 'resumed'}", f"train.max_steps={steps}")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert_same_run(resumed, straight, 2)
    assert metrics(straight)[1]["actor/anchor_loss"] > 0


def test_a_photo_of_another_person_is_named_or_left_out(tmp_path):
    for folder in ("anna", "other"):
        (tmp_path / folder).mkdir()
    for i, name in enumerate(("003/0", "003/1", "003/2", "006/0")):
        (tmp_path / "anna" / f"{i}.jpg").symlink_to(PHOTOS / f"{name}.jpg")
    row = f",{PHOTOS}/003/4.jpg,{tmp_path}/anna"
    settings = [*FACE, *FACE_ALONE, f"run.output_dir={tmp_path / 'run'}", "train.max_steps=1"]
    first = write_table(tmp_path / "other", f",{tmp_path}/anna/3.jpg,{tmp_path}/anna")
    done = launch(*settings, first, "data.skip_bad_rows=true", check=False)  # the model's input shows the other person
    assert done.returncode == 2 and f"{tmp_path}/anna/3.jpg: shows another person" in done.stderr
    settings.append(write_table(tmp_path, row))
    done = launch(*settings, check=False)
    assert done.returncode == 2 and f"line 2: {tmp_path}/anna/3.jpg: shows another person (median cosine" in done.stderr
    done = launch(*settings, "data.skip_bad_rows=true")
    assert f"skipped: line 2: {tmp_path}/anna/3.jpg: shows another person" in done.stdout
    assert launch(*settings, check=False).returncode == 2  # what one start leaves out another one still refuses


@pytest.mark.long
def test_two_processes_are_one(tmp_path):
    """They share the base videos."""
    common = [
        *FACE, write_table(tmp_path), *MOTION, *ANCHOR, "train.max_steps=2", "run.save_steps=1",
        "train.max_grad_norm=0.01",
    ]  # fmt: skip
    folders = [[f"run.output_dir={tmp_path}/{n}", f"data.cache_dir={tmp_path}/cache{n}"] for n in (1, 2)]
    launch(*common, *folders[0], "train.gradient_accumulation_steps=4")
    done = launch(*common, *folders[1], "train.gradient_accumulation_steps=2", processes=2)
    assert (tmp_path / "2" / "metrics.jsonl").exists(), done.stderr[-3000:]
    names = "grad_norm", "reward/mean", "reward/motion_speed", "reward/flow/ratio", "reward/held_out/flow"
    for single, shared in zip(metrics(tmp_path / "1"), metrics(tmp_path / "2"), strict=True):
        assert single.keys() == shared.keys()
        for name in (*names, "actor/anchor_loss"):
            assert shared[name] == pytest.approx(single[name], rel=1e-4), name
    assert single["actor/anchor_loss"] > 0


@pytest.mark.long
def test_from_a_folder_of_photos_to_a_lora_for_diffusers(tmp_path):
    """In the published layout, with random weights."""
    pipe, people = wan_files.small_pipeline(), tmp_path / "people"
    original = wan_files.write_original(pipe, tmp_path / "original")
    paths = wan_files.paths(original, wan_files.write_configs(pipe, tmp_path / "configs"))
    (tmp_path / "paths.json").write_text(json.dumps(paths))
    (tmp_path / "prompts.txt").write_text("{name} talks\n{name} nods\n")
    people.mkdir()
    (people / "anna").symlink_to(PHOTOS / "003")
    words = ["--photos", people, "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "people.csv"]
    assert run_python([ROOT / "examples" / "photo_table.py", *words]).returncode == 0
    settings = ["model.trainable_models=dit,dit2", "sample.mid_timestep=0", f"model.model_paths={tmp_path}/paths.json"]
    settings += [f"data.file_name={tmp_path}/people.csv", f"run.output_dir={tmp_path}/run", "train.max_steps=1"]
    launch(*FACE, *MOTION, *settings)

    def generate():
        pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config)  # without the last call's steps
        picture, size = Image.open(PHOTOS / "003" / "0.jpg"), {"height": 48, "width": 48, "num_frames": 5}
        settings = {"num_inference_steps": 4, "guidance_scale": 1.0, "generator": torch.Generator().manual_seed(1)}
        return pipe(picture, "anna talks", **size, **settings, output_type="pt").frames

    videos, latest = [generate(), generate()], tmp_path / "run" / "checkpoints" / "latest"
    for part, second in (("transformer", False), ("transformer_2", True)):
        pipe.load_lora_weights(latest / part, load_into_transformer_2=second)
        videos.append(generate())
    assert [torch.equal(*pair) for pair in itertools.pairwise(videos)] == [True, False, False]
