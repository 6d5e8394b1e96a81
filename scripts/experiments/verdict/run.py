"""Ship, iterate or kill: a rule applied to measured cells.

Ship needs one variant that, at every context from 32k on that it was measured at, reads at least 10 % fewer bytes, has
a 95th percentile of decode time at least 7 % lower, and loses at most 0.3 points of quality (none in strict mode). Kill
is when no variant saves 5 % of the bytes at 32k to 64k, or when strict mode, at the default epsilon or below, loses
quality anywhere. Between: iterate. Where the data cannot say, the verdict says so and why. A looser strict mode may
lose what it says it may: it is judged as any other variant, and what it loses is a caveat. A verdict holds for the
device whose times decided it, which it names; that of a CPU is a caveat, too, since the rule is meant for GPUs. Quality
is the questions of the cells and, of each context, the mean over the tasks that `eps-proto evaluate` scored and dense
does not fail.

    python scripts/experiments/verdict/run.py grid.jsonl scores.jsonl

Takes JSONL of the experiments grid and methods and of eps-proto evaluate. Prints one JSON object.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.config.cache import EVALUATION_METHODS
from eps_core.config.eps import EpsConfig
from eps_core.errors import exit_code
from eps_core.io.outputs import to_json
from eps_core.io.records import number
from eps_core.report.cells import loss_points, p95_saved_percent, variant_name, whole
from eps_core.report.load import load_results

SHIP, ITERATE, KILL, UNDECIDED = "ship", "iterate", "kill", "not decidable"

LONG_TOKENS = 32_000  # "32k", whether it means 32,000 or 32,768
KILL_MAX_TOKENS = 65_536
SHIP_BYTES_PERCENT = 10.0  # the range asked for is 10 to 20: its lower end decides, the upper is reported
SHIP_BYTES_FULL_PERCENT = 20.0
SHIP_P95_PERCENT = 7.0
KILL_BYTES_PERCENT = 5.0
MAX_LOSS_POINTS = 0.3
STRICT_EPSILON = EpsConfig.of().selection_config.epsilon  # where strict mode must lose nothing
_ROUNDING = 1e-9  # a ratio of 0.9 must be 10 % saved
# what makes two cells the same variant, at different contexts and batches
ARM_KEYS = (
    "method", "policy", "dim", "bits", "group_size", "alpha", "budget", "epsilon", "tau", "first_n", "last_n",
    "num_recent_tokens", "byte_budget", "heads", "strict", "device", "model", "rescore",
    "sink_recent", "scope", "bound_bits", "mean_tokens", "cascade",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of ship, iterate, kill, not decidable. `reasons` decided it; `caveats` qualify it."""

    outcome: str
    reasons: tuple[str, ...]
    caveats: tuple[str, ...] = ()
    variant: str | None = None  # the variant that ships, or the nearest one


@dataclass(frozen=True)
class _Arm:
    """One variant's worst figures over its cells from 32k on; percent and points, None where not measured."""

    name: str
    bytes_saved: float
    p95_saved: float | None
    loss: float | None
    strict: bool  # at an epsilon where nothing may be lost
    num_questions: int
    device: str

    def fails(self) -> list[str]:
        """Return why it cannot ship, from what was measured alone."""
        limit = 0.0 if self.strict else MAX_LOSS_POINTS
        found = []
        if self.bytes_saved < SHIP_BYTES_PERCENT - _ROUNDING:
            found.append(f"saves {self.bytes_saved:.1f} % of the bytes, below {SHIP_BYTES_PERCENT:g} %")
        if self.p95_saved is not None and self.p95_saved < SHIP_P95_PERCENT - _ROUNDING:
            found.append(f"changes p95 by {-self.p95_saved:+.1f} %, where {-SHIP_P95_PERCENT:g} % is asked for")
        if self.loss is not None and self.loss > limit + _ROUNDING:
            found.append(f"loses {self.loss:.2f} points of quality, above {limit:g}")
        return found

    def lacks(self) -> list[str]:
        """Return the names of what was not measured on the device or at all."""
        parts = {"no decode times": self.p95_saved, "no questions answered": self.loss}
        return [name for name, value in parts.items() if value is None]


def decide(cells: Iterable[Mapping[str, Any]], tasks: Iterable[Mapping[str, Any]] = ()) -> Verdict:
    """The verdict on cells as the experiments grid and methods write them, with `device` of their run, and on
    tasks as `eps-proto evaluate` writes them, with the `config` of their run: they are judged with the cells of the
    same settings."""
    tasks = list(tasks)
    measured = [
        cell
        for cell in cells
        if number(cell.get("bytes_ratio")) is not None
        and cell.get("method") not in (*EVALUATION_METHODS, "off")
        and not cell.get("verified")  # whose text is the dense one: it says nothing of EPS's quality
    ]
    if not measured:
        return Verdict(UNDECIDED, ("no measured cell of a method is in the data",))
    losing = [line for line in (*measured, *tasks) if line.get("strict") and (loss_points(line) or 0) > _ROUNDING]
    loose = _losses(cell for cell in losing if not _must_keep(cell))
    verdict = _judge(measured, _losses(cell for cell in losing if _must_keep(cell)), tasks)
    if not loose:
        return verdict
    caveat = f"strict mode at epsilon above {STRICT_EPSILON:g}, which may lose and is not judged as strict: {loose}"
    return replace(verdict, caveats=(*verdict.caveats, caveat))


def _judge(measured: Sequence[Mapping[str, Any]], broken: str, tasks: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict on measured cells and tasks; `broken` says where strict mode lost what it must not."""
    if broken:
        reason = f"strict mode at epsilon {STRICT_EPSILON:g} or below loses quality, where none is allowed: {broken}"
        return Verdict(KILL, (reason,))
    long = [cell for cell in measured if whole(cell.get("context_tokens")) >= LONG_TOKENS]
    if not long:
        most = max(whole(cell.get("context_tokens")) for cell in measured)
        reason = f"the rule speaks of contexts from 32k tokens on, and the longest one measured is {most:,}"
        return Verdict(UNDECIDED, (reason,))
    saved = [_bytes_saved(cell) for cell in long if whole(cell.get("context_tokens")) <= KILL_MAX_TOKENS]
    if saved and max(saved) < KILL_BYTES_PERCENT - _ROUNDING:
        reason = (
            f"no variant saves {KILL_BYTES_PERCENT:g} % of the bytes at 32k to 64k: the best saves {max(saved):.1f} %"
        )
        return Verdict(KILL, (reason,))
    variants = _variants(long, tasks)
    ships = [variant for variant in variants if not variant.fails() and not variant.lacks()]
    if ships:
        best = max(ships, key=lambda variant: (variant.p95_saved or 0, variant.bytes_saved, variant.name))
        assert best.p95_saved is not None and best.loss is not None
        reason = (
            f"{best.name}: {best.bytes_saved:.1f} % fewer bytes, p95 of decode {best.p95_saved:.1f} % lower on "
            f"{best.device}, {best.loss:.2f} points lost"
        )
        return Verdict(SHIP, (reason,), _caveats(best), best.name)
    open_arms = [variant for variant in variants if not variant.fails()]
    if open_arms:
        best = max(open_arms, key=lambda variant: (variant.bytes_saved, variant.name))
        reason = f"{best.name} saves {best.bytes_saved:.1f} % of the bytes, but there are {' and '.join(best.lacks())}"
        return Verdict(UNDECIDED, (reason,), variant=best.name)
    best = min(variants, key=lambda variant: (len(variant.fails()), -variant.bytes_saved, variant.name))
    reason = f"no arm ships; the nearest, {best.name}, {' and '.join(best.fails())}"
    return Verdict(ITERATE, (reason,), variant=best.name)


def task_loss_points(variant: Mapping[str, Any], tasks: Iterable[Mapping[str, Any]]) -> float | None:
    """Points of score that the tasks of a cell's own settings, context and model lose in the mean; None where it has
    none. Another budget is another question: what is lost or kept there says nothing of this one."""
    lost = [
        loss
        for task in tasks
        if variant.get("config")
        and all(variant.get(key) == task.get(key) for key in ("config", "context_tokens", "model"))
        and (loss := loss_points(task)) is not None
    ]  # fmt: skip
    return sum(lost) / len(lost) if lost else None


def _variants(cells: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]) -> list[_Arm]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        setting = cell.get("setting") or {}
        # top_pages as asked: what a budget comes to in groups differs from one context to the next
        key = (*(repr(cell.get(name, setting.get(name))) for name in ARM_KEYS), repr(setting.get("top_pages")))
        groups.setdefault(key, []).append(cell)
    return [
        _Arm(
            name=variant_name(group[0]),
            bytes_saved=min(map(_bytes_saved, group)),
            p95_saved=_worst([p95_saved_percent(cell) for cell in group], min),
            loss=_worst([_loss(cell, tasks) for cell in group], max),
            strict=_must_keep(group[0]),
            num_questions=min(whole(cell.get("num_needles")) for cell in group),
            device=str(group[0].get("device")),
        )
        for group in groups.values()
    ]


def _loss(cell: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the larger of what a cell's questions lose and what its tasks do."""
    both = loss_points(cell), task_loss_points(cell, tasks)
    return max((one for one in both if one is not None), default=None)


def _worst(values: Sequence[float | None], choose: Any) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if len(known) == len(values) else None


def _caveats(variant: _Arm) -> tuple[str, ...]:
    found = []
    if variant.device == "cpu":
        found.append("times are of a CPU: the requirements ask for GPUs")
    if variant.bytes_saved < SHIP_BYTES_FULL_PERCENT:
        found.append(f"the bytes saved are in the required range's lower part, below {SHIP_BYTES_FULL_PERCENT:g} %")
    if variant.num_questions and 100 / variant.num_questions > MAX_LOSS_POINTS:
        found.append(
            f"{variant.num_questions} questions cannot resolve {MAX_LOSS_POINTS:g} points (one is "
            f"{100 / variant.num_questions:.2f}): a benchmark of thousands must confirm the quality"
        )
    return tuple(found)


def _losses(cells: Iterable[Mapping[str, Any]]) -> str:
    """The first three strict cells that lose, in words."""
    found = sorted(
        f"{variant_name(cell)} epsilon {_epsilon(cell):g} at {whole(cell.get('context_tokens')):,} tokens loses "
        f"{loss_points(cell):.2f} points"
        for cell in cells
    )
    return "; ".join(found[:3])


def _must_keep(cell: Mapping[str, Any]) -> bool:
    """Return whether a cell measured strict mode at the default epsilon or below."""
    return bool(cell.get("strict")) and _epsilon(cell) <= STRICT_EPSILON


def _epsilon(cell: Mapping[str, Any]) -> float:
    """Return the epsilon of a strict cell, its own or the one asked for; the default where it says nothing."""
    given = (number(one.get("epsilon")) for one in (cell, cell.get("setting") or {}))
    return next((one for one in given if one is not None), STRICT_EPSILON)


def _bytes_saved(cell: Mapping[str, Any]) -> float:
    ratio = number(cell["bytes_ratio"])
    assert ratio is not None
    return 100 * (1 - ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="JSONL")
    results = load_results(parser.parse_args().results)
    for note in results.notes:
        print(f"note: {note}", file=sys.stderr)
    print(to_json(asdict(decide(results.cells, results.tasks))))


if __name__ == "__main__":
    sys.exit(exit_code(main))
