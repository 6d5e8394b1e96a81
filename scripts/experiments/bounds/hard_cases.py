"""Keys and queries that are hard for summaries: where rounding, cancellation and bounds that are attained meet.

Letters as in `attention.protocol`; P units of the pool.
"""

import math
from collections.abc import Sequence

import numpy as np

from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT, KvFormats
from eps_core.summaries.rq import decode_units, rotate
from experiments.bounds.truth import Filled

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


def make_keys(kind: str, groups: int, group_size: int, head_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Keys [groups, S, D] float32, hard in the way of `KEY_KINDS`."""
    shape = (groups, group_size, head_dim)
    k, mean = rng.normal(size=shape), rng.normal(size=(groups, 1, head_dim))
    if kind == "shifted":
        k += 5 * mean
    elif kind == "far":
        k = 300 * rng.normal(size=head_dim) + mean + 10.0 ** rng.uniform(-4, 0, (groups, 1, 1)) * k
    elif kind == "equal":
        k[:] = mean
    elif kind == "outlier":
        k[:, rng.integers(group_size)] *= 40
        k[..., rng.integers(head_dim)] += 30
    elif kind == "huge":
        k *= 10.0 ** rng.uniform(2, 2.7, (groups, 1, 1))
    elif kind == "tiny":
        k *= 10.0 ** rng.uniform(-6, -2, (groups, 1, 1))
    elif kind == "vanishing":
        k *= 10.0 ** rng.uniform(-30, -7, (groups, 1, 1))
    elif kind == "rank one":
        k = rng.normal(size=(groups, group_size, 1)) * mean
    elif kind == "antipodal":
        k = np.where(np.arange(group_size)[:, None] % 2, -mean, mean) + 1e-3 * k
    elif kind == "code edge":
        codes = rng.integers(-126, 126, (groups, 1, head_dim)) + rng.choice([0.0, 0.5], (groups, 1, head_dim))
        codes[..., 0] = 127
        scale = np.float16(2.0 ** rng.uniform(-8, 2, (groups, 1, 1))).astype(np.float64)
        k = (codes * scale * (1 + rng.integers(-2, 3, shape) * 2.0**-24)).astype(np.float32)
    elif kind == "half edge":
        norm = (2048 + 2 * rng.integers(0, 1024, (groups, group_size, 1)) + 1) / 4096 * 2.0 ** rng.integers(-6, 9)
        k *= norm / np.linalg.norm(k, axis=2, keepdims=True) * (1 + rng.integers(-2, 3, norm.shape) * 2.0**-24)
    elif kind == "mixed scales":
        k *= 10.0 ** rng.uniform(-3, 2, (groups, 1, head_dim)) * 10.0 ** rng.uniform(-1, 1, (groups, group_size, 1))
    elif kind == "zero":
        k[:] = 0
    return k.astype(np.float32)


def mixed_keys(
    kinds: Sequence[str], groups: int, group_size: int, head_dim: int, rng: np.random.Generator
) -> np.ndarray:
    """Keys [groups, S, D], group by group of a kind drawn from `kinds`."""
    k = np.empty((groups, group_size, head_dim), np.float32)
    drawn = rng.integers(0, len(kinds), groups)
    for i, kind in enumerate(kinds):
        if (drawn == i).any():
            k[drawn == i] = make_keys(kind, int((drawn == i).sum()), group_size, head_dim, rng)
    return k


def fill(
    backend: Backend,
    device: str,
    config: EpsConfig,
    dtype: str,
    k: np.ndarray,
    v: np.ndarray,
    cut: int | None = None,
    kv_bits: KvFormats = EXACT,
) -> Filled:
    """Writes k, v [T, Hkv, D] to the first slots of a new cache, in two calls where `cut` says where."""
    num_tokens, kv_heads, head_dim = k.shape
    units = -(-num_tokens // config.cache_config.unit_tokens)
    spec = CacheSpec(1, kv_heads, head_dim, units, dtype, k_bits=kv_bits[0], v_bits=kv_bits[1])
    cache = backend.new_cache(spec, config.cache_config, device)
    for rows in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        keys, values = (backend.from_numpy(np.ascontiguousarray(x[rows]), "float32", device) for x in (k, v))
        cache = backend.write_kv(cache, 0, keys, values, np.arange(num_tokens)[rows])
    stored = backend.read_kv(cache, 0, np.arange(units), num_tokens)
    pad = ((0, units * config.cache_config.unit_tokens - num_tokens), (0, 0), (0, 0))
    keys, values = (
        np.pad(backend.to_numpy(x).astype(np.float64), pad)
        .reshape(units, config.cache_config.unit_tokens, kv_heads, head_dim)
        .swapaxes(1, 2)
        for x in stored
    )
    return Filled(backend, device, config, cache, keys, values)


def unit_vectors(x: np.ndarray) -> np.ndarray:
    """x over its length, along the last axis; zeros stay."""
    # by the largest entry first: squares of tiny keys vanish
    x = x / np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-300)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300)


def _top_direction(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Nearly the top right singular direction [.., D] of x [.., n, D], by power iteration: close is hard enough."""
    x = x / np.maximum(np.abs(x).max(axis=(-1, -2), keepdims=True), 1e-300)
    direction = rng.normal(size=(*x.shape[:-2], x.shape[-1]))
    for _ in range(6):
        direction = unit_vectors(np.einsum("...nd,...n->...d", x, np.einsum("...nd,...d->...n", x, direction)))
    return direction


def _stored(filled: Filled, unit: np.ndarray, sub: np.ndarray) -> dict[str, np.ndarray]:
    """The summaries of one group of every (sequence, kv head), with those of all groups that are summarised with it:
    fields [B, Hkv, ..]; unit, sub [B, Hkv]."""
    heads, together = np.arange(filled.k.shape[1]), filled.config.cache_config.groups_per_span
    return {
        name: filled.backend.to_numpy(array)[unit, heads, sub // together]
        for name, array in filled.cache.summaries[0].items()
    }  # fmt: skip


def _stored_mean(filled: Filled, stored: dict[str, np.ndarray], sub: np.ndarray) -> np.ndarray | None:
    """The group mean [B, Hkv, D] as the summary holds it, of group `sub` [B, Hkv] of its unit; None where it holds
    none."""
    config, head_dim = filled.config, filled.k.shape[-1]
    if config.cache_config.mean_tokens:
        means = decode_units(config.cache_config, stored, head_dim)
        turned = np.take_along_axis(means, (sub % config.cache_config.groups_per_span)[..., None, None], axis=2)[
            :, :, 0
        ]
        return turned @ rotate(np.eye(head_dim), config.cache_config.seed).T
    if "mean" in stored:
        return stored["mean"].astype(np.float64) * stored["mean_scale"].astype(np.float64)[..., None]
    return None


def hard_queries(filled: Filled, units: np.ndarray, repeat: int, rng: np.random.Generator) -> np.ndarray:
    """q [B, Hkv * R, D] float32, unscaled: each of a kind of `QUERY_KINDS` against one group of unit units[b], made
    from its keys and from what its summary says, of logits between 1e-8 and past float32's range."""
    batch, (_, kv_heads, _, head_dim) = len(units), filled.k.shape
    size = filled.config.cache_config.S
    unit = np.repeat(units[:, None], kv_heads, axis=1)
    sub = rng.integers(0, filled.config.cache_config.groups_per_unit, unit.shape)
    heads = np.arange(kv_heads)
    tiles = filled.k[unit, heads].reshape(batch, kv_heads, -1, size, head_dim)
    keys = tiles[np.arange(batch)[:, None], heads, sub]  # [B, Hkv, S, D]
    stored = _stored(filled, unit, sub)
    mean = keys.mean(axis=2)
    known = _stored_mean(filled, stored, sub)
    about = mean if known is None else known

    def farthest(origin: np.ndarray) -> np.ndarray:
        gaps = keys - origin[:, :, None]
        index = np.linalg.norm(gaps, axis=-1).argmax(axis=-1)
        return np.take_along_axis(gaps, index[..., None, None], axis=2)[:, :, 0]

    kept = stored.get("direction", stored.get("rows"))
    rest = keys - mean[:, :, None] if "rho" in stored else keys  # directions about the mean
    if kept is not None:
        kept = unit_vectors(kept.reshape(batch, kv_heads, -1, head_dim).astype(np.float64))
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
    table = np.stack([unit_vectors(directions[kind]) for kind in QUERY_KINDS])  # [kinds, B, Hkv, D]
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
