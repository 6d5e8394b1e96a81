"""The bytes that a step plan counts are those that the array library really gathers."""

from pathlib import Path

import numpy as np
import pytest
from conftest import TARGETS, bound
from test_conformance import Case, FilledCase, eps

from eps_core.config.bytes import scoring_bytes, summary_group_bytes
from eps_core.config.eps import EpsConfig


class Counter:
    """Sums the bytes of what whole-row gathers from the pools return."""

    def __init__(self) -> None:
        self.gathered = 0


# the reference indexes tokens one head at a time: no gather of it could be counted
@pytest.fixture(params=[t for t in TARGETS if t.backend != "numpy" and t.kernels == "arrays"], ids="-".join)
def target(request) -> tuple:
    name, device, kernels = request.param
    return bound(name, kernels), device


@pytest.fixture
def counter(target, monkeypatch) -> Counter:
    backend, _ = target
    count = Counter()
    if backend.__name__ == "eps_cuda":
        import torch

        original = torch.Tensor.index_select

        def index_select(self, dim, index):
            result = original(self, dim, index)
            count.gathered += result.nbytes
            return result

        monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    else:
        from eps_mlx.ops import MlxOps

        gather_rows = MlxOps.gather_rows

        def counting(self, array, rows):
            result = gather_rows(self, array, rows)
            count.gathered += result.nbytes
            return result

        monkeypatch.setattr(MlxOps, "gather_rows", counting)
    return count


POLICIES = {
    "topk": {"budget": 0.3},
    "threshold": {"policy": "threshold", "top_pages": 5},
    "union": {"scope": "union"},
    "fine": {"group_size": 1},
    "coarse": {"group_size": 32},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_plan_counts_gathered_tiles(target, counter, name, dtype):
    backend, device = target
    case = Case((150, 37), eps("box", **POLICIES[name]), dtype=dtype)
    one = FilledCase(backend, device, case)
    selected = backend.select(backend.score(one.cache, 0, one.native, one.plan), one.plan)
    num_selected = int(backend.to_numpy(selected.counts).sum())
    counter.gathered = 0
    backend.attend(one.cache, 0, one.native, one.plan, selected)
    expected = num_selected * case.config.cache_config.S * case.spec.kv_token_bytes
    assert counter.gathered == one.plan.kv_bytes(case.spec, num_selected) == expected
    # dense reads every token once, so sparse attention that skipped nothing could not pass for one
    assert expected < 187 * 2 * case.spec.kv_token_bytes


# stages: bytes of each part of a code of 64 dimensions
PARTS = {(): [8], (0.25,): [4, 4], (0.5, 0.2): [2, 2, 4]}


@pytest.mark.parametrize("cascade", PARTS, ids=str)
@pytest.mark.parametrize("lengths", [(608,), (608, 608), (608, 37)])
def test_scoring_in_stages_gathers_each_part_of_those_that_are_left(target, counter, cascade, lengths):
    few = {"group_size": 2, "budget": 0.01, "combine": "max"}  # sums ask the first key, too
    case = Case(lengths, eps("rq", mean_tokens=64, cascade=cascade, rescore=0.0625, **few), head_dim=64)

    def read(length: int) -> int:
        """A mean in 8 bits a dimension and its scale; of 32 groups a scale in one byte and the first part; then each
        further part, and a rescoring bit with a scale of its own."""
        first, *later = PARTS[cascade]
        best = [np.ceil(share * -(-length // 2)) for share in (*cascade, 0.0625)]
        return -(-length // 64) * (64 + 2 + 32 * (1 + first)) + int(np.dot(best, [*later, 8 + 1]))

    one = FilledCase(*target, case)
    counter.gathered = 0
    one.backend.score(one.cache, 0, one.native, one.plan)
    assert scoring_bytes(case.config, 64, lengths) == sum(map(read, lengths))
    assert counter.gathered == 2 * len(lengths) * read(608)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["jl", "rq", "meanstd"])
def test_bounds_gather_the_codes_of_unvisited_groups_alone(target, counter, method, bits):
    backend, device = target
    key_bytes = 16 * bits // 8 + 2 + 3 * 2
    for lengths in ((400,), (400, 290)):
        case = Case(lengths, eps(method, bound_bits=bits), dtype="bfloat16")
        one = FilledCase(backend, device, case)
        scores = backend.score(one.cache, 0, one.native, one.plan)
        selected = backend.select(scores, one.plan)
        left = one.plan.ends[:, None] - backend.to_numpy(selected.counts)
        for name in ("k", "v"):  # no key and no value is looked at
            setattr(one.cache, name, None)
        counter.gathered = 0
        backend.bounds(one.cache, 0, one.native, one.plan, scores, selected)
        size = case.config.cache_config.S
        # a gather pads to the longest list, which is not counted
        assert counter.gathered == int(left.max()) * left.size * size * key_bytes
        counted = one.plan.bound_bytes(case.spec, int(left.sum()))
        assert counted == left.sum() * size * key_bytes
        assert counter.gathered == counted or len(lengths) > 1


def test_the_memory_of_summaries_that_the_page_names() -> None:
    page = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
    cache_config = EpsConfig.of(method="rq").cache_config
    small, large = (100 * summary_group_bytes(cache_config, dim) / (4 * dim) for dim in (64, 128))
    words = f"add {large:.1f} % to a bfloat16 cache with 128 dimensions a head ({small:.1f} % with 64;"
    assert words in " ".join(page.split())
