"""The compiled CPU kernels against the float64 oracle and against the array operations they stand in for, which must
give the same visit lists and, up to float32 rounding, the same values: over odd shapes, dtypes and ragged batches."""

import ctypes
import importlib
import mmap
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from conftest import bound
from numba.core.codegen import get_host_cpu_features
from places import place
from test_conformance import Case, FilledCase, eps
from test_conformance import test_backend_follows_the_oracle as run_case

from eps_core.attention import kernels as choices
from eps_core.attention.kernels import _name_fallback
from eps_core.cpu.memory import advise_huge_pages
from eps_core.reference import selection as oracle_selection

CASES = [
    Case((150, 37), eps("rq", group_size=2)),
    Case((310, 3, 64), eps("rq", group_size=1), num_heads=3, num_kv_heads=3),
    Case((300, 130), eps("rq", group_size=2, rescore=0.2), 32, 2, 128, "bfloat16", 150),
    Case((600, 290), eps("rq", group_size=2), dtype="float16", head_dim=80, chunk=200),
    Case((290,), eps("rq", group_size=2, rescore=0.5), head_dim=33),
    Case((300,), eps("meanstd", group_size=48), num_heads=6, num_kv_heads=2, head_dim=20),
    Case((400, 128), eps("meanstd", group_size=128), num_heads=5, num_kv_heads=1, dtype="bfloat16"),
    Case((300, 290), eps("rq", group_size=2), kind="ties", scale_q=1.0),
    Case((300,), eps("rq"), kind="equal"),
    Case((300, 37), eps("rq", rescore=0.3), head_dim=160, num_heads=6, num_kv_heads=2),  # 4 words and 1
    Case((300,), eps("rq", group_size=4), head_dim=96, num_heads=2, num_kv_heads=1),
    Case((290, 41), eps("rq", group_size=2, min_context=100, top_pages=9)),
    Case((700, 290), eps("rq", mean_tokens=64, cascade=(0.25,)), num_heads=8, head_dim=128, dtype="bfloat16"),
    Case((100, 37), eps("rq")),  # one full unit, and none
    Case((150, 37, 1), eps("meanstd"), num_heads=16, num_kv_heads=1, head_dim=33, dtype="float16"),
    Case((530, 300), eps("meanstd", group_size=128), 8, 2, 128, "bfloat16"),
    Case((150, 37), eps("meanstd", group_size=3, block_size=3), num_heads=3, num_kv_heads=1),
    Case((150, 37), eps("meanstd"), kind="outlier", dtype="bfloat16"),
    Case((290, 200), eps("meanstd", group_size=48), num_heads=6, num_kv_heads=3, head_dim=80),
    Case((150, 64), eps("meanstd", num_sink_tokens=0, num_recent_tokens=0, budget=0.1)),
    Case((150, 37), eps("meanstd", policy="threshold", top_pages=4)),  # counts that differ by head
    Case((150, 37), eps("meanstd", policy="threshold", scope="union", top_pages=3)),
    Case((310, 100), eps("rq", rescore=0.2), bits=(8, 4), dtype="bfloat16", head_dim=64, chunk=150),
    Case((150, 37), eps("meanstd"), bits=(4, 16), num_heads=8, num_kv_heads=1, head_dim=34),
]


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest):
    return bound(request.param, "numba")


@pytest.fixture(autouse=True)
def several_threads():
    """Torch's team is of one thread where OMP_NUM_THREADS says so, and would race with nobody."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def run_code(code: str, *args: str, **how) -> None:
    """In a process of its own."""
    subprocess.run([sys.executable, "-c", code, *args], check=True, **how)


def writable(backend):
    """Torch lets only inference mode write to what it made there."""
    return importlib.import_module("torch").inference_mode() if backend.__name__ == "eps_cuda" else nullcontext()


def kernels_of(backend):
    return importlib.import_module(f"{backend.__name__}.kernels.cpu").kernels


def filled(backend, case: Case) -> FilledCase:
    return FilledCase(backend, "cpu", case, sum(case.lengths) + case.head_dim)


def check_kernels(target, case: Case, monkeypatch) -> None:
    """`run_case` by the kernels themselves: array operations serve where a policy is not topk or a method not rq."""
    left = set()
    monkeypatch.setattr(choices, "_name_fallback", lambda family, operation, reason: left.add(operation))
    run_case(target, case)
    may = {"select", "skipped_mass"} if case.config.selection_config.policy != "topk" else set()
    assert left <= may | ({"score"} if case.config.cache_config.method != "rq" else set())


@pytest.mark.kernels("numba", arrays=False)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_follow_the_reference(target, case, monkeypatch):
    check_kernels(target, case, monkeypatch)


def test_logits_past_what_exp_holds(backend):
    """Logits of hundreds: weights far below the largest vanish, none overflows."""
    out, lse = filled(backend, Case((300, 37), eps("box"), scale_q=60.0, kind="outlier")).attended(None)
    assert lse.max() > 500 and np.isfinite(out).all()


def test_what_has_no_kernel_says_so(backend):
    for config in (
        eps("moments"), eps("jl"), eps("box"), eps("ball"), eps("rq", rq_bounds=True, group_size=16),
        eps("rq", mean_tokens=32, group_size=4, cascade=(0.25,)),  # groups that fill no register
    ):  # fmt: skip
        s = filled(backend, Case((300,), config))
        assert kernels_of(backend).table().score(s.cache, 0, s.native, s.plan) is None


def test_a_fallback_names_itself_once(backend, caplog):
    _name_fallback.cache_clear()
    s = filled(backend, Case((300,), eps("box")))
    with caplog.at_level("WARNING", "eps"):
        for _ in range(2):
            assert backend.score(s.cache, 0, s.native, s.plan).upper is not None  # array operations serve
    assert [record.message for record in caplog.records] == [
        "kernels numba do not support score of method box: array operations instead"
    ]


def test_guards_are_ranges():
    rng = np.random.default_rng(1)
    for _ in range(200):
        config = eps(
            "box", group_size=int(rng.choice([1, 2, 4, 16, 128])), num_sink_tokens=int(rng.integers(0, 40)),
            num_recent_tokens=int(rng.integers(0, 40)), min_context=int(rng.choice([0, 50])),
        )  # fmt: skip
        lengths = rng.integers(0, 150, 4)
        groups = -(-150 // config.cache_config.S)
        plan = place(config, lengths, groups)
        for b, length in enumerate(lengths.tolist()):
            want = oracle_selection.sink_and_recent(config, length)
            always = plan.always_selected[b]
            assert (always[: len(want)] == want).all() and not always[len(want) :].any()
            assert plan.num_always_selected[b] == want.sum() and plan.ends[b] == len(want)


def test_asking_for_numba_does_not_import_it():
    run_code(
        "import sys; from eps_core.cpu.usable import why_not; assert why_not() is None and 'numba' not in sys.modules"
    )


@pytest.mark.parametrize("name, features", [
    ("generic", None), ("haswell", "+avx,+avx2,+fma,+f16c"),
    ("skylake-avx512", "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd"),
])  # fmt: skip
def test_a_cpu_without_permutations(name, features, tmp_path):
    """The code for CPUs that look up eight numbers or 32 bytes in a register (AVX2), sixteen numbers (AVX-512) or none,
    compiled for such ones."""
    if "+avx512f" in str(features) and "+avx512f" not in get_host_cpu_features():
        pytest.skip("this CPU has no AVX-512")
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CACHE_DIR": str(tmp_path)}
    environment |= {} if features is None else {"NUMBA_CPU_FEATURES": features}
    code = """if True:
        import sys
        import numpy as np, torch
        from eps_core.cpu import vectors as cpu_vectors
        from eps_core.config.cache import CacheSpec
        from eps_core.config.eps import EpsConfig
        from eps_core.load import load_backend
        from eps_core.cpu import amx
        from eps_core.kv_cache.rows import Rows
        from eps_core.kv_cache.step_plan import StepPlan
        from numba import njit
        from eps_core.cpu import unit_vectors as cpu_units
        assert not cpu_units.SCANS and not amx.usable()
        assert cpu_vectors.PERMUTES == (sys.argv[1] == "skylake-avx512")
        assert cpu_units.SHUFFLES == (sys.argv[1] != "generic")

        @njit
        def widen(bits, values):
            for i in range(len(bits)):
                values[i] = cpu_vectors.wide(bits[i])

        halves, values = np.arange(65536, dtype=np.uint16), np.empty(65536, np.float32)
        widen(halves.view(np.int16), values)
        np.testing.assert_array_equal(values, halves.view(np.float16).astype(np.float32))
        backend = load_backend("cuda")
        for dtype, config, bits in (
            ("float32", EpsConfig.of(method="rq", rescore=0.2), (16, 16)),
            ("bfloat16", EpsConfig.of(method="rq", mean_tokens=64, cascade=(0.5, 0.2)), (16, 16)),
            ("float16", EpsConfig.of(method="box"), (4, 4)),
        )[:2 if sys.argv[1] == "skylake-avx512" else 3]:  # codes alone are read otherwise there
            results = []
            for kernels in ("numba", "arrays"):
                units = 600 // config.cache_config.unit_tokens + 1
                spec = CacheSpec(1, 2, 64, units, dtype, k_bits=bits[0], v_bits=bits[1])
                cache = backend.new_cache(spec, config.cache_config, "cpu", kernels)
                rng = np.random.default_rng(0)
                k, v = (backend.from_numpy(rng.normal(size=(600, 2, 64)), dtype, "cpu") for _ in range(2))
                cache = backend.write_kv(cache, 0, k, v, np.arange(600))
                q = backend.from_numpy(rng.normal(size=(1, 6, 64)), "float32", "cpu")
                plan = StepPlan.of(config, np.arange(units)[None], np.array([600]))
                scores = backend.score(cache, 0, q, plan)
                assert scores.kernels == kernels
                selection = backend.select(scores, plan)
                out, lse = backend.attend(cache, 0, q, plan, selection)
                rows = Rows.of(plan.table, plan.lengths, np.array([7]))
                several = backend.from_numpy(rng.normal(size=(7, 6, 64)), "float32", "cpu")
                read = backend.attend_rows(cache, 0, several, rows)
                found = scores.estimate, selection.groups, out, lse, read.out, read.lse
                results.append([x.numpy() for x in found])
            for one, other in zip(*results):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        from eps_core.decode.kernel_check import rows_disagreement
        from eps_core.models.config import DEMO_MODEL, read_spec
        for dtype in ("float32", "bfloat16") if sys.argv[1] == "haswell" else ():
            model = backend.load_model(DEMO_MODEL, read_spec(DEMO_MODEL), dtype, "cpu")
            assert model.for_rows("numba", 5) is not model
            assert rows_disagreement(backend, model, "numba") is None
    """
    run_code(code, name, env=environment)


def test_large_pools_ask_for_huge_pages():
    """VmFlags of the mapping: hg is what madvise asked for, had or not."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    torch = importlib.import_module("torch")
    from eps_cuda.device import empty_pool

    def flags(start: int) -> str:
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low <= start < high
            elif inside and first == "VmFlags:":
                return line
        return ""

    pool = empty_pool((64 * 2**20,), torch.uint8, torch.device("cpu"))
    assert " hg" in flags(pool.data_ptr() + pool.nbytes // 2)
    # what an allocator gives may have been a part of something large
    with mmap.mmap(-1, 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as small:
        start = ctypes.addressof(ctypes.c_char.from_buffer(small))
        advise_huge_pages(start, len(small))
        assert " hg" not in flags(start)


def test_benchmarks_need_no_numba():
    code = """if True:
        import sys
        sys.modules["numba"] = None
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "numba" else find(name, *rest)
        from eps_cuda import bench, usable_kernels
        assert "numba" not in usable_kernels("cpu") and bench.device_facts("cpu")["kernel_threads"] is None
    """
    run_code(code)
