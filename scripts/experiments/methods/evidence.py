"""Turns the raw measurements of scripts/reproduce.sh, and those of quality of long.sh, into tables and figures.

    python scripts/experiments/methods/evidence.py [results]

Writes evidence.md (every table), quality.svg (KL against bytes), context.svg (bytes against context) and
certificates.svg (what certainty costs) there.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import ConfigError, exit_code
from eps_core.evaluation.statistics import bytes_at_kl
from eps_core.io import inputs
from eps_core.io.outputs import replacing
from eps_core.io.records import Count, Name, Ratio, Share, read_record
from eps_core.io.schema import current
from eps_core.report.style import DASHES, INK, colour, svg
from experiments.methods.curves import (
    CUTS,
    EARLIER,
    FLOOR,
    HEADLINE,
    PAIRS,
    ArmName,
    Cell,
    Floor,
    floor,
    label,
    markdown,
    name_of,
    variant_name,
)

Rows = list[dict[str, Any]]
T = TypeVar("T")
MEND = "run scripts/reproduce.sh, or long.sh for the long model, again"
KL_LIMIT = 0.01
# what the default is held against, and the most of its bytes that the default may read
TARGETS = (("box", 16, (16, 128), 0.3), ("meanstd", 16, (16, 128), 0.35), ("oracle", 16, (16, 128), 1.0),
           ("oracle", 16, (4, 32), 1.0), ("oracle", 128, (16, 128), 0.5))  # fmt: skip
# what was asked of 32,768 tokens
LONG_TARGETS = (("box", 16, (16, 128), 0.2), ("meanstd", 16, (16, 128), 0.25), ("oracle", 16, (16, 128), 0.7))
LEVELS = ("0.1", "0.01", "0.001")
# of each model: methods and, where they are there, what was measured of some of them, or of others, later
FILES = {
    "demo": ("methods", "codes", "cuts", "unit-scale"),
    "wide": ("wide", "codes-wide", "cuts-wide", "unit-scale-wide"),
    "long": ("long", "long-floor", "long-others", "long-cuts", "long-unit-scale"),
}
SINCE = "long-unit-scale"  # what was measured since the groups of a unit share a scale, where not all was
# whose bytes are split, and what they are drawn as
FOLLOWED = {name_of(variant): variant for variant in (*HEADLINE, *FLOOR, *CUTS)}
DRAWN = tuple(zip(map(name_of, HEADLINE), ("-", "-", "-", "--", ":"), strict=True))

KINDS: dict[str, Any] = {
    "run": {"head_dim": Count},
    "replay": {
        "method": Name, "group_size": Count, **{f"recall_at_{f}": Ratio | None for f in ("0.05", "0.125", "0.25")},
        **{f"{kind}_skip_{level}": Ratio | None for kind in ("certified", "oracle") for level in LEVELS},
    },
    "summary": {
        "method": Name, "group_size": Count, "bits": Count | None, "dim": Count | None, "upper_gap": Ratio,
        "bytes_at": tuple[Ratio, Ratio, Ratio], "oracle_bytes_at": tuple[Ratio, Ratio, Ratio],
        **{f"certified_skip_{level}": Ratio for level in LEVELS},
    },
    "strict": {
        "bound_bits": Count, "epsilon": Ratio, "bytes_ratio": Ratio, "skipped_true_max": Ratio, "error_bound": Ratio,
    },
    "refinement": dict.fromkeys((
        "bounded_share", "refined_fraction", "bytes_ratio", "bytes_8_bit_only", "error_bound_per_key_over_global",
    ), Ratio),
    "task": {
        "task": Name, "context_tokens": Count, "num_samples": Count, "num_changed": Count, "bytes_ratio": Ratio,
        **dict.fromkeys(("dense", "eps", "changed_share_upper"), Share),
    },
    "ablation_bytes": {
        "what": Name, **{f"bytes_at_{kl}": tuple[Ratio | None, Name] for kl in ("0.01", "0.004")},
    },
}  # fmt: skip


def rows(path: Path, *kinds: str) -> Rows:
    """The lines of these types."""
    lines = inputs.read_jsonl(path, "results", MEND)
    return [
        read_record(KINDS[row["type"]], current(row), place, MEND) for place, row in lines if row.get("type") in kinds
    ]


def cells(path: Path) -> list[Cell]:
    found = []
    for place, line in inputs.read_jsonl(path, "results", MEND):
        row = current(line)
        # older files also have cells of a policy that is there no more
        if row.pop("type", None) == "cell" and row.get("policy") != "share":
            row.pop("tau", None)
            found.append(read_record(Cell, {**EARLIER, **row}, place, MEND))
            if (found[-1].bytes_ratio is None) != (found[-1].kl_mean is None):
                raise ConfigError(f"{place}: bytes_ratio or kl_mean is null and the other is not: {MEND}")
    if not found:
        raise ConfigError(f"results {path} hold no cells: {MEND}")
    return found


def merged(earlier: list[Cell], later: list[Cell]) -> list[Cell]:
    """Both, with the later cells alone of a variant that both have at a context: no curve mixes two versions of it."""
    again = {(variant_name(cell), cell.context_tokens) for cell in later}
    return [cell for cell in earlier if (variant_name(cell), cell.context_tokens) not in again] + later


def as_stored_now(out: Path, found: list[Cell]) -> list[Cell]:
    """Those whose bytes can be split by what is stored today: none of codes that were longer then."""
    since = cells(out / f"{SINCE}.jsonl") if those_of(out, [SINCE]) else found
    return [cell for cell in found if not cell.mean_tokens or cell in since]


def those_of(out: Path, files: list[str]) -> list[str]:
    """The files that are there."""
    return [file for file in files if (out / f"{file}.jsonl").exists()]


def first(found: Iterable[T], what: str) -> T:
    for one in found:
        return one
    raise ConfigError(f"the results hold no {what}: {MEND}")


def curves(found: list[Cell], context: int) -> dict[ArmName, list[Cell]]:
    """The cells of one context, variant by variant."""
    by_variant: dict[ArmName, list[Cell]] = {}
    for cell in found:
        if cell.context_tokens == context:
            by_variant.setdefault(variant_name(cell), []).append(cell)
    return by_variant


def crossing(curve: list[Cell]) -> tuple[float | None, str]:
    return bytes_at_kl(((c.bytes_ratio, c.kl_mean) for c in curve), KL_LIMIT)


def default_of(by_variant: dict[ArmName, list[Cell]]) -> list[Cell]:
    """The default's curve: rq as it is without settings."""
    found = (curve for name, curve in by_variant.items() if name == name_of(PAIRS))
    return first(found, "cell of the default, rq as it is without settings, at some context")


def number(value: float | None, how: str = "measured") -> str:
    return "-" if value is None else f"{'' if how == 'measured' else how + ' '}{value:.3f}"


def bytes_table(found: list[Cell]) -> list[str]:
    """Bytes at the KL limit of every method at every context, and the needles at the first point within the limit,
    beside those of dense where fewer were asked."""
    contexts = sorted({cell.context_tokens for cell in found})
    most = {c: max(cell.num_needles for cell in found if cell.context_tokens == c) for c in contexts}
    table = [f"| method, S | {' | '.join(f'{c:,}' for c in contexts)} |", "|---|" + "---|" * len(contexts)]
    by_variant = {context: curves(found, context) for context in contexts}
    for name in dict.fromkeys(map(variant_name, found)):
        entries = []
        for context in contexts:
            curve = by_variant[context].get(name, [])
            within = [c for c in curve if c.kl_mean is not None and c.kl_mean <= KL_LIMIT]
            needles = ""
            if within:
                one = min(within, key=lambda c: c.bytes_ratio or 0)
                needles = f" / {one.needles_answered}" + f" (dense {one.needles_dense})" * (
                    one.num_needles < most[context]
                )
            entries.append(number(*crossing(curve)) + needles)
        table.append(f"| {label(name)} | {' | '.join(entries)} |")
    asked = (c for c in found if c.num_needles == most[c.context_tokens])
    dense = {c.context_tokens: f"{c.needles_dense} of {c.num_needles}" for c in asked}
    return [*table, "", "Dense answers " + ", ".join(f"{dense[c]} at {c:,}" for c in contexts) + "."]


def targets(found: list[Cell], wanted: Iterable[tuple[str, int, tuple[int, int], float]]) -> list[str]:
    """The default's bytes over those of what it is held against, at the KL limit, where dense answers most needles;
    `wanted`: of (method, tokens of a group, sink and recent tokens) at most so much."""
    long = (c for c in found if c.context_tokens >= 4096 and c.needles_dense >= 0.8 * c.num_needles)
    contexts = sorted({c.context_tokens for c in long})
    table = [f"| against | at most | {' | '.join(f'{c:,}' for c in contexts)} |", "|---|---|" + "---|" * len(contexts)]
    for method, group_size, sink_recent, limit in wanted:
        entries = []
        for context in contexts:
            by_variant = curves(found, context)
            ours, ours_how = crossing(default_of(by_variant))
            others = (
                c
                for n, c in by_variant.items()
                if (n.method, n.group_size, n.sink_recent) == (method, group_size, sink_recent)
            )
            theirs, how = crossing(first(others, f"{method} of {group_size} tokens at {context:,}"))
            sign = {("measured", ">"): "< ", ("<", "measured"): "< ", ("<", ">"): "< ", ("measured", "<"): "> "}
            words = "-" if ours is None or theirs is None else f"{sign.get((ours_how, how), '')}{ours / theirs:.2f}"
            entries.append(words)
        table.append(f"| {label(ArmName(method, group_size, sink_recent))} | {limit:g} | {' | '.join(entries)} |")
    return table


def floors(found: list[Cell], head_dim: int) -> dict[ArmName, dict[int, Floor]]:
    """Return the parts of each followed variant's bytes at the KL limit, at each context where it crosses that."""
    split: dict[ArmName, dict[int, Floor]] = {}
    for context in sorted({cell.context_tokens for cell in found}):
        for name, curve in curves(found, context).items():
            ratio, how = crossing(curve)
            if ratio is not None and how == "measured" and name in FOLLOWED:
                split.setdefault(name, {})[context] = floor(FOLLOWED[name], head_dim, context, ratio)
    return split


def context_figure(found: list[Cell], head_dim: int) -> str:
    """Bytes at the KL limit against context: over dense, and as tokens' worth of K and V."""
    split = floors(found, head_dim)

    def plot(figure: Any) -> None:
        shares, tokens = figure.subplots(1, 2)
        for name, style in DRAWN:
            by_context = split.get(name, {})
            xs, look = list(by_context), {"color": colour(name.method), "lw": 1.6, "marker": "o", "ms": 3}
            words = f"{name.method}, {name.group_size}"
            words += (
                " (default)" if name == name_of(PAIRS) else ", narrow sink and recent tokens" if style == ":" else ""
            )
            shares.plot(xs, [sum(part) for part in by_context.values()], style, label=words, **look)
            tokens.plot(xs, [sum(part) * x for x, part in by_context.items()], style, **look)
            if name == name_of(PAIRS):
                tokens.plot(
                    xs, [part.tokens * x for x, part in by_context.items()], ":", label="its K and V alone", **look
                )
        contexts = sorted({cell.context_tokens for cell in found})
        for axis, ylabel in ((shares, "bytes over dense"), (tokens, "tokens' worth of bytes")):
            axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=f"{ylabel} at a KL of {KL_LIMIT}")
            axis.set_xticks(contexts, [f"{c:,}" for c in contexts], minor=False)
            axis.minorticks_off()
        figure.legend(loc="outside lower center", ncols=6)

    return svg((8.4, 3.8), plot)


def recall_table(out: Path, has_wide: bool) -> list[str]:
    """Share of the softmax in the best groups by estimate, without sink and recent tokens, and the bounded skips."""
    by_length = [
        sorted(out.glob(f"replay-{model}[0-9]*.jsonl"), key=lambda path: (len(path.stem), path.stem))
        for model in ("", "long-")
    ]
    files = [*by_length[0], *([out / "replay-wide.jsonl"] if has_wide else []), *by_length[1]]
    table = ["| capture | method, S | 5 % | 12.5 % | 25 % | bounded skip at 0.1 / 0.01 / 0.001 | oracle's |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for path in files:
        for row in rows(path, "replay"):
            recall = " | ".join(number(row[f"recall_at_{f}"]) for f in ("0.05", "0.125", "0.25"))
            skip, best = (
                " / ".join("-" if row[f"{kind}_skip_{e}"] is None else f"{row[f'{kind}_skip_{e}']:.2f}" for e in LEVELS)
                for kind in ("certified", "oracle")
            )
            table.append(f"| {path.stem[7:]} | `{row['method']}` {row['group_size']} | {recall} | {skip} | {best} |")
    return list(dict.fromkeys(table))  # the same at every budget


def tasks_table(found: Rows) -> list[str]:
    """Mean scores of tasks, dense and by the default, and how many samples score otherwise, with the 95 % limit of
    their share."""
    table = [
        "| task | context | samples | dense | EPS | score otherwise, 95 %: at most this share | bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        scores = " | ".join(number(row[name]) for name in ("dense", "eps"))
        changed = f"{row['num_changed']}, {row['changed_share_upper']:.2f}"
        place = f"{row['task']} | {row['context_tokens']:,} | {row['num_samples']}"
        table.append(f"| {place} | {scores} | {changed} | {row['bytes_ratio']:.3f} |")
    return table


def certificate_tables(found: Rows) -> list[str]:
    table = ["| summary | S | of K and V | gap, nats | unread at 0.1 / 0.01 / 0.001 | bytes | oracle's bytes |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in found:
        if row["type"] != "summary":
            continue
        name = f"`{row['method']}`" + (f" {row['bits']} bit" if row["bits"] else "")
        name += f" k={row['dim']}" if row["method"] == "moments" else ""
        skip = " / ".join(f"{row[f'certified_skip_{e}']:.2f}" for e in LEVELS)
        ours, oracle = (" / ".join(f"{value:.2f}" for value in row[k]) for k in ("bytes_at", "oracle_bytes_at"))
        share = row["bytes_at"][0] - 1 + row["certified_skip_0.1"]
        table.append(
            f"| {name} | {row['group_size']} | {share:.3f} | {row['upper_gap']:.2f} | {skip} | {ours} | {oracle} |"
        )
    table += ["", "| strict, codes of single keys | epsilon | bytes | true share unread, largest | bounded, mean |",
              "|---|---|---|---|---|"]  # fmt: skip
    for row in found:
        if row["type"] == "strict":
            table.append(f"| {row['bound_bits']} bit | {row['epsilon']:g} | {row['bytes_ratio']:.3f} | "
                         f"{row['skipped_true_max']:.4f} | {row['error_bound']:.4f} |")  # fmt: skip
    table += ["", "| refinement: 4 bits of all keys, 8 of some | refined | bytes | 8 bits of all | "
              "error bound by each value's norm over by the largest |", "|---|---|---|---|---|"]  # fmt: skip
    for row in found:
        if row["type"] == "refinement":
            figures = f"{row['refined_fraction']:.2f} | {row['bytes_ratio']:.3f} | {row['bytes_8_bit_only']:.3f}"
            table.append(
                f"| bounded {row['bounded_share']:g} | {figures} | {row['error_bound_per_key_over_global']:.2f} |"
            )
    return table


def ablation_table(found: Rows) -> list[str]:
    table = ["| what | bytes at KL 0.01 | at KL 0.004 |", "|---|---|---|"]
    for row in found:
        table.append(f"| {row['what']} | {number(*row['bytes_at_0.01'])} | {number(*row['bytes_at_0.004'])} |")
    return table


def quality_figure(demo: list[Cell], wide: list[Cell]) -> str:
    panels = [(demo, context, f"demo, {context:,}") for context in sorted({c.context_tokens for c in demo})]
    panels += [(wide, context, f"wide, {context:,}") for context in sorted({c.context_tokens for c in wide})]
    shown = [("jl", 128), ("1pc", 128), ("box", 16), ("meanstd", 16), ("moments", 8), ("oracle", 16), ("oracle", 128)]

    def plot(figure: Any) -> None:
        axes = figure.subplots(1, len(panels), sharey=True)
        for axis, (found, context, title) in zip(axes, panels, strict=True):
            by_variant = curves(found, context)
            for method, size in shown:
                same = (
                    c
                    for n, c in by_variant.items()
                    if (n.method, n.group_size, n.sink_recent) == (method, size, (16, 128))
                )
                curve = next(same, [])
                _line(axis, curve, f"{method}, {size}", method, DASHES[1 + (size > 16)] if method == "oracle" else "-")
            _line(axis, default_of(by_variant), "rq, 2 (default)", "rq", "-", width=2.5)
            axis.axhline(KL_LIMIT, color="#bbbbbb", lw=0.8, zorder=0)
            axis.set(title=title, xscale="log", yscale="log", xlabel="bytes read over dense")
            axis.set_xticks([0.04, 0.07, 0.14, 0.28], ["0.04", "0.07", "0.14", "0.28"], minor=False)
            axis.minorticks_off()
        axes[0].set_ylabel("KL of the next token, nats")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=9)

    return svg((3.4 * len(panels), 3.6), plot)


def _line(axis: Any, curve: list[Cell], name: str, method: str, style: str, width: float = 1.4) -> None:
    points = sorted((c.bytes_ratio, c.kl_mean) for c in curve if c.bytes_ratio is not None and c.kl_mean is not None)
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    axis.plot(xs, ys, style, color=colour(method), label=name, lw=width, marker="o", ms=3)


def certificate_figure(found: Rows) -> str:
    summaries = [row for row in found if row["type"] == "summary"]
    shares = [float(level) for level in LEVELS]
    wanted = [
        ("box", 16, None),
        ("ball", 2, None),
        ("moments", 8, 4),
        ("moments", 2, 1),
        ("keys", 1, 4),
        ("keys", 1, 8),
    ]

    def plot(figure: Any) -> None:
        axis = figure.add_subplot()
        drawn: list[str] = []  # of one method: one colour, another dash
        for method, size, detail in wanted:
            # older rows have key codes as a form of rq
            called = ("keys", "rq") if method == "keys" else (method,)
            fit = (r for r in summaries if r["method"] in called and r["group_size"] == size)
            row = first((r for r in fit if detail in (None, r["dim"], r["bits"])), f"error bound of {method} of {size}")
            name = f"{method}, {size}" + (f", {'k =' if method == 'moments' else 'bits'} {detail}" if detail else "")
            style = DASHES[drawn.count(method)]
            axis.plot(
                shares,
                row["bytes_at"],
                style,
                color=colour("rq" if method == "keys" else method),
                marker="o",
                ms=3,
                label=name,
            )
            drawn.append(method)
        oracle = first((r for r in summaries if r["group_size"] == 1), "error bound of single keys")
        axis.plot(shares, oracle["oracle_bytes_at"], "--", color=INK, marker="o", ms=3, label="oracle, 1")
        axis.axhline(1, color="#bbbbbb", lw=0.8, zorder=0)
        axis.set(
            xscale="log", xlabel="bounded share of the softmax left unread", ylabel="bytes read over dense", ylim=0
        )
        axis.legend(fontsize=8)

    return svg((5.4, 3.6), plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="of reproduce.sh's raw files")
    out = parser.parse_args().folder
    if not out.is_dir():
        parser.error(f"there is no folder {out}: run scripts/reproduce.sh, which makes its files")
    # what long.sh makes takes hours, and is left out until it is there; where it made all that is there, it is all
    has_long = bool(those_of(out, ["long"]))
    has_others = not has_long or bool(those_of(out, ["methods", "wide"]))
    measured = {
        model: functools.reduce(merged, (cells(out / f"{file}.jsonl") for file in (must, *those_of(out, later))))
        for model, (must, *later) in FILES.items()
        if (has_long if model == "long" else has_others)
    }
    parts = [
        "# Evidence",
        "",
        "Made by `scripts/reproduce.sh` and `scripts/long.sh`. Bytes are K, V and summaries read, over dense.",
        "",
    ]
    for model, found in measured.items():
        parts += [f"## Bytes at a KL of {KL_LIMIT} / needles there, {model} model", "", *bytes_table(found), ""]
        parts += [
            f"## The default's bytes over others', {model} model",
            "",
            *targets(found, LONG_TARGETS if model == "long" else TARGETS),
            "",
        ]
    made = {"quality.svg": quality_figure(measured["demo"], measured["wide"])} if has_others else {}
    if has_long:
        run = first(rows(out / "long.jsonl", "run"), "run line of the long model")
        split = as_stored_now(out, measured["long"]), run["head_dim"]
        made["context.svg"] = context_figure(*split)
    for model, found in measured.items():
        for context in sorted({cell.context_tokens for cell in found}):
            here = [cell for cell in found if cell.context_tokens == context]
            parts += [f"## KL / needles at each byte budget, {model} model, {context:,} tokens", "", markdown(here), ""]
    parts += ["## Mass recall without sink and recent tokens, bounded skip", "", *recall_table(out, has_others), ""]
    tasks = rows(out / "long-tasks.jsonl", "task") if those_of(out, ["long-tasks"]) else []
    if tasks:
        parts += ["## RULER's look-ups, long model", "", *tasks_table(tasks), ""]
    if has_others:
        certificates = rows(out / "certificates.jsonl", "summary", "strict", "refinement")
        made["certificates.svg"] = certificate_figure(certificates)
        parts += ["## Error bounds, demo model, 4,096 tokens", "", *certificate_tables(certificates), ""]
        ablations = rows(out / "ablations.jsonl", "ablation_bytes")
        parts += ["## Parts of the default, 4,096 tokens", "", *ablation_table(ablations), ""]
        bounds = inputs.read_object(out / "bounds.json", "results", MEND)
        parts += ["## Bounds checked", "", "```json", json.dumps(bounds, indent=1), "```", ""]
    made["evidence.md"] = "\n".join(parts)
    for name, text in made.items():
        with replacing(out / name) as file:
            file.write(text)
    print("\n".join(parts[:60]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
