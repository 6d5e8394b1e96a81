"""Real text, the demo model, rounding arithmetic: verified decoding says what dense decoding says, or differs where two
tokens are closer than the noise between the two ways to compute the same logits."""

from typing import Any

import numpy as np
import pytest
from verified_runs import Model, eps

from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import verified
from eps_core.decode.accept import Said
from eps_core.decode.generate import generate
from eps_core.decode.sampling import Sampling, draw
from eps_core.models.config import DEMO_MODEL
from eps_core.models.tokenizer import encode, load_tokenizer
from eps_core.tasks import corpus

LENGTH, TOKENS = 600, 32
FACTOR = 8  # of the measured noise
CONFIG = eps("rq", budget=0.1, num_sink_tokens=8, num_recent_tokens=24, block_size=64)


def text() -> list[int]:
    tokenizer = load_tokenizer(DEMO_MODEL)
    return list(encode(tokenizer, DEMO_MODEL, corpus.corpus()[40_000:48_000].decode(), False))[:LENGTH]


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def check_explained(
    said: list[int], logits: np.ndarray, dense_said: list[int], dense: np.ndarray, sampling: Sampling, start: int
) -> tuple[float, int | None]:
    """(noise in logits, where the texts part): logits [N, V] of each, of tokens from position `start` on."""
    part = first_difference(said, dense_said)
    same = len(said) if part is None else part + 1  # of the same prefix, the parting place included
    noise = float(np.abs(logits[:same] - dense[:same]).max())
    if part is not None:
        margin = draw(dense[part], sampling, 0, start + part).margin
        assert margin < FACTOR * noise / (sampling.temperature or 1.0), f"token {part} differs and is no tie"
    return noise, part


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [("float32", Sampling(0.8, 0.95, 1)), ("bfloat16", Sampling())],
    ids=["float32-drawn", "bfloat16-greedy"],
)
def test_text_of_the_demo_model(target: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, sampling: Sampling) -> None:
    backend, device = target
    if backend.__name__ == "eps_core.reference":
        pytest.skip("the oracle does not round: test_verified_oracle.py")
    model, prompt = Model(backend, device, DEMO_MODEL, dtype, units=12, dtype=dtype), text()
    assert len(prompt) == LENGTH
    cache, pool, sequences = model.start([prompt], CONFIG)
    records = list(
        generate(model.decoder, cache, pool, [prompt], TOKENS, sampling, written=sequences, keep_logits=True)
    )
    dense = np.concatenate([record.logits for record in records])
    dense_said = [record.tokens[0] for record in records]

    rows: list[np.ndarray] = []
    right = verified.accept

    def accept(logits: np.ndarray, *rest: Any) -> Said:
        said = right(logits, *rest)
        rows.extend(logits[: len(said.tokens)].copy())
        return said

    monkeypatch.setattr(verified, "accept", accept)
    run = model.verified([prompt], CONFIG, TOKENS, sampling, SpeculativeConfig("tokens", 7))
    noise, part = check_explained(run.said[0], np.stack(rows), dense_said, dense, sampling, LENGTH)
    assert noise < (1e-3 if dtype == "float32" else 1.0)
    accepted, drafted = (sum(sum(getattr(r, name)) for r in run.records) for name in ("accepted", "drafted"))
    assert accepted > 0.5 * drafted > 0
    print(f"{dtype} noise {noise:.1e}, parts at {part}, {accepted} of {drafted} drafts accepted")


def test_a_difference_that_is_no_tie_is_refused() -> None:
    """The check sees a wrong token, and lets a tie pass."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(4, 50)) * 3
    logits = dense + 1e-6 * rng.normal(size=dense.shape)
    said = [int(row.argmax()) for row in dense]
    assert check_explained(said, logits, said, dense, Sampling(), 0)[1] is None
    wrong = [*said[:2], (said[2] + 1) % 50, said[3]]
    with pytest.raises(AssertionError, match="no tie"):
        check_explained(wrong, logits, said, dense, Sampling(), 0)
    dense[2, wrong[2]] = dense[2, said[2]] - 1e-7
    logits[2] = dense[2] + 1e-6 * rng.normal(size=50)
    assert check_explained(wrong, logits, said, dense, Sampling(), 0)[1] == 2
