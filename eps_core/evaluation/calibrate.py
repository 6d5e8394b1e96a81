"""Calibration: how sparse each head of a model is on a text, which heads retrieve, and from which context gating pays.

Everything is measured with the true masses of a dense decode, so it says what the best possible summary could skip.
DuoAttention (Xiao et al. 2024) trains a gate for each head; here a head is classed on the fly by the share of its mass
that lies outside the first and the last tokens, without training.
"""

import json
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.bytes import scoring_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.heads import FORMAT_VERSION, HeadPolicy, model_fingerprint, modes_of
from eps_core.decode.session import Session
from eps_core.evaluation.capture import first_tokens, model_name, record
from eps_core.evaluation.merits import truth_of
from eps_core.files import outputs
from eps_core.telemetry import provenance, terminal

FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.125, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
MASS = 0.99  # share of the softmax that a head is said to need


@dataclass(frozen=True)
class CalibrateRequest:
    """What the command line asked for. `model` None is the demo model, `text` None the shipped corpus."""

    output: Path
    config: EpsConfig  # group size; of the estimate, summary bytes and always-visited tokens
    model: Path | None = None
    text: Path | None = None
    context_tokens: int | None = None  # None: see `first_tokens`
    num_steps: int = 32
    sink_tokens: int = 16
    recent_tokens: int = 128
    streaming_share: float = 0.05
    dense_fraction: float = 0.5
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class LayerCurves:
    """One layer, means over steps and over the R query heads of each kv head."""

    curves: np.ndarray  # [Hkv, C] share that the best groups hold, at each of FRACTIONS of the groups
    needed: np.ndarray  # [Hkv] fraction of the groups that holds MASS
    outside: np.ndarray  # [Hkv] share outside the first and last tokens; of the query head with the largest


def layer_curves(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    group_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
) -> LayerCurves:
    """q [N, Hq, D], k, v [T, Hkv, D] of one layer, lengths [N] tokens that each step attends.

    A kv head reads its groups in the order of the largest true mass over its query heads, as EPS does. The share of a
    fraction of the groups is of its whole groups, rounded up, so curves rise and end at 1.
    """
    keys, values = (np.ascontiguousarray(x.swapaxes(0, 1).astype(np.float64)) for x in (k, v))
    curves, needed, outside = [], [], []
    for step, length in enumerate(lengths.tolist()):
        truth = truth_of(q[step], keys[:, :length], values[:, :length], scale, group_tokens)
        groups = truth.shares.shape[2]
        order = np.argsort(-truth.log_masses.max(axis=1), axis=1, kind="stable")[:, None]
        held = np.cumsum(np.take_along_axis(truth.shares, order, axis=2), axis=2).mean(axis=1)
        held /= held[:, -1:]  # rounding: the last is 1
        curves.append(held[:, [ceil(fraction * groups - 1e-9) - 1 for fraction in FRACTIONS]])
        needed.append(((held < MASS).sum(axis=1) + 1) / groups)
        tokens = truth_of(q[step], keys[:, :length], values[:, :length], scale, 1).shares
        # not 1 - inside, which would lose small shares
        window = slice(min(sink_tokens, length), max(length - recent_tokens, 0))
        outside.append(tokens[..., window].sum(axis=2).max(axis=1))
    mean = [np.minimum(np.mean(part, axis=0), 1.0) for part in (curves, needed, outside)]
    return LayerCurves(*mean)


def classify(outside: np.ndarray, streaming_share: float) -> tuple[tuple[str, ...], ...]:
    """[L][Hkv] of head_policy.CLASSES from outside [L, Hkv]: streaming where at most that share lies outside."""
    return tuple(
        tuple("streaming" if share <= streaming_share else "retrieval" for share in heads) for heads in outside
    )


def break_even_tokens(config: EpsConfig, head_dim: int, kv_token_bytes: int, needed: float) -> float | None:
    """Context (tokens) above which a gated head reads fewer bytes than a dense one, an estimate: the always-visited
    tokens and one open group, every group's summary, and `needed` of the groups, against all of K and V. The fraction
    needed at the calibrated context is taken to hold at others. None: never."""
    many = 2**20  # groups, so that rounding to whole ones does not show
    summary = scoring_bytes(config, head_dim, [many * config.store.S]) / (many * config.store.S * kv_token_bytes)
    saved = 1 - needed - summary
    guards = config.read.first_tokens + config.read.last_tokens + config.store.S
    return guards / saved if saved > 0 else None


def calibrate(request: CalibrateRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, prints its findings to `out` and writes the policy. Returns the last line's object."""
    with outputs.Output(request.output, "head policy") as output:
        return _calibrate(request, output, out)


def _calibrate(request: CalibrateRequest, output: outputs.Output, out: TextIO) -> dict[str, Any]:
    config = request.config
    session = Session.open(request.model, request.backend, request.device, request.dtype, request.kv_dtype)
    spec = session.spec
    text = first_tokens(session, request.text, request.context_tokens, request.num_steps)
    context = len(text.tokens) - request.num_steps
    dense = EpsConfig.of(block_size=config.store.block_size)
    recording = record(session, text.tokens, context, range(spec.num_layers), dense)
    scale = spec.head_dim**-0.5
    found = [
        layer_curves(
            recording.q[layer], *recording.keys_values(layer), recording.lengths, scale, config.store.S,
            request.sink_tokens, request.recent_tokens,
        )
        for layer in range(spec.num_layers)
    ]  # fmt: skip
    needed, outside = np.stack([one.needed for one in found]), np.stack([one.outside for one in found])
    classes = classify(outside, request.streaming_share)
    dense_layers = tuple(np.flatnonzero(needed.mean(axis=1) > request.dense_fraction).tolist())
    policy = HeadPolicy(
        format_version=FORMAT_VERSION,
        model=model_name(session),
        fingerprint=model_fingerprint(session.path),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        settings={
            "context_tokens": context,
            "num_steps": request.num_steps,
            "text_sha256": text.sha256,
            "mass": MASS,
            "sink_tokens": request.sink_tokens,
            "recent_tokens": request.recent_tokens,
            "streaming_share": request.streaming_share,
            "dense_fraction": request.dense_fraction,
            "config": config.to_dict(),
            "backend": session.backend_name,
            "device": session.device,
            "dtype": session.dtype,
            "kv_dtype": session.kv_dtype,
            **provenance.provenance(session.backend.versions()),
        },
        fractions=FRACTIONS,
        curves=_tuples(np.stack([one.curves for one in found])),
        fraction_needed=_tuples(needed),
        outside_share=_tuples(outside),
        classes=classes,
        dense_layers=dense_layers,
        head_modes=modes_of(classes, dense_layers),
    )
    token_bytes = session.one_unit().kv_token_bytes
    pays = [break_even_tokens(config, spec.head_dim, token_bytes, float(heads.mean())) for heads in needed]
    gated = np.array([[mode == "gate" for mode in heads] for heads in policy.head_modes])
    overall = None
    if gated.any():
        overall = break_even_tokens(config, spec.head_dim, token_bytes, float(needed[gated].mean()))
    sparse = overall is not None and overall < spec.max_context
    out.write(_table(policy, needed, outside, pays, config, out) + "\n\n")
    out.write(_verdict(policy, overall, sparse, spec.max_context, int(gated.sum()), gated.size) + "\n")
    write_policy(output, policy)
    return {
        "policy": str(request.output),
        "model": policy.model,
        "gated_heads": int(gated.sum()),
        "heads": gated.size,
        "retrieval_heads": sum(kind == "retrieval" for heads in classes for kind in heads),
        "dense_layers": list(dense_layers),
        "fraction_needed_mean": float(needed.mean()),
        "break_even_tokens_est": overall,
        "break_even_tokens_est_by_layer": pays,
        "sparse_enough": sparse,
    }


def _tuples(array: np.ndarray) -> Any:
    def frozen(value: Any) -> Any:
        return tuple(frozen(item) for item in value) if isinstance(value, list) else value

    return frozen(array.tolist())


def _table(
    policy: HeadPolicy,
    needed: np.ndarray,
    outside: np.ndarray,
    pays: list[float | None],
    config: EpsConfig,
    out: TextIO,
) -> str:
    tenth = policy.fractions.index(0.1)
    rows = []
    for layer, heads in enumerate(policy.classes):
        held = [curve[tenth] for curve in policy.curves[layer]]
        tokens = pays[layer]
        rows.append(
            [
                str(layer),
                f"{np.mean(held):.3f}",
                f"{needed[layer].mean():.3f}",
                f"{outside[layer].mean():.3f}",
                f"{sum(kind == 'retrieval' for kind in heads)} of {len(heads)}",
                "stays dense" if layer in policy.dense_layers else "gate",
                "never" if tokens is None else f"{tokens:,.0f}",
            ]
        )
    header = ["layer", "in best 10 %", f"needed for {MASS:.0%}", "outside", "retrieval", "verdict", "pays from, est."]
    window = "first {sink_tokens} and last {recent_tokens} tokens".format(**policy.settings)
    return (
        terminal.table(rows, header, out)
        + f"\n\nTrue masses of groups of {config.store.S} tokens at {policy.settings['context_tokens']:,} tokens, "
        f"means over {policy.settings['num_steps']} steps and the kv heads; outside: the {window}."
    )


def _verdict(
    policy: HeadPolicy, overall: float | None, sparse: bool, max_context: int, num_gated: int, num_heads: int
) -> str:
    if not num_gated:
        return (
            "This model is not sparse enough on this text: no kv head is worth gating. Every one of them is streaming "
            "or in a layer that needs most of its groups; leave EPS off."
        )
    if not sparse:
        reached = "never" if overall is None else f"beyond its context of {max_context:,} tokens"
        return (
            f"This model is not sparse enough on this text: the {num_gated} kv heads that would be gated need so many "
            f"groups that reading them pays {reached} (an estimate); leave EPS off."
        )
    dense = f"; layers {', '.join(map(str, policy.dense_layers))} stay dense" if policy.dense_layers else ""
    return (
        f"{num_gated} of {num_heads} kv heads are worth gating{dense}. They read fewer bytes than dense attention from "
        f"about {overall:,.0f} tokens (an estimate: guards, summaries and the groups that hold {MASS:.0%} of the mass, "
        f"at the fraction measured here)."
    )


def write_policy(place: Path | outputs.Output, policy: HeadPolicy) -> None:
    """Writes the policy as JSON; it appears whole."""
    with outputs.replacing(place) as file:
        file.write(json.dumps(asdict(policy), allow_nan=False, indent=1) + "\n")
