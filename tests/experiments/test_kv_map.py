"""The map of formats of K and V: what it measures against brute force, and as a user runs it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from command import outcome, program

from eps_core.decode.session import Session
from eps_core.oracle import codes, pages
from eps_core.report.figures import shade
from experiments.kv_map import figure as plot
from experiments.kv_map.kv_map import Moved, Reader, moved, pairs_of

RUN = program("kv_map")
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("llama2", tmp_path_factory.mktemp("kv_map") / "model")


def reader(model: Path, backend: str = "cuda", steps: int = 8) -> Reader:
    session = Session.open(model, backend, "cpu", kernels="arrays")
    tokens = session.encode(TEXT)[:160]
    return Reader(session, tokens, len(tokens) - steps)


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


def test_nothing_moves_without_codes_and_more_with_fewer_bits(model: Path) -> None:
    read = reader(model)
    want, following = read.logits(read.plain), np.zeros(0, np.int64)
    (_, same), *_ = read.arms((16, 16))
    assert (same == want).all()
    kl = {bits: moved((*bits, None), want, next(read.arms(bits))[1], following, 1.0).kl_mean for bits in pairs_of(16)}
    assert 0 < kl[8, 8] < kl[4, 8] <= kl[4, 4] * 1.5 and kl[16, 8] < kl[16, 4] and kl[8, 16] < kl[4, 16]
    assert kl[8, 8] < kl["fp8", "fp8"] < kl["nvfp4", "nvfp4"]
    assert (read.logits(read.plain) == want).all()  # what the arms did not change


def test_a_layer_alone_is_codes_in_that_layer_alone(model: Path) -> None:
    """By numpy, over a cache of plain arrays that hold what codes of one layer say."""
    read = reader(model, "numpy")
    k_bits, v_bits = bits = (8, "nvfp4")
    arms = dict(read.arms(bits))
    assert sorted(arms, key=lambda layer: -1 if layer is None else layer) == [None, 0, 1]
    for layer in (0, 1):
        assert not (arms[layer] == arms[None]).all() and not (arms[layer] == arms[1 - layer]).all()
    made, plain = read._filled(bits), read._filled((16, 16))
    for cache in (made[0], plain[0]):
        assert len(cache.k) == 2
    for name, one in (("k", k_bits), ("v", v_bits)):
        pool = getattr(plain[0], name)[1]
        pool[:] = codes.dequantise(*codes.quantise(pool, one), one, pool.dtype)
        coded = getattr(made[0], name)
        assert (pages.rows_of(coded[1], slice(None)) == pool).all()
        getattr(plain[0], name)[1] = coded[1]
    np.testing.assert_allclose(read.logits(plain), arms[1], rtol=0, atol=1e-12)


def test_backends_agree(model: Path) -> None:
    want, got = ([logits for _, logits in reader(model, name).arms((4, 8))] for name in ("numpy", "mlx"))
    torch = [logits for _, logits in reader(model).arms((4, 8))]
    for one, *others in zip(want, got, torch, strict=True):
        for other in others:
            np.testing.assert_allclose(other, one, rtol=0, atol=2e-3)


def test_a_run_prints_tables_and_writes_a_line_for_each_arm(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    line = ["--model", str(model), "--text", "text", "--context", "100", "--steps", "4", "--backend", "cuda",
            "--device", "cpu", "-o", "map.jsonl"]  # fmt: skip
    done = outcome(line, tmp_path, main=RUN)
    assert done.code in (None, 0), done.err
    first, *arms = [json.loads(one) for one in (tmp_path / "map.jsonl").read_text().splitlines()]
    assert first["type"] == "run" and first["kind"] == "kv_map" and first["num_steps"] == 4
    assert [(one["k_bits"], one["v_bits"], one["layer"]) for one in arms] == [
        (*bits, layer) for bits in pairs_of(16) for layer in (None, 0, 1)
    ]
    last = json.loads(done.out.splitlines()[-1])
    assert last["arms"] == [one for one in arms if one["layer"] is None]
    assert "K 8, V nvfp4" in done.out and "layer 1" in done.out
    assert "plot" not in done.out and not list(tmp_path.glob("*.svg"))
    assert outcome(line[:-2], tmp_path, main=RUN).out.splitlines()[:-1] == done.out.splitlines()[:-1]


def test_a_text_too_short_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    line = ["--model", str(model), "--text", "text", "--context", "100", "--backend", "numpy"]
    done = outcome(line, tmp_path, main=RUN)
    assert done.code == 2 and "give a longer --text or lower --context" in done.err


def arms_of(layers: int) -> list[Moved]:
    """As many arms as `pairs_of` makes, each of another KL."""
    arms = [(*pair, layer) for pair in pairs_of(64) for layer in (None, *range(layers))]
    kls = np.logspace(-7, 0, len(arms)).tolist()
    return [Moved(*arm, 0.5, kl, 0.0, 0.0, 1.0, 1.0, None) for arm, kl in zip(arms, kls, strict=True)]


def shaded(found: list[Moved], monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(values, limits, rows, columns) of each panel, as they are drawn."""
    panels = []

    def spy(axes, values, limits, rows, columns, said):
        panels.append((values, limits, rows, columns))
        return shade(axes, values, limits, rows, columns, said)

    monkeypatch.setattr(plot, "shade", spy)
    assert plot.figure(found).startswith("<?xml")
    return panels


def test_the_figure_has_every_arm_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    found = arms_of(3)
    (whole, limits, rows, columns), (alone, same, layers, parts) = shaded(found, monkeypatch)
    shown = [one.kl_mean for one in found if one.layer is None or 16 in (one.k_bits, one.v_bits)]
    assert (
        limits == same == pytest.approx((np.log10(min(shown)), np.log10(max(shown))))
        and np.isnan(whole[0, 0])
        and np.isnan(whole).sum() == 1
    )
    assert rows == columns == ["16", "8", "fp8", "4", "nvfp4"] and layers == ["0", "1", "2"]
    seen = 0
    for one in found:
        names = str(one.k_bits), str(one.v_bits)
        if one.layer is None:
            assert 10 ** whole[rows.index(names[0]), columns.index(names[1])] == pytest.approx(one.kl_mean)
        elif "16" in names:
            part = f"K {names[0]}" if names[1] == "16" else f"V {names[1]}"
            assert 10 ** alone[one.layer, parts.index(part)] == pytest.approx(one.kl_mean)
            seen += 1
    assert seen == alone.size


def test_a_figure_of_many_layers_and_of_nothing_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    _, (alone, _, layers, _) = shaded(arms_of(40), monkeypatch)
    assert alone.shape == (40, 8) and len(layers) == 40
    still = [replace(one, kl_mean=0.0) for one in arms_of(1)]
    (whole, limits, *_), _ = shaded(still, monkeypatch)
    assert limits == (-9, -8) and np.nanmax(whole) == -9
    assert plot.figure(still) == plot.figure(still)


def test_a_run_draws(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "text").write_text(TEXT)
    line = ["--model", str(model), "--text", "text", "--context", "60", "--steps", "2", "--backend", "cuda",
            "--device", "cpu", "--plot", "map.svg"]  # fmt: skip
    assert outcome(line, tmp_path, main=RUN).code in (None, 0)
    assert "</svg>" in (tmp_path / "map.svg").read_text()
    done = outcome([*line, "-o", "map.svg"], tmp_path, main=RUN)
    assert done.code == 2 and "map.svg" in done.err
