"""The attention statistics that an eviction policy asks for, gathered while the model runs: `eviction.base.Head`s.

Weights are reduced on the device (`Backend.weights`); small float32 arrays come to the host, so that a policy sees the
same numbers whatever the backend, up to rounding.

Letters as in `attention.protocol`; L layers, T rows of a head, W queries of a window.
"""

from typing import Any, Protocol

import numpy as np

from eps_core.attention.protocol import Array, Backend
from eps_core.errors import ConfigError
from eps_core.eviction.base import Head, PolicySpec
from eps_core.models.rope import attention_factor, inverse_frequencies
from eps_core.models.spec import ModelSpec

QUERY_ROWS = 256  # whose weights over all rows are in memory at a time


class Watcher(Protocol):
    """Who is told of a prompt's attention while it is prefilled."""

    def prompt(self, cache: Any, layer: int, q: Array, k: Array, length: int) -> None:
        """A chunk of it: q [N, Hq, D] of its last N of `length` tokens, unscaled and rotated, over k [T, Hkv, D] of
        all, T = length."""


class Observed:
    """One sequence's statistics, as far as `facts` ask for them. Fed by layer: a prompt's chunks, then steps."""

    def __init__(self, backend: Backend, spec: ModelSpec, policy_spec: PolicySpec) -> None:
        spec.require_full_attention("eviction")
        self.backend, self.spec, self.policy_spec = backend, spec, policy_spec
        self.frequencies = inverse_frequencies(spec)
        layers, heads = range(spec.num_layers), range(spec.num_kv_heads)
        self._repeat = spec.num_heads // spec.num_kv_heads
        # of each power that is asked for [L][H] of [R, T]: what all queries so far gave to each row
        self._given = {
            power: [[np.zeros((self._repeat, 0)) for _ in heads] for _ in layers]
            for power, asked in (("sums", policy_spec.sums), ("squares", policy_spec.squares))
            if asked
        }
        # [L] of [W, Hq, D] float32: the last queries
        self._queries = [np.zeros((0, spec.num_heads, spec.head_dim), np.float32) for _ in layers]
        self._pairs = [np.zeros((spec.num_heads, spec.head_dim // 2), np.complex128) for _ in layers]
        self._moduli = [np.zeros((spec.num_heads, spec.head_dim // 2)) for _ in layers]
        self._seen = [0 for _ in layers]
        self.num_prompt = 0  # tokens of its prompt, where a decoder that evicts has adopted it
        self.future: list[np.ndarray] | None = None  # [L] of [Hkv, R, T] over a prompt's tokens: the oracle's

    def of(self, policy_spec: PolicySpec) -> "Observed":
        """As if only these had been asked for; the two go their own ways."""
        one = Observed(self.backend, self.spec, policy_spec)
        one._given = {power: [list(layer) for layer in self._given[power]] for power in one._given}
        one._queries = [q[len(q) - min(len(q), policy_spec.window) :] for q in self._queries]
        one._pairs, one._moduli = [pairs.copy() for pairs in self._pairs], [moduli.copy() for moduli in self._moduli]
        one._seen, one.future, one.num_prompt = list(self._seen), self.future, self.num_prompt
        return one

    def prompt(self, cache: Any, layer: int, q: Array, k: Array, length: int) -> None:
        """As `Watcher` has it."""
        num = len(q)
        if self.keeps_weights:
            for start in range(0, num, QUERY_ROWS):
                rows = np.arange(start, min(start + QUERY_ROWS, num))
                seen = np.arange(length) <= (length - num + rows)[:, None]
                given = self.backend.weights(cache, self.backend.take(cache, q, rows), k, seen)
                ages = (length - num + rows)[:, None] - np.arange(length)
                given = self.backend.to_host(cache, [one.sum(axis=2) for one in self._powers(cache, given, ages)])
                for power, of_heads in zip(self._given, given, strict=True):
                    for head, values in enumerate(of_heads):
                        self._grow(power, layer, head, values)
        if self._keeps_queries:
            keep = min(num, self.policy_spec.window) if not self.policy_spec.query_moments else num
            (last,) = self.backend.to_host(cache, [self.backend.take(cache, q, np.arange(num - keep, num))])
            self._remember(layer, last.astype(np.float32), length)

    def step(self, cache: Any, q: Array, keys: list[Array], ages: list[np.ndarray]) -> list[Array]:
        """Return the arrays that `add` needs of a decoded token in one layer, still on the device: q [Hkv, R, D], and
        of each kv head keys [T, 1, D] of its rows, the new one last, where weights are asked for, and their `ages`
        [T]."""
        pending = []
        for head, k in enumerate(keys):
            own = self.backend.take(cache, q, np.array([head]))
            given = self.backend.weights(cache, own, k, np.ones((1, len(k)), bool))
            pending += [one.sum(axis=2) for one in self._powers(cache, given, ages[head][None])]
        return [*pending, q] if self._keeps_queries else pending

    def add(self, layer: int, values: list[np.ndarray], length: int) -> None:
        """The values of `step`, on the host; `length` tokens so far."""
        found = iter(values)
        if self.keeps_weights:
            for head in range(self.spec.num_kv_heads):
                for power in self._given:
                    self._grow(power, layer, head, next(found)[0])
        if self._keeps_queries:
            q = next(found).astype(np.float32)
            self._remember(layer, q.reshape(1, self.spec.num_heads, self.spec.head_dim), length)

    @property
    def keeps_weights(self) -> bool:
        """Return whether what queries gave to rows is summed up."""
        return bool(self._given)

    @property
    def _keeps_queries(self) -> bool:
        return self.policy_spec.window > 0 or self.policy_spec.query_moments

    def _powers(self, cache: Any, given: Array, ages: np.ndarray) -> list[Array]:
        """Weights, and their squares, as `_given` has them: of N queries with distances `ages` [N, T] to T rows."""
        found = [given] if self.policy_spec.sums else []
        if self.policy_spec.squares:
            counts = (ages >= self.policy_spec.buffer).astype(np.float32)
            found.append(given * given * self.backend.from_numpy(counts, "float32", cache.device))
        return found

    def _grow(self, power: str, layer: int, head: int, values: np.ndarray) -> None:
        """Adds what rows [R, T] were given to what the first of them, all that there were, were given before."""
        heads = self._given[power][layer]
        grown = np.zeros((self._repeat, values.shape[1]))
        grown[:, : heads[head].shape[1]] = heads[head]
        heads[head] = grown + values

    def _remember(self, layer: int, q: np.ndarray, length: int) -> None:
        """Queries [N, Hq, D] of the last N tokens."""
        if self.policy_spec.query_moments:
            half = self.spec.head_dim // 2
            turned = q.astype(np.float64) / attention_factor(self.spec)
            back = np.exp(-1j * np.arange(length - len(q), length)[:, None] * self.frequencies)
            pairs = (turned[..., :half] + 1j * turned[..., half:]) * back[:, None]
            self._pairs[layer] += pairs.sum(axis=0)
            self._moduli[layer] += np.abs(pairs).sum(axis=0)
            self._seen[layer] += len(q)
        if self.policy_spec.window:
            self._queries[layer] = np.concatenate([self._queries[layer], q])[-self.policy_spec.window :]

    def head(self, cache: Any, layer: int, head: int, k: Array | None, positions: np.ndarray, length: int) -> Head:
        """Return all that a policy may ask of one kv head: its keys k [T, 1, D] as they lie in the cache (None: it asks
        for nothing of them), and whose they are."""
        policy_spec = self.policy_spec
        kept: dict[str, np.ndarray] = {}
        heads = slice(head * self._repeat, (head + 1) * self._repeat)
        if policy_spec.window:
            q = self._queries[layer]
            own = self.backend.from_numpy(np.ascontiguousarray(q[:, heads]), "float32", cache.device)
            seen = np.less_equal(positions, np.arange(length - len(q), length)[:, None])
            # a query from before the first row that is left has nothing to give: it counts for nothing
            some = seen.any(axis=1)
            (given,) = self.backend.to_host(cache, [self.backend.weights(cache, own, k, seen | ~some[:, None])])
            kept["window"] = np.where(some[:, None], given[0], np.float32(0))
            if policy_spec.queries:
                kept["queries"] = q[:, heads].transpose(1, 0, 2)
        if policy_spec.keys:
            (keys,) = self.backend.to_host(cache, [k])
            kept["keys"] = keys[:, 0].astype(np.float32)
        kept |= {power: of_layers[layer][head] for power, of_layers in self._given.items()}
        if policy_spec.query_moments:
            count = max(self._seen[layer], 1)
            kept["query_mean"] = self._pairs[layer][heads] / count
            kept["query_abs"] = self._moduli[layer][heads] / count
        if policy_spec.query_moments or policy_spec.keys:
            kept["frequencies"] = self.frequencies
        if policy_spec.future:
            if self.future is None:
                raise ConfigError(
                    "policy oracle keeps what queries to come ask for, which an evaluation alone knows: choose another"
                )
            kept["future"] = self.future[layer][head][:, positions]
        return Head(positions=positions, length=length, prompt=self.num_prompt, **kept)

    def evicted(self, layer: int, head: int, order: np.ndarray) -> None:
        """A head's rows are now those that were `order` [n]."""
        for kept in self._given.values():
            if kept[layer][head].shape[1]:
                kept[layer][head] = kept[layer][head][:, order]
