"""Measure sparse decode attention on a real pretrained model: KL against bytes, for EPS and for its peers.

    python scripts/experiments/real/run.py --model DIR --context 4096 --documents 8 --steps 64 -o rows.jsonl
    python scripts/experiments/real/run.py --tables -o rows.jsonl    # tables of all cells that are in it, as Markdown
    python scripts/experiments/real/run.py --tables cells -o rows.jsonl    # every method at every budget

EPS is the product itself, its peers are simulated (peers.py). Contexts are counted in the model's own tokens. Documents
that OUTPUT holds are not measured again, variant by variant.
"""

import pydoc_data.topics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from shared import appended, markdown_table, rows_of

from eps_core.config.cache import DTYPE_BYTES
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import WEIGHT_BITS
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.runner import DENSE, Document, Outcome, run_batch
from eps_core.evaluation.statistics import bootstrap_interval
from eps_core.metrics.provenance import provenance
from eps_core.tasks.corpus import corpus
from experiments.methods.curves import bytes_at_kl
from experiments.real.peers import FP8, simulate

BUDGETS = (0.02, 0.03, 0.05, 0.08, 0.125, 0.2, 0.3)  # shares of the tokens
KINDS = ("code", "prose", "code", "chat")


def text(kind: str, answer_chars: int | None = 1500) -> str:
    """Return the text of a kind: code of the standard library, prose and ChatML turns of the language reference, whose
    answers are at most so long."""
    if kind == "code":
        return corpus().decode("ascii")
    topics = pydoc_data.topics.topics
    if kind == "prose":
        return "\n".join(topics.values())
    turns = "<|im_start|>user\nExplain {} in Python.<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    return "".join(turns.format(name, said.strip()[:answer_chars]) for name, said in topics.items())


def documents(session: Session, context: int, steps: int, number: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (kind, tokens): `context` prompt tokens and the `steps` that decode is fed."""
    encoded = {kind: session.encode(text(kind), special=False) for kind in dict.fromkeys(KINDS[:number])}
    for index in range(number):
        kind, rng = KINDS[index % len(KINDS)], np.random.default_rng([seed, index])
        tokens, length = encoded[kind], context + steps
        if kind == "chat" and len(tokens) <= length:
            tokens = encoded[kind] = session.encode(text(kind, None), special=False)
        require(len(tokens) > length, f"--context {context}: the {kind} text has {len(tokens)} tokens: lower it")
        start = int(rng.integers(0, len(tokens) - length))
        yield kind, tokens[start : start + length]


def variants(budgets: list[float]) -> dict[tuple[str, float | None], EpsConfig]:
    """Return EPS at each budget, its default, and what else of ours stands in the table."""
    return {
        **{("EPS", share): EpsConfig.of(method="rq", budget=share) for share in budgets},
        **{("EPS meanstd", share): EpsConfig.of(method="meanstd", budget=share) for share in budgets},
        ("EPS default", None): EpsConfig.of(method="rq"),
        ("EPS default, by the largest head", None): EpsConfig.of(method="rq", combine="max"),
        ("EPS default on a GPU", None): EpsConfig.of(method="rq").for_device("cuda"),
    }


def measure(
    session: Session, tokens: list[int], steps: int, configs: dict[tuple[str, float | None], EpsConfig],
    peers: list[float],
) -> list[dict]:  # fmt: skip
    """Return the rows of one document: of `configs`, then of the peers at each budget of `peers`."""
    prefixes, document = [session.prefix(tokens[: len(tokens) - steps])], Document.along(tokens, steps)
    dense = run_batch(session, [document], {DENSE: EpsConfig()}, prefixes)
    found = run_batch(session, [document], configs, prefixes, dense[DENSE])
    rows = [row_of(name, found[name, share], share) for name, share in configs]
    if not peers:
        return rows
    with torch.inference_mode():
        return rows + simulate(session, prefixes[0].keys_values, tokens, steps, peers)


def of_weights(session: Session, tokens: list[int], steps: int, names: list[str]) -> list[dict]:
    """Return the rows of one document decoded with quantised weights, dense and by EPS's default, against dense
    decoding with the full ones; `bytes` are those of weights, over bfloat16."""
    prefixes, document = [session.prefix(tokens[: len(tokens) - steps])], Document.along(tokens, steps)
    dense, rows = run_batch(session, [document], {DENSE: EpsConfig()}, prefixes)[DENSE], []
    for name in names:
        bits = WEIGHT_BITS[name]
        assert bits is not None  # flags take no other
        decoder = session.decoder.quantised(bits)
        share = decoder.model.weight_bytes / session.decoder.model.weight_bytes * DTYPE_BYTES[session.dtype] / 2
        configs = {name: EpsConfig(), f"{name}, EPS default": EpsConfig.of(method="rq")}
        found = run_batch(session, [document], configs, prefixes, dense, decoder=decoder)
        rows += [row_of(method, one) | {"bytes": share} for method, one in found.items()]
    return rows


def row_of(method: str, outcome: Outcome, budget: float | None = None) -> dict:
    read, full = outcome.bytes_read()
    kl, agree = outcome.along_text()
    return {"method": method, "budget": budget, "bytes": read / full, "kl": kl, "agree": agree}


ORDER = ("EPS", "EPS meanstd", "Quest", "UNIQUE", "1-bit codes", "oracle")
# EPS over what a peer reads, in what: claimed on models that we trained, and at most, by the project's goals
OVER = (
    ("bytes over Quest's", "Quest", "bytes", "0.20", "at most 0.35"),
    ("bytes over UNIQUE's", "UNIQUE", "bytes", "0.23", "at most 0.5"),
    ("bytes over 1-bit codes'", "1-bit codes", "bytes", "-", "at most 0.8"),
    ("tokens over the oracle's", "oracle", "budget", "-", "at most 1.5"),
)
Cells = dict[tuple[str, int], list[dict]]  # rows by model and context
Known = tuple[float | None, str]  # a value, and how it is known: measured, < or > it, or - for none


def crossing(rows: list[dict], kl: float = 0.01, by: str = "bytes") -> Known:
    """Return the share of the dense bytes, or of the tokens (`by` budget), at a mean KL, of one method's rows of one
    cell."""
    points: dict[float, list[dict]] = {}
    for row in rows:
        points.setdefault(row["budget"], []).append(row)
    return bytes_at_kl(
        [(float(np.mean([row[by] for row in same])), joined(same, "kl").mean()) for same in points.values()], kl
    )


def over(one: Known, other: Known) -> Known:
    """Return one value over another; a bound where either is one, none where bounds contradict each other."""
    if one[0] is None or other[0] is None:
        return None, "-"
    signs = {one[1], {"<": ">", ">": "<"}.get(other[1], other[1])} - {"measured"}
    return (one[0] / other[0], signs.pop() if signs else "measured") if len(signs) < 2 else (None, "-")


def said(known: Known) -> str:
    value, how = known
    return "-" if value is None else f"{'' if how == 'measured' else how + ' '}{value:.3f}"


def joined(rows: list[dict], name: str) -> np.ndarray:
    """Return the values of all steps of all documents: `kl` in nats, or `agree`, whether EPS ranks dense's next token
    first."""
    if name == "kl":
        return np.concatenate([row["kl_micronats"] for row in rows]) / 1e6
    return np.concatenate([~np.isin(np.arange(len(row["kl_micronats"])), row["disagreed"]) for row in rows])


def numbers(rows: list[dict]) -> dict[str, str]:
    """Return the figures of all steps of all documents that tables share."""
    kl = joined(rows, "kl")
    return {
        "bytes": f"{np.mean([row['bytes'] for row in rows]):.3f}", "kl": f"{kl.mean():.4f}",
        "p99": f"{np.quantile(kl, 0.99):.3f}", "largest": f"{kl.max():.3f}",
        "top-1": f"{joined(rows, 'agree').mean():.3f}",
    }  # fmt: skip


def of_method(rows: list[dict], method: str) -> list[dict]:
    return [row for row in rows if row["method"] == method]


def by_cell(rows: list[dict]) -> Cells:
    """Return rows by cell: SmolLM2 first, contexts rising."""
    cells: Cells = {}
    for row in sorted(rows, key=lambda row: (row["model"] != "smollm2", row["model"], row["context_tokens"])):
        cells.setdefault((row["model"], row["context_tokens"]), []).append(row)
    return cells


def compared(cells: Cells) -> Cells:
    return {cell: rows for cell, rows in cells.items() if of_method(rows, "oracle")}


def titles(cells: Cells) -> list[str]:
    return [f"{model}, {context:,}" for model, context in cells]


def documents_by_steps(rows: list[dict]) -> str:
    steps = sorted({len(row["kl_micronats"]) for row in rows})
    return f"{len({(row['context_tokens'], row['document']) for row in rows})} x {' or '.join(map(str, steps))}"


def peers_table(cells: Cells) -> str:
    """Return the share of the dense bytes at a mean KL of 0.01, by method and cell."""
    cells = compared(cells)
    measured = ([row for row in rows if row["method"] in ORDER] for rows in cells.values())
    rows = [["documents x steps", *map(documents_by_steps, measured)]]
    rows += [[name, *(said(crossing(of_method(same, name))) for same in cells.values())] for name in ORDER]
    return markdown_table(["bytes at a KL of 0.01", *titles(cells)], rows)


def claims_table(cells: Cells) -> str:
    """Return what was claimed on models that we trained, what is aimed at, and what was measured, by cell."""
    cells = compared(cells)
    default = [of_method(same, "EPS default") for same in cells.values()]

    def shown(spec: str, of: Callable[[np.ndarray], float], which: str = "kl") -> list[str]:
        return [format(of(joined(one, which)), spec) if one else "-" for one in default]

    crossings = [said(crossing(of_method(same, "EPS"))) for same in cells.values()]
    rows = [["bytes at a KL of 0.01", "0.037", "-", *crossings]]
    for label, name, by, claimed, goal in OVER:
        both = [[crossing(of_method(same, one), by=by) for one in ("EPS", name)] for same in cells.values()]
        rows.append([label, claimed, goal, *(said(over(*pair)) for pair in both)])
    rows += [
        ["default: mean KL", "0.005", "at most 0.01", *shown(".4f", np.mean)],
        ["default: p99 over the mean", "-", "at most 10", *shown(".1f", lambda kl: np.quantile(kl, 0.99) / kl.mean())],
        ["default: largest KL of a step", "-", "at most 1", *shown(".3f", np.max)],
        ["default: top-1 agreement", "-", "at least 0.97", *shown(".3f", np.mean, "agree")],
    ]
    return markdown_table(["EPS", "claimed before", "goal", *titles(cells)], rows)


def default_table(cells: Cells) -> str:
    """Return how far the default moves the next token, by cell and kind of text; contexts at which every step is dense
    share a row."""
    kinds = tuple(dict.fromkeys(KINDS))
    groups: dict[tuple[str, int | None], list[dict]] = {}
    for (model, context), same in cells.items():
        if own := of_method(same, "EPS default"):
            dense = all(row["bytes"] == 1 for row in own)
            groups.setdefault((model, None if dense else context), []).extend(own)
    rows = []
    for (model, _), own in groups.items():
        contexts, (num_bytes, kl, *ends) = sorted({row["context_tokens"] for row in own}), numbers(own).values()
        each = [[row for row in own if row["kind"] == kind] for kind in kinds]
        rows.append([
            model, " to ".join(f"{context:,}" for context in dict.fromkeys((contexts[0], contexts[-1]))),
            documents_by_steps(own), num_bytes, kl, *(numbers(one)["kl"] if one else "-" for one in each), *ends,
        ])  # fmt: skip
    head = ["model", "context", "documents x steps", "bytes", "mean KL", *(f"of {kind}" for kind in kinds)]
    return markdown_table([*head, "p99", "largest", "top-1"], rows)


def fp8_table(cells: Cells) -> str:
    """Return an FP8 cache beside EPS's default, by cell, and the bytes at which EPS has the mean KL of that cache."""
    rows = []
    for (model, context), same in compared(cells).items():
        codes, default = of_method(same, FP8), of_method(same, "EPS default")
        num_bytes, kl, p99, _, top = numbers(codes).values()
        its_bytes, its_kl, its_p99, _, its_top = numbers(default).values()
        at = crossing(of_method(same, "EPS"), joined(codes, "kl").mean())
        rows.append([
            model, f"{context:,}", f"{num_bytes}, {its_bytes}", f"{kl}, {its_kl}", f"{p99}, {its_p99}",
            f"{top}, {its_top}", said(at),
        ])  # fmt: skip
    head = ["model", "context", "bytes: FP8, EPS", "mean KL", "p99", "top-1", "EPS's bytes at FP8's KL"]
    return markdown_table(head, rows)


def weights_table(cells: Cells) -> str:
    """Return how far quantised weights move the next token, dense and with EPS's default, by cell; bytes are those of
    weights, over bfloat16."""
    rows = []
    for (model, context), same in cells.items():
        for name in dict.fromkeys(row["method"] for row in same if row["method"] in WEIGHT_BITS):
            own, sparse = of_method(same, name), of_method(same, f"{name}, EPS default")
            num_bytes, kl, p99, _, top = numbers(own).values()
            figures = documents_by_steps(own), num_bytes, kl, p99, top, numbers(sparse)["kl"]
            rows.append([model, f"{context:,}", name, *figures])
    head = ["model", "context", "weights", "documents x steps", "bytes", "mean KL", "p99", "top-1"]
    return markdown_table([*head, "mean KL with EPS"], rows)


def cell_table(rows: list[dict]) -> str:
    """Return every method at every budget of one cell, means with the 95 % interval over documents."""
    groups: dict[str, dict[Any, list[dict]]] = {}
    for row in sorted(rows, key=lambda row: not row["method"].startswith("EPS")):
        groups.setdefault(row["method"], {}).setdefault(row["budget"], []).append(row)
    lines = []
    for method, points in groups.items():
        for budget, same in points.items():
            interval = bootstrap_interval([float(joined([row], "kl").mean()) for row in same], 0)
            within = "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
            num_bytes, kl, *ends = numbers(same).values()
            lines.append([method, "its default" if budget is None else f"{budget:g}", num_bytes, kl, within, *ends])
    head = ["method", "of the tokens", "bytes", "mean KL", "95 % interval", "p99", "largest", "top-1"]
    return markdown_table(head, lines)


def cells_tables(cells: Cells) -> str:
    """Return a table of each cell in which peers were measured."""
    parts = []
    for (model, context), rows in compared(cells).items():
        number, steps = documents_by_steps(rows).split(" x ")
        heading = f"## {model}, {context:,} tokens, {number} document{'s' * (number != '1')} of {steps} steps"
        parts.append(f"{heading}\n\n{cell_table(rows)}")
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[Cells], str]] = {
    "peers": peers_table, "claims": claims_table, "default": default_table, "fp8": fp8_table, "weights": weights_table,
    "cells": cells_tables,
}  # fmt: skip

ALONE = ("cells", "weights")  # printed where they are named


def stored(row: dict) -> dict:
    """Return a row as OUTPUT keeps it, small: KLs in whole micronats, and of `agree` the steps that do not."""
    kept = {name: value for name, value in row.items() if name not in ("kl", "agree")}
    disagreed = [step for step, agree in enumerate(row["agree"]) if not agree]
    return {**kept, "kl_micronats": [round(1e6 * kl) for kl in row["kl"]], "disagreed": disagreed}


# ----------------------------------------------------------------- what answers.py has of the command, too -----------


def command_line(usage: str | None, documents: int, steps: str, tables: Sequence[str], unnamed: str) -> ArgumentParser:
    parser = ArgumentParser(description=usage, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (scripts/get_model.py)")
    parser.add_argument("--context", type=int, default=4096, help="prompt tokens (default 4096)")
    parser.add_argument("--documents", type=int, default=documents, help=f"(default {documents})")
    parser.add_argument("--steps", type=int, default=64, help=f"{steps} (default 64)")
    parser.add_argument("--seed", type=int, default=0)
    about = f"print these tables of OUTPUT, {unnamed} if none is named, and measure nothing"
    parser.add_argument("--tables", nargs="*", choices=tables, help=about)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSONL, rows of each document and variant")
    return parser


def opened(args: Namespace, decoded: int, *counts: str) -> Session:
    """Return the model of a command line, which decodes so many tokens. Raises ConfigError where one of `counts` is
    below 1, or the context has no room."""
    require(args.model is not None, "--model is missing: give a Hugging Face directory (scripts/get_model.py)")
    for name in ("context", "documents", *counts):
        require(getattr(args, name) >= 1, f"--{name} {getattr(args, name)} is below 1: give a positive number")
    session = Session.open(args.model, "cuda", "cpu", "float32", "bfloat16", method="rq")
    most = session.spec.max_context
    require(
        args.context + decoded <= most,
        f"--context {args.context} and {decoded} decoded tokens are beyond the model's {most} tokens: lower --context",
    )
    return session


@contextmanager
def resumed(
    args: Namespace, session: Session, types: Sequence[str], cell: dict[str, Any]
) -> Iterator[tuple[list[dict], Callable[[list[dict]], None]]]:
    """Yield the rows of a cell that OUTPUT holds, and what adds rows to both. A line says of this run what was asked,
    of paths their names alone."""
    there = [row for row in rows_of(args.output, *types) if cell.items() <= row.items()] if args.output.exists() else []
    asked = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    with appended(args.output) as out:
        out.write({"type": "run", **provenance(session.backend.versions()), "asked": asked})

        def add(rows: list[dict]) -> None:
            out.write(*rows)
            there.extend(rows)

        yield there, add


def main() -> None:
    unnamed = "all but `cells` and `weights`"
    parser = command_line(__doc__, 8, "decoded tokens of each document", tuple(TABLES), unnamed)
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), help="shares of the tokens")
    parser.add_argument("--default-only", action="store_true", help="no peers, and EPS at its default alone")
    parser.add_argument(
        "--weights", nargs="+", choices=[name for name, bits in WEIGHT_BITS.items() if bits], default=[],
        help="measure quantised weights of decode steps alone, dense and with EPS at its default",
    )  # fmt: skip
    args = parser.parse_args()
    if args.tables is not None:
        names, cells = (
            args.tables or [name for name in TABLES if name not in ALONE],
            by_cell(rows_of(args.output, "row")),
        )
        print("\n\n".join(TABLES[name](cells) for name in names))
        return
    session = opened(args, args.steps, "steps")
    cell = {"model": args.model.name, "context_tokens": args.context, "steps": args.steps, "seed": args.seed}
    budgets = [] if args.default_only or args.weights else args.budgets
    with resumed(args, session, ("row",), cell) as (there, add):
        done = {(row["document"], row["method"], row["budget"]) for row in there}
        texts = documents(session, args.context, args.steps, args.documents, args.seed)
        for index, (kind, tokens) in enumerate(texts):
            small = [name for name in args.weights if (index, name, None) not in done]
            asked = {} if args.weights else variants(budgets)
            configs = {one: config for one, config in asked.items() if (index, *one) not in done}
            peers = [share for share in budgets if (index, "oracle", share) not in done]
            if small:
                found = of_weights(session, tokens, args.steps, small)
            elif configs or peers:
                found = measure(session, tokens, args.steps, configs, peers)
            else:
                continue
            add([{"type": "row", **cell, "document": index, "kind": kind, **stored(row)} for row in found])
            print(f"document {index + 1} of {args.documents} ({kind})", file=sys.stderr)
    print(f"\n{args.model.name}, {args.context:,} tokens, documents x steps: {documents_by_steps(there)}\n")
    print(cell_table(there))


if __name__ == "__main__":
    sys.exit(exit_code(main))
