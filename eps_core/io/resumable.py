"""A JSONL file that a stopped run goes on with: of one run alone, never half a line."""

import json
from collections.abc import Sequence
from typing import Any, Self

from eps_core.errors import ConfigError
from eps_core.io.inputs import MOST_KEPT_BYTES, parse_json
from eps_core.io.outputs import JsonlWriter, Output, to_json
from eps_core.io.schema import REMOVED, current_modes, without_effect

Line = dict[str, Any]
_VERSIONS = ("versions", "git_commit", "platform")  # may differ between starts, and are written at each

_SHORT_CHARACTERS = 30  # as a list of shares


class ResumableFile:
    """The run's line, then what it found, a line each. `found` holds the whole lines that are there.

    A file of the same run is continued, and what a kill left of its last line is cut off; two runs are the same where
    the keys `identity` of their first line are. Nothing is read back from what is no regular file. Made, it refuses;
    only entered it writes.
    """

    def __init__(self, output: Output, first: Line, identity: Sequence[str]) -> None:
        self._output, self._first, self._path = output, first, output.path
        self.found: list[Line] = []
        self._size = 0
        if output.file is not None and output.file.exists():
            if output.file.stat().st_size > MOST_KEPT_BYTES:
                raise ConfigError(f"{self._path} is longer than {MOST_KEPT_BYTES:,} bytes: give another -o")
            self._read(output.file.read_bytes(), identity)

    def _read(self, data: bytes, identity: Sequence[str]) -> None:
        kind = self._first["kind"]
        self.found, self._size = whole_lines(str(self._path), data)
        start = to_json({"type": "run", "kind": kind})[:-1].encode()
        ours = {"type": "run", "kind": kind}.items() <= self.found[0].items() if self.found else (
            data.startswith(start) or start.startswith(data)  # a kill may have left this of the first line
        )  # fmt: skip
        if not ours:
            raise ConfigError(f"{self._path} exists and holds no results of kind {kind}: give another -o")
        if not self.found:
            return
        for name, value in json.loads(to_json({name: self._first[name] for name in identity})).items():
            if found := difference(name, self.found[0].get(name), value):
                raise ConfigError(
                    f"{self._path} holds another run's results: its {found}: ask for the same, or give another -o"
                )

    def indexed(self, kind: str, count: int) -> dict[int, Line]:
        """The lines of type `kind` by their index, 0 to `count` - 1."""
        lines = [line for line in self.found if line.get("type") == kind]
        for line in lines:
            if type(line.get("index")) is not int or not 0 <= line["index"] < count:
                raise ConfigError(
                    f"{self._path} is damaged: a line of type {kind} has index {line.get('index')!r} and the run has "
                    f"{count}: give another -o"
                )
        return {line["index"]: line for line in lines}

    def write(self, record: Line) -> None:
        self._writer.write(record)

    def write_once(self, record: Line) -> None:
        """Unless a run that was stopped had written it."""
        if json.loads(to_json(record)) not in self.found:
            self.write(record)

    def __enter__(self) -> Self:
        self._writer = JsonlWriter(self._output, self._size)
        if not self.found:
            self.write(self._first)
            return self
        now = {name: self._first[name] for name in _VERSIONS}
        last = [line for line in self.found if line.get("type") in ("run", "resume")][-1]
        if any(last.get(name) != value for name, value in json.loads(to_json(now)).items()):
            self.write({"type": "resume", **now})
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


def difference(name: str, there: Any, now: Any) -> str | None:
    """Return how values of JSON differ, by the name of the innermost key, with the values where they are short."""
    if there == now or (name.endswith("head_modes") and current_modes(there) == current_modes(now)):
        return None
    if isinstance(there, dict) and isinstance(now, dict):
        there = {key: value for key, value in there.items() if key not in REMOVED or not without_effect(key, there)}
        keys = dict.fromkeys((*now, *there))
        found = (difference(f"{name}.{key}", there.get(key), now.get(key)) for key in keys)
        return next((one for one in found if one), None)
    short = all(not isinstance(one, dict | list) or len(str(one)) <= _SHORT_CHARACTERS for one in (there, now))
    return f"{name} differs" + (f" ({there} there, {now} now)" if short else "")


def whole_lines(name: str, data: bytes) -> tuple[list[Line], int]:
    """(objects of the whole lines, their bytes): a last line that is torn or no JSON is left out. Raises ConfigError
    where an earlier line is no JSON object."""
    pieces = data.split(b"\n")[:-1]  # what follows the last newline was never finished
    lines: list[Line] = []
    size = 0
    for number, piece in enumerate(pieces, start=1):
        try:
            line = parse_json(piece)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            if number == len(pieces) and lines:
                break
            raise ConfigError(f"{name} line {number} is not a JSON object: it is damaged or not JSONL")
        lines.append(line)
        size += len(piece) + 1
    return lines, size
