"""docs/private_interfaces.md says what is true of the libraries that are installed, and of the package."""

import ast
import re
from importlib import metadata

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "private_interfaces.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.split("\n") if line.startswith("| ")][1:]


@pytest.mark.parametrize("library, version, library_file, names, our_file, _", ROWS)
def test_what_is_used_is_there(library, version, library_file, names, our_file, _):
    try:
        installed = metadata.distribution(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    assert installed.version.startswith(f"{version}."), f"{library} is {installed.version}: read {library_file} again"
    code, our_names = installed.locate_file(library_file).read_text(), (ROOT / our_file).read_text()
    for name in re.findall(r"`(\w+)`", names):
        assert re.search(rf"\b{name}\b", code), f"{library_file} has no {name}"
        assert re.search(rf"\b{name}\b", our_names), f"{our_file} does not use {name}"


def private_names(source):
    """Names that begin with one underscore and are not the source's own: attributes of others, and modules."""
    nodes = [*ast.walk(ast.parse(source))]
    our_names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            used |= {*node.module.split("."), *(alias.name for alias in node.names)}
    return {name for name in used - our_names if re.match("_[a-z]", name)}


def test_every_private_name_is_listed():
    listed = set(re.findall(r"`(\w+)`", PAGE)) | {part for row in ROWS for part in re.findall(r"\w+", row[2])}
    documented = {"_exit", *(path.stem for path in (ROOT / "tools").glob("_*.py"))}  # os._exit is documented
    files = [*ROOT.glob("*.py"), *(ROOT / "rewardfl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    unlisted = {path.name: private_names(path.read_text()) - listed - documented for path in files}
    assert {name: names for name, names in unlisted.items() if names} == {}
    assert private_names("from a._b import c\nd._e = self._f") == {"_b", "_e"}
