"""Which groups to visit: guards on the host, policies on the device, no synchronisation.

`estimate [B, Hkv, G]` is the natural log of each group's mass as `score` returns it: +inf without a valid summary
(always visited), -inf past the sequence's end. Policies return a mask [B, Hkv, G] of groups to visit, the forced ones
among them. No sort order of equal values is ever relied on: the K-th value decides, and ties go to the lower index.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Certificate, Scores, Selection
from eps_core.paging.where import budget, forced_groups
from eps_cuda.cache import Cache
from eps_cuda.paths import kernels_module
from eps_cuda.summaries import logit_slack, score_summary

THRESHOLD_ROWS = 256  # groups that one pass of `select_threshold` compares with all others; changes memory only


def _best(keys: Tensor, count: Tensor, most: int) -> Tensor:
    """Mask [B, Hkv, G] of the `count` [B, Hkv or 1, 1] <= `most` largest keys, the lower index first among equals."""
    falling = keys.topk(most, dim=-1).values
    place = (count - 1).clamp(0, most - 1).expand(*keys.shape[:-1], 1)
    least = falling.gather(-1, place)
    above, tied = keys > least, keys == least
    room = count - above.sum(dim=-1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= room))) & (count > 0)


def select_topk(estimate: Tensor, forced: Tensor, count: Tensor, most: int) -> Tensor:
    """Forced groups, then the best: `count` [B, Hkv or 1, 1] <= `most` in all."""
    return _best(torch.where(forced, math.inf, estimate), count, most)


def select_share(config: EpsConfig, estimate: Tensor, forced: Tensor) -> Tensor:
    """Every group whose estimated share of the softmax is at least tau."""
    assert config.tau is not None
    return forced | (estimate - _log_total(estimate) >= math.log(config.tau))


def select_mass(config: EpsConfig, estimate: Tensor, forced: Tensor) -> Tensor:
    """The fewest groups, best first, that leave an estimated share of at most epsilon unread."""
    unforced = torch.where(forced, -math.inf, estimate)
    # rising, those without a share first: the longest run that sums to at most epsilon is what may be skipped. In the
    # log domain, so that no share vanishes: epsilon 0 skips nothing
    rising = torch.logcumsumexp(unforced.sort(dim=-1).values, dim=-1) - _log_total(estimate)
    skipped = (rising <= (math.log(config.epsilon) if config.epsilon else -math.inf)).sum(dim=-1, keepdim=True)
    return forced | _best(unforced, estimate.shape[-1] - skipped, estimate.shape[-1])


def select_threshold(config: EpsConfig, estimate: Tensor, forced: Tensor) -> Tensor:
    """The product requirements' rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far; of
    masses, T - log alpha, where estimates are their logarithms. T / alpha <= B_j says that fewer than top_pages newer
    groups have B_i / alpha > B_j: a count instead of a heap."""
    assert config.top_pages is not None
    estimate = estimate.double()
    groups = estimate.shape[-1]
    lowered = estimate / config.alpha if config.has_norm_estimate else estimate - math.log(config.alpha)
    scaled = torch.where(torch.isfinite(estimate), lowered, -math.inf)
    index, parts = torch.arange(groups, device=estimate.device), []
    for rows in index.split(THRESHOLD_ROWS):
        newer_and_better = (scaled[..., None, :] > estimate[..., rows, None]) & (index > rows[:, None])
        parts.append(newer_and_better.sum(dim=-1) < config.top_pages)
    return forced | (torch.cat(parts, dim=-1) & torch.isfinite(estimate))


def _log_total(estimate: Tensor) -> Tensor:
    """log sum exp over the groups that have an estimate [B, Hkv, 1]; -inf where there is none."""
    return torch.logsumexp(torch.where(torch.isfinite(estimate), estimate, -math.inf), dim=-1, keepdim=True)


@torch.inference_mode()
def select(config: EpsConfig, scores: Scores, lengths: np.ndarray, layer: int = 0) -> Selection:
    """The configured policy over every (sequence, kv head); scope union gives all heads the union of their groups.
    `layer` says which head modes apply, where the config has any."""
    lengths = np.asarray(lengths, np.int64)
    module = kernels_module(scores.kernels)
    if module is not None and (selection := module.select(config, scores, lengths, layer)) is not None:
        return selection
    estimate = scores.estimate
    _, _, groups = estimate.shape
    device = estimate.device
    guards = forced_groups(config, lengths, groups)
    num_forced = guards.sum(axis=1) + np.asarray(scores.num_missing, np.int64)
    inside = torch.from_numpy(np.arange(groups) < -(-lengths // config.S)[:, None]).to(device)[:, None, :]
    forced = (torch.from_numpy(guards).to(device)[:, None, :] | (estimate == math.inf)) & inside
    uniform = None
    if config.policy == "topk":
        uniform = budget(config, num_forced, lengths)
        visit = select_topk(estimate, forced, torch.from_numpy(uniform).to(device)[:, None, None], int(uniform.max()))
    elif config.policy == "threshold":
        visit = select_threshold(config, estimate, forced) & inside
    else:
        policy = select_share if config.policy == "share" else select_mass
        visit = policy(config, estimate, forced) & inside
        if config.top_pages is not None:
            count = visit.sum(dim=-1, keepdim=True)
            cap = forced.sum(dim=-1, keepdim=True).clamp(min=config.top_pages)
            visit = select_topk(torch.where(visit, estimate, -math.inf), forced, torch.minimum(count, cap), groups)
    modes = config.head_modes[layer] if config.head_modes else ()
    if set(modes) - {"gate"}:
        uniform = None
        dense, window = (
            torch.tensor([mode == name for mode in modes], device=device)[None, :, None] for name in ("dense", "window")
        )
        visit = torch.where(dense, inside, torch.where(window, forced, visit))
    if uniform is None:  # a policy that wants nothing still reads the best group: attention over none has no meaning
        best = _best(torch.where(inside, estimate, -math.inf), torch.ones_like(visit[..., :1], dtype=torch.int32), 1)
        visit = visit | (best & ~visit.any(dim=-1, keepdim=True))
    wanted = None
    if config.scope == "union":
        wanted = visit.sum(dim=-1, dtype=torch.int32)
        visit, uniform = visit.any(dim=1, keepdim=True).expand(visit.shape), None
    width = groups if uniform is None else max(int(uniform.max()), 1)
    if module is not None and scores.kernels == "triton":
        listed, counts = module.listing(visit, width)
        return Selection(listed, counts, uniform, num_forced, wanted, visit)
    counts = visit.sum(dim=-1, dtype=torch.int32)
    return Selection(_ascending(visit, width), counts, uniform, num_forced, wanted)


def _ascending(visit: Tensor, width: int) -> Tensor:
    """Indices of the True entries of visit [B, Hkv, G], ascending, then -1: [B, Hkv, width] int32. Each True entry goes
    to the place that its rank says, the others to a column that is cut off."""
    place = torch.where(visit, visit.cumsum(dim=-1) - 1, width)
    listed = torch.full((*visit.shape[:-1], width + 1), -1, dtype=torch.int32, device=visit.device)
    index = torch.arange(visit.shape[-1], dtype=torch.int32, device=visit.device).expand(visit.shape)
    return listed.scatter_(-1, place, index)[..., :width]


def visit_mask(selection: Selection, num_groups: int) -> Tensor:
    """[B, Hkv, G]: True where a group is listed."""
    if selection.visit is not None:
        return selection.visit
    groups = selection.groups.long()
    visit = torch.zeros((*groups.shape[:2], num_groups + 1), dtype=torch.bool, device=groups.device)
    return visit.scatter_(-1, torch.where(groups < 0, num_groups, groups), True)[..., :num_groups]


def _float_margin(unread: Tensor, lse: Tensor) -> Tensor:
    """What float32 sums of exponentials may be off by, in nats: logarithms of masses `unread` and `lse`."""
    return 2.0**-20 * (torch.where(torch.isfinite(unread), unread.abs(), 0) + lse.abs()) + 2.0**-18


@torch.inference_mode()
def bounds(
    cache: Cache, layer: int, q: Tensor, table: np.ndarray, lengths: np.ndarray, scores: Scores, selection: Selection
) -> Scores:
    """`scores` with bounds from the codes of single keys, of the groups that `selection` left out; only their codes are
    read (and padding to the longest list), and counted in `bound_bytes_read`. The bounds of the visited ones are left
    empty: nothing asks for them. Returns `scores` as they are where the method's own bounds serve. Synchronises."""
    inner = cache.bound
    if inner is None:
        return scores
    batch, kv_heads, groups = scores.estimate.shape
    size, unit_tokens, device = cache.config.S, inner.config.unit_tokens, q.device
    a = q.float().reshape(batch, kv_heads, -1, q.shape[-1]) * (1 / math.sqrt(q.shape[-1]))
    left = ~visit_mask(selection, groups) & (scores.estimate > -math.inf)
    width = int(left.sum(dim=-1).max())
    slack = logit_slack(a, cache.largest_key[layer][:, None, None])[..., 0]
    if inner.centre[layer] is None or not width:
        upper = torch.where(left, math.inf, -math.inf)[:, :, None].expand(*a.shape[:3], groups)
        return replace(scores, lower=torch.full_like(upper, -math.inf), upper=upper, slack=slack)
    listed = _ascending(left, width).long()
    tokens = (listed.clamp(min=0)[..., None] * size + torch.arange(size, device=device)).flatten(-2)
    units = torch.from_numpy(np.maximum(table, 0).astype(np.int64)).to(device)[:, None].expand(-1, kv_heads, -1)
    heads = torch.arange(kv_heads, device=device)[:, None]
    rows = (units.gather(-1, tokens // unit_tokens) * kv_heads + heads) * unit_tokens + tokens % unit_tokens
    codes = {
        name: pool.view(-1, *pool.shape[3:]).index_select(0, rows.reshape(-1)).view(*rows.shape, *pool.shape[3:])
        for name, pool in inner.summaries[layer].items()
    }
    cache.bound_bytes_read += sum(part.nbytes for part in codes.values())
    _, least, most = score_summary(inner.config, inner.constants(layer), codes, a)
    assert least is not None and most is not None
    place = torch.where(listed < 0, groups, listed)[:, :, None].expand(-1, -1, a.shape[2], -1)

    def of_groups(part: Tensor) -> Tensor:
        """Bounds [B, Hkv, R, X S] of single keys as bounds of their groups, at the groups' places: [B, Hkv, R, G]."""
        mass = torch.logsumexp(part.unflatten(-1, (width, size)), dim=-1)
        everywhere = torch.full((*a.shape[:3], groups + 1), -math.inf, device=device)
        return everywhere.scatter_(-1, place, mass)[..., :groups]

    return replace(scores, lower=of_groups(least), upper=of_groups(most), slack=slack)


@torch.inference_mode()
def certify(cache: Cache, layer: int, scores: Scores, visited: Selection, out: Tensor, lse: Tensor) -> Certificate:
    """Bounds of what `visited` left out, from valid bounds alone (design section 4): out [B, Hq, D] and lse [B, Hq] are
    what `attend` gave for exactly these groups. Raises ValueError for a method without bounds."""
    if scores.upper is None or scores.slack is None:
        raise ValueError(f"method {cache.config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, groups = scores.upper.shape
    skipped = ~visit_mask(visited, groups)[:, :, None]
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
    return Certificate(share.amax(dim=-1), torch.where(share > 0, share * reach, 0.0).amax(dim=-1))


@torch.inference_mode()
def escalate(config: EpsConfig, scores: Scores, selection: Selection, lse: Tensor) -> tuple[Selection, Selection]:
    """(groups to visit besides, all visited groups) so that the certificate of the whole falls to config.epsilon, where
    `selection` was attended with lse [B, Hq]. Heads whose certificate holds already get none. The unvisited are ordered
    by their largest upper mass relative to what was read; of them the shortest run is taken after which even the upper
    masses of the rest are small against what was read plus the lower masses of the run. No synchronisation."""
    if scores.upper is None or scores.lower is None or scores.slack is None:
        raise ValueError(f"method {config.method} has no bounds: nothing can be certified")
    batch, kv_heads, repeat, groups = scores.upper.shape
    visit, lse = visit_mask(selection, groups), lse.reshape(batch, kv_heads, repeat, 1)
    # float64: a float32 scan of many groups is off by more than the margin
    upper = torch.where(visit[:, :, None], -math.inf, scores.upper.double())
    lower = torch.where(visit[:, :, None], -math.inf, scores.lower.double())
    order = (upper - lse).amax(dim=2).sort(dim=-1, descending=True, stable=True).indices
    by_need = order[:, :, None].expand(upper.shape)
    nothing = torch.full_like(lse, -math.inf)
    # entry j: the first j of the order are visited, the others are not
    rest = torch.logcumsumexp(upper.gather(-1, by_need).flip(-1), dim=-1).flip(-1)
    rest = torch.cat([rest, nothing], dim=-1)
    gained = torch.cat([nothing, torch.logcumsumexp(lower.gather(-1, by_need), dim=-1)], dim=-1)
    odds = _log_odds(config.epsilon)
    # twice the margin: the certificate that is taken afterwards pays it once more
    margin = scores.slack[..., None] + 2 * _float_margin(rest, lse)
    holds = (rest <= odds + torch.logaddexp(lse, gained) - margin).all(dim=2)
    # the first True; past the sequence's end upper masses are -inf, so the last entry always holds
    count = (holds.cumsum(dim=-1) == 0).sum(dim=-1, keepdim=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(groups, device=order.device).expand(order.shape))
    extra = rank < count
    if config.scope == "union":
        extra = extra.any(dim=1, keepdim=True) & ~visit
    whole = visit | extra
    return tuple(  # type: ignore[return-value]
        Selection(_ascending(mask, groups), mask.sum(dim=-1, dtype=torch.int32), None, forced, wanted)
        for mask, forced, wanted in (
            (extra, np.zeros(batch, np.int64), None),
            (whole, selection.forced, selection.wanted),
        )
    )


def _log_odds(epsilon: float) -> float:
    """log(epsilon / (1 - epsilon)), with its limits at 0 and 1."""
    if epsilon in (0, 1):
        return math.inf if epsilon else -math.inf
    return math.log(epsilon) - math.log1p(-epsilon)


@torch.inference_mode()
def skipped_mass(scores: Scores, selection: Selection) -> Tensor:
    """Estimated share of the softmax left unread [B, Hkv]: an estimate, no bound. Groups without an estimate, which
    are always visited, are left out of both sides."""
    if scores.kernels == "numba":
        module = kernels_module(scores.kernels)
        assert module is not None
        share = module.skipped_mass(scores, selection)
        if share is not None:
            return share
    estimate = torch.where(torch.isfinite(scores.estimate), scores.estimate, -math.inf)
    largest = estimate.amax(dim=-1, keepdim=True).clamp(min=-3e38)
    mass = torch.exp(estimate - largest)
    skipped = torch.where(visit_mask(selection, mass.shape[-1]), 0, mass)
    return skipped.sum(dim=-1) / mass.sum(dim=-1).clamp(min=1e-30)
