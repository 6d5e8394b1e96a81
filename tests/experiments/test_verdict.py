"""The verdict by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import outcome, program
from test_html_report import cell

from eps_core.config.eps import EpsConfig
from experiments.verdict.run import decide

SHIP, KILL, ITERATE, OPEN = "ship", "kill", "iterate", "not decidable"
VERDICTS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "ships": ([cell()], SHIP, "88.0 % fewer bytes, p95 of decode 25.0 % lower on cuda, 0.20 points lost"),
    "too-few-bytes": ([cell(bytes_ratio=0.93)], ITERATE, "saves 7.0 % of the bytes, below 10 %"),
    "too-slow": ([cell(decode_ms_p95=11.9)], ITERATE, "changes p95 by -0.8 %"),
    "quality-lost": ([cell(needles_answered=996)], ITERATE, "loses 0.40 points of quality, above 0.3"),
    "kill-by-bytes": ([cell(bytes_ratio=0.96), cell(method="jl", bytes_ratio=1.1)], KILL, "the best saves 4.0 %"),
    "beyond-64k-is-no-kill": ([cell(bytes_ratio=0.96, context_tokens=131072)], ITERATE, "saves 4.0 %"),
    "kill-by-strict": (
        [cell(), cell(strict=True, context_tokens=4096, needles_answered=999)],
        KILL, "strict mode at epsilon 0.01 or below",
    ),
    "arms-of-other-settings-are-not-merged": (
        [
            cell(),
            *(
                cell(**other, needles_answered=0)
                for other in (
                    {"rescore": 0.125}, {"sink_recent": [16, 128]}, {"scope": "union"}, {"bound_bits": 8},
                    {"setting": {"first_n": 2}}, {"mean_tokens": 32}, {"cascade": [0.25]},
                )
            ),
        ],
        SHIP, "rq 1 bit S=2: 88.0 %",
    ),
    "no-long-context": ([cell(context_tokens=16384)], OPEN, "the longest one measured is 16,384"),
    "no-times": ([cell(decode_ms_p95=None)], OPEN, "no decode times"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name: str) -> None:
    cells, wanted, words = VERDICTS[name]
    verdict = decide(cells)
    assert verdict.outcome == wanted, verdict
    assert words in verdict.reasons[0]
    assert decide(cells[::-1]) == verdict


def task(config: EpsConfig, change: float, dense: float = 0.9, **values: Any) -> dict[str, Any]:
    flat = config.to_dict()
    return {**flat, "config": flat, "type": "task", "context_tokens": 32768, "dense": dense,
            "eps_minus_dense": change, **values}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        EpsConfig.of(method="rq", budget=0.05),
        EpsConfig.of(method="rq"),
        EpsConfig.of(method="rq", policy="threshold", top_pages=64),
        EpsConfig.of(method="box", group_size=16, num_sink_tokens=4),
    ],
)
def test_what_tasks_lose_counts_as_quality(config: EpsConfig) -> None:
    variant = cell(config=config.to_dict())
    assert decide([variant], [task(config, -0.01), task(config, 0.006, dense=0.8)]).outcome == SHIP
    lost = decide([variant], [task(config, -0.01), task(config, 0.002)])
    assert lost.outcome == ITERATE and "loses 0.40 points" in lost.reasons[0]
    # of other settings, of another context or model, or failed by dense itself
    for other in (
        config.replace(budget=0.1),
        config.replace(num_recent_tokens=1024),
    ):
        assert other == config or decide([variant], [task(other, -0.5)]).outcome == SHIP
    for values in ({"context_tokens": 16384}, {"model": "another"}):
        assert decide([variant], [task(config, -0.5, **values)]).outcome == SHIP
    assert decide([variant], [task(config, -0.09, dense=0.09)]).outcome == SHIP
    assert decide([{**variant, "num_needles": 0}], [task(config, 0.0)]).outcome == SHIP
    assert decide([cell()], [{**task(config, -0.5), "config": None}]).outcome == SHIP


def test_a_strict_task_that_loses_kills() -> None:
    strict = EpsConfig.of(method="rq", bound_bits=8, strict=True)
    assert decide([cell()], [task(strict, 0.0)]).outcome == SHIP
    killed = decide([cell()], [task(strict, -0.02)])
    assert killed.outcome == KILL and "loses 2.00 points" in killed.reasons[0]
    loose = decide([cell()], [task(strict.replace(epsilon=0.1), -0.02)])
    assert loose.outcome == SHIP and "loses 2.00 points" in loose.caveats[0]


def test_the_command_prints_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "grid.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ({"type": "run"}, cell())))
    done = outcome(["grid.jsonl"], tmp_path, main=program("verdict"))
    assert done.code in (None, 0) and json.loads(done.out)["outcome"] == SHIP
