"""Bytes read against bytes kept: families, winners and fronts of cells made by hand."""

import json
from pathlib import Path
from typing import Any

from eps_core.report import kept
from eps_core.report.load import load_results
from eps_core.report.page import page


def cell(**values: Any) -> dict[str, Any]:
    return {
        "type": "cell", "context_tokens": 4096, "policy": "off", "kept_share": 1.0, "kv_bits": [16, 16],
        "method": "off", "budget": None, "bytes_ratio": 1.0, "bytes_kept_ratio": 1.0, "kl_mean": 0.005,
        "kl_low": 0.004, "kl_high": 0.006, "needles_answered": 10, "num_needles": 12, "needles_dense": 10, **values,
    }  # fmt: skip


def test_families_and_arms_are_named_by_what_was_put_together() -> None:
    named = {
        "EPS": (cell(method="rq", budget=0.05), "rq 0.05"),
        "codes": (cell(kv_bits=[8, 4]), "8,4 bits"),
        "policy": (cell(policy="snapkv", kept_share=0.5), "snapkv 0.5"),
        "EPS + codes": (cell(method="rq", budget=0.1, kv_bits=[4, 4]), "4 bits + rq 0.1"),
        "EPS + policy": (cell(method="rq", budget=0.1, policy="h2o", kept_share=0.25), "h2o 0.25 + rq 0.1"),
        "policy + codes": (cell(policy="tova", kept_share=0.5, kv_bits=[8, 8]), "tova 0.5 + 8 bits"),
        "EPS + policy + codes": (
            cell(method="rq", budget=0.02, policy="rkv", kept_share=0.5, kv_bits=[8, 8]), "rkv 0.5 + 8 bits + rq 0.02",
        ),
        "oracle policy": (cell(policy="oracle", kept_share=0.06), "oracle 0.06"),
        "format": (cell(rewrite="prq", settings={"stages": 1, "zeros": True}), "prq stages 1 zeros 1"),
        "EPS + format": (cell(rewrite="dmc", settings={"tau": 0.9}, method="rq", budget=0.1), "dmc tau 0.9 + rq 0.1"),
        "state": (cell(state={"features": "favor", "num_features": 64, "gamma": 0.5}), "favor 64 gamma 0.5"),
    }  # fmt: skip
    assert tuple(named) == tuple(sorted(named, key=kept.FAMILIES.index)) and set(named) == set(kept.FAMILIES)
    for name, (one, variant) in named.items():
        assert (kept.family(one), kept.variant(one)) == (name, variant)


def test_winners_stay_within_the_limit_and_lose_no_needle() -> None:
    cells = [
        cell(method="rq", budget=0.01, bytes_ratio=0.03, bytes_kept_ratio=1.04, kl_mean=0.02, kl_high=0.03),  # too far
        cell(method="rq", budget=0.02, bytes_ratio=0.04, bytes_kept_ratio=1.04, needles_answered=9),  # loses a needle
        cell(method="rq", budget=0.05, bytes_ratio=0.07, bytes_kept_ratio=1.04, kl_high=0.011),  # by its mean alone
        cell(method="rq", budget=0.1, bytes_ratio=0.12, bytes_kept_ratio=1.03, kl_mean=0.01, kl_high=0.01),  # the limit
        cell(policy="snapkv", kept_share=0.5, bytes_ratio=0.5, bytes_kept_ratio=0.5, kl_mean=None),
    ]
    rows = {row[0]: row[1:] for row in kept.winners(cells).rows}
    assert rows == {
        "EPS": ["2 of 4", "0.070: rq 0.05", "1.030: rq 0.1", "1 of 4", "0.120: rq 0.1", "1.030: rq 0.1"],
        "policy": ["0 of 1", "–", "–", "0 of 1", "–", "–"],
    }


def test_the_page_draws_both_axes(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    lines = [cell(method="rq", budget=0.05, bytes_ratio=0.07, bytes_kept_ratio=1.04), cell(kv_bits=["nvfp4", "fp8"])]
    lines += [cell(rewrite="dar", settings={"part": 0.5}), cell(rewrite="dar", settings={"part": "half"})]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = load_results([file])
    assert len(results.kept) == 4 and not results.cells
    assert [note.split(": ", 1)[1] for note in results.notes] == ["settings part 'half' is not a number, left out"]
    html = page(results)
    section = html[html.index('id="kept"') :]
    section = section[: section.index("</section>")]
    assert (
        section.count("<svg") == 2
        and "nvfp4,fp8 bits" in section
        and "dar part 0.5" in section
        and "rq 0.05" in section
    )
