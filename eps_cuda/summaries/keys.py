"""Codes of groups' means about a centre: of single keys they bound the groups of any other method."""

import math

import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_core.summaries.keys import STEP
from eps_cuda.summaries.base import Score, Summary, key_norm, logit_slack, norms, per_group, up16
from eps_cuda.summaries.rq import levels_of, pack_codes, packed_dots, rotate, scale_of, tree_sum


def build(store: Store, constants: Summary, k: Tensor) -> Summary:
    """Of keys k [.., Hkv, S, D] about centre [Hkv, D] float16. The fields of `eps_core.summaries.keys`."""
    centre, signs, half = constants["centre"].float(), constants["signs"], 2 ** (store.bits - 1)
    x = rotate(tree_sum(k) * (1 / k.shape[-2]) - centre, signs)
    step = STEP[store.bits] * torch.sqrt((x * x).mean(dim=-1, keepdim=True))
    codes = (torch.floor(x / torch.where(step > 0, step, 1)) + half).clamp(0, 2 * half - 1).to(torch.uint8)
    levels = levels_of(codes, store.bits)
    scale = scale_of(x, levels)
    rounded = levels * scale.float()[..., None]
    far = rotate(k - centre[..., None, :], signs) - rounded[..., None, :]
    return {
        "codes": pack_codes(codes, store.bits), "scale": scale, "error": up16(norms(x - rounded)),
        "radius": up16(key_norm(far)), "norm": up16(key_norm(k)),
    }  # fmt: skip


def score(store: Store, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a, and `ball` about mu_hat."""
    centre = constants["centre"].float()
    offset = (a * centre[:, None, :]).sum(dim=-1)[..., None]
    dots = packed_dots(summary["codes"], store.bits, rotate(a, constants["signs"]))
    mean = math.log(store.S) + (offset + dots * per_group(summary, "scale"))
    size, radius = norms(a)[..., None], per_group(summary, "radius")
    # the centre is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, per_group(summary, "norm") + radius + norms(centre)[:, None, None])
    return mean, mean - size * per_group(summary, "error") - slack, mean + size * radius + slack
