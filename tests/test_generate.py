"""The shared decode loop: what it asks of a decoder, and that batching, chunking and sharing change nothing."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verified_runs import Model

from eps_core import reference as numpy_backend
from eps_core.attention.stats import StepOutput
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate, prefill, tokens_of
from eps_core.decode.sampling import Sampling, draw
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import compare
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import Document, run_document
from eps_core.kv_cache.pool import PagePool

MODEL = "llama2-bf16-sharded"
GREEDY = Sampling()
SPEC = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, num_units=16)
VOCAB = 50


def checksum(tokens: list[int]) -> int:
    return sum((3 + 7 * position * position) * token for position, token in enumerate(tokens, 1)) % VOCAB


class CountingDecoder:
    """Says a checksum of all tokens, read back from their slots: a wrong slot, table or length is a wrong token."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.prefills: list[int] = []
        self.steps: list[int] = []
        self.timed: list[bool] = []
        self.backend: Any = None
        self.timing = False

    def spec_of(self, cache: Any) -> Any:
        return cache.spec

    def _logits(self, table: np.ndarray, length: int) -> np.ndarray:
        positions = np.arange(length)
        tokens = [self.memory[int(slot)] for slot in table[positions // 16] * 16 + positions % 16]
        logits = np.zeros(VOCAB, np.float32)
        logits[checksum(tokens)] = 1
        return logits

    def prefill(self, cache: Any, tokens: np.ndarray, slots: np.ndarray, table: np.ndarray, length: int) -> tuple:
        assert len(tokens) == len(slots)
        self.memory.update(zip(slots.tolist(), tokens.tolist(), strict=True))
        self.prefills.append(len(tokens))
        return cache, self._logits(table, length)

    def step(
        self,
        cache: Any,
        tokens: np.ndarray,
        slots: np.ndarray,
        table: np.ndarray,
        lengths: np.ndarray,
        read: Any,
        audit: bool,
    ) -> tuple[Any, StepOutput]:
        assert len(tokens) == len(slots) == len(table) == len(lengths)
        assert read is None and not audit  # nothing is ever audited where EPS is off
        self.memory.update(zip(slots.tolist(), tokens.tolist(), strict=True))
        self.steps.append(len(tokens))
        self.timed.append(self.timing)
        logits = [self._logits(row, int(length)) for row, length in zip(table, lengths, strict=True)]
        return cache, StepOutput(np.stack(logits), 100)


def counted(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(checksum(tokens))
    return tokens[len(prompt) :]


class Case:
    """A pool, a cache and a counting decoder."""

    def __init__(self, num_units: int = 16) -> None:
        self.decoder, self.pool = CountingDecoder(), PagePool(num_units, 16)
        self.cache = SimpleNamespace(spec=SPEC, cache_config=EpsConfig.of().cache_config, bytes_k_reread=0)

    def steps(self, prompts: list[list[int]], max_new_tokens: int, **more: Any) -> Any:
        return generate(self.decoder, self.cache, self.pool, prompts, max_new_tokens, GREEDY, **more)  # type: ignore

    def run(self, prompts: list[list[int]], max_new_tokens: int, **more: Any) -> list:
        records = list(self.steps(prompts, max_new_tokens, **more))
        self.pool.check()
        assert self.pool.num_free == self.pool.num_units, "a sequence was not freed"
        return records


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 60])
@pytest.mark.parametrize("chunk", [1, 16, 25, 500])
def test_every_token_of_a_prompt_is_written_once_where_its_table_says(length: int, chunk: int) -> None:
    case, prompt, reported = Case(), prompt_of(length), []
    records = case.run([prompt], 20, prefill_chunk=chunk)
    assert tokens_of(records, 1) == [counted(prompt, 20)]
    # the last token of the prompt starts the decode
    assert sum(case.decoder.prefills) == length - 1 and max(case.decoder.prefills, default=0) <= chunk
    other, report = Case(), lambda *done: reported.append(done)
    prefill(other.decoder, other.cache, other.pool, prompt[:-1], chunk, report)  # type: ignore[arg-type]
    assert reported == [(min(start + chunk, length - 1), length - 1) for start in range(0, length - 1, chunk)]
    assert [record.lengths for record in records] == [[length + step] for step in range(20)]
    assert all(record.bytes_kv_read_est == 100 for record in records)


def test_a_ragged_batch_says_what_its_prompts_say_alone() -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 40, 17, 5)]
    case = Case()
    assert tokens_of(case.run(prompts, 6), 4) == [counted(prompt, 6) for prompt in prompts]
    assert case.decoder.steps == [4] * 6


def test_a_sequence_leaves_the_batch_at_its_stop_token() -> None:
    prompts = [prompt_of(20, 1), prompt_of(9, 2)]
    alone = [counted(prompt, 12) for prompt in prompts]
    stop = next(token for token in alone[0][2:] if token not in alone[1])
    end = alone[0].index(stop) + 1
    case = Case()
    assert tokens_of(case.run(prompts, 12, stop_tokens=(stop,)), 2) == [alone[0][:end], alone[1]]
    assert case.decoder.steps == [2] * end + [1] * (12 - end)


def test_forced_tokens_are_fed_instead() -> None:
    prompts, forced = [prompt_of(20, 1), prompt_of(9, 2)], [[5, 5, 6, 7], [8, 9]]
    case = Case()
    records = case.run(prompts, 12, forced_tokens=forced, stop_tokens=(5, 8), keep_logits=True)
    assert tokens_of(records, 2) == forced and case.decoder.steps == [2, 2, 1, 1]
    for step in range(4):
        want = counted(prompts[0] + forced[0][:step], 1)[0]
        assert int(records[step].logits[0].argmax()) == want


def test_full_pages_of_a_common_prefix_are_computed_once() -> None:
    common, case = prompt_of(40), Case()
    prompts = [[*common, 1, 2, 3], [*common, 4, 5]]
    assert tokens_of(case.run(prompts, 5), 2) == [counted(prompt, 5) for prompt in prompts]
    assert case.decoder.prefills == [42, 41 - 32]


def test_a_prompt_decoded_again_finds_its_pages() -> None:
    prompt, case = prompt_of(50), Case(num_units=4)
    first = tokens_of(case.run([prompt], 5), 1)
    before = len(case.decoder.prefills)
    assert tokens_of(case.run([prompt], 5), 1) == first
    assert case.decoder.prefills[before:] == [1]


def test_copies_of_shared_pages_are_made_before_the_write() -> None:
    case, made = Case(), []

    class CopyingPool(PagePool):
        def append(self, sequence: Any, token_ids: Any) -> Any:
            slots, _ = super().append(sequence, token_ids)
            return slots, [(3, 4), (5, 6)]

    def copy_units(cache: Any, src: Any, dst: Any) -> Any:
        made.append((list(src), list(dst)))
        return cache

    case.pool = CopyingPool(16, 16)
    case.decoder.backend = SimpleNamespace(copy_units=copy_units)
    list(generate(case.decoder, case.cache, case.pool, [[1, 2]], 1, GREEDY))  # type: ignore[arg-type]
    assert made == [([3, 5], [4, 6])] * 2


def test_a_generator_that_is_dropped_frees_its_sequences() -> None:
    case = Case()
    steps = case.steps([prompt_of(20), prompt_of(30)], 10)
    next(steps)
    assert case.pool.num_free < 16
    steps.close()
    assert case.pool.num_free == 16


def test_a_prompt_longer_than_the_pool_frees_what_it_took() -> None:
    case = Case(num_units=2)
    with pytest.raises(ConfigError, match="raise --pool-tokens"):
        list(case.steps([prompt_of(40)], 5, prefill_chunk=10))
    assert case.pool.num_free == 2


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty prompt"):
        list(Case().steps([[1], []], 3))


def test_every_nth_step_is_timed() -> None:
    case = Case()
    records = case.run([[1]], 7, time_every=3, audit_every=2)
    assert not any(record.audited or record.fallbacks for record in records)
    assert case.decoder.timed == [True, False, False, True, False, False, True] == [record.timed for record in records]


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw(np.array([0.0, 2.0, 2.0, 1.0], np.float32), GREEDY, 0, 0).token == 1


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(ConfigError, match=r"position 7.*float32"):
            draw(np.array([0.0, bad], np.float32), GREEDY, 0, 7)
    assert draw(np.array([-np.inf, 0.0], np.float32), Sampling(1.0), 0, 7).token == 1


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))

    def drawn(top_p: float) -> set[int]:
        return {draw(logits, Sampling(1.0, top_p, seed), 0, 0).token for seed in range(300)}

    assert drawn(0.4) == {1} and drawn(0.7) == {1, 2} and drawn(0.9) == {0, 1, 2}


RAGGED = [np.random.default_rng(length).integers(0, 256, length).tolist() for length in (290, 1, 65)]


def test_sampled_tokens_are_those_of_numpy_on_any_backend(target: tuple, model: Path) -> None:
    config = EpsConfig.of(method="box", group_size=8, num_recent_tokens=16, budget=0.3)
    where = (target, (numpy_backend, "cpu"))
    found, want = (Model(*one, model).decode(RAGGED, config, Sampling(0.9, 0.8, 5)).said for one in where)
    assert found == want


def test_kl_is_of_sparse_from_dense_along_the_dense_tokens(model: Path) -> None:
    """--kl is that of the text which the dense run says, where the sparse one leaves it early."""
    config = EpsConfig.of(method="meanstd", group_size=16, budget=0.1, num_sink_tokens=0, num_recent_tokens=16)
    text = "It was a dark and stormy night; the rain fell in torrents. " * 5
    request = RunRequest(config, GREEDY, "numpy", model=model, prompts=(text,), max_new_tokens=12, kl=True, stop=False)
    result, session = compare.run(request, io.StringIO()), Session.open(model, "numpy")
    assert not result["tokens_equal"]
    said = Document(session.encode(text), 12, result["dense"]["tokens"][:-1])
    kl, agree = run_document(session, said, {"eps": config})["eps"].along_text()
    assert result["kl_mean"] == pytest.approx(np.mean(kl)) and result["kl_max"] == pytest.approx(max(kl))
    assert result["top1_agreement"] == np.mean(agree)


def test_dense_records_count_pages_of_the_cache_s_own_size(model: Path) -> None:
    for block in (16, 32):
        config = EpsConfig.of(block_size=block)
        first = Model(numpy_backend, "cpu", model).decode([RAGGED[0]], config).records[0]
        pages = -(-len(RAGGED[0]) // block) * 2 * 2  # of 2 layers and 2 kv heads
        assert (first.pages_total, first.pages_visited, first.pages_skipped) == (pages, pages, 0)
