"""What is written to: files, links, pipes and devices; never an input, never by two, never by halves."""

import errno
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
import tiny_models
from click.testing import CliRunner
from command import call, lines_of, process_line, refused

from eps_core.cli.evaluate import evaluate_command
from eps_core.cli.main import cli
from eps_core.errors import ConfigError
from eps_core.evaluation import measure as measure_module
from eps_core.io import outputs
from eps_core.io.outputs import JsonlWriter, Output
from eps_core.metrics import provenance

ROOT = Path(__file__).parent.parent


def write_whole(path: Path) -> None:
    with outputs.replacing(path) as file:
        file.write('{"a": 1}\n' * 3)


def write_lines(path: Path) -> None:
    with Output(path) as output, JsonlWriter(output) as writer:
        for _ in range(3):
            writer.write({"a": 1})


WRITERS = pytest.mark.parametrize("write", [write_whole, write_lines], ids=["whole", "lines"])
WANT = '{"a": 1}\n' * 3


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- where writing goes -----------------------------------------------------------------------------------------------


@WRITERS
def test_a_link_stays_a_link_and_its_file_is_written(write: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old and longer than what is new" * 9)
    (tmp_path / "link").symlink_to("folder/file")
    (tmp_path / "dangling").symlink_to("folder/new")
    (tmp_path / "chain").symlink_to("link")
    for name, file in (("link", "file"), ("chain", "file"), ("dangling", "new")):
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink() and (tmp_path / "folder" / file).read_text() == WANT
    assert names(tmp_path / "folder") == ["file", "new"]
    (tmp_path / "nowhere").symlink_to("absent/new")
    with pytest.raises(ConfigError, match="no directory"):
        write(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="loop cannot be written"):
        write(tmp_path / "loop")


@WRITERS
def test_a_pipe_and_a_device_are_written_into(write: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write(pipe)
    reader.join(60)
    assert got == [WANT] and stat.S_ISFIFO(pipe.stat().st_mode) and names(tmp_path) == ["pipe"]
    (tmp_path / "null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "null"):
        write(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and (tmp_path / "null").is_symlink()
    with pytest.raises(ConfigError, match=r"^/dev/full cannot be written \(No space left on device\)"):
        write(Path("/dev/full"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could replace a device")
@WRITERS
def test_a_device_that_could_be_replaced_is_not(write: Any, tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("no devices can be made here")
    try:
        write(tmp_path / "null")
    except ConfigError as error:  # on a file system without devices
        assert "Permission denied" in str(error)
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    with pytest.raises(ConfigError, match="is a disk or a socket"):
        write(tmp_path / "disk")
    assert names(tmp_path) == ["disk", "null"]


STDOUT = """
import sys
from pathlib import Path
from eps_core.io.outputs import JsonlWriter, Output
print("before")
with Output(Path("/dev/stdout")) as output:
    if sys.argv[1] == "whole":
        with output.replacing() as file:
            file.write('{"a": 1}\\n' * 3)
    else:
        with JsonlWriter(output) as writer:
            for _ in range(3):
                writer.write({"a": 1})
print("after")
"""


@pytest.mark.parametrize("to", ["pipe", "file", "socket"])
@pytest.mark.parametrize("kind", ["whole", "lines"])
def test_stdout_is_written_into_whatever_it_is(kind: str, to: str, tmp_path: Path) -> None:
    """Through the descriptor: opened again, another user's would be refused, and a file be written from its start."""
    ends: list[Any] = list(map(socket.SocketIO, socket.socketpair(), ("rw", "rw"))) if to == "socket" else []
    if to == "file":
        ends = [open(tmp_path / "out", "w")] * 2  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-c", STDOUT, kind],
        stdout=ends[1] if ends else subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    got = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    if to == "socket":
        got = ends[0].read(1000)
    text = (tmp_path / "out").read_text() if to == "file" else got.decode()
    assert text == f"before\n{WANT}after\n"


def test_another_users_pipe_need_not_be_readable() -> None:
    """What click asks of a path that is there, unless told otherwise: /dev/stdout is then refused."""
    found = [
        (name, option.type.readable)
        for name, one in cli.commands.items()
        for option in one.params
        if {"-o", "--metrics", "--csv", "--jsonl", "--output", "--plot"} & set(option.opts)
    ]
    assert len(found) >= 10 and not [name for name, readable in found if readable]


def test_names_are_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 251 + ".txt")
    write_whole(longest)
    assert longest.read_text() == WANT and len(names(tmp_path)) == 1
    with pytest.raises(ConfigError, match="File name too long"):
        Output(tmp_path / ("n" * 256), "csv file")
    two = [tmp_path / ("n" * 250 + end) for end in ("a", "b")]
    with Output(two[0]), Output(two[1]):  # one beginning, two locks
        pass


# --- by one alone -----------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from eps_core.io.outputs import Output
with Output(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@WRITERS
@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_a_second_writer_is_refused_until_the_first_has_gone(
    write: Any, how: signal.Signals | None, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    out, link = tmp_path / "folder" / "out", tmp_path / "link"
    link.symlink_to(out)
    out.write_text("old")
    process = holder(out)
    for spelled in (out, link, tmp_path / "folder" / ".." / "folder" / "out"):
        with pytest.raises(ConfigError, match="is being written by another process"):
            write(spelled)
    write(tmp_path / "folder" / "other")
    assert out.read_text() == "old"
    if how is None:
        process.communicate("")
        assert names(out.parent) == ["other", "out"]
    else:
        process.send_signal(how)
        process.communicate()
        assert len(names(out.parent)) == 3  # the lock of a killed writer stays ..
    write(link)
    assert out.read_text() == WANT and names(out.parent) == ["other", "out"]  # .. until the next one


def test_what_a_killed_writer_had_written_is_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Output(out):
        (partial,) = tmp_path.iterdir()
    partial.write_text("half of something longer" * 9)
    partial.chmod(0o400)
    with outputs.replacing(out) as file:
        file.write("whole")
    assert out.read_text() == "whole" and names(tmp_path) == ["out"]
    (tmp_path / "usual").touch()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode
    out.chmod(0o600)
    with outputs.replacing(out) as file:
        file.write("private")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600 and out.read_text() == "private"


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    with Output(tmp_path / "out"):
        (partial,) = tmp_path.iterdir()
    (tmp_path / "precious").write_text("precious")
    partial.symlink_to("precious")
    with pytest.raises(ConfigError, match=f"{partial.name}.*: remove that file"):
        write_whole(tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "precious"


def test_where_there_are_no_locks_files_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(outputs.fcntl, "flock", flock)
    write_whole(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    with Output(tmp_path / "out"), pytest.raises(ConfigError, match="is being written"):
        write_whole(tmp_path / "out")


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b'{"old": 0}\n'], ids=["new", "old"])
def test_a_full_disk_names_its_file_and_takes_no_part_of_a_line(old: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    if old is not None:
        path.write_bytes(old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"m\.jsonl cannot be written \(File too large\)"), Output(path) as output:  # noqa: SIM117
            with JsonlWriter(output) as writer:
                writer.write({"a": 1})
                writer.write({"b": "b" * 200})
        assert path.read_bytes() == b'{"a": 1}\n' and names(tmp_path) == ["m.jsonl"]
        with pytest.raises(ConfigError, match="m\\.jsonl cannot be written"), outputs.replacing(path) as file:
            file.write("c" * 200)
        assert path.read_bytes() == b'{"a": 1}\n' and names(tmp_path) == ["m.jsonl"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_bytes", [0, 5, 9, 10], ids=lambda num_bytes: f"after {num_bytes} bytes")
def test_an_interrupted_line_is_there_whole_or_not_at_all(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is heard after any system call: also after the one that wrote the whole line."""
    path = tmp_path / "m.jsonl"

    def interrupted(file: Any, data: Any) -> int:
        os.write(file.fileno(), bytes(data)[:num_bytes])
        raise KeyboardInterrupt

    with Output(path) as output, JsonlWriter(output) as writer:
        writer.write({"a": 1})
        with monkeypatch.context() as patched:
            patched.setattr(outputs._File, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write({"b": 22})
        writer.write({"c": 3})
    assert path.read_text() == '{"a": 1}\n' + '{"b": 22}\n' * (num_bytes == 10) + '{"c": 3}\n'


# --- what goes on after a stop ----------------------------------------------------------------------------------------

EVALUATE = [
    "--backend", "numpy", "--context", "320", "--context", "384", "--samples", "2", "--text-steps", "2",
    "--tasks", "niah_single", "--eps-method", "box", "--eps-policy", "topk",
]  # fmt: skip


def evaluate(model: Path, out: Path, *more: object) -> dict[str, Any]:
    args = [*EVALUATE, "--model", str(model), "-o", str(out), *map(str, more)]
    done = CliRunner().invoke(evaluate_command, args, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def evaluated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluated") / "e.jsonl"
    return out, evaluate(model, out)


def test_evaluate_keeps_what_it_found_and_goes_on(
    model: Path, evaluated: tuple[Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at every sample and every text in turn: nothing is asked twice, and all is as if it had not been."""
    whole, result = evaluated
    asked: list[str] = []
    stop: list[Any] = [KeyboardInterrupt(), MemoryError(), RuntimeError("fault"), ConfigError("NaN"), OSError("x")]

    def once(work: Any) -> Any:
        def found(session: Any, what: Any, *more: Any, **told: Any) -> Any:
            if len(asked) % 2:
                asked.append("stopped")
                raise stop[len(asked) % len(stop)]
            asked.append("asked")
            return work(session, what, *more, **told)

        return found

    monkeypatch.setattr(measure_module, "ask", once(measure_module.ask))
    monkeypatch.setattr(measure_module, "follow_text", once(measure_module.follow_text))
    out = tmp_path / "e.jsonl"
    kept = b""
    for finished in range(1, 8):
        error = stop[2 * finished % len(stop)]
        want: dict[type, Any] = {KeyboardInterrupt: click.Abort, OSError: OSError}
        with pytest.raises(want.get(type(error), ConfigError)) as raised:
            evaluate(model, out)
        if isinstance(error, RuntimeError):
            assert f"failed (RuntimeError: fault); {out} keeps what was found" in str(raised.value)
        assert out.read_bytes().startswith(kept) and names(tmp_path) == ["e.jsonl"]
        kept = out.read_bytes()
        assert len([line for line in lines_of(out) if line["type"] in ("sample", "document")]) == finished
    last = evaluate(model, out)
    assert asked.count("asked") == 8 and last["resumed"] == 7
    assert out.read_bytes() == whole.read_bytes()
    assert {**last, "out": None, "resumed": 0} == {**result, "out": None}
    again = evaluate(model, out)
    assert again == {**last, "resumed": 8} and out.read_bytes() == whole.read_bytes() and asked.count("asked") == 8


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_line_of_evaluate_is_found_again(
    model: Path, evaluated: tuple[Path, dict], tmp_path: Path, cut: int
) -> None:
    out = tmp_path / "e.jsonl"
    out.write_bytes(evaluated[0].read_bytes()[:-cut])
    evaluate(model, out)
    assert out.read_bytes() == evaluated[0].read_bytes()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--samples", 3], "its asked.samples differs (2 there, 3 now)"),
        (["--seed", 1], "its asked.seed differs"),
        (["--no-oracle"], "its asked.oracle differs (True there, False now)"),
        (["--eps-budget", 0.5], "its config.budget differs"),
        (["--text", "TEXT"], "its text_sha256 differs"),
        (["--model", "OTHER"], "its model differs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_evaluate_does_not_go_on_with_another_run(
    model: Path, evaluated: tuple[Path, dict], tmp_path: Path, more: list, words: str
) -> None:
    out = tmp_path / "e.jsonl"
    out.write_bytes(evaluated[0].read_bytes())
    if "OTHER" in more:
        tiny_models.save_model("mistral", tmp_path / "OTHER", seed=1)
    (tmp_path / "TEXT").write_text("A short text of a few words, again and again. " * 100)
    more = [tmp_path / one if one in ("OTHER", "TEXT") else one for one in more]
    with pytest.raises(ConfigError) as error:
        evaluate(model, out, *more)
    assert words in str(error.value) and out.read_bytes() == evaluated[0].read_bytes()


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *(("sample", one) for one in ({"index": None}, {"index": 99}, {"eps": None}, {"dense": {"text": ""}})),
        *(("sample", {"eps": {"score": score}}) for score in ("high", -0.1, 1e308)),
        *(("sample", {"eps": {name: -1}}) for name in ("bytes_read", "bytes_dense")),
        *(("document", {"eps": {"kl": kl}}) for kl in ([None] * 2, [], [0.1], "12", [0.1, 1e308])),
        *(("document", {"eps": {"agree": agree}}) for agree in ([True], "ab", None)),
        *(("document", {"eps": {"bytes_dense": size}}) for size in (0, -1, 1e300)),
    ],
    ids=str,
)
def test_a_damaged_line_of_evaluate_is_one_line(
    model: Path, evaluated: tuple[Path, dict], tmp_path: Path, kind: str, damage: dict
) -> None:
    out = tmp_path / "e.jsonl"
    lines = lines_of(evaluated[0])
    line = next(one for one in lines if one["type"] == kind)
    for name, value in damage.items():
        # a variant loses what it had, or one value of it is changed
        line[name] = {**line[name], **value} if name == "eps" and value else value
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="is damaged"):
        evaluate(model, out)


# --- streams that are closed or full ----------------------------------------------------------------------------------


def test_a_closed_stdout_is_not_the_next_file(model: Path, tmp_path: Path) -> None:
    """The lowest free descriptor is what the next file gets: printing would go into it."""
    metrics = tmp_path / "m.jsonl"
    args = process_line("run", "--backend", "numpy", "--model", model, "--prompt", "x y z", "--max-new-tokens", 2,
                   "--metrics", metrics)  # fmt: skip
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *args], timeout=120)
    assert done.returncode == 0
    assert {line["type"] for line in lines_of(metrics)} == {"run", "step", "summary"}


def test_a_pipe_that_is_closed_is_named(model: Path, tmp_path: Path) -> None:
    """An output's reader that has gone is not stdout's."""
    reader, writer = os.pipe()
    os.close(reader)
    done = call("run", "--backend", "numpy", "--model", model, "--prompt", "x y z", "--max-new-tokens", 2,
                "--metrics", f"/dev/fd/{writer}", pass_fds=[writer])  # fmt: skip
    os.close(writer)
    assert done.returncode == 2 and f"/dev/fd/{writer} cannot be written (Broken pipe)" in done.stderr


# --- provenance -------------------------------------------------------------------------------------------------------


def test_the_commit_is_asked_for_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init")
    (tmp_path / "eps_core").mkdir()
    file = tmp_path / "eps_core" / "__init__.py"
    file.touch()
    monkeypatch.setattr(provenance.eps_core, "__file__", str(file))
    assert provenance.git_commit() is None
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    os.utime(file, (10**9, 10**9))  # looks changed: git would look at it and write down that it is not
    index = tmp_path / ".git" / "index"
    before = (index.read_bytes(), index.stat().st_mtime_ns)
    assert provenance.git_commit() == commit
    (tmp_path / "untracked").touch()
    assert provenance.git_commit() == commit
    file.write_text("x = 1")
    assert provenance.git_commit() == f"{commit}-dirty"
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


def test_standard_input_is_an_input(tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("x y z")
    with open(prompt) as given:
        done = call("run", "--prompt-file", "-", "--metrics", prompt, stdin=given)
    assert done.returncode == 2 and "which it would destroy" in done.stderr
    assert prompt.read_text() == "x y z"


def test_a_dash_is_no_output(tmp_path: Path) -> None:
    refused(["run", "--metrics", "-"], tmp_path, "/dev/stdout")


def test_a_huge_file_is_not_read_back(model: Path, tmp_path: Path) -> None:
    huge = tmp_path / "g.jsonl"
    with open(huge, "wb") as file:
        file.truncate(2**40)  # a hole takes no disk
    line = ["evaluate", "--backend", "numpy", "--model", model, "--tasks", "none", "--method", "rq", "-o", huge]
    refused(line, tmp_path, "is longer than")
    assert huge.stat().st_size == 2**40
