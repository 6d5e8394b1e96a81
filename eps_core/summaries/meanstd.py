"""Mean and standard deviation of each channel: not UNIQUE (arXiv 2605.27740), which has one deviation a page."""

import numpy as np

from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary, f64, near_codes

SPEC = MethodSpec(
    group_size=16,
    colour=2,
    follows=True,
    no_bounds="none: mean plus deviation is below the largest logit at times; add --eps-bound-bits 8",
)


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    return {
        "mean": Field("int8", (head_dim,)),
        "mean_scale": Field("float16"),
        "std": Field("uint8", (head_dim,)),
        "std_scale": Field("float16"),
    }


def running(settings: Settings, head_dim: int) -> dict[str, Field]:
    return dict.fromkeys(("mean", "m2"), Field("float32", (head_dim,)))


def extend(settings: Settings, constants: Constants, earlier: Summary, k: np.ndarray, before: int) -> Summary:
    """The mean and the sum of squares about it of `before` keys (0: none) and of k [n, D]."""
    mean, m2, n = k.mean(axis=0), ((k - k.mean(axis=0)) ** 2).sum(axis=0), len(k)
    if before:  # Chan et al. 1979
        gap = mean - earlier["mean"]
        m2 = m2 + earlier["m2"] + gap**2 * before * n / (before + n)
        mean = earlier["mean"] + gap * n / (before + n)
    return {"mean": mean, "m2": m2}


def finalize(settings: Settings, statistics: Summary) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [D]."""
    codes, scale = near_codes(statistics["mean"], 127)
    std_codes, std_scale = near_codes(np.sqrt(statistics["m2"] / settings.S), 255)
    return {
        "mean": codes.astype(np.int8),
        "mean_scale": scale,
        "std": std_codes.astype(np.uint8),
        "std_scale": std_scale,
    }


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    return finalize(settings, extend(settings, constants, {}, k, 0))


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """mu.a + sum_c |a_c| sd_c: at least mean + one standard deviation of the logits; no bound."""
    mean = f64(summary, "mean") @ a * f64(summary, "mean_scale")
    return mean + f64(summary, "std") @ np.abs(a) * f64(summary, "std_scale"), None, None
