"""Any value of any option, and of any key of a configuration: exit 0, or exit 2 with one line that says why.

ODD_SEED=7 ODD_CALLS=5000 tries other values, and more of them.
"""

import argparse
import importlib
import os
import random
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from diffusers import WanTransformer3DModel
from forked_calls import run_calls
from lora_dialects import DIALECTS, factors
from PIL import Image

from rewardfl.config.schema import SECTIONS

SEED, CALLS = int(os.environ.get("ODD_SEED", "59")), int(os.environ.get("ODD_CALLS", "500"))
pytestmark = [pytest.mark.long, pytest.mark.slow(120), pytest.mark.timeout(10 * CALLS)]

GOLDEN, WORLD = ROOT / "tests" / "golden", ROOT / "assets" / "tiny_world"
# arguments that work; INPUTS is a folder of `inputs` below, with a run of one step and its evaluation
BASE = {
    "evaluate": "--trust-code --run INPUTS/run --data INPUTS/people.csv --seeds 1 --device cpu --out out",
    "check_dataset": f"--config {GOLDEN}/reward_fl.yaml",
    "compare_runs": "INPUTS/run INPUTS/run/evaluation --out page.html",
    "convert_lora": "--lora INPUTS/comfy.safetensors --to diffusers --out out.safetensors",
    "doctor": f"--config {GOLDEN}/reward_fl.yaml --device cpu",
    "generate": f"--model {WORLD}/pipeline --image INPUTS/face.png --prompt talking --height 32 --width 32 "
    "--num-frames 5 --steps 1 --device cpu --out out.mp4",
    "merge_lora": f"--base {WORLD}/pipeline/transformer_2 --lora INPUTS/comfy.safetensors --out out",
    "merge_shards": f"--input {WORLD}/pipeline/transformer_2 --out out.safetensors",
    "plan_run": f"--trust-code --config {GOLDEN}/reward_fl.yaml",
    "reward_scales": f"--trust-code --config {GOLDEN}/reward_fl.yaml --rows 1 --device cpu",
    "serve_reward": "--reward optical_flow --port 0 --device cpu",
}
RUN = f"--trust-code --config {GOLDEN}/reward_fl.yaml run.output_dir=INPUTS/run train.max_steps=1 run.save_steps=1"

TEXTS = [
    "", " ", "0", "-0", "-1", "1e9", "1000000001", "1e400", "-1e-320", "nan", "inf", ".nan", "null", "true", "~", "~/x",
    "a #1", "#", "[" * 3000, "{a: " * 300, "[[1]]", "{a: [b]}", "\udcff.safetensors", "x" * 5000, "x/" * 3000, "é/üß",
    "two\nlines", "\x1b[31mred", "\u2028", "2026-99-99", "!!python/name:os.system", "&a", "*a", "a:nan", "C:\\a", "-",
]  # fmt: skip
NUMBERS = ["0", "-0", "-1", "0.5", "1e9", "1000000001", "1e30", "1e400", "-1e-320", ".nan", "nan", "inf", "1_0", "0x10"]
COLLECTIONS = ["[]", "{}", "[0]", "[-1]", "[1000000000]", "[1, 1]", "[.nan]", "[[1]]", "[a]", "{a: 1}", "{a: {a: 1}}"]
COLLECTIONS += ["{'': 1}", "{mean: {name: motion}}", "{a: {name: motion, weight: 1.0e+12}}", "{a: {name: ~}}"]
ENDINGS = [":nan", ":1e400", ":-0", "@mid", "@high", "/", "/x", "/..", " ", "#", "\udcff", ",", "=", ",nan", "0" * 400]
ENDINGS += ["=" + "[" * 4000, "=2026-99-99"]
SUFFIXES = ["", ".safetensors", ".yaml", ".json", ".csv", ".png", ".mp4"]
CONTENTS = {"empty": b"", "html": b"<!doctype html>\n", "deep": b"[" * 5000, "bytes": b"\xff\xfe\0\n" * 50}
NAMES = "report.json run.json model_index.json config.json metadata.csv adapter_config.json metrics.jsonl settings.json"
# exit code 2 without an error: the requested result
ANSWERS = re.compile(r"^does not fit|^\d+ rows: \d+ can be used", re.MULTILINE)


def options(tool, monkeypatch):
    """Return the options of a tool's parser."""
    parsers = []

    def stop(parser, *_):
        parsers.append(parser)
        raise KeyboardInterrupt

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, stop)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(f"rewardfl_tools.{tool}").main()
    return [action for action in parsers[0]._actions if action.dest != "help"]


def odd_paths(folder):
    """Return paths of files of each suffix that are no such file, and of folders with such files."""
    for suffix in SUFFIXES:
        for name, content in CONTENTS.items():
            (folder / f"{name}{suffix}").write_bytes(content)
        os.mkfifo(folder / f"fifo{suffix}")
        (folder / f"folder{suffix}").mkdir()
        for name in ("null", "zero"):  # by a link: a tool that replaces its output does not replace the device
            (folder / f"{name}{suffix}").symlink_to(f"/dev/{name}")
    for name, content in CONTENTS.items():
        (folder / f"of_{name}").mkdir()
        for file in NAMES.split():
            (folder / f"of_{name}" / file).write_bytes(content)
    return ["/proc/x/y", "/dev/null/x", f"{folder}/html.json/x", *sorted(map(str, folder.iterdir()))]


def key_value(schema, dice, paths):
    """Return an odd value for a key with this JSON schema."""
    parts = [schema, *schema.get("anyOf", ())]
    types = {part.get("type") for part in parts}
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    beyond = [str(part[key] + more) for part in parts for key in keys if key in part for more in (-1, 0, 1)]
    if dice.random() < 0.2:
        return dice.choice(TEXTS)
    if types & {"array", "object"}:
        return dice.choice(COLLECTIONS)
    if types & {"integer", "number"}:
        return dice.choice([*beyond, *NUMBERS])
    return dice.choice(paths if "string" in types and "enum" not in schema else TEXTS)


def script_calls(dice, paths):
    """Yield dry runs, of which each gives a key an odd value."""
    sections = [(schema.script[:-3], name, part) for schema, parts in SECTIONS.items() for name, part in parts.items()]
    keys = [(*section, *item) for section in sections for item in section[2].model_json_schema()["properties"].items()]
    while True:
        for script, section, _, key, schema in dice.sample(keys, len(keys)):
            files = [GOLDEN / f"{script.removeprefix('train_')}.yaml"]
            files += [ROOT / "tests" / "face.yaml"] if script == "train_reward_fl" else []  # it has no list of steps
            override = f"{section}.{key}={key_value(schema, dice, paths)}"
            yield script, ["--trust-code", "--config", str(dice.choice(files)), "--dry-run", override]


def tool_calls(actions, dice, paths):
    """Yield calls of tools, of which each gives an option or two an odd value."""
    pairs = [(tool, action) for tool in actions for action in actions[tool]]
    overrides = script_calls(dice, paths)
    while True:
        for tool, action in dice.sample(pairs, len(pairs)):
            arguments = BASE[tool].split()
            for chosen in [action, dice.choice(actions[tool])][: dice.choice([1, 1, 2])]:
                if chosen.dest == "overrides":
                    arguments.append(next(overrides)[1][-1])
                else:
                    change(arguments, chosen, dice, paths)
            yield tool, arguments


def change(arguments, action, dice, paths):
    """Replace an option's value by an odd one."""
    name = max(action.option_strings, key=len, default=None)
    if action.nargs == 0:
        arguments.append(name)
        return
    place = arguments.index(name) + 1 if name in arguments else None
    before = arguments[place] if place else str(action.default)
    plain = action.type in (None, Path) and not action.choices
    similar = [path for path in paths if Path(path).suffix == Path(before).suffix]
    fitting = dice.choice((similar or paths) if plain else NUMBERS)
    value = dice.choice([fitting, dice.choice(TEXTS), before + dice.choice(ENDINGS)])
    if place:
        arguments[place] = value
    else:
        arguments[:0] = [value] if name is None else [name, value]


def all_calls(actions, dice, paths):
    """Yield pairs of tool and arguments. Those that work are first: the first two make the run and the evaluation."""
    yield "train_reward_fl", RUN.split()
    yield "evaluate", [*BASE["evaluate"].split(), "--out", "INPUTS/run/evaluation"]
    yield from ((tool, BASE[tool].split()) for tool in actions)
    scripts, tools = script_calls(dice, paths), tool_calls(actions, dice, paths)
    for _ in range(CALLS // 2):
        yield next(scripts)
        yield next(tools)


def problems(call, result):
    """Yield what is wrong with the end of a call."""
    out, error = (Path(call["folder"], name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt"))
    lines = [line for line in error.split("\n") if "error: " in line]
    if result["code"] not in (0, 2):
        yield f"exit code {result['code']}"
    if "Traceback" in error:
        yield "traceback"
    if result["code"] == 2 and not (len(lines) == 1 and lines[0].startswith("error: ") or ANSWERS.search(out)):
        yield f"{len(lines)} lines with an error"
    if result["code"] == 0 and lines:
        yield "an error, and exit code 0"
    if result["seconds"] > 20 or result["bytes"] > 2e9:
        yield f"{result['seconds']:.0f} s, {result['bytes'] / 1e9:.1f} GB"


def describe(call, faults):
    """Return a failed call as a shell would take it, and the last lines of its output."""
    command = shlex.join(call["arguments"])[:500]
    tails = [Path(call["folder"], name).read_text(errors="replace")[-700:] for name in ("stdout.txt", "stderr.txt")]
    return "\n".join([f"{', '.join(faults)}: {command}", *tails]).encode(errors="backslashreplace").decode()


def make_inputs(folder):
    """Fill a folder with what the calls read."""
    folder.mkdir()
    expert = WanTransformer3DModel.from_pretrained(WORLD / "pipeline" / "transformer_2")
    DIALECTS["d5"](folder, factors(expert))
    Image.new("RGB", (32, 32)).save(folder / "face.png")
    (folder / "people.csv").write_text(f"video,prompt\n{WORLD}/train/videos/000.mp4,talking\n")
    (folder / "odd").mkdir()
    return odd_paths(folder / "odd")


def test_odd_values(tmp_path, monkeypatch):
    dice, inputs = random.Random(SEED), tmp_path / "inputs"
    paths = make_inputs(inputs)
    with monkeypatch.context() as patch:
        actions = {tool.stem: options(tool.stem, patch) for tool in sorted((ROOT / "tools").glob("[!_]*.py"))}
    calls = []
    for number, (tool, arguments) in enumerate(all_calls(actions, dice, paths)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("tests", "assets", "examples"):  # the configurations name their files from here
            (folder / name).symlink_to(ROOT / name)
        module = tool if tool.startswith("train_") else f"rewardfl_tools.{tool}"
        arguments = [module, *(text.replace("INPUTS", str(inputs)) for text in arguments)]
        calls.append({"arguments": arguments, "folder": str(folder)})
    results = run_calls(calls, tmp_path, timeout=10 * CALLS)
    ends = [(call, [*problems(call, result)]) for call, result in zip(calls, results, strict=True)]
    failures = [describe(call, faults) for call, faults in ends if faults]
    assert not failures, f"ODD_SEED={SEED}: {len(failures)} of {len(calls)} calls\n\n" + "\n\n".join(failures)
    # the calls that work do; otherwise odd values would meet other faults first
    assert {result["code"] for result in results[: len(actions) + 2]} == {0}
