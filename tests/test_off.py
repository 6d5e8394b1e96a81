"""`--method off` is the rollback: no line of EPS runs, nothing of it is allocated, and no logit changes a bit."""

from unittest.mock import Mock

import numpy as np
import pytest
from verified_runs import Model

from eps_core import reference
from eps_core.backend import cache as arrays_cache
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import accept, layers, pace, verified
from eps_core.decode.forward import Decoder
from eps_core.decode.sampling import Sampling
from eps_core.kv_cache.groups import GroupState
from eps_core.kv_cache.pool import PagePool
from eps_core.metrics import rounds

MODEL = "llama2-bf16-sharded"
pytestmark = pytest.mark.kernels("numba")

PROMPTS = [[7, 5, 3, 2] * 30, [11, 4, 9] * 9]


def logits_of(backend, device, model, config):
    return np.concatenate([record.logits for record in Model(backend, device, model).decode(PROMPTS, config).records])


# of the backend, of its cache module, of the decoder: all that EPS adds
BACKEND_PARTS = (
    "score", "select", "skipped_mass", "bounds", "bound_error", "extend_selection", "merge", "attend_own",
    "unread_share",
)  # fmt: skip
CACHE_PARTS = ("GroupState", "build_summary", "_update_summaries", "_add_summaries")


def poison(monkeypatch, backend) -> None:
    """Everything that EPS adds raises when it is called; a name that is not there is an error."""
    refuse = Mock(side_effect=AssertionError("EPS ran although it is off"))
    cache = reference.cache if backend is reference else arrays_cache
    for module, names in ((backend, BACKEND_PARTS), (cache, CACHE_PARTS), (layers, ("sparse_attention",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


def test_off_runs_nothing_of_eps_and_changes_no_bit(target, model, monkeypatch):
    backend, device = target
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, backend)
        without = logits_of(backend, device, model, EpsConfig.of())
        with pytest.raises(AssertionError, match="although it is off"):  # the poison works
            logits_of(backend, device, model, EpsConfig.of(method="box", group_size=4))
    assert np.array_equal(without, logits_of(backend, device, model, EpsConfig.of()))
    # and in a process where EPS ran before: no state leaks from one cache to another
    logits_of(backend, device, model, EpsConfig.of(method="rq", group_size=2))
    assert np.array_equal(without, logits_of(backend, device, model, EpsConfig.of(method="off")))


def verified_parts(backend) -> list[tuple[object, str]]:
    """All that verified decoding adds to dense and sparse decoding."""
    named = [(module, name) for module in (verified, accept, pace, rounds) for name in functions_of(module)]
    methods = (
        (verified, ("accept",)), (Decoder, ("verify", "commit")),
        (PagePool, ("reserve", "commit", "release")), (GroupState, ("invalidate",)),
        (backend, ("attend_rows", "write_kv_tentative", "visits")),
    )  # fmt: skip
    return [*named, *((owner, name) for owner, names in methods for name in names)]


def functions_of(module) -> list[str]:
    return [name for name, one in vars(module).items() if callable(one) and one.__module__ == module.__name__]


def test_without_verify_nothing_of_it_runs(target, model, monkeypatch):
    """Dense and sparse decoding: the same bits, and no function of the mode is called."""
    backend, device = target
    configs = [EpsConfig.of(), EpsConfig.of(method="meanstd", group_size=4, budget=0.3)]
    want = [logits_of(backend, device, model, config) for config in configs]
    refuse = Mock(side_effect=AssertionError("verified decoding ran although it is off"))
    for owner, name in verified_parts(backend):
        monkeypatch.setattr(owner, name, refuse)
    for config, one in zip(configs, want, strict=True):
        np.testing.assert_array_equal(logits_of(backend, device, model, config), one)


def test_every_part_of_verified_decoding_is_among_them(model, monkeypatch):
    """Each of the poisons is one that a verified run would meet, or that only its summary needs."""
    met = set()

    def noted(owner, name, right):
        def call(*args, **kwargs):
            met.add(name)
            return right(*args, **kwargs)

        return call

    parts = [(o, n) for o, n in verified_parts(reference) if not isinstance(getattr(o, n), type)]
    for owner, name in parts:
        monkeypatch.setattr(owner, name, noted(owner, name, getattr(owner, name)))
    config, one = EpsConfig.of(method="meanstd", group_size=4, budget=0.3), Model(reference, "cpu", model)
    given = *one.cache(config), [[5, 3, 2] * 9], 8, Sampling(1.0), config.selection_config
    for _ in verified.verified(one.decoder, *given, SpeculativeConfig("tokens", 3)):
        pass
    methods = {"verify", "commit", "reserve", "invalidate", "attend_rows", "write_kv_tentative", "visits"}
    assert methods | {"verified", "accept"} <= met
