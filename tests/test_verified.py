"""Verified decoding says what dense decoding says, whatever the drafts, and leaves nothing of them behind."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from verified_runs import Model, assert_same_state

from eps_core import oracle
from eps_core.config.eps import EpsConfig
from eps_core.config.store import METHODS
from eps_core.config.verify import Verify
from eps_core.decode.sampling import Sampling

pytestmark = pytest.mark.kernels("numba", "triton", "metal")

GREEDY = Sampling()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a tiny model -> its directory, written once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: tiny_models.save_model(name, root / name))


@pytest.fixture(scope="module")
def judge(saved: Callable[[str], Path]) -> Callable[[str], Model]:
    """The float64 oracle of a tiny model."""
    return cache(lambda name: Model(oracle, "cpu", saved(name)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, tiny_models.VOCAB_SIZE, length).tolist()


def eps(method: str, **flat: Any) -> EpsConfig:
    return EpsConfig.of(method=method, **{"budget": 0.2, "first_tokens": 2, "last_tokens": 8, "block_size": 16, **flat})


SMALL = {"group_tokens": 4}
CONFIGS = {
    **{method: eps(method, **({} if method == "rq" else SMALL)) for method in METHODS[1:]},
    "rq one group": eps("rq", budget=0.001, first_tokens=0, last_tokens=0),
    "all": eps("box", budget=1.0, **SMALL),
    "mass": eps("box", policy="mass", epsilon=0.3, **SMALL),
    "share": eps("rq", policy="share", tau=0.05),
    "threshold": eps("box", policy="threshold", top_pages=3, **SMALL),
    "union": eps("meanstd", scope="union", **SMALL),
    "strict": eps("box", strict=True, epsilon=0.3, **SMALL),
    "tails": eps("rq", tail_tokens=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_oracle_says_the_dense_text(judge, name: str) -> None:
    model, config = judge("llama2"), CONFIGS[name]
    prompts = [prompt(300), prompt(41, 1)]
    for sampling in (GREEDY, Sampling(0.8, 0.9, 3)):
        want = model.dense(prompts, config, 13, sampling)
        for verify in (Verify("tokens", 5), Verify("tokens")):
            got = model.verified(prompts, config, 13, sampling, verify)
            assert got.said == want.said, (verify, sampling)
            assert_same_state(model, got, want, 1e-6)
            if verify.draft:
                assert sum(sum(r.drafted) for r in got.records) > 10


BACKEND_CONFIGS = ("rq", "meanstd", "box", "tails")


@pytest.mark.parametrize("name", BACKEND_CONFIGS)
def test_every_backend_says_the_dense_text(target, saved, name: str) -> None:
    backend, device = target
    model, config = Model(backend, device, saved("llama2")), CONFIGS[name]
    prompts = [prompt(290), prompt(41, 1)]
    for sampling in (GREEDY, Sampling(0.8, 0.9, 3)):
        want = model.dense(prompts, config, 11, sampling)
        got = model.verified(prompts, config, 11, sampling, Verify("tokens", 5))
        assert got.said == want.said, sampling
        assert_same_state(model, got, want, 1e-4)
