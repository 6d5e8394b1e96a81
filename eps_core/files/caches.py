"""The one owner of what is kept between runs: compiled kernels, measured costs. All of it can be remade, so whatever is
wrong with a cache costs time and never a run."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "EPS_CACHE_DIR"


def folder() -> Path | None:
    """Where caches are, made and writable: `EPS_CACHE_DIR`, else the user's cache folder, else a temporary one of this
    process and its children, with one line on stderr; None where nothing can be written at all."""
    wanted = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    with suppress(RuntimeError):  # a user without a home
        wanted.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eps")
    return _first_writable(tuple(wanted))


@functools.cache
def _first_writable(wanted: tuple[Path, ...]) -> Path | None:
    for path in wanted:
        with suppress(OSError, ValueError):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=path):
                return path.resolve()
    tried = ", ".join(map(str, wanted)) or "no home"
    print(f"no cache folder can be written ({tried}): nothing is kept; set {VARIABLE} to a folder", file=sys.stderr)
    try:
        path = Path(tempfile.mkdtemp(prefix="eps-cache-"))
    except OSError:
        return None
    os.environ[VARIABLE] = str(path)  # for children
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends, too
        shutil.rmtree(path, ignore_errors=True)


def keep(path: Path, data: bytes) -> str | None:
    """Puts a file into a cache folder, whole or not at all; what went wrong, in a few words, or None."""
    partial = None
    try:
        handle, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)
        return error.strerror or str(error)
    return None
