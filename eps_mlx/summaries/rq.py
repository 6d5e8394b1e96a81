"""Rotated quantised mean (ours): a few bits a dimension of each group's mean, about a centre of the whole cache."""

import math

import mlx.core as mx
import numpy as np

from eps_core.config.store import Store
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import RQ_STEP, SECOND_STEP, hadamard_blocks
from eps_mlx.summaries.base import Score, Summary, _key_norm, _norm, _per_group, _wide, logit_slack, near16, up16

# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: mx.array, signs: mx.array) -> mx.array:
    """H diag(signs) x over the last axis, orthogonal. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for mx.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    x = x * signs
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
    return mx.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]


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


def _levels(codes: mx.array, bits: int) -> mx.array:
    """Codes as the float32 numbers that the scale multiplies."""
    wide = _wide(codes)
    return 2 * wide - 1 if bits == 1 else wide - (2 ** (bits - 1) - 0.5)


def _tree_sum(x: mx.array) -> mx.array:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = mx.concatenate([paired, odd], axis=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def build(store: Store, constants: Summary, k: mx.array) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes <x_hat, x> = |x|^2
    (RaBitQ's estimator). centre [Hkv, D] float16. `second_bit` adds to 1-bit codes the bit that makes them 2-bit
    codes, levels sign + second / 2 of +-1, with a scale of its own."""
    head_dim, bits, centre, signs = k.shape[-1], store.bits, constants["centre"], constants["signs"]
    x = rotate(_tree_sum(k) * (1 / k.shape[-2]) - _wide(centre), signs)
    if bits == 1:
        codes = (x >= 0).astype(mx.uint8)
    else:
        half = 2 ** (bits - 1)
        step = RQ_STEP[bits] * mx.sqrt((x * x).mean(axis=-1, keepdims=True))
        codes = mx.clip(mx.floor(x / mx.where(step > 0, step, 1)) + half, 0, 2 * half - 1).astype(mx.uint8)
    levels = _levels(codes, bits)
    product = (x * levels).sum(axis=-1)
    scale = near16(mx.where(product > 0, (x * x).sum(axis=-1) / mx.where(product > 0, product, 1), 0))
    summary = {"codes": pack_codes(codes, bits), "scale": scale}
    if store.second_bit:
        step = _tree_sum(mx.abs(x)[..., None]) * float(np.float32(SECOND_STEP / head_dim))
        second = ((x >= step) | ((x < 0) & (x >= -step))).astype(mx.uint8)
        finer = levels + 0.5 * _levels(second, 1)
        product = (x * finer).sum(axis=-1)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(
            mx.where(product > 0, (x * x).sum(axis=-1) / mx.where(product > 0, product, 1), 0)
        )
    if store.rq_bounds:
        rounded = levels * _wide(scale)[..., None]
        # distances to mu_hat, measured in rotated space
        turned = rotate(k - _wide(centre)[..., None, :], signs)
        summary["error"] = up16(_norm(x - rounded))
        summary["radius"] = up16(_key_norm(turned - rounded[..., None, :]))
        summary["norm"] = up16(_key_norm(k))
    return summary


def _packed_dots(packed: mx.array, bits: int, a: mx.array) -> mx.array:
    """Inner products [B, Hkv, R, G] of packed codes [B, Hkv, G, bytes] with a [B, Hkv, R, D], scale left out."""
    head_dim, num_bytes, per_byte = a.shape[-1], packed.shape[-1], 8 // bits
    if bits > 2:
        return a @ _levels(unpack_codes(packed, bits, head_dim), bits).swapaxes(-1, -2)
    # One table look-up a byte, for all R heads at once: what each of the 256 bytes adds to each inner product. Three
    # times as fast as unpacking into a matrix on a CPU, and a 32nd of its memory.
    batch, kv_heads, repeat, _ = a.shape
    a = mx.pad(a, [(0, 0)] * 3 + [(0, num_bytes * per_byte - head_dim)])
    levels = _levels(unpack_codes(mx.arange(256, dtype=mx.uint8)[:, None], bits, per_byte), bits)
    added = levels @ a.reshape(batch, kv_heads, repeat, num_bytes, per_byte).transpose(0, 1, 3, 4, 2)
    first = mx.arange(batch * kv_heads * num_bytes, dtype=mx.int32).reshape(batch, kv_heads, 1, num_bytes) * 256
    return mx.take(added.reshape(-1, repeat), packed + first, axis=0).sum(axis=3).swapaxes(-1, -2)


def score(store: Store, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    offset = (a * _wide(constants["centre"])[:, None, :]).sum(axis=-1)[..., None]
    dots = _packed_dots(summary["codes"], store.bits, rotate(a, constants["signs"]))
    estimate = math.log(store.S) + (offset + dots * _per_group(summary, "scale"))
    if not store.rq_bounds:
        return estimate, None, None
    size, radius = _norm(a)[..., None], _per_group(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, _per_group(summary, "norm") + radius + _norm(_wide(constants["centre"]))[:, None, None])
    return estimate, estimate - size * _per_group(summary, "error") - slack, estimate + size * radius + slack


def refine(store: Store, constants: Summary, summary: Summary, a: mx.array) -> mx.array:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    offset = (a * _wide(constants["centre"])[:, None, :]).sum(axis=-1)[..., None]
    turned = rotate(a, constants["signs"])
    dots = _packed_dots(summary["codes"], 1, turned) + 0.5 * _packed_dots(summary["second"], 1, turned)
    estimate = math.log(store.S) + offset + dots * _per_group(summary, "second_scale")
    return mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE)
