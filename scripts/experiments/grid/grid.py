"""A grid of runs: the file that survives a kill, and which cells are still to be measured.

A cell is one setting of context, batch, method and policy (`grid_settings`); `grid_cell` measures it.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.errors import ConfigError, fault_line
from eps_core.io.outputs import to_json
from eps_core.io.resumable import Line, ResumableFile, difference
from eps_core.metrics import provenance, terminal
from eps_core.tasks.corpus import SHA256
from experiments.grid.grid_cell import Bench, Plan
from experiments.grid.grid_settings import HeadModes, Setting, config_of, speculative_of

# what two runs must share to be one grid
IDENTITY = ("grid", "model", "model_id", "backend", "device", "dtype", "plan", "head_modes", "corpus")


def header(
    cells: Sequence[Setting], plan: Plan, head_modes: HeadModes | None, versions: dict[str, str], **identity: Any
) -> dict[str, Any]:
    """The first line: all that is needed to run the grid again."""
    return {
        "type": "run",
        "kind": "grid",
        "grid": [asdict(cell) for cell in cells],
        "plan": asdict(plan),
        "head_modes": head_modes,
        "corpus": SHA256,
        **identity,
        **provenance.provenance(versions),
    }


def cell_line(index: int, setting: Setting, config: EpsConfig | None, numbers: dict[str, Any]) -> Line:
    """One finished cell: what was asked, what it resolved to (None where impossible), what was measured."""
    same = ("batch", "method", "policy", "scope", "heads", "strict")
    resolved: dict[str, Any] = dict.fromkeys(("bits", "alpha", "sink_recent", "cascade", "epsilon"))
    if config is None:
        given = ("dim", "group_size", "top_pages", "mean_tokens", "rescore", "bound_bits")
        resolved |= {name: getattr(setting, name) for name in given}
    else:
        kept, selection = config.cache_config, config.selection_config
        resolved |= {
            "dim": kept.dim, "bits": kept.code_bits, "group_size": kept.S, "mean_tokens": kept.mean_tokens or None,
            "bound_bits": kept.bound_bits, "rescore": selection.rescore,
            "alpha": selection.alpha if selection.policy == "threshold" else None, "top_pages": selection.top_pages,
            "sink_recent": [selection.num_sink_tokens, selection.num_recent_tokens],
            "cascade": list(selection.cascade) or None, "epsilon": selection.epsilon if selection.strict else None,
        }  # fmt: skip
    return {
        "type": "cell",
        "index": index,
        "setting": asdict(setting),
        "config": config.to_dict() if config else None,  # all of it, defaults too: `check_settings` asks for it
        "context_tokens": setting.context,
        **{name: getattr(setting, name) for name in same},
        **resolved,
        "verified": None,  # how, of a cell of verified decoding
        "skipped": None,
        **numbers,
    }


_MEND = "give another -o, or go on with the version that its first line names"


def check_settings(
    cells: Sequence[Setting], head_modes: HeadModes | None, finished: Mapping[int, Line], path: Path
) -> None:
    """Raises ConfigError where a cell of the file at `path` was measured with other settings than it resolves to now: a
    default has changed since, and the file would hold both."""
    for index, line in finished.items():
        if line.get("skipped") is not None:
            continue
        setting = cells[index]
        name = f"cell {index} ({setting.method}, context {setting.context})"
        try:
            config = config_of(setting, head_modes)
            verify = speculative_of(setting, config)
        except ConfigError as error:
            raise ConfigError(f"{path} holds {name}, which is impossible now ({error}): {_MEND}") from error
        found = difference("config", line.get("config"), json.loads(to_json(config.to_dict())))
        found = found or difference("verified", line.get("verified"), verify.to_dict() if verify.enabled else None)
        if found:
            raise ConfigError(f"{path} was begun with other defaults: of {name} {found}: {_MEND}")


class Progress:
    """Cells done of all and the time left. `bar` is what shows it."""

    def __init__(self, cells: Sequence[Setting], finished: set[int], stream: Any = None) -> None:
        self.bar = terminal.Progress("grid:", "cells", stream, every_s=0)
        self.total, self.done = len(cells), len(finished)
        # a cell's time grows with the tokens it attends
        self.left = {i: cell.context * cell.batch for i, cell in enumerate(cells) if i not in finished}
        self.seconds = 0.0
        self.measured = 0

    def __call__(self, index: int, seconds: float | None) -> None:
        """`seconds` None: the cell was skipped."""
        weight = self.left.pop(index)
        self.done += 1
        if seconds is not None:
            self.seconds += seconds
            self.measured += weight
        left = ""
        if self.measured and self.left:
            left = f"about {terminal.duration(self.seconds / self.measured * sum(self.left.values()))} left"
        if seconds is not None or not self.left:
            self.bar(self.done, self.total, left)


@dataclass
class Counts:
    """Counts of one start of a grid: cells measured, and reasons of those that were not, with how many there are.

    Skipped cells are impossible as they are set, and finished with that. Failed ones were not for want of memory or by
    a fault, and are tried again when the grid is.
    """

    measured: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def reasons(self) -> list[str]:
        """A line for each."""
        return [
            f"{count} of the cells {what}: {reason}"
            for what, reasons in (("skipped", self.skipped), ("failed", self.failed))
            for reason, count in reasons.most_common()
        ]


def run_cells(
    bench: Bench,
    cells: Sequence[Setting],
    head_modes: HeadModes | None,
    file: ResumableFile,
    finished: set[int],
    progress: Progress,
) -> Counts:
    """Measures what is not `finished`, cells of one context and batch after each other, and writes each when it is
    done. A cell that cannot be run is written with the reason, and the grid goes on."""
    counts = Counts()
    pending = [index for index in range(len(cells)) if index not in finished]
    plans: dict[int, tuple[EpsConfig, SpeculativeConfig]] = {}

    def skip(index: int, config: EpsConfig | None, why: str) -> None:
        reason = " ".join(why.split())
        file.write(cell_line(index, cells[index], config, {"skipped": reason}))
        counts.skipped[reason] += 1
        progress(index, None)

    for index in pending:
        try:
            config = config_of(cells[index], head_modes)
            verify = speculative_of(cells[index], config)
        except ConfigError as error:
            skip(index, None, str(error))
            continue
        reason = bench.why_not(cells[index], config)
        if reason is not None:
            skip(index, config, reason)
        else:
            plans[index] = config, verify
    for index in sorted(plans, key=lambda i: (cells[i].context, cells[i].batch, i)):
        started = time.perf_counter()
        try:
            config, verify = plans[index]
            if verify.enabled:
                numbers = {"verified": verify.to_dict(), **bench.measure_verified(cells[index], config, verify)}
            else:
                numbers = bench.measure(cells[index], config)
        except (MemoryError, RuntimeError, ValueError) as error:
            # an error of a value alone is the cell's own: no such document, NaN in K. What the machine did comes first
            # in a chain: a cache that it could not allocate is refused, too
            if isinstance(error, ValueError) and error.__cause__ is None:
                skip(index, config, str(error))
                continue
            reason = fault_line(error)
            file.write({"type": "failed", "index": index, "setting": asdict(cells[index]), "reason": reason})
            counts.failed[reason] += 1
            progress(index, None)
            continue
        seconds = time.perf_counter() - started
        file.write(cell_line(index, cells[index], config, {**numbers, "seconds": round(seconds, 3)}))
        counts.measured += 1
        progress(index, seconds)
    return counts
