"""Times one attention layer, dense and sparse side by side, part by part; only what `proof` has verified.

Every round runs every variant once, in an order that rotates, each after the caches were overwritten: what other layers
do between two calls of one layer. Medians with their 10th and 90th percentile; dense variants read contiguous K and V,
their best case, and the fastest of them is what a sparse step is compared with.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from eps_core.attention.layer import sparse_attention
from eps_core.attention.protocol import Backend
from eps_core.bench.data import DESCRIPTION, Layer, Shape, Source, fill, pool_units
from eps_core.bench.dense import GRAPH, DenseVariants, Variant
from eps_core.bench.plan import BenchRequest, budgeted, moved_bytes
from eps_core.bench.proof import CheckError, Step, check_sparse, check_values, require_same, run_step
from eps_core.config.bytes import kv_bytes, summary_bytes
from eps_core.config.eps import EpsConfig
from eps_core.cpu.host import flush_bytes
from eps_core.errors import ConfigError, fault_line
from eps_core.load import backend_name, choose_device, load_backend, load_platform, resolve_kernels
from eps_core.metrics import provenance

MIN_ROUNDS, MAX_ROUNDS, MAX_WARM_ROUNDS = 5, 500, 300
COPIES = 8  # at least so many big copies, of which the best counts
COPY_SECONDS = 0.3
LARGEST_COPY_BYTES = 2**30


@dataclass(frozen=True)
class _Checked:
    config: EpsConfig  # with the budget that was asked for
    selection: dict[str, Any]  # the record's facts about what was selected
    values: dict[str, Any]
    moved: dict[str, int]  # bytes of each part
    variants: dict[str, Variant]
    failed: dict[str, str]  # variants that this machine cannot run, and why


class Bench:
    """One run: the backend with its platform, what was measured of it, and the lines of the record."""

    def __init__(self, request: BenchRequest, progress: Callable[[int, int, str], None] = lambda *given: None) -> None:
        self.request, self.progress = request, progress
        self.backend: Backend = load_backend(request.backend)
        self.name = backend_name(self.backend)
        self.device = choose_device(self.backend, request.device)
        self.kernels = resolve_kernels(request.kernels, self.backend.usable_kernels(self.device), self.device)
        self.platform: Any = load_platform(self.name)
        self.platform.prepare(self.device)
        auto = "float32" if self.device == "cpu" else "bfloat16"
        self.shapes = [
            Shape(
                context, batch, request.q_heads, request.kv_heads, request.head_dim, auto if dtype == "auto" else dtype
            )
            for dtype, context, batch in product(request.dtypes, request.contexts, request.batches)
        ]
        self.configs = [config.for_device(self.device) for config in request.configs()]
        if request.q_heads % request.kv_heads:
            raise ConfigError(
                f"q-heads {request.q_heads} is not a multiple of kv-heads {request.kv_heads}: "
                "use 32 and 8, or equal ones"
            )
        for shape in self.shapes:
            for config, (kind, share) in product(self.configs, request.shares()):
                budgeted(config, shape, kind, share)  # refuses what cannot be solved
            self._check_memory(shape)
        self.last_cache_bytes = self.platform.last_cache_bytes(self.device)
        self.flush_bytes = flush_bytes(self.last_cache_bytes)
        self.flush = self.platform.flusher(self.flush_bytes, self.device)
        self.timed = self.platform.stopwatch(self.device)

    @property
    def interpreted(self) -> bool:
        """Return whether kernels for a GPU run in an interpreter: their times mean nothing."""
        return self.kernels == "triton" and self.device == "cpu"

    def lines(self) -> Any:
        """Yields the run's line, then one of every cell."""
        first = self._run_line()
        roof = first["bandwidth"]["roof_gbps"]
        yield first
        number, total = 0, len(self.shapes) * len(self.configs) * len(self.request.shares())
        for shape in self.shapes:
            source = Source(shape, self.request.seed)
            dense: DenseVariants | None = None
            for config in self.configs:
                self.progress(number, total, f"filling {shape.batch} x {shape.context:,} tokens")
                layer = self._fill(source, config, None if dense is None else (dense.keys, dense.values))
                dense = dense or DenseVariants(self.platform, self.timed, layer)
                for kind, share in self.request.shares():
                    self.progress(
                        number, total, f"{config.cache_config.method}@{config.cache_config.S}, {kind} {share:g}"
                    )
                    number += 1
                    yield self._cell(layer, dense, kind, share, roof)

    def headline(self) -> dict[str, Any]:
        """The request's one cell in a few seconds: its step and the fastest dense attention, checked as all are, but
        neither the step's parts nor the machine's bandwidth."""
        (shape,), (config,), ((kind, share),) = self.shapes, self.configs, self.request.shares()
        self.progress(0, 2, f"filling {shape.context:,} tokens")
        layer = self._fill(Source(shape, self.request.seed), config)
        dense = DenseVariants(self.platform, self.timed, layer)
        self.progress(1, 2, f"{shape.context:,} tokens")
        checked = self._checked(layer, dense, kind, share)
        steps = ("step", "step" + GRAPH)
        variants = {name: one for name, one in checked.variants.items() if one.kind == "dense" or name in steps}
        self._measure(layer, variants)
        self.progress(2, 2, "")
        ms = {name: float(np.median(variant.samples_ms)) for name, variant in variants.items()}
        best = min((name for name, variant in variants.items() if variant.kind == "dense"), key=ms.__getitem__)
        step_ms = ms.get("step" + GRAPH, ms["step"])
        return {
            **asdict(shape),
            "method": config.cache_config.method,
            "group_size": config.cache_config.S,
            "best_dense": best,
            "best_dense_ms": ms[best],
            "step_ms": step_ms,
            "speedup": ms[best] / step_ms,
            "bytes_ratio": checked.moved["step"] / dense.bytes,
        }

    def _fill(self, source: Source, config: EpsConfig, keys_values: Any = None) -> Layer:
        return self._refusing(
            config, fill, self.backend, source, config, self.device, self.kernels, self._spare_tokens(),
            self.platform.synchronize, keys_values,
        )  # fmt: skip

    def _run_line(self) -> dict[str, Any]:
        byte_shares, fractions = self.request.byte_shares, self.request.fractions
        return {
            "type": "run",
            "command": "bench",
            "settings": asdict(replace(self.request, output=None, fractions=() if byte_shares else fractions)),
            "backend": self.name,
            "device": self.device,
            **self.platform.device_facts(self.device),
            "kernels": self.kernels,
            "interpreted": self.interpreted,
            **provenance.provenance(self.backend.versions()),
            "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,  # of others: a busy core tells
            "data": DESCRIPTION,
            "last_cache_bytes": self.last_cache_bytes,
            "flushed_bytes": self.flush_bytes,
            "bandwidth": self._bandwidth(),
        }

    def _bandwidth(self) -> dict[str, Any]:
        """The best of a few big copies (bytes read and written) and of reductions that only read."""
        size = min(max(4 * (self.last_cache_bytes or 0), 128 * 2**20), LARGEST_COPY_BYTES)
        size = min(size, (self.platform.free_bytes(self.device) or size * 16) // 16)
        best: dict[str, float] = {}
        for name, (function, moved) in self.platform.bandwidth_variants(size, self.device).items():
            times: list[float] = []
            start = time.monotonic()
            while len(times) < COPIES or time.monotonic() - start < COPY_SECONDS:
                times.append(self.timed(function)[0])
            best[name] = moved / min(times) / 1e6
        roof = max(best, key=lambda name: best[name])
        return {
            "copy_gbps": best["copy"], "read_gbps": best["read"], "roof_gbps": best[roof], "roof": roof,
            "buffer_bytes": size,
        }  # fmt: skip

    def _check_memory(self, shape: Shape) -> None:
        need = 0
        for config in self.configs:
            unit = config.cache_config.unit_tokens
            pool = pool_units(shape, config, self._spare_tokens()) * unit
            dense = kv_bytes(1, shape.kv_heads, shape.head_dim, shape.batch * shape.context, shape.dtype)
            held = kv_bytes(1, shape.kv_heads, shape.head_dim, pool, shape.dtype)
            summaries = summary_bytes(config.cache_config, 1, shape.kv_heads, shape.head_dim, pool)
            # dense K and V twice: a library may want them in pages, a matmul in another dtype
            need = max(need, 2 * dense + held + summaries)
        free = self.platform.free_bytes(self.device)
        if free is not None and need > free:
            raise ConfigError(
                f"context {shape.context} x batch {shape.batch} needs {need / 2**30:.1f} GiB and {self.device} has "
                f"{free / 2**30:.1f} GiB free: lower --context or --batch"
            )

    @property
    def _max_rounds(self) -> int:
        return self.request.repeats if self.request.seconds is None else MAX_ROUNDS

    def _spare_tokens(self) -> int:
        """Slots that one sequence needs for the writes of all cells of a cache: two a round."""
        return len(self.request.shares()) * 2 * (1 + MAX_WARM_ROUNDS + self._max_rounds)

    def _refusing(self, config: EpsConfig, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result; raise CheckError where it fails."""
        try:
            return function(*arguments)
        except ConfigError:
            raise
        except Exception as error:  # a kernel may fail in any way, and the user asked for a time
            what = f"{config.cache_config.method}@{config.cache_config.S} by kernels {self.kernels}"
            raise CheckError(f"{what} failed: {fault_line(error)}: nothing was timed") from error

    def _checked(self, layer: Layer, dense: DenseVariants, kind: str, share: float) -> _Checked:
        """Everything of one cell that may be timed: found to skip groups, to read what was selected, to be right."""
        config = budgeted(layer.config, layer.shape, kind, share)
        step = self._refusing(config, run_step, layer, config, self.platform.synchronize)
        selection = check_sparse(layer, step, self.kernels, partial=share < 1)
        values = check_values(layer, config, step, dense.keys, dense.values)
        moved = moved_bytes(layer, config, selection["kv_bytes"])
        variants = {**dense.variants, **dense.eps_variant(layer), **_eps_variants(layer, config, step, moved)}
        failed = dict(dense.failed)
        self._add_graphs(layer, config, step, moved, variants, failed)
        for name in ("step", "step_with_write"):
            _, result = self.timed(variants[name].call)
            require_same(layer, result[:2], step.read, f"its own parts, as {name}")
        return _Checked(config, selection, values, moved, variants, failed)

    def _cell(self, layer: Layer, dense: DenseVariants, kind: str, share: float, roof: float) -> dict[str, Any]:
        shape, checked = layer.shape, self._checked(layer, dense, kind, share)
        config, moved, variants = checked.config, checked.moved, checked.variants
        rounds, warm_rounds = self._measure(layer, variants)
        stats = {name: variant.statistics(roof) for name, variant in variants.items()}
        best = min((name for name in stats if stats[name]["kind"] == "dense"), key=lambda name: stats[name]["ms"])
        graphed = stats.get("step" + GRAPH)
        total_bytes = moved["step"]
        return {
            "type": "bench",
            "backend": self.name,
            "device": self.device,
            "kernels": layer.cache.kernels,
            "interpreted": self.interpreted,
            **asdict(shape),
            "method": config.cache_config.method,
            "group_size": config.cache_config.S,
            "asked": {kind: share},
            "config": config.to_dict(),
            **checked.selection,
            "summary_bytes": moved["score"],
            "bytes_read": total_bytes,
            "dense_bytes": dense.bytes,
            "bytes_ratio": total_bytes / dense.bytes,
            "check": checked.values,
            "rounds": rounds,
            "warm_rounds": warm_rounds,
            "dense_exceeds_last_cache": _exceeds(dense.bytes, self.last_cache_bytes),
            "sparse_exceeds_last_cache": _exceeds(total_bytes, self.last_cache_bytes),
            "arms": stats,
            "failed_variants": checked.failed,
            "best_dense": best,
            "best_dense_ms": stats[best]["ms"],
            "step_ms": stats["step"]["ms"],
            "speedup": stats[best]["ms"] / stats["step"]["ms"],
            "speedup_with_write": stats[best]["ms"] / stats["step_with_write"]["ms"],
            "scoring_share_of_dense": (stats["score"]["ms"] + stats["select"]["ms"]) / stats[best]["ms"],
            "graphed_step_ms": None if graphed is None else graphed["ms"],
            "graphed_speedup": None if graphed is None else stats[best]["ms"] / graphed["ms"],
        }

    def _add_graphs(
        self, layer: Layer, config: EpsConfig, step: Step, moved: dict[str, int], variants: dict[str, Variant],
        failed: dict[str, str],
    ) -> None:  # fmt: skip
        """Recorded launches of the parts that have them, each checked against the parts themselves, and one of the
        step, which `graphed_step_ms` is of."""
        try:
            parts = self.platform.device_parts(layer.cache, layer.q, layer.plan(config))
        except RuntimeError as error:
            failed["parts" + GRAPH] = fault_line(error)
            return
        for name, part in parts.items():
            try:
                graph = self.platform.capture(part)
            except RuntimeError as error:
                failed[name + GRAPH] = fault_line(error)
                continue
            if graph is None:
                return
            if name in ("attend", "step"):
                require_same(layer, self.timed(graph)[1], step.read, f"its own parts, as the graph of {name}")
            variants[name + GRAPH] = Variant(graph, "eps", moved[name])

    def _measure(self, layer: Layer, variants: dict[str, Variant]) -> tuple[int, int]:
        """Return (rounds, rounds before them that only warmed up). Raises CheckError where a variant, called once
        more after them, gives something else than it must: what became dense or wrong on the way has no time."""
        request, every = self.request, list(variants.values())
        for variant in every:
            variant.samples_ms = []
        start, warm = time.monotonic(), 0
        while warm < MAX_WARM_ROUNDS and (warm == 0 or time.monotonic() - start < request.warm_seconds):
            self._round(every, keep=False)
            warm += 1
        start, rounds = time.monotonic(), 0
        while rounds < self._max_rounds:
            # a fixed neighbour would be measured along: threads of the variant before may still spin
            self._round(random.Random(rounds).sample(every, len(every)), keep=True)
            rounds += 1
            if request.seconds is not None and rounds >= MIN_ROUNDS and time.monotonic() - start >= request.seconds:
                break
        for name, variant in variants.items():
            if variant.right is not None:
                _, (out, lse, *_) = self.timed(variant.call)
                require_same(layer, (out, lse), variant.right, f"its first result, after the last timed call of {name}")
        return rounds, warm

    def _round(self, variants: Sequence[Variant], keep: bool) -> None:
        for variant in variants:
            self.flush()
            elapsed_ms, _ = self.timed(variant.call)
            if keep:
                variant.samples_ms.append(elapsed_ms)


def _eps_variants(layer: Layer, config: EpsConfig, first: Step, moved: dict[str, int]) -> dict[str, Variant]:
    """The parts of a step, each with the results of `first` as its input, and the step as a decoder takes it: with its
    statistics, and dense where every group would be read. What a step knows once for all layers is known before."""
    backend, plan = layer.backend, layer.plan(config)

    def score() -> Any:
        return backend.score(layer.cache, 0, layer.q, plan)

    def select(scores: Any = first.scores) -> Any:
        return backend.select(scores, plan)

    def attend(selection: Any = first.selection) -> Any:
        return backend.attend(layer.cache, 0, layer.q, plan, selection)

    def step() -> Any:
        out, one = sparse_attention(backend, layer.cache, 0, layer.q, plan)
        return out, one.lse, *one.pending.values()

    def step_with_write() -> Any:
        cache = layer.write()
        return *step(), cache

    return {
        "score": Variant(score, "eps", moved["score"]),
        "select": Variant(select, "eps", moved["select"]),
        "attend": Variant(attend, "eps", moved["attend"], first.read),
        "write": Variant(layer.write, "eps", moved["write"]),
        "step": Variant(step, "eps", moved["step"], first.read),
        "step_with_write": Variant(step_with_write, "eps", moved["step"] + moved["write"], first.read),
    }


def _exceeds(num_bytes: int, last_cache: int | None) -> bool | None:
    return None if last_cache is None else num_bytes > last_cache
