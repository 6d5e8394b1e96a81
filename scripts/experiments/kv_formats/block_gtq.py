"""Block-GTQ: more bits to those RoPE pairs of K that weigh more in logits (arXiv 2606.24033; code
JIA-Lab-research/blockgtq)."""

from functools import cache
from statistics import NormalDist

import numpy as np

from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, in_place, packed

SOURCE = "Block-GTQ, arXiv 2606.24033, code JIA-Lab-research/blockgtq; codebooks by formula where it samples"
MOST_BITS = 8
ROTATED = 3  # bits of a group of pairs from which on it is rotated
SEED, VALUE_SEED = 42, 1000  # of rotations: of a width of K, and of a head of V


def rewrite(layer: Layer, bits: int) -> Rewritten:
    """K by `allocation` of `bits` a dimension on average: pairs of equal bits are one group, with a norm of its own.
    V by `bits` each (TurboQuant, Zandieh et al. 2025, arXiv 2504.19874), rotated. All tokens; rotations and codebooks
    follow from seeds and widths and are the method's, not the prompt's: they are not counted."""
    length, heads, dim = layer.keys.shape
    keys, values = np.empty_like(layer.keys, np.float64), np.empty_like(layer.values, np.float64)
    row_bytes, half = 0, dim // 2
    for head in range(heads):
        own = layer.keys[:, head].astype(np.float64)
        squares = own[:, :half] ** 2 + own[:, half:] ** 2
        given = allocation(0.5 * (layer.query_squares[head] + squares.mean(0)), half * bits)
        widths = np.unique(given)
        for width in widths.tolist():
            (pairs,) = np.nonzero(given == width)
            dims = np.concatenate([pairs, pairs + half])
            rotation = haar(len(dims), SEED + width) if width >= ROTATED else np.eye(len(dims))
            keys[:, head, dims] = said(own[:, dims], width, rotation)
        values[:, head] = said(layer.values[:, head], bits, haar(dim, VALUE_SEED + head))
        row_bytes += length * (packed(2 * int(given.sum())) + len(widths) * ELEMENT_BYTES)
        row_bytes += length * (packed(dim * bits) + ELEMENT_BYTES)
    return in_place(keys, values, row_bytes, table_bytes=heads * half)  # a byte says a pair's bits


def allocation(energies: np.ndarray, total: int) -> np.ndarray:
    """Bits [n] int64 of pairs of these energies [n], `total` in all, 1 to MOST_BITS each, that make sum(energies *
    4^-bits) least: one more each time to the pair that has most left, ties to the lower index. Raises ValueError where
    `total` cannot be divided so."""
    if not len(energies) <= total <= MOST_BITS * len(energies):
        raise ValueError(f"{total} bits for {len(energies)} pairs of 1 to {MOST_BITS}: give others")
    bits = np.ones(len(energies), np.int64)
    for _ in range(total - len(energies)):
        left = np.where(bits < MOST_BITS, energies * 4.0**-bits, -1.0)
        bits[left.argmax()] += 1
    return bits


def said(x: np.ndarray, bits: int, rotation: np.ndarray) -> np.ndarray:
    """x [T, d] as a float16 norm and `bits` a dimension of its rotated direction say it; directions that codes say have
    length 1 again, so that norms stay (the source's norm correction). [T, d] float64."""
    x, dim = x.astype(np.float64), x.shape[1]
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / np.where(norm > 0, norm, 1.0) @ rotation.T
    levels = codebook(bits)
    chosen = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, unit * np.sqrt(dim))]
    with np.errstate(over="ignore"):
        stored = norm.astype(np.float16).astype(np.float64)
    found: np.ndarray = chosen / np.linalg.norm(chosen, axis=1, keepdims=True) @ rotation * stored
    return found


@cache
def haar(dim: int, seed: int) -> np.ndarray:
    """A rotation drawn uniformly: [d, d] float64, determinant 1."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    q = q * np.sign(np.diag(r))
    if np.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return q


@cache
def codebook(bits: int) -> np.ndarray:
    """The Lloyd-Max levels of a standard normal number: [2^bits] float64, ascending."""
    normal, count = NormalDist(), 2**bits
    # where levels are densest at high rates: as the density's cube root (Panter and Dite 1951)
    levels = np.array([3**0.5 * normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    for _ in range(
        30
    ):  # Newton's steps towards levels that are the means of what is nearest: Lloyd's own take thousands
        edges = np.array([-40.0, *((levels[1:] + levels[:-1]) / 2).tolist(), 40.0])  # past them is nothing in float64
        density = np.array([normal.pdf(edge) for edge in edges])
        mass = np.diff([normal.cdf(edge) for edge in edges])
        means = (density[:-1] - density[1:]) / mass
        below = density[:-1] * (means - edges[:-1]) / mass / 2  # how means follow the level below, and the one above
        above = density[1:] * (edges[1:] - means) / mass / 2
        slopes = np.diag(below + above) + np.diag(below[1:], -1) + np.diag(above[:-1], 1)
        levels = levels - np.linalg.solve(np.eye(count) - slopes, levels - means)
    return (levels - levels[::-1]) / 2  # symmetric to the last bit
