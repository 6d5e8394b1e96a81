"""Output for a person or a script: streamed text and progress, the aligned table, the last JSON line, memory sizes."""

import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.eviction.config import EvictionConfig

MB, MIB = 10**6, 2**20
PROGRESS_SECONDS = 10.0  # between lines where stderr is no terminal


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a screen that can move its cursor and show lines."""
    utf8 = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
    return stream.isatty() and utf8 and os.environ.get("TERM") != "dumb"


class TextStream:
    """Prints the text of tokens as they come, holding back characters whose bytes are not all there yet. The label goes
    before the first token and not earlier: until then the line belongs to the progress of the prefill."""

    def __init__(
        self, tokenizer: Any, write: Callable[[str], Any], label: str = "", skip_special_tokens: bool = True
    ) -> None:
        self.decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        self.write, self.label = write, label
        self.tokens: list[int] = []
        self.start = self.end = 0  # tokens [start, end) are printed and give the next ones their context

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.flush(final=False)

    def flush(self, final: bool = True) -> None:
        if self.label:
            self.write(self.label)
            self.label = ""
        before, now = self.decode(self.tokens[self.start : self.end]), self.decode(self.tokens[self.start :])
        if len(now) > len(before) and (final or not now.endswith("\ufffd")):
            self.write(now[len(before) :])
            self.start, self.end = self.end, len(self.tokens)


class Answer:
    """The text of one decode on `out` as its tokens come. On a terminal, the line below it says meanwhile how many
    tokens come in a second and how many bytes of the KV cache each reads; what stays is the text. A context manager,
    because that line hides the cursor."""

    def __init__(self, tokenizer: Any, out: TextIO, label: str) -> None:
        self.out, self.live, self.text = out, None, ""  # type: TextIO, Any, str
        self.stream = TextStream(tokenizer, self._write, label)
        self.num_tokens = 0
        self.first = 0.0, 0  # when the first tokens came, and how many

    def add(self, tokens: Sequence[int], bytes_read: int) -> None:
        """Show the tokens of one step, or of one round, which read `bytes_read` bytes of K, V and summaries."""
        for token in tokens:
            self.stream.add(token)
        self.num_tokens += len(tokens)
        now = time.monotonic()
        if self.num_tokens == len(tokens):
            self.first = now, self.num_tokens
        (then, before), speed = self.first, ""
        if now > then:
            speed = f"{(self.num_tokens - before) / (now - then):.1f} tokens/s, "
        if is_terminal(self.out):
            self._draw(f"{speed}{bytes_read / len(tokens) / MB:,.1f} MB of the KV cache read a token")

    def _write(self, piece: str) -> None:
        self.text += piece
        if not is_terminal(self.out):
            self.out.write(piece)
            self.out.flush()

    def _draw(self, status: str) -> None:
        from rich.console import Console, Group  # late: as in `Progress`
        from rich.live import Live
        from rich.text import Text

        if self.live is None:
            console = Console(file=self.out, force_terminal=True)
            self.live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self.live.start()
        width, height = self.live.console.size
        end = Text(self.text[-width * height :]).wrap(self.live.console, width)[2 - height :]
        below = Text(f"        {status}", style="dim", no_wrap=True, overflow="ellipsis")
        self.live.update(Group(*end, below), refresh=True)

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self.live is not None:
            self.live.stop()
        if kind is None or self.num_tokens:
            self.stream.flush()
            self.out.write(self.text + "\n" if is_terminal(self.out) else "\n")
            self.out.flush()


class Progress:
    """How far something is, on stderr: a bar on a terminal, which goes when the work ends; else a line now and then.

    Of tokens it also says how many a second, and the time left. A context manager, because a bar hides the cursor. The
    bar is drawn when it is told something and by no thread: it takes no time from what is measured.
    """

    def __init__(self, title: str, unit: str, stream: TextIO | None = None, every_s: float = PROGRESS_SECONDS) -> None:
        """Lines are at least `every_s` apart."""
        self.title, self.unit, self.every_s = title, unit, every_s
        self.stream = sys.stderr if stream is None else stream
        self.last = time.monotonic()
        self.first = self.last, 0  # when it was first told something, and what
        self.bar: Any = None

    def __call__(self, done: int, total: int, doing: str = "") -> None:
        text = f"{done:,} of {total:,} {self.unit}{self._speed(done, total)}" + (f", {doing}" if doing else "")
        if is_terminal(self.stream):
            self._draw(done, total, text)
        elif time.monotonic() - self.last >= self.every_s:
            self.stream.write(f"{self.title} {text}\n")
            self.stream.flush()
            self.last = time.monotonic()

    def _speed(self, done: int, total: int) -> str:
        """Tokens a second, and the time left: since the first report, which may count what was there already."""
        (then, before), now = self.first, time.monotonic()
        if not before:
            self.first = now, done
        if self.unit != "tokens" or done <= before or now <= then:
            return ""
        speed = (done - before) / (now - then)
        return f", {speed:,.0f}/s, {duration((total - done) / speed)} left"

    def _draw(self, done: int, total: int, text: str) -> None:
        from rich.console import Console  # late: most commands end without a bar
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        if self.bar is None:
            narrow = Column(no_wrap=True, overflow="ellipsis")
            columns = (TextColumn(self.title, markup=False), BarColumn(20))
            self.bar = Bar(
                *columns, TextColumn("{task.description}", markup=False, table_column=narrow),
                console=Console(file=self.stream, force_terminal=True), auto_refresh=False, transient=True,
                redirect_stdout=False,  # which may be a file
            )  # fmt: skip
            self.bar.add_task(text, total=total, completed=done)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done, total=total, description=text, refresh=True)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def table(rows: Sequence[Sequence[str]], header: Sequence[str], out: TextIO | None = None) -> str:
    """Aligned text for `out` (stdout), the first column to the left, the others to the right. On a terminal, columns
    that do not fit beside each other go on below, after the first one again."""
    out = sys.stdout if out is None else out
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    if is_terminal(out):
        return _rich_table(rows, header, widths)
    left = widths[0]
    return "\n".join(
        "  ".join([line[0].ljust(left), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))])
        for line in [header, ["-" * width for width in widths], *rows]
    )


def _rich_table(rows: Sequence[Sequence[str]], header: Sequence[str], widths: Sequence[int]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen = shutil.get_terminal_size().columns
    parts: list[list[int]] = []  # columns of each table, the first one left out
    for column in range(1, len(header)):
        used = widths[0] + sum(widths[i] + 2 for i in parts[-1]) if parts else screen
        if used + widths[column] + 2 > screen:
            parts.append([])
        parts[-1].append(column)
    texts = []
    for part in parts or [[]]:
        shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), border_style="dim")
        for column in (0, *part):
            shown.add_column(Text(header[column]), justify="right" if column else "left", overflow="fold")
        for row in rows:
            shown.add_row(*(Text(row[column]) for column in (0, *part)))
        console = Console(file=io.StringIO(), force_terminal=True, width=screen)
        console.print(shown)
        texts.append(console.file.getvalue().rstrip("\n"))  # type: ignore[attr-defined]
    return "\n\n".join(texts)


def describe(config: EpsConfig) -> str:
    """Return one line: the method, the policy and their settings."""
    if not config.cache_config.enabled:
        return "off: dense attention, nothing allocated"
    cache, read = config.cache_config, config.selection_config
    method, most = cache.method, f"{read.top_pages} groups"
    if cache.method_spec.coded:
        words = [f"1 bit a dimension about the mean of {cache.mean_tokens} tokens"]
        words += [f"{' and '.join(f'{share:g}' for share in read.cascade)} of each code first"] if read.cascade else []
        least = " or of twice what is read" if read.policy == "topk" and read.rescore < 1 else ""
        words += [f"a second bit of the best {read.rescore:g}{least}"] if read.rescore else []
        words += ["with bounds"] if cache.rq_bounds else []
        method += f" ({', '.join(words)})"
    elif cache.dim is not None:
        method += f" (dim {cache.dim})"
    if read.policy == "threshold":
        most = f"what is above a threshold (alpha {read.alpha:g}), at most {most}"
    elif read.top_pages is None:
        most = f"{read.budget:g} {'tokens' if read.budget > 1 else 'of the tokens'}"
        most += f", at least {read.budget_floor:,}" if read.budget_floor else ""
    more = f", bounded from {cache.bound_bits}-bit keys" if cache.bound_bits else ""
    more += f", strict (epsilon {read.epsilon:g})" if read.strict else ""
    if read.head_modes is not None:
        modes = [mode for layer in read.head_modes for mode in layer]
        more += f", {modes.count('sparse')} of {len(modes)} kv heads sparse"
    whose = "for each kv head" if read.scope == "kv-head" else "for all kv heads together"
    return (
        f"{method}, {'single tokens' if cache.S == 1 else f'groups of {cache.S} tokens'}; reads {most}, {whose}, "
        f"always the first {read.num_sink_tokens} and last {read.num_recent_tokens} tokens{more}"
    )


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)


def _times(summary: dict[str, Any] | None, name: str) -> str:
    if summary is None:
        return ""
    if summary[f"{name}_p50"] is None:
        return "-"
    return f"{summary[f'{name}_p50']:.2f} / {summary[f'{name}_p95']:.2f}"


def run_table(
    dense: dict[str, Any] | None,
    eps: dict[str, Any] | None,
    checks: Sequence[tuple[str, str | None, str | None]],
    layer: dict[str, Any] | None = None,
    out: TextIO | None = None,
    labels: tuple[str, str] = ("dense", "EPS"),
    hybrid: tuple[str, float] | None = None,
) -> str:
    """The sides that ran beside each other, from their summaries (`steps.summarise`); `checks` are rows (what,
    dense, EPS); `layer` is one layer of a large model (`bench.layer.Bench.headline`); `labels` name the columns;
    `hybrid`: where not all layers are sparse, which ones bytes speak of, and the ratio of the whole model's reads."""

    def row(name: str, key: str, form: str = ",.0f") -> Row:
        return (name, *(_number(side[key] if side else None, form) for side in (dense, eps)))  # type: ignore[return-value]

    known = eps or {}
    rounds, sides = "rounds" in known, [side for side in (dense, eps) if side]
    of = " a token" if rounds else ""
    left_out = [f"{side['warm_up_steps']} {'rounds' if 'rounds' in side else 'steps'}" for side in sides]
    warm_up = any(side["warm_up_steps"] for side in sides)
    left = f" (warm-up left out: {', '.join(dict.fromkeys(left_out))})" if warm_up else ""
    groups = (
        ("groups in all", "total"),
        ("  selected", "visited"),
        ("  skipped", "skipped"),
        ("  always selected", "always_selected"),
    )
    alone: list[Row] = [  # of runs without speculative decoding
        row("estimated mass skipped", "skipped_mass_mean", ".4f"),
        *_certified(eps),
        ("pre-pass ms, p50 / p95", "", _times(eps, "prepass_ms")),
        ("attention ms, p50 / p95", "", _times(eps, "attention_ms")),
    ]
    rows = [
        row("new tokens", "new_tokens"),
        *((name, left or "", right or "") for name, left, right in checks),
        row("KV bytes read", "bytes_kv_read_est"),
        row("summary bytes read", "bytes_summary_read"),
        row("bytes against dense" + (f", {hybrid[0]}" if hybrid else ""), "bytes_ratio", ".4f"),
        *([("  of the whole model's KV reads", "1.0000", f"{hybrid[1]:.4f}")] if hybrid else []),
        *_kept(eps),
        row("K bytes re-read to finalize", "bytes_k_reread"),
        *_shown([(name, known.get(f"pages_{key}"), ",.0f") for name, key in groups]),
        *_shown([("read amplification of union", known.get("union_amplification") or None, ".3f")]),
        *([*_certified(eps), *_rounds(known)] if rounds else alone),
        (f"decode ms{of}, p50 / p95{left}", _times(dense, "decode_ms"), _times(eps, "decode_ms")),
        row("tokens per second", "tokens_per_s", ".1f"),
        row("prefill ms", "prefill_ms"),
        *_layer(layer),
    ]
    kept = [0, *([1] if dense else []), *([2] if eps else [])]
    cells = [[cells[i] for i in kept] for cells in rows if any(cells[i] not in ("", "-") for i in kept[1:])]
    return table(cells, [("", *labels)[i] for i in kept], out)


Row = tuple[str, str, str]  # what, of the dense side, of the other one


def _shown(rows: Sequence[tuple[str, float | None, str]]) -> list[Row]:
    """Return the rows of (name, value of the sparse side, format) whose value is known."""
    return [(name, "", format(value, form)) for name, value, form in rows if value is not None]


def _kept(eps: dict[str, Any] | None) -> list[Row]:
    """Return the rows of a cache that evicts, or that holds quantized K and V."""
    if eps is None or eps.get("kept_ratio") in (None, 1):
        return []
    moved = [("  rows moved", eps["rows_moved"] or None, ",.0f"), ("  pages freed", eps["units_freed"] or None, ",.0f")]
    return [("bytes kept against dense", "1.0000", f"{eps['kept_ratio']:.4f}"), *_shown(moved)]


def _certified(eps: dict[str, Any] | None) -> list[Row]:
    """Return the rows of error bounds and audits, where there were any."""
    if eps is None:
        return []
    return _shown(
        [
            ("bounded mass skipped, at most", eps["skipped_mass_bound_max"], ".4f"),
            ("  true, largest audited", eps["skipped_mass_true_max"], ".4f"),
            ("bounded output error, at most", eps["output_error_bound_max"], ".4f"),
            ("heads extended", eps["extensions"] or None, ",.0f"),
            ("  groups added", eps["pages_extended"] or None, ",.0f"),
            ("audited steps", eps["audits"] or None, ",.0f"),
            ("  KL, mean", eps["audit_kl_mean"] if eps["audits"] else None, ".5f"),
            ("  alarms", eps["audit_alarms"] if eps["audits"] else None, ",.0f"),
        ]
    )


def _rounds(eps: dict[str, Any]) -> list[Row]:
    """Return the rows of speculative decoding."""
    accepted = "" if eps["acceptance"] is None else f"{eps['acceptance']:.3f} of {eps['drafted']:,}"
    return [
        ("rounds, with drafts", "", f"{eps['rounds']:,}, {eps['rounds_drafted']:,}"),
        ("  drafts accepted", "", accepted),
        ("  tokens a round", "", _number(eps["tokens_per_round"], ".2f")),
        *_shown(
            [
                ("  KL of a draft, mean", eps["audit_kl_mean"], ".5f"),
                ("  true mass skipped, mean", eps["skipped_mass_true_mean"], ".4f"),
            ]
        ),
        ("  fallbacks", "", ", ".join(f"{name} {count}" for name, count in eps["fallbacks"].items())),
    ]


def _layer(layer: dict[str, Any] | None) -> list[Row]:
    if layer is None:
        return []
    name = f"8B model's layer, {layer['method']}, {layer['context']:,} tokens: ms"
    return [
        (name, f"{layer['best_dense_ms']:.2f}", f"{layer['step_ms']:.2f}"),
        ("  bytes against dense", "1.0000", f"{layer['bytes_ratio']:.4f}"),
        ("  times as fast", "", f"{layer['speedup']:.1f}"),
    ]


def describe_verify(verify: SpeculativeConfig) -> str:
    """Return one line on how a run drafts and verifies."""
    drafts = f"up to {verify.most}, as they pay," if verify.draft is None else str(verify.draft)
    more = "" if verify.weights == "full" else f", drafted with {verify.weights} weights"
    return f"{verify.mode}: {drafts} drafts a round{more}"


def describe_keep(keep: EvictionConfig, num_tokens: int) -> str:
    """One line of how a run evicts, and what that is of a prompt of `num_tokens` tokens."""
    rows = keep.rows(num_tokens - 1)  # the last is read by the first step
    if keep.policy_spec.prompt:
        of = f"the prompt and {rows - num_tokens:,} new tokens"
    else:
        of = f"{keep.share:g} of the prompt's tokens" if keep.share <= 1 else f"{keep.share:,.0f} rows a head"
        of += f" ({'all' if rows >= num_tokens - 1 else f'{rows:,}'} of {num_tokens:,})"
    again = keep.policy_spec.while_decoding and keep.every
    more = f", again every {keep.every} tokens (compacted by {keep.compact})" if again else ""
    return f"{keep.policy}: {of}{more}, {keep.num_sink_tokens} + {keep.rule(rows).num_recent_tokens} tokens always"


_STEPS_JSON = (
    "bytes_summary_read", "kept_ratio", "rows_moved", "units_freed", "pages_total", "pages_visited", "pages_skipped",
    "pages_always_selected", "prepass_ms_p50", "skipped_mass_mean", "skipped_mass_bound_max", "skipped_mass_true_max",
    "audit_alarms", "extensions", "fallbacks",
)  # fmt: skip
_ROUNDS_JSON = (
    "bytes_summary_read", "bytes_kv_draft", "bytes_kv_verify", "weight_passes", "bytes_weights", "rounds",
    "rounds_drafted", "tokens_per_round", "tokens_per_round_histogram", "drafted", "accepted", "acceptance",
    "acceptance_by_depth", "offered_by_depth", "audit_kl_mean", "audit_tv_mean", "skipped_mass_true_mean",
    "top2_margin_min", "rolled_back", "fallbacks",
)  # fmt: skip


def outcome_json(
    tokens: list[int] | None,
    summary: dict[str, Any],
    config: EpsConfig | None = None,
    verify: SpeculativeConfig | None = None,
) -> dict[str, Any]:
    """Return one side of the last stdout line; `tokens` of one prompt, None of several. The dense side has no `config`,
    a side without speculative decoding no `verify`."""
    found = {
        "tokens": tokens,
        **{name: summary[name] for name in ("decode_ms_p50", "decode_ms_p95", "tokens_per_s")},
        "bytes_kv_read": summary["bytes_kv_read_est"],
    }
    if config is None:
        return found
    found |= {"method": config.cache_config.method, "policy": config.selection_config.policy}
    if verify is not None:
        found["verify"] = verify.to_dict()
    return found | {name: summary[name] for name in (_STEPS_JSON if verify is None else _ROUNDS_JSON)}
