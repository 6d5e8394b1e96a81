"""Records of what each round of verified decoding drafted, accepted and read: one record a round, summed up at the end.

Bytes are of K, V and summaries; those of weights stand apart, in `bytes_weights`. Unknown is None, never NaN.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

import numpy as np

from eps_core.metrics.steps import WARM_UP_STEPS, kl_divergence, log_softmax, percentile, summarise, total_fallbacks


@dataclass
class RoundRecord:
    """One round of the sequences still running. Sequence `sequences[i]` says `tokens[i]`, in order: several of each.
    A round without drafts is a dense step. docs/metrics.md has the meaning of every field."""

    step: int
    sequences: list[int]
    tokens: list[int]
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    gamma: int
    offered_by_depth: list[int]
    accepted_by_depth: list[int]
    bytes_kv_draft: int
    bytes_summary_draft: int
    bytes_kv_verify: int
    bytes_k_reread: int
    bytes_kv_dense: int
    weight_passes: int
    bytes_weights: int | None
    draft_ms: float
    verify_ms: float
    round_ms: float
    audit_kl: list[float]
    audit_tv: list[float]
    skipped_mass_true_max: list[float] | None
    top2_margin_min: float | None
    rolled_back: int
    fallbacks: dict[str, int]
    margins: list[float] = field(default_factory=list, repr=False)  # of each of `tokens`; not written

    @property
    def bytes_read(self) -> int:
        """Bytes of K, V and summaries that the round read."""
        return self.bytes_kv_draft + self.bytes_summary_draft + self.bytes_kv_verify

    def to_dict(self) -> dict[str, Any]:
        """The record as written: `type` first."""
        return {"type": "round", **{name: getattr(self, name) for name in ROUND_KEYS}}

    def check(self) -> None:
        """Asserts what must hold of every record."""
        assert len(self.sequences) == len(self.tokens) == sum(self.emitted), self
        assert all(0 <= kept <= made for kept, made in zip(self.accepted, self.drafted, strict=True)), self
        assert sum(self.accepted_by_depth) == sum(self.accepted), self
        assert all(1 <= said <= kept + 1 for said, kept in zip(self.emitted, self.accepted, strict=True)), self


ROUND_KEYS = tuple(f.name for f in fields(RoundRecord) if f.name != "margins")


def divergences(dense: np.ndarray, draft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(KL(dense || draft) in nats, total variation) [N] of next-token logits [N, V] each. A row at a time: a whole
    vocabulary of every draft leaves the processor's cache, which takes several times as long."""
    pairs = [_divergences(*rows) for rows in zip(dense, draft, strict=True)]
    kl, tv = np.array(pairs, np.float64).reshape(-1, 2).T
    return kl, tv


def _divergences(dense: np.ndarray, draft: np.ndarray) -> tuple[float, float]:
    p, q = (np.exp(log_softmax(x.astype(np.float64))) for x in (dense, draft))
    return max(float(kl_divergence(dense, draft)), 0.0), 0.5 * float(np.abs(p - q).sum())


def by_depth(drafted: Sequence[int], accepted: Sequence[int]) -> tuple[list[int], list[int]]:
    """(offered, accepted) of each depth: a draft counts as offered where all before it were accepted."""
    most = max(drafted, default=0)
    offered = [sum(d > depth and a >= depth for d, a in zip(drafted, accepted, strict=True)) for depth in range(most)]
    return offered, [sum(a > depth for a in accepted) for depth in range(most)]


def summarise_rounds(records: Sequence[RoundRecord], prefill_ms: float | None = None) -> dict[str, Any]:
    """Totals, acceptance, percentiles and ratios against dense of one verified run. Times leave out the rounds of the
    first `WARM_UP_STEPS`."""
    timed = [r for r in records if r.step >= WARM_UP_STEPS] or list(records)
    drafted, accepted = sum(sum(r.drafted) for r in records), sum(sum(r.accepted) for r in records)
    num_tokens = sum(len(r.tokens) for r in records)
    rounds_of = sum(len(r.drafted) for r in records)
    offered, kept = _summed(r.offered_by_depth for r in records), _summed(r.accepted_by_depth for r in records)
    read = {name: sum(getattr(r, name) for r in records) for name in _SUMMED}
    total = sum(r.bytes_read for r in records)
    dense = read["bytes_kv_dense"]
    kl, tv = ([x for r in records for x in getattr(r, name)] for name in ("audit_kl", "audit_tv"))
    unread = [x for r in records for x in r.skipped_mass_true_max or ()]
    ms = sum(r.round_ms for r in timed)
    # of a sequence, as a dense step's: what a round says, over how many say it
    by_token = [r.round_ms * len(r.emitted) / len(r.tokens) for r in timed]
    margins = [r.top2_margin_min for r in records if r.top2_margin_min is not None]
    said_in_a_round = Counter(said for r in records for said in r.emitted)  # of one sequence
    weights = [r.bytes_weights for r in records if r.bytes_weights is not None]
    return {
        **summarise([]),
        **dict.fromkeys(("pages_total", "pages_visited", "pages_skipped", "pages_always_selected", "bytes_kv_kept")),
        "rounds": len(records),
        "rounds_drafted": sum(1 for r in records if sum(r.drafted)),
        "new_tokens": num_tokens,
        "prefill_ms": prefill_ms,
        "warm_up_steps": len(records) - len(timed),
        "tokens_per_s": 1000 * sum(len(r.tokens) for r in timed) / ms if ms else None,
        "tokens_per_round": num_tokens / rounds_of if rounds_of else None,
        "tokens_per_round_histogram": {str(said): count for said, count in sorted(said_in_a_round.items())},
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "acceptance_by_depth": [a / o if o else None for a, o in zip(kept, offered, strict=True)],
        "offered_by_depth": offered,
        **read,
        "bytes_weights": sum(weights) if len(weights) == len(records) else None,
        "bytes_kv_read_est": read["bytes_kv_draft"] + read["bytes_kv_verify"],
        "bytes_summary_read": read["bytes_summary_draft"],
        "bytes_ratio": total / dense if dense else None,
        "draft_ratio": (read["bytes_kv_draft"] + read["bytes_summary_draft"]) / dense if dense else None,
        # of a token: a round's tokens come together
        **{f"decode_ms_p{percent}": percentile(by_token, percent) for percent in (50, 95, 99)},
        "audit_kl_mean": float(np.mean(kl)) if kl else None,
        "audit_tv_mean": float(np.mean(tv)) if tv else None,
        "skipped_mass_true_mean": float(np.mean(unread)) if unread else None,
        "top2_margin_min": min(margins, default=None),
        "fallbacks": total_fallbacks(records),
    }


_SUMMED = (
    "bytes_kv_draft", "bytes_summary_draft", "bytes_kv_verify", "bytes_k_reread", "bytes_kv_dense", "weight_passes",
    "rolled_back",
)  # fmt: skip


def _summed(lists: Any) -> list[int]:
    return [sum(depth) for depth in zip_longest(*lists, fillvalue=0)]
