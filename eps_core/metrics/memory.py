"""Memory of a cache of a model shape: summaries by method; K and V by what is kept of them and in how many bits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eps_core.config.bytes import kv_bytes, summary_bytes, summary_group_bytes
from eps_core.config.cache import COARSE_GROUP_BLOCKS, METHODS, CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import KvFormats, as_given, formats_for
from eps_core.metrics.terminal import MIB, table
from eps_core.summaries.table import method_spec

Shape = tuple[int, int, int, int]  # layers, KV heads, dimensions of a head, tokens
KEPT_SHARES = (1.0, 0.5, 0.25, 0.125)
USUAL_PAIRS: tuple[KvFormats, ...] = ((8, 4),)  # of K and V, shown beside those of one format


def memory_rows(shape: Shape, kv_bits: KvFormats, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Summary memory of one sequence by method: coarse groups (8 pages) of every method but those of codes, then each
    fine one at its own group size. Settings of EpsConfig that are `given` and not None replace the defaults; a
    rescoring bit is kept of all codes, whatever share of them a step reads, and of none where that is 0."""
    dense = kv_bytes(*shape, "bfloat16", kv_bits)
    blocks = COARSE_GROUP_BLOCKS if given["group_blocks"] is None else given["group_blocks"]
    size = {"group_size": given["group_size"]}
    plans: list[tuple[str, str, dict[str, Any]]] = [
        ("coarse", method, {"group_blocks": blocks}) for method in METHODS[1:] if not method_spec(method).coded
    ]
    for method in METHODS[1:]:
        if method_spec(method).group_size is not None:
            plans.append(("fine", method, size))
        if method_spec(method).coded:
            plans += [("fine", method, {**size, "rq_bounds": True}), ("fine", method, {**size, "bound_bits": 8})]
    rows = []
    for kind, method, own in plans:
        settings = {**own, "block_size": given["block_size"]}
        if method_spec(method).dim is not None:
            settings["dim"] = given["dim"]
        if method_spec(method).coded:
            settings |= {name: given[name] for name in ("mean_tokens", "cascade", "rescore")}
            if "rq_bounds" in settings:  # which read codes whole
                settings["cascade"] = None
        cache = EpsConfig.of(method, **settings).cache_config
        num_bytes = summary_bytes(cache, *shape)
        rows.append(
            {
                "kind": kind,
                "method": method,
                "dim": cache.dim,
                "bits": cache.code_bits,
                "mean_tokens": cache.mean_tokens or None,
                "rq_bounds": cache.rq_bounds,
                "bound_bits": cache.bound_bits,
                "group_size": cache.S,
                "bytes_per_group": summary_group_bytes(cache, shape[2]),
                "summary_bytes": num_bytes,
                "summary_mib": num_bytes / MIB,
                "share_of_kv": num_bytes / dense,
            }
        )
    return rows


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        name = row["method"]
        if row["bits"] is not None:
            name += f" {row['bits']} bit about {row['mean_tokens']}"
            name += " with bounds" if row["rq_bounds"] else ""
            name += f", {row['bound_bits']}-bit keys" if row["bound_bits"] else ""
        elif row["dim"] is not None:
            name += f" dim {row['dim']}"
        cells.append(
            [
                f"{row['kind']:6}  {name}",
                str(row["group_size"]),
                f"{row['bytes_per_group']:,}",
                f"{row['summary_mib']:,.1f}",
                f"{100 * row['share_of_kv']:.2f} %",
            ]
        )
    return table(cells, ["groups  method", "tokens a group", "bytes a group", "MiB", "of KV"])


def kept_rows(shape: Shape, kv_bits: KvFormats, cache_config: CacheConfig) -> list[dict[str, Any]]:
    """Memory of one sequence by formats of K and V, `kv_bits` among them, and the share of its tokens that is kept,
    with summaries as `cache_config` has them of what is left and without."""
    layers, kv_heads, head_dim, num_tokens = shape
    usable = formats_for(head_dim)
    pairs = [*((one, one) for one in usable), *(pair for pair in USUAL_PAIRS if {*pair} <= {*usable}), kv_bits]
    rows = []
    for bits in dict.fromkeys(pairs):
        for share in KEPT_SHARES:
            kept = math.ceil(share * num_tokens)
            kv = kv_bytes(layers, kv_heads, head_dim, kept, "bfloat16", bits)
            summaries = summary_bytes(cache_config, layers, kv_heads, head_dim, kept)
            rows.append({"kv_bits": bits, "kept_share": share, "kv_bytes": kv, "summary_bytes": summaries})
    return rows


def kept_table(rows: Sequence[dict[str, Any]]) -> str:
    """MiB of K and V, and of the summaries beside them: a row for formats of K and V, a column a kept share."""
    cells = []
    for bits in dict.fromkeys(row["kv_bits"] for row in rows):
        mine = [row for row in rows if row["kv_bits"] == bits]
        sizes = [f"{row['kv_bytes'] / MIB:,.0f} + {row['summary_bytes'] / MIB:,.1f}" for row in mine]
        cells.append([as_given(bits), *sizes])
    return table(cells, ["--kv-bits", *(f"keep {share:g}" for share in KEPT_SHARES)])
