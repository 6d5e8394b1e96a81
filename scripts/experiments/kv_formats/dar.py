"""DAR without training: fewer dimensions for distant tokens (after arXiv 2606.18587, which trains them)."""

import numpy as np

from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, in_place

SOURCE = "after DAR, arXiv 2606.18587: trained there; the projection by PCA of the prompt is our reconstruction"
TABLE_ELEMENT_BYTES = 4  # projections are float32


def rewrite(layer: Layer, part: float, window: int = 256) -> Rewritten:
    """Return all but the newest `window` tokens by their coordinates, float16, in `part` of D directions, those of the
    most energy of K and of V by head. A logit is then (P^T q) . (P^T k) = q . P P^T k, and an output P (sum of a P^T
    v): as if K and V were projected rows, which are given back."""
    length, heads, dim = layer.keys.shape
    old, few = max(length - window, 0), max(round(part * dim), 1)
    keys, values = layer.keys.astype(np.float64), layer.values.astype(np.float64)
    if old and few < dim:
        for rows in (keys, values):
            for head in range(heads):
                p = directions(rows[:old, head], few)
                rows[:old, head] = (rows[:old, head] @ p).astype(np.float16).astype(np.float64) @ p.T
    else:
        few = dim
    row_bytes = 2 * heads * ELEMENT_BYTES * ((length - old) * dim + old * few)
    tables = 2 * heads * dim * few * TABLE_ELEMENT_BYTES if few < dim else 0
    return in_place(keys, values, row_bytes, tables if old else 0)


def directions(rows: np.ndarray, few: int) -> np.ndarray:
    """The `few` orthonormal directions of the most energy of rows [T, D], not about their mean: [D, few] float64 of
    float32's numbers. |q . k - q . P P^T k| is at most |q_perp| |k_perp|, the parts that they leave out."""
    _, vectors = np.linalg.eigh(rows.T @ rows)
    return vectors[:, ::-1][:, :few].astype(np.float32).astype(np.float64)
