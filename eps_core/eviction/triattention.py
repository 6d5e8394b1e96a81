"""TriAttention: what queries to come will ask of a key, by mean queries before RoPE (its code, WeianMao/triattention,
`pruning_utils.py`): trigonometric sums over the distances at which they will stand."""

import numpy as np

from eps_core.eviction.base import (
    Head,
    Kept,
    PolicySpec,
    Rule,
    best_of_each,
    given,
    pairs,
    require_same_positions,
    rounded,
    standard,
)

DISTANCES = 2.0 ** np.arange(17)  # tokens ahead of the next one: 1, 2, 4, .., 65536
SPEC = PolicySpec(
    source="TriAttention, code WeianMao/triattention; selection per kv head, mean over layers, as its vLLM runtime",
    deviations="moments of the sequence's own queries instead of a calibration; prompts are evicted, too",
    num_recent_tokens=128,
    keys=True,
    query_moments=True,
)


def expected_logits(head: Head) -> np.ndarray:
    """[R, T], unscaled: mean over DISTANCES d of sum_f A_f cos(w_f (t - p + d) + phi_f) + (a_f - |qm_f|) |k_f| of each
    query head, with t the next position, p the row's, qm_f and a_f mean and mean modulus of its queries' pair f, k_f
    the key's before RoPE, A_f = |qm_f| |k_f| and phi_f = arg(qm_f conj(k_f)).

    The cosine is the real part of qm_f exp(i w_f (t + d)) conj(k_f exp(i w_f p)), whose last factor is the key as it
    is cached, and the mean over d touches the first alone: so no rotation is undone and no cosine taken for a row."""
    keys, mean, modulus = pairs(head), rounded(head.query_mean), rounded(head.query_abs)
    ahead = np.exp(1j * np.outer(head.length + DISTANCES, given(head.frequencies))).mean(0)
    logits: np.ndarray = ((mean * ahead) @ keys.conj().T).real + (modulus - np.abs(mean)) @ np.abs(keys).T
    return logits


def scores(head: Head) -> np.ndarray:
    """[T]: the largest over the query heads of the expected logits' z-scores over rows; more is kept."""
    logits = expected_logits(head)
    size = np.abs(logits).max(1, keepdims=True, initial=0.0)
    return standard(logits, logits.mean(1, keepdims=True), logits.std(1, keepdims=True), size).max(0)


def keep(layers: list[list[Head]], budget: int, rule: Rule) -> Kept:
    for column in zip(*layers, strict=True):
        require_same_positions(column, "triattention")
    mean = [np.mean([scores(head) for head in column], axis=0) for column in zip(*layers, strict=True)]
    return best_of_each(layers, [mean] * len(layers), budget, rule)
