"""Checks of what is claimed to hold for every query: bounds, certificates and strict mode, against float64.

A backend builds summaries of keys, scores them and certifies; the truth is computed here in float64 from the keys as
the cache holds them, apart from the oracle's own code. Float64 errs by at most (D + 8) 2^-52 |a| max|k| nats here, a
2^-30th of the slack that the bounds pay for float32; a violation is counted only beyond that error, so that none can
be the checker's own. A bound that says nothing (infinite) is no check; it is counted as vacuous.

What a certificate speaks of is exact attention over the visited groups: the float32 rounding of `out` is apart from it.
Letters as in `gate.protocol`; P units of the pool, T tokens of a table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import HEAD_MODES
from eps_core.config.store import CacheSpec
from eps_core.gate.attend import attend_layer, collect
from eps_core.gate.protocol import Backend, Scores, Selection
from eps_core.oracle.truth import Filled, true_loss, true_masses, visit_mask
from eps_core.paging.where import Where
from eps_core.summaries.rq import decode_rq, rotate
from eps_core.summaries.table import names

# every method with bounds, in each form that stores something else
BOUNDED_ARMS: tuple[dict[str, Any], ...] = (
    *({"method": name} for name in names(lambda one: not one.no_bounds)),
    *({"method": "moments", "dim": dim} for dim in (2, 4)),
    *({"method": "rq", "rq_bounds": True, "bits": bits} for bits in (1, 2, 4, 8)),
)
# certified from codes of single keys: their bounds are made after the selection, so the gate alone checks them
KEY_CODE_ARMS: tuple[dict[str, Any], ...] = (
    {"method": "rq", "bound_bits": 8},
    {"method": "rq", "bound_bits": 4},
    {"method": "box", "bound_bits": 8},
    {"method": "moments", "bound_bits": 4},
    {"method": "jl", "bound_bits": 8},
    {"method": "meanstd", "bound_bits": 4},
)
CACHE_DTYPES = ("float32", "float16", "bfloat16")
KEY_KINDS = (
    "gauss",
    "shifted",  # a mean much larger than the spread
    "far",  # a mean so large that float32 hardly resolves the spread
    "equal",
    "outlier",
    "huge",
    "tiny",
    "vanishing",  # below what a float16 scalar can say
    "rank one",
    "antipodal",  # k and -k: the mean is nearly 0
    "code edge",  # halfway between two int8 codes, an ulp to either side
    "half edge",  # norms halfway between two float16 numbers
    "mixed scales",  # by channel and by key
    "zero",
)
QUERY_KINDS = (
    "gauss",
    "key",  # along a key of the group
    "mean",
    "spread",  # from the mean to the farthest key
    "rounding",  # along what rounding did to the stored mean, or to the codes of box
    "radius",  # from the stored mean to the farthest key: where |a| radius is attained
    "stored",  # along a stored direction: differences cancel
    "residual",  # along the top direction that the summary did not keep
    "channel",
    "zero",
)
# logits that a hard query makes, as powers of ten; the rarest pass float32's range when squared
_LOGIT_POWERS = (-8, -2, 0, 1, 2, 3, 5, 8, 25)
_LOGIT_CHANCES = (0.04, 0.06, 0.15, 0.25, 0.2, 0.14, 0.1, 0.04, 0.02)
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


def arm_name(arm: dict[str, Any]) -> str:
    detail = f" k={arm['dim']}" if "dim" in arm else f" {arm['bits']} bit" if "bits" in arm else ""
    return arm["method"] + detail + (f", {arm['bound_bits']}-bit keys" if "bound_bits" in arm else "")


# ----------------------------------------------------------------------------------------------------------------- data


def make_keys(kind: str, groups: int, group_tokens: int, head_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Keys [groups, S, D] float32, hard in the way of `KEY_KINDS`."""
    shape = (groups, group_tokens, head_dim)
    k, mean = rng.normal(size=shape), rng.normal(size=(groups, 1, head_dim))
    if kind == "shifted":
        k += 5 * mean
    elif kind == "far":
        k = 300 * rng.normal(size=head_dim) + mean + 10.0 ** rng.uniform(-4, 0, (groups, 1, 1)) * k
    elif kind == "equal":
        k[:] = mean
    elif kind == "outlier":
        k[:, rng.integers(group_tokens)] *= 40
        k[..., rng.integers(head_dim)] += 30
    elif kind == "huge":
        k *= 10.0 ** rng.uniform(2, 2.7, (groups, 1, 1))
    elif kind == "tiny":
        k *= 10.0 ** rng.uniform(-6, -2, (groups, 1, 1))
    elif kind == "vanishing":
        k *= 10.0 ** rng.uniform(-30, -7, (groups, 1, 1))
    elif kind == "rank one":
        k = rng.normal(size=(groups, group_tokens, 1)) * mean
    elif kind == "antipodal":
        k = np.where(np.arange(group_tokens)[:, None] % 2, -mean, mean) + 1e-3 * k
    elif kind == "code edge":
        codes = rng.integers(-126, 126, (groups, 1, head_dim)) + rng.choice([0.0, 0.5], (groups, 1, head_dim))
        codes[..., 0] = 127
        scale = np.float16(2.0 ** rng.uniform(-8, 2, (groups, 1, 1))).astype(np.float64)
        k = (codes * scale * (1 + rng.integers(-2, 3, shape) * 2.0**-24)).astype(np.float32)
    elif kind == "half edge":
        norm = (2048 + 2 * rng.integers(0, 1024, (groups, group_tokens, 1)) + 1) / 4096 * 2.0 ** rng.integers(-6, 9)
        k *= norm / np.linalg.norm(k, axis=2, keepdims=True) * (1 + rng.integers(-2, 3, norm.shape) * 2.0**-24)
    elif kind == "mixed scales":
        k *= 10.0 ** rng.uniform(-3, 2, (groups, 1, head_dim)) * 10.0 ** rng.uniform(-1, 1, (groups, group_tokens, 1))
    elif kind == "zero":
        k[:] = 0
    return k.astype(np.float32)


def mixed_keys(
    kinds: Sequence[str], groups: int, group_tokens: int, head_dim: int, rng: np.random.Generator
) -> np.ndarray:
    """Keys [groups, S, D], group by group of a kind drawn from `kinds`."""
    k = np.empty((groups, group_tokens, head_dim), np.float32)
    drawn = rng.integers(0, len(kinds), groups)
    for i, kind in enumerate(kinds):
        if (drawn == i).any():
            k[drawn == i] = make_keys(kind, int((drawn == i).sum()), group_tokens, head_dim, rng)
    return k


def fill(
    backend: Backend,
    device: str,
    config: EpsConfig,
    dtype: str,
    k: np.ndarray,
    v: np.ndarray,
    cut: int | None = None,
) -> Filled:
    """Writes k, v [T, Hkv, D] to the first slots of a new cache, in two calls where `cut` says where."""
    num_tokens, kv_heads, head_dim = k.shape
    units = -(-num_tokens // config.store.unit_tokens)
    cache = backend.new_cache(CacheSpec(1, kv_heads, head_dim, units, dtype), config.store, device)
    for rows in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        keys, values = (backend.from_numpy(np.ascontiguousarray(x[rows]), "float32", device) for x in (k, v))
        cache = backend.write_kv(cache, 0, keys, values, np.arange(num_tokens)[rows])
    stored = backend.read_kv(cache, 0, np.arange(units), num_tokens)
    pad = ((0, units * config.store.unit_tokens - num_tokens), (0, 0), (0, 0))
    keys, values = (
        np.pad(backend.to_numpy(x).astype(np.float64), pad)
        .reshape(units, config.store.unit_tokens, kv_heads, head_dim)
        .swapaxes(1, 2)
        for x in stored
    )
    return Filled(backend, device, config, cache, keys, values)


def _unit(x: np.ndarray) -> np.ndarray:
    """x over its length, along the last axis; zeros stay."""
    # by the largest entry first: squares of tiny keys vanish
    x = x / np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-300)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300)


def _top_direction(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Nearly the top right singular direction [.., D] of x [.., n, D], by power iteration: close is hard enough."""
    x = x / np.maximum(np.abs(x).max(axis=(-1, -2), keepdims=True), 1e-300)
    direction = rng.normal(size=(*x.shape[:-2], x.shape[-1]))
    for _ in range(6):
        direction = _unit(np.einsum("...nd,...n->...d", x, np.einsum("...nd,...d->...n", x, direction)))
    return direction


def _stored(filled: Filled, unit: np.ndarray, sub: np.ndarray) -> dict[str, np.ndarray]:
    """The summaries of one group of every (sequence, kv head): fields [B, Hkv, ..]; unit, sub [B, Hkv]."""
    heads = np.arange(filled.k.shape[1])
    return {
        name: filled.backend.to_numpy(array)[unit, heads, sub]
        for name, array in filled.cache.summaries[0].items()
    }  # fmt: skip


def _stored_mean(filled: Filled, stored: dict[str, np.ndarray]) -> np.ndarray | None:
    """The group mean [B, Hkv, D] as the summary holds it; None where it holds none."""
    config, head_dim = filled.config, filled.k.shape[-1]
    if config.store.facts.coded:
        turned = decode_rq(stored["codes"], stored["scale"], config.store.bits, head_dim)
        centre = filled.backend.to_numpy(filled.cache.centre[0]).astype(np.float64)
        return centre + turned @ rotate(np.eye(head_dim), config.store.seed).T
    if "mean" in stored:
        return stored["mean"].astype(np.float64) * stored["mean_scale"].astype(np.float64)[..., None]
    return None


def hard_queries(filled: Filled, units: np.ndarray, repeat: int, rng: np.random.Generator) -> np.ndarray:
    """q [B, Hkv * R, D] float32, unscaled: each of a kind of `QUERY_KINDS` against one group of unit units[b], made
    from its keys and from what its summary says, of logits between 1e-8 and past float32's range."""
    batch, (_, kv_heads, _, head_dim) = len(units), filled.k.shape
    size = filled.config.store.S
    unit = np.repeat(units[:, None], kv_heads, axis=1)
    sub = rng.integers(0, filled.config.store.groups_per_unit, unit.shape)
    heads = np.arange(kv_heads)
    tiles = filled.k[unit, heads].reshape(batch, kv_heads, -1, size, head_dim)
    keys = tiles[np.arange(batch)[:, None], heads, sub]  # [B, Hkv, S, D]
    stored = _stored(filled, unit, sub)
    mean = keys.mean(axis=2)
    known = _stored_mean(filled, stored)
    about = mean if known is None else known

    def farthest(origin: np.ndarray) -> np.ndarray:
        gaps = keys - origin[:, :, None]
        index = np.linalg.norm(gaps, axis=-1).argmax(axis=-1)
        return np.take_along_axis(gaps, index[..., None, None], axis=2)[:, :, 0]

    kept = stored.get("direction", stored.get("rows"))
    rest = keys - mean[:, :, None] if "rho" in stored else keys  # directions about the mean
    if kept is not None:
        kept = _unit(kept.reshape(batch, kv_heads, -1, head_dim).astype(np.float64))
        for j in range(kept.shape[2]):
            along = kept[:, :, j]
            rest = rest - np.einsum("bhnd,bhd->bhn", rest, along)[..., None] * along[:, :, None]
        chosen = kept[:, :, rng.integers(kept.shape[2])]
    else:
        chosen = about
    if "hi" in stored:
        rounding = stored["hi"] * stored["scale"].astype(np.float64)[..., None] - keys.max(axis=2)
    else:
        rounding = mean - about if known is not None else rest[:, :, 0]
    picked = rng.integers(0, size, (batch, kv_heads, 1, 1))
    directions = {
        "gauss": rng.normal(size=mean.shape),
        "key": np.take_along_axis(keys, picked, axis=2)[:, :, 0],
        "mean": mean,
        "spread": farthest(mean),
        "rounding": rounding,
        "radius": farthest(about),
        "stored": chosen,
        "residual": _top_direction(rest, rng),
        "channel": np.eye(head_dim)[rng.integers(0, head_dim, (batch, kv_heads))],
        "zero": np.zeros_like(mean),
    }
    table = np.stack([_unit(directions[kind]) for kind in QUERY_KINDS])  # [kinds, B, Hkv, D]
    shape = (batch, kv_heads, repeat)
    # zero says little: a fifth of the others' chance
    chances = np.array([0.2 if kind == "zero" else 1.0 for kind in QUERY_KINDS])
    kind = rng.choice(len(QUERY_KINDS), shape, p=chances / chances.sum())
    a = table[kind, np.arange(batch)[:, None, None], heads[:, None]]
    # a third a little off their direction, so that nothing cancels exactly
    a = a + rng.normal(size=(*shape, head_dim)) * rng.choice([0, 0, 1e-4, 1e-1], (*shape, 1)) / math.sqrt(head_dim)
    logit = 10.0 ** rng.choice(_LOGIT_POWERS, shape, p=_LOGIT_CHANCES) * rng.uniform(0.3, 3, shape)
    largest = np.maximum(np.linalg.norm(keys, axis=-1).max(axis=-1), 1e-6)
    a *= (rng.choice([-1.0, 1.0], shape) * logit / largest[..., None])[..., None]
    q = np.clip(a * math.sqrt(head_dim), -1e30, 1e30)
    return q.reshape(batch, kv_heads * repeat, head_dim).astype(np.float32)


# --------------------------------------------------------------------------------------------------------------- checks


def check_bounds(filled: Filled, q: np.ndarray, table: np.ndarray) -> Tally:
    """lower <= log A_p <= upper of every group of full tables [B, M], for every head of q [B, Hq, D]."""
    backend, config = filled.backend, filled.config
    lengths = np.full(len(table), table.shape[1] * config.store.unit_tokens)
    where = Where.of(config, table, lengths)
    scores = backend.score(filled.cache, 0, backend.from_numpy(q, "float32", filled.device), where)
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
    visited: Selection,
    state: tuple[Any, Any],
) -> tuple[Tally, Tally]:
    """(share, error): of every query head, what `visited` left out against what is certified, where `state` is the
    (out, lse) that the backend read. Gaps are nats of the ratio."""
    backend = filled.backend
    certificate = backend.certify(filled.cache, 0, scores, visited, *state)
    num_groups = table.shape[1] * filled.config.store.groups_per_unit
    visit = visit_mask(backend.to_numpy(visited.groups), backend.to_numpy(visited.counts), num_groups)
    truth = true_loss(filled, q, table, lengths, visit)
    return (
        _ratio(truth.share, backend.to_numpy(certificate.mass), truth.doubt, 1.0),
        _ratio(truth.error, backend.to_numpy(certificate.error), truth.doubt, math.inf),
    )


def _ratio(true: np.ndarray, certified: np.ndarray, doubt: np.ndarray, trivial: float) -> Tally:
    """true [B, Hkv, R] <= certified [B, Hkv], which says nothing from `trivial` on."""
    certified = np.repeat(certified.astype(np.float64)[..., None], true.shape[2], axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        # nothing left out is as certified, and says nothing of tightness
        gap = np.where(true < _LEAST_SHARE, np.where(certified >= 0, np.inf, np.nan), np.log(certified) - np.log(true))
    vacuous = certified >= trivial
    return _tally(np.where(vacuous, np.inf, gap), doubt, vacuous)


def check_gate(
    filled: Filled, config: EpsConfig, q: np.ndarray, table: np.ndarray, lengths: np.ndarray
) -> dict[str, Tally]:
    """One gated step of q [B, Hq, D] under `config`, a strict one, part by part in an order of its own: `share` and
    `error` of the certificate before and after the escalation, and `strict`: the true share unread is at most epsilon.
    `layer`: the same of `gate.attend_layer`, which must visit what the parts visit."""
    backend, cache = filled.backend, filled.cache
    native = backend.from_numpy(q, "float32", filled.device)
    where = Where.of(config, table, lengths)
    scores = backend.score(cache, 0, native, where)
    selected = backend.select(scores, where)
    state = backend.attend(cache, 0, native, where, selected)
    scores = backend.bounds(cache, 0, native, where, scores, selected)
    share, error = check_certificate(filled, q, table, lengths, scores, selected, state)
    extra, whole = backend.escalate(config.read, scores, selected, state[1])
    state = backend.merge(state, backend.attend(cache, 0, native, where, extra))
    for tally, more in zip(
        (share, error), check_certificate(filled, q, table, lengths, scores, whole, state), strict=True
    ):
        tally.add(more)
    groups, counts = backend.to_numpy(whole.groups), backend.to_numpy(whole.counts)
    visit = visit_mask(groups, counts, table.shape[1] * config.store.groups_per_unit)
    truth = true_loss(filled, q, table, lengths, visit)
    strict = _ratio(truth.share, np.full(counts.shape, config.read.epsilon), truth.doubt, 1.0)
    _, read = attend_layer(backend, cache, 0, native, where)
    (stats,), _ = collect(backend, cache, [read])
    layer = _ratio(truth.share, np.full(counts.shape, config.read.epsilon), truth.doubt, 1.0)
    if read.selection is not None:
        visit = visit_mask(
            backend.to_numpy(read.selection.groups), backend.to_numpy(read.selection.counts), visit.shape[2]
        )
        assert stats.mass_skipped_cert is not None
        unread = true_loss(filled, q, table, lengths, visit)
        layer = _ratio(unread.share, stats.mass_skipped_cert, unread.doubt, 1.0)
        layer.add(_ratio(unread.share, np.full(counts.shape, config.read.epsilon), unread.doubt, 1.0))
    return {"share": share, "error": error, "strict": strict, "layer": layer}


# --------------------------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trial:
    """One cache of random and hard keys. `num_units` sequences of one unit each are scored by `repeat` query heads a kv
    head; then `num_sequences` ragged ones are gated."""

    arm: dict[str, Any]
    dtype: str
    group_tokens: int
    head_dim: int
    num_units: int
    repeat: int
    num_sequences: int
    seed: int
    kv_heads: int = 2

    def config(self, **settings: Any) -> EpsConfig:
        size = self.group_tokens
        block = size * max(1, 16 // size)
        defaults = {"group_tokens": size, "block_size": block, "first_tokens": size, "last_tokens": size}
        defaults["tail_tokens"] = 0  # not part of what is certified
        return EpsConfig.of(**{**self.arm, **defaults, **settings})


def run_bounds(backend: Backend, device: str, trial: Trial) -> dict[str, Tally]:
    """Bounds of groups of all kinds in one cache, each against queries made for it."""
    rng = np.random.default_rng([trial.seed, 1])
    config = trial.config()
    # the first 256 keys make rq's centre: of one kind, another in every trial
    per_unit, size = config.store.groups_per_unit, config.store.S
    units = max(trial.num_units, -(-256 // config.store.unit_tokens))
    k = mixed_keys(KEY_KINDS, units * per_unit * trial.kv_heads, size, trial.head_dim, rng)
    k = k.reshape(trial.kv_heads, -1, trial.head_dim).swapaxes(0, 1)
    lead = make_keys(str(rng.choice(KEY_KINDS)), trial.kv_heads, 256, trial.head_dim, rng).swapaxes(0, 1)
    k[:256] = lead[: len(k)]
    v = np.ones_like(k)
    cut = int(rng.integers(1, len(k))) if rng.integers(4) == 0 else None
    filled = fill(backend, device, config, trial.dtype, np.ascontiguousarray(k), v, cut)
    table = rng.permutation(units)[: trial.num_units, None]
    return {"bounds": check_bounds(filled, hard_queries(filled, table[:, 0], trial.repeat, rng), table)}


GATED_KINDS = ("gauss", "shifted", "equal", "outlier", "rank one", "antipodal", "mixed scales", "code edge")


def run_gate(backend: Backend, device: str, trial: Trial) -> dict[str, Tally]:
    """Certificates and strict mode over ragged sequences of keys of one kind; queries towards keys that are mostly
    unread, of logits that leave something to certify."""
    rng = np.random.default_rng([trial.seed, 2])
    config = random_policy(trial, rng)
    num_tokens = max(512 // config.store.unit_tokens, 12) * config.store.unit_tokens
    groups = num_tokens // config.store.S
    num_groups = groups * trial.kv_heads
    kind = str(rng.choice(GATED_KINDS))
    k = make_keys(kind, num_groups, config.store.S, trial.head_dim, rng)
    # groups far apart and tight within, where certificates bite; at other times as they come
    if rng.integers(2):
        k = k * np.float32(0.05) + rng.normal(size=(num_groups, 1, trial.head_dim)).astype(np.float32)
    k = k.reshape(trial.kv_heads, num_tokens, trial.head_dim).swapaxes(0, 1)
    v = rng.normal(size=k.shape).astype(np.float32) * 10.0 ** rng.uniform(-2, 2)
    # at times in two writes, the first shorter than what rq's centre waits for
    cut = int(rng.integers(1, 256)) if rng.integers(3) == 0 else None
    filled = fill(backend, device, config, trial.dtype, np.ascontiguousarray(k), v, cut)
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
    a = _unit(a) * 10.0 ** rng.uniform(-1, 2, (*a.shape[:3], 1)) / largest
    q = (a * math.sqrt(trial.head_dim)).astype(np.float32).reshape(len(lengths), -1, trial.head_dim)
    return check_gate(filled, config, q, table, lengths)


def random_policy(trial: Trial, rng: np.random.Generator) -> EpsConfig:
    """A strict config of any policy, scope and epsilon."""
    policy = str(rng.choice(["topk", "share", "mass"]))
    modes = tuple(rng.choice(HEAD_MODES, trial.kv_heads).tolist()) if rng.integers(3) == 0 else None
    return trial.config(
        head_modes=None if modes is None else (modes,),
        policy=policy,
        budget=float(rng.choice([0.05, 0.1, 0.3])),
        tau=0.01 if policy == "share" else None,
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
    num_tokens = len(k) // config.store.unit_tokens * config.store.unit_tokens
    filled = fill(backend, device, config, trial.dtype, k[:num_tokens], v[:num_tokens])
    table = np.repeat(np.arange(len(filled.k))[None], len(q), axis=0)
    bounds = {"bounds": check_bounds(filled, q, table)} if config.store.own_bounds else {}
    few = slice(0, trial.num_sequences)
    lengths = num_tokens - rng.integers(0, num_tokens // 4, len(q[few]))
    return {**bounds, **check_gate(filled, config, q[few], table[few], lengths)}
