"""What users name is read by one reader: never more than could be used, and no content of it is a traceback."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any

import mutations
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from test_bench import target_cell
from test_html_report import ROOT, whole_results

from eps_core.bench import targets
from eps_core.cli import main
from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode import cost, tokenizer
from eps_core.decode.cost import Cost
from eps_core.decode.heads import check_policy, load_policy, model_fingerprint
from eps_core.decode.model import DEMO_MODEL, read_spec
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.capture import METADATA_KEY, CaptureRequest, capture, first_tokens, open_capture
from eps_core.evaluation.grid_settings import config_of, load_grid
from eps_core.evaluation.replay import check_alike
from eps_core.files import inputs
from eps_core.files.records import Between, convert
from eps_core.load import load_backend
from eps_core.report import figures
from eps_core.report.load import load_results
from eps_core.tasks.benchmarks import load_longbench, load_ruler, score
from eps_core.tasks.questions import benchmark_question

WHAT = ("notes", "give a file")


def run(*args: object, stdin: bytes | None = None) -> tuple[int, str, str]:
    """eps-proto in this process: (exit code, stdout, stderr). What is no error of the user's is raised."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv = ["eps-proto", *map(str, args)]
    if stdin is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main.main()
    finally:
        sys.argv, sys.stdin = before
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def refused(*args: object, **more: Any) -> str:
    """The one line of a mistake."""
    code, _, err = run(*args, **more)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (code, err)
    return err


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
        lambda path: inputs.read_json(path, *WHAT, most_bytes=10_000),
        lambda path: next(inputs.read_lines(path, *WHAT)),
    ],
    ids=["text", "json", "lines"],
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
        ("9" * 5000, "a number of 5,000 characters is past"), ("[" * 100_000, "nested more than 64 deep"),
        ("[" * 65 + "]" * 65, "nested more than 64 deep"), ('["\\ud800"]', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"), ("{", "at character 1"), ("", "at character 0"),
        (b"\xff", "can't decode"),
    ],
)  # fmt: skip
def test_json_that_nothing_can_use_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError) as error:
        inputs.parse_json(text)
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_json_that_is_used_stays() -> None:
    value = {"a": [1.5, -3, 2**70, True, None, "\U0001f600 é"], "b": {"c": [[]] * 70}}
    assert inputs.parse_json(json.dumps(value)) == value
    assert inputs.parse_json("[" * 64 + "]" * 64)


def test_values_are_of_their_kinds() -> None:
    assert convert({"a": [1, 2.5], "other": ()}, {"a": tuple[float, ...], "b": int | None}) == {
        "a": (1.0, 2.5), "b": None, "other": (),
    }  # fmt: skip
    assert isinstance(convert(3, float), float) and convert([1, "x"], tuple[int, str]) == (1, "x")
    for value, kind, words in (
        (True, int, "True is not a whole number"),
        (2**63, int, "not a whole number"),
        (10**400, float, "not a number"),
        (float("nan"), float, "nan is not a number"),
        ("1", float | None, "'1' is not a number"),
        ([1, 2, 3], tuple[int, int], "[..] is not a list of 2"),
        ({"a": {}}, {"a": int}, "a {..} is not a whole number"),
        ({}, {"a": int}, "a None is not a whole number"),
        ({"contexts": []}, Cost, "unknown or missing dense_ms, gated_ms"),
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
    most = inputs.text_bytes(read_spec(DEMO_MODEL).max_context)
    path = tmp_path / "long.txt"
    with open(path, "wb") as file:
        file.truncate(108_000_000)  # a hole takes no disk
    for name in (path, "/dev/zero"):
        words = f"prompt file {name} is longer than {most:,} bytes, more than the 16,384 tokens of the model's context"
        assert words in refused(*flags, name)
    assert "prompt file on stdin is longer" in refused(*flags, "-", stdin=b"x" * (most + 1))
    assert not most_encoded
    assert "exceed the model's context of 16384 tokens" in refused(*flags, write(path, b"x" * most))
    assert "exceed the model's context of 16384 tokens" in refused("run", "--backend", "numpy", "--prompt", "x" * most)
    assert max(most_encoded) < most / 4


def test_a_prompt_from_stdin_is_continued() -> None:
    flags = ["--backend", "cuda", "--max-new-tokens", 2, "--no-stop", "--eps-method", "off"]
    code, out, err = run("run", "--prompt-file", "-", *flags, stdin=b"def f(x):\n    return ")
    assert code == 0 and json.loads(out.splitlines()[-1])["prompt_tokens"] == 22, err


def test_a_long_text_is_encoded_as_far_as_it_is_used(tmp_path: Path, most_encoded: list[int]) -> None:
    session = Session.open(backend="numpy")
    text = write(tmp_path / "t", "é and so on, " * 100_000)
    assert first_tokens(session, text, 300).tokens == session.encode("é and so on, " * 40)[:300]
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


def test_lone_surrogates_are_named_by_line(tmp_path: Path) -> None:
    line = '{"dataset": "narrativeqa", "context": "\\ud83d", "input": "b", "answers": ["c"]}\n'
    with pytest.raises(ConfigError, match="a text in it holds half of a surrogate pair"):
        load_longbench(write(tmp_path / "f", line))


# --- captures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures") / "c.safetensors"
    capture(CaptureRequest(path, context_tokens=60, num_steps=2, layers=(0, 1), backend="cuda", device="cpu"))
    return path


def recaptured(source: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy whose metadata are changed."""
    with safe_open(source, framework="numpy") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dictionary
        info = json.loads(opened.metadata()[METADATA_KEY])
    changed = change(info)
    save_file(tensors, path, {METADATA_KEY: changed if isinstance(changed, str) else json.dumps(changed)})
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
    line = refused("replay", captured, other, "--backend", "cuda")
    assert words in line and str(captured) in line and str(other) in line


def test_captures_of_one_model_and_kind_are_averaged(captured: Path, tmp_path: Path) -> None:
    other = recaptured(captured, tmp_path / "other", lambda info: info | {"text_sha256": "1", "backend": "mlx"})
    code, _, err = run("replay", captured, other, "--backend", "cuda", "--methods", "box@16", "--budgets", "0.5")
    assert code == 0, err
    request = {"backend": "cuda", "device": "cpu"}
    capture(CaptureRequest(tmp_path / "long", context_tokens=62, num_steps=2, layers=(0, 1), **request))
    capture(CaptureRequest(tmp_path / "part", context_tokens=60, num_steps=2, layers=(1,), **request))
    first, longer, part = (open_capture(path) for path in (captured, tmp_path / "long", tmp_path / "part"))
    with pytest.raises(ConfigError, match=r"differ in context tokens \(60 and 62\)"):
        check_alike([first, longer])
    with pytest.raises(ConfigError, match=r"differ in layers"):
        check_alike([first, part])
    check_alike([first, part], layers=(1,))


# --- what is damaged --------------------------------------------------------------------------------------------------

EXAMPLES = int(os.environ.get("EPS_FUZZ", "0"))


def fuzz(examples: int, share: float = 1.0) -> Callable[[Any], Any]:
    """`examples` seeds, always the same; EPS_FUZZ=2000 draws that many new ones for every test, or its share."""
    return lambda test: given(seed=st.integers(0, 2**32 - 1))(
        settings(
            max_examples=max(1, int(EXAMPLES * share)) if EXAMPLES else examples, deadline=None, database=None,
            derandomize=not EXAMPLES, suppress_health_check=list(HealthCheck),
        )(test)
    )  # fmt: skip


@contextlib.contextmanager
def drawing(really: bool) -> Iterator[None]:
    """Figures take seconds each: drawn now and then."""
    with pytest.MonkeyPatch.context() as patch:
        if not really:
            patch.setattr(figures, "_draw", lambda height, caption, plot: figures.Figure("<svg></svg>", caption))
        yield


RESULTS = [line for lines in whole_results().values() for line in lines[:8]]
RESULTS[6] |= {"mass_pairs": [[0.5, 0.1], [0.2, None]], "guards": [4, 32], "setting": {"budget": 0.1, "alpha": 1.1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"mass_pairs": 5}, {"mass_pairs": [5]}, {"mass_pairs": [[0.5]]}, {"mass_pairs": {"a": 1}}, {"index": None},
        {"setting": 5}, {"context_tokens": 10**300}, {"method": ["rq"]}, {"bytes_ratio": 10**300}, {"guards": 3},
        {"decode_ms_p95": True}, {"method": " "}, {"visit_ratio_by_layer_and_head": [[0.1, 1e308]]},
        {"method": "$\\frac$"},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_field_is_left_out_of_the_page(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = write(tmp_path / "r.jsonl", "".join(json.dumps(line | fields) + "\n" for line in RESULTS[3:7]))
    with drawing(isinstance(fields.get("method"), str)):
        code, _, err = run("report", path, "-o", tmp_path / "r.html")
    assert code == 0, err
    if "index" not in fields and not isinstance(fields.get("method"), str):
        assert f"r.jsonl, line 1: {next(iter(fields))} " in (tmp_path / "r.html").read_text()


@fuzz(100)
def test_damaged_results_leave_a_page(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("r")
    path = write(folder / "r.jsonl", mutations.lines(RESULTS, random))
    with drawing(random.random() < 0.03):
        code, _, err = run("report", path, "-o", folder / "r.html")
    assert code == 0 or (code == 2 and err.count("\n") == 1), err


BENCH = [
    {"type": "run", "command": "bench", "backend": "cuda", "device": "cuda", "bandwidth": {"copy_gbps": 100.0}},
    target_cell(2, "rq"), target_cell(4, "rq"), target_cell(128, "box", graphed_step_ms=None),
]  # fmt: skip


@fuzz(300)
def test_damaged_records_of_bench_are_judged_or_refused(tmp_path_factory: Any, seed: int) -> None:
    path = write(tmp_path_factory.mktemp("b") / "b.jsonl", mutations.lines(BENCH, Random(seed)))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert targets.main([path]) in (0, 1, 2)
    assert err.getvalue().count("\n") <= 1


@pytest.fixture(scope="module")
def scripts() -> dict[str, Any]:
    """The two that read results/, as modules."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import evidence
        import speed_tables
    finally:
        sys.path.pop(0)
    return {"evidence": evidence, "speed_tables": speed_tables}


@fuzz(25, share=0.05)
def test_damaged_measurements_are_tabled_or_refused(
    scripts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("m")
    results = ROOT / "results"
    names = sorted(path.name for path in (*results.glob("*.jsonl"), results / "bounds.json"))
    chosen = random.choice(names)
    for name in names:
        (folder / name).symlink_to(results / name)
    (folder / chosen).unlink()
    read = [json.loads(line) for line in (results / chosen).read_text().splitlines()]
    # a few whole lines, so that the fault is in what is read
    write(folder / chosen, mutations.lines([*read[:40], *read[-40:]] if len(read) > 80 else read, random))
    script = scripts["speed_tables" if chosen.startswith(("speed", "whole")) else "evidence"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", ["script", str(folder)])
        if random.random() < 0.8 and script is scripts["evidence"]:
            patch.setattr(script, "svg", lambda size, plot: "<svg></svg>")
        try:
            script.main()
        except ConfigError as error:
            assert "\n" not in str(error)


POLICY = {
    "format_version": 1, "model": "demo", "fingerprint": model_fingerprint(DEMO_MODEL), "num_layers": 4,
    "num_kv_heads": 2, "head_dim": 64, "settings": {}, "fractions": [0.5, 1.0], "curves": [[[0.4, 1.0]] * 2] * 4,
    "fraction_needed": [[0.5] * 2] * 4, "outside_share": [[0.5] * 2] * 4, "classes": [["retrieval"] * 2] * 4,
    "dense_layers": [1], "head_modes": [["gate"] * 2, ["dense"] * 2, ["gate"] * 2, ["gate"] * 2],
}  # fmt: skip
GRID = {
    "context": [1024, 2048], "method": ["rq", "box", "jl"], "budget": [0.1, 0.2], "strict": False, "heads": "all",
    "dim": None, "policy": "topk", "group_tokens": 16, "bits": None,
}  # fmt: skip
LONGBENCH = [
    {
        "dataset": name,
        "context": "Ada wrote it.",
        "input": "Who?",
        "answers": ["Paragraph 3"],
        "all_classes": ["a", "b"],
    }
    for name in ("qasper", "trec", "passage_retrieval_en", "lcc")
]
RULER = [{"input": "What?", "outputs": ["12", "13"], "answer_prefix": " It is", "index": 0, "length": 100}] * 2


@fuzz(400)
def test_damaged_inputs_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("i")
    path = folder / "vt.jsonl"

    def policy() -> None:
        write(path, mutations.document(POLICY, random))
        check_policy(load_policy(path), DEMO_MODEL, SPEC)

    def grid() -> None:
        write(path, mutations.document(GRID, random))
        for cell in load_grid(path):
            with contextlib.suppress(ConfigError):
                config_of(cell, None)

    def benchmark() -> None:
        ruler = random.random() < 0.5
        write(path, mutations.lines(RULER if ruler else LONGBENCH, random))
        for sample in load_ruler(path) if ruler else load_longbench(path):
            benchmark_question(sample, SESSION.encode, 300)
            assert 0 <= score(sample, "Paragraph 3 says a") <= 1

    def prompts() -> None:
        write(path, "".join(json.dumps(line) + "\n" for line in LONGBENCH))
        prompts = write(folder / "p.json", mutations.document(dict.fromkeys(("qasper", "trec"), "{context}"), random))
        load_longbench(path, prompts)

    def prompt() -> None:
        SESSION.encode(SESSION.prompt_texts(write(path, mutations.damaged("def f(é):\n".encode(), random)))[0])

    try:
        random.choice((policy, grid, benchmark, prompts, prompt))()
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1200


SPEC = read_spec(DEMO_MODEL)
SESSION = Session.open(backend="numpy")


@fuzz(60)
def test_damaged_captures_are_replayed_or_refused(
    captured: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random, path = Random(seed), tmp_path_factory.mktemp("c") / "c"
    if random.random() < 0.7:
        recaptured(captured, path, lambda info: mutations.document(info, random).decode("utf-8", "replace"))
    else:
        data = captured.read_bytes()
        start = random.choice((0, 8 + int.from_bytes(data[:8], "little")))  # of the header, of the tensors
        write(path, data[:start] + mutations.damaged(data[start:], random))
    flags = ["--backend", "numpy", "--methods", "box@16", "--budgets", "0.5", "--layers", "0"]
    code, _, err = run("replay", path, *flags)
    assert code == 0 or (code == 2 and err.startswith("error: ") and err.count("\n") == 1), err


@fuzz(150)
def test_damaged_costs_are_as_none(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("costs")
    measured = Cost((256, 512), (1.0, 4.0), (2.0, 2.0))
    backend, config = load_backend("numpy"), EpsConfig.of(method="rq")

    def ask() -> tuple[Cost, bool]:
        return cost.cost_of(backend, "cpu", "auto", CacheSpec(1, 2, 32, 1), 4, config, 512)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "measure", lambda *args: measured)
        patch.setattr(cost, "costs_path", lambda: folder / "costs.json")
        assert ask() == (measured, False) and ask() == (measured, True)
        kept = json.loads((folder / "costs.json").read_text())
        write(folder / "costs.json", mutations.document(kept, random))
        found, was_kept = ask()
        assert was_kept or found == measured
        assert found.min_context is None or found.min_context >= 0
        assert ask() == (found, True)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "0", "1e400", '"1"', "null", "[]"])
def test_costs_that_are_no_times_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    measured = Cost((256,), (1.0,), (2.0,))
    monkeypatch.setattr(cost, "measure", lambda *args: measured)
    monkeypatch.setattr(cost, "costs_path", lambda: tmp_path / "costs.json")
    args = (load_backend("numpy"), "cpu", "auto", CacheSpec(1, 2, 32, 1), 4, EpsConfig.of(method="rq"), 512)
    assert not cost.cost_of(*args)[1]
    path = tmp_path / "costs.json"
    assert "[2.0]" in path.read_text()
    path.write_text(path.read_text().replace("[2.0]", f"[{value}]"))
    assert cost.cost_of(*args) == (measured, False)


def test_a_grid_continued_from_a_cell_without_an_index_is_refused(tmp_path: Path) -> None:
    grid, out = write(tmp_path / "g.json", '{"context": 999999}'), tmp_path / "out.jsonl"
    flags = ["grid", "--grid", grid, "-o", out, "--backend", "numpy"]
    assert run(*flags)[0] == 0  # the cell is skipped: it is longer than the model's context
    first, cell = map(json.loads, out.read_text().splitlines())
    for index in (None, "0", 1.5):
        write(out, "".join(json.dumps(line) + "\n" for line in (first, cell | {"index": index})))
        assert "index" in refused(*flags)


def test_too_many_cells_are_refused_before_they_are_made(tmp_path: Path) -> None:
    axes = {name: list(range(1, 1001)) for name in ("context", "batch", "dim", "last_n", "first_n")}
    with pytest.raises(ConfigError, match="more than 100,000 cells"):
        load_grid(write(tmp_path / "g.json", json.dumps(axes)))


def test_notes_of_a_file_of_garbage_are_few(tmp_path: Path) -> None:
    results = load_results([write(tmp_path / "g.jsonl", b"garbage\n" * 1000)])
    assert len(results.notes) == 52 and "g.jsonl: 950 more such values and lines" in results.notes


def test_every_number_of_a_mutation_is_reproducible() -> None:
    assert mutations.lines(RESULTS, Random(5)) == mutations.lines(RESULTS, Random(5))
    different = {mutations.lines(RESULTS, Random(seed)) for seed in range(50)}
    assert len(different) > 45 and np.all([mutations.mutated(GRID, Random(7)) != GRID])
