"""What is read of each file once: hashes, references, problems, and the packs of the start-up check."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

from rewardfl import config, data, files
from rewardfl.data import clips
from rewardfl.data.cache import Cache
from rewardfl.rewards import FaceIdentityReward, Reward
from rewardfl.rewards.base import PhotoError
from rewardfl.rewards.face import parity as face_parity
from rewardfl.training import clip_scan, setup_data, setup_rewards
from rewardfl.training.shard import Shard, read_entry

LINES = [
    "0.mp4,x,,", "1.mp4,x,,", "0.mp4,another,,", "2.mp4,x,a.png,", "3.mp4,x,,4.mp4", "2.mp4,y,a.png,", "4.mp4,x,,",
    "0.mp4,x,a.png,", "0.mp4,x,,",
]  # fmt: skip
SIZE = {"height": 32, "width": 48, "num_frames": 5}


class Brightness(Reward):
    """Stores the mean of the clip; nothing of a black one."""

    name, differentiable, nothing_found = "brightness", True, "all is black in"

    def __init__(self, uses_prompt=False):
        super().__init__()
        self.uses_prompt, self.prompts = uses_prompt, []

    def reference(self, video, prompt=""):
        self.prompts.append(prompt)
        return {"mean": video.mean()} if video.mean() > -0.9 else None


def one_process():
    """Return the job of one process, with what it prints."""
    printed = []
    return SimpleNamespace(
        shard=Shard(0, 1, quiet=True), gather_lists=list, device=torch.device("cpu"), printed=printed,
        print=printed.append, run_on_main=lambda decide, _refusal: decide(),
    )  # fmt: skip


def grey(path, level, num_frames=5):
    data.write_video(path, torch.full((num_frames, 32, 48, 3), level, dtype=torch.uint8), fps=8)


@pytest.fixture
def counted(monkeypatch):
    """Count how often each file is hashed, decoded, and opened as a picture."""
    counts = {"sha256": Counter(), "_decode_frames": Counter(), "read_picture": Counter()}

    def count(module, name):
        function = getattr(module, name)

        def counting(source, *arguments):
            counts[name][Path(getattr(source, "name", source)).name] += 1
            return function(source, *arguments)

        monkeypatch.setattr(module, name, counting)

    for module, name in ((files, "sha256"), (clips, "_decode_frames"), (clips, "read_picture")):
        count(module, name)
    return counts


@pytest.fixture
def plan(tmp_path):
    """Five clips in nine rows: several of one clip, others with a picture, and the same files in another order."""
    for i in range(5):
        grey(tmp_path / f"{i}.mp4", 40 * i + 40)
    Image.fromarray(np.full((32, 48, 3), 99, dtype=np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("\n".join(["video,prompt,image,reference_video", *LINES]) + "\n")
    return make_plan(tmp_path)


def make_plan(folder, **settings):
    return SimpleNamespace(
        data=config.DataConfig(file_name=str(folder / "metadata.csv"), **SIZE, **settings), rewards=(),
        supervised=False, pairs=False, processes_per_clip=1, run=SimpleNamespace(seed=0), anchor=config.AnchorConfig(),
    )  # fmt: skip


def find_samples(plan, store, rewards, limits=dict):
    """Return the samples and the messages."""
    terms = [SimpleNamespace(reward=reward, key="reward", weight=1.0, decides=True) for reward in rewards]
    job = one_process()
    rows = setup_data.scan_rows(plan, job, SimpleNamespace(takes_image=True, frame_rate=8, prompt_limits=limits))
    return setup_data.find_samples(plan.data, rows.train, terms, store, job), rows.messages + job.printed


def plain(samples):
    """Return samples that can be compared."""
    references = [[ref and {k: v.tolist() for k, v in ref.items()} for ref in sample.references] for sample in samples]
    return [(sample.row, sample.clip, sample.size, refs) for sample, refs in zip(samples, references, strict=True)]


def test_each_file_is_hashed_once_and_each_clip_decoded_once(plan, counted, tmp_path):
    rewards = [Brightness(), Brightness(uses_prompt=True)]
    rewards[1].name = "reader"
    samples, messages = find_samples(plan, Cache(tmp_path / "cache"), rewards)
    once = dict.fromkeys([*(f"{i}.mp4" for i in range(5)), "a.png"], 1)
    assert counted["sha256"] == once and messages == []
    # 4.mp4 is a clip, and another's reference; 0.mp4 is also with a picture
    decoded = {"0.mp4": 2, "1.mp4": 1, "2.mp4": 1, "3.mp4": 1, "4.mp4": 2}
    assert counted["_decode_frames"] == decoded and counted["read_picture"] == {"a.png": 2}
    assert len(rewards[0].prompts) == 6 and len(rewards[1].prompts) == 8  # once a clip; once a clip and a prompt
    assert [sample.row.line for sample in samples] == [*range(2, 11)]
    for counter in counted.values():
        counter.clear()
    cached, _ = find_samples(plan, Cache(tmp_path / "cache"), rewards)
    assert plain(cached) == plain(samples)
    assert counted["sha256"] == once and not counted["_decode_frames"] and not counted["read_picture"]
    # two processes decode each clip once, and store the same
    rows, store = [sample.row for sample in samples], Cache(tmp_path / "other")
    keys, load = {sample.row.line: sample.clip for sample in samples}, partial(data.load_example, **SIZE)
    scans = [
        scan
        for rank in range(2)
        for scan in clip_scan.scan_clips(
            store, rows, keys, load, rewards, torch.device("cpu"), Shard(rank, 2, quiet=True), skip_photos=False
        )
    ]
    assert counted["_decode_frames"] == decoded
    assert plain(clip_scan.load_samples(store, rows, keys, scans, rewards)) == plain(samples)


def test_samples_are_the_content_of_the_files(plan, tmp_path):
    limits = {ROOT / "assets" / "tiny_world" / "pipeline" / "tokenizer": 3}  # the one word "another" has more tokens
    samples, (note,) = find_samples(plan, Cache(tmp_path / "cache"), [Brightness()], lambda: limits)
    assert note.startswith("note: data.file_name (") and "1 of 9 rows have a prompt of more tokens than the 3" in note
    store = Cache(tmp_path / "cache")
    for sample in samples:
        example = data.load_example(sample.row, 32, 48, 5)
        assert torch.equal(read_entry(store, sample.clip)["image"], example.image)
        assert sample.size == (32, 48) and sample.references[0]["mean"] == example.reference.mean()
        assert sample.clip["video"] == files.sha256(sample.row.video)


def test_a_row_of_its_own_size_has_another_key():
    row = data.Row(index=0, line=2, id="a", video=None, prompt="x", size=(32, 64))
    key = clip_scan.clip_key(row, {}, {"height": 48, "width": 48, "num_frames": 1, "max_pixels": None, "fps": None})
    assert (key["height"], key["width"]) == (32, 64)


def test_every_problem_is_named_or_skipped(plan, tmp_path):
    """Found in a header, by a decoder and by the reward."""
    grey(tmp_path / "short.mp4", 99, num_frames=3)
    grey(tmp_path / "black.mp4", 0)
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])  # its header is left
    with (tmp_path / "metadata.csv").open("a") as file:
        file.write("short.mp4,x\nblack.mp4,x\n4.mp4,\n")
    with pytest.raises(data.DataError, match=r"data.file_name \(.*2 of 12 rows.*data.skip_bad_rows") as error:
        find_samples(plan, Cache(tmp_path / "cache"), [Brightness()])
    assert "line 11: " in str(error.value) and "line 13: empty prompt" in str(error.value)

    skipping = make_plan(tmp_path, skip_bad_rows=True)
    samples, messages = find_samples(skipping, Cache(tmp_path / "cache"), [Brightness()])
    assert [sample.row.line for sample in samples] == [2, 3, 4, 6, 8, 10]
    lines = [line.removeprefix("skipped: ").split(":")[0] for line in messages]
    assert lines == ["line 11", "line 13", "note", "lines 5, 7, 9 (3 rows)", "line 12"]
    assert "2 of 12 rows" in messages[2] and "all is black in" in messages[4]


class Bright(Brightness):
    """Compares with photos, and refuses dark ones."""

    compares_with = "picture"

    def reference_from_photos(self, photos, prompt=""):
        if dark := {i: "is dark" for i, photo in enumerate(photos) if photo.mean() < 0}:
            raise PhotoError(dark)
        return {"count": len(photos)} if photos[0].mean() < 2 else None

    def with_motion(self, reference, video, prompt=""):
        return reference | {"motion": video.shape[1]}


@pytest.mark.parametrize("levels, image, count, bad", [
    ([1, 1, 1], 0, 2, []), ([1, 1, 1], None, 3, []), ([1, -1, 1], None, 2, [1]), ([-1, -1], None, None, [0, 1]),
    ([-1, 1, 1], 0, 2, [2]),  # the model's input is checked, and not compared with
    ([1, 1, -1], 0, 1, [1]), ([], None, None, []),
    ([3, 3], None, None, []),  # without a reason
])  # fmt: skip
def test_dark_photos_are_named_and_left_out(levels, image, count, bad):
    """bad: places in the row's pictures; the model's input is the last."""
    paths = tuple(Path(f"{i}.png") for i in range(len(levels)))
    row = data.Row(
        index=0, line=2, id="a", prompt="x", video=None, photos=paths, image=None if image is None else paths[image]
    )
    by_path = dict(zip(paths, [torch.full((3, 4, 4), float(level)) for level in levels], strict=True))
    photos = [by_path[path] for path in row.checked_pictures]
    reference, problems = clip_scan.make_reference(Bright(), row, torch.full((3, 0, 4, 4), -1.0), photos)
    assert problems == dict.fromkeys(bad, "is dark") and (reference and reference["count"]) == count
    filmed = replace(row, video=Path("a.mp4"))
    if count:
        reference, _ = clip_scan.make_reference(Bright(), filmed, torch.ones(3, 5, 4, 4), photos)
        assert reference == {"count": count, "motion": 5}


# ---- the start-up check of face packs


class Face(FaceIdentityReward):
    """A face reward without networks."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.identity = SimpleNamespace(files=(), second=None)


def check_packs(plan, reward):
    sample = SimpleNamespace(row=data.load_metadata(plan.data.file_name)[0])
    terms = [SimpleNamespace(reward=reward, key="reward.reward_model_path")]
    return setup_rewards.check_face_packs(plan.data, terms, [sample], one_process())


def test_face_packs_are_compared_on_the_first_clip(plan, monkeypatch, tmp_path, counted):
    """A second recogniser is recorded under its key: published packs name their recognisers alike."""
    shapes = []
    monkeypatch.setattr(face_parity, "check_packs", lambda packs, clip: shapes.append(clip.shape) or ["the same"])
    first, second = (tmp_path / name / "glintr100.onnx" for name in ("first", "second"))
    for file in (first, second):
        file.parent.mkdir()
        file.write_text(file.parent.name)
    reward = Face()
    reward.identity = SimpleNamespace(files=(first,), second=SimpleNamespace(file=second))
    hashes, messages = check_packs(plan, reward)
    keys = ["reward.reward_model_path", "reward.second_model_path"]
    assert {key: list(names) for key, names in hashes.items()} == dict.fromkeys(keys, ["glintr100.onnx"])
    assert len({names["glintr100.onnx"] for names in hashes.values()}) == 2
    lines = [line.split(":")[0] for line in messages]
    assert lines[:2] == keys and lines[-1] == "the same"
    assert shapes == [(3, 5, 32, 48)] and sum(counted["_decode_frames"].values()) == 1
    assert check_packs(plan, Brightness()) == ({}, []) and len(shapes) == 1  # without a face reward
