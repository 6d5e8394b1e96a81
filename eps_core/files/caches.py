"""The one owner of what is kept between runs: compiled kernels, measured costs. All of it can be remade, so whatever is
wrong with a cache costs time and never a run."""

import functools
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "EPS_CACHE_DIR"


def folder() -> Path:
    """Where caches are, made and writable: `EPS_CACHE_DIR`, else the user's cache folder, else a temporary one of this
    process alone, with one line on stderr."""
    wanted = [Path(os.environ[VARIABLE])] if os.environ.get(VARIABLE) else []
    with suppress(RuntimeError):  # a user without a home
        wanted.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eps")
    return _first_writable(tuple(wanted))


@functools.cache
def _first_writable(wanted: tuple[Path, ...]) -> Path:
    for path in wanted:
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path) as file:
                file.write(b"\0")
            return path.resolve()
        except (OSError, ValueError):
            continue
    path = Path(tempfile.mkdtemp(prefix="eps-cache-"))
    tried = ", ".join(map(str, wanted)) or "no home"
    print(f"no cache folder can be written ({tried}): keeping nothing; set {VARIABLE} to a folder", file=sys.stderr)
    return path
