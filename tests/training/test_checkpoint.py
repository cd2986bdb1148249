import errno
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rewardfl
from rewardfl import config as configuration
from rewardfl import files
from rewardfl.config import SECTIONS, resuming
from rewardfl.training import checkpoint, run_folder
from rewardfl.training.checkpoint import CheckpointError, WriteError
from rewardfl.training.logger import MetricsFile
from rewardfl.training.run_folder import RunFolder, prepare_output_dir
from rewardfl.training.state import ResumePoint
from rewardfl.weights.shards import InputError

CONFIG = configuration.to_dict(
    configuration.parse(
        {
            "run": {"output_dir": "out"},
            "model": {"model_paths": "weights"},
            "data": {"file_name": "clips.csv"},
            "reward": {"reward_model_path": "pack"},
            "train": {"learning_rate": 1e-5, "max_steps": 50},
        }
    )
)
BASE = {"high_noise": "aa", "low_noise": "bb"}


def changed(base=CONFIG, **keys):
    """Return a configuration with section_key values replaced: changed(train__learning_rate=1)."""
    config = {section: dict(values) for section, values in base.items()}
    for name, value in keys.items():
        section, key = name.split("__")
        config.setdefault(section, {})[key] = value
    return config


def opened(output_dir, config=CONFIG, resume="auto", base_model=BASE):
    """Return what the script resumes from; it holds the lock no longer."""
    run = config["run"] | {"output_dir": str(output_dir), "resume_from_checkpoint": resume}
    with RunFolder() as run_folder:
        point = prepare_output_dir(run_folder, config | {"run": run}, base_model)
        run_folder.write_run_json({"config": config, "base_model": base_model, "changes": point.changes})
    return point


def start(*arguments, **settings):
    """The checkpoint of `opened`."""
    return opened(*arguments, **settings).path


def save(output_dir, step, score=None, keep_last=None, metrics=""):
    def write_adapter(folder):
        (folder / "transformer").mkdir()
        save_file({"w": torch.full((3,), float(step))}, folder / "transformer" / "lora.safetensors")

    return checkpoint.save_checkpoint(output_dir, step, write_adapter, {"step": step}, score, keep_last, metrics)


def complete_lines(metrics):
    return [json.loads(line) for line in metrics.path.read_text().split("\n")[:-1]]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def fail(*_args, **_kwargs):
    raise OSError("disk full")


def run_and_kill(code, folder):
    """Run `code` (with Path `folder` at hand) in a process that ends by SIGKILL."""
    names = {"os": os, "signal": signal, "Path": Path, "files": files, "checkpoint": checkpoint, "folder": folder}
    names |= {"run_folder": run_folder, "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL)}
    if not (child := os.fork()):
        try:
            exec(code, names)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    files.atomic_write(tmp_path / "a", b"\x00\x01")
    files.atomic_write(tmp_path / "a", "grüße")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.atomic_write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "grüße" and names(tmp_path) == ["a"]


def test_a_kill_leaves_the_old_file_and_the_old_folder(tmp_path):
    """One kill in the middle of a write, one in the middle of filling a folder; a new start cleans up."""
    start(tmp_path)
    save(tmp_path, 1)
    old = (tmp_path / "run.json").read_text()
    run_and_kill("os.fsync = kill\nfiles.atomic_write(folder / 'run.json', 'new')", tmp_path)
    run_and_kill("checkpoint.save_checkpoint(folder, 1, kill, {})", tmp_path)
    run_and_kill("checkpoint.save_checkpoint(folder, 2, kill, {})", tmp_path)
    run_and_kill("os.replace = kill\ncheckpoint.save_checkpoint(folder, 3, lambda _: None, {})", tmp_path)
    strays = [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]
    assert len(strays) == 4
    assert (tmp_path / "run.json").read_text() == old
    assert checkpoint.find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoints" / "step-000001"
    assert start(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    assert names(tmp_path / "checkpoints") == ["latest", "step-000001"]
    assert [path for path in tmp_path.rglob("*") if ".tmp-" in path.name] == []


def test_atomic_directory(tmp_path):
    path = tmp_path / "deep" / "folder"
    for name, before in (("a", []), ("b", ["a"])):
        with files.atomic_directory(path) as folder:
            (folder / name).write_text("1")
            assert (names(path) if path.exists() else []) == before
        assert names(path) == [name] and names(path.parent) == ["folder"]
    with pytest.raises(OSError, match="disk full"), files.atomic_directory(path) as folder:
        (folder / "c").write_text("3")
        fail()
    assert names(path) == ["b"] and names(path.parent) == ["folder"]


def test_files_have_the_mode_of_the_umask_and_hard_links_their_own(tmp_path):
    start(tmp_path)
    path, original = save(tmp_path, 1), tmp_path / "weights"
    original.touch()
    plain = original.stat().st_mode
    assert plain & 0o777 != 0o600, "the umask hides what this test checks"
    paths = [file for file in [*path.rglob("*"), tmp_path / "run.json"] if file.is_file()]
    assert len(paths) == 5 and all(file.stat().st_mode == plain for file in paths)
    original.chmod(0o600)
    with files.atomic_directory(tmp_path / "out") as folder:
        (folder / "weights").hardlink_to(original)
    assert original.stat().st_mode & 0o777 == 0o600


def test_a_new_run_and_going_on_with_it(tmp_path):
    for config, resume in ((changed(train__learning_rate=2e-5), "auto"), (CONFIG, False), (CONFIG, "auto")):
        assert start(tmp_path / "out", config, resume=resume) is None  # a run without a step is replaced
    start(tmp_path / "out", changed(reward__views=0))  # by a version with another key, which was off
    path = save(tmp_path / "out", 25)
    assert start(tmp_path / "out") == path
    longer = changed(run__save_steps=5, run__output_dir="elsewhere/out", train__max_steps=100)
    assert start(tmp_path / "out", longer) == path
    assert start(tmp_path / "out", resume=str(path)) == path


def test_a_run_is_not_overwritten(tmp_path):
    start(tmp_path)
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"actor/loss": 0.5})
    differing = "other settings: train.learning_rate 1e-05 -> 2e-05; .*lora.init_from=.*checkpoints/latest"
    for config, resume, message in (
        (CONFIG, False, "already holds a run; take another folder, .* resume: run.resume_from_checkpoint=auto"),
        (changed(train__learning_rate=2e-5, run__save_steps=3), "auto", differing),
    ):
        with pytest.raises(CheckpointError, match=message):
            start(tmp_path, config, resume=resume)
    assert start(tmp_path) is None  # the same run, killed before its first checkpoint
    start(tmp_path / "new", changed(train__new=1))
    save(tmp_path / "new", 1)
    with pytest.raises(CheckpointError, match="was written by another version .*train.new.*; resume with that"):
        start(tmp_path / "new")


def test_a_checkpoint_of_another_folder(tmp_path):
    start(tmp_path / "a")
    path = save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    assert start(tmp_path / "b", resume=str(path)) == path
    copied = shutil.copytree(path, path.with_name("my copy"))
    assert opened(tmp_path / "d", resume=str(copied)) == ResumePoint(path=copied, step=1)
    with pytest.raises(CheckpointError, match="a holds a run with other settings: train.learning_rate"):
        start(tmp_path / "c", changed(train__learning_rate=2e-5), resume=str(path))
    for folder, resume in ((tmp_path / "c", str(path)), (tmp_path / "a", "auto")):
        with pytest.raises(CheckpointError, match="base_model.low_noise 'bb' -> 'cc' .of what model.model_paths leads"):
            start(folder, resume=resume, base_model=BASE | {"low_noise": "cc"})


def test_library_versions(monkeypatch):
    """The distribution of a CUDA build of torch calls itself 2.13.0, too."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    versions = run_folder.library_versions(["rewardfl", "torch", "pyyaml", "no-such-package"])
    assert list(versions) == ["rewardfl", "torch", "pyyaml"] and versions["torch"] == "2.13.0+cu130"
    assert versions["rewardfl"] == rewardfl.__version__


def test_git_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run_folder.git_commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for arguments in (["init"], ["add", "a"], ["commit", "-m", "a"], ["tag", "-a", "v1", "-m", "v1"]):
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)
    commit = run_folder.git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "a").write_text("2")
    assert run_folder.git_commit(tmp_path) == f"{commit}-dirty"


def tree(folder):
    """All that is in a folder, to be compared."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def test_a_folder_in_use_is_refused_and_nothing_in_it_is_changed(tmp_path):
    start(tmp_path)
    save(tmp_path, 1)
    with RunFolder() as first:
        first.take(tmp_path)
        stray = tmp_path / "checkpoints" / "step-000002.tmp-0123456789abcdef"
        stray.touch()
        before = tree(tmp_path)
        with pytest.raises(CheckpointError, match=f"run.output_dir {tmp_path} is in use by another process; wait"):
            start(tmp_path)
        assert tree(tmp_path) == before
    assert start(tmp_path).name == "step-000001" and not stray.exists()


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=f"{tmp_path} is on a file system without locks"):
        assert start(tmp_path) is None


@pytest.mark.parametrize("linked", ["", "checkpoints", "samples/step-000001"])
def test_only_temporaries_of_the_run_are_removed_and_none_behind_a_link(tmp_path, linked):
    out, end = tmp_path / "out", ".tmp-0123456789abcdef"
    foreign = ("cache/0a/a.safetensors" + end, "notes" + end, "run.json.tmp-draft")
    strays = ("run.json" + end, "metrics.jsonl" + end, "checkpoints/step-000002" + end, f"samples/step-000001/0{end}")
    for name in (*foreign, *strays):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    if linked:
        (out / linked).rename(tmp_path / "elsewhere")
        (out / linked).symlink_to(tmp_path / "elsewhere")
    (out / f"run.json{end[:-1]}0").symlink_to(tmp_path / "elsewhere")
    start(out)
    behind = {name for name in strays if linked and name.startswith(linked)}
    assert {name for name in (*foreign, *strays) if (out / name).exists()} == {*foreign, *behind}
    assert not (out / f"run.json{end[:-1]}0").is_symlink()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "run.json.tmp-probe", "checkpoints/latest"])
def test_no_link_in_a_run_folder_is_written_through(tmp_path, name):
    thesis, link = tmp_path / "thesis.txt", tmp_path / "out" / name
    thesis.write_text("my thesis\n")
    link.parent.mkdir(parents=True)
    link.symlink_to(thesis)
    before = tree(tmp_path)
    if name == "metrics.jsonl":
        with pytest.raises(WriteError, match=f"^{link}: is a link"):
            MetricsFile(link).append(1, {"lr": 1.0})
        MetricsFile(link).start()
        MetricsFile(link).append(1, {"lr": 1.0})
    else:
        start(tmp_path / "out", resume=False)
        save(tmp_path / "out", 1)
    assert tree(tmp_path)[Path("thesis.txt")] == before[Path("thesis.txt")]


COSINE = {"train__lr_scheduler_type": "cosine"}
GONE = {"reward__recogniser_chunk": 4}


@pytest.mark.parametrize("old, new, refused", [
    ({}, {"run__save_steps": 5, "data__cache_dir": "cache", "train__context_parallel": 2}, None),
    ({}, {"model__model_paths": "elsewhere", "data__file_name": "other.csv"}, None),  # by content
    ({"train__memory": {"untrained": "cpu_swap"}}, {"train__memory": {"untrained": "gpu"}}, None),
    ({"train__memory": {"untrained": "gpu"}}, {"train__memory": {"untrained": "fp8"}}, "train.memory"),
    ({"train__lr_scheduler_type": "constant_with_warmup"}, {"train__lr_scheduler_type": "constant"}, None),
    ({"train__lr_scheduler_type": "constant"}, {"train__lr_scheduler_type": "cosine"}, "train.lr_scheduler_type"),
    ({"train__max_steps": 10}, {"train__max_steps": 20}, None),
    ({"train__max_steps": 10} | COSINE, {"train__max_steps": 20}, "train.max_steps"),
    ({}, {"run__seed": 1}, "run.seed"), ({}, {"lora__lora_rank": 8}, "lora.lora_rank"),
    ({"reward__motion_weight": 0.5}, {}, "reward.terms"), (GONE, {}, "reward.recogniser_chunk was 4, and is 8 today"),
    ({"run__logging_steps": 10, "reward__views": 0}, {}, None),  # removed keys that changed no number, or were off
])  # fmt: skip
def test_what_may_change_when_a_run_resumes(tmp_path, old, new, refused):
    """A key that changes no number may; the others are refused, and named ones accepted if resuming.NAMED has them."""
    start(tmp_path, changed(**old))
    today = changed(**{key: value for key, value in (old | new).items() if key in new or old == old | COSINE})
    merged = configuration.to_dict(configuration.parse(today))
    path = save(tmp_path, 1)
    if refused is None:
        assert opened(tmp_path, merged) == ResumePoint(path=path, step=1)
        return
    with pytest.raises(CheckpointError, match=refused) as error:
        start(tmp_path, merged)
    assert (f"run.resume_with_changes=[{refused}]" in str(error.value)) == (refused in resuming.NAMED)
    if refused in resuming.NAMED:
        merged["run"]["resume_with_changes"] = [refused]
        assert [change["key"] for change in opened(tmp_path, merged).changes] == [refused]


def test_the_keys_that_may_change_exist():
    sections = [item for each in SECTIONS.values() for item in each.items()]
    keys = {f"{name}.{key}" for name, section in sections for key in section.model_fields}
    assert keys >= resuming.FREE | resuming.BY_CONTENT | resuming.NAMED
    fixed = "run.seed model.dtype model.trainable_models lora.lora_rank lora.lora_target_modules data.num_frames"
    fixed += " grpo.group_size grpo.updates_per_epoch grpo.ema_decay sample.num_inference_steps"
    assert set(fixed.split()) <= keys - resuming.FREE - resuming.BY_CONTENT - resuming.NAMED


def test_changes_add_up(tmp_path):
    """Over resumptions, each at its step."""
    start(tmp_path)
    rates = []
    for step, before, rate in ((1, 1e-5, 2e-5), (2, 2e-5, 3e-5)):
        save(tmp_path, step)
        config = changed(train__learning_rate=rate)
        config["run"]["resume_with_changes"] = ["train.learning_rate"]
        rates.append({"key": "train.learning_rate", "old": before, "new": rate, "step": step})
        assert opened(tmp_path, config).changes == tuple(rates)
    assert opened(tmp_path, config).changes == tuple(rates)  # it stays named, and nothing changes


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe"], ids=["missing", "empty", "no config", "no text"])
def test_damaged_run_json(tmp_path, content):
    start(tmp_path)
    save(tmp_path, 1)
    (tmp_path / "run.json").unlink() if content is None else (tmp_path / "run.json").write_bytes(content)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/run.json is missing or damaged; put it back") as error:
        start(tmp_path)
    assert "\n" not in str(error.value) and {**before, **tree(tmp_path)} == tree(tmp_path)


def resumable(folder, steps=3):
    """The metrics.jsonl of a run with a checkpoint after its last step."""
    start(folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics.append(step, {"loss": step / 10, "none": float("nan")})
    save(folder, steps, metrics=metrics.text)
    return metrics.path


@pytest.mark.parametrize("change", [
    lambda content: content[:-9], lambda content: content + b'{"step": 4, "lo',
    lambda content: content + b'{"step": 4, "loss": 1}\n',
], ids=["cut off", "half a line more", "a line more"])  # fmt: skip
def test_metrics_become_the_lines_up_to_the_checkpoint(tmp_path, change):
    """Early stop, alarms and `best` are computed from them."""
    path = resumable(tmp_path)
    content = path.read_bytes()
    path.write_bytes(change(content))
    metrics = MetricsFile(path, checkpoint.load_metrics(start(tmp_path)))
    metrics.start()
    assert path.read_bytes() == content
    metrics.append(4, {})
    assert [line["step"] for line in complete_lines(metrics)] == [1, 2, 3, 4] and path.read_text() == metrics.text


def test_metrics(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.append(step, {"lr": 1e-6, "actor/loss": step / 2, "epoch": step})
    metrics.append(3, {"grad_norm": float("nan"), "actor/loss": float("-inf")})
    assert complete_lines(metrics)[1] == {"step": 2, "lr": 1e-6, "actor/loss": 1.0, "epoch": 2}
    assert complete_lines(metrics)[2] == {"step": 3, "grad_norm": None, "actor/loss": None}
    assert names(tmp_path) == ["metrics.jsonl"]


def test_save_and_load(tmp_path):
    state = {"rng": [torch.get_rng_state(), None], "position": {"step": 25, "lr": 1e-3, "name": "x"}}
    path = checkpoint.save_checkpoint(tmp_path, 25, lambda folder: (folder / "adapter").touch(), state)
    assert path == tmp_path / "checkpoints" / "step-000025"
    assert names(path) == ["adapter", "manifest.json", "state"]
    loaded = checkpoint.load_state(path)
    assert loaded["position"] == state["position"] and torch.equal(loaded["rng"][0], state["rng"][0])
    assert names(tmp_path / "checkpoints") == ["latest", "step-000025"]


def test_find_checkpoint(tmp_path):
    assert checkpoint.find_checkpoint(tmp_path, "auto") is None
    paths = [save(tmp_path, step) for step in (9, 999_999, 1_000_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.find_checkpoint(tmp_path, "auto") == paths[-1]
        for path in (paths[-1], tmp_path / "checkpoints" / "latest"):
            assert checkpoint.find_checkpoint(tmp_path, str(path)) == paths[-1]
    with pytest.raises(CheckpointError, match="run.resume_from_checkpoint: no such folder: out/none"):
        checkpoint.find_checkpoint(tmp_path, "out/none")
    message = "step-000009 is followed by step-999999, step-1000000 in the same run; delete them or move"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.find_checkpoint(tmp_path, str(paths[0]))


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("name, damage", [
    ("manifest.json", lambda path: cut(path / "manifest.json")),
    ("state/state.pt", lambda path: (path / "state" / "state.pt").unlink()),
    ("lora.safetensors", lambda path: cut(path / "transformer" / "lora.safetensors")),
])  # fmt: skip
def test_damaged_checkpoints(tmp_path, name, damage):
    first, last = save(tmp_path, 1), save(tmp_path, 2)
    damage(last)
    with pytest.warns(UserWarning, match=f"skipping checkpoint .*step-000002: .*{name} is missing or cut off"):
        assert checkpoint.find_checkpoint(tmp_path, "auto") == first
    with pytest.raises(CheckpointError, match=f"run.resume_from_.*step-000002 is not complete: .*{name} is missing"):
        checkpoint.find_checkpoint(tmp_path, str(last))
    assert checkpoint.find_checkpoint(tmp_path, str(first)) == first
    start(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "run.json", tmp_path)
    with pytest.warns(UserWarning, match="step-000002"):
        start(tmp_path)
    assert os.readlink(tmp_path / "checkpoints" / "latest") == "step-000001"
    damage(first)
    with pytest.warns(UserWarning, match="step-000002"), pytest.warns(UserWarning, match="step-000001"):
        assert checkpoint.find_checkpoint(tmp_path, "auto") is None


def test_best_has_the_highest_score_and_is_found_again(tmp_path):
    def links():
        return {name: os.readlink(tmp_path / "checkpoints" / name) for name in ("latest", "best")}

    start(tmp_path)
    for step, score in enumerate([None, float("nan"), 0.5, 0.75, 0.75, 0.25], 1):
        save(tmp_path, step, score)
        assert (tmp_path / "checkpoints" / "best").exists() == (step > 2)
    assert links() == {"latest": "step-000006", "best": "step-000004"}
    assert '"score": null' in (tmp_path / "checkpoints" / "step-000002" / "manifest.json").read_text()
    for name in ("latest", "best"):  # as if killed before they were pointed at the last checkpoint
        (tmp_path / "checkpoints" / name).unlink()
    start(tmp_path)
    assert links() == {"latest": "step-000006", "best": "step-000004"}
    save(tmp_path, 7, 0.8)
    assert links() == {"latest": "step-000007", "best": "step-000007"}


def test_rotation_keeps_the_last_ones_and_the_best(tmp_path):
    start(tmp_path)
    for step in (1, 2, 3, 4):
        save(tmp_path, step, 1 / step, keep_last=2)
    assert names(tmp_path / "checkpoints") == ["best", "latest", "step-000001", "step-000003", "step-000004"]
    save(tmp_path, 5, 2, keep_last=1)
    assert names(tmp_path / "checkpoints") == ["best", "latest", "step-000005"]
    assert start(tmp_path) == tmp_path / "checkpoints" / "step-000005"


@pytest.fixture
def full(monkeypatch):
    """Beyond 20 kB a file's writes fail as on a full disk (with EFBIG for ENOSPC)."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path, full):
    start(tmp_path)
    first = save(tmp_path, 1)
    with pytest.raises(WriteError, match="step-000002 could not be written .*File too large.*run.keep_last: n keeps"):
        checkpoint.save_checkpoint(tmp_path, 2, lambda _: None, {"w": torch.zeros(10_000)})
    gc.collect()  # Python 3.12.1 died of what the error held
    assert names(tmp_path / "checkpoints") == ["latest", "step-000001"]
    assert start(tmp_path) == first
    save(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["latest", "step-000001", "step-000002"]


def test_metrics_that_could_not_be_written_are_written_later(tmp_path, full):
    """A file that may grow by ten bytes takes the beginning of a line, which must not spoil the next."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(1, {"loss": 1.0})
    content = metrics.path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 10, limits[1]))
    for step in (2, 3):
        with pytest.raises(WriteError, match="metrics.jsonl could not be written .*too large.* are kept in memory"):
            metrics.append(step, {"loss": 1.0})
        assert [line["step"] for line in complete_lines(metrics)] == [1]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    metrics.append(4, {"loss": 1.0})
    assert [line["step"] for line in complete_lines(metrics)] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="out could not be written .Not a directory.*nothing was changed; free space"):
        start(tmp_path / "file" / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=f"run.output_dir {tmp_path}/new: {tmp_path} is not a folder that can be wr"):
        prepare_output_dir(None, changed(run__output_dir=str(tmp_path / "new")), BASE)


def test_a_dry_run_looks_and_changes_nothing(tmp_path):
    """Neither an old folder nor a new one."""
    latest = resumable(tmp_path / "old").parent / "checkpoints" / "latest"
    latest.unlink()  # as if killed before it was pointed at the last checkpoint
    before = tree(tmp_path)
    for name, step in (("old", 3), ("new", 0)):
        config = changed(run__output_dir=str(tmp_path / name))
        assert prepare_output_dir(None, config, BASE).step == step
    assert tree(tmp_path) == before and names(tmp_path) == ["old"] and not latest.is_symlink()


def test_a_dry_run_is_refused_what_a_start_is_refused(tmp_path):
    (tmp_path / "file").touch()
    resumable(tmp_path / "old")
    before = tree(tmp_path)
    for name, settings, message in (
        ("file", {}, "run.output_dir .*file: .*file is not a folder that can be written"),
        ("new", {"run__resume_from_checkpoint": "missing"}, "run.resume_from_checkpoint: no such folder: missing"),
        ("old", {"train__learning_rate": 1.0}, "other settings: train.learning_rate"),
    ):
        config = changed(run__output_dir=str(tmp_path / name), **settings)
        with pytest.raises((CheckpointError, InputError), match=message):
            prepare_output_dir(None, config, BASE)
        assert tree(tmp_path) == before
        with RunFolder() as run_folder, pytest.raises(CheckpointError):
            prepare_output_dir(run_folder, config, BASE)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_a_write_error_is_a_warning_unless_it_is_the_last():
    lines = []
    with checkpoint.warn_on_write_error(lines.append, 3, last=False):
        raise WriteError("no room")
    with pytest.raises(WriteError), checkpoint.warn_on_write_error(lines.append, 4, last=True):
        raise WriteError("no room")
    assert lines == ["warning: step 3: no room"]
