"""Checkpoints, weights, the network, metadata.csv and the config are data: nothing in them is run."""

import csv
import json
import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, run_tool
from runs import CONFIG, FAST, FORWARD_CONFIG, GRPO_CONFIG, QUICK, WORLD, call

import train_flow_grpo
import train_forward_rl
import train_reward_fl
from rewardfl import config, files, lora, trust
from rewardfl.backbones.wan import load as wan_load
from rewardfl.rewards.__main__ import main as score_main
from rewardfl.training.distributed import Distributed
from rewardfl_tools import check_dataset, evaluate, plan_run, reward_scales, serve_reward

pytestmark = pytest.mark.slow(40)

ROOMS = ("rewardfl", "tools", "benchmarks", "assets", "examples")
SOURCES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
# what could run what it reads; _Loader is a SafeLoader
UNSAFE = re.compile(
    r"(pickle|dill|joblib)\.(load|Unpickler)|from (pickle|dill|joblib|yaml|torch) import.*(load|Unpickler)"
    r"|yaml\.(?!safe)\w*load\w*\((?!\w+, _Loader)|torch\.load\((?!.*weights_only=True)|allow_pickle=True|shell=True"
    r"|(?<![.\w])(eval|exec|os\.system)\([^)]"
)


def test_nothing_pickled_is_loaded():
    assert len(SOURCES) > 60
    assert [str(path) for path in SOURCES if UNSAFE.search(path.read_text())] == []
    for line in (
        "torch.load(p)", "torch.load(p, weights_only=False)", "pickle.loads(b)", "yaml.load(t)", "yaml.unsafe_load(t)",
        "yaml.load(t, Loader=yaml.Loader)", "np.load(p, allow_pickle=True)", "from pickle import loads", "x = eval(t)",
        "subprocess.run(c, shell=True)",
    ):  # fmt: skip
        assert UNSAFE.search(line), line
    assert not UNSAFE.search("torch.load(p, weights_only=True); yaml.safe_load(t); net.eval()")


def test_rows_cannot_write_outside(monkeypatch, capsys, tmp_path):
    """Clips outside of the table's folder, and prompts like paths: written files are named by numbers."""
    run, video = tmp_path / "run", next((WORLD / "train" / "videos").iterdir())
    (tmp_path / "data").mkdir()
    table = tmp_path / "data" / "metadata.csv"
    table.write_text("\n".join(["video,prompt", *(f"{video},../../../escaped{i}/\\0 a person" for i in range(2))]))
    before = {*tmp_path.rglob("*")}
    code, _, error = call(
        monkeypatch, capsys, *FAST, f"run.output_dir={run}", f"data.file_name={table}", f"data.cache_dir={run}/cache",
        "train.max_steps=1", "run.sample_videos=2", "sample.mid_timestep=3", "reward.kl_weight=0",
    )  # fmt: skip
    assert code == 0, error
    assert [path for path in {*tmp_path.rglob("*")} - before if run not in (path, *path.parents)] == []
    assert sorted(path.name for path in (run / "samples" / "step-000001").iterdir()) == ["00.mp4", "01.mp4"]


RED = "\x1b[31m"  # a terminal that gets this writes in red


def test_names_in_files_do_not_drive_the_terminal(monkeypatch, capsys, tmp_path):
    """Rows that name such a file are skipped or refused; messages that quote them escape it."""
    table = tmp_path / "metadata.csv"
    video = next((WORLD / "train" / "videos").iterdir())
    rows = [(str(video), "x"), (f"{RED}a\n.mp4", "x"), (f"b{RED}.mp4", f"{RED}y")]
    (tmp_path / rows[2][0]).write_bytes(video.read_bytes())
    start = (f"run.output_dir={tmp_path / 'run'}", f"data.file_name={table}")
    for header, code in ((("video", f"{RED}prompt"), 2), (("video", "prompt"), 0)):
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        skip = f"data.skip_bad_rows={str(code == 0).lower()}"
        exit_code, out, error = call(monkeypatch, capsys, *QUICK, *start, skip, "--dry-run")
        assert exit_code == code, error
        assert "\x1b" not in out + error and (code == 0 or "x1b[31m" in error)
    (line,) = [line for line in out.splitlines() if "control character" in line]
    assert line.startswith("skipped: lines 4, 5 (2 rows): video: holds a control character")
    out = run_tool(check_dataset.main, "--config", CONFIG, f"data.file_name={table}", expect=2)
    assert "\x1b" not in out and out.count("problem: ") == 2


def test_only_control_characters_are_escaped(capsys):
    text, shown = f"a\nb{RED}\r\x9bé 你\u202f", "a\nb\\x1b[31m\\r\\x9bé 你\u202f"
    Distributed.print(SimpleNamespace(accelerator=SimpleNamespace(print=print)), text)
    assert capsys.readouterr().out == shown + "\n" and files.escape_control(shown) == shown


# Every command that makes rewards, with the options that it needs in front of a configuration's overrides
COMMANDS = {
    "train_reward_fl": (train_reward_fl.main, ["--config", CONFIG, "--dry-run"]),
    "train_flow_grpo": (train_flow_grpo.main, ["--config", GRPO_CONFIG, "--dry-run"]),
    "train_forward_rl": (train_forward_rl.main, ["--config", FORWARD_CONFIG, "--dry-run"]),
    "plan_run": (plan_run.main, ["--config", CONFIG]),
    "reward_scales": (reward_scales.main, ["--config", CONFIG, "--device", "cpu"]),
    "evaluate": (
        evaluate.main,
        ["--config", CONFIG, "--data", "OUT/eval.csv", "--videos", "OUT/made", "--out", "OUT/e"],
    ),
    "evaluate a run": (evaluate.main, ["--run", "OUT", "--data", "OUT/eval.csv", "--device", "cpu"]),
    "serve_reward": (serve_reward.main, ["--device", "cpu", "--reward", "OUT/own.py:Own"]),
    "score": (score_main, ["score", "--reward", "OUT/own.py:Own"]),
}
OWN = """
open(__file__ + ".ran", "w").close()
from examples.toys import Colour

class Own(Colour):
    def __init__(self, red: float):
        super().__init__()
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder with code, which is a module as well, and a run.json that names it."""
    (tmp_path / "own.py").write_text(OWN)
    cfg = config.to_dict(config.load(CONFIG, [f"reward.others={{x: {{name: '{tmp_path}/own.py:Own'}}}}"]))
    (tmp_path / "run.json").write_text(json.dumps({"config": cfg}))
    adapter = tmp_path / "checkpoints" / "latest" / "transformer" / lora.WEIGHTS_NAME
    adapter.parent.mkdir(parents=True)
    adapter.touch()
    (tmp_path / "made").mkdir()
    for clip in ("0.mp4", "made/0.mp4"):
        (tmp_path / clip).write_bytes(next((WORLD / "eval" / "videos").iterdir()).read_bytes())
    (tmp_path / "eval.csv").write_text("video,prompt\n0.mp4,a person\n")
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(wan_load, "load_pipeline", lambda *_: pytest.fail("weights were loaded"))
    return tmp_path


def command_of(name, stranger, source="own.py"):
    main, words = COMMANDS[name]
    words = [word.replace("OUT", str(stranger)) for word in words]
    if words[0] == "--config":
        words.append(f"reward.others={{x: {{name: '{stranger}/own.py:Own', settings: {{red: a}}}}}}")
    return main, [word.replace(f"{stranger}/own.py", "own") if source == "own" else word for word in words]


@pytest.mark.parametrize("source", ["own.py", "own"])
@pytest.mark.parametrize("name", COMMANDS)
def test_code_that_a_configuration_names_is_not_run(stranger, monkeypatch, name, source):
    """Neither a file nor a module of another package, even if an earlier command line allowed it."""
    if (name, source) == ("evaluate a run", "own"):
        return
    monkeypatch.setattr(trust, "_allowed", True)
    main, words = command_of(name, stranger, source)
    words += ["--", "0.mp4"] if name == "score" else []
    out = run_tool(main, *words, expect=2)
    refused = f"{stranger}/own.py:Own is code of {stranger}/own.py" if source == "own.py" else "own:Own is code of own"
    assert f"{refused}; --trust-code on the command line loads it" in out
    assert out.count("\n") == 1 and out.startswith("error: ")
    assert not (stranger / "own.py.ran").exists() and "own" not in sys.modules


@pytest.mark.parametrize("name", COMMANDS)
def test_trusted_code_runs_and_its_settings_are_checked(stranger, name):
    main, words = command_of(name, stranger)
    words += ["--trust-code"] if name != "score" else ["--trust-code", "--", "0.mp4"]
    out = run_tool(main, *words, expect=2)
    assert (stranger / "own.py.ran").exists()
    assert "settings.red" in out and out.count("\n") == 1, "the constructor's annotation, and it has no default"
