"""Estimate what a sparse layer takes on a GPU that was not measured, by a cost model fitted to measured layers.

    python scripts/experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl
    python scripts/experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --kernels H100    (each of them)
    python scripts/experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused    (of five launches)
    python scripts/experiments/gpu_model/run.py --rows results/gpu/times-at-once.jsonl --fused --share 0.1 --limit

A kernel takes a + b context + c work microseconds, none of them negative, by least squares over the measured cells:
`a` for its launch, `b` for what goes through a row in turn, `c` for what is spread over the device. Work is tokens of
all kv heads, of attention the selected ones. On another device a and b follow the clock. c follows the bandwidth where
the bytes explain at least two thirds of it on the measured device, else multiprocessors times clock. Dense attention
follows the bandwidth.

`--share` changes how many tokens are read. `--limit` leaves launches and what a row does in turn as they are, and all
other work takes what a copy of its bytes would.

`--fused` puts the parts of nine measured launches together as five take them. A token is written beside the rounding
of its query. Scores make the means, by compiled instructions 26 more of 399 for 64 tokens and 245 once a program, at
CYCLES each. Attention takes the work of listing by 1,368 instructions for 1,915, and merges as the kernel did that did
nothing else; its programs are taken for equally busy. Counters are cleared on the way.

All of these are estimates. AMD's and Apple's kernels are other ones (no products of bits, a launch of MLX costs some 4
microseconds): their rows say what these kernels would take, not what ours do.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from shared import markdown_table, rows_of

from eps_core.errors import exit_code, require

KV_HEADS, KV_BYTES = 8, 512  # of the measured layer: heads, bytes of K and V of a token and head
COPIED = 0.865  # of a data sheet's bandwidth, as measured on the H200
# bytes of a token of a kv head, or of a selected one: codes, rescoring bits, scales and the estimate; means; estimates
BYTES = {"_score_bits": 38.0, "_score_means": 1.3, "_count_bins": 4.0, "_find_threshold": 0.1, "_list": 5.0,
         "attend_split_kernel": float(KV_BYTES)}  # fmt: skip
EXPLAINED = 2 / 3
MORE_SCORING, MORE_ONCE, CYCLES, LISTING = 1 + 26 / 399, 245, 5, 1368 / 1915  # of `--fused`


class Device(NamedTuple):
    """By its maker's data sheet."""

    multiprocessors: int
    ghz: float
    gbps: float


MEASURED = "H200"
DEVICES = {
    "H200": Device(132, 1.98, 4800), "H100": Device(132, 1.98, 3350), "A10G": Device(80, 1.71, 600),
    "MI300X": Device(304, 2.1, 5300), "M3 Max": Device(40, 1.4, 400),
}  # fmt: skip


class Kernel(NamedTuple):
    """a, b and c of a kernel in microseconds, and the bytes of a unit of its work."""

    launch: float
    in_turn: float
    spread: float
    num_bytes: float

    def copied(self, device: Device) -> float:
        """Return the microseconds of a copy of the bytes of a unit of work."""
        return self.num_bytes / (COPIED * device.gbps * 1000)

    def us(self, context: int, work: float, device: Device) -> float:
        """Return the microseconds on a device."""
        known = DEVICES[MEASURED]
        bound_by_bytes = self.spread and self.copied(known) / self.spread >= EXPLAINED
        clock, units = known.ghz / device.ghz, known.multiprocessors / device.multiprocessors
        slower = known.gbps / device.gbps if bound_by_bytes else units * clock
        least = 0.0 if device == known else self.copied(device)
        return clock * (self.launch + self.in_turn * context) + max(self.spread * slower, least) * work


def work_of(name: str, row: dict[str, Any]) -> float:
    """Return the tokens of all sequences and kv heads of a row that a kernel works on."""
    tokens = row["context"] * row["batch"] * KV_HEADS
    return row["kv_bytes"] / KV_BYTES if name.startswith("attend") else float(tokens)


def fitted(name: str, rows: list[dict[str, Any]]) -> Kernel:
    """Return the kernel of that name by the cells in which it was measured."""
    features = np.array([[1.0, row["context"], work_of(name, row)] for row in rows])
    taken = np.array([row["kernels"][name]["us"] for row in rows])
    best, least = np.zeros(3), np.inf
    for used in product((False, True), repeat=3):  # no term may be negative
        chosen = np.flatnonzero(used)
        values, *_ = np.linalg.lstsq(features[:, chosen] / taken[:, None], np.ones(len(taken)), rcond=None)
        error = float(((features[:, chosen] @ values / taken - 1) ** 2).sum())
        if (values >= 0).all() and error < least:
            least, best = error, np.zeros(3)
            best[chosen] = values
    launch, in_turn, spread = map(float, best)
    return Kernel(launch, in_turn, spread, BYTES.get(name, 0.0))


def fused_us(models: dict[str, Kernel], row: dict[str, Any], device: Device) -> dict[str, float]:
    """Return the microseconds of five launches by the parts of nine."""

    def us(name: str, launch: bool = True, work: float = 1.0) -> float:
        one = models[name]
        one = one._replace(launch=one.launch if launch else 0.0, spread=one.spread * work)
        return one.us(row["context"], work_of(name, row), device)

    return {
        "prepare": max(us("write_kernel"), us("_round_queries")),
        "scores": us("_score_bits", work=MORE_SCORING) + MORE_ONCE * CYCLES / device.ghz / 1000,
        "count_bins": us("_count_bins"),
        "find_threshold": us("_find_threshold"),
        "attend_best": us("attend_split_kernel") + us("_list", launch=False, work=LISTING) + us("merge_kernel"),
    }


def dense_us(row: dict[str, Any], device: Device) -> float:
    """Return what dense attention takes: the faster of what was measured and 90 % of a copy, by the bandwidth."""
    fastest = min(*row["dense_us"].values(), row["dense_at_90_percent_us"])
    return float(fastest) * DEVICES[MEASURED].gbps / device.gbps


@click.command()
@click.option("--rows", "path", type=click.Path(path_type=Path), required=True, help="Of gpu_times.py.")
@click.option("--kernels", "named", type=click.Choice([*DEVICES]), help="Print each kernel on this device.")
@click.option("--fused", is_flag=True, help="Of five launches a layer, which were not measured.")
@click.option("--share", type=float, help="K, V and summaries that are read, of dense bytes. Default: as measured.")
@click.option("--limit", is_flag=True, help="All work that is spread over a device at the speed of a copy.")
def main(path: Path, named: str | None, fused: bool, share: float | None, limit: bool) -> None:
    rows = rows_of(path, "layer")
    require(len(rows) >= 3, f"{path} has {len(rows)} cells: three numbers of a kernel need three or more")
    models = {name: fitted(name, rows) for name in rows[0]["kernels"]}
    if limit:
        models = {name: one._replace(spread=one.copied(DEVICES[MEASURED])) for name, one in models.items()}
    if share is not None:
        least = max(row["summary_bytes"] / row["dense_kv_bytes"] for row in rows)
        require(least < share <= 1, f"--share {share} is not above {least:.3f}, the share of summaries, and at most 1")
        rows = [row | {"kv_bytes": share * row["dense_kv_bytes"] - row["summary_bytes"]} for row in rows]

    def kernels_us(row: dict[str, Any], device: Device) -> dict[str, float]:
        if fused:
            return fused_us(models, row, device)
        return {name: one.us(row["context"], work_of(name, row), device) for name, one in models.items()}

    cells = [f"{row['context']:,} x {row['batch']}" for row in rows]
    if named is not None:
        times = [kernels_us(row, DEVICES[named]) for row in rows]
        lines = [[f"`{name}`", *(f"{one[name]:.1f}" for one in times)] for name in times[0]]
        print(markdown_table([f"{named}: us", *cells], lines))
        return

    def cell(own: float, dense: float) -> str:
        return f"{own:.0f}, {dense:.0f}: {dense / own:.2f} x"

    measured = DEVICES[MEASURED]
    lines = []
    if not (fused or limit or share):
        lines.append([f"{MEASURED}, measured", *(cell(row["step_us"], dense_us(row, measured)) for row in rows)])
    for name, device in DEVICES.items():
        lines.append([name, *(cell(sum(kernels_us(row, device).values()), dense_us(row, device)) for row in rows)])
    print(markdown_table(["us of EPS, of dense", *cells], lines))


if __name__ == "__main__":
    sys.exit(exit_code(main))
