"""`eps-proto run` prefills a prompt once: both sides read the same K and V, and are what they are alone."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT
from eps_core.cpu import host
from eps_core.decode.forward import Decoder
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.evaluation import compare
from eps_core.evaluation.request import RunRequest
from eps_core.eviction.config import EvictionConfig
from eps_core.load import backend_name

PROMPTS = ("It was a dark and stormy night; the rain fell in torrents. " * 5, "x", "the rain fell in torrents. " * 7)
CHUNK = 50
BOX: dict[str, Any] = {"method": "box", "group_size": 8, "num_sink_tokens": 4, "num_recent_tokens": 16, "budget": 0.3}
CONFIGS = {
    "box": BOX,
    "pages": {**BOX, "group_size": 32},
    "rq": {"method": "rq", "budget": 0.3, "num_sink_tokens": 4, "num_recent_tokens": 16},
    "bounds": {**BOX, "bound_bits": 8, "strict": True},
}
NOT_TIMES = ("new_tokens", "bytes_kv_read_est", "bytes_summary_read", "bytes_k_reread", "bytes_ratio", "kept_ratio")
CASES: dict[str, dict[str, Any]] = {
    **{name: {"config": EpsConfig.of(**settings)} for name, settings in CONFIGS.items()},
    "batch": {"prompts": PROMPTS},
    "codes": {"kv_bits": (8, 4)},  # prefilled once for the model's own dense run, and once for codes
    "sampled": {"sampling": Sampling(0.9, 0.8, 5)},
    "kl": {"kl": True},
    "evicting": {"keep": EvictionConfig("snapkv", 0.5), "kl": True, "prompts": PROMPTS},
}


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of `Decoder.prefill` was given; the warm-up's are left out."""
    calls: list[int] = []
    prefill, warm_up = Decoder.prefill, compare._warm_up

    def counted(self: Decoder, cache: Any, tokens: np.ndarray, *rest: Any) -> Any:
        calls.append(len(tokens))
        return prefill(self, cache, tokens, *rest)

    def uncounted(job: compare.Job) -> None:
        warm_up(job)
        calls.clear()

    monkeypatch.setattr(Decoder, "prefill", counted)
    monkeypatch.setattr(compare, "_warm_up", uncounted)
    return calls


def request(target: tuple, model: Path, **settings: Any) -> RunRequest:
    module, device = target
    settings = {"config": EpsConfig.of(**BOX), "sampling": Sampling(), "prompts": PROMPTS[:1], **settings}
    return RunRequest(
        backend=backend_name(module), device=device, model=model, max_new_tokens=9, dtype="float32", kernels="arrays",
        prefill_chunk=CHUNK, stop=False, **settings,
    )  # fmt: skip


def ran(one: RunRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, compare.Outcome], dict[str, Any]]:
    """(sides as the table is given them, the last line's object)."""
    outcomes: dict[str, compare.Outcome] = {}
    decode = compare._decode

    def kept(job: compare.Job, name: str, *rest: Any, **more: Any) -> compare.Outcome:
        outcomes[name] = decode(job, name, *rest, **more)
        return outcomes[name]

    with monkeypatch.context() as patch:
        patch.setattr(compare, "_decode", kept)
        return outcomes, compare.run(one, io.StringIO())


def given(side: compare.Outcome) -> tuple[Any, ...]:
    """What a side said, read and selected, step by step."""
    steps = [
        {name: np.asarray(value).tolist() for name, value in record.to_dict().items() if not name.endswith("_ms")}
        for record in side.records
    ]
    return side.tokens, {name: side.summary()[name] for name in NOT_TIMES}, steps


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_prefilled_once_and_each_side_is_what_it_is_alone(
    target: tuple, model: Path, prefilled: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    both, result = ran(request(target, model, **case), monkeypatch)
    lengths = [len(Session.open(model, "numpy").encode(text)) - 1 for text in case.get("prompts", PROMPTS[:1])]
    chunks = [min(CHUNK, length - start) for length in lengths for start in range(0, length, CHUNK)]
    assert prefilled == chunks * (2 if "kv_bits" in case else 1)
    alone, _ = ran(request(target, model, **{**case, "kl": False, "baseline": False}), monkeypatch)
    assert given(both["eps"]) == given(alone["eps"])
    size = case.get("config", EpsConfig.of(**BOX)).cache_config.unit_tokens
    off = {key: value for key, value in case.items() if key not in ("keep", "kl", "kv_bits")}
    dense, _ = ran(request(target, model, **{**off, "config": EpsConfig.of(block_size=size)}), monkeypatch)
    assert given(both["dense"]) == given(dense["dense"])
    assert (both["eps"].prefill_ms == both["dense"].prefill_ms) == ("kv_bits" not in case)
    assert len(result["text"] or "x") and (result["kl_max"] < 5 if case.get("kl") else "kl_max" not in result)


def test_stored_prompts_are_loaded_once_for_both_sides(
    target: tuple, model: Path, prefilled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request(target, model, cache_dir=tmp_path)
    first, _ = ran(one, monkeypatch)
    assert len(list(tmp_path.iterdir())) == 1
    prefilled.clear()
    second, result = ran(one, monkeypatch)
    loaded = result["stored"]["eps"]["tokens_loaded"]
    assert loaded == result["stored"]["dense"]["tokens_loaded"] > 200
    assert sum(prefilled) == result["prompt_tokens"] - 1 - loaded
    # the last tokens come in another chunk, which rounds otherwise
    assert [given(first[name])[:2] for name in first] == [given(second[name])[:2] for name in first]


@pytest.mark.parametrize("decodes", [False, True])
def test_weights_are_bfloat16_where_a_cpu_decodes_them_faster(
    tmp_path: Path, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "computes_bfloat16", lambda: False)
    monkeypatch.setattr(host, "widens_bfloat16", lambda: decodes)
    for name, stored in (("llama2-bf16-sharded", "bfloat16"), ("qwen2-fp16", "float16"), ("mistral", "float32")):
        path = tiny_models.save_model(name, tmp_path / name)
        for backend in ("cuda", "numpy"):
            session = Session.open(path, backend, "cpu")
            want = "bfloat16" if decodes and (stored, backend) == ("bfloat16", "cuda") else "float32"
            assert (session.dtype, session.kv_dtype, session.kv_bits) == (want, want, EXACT)
        assert Session.open(path, "cuda", "cpu", "float32").dtype == "float32"
        # a pass over several tokens rounds otherwise than steps do, and the text would not be the dense one
        assert Session.open(path, "cuda", "cpu", method="rq", verify="tokens").dtype == "float32"
