"""The base of an engine's rows, whichever engine it is: how they are written, and the rounds over them."""

from typing import Any

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend.cache import write_rows
from eps_core.backend.ops import Ops
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_core.integrations.verified import Round


class EngineRows:
    """The base of a hook's rows. Where EPS fails K and V are kept all the same, and all that follows is attended by the
    engine."""

    ops: Ops  # of the engine's array library
    paged: Any  # `Paged`; None until K says the shape

    def __init__(self, sparse: SparseAttention) -> None:
        self.sparse = sparse
        self.broken = False  # summaries do not follow what is written any more
        self.round: Round | None = None  # of verified decoding, where one is under way

    @property
    def decodes_sparsely(self) -> bool:
        """Return whether single tokens are sparse: in verified decoding only drafts are."""
        return self.sparse.rounds is None or (self.round is not None and not self.round.verifying)

    def write_slots(self, layer: int, k: Array, v: Array, slots: np.ndarray) -> None:
        """k, v [N, Hkv, D] of one layer to slots [N]."""
        paged: Paged = self.paged
        if self.round is not None:
            self.round.placed(layer, k, v)
        if not self.broken:
            try:
                (paged.write if self.round is None else paged.place)(layer, k, v, slots)
                return
            except Exception as error:
                self._break(error)
        write_rows(self.ops, paged.cache, layer, k, v, slots)

    def open_round(self, sequence: Any, num_drafts: int) -> Round:
        """Begins a round of a sequence: single tokens are drafts from now on."""
        assert self.sparse.rounds is not None and self.round is None
        self.round = Round(self.paged, sequence, self.sparse.rounds.config(self.sparse.config), num_drafts)
        return self.round

    def end_round(self, num_kept: int) -> Round:
        """Ends the round, which is returned: the first rows of its verify pass are written, and are all that stays."""
        assert self.round is not None
        found, self.round = self.round, None
        try:
            found.commit(num_kept)
        except Exception as error:
            self._break(error)
        return found

    def _break(self, error: Exception) -> None:
        self.broken = True
        self.sparse.tell(error)
