"""Quality against bytes: the arithmetic of budgets, crossings and floors, and a table measured on the demo model."""

import numpy as np
import pytest

from eps_core.config.bytes import scoring_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from experiments.methods.curves import Plan, budget_groups, bytes_at_kl, table_cells, tally_document

RQ, BOX = EpsConfig.of(method="rq"), EpsConfig.of(method="box", group_size=16)


@pytest.mark.parametrize(
    ("curve", "found"),
    [
        ([], (None, "-")),
        ([(None, 0.02), (0.1, None)], (None, "-")),
        ([(0.1, 0.04), (0.2, 0.02)], (0.2, ">")),
        ([(0.2, 0.002), (0.1, 0.01)], (0.1, "<")),
        ([(0.2, 0.005), (0.1, 0.02)], (0.1 * 2**0.5, "measured")),
        ([(0.1, 0.02), (0.2, 0.005), (0.3, 0.03), (0.4, 0.001)], (0.1 * 2**0.5, "measured")),  # the first crossing
        ([(0.1, 0.02), (0.2, 0.0)], (None, "measured")),  # within, though its logarithm is not there
    ],
)
def test_where_a_curve_crosses_a_kl(
    curve: list[tuple[float | None, float | None]], found: tuple[float | None, str]
) -> None:
    ratio, how = bytes_at_kl(curve)
    assert how == found[1]
    if found[0] is not None:
        assert ratio == pytest.approx(found[0])
    elif how == "measured":
        assert ratio is not None and 0.1 < ratio < 0.2


@pytest.mark.parametrize("variant", [RQ, BOX, EpsConfig.of(method="oracle", group_size=16)])
def test_a_byte_budget_buys_what_it_pays_for(variant: EpsConfig) -> None:
    length, head_dim, fraction = 4096, 64, 0.2
    groups = budget_groups(variant, length, 16, head_dim, fraction)
    assert groups is not None
    dense, group = length * 2 * head_dim * 2, variant.cache_config.S * 2 * head_dim * 2

    def cost(selected: int) -> int:
        return scoring_bytes(variant.replace(top_pages=selected), head_dim, [length]) + selected * group

    assert cost(groups) <= fraction * dense < cost(groups + 1)
    # no more than the sink and recent tokens, or not even the summaries: nothing would be measured of the method
    assert budget_groups(variant, length, 16, head_dim, 0.02 if variant.cache_config.method == "rq" else 0.03) is None


def test_a_table_of_the_demo_model() -> None:
    """The oracle with most of the groups is close to dense; a small share of them picked at random is not."""
    variants = (EpsConfig.of(method="oracle", group_size=16), EpsConfig.of(method="random", group_size=16))
    plan = Plan(1024, num_needles=1, num_texts=1, text_steps=4, variants=variants, byte_budgets=(0.25, 0.9))
    session = Session.open(backend="numpy", kv_dtype="bfloat16")
    results = [(kind, *tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    cells = {(cell.method, cell.byte_budget): cell for cell in table_cells(plan, session.spec.head_dim, results)}
    oracle, random = cells["oracle", 0.9], cells["random", 0.25]
    assert oracle.needles_answered == oracle.needles_dense == 1
    assert oracle.kl_mean is not None and random.kl_mean is not None
    assert oracle.kl_mean < 0.1 * random.kl_mean
    for (_, budget), cell in cells.items():
        assert cell.bytes_ratio is not None and budget is not None and cell.bytes_ratio <= budget
        assert cell.num_positions == 4 and np.isfinite(cell.kl_mean)
