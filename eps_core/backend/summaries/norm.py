"""The scalar fallback: the largest key norm and the Frobenius norm of a group, four bytes."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries.base import frobenius
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """max |k_i| and |K|_F, both rounded up."""
    return {"largest": ops.up16(ops.key_norm(k)), "frobenius": ops.up16(frobenius(ops, k))}


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """|a| |K|_F >= |K a|_2, whatever the direction of a: it ranks groups alike for every query. Of logits at most
    |a| max |k_i| the mass is at most n times e to that; Jensen with |mu| <= |K|_F / sqrt(n) gives the lower bound."""
    size, n, log_n = ops.norms(a)[..., None], cache_config.S, math.log(cache_config.S)
    largest, whole = size * ops.per_group(summary, "largest"), size * ops.per_group(summary, "frobenius")
    slack = ops.logit_slack(a, ops.per_group(summary, "largest"))
    return whole, log_n - whole / math.sqrt(n) - slack, log_n + largest + slack
