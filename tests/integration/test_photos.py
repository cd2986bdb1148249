"""Rows with photos in the place of a clip: the three scripts train on them, and motion is compared with the base's."""

import math
import re

import pytest
import torch
from runs import FACE_ALONE, WORLD, adapter, launch, launch_forward, launch_grpo, metrics

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
    "reward.name=face_identity", f"reward.reward_model_path={PACK}", f"reward.held_out_model_path={WORLD}/faces/judge",
    "reward.base_noises=1", "data.height=48", "data.width=48", "run.sample_videos=0", "train.warmup_steps=0",
]  # fmt: skip


def write_table(folder, *rows):
    (folder / "world").symlink_to(WORLD)  # noise is drawn by these names
    lines = [f"{row.format(world='world')},talking" for row in rows or ROWS.values()]
    (folder / "rows.csv").write_text("\n".join(["video,image,photos,prompt", *lines]))
    return f"data.file_name={folder / 'rows.csv'}"


MOTION = ["reward.motion_weight=0.5", "reward.others={flow: {name: optical_flow, weight: 1}}"]
GROUP = "reward.others={flow: {name: optical_flow, weight: 1}}"
SCRIPTS = {
    "reward_fl": (launch, [*MOTION, "train.per_device_train_batch_size=5"]),
    "flow_grpo": (launch_grpo, [GROUP, "grpo.groups=5"]),
    "forward_rl": (launch_forward, [GROUP, "forward.groups=5"]),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_rows_of_all_kinds_train(script, tmp_path):
    start, settings = SCRIPTS[script]
    run = tmp_path / "run"
    common = [*FACE, write_table(tmp_path), f"data.cache_dir={tmp_path}/cache", f"run.output_dir={run}", *settings]
    output = start(*common, "train.max_steps=1", "run.save_steps=1").stdout
    assert "note: motion is compared with 1 videos of the base model for each of 3 rows" in output.replace(
        f"data.file_name ({tmp_path}/rows.csv): ", ""
    )
    line = metrics(run)[0]
    assert line["reward/valid_fraction"] == 1 and line["grad_norm"] > 0
    assert all(math.isfinite(line[f"reward/held_out/{name}"]) for name in ("motion_speed", "flow", "sharpness"))
    assert (tmp_path / "cache" / "motion").is_dir()


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
    settings = [*FACE, write_table(tmp_path), *MOTION, "run.save_steps=1", "train.lr_scheduler_type=constant"]
    launch(*settings, f"run.output_dir={tmp_path / 'straight'}", "train.max_steps=2")
    for steps in (1, 2):
        launch(*settings, f"run.output_dir={tmp_path / 'resumed'}", f"train.max_steps={steps}")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert metrics(straight) == metrics(resumed)
    before, after = adapter(straight, 2), adapter(resumed, 2)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


REFUSED = {
    "one picture": (["an image"], [], r"reward.cap: self_similarity takes two photos of a person, or a clip"),
    "prompts": ([",,", ",,"], ["reward.motion_weight=0"], r"lines 2, 3 \(2 rows\): no video, and no image"),
}


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_before_training(case, dry_run, tmp_path):
    names, settings, message = REFUSED[case]
    table = write_table(tmp_path, *(ROWS.get(name, name) for name in names))
    done = launch(*FACE, table, *settings, f"run.output_dir={tmp_path / 'run'}", *["--dry-run"] * dry_run, check=False)
    assert done.returncode == 2 and re.search(message, done.stderr) and done.stderr.count("error: ") == 1


def test_a_photo_of_another_person_is_named_or_left_out(tmp_path):
    (tmp_path / "anna").mkdir()
    for i, name in enumerate(("003/0", "003/1", "003/2", "006/0")):
        (tmp_path / "anna" / f"{i}.jpg").symlink_to(PHOTOS / f"{name}.jpg")
    row = f",{PHOTOS}/003/4.jpg,{tmp_path}/anna"
    settings = [
        *FACE,
        *FACE_ALONE,
        write_table(tmp_path, row),
        f"run.output_dir={tmp_path / 'run'}",
        "train.max_steps=1",
    ]
    done = launch(*settings, check=False)
    assert done.returncode == 2 and f"line 2: {tmp_path}/anna/3.jpg: shows another person (median cosine" in done.stderr
    done = launch(*settings, "data.skip_bad_rows=true")
    assert f"skipped: line 2: {tmp_path}/anna/3.jpg: shows another person" in done.stdout
    assert launch(*settings, check=False).returncode == 2  # what one start leaves out another one still refuses


@pytest.mark.long
def test_two_processes_are_one(tmp_path):
    """They share the base videos."""
    common = [
        *FACE,
        write_table(tmp_path),
        *MOTION,
        "train.max_steps=1",
        "run.save_steps=1",
        "train.max_grad_norm=0.01",
    ]
    folders = [[f"run.output_dir={tmp_path}/{n}", f"data.cache_dir={tmp_path}/cache{n}"] for n in (1, 2)]
    launch(*common, *folders[0], "train.gradient_accumulation_steps=4")
    done = launch(*common, *folders[1], "train.gradient_accumulation_steps=2", processes=2)
    assert (tmp_path / "2" / "metrics.jsonl").exists(), done.stderr[-3000:]
    (single,), (shared,) = metrics(tmp_path / "1"), metrics(tmp_path / "2")
    assert single.keys() == shared.keys()
    for name in ("grad_norm", "reward/mean", "reward/motion_speed", "reward/flow/ratio", "reward/held_out/flow"):
        assert shared[name] == pytest.approx(single[name], rel=1e-4), name
