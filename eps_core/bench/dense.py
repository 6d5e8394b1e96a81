"""The dense variants of the bench: the platform's own attention and ours, each run once and compared with float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.bench.data import Layer
from eps_core.bench.proof import DENSE_TOLERANCE, CheckError, dense_error
from eps_core.config.bytes import kv_bytes
from eps_core.errors import fault_line

GRAPH = " (graph)"  # ends the names of variants that replay a recorded launch


@dataclass
class Variant:
    """One thing that is timed."""

    call: Callable[[], Any]
    kind: str  # dense or eps
    bytes: int | None  # that one call moves, by the definitions of the record
    right: tuple[Array, Array] | None = None  # out and lse that every call must give, where it is a sparse step or part
    samples_ms: list[float] = field(default_factory=list)

    def statistics(self, roof_gbps: float) -> dict[str, Any]:
        samples = np.array(self.samples_ms)
        p10, median, p90 = np.percentile(samples, (10, 50, 90))
        gbps = None if self.bytes is None else self.bytes / median / 1e6
        return {
            "kind": self.kind, "ms": median, "p10_ms": p10, "p90_ms": p90, "mean_ms": samples.mean(),
            "least_ms": samples.min(), "bytes": self.bytes, "gbps": gbps,
            "share_of_bandwidth": None if gbps is None else gbps / roof_gbps, "samples_ms": self.samples_ms,
        }  # fmt: skip


class DenseVariants:
    """The dense variants of one shape, over contiguous copies of the cache's K and V [B, Hkv, T, D]; each was run once
    and compared with float64."""

    def __init__(self, platform: Any, timed: Callable[..., Any], layer: Layer) -> None:
        self.timed, shape = timed, layer.shape
        self.bytes = kv_bytes(1, shape.kv_heads, shape.head_dim, shape.batch * shape.context, shape.dtype)
        pairs = [layer.backend.read_kv(layer.cache, 0, row, shape.context) for row in layer.table]
        self.keys, self.values = (platform.stack_heads(parts) for parts in zip(*pairs, strict=True))
        del pairs
        self.variants: dict[str, Variant] = {}
        self.failed: dict[str, str] = {}
        for name, call in platform.dense_variants(self.keys, self.values, layer.q).items():
            if not self._add(layer, name, call):
                continue
            try:
                graph = platform.capture(call)
            except RuntimeError as error:
                self.failed[name + GRAPH] = fault_line(error)
                continue
            if graph is not None:
                self._add(layer, name + GRAPH, graph)

    def _add(self, layer: Layer, name: str, call: Callable[[], Any]) -> bool:
        """Return whether the variant runs and is right; if not, `failed` says why."""
        try:
            _, out = self.timed(call)
            error = dense_error(layer, out, self.keys, self.values)
        except Exception as problem:  # a library may lack this device, dtype or shape in any way it likes
            self.failed[name] = fault_line(problem)
            return False
        limit = DENSE_TOLERANCE[layer.shape.dtype]
        if not error <= limit:
            self.failed[name] = f"wrong: relative error {error:.2g}, {layer.shape.dtype} allows {limit:g}"
            return False
        self.variants[name] = Variant(call, "dense", self.bytes)
        return True

    def eps_variant(self, layer: Layer) -> dict[str, Variant]:
        """EPS's own dense attention over its paged cache."""
        plan = layer.plan()

        def attend() -> Any:
            return layer.backend.attend(layer.cache, 0, layer.q, plan, None)

        _, (out, _) = self.timed(attend)
        error, limit = dense_error(layer, out, self.keys, self.values), DENSE_TOLERANCE[layer.shape.dtype]
        if not error <= limit:
            raise CheckError(f"EPS's dense attention is wrong: relative error {error:.2g}: nothing was timed")
        return {"eps dense": Variant(attend, "dense", self.bytes)}
