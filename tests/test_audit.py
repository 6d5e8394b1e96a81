"""Audits and strict mode in a whole decode: what they report is true, and an audit changes nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_conformance import eps, selection_mask
from verified_runs import Model

from eps_core.attention.protocol import Scores
from eps_core.config.bytes import scoring_bytes
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.metrics.steps import StepRecord, kl_divergence, summarise

MODEL = "llama2-bf16-sharded"
PROMPTS = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (290, 65)]
STEPS = 4
CONFIGS = {
    "rq": EpsConfig.of(method="rq", num_sink_tokens=4, num_recent_tokens=8, budget=0.05),
    "rq-pairs": eps("rq", group_size=2),
    "moments": eps("moments"),
    "meanstd": eps("meanstd", policy="threshold", top_pages=9),
    "union": eps("box", scope="union"),
    "strict": eps("ball", strict=True, epsilon=0.3),
    "bound-bits": eps("jl", bound_bits=8, strict=True, epsilon=0.3),
    "modes": eps("box", head_modes=(("dense", "dense"), ("window", "sparse"))),
}


class Watched:
    """A decoder that can attend one step densely, and a decode with it: its records, and after each step what its
    layers saw."""

    def __init__(self, target: tuple, model: Path, config: EpsConfig, dense_step: int | None = None) -> None:
        self.backend, _ = target
        self.runs = Model(*target, model)
        self.config, self.spec, self.dense_step = config, self.runs.spec, dense_step
        self.decoder = self.runs.decoder
        self.timing, self.num_steps = False, 0
        self.seen: list[dict[int, np.ndarray]] = []  # of each step: {layer: q}
        self.visits: list[list[np.ndarray]] = []  # of each step and layer: [B, Hkv, G]
        self.unread: list[np.ndarray] = []  # of each step: [L, Hkv] in float64, the largest over sequences and queries
        self.watching = False
        self.decoder.tap = self._hear

    def prefill(self, *args: Any) -> Any:
        return self.decoder.prefill(*args)

    def spec_of(self, cache: Any) -> Any:
        return self.decoder.spec_of(cache)

    def step(
        self, cache: Any, tokens: Any, slots: Any, table: np.ndarray, lengths: np.ndarray, read: Any, audit: bool
    ) -> Any:
        self.seen.append({})
        read, self.num_steps = None if self.num_steps == self.dense_step else read, self.num_steps + 1
        cache, output = self.decoder.step(cache, tokens, slots, table, lengths, read, audit)
        if self.watching and read is not None:
            self.visits.append([self._visit(cache, layer, table, lengths) for layer in range(self.spec.num_layers)])
            self.unread.append(self._unread(cache, table, lengths))
        return cache, output

    def run(self, prompts: list = PROMPTS, **more: Any) -> list[StepRecord]:
        return self.runs.decode(prompts, self.config, tokens=STEPS, decoder=self, prefill_chunk=128, **more).records

    def _hear(self, layer: int, q: Any) -> None:
        if self.watching:
            self.seen[-1][layer] = self.backend.to_numpy(q).astype(np.float32)

    def _visit(self, cache: Any, layer: int, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return what this layer selected, by selecting again."""
        backend, config = self.backend, self.config
        groups = table.shape[1] * config.cache_config.groups_per_unit
        inside = np.arange(groups) < -(-lengths // config.cache_config.S)[:, None]
        if config.selection_config.dense_layer(layer):
            return np.repeat(inside[:, None], self.spec.num_kv_heads, axis=1)
        q = backend.from_numpy(self.seen[-1][layer], "float32", self.decoder.device)
        plan = StepPlan.of(config, table, lengths)
        scores = backend.score(cache, layer, q, plan)
        selected = backend.select(scores, plan, layer)
        if config.selection_config.strict:
            _, lse = backend.attend(cache, layer, q, plan, selected)
            scores = backend.bounds(cache, layer, q, plan, scores, selected)
            _, selected = backend.extend_selection(config.selection_config, scores, selected, lse)
        return selection_mask(backend, selected, groups)

    def _unread(self, cache: Any, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        shares = np.zeros((self.spec.num_layers, self.spec.num_kv_heads))
        repeat = self.spec.num_heads // self.spec.num_kv_heads
        for layer in range(self.spec.num_layers):
            for b, length in enumerate(lengths.tolist()):
                keys = self.backend.to_numpy(self.backend.read_kv(cache, layer, table[b], length)[0]).astype(np.float64)
                for r, q in enumerate(self.seen[-1][layer][b].astype(np.float64)):
                    head = r // repeat
                    logits = keys[:, head] @ q / np.sqrt(self.spec.head_dim)
                    weights = np.exp(logits - logits.max())
                    read = np.repeat(self.visits[-1][layer][b, head], self.config.cache_config.S)[:length]
                    shares[layer, head] = max(shares[layer, head], 1 - weights[read].sum() / weights.sum())
        return shares


@pytest.mark.parametrize("name", CONFIGS)
def test_an_audit_tells_the_truth_and_changes_nothing(target, model, name):
    config = CONFIGS[name]
    watched = Watched(target, model, config)
    watched.watching = True
    audited, plain = watched.run(audit_every=2), Watched(target, model, config).run()
    assert [record.audited for record in audited] == [True, False] * 2
    for step, (record, quiet) in enumerate(zip(audited, plain, strict=True)):
        # not a bit of the decode, and not a byte of what it reads
        assert np.array_equal(record.logits, quiet.logits)
        for field in vars(record):
            if field in ("tokens", "lengths", "fallbacks", "extensions") or field.startswith(("pages", "bytes")):
                assert getattr(record, field) == getattr(quiet, field), field
        assert not quiet.audited and quiet.audit_alarms == 0
        assert quiet.audit_kl is quiet.skipped_mass_true_max is quiet.true_by_head is None
        assert record.pages_visited == sum(int(selected_mask.sum()) for selected_mask in watched.visits[step])
        if not record.audited:
            assert record.audit_kl is record.skipped_mass_true_max is record.true_by_head is None
            continue
        true = watched.unread[step]
        assert record.true_by_head is not None and record.skipped_mass_true_max == record.true_by_head.max()
        np.testing.assert_allclose(record.true_by_head, true, atol=1e-5)
        if config.cache_config.has_bounds:
            assert (true <= record.bound_by_head + 1e-6).all()
        if config.selection_config.strict:
            assert record.skipped_mass_bound_max is not None
            assert record.skipped_mass_bound_max <= config.selection_config.epsilon
    assert max(shares.max() for shares in watched.unread) > 0.01, "nothing was skipped: this says nothing"


@pytest.mark.parametrize("name", ["rq", "moments", "union"])
def test_audit_kl_is_against_a_dense_step_of_the_same_tokens(target, model, name):
    config = CONFIGS[name]
    audited = Watched(target, model, config).run(audit_every=1)
    tokens = [[record.tokens[i] for record in audited] for i in range(len(PROMPTS))]
    values = []
    for step in (0, 3):
        other = Watched(target, model, config, dense_step=step).run(forced_tokens=tokens)
        values.append(kl_divergence(other[step].logits, audited[step].logits).mean())
        assert other[step].pages_skipped == 0 < audited[step].pages_skipped
        assert audited[step].audit_kl == pytest.approx(values[-1], rel=1e-3, abs=1e-6)
    # nothing was sparse before the first step: there it is the distance to a run without EPS
    dense = Watched(target, model, EpsConfig.of()).run(forced_tokens=tokens)
    wanted = kl_divergence(dense[0].logits, audited[0].logits).mean()
    assert audited[0].audit_kl == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert max(values) > 1e-4, "both distributions are the same: this says nothing"


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_nth_step_is_audited(target, model, every):
    records = Watched(target, model, CONFIGS["moments"]).run(audit_every=every)
    assert [record.audited for record in records] == [step % every == 0 for step in range(STEPS)]
    summary = summarise(records)
    assert summary["audits"] == sum(record.audited for record in records)
    late = [record for record in records if record.step >= 2]  # past the warm-up
    rest = [record.decode_ms for record in late if not record.audited] or [record.decode_ms for record in late]
    assert summary["decode_ms_p50"] == np.percentile(rest, 50) and summary["decode_ms_p99"] == np.percentile(rest, 99)
    assert summary["audit_kl_mean"] == np.mean([record.audit_kl for record in records if record.audited])


def test_a_first_token_has_nothing_to_be_audited_against(target, model):
    records = Watched(target, model, CONFIGS["moments"]).run([PROMPTS[0], [7]], audit_every=1)
    assert [record.audited for record in records] == [False] + [True] * (STEPS - 1)


# ---------------------------------------------------------------------------------------------------------- alarms


def break_scores(monkeypatch: pytest.MonkeyPatch, backend: Any, name: str, which: Callable, nats: float) -> None:
    """`score`, as the decoder calls it, gives a part of its result lowered by `nats` where `which` of it is true."""
    score = backend.score

    def broken(cache: Any, *args: Any) -> Scores:
        scores = score(cache, *args)
        given = getattr(scores, name)
        changed = backend.to_numpy(given).astype(np.float64)
        changed[which(changed)] -= nats
        if not isinstance(given, np.ndarray):
            device = "cpu" if not hasattr(given, "device") else given.device.type
            changed = backend.from_numpy(changed.astype(np.float32), "float32", device)
        return replace(scores, **{name: changed})

    monkeypatch.setattr(backend, "score", broken)


def largest(values: np.ndarray) -> np.ndarray:
    """True at the largest 0.4 of the finite values of each row."""
    finite = np.isfinite(values)
    least = np.nanquantile(np.where(finite, values, np.nan), 0.6, axis=-1, keepdims=True)
    return finite & (values >= least)


@pytest.mark.parametrize("method", ["rq", "moments", "meanstd"])
def test_an_estimate_below_the_truth_raises_alarms(target, model, monkeypatch, method):
    # the budget has room for all groups but those whose estimates will be lowered: they count for nothing, unread
    config, factor = eps(method, group_size=2, budget=0.7), 1e3
    healthy = Watched(target, model, config).run(audit_every=2, audit_factor=factor)
    assert all(record.audit_alarms == 0 for record in healthy)
    assert all(record.pages_skipped > 0 and record.skipped_mass_true_max > 0.01 for record in healthy if record.audited)
    break_scores(monkeypatch, target[0], "estimate", largest, 20.0)
    records = Watched(target, model, config).run(audit_every=2, audit_factor=factor)
    assert [record.audit_alarms > 0 for record in records] == [True, False] * 2
    assert summarise(records)["audit_alarms"] == sum(record.audit_alarms for record in records)


@pytest.mark.parametrize("method", ["moments", "box"])
def test_a_certificate_below_the_truth_raises_alarms(target, model, monkeypatch, method):
    config, backend = eps(method), target[0]
    # a factor that no estimate can miss: what is left are error bounds
    healthy = Watched(target, model, config).run(audit_every=2, audit_factor=float("inf"))
    assert all(record.audit_alarms == 0 for record in healthy)

    break_scores(monkeypatch, backend, "upper", np.isfinite, 30.0)
    records = Watched(target, model, config).run(audit_every=2, audit_factor=float("inf"))
    assert [record.audit_alarms > 0 for record in records] == [True, False] * 2
    for record in records:
        assert not record.audited or record.skipped_mass_true_max > record.skipped_mass_bound_max


def test_after_an_alarm_the_steps_are_dense(target, model, monkeypatch):
    config, backend = eps("box"), target[0]
    calm = Watched(target, model, config).run(audit_every=2, audit_factor=float("inf"), audit_off=True)
    assert all(record.pages_skipped > 0 and not record.fallbacks for record in calm)

    break_scores(monkeypatch, backend, "upper", np.isfinite, 30.0)
    first, *rest = Watched(target, model, config).run(audit_every=2, audit_factor=float("inf"), audit_off=True)
    assert first.audited and first.audit_alarms > 0 and first.pages_skipped > 0 and not first.fallbacks
    for record in rest:
        assert record.fallbacks == {"audit_alarm": 2 * len(PROMPTS)} and not record.audited
        assert record.pages_skipped == 0 == record.bytes_summary_read and record.audit_alarms == 0
        assert record.bytes_kv_read_est == record.bytes_kv_dense
    assert summarise([first, *rest])["fallbacks"] == {"audit_alarm": 2 * len(PROMPTS) * len(rest)}


# ------------------------------------------------------------------------------------------- strict and bounds of keys


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["jl", "meanstd", "rq"])
def test_methods_without_bounds_are_strict_by_codes_of_keys(target, model, method, bits):
    config = eps(method, bound_bits=bits, strict=True, epsilon=0.2)
    watched = Watched(target, model, config)
    watched.watching = True
    records, spec = watched.run(PROMPTS[:1]), watched.spec
    key_bytes = spec.head_dim * bits // 8 + 2 + 3 * 2
    for record, shares in zip(records, watched.unread, strict=True):
        assert shares.max() <= record.skipped_mass_bound_max <= 0.2
        # codes of exactly those groups that the policy left out, whatever strict mode read of them afterwards
        left = record.pages_skipped + record.pages_extended
        scored = scoring_bytes(config, spec.head_dim, record.lengths)
        scored *= spec.num_layers * spec.num_kv_heads
        assert record.bytes_summary_read - scored == left * config.cache_config.S * key_bytes > 0
    assert sum(record.extensions for record in records) > 0
