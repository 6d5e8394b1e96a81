"""Captures hold what attention saw, and a replay of one is the live decode, judged against a truth written apart."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command import last, outcome, refused

from eps_core.attention.stats import LayerStats
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import capture as capture_module
from eps_core.evaluation.capture import Capture, CaptureRequest, capture, open_capture, record, text_tokens
from eps_core.evaluation.merits import (
    CERTIFIED_LEVELS,
    RECALL_FRACTIONS,
    Truth,
    bounded_skip,
    bytes_at_error,
    false_skips,
    recall_at,
    truth_of,
)
from eps_core.evaluation.replay import ReplayResult, combine, replay_many
from eps_core.load import load_backend
from eps_core.reference import formulas

CONTEXT, STEPS = 300, 3
SMALL = {"num_sink_tokens": 4, "num_recent_tokens": 16, "budget": 0.25}
# what a live decode and its replay must agree on; jl has its own projection in every layer (see replay.py)
LIVE = {
    "rq": EpsConfig.of(method="rq", **SMALL),
    "rq-keys-strict": EpsConfig.of(
        method="rq", bound_bits=8, strict=True, epsilon=0.2, num_sink_tokens=4, num_recent_tokens=16
    ),
    "box-threshold": EpsConfig.of(
        method="box", policy="threshold", top_pages=4, num_sink_tokens=4, num_recent_tokens=16
    ),
    "meanstd": EpsConfig.of(method="meanstd", **SMALL),
    "fd-union": EpsConfig.of(method="fd", scope="union", group_size=16, **SMALL),
    "moments-strict": EpsConfig.of(method="moments", strict=True, epsilon=0.3, **SMALL),
    "rq-heads": EpsConfig.of(
        "rq", head_modes=(("sparse", "dense"), ("dense", "dense"), ("sparse", "window"), ("sparse",) * 2), **SMALL
    ),
    "below-min-context": EpsConfig.of(method="ball", min_context=CONTEXT + 3, **SMALL),
}


def info_of(layers: tuple[int, ...], context: int, steps: int, kv_dtype: str, config: EpsConfig, backend: str) -> Any:
    """Metadata of a capture of the demo model."""
    return capture_module.CaptureInfo(
        1, "demo", 4, 4, 2, 64, 0.125, layers, context, steps, kv_dtype, config.to_dict(), "", backend, "cpu",
        "float32", "",
    )  # fmt: skip


@pytest.mark.parametrize(("backend", "name"), [*(("cuda", name) for name in LIVE), ("numpy", "rq"), ("mlx", "rq")])
def test_replay_is_the_live_decode(backend: str, name: str, tmp_path: Path) -> None:
    config, path = LIVE[name], tmp_path / "c.safetensors"
    session = Session.open(None, backend, "cpu", "float32", "float32")
    decoder = session.decoder
    outputs: list[list[LayerStats]] = []
    plain_step = decoder.step

    def watched(*args: Any, **more: Any) -> Any:
        cache, output = plain_step(*args, **more)
        outputs.append(output.layers)
        return cache, output

    decoder.step = watched  # type: ignore[method-assign]
    tokens = text_tokens(session, None, CONTEXT + STEPS).tokens
    recording = record(session, tokens, CONTEXT, range(session.spec.num_layers), config)
    info = info_of((0, 1, 2, 3), CONTEXT, STEPS, "float32", config, backend)
    capture_module.write_capture(path, info, recording)
    (result,) = replay_many(open_capture(path), [config], load_backend(backend), "cpu")
    assert [len(layers) for layers in outputs] == [4] * STEPS
    for step, layers in enumerate(outputs):
        for layer, stats in enumerate(layers):
            place = (layer, step)
            np.testing.assert_array_equal(result.selected[place], stats.counts[0])
            assert result.always_selected[place] == stats.always_selected[0]
            assert result.groups[step] == stats.groups[0]
            assert result.kv_bytes[place] == stats.kv_bytes_read
            assert result.summary_bytes[place] == stats.summary_bytes_read
            assert stats.skipped_mass is not None
            np.testing.assert_allclose(result.skipped_est[place], stats.skipped_mass[0], atol=1e-5)
            if stats.skipped_mass_bound is not None:
                np.testing.assert_allclose(result.error_bound[place], stats.skipped_mass_bound[0], atol=1e-5)
            if stats.extended is not None:
                np.testing.assert_array_equal(result.extended[place], stats.extended[0])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """A dense decode of the demo model with a bfloat16 cache."""
    path = tmp_path_factory.mktemp("dense") / "dense.safetensors"
    capture(
        CaptureRequest(path, context_tokens=CONTEXT, num_steps=STEPS, backend="cuda", device="cpu", kv_dtype="bfloat16")
    )
    return open_capture(path)


def judged(dense: Capture, config: EpsConfig, **more: Any) -> ReplayResult:
    (found,) = replay_many(dense, [config], load_backend("cuda"), "cpu", **more)
    return found


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_captures_round_trip_bit_for_bit(kv_dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    session = Session.open(None, "cuda", "cpu", "float32", kv_dtype)
    recording = record(session, text_tokens(session, None, 40).tokens, 36, (1, 3), EpsConfig.of())
    info = info_of((1, 3), 36, 4, kv_dtype, EpsConfig.of(), "cuda")
    capture_module.write_capture(path, info, recording)
    found = open_capture(path)
    assert found.info == info
    np.testing.assert_array_equal(found.lengths, [37, 38, 39, 40])
    for layer in (1, 3):
        q, k, v = found.layer(layer)
        assert (q.shape, k.shape, v.shape) == ((4, 4, 64), (40, 2, 64), (40, 2, 64))
        assert k.dtype.name == v.dtype.name == kv_dtype and q.dtype == np.float32
        for stored, kept in zip((q, k, v), (recording.q[layer], *recording.keys_values(layer)), strict=True):
            assert stored.tobytes() == kept.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_capture_holds_what_attention_saw(dense: Capture) -> None:
    """The last step's query is that of the last key's token: a dense decode gives the same in one prefill."""
    session = Session.open(None, "numpy", "cpu", "float32", "bfloat16", method="rq")
    decoder = session.decoder
    taken = {}
    project = decoder.model.project

    def projected(layer: int, x: np.ndarray, positions: np.ndarray) -> Any:
        taken[layer] = project(layer, x, positions)
        return taken[layer]

    decoder.model.project = projected  # type: ignore[method-assign]
    tokens = text_tokens(session, None, CONTEXT + STEPS).tokens
    session.prefix(tokens, prefill_chunk=len(tokens))
    for layer in range(4):
        q, k, v = dense.layer(layer)
        want_q, want_k, want_v = taken[layer]
        for found, want in ((q, want_q[-STEPS:]), (k, want_k), (v, want_v)):
            error = np.abs(found.astype(np.float64) - want).max() / np.abs(want).max()
            assert error < 2e-2, layer  # bfloat16 caches: differences of one rounding grow through the layers


def test_truth_is_the_oracles(dense: Capture) -> None:
    q, k, v = dense.layer(2)
    keys, values = (np.ascontiguousarray(x[:291].swapaxes(0, 1).astype(np.float64)) for x in (k, v))
    truth = truth_of(q[0], keys, values, 0.125, 8)
    for head in range(4):
        a, mine = q[0, head].astype(np.float64) / 8, (head // 2, head % 2)
        out, lse = formulas.attend_keys(a, k[:291, head // 2], v[:291, head // 2])
        masses = formulas.group_masses(a, k[:291, head // 2], 8)
        np.testing.assert_allclose(truth.log_masses[mine], masses, rtol=1e-12)
        np.testing.assert_allclose(truth.shares[mine], np.exp(masses - lse), rtol=1e-10)
        np.testing.assert_allclose(truth.out[mine], out, rtol=1e-9, atol=1e-12)


def random_truth(groups: int = 23, seed: int = 0) -> Truth:
    masses = np.random.default_rng(seed).normal(0, 3, (2, 3, groups))
    shares = np.exp(masses) / np.exp(masses).sum(axis=2, keepdims=True)
    return Truth(masses, shares, np.zeros((2, 3, 4)))


def test_recall_is_of_what_is_ranked() -> None:
    truth = random_truth(9)
    estimate = np.tile(np.arange(9.0), (2, 1))
    estimate[:, 8] = np.inf  # the partial group, which is always selected
    shares = truth.shares
    found, ranked = recall_at(estimate, shares, (0.1, 0.25, 0.5)), shares[:, :, :8]
    for index, best in enumerate((7, 6, 4)):
        want = ranked[:, :, best:].sum(axis=2) / ranked.sum(axis=2)
        np.testing.assert_allclose(found[:, index], want.mean(axis=1))
    past = np.where(np.arange(9) == 0, -np.inf, estimate)  # past the end
    np.testing.assert_allclose(recall_at(past, shares, [1])[:, 0], 1)
    assert np.isnan(recall_at(np.full((2, 9), np.inf), shares, RECALL_FRACTIONS)).all()
    ties = recall_at(np.zeros((2, 9)), shares, [1 / 9])
    np.testing.assert_allclose(ties[:, 0], shares[:, :, 0].mean(axis=1))


def test_recall_leaves_out_what_is_always_selected(dense: Capture) -> None:
    config = EpsConfig.of(method="oracle", group_size=8, num_sink_tokens=16, num_recent_tokens=24)
    config, other = config.replace(num_recent_tokens=100), config
    results = replay_many(dense, [config, other], load_backend("cuda"), "cpu", layers=[1])
    q, k, v = dense.layer(1)
    for result, recent in zip(results, (100, 24), strict=True):
        for step, length in enumerate(dense.lengths):
            keys, values = (np.ascontiguousarray(x[:length].swapaxes(0, 1).astype(np.float64)) for x in (k, v))
            truth, ranked = truth_of(q[step], keys, values, 1 / 8, 8), slice(2, (length - recent) // 8)
            shares = truth.shares[:, :, ranked]
            best = np.argsort(-truth.log_masses[:, :, ranked].max(axis=1), axis=1)[:, : -(-shares.shape[2] // 8)]
            want = np.take_along_axis(shares, best[:, None], axis=2).sum(axis=2) / shares.sum(axis=2)
            np.testing.assert_allclose(result.recall_at[0, step, :, 1], want.mean(axis=1), rtol=1e-5)


def test_certified_skip_is_the_certificate_tried_group_by_group() -> None:
    truth = random_truth()
    upper = truth.log_masses + np.random.default_rng(1).exponential(0.5, truth.log_masses.shape)
    upper[:, :, 4] = np.inf  # a group without a summary is read first
    for levels in (CERTIFIED_LEVELS, (0.5, 0.9)):
        found = bounded_skip(upper, truth.log_masses, levels)
        for head in range(2):
            order = np.argsort(-upper[head].max(axis=0), kind="stable")
            for i, level in enumerate(levels):
                for num_read in range(24):
                    read, rest = order[:num_read], order[num_read:]
                    unread = np.exp(upper[head][:, rest]).sum(axis=1)
                    mass = np.exp(truth.log_masses[head][:, read]).sum(axis=1)
                    if not len(rest) or (np.isfinite(unread).all() and (unread / (unread + mass)).max() <= level):
                        break
                assert found[head, i] == pytest.approx(1 - num_read / 23)
    oracle = bounded_skip(truth.log_masses, truth.log_masses, CERTIFIED_LEVELS)
    assert (found <= 1).all() and (oracle >= bounded_skip(upper, truth.log_masses, CERTIFIED_LEVELS)).all()
    far = np.full_like(upper, 1e4)  # exp overflows: nothing is bounded
    assert (bounded_skip(far, truth.log_masses, CERTIFIED_LEVELS) == 0).all()


def test_false_skips_follow_their_definition() -> None:
    truth = random_truth()
    selected_mask = np.random.default_rng(2).random((2, 23)) < 0.4
    found = false_skips(selected_mask, truth, epsilon=0.02)
    for head in range(2):
        best = truth.log_masses[head].max(axis=0)
        top = set(np.argsort(-best)[: selected_mask[head].sum()])
        wrong = [
            group
            for group in np.flatnonzero(~selected_mask[head])
            if group in top or (truth.shares[head][:, group] > 0.02).any()
        ]
        assert found[head] == len(wrong) > 0
    assert (false_skips(np.ones((2, 23), bool), truth, 0.0) == 0).all()


def test_bytes_at_error_lie_between_budgets() -> None:
    points = [(0.4, 0.01), (0.1, 0.1), (0.2, 0.05), (0.3, 0.06)]
    assert bytes_at_error(points, 0.05) == pytest.approx(0.2)
    assert bytes_at_error(points, np.sqrt(0.1 * 0.05)) == pytest.approx(0.15)
    assert bytes_at_error(points, 0.2) is None and bytes_at_error(points, 0.001) is None
    assert bytes_at_error([], 0.1) is None


def test_reading_everything_misses_nothing(dense: Capture) -> None:
    row = judged(dense, EpsConfig.of(method="moments", budget=1.0)).summary()
    assert row["selected_ratio"] == 1 and row["recall"] == 1 and row["skipped_true"] == 0
    assert row["output_error_max"] < 1e-5 and row["false_skip_rate"] is None
    assert row["bytes_ratio"] == 1 and row["error_bound"] == 0 and row["union_amplification"] == 1


@pytest.mark.parametrize("method", ["1pc", "fd", "box", "ball", "moments", "rq"])
def test_no_bound_is_violated(method: str, dense: Capture) -> None:
    config = EpsConfig.of(method=method, group_size=8, rq_bounds=method == "rq", **SMALL)
    result = judged(dense, config)
    row = result.summary()
    # 2 kv heads of 2 query heads each, every group but those of what is open, in 4 layers and all steps
    size = config.cache_config.span_tokens
    assert row["bound_checks"] == sum(4 * 4 * (length // size * size // 8) for length in dense.lengths)
    assert row["lower_violations"] == row["upper_violations"] == row["bound_violations"] == 0
    assert row["upper_gap"] > 0 and row["error_bound"] >= row["skipped_true"]
    assert (result.bounded_skip <= result.oracle_skip).all()


def test_a_wrong_bound_is_counted(dense: Capture) -> None:
    backend = load_backend("cuda")

    def wrong(*args: Any) -> Any:
        scores = backend.score(*args)
        return replace(scores, upper=scores.upper - 1e3, lower=scores.lower + 1e3)

    liar = SimpleNamespace(**{**vars(backend), "score": wrong})
    (found,) = replay_many(dense, [EpsConfig.of(method="box", **SMALL)], liar, "cpu", layers=[0])
    row = found.summary()
    assert row["lower_violations"] == row["upper_violations"] == row["bound_checks"] > 0
    assert row["bound_violations"] > 0


def test_strict_reaches_its_epsilon(dense: Capture) -> None:
    strict = EpsConfig.of(method="moments", strict=True, epsilon=0.2, **SMALL)
    loose, tight = replay_many(dense, [strict.replace(strict=False), strict], load_backend("cuda"), "cpu")
    assert (loose.error_bound > 0.2).any() and (tight.error_bound <= 0.2).all()
    assert (tight.skipped_true <= tight.error_bound).all()
    assert tight.extended.sum() == (tight.selected - loose.selected).sum() > 0


def test_configurations_that_share_a_cache_do_not_disturb_each_other(dense: Capture) -> None:
    base = EpsConfig.of(method="rq", **SMALL)
    others: tuple[dict[str, Any], ...] = (
        {"budget": 0.5},
        {"policy": "threshold", "top_pages": 40},
        {"num_recent_tokens": 8},
        {"combine": "max"},
    )
    configs = [base, *(base.replace(**other) for other in others)]
    together = replay_many(dense, configs, load_backend("cuda"), "cpu", layers=(1,))
    for config, found in zip(configs, together, strict=True):
        alone = judged(dense, config, layers=(1,))
        assert alone.config == found.config == config and alone.summary() == found.summary()
        assert alone.head_rows() == found.head_rows()


def test_combining_captures() -> None:
    rows = [
        {"a": 1.0, "bound_checks": 2, "x_max": 1.0, "n": "rq"},
        {"a": 2.0, "bound_checks": 3, "x_max": 4.0, "n": "rq"},
    ]
    assert combine(rows) == {"a": 1.5, "bound_checks": 5, "x_max": 4.0, "n": "rq"}
    assert combine([{"budget": 0.1}] * 3) == {"budget": 0.1}  # a setting, whose mean is 0.10000000000000002
    assert combine([{"a": None}, {"a": 2.0}]) == {"a": 2.0} and combine([{"a": None}]) == {"a": None}


def test_commands_capture_and_replay(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents. " * 12)
    common = ["--context", 400, "--steps", 2, "--layers", "0,3", "--text", text, "--backend", "cuda", "--device", "cpu"]
    outputs = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.safetensors"
        flags = ["--eps-method", "box", "--eps-budget", 0.5]
        found = last(outcome([*map(str, ("capture", *common, *flags, "-o", path))], tmp_path))
        assert found["layers"] == [0, 3] and found["config"]["method"] == "box"
        assert found["bytes"] == path.stat().st_size
        shutil.move(path, tmp_path / "c.safetensors")
        outputs.append((tmp_path / "c.safetensors").read_bytes())
    assert outputs[0] == outputs[1]
    assert open_capture(tmp_path / "c.safetensors").info.num_steps == 2
    texts = []
    for name in ("a.jsonl", "b.jsonl"):
        flags = ["--methods", "rq@4,moments,oracle@16", "--budgets", "0.4,0.6", "--eps-rq-bounds", "--jsonl", name]
        texts.append(outcome(["replay", "c.safetensors", "--backend", "cuda", *flags], tmp_path).out)
    assert texts[0] == texts[1]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    result = json.loads(texts[0].splitlines()[-1])
    assert [(r["method"], r["group_size"], r["budget"]) for r in result["rows"]] == [
        (method, size, budget) for method, size in (("rq", 4), ("moments", 8), ("oracle", 16)) for budget in (0.4, 0.6)
    ]
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", *(["replay"] + ["head"] * 4) * 6]
    assert lines[0]["text_sha256"] and EpsConfig.of(**lines[1]["config"]).selection_config.budget == 0.4


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: usage(2**20, 2**20, 0))
    refused(["capture", "-o", "new", "--backend", "cuda"], tmp_path, "MiB left")


def test_a_failed_write_leaves_nothing(dense: Capture, tmp_path: Path) -> None:
    broken = SimpleNamespace(lengths=dense.lengths, q={}, keys_values=None)
    with pytest.raises(KeyError):
        capture_module.write_capture(tmp_path / "c", dense.info, broken)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_head_modes_of_another_shape_are_refused(dense: Capture) -> None:
    config = EpsConfig.of(method="rq", head_modes=(("sparse",),))
    with pytest.raises(ConfigError, match="1 layers x 1 kv heads"):
        judged(dense, config)
