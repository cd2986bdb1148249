"""The rules of the house, read from the imports: which room may know which.

A room is a folder of the package, or a module beside the folders. What stands on a floor needs only floors below it.
"""

import ast
import functools
import graphlib
import itertools
import re
import sys
import tomllib
from collections.abc import Container
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT

# flat modules of the package that are no mathematics: all others are
OTHERS = {"__init__", "command_line", "file_kinds", "files", "lora", "machine", "optim", "outputs", "script", "trust"}
ALGORITHMS = {path.stem for path in (ROOT / "rewardfl").glob("*.py")} - OTHERS
# inside a room: a face goes through file, graph, detector, identity and reward
ROOM_FLOORS, MODULE_FLOORS = 7, 5
# model.model_name has a default; no other module outside of backbones/ and weights/ names a model or one of its parts
NAMES_A_MODEL = {"config.schema"}
Sources = dict[str, str]  # by file, such as rewardfl/data/clips.py
House = dict[str, set[str]]  # by module, such as data.clips: what it imports; of other packages the first name


@functools.cache  # the same files again and again
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def house_of(sources: Sources) -> House:
    names = {name_of(file): nodes_of(text) for file, text in sources.items()}
    return {name: set().union(*(imported(node, names) for node in nodes)) for name, nodes in names.items()}


def name_of(file: str) -> str:
    """rewardfl/data/clips.py -> data.clips; rewardfl/data/__init__.py -> data."""
    parts = Path(file).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, names: Container[str]) -> set[str]:
    if isinstance(node, ast.Import):
        return {short(alias.name, names) for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {short(f"{'.' * node.level}{node.module}.{alias.name}", names) for alias in node.names}
    return set()


def short(full: str, names: Container[str]) -> str:
    """rewardfl.data.clips.fit -> data.clips; torch.nn -> torch; a relative import as it is."""
    package, _, name = full.partition(".")
    if package != "rewardfl":
        return package or full
    while name not in names:
        name = name.rpartition(".")[0]
    return name


def child(name: str, folder: str) -> str | None:
    """Return the part of a folder that has a module: rewards.face.align in rewards -> rewards.face; None if outside.

    A folder's __init__ belongs to the folder around it.
    """
    inside = f"{folder}." if folder else ""
    return inside + name.removeprefix(inside).partition(".")[0] if name.startswith(inside) and name else None


def within(house: House, folder: str) -> dict[str, set[str]]:
    """Return what the modules and folders of a folder import of each other; "" is the package."""
    graph: dict[str, set[str]] = {}
    for name, below in house.items():
        if part := child(name, folder):
            graph.setdefault(part, set()).update(filter(None, (child(n, folder) for n in below if n in house)))
    return {part: below - {part} for part, below in graph.items()}


def floors(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest way down. Raise graphlib.CycleError for a circle."""
    levels: dict[str, int] = {}
    for part in graphlib.TopologicalSorter(graph).static_order():
        levels[part] = 1 + max((levels[below] for below in graph[part]), default=0)
    return max(levels.values())


MODEL = re.compile("wan(?!t(?!r)|db)|(high|low)_noise", re.I)


@functools.cache
def names_a_model(text: str) -> bool:
    """Return whether code names Wan or an expert, by an identifier, a module or a key; sentences do not count."""
    for node in nodes_of(text):
        words = [vars(node).get(field) for field in ("id", "attr", "name", "module", "value", "arg")]
        if any(isinstance(word, str) and " " not in word and MODEL.search(word) for word in words):
            return True
    return False


def violations(sources: Sources) -> list[str]:
    """Return a line for each broken rule."""
    house, lines = house_of(sources), []
    for name, below in house.items():
        room = name.partition(".")[0]
        if room in ALGORITHMS:
            allowed = {*ALGORITHMS, *sys.stdlib_module_names, "torch", *(["diffusers"] if room == "scheduler" else [])}
            lines += [f"{name}: an algorithm imports {other}" for other in below - allowed]
        if room == "config":
            others = [other for other in below & house.keys() if child(other, "") != "config"]
            lines += [f"{name}: the configuration imports {other}" for other in others]
        if "accelerate" in below and room != "training":
            lines.append(f"{name}: accelerate is for training/ and the scripts")
        if room not in ("estimate", "script") and any(child(other, "") == "estimate" for other in below & house.keys()):
            lines.append(f"{name}: the estimate is for --dry-run, plan_run and benchmarks")
        if any(other.startswith(".") for other in below):
            lines.append(f"{name}: a relative import")
    for folder in ["", *{name.rpartition(".")[0] for name in house if "." in name}]:
        where, most = folder or "rewardfl", MODULE_FLOORS if folder else ROOM_FLOORS
        try:
            count = floors(within(house, folder))
            lines += [f"{where}: {count} floors, at most {most}"] if count > most else []
        except graphlib.CycleError as error:
            lines.append(f"{where}: a circle among {', '.join(error.args[1])}")
    models = {name_of(file) for file, text in sources.items() if names_a_model(text)}
    models = {name for name in models if name.partition(".")[0] not in ("backbones", "weights", "merging")}
    return lines + [f"{name}: names a model" for name in models - NAMES_A_MODEL]


@pytest.fixture(scope="module")
def sources():
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "rewardfl").rglob("*.py")}


def test_the_house_keeps_its_rules(sources):
    assert violations(sources) == []


@pytest.mark.parametrize(
    "file, line, broken",
    [
        ("flow.py", "from rewardfl import data", "flow: an algorithm imports data"),
        ("sde.py", "import diffusers", "sde: an algorithm imports diffusers"),
        ("forward_rl.py", "import diffusers", "forward_rl: an algorithm imports diffusers"),
        ("anchor.py", "from rewardfl import data", "anchor: an algorithm imports data"),
        ("config/schema.py", "from rewardfl.files import sha256", "config.schema: the configuration imports files"),
        ("lora.py", "import accelerate", "lora: accelerate is for training/"),
        ("training/setup_run.py", "from rewardfl.estimate import needs", "training.setup_run: the estimate is for"),
        ("data/clips.py", "from .order import micro_batch", "data.clips: a relative import"),
        ("files.py", "from rewardfl.rewards import base", "rewardfl: a circle among"),
        ("training/plan.py", "first = 'high_noise'", "training.plan: names a model"),
        ("data/cache.py", "wan_order = 1", "data.cache: names a model"),
    ],
)
def test_a_broken_rule_is_seen(sources, file, line, broken):
    file = f"rewardfl/{file}"
    lines = violations(sources | {file: f"{sources[file]}\n{line}\n"})
    assert any(line.startswith(broken) for line in lines), lines


def test_only_one_tool_estimates(sources):
    tools = {str(Path("rewardfl", path.name)): path.read_text() for path in (ROOT / "tools").glob("*.py")}
    estimate = {file: "" for file in sources if file.startswith("rewardfl/estimate/")}
    houses = house_of(tools | estimate).items()
    assert {name for name, below in houses if any(child(n, "") == "estimate" for n in below)} == {"plan_run"}


def declared():
    """Distributions that pyproject.toml names, and rewardfl itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *itertools.chain.from_iterable(project["optional-dependencies"].values())]
    return {plain(re.match(r"[\w-]+", line)[0]) for line in lines} | {"rewardfl"}


def plain(distribution):
    return distribution.lower().replace("-", "_")


def undeclared(sources):
    """What is imported, at any depth, of distributions that no requirement names."""
    owners, house = metadata.packages_distributions(), house_of(sources)
    used = {name for below in house.values() for name in below - house.keys()}
    return {
        name: owners.get(name, ["not installed"])
        for name in used - sys.stdlib_module_names - {"rewardfl_tools", "benchmarks", "wandb", "rapidocr"}
        if not declared() & {plain(owner) for owner in owners.get(name, [])}
    }


def test_all_that_is_imported_is_declared(sources):
    files = [*ROOT.glob("*.py"), *(ROOT / "tools").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    sources = sources | {str(Path("rewardfl", path.name)): path.read_text() for path in files}
    assert undeclared(sources) == {}
    assert undeclared({"rewardfl/x.py": "import sympy, numpy"}) == {"sympy": ["sympy"]}  # torch brings it


def test_floors():
    ladder = {f"rewardfl/room/m{i}.py": f"from rewardfl.room import m{i - 1}" for i in range(1, 6)}
    assert "room: 6 floors, at most 5" in violations({"rewardfl/room/m0.py": ""} | ladder)
    assert not any("room:" in line for line in violations({"rewardfl/room/m1.py": ""} | dict(list(ladder.items())[1:])))
    rooms = {f"rewardfl/r{i}.py": f"from rewardfl import r{i - 1}" for i in range(1, 8)}
    assert "rewardfl: 8 floors, at most 7" in violations({"rewardfl/r0.py": ""} | rooms)


# two samplers; the entry of a command
TWICE = {"rollout", "kl_floor", "main"}
# longer than sixty lines, or of more than eight parameters: their docstrings say why
ODD = {
    "reward_flow.replay", "scheduler.__init__", "rewards.remote.client.__init__", "rewards.face.motion.__init__",
    "rewards.face.reward.__init__",
}  # fmt: skip


# the rooms that resolve a configuration: all others take one section of it, or plain fields
RESOLVES = re.compile(r"rewardfl/(config/.*|training/(plan|run)\.py)")
COMPLETE = re.compile(r": (\w+\.)?(AnyConfig|RewardFlConfig|FlowGrpoConfig|ForwardRlConfig|GroupRunConfig)\b")


def takes_the_configuration(sources):
    """Return the files with a parameter or a field that is the complete configuration."""
    texts = {file: text for file, text in sources.items() if not RESOLVES.fullmatch(file)}
    return [file for file, text in texts.items() if any(map(COMPLETE.search, text.splitlines()))]


def test_the_configuration_is_resolved_once(sources):
    assert takes_the_configuration(sources) == []
    for line in ("    cfg: config.AnyConfig", "def f(*, cfg: RewardFlConfig): ..."):
        assert takes_the_configuration({"rewardfl/x.py": line, "rewardfl/training/plan.py": line}) == ["rewardfl/x.py"]


def habits(sources):
    """Return a line for each name that is defined twice, and for each function that is long or wide."""
    homes, broken = {}, []
    for file, text in sources.items():
        for node in nodes_of(text)[0].body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])  # of constants and aliases
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            for name in [*names, *(target.id for target in targets if isinstance(target, ast.Name))]:
                if not name.startswith("_"):
                    homes.setdefault(name, {})[name_of(file)] = None  # overloads count once
        for node in nodes_of(text):
            if isinstance(node, ast.FunctionDef) and (name := f"{name_of(file)}.{node.name}") not in ODD:
                lines, parameters = node.end_lineno - node.lineno + 1, [*node.args.args, *node.args.kwonlyargs]
                width = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
                broken += [f"{name}: {lines} lines"] if lines > 60 else []
                broken += [f"{name}: {width} parameters"] if width > 8 else []
    broken += [f"{name}: in {', '.join(at)}" for name, at in homes.items() if len(at) > 1 and name not in TWICE]
    return broken


def test_names_are_defined_once_and_functions_are_short(sources):
    assert habits(sources) == []
    long = "def f(a, b, c, d, e, g, h, i, j):\n" + "    a = 1\n" * 60
    broken = ["x.f: 61 lines", "x.f: 9 parameters", "f: in x, y"]
    assert habits({"rewardfl/x.py": long, "rewardfl/y.py": "def f(): ..."}) == broken
    assert habits({"rewardfl/x.py": "A = 1", "rewardfl/y.py": "A: int = 2"}) == ["A: in x, y"]


@pytest.mark.check  # a change of the algorithm that a contributor tries may be longer
def test_a_script_stays_readable():
    limits = {"train_reward_fl.py": 180, "train_flow_grpo.py": 190, "train_forward_rl.py": 180}
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.glob("train_*.py")}
    assert lengths.keys() == limits.keys() and all(lengths[name] <= most for name, most in limits.items())


def test_no_tool_hides_a_module_of_python():
    """`python tools/evaluate.py` looks for modules in tools/ first, also for those that Python's own ask for."""
    assert not {path.stem for path in (ROOT / "tools").glob("*")} & sys.stdlib_module_names
