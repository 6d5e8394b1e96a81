"""Rotated quantised mean (ours): the sign of each dimension of each group's mean, about the mean of the unit of tokens
that the group lies in, read in stages."""

import math

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE, MEAN_MOST
from eps_core.summaries.rq import PARTS, QUERY_STEPS, SECOND_STEP, hadamard_blocks, part_dims

# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(ops: Ops, x: Array, signs: Array) -> Array:
    """`eps_core.summaries.rq.rotate` over the last axis. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for a compiler that may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    for own in signs:
        x = x * own
        pieces, start = [], 0
        for size in hadamard_blocks(head_dim):
            block, half = x[..., start : start + size], size // 2
            while half:
                pairs = block.reshape(*lead, size // (2 * half), 2, half)
                first, second = pairs[..., 0, :], pairs[..., 1, :]
                block = ops.stack([first + second, first - second], axis=-2).reshape(*lead, size)
                half //= 2
            pieces.append(block * float(np.float32(1 / math.sqrt(size))))
            start += size
        x = ops.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]
    return x


def pack_codes(ops: Ops, codes: Array, bits: int) -> Array:
    """codes [.., D] in 0 .. 2^bits - 1 -> uint8 [.., ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit
    i*bits % 8."""
    per_byte = 8 // bits
    codes = ops.pad(ops.int32(codes), -codes.shape[-1] % per_byte)
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
    return ops.uint8((parts << ops.arange(codes, 0, 8, bits)).sum(axis=-1))


def unpack_codes(ops: Ops, packed: Array, bits: int, head_dim: int) -> Array:
    """The inverse of `pack_codes`: uint8 [.., D]."""
    shifts = ops.uint8(ops.arange(packed, 0, 8, bits))
    parts = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :head_dim]


def levels_of(ops: Ops, codes: Array, bits: int, has_zero: bool = False) -> Array:
    """Codes as the float32 numbers that the scale multiplies: 0 is one of them where it `has_zero`."""
    wide, middle = ops.float32(codes), 2 ** (bits - 1) - (0 if has_zero else 0.5)
    return 2 * wide - 1 if bits == 1 else wide - middle


def tree_sum(ops: Ops, x: Array) -> Array:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = ops.concatenate([paired, odd], axis=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def scale_of(ops: Ops, x: Array, levels: Array) -> Array:
    """The factor [..] of levels [.., D] that makes <x_hat, x> = |x|^2 (RaBitQ's estimator), float16."""
    product = (x * levels).sum(axis=-1)
    return ops.near16(ops.where(product > 0, (x * x).sum(axis=-1) / ops.where(product > 0, product, 1), 0))


def _second_bit(ops: Ops, x: Array, levels: Array) -> tuple[Array, Array]:
    """The rescoring bits [.., D] of signs `levels` of x [.., D], and their scale [..]."""
    step = tree_sum(ops, ops.abs(x)[..., None]) * float(np.float32(SECOND_STEP / x.shape[-1]))
    second = ops.uint8((x >= step) | ((x < 0) & (x >= -step)))
    return second, scale_of(ops, x, levels + 0.5 * levels_of(ops, second, 1))


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Return the fields of `eps_core.summaries.rq` of all groups of a mean: k [.., Hkv, U, D]."""
    signs = constants["signs"]
    by_group = k.reshape(*k.shape[:-2], -1, cache_config.S, k.shape[-1])
    turned = rotate(ops, tree_sum(ops, by_group) * (1 / cache_config.S), signs)  # [.., Hkv, N, D]
    codes, mean_scale = ops.mean_codes(tree_sum(ops, turned) * (1 / turned.shape[-2]))
    stored = (ops.float32(codes) * ops.float32(mean_scale)[..., None])[..., None, :]
    x = turned - stored
    positive = ops.uint8(x >= 0)
    levels = levels_of(ops, positive, 1)
    scale = ops.to_byte(scale_of(ops, x, levels))
    summary = {"mean": ops.uint8(ops.int32(codes) + (MEAN_MOST + 1)), "mean_scale": mean_scale, "scale": scale}
    dims, start = part_dims(cache_config, k.shape[-1]), 0
    for name, own in zip(PARTS[len(dims)], dims, strict=True):
        summary[name] = pack_codes(ops, positive[..., start : start + own], 1)
        start += own
    summary["codes"] = summary["codes"].swapaxes(-1, -2)
    if cache_config.second_bit:
        second, second_scale = _second_bit(ops, x, levels)
        summary |= {"second": pack_codes(ops, second, 1), "second_scale": ops.to_byte(second_scale)}
    if cache_config.rq_bounds:
        rounded = levels * ops.from_byte(scale)[..., None]
        far = rotate(ops, by_group, signs) - stored[..., None, :] - rounded[..., None, :]
        summary["error"] = ops.up16(ops.norms(x - rounded))
        summary["radius"] = ops.up16(ops.key_norm(far))
        summary["norm"] = ops.up16(ops.key_norm(by_group))
    return summary


def rounded_query(ops: Ops, turned: Array) -> tuple[Array, Array]:
    """(integers [.., D] float32 within +-QUERY_STEPS, step [.., 1]) of rotated queries [.., D] ~ integers * step."""
    step = ops.max(ops.abs(turned), keepdims=True) / QUERY_STEPS
    usable = (step > 0) & ops.isfinite(step)
    return ops.where(usable, ops.round(turned / ops.where(usable, step, 1)), 0), step


def unit_base(ops: Ops, cache_config: CacheConfig, summary: Summary, turned: Array) -> Array:
    """log n + m_hat.a of units, [B, Hkv, R, units]."""
    dots = ops.packed_dots(summary["mean"], 8, turned, has_zero=True)
    return math.log(cache_config.S) + dots * ops.per_group(summary, "mean_scale")


def of_groups(name: str, array: Array, index: Array, heads: Array, spans: Array, groups: Array) -> Array:
    """Return a field [B, Hkv, spans, *shape] as one of groups [B, Hkv, C, ..]: `groups` [B, Hkv, C] within `spans`
    [B, Hkv, C] of sequences `index` [B, 1, 1] and kv heads `heads` [1, Hkv, 1]."""
    if name in ("mean", "mean_scale"):
        return array[index, heads, spans]
    return array[index, heads, spans, :, groups] if name == "codes" else array[index, heads, spans, groups]


def _estimate(ops: Ops, base: Array, codes: Array, scale: Array, turned: Array, second: Array | None = None) -> Array:
    """base + x_hat.(H a) [B, Hkv, R, G] from the first d dimensions: base [B, Hkv, R, G], codes [B, Hkv, G, d / 8],
    scale [B, Hkv, G] in one byte; rescoring bits [B, Hkv, G, D / 8] of all dimensions. The sums over a rounded query,
    and what a scale makes of them, are exact."""
    integers, step = rounded_query(ops, turned)
    many = min(8 * codes.shape[-1], turned.shape[-1])
    dots = ops.packed_dots(codes, 1, integers[..., :many])
    if second is not None:
        dots = dots + 0.5 * ops.packed_dots(second, 1, integers)
    return base + ops.from_byte(scale)[:, :, None] * dots * (step * (turned.shape[-1] / many))


def stage(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array, parts: int) -> Array:
    """log n + mu_hat.a [B, Hkv, R, C] of groups from the first `parts` of their codes: summary [B, Hkv, C, ..]
    (`of_groups`). An estimate; from all parts, too."""
    turned = rotate(ops, a, constants["signs"])
    names = PARTS[len(part_dims(cache_config, a.shape[-1]))][:parts]
    codes = ops.concatenate([summary[name] for name in names], axis=-1)
    estimate = _estimate(ops, unit_base(ops, cache_config, summary, turned), codes, summary["scale"], turned)
    return ops.where(ops.isfinite(estimate), estimate, LARGEST_ESTIMATE)


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """log n + mu_hat.a by the first part of the codes; with a stored radius, `ball` about mu_hat: summary
    [B, Hkv, units, ..]."""
    turned, groups = rotate(ops, a, constants["signs"]), cache_config.groups_per_span
    base = ops.repeat(unit_base(ops, cache_config, summary, turned), groups)
    codes, scale = summary["codes"].swapaxes(-1, -2).flatten(2, 3), summary["scale"].flatten(2)
    estimate = _estimate(ops, base, codes, scale, turned)
    if not cache_config.rq_bounds:
        return estimate, None, None
    # bounds are about what is stored, and ask the query as it is
    mean = base + ops.from_byte(scale)[:, :, None] * ops.packed_dots(codes, 1, turned)
    error, radius, norm = (ops.float32(summary[name].flatten(2))[:, :, None] for name in ("error", "radius", "norm"))
    # the mean is added and taken away again, whatever the size of the keys
    most = MEAN_MOST * math.sqrt(a.shape[-1]) * (1 + 2.0**-16)
    stored = ops.repeat(ops.per_group(summary, "mean_scale") * most, groups)
    size, slack = ops.norms(a)[..., None], ops.logit_slack(a, norm + radius + stored)
    return estimate, mean - size * error - slack, mean + size * radius + slack


def rescore(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Array:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    turned = rotate(ops, a, constants["signs"])
    codes = ops.concatenate([summary[name] for name in PARTS[len(part_dims(cache_config, a.shape[-1]))]], axis=-1)
    base = unit_base(ops, cache_config, summary, turned)
    estimate = _estimate(ops, base, codes, summary["second_scale"], turned, summary["second"])
    return ops.where(ops.isfinite(estimate), estimate, LARGEST_ESTIMATE)
