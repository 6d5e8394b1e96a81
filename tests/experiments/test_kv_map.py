"""The map of KV formats: the statistics that it reports by their formulas, and one run of the command."""

import json
from pathlib import Path

import numpy as np
import pytest
from command import outcome, program

from experiments.kv_map.run import moved, pairs_of

MODEL = "llama2"
RUN = program("kv_map")
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 4


def test_every_pair_of_bits_that_a_cache_can_hold() -> None:
    some = [16, 8, "fp8", 4, "nvfp4"]
    assert pairs_of(64) == [(k_bits, v_bits) for k_bits in some for v_bits in some][1:]
    assert len(pairs_of(40)) == 15 and pairs_of(33)[:3] == [(16, 8), (16, "fp8"), (8, 16)] and len(pairs_of(33)) == 8


def test_numbers_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    want, got = rng.standard_normal((2, 5, 7)).astype(np.float32)
    got[3:] = want[3:]
    following = np.array([1, 0, 6, 2])
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in (want, got))
    kl = [sum(a * np.log(a / b) for a, b in zip(*pair, strict=True)) for pair in zip(p, q, strict=True)]
    one = moved((8, 4, None), want, got, following, 0.5)
    assert one.kl_mean == pytest.approx(np.mean(kl)) and one.kl_max == pytest.approx(max(kl))
    assert one.kl_p50 == pytest.approx(np.median(kl)) and one.kl_p50 < one.kl_p99 <= one.kl_max
    assert one.top1_agreement == np.mean([np.argmax(a) == np.argmax(b) for a, b in zip(p, q, strict=True)])
    lost = [np.log(p[i, token] / q[i, token]) for i, token in enumerate(following)]
    assert one.nll_delta == pytest.approx(np.mean(lost), rel=1e-5)
    assert moved((8, 4, 0), want[:1], got[:1], following[:0], 0.5).nll_delta is None


def test_a_run_prints_tables_and_writes_a_line_for_each_arm(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    line = ["--model", str(model), "--text", "text", "--context", "100", "--steps", "4", "--backend", "cuda",
            "--device", "cpu", "-o", "map.jsonl"]  # fmt: skip
    done = outcome(line, tmp_path, main=RUN)
    assert done.code in (None, 0), done.err
    first, *variants = [json.loads(one) for one in (tmp_path / "map.jsonl").read_text().splitlines()]
    assert first["type"] == "run" and first["kind"] == "kv_map" and first["num_steps"] == 4
    assert [(one["k_bits"], one["v_bits"], one["layer"]) for one in variants] == [
        (*bits, layer) for bits in pairs_of(16) for layer in (None, 0, 1)
    ]
    last = json.loads(done.out.splitlines()[-1])
    assert last["arms"] == [one for one in variants if one["layer"] is None]
    assert "K 8, V nvfp4" in done.out and "layer 1" in done.out
    assert "plot" not in done.out and not list(tmp_path.glob("*.svg"))
    assert outcome(line[:-2], tmp_path, main=RUN).out.splitlines()[:-1] == done.out.splitlines()[:-1]


def test_a_run_draws(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_text(TEXT)
    line = ["--model", str(model), "--text", "text", "--context", "60", "--steps", "2", "--backend", "cuda",
            "--device", "cpu", "--plot", "map.svg"]  # fmt: skip
    assert outcome(line, tmp_path, main=RUN).code in (None, 0)
    assert "</svg>" in (tmp_path / "map.svg").read_text()
    done = outcome([*line, "-o", "map.svg"], tmp_path, main=RUN)
    assert done.code == 2 and "map.svg" in done.err
