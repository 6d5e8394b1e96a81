"""EpiKV, a reconstruction: the tokens at which the model's state jumps (arXiv 2606.26472, of whose abstract alone this
is made: no formula of it was read).

The state is the key before RoPE, of all heads of a layer; the paper speaks of hidden states. One score serves all
layers and heads, which so keep the same rows."""

import numpy as np

from eps_core.eviction.base import (
    Head,
    Kept,
    PolicySpec,
    Rule,
    best_of_each,
    by_position,
    given,
    pairs,
    require_same_positions,
    standard,
)

WINDOW = 64  # rows of the rolling z-score, this one included: our choice
POSITIVE, NEGATIVE = (0.25, 0.5), (0.5, 0.75)  # depths of lower-mid layers, which add, and upper-mid ones: our choice
SPEC = PolicySpec(source="EpiKV, arXiv 2606.26472", deviations="a reconstruction of its abstract", keys=True)


def layer_weights(num_layers: int) -> np.ndarray:
    """[L]: +1 where a layer's middle is of lower-mid depth (the middle of all included), -1 of upper-mid, else 0."""
    depth = (np.arange(num_layers) + 0.5) / num_layers
    adds = (depth >= POSITIVE[0]) & (depth <= POSITIVE[1])
    takes = (depth > NEGATIVE[0]) & (depth <= NEGATIVE[1])
    return adds.astype(np.float64) - takes


def jumps(heads: list[Head], order: np.ndarray) -> np.ndarray:
    """[T], rows in `order` of position: the distance of a layer's keys from those of the row before, over the square
    root of the positions between them, with which a random walk grows; 0 for the first row."""
    turns = [np.exp(-1j * np.outer(head.positions, given(head.frequencies))) for head in heads]
    keys = np.concatenate([(pairs(head) * turn)[order] for head, turn in zip(heads, turns, strict=True)], axis=1)
    lag = np.diff(heads[0].positions[order])
    return np.concatenate([[0.0], np.linalg.norm(np.diff(keys, axis=0), axis=1) / np.sqrt(lag)])[: len(order)]


def scores(layers: list[list[Head]]) -> np.ndarray:
    """[T]: the layers' weighted jumps as z-scores over the last WINDOW rows, so that no later row counts; more is
    kept."""
    everyone = [head for heads in layers for head in heads]
    require_same_positions(everyone, "epikv")
    order = by_position(everyone[0])
    weighted = zip(layer_weights(len(layers)), layers, strict=True)
    total = np.sum([weight * jumps(heads, order) for weight, heads in weighted if weight], axis=0)
    padded = np.concatenate([np.full(WINDOW - 1, np.nan), total])
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)
    mean, deviation = np.nanmean(windows, axis=1), np.nanstd(windows, axis=1)
    found = np.zeros(len(order))
    found[order] = standard(total, mean, deviation, np.nanmax(np.abs(windows), axis=1))
    return found


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    score = scores(layers)
    return best_of_each(layers, [[score] * len(heads) for heads in layers], budget, rule)
