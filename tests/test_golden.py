"""A decode's logits, selections and bytes are those kept in golden/decode.json, on every backend and kernel.

The reference is held against numbers of its own, which no other test keeps. Where a change of them is meant,
`python tests/golden_runs.py` writes the file again.
"""

import copy
from typing import Any

import golden_runs
import pytest
from golden_runs import CONFIGS, differences, measure

from eps_core import reference


@pytest.mark.kernels("numba", "triton", "metal")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_is_the_kept_one(target: Any, name: str) -> None:
    backend, device = target
    golden, ref_cache = CONFIGS[name], backend.__name__ == reference.__name__
    said = differences(golden, measure(backend, device, golden), golden_runs.read()[name], ref_cache)
    assert not said, "\n".join([f"{name} on {backend.__name__}, {device}:", *said])


def test_the_file_is_small_and_holds_every_configuration() -> None:
    assert list(golden_runs.read()) == list(CONFIGS)
    assert golden_runs.FILE.stat().st_size < 300_000


def test_a_difference_is_told() -> None:
    golden, want = CONFIGS["rq"], golden_runs.read()["rq"]
    right = measure(reference, "cpu", golden)
    assert not differences(golden, right, want, ref_cache=True)
    selections, bytes_read, logits, everything = (copy.deepcopy(right) for _ in range(4))
    selections["selections"][1][0][0][1].pop(10)
    bytes_read["bytes"][2][1][1] += 1
    logits["logits"][0][1][0] += 1e-3
    everything["selections"][0][1] = None
    for found, given in (
        (selections, "step 1, layer 0, sequence 0, kv head 1"),
        (bytes_read, "bytes"),
        (logits, "logits"),
        (everything, "step 0, layer 1: only one"),
    ):
        (said,) = differences(golden, found, want)
        assert given in said


def test_near_ties_may_be_decided_otherwise_and_others_not() -> None:
    golden, want = CONFIGS["rq"], golden_runs.read()["rq"]
    found = measure(reference, "cpu", golden)
    listed = [
        (one, near[b][head])
        for chosen, ties in zip(found["selections"], want["near"], strict=True)
        for layer, near in zip(chosen, ties, strict=True)
        for b, heads in enumerate(layer)
        for head, one in enumerate(heads)
    ]
    one, near = next((one, near) for one, near in listed if set(one) & set(near))
    before = copy.copy(one)
    one.remove(next(group for group in one if group in near))
    assert not differences(golden, found, want) and differences(golden, found, want, ref_cache=True)
    one[:] = before
    one.remove(next(group for group in one if group not in near))
    assert differences(golden, found, want)
