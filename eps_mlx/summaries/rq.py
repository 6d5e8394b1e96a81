"""Rotated quantised mean (ours): the sign of each dimension of each group's mean, about the mean of the unit of tokens
that the group lies in, read in stages."""

import math

import mlx.core as mx
import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import PARTS, QUERY_STEPS, SECOND_STEP, hadamard_blocks, part_dims
from eps_mlx.summaries.base import (
    Score,
    Summary,
    from_byte,
    key_norm,
    logit_slack,
    mean_codes,
    near16,
    norms,
    per_group,
    to_byte,
    up16,
    widened,
)

# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: mx.array, signs: mx.array) -> mx.array:
    """`eps_core.summaries.rq.rotate` over the last axis. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for mx.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    for own in signs:
        x = x * own
        pieces, start = [], 0
        for size in hadamard_blocks(head_dim):
            block, half = x[..., start : start + size], size // 2
            while half:
                pairs = block.reshape(*lead, size // (2 * half), 2, half)
                first, second = pairs[..., 0, :], pairs[..., 1, :]
                block = mx.stack([first + second, first - second], axis=-2).reshape(*lead, size)
                half //= 2
            pieces.append(block * float(np.float32(1 / math.sqrt(size))))
            start += size
        x = mx.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]
    return x


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """codes [.., D] in 0 .. 2^bits - 1 -> uint8 [.., ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit
    i*bits % 8."""
    per_byte = 8 // bits
    short = -codes.shape[-1] % per_byte
    if short:
        codes = mx.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    parts = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, per_byte)
    return (parts << mx.arange(0, 8, bits, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint8)


def unpack_codes(packed: mx.array, bits: int, head_dim: int) -> mx.array:
    """The inverse of `pack_codes`: uint8 [.., D]."""
    parts = (packed[..., None] >> mx.arange(0, 8, bits, dtype=mx.uint8)) & ((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)[..., :head_dim]


def levels_of(codes: mx.array, bits: int, has_zero: bool = False) -> mx.array:
    """Codes as the float32 numbers that the scale multiplies: 0 is one of them where it `has_zero`."""
    wide, middle = widened(codes), 2 ** (bits - 1) - (0 if has_zero else 0.5)
    return 2 * wide - 1 if bits == 1 else wide - middle


def tree_sum(x: mx.array) -> mx.array:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = mx.concatenate([paired, odd], axis=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def scale_of(x: mx.array, levels: mx.array) -> mx.array:
    """The factor [..] of levels [.., D] that makes <x_hat, x> = |x|^2 (RaBitQ's estimator), float16."""
    product = (x * levels).sum(axis=-1)
    return near16(mx.where(product > 0, (x * x).sum(axis=-1) / mx.where(product > 0, product, 1), 0))


def _second_bit(x: mx.array, levels: mx.array) -> tuple[mx.array, mx.array]:
    """The rescoring bits [.., D] of signs `levels` of x [.., D], and their scale [..]."""
    step = tree_sum(mx.abs(x)[..., None]) * float(np.float32(SECOND_STEP / x.shape[-1]))
    second = ((x >= step) | ((x < 0) & (x >= -step))).astype(mx.uint8)
    return second, scale_of(x, levels + 0.5 * levels_of(second, 1))


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Return the fields of `eps_core.summaries.rq` of all groups of a mean: k [.., Hkv, U, D]."""
    signs = constants["signs"]
    by_group = k.reshape(*k.shape[:-2], -1, cache_config.S, k.shape[-1])
    turned = rotate(tree_sum(by_group) * (1 / cache_config.S), signs)  # [.., Hkv, N, D]
    most = 2 ** (cache_config.mean_bits - 1) - 1
    codes, mean_scale = mean_codes(tree_sum(turned) * (1 / turned.shape[-2]), most)
    stored = (widened(codes) * widened(mean_scale)[..., None])[..., None, :]
    x = turned - stored
    positive = (x >= 0).astype(mx.uint8)
    levels = levels_of(positive, 1)
    scale = to_byte(scale_of(x, levels))
    summary = {
        "mean": pack_codes(codes.astype(mx.int32) + (most + 1), cache_config.mean_bits), "mean_scale": mean_scale,
        "scale": scale,
    }  # fmt: skip
    dims = part_dims(cache_config, k.shape[-1])
    for name, part in zip(PARTS[len(dims)], mx.split(positive, np.cumsum(dims)[:-1].tolist(), axis=-1), strict=True):
        summary[name] = pack_codes(part, 1)
    summary["codes"] = summary["codes"].swapaxes(-1, -2)
    if cache_config.second_bit:
        second, second_scale = _second_bit(x, levels)
        summary |= {"second": pack_codes(second, 1), "second_scale": to_byte(second_scale)}
    if cache_config.rq_bounds:
        rounded = levels * from_byte(scale)[..., None]
        far = rotate(by_group, signs) - stored[..., None, :] - rounded[..., None, :]
        summary["error"] = up16(norms(x - rounded))
        summary["radius"] = up16(key_norm(far))
        summary["norm"] = up16(key_norm(by_group))
    return summary


def packed_dots(packed: mx.array, bits: int, a: mx.array, has_zero: bool = False) -> mx.array:
    """Inner products [B, Hkv, R, G] of packed levels [B, Hkv, G, bytes] with a [B, Hkv, R, D], scale left out."""
    head_dim, num_bytes, per_byte = a.shape[-1], packed.shape[-1], 8 // bits
    if bits > 2:
        return a @ levels_of(unpack_codes(packed, bits, head_dim), bits, has_zero).swapaxes(-1, -2)
    # One table look-up a byte, for all R heads at once: what each of the 256 bytes adds to each inner product. Three
    # times as fast as unpacking into a matrix on a CPU, and a 32nd of its memory.
    batch, kv_heads, repeat, _ = a.shape
    a = mx.pad(a, [(0, 0)] * 3 + [(0, num_bytes * per_byte - head_dim)])
    levels = levels_of(unpack_codes(mx.arange(256, dtype=mx.uint8)[:, None], bits, per_byte), bits)
    added = levels @ a.reshape(batch, kv_heads, repeat, num_bytes, per_byte).transpose(0, 1, 3, 4, 2)
    first = mx.arange(batch * kv_heads * num_bytes, dtype=mx.int32).reshape(batch, kv_heads, 1, num_bytes) * 256
    return mx.take(added.reshape(-1, repeat), packed + first, axis=0).sum(axis=3).swapaxes(-1, -2)


def rounded_query(turned: mx.array) -> tuple[mx.array, mx.array]:
    """(integers [.., D] float32 within +-QUERY_STEPS, step [.., 1]) of rotated queries [.., D] ~ integers * step."""
    step = mx.abs(turned).max(axis=-1, keepdims=True) / QUERY_STEPS
    usable = (step > 0) & mx.isfinite(step)
    return mx.where(usable, mx.round(turned / mx.where(usable, step, 1)), 0), step


def unit_base(cache_config: CacheConfig, summary: Summary, turned: mx.array) -> mx.array:
    """log n + m_hat.a of units, [B, Hkv, R, units]."""
    dots = packed_dots(summary["mean"], cache_config.mean_bits, turned, has_zero=True)
    return math.log(cache_config.S) + dots * per_group(summary, "mean_scale")


def of_groups(
    name: str, array: mx.array, index: mx.array, heads: mx.array, spans: mx.array, groups: mx.array
) -> mx.array:
    """Return a field [B, Hkv, spans, *shape] as one of groups [B, Hkv, C, ..]: `groups` [B, Hkv, C] within `spans`
    [B, Hkv, C] of sequences `index` [B, 1, 1] and kv heads `heads` [1, Hkv, 1]."""
    if name in ("mean", "mean_scale"):
        return array[index, heads, spans]
    return array[index, heads, spans, :, groups] if name == "codes" else array[index, heads, spans, groups]


def _estimate(
    base: mx.array, codes: mx.array, scale: mx.array, turned: mx.array, second: mx.array | None = None
) -> mx.array:
    """base + x_hat.(H a) [B, Hkv, R, G] from the first d dimensions: base [B, Hkv, R, G], codes [B, Hkv, G, d / 8],
    scale [B, Hkv, G] in one byte; rescoring bits [B, Hkv, G, D / 8] of all dimensions. The sums over a rounded query,
    and what a scale makes of them, are exact."""
    integers, step = rounded_query(turned)
    many = min(8 * codes.shape[-1], turned.shape[-1])
    dots = packed_dots(codes, 1, integers[..., :many])
    if second is not None:
        dots = dots + 0.5 * packed_dots(second, 1, integers)
    return base + from_byte(scale)[:, :, None] * dots * (step * (turned.shape[-1] / many))


def stage(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array, parts: int) -> mx.array:
    """log n + mu_hat.a [B, Hkv, R, C] of groups from the first `parts` of their codes: summary [B, Hkv, C, ..]
    (`of_groups`). An estimate; from all parts, too."""
    turned = rotate(a, constants["signs"])
    codes = mx.concatenate(
        [summary[name] for name in PARTS[len(part_dims(cache_config, a.shape[-1]))][:parts]], axis=-1
    )
    estimate = _estimate(unit_base(cache_config, summary, turned), codes, summary["scale"], turned)
    return mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE)


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """log n + mu_hat.a by the first part of the codes; with a stored radius, `ball` about mu_hat: summary
    [B, Hkv, units, ..]."""
    turned, groups = rotate(a, constants["signs"]), cache_config.groups_per_span
    base = mx.repeat(unit_base(cache_config, summary, turned), groups, axis=-1)
    codes, scale = summary["codes"].swapaxes(-1, -2).flatten(2, 3), summary["scale"].flatten(2)
    estimate = _estimate(base, codes, scale, turned)
    if not cache_config.rq_bounds:
        return estimate, None, None
    # bounds are about what is stored, and ask the query as it is
    mean = base + from_byte(scale)[:, :, None] * packed_dots(codes, 1, turned)
    error, radius, norm = (widened(summary[name].flatten(2))[:, :, None] for name in ("error", "radius", "norm"))
    # the mean is added and taken away again, whatever the size of the keys
    most = (2 ** (cache_config.mean_bits - 1) - 1) * math.sqrt(a.shape[-1]) * (1 + 2.0**-16)
    stored = mx.repeat(per_group(summary, "mean_scale") * most, groups, axis=-1)
    size, slack = norms(a)[..., None], logit_slack(a, norm + radius + stored)
    return estimate, mean - size * error - slack, mean + size * radius + slack


def rescore(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> mx.array:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    turned = rotate(a, constants["signs"])
    codes = mx.concatenate([summary[name] for name in PARTS[len(part_dims(cache_config, a.shape[-1]))]], axis=-1)
    base = unit_base(cache_config, summary, turned)
    estimate = _estimate(base, codes, summary["second_scale"], turned, summary["second"])
    return mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE)
