"""One run as a page: which tokens were read, KL along the text, bytes and times by layer. `templates/run.html` sets it.

The page is bounded whatever the context: a map has at most `trace.MAX_COLUMNS` columns and `MAX_ROWS` rows of steps,
and the text is cut into at most `MAX_PIECES` pieces, of several tokens each where the prompt is longer. The page says
so where it applies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.evaluation.trace import Reads, Trace
from eps_core.metrics.steps import steady
from eps_core.report.cells import Table
from eps_core.report.heat import (
    LEVEL_NAMES,
    VALUE_STEPS,
    HeatMap,
    Tick,
    levels_of,
    paths_of,
    profile_of,
    ticks,
    values_of,
)  # fmt: skip
from eps_core.report.style import templates

MAX_PIECES = 8192  # of the text, each with its own colour
MAX_ROWS = 64  # of the map by step
KL_LIMITS = (1e-4, 1e-3, 1e-2, 1e-1)  # nats: upper limits of the levels of KL but the last
_SPACE = "\u00a0"  # before a unit: no line ends there
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
KL_FLOOR = 1e-8  # nats, below which the axis does not go


@dataclass(frozen=True)
class Tile:
    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """`parts` are (kind, share of the widest bar in percent, what it is)."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    value: str


@dataclass(frozen=True)
class Piece:
    text: str
    level: int
    other: bool = False  # of new tokens: the likeliest one is another than dense's


@dataclass(frozen=True)
class Curve:
    """KL of N tokens as dots in a view box of N by 1: where the likeliest token is dense's, and where not."""

    same: str
    other: str
    num_tokens: int
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    values: Sequence[str]  # of each dot, in words
    pieces: Sequence[Piece]
    label: str
    column_tokens: int


def run_page(trace: Trace) -> str:
    """Return the whole page."""
    reads = trace.reads
    bytes_bars, bytes_table = _bytes(reads)
    template = templates().get_template("run.html")
    html: str = template.render(
        lead=_lead(trace),
        tiles=_tiles(trace),
        totals=_totals(trace),
        notes=_notes(trace),
        maps=_maps(trace) if reads.records else [],
        pieces=_pieces(trace),
        piece_tokens=_piece_tokens(reads),
        piece_values=values_of(_piece_shares(reads)),
        reads=reads,
        value_steps=VALUE_STEPS,
        level_names=LEVEL_NAMES,
        curve=_curve(trace),
        kl_names=_kl_names(),
        said=trace.text,
        bytes_bars=bytes_bars,
        bytes_table=bytes_table,
        even=bool(np.ptp(reads.kv_bytes) < 1 and np.ptp(reads.summary_bytes) < 1),
        times=_times(trace),
        settings=_settings(trace),
    )
    return html


def size(num_bytes: float) -> str:
    """Bytes with a binary unit and three digits or more."""
    unit = min(int(math.log2(num_bytes) // 10), 4) if num_bytes >= 1 else 0
    value = num_bytes / 1024**unit
    digits = 0 if unit == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{_SPACE}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def percent(share: float) -> str:
    """A share in percent, with two digits or more unless it is 0."""
    value = 100 * share
    return f"{value:.{'1f' if value >= 1 or not value else '2g'}}{_SPACE}%"


def milliseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}{_SPACE}ms"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _read_bytes(trace: Trace) -> tuple[float, float, float]:
    """(K and V, summaries, what dense attention reads) of the whole run, in bytes."""
    summary = trace.summary
    kv, summaries = summary["bytes_kv_read_est"], summary["bytes_summary_read"]
    return kv, summaries, (kv + summaries) / summary["bytes_ratio"]


def _lead(trace: Trace) -> str:
    kv, summaries, dense = _read_bytes(trace)
    ratio = trace.summary["bytes_ratio"]
    saved = f"{percent(1 - ratio)} of the bytes were saved" if ratio < 1 else "no bytes were saved"
    return (
        f"{Path(trace.settings['model']).name} wrote {plural(len(trace.text), 'token')} after a prompt of "
        f"{len(trace.prompt):,}, and EPS read {size(kv + summaries)} of its KV cache where dense attention reads "
        f"{size(dense)}: {saved}."
    )


def _tiles(trace: Trace) -> list[Tile]:
    summary, dense, kl = trace.summary, trace.dense_summary, trace.kl
    kv_share, summary_share = summary["kv_ratio"], summary["summary_ratio"]
    tiles = [
        Tile(
            percent(summary["bytes_ratio"]), "of dense attention's bytes read",
            f"K and V {percent(kv_share)}, summaries {percent(summary_share)}",
        )
    ]  # fmt: skip
    if kl and trace.agree:
        note = f"at most {max(kl):.2g}; the likeliest token is dense's at {sum(trace.agree)} of {len(kl)}"
        tiles.append(Tile(f"{np.mean(kl):.2g} nats", "mean KL to dense attention", note))
    if trace.dense_text is not None:
        parted = next((i for i, (a, b) in enumerate(zip(trace.text, trace.dense_text, strict=False)) if a != b), None)
        shorter = min(len(trace.text), len(trace.dense_text))
        at = shorter if parted is None and len(trace.text) != len(trace.dense_text) else parted
        value, label = (
            ("same text", "as dense attention wrote")
            if at is None
            else (f"token {at + 1}", "is where the text differs from dense attention's")
        )
        tiles.append(Tile(value, label, f"of {plural(len(trace.text), 'new token')}"))
    if summary["decode_ms_p50"] is not None:
        note = "" if dense is None else f"dense {milliseconds(dense['decode_ms_p50'])}, in the same run"
        tiles.append(Tile(milliseconds(summary["decode_ms_p50"]), "median decode step", note))
    return tiles


def _totals(trace: Trace) -> list[Bar]:
    kv, summaries, dense = _read_bytes(trace)
    most = max(kv + summaries, dense)
    return [
        Bar("dense", [("dense", 100 * dense / most, "K and V")], size(dense)),
        Bar(
            "EPS",
            [("kv", 100 * kv / most, f"K and V, {size(kv)}"),
             ("summary", 100 * summaries / most, f"summaries, {size(summaries)}")],
            size(kv + summaries),
        ),
    ]  # fmt: skip


def _notes(trace: Trace) -> list[str]:
    """Return what a reader must know of the maps: what is left out, what is put together."""
    reads, notes = trace.reads, []
    num_steps, recorded = trace.summary["steps"], len(trace.reads.records)
    if recorded < num_steps:
        why = "the others ran as one piece or were dense"
        notes.append(f"The maps are of {recorded:,} of {num_steps:,} steps, which ran layer by layer; {why}.")
    if recorded and (reads.tokens_read == reads.tokens_read.max()).all():
        notes.append("Every step read every token: the budget covers the whole prompt.")
    if reads.column_tokens > 1:
        notes.append(f"A column of the maps is the mean of {reads.column_tokens:,} tokens.")
    if _piece_tokens(reads) > 1:
        notes.append(f"The text is coloured in pieces of {_piece_tokens(reads):,} tokens.")
    return notes


# --- which tokens were read -------------------------------------------------------------------------------------------


def _maps(trace: Trace) -> list[HeatMap]:
    reads = trace.reads
    by_layer, by_step = reads.columns(reads.shares), np.stack(reads.by_step)
    together = -(-len(by_step) // MAX_ROWS)
    starts = np.arange(0, len(by_step), together)
    by_step = np.add.reduceat(by_step, starts, axis=0) / np.diff([*starts, len(by_step)])[:, None]
    heads = f"{plural(reads.session.spec.num_kv_heads, 'kv head')}, {plural(len(reads.records), 'step')}"
    layers, steps, x_ticks = len(by_layer), len(reads.records), ticks(1, reads.num_tokens)
    numbers = [record.step for record in reads.records]  # of the new tokens
    y_ticks = [
        Tick(tick.at, tick.percent * steps / together / len(by_step), f"{numbers[tick.at - 1] + 1:,}")
        for tick in ticks(1, steps)
    ]
    names = []
    for start in starts.tolist():
        of_row = numbers[start : start + together]
        text = "".join(trace.text[number] for number in of_row)
        until = f"–{of_row[-1] + 1:,}" if len(of_row) > 1 else ""
        names.append(f"new token{'s' * (len(of_row) > 1)} {of_row[0] + 1:,}{until} “{text}”")
    of_layers = ("layers", "layer", heads, by_layer, ticks(0, layers - 1), [f"layer {i}" for i in range(layers)])
    of_steps = ("steps", "new token", f"{plural(layers, 'layer')}, kv heads", by_step, y_ticks, names)
    return [
        HeatMap(
            key, f"share of ({whose}) that read each part of the prompt, by {y}", len(shares), shares.shape[1],
            paths_of(levels_of(shares)), profile_of(shares.mean(axis=0)), values_of(shares), y, y_of, x_ticks, rows,
        )
        for key, y, whose, shares, y_of, rows in (of_layers, of_steps)
    ]  # fmt: skip


def _piece_tokens(reads: Reads) -> int:
    return -(-reads.num_tokens // MAX_PIECES)


def _piece_shares(reads: Reads) -> np.ndarray:
    """Return the share of the (layer, step, kv head)s that read a token, mean over each piece."""
    shares = reads.shares.mean(axis=0)
    starts = np.arange(0, reads.num_tokens, _piece_tokens(reads))
    sums: np.ndarray = np.add.reduceat(shares, starts)
    return sums / np.diff([*starts, reads.num_tokens])


def _pieces(trace: Trace) -> list[Piece]:
    together = _piece_tokens(trace.reads)
    return [
        Piece("".join(trace.prompt[i * together : (i + 1) * together]), level)
        for i, level in enumerate(levels_of(_piece_shares(trace.reads)).tolist())
    ]


# --- KL along the text ------------------------------------------------------------------------------------------------


def _kl_names() -> list[str]:
    limits = [f"{limit:g}" for limit in KL_LIMITS]
    return [f"up to {limits[0]}", *(f"up to {limit}" for limit in limits[1:]), f"above {limits[-1]}"]


def _power(exponent: int) -> str:
    """A power of ten as a label."""
    return f"{10.0**exponent:g}" if -4 < exponent < 4 else "10" + str(exponent).translate(_SUPERSCRIPTS)


def _curve(trace: Trace) -> Curve | None:
    """Return the KL along the dense run's text; None where it was not measured. Of a long text each dot is the largest
    KL of several tokens."""
    if trace.kl is None or trace.agree is None or trace.dense_text is None:
        return None
    kl, together = np.array(trace.kl), -(-len(trace.kl) // MAX_PIECES)
    lowest = max(float(kl[kl > 0].min(initial=KL_LIMITS[-1])), KL_FLOOR)
    low, high = math.floor(math.log10(lowest)), max(math.ceil(math.log10(max(float(kl.max()), lowest))), -1)
    low = min(low, high - 2)
    heights = (np.log10(np.maximum(kl, 10.0**low)) - low) / (high - low)
    dots: dict[bool, list[str]] = {True: [], False: []}
    starts = range(0, len(kl), together)
    for start in starts:
        part = slice(start, start + together)
        dots[all(trace.agree[part])].append(f"M{start / together + 0.5:g} {1 - heights[part].max():.3f}h0")
    levels = np.searchsorted(KL_LIMITS, kl).tolist()
    pieces = [Piece(*one) for one in zip(trace.dense_text, levels, (not same for same in trace.agree), strict=True)]
    every = max(1, -(-(high - low) // 5))
    y_ticks = [Tick(at, 100 * (high - at) / (high - low), _power(at)) for at in range(low, high + 1, every)]
    return Curve(
        "".join(dots[True]), "".join(dots[False]), len(starts), ticks(1, len(kl)), y_ticks,
        [f"{value:.2g}" for value in trace.kl], pieces,
        f"KL to dense attention at each of {len(kl):,} tokens of the dense run's text, from {kl.min():.2g} to "
        f"{kl.max():.2g} nats", together,
    )  # fmt: skip


# --- bytes and times by layer -----------------------------------------------------------------------------------------


def _bytes(reads: Reads) -> tuple[list[Bar], Table]:
    """Bytes that a step reads in each layer, mean over steps, as bars and in numbers."""
    num_steps = max(len(reads.records), 1)
    kv, summaries = reads.kv_bytes / num_steps, reads.summary_bytes / num_steps
    whole = kv.sum(axis=1) + summaries
    most = max(float(whole.max()), 1.0)
    bars = [
        Bar(
            str(layer),
            [(f"kv{head % 2}", 100 * of_head / most, f"kv head {head}: {size(of_head)}")
             for head, of_head in enumerate(kv[layer].tolist())]
            + [("summary", 100 * summaries[layer] / most, f"summaries: {size(summaries[layer])}")],
            size(whole[layer]),
        )
        for layer in range(len(kv))
    ]  # fmt: skip
    heads = [f"kv head {head}" for head in range(kv.shape[1])]
    rows = [(bar.name, *(what.split(": ")[1] for _, _, what in bar.parts), bar.value) for bar in bars]
    return bars, Table(("layer", *heads, "summaries", "all"), rows, "Bytes that a step reads, mean over the steps.")


def _times(trace: Trace) -> dict[str, Any] | None:
    """Return the bars of the recorded step of median time, whole and by layer; None where no step was timed by
    layer."""
    reads = trace.reads
    timed = [record for record in steady(reads.records) if record.timed and record.decode_ms is not None]
    if not timed:
        return None
    record = sorted(timed, key=lambda one: one.decode_ms or 0.0)[(len(timed) - 1) // 2]
    step_ms, layer_ms = record.decode_ms or 0.0, reads.layer_ms[reads.records.index(record)]
    select_ms, attend_ms = layer_ms.sum(axis=0).tolist()
    rest_ms = max(step_ms - select_ms - attend_ms, 0.0)
    dense_ms = None if trace.dense_summary is None else trace.dense_summary["decode_ms_p50"]
    most = max(step_ms, dense_ms or 0.0)
    parts = (("select", "selection", select_ms), ("attend", "attention", attend_ms), ("rest", "the rest", rest_ms))
    whole = [Bar("EPS", [(kind, 100 * ms / most, f"{name} {milliseconds(ms)}") for kind, name, ms in parts],
                 milliseconds(step_ms))]  # fmt: skip
    if dense_ms is not None:
        whole.append(Bar("dense", [("dense", 100 * dense_ms / most, "a dense step")], milliseconds(dense_ms)))
    widest = max(float(layer_ms.sum(axis=1).max()), 1e-9)
    layers = [
        Bar(
            str(layer),
            [("select", 100 * select / widest, f"selection {milliseconds(select)}"),
             ("attend", 100 * attend / widest, f"attention {milliseconds(attend)}")],
            milliseconds(select + attend),
        )
        for layer, (select, attend) in enumerate(layer_ms.tolist())
    ]  # fmt: skip
    rows = [(bar.name, *(part[2].split(" ", 1)[1] for part in bar.parts), bar.value) for bar in layers]
    table = Table(("layer", "selection", "attention", "both"), rows, f"Times of step {record.step + 1}.")
    said = f"step {record.step + 1} of {trace.summary['steps']:,}, the one of median time"
    return {"whole": whole, "layers": layers, "table": table, "parts": parts, "said": said}


def _settings(trace: Trace) -> list[tuple[str, str]]:
    reads, spec = trace.reads, trace.reads.session.spec
    shape = f"{plural(spec.num_layers, 'layer')}, {spec.num_heads} query and {spec.num_kv_heads} kv heads"
    return [
        *trace.settings.items(),
        ("shape", f"{shape} of {spec.head_dim} dimensions"),
        ("prompt", plural(reads.num_tokens, "token")),
        ("new", plural(len(trace.text), "token")),
        ("prefill", milliseconds(trace.summary["prefill_ms"])),
    ]
