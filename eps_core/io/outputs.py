"""The one writer: what may be written to and by whom, lines, whole files."""

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from eps_core.errors import ConfigError, require
from eps_core.io.inputs import STDIN

# what a model's folder is read for: an output of such a name in it would change or become the model
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".bin")
# errors of file systems that have no locks: there two writers are the user's to keep apart
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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


# --- what may be written to -------------------------------------------------------------------------------------------


def regular_file(path: Path) -> Path | None:
    """The regular file that `path` is or will be, links followed; None where it is something to be written into and
    never replaced: a device, a pipe, what stdout or stderr are."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return Path(os.path.realpath(path))  # also where a link points at nothing yet
    if not stat.S_ISREG(found.st_mode) or _standard(found) is not None:
        return None
    file = Path(os.path.realpath(path))
    # of an open file that was deleted, /proc names one that is not there
    return file if file.exists() and os.path.samestat(found, os.stat(file)) else None


def _standard(found: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr, where the file is what one of them is."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _place(path: Path, what: str) -> Path | None:
    """`regular_file` of what may be created, replaced or written into by its kind, else ConfigError."""
    if path == STDIN:
        raise ConfigError(f"{what} - is no file: name one, or /dev/stdout")
    try:
        file = regular_file(path)
        if file is not None:
            if not file.parent.is_dir():
                raise ConfigError(f"{what} {path}: there is no directory {file.parent}; create it first")
            if file.exists():
                with open(file, "ab"):
                    pass
            return file
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{what} {path} is a directory: name a file in it")
        if _standard(found) is None:
            if stat.S_ISBLK(found.st_mode) or stat.S_ISSOCK(found.st_mode):
                raise ConfigError(f"{what} {path} is a disk or a socket: name a file, a pipe or a terminal")
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be written ({error.strerror}): choose another path") from error
    return None


def check(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | Sequence[Path] | None]) -> None:
    """Raises ConfigError unless every output can be written and is no input and no other output, however any of them is
    spelled or linked. Both by the flag that gave them. A directory among the inputs is a model's."""
    taken: dict[Any, str] = {}
    folders: dict[Path, str] = {}
    for flag, given in inputs.items():
        for source in [given] if isinstance(given, Path) else given or ():
            name = f"{flag} {source}"
            if source == STDIN:
                with suppress(OSError, ValueError):
                    taken[_same(os.fstat(0))] = name
                continue
            with suppress(OSError):  # what cannot be looked at is named by who reads it
                if not source.is_dir():
                    taken[_identity(source)] = name
                    continue
                folders[Path(os.path.realpath(source))] = name
                taken |= {
                    _identity(file): f"{file.name} of {name}"
                    for file in source.iterdir()
                    if file.suffix in MODEL_SUFFIXES
                }
    for flag, path in outputs.items():
        if path is None:
            continue
        with Output(path, flag) as output:  # nobody else is writing it; leaves nothing behind
            file = output.file
        if file is None:
            continue
        there = taken.get(_identity(file))
        if there is None and file.suffix in MODEL_SUFFIXES and file.parent in folders:
            there = f"part of {folders[file.parent]}"
        if there is not None:
            raise ConfigError(f"{flag} {path} is {there}, which it would destroy: give another path")
        taken[_identity(file)] = f"{flag} {path}"


# for `check_start`
METRICS = b'{"type": "run", "config": ', "JSONL of run --metrics"
PAGE = b"<", "HTML page"


def check_start(flag: str, path: Path | None, start: bytes, kind: str, skipped: int = 0) -> None:
    """Raises ConfigError where `path` is a file that holds something else than what begins, `skipped` bytes on, with
    `start`, as the command's own files do: a result of another command, or the first of a list of inputs that a shell
    wrote behind `flag`, would be lost."""
    file = None if path is None else regular_file(path)
    if file is None or not file.is_file():
        return
    try:
        with open(file, "rb") as opened:
            found = opened.read(64)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror}): give another path") from error
    if found.strip() and not found[skipped:].lstrip().startswith(start):
        raise ConfigError(f"{flag} {path} is there and is no {kind}: give another path, or remove it")


def check_distinct(what: str, paths: Sequence[Path]) -> None:
    """Raises ConfigError where a file is given twice, however it is spelled or linked: it would count twice."""
    found: dict[Any, Path] = {}
    for path in paths:
        with suppress(OSError):  # what cannot be looked at is named by who reads it
            other = found.setdefault(_identity(path), path)
            require(other is path, f"{what} {path} is given twice, also as {other}, and would count twice: drop one")


def _identity(path: Path) -> Any:
    """Equal for two spellings of one regular file; of no other file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return os.path.realpath(path)
    return _same(found)


def _same(found: os.stat_result) -> Any:
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else object()


# --- writing ----------------------------------------------------------------------------------------------------------


class _File(io.FileIO):
    """A raw file to write to, whose errors name `path`."""

    def __init__(self, handle: int, path: Path) -> None:
        super().__init__(handle, "wb")
        self.path = path

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return written
        except OSError as error:
            raise _failed(self.path, error) from error

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # some file systems tell only now that there was no room
            raise _failed(self.path, error) from error


def _failed(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror or error}): make room or choose another path")


class Output:
    """A place to write to, this process's alone until it is closed: a second writer is refused.

    The lock is on the partial file beside the place, which is there meanwhile, goes when this is closed and, where a
    kill left it, is cleared by the next writer. What is no regular file is written into, unlocked.
    """

    def __init__(self, path: Path, what: str = "output file") -> None:
        self.path, self.file = path, _place(path, what)
        self._partial: Path | None = None
        if self.file is not None:
            # its own for every name, and short: a name may be as long as the file system takes
            name = self.file.name
            digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
            partial = self.file.with_name(f".{name[:40]}.{digest}.partial")
            self._handle = _lock(partial, path, what)
            self._partial = partial

    @property
    def is_stdout(self) -> bool:
        return self.file is None and _standard(os.stat(self.path)) == 1

    def open(self) -> _File:
        """To write what shows at once; what is there stays."""
        try:
            if self.file is not None:
                return _File(os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o666), self.path)
            standard = _standard(os.stat(self.path))
            if standard is None:
                return _File(os.open(self.path, os.O_WRONLY), self.path)
            # opened again it may be another user's, and would be written from its start
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            return _File(os.dup(standard), self.path)
        except OSError as error:
            raise _failed(self.path, error) from error

    @contextmanager
    def replacing(self, mode: str = "w") -> Iterator[IO[Any]]:
        """A file that becomes `path` when the block ends, and is gone where the block fails."""
        raw = self.open() if self._partial is None else _File(os.dup(self._handle), self.path)
        binary = io.BufferedWriter(raw)
        with binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
            yield file
        if self._partial is not None and self.file is not None:
            try:
                with suppress(OSError):  # it is new, or its file system has no such modes
                    os.fchmod(self._handle, stat.S_IMODE(os.stat(self.file).st_mode))
                os.replace(self._partial, self.file)
            except OSError as error:
                raise _failed(self.path, error) from error
            self._partial = None

    def close(self) -> None:
        if self.file is not None:
            if self._partial is not None:
                self._partial.unlink(missing_ok=True)
            os.close(self._handle)
            self.file = self._partial = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _lock(partial: Path, path: Path, what: str) -> int:
    """The descriptor of a new, empty, locked file at `partial`; what a killed writer left there is cleared. Raises
    ConfigError where a writer is at work."""
    while True:
        try:
            handle, new = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                handle, new = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW), False
            except FileNotFoundError:
                continue  # its writer has just ended
            except OSError as error:
                raise ConfigError(
                    f"{what} {path} cannot be written ({error.strerror}: {partial}): remove that file"
                ) from error
        except OSError as error:
            raise ConfigError(f"{what} {path} cannot be written ({error.strerror}): choose another path") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not new or error.errno not in _NO_LOCKS:
                os.close(handle)
                raise ConfigError(
                    f"{what} {path} is being written by another process, says {partial.name}: wait, or give another "
                    "path"
                ) from error
        with suppress(FileNotFoundError):
            # its writer may have renamed or removed it, or another have cleared it, before it was locked
            if os.path.samestat(os.fstat(handle), os.lstat(partial)):
                if new:
                    return handle
                partial.unlink()
        os.close(handle)


@contextmanager
def replacing(place: Path | Output, mode: str = "w") -> Iterator[IO[Any]]:
    """`Output.replacing`; a path is locked as long."""
    with nullcontext(place) if isinstance(place, Output) else Output(place) as output, output.replacing(mode) as file:
        yield file


class JsonlWriter:
    """One object a line, each there as soon as it is written. Of what the file holds the first `kept_bytes` stay; None:
    all."""

    def __init__(self, output: Output, kept_bytes: int | None = 0) -> None:
        self._file = output.open()
        self._regular = output.file is not None  # what is none cannot be cut off
        if self._regular:
            self._cut(self._file.seek(0, os.SEEK_END) if kept_bytes is None else kept_bytes)

    def write(self, *records: dict[str, Any]) -> None:
        """In one unbuffered write: a killed run leaves whole lines only."""
        lines = "".join(to_json(record) + "\n" for record in records).encode()
        start = self._file.tell() if self._regular else 0
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            # a full disk takes part of a line: take it back; a line that Ctrl-C came after is whole, and stays
            if self._regular and self._file.tell() < start + len(lines):
                self._cut(start)
            raise

    def _cut(self, size: int) -> None:
        with suppress(OSError):
            self._file.truncate(size)
            self._file.seek(size)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
