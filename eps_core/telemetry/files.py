"""JSONL files: one writer, one first line that says what ran."""

import json
import math
import platform
import subprocess
import tempfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import eps_core
from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.errors import ConfigError


def jsonable(value: Any) -> Any:
    """Plain JSON values: numpy becomes Python, NaN and infinities become None."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def to_json(record: dict[str, Any]) -> str:
    return json.dumps(jsonable(record), allow_nan=False)


class JsonlWriter:
    """Appends one object a line, each in one unbuffered write: a killed run leaves whole lines only."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._size_bytes = 0

    def write(self, record: dict[str, Any]) -> None:
        line = (to_json(record) + "\n").encode()
        written = self._file.write(line)
        if written != len(line):  # a full disk takes part of a line: take it back
            self._file.truncate(self._size_bytes)
            raise OSError(f"{self._file.name}: only {written} of {len(line)} bytes could be written")
        self._size_bytes += written

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError unless `path` can be created or replaced; leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{what} {path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{what} {path}: there is no directory {path.parent}; create it first")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
        if path.exists():
            with open(path, "ab"):
                pass
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be written ({error.strerror}): choose another path") from error


def run_line(
    config: EpsConfig, spec: CacheSpec, backend: str, device: str, model: str, versions: dict[str, str], **more: Any
) -> dict[str, Any]:
    """The first line of a JSONL: all that is needed to run it again."""
    return {
        "type": "run",
        "config": config.to_dict(),
        "cache": {f.name: getattr(spec, f.name) for f in fields(spec)},
        "backend": backend,
        "device": device,
        "model": model,
        "versions": {"eps": package_version(), "python": platform.python_version(), **versions},
        "git_commit": git_commit(),
        "platform": platform.platform(),
        **more,
    }


def package_version() -> str | None:
    try:
        return metadata.version("eps")
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, "-dirty" if changed; None where it is not a checkout."""
    root = Path(eps_core.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
