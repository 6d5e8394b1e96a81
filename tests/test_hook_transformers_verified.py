"""Verified decoding in transformers: `generate` says what it says without EPS, whatever was drafted, and what a round
leaves in the cache is what dense decoding leaves there."""

import functools
import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import outcome
from hf_models import RQ, Attending, eps_layers, feed, gone, prompts, stock, tiny
from tiny_models import save_model
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
)

from eps_core.config.speculative import DEFAULT_DRAFTS, SpeculativeConfig
from eps_core.errors import ConfigError
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.paged import Paged
from eps_core.integrations.settings import Settings
from eps_core.integrations.verified import Round, check_engine
from eps_cuda.integrations.transformers import EpsCache, eps, open_engine

VERIFIED: dict[str, Any] = {"config": RQ, "verify": "tokens"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "processed": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}
NEW = 20


def said(model: Any, ids: Any, **how: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, **how})


def verified(sparse: SparseAttention) -> dict[str, Any]:
    found: dict[str, Any] = sparse.stats()["verified"]
    return found


# ---- the text ----


@pytest.mark.parametrize("drafts", [0, 1, 5, "auto"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_text_is_that_of_the_model_alone(name: str, way: str, drafts: Any) -> None:
    """Drawn ones, too: of the seed. Every other layer of gemma3 has a window, which drafts are taken back out of."""
    model, (ids, _) = tiny(name), prompts([290], seed=3)
    plain = said(model, ids, **WAYS[way])
    with eps(model, **VERIFIED, draft=drafts) as sparse:
        assert torch.equal(said(model, ids, **WAYS[way]), plain)
        found = verified(sparse)
    assert found["new_tokens"] == NEW - 1  # the first one is its prompt's
    assert found["rounds"] + found["accepted"] == NEW - 1
    assert bool(found["drafted"]) == (drafts != 0)
    assert found["fallbacks"] == {} == sparse.stats()["fallbacks"]
    assert drafts == 0 or sparse.stats()["bytes_ratio"] < 0.5


@pytest.mark.parametrize("broken", ["noise", "nan", "raises", "place"])
def test_whatever_drafts_say_the_text_stays(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny("llama"), prompts([290], seed=3)
    plain = {way: said(model, ids, **how) for way, how in WAYS.items()}
    numbers = torch.Generator().manual_seed(0)

    def attend(self: SparseAttention, cache: Any, layer: int, q: Any, *args: Any) -> Any:
        if broken in ("raises", "place"):
            raise RuntimeError("not today")
        return torch.full_like(q, torch.nan) if broken == "nan" else torch.randn(q.shape, generator=numbers)

    replaced = {
        "raises": "eps_core.integrations.layers.sparse_attention",
        "place": "eps_core.integrations.paged.Paged.place",
    }
    monkeypatch.setattr(replaced.get(broken, "eps_core.integrations.layers.SparseAttention.attend"), attend)
    for way, how in WAYS.items():
        with eps(model, **VERIFIED, draft=6) as sparse:
            assert torch.equal(said(model, ids, **how), plain[way]), way
            found = verified(sparse)
        if broken == "raises":  # without EPS drafts are the model's own dense steps
            assert found["acceptance"] == 1
        elif broken == "place":  # what cannot be written is dense from then on
            assert found["fallbacks"]["error"] == found["rounds"] - 1 and found["drafted"] == 6
        else:
            assert found["acceptance"] < 0.3


def test_a_verify_pass_that_keeps_what_was_drafted_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see it: K and V of wrong drafts, left where the verify pass should have placed its own."""
    model, (ids, _) = tiny("llama"), prompts([290], seed=3)
    plain = said(model, ids)
    place, drafting = Paged.place, Round.slots

    def slots(self: Round, start: int, count: int) -> np.ndarray:
        monkeypatch.setattr(Paged, "place", place if not self.verifying else lambda *args: None)
        return drafting(self, start, count)

    monkeypatch.setattr(Round, "slots", slots)
    monkeypatch.setattr(SparseAttention, "attend", lambda self, cache, layer, q, plan, dense: torch.ones_like(q))
    with eps(model, **VERIFIED, draft=6):
        assert not torch.equal(said(model, ids), plain)


def test_an_end_in_the_middle_of_a_round_ends_the_text() -> None:
    model, (ids, _) = tiny("gemma3"), prompts([290], seed=3)
    plain = said(model, ids)
    with eps(model, **VERIFIED, draft=8) as sparse:
        for end in range(1, 8):
            token = int(plain[0, ids.shape[1] + end])
            with_stop = said(model, ids, eos_token_id=token)
            first = plain[0, ids.shape[1] :].tolist().index(token)
            assert with_stop.tolist() == plain[:, : ids.shape[1] + first + 1].tolist()
            assert torch.equal(said(model, ids, max_new_tokens=end), plain[:, : ids.shape[1] + end])
        assert verified(sparse)["accepted"]


def test_a_prompt_below_the_least_context_is_dense() -> None:
    model, (ids, _) = tiny("llama"), prompts([240], seed=4)
    plain = said(model, ids, max_new_tokens=30)
    with eps(model, **VERIFIED, draft=4) as sparse:
        sparse.config = sparse.config.replace(min_context=265)
        assert torch.equal(said(model, ids, max_new_tokens=30), plain)
        assert verified(sparse)["fallbacks"]["min_context"] == 24  # rounds, before 265 tokens are there
        sparse.on = False
        sparse.reset()
        assert torch.equal(said(model, ids, max_new_tokens=30), plain) and not verified(sparse)["rounds"]


def test_scores_logits_and_the_cache_are_returned_and_texts_streamed(tmp_path: Path) -> None:
    path = save_model("llama2", tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(path), tiny("llama")
    ids = prompts([290], seed=3)[0]
    how = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.2}
    plain = said(model, ids, **how)
    with eps(model, **VERIFIED, draft=5):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        found = said(model, ids, streamer=streamer, **how)
        assert "".join(streamer) == tokenizer.decode(plain.sequences[0, ids.shape[1] :])
        assert torch.equal(found.sequences, plain.sequences) and len(found.scores) == NEW
        for name in ("scores", "logits"):
            for one, other in zip(getattr(found, name), getattr(plain, name), strict=True):
                torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
        # a further turn in that cache
        more = torch.cat([found.sequences, ids[:, :9]], dim=1)
        again = said(model, more, past_key_values=found.past_key_values)
    assert torch.equal(again, said(model, more))


@pytest.mark.parametrize("by_config", [False, True])
def test_what_needs_a_tokenizer_has_it(by_config: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(save_model("llama2", tmp_path)), tiny("llama")
    ids, healed = prompts([290], seed=3)[0], []
    monkeypatch.setattr(type(model), "heal_tokens", lambda self, ids, tokenizer: (healed.append(tokenizer), ids)[1])

    def text(name: str, value: Any, **more: Any) -> Any:
        how = {name: value, "do_sample": False, "max_new_tokens": NEW}
        return model.generate(ids, **({"generation_config": GenerationConfig(**how)} if by_config else how), **more)

    asked = {"stop_strings": ["i"], "token_healing": True}
    plain = {name: text(name, value, tokenizer=tokenizer) for name, value in asked.items()}
    assert plain["stop_strings"].shape[1] < plain["token_healing"].shape[1]
    with eps(model, **VERIFIED, draft=5) as sparse:
        for name, value in asked.items():
            assert torch.equal(text(name, value, tokenizer=tokenizer), plain[name])
        assert 0 < verified(sparse)["new_tokens"] < NEW - 1 and healed == [tokenizer] * 2
        with pytest.raises(ValueError, match="could not locate a tokenizer"):
            text("stop_strings", ["i"])


class Counting(LogitsProcessor):
    """Forbids a token at every third call."""

    num_calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return scores.index_fill(1, scores.argmax(-1), -torch.inf) if self.num_calls % 3 == 0 else scores


class Locked(Counting):
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("more", "drafts"),
    [
        ({"guidance_scale": 1.5}, False),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)}, True),
        ({"logits_processor": Counting}, True),
        ({"logits_processor": Locked}, False),
    ],
    ids=["guidance", "watermark", "own", "locked"],
)
def test_processors_that_keep_a_state_see_the_text_alone(more: dict[str, Any], drafts: bool) -> None:
    model, (ids, _) = tiny("llama"), prompts([290], seed=3)

    def text() -> Any:
        made = {name: [value()] if isinstance(value, type) else value for name, value in more.items()}
        return said(model, ids, **made)

    plain = text()
    with eps(model, **VERIFIED, draft=5) as sparse:
        assert torch.equal(text(), plain)
        assert bool(verified(sparse)["drafted"]) == drafts


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    model, (ids, _) = tiny("llama"), prompts([1], seed=3)
    plain = said(model, ids)
    with eps(model, Settings.of({"method": "rq", "verify": "tokens"})) as sparse:  # all at once
        assert torch.equal(said(model, ids), plain) and verified(sparse)["rounds"]


# ---- the cache ----


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_round_leaves_what_dense_decoding_leaves(name: str) -> None:
    """K, V, what a summary says of every group, and the windows of layers that have one."""
    model, (ids, _) = tiny(name), prompts([270], seed=5)
    with eps(model, **VERIFIED, draft=7) as sparse:
        cache = EpsCache(model, sparse=sparse)
        out = said(model, ids, past_key_values=cache, max_new_tokens=40)
        assert verified(sparse)["rolled_back"]
    plain = EpsCache(model, RQ)
    plain.sparse.on = False
    with Attending(model), torch.no_grad():
        for start, end in [(0, 270), *((i, i + 1) for i in range(270, out.shape[1] - 1))]:
            feed(model, plain, out, torch.ones_like(out), start, end)
    assert cache.get_seq_length() == plain.get_seq_length() == out.shape[1] - 1
    for one, other in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(one.keys[:, :, -23:], other.keys[:, :, -23:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.values[:, :, -23:], other.values[:, :, -23:], atol=1e-4, rtol=1e-4)
    q = torch.randn(1, 4, eps_layers(cache)[0].rows.paged.cache.spec.head_dim, generator=torch.manual_seed(1))
    estimates = []
    for rows in (eps_layers(cache)[0].rows, eps_layers(plain)[0].rows):
        plan = rows.paged.plan(RQ, rows.sequences)
        by_layer = [
            rows.paged.backend.score(rows.paged.cache, layer, q, plan).estimate
            for layer in range(rows.paged.cache.spec.num_layers)
        ]
        estimates.append(torch.stack(by_layer))
    finite = torch.isfinite(estimates[1])
    assert torch.equal(torch.isfinite(estimates[0]), finite) and finite.sum() > 200
    torch.testing.assert_close(estimates[0][finite], estimates[1][finite], atol=1e-3, rtol=1e-3)
    gone(cache)
    gone(plain)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_round_that_something_ends_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = tiny(name), prompts([290], seed=3)
    plain = said(model, ids)

    class Full:
        num_puts = 0

        def put(self, value: Any) -> None:
            self.num_puts += 1
            if self.num_puts > 3:
                raise KeyboardInterrupt

    with eps(model, **VERIFIED, draft=3) as sparse:
        cache = EpsCache(model, sparse=sparse)
        with pytest.raises(KeyboardInterrupt):
            said(model, ids, past_key_values=cache, streamer=Full())
        rows = eps_layers(cache)[0].rows
        rows.paged.pool.check()
        before = cache.get_seq_length()
        forward = type(model).forward
        calls = []

        @functools.wraps(forward)  # generate looks at what it takes
        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) > 2:
                raise KeyboardInterrupt
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            said(model, plain[:, : before + 1], past_key_values=cache)
        monkeypatch.setattr(type(model), "forward", forward)
        assert cache.get_seq_length() == before == rows.sequences[0].length and rows.round is None
        rest = said(model, plain[:, : before + 1], past_key_values=cache, max_new_tokens=plain.shape[1] - before - 1)
        assert torch.equal(rest, plain)
        gone(cache)


# ---- all else ----


def test_what_is_not_one_prompt_decoded_plainly_is_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, mask) = tiny("llama"), prompts([290, 280], seed=3)
    ways: dict[str, dict[str, Any]] = {
        "batch": {"attention_mask": mask},
        "beams": {"num_beams": 3},
        "several": {"num_return_sequences": 2, "do_sample": True},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": tiny("llama", seed=1)},
    }
    asked = {name: ids if name == "batch" else ids[:1] for name in ways}
    plain = {name: said(model, asked[name], **how) for name, how in ways.items()}
    with eps(model, **VERIFIED, draft=4) as sparse:
        with caplog.at_level(logging.WARNING, "eps"):
            for name in plain:
                assert torch.equal(said(model, asked[name], **ways[name]), plain[name]), name
        assert [one.message.split(" is")[0] for one in caplog.records if one.name == "eps"] == ["eps: a batch"]
        assert not verified(sparse)["rounds"] and not sparse.stats()["steps"]
        own = stock(model)
        with torch.no_grad():
            model(ids[:1, :-1], past_key_values=own)
        assert torch.equal(said(model, ids[:1], past_key_values=own), said(model, ids[:1]))


@pytest.mark.parametrize("own", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}], ids=str)
def test_what_a_models_own_configuration_asks_for_is_as_it_was(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, _) = tiny("llama"), prompts([290], seed=3)
    monkeypatch.setattr(model, "generation_config", GenerationConfig(pad_token_id=0, **own))
    config = GenerationConfig(max_new_tokens=8, do_sample=False)
    plain = model.generate(ids, generation_config=config)
    with eps(model, **VERIFIED, draft=4) as sparse:
        assert torch.equal(model.generate(ids, generation_config=config), plain)
        assert not verified(sparse)["rounds"]


def test_a_new_cache_of_the_callers_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    model, (ids, _) = tiny("llama"), prompts([290], seed=3)
    plain = said(model, ids)
    with eps(model, **VERIFIED, draft=4) as sparse, caplog.at_level(logging.WARNING, "eps"):
        assert torch.equal(said(model, ids, past_key_values=stock(model)), plain)
        # transformers before 5.24 does not say that it is the caller's
        assert bool(verified(sparse)["rounds"]) != ("made without EPS is decoded densely" in caplog.text)


def test_what_cannot_be_is_refused_in_a_line() -> None:
    model = tiny("llama")
    with pytest.raises(ConfigError, match="in transformers"), eps(model, **VERIFIED, draft_weights="4bit"):
        pass
    with pytest.raises(ConfigError, match="with eps"):
        EpsCache(model, method="rq", verify="tokens")
    with pytest.raises(ConfigError, match="add verify="):
        Settings.of({"method": "rq", "draft": 4})
    with pytest.raises(ConfigError, match="method off is dense"):
        Settings.of({"method": "off", "verify": "tokens"})
    with pytest.raises(ConfigError, match="vLLM has no place for drafts"):
        check_engine(Settings.of({"method": "rq", "verify": "tokens"}).verify, "vLLM")
    with pytest.raises(ConfigError, match="one prompt at a time"):
        open_engine(Path("."), Settings.of({"method": "rq", "verify": "tokens"}), num_sequences=2)


def test_settings_go_there_and_back() -> None:
    for flat in ({}, {"draft": "auto"}, {"draft": 3, "draft_most": 9}, {"draft_most": 5}):
        settings = Settings.of({"method": "rq", "verify": "tokens", **flat})
        assert Settings.of(settings.flat()) == settings
    assert settings.verify == SpeculativeConfig("tokens", 5, 5)
    assert Settings.of({"method": "rq", "verify": "tokens"}).verify.draft == DEFAULT_DRAFTS


@pytest.mark.parametrize("engine", ["transformers", "mlx-lm"])
def test_run_compares_an_engine_with_itself_verified(engine: str, tmp_path: Path) -> None:
    model = save_model("llama2", tmp_path / "model")
    line = ["run", "--model", str(model), "--engine", engine, "--dtype", "float32", "--method", "rq", "--no-stop"]
    line += ["--prompt", "It was a dark and stormy night; the rain fell in torrents. " * 6, "--max-new-tokens", "24"]
    line += ["--eps-budget", "0.2", "--eps-verify", "tokens", "--eps-draft", "4"]
    for more in ([], ["--temperature", "0.8", "--top-p", "0.9"]):
        done = outcome([*line, *more, "--metrics", "rounds.jsonl", "--csv", "rounds.csv"], tmp_path)
        assert done.code == 0, done.err
        found = json.loads(done.out.splitlines()[-1])
        run, *rounds, summary = [json.loads(one) for one in (tmp_path / "rounds.jsonl").read_text().splitlines()]
        assert found["tokens_equal"] is True and found["eps"]["tokens"] == found["dense"]["tokens"]
        assert run["verify"]["draft"] == 4 and {one["type"] for one in rounds} == {"round"}
        assert [token for one in rounds for token in one["tokens"]] == found["tokens"]
        assert found["eps"]["acceptance"] == summary["acceptance"] and summary["drafted"] > 0
        assert found["dense"]["bytes_kv_read"] == sum(one["bytes_kv_dense"] for one in rounds)
        assert len((tmp_path / "rounds.csv").read_text().splitlines()) == len(rounds) + 1
