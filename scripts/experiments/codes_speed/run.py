"""The time that K and V as codes save: one layer's dense and sparse attention over caches of 16, 8 and 4 bits.

All caches hold the same tokens, and EPS selects as many groups in each: as fit --bytes of the dense bytes of the
first. Before anything is timed, results are compared with float64 over what each cache holds. Times are medians of
rounds in which all variants take turns, each with cold caches; besides, the processor time of the process, which says
more where a CPU is shared and OMP_NUM_THREADS is 1. Appends a run line and one line a cache to a JSONL.

    OMP_NUM_THREADS=1 python scripts/experiments/codes_speed/run.py --context 32768 -o results/speed-codes.jsonl
"""

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared import appended

from eps_core.attention.layer import sparse_attention
from eps_core.bench.data import DESCRIPTION, Shape, Source, fill
from eps_core.bench.dense import DENSE_TOLERANCE, CheckError
from eps_core.bench.plan import budgeted, moved_bytes
from eps_core.bench.proof import check_sparse, check_values, dense_error, run_step
from eps_core.config.bytes import kv_bytes
from eps_core.config.cache import DTYPE_BYTES
from eps_core.config.eps import EpsConfig
from eps_core.cpu.host import flush_bytes
from eps_core.errors import exit_code
from eps_core.io import outputs
from eps_core.load import load_backend, load_platform, resolve_kernels
from eps_core.metrics import terminal
from eps_core.metrics.provenance import run_line

BITS = (16, 8, 4)  # 16: K and V as they are


@click.command()
@click.option("--context", type=click.IntRange(min=512), default=32768, show_default=True, help="Tokens.")
@click.option("--bytes", "share", type=click.FloatRange(0, 1, min_open=True), default=0.1, show_default=True)
@click.option("--dtype", type=click.Choice(tuple(DTYPE_BYTES)), default="bfloat16", show_default=True)
@click.option("--method", default="rq", show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
@click.option("--q-heads", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("--arrays/--no-arrays", default=True, show_default=True, help="Array operations over the codes, too.")
@click.option(
    "-o", "--output", "--out", "out", type=click.Path(path_type=Path), default=Path("results/speed-codes.jsonl"),
    show_default=True,
)  # fmt: skip
def main(
    context: int, share: float, dtype: str, method: str, backend: str, device: str, kernels: str, q_heads: int,
    kv_heads: int, head_dim: int, rounds: int, arrays: bool, out: Path,
) -> None:  # fmt: skip
    if q_heads % kv_heads:
        raise click.UsageError(f"--q-heads {q_heads} is not a multiple of --kv-heads {kv_heads}")
    outputs.check({"-o": out}, {})  # before anything is measured
    outputs.check_start("-o", out, b"{", "JSONL")
    eps, platform = load_backend(backend), load_platform(backend)
    kernels = resolve_kernels(kernels, eps.usable_kernels(device), device)
    platform.prepare(device)
    flush = platform.flusher(flush_bytes(platform.last_cache_bytes(device)), device)
    timed, rng = platform.stopwatch(device), np.random.default_rng(0)
    shape = Shape(context, 1, q_heads, kv_heads, head_dim, dtype)
    source, config = Source(shape), budgeted(EpsConfig.of(method=method), shape, "bytes", share)
    variants: dict[tuple[int, str], Any] = {}
    method_spec = {}
    for bits in BITS:
        layer = fill(eps, source, config, device, kernels, 1, platform.synchronize, kv_bits=(bits, bits))
        k, v = (platform.stack_heads([one]) for one in eps.read_kv(layer.cache, 0, layer.table[0], context))
        step = run_step(layer, config, platform.synchronize)
        facts = check_sparse(layer, step, kernels, partial=True)
        right = check_values(layer, config, step, k, v)
        plan, plain = layer.plan(config), replace(layer.cache, kernels="arrays")
        dense = partial(eps.attend, layer.cache, 0, layer.q, plan, None)
        error = dense_error(layer, dense()[0], k, v)
        if not error <= DENSE_TOLERANCE[dtype]:
            raise CheckError(
                f"dense attention over {bits} bits is wrong: relative error {error:.2g}: nothing was timed"
            )
        variants[bits, "dense"] = dense
        variants[bits, "attend"] = partial(eps.attend, layer.cache, 0, layer.q, plan, step.selection)
        variants[bits, "step"] = partial(sparse_attention, eps, layer.cache, 0, layer.q, plan)
        if arrays and bits != 16 and kernels != "arrays":
            variants[bits, "dense by arrays"] = partial(eps.attend, plain, 0, layer.q, plan, None)
            listed = replace(step.selection, selected_mask=None)
            variants[bits, "attend by arrays"] = partial(eps.attend, plain, 0, layer.q, plan, listed)
        method_spec[bits] = {
            "kv_bits": bits, "dense_bytes": kv_bytes(1, kv_heads, head_dim, context, dtype, (bits, bits)),
            "attend_bytes": facts["kv_bytes"], "step_bytes": moved_bytes(layer, config, facts["kv_bytes"])["step"],
            "groups_selected": facts["groups_selected"], "selected_ratio": facts["selected_ratio"], "check": right,
            "dense_error": error,
        }  # fmt: skip
    samples: dict[tuple[int, str], list[float]] = {name: [] for name in variants}
    processor: dict[tuple[int, str], list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds + 1):  # of which the first warms up
        for index in rng.permutation(len(names)):
            flush()
            before = time.process_time_ns()
            elapsed_ms, _ = timed(variants[names[index]])
            if number:
                samples[names[index]].append(elapsed_ms)
                processor[names[index]].append((time.process_time_ns() - before) / 1e6)
    with appended(out) as writer:
        writer.write(
            run_line(config, layer.cache.spec, backend, device, DESCRIPTION, eps.versions(), q_heads=q_heads,
                     context=context, rounds=rounds, share=share, kernels=kernels, cpu_count=os.cpu_count(),
                     load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
                     **platform.device_facts(device))
        )  # fmt: skip
        table = []
        for bits, fact in method_spec.items():
            own, used = ({n: x for (of, n), x in part.items() if of == bits} for part in (samples, processor))
            spread, worked = (
                {name: np.percentile(one, (10, 50, 90)).tolist() for name, one in part.items()} for part in (own, used)
            )
            writer.write(
                {
                    "type": "codes_speed", **fact, "p10_p50_p90_ms": spread, "processor_p10_p50_p90_ms": worked,
                    "samples_ms": own, "processor_samples_ms": used,
                }
            )  # fmt: skip
            table.append(
                [str(bits), f"{fact['dense_bytes'] / 2**20:.1f}", f"{fact['step_bytes'] / 2**20:.1f}"]
                + [f"{spread[name][1]:.1f} ({worked[name][1]:.1f})" if name in spread else "-" for name in
                   ("dense", "attend", "step", "dense by arrays", "attend by arrays")]
            )  # fmt: skip
    header = ["bits", "dense MiB", "step MiB", "dense ms", "attend ms", "step ms", "dense, arrays", "attend, arrays"]
    print("median ms (of processor time)\n\n" + terminal.table(table, header), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
