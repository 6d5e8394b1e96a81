"""Quant VideoGen: the nearest of 256 centroids, and two bits of what is left (arXiv 2602.02958; code
svg-project/Quant-VideoGen, prq.py)."""

import numpy as np

from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, about_zero, between, in_place, packed

SOURCE = "Quant VideoGen, arXiv 2602.02958, code svg-project/Quant-VideoGen; a prompt is one block of tokens"
CENTROIDS = 256  # one byte says which
BLOCK = 64  # dimensions that share a scale
BITS = 2
MOST_ROUNDS, STILL = 100, 1e-4  # of k-means, and how far its centroids move when it ends
SEED = 0


def rewrite(layer: Layer, stages: int = 1, zeros: bool = False) -> Rewritten:
    """Rewrite K and V, head by head: `stages` times k-means over the prompt's tokens, each of what the one before left;
    then codes of BITS of the rest, by one scale a block of BLOCK dimensions (the last may have fewer), with `zeros`
    between its least and largest (the source's asymmetric form: one level more, and two bytes)."""
    length, heads, dim = layer.keys.shape
    found = [np.empty((length, heads, dim)) for _ in range(2)]
    table_bytes = 0
    for index, rows in enumerate((layer.keys, layer.values)):
        for head in range(heads):
            rest = rows[:, head].astype(np.float64)
            for stage in range(stages):
                centroids, ids = kmeans(rest, np.random.default_rng([SEED, index, head, stage]))
                rest = rest - centroids[ids]
                table_bytes += centroids.size * ELEMENT_BYTES
            quantise = between if zeros else about_zero
            blocks = [quantise(rest[:, start : start + BLOCK], BITS) for start in range(0, dim, BLOCK)]
            # what the codes miss of the rest is what they miss of the row
            found[index][:, head] = rows[:, head] - (rest - np.concatenate(blocks, axis=1))
    scales = -(-dim // BLOCK) * (2 if zeros else 1) * ELEMENT_BYTES
    row_bytes = 2 * heads * length * (stages + packed(dim * BITS) + scales)
    return in_place(found[0], found[1], row_bytes, table_bytes)


def kmeans(rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(centroids [C, D] in float16's numbers, which one is nearest [T] uint8) of rows [T, D], C the lesser of CENTROIDS
    and T: Lloyd's rounds from drawn rows; a centroid that no row is nearest to stays."""
    centroids = rows[np.sort(rng.choice(len(rows), min(CENTROIDS, len(rows)), replace=False))]
    for _ in range(MOST_ROUNDS):
        ids, before, centroids = nearest(rows, centroids), centroids, centroids.copy()
        order = np.argsort(ids, kind="stable")
        used, firsts, counts = np.unique(ids[order], return_index=True, return_counts=True)
        centroids[used] = np.add.reduceat(rows[order], firsts) / counts[:, None]
        if np.linalg.norm(centroids - before, axis=1).max() < STILL:
            break
    centroids = centroids.astype(np.float16).astype(np.float64)
    return centroids, nearest(rows, centroids)


def nearest(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return, of rows [T, D], the index of the nearest of centroids [C, D], ties to the lower one: [T] uint8."""
    distances = (centroids**2).sum(1) - 2 * rows @ centroids.T
    return distances.argmin(1).astype(np.uint8)
