"""The drafts of a round that stay, and what is said in any case, by coupling; and the record of the round.

Every position's token is drawn from the dense logits with the noise of its position, and a draft is accepted where it
is that token (Daliri, Musco, Suresh 2024, arXiv 2408.07978). What is said is then what dense decoding says with that
seed, whatever was drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.config.cache import CacheSpec
from eps_core.decode.sampling import Sampling, draw
from eps_core.kv_cache.rows import Rows
from eps_core.metrics.rounds import RoundRecord, by_depth, divergences


@dataclass
class Said:
    """The tokens that a sequence says in one round: `accepted` drafts, then the token that ends it (all drafts may be
    all there is, where a stop token is among them)."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # see `sampling.Drawn`
    accepted: int = 0


def accept(
    logits: np.ndarray,
    drafts: Sequence[int],
    sampling: Sampling,
    sequence: int,
    position: int,
    ends: Callable[[int, int], bool],
) -> Said:
    """Return the accepted of g drafts, the first at `position`, and the next token, by a verify pass's logits
    [g + 1, V]. Ends with the first token for which `ends(sequence, token)` is True, where one comes."""
    said = Said()
    for i, row in enumerate(logits):
        drawn = draw(row, sampling, sequence, position + i)
        kept = i < len(drafts) and drawn.token == drafts[i]
        said.tokens.append(drawn.token)
        said.margins.append(drawn.margin)
        said.accepted += kept
        if ends(sequence, drawn.token) or not kept:
            break
    return said


def draft_audit(
    drafts: Sequence[Sequence[np.ndarray]], logits: np.ndarray, rows: Rows, unread: np.ndarray | None
) -> dict[str, Any]:
    """Return how far each draft step was from the dense pass, by depth, mean over sequences: `drafts` are the draft
    steps' logits [V] of every sequence, logits [T, V] and unread shares [L, T, Hkv] the pass's. The fields of
    `RoundRecord`.
    """
    found: list[list[tuple[float, float, float]]] = [[] for _ in range(max(len(one) for one in drafts))]
    for first, own in zip(rows.starts.tolist(), drafts, strict=False):
        if own:
            values = divergences(logits[first : first + len(own)], np.array(own))
            for depth, (kl, tv) in enumerate(zip(*values, strict=True)):
                found[depth].append((kl, tv, 0.0 if unread is None else float(unread[:, first + depth].mean())))
    kls, tvs, shares = ([float(np.mean([one[i] for one in depth])) for depth in found] for i in range(3))
    return {"audit_kl": kls, "audit_tv": tvs, "skipped_mass_true_max": None if unread is None else shares}


def round_record(
    spec: CacheSpec, indices: list[int], drafted: list[int], said: list[Said], lengths: list[int], **more: Any
) -> RoundRecord:
    """Return the record of a round of sequences, by prompt number, which had `lengths` tokens in the cache and
    `drafted` so many; `more` are other fields of `RoundRecord`."""
    accepted = [one.accepted for one in said]
    # dense decoding reads all that came before each token that was said
    lengths_read = [length + 1 + i for length, one in zip(lengths, said, strict=True) for i in range(len(one.tokens))]
    margins = [margin for one in said for margin in one.margins]
    offered, kept = by_depth(drafted, accepted)
    values: dict[str, Any] = {
        "step": 0, "gamma": 0, "bytes_kv_draft": 0, "bytes_summary_draft": 0, "bytes_k_reread": 0, "draft_ms": 0.0,
        "round_ms": 0.0, "audit_kl": [], "audit_tv": [], "skipped_mass_true_max": None, "rolled_back": 0,
        "fallbacks": {},
    }  # fmt: skip
    return RoundRecord(
        sequences=[index for index, one in zip(indices, said, strict=True) for _ in one.tokens],
        tokens=[token for one in said for token in one.tokens],
        drafted=drafted,
        accepted=accepted,
        emitted=[len(one.tokens) for one in said],
        offered_by_depth=offered,
        accepted_by_depth=kept,
        bytes_kv_dense=spec.exact_kv_bytes(lengths_read),
        top2_margin_min=min((one for one in margins if np.isfinite(one)), default=None),
        margins=margins,
        **(values | more),
    )
