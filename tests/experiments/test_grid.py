"""A grid of cells: what it expands to, what a cell measures, and that no kill loses or repeats a finished one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner

from eps_core.config.eps import EpsConfig
from eps_core.config.store import EVALUATION_METHODS, METHODS
from eps_core.decode.heads import HeadPolicy, model_fingerprint, modes_of
from eps_core.errors import ConfigError
from eps_core.files.outputs import Output
from eps_core.files.resumable import ResumableFile
from eps_core.models.config import read_spec
from eps_core.summaries import rq
from eps_core.tasks.corpus import SHA256
from experiments.grid.grid import IDENTITY, Progress, header
from experiments.grid.grid_cell import Bench, Plan
from experiments.grid.grid_settings import PRESETS, Setting, config_of, expand, load_grid
from experiments.grid.run import main as grid_command

ROOT = Path(__file__).parents[2]
# torch and MLX need seconds to import: the oracle's own loop is enough to test a file
SMALL = ["--backend", "numpy", "--device", "cpu", "--needles", 1, "--texts", 1, "--text-steps", 4, "--audit-every", 2]
AXES = {"context": [288, 320], "method": ["rq", "ball", "jl"], "budget": [0.5, 0.9], "group_tokens": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("mistral", tmp_path_factory.mktemp("model"))


def arguments(model: Path, out: Path, axes: Any, *more: object) -> list[str]:
    grid = out.with_suffix(".grid.json")
    grid.write_text(json.dumps(axes))
    return [str(a) for a in ["--model", model, "--grid", grid, "-o", out, *SMALL, *more]]


def run(model: Path, out: Path, axes: Any, *more: object) -> dict[str, Any]:
    """The last stdout line's object of a grid that must succeed."""
    done = CliRunner().invoke(
        grid_command, arguments(model, out, axes, *more), standalone_mode=False, catch_exceptions=False
    )
    return json.loads(done.stdout.splitlines()[-1])


def refusal(model: Path, out: Path, axes: Any, *more: object) -> str:
    with pytest.raises(ConfigError) as error:
        run(model, out, axes, *more)
    assert "\n" not in str(error.value)
    return str(error.value)


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    return [json.loads(line) for line in text.splitlines()]


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if line["type"] == "cell"]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of AXES, all cells."""
    out = tmp_path_factory.mktemp("finished") / "r.jsonl"
    result = run(model, out, AXES)
    assert result == {"out": str(out), "cells": 12, "resumed": 0, "measured": 12, "skipped": 0, "failed": 0}
    return out


def test_preset_prd_is_the_requirements_grid() -> None:
    cells = expand(PRESETS["prd"], "prd")
    assert len(cells) == len(set(cells)) == 1296
    assert {cell.context for cell in cells} == {8192, 32768, 65536, 131072}
    assert {(cell.method, cell.policy) for cell in cells} == {("jl", "threshold")}
    assert {cell.heads for cell in cells} == {"retrieval", "all"}


@pytest.mark.parametrize(("preset", "least", "longest"), [("small", 30, 4096), ("long", 15, 32768)])
def test_a_preset_holds_no_impossible_cell(preset: str, least: int, longest: int) -> None:
    cells = expand(PRESETS[preset], preset)
    assert least < len(cells) < 80 and max(cell.context for cell in cells) == longest
    for cell in cells:
        config_of(cell, None)


def test_a_cell_is_expanded_once_and_lists_of_grids_are_joined() -> None:
    blocks = [{"method": ["rq", "box"]}, {"method": "rq"}, {"method": "jl", "dim": [4, None]}]
    assert [(cell.method, cell.dim) for cell in expand(blocks, "g")] == [
        ("rq", None), ("box", None), ("jl", 4), ("jl", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"contexts": [1]}, "unknown axis contexts: known are context, batch, method"),
        ([{"method": "rq"}, {"m": 4}], "unknown axis m:"),
        ({"context": "8k"}, "axis context: '8k' is not a whole number"),
        ({"batch": True}, "axis batch: True is not a whole number"),
        ({"batch": [0]}, "axis batch: 0 is not within 1 to"),
        ({"budget": [0.1, "much"]}, "axis budget: 'much' is not a number"),
        ({"method": ["svd"]}, "method 'svd' is unknown"),
        ({"heads": ["some"]}, "heads 'some' is unknown"),
        ({"dim": []}, "axis dim is an empty list"),
        ([], "holds no cells"),
        ("rq", "must be an object of axes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_a_grid_file_is_one_line(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "g.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        load_grid(path)
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_grid_file_that_is_no_json_or_absent(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text("{")
    for name, words in (("g.json", "is not JSON"), ("absent.json", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            load_grid(tmp_path / name)


def test_settings_become_the_config_they_name() -> None:
    setting = Setting(8192, 1, "jl", "threshold", dim=4, alpha=1.05, last_n=4, group_blocks=8, budget=0.25)
    config = config_of(setting, None)
    assert (config.store.S, config.store.dim, config.read.alpha, config.read.last_tokens) == (128, 4, 1.05, 512)
    assert config.read.top_pages == 16  # a quarter of 8,192 tokens in groups of 128
    modes = (("gate", "dense"), ("window", "gate"))
    assert config_of(replace(setting, heads="retrieval"), modes).read.head_modes == modes
    assert config_of(setting, modes).read.head_modes is None
    assert config_of(Setting(method="rq", strict=True), None).store.bound_bits == 8


def test_what_a_cell_measures(finished: Path) -> None:
    first, *rest = lines_of(finished)
    assert first["type"] == "run" and first["grid"] == [cell.to_dict() for cell in expand(AXES, "g")]
    assert first["plan"]["text_steps"] == 4 and "numpy" in first["versions"]
    assert [cell["index"] for cell in sorted(rest, key=lambda cell: cell["index"])] == list(range(12))
    for cell in rest:
        assert cell["skipped"] is None
        # all bytes are in the ratio, and what is read is what is visited
        assert cell["bytes_ratio"] == pytest.approx(cell["kv_ratio"] + cell["summary_ratio"])
        assert 0 < cell["forced_ratio"] <= cell["visit_ratio"] <= 1
        assert cell["kv_ratio"] == pytest.approx(cell["visit_ratio"], abs=0.05)
        assert len(cell["visit_ratio_by_layer_and_head"]) == 2
        assert cell["num_positions"] == 4 and cell["kl_mean"] >= 0 and cell["num_needles"] == 1
        assert cell["needles_answered"] == cell["needles_dense"] - cell["needles_lost"] + cell["needles_gained"]
        for clock in ("decode_ms_p50", "decode_ms_p95", "dense_decode_ms_p50", "dense_decode_ms_p95", "prepass_ms_p50"):
            assert cell[clock] > 0
        assert cell["timed_steps"] == 1  # of 4 neither the two warm-up steps nor the two audits
        assert 0 <= cell["mass_skipped_true_max"] <= 1 and cell["mass_skipped_est_mean"] is not None
        bounded = cell["method"] == "ball"
        assert (cell["mass_skipped_cert_max"] is not None) == bounded and bool(cell["mass_pairs"]) == bounded
        assert all(true <= cert + 1e-6 for cert, true in cell["mass_pairs"])
    # dense steps are timed in turn with each cell's own: a machine's speed wanders from minute to minute
    assert len({cell["dense_decode_ms_p50"] for cell in rest}) == len(rest)
    by_budget = {
        (cell["context_tokens"], cell["method"], cell["setting"]["budget"]): cell["bytes_ratio"] for cell in rest
    }
    for context in (288, 320):
        for method in ("rq", "ball", "jl"):
            assert by_budget[context, method, 0.5] < by_budget[context, method, 0.9]


def test_reading_every_group_changes_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    run(model, out, {"context": 288, "method": "rq", "budget": 1.0, "batch": [1, 2]}, "--needles", 2)
    for cell in cells_of(out):
        assert cell["visit_ratio"] == 1 and cell["kl_mean"] < 1e-9 and cell["top1_agreement"] == 1
        assert cell["needles_lost"] == cell["needles_gained"] == 0
        assert cell["num_positions"] == 4 * cell["batch"]


def test_quality_does_not_depend_on_what_was_kept(model: Path, tmp_path: Path) -> None:
    """Documents that are prefilled again for every cell, and audits, change no number of quality or bytes."""
    axes = {"context": 288, "method": ["rq", "box"], "budget": 0.6}
    plain, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run(model, plain, axes)
    run(model, other, axes, "--prefill-mib", 0, "--audit-every", 0, "--repeat", 2)
    for one, two in zip(cells_of(plain), cells_of(other), strict=True):
        for name in ("bytes_ratio", "visit_ratio", "kl_mean", "kl_max", "needles_answered", "mass_skipped_est_mean"):
            assert one[name] == two[name], name
        assert two["mass_skipped_true_mean"] is None and two["timed_steps"] == 4


def test_impossible_cells_are_written_with_the_reason(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    axes = [
        {"context": [4, 513, 65536]},
        {"context": 300, "method": ["off", "box"], "dim": 4},
        {"context": 300, "alpha": 1.1},
        {"context": 300, "epsilon": 0.1},
        {"context": 300, "heads": "retrieval"},
        {"context": 300, "method": "jl", "strict": True, "top_pages": 5},
        {"context": 40},
    ]
    result = run(model, out, axes)
    assert result["skipped"] == result["cells"] == 10
    reasons = [cell["skipped"] for cell in sorted(cells_of(out), key=lambda cell: cell["index"])]
    for reason, words in zip(
        reasons,
        ["no prompt before 5", "past the model's 512", "past the model's 512", "dense side",
         "no meaning for method box",
         "alpha 1.1 belongs to policy threshold", "epsilon 0.1", "--eps-head-policy", "strict",
         "no room"],
        strict=True,
    ):  # fmt: skip
        assert words in reason
    # and they are finished: nothing is left to do
    again = run(model, out, axes)
    assert again["resumed"] == 10 and again["skipped"] == 10, "a grid with holes says so each time"


def head_policy(model: Path, fingerprint: str, classes: list[list[str]]) -> str:
    """A head policy's JSON for a model: curves and shares that say nothing, classes that matter."""
    spec = read_spec(model)
    shares = ((0.5,) * spec.num_kv_heads,) * spec.num_layers
    frozen = tuple(map(tuple, classes))
    values = HeadPolicy(
        1, "m", fingerprint, spec.num_layers, spec.num_kv_heads, spec.head_dim, {}, (0.5, 1.0),
        (((0.5, 1.0),) * spec.num_kv_heads,) * spec.num_layers, shares, shares, frozen, (),
        modes_of(frozen, ()),
    )  # fmt: skip
    return json.dumps(asdict(values))


def test_a_head_policy_gates_and_one_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    axes = {"context": 288, "heads": ["retrieval", "all"], "budget": 0.5}
    policy = tmp_path / "heads.json"
    spec = read_spec(model)
    classes = [["retrieval"] * spec.num_kv_heads for _ in range(spec.num_layers)]
    classes[0][1] = "streaming"
    policy.write_text(head_policy(model, model_fingerprint(model), classes))
    run(model, tmp_path / "r.jsonl", axes, "--eps-head-policy", policy)
    scoped, everywhere = cells_of(tmp_path / "r.jsonl")
    assert scoped["visit_ratio_by_layer_and_head"][0][1] == 1
    assert scoped["visit_ratio_by_layer_and_head"][1][0] < 1 and everywhere["visit_ratio_by_layer_and_head"][0][1] < 1
    policy.write_text(head_policy(model, "another", classes))
    assert "another model" in refusal(model, tmp_path / "s.jsonl", axes, "--eps-head-policy", policy)
    policy.write_text("[]")
    assert "head policy" in refusal(model, tmp_path / "t.jsonl", axes, "--eps-head-policy", policy)


@pytest.mark.parametrize("method", [*METHODS[1:], *EVALUATION_METHODS])
def test_what_a_grid_leaves_out_is_the_method_s_own_default(method: str) -> None:
    assert config_of(Setting(method=method), None) == EpsConfig.of(method=method)
    strict = config_of(Setting(method=method, strict=True), None).store
    assert strict.has_bounds and strict.bound_bits == (0 if EpsConfig.of(method=method).store.own_bounds else 8)
    assert config_of(Setting(method=method, strict=True, bound_bits=4), None).store.bound_bits == 4


def test_the_axes_of_certificates_second_bits_tails_and_guards() -> None:
    axes = {"bound_bits": 4, "refine": 0.25, "tail_tokens": [0, 32], "scope": "union", "first_n": 3, "last_n": 0}
    dropped, kept = (config_of(cell, None) for cell in expand(axes, "g"))
    assert dropped == kept.replace(tail_tokens=0) and kept.store.tail_tokens == 32
    assert (kept.store.bound_bits, kept.read.refine, kept.read.scope) == (4, 0.25, "union")
    assert (kept.read.first_tokens, kept.read.last_tokens) == (3, 0)
    for setting, words in (
        (Setting(strict=True, bound_bits=0), "eps-strict needs bounds"),
        (Setting(first_n=-1), "first_n -1 is negative"),
        (Setting(method="box", refine=0.5), "eps-refine 0.5"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(setting, None)


def test_a_kill_loses_no_finished_cell_and_repeats_none(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    axes = {**AXES, "budget": [0.4, 0.5, 0.6, 0.7, 0.8, 0.9]}
    process = subprocess.Popen(
        [sys.executable, "-c", "from experiments.grid.run import main as grid_command; grid_command()",
         *arguments(model, out, axes)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts")))},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = out.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    num_finished = whole.count(b"\n") - 1
    assert 3 <= num_finished < 36, "the kill came too late to test anything"
    result = run(model, out, axes)
    assert (result["resumed"], result["measured"]) == (num_finished, 36 - num_finished)
    assert out.read_bytes().startswith(whole)
    assert sorted(cell["index"] for cell in cells_of(out)) == list(range(36))


@pytest.mark.parametrize(
    "tail", [b'{"type": "cell", "ind', b"\0\0\0\n", b'{"type": "cell"'], ids=["half", "nul", "open"]
)
def test_a_torn_last_line_is_cut_off_and_done_again(model: Path, finished: Path, tmp_path: Path, tail: bytes) -> None:
    out = tmp_path / "r.jsonl"
    lines = finished.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-1]) + tail)
    assert (result := run(model, out, AXES))["resumed"] == 11 and result["measured"] == 1
    assert out.read_bytes().startswith(b"".join(lines[:-1]))
    assert sorted(cell["index"] for cell in cells_of(out)) == list(range(12))


@pytest.mark.parametrize("start", [b"", b'{"type": "run", "ki', b'{"type": "run", "kind": "grid", "gri'])
def test_a_torn_first_line_starts_anew(model: Path, tmp_path: Path, start: bytes) -> None:
    out = tmp_path / "r.jsonl"
    out.write_bytes(start)
    assert run(model, out, {"context": 4})["resumed"] == 0
    assert [line["type"] for line in lines_of(out)] == ["run", "cell"]


def test_a_retrained_model_is_refused_and_its_results_left_alone(model: Path, tmp_path: Path) -> None:
    retrained, out = tmp_path / "model", tmp_path / "r.jsonl"
    shutil.copytree(model, retrained)
    run(retrained, out, {"context": 4})
    before = out.read_bytes()
    weights = min(retrained.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the lowest bit of the first weight
    weights.write_bytes(data)
    assert "its model_id differs" in refusal(retrained, out, {"context": 4})
    assert out.read_bytes() == before


def test_another_grid_or_model_or_file_is_refused_and_left_alone(model: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    out.write_bytes(finished.read_bytes())
    assert "its grid differs" in refusal(model, out, {**AXES, "budget": [0.5]})
    assert "its plan.needles differs (1 there, 2 now)" in refusal(model, out, AXES, "--needles", 2)
    other = tiny_models.save_model("qwen3", tmp_path / "other")
    assert f"its model differs ({model} there, {other} now)" in refusal(model, out, AXES, "--model", other)
    assert "its dtype differs (float32 there, float16 now)" in refusal(model, out, AXES, "--dtype", "float16")
    assert out.read_bytes() == finished.read_bytes()
    for text, words in (
        ('{"type": "run"}\n', "holds no results of kind grid"),
        ("my notes", "holds no results of kind grid"),
        ("my notes\nand more\n", "line 1 is not a JSON object"),
    ):
        out.write_text(text)
        assert words in refusal(model, out, AXES)
        assert out.read_text() == text


def begun_earlier(line: dict[str, Any], form: str) -> dict[str, Any]:
    """A finished cell's line as one with another default would have been, or one of the same settings."""
    if line["method"] == "rq" and form != "the same, by its columns":
        line = {**line, "mean_tokens": 32, "config": {**line["config"], "mean_tokens": 32}}
    return line if form == "its config" else {name: value for name, value in line.items() if name != "config"}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("its config", "of cell 0 (rq, context 288) config.mean_tokens differs (32 there, 64 now)"),
        ("its columns", "of cell 0 (rq, context 288) cell.mean_tokens differs (32 there, 64 now)"),
        ("the same, by its columns", None),
    ],
)
def test_a_cell_of_another_default_is_refused_and_one_of_the_same_is_not(
    model: Path, finished: Path, tmp_path: Path, form: str, words: str | None
) -> None:
    out = tmp_path / "r.jsonl"
    first, *cells = lines_of(finished)
    cells = [begun_earlier(cell, form) for cell in sorted(cells, key=lambda cell: cell["index"])]
    for kept in (cells, [cell for cell in cells if cell["method"] != "rq"]):
        out.write_text("".join(json.dumps(line) + "\n" for line in (first, *kept)))
        before = out.read_bytes()
        if words is not None and kept is cells:
            error = refusal(model, out, AXES)
            assert words in error and "give another -o, or go on with the version" in error
            assert out.read_bytes() == before
        else:  # what depends on no default that has changed goes on
            assert run(model, out, AXES)["resumed"] == len(kept)


def test_a_grid_goes_on_over_a_changed_default_only_where_it_does_not_matter(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = {"context": 288, "method": "rq", "budget": 0.5, "tail_tokens": 64}
    out, named = tmp_path / "r.jsonl", tmp_path / "named.jsonl"
    with monkeypatch.context() as before:
        before.setattr(rq, "FACTS", replace(rq.FACTS, unit=replace(rq.FACTS.unit, mean_tokens=32)))
        run(model, out, axes)
        run(model, named, {**axes, "mean_tokens": 32})
    assert [cell["config"]["mean_tokens"] for cell in cells_of(out)] == [32]
    written = out.read_bytes()
    assert "config.mean_tokens differs (32 there, 64 now)" in refusal(model, out, axes)
    assert out.read_bytes() == written
    assert run(model, named, {**axes, "mean_tokens": 32})["resumed"] == 1
    monkeypatch.setattr(rq, "FACTS", replace(rq.FACTS, guards=(0, 16)))
    assert "config.first_tokens differs (4 there, 0 now)" in refusal(model, named, {**axes, "mean_tokens": 32})


def test_a_start_with_other_versions_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = header(
        [Setting()], Plan(), None, {}, model="m", model_id="0", backend="numpy", device="cpu", dtype="float32"
    )
    for commit in (first["git_commit"], "another", "another"):
        with Output(path) as output, ResumableFile(output, {**first, "git_commit": commit}, IDENTITY):
            pass
    assert [line["type"] for line in lines_of(path)] == ["run", "resume"]


def test_progress_counts_cells_and_time(capsys: pytest.CaptureFixture) -> None:
    progress = Progress([Setting(context=1000)] * 4, {3}, sys.stderr)
    progress(0, None)
    progress(1, 60.0)
    progress(2, 60.0)
    assert capsys.readouterr().err == "grid: 3 of 4 cells, about 60 s left\ngrid: 4 of 4 cells\n"


def test_a_grid_of_no_verified_cell_is_the_grid_that_it_was() -> None:
    """Its file began before there were these axes, and goes on."""
    off, drawn = expand({"context": 256, "verify": ["off", "tokens"], "draft": 4}, "g")
    codes = {"mean_tokens", "stages"}
    assert replace(off, draft=None).to_dict().keys() == asdict(off).keys() - codes - {
        "verify", "draft", "draft_auto", "draft_weights", "temperature",
    }  # fmt: skip
    assert off.to_dict()["draft"] == 4 and drawn.to_dict().keys() == asdict(drawn).keys() - codes
    assert codes <= replace(off, mean_tokens=32, stages="0").to_dict().keys()
    for cell in (off, drawn):
        assert Setting(**cell.to_dict()) == cell


def tried(model: Path, out: Path, axes: Any) -> Any:
    """The result of a grid that may fail, of text alone."""
    line = arguments(model, out, axes, "--needles", 0, "--audit-every", 0)
    return CliRunner().invoke(grid_command, line, standalone_mode=False)


HOLES = {"context": [288, 9999], "method": ["rq", "box"], "budget": 0.5}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (RuntimeError("an illegal memory access"), "RuntimeError: an illegal memory access"),
        ("cache", "does not fit"),
    ],
    ids=str,
)
def test_a_failed_cell_is_named_and_tried_again_and_an_impossible_one_is_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str
) -> None:
    measure, measured, broken = Bench.measure, [], [True]

    def faulty(self: Bench, setting: Any, config: Any) -> dict[str, Any]:
        measured.append(setting.method)
        if setting.method == "box" and broken[0]:
            if fault == "cache":  # the device had no room for it just then
                raise ConfigError("a cache of 1 MiB does not fit cpu") from RuntimeError("out of memory")
            raise fault
        return measure(self, setting, config)

    monkeypatch.setattr(Bench, "measure", faulty)
    out = tmp_path / "g.jsonl"
    done = tried(model, out, HOLES)
    assert isinstance(done.exception, ConfigError) and "1 of 4 cells failed" in str(done.exception)
    assert reason in str(done.exception)
    *reasons, last = done.stdout.splitlines()
    assert json.loads(last) | {"out": ""} == {
        "out": "", "cells": 4, "resumed": 0, "measured": 1, "skipped": 2, "failed": 1
    }  # fmt: skip
    assert len(reasons) == 2 and reasons[0].startswith("2 of the cells skipped: context 9999 is past the model")
    assert reasons[1].startswith("1 of the cells failed: ") and reason in reasons[1]
    broken[0] = False
    done = tried(model, out, HOLES)
    assert done.exception is None and measured == ["rq", "box", "box"]
    again, last = done.stdout.splitlines()
    assert again == reasons[0], "the holes of a grid are told each time"
    assert json.loads(last) | {"out": ""} == {
        "out": "", "cells": 4, "resumed": 3, "measured": 1, "skipped": 2, "failed": 0
    }  # fmt: skip
    assert sorted(line["index"] for line in lines_of(out) if line["type"] == "cell") == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [None, "0", -1, 4, True])
def test_a_cell_of_no_index_is_one_line(model: Path, tmp_path: Path, index: Any) -> None:
    out = tmp_path / "g.jsonl"
    axes = {"context": 9999, "method": ["rq", "box"]}
    assert tried(model, out, axes).exception is None
    lines = lines_of(out)
    lines[1]["index"] = index
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    error = tried(model, out, axes).exception
    assert isinstance(error, ConfigError) and f"index {index!r}" in str(error)


def test_a_grid_reads_nothing_back_from_a_device(model: Path) -> None:
    """/dev/full and /dev/zero give zeros without an end."""
    assert tried(model, Path("/dev/null"), {"context": 9999}).exception is None
    error = tried(model, Path("/dev/full"), {"context": 9999}).exception
    assert isinstance(error, ConfigError) and "/dev/full cannot be written (No space left" in str(error)


def test_cells_of_two_texts_are_not_one_grid() -> None:
    assert "corpus" in IDENTITY and header([], Plan(), None, {})["corpus"] == SHA256


def test_too_many_cells_are_refused_before_they_are_made(tmp_path: Path) -> None:
    axes = {name: list(range(1, 1001)) for name in ("context", "batch", "dim", "last_n", "first_n")}
    path = tmp_path / "g.json"
    path.write_text(json.dumps(axes))
    with pytest.raises(ConfigError, match="more than 100,000 cells"):
        load_grid(path)
