"""Verified decoding says what dense decoding says, whatever the drafts, and leaves nothing of them behind."""

import pytest
from verified_runs import DRAWN, GREEDY, Model, assert_same_state, eps, judge, prompt, saved

from eps_core.config.store import METHODS
from eps_core.config.verify import Verify

pytestmark = pytest.mark.kernels("numba", "metal")

CONFIGS = {
    **{method: eps(method) for method in METHODS[1:]},
    "rq one group": eps("rq", budget=0.001, first_tokens=0, last_tokens=0),
    "all": eps("box", budget=1.0),
    "threshold": eps("box", policy="threshold", top_pages=3),
    "union": eps("meanstd", scope="union"),
    "strict": eps("box", strict=True, epsilon=0.3),
    "tails": eps("rq", tail_tokens=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_oracle_says_the_dense_text(name: str) -> None:
    model, config = judge(), CONFIGS[name]
    prompts = [prompt(300), prompt(41, 1)]
    for sampling in (GREEDY, DRAWN):
        want = model.dense(prompts, config, 13, sampling)
        for verify in (Verify("tokens", 5), Verify("tokens", None)):
            got = model.verified(prompts, config, 13, sampling, verify)
            assert got.said == want.said, (verify, sampling)
            assert_same_state(model, got, want, 1e-6)
            if verify.draft:
                assert sum(sum(r.drafted) for r in got.records) > 10


BACKEND_CONFIGS = ("rq", "meanstd", "box", "tails")


@pytest.mark.parametrize("name", BACKEND_CONFIGS)
def test_every_backend_says_the_dense_text(target, name: str) -> None:
    backend, device = target
    model, config = Model(backend, device, saved("llama2")), CONFIGS[name]
    prompts = [prompt(290), prompt(41, 1)]
    for sampling in (GREEDY, DRAWN):
        want = model.dense(prompts, config, 11, sampling)
        got = model.verified(prompts, config, 11, sampling, Verify("tokens", 5))
        assert got.said == want.said, sampling
        assert_same_state(model, got, want, 1e-4)
