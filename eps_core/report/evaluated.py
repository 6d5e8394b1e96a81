"""Drawings of what `eps-proto evaluate -o` found: scores of tasks, and KL along text."""

from typing import Any

from eps_core.io.records import number
from eps_core.report import cells as of
from eps_core.report.cells import Table, field, form, table_of
from eps_core.report.figures import MAX_CURVES, Curve, Figure, curves, scatter
from eps_core.report.kinds import Line


def tasks(lines: list[Line]) -> tuple[list[Figure], list[Table]]:
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if (dense := number(line.get("dense"))) is not None and (eps := number(line.get("eps"))) is not None:
            points.setdefault(of.variant(line), []).append((eps, dense))
    plot = scatter(
        points,
        "mean score, dense",
        "mean score, EPS",
        "Each point is one task at one context (eps-proto evaluate). On the diagonal nothing is lost; a task that "
        "dense fails says nothing.",
        "nothing lost",
    )
    table = table_of(
        lines,
        (
            ("variant", of.variant),
            ("policy", of.policy),
            ("task", lambda line: str(line.get("task") or "not named")),
            ("context, tokens", lambda line: f"{of.context(line):,}" if of.context(line) else "own"),
            ("samples", field("num_samples", ",.0f")),
            ("dense", field("dense", ".3f")),
            ("EPS", field("eps", ".3f")),
            ("oracle", field("oracle", ".3f")),
            ("EPS - dense", field("eps_minus_dense", "+.3f")),
            ("95 %", lambda line: _interval(line.get("eps_minus_dense_interval"), "+.3f")),
            ("changed", field("num_changed", ".0f")),
            ("bytes / dense", field("bytes_ratio", ".4f")),
        ),
    )
    return [plot], [table]


def texts(lines: list[Line]) -> tuple[list[Figure], list[Table]]:
    by_variant = of.grouped(lines, lambda line: (f"{of.variant(line)} at {of.context(line):,}", of.method(line)))

    def points(group: list[Line]) -> list[tuple[float, float]]:
        return of.sorted_points((number(line.get("bytes_ratio")), number(line.get("eps_kl"))) for line in group)

    plot = curves(
        [Curve(name, points(group), method) for (name, method), group in by_variant.items()][:MAX_CURVES],
        "bytes read (K, V, summaries), share of dense",
        "KL to dense, nats",
        "Mean KL of the next token against dense along real text, in nats (log scale; lower is better), over the bytes "
        "that one decode step reads (eps-proto evaluate).",
        log_y=True,
    )
    table = table_of(
        lines,
        (
            ("variant", of.variant),
            ("policy", of.policy),
            ("context, tokens", lambda line: f"{of.context(line):,}"),
            ("texts", field("num_documents", ",.0f")),
            ("steps of each", field("text_steps", ",.0f")),
            ("KL mean, nats", field("eps_kl", ".5f")),
            ("95 %", lambda line: _interval(line.get("eps_kl_interval"), ".5f")),
            ("KL max, nats", field("eps_kl_max", ".5f")),
            ("top-1 agreement, %", field("eps_top1_agreement", ".1f", 100)),
            ("oracle KL, nats", field("oracle_kl", ".5f")),
            ("bytes / dense", field("bytes_ratio", ".4f")),
        ),
    )
    return [plot], [table]


def _interval(value: Any, spec: str) -> str:
    return " to ".join(form(end, spec) for end in value) if isinstance(value, list) and len(value) == 2 else "–"
