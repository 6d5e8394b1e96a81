"""DMC without training: tokens like the one before are merged with it (after Nawrot et al. 2024, arXiv 2403.09636)."""

import numpy as np

from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, turned

SOURCE = "after DMC, arXiv 2403.09636: a trained neuron decides there, a cosine here; an ablation, not the method"
COUNT_BYTES = 4  # how many tokens a head's newest entry stands for: what the next one would be merged by


def rewrite(layer: Layer, tau: float, window: int = 12) -> Rewritten:
    """A head's token is merged with the one before where their keys' cosine before RoPE is above `tau`; the newest
    `window` and the first are not. An entry is the mean of its tokens' keys before RoPE, turned to the last one's
    position, and of their values: DMC's sums with all importances equal. It counts as one key, as in DMC."""
    length, heads, dim = layer.keys.shape
    keys, values, positions = [], [], []
    for head in range(heads):
        plain = turned(layer.keys[:, head], -np.arange(length), layer.frequencies)
        merged = cosines(plain) > tau
        merged[max(length - window, 0) :] = False
        (firsts,) = np.nonzero(~merged)
        lasts = np.append(firsts[1:], length) - 1
        counts = (lasts - firsts + 1)[:, None]
        means = [np.add.reduceat(rows.astype(np.float64), firsts) / counts for rows in (plain, layer.values[:, head])]
        keys.append(turned(means[0], lasts, layer.frequencies).astype(np.float32))
        values.append(means[1].astype(np.float32))
        positions.append(lasts)
    row_bytes = 2 * dim * ELEMENT_BYTES * sum(map(len, positions))
    return Rewritten(keys, values, positions, row_bytes, table_bytes=heads * COUNT_BYTES)


def cosines(rows: np.ndarray) -> np.ndarray:
    """Return the cosines of rows [T, D] with the row before: [T], -inf for the first; 0 where one of the two is 0."""
    norms = np.linalg.norm(rows, axis=1)
    scale = norms[1:] * norms[:-1]
    along = (rows[1:] * rows[:-1]).sum(1) / np.where(scale > 0, scale, 1.0)
    return np.append(-np.inf, np.clip(along, -1.0, 1.0))
