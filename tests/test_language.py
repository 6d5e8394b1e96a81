"""Code and documents use the words of the field; docs/concepts.md has the glossary of the few that are our own."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [file for package in ("eps_core", "eps_cuda", "eps_mlx") for file in sorted((ROOT / package).rglob("*.py"))]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "results" / name for name in ("README.md", "LEADERBOARD.md", "real.md", "speed.md")),
]

# a word -> what the field says
WORDS = {
    r"guards?": "sink and recent tokens",
    r"seal(s|ed|ing)?": "finalize, span",
    r"open groups?": "partial group",
    r"certif(icate|icates|ied|y|ies)": "error bound",
    r"escalat(e|es|ed|ion|ions)": "extend the selection",
    r"mend(s|ed)?": "fix",
    r"let go": "evict",
    r"by lot": "at random",
    r"anew": "again",
    r"besides(?=[.,;:])": "also",
    r"arms?": "variant",
    r"(un)?gat(es?|ed|ing)": "sparse, sparse attention",
    r"telemetry": "metrics",
    r"design section": "the reason itself",
    r"product requirements?": "the reason itself",
}
PATTERN = re.compile(rf"(?<![\w`./-])({'|'.join(WORDS)})(?![\w`(=-])", re.IGNORECASE)
# where the word is another's: file -> words
ALLOWED = {
    # of an MLP
    "eps_core/cpu/layer.py": {"gate"},
    "eps_core/models/phi3.py": {"gate"},
    "eps_core/models/weights.py": {"gate"},
}
# the same word in names and values, and the files where it is an MLP's, the Hub's, or a former name that is still read
GATE = re.compile(r"(?<![A-Za-z])([Uu]n)?[Gg]at(es?|ed|ing)(?![a-z])|(?<![A-Z])GAT(ES?|ED|ING)(?![A-Z])")
GATES = {
    *("eps_core/cpu/layer.py", "eps_cuda/few_rows.py", "eps_core/decode/array_model.py"),
    *("eps_core/models/phi3.py", "eps_core/models/weights.py"),
    *("eps_core/reference/model.py", "eps_cuda/model.py", "scripts/random_models.py", "tests/test_model.py"),
    *("scripts/experiments/training/run.py", "eps_core/models/hub.py", "tests/test_hub.py", "eps_core/io/schema.py"),
    *("tests/test_schema.py", "tests/test_calibrate.py", "tests/test_language.py"),
}


def words(text: str) -> set[str]:
    return {found[1].lower() for found in PATTERN.finditer(text)}


def prose(file: Path) -> list[tuple[int, str]]:
    """Return (line, text) of every comment, docstring and message of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    return [
        (token.start[0], re.sub(r"\{[^{}]*\}", "", token.string))
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_code_speaks_the_words_of_the_field(file: Path) -> None:
    allowed = ALLOWED.get(str(file.relative_to(ROOT)), set())
    faults = [
        f"{file.name}:{line}: {', '.join(found)}" for line, text in prose(file) if (found := words(text) - allowed)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_documents_speak_the_words_of_the_field(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    assert not words(text) - ALLOWED.get(str(file.relative_to(ROOT)), set())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_say_what_is_returned_or_done(file: Path) -> None:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text())):
        text = ast.get_docstring(node) if isinstance(node, nodes) else None
        first = (text or "-").split()[0]
        assert first not in ("What", "Of", "Whether"), f"{file.name}: {text and text[:80]}"


def test_no_name_or_value_is_a_gate() -> None:
    files = [*FILES, *(file for folder in ("scripts", "tests") for file in (ROOT / folder).rglob("*.py"))]
    assert {str(file.relative_to(ROOT)) for file in files if GATE.search(file.read_text())} == GATES


def test_a_private_word_is_found() -> None:
    assert words("the guards of a sealed group") == {"guards", "sealed"} and not words(
        "`guards` of num_guards, safeguards"
    )
