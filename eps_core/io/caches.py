"""The one owner of what is kept between runs: compiled kernels, measured costs. All of it can be remade, so whatever is
wrong with a cache costs time and never a run."""

import atexit
import functools
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "EPS_CACHE_DIR"
_TEMPORARY = "eps-cache-"


KEPT_DAYS = 30  # of what nobody has used since


def folder() -> Path | None:
    """Return where caches are: `EPS_CACHE_DIR`, else the user's cache folder, else a temporary one of this process and
    its children; None where nothing can be written at all. One that cannot be written serves where it holds kernels, as
    in an image; what was wanted and cannot serve is told in one line on stderr."""
    wanted = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    with suppress(RuntimeError):  # a user without a home
        home = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache" if Path.home().is_dir() else None)
        wanted += [] if home is None else [Path(home) / "eps"]
    return _first_writable(tuple(wanted))


@functools.cache
def _first_writable(wanted: tuple[Path, ...]) -> Path | None:
    for path in wanted:
        with suppress(OSError, ValueError):
            if any(path.glob("kernels-*")) and not os.access(path, os.W_OK):
                return path.resolve()
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=path):
                if path != wanted[0]:
                    print(f"{VARIABLE} {wanted[0]} cannot be written: using {path}", file=sys.stderr)
                for pattern in (".*.partial", "kernels-*/.*.partial"):  # of runs that were killed
                    clear_old(path, pattern, days=1)
                return path.resolve()
    tried = ", ".join(map(str, wanted)) or "no home"
    print(f"no cache folder can be written ({tried}): nothing is kept; set {VARIABLE} to a folder", file=sys.stderr)
    try:
        clear_old(Path(tempfile.gettempdir()), f"{_TEMPORARY}*")
        path = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    except OSError:
        return None
    os.environ[VARIABLE] = str(path)  # for children
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends, too
        shutil.rmtree(path, ignore_errors=True)


def clear_old(folder: Path, pattern: str, days: float = KEPT_DAYS) -> None:
    """Removes what is this user's and was not used for so long."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > days * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
