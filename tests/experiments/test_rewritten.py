"""Decoding from a prompt whose K and V were replaced, held against a judge in loops; and what the evaluation counts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import tiny_models

from eps_core.config.bytes import summary_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.evaluation.runner import Document
from eps_core.models.config import DEMO_MODEL
from experiments.kv_formats import rewrites
from experiments.kv_formats.rewrites import OFF, Arm, Plan, run_arms
from experiments.memory import composition as memory

PROMPT = np.random.default_rng(3).integers(0, tiny_models.VOCAB_SIZE, 90).tolist()
FORCED = [5, 9, 200, 31, 7]
GATED = EpsConfig.of(method="rq", budget=0.1)
DMC = Arm("dmc", (("tau", 0.1),))
ARMS = (
    Arm("per-channel", (("bits", 4), ("residual", 32))),
    Arm("block-gtq", (("bits", 3),)),
    Arm("prq", (("stages", 1),)),
    Arm("dar", (("part", 0.5), ("window", 20))),
    DMC,
    Arm(OFF),
)


def test_bytes_are_the_formats_and_tokens_that_follow_count_whole(model: Path) -> None:
    """Densely: all that is kept is read at every step; gated: rows at the format's mean, tables whole."""
    session = Session.open(model, "numpy", kv_dtype="bfloat16")
    spec = session.spec
    token = 2 * 2 * spec.head_dim * spec.num_kv_heads * spec.num_layers
    arms = [*ARMS, *(replace(arm, config=GATED) for arm in ARMS)]
    dense, runs = run_arms(session, Document([*PROMPT], len(FORCED) + 1, [*FORCED]), arms)
    steps, length = len(FORCED) + 1, len(PROMPT) - 1
    assert dense.bytes_read()[1] == sum(token * (length + step + 1) for step in range(steps))
    for index, arm in enumerate(ARMS):
        prompt = sum(one.row_bytes + one.table_bytes for one in runs[index].layers)
        assert runs[index].bytes_read() == sum(prompt + token * (step + 1) for step in range(steps))
        assert runs[index].bytes_read(first=2) == sum(prompt + token * (step + 1) for step in range(2, steps))
        assert runs[index].bytes_kept == prompt + token * steps
        gated = runs[index + len(ARMS)]
        rows = sum(len(head) for one in gated.layers for head in one.positions)
        shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
        of_summaries = summary_bytes(GATED.store, *shape, rows // (shape[0] * shape[1]) + steps)
        assert gated.bytes_kept == prompt + token * steps + of_summaries
        if arm.rewrite == OFF:
            assert gated.bytes_read() == gated.outcome.bytes_read()[0]
            assert runs[index].outcome.kl is not None and abs(runs[index].outcome.kl).max() < 1e-6


def test_a_table_of_one_text_and_one_needle() -> None:
    session = Session.open(DEMO_MODEL, "cuda", "cpu", "float32", "bfloat16")
    arms = (
        Arm("per-channel", (("bits", 4),)),
        Arm("dmc", (("tau", 1.0),)),
        Arm("dar", (("part", 1 / 64), ("window", 0))),
        Arm(OFF),
    )
    plan = Plan(320, 1, 2, 4, seed=1, arms=arms)
    results = [(kind, *rewrites.tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    cells = rewrites.table_cells(plan, session.spec.head_dim, results)
    assert [cell.rewrite for cell in cells] == ["per-channel", "dmc", "dar", OFF]
    fine, plain, coarse, same = cells
    assert same.bytes_ratio == same.needle_bytes_ratio == same.bytes_kept_ratio == 1.0 and same.kl_mean is not None
    # of 320 tokens 256 are codes of K, and 192 of V
    assert 0.28 < fine.bytes_kept_ratio < fine.bytes_ratio + 0.02 < 0.8 and fine.kl_low is not None
    assert plain.kl_max is not None and plain.kl_max < 1e-5 and plain.bytes_ratio is not None
    assert abs(plain.bytes_ratio - 1) < 1e-3 and plain.needles_answered == plain.needles_dense == 1
    assert coarse.kl_mean > 20 * max(fine.kl_mean, 1e-6) and coarse.needles_answered == 0
    lines = [json.loads(json.dumps(one)) for one in rewrites.records(cells)]
    assert lines[0]["settings"] == {"bits": 4} and lines[0]["type"] == "cell" and lines[0]["num_positions"] == 8
    shown = rewrites.markdown(cells)
    assert "| `per-channel` | bits 4 | all | - |" in shown and "1 of 1" in shown and "0 of 1" in shown
    assert set(asdict(cells[0])) - {"rewrite", "settings"} <= {*memory.Cell.__dataclass_fields__}
