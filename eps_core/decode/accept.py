"""Which drafts stay, and what is said in any case: coupling and rejection (design section 10).

Coupling: every position's token is drawn from the dense logits with the noise of its position, and a draft is accepted
where it is that token (Daliri, Musco, Suresh 2024, arXiv 2408.07978). What is said is then what dense decoding says
with that seed, whatever was drafted. Rejection: speculative sampling (Leviathan, Kalman, Matias 2023; Chen et al.
2023): a draft x is accepted with probability min(1, p(x) / q(x)), else the token is drawn from max(p - q, 0): dense in
distribution, and the text depends on the drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eps_core.decode.sampling import (
    ACCEPTANCE,
    PROPOSAL,
    RESIDUAL,
    Sampling,
    check_logits,
    draw,
    draw_from,
    probabilities,
    uniforms,
)


@dataclass
class Said:
    """What a sequence says in one round: `accepted` drafts, then the token that ends it (all drafts may be all there
    is, where a stop token is among them)."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)  # see `sampling.Drawn`; inf by rejection
    accepted: int = 0


def propose(logits: np.ndarray, sampling: Sampling, rule: str, sequence: int, position: int) -> int:
    """A draft from a draft step's logits [V]. Coupled, it takes the noise that the dense draw will take; for rejection
    a stream of its own, as the draws that judge it must be independent of it."""
    stream = PROPOSAL if rule == "reject" and sampling.temperature > 0 else 0
    return draw(logits, sampling, sequence, position, stream).token


def accept(
    logits: np.ndarray,
    drafts: Sequence[int],
    proposals: Sequence[np.ndarray],
    sampling: Sampling,
    rule: str,
    sequence: int,
    position: int,
    stop: frozenset[int],
) -> Said:
    """What is said of g drafts, the first at `position`, by a verify pass's logits [g + 1, V]; `proposals` are the
    draft steps' logits [V] each. Ends with a stop token, where one comes."""
    said = Said()
    rejecting = rule == "reject" and sampling.temperature > 0
    for i, row in enumerate(logits):
        if rejecting and i < len(drafts):
            token, kept = _judge(row, drafts[i], proposals[i], sampling, sequence, position + i)
            margin = np.inf
        else:
            drawn = draw(row, sampling, sequence, position + i)
            token, margin, kept = drawn.token, drawn.margin, i < len(drafts) and drawn.token == drafts[i]
        said.tokens.append(token)
        said.margins.append(float(margin))
        said.accepted += kept
        if not kept or token in stop:
            break
    return said


def _judge(
    row: np.ndarray, draft: int, proposal: np.ndarray, sampling: Sampling, sequence: int, position: int
) -> tuple[int, bool]:
    """(token, whether it is the draft) by rejection. p and q are what tokens are drawn with: after temperature and
    top-p, as the draft was."""
    check_logits(row, position)
    p, q = probabilities(row, sampling), probabilities(proposal, sampling)
    if uniforms(sampling, sequence, position, 1, ACCEPTANCE)[0] * q[draft] < p[draft]:
        return draft, True
    rest = np.maximum(p - q, 0.0)
    # none where p = q but for rounding, and rounding rejected: p then is what is left
    return draw_from(rest if rest.any() else p, sampling, sequence, position, RESIDUAL), False
