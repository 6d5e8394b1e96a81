"""Verified decoding says what dense decoding says, whatever the drafts, and leaves nothing of them behind."""

import pytest
from verified_runs import DRAWN, GREEDY, Model, assert_same_state, eps, prompt, saved

from eps_core.config.speculative import SpeculativeConfig

pytestmark = pytest.mark.kernels("numba", "metal")

CONFIGS = {
    "rq": eps("rq"),
    "meanstd": eps("meanstd"),
    "box": eps("box"),
    "tails": eps("rq", correction_tokens=64),
    "strict": eps("box", strict=True, epsilon=0.3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_backend_says_the_dense_text(target, name: str) -> None:
    backend, device = target
    model, config = Model(backend, device, saved("llama2")), CONFIGS[name]
    prompts = [prompt(290), prompt(41, 1)]
    for sampling in (GREEDY, DRAWN):
        want = model.dense(prompts, config, 11, sampling)
        got = model.verified(prompts, config, 11, sampling, SpeculativeConfig("tokens", 5))
        assert got.said == want.said, sampling
        assert_same_state(model, got, want, 1e-4)
