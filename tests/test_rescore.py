"""rq's rescoring bit: its codes, what it adds to the estimates, and of which groups it is read."""

import math

import numpy as np
import pytest
from kernel_scenes import like
from test_conformance import Case, FilledCase, as_read, eps

from eps_core.attention.protocol import Scores
from eps_core.config.bytes import summary_group_bytes
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.reference.selection import best_first
from eps_core.summaries.base import from_byte
from eps_core.summaries.rq import SECOND_STEP, rotate, unpack_codes

TIES = 2e-4  # share of codes that float32 may round to the other side of a step than float64


def case_of(lengths: tuple[int, ...] = (600, 290, 37), rescore: float = 0.125, **more) -> Case:
    # a budget so small that the share to refine is more than twice what is selected
    settings = {"group_size": 2, "mean_tokens": 32, "cascade": ()}
    settings |= {"budget": 0.002, "combine": "max", **more.pop("config", {})}
    config = eps("rq", rescore=rescore, **settings)
    return Case(lengths, config, **{"head_dim": 32, "chunk": 333, **more})


class Filled(FilledCase):
    """A case written to one backend's cache, its queries, and what is stored of it."""

    def __init__(self, target: tuple, case: Case) -> None:
        super().__init__(*target, case)

    def scores(self) -> Scores:
        return self.backend.score(self.cache, 0, self.native, self.plan)

    def estimate(self) -> np.ndarray:
        return self.backend.to_numpy(self.scores().estimate).astype(np.float64)

    def stored(self, name: str) -> np.ndarray:
        return self.backend.to_numpy(self.cache.summaries[0][name])

    def of_sequence(self, name: str, b: int, head: int) -> np.ndarray:
        """What is stored of the full units of one sequence and kv head, in order: [units, ..]."""
        pool = self.stored(name)[self.table[b], head]
        return pool.reshape(-1, *pool.shape[2:])[: int(self.lengths[b]) // self.case.config.cache_config.span_tokens]

    def means(self, b: int, head: int) -> np.ndarray:
        """[G, D] float64: the mean keys of the groups of full units."""
        cache_config, k = self.case.config.cache_config, as_read(self.case, self.keys[b][:, head])
        whole = len(k) // cache_config.span_tokens * cache_config.span_tokens
        return k[:whole].reshape(-1, cache_config.S, self.case.head_dim).mean(axis=1)

    def residuals(self, b: int, head: int) -> np.ndarray:
        """[units, N, D] float64: rotated means of groups less the stored means of their units."""
        cache_config, head_dim = self.case.config.cache_config, self.case.head_dim
        turned = rotate(self.means(b, head), cache_config.seed).reshape(-1, cache_config.groups_per_span, head_dim)
        codes = self.of_sequence("mean", b, head).astype(np.float64) - 128
        scale = self.of_sequence("mean_scale", b, head).astype(np.float64)[:, None]
        return turned - (codes * scale)[:, None]


def heads_of(one: Filled):
    return list(np.ndindex(len(one.lengths), one.case.num_kv_heads))


@pytest.mark.parametrize("head_dim", [16, 33, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sign_and_second_bit_are_the_two_bit_code(target, head_dim, dtype):
    """floor(x / step) within 0 .. 3, of a step that fits the group's own spread, and |x|^2 / <x, levels> as scale."""
    one = Filled(target, case_of(head_dim=head_dim, dtype=dtype))
    differ, total = 0, 0
    for b, head in heads_of(one):
        x = one.residuals(b, head)
        step = SECOND_STEP * np.abs(x).mean(axis=-1, keepdims=True)
        want = np.clip(np.floor(x / step) + 2, 0, 3)
        signs = one.of_sequence("codes", b, head).swapaxes(-1, -2)
        sign, second = (unpack_codes(bits, 1, head_dim) for bits in (signs, one.of_sequence("second", b, head)))
        got = 2 * sign.astype(int) + second
        # only a value beside a step may be on its other side, and then next to it
        wrong = got != want
        beside = np.abs(x / step - np.round(x / step)) < 1e-3
        assert (beside[wrong]).all() and np.abs(got - want).max() <= 1
        differ, total = differ + int(wrong.sum()), total + wrong.size
        levels = got - 1.5
        scale = (x * x).sum(axis=-1) / (x * levels).sum(axis=-1)
        np.testing.assert_allclose(from_byte(one.of_sequence("second_scale", b, head)), scale, rtol=2.0**-4)
    assert differ <= TIES * total, (differ, total)
    assert total > 5000


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_refined_estimates_are_closer_to_the_mean_logit(target, group_size):
    config = {"group_size": group_size}
    coarse, fine = (Filled(target, case_of(rescore=rescore, head_dim=64, config=config)) for rescore in (0, 1))
    one_bit, two_bit, scale = coarse.estimate(), fine.estimate(), 1 / math.sqrt(64)
    errors = []
    for b, head in heads_of(fine):
        queries = fine.q[b, 2 * head : 2 * head + 2].astype(np.float64) * scale
        true = math.log(group_size) + (fine.means(b, head) @ queries.T).max(axis=1)
        errors.append([np.abs(part[b, head, : len(true)] - true) for part in (one_bit, two_bit)])
    first, second = (np.concatenate(part).mean() for part in zip(*errors, strict=True))
    # distortions of one and two bits of a Gaussian (Max 1960), 0.363 and 0.119, make 0.49 of the error
    assert 0.4 < second / first < 0.6, (first, second)


@pytest.mark.parametrize("rescore", [0.01, 0.37, 1.0])
@pytest.mark.parametrize("kind", ["gauss", "ties"])
def test_exactly_the_best_groups_are_refined(target, rescore, kind):
    """ceil(refine G) of each kv head by the first bit, at least 2, the lower index among equals; the others keep their
    scores to the bit. Every sequence of a ragged batch has its own number."""
    more = {"kind": kind, "config": {"group_size": 1 if kind == "ties" else 2}}
    lengths = (290, 61) if kind == "ties" else (400, 290, 37)
    coarse, some, all_of_them = (Filled(target, case_of(lengths, part, **more)) for part in (0, rescore, 1))
    first, got, fine = coarse.estimate(), some.estimate(), all_of_them.estimate()
    size = some.case.config.cache_config.S
    refined_somewhere = False
    for b, head in heads_of(some):
        num_groups = -(-int(some.lengths[b]) // size)
        count = max(math.ceil(rescore * num_groups), 2)  # twice the one group that the budget selects
        assert some.case.config.rescored_groups(int(some.lengths[b])) == count
        known = np.flatnonzero(np.isfinite(first[b, head]))
        best = known[best_first(first[b, head, known])[:count]]
        others = np.setdiff1d(np.arange(first.shape[2]), best)
        assert np.array_equal(got[b, head, others], first[b, head, others])
        np.testing.assert_allclose(got[b, head, best], fine[b, head, best], rtol=0, atol=1e-4)
        moved = np.flatnonzero(got[b, head] != first[b, head])
        assert set(moved) <= set(best)
        if kind == "gauss":  # where a refined estimate can equal the first one by chance alone: products of few digits
            assert len(moved) >= 0.9 * len(best)
        refined_somewhere |= len(moved) > 0
    assert refined_somewhere


def test_equal_estimates_are_refined_from_the_lowest_index(target):
    """The first group's summary everywhere: all estimates tie."""
    ones = [
        Filled(target, case_of((320,), rescore=rescore, head_dim=16, config={"group_size": 1})) for rescore in (0.25, 0)
    ]
    for one in ones:
        for name, pool in one.cache.summaries[0].items():
            array = one.backend.to_numpy(pool).copy()
            array[:] = array[:1, :, :1]
            if name == "second":  # [.., groups, bytes]
                array[:] = array[..., :1, :]
            elif name in ("codes", "scale", "second_scale"):  # [.., groups]
                array[:] = array[..., :1]
            one.cache.summaries[0][name] = like(pool, array)
    got, first = (one.estimate()[0, :, :320] for one in ones)
    assert (first == first[:, :1]).all()
    for head in range(2):
        assert np.flatnonzero(got[head] != first[head]).tolist() == list(range(80))


def test_refine_zero_stores_nothing_more(target):
    coarse, fine = Filled(target, case_of(rescore=0)), Filled(target, case_of(rescore=0.125))
    assert set(fine.cache.summaries[0]) - set(coarse.cache.summaries[0]) == {"second", "second_scale"}
    groups = coarse.case.spec.num_units * 2 * 16
    for one, per_group in ((coarse, 4 + 1), (fine, 2 * (4 + 1))):
        stored, mean = sum(one.stored(name).nbytes for name in one.cache.summaries[0]), (32 + 2) / 16
        assert stored == groups * (per_group + mean) == groups * summary_group_bytes(one.case.config.cache_config, 32)
    for name in ("codes", "scale"):
        assert np.array_equal(coarse.stored(name), fine.stored(name))


def test_groups_without_a_summary_are_visited_and_never_refined(target):
    for rescore in (0.125, 1.0):
        one = Filled(target, case_of((301, 64, 37), rescore=rescore))
        estimate = one.estimate()
        for b, length in enumerate(one.lengths.tolist()):
            finalized, end = length // 32 * 16, -(-length // 2)
            assert np.isfinite(estimate[b, :, :finalized]).all() and np.isposinf(estimate[b, :, finalized:end]).all()
            assert np.isneginf(estimate[b, :, end:]).all()
        # the guard of the last 8 tokens covers the others of an open unit
        assert one.scores().num_missing.tolist() == [(301 - 8) // 2 - 144, 0, 0]


def test_a_batch_scores_each_sequence_as_alone(target):
    one = Filled(target, case_of((600, 37, 290)))
    together = one.estimate()
    for b, length in enumerate(one.lengths.tolist()):
        units = -(-length // one.case.config.cache_config.unit_tokens)
        plan = StepPlan.of(one.case.config, one.table[b : b + 1, :units], one.lengths[b : b + 1])
        alone = one.backend.score(one.cache, 0, one.native[b : b + 1], plan)
        estimate = one.backend.to_numpy(alone.estimate)[0]
        np.testing.assert_allclose(together[b, :, : estimate.shape[1]], estimate, atol=1e-5)
        assert np.isneginf(together[b, :, estimate.shape[1] :]).all()
