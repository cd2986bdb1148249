"""tools/evaluate.py on a run of the tiny world: stopped and resumed, arms, videos of other tools, processes, memory."""

import argparse
import base64
import contextlib
import gc
import json
import shutil
import weakref

import pytest
import torch
from conftest import ROOT, run_python, run_tool
from runs import CONFIG, QUICK, environment, launch, table
from safetensors.torch import save_file

from rewardfl import data, lora
from rewardfl.data.clips import read_video_header
from rewardfl.evaluation import arms
from rewardfl.evaluation.records import Writer
from rewardfl.files import digest_files
from rewardfl.outputs import Folder
from rewardfl_tools import evaluate

pytestmark = pytest.mark.slow(40)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step, and a table of two people beside it."""
    folder = tmp_path_factory.mktemp("run")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    table(folder / "metadata.csv", "eval", 2)
    return folder


SAME = ("--strengths", "0,1", "--steps", "4,2")


def words(run, out, *more):
    return ["--run", str(run / "run"), "--data", str(run / "metadata.csv"), "--seeds", "2",
            "--out", str(out), "--batch", "2", "--device", "cpu", *more]  # fmt: skip


SIZES = [word for word in QUICK if word.startswith("data.") and "file_name" not in word]


def source(folder):
    """Arguments for another tool's videos of the folder's table."""
    return ["--config", CONFIG, "--data", folder / "metadata.csv", "--device", "cpu"]


def call(arguments, expect=0):
    with contextlib.chdir(ROOT):
        return run_tool(evaluate.main, *arguments, expect=expect)


def left(out):
    """What an evaluation leaves, apart from how it was called."""
    report = json.loads((out / "report.json").read_text())
    del report["command"]
    return report, (out / "records.jsonl").read_text(), (out / "grid.png").read_bytes()


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    """An evaluation that nothing stops, of two strengths and two step counts."""
    out = tmp_path_factory.mktemp("straight") / "out"
    call(words(run, out, *SAME))
    return out


def test_arms_share_their_noises(straight):
    """At strength 0 an adapter is the base, to the last figure; other steps and strengths are other videos."""
    report, records, _ = left(straight)
    by_name = {arm["name"]: arm for arm in report["arms"]}
    assert [*by_name] == ["base", "latest_x0", "latest", "base_2steps", "latest_x0_2steps", "latest_2steps"]
    for tail in ("", "_2steps"):
        base, off, on = (by_name[name + tail]["figures"] for name in ("base", "latest_x0", "latest"))
        assert base == off and base != on
    assert by_name["base"]["figures"] != by_name["base_2steps"]["figures"]
    assert len(records.splitlines()) == 2 + 6 * 4 and report["clips"] == 4
    page = (straight / "report.html").read_text()
    assert page.count('src="data:video/mp4') == 4 * 7 and "latest_x0_2steps" in page  # the real clip and six arms
    assert (straight / "videos" / "latest_2steps" / "001_seed1.mp4").is_file()
    assert not (straight / "prepared").exists()


def test_stopped_and_resumed_is_as_if_nothing_had_happened(run, straight, tmp_path, monkeypatch):
    add, count, videos = Writer.add, [], 3

    def stop(self, record):
        count.append(record)
        if len(count) > videos:
            raise KeyboardInterrupt
        add(self, record)

    arguments = words(run, tmp_path, *SAME)
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "add", stop)
        assert call(arguments, expect=130).endswith("\ninterrupted\n")
    known = (tmp_path / "records.jsonl").read_text()
    assert len(known.splitlines()) == videos
    call(arguments)
    assert left(tmp_path) == left(straight)


def test_what_is_known_is_not_sampled_again_and_others_are_refused(run, straight, monkeypatch):
    before = left(straight)
    with monkeypatch.context() as patch:
        patch.setattr(arms, "load_model", None)  # whoever asks for it fails
        call(words(run, straight, *SAME))
        assert left(straight) == before
        said = call(words(run, straight, "sample.shift=3"), expect=2)
        assert "sample.shift was 5.0, and is 3.0" in said and "--overwrite" in said
        assert "--periods was 8 16, and is 4" in call(words(run, straight, "--periods", "4"), expect=2)
    assert left(straight) == before


@pytest.fixture
def copied(straight, tmp_path):
    """A finished evaluation that a test may damage."""
    return shutil.copytree(straight, tmp_path / "out")


def all_files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "rewardfl.lock"}


def test_overwrite_removes_what_the_evaluation_wrote(run, copied, monkeypatch):
    """And nothing else: no clips next to its own. Edits of its own files are lost."""
    mine = [copied / name for name in ("videos/holiday.mp4", "prepared/thesis.txt", "notes.txt")]
    for path in (*mine, copied / "videos" / "latest_x0" / "000_seed0.mp4"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    monkeypatch.setattr(arms, "load_model", stop)
    call(words(run, copied, "sample.shift=3", "--overwrite"), expect=130)
    assert all(path.read_text() == "mine" for path in mine)
    files = {str(path.relative_to(copied)) for path in all_files(copied / "videos")}
    assert files == {"videos/holiday.mp4", "videos/real/000.mp4", "videos/real/001.mp4"}


def stop(*_):
    raise KeyboardInterrupt


def test_no_input_is_written(run, copied):
    before = all_files(copied)
    videos = ["--videos", copied / "videos" / "base"]
    for out, inputs in ((copied, videos), (copied / "videos" / "base" / "x", videos), (run, []), (run / "run", [])):
        said = call(words(run, out, *inputs, "--overwrite"), expect=2)
        assert said.startswith(f"error: --out {out} is, contains or is inside the input")
    assert all_files(copied) == before


def test_one_evaluation_works_in_a_folder(run, copied):
    with Folder(copied, overwrite=False).locked():
        assert "another process" in call(words(run, copied, *SAME), expect=2)


def test_a_record_names_no_file_of_its_own(run, straight, copied, tmp_path):
    """An edited record cannot bring another file into the page."""
    (tmp_path / "secret.mp4").write_text("secret")
    records = copied / "records.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for line, file in zip(lines, ("../secret.mp4", str(tmp_path / "secret.mp4"), "settings.json"), strict=False):
        line["file"] = file
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    call(words(run, copied, *SAME))
    assert left(copied)[0] == left(straight)[0]
    page = (copied / "report.html").read_text()
    assert "secret" not in page and base64.b64encode(b"secret").decode() not in page


def test_the_start_is_an_arm(run, tmp_path):
    """In another tool's names; the start is the run's own adapter, so its videos are the run's."""
    folder, start, out = (tmp_path / name for name in ("run", "kohya.safetensors", "out"))
    shutil.copytree(run / "run", folder)
    tensors = {}
    for name, update in lora.read_lora(folder / "checkpoints" / "latest")[0].updates.items():
        for role, factor in zip(("up", "down"), update.factors, strict=True):
            tensors[f"lora_unet_{name.replace('.', '_')}.lora_{role}.weight"] = lora.load_tensor(factor)
    save_file(tensors, start)
    record = json.loads((folder / "run.json").read_text())
    record["config"]["lora"]["init_from"] = str(start)
    record["init_from"] = {"low_noise": digest_files([start])}
    (folder / "run.json").write_text(json.dumps(record))
    arguments = ["--run", folder, *words(run, out, "--seeds", "1")[2:]]
    (bad := tmp_path / "bad" / "transformer_2").mkdir(parents=True)
    save_file({name: value / 0 for name, value in tensors.items()}, bad / lora.WEIGHTS_NAME)
    assert "nan or infinite" in call([*arguments, "--adapter", bad.parent], expect=2) and not out.exists()
    text = call(arguments)
    base, begin, latest = left(out)[0]["arms"]
    assert (base["name"], begin["name"], latest["name"]) == ("base", "start", "latest")
    assert begin["figures"] == latest["figures"] != base["figures"]
    assert f"more than the run's start, {start} cannot be told" in text
    assert "While it trained" in (out / "report.html").read_text()
    save_file({name: 2 * value for name, value in tensors.items()}, start)
    assert "has changed since" in call(arguments, expect=2)
    start.unlink()
    text = call(arguments, expect=2)
    assert f"lora.init_from: {start}: no such file or folder" in text and "lora.init_from=null" in text
    call([*arguments, "lora.init_from=null"])
    assert [arm["name"] for arm in left(out)[0]["arms"]] == ["base", "latest"]
    only_videos = argparse.Namespace(config=None, run=folder, overrides=[], data="x", videos=[out], adapter=None)
    assert arms.load_config(only_videos).lora.init_from is None


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_clips(run, tmp_path, monkeypatch):
    """While a batch is sampled, the one before it is alive at most."""
    videos, alive, sample = [], [], arms.Sampler.sample

    def watched(*arguments):
        batch = sample(*arguments)
        gc.collect()
        alive.append(sum(video() is not None for video in videos))
        videos.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(arms.Sampler, "sample", watched)
    call(words(run, tmp_path, "--batch", "1"))
    assert len(videos) == 8 and max(alive) <= 1


def test_videos_of_other_tools_need_no_model(run, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "load_model", None)
    videos = [word for name in ("base", "latest") for word in ("--videos", straight / "videos" / name)]
    settings = [*SIZES, "model.model_name=wan2_2_ti2v_text", "data.fps=null"]
    said = call([*source(run), *settings, "--out", tmp_path, *videos])
    assert read_video_header(tmp_path / "videos" / "real" / "000.mp4", 5).rate == 24
    report, made = left(tmp_path)[0], left(straight)[0]
    assert "decoded from mp4" in said
    assert [arm["decoded"] for arm in report["arms"]] == [True, True] and report["clips"] == 4
    assert report["arms"][1]["against"] == report["arms"][0]["name"]
    mine, theirs = (one["arms"][0]["figures"]["held_out/face_sim"]["mean"] for one in (report, made))
    assert mine == pytest.approx(theirs, abs=0.1) and mine != theirs  # the codec's part


def test_everybody_is_a_column_where_everybody_is_trained(run, tmp_path):
    """Two people side by side; as they are, and with one of them in the other's place, whose likeness then counts 0."""
    (one, other) = (data.read_video(row.video) for row in data.load_metadata(run / "metadata.csv"))
    for name, pair in (("real", (one, other)), ("both/000", (one, other)), ("twice/000", (one, one))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data.write_video(tmp_path / f"{name}.mp4", torch.cat(pair, 2), 8)
    (tmp_path / "metadata.csv").write_text("video,prompt\nreal.mp4,two people\n")
    videos = [word for name in ("both", "twice") for word in ("--videos", tmp_path / name)]
    settings = ["data.width=128", "reward.det_size=256", "reward.people=all"]
    call([*source(tmp_path), "--out", tmp_path / "out", *videos, *settings])
    both, twice = (arm["figures"]["rewards/everybody"]["mean"] for arm in left(tmp_path / "out")[0]["arms"])
    assert both > 0.7 and twice == pytest.approx(both / 2, abs=0.15)  # the other one is 0.2 alike


@pytest.mark.long
def test_two_processes_are_as_one(run, straight, tmp_path):
    start = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--"]  # torchrun has a --run-path
    arguments = ["tools/evaluate.py", *words(run, tmp_path, *SAME)]
    done = run_python([*start, *arguments], cwd=ROOT, env=environment())
    assert (tmp_path / "report.json").is_file(), done.stderr
    assert left(tmp_path)[1:] == left(straight)[1:]
    assert left(tmp_path)[0]["arms"] == left(straight)[0]["arms"]
