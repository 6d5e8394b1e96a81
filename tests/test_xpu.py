"""Intel GPUs, as far as a machine without one can tell: the choice of device and kernels, and what waits for it."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import eps_cuda
from eps_core.cli.main import cli
from eps_core.errors import ConfigError
from eps_core.load import choose_device, load_backend
from eps_cuda import bench

DEVICES = [name for name in ("cuda", "xpu") if getattr(torch, name).is_available()]


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Torch that says it has an Intel GPU and no other; what was asked of it."""
    asked: list[str] = []
    facts = SimpleNamespace(name="Intel GPU", total_memory=16 * 2**30)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_name": lambda: facts.name,
        "get_device_properties": lambda index: facts,
        "mem_get_info": lambda: (2**30, 2**31),
        "synchronize": lambda: asked.append("synchronize"),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.xpu, name, function)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return asked


def test_auto_takes_it(xpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert eps_cuda.devices() == ["cpu", "xpu"] and eps_cuda.device_name("xpu") == "Intel GPU"
    assert choose_device(eps_cuda, "auto") == choose_device(eps_cuda, "xpu") == "xpu"
    assert eps_cuda.device.device_of("auto").type == "xpu"
    if load_backend("mlx").devices() == ["cpu"]:
        assert load_backend("auto") is eps_cuda
    # beside another, both choices prefer the same
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert eps_cuda.devices() == ["cpu", "cuda", "xpu"]
    assert choose_device(eps_cuda, "auto") == eps_cuda.device.device_of("auto").type == "cuda"


@pytest.mark.parametrize(
    ("builds", "usable"),
    [
        (set(), ["arrays"]),
        ({"triton"}, ["arrays"]),  # NVIDIA's and AMD's has no compiler for it
        ({"triton", "triton.backends.intel"}, ["arrays", "triton"]),
    ],
    ids=["none", "others", "intel"],
)
def test_kernels_need_intel_s_own_triton(monkeypatch: pytest.MonkeyPatch, builds: set[str], usable: list[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in builds else None)
    assert eps_cuda.usable_kernels("xpu") == usable


def test_waiting_and_measuring_ask_its_own_module(xpu: list[str]) -> None:
    eps_cuda.wait(SimpleNamespace(device="xpu"))
    bench.synchronize()
    assert xpu == ["synchronize"] * 2
    assert bench.free_bytes("xpu") == 2**30 and bench.last_cache_bytes("xpu") is None
    facts = bench.device_facts("xpu")
    assert (facts["device_name"], facts["multiprocessors"]) == ("Intel GPU", None)
    assert facts["memory_bytes"] == 16 * 2**30 and bench.capture(lambda: None) is None


@pytest.mark.skipif("xpu" in DEVICES, reason="there is one")
@pytest.mark.parametrize("backend", ["numpy", "mlx", "cuda"])
def test_where_it_is_absent_it_is_refused_in_one_line(backend: str) -> None:
    done = CliRunner().invoke(cli, ["run", "--backend", backend, "--device", "xpu", "--prompt", "x"])
    assert isinstance(done.exception, ConfigError)
    assert f"device xpu is not there for backend {backend}, which has cpu" in str(done.exception)
    with pytest.raises(ConfigError, match="device 'xpu' is absent: this torch"):
        eps_cuda.new_cache(None, None, "xpu")  # type: ignore[arg-type]  # refused before either is read
