"""Scores methods and policies on captures, without a model: score, select and attend as the live decode does, judged
step by step against float64 truth.

One cache of one layer is filled as the live cache was: everything before the first step at once, then token by token.
`jl` draws its projection by layer number, so a replay of a later layer has another draw of the same distribution. A
capture's keys are balanced as codes want them (`decode.balance`): a live decode by a method without codes has the
model's own. Letters as in `attention.protocol`; F layers of the capture that are replayed, N steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.attention.layer import collect, sparse_attention
from eps_core.attention.protocol import Array, Backend, Scores, Selection
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.evaluation.capture import Capture
from eps_core.evaluation.merits import (
    CERTIFIED_LEVELS,
    RECALL_FRACTIONS,
    Truth,
    bounded_skip,
    false_skips,
    recall_at,
    truth_of,
)
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import choose_device, load_backend

_SUMS = ("bound_checks", "lower_violations", "upper_violations", "bound_violations", "groups_extended")


@dataclass(frozen=True)
class ReplayResult:
    """The result of one configuration on one capture. Arrays are [F, N, Hkv] where nothing else is said; NaN where a
    step has no such figure. Shares are of the softmax, bytes as the metrics count them; nothing in it is a time."""

    config: EpsConfig
    layers: tuple[int, ...]
    lengths: np.ndarray  # [N] tokens attended
    groups: np.ndarray  # [N]
    selected: np.ndarray  # groups
    always_selected: np.ndarray  # [F, N] groups, every kv head alike
    extended: np.ndarray  # groups that strict mode added
    kv_bytes: np.ndarray  # [F, N]
    summary_bytes: np.ndarray  # [F, N]
    dense_bytes: np.ndarray  # [F, N] what dense attention reads
    skipped_est: np.ndarray  # estimated share left unread, the metrics' skipped_mass_mean
    skipped_true: np.ndarray  # true share left unread, the largest of the R query heads
    recall: np.ndarray  # true share of the selected groups, mean over the R query heads
    # [F, N, Hkv, 3] share of the best RECALL_FRACTIONS of the groups by estimate; those that are always selected (sink
    # and recent tokens, no summary) are left out of numerator and denominator; mean over the R query heads
    recall_at: np.ndarray
    # skipped groups that should have been read: for one of the R query heads their
    # true share exceeds config.epsilon, or they are among the true top-M, M the number of selected groups, by the
    # largest true mass over the query heads
    false_skips: np.ndarray
    output_error: np.ndarray  # |out - dense out|_2 / |dense out|_2 over the R query heads together
    union_amplification: np.ndarray  # [F, N] groups that any kv head wants over the mean of what each wants
    # the method's own bounds; all NaN or 0 for a method without any (codes of single keys, bound_bits, are judged as
    # method rq over groups of 1 token)
    bound_checks: np.ndarray  # groups x query heads whose bounds were compared with the truth
    lower_violations: np.ndarray  # lower > truth
    upper_violations: np.ndarray  # upper < truth
    upper_gap: np.ndarray  # mean of upper - truth, nats
    error_bound: np.ndarray  # bounded upper bound of the share left unread
    bound_violations: np.ndarray  # skipped_true > error bound
    # [F, N, Hkv, 3] greatest fraction of the groups that may stay unread with an error bound of at most each of
    # CERTIFIED_LEVELS, reading in the order of the upper mass, A_V the true mass of what was read; float32's slack,
    # which a live error bound adds, is left out
    bounded_skip: np.ndarray
    oracle_skip: np.ndarray  # the same with the true masses as bounds: what no summary can exceed

    @property
    def bytes_ratio(self) -> float:
        """K, V and summaries read, over dense."""
        return float((self.kv_bytes + self.summary_bytes).sum() / self.dense_bytes.sum())

    def summary(self) -> dict[str, Any]:
        """Means over layers, steps and kv heads, and sums of counts. Unknown is None."""
        cache, selection = self.config.cache_config, self.config.selection_config
        by_share = selection.policy == "topk" and selection.top_pages is None
        total = np.broadcast_to(self.groups[None, :, None], self.selected.shape)
        row: dict[str, Any] = {
            "method": cache.method,
            "group_size": cache.S,
            "bits": cache.code_bits,
            "mean_tokens": cache.mean_tokens or None,
            "cascade": list(selection.cascade) or None,
            "rescore": selection.rescore or None,
            "dim": cache.dim,
            "policy": selection.policy,
            "budget": selection.budget if by_share else None,
            "strict": selection.strict,
            "bytes_ratio": self.bytes_ratio,
            "summary_ratio": float(self.summary_bytes.sum() / self.dense_bytes.sum()),
            "selected_ratio": float(self.selected.sum() / total.sum()),
            "always_selected_ratio": float(self.always_selected.sum() * self.selected.shape[2] / total.sum()),
            "recall": _mean(self.recall),
            "skipped_est": _mean(self.skipped_est),
            "skipped_true": _mean(self.skipped_true),
            "skipped_true_max": _mean(self.skipped_true, np.max),
            "false_skip_rate": _ratio(self.false_skips, total - self.selected),
            "output_error": _mean(self.output_error),
            "output_error_max": _mean(self.output_error, np.max),
            "union_amplification": _mean(self.union_amplification),
            "upper_gap": _mean(self.upper_gap),
            "error_bound": _mean(self.error_bound),
            "bound_checks": int(self.bound_checks.sum()),
            "lower_violations": int(self.lower_violations.sum()),
            "upper_violations": int(self.upper_violations.sum()),
            "bound_violations": int(self.bound_violations.sum()),
            "groups_extended": int(self.extended.sum()),
        }
        row |= {f"recall_at_{f:g}": _mean(self.recall_at[..., i]) for i, f in enumerate(RECALL_FRACTIONS)}
        row |= {f"certified_skip_{e:g}": _mean(self.bounded_skip[..., i]) for i, e in enumerate(CERTIFIED_LEVELS)}
        row |= {f"oracle_skip_{e:g}": _mean(self.oracle_skip[..., i]) for i, e in enumerate(CERTIFIED_LEVELS)}
        return row

    def head_rows(self) -> list[dict[str, Any]]:
        """The main figures of every (layer, kv head), means over steps."""
        return [
            {
                "layer": layer,
                "kv_head": head,
                "selected_ratio": float((self.selected[i, :, head] / self.groups).mean()),
                "recall": _mean(self.recall[i, :, head]),
                "skipped_true": _mean(self.skipped_true[i, :, head]),
                "output_error": _mean(self.output_error[i, :, head]),
                "upper_gap": _mean(self.upper_gap[i, :, head]),
                **{f"certified_skip_{e:g}": _mean(self.bounded_skip[i, :, head, j]) for j, e in _LEVELS},
                **{f"oracle_skip_{e:g}": _mean(self.oracle_skip[i, :, head, j]) for j, e in _LEVELS},
            }
            for i, layer in enumerate(self.layers)
            for head in range(self.selected.shape[2])
        ]


_LEVELS = tuple(enumerate(CERTIFIED_LEVELS))


def _recall_at(estimate: np.ndarray, plan: StepPlan, truth: Truth) -> dict[str, Any]:
    groups = truth.shares.shape[2]
    ranked = np.where(plan.always_selected[0], -np.inf, estimate)[:, :groups]
    return {"recall_at": recall_at(ranked, truth.shares, RECALL_FRACTIONS)}


def _mean(values: np.ndarray, of: Callable[[np.ndarray], Any] = np.mean) -> float | None:
    """The mean, or another figure, of what is known."""
    known = values[~np.isnan(values)]
    return float(of(known)) if known.size else None


def _ratio(part: np.ndarray, whole: np.ndarray) -> float | None:
    return float(part.sum() / whole.sum()) if whole.sum() else None


def replay_many(
    capture: Capture,
    configs: Sequence[EpsConfig],
    backend: Backend | None = None,
    device: str = "auto",
    layers: Sequence[int] | None = None,
) -> list[ReplayResult]:
    """Every configuration on one capture; those that keep and score the same share a cache.

    `backend` None is the fastest here, `layers` None all of the capture. Beside the cache, one layer of K and V is held
    in float64: 16 * (context + steps) * Hkv * D bytes.
    """
    backend = load_backend("auto") if backend is None else backend
    device = choose_device(backend, device)
    configs = [config.for_device(device) for config in configs]
    layers = capture.info.layers if layers is None else tuple(layers)
    shared: dict[tuple[CacheConfig, tuple[Any, ...]], list[int]] = {}  # what is scored alike
    for index, config in enumerate(configs):
        if not config.cache_config.enabled:
            raise ConfigError("method off selects nothing: replay needs another method")
        modes = config.selection_config.head_modes
        if modes is not None and (len(modes), len(modes[0])) != (capture.info.num_layers, capture.info.num_kv_heads):
            raise ConfigError(
                f"head modes are of {len(modes)} layers x {len(modes[0])} kv heads, the capture's model has "
                f"{capture.info.num_layers} x {capture.info.num_kv_heads}: calibrate that model"
            )
        # a score of codes reads on in more groups where more are selected
        scored = ("cascade", "rescore", "combine", "policy", "budget", "budget_floor", "top_pages")
        coded = config.cache_config.method_spec.coded
        read = tuple(getattr(config.selection_config, name) for name in scored if coded)
        shared.setdefault((config.cache_config, read), []).append(index)
    rows: list[list[dict[str, Any]]] = [[] for _ in configs]  # of each configuration, one a (layer, step)
    for layer in layers:
        q, k, v = capture.layer(layer)
        keys, values = (np.ascontiguousarray(x.swapaxes(0, 1).astype(np.float64)) for x in (k, v))
        for (cache_config, _), members in shared.items():
            state = _Layer(capture, backend, device, cache_config, q, k, v, keys, values)
            one_layer = []  # the configurations for a cache of that layer alone
            for config in (configs[index] for index in members):
                modes = config.selection_config.head_modes
                one_layer.append(config if modes is None else config.replace(head_modes=(modes[layer],)))
            for step in range(len(capture.lengths)):
                for index, row in zip(members, state.step(step, one_layer), strict=True):
                    rows[index].append(row)
    return [_result(capture, config, layers, found) for config, found in zip(configs, rows, strict=True)]


def _result(capture: Capture, config: EpsConfig, layers: Sequence[int], rows: Sequence[dict[str, Any]]) -> ReplayResult:
    num_steps = len(capture.lengths)
    arrays = {
        name: np.array([row[name] for row in rows]).reshape(len(layers), num_steps, *np.shape(rows[0][name]))
        for name in rows[0]
    }
    return ReplayResult(config, tuple(layers), capture.lengths, -(-capture.lengths // config.cache_config.S), **arrays)


@dataclass
class _Layer:
    """One layer's cache, followed step by step."""

    capture: Capture
    backend: Backend
    device: str
    cache_config: CacheConfig
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray  # k and v by head, in float64
    values: np.ndarray

    def __post_init__(self) -> None:
        info, self.lengths = self.capture.info, self.capture.lengths
        units = -(-int(self.lengths[-1]) // self.cache_config.unit_tokens)
        spec = CacheSpec(1, info.num_kv_heads, info.head_dim, units, info.kv_dtype, max_open_groups=1)
        self.cache = self.backend.new_cache(spec, self.cache_config, self.device)
        self.table = np.arange(units, dtype=np.int32)
        self.written = 0
        # as the live cache was filled: the last token of the first step comes alone
        self._write(int(self.lengths[0]) - 1)

    def _write(self, end: int) -> None:
        if end > self.written:
            k, v = (
                self.backend.from_numpy(np.ascontiguousarray(x[self.written : end]), self.cache.spec.dtype, self.device)
                for x in (self.k, self.v)
            )
            self.cache = self.backend.write_kv(self.cache, 0, k, v, np.arange(self.written, end))
            self.written = end

    def step(self, step: int, configs: Sequence[EpsConfig]) -> list[dict[str, Any]]:
        """Fields of ReplayResult, one row for each configuration."""
        length = int(self.lengths[step])
        for end in range(self.written + 1, length + 1):
            self._write(end)
        spec = self.cache.spec
        keys, values, size = self.keys[:, :length], self.values[:, :length], self.cache_config.S
        truth = truth_of(self.q[step], keys, values, self.capture.info.scale, size)
        q = self.backend.from_numpy(self.q[step][None], "float32", self.device)
        table = self.table[None, : -(-length // self.cache_config.unit_tokens)]
        plans = [StepPlan.of(config, table, np.array([length])) for config in configs]
        scores = self.backend.score(self.cache, 0, q, plans[0])
        facts = self._facts(scores, truth)
        facts["dense_bytes"] = length * spec.num_kv_heads * spec.kv_token_bytes
        estimate = self._host(scores.estimate)
        return [facts | _recall_at(estimate, plan, truth) | self._attend(plan, q, truth) for plan in plans]

    def _facts(self, scores: Scores, truth: Truth) -> dict[str, Any]:
        """Return the facts that follow from scores and truth alone, whatever is selected."""
        kv_heads, _, groups = truth.log_masses.shape
        facts: dict[str, Any] = {
            "oracle_skip": bounded_skip(truth.log_masses, truth.log_masses, CERTIFIED_LEVELS),
        }
        if scores.upper is None:
            none, zero = np.full(kv_heads, np.nan), np.zeros(kv_heads, np.int64)
            counts = dict.fromkeys(("bound_checks", "lower_violations", "upper_violations"), zero)
            return facts | counts | {"upper_gap": none, "bounded_skip": np.full((kv_heads, len(_LEVELS)), np.nan)}
        lower, upper = (self._host(bound)[..., :groups] for bound in (scores.lower, scores.upper))
        known = np.isfinite(upper)
        checks = known.sum(axis=(1, 2))
        gap = np.where(known, upper, 0) - np.where(known, truth.log_masses, 0)
        return facts | {
            "bound_checks": checks,
            "lower_violations": (lower > truth.log_masses).sum(axis=(1, 2)),
            "upper_violations": (upper < truth.log_masses).sum(axis=(1, 2)),
            "upper_gap": np.where(checks > 0, gap.sum(axis=(1, 2)) / np.maximum(checks, 1), np.nan),
            "bounded_skip": bounded_skip(upper, truth.log_masses, CERTIFIED_LEVELS),
        }

    def _attend(self, plan: StepPlan, q: Array, truth: Truth) -> dict[str, Any]:
        """Selects and attends as a decoder's step does, and compares with the truth."""
        cache = self.cache
        kv_heads, _, groups = truth.log_masses.shape
        out, read = sparse_attention(self.backend, cache, 0, q, plan)
        (stats,), (host_out,) = collect(self.backend, cache, [read], out)
        selected_mask = (
            np.ones((kv_heads, groups), bool) if read.selection is None else self._visit(read.selection, groups)
        )
        wanted = (stats.counts if stats.counts_before_union is None else stats.counts_before_union)[0]
        error_bound = np.full(kv_heads, np.nan) if stats.skipped_mass_bound is None else stats.skipped_mass_bound[0]
        extended = np.zeros(kv_heads, np.int64) if stats.extended is None else stats.extended[0]
        assert stats.skipped_mass is not None
        unread = (truth.shares * ~selected_mask[:, None]).sum(axis=2)
        dense_out = truth.out.reshape(kv_heads, -1)
        error = np.linalg.norm(host_out[0].astype(np.float64).reshape(kv_heads, -1) - dense_out, axis=1)
        return {
            "selected": selected_mask.sum(axis=1),
            "always_selected": int(stats.always_selected[0]),
            "extended": extended.astype(np.int64),
            "kv_bytes": stats.kv_bytes_read,
            "summary_bytes": stats.summary_bytes_read,
            "skipped_est": stats.skipped_mass[0].astype(np.float64),
            "skipped_true": unread.max(axis=1),
            "recall": 1 - unread.mean(axis=1),
            "false_skips": false_skips(selected_mask, truth, plan.config.selection_config.epsilon),
            "output_error": error / np.linalg.norm(dense_out, axis=1),
            "union_amplification": selected_mask.any(axis=0).sum() / wanted.mean(),
            "error_bound": error_bound.astype(np.float64),
            "bound_violations": unread.max(axis=1) > error_bound,
        }

    def _host(self, array: Array) -> np.ndarray:
        """A backend array of the one sequence, without the axis of sequences."""
        return self.backend.to_numpy(array)[0]

    def _visit(self, selection: Selection, groups: int) -> np.ndarray:
        """[Hkv, G] bool."""
        listed, counts = self._host(selection.groups), self._host(selection.counts)
        selected_mask = np.zeros((len(listed), groups), bool)
        for head, count in enumerate(counts):
            selected_mask[head, listed[head, :count]] = True
        return selected_mask


# what captures must share for a mean over them to say something: one model, one context and one kind of decode.
# Texts, numbers of steps, and what computed them may differ.
_ALIKE = (
    "fingerprint", "num_layers", "num_heads", "num_kv_heads", "head_dim", "context_tokens", "kv_dtype", "config",
)  # fmt: skip


def check_alike(captures: Sequence[Capture], layers: Sequence[int] | None = None) -> None:
    """Raises ConfigError where a mean over these captures, all their layers or `layers` of them, would mix what no
    figure speaks of."""
    first = captures[0]
    for other in captures[1:]:
        ours, theirs = vars(first.info), vars(other.info)
        names = [name for name in (*_ALIKE, *(("layers",) if layers is None else ())) if ours[name] != theirs[name]]
        if not names:
            continue
        what, values = names[0].replace("_", " "), [ours[names[0]], theirs[names[0]]]
        if names[0] == "fingerprint":
            what, values = "model", [f"{info.model} {info.fingerprint[:8]}" for info in (first.info, other.info)]
        elif names[0] == "config":
            what, values = "decode", [f"method {info.config.get('method')}" for info in (first.info, other.info)]
        raise ConfigError(
            f"captures {first.path} and {other.path} differ in {what} ({values[0]} and {values[1]}), and a mean over "
            "both says nothing: replay them one by one"
        )


def combine(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One configuration's summaries of several captures as one: means of what is known and differs, sums of
    counts, maxima."""
    row = dict(summaries[0])
    for name in row:
        known = [summary[name] for summary in summaries if summary[name] is not None]
        if name in _SUMS:
            row[name] = sum(known)
        elif name.endswith("_max"):
            row[name] = max(known, default=None)
        elif known and isinstance(known[0], float) and set(known) != {row[name]}:
            row[name] = float(np.mean(known))
    return row
