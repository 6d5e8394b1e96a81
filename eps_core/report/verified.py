"""Verified decoding on the page: what exact text costs, and how many drafts were dense decoding's tokens."""

from typing import Any

from eps_core.io.records import number
from eps_core.report import cells as of
from eps_core.report.cells import Table, field, table_of
from eps_core.report.figures import MAX_CURVES, Curve, Figure, curves
from eps_core.report.kinds import Line


def apart(cells: list[Line]) -> tuple[list[Line], list[Line]]:
    """(those of verified decoding, the others)."""

    def is_mine(cell: Line) -> bool:
        return isinstance(cell.get("verified"), dict)

    return [cell for cell in cells if is_mine(cell)], [cell for cell in cells if not is_mine(cell)]


def _asked(cell: Line, name: str) -> Any:
    return (cell.get("verified") or {}).get(name)


def _drafts(cell: Line) -> str:
    draft = number(_asked(cell, "draft"))
    return "auto" if draft is None else f"{draft:.0f}"


def _temperature(cell: Line) -> float:
    return number(of.asked(cell, "temperature")) or 0.0


def _settings(cell: Line) -> str:
    """Return the settings other than the default, in words; rows of earlier versions also name a selection and a
    rule."""
    known = (("select", "step", "chosen by {}"), ("weights", "full", "{} weights"), ("rule", "couple", "{}"))
    words = [form.format(_asked(cell, name)) for name, usual, form in known if _asked(cell, name) not in (None, usual)]
    return ", ".join(words) or "–"


def _equal(cell: Line) -> str:
    same, total = number(cell.get("documents_equal")), number(cell.get("documents"))
    return "–" if same is None or not total else f"{same:.0f} of {total:.0f}"


def _interval(name: str, spec: str) -> Any:
    def text(cell: Line) -> str:
        shown, interval = of.form(cell.get(name), spec), cell.get(f"{name}_interval")
        pair = [number(end) for end in interval] if isinstance(interval, list) and len(interval) == 2 else []
        if None in pair or not pair:
            return shown
        return f"{shown} [{pair[0]:{spec}}, {pair[1]:{spec}}]"

    return text


def drawn(cells: list[Line]) -> tuple[str, str, list[Figure], list[Table]]:
    """(what is missing, note, figures, tables) of the section."""
    if not cells:
        return 'no verified cell (scripts/experiments/grid/run.py with "verify": "tokens")', "", [], []
    return "", "", _figures(cells), [_table(cells)]


def _figures(cells: list[Line]) -> list[Figure]:
    """Bytes a token over drafts a round, and acceptance by depth."""

    def name(cell: Line) -> str:
        budget = number(of.asked(cell, "budget"))
        more = "" if budget is None else f" budget {budget:g}"
        extra = "" if _settings(cell) == "–" else f", {_settings(cell)}"
        return f"{of.variant(cell)}{more}, {of.context(cell):,} tokens, T {_temperature(cell):g}{extra}"

    groups = list(of.grouped([cell for cell in cells if number(_asked(cell, "draft"))], name).items())[:MAX_CURVES]
    by_drafts = [
        Curve(
            label,
            of.sorted_points((number(_asked(cell, "draft")), number(cell.get("bytes_ratio"))) for cell in group),
            of.method(group[0]),
        )
        for label, group in groups
    ]
    by_depth = []
    for label, group in groups:
        deepest = max(group, key=lambda cell: number(_asked(cell, "draft")) or 0)
        rates = deepest.get("acceptance_by_depth")
        points = [(depth, number(rate)) for depth, rate in enumerate(rates, 1)] if isinstance(rates, list) else []
        by_depth.append(Curve(label, of.sorted_points(points), of.method(deepest)))
    return [
        curves(
            by_drafts, "drafts a round", "bytes a token, share of dense",
            "What exact text costs: bytes of K, V and summaries for each token that was said, drafts and verify passes "
            "together, as a share of what dense decoding reads.",
        ),
        curves(
            by_depth, "depth of a draft", "accepted, of those whose predecessors were",
            "Share of the drafts that were dense decoding's own tokens, by their place in the round.",
            y_range=(0, 1.03),
        ),
    ]  # fmt: skip


def _table(cells: list[Line]) -> Table:
    return table_of(
        sorted(cells, key=lambda cell: (of.variant(cell), of.context(cell), _temperature(cell), _drafts(cell))),
        (
            ("variant", of.variant), ("policy", of.policy), ("context", lambda cell: f"{of.context(cell):,}"),
            ("temperature", lambda cell: f"{_temperature(cell):g}"), ("drafts", _drafts), ("otherwise", _settings),
            ("accepted (95 %)", _interval("acceptance", ".3f")), ("tokens a round", field("tokens_per_round", ".2f")),
            ("bytes a token / dense (95 %)", _interval("bytes_ratio", ".3f")),
            ("a draft's bytes / dense", field("draft_ratio", ".3f")), ("KL of a draft", field("draft_kl_mean", ".5f")),
            ("texts equal to dense", _equal), ("needles", of.out_of_needles("needles_answered")),
            ("ms a token, p50", field("decode_ms_p50", ".2f")),
            ("dense ms, p50", field("dense_decode_ms_p50", ".2f")),
        ),
    )  # fmt: skip
