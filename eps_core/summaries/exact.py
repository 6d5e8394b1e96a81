"""True masses, by reading all of K, which byte counts leave out: what a perfect summary would say."""

import numpy as np

from eps_core.summaries.base import Constants, Facts, Field, Score, Settings, Summary, _f64

FACTS = Facts(group_tokens=16, role="evaluation", reads_keys=True, no_bounds="none: it evaluates estimates")


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {}


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """The masses themselves, from "keys" [G, S, D]."""
    return np.logaddexp.reduce(_f64(summary, "keys") @ a, axis=-1), None, None
