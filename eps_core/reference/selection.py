"""The oracle's selection of one (sequence, kv head): the tokens always selected, policies, error bound and extension.

`estimate` [n] is the natural log of each group's mass (max over the query heads), +inf for a group without a valid
summary. Everything returns a boolean mask [n] of groups to visit. Ties go to the lower index.
"""

import heapq

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.groups import GroupState


def num_groups(length: int, group_size: int) -> int:
    return -(-length // group_size)


def sink_and_recent(config: EpsConfig, length: int) -> np.ndarray:
    """Always selected [n]: the first and last tokens, the partial group, and everything below `min_context`."""
    n, size = num_groups(length, config.cache_config.S), config.cache_config.S
    index = np.arange(n)
    first = index < num_groups(min(config.selection_config.num_sink_tokens, length), size)
    last = index >= max(length - config.selection_config.num_recent_tokens, 0) // size
    is_open = (index == n - 1) & (length % size != 0)
    return first | last | is_open | (length < config.selection_config.min_context)


def missing_groups(state: GroupState, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Groups without a valid summary [B, G] bool, one group at a time: open (as long as any group of its mean is)
    or overwritten. False past the sequence's end. table [B, M], lengths [B]."""
    size, per_unit, together = state.group_size, state.groups_per_unit, state.groups_per_span
    missing = np.zeros((len(table), table.shape[1] * per_unit * together), bool)
    for b, length in enumerate(lengths.tolist()):
        for group in range(num_groups(length, size // together)):
            span = group // together
            unit, sub = divmod(span, per_unit)
            written = state.fill[table[b, unit] * per_unit + sub]
            missing[b, group] = written != size or (span + 1) * size > length
    return missing


def best_first(estimate: np.ndarray) -> np.ndarray:
    """Indices by falling estimate, the lower index first among equals."""
    return np.argsort(-estimate, kind="stable")


def select_topk(config: EpsConfig, estimate: np.ndarray, always_selected: np.ndarray, length: int) -> np.ndarray:
    """Forced groups, then the best, until the budget (in groups, forced ones counted) is spent."""
    selected_mask = always_selected.copy()
    for group in best_first(estimate):
        if selected_mask.sum() >= config.budget_groups(length):
            break
        selected_mask[group] = True
    return selected_mask


def select_threshold(config: EpsConfig, estimate: np.ndarray, always_selected: np.ndarray) -> np.ndarray:
    """The threshold rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far. Where estimates
    are logarithms of masses the same rule of the masses is B < T - log alpha: dividing a negative T would raise it."""
    assert config.selection_config.top_pages is not None
    selected_mask = always_selected.copy()
    heap: list[float] = []  # of the best `top_pages` estimates scanned so far
    for group in reversed(range(len(estimate))):
        if not np.isfinite(estimate[group]):
            continue
        full = len(heap) == config.selection_config.top_pages
        threshold = -np.inf
        if full:
            threshold = (
                heap[0] / config.selection_config.alpha
                if config.cache_config.method_spec.norm_estimate
                else heap[0] - np.log(config.selection_config.alpha)
            )
        if estimate[group] >= threshold:
            selected_mask[group] = True
        if full:
            heapq.heappushpop(heap, estimate[group])
        else:
            heapq.heappush(heap, estimate[group])
    return selected_mask


def selected(
    config: EpsConfig, estimate: np.ndarray, length: int, mode: str = "sparse"
) -> tuple[np.ndarray, np.ndarray]:
    """(visit [n], forced [n]) of one (sequence, kv head) by the configured policy, estimate [n]. A `dense` head selects
    everything, a `window` head what is always selected (and one group at least)."""
    always_selected = sink_and_recent(config, length) | np.isposinf(estimate)
    if mode == "dense":
        return np.ones_like(always_selected), always_selected
    if mode == "sparse" and config.selection_config.policy == "topk":
        return select_topk(config, estimate, always_selected, length), always_selected
    selected_mask = always_selected.copy() if mode == "window" else select_threshold(config, estimate, always_selected)
    if not selected_mask.any():  # attention over nothing has no meaning
        selected_mask[best_first(estimate)[0]] = True
    return selected_mask, always_selected


def skipped_share(estimate: np.ndarray, selected_mask: np.ndarray) -> float:
    """Estimated share of the softmax left unread; groups without an estimate (always selected) are left out of both
    sides, which makes it an estimate from above as far as they matter."""
    known = np.isfinite(estimate)
    if selected_mask.all() or not known.any():
        return 0.0
    mass = np.exp(np.where(known, estimate, -np.inf) - estimate[known].max())
    return float(mass[~selected_mask].sum() / mass.sum())


def float_margin(unread: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return the largest error of float32 sums of exponentials, in nats, of log masses `unread` and `lse`."""
    finite = np.where(np.isfinite(unread), np.abs(unread), 0)
    return 2.0**-20 * (finite + np.abs(lse)) + 2.0**-18


def bounded_share(upper: np.ndarray, selected_mask: np.ndarray, lse: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Upper bound of each query head's share of the softmax outside `selected_mask` [n]: upper [R, n] bounds log A_p,
    lse [R] is the log mass that was read, slack [R] what its float32 logits may be off by."""
    if selected_mask.all():
        return np.zeros(len(lse))
    unread = np.logaddexp.reduce(upper[:, ~selected_mask], axis=1)
    margin = slack + float_margin(unread, lse)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(lse - margin - unread))


def escalation(
    epsilon: float, lower: np.ndarray, upper: np.ndarray, selected_mask: np.ndarray, lse: np.ndarray, slack: np.ndarray
) -> np.ndarray:
    """Groups [n] to visit besides `selected_mask` so that the bounded share falls to epsilon for every query head: the
    shortest run of the unvisited, in falling order of the largest upper mass relative to what was read, after which
    even the upper masses of the rest are small against what was read plus the lower masses of the run."""
    order = np.flatnonzero(~selected_mask)
    order = order[best_first((upper - lse[:, None]).max(axis=0)[order])]
    rest = np.full((len(lse), len(order) + 1), -np.inf)
    rest[:, :-1] = np.logaddexp.accumulate(upper[:, order[::-1]], axis=1)[:, ::-1]
    gained = np.full_like(rest, -np.inf)
    gained[:, 1:] = np.logaddexp.accumulate(lower[:, order], axis=1)
    with np.errstate(divide="ignore"):
        odds = np.log(epsilon) - np.log1p(-epsilon)
    # twice the margin: the error bound that is taken afterwards pays it once more
    margin = slack[:, None] + 2 * float_margin(rest, lse[:, None])
    holds = (rest <= odds + np.logaddexp(lse[:, None], gained) - margin).all(axis=0)
    extra = np.zeros_like(selected_mask)
    extra[order[: int(np.argmax(holds))]] = True
    return extra
