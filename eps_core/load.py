"""The one place where a backend's name becomes a module: everything else is imported by name."""

import importlib
from contextlib import suppress
from typing import Any

from eps_core.attention.protocol import Backend
from eps_core.cpu.usable import why_not
from eps_core.errors import ConfigError, install

BACKENDS = ("numpy", "mlx", "cuda")
# what computes: array operations, or kernels compiled for CPUs (numba) and GPUs (triton, metal). Speed only
KERNELS = ("arrays", "numba", "triton", "metal")
_PLATFORMS = {"numpy": "eps_core.cpu.host", "mlx": "eps_mlx.bench", "cuda": "eps_cuda.bench"}
_MODULES = {"numpy": "eps_core.reference", "mlx": "eps_mlx", "cuda": "eps_cuda"}
_ENGINES = {
    "mlx-lm": "eps_mlx.integrations.mlx_lm",
    "transformers": "eps_cuda.integrations.transformers",
    "vllm": "eps_cuda.integrations.vllm.adapter",
    "sglang": "eps_cuda.integrations.sglang",
}
SERVED = tuple(_ENGINES)  # by `serve`
ENGINES = SERVED[:3]  # those that `run` compares in
OWN = "own"  # beside the engines: the decoders of this project


def load_backend(name: str) -> Backend:
    """The backend module of that name; the one late import of the project.

    `auto` takes mlx where Apple's GPU is present, cuda where torch sees a GPU, else the first of cuda, mlx and numpy
    that imports. A backend named outright that does not import raises `ConfigError` with what is missing: there is
    no silent fallback.
    """
    if name == "auto":
        return _automatic()
    if name not in _MODULES:
        raise ConfigError(f"backend {name!r} is unknown: choose one of auto, {', '.join(BACKENDS)}")
    backend: Backend = _imported(_MODULES[name], f"backend {name}", install("" if name == "numpy" else name))
    return backend


def load_engine(name: str) -> Any:
    """The hook of an engine by its name: see `integrations.protocol.EngineModule`. Raises ConfigError where it does not
    import."""
    if name not in _ENGINES:
        raise ConfigError(f"engine {name!r} is unknown: choose one of {', '.join(SERVED)}")
    return _imported(_ENGINES[name], f"engine {name}", install(name))


def _imported(module: str, what: str, fix: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a broken library fails in many ways
        raise ConfigError(f"{what} cannot be loaded ({error}): {fix}") from error


def backend_of(engine: str) -> Backend:
    """The backend that an engine's hook computes with."""
    return load_backend(next(name for name, path in _MODULES.items() if _ENGINES[engine].startswith(f"{path}.")))


def load_platform(name: str) -> Any:
    """The module of a backend that times what its platform offers: see `cpu.host` for what each function says."""
    return importlib.import_module(_PLATFORMS[name])


def resolve_kernels(kernels: str, usable: list[str], device: str) -> str:
    """The kernels of that name, or the fastest of `usable` (its last) for auto. Raises ConfigError for those that this
    device or installation lacks: there is no silent fallback."""
    if kernels == "auto":
        return usable[-1]
    if kernels not in KERNELS:
        raise ConfigError(f"kernels {kernels!r} are unknown: choose one of auto, {', '.join(KERNELS)}")
    if kernels not in usable:
        raise ConfigError(
            f"kernels {kernels} are not there for this backend on {device}: choose one of auto, {', '.join(usable)}"
            + (f"; {why_not()}" if kernels == "numba" and device == "cpu" and why_not() else "")
        )
    return kernels


def backend_name(backend: Backend) -> str:
    module = backend.__name__  # type: ignore[attr-defined]
    return next(name for name, path in _MODULES.items() if path == module)


def _automatic() -> Backend:
    usable = []
    for name in ("mlx", "cuda", "numpy"):
        with suppress(ConfigError):
            usable.append(load_backend(name))
    # a GPU first; among CPUs torch was the fastest (docs/decisions.md)
    for backend in usable:
        if any(device != "cpu" for device in backend.devices()):
            return backend
    return next((b for b in usable if backend_name(b) == "cuda"), usable[0])


def choose_device(backend: Backend, asked: str) -> str:
    """The asked device, or the backend's GPU where it has one; an absent device is an error, never a fallback."""
    present = backend.devices()
    if asked == "auto":
        return next((device for device in present if device != "cpu"), "cpu")
    if asked not in present:
        raise ConfigError(
            f"device {asked} is not there for backend {backend_name(backend)}, which has {', '.join(present)}: "
            "choose one of them or --device auto"
        )
    return asked
