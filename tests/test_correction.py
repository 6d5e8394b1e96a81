"""The correction: what skipped groups are estimated to have contributed, exact where estimates are, and never bounded.

`test_conformance.check_tail` holds the backends to the oracle; here both are held to what it is meant to be.
"""

import importlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from test_conformance import STEPS, Decoding, close, selection_mask, sparse, tiny_path  # noqa: F401

from eps_core.attention.protocol import Scores, Selection
from eps_core.cli.options import config_of, given_flags, method_option, selection_options, summary_options
from eps_core.config.bytes import scoring_bytes, summary_bytes
from eps_core.config.cache import METHODS
from eps_core.config.eps import EpsConfig
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.evaluation.compare import run
from eps_core.evaluation.request import RunRequest
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import backend_name
from eps_core.reference.formulas import attend_keys
from experiments.bounds import bounds, truth

# tokens of a group, of a skipped-mass correction group; six of these in the pool
SIZE, TAIL, HEAD_DIM, UNITS = 8, 64, 16, 6
USUAL = 128  # tokens of a skipped-mass correction group by default


@dataclass
class Scene:
    """Sequences whose estimates are their true masses (of the larger of their query heads), and what was read."""

    filled: truth.Filled
    q: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    scores: Scores
    selected: Selection
    state: tuple

    @property
    def backend(self) -> Any:
        return self.filled.backend

    @property
    def plan(self) -> StepPlan:
        return StepPlan.of(self.filled.config, self.table, self.lengths)

    def host(self, array: Any) -> np.ndarray:
        return self.backend.to_numpy(array).astype(np.float64)

    @property
    def skipped(self) -> np.ndarray:
        """[B, Hkv, G]: groups of each sequence that were not read."""
        groups = self.scores.estimate.shape[2]
        inside = np.arange(groups) < -(-self.lengths // SIZE)[:, None]
        return ~selection_mask(self.backend, self.selected, groups) & inside[:, None]

    def native_tail(self, more: float = 0.0) -> tuple:
        scores, cache = replace(self.scores, estimate=self.scores.estimate + more), self.filled.cache
        return self.backend.attend_correction(cache, 0, self.plan, scores, self.selected, self.state[1])

    def correction(self, more: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) on the host, of estimates that are `more` nats higher."""
        out, lse = self.native_tail(more)
        return self.host(out), self.host(lse)

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        out, lse = self.backend.merge(self.state, self.native_tail())
        return self.host(out), self.host(lse)

    def keys_values(self, b: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (x[self.table[b], head].reshape(-1, HEAD_DIM)[: self.lengths[b]] for x in (self.filled.k, self.filled.v))
        return k, v

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        """(out [B, Hq, D], lse [B, Hq]) in float64."""
        out, lse = np.zeros(self.q.shape), np.zeros(self.q.shape[:2])
        repeat = self.q.shape[1] // self.filled.k.shape[1]
        for b, r in np.ndindex(*lse.shape):
            a = self.q[b, r].astype(np.float64) / np.sqrt(HEAD_DIM)
            out[b, r], lse[b, r] = attend_keys(a, *self.keys_values(b, r // repeat))
        return out, lse


def scene(target, repeat: int = 1, lengths=(UNITS * TAIL, 2 * TAIL), dtype: str = "float32", **config: Any) -> Scene:
    """Values are equal within a correction group: whole numbers up to 127 in 128ths, which int8 codes say exactly."""
    backend, device = target
    rng = np.random.default_rng(repeat)
    settings = {"method": "oracle", "group_size": SIZE, "correction_tokens": TAIL, "policy": "topk", "budget": 0.2}
    eps_config = EpsConfig.of(**{**settings, "num_sink_tokens": 4, "num_recent_tokens": 8, **config})
    k = rng.normal(size=(UNITS * TAIL, 2, HEAD_DIM)).astype(np.float32)
    v = rng.integers(-127, 128, (UNITS, 1, 2, HEAD_DIM))
    v[..., 0] = 127
    v = np.broadcast_to(v / 128, (UNITS, TAIL, 2, HEAD_DIM)).reshape(k.shape).astype(np.float32)
    filled = bounds.fill(backend, device, eps_config, dtype, k, v, cut=100)
    # the stored scale is rounded up; here the true one
    stored = filled.cache.correction.summaries[0]
    stored["mean_scale"] = stored["mean_scale"] * 0 + 2.0**-7
    table = np.stack([rng.permutation(UNITS) for _ in lengths])
    q = (rng.normal(size=(len(lengths), 2 * repeat, HEAD_DIM)) * 2).astype(np.float32)
    return Scene(filled, q, table, np.array(lengths), *sparse_read(filled, q, table, lengths))


def sparse_read(
    filled: truth.Filled, q: np.ndarray, table: np.ndarray, lengths: Any
) -> tuple[Scores, Selection, tuple]:
    """(scores, what was selected, what attention to it gave)."""
    backend, plan = filled.backend, StepPlan.of(filled.config, table, np.array(lengths))
    native = backend.from_numpy(q, "float32", filled.device)
    scores = backend.score(filled.cache, 0, native, plan)
    selected = backend.select(scores, plan)
    return scores, selected, backend.attend(filled.cache, 0, native, plan, selected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [{}, {"policy": "threshold", "top_pages": 4}, {"scope": "union"}],
    ids=["topk", "threshold", "union"],
)
def test_true_masses_of_equal_values_give_dense_attention(target, config, dtype):
    one = scene(target, dtype=dtype, **config)
    assert one.skipped[0].any(axis=1).all()
    out, lse = one.dense()
    got_out, got_lse = one.merged()
    assert np.abs(got_out - out).max() <= 1e-5 and np.abs(got_lse - lse).max() <= 1e-5
    assert np.abs(one.host(one.state[0]) - out).max() > 1e-2, "what was read says it all: this says nothing"


def test_stored_means_are_within_a_code(target):
    """Of values that differ, in the pool's order, as the cache holds them."""
    rng = np.random.default_rng(0)
    config = EpsConfig.of(method="box", group_size=SIZE, correction_tokens=TAIL)
    for dtype in bounds.CACHE_DTYPES:
        v = (rng.normal(size=(3 * TAIL, 2, 20)) * 10.0 ** rng.integers(-2, 3, (3 * TAIL, 2, 1))).astype(np.float32)
        filled = bounds.fill(*target, config, dtype, rng.normal(size=v.shape).astype(np.float32), v, cut=70)
        stored = {name: filled.backend.to_numpy(x)[:, :, 0] for name, x in filled.cache.correction.summaries[0].items()}
        scale = stored["mean_scale"].astype(np.float64)[..., None]
        means = filled.v.mean(axis=2)
        assert (np.abs(stored["mean"] * scale - means) <= 0.501 * scale).all()
        # no wider than the largest channel asks for
        assert (scale[..., 0] <= np.abs(means).max(axis=2) / 127 * 1.002 + 2.0**-23).all()


def test_everything_visited_is_bit_for_bit_without_a_tail(target):
    one = scene(target, budget=1.0)
    out, lse = one.correction()
    assert not one.skipped.any() and np.isneginf(lse).all() and (out == 0).all()
    for got, want in zip(one.merged(), one.state, strict=True):
        assert np.array_equal(got, one.host(want))


@pytest.mark.parametrize("repeat", [1, 3])
def test_estimates_too_high_are_corrected_by_what_was_read(target, repeat):
    """Three nats too high everywhere: the same correction. Too low: it stays as low, no excess to be seen."""
    one = scene(target, repeat)
    out, lse = one.correction()
    read = np.where(one.skipped, -np.inf, one.host(one.scores.estimate))
    over = np.logaddexp.reduce(np.where(np.isfinite(read), read, -np.inf), axis=2).repeat(repeat, 1)
    over = np.maximum(over - one.host(one.state[1]), 0)
    assert (over <= 1e-5).all() == (repeat == 1)  # of several query heads the largest mass is too high for the others
    for more in (3.0, -3.0, 0.5, -20.0):
        changed_out, changed = one.correction(more)
        assert np.abs(changed_out - out).max() <= 2e-6
        want = lse + np.minimum(more + over, 0) if more < 0 else lse
        assert np.allclose(changed, want, atol=1e-5, rtol=0), more
    # and no heavier than the estimates say
    said = np.logaddexp.reduce(np.where(one.skipped, one.host(one.scores.estimate), -np.inf), axis=2)
    assert (lse <= said.repeat(repeat, 1) + 1e-5).all()


def test_open_groups_hide_no_more_than_their_mass(target):
    """What was read without an estimate hides a part of the excess: the correction is between that of true estimates
    and what the higher ones say."""
    one = scene(target, lengths=(UNITS * TAIL - 3, 3 * TAIL + 5))
    out, lse = one.correction()
    high_out, high = one.correction(3.0)
    assert np.abs(high_out - out).max() <= 2e-6 and (lse - 1e-5 <= high).all() and (high <= lse + 3).all()
    assert (high < lse + 2.5).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("method", ["box", "meanstd", "ball", "moments", "rq"])
def test_tail_is_never_larger_than_the_estimates_say(target, method, repeat):
    one = scene(target, repeat, lengths=(UNITS * TAIL, 5 * TAIL - 3, 61), method=method)
    _, lse = one.correction()
    full = np.repeat(np.arange(UNITS) < one.lengths[:, None] // TAIL, TAIL // SIZE, axis=1)[:, None]
    estimate = one.host(one.scores.estimate)
    counted = np.where(one.skipped & full & np.isfinite(estimate), estimate, -np.inf)
    said = np.logaddexp.reduce(counted, axis=2).repeat(repeat, 1)
    assert np.isneginf(lse[2]).all() and np.isfinite(lse[:2]).all()
    assert (lse[:2] <= said[:2] + 1e-5 * (1 + np.abs(said[:2]))).all()


def test_overwritten_tokens_leave_the_tail_until_their_group_is_full(target):
    one = scene(target, lengths=(UNITS * TAIL,), budget=SIZE * 2.0)
    backend, device = target
    cache, rng = one.filled.cache, np.random.default_rng(7)
    unit = int(one.table[0, 2])
    fresh = rng.normal(size=(2, TAIL, 2, HEAD_DIM)).astype(np.float32)

    def write(start: int, end: int) -> None:
        k, v = (backend.from_numpy(np.ascontiguousarray(x[start:end]), "float32", device) for x in fresh)
        one.filled.cache = backend.write_kv(cache, 0, k, v, unit * TAIL + np.arange(start, end))

    def added() -> tuple[np.ndarray, float]:
        """(whether each unit's groups are skipped and known, log mass of the correction over its estimates), head 0."""
        one.scores, one.selected, one.state = sparse_read(one.filled, one.q, one.table, one.lengths)
        estimate = one.host(one.scores.estimate)[0, 0]
        mine = np.where(one.skipped[0, 0] & np.isfinite(estimate), estimate, -np.inf).reshape(UNITS, -1)
        return np.logaddexp.reduce(mine, axis=1), one.correction()[1][0, 0]

    for start, end, full in ((20, 21, False), (21, 50, False), (50, TAIL, True), (0, 30, False), (30, TAIL, True)):
        write(start, end)
        by_unit, lse = added()
        assert np.isfinite(by_unit).sum() >= 4 and np.isfinite(by_unit[2])
        counted = np.logaddexp.reduce(by_unit if full else np.delete(by_unit, 2))
        assert abs(lse - counted) <= 1e-5
        if full:
            stored = one.filled.cache.correction.summaries[0]
            mean = backend.to_numpy(stored["mean"])[unit, :, 0].astype(np.float64)
            mean *= backend.to_numpy(stored["mean_scale"])[unit, :, 0].astype(np.float64)[:, None]
            want = backend.to_numpy(one.filled.cache.v[0]).astype(np.float64)[unit].mean(axis=1)
            assert np.abs(mean - want).max() <= np.abs(want).max() / 250


def test_copied_units_bring_their_means(target):
    """A full unit too, which forks share and copies elsewhere need not."""
    one = scene(target, lengths=(5 * TAIL,), budget=SIZE * 2.0)
    want = one.correction()
    source, free = int(one.table[0, 1]), int(one.table[0, 5])
    one.filled.cache = target[0].copy_units(one.filled.cache, [source], [free])
    one.table[0, 1] = free
    assert np.isfinite(want[1]).all()
    for got, same in zip(one.correction(), want, strict=True):
        assert np.array_equal(got, same)


def test_values_of_others_never_reach_a_sequence(target):
    """NaN, infinities and what overflows in V of other units, also where the table pads with one of them."""
    backend, device = target
    config = EpsConfig.of(
        method="box", group_size=SIZE, correction_tokens=TAIL, num_sink_tokens=4, num_recent_tokens=8, budget=0.2
    )
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, UNITS * TAIL, 2, HEAD_DIM)).astype(np.float32)
    q, results = rng.normal(size=(2, 4, HEAD_DIM)).astype(np.float32), []
    for bad in (1.0, np.nan, np.inf, 1e30):
        v[:TAIL] = bad
        filled = bounds.fill(backend, device, config, "float32", k, v)
        table, lengths = np.array([[5, 1, 4, 0], [3, 2, -1, -1]]), np.array([3 * TAIL + 1, TAIL + 60])
        v_open = backend.from_numpy(np.ones((1, 2, HEAD_DIM), np.float32), "float32", device)
        filled.cache = backend.write_kv(filled.cache, 0, v_open, v_open, np.array([0]))
        one = Scene(filled, q, table, lengths, *sparse_read(filled, q, table, lengths))
        results.append([*one.correction(), *one.merged()])
        for got, want in zip(results[-1], results[0], strict=True):
            assert np.isfinite(got).all() and np.array_equal(got, want), bad


# ------------------------------------------------------------------------------------------------------------- decoders

# tokens of the first prompt: two full correction groups and more; with the second one's 163 past rq's centroid
LONG = 190


class Watched(Decoding):
    """A decoder that keeps every layer's attention output [B, Hq, D] of the last step."""

    def __init__(self, target, path: Path, config: EpsConfig) -> None:
        super().__init__(target, path, config, LONG)
        self.outs: list[np.ndarray] = []
        add = self.decoder.model.add_attention

        def keep(layer, x, out):
            self.outs.append(self.backend.to_numpy(out).astype(np.float64))
            return add(layer, x, out)

        self.decoder.model.add_attention = keep
        self.decoder.model.for_rows = lambda kernels, rows: self.decoder.model  # which calls it
        self.listen()

    def step(self, **how):
        self.outs.clear()
        self.queries.clear()
        return super().step(**how)

    def dense_out(self, layer: int) -> np.ndarray:
        """[B, Hq, D] in float64 of the step's own query over all tokens."""
        q = self.queries[layer][1].astype(np.float64) / np.sqrt(self.spec.head_dim)
        out, repeat = np.zeros(q.shape), self.spec.num_heads // self.spec.num_kv_heads
        for b, r in np.ndindex(*q.shape[:2]):
            k, v = self.backend.read_kv(self.cache, layer, self.table[b], int(self.lengths[b]))
            out[b, r] = attend_keys(q[b, r], *(self.backend.to_numpy(x)[:, r // repeat] for x in (k, v)))[0]
        return out


CERTIFIED = {
    "moments": sparse("moments", budget=0.1, block_size=64, correction_tokens=64),
    "rq with codes of keys": sparse("rq", budget=0.1, block_size=64, correction_tokens=64, bound_bits=8),
}


@pytest.mark.parametrize("name", CERTIFIED)
def test_error_certificate_covers_the_tail(target, tiny_path, name):  # noqa: F811
    """Of the merged output; in the first layer it is that of the run without a correction plus what that moved."""
    config = CERTIFIED[name]
    run, without = Watched(target, tiny_path, config), Watched(target, tiny_path, config.replace(correction_tokens=0))
    repeat = run.spec.num_heads // run.spec.num_kv_heads
    for step in range(2):
        output, plain = run.step(), without.step()
        for layer, stats in enumerate(output.layers):
            far = np.linalg.norm(run.outs[layer] - run.dense_out(layer), axis=2)
            bound = stats.output_error_bound.repeat(repeat, axis=1)
            assert (far <= bound + 1e-5 * np.abs(run.outs[layer]).max()).all()
        moved = np.linalg.norm(run.outs[0] - without.outs[0], axis=2).reshape(2, -1, repeat).max(axis=2)
        if step == 0:  # before the two part
            assert (moved > 1e-3).all()
            want = plain.layers[0].output_error_bound + moved
            assert np.allclose(output.layers[0].output_error_bound, want, rtol=1e-4)
        assert (output.layers[0].skipped_mass_bound == plain.layers[0].skipped_mass_bound).all() or step


@pytest.mark.parametrize("name", CERTIFIED)
def test_strict_epsilon_zero_with_a_tail_is_dense(target, tiny_path, name):  # noqa: F811
    config = CERTIFIED[name].replace(strict=True, epsilon=0.0)
    run = Watched(target, tiny_path, config)
    for _ in range(2):
        output = run.step(audit=True)
        assert close(output.logits, output.dense_logits)
        for stats in output.layers:
            assert (stats.output_error_bound == 0).all() and (stats.skipped_mass_bound == 0).all()
    some = run.step(config=config.replace(epsilon=0.3))
    assert all((stats.skipped_mass_bound <= 0.3).all() for stats in some.layers)
    assert any((stats.counts < stats.groups[:, None]).any() for stats in some.layers)


def test_budget_of_everything_is_bit_for_bit_without_a_tail(target, tiny_path):  # noqa: F811
    config = sparse("box", budget=1.0, block_size=64, correction_tokens=64)
    run, without = Watched(target, tiny_path, config), Watched(target, tiny_path, config.replace(correction_tokens=0))
    for _ in range(2):
        assert np.array_equal(run.step().logits, without.step().logits)


def test_steps_count_the_means_that_they_read(target, tiny_path):  # noqa: F811
    config = sparse("box", budget=0.1, block_size=64, correction_tokens=64)
    run, without = Watched(target, tiny_path, config), Watched(target, tiny_path, config.replace(correction_tokens=0))
    assert run.cache.bytes_k_reread == 0 and without.cache.bytes_k_reread == 0  # prompts in one chunk
    for _ in range(STEPS):
        # of each sequence the corrections that it has, in units of 64 tokens; what pads the table is not counted
        more = run.spec.num_kv_heads * int((-(-(run.lengths + 1) // 64)).sum()) * (run.spec.head_dim + 2)
        for one, other in zip(run.step().layers, without.step().layers, strict=True):
            assert one.summary_bytes_read - other.summary_bytes_read == more
            assert one.kv_bytes_read == other.kv_bytes_read
    # the first prompt's third correction group became full: 190 tokens and 2 more
    assert without.cache.bytes_k_reread == 0
    assert run.cache.bytes_k_reread == run.spec.num_layers * run.spec.num_kv_heads * 64 * run.spec.head_dim * 4


# ------------------------------------------------------------------------------------------------- settings and flags


def test_off_by_default_and_of_a_usual_length():
    assert all(EpsConfig.of(method=method).cache_config.correction_tokens == 0 for method in METHODS)
    for settings, usual in (
        ({"block_size": 12, "group_size": 4}, 120),
        ({"block_size": 160}, 160),
        ({"group_size": 96}, 96),
    ):
        assert EpsConfig.of("box", **settings).with_correction().cache_config.correction_tokens == usual
    config = EpsConfig.of(method="rq", correction_tokens=64)
    assert EpsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.cache_config.unit_tokens == 64


@pytest.mark.parametrize("method", ["jl", "1pc", "fd"])
def test_refused_where_estimates_are_norms(method):
    with pytest.raises(ConfigError, match=f"of method {method} are norms: use --eps-correction drop") as caught:
        EpsConfig.of(method=method, correction_tokens=128)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="are norms"):
        flags("--eps-method", method, "--eps-correction", "mean", "--eps-correction-tokens", "128")


@pytest.mark.parametrize("tokens", [1, 8, 40, 512, -64])
def test_refused_where_groups_do_not_fill_it(tokens):
    with pytest.raises(ConfigError, match=f"eps-correction-tokens {tokens} is not a multiple, up to 256, of the 16"):
        EpsConfig.of(method="box", correction_tokens=tokens)
    assert EpsConfig.of(method="box", correction_tokens=16).cache_config.correction_tokens == 16


def test_bytes_of_a_tail():
    """D + 2 a skipped-mass correction group and kv head, in store and in every pass."""
    config = EpsConfig.of(method="rq").with_correction()
    without = config.replace(correction_tokens=0)
    for tokens in (1, 128, 129, 1000):
        corrections = -(-tokens // USUAL)
        stored, plain = (summary_bytes(one.cache_config, 3, 5, 128, tokens) for one in (config, without))
        assert stored - plain == 15 * corrections * 130
    assert scoring_bytes(config, 128, [200, 60]) - scoring_bytes(without, 128, [200, 60]) == 3 * 130


def flags(*args: str) -> EpsConfig:
    """The config that these flags of `run` make."""

    @click.command()
    @click.option("--model")
    @summary_options
    @method_option("off")
    @selection_options
    @click.pass_context
    def command(ctx: click.Context, **given: Any) -> EpsConfig:
        return config_of(given, given_flags(ctx, given))

    return command.main(list(args), standalone_mode=False)


def test_flags():
    assert flags("--eps-method", "rq", "--eps-correction", "mean").cache_config.correction_tokens == USUAL
    assert flags("--eps-method", "rq", "--eps-correction", "drop") == EpsConfig.of(method="rq")
    assert flags("--eps-method", "rq") == EpsConfig.of(method="rq")
    assert flags("--eps-method", "box", "--eps-correction", "mean").cache_config.correction_tokens == USUAL
    assert flags("--eps-method", "box", "--eps-correction", "drop") == flags("--eps-method", "box")
    assert flags("--eps-method", "moments", "--eps-correction-tokens", "64").cache_config.correction_tokens == 64
    with pytest.raises(click.UsageError, match="--eps-correction-tokens belongs to --eps-correction mean"):
        flags("--eps-method", "rq", "--eps-correction", "drop", "--eps-correction-tokens", "64")


PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5  # past rq's centroid


def test_dropping_is_the_run_without(target, tiny_path, monkeypatch):  # noqa: F811
    """Tokens and bytes of a run with --eps-correction drop are those of one whose corrections are empty, but for their
    bytes."""
    backend, device = target

    def decode(config: EpsConfig) -> dict[str, Any]:
        request = RunRequest(
            config, Sampling(), backend_name(backend), device, tiny_path, (PROMPT,), max_new_tokens=6, baseline=False,
            stop=False, kernels="arrays",
        )  # fmt: skip
        return run(request, io.StringIO())

    given = ("--eps-method", "rq", "--eps-budget", "0.1", "--block-size", "64", "--eps-correction", "mean")
    package = "eps_core.reference" if backend.__name__ == "eps_core.reference" else "eps_core.backend"
    home = importlib.import_module(f"{package}.attention")
    attend_correction, calls = home.attend_correction, []

    def empty(*args: Any) -> tuple:
        out, lse = attend_correction(*args)
        calls.append(bool(np.isfinite(backend.to_numpy(lse)).all()))
        return out * 0, lse * 0 - np.inf

    monkeypatch.setattr(home, "attend_correction", empty)
    kept = decode(flags(*given))
    assert len(calls) == 6 * 2 and all(calls)
    dropped = decode(flags(*given[:-1], "drop"))
    assert len(calls) == 6 * 2, "a dropped correction was computed"
    assert kept["eps"]["tokens"] == dropped["eps"]["tokens"]
    for name in ("bytes_kv_read", "pages_visited", "pages_total"):
        assert kept["eps"][name] == dropped["eps"][name]
    steps = range(len(PROMPT) + 1, len(PROMPT) + 7)
    more = sum(-(-length // USUAL) for length in steps) * 2 * 2 * (32 + 2)  # 2 layers, 2 kv heads of 32
    assert kept["eps"]["bytes_summary_read"] - dropped["eps"]["bytes_summary_read"] == more
