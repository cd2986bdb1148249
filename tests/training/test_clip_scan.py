"""What the processes of a run share of reading the data: one process here is a thread that gathers with the others."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image

from rewardfl import config, data, files
from rewardfl.data import clips, metadata
from rewardfl.data.cache import Cache
from rewardfl.rewards import FaceIdentityReward, Reward
from rewardfl.rewards.base import PhotoError
from rewardfl.rewards.face import parity as face_parity
from rewardfl.training import clip_scan, saving, setup_data, setup_rewards
from rewardfl.training import shard as shard_module


class Brightness(Reward):
    """Keeps the mean of the clip; of nothing but black it keeps nothing."""

    name, differentiable, nothing_found = "brightness", True, "all is black in"

    def __init__(self, uses_prompt=False):
        super().__init__()
        self.uses_prompt, self.asked = uses_prompt, []

    def reference(self, video, prompt=""):
        self.asked.append(prompt)
        return {"mean": video.mean()} if video.mean() > -0.9 else None


def together(count, work):
    """[what work(job) returned or raised] of `count` processes that gather from each other; job.said: what they say."""
    barrier, offered, results = threading.Barrier(count, timeout=60), [None] * count, [None] * count

    def process(rank):
        def gather(mine):
            offered[rank] = mine
            barrier.wait()
            everyones = [one for part in offered for one in part]
            barrier.wait()
            return everyones

        def by_main(decide, refusal):
            answers = []
            if rank == 0:
                try:
                    answers.append((decide(), None))
                except refusal as error:
                    answers.append((None, error))
            ((found, refused),) = gather(answers)
            if refused:
                raise refused
            return found

        try:
            said, share = [], shard_module.Shard(rank, count, quiet=True)
            job = SimpleNamespace(shard=share, gather_lists=gather, device=torch.device("cpu"), said=said)
            job.print, job.wait, job.run_on_main = said.append, lambda: None, by_main
            results[rank] = work(job)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def grey(path, level, num_frames=5):
    data.write_video(path, torch.full((num_frames, 32, 48, 3), level, dtype=torch.uint8), fps=8)


@pytest.fixture
def counted(monkeypatch):
    """How often each file is hashed, decoded, and opened as a picture."""
    counts = {"sha256": Counter(), "_decode_frames": Counter(), "read_picture": Counter()}

    def count(module, name):
        function = getattr(module, name)

        def counting(path):
            counts[name][path.name] += 1
            return function(path)

        monkeypatch.setattr(module, name, counting)

    for module, name in ((files, "sha256"), (clips, "_decode_frames"), (metadata, "read_picture")):
        count(module, name)
    return counts


@pytest.fixture
def cfg(tmp_path):
    """Five clips in eight rows: two of one clip, another with a picture, and the same files in another order."""
    for i in range(5):
        grey(tmp_path / f"{i}.mp4", 40 * i + 40)
    Image.fromarray(np.full((32, 48, 3), 99, dtype=np.uint8)).save(tmp_path / "a.png")
    lines = [
        "0.mp4,x,,", "1.mp4,x,,", "0.mp4,another,,", "2.mp4,x,a.png,", "3.mp4,x,,4.mp4", "2.mp4,y,a.png,", "4.mp4,x,,",
        "0.mp4,x,,",
    ]  # fmt: skip
    (tmp_path / "metadata.csv").write_text("\n".join(["video,prompt,image,reference_video", *lines]) + "\n")
    return of(tmp_path)


def of(folder, **settings):
    sizes = {"file_name": str(folder / "metadata.csv"), "height": 32, "width": 48, "num_frames": 5}
    return SimpleNamespace(
        data=config.DataConfig(**sizes | settings),
        rewards=(),
        supervised=False,
        processes_per_clip=1,
        run=SimpleNamespace(output_dir=str(folder / "run"), sample_videos=3, seed=0),
        anchor=config.AnchorConfig(),
    )


def find(cfg, processes, store, rewards, limits=dict):
    """Every process's (samples, problems)."""
    terms = [SimpleNamespace(reward=reward, key="reward", weight=1.0) for reward in rewards]

    def work(job):
        rows = setup_data.scan_rows(cfg, job, SimpleNamespace(takes_image=True, frame_rate=8, prompt_limits=limits))
        return setup_data.find_samples(cfg.data, rows.train, terms, store, job), rows.messages + job.said

    return together(processes, work)


def plain(samples):
    """Samples in words, to compare."""
    references = [[ref and {k: v.tolist() for k, v in ref.items()} for ref in one.references] for one in samples]
    return [(one.row, one.clip, one.size, refs) for one, refs in zip(samples, references, strict=True)]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_file_is_hashed_once_and_each_clip_decoded_once(cfg, counted, tmp_path, processes):
    rewards = [Brightness(), Brightness(uses_prompt=True)]
    rewards[1].name = "reader"
    results = find(cfg, processes, Cache(tmp_path / "cache"), rewards)
    once = dict.fromkeys([*(f"{i}.mp4" for i in range(5)), "a.png"], 1)
    assert counted["sha256"] == once
    # 4.mp4 is a clip, and another's reference
    assert counted["_decode_frames"] == {"0.mp4": 1, "1.mp4": 1, "2.mp4": 1, "3.mp4": 1, "4.mp4": 2}
    assert counted["read_picture"] == {"a.png": 1}
    assert len(rewards[0].asked) == 5 and len(rewards[1].asked) == 7  # of a clip; of a clip and a prompt
    for samples, said in results:
        assert plain(samples) == plain(results[0][0]) and said == []
        assert [sample.row.line for sample in samples] == [2, 3, 4, 5, 6, 7, 8, 9]
    # and with all of it in the cache nothing is decoded, whatever the number of processes
    for counter in counted.values():
        counter.clear()
    for samples, _ in find(cfg, 2, Cache(tmp_path / "cache"), rewards):
        assert plain(samples) == plain(results[0][0])
    assert counted["sha256"] == once and not counted["_decode_frames"] and not counted["read_picture"]


def test_samples_are_what_was_read(cfg, tmp_path):
    limits = {ROOT / "assets" / "tiny_world" / "pipeline" / "tokenizer": 3}  # the one word "another" has more tokens
    ((samples, (note,)),) = find(cfg, 1, Cache(tmp_path / "cache"), [Brightness()], lambda: limits)
    assert note.startswith("note: data.file_name (") and "1 of 8 rows have a prompt of more tokens than the 3" in note
    store = Cache(tmp_path / "cache")
    for sample in samples:
        example = data.load_example(sample.row, 32, 48, 5)
        assert torch.equal(shard_module.read_entry(store, sample.clip)["image"], example.image) and sample.size == (
            32,
            48,
        )
        assert sample.references[0]["mean"] == example.reference.mean()
        assert sample.clip["video"] == files.sha256(sample.row.video)


def test_a_row_of_its_own_size_has_another_key(cfg):
    row = data.Row(index=0, line=2, id="a", video=None, prompt="x", size=(32, 64))
    key = clip_scan.clip_key(row, {}, {"height": 48, "width": 48, "num_frames": 1, "max_pixels": None, "fps": None})
    assert (key["height"], key["width"]) == (32, 64)


def test_every_problem_is_found_and_every_process_knows(cfg, tmp_path, monkeypatch):
    """What the headers show, what reading shows, what the reward shows, and a file that vanishes in between."""
    grey(tmp_path / "short.mp4", 99, num_frames=3)
    grey(tmp_path / "black.mp4", 0)
    grey(tmp_path / "gone.mp4", 99)
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])  # its header is left
    with (tmp_path / "metadata.csv").open("a") as file:
        file.write("short.mp4,x\nblack.mp4,x\n4.mp4,\ngone.mp4,x\n")
    read_all = shard_module.map_shared

    def then_remove(*arguments):
        looks = read_all(*arguments)
        if arguments[-1] == "headers":
            (tmp_path / "gone.mp4").unlink(missing_ok=True)
        return looks

    monkeypatch.setattr(setup_data, "map_shared", then_remove)
    for error in find(cfg, 2, Cache(tmp_path / "cache"), [Brightness()]):
        assert isinstance(error, data.DataError) and "data.file_name (" in str(error) and "2 of 12 rows" in str(error)
        assert all(words in str(error) for words in ("line 10: ", "line 12: empty prompt", "data.skip_bad_rows"))
    grey(tmp_path / "gone.mp4", 99)
    skipping = of(tmp_path, skip_bad_rows=True)
    for samples, said in find(skipping, 2, Cache(tmp_path / "cache"), [Brightness()]):
        assert [sample.row.line for sample in samples] == [2, 3, 4, 6, 8, 9]
        lines = [line.removeprefix("skipped: ").split(":")[0] for line in said]
        assert lines == ["line 10", "line 12", "note", "lines 5, 7 (2 rows)", "line 11", "line 13"]
        assert "2 of 12 rows" in said[2]
        assert "all is black in" in said[4] and "gone.mp4: cannot be read" in said[5]


class Bright(Brightness):
    """Compares with photos, and refuses dark ones."""

    compares_with = "picture"

    def reference_from_photos(self, photos, prompt=""):
        if dark := {i: "is dark" for i, photo in enumerate(photos) if photo.mean() < 0}:
            raise PhotoError(dark)
        return {"count": len(photos)}

    def with_motion(self, reference, video, prompt=""):
        return reference | {"motion": video.shape[1]}


@pytest.mark.parametrize("levels, image, count, bad", [
    ([1, 1, 1], 0, 2, []), ([1, 1, 1], None, 3, []), ([1, -1, 1], None, 2, [1]), ([-1, -1], None, None, [0, 1]),
    ([-1, 1, 1], 0, 2, [2]),  # the model's input is checked, and not compared with
    ([1, 1, -1], 0, 1, [1]), ([], None, None, []),
])  # fmt: skip
def test_dark_photos_are_named_and_left_out(levels, image, count, bad):
    """bad: places in the row's pictures, of which the model's input is the last."""
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


def test_the_file_that_is_named_is_the_one_that_was_read(cfg):
    cfg.data = config.DataConfig(**vars(cfg.data) | {"num_frames": 6})
    with pytest.raises(data.DataError, match=r"evaluation.eval_clips \(.*\): 8 of 8 rows"):
        rows = data.load_metadata(cfg.data.file_name, "evaluation.eval_clips")
        job = SimpleNamespace(shard=shard_module.Shard(0, 1, quiet=True), gather_lists=list)
        setup_data._scan_table(cfg, rows, job, SimpleNamespace(takes_image=True, frame_rate=8, prompt_limits=dict))


# ---- the start-up check of face packs


class Face(FaceIdentityReward):
    """A face reward without networks."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.identity = SimpleNamespace(files=(), second=None)


def check_packs(cfg, processes, reward):
    sample = SimpleNamespace(row=data.load_metadata(cfg.data.file_name)[0])
    terms = [SimpleNamespace(reward=reward, key="reward.reward_model_path")]

    def work(job):
        return setup_rewards.check_face_packs(cfg.data, terms, [sample], job)

    return together(processes, work)


def test_a_second_recogniser_is_recorded_under_its_own_key(cfg, monkeypatch, tmp_path):
    """Published packs name their recognisers alike."""
    first, second = (tmp_path / name / "glintr100.onnx" for name in ("first", "second"))
    for file in (first, second):
        file.parent.mkdir()
        file.write_text(file.parent.name)
    reward = Face()
    reward.identity = SimpleNamespace(files=(first,), second=SimpleNamespace(file=second))
    monkeypatch.setattr(face_parity, "check_packs", lambda packs, clip: [])
    ((hashes, said),) = check_packs(cfg, 1, reward)
    assert {key: list(files) for key, files in hashes.items()} == {
        key: ["glintr100.onnx"] for key in ("reward.reward_model_path", "reward.second_model_path")
    }
    assert len({files["glintr100.onnx"] for files in hashes.values()}) == 2
    assert [line.split(":")[0] for line in said][:2] == ["reward.reward_model_path", "reward.second_model_path"]


def test_one_process_asks_insightface_and_all_hear(cfg, monkeypatch, counted):
    asked = []
    monkeypatch.setattr(face_parity, "check_packs", lambda packs, clip: asked.append(clip.shape) or ["the same"])
    results = check_packs(cfg, 3, Face())
    assert results == [({"reward.reward_model_path": {}}, ["the same"])] * 3
    assert asked == [(3, 5, 32, 48)] and sum(counted["_decode_frames"].values()) == 1


@pytest.mark.parametrize("error", [face_parity.FaceParityError("another face"), data.DataError("cannot be decoded")])
def test_a_pack_that_is_refused_stops_all_processes(cfg, monkeypatch, error):
    def refuse(packs, clip):
        raise error

    monkeypatch.setattr(face_parity, "check_packs", refuse)
    assert [(type(one), str(one)) for one in check_packs(cfg, 2, Face())] == [(type(error), str(error))] * 2


def test_without_a_face_reward_nothing_is_read(cfg, counted):
    assert check_packs(cfg, 2, Brightness()) == [({}, [])] * 2
    assert not counted["_decode_frames"]


# ---- sample videos


def test_a_sample_video_whose_clip_is_lost_is_left_out(cfg, tmp_path, capsys):
    """All processes generate as often as before, and the other videos are written."""
    ((samples, _),) = find(cfg, 1, Cache(tmp_path / "cache"), [Brightness()])
    samples = [samples[0], samples[1], samples[3]]
    (tmp_path / "0.mp4").write_text("not a video any more")
    data.write_video(tmp_path / "1.mp4", torch.zeros(5, 96, 48, 3, dtype=torch.uint8), fps=8)  # another shape
    cfg.data = config.DataConfig(**vars(cfg.data) | {"max_pixels": 32 * 48})
    asked = []

    def generate(row):
        asked.append(row)
        return row, torch.zeros(3, 5, 32, 48), torch.zeros(1)

    model = SimpleNamespace(frame_rate=16)
    folders = together(2, lambda job: saving.sample_videos(cfg.run, cfg.data, model, samples, generate, job, 7))
    assert folders == [tmp_path / "run" / "samples" / "step-000007"] * 2
    assert sorted(asked) == [0, 0, 1, 2] and [path.name for path in folders[0].iterdir()] == ["02.mp4"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("warning: step 7: ") for line in said)
    for name in ("00.mp4", "01.mp4"):
        assert sum(name in line for line in said) == 1
    assert data.read_video(folders[0] / "02.mp4").shape == (5, 32, 96, 3)
