"""Results as one HTML page: plots as inline SVG, the numbers under each as a table, the verdict, and no network.

The same lines give the same bytes. matplotlib draws (extra `report`); ink and grid lines take the page's colours, so
that a plot can be read in a light and in a dark scheme.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eps_core.config.store import COARSE_GROUP_BLOCKS, coded_methods
from eps_core.evaluation.verdict import Verdict, arm_name, decide, loss_points, p95_saved_percent
from eps_core.report.figures import MAX_CURVES, _Curve, _Drawer, _nothing, _text
from eps_core.report.load import Line, Results, _number
from eps_core.summaries.table import names

MAX_MAPS = 6
_ABLATIONS: tuple[tuple[str, str, Any], ...] = (
    ("dim", "m (--eps-dim)", 8),
    ("alpha", "alpha", 1.1),
    ("last_n", "last_n, groups", 8),
    ("group_tokens", "g, tokens of a group", COARSE_GROUP_BLOCKS * 16),
)


def page(results: Results) -> tuple[str, Verdict]:
    """(the whole page, the verdict)."""
    verdict = decide(results.cells)
    draw = _Drawer()
    measured = [cell for cell in results.cells if _number(cell.get("bytes_ratio")) is not None]
    sections = [
        ("verdict", "Verdict", _verdict(verdict)),
        ("quality", "Quality against bytes", _quality(draw, measured)),
        ("visited", "Visited ratio against context", _visited(draw, measured, results.runs)),
        ("time", "Decode time", _time(draw, measured)),
        ("certificate", "Certificate against truth", _certificate(draw, measured, results.runs)),
        ("heads", "Visited ratio by layer and kv head", _heads(draw, measured, results.runs)),
        ("ablations", "Ablations", _ablations(draw, measured)),
        ("runs", "Single runs", _runs(results.runs)),
        ("skipped", "Cells without numbers", _skipped(results.cells)),
        ("inputs", "Inputs", _inputs(results)),
    ]
    links = "".join(f'<a href="#{key}">{_text(title)}</a>' for key, title, _ in sections)
    body = "".join(
        f'<section id="{key}"><h2>{_text(title)}</h2>\n{content}</section>\n' for key, title, content in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>EPS report</title><style>{_STYLE}</style></head>\n<body><main><h1>EPS report</h1>\n"
        f"<nav>{links}</nav>\n{body}</main></body></html>\n"
    ), verdict


# --- sections ---------------------------------------------------------------------------------------------------------


def _verdict(verdict: Verdict) -> str:
    key = verdict.outcome.replace(" ", "-")
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in verdict.reasons)
    caveats = "".join(f"<li>Caveat: {_text(caveat)}</li>" for caveat in verdict.caveats)
    return (
        f'<p class="outcome {key}">{_text(verdict.outcome)}</p><ul>{reasons}{caveats}</ul>'
        "<p class=note>Ship: at every context from 32k on at least 10 % fewer bytes, p95 of decode at least 7 % lower "
        "on the device, at most 0.3 points of quality lost (none in strict mode). Kill: less than 5 % of the bytes "
        "saved at 32k to 64k by every arm, or quality lost in strict mode. Between: iterate. Oracles do not count."
        "</p>\n"
    )


def _quality(draw: "_Drawer", cells: list[Line]) -> str:
    groups = _grouped(
        cells, lambda cell: (_whole(cell.get("context_tokens")), str(cell.get("model") or "no model named"))
    )
    several_models = len({model for _, model in groups}) > 1
    parts = []
    for (context, model), group in groups.items():
        title = f"Context {context:,} tokens" if context else "Context not recorded"
        if several_models:
            title += f", {model}"
        # more documents at a time change the time and not the quality
        group = [cell for cell in group if _batch(cell) == min(map(_batch, group))]
        dense = [_number(cell.get("needles_dense")) for cell in group]
        plots = [
            draw.curves(
                _quality_curves(group, lambda cell: _number(cell.get("kl_mean"))),
                "bytes read (K, V, summaries), share of dense",
                "KL to dense, nats",
                f"{title}: mean KL of the next token against dense, in nats (log scale; lower is better), over the "
                "bytes that one decode step reads, as a share of dense. Along one line only the budget changes; where "
                "a method has many arms, its line joins the best of their cells.",
                log_y=True,
            ),
            draw.curves(
                _quality_curves(group, _accuracy),
                "bytes read (K, V, summaries), share of dense",
                "needles answered, %",
                f"{title}: needle questions answered, in percent of all (higher is better). Dense attention: "
                f"{_accuracy_text(group, dense)}.",
                y_range=(-3, 103),
            ),
        ]
        rows = [
            (
                _arm(cell),
                _policy(cell),
                _form(cell.get("bytes_ratio"), ".4f"),
                _form(cell.get("kl_mean"), ".5f"),
                _percent(cell.get("top1_agreement")),
                _of(cell.get("needles_answered"), cell.get("num_needles")),
                _of(cell.get("needles_dense"), cell.get("num_needles")),
            )
            for cell in sorted(group, key=lambda cell: (_curve_name(cell), cell["bytes_ratio"]))
        ]
        table = _table(
            ("arm", "policy", "bytes / dense", "KL mean, nats", "top-1 agreement, %", "needles", "needles, dense"), rows
        )
        parts.append(f"<h3>{_text(title)}</h3>{_figures(plots)}{table}")
    return "".join(parts) or _nothing("no measured cell (eps-proto grid or scripts/evaluate.py)")


def _quality_curves(cells: list[Line], value: Callable[[Line], float | None]) -> list["_Curve"]:
    """One curve for each arm, budgets along it; where there are too many arms, each method's best front."""
    by_arm = _grouped(cells, _curve_name)
    if len(by_arm) <= MAX_CURVES:
        return [
            _Curve(name, _sorted_points((c["bytes_ratio"], value(c)) for c in group), _method(group[0]))
            for name, group in by_arm.items()
        ]
    return [
        _Curve(f"{name} ({len(group)} cells)", _sorted_points((c["bytes_ratio"], value(c)) for c in group), name, False)
        for name, group in _grouped(cells, _method).items()
    ]


def _visited(draw: "_Drawer", cells: list[Line], runs: list[Line]) -> str:
    rows, points = [], []
    for cell in cells:
        if (ratio := _number(cell.get("visit_ratio"))) is not None and cell.get("context_tokens"):
            points.append((_method(cell), _whole(cell["context_tokens"]), ratio, _number(cell.get("forced_ratio"))))
    for run in runs:
        ratio, length = _number(run["summary"].get("visit_ratio")), run["summary"].get("prompt_tokens")
        method = (run["run"].get("config") or {}).get("method")
        if ratio is not None and length and method:
            points.append((method, _whole(length), ratio, None))
    groups = _grouped(points, lambda point: (point[0], point[1]))
    for (method, context), group in groups.items():
        ratios = [point[2] for point in group]
        forced = [point[3] for point in group if point[3] is not None]
        rows.append(
            (
                method,
                f"{context:,}",
                str(len(group)),
                *(_form(value, ".4f") for value in (min(ratios), float(np.mean(ratios)), max(ratios))),
                _form(float(np.mean(forced)) if forced else None, ".4f"),
            )
        )
    curves = [
        _Curve(
            method,
            [
                (context, float(np.mean([p[2] for p in group])))
                for (name, context), group in groups.items()
                if name == method
            ],
            method,
        )
        for method in dict.fromkeys(name for name, _ in groups)
    ]
    if not curves:
        return _nothing("no cell or run with a visited ratio (eps-proto grid, eps-proto run --metrics)")
    plot = draw.curves(
        curves,
        "context, tokens (log scale)",
        "groups visited, share of all",
        "Groups that one decode step visits, as a share of all groups, mean over the cells of a method at that context "
        "(all budgets, batches and ablations together). What is always visited bounds it from below: see the table.",
        log_x=True,
        y_range=(0, None),
    )
    head = ("method", "context, tokens", "cells", "least", "mean", "most", "always visited, mean")
    return _figures([plot]) + _table(head, rows)


def _time(draw: "_Drawer", cells: list[Line]) -> str:
    timed = [c for c in cells if _number(c.get("decode_ms_p95")) and _number(c.get("dense_decode_ms_p95"))]
    if not timed:
        return _nothing("no cell with decode times (eps-proto grid)")
    devices = sorted({str(cell.get("device") or "an unnamed device") for cell in timed})
    groups = _grouped(timed, lambda c: (_method(c), _batch(c), _whole(c.get("context_tokens"))))
    batches = sorted({batch for _, batch, _ in groups})
    curves = [
        _Curve(
            f"{method}, batch {batch}" if len(batches) > 1 else method,
            [
                (context, float(np.mean([c["decode_ms_p95"] / c["dense_decode_ms_p95"] for c in group])))
                for (name, size, context), group in groups.items()
                if (name, size) == (method, batch)
            ],
            method,
        )
        for method, batch in dict.fromkeys(key[:2] for key in groups)
    ]
    plot = draw.curves(
        curves,
        "context, tokens (log scale)",
        "p95 of decode, gated / dense",
        f"95th percentile of one decode step, gated over dense, on {', '.join(devices)} (below 1 is faster; mean over "
        "a method's cells). Dense and gated were measured in one process.",
        log_x=True,
        line_y=(1.0, "dense"),
    )
    rows = [
        (
            _arm(cell),
            _policy(cell),
            f"{_whole(cell.get('context_tokens')):,}",
            str(_batch(cell)),
            *(
                _form(cell.get(f"{side}{clock}_p{percent}"), ".2f")
                for side, clock in (
                    ("dense_", "decode_ms"),
                    ("", "decode_ms"),
                    ("", "prepass_ms"),
                    ("", "attention_ms"),
                )
                for percent in (50, 95)
            ),
            _form(p95_saved_percent(cell), ".1f"),
        )
        for cell in timed
    ]
    head = (
        "arm", "policy", "context, tokens", "batch", "dense p50, ms", "dense p95, ms", "gated p50, ms",
        "gated p95, ms", "pre-pass p50, ms", "pre-pass p95, ms", "attention p50, ms", "attention p95, ms",
        "p95 saved on a GPU, %",
    )  # fmt: skip
    return _figures([plot]) + _table(head, rows)


def _certificate(draw: "_Drawer", cells: list[Line], runs: list[Line]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        for pair in cell.get("mass_pairs") or []:
            _add_pair(points, _arm(cell), *pair)
    for run in runs:
        method = str((run["run"].get("config") or {}).get("method") or "?")
        for step in run["steps"]:
            _add_pair(points, method, step.get("mass_skipped_cert"), step.get("mass_skipped_true"))
    if not points:
        bounded = ", ".join(names(lambda one: not one.no_bounds))
        return _nothing(f"no audited step of a method with bounds ({bounded}, {coded_methods()} with bounds)")
    plot = draw.scatter(
        points,
        "true share of the softmax left unread",
        "certified bound of that share",
        "Each point is one kv head in one audited step (or, of eps-proto run, one step): what the certificate allowed "
        "against what was left out, by a second, dense read. A sound certificate lies on the diagonal or above it; the "
        "further above, the looser it is.",
    )
    rows = [
        (
            name,
            str(len(pairs)),
            *(_form(float(value), ".4f") for value in (np.mean(pairs, axis=0)[0], np.max(pairs, axis=0)[0])),
            *(_form(float(value), ".4f") for value in (np.mean(pairs, axis=0)[1], np.max(pairs, axis=0)[1])),
            # the two sides are computed apart, in float32
            str(sum(true > cert + 1e-6 for cert, true in pairs)),
        )
        for name, pairs in points.items()
    ]
    head = ("arm", "points", "certified mean", "certified max", "true mean", "true max", "points below the diagonal")
    return _figures([plot]) + _table(head, rows)


def _heads(draw: "_Drawer", cells: list[Line], runs: list[Line]) -> str:
    maps: list[tuple[str, np.ndarray]] = []
    for cell in sorted(cells, key=lambda c: (-_whole(c.get("context_tokens")), c["bytes_ratio"])):
        array = _map(cell.get("visit_ratio_by_layer_and_head"))
        name = f"{_arm(cell)}, {_policy(cell)}, {_whole(cell.get('context_tokens')):,} tokens"
        if array is not None:
            maps.append((name, array))
    for run in runs:
        array = _map(run["summary"].get("visit_ratio_by_layer_and_head"))
        if array is not None:
            maps.append((f"{run['file']}, {(run['run'].get('config') or {}).get('method', '?')}", array))
    if not maps:
        return _nothing("no cell or run with visited ratios by head")
    # where every head visits the same number there is nothing to see: one such map says it
    maps.sort(key=lambda entry: -float(np.ptp(entry[1])))
    uneven = [entry for entry in maps if np.ptp(entry[1]) > 1e-6]
    shown = (uneven or maps[:1])[:MAX_MAPS]
    note = f"{len(uneven)} of {len(maps)} maps differ from head to head; {len(shown)} of them shown, least even first."
    if not uneven:
        note = f"In each of {len(maps)} maps every head visits the same number; one is shown."
    plots, tables = [], []
    for name, array in shown:
        plots.append(
            draw.heat_map(
                array,
                "kv head",
                "layer",
                f"{name}: share of the groups that each kv head visits, mean over the decode steps. Topk with one list "
                "a kv head gives every head the same number.",
            )
        )
        rows = [(str(layer), *(_form(float(value), ".4f") for value in row)) for layer, row in enumerate(array)]
        tables.append(_table(("layer", *(f"kv head {head}" for head in range(array.shape[1]))), rows, name))
    return f"<p class=note>{note}</p>" + _figures(plots) + "".join(tables)


def _ablations(draw: "_Drawer", cells: list[Line]) -> str:
    parts = []
    for axis, label, _ in _ABLATIONS:
        series = _ablation_series(cells, axis)
        if not series:
            parts.append(f"<h3>{_text(label)}</h3>" + _nothing("no arm measured at two values of it, the rest held"))
            continue
        plots = [
            draw.curves(
                [
                    _Curve(name, _sorted_points((_axis_value(c, axis), value(c)) for c in group), _method(group[0]))
                    for name, group in series.items()
                ],
                label,
                unit,
                f"{what} over {label}, everything else held at its default or nearest to it.",
                log_y=log_y,
            )
            for what, unit, value, log_y in (
                ("Mean KL to dense (log scale; lower is better)", "KL to dense, nats", _kl, True),
                ("Groups visited", "groups visited, share of all", _visit_ratio, False),
            )
        ]
        rows = [
            (
                name,
                _form(_axis_value(cell, axis), "g"),
                _form(cell.get("visit_ratio"), ".4f"),
                _form(cell.get("bytes_ratio"), ".4f"),
                _form(cell.get("kl_mean"), ".5f"),
                _of(cell.get("needles_answered"), cell.get("num_needles")),
            )
            for name, group in series.items()
            for cell in group
        ]
        head = ("curve", label, "visited", "bytes / dense", "KL mean, nats", "needles")
        parts.append(f"<h3>{_text(label)}</h3>" + _figures(plots) + _table(head, rows))
    return "".join(parts)


def _ablation_series(cells: list[Line], axis: str) -> dict[str, list[Line]]:
    """For each (method, context), the cells that differ in `axis` alone: the set with most values of it, of those the
    one nearest to the defaults."""
    others = [name for name, _, _ in _ABLATIONS if name != axis]
    held = (
        "policy", "bits", "heads", "strict", "batch", "budget", "byte_budget", "epsilon", "tau", "top_pages", "first_n",
        "refine", "scope", "bound_bits",
    )  # fmt: skip
    groups: dict[Any, dict[Any, list[Line]]] = {}
    for cell in cells:
        if _axis_value(cell, axis) is None:
            continue
        curve = (str(cell.get("model", "")), _whole(cell.get("context_tokens")), _method(cell))
        # guards and tails are in tokens and grow with the group: those asked for in groups are held above
        in_groups = any(_asked(cell, name) is not None for name in ("first_n", "last_n"))
        tail, guards = bool(_number(cell.get("tail_tokens"))), None if in_groups else cell.get("guards")
        rest = (*(repr(_asked(cell, name)) for name in (*others, *held)), repr(guards), repr(tail))
        groups.setdefault(curve, {}).setdefault(rest, []).append(cell)
    defaults = {name: value for name, _, value in _ABLATIONS}
    found: dict[str, list[Line]] = {}
    for (_, context, method), sets in sorted(groups.items()):

        def rank(group: list[Line]) -> tuple[int, int]:
            off = sum(_asked(group[0], name) not in (None, defaults[name]) for name in others)
            return len({_axis_value(cell, axis) for cell in group}), -off

        best = max((sets[rest] for rest in sorted(sets)), key=rank)
        if rank(best)[0] >= 2:
            at = ", ".join(f"{name} {_asked(best[0], name)}" for name in others if _asked(best[0], name) is not None)
            name = f"{method} at {context:,}" + (f" ({at})" if at else "")
            # a cell that several files hold counts once
            by_value = {_axis_value(cell, axis) or 0.0: cell for cell in reversed(best)}
            found[name] = [by_value[value] for value in sorted(by_value)]
    return dict(list(found.items())[:MAX_CURVES])


def _runs(runs: list[Line]) -> str:
    if not runs:
        return _nothing("no run of eps-proto run --metrics")
    rows = []
    for run in runs:
        summary, config = run["summary"], run["run"].get("config") or {}
        dense = summary.get("dense") or {}
        rows.append(
            (
                run["file"],
                str(config.get("method", "?")),
                str(config.get("policy", "?")),
                f"{run['run'].get('backend', '?')} on {run['run'].get('device', '?')}",
                _form(summary.get("prompt_tokens"), ",.0f"),
                str(len(run["steps"])),
                _form(summary.get("bytes_ratio"), ".4f"),
                _form(summary.get("visit_ratio"), ".4f"),
                _form(summary.get("kl_mean"), ".5f"),
                _form(dense.get("decode_ms_p50"), ".2f"),
                _form(dense.get("decode_ms_p95"), ".2f"),
                _form(summary.get("decode_ms_p50"), ".2f"),
                _form(summary.get("decode_ms_p95"), ".2f"),
            )
        )
    head = (
        "file", "method", "policy", "backend", "prompt, tokens", "steps", "bytes / dense", "visited", "KL mean, nats",
        "dense p50, ms", "dense p95, ms", "p50, ms", "p95, ms",
    )  # fmt: skip
    return _table(head, rows)


def _skipped(cells: list[Line]) -> str:
    reasons: Counter[str] = Counter()
    for cell in cells:
        if _number(cell.get("bytes_ratio")) is None:
            reasons[str(cell.get("skipped") or "no numbers: the budget has no room beyond what is always visited")] += 1
    if not reasons:
        return "<p class=note>Every cell was measured.</p>" if cells else _nothing("no cells at all")
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return _table(("why", "cells"), [(reason, str(count)) for reason, count in ordered])


def _inputs(results: Results) -> str:
    rows = [
        (name, ", ".join(f"{count} {kind}" for kind, count in results.counts[name].items()) or "nothing")
        for name in results.names
    ]
    notes = "".join(f"<li>{_text(note)}</li>" for note in results.notes)
    return _table(("file", "lines"), rows) + (f"<ul>{notes}</ul>" if notes else "")


def _whole(value: Any) -> int:
    return int(_number(value) or 0)


def _method(cell: Line) -> str:
    return str(cell.get("method") or cell.get("policy") or "not named")


def _arm(cell: Line) -> str:
    """The arm's name; of a comparison of policies alone, the policy's."""
    if cell.get("method"):
        return arm_name(cell)
    return f"policy {cell['policy']}" if cell.get("policy") else "not named"


def _curve_name(cell: Line) -> str:
    """What stays along a curve whose budget changes."""
    name, policy = _arm(cell), cell.get("policy")
    if not cell.get("method") and cell.get("scope") == "union":
        name += " union"
    if policy in (None, "topk") or not cell.get("method"):
        return name
    alpha, last_n = (_asked(cell, axis) for axis in ("alpha", "last_n"))
    details = "".join(
        f" {label} {value:g}" for label, value in (("alpha", alpha), ("last", last_n)) if _number(value) is not None
    )
    return f"{name} {policy}{details}"


def _policy(cell: Line) -> str:
    """The policy with what it was given."""
    given = (
        (name.replace("_", "-"), _asked(cell, name))
        for name in ("budget", "byte_budget", "alpha", "epsilon", "tau", "last_n")
    )
    policy = str(cell.get("policy") or "topk")
    return " ".join([policy, *(f"{name} {value:g}" for name, value in given if _number(value) is not None)])


def _asked(cell: Line, name: str) -> Any:
    setting = cell.get("setting")
    value = cell.get(name)
    return value if value is not None or not isinstance(setting, dict) else setting.get(name)


def _axis_value(cell: Line, axis: str) -> float | None:
    return _number(_asked(cell, axis))


def _batch(cell: Line) -> int:
    return _whole(cell.get("batch")) or 1


def _kl(cell: Line) -> float | None:
    return _number(cell.get("kl_mean"))


def _visit_ratio(cell: Line) -> float | None:
    return _number(cell.get("visit_ratio"))


def _accuracy(cell: Line) -> float | None:
    answered, total = _number(cell.get("needles_answered")), _number(cell.get("num_needles"))
    return 100 * answered / total if answered is not None and total else None


def _accuracy_text(cells: list[Line], dense: Sequence[float | None]) -> str:
    shares = {
        100 * known / total
        for cell, known in zip(cells, dense, strict=True)
        if known is not None and (total := _number(cell.get("num_needles")))
    }
    losses = [loss for cell in cells if (loss := loss_points(cell)) is not None]
    if not shares:
        return "not asked"
    known = " or ".join(f"{share:.0f} %" for share in sorted(shares))
    return f"{known}; the worst cell loses {max(losses):.0f} points" if losses else known


def _map(value: Any) -> np.ndarray | None:
    """[L, Hkv] or None where it is no such array."""
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(row, list) and len(row) == len(value[0]) and row for row in value):
        return None
    if any(_number(item) is None for row in value for item in row):
        return None
    return np.array(value, float)


def _add_pair(points: dict[str, list[tuple[float, float]]], name: str, cert: Any, true: Any) -> None:
    if (bound := _number(cert)) is not None and (share := _number(true)) is not None:
        points.setdefault(name, []).append((bound, share))


def _sorted_points(points: Iterable[tuple[Any, float | None]]) -> list[tuple[float, float]]:
    return sorted((float(x), y) for x, y in points if y is not None and x is not None)


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return dict(sorted(groups.items()))


# --- text -------------------------------------------------------------------------------------------------------------


def _form(value: Any, form: str) -> str:
    number = _number(value)
    return "–" if number is None else format(number, form)


def _percent(value: Any) -> str:
    number = _number(value)
    return "–" if number is None else f"{100 * number:.1f}"


def _of(part: Any, whole: Any) -> str:
    return "–" if _number(part) is None or not _number(whole) else f"{_whole(part)} of {_whole(whole)}"


def _figures(plots: Sequence[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>\n'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """The numbers, folded where they are many."""
    cells = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>\n" for row in rows)
    title = f"<caption>{_text(caption)}</caption>" if caption else ""
    table = f"<table>{title}<thead><tr>{cells}</tr></thead>\n<tbody>{lines}</tbody></table>"
    table = f'<div class="scroll" tabindex="0">{table}</div>'
    if len(rows) <= 12:
        return table + "\n"
    return f"<details><summary>The numbers: {len(rows)} rows</summary>{table}</details>\n"


_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #57606a; --grid: #d5dae0; --box: #f3f5f7;
  --ship: #116329; --iterate: #7d4e00; --kill: #a40e26; --open: #424a53; --link: #0a58ca; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e9ed; --soft: #a3abb4; --grid: #3a4149;
  --box: #1e2327; --ship: #57d07e; --iterate: #e3b04b; --kill: #ff8a80; --open: #c3cad2; --link: #7ab7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .2rem 0; } h2 { font-size: 1.3rem; margin: 2rem 0 .5rem; } h3 { font-size: 1.05rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } a { color: var(--link); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; background: var(--box); border-radius: .5rem; max-width: 38rem; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption, .note, .nothing { color: var(--soft); font-size: .875rem; }
.outcome { display: inline-block; margin: .2rem 0; padding: .2rem .8rem; border: 2px solid; border-radius: .5rem;
  font-size: 1.3rem; font-weight: 700; color: var(--open); }
.ship { color: var(--ship); } .iterate { color: var(--iterate); } .kill { color: var(--kill); }
.scroll { overflow-x: auto; margin: .6rem 0; } details { margin: .6rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
#skipped td:first-child, #inputs td { text-align: left; white-space: normal; }
"""
