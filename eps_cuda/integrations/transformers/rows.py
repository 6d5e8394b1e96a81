"""The rows of a batch in one pool of pages: what the layers of one cache share.

Letters: B rows, N new tokens of each, T tokens of each, left padding included, as transformers counts them. Of row b
the first `padding[b]` tokens are in no page: its sequence holds the T - padding[b] others, if there are any.
"""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eps_core.config.cache import CacheSpec
from eps_core.errors import ConfigError, require
from eps_core.integrations.kernels import checked_kernels
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_core.integrations.rows import EngineRows
from eps_core.integrations.verified import Round
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.kv_cache.step_plan import StepPlan
from eps_cuda.device import DTYPES
from eps_cuda.integrations.transformers.attention import left_padding
from eps_cuda.ops import OPS

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FIRST_ROOM = 256  # tokens of each row beyond its prompt that the first pool has room for


class Rows(EngineRows):
    """Opened by the first forward, whose K says shape, dtype and device. One forward writes N tokens of every row:
    `begin` gives them slots once, `write` each layer's K and V."""

    ops = OPS

    def __init__(self, sparse: SparseAttention, kernels: str, num_heads: int) -> None:
        """`num_heads`: query heads of a layer, in whose shape the kernels are checked before they are used."""
        super().__init__(sparse)
        self.kernels, self.num_heads = kernels, num_heads
        self.paged: Paged | None = None
        self.reset()

    def reset(self) -> None:
        """Gives everything back; what comes next is a new cache, with a centroid of its own."""
        if self.paged is not None:
            self._finalizer()
        self.paged = None
        self.round, self.broken = None, False
        self.sequences: list[PagedSequence] = []
        self.padding = np.zeros(0, np.int64)
        self.length = 0  # T
        self.odd: str | None = None  # why the forward's attention must be the engine's, if it must
        self.plan: StepPlan | None = None  # of the forward's decode rows
        self._slots = np.zeros(0, np.int64)
        self._skipped: list[int] = []  # of each row, how many of the N new tokens are padding

    def begin(self, key: Tensor, mask: Tensor | None, length: int) -> None:
        """Makes room for one forward's tokens, of which a layer's key is [B, Hkv, N, D]; T is `length` from now on.
        Later layers of the same forward find it done. Raises ConfigError for rows or a mask that do not go on with what
        is there."""
        if length == self.length:
            return
        batch, num_new = key.shape[0], key.shape[2]
        if self.round is not None:
            start = self.length - int(self.padding[0])
            self._slots, self._skipped = self.round.slots(start, num_new), [0]
            self.plan = None if self.round.verifying else self.round.plan(start + num_new)
            self.length = length
            return
        before = self.length
        assert before + num_new == length, f"a layer holds {length - num_new} tokens, the layers below it {before}"
        paged = self._open(key) if self.paged is None else self.paged
        require(
            batch == len(self.sequences),
            f"{batch} rows go on with a cache of {len(self.sequences)}: use another cache, or reset this one",
        )
        held = paged.pool.lengths(self.sequences)
        hidden, plain = left_padding(mask, batch, length)
        if mask is None or plain:
            require(
                bool((hidden >= np.minimum(self.padding, before)).all()),
                "tokens that attention_mask called padding are not in the cache, and it no longer hides them: pass the "
                "mask of all tokens, those before included",
            )
        fits = plain and bool(((hidden == self.padding) | (held == 0)).all())
        self.padding = np.where(held == 0, hidden if fits else before, self.padding)
        counts = length - self.padding - held
        some = counts > 0
        self._slots = paged.append([s for s, ok in zip(self.sequences, some, strict=True) if ok], counts[some].tolist())
        self._skipped = (num_new - counts).tolist()
        self.length = length
        self.odd = None if fits and bool((held + counts > 0).all()) else "mask"
        self.plan = paged.plan(self.sparse.config, self.sequences) if num_new == 1 else None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """K and V [B, Hkv, N, D] of one layer to the slots of `begin`."""
        assert self.paged is not None
        spec = self.paged.cache.spec
        require(
            key.shape == value.shape and key.shape[1] == spec.num_kv_heads and key.shape[3] == spec.head_dim,
            f"layer {self.sparse.plan.sparse[layer]} has {key.shape[1]} kv heads of {key.shape[3]} and values of "
            f"{value.shape[3]}, the first sparse one {spec.num_kv_heads} of {spec.head_dim}: EPS supports layers of "
            "one shape; run this model with --method off",
        )
        self.write_slots(layer, self._own(key), self._own(value), self._slots)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K, V [B, Hkv, T, D] of one layer, as its stock cache would hold them; zeros for padding."""
        assert self.paged is not None
        spec, device = self.paged.cache.spec, self.paged.cache.k[layer].device
        shape = (len(self.sequences), spec.num_kv_heads, self.length, spec.head_dim)
        make = torch.zeros if self.padding.any() else torch.empty
        k, v = (make(shape, dtype=DTYPES[spec.dtype], device=device) for _ in "kv")
        for row, sequence in enumerate(self.sequences):
            held = self.length - int(self.padding[row])  # what a round has placed counts
            if held:
                own_k, own_v = self.paged.read(layer, sequence, held)
                first = self.length - held
                k[row, :, first:], v[row, :, first:] = own_k.transpose(0, 1), own_v.transpose(0, 1)
        return k, v

    def crop(self, num_tokens: int) -> None:
        """Takes the last `num_tokens` of every row back. In a round they stay in their slots, to be placed over."""
        if self.paged is None:
            return
        self.length = max(self.length - num_tokens, 0)
        for sequence in self.sequences if self.round is None else ():
            self.paged.pool.truncate(sequence, max(sequence.length - num_tokens, 0))

    def end_round(self, num_kept: int) -> Round:
        found = super().end_round(num_kept)
        self.length = int(self.padding[0]) + found.length + num_kept
        return found

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes what row indices[i] was: sequences that several rows go on with are forked."""
        if self.paged is None:
            return
        indices = [range(len(self.sequences))[index] for index in indices]  # those from the end, too
        taken: set[int] = set()
        chosen = []
        for index in indices:
            chosen.append(self.paged.pool.fork(self.sequences[index]) if index in taken else self.sequences[index])
            taken.add(index)
        for index, sequence in enumerate(self.sequences):
            if index not in taken:
                self.paged.pool.free(sequence)
        self.sequences[:] = chosen  # in place: the finalizer frees what is in this list
        self.padding = self.padding[indices]

    def __deepcopy__(self, memo: object) -> "Rows":
        """The same rows once more, over the same pages."""
        other = Rows(self.sparse, self.kernels, self.num_heads)
        if self.paged is not None:
            other.paged = self.paged
            other.sequences = [self.paged.pool.fork(sequence) for sequence in self.sequences]
            other.padding, other.length, other.broken = self.padding.copy(), self.length, self.broken
            other._watch()
        return other

    def _open(self, key: Tensor) -> Paged:
        batch, kv_heads, num_new, head_dim = key.shape
        if key.dtype not in _NAMES:
            raise ConfigError(f"K is {key.dtype}: load the model with one of {', '.join(_NAMES.values())}")
        place = torch.empty(0, device=key.device.type).device
        require(
            key.device == place, f"K is on {key.device} and the current device is {place}: put the model on one device"
        )
        self.sparse.fits(kv_heads)
        cache_config = self.sparse.config.cache_config
        units = batch * -(-(num_new + FIRST_ROOM) // cache_config.unit_tokens)
        # beams hold twice as many partial groups while they change places
        spec = CacheSpec(len(self.sparse.plan.sparse), kv_heads, head_dim, units, _NAMES[key.dtype], 2 * batch)
        device = key.device.type
        kernels = checked_kernels(self.sparse.backend, self.kernels, device, spec, self.num_heads, cache_config)
        self.paged = Paged(self.sparse.backend, spec, cache_config, device, kernels)
        self.sequences = [self.paged.open() for _ in range(batch)]
        self.padding = np.zeros(batch, np.int64)
        self._watch()
        return self.paged

    def _watch(self) -> None:
        assert self.paged is not None
        self.paged.num_holders += 1
        self._finalizer = weakref.finalize(self, _give_back, self.paged, self.sequences, self.sparse)
        self._finalizer.atexit = False

    def _own(self, x: Tensor) -> Tensor:
        """[B, Hkv, N, D] -> [tokens, Hkv, D], row after row, without padding."""
        if not any(self._skipped):
            return x.transpose(1, 2).flatten(0, 1)
        return torch.cat([row[:, skipped:].transpose(0, 1) for row, skipped in zip(x, self._skipped, strict=True)])


def _give_back(paged: Paged, sequences: list[PagedSequence], sparse: SparseAttention) -> None:
    if paged.give_up(sequences):
        sparse.let_go(paged.cache)  # which steps that nobody asked for yet hold
