"""Lives of mlx-lm's caches with EPS on: trimmed, copied, saved, batched and dropped in any order, beside its own."""

import copy
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm_models import alone, prompts, teacher_forced, tiny
from test_hook_mlx_lm import SMALL, assert_empty, assert_equal, pool_of

from eps_core.errors import ConfigError
from eps_mlx.integrations.mlx_lm import eps

# ---- one prompt ----


def continued(model: Any, cache: Any, prompt: list[int]) -> mx.array:
    return alone(model, prompt, 6, cache=cache)[1]


@pytest.mark.parametrize("budget", [1, 0.1])
def test_a_copy_and_a_saved_cache_go_on_as_the_original_does(budget: float, tmp_path: Path) -> None:
    model = tiny("gemma3_text", num_hidden_layers=4)
    start, rest, other = prompts(310, 9, 12)
    with eps(model, **SMALL, budget=budget):
        pool = pool_of(model)
        cache = make_prompt_cache(model)
        alone(model, start, 3, cache=cache)
        file = str(tmp_path / "cache.safetensors")
        save_prompt_cache(file, cache, {"model": "tiny"})
        copied, (loaded, metadata) = copy.deepcopy(cache), load_prompt_cache(file, return_metadata=True)
        again = load_prompt_cache(file)
        assert metadata == {"model": "tiny"}
        assert [type(one).__name__ for one in loaded] == ["RotatingKVCache", "EpsKVCache"] * 2
        assert pool.num_live == 4  # each holds one sequence, whatever its layers
        for one in (copied, again):  # what one does is nothing to the others
            continued(model, one, other)
        expected = continued(model, copy.deepcopy(cache), rest)
        assert_equal(expected, continued(model, loaded, rest))
        assert_equal(expected, continued(model, cache, rest))
        del cache, copied, loaded, again, one
        assert_empty(pool)
        early = make_prompt_cache(model)
        save_prompt_cache(file, early)
        assert_equal(continued(model, load_prompt_cache(file), start), continued(model, early, start))


def test_a_saved_cache_fits_its_own_model_alone(tmp_path: Path) -> None:
    model, file = tiny("llama"), str(tmp_path / "cache.safetensors")
    with eps(model, **SMALL):
        cache = make_prompt_cache(model)
        alone(model, *prompts(20), 2, cache=cache)
        save_prompt_cache(file, cache)
        with eps(tiny("llama", num_hidden_layers=3), **SMALL):
            assert load_prompt_cache(file)[1].pool is pool_of(model)
    for other in (tiny("llama", num_hidden_layers=3), tiny("llama", mx.bfloat16), tiny("llama", head_dim=32)):
        with eps(other, **SMALL), pytest.raises(ConfigError, match="2 sparse layers fits no model"):
            load_prompt_cache(file)


def test_a_batch_in_a_copy_of_empty_caches_is_counted_once_a_step() -> None:
    model, batch = tiny("llama"), mx.array(prompts(200, 200))
    with eps(model, **SMALL, budget=0.1) as sparse:
        found = []
        for cache in (make_prompt_cache(model), copy.deepcopy(make_prompt_cache(model))):
            sparse.reset()
            teacher_forced(model, cache, batch, batch[:, :4], chunk=200)
            found.append(sparse.stats())
    assert found[1] == found[0] and found[0]["steps"] == 4


def test_a_copy_of_one_layer_alone_is_nothing_to_a_copy_of_all() -> None:
    model, (prompt, rest, other) = tiny("llama"), prompts(100, 5, 7)
    with eps(model, **SMALL, budget=1):
        cache = make_prompt_cache(model)
        alone(model, prompt, 2, cache=cache)
        expected = continued(model, copy.deepcopy(cache), rest)
        whole, single = copy.deepcopy(cache), [copy.deepcopy(one) for one in reversed(cache)][::-1]
        continued(model, single, other)
        assert_equal(expected, continued(model, whole, rest))


def test_a_cache_that_outlives_its_eps_is_refused() -> None:
    model = tiny("llama")
    with eps(model, **SMALL):
        cache = make_prompt_cache(model)
        alone(model, *prompts(20), 2, cache=cache)
    with pytest.raises(ConfigError, match="made with EPS on, which is off now"):
        model(mx.array([[1]]), cache=cache)


def test_what_is_evaluated_after_a_chunk_is_all_that_is_left_and_no_copy_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, file = tiny("llama"), tmp_path / "graph"

    def operations() -> int:
        mx.export_to_dot(str(file), *pool.pending())
        return file.read_text().count("rectangle")

    with eps(model, **SMALL, kernels="arrays"):
        pool, cache = pool_of(model), make_prompt_cache(model)
        model(mx.array(prompts(64)), cache=cache)
        assert operations() > 0
        with monkeypatch.context() as patch:
            patch.setattr(pool, "read", lambda *args: 1 / 0)
            mx.eval([one.state for one in cache])
            with pytest.raises(ZeroDivisionError):
                tree_flatten(cache[0].state)
        assert operations() == 0


def test_bytes_are_those_of_the_units_held_summaries_too() -> None:
    model = tiny("llama", mx.bfloat16)
    pairs = {"group_size": 2, "block_size": 128, "mean_tokens": 32}
    with eps(model, **{**SMALL, **pairs}):
        cache = make_prompt_cache(model)
        assert cache[0].nbytes == 0
        alone(model, *prompts(130), 1, cache=cache)
        cache_config = pool_of(model).sparse.config.cache_config
        units, groups = 2, 2 * 128 // cache_config.S
        kv = units * 128 * 2 * 2 * 16 * 2  # tokens, K and V, heads, dims, bytes
        # 16 sign bits twice and two scales a group, of a byte each about a mean of 32 tokens; that mean (8 bits a
        # dimension) and its scale; of 2 heads
        assert cache_config.unit_tokens == 128
        assert cache[1].nbytes - kv == 2 * (groups * (2 + 2 + 1 + 1) + 4 * units * (16 + 2))


def test_caches_may_die_in_another_thread() -> None:
    model = tiny("llama")
    with eps(model, **SMALL):
        pool, cache = pool_of(model), [make_prompt_cache(model)]
        alone(model, *prompts(70), 2, cache=cache[0])
        other = threading.Thread(target=cache.clear)
        other.start()
        other.join()
        assert pool.paged.pool.num_live == 1  # it may have been in the midst of something
        assert_empty(pool)


# ---- any order, against mlx-lm's own caches ----

LAYERS, HEADS, DIM = 2, 2, 16


@dataclass
class Pair:
    """A prompt's caches, or a batch's, and mlx-lm's own that were told the same."""

    ours: list[Any]
    stock: list[Any]
    batched: bool
    padded: list[int] | None = None  # tokens left to read of each row of a batch

    @property
    def rows(self) -> int:
        return len(self.ours[0].left)


class Lives:
    """Acts on pairs at random, and compares after each act."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.rng, self.numbers = model, random.Random(seed), np.random.default_rng(seed)
        self.pairs: list[Pair] = []
        self.done: set[str] = set()

    def step(self) -> None:
        singles = [pair for pair in self.pairs if not pair.batched]
        batches = [pair for pair in self.pairs if pair.batched]
        acts = ["new", "pad"] if len(self.pairs) < 5 else []
        acts += ["append", "append", "trim", "copy", "drop", "merge"] if singles else []
        acts += (
            ["token", "token", "prompt", "filter", "extract", "split", "drop_batch", "trim_batch"] if batches else []
        )
        acts += ["extend"] if len(batches) > 1 else []
        act = self.rng.choice(acts)
        self.done.add(act)
        pair = self.rng.choice(batches if act in BATCHED else singles) if act not in MAKING else None
        getattr(self, f"_{act}")(*([] if pair is None else [pair]))

    def _feed(self, pair: Pair, count: int) -> None:
        shape = (pair.rows, HEADS, count, DIM)
        for layer, (ours, stock) in enumerate(zip(pair.ours, pair.stock, strict=True)):
            k, v = (mx.array(self.numbers.standard_normal(shape).astype(np.float32)) for _ in "kv")
            for cache in (ours, stock):
                cache.update_and_fetch(k, v + layer)
        self._compare(pair)

    def _compare(self, pair: Pair) -> None:
        for ours, stock in zip(pair.ours, pair.stock, strict=True):
            assert ours.size() == stock.size() and ours.nbytes >= 0
            assert np.array_equal(np.array(ours.offset), np.array(stock.offset))
            for steps in (1, 3):
                masks = [cache.make_mask(steps, return_array=False, window_size=None) for cache in (ours, stock)]
                if isinstance(masks[0], mx.array):
                    assert_equal(masks[0], masks[1])
                else:
                    assert masks[0] == masks[1]
            left = [0] * pair.rows if not pair.batched else stock.left_padding.tolist()
            assert ours.left == left
            if stock.empty() or not stock.size():
                continue
            for mine, theirs in zip(ours.keys_and_values(), stock.keys_and_values(), strict=True):
                for row, (first, length) in enumerate(zip(left, ours.lengths, strict=True)):
                    real = slice(first, first + length)
                    assert_equal(mine[row, :, real], theirs[row, :, real])

    def _new(self) -> None:
        pair = Pair(make_prompt_cache(self.model), [KVCache() for _ in range(LAYERS)], False)
        self.pairs.append(pair)
        if self.rng.random() < 0.8:
            self._feed(pair, self.rng.choice([1, 5, 64, 130]))

    def _pad(self) -> None:
        """A batch of prompts that the caller has padded on the left."""
        singles = [Pair(make_prompt_cache(self.model), [KVCache() for _ in range(LAYERS)], False) for _ in range(3)]
        pair = self._merged(singles)
        padding = [self.rng.randrange(70) for _ in singles]
        for cache in (*pair.ours, *pair.stock):
            cache.prepare(left_padding=padding)
        for count in (30, 45):  # the first chunk may hold padding alone
            self._feed(pair, count)
        self.pairs.append(pair)

    def _append(self, pair: Pair) -> None:
        self._feed(pair, self.rng.choice([1, 1, 2, 30, 65]))

    def _trim(self, pair: Pair) -> None:
        number = self.rng.choice([1, 3, 64, 1000])
        if pair.batched:
            number = min(number, *pair.ours[0].lengths)
        for ours, stock in zip(pair.ours, pair.stock, strict=True):
            assert ours.trim(number) == stock.trim(number)
        self._compare(pair)

    _trim_batch = _trim

    def _copy(self, pair: Pair) -> None:
        if len(self.pairs) < 8:
            self.pairs.append(copy.deepcopy(pair))
            self._append(self.pairs[-1] if self.rng.random() < 0.5 else pair)
            self._compare(pair)

    def _drop(self, pair: Pair) -> None:
        self.pairs.remove(pair)

    _drop_batch = _drop

    def _merged(self, chosen: list[Pair]) -> Pair:
        made = [
            [type(side[0][layer]).merge([caches[layer] for caches in side]) for layer in range(LAYERS)]
            for side in ([one.ours for one in chosen], [one.stock for one in chosen])
        ]
        return Pair(made[0], made[1], True)

    def _merge(self, pair: Pair) -> None:
        chosen = [one for one in self.pairs if not one.batched and one.rows == 1 and self.rng.random() < 0.7] or [pair]
        # mlx-lm cannot merge what it trimmed to nothing
        chosen = [one for one in chosen if one.stock[0].empty() or one.stock[0].size()]
        if not chosen:
            return
        self.pairs.append(self._merged(chosen))
        self._compare(self.pairs[-1])
        if self.rng.random() < 0.5:
            self.pairs = [one for one in self.pairs if all(one is not gone for gone in chosen)]

    def _token(self, pair: Pair) -> None:
        self._feed(pair, 1)

    def _prompt(self, pair: Pair) -> None:
        """Right-padded, in two chunks."""
        lengths = [self.rng.randrange(1, 40) for _ in range(pair.rows)]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if max(padding):
            for cache in (*pair.ours, *pair.stock):
                cache.prepare(lengths=lengths, right_padding=padding)
        first = self.rng.randrange(1, longest + 1)
        for count in (first, longest - first):
            if count:
                self._feed(pair, count)
        for cache in (*pair.ours, *pair.stock):
            cache.finalize()
        self._compare(pair)

    def _filter(self, pair: Pair) -> None:
        keep = [row for row in range(pair.rows) if self.rng.random() < 0.7]
        if keep:
            for cache in (*pair.ours, *pair.stock):
                cache.filter(keep)
            self._compare(pair)

    def _split(self, pair: Pair) -> None:
        if len(self.pairs) < 8 and pair.rows > 1:
            half = self.rng.randrange(1, pair.rows)
            other = copy.deepcopy(pair)
            for one, keep in ((pair, range(half)), (other, range(half, pair.rows))):
                for cache in (*one.ours, *one.stock):
                    cache.filter(list(keep))
                self._compare(one)
            self.pairs.append(other)

    def _extract(self, pair: Pair) -> None:
        row = self.rng.randrange(pair.rows)
        if len(self.pairs) < 8 and not pair.stock[0].empty():
            made = [[cache.extract(row) for cache in side] for side in (pair.ours, pair.stock)]
            self.pairs.append(Pair(made[0], made[1], False))
            self._compare(self.pairs[-1])

    def _extend(self, pair: Pair) -> None:
        other = self.rng.choice([one for one in self.pairs if one.batched and one is not pair])
        # mlx-lm's own goes wrong where the other one has had tokens and lost them all
        if pair.rows + other.rows > 8 or any(one.stock[0].size() == 0 for one in (pair, other)):
            return
        self.pairs = [one for one in self.pairs if one is not other]
        for ours, theirs in zip((*pair.ours, *pair.stock), (*other.ours, *other.stock), strict=True):
            ours.extend(theirs)
        self._compare(pair)


MAKING = {"new", "pad"}
BATCHED = {"token", "prompt", "filter", "extract", "split", "drop_batch", "trim_batch", "extend"}


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_lives_holds_what_mlx_lms_own_caches_hold(seed: int) -> None:
    model = tiny("llama", seed=1)
    with eps(model, **SMALL):
        pool, lives = pool_of(model), Lives(model, seed)
        for _ in range(220):
            lives.step()
            pool.paged.pool.check()
        lives.pairs.clear()
        assert_empty(pool)
    assert lives.done >= BATCHED | MAKING | {"append", "trim", "copy", "drop", "merge"} - {"drop_batch"}


def test_a_batch_of_caches_that_do_not_go_together_is_refused() -> None:
    model = tiny("llama")
    with eps(model, **SMALL):
        mine, plain = make_prompt_cache(model)[0], KVCache()
        several = make_prompt_cache(model)
        model(mx.array(prompts(5, 5)), cache=several)
        for other in (plain, several[0]):
            with pytest.raises(ConfigError, match="caches of one prompt each, all of one model and made with EPS on"):
                mine.merge([mine, other])


def test_layers_that_were_trimmed_differently_are_told() -> None:
    model = tiny("llama")
    with eps(model, **SMALL):
        cache = make_prompt_cache(model)
        alone(model, *prompts(20), 2, cache=cache)
        cache[0].trim(5)
        with pytest.raises(RuntimeError, match="trim the caches of all layers alike"):
            model(mx.array([[1]]), cache=cache)
