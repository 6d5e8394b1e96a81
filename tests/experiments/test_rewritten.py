"""Decoding from a prompt whose K and V were replaced, held against a judge in loops; and what the evaluation counts."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.bytes import summary_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.evicting import evicting
from eps_core.decode.session import Session
from eps_core.evaluation.runner import Document
from eps_core.evict.keep import Keep
from eps_core.load import backend_name, load_backend
from eps_core.models.config import DEMO_MODEL
from eps_core.models.rope import inverse_frequencies
from experiments.kv_formats import rewrites
from experiments.kv_formats.base import Layer, Rewritten
from experiments.kv_formats.rewrites import OFF, Arm, Plan, QuerySquares, Run, run_arms
from experiments.kv_formats.table import REWRITES, rewrite
from experiments.memory import composition as memory

PROMPT = np.random.default_rng(3).integers(0, tiny_models.VOCAB_SIZE, 90).tolist()
FORCED = [5, 9, 200, 31, 7]
GATED = EpsConfig.of(method="rq", budget=0.1)
DMC = Arm("dmc", (("tau", 0.1),))
ARMS = (
    Arm("per-channel", (("bits", 4), ("residual", 32))),
    Arm("block-gtq", (("bits", 3),)),
    Arm("prq", (("stages", 1),)),
    Arm("dar", (("part", 0.5), ("window", 20))),
    DMC,
    Arm(OFF),
)


@pytest.fixture
def target() -> tuple[Any, str]:
    """One backend: what an experiment takes from all of them is tested in their own suite."""
    return load_backend("cuda"), "cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("mistral", tmp_path_factory.mktemp("model"))


class Judge:
    """One sequence by the formulas: every head's rows of the prompt, and every token decoded since."""

    def __init__(self, session: Session) -> None:
        self.model, self.spec, self.length = session.decoder.model, session.spec, 0
        shape = range(self.spec.num_layers), range(self.spec.num_kv_heads)
        self.k: list[list[list[np.ndarray]]] = [[[] for _ in shape[1]] for _ in shape[0]]
        self.v: list[list[list[np.ndarray]]] = [[[] for _ in shape[1]] for _ in shape[0]]
        self.q: list[list[np.ndarray]] = [[] for _ in shape[0]]

    def feed(self, token: int) -> np.ndarray:
        """Logits [V] after one more token."""
        x, turn = self.model.embed(np.array([token])), self.model.rotation(np.array([self.length]))
        repeat = self.spec.num_heads // self.spec.num_kv_heads
        for layer in range(self.spec.num_layers):
            q, k, v = (np.asarray(one)[0] for one in self.model.project(layer, x, turn))
            self.q[layer].append(q)
            out = np.zeros((1, *q.shape))
            for head in range(self.spec.num_kv_heads):
                keys, values = self.k[layer][head], self.v[layer][head]
                keys.append(k[head])
                values.append(v[head])
                for i in range(head * repeat, (head + 1) * repeat):
                    logits = np.array(keys) @ q[i] / np.sqrt(self.spec.head_dim)
                    given = np.exp(logits - logits.max())
                    out[0, i] = given @ np.array(values) / given.sum()
            x = self.model.feed_forward(layer, self.model.add_attention(layer, x, out))
        self.length += 1
        return np.asarray(self.model.logits(x))[0]

    def layer(self, index: int) -> Layer:
        keys, values = (np.array(one[index], np.float32).transpose(1, 0, 2) for one in (self.k, self.v))
        half, repeat = self.spec.head_dim // 2, self.spec.num_heads // self.spec.num_kv_heads
        squares = np.zeros((self.spec.num_kv_heads, half))
        for head, i in np.ndindex(squares.shape):
            own = [q[head * repeat + r] for q in self.q[index] for r in range(repeat)]
            squares[head, i] = np.mean([float(q[i]) ** 2 + float(q[i + half]) ** 2 for q in own])
        return Layer(keys, values, inverse_frequencies(self.spec), squares)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[str, list[Rewritten]]:
    """What every arm makes of the prompt's layers, by its name."""
    judge = Judge(Session.open(model, "numpy"))
    for token in PROMPT[:-1]:
        judge.feed(token)
    layers = [judge.layer(index) for index in range(judge.spec.num_layers)]
    made = {arm: rewrites.plain if arm.rewrite == OFF else rewrite(arm.rewrite).rewrite for arm in ARMS}
    return {arm.rewrite: [made[arm](one, **dict(arm.settings)) for one in layers] for arm in ARMS}


def opened(target: tuple, model: Path) -> Session:
    backend, device = target
    return Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays")


def test_what_is_decoded_is_what_a_judge_says(target, model: Path, wanted, monkeypatch) -> None:
    """Ragged heads, positions that go on after the prompt's last, whatever rows merged."""
    session, heard = opened(target, model), []
    monkeypatch.setattr("eps_core.evaluation.runner.Outcome.against", lambda one, dense: heard.append(one.logits))
    _, runs = run_arms(session, Document([*PROMPT], len(FORCED) + 1, [*FORCED]), ARMS)
    assert len(heard) == len(ARMS)
    for arm, run, logits in zip(ARMS, runs.values(), heard, strict=True):
        judge = Judge(Session.open(model, "numpy"))
        judge.length = len(PROMPT) - 1
        for index, (one, want) in enumerate(zip(run.layers, wanted[arm.rewrite], strict=True)):
            judge.k[index] = [list(rows.astype(np.float64)) for rows in one.keys]
            judge.v[index] = [list(rows.astype(np.float64)) for rows in one.values]
            for got, rows in ((one.keys, want.keys), (one.values, want.values), (one.positions, want.positions)):
                # a number at the edge between two codes may go to either in another library
                assert all(np.abs(a - b).mean() < 2e-3 for a, b in zip(got, rows, strict=True))
        for got, token in zip(logits, [PROMPT[-1], *FORCED], strict=True):
            np.testing.assert_allclose(got[0], judge.feed(token), rtol=0, atol=1e-3)
    merged = [len(rows) for one in runs[ARMS.index(DMC)].layers for rows in one.keys]
    assert len(set(merged)) > 1 and max(merged) < len(PROMPT) - 1, "heads of different lengths"


def test_squares_of_queries_are_of_all_chunks_and_heads(target, model: Path) -> None:
    session, judge = opened(target, model), Judge(Session.open(model, "numpy"))
    for token in PROMPT:
        judge.feed(token)
    squares = QuerySquares(session.backend, session.spec)
    session.prefix(PROMPT, 19, squares)
    for layer in range(session.spec.num_layers):
        np.testing.assert_allclose(squares.means(layer), judge.layer(layer).query_squares, rtol=1e-3)


def test_bytes_are_the_formats_and_tokens_that_follow_count_whole(model: Path) -> None:
    """Densely: all that is kept is read at every step; gated: rows at the format's mean, tables whole."""
    session = Session.open(model, "numpy", kv_dtype="bfloat16")
    spec = session.spec
    token = 2 * 2 * spec.head_dim * spec.num_kv_heads * spec.num_layers
    arms = [*ARMS, *(replace(arm, config=GATED) for arm in ARMS)]
    dense, runs = run_arms(session, Document([*PROMPT], len(FORCED) + 1, [*FORCED]), arms)
    steps, length = len(FORCED) + 1, len(PROMPT) - 1
    assert dense.bytes_read()[1] == sum(token * (length + step + 1) for step in range(steps))
    for index, arm in enumerate(ARMS):
        prompt = sum(one.row_bytes + one.table_bytes for one in runs[index].layers)
        assert runs[index].bytes_read() == sum(prompt + token * (step + 1) for step in range(steps))
        assert runs[index].bytes_read(first=2) == sum(prompt + token * (step + 1) for step in range(2, steps))
        assert runs[index].bytes_kept == prompt + token * steps
        gated = runs[index + len(ARMS)]
        rows = sum(len(head) for one in gated.layers for head in one.positions)
        shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
        of_summaries = summary_bytes(GATED.store, *shape, rows // (shape[0] * shape[1]) + steps)
        assert gated.bytes_kept == prompt + token * steps + of_summaries
        if arm.rewrite == OFF:
            assert gated.bytes_read() == gated.outcome.bytes_read()[0]
            assert runs[index].outcome.kl is not None and abs(runs[index].outcome.kl).max() < 1e-6


def test_a_gates_bytes_by_hand() -> None:
    """Rows of a quarter of their bytes, and a table of 100: at the second step the gate read 800 bytes of rows, 120 of
    them of the two tokens decoded so far, and 30 of summaries."""
    rows = [np.zeros((40, 15), np.float32)] * 2
    layers = [Rewritten(rows, rows, [np.arange(40)] * 2, 2 * 40 * 60 // 4, 100)]
    record = type("Record", (), {"bytes_kv_read_est": 800, "bytes_summary_read": 30})
    outcome = type("Outcome", (), {"records": [record, record]})
    run = Run(outcome, layers, 60, 7)  # type: ignore[arg-type]
    decoded = 2 * 2 * 60
    assert run.bytes_read(first=1) == (800 - decoded) // 4 + decoded + 30 + 100
    assert run.bytes_kept == 2 * 40 * 60 // 4 + 100 + decoded + 7


def test_a_table_of_one_text_and_one_needle() -> None:
    session = Session.open(DEMO_MODEL, "cuda", "cpu", "float32", "bfloat16")
    arms = (
        Arm("per-channel", (("bits", 4),)),
        Arm("dmc", (("tau", 1.0),)),
        Arm("dar", (("part", 1 / 64), ("window", 0))),
        Arm(OFF),
    )
    plan = Plan(320, 1, 2, 4, seed=1, arms=arms)
    results = [(kind, *rewrites.tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    cells = rewrites.table_cells(plan, session.spec.head_dim, results)
    assert [cell.rewrite for cell in cells] == ["per-channel", "dmc", "dar", OFF]
    fine, plain, coarse, same = cells
    assert same.bytes_ratio == same.needle_bytes_ratio == same.bytes_kept_ratio == 1.0 and same.kl_mean is not None
    # of 320 tokens 256 are codes of K, and 192 of V
    assert 0.28 < fine.bytes_kept_ratio < fine.bytes_ratio + 0.02 < 0.8 and fine.kl_low is not None
    assert plain.kl_max is not None and plain.kl_max < 1e-5 and plain.bytes_ratio is not None
    assert abs(plain.bytes_ratio - 1) < 1e-3 and plain.needles_answered == plain.needles_dense == 1
    assert coarse.kl_mean > 20 * max(fine.kl_mean, 1e-6) and coarse.needles_answered == 0
    lines = [json.loads(json.dumps(one)) for one in rewrites.records(cells)]
    assert lines[0]["settings"] == {"bits": 4} and lines[0]["type"] == "cell" and lines[0]["num_positions"] == 8
    shown = rewrites.markdown(cells)
    assert "| `per-channel` | bits 4 | all | - |" in shown and "1 of 1" in shown and "0 of 1" in shown
    assert set(asdict(cells[0])) - {"rewrite", "settings"} <= {*memory.Cell.__dataclass_fields__}


def test_what_was_placed_is_forked_and_given_back(model: Path) -> None:
    session = Session.open(model, "numpy")
    decoder, cache, pools = evicting(session, Keep(), EpsConfig().store, [90, 90], 4)
    rng = np.random.default_rng(0)
    spec, held = session.spec, [[np.arange(0, 80, 2), np.arange(79)] for _ in range(session.spec.num_layers)]

    def rows(layer: int, head: int) -> list[np.ndarray]:
        return [rng.standard_normal((len(held[layer][head]), 1, spec.head_dim)).astype(np.float32) for _ in range(2)]

    first, cache = decoder.place(cache, 80, held, rows)
    second, cache = decoder.fork(cache, first)
    assert first.num_rows == second.num_rows == spec.num_layers * 119 and first.length == 80
    pools.check()
    decoder.release(first)
    decoder.release(second)
    pools.check()
    assert not any(pool.num_live for pool in pools.pools)
    with pytest.raises(ZeroDivisionError):
        decoder.place(cache, 80, held, lambda layer, head: 1 / 0)  # type: ignore[arg-type,return-value]
    assert not any(pool.num_live for pool in pools.pools)


def test_the_plans_arms_are_all_distinct() -> None:
    found = rewrites.arms()
    assert len(set(found)) == len(found) and {arm.rewrite for arm in found} == {OFF, *REWRITES}
    assert sum(arm.config.store.enabled and arm.rewrite != OFF for arm in found) == 2
