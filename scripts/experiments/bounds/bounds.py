"""Checks of what is claimed to hold for every query: bounds, error bounds and strict mode, against float64.

A backend builds summaries of keys, scores them and bounds; the truth is computed here in float64 from the keys as
the cache holds them, apart from the oracle's own code. Float64 errs by at most (D + 8) 2^-52 |a| max|k| nats here, a
2^-30th of the slack that the bounds pay for float32; a violation is counted only beyond that error, so that none can
be the checker's own. A bound that says nothing (infinite) is no check; it is counted as vacuous.

An error bound speaks of exact attention over the visited groups: the float32 rounding of `out` is apart from it.
Letters as in `attention.protocol`; P units of the pool, T tokens of a table.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.attention.layer import collect, sparse_attention
from eps_core.attention.protocol import Backend, Scores, Selection
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT, KvFormats, described
from eps_core.config.selection import HEAD_MODES
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.table import names
from experiments.bounds.hard_cases import KEY_KINDS, fill, hard_queries, make_keys, mixed_keys, unit_vectors
from experiments.bounds.truth import Filled, Truth, selection_mask, true_loss, true_masses

# every method with bounds, in each form that stores something else
BOUNDED_ARMS: tuple[dict[str, Any], ...] = (
    *({"method": name} for name in names(lambda one: not one.no_bounds)),
    *({"method": "moments", "dim": dim} for dim in (2, 4)),
    *({"method": "rq", "rq_bounds": True, "mean_tokens": tokens} for tokens in (32, 64)),
)
# bounded from codes of single keys: their bounds are made after the selection, so `run_sparse` alone checks them
KEY_CODE_ARMS: tuple[dict[str, Any], ...] = (
    {"method": "rq", "bound_bits": 8, "mean_tokens": 64},
    {"method": "rq", "bound_bits": 4, "mean_tokens": 32},
    {"method": "box", "bound_bits": 8},
    {"method": "moments", "bound_bits": 4},
    {"method": "jl", "bound_bits": 8},
    {"method": "meanstd", "bound_bits": 4},
)
CACHE_DTYPES = ("float32", "float16", "bfloat16")
# what K and V are attended in, and the bits of each: what holds of K as it is must hold of K out of codes
CACHES: tuple[tuple[str, KvFormats], ...] = (
    *((dtype, EXACT) for dtype in CACHE_DTYPES),
    ("bfloat16", (8, 8)),
    ("float32", (4, 8)),
    ("float16", ("fp8", "fp8")),
    ("bfloat16", ("nvfp4", "fp8")),
)
# shares of the softmax that float32 cannot hold count as nothing
_LEAST_SHARE = 2.0**-126


@dataclass
class Tally:
    """Outcomes of checks of one kind. `gap` is the smallest distance to a violation seen, in nats (negative: one was
    seen); `gap_in_roundings` the smallest in units of 2^-24 (1 + |a| max|k|), one float32 rounding of a logit."""

    checks: int = 0
    violations: int = 0
    vacuous: int = 0
    gap: float = math.inf
    gap_in_roundings: float = math.inf

    def add(self, other: "Tally") -> None:
        self.checks += other.checks
        self.violations += other.violations
        self.vacuous += other.vacuous
        self.gap = min(self.gap, other.gap)
        self.gap_in_roundings = min(self.gap_in_roundings, other.gap_in_roundings)


def variant_name(variant: dict[str, Any]) -> str:
    detail = f" k={variant['dim']}" if "dim" in variant else ""
    return variant["method"] + detail + (f", {variant['bound_bits']}-bit keys" if "bound_bits" in variant else "")


# --------------------------------------------------------------------------------------------------------------- checks


def check_bounds(filled: Filled, q: np.ndarray, table: np.ndarray) -> Tally:
    """lower <= log A_p <= upper of every group of full tables [B, M], for every head of q [B, Hq, D]."""
    backend, config = filled.backend, filled.config
    lengths = np.full(len(table), table.shape[1] * config.cache_config.unit_tokens)
    plan = StepPlan.of(config, table, lengths)
    scores = backend.score(filled.cache, 0, backend.from_numpy(q, "float32", filled.device), plan)
    assert scores.lower is not None and scores.upper is not None
    lower, upper = (backend.to_numpy(x).astype(np.float64) for x in (scores.lower, scores.upper))
    truth, size, error = true_masses(filled, q, table)
    assert lower.shape == upper.shape == truth.shape, (lower.shape, upper.shape, truth.shape)
    tally = _tally(np.minimum(truth - lower, upper - truth), error, np.isinf(upper - lower))
    roundings = np.minimum(truth - lower, upper - truth) / (2.0**-24 * (1 + size))
    return replace(tally, gap_in_roundings=float(roundings.min(initial=math.inf)))


def _tally(gap: np.ndarray, error: np.ndarray, vacuous: np.ndarray) -> Tally:
    """`gap` is how far the claim is from being false, in nats; NaN is a violation. What is vacuous is no check, but may
    be violated all the same."""
    gap = np.where(np.isnan(gap), -np.inf, gap)
    num_vacuous = int(vacuous.sum())
    return Tally(gap.size - num_vacuous, int((gap < -error).sum()), num_vacuous, float(gap.min(initial=math.inf)))


def check_certificate(
    filled: Filled,
    q: np.ndarray,
    table: np.ndarray,
    lengths: np.ndarray,
    scores: Scores,
    selected: Selection,
    state: tuple[Any, Any],
) -> tuple[Tally, Tally]:
    """(share, error): of every query head, what `selected` left out against what is bounded, where `state` is the
    (out, lse) that the backend read. Gaps are nats of the ratio."""
    backend, truth = filled.backend, _left_out(filled, q, table, lengths, selected)
    error_bound = backend.bound_error(filled.cache, 0, scores, selected, *state)
    return (
        _ratio(truth.share, backend.to_numpy(error_bound.mass), truth.doubt, 1.0),
        _ratio(truth.error, backend.to_numpy(error_bound.error), truth.doubt, math.inf),
    )


def _left_out(filled: Filled, q: np.ndarray, table: np.ndarray, lengths: np.ndarray, selected: Selection) -> Truth:
    groups, counts = (filled.backend.to_numpy(one) for one in (selected.groups, selected.counts))
    mask = selection_mask(groups, counts, table.shape[1] * filled.config.cache_config.groups_per_unit)
    return true_loss(filled, q, table, lengths, mask)


def _ratio(true: np.ndarray, certified: np.ndarray, doubt: np.ndarray, trivial: float) -> Tally:
    """true [B, Hkv, R] <= bounded [B, Hkv], which says nothing from `trivial` on."""
    certified = np.repeat(certified.astype(np.float64)[..., None], true.shape[2], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        # nothing left out is as bounded, and says nothing of tightness
        gap = np.where(true < _LEAST_SHARE, np.where(certified >= 0, np.inf, np.nan), np.log(certified) - np.log(true))
    vacuous = certified >= trivial
    return _tally(np.where(vacuous, np.inf, gap), doubt, vacuous)


def check_sparse(
    filled: Filled, config: EpsConfig, q: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> dict[str, Tally]:
    """One sparse step of q [B, Hq, D] under `config`, a strict one, part by part in an order of its own: `share` and
    `error` of the error bound before and after the extension, and `strict`: the true share unread is at most epsilon.
    `layer`: the same of `attention.sparse_attention`, which must visit what the parts visit."""
    backend, cache = filled.backend, filled.cache
    native = backend.from_numpy(q, "float32", filled.device)
    plan = StepPlan.of(config, table, lengths)
    scores = backend.score(cache, 0, native, plan)
    selected = backend.select(scores, plan)
    state = backend.attend(cache, 0, native, plan, selected)
    scores = backend.bounds(cache, 0, native, plan, scores, selected)
    share, error = check_certificate(filled, q, table, lengths, scores, selected, state)
    extra, whole = backend.extend_selection(config.selection_config, scores, selected, state[1])
    state = backend.merge(state, backend.attend(cache, 0, native, plan, extra))
    for tally, more in zip(
        (share, error), check_certificate(filled, q, table, lengths, scores, whole, state), strict=True
    ):
        tally.add(more)
    truth = _left_out(filled, q, table, lengths, whole)
    epsilon = np.full(truth.share.shape[:2], config.selection_config.epsilon)
    strict = _ratio(truth.share, epsilon, truth.doubt, 1.0)
    _, read = sparse_attention(backend, cache, 0, native, plan)
    (stats,), _ = collect(backend, cache, [read])
    if read.selection is None:
        layer = strict
    else:
        assert stats.skipped_mass_bound is not None
        unread = _left_out(filled, q, table, lengths, read.selection)
        layer = _ratio(unread.share, stats.skipped_mass_bound, unread.doubt, 1.0)
        layer.add(_ratio(unread.share, epsilon, unread.doubt, 1.0))
    return {"share": share, "error": error, "strict": strict, "layer": layer}


# --------------------------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trial:
    """One cache of random and hard keys. `num_units` sequences of one unit each are scored by `repeat` query heads a kv
    head; then `num_sequences` ragged ones are sparse."""

    variant: dict[str, Any]
    dtype: str
    group_size: int
    head_dim: int
    num_units: int
    repeat: int
    num_sequences: int
    seed: int
    kv_heads: int = 2
    kv_bits: KvFormats = EXACT

    @property
    def cache(self) -> str:
        """Return the cache's dtype and codes, for tables."""
        return self.dtype if self.kv_bits == EXACT else f"{self.dtype} of {described(self.dtype, self.kv_bits)}"

    def config(self, **settings: Any) -> EpsConfig:
        size, mean_tokens = self.group_size, self.variant.get("mean_tokens", 0)
        if mean_tokens and (size >= mean_tokens or mean_tokens % size):
            size = 4  # which lie in a mean's tokens
        block = size * max(1, 16 // size)
        defaults = {"group_size": size, "block_size": block, "num_sink_tokens": size, "num_recent_tokens": size}
        return EpsConfig.of(**{**self.variant, **defaults, **settings})


def run_bounds(backend: Backend, device: str, trial: Trial) -> dict[str, Tally]:
    """Bounds of groups of all kinds in one cache, each against queries made for it."""
    rng = np.random.default_rng([trial.seed, 1])
    config = trial.config()
    # the first 256 keys are of one kind, another in every trial
    per_unit, size = config.cache_config.groups_per_unit, config.cache_config.S
    units = max(trial.num_units, -(-256 // config.cache_config.unit_tokens))
    k = mixed_keys(KEY_KINDS, units * per_unit * trial.kv_heads, size, trial.head_dim, rng)
    k = k.reshape(trial.kv_heads, -1, trial.head_dim).swapaxes(0, 1)
    lead = make_keys(str(rng.choice(KEY_KINDS)), trial.kv_heads, 256, trial.head_dim, rng).swapaxes(0, 1)
    k[:256] = lead[: len(k)]
    v = np.ones_like(k)
    cut = int(rng.integers(1, len(k))) if rng.integers(4) == 0 else None
    filled = fill(backend, device, config, trial.dtype, np.ascontiguousarray(k), v, cut, trial.kv_bits)
    table = rng.permutation(units)[: trial.num_units, None]
    return {"bounds": check_bounds(filled, hard_queries(filled, table[:, 0], trial.repeat, rng), table)}


SPARSE_KINDS = ("gauss", "shifted", "equal", "outlier", "rank one", "antipodal", "mixed scales", "code edge")


def run_sparse(backend: Backend, device: str, trial: Trial) -> dict[str, Tally]:
    """Error bounds and strict mode over ragged sequences of keys of one kind; queries towards keys that are mostly
    unread, of logits that leave something to bound."""
    rng = np.random.default_rng([trial.seed, 2])
    config = random_policy(trial, rng)
    num_tokens = max(512 // config.cache_config.unit_tokens, 12) * config.cache_config.unit_tokens
    groups = num_tokens // config.cache_config.S
    num_groups = groups * trial.kv_heads
    kind = str(rng.choice(SPARSE_KINDS))
    k = make_keys(kind, num_groups, config.cache_config.S, trial.head_dim, rng)
    # groups far apart and tight within, where error bounds bite; at other times as they come
    if rng.integers(2):
        k = k * np.float32(0.05) + rng.normal(size=(num_groups, 1, trial.head_dim)).astype(np.float32)
    k = k.reshape(trial.kv_heads, num_tokens, trial.head_dim).swapaxes(0, 1)
    v = rng.normal(size=k.shape).astype(np.float32) * 10.0 ** rng.uniform(-2, 2)
    # at times in two writes, the first shorter than what a centroid of key codes waits for
    cut = int(rng.integers(1, 256)) if rng.integers(3) == 0 else None
    filled = fill(backend, device, config, trial.dtype, np.ascontiguousarray(k), v, cut, trial.kv_bits)
    units = len(filled.k)
    lengths = rng.integers(num_tokens // 2, num_tokens + 1, trial.num_sequences)
    lengths[: len(lengths) // 3] = num_tokens
    table = np.stack([rng.permutation(units) for _ in lengths])
    a = rng.normal(size=(len(lengths), trial.kv_heads, trial.repeat, trial.head_dim))
    target = rng.integers(0, num_tokens, a.shape[:3])
    towards = filled.k.swapaxes(1, 2).reshape(-1, trial.kv_heads, trial.head_dim)
    towards = towards[target, np.arange(trial.kv_heads)[:, None]]
    a = np.where(rng.integers(0, 2, (*a.shape[:3], 1)) > 0, towards, a)
    largest = np.linalg.norm(filled.k, axis=-1).max()
    a = unit_vectors(a) * 10.0 ** rng.uniform(-1, 2, (*a.shape[:3], 1)) / largest
    q = (a * math.sqrt(trial.head_dim)).astype(np.float32).reshape(len(lengths), -1, trial.head_dim)
    return check_sparse(filled, config, q, table, lengths)


def random_policy(trial: Trial, rng: np.random.Generator) -> EpsConfig:
    """A strict config of any budget, scope and epsilon."""
    modes = tuple(rng.choice(HEAD_MODES, trial.kv_heads).tolist()) if rng.integers(3) == 0 else None
    return trial.config(
        head_modes=None if modes is None else (modes,),
        budget=float(rng.choice([0.05, 0.1, 0.3])),
        scope=str(rng.choice(["kv-head", "union"])),
        epsilon=float(rng.choice([0, 1e-4, 1e-3, 1e-2, 0.1, 0.5])),
        strict=True,
    )


def run_capture(
    backend: Backend, device: str, trial: Trial, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> dict[str, Tally]:
    """The same checks of a real layer: q [steps, Hq, D] unscaled over k, v [T, Hkv, D] of one sequence."""
    rng = np.random.default_rng([trial.seed, 3])
    config = random_policy(trial, rng)
    num_tokens = len(k) // config.cache_config.unit_tokens * config.cache_config.unit_tokens
    filled = fill(backend, device, config, trial.dtype, k[:num_tokens], v[:num_tokens], kv_bits=trial.kv_bits)
    table = np.repeat(np.arange(len(filled.k))[None], len(q), axis=0)
    bounds = {"bounds": check_bounds(filled, q, table)} if config.cache_config.own_bounds else {}
    few = slice(0, trial.num_sequences)
    lengths = num_tokens - rng.integers(0, num_tokens // 4, len(q[few]))
    return {**bounds, **check_sparse(filled, config, q[few], table[few], lengths)}
