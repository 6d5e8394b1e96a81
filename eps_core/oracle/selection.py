"""The oracle's selection of one (sequence, kv head): guards, policies, certificate, escalation, as the rules read.

`estimate` [n] is the natural log of each group's mass (max over the query heads), +inf for a group without a valid
summary. Everything returns a boolean mask [n] of groups to visit. Ties go to the lower index. Design section 5.
"""

import heapq

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.paging.groups import GroupState


def num_groups(length: int, group_tokens: int) -> int:
    return -(-length // group_tokens)


def guards(config: EpsConfig, length: int) -> np.ndarray:
    """Always visited [n]: the first and last tokens, the open group, and everything below `min_context`."""
    n, size = num_groups(length, config.store.S), config.store.S
    index = np.arange(n)
    first = index < num_groups(min(config.read.first_tokens, length), size)
    last = index >= max(length - config.read.last_tokens, 0) // size
    is_open = (index == n - 1) & (length % size != 0)
    return first | last | is_open | (length < config.read.min_context)


def missing_groups(state: GroupState, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Groups without a valid summary [B, G] bool, one group at a time: open (as long as any group of its mean is)
    or overwritten. False past the sequence's end. table [B, M], lengths [B]."""
    size, per_unit, together = state.group_tokens, state.groups_per_unit, state.groups_per_seal
    missing = np.zeros((len(table), table.shape[1] * per_unit * together), bool)
    for b, length in enumerate(lengths.tolist()):
        for group in range(num_groups(length, size // together)):
            seal = group // together
            unit, sub = divmod(seal, per_unit)
            written = state.fill[table[b, unit] * per_unit + sub]
            missing[b, group] = written != size or (seal + 1) * size > length
    return missing


def best_first(estimate: np.ndarray) -> np.ndarray:
    """Indices by falling estimate, the lower index first among equals."""
    return np.argsort(-estimate, kind="stable")


def select_topk(config: EpsConfig, estimate: np.ndarray, forced: np.ndarray, length: int) -> np.ndarray:
    """Forced groups, then the best, until the budget (in groups, forced ones counted) is spent."""
    visit = forced.copy()
    for group in best_first(estimate):
        if visit.sum() >= config.budget_groups(length):
            break
        visit[group] = True
    return visit


def select_threshold(config: EpsConfig, estimate: np.ndarray, forced: np.ndarray) -> np.ndarray:
    """The product requirements' rule: newest to oldest, skip when B < T / alpha, T the top_pages-th best so far. Where
    estimates are logarithms of masses the same rule of the masses is B < T - log alpha: dividing a negative T would
    raise it."""
    assert config.read.top_pages is not None
    visit = forced.copy()
    heap: list[float] = []  # of the best `top_pages` estimates scanned so far
    for group in reversed(range(len(estimate))):
        if not np.isfinite(estimate[group]):
            continue
        full = len(heap) == config.read.top_pages
        threshold = -np.inf
        if full:
            threshold = (
                heap[0] / config.read.alpha if config.store.has_norm_estimate else heap[0] - np.log(config.read.alpha)
            )
        if estimate[group] >= threshold:
            visit[group] = True
        if full:
            heapq.heappushpop(heap, estimate[group])
        else:
            heapq.heappush(heap, estimate[group])
    return visit


def visited(config: EpsConfig, estimate: np.ndarray, length: int, mode: str = "gate") -> tuple[np.ndarray, np.ndarray]:
    """(visit [n], forced [n]) of one (sequence, kv head) by the configured policy, estimate [n]. A `dense` head visits
    everything, a `window` head what is forced (and one group at least)."""
    forced = guards(config, length) | np.isposinf(estimate)
    if mode == "dense":
        return np.ones_like(forced), forced
    if mode == "window":
        visit = forced.copy()
        if not visit.any():
            visit[best_first(estimate)[0]] = True
        return visit, forced
    if config.read.policy == "topk":
        return select_topk(config, estimate, forced, length), forced
    visit = select_threshold(config, estimate, forced)
    if not visit.any():  # attention over nothing has no meaning
        visit[best_first(estimate)[0]] = True
    return visit, forced


def skipped_share(estimate: np.ndarray, visit: np.ndarray) -> float:
    """Estimated share of the softmax left unread; groups without an estimate (always visited) are left out of both
    sides, which makes it an estimate from above as far as they matter."""
    if visit.all():
        return 0.0
    return float(np.exp(_log_total(estimate[~visit]) - _log_total(estimate)))


def _log_total(estimate: np.ndarray) -> float:
    finite = estimate[np.isfinite(estimate)]
    if not len(finite):
        return -np.inf
    return float(finite.max() + np.log(np.exp(finite - finite.max()).sum()))


def float_margin(unread: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """What float32 sums of exponentials may be off by, in nats: logarithms of masses `unread` and `lse`."""
    finite = np.where(np.isfinite(unread), np.abs(unread), 0)
    return 2.0**-20 * (finite + np.abs(lse)) + 2.0**-18


def certified_share(upper: np.ndarray, visit: np.ndarray, lse: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Upper bound of each query head's share of the softmax outside `visit` [n] (design section 4): upper [R, n] bounds
    log A_p, lse [R] is the log mass that was read, slack [R] what its float32 logits may be off by."""
    if visit.all():
        return np.zeros(len(lse))
    unread = np.logaddexp.reduce(upper[:, ~visit], axis=1)
    margin = slack + float_margin(unread, lse)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(lse - margin - unread))


def escalation(
    epsilon: float, lower: np.ndarray, upper: np.ndarray, visit: np.ndarray, lse: np.ndarray, slack: np.ndarray
) -> np.ndarray:
    """Groups [n] to visit besides `visit` so that the certified share falls to epsilon for every query head: the
    shortest run of the unvisited, in falling order of the largest upper mass relative to what was read, after which
    even the upper masses of the rest are small against what was read plus the lower masses of the run."""
    order = np.flatnonzero(~visit)
    order = order[best_first((upper - lse[:, None]).max(axis=0)[order])]
    rest = np.full((len(lse), len(order) + 1), -np.inf)
    rest[:, :-1] = np.logaddexp.accumulate(upper[:, order[::-1]], axis=1)[:, ::-1]
    gained = np.full_like(rest, -np.inf)
    gained[:, 1:] = np.logaddexp.accumulate(lower[:, order], axis=1)
    with np.errstate(divide="ignore"):
        odds = np.log(epsilon) - np.log1p(-epsilon)
    # twice the margin: the certificate that is taken afterwards pays it once more
    margin = slack[:, None] + 2 * float_margin(rest, lse[:, None])
    holds = (rest <= odds + np.logaddexp(lse[:, None], gained) - margin).all(axis=0)
    extra = np.zeros_like(visit)
    extra[order[: int(np.argmax(holds))]] = True
    return extra
