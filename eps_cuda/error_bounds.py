"""Error bounds, and the groups that strict mode selects in addition."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import ErrorBound, Scores, Selection
from eps_core.backend.summaries.table import score_summary
from eps_core.config.selection import SelectionConfig
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.cache import Cache
from eps_cuda.ops import OPS
from eps_cuda.selection import ascending, selection_mask


def _float_margin(unread: Tensor, lse: Tensor) -> Tensor:
    """Return the largest error of float32 sums of exponentials, in nats: logarithms of masses `unread` and `lse`."""
    return 2.0**-20 * (torch.where(torch.isfinite(unread), unread.abs(), 0) + lse.abs()) + 2.0**-18


@torch.inference_mode()
def bounds(cache: Cache, layer: int, q: Tensor, plan: StepPlan, scores: Scores, selection: Selection) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selection` left out; only their codes are
    read. The bounds of the selected ones are left empty: nothing asks for them. Returns `scores` as they are where the
    method's own bounds serve. Synchronises."""
    inner = cache.bound
    if inner is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    size, unit_tokens, device = cache.cache_config.S, inner.cache_config.unit_tokens, q.device
    a = q.float().reshape(batch, kv_heads, -1, q.shape[-1]) * (1 / math.sqrt(q.shape[-1]))
    left = ~selection_mask(selection, groups) & (scores.estimate > -math.inf)
    lefts = left.sum(dim=-1).cpu().numpy()
    width = int(lefts.max())
    slack = OPS.logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
    if not inner.can_encode(layer) or not width:
        upper = torch.where(left, math.inf, -math.inf)[:, :, None].expand(*a.shape[:3], groups)
        return replace(scores, lower=torch.full_like(upper, -math.inf), upper=upper, slack=slack)
    listed = ascending(left, width).long()
    tokens = (listed.clamp(min=0)[..., None] * size + torch.arange(size, device=device)).flatten(-2)
    units = torch.from_numpy(np.maximum(plan.table, 0).astype(np.int64)).to(device)[:, None].expand(-1, kv_heads, -1)
    heads = torch.arange(kv_heads, device=device)[:, None]
    rows = (units.gather(-1, tokens // unit_tokens) * kv_heads + heads) * unit_tokens + tokens % unit_tokens
    codes = {
        name: pool.view(-1, *pool.shape[3:]).index_select(0, rows.reshape(-1)).view(*rows.shape, *pool.shape[3:])
        for name, pool in inner.summaries[layer].items()
    }
    _, least, most = score_summary(OPS, inner.cache_config, inner.constants(layer), codes, a)
    assert least is not None and most is not None
    place = torch.where(listed < 0, groups, listed)[:, :, None].expand(-1, -1, a.shape[2], -1)

    def of_groups(part: Tensor) -> Tensor:
        """Bounds [B, Hkv, R, X S] of single keys as bounds of their groups, at the groups' places: [B, Hkv, R, G]."""
        mass = torch.logsumexp(part.unflatten(-1, (width, size)), dim=-1)
        everywhere = torch.full((*a.shape[:3], groups + 1), -math.inf, device=device)
        return everywhere.scatter_(-1, place, mass)[..., :groups]

    return replace(scores, lower=of_groups(least), upper=of_groups(most), slack=slack)


@torch.inference_mode()
def bound_error(cache: Cache, layer: int, scores: Scores, selected: Selection, out: Tensor, lse: Tensor) -> ErrorBound:
    """Bounds of what `selected` left out, from valid bounds alone: out [B, Hq, D] and lse [B, Hq] are what `attend`
    gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.cache_config.method} has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    skipped = ~selection_mask(selected, groups)[:, :, None]
    unread = torch.logsumexp(torch.where(skipped, scores.upper, -math.inf), dim=-1)
    lse = lse.reshape(batch, kv_heads, repeat)
    # a float32 sigmoid near 1 may round down
    share = torch.sigmoid(unread - lse + (scores.slack + _float_margin(unread, lse))) * (1 + 2.0**-22)
    share = share.clamp(max=1.0)
    # everything read: exactly 0, also where a norm past float32 made the slack or the reach infinite
    share = torch.where(unread > -math.inf, share, 0.0)
    size = torch.linalg.vector_norm(out.float(), dim=-1).reshape(batch, kv_heads, repeat)
    # the norm's own rounding, and that of `out` to its dtype
    reach = (cache.largest_value[layer][:, None] + size) * (1 + 2.0**-16 + torch.finfo(out.dtype).eps)
    return ErrorBound(share.amax(dim=-1), torch.where(share > 0, share * reach, 0.0).amax(dim=-1))


@torch.inference_mode()
def extend_selection(
    selection_config: SelectionConfig, scores: Scores, selection: Selection, lse: Tensor
) -> tuple[Selection, Selection]:
    """(groups to add, all selected groups) so that the error bound of the whole falls to its epsilon, where
    `selection` was attended with lse [B, Hq]. Heads whose error bound holds already get none. The unvisited are ordered
    by their largest upper mass relative to what was read; of them the shortest run is taken after which even the upper
    masses of the rest are small against what was read plus the lower masses of the run. No synchronisation."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError("the method has no bounds: nothing can be bounded")
    batch, kv_heads, repeat, groups = scores.upper.shape
    selected_mask, lse = selection_mask(selection, groups), lse.reshape(batch, kv_heads, repeat, 1)
    # float64: a float32 scan of many groups is off by more than the margin
    upper = torch.where(selected_mask[:, :, None], -math.inf, scores.upper.double())
    lower = torch.where(selected_mask[:, :, None], -math.inf, scores.lower.double())
    order = (upper - lse).amax(dim=2).sort(dim=-1, descending=True, stable=True).indices
    by_need = order[:, :, None].expand(upper.shape)
    nothing = torch.full_like(lse, -math.inf)
    # entry j: the first j of the order are selected, the others are not
    rest = torch.logcumsumexp(upper.gather(-1, by_need).flip(-1), dim=-1).flip(-1)
    rest = torch.cat([rest, nothing], dim=-1)
    gained = torch.cat([nothing, torch.logcumsumexp(lower.gather(-1, by_need), dim=-1)], dim=-1)
    odds = _log_odds(selection_config.epsilon)
    # twice the margin: the error bound that is taken afterwards pays it once more
    margin = scores.slack[..., None] + 2 * _float_margin(rest, lse)
    holds = (rest <= odds + torch.logaddexp(lse, gained) - margin).all(dim=2)
    # the first True; past the sequence's end upper masses are -inf, so the last entry always holds
    count = (holds.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(groups, device=order.device).expand(order.shape))
    extra = rank < count
    if selection_config.scope == "union":
        extra = extra.any(dim=1, keepdim=True) & ~selected_mask
    whole = selected_mask | extra
    return tuple(  # type: ignore[return-value]
        Selection(ascending(mask, groups), mask.sum(dim=-1, dtype=torch.int32), None, always_selected, wanted)
        for mask, always_selected, wanted in (
            (extra, np.zeros(batch, np.int64), None),
            (whole, selection.always_selected, selection.wanted),
        )
    )


def _log_odds(epsilon: float) -> float:
    """log(epsilon / (1 - epsilon)), with its limits at 0 and 1."""
    if epsilon in (0, 1):
        return math.inf if epsilon else -math.inf
    return math.log(epsilon) - math.log1p(-epsilon)
