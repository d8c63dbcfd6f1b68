"""Modules of the package import each other one way, so that each can be imported first and read without those above it."""

import ast
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

import tilewave

PACKAGE = pathlib.Path(tilewave.__file__).parent
FILES = {
    ".".join(("tilewave", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")
}


def imported(name: str) -> set[str]:
    """The package's modules that module `name` imports, in functions too, but not for type checkers alone."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            source = ".".join(filter(None, (package if node.level else "", node.module)))
            for alias in node.names:  # a module, or a name that `source` has
                found.add(f"{source}.{alias.name}" if f"{source}.{alias.name}" in FILES else source)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(FILES[name].read_text()))
    return found & FILES.keys()


def test_imports_are_found():
    assert imported("tilewave.ops") == {f"tilewave.ops.{name}" for name in ("attention", "bitnet", "blocks", "elements", "indexer", "linear_attention", "mamba2", "mamba2_chunks", "mla", "moe", "nsa", "products", "recurrences", "rows", "sparse", "vertical_slash")}
    assert imported("tilewave._dispatch") == {"tilewave._arrays", "tilewave._torch_ops"}  # the latter in a function
    assert imported("tilewave.flash_attn.layers._rotary") == {"tilewave._flash", "tilewave.ops"}


def test_no_module_imports_itself_through_others():
    order = graphlib.TopologicalSorter({name: imported(name) for name in FILES})
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_each_module_can_be_imported_first():
    """With NumPy alone. Those that need PyTorch say so: it is what they fail for."""
    code = f"""
import importlib, sys
import numpy
sys.modules["torch"] = None  # makes every import of it fail
for name in {sorted(FILES.keys() - {"tilewave.__main__"})}:
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == "tilewave"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    needing_torch = ("_torch_ops", "flash_attn.layers._rotary_embedding", "nn", "sdpa")
    assert result.stdout.splitlines() == [f"tilewave.{name} torch" for name in needing_torch]
