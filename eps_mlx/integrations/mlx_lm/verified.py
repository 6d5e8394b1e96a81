"""Verified decoding in mlx-lm: sparse steps draft, the model's own dense attention decides, both over one cache.

mlx-lm's speculative loop wants a second model with a cache of its own. So the loop of one prompt, `generate_step`, is
this one for models that are verified, and mlx-lm's own for all others: `generate`, `stream_generate` and the command
line come through it. Drafts and verdicts take the same random numbers, those that mlx-lm's loop would take, so that the
text is the dense one of the same seed whatever the sampler is.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from eps_core.errors import ConfigError
from eps_mlx.integrations.mlx_lm import names
from eps_mlx.integrations.mlx_lm.cache import EpsKVCache
from eps_mlx.integrations.mlx_lm.rows import Rows

_NOT_OURS = ("kv_bits", "input_embeddings")  # arguments of mlx-lm's loop that this one has no place for


@wraps(names.stock_step)  # a hook reads the parameters of the loop to tell which mlx-lm this is
def verified_step(prompt: mx.array, model: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, mx.array]]:
    """mlx-lm's `generate_step`, to which all goes but single prompts of models that are verified, over caches that EPS
    made: (token, log probabilities [V]) of each new token."""
    hook = getattr(model, names.HANDLE, None)
    pool: Rows | None = None if hook is None else hook.pool
    if pool is None or pool.sparse.rounds is None or not pool.sparse.on:
        yield from names.stock_step(prompt, model, *args, **kwargs)
        return
    cache = kwargs.pop("prompt_cache", None)
    cache = make_prompt_cache(model) if cache is None else cache
    asked = [name for name in _NOT_OURS if kwargs.get(name) is not None]
    own = [one for one in cache if isinstance(one, EpsKVCache)]
    if asked or not own or len(own[0].rows) > 1:
        what = f"a prompt with {asked[0]}" if asked else "a batch, or a cache that was made without EPS,"
        pool.sparse.rounds.undrafted(what)
        yield from names.stock_step(prompt, model, *args, prompt_cache=cache, **kwargs)
        return
    own[0].check_open()
    if own[0].pool is not pool:
        raise ConfigError(
            "this prompt cache is in the blocks of another model that has EPS on: make one of this model, or load it "
            "before EPS is put on the other"
        )
    if not len(prompt):  # mlx-lm's loop refuses it
        yield from names.stock_step(prompt, model, *args, prompt_cache=cache, **kwargs)
        return
    for one in cache:
        if not isinstance(one, EpsKVCache) and type(one) not in (KVCache, RotatingKVCache):
            raise ConfigError(
                f"verified decoding takes drafts back, and a layer of this model keeps a {type(one).__name__}, whose "
                "state cannot be: use --eps-verify off"
            )
    for name in (*_NOT_OURS, "max_kv_size", "kv_group_size", "quantized_kv_start"):
        kwargs.pop(name, None)
    stream = args[0] if args else kwargs.pop("stream", generation_stream)
    with mx.stream(stream):
        yield from _Text(pool, model, cache, own, **kwargs).said(prompt)


class _Text:
    """One prompt as it is continued."""

    def __init__(
        self,
        pool: Rows,
        model: Any,
        cache: list[Any],
        own: list[EpsKVCache],
        *,
        max_tokens: int = 256,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None,
        prefill_step_size: int = 2048,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
        stop: Sequence[int] = (),
    ) -> None:
        """As mlx-lm's own loop; `own`: the layers of `cache` that are ours. A round ends with a token of `stop`, of
        which mlx-lm's loop knows nothing: its caller leaves it there."""
        assert pool.sparse.rounds is not None
        self.pool, self.model, self.cache, self.own, self.rounds = pool, model, cache, own, pool.sparse.rounds
        self.max_tokens, self.sampler, self.processors = max_tokens, sampler, logits_processors or ()
        self.chunk, self.on_progress = prefill_step_size, prompt_progress_callback or (lambda done, total: None)
        self.stop = frozenset(stop)
        self.context: mx.array | None = None  # tokens that processors are told of

    def said(self, prompt: mx.array) -> Iterator[tuple[int, mx.array]]:
        self.on_progress(0, len(prompt))
        done = 0
        while len(prompt) - done > 1:
            part = prompt[done : min(done + self.chunk, len(prompt) - 1)]
            self.model(part[None], cache=self.cache)
            mx.eval([one.state for one in self.cache])
            done += len(part)
            self._tell(part)
            self.on_progress(done, len(prompt))
            mx.clear_cache()
        last: Any = prompt[-1].item()
        fed, num_said, num_rounds = int(last), 0, 0
        lacking: int | None = fed  # a token that is not in the cache yet
        while num_said != self.max_tokens:
            room = self.max_tokens - num_said if self.max_tokens > 0 else self.rounds.verify.most + 1
            tokens, logprobs = self._round(fed, room)
            if not num_said:
                self.on_progress(len(prompt), len(prompt))
            num_taken = 0
            try:
                for token, row in zip(tokens, logprobs, strict=True):
                    num_taken += 1
                    num_said += 1
                    lacking = token if num_taken == len(tokens) else None
                    yield token, row
            except GeneratorExit:
                # the cache keeps the tokens that the caller took, as after mlx-lm's own loop
                if not self.pool.closed:
                    if num_taken < len(tokens) - 1:
                        self._take_back(len(tokens) - num_taken - 1, num_taken + 1)
                    self._feed(lacking)
                raise
            fed = tokens[-1]
            num_rounds += 1
            if num_rounds % 32 == 0:
                mx.clear_cache()
        if not num_said:
            self.on_progress(len(prompt), len(prompt))
        self._feed(lacking)

    def _feed(self, token: int | None) -> None:
        """Put a token into the cache."""
        if token is not None:
            self.model(mx.array([[token]], mx.uint32), cache=self.cache)
            mx.async_eval([one.state for one in self.cache])

    def _round(self, fed: int, room: int) -> tuple[list[int], list[mx.array]]:
        """(tokens said, log probabilities [V] of each)."""
        pool, row = self.pool, self.own[0].rows[0]
        length = self.own[0].columns
        reason = "error" if pool.broken else None
        counts = self.rounds.begin(pool.sparse.config, length, room, reason)
        drafts = counts.drafts
        state = pool.open_round(row.sequence, drafts)
        plain = [(one, one.offset) for one in self.cache if type(one) is KVCache]

        def take_drafts_back() -> None:
            for own in self.own:
                own.columns = length
            for other, offset in plain:
                other.trim(other.offset - offset)

        num_kept = 0
        try:
            tokens, numbers = mx.array([fed], mx.uint32), _random_state()
            drafting = self._copies()
            for _ in range(drafts):
                logits = self.model(tokens[-1:][None], cache=drafting)[:, -1]
                tokens = mx.concatenate([tokens, self._drawn(logits, tokens)[0].astype(mx.uint32)])
                mx.async_eval(tokens)
            take_drafts_back()
            if drafts:
                mx.eval(tokens)
                self.rounds.drafted(counts, pool.paged.cache)
            _set_random_state(numbers)
            state.verifying = True
            logits = self.model(tokens[None], cache=self._watched())[0]
            said, logprobs, margins, accepted = self._judge(logits, tokens)
            num_kept = len(said)
            self._before = self._copies()
            self._take_back(drafts + 1 - num_kept, num_kept)
            self._tell(tokens[:num_kept])
        finally:
            if not num_kept:
                take_drafts_back()
            row.edits += 1
            pool.end_round(num_kept)
        mx.async_eval([one.state for one in self.cache])
        self.rounds.end(counts, pool.paged.cache, said, accepted, margins)
        return said, logprobs

    def _judge(self, logits: mx.array, tokens: mx.array) -> tuple[list[int], list[mx.array], list[float], int]:
        """Judge logits [g + 1, V] after the token that was fed and g drafts. Return (tokens, log probabilities [V] of
        each, margins where greedy, accepted drafts)."""
        rows = []
        for i in range(len(logits)):
            drawn = self._drawn(logits[i : i + 1], tokens[: i + 1])
            # the numbers that are next after this token
            rows.append((*drawn, _random_state()))
        chosen = mx.concatenate([token for token, _, _ in rows])
        best = None if self.sampler is not None else mx.topk(mx.concatenate([row for _, row, _ in rows]), 2)
        mx.eval(chosen, tokens, best)
        found: Any = chosen.tolist()
        drafted: Any = tokens[1:].tolist()
        accepted = next((i for i, token in enumerate(drafted) if found[i] != token), len(drafted))
        stopped = next((i for i, token in enumerate(found[: accepted + 1]) if token in self.stop), accepted)
        num_said, accepted = stopped + 1, min(accepted, stopped + 1)
        _set_random_state(rows[num_said - 1][2])
        pairs: Any = [] if best is None else best[:num_said].tolist()
        margins = [abs(a - b) for a, b in pairs]
        return found[:num_said], [row[0] for _, row, _ in rows[:num_said]], margins, accepted

    def _drawn(self, logits: mx.array, new: mx.array) -> tuple[mx.array, mx.array]:
        """(token [1], log probabilities [1, V]) as mlx-lm's loop draws it, of logits [1, V] after the tokens `new`,
        which processors have not seen."""
        if self.processors:
            context = new if self.context is None else mx.concatenate([self.context, new])
            for processor in self.processors:
                logits = processor(context, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return (mx.argmax(logprobs, axis=-1) if self.sampler is None else self.sampler(logprobs)), logprobs

    def _tell(self, tokens: mx.array) -> None:
        if self.processors:
            tokens = tokens.astype(mx.uint32)
            self.context = tokens if self.context is None else mx.concatenate([self.context, tokens])

    def _copies(self) -> list[Any]:
        """The caches; of layers that overwrite what they hold a copy each, to be written to instead."""
        return [_copied(one) if type(one) is RotatingKVCache else one for one in self.cache]

    def _watched(self) -> list[Any]:
        """The same for the verify pass, whose K and V of these layers are kept."""
        self._rows: dict[int, list[tuple[mx.array, mx.array]]] = {}  # by place in the cache
        watched = self._copies()
        for place, one in enumerate(watched):
            if one is not self.cache[place]:
                self._rows[place] = []
                one.update_and_fetch = _noting(one, self._rows[place])
        return watched

    def _take_back(self, num_tokens: int, num_kept: int) -> None:
        """Takes the last tokens of a verify pass back, so that its first `num_kept` rows stay."""
        for place, (one, before) in enumerate(zip(self.cache, self._before, strict=True)):
            if one is before:
                one.trim(num_tokens)
                continue
            # what was overwritten cannot be trimmed: rows come again, one by one, as dense decoding brings them
            vars(one).update(vars(_copied(before)))
            for k, v in self._rows[place]:
                for i in range(num_kept):
                    one.update_and_fetch(k[:, :, i : i + 1], v[:, :, i : i + 1])


def _random_state() -> mx.array:
    """The key of what mlx draws next; its samplers are compiled over the list that holds it."""
    held: Any = mx.random.state
    return mx.array(held[0])


def _set_random_state(key: mx.array) -> None:
    held: Any = mx.random.state
    held[0][:] = key


def _copied(cache: Any) -> Any:
    other = copy.copy(cache)
    if cache.keys is not None:
        # slices are assigned in place, to the array object that both would have
        other.keys, other.values = cache.keys[...], cache.values[...]
    return other


def _noting(cache: Any, taken: list[tuple[mx.array, mx.array]]) -> Callable[[mx.array, mx.array], Any]:
    """The cache's own `update_and_fetch`, and a note of what came."""
    own = cache.update_and_fetch

    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        taken.append((keys, values))
        return own(keys, values)

    return update_and_fetch
