"""Result files of every kind, read into what the page shows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from eps_core.errors import ConfigError
from eps_core.io import inputs
from eps_core.io.schema import current
from eps_core.report.kinds import Line, clean

MOST_NOTES = 50  # of one file
_COUNTED = (
    "run", "resume", "cell", "failed", "step", "round", "summary", "sample", "document", "task", "text", "context",
)  # fmt: skip


@dataclass
class Results:
    """The contents of the files. Cells carry `device` and `model` of their run; `notes` say what could not be read."""

    names: list[str] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # file -> type -> lines
    cells: list[Line] = field(default_factory=list)
    failed: list[Line] = field(default_factory=list)  # cells of a grid that were not measured since
    runs: list[Line] = field(default_factory=list)  # of run --metrics: {"run", "steps", "summary"}
    tasks: list[Line] = field(default_factory=list)  # of evaluate, with the settings and the model of their run
    texts: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def drawn(self) -> bool:
        return any((self.cells, self.failed, self.runs, self.tasks, self.texts))


def load_results(paths: Iterable[Path]) -> Results:
    """Every line of every file, by type. A damaged line and an unknown type are noted, an absent file is refused."""
    results = Results()
    for path in paths:
        name = path.name if path.name not in results.counts else str(path)
        results.names.append(name)
        results.counts[name] = _load(results, name, path)
    return results


def _load(results: Results, name: str, path: Path) -> dict[str, int]:
    counts: Counter[str] = Counter()
    run: Line = {}
    open_run: Line | None = None
    failed: dict[str, Line] = {}  # by the cell's index
    notes: list[str] = []
    for number, piece in inputs.read_lines(path, "results", "give a JSONL file"):
        try:
            line = inputs.parse_json(piece)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            notes.append(f"{name}, line {number}: not a JSON object, left out")
            continue
        try:
            line, faults = clean(current(line))
        except ConfigError as error:
            notes.append(f"{name}, line {number}: {error}, left out")
            continue
        notes += [f"{name}, line {number}: {fault}, left out" for fault in faults]
        kind = line.get("type") or "(no type)"
        counts[kind] += 1
        if kind == "run":
            run = line
            open_run = {"file": name, "run": line, "steps": [], "summary": {}}
        elif kind == "cell":
            inherited: Line = {key: run[key] for key in ("device", "model", "context_tokens") if key in run}
            results.cells.append({**inherited, **line, "file": name})
            failed.pop(repr(line.get("index")), None)
        elif kind == "failed":
            failed[repr(line.get("index"))] = line
        elif kind in ("task", "text"):
            config = run.get("config")
            made = {**(config or {}), "config": config, "model": run.get("model"), **line, "file": name}
            (results.tasks if kind == "task" else results.texts).append(made)
        elif kind in ("step", "round", "summary"):
            if open_run is None:
                open_run = {"file": name, "run": {}, "steps": [], "summary": {}}
            if open_run not in results.runs[-1:]:
                results.runs.append(open_run)
            if kind != "summary":
                open_run["steps"].append(line)
            else:
                open_run["summary"] = line
    results.notes += notes[:MOST_NOTES]
    if len(notes) > MOST_NOTES:
        results.notes.append(f"{name}: {len(notes) - MOST_NOTES:,} more such values and lines")
    results.failed += failed.values()
    for kind, whole in (("sample", "task"), ("document", "text")):
        if counts[kind] and not counts[whole]:
            results.notes.append(f"{name}: {counts[kind]} of type {kind} and no {whole}: evaluate was stopped")
    if not counts:
        results.notes.append(f"{name} holds no results")
    unknown = [f"{count} of type {kind}" for kind, count in sorted(counts.items()) if kind not in _COUNTED]
    if unknown:
        results.notes.append(f"{name}: lines that this page does not draw: {', '.join(unknown)}")
    return dict(sorted(counts.items()))
