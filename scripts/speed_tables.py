"""Prints the tables of speed from the raw files of scripts/speed.sh: python scripts/speed_tables.py results"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import targets

from eps_core.errors import exit_code
from eps_core.io import inputs
from eps_core.io.records import Name, Positive, read_record
from eps_core.io.schema import current

PLATFORM = {"sdpa gqa", "sdpa rows", "grouped matmul", "flex", "flashinfer"}
MEND = "run scripts/speed.sh again"


RATIOS = {"bytes_ratio": Positive, "speedup": Positive}
SIDE = {"decode_ms_p50": Positive, "tokens_per_s": Positive}
WHOLE_STEP = {**RATIOS, **dict.fromkeys(("model", "backend", "dtype"), Name), "dense": SIDE, "eps": SIDE}


def cells(path: Path, *needed: str) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """(a cell, milliseconds of its variants by name); the `needed` variants are there."""
    for cell in targets.load_lines([path])[1]:
        read_record({**RATIOS, "dtype": Name}, cell, cell["where"], MEND)
        for name in needed:
            targets.arm_of(cell, name)
        yield cell, {variant: stats["ms"] for variant, stats in cell["arms"].items()}


def row(*values: object) -> str:
    return "| " + " | ".join(str(value) for value in values) + " |"


def layer_table(folder: Path) -> None:
    print(row("backend, cache", "groups", "read", "dense: platform", "dense: ours", "score", "select", "attend",
              "correction", "step", "against platform", "against ours"))  # fmt: skip
    print("|" + "---|" * 12)
    for kind in ("coarse", "fine"):
        for backend, name in (("cuda", "Torch"), ("mlx", "MLX")):
            for cell, ms in cells(folder / f"speed-{kind}-{backend}.jsonl", "eps dense", "step"):
                best = min((variant for variant in ms if variant in PLATFORM), key=ms.__getitem__, default="eps dense")
                parts = (
                    f"{ms[part]:.2f}" if part in ms else "-" for part in ("score", "select", "attend", "correction")
                )
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
    print(row("model", "backend, dtype", "dense", "gated", "tokens/s dense, sparse", "bytes", "dense / sparse"))
    print("|" + "---|" * 7)
    for place, values in inputs.read_jsonl(folder / "whole_step.jsonl", "results", MEND):
        line = read_record(WHOLE_STEP, current(values), place, MEND)
        dense, eps = line["dense"], line["eps"]
        print(row(
            line["model"], f"{line['backend']}, {line['dtype']}", f"{dense['decode_ms_p50']:.1f}",
            f"{eps['decode_ms_p50']:.1f}", f"{dense['tokens_per_s']:.3g}, {eps['tokens_per_s']:.3g}",
            f"{line['bytes_ratio']:.3f}", f"{line['speedup']:.2f} x",
        ))  # fmt: skip


ENGINE = {
    **dict.fromkeys(("engine", "model", "dtype"), Name),
    **RATIOS,
    **dict.fromkeys(("context", "dense_tokens_per_s", "gated_tokens_per_s"), Positive),
}


def engine_table(folder: Path) -> None:
    if not (folder / "engine_speed.jsonl").is_file():  # another script's
        print("no engine_speed.jsonl here: scripts/engine_speed.sh makes it")
        return
    print(row("engine", "model, dtype", "context", "tokens/s dense (its own)", "gated", "sparse / dense", "bytes"))
    print("|" + "---|" * 7)
    for place, values in inputs.read_jsonl(folder / "engine_speed.jsonl", "results", MEND):
        line = read_record(ENGINE, values, place, MEND)
        print(row(
            line["engine"], f"{line['model']}, {line['dtype']}", f"{int(line['context']):,}",
            f"{line['dense_tokens_per_s']:.3g}", f"{line['gated_tokens_per_s']:.3g}", f"{line['speedup']:.2f} x",
            f"{line['bytes_ratio']:.3f}",
        ))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="of speed.sh's raw files")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}: run scripts/speed.sh, which makes its files")
    for table in (layer_table, scaling_table, step_table, engine_table):
        table(folder)
        print()


if __name__ == "__main__":
    sys.exit(exit_code(main))
