"""Which drafts stay, and what is said in any case, by coupling.

Every position's token is drawn from the dense logits with the noise of its position, and a draft is accepted where it
is that token (Daliri, Musco, Suresh 2024, arXiv 2408.07978). What is said is then what dense decoding says with that
seed, whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eps_core.decode.sampling import Sampling, draw


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
    stop: frozenset[int],
) -> Said:
    """Return the accepted of g drafts, the first at `position`, and the next token, by a verify pass's logits
    [g + 1, V]. Ends with a stop token, where one comes."""
    said = Said()
    for i, row in enumerate(logits):
        drawn = draw(row, sampling, sequence, position + i)
        kept = i < len(drafts) and drawn.token == drafts[i]
        said.tokens.append(drawn.token)
        said.margins.append(drawn.margin)
        said.accepted += kept
        if not kept or drawn.token in stop:
            break
    return said
