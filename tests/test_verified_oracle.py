"""Verified decoding against dense decoding in exact arithmetic, over drawn models, prompts and settings: token for
token, and with the same cache and pool after every round."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from verified_runs import Drafter, check_rounds, eps, judge, prompt

from eps_core.config.cache import METHODS
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.sampling import Sampling

MODELS = ("llama2", "qwen2-tied", "qwen3", "mistral", "llama2-linear-biased")
READS: dict[str, dict[str, Any]] = {
    "few": {"budget": 0.2},
    "one group": {"budget": 0.001, "num_sink_tokens": 0, "num_recent_tokens": 0},
    "all": {"budget": 1.0},
    "threshold": {"policy": "threshold", "top_pages": 3},
    "union": {"scope": "union", "budget": 0.3},
}
VERIFIES = st.builds(
    SpeculativeConfig,
    mode=st.just("tokens"),
    draft=st.one_of(st.none(), st.integers(1, 16)),
    most=st.just(16),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    method=st.sampled_from([method for method in METHODS if method not in ("off", "rq")]),
    read=st.sampled_from(list(READS)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    tokens=st.integers(1, 9),
    verify=VERIFIES,
    sampling=SAMPLINGS,
    drafter=st.sampled_from([None, {"dense": True}, {"change": np.negative}, {"place": np.nan}]),
    poison=st.sampled_from([None, np.nan, 1e30]),
)
def test_a_drawn_run_is_the_dense_one(
    name: str,
    method: str,
    read: str,
    lengths: list[int],
    tokens: int,
    verify: SpeculativeConfig,
    sampling: Sampling,
    drafter: dict[str, Any] | None,
    poison: float | None,
) -> None:
    config, model = eps(method, **READS[read]), judge(name)
    verify.check(config, sampling.temperature, sampling.by)
    prompts = [prompt(length, i) for i, length in enumerate(lengths)]
    check_rounds(model, prompts, config, tokens, sampling, verify, drafter and Drafter(model, **drafter), poison)
