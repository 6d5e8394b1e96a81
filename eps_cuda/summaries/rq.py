"""Rotated quantised mean (ours): a few bits a dimension of each group's mean, about a centre of the whole cache."""

import math

import numpy as np
import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.rq import RQ_STEP, SECOND_STEP, hadamard_blocks
from eps_cuda.summaries.base import Score, Summary, _key_norm, _norm, _per_group, _pieces, logit_slack, near16, up16

# ------------------------------------------------------------------------------------------------------------- rotation


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """H diag(signs) x over the last axis, orthogonal. The order of the float32 additions is part of the definition:
    every library adds alike, so sign codes are equal bit for bit. (Not for torch.compile, which may fuse.)"""
    lead, head_dim = x.shape[:-1], x.shape[-1]
    x = x * signs
    pieces, start = [], 0
    for size in hadamard_blocks(head_dim):
        block, half = x[..., start : start + size], size // 2
        while half:
            first, second = block.reshape(*lead, size // (2 * half), 2, half).unbind(dim=-2)
            block = torch.stack([first + second, first - second], dim=-2).reshape(*lead, size)
            half //= 2
        pieces.append(block * float(np.float32(1 / math.sqrt(size))))
        start += size
    return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]


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


def _levels(codes: Tensor, bits: int) -> Tensor:
    """Codes as the float32 numbers that the scale multiplies."""
    return 2 * codes.float() - 1 if bits == 1 else codes.float() - (2 ** (bits - 1) - 0.5)


def _tree_sum(x: Tensor) -> Tensor:
    """The sum over the last axis but one as a tree of float32 additions, alike in every library."""
    while x.shape[-2] > 1:
        half = x.shape[-2] // 2
        paired, odd = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = torch.cat([paired, odd], dim=-2) if odd.shape[-2] else paired
    return x[..., 0, :]


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    """Rotated quantised mean (ours): `bits` per dimension of H D (mu - c) and one scale that makes <x_hat, x> = |x|^2
    (RaBitQ's estimator). centre [Hkv, D] float16. `second_bit` adds to 1-bit codes the bit that makes them 2-bit
    codes, levels sign + second / 2 of +-1, with a scale of its own."""
    head_dim, bits, centre, signs = k.shape[-1], store.bits, constants["centre"], constants["signs"]
    x = rotate(_tree_sum(k) * (1 / k.shape[-2]) - centre.float(), signs)
    if bits == 1:
        codes = (x >= 0).to(torch.uint8)
    else:
        half = 2 ** (bits - 1)
        step = RQ_STEP[bits] * torch.sqrt((x * x).mean(dim=-1, keepdim=True))
        codes = (torch.floor(x / torch.where(step > 0, step, 1)) + half).clamp(0, 2 * half - 1).to(torch.uint8)
    levels = _levels(codes, bits)
    product = (x * levels).sum(dim=-1)
    scale = near16(torch.where(product > 0, (x * x).sum(dim=-1) / torch.where(product > 0, product, 1), 0))
    summary = {"codes": pack_codes(codes, bits), "scale": scale}
    if store.second_bit:
        step = _tree_sum(x.abs()[..., None]) * float(np.float32(SECOND_STEP / head_dim))
        second = ((x >= step) | ((x < 0) & (x >= -step))).to(torch.uint8)
        finer = levels + 0.5 * _levels(second, 1)
        product = (x * finer).sum(dim=-1)
        summary["second"] = pack_codes(second, 1)
        summary["second_scale"] = near16(
            torch.where(product > 0, (x * x).sum(dim=-1) / torch.where(product > 0, product, 1), 0)
        )
    if store.rq_bounds:
        rounded = levels * scale.float()[..., None]
        # distances to mu_hat, measured in rotated space
        turned = rotate(k - centre.float()[..., None, :], signs)
        summary["error"] = up16(_norm(x - rounded))
        summary["radius"] = up16(_key_norm(turned - rounded[..., None, :]))
        summary["norm"] = up16(_key_norm(k))
    return summary


def _packed_dots(packed: Tensor, bits: int, a: Tensor) -> Tensor:
    """Inner products [B, Hkv, R, G] of packed levels [B, Hkv, G, bytes] with a [B, Hkv, R, D], by a table of what each
    of the 256 values of each byte adds: one look-up instead of 8 / bits multiplications, and nothing is unpacked."""
    batch, kv_heads, repeat, _ = a.shape
    num_bytes, per_byte = packed.shape[-1], 8 // bits
    values = torch.arange(256, dtype=torch.uint8, device=a.device)[:, None]
    levels = _levels(unpack_codes(values, bits, per_byte), bits)  # [256, 8 / bits]
    parts = torch.nn.functional.pad(a, (0, num_bytes * per_byte - a.shape[-1])).unflatten(-1, (num_bytes, per_byte))
    # [B, Hkv, bytes, 256, R], flat: row ((b * Hkv + h) * bytes + j) * 256 + value
    table = (levels @ parts.permute(0, 1, 3, 4, 2)).reshape(-1, repeat)
    starts = torch.arange(0, len(table), 256, dtype=torch.int32, device=a.device)
    starts = starts.reshape(batch, kv_heads, 1, num_bytes)
    sums = [
        torch.nn.functional.embedding_bag((piece + starts).reshape(-1, num_bytes), table, mode="sum").reshape(
            batch, kv_heads, -1, repeat
        )
        for piece in _pieces(packed)
    ]
    return torch.cat(sums, dim=2).mT


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a; with a stored radius, `ball` about mu_hat."""
    offset = (a * constants["centre"].float()[:, None, :]).sum(dim=-1)[..., None]
    dots = _packed_dots(summary["codes"], store.bits, rotate(a, constants["signs"]))
    estimate = math.log(store.S) + (offset + dots * _per_group(summary, "scale"))
    if not store.rq_bounds:
        return estimate, None, None
    size, radius = _norm(a)[..., None], _per_group(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, _per_group(summary, "norm") + radius + _norm(constants["centre"].float())[:, None, None])
    return estimate, estimate - size * _per_group(summary, "error") - slack, estimate + size * radius + slack


def refine(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Tensor:
    """log n + mu_hat.a from two bits a dimension: [B, Hkv, R, C]. An estimate, as of one bit."""
    offset = (a * constants["centre"].float()[:, None, :]).sum(dim=-1)[..., None]
    turned = rotate(a, constants["signs"])
    dots = _packed_dots(summary["codes"], 1, turned) + 0.5 * _packed_dots(summary["second"], 1, turned)
    estimate = math.log(store.S) + offset + dots * _per_group(summary, "second_scale")
    return torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE)
