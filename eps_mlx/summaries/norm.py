"""The product requirements' scalar fallback: the largest key norm and the Frobenius norm of a group, four bytes."""

import math

import mlx.core as mx

from eps_core.config.store import Store
from eps_mlx.summaries.base import Score, Summary, _key_norm, _norm, _per_group, logit_slack, up16


def build(store: Store, constants: Summary, k: mx.array) -> Summary:
    """max |k_i| and |K|_F, both rounded up."""
    return {"largest": up16(_key_norm(k)), "frobenius": up16(mx.sqrt((k * k).sum(axis=(-1, -2))))}


def score(store: Store, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """|a| |K|_F >= |K a|_2, whatever the direction of a: it ranks groups alike for every query. Of logits at most
    |a| max |k_i| the mass is at most n times e to that; Jensen with |mu| <= |K|_F / sqrt(n) gives the lower bound."""
    size, n, log_n = _norm(a)[..., None], store.S, math.log(store.S)
    largest, frobenius = size * _per_group(summary, "largest"), size * _per_group(summary, "frobenius")
    slack = logit_slack(a, _per_group(summary, "largest"))
    return frobenius, log_n - frobenius / math.sqrt(n) - slack, log_n + largest + slack
