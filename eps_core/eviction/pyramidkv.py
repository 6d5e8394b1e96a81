"""PyramidKV: SnapKV's scores, with budgets that fall from layer to layer (Cai et al. 2024, arXiv 2406.02069, as
kvpress has it)."""

import numpy as np

from eps_core.eviction.base import Head, Kept, PolicySpec, Rule, best, made_exact, pinned, rows_in_all
from eps_core.eviction.snapkv import scores

STEEPNESS = 20  # beta: the last layer's rows are the mean's by this
SPEC = PolicySpec(
    source="PyramidKV, arXiv 2406.02069, formula and window of kvpress",
    deviations=(
        "rounded budgets are brought to the exact sum; the paper's code (KVCache-Factory) adds the window to a layer's "
        "rows and has no even fallback"
    ),
    num_recent_tokens=64,
    window=64,
    while_decoding=False,
    uneven=True,
)


def layer_budgets(num_layers: int, rows: int, num_pinned: int, budget: int) -> np.ndarray:
    """Return the rows [L] int64 that a head of each layer keeps of `rows`, pinned ones among them, falling linearly;
    `budget` of each where the last layer would keep less than what is pinned. Their mean is `budget` but for
    rounding."""
    even = np.full(num_layers, min(budget, rows))
    last = budget / STEEPNESS
    first = 2 * budget - last
    if first >= rows - num_pinned:
        first, last = rows - num_pinned, 2 * budget - (rows - num_pinned)
    if num_layers == 1 or not rows >= first >= last >= num_pinned:
        return even
    wanted: np.ndarray = np.round(first - np.arange(num_layers) * ((first - last) / (num_layers - 1))).astype(np.int64)
    return wanted


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
