"""Real pretrained models, SmolLM2-135M-Instruct and Gemma 3 270M: dense decoding equals transformers', and the sparse
default is close to dense decoding at every length.

The models are fetched once into EPS_MODEL_CACHE. Where they cannot be fetched the tests fail in CI, elsewhere they are
skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eps_core import LLM
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.evaluation.runner import DENSE, Document, run_document
from eps_core.tasks.corpus import corpus

ROOT = Path(__file__).parent.parent
DEFAULT = EpsConfig.of(method="rq")
KL_LIMIT = 0.01  # of the default, mean over a text, nats
SPARSE_KL_LIMIT = 0.05  # of a share of the tokens that skips most of them
# tokens of a context, and the share that is read sparsely: prefill is slow by array operations
SIZES = {"cuda": (2000, 0.1), "mlx": (200, 0.5), "numpy": (300, 0.4)}


@pytest.fixture(scope="session")
def folder() -> Path:
    return fetched("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    return fetched("gemma3")


def fetched(name: str) -> Path:
    home = Path(os.environ.get("EPS_MODEL_CACHE", Path.home() / ".cache" / "eps" / "models"))
    command = [sys.executable, ROOT / "scripts" / "get_model.py", name, home / name]
    home.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        reason = f"{name} cannot be fetched: {done.stderr.strip().splitlines()[-1]}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return home / name


@pytest.fixture(scope="module", params=["cuda", "mlx", "numpy"])
def session(folder: Path, request: pytest.FixtureRequest) -> Session:
    return Session.open(folder, request.param, "cpu", "float32", "bfloat16")


@pytest.mark.parametrize("name", ["folder", "gemma3"])
def test_greedy_tokens_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    """Of Gemma over prompts of twice its window: 15 of its 18 layers have one of 512 tokens."""
    folder = request.getfixturevalue(name)
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    llm = LLM(folder, backend="cuda", device="cpu", dtype="float32", method="off")
    session = llm.session
    tokens = session.encode(corpus().decode()[40_000:60_000])[:1000]
    text = session.decode(tokens)
    prompt, model = session.encode(text), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=-1)
    assert llm.generate(text, max_new_tokens=16, ignore_eos=True).tokens == want[0, len(prompt) :].tolist()


def test_gemma_reads_its_windows_densely_and_the_other_layers_sparsely(gemma3: Path) -> None:
    session = Session.open(gemma3, "cuda", "cpu", "float32", "bfloat16")
    tokens = session.encode(corpus().decode()[200_000:220_000])[: 1500 + 8]
    found = run_document(session, Document.along(tokens, 8), {"sparse": EpsConfig.of(method="rq", budget=0.2)})
    assert float(np.mean(found["sparse"].kl)) <= SPARSE_KL_LIMIT
    read, dense = found["sparse"].bytes_read()
    windows, full = 15 * 512, 3 * 1504
    assert (windows + 0.2 * full) / (windows + full) < read / dense < (windows + 0.4 * full) / (windows + full)
    assert all(record.fallbacks == {"sliding_window": 15} for record in found["sparse"].records)


def test_the_default_is_close_to_dense_and_reads_less(session: Session) -> None:
    context, share = SIZES[session.backend_name]
    tokens = session.encode(corpus().decode()[200_000:220_000])[: context + 12]
    configs = {"default": DEFAULT, "sparse": EpsConfig.of(method="rq", budget=share)}
    found = run_document(session, Document.along(tokens, 12), configs)
    assert float(np.mean(found["default"].kl)) <= KL_LIMIT
    assert float(np.mean(found["sparse"].kl)) <= SPARSE_KL_LIMIT
    read, dense = found["sparse"].bytes_read()
    assert read < (share + 0.2) * dense
    read, dense = found["default"].bytes_read()
    assert read < 0.65 * dense if context > 1024 else read == dense


def test_a_short_chat_is_dense(session: Session) -> None:
    prompt = session.encode_chat("Write a Python function that adds two numbers.")
    assert len(prompt) < 60
    found = run_document(session, Document(prompt, 12), {"default": DEFAULT})
    assert found["default"].said == found[DENSE].said
    read, dense = found["default"].bytes_read()
    assert read == dense


def test_a_needle_is_answered_where_dense_decoding_answers_it(folder: Path) -> None:
    session = Session.open(folder, "cuda", "cpu", "float32", "bfloat16")
    filler = session.encode(corpus().decode()[100_000:120_000], special=False)[: SIZES[session.backend_name][0]]
    middle = len(filler) // 2
    needle, question = "\n# The code for otter is 31415.\n", "\n# What is the code for otter? The code for otter is "
    text = session.decode(filler[:middle]) + needle + session.decode(filler[middle:]) + question
    found = run_document(session, Document(session.encode(text), 6), {"default": DEFAULT})
    assert "31415" in session.decode(found[DENSE].said[0])
    assert "31415" in session.decode(found["default"].said[0])
