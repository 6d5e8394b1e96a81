"""Compiles CPU kernels and keeps what was compiled in EPS's own cache folder, a file a function and signature.

numba's own caches lie beside the sources or in the user's folder and end a program where neither can be written, or a
file in them is damaged; and they keep code by the source of the outermost function alone, so that one that calls into
a file that changed would run old code. Here all sources name the folder, a file carries its own hash, and a cache that
cannot be read or written costs a compilation.

numba copies the code of what a function calls into it and optimises all of it again, at every level. That pays within
a loop; of a call that lasts microseconds it only costs compilation, and `call_by_name` leaves that code where it is.
"""

import functools
import hashlib
import importlib
import os
import pickle
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core import cgutils
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import intrinsic

from eps_core.cpu import beside
from eps_core.io import caches

# never nnan or ninf: infinities carry meaning here
FAST = frozenset({"reassoc", "contract", "arcp", "nsz"})
_DIGEST = hashlib.sha256().digest_size
_named: dict[str, tuple[Any, tuple[Any, ...]]] = {}  # symbols that other code calls: the kernel, types of its arguments


def kernel(fastmath: frozenset[str] = frozenset()) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function without the GIL and keeps its code."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(nogil=True, error_model="numpy", fastmath=set(fastmath), no_cfunc_wrapper=True)(function)
        compiled._cache = _Kept(function)
        return compiled

    return decorate


@intrinsic
def call_by_name(typing_context, called, args):
    """Calls kernel called(*args), which returns nothing, without taking its code in."""
    called.get_call_type(typing_context, tuple(args), {})  # compiles it

    def codegen(context, builder, signature, values):
        called_type, args_type = signature.args
        function, about = declare(context, builder.module, called_type.dispatcher, tuple(args_type))
        assert about.restype == types.none, f"{about.qualname} returns something: it cannot be called by name"
        unpacked = cgutils.unpack_tuple(builder, values[1])
        status, _ = context.call_conv.call_function(builder, function, about.restype, about.argtypes, unpacked)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(called, args), codegen


def declare(context: Any, module: Any, called: Any, arg_types: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return a compiled kernel as a function that `module` declares, and numba's description of it. The symbol is found
    in the process: what is kept of the module names it (`_Kept`), and it is loaded first."""
    about = called.overloads[arg_types].fndesc
    _named[about.llvm_func_name] = called, arg_types
    return context.declare_function(module, about), about


def compiled_from() -> str:
    """A hash of all that kernels come from: this folder, the summaries and settings whose numbers they hold, the
    versions."""
    folder = Path(__file__).parent
    versions = numba.__version__, llvmlite.__version__, platform.python_version(), *numba_settings()
    sources = hashlib.sha256(repr(versions).encode())
    for place in (folder, folder.parent / "summaries", folder.parent / "config"):
        for source in sorted(place.glob("*.py")):
            sources.update(source.read_bytes())
    return sources.hexdigest()


def numba_settings() -> list[tuple[str, str]]:
    """Return those of numba's variables that may change the code it makes."""
    harmless = ("NUMBA_NUM_THREADS", "NUMBA_CACHE_DIR")
    return sorted((k, v) for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in harmless)


@functools.cache
def _folder() -> Path | None:
    """Return where this version's code is kept; None: nowhere."""
    caches_folder = caches.folder()
    if caches_folder is None:
        return None
    folder = caches_folder / f"kernels-{compiled_from()[:32]}"
    with suppress(OSError):  # one that cannot be written is read
        folder.mkdir(exist_ok=True)
        os.utime(folder)  # says that it is used
        caches.clear_old(caches_folder, "kernels-*")  # another version's
    return folder


class _Kept(NullCache):
    """The code of one function: each file a SHA-256 and what it is of, the kernels that it calls by name and itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"

    def _path(self, signature: Any, codegen: Any) -> Path | None:
        folder = _folder()
        if folder is None:
            return None
        key = hashlib.sha256(repr((self._name, str(signature), codegen.magic_tuple())).encode()).hexdigest()
        return folder / f"{self._name}-{key[:32]}"

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        found = None if path is None else _read(path, target_context)
        if found is None:
            _say("compiling CPU kernels for this machine, once: up to half a minute ..")
            if path is not None and beside.hold(path):
                found = _read(path, target_context)
                if found is not None:
                    beside.release(path)
                else:
                    beside.begin()
        return found

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        path = self._path(sig, data.codegen)
        if path is None:
            return
        if not data.library.has_dynamic_globals:
            declared = [one.name for one in data.library._final_module.functions if one.is_declaration]
            called = ((name, *_named[name]) for name in declared if name in _named)
            calls = [(name, one.py_func.__module__, one.py_func.__name__, arg_types) for name, one, arg_types in called]
            code = dumps((calls, data._reduce()))
            fault = caches.keep(path, hashlib.sha256(code).digest() + code)
            if fault is not None:
                _say(f"compiled kernels cannot be kept in {path.parent} ({fault}): set {caches.VARIABLE}")
        beside.release(path)


def _read(path: Path, target_context: Any) -> CompileResult | None:
    """Return what is kept there, None where that is nothing of use."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    if not code or hashlib.sha256(code).digest() != digest:
        return None
    calls, kept = pickle.loads(code)
    return CompileResult._rebuild(target_context, *kept) if all(_is_loaded(*call) for call in calls) else None


def _is_loaded(symbol: str, module: str, name: str, arg_types: tuple[Any, ...]) -> bool:
    """Load or compile a kernel that kept code calls, and return whether it has the name by which it is called."""
    called = getattr(importlib.import_module(module), name)
    called.compile(arg_types)
    _named[symbol] = called, arg_types
    return bool(called.overloads[arg_types].fndesc.llvm_func_name == symbol)


@functools.cache
def _say(line: str) -> None:
    """Once a process."""
    print(line, file=sys.stderr)
