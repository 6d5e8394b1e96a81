"""What users name is read by one reader: never more than could be used, and no content of it is a traceback."""

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import pytest
from command import last, outcome, refused
from safetensors import safe_open
from safetensors.numpy import save_file

from eps_core.config.eps import EpsConfig
from eps_core.decode.cost import Cost
from eps_core.decode.session import Session
from eps_core.errors import ConfigError, fault_line, one_line, shown
from eps_core.evaluation.capture import METADATA_KEY, CaptureRequest, capture, open_capture, text_tokens
from eps_core.evaluation.replay import check_alike
from eps_core.io import inputs
from eps_core.io.records import Between, convert
from eps_core.models import tokenizer
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.tasks.benchmarks import load_longbench, load_ruler
from eps_core.tasks.questions import benchmark_question

WHAT = ("notes", "give a file")


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# --- the reader -------------------------------------------------------------------------------------------------------


class Counting(io.BytesIO):
    """A device without an end, which counts what is asked of it."""

    given = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None and 0 <= size <= 2**21, "all that there is was asked for"
        self.given += size
        return b"\0" * size

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None and size > 0, "a line of any length was asked for"
        self.given += size
        return b"\0" * size


@pytest.mark.parametrize(
    "read",
    [
        lambda path: inputs.read_text(path, *WHAT, most_bytes=10_000),
        lambda path: next(inputs.read_lines(path, *WHAT)),
    ],
    ids=["text", "lines"],
)
def test_no_more_is_read_than_could_be_used(read: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Counting()
    monkeypatch.setattr(inputs, "MOST_BYTES", 10_000)
    monkeypatch.setattr("builtins.open", lambda *args: endless)
    with pytest.raises(ConfigError, match="longer than 10,000 bytes"):
        read(Path("endless"))
    assert endless.given == 10_001


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a\xff", "notes FILE is not UTF-8 at byte 1: convert it"),
        ("\ufeff".encode("utf-16-le") + b"a\0", "notes FILE is UTF-16, not UTF-8"),
        ("\ufeff".encode("utf-16-be") + b"\0a", "notes FILE is UTF-16, not UTF-8"),
        ("\ufeff".encode("utf-32-le") + b"a\0\0\0", "notes FILE is UTF-32, not UTF-8"),
        (b"x" * 101, "notes FILE is longer than 100 bytes, so it is: shorten it"),
        (None, "notes FILE cannot be read (No such file or directory): give a file"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "f"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        inputs.read_text(path, *WHAT, most_bytes=100, limit="so it is")
    assert words.replace("FILE", str(path)) in str(error.value)


def test_texts_come_from_files_pipes_and_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inputs.read_text(write(tmp_path / "a", b"\xef\xbb\xbfs\xc3\xa9"), *WHAT) == "sé"
    with pytest.raises(ConfigError, match="Is a directory"):
        inputs.read_text(tmp_path, *WHAT)
    read_end, write_end = os.pipe()
    os.write(write_end, b"piped")
    os.close(write_end)
    assert inputs.read_text(Path(f"/dev/fd/{read_end}"), *WHAT) == "piped"
    os.close(read_end)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}\n\n[2]')))
    assert list(inputs.read_lines(inputs.STDIN, *WHAT)) == [(1, b'{"a": 1}\n'), (3, b"[2]")]
    assert not sys.stdin.buffer.closed
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="notes on stdin cannot be read"):
        inputs.read_text(inputs.STDIN, *WHAT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "NaN is no number"), ("[-Infinity]", "-Infinity is no number"), ("1e999", "1e999 is past"),
        ("9" * 5000, f"{'9' * 57}... is past"), ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"), ('["\\ud800"]', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"), ("{", "at character 1"), ("", "at character 0"),
        (b"\xff", "can't decode"),
    ],
)  # fmt: skip
def test_json_that_nothing_can_use_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError) as error:
        inputs.parse_json(text)
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_lines_that_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "f", b"{}\n" * 11)
    assert len(list(inputs.read_lines(path, *WHAT))) == 11
    for name, most in (("MOST_KEPT_LINES", 10), ("MOST_KEPT_BYTES", 30)):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="give a part"):
            patch.setattr(inputs, name, most)
            list(inputs.read_lines(path, *WHAT))
        assert len(list(inputs.read_jsonl(path, *WHAT, kept=False))) == 11


def test_json_that_is_used_stays() -> None:
    value = {"a": [1.5, -3, 2**70, True, None, "\U0001f600 é"], "b": {"c": [[]] * 70}}
    assert inputs.parse_json(json.dumps(value)) == value
    assert inputs.parse_json("[" * 64 + "]" * 64)


def test_whatever_a_message_shows_is_less_than_a_line() -> None:
    for value in ([[["x" * 500] * 9] * 9] * 9, 10**5000, {"k" * 300: ["\n" * 300] * 9}, "9" * 10**5, None):
        assert len(shown(value)) <= 120 and "\n" not in shown(value)
    for error in (RuntimeError("x \n" * 500), MemoryError(), ValueError("\n")):
        assert 0 < len(one_line(error)) <= 300 and 0 < len(fault_line(error)) <= 300
        assert "\n" not in one_line(error) + fault_line(error)
    assert fault_line(MemoryError()) == "out of memory" and one_line(ValueError("\n")) == "ValueError"


def test_values_are_of_their_kinds() -> None:
    assert convert({"a": [1, 2.5], "other": ()}, {"a": tuple[float, ...], "b": int | None}) == {
        "a": (1.0, 2.5), "b": None, "other": (),
    }  # fmt: skip
    assert isinstance(convert(3, float), float) and convert([1, "x"], tuple[int, str]) == (1, "x")
    for value, kind, words in (
        (True, int, "True is not a whole number"),
        (2**63, int, "9223372036854775808 is past 64 bits"),
        (-(10**5000), int | None, "a number of 16,610 bits is past 64 bits"),
        (10**400, float, "not a number"),
        (float("nan"), float, "nan is not a number"),
        ("1", float | None, "'1' is not a number"),
        ([1, 2, 3], tuple[int, int], "[1, 2, 3] is not a list of 2"),
        ({"a": {}}, {"a": int}, "a {} is not a whole number"),
        ({}, {"a": int}, "a None is not a whole number"),
        ({"contexts": []}, Cost, "unknown or missing dense_ms, sparse_ms"),
        (1.5, Annotated[float, Between(0, 1)], "1.5 is not within 0 to 1"),
        ("ab", Annotated[str, Between(0, 1)], "'ab' is not within 0 to 1 characters"),
    ):
        with pytest.raises(ValueError) as error:
            convert(value, kind)
        assert words in str(error.value)


# --- prompts and texts ------------------------------------------------------------------------------------------------


@pytest.fixture
def most_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of every text that a tokenizer was given."""
    given: list[int] = []
    encode = tokenizer._encode_whole

    def counted(one: Any, path: Path, text: str, special: bool) -> list[int]:
        given.append(len(text))
        return encode(one, path, text, special)

    monkeypatch.setattr(tokenizer, "_encode_whole", counted)
    return given


def test_a_long_prompt_is_refused_before_it_is_read_whole(tmp_path: Path, most_encoded: list[int]) -> None:
    flags = ["run", "--backend", "numpy", "--prompt-file"]
    too_many = "exceed the model's context of 16384 tokens"
    most = inputs.text_bytes(read_spec(DEMO_MODEL).max_context)
    path = tmp_path / "long.txt"
    with open(path, "wb") as file:
        file.truncate(108_000_000)  # a hole takes no disk
    for name in (path, "/dev/zero"):
        words = f"prompt file {name} is longer than {most:,} bytes, more than the 16,384 tokens of the model's context"
        refused([*flags, name], tmp_path, words)
    refused([*flags, "-"], tmp_path, "prompt file on stdin is longer", stdin="x" * (most + 1))
    assert not most_encoded
    refused([*flags, write(path, b"x" * most)], tmp_path, too_many)
    refused(["run", "--backend", "numpy", "--prompt", "x" * most], tmp_path, too_many)
    assert max(most_encoded) < most / 4


def test_a_long_text_is_encoded_as_far_as_it_is_used(tmp_path: Path, most_encoded: list[int]) -> None:
    session = Session.open(backend="numpy")
    text = write(tmp_path / "t", "é and so on, " * 100_000)
    assert text_tokens(session, text, 300).tokens == session.encode("é and so on, " * 40)[:300]
    assert sum(most_encoded) < 10_000
    assert session.encode("abc" * 9, most_tokens=2) == session.encode("abc" * 9)


def test_the_middle_that_a_benchmark_loses_is_not_encoded(tmp_path: Path) -> None:
    middle = 10 * inputs.text_bytes(40)
    line = {"dataset": "narrativeqa", "context": "a" * middle, "input": "b", "answers": ["c"]}
    (sample,) = load_longbench(write(tmp_path / "f", json.dumps(line)))
    given: list[int] = []

    def encode(text: str, special: bool = True) -> list[int]:
        given.append(len(text))
        return [*text.encode()]

    room = 40 + (sample.max_new_tokens or 0)
    question = benchmark_question(sample, encode, room)
    assert question.tokens == [*sample.prompt[:20].encode(), *sample.prompt[-20:].encode()] and question.truncated
    assert given == [2 * inputs.text_bytes(room)]
    ruler = write(tmp_path / "vt.jsonl", json.dumps({"input": "a" * middle, "outputs": ["c"]}))
    with pytest.raises(ConfigError, match="tokens and more of vt and 30 new ones exceed"):
        benchmark_question(load_ruler(ruler)[0], encode, 70)


def test_benchmark_lines_past_the_samples_are_not_kept(tmp_path: Path) -> None:
    ruler = json.dumps({"input": "x", "outputs": ["c"]}) + "\n"
    assert len(load_ruler(write(tmp_path / "vt.jsonl", ruler * 3 + "{"), 3)) == 3
    one, two = (
        json.dumps({"dataset": name, "context": "a", "input": "b", "answers": ["c"]}) + "\n"
        for name in ("narrativeqa", "qasper")
    )
    found = load_longbench(write(tmp_path / "f", one * 3 + two * 3 + one), None, 2)
    assert [sample.task for sample in found] == ["narrativeqa"] * 2 + ["qasper"] * 2


# --- captures ---------------------------------------------------------------------------------------------------------


def make_capture(path: Path, context_tokens: int = 60, layers: tuple[int, ...] = (0, 1)) -> Path:
    request = {"context_tokens": context_tokens, "num_steps": 2, "layers": layers, "backend": "cuda", "device": "cpu"}
    capture(CaptureRequest(path, **request))
    return path


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_capture(tmp_path_factory.mktemp("captures") / "c.safetensors")


def recaptured(
    source: Path,
    path: Path,
    change: Callable[[dict[str, Any]], Any],
    tensors: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType({}),
) -> Path:
    """Write a copy of a capture whose metadata are changed, and the named tensors."""
    with safe_open(source, framework="numpy") as opened:
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dictionary
        info = json.loads(opened.metadata()[METADATA_KEY])
    arrays |= {name: tensors[name](arrays[name]) for name in tensors}
    changed = change(info)
    save_file(arrays, path, {METADATA_KEY: changed if isinstance(changed, str) else json.dumps(changed)})
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "0" * 64, "model": "other"}, "differ in model (demo "),
        ({"config": EpsConfig.of(method="box").to_dict()}, "differ in decode (method off and method box)"),
    ],
)
def test_captures_that_no_mean_speaks_of_are_refused(
    captured: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    other = recaptured(captured, tmp_path / "other", lambda info: info | changes)
    line = refused(["replay", captured, other, "--backend", "cuda"], tmp_path, words)
    assert str(captured) in line and str(other) in line


def test_captures_of_one_model_and_kind_are_averaged(captured: Path, tmp_path: Path) -> None:
    other = recaptured(captured, tmp_path / "other", lambda info: info | {"text_sha256": "1", "backend": "mlx"})
    line = ["replay", captured, other, "--backend", "cuda", "--methods", "box@16", "--budgets", 0.5]
    last(outcome([*map(str, line)], tmp_path))
    paths = captured, make_capture(tmp_path / "long", 62), make_capture(tmp_path / "part", layers=(1,))
    first, longer, part = map(open_capture, paths)
    with pytest.raises(ConfigError, match=r"differ in context tokens \(60 and 62\)"):
        check_alike([first, longer])
    with pytest.raises(ConfigError, match=r"differ in layers"):
        check_alike([first, part])
    check_alike([first, part], layers=(1,))
