"""The architecture as tests: imports go down, io does not know torch, every file has a noun, no assert does work."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["configs", "io", "tiers", "engine", "api", "bench"]
BOTTOM = {"tierstep.errors", "tierstep.version"}
MAY_IMPORT = {layer: set(ORDER[: ORDER.index(layer) + 1]) for layer in ORDER}
MAY_IMPORT["api"] = set(ORDER)  # the command line starts benchmarks
FILES = [file for layer in ORDER for file in sorted((ROOT / layer).rglob("*.py"))]


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module: str) -> str | None:
    """Return the root folder of an imported name of the package; None for errors, version and other packages."""
    if not module.startswith("tierstep") or any(module == b or module.startswith(b + ".") for b in BOTTOM):
        return None
    part = module.split(".")[1] if "." in module else "api"
    return part if part in ORDER else "api"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file):
    layer = file.relative_to(ROOT).parts[0]
    upward = {m for m in imported_modules(file) if (found := layer_of(m)) and found not in MAY_IMPORT[layer]}
    assert not upward, f"{layer} must not import {upward}"


def test_io_does_not_know_torch():
    mentions = [file for file in (ROOT / "io").rglob("*.py") if re.search(r"\btorch\b", file.read_text())]
    assert mentions == []


def test_no_file_is_named_after_nothing():
    nameless = {"utils", "util", "common", "helpers", "constants", "misc"}
    assert [file for file in FILES if file.stem in nameless] == []


def test_no_assert_does_work():
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
