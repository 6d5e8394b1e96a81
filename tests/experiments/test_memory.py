"""The table of quantized KV, eviction and EPS: its variants and its bytes."""

import json
from dataclasses import asdict

from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.eviction.config import EvictionConfig
from eps_core.eviction.table import POLICIES
from eps_core.models.config import DEMO_MODEL
from experiments.memory.run import EVERY, SHARES, Plan, Variant, table_cells, tally_document, variants


def test_the_arms_of_a_table() -> None:
    found, whole = variants((0.5, 0.25)), [name for name in POLICIES if POLICIES[name].SPEC.prompt]
    assert not set(whole) & {variant.keep.policy for variant in found}, "of these a share says nothing"
    assert len(set(found)) == len(found) == len(variants()) - 2 * (len(POLICIES) - len(whole)) and len(SHARES) == 4
    parts = {
        (variant.keep.enabled, variant.kv_bits != (16, 16), variant.config.cache_config.enabled) for variant in found
    }
    assert len(parts) == 7, "eviction, codes and EPS in every combination but none of them"
    assert all(
        variant.keep.share == 0.5 for variant in found if variant.keep.enabled and variant.config.cache_config.enabled
    )
    assert all(variant.keep.every == EVERY for variant in found if variant.keep.enabled)


def test_bytes_are_of_a_dense_cache_of_16_bits() -> None:
    """Codes keep and read codes and scales; the same variant over 16 bits reads and keeps what it did."""
    session = Session.open(DEMO_MODEL, "numpy", "cpu", "float32", "bfloat16")
    some = (Variant(), Variant(kv_bits=(8, 8)), Variant(EvictionConfig("streaming", 0.5, 0)),
            Variant(EvictionConfig("streaming", 0.5, 0), kv_bits=(8, 8)),
            Variant(config=EpsConfig.of(method="rq", budget=0.2), kv_bits=(8, 8)))  # fmt: skip
    plan = Plan(160, 0, 1, 6, seed=0, variants=some)
    results = [(kind, *tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    plain, coded, evicted, both, sparse = table_cells(plan, session.spec.head_dim, results)
    ratio = (session.spec.head_dim + 2) / (2 * session.spec.head_dim)  # an int8 code a number and a float16 a row
    assert plain.bytes_ratio == plain.bytes_kept_ratio == 1.0 and plain.kl_mean == 0.0
    assert coded.bytes_ratio == coded.bytes_kept_ratio == ratio and coded.kl_mean > 0
    assert evicted.bytes_ratio is not None and both.bytes_ratio == evicted.bytes_ratio * ratio
    assert evicted.bytes_kept_ratio is not None and both.bytes_kept_ratio == evicted.bytes_kept_ratio * ratio
    assert sparse.bytes_kept_ratio is not None and sparse.bytes_kept_ratio > ratio, "summaries are kept beside codes"
    assert json.loads(json.dumps(asdict(sparse)))["kv_bits"] == [8, 8]
