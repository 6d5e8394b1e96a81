"""Measures what bounds are worth: how much may stay unread at a bounded share, and in how many bytes, on captures.

    python scripts/experiments/methods/certificates.py CAPTURE... -o results/certificates.jsonl    (minutes on 2 cores)

For every summary that bounds: its size, its mean gap to the truth in nats, and for bounded shares of 0.1, 0.01 and
0.001 the fraction of tokens that may stay unread and the bytes read, summaries included, over dense; next to it the
oracle that knows the true masses for nothing. Then successive refinement (4 bits of every key, 8 bits of those that 4
could not dismiss), the value-aware bound of the output error, and strict mode as it runs. Bytes are of the captured
cache.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from eps_core.attention.protocol import Backend
from eps_core.config.bytes import summary_group_bytes
from eps_core.config.eps import EpsConfig
from eps_core.errors import exit_code
from eps_core.evaluation.capture import Capture, open_capture
from eps_core.evaluation.merits import CERTIFIED_LEVELS, bounded_skip, truth_of
from eps_core.evaluation.replay import check_alike, combine, replay_many
from eps_core.io import outputs
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend
from eps_core.metrics.provenance import provenance
from experiments.bounds.hard_cases import fill

# what bounds where codes of single keys do
KEYS_4, KEYS_8 = (
    EpsConfig.over(EpsConfig.of(method="box", bound_bits=bits).cache_config.bound_store) for bits in (4, 8)
)
SUMMARIES = (
    EpsConfig.of(method="1pc"),
    EpsConfig.of(method="fd"),
    EpsConfig.of(method="box", group_size=16),
    EpsConfig.of(method="box", group_size=4),
    EpsConfig.of(method="ball", group_size=8),
    EpsConfig.of(method="ball", group_size=2),
    EpsConfig.of(method="moments", group_size=128),
    EpsConfig.of(method="moments", group_size=16),
    EpsConfig.of(method="moments", group_size=8),
    EpsConfig.of(method="moments", group_size=8, dim=4),
    EpsConfig.of(method="moments", group_size=4, dim=2),
    EpsConfig.of(method="moments", group_size=4, dim=3),
    EpsConfig.of(method="moments", group_size=2),
    EpsConfig.of(method="rq", group_size=2, rq_bounds=True, rescore=0.0),
    EpsConfig.of(method="rq", group_size=1, rq_bounds=True, rescore=0.0),
    KEYS_4,
    KEYS_8,
)
STRICT = tuple(
    EpsConfig.of(method="rq", bound_bits=bits, strict=True, epsilon=epsilon)
    for bits in (4, 8) for epsilon in CERTIFIED_LEVELS
)  # fmt: skip
REFINED_FRACTIONS = tuple(i / 20 for i in range(21))


def stored_ratio(config: EpsConfig, head_dim: int) -> float:
    """Return the bytes of summaries over those of K and V in 16 bits."""
    return summary_group_bytes(config.cache_config, head_dim) / (4 * head_dim * config.cache_config.S)


def uppers(capture: Capture, backend: Backend, config: EpsConfig, layer: int, step: int) -> np.ndarray:
    """Upper bounds of log mass [Hkv, R, T] of every key, from codes of single keys."""
    q, k, v = capture.layer(layer)
    length = int(capture.lengths[step])
    filled = fill(backend, "cpu", config, capture.info.kv_dtype, k[:length], v[:length])
    table = np.arange(-(-length // config.cache_config.unit_tokens), dtype=np.int32)[None]
    query = backend.from_numpy(q[step][None], "float32", "cpu")
    scores = backend.score(filled.cache, 0, query, StepPlan.of(config, table, np.array([length])))
    return backend.to_numpy(scores.upper)[0][..., :length].astype(np.float64)


def refinement(capture: Capture, backend: Backend) -> list[dict]:
    """Return, of every bounded share, the least bytes over the fraction of keys with finer codes, and that fraction."""
    head_dim, coarse = capture.info.head_dim, stored_ratio(KEYS_4, capture.info.head_dim)
    found: dict[float, list[np.ndarray]] = {level: [] for level in CERTIFIED_LEVELS}
    value_aware: dict[float, list[float]] = {level: [] for level in CERTIFIED_LEVELS}
    step = len(capture.lengths) - 1
    for layer in capture.info.layers:
        q, k, v = capture.layer(layer)
        length = int(capture.lengths[step])
        keys, values = (x[:length].swapaxes(0, 1).astype(np.float64) for x in (k, v))
        truth = truth_of(q[step], keys, values, capture.info.scale, 1)
        low, high = (uppers(capture, backend, one, layer, step) for one in (KEYS_4, KEYS_8))
        ratio = np.stack([_refined_bytes(low, high, truth.log_masses, f, head_dim) for f in REFINED_FRACTIONS])
        for j, level in enumerate(CERTIFIED_LEVELS):
            found[level].append(ratio[:, :, j].mean(axis=1))
            value_aware[level] += _value_aware(high, truth.log_masses, np.linalg.norm(values, axis=2), level)
    rows = []
    for level in CERTIFIED_LEVELS:
        mean = np.mean(found[level], axis=0)
        best = int(mean.argmin())
        rows.append(
            {"type": "refinement", "bounded_share": level, "bytes_ratio": float(mean[best]),
             "refined_fraction": REFINED_FRACTIONS[best], "bytes_8_bit_only": float(mean[-1]) - coarse,
             "error_bound_per_key_over_global": float(np.mean(value_aware[level]))}
        )  # fmt: skip
    return rows


def _refined_bytes(low: np.ndarray, high: np.ndarray, masses: np.ndarray, fraction: float, head_dim: int) -> np.ndarray:
    """[Hkv, levels]: bytes over dense when a `fraction` of the keys, largest coarse bounds first, has finer ones."""
    count = round(fraction * low.shape[2])
    order = np.argsort(-low.max(axis=1), axis=1, kind="stable")[:, :count]
    upper = low.copy()
    np.put_along_axis(upper, order[:, None], np.take_along_axis(np.minimum(low, high), order[:, None], 2), 2)
    codes = stored_ratio(KEYS_4, head_dim) + fraction * stored_ratio(KEYS_8, head_dim)
    return 1 - bounded_skip(upper, masses, CERTIFIED_LEVELS) + codes


def _value_aware(upper: np.ndarray, masses: np.ndarray, norms: np.ndarray, level: float) -> list[float]:
    """Return, of every kv head, the bound of what skipped values add with each key's own |v|, over that with the
    largest |v| of the head, where as much is left unread as the level allows."""
    skip = bounded_skip(upper, masses, (level,))[:, 0]
    ratios = []
    for head, fraction in enumerate(skip):
        first = len(norms[head]) - round(fraction * len(norms[head]))
        left = np.argsort(-upper[head].max(axis=0), kind="stable")[first:]
        if len(left):
            bound = np.exp(upper[head][:, left] - upper[head][:, left].max())
            ratios.append(
                float(((bound * norms[head, left]).sum(axis=1) / bound.sum(axis=1)).max() / norms[head].max())
            )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", type=Path, nargs="+")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, default=Path("results/certificates.jsonl"))
    args = parser.parse_args()
    outputs.check({"-o": args.out}, {"capture": args.captures})
    backend = load_backend(args.backend)
    captures = [open_capture(path) for path in args.captures]
    check_alike(captures)
    head_dim = captures[0].info.head_dim
    rows = [{"type": "run", "captures": [path.name for path in args.captures], "model": captures[0].info.model,
             "contexts": [c.info.context_tokens for c in captures], **provenance(backend.versions())}]  # fmt: skip
    configs = [*SUMMARIES, *STRICT]
    results = [replay_many(capture, configs, backend, "cpu") for capture in captures]
    for i, config in enumerate(configs):
        row = combine([result[i].summary() for result in results])
        if not config.selection_config.strict:
            row["bytes_at"] = [
                1 - row[f"certified_skip_{e:g}"] + stored_ratio(config, head_dim) for e in CERTIFIED_LEVELS
            ]
            row["oracle_bytes_at"] = [1 - row[f"oracle_skip_{e:g}"] for e in CERTIFIED_LEVELS]
        kind = "strict" if config.selection_config.strict else "summary"
        bounded = {"bound_bits": config.cache_config.bound_bits, "epsilon": config.selection_config.epsilon}
        rows.append({"type": kind, **bounded, **row})
        shown = ("type", "method", "group_size", "dim", "bits", "bytes_ratio")
        print(json.dumps({name: rows[-1][name] for name in shown}), flush=True)
    rows += refinement(captures[0], backend)
    if any(math.isnan(value) for row in rows for value in row.values() if isinstance(value, float)):
        raise SystemExit("a figure is not a number: nothing was written")
    with outputs.replacing(args.out) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
