"""The scalar fallback: the largest key norm and the Frobenius norm of a group, four bytes."""

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary

SPEC = MethodSpec(group_size=None, colour=8, norm_estimate=True)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {"largest": Field("float16"), "frobenius": Field("float16")}


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """max |k_i| and |K|_F, both rounded up."""
    return {"largest": base.up16(base.key_norm(k)), "frobenius": base.up16(float(np.linalg.norm(k)))}


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """|a| |K|_F >= |K a|_2, whatever the direction of a: it ranks groups alike for every query. Of logits at most
    |a| max |k_i| the mass is at most n times e to that; Jensen with |mu| <= |K|_F / sqrt(n) gives the lower bound."""
    size, n, log_n = np.linalg.norm(a), settings.S, np.log(settings.S)
    largest, frobenius = size * base.f64(summary, "largest"), size * base.f64(summary, "frobenius")
    slack = base.rounding_slack(a, base.f64(summary, "largest"))
    return frobenius, log_n - frobenius / np.sqrt(n) - slack, log_n + largest + slack
