"""The bytes that attention really gathers from K and V, counted at the array library and not by its own counter."""

import numpy as np
import pytest
from conftest import TARGETS
from test_conformance import Case, case_units, eps, make_kv, write_all

from eps_core.config import CacheSpec
from eps_core.interface import load_backend


class Counter:
    """Sums the bytes of what whole-row gathers from the pools return."""

    def __init__(self) -> None:
        self.gathered = 0


# the oracle indexes tokens one head at a time: its counter is the reference of the others
@pytest.fixture(params=[t for t in TARGETS if t[0] != "numpy"], ids="-".join)
def target(request) -> tuple:
    name, device = request.param
    return load_backend(name), device


@pytest.fixture
def counter(target, monkeypatch) -> Counter:
    backend, _ = target
    count = Counter()
    if backend.__name__ == "eps_cuda":
        import torch

        original = torch.Tensor.index_select

        def index_select(self, dim, index):
            result = original(self, dim, index)
            count.gathered += result.nbytes
            return result

        monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    else:
        import mlx.core as mx

        import eps_mlx.attention

        class Counting:
            def __getattr__(self, name):
                return getattr(mx, name)

            @staticmethod
            def take(array, indices, axis=None):
                result = mx.take(array, indices, axis=axis)
                if mx.issubdtype(array.dtype, mx.floating):
                    count.gathered += result.nbytes
                return result

        monkeypatch.setattr(eps_mlx.attention, "mx", Counting())
    return count


POLICIES = {
    "topk": {"budget": 0.3},
    "mass": {"policy": "mass", "epsilon": 0.2},
    "union": {"scope": "union"},
    "fine": {"group_tokens": 1},
    "coarse": {"group_tokens": 32},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POLICIES)
def test_counter_equals_gathered_tiles(target, counter, name, dtype):
    backend, device = target
    case = Case((150, 37), eps("box", **POLICIES[name]), dtype=dtype)
    rng = np.random.default_rng(0)
    keys, values = make_kv(case, rng)
    spec = CacheSpec(1, 2, 16, case_units(case), dtype)
    cache, table, lengths = write_all(backend, device, case, backend.new_cache(spec, case.config, device), keys, values)
    q = backend.from_numpy(rng.normal(size=(2, 4, 16)).astype(np.float32), "float32", device)
    selected = backend.select(case.config, backend.score(cache, 0, q, table, lengths), lengths)
    visited = int(backend.to_numpy(selected.counts).sum())
    counter.gathered, before = 0, cache.kv_bytes_read
    backend.attend(cache, 0, q, table, lengths, selected)
    expected = visited * case.config.S * spec.kv_token_bytes
    assert counter.gathered == cache.kv_bytes_read - before == expected
    # dense reads every token once, so a gate that skipped nothing could not pass for one
    assert expected < 187 * 2 * spec.kv_token_bytes


def test_rq_codes_are_equal_in_mlx_and_torch():
    """One-bit codes and visit lists must not depend on the library: the mean and the rotation are prescribed sums."""
    rng = np.random.default_rng(3)
    case = Case((700,), eps("rq", group_tokens=2), head_dim=64, dtype="bfloat16", chunk=333)
    keys, values = make_kv(case, rng)
    q = rng.normal(size=(1, 4, 64)).astype(np.float32)
    found = []
    for name in ("mlx", "cuda"):
        backend = load_backend(name)
        spec = CacheSpec(1, 2, 64, case_units(case), "bfloat16")
        cache, table, lengths = write_all(
            backend, "cpu", case, backend.new_cache(spec, case.config, "cpu"), keys, values
        )
        native = backend.from_numpy(q, "float32", "cpu")
        groups = backend.select(case.config, backend.score(cache, 0, native, table, lengths), lengths).groups
        summaries = cache.summaries[0]
        found.append([backend.to_numpy(x) for x in (cache.centre[0], summaries["codes"], groups)])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
