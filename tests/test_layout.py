"""Dependencies point one way: the core loads no array library but numpy, and the backends never load each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "eps_core": {"mlx", "torch", "triton", "eps_mlx", "eps_cuda"},
    "eps_mlx": {"torch", "triton", "eps_cuda"},
    "eps_cuda": {"mlx", "eps_mlx"},
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_import_against_the_direction(package):
    for file in (ROOT / package).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & FORBIDDEN[package], f"{file.name} imports {names}"


def test_importing_the_core_loads_no_backend():
    modules = sorted(p.stem for p in (ROOT / "eps_core").glob("*.py") if p.stem != "__init__")
    code = (
        f"import sys\nfor m in {modules}: __import__('eps_core.' + m)\n"
        "print([m for m in sys.modules if m in ('mlx', 'torch')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_siblings_list_the_same_functions_in_the_same_order():
    """`diff` is a review tool: what both backends define, they define in one order."""
    for name in ("cache", "summaries", "selection", "attention", "model"):
        listed = []
        for package in ("eps_mlx", "eps_cuda"):
            tree = ast.parse((ROOT / package / f"{name}.py").read_text())
            public = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            listed.append(public)
        common = set(listed[0]) & set(listed[1])
        assert [f for f in listed[0] if f in common] == [f for f in listed[1] if f in common], name
        assert len(common) >= 0.7 * max(map(len, listed)), (name, listed)
