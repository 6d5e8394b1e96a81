"""Where a captured layer's time goes on a GPU: microseconds of every kernel, beside dense attention and a copy.

    python scripts/gpu_times.py -o results/gpu/times.jsonl
    python scripts/gpu_times.py --check            (kernels against array operations, and nothing else)

A cell is one layer of 32 query and 8 kv heads of 128 dimensions in bfloat16 at a context and a batch. Several layers,
each with K, V and summaries of its own, are captured in one CUDA graph, so that no layer finds its bytes in the cache
and launches follow each other as in a decode step. Times are medians of replays over the number of layers; those of
single kernels come from CUPTI. Every sparse output is compared with float64 attention over the tokens that the step
selected. Each cell's line is written as soon as it is measured.
"""

import json
import math
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from shared import CELLS, replaced
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import eps_cuda
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.kernel_check import disagreement as disagreement_of_kernels
from eps_core.errors import ConfigError, exit_code, require
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.metrics.provenance import provenance
from eps_cuda.bench import bandwidth_variants, capture, stopwatch
from eps_cuda.cache import Cache
from eps_cuda.device import DTYPES
from eps_cuda.graph import BUCKET_TOKENS, attend_static
from eps_cuda.kernels.attend import attend_groups
from eps_cuda.kernels.dispatch import Attended
from eps_cuda.kernels.score import Depth
from eps_cuda.ops import OPS

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LEAST_BYTES = 400 * 2**20  # of K and V of all layers together: several times a GPU's last cache
MOST_LAYERS = 16
SHORTER = 20  # tokens than the context: most steps end within a unit, whose summary is not made yet
COPY_BYTES = 2**30
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
TOLERANCE = 0.02  # of bfloat16 outputs, of the largest


def layers_of(context: int, batch: int, config: EpsConfig, device: str) -> tuple[Cache, StepPlan, Tensor]:
    """A cache of as many layers as a cell needs, all with the same tokens, the plan of a step, and its query. Drawn on
    the device: `eps_core.bench.data` draws on the host, which takes minutes for the largest cell."""
    unit = config.cache_config.unit_tokens
    kv_bytes = 4 * context * batch * KV_HEADS * HEAD_DIM
    layers = min(max(-(-LEAST_BYTES // kv_bytes), 2), MOST_LAYERS) if device == "cuda" else 2
    dtype = DTYPES[DTYPE[device]]
    held = -(-context // unit)
    spec = CacheSpec(layers, KV_HEADS, HEAD_DIM, batch * held, DTYPE[device], max(8, batch))
    cache = eps_cuda.new_cache(spec, config.cache_config, device, kernels="triton")
    order = np.random.default_rng(0).permutation(batch * held).astype(np.int32).reshape(batch, held)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    centres = normal(64, KV_HEADS, HEAD_DIM)
    for b in range(batch):
        for start in range(0, context, 8192):
            tokens = np.arange(start, min(start + 8192, context))
            labels = torch.randint(64, (-(-len(tokens) // 32),), generator=generator, device=device)
            k = 0.7 * (centres[labels.repeat_interleave(32)[: len(tokens)]] + normal(len(tokens), KV_HEADS, HEAD_DIM))
            v = normal(len(tokens), KV_HEADS, HEAD_DIM)
            slots = order[b, tokens // unit].astype(np.int64) * unit + tokens % unit
            eps_cuda.write_kv(cache, 0, k.to(dtype), v.to(dtype), slots)
    for layer in range(1, layers):
        for name, array in cache.summaries[0].items():
            cache.summaries[layer][name].copy_(array)
        for arrays in (cache.k, cache.v, cache.valid):
            arrays[layer].copy_(arrays[0])  # type: ignore[union-attr]
    bucket = BUCKET_TOKENS // unit if device == "cuda" else 1
    table = np.full((batch, -(-held // bucket) * bucket), -1, np.int32)
    table[:, :held] = order
    q = normal(batch, Q_HEADS, HEAD_DIM) + centres[:batch].repeat_interleave(Q_HEADS // KV_HEADS, 1)
    return cache, StepPlan.of(config, table, np.full(batch, context - SHORTER)), q.to(dtype)


def sparse(cache: Cache, plan: StepPlan, q: Tensor) -> Callable[[], Attended]:
    """All layers of a captured step, as `graph.StaticStep` calls them: writes and attention, without projections. What
    the first attended to is returned."""
    config = plan.config
    batch, most = plan.table.shape[0], plan.table.shape[1] * config.cache_config.unit_tokens

    def upload(array: np.ndarray) -> Tensor:
        return OPS.on(q, array.astype(np.int32))

    widths = config.cascade_groups(most, HEAD_DIM)
    cascaded = tuple((upload(counts), width) for counts, width in zip(plan.cascaded(HEAD_DIM), widths, strict=True))
    depth = Depth(
        cascaded, (upload(plan.rescored), config.rescored_groups(most)), config.selection_config.reads_at_once
    )
    wanted, lengths, table = upload(plan.budget(plan.num_always_selected)), upload(plan.lengths), upload(plan.table)
    unit = config.cache_config.unit_tokens
    last = plan.table[:, (plan.lengths[0] - 1) // unit].astype(np.int64)
    slots = upload(last * unit + (plan.lengths - 1) % unit)
    spec = cache.spec
    at = SimpleNamespace(slots=slots, table=table, lengths=lengths, wanted=wanted)
    k, v = (q.new_zeros((batch, KV_HEADS, HEAD_DIM)) for _ in range(2))

    def run() -> Attended:
        read = at, depth, config.budget_groups(most)
        first = attend_static(config, cache, 0, q, k, v, *read)
        for layer in range(1, spec.num_layers):
            attend_static(config, cache, layer, q, k, v, *read)
        return first

    return run


def dense(cache: Cache, plan: StepPlan, q: Tensor) -> dict[str, Callable[[], Any]]:
    """Dense attention of all layers: by our own kernel over the pools, by Torch over contiguous K and V."""
    batch, length = len(plan.table), int(plan.lengths[0])
    table, lengths = OPS.on(q, plan.table), OPS.on(q, plan.lengths.astype(np.int32))
    layers = range(cache.spec.num_layers)

    def own() -> list[Tensor]:
        return [attend_groups(q, *cache.plain(layer), table, lengths, None, None, group_size=1)[0] for layer in layers]

    # the pools hold the sequences' tokens and nothing else: in the order of the pool they are as good a benchmark
    whole = [
        [pool.transpose(0, 1).reshape(KV_HEADS, batch, -1, HEAD_DIM).transpose(0, 1).contiguous()
         for pool in cache.plain(layer)]
        for layer in layers
    ]  # fmt: skip
    rows = q.view(batch, KV_HEADS, -1, HEAD_DIM)
    assert whole[0][0].shape[2] >= length
    return {"own": own, "sdpa": lambda: [scaled_dot_product_attention(rows, k, v) for k, v in whole]}


def median_us(run: Callable[[], Any], repeats: int = 30) -> float:
    timed = stopwatch("cuda")
    return 1000 * statistics.median(timed(run)[0] for _ in range(repeats))


def kernels_of(run: Callable[[], Any], layers: int, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Return the launches of each kernel in a layer and the microseconds that they take together."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    spent: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0].split("<")[0].split("::")[-1][:48]
            launches[name] += 1
            spent[name] += event.time_range.elapsed_us()
    each = layers * repeats
    return {
        name: {"launches": round(launches[name] / each, 2), "us": round(spent[name] / each, 2)}
        for name in sorted(spent, key=lambda one: -spent[one])
    }


def disagreement(cache: Cache, plan: StepPlan, q: Tensor, best: Attended) -> float:
    """The largest difference between a step's output of the last sequence and float64 attention over what it
    selected, of the largest number."""
    groups, counts, _ = best.listed()
    b, unit, worst, largest = len(plan.lengths) - 1, plan.config.cache_config.unit_tokens, 0.0, 0.0
    k, v = cache.plain(0)
    table = OPS.index(q, plan.table[b])
    for h in range(KV_HEADS):
        tokens = groups[b, h, : int(counts[b, h])].long()
        assert int((tokens[1:] <= tokens[:-1]).sum()) == 0, "a list is not ascending"
        keys, values = (pool[table[tokens // unit], h, tokens % unit].double() for pool in (k, v))
        heads = q[b].view(KV_HEADS, -1, HEAD_DIM)[h].double()
        want = torch.softmax(heads @ keys.T / math.sqrt(HEAD_DIM), -1) @ values
        got = best.out[b].view(KV_HEADS, -1, HEAD_DIM)[h].double()
        worst, largest = max(worst, float((got - want).abs().max())), max(largest, float(want.abs().max()))
    return worst / largest


def check(device: str) -> None:
    """Compiles every kernel at two shapes and compares them with array operations. Raises ConfigError where they
    disagree."""
    for head_dim, dtype in ((128, "bfloat16"), (64, "float32")) if device == "cuda" else ((32, "float32"),):
        spec = CacheSpec(1, 2, head_dim, 8, dtype)
        start, found = time.perf_counter(), None
        for config in (EpsConfig.of(method="rq"), EpsConfig.of(method="rq", cascade=(), rescore=1.0)):
            found = found or disagreement_of_kernels(eps_cuda, device, "triton", spec, 8, config, verified=True)
        require(found is None, f"kernels and array operations at {head_dim} x {dtype}: {found}")
        print(f"kernels agree with array operations: D {head_dim}, {dtype}, {time.perf_counter() - start:.0f} s")


@torch.inference_mode()
def measure(context: int, batch: int, config: EpsConfig, roof: float, device: str) -> dict[str, Any]:
    """One cell; without a GPU its sparse output is checked, and nothing timed."""
    cache, plan, q = layers_of(context, batch, config, device)
    layers, run = cache.spec.num_layers, sparse(cache, plan, q)
    wrong = disagreement(cache, plan, q, run())
    require(wrong < TOLERANCE, f"{context} x {batch}: the sparse output is wrong by {wrong:.3f}")
    kv_bytes = plan.dense_kv_bytes(cache.spec)
    read_bytes = plan.kv_bytes(cache.spec, int(plan.budget(plan.num_always_selected).sum()) * KV_HEADS)
    record = {
        "type": "layer", "context": context, "batch": batch, "layers": layers, "wrong_by": round(wrong, 5),
        "dense_kv_bytes": kv_bytes, "kv_bytes": read_bytes, "summary_bytes": plan.summary_bytes(cache.spec),
    }  # fmt: skip
    if device != "cuda":
        return record
    replay = capture(run)
    assert replay is not None
    variants = {name: capture(one) for name, one in dense(cache, plan, q).items()}
    dense_us = {name: median_us(one) / layers for name, one in variants.items() if one is not None}
    return record | {
        "step_us": round(median_us(replay) / layers, 2),
        "dense_us": {name: round(one, 2) for name, one in dense_us.items()},
        "dense_at_90_percent_us": round(kv_bytes / (0.9 * roof) / 1000, 2), "kernels": kernels_of(replay, layers),
    }  # fmt: skip


@click.command()
@click.option(
    "--cells", type=CELLS, default="32768x1,65536x4,131072x1,131072x8", show_default=True, help="context x batch, ..."
)
@click.option("--settings", default="{}", show_default=True, help='of EPS, as JSON: {"cascade": [], "rescore": 1.0}')
@click.option("--device", default="cuda", show_default=True, help="cpu: an interpreter, which checks and times nothing")
@click.option("--check", "only_check", is_flag=True, help="compare kernels with array operations and stop")
@click.option("-o", "--output", type=click.Path(path_type=Path))
def main(cells: tuple[tuple[int, int], ...], settings: str, device: str, only_check: bool, output: Path | None) -> None:
    has_gpu = device == "cuda"
    require(not has_gpu or torch.cuda.is_available(), "no CUDA device is there: run on a machine with a GPU")
    if only_check:
        check(device)
        return
    require(output is not None, "-o is missing: give a JSONL file")
    assert output is not None
    try:
        asked = dict(json.loads(settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f'--settings {settings} is no JSON object: write {{"budget": 0.1}}') from error
    config = EpsConfig.of(**{"method": "rq", **asked})
    name, roof = device, 1.0
    if has_gpu:
        copy, num_bytes = bandwidth_variants(COPY_BYTES, device)["copy"]
        name, roof = torch.cuda.get_device_name(), num_bytes / median_us(copy) / 1000
    with replaced(output) as out:
        out.write({
            "type": "run", "device_name": name, **provenance(eps_cuda.versions()), "copy_gbps": round(roof),
            "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": DTYPE[device],
            "config": config.to_dict(),
        })  # fmt: skip
        for context, batch in cells:
            record = measure(context, batch, config, roof, device)
            out.write(record)
            if not has_gpu:
                print(f"{context} x {batch}: the sparse output is right to {record['wrong_by']}")
                continue
            torch.cuda.empty_cache()
            dense_times = ", ".join(f"{name} {us}" for name, us in record["dense_us"].items())
            print(f"{context} x {batch}: step {record['step_us']} us, dense {dense_times}, "
                  f"at 90 % of the copy's {roof:.0f} GB/s {record['dense_at_90_percent_us']}")  # fmt: skip
            for kernel, one in record["kernels"].items():
                print(f"    {one['us']:8.1f} us  {one['launches']:5.2f} launches  {kernel}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
