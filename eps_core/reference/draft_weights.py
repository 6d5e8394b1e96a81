"""Values of 4-bit weights: affine groups, rounded to nearest, by MLX's rule, in float64."""

import numpy as np

LEVELS = 15  # steps between the 16 codes
LEAST_STEP = 1e-7


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
