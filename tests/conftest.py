"""One suite over every backend: absence is loud. `EPS_TEST_BACKENDS` (comma separated) restricts what is asked for.

A test that takes `target` runs on the array operations of every backend and device; marked `kernels(name, ..)`, also
on the kernels of these names: numba, triton (interpreted where there is no GPU), metal (its text run on the CPU).
"""

import gc
import os
import signal
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

# a shell that starts the suite in the background has it and all its children ignore Ctrl-C, which tests send to some
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import triton_interpreter  # noqa: F401  mends what the interpreter gets wrong in bfloat16

from eps_core.load import BACKENDS, load_backend

collect_ignore = ["vllm"]  # a suite of its own: scripts/test_vllm.sh
REQUESTED = os.environ.get("EPS_TEST_BACKENDS", ",".join(BACKENDS)).split(",")


class Target(NamedTuple):
    """What a test runs on; `kernels` of all caches that it makes without saying which."""

    backend: str
    device: str
    kernels: str


def _targets() -> list[Target]:
    """Every device that is present; a backend that does not import is an error."""
    found = []
    for name in REQUESTED:
        backend = load_backend(name)
        for device in backend.devices():
            kernels = [*backend.usable_kernels(device)]
            if name == "mlx" and "metal" not in kernels:
                kernels.append("metal")
            found += [Target(name, device, one) for one in kernels]
    return found


TARGETS = _targets()


class Bound(ModuleType):
    """A backend module whose caches use given kernels."""

    def __init__(self, module: ModuleType, kernels: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(vars(module))

        def new_cache(spec: Any, store: Any, device: str = "auto", wanted: str = "auto") -> Any:
            return module.new_cache(spec, store, device, kernels if wanted == "auto" else wanted)

        self.new_cache = new_cache


@cache
def bound(name: str, kernels: str) -> ModuleType:
    module = load_backend(name)
    return module if module.usable_kernels("cpu") == ["arrays"] else Bound(module, kernels)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels(*names): run `target` on these kernels besides array operations")


def pytest_collection_finish() -> None:
    """What is there by now, libraries and thousands of tests, is no garbage: collections need not look through it."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    versions = {name: load_backend(name).versions() for name in REQUESTED}
    return [f"eps backend {t.backend} on {t.device}, kernels {t.kernels}: {versions[t.backend]}" for t in TARGETS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = getattr(metafunc.module, "target", None)  # a module may have a fixture of that name of its own
    if "target" in metafunc.fixturenames and own is None:
        marker = metafunc.definition.get_closest_marker("kernels")
        names = ("arrays", *(marker.args if marker else ()))
        chosen = [target for target in TARGETS if target.kernels in names]
        metafunc.parametrize("target", chosen, ids=["-".join(target) for target in chosen], indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Any:
    """(backend module, device)."""
    name, device, kernels = request.param
    if kernels == "metal" and device == "cpu":
        from metal import shim

        with shim.installed():
            yield bound(name, kernels), device
    else:
        yield bound(name, kernels), device
