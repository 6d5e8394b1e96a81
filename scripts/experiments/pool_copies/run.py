"""Find out whether a decode step in MLX copies whole pools of K and V, by one layer's writes and attention.

    python scripts/experiments/pool_copies/run.py --context 32768 -o rows.jsonl

MLX writes a slice in place only where nothing else holds the array. A step that is evaluated before the next one is
made leaves nothing behind. mlx-lm makes the next step while the GPU still computes this one, whose attention holds the
pools; Metal kernels write beside them (`eps_mlx.open_units`), so the pools should not be copied. All are run, beyond
the end of a unit, where a step waits and writes the pools: the median and the most milliseconds of a step, and the most
memory beyond what the cache takes, of which a copied pool is most. From pools of 512 MiB on (one layer's here) array
operations wait in every step, too, so that they copy nothing.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import mlx.core as mx
import numpy as np
from shared import appended

import eps_mlx
from eps_core.attention.layer import sparse_attention
from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.errors import exit_code
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.cache import pending

Q_HEADS, KV_HEADS, HEAD_DIM, CHUNK = 32, 8, 128, 4096


def steps_of(
    backend: Backend, context: int, steps: int, asynchronous: bool, device: str, kernels: str
) -> dict[str, Any]:
    """The row of `steps` decode steps behind `context` tokens."""
    config = EpsConfig.of(method="rq")
    units = -(-(context + steps) // config.cache_config.unit_tokens)
    spec = CacheSpec(1, KV_HEADS, HEAD_DIM, units, "bfloat16")
    cache, table = backend.new_cache(spec, config.cache_config, device, kernels), np.arange(units, dtype=np.int32)[None]
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return backend.from_numpy(rng.standard_normal(shape, np.float32), spec.dtype, device)

    for start in range(0, context, CHUNK):
        slots = np.arange(start, min(start + CHUNK, context))
        k, v = (drawn(len(slots), KV_HEADS, HEAD_DIM) for _ in range(2))
        cache = backend.write_kv(cache, 0, k, v, slots)
        mx.eval(pending(cache))
    q, k, v = (drawn(1, heads, HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    mx.eval(q, k, v)
    times, before = [], None
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for length in range(context + 1, context + 1 + steps):
        began = time.perf_counter()
        cache = backend.write_kv(cache, 0, k, v, np.array([length - 1]))
        out, _ = sparse_attention(backend, cache, 0, q, StepPlan.of(config, table, np.array([length])))
        mx.async_eval(out, *pending(cache))
        mx.eval(before if asynchronous and before is not None else out)
        before = out
        times.append(time.perf_counter() - began)
    pool_bytes = units * config.cache_config.unit_tokens * KV_HEADS * spec.kv_token_bytes
    return {
        "type": "pool_copies", "context": context, "kernels": kernels, "asynchronous": asynchronous,
        "steps": steps,
        "step_ms": round(1000 * statistics.median(times), 3), "most_ms": round(1000 * max(times[1:]), 3),
        "pool_bytes": pool_bytes,
        "extra_bytes": max(mx.get_peak_memory() - held, 0),
    }  # fmt: skip


@click.command()
@click.option("--context", type=click.IntRange(min=2048), default=32768, show_default=True, help="Tokens, whole units.")
@click.option("--steps", type=click.IntRange(min=4), default=96, show_default=True)
@click.option("--device", default="auto", show_default=True, help="cpu, or mps: the GPU.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(context: int, steps: int, device: str, output: Path) -> None:
    with appended(output, {}) as writer:
        best = eps_mlx.usable_kernels(eps_mlx.devices()[-1] if device == "auto" else device)[-1]
        for kernels, asynchronous in itertools.product((best, "arrays"), (False, True)):
            row = steps_of(eps_mlx, context, steps, asynchronous, device, kernels)
            way = "the next step is made meanwhile" if asynchronous else "each step is waited for"
            took = f"{row['step_ms']} ms a step, {row['most_ms']} at most"
            share = row["extra_bytes"] / row["pool_bytes"]
            print(f"{context:,} tokens, {kernels}, {way}: {took}, {share:.2f} of K and V as extra")
            writer.write(row)


if __name__ == "__main__":
    sys.exit(exit_code(main))
