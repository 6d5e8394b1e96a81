"""Steps for tests that have scores and lengths, and no cache to take a table from."""

from collections.abc import Sequence

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.gate.protocol import Scores
from eps_core.paging.where import Where


def place(config: EpsConfig, lengths: Sequence[int] | np.ndarray, scores: Scores) -> Where:
    """A step of sequences of `lengths` tokens in units 0, 1, .., as wide as the scores [B, Hkv, G]."""
    units = -(-scores.estimate.shape[-1] // config.store.groups_per_unit)
    return Where.of(config, np.tile(np.arange(units), (len(lengths), 1)), np.asarray(lengths))
