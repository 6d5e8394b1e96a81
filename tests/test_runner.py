"""A session opens a model once, a prefix is prefilled once, and the runner's variants are what they would be alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.decode import session as session_module
from eps_core.decode.generate import generate
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import DENSE, GREEDY, Document, Outcome, run_batch, run_document
from experiments.grid.grid_cell import Watched

SMALL = {"num_sink_tokens": 4, "num_recent_tokens": 16, "budget": 0.3}
CONFIGS = {
    "rq": EpsConfig.of(method="rq", **SMALL),
    "box": EpsConfig.of(method="box", group_size=8, **SMALL),
    "jl": EpsConfig.of(method="jl", group_size=16, **SMALL),
    "off": EpsConfig(),
}
TOKENS = np.random.default_rng(0).integers(0, 256, 333).tolist()


@pytest.fixture(scope="module", params=["numpy", "cuda", "mlx"])
def session(request: pytest.FixtureRequest, model: Path) -> Session:
    return Session.open(model, request.param, "cpu", "float32", "bfloat16")


def facts(outcome: Outcome) -> list[tuple]:
    return [
        (r.tokens, r.lengths, r.pages_visited, r.bytes_kv_read_est, r.bytes_summary_read, r.bytes_kv_dense)
        for r in outcome.records
    ]


# ---- sessions


def test_weights_are_read_last_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.save_model("mistral", tmp_path)
    calls = []
    real = session_module.load_decoder
    monkeypatch.setattr(session_module, "load_decoder", lambda *args: calls.append(args) or real(*args))
    opened = Session.open(path, "numpy", "cpu")
    assert not calls and (opened.model, opened.dtype, opened.kv_dtype) == (str(path), "float32", "float32")
    assert opened.decoder is opened.decoder and len(calls) == 1


def test_an_installation_without_the_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "DEMO_MODEL", tmp_path)
    with pytest.raises(ConfigError, match=r"demo model is not in this installation.*--model DIR"):
        Session.open(None, "numpy")


def test_tokens_past_the_vocabulary_and_broken_text_are_refused(session: Session) -> None:
    text = "It was a dark and stormy night."
    assert session.decode(session.encode(text)) == text
    assert len(session.encode(text, special=False)) <= len(session.encode(text))
    with pytest.raises(ConfigError, match="not valid Unicode"):
        session.encode("\udcff")
    largest = max(session.encode(text))
    other = replace(session, spec=replace(session.spec, vocab_size=largest))
    with pytest.raises(ConfigError, match=f"gives token {largest}, its vocabulary ends at {largest - 1}"):
        other.encode(text)


def test_a_cache_that_does_not_fit_is_refused_by_one_message(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"MiB does not fit this machine's .* MiB"):
        session.cache(CacheConfig(), 10**14)

    def full(*args: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(session.backend, "new_cache", full)
    with pytest.raises(ConfigError, match="MiB does not fit cpu"):
        session.cache(CacheConfig(), 100)


def test_a_cache_has_room_for_every_sequence(session: Session) -> None:
    cache, pool = session.cache(CONFIGS["box"].cache_config, [33] * 3)
    assert cache.spec.num_units == pool.num_units == 9 and cache.spec.max_open_groups == 3
    assert cache.spec.dtype == "bfloat16" and cache.kernels == session.kernels


# ---- prefixes


def test_written_sequences_grow_and_stay_the_caller_s(session: Session) -> None:
    prefix = session.prefix(TOKENS[:40])
    cache, pool = session.cache(CacheConfig(), 60)
    sequence, cache = prefix.into(session.backend, cache, pool, room=20)
    assert sequence.table.tolist() == [0, 1, 2, 3] and sequence.length == 40
    records = list(
        generate(session.decoder, cache, pool, [TOKENS[:41]], 6, GREEDY, written=[sequence], stop_tokens=range(999))
    )
    assert len(records) == 1, "a stop token ends it"
    assert sequence.tokens == TOKENS[:41] and sequence.table.tolist() == [0, 1, 2, 3]
    pool.check()
    pool.free(sequence)


def test_a_prompt_of_one_token_has_an_empty_prefix(session: Session) -> None:
    assert session.prefix([]).keys_values == Prefix([], []).keys_values == []
    outcomes = run_document(session, Document([65], 3), {"rq": CONFIGS["rq"]})
    assert outcomes[DENSE].said == outcomes["rq"].said and len(outcomes["rq"].records) == 3


def test_a_kl_that_is_no_number_is_refused() -> None:
    logits = np.array([[0.0, -np.inf]], np.float32)
    dense, sparse = (Outcome([SimpleNamespace(logits=logits, lengths=[7])]) for _ in range(2))  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="NaN or Inf in the logits at position 7"), np.errstate(invalid="ignore"):
        sparse.against(dense)


# ---- variants


def test_arms_that_keep_the_same_share_a_cache_and_are_what_they_are_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = CONFIGS["box"]
    variants = {"a": box, "b": CONFIGS["rq"], "c": box.replace(budget=0.8)}
    variants["d"] = box.replace(policy="threshold", top_pages=4)
    document = Document.along(TOKENS, 30)
    for config in (EpsConfig(), *variants.values()):
        session.check_kernels(config.cache_config)  # which makes caches of its own, once
    made = []
    real = session.backend.new_cache

    def new_cache(*args: Any) -> Any:
        made.append(args[1])
        return real(*args)

    monkeypatch.setattr(session.backend, "new_cache", new_cache)
    together = run_document(session, document, variants)
    # the prefill, the dense decode, and two that keep different things
    assert made == [CacheConfig(), CacheConfig(), box.cache_config, CONFIGS["rq"].cache_config]
    assert list(together) == [DENSE, *variants]
    for name, config in variants.items():
        alone = run_document(session, document, {name: config})[name]
        assert facts(together[name]) == facts(alone)
        np.testing.assert_array_equal(together[name].kl, alone.kl)
        np.testing.assert_array_equal(together[name].agree, alone.agree)


def test_a_text_is_fed_token_by_token_and_compared_with_dense(session: Session) -> None:
    document = Document.along(TOKENS, 12)
    assert document.prompt == TOKENS[:322] and document.forced == TOKENS[322:] and document.num_steps == 12
    outcomes = run_document(session, document, {"all": CONFIGS["box"].replace(budget=1.0), "some": CONFIGS["box"]})
    dense = outcomes.pop(DENSE)
    assert dense.logits.shape[:2] == (12, 1) and dense.kl is None
    for outcome in outcomes.values():
        assert outcome.kl is not None and outcome.kl.shape == (12, 1)
        assert [record.lengths for record in outcome.records] == [[322 + step] for step in range(12)]
        assert all(record.logits is None for record in outcome.records), "whole vocabularies are not kept"
    assert np.abs(outcomes["all"].kl).max() < 1e-9 and outcomes["all"].agree.all()
    assert outcomes["some"].kl.max() > 1e-6
    # the same by hand
    prefix = session.prefix(document.prompt[:-1])
    logits = [run_batch(session, [document], {0: one}, [prefix])[0].logits for one in (EpsConfig(), CONFIGS["box"])]
    log_p, log_q = (x[3, 0].astype(float) - np.logaddexp.reduce(x[3, 0].astype(float)) for x in logits)
    assert outcomes["some"].kl[3, 0] == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(), rel=1e-6)
    dense_says, some_say = (x[:, 0].argmax(axis=1) for x in logits)
    assert (outcomes["some"].agree[:, 0] == (dense_says == some_say)).all()


def test_bytes_are_the_steps_own(session: Session) -> None:
    decoder = Watched(session.backend, session.decoder.model)
    outcomes = run_document(session, Document(TOKENS, 5), {"rq": CONFIGS["rq"]}, decoder=decoder)
    spec = session.spec
    token_bytes = spec.num_layers * spec.num_kv_heads * 2 * spec.head_dim * 2  # bfloat16 K and V
    for first in (0, 2):
        full = sum(len(TOKENS) + step for step in range(first, 5)) * token_bytes
        assert outcomes[DENSE].bytes_read(first) == (full, full)
        read, dense = outcomes["rq"].bytes_read(first)
        assert dense == full
        steps = decoder.kept_layers[-5:][first:]  # after those of the dense decode
        assert read == sum(layer.kv_bytes_read + layer.summary_bytes_read for step in steps for layer in step) < full


def test_a_batch_says_what_its_documents_say_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TOKENS[:200], TOKENS[50:333], TOKENS[:17]]
    documents = [Document(prompt, 8) for prompt in prompts]
    plain_step = session.decoder.step

    def step(cache: Any, tokens: Any, slots: Any, table: np.ndarray, *more: Any) -> Any:
        for row in table:
            assert (np.diff(row[row >= 0]) == 1).all(), "a sequence is scattered: some backends would copy it whole"
        return plain_step(cache, tokens, slots, table, *more)

    monkeypatch.setattr(session.decoder, "step", step)
    variants = {name: CONFIGS[name] for name in ("box", "off")}
    together = run_batch(session, documents, variants, [session.prefix(prompt[:-1]) for prompt in prompts])
    for index, document in enumerate(documents):
        alone = run_document(session, document, variants)
        for name in variants:
            assert together[name].said[index] == alone[name].said[0]


def test_a_stop_token_is_not_said(session: Session) -> None:
    (free,) = run_document(session, Document(TOKENS, 6), {})[DENSE].said
    (stopped,) = run_document(session, Document(TOKENS, 6, stop=(free[2],)), {})[DENSE].said
    assert stopped == free[: free.index(free[2])]


def test_short_prompts_lend_no_centre_to_the_next_arm(session: Session) -> None:
    """Below the 256 keys that a centroid needs, a variant's decode would find it for the variant after it."""
    document = Document(TOKENS[:250], 12)
    first = CONFIGS["rq"].replace(bound_bits=8)
    second = first.replace(budget=0.5)
    assert first.cache_config == second.cache_config
    together = run_document(session, document, {"first": first, "second": second})
    alone = run_document(session, document, {"second": second})
    assert facts(together["second"]) == facts(alone["second"])
