"""Values of quantised weights, in float64: 4 bits in affine groups by MLX's rule, 8 bits in symmetric rows."""

import numpy as np

LEVELS = 15  # steps between the 16 codes
LEAST_STEP = 1e-7
LARGEST_CODE = 127  # of 8 bits


def affine(weight: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [N, K/g, g], steps [N, K/g, 1], offsets [N, K/g, 1]) of rows [N, K] in groups of g = `group_size`: a
    weight is step * code + offset, code an integer of 0 to 15.

    By the rule of MLX's `quantize`, which differs from its documentation's min and max: the edge of larger magnitude
    is kept exactly (it is the offset, and steps lead away from it, so a step may be negative), and so is 0, for the
    step is the edge over a whole number. Codes at the far edge may be clipped: the error is one step at most there,
    half a step elsewhere.
    """
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    below = np.abs(low) > np.abs(high)
    edges = np.where(below, low, high)
    steps = np.where(below, 1.0, -1.0) * np.maximum((high - low) / LEVELS, LEAST_STEP)
    to_zero = np.round(edges / steps)  # steps from the edge to 0, negative
    crosses = to_zero != 0
    steps = np.where(crosses, edges / np.where(crosses, to_zero, 1.0), steps)
    offsets = np.where(crosses, edges, 0.0)
    return np.clip(np.round((groups - offsets) / steps), 0, LEVELS), steps, offsets


def symmetric(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [N, K], steps [N, 1]) of rows [N, K]: a weight is step * code, code a whole number of -127 to 127; the
    error is half a step at most."""
    largest = np.abs(weight).max(axis=-1, keepdims=True)
    steps = np.where(largest > 0, largest / LARGEST_CODE, 1.0)
    return np.round(weight / steps), steps
