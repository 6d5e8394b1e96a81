"""Where code may live and what it may import: one table, one rule, every folder walked."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("eps_core", "eps_mlx", "eps_cuda")
# array libraries, backends and experiments that no file of a package may import
FORBIDDEN = {
    "eps_core": {"mlx", "mlx_lm", "torch", "triton", "transformers", "vllm", "eps_mlx", "eps_cuda", "experiments"},
    "eps_mlx": {"torch", "triton", "transformers", "vllm", "eps_cuda", "experiments"},
    "eps_cuda": {"mlx", "mlx_lm", "eps_mlx", "experiments"},
}
# the import rule: a subpackage imports those of earlier lines only, and itself; those of one line are independent
RULE = (
    ("errors",),
    ("io",),
    ("summaries",),
    ("config",),
    ("kv_cache",),
    ("attention", "cpu", "eviction"),
    ("metrics", "load", "backend"),
    ("models",),
    ("decode", "tasks"),
    ("integrations",),
    ("reference", "eps_mlx", "eps_cuda"),
    ("evaluation", "bench"),
    ("report",),
    ("cli",),
    ("eps_core",),  # its own names: LLM, EpsConfig
)
RANK = {subpackage: rank for rank, subpackages in enumerate(RULE) for subpackage in subpackages}


def files(package: str) -> list[Path]:
    return [file for file in sorted((ROOT / package).rglob("*.py")) if "__pycache__" not in file.parts]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for package in PACKAGES for file in files(package)}


def subpackage_of(module: str) -> str:
    """`eps_core.config.selection` is of subpackage config, `eps_mlx.cache` of subpackage eps_mlx."""
    package, *inner = module.split(".")
    return inner[0] if package == "eps_core" and inner else package


def imports(file: Path) -> Iterator[str]:
    """Full names of all that a file imports, late and type-only imports included: `from a.b import c` gives a.b.c where
    that is a module, else a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}:{node.lineno}: relative imports hide where a name lives"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def against_the_rule(module: str, imported: str) -> bool:
    """Whether an import of one of our modules by another breaks the table."""
    if imported.split(".")[0] not in PACKAGES or imported == "eps_core":
        return False
    mine, theirs = subpackage_of(module), subpackage_of(imported)
    return mine != theirs and RANK[theirs] >= RANK[mine]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_a_library_that_its_package_must_not_know(package: str) -> None:
    for file in files(package):
        names = {name.split(".")[0] for name in imports(file)}
        assert not names & FORBIDDEN[package], f"{file.relative_to(ROOT)} imports {names & FORBIDDEN[package]}"


@pytest.mark.parametrize("module", MODULES)
def test_every_subpackage_imports_earlier_ones_only(module: str) -> None:
    wrong = [name for name in imports(MODULES[module]) if against_the_rule(module, name)]
    assert not wrong, f"{module} imports {wrong}: see RULE"


def test_the_rule_refuses_what_it_should() -> None:
    assert against_the_rule("eps_core.config.eps.read", "eps_core.attention.protocol")
    assert against_the_rule("eps_core.attention.layer", "eps_core.cpu.host")
    assert against_the_rule("eps_mlx.model", "eps_core.evaluation.measure")
    assert not against_the_rule("eps_core.cli.main", "eps_core.errors")


def test_no_import_goes_in_a_circle() -> None:
    edges = {module: {name for name in imports(file) if name in MODULES} for module, file in MODULES.items()}
    state: dict[str, int] = {}

    def selected_mask(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != 1, " -> ".join((*path[path.index(module) :], module))
        if module not in state:
            state[module] = 1
            for name in sorted(edges[module] - {module}):
                selected_mask(name, (*path, module))
            state[module] = 2

    for module in edges:
        selected_mask(module, ())


def test_importing_the_core_loads_no_backend() -> None:
    modules = [module for module in MODULES if module.startswith("eps_core") and not module.endswith("__main__")]
    code = (
        f"import sys\nfor m in {modules}: __import__(m)\n"
        "print([m for m in sys.modules if m in ('mlx', 'torch', 'eps_mlx', 'eps_cuda')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_siblings_list_the_same_functions_in_the_same_order() -> None:
    """`diff` is a review tool: what both backends define, they define in one order."""
    for name in ("attention", "device"):
        listed = []
        for package in ("eps_mlx", "eps_cuda"):
            tree = ast.parse((ROOT / package / f"{name}.py").read_text())
            public = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            listed.append(public)
        common = set(listed[0]) & set(listed[1])
        assert [f for f in listed[0] if f in common] == [f for f in listed[1] if f in common], name
        assert len(common) >= 0.7 * max(map(len, listed)), (name, listed)


# patterns, each with the files of eps_core that alone may have it
HOMES = (
    (r"(?<!def )\bload_decoder\(", "decode/session.py"),
    # our own decoders, and what runs in other engines
    (r"(?<!def )\bload_tokenizer\(", "decode/session.py", "evaluation/engines.py", "models/tokenizer.py"),
    (r"\bdecoder\.(prefill|step)\(", "decode/generate.py"),
    (r"(?<!def )\bstep_record\(", "decode/generate.py", "evaluation/engines.py", "integrations/layers.py"),
    # who renames a temporary file
    (r"mkstemp|os\.replace\(|\.partial\b", "io/caches.py", "io/outputs.py"),
    # who asks for the commit and the platform
    (r".git_commit.[:=] ?(provenance\.)?git_commit\(", "metrics/provenance.py"),
    # who rewrites a line or asks what a terminal is
    (r"isatty|\\r(\\|\{|[a-z]+ )|\\033\[|import rich|from rich", "metrics/terminal.py"),
    # where plots have their colours from: one method looks the same on all of them
    (r"rcParams\[|svg\.hashsalt|import matplotlib|from matplotlib", "report/style.py"),
    # figures would depend on the build of Python
    (r'get_path\("stdlib"\)',),
    (r"UNIQUE\S* \(`?meanstd|meanstd`?\s+(is )?UNIQUE|meanstd at (its|their) authors",),
)


@pytest.mark.parametrize("row", HOMES, ids=lambda row: row[0])
def test_there_is_one_place_for_each(row: tuple[str, ...]) -> None:
    pattern, *homes = row
    globs = ("eps_*/**/*.py", "scripts/*.py", "eps_*/**/*.md", "*.md", "results/*.md")
    texts = {str(file.relative_to(ROOT)): file.read_text() for glob in globs for file in ROOT.glob(glob)}
    assert {name for name, text in texts.items() if re.search(pattern, text)} == {f"eps_core/{one}" for one in homes}
