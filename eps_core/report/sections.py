"""The contents of the page, section by section, as plain data: texts, tables and figures, no HTML."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from eps_core.config.cache import coded_methods
from eps_core.io.records import number
from eps_core.report import cells as of
from eps_core.report import evaluated
from eps_core.report.cells import Table, field, form, loss_points, p95_saved_percent, table_of
from eps_core.report.figures import MAX_CURVES, Curve, Figure, curves, heat_map, scatter
from eps_core.report.kinds import Line
from eps_core.report.load import Results
from eps_core.summaries.table import names

MAX_MAPS = 6


@dataclass(frozen=True)
class Part:
    """Shown in this order. `nothing` says which data are missing."""

    title: str = ""
    nothing: str = ""
    note: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    parts: Sequence[Part]


def sections_of(results: Results) -> list[Section]:
    """Return all sections, whatever the results lack."""
    cells = [
        cell
        for cell in results.cells
        # verified text is the dense one: it has no place among texts that may differ
        if number(cell.get("bytes_ratio")) is not None
        and not isinstance(cell.get("verified"), dict)
        and "bytes_kept_ratio" not in cell  # of variants that differ in more than what they read
    ]
    return [
        Section("quality", "Quality against bytes", _quality(cells)),
        Section("tasks", "Tasks and text", _evaluated(results)),
        Section("visited", "Visited ratio against context", [_visited(cells, results.runs)]),
        Section("time", "Decode time", [_time(cells)]),
        Section("certificate", "Error bound against truth", [_certificate(cells, results.runs)]),
        Section("heads", "Visited ratio by layer and kv head", [_heads(cells, results.runs)]),
        Section("runs", "Single runs", [_runs(results.runs)]),
        Section("skipped", "Cells without numbers", [_skipped(results.cells, results.failed)]),
        Section("inputs", "Inputs", [_inputs(results)]),
    ]


def _evaluated(results: Results) -> list[Part]:
    parts = [
        Part(title, "", "", *drawn(lines))
        for title, lines, drawn in (("Tasks", results.tasks, evaluated.tasks), ("Text", results.texts, evaluated.texts))
        if lines
    ]
    return parts or [Part(nothing="no task and no text (eps-proto evaluate -o)")]


def _quality(cells: list[Line]) -> list[Part]:
    parts = []
    for title, group in of.titled(cells):
        # more documents at a time change the time and not the quality
        group = [cell for cell in group if of.batch(cell) == min(map(of.batch, group))]
        divergence = curves(
            _quality_curves(group, lambda cell: number(cell.get("kl_mean"))),
            "bytes read (K, V, summaries), share of dense",
            "KL to dense, nats",
            f"{title}: mean KL of the next token against dense, in nats (log scale; lower is better), over the bytes "
            "that one decode step reads, as a share of dense. Along one line only the budget changes; where a method "
            "has many variants, its line joins the best of their cells.",
            log_y=True,
        )
        needles = curves(
            _quality_curves(group, of.accuracy),
            "bytes read (K, V, summaries), share of dense",
            "needles answered, %",
            f"{title}: needle questions answered, in percent of all (higher is better). Dense attention: "
            f"{_dense_accuracy(group)}.",
            y_range=(-3, 103),
        )
        table = table_of(
            sorted(group, key=lambda cell: (of.curve_name(cell), cell["bytes_ratio"])),
            (
                ("variant", of.variant), ("policy", of.policy), ("bytes / dense", field("bytes_ratio", ".4f")),
                ("KL mean, nats", field("kl_mean", ".5f")), ("top-1 agreement, %", field("top1_agreement", ".1f", 100)),
                ("needles", of.out_of_needles("needles_answered")),
                ("needles, dense", of.out_of_needles("needles_dense")),
            ),
        )  # fmt: skip
        parts.append(Part(title, figures=[divergence, needles], tables=[table]))
    return parts or [Part(nothing="no measured cell (scripts/experiments/methods/run.py or an experiment)")]


def _quality_curves(cells: list[Line], value: Callable[[Line], float | None]) -> list[Curve]:
    """One curve for each variant, budgets along it; where there are too many variants, each method's best front."""

    def points(group: list[Line]) -> list[tuple[float, float]]:
        return of.sorted_points((cell["bytes_ratio"], value(cell)) for cell in group)

    by_variant = of.grouped(cells, of.curve_name)
    if len(by_variant) <= MAX_CURVES:
        return [Curve(name, points(group), of.method(group[0])) for name, group in by_variant.items()]
    by_method = of.grouped(cells, of.method)
    return [Curve(f"{name} ({len(group)} cells)", points(group), name, False) for name, group in by_method.items()]


def _dense_accuracy(cells: list[Line]) -> str:
    shares = {
        100 * known / total
        for cell in cells
        if (known := number(cell.get("needles_dense"))) is not None and (total := number(cell.get("num_needles")))
    }
    losses = [loss for cell in cells if (loss := loss_points(cell)) is not None]
    if not shares:
        return "not asked"
    words = " or ".join(f"{share:.0f} %" for share in sorted(shares))
    return f"{words}; the worst cell loses {max(losses):.0f} points" if losses else words


def _visited(cells: list[Line], runs: list[Line]) -> Part:
    found = [
        (of.method(cell), cell.get("context_tokens"), cell.get("selected_ratio"), cell.get("always_selected_ratio"))
        for cell in cells
    ]
    for run in runs:
        summary = run["summary"]
        # of a batch `prompt_tokens` is all prompts together
        context = max((run["steps"] or [{}])[0].get("lengths") or (), default=summary.get("prompt_tokens"))
        found.append((of.run_setting(run, "method"), context, summary.get("selected_ratio"), None))
    points = [
        (method, of.whole(context), ratio, number(always_selected))
        for method, context, given, always_selected in found
        if (ratio := number(given)) is not None and context and method != "?"
    ]
    if not points:
        return Part(nothing="no cell or run with a selected ratio (an experiment's grid, eps-proto run --metrics)")
    groups = of.grouped(points, lambda point: point[:2])
    means = {(method, context): float(np.mean([p[2] for p in group])) for (method, context), group in groups.items()}
    plot = curves(
        [Curve(method, of_context, method) for method, of_context in _by_first(means).items()],
        "context, tokens (log scale)",
        "groups selected, share of all",
        "Groups that one decode step selects, as a share of all groups, mean over the cells of a method at that "
        "context (all budgets and batches together). What is always selected bounds it from below: "
        "see the table.",
        log_x=True,
        y_range=(0, None),
    )
    rows = []
    for (method, context), group in groups.items():
        ratios = [point[2] for point in group]
        always_selected = [point[3] for point in group if point[3] is not None]
        always = float(np.mean(always_selected)) if always_selected else None
        numbers = (min(ratios), means[method, context], max(ratios), always)
        rows.append((method, f"{context:,}", str(len(group)), *(form(value, ".4f") for value in numbers)))
    head = ("method", "context, tokens", "cells", "least", "mean", "most", "always selected, mean")
    return Part(figures=[plot], tables=[Table(head, rows)])


def _by_first(values: dict[tuple[Any, int], float]) -> dict[Any, list[tuple[float, float]]]:
    """(context, value) of every curve."""
    points: dict[Any, list[tuple[float, float]]] = {}
    for (curve, context), value in values.items():
        points.setdefault(curve, []).append((context, value))
    return points


def _time(cells: list[Line]) -> Part:
    timed = [c for c in cells if number(c.get("decode_ms_p95")) and number(c.get("dense_decode_ms_p95"))]
    if not timed:
        return Part(nothing="no cell with decode times (scripts/experiments/grid/run.py)")
    devices = sorted({str(cell.get("device") or "an unnamed device") for cell in timed})
    groups = of.grouped(timed, lambda c: (of.method(c), of.batch(c), of.context(c)))
    ratios = {
        ((method, batch), context): float(np.mean([c["decode_ms_p95"] / c["dense_decode_ms_p95"] for c in group]))
        for (method, batch, context), group in groups.items()
    }
    several_batches = len({batch for _, batch, _ in groups}) > 1
    plot = curves(
        [
            Curve(f"{method}, batch {batch}" if several_batches else method, of_context, method)
            for (method, batch), of_context in _by_first(ratios).items()
        ],
        "context, tokens (log scale)",
        "p95 of decode, sparse / dense",
        f"95th percentile of one decode step, sparse over dense, on {', '.join(devices)} (below 1 is faster; mean over "
        "a method's cells). Dense and sparse were measured in one process.",
        log_x=True,
        line_y=(1.0, "dense"),
    )
    clocks = (
        ("dense", "dense_decode_ms"), ("sparse", "decode_ms"), ("pre-pass", "prepass_ms"), ("attention", "attention_ms")
    )  # fmt: skip
    table = table_of(
        timed,
        (
            ("variant", of.variant), ("policy", of.policy), ("context, tokens", lambda cell: f"{of.context(cell):,}"),
            ("batch", lambda cell: str(of.batch(cell))),
            *((f"{name} p{p}, ms", field(f"{key}_p{p}", ".2f")) for name, key in clocks for p in (50, 95)),
            ("p95 saved, %", lambda cell: form(p95_saved_percent(cell), ".1f")),
        ),
    )  # fmt: skip
    return Part(figures=[plot], tables=[table])


def _certificate(cells: list[Line], runs: list[Line]) -> Part:
    pairs = [(of.variant(cell), *pair) for cell in cells for pair in cell.get("mass_pairs") or []]
    pairs += [
        (of.run_setting(run, "method"), step.get("skipped_mass_bound_max"), step.get("skipped_mass_true_max"))
        for run in runs
        for step in run["steps"]
    ]
    points: dict[str, list[tuple[float, float]]] = {}
    for name, cert, true in pairs:
        if (bound := number(cert)) is not None and (share := number(true)) is not None:
            points.setdefault(name, []).append((bound, share))
    if not points:
        bounded = ", ".join(names(lambda one: one.role == "public" and not one.no_bounds))
        return Part(nothing=f"no audited step of a method with bounds ({bounded}, {coded_methods()} with bounds)")
    plot = scatter(
        points,
        "true share of the softmax left unread",
        "bounded bound of that share",
        "Each point is one kv head in one audited step (or, of eps-proto run, one step): what the error bound allowed "
        "against what was left out, by a second, dense read. A sound bound lies on the diagonal or above it; the "
        "further above, the looser it is.",
    )
    rows = []
    for name, found in points.items():
        (mean_bound, mean_true), (max_bound, max_true) = np.mean(found, axis=0), np.max(found, axis=0)
        numbers = [form(float(value), ".4f") for value in (mean_bound, max_bound, mean_true, max_true)]
        # the two sides are computed apart, in float32
        rows.append((name, str(len(found)), *numbers, str(sum(true > cert + 1e-6 for cert, true in found))))
    head = ("variant", "points", "bounded mean", "bounded max", "true mean", "true max", "points below the diagonal")
    return Part(figures=[plot], tables=[Table(head, rows)])


def _heads(cells: list[Line], runs: list[Line]) -> Part:
    named = [
        (f"{of.variant(cell)}, {of.policy(cell)}, {of.context(cell):,} tokens", cell)
        for cell in sorted(cells, key=lambda cell: (-of.context(cell), cell["bytes_ratio"]))
    ]
    named += [(f"{run['file']}, {of.run_setting(run, 'method')}", run["summary"]) for run in runs]
    maps = [
        (name, array) for name, line in named
        if (array := of.map_of(line.get("selected_ratio_by_layer_and_head"))) is not None
    ]  # fmt: skip
    if not maps:
        return Part(nothing="no cell or run with selected ratios by head")
    # where every head selects the same number there is nothing to see: one such map says it
    maps.sort(key=lambda entry: -float(np.ptp(entry[1])))
    uneven = [entry for entry in maps if np.ptp(entry[1]) > 1e-6]
    shown = (uneven or maps[:1])[:MAX_MAPS]
    note = f"{len(uneven)} of {len(maps)} maps differ from head to head; {len(shown)} of them shown, least even first."
    if not uneven:
        note = f"In each of {len(maps)} maps every head selects the same number; one is shown."
    about = (
        "share of the groups that each kv head selects, mean over the decode steps. Topk with one list a kv head gives "
        "every head the same number."
    )
    tables = []
    for name, array in shown:
        rows = [(str(layer), *(form(float(value), ".4f") for value in row)) for layer, row in enumerate(array)]
        tables.append(Table(("layer", *(f"kv head {head}" for head in range(array.shape[1]))), rows, name))
    plots = [heat_map(array, "kv head", "layer", f"{name}: {about}") for name, array in shown]
    return Part(note=note, figures=plots, tables=tables)


def _runs(runs: list[Line]) -> Part:
    lines = [
        {
            **run["summary"], **{f"dense_{key}": value for key, value in (run["summary"].get("dense") or {}).items()},
            "file": run["file"], "num_steps": len(run["steps"]), "method": of.run_setting(run, "method"),
            "policy": of.run_setting(run, "policy"),
            "backend": f"{head.get('backend', head.get('engine', '?'))} on {head.get('device', '?')}",
        }
        for run, head in ((run, run["run"]) for run in runs)
    ]  # fmt: skip
    columns: tuple[tuple[str, Callable[[Line], str]], ...] = (
        *((name, itemgetter(name)) for name in ("file", "method", "policy", "backend")),
        ("prompt, tokens", field("prompt_tokens", ",.0f")), ("steps", field("num_steps", ".0f")),
        ("bytes / dense", field("bytes_ratio", ".4f")), ("visited", field("selected_ratio", ".4f")),
        ("KL mean, nats", field("kl_mean", ".5f")),
        *((f"{side}p{p}, ms", field(f"{key}decode_ms_p{p}", ".2f"))
          for side, key in (("dense ", "dense_"), ("", "")) for p in (50, 95)),
    )  # fmt: skip
    return Part(tables=[table_of(lines, columns)]) if lines else Part(nothing="no run of eps-proto run --metrics")


def _skipped(cells: list[Line], failed: list[Line]) -> Part:
    if not cells and not failed:
        return Part(nothing="no cells at all")
    reasons = Counter(
        str(cell.get("skipped") or "no numbers: the budget has no room beyond what is always selected")
        for cell in cells
        if number(cell.get("bytes_ratio")) is None
    )
    reasons.update(f"failed, and not measured since: {cell.get('reason') or 'unnamed'}" for cell in failed)
    if not reasons:
        return Part(note="Every cell was measured.")
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return Part(tables=[Table(("why", "cells"), [(reason, str(count)) for reason, count in ordered])])


def _inputs(results: Results) -> Part:
    rows = [
        (name, ", ".join(f"{count} {kind}" for kind, count in results.counts[name].items()) or "nothing")
        for name in results.names
    ]
    return Part(tables=[Table(("file", "lines"), rows)], items=results.notes)
