"""The three READMEs: short where promised, no dead link, no flag that is not there, Python that runs as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from eps_core.cli.main import cli

ROOT = Path(__file__).parent.parent
README, RESULTS, CORE = (ROOT / name for name in ("README.md", "results/README.md", "eps_core/README.md"))
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def flags_of(command: click.Command) -> set[str]:
    own = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*map(flags_of, inner), {"--help"})


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_readme_is_a_screen_and_a_half() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("page", (README, RESULTS, CORE), ids=lambda page: str(page.relative_to(ROOT)))
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


@pytest.mark.parametrize("page", (README, CORE), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_exists(page: Path) -> None:
    named = set(FLAG.findall(page.read_text()))
    assert named and not named - flags_of(cli)


@pytest.mark.parametrize(
    ("page", "says"),
    ((README, "groups read"), (CORE, "estimated share unread")),
    ids=("README.md", "eps_core/README.md"),
)
def test_its_python_runs_as_written(page: Path, says: str) -> None:
    (block,) = python_blocks(page)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    if page == README:  # the needle's value, a token a line
        assert "".join(line.split()[0] for line in done.stdout.splitlines()) == "31415."
