"""The verdict by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import outcome, program

from eps_core.config.eps import EpsConfig
from experiments.verdict.verdict import decide


def cell(**values: Any) -> dict[str, Any]:
    """A cell that ships."""
    return {
        "type": "cell", "context_tokens": 32768, "method": "rq", "group_tokens": 2, "bits": 1, "dim": None,
        "policy": "topk", "batch": 1, "bytes_ratio": 0.12, "kl_mean": 0.002, "top1_agreement": 0.99,
        "num_needles": 1000, "needles_answered": 998, "needles_dense": 1000, "visit_ratio": 0.1, "forced_ratio": 0.02,
        "decode_ms_p50": 8.0, "decode_ms_p95": 9.0, "dense_decode_ms_p50": 10.0, "dense_decode_ms_p95": 12.0,
        "device": "cuda", "strict": False, **values,
    }  # fmt: skip


SHIP, KILL, ITERATE, OPEN = "ship", "kill", "iterate", "not decidable"
VERDICTS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "ships": ([cell()], SHIP, "88.0 % fewer bytes, p95 of decode 25.0 % lower on cuda, 0.20 points lost"),
    "ships-at-the-limits": (
        [cell(bytes_ratio=0.9, dense_decode_ms_p95=100.0, decode_ms_p95=93.0, needles_answered=997)],
        SHIP, "0.30 points",
    ),
    "ships-in-strict": ([cell(strict=True, needles_answered=1000)], SHIP, "strict"),
    "one-arm-of-two-ships": ([cell(method="jl", bytes_ratio=0.99), cell()], SHIP, "rq 1 bit S=2"),
    "short-contexts-do-not-count": ([cell(), cell(context_tokens=8192, needles_answered=0)], SHIP, "rq"),
    "one-long-context-is-slow": (
        [cell(), cell(context_tokens=131072, decode_ms_p95=13.0)], ITERATE, "changes p95 by +8.3",
    ),
    "too-few-bytes": ([cell(bytes_ratio=0.93)], ITERATE, "saves 7.0 % of the bytes, below 10 %"),
    "too-slow": ([cell(decode_ms_p95=11.9)], ITERATE, "changes p95 by -0.8 %"),
    "quality-lost": ([cell(needles_answered=996)], ITERATE, "loses 0.40 points of quality, above 0.3"),
    "quality-lost-needs-no-times": ([cell(needles_answered=990, device="cpu")], ITERATE, "loses 1.00 points"),
    "kill-by-bytes": ([cell(bytes_ratio=0.96), cell(method="jl", bytes_ratio=1.1)], KILL, "the best saves 4.0 %"),
    "kill-by-bytes-needs-no-times": ([cell(bytes_ratio=0.96, device="cpu")], KILL, "saves 5 % of the bytes"),
    "beyond-64k-is-no-kill": ([cell(bytes_ratio=0.96, context_tokens=131072)], ITERATE, "saves 4.0 %"),
    "kill-by-strict": (
        [cell(), cell(strict=True, context_tokens=4096, needles_answered=999)],
        KILL, "strict mode at epsilon 0.01 or below",
    ),
    "a-looser-strict-is-any-arm": (
        [cell(strict=True, setting={"epsilon": 0.1})], SHIP, "rq 1 bit S=2 strict: 88.0 %",
    ),
    "a-tighter-strict-kills": ([cell(strict=True, epsilon=0.001)], KILL, "epsilon 0.001 at 32,768 tokens loses 0.20"),
    "arms-of-other-settings-are-not-merged": (
        [
            cell(),
            *(
                cell(**other, needles_answered=0)
                for other in (
                    {"refine": 0.125}, {"tail_tokens": 64}, {"guards": [16, 128]}, {"scope": "union"},
                    {"bound_bits": 8}, {"setting": {"first_n": 2}}, {"mean_tokens": 32},
                    {"stages": [0.25]},
                )
            ),
        ],
        SHIP, "rq 1 bit S=2: 88.0 %",
    ),
    "no-long-context": ([cell(context_tokens=16384)], OPEN, "the longest one measured is 16,384"),
    "ships-on-a-cpu": ([cell(device="cpu")], SHIP, "p95 of decode 25.0 % lower on cpu"),
    "too-slow-on-a-cpu": ([cell(device="cpu", decode_ms_p95=11.9)], ITERATE, "changes p95 by -0.8 %"),
    "one-device-of-two-is-slow": ([cell(device="cpu", decode_ms_p95=11.9), cell()], SHIP, "on cuda"),
    "no-times": ([cell(decode_ms_p95=None)], OPEN, "no decode times"),
    "times-of-nobody-knows-what": ([cell(device=None)], OPEN, "no decode times"),
    "no-questions": ([cell(num_needles=0)], OPEN, "no questions"),
    "oracles-do-not-count": ([cell(method="oracle")], OPEN, "no measured cell"),
    "nothing": ([], OPEN, "no measured cell"),
    "only-nulls": (
        [cell(bytes_ratio=None), cell(bytes_ratio=float("nan")), {"type": "cell"}], OPEN, "no measured cell",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name: str) -> None:
    cells, wanted, words = VERDICTS[name]
    verdict = decide(cells)
    assert verdict.outcome == wanted, verdict
    assert words in verdict.reasons[0]
    assert decide(cells[::-1]) == verdict


def test_a_ship_says_what_weakens_it() -> None:
    few = decide([cell(bytes_ratio=0.85, num_needles=20, needles_answered=20, needles_dense=20)])
    assert few.outcome == SHIP and len(few.caveats) == 2
    assert "20 questions cannot resolve 0.3 points (one is 5.00)" in few.caveats[1]
    assert decide([cell()]).caveats == ()
    (caveat,) = decide([cell(device="cpu")]).caveats
    assert "times are of a CPU" in caveat
    loose = decide([cell(), cell(strict=True, epsilon=0.1, context_tokens=4096)])
    assert loose.outcome == SHIP and len(loose.caveats) == 1
    assert "epsilon above 0.01" in loose.caveats[0] and "epsilon 0.1 at 4,096 tokens loses 0.20" in loose.caveats[0]


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
        EpsConfig.of(method="box", group_tokens=16, first_tokens=4),
    ],
)
def test_what_tasks_lose_counts_as_quality(config: EpsConfig) -> None:
    arm = cell(config=config.to_dict())
    assert decide([arm], [task(config, -0.01), task(config, 0.006, dense=0.8)]).outcome == SHIP
    lost = decide([arm], [task(config, -0.01), task(config, 0.002)])
    assert lost.outcome == ITERATE and "loses 0.40 points" in lost.reasons[0]
    # of other settings, of another context or model, or failed by dense itself
    for other in (config.replace(budget=0.1), config.replace(tail_tokens=0), config.replace(last_tokens=1024)):
        assert other == config or decide([arm], [task(other, -0.5)]).outcome == SHIP
    for values in ({"context_tokens": 16384}, {"model": "another"}):
        assert decide([arm], [task(config, -0.5, **values)]).outcome == SHIP
    assert decide([arm], [task(config, -0.09, dense=0.09)]).outcome == SHIP
    assert decide([{**arm, "num_needles": 0}], [task(config, 0.0)]).outcome == SHIP
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
