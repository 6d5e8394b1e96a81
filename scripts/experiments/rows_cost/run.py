"""The cost of a verify pass's attention: one layer's `attend_rows` of g + 1 rows beside one row's dense attention.

v(g) is the ratio of their times: medians of rounds in which all take turns, with cold caches. Appends a run line and
one line a context to a JSONL.

    python scripts/experiments/rows_cost/run.py --backend cuda --context 8192,32768 -o results/rows.jsonl
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from shared import appended

from eps_core.cli.numbers import COUNT, TOKENS, ListOf
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu.host import flush_bytes
from eps_core.errors import exit_code
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.load import load_backend, load_platform
from eps_core.metrics.provenance import run_line

CHUNK_TOKENS = 4096


@click.command()
@click.option("--context", type=ListOf(TOKENS), default="8192,32768", show_default=True, help="Tokens; commas.")
@click.option("--gamma", type=ListOf(COUNT), default="0,4,8,16", show_default=True, help="Drafts a pass; commas.")
@click.option("--backend", default="cuda", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
@click.option("--q-heads", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "-o", "--output", "--out", "out", type=click.Path(path_type=Path), default=Path("results/rows.jsonl"),
    show_default=True,
)  # fmt: skip
def main(
    context: tuple[int, ...], gamma: tuple[int, ...], backend: str, device: str, kernels: str, q_heads: int,
    kv_heads: int, head_dim: int, dtype: str, rounds: int, out: Path,
) -> None:  # fmt: skip
    if min(context) <= max(gamma):
        raise click.UsageError("a pass has no more rows than the context has tokens")
    if q_heads % kv_heads:
        raise click.UsageError(f"--q-heads {q_heads} is not a multiple of --kv-heads {kv_heads}")
    eps, platform = load_backend(backend), load_platform(backend)
    device = eps.devices()[-1] if device == "auto" else device
    platform.prepare(device)
    flush = platform.flusher(flush_bytes(platform.last_cache_bytes(device)), device)
    timed, rng, config = platform.stopwatch(device), np.random.default_rng(0), EpsConfig.of(method="off")

    def random(*shape: int) -> Any:
        return eps.from_numpy(rng.standard_normal(shape, np.float32), dtype, device)

    with appended(out) as writer:
        for tokens in context:
            units = -(-tokens // config.cache_config.unit_tokens)
            spec = CacheSpec(1, kv_heads, head_dim, units, dtype)
            cache = eps.new_cache(spec, config.cache_config, device, kernels)
            for start in range(0, tokens, CHUNK_TOKENS):
                slots = np.arange(start, min(start + CHUNK_TOKENS, tokens))
                k, v = (random(len(slots), kv_heads, head_dim) for _ in range(2))
                cache = eps.write_kv_tentative(cache, 0, k, v, slots)
            table, lengths = np.arange(units, dtype=np.int32)[None], np.array([tokens])
            plan = StepPlan.dense(config.cache_config, table, lengths)
            calls: dict[str, Any] = {"dense": partial(eps.attend, cache, 0, random(1, q_heads, head_dim), plan, None)}
            for drafts in gamma:
                rows = Rows.of(table, lengths, np.array([drafts + 1]))
                calls[str(drafts)] = partial(eps.attend_rows, cache, 0, random(drafts + 1, q_heads, head_dim), rows)
            samples: dict[str, list[float]] = {name: [] for name in calls}
            for number in range(rounds + 1):  # of which the first compiles
                for name in rng.permutation(list(calls)).tolist():
                    flush()
                    elapsed_ms, _ = timed(calls[name])
                    if number:
                        samples[name].append(elapsed_ms)
            medians = {name: float(np.median(one)) for name, one in samples.items()}
            dense_ms = medians.pop("dense")
            writer.write(
                run_line(config, spec, backend, device, "random", eps.versions(), q_heads=q_heads,
                         device_name=eps.device_name(device), kernels=cache.kernels)
            )  # fmt: skip
            writer.write(
                {
                    "type": "rows_cost", "context": tokens, "rounds": rounds, "dense_ms": dense_ms,
                    "rows_ms": medians, "v": {name: one / dense_ms for name, one in medians.items()},
                    "spread_ms": {name: float(np.ptp(one)) for name, one in samples.items()},
                }
            )  # fmt: skip
            print(
                f"{tokens:,} tokens, {cache.kernels} on {device}: one row {dense_ms:.3f} ms; v(g) "
                + ", ".join(f"{name}: {one / dense_ms:.2f}" for name, one in medians.items()),
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(exit_code(main))
