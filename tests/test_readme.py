"""README.md and docs/: short where promised, no dead link, no flag that is not there, commands and Python that run as
written, generated parts and the figure as the code has them."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import click
import pytest
import tiny_models
from command import outcome

import docs
from eps_core.cli.main import cli
from eps_core.config.bytes import kv_bytes, scoring_bytes
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.load import ENGINES
from eps_core.metrics.provenance import run_line
from eps_core.metrics.rounds import ROUND_KEYS, RoundRecord, summarise_rounds
from eps_core.metrics.steps import STEP_KEYS, StepRecord, summarise
from experiments.engine_blocks.run import LINES, readme_blocks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = [ROOT / "results" / name for name in ("README.md", "LEADERBOARD.md", "real.md", "speed.md")]
DOCS = sorted((ROOT / "docs").glob("*.md"))
QUICKSTART, ENGINES_PAGE = ROOT / "docs" / "quickstart.md", ROOT / "docs" / "add-an-engine.md"
METRICS = ROOT / "docs" / "metrics.md"
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def flags_of(command: click.Command) -> set[str]:
    own = {
        flag for param in command.params for flag in (*param.opts, *param.secondary_opts, *getattr(param, "also", ()))
    }
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(flags_of, inner), {"--help"})


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def written(page: Path) -> str:
    """Return what was written by hand of a page."""
    return docs.PART.sub("", page.read_text())


def commands(page: Path) -> list[list[str]]:
    """Every command of its `sh` blocks, those of a line after each other."""
    found: list[list[str]] = []
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        for _, one in itertools.groupby(words, lambda word: word == "&&"):
            found.append(list(one))
    return [one for one in found if one != ["&&"]]


def test_the_readme_is_a_screen_and_a_half() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 180
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("page", (README, *RESULTS, *DOCS), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_tracked_file(page: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {(ROOT / name).resolve() for name in listed.stdout.split("\0") if name}
    links = LINK.findall(page.read_text())
    assert links
    for target, anchor in links:
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file in tracked, f"{target} is not in git"
        assert not anchor or anchor[1:] in anchors(file), f"{target} has no heading {anchor}"


@pytest.mark.parametrize("page", (README, *DOCS), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_exists(page: Path) -> None:
    # lines whose flags are not of our commands
    others = "vllm serve", "sglang.launch_server", "--worker-extension", "pip install", "scripts/test.sh", "lm_eval run"
    ours = [line for line in written(page).splitlines() if not any(other in line for other in others)]
    assert not set(FLAG.findall("\n".join(ours))) - flags_of(cli)


def test_every_page_is_listed_and_short() -> None:
    listed = {target for target, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    for page in DOCS:
        # the keys of the JSONL are as many as there are
        own = [line for line in written(page).splitlines() if page != METRICS or not line.startswith("| `")]
        assert page.name == "README.md" or page.name in listed, page.name
        assert len(own) <= 130, f"{page.name} has {len(own)} lines"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    assert docs.generated(page.read_text()) == page.read_text(), "run python scripts/docs.py"


def test_every_generated_part_has_a_place() -> None:
    assert sorted(name for page in DOCS for _, name, *_ in docs.PART.findall(page.read_text())) == sorted(docs.PARTS)


def described(heading: str) -> dict[str, list[str]]:
    """Return (type, unit, kind, meaning) of each key in the tables below a heading of metrics.md."""
    text = re.split(r"^## (.*)$", METRICS.read_text(), flags=re.M)
    rows = [line.strip("| ").split(" | ") for line in text[text.index(heading) + 1].splitlines() if line[:3] == "| `"]
    found = {name.strip("`"): cells for name, *cells in rows}
    assert len(found) == len(rows) and all(len(cells) == 4 and all(cells) for cells in found.values())
    return found


def type_name(kind: Any) -> str:
    """Return a type hint as JSON calls it; that a value may be null is said for all keys together."""
    if isinstance(kind, UnionType):
        return type_name(get_args(kind)[0])
    inner = get_args(kind)
    name = {"str": "text", "dict": "object", "ndarray": "list"}.get(kind.__name__, kind.__name__)
    return f"list of {inner[0].__name__}" if name == "list" and inner else name


def test_every_key_of_the_jsonl_is_described() -> None:
    run, steps, rounds, summary, added = map(described, ("Run", "Steps", "Rounds", "Summary", "Comparison"))
    for keys, record, names in ((steps, StepRecord, STEP_KEYS), (rounds, RoundRecord, ROUND_KEYS)):
        hints = get_type_hints(record)
        assert [(name, cells[0]) for name, cells in keys.items()] == [(name, type_name(hints[name])) for name in names]
    kinds = set(re.findall(r"^\| (\w+) \|", METRICS.read_text().partition("\n## ")[0], re.M)) - {"kind"}
    assert kinds == {cells[2] for keys in (run, steps, rounds, summary, added) for cells in keys.values()}
    for made in (summarise([]), summarise_rounds([])):
        assert set(made) <= {*summary, *steps, *rounds}
    assert set(summary) <= set(summarise_rounds([]))
    line = run_line(EpsConfig(), CacheSpec(1, 1, 8, 1), "numpy", "cpu", "demo", {})
    assert set(line) <= set(run)


def test_what_a_run_adds_to_its_summary_is_described(tmp_path: Path) -> None:
    files = ["--metrics", str(tmp_path / "steps.jsonl"), "--cache-dir", str(tmp_path / "stored")]
    flags = ["--method", "rq", "--kl", "--prompt", "A" * 40, "--max-new-tokens", "3", "--backend", "cuda"]
    assert not outcome(["run", *flags, "--device", "cpu", *files], tmp_path).code
    line = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    added = set(line) - set(summarise([])) - {"type"}
    assert added == set(described("Comparison")) - {"bytes_ratio_model"}  # which engines alone have


def test_the_figure_says_the_bytes_of_the_default() -> None:
    config, head_dim, tokens, text = EpsConfig.of(method="rq"), 128, 32768, (ROOT / "docs" / "idea.svg").read_text()
    dense = kv_bytes(1, 1, head_dim, tokens, "bfloat16")
    summaries, selected = scoring_bytes(config, head_dim, [tokens]), config.budget_groups(tokens)
    read = kv_bytes(1, 1, head_dim, selected, "bfloat16")
    for figure in (
        f"{summaries / tokens:.0f} bytes a token", f"{dense // tokens} bytes a token", f"{selected:,} tokens",
        f"{summaries / 1e6:.2f} MB", f"{read / 1e6:.2f} MB", f"{(summaries + read) / 1e6:.2f} MB",
        f"{dense / 1e6:.1f} MB", f"{100 * (summaries + read) / dense:.1f} %",
    ):  # fmt: skip
        assert figure in text, figure


@pytest.mark.parametrize(
    ("page", "number", "says"),
    (
        (README, 0, "bytes read"),
        (QUICKSTART, 0, "27182 stop 6 tokens after"),
        (ENGINES_PAGE, 0, "estimated share unread"),
    ),
    ids=("README.md", "quickstart.md", "add-an-engine.md"),
)
def test_its_python_runs_as_written(page: Path, number: int, says: str) -> None:
    said = said_by(blocks(page, "python")[number], ROOT)
    assert says in said
    if page == README:  # the needle's value
        assert said.split()[0] == "31415."


def said_by(code: str, folder: Path) -> str:
    """Return what Python code prints that is run in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# what takes minutes or installs: these print their usage (test_scripts.py), and no other command is excused
LONG = {"scripts/demo.sh", "scripts/test.sh"}
MAX_CONTEXT = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the READMEs' commands find what they name: DIR, a model of 4,096 tokens, and the user's files."""
    root = tmp_path_factory.mktemp("readme")
    tiny_models.changed(root / "DIR", "llama2", config={"max_position_embeddings": MAX_CONTEXT})
    (root / "long.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 30)
    sample = {
        "input": "Who fell?", "context": "The rain fell in torrents. " * 100, "answers": ["the rain"], "length": 500,
        "dataset": "qasper", "language": "en", "all_classes": None, "_id": "0",
    }  # fmt: skip
    (root / "qasper.jsonl").write_text("".join(json.dumps(sample | {"_id": str(i)}) + "\n" for i in range(2)))
    return root


COMMANDS = dict.fromkeys(tuple(line) for page in (README, *DOCS) for line in commands(page) if line[0] not in LONG)


def test_their_commands_run_as_printed(folder: Path) -> None:
    """In their order, and so in one test: what one writes, the next reads."""
    for line in COMMANDS:
        assert line[0] == "eps-proto", line
        done = outcome([*line[1:]], folder)
        assert done.code == 0, (line, done.err)
        last = done.out.splitlines()[-1]
        assert json.loads(last) if last.startswith("{") else line[1] == "report", line


def test_every_engine_has_a_block_of_a_few_lines() -> None:
    """That `scripts/experiments/engine_blocks` runs in fresh environments: installs, and answers the demo's needle."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = readme_blocks()
    assert tuple(found) == ENGINES and LINES == 5
    for engine, block in found.items():
        install, run = block.splitlines()
        (extra,) = re.findall(r"'\.\[(.*?)\]'", install)
        assert extra in extras and extra.startswith(engine) and f"run --engine {engine} " in run


def test_the_long_ones_are_there() -> None:
    named = {line[0] for page in (README, *DOCS) for line in commands(page)} - {"eps-proto"}
    assert named == LONG and all(os.access(ROOT / name, os.X_OK) for name in LONG)


def test_its_python_runs_with_a_model_of_your_own(folder: Path) -> None:
    """As its comment says."""
    (block,) = blocks(README, "python")
    (own,) = re.findall(r'LLM\("DIR".*?\)', block)
    assert said_by(re.sub(r"= LLM\(.*?\)", f"= {own}", block, count=1), folder).count("bytes read") == 1
