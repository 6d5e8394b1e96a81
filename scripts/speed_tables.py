"""Print the tables of speed from the raw files of scripts/speed.sh and scripts/engine_speed.sh.

    python scripts/speed_tables.py results [layer] [scaling] [steps] [engines] [gpu ..]

A table whose raw file is not there is one sentence that says which script makes it.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared import markdown_table, rows_of

from eps_core.errors import exit_code

PLATFORM = {"sdpa gqa", "sdpa rows", "grouped matmul", "flex"}
GPU_FILES = {"first": "times-first.jsonl", "staged": "times.jsonl", "at once": "times-at-once.jsonl"}


def cells(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield (cell of `eps-proto bench -o`, milliseconds of its variants by name)."""
    for cell in rows_of(path, "bench"):
        yield cell, {name: variant["ms"] for name, variant in cell["arms"].items()}


def table(*head: str, rows: Iterable[Sequence[object]]) -> str:
    return markdown_table(head, rows, rule="---")


def parts_of(ms: dict[str, float], *names: str) -> list[str]:
    """Return the milliseconds of parts of a step, - where one was not timed."""
    return [f"{ms[name]:.2f}" if name in ms else "-" for name in names]


def layer_table(folder: Path) -> str:
    """Return one layer with the default's groups."""
    rows = []
    for backend, name in (("cuda", "Torch"), ("mlx", "MLX")):
        path = folder / f"speed-fine-{backend}.jsonl"
        for cell, ms in cells(path) if path.is_file() else ():
            best = min((variant for variant in ms if variant in PLATFORM), key=ms.__getitem__, default="eps dense")
            rows.append([
                f"{name}, {cell['dtype']}", f"`{cell['method']}` {cell['group_size']}", f"{cell['bytes_ratio']:.3f}",
                f"{ms[best]:.1f} ({best})", f"{ms['eps dense']:.1f}",
                *parts_of(ms, "score", "select", "attend", "step"),
                f"{ms[best] / ms['step']:.1f} x", f"{ms['eps dense'] / ms['step']:.1f} x",
            ])  # fmt: skip
    return table(
        "backend, cache", "groups", "read", "dense: platform", "dense: ours", "score", "select", "attend", "step",
        "against platform", "against ours", rows=rows,
    )  # fmt: skip


def scaling_table(folder: Path) -> str:
    parts = ("write", "score", "select", "attend", "step")
    rows = [
        [f"{cell['context']:,}", f"{cell['best_dense_ms']:.1f}", *parts_of(ms, *parts), f"{cell['speedup']:.1f} x"]
        for cell, ms in cells(folder / "speed-scaling.jsonl")
    ]
    return table("context", "dense", *parts, "dense / step", rows=rows)


def step_table(folder: Path) -> str:
    rows = []
    for line in rows_of(folder / "whole_step.jsonl", "whole_step"):
        dense, eps = line["dense"], line["eps"]
        rows.append([
            line["model"], f"{line['backend']}, {line['dtype']}", f"{int(line['prompt_tokens']):,}",
            *(f"{side['decode_ms_p50']:.1f}" for side in (dense, eps)),
            *(f"{side['tokens_per_s']:.3g}" for side in (dense, eps)),
            f"{line['bytes_ratio']:.3f}", f"{line['speedup']:.2f} x",
        ])  # fmt: skip
    return table(
        "model", "backend, dtype", "context", "dense, ms", "sparse, ms", "tokens/s dense", "tokens/s sparse", "bytes",
        "dense / sparse", rows=rows,
    )  # fmt: skip


def engine_table(folder: Path) -> str:
    rows = [
        [line["engine"], f"{line['model']}, {line['dtype']}", f"{int(line['context']):,}",
         f"{line['dense_tokens_per_s']:.3g}", f"{line['eps_tokens_per_s']:.3g}", f"{line['speedup']:.2f} x",
         f"{line['bytes_ratio']:.3f}"]
        for line in rows_of(folder / "engine_speed.jsonl", "engine_speed")
    ]  # fmt: skip
    head = ("engine", "model, dtype", "context", "tokens/s dense (its own)", "sparse", "sparse / dense", "bytes")
    return table(*head, rows=rows)


def gpu_cells(folder: Path, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the cells of scripts/gpu_times.py by context and batch."""
    return {(line["context"], line["batch"]): line for line in rows_of(folder / "gpu" / GPU_FILES[kind], "layer")}


def gpu_table(folder: Path) -> str:
    """Return microseconds of one layer on a GPU, in all ways."""
    found, rows = {kind: gpu_cells(folder, kind) for kind in GPU_FILES}, []
    for (context, batch), one in found["at once"].items():
        if any((context, batch) not in known for known in found.values()):
            continue  # a file that was cut off lacks this cell
        floor, own = one["dense_at_90_percent_us"], one["dense_us"]["own"]
        steps = [found[kind][context, batch]["step_us"] for kind in GPU_FILES]
        times = min(floor, *one["dense_us"].values()) / one["step_us"]
        rows.append([f"{context:,} x {batch}", *(f"{us:,.0f}" for us in (floor, own, *steps)), f"{times:.2f} x"])
    return table(
        "context x batch", "dense at 90 % of a copy", "dense, ours", "first version", "in stages", "at once",
        "dense / at once", rows=rows,
    )  # fmt: skip


def gpu_kernels_table(folder: Path) -> str:
    """Return microseconds of each kernel of a layer on a GPU, codes read at once."""
    found, rows = gpu_cells(folder, "at once"), []
    for name in dict.fromkeys(name for one in found.values() for name in one["kernels"]):
        known = name.strip("_") if name.startswith(("_", "attend", "merge", "write")) else "clearing of counters"
        rows.append([f"`{known}`", *(f"{one['kernels'].get(name, {}).get('us', 0):.1f}" for one in found.values())])
    busy = (sum(kernel["us"] for kernel in one["kernels"].values()) for one in found.values())
    gaps = (one["step_us"] - us for one, us in zip(found.values(), busy, strict=True))
    rows.append(["gaps less overlaps", *(f"{us:.1f}" for us in gaps)])
    return table("kernel", *(f"{context:,} x {batch}" for context, batch in found), rows=rows)


def gpu_step_table(folder: Path) -> str:
    rows = []
    for line in rows_of(folder / "gpu" / "step.jsonl", "step"):
        dense, sparse = line["step_ms"].values()
        cell = f"{line['context']:,} x {line['batch']}", line["layers"]
        rows.append([*cell, f"{dense:.2f}", f"{sparse:.2f}", f"{dense / sparse:.2f} x"])
    return table("context x batch", "layers", "dense, ms", "EPS, ms", "dense / EPS", rows=rows)


# the table, the raw files that it is of (one of each pattern), and the script that makes these
TABLES: dict[str, tuple[Callable[[Path], str], Sequence[str], str]] = {
    "layer": (layer_table, ["speed-fine-*.jsonl"], "speed.sh"),
    "scaling": (scaling_table, ["speed-scaling.jsonl"], "speed.sh"),
    "steps": (step_table, ["whole_step.jsonl"], "speed.sh"),
    "engines": (engine_table, ["engine_speed.jsonl"], "engine_speed.sh"),
    "gpu": (gpu_table, [f"gpu/{name}" for name in GPU_FILES.values()], "gpu_check.sh"),
    "gpu-kernels": (gpu_kernels_table, ["gpu/times-at-once.jsonl"], "gpu_check.sh"),
    "gpu-steps": (gpu_step_table, ["gpu/step.jsonl"], "gpu_check.sh"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the raw files")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)} (all)")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}: run scripts/speed.sh, which makes its files")
    if unknown := sorted(set(args.tables) - set(TABLES)):
        parser.error(f"table {', '.join(unknown)} is unknown: choose among {', '.join(TABLES)}")
    parts = []
    for name in args.tables or TABLES:
        made, files, script = TABLES[name]
        absent = f"Not measured with the current default (`scripts/{script}`)."
        parts.append(made(args.folder) if all(any(args.folder.glob(one)) for one in files) else absent)
    print("\n\n".join(parts))


if __name__ == "__main__":
    sys.exit(exit_code(main))
