"""`--method off` is the rollback: no line of EPS runs, nothing of it is allocated, and no logit changes a bit."""

import importlib

import numpy as np
import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode import forward
from eps_core.decode.forward import load_decoder
from eps_core.decode.generate import generate
from eps_core.decode.model import read_spec
from eps_core.decode.sampling import Sampling
from eps_core.paging.pool import PagePool

pytestmark = pytest.mark.kernels("numba")

PROMPTS = [[7, 5, 3, 2] * 30, [11, 4, 9] * 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save_model("llama2-bf16-sharded", tmp_path_factory.mktemp("off"))


def logits_of(backend, device, model, config):
    spec = read_spec(model)
    decoder = load_decoder(backend, model, spec, "float32", device)
    cache_spec = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 64)
    cache = backend.new_cache(cache_spec, config.store, device)
    records = generate(
        decoder, cache, PagePool(64, config.store.unit_tokens), PROMPTS, 6, Sampling(), config.read, keep_logits=True
    )
    return np.concatenate([record.logits for record in records])


# of the backend, of its cache module, of the decoder: all that EPS adds
BACKEND_PARTS = (
    "score", "select", "skipped_mass", "bounds", "certify", "escalate", "merge", "add_tail", "attend_tail",
    "attend_own", "unread_share", "moved_by",
)  # fmt: skip
CACHE_PARTS = ("GroupState", "build_summary", "_update_summaries", "_add_summaries")


def poison(monkeypatch, backend) -> None:
    """Everything that EPS adds raises when it is called; a name that is not there is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("EPS ran although it is off")

    cache = importlib.import_module(f"{backend.__name__}.cache")
    for module, names in ((backend, BACKEND_PARTS), (cache, CACHE_PARTS), (forward, ("attend_layer",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


def test_off_allocates_nothing_of_eps(target):
    backend, device = target
    cache = backend.new_cache(CacheSpec(2, 2, 16, 4), EpsConfig.of().store, device)
    assert cache.bound is None
    for name in ("summaries", "state", "open", "centre", "largest_key", "largest_value", "valid", "steps"):
        assert not getattr(cache, name, []), name


def test_off_runs_nothing_of_eps_and_changes_no_bit(target, model, monkeypatch):
    backend, device = target
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, backend)
        without = logits_of(backend, device, model, EpsConfig.of())
        with pytest.raises(AssertionError, match="although it is off"):  # the poison works
            logits_of(backend, device, model, EpsConfig.of(method="box", group_tokens=4))
    assert np.array_equal(without, logits_of(backend, device, model, EpsConfig.of()))
    # and in a process where EPS ran before: no state leaks from one cache to another
    logits_of(backend, device, model, EpsConfig.of(method="rq", group_tokens=2))
    assert np.array_equal(without, logits_of(backend, device, model, EpsConfig.of(method="off")))
