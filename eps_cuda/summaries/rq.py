"""Rotated quantised mean (ours): the sign of each dimension of each group's mean, about the mean of the unit of tokens
that the group lies in, read in stages."""

import math

import numpy as np
import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import PARTS, QUERY_STEPS, SECOND_STEP, hadamard_blocks, part_dims
from eps_cuda.summaries.base import (
    Score,
    Summary,
    from_byte,
    key_norm,
    logit_slack,
    mean_codes,
    near16,
    norms,
    per_group,
    pieces,
    to_byte,
    up16,
)

# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """`eps_core.summaries.rq.rotate` over the last axis. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for torch.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    for own in signs:
        x = x * own
        pieces, start = [], 0
        for size in hadamard_blocks(head_dim):
            block, half = x[..., start : start + size], size // 2
            while half:
                first, second = block.reshape(*lead, size // (2 * half), 2, half).unbind(dim=-2)
                block = torch.stack([first + second, first - second], dim=-2).reshape(*lead, size)
                half //= 2
            pieces.append(block * float(np.float32(1 / math.sqrt(size))))
            start += size
        x = torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]
    return x


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [.., D] in 0 .. 2^bits - 1 -> uint8 [.., ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit
    i*bits % 8."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes.int(), (0, -codes.shape[-1] % per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(dim=-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """The inverse of `pack_codes`: uint8 [.., D]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)[..., :head_dim]


def levels_of(codes: Tensor, bits: int, has_zero: bool = False) -> Tensor:
    """Codes as the float32 numbers that the scale multiplies: 0 is one of them where it `has_zero`."""
    middle = 2 ** (bits - 1) - (0 if has_zero else 0.5)
    return 2 * codes.float() - 1 if bits == 1 else codes.float() - middle


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = torch.cat([paired, odd], dim=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def scale_of(x: Tensor, levels: Tensor) -> Tensor:
    """The factor [..] of levels [.., D] that makes <x_hat, x> = |x|^2 (RaBitQ's estimator), float16."""
    product = (x * levels).sum(dim=-1)
    return near16(torch.where(product > 0, (x * x).sum(dim=-1) / torch.where(product > 0, product, 1), 0))


def _second_bit(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The rescoring bits [.., D] of signs `levels` of x [.., D], and their scale [..]."""
    step = tree_sum(x.abs()[..., None]) * float(np.float32(SECOND_STEP / x.shape[-1]))
    second = ((x >= step) | ((x < 0) & (x >= -step))).to(torch.uint8)
    return second, scale_of(x, levels + 0.5 * levels_of(second, 1))


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Return the fields of `eps_core.summaries.rq` of all groups of a mean: k [.., Hkv, U, D]."""
    signs = constants["signs"]
    turned = rotate(tree_sum(k.unflatten(-2, (-1, cache_config.S))) * (1 / cache_config.S), signs)  # [.., Hkv, N, D]
    most = 2 ** (cache_config.mean_bits - 1) - 1
    codes, mean_scale = mean_codes(tree_sum(turned) * (1 / turned.shape[-2]), most)
    stored = (codes.float() * mean_scale.float()[..., None])[..., None, :]
    x = turned - stored
    positive = (x >= 0).to(torch.uint8)
    levels = levels_of(positive, 1)
    scale = to_byte(scale_of(x, levels))
    summary = {
        "mean": pack_codes(codes.int() + (most + 1), cache_config.mean_bits), "mean_scale": mean_scale, "scale": scale,
    }  # fmt: skip
    dims = part_dims(cache_config, k.shape[-1])
    for name, part in zip(PARTS[len(dims)], positive.split(dims, dim=-1), strict=True):
        summary[name] = pack_codes(part, 1)
    summary["codes"] = summary["codes"].mT
    if cache_config.second_bit:
        second, second_scale = _second_bit(x, levels)
        summary |= {"second": pack_codes(second, 1), "second_scale": to_byte(second_scale)}
    if cache_config.rq_bounds:
        rounded = levels * from_byte(scale)[..., None]
        far = rotate(k, signs).unflatten(-2, (-1, cache_config.S)) - stored[..., None, :] - rounded[..., None, :]
        summary["error"] = up16(norms(x - rounded))
        summary["radius"] = up16(key_norm(far))
        summary["norm"] = up16(key_norm(k.unflatten(-2, (-1, cache_config.S))))
    return summary


def packed_dots(packed: Tensor, bits: int, a: Tensor, has_zero: bool = False) -> Tensor:
    """Inner products [B, Hkv, R, G] of packed levels [B, Hkv, G, bytes] with a [B, Hkv, R, D], by a table of what each
    of the 256 values of each byte adds: one look-up instead of 8 / bits multiplications, and nothing is unpacked."""
    batch, kv_heads, repeat, _ = a.shape
    num_bytes, per_byte = packed.shape[-1], 8 // bits
    values = torch.arange(256, dtype=torch.uint8, device=a.device)[:, None]
    levels = levels_of(unpack_codes(values, bits, per_byte), bits, has_zero)  # [256, 8 / bits]
    parts = torch.nn.functional.pad(a, (0, num_bytes * per_byte - a.shape[-1])).unflatten(-1, (num_bytes, per_byte))
    # [B, Hkv, bytes, 256, R], flat: row ((b * Hkv + h) * bytes + j) * 256 + value
    table = (levels @ parts.permute(0, 1, 3, 4, 2)).reshape(-1, repeat)
    starts = torch.arange(0, len(table), 256, dtype=torch.int32, device=a.device)
    starts = starts.reshape(batch, kv_heads, 1, num_bytes)
    sums = [
        torch.nn.functional.embedding_bag((piece + starts).reshape(-1, num_bytes), table, mode="sum").reshape(
            batch, kv_heads, -1, repeat
        )
        for piece in pieces(packed)
    ]
    return torch.cat(sums, dim=2).mT


def rounded_query(turned: Tensor) -> tuple[Tensor, Tensor]:
    """(integers [.., D] float32 within +-QUERY_STEPS, step [.., 1]) of rotated queries [.., D] ~ integers * step."""
    step = turned.abs().amax(dim=-1, keepdim=True) / QUERY_STEPS
    usable = (step > 0) & torch.isfinite(step)
    return torch.where(usable, torch.round(turned / torch.where(usable, step, 1)), 0), step


def unit_base(cache_config: CacheConfig, summary: Summary, turned: Tensor) -> Tensor:
    """log n + m_hat.a of units, [B, Hkv, R, units]."""
    dots = packed_dots(summary["mean"], cache_config.mean_bits, turned, has_zero=True)
    return math.log(cache_config.S) + dots * per_group(summary, "mean_scale")


def of_groups(name: str, array: Tensor, index: Tensor, heads: Tensor, spans: Tensor, groups: Tensor) -> Tensor:
    """Return a field [B, Hkv, spans, *shape] as one of groups [B, Hkv, C, ..]: `groups` [B, Hkv, C] within `spans`
    [B, Hkv, C] of sequences `index` [B, 1, 1] and kv heads `heads` [1, Hkv, 1]."""
    if name in ("mean", "mean_scale"):
        return array[index, heads, spans]
    return array[index, heads, spans, :, groups] if name == "codes" else array[index, heads, spans, groups]


def _estimate(base: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, second: Tensor | None = None) -> Tensor:
    """base + x_hat.(H a) [B, Hkv, R, G] from the first d dimensions: base [B, Hkv, R, G], codes [B, Hkv, G, d / 8],
    scale [B, Hkv, G] in one byte; rescoring bits [B, Hkv, G, D / 8] of all dimensions. The sums over a rounded query,
    and what a scale makes of them, are exact."""
    integers, step = rounded_query(turned)
    many = min(8 * codes.shape[-1], turned.shape[-1])
    dots = packed_dots(codes, 1, integers[..., :many])
    if second is not None:
        dots = dots + 0.5 * packed_dots(second, 1, integers)
    return base + from_byte(scale)[:, :, None] * dots * (step * (turned.shape[-1] / many))


def stage(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor, parts: int) -> Tensor:
    """log n + mu_hat.a [B, Hkv, R, C] of groups from the first `parts` of their codes: summary [B, Hkv, C, ..]
    (`of_groups`). An estimate; from all parts, too."""
    turned = rotate(a, constants["signs"])
    codes = torch.cat([summary[name] for name in PARTS[len(part_dims(cache_config, a.shape[-1]))][:parts]], dim=-1)
    estimate = _estimate(unit_base(cache_config, summary, turned), codes, summary["scale"], turned)
    return torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE)


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """log n + mu_hat.a by the first part of the codes; with a stored radius, `ball` about mu_hat: summary
    [B, Hkv, units, ..]."""
    turned, groups = rotate(a, constants["signs"]), cache_config.groups_per_span
    base = unit_base(cache_config, summary, turned).repeat_interleave(groups, dim=-1)
    codes, scale = summary["codes"].mT.flatten(2, 3), summary["scale"].flatten(2)
    estimate = _estimate(base, codes, scale, turned)
    if not cache_config.rq_bounds:
        return estimate, None, None
    # bounds are about what is stored, and ask the query as it is
    mean = base + from_byte(scale)[:, :, None] * packed_dots(codes, 1, turned)
    error, radius, norm = (summary[name].float().flatten(2)[:, :, None] for name in ("error", "radius", "norm"))
    # the mean is added and taken away again, whatever the size of the keys
    most = (2 ** (cache_config.mean_bits - 1) - 1) * math.sqrt(a.shape[-1]) * (1 + 2.0**-16)
    stored = (per_group(summary, "mean_scale") * most).repeat_interleave(groups, dim=-1)
    size, slack = norms(a)[..., None], logit_slack(a, norm + radius + stored)
    return estimate, mean - size * error - slack, mean + size * radius + slack


def rescore(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Tensor:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    turned = rotate(a, constants["signs"])
    codes = torch.cat([summary[name] for name in PARTS[len(part_dims(cache_config, a.shape[-1]))]], dim=-1)
    base = unit_base(cache_config, summary, turned)
    estimate = _estimate(base, codes, summary["second_scale"], turned, summary["second"])
    return torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE)
