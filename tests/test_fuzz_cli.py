"""Whatever stands on the command line: no traceback, exit code 0 or 2, and an error is one line.

Command lines are random and built from the definitions of the commands: any flag, under any of its names, with whatever
a user, a script or a mistake may hand over. Some are run in every test; many more by

    EPS_FUZZ=2000 python -m pytest tests/test_fuzz_cli.py
"""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import click
import command
import pytest
import tiny_models
from command import Outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eps_core.bench import layer
from eps_core.cli.main import cli
from eps_core.models import hub

EXAMPLES = int(os.environ.get("EPS_FUZZ", "150"))
PROMPT = "It was a dark and stormy night. " * 40
NUMBERS = (
    "", "nan", "inf", "-inf", "-1", "0", "1", "2", "16", "0.5", "1e308", "1e-320", "1e400", str(2**31), str(2**63),
    "1" + "0" * 400, "9" * 5000, "²", "٣", "1_0", " 1", "0x1", "+1", "-0", "--", "-",
)  # fmt: skip
LISTS = (
    "1,2", "1,1", ",", "1,,2", "0.1,nan", "rq@²", "rq@2,box@", "rq@", "@", "rq@" + "9" * 5000, "rq@2,box@16", "off",
    "8,4", "16,8", "8,8,4", "3,8",
)  # fmt: skip
WORDS = ("auto", "all", "none", "é", "\udcff", "a\udcffb", "x" * 300, "\x1b[31m", "%s", "{}", "\n")
# numbers here are small or refused: whatever is valid must also end soon
RIGHT = ("0", "1", "2", "16", "64", "0.1", "0.5")
PLAIN = (*NUMBERS, *LISTS, *WORDS)
OUTPUTS = (
    "new", ".", "", "absent/new", "x" * 300, "\udcff", "new/", "link", "/dev/null", "/dev/full", "/dev/stdout", "-"
)  # fmt: skip
RIGHT_FILES = {"text": "TEXT", "prompt_files": "TEXT", "eps_head_policy": "POLICY", "captures": "CAPTURE",
               "results": "STEPS", "model": "MODEL", "cache_dir": "FOLDER"}  # fmt: skip
# of choices that are all valid, those that are quick here
QUICK = {"backend": ("numpy",), "engine": ("own", "transformers"), "device": ("cpu", "auto")}
QUICK |= {"kernels": ("arrays", "auto")}
WRITTEN = ("out", "output", "jsonl", "metrics", "csv", "plot")
# what makes a command short; each is left out where a drawn flag says the same
BASE = {
    "run": {"backend": "numpy", "model": "MODEL", "prompt": PROMPT[:64], "max_new_tokens": "2", "eps_method": "rq"},
    "info": {},
    "balance": {"model": "MODEL", "backend": "numpy", "out": "new"},
    "bench": {"backend": "numpy", "context": "256", "q_heads": "2", "kv_heads": "1", "head_dim": "16", "method": "rq",
              "repeats": "1", "warm_seconds": "0"},
    "capture": {"backend": "numpy", "model": "MODEL", "context": "64", "steps": "2", "output": "new",
                "eps_method": "rq"},
    "calibrate": {"backend": "numpy", "model": "MODEL", "context": "64", "steps": "2", "output": "new"},
    "replay": {"backend": "numpy", "captures": "CAPTURE"},
    "evaluate": {"backend": "numpy", "model": "MODEL", "tasks": "none", "context": "64", "samples": "1",
                 "text_steps": "2"},
    "report": {"results": "STEPS", "out": "new"},
    "serve": {"engine": "transformers", "model": "MODEL", "eps_method": "rq"},
}  # fmt: skip
# flags that say the same as one of BASE
SAME = {"prompt_files": "prompt", "seconds": "repeats"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the names in capitals stand for: a tiny model, inputs that are right, and inputs that are wrong."""
    folder = tmp_path_factory.mktemp("places")
    model = tiny_models.save_model("llama2", folder / "MODEL")
    texts = {"TEXT": PROMPT, "EMPTY": "", "JSON": "{}", "JSONL": "{}\n[]\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "BINARY").write_bytes(b"a\xff\x00\xfe" * 9)
    (folder / "FOLDER").mkdir()
    places = {path.name: str(path) for path in folder.iterdir()} | {"ABSENT": str(folder / "absent")}
    for name, args in (
        ("CAPTURE", ("capture", "--context", "64", "--steps", "2", "-o")),
        ("POLICY", ("calibrate", "--context", "64", "--recent-tokens", "32", "--steps", "2", "-o")),
        ("STEPS", ("run", "--prompt", texts["TEXT"][:200], "--max-new-tokens", "2", "--method", "rq", "--metrics")),
    ):
        places[name] = str(folder / name)
        line = [*args, places[name], "--model", str(model), "--backend", "numpy"]
        code, out, err = outcome(line, folder / "scratch")
        assert code == 0, out + err
    return places


def names_of(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts, *getattr(param, "also", ())]


def values_of(param: click.Parameter, places: dict[str, str]) -> st.SearchStrategy[str]:
    name = str(param.name)
    if isinstance(param.type, click.Path):
        inputs = [*places.values(), "", "-", "/dev/null", "/dev/zero", "x" * 300, "\udcff"]
        right = "new" if name in WRITTEN else places[RIGHT_FILES.get(name, "TEXT")]
        return st.just(right) | st.sampled_from(OUTPUTS if name in WRITTEN else inputs)
    plain = st.sampled_from(PLAIN)
    if isinstance(param.type, click.Choice):
        return st.sampled_from(QUICK.get(name, tuple(map(str, param.type.choices)))) | plain
    if "seconds" in name:  # these would be waited for
        return st.sampled_from(("0", "0.1", *NUMBERS, *LISTS)).filter(lambda text: text not in ("1", "2", "16", "+1"))
    return st.sampled_from(RIGHT) | plain


@st.composite
def command_lines(draw: st.DrawFn, places: dict[str, str]) -> list[str]:
    """A command, up to four of its flags, and of BASE what these leave open."""
    name = draw(st.sampled_from(sorted(cli.commands)))
    params = {str(param.name): param for param in cli.commands[name].params}
    drawn = draw(st.lists(st.sampled_from(sorted(params)), max_size=4))
    base = {key: places.get(value, value) for key, value in BASE[name].items()}
    line: list[str] = []
    for key in drawn:
        param = params[key]
        base.pop(SAME.get(key, key), None)
        if isinstance(param, click.Option) and not param.is_flag:
            line.append(draw(st.sampled_from(names_of(param))))
            if draw(st.integers(0, 30)) != 7:  # else it is there without a value
                line.append(draw(values_of(param, places)))
        elif isinstance(param, click.Option):
            line.append(draw(st.sampled_from(names_of(param))))
        else:
            line.append(draw(values_of(param, places)))
    for key, value in base.items():
        line += [params[key].opts[-1], value] if isinstance(params[key], click.Option) else [value]
    return [name, *line]


def outcome(line: list[str], folder: Path) -> Outcome:
    """Of a command line, run in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "link").symlink_to("target")
    idle = SimpleNamespace(serve=lambda *args: 0)  # a server would not end
    # a benchmark's copies of hundreds of megabytes say nothing about flags
    small = {"LARGEST_COPY_BYTES": 2**16, "COPY_SECONDS": 0.0, "flush_bytes": lambda _: 2**16}
    with mock.patch.object(hub, "load_engine", lambda name: idle), mock.patch.multiple(layer, **small):
        return command.outcome(line, folder, stdin=PROMPT[:64])


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize="EPS_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(data=st.data())
def test_no_command_line_gives_a_traceback(data: st.DataObject, places: dict[str, str], tmp_path: Path) -> None:
    line = data.draw(command_lines(places), label="eps-proto")
    code, out, err = outcome(line, tmp_path / "scratch")
    assert code in (0, 2), (line, code, err)
    assert "Traceback" not in out + err
    for device in ("/dev/null", "/dev/full", "/dev/zero"):
        assert Path(device).is_char_device(), line
    if code == 2:
        assert re.search(r"(^|\n)error: [^\n]+\n$", err), (line, err)
