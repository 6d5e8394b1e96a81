"""The content of a line of results, as `kinds.clean` leaves it: its names, values and texts; fields may be absent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eps_core.evaluation.quality import MIN_DENSE_SCORE
from eps_core.io.records import number
from eps_core.report.kinds import Line
from eps_core.summaries.table import method_spec


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def table_of(lines: Iterable[Any], columns: Sequence[tuple[str, Callable[[Any], str]]]) -> Table:
    """A row for each line, a column for each (head, text of a line)."""
    return Table([head for head, _ in columns], [[text(line) for _, text in columns] for line in lines])


def whole(value: Any) -> int:
    return int(number(value) or 0)


def asked(cell: Line, name: str) -> Any:
    given = cell.get(name)
    return given if given is not None else (cell.get("setting") or {}).get(name)


def context(cell: Line) -> int:
    return whole(cell.get("context_tokens"))


def batch(cell: Line) -> int:
    return whole(cell.get("batch")) or 1


def accuracy(cell: Line) -> float | None:
    answered, total = number(cell.get("needles_answered")), number(cell.get("num_needles"))
    return 100 * answered / total if answered is not None and total else None


def map_of(value: Any) -> np.ndarray | None:
    """[L, Hkv] or None where it was not measured or its rows are not alike."""
    if not value or not value[0] or len(set(map(len, value))) > 1:
        return None
    return np.array(value, float)


def sorted_points(points: Iterable[tuple[Any, float | None]]) -> list[tuple[float, float]]:
    return sorted((float(x), y) for x, y in points if y is not None and x is not None)


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return dict(sorted(groups.items()))


def titled(cells: list[Line]) -> list[tuple[str, list[Line]]]:
    """Cells of one context and model, by a title that names what differs."""
    groups = grouped(cells, lambda cell: (context(cell), str(cell.get("model") or "no model named")))
    several_models = len({model for _, model in groups}) > 1
    found = []
    for (tokens, model), group in groups.items():
        title = f"Context {tokens:,} tokens" if tokens else "Context not recorded"
        found.append((title + (f", {model}" if several_models else ""), group))
    return found


def method(cell: Line) -> str:
    return str(cell.get("method") or cell.get("policy") or "not named")


def run_setting(run: Line, name: str) -> str:
    return str((run["run"].get("config") or {}).get(name) or "?")


def variant(cell: Line) -> str:
    """The variant's name; of a comparison of policies alone, the policy's."""
    if cell.get("method"):
        return variant_name(cell)
    return f"policy {cell['policy']}" if cell.get("policy") else "not named"


def variant_name(cell: Mapping[str, Any]) -> str:
    """Return the name of a cell's variant: the method and the settings that the cell has."""
    name = str(cell.get("method", "?"))
    if cell.get("bits") is not None:
        name += f" {cell['bits']} bit"
    if cell.get("dim") is not None:
        name += f" dim {cell['dim']}"
    if cell.get("group_size") is not None:
        name += f" S={cell['group_size']}"
    if number(cell.get("rescore")):
        name += " +1 bit"
    if number(cell.get("mean_tokens")):
        name += f" about {cell['mean_tokens']:g}" + ("" if cell.get("cascade") else ", whole")
    sink_recent = cell.get("sink_recent")
    if (
        isinstance(sink_recent, (list, tuple))
        and tuple(sink_recent) != method_spec(str(cell.get("method"))).sink_recent
    ):
        name += f" sink and recent tokens {'+'.join(map(str, sink_recent))}"
    if number(cell.get("bound_bits")):
        name += f" {cell['bound_bits']} bit bounds"
    if cell.get("scope") == "union":
        name += " union"
    if cell.get("heads") == "retrieval":
        name += " retrieval heads"
    return name + (" strict" if cell.get("strict") else "")


def loss_points(cell: Mapping[str, Any]) -> float | None:
    """Return the questions answered densely less those answered sparse, in points (percent of all questions); below 0
    is a gain. Of a task it is the mean score that is lost; None where dense itself fails it."""
    if cell.get("type") == "task":
        change, score = number(cell.get("eps_minus_dense")), number(cell.get("dense")) or 0
        return None if change is None or score < MIN_DENSE_SCORE else -100 * change
    total, dense, sparse = (number(cell.get(key)) for key in ("num_needles", "needles_dense", "needles_answered"))
    if not total or dense is None or sparse is None:
        return None
    return 100 * (dense - sparse) / total


def p95_saved_percent(cell: Mapping[str, Any]) -> float | None:
    """Return how much lower the 95th percentile of decode time is, in percent of dense, on the cell's device; None
    where it was not measured, or the device is unknown."""
    dense, sparse = number(cell.get("dense_decode_ms_p95")), number(cell.get("decode_ms_p95"))
    if not dense or sparse is None or cell.get("device") is None:
        return None
    return 100 * (1 - sparse / dense)


def curve_name(cell: Line) -> str:
    """Return the name of what stays along a curve whose budget changes."""
    name, policy = variant(cell), cell.get("policy")
    if not cell.get("method") and cell.get("scope") == "union":
        name += " union"
    if policy in (None, "topk") or not cell.get("method"):
        return name
    given = (("alpha", asked(cell, "alpha")), ("last", asked(cell, "last_n")))
    return f"{name} {policy}" + "".join(f" {label} {value:g}" for label, value in given if number(value) is not None)


def policy(cell: Line) -> str:
    """The policy with what it was given, of what means something to it."""
    names = ("budget", "budget_floor", "byte_budget", "alpha", "epsilon", "tau", "last_n")
    means = {
        "alpha": cell.get("policy") == "threshold",
        "epsilon": asked(cell, "strict"),
        "budget_floor": asked(cell, "budget_floor"),
    }
    given = [
        f"{name.replace('_', '-')} {asked(cell, name):g}"
        for name in names
        if number(asked(cell, name)) is not None and means.get(name, True)
    ]
    return " ".join([str(cell.get("policy") or "topk"), *given])


def form(value: Any, spec: str, factor: float = 1) -> str:
    found = number(value)
    return "–" if found is None else format(factor * found, spec)


def field(name: str, spec: str, factor: float = 1) -> Callable[[Line], str]:
    return lambda line: form(line.get(name), spec, factor)


def out_of_needles(name: str) -> Callable[[Line], str]:
    def text(cell: Line) -> str:
        part, total = cell.get(name), cell.get("num_needles")
        return "–" if number(part) is None or not number(total) else f"{whole(part)} of {whole(total)}"

    return text
