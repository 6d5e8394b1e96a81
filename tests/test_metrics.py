"""Step records, their files and the run summary, checked against numbers worked out by hand."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eps_core.attention.stats import LayerStats, StepOutput
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.io import outputs
from eps_core.metrics import steps
from eps_core.metrics.steps import StepRecord, step_record, summarise

SPEC = CacheSpec(num_layers=2, num_kv_heads=3, head_dim=8, num_units=64, dtype="float32")
CONFIG = EpsConfig.of(method="rq", group_size=4)
KEYS = [
    "type", "step", "sequences", "tokens", "lengths", "pages_total", "pages_visited", "pages_skipped",
    "pages_always_selected", "pages_wanted", "bytes_kv_read_est", "bytes_kv_dense", "bytes_kv_kept", "rows_moved",
    "units_freed", "bytes_summary_read", "bytes_k_reread", "eps_prepass_ms",
    "attention_ms", "decode_ms", "skipped_mass_mean", "skipped_mass_bound_max", "skipped_mass_true_max",
    "output_error_bound", "extensions", "pages_extended", "audited", "audit_kl", "audit_alarms", "bound_by_head",
    "estimate_by_head", "true_by_head", "fallbacks",
]  # fmt: skip


def layer(selected: int, timed: bool = True, mass: float | None = 0.25) -> LayerStats:
    return LayerStats(
        counts=np.full((2, 3), selected),
        groups=np.array([10, 6]),
        always_selected=np.array([2, 1]),
        skipped_mass=None if mass is None else np.full((2, 3), mass),
        kv_bytes_read=1000,
        summary_bytes_read=100,
        prepass_ms=1.5 if timed else None,
        attention_ms=0.5 if timed else None,
    )


def record(step: int = 0, decode_ms: float = 10.0, timed: bool = True, **fallbacks: int) -> StepRecord:
    output = StepOutput(np.zeros((2, 5)), 2000, [layer(4, timed), layer(5, timed, 0.75)], dict(fallbacks))
    return step_record(step, [0, 1], [7, 8], [40, 24], output, SPEC, CONFIG, decode_ms, 64, timed)


def test_a_sparse_step_counts_groups_over_sequences_layers_and_heads() -> None:
    got = record()
    assert got.pages_total == 2 * 3 * (10 + 6)
    assert got.pages_visited == 2 * 3 * 4 + 2 * 3 * 5
    assert got.pages_skipped == got.pages_total - got.pages_visited
    assert got.pages_always_selected == 2 * 3 * (2 + 1)
    assert got.bytes_kv_read_est == 2000 and got.bytes_summary_read == 200 and got.bytes_k_reread == 64
    assert got.bytes_kv_dense == (40 + 24) * 2 * 3 * (2 * 8 * 4)
    assert got.eps_prepass_ms == 3.0 and got.attention_ms == 1.0
    assert got.skipped_mass_mean == 0.5
    assert got.selected_by_head.tolist() == [[8] * 3, [10] * 3] and got.total_by_head.tolist() == [[16] * 3] * 2


def test_a_dense_step_visits_every_page() -> None:
    off = EpsConfig.of(block_size=16)
    got = step_record(3, [0, 1], [7, 8], [40, 24], StepOutput(np.zeros((2, 5)), 12288), SPEC, off, 1.0, 0)
    assert got.pages_total == got.pages_visited == 2 * 3 * (3 + 2)
    assert got.pages_skipped == got.pages_always_selected == got.bytes_summary_read == 0
    assert got.bytes_kv_read_est == 12288 == got.bytes_kv_dense // 2
    assert got.eps_prepass_ms is None and got.skipped_mass_mean is None


def test_an_untimed_layer_makes_the_step_untimed() -> None:
    assert record(timed=False).eps_prepass_ms is None


@pytest.mark.parametrize(
    "wrong",
    [{"pages_skipped": 41}, {"pages_always_selected": 60}, {"pages_visited": 100, "pages_skipped": -4}],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(wrong: dict) -> None:
    record().check()
    with pytest.raises(AssertionError):
        replace(record(), **wrong).check()


def audited(true: float, cert: float | None = None, est: float | None = 0.25) -> StepOutput:
    """A step of one layer: [B, Hkv] of the same shares everywhere, but a truth of 0 in the second sequence."""
    one = layer(4, mass=est)
    one.skipped_mass_true = np.array([[true] * 3, [0.0] * 3])
    if cert is not None:
        one.skipped_mass_bound, one.output_error_bound = np.full((2, 3), cert), np.full((2, 3), 2 * cert)
    dense, sparse = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    return StepOutput(np.stack([sparse, dense]), 1000, [one], dense_logits=np.stack([dense, dense]))


@pytest.mark.parametrize(
    ("true", "cert", "est", "factor", "alarms"),
    [
        (0.2, 0.1, 0.25, 10, 3),  # above its error bound
        (0.2, 0.2, 0.25, 10, 0),
        (0.2 + 0.9e-5, 0.2, 0.25, 10, 0),  # two float32 sums apart
        (0.2 + 1.1e-5, 0.2, 0.25, 10, 3),
        (0.0102, 0.01, 0.25, 10, 3),  # an error bound is held to the letter, an estimate is not
        (0.3, None, 0.02, 10, 3),  # ten times and more above its estimate
        (0.3, None, 0.02, 20, 0),
        (0.3, None, 0.0, 1000, 3),
        (0.009, None, 0.0, 10, 0),  # under a hundredth no estimate is blamed
        (0.2, None, 0.9, 1, 0),  # an estimate too high costs bytes, not quality
        (0.3, None, None, 10, 0),  # no estimate, nothing to blame
        (0.3, 0.2, 0.001, 10, 3),  # both wrong is one alarm
    ],
)
def test_an_alarm_says_that_a_number_was_below_the_truth(
    true: float, cert: float | None, est: float | None, factor: float, alarms: int
) -> None:
    got = steps.audit_step(audited(true, cert, est), factor)
    assert got.alarms == alarms
    # one sequence of two is off, by KL(dense || sparse) = 0.5 ln 2 - 0.25 ln 2
    assert got.kl == pytest.approx(0.125 * math.log(2))


def test_a_truth_above_its_certificate_is_reported_and_not_refused() -> None:
    output = audited(0.2, 0.1)
    got = step_record(0, [0, 1], [7, 8], [40, 24], output, SPEC, CONFIG, 1.0, 0, audit=steps.audit_step(output, 10))
    assert (got.skipped_mass_true_max, got.skipped_mass_bound_max, got.output_error_bound) == (0.2, 0.1, 0.2)
    assert got.audited and got.audit_alarms == 3 and got.audit_kl == pytest.approx(0.125 * math.log(2))
    for values, want in ((got.bound_by_head, 0.1), (got.true_by_head, 0.2), (got.estimate_by_head, 0.25)):
        assert values is not None and values.tolist() == [[want] * 3]  # [L, Hkv], the largest over sequences
    line = json.loads(outputs.to_json(got.to_dict()))
    assert line["bound_by_head"] == [[0.1] * 3] and line["audited"] is True
    summary = summarise([got, record(1)])
    assert summary["audits"] == 1 and summary["audit_alarms"] == 3 and summary["skipped_mass_true_max"] == 0.2
    assert summary["skipped_mass_bound_max"] == 0.1 and summary["output_error_bound_max"] == 0.2
    assert summary["audit_kl_mean"] == got.audit_kl


def test_what_is_not_known_of_every_head_is_left_out() -> None:
    got = record()
    assert got.bound_by_head is got.estimate_by_head is got.true_by_head is got.extended_by_head is None
    assert not got.audited and got.audit_kl is None and got.audit_alarms == 0 == got.extensions


def test_escalations_count_heads_and_pages() -> None:
    output = StepOutput(np.zeros((2, 5)), 3000, [layer(4), layer(5), layer(6)])
    output.layers[0].extended = np.array([[0, 3, 1], [0, 2, 0]])
    output.layers[2].extended = np.array([[0, 0, 0], [0, 0, 4]])
    spec = replace(SPEC, num_layers=3)
    got = step_record(0, [0, 1], [7, 8], [40, 24], output, spec, CONFIG, 1.0, 0)
    assert got.extensions == 4 and got.pages_extended == 10
    assert summarise([got, got])["extensions_by_layer_and_head"].tolist() == [[0, 4, 2], [0, 0, 0], [0, 0, 2]]
    assert summarise([got, got])["extensions"] == 8 and summarise([got, got])["pages_extended"] == 20


def test_unknown_is_null_and_never_nan() -> None:
    line = outputs.to_json(
        {"a": math.nan, "b": [np.float32("inf"), np.int64(3)], "c": np.array([1.0, np.nan]), 4: None}
    )
    assert json.loads(line) == {"a": None, "b": [None, 3], "c": [1.0, None], "4": None}


def test_a_whole_file_appears_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for mode, text in (("w", "line\n"), ("wb", b"\x00")):
        with outputs.replacing(path, mode) as file:
            file.write(text)
            before = path.exists() and path.read_bytes()
        assert before != path.read_bytes() == (text if isinstance(text, bytes) else text.encode())
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode  # and not the private one of a temporary file
    with pytest.raises(KeyboardInterrupt), outputs.replacing(path) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"\x00" and {p.name for p in tmp_path.iterdir()} == {"f", "usual"}


def test_csv_says_what_jsonl_says(tmp_path: Path) -> None:
    output = audited(0.2, 0.1)
    audit = steps.audit_step(output, 10)
    known = step_record(2, [0, 1], [7, 8], [40, 24], output, SPEC, CONFIG, 1.0, 0, audit=audit)
    records = [record(0, min_context=2), record(1, timed=False), known]
    steps.write_csv(tmp_path / "m.csv", records)
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == KEYS[1:]
    for row, written in zip(rows, records, strict=True):
        for name, text in row.items():
            value = getattr(written, name)
            if value is None:
                assert text == ""
            elif isinstance(value, bool):
                assert text == str(value)
            elif isinstance(value, np.ndarray):  # layer by layer
                assert json.loads("[" + text.replace("] [", "], [") + "]") == value.tolist()
            elif isinstance(value, list):
                assert [int(part) for part in text.split()] == value
            else:
                assert json.loads(text) == value
    assert [path.name for path in tmp_path.iterdir()] == ["m.csv"]


def test_summary_adds_up_and_compares_with_dense() -> None:
    records = [record(0, 10.0), record(1, 20.0), record(2, 30.0, min_context=2)]
    got = summarise(records, prefill_ms=5.0)
    assert got["steps"] == 3 and got["new_tokens"] == 6 and got["prefill_ms"] == 5.0
    assert got["decode_ms_p50"] == got["decode_ms_p95"] == 30.0 and got["warm_up_steps"] == 2
    assert got["tokens_per_s"] == pytest.approx(2 / 0.030)
    assert got["prepass_ms_p50"] == 3.0 and got["attention_ms_p99"] == 1.0
    dense = 3 * 64 * 2 * 3 * 64
    assert got["bytes_kv_dense"] == dense
    assert got["bytes_ratio"] == pytest.approx((3 * 2000 + 3 * 200) / dense)
    assert got["kv_ratio"] + got["summary_ratio"] == pytest.approx(got["bytes_ratio"])
    assert got["selected_ratio"] == pytest.approx(54 / 96)
    np.testing.assert_allclose(got["selected_ratio_by_layer_and_head"], [[8 / 16] * 3, [10 / 16] * 3])
    assert got["skipped_mass_mean"] == 0.5 and got["skipped_mass_bound_max"] is None
    assert got["fallbacks"] == {"min_context": 2} and got["extensions"] == 0


def test_a_window_keeps_all_tokens_of_a_quantised_cache_too() -> None:
    """Kept bytes and dense reads are counted apart, and both are compared with the 16-bit cache."""
    spec = replace(SPEC, dtype="bfloat16", k_bits=8, v_bits=8, windows=(None, 10))
    output = StepOutput(np.zeros((2, 5)), 2000, [layer(4), layer(5)], {})
    got = summarise([step_record(0, [0, 1], [7, 8], [40, 24], output, spec, CONFIG, 10.0, 64, True)])
    assert got["bytes_kv_dense"] == (40 + 24 + 10 + 10) * 3 * (2 * 8 * 2)
    assert got["bytes_kv_kept"] == (40 + 24) * 2 * 3 * 2 * (8 + 2)
    assert got["kept_ratio"] == (8 + 2) / 16 and got["kv_ratio"] == 2000 / got["bytes_kv_dense"]


def test_times_of_a_decode_come_from_steps_that_did_not_wait_for_every_layer() -> None:
    got = summarise([record(4, 100.0), record(5, 10.0, timed=False), record(6, 12.0, timed=False)])
    assert got["decode_ms_p50"] == 11.0 and got["warm_up_steps"] == 0
    assert got["tokens_per_s"] == pytest.approx(4 / 0.022)
    assert got["prepass_ms_p50"] == 3.0


def test_warm_up_steps_are_in_no_time_and_tokens_a_second_say_what_the_median_says() -> None:
    """The first steps find new memory and cold caches: a run of which they are a part says nothing of the others."""
    slow, fast = [record(step, 3000.0, timed=False) for step in (0, 1)], record(2, 10.0, timed=False)
    got = summarise([*slow, fast, replace(fast, step=3, decode_ms=12.0), replace(fast, step=4, decode_ms=900.0)])
    assert got["decode_ms_p50"] == 12.0 and got["decode_ms_p95"] < 900 and got["warm_up_steps"] == 2
    assert got["tokens_per_s"] == pytest.approx(2 / 0.012)
    assert got["steps"] == 5 and got["bytes_kv_read_est"] == 5 * 2000, "what is counted is counted of every step"
    # each decode of a batch of decodes has its own; a run of warm-up steps alone reports them and says so
    assert summarise([*slow, fast, *slow, fast])["warm_up_steps"] == 4
    assert summarise(slow)["decode_ms_p50"] == 3000.0 and summarise(slow)["warm_up_steps"] == 0


def test_tokens_a_second_of_a_batch_do_not_depend_on_which_size_most_steps_have() -> None:
    """Sequences end at different steps: equally fast steps of 8 sequences, then of 1, which are the median or not."""
    step = record(2, 1.0, timed=False)
    eight, one = replace(step, tokens=[7] * 8, decode_ms=10.0), replace(step, tokens=[7], decode_ms=2.0)
    for of_eight, of_one in ((12, 14), (14, 12)):
        got = summarise([eight] * of_eight + [one] * of_one + [replace(one, decode_ms=2.1)])["tokens_per_s"]
        assert got == pytest.approx(1000 * (8 * of_eight + of_one + 1) / (10 * of_eight + 2 * (of_one + 1)))


def test_times_of_a_decode_leave_audited_steps_out() -> None:
    slow = replace(record(0, 500.0, timed=False), audited=True, audit_kl=0.5)
    got = summarise([slow, record(5, 10.0, timed=False), record(6, 12.0, timed=False), record(7, 90.0)])
    assert (
        got["decode_ms_p50"] == 11.0 and got["decode_ms_p99"] < 13 and got["tokens_per_s"] == pytest.approx(4 / 0.022)
    )
    assert got["steps"] == 4 and got["bytes_kv_read_est"] == 4 * 2000 and got["audit_kl_mean"] == 0.5
    # where every step is audited there is nothing else to report
    assert summarise([slow, slow])["decode_ms_p50"] == 500.0


def test_summary_of_nothing_is_null() -> None:
    got = summarise([])
    assert got["audits"] == 0 and got["audit_kl_mean"] is got["skipped_mass_true_max"] is None
    assert got["decode_ms_p50"] is None and got["bytes_ratio"] is None and got["selected_ratio"] is None
