"""The wheel: what is in it, and its commands in an empty environment, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.long
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def call(*command, **settings):
    """What a command says. It must end with 0, and finds no checkout by PYTHONPATH."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools would also take what an earlier build left in the checkout's build/."""
    source, out = tmp_path_factory.mktemp("source") / "rewardfl", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, symlinks=True, ignore=leave_out)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    call(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, source)
    (file,) = out.glob("*.whl")
    return file


def leave_out(folder, names):
    """Of the checkout's root what git does not track, and the assets' files, which are many."""
    ignored = shutil.ignore_patterns("__pycache__")(folder, names)
    if Path(folder) == ROOT:
        ignored |= shutil.ignore_patterns("build", "outputs", "models", "data", "*.egg-info", ".*")(folder, names)
    return ignored | ({"tiny_world"} if Path(folder) == ROOT / "assets" else set())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return bin/ of an environment with the wheel and this process's libraries."""
    folder = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(paths["purelib"], "libraries.pth").write_text("\n".join(libraries))
    python = Path(paths["scripts"], "python")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    return python.parent


def test_the_wheel_has_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = [("rewardfl", path) for path in (ROOT / "rewardfl").rglob("*.py")]
    modules += [("rewardfl_tools", path) for path in (ROOT / "tools").rglob("*.py")]
    data = [path for path in (ROOT / "rewardfl").rglob("*") if path.suffix == ".json" or path.name == "py.typed"]
    data += (ROOT / "rewardfl" / "evaluation" / "report" / "pages").iterdir()
    expected = {f"{package}/{path.relative_to(ROOT / path.relative_to(ROOT).parts[0])}" for package, path in modules}
    assert names == expected | {str(path.relative_to(ROOT)) for path in data}
    assert "rewardfl/backbones/wan/published/Wan2.2-I2V-A14B.json" in names
    assert "rewardfl/backbones/image/published/FLUX.1-dev.json" in names
    assert "rewardfl/py.typed" in names


def test_every_tool_has_a_command():
    tools = {path.stem for path in (ROOT / "tools").glob("*.py") if not path.stem.startswith("_")}
    assert {target for target in PROJECT["scripts"].values()} == {f"rewardfl_tools.{tool}:main" for tool in tools}


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_commands_run_anywhere_and_help_without_torch(installed, tmp_path, name):
    module = PROJECT["scripts"][name].partition(":")[0]
    assert f"usage: {name}" in call(installed / name, "--help", cwd=tmp_path)
    code = (
        f"import sys, {module}\n"
        "sys.argv[1:] = ['--help']\n"
        f"try: {module}.main()\n"
        "finally: assert not {'torch', 'matplotlib', 'jinja2'} & set(sys.modules)"
    )
    call(installed / "python", "-c", code, cwd=tmp_path)
