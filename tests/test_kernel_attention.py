"""Attention over lists of groups on every kernel, in shapes and lists that no policy makes, where all that is not
listed is hidden."""

import math
from dataclasses import replace

import numpy as np
import pytest
from kernel_scenes import Case, Filled, check_state, query, selection_of

from eps_core import reference

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
    got = backend.attend(one.cache, 0, native, one.plan, selection)
    assert got[0].dtype == native.dtype and tuple(got[0].shape) == q.shape
    check_state(case, q, dtype, [backend.to_numpy(x).astype(np.float64) for x in got], want)
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
