"""Which files a command may write: never an input, never a model's, never another command's, none counted twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import call, last, outcome
from test_outputs import ROOT, names

from eps_core.cli.main import cli
from eps_core.errors import ConfigError
from eps_core.io import outputs

COMMANDS: dict[str, list[str]] = {
    "report": ["report", "IN", "-o", "OUT"],
    "report-of-two": ["report", "OTHER", "IN", "-o", "OUT"],
    "capture-text": ["capture", "--text", "IN", "-o", "OUT"],
    "calibrate-text": ["calibrate", "--text", "IN", "-o", "OUT"],
    "replay": ["replay", "OTHER", "IN", "-o", "OUT"],
    "replay-policy": ["replay", "OTHER", "--eps-heads", "retrieval", "--eps-head-policy", "IN", "-o", "OUT"],
    "run-metrics": ["run", "--prompt-file", "IN", "--metrics", "OUT"],
    "run-csv": ["run", "--prompt-file", "IN", "--csv", "OUT"],
    "run-policy": ["run", "--eps-heads", "retrieval", "--eps-head-policy", "IN", "--csv", "OUT"],
    "run-both": ["run", "--metrics", "IN", "--csv", "OUT"],
    "evaluate-longbench": ["evaluate", "--eps-method", "rq", "--longbench", "OTHER", "--longbench", "IN", "-o", "OUT"],
    "evaluate-ruler": ["evaluate", "--eps-method", "rq", "--ruler", "IN", "-o", "OUT"],
    "evaluate-text": ["evaluate", "--eps-method", "rq", "--text", "IN", "-o", "OUT"],
    "evaluate-prompts": ["evaluate", "--longbench", "OTHER", "--longbench-prompts", "IN", "-o", "OUT"],
}
SPELLINGS = {"same": "in", "dots": "folder/../in", "link": "soft", "link-of-a-folder": "back/in", "hard-link": "hard"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("in", "other"):
        (tmp_path / name).write_text("precious")
    (tmp_path / "soft").symlink_to("in")
    (tmp_path / "hard").hardlink_to("in")
    (tmp_path / "back").symlink_to(".")
    return tmp_path


def refusal(args: list[Any]) -> str:
    with pytest.raises(ConfigError) as error:
        cli.main([str(arg) for arg in args], standalone_mode=False)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_output_that_is_an_input_is_refused(name: str, spelling: str, place: Path) -> None:
    words = {"IN": "in", "OTHER": "other", "OUT": SPELLINGS[spelling]}
    before = names(place)
    message = refusal([words.get(arg, arg) for arg in COMMANDS[name]])
    assert f" {SPELLINGS[spelling]} is " in message and "it would destroy" in message
    assert names(place) == before and (place / "in").read_text() == (place / "other").read_text() == "precious"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "new.safetensors", "link"])
@pytest.mark.parametrize(
    "args",
    [
        ["run", "--prompt", "x", "--metrics"], ["run", "--prompt", "x", "--csv"], ["capture", "-o"],
        ["calibrate", "-o"], ["evaluate", "--eps-method", "rq", "-o"],
    ],
    ids=lambda args: "-".join((args[0], args[-1].strip("-"))),
)  # fmt: skip
def test_a_model_is_no_place_for_an_output(args: list[str], file: str, model: Path, tmp_path: Path) -> None:
    out = model / file
    if file == "link":
        out = tmp_path / "link"
        out.hardlink_to(model / "tokenizer.json")
    before = {path: path.read_bytes() for path in model.iterdir()}
    message = refusal([*args, out, "--model", model])
    assert f"{args[-1]} {out} is " in message and f"of --model {model}" in message
    assert {path: path.read_bytes() for path in model.iterdir()} == before


def test_other_files_may_lie_beside_a_model(model: Path, tmp_path: Path) -> None:
    outputs.check({"-o": model / "m.jsonl", "--csv": tmp_path / "config.json"}, {"--model": model})
    outputs.check({"--metrics": Path("/dev/null"), "--csv": Path("/dev/null")}, {"--prompt-file": Path("/dev/null")})


def test_a_plot_is_not_its_own_numbers(place: Path) -> None:
    error = refusal(["bench", "--plot", "folder", "-o", "back/folder/scaling.svg"])
    assert "is -o back/folder/scaling.svg, which it would destroy" in error


@pytest.mark.parametrize(
    "args", [["report", "-o", "s1.jsonl", "s2.jsonl"], ["replay", "-o", "c1", "c2"]], ids=["report", "replay"]
)
def test_a_shells_list_does_not_make_its_first_file_the_output(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"s1.jsonl": b'{"type": "run"}\n', "c1": b"\x20\0\0\0\0\0\0\0{}"}[args[2]]
    Path(args[2]).write_bytes(content)
    assert f"{args[1]} {args[2]} is there and is no" in refusal(args)
    assert Path(args[2]).read_bytes() == content and names(tmp_path) == [args[2]]


SHORT = ["--context", "60", "--steps", "2", "--backend", "numpy"]
WRITE: dict[str, list[str]] = {
    **{
        f"run {flag}": ["run", "--prompt", "x", "--max-new-tokens", "2", "--backend", "numpy", "--method", "box", flag]
        for flag in ("--metrics", "--csv", "--plot")
    },
    "capture": ["capture", *SHORT, "-o"],
    "calibrate": ["calibrate", *SHORT, "--sink-tokens", "2", "--recent-tokens", "8", "-o"],
    "replay": ["replay", "c", "--backend", "numpy", "--method", "box", "--budgets", "0.5", "-o"],
    "bench": ["bench", "-o"],
    "serve": ["serve", "--engine", "mlx-lm", "--metrics"],
}
OF_A_MODEL = ("run", "capture", "calibrate")


@pytest.mark.parametrize("command", WRITE)
def test_a_command_writes_over_its_own_files_alone(command: str, model: Path, place: Path) -> None:
    line, out = WRITE[command], place / "out"
    line = [*line[:-1], "--model", str(model), line[-1]] if command.split()[0] in OF_A_MODEL else line
    for content in ('{"type": "run", "kind": "evaluate", "config": {}}\n', "notes", '{"a": 1}'):
        out.write_text(content)
        assert f"{line[-1]} out is there and is no" in refusal([*line, "out"])
        assert out.read_text() == content
    out.write_text("")
    if command == "serve":  # which would go on
        return
    if command == "bench":  # takes long: one of its files is there, and it goes as far as its request
        out.write_bytes((ROOT / "results" / "speed-scaling.jsonl").read_bytes())
        assert "block-size 300" in refusal(["bench", "--block-size", 300, "-o", "out"])
        return
    if command == "replay":
        last(outcome([*WRITE["capture"], "c"], place))
    for _ in range(2):
        last(outcome([*line, "out"], place))
        assert out.stat().st_size > 100


@pytest.mark.parametrize(("command", "kind"), [("report", "results"), ("replay", "capture")])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_file_that_is_given_twice_is_refused(command: str, kind: str, spelling: str, place: Path) -> None:
    message = refusal([command, "in", "other", SPELLINGS[spelling], "-o", "new"])
    assert message.startswith(f"{kind} {SPELLINGS[spelling]} is given twice, also as in,")


def test_metrics_on_stdout_are_lines_of_their_own(model: Path, tmp_path: Path) -> None:
    done = call("run", "--model", model, "--prompt", "xyz", "--backend", "numpy", "--metrics", "/dev/stdout")
    assert done.returncode == 0 and "dense 1 > " in done.stdout
    found = [line for line in done.stdout.splitlines() if '{"type"' in line]
    assert [json.loads(line)["type"] for line in found] == ["run", *["step"] * 32, "summary"]
