"""Every experiment has a README of one screen, and a command that prints its usage and refuses unknown flags."""

import re
from pathlib import Path

import pytest
from command import SCRIPTS, prints_its_usage_or_refuses

FOLDER = SCRIPTS / "experiments"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/run.py"))
COMMANDS = [str(path.relative_to(SCRIPTS)) for path in sorted(FOLDER.glob("*/*.py")) if "__main__" in path.read_text()]


def test_every_folder_is_an_experiment() -> None:
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_its_readme_has_question_command_result_and_rows(name: str) -> None:
    page = FOLDER / name / "README.md"
    text = page.read_text()
    assert [text.count(f"\n**{part}.**") for part in ("Question", "Command", "Result", "Rows")] == [1] * 4
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 120
    assert f"python scripts/experiments/{name}/run.py" in text
    assert all((page.parent / target).exists() for target in re.findall(r"\]\(([^)#\s:]*)\)", text))


@pytest.mark.parametrize("name", COMMANDS)
def test_its_command_prints_its_usage_or_refuses(name: str, tmp_path: Path) -> None:
    prints_its_usage_or_refuses(name, tmp_path)
