"""Small attention states with all that an eviction policy may ask of them, computed from keys and queries."""

from dataclasses import fields, replace
from types import ModuleType

import numpy as np

from eps_core.eviction.base import Head

D = 8
FREQUENCIES = 100.0 ** -(np.arange(0, D, 2) / D)
# statistic -> the fact of a policy that asks for it
GATHERED = {name: name for name in ("window", "sums", "squares", "keys", "queries", "future")}
GATHERED |= {"query_mean": "query_moments", "query_abs": "query_moments", "frequencies": "keys"}


def paired(x: np.ndarray) -> np.ndarray:
    return x[..., : D // 2] + 1j * x[..., D // 2 :]


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE of x [.., T, D] at positions [T]."""
    pairs = paired(x) * np.exp(1j * np.outer(positions, FREQUENCIES))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def head(
    q: np.ndarray, k: np.ndarray, positions: np.ndarray | None = None, window: int = 64, rope: bool = True
) -> Head:
    """Of queries [R, N, D] and keys [N, D] before RoPE (`rope`: of keys; else they are as cached), the rows at
    `positions` alone; weights are those of the whole sequence."""
    length = k.shape[0]
    everywhere = np.arange(length)
    rows = everywhere if positions is None else positions
    keys = (turned(k, everywhere) if rope else k).astype(np.float32)
    queries = turned(q, everywhere).astype(np.float32)
    logits = queries.astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(D)
    logits = np.where(everywhere <= everywhere[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return Head(
        positions=rows,
        length=length,
        window=weights[:, -window:, rows].astype(np.float32),
        sums=weights.sum(1)[:, rows],
        squares=np.square(weights).sum(1)[:, rows],
        keys=keys[rows],
        queries=queries[:, -window:],
        query_mean=paired(q).mean(1),
        query_abs=np.abs(paired(q)).mean(1),
        frequencies=FREQUENCIES,
        future=weights[:, length // 2 :].sum(1)[:, rows],
        prompt=length // 3,
    )


def asked(layers: list[list[Head]], policy: ModuleType) -> list[list[Head]]:
    """The same heads with no more than the policy's facts ask for."""
    policy_spec = policy.SPEC

    def less(one: Head) -> Head:
        gone = {name: None for name, fact in GATHERED.items() if not getattr(policy_spec, fact)}
        kept = replace(one, **gone)
        if policy_spec.window:
            short = {name: getattr(kept, name) for name in ("window", "queries")}
            cut = {name: x[:, -policy_spec.window :] for name, x in short.items() if x is not None}
            kept = replace(kept, **cut)
        return kept

    assert {field.name for field in fields(Head)} == {"positions", "length", "prompt", *GATHERED}
    return [[less(one) for one in heads] for heads in layers]


def made(
    rows: int = 48,
    layers: int = 3,
    heads: int = 2,
    group: int = 2,
    kind: str = "random",
    seed: int = 0,
    positions: np.ndarray | None = None,
) -> list[list[Head]]:
    """Heads [layers][heads] of one sequence of `rows` tokens, `group` query heads each."""
    rng = np.random.default_rng([seed, 7])

    def one() -> Head:
        q, k = rng.normal(size=(group, rows, D)) + 0.5, rng.normal(size=(rows, D)) * 1.5 + 0.5
        if kind == "identical keys":
            k = np.repeat(k[:1], rows, axis=0)
        if kind == "uniform weights":
            q = np.zeros_like(q)
        if kind == "zero keys":
            k = np.zeros_like(k)
        if kind == "few keys":
            k = k[rng.integers(0, 4, rows)]
        return head(q, k, positions, rope=kind not in ("identical keys", "few keys"))

    return [[one() for _ in range(heads)] for _ in range(layers)]


def coarse(layers: list[list[Head]]) -> list[list[Head]]:
    """Statistics of few values, so that many rows tie."""
    digits = {"window": 1, "sums": 0, "squares": 1, "future": 0}
    return [[replace(one, **{x: np.round(getattr(one, x), n) for x, n in digits.items()}) for one in y] for y in layers]


def ragged(seed: int = 0) -> list[list[Head]]:
    """Heads of one sequence of 60 tokens that hold different rows, 12 to 50 of them."""
    rng = np.random.default_rng([seed, 8])

    def one() -> Head:
        positions = np.sort(rng.choice(60, int(rng.integers(12, 51)), replace=False))
        return head(rng.normal(size=(2, 60, D)), rng.normal(size=(60, D)) * 1.5, positions)

    return [[one() for _ in range(2)] for _ in range(3)]
