"""Which of the GPU targets a benchmark's records meet."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from eps_core.bench.layer import GRAPH
from eps_core.errors import ConfigError, exit_code
from eps_core.io import inputs
from eps_core.io.records import Between, Count, Name, Positive, read_record

Line = dict[str, Any]


# the kinds of what is read back of a run's line and of a cell's
RUN = {"backend": Name, "device": Name, "bandwidth": {"copy_gbps": Positive}}
CELL = {
    **dict.fromkeys(("context", "batch", "group_size"), Count), **dict.fromkeys(("method", "best_dense"), Name),
    "asked": dict[str, Positive], "arms": dict[str, Any], "best_dense_ms": Positive,
    "graphed_step_ms": Positive | None, "interpreted": bool,
}  # fmt: skip
ARM = {"ms": Positive, "bytes": Annotated[float, Between(0, 1e18)] | None}
MEND = "give what eps-proto bench -o wrote"
LARGE_TOKENS = 4 * 65536  # context x batch from which a launch no longer hides what the memory gives
# group size in tokens -> least share of the measured copy bandwidth
ATTEND_SHARES = {128: 0.85, 2: 0.65, 4: 0.65}
STEP_CONTEXT, STEP_BATCH, STEP_BYTES, STEP_METHOD = 65536, 4, 0.1, "rq"
STEP_SPEEDUP, SCORING_SHARE = 5.0, 0.06


@dataclass(frozen=True)
class Target:
    """`passed` is None where times mean nothing."""

    name: str
    passed: bool | None
    measured: str


def load_lines(paths: Iterable[Path]) -> tuple[list[Line], list[Line]]:
    """(the runs' lines, the cells with their run's bandwidth)."""
    runs: list[Line] = []
    cells: list[Line] = []
    for path in paths:
        run: Line | None = None
        for place, line in inputs.read_jsonl(path, "results", MEND):
            if line.get("type") == "run" and line.get("command") == "bench":
                run = read_record(RUN, line, place, MEND)
                runs.append(run)
            elif line.get("type") == "bench" and run is not None:
                cell = read_record(CELL, line, place, MEND)
                variants = {
                    name: read_record(ARM, variant, f"{place}: variant {name}", MEND)
                    for name, variant in cell["arms"].items()
                }
                cells.append({**cell, "arms": variants, "where": place, "bandwidth": run["bandwidth"]})
    return runs, cells


def judge(cells: list[Line]) -> list[Target]:
    """Every target with what was measured. Graphs count where there are any: an engine replays them."""
    meaningful = not any(cell["interpreted"] for cell in cells)
    targets = []
    for size, least in ATTEND_SHARES.items():
        large = [c for c in cells if c["group_size"] == size and c["context"] * c["batch"] >= LARGE_TOKENS]
        shares = [
            (_variant(cell, "attend").get("bytes") or 0)
            / _variant(cell, "attend")["ms"]
            / 1e6
            / cell["bandwidth"]["copy_gbps"]
            for cell in large
        ]
        measured = f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %, {len(shares)} cells" if shares else ""
        name = f"sparse attention of {size}-token groups reaches {100 * least:.0f} % of the copy bandwidth"
        targets.append(_target(name, meaningful, measured, bool(shares) and min(shares) >= least))
    here = [
        cell
        for cell in cells
        if (cell["context"], cell["batch"], cell["method"]) == (STEP_CONTEXT, STEP_BATCH, STEP_METHOD)
        and cell["asked"].get("bytes") == STEP_BYTES
    ]
    place = f"{STEP_METHOD}, {STEP_CONTEXT // 1024}k, batch {STEP_BATCH}, {100 * STEP_BYTES:.0f} % of the bytes"
    best = max(here, key=lambda cell: cell["best_dense_ms"] / _variant(cell, "step")["ms"], default=None)
    speedup = scoring = 0.0
    texts = ["", ""]
    if best is not None:
        dense_ms, step_ms = best["best_dense_ms"], _variant(best, "step")["ms"]
        speedup = dense_ms / step_ms
        scoring = (_variant(best, "score")["ms"] + _variant(best, "select")["ms"]) / dense_ms
        texts[0] = f"{speedup:.2f}x: {step_ms:.3f} ms, {best['best_dense']} {dense_ms:.3f} ms, {_name(best)}"
        texts[1] = f"{100 * scoring:.1f} %, {_name(best)}"
    targets.append(
        _target(f"a step is {STEP_SPEEDUP:g}x the fastest dense variant ({place})", meaningful, texts[0],
                best is not None and speedup >= STEP_SPEEDUP),
    )  # fmt: skip
    targets.append(
        _target(f"score and select take {100 * SCORING_SHARE:.0f} % of the dense time ({place})", meaningful, texts[1],
                best is not None and scoring <= SCORING_SHARE),
    )  # fmt: skip
    steps = [cell for cell in cells if cell["method"] == STEP_METHOD]
    captured = sum(cell["graphed_step_ms"] is not None for cell in steps)
    name = f"the whole step of {STEP_METHOD} is captured in a CUDA graph"
    measured = f"{captured} of {len(steps)} cells" if steps else ""
    targets.append(_target(name, meaningful, measured, bool(steps) and captured == len(steps)))
    return targets


def _target(name: str, meaningful: bool, measured: str, passed: bool) -> Target:
    if not meaningful:
        return Target(name, None, "interpreted: times mean nothing")
    return Target(name, passed, measured or "not measured")


def _variant(cell: Line, name: str) -> Line:
    return arm_of(cell, name + GRAPH, name)


def arm_of(cell: Line, *names: str) -> Line:
    """The first of these variants that a cell has."""
    for name in names:
        if name in cell["arms"]:
            variant: Line = cell["arms"][name]
            return variant
    raise ConfigError(f"{cell['where']}: no variant {names[-1]}: {MEND}")


def _name(cell: Line) -> str:
    return f"{cell['method']}@{cell['group_size']}"


def main(paths: list[Path]) -> int:
    """Prints every target; 0: all met or none judged, 1: some missed, 2: unusable input."""
    return exit_code(lambda: _main(paths))


def _main(paths: list[Path]) -> int:
    runs, cells = load_lines(paths)
    if not cells:
        raise ConfigError(f"{', '.join(map(str, paths)) or 'no file'}: no cells of bench: {MEND}")
    targets = judge(cells)
    for run in runs:
        known = (str(run.get(name))[:200] for name in ("device_name", "versions", "git_commit"))
        print("{} on {} ({}), {}, {}".format(run["backend"], run["device"], *known))
    for target in targets:
        word = {True: "pass", False: "FAIL", None: "----"}[target.passed]
        print(f"{word}  {target.name}: {target.measured}")
    print(json.dumps({"targets": [vars(target) for target in targets]}))
    return int(any(target.passed is False for target in targets))
