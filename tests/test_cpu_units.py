"""Compiled scoring and building of codes about a unit's mean, and selection without a sort, against the oracle, the
array operations and plain numpy."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
from conftest import bound
from test_conformance import Case, FilledCase, eps
from test_cpu_kernels import check_kernels, filled, kernels_of

from eps_core.backend.summaries.table import build_summary
from eps_core.cpu import best, unit_queries, unit_vectors
from eps_core.cpu import threads as threads_cpu
from eps_core.cpu.compile import kernel
from eps_core.cpu.vectors import masses_by_mask
from eps_core.cpu.write import half_of
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.summaries.rq import QUERY_STEPS, rq_signs

CASES = [
    Case((700, 300), eps("rq", mean_tokens=64, group_size=2, cascade=(0.25,), rescore=0.1), 4, 2, 128, "bfloat16"),
    Case((500, 64, 70), eps("rq", mean_tokens=64, group_size=2, cascade=(0.5, 0.3)), 10, 2, 64),
    Case((600,), eps("rq", mean_tokens=32, group_size=2, cascade=(0.4, 0.2)), 3, 3, 256),
    Case((300,), eps("rq", mean_tokens=64, cascade=(0.4, 0.2), rescore=0.2), head_dim=512, num_heads=2, num_kv_heads=1),
    Case((400, 37), eps("rq", mean_tokens=64, group_size=4, cascade=(0.3,)), head_dim=32),  # codes of two bytes
    Case((400, 330), eps("rq", mean_tokens=32, group_size=1, cascade=(0.3,)), head_dim=16, num_heads=8),  # of one
    Case((500, 300), eps("rq", mean_tokens=64, cascade=(0.3,)), head_dim=80, dtype="float16"),
    Case((400,), eps("rq", mean_tokens=64, rescore=0.0), head_dim=33, num_heads=6, num_kv_heads=2),
    Case((400, 129), eps("rq", mean_tokens=64, cascade=(0.25,), block_size=192), kind="ties"),
    Case((290,), eps("rq", mean_tokens=64, cascade=(0.25,)), kind="equal"),
    Case((63, 1), eps("rq", mean_tokens=64, cascade=(0.25,))),  # nothing is full
]
# query heads of a kv head: 1, 3, 7 and 8, of which a kernel takes four at once
SUMMED = [
    Case(
        (500, 290),
        eps("rq", mean_tokens=64, group_size=2, cascade=cascade, rescore=0.1, combine="sum"),
        num_heads=2 * repeat, head_dim=64, bits=bits,
    )
    for repeat, cascade, bits in (
        (1, (0.25,), (4, 16)), (3, (0.5, 0.2), (16, 16)), (7, (0.25,), (16, 16)), (8, (), (8, 4)),
    )
]  # fmt: skip


@pytest.fixture(params=("cuda", "mlx"))
def backend(request: pytest.FixtureRequest):
    return bound(request.param, "numba")


@pytest.mark.kernels("numba", arrays=False)
@pytest.mark.parametrize("case", [*CASES, *SUMMED], ids=str)
def test_scores_follow_the_reference(target, case, monkeypatch):
    check_kernels(target, case, monkeypatch)


@pytest.mark.parametrize("number", (1, 4))
@pytest.mark.parametrize("case", (CASES[0], CASES[1], CASES[10]), ids=str)
def test_layers_share_what_they_know_and_no_result(backend, case, number, monkeypatch):
    """What one step's layers find once changes no result of another layer's, of the same cache or of one in which other
    groups lack a summary, with as many query heads or twice as many; a layer like one before finds nothing again."""
    monkeypatch.setattr(threads_cpu, "num_threads", lambda: number)
    setups = [filled(backend, case), filled(backend, case)]
    state = setups[1].cache.state[0]
    state.fill[: state.fill.size // 2], state.history = 0, state.history + 1
    many = np.repeat(setups[0].q, 2, axis=1)
    queries = [setups[0].native, -setups[0].native, backend.from_numpy(many, "float32", "cpu")]

    def on_host(array: object) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else backend.to_numpy(array)

    def read(s: FilledCase, q: object, plan: StepPlan) -> list[object]:
        scores = kernels_of(backend).score(s.cache, 0, q, plan)
        chosen = kernels_of(backend).select(scores, plan)
        parts = [kernels_of(backend).attend(s.cache, 0, q, plan, selection) for selection in (chosen, None)]
        lists = chosen.groups, chosen.counts, chosen.selected_mask, chosen.always_selected
        return [scores.estimate, scores.num_missing, *lists, *parts[0], *parts[1]]

    def plan() -> StepPlan:
        return StepPlan.of(case.config, setups[0].table, setups[0].lengths)

    calls = [(s, q) for s in setups for q in queries]
    apart, shared = [read(s, q, plan()) for s, q in calls], plan()
    together, made = [], []
    for s, q in calls:
        together.append(read(s, q, shared))
        made.append(len(shared._made))
    for one, other in zip(apart, together, strict=True):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(on_host(x), on_host(y))
    whole, lacking = ({int(on_host(one[5]).sum()) for one in some} for some in (apart[:3], apart[3:]))
    assert len(whole) == len(lacking) == 1 and (max(lacking) > max(whole) or case is CASES[10])
    assert made[0] == made[1] < made[2] and made[3] == made[4] == made[5]


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e4, 100.0, 1e-45, 0.0])
@pytest.mark.parametrize("case", (CASES[0], SUMMED[2]), ids=str)
def test_odd_queries(backend, case, odd):
    """What is not finite ranks first; what is too small to round is read as the mean alone."""
    s = filled(backend, case)
    q = s.q.copy()
    q[0, : case.num_heads // case.num_kv_heads] = odd
    native, plan = backend.from_numpy(q, "float32", "cpu"), s.plan
    scores = kernels_of(backend).score(s.cache, 0, native, plan)
    plain = backend.score(replace(s.cache, kernels="arrays"), 0, native, plan)
    tolerance = 1e-6 * (odd if 100 < odd < np.inf else 100)
    np.testing.assert_allclose(backend.to_numpy(scores.estimate), backend.to_numpy(plain.estimate), 1e-5, tolerance)


def test_words_add_what_signs_add():
    """Every table entry is the exact sum of its four signed integers, and none leaves int8."""
    rng = np.random.default_rng(0)
    for dims in ((64,), (32, 32), (16, 16, 32), (8, 8), (33,)):
        integers = rng.choice([-QUERY_STEPS, QUERY_STEPS, 3], (unit_vectors.HEADS, sum(dims))).astype(np.int8)
        start = 0
        for many in dims:
            words = -(-many // 32)
            table = np.empty(words * unit_vectors.WORD_TABLE, np.int8)
            assert unit_queries.fill_words(integers, start, many, table) == words
            in_registers = unit_vectors.SCANS or unit_vectors.SHUFFLES
            by_head = table.reshape(-1, 2, *((4, 4, 16) if in_registers else (4, 16, 4)))
            by_head = by_head if in_registers else by_head.transpose(0, 1, 4, 2, 3)
            padded = np.zeros((unit_vectors.HEADS, words * 32), int)
            padded[:, :many] = integers[:, start : start + many]
            for word, j, side, value in np.ndindex(words, 4, 2, 16):
                signs = [1 if value >> bit & 1 else -1 for bit in range(4)]
                own = padded[:, word * 32 + j * 8 + side * 4 :][:, :4] @ signs
                assert (by_head[word, side, :, j, value] == own).all()
            start += many


def test_best_are_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    for count in (1, 2, 15, 16, 17, 300, 4096, 5000, 66_000):
        draws = {
            "normal": rng.normal(size=count).astype(np.float32),
            "ties": rng.choice(np.float32([-1, -0.0, 0.0, 1, 1 + 2**-23]), count),
            "equal": np.full(count, 3.5, np.float32),
            "runs": np.repeat(rng.normal(size=-(-count // 16)), 16)[:count].astype(np.float32),
            "ends": rng.choice(np.float32([-3e38, -1e-45, 1e-45, 3e38, np.inf]), count),
        }
        # what a sample of every so many says is wrong
        step = max(count // best.SAMPLE, 1)
        draws["misled"] = np.where(np.arange(count) % step == 0, 9, draws["normal"]).astype(np.float32)
        for name, values in draws.items():
            for absent in (0.0, 0.6):
                keys = np.empty(count, np.uint32)
                best.order(values.view(np.uint32), keys)
                missing = rng.random(count) < absent
                keys[missing] = 0
                ranked = np.argsort(np.where(missing, np.inf, -values), kind="stable")[: count - missing.sum()]
                for num in {0, 1, count // 50, count // 4, count - 1, count}:
                    before, listed = keys.copy(), np.empty(count + 16, np.int32)
                    taken = best.list_best(keys, count, num, np.empty(count + 16, np.uint32), listed)
                    assert listed[:taken].tolist() == sorted(ranked[:num].tolist()), (name, count, num)
                    assert (keys == before).all()


@kernel()
def masses(x, mask):
    return masses_by_mask(x, mask, len(x))


def test_masses_of_what_a_mask_takes_and_leaves():
    rng = np.random.default_rng(0)
    for count in (1, 15, 16, 17, 333):
        x, mask = 20 * rng.normal(size=count).astype(np.float32), rng.choice(np.array([0, 1, 255], np.uint8), count)
        x[rng.random(count) < 0.2] = rng.choice(np.float32([np.inf, -np.inf, np.nan]))
        mass = np.where(np.isfinite(x), np.exp(x.astype(float) - x[np.isfinite(x)].max(initial=-1e30)), 0)
        read, left = masses(x, mask)
        np.testing.assert_allclose([read, left], [mass[mask > 0].sum(), mass[mask == 0].sum()], rtol=1e-5, atol=1e-6)
    assert masses(np.full(20, np.inf, np.float32), np.ones(20, np.uint8)) == (0, 0)


@pytest.mark.parametrize("config, head_dim", [
    (eps("rq", mean_tokens=64, cascade=(0.25,)), 128),
    (eps("rq", mean_tokens=32, cascade=(0.5, 0.25)), 64),
    (eps("rq", mean_tokens=64), 80), (eps("rq", mean_tokens=64, group_size=1), 96),
    (eps("rq", mean_tokens=64, rescore=0.0), 33),
    (eps("rq", mean_tokens=32, group_size=8), 20), (eps("rq", mean_tokens=32, group_size=1, cascade=(0.3,)), 32),
], ids=str)  # fmt: skip
def test_seals_are_bit_equal(backend, config, head_dim):
    rng, cache_config = np.random.default_rng(0), config.cache_config
    shape = 40, 3, cache_config.span_tokens, head_dim
    k = (rng.normal(size=shape) + 2 * rng.normal(size=(1, 3, 1, head_dim))).astype(np.float32)
    k[0], k[1], k[2:5] = 0, k[1, :, :1], k[2:5] * np.float32([1e5, 1e-6, 1e-3])[:, None, None, None]
    constants = {"signs": backend.from_numpy(rq_signs(0, head_dim), "float32", "cpu")}
    keys = backend.from_numpy(k, "float32", "cpu")
    build = kernels_of(backend).build_summary
    got, alone = build(cache_config, constants, keys), build(cache_config, constants, keys[6:7])
    ops = importlib.import_module(f"{backend.__name__}.ops").OPS
    wanted = build_summary(ops, cache_config, constants, keys)
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        own, right = backend.to_numpy(got[name]), backend.to_numpy(array)
        assert own.dtype == right.dtype and own.shape == right.shape
        assert (own == right).all(), name
        assert (backend.to_numpy(alone[name]) == own[6:7]).all(), name


def test_a_mean_that_is_no_number_has_no_scale(backend):
    """A head dim of 96 is rotated as blocks of 64 and 32; NaN in the first leaves the second finite."""
    cache_config = eps("rq", mean_tokens=64).cache_config
    k = np.random.default_rng(0).normal(size=(2, 1, 64, 96)).astype(np.float32)
    k[1, ..., 3] = np.nan
    k[1, ..., 7] = 3e38
    constants = {"signs": backend.from_numpy(rq_signs(0, 96), "float32", "cpu")}
    made = kernels_of(backend).build_summary(cache_config, constants, backend.from_numpy(k, "float32", "cpu"))
    assert (backend.to_numpy(made["mean_scale"])[:, 0] > 0).tolist() == [True, False]
    assert (backend.to_numpy(made["mean"])[1] == 128).all()


def test_a_number_between_two_of_float16():
    below = np.random.default_rng(0).integers(0, 0x7C00, 500).astype(np.uint16)
    exact = np.concatenate([below, [0, 1, 0x3FF, 0x400, 0x7BFE]]).astype(np.uint16)
    first, second = (bits.view(np.float16).astype(np.float32) for bits in (exact, exact + 1))
    middle = (first + second) / 2
    x = np.concatenate([first, middle, *(np.nextafter(y, np.float32(to)) for y in (first, middle) for to in (0, 1e9))])
    x = np.concatenate([np.abs(x), np.float32([65504, 65510, 65519.996, 65520, 65536, 3e38, np.inf, 1e-45])])
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float16)
    least = np.where(nearest >= x, nearest, (nearest.view(np.uint16) + 1).astype(np.uint16).view(np.float16))
    for rounds_up, wanted in ((False, nearest), (True, least)):
        found = [half_of(value, rounds_up) for value in x]
        assert [bits for bits, _ in found] == wanted.view(np.uint16).tolist()
        assert [number for _, number in found] == wanted.tolist()
        bits, number = half_of(np.float32(np.nan), rounds_up)
        assert np.isnan(np.uint16(bits).view(np.float16)) and np.isnan(number)


def test_overwritten_units_have_no_estimate():
    """A finalize whose fill went back is read whole until it is full again."""
    backend, case = bound("cuda", "numba"), CASES[0]
    s = filled(backend, case)
    cache_config, plan = case.config.cache_config, s.plan
    span = int(s.table[0, 2]) * cache_config.spans_per_unit
    s.cache.state[0].fill[span] = 5
    for cache in (s.cache, replace(s.cache, kernels="arrays")):
        scores = backend.score(cache, 0, s.native, plan)
        lost = np.isposinf(backend.to_numpy(scores.estimate)[0])
        first = 2 * cache_config.spans_per_unit * cache_config.groups_per_span
        assert lost[:, first : first + cache_config.groups_per_span].all()
        assert scores.num_missing[0] >= cache_config.groups_per_span
