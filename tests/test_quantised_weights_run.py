"""Verified decoding with 4-bit drafts, end to end: the dense text, one drafter, what of weights is read, and refusals
that come before anything is decoded or written."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_models
from command import last as last_line
from command import lines_of, outcome, refused

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import session as session_module
from eps_core.decode.forward import Decoder
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import DENSE, Document, run_batch
from eps_core.load import backend_name, load_backend
from eps_core.metrics.rounds import summarise_rounds

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 5
RQ: dict[str, Any] = {"method": "rq", "budget": 0.3, "num_sink_tokens": 4, "num_recent_tokens": 16}
FOUR_BITS = SpeculativeConfig("tokens", 5, weights="4bit")
NEW_TOKENS = 12
NARROW = tiny_models.TinyModel(
    "LlamaConfig",
    {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
)


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which no layer is fit for 4 bits."""
    monkeypatch.setitem(tiny_models.MODELS, "narrow", NARROW)
    return tiny_models.save_model("narrow", tmp_path / "narrow")


def opened(target: tuple, path: Path, **settings: Any) -> Session:
    backend, device = target
    return Session.open(path, backend_name(backend), device, "float32", kernels="arrays", **settings)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Calls that read all weights from here on, by the bytes of the model's weights: prefill left out."""
    found: Counter = Counter()

    def counted(name: str) -> None:
        real = getattr(Decoder, name)

        def call(self: Decoder, *args: Any, **more: Any) -> Any:
            found[self.model.weight_bytes] += 1
            return real(self, *args, **more)

        monkeypatch.setattr(Decoder, name, call)

    counted("step")
    counted("verify")
    return found


def test_a_session_makes_one_drafter_over_its_own_caches(target: tuple, saved, monkeypatch) -> None:
    made = []
    plain = tiny_models.open_llm(target, saved("llama2"), method="off")
    model = type(plain.session.decoder.model)
    real = model.quantised
    monkeypatch.setattr(model, "quantised", lambda self, bits: made.append(self) or real(self, bits))
    drafting = tiny_models.open_llm(target, saved("llama2"), speculative=FOUR_BITS, **RQ)
    drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    for sampling in ({"max_new_tokens": NEW_TOKENS}, {"max_new_tokens": NEW_TOKENS, **drawn}):
        want, got = plain.generate(TEXT, **sampling), drafting.generate(TEXT, **sampling)
        assert got.tokens == want.tokens and want.acceptance is None
        assert got.acceptance is not None and 0 < got.acceptance <= 1
        assert "".join(drafting.stream(TEXT, **sampling)) == want.text
    session = drafting.session
    assert made == [session.decoder.model]
    drafter = session.drafter(FOUR_BITS)
    assert drafter is session.drafter(FOUR_BITS) and drafter.backend is session.decoder.backend
    assert drafter.model.weight_bytes < session.decoder.model.weight_bytes / 2
    assert session.drafter(SpeculativeConfig("tokens")) is session.decoder


@pytest.mark.parametrize("verify", [FOUR_BITS, SpeculativeConfig("tokens", 5)], ids=str)
def test_rounds_say_which_weights_were_read(target: tuple, saved, verify: SpeculativeConfig, passes: Counter) -> None:
    session = opened(target, saved("llama2"))
    texts = session.encode_prompts([TEXT, TEXT[9:170]], NEW_TOKENS)
    documents, sampling = [Document(one, NEW_TOKENS) for one in texts], Sampling()
    prefixes = [session.prefix(one[:-1]) for one in texts]
    dense = run_batch(session, documents, {DENSE: EpsConfig()}, prefixes, sampling=sampling)[DENSE]
    passes.clear()
    variants, verifies = {"eps": EpsConfig.of(**RQ)}, {"eps": verify}
    got = run_batch(session, documents, variants, prefixes, verifies=verifies, sampling=sampling)["eps"]
    assert got.said == dense.said
    full, total = session.decoder.model.weight_bytes, got.summary()
    assert total["drafted"] >= total["accepted"] > 0
    assert total["weight_passes"] == sum(passes.values())
    assert total["bytes_weights"] == sum(num_bytes * count for num_bytes, count in passes.items())
    of_an_engine = [replace(one, bytes_weights=None) for one in got.rounds[-1:]]
    assert summarise_rounds([*got.rounds[:-1], *of_an_engine])["bytes_weights"] is None
    drafts = session.drafter(verify).model.weight_bytes
    assert set(passes) == {full, drafts} and (drafts == full) == (verify.weights == "full")
    if drafts != full:  # a verify pass a round
        assert passes[full] == total["rounds"]


def command_of(target: tuple, path: Path, folder: Path, *more: object) -> list[str]:
    backend, device = target
    line = [
        "run", "--backend", backend_name(backend), "--device", device, "--model", path, "--prompt", TEXT,
        "--max-new-tokens", NEW_TOKENS, "--kernels", "arrays", "--method", "rq", "--eps-budget", 0.3, "--eps-verify",
        "tokens", "--eps-draft", 5, "--eps-draft-weights", "4bit", "--metrics", folder / "metrics.jsonl", *more,
    ]  # fmt: skip
    return [str(word) for word in line]


@pytest.mark.parametrize("weights", ["full", "8bit"])
def test_a_run_reports_acceptance_and_bytes_of_weights(target: tuple, saved, weights: str, tmp_path: Path) -> None:
    done = outcome(command_of(target, saved("llama2"), tmp_path, "--weights", weights), tmp_path)
    result = last_line(done)
    assert "drafted with 4bit weights" in done.out
    assert (", 8bit weights in decode steps" in done.out) == (weights == "8bit")
    eps = result["eps"]
    assert result["weights"] == weights
    assert result["tokens_equal"] and eps["verify"]["weights"] == "4bit" and 0 < eps["acceptance"] <= 1
    first, *rounds, last = lines_of(tmp_path / "metrics.jsonl")
    assert (
        first["weights"] == weights
        and first["verify"]["weights"] == "4bit"
        and {one["type"] for one in rounds} == {"round"}
    )
    total = sum(one["bytes_weights"] for one in rounds)
    assert total == last["bytes_weights"] == eps["bytes_weights"]
    session = opened(target, saved("llama2"), weights=weights)
    assert session.drafter(SpeculativeConfig("tokens")) is session.decoder
    assert session.drafter(FOUR_BITS).model.full is session.decoder.model.full
    full, drafts = (session.drafter(one).model.weight_bytes for one in (SpeculativeConfig("tokens"), FOUR_BITS))
    for one in rounds:
        assert one["bytes_weights"] == full + (one["weight_passes"] - 1) * drafts


@pytest.mark.parametrize("weights", ["8bit", "4bit"])
def test_steps_read_quantised_weights_and_prompts_full_ones(target: tuple, saved, weights: str) -> None:
    sessions = [opened(target, saved("llama2"), weights=one) for one in ("full", weights)]
    tokens, logits = np.arange(1, 41), []
    for session in sessions:
        cache, _ = session.cache(CacheConfig(), 64)
        table = np.arange(cache.spec.num_units, dtype=np.int32)
        cache, first = session.decoder.prefill(cache, tokens, np.arange(40), table, 40)
        cache, output = session.decoder.step(cache, np.array([7]), np.array([40]), table[None], np.array([41]))
        logits.append((first, output.logits))
    (full_first, full_next), (first, following) = logits
    assert np.array_equal(first, full_first) and not np.array_equal(following, full_next)
    full, small = (session.decoder.model.weight_bytes for session in sessions)
    assert small < full / (3 if weights == "8bit" else 5)
    assert sessions[1].decoder.model.full.weight_bytes == full


def test_unknown_weights_are_refused(target: tuple, saved) -> None:
    with pytest.raises(ConfigError, match="weights '3bit' are unknown: choose one of full, 8bit, 4bit"):
        opened(target, saved("llama2"), weights="3bit")


# What cannot draft so is refused when the weights are there, before the first token


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of Torch that say they are on a GPU."""
    real = session_module.load_decoder

    def load(*args: Any) -> Decoder:
        decoder = real(*args)
        decoder.model.device = "cuda"
        return decoder

    monkeypatch.setattr(session_module, "load_decoder", load)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no cache may be made and nothing decoded."""
    monkeypatch.setattr(Session, "balanced", False)  # its tokens are no text's
    begun = Mock(side_effect=AssertionError("begun"))
    for owner, name in ((Session, "cache"), (Decoder, "prefill"), (Decoder, "step"), (Decoder, "verify")):
        monkeypatch.setattr(owner, name, begun)


def assert_refused(target: tuple, path: Path, folder: Path, words: str) -> None:
    """`run`, `evaluate` and `LLM` are refused in one line that says `words`; nothing is written."""
    backend, device = target
    evaluate = [
        "evaluate", "--backend", backend_name(backend), "--device", device, "--model", path, "--method", "rq",
        "--tasks", "niah_single", "--context", 400, "--samples", 1, "--text-steps", 0, "-o", folder / "quality.jsonl",
        "--eps-verify", "tokens", "--eps-draft-weights", "4bit",
    ]  # fmt: skip
    for line in (command_of(target, path, folder), evaluate):
        refused(line, folder, f"{words}: use full weights")
    with pytest.raises(ConfigError, match=words):
        tiny_models.open_llm(target, path, speculative=FOUR_BITS, **RQ)


def test_torch_on_a_gpu_is_refused_before_the_first_token(saved, on_a_gpu, forbidden, tmp_path: Path) -> None:
    assert_refused(
        (load_backend("cuda"), "cpu"), saved("llama2"), tmp_path, "need the CPU in Torch, and the model is on cuda"
    )


def test_layers_too_narrow_are_refused_before_the_first_token(target, narrow, forbidden, tmp_path: Path) -> None:
    assert_refused(target, narrow, tmp_path, "rows have 48, 80")


def test_full_drafts_of_a_narrow_model_run(target: tuple, narrow: Path, tmp_path: Path) -> None:
    done = outcome([*command_of(target, narrow, tmp_path), "--eps-draft-weights", "full"], tmp_path)
    assert last_line(done)["tokens_equal"]
