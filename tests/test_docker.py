"""The container files agree with what they are made from. Building them needs a daemon, which a test has not."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("scripts/Dockerfile", "scripts/Dockerfile.cuda")
Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """(instruction, the rest of its line), continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


def faults(text: str) -> list[str]:
    """What is wrong with a container file's text."""
    found, steps = [], instructions(text)
    known = {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD"}
    found += [f"{word} is not known" for word, _ in steps if word not in known]
    bases = [rest for word, rest in steps if word == "FROM"]
    if steps[0][0] != "FROM" or not all(re.search(r":\d+\.\d+\.\d+-[\w.-]+$", base) for base in bases):
        found.append("a base is not pinned to a whole version")
    users = [rest for word, rest in steps if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("runs as root")
    ran = " && ".join(rest for word, rest in steps if word == "RUN").split("&&")
    commands = [shlex.split(one) for one in ran]
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for command in commands:
        if "pip" in command:
            found.append("pip outside of scripts/setup.sh, which pins versions")
        if command[0] == "scripts/setup.sh":
            found += [f"no extra {one}" for words in command[1:] for one in words.split(",") if one not in extras]
    if not any(command[0] == "scripts/setup.sh" for command in commands):
        found.append("installs nothing")
    started = re.findall(r'"([^"]+)"', next(rest for word, rest in steps if word == "CMD"))
    for script in {command[0] for command in commands if "/" in command[0]} | {started[0]}:
        if not os.access(ROOT / script, os.X_OK):
            found.append(f"{script} cannot be run")
    for word, rest in steps:
        if word == "COPY":
            *sources, _ = [one for one in rest.split() if not one.startswith("--")]
            found += [f"{source} is not there" for source in sources if not (ROOT / source).exists()]
            if "--chown=" not in rest:
                found.append("files of root")
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_container_file_names_what_is_there(name: str) -> None:
    assert faults((ROOT / name).read_text()) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "old, new, said",
    [
        (r"^FROM (\S+):\S+", r"FROM \1:latest", "not pinned"),
        (r"^FROM (\S+):\S+", r"FROM \1", "not pinned"),
        (r"^USER 10001", "USER root", "runs as root"),
        (r"^USER 10001\n", "", "runs as root"),
        (r"^COPY --chown=10001 \.", "COPY --chown=eps src", "src is not there"),
        (r"^COPY --chown=10001", "COPY", "files of root"),
        (r"mlx,cuda,dev", "mlx,cuda,gpu", "no extra gpu"),
        (r"^RUN scripts/setup.sh", "RUN pip install . && scripts/setup.sh", "pip outside"),
        (r"^RUN scripts/setup.sh.*", "", "installs nothing"),
        (r"scripts/demo.sh", "scripts/show.sh", "scripts/show.sh cannot be run"),
    ],
)
def test_a_wrong_container_file_is_told(name: str, old: str, new: str, said: str) -> None:
    text = (ROOT / name).read_text()
    wrong = re.sub(old, new, text, flags=re.M)
    assert wrong != text and any(said in fault for fault in faults(wrong))


@pytest.mark.parametrize("name", FILES)
def test_scripts_of_the_first_comment_are_there(name: str) -> None:
    head = (ROOT / name).read_text().split("FROM")[0]
    assert all((ROOT / script).is_file() for script in re.findall(r"scripts/[\w.]+\.(?:sh|py)", head))


def test_python_is_one_that_the_package_takes() -> None:
    (base,) = re.findall(r"^FROM python:(\d+)\.(\d+)", (ROOT / "scripts" / "Dockerfile").read_text(), re.M)
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert least.startswith(">=") and tuple(map(int, base)) >= tuple(map(int, least[2:].split(".")))


def test_the_profiler_is_of_the_bases_cuda() -> None:
    text = (ROOT / "scripts" / "Dockerfile.cuda").read_text()
    (base,) = re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)", text, re.M)
    assert re.findall(r"cuda-nsight-systems-([\d-]+)", text) == [base.replace(".", "-")]


def test_what_git_ignores_stays_out_of_the_context() -> None:
    lines = set((ROOT / ".dockerignore").read_text().splitlines())
    for line in (ROOT / ".gitignore").read_text().splitlines():
        pattern = line.rstrip("/")
        assert (pattern if "/" in pattern else f"**/{pattern}") in lines, line
    assert ".git" in lines
