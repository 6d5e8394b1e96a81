"""A grid of settings: its cells, the numbers of a cell, and cells that cannot run."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command import last, lines_of, outcome, program

from eps_core.errors import ConfigError
from experiments.grid.grid_settings import Setting, config_of, expand, load_grid

# torch and MLX need seconds to import: the oracle's own loop is enough to test a file
SMALL = ["--backend", "numpy", "--device", "cpu", "--needles", 1, "--texts", 1, "--text-steps", 4, "--audit-every", 2]
AXES = {"context": [288, 320], "method": ["rq", "ball", "jl"], "budget": [0.5, 0.9], "group_size": 16}


def run(model: Path, out: Path, axes: Any, *more: object) -> dict[str, Any]:
    """The last stdout line's object of a grid that must succeed."""
    grid = out.with_suffix(".grid.json")
    grid.write_text(json.dumps(axes))
    line = ["--model", model, "--grid", grid, "-o", out, *SMALL, *more]
    return last(outcome([str(one) for one in line], out.parent, main=program("grid")))


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(path) if line["type"] == "cell"]


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of AXES, all cells."""
    out = tmp_path_factory.mktemp("finished") / "r.jsonl"
    result = run(model, out, AXES)
    assert result == {"out": str(out), "cells": 12, "resumed": 0, "measured": 12, "skipped": 0, "failed": 0}
    return out


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


def test_settings_become_the_config_they_name() -> None:
    setting = Setting(8192, 1, "jl", "threshold", dim=4, alpha=1.05, last_n=4, group_blocks=8, budget=0.25)
    config = config_of(setting, None)
    assert (
        config.cache_config.S,
        config.cache_config.dim,
        config.selection_config.alpha,
        config.selection_config.num_recent_tokens,
    ) == (128, 4, 1.05, 512)
    assert config.selection_config.top_pages == 16  # a quarter of 8,192 tokens in groups of 128
    modes = (("sparse", "dense"), ("window", "sparse"))
    assert config_of(replace(setting, heads="retrieval"), modes).selection_config.head_modes == modes
    assert config_of(setting, modes).selection_config.head_modes is None
    assert config_of(Setting(method="rq", strict=True), None).cache_config.bound_bits == 8


def test_what_a_cell_measures(finished: Path) -> None:
    first, *rest = lines_of(finished)
    assert first["type"] == "run" and first["grid"] == [asdict(cell) for cell in expand(AXES, "g")]
    assert first["plan"]["text_steps"] == 4 and "numpy" in first["versions"]
    assert [cell["index"] for cell in sorted(rest, key=lambda cell: cell["index"])] == list(range(12))
    for cell in rest:
        assert cell["skipped"] is None
        # all bytes are in the ratio, and what is read is what is visited
        assert cell["bytes_ratio"] == pytest.approx(cell["kv_ratio"] + cell["summary_ratio"])
        assert 0 < cell["always_selected_ratio"] <= cell["selected_ratio"] <= 1
        assert cell["kv_ratio"] == pytest.approx(cell["selected_ratio"], abs=0.05)
        assert len(cell["selected_ratio_by_layer_and_head"]) == 2
        assert cell["num_positions"] == 4 and cell["kl_mean"] >= 0 and cell["num_needles"] == 1
        assert cell["needles_answered"] == cell["needles_dense"] - cell["needles_lost"] + cell["needles_gained"]
        for clock in ("decode_ms_p50", "decode_ms_p95", "dense_decode_ms_p50", "dense_decode_ms_p95", "prepass_ms_p50"):
            assert cell[clock] > 0
        assert cell["timed_steps"] == 1  # of 4 neither the two warm-up steps nor the two audits
        assert 0 <= cell["skipped_mass_true_max"] <= 1 and cell["skipped_mass_mean"] is not None
        bounded = cell["method"] == "ball"
        assert (cell["skipped_mass_bound_max"] is not None) == bounded and bool(cell["mass_pairs"]) == bounded
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
        assert cell["selected_ratio"] == 1 and cell["kl_mean"] < 1e-9 and cell["top1_agreement"] == 1
        assert cell["needles_lost"] == cell["needles_gained"] == 0
        assert cell["num_positions"] == 4 * cell["batch"]


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
