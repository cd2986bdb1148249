"""The statistics of tools/evaluate.py on records whose answers are known; what it makes of folders; what it refuses."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT, run_tool

from rewardfl import config, data, lora
from rewardfl.evaluation import judge_videos, judging
from rewardfl.evaluation.arms import Arm, batches, describe_start, find_videos, make_arms, unique_names
from rewardfl.evaluation.figures import record_figures, summarise
from rewardfl.evaluation.records import (
    SETTINGS,
    Writer,
    describe_difference,
    join_records,
    merge_settings,
    read_records,
)
from rewardfl.evaluation.report import pictures
from rewardfl.evaluation.report.report_page import format_report
from rewardfl.outputs import MARK
from rewardfl.rewards import face
from rewardfl.rewards.pixels.video_motion import video_motion
from rewardfl.weights.shards import InputError
from rewardfl_tools import evaluate

JUDGE = "held_out"
ARMS = [Arm(name="base", steps=8), Arm(name="latest", steps=8, adapter=ROOT)]
FIGURES = {
    "face_sim": 0.5, "coverage": 1.0, "speed": 0.02, "nonrigid": 0.01, "flow": 1.0, "face_flow": 2.0,
    "pixel_change": 0.1, "sharpness": 50.0, "reversals": -0.8, "grid": 1.0, "saturation": 0.2, "red": 0.5, "green": 0.5,
    "blue": 0.5,
}  # fmt: skip
BLOCKS = {
    JUDGE: ("face_sim", "coverage", "speed", "nonrigid"),
    "motion": ("flow", "face_flow", "pixel_change", "sharpness", "reversals"),
    "canary": ("grid", "saturation", "red", "green", "blue"),
}


def record(person, arm, seed=0, curve=None, **figures):
    """What is known of a video: FIGURES but for those given; its FaceSim is that of the curve."""
    own = FIGURES | figures
    curve = [own["face_sim"]] * 8 if curve is None else curve
    own["face_sim"] = float(np.mean(curve))
    named = {f"{block}/{key}": own[key] for block, keys in BLOCKS.items() for key in keys}
    place = {"row": person, "line": 2, "index": ord(person[0]), "person": person, "arm": arm, "seed": seed}
    place |= {"steps": 8, "decoded": False}
    return place | {"file": "x.mp4", "figures": named, "curves": {JUDGE: curve}, "detected": {JUDGE: [True] * 9}}


def real(person, width=60.0, **figures):
    one = record(person, "real", None, **{"flow": 4.0, "face_sim": 0.9} | figures)
    one["figures"][f"{JUDGE}/cap"] = 0.9
    return one | {"size": [16, 16], "face_width": width, "fps": 16}


def pair(person, seed, before, after, **figures):
    return [record(person, "base", seed, face_sim=before), record(person, "latest", seed, face_sim=after, **figures)]


def summary(*records, arms=ARMS):
    people = dict.fromkeys(one["row"] for one in records if one["arm"] != "real")
    known = {one["row"] for one in records if one["arm"] == "real"}
    return summarise([*records, *(real(one) for one in people if one not in known)], arms)


def close(value):
    return {"mean": pytest.approx(value), "low": pytest.approx(value), "high": pytest.approx(value)}


def mean(value):
    return {"mean": pytest.approx(value)}


def only_difference(value, people_with_more):
    return {"difference": close(value), "people_with_more": people_with_more, "left_out": 0}


def both(seeds=(0,), **figures):
    return [line for person in "ab" for seed in seeds for line in pair(person, seed, 0.5, 0.6, **figures)]


GAIN = [*pair("a", 0, 0.4, 0.6), *pair("b", 0, 0.6, 0.8)]
ALONE = [*pair("a", 0, 0.4, 0.5), record("a", "latest", 1, face_sim=0.9)]
FROZEN = [*both((0, 1)), record("c", "base", nonrigid=0.0), record("c", "latest", nonrigid=0.0)]  # c has no half
FROZEN[1]["figures"][f"{JUDGE}/nonrigid"], FROZEN[5]["figures"][f"{JUDGE}/nonrigid"] = 0.0049, 0.0051
NO_FACE = pair("a", 0, 0.5, 0.0, face_flow=None, flow=0.5)
CANARIES = both(red=0.53, green=0.46, grid=3.0, saturation=0.3)
MOVES = [
    *pair("a", 0, 0.5, 0.6, flow=0.5), *pair("a", 1, 0.5, 0.6, flow=0.7), *pair("b", 0, 0.5, 0.6, reversals=-0.6),
]  # fmt: skip
REWARD = pair("a", 0, 0.5, 0.6)
REWARD[0]["figures"]["rewards/flow"], REWARD[1]["figures"]["rewards/flow"] = 0.1, -0.8


@pytest.mark.parametrize(
    "records, place, expected",
    [
        (GAIN, "arms 1 compared held_out/face_sim difference", close(0.2)),
        (GAIN, "arms 1 compared held_out/face_sim people_with_more", 1.0),
        (GAIN, "real figures held_out/cap", close(0.9)), (GAIN, "arms 0 figures held_out/face_sim", mean(0.5)),
        (GAIN, "arms 1 figures held_out/last_quarter", mean(0.7)),
        (GAIN, "arms 1 per_frame held_out", [pytest.approx(0.7)] * 8),
        (GAIN, "arms 0 against", None), (GAIN, "arms 1 against", "base"),
        # a noise that only one arm has counts in neither
        (ALONE, "arms 1 compared held_out/face_sim difference", close(0.1)),
        (ALONE, "arms 1 compared held_out/face_sim left_out", 1),
        (both(speed=0.002), "arms 1 compared held_out/speed ratio", mean(0.1)),  # a face that has frozen
        (FROZEN, "arms 1 frozen_share", mean(0.25)),  # half of a's clips, and none of b's
        # motion without a network: ratios of means over people
        (MOVES, "real figures motion/flow", close(4)), (MOVES, "arms 0 figures motion/flow", close(1)),
        (MOVES, "arms 1 figures motion/flow", mean(0.8)),  # 0.6 and 1
        (MOVES, "arms 1 compared motion/flow ratio", pytest.approx({"mean": 0.8, "low": 0.6, "high": 1.0})),
        (MOVES, "arms 1 compared motion/sharpness ratio", close(1)),
        (MOVES, "arms 1 figures motion/reversals", mean(-0.7)),
        (MOVES, "arms 1 compared motion/reversals difference", pytest.approx({"mean": 0.1, "low": 0.0, "high": 0.2})),
        # a clip without a face is left out of the face's flow only
        ([*NO_FACE, *pair("b", 0, 0.5, 0.6, face_flow=1.0)], "arms 1 compared motion/face_flow ratio", mean(0.5)),
        ([*NO_FACE, *pair("b", 0, 0.5, 0.6, face_flow=1.0)], "arms 1 compared motion/flow ratio", mean(0.75)),
        # canaries against the base's
        (CANARIES, "arms 1 colour_shift", close(0.05)),
        (CANARIES, "arms 1 compared canary/grid ratio", close(3)),
        (CANARIES, "arms 1 compared canary/red", only_difference(0.03, 1.0)),
        # a reward that is called like a motion has no ratio: its scale is its own, and may go through 0
        (REWARD, "arms 1 compared rewards/flow", only_difference(-0.9, 0.0)),
        (REWARD, "arms 1 compared motion/flow ratio", close(1)),
    ],
)  # fmt: skip
def test_a_figure_of_the_report(records, place, expected):
    part = json.loads(json.dumps(summary(*records), allow_nan=False))  # other readers of JSON know no NaN
    for key in place.split():
        part = part[int(key) if key.isdigit() else key]
    if isinstance(expected, dict) and [*expected] == ["mean"]:
        part = {"mean": part["mean"]}
    assert part == expected


def test_more_noises_of_the_same_people_do_not_narrow_the_interval():
    values = torch.linspace(0.3, 0.8, 6).tolist()
    once, again = (
        [one for n, v in zip("abcdef", values, strict=True) for one in pair(n, seed, v, v)] for seed in (0, 1)
    )
    figures = [summary(*records)["arms"][0]["figures"][f"{JUDGE}/face_sim"] for records in (once, once + again)]
    assert figures[0] == pytest.approx(figures[1])
    spread = float(np.std(values, ddof=1)) / 6**0.5
    assert figures[0]["high"] - figures[0]["low"] == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_arms_without_a_common_clip_or_figure():
    apart = summary(record("a", "base", 0), record("a", "latest", 1))
    assert apart["arms"][1]["compared"][f"{JUDGE}/face_sim"] is None
    assert "latest and base have no clip in common" in format_report(json.loads(json.dumps(apart, allow_nan=False)))
    text = format_report(summary(*NO_FACE)).partition("real clips")[0].partition("latest, against")[2]
    assert "face flow" not in text


def test_the_shape_of_a_curve():
    def shape(curve):
        return {name.removeprefix(f"{JUDGE}/"): value for name, value in
                record_figures(record("a", "base", curve=curve)).items()}  # fmt: skip

    figures = shape([0.9 - 0.02 * i for i in range(20)])
    assert (figures["drift"], figures["worst_tenth"], figures["last_quarter"]) == pytest.approx((-0.02, 0.53, 0.56))
    noisy = np.random.default_rng(0).uniform(size=13)
    assert shape(noisy)["drift"] == pytest.approx(np.polyfit(np.arange(13), noisy, 1)[0])
    assert "drift" not in shape([0.5]) and shape([0.4, 0.8])["worst_tenth"] == 0.4
    assert shape([0.4, 0.41, 0.5, 0.1])["above_threshold"] == 0.5


MORE_STEPS = [Arm(name="base_20steps", steps=20), Arm(name="latest_20steps", steps=20, adapter=ROOT)]
OTHERS = [Arm(name="theirs", videos=ROOT), Arm(name="others", videos=ROOT)]


@pytest.mark.parametrize(
    "arms, bases",
    [
        ([*ARMS, *MORE_STEPS], [None, "base", None, "base_20steps"]), ([ARMS[0], *OTHERS], [None, "base", "base"]),
        (OTHERS, [None, "theirs"]),
    ],
)  # fmt: skip
def test_every_arm_is_compared_with_the_base_of_its_steps(arms, bases):
    values = dict(zip((arm.name for arm in arms), (0.4, 0.5, 0.6, 0.9), strict=False))
    report = summary(*(record("a", name, face_sim=value) for name, value in values.items()), arms=arms)["arms"]
    assert [arm["against"] for arm in report] == bases
    change = report[-1]["compared"][f"{JUDGE}/face_sim"]["difference"]
    assert change == close(values[arms[-1].name] - values[bases[-1]])


def test_a_real_clips_own_likeness_leaves_each_frame_out_of_its_pool():
    embeddings = torch.nn.functional.normalize(torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), dim=1)
    with_itself = (embeddings @ embeddings.mean(0)).tolist()
    found = judging.without_itself([*with_itself, 0.3], [True] * 5 + [False], 5)
    for i in range(5):
        others = torch.cat([embeddings[:i], embeddings[i + 1 :]])
        assert found[i] == pytest.approx(float((others @ embeddings[i]).mean()), abs=1e-6)
    assert found[5] == 0.3  # no face of this frame is in the pool
    assert np.mean(found[:5]) == pytest.approx(face.identity.self_similarity(embeddings), abs=1e-6)


def test_the_real_clips_motion_is_taken_of_its_own_frames():
    world = ROOT / "assets" / "tiny_world"
    row = data.load_metadata(world / "eval" / "metadata.csv")[0]
    example = data.load_example(row, 64, 64, 9)
    judge = face.FaceIdentity(world / "faces" / "judge", 128)
    judges = judging.Judges(faces={"held_out": judge}, terms=[], periods=(8,), device="cpu")
    references, record, _ = judging.prepare_row(judges, row, example, 16, skip=False)
    pool = judge.pool(example.video)
    figures, frames = record["figures"], data.to_uint8(example.video).contiguous().numpy()
    motion = video_motion(frames, pool.boxes.numpy())
    assert [figures[f"motion/{key}"] for key in motion] == pytest.approx([*motion.values()])
    assert figures["held_out/cap"] == pytest.approx(pool.cap) and figures["held_out/face_sim"] == pytest.approx(
        pool.cap
    )
    assert figures["held_out/speed"] == pool.speed and figures["canary/saturation"] > 0
    mouth, first = references["look/mouth"], {"mouth": torch.zeros(())}
    silent = judging.judge_video(judges, example.video, references | first)["figures"]
    assert figures["motion/mouth"] == silent["motion/silent_mouth"] == judging.mouth_movement(mouth)
    assert judging.measure_motion(judges, references, example.video, "") == {"mouth": judging.mouth_movement(mouth)}
    assert judging.measure_motion(judges, references, torch.zeros(3, 9, 64, 64), "") == {}
    assert 10 < record["face_width"] < 64 and record["size"] == [64, 64]
    nobody = data.Example(
        size=(64, 64), video=torch.zeros(3, 9, 64, 64), image=torch.zeros(3, 64, 64),
        reference=torch.zeros(3, 9, 64, 64),
    )  # fmt: skip
    with pytest.raises(judging.NoFaceError, match="no face was found"):
        judging.prepare_row(judges, row, nobody, 16, skip=False)
    black = judging.judge_video(judges, torch.full((3, 9, 64, 64), -1.0), references)
    assert black["figures"]["held_out/face_sim"] == 0 and black["curves"]["held_out"] == [0] * 8
    assert black["figures"]["motion/face_flow"] is None and not any(black["detected"]["held_out"])


def test_table_and_pictures(tmp_path):
    records = [line for name in "ab" for seed in (0, 1) for line in pair(name, seed, 0.5, 0.6)]
    text = format_report(report := summary(*records))
    assert "2 people, 4 clips" in text and "Is the person kept? By the held-out judge" in text
    for figure, change in (
        ("optical flow", "1.000 [1.000, 1.000]   base x 1.000 [1.000, 1.000]"),
        ("FaceSim", "0.600 [0.600, 0.600]   base +0.100 [+0.100, +0.100]"),
    ):
        assert re.search(f"{figure} +{re.escape(change)}", text.partition("latest, against base")[2])
    shown = [line | {"file": "mine.mp4", "decoded": line["seed"] == 0} for line in (*map(real, "ab"), *records)]
    data.write_video(tmp_path / "mine.mp4", torch.zeros(3, 9, 16, 16), 16)
    read, frames = [], data.read_video(tmp_path / "mine.mp4")
    pictures.draw_grid(report, tmp_path, shown, lambda path: read.append(path) or frames)
    assert len(read) == 4  # videos of another tool, as they were judged
    grid = data.read_picture(tmp_path / "grid.png")
    assert grid.shape == (2 * (96 + 34), 3 * (4 * 96 + 8), 3)  # two clips; the real one and two arms


# ---- arms, folders, records


def test_batches_hold_clips_of_one_size():
    rows = [data.Row(index=i, line=i + 2, id=str(i), video=None, prompt="a person") for i in range(5)]
    jobs = [(row, seed) for seed in (0, 1) for row in rows]
    assert batches(jobs, dict.fromkeys("01234", (64, 64)), 4) == [jobs[:4], jobs[4:8], jobs[8:]]
    sizes = {"0": (64, 64), "1": (64, 80), "2": (64, 64), "3": (64, 80), "4": (64, 64)}
    mixed = batches(jobs, sizes, 4)
    assert sorted(map(jobs.index, sum(mixed, []))) == list(range(10))
    assert [len(batch) for batch in mixed] == [4, 2, 4]
    assert all(len({sizes[row.id] for row, _ in batch}) == 1 for batch in mixed)


def test_arms_are_named_by_what_tells_them_apart(tmp_path):
    one, two = tmp_path / "a" / "latest", tmp_path / "b" / "latest"
    for folder in (one, two):
        (folder / "transformer").mkdir(parents=True)
        (folder / "transformer" / lora.WEIGHTS_NAME).touch()
    arms = make_arms([(one, 1.0), (one, 0.5), (two, 1.0)], None, [8, 20], 8, [], tmp_path)
    assert [arm.name for arm in arms[:4]] == ["base", "a_latest", "a_latest_x0.5", "b_latest"]
    assert [arm.name for arm in arms[4:6]] == ["base_20steps", "a_latest_20steps"]
    assert len({arm.name for arm in arms}) == 8 and arms[5].steps == 20 and arms[2].strength == 0.5
    for adapters, strengths, steps, videos in (
        ([one, one], None, [8], []), ([one], [1, 1], [8], []), ([one], None, [8, 8], []), ([one], None, [8], [one])
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is there twice"):
            make_arms([(path, 1.0) for path in adapters], strengths, steps, 8, videos, tmp_path)
    assert unique_names([tmp_path / "base"]) != ["base"] and unique_names([tmp_path / "start"]) != ["start"]
    arms = make_arms([(one, 1.0)], [0.5, 1.0], [8, 20], 8, [], tmp_path, str(two))
    names = ["base", "start", "latest_x0.5", "latest"]
    assert [arm.name for arm in arms] == [*names, *(f"{name}_20steps" for name in names)]
    assert [arm.origin for arm in arms[:3]] == ["", str(two), ""] and arms[1].adapter == two


def test_a_start_is_described_by_the_run_above_it(tmp_path):
    supervised = str(ROOT / "assets" / "tiny_world" / "supervised")
    assert describe_start(supervised) == f"{supervised} (trained by supervised fine-tuning)"
    folder = tmp_path / "checkpoints" / "step-000032" / "transformer_2"
    folder.mkdir(parents=True)
    (tmp_path / "latest").symlink_to(folder.parent)
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_dict(config.load("configs/tiny_face.yaml"))}))
    for place in map(str, (folder.parent, folder / "file.safetensors", tmp_path / "latest")):
        assert describe_start(place) == f"{place} (trained with a reward, 32 updates)"
    (tmp_path / "run.json").write_text("{")
    assert describe_start(str(folder)) == str(folder)


def test_a_folder_of_videos_is_told_by_place_or_id(tmp_path):
    rows = [data.Row(index=i, line=i + 2, id=f"clips/{i}.mp4#ab", video=None, prompt="x") for i in range(3)]
    odd = ("notes.mp4", "007.mp4", ".mp4", "0\n0.mp4", "_seed1.mp4")
    for name in ("000.mp4", "1_seed1.mp4", "1.mp4", "clips_2.mp4_ab.mp4", *odd):
        (tmp_path / name).touch()
    found = find_videos(tmp_path, rows)
    assert {key: path.name for key, path in found.items()} == {
        (rows[0].id, 0): "000.mp4", (rows[1].id, 0): "1.mp4", (rows[1].id, 1): "1_seed1.mp4",
        (rows[2].id, 0): "clips_2.mp4_ab.mp4",
    }  # fmt: skip
    (tmp_path / "002.mp4").touch()
    with pytest.raises(ValueError, match="002.mp4"):
        find_videos(tmp_path, rows)
    (tmp_path / "002.mp4").unlink()
    with pytest.raises(ValueError, match="line 5"):
        find_videos(tmp_path, [*rows, data.Row(index=3, line=5, id="3", video=None, prompt="x")])


def test_records_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    writer = Writer(tmp_path, 0)
    first, second = pair("a", 0, 0.4, 0.6)
    writer.add(first)
    whole = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole + json.dumps(second).encode()[:50])
    assert [*read_records(tmp_path)] == [("a", "base", 0)]
    Writer(tmp_path, 0).add(second)
    Writer(tmp_path, 3).add(real("a"))
    (tmp_path / MARK).write_text('{"files": ["records-3.jsonl"]}')
    assert [one["arm"] for one in join_records(tmp_path)] == ["real", "base", "latest"]
    assert {path.name for path in tmp_path.iterdir()} == {"records.jsonl", MARK}
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "name, listed", [("records-3.jsonl", True), ("records-4.jsonl", False), ("records-mine.jsonl", True)]
)
def test_only_listed_records_of_processes_are_read_and_removed(tmp_path, name, listed):
    """A file of the user's may have such a name, or the mark such a line."""
    Writer(tmp_path, 0).add(real("a"))
    (tmp_path / name).write_text(json.dumps(record("a", "base")) + "\n")
    (tmp_path / MARK).write_text(json.dumps({"files": [name] if listed else []}))
    is_read = name == "records-3.jsonl"
    assert len(join_records(tmp_path)) == 1 + is_read and (tmp_path / name).exists() != is_read


def test_records_of_other_settings_are_refused(tmp_path):
    settings = {"judges": {"held_out": "1"}, "adapters": {"latest": "a"}}
    for known in (settings, settings | {"adapters": {"best": "b"}}):  # one more adapter
        (tmp_path / SETTINGS).write_text(json.dumps(merge_settings(tmp_path, known)))
    for other, said in (
        ({"judges": {"held_out": "2"}}, "held_out was 1, and is 2"),
        ({"adapters": {"latest": "c"}}, "latest was a, and is c"),
        ({"judges": {"held_out": "1", "third": "1"}}, "third was not there"),
    ):
        with pytest.raises(InputError, match=f"{said}.*--overwrite"):
            merge_settings(tmp_path, settings | other)
    for damaged in ("3", "null", "{", '{"judges": 3}'):
        (tmp_path / SETTINGS).write_text(damaged)
        with pytest.raises(InputError, match="settings.json holds no settings"):
            merge_settings(tmp_path, settings)


# ---- refusals


def test_a_run_with_another_reward_names_the_way_out(tmp_path):
    """A judge that the run had not, given as an override."""
    world = ROOT / "assets" / "tiny_world"
    settings = ["reward.name=motion", "reward.reward_model_path=null", "reward.held_out_model_path=null"]
    settings += ["reward.motion_weight=0", "data.num_frames=5", f"model.model_paths={world}/pipeline"]
    cfg = config.load(str(ROOT / "configs" / "tiny_flow_grpo.yaml"), settings, config.FlowGrpoConfig)
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_dict(cfg)}))
    shutil.copytree(world / "supervised", tmp_path / "checkpoints" / "latest")
    data.write_video(tmp_path / "nobody.mp4", torch.full((5, 64, 64, 3), 90, dtype=torch.uint8), 8)
    (tmp_path / "metadata.csv").write_text("video,prompt\nnobody.mp4,x\n")
    command = ["--run", tmp_path, "--data", tmp_path / "metadata.csv", "--device", "cpu"]
    for words, said in (
        ([], "--judge NAME=FOLDER"),
        ([f"reward.held_out_model_path={world}/faces/judge"], "shows a face"),  # it has looked for one
        (["--strengths", "0.5", "--adapter", "x:2"], "--strengths"),
        (["--adapter", "nowhere"], "name a checkpoint with --adapter"),
        (["--device", "cuda:99"], "error: --device"),
    ):
        assert said in run_tool(evaluate.main, *command, *words, expect=2)


@pytest.mark.parametrize(
    "words",
    [
        ["--strengths", "a"], ["--strengths", "inf"], ["--steps", "0"], ["--seeds", "0"],
        ["--batch", "0"], ["--periods", "8,,16"], ["--adapter", "x:1e999"], ["--config", "x"],
        ["--judge", "look=x"], ["--judge", "Big=x"], ["--judge", "fr_feature"], ["--judge", "a=x", "--judge", "a=y"],
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_at_once(words):
    source = [] if words[0] == "--config" else ["--run", "x"]
    (line,) = run_tool(evaluate.main, "--data", "x", *source, *words, expect=2).splitlines()
    assert line.startswith("error: ") and words[0] in line


@pytest.mark.parametrize("content", [None, "[1]", "{}", '{"config": {"model": 3}}', '{"conf', "\xff"])
def test_a_damaged_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    said = run_tool(evaluate.main, "--data", "x", "--run", tmp_path, "--device", "cpu", expect=2)
    assert said.startswith("error: ")


@pytest.mark.parametrize("text", ["null", "{}", '{"row": 1, "arm": "base"}', "[" * 100_000])
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "records.jsonl").write_text(f"{json.dumps(record('a', 'base'))}\n{text}\n")
    with pytest.raises(InputError, match=r"records\.jsonl: line 2 is not a record; .*--overwrite"):
        read_records(tmp_path)


def test_settings_know_the_rows():
    rows = data.load_metadata(ROOT / "assets" / "tiny_world" / "eval" / "metadata.csv")[:2]
    settings, other = (judge_videos.make_settings({}, part, ARMS[:1], {}, {}) for part in (rows, rows[:1]))
    assert describe_difference(settings, other).startswith("data: --data was")
