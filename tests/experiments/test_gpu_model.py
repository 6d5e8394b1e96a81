"""The cost model of a GPU's kernels finds the numbers that made its rows, and scales them as it says."""

import pytest

from experiments.gpu_model.run import COPIED, DEVICES, KV_HEADS, Kernel, fitted

CELLS = [(32768, 1), (65536, 4), (131072, 1), (131072, 8)]


@pytest.mark.parametrize("terms", [(2.0, 1e-4, 3e-5), (0.0, 0.0, 4e-5), (5.0, 0.0, 0.0)])
def test_a_kernel_is_found_from_its_times(terms: tuple[float, float, float]) -> None:
    launch, in_turn, spread = terms
    rows = [
        {"context": context, "batch": batch, "kernels": {
            "_list": {"us": launch + in_turn * context + spread * context * batch * KV_HEADS}}}
        for context, batch in CELLS
    ]  # fmt: skip
    assert fitted("_list", rows)[:3] == pytest.approx(terms, rel=1e-6, abs=1e-12)


def test_bytes_or_instructions_bind_a_kernel_and_scale_it() -> None:
    known, other = DEVICES["H200"], DEVICES["A10G"]
    by_bytes = 512 / (COPIED * known.gbps * 1000)
    bound_by_bytes, bound_by_instructions = Kernel(0, 0, by_bytes, 512), Kernel(0, 0, 4 * by_bytes, 512)
    assert bound_by_bytes.us(0, 1000, other) == pytest.approx(1000 * by_bytes * known.gbps / other.gbps)
    slower = known.multiprocessors * known.ghz / (other.multiprocessors * other.ghz)
    least = by_bytes * known.gbps / other.gbps  # nothing is faster than its bytes
    assert bound_by_instructions.us(0, 1000, other) == pytest.approx(1000 * max(4 * by_bytes * slower, least))
    assert Kernel(3.0, 1e-4, 0, 0).us(10000, 5, other) == pytest.approx(4 * known.ghz / other.ghz)
