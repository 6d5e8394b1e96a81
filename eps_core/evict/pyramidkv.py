"""PyramidKV: SnapKV's scores, with budgets that fall from layer to layer (Cai et al. 2024, arXiv 2406.02069, as
kvpress has it)."""

import numpy as np

from eps_core.evict.base import Facts, Head, Kept, Rule, best, pinned, rows_in_all
from eps_core.evict.snapkv import scores

STEEPNESS = 20  # beta: the last layer's rows beyond the pinned are the mean's by this
FACTS = Facts(
    source="PyramidKV, arXiv 2406.02069, formula of kvpress; pinned rows stand for its window",
    window=64,
    while_decoding=False,
    uneven=True,
)


def layer_budgets(num_layers: int, rows: int, num_pinned: int, budget: int) -> np.ndarray:
    """Rows [L] int64 that a head of each layer keeps of `rows`, falling linearly; `budget` of each where the pyramid
    does not fit. Their mean is `budget` but for rounding."""
    even = np.full(num_layers, min(budget, rows))
    mean, most = budget - num_pinned, rows - num_pinned
    last = mean / STEEPNESS
    first = 2 * mean - last
    if first > most:
        first, last = most, 2 * mean - most
    if num_layers == 1 or not most >= first >= last >= 0:
        return even
    wanted: np.ndarray = num_pinned + np.round(np.linspace(first, last, num_layers)).astype(np.int64)
    return wanted


def made_exact(wanted: np.ndarray, least: np.ndarray, most: np.ndarray, total: int) -> np.ndarray:
    """`wanted` [L, H] within `least` and `most`, brought to this sum one row a head at a time: rows are added from the
    first layer on and taken from the last, so that what fell from layer to layer still does."""
    given = np.minimum(wanted, most).ravel()
    while missing := total - int(given.sum()):
        open_to = np.flatnonzero(given < most.ravel()) if missing > 0 else np.flatnonzero(given > least.ravel())[::-1]
        given[open_to[: abs(missing)]] += np.sign(missing)
    return given.reshape(wanted.shape)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    rows = np.array([[head.rows for head in heads] for heads in layers])
    num_pinned = np.array([[len(pinned(head, rule)) for head in heads] for heads in layers])
    even = np.minimum(rows, budget)
    of_layer = layer_budgets(len(layers), int(rows.max()), int(num_pinned.max()), budget)
    wanted = np.broadcast_to(of_layer[:, None], rows.shape)
    total = rows_in_all([head for heads in layers for head in heads], budget)
    given = made_exact(wanted, np.minimum(num_pinned, even), rows, total)
    return [
        [best(head, scores(head, rule), int(most), rule) for head, most in zip(heads, of_heads, strict=True)]
        for heads, of_heads in zip(layers, given, strict=True)
    ]
