"""Formats that replace the K and V of a prompt, against known formulas and properties."""

import math
from itertools import product

import numpy as np
import pytest

from experiments.kv_formats import block_gtq, dar, dmc, per_channel, prq
from experiments.kv_formats.base import Layer, Rewritten
from experiments.kv_formats.run import OFF, REWRITES, Variant, variants

HALVES = np.sort(np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)[np.r_[0:31744, 32769:64512]])
FREQUENCIES = {dim: 100.0 ** -(np.arange(dim // 2) / (dim // 2)) for dim in (8, 12, 16, 64, 72)}
SHAPES = [(1, 1, 8), (31, 2, 12), (127, 1, 64), (200, 2, 16), (300, 1, 72)]


def layer(length: int, heads: int, dim: int, seed: int = 0, kind: str = "random") -> Layer:
    rng = np.random.default_rng([seed, length, heads, dim])
    size = np.exp(rng.standard_normal(dim))
    keys, values = (rng.standard_normal((length, heads, dim)) * size + 2 * rng.standard_normal(dim) for _ in range(2))
    if kind == "zeros":
        keys, values = keys * 0, values * 0
    if kind == "same":
        keys, values = keys[:1] + keys * 0, values[:1] + values * 0
    squares = rng.uniform(0.1, 9.0, (heads, dim // 2))
    return Layer(keys.astype(np.float32), values.astype(np.float32), FREQUENCIES[dim], squares)


def half_up(x: float) -> float:
    """The least float16 that is at least x."""
    return float(HALVES[np.searchsorted(HALVES, x)])


def half_down(x: float) -> float:
    return float(HALVES[np.searchsorted(HALVES, x, side="right") - 1])


def interval(group: list[float], bits: int) -> list[float]:
    """Numbers as codes between the least and the largest of them say them."""
    zero = half_down(min(group))
    scale = half_up((max(group) - zero) / (2**bits - 1))
    return [zero + (round((x - zero) / scale) * scale if scale else 0.0) for x in group]


def same_rows(found: Rewritten, keys: np.ndarray, values: np.ndarray, atol: float = 0.0) -> None:
    """Every token is there, with these K and V [T, H, D]."""
    for head in range(keys.shape[1]):
        np.testing.assert_array_equal(found.positions[head], np.arange(len(keys)))
        for rows, want in ((found.keys[head], keys[:, head]), (found.values[head], values[:, head])):
            assert rows.dtype == np.float32
            np.testing.assert_allclose(rows, want, rtol=2e-7, atol=atol)


# ------------------------------------------------------------------------------------------------------- per channel


@pytest.mark.parametrize("kind", ["random", "zeros", "same"])
@pytest.mark.parametrize("bits, residual", [(4, 128), (2, 32), (8, 64)])
@pytest.mark.parametrize("shape", SHAPES)
def test_per_channel_is_kivis_algorithm(shape, bits: int, residual: int, kind: str) -> None:
    one = layer(*shape, kind=kind)
    length, heads, dim = shape
    keys, values = one.keys.astype(np.float64), one.values.astype(np.float64)
    num_bits = 0
    for head in range(heads):
        coded = length // residual * residual
        for channel in range(dim):
            for start in range(0, coded, 32):
                group = [keys[t, head, channel] for t in range(start, start + 32)]
                keys[start : start + 32, head, channel] = interval(group, bits)
                num_bits += 32 * bits + 2 * 16
        for token in range(length - residual):
            for start in range(0, dim, 32):
                group = values[token, head, start : start + 32].tolist()
                values[token, head, start : start + 32] = interval(group, bits)
                num_bits += len(group) * bits + 2 * 16
        num_bits += 16 * dim * (length - coded + min(length, residual))
    found = per_channel.rewrite(one, bits, residual)
    same_rows(found, keys, values)
    assert (found.num_bytes, found.table_bytes) == (num_bits // 8, 0)


# --------------------------------------------------------------------------------------------------------- block-gtq


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("total", [4, 7, 12])
def test_greedy_bits_are_the_best_of_all_divisions(seed: int, total: int) -> None:
    energies = np.exp(3 * np.random.default_rng(seed).standard_normal(4))
    bits = block_gtq.allocation(energies, total)
    every = [one for one in product(range(1, 9), repeat=4) if sum(one) == total]
    least = min(sum(e * 4.0**-b for e, b in zip(energies, one, strict=True)) for one in every)
    assert bits.sum() == total and bits.min() >= 1 and bits.max() <= 8
    assert math.isclose((energies * 4.0**-bits).sum(), least, rel_tol=1e-12)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_lloyd_and_maxs(bits: int) -> None:
    """Each level is the mean of what is nearest to it, by quadrature; the mean square error falls by the known
    factors."""
    levels = block_gtq.codebook(bits)
    grid = np.linspace(-9, 9, 400_000)
    density = np.exp(-(grid**2) / 2)
    nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
    mass = np.bincount(nearest, density)
    assert len(levels) == 2**bits and (np.diff(levels) > 0).all()
    # a level's cell begins and ends between two points of the grid
    np.testing.assert_allclose(np.bincount(nearest, density * grid) / mass, levels, rtol=0, atol=1e-4)
    error = (density * (grid - levels[nearest]) ** 2).sum() / density.sum()
    known = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # Max 1960, table I
    if bits in known:
        assert math.isclose(error, known[bits], rel_tol=5e-4)
    else:  # near what it tends to (Panter and Dite 1951)
        assert 0.94 < error / (math.sqrt(3) * math.pi / 2 * 4.0**-bits) < 1


def test_more_bits_err_less_and_bits_by_energy_beat_even_ones() -> None:
    """Logits of queries whose energy lies in a few pairs, as RoPE's slow ones have it."""
    rng = np.random.default_rng(4)
    size = np.tile(np.r_[np.full(4, 6.0), np.full(28, 0.3)], 2)
    keys, queries = (rng.standard_normal((400, 64)) * size for _ in range(2))
    squares = (queries**2).mean(0)
    one = Layer(
        keys[:, None].astype(np.float32), keys[:, None].astype(np.float32), FREQUENCIES[64],
        (squares[:32] + squares[32:])[None],
    )  # fmt: skip
    errors = [np.abs(queries @ (block_gtq.rewrite(one, bits).keys[0] - keys).T).mean() for bits in range(1, 7)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 8
    for bits in (2, 3, 4):
        even = block_gtq.said(keys, bits, block_gtq.haar(64, 7))
        assert errors[bits - 1] < 0.7 * np.abs(queries @ (even - keys).T).mean()


# --------------------------------------------------------------------------------------------------------------- prq


def test_every_stage_leaves_less_and_a_centroid_for_each_row_leaves_nothing() -> None:
    rows = np.random.default_rng(1).standard_normal((900, 16)) + 3
    energies, rest = [(rows**2).sum()], rows
    for stage in range(4):
        centroids, ids = prq.kmeans(rest, np.random.default_rng(stage))
        assert centroids.shape == (256, 16) and ids.dtype == np.uint8
        rest = rest - centroids[ids]
        energies.append((rest**2).sum())
    assert energies == sorted(energies, reverse=True)
    one = layer(200, 2, 16)
    found = prq.rewrite(one)
    for head in range(2):
        np.testing.assert_allclose(found.keys[head], one.keys[:, head], rtol=2**-10)


# --------------------------------------------------------------------------------------------------------------- dar


@pytest.mark.parametrize("part, window", [(0.5, 32), (0.25, 0), (0.125, 199)])
@pytest.mark.parametrize("length, heads, dim", [(200, 2, 16), (90, 1, 64)])
def test_dar_attends_in_fewer_dimensions(length: int, heads: int, dim: int, part: float, window: int) -> None:
    """By its two ranges: logits and sums over stored coordinates, then merged by log-sum-exp."""
    one = layer(length, heads, dim)
    old, few = max(length - window, 0), round(part * dim)
    found = dar.rewrite(one, part, window)
    for head in range(heads):
        q = np.random.default_rng(head).standard_normal(dim)
        k, v = one.keys[:, head].astype(np.float64), one.values[:, head].astype(np.float64)
        parts = []
        for rows in (k, v):
            _, _, turn = np.linalg.svd(rows[:old])
            p = turn[:few].T.astype(np.float32).astype(np.float64)
            parts.append((p, (rows[:old] @ p).astype(np.float16).astype(np.float64)))
        (p_k, coords_k), (p_v, coords_v) = parts
        far, near = np.exp(coords_k @ (p_k.T @ q) / dim), np.exp(k[old:] @ q / dim)
        total = far.sum() + near.sum()
        want = (p_v @ (far @ coords_v) + near @ v[old:]) / total if old else near @ v / total
        given = np.exp(found.keys[head].astype(np.float64) @ q / dim)
        np.testing.assert_allclose(given @ found.values[head] / given.sum(), want, rtol=0, atol=4e-3)
        np.testing.assert_array_equal(found.keys[head][old:], one.keys[old:, head])
    assert found.row_bytes == heads * 2 * ((length - old) * 2 * dim + old * 2 * few)
    assert found.table_bytes == (heads * 2 * dim * few * 4 if old else 0)


# --------------------------------------------------------------------------------------------------------------- dmc


def rotated(k: np.ndarray, position: int) -> np.ndarray:
    """One key [D] turned to a position, pair by pair."""
    half, out = len(k) // 2, np.zeros(len(k))
    for i in range(half):
        angle = position * FREQUENCIES[len(k)][i]
        out[i] = k[i] * math.cos(angle) - k[i + half] * math.sin(angle)
        out[i + half] = k[i + half] * math.cos(angle) + k[i] * math.sin(angle)
    return out


@pytest.mark.parametrize("tau, window", [(0.3, 12), (0.5, 0), (-0.2, 5), (0.9, 12)])
@pytest.mark.parametrize("length, heads, dim", [(1, 1, 8), (60, 2, 8), (90, 1, 64)])
def test_dmc_is_its_recurrence(length: int, heads: int, dim: int, tau: float, window: int) -> None:
    one = layer(length, heads, dim)
    found = dmc.rewrite(one, tau, window)
    rows = 0
    for head in range(heads):
        plain = [rotated(k, -t) for t, k in enumerate(one.keys[:, head].astype(np.float64))]
        entries: list[list] = []  # [sum of keys, sum of values, count, position]
        for t, k in enumerate(plain):
            v = one.values[t, head].astype(np.float64)
            near = t and k @ plain[t - 1] / (np.linalg.norm(k) * np.linalg.norm(plain[t - 1])) > tau
            if near and t < length - window:
                last = entries[-1]
                entries[-1] = [last[0] + k, last[1] + v, last[2] + 1, t]
            else:
                entries.append([k, v, 1, t])
        assert found.positions[head].tolist() == [entry[3] for entry in entries]
        want = [rotated(entry[0] / entry[2], entry[3]) for entry in entries]
        np.testing.assert_allclose(found.keys[head], want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.values[head], [entry[1] / entry[2] for entry in entries], rtol=0, atol=1e-5)
        rows += len(entries)
    assert (found.row_bytes, found.table_bytes) == (rows * 2 * dim * 2, heads * 4)


# --------------------------------------------------------------------------------------------------------------- all


@pytest.mark.parametrize("variant", [one for one in variants() if one.rewrite != OFF], ids=str)
def test_layers_that_no_format_can_say_are_refused(variant: Variant) -> None:
    settings, one = dict(variant.settings), layer(31, 2, 12)
    made = REWRITES[variant.rewrite].rewrite
    assert made(one, **settings).num_bytes > 0 and REWRITES[variant.rewrite].SOURCE
    for broken in (np.nan, np.inf, 65600.0):
        keys = one.keys.copy()
        keys[3, 1, 2] = broken
        with pytest.raises(ValueError, match="no format can say it"):
            made(Layer(keys, one.values, one.frequencies, one.query_squares), **settings)
    with pytest.raises(ValueError, match="without tokens"):
        Layer(one.keys[:0], one.values[:0], one.frequencies, one.query_squares)
