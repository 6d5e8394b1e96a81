"""Metal's kernel for several rows of a sequence: values against float64, bytes against what one dense step reads, and
that a row's bits are its own.

Whatever no row may read is NaN here, in K and in V.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal import shim
from metal.shim import ShimError, metal_shim  # noqa: F401
from test_metal_attend import BARRIER, ROUNDING, _close, _float64, broken, held, only, pool_bytes

import eps_mlx
from eps_core.backend import attention
from eps_core.backend.pages import Pool
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.kv_cache.rows import Rows
from eps_core.kv_cache.step_plan import StepPlan
from eps_mlx.kernels import launch
from eps_mlx.kernels import rows as rows_kernels


@dataclass
class Scene:
    """Rows of ragged sequences over scattered units."""

    q: mx.array
    k: Pool
    v: Pool
    rows: Rows
    size: int
    selected_mask: np.ndarray | None

    @classmethod
    def build(
        cls,
        dtype: mx.Dtype = mx.float32,
        D: int = 64,
        R: int = 4,
        S: int = 2,
        U: int = 64,
        lengths: tuple[int, ...] = (301, 64, 7),
        num_rows: tuple[int, ...] = (9, 1, 7),
        kv_heads: int = 2,
        asked: bool = True,
        q_dtype: mx.Dtype | None = None,
        bits: tuple[int, int] = (16, 16),
    ) -> "Scene":
        rng = np.random.default_rng(0)
        batch, units, total = len(lengths), -(-max(lengths) // U) + 1, sum(num_rows)
        pool = batch * units + 2
        table, free = np.full((batch, units), -1, np.int32), rng.permutation(pool)
        inside = np.zeros((pool, 1, U, 1), bool)
        for b, length in enumerate(lengths):
            needed = -(-length // U)
            table[b, :needed], free = free[:needed], free[needed:]
            inside[table[b, np.arange(length) // U], 0, np.arange(length) % U] = True
        k, v = (rng.standard_normal((pool, kv_heads, U, D)).astype(np.float32) for _ in range(2))
        k *= rng.choice([0.3, 1.0, 3.0], (*k.shape[:3], 1)).astype(np.float32)  # so that maxima move while reading
        q = rng.standard_normal((total, kv_heads * R, D)).astype(np.float32)
        selected_mask = rng.random((total, kv_heads, units * U // S)) < 0.3
        selected_mask[0] = False  # a row of which nothing was visited
        return cls(
            mx.array(q).astype(q_dtype or dtype),
            *(
                held(mx.array(np.where(inside, x, np.nan)).astype(dtype), one)
                for x, one in zip((k, v), bits, strict=True)
            ),
            Rows.of(table, np.array(lengths), np.array(num_rows)),
            S,
            selected_mask if asked else None,
        )

    def run(self) -> list[np.ndarray | None]:
        found = rows_kernels.attend_rows(
            *(self.q, self.k, self.v),
            *(mx.array(x.astype(np.int32)) for x in (self.rows.table, self.rows.lengths, self.rows.starts)),
            most_rows=int(self.rows.num_rows.max()),
            group_size=self.size,
            selected_mask=None if self.selected_mask is None else mx.array(self.selected_mask),
        )
        assert found[0].dtype == self.q.dtype and found[1].dtype == mx.float32
        return [None if one is None else _float64(one) for one in found]

    def truth(self) -> list[np.ndarray]:
        q, k, v = (_float64(x) for x in (self.q, self.k, self.v))
        kv_heads, U = k.shape[1:3]
        repeat, groups = q.shape[1] // kv_heads, self.rows.table.shape[1] * U // self.size
        out, lse, selected = np.zeros_like(q), np.zeros(q.shape[:2]), np.full(q.shape[:2], -np.inf)
        for t, head in np.ndindex(q.shape[:2]):
            h, tokens = head // repeat, np.arange(self.rows.seen[t])
            at = (self.rows.table[self.rows.sequence[t], tokens // U], h, tokens % U)
            logits = k[at] @ q[t, head] / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max())
            out[t, head], lse[t, head] = weights @ v[at] / weights.sum(), logits.max() + np.log(weights.sum())
            if self.selected_mask is not None:
                of_group = np.full(groups, -np.inf)
                np.logaddexp.at(of_group, tokens // self.size, logits)
                selected[t, head] = np.logaddexp.reduce(of_group[self.selected_mask[t, h]], initial=-np.inf)
        return [out, lse, selected]

    def check(self, statistics: dict[str, shim.Statistics]) -> None:
        found, true = self.run(), self.truth()
        _close("attention", found[0], true[0], ROUNDING[self.q.dtype])
        _close("log mass", found[1], true[1], ROUNDING[mx.float32])
        if self.selected_mask is not None:
            _close("visited mass", found[2], true[2], ROUNDING[mx.float32])
        repeat = self.q.shape[1] // self.k.shape[1]
        tokens = self.rows.lengths * self.k.shape[1]
        times = -(-self.rows.num_rows * repeat // 64)  # once for 64 queries
        one = only(statistics, "eps_attend_rows")
        for name, listed in pool_bytes(self.k, self.v, int(tokens.sum())).items():
            assert one.read[name] == listed, "bytes read are not those of a dense step"
        for name in ("k_pool", "v_pool"):
            loaded = pool_bytes(self.k, self.v, int(tokens @ times))[name]
            assert one.loaded[name] == loaded, "bytes are loaded more often than for 64 queries at once"


CASES: dict[str, dict[str, Any]] = {
    "fp32-D64-R4-S2": dict(),
    "fp32-D64-R1-S1-N1": dict(R=1, S=1, num_rows=(1, 1, 1)),
    "bf16-D128-R4-S2-N17": dict(dtype=mx.bfloat16, D=128, lengths=(601, 130), num_rows=(17, 3)),
    "fp16-D80-R3-S3": dict(dtype=mx.float16, D=80, R=3, S=3, U=48),
    "fp16-D96-R16-S16-N33": dict(dtype=mx.float16, D=96, R=16, S=16, lengths=(131,), num_rows=(33,), kv_heads=1),
    "bf16-D256-R8-S128": dict(dtype=mx.bfloat16, D=256, R=8, S=128, U=128, lengths=(257, 40), num_rows=(9, 2)),
    "fp32-D160-R2-S64": dict(D=160, R=2, S=64, lengths=(130, 70), num_rows=(5, 9)),
    "fp32-D20-R5-S5": dict(D=20, R=5, S=5, U=40, asked=False),
    "fp16-D33-R3-S48": dict(dtype=mx.float16, D=33, R=3, S=48, U=48),
    "bf16-D16-R4-S2-splits": dict(dtype=mx.bfloat16, D=16, lengths=(1300, 515), num_rows=(9, 5), kv_heads=1),
    "fp32-D64-R4-S2-K8V8": dict(lengths=(101, 7), num_rows=(9, 7), bits=(8, 8)),
    "bf16-D128-R8-S16-K4V4": dict(dtype=mx.bfloat16, D=128, R=8, S=16, lengths=(101,), num_rows=(9,), bits=(4, 4)),
    "fp16-D80-R1-S3-K8V4": dict(dtype=mx.float16, D=80, R=1, S=3, U=48, lengths=(101,), num_rows=(3,), bits=(8, 4)),
    "fp32-D36-R3-S2-K4V16": dict(D=36, R=3, lengths=(101, 7), num_rows=(3, 2), asked=False, bits=(4, 16)),
    "fp16-D64-R4-q32": dict(dtype=mx.float16, q_dtype=mx.float32, asked=False),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_float64(metal_shim: Any, case: str) -> None:  # noqa: F811
    Scene.build(**CASES[case]).check(metal_shim)


CASES_ALONE: list[dict[str, Any]] = [
    dict(S=3, U=48, R=4),
    dict(S=64, R=8, dtype=mx.bfloat16, D=128),
    dict(S=16, R=2, dtype=mx.bfloat16, bits=(8, 4)),
]


@pytest.mark.parametrize("case", CASES_ALONE, ids=str)
def test_the_bits_of_a_row_are_its_own(metal_shim: Any, case: dict[str, Any]) -> None:  # noqa: F811
    """Neither the batch, nor the other rows, nor the table's width, nor what else is asked for changes them."""
    one = Scene.build(lengths=(1111, 530, 40), num_rows=(9, 4, 17), kv_heads=1, **case)
    out, lse, *_ = one.run()
    for t in (0, 1, 8, 9, 12, 13, 20, 29):
        b, seen = int(one.rows.sequence[t]), one.rows.seen[t : t + 1]
        wide = np.full((1, 40), -1, np.int32)
        wide[0, : one.rows.table.shape[1]] = one.rows.table[b]
        for table in (wide, wide[:, : -(-int(seen[0]) // one.k.shape[2])]):
            alone = replace(one, q=one.q[t : t + 1], rows=Rows.of(table, seen, np.array([1])), selected_mask=None)
            got, mass, *_ = alone.run()
            np.testing.assert_array_equal(got[0], out[t])
            np.testing.assert_array_equal(mass[0], lse[t])


def made_cache(kernels: str, bits: tuple[int, int] = (16, 16)) -> tuple[eps_mlx.Cache, mx.array]:
    config = EpsConfig.of(method="meanstd", block_size=16, group_size=4)
    cache = eps_mlx.new_cache(
        CacheSpec(1, 2, 16, 4, "float32", k_bits=bits[0], v_bits=bits[1]), config.cache_config, "cpu", kernels
    )
    rows = mx.array(np.random.default_rng(0).normal(size=(40, 2, 16)).astype(np.float32))
    return eps_mlx.write_kv(cache, 0, rows, rows, np.arange(40)), rows


@pytest.mark.parametrize("bits, suffix", [((16, 16), ""), ((8, 4), "_k8_v4"), ((16, 8), "_v8")], ids=str)
def test_a_cache_with_kernels_goes_through_them(
    metal_shim: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    bits: tuple[int, int],
    suffix: str,
) -> None:
    cache, keys = made_cache("metal", bits)
    launched = []

    def record(kernel: Any, *rest: Any) -> Any:
        launched.append(kernel.name)
        return shim.runner(kernel, *rest)

    def refuse(*args: Any) -> None:
        raise AssertionError("K and V are read by array operations")

    monkeypatch.setattr(launch, "runner", record)
    monkeypatch.setattr(attention, "read_kv", refuse)
    rows = Rows.of(np.arange(3)[None], np.array([40]), np.array([5]))
    eps_mlx.attend_rows(cache, 0, mx.repeat(keys[:5], 2, axis=1), rows)
    assert {key[0] for key in rows._made} == {"device", "starts"}, "copied once a pass"
    plan = StepPlan.dense(cache.cache_config, np.arange(3)[None], np.array([40]))
    eps_mlx.attend(cache, 0, mx.repeat(keys[:1], 2, axis=1), plan, None)
    kernels = (f"eps_attend_rows{suffix}", f"eps_attend_decode{suffix}")
    assert launched == [kernels[0], "eps_attend_merge", kernels[1], "eps_attend_merge"]


def test_placing_needs_no_kernel_and_kernels_see_no_summary(metal_shim: Any) -> None:  # noqa: F811
    """`write_kv_tentative` is array operations; the flags that kernels go by are those of the host's state."""
    cache, keys = made_cache("metal")
    plain, _ = made_cache("arrays")
    metal_shim.clear()
    cache, plain = (
        eps_mlx.write_kv_tentative(one, 0, keys[:9] + 1, keys[:9] - 1, np.arange(18, 27)) for one in (cache, plain)
    )
    assert not metal_shim
    np.testing.assert_array_equal(np.array(cache.valid[0]), cache.state[0].valid(np.arange(16)))
    np.testing.assert_array_equal(np.flatnonzero(np.array(cache.valid[0])), [0, 1, 2, 3, 7, 8, 9])
    for a, b in ((cache.k, plain.k), (cache.v, plain.v)):
        np.testing.assert_array_equal(np.array(a[0]), np.array(b[0]))
    plan = StepPlan.of(EpsConfig.of(method="meanstd", block_size=16, group_size=4), np.arange(3)[None], np.array([40]))
    estimate = np.array(eps_mlx.score(cache, 0, mx.repeat(keys[:1], 2, axis=1), plan).estimate)
    assert metal_shim and (estimate[0, :, 4:7] == math.inf).all() and np.isfinite(estimate[0, :, :4]).all()


# name: (text, its replacement, which occurrence, what is seen)
BUGS: dict[str, tuple[str, str, int, str]] = {
    "no first barrier": (BARRIER, "", 0, "race"),
    "no second barrier": (BARRIER, "", 1, "race"),
    "sees the next row": ("length - rows + row + 1", "length - rows + row + 2", 0, "differs|finite"),
    "sees one token less": ("length - rows + row + 1", "length - rows + row", 0, "differs|finite"),
    "stages past the end": ("at < count &&", "at < 32 &&", 0, "loaded more often|finite"),
    "wrong kv head": ("unit * kv_heads + kv_head) *", "unit * kv_heads + 0) *", 0, "differs|bytes"),
    "wrong query head": ("load_piece<VEC>(q + head[h] * D", "load_piece<VEC>(q + (head[h] ^ 1) * D", 0, "differs"),
    "no rescale": ("sum[h][i] *= rescale;", "", 0, "attention differs"),
    "no rescale of the mass": ("mass[h] * rescale + weight[h]", "mass[h] + weight[h]", 0, "differs"),
    "counts what is not seen": ("lane < visible[h] ? weight[h] : NONE", "weight[h]", 0, "differs|finite|depends on"),
    "multiplies what is not seen": ("if (token < visible[h])", "if (true)", 0, "finite|depends on the order"),
    "keeps its lanes apart": ("both += simd_shuffle_xor(both, ushort(step));", "", 0, "attention differs"),
    "divergent maximum": ("const float top = max(largest[h], simd_max(logit));",
                          "const float top = lane < 9 ? max(largest[h], simd_max(logit)) : 0.0f;", 0,
                          "divergent simd operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_injected_bugs_are_seen(metal_shim: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # noqa: F811
    text, replacement, occurrence, seen = BUGS[name]
    monkeypatch.setattr(rows_kernels, "rows", broken(rows_kernels.rows, text, replacement, occurrence))
    # the first rows see nothing of the second split
    scene = Scene.build(D=64, lengths=(514, 331), num_rows=(5, 9), S=2)
    with pytest.raises((AssertionError, ShimError), match=seen):
        scene.check(metal_shim)


@pytest.mark.parametrize("bug", ["static_cast<float>(k_scale[place])", "static_cast<float>(v_scale[place])"])
def test_a_forgotten_scale_is_seen(metal_shim: Any, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:  # noqa: F811
    right = rows_kernels.reading
    monkeypatch.setattr(rows_kernels, "reading", lambda *kernel: broken(right(*kernel), bug, "1.0f", 0))
    with pytest.raises(AssertionError, match="differs"):
        Scene.build(lengths=(70,), num_rows=(3,), bits=(8, 4)).check(metal_shim)


def test_broken_values_reach_those_who_see_them_alone(metal_shim: Any) -> None:  # noqa: F811
    scene = Scene.build(D=64, lengths=(467, 331), num_rows=(5, 9), asked=False)
    true = scene.truth()
    values = np.array(scene.v)
    for b in range(2):
        unit, offset = divmod(int(scene.rows.lengths[b]) - 1, 64)
        values[scene.rows.table[b, unit], :, offset] = np.nan
    scene.v = mx.array(values)
    out, lse, *_ = scene.run()
    sees = scene.rows.seen == scene.rows.lengths[scene.rows.sequence]
    assert np.isnan(out[sees]).all()
    _close("attention", out[~sees], true[0][~sees], ROUNDING[mx.float32])
    _close("log mass", lse, true[1], ROUNDING[mx.float32])


def generated() -> list[tuple[dict[str, Any], str]]:
    """Template and text of the launches of a few calls."""
    calls: list[Any] = []

    def record(kernel: Any, inputs: Any, template: Any, grid: Any, group: Any, shapes: Any, dtypes: Any) -> Any:
        if kernel.name.startswith("eps_attend_rows"):
            calls.append((template, shim.generated_text(kernel, inputs, template, dtypes)))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with shim.installed():
        launch.runner = record
        for dtype, dim, repeat, batch, asked, bits in (
            (mx.float32, 64, 4, 1, True, (16, 16)),
            (mx.bfloat16, 128, 8, 9, True, (16, 16)),
            (mx.float16, 33, 1, 1, False, (16, 16)),
            (mx.float16, 64, 1, 1, False, (8, 4)),
            (mx.bfloat16, 34, 8, 9, True, (4, 16)),
        ):
            # a batch of nine makes of the tables and lengths what `device` is, a batch of one `constant`
            sizes = {"lengths": (65,) * batch, "num_rows": (3,) * batch}
            Scene.build(dtype, D=dim, R=repeat, asked=asked, bits=bits, **sizes).run()
    return calls


def test_clang_accepts_every_text() -> None:
    clang_check = pytest.importorskip("metal.clang_check", reason="libclang is absent", exc_type=ImportError)
    for template, text in generated():
        assert clang_check.diagnostics(text) == [], template
