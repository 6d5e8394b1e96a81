"""The check that a run makes before it trusts a GPU's kernels: good ones pass, bad ones are named."""

import numpy as np
import pytest

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode.kernel_check import disagreement

CONFIGS = [EpsConfig.of(), EpsConfig.of(method="rq"), EpsConfig.of(method="box", group_tokens=32)]


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.store.method)
def test_kernels_agree_with_arrays(target, config, dtype) -> None:
    backend, device = target
    for kernels in set(backend.usable_kernels(device)) - {"triton"}:  # slow in the interpreter; conformance has it
        assert disagreement(backend, device, kernels, CacheSpec(3, 2, 32, 1, dtype), 6, config) is None


def broken(backend, name, change):
    """The backend with one function changed for every cache that does not use array operations."""
    real = getattr(backend, name)

    def function(first, *args):
        result = real(first, *args)
        return change(result) if first.kernels != "arrays" else result

    return function


def raises(result):
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("attend", lambda r: (r[0] * 1.5, r[1]), "dense outputs differ by"),
        ("attend", lambda r: (r[0], r[1] + 0.1), "dense lse differ by"),
        ("attend", lambda r: (r[0] * np.nan, r[1]), "dense outputs differ"),
        ("attend_tail", lambda r: (r[0], r[1] + 0.1), "tail lse differ by"),
        (
            "score",
            lambda r: type(r)(r.estimate * 1.01, None, None, r.num_missing, kernels=r.kernels),
            "estimates differ",
        ),
        ("select", lambda r: type(r)(r.groups * 0 + 1, r.counts, r.uniform, r.forced), "groups differ"),
        ("attend", raises, "RuntimeError: no such instruction"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, name, change, expected) -> None:
    import eps_cuda

    monkeypatch.setattr(eps_cuda, name, broken(eps_cuda, name, change))
    fault = disagreement(eps_cuda, "cpu", "numba", CacheSpec(1, 2, 32, 1), 4, EpsConfig.of(method="rq"))
    assert fault is not None and expected in fault


@pytest.mark.parametrize(
    ("asked", "device", "found", "expected"),
    [
        ("auto", "gpu", None, ("numba", None)),
        ("auto", "gpu", "wrong", ("arrays", "kernels numba failed their check on this device (wrong)")),
        ("numba", "gpu", "wrong", ("numba", None)),  # asked for by name: nothing falls back
        ("auto", "cpu", "wrong", ("numba", None)),
        ("arrays", "gpu", "wrong", ("arrays", None)),
    ],
)
def test_only_kernels_that_nobody_named_fall_back(monkeypatch, asked, device, found, expected) -> None:
    from types import SimpleNamespace

    from eps_core.decode import session

    monkeypatch.setattr(session, "disagreement", lambda *args: found)
    backend = SimpleNamespace(usable_kernels=lambda device: ["arrays", "numba"])
    assert session.choose_kernels(backend, device, asked, CacheSpec(1, 2, 32, 1), 4, EpsConfig.of()) == expected
