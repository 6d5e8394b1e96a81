"""Every backend function against the float64 oracle, over odd shapes, dtypes, methods and policies.

`run_case` drives a backend through writes, forks, scoring, selection and attention and asserts at every stage; the
deliberately wrong backends of test_wrong_backends.py go through the same function and must fail it.

Tolerance: what the same formula costs in the precision at hand. Scores and attention are float32 sums of D products
of the cache's values, so the allowance is a multiple of eps32 * sqrt(D) * the size of what is summed; out in a 16-bit
dtype adds that dtype's rounding.
"""

from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
from test_oracle import KINDS, QUERIES, make_keys, make_query

from eps_core import backend as oracle
from eps_core import selection as oracle_selection
from eps_core import summaries as oracle_summaries
from eps_core.attention import group_masses
from eps_core.blocks import PagePool
from eps_core.config import CacheSpec, ConfigError, EpsConfig, summary_group_bytes
from eps_core.interface import Scores

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    """One conformance case: shapes, method and how the tokens arrive."""

    lengths: tuple[int, ...]
    config: EpsConfig
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    chunk: int = 40  # tokens of a prefill chunk; the last `steps` tokens come one at a time
    steps: int = 9
    kind: str = "gauss"

    def __str__(self) -> str:
        c = self.config
        lengths = "+".join(map(str, self.lengths))
        return (
            f"{c.method}-S{c.S}-{c.policy}-{c.scope}-T{lengths}-{self.num_heads}q{self.num_kv_heads}kv"
            f"-D{self.head_dim}-{self.dtype}-{self.kind}"
        )


def eps(method: str, **settings: object) -> EpsConfig:
    if method == "off":
        return EpsConfig()
    defaults: dict = {"first_tokens": 4, "last_tokens": 8, "budget": 0.3, "block_size": 16, "group_tokens": 4}
    return EpsConfig(method=method, **{**defaults, **settings})


BASE = [Case((150, 37), eps(m)) for m in ("jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq")]
CASES = [
    *BASE,
    Case((260, 40, 3), eps("rq", rq_bounds=True, bits=2)),
    Case((300,), eps("rq", group_tokens=2)),
    Case((300,), eps("rq", group_tokens=1, bits=8)),
    Case((290,), eps("rq", group_tokens=3, block_size=12)),
    Case((290,), eps("box", group_tokens=48)),
    Case((290, 31), eps("moments", group_tokens=5, block_size=5)),
    Case((300,), eps("rq", group_tokens=16, bits=4, rq_bounds=True), head_dim=20),
    Case((600, 290), eps("rq", group_tokens=2), dtype="bfloat16", head_dim=64),
    Case((520,), eps("rq", group_tokens=32, policy="mass", epsilon=0.05)),
    Case((1,), eps("box")),
    Case((4,), eps("moments")),
    Case((5, 4, 1), eps("ball", group_tokens=4)),
    Case((70, 33), eps("box", group_tokens=1)),
    Case((70, 33), eps("moments", group_tokens=1)),
    Case((70, 64), eps("moments", group_tokens=16, dim=3), head_dim=20),
    Case((290, 256), eps("moments", group_tokens=128, block_size=16), head_dim=24),
    Case((300, 130), eps("jl", group_tokens=128)),
    Case((300, 130), eps("1pc", group_tokens=128, policy="threshold", top_pages=1)),
    Case((530,), eps("box", group_tokens=256)),
    Case((300, 130), eps("fd", group_tokens=64, dim=4)),
    Case((90, 61), eps("box"), num_heads=3, num_kv_heads=3),
    Case((90, 61), eps("meanstd"), num_heads=8, num_kv_heads=1),
    Case((90, 61), eps("ball", group_tokens=8), num_heads=16, num_kv_heads=2, head_dim=80),
    Case((90, 61), eps("moments", group_tokens=8), head_dim=33),
    Case((300, 61), eps("rq"), num_heads=6, num_kv_heads=3, head_dim=96),
    Case((150, 37), eps("box"), dtype="float16"),
    Case((150, 37), eps("box", group_tokens=16), dtype="bfloat16"),
    Case((150, 37), eps("moments", group_tokens=8), dtype="bfloat16", head_dim=64),
    Case((150, 37), eps("meanstd"), dtype="bfloat16"),
    Case((150, 37), eps("box", policy="share", tau=0.02)),
    Case((150, 37), eps("ball", policy="mass", epsilon=0.1)),
    Case((150, 37), eps("ball", policy="mass", epsilon=0.1, top_pages=6)),
    Case((150, 37), eps("jl", policy="threshold", top_pages=3)),
    Case((150, 37), eps("box", policy="threshold", top_pages=4, alpha=1.5)),
    Case((150, 37), eps("box", scope="union")),
    Case((150, 37), eps("moments", policy="threshold", top_pages=3, alpha=1.3)),
    Case((152, 36), eps("box", policy="mass", epsilon=1.0, first_tokens=0, last_tokens=0)),
    Case((152, 36), eps("moments", policy="mass", epsilon=0.0, first_tokens=0, last_tokens=0)),
    Case((152, 36), eps("meanstd", policy="share", tau=1.0, first_tokens=0, last_tokens=0)),
    Case((150, 37), eps("moments", scope="union", policy="mass", epsilon=0.2)),
    Case((150, 37), eps("box", budget=20.0)),
    Case((150, 37), eps("box", top_pages=5)),
    Case((150, 37), eps("box", budget=1.0)),
    Case((150, 37), eps("box", min_context=100)),
    Case((150, 37), eps("box"), kind="equal"),
    Case((150, 37), eps("box"), kind="ties"),
    Case((150, 37), eps("ball"), kind="outlier"),
    Case((150, 37), eps("moments"), kind="outlier"),
    Case((150, 37), eps("1pc"), kind="outlier"),
    Case((150, 37), eps("moments"), kind="equal"),
    Case((300,), eps("rq"), kind="equal"),
    Case((150, 37), eps("off")),
    Case((150, 37), eps("off"), dtype="bfloat16", num_heads=8, num_kv_heads=1),
]


def make_kv(case: Case, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    keys, values = [], []
    mean = rng.normal(size=(case.num_kv_heads, case.head_dim))
    for length in case.lengths:
        k = rng.normal(size=(length, case.num_kv_heads, case.head_dim)) * 1.5 + mean
        if case.kind == "equal":
            k[:] = mean
        elif case.kind == "ties":
            k[:] = np.round(rng.normal(size=(4, *k.shape[1:])) * 2)[rng.integers(0, 4, length)]
        elif case.kind == "outlier":
            k[rng.integers(0, length, 5)] *= 25
        keys.append(k.astype(np.float32))
        values.append(rng.normal(size=k.shape).astype(np.float32))
    return keys, values


def write_all(backend: ModuleType, device: str, case: Case, cache, keys, values):
    """Prefill in chunks, then the last tokens of all sequences together, one at a time, as a decode does."""
    pool = PagePool(case_units(case), case.config.unit_tokens)
    sequences = [pool.open([])[0] for _ in case.lengths]

    def give(array: np.ndarray):
        return backend.from_numpy(np.ascontiguousarray(array), "float32", device)

    for b, length in enumerate(case.lengths):
        done = max(length - case.steps, 0)
        for start in range(0, done, case.chunk):
            rows = slice(start, min(start + case.chunk, done))
            slots, copies = pool.append(sequences[b], [b * 10_000 + t for t in range(rows.start, rows.stop)])
            assert not copies
            cache = backend.write_kv(cache, 0, give(keys[b][rows]), give(values[b][rows]), slots)
    for step in range(case.steps):
        alive = [b for b, length in enumerate(case.lengths) if step < min(case.steps, length)]
        if not alive:
            break
        at = [max(case.lengths[b] - case.steps, 0) + step for b in alive]
        slots = np.concatenate([pool.append(sequences[b], [b * 10_000 + t])[0] for b, t in zip(alive, at, strict=True)])
        k = np.stack([keys[b][t] for b, t in zip(alive, at, strict=True)])
        v = np.stack([values[b][t] for b, t in zip(alive, at, strict=True)])
        cache = backend.write_kv(cache, 0, give(k), give(v), slots)
    pool.check()
    return cache, pool.table(sequences), pool.lengths(sequences)


def case_units(case: Case) -> int:
    return sum(-(-length // case.config.unit_tokens) for length in case.lengths) + 2


def run_case(backend: ModuleType, device: str, case: Case) -> None:
    rng = np.random.default_rng(sum(case.lengths) + case.head_dim)
    spec = CacheSpec(1, case.num_kv_heads, case.head_dim, case_units(case), case.dtype)
    keys, values = make_kv(case, rng)
    q = rng.normal(size=(len(case.lengths), case.num_heads, case.head_dim)).astype(np.float32) * 2
    cache, table, lengths = write_all(backend, device, case, backend.new_cache(spec, case.config, device), keys, values)
    reference = oracle.new_cache(spec, case.config)
    reference, _, _ = write_all(oracle, "cpu", case, reference, keys, values)
    q_native = backend.from_numpy(q, "float32", device)
    check_storage(backend, case, cache, reference)
    if not case.config.enabled:
        assert cache.summaries == [] and cache.state == [] and cache.open == [] and cache.centre == []
        check_attend(backend, case, cache, reference, q, q_native, table, lengths, None)
        return
    scores = backend.score(cache, 0, q_native, table, lengths)
    expected = oracle.score(reference, 0, q, table, lengths)
    check_scores(backend, case, scores, expected, q, keys, table, lengths)
    check_scoring(backend, case, cache, reference, scores, q, keys, table, lengths)
    # selection is judged on the backend's own scores: what must agree is the rule, not the last bit of an estimate
    own = Scores(backend.to_numpy(scores.estimate).astype(np.float64), None, None, scores.num_missing)
    selected = backend.select(case.config, scores, lengths)
    wanted = oracle.select(case.config, own, lengths)
    counts = backend.to_numpy(selected.counts)
    assert (counts == wanted.counts).all()
    groups = backend.to_numpy(selected.groups)
    for b, head in np.ndindex(*counts.shape):
        got = groups[b, head, : counts[b, head]]
        assert got.tolist() == wanted.groups[b, head, : counts[b, head]].tolist()
        assert (groups[b, head, counts[b, head] :] == -1).all()
    assert (selected.forced == wanted.forced).all() and counts.min() >= 1
    assert (selected.wanted is None) == (case.config.scope == "kv-head")
    if selected.wanted is not None:
        assert (backend.to_numpy(selected.wanted) == wanted.wanted).all()
    if selected.uniform is not None:
        assert (counts == np.asarray(selected.uniform)[:, None]).all()
    skipped = backend.to_numpy(backend.skipped_mass(scores, selected))
    assert np.allclose(skipped, oracle.skipped_mass(own, wanted), atol=1e-4)
    check_attend(backend, case, cache, reference, q, q_native, table, lengths, selected)
    everything = backend.select(replace(case.config, policy="topk", budget=1.0, top_pages=None), scores, lengths)
    everywhere = check_attend(backend, case, cache, reference, q, q_native, table, lengths, everything)
    dense = check_attend(backend, case, cache, reference, q, q_native, table, lengths, None)
    for one, other in zip(everywhere, dense, strict=True):  # every group visited is dense attention
        assert np.allclose(one, other, atol=4 * allowance(case, keys, q))


def check_storage(backend: ModuleType, case: Case, cache, reference) -> None:
    """K and V bit for bit; summaries in the stated number of bytes; re-read K exactly as the oracle counts it."""
    for name in ("k", "v"):
        got = backend.to_numpy(getattr(cache, name)[0]).astype(np.float32)
        assert (got == getattr(reference, name)[0].astype(np.float32)).all()
    assert cache.bytes_k_reread == reference.bytes_k_reread
    if case.config.method in ("jl", "box", "meanstd"):
        assert cache.bytes_k_reread == 0
    if case.config.enabled and cache.summaries[0]:
        stored = sum(backend.to_numpy(a).nbytes for a in cache.summaries[0].values())
        per_group = stored / (case_units(case) * case.num_kv_heads * case.config.groups_per_unit)
        assert per_group == summary_group_bytes(case.config, case.head_dim)
    if case.config.method == "rq" and reference.summaries[0]:
        for name in ("codes",):  # the same values, so the same visit lists
            same = backend.to_numpy(cache.summaries[0][name]) == reference.summaries[0][name]
            assert same.mean() > 0.999


def allowance(case: Case, keys: list[np.ndarray], q: np.ndarray) -> float:
    """Rounding of a float32 logit: eps * sqrt(D) * |a| |k|, at the largest key."""
    largest = max(float(np.linalg.norm(k, axis=-1).max()) for k in keys)
    size = float(np.linalg.norm(q, axis=-1).max()) / np.sqrt(case.head_dim)
    return EPS["float32"] * (8 + np.sqrt(case.head_dim)) * (size * largest + 8)


def check_scores(backend, case: Case, scores, expected, q, keys, table, lengths) -> None:
    estimate = backend.to_numpy(scores.estimate).astype(np.float64)
    assert estimate.shape == expected.estimate.shape
    assert (np.isposinf(estimate) == np.isposinf(expected.estimate)).all(), "groups without a summary differ"
    assert (np.isneginf(estimate) == np.isneginf(expected.estimate)).all()
    assert (np.asarray(scores.num_missing) == expected.num_missing).all()
    finite = np.isfinite(estimate)
    if finite.any():
        # codes may round the other way at a tie (one step of int8 over D channels), never by more on the mean
        gap = np.abs(estimate[finite] - expected.estimate[finite])
        spread = max(float(np.abs(expected.estimate[finite]).max()), 1.0)
        loose = 2e-2 if case.config.method in ("1pc", "fd", "moments") else 4e-3
        assert gap.max() <= loose * spread and gap.mean() <= 1e-3 * spread, (gap.max(), gap.mean(), spread)
    assert (scores.lower is None) == (not case.config.has_bounds) == (scores.upper is None)
    if scores.lower is None:
        return
    lower, upper = backend.to_numpy(scores.lower), backend.to_numpy(scores.upper)
    repeat = case.num_heads // case.num_kv_heads
    for b, head in np.ndindex(len(lengths), case.num_kv_heads):
        n = oracle_selection.num_groups(int(lengths[b]), case.config.S)
        k = keys_as_read(case, keys[b][:, head])
        masses = [
            group_masses(q[b, r].astype(np.float64) / np.sqrt(case.head_dim), k, case.config.S)
            for r in range(head * repeat, (head + 1) * repeat)
        ]
        truth = np.max(masses, axis=0)
        known = np.isfinite(estimate[b, head, :n])
        assert (lower[b, head, :n][known] <= truth[known]).all(), "a lower bound is violated"
        assert (upper[b, head, :n][known] >= truth[known]).all(), "an upper bound is violated"
        assert np.isposinf(upper[b, head, :n][~known]).all()


def check_scoring(backend, case: Case, cache, reference, scores, q, keys, table, lengths) -> None:
    """The same stored summaries must give the same scores up to float32: no room for codes that round otherwise."""
    own = replace(
        reference, summaries=[{name: backend.to_numpy(a) for name, a in cache.summaries[0].items()}], kv_bytes_read=0
    )
    exact = oracle.score(own, 0, q, table, lengths)
    # norms and radii reach past the largest key by their own rounding; variances are quadratic in it
    size = float(np.linalg.norm(q, axis=-1).max()) / np.sqrt(case.head_dim)
    largest = max(float(np.linalg.norm(k, axis=-1).max()) for k in keys) * size
    scale = largest * (1 + largest) if case.config.method == "moments" else largest
    if case.config.method in ("jl", "1pc", "fd"):
        scale *= np.sqrt(case.config.S)
    if case.config.method in ("box", "meanstd", "jl"):
        scale *= np.sqrt(case.head_dim)
    tolerance = 4 * EPS["float32"] * (8 + np.sqrt(case.head_dim)) * (scale + 8)
    for name in ("estimate", "lower", "upper"):
        got, want = getattr(scores, name), getattr(exact, name)
        if want is None:
            continue
        got = backend.to_numpy(got).astype(np.float64)
        finite = np.isfinite(want)
        assert (np.isfinite(got) == finite).all()
        gap = np.abs(got[finite] - want[finite])
        assert gap.max(initial=0) <= tolerance, (name, gap.max(), tolerance)


def keys_as_read(case: Case, k: np.ndarray) -> np.ndarray:
    return oracle.from_numpy(k, case.dtype).astype(np.float64)


def check_attend(backend, case: Case, cache, reference, q, q_native, table, lengths, selected):
    before, reference_before = cache.kv_bytes_read, reference.kv_bytes_read
    out, lse = backend.attend(cache, 0, q_native, table, lengths, selected)
    native = selected
    if selected is not None:
        native = replace(selected, groups=backend.to_numpy(selected.groups), counts=backend.to_numpy(selected.counts))
    expected_out, expected_lse = oracle.attend(reference, 0, q, table, lengths, native)
    out, lse = backend.to_numpy(out).astype(np.float64), backend.to_numpy(lse).astype(np.float64)
    keys = [reference.k[0].astype(np.float32).reshape(-1, case.num_kv_heads, case.head_dim)]
    tolerance = allowance(case, keys, q)
    assert out.shape == expected_out.shape and lse.shape == expected_lse.shape
    assert np.abs(lse - expected_lse).max() <= 4 * tolerance
    assert np.abs(out - expected_out).max() <= 16 * tolerance
    # exact bytes: every listed tile once, nothing else
    assert cache.kv_bytes_read - before == reference.kv_bytes_read - reference_before
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backend_follows_the_oracle(target, case):
    run_case(*target, case)


def test_merge_equals_whole(target):
    backend, device = target
    rng = np.random.default_rng(0)
    out = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    lse = rng.normal(size=(2, 3, 4)).astype(np.float32) * 20
    lse[0, 0, 0], lse[1, 1, 1], lse[:, 2, 3] = -np.inf, -np.inf, -np.inf
    pairs = [
        (backend.from_numpy(out[i], "float32", device), backend.from_numpy(lse[i], "float32", device)) for i in (0, 1)
    ]
    got_out, got_lse = (backend.to_numpy(x) for x in backend.merge(*pairs))
    want_out, want_lse = oracle.merge((out[0].astype(np.float64), lse[0].astype(np.float64)), (out[1], lse[1]))
    assert np.allclose(got_out, want_out, atol=1e-6) and np.allclose(got_lse, want_lse, atol=1e-5)
    assert (got_out[2, 3] == 0).all()


@pytest.mark.parametrize("method", ["jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq"])
def test_fork_then_diverge_equals_two_independent_sequences(target, method):
    """A fork copies only the open unit, with its summaries and running statistics."""
    backend, device = target
    config = eps(method, group_tokens=8)
    rng = np.random.default_rng(5)
    spec = CacheSpec(1, 2, 16, 64)
    shared = rng.normal(size=(2, 300, 2, 16)).astype(np.float32)  # K and V; long enough for rq's centre
    tails = rng.normal(size=(2, 2, 30, 2, 16)).astype(np.float32)
    q = backend.from_numpy(rng.normal(size=(1, 4, 16)).astype(np.float32), "float32", device)

    def give(x):
        return backend.from_numpy(np.ascontiguousarray(x), "float32", device)

    pool, cache = PagePool(64, config.unit_tokens), backend.new_cache(spec, config, device)
    first, _ = pool.open([])
    slots, _ = pool.append(first, list(range(300)))
    cache = backend.write_kv(cache, 0, give(shared[0]), give(shared[1]), slots)
    second = pool.fork(first)
    copied = 0
    for t in range(30):
        for which, sequence in enumerate((first, second)):
            slots, copies = pool.append(sequence, [1000 * (which + 1) + t])
            copied += len(copies)
            if copies:
                cache = backend.copy_units(cache, [s for s, _ in copies], [d for _, d in copies])
            cache = backend.write_kv(
                cache, 0, give(tails[which, 0, t : t + 1]), give(tails[which, 1, t : t + 1]), slots
            )
    assert copied == 1
    pool.check()
    if method in ("jl", "box", "meanstd"):
        assert cache.bytes_k_reread == 0
    for which, sequence in enumerate((first, second)):
        alone_pool, alone = PagePool(64, config.unit_tokens), backend.new_cache(spec, config, device)
        only, _ = alone_pool.open([])
        slots, _ = alone_pool.append(only, list(range(300)))
        alone = backend.write_kv(alone, 0, give(shared[0]), give(shared[1]), slots)
        for t in range(30):
            slots, _ = alone_pool.append(only, [7 + t])
            alone = backend.write_kv(
                alone, 0, give(tails[which, 0, t : t + 1]), give(tails[which, 1, t : t + 1]), slots
            )
        results = []
        for p, c, s in ((pool, cache, sequence), (alone_pool, alone, only)):
            scores = backend.score(c, 0, q, p.table([s]), p.lengths([s]))
            selected = backend.select(config, scores, p.lengths([s]))
            out, lse = backend.attend(c, 0, q, p.table([s]), p.lengths([s]), selected)
            n = -(-330 // 8)
            results.append([backend.to_numpy(x) for x in (scores.estimate[..., :n], selected.groups, out, lse)])
        for got, want in zip(*results, strict=True):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("step", [100, 3], ids=["groups in hand", "groups across calls"])
@pytest.mark.parametrize("method", ["jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq"])
def test_reused_group_never_shows_an_old_summary(target, method, step):
    """A freed unit written anew: partly filled it has no summary, full it has the new keys' one. Written 3 tokens at a
    time, groups fill across calls, on top of what running statistics held before."""
    backend, device = target
    config = eps(method, group_tokens=8)
    rng = np.random.default_rng(6)
    spec = CacheSpec(1, 2, 16, 40)

    def give(x):
        return backend.from_numpy(np.ascontiguousarray(x), "float32", device)

    def keys(n):
        return give(rng.normal(size=(n, 2, 16)).astype(np.float32))

    q = keys(1).reshape(1, 2, 16)
    pool, cache = PagePool(40, config.unit_tokens), backend.new_cache(spec, config, device)
    first, _ = pool.open([])
    slots, _ = pool.append(first, list(range(600)))
    cache = backend.write_kv(cache, 0, keys(600), keys(600), slots)
    pool.free(first)
    second, _ = pool.open([])
    old = rng.normal(size=(2, 100, 2, 16)).astype(np.float32)
    for start in range(0, 100, step):
        rows = slice(start, min(start + step, 100))
        slots, _ = pool.append(second, [10_000 + t for t in range(rows.start, rows.stop)])
        cache = backend.write_kv(cache, 0, give(old[0][rows]), give(old[1][rows]), slots)
    fresh_pool, fresh = PagePool(40, config.unit_tokens), backend.new_cache(spec, config, device)
    scores = backend.score(cache, 0, q, pool.table([second]), pool.lengths([second]))
    estimate = backend.to_numpy(scores.estimate)
    assert np.isposinf(estimate[0, :, 100 // 8]).all()  # the open group, whose slots held an old full group
    if method != "rq":  # rq's centre stays that of the first keys ever seen
        only, _ = fresh_pool.open([])
        for start in range(0, 100, step):
            rows = slice(start, min(start + step, 100))
            slots, _ = fresh_pool.append(only, list(range(rows.start, rows.stop)))
            fresh = backend.write_kv(fresh, 0, give(old[0][rows]), give(old[1][rows]), slots)
        want = backend.score(fresh, 0, q, fresh_pool.table([only]), fresh_pool.lengths([only]))
        assert np.array_equal(estimate[..., :13], backend.to_numpy(want.estimate)[..., :13])
    # a slot in the middle of a sealed group is written again (a rejected draft): no summary until it is full again
    again = slots_of(pool, second)[3:4]
    cache = backend.write_kv(cache, 0, keys(1), keys(1), again)
    scores = backend.score(cache, 0, q, pool.table([second]), pool.lengths([second]))
    assert np.isposinf(backend.to_numpy(scores.estimate)[0, :, 0]).all()


def slots_of(pool: PagePool, sequence) -> np.ndarray:
    table = pool.table([sequence])[0]
    tokens = np.arange(pool.lengths([sequence])[0])
    return table[tokens // pool.unit_tokens].astype(np.int64) * pool.unit_tokens + tokens % pool.unit_tokens


@pytest.mark.parametrize("method", ["off", "jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_k_is_refused(target, value, method):
    """Also in groups that are sealed by the same write, whatever their summary computes."""
    backend, device = target
    cache = backend.new_cache(CacheSpec(1, 2, 16, 20), eps(method), device)
    k = np.random.default_rng(0).normal(size=(300, 2, 16)).astype(np.float32)
    k[2, 1, 3] = value
    k_native = backend.from_numpy(k, "float32", device)
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 0"):
        cache = backend.write_kv(cache, 0, k_native, k_native, np.arange(300))
        backend.check_finite(cache)


def test_rounding_helpers_are_on_the_safe_side():
    rng = np.random.default_rng(0)
    for x in [0.0, 1e-9, 6e-8, *np.exp(rng.normal(size=2000) * 5)]:
        assert float(oracle_summaries.up16(x)) >= x


@pytest.mark.parametrize("method", ["jl", "rq"])
def test_results_are_deterministic_by_seed(target, method):
    backend, device = target
    case = Case((300,), eps(method))
    rng = np.random.default_rng(0)
    keys, values = make_kv(case, rng)
    q = backend.from_numpy(rng.normal(size=(1, 4, 16)).astype(np.float32), "float32", device)
    estimates = []
    for seed in (0, 0, 1):
        seeded = replace(case, config=replace(case.config, seed=seed))
        cache = backend.new_cache(CacheSpec(1, 2, 16, case_units(case)), seeded.config, device)
        cache, table, lengths = write_all(backend, device, seeded, cache, keys, values)
        estimates.append(backend.to_numpy(backend.score(cache, 0, q, table, lengths).estimate)[..., :60])
    assert np.array_equal(estimates[0], estimates[1])
    assert not np.allclose(estimates[0], estimates[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_in_sixteen_bits(target, dtype):
    """out has the query's dtype and no more error than rounding the query and the output cost."""
    backend, device = target
    case = Case((150, 37), eps("box", group_tokens=8), dtype=dtype, head_dim=64)
    rng = np.random.default_rng(4)
    keys, values = make_kv(case, rng)
    spec = CacheSpec(1, 2, 64, case_units(case), dtype)
    cache, table, lengths = write_all(backend, device, case, backend.new_cache(spec, case.config, device), keys, values)
    reference, _, _ = write_all(oracle, "cpu", case, oracle.new_cache(spec, case.config), keys, values)
    q = oracle.from_numpy(rng.normal(size=(2, 4, 64)).astype(np.float32), dtype)
    native = backend.from_numpy(q.astype(np.float32), dtype, device)
    selected = backend.select(case.config, backend.score(cache, 0, native, table, lengths), lengths)
    out, lse = backend.attend(cache, 0, native, table, lengths, selected)
    host = replace(selected, groups=backend.to_numpy(selected.groups), counts=backend.to_numpy(selected.counts))
    want_out, want_lse = oracle.attend(reference, 0, q.astype(np.float32), table, lengths, host)
    assert out.dtype == native.dtype or backend is oracle  # which keeps float64
    assert np.abs(backend.to_numpy(lse) - want_lse).max() <= 1e-4
    # one rounding of the output, of values below 4
    assert np.abs(backend.to_numpy(out).astype(np.float64) - want_out).max() <= EPS[dtype] * 4.0


@pytest.mark.parametrize("method", ["box", "ball", "moments", "1pc", "fd", "meanstd"])
def test_keys_past_float16_loosen_and_never_displace_a_guard(target, method):
    """Scalars that overflow float16 may make estimates and bounds useless; guards must still be visited."""
    backend, device = target
    config = eps(method, budget=40.0)
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(150, 2, 16)) * 3e7).astype(np.float32)
    native = backend.from_numpy(keys, "float32", device)
    cache = backend.new_cache(CacheSpec(1, 2, 16, 10), config, device)
    cache = backend.write_kv(cache, 0, native, native, np.arange(150))
    q = backend.from_numpy(rng.normal(size=(1, 4, 16)).astype(np.float32), "float32", device)
    table, lengths = np.arange(10)[None], np.array([150])
    scores = backend.score(cache, 0, q, table, lengths)
    estimate = backend.to_numpy(scores.estimate)
    assert not np.isnan(estimate).any() and np.isfinite(estimate[..., :37]).all()
    if scores.upper is not None:
        upper, lower = backend.to_numpy(scores.upper), backend.to_numpy(scores.lower)
        for head in range(2):
            masses = [
                group_masses(backend.to_numpy(q)[0, r].astype(np.float64) / 4, keys[:, head], 4)
                for r in (2 * head, 2 * head + 1)
            ]
            assert (upper[0, head, :37] >= np.max(masses, axis=0)[:37]).all()
            assert (lower[0, head, :37] <= np.max(masses, axis=0)[:37]).all()
    selected = backend.select(config, scores, lengths)
    for head in range(2):
        visited = set(backend.to_numpy(selected.groups)[0, head].tolist())
        assert {0, 35, 36, 37} <= visited, "a guard lost its place"


@pytest.mark.parametrize("method", ["1pc", "fd", "box", "ball", "moments", "rq"])
@pytest.mark.parametrize("kind", KINDS)
def test_native_bounds_hold_for_every_query(target, method, kind):
    """The backends' float32 bounds against float64 truth: hard keys, hard queries, every cache dtype, many groups."""
    backend, device = target
    rng = np.random.default_rng(sum(map(ord, method + kind)))
    for size, head_dim, dtype in ((1, 16, "float32"), (4, 64, "bfloat16"), (16, 20, "float32"), (128, 64, "float16")):
        config = eps(method, group_tokens=size, rq_bounds=method == "rq", bits=int(rng.choice([1, 2, 4, 8])))
        num_tokens = max(512, 2 * size)
        spec = CacheSpec(1, 1, head_dim, num_tokens // config.unit_tokens, dtype)
        if kind == "huge" and dtype == "float16":
            continue  # 300 times a Gaussian: the cache itself would overflow
        keys = np.concatenate([make_keys(kind, size, head_dim, rng) for _ in range(num_tokens // size)])[:, None]
        stored = oracle.from_numpy(keys, dtype).astype(np.float64)
        native = backend.from_numpy(keys, "float32", device)
        cache = backend.write_kv(backend.new_cache(spec, config, device), 0, native, native, np.arange(num_tokens))
        table, lengths = np.arange(spec.num_units)[None], np.array([num_tokens])
        for query in QUERIES:
            q = make_query(query, stored[:size, 0], {}, rng).astype(np.float32) * np.sqrt(head_dim)
            q = q[None, None].astype(np.float32)
            scores = backend.score(cache, 0, backend.from_numpy(q, "float32", device), table, lengths)
            lower, upper = (backend.to_numpy(x)[0, 0].astype(np.float64) for x in (scores.lower, scores.upper))
            truth = group_masses(q[0, 0].astype(np.float64) / np.sqrt(head_dim), stored[:, 0], size)
            assert (lower <= truth).all() and (truth <= upper).all(), (size, head_dim, dtype, query)


def test_box_codes_enclose_keys_one_ulp_from_a_code(target):
    """Where a division that is an ulp off would land on the code itself, and floor or ceil would cut the key off."""
    backend, device = target
    scale = float(oracle_summaries.up16(1.0))  # of a group whose largest channel is 127
    codes = np.tile(np.arange(-120, 121, dtype=np.float32)[:240].reshape(-1, 15), (2, 1))
    keys = np.nextafter(
        codes * np.float32(scale), np.repeat([-np.inf, np.inf], len(codes) // 2)[:, None], dtype=np.float32
    )
    keys = np.concatenate([np.full((len(keys), 1), 127.0, np.float32), keys], axis=1)[:, None]
    cache = backend.new_cache(CacheSpec(1, 1, 16, 2), eps("box", group_tokens=1), device)
    native = backend.from_numpy(keys, "float32", device)
    cache = backend.write_kv(cache, 0, native, native, np.arange(len(keys)))
    stored = {name: backend.to_numpy(a).reshape(32, -1).astype(np.float64) for name, a in cache.summaries[0].items()}
    assert (stored["scale"] == scale).all()
    assert (stored["lo"] * stored["scale"] <= keys[:, 0]).all() and (keys[:, 0] <= stored["hi"] * stored["scale"]).all()


def test_pc1_bound_survives_cancellation(target):
    """Queries along the stored direction: |a|^2 - (u.a)^2 cancels in float32, and the bound must still be at least the
    exact |K u||u.a| + rest sqrt(|a|^2 - (u.a)^2) of the stored numbers."""
    backend, device = target
    rng = np.random.default_rng(0)
    config, head_dim, count = eps("1pc", group_tokens=4, block_size=4), 64, 60
    keys = rng.normal(size=(4 * count, 1, head_dim)).astype(np.float32)
    native = backend.from_numpy(keys, "float32", device)
    cache = backend.new_cache(CacheSpec(1, 1, head_dim, count), config, device)
    cache = backend.write_kv(cache, 0, native, native, np.arange(4 * count))
    stored = {name: backend.to_numpy(a)[:, 0, 0].astype(np.float64) for name, a in cache.summaries[0].items()}
    for group in range(count):
        direction = stored["direction"][group] * stored["direction_scale"][group]
        q = (1000 * direction + 1e-2 * rng.normal(size=head_dim)).astype(np.float32)[None, None]
        scores = backend.score(cache, 0, backend.from_numpy(q, "float32", device), np.array([[group]]), np.array([4]))
        a = q[0, 0].astype(np.float64) / np.sqrt(head_dim)
        along = abs(direction @ a)
        exact = stored["lam"][group] * along + stored["rest"][group] * np.sqrt(max(a @ a - along**2, 0))
        assert backend.to_numpy(scores.upper)[0, 0, 0] >= np.log(4) + exact
