"""Steps for tests that have scores and lengths, and no cache to take a table from."""

from collections.abc import Sequence

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.step_plan import StepPlan


def place(config: EpsConfig, lengths: Sequence[int] | np.ndarray, num_groups: int) -> StepPlan:
    """A step of sequences of `lengths` tokens in units 0, 1, .., of exactly that many groups, whole units or not."""
    units = -(-num_groups // config.cache_config.groups_per_unit)
    plan = StepPlan.of(config, np.tile(np.arange(units), (len(lengths), 1)), np.asarray(lengths))
    plan.__dict__["num_groups"] = num_groups  # as a cached property keeps it
    return plan
