"""tools/evaluate.py on a run of the tiny world: stopped and resumed, arms, videos of other tools, processes, memory."""

import base64
import contextlib
import json
import shutil

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
    """A run of one step, next to a table of two people."""
    folder = tmp_path_factory.mktemp("run")
    launch(f"run.output_dir={folder / 'run'}", "train.max_steps=1", "run.save_steps=1")
    table(folder / "metadata.csv", "eval", 2)
    return folder


SAME = ("--strengths", "0,1", "--steps", "4,2")


def words(run, out, *more):
    return ["--run", str(run / "run"), "--data", str(run / "metadata.csv"), "--seeds", "2",
            "--out", str(out), "--batch", "2", "--device", "cpu", *more]  # fmt: skip


def call(arguments, expect=0):
    with contextlib.chdir(ROOT):
        return run_tool(evaluate.main, *arguments, expect=expect)


def read(out):
    """Return an evaluation's report without its command, its records and its picture."""
    report = json.loads((out / "report.json").read_text())
    del report["command"]
    return report, (out / "records.jsonl").read_text(), (out / "grid.png").read_bytes()


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    """An evaluation that nothing stops, of two strengths and two step counts."""
    out = tmp_path_factory.mktemp("straight") / "out"
    call(words(run, out, *SAME))
    return out


def test_an_adapter_of_strength_0_is_the_base(straight):
    """To the last figure; other steps and strengths are other videos."""
    report, records, _ = read(straight)
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


def test_a_resumed_evaluation_equals_one_that_was_not_stopped(run, straight, tmp_path, monkeypatch):
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
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == videos
    call(arguments)
    assert read(tmp_path) == read(straight)


def test_judged_videos_are_not_sampled_again_and_other_settings_are_refused(run, straight, monkeypatch):
    before = read(straight)
    monkeypatch.setattr(arms, "load_model", None)
    call(words(run, straight, *SAME))
    assert read(straight) == before
    error = call(words(run, straight, "sample.shift=3"), expect=2)
    assert "sample.shift was 5.0, and is 3.0" in error and "--overwrite" in error
    assert "--periods was 8 16, and is 4" in call(words(run, straight, "--periods", "4"), expect=2)
    assert read(straight) == before


@pytest.fixture
def copied(straight, tmp_path):
    """A finished evaluation that a test may damage."""
    return shutil.copytree(straight, tmp_path / "out")


def test_overwrite_removes_only_what_the_evaluation_wrote(run, copied, monkeypatch):
    """Edits of its files are lost."""
    users = [copied / name for name in ("videos/holiday.mp4", "prepared/thesis.txt", "notes.txt")]
    for path in (*users, copied / "videos" / "latest_x0" / "000_seed0.mp4"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(arms, "load_model", stop)
    call(words(run, copied, "sample.shift=3", "--overwrite"), expect=130)
    assert all(path.read_text() == "text" for path in users)
    files = {str(path.relative_to(copied)) for path in (copied / "videos").rglob("*.mp4")}
    assert files == {"videos/holiday.mp4", "videos/real/000.mp4", "videos/real/001.mp4"}


def test_an_output_at_an_input_or_in_use_is_refused(run, copied):
    for out, inputs in ((copied, ["--videos", copied / "videos" / "base"]), (run / "run", [])):
        error = call(words(run, out, *inputs, "--overwrite"), expect=2)
        assert error.startswith(f"error: --out {out} is, contains or is inside the input")
    with Folder(copied, overwrite=False).locked():
        assert "another process" in call(words(run, copied, *SAME), expect=2)


def test_an_edited_record_brings_no_other_file_into_the_page(run, straight, copied, tmp_path):
    (tmp_path / "secret.mp4").write_text("secret")
    records = copied / "records.jsonl"
    first, *lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join([json.dumps(json.loads(first) | {"file": "../secret.mp4"}) + "\n", *lines]))
    call(words(run, copied, *SAME))
    assert read(copied)[0] == read(straight)[0]
    assert base64.b64encode(b"secret").decode() not in (copied / "report.html").read_text()


def test_the_start_is_an_arm(run, tmp_path):
    """In another tool's names; the start is the run's adapter, so its videos are the run's."""
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
    base, begin, latest = read(out)[0]["arms"]
    assert (base["name"], begin["name"], latest["name"]) == ("base", "start", "latest")
    assert begin["figures"] == latest["figures"] != base["figures"]
    assert f"more than the run's start, {start} cannot be told" in text
    save_file({name: 2 * value for name, value in tensors.items()}, start)
    assert "has changed since" in call(arguments, expect=2)
    start.unlink()
    text = call(arguments, expect=2)
    assert f"lora.init_from: {start}: no such file or folder" in text and "lora.init_from=null" in text
    call([*arguments, "lora.init_from=null"])
    assert [arm["name"] for arm in read(out)[0]["arms"]] == ["base", "latest"]


def judge_files(folder, out, videos, *settings):
    """Judge other tools' videos of the folder's table; return the text and the report."""
    source = ["--config", CONFIG, "--data", folder / "metadata.csv", "--device", "cpu", "--out", out]
    text = call([*source, *(word for name in videos for word in ("--videos", name)), *settings])
    return text, read(out)[0]


def test_videos_of_other_tools_need_no_model(run, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "load_model", None)
    sizes = [word for word in QUICK if word.startswith("data.") and "file_name" not in word]
    videos = [straight / "videos" / name for name in ("base", "latest")]
    settings = [*sizes, "model.model_name=wan2_2_ti2v_text", "data.fps=null"]
    text, report = judge_files(run, tmp_path, videos, *settings)
    assert read_video_header(tmp_path / "videos" / "real" / "000.mp4", 5).rate == 24
    assert "decoded from mp4" in text
    assert [arm["decoded"] for arm in report["arms"]] == [True, True] and report["clips"] == 4
    assert report["arms"][1]["against"] == report["arms"][0]["name"]
    sampled = read(straight)[0]
    decoded, exact = (each["arms"][0]["figures"]["held_out/face_sim"]["mean"] for each in (report, sampled))
    assert decoded == pytest.approx(exact, abs=0.1) and decoded != exact  # the codec's part


def test_everybody_is_a_column_if_all_people_are_trained(run, tmp_path):
    """Two people side by side; as they are, and with the first in the second's place, whose similarity counts 0."""
    (first, second) = (data.read_video(row.video) for row in data.load_metadata(run / "metadata.csv"))
    for name, pair in (("real", (first, second)), ("both/000", (first, second)), ("twice/000", (first, first))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data.write_video(tmp_path / f"{name}.mp4", torch.cat(pair, 2), 8)
    (tmp_path / "metadata.csv").write_text("video,prompt\nreal.mp4,two people\n")
    settings = ["data.width=128", "reward.det_size=256", "reward.people=all"]
    _, report = judge_files(tmp_path, tmp_path / "out", [tmp_path / "both", tmp_path / "twice"], *settings)
    both, twice = (arm["figures"]["rewards/everybody"]["mean"] for arm in report["arms"])
    assert both > 0.7 and twice == pytest.approx(both / 2, abs=0.15)  # their similarity is 0.2


@pytest.mark.long
def test_two_processes_write_the_records_of_one(run, straight, tmp_path):
    start = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--"]  # torchrun has a --run-path
    arguments = ["tools/evaluate.py", *words(run, tmp_path, *SAME)]
    done = run_python([*start, *arguments], cwd=ROOT, env=environment())
    assert (tmp_path / "report.json").is_file(), done.stderr
    assert read(tmp_path)[1:] == read(straight)[1:]
    assert read(tmp_path)[0]["arms"] == read(straight)[0]["arms"]
