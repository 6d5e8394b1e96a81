"""The oracle's attention over a set of groups, in float64.

`k`, `v` [n, D] are the selected keys and values of one kv head, `a` [D] = scale * q of one of its query heads.
"""

import numpy as np

State = tuple[np.ndarray, np.ndarray]  # out and lse of attention


def attend_keys(a: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """(out [D], lse): softmax(K a) V and log sum exp(K a). No keys: (0, -inf), the neutral element of `merge`."""
    if not len(k):
        return np.zeros(v.shape[1]), -np.inf
    logits = k.astype(np.float64) @ a.astype(np.float64)
    weights = np.exp(logits - logits.max())
    return weights @ v.astype(np.float64) / weights.sum(), float(logits.max() + np.log(weights.sum()))


def group_masses(a: np.ndarray, k: np.ndarray, group_size: int) -> np.ndarray:
    """True log A_p [G] of every group of k [T, D], the last possibly open: what estimates and bounds speak of."""
    logits = k.astype(np.float64) @ a.astype(np.float64)
    starts = range(0, len(k), group_size)
    return np.array([np.logaddexp.reduce(logits[start : start + group_size]) for start in starts])


def merge(first: State, second: State) -> State:
    """Exact merge of attention over two disjoint sets of keys: out [.., D] with lse [..] (-inf: no keys)."""
    (out1, lse1), (out2, lse2) = first, second
    lse = np.logaddexp(lse1, lse2)
    with np.errstate(invalid="ignore"):
        weight1 = np.where(np.isneginf(lse), 0.0, np.exp(lse1 - lse))
        weight2 = np.where(np.isneginf(lse), 0.0, np.exp(lse2 - lse))
    return out1 * weight1[..., None] + out2 * weight2[..., None], lse
