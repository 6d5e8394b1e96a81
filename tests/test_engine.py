"""The parts that the hooks of all engines share: a pool that grows and goes back, fallbacks, settings."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_blocks import Memory

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.errors import ConfigError
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings, from_environment
from eps_core.integrations.verified import Rounds
from eps_core.load import load_backend

RQ = EpsConfig.of("rq", group_size=2, mean_tokens=32, budget=0.2, num_sink_tokens=2, num_recent_tokens=8)


# ---- the pool ----


def test_a_truncated_unit_is_not_found_by_what_it_no_longer_holds() -> None:
    memory = Memory(8, 4)
    first, _ = memory.open([1, 2, 3, 4, 5])
    memory.pool.truncate(first, 2)
    memory.append(first, [9, 9, 9])
    memory.pool.check()
    _, shared = memory.open([1, 2, 3, 4, 5])
    assert shared == 0


# ---- a cache that grows ----


@pytest.mark.kernels("numba", "triton", "metal")
def test_a_grown_cache_scores_and_attends_as_one_that_was_large(target: Any) -> None:
    eps, device = target
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(2, 700, 2, 32)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(2, 4, 32)).astype(np.float32)
    found = []
    for units in (1, 40):
        one = Paged(eps, CacheSpec(1, 2, 32, units, "float32", max_open_groups=2), RQ.cache_config, device, "auto")
        sequences = [one.open(), one.open()]
        for start in range(0, 700, 100):
            slots = one.append(sequences, [100, 100])
            rows = [np.concatenate(list(x[:, start : start + 100])) for x in (k, v)]
            one.write(0, *(eps.from_numpy(x, "float32", device) for x in rows), slots)
        plan, query = one.plan(RQ, sequences), eps.from_numpy(q, "float32", device)
        scores = eps.score(one.cache, 0, query, plan)
        selection = eps.select(scores, plan, 0)
        out, _ = eps.attend(one.cache, 0, query, plan, selection)
        found.append([eps.to_numpy(x) for x in (scores.estimate[..., :350], selection.counts, out)])
        one.pool.check()
    for small, large in zip(*found, strict=True):
        np.testing.assert_array_equal(small, large)


def test_what_a_dead_holder_leaves_is_freed_when_the_pool_is_next_asked() -> None:
    one = Paged(load_backend("numpy"), CacheSpec(1, 1, 4, 4), EpsConfig.of("rq").cache_config, "cpu")
    first, second = one.open(), one.open()
    assert not one.pool.shares  # but by forks
    one.append([first, second], [20, 20])
    one.num_holders = 2
    assert not one.give_up([first]) and one.pool.num_live == 2  # the other may be at work
    one.append([second], [1])
    assert one.pool.num_live == 1
    assert one.give_up([second]) and one.pool.num_live == 0 and one.pool.num_free == one.pool.num_units
    one.pool.check()


# ---- the call ----


class Layers:
    """A two-layer cache of one sequence and queries for both."""

    def __init__(self, length: int = 400, **kept: Any) -> None:
        self.backend = load_backend("numpy")
        rng = np.random.default_rng(2)
        self.paged = Paged(self.backend, CacheSpec(2, 2, 16, 8), RQ.cache_config, "cpu")
        self.sequence = self.paged.open()
        self.sparse = SparseAttention(self.backend, RQ, Plan((0, 2), {1: "sliding window"}), **kept)
        self.q = rng.normal(size=(1, 4, 16)).astype(np.float32)
        self.rng = rng
        self.grow(length)

    def grow(self, count: int = 1) -> None:
        slots = self.paged.append([self.sequence], [count])
        for layer in range(2):
            self.paged.write(layer, *(self.rng.normal(size=(count, 2, 16)).astype(np.float32) for _ in "kv"), slots)

    def step(self, dense: Any = lambda: "dense") -> list[Any]:
        self.grow()
        plan = self.paged.plan(self.sparse.config, [self.sequence])
        return [self.sparse.attend(self.paged.cache, layer, self.q, plan, dense) for layer in range(2)]


def test_counts_are_the_records_sums() -> None:
    one = Layers(keep_records=True, keep_lists=True)
    for _ in range(3):
        assert all(isinstance(out, np.ndarray) for out in one.step())
    stats = one.sparse.stats()
    assert stats["steps"] == stats["rows"] == 3 and stats["fallbacks"] == {}
    assert stats["bytes_kv_dense"] == (401 + 402 + 403) * 2 * 2 * 128
    assert (
        stats["bytes_kv_read"]
        == stats["groups_selected"] * 2 * 128
        == sum(len(head) * 256 for step in one.sparse.lists for rows in step.values() for row in rows for head in row)
    )
    assert 0 < stats["bytes_ratio"] < 0.4
    assert [r.lengths for r in one.sparse.records] == [[401], [402], [403]]
    one.sparse.reset()
    assert one.sparse.stats()["steps"] == 0


def test_bytes_read_again_are_counted_cache_by_cache() -> None:
    one, other = Layers(), Layers()
    other.sparse = one.sparse
    for _ in range(20):  # past the last token of a unit, whose keys are then read again
        one.step()
        other.step()
    assert one.sparse.stats()["bytes_k_reread"] == sum(x.paged.cache.bytes_k_reread for x in (one, other)) > 0


def test_what_would_be_read_whole_is_the_engines_own_attention() -> None:
    one = Layers(keep_lists=True)
    one.sparse.config = one.sparse.config.replace(budget=1.0)
    assert one.step() == ["dense", "dense"]
    stats = one.sparse.stats()
    assert stats["bytes_ratio"] == 1 and stats["fallbacks"] == {} and one.sparse.lists == [{0: None, 1: None}]


def test_what_the_config_leaves_dense_is_counted_by_reason() -> None:
    one = Layers()
    one.sparse.config = RQ.replace(min_context=402, head_modes=(("dense", "dense"), ("sparse", "sparse")))
    for _ in range(3):  # of 401, 402, 403 tokens
        one.step()
    assert one.sparse.stats()["fallbacks"] == {"min_context": 2, "dense_layer": 3}


def test_a_fault_of_ours_is_dense_for_that_call_counted_and_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Layers()
    real = one.backend.score

    def broken(cache: Any, layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise RuntimeError("a broken score")
        return real(cache, layer, *rest)

    monkeypatch.setattr(one.backend, "score", broken)
    with caplog.at_level(logging.ERROR, "eps"):
        for _ in range(2):
            first, second = one.step()
            assert isinstance(first, np.ndarray) and second == "dense"
    assert len(caplog.records) == 1 and "a broken score" in caplog.text
    stats = one.sparse.stats()
    assert stats["fallbacks"] == {"error": 2} and stats["steps"] == 2
    # the failed layer read everything
    assert stats["bytes_kv_read"] > stats["bytes_kv_dense"] // 2


def test_a_fault_of_the_engines_is_the_engines() -> None:
    one = Layers()
    one.sparse.config = one.sparse.config.replace(budget=1.0)

    def dense() -> Any:
        raise KeyError("the engine's")

    with pytest.raises(KeyError, match="the engine's"):
        one.step(dense)
    assert one.sparse.stats()["fallbacks"].get("error") is None


def test_forwards_of_two_caches_in_turn_are_steps_of_their_own() -> None:
    """As of two threads; who asks for the counts meanwhile, or gives a third cache back, disturbs neither."""
    one, other, third = Layers(), Layers(300), Layers(200)
    other.sparse = third.sparse = one.sparse
    third.step()
    for _ in range(3):
        wheres = []
        for each in (one, other):
            each.grow()
            wheres.append(each.paged.plan(each.sparse.config, [each.sequence]))
        for layer in range(2):
            for each, plan in zip((one, other), wheres, strict=True):
                one.sparse.attend(each.paged.cache, layer, each.q, plan, lambda: "dense")
                one.sparse.stats()
                one.sparse.let_go(third.paged.cache)
    stats = one.sparse.stats()
    assert stats["steps"] == stats["rows"] == 7 and stats["fallbacks"] == {}
    assert stats["bytes_kv_dense"] == (401 + 402 + 403 + 301 + 302 + 303 + 201) * 2 * 2 * 128


def test_a_forward_that_ended_early_is_counted_and_let_go() -> None:
    one = Layers()
    one.grow()
    plan = one.paged.plan(one.sparse.config, [one.sequence])
    one.sparse.attend(one.paged.cache, 0, one.q, plan, lambda: "dense")
    assert one.sparse.stats()["steps"] == 0  # it may go on
    one.sparse.let_go(one.paged.cache)
    stats = one.sparse.stats()
    assert stats["steps"] == 1 and stats["fallbacks"] == {"unseen": 1}


def test_a_live_change_may_not_change_what_is_kept() -> None:
    one = Layers()
    with pytest.raises(ConfigError, match="start it again"):
        one.sparse.config = EpsConfig.of("box")


def test_metrics_are_a_run_its_steps_and_a_summary(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    one = Layers(metrics=file, audit_every=2)
    with one.sparse:
        for _ in range(3):
            one.step()
    run, *steps, summary = [json.loads(line) for line in file.read_text().splitlines()]
    assert run["type"] == "run" and run["sparse_layers"] == [0, 2] and run["layers_dense"] == {"1": "sliding window"}
    assert [step["lengths"] for step in steps] == [[401], [402], [403]]
    assert [step["audited"] for step in steps] == [True, False, True]
    assert steps[0]["skipped_mass_true_max"] > 0 and steps[1]["skipped_mass_true_max"] is None
    assert summary["steps"] == 3 and summary["audits"] == 2


def test_metrics_that_nobody_closes_are_whole_when_the_process_ends(tmp_path: Path) -> None:
    code = f"from test_engine import Layers; one = Layers(metrics={str(tmp_path / 'steps.jsonl')!r}); one.step()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0 and not done.stderr
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["type"] for line in file.read_text().splitlines()] == ["run", "step", "summary"]


# ---- the plan ----


def test_the_plan_says_which_layers_are_left_and_why() -> None:
    plan = Plan.of(["sliding window", None, None, "sliding window", "sliding window", "sinks"])
    assert plan.sparse == (1, 2)
    line = plan.line(RQ)
    assert line.startswith("eps: rq") and "sparse in 2 of 6 layers" in line
    assert line.endswith("left dense: sliding window (0 3-4), sinks (5)")
    with pytest.raises(ConfigError, match="no layer of this model can be sparse"):
        Plan.of(["sliding window"] * 3)


MODES = (("sparse", "sparse"), ("dense", "sparse"), ("sparse", "dense"))  # of three layers, two of which are sparse


def test_head_modes_are_those_of_the_sparse_layers() -> None:
    plan = Plan((0, 2), {1: "sliding window"})
    assert plan.of_sparse(RQ) is RQ
    mapped = plan.of_sparse(RQ.replace(head_modes=MODES))
    assert mapped.selection_config.head_modes == (MODES[0], MODES[2]) and plan.of_sparse(mapped) is mapped
    with pytest.raises(ConfigError, match="head modes of 4 layers do not fit this model of 3, of which 2 are sparse"):
        plan.of_sparse(RQ.replace(head_modes=(*MODES, MODES[0])))
    one = SparseAttention(load_backend("numpy"), RQ.replace(head_modes=MODES), plan)
    assert one.config == mapped
    one.config = RQ.replace(head_modes=MODES, budget=0.5)
    assert one.config == mapped.replace(budget=0.5)
    with pytest.raises(ConfigError, match="head modes of 2 kv heads do not fit layers of 4"):
        one.fits(4)
    with pytest.raises(ConfigError, match="head modes of 1 kv heads do not fit layers of 4"):
        one.config = RQ.replace(head_modes=(("dense",), ("sparse",)))


# ---- settings ----


def test_settings_survive_the_environment() -> None:
    asked = {"method": "rq", "budget": 0.03, "metrics": "out.jsonl", "audit_every": 4, "policy": "topk"}
    assert Settings.of(Settings.of(asked).flat()) == Settings.of(asked)
    environ = {f"EPS_{name.upper()}": str(value) for name, value in asked.items()}
    assert from_environment({**environ, "EPS_STRICT": "true", "OTHER": "1"}) == {**asked, "strict": True}
    assert Settings.of(from_environment({**environ, "EPS_METRICS": "1"})).metrics == Path("1")
    with pytest.raises(ConfigError, match="metrics 1 is not"):
        Settings.of({**asked, "metrics": 1})


def test_a_misspelt_variable_is_refused_and_a_strangers_is_not() -> None:
    others = "CACHE_DIR VENV VLLM_VENV TEST_WORKERS TEST_BACKENDS FUZZ ROUTE SPEED_1B SOMETHING"
    assert from_environment({f"EPS_{name}": "1" for name in others.split()}) == {}
    for name, meant in (("EPS_BUDGTE", "EPS_BUDGET"), ("EPS_METHODS", "EPS_METHOD"), ("EPS_ALHPA", "EPS_ALPHA")):
        with pytest.raises(ConfigError, match=f"{name} is no setting of EPS: did you mean {meant}"):
            from_environment({"EPS_METHOD": "rq", name: "1"})


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"methode": "rq"}, "unknown EPS setting methode"),
        ({"method": "keys"}, "method 'keys' only bounds"),
        ({"method": "rq", "budget": "much"}, "budget"),
        ({"method": "rq", "audit_every": -1}, "audit_every"),
        ({"method": "rq", "kernels": "cudnn"}, "kernels 'cudnn'"),
    ],
)
def test_a_wrong_setting_is_one_line(flat: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.of(flat)


def test_drafts_of_an_engine_select_as_drafts_of_our_own_decoder() -> None:
    verify, config = SpeculativeConfig("tokens", most=20), EpsConfig.of(method="rq")
    rounds = Rounds(verify, 0, lambda: None, lambda *written: None, threading.RLock())
    drafts = rounds.config(config)
    assert drafts.selection_config == verify.draft_selection(config.selection_config) != config.selection_config
    assert drafts.cache_config == config.cache_config and drafts.selection_config.num_recent_tokens > verify.most
