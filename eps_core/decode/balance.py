"""Balanced keys: the same attention, written so that codes of its keys serve its queries best.

A logit does not change where dimension c of every key is multiplied by w_c and that of every query divided by it. The
error of a code does: a code spreads its error evenly over the dimensions, so the expected squared error of a logit is
in proportion to sum_c(k_c^2 w_c^2) * sum_c(q_c^2 / w_c^2), where k_c^2 is the mean square of what a code codes, a key
about the mean of its span, and q_c^2 that of the queries. By Cauchy and Schwarz w_c = (q_c^2 / k_c^2)^(1/4) makes it
least.

Here w_c is a power of two, one for both dimensions of a RoPE pair: it commutes with the rotation, and products with it
are exact in float32 and bfloat16. So it is multiplied into the rows of the weights that make keys and queries, once,
and dense decoding keeps its bits. The mean squares are those of 128 random tokens: texts of several kinds give nearly
the same.
"""

from collections.abc import Callable, Sequence

import numpy as np

from eps_core.metrics.terminal import Progress
from eps_core.models.spec import ModelSpec

TOKENS = 128  # of the prompt that energies are measured on
MOST = 6  # the largest exponent
Measure = Callable[[int, np.ndarray, np.ndarray], None]  # layer, its queries [T, Hq, D], its keys [T, Hkv, D]


def balance(
    spec: ModelSpec,
    mean_tokens: int,
    run: Callable[[Sequence[int], Measure], None],
    multiply: Callable[[str, np.ndarray], None],
) -> np.ndarray:
    """Balances the keys and queries of a model with full weights, in place, for codes about means of `mean_tokens`.
    `run(tokens, measure)` reads a prompt and calls `measure` in every layer of full attention, at least;
    `multiply(name, factors)` multiplies the rows of a weight, by its name in `models.weights.weight_names`. Returns the
    exponents of keys [L, Hkv, D / 2] int8, 0 in layers with a sliding window, which are always dense; queries have the
    negative ones."""
    found = np.zeros((spec.num_layers, spec.num_kv_heads, spec.head_dim // 2), np.int8)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, min(TOKENS, spec.max_context))
    with Progress("keys: balancing", "layers") as progress:

        def measure(layer: int, queries: np.ndarray, keys: np.ndarray) -> None:
            progress(layer, spec.num_layers)
            if layer in spec.full:
                found[layer] = exponents(spec, queries.astype(np.float64), keys.astype(np.float64), mean_tokens)

        run(tokens.tolist(), measure)
    for layer in spec.full:
        for name, rows in key_factors(spec, layer, found[layer]).items():
            multiply(name, rows)
    return found


def exponents(spec: ModelSpec, queries: np.ndarray, keys: np.ndarray, mean_tokens: int) -> np.ndarray:
    """Return the exponents [Hkv, D / 2] int8 of the powers of two by which to multiply each RoPE pair of keys
    [T, Hkv, D] that are coded about means of `mean_tokens` and asked by queries [T, Hq, D]; alike in all heads where
    these share the weights of a norm."""
    span = min(mean_tokens, len(keys))
    spans = keys[: len(keys) // span * span].reshape(-1, span, *keys.shape[1:])
    coded = _of_pairs((spans - spans.mean(axis=1, keepdims=True)) ** 2, (0, 1))
    asked = _of_pairs(queries.reshape(len(queries), spec.num_kv_heads, -1, spec.head_dim) ** 2, (0, 2))
    if spec.qk_norm:
        coded, asked = (np.broadcast_to(one.mean(axis=0), one.shape) for one in (coded, asked))
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = (np.log2(asked) - np.log2(coded)) / 4
    wanted = np.where(np.isfinite(wanted), wanted, 0.0)
    # a common factor does not change the error, but decides which exponents round up
    tried = np.stack([np.rint(wanted + step / 8) for step in range(8)])
    tried = (tried - np.rint(tried.mean(axis=-1, keepdims=True))).clip(-MOST, MOST)
    error = (coded * 4**tried).sum(axis=-1) * (asked / 4**tried).sum(axis=-1)
    return np.take_along_axis(tried, error.argmin(axis=0)[None, :, None], axis=0)[0].astype(np.int8)


def _of_pairs(squares: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the means [Hkv, D / 2] over `axes` and the two dimensions of each RoPE pair of squares [.., D]."""
    mean = squares.mean(axis=axes)
    return mean.reshape(len(mean), 2, -1).mean(axis=1)


def factors(exponents: np.ndarray) -> np.ndarray:
    """Return what keys [.., D] float32 are multiplied by, of exponents [.., D / 2]."""
    return np.exp2(np.concatenate([exponents, exponents], axis=-1).astype(np.float32))


def key_factors(spec: ModelSpec, layer: int, exponents: np.ndarray) -> dict[str, np.ndarray]:
    """Return the factors [N] float32 of the rows of each weight, by its name in `models.weights.weight_names`, that
    multiply a layer's keys by 2^exponents [Hkv, D / 2] and divide its queries by as much."""
    prefix, of_keys = f"layers.{layer}.", factors(exponents)
    if spec.qk_norm:
        return {f"{prefix}k_norm": of_keys[0], f"{prefix}q_norm": 1 / of_keys[0]}
    by_query_head = np.repeat(of_keys, spec.num_heads // spec.num_kv_heads, axis=0)
    of = {"k": of_keys.reshape(-1), "q": 1 / by_query_head.reshape(-1)}
    kinds = ("", "_bias") if spec.qkv_bias else ("",)
    return {f"{prefix}{name}{kind}": rows for name, rows in of.items() for kind in kinds}
