"""A real pretrained model inside engines: EPS there says and reads what it does in our own decoder, and stays close to
the engine's own dense decoding. SmolLM2-135M-Instruct is had as in test_real_model.py; its GGUF file comes from PyPI.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import get_model
import numpy as np
import pytest
from command import last, outcome
from test_real_model import KL_LIMIT, SPARSE_KL_LIMIT, fetched

from eps_core.decode.session import Session
from eps_core.tasks.corpus import corpus

NEW = 8
FLAGS = ["--method", "rq", "--dtype", "float32", "--max-new-tokens", str(NEW), "--device", "cpu"]
# engine -> tokens of a context, and the budget, None for the default, which reads 1,024 tokens at least
SIZES: dict[str, tuple[int, float | None]] = {"transformers": (1600, None)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the key of config.json that mlx-lm reads, which older folders of scripts/get_model.py lack."""
    made = tmp_path_factory.mktemp("model")
    for file in fetched("smollm2").iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(get_model.with_flat_keys(config)))
    return made


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = get_model.MODELS["smollm2"]
    try:
        return get_model.gguf_file(model, tmp_path_factory.mktemp("gguf"))
    except get_model.NoSource as reason:
        pytest.fail(str(reason)) if os.environ.get("CI") else pytest.skip(str(reason))


@pytest.fixture(scope="module")
def prompts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engine -> a file with its prompt."""
    session, made = Session.open(folder, "numpy"), tmp_path_factory.mktemp("prompts")
    tokens = session.encode(corpus().decode()[200_000:220_000])
    for engine, (context, _) in SIZES.items():
        (made / engine).write_text(session.decode(tokens[:context]))
    return {engine: made / engine for engine in SIZES}


def ran(model: Path, prompt: Path, *flags: str) -> dict[str, Any]:
    """Return the last line of `eps-proto run`."""
    return last(outcome(["run", "--model", str(model), "--prompt-file", str(prompt), *FLAGS, *flags], prompt.parent))


@pytest.mark.parametrize("engine", SIZES)
def test_an_engine_says_and_reads_what_our_own_decoder_does(
    engine: str, folder: Path, prompts: dict[str, Path]
) -> None:
    budget = SIZES[engine][1]
    more = [] if budget is None else ["--eps-budget", str(budget)]
    own, found = (
        ran(folder, prompts[engine], *where, *more) for where in (("--backend", "cuda"), ("--engine", engine))
    )
    for variant in ("dense", "eps"):
        assert found[variant]["tokens"] == own[variant]["tokens"], variant
    assert found["bytes_ratio"] == own["bytes_ratio"]
    assert found["bytes_ratio"] < 0.8 and not found["eps"]["fallbacks"]


def transformers_logits(folder: Path, settings: dict[str, Any] | None, tokens: list[int]) -> np.ndarray:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from eps_cuda.integrations.transformers import EpsCache
    from eps_cuda.integrations.transformers.names import CACHE

    attention = "sdpa" if settings is None else "eps"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    stock = settings is None
    cache = transformers.DynamicCache(config=model.config) if stock else EpsCache(model, **settings)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        model(ids[:, :-NEW], **{CACHE: cache})
        steps = [
            model(ids[:, [place]], **{CACHE: cache}).logits[0, -1] for place in range(len(tokens) - NEW, len(tokens))
        ]
    return torch.stack(steps).numpy()


LOGITS: dict[str, Callable[[Path, dict[str, Any] | None, list[int]], np.ndarray]] = {
    "transformers": transformers_logits, 
}  # fmt: skip


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return found


def kl(dense: np.ndarray, sparse: np.ndarray) -> np.ndarray:
    """Return KL(dense || sparse) in nats of each row of logits [N, V]."""
    p, q = (log_probabilities(logits.astype(np.float64)) for logits in (dense, sparse))
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.mark.parametrize("engine", LOGITS)
def test_an_engine_with_eps_is_close_to_itself(engine: str, folder: Path) -> None:
    context, budget = SIZES[engine]
    tokens = Session.open(folder, "numpy").encode(corpus().decode()[200_000:220_000])[: context + NEW]
    settings = {"method": "rq"} | ({} if budget is None else {"budget": budget})
    dense, sparse = (LOGITS[engine](folder, one, tokens) for one in (None, settings))
    found = kl(dense, sparse)
    assert 0 < found.mean() <= (KL_LIMIT if budget is None else SPARSE_KL_LIMIT), found


def test_a_gguf_file_runs_in_transformers(gguf: Path, prompts: dict[str, Path]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    prompt = prompts["transformers"]
    found = ran(gguf, prompt, "--engine", "transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ids = torch.tensor([tokenizer(prompt.read_text()).input_ids])
    want = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)[0, ids.shape[1] :]
    assert found["dense"]["tokens"] == want.tolist() and found["prompt_tokens"] == ids.shape[1]
    assert found["bytes_ratio"] < 0.8 and not found["eps"]["fallbacks"]
    assert os.listdir(gguf.parent) == [gguf.name]  # nothing is left beside it


def test_a_chat_with_a_gguf_file_uses_the_template_in_it(gguf: Path, tmp_path: Path) -> None:
    line = ["run", "--engine", "transformers", "--model", str(gguf), "--chat", "--prompt", "What is 2 + 2?"]
    found = last(outcome([*line, *FLAGS], tmp_path))
    assert found["prompt_tokens"] > 20  # the template's own words are there
