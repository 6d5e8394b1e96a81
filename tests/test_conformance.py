"""Requirements on a backend: its functions against the float64 reference, for odd shapes, dtypes, methods, policies.

`test_backend_follows_the_oracle` drives a backend through one case of `CASES`, stage by stage, and asserts at every
stage:

1. `write_kv` stores K and V bit for bit, summaries in the stated number of bytes          (check_storage)
2. `score` estimates every group, and its bounds enclose the true masses                   (check_scores, check_scoring)
3. `select` lists the groups that the policy says, ascending                               (check_selection)
4. `attend` is exact attention over the selected groups, and counts the bytes that it read (check_attend)
5. `bound_error` bounds the unread mass and the error of the output                        (check_certificate)
6. `extend_selection` adds groups until the bound falls to epsilon                         (check_escalation)

After it come what no single case shows: merging, forks, reuse of units, head modes, hard numbers, decoders. The wrong
backends of test_wrong_backends.py go through the same functions and must fail them.

Tolerance: what the same formula costs in the precision at hand. Scores and attention are float32 sums of D products
of the cache's values, so the allowance is a multiple of eps32 * sqrt(D) * the size of what is summed; out in a 16-bit
dtype adds that dtype's rounding.
"""

import importlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tiny_models
from places import place

from eps_core import reference
from eps_core.attention.protocol import Scores, Selection
from eps_core.backend.pages import arrays_of
from eps_core.config.bytes import summary_group_bytes
from eps_core.config.cache import EVALUATION_METHODS, METHODS, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import KvFormats
from eps_core.decode.forward import load_decoder
from eps_core.errors import ConfigError
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.config import read_spec
from eps_core.reference import codes
from eps_core.reference.formulas import attend_keys, group_masses
from eps_core.summaries import base as oracle_summaries

# of methods without a kernel of their own, kernels list and attend as for box
KERNEL_METHODS = ("off", "rq", "meanstd", "box")
pytestmark = pytest.mark.kernels("numba", "triton", "metal", methods=KERNEL_METHODS)

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EPSILONS = (0.3, 0.02, 0.0)  # of strict: each extends further
TINY = 2.0**-126  # float32 shares below it may be 0


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
    scale_q: float = 2.0
    bits: KvFormats = (16, 16)  # of K and of V

    @property
    def spec(self) -> CacheSpec:
        k_bits, v_bits = self.bits
        units = sum(-(-length // self.config.cache_config.unit_tokens) for length in self.lengths) + 2
        return CacheSpec(1, self.num_kv_heads, self.head_dim, units, self.dtype, k_bits=k_bits, v_bits=v_bits)

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        kept, read = self.config.cache_config, self.config.selection_config
        unit = f"-U{kept.mean_tokens}" if kept.mean_tokens else ""
        return (
            f"{kept.method}-S{kept.S}{unit}-{read.policy}-{read.scope}-T{lengths}"
            f"-{self.num_heads}q{self.num_kv_heads}kv-D{self.head_dim}-{self.dtype}-{self.kind}"
            + (f"-K{self.bits[0]}V{self.bits[1]}" if self.spec.quantised else "")
        )


def eps(method: str, **settings: object) -> EpsConfig:
    if method == "off":
        return EpsConfig.of()
    defaults: dict = {"num_sink_tokens": 4, "num_recent_tokens": 8, "budget": 0.3, "block_size": 16, "group_size": 4}
    return EpsConfig.of(method=method, **{**defaults, **settings})


BASE = [Case((150, 37), eps(m)) for m in (*METHODS[1:], *EVALUATION_METHODS)]
# the cases of emulators: an arm of each kernel; all cases run where the device itself runs them
EMULATED = [
    *BASE,
    Case((600, 290), eps("rq", group_size=1, mean_tokens=64, budget=0.1), dtype="bfloat16", head_dim=128),
    Case((300, 61), eps("rq", group_size=2, mean_tokens=32, cascade=(0.5, 0.2)), head_dim=32, num_heads=6),
    Case((300, 129), eps("rq", group_size=2, mean_tokens=64, cascade=(), rescore=0.0), head_dim=64),
    Case((300,), eps("rq", group_size=2, mean_tokens=32, rq_bounds=True), num_heads=3, num_kv_heads=1),
    Case((260, 40, 3), eps("rq", group_size=16, mean_tokens=64, rq_bounds=True), dtype="float16", head_dim=64),
    Case((300, 61), eps("rq", group_size=2, scope="union"), head_dim=64, kind="outlier"),
    Case((300, 61), eps("rq", group_size=2, policy="threshold", top_pages=20), head_dim=64, kind="ties"),
    Case((290,), eps("meanstd", group_size=3, block_size=12)),
    Case((300,), eps("rq", group_size=16), head_dim=20),
    Case((1,), eps("box")),
    Case((150, 37), eps("box", min_context=100)),
    Case((150, 37), eps("off"), dtype="bfloat16", num_heads=8, num_kv_heads=1),
    Case((310, 100), eps("rq", rescore=0.2, budget=0.1), bits=(8, 4), dtype="bfloat16", head_dim=64, chunk=150),
    Case((310, 100), eps("rq", rescore=0.2, budget=0.1), bits=("nvfp4", "fp8"), dtype="bfloat16", head_dim=64),
    Case((150, 37), eps("box", scope="union")),
    Case((150, 37), eps("box", policy="threshold", top_pages=4, alpha=1.5)),
    Case((150, 37), eps("meanstd"), dtype="bfloat16"),
    Case((530,), eps("box", group_size=256)),
    Case((300, 61), eps("rq"), num_heads=6, num_kv_heads=3, head_dim=96),
]
CASES = [
    *EMULATED,
    Case((300,), eps("rq", group_size=2)),
    Case((300, 70), EpsConfig.of(method="rq", budget=0.2)),
    # units' means of all sizes, in stages and whole, with bounds, in head dims of one part
    Case((300, 64, 63), eps("rq", group_size=2, mean_tokens=32), head_dim=64),
    Case((400, 65), eps("rq", combine="sum", budget=0.1), dtype="bfloat16", head_dim=64, num_heads=6),
    Case((300, 65), eps("rq", group_size=8, mean_tokens=64), head_dim=20),
    Case((300, 130), eps("rq", group_size=2, policy="threshold", top_pages=9), head_dim=64, num_heads=8),
    Case((290,), eps("box", group_size=48)),
    Case((290, 31), eps("moments", group_size=5, block_size=5)),
    Case((600, 290), eps("rq", group_size=2), dtype="bfloat16", head_dim=64),
    Case((520,), eps("rq", group_size=32, policy="threshold", top_pages=2)),
    Case((4,), eps("moments")),
    Case((5, 4, 1), eps("ball", group_size=4)),
    Case((70, 33), eps("box", group_size=1)),
    Case((70, 33), eps("moments", group_size=1)),
    Case((70, 64), eps("moments", group_size=16, dim=3), head_dim=20),
    Case((290, 256), eps("moments", group_size=128, block_size=16), head_dim=24),
    Case((300, 130), eps("jl", group_size=128)),
    Case((300, 130), eps("1pc", group_size=128, policy="threshold", top_pages=1)),
    Case((300, 130), eps("fd", group_size=64, dim=4)),
    Case((90, 61), eps("box"), num_heads=3, num_kv_heads=3),
    Case((90, 61), eps("meanstd"), num_heads=8, num_kv_heads=1),
    Case((90, 61), eps("ball", group_size=8), num_heads=16, num_kv_heads=2, head_dim=80),
    Case((90, 61), eps("moments", group_size=8), head_dim=33),
    Case((150, 37), eps("box"), dtype="float16"),
    Case((150, 37), eps("box", group_size=16), dtype="bfloat16"),
    Case((150, 37), eps("moments", group_size=8), dtype="bfloat16", head_dim=64),
    Case((150, 37), eps("ball", policy="threshold", top_pages=6)),
    Case((150, 37), eps("jl", policy="threshold", top_pages=3)),
    Case((150, 37), eps("moments", policy="threshold", top_pages=3, alpha=1.3)),
    Case((152, 36), eps("meanstd", policy="threshold", top_pages=1, alpha=1.0, num_sink_tokens=0, num_recent_tokens=0)),
    Case((150, 37), eps("moments", scope="union", policy="threshold", top_pages=4)),
    Case((150, 37), eps("box", budget=20.0)),
    Case((150, 37), eps("box", top_pages=5)),
    Case((150, 37), eps("box", budget=1.0)),
    Case((150, 37), eps("ball", group_size=2, budget=0.1), num_heads=8, num_kv_heads=2),
    Case((300, 61), eps("moments", group_size=1, scope="union", budget=0.05), num_heads=6),
    Case((300,), eps("rq", group_size=1), num_heads=3, num_kv_heads=1, dtype="float16"),
    Case((150, 37), eps("box"), kind="equal"),
    Case((150, 37), eps("box"), kind="ties"),
    Case((150, 37), eps("ball"), kind="outlier"),
    Case((150, 37), eps("moments"), kind="outlier"),
    Case((150, 37), eps("1pc"), kind="outlier"),
    Case((150, 37), eps("moments"), kind="equal"),
    Case((300,), eps("rq"), kind="equal"),
    Case((150, 37), eps("off")),
    Case((300, 130), eps("norm", group_size=128)),
    Case((300, 130), eps("norm", group_size=128, policy="threshold", top_pages=1), dtype="bfloat16"),
    Case((70, 33), eps("norm", group_size=1), dtype="float16"),
    Case((290, 31), eps("norm", group_size=5, block_size=5), head_dim=33, kind="outlier"),
    Case((150, 37), eps("norm", scope="union"), num_heads=6, num_kv_heads=3, kind="equal"),
    Case((310, 100), eps("rq", rescore=0.2, budget=0.1), num_heads=6, dtype="bfloat16", head_dim=64, chunk=150),
    Case((300,), eps("rq", policy="threshold", top_pages=5), num_heads=2, kind="ties"),
    Case((290, 200), eps("ball", group_size=48, budget=0.2)),
    Case((131, 70), eps("meanstd", group_size=5, block_size=5), chunk=64),
    Case((290, 73), eps("meanstd", group_size=3, block_size=12), scale_q=0.1),
    Case((200, 33), eps("moments", group_size=1, block_size=32), dtype="float16"),
    Case((300, 61), eps("box", group_size=64, budget=0.2), num_heads=8, num_kv_heads=1),
    Case((150, 120), eps("moments", scope="union", budget=0.1), num_heads=3, num_kv_heads=3),
    Case((190, 128), eps("ball", min_context=150), kind="outlier"),
    # K and V as codes
    Case((150, 37), eps("off"), bits=(8, 4), num_heads=8, num_kv_heads=1),
    Case((150, 37), eps("box"), bits=(8, 8), dtype="bfloat16"),
    Case((300, 61), eps("rq", group_size=2, mean_tokens=32, rq_bounds=True), bits=(4, 16), num_heads=6),
    Case((150, 37), eps("moments"), bits=(8, 8), dtype="float16", kind="outlier"),
    Case((150, 37), eps("ball", policy="threshold", top_pages=4), bits=(4, 4), head_dim=34),
    Case((150, 37), eps("fd"), bits=(16, 8), head_dim=33),
    Case((150, 37), eps("oracle"), bits=(4, 8), kind="ties"),
    Case((150, 37), eps("rq"), bits=(8, 8)),
    Case((150, 37), eps("box"), bits=("fp8", "nvfp4"), dtype="float16", head_dim=48, kind="outlier"),
]


# Cases, and caches that hold them


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
    pool = PagePool(case.spec.num_units, case.config.cache_config.unit_tokens)
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


class FilledCase:
    """A cache that holds the tokens of a case, and a query of every sequence."""

    def __init__(self, backend: ModuleType, device: str, case: Case, seed: int = 0) -> None:
        self.backend, self.device, self.case = backend, device, case
        rng = np.random.default_rng(seed)
        self.keys, self.values = make_kv(case, rng)
        q = rng.normal(size=(len(case.lengths), case.num_heads, case.head_dim)) * case.scale_q
        self.q = q.astype(np.float32)
        self.native = self.give(self.q)
        cache = backend.new_cache(case.spec, case.config.cache_config, device)
        self.cache, self.table, self.lengths = write_all(backend, device, case, cache, self.keys, self.values)
        self.plan = StepPlan.of(case.config, self.table, self.lengths)

    @cached_property
    def ref_cache(self) -> reference.Cache:
        """The same tokens in a cache of the reference."""
        cache = reference.new_cache(self.case.spec, self.case.config.cache_config)
        return write_all(reference, "cpu", self.case, cache, self.keys, self.values)[0]

    @cached_property
    def truth(self) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """[B][Hq] of (log masses [G], dense output [D]) of a query head: float64, of K and V as attention reads."""
        case, found = self.case, []
        repeat, size = case.num_heads // case.num_kv_heads, case.config.cache_config.S
        for b, q in enumerate(self.q.astype(np.float64) / np.sqrt(case.head_dim)):
            found.append([])
            for r, a in enumerate(q):
                k, v = (as_read(case, x[b][:, r // repeat], i) for i, x in enumerate((self.keys, self.values)))
                found[-1].append((group_masses(a, k, size), attend_keys(a, k, v)[0]))
        return found

    @property
    def allowance(self) -> float:
        """Rounding of a float32 logit."""
        return allowance(self.case, self.keys, self.q)

    def give(self, array: np.ndarray, dtype: str = "float32"):
        return self.backend.from_numpy(np.ascontiguousarray(array), dtype, self.device)

    def host(self, array) -> np.ndarray:
        return self.backend.to_numpy(array).astype(np.float64)

    def attended(self, selected) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) over a selection, None for everything; both are the reference's."""
        out, lse = (self.host(x) for x in self.backend.attend(self.cache, 0, self.native, self.plan, selected))
        host = None if selected is None else selection_on_host(self.backend, selected)
        expected_out, expected_lse = reference.attend(self.ref_cache, 0, self.q, self.plan, host)
        units = np.arange(self.case.spec.num_units)
        stored, _ = reference.read_kv(self.ref_cache, 0, units, len(units) * self.case.config.cache_config.unit_tokens)
        tolerance = allowance(self.case, [stored.astype(np.float32)], self.q)
        assert out.shape == expected_out.shape and lse.shape == expected_lse.shape
        assert np.abs(lse - expected_lse).max() <= 4 * tolerance
        assert np.abs(out - expected_out).max() <= 16 * tolerance
        return out, lse


@pytest.mark.kernels("numba", "triton", "metal", methods=KERNEL_METHODS, emulated=EMULATED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backend_follows_the_oracle(target, case):
    backend, device = target
    one = FilledCase(backend, device, case, sum(case.lengths) + case.head_dim)
    cache, plan = one.cache, one.plan
    check_storage(one)
    if not case.config.cache_config.enabled:
        assert cache.summaries == [] and cache.state == [] and cache.open == [] and cache.centroid == []
        one.attended(None)
        return
    scores = backend.score(cache, 0, one.native, plan)
    check_scores(one, scores)
    check_scoring(one, scores)
    # selection is judged on the backend's own scores: what must agree is the rule, not the last bit of an estimate
    own = scores_on_host(backend, scores)
    selected = backend.select(scores, plan)
    wanted = reference.select(own, plan)
    check_selection(backend, selected, wanted)
    assert wanted.counts.min() >= 1
    assert (selected.counts_before_union is None) == (case.config.selection_config.scope == "kv-head")
    skipped = backend.to_numpy(backend.skipped_mass(scores, selected))
    assert np.allclose(skipped, reference.skipped_mass(own, wanted), atol=1e-4)
    one.attended(selected)
    all_of_it = case.config.replace(policy="topk", budget=1.0, top_pages=None)
    everything = backend.select(scores, StepPlan.of(all_of_it, one.table, one.lengths))
    everywhere, dense = one.attended(everything), one.attended(None)
    for got, want in zip(everywhere, dense, strict=True):  # every group visited is dense attention
        assert np.allclose(got, want, atol=4 * one.allowance)
    if not case.config.cache_config.has_bounds:
        with pytest.raises(ValueError, match=f"method {case.config.cache_config.method} has no bounds"):
            backend.bound_error(cache, 0, scores, selected, *backend.attend(cache, 0, one.native, plan, selected))
        return
    state = backend.attend(cache, 0, one.native, plan, everything)
    mass, error = check_certificate(one, scores, everything, state)
    assert (mass == 0).all() and (error == 0).all()
    state = backend.attend(cache, 0, one.native, plan, selected)
    check_certificate(one, scores, selected, state)
    for epsilon in EPSILONS:
        config = case.config.replace(epsilon=epsilon)
        extra, whole = backend.extend_selection(config.selection_config, scores, selected, state[1])
        check_escalation(backend, config, own, selected, backend.to_numpy(state[1]), extra, whole)
        merged = backend.merge(state, backend.attend(cache, 0, one.native, plan, extra))
        for got, want in zip(merged, one.attended(whole), strict=True):
            assert np.abs(backend.to_numpy(got) - want).max() <= 16 * one.allowance
        mass, _ = check_certificate(one, scores, whole, merged)
        assert (mass <= epsilon).all(), "strict left more than epsilon uncertified"
        if epsilon == 0:
            assert (backend.to_numpy(whole.counts) == plan.ends[:, None]).all()
            for got, want in zip(merged, dense, strict=True):
                assert np.abs(backend.to_numpy(got) - want).max() <= 16 * one.allowance


# Checks of one stage


def scores_on_host(backend, scores: Scores) -> Scores:
    parts = (scores.estimate, scores.lower, scores.upper, scores.slack)
    estimate, lower, upper, slack = (None if x is None else backend.to_numpy(x).astype(np.float64) for x in parts)
    return Scores(estimate, lower, upper, scores.num_missing, slack)


def selection_on_host(backend, selected: Selection) -> Selection:
    wanted = None if selected.counts_before_union is None else backend.to_numpy(selected.counts_before_union)
    groups, counts = backend.to_numpy(selected.groups), backend.to_numpy(selected.counts)
    return replace(selected, groups=groups, counts=counts, counts_before_union=wanted)


def selection_mask(backend, selected: Selection, num_groups: int) -> np.ndarray:
    """[B, Hkv, G] of the listed groups, which must be ascending and then padding."""
    groups, counts = backend.to_numpy(selected.groups), backend.to_numpy(selected.counts)
    selected_mask = np.zeros((*counts.shape, num_groups), bool)
    for b, head in np.ndindex(*counts.shape):
        listed, padding = np.split(groups[b, head], [counts[b, head]])
        assert len(listed) == counts[b, head] and (np.diff(listed) > 0).all() and (padding == -1).all()
        selected_mask[b, head, listed] = True
    return selected_mask


def check_selection(backend, selected: Selection, wanted: Selection) -> None:
    """The same groups in the same order, and what is said about them."""
    counts, groups = backend.to_numpy(selected.counts), backend.to_numpy(selected.groups)
    assert (counts == wanted.counts).all()
    for b, head in np.ndindex(*counts.shape):
        got, padding = np.split(groups[b, head], [counts[b, head]])
        assert got.tolist() == wanted.groups[b, head, : counts[b, head]].tolist() and (padding == -1).all()
    assert (selected.always_selected == wanted.always_selected).all()
    assert (selected.counts_before_union is None) == (wanted.counts_before_union is None)
    if selected.counts_before_union is not None:
        assert (backend.to_numpy(selected.counts_before_union) == wanted.counts_before_union).all()
    if selected.common_counts is not None:
        assert (counts == np.asarray(selected.common_counts)[:, None]).all()


def check_certificate(one: FilledCase, scores, selected, state) -> tuple[np.ndarray, np.ndarray]:
    """(mass, error) bounded of attention `state` over `selected`: as the oracle computes them from the same scores,
    and valid for every query head."""
    error_bound = one.backend.bound_error(one.cache, 0, scores, selected, *state)
    mass, error, out, lse = (one.host(x) for x in (error_bound.mass, error_bound.error, *state))
    own, host = scores_on_host(one.backend, scores), selection_on_host(one.backend, selected)
    want = reference.bound_error(one.ref_cache, 0, own, host, out, lse)
    assert mass.shape == error.shape == want.mass.shape
    assert np.allclose(mass, want.mass, rtol=1e-4, atol=TINY) and np.allclose(error, want.error, rtol=1e-4, atol=TINY)
    selected_mask = selection_mask(one.backend, selected, own.estimate.shape[2])
    rounding = 16 * one.allowance * np.sqrt(one.case.head_dim)
    for b, r in np.ndindex(lse.shape):
        head, (masses, dense) = r // own.upper.shape[2], one.truth[b][r]
        left = masses[~selected_mask[b, head, : len(masses)]]
        unread = np.exp(np.logaddexp.reduce(left) - np.logaddexp.reduce(masses)) if len(left) else 0.0
        assert unread <= mass[b, head] + TINY, "more is unread than bounded"
        distance = np.linalg.norm(out[b, r] - dense)
        assert distance <= error[b, head] + rounding, "the output is further off than bounded"
    return mass, error


def check_escalation(backend, config: EpsConfig, own: Scores, selected, lse, extra, whole) -> None:
    """Disjoint from what was visited, whole together with it, and the oracle's choice up to a group whose test float32
    may round the other way."""
    num_groups = own.estimate.shape[2]
    before, added, after = (selection_mask(backend, part, num_groups) for part in (selected, extra, whole))
    assert not (before & added).any() and ((before | added) == after).all()
    assert extra.common_counts is None and extra.counts_before_union is None and not extra.always_selected.any()
    assert whole.common_counts is None and (whole.always_selected == selected.always_selected).all()
    assert (whole.counts_before_union is None) == (config.selection_config.scope == "kv-head")
    if whole.counts_before_union is not None:
        assert (backend.to_numpy(whole.counts_before_union) == backend.to_numpy(selected.counts_before_union)).all()
    want, _ = reference.extend_selection(
        config.selection_config, own, selection_on_host(backend, selected), lse.astype(np.float64)
    )
    differ = (selection_mask(reference, want, num_groups) ^ added).sum(axis=2)
    assert differ.max() <= (1 if config.selection_config.scope == "kv-head" else added.shape[1])
    if config.selection_config.scope == "union":
        assert (after == after[:, :1]).all()


def check_storage(one: FilledCase) -> None:
    """K and V bit for bit; summaries in the stated number of bytes; re-read K exactly as the oracle counts it."""
    backend, case, cache, cache_config = one.backend, one.case, one.cache, one.case.config.cache_config
    for name in ("k", "v"):
        for got, want in zip(*(arrays_of(getattr(x, name)[0]) for x in (cache, one.ref_cache)), strict=True):
            assert (backend.to_numpy(got).astype(np.float32) == want.astype(np.float32)).all()
    assert cache.bytes_k_reread == one.ref_cache.bytes_k_reread
    if cache_config.method_spec.follows:
        assert cache.bytes_k_reread == 0
    if cache_config.enabled and cache.summaries[0]:
        stored = sum(backend.to_numpy(a).nbytes for a in cache.summaries[0].values())
        per_group = stored / (case.spec.num_units * case.num_kv_heads * cache_config.groups_per_unit)
        assert per_group == summary_group_bytes(cache_config, case.head_dim)
    if cache_config.method == "rq":  # the same codes, so the same visit lists
        same = backend.to_numpy(cache.summaries[0]["codes"]) == one.ref_cache.summaries[0]["codes"]
        assert same.mean() > 0.999


def allowance(case: Case, keys: list[np.ndarray], q: np.ndarray) -> float:
    """Rounding of a float32 logit: eps * sqrt(D) * |a| |k|, at the largest key."""
    largest = max(float(np.linalg.norm(k, axis=-1).max()) for k in keys)
    size = float(np.linalg.norm(q, axis=-1).max()) / np.sqrt(case.head_dim)
    return EPS["float32"] * (8 + np.sqrt(case.head_dim)) * (size * largest + 8)


def check_scores(one: FilledCase, scores) -> None:
    case, expected = one.case, reference.score(one.ref_cache, 0, one.q, one.plan)
    estimate = one.host(scores.estimate)
    assert estimate.shape == expected.estimate.shape
    assert (np.isposinf(estimate) == np.isposinf(expected.estimate)).all(), "groups without a summary differ"
    assert (np.isneginf(estimate) == np.isneginf(expected.estimate)).all()
    assert (np.asarray(scores.num_missing) == expected.num_missing).all()
    finite = np.isfinite(estimate)
    if finite.any():
        # codes may round the other way at a tie (one step of int8 over D channels), never by more on the mean
        gap = np.abs(estimate[finite] - expected.estimate[finite])
        spread = max(float(np.abs(expected.estimate[finite]).max()), 1.0)
        loose = 2e-2 if case.config.cache_config.method in ("1pc", "fd", "moments") else 4e-3
        assert gap.max() <= loose * spread and gap.mean() <= 1e-3 * spread, (gap.max(), gap.mean(), spread)
    assert (scores.lower is None) == (not case.config.cache_config.has_bounds) == (scores.upper is None)
    if scores.lower is None:
        return
    lower, upper, slack = (one.backend.to_numpy(x) for x in (scores.lower, scores.upper, scores.slack))
    repeat = case.num_heads // case.num_kv_heads
    assert lower.shape == upper.shape == (*estimate.shape[:2], repeat, estimate.shape[2])
    assert slack.shape == expected.slack.shape and np.allclose(slack, expected.slack, rtol=1e-4)
    for b, query_head in np.ndindex(one.q.shape[:2]):  # each query head's own
        (head, r), (masses, _) = divmod(query_head, repeat), one.truth[b][query_head]
        n = len(masses)
        known, least, most = np.isfinite(estimate[b, head, :n]), lower[b, head, r], upper[b, head, r]
        assert (least[:n][known] <= masses[known]).all(), "a lower bound is violated"
        assert (most[:n][known] >= masses[known]).all(), "an upper bound is violated"
        assert np.isneginf(least[:n][~known]).all() and np.isposinf(most[:n][~known]).all()
        assert np.isneginf(least[n:]).all() and np.isneginf(most[n:]).all()


def check_scoring(one: FilledCase, scores) -> None:
    """The same stored summaries must give the same scores up to float32: no room for codes that round otherwise."""
    case, cache_config = one.case, one.case.config.cache_config
    stored = {name: one.backend.to_numpy(a) for name, a in one.cache.summaries[0].items()}
    exact = reference.score(replace(one.ref_cache, summaries=[stored]), 0, one.q, one.plan)
    # norms and radii reach past the largest key by their own rounding; variances are quadratic in it
    size = float(np.linalg.norm(one.q, axis=-1).max()) / np.sqrt(case.head_dim)
    largest = max(float(np.linalg.norm(k, axis=-1).max()) for k in one.keys) * size
    scale = largest * (1 + largest) if cache_config.method == "moments" else largest
    if cache_config.method in ("jl", "1pc", "fd"):
        scale *= np.sqrt(cache_config.S)
    if cache_config.method in ("box", "meanstd", "jl"):
        scale *= np.sqrt(case.head_dim)
    tolerance = 4 * EPS["float32"] * (8 + np.sqrt(case.head_dim)) * (scale + 8)
    for name in ("estimate", "lower", "upper"):
        want = getattr(exact, name)
        if want is None:
            continue
        got, finite = one.host(getattr(scores, name)), np.isfinite(want)
        assert (np.isfinite(got) == finite).all()
        gap = np.abs(got[finite] - want[finite])
        assert gap.max(initial=0) <= tolerance, (name, gap.max(), tolerance)


def anchored(logits: np.ndarray) -> np.ndarray:
    """The anchors [.., R] by the first token's logits [.., R] of the query heads of a kv head."""
    mean = logits.mean(axis=-1, keepdims=True)
    return np.minimum(np.maximum(logits, mean - 4), mean + 4)


def as_read(case: Case, rows: np.ndarray, which: int = 0) -> np.ndarray:
    """Rows [N, D] of one head of K (`which` 0) or V (1), as attention reads them."""
    rows, bits = reference.from_numpy(rows, case.dtype), case.bits[which]
    if bits != 16:
        rows = codes.dequantise(*codes.quantise(rows, bits), bits, rows.dtype)
    return rows.astype(np.float64)


# Merging, single tokens, norms, head modes


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
    want_out, want_lse = reference.merge((out[0].astype(np.float64), lse[0].astype(np.float64)), (out[1], lse[1]))
    assert np.allclose(got_out, want_out, atol=1e-6) and np.allclose(got_lse, want_lse, atol=1e-5)
    assert (got_out[2, 3] == 0).all()


def test_own_token_merged_equals_dense(target):
    """The last token merged in, never written, equals dense attention with it in the cache."""
    backend, device = target
    # an array backend keeps it to itself and its decoder
    home = backend if hasattr(backend, "attend_own") else importlib.import_module(f"{backend.__name__}.attention")
    for dtype, bits in [*((dtype, (16, 16)) for dtype in EPS), ("float32", (8, 4))]:
        case = Case((150, 37, 2), eps("box"), num_heads=6, num_kv_heads=3, dtype=dtype, bits=bits)
        one = FilledCase(backend, device, replace(case, scale_q=1.0), 3)
        k, v = (one.give(np.stack([array[-1] for array in arrays])) for arrays in (one.keys, one.values))
        short = StepPlan.of(case.config, one.table, one.lengths - 1)
        before = backend.attend(one.cache, 0, one.native, short, None)
        merged = backend.merge(before, home.attend_own(one.cache, one.native, k, v))
        whole = backend.attend(one.cache, 0, one.native, one.plan, None)
        for got, want in zip(merged, whole, strict=True):
            got, want = backend.to_numpy(got), backend.to_numpy(want)
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= 16 * one.allowance


def test_largest_key_and_value_outlive_reuse(target):
    """The largest |k| and |v| of each kv head bound everything that lies in the cache, also once units are reused."""
    backend, device = target
    for dtype in EPS:
        spec, config = CacheSpec(2, 2, 24, 6, dtype), eps("ball")
        rng, cache = np.random.default_rng(9), backend.new_cache(spec, config.cache_config, device)
        most = np.zeros((2, 2))
        for scale in (1.0, 5.0, 0.1):
            k, v = ((rng.normal(size=(64, 2, 24)) * scale * part).astype(np.float32) for part in (1.0, 3.0))
            k[:, 1] *= 2
            native = [backend.from_numpy(x, "float32", device) for x in (k, v)]
            cache = backend.write_kv(cache, 1, *native, np.arange(64))
            cache = backend.copy_units(cache, [0], [5])
            stored = [reference.from_numpy(x, dtype).astype(np.float64) for x in (k, v)]
            most = np.maximum(most, [np.linalg.norm(x, axis=2).max(axis=0) for x in stored])
            for largest, true in zip((cache.largest_key, cache.largest_value), most, strict=True):
                got = backend.to_numpy(largest[1]).astype(np.float64)
                assert got.shape == (2,) and (got >= true).all() and (got <= true * 1.001).all()
                assert (backend.to_numpy(largest[0]) == 0).all()  # the other layer
    for method in ("off", "jl"):
        assert backend.new_cache(spec, eps(method).cache_config, device).largest_key == []


MODES = (("sparse", "dense", "window"), ("window", "sparse", "sparse"), ("dense",) * 3, ("sparse",) * 3)


def test_head_modes_follow_the_oracle(target):
    """Head modes layer by layer: visit lists of the oracle, dense heads all, window heads what is always selected."""
    backend, device = target
    settings = [
        {},
        {"policy": "threshold", "top_pages": 9},
        {"scope": "union"},
        {"num_sink_tokens": 0, "num_recent_tokens": 0, "budget": 0.2},  # a window head with nothing forced
    ]
    for extra in settings:
        config = eps("box", head_modes=MODES, **extra)
        case = Case((152, 37), config, num_heads=6, num_kv_heads=3)
        one = FilledCase(backend, device, case, 11)
        scores = backend.score(one.cache, 0, one.native, one.plan)
        own, num_groups = scores_on_host(backend, scores), scores.estimate.shape[2]
        plan, without = (place(each, one.lengths, num_groups) for each in (config, config.replace(head_modes=None)))
        plain = selection_mask(backend, backend.select(scores, without), num_groups)
        for layer, modes in enumerate(MODES):
            selected = backend.select(scores, plan, layer)
            check_selection(backend, selected, reference.select(own, plan, layer))
            if set(modes) != {"sparse"}:
                assert selected.common_counts is None
            one.attended(selected)
            if config.selection_config.scope == "union":
                continue
            selected_mask = selection_mask(backend, selected, num_groups)
            for head, mode in enumerate(modes):
                for b, length in enumerate(one.lengths.tolist()):
                    groups, always_selected = -(-length // config.cache_config.S), int(selected.always_selected[b])
                    if mode == "sparse":
                        assert (selected_mask[b, head] == plain[b, head]).all()
                    else:
                        assert selected_mask[b, head].sum() == (groups if mode == "dense" else max(always_selected, 1))


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1e-3, 0.0, 1.0])
def test_strict_holds_over_many_groups(target, epsilon):
    """Thousands of groups of like mass: long float32 sums of exponentials must not let epsilon slip."""
    backend, device = target
    if backend is reference:
        return  # float64
    rng = np.random.default_rng(1)
    shape, config = (1, 2, 2, 20_000), eps("box", epsilon=epsilon)
    middle = rng.normal(size=shape) * 0.3 + np.array([8.0, 40.0])[:, None, None]
    lower, upper = (middle + gap for gap in (-0.5, 0.4))
    estimate = upper.max(axis=2)
    slack = np.full(shape[:3], 1e-5)
    arrays = [backend.from_numpy(x.astype(np.float32), "float32", device) for x in (estimate, lower, upper, slack)]
    scores = Scores(*arrays[:3], np.zeros(1, np.int64), arrays[3])
    own = scores_on_host(backend, scores)
    lengths = np.array([20_000 * config.cache_config.S])
    selected = backend.select(scores, place(config.replace(top_pages=10, budget=1.0), lengths, 20_000))
    read = np.where(selection_mask(backend, selected, 20_000)[:, :, None], own.upper, -np.inf)
    lse = np.logaddexp.reduce(read, axis=3).reshape(1, 4)
    native = backend.from_numpy(lse.astype(np.float32), "float32", device)
    extra, whole = backend.extend_selection(config.selection_config, scores, selected, native)
    check_escalation(backend, config, own, selected, backend.to_numpy(native), extra, whole)
    # the least that extension can have gained: exactly the lower masses
    selected_mask, added = (selection_mask(backend, part, 20_000)[:, :, None] for part in (whole, extra))
    gained = np.logaddexp(lse.reshape(1, 2, 2), np.logaddexp.reduce(np.where(added, own.lower, -np.inf), axis=3))
    spec = CacheSpec(1, 2, 16, 2)
    cache = backend.new_cache(spec, config.cache_config, device)
    out = backend.from_numpy(np.ones((1, 4, 16)), "float32", device)
    native = backend.from_numpy(gained.reshape(1, 4).astype(np.float32), "float32", device)
    mass = backend.to_numpy(backend.bound_error(cache, 0, scores, whole, out, native).mass)
    unread = np.logaddexp.reduce(np.where(selected_mask, -np.inf, own.upper), axis=3)
    exact = (1 / (1 + np.exp(gained - unread))).max(axis=2)
    assert (exact <= mass + TINY).all() and (mass <= epsilon).all()


# Forks, and units that are used again


class Pages:
    """A pool, a cache of 2 kv heads of 16 over it, and what is appended to its sequences."""

    def __init__(self, backend: ModuleType, device: str, config: EpsConfig, bits: KvFormats = (16, 16)) -> None:
        self.backend, self.device, self.config, self.copied = backend, device, config, 0
        spec = CacheSpec(1, 2, 16, 64, k_bits=bits[0], v_bits=bits[1])
        self.pool = PagePool(64, config.cache_config.unit_tokens)
        self.cache = backend.new_cache(spec, config.cache_config, device)

    def give(self, array: np.ndarray):
        return self.backend.from_numpy(np.ascontiguousarray(array), "float32", self.device)

    def append(self, sequence, kv: np.ndarray, first: int, step: int = 1000) -> None:
        """Writes K and V [2, N, Hkv, D], `step` tokens at a time, as the tokens from `first` on."""
        for start in range(0, kv.shape[1], step):
            k, v = kv[:, start : start + step]
            slots, copies = self.pool.append(sequence, [first + start + t for t in range(len(k))])
            self.copied += len(copies)
            if copies:
                self.cache = self.backend.copy_units(self.cache, [s for s, _ in copies], [d for _, d in copies])
            self.cache = self.backend.write_kv(self.cache, 0, self.give(k), self.give(v), slots)

    def plan(self, sequence) -> StepPlan:
        return StepPlan.of(self.config, self.pool.table([sequence]), self.pool.lengths([sequence]))

    def estimate(self, sequence, q) -> np.ndarray:
        return self.backend.to_numpy(self.backend.score(self.cache, 0, q, self.plan(sequence)).estimate)

    def read(self, sequence, q) -> list[np.ndarray]:
        """Return what a step computes: estimates, groups and attention."""
        backend, plan = self.backend, self.plan(sequence)
        scores = backend.score(self.cache, 0, q, plan)
        selected = backend.select(scores, plan)
        out, lse = backend.attend(self.cache, 0, q, plan, selected)
        arrays = scores.estimate[..., : int(plan.ends[0])], selected.groups, out, lse
        return [backend.to_numpy(x) for x in arrays]


def check_fork(target, config: EpsConfig, bits: KvFormats = (16, 16)) -> None:
    """A fork copies only the open unit, with its summaries and running statistics."""
    rng = np.random.default_rng(5)
    shared = rng.normal(size=(2, 300, 2, 16)).astype(np.float32)  # K and V; long enough for the centroid of key codes
    diverging = rng.normal(size=(2, 2, 30, 2, 16)).astype(np.float32)
    one = Pages(*target, config, bits)
    q = one.give(rng.normal(size=(1, 4, 16)).astype(np.float32))
    first, _ = one.pool.open([])
    one.append(first, shared, 0)
    second = one.pool.fork(first)
    for t in range(30):
        for which, sequence in enumerate((first, second)):
            one.append(sequence, diverging[which, :, t : t + 1], 1000 * (which + 1) + t)
    assert one.copied == 1
    one.pool.check()
    if config.cache_config.method in ("jl", "box", "meanstd"):
        assert one.cache.bytes_k_reread == 0
    for which, sequence in enumerate((first, second)):
        alone = Pages(*target, config, bits)
        only, _ = alone.pool.open([])
        alone.append(only, shared, 0)
        alone.append(only, diverging[which], 7, 1)
        for got, want in zip(one.read(sequence, q), alone.read(only, q), strict=True):
            assert np.array_equal(got, want)


@pytest.mark.parametrize(
    "config",
    [
        *(eps(method, group_size=8) for method in ("jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq")),
        eps("moments", group_size=32, budget=0.2),
    ],
    ids=lambda config: f"{config.cache_config.method}-S{config.cache_config.S}",
)
def test_fork_then_diverge_equals_two_independent_sequences(target, config):
    for bits in ((16, 16), (8, 4), ("nvfp4", "fp8")) if config.cache_config.method == "box" else ((16, 16),):
        check_fork(target, config, bits)


@pytest.mark.parametrize("step", [100, 3], ids=["groups in hand", "groups across calls"])
@pytest.mark.parametrize("method", ["jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq"])
def test_reused_group_never_shows_an_old_summary(target, method, step):
    """A freed unit written again: partly filled it has no summary, full it has the new keys' one. Written 3 tokens at a
    time, groups fill across calls, on top of what running statistics held before."""
    rng = np.random.default_rng(6)
    one, fresh = (Pages(*target, eps(method, group_size=8)) for _ in range(2))
    q = one.give(rng.normal(size=(1, 2, 16)).astype(np.float32))
    first, _ = one.pool.open([])
    one.append(first, rng.normal(size=(2, 600, 2, 16)).astype(np.float32), 0)
    one.pool.free(first)
    (second, _), (only, _) = one.pool.open([]), fresh.pool.open([])
    kv = rng.normal(size=(2, 100, 2, 16)).astype(np.float32)
    one.append(second, kv, 10_000, step)
    fresh.append(only, kv, 0, step)
    estimate = one.estimate(second, q)
    assert np.isposinf(estimate[0, :, 100 // 8]).all()  # the partial group, whose slots held an old full group
    assert np.array_equal(estimate[..., :13], fresh.estimate(only, q)[..., :13])
    # a slot in the middle of a finalized group is written again (a rejected draft): no summary until it is full again
    again = np.array([one.pool.table([second])[0, 0] * one.pool.unit_tokens + 3])
    k, v = (one.give(rng.normal(size=(1, 2, 16)).astype(np.float32)) for _ in range(2))
    one.cache = one.backend.write_kv(one.cache, 0, k, v, again)
    assert np.isposinf(one.estimate(second, q)[0, :, 0]).all()


# Hard numbers


@pytest.mark.parametrize("method", ["off", "jl", "1pc", "fd", "box", "meanstd", "ball", "moments", "rq"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_k_is_refused(target, value, method):
    """Also in groups that are finalized by the same write, whatever their summary computes."""
    backend, device = target
    cache = backend.new_cache(CacheSpec(1, 2, 16, 20), eps(method).cache_config, device)
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
    estimates = []
    for seed in (0, 0, 1):
        one = FilledCase(backend, device, Case((300,), eps(method).replace(seed=seed)))
        scores = backend.score(one.cache, 0, one.native, one.plan)
        estimates.append(backend.to_numpy(scores.estimate)[..., :60])
    assert np.array_equal(estimates[0], estimates[1])
    assert not np.allclose(estimates[0], estimates[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_in_sixteen_bits(target, dtype):
    """out has the query's dtype and no more error than rounding the query and the output cost."""
    backend, device = target
    one = FilledCase(
        backend, device, Case((150, 37), eps("box", group_size=8), dtype=dtype, head_dim=64, scale_q=1.0), 4
    )
    q = reference.from_numpy(one.q, dtype)
    native = one.give(q.astype(np.float32), dtype)
    selected = backend.select(backend.score(one.cache, 0, native, one.plan), one.plan)
    out, lse = backend.attend(one.cache, 0, native, one.plan, selected)
    host = selection_on_host(backend, selected)
    want_out, want_lse = reference.attend(one.ref_cache, 0, q.astype(np.float32), one.plan, host)
    assert out.dtype == native.dtype or backend is reference  # which keeps float64
    assert np.abs(backend.to_numpy(lse) - want_lse).max() <= 1e-4
    # one rounding of the output, of values below 4
    assert np.abs(backend.to_numpy(out).astype(np.float64) - want_out).max() <= EPS[dtype] * 4.0


@pytest.mark.parametrize("method", ["box", "ball", "moments", "1pc", "fd", "meanstd"])
def test_keys_past_float16_loosen_and_never_displace_a_guard(target, method):
    """Scalars that overflow float16 may make estimates and bounds useless; sink and recent tokens are still visited."""
    backend, device = target
    config = eps(method, budget=40.0)
    rng = np.random.default_rng(0)
    keys = (rng.normal(size=(150, 2, 16)) * 3e7).astype(np.float32)
    native = backend.from_numpy(keys, "float32", device)
    cache = backend.new_cache(CacheSpec(1, 2, 16, 10), config.cache_config, device)
    cache = backend.write_kv(cache, 0, native, native, np.arange(150))
    q = backend.from_numpy(rng.normal(size=(1, 4, 16)).astype(np.float32), "float32", device)
    table, lengths = np.arange(10)[None], np.array([150])
    scores = backend.score(cache, 0, q, StepPlan.of(config, table, lengths))
    estimate = backend.to_numpy(scores.estimate)
    assert not np.isnan(estimate).any() and np.isfinite(estimate[..., :37]).all()
    if scores.upper is not None:
        upper, lower = backend.to_numpy(scores.upper), backend.to_numpy(scores.lower)
        for r in range(4):
            truth = group_masses(backend.to_numpy(q)[0, r].astype(np.float64) / 4, keys[:, r // 2], 4)[:37]
            assert (upper[0, r // 2, r % 2, :37] >= truth).all() and (lower[0, r // 2, r % 2, :37] <= truth).all()
    selected = backend.select(scores, place(config, lengths, scores.estimate.shape[-1]))
    for head in range(2):
        num_selected = set(backend.to_numpy(selected.groups)[0, head].tolist())
        assert {0, 35, 36, 37} <= num_selected, "a sink or recent token lost its place"


def test_box_codes_enclose_keys_one_ulp_from_a_code(target):
    """Where a division that is an ulp off would land on the code itself, and floor or ceil would cut the key off."""
    backend, device = target
    scale = float(oracle_summaries.up16(1.0))  # of a group whose largest channel is 127
    codes = np.tile(np.arange(-120, 121, dtype=np.float32)[:240].reshape(-1, 15), (2, 1))
    keys = np.nextafter(
        codes * np.float32(scale), np.repeat([-np.inf, np.inf], len(codes) // 2)[:, None], dtype=np.float32
    )
    keys = np.concatenate([np.full((len(keys), 1), 127.0, np.float32), keys], axis=1)[:, None]
    cache = backend.new_cache(CacheSpec(1, 1, 16, 2), eps("box", group_size=1).cache_config, device)
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
    config, head_dim, count = eps("1pc", group_size=4, block_size=4), 64, 60
    keys = rng.normal(size=(4 * count, 1, head_dim)).astype(np.float32)
    native = backend.from_numpy(keys, "float32", device)
    cache = backend.new_cache(CacheSpec(1, 1, head_dim, count), config.cache_config, device)
    cache = backend.write_kv(cache, 0, native, native, np.arange(4 * count))
    stored = {name: backend.to_numpy(a)[:, 0, 0].astype(np.float64) for name, a in cache.summaries[0].items()}
    for group in range(count):
        direction = stored["direction"][group] * stored["direction_scale"][group]
        q = (1000 * direction + 1e-2 * rng.normal(size=head_dim)).astype(np.float32)[None, None]
        scores = backend.score(
            cache, 0, backend.from_numpy(q, "float32", device), StepPlan.of(config, np.array([[group]]), np.array([4]))
        )
        a = q[0, 0].astype(np.float64) / np.sqrt(head_dim)
        along = abs(direction @ a)
        exact = stored["lam"][group] * along + stored["rest"][group] * np.sqrt(max(a @ a - along**2, 0))
        assert backend.to_numpy(scores.upper)[0, 0, 0, 0] >= np.log(4) + exact


# Decoders

PROMPT, STEPS = 60, 4  # tokens prefilled, decoded


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4 query heads over 2 kv heads in 2 layers."""
    return tiny_models.save_model("mistral", tmp_path_factory.mktemp("tiny"))


class Decoding:
    """Two sequences of one decoder in one cache; `step` decodes fixed tokens."""

    def __init__(self, target: tuple, path: Path, config: EpsConfig, prompt: int = PROMPT) -> None:
        self.backend, device = target
        self.config, self.spec = config, read_spec(path)
        self.decoder = load_decoder(self.backend, path, self.spec, "float32", device)
        units = -(-(prompt + STEPS) // config.cache_config.unit_tokens)
        spec = CacheSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, 2 * units)
        self.cache = self.backend.new_cache(spec, config.cache_config, device)
        self.table = np.arange(2 * units).reshape(2, units)
        self.tokens = np.random.default_rng(2).integers(0, tiny_models.VOCAB_SIZE, (2, prompt + STEPS))
        self.lengths = np.array([prompt, prompt - 27])
        self.queries: list[tuple[int, np.ndarray]] = []
        for b, length in enumerate(self.lengths.tolist()):
            slots = self._slots(b, np.arange(length))
            self.cache, _ = self.decoder.prefill(self.cache, self.tokens[b, :length], slots, self.table[b], length)

    def _slots(self, b: int, positions: np.ndarray) -> np.ndarray:
        units, offsets = np.divmod(positions, self.config.cache_config.unit_tokens)
        return self.table[b, units] * self.config.cache_config.unit_tokens + offsets

    def step(self, sparse: bool = True, audit: bool = False, config: EpsConfig | None = None):
        read = (config or self.config).selection_config if sparse else None
        slots = np.concatenate([self._slots(b, self.lengths[b : b + 1]) for b in range(2)])
        tokens = self.tokens[[0, 1], self.lengths]
        self.lengths = self.lengths + 1
        self.cache, output = self.decoder.step(self.cache, tokens, slots, self.table, self.lengths.copy(), read, audit)
        return output

    def listen(self) -> None:
        self.decoder.tap = lambda layer, q: self.queries.append((layer, self.backend.to_numpy(q)))

    def score(self, layer: int, q: np.ndarray):
        q = self.backend.from_numpy(q.astype(np.float32), "float32", self.decoder.device)
        return self.backend.score(self.cache, layer, q, StepPlan.of(self.config, self.table, self.lengths))


def sparse(method: str = "moments", **settings: object) -> EpsConfig:
    return eps(method, **{"group_size": 2, "num_recent_tokens": 6, "budget": 0.25, **settings})


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Logits that differ by float32 rounding alone; test_model shows that a real difference is far outside."""
    return bool(np.abs(got - want).max() <= 2e-4 * want.std())


def test_tap_sees_every_query(target, tiny_path):
    run, want = Decoding(target, tiny_path, sparse()), Decoding((reference, "cpu"), tiny_path, sparse(budget=1.0))
    run.listen()
    want.listen()
    run.step()
    want.step()
    run.step(sparse=False)
    run.step(audit=True)  # whose dense pass is nobody's query
    assert [layer for layer, _ in run.queries] == [0, 1] * 3
    assert all(q.shape == (2, 4, run.spec.head_dim) for _, q in run.queries)
    # unscaled, rotated, as attention uses it: the first layer's depends on nothing that was sparse
    first, ref_cache = run.queries[0][1], want.queries[0][1]
    assert np.abs(first - ref_cache).max() <= 1e-4 * np.abs(ref_cache).max()


@pytest.mark.parametrize("method", ["moments", "rq", "box"])
def test_dense_step_equals_method_off(target, tiny_path, method):
    """Bit for bit, and the summaries follow all the same: the next sparse step knows every full group."""
    # in units of the same size, by which dense attention may sum
    config = sparse(method)
    unsummarised = EpsConfig.of(block_size=config.cache_config.unit_tokens)
    run, off = (Decoding(target, tiny_path, each) for each in (config, unsummarised))
    for _ in range(STEPS - 1):
        output, want = run.step(sparse=False), off.step()
        assert np.array_equal(output.logits, want.logits) and output.layers == [] and output.fallbacks == {}
        assert output.kv_bytes_read == want.kv_bytes_read > 0
    run.listen()
    run.step()
    if method == "rq":
        return  # whose units are open
    for layer, q in run.queries:
        estimate = run.backend.to_numpy(run.score(layer, q).estimate)
        for b, length in enumerate(run.lengths.tolist()):
            assert np.isfinite(estimate[b, :, : length // run.config.cache_config.S]).all()


@pytest.mark.parametrize("shape", [(1, 3, 16), (1, 4, 32)], ids=["heads", "head dim"])
def test_queries_of_another_shape_are_refused(target, shape):
    """Whatever computes: a kernel would read past its arrays."""
    backend, device = target
    one = FilledCase(backend, device, Case((40,), eps("box")))
    if backend is not reference:
        with pytest.raises(ValueError, match="query heads must be a multiple"):
            backend.attend(one.cache, 0, one.give(np.zeros(shape, np.float32)), one.plan, None)
