"""Print the tables of speed from the raw files of scripts/speed.sh and scripts/engine_speed.sh.

    python scripts/speed_tables.py results [layer] [coarse] [scaling] [steps] [engines] [gpu ..]

A table whose raw file is not there is one sentence that says which script makes it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from eps_core.errors import ConfigError, exit_code
from eps_core.io import inputs
from eps_core.io.records import Between, Count, Name, Positive, read_record
from eps_core.io.schema import current

PLATFORM = {"sdpa gqa", "sdpa rows", "grouped matmul", "flex", "flashinfer"}
MEND = "run scripts/speed.sh again"


RATIOS = {"bytes_ratio": Positive, "speedup": Positive}
SIDE = {"decode_ms_p50": Positive, "tokens_per_s": Positive}
WHOLE_STEP = {
    **RATIOS,
    "prompt_tokens": Positive,
    **dict.fromkeys(("model", "backend", "dtype"), Name),
    "dense": SIDE,
    "eps": SIDE,
}


# the kinds of what is read back of a cell of bench
CELL = {
    **RATIOS, **dict.fromkeys(("context", "batch", "group_size"), Count),
    **dict.fromkeys(("method", "best_dense", "dtype"), Name), "arms": dict[str, Any], "best_dense_ms": Positive,
}  # fmt: skip
VARIANT = {"ms": Positive, "bytes": Annotated[float, Between(0, 1e18)] | None}


def cells(path: Path, *needed: str) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """(a cell of `eps-proto bench -o`, milliseconds of its variants by name); the `needed` variants are there."""
    for place, line in inputs.read_jsonl(path, "results", MEND):
        if line.get("type") != "bench":
            continue
        cell = read_record(CELL, line, place, MEND)
        ms = {
            name: read_record(VARIANT, variant, f"{place}: variant {name}", MEND)["ms"]
            for name, variant in cell["arms"].items()
        }
        for name in needed:
            if name not in ms:
                raise ConfigError(f"{place}: no variant {name}: {MEND}")
        yield cell, ms


def row(*values: object) -> str:
    return "| " + " | ".join(str(value) for value in values) + " |"


def layer_table(folder: Path, kind: str = "fine") -> None:
    """Print one layer with the default's groups (fine), or with box at 128 tokens (coarse)."""
    print(row("backend, cache", "groups", "read", "dense: platform", "dense: ours", "score", "select", "attend",
              "correction", "step", "against platform", "against ours"))  # fmt: skip
    print("|" + "---|" * 12)
    for backend, name in (("cuda", "Torch"), ("mlx", "MLX")):
        path = folder / f"speed-{kind}-{backend}.jsonl"
        for cell, ms in cells(path, "eps dense", "step") if path.is_file() else ():
            best = min((variant for variant in ms if variant in PLATFORM), key=ms.__getitem__, default="eps dense")
            parts = (f"{ms[part]:.2f}" if part in ms else "-" for part in ("score", "select", "attend", "correction"))
            print(row(
                f"{name}, {cell['dtype']}", f"`{cell['method']}` {cell['group_size']}",
                f"{cell['bytes_ratio']:.3f}", f"{ms[best]:.1f} ({best})", f"{ms['eps dense']:.1f}", *parts,
                f"{ms['step']:.2f}", f"{ms[best] / ms['step']:.1f} x", f"{ms['eps dense'] / ms['step']:.1f} x",
            ))  # fmt: skip


def scaling_table(folder: Path) -> None:
    print(row("context", "dense", "write", "score", "select", "attend", "correction", "step", "dense / step"))
    print("|" + "---|" * 9)
    for cell, ms in cells(folder / "speed-scaling.jsonl"):
        names = ("write", "score", "select", "attend", "correction", "step")
        parts = (f"{ms[part]:.2f}" if part in ms else "-" for part in names)
        print(row(f"{cell['context']:,}", f"{cell['best_dense_ms']:.1f}", *parts, f"{cell['speedup']:.1f} x"))


def step_table(folder: Path) -> None:
    print(row("model", "backend, dtype", "context", "dense, ms", "sparse, ms", "tokens/s dense", "tokens/s sparse",
              "bytes", "dense / sparse"))  # fmt: skip
    print("|" + "---|" * 9)
    for place, values in inputs.read_jsonl(folder / "whole_step.jsonl", "results", MEND):
        line = read_record(WHOLE_STEP, current(values), place, MEND)
        dense, eps = line["dense"], line["eps"]
        print(row(
            line["model"], f"{line['backend']}, {line['dtype']}", f"{int(line['prompt_tokens']):,}",
            f"{dense['decode_ms_p50']:.1f}", f"{eps['decode_ms_p50']:.1f}", f"{dense['tokens_per_s']:.3g}",
            f"{eps['tokens_per_s']:.3g}", f"{line['bytes_ratio']:.3f}", f"{line['speedup']:.2f} x",
        ))  # fmt: skip


ENGINE = {
    **dict.fromkeys(("engine", "model", "dtype"), Name),
    **RATIOS,
    **dict.fromkeys(("context", "dense_tokens_per_s", "gated_tokens_per_s"), Positive),
}


def engine_table(folder: Path) -> None:
    print(row("engine", "model, dtype", "context", "tokens/s dense (its own)", "sparse", "sparse / dense", "bytes"))
    print("|" + "---|" * 7)
    for place, values in inputs.read_jsonl(folder / "engine_speed.jsonl", "results", MEND):
        line = read_record(ENGINE, values, place, MEND)
        print(row(
            line["engine"], f"{line['model']}, {line['dtype']}", f"{int(line['context']):,}",
            f"{line['dense_tokens_per_s']:.3g}", f"{line['gated_tokens_per_s']:.3g}", f"{line['speedup']:.2f} x",
            f"{line['bytes_ratio']:.3f}",
        ))  # fmt: skip


GPU = {
    **dict.fromkeys(("context", "batch"), Count), **dict.fromkeys(("step_us", "dense_at_90_percent_us"), Positive),
    "dense_us": dict[str, Positive], "kernels": dict[str, Any],
}  # fmt: skip
GPU_FILES = {"first": "times-first.jsonl", "staged": "times.jsonl", "at once": "times-at-once.jsonl"}
GPU_STEP = {**dict.fromkeys(("context", "batch", "layers"), Count), "step_ms": dict[str, Positive]}


def gpu_cells(folder: Path, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    """The cells of scripts/gpu_times.py by context and batch."""
    lines = inputs.read_jsonl(folder / "gpu" / GPU_FILES[kind], "results", "run scripts/gpu_check.sh again")
    read = (read_record(GPU, line, place, MEND) for place, line in lines if line.get("type") == "layer")
    return {(line["context"], line["batch"]): line for line in read}


def gpu_table(folder: Path) -> None:
    """Print microseconds of one layer on a GPU, in all ways."""
    found = {kind: gpu_cells(folder, kind) for kind in GPU_FILES}
    print(row("context x batch", "dense at 90 % of a copy", "dense, ours", "first version", "in stages",
              "at once", "dense / at once"))  # fmt: skip
    print("|" + "---|" * 7)
    for (context, batch), one in found["at once"].items():
        dense = min(one["dense_at_90_percent_us"], *one["dense_us"].values())
        steps = (f"{found[kind][context, batch]['step_us']:,.0f}" for kind in GPU_FILES)
        print(row(
            f"{context:,} x {batch}", f"{one['dense_at_90_percent_us']:,.0f}", f"{one['dense_us']['own']:,.0f}", *steps,
            f"{dense / one['step_us']:.2f} x",
        ))  # fmt: skip


def gpu_kernels_table(folder: Path) -> None:
    """Print microseconds of each kernel of a layer on a GPU, codes read at once."""
    found = gpu_cells(folder, "at once")
    print(row("kernel", *(f"{context:,} x {batch}" for context, batch in found)))
    print("|" + "---|" * (1 + len(found)))
    for name in next(iter(found.values()))["kernels"]:
        known = name.strip("_") if name.startswith(("_", "attend", "merge", "write")) else "clearing of counters"
        print(row(f"`{known}`", *(f"{one['kernels'].get(name, {}).get('us', 0):.1f}" for one in found.values())))
    busy = (sum(kernel["us"] for kernel in one["kernels"].values()) for one in found.values())
    gaps = (one["step_us"] - us for one, us in zip(found.values(), busy, strict=True))
    print(row("gaps less overlaps", *(f"{us:.1f}" for us in gaps)))


def gpu_step_table(folder: Path) -> None:
    print(row("context x batch", "layers", "dense, ms", "EPS, ms", "dense / EPS"))
    print("|" + "---|" * 5)
    for place, values in inputs.read_jsonl(folder / "gpu" / "step.jsonl", "results", MEND):
        if values.get("type") != "step":
            continue
        line = read_record(GPU_STEP, values, place, MEND)
        dense, sparse = line["step_ms"].values()
        print(row(f"{line['context']:,} x {line['batch']}", line["layers"], f"{dense:.2f}", f"{sparse:.2f}",
                  f"{dense / sparse:.2f} x"))  # fmt: skip


# the table, the raw files that it is of (any of them), and the script that makes these
TABLES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "layer": (layer_table, "speed-fine-*.jsonl", "speed.sh"),
    "coarse": (partial(layer_table, kind="coarse"), "speed-coarse-*.jsonl", "speed.sh"),
    "scaling": (scaling_table, "speed-scaling.jsonl", "speed.sh"),
    "steps": (step_table, "whole_step.jsonl", "speed.sh"),
    "engines": (engine_table, "engine_speed.jsonl", "engine_speed.sh"),
    "gpu": (gpu_table, "gpu/times*.jsonl", "gpu_check.sh"),
    "gpu-kernels": (gpu_kernels_table, "gpu/times-at-once.jsonl", "gpu_check.sh"),
    "gpu-steps": (gpu_step_table, "gpu/step.jsonl", "gpu_check.sh"),
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
    for at, name in enumerate(args.tables or TABLES):
        if at:
            print()
        table, files, script = TABLES[name]
        if any(args.folder.glob(files)):
            table(args.folder)
        else:
            print(f"Not measured with the current default (`scripts/{script}`).")


if __name__ == "__main__":
    sys.exit(exit_code(main))
