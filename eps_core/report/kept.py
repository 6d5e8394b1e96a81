"""Quality against bytes read and bytes kept: what `scripts/experiments/` measured in memory, kv_formats and linear, by
family.

A family is what was put together: EPS, codes of K and V, a policy that evicts, another format of K and V (by round
trip). Its curve is its Pareto front.
"""

from eps_core.config.formats import EXACT, as_given
from eps_core.io.records import number
from eps_core.report import cells as of
from eps_core.report.cells import Table, field, table_of
from eps_core.report.figures import Curve, Figure, curves
from eps_core.report.kinds import Line

KL_LIMIT = 0.01  # nats
MOST_LOST = 0.02  # of the needles that dense answers
# in the order of the palette
FAMILIES = (
    "EPS", "codes", "policy", "EPS + codes", "EPS + policy", "policy + codes", "EPS + policy + codes", "oracle policy",
    "format", "EPS + format",
    "state",
)  # fmt: skip
AXES = (("bytes_ratio", "bytes read"), ("bytes_kept_ratio", "bytes kept"))


def bits_of(cell: Line) -> str:
    """`16`, `8`, or K's and V's where they differ."""
    found = cell.get("kv_bits")
    return as_given(found if isinstance(found, list) else EXACT)


def family(cell: Line) -> str:
    evicts = cell.get("policy") not in (None, "off")
    if isinstance(cell.get("state"), dict):  # linear attention's, in place of K and V
        return "state"
    if cell.get("policy") == "oracle":
        return "oracle policy"
    parts = [
        name
        for name, there in (
            ("EPS", cell.get("method") not in (None, "off")),
            ("policy", evicts),
            ("codes", bits_of(cell) != "16"),
            ("format", cell.get("rewrite") not in (None, "off")),
        )
        if there
    ]
    return " + ".join(parts) or "dense"


def variant(cell: Line) -> str:
    """Everything that was put together, with its settings."""
    state = cell.get("state")
    if isinstance(state, dict):
        return f"{state.get('features')} {state.get('num_features') or 'D'} gamma {of.form(state.get('gamma'), 'g')}"
    parts = [] if cell.get("policy") in (None, "off") else [f"{cell['policy']} {of.form(cell.get('kept_share'), 'g')}"]
    parts += [] if bits_of(cell) == "16" else [f"{bits_of(cell)} bits"]
    if cell.get("rewrite") not in (None, "off"):
        settings = cell.get("settings") or {}
        parts.append(" ".join([str(cell["rewrite"]), *(f"{name} {value:g}" for name, value in settings.items())]))
    if cell.get("method") not in (None, "off"):
        parts.append(f"{cell['method']} {of.form(cell.get('budget'), 'g')}")
    return " + ".join(parts) or "dense"


def drawn(title: str, cells: list[Line]) -> tuple[str, list[Figure], list[Table]]:
    """(what the first table says, figures, tables) of one context and model."""
    note = (
        f"Of every family, the variants that stay within a KL of {KL_LIMIT} and lose at most {MOST_LOST:.0%} of the "
        "needles that dense answers: the one that reads least, the one that keeps least; then the same of those whose "
        "KL does so with the upper end of its 95 % interval over texts."
    )
    made = []
    for axis, name in AXES:
        caption = (
            f"{title}: mean KL of the next token against dense, in nats (log scale; lower is better), over {name} (K, "
            "V, summaries), as a share of a dense bfloat16 cache's. Every point is a variant; a line joins those of "
            "its family that no cheaper one beats."
        )
        x = f"{name} (K, V, summaries), share of dense"
        made.append(curves(families(cells, axis), x, "KL to dense, nats", caption, log_y=True))
    return note, made, [winners(cells), all_variants(cells)]


def families(cells: list[Line], axis: str) -> list[Curve]:
    """KL against the bytes of an axis, a curve a family."""
    groups = of.grouped(cells, family)
    found = []
    for colour, name in enumerate(FAMILIES):
        if name in groups:
            points = ((number(cell.get(axis)), number(cell.get("kl_mean"))) for cell in groups[name])
            found.append(Curve(name, of.sorted_points(points), name, joined=False, colour=colour))
    return found


def winners(cells: list[Line]) -> Table:
    """Return each family's variant that reads least, and the one that keeps least, at a KL of at most `KL_LIMIT` and at
    most `MOST_LOST` of the needles lost that dense answers: by the mean KL, and by the upper end of its interval."""
    groups = of.grouped(cells, family)
    rows = []
    for name in (one for one in FAMILIES if one in groups):
        group = groups[name]
        row = [name]
        for kl in ("kl_mean", "kl_high"):
            within = [cell for cell in group if _good(cell, kl)]
            row.append(f"{len(within)} of {len(group)}")
            for axis, _ in AXES:
                best = min(within, key=lambda cell: number(cell.get(axis)) or 0.0, default=None)
                row.append("–" if best is None else f"{of.form(best.get(axis), '.3f')}: {variant(best)}")
        rows.append(row)
    by = "variants within", "least read", "least kept"
    return Table(("put together", *by, *(f"{name}, at 95 %" for name in by)), rows)


def all_variants(cells: list[Line]) -> Table:
    return table_of(
        cells,
        (
            ("variant", variant),
            ("bytes read", field("bytes_ratio", ".4f")),
            ("bytes kept", field("bytes_kept_ratio", ".4f")),
            ("KL, nats", field("kl_mean", ".5f")),
            ("95 %", lambda cell: f"{of.form(cell.get('kl_low'), '.5f')} to {of.form(cell.get('kl_high'), '.5f')}"),
            ("KL max", field("kl_max", ".4f")),
            ("needles", of.out_of_needles("needles_answered")),
            ("dense", of.out_of_needles("needles_dense")),
        ),
    )


def _good(cell: Line, by: str) -> bool:
    answered, dense = (number(cell.get(name)) for name in ("needles_answered", "needles_dense"))
    enough = answered is None or dense is None or answered >= (1 - MOST_LOST) * dense
    near = all((kl := number(cell.get(name))) is not None and kl <= KL_LIMIT for name in ("kl_mean", by))
    return near and enough and all(number(cell.get(axis)) is not None for axis, _ in AXES)
