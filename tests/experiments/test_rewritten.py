"""A table of formats that replace the K and V of a prompt, measured on one text and one needle."""

import json
from dataclasses import asdict

from eps_core.decode.session import Session
from eps_core.models.config import DEMO_MODEL
from experiments.kv_formats import run as rewrites
from experiments.kv_formats.run import OFF, Plan, Variant
from experiments.memory import run as memory


def test_a_table_of_one_text_and_one_needle() -> None:
    session = Session.open(DEMO_MODEL, "cuda", "cpu", "float32", "bfloat16")
    variants = (
        Variant("per-channel", (("bits", 4),)),
        Variant("dmc", (("tau", 1.0),)),
        Variant("dar", (("part", 1 / 64), ("window", 0))),
        Variant(OFF),
    )
    plan = Plan(320, 1, 2, 4, seed=1, variants=variants)
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
    line = json.loads(json.dumps(asdict(fine)))
    assert line["settings"] == {"bits": 4} and line["num_positions"] == 8
    shown = rewrites.markdown(cells)
    assert "| `per-channel` | bits 4 | all | - |" in shown and "1 of 1" in shown and "0 of 1" in shown
    assert set(asdict(cells[0])) - {"rewrite", "settings"} <= {*memory.Cell.__dataclass_fields__}
