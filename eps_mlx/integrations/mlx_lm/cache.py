"""mlx-lm's cache objects over a paged pool: `EpsKVCache` of one prompt (or equally long ones), `EpsBatchKVCache` of a
left-padded batch. Interface: mlx_lm.models.cache.KVCache and BatchKVCache of 0.32.

K and V lie in the pool alone, in token space: padding is never written, it belongs to the mask and to RoPE's offsets.
Column c of a batch is token c - left[b] of row b; while a right-padded prompt is read, columns from end[b] on are
padding, too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from eps_core.errors import ConfigError
from eps_mlx.integrations.mlx_lm.names import Attends, stock_attention
from eps_mlx.integrations.mlx_lm.rows import Row, Rows

# pools of the models that have EPS on, the last one first asked: where a loaded prompt cache may go
open_pools: list[Rows] = []


class _State(dict):
    """State of a cache as mlx-lm sees it. After every chunk of a prompt mlx evaluates the dict's own values, which are
    what is still to be computed; saving asks for `items`, and only then K and V are read out of the pool."""

    def __init__(self, pending: Sequence[mx.array], saved: Callable[[], tuple[Any, ...]]) -> None:
        super().__init__(enumerate(pending))
        self._saved = saved

    def items(self) -> Any:
        return [(str(index), item) for index, item in enumerate(self._saved())]


class PagedKVCache(_BaseCache, Attends):
    """One sparse layer's view of rows of a pool. The caches of a prompt's layers share the rows."""

    def __init__(self, pool: Rows, layer: int, rows: list[Row]) -> None:
        self.pool, self.layer, self.rows = pool, layer, rows
        self.left = [0] * len(rows)  # columns of padding before each row's first token
        self.end: list[int] | None = None  # the column after each row's last token, while a padded prompt is read
        self._padding: list[int] | None = None  # that `finalize` moves to the left
        self.columns = 0  # tokens and padding
        self._handed: tuple[mx.array, mx.array] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        ends = [self.columns] * len(self.left) if self.end is None else [min(self.columns, end) for end in self.end]
        return [max(end - left, 0) for end, left in zip(ends, self.left, strict=True)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes keys, values [B, Hkv, L, D] to the pool. What it returns only stands for K and V of all tokens, and
        has their shape: `attend` reads."""
        self.check_open()
        while len(self.rows) < len(keys):  # the first layer's call, of a batch without padding
            self.rows.append(self.pool.open())
        self.left += [0] * (len(self.rows) - len(self.left))
        self._write(keys, values)
        shape = (*keys.shape[:2], self.columns, keys.shape[-1])
        self._handed = mx.broadcast_to(keys[:, :, -1:], shape), mx.broadcast_to(values[:, :, -1:], shape)
        return self._handed

    def _write(self, keys: mx.array, values: mx.array) -> None:
        starts, before = self.lengths, self.columns
        self.columns += keys.shape[2]
        counts = [after - start for after, start in zip(self.lengths, starts, strict=True)]
        if all(count == keys.shape[2] for count in counts):
            flat = [array.swapaxes(1, 2).reshape(-1, *array.shape[1::2]) for array in (keys, values)]
        else:
            flat = []
            for array in (keys, values):
                parts = []
                for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                    first = self.left[row] + start - before
                    parts.append(array[row, :, first : first + count].swapaxes(0, 1))
                flat.append(mx.concatenate(parts))
        self.pool.write(self.layer, self.rows, starts, counts, *flat)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """K, V [B, Hkv, columns, D] of all tokens, zeros where there is padding; copies."""
        self.check_open()
        lengths = self.lengths
        parts: tuple[list[mx.array], list[mx.array]] = ([], [])
        for row, left, length in zip(self.rows, self.left, lengths, strict=True):
            for kept, array in zip(parts, self.pool.read(self.layer, row, length), strict=True):
                array, before = array.swapaxes(0, 1), min(left, self.columns)
                after = self.columns - before - length
                kept.append(mx.pad(array, [(0, 0), (before, after), (0, 0)]) if before or after else array)
        k, v = (mx.contiguous(mx.stack(kept)) for kept in parts)
        return k, v

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """[B, Hq, L, D] of queries [B, Hq, L, D]: one token of each row is sparse, more are attended as mlx-lm does."""
        handed, self._handed = self._handed, None
        if handed is None or keys is not handed[0] or values is not handed[1]:
            raise RuntimeError(
                "a model has changed K or V between its cache and its attention, where EPS did not see it before: "
                "leave EPS off for this model"
            )

        def dense() -> mx.array:
            return stock_attention(queries, *self.keys_and_values(), None, scale=scale, mask=mask, sinks=sinks)

        pool, lengths = self.pool, self.lengths
        if queries.shape[2] > 1 or not all(lengths) or self.end is not None or not pool.decodes_sparsely:
            if pool.sparse.rounds is not None and (len(lengths) > 1 or isinstance(self, EpsBatchKVCache)):
                pool.sparse.rounds.undrafted("a batch")
            out = dense()
        else:
            plan = pool.plan(self.rows, lengths)
            reason = self._why_not(mask, sinks)
            if reason is not None:
                pool.sparse.fall_back(pool.paged.cache, self.layer, plan, reason)
                out = dense()
            else:
                q, ratio = queries[:, :, 0], scale * math.sqrt(queries.shape[-1])
                if abs(ratio - 1) > 1e-6:  # EPS scales by 1/sqrt(D)
                    q = q.astype(mx.float32) * ratio
                out = pool.sparse.attend(pool.paged.cache, self.layer, q, plan, lambda: dense()[:, :, 0])
                out = out.astype(queries.dtype)[:, :, None]
        if self.layer == pool.spec.num_layers - 1:
            out = mx.depends(out, pool.pending())
        return out

    def _why_not(self, mask: Any, sinks: mx.array | None) -> str | None:
        if self.pool.broken:
            return "error"
        if sinks is not None:
            return "sinks"
        # of one token, a mask that one of these caches made hides padding alone, and padding is not in the pool
        return None if mask is None or self.pool.has_made(mask) else "mask"

    def size(self) -> int:
        return self.columns

    def empty(self) -> bool:
        return not self.columns

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.columns, n)
        self.columns -= n
        for row, length in zip(self.rows, self.lengths, strict=True):
            self.pool.truncate(row, length)
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        raise ConfigError(
            f"EPS does not read a KV cache of {bits} bits: leave --kv-bits (kv_bits) out, or turn EPS off"
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pool's units that these rows hold: K, V and summaries of this layer."""
        return self.pool.num_bytes(self.rows)

    @property
    def state(self) -> _State:
        return _State(self.pool.pending(), self._saved)

    @state.setter
    def state(self, saved: Any) -> None:
        """Becomes what was saved, in the pool of the model that had EPS put on last and fits; summaries are made as for
        any K that is written."""
        keys, values, padding = saved[:3]
        columns, layer, num_layers = map(int, saved[3:])
        left = [int(one) for one in padding.tolist()]
        for pool in reversed(open_pools):
            spec = pool.spec
            shape = (spec.num_kv_heads, spec.head_dim)
            fits = keys is None or ((keys.shape[1], keys.shape[3]) == shape and keys.dtype == pool.dtype)
            if fits and spec.num_layers == num_layers:
                break
        else:
            raise ConfigError(
                f"a prompt cache of {num_layers} sparse layers fits no model that has EPS on: load it while EPS is on, "
                "for the model and dtype that it was made with"
            )
        self.__init__(pool, layer, pool.adopted(layer, [columns - one for one in left]))  # type: ignore[misc]
        self.left = left
        if keys is not None:
            first = min(left)
            self.columns = first
            self._write(keys[:, :, first:], values[:, :, first:])

    def _saved(self) -> tuple[Any, ...]:
        keys, values = (None, None) if self.empty() else self.keys_and_values()
        return keys, values, mx.array(self.left), self.columns, self.layer, self.pool.spec.num_layers

    def _copied(self, keep: Sequence[int]) -> list[Row]:
        return [self.pool.copy(self.rows[index], self.layer) for index in keep]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        rows = self._copied(range(len(self.rows)))
        shared = memo.setdefault(id(self.rows), rows)  # one list, where these layers have one
        copied = type(self)(self.pool, self.layer, shared if shared == rows else rows)
        copied.left, copied.columns = list(self.left), self.columns
        copied.end = None if self.end is None else list(self.end)
        copied._padding = None if self._padding is None else list(self._padding)
        return copied

    def check_open(self) -> None:
        if self.pool.closed:
            raise ConfigError("this cache was made with EPS on, which is off now: make a new one")


class EpsKVCache(PagedKVCache):
    """One prompt, or several of one length."""

    @property
    def offset(self) -> int:
        return self.columns

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self.pool.made(create_attention_mask(N, self.columns, return_array, window_size))

    @classmethod
    def merge(cls, caches: Sequence["EpsKVCache"]) -> "EpsBatchKVCache":
        """A batch of copies."""
        pool = caches[0].pool
        if any(not isinstance(one, EpsKVCache) or one.pool is not pool or len(one.rows) > 1 for one in caches):
            raise ConfigError(
                "a batch is made of caches of one prompt each, all of one model and made with EPS on: make them alike"
            )
        longest = max(one.columns for one in caches)
        batch = EpsBatchKVCache(pool, caches[0].layer, [])
        for one in caches:
            batch.rows += one._copied(range(1))
            batch.left.append(longest - one.columns)
        batch.columns = longest
        return batch


class EpsBatchKVCache(PagedKVCache):
    """Prompts of different lengths, padded on the left."""

    @property
    def offset(self) -> mx.array:
        """[B] int32: the position of the next column's token in each row."""
        return mx.array([self.columns - left for left in self.left])

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        padding = mx.array(self.left)
        return self.pool.made(create_causal_mask(N, offset=self.columns, left_padding=padding, **kwargs))  # type: ignore[no-any-return]

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        if left_padding is not None:
            if self.columns:
                raise ValueError("Left padding can only be added to an empty batch cache")
            self.left = [old + int(new) for old, new in zip(self.left, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding needs the lengths of the prompts")
            self._padding = [int(one) for one in right_padding]
            self.end = [self.columns + int(one) for one in lengths]

    def finalize(self) -> None:
        if self._padding is not None:
            self.left = [left + padding for left, padding in zip(self.left, self._padding, strict=True)]
            self.end = self._padding = None

    def filter(self, batch_indices: Any) -> None:
        keep = [int(one) for one in batch_indices]
        self.rows, self.left = [self.rows[one] for one in keep], [self.left[one] for one in keep]
        shift = min(self.left)
        self.left, self.columns = [left - shift for left in self.left], self.columns - shift

    def extend(self, other: "EpsBatchKVCache") -> None:
        most = max(self.columns, other.columns)
        self.left = [left + most - one.columns for one in (self, other) for left in one.left]
        self.rows, self.columns = self.rows + other.rows, most

    def extract(self, idx: int) -> EpsKVCache:
        one = EpsKVCache(self.pool, self.layer, self._copied([idx]))
        one.left, one.columns = [0], self.lengths[idx]
        return one


def make_caches(pool: Rows) -> list[EpsKVCache]:
    """Empty caches of one prompt, of all sparse layers."""
    rows = [pool.open()]  # one list: what the first layer adds for a batch, all have
    return [EpsKVCache(pool, layer, rows) for layer in range(pool.spec.num_layers)]


CLASSES = (EpsKVCache, EpsBatchKVCache)
