"""Records of what each decode step really read: one record a step, written as JSONL and CSV, and summed up at the end.

Page counts are in groups (pages where nothing is sparse), summed over sequences, layers and kv heads. Unknown is None
(null in JSON), never NaN.
"""

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.io.outputs import Output, jsonable, replacing


@dataclass(frozen=True)
class Audit:
    """Results of a dense read beside a sparse step. `alarms` counts the (sequence, layer, kv head)s whose true unread
    share was above its error bound, or above `factor` times its estimate and above `floor`."""

    kl: float | None  # None: nobody asked for dense logits
    alarms: int


AUDIT_FACTOR, AUDIT_FLOOR = 10.0, 0.01  # an unread share under a hundredth raises no alarm, whatever its estimate


def audit_step(output: StepOutput, factor: float) -> Audit:
    """Compares a step's error bounds and estimates with its own dense reads. An alarm means that a number was *under*
    the truth: an estimate that is too high costs bytes, not quality."""
    alarms = 0
    for layer in output.layers:
        true = layer.skipped_mass_true
        assert true is not None
        wrong = np.zeros(true.shape, bool)
        if layer.skipped_mass_bound is not None:
            # both come from float32 sums of exponentials; the error bound pays for its own rounding, the truth cannot
            wrong |= true > layer.skipped_mass_bound + TRUE_ROUNDING
        if layer.skipped_mass is not None:
            wrong |= (true > factor * layer.skipped_mass) & (true > AUDIT_FLOOR)
        alarms += int(wrong.sum())
    if output.dense_logits is None:
        return Audit(None, alarms)
    kl = kl_divergence(output.dense_logits, output.logits)
    return Audit(max(float(np.mean(kl)), 0.0), alarms)


TRUE_ROUNDING = 1e-5  # of a true share taken from two float32 log-sum-exps


def kl_divergence(dense_logits: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(dense || sparse) in nats over the last axis: [..]."""
    p, q = (log_softmax(x.astype(np.float64)) for x in (dense_logits, logits))
    return (np.exp(p) * (p - q)).sum(axis=-1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass
class StepRecord:
    """One decode step of the sequences still running. `tokens[i]` is what sequence `sequences[i]` says next, and
    `lengths[i]` the tokens that the step attended for it; further ones are of sequences that had ended already, which
    an engine that computes ahead attends once more. docs/metrics.md has the meaning of every field."""

    step: int
    sequences: list[int]
    tokens: list[int]
    lengths: list[int]
    pages_total: int
    pages_visited: int
    pages_skipped: int
    pages_always_selected: int
    pages_wanted: int | None
    bytes_kv_read_est: int
    bytes_kv_dense: int
    bytes_kv_kept: int
    rows_moved: int
    units_freed: int
    bytes_summary_read: int
    bytes_k_reread: int
    eps_prepass_ms: float | None
    attention_ms: float | None
    decode_ms: float | None
    skipped_mass_mean: float | None
    skipped_mass_bound_max: float | None
    skipped_mass_true_max: float | None
    output_error_bound: float | None
    extensions: int
    pages_extended: int
    audited: bool
    audit_kl: float | None
    audit_alarms: int
    bound_by_head: np.ndarray | None = field(repr=False)
    estimate_by_head: np.ndarray | None = field(repr=False)
    true_by_head: np.ndarray | None = field(repr=False)
    fallbacks: dict[str, int]
    # not written: for the run summary and for comparing distributions
    timed: bool = field(repr=False)  # the decoder was asked to time its layers
    selected_by_head: np.ndarray = field(repr=False)  # [L, Hkv] int64
    total_by_head: np.ndarray = field(repr=False)  # [L, Hkv] int64
    extended_by_head: np.ndarray | None = field(repr=False)  # [L, Hkv] sequences that strict mode extended
    bytes_kv_whole: int = field(repr=False)  # of a cache that holds every token in every layer, not quantised
    logits: np.ndarray | None = field(default=None, repr=False)  # [B, V] float32, kept on request
    margins: list[float] = field(default_factory=list, repr=False)  # of each of `tokens`, see `sampling.Drawn`

    @property
    def bytes_read(self) -> int:
        """Bytes of K, V and summaries that the step read."""
        return self.bytes_kv_read_est + self.bytes_summary_read

    def to_dict(self) -> dict[str, Any]:
        """The record as written: `type` first, arrays left out."""
        return {"type": "step", **{name: getattr(self, name) for name in STEP_KEYS}}

    def check(self) -> None:
        """Asserts what must hold of every record."""
        assert self.pages_total == self.pages_visited + self.pages_skipped, self
        assert self.pages_visited >= self.pages_always_selected >= 0 and self.pages_skipped >= 0, self


_UNWRITTEN = ("timed", "selected_by_head", "total_by_head", "extended_by_head", "bytes_kv_whole", "logits", "margins")
STEP_KEYS = tuple(f.name for f in fields(StepRecord) if f.name not in _UNWRITTEN)


def step_record(
    step: int,
    sequences: Sequence[int],
    tokens: Sequence[int],
    lengths: Sequence[int],
    output: StepOutput,
    spec: CacheSpec,
    config: EpsConfig,
    decode_ms: float | None,
    bytes_k_reread: int,
    timed: bool = False,
    audit: Audit | None = None,
) -> StepRecord:
    """Return the checked record of one step. `bytes_k_reread` is what the cache counted during it; a step without layer
    statistics (method off) selected every group."""
    num_heads = spec.num_kv_heads
    if output.layers:
        selected, total, always = (_sums(output.layers, name, num_heads) for name in _COUNTS)
        always_selected = int(always.sum())
    else:
        groups = [sum(-(-length // config.cache_config.S) for length in layer) for layer in spec.attended(lengths)]
        selected = total = np.repeat(np.array(groups, np.int64)[:, None], num_heads, axis=1)
        always_selected = 0
    extended = _by_head(output.layers, "extended", lambda counts: (counts > 0).sum(axis=0))
    certified, true, estimated = (_by_head(output.layers, f"skipped_mass{kind}") for kind in ("_bound", "_true", ""))
    errors = _by_head(output.layers, "output_error_bound")
    wanted = [int(layer.counts_before_union.sum()) for layer in output.layers if layer.counts_before_union is not None]
    masses = [layer.skipped_mass for layer in output.layers if layer.skipped_mass is not None]
    num_rows, eviction = sum(lengths) * spec.num_layers * num_heads, output.eviction
    record = StepRecord(
        step=step,
        sequences=list(sequences),
        tokens=list(tokens),
        lengths=list(lengths),
        pages_total=int(total.sum()),
        pages_visited=int(selected.sum()),
        pages_skipped=int(total.sum() - selected.sum()),
        pages_always_selected=always_selected,
        pages_wanted=sum(wanted) if wanted else None,
        bytes_kv_read_est=output.kv_bytes_read,
        bytes_kv_dense=spec.exact_kv_bytes(lengths),
        bytes_kv_kept=num_rows * spec.kv_token_bytes if eviction is None else eviction.bytes_kept,
        rows_moved=0 if eviction is None else eviction.rows_moved,
        units_freed=0 if eviction is None else eviction.units_freed,
        bytes_summary_read=sum(layer.summary_bytes_read for layer in output.layers),
        bytes_k_reread=bytes_k_reread,
        eps_prepass_ms=_total_ms(output.layers, "prepass_ms"),
        attention_ms=_total_ms(output.layers, "attention_ms"),
        decode_ms=decode_ms,
        skipped_mass_mean=float(np.mean(masses)) if masses else None,
        skipped_mass_bound_max=_most(certified),
        skipped_mass_true_max=_most(true),
        output_error_bound=_most(errors),
        extensions=0 if extended is None else int(extended.sum()),
        pages_extended=sum(int(layer.extended.sum()) for layer in output.layers if layer.extended is not None),
        audited=audit is not None,
        audit_kl=None if audit is None else audit.kl,
        audit_alarms=0 if audit is None else audit.alarms,
        bound_by_head=certified,
        # without an error bound or a truth to set it against, the mean says enough
        estimate_by_head=estimated if certified is not None or true is not None else None,
        true_by_head=true,
        fallbacks=dict(output.fallbacks),
        timed=timed,
        selected_by_head=selected,
        total_by_head=total,
        extended_by_head=extended,
        bytes_kv_whole=num_rows * spec.exact_token_bytes,
    )
    record.check()
    return record


_COUNTS = "counts", "groups", "always_selected"  # of LayerStats


def _sums(layers: Sequence[LayerStats], name: str, num_heads: int) -> np.ndarray:
    """Counts of every layer, [B] of every head alike or [B, Hkv], summed over sequences: [L, Hkv] int64. Most layers
    share one array, which is summed once."""
    found: dict[int, np.ndarray] = {}
    for layer in layers:
        values: np.ndarray = getattr(layer, name)
        if id(values) not in found:
            summed = values.reshape(len(values), -1).sum(axis=0, dtype=np.int64)
            found[id(values)] = np.broadcast_to(summed, num_heads)
    return np.stack([found[id(getattr(layer, name))] for layer in layers])


def _by_head(
    layers: Sequence[LayerStats], name: str, reduce: Callable[[np.ndarray], np.ndarray] = lambda v: v.max(axis=0)
) -> np.ndarray | None:
    """A statistic [B, Hkv] of every layer, reduced over sequences: [L, Hkv]; zero where a layer has none, None where
    no layer has it."""
    values = [getattr(layer, name) for layer in layers]
    if all(value is None for value in values):
        return None
    return np.stack(
        [np.zeros(layer.counts.shape[1]) if v is None else reduce(v) for layer, v in zip(layers, values, strict=True)]
    )


def _total_ms(layers: Sequence[LayerStats], name: str) -> float | None:
    values = [getattr(layer, name) for layer in layers]
    return None if not values or None in values else float(sum(values))


def percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


WARM_UP_STEPS = 2  # of each decode: they find new memory and cold caches, and are in no time


def steady(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps whose times say something: past each decode's first ones, and no audits, which attend twice. Of a run
    that has no others, all."""
    plain = [r for r in records if not r.audited] or list(records)
    return [r for r in plain if r.step >= WARM_UP_STEPS] or plain


def untimed(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps timed layer by layer wait for the device between layers, so on a GPU they are slower: whole steps are timed
    by the others where there are any, on the dense side too."""
    return [r for r in records if not r.timed] or list(records)


def summarise(records: Sequence[StepRecord], prefill_ms: float | None = None) -> dict[str, Any]:
    """Totals, percentiles and ratios against dense of one run. Times are of `steady` steps."""
    timed = steady(records)
    whole = untimed(timed)
    decode_ms = _known(whole, "decode_ms")
    num_tokens = sum(len(r.tokens) for r in records)
    totals = {name: sum(getattr(r, name) for r in records) for name in _SUMMED}
    dense, whole_bytes = totals["bytes_kv_dense"], sum(r.bytes_kv_whole for r in records)
    read = sum(r.bytes_read for r in records)
    estimates = [r.skipped_mass_mean for r in records if r.skipped_mass_mean is not None]
    audited = [r for r in records if r.audited]
    audit_kl = _known(audited, "audit_kl")
    extended = [r.extended_by_head for r in records if r.extended_by_head is not None]
    wanted = [r.pages_wanted for r in records if r.pages_wanted is not None]
    by_head = None
    if records:
        by_head = sum(r.selected_by_head for r in records) / np.maximum(sum(r.total_by_head for r in records), 1)
    return {
        "steps": len(records),
        "new_tokens": num_tokens,
        "prefill_ms": prefill_ms,
        "warm_up_steps": sum(r.step < WARM_UP_STEPS for r in records) - sum(r.step < WARM_UP_STEPS for r in timed),
        "tokens_per_s": _tokens_per_s(whole),
        **_percentiles("decode_ms", decode_ms),
        **_percentiles("prepass_ms", _known(timed, "eps_prepass_ms") or _known(records, "eps_prepass_ms")),
        **_percentiles("attention_ms", _known(timed, "attention_ms") or _known(records, "attention_ms")),
        **totals,
        "selected_ratio": totals["pages_visited"] / totals["pages_total"] if totals["pages_total"] else None,
        "selected_ratio_by_layer_and_head": by_head,
        "union_amplification": totals["pages_visited"] / sum(wanted) if wanted and sum(wanted) else None,
        "kv_ratio": totals["bytes_kv_read_est"] / dense if dense else None,
        "summary_ratio": totals["bytes_summary_read"] / dense if dense else None,
        "bytes_ratio": read / dense if dense else None,
        "kept_ratio": totals["bytes_kv_kept"] / whole_bytes if whole_bytes else None,
        "skipped_mass_mean": float(np.mean(estimates)) if estimates else None,
        "skipped_mass_bound_max": _most(r.skipped_mass_bound_max for r in records),
        "skipped_mass_true_max": _most(r.skipped_mass_true_max for r in audited),
        "output_error_bound_max": _most(r.output_error_bound for r in records),
        "extensions_by_layer_and_head": sum(extended) if extended else None,
        "audits": len(audited),
        "audit_kl_mean": float(np.mean(audit_kl)) if audit_kl else None,
        "fallbacks": total_fallbacks(records),
    }


def _tokens_per_s(records: Sequence[StepRecord]) -> float | None:
    """Return the tokens of steps over their time, where each step takes the median of those of its batch size."""
    times = defaultdict[int, list[float]](list)
    for record in records:
        if record.decode_ms is not None:
            times[len(record.tokens)].append(record.decode_ms)
    ms = sum(len(found) * float(np.median(found)) for found in times.values())
    return 1000 * sum(size * len(found) for size, found in times.items()) / ms if ms else None


def _known(records: Sequence[StepRecord], name: str) -> list[float]:
    return [value for r in records if (value := getattr(r, name)) is not None]


def _most(values: np.ndarray | Iterable[float | None] | None) -> float | None:
    """Return the largest known value, None where none is."""
    if isinstance(values, np.ndarray):
        return float(values.max())
    return max((value for value in values or () if value is not None), default=None)


_SUMMED = (
    "pages_total", "pages_visited", "pages_skipped", "pages_always_selected", "bytes_kv_read_est", "bytes_kv_dense",
    "bytes_kv_kept", "rows_moved", "units_freed", "bytes_summary_read", "bytes_k_reread", "extensions",
    "pages_extended", "audit_alarms",
)  # fmt: skip


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 95, 99)}


def total_fallbacks(records: Sequence[Any]) -> dict[str, int]:
    """Return how often each reason occurs in the `fallbacks` of steps or rounds."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.fallbacks)
    return dict(total)


def write_csv(place: Path | Output, records: Sequence[Any], keys: Sequence[str] = STEP_KEYS) -> None:
    """Records as CSV: lists are joined by spaces, fallbacks are JSON, unknown is empty. Appears whole."""
    with replacing(place) as file:
        writer = csv.writer(file)
        writer.writerow(keys)
        for record in records:
            values = record.to_dict()
            writer.writerow([_cell(jsonable(values[name])) for name in keys])


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value
