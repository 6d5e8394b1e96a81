"""Attention over lists of groups on every kernel, in shapes and lists that no policy makes, where all that is not
listed is hidden."""

import math
from dataclasses import replace

import numpy as np
import pytest
from kernel_scenes import Case, Filled, changed, check_state, like, query, selection_of
from test_conformance import Case as CacheCase
from test_conformance import FilledCase, eps

from eps_core import reference
from eps_core.attention.protocol import Scores
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference.selection import missing_groups

pytestmark = pytest.mark.kernels("numba", "triton", "metal", arrays=False)
SHIM_ORDERS = ("forward", "backward")

CASES = [
    Case((61, 1, 30)),
    Case((190, 1, 65), num_heads=8, head_dim=64, dtype="bfloat16", block_size=64),
    Case((143, 48), num_heads=16, head_dim=128, dtype="float16", group_size=3, block_size=48),
    Case((100,), num_heads=32, head_dim=80, dtype="bfloat16", group_size=16, block_size=64),
    Case((1, 190), num_heads=6, head_dim=96, dtype="float16", group_size=48, block_size=96),
    Case((130, 256), num_heads=2, head_dim=256, dtype="bfloat16", group_size=128, block_size=128),
    Case((64, 17), num_heads=6, head_dim=33, group_size=1),
    Case((256, 200, 1), num_heads=4, num_kv_heads=1, head_dim=80, group_size=256, block_size=256),
    Case((77,), num_heads=34, head_dim=20, dtype="bfloat16", group_size=5, block_size=20),
    Case((0, 5), num_heads=2, dtype="float16"),
    Case((2600, 3), num_heads=4, num_kv_heads=1, head_dim=64, block_size=64, share=0.5),  # several splits
    Case((150, 1), num_heads=8, head_dim=64, block_size=64, share=None),
    Case((129, 64, 0), num_heads=6, head_dim=80, dtype="bfloat16", group_size=16, block_size=64, share=None),
    Case((60,), num_heads=8, head_dim=64, dtype="bfloat16", block_size=64, scale_q=0.1, share=0.2),
    # K and V as codes
    Case((190, 1, 65), num_heads=8, head_dim=64, dtype="bfloat16", block_size=64, bits=(8, 8)),
    Case((100, 64), num_heads=16, head_dim=128, dtype="bfloat16", group_size=16, block_size=64, bits=(4, 4)),
    Case((143, 48), num_heads=3, num_kv_heads=3, head_dim=128, dtype="float16", group_size=3, block_size=48,
         bits=(4, 8)),
    Case((75, 0, 17), num_heads=4, head_dim=64, group_size=4, bits=(8, 4)),
    Case((64, 17), num_heads=6, head_dim=34, group_size=1, bits=(4, 4)),
    Case((1, 190), num_heads=6, head_dim=96, dtype="bfloat16", group_size=48, block_size=96, bits=(8, 16)),
    Case((61, 30), num_heads=6, head_dim=33, bits=(16, 8)),
    Case((129, 64, 0), num_heads=8, head_dim=128, dtype="bfloat16", group_size=16, block_size=64, share=None,
         bits=(4, 8)),
]  # fmt: skip


def check_attend(backend, device, case: Case, dtype: str) -> None:
    """(out, lse) of queries of `dtype`, out with it, and of Metal's kernels the bytes fetched: those listed."""
    one = Filled(backend, device, case, np.random.default_rng(1))
    listed, q = one.listed(), query(case, one.rng, len(case.lengths), dtype)
    native = backend.from_numpy(q, dtype, device)
    selection, host = (None if case.share is None else selection_of(x, listed) for x in (native, q))
    want = reference.attend(one.judge, 0, q.astype(np.float64), one.plan, host)
    one.hide(listed)
    before = one.cache.kv_bytes_read
    got = backend.attend(one.cache, 0, native, one.plan, selection)
    assert got[0].dtype == native.dtype and tuple(got[0].shape) == q.shape
    check_state(case, q, dtype, [backend.to_numpy(x).astype(np.float64) for x in got], want)
    tokens = int(listed.sum()) * case.group_size
    read = tokens if case.share is not None else sum(case.lengths) * case.num_kv_heads
    assert one.cache.kv_bytes_read - before == read * one.cache.spec.kv_token_bytes
    if one.cache.kernels == "metal":
        from metal import shim

        (launch,) = (found for kernel, found in shim.last.items() if kernel.startswith("eps_attend_decode"))
        inside = np.repeat(listed, case.group_size, axis=2)[..., : int(one.lengths.max())]
        inside = inside & (np.arange(inside.shape[2]) < one.lengths[:, None, None])
        for name, fetched in one.row_bytes(int(inside.sum())).items():
            assert launch.read[name] == fetched, "bytes read are not what is listed"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_reads_what_is_listed(target, case) -> None:
    check_attend(*target, case, "float32")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((CASES[i], CASES[i].dtype) for i in (1, 2, -1)),
        (replace(CASES[1], dtype="float32"), "bfloat16"),
    ],
    ids=str,
)
def test_queries_in_sixteen_bits_read_what_is_listed(target, case, dtype) -> None:
    check_attend(*target, case, dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stay_within_float16_and_nan_stays(target, bits) -> None:
    """The scale of the largest float16 rounds up, and its code times that is beyond; a scale may be NaN or Inf."""
    backend, device = target
    case = Case((61,), num_kv_heads=1, dtype="float16", bits=(bits, bits), share=None)
    one = Filled(backend, device, case, np.random.default_rng(1))
    q = backend.from_numpy(query(case, one.rng, 1), "float16", device)
    for value in (65504.0, -65504.0, math.nan, math.inf):
        with np.errstate(invalid="ignore", over="ignore"):
            one.write(0, one.keys[0], np.full_like(one.values[0], value))
        out = backend.to_numpy(backend.attend(one.cache, 0, q, one.plan, None)[0])
        assert (out == value).all() if math.isfinite(value) else np.isnan(out).all()


# Corrections for what a list leaves out


CORRECTIONS = [
    CacheCase((64, 1, 30), eps("meanstd", group_size=2, block_size=4, correction_tokens=8)),
    CacheCase((190, 64, 65), eps("meanstd", group_size=2, block_size=64, correction_tokens=64), 8, 2, 64, "bfloat16"),
    CacheCase((143, 48), eps("meanstd", group_size=3, block_size=12, correction_tokens=24), 6, 2, 80, "float16"),
    CacheCase((120,), eps("meanstd", group_size=5, block_size=20, correction_tokens=60), 16, 2, 33),
    CacheCase((128,), eps("meanstd", group_size=16, correction_tokens=16), 16, 1, 128, "bfloat16"),
    CacheCase((1300,), eps("meanstd", group_size=2, block_size=4, correction_tokens=4), 2, 1),  # several splits
]


def check_correction(backend, device, case: CacheCase, offset: float, share: float = 0.4) -> None:
    """(out, lse) of random lists and estimates, some of them no number, by means of which some are invalid and all that
    do not count are hidden. `offset`: what estimates of listed groups are too high by."""
    one, rng = FilledCase(backend, device, case), np.random.default_rng(2)
    inner, judge = one.cache.correction, one.ref_cache
    # tokens that were written and taken back: groups that were full are open
    plan = StepPlan.of(case.config, one.table, np.maximum(one.lengths - 3, 1))
    shape = len(case.lengths), case.num_kv_heads, plan.num_groups
    listed = (rng.random(shape) < share) & plan.inside[:, None]
    estimate = rng.normal(size=shape) * 3 + np.where(listed, 3 + offset, 0)
    for value, of in ((np.inf, 0.05), (np.nan, 0.02)):
        estimate[rng.random(shape) < of] = value
    estimate = np.where(plan.inside[:, None], estimate, -np.inf).astype(np.float32)
    gone = rng.random(len(inner.state[0].fill)) < 0.2
    for cache in (inner, judge.correction):
        cache.state[0].fill[gone], cache.state[0].history = 0, 1 + cache.state[0].history
    if inner.valid:
        flags = inner.state[0].valid(np.arange(len(gone)))
        inner.valid[0] = like(inner.valid[0], flags.astype(np.uint8))
    stored = {name: backend.to_numpy(array) for name, array in inner.summaries[0].items()}
    judge = replace(judge, correction=replace(judge.correction, summaries=[stored]))
    per_unit = inner.cache_config.groups_per_unit
    counted = ~missing_groups(inner.state[0], plan.table, plan.lengths)
    hidden = np.ones((one.cache.spec.num_units, 1, per_unit), bool)
    for b, index in np.argwhere(counted):
        hidden[plan.table[b, index // per_unit], 0, index % per_unit] = False
    inner.summaries[0]["mean_scale"] = changed(inner.summaries[0]["mean_scale"], hidden, np.full((), np.nan))
    lse = rng.normal(8, 3, (len(case.lengths), case.num_heads)).astype(np.float32)
    missing = np.zeros(len(case.lengths), np.int64)
    scores = Scores(like(one.native, estimate), None, None, missing, kernels=one.cache.kernels)
    got = backend.attend_correction(one.cache, 0, plan, scores, selection_of(one.native, listed), like(one.native, lse))
    host = Scores(estimate.astype(np.float64), None, None, missing)
    want = reference.attend_correction(judge, 0, plan, host, selection_of(estimate, listed), lse.astype(np.float64))
    out, mass = (backend.to_numpy(x).astype(np.float64) for x in got)
    np.testing.assert_array_equal(np.isneginf(mass), np.isneginf(want[1]))
    there = ~np.isneginf(want[1])
    assert not np.isnan(mass).any()
    assert (np.abs(mass[there] - want[1][there]) <= 2.0**-18 * (1 + np.abs(want[1][there]))).all(), "log mass differs"
    largest = 127 * stored["mean_scale"].astype(np.float64).max()
    assert np.abs(out - want[0]).max() <= 2.0**-18 * largest, "correction differs"
    if one.cache.kernels == "metal":
        from metal import shim

        skipped = np.isfinite(estimate) & ~listed
        with_mass = skipped.reshape(*shape[:2], counted.shape[1], -1).any(axis=3) & counted[:, None]
        fetched = shim.last["eps_correction_parts"].read["mean"]
        assert fetched == with_mass.sum() * case.head_dim, "bytes read are not those of means with mass"


@pytest.mark.parametrize(("case", "offset"), [*((case, 3.0) for case in CORRECTIONS), (CORRECTIONS[3], -9.0)], ids=str)
def test_corrections_count_what_was_skipped(target, case, offset) -> None:
    check_correction(*target, case, offset)
