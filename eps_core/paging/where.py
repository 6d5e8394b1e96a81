"""What the host knows about groups before any score: guards, budgets, groups without a summary. Integers only.

Every array backend shares this; the oracle's per-sequence `selection.guards` is written apart and judges it.
"""

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.paging.groups import GroupState


def forced_groups(config: EpsConfig, lengths: np.ndarray, num_groups: int) -> np.ndarray:
    """The guards [B, G] bool: the first and last tokens, the open group, everything below `min_context`; False past
    the end. Groups without a summary are forced too, but known from the scores."""
    lengths = np.asarray(lengths, np.int64)[:, None]
    size, index = config.S, np.arange(num_groups)
    ends = -(-lengths // size)
    first = index < -(-np.minimum(config.first_tokens, lengths) // size)
    last = index >= np.maximum(lengths - config.last_tokens, 0) // size
    is_open = (index == ends - 1) & (lengths % size != 0)
    return (first | last | is_open | (lengths < config.min_context)) & (index < ends)


def budget(config: EpsConfig, forced: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Groups that topk visits of each sequence [B] int64: the budget, but all forced ones and none past the end.
    `forced` [B] numbers of forced groups."""
    groups = [config.budget_groups(int(length)) for length in lengths]
    return np.minimum(np.maximum(groups, forced), -(-lengths // config.S)).astype(np.int64)


def missing_groups(
    config: EpsConfig, state: GroupState, table: np.ndarray, lengths: np.ndarray, can_encode: bool
) -> np.ndarray:
    """Groups of each sequence without a valid summary [B, G] bool (False past its end): open, overwritten, or, while
    `can_encode` is False (rq without its centre), any. table [B, M], lengths [B]."""
    per_unit, size = config.groups_per_unit, config.S
    groups = (np.maximum(table, 0)[:, :, None] * per_unit + np.arange(per_unit)).reshape(len(table), -1)
    valid = state.valid(groups) & can_encode
    index, ends = np.arange(groups.shape[1]), -(-lengths // size)
    is_open = (index == ends[:, None] - 1) & (lengths % size != 0)[:, None]
    return (index < ends[:, None]) & (~valid | is_open)


def check_units(config: EpsConfig, nested: EpsConfig) -> None:
    """Raises ValueError unless summaries beside a cache's own (of bounds, of tails) lie in the same pool units."""
    if nested.unit_tokens != config.unit_tokens:
        raise ValueError(f"summaries in units of {nested.unit_tokens} tokens beside a cache of {config.unit_tokens}")
