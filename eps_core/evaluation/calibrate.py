"""Calibration: how sparse each head of a model is on a text, which heads retrieve, and where sparse attention pays.

The heads' figures come from the true masses of a dense decode, so they say what the best possible summary could skip.
From where sparse attention pays is measured with the method itself: where it keeps its KL, and where it saves time.
DuoAttention (Xiao et al. 2024) learns the class of each head; here it follows from the share of a head's mass that lies
outside the first and the last tokens, without training.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.decode.heads import FORMAT_VERSION, HeadPolicy, model_fingerprint, modes_of
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.evaluation.capture import Recording, TextRequest, model_name, record, text_tokens
from eps_core.evaluation.merits import truth_of
from eps_core.evaluation.pays import timing
from eps_core.evaluation.runner import DENSE, Document, run_batch
from eps_core.io import outputs
from eps_core.metrics import provenance, terminal

FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.125, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
MASS = 0.99  # share of the softmax that a head is said to need
LIMITS = ("sink_tokens", "recent_tokens", "streaming_share", "dense_fraction")  # of a request
MOST_KL = 0.01  # nats of the next token, mean: what the defaults aim at


@dataclass(frozen=True)
class CalibrateRequest(TextRequest):
    """`config`: whose groups heads are judged by, and of which it is measured from where it pays."""

    sink_tokens: int = 16
    recent_tokens: int = 128
    streaming_share: float = 0.05
    dense_fraction: float = 0.5


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
    group_size: int,
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
        truth = truth_of(q[step], keys[:, :length], values[:, :length], scale, group_size)
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


@dataclass(frozen=True)
class Kept:
    """How far a config moved the next token at one context: mean KL(dense || sparse) in nats along the text's steps,
    and bytes read, summaries included, over dense."""

    context: int
    kl_mean: float
    bytes_ratio: float


def contexts_below(context: int, least: int | None) -> list[int]:
    """A context and its halves, ascending, down to `least` tokens, below which a step is dense; None: all are."""
    found: list[int] = []
    while least is not None and context >= least:
        found.insert(0, context)
        context //= 2
    return found


def kept_at(session: Session, config: EpsConfig, recording: Recording, tokens: list[int], num_steps: int) -> list[Kept]:
    """Return how close a config stays to dense at the recorded context and its halves, along the tokens after each."""
    found = []
    for context in contexts_below(len(tokens) - num_steps, config.sparse_from):
        document = Document.along(tokens[: context + num_steps], num_steps)
        read, layers = recording.backend.read_kv, range(session.spec.num_layers)
        kv = [read(recording.cache, layer, recording.table, context) for layer in layers]
        prefixes = [Prefix(tokens[:context], kv)]
        dense = run_batch(session, [document], {DENSE: EpsConfig()}, prefixes)[DENSE]
        sparse = run_batch(session, [document], {DENSE: config}, prefixes, dense)[DENSE]
        assert sparse.kl is not None
        read_bytes, all_bytes = sparse.bytes_read()
        found.append(Kept(context, max(float(sparse.kl.mean()), 0.0), read_bytes / all_bytes))
    return found


def kl_from(kept: Sequence[Kept]) -> int | None:
    """The least context from which on no measured KL is above MOST_KL; None: the largest one's is."""
    wrong = [index for index, one in enumerate(kept) if one.kl_mean > MOST_KL]
    first = wrong[-1] + 1 if wrong else 0
    return kept[first].context if first < len(kept) else None


def calibrate(request: CalibrateRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, prints its findings to `out` and writes the policy. Returns the last line's object."""
    with outputs.Output(request.output, "head policy") as output:
        return _calibrate(request, output, out)


def _calibrate(request: CalibrateRequest, output: outputs.Output, out: TextIO) -> dict[str, Any]:
    session = request.session(request.config)
    config = session.config  # as this device reads
    spec = session.spec
    spec.require_full_attention("calibrate")
    text = text_tokens(session, request.text, request.context_tokens, request.num_steps)
    context, window = len(text.tokens) - request.num_steps, request.sink_tokens + request.recent_tokens
    require(
        context > window,
        f"a context of {context:,} tokens lies within the {request.sink_tokens:,} sink and {request.recent_tokens:,} "
        f"recent tokens of a streaming head, so every head would be one: raise --context above {window:,}, with a "
        "--text as long, or lower --sink-tokens or --recent-tokens",
    )
    dense = EpsConfig.of(block_size=config.cache_config.block_size)
    recording = record(session, text.tokens, context, range(spec.num_layers), dense)
    scale = spec.head_dim**-0.5
    found = [
        layer_curves(
            recording.q[layer], *recording.keys_values(layer), recording.lengths, scale, config.cache_config.S,
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
            **{name: getattr(request, name) for name in LIMITS},
            "config": config.to_dict(),
            "backend": session.backend_name,
            "device": session.device,
            "dtype": session.dtype,
            "kv_dtype": session.kv_dtype,
            **provenance.provenance(session.backend.versions()),
        },
        fractions=FRACTIONS,
        curves=_tuples([one.curves.tolist() for one in found]),
        fraction_needed=_tuples(needed.tolist()),
        outside_share=_tuples(outside.tolist()),
        classes=classes,
        dense_layers=dense_layers,
        head_modes=modes_of(classes, dense_layers),
    )
    sparse = np.array([[mode == "sparse" for mode in heads] for heads in policy.head_modes])
    out.write(_table(policy, needed, outside, config, out) + "\n\n")
    out.write(_verdict(policy, int(sparse.sum()), sparse.size) + "\n\n")
    kept = kept_at(session, config, recording, text.tokens, request.num_steps)
    time_from = timing(
        session.backend, session.device, session.kernels, session.one_unit(), spec.num_heads, config, spec.max_context,
        not spec.windowed,
    )  # fmt: skip
    saves = time_from() if kept and time_from is not None else None
    pays = None if saves is None or kl_from(kept) is None else max(saves, kl_from(kept) or 0)
    if kept:
        rows = [[f"{one.context:,}", f"{one.kl_mean:.4f}", f"{one.bytes_ratio:.3f}"] for one in kept]
        out.write(terminal.table(rows, ["context", "KL, mean", "bytes against dense"], out) + "\n\n")
    out.write(pays_line(config, context, kept, saves, time_from is not None) + "\n")
    write_policy(output, policy)
    return {
        "policy": str(request.output),
        "model": policy.model,
        "sparse_heads": int(sparse.sum()),
        "heads": sparse.size,
        "retrieval_heads": sum(kind == "retrieval" for heads in classes for kind in heads),
        "dense_layers": list(dense_layers),
        "fraction_needed_mean": float(needed.mean()),
        "sparse_enough": bool(sparse.any()),
        "kept": [asdict(one) for one in kept],
        "kl_from_tokens": kl_from(kept),
        "time_from_tokens_est": saves,
        "pays_from_tokens_est": pays,
    }


def _tuples(value: Any) -> Any:
    """Lists of lists as tuples of tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _table(policy: HeadPolicy, needed: np.ndarray, outside: np.ndarray, config: EpsConfig, out: TextIO) -> str:
    tenth = policy.fractions.index(0.1)
    rows = []
    for layer, heads in enumerate(policy.classes):
        held = [curve[tenth] for curve in policy.curves[layer]]
        rows.append(
            [
                str(layer),
                f"{np.mean(held):.3f}",
                f"{needed[layer].mean():.3f}",
                f"{outside[layer].mean():.3f}",
                f"{sum(kind == 'retrieval' for kind in heads)} of {len(heads)}",
                "stays dense" if layer in policy.dense_layers else "sparse",
            ]
        )
    header = ["layer", "in best 10 %", f"needed for {MASS:.0%}", "outside", "retrieval", "verdict"]
    window = "first {sink_tokens} and last {recent_tokens} tokens".format(**policy.settings)
    return (
        terminal.table(rows, header, out)
        + f"\n\nTrue masses of groups of {config.cache_config.S} tokens at {policy.settings['context_tokens']:,} "
        f"tokens, means over {policy.settings['num_steps']} steps and the kv heads; outside: the {window}."
    )


def _verdict(policy: HeadPolicy, num_sparse: int, num_heads: int) -> str:
    if not num_sparse:
        return (
            "This model is not sparse enough on this text: no kv head is worth sparse attention. Every one of them is "
            "streaming or in a layer that needs most of its groups; leave EPS off."
        )
    dense = f"; layers {', '.join(map(str, policy.dense_layers))} stay dense" if policy.dense_layers else ""
    return f"{num_sparse} of {num_heads} kv heads are worth sparse attention{dense}."


def pays_line(config: EpsConfig, context: int, kept: Sequence[Kept], saves: int | None, timed: bool) -> str:
    """From where a config pays, in a sentence or two: where its KL is kept, and where one layer takes less time than a
    dense one (`saves`; None: at no context of the model, or nobody `timed` it)."""
    method, floor = config.cache_config.method, config.sparse_from
    if floor is None or not kept:
        least = "any" if floor is None else f"less than {floor:,}"
        return (
            f"{method} reads everything of {least} tokens, so nothing is known of where it pays: give a --context of "
            f"at least {max(context + 1, floor or 0):,} tokens"
        )
    good = kl_from(kept)
    if good is None:
        return (
            f"{method} does not keep a KL of {MOST_KL:g} on this text (it is {kept[-1].kl_mean:.4f} at {context:,} "
            "tokens): raise --eps-budget, or leave EPS off."
        )
    text = (
        f"{method} keeps a KL of {MOST_KL:g} from {good:,} to {context:,} tokens and reads everything below {floor:,}. "
    )
    if not timed:
        return f"{text}Whether it saves time is unknown: array operations are for checks; use --backend auto."
    if saves is None:
        return f"{text}It saves time at no context of this model (estimated from one layer's times): leave EPS off."
    beyond = f", where its KL was not measured: add --context {saves}" if saves > context else ""
    return (
        f"{text}It saves time from about {saves:,} tokens (estimated from one layer's times): it pays from "
        f"{max(good, saves):,} on{beyond}."
    )


def write_policy(place: Path | outputs.Output, policy: HeadPolicy) -> None:
    """Writes the policy as JSON; it appears whole."""
    with outputs.replacing(place) as file:
        file.write(json.dumps(asdict(policy), allow_nan=False, indent=1) + "\n")
