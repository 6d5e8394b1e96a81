"""One suite over every backend: absence is loud. `EPS_TEST_BACKENDS` (comma separated) restricts what is asked for."""

import os

import pytest

from eps_core.interface import BACKENDS, load_backend

REQUESTED = os.environ.get("EPS_TEST_BACKENDS", ",".join(BACKENDS)).split(",")
# (backend, device) pairs: every device that is present is tested; a backend that does not import is an error
TARGETS = [(name, device) for name in REQUESTED for device in load_backend(name).devices()]


def pytest_report_header() -> list[str]:
    return [f"eps backend {name} on {device}: {load_backend(name).versions()}" for name, device in TARGETS]


@pytest.fixture(params=TARGETS, ids=lambda target: "-".join(target))
def target(request: pytest.FixtureRequest) -> tuple:
    """(backend module, device) of every backend asked for."""
    name, device = request.param
    return load_backend(name), device
