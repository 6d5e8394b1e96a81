"""Log-determinant eviction, a reconstruction: the rows whose keys span most (D-optimal design; the determinant lemma
is standard, its use for caches is ours).

G = lambda I + the sum of k k^T over kept rows. Without a row, log det G falls by -log(1 - h), with h = k^T G^-1 k its
leverage; greedily, the row of the least leverage goes. Exactly this costs T D^2 a row, too much for thousands: rows go
BLOCK at a time, one after another by their leverages at that moment, but among the 2 BLOCK lowest of the block's start.
Below 2 BLOCK rows this is the greedy order itself. Leverages only rise as rows go, so one computed earlier bounds
today's from below and most need not be computed again (lazy greedy; Minoux 1978)."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, descending, pinned, ranked, rounded

RIDGE = 0.01  # lambda over the mean eigenvalue of the sum of k k^T over all rows
FLOOR = 1e-12  # of 1 - h: below, rounding has eaten its digits
BLOCK = 64  # rows that go between two looks at the leverages
RISE = 1e-6  # a share far above the rounding of a leverage: an earlier one bounds today's to within it
SPEC = PolicySpec(source="log-determinant lemma", deviations="a reconstruction for caches", keys=True)


def factor(keys: np.ndarray, ridge: float) -> np.ndarray:
    """Lower Cholesky factor [D, D] of ridge I + keys^T keys, keys [T, D]."""
    return np.linalg.cholesky(keys.T @ keys + ridge * np.eye(keys.shape[1]))


def downdate(lower: np.ndarray, keys: np.ndarray) -> np.ndarray | None:
    """Lower Cholesky factor [D, D] of L L^T - keys^T keys, keys [b, D], which is L (I - W W^T) L^T, where
    L W = keys^T; None where rounding leaves no positive diagonal: factor again."""
    half = np.linalg.solve(lower, keys.T)  # [D, b]
    try:
        changed: np.ndarray = lower @ np.linalg.cholesky(np.eye(len(lower)) - half @ half.T)
    except np.linalg.LinAlgError:
        return None
    return changed


def leverages(inverse: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """k^T G^-1 k in [0, 1) of each of keys [T, D] that G = L L^T holds, of the inverse [D, D] of L: [T]."""
    half = keys @ inverse.T
    return np.einsum("td,td->t", half, half)


def lowest(inverse: np.ndarray, keys: np.ndarray, known: np.ndarray, among: np.ndarray, number: int) -> np.ndarray:
    """The `number` rows of keys [T, D] of least leverage `among` these, ascending both; of equal ones the last. `known`
    [T]: each row's leverage or one of before other rows went; those computed here take their places."""
    waiting = among[np.argsort(known[among])]
    done = 0
    while done < len(waiting):
        looked = waiting[done : max(2 * done, number)]
        known[looked] = leverages(inverse, keys[looked])
        done += len(looked)
        if done < len(waiting):
            worst = np.partition(known[waiting[:done]], number - 1)[number - 1]
            if known[waiting[done]] > worst + RISE * worst:
                break
    looked = np.sort(waiting[:done])
    found: np.ndarray = np.sort(looked[descending(known[looked])[::-1][:number]])
    return found


def go_first(inverse: np.ndarray, keys: np.ndarray, number: int) -> list[int]:
    """The first `number` of keys [n, D] that go, by the least leverage after those before them went. Without one, the
    Gram matrix M = K G^-1 K^T becomes M + m m^T / (1 - h), m its row and h its diagonal entry."""
    half = keys @ inverse.T
    gram = half @ half.T
    gone: list[int] = []
    for _ in range(number):
        left = gram.diagonal().astype(np.float32)
        left[gone] = np.inf
        # of equal ones the last goes
        least = len(left) - 1 - int(left[::-1].argmin())
        gone.append(least)
        row = gram[least].copy()
        gram += np.outer(row, row / max(1 - row[least], FLOOR))
    return gone


def kept(head: Head, budget: int, rule: Rule) -> np.ndarray:
    """Rows of one head, ascending."""
    first = pinned(head, rule)
    rows = min(budget, head.rows)
    if rows <= len(first):
        return np.sort(ranked(head, np.zeros(head.rows), rule)[:rows])
    keys = rounded(head.keys)
    ridge = RIDGE * np.square(keys).sum() / keys.shape[1] or 1.0  # keys of 0: every leverage is 0
    lower = factor(keys, ridge)
    stays = np.ones(head.rows, bool)
    free = np.ones(head.rows, bool)
    free[first] = False
    known = np.zeros(head.rows)
    while over := int(stays.sum()) - rows:
        inverse = np.linalg.inv(lower)
        low = lowest(inverse, keys, known, np.flatnonzero(stays & free), 2 * BLOCK)
        gone = low[go_first(inverse, keys[low], min(over, BLOCK))]
        stays[gone] = False
        less = downdate(lower, keys[gone])
        lower = factor(keys[stays], ridge) if less is None else less
    return np.flatnonzero(stays)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    return [[kept(head, budget, rule) for head in heads] for heads in layers]
