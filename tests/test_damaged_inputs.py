"""Whatever is in a file that a user names, it is read or refused in one line: properties over damaged files.

EPS_FUZZ=2000 draws that many new faults for every test; without it a few, always the same.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np
import pytest
from command import last, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_html_report import whole_results
from test_inputs import make_capture, recaptured, write

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode import cost
from eps_core.decode.cost import Cost
from eps_core.decode.heads import check_policy, load_policy, model_fingerprint
from eps_core.decode.prompts import prompt_texts
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.load import load_backend
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.report import figures
from eps_core.report.load import load_results
from eps_core.tasks.benchmarks import load_longbench, load_ruler, score
from eps_core.tasks.questions import benchmark_question

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


def read_or_refused(line: list[str], folder: Path) -> None:
    code, _, err = outcome(line, folder)
    assert not code or (code == 2 and err.startswith("error: ") and err.count("\n") == 1), err


RESULTS = [line for lines in whole_results().values() for line in lines[:8]]
RESULTS[6] |= {"mass_pairs": [[0.5, 0.1], [0.2, None]], "sink_recent": [4, 32]}
RESULTS[6] |= {"setting": {"budget": 0.1, "alpha": 1.1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"mass_pairs": 5}, {"mass_pairs": [5]}, {"mass_pairs": [[0.5]]}, {"mass_pairs": {"a": 1}}, {"index": None},
        {"setting": 5}, {"context_tokens": 10**300}, {"method": ["rq"]}, {"bytes_ratio": 10**300}, {"sink_recent": 3},
        {"decode_ms_p95": True}, {"method": " "}, {"selected_ratio_by_layer_and_head": [[0.1, 1e308]]},
        {"method": "$\\frac$"},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_field_is_left_out_of_the_page(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = write(tmp_path / "r.jsonl", "".join(json.dumps(line | fields) + "\n" for line in RESULTS[3:7]))
    with drawing(isinstance(fields.get("method"), str)):
        last(outcome(["report", str(path), "-o", "r.html"], tmp_path))
    if "index" not in fields and not isinstance(fields.get("method"), str):
        assert f"r.jsonl, line 1: {next(iter(fields))} " in (tmp_path / "r.html").read_text()


@fuzz(100)
def test_damaged_results_leave_a_page(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("r")
    path = write(folder / "r.jsonl", mutations.lines(RESULTS, random))
    with drawing(random.random() < 0.03):
        read_or_refused(["report", str(path), "-o", "r.html"], folder)


POLICY = {
    "format_version": 1, "model": "demo", "fingerprint": model_fingerprint(DEMO_MODEL), "num_layers": 4,
    "num_kv_heads": 2, "head_dim": 64, "settings": {}, "fractions": [0.5, 1.0], "curves": [[[0.4, 1.0]] * 2] * 4,
    "fraction_needed": [[0.5] * 2] * 4, "outside_share": [[0.5] * 2] * 4, "classes": [["retrieval"] * 2] * 4,
    "dense_layers": [1], "head_modes": [["sparse"] * 2, ["dense"] * 2, ["sparse"] * 2, ["sparse"] * 2],
}  # fmt: skip
GRID = {
    "context": [1024, 2048], "method": ["rq", "box", "jl"], "budget": [0.1, 0.2], "strict": False, "heads": "all",
    "dim": None, "policy": "topk", "group_size": 16, "bits": None,
}  # fmt: skip
QUESTION = {"context": "Ada wrote it.", "input": "Who?", "answers": ["Paragraph 3"], "all_classes": ["a", "b"]}
LONGBENCH = [{"dataset": name, **QUESTION} for name in ("qasper", "trec", "passage_retrieval_en", "lcc")]
RULER = [{"input": "What?", "outputs": ["12", "13"], "answer_prefix": " It is", "index": 0, "length": 100}] * 2


@fuzz(400)
def test_damaged_inputs_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("i")
    path = folder / "vt.jsonl"

    def policy() -> None:
        write(path, mutations.document(POLICY, random))
        check_policy(load_policy(path), DEMO_MODEL, SPEC)

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
        (text,) = prompt_texts(write(path, mutations.damaged("def f(é):\n".encode(), random)), 16384)
        SESSION.encode(text)

    try:
        random.choice((policy, benchmark, prompts, prompt))()
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1200


SPEC = read_spec(DEMO_MODEL)
SESSION = Session.open(backend="numpy")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_capture(tmp_path_factory.mktemp("captures") / "c.safetensors")


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
    read_or_refused(["replay", str(path), *flags], path.parent)


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


def test_notes_of_a_file_of_garbage_are_few(tmp_path: Path) -> None:
    results = load_results([write(tmp_path / "g.jsonl", b"garbage\n" * 1000)])
    assert len(results.notes) == 52 and "g.jsonl: 950 more such values and lines" in results.notes


def test_every_number_of_a_mutation_is_reproducible() -> None:
    assert mutations.lines(RESULTS, Random(5)) == mutations.lines(RESULTS, Random(5))
    different = {mutations.lines(RESULTS, Random(seed)) for seed in range(50)}
    assert len(different) > 45 and np.all([mutations.mutated(GRID, Random(7)) != GRID])
