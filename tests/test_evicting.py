"""Decoding from evicting caches, held against a judge that keeps everything, masks what is gone and remembers every
weight."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.decode.evicting import evicting
from eps_core.decode.observe import Observed
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import compare
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import Document, decode
from eps_core.eviction import table
from eps_core.eviction.base import Head, PolicySpec, Rule
from eps_core.eviction.config import EvictionConfig
from eps_core.kv_cache.heads import HeadPools
from eps_core.load import backend_name
from eps_core.models.rope import inverse_frequencies

EVERYTHING = PolicySpec(
    "all that can be asked for", window=5, sums=True, squares=True, buffer=3, keys=True, queries=True,
    query_moments=True,
)  # fmt: skip
LENGTHS = (70, 33)
RULE = {"num_sink_tokens": 2, "num_recent_tokens": 6}


def prompts() -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, tiny_models.VOCAB_SIZE, n).tolist() for n in LENGTHS]


class Judge:
    """One sequence, decoded from the formulas: all K and V are here, `kept[l][h]` says which positions a head sees."""

    def __init__(self, session: Session, keep: EvictionConfig) -> None:
        self.model, self.spec, self.keep = session.decoder.model, session.spec, keep
        layers = range(self.spec.num_layers)
        self.k: list[list[np.ndarray]] = [[] for _ in layers]
        self.v: list[list[np.ndarray]] = [[] for _ in layers]
        self.q: list[list[np.ndarray]] = [[] for _ in layers]
        self.kept = [[list[int]() for _ in range(self.spec.num_kv_heads)] for _ in layers]
        # [l][h] of (position -> [R]): all that queries gave
        self.sums: list[list[dict[int, np.ndarray]]] = [[{} for _ in range(self.spec.num_kv_heads)] for _ in layers]
        self.squares: list[list[dict[int, np.ndarray]]] = [[{} for _ in range(self.spec.num_kv_heads)] for _ in layers]
        self.length = self.budget = self.prompt = 0
        self.buffer = keep.policy_spec.buffer

    def feed(self, token: int) -> np.ndarray:
        """Logits [V] after one more token."""
        position, repeat = self.length, self.spec.num_heads // self.spec.num_kv_heads
        x, turn = self.model.embed(np.array([token])), self.model.rotation(np.array([position]))
        for layer in range(self.spec.num_layers):
            q, k, v = (np.asarray(one)[0] for one in self.model.project(layer, x, turn))
            self.q[layer].append(q)
            self.k[layer].append(k)
            self.v[layer].append(v)
            out = np.zeros((1, *q.shape))
            for head in range(self.spec.num_kv_heads):
                seen = self.kept[layer][head]
                seen.append(position)
                for i in range(repeat):
                    query = head * repeat + i
                    given = self.weights(layer, head, q[query], seen)
                    out[0, query] = sum(w * self.v[layer][p][head] for w, p in zip(given, seen, strict=True))
                    for kind, power, least in ((self.sums, 1, 0), (self.squares, 2, self.buffer)):
                        for w, p in zip(given, seen, strict=True):
                            so_far = kind[layer][head].setdefault(p, np.zeros(repeat))
                            so_far[i] += w**power if position - p >= least else 0
            x = self.model.after_attention(layer, x, out)
        self.length += 1
        return np.asarray(self.model.logits(x))[0]

    def weights(self, layer: int, head: int, q: np.ndarray, seen: list[int]) -> np.ndarray:
        logits = np.array([self.k[layer][p][head] @ q for p in seen]) / np.sqrt(self.spec.head_dim)
        mass = np.exp(logits - logits.max())
        return mass / mass.sum()

    def heads(self, policy_spec: PolicySpec) -> list[list[Head]]:
        return [
            [self.head(layer, h, policy_spec) for h in range(self.spec.num_kv_heads)] for layer in range(len(self.k))
        ]

    def head(self, layer: int, head: int, policy_spec: PolicySpec) -> Head:
        seen, repeat = self.kept[layer][head], self.spec.num_heads // self.spec.num_kv_heads
        own, half = slice(head * repeat, (head + 1) * repeat), self.spec.head_dim // 2
        window = np.zeros((repeat, min(policy_spec.window, self.length), len(seen)))
        for w in range(window.shape[1]):
            position = self.length - window.shape[1] + w
            before = [p for p in seen if p <= position]
            for i in range(repeat if before else 0):
                q = self.q[layer][position][head * repeat + i]
                window[i, w, : len(before)] = self.weights(layer, head, q, before)
        frequencies, turned = inverse_frequencies(self.spec), []
        for position, q in enumerate(self.q[layer]):
            pairs = q[own, :half] + 1j * q[own, half:]
            turned.append(pairs * np.exp(-1j * position * frequencies))
        queries = np.array(self.q[layer][-window.shape[1] :])
        return Head(
            np.array(seen), self.length, window.astype(np.float32),
            np.array([self.sums[layer][head][p] for p in seen]).T,
            np.array([self.squares[layer][head][p] for p in seen]).T,
            np.array([self.k[layer][p][head] for p in seen], np.float32),
            queries[:, own].transpose(1, 0, 2).astype(np.float32),
            np.mean(turned, axis=0), np.mean(np.abs(turned), axis=0), frequencies, prompt=self.prompt,
        )  # fmt: skip

    def evict(self) -> None:
        rule, policy_spec = self.keep.rule(self.budget), self.keep.policy_spec
        rows = table.policy(self.keep.policy).keep(self.heads(policy_spec), self.budget, rule)
        self.kept = [
            [[seen[int(i)] for i in rows[layer][head]] for head, seen in enumerate(heads)]
            for layer, heads in enumerate(self.kept)
        ]

    def run(self, prompt: list[int], forced: list[int]) -> list[np.ndarray]:
        """Logits after each of the prompt's last token and `forced`."""
        for token in prompt[:-1]:
            self.feed(token)
        self.budget, self.prompt = self.keep.rows(self.length), len(prompt)
        if self.length and self.keep.policy_spec.at_prefill:
            self.evict()
        found = []
        for token in [prompt[-1], *forced]:
            found.append(self.feed(token))
            rows = [len(seen) for layer in self.kept for seen in layer]
            if (
                self.keep.every
                and self.keep.policy_spec.while_decoding
                and sum(rows) >= len(rows) * (self.budget + self.keep.every)
            ):
                self.evict()
        return found


FORCED = [[5, 9, 200, 31, 7, 77, 120, 4, 18, 260, 9, 9], [8, 1, 99, 250, 13, 40, 2, 6, 71, 5, 5, 211]]


def prefilled(session: Session, decoder: Any, cache: Any, keep: EvictionConfig, prompt: list[int]) -> tuple[Any, Any]:
    """(sequence, cache) of a prompt, read in chunks, of which the last token is still to be read."""
    observed = Observed(session.backend, session.spec, keep.policy_spec)
    prefix = session.prefix(prompt[:-1], 19, observed)
    found: tuple[Any, Any] = decoder.adopt(cache, prefix.keys_values, len(prompt) - 1, observed)
    return found


def evicted(
    session: Session, keep: EvictionConfig, config: EpsConfig, **more: Any
) -> tuple[list[Any], Any, HeadPools, list]:
    """(records, cache, pools, sequences) of both prompts along FORCED, prefilled in chunks."""
    decoder, cache, pools = evicting(session, keep, config.cache_config, LENGTHS, len(FORCED[0]) + 1)
    sequences = []
    for prompt in prompts():
        sequence, cache = prefilled(session, decoder, cache, keep, prompt)
        sequences.append(sequence)
    documents = [Document(prompt, len(f) + 1, f) for prompt, f in zip(prompts(), FORCED, strict=True)]
    outcome, cache = decode(
        session, cache, pools, documents, config.selection_config if config.cache_config.enabled else None,
        decoder=decoder, written=sequences, keep_logits=True, **more,
    )  # fmt: skip
    for pool in pools.pools:
        pool.check()
    return outcome.records, cache, pools, sequences


def opened(target: tuple, model: Path, **settings: Any) -> Session:
    backend, device = target
    return Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays", **settings)


FILLED = ("h2o", "keydiff", "rswa", "kv-compress-full")
USUAL = [name for name, module in table.POLICIES.items() if not module.SPEC.future]


@pytest.mark.parametrize("name", USUAL)
def test_every_policy_decodes_what_a_judge_with_masks_does(model: Path, name: str) -> None:
    session = Session.open(model, "numpy")
    share = 7.0 if table.policy(name).SPEC.prompt else 0.4  # of generated tokens
    keep = EvictionConfig(name, share, 5, compact="fill" if name in FILLED else "repack", **RULE)
    records, _, _, sequences = evicted(session, keep, EpsConfig())
    heads = session.spec.num_layers * session.spec.num_kv_heads
    for index, prompt in enumerate(prompts()):
        judge = Judge(session, keep)
        for step, want in enumerate(judge.run(prompt, FORCED[index])):
            np.testing.assert_allclose(records[step].logits[index], want, rtol=0, atol=2e-4)
        for layer, held in enumerate(sequences[index].positions):
            for head, positions in enumerate(held):
                assert sorted(positions.tolist()) == judge.kept[layer][head]
        rows = [len(seen) for layer in judge.kept for seen in layer]
        assert heads * keep.rows(len(prompt) - 1) <= sum(rows) <= heads * (keep.rows(len(prompt) - 1) + 13)
    if table.policy(name).SPEC.while_decoding:
        assert sum(r.rows_moved for r in records) > 0


def test_what_is_observed_is_what_happened(target, model: Path) -> None:
    session = opened(target, model)
    judge, (prompt, _) = Judge(Session.open(model, "numpy"), EvictionConfig("streaming", 0.5)), prompts()
    judge.buffer = EVERYTHING.buffer
    for token in prompt:
        judge.feed(token)
    observed = Observed(session.backend, session.spec, EVERYTHING)
    prefix = session.prefix(prompt, 19, observed)
    decoder, cache, _ = evicting(session, EvictionConfig("streaming", 1.0), EpsConfig().cache_config, [len(prompt)], 1)
    rows = np.arange(len(prompt))
    for layer, want in enumerate(judge.heads(EVERYTHING)):
        for head, one in enumerate(want):
            k = decoder._rows(cache, prefix.keys_values[layer][0], rows, head)
            got = observed.head(cache, layer, head, k, rows, len(prompt))
            for name, value in vars(one).items():
                if value is not None:
                    np.testing.assert_allclose(getattr(got, name), value, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "random", "rkv", "keydiff", "logdet", "triattention", "adakv"])
def test_backends_keep_the_same_rows_and_say_the_same(target, model: Path, name: str) -> None:
    keep = EvictionConfig(name, 0.5, 4, **RULE)
    want, _, _, plain = evicted(Session.open(model, "numpy"), keep, EpsConfig())
    got, _, _, mine = evicted(opened(target, model), keep, EpsConfig())
    for one, other in zip(plain, mine, strict=True):
        for layer, others in zip(one.positions, other.positions, strict=True):
            for positions, found in zip(layer, others, strict=True):
                np.testing.assert_array_equal(found, positions)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(b.logits, a.logits, rtol=0, atol=2e-3)
        assert (a.bytes_kv_read_est, a.bytes_kv_kept, a.rows_moved, a.units_freed) == (
            b.bytes_kv_read_est, b.bytes_kv_kept, b.rows_moved, b.units_freed,
        )  # fmt: skip


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("method", ["box", "rq"])
def test_eps_over_what_is_left(target, model: Path, method: str) -> None:
    """Reading every group is the dense step; reading few counts few, of the rows that are kept."""
    session, small = opened(target, model), {"num_sink_tokens": 2, "num_recent_tokens": 4}
    keep = EvictionConfig("snapkv", 0.5, **RULE)
    dense, _, _, _ = evicted(session, keep, EpsConfig())
    config = EpsConfig.of(method=method, budget=1.0, **small)
    whole, _, _, _ = evicted(session, keep, config)
    for a, b in zip(dense, whole, strict=True):
        np.testing.assert_allclose(b.logits, a.logits, rtol=0, atol=1e-4)
        assert a.bytes_kv_read_est == b.bytes_kv_read_est == a.bytes_kv_kept < a.bytes_kv_dense
    small |= {"mean_tokens": 32} if method == "rq" else {}
    few, cache, _, sequences = evicted(session, keep, EpsConfig.of(method=method, budget=0.3, **small))
    spec, size = session.spec, cache.cache_config.S
    for record in few:
        assert record.pages_visited < record.pages_total
        assert record.bytes_kv_read_est == record.pages_visited * size * cache.spec.kv_token_bytes
    last = few[-1]
    rows = sum(s.num_rows for s in sequences)
    assert last.bytes_kv_kept == rows * cache.spec.kv_token_bytes
    assert rows == spec.num_layers * spec.num_kv_heads * sum(keep.rows(n - 1) + 13 for n in LENGTHS)


def test_rswa_reads_the_mask_and_moves_a_row_a_step(model: Path) -> None:
    keep = EvictionConfig("rswa", 6.0, 1, compact="fill", **RULE)
    records, _, _, sequences = evicted(Session.open(model, "numpy"), keep, EpsConfig())
    heads = sum(len(layer) for layer in sequences[0].heads)
    for prompt, sequence in zip(prompts(), sequences, strict=True):
        last = len(prompt) + len(FORCED[0])  # tokens that were read
        mask = {k for k in range(last) if k < len(prompt) or last - 1 - k < 6}
        assert all(set(held.tolist()) == mask for layer in sequence.positions for held in layer)
    # a ring: each new row is the one that the oldest leaves its place to
    assert [r.rows_moved for r in records] == [0] * 7 + [len(LENGTHS) * heads] * 6


@pytest.mark.parametrize(
    "name, share, every, most",
    [
        ("streaming", 64.0, 16, 80), ("snapkv", 0.25, 5, 250 + 4000), ("keydiff", 0.25, 5, 255), ("h2o", 0.25, 0, 4250),
        ("adakv", 0.25, 16, 5000), ("kv-compress", 0.25, 16, 5000),
        ("rswa", 8.0, 2, 1000 + 1 + 32 + 2), ("streaming", 4500.0, 16, 4516),
        ("streaming", 6000.0, 16, 5000),
    ],
)  # fmt: skip
def test_rows_that_a_head_ever_holds(name: str, share: float, every: int, most: int) -> None:
    assert EvictionConfig(name, share, every).most_rows(1000, 4000) == most


def test_a_long_text_stays_in_the_pages_of_what_is_kept(model: Path) -> None:
    session, keep = Session.open(model, "numpy"), EvictionConfig("streaming", 20.0, 8, **RULE)
    prompt, said = prompts()[0], (prompts()[1] * 5)[:150]
    decoder, cache, pools = evicting(session, keep, CacheConfig(block_size=16), [len(prompt)], 151)
    assert {pool.num_units for pool in pools.pools} == {2 * session.spec.num_kv_heads}
    sequence, cache = prefilled(session, decoder, cache, keep, prompt)
    document = Document(prompt, 151, said)
    outcome, _ = decode(session, cache, pools, [document], None, decoder=decoder, written=[sequence], keep_logits=True)
    assert len(outcome.records) == 151 and {len(held) for layer in sequence.positions for held in layer} <= {*range(28)}
    for record, want in zip(outcome.records, Judge(session, keep).run(prompt, said), strict=True):
        np.testing.assert_allclose(record.logits[0], want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["streaming", "h2o", "rkv", "keydiff", "kv-compress", "kv-compress-full"])
def test_a_long_text_after_one_token_keeps_what_is_never_let_go(model: Path, name: str) -> None:
    session, keep = Session.open(model, "numpy"), EvictionConfig(name, 0.5, 3, **RULE)
    decoder, cache, pools = evicting(session, keep, EpsConfig().cache_config, [1], 30)
    sequence, cache = prefilled(session, decoder, cache, keep, [7])
    document = Document([7], 30, prompts()[0][:29])
    outcome, _ = decode(session, cache, pools, [document], None, decoder=decoder, written=[sequence], keep_logits=True)
    judge = Judge(session, keep)
    for record, want in zip(outcome.records, judge.run([7], prompts()[0][:29]), strict=True):
        np.testing.assert_allclose(record.logits[0], want, rtol=0, atol=2e-4)
    for positions in (one for layer in sequence.positions for one in layer):
        assert {0, 1, *range(24, 30)} <= set(positions.tolist())
    assert sequence.num_rows < session.spec.num_layers * session.spec.num_kv_heads * (8 + 3)
    decoder.release(sequence)
    assert all(pool.num_free == pool.num_units for pool in pools.pools)


def test_what_a_policy_reads_for_its_statistics_is_counted(model: Path) -> None:
    session = Session.open(model, "numpy")
    config = EpsConfig.of(method="box", budget=0.3, num_sink_tokens=2, num_recent_tokens=4)
    plain, _, _, _ = evicted(session, EvictionConfig("streaming", 0.5, **RULE), config)
    weighed, cache, _, _ = evicted(session, EvictionConfig("h2o", 0.5, **RULE), config)
    for a, b in zip(plain, weighed, strict=True):
        tiles = b.pages_visited * cache.cache_config.S * cache.spec.kv_token_bytes
        rows = b.bytes_kv_kept // cache.spec.kv_token_bytes
        assert b.bytes_kv_read_est == tiles + rows * cache.spec.k_token_bytes
        assert a.bytes_kv_read_est == a.pages_visited * cache.cache_config.S * cache.spec.kv_token_bytes
    everything, cache, _, _ = evicted(session, EvictionConfig("h2o", 0.5, **RULE), config.replace(budget=1.0))
    assert all(record.bytes_kv_read_est == record.bytes_kv_kept for record in everything)  # K is read once


def test_a_policy_of_the_future_is_refused_where_nobody_knows_it(model: Path) -> None:
    session, keep = Session.open(model, "numpy"), EvictionConfig("oracle", 0.5)
    decoder, cache, _ = evicting(session, keep, EpsConfig().cache_config, [10], 1)
    with pytest.raises(ConfigError, match="which an evaluation alone knows"):
        prefilled(session, decoder, cache, keep, prompts()[0][:10])
    assert not decoder.pools.pools[0].num_live


def test_certificates_hold_over_what_is_left(target, model: Path) -> None:
    """The bound of what was left unread is of the rows that are kept: checked against reading them all."""
    session, keep = opened(target, model), EvictionConfig("snapkv", 0.6, **RULE)
    config = EpsConfig.of(method="box", group_size=4, budget=0.4, num_sink_tokens=2, num_recent_tokens=4)
    strict = config.replace(strict=True, epsilon=0.05)
    loose, _, _, _ = evicted(session, keep, config)
    tight, _, _, _ = evicted(session, keep, strict)
    dense, _, _, _ = evicted(session, keep, EpsConfig())
    far = [np.abs(a.logits - b.logits).max() for a, b in zip(loose, dense, strict=True)]
    near = [np.abs(a.logits - b.logits).max() for a, b in zip(tight, dense, strict=True)]
    assert max(r.skipped_mass_bound_max for r in tight) <= 0.05 + 1e-6 < max(r.skipped_mass_bound_max for r in loose)
    assert np.mean(near) < np.mean(far)


# ---- settings and the command


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "snapkv", "every": -1}, "kv-every -1 is negative"),
        ({"policy": "snapkv", "num_sink_tokens": -1}, "sink-tokens -1 of an eviction must be 0 or more"),
        ({"policy": "snapkv", "seed": -1}, "seed -1 of an eviction must be 0 or more"),
        ({"policy": "snapkv", "compact": "sort"}, "kv-compact 'sort' is unknown"),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        EvictionConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_moved_rows_are_the_same_codes_and_their_summaries_follow(target, model: Path, kv_dtype: str) -> None:
    """Rows are moved as they lie: rounded to the cache's dtype and coded again, they would be others."""
    backend, device = target
    session = Session.open(str(model), backend_name(backend), device, "float32", kv_dtype, "arrays", kv_bits=(8, 4))
    rng, spec = np.random.default_rng(0), session.spec
    config = EpsConfig.of(method="box", group_size=4)
    cache, pool = session.cache(config.cache_config, 128)
    sequence, _ = pool.open()
    slots, _ = pool.append(sequence, [0] * 128)
    (table,) = pool.table([sequence])
    shape = (64, spec.num_kv_heads, spec.head_dim)
    k, v = (
        session.backend.from_numpy(rng.standard_normal(shape) * rng.exponential(3, (64, 1, 1)), "float32", device)
        for _ in range(2)
    )
    order = rng.permutation(64)
    cache = session.backend.write_kv(cache, 0, k, v, slots[:64])
    to_numpy = session.backend.to_numpy
    before = [to_numpy(array) for one in (cache.k[0], cache.v[0]) for array in (one.codes, one.scale)]
    cache = session.backend.move_kv(cache, 0, slots[:64][order], slots[64:])
    after = [to_numpy(array) for one in (cache.k[0], cache.v[0]) for array in (one.codes, one.scale)]
    (unit, at), (to, there) = (
        np.divmod(some, config.cache_config.unit_tokens) for some in (slots[:64][order], slots[64:])
    )
    for was, now in zip(before, after, strict=True):
        np.testing.assert_array_equal(now[to, :, there], was[unit, :, at])
    rows = session.backend.read_kv(cache, 0, table, 128)
    keys = to_numpy(rows[0]).astype(np.float32)
    np.testing.assert_array_equal(keys[64:], keys[:64][order])
    groups = keys[64:].reshape(16, 4, spec.num_kv_heads, -1)
    units = table[64 // config.cache_config.unit_tokens :]
    low, scale = (to_numpy(cache.summaries[0][name])[units].astype(np.float32) for name in ("lo", "scale"))
    low = (low * scale[..., None]).swapaxes(1, 2).reshape(16, spec.num_kv_heads, -1)
    step = scale.swapaxes(1, 2).reshape(16, spec.num_kv_heads, 1)
    assert (low <= groups.min(axis=1)).all() and (groups.min(axis=1) <= low + step).all(), "boxes of what was moved"


def test_rows_of_a_prompt() -> None:
    assert EvictionConfig("rswa", 128.0).rows(69) == 70 + 128
    assert EvictionConfig("snapkv", 0.25).rows(1001) == 251 and EvictionConfig("snapkv", 64.0).rows(1000) == 64
    # what is never evicted stays, however short the prompt that a long text follows
    assert EvictionConfig("snapkv", 0.25).rows(10) == EvictionConfig("snapkv", 8.0).rows(1000) == 4 + 32
    assert Rule(4, 32) == EvictionConfig("snapkv").rule(100)
    # half of them are the newest, whose other half has room for the first ones
    assert EvictionConfig("h2o", 0.25).rows(10) == 8 and EvictionConfig("h2o", 0.25).rule(8) == Rule(4, 4)


def test_metrics_name_the_cache_of_what_is_left(model: Path, tmp_path: Path) -> None:
    request = RunRequest(
        EpsConfig.of(method="rq", num_sink_tokens=2, num_recent_tokens=4, budget=0.3), Sampling(), "numpy", "cpu",
        model, ("It was a dark and stormy night; the rain fell in torrents. " * 3,), 4, "float32",
        keep=EvictionConfig("keydiff", 0.5, 4, **RULE), metrics=tmp_path / "m.jsonl",
    )  # fmt: skip
    compare.run(request, io.StringIO())
    run = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    spec, tokens = Session.open(model, "numpy").spec, run["prompt_tokens"]
    kept = -(-tokens // 2) + 4  # half, and what is said
    assert run["cache"]["num_kv_heads"] == 1
    assert run["cache"]["num_units"] == spec.num_kv_heads * -(-kept // 64)
