"""Makes a table of every method at equal total bytes, on the demo model or another, at each context length.

    python scripts/experiments/methods/run.py -o methods.jsonl            (half an hour on 2 cores)
    python scripts/experiments/methods/run.py --model DIR --text prose --chat -o FILE    (another text, needles in chat)

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on where the same is asked again: contexts that it had finished lie in OUTPUT.part until all of them are. Experiments
make their tables with `main(NAME, MODULE)`.
"""

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.cli.numbers import SEED, TOKENS, argument
from eps_core.decode.heads import model_fingerprint
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.io import outputs
from eps_core.io.resumable import ResumableFile
from eps_core.load import load_backend
from eps_core.metrics.provenance import provenance
from eps_core.metrics.terminal import Progress, duration
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.models.hub import resolve_model
from experiments.methods import curves
from experiments.methods.texts import KINDS


@cache
def _session(model: Path, backend: str, device: str) -> Session:
    return Session.open(model, backend, device, "float32", "bfloat16")


IDENTITY = ("model_id", "cache_dtype", "compute_dtype", "corpus", "asked")  # of runs that go on with each other


def _document(
    suite: str, model: Path, backend: str, device: str, plan: curves.Documents, kind: str, index: int
) -> tuple[str, Any, bool]:
    return kind, *importlib.import_module(suite).tally_document(_session(model, backend, device), plan, kind, index)


def main(name: str | None = None, module: str = "experiments.methods.curves", usage: str | None = __doc__) -> None:
    """Run the command line of a table. `module` defines `Plan`, `tally_document`, `table_cells` and `markdown`, as
    `curves` does, and `arguments` and `plan` where it has flags of its own. `name` is that of an experiment and of its
    results; None makes tables of methods, whose name is that of the set of variants. `usage` is what --help begins
    with."""
    suite = importlib.import_module(module)
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", type=argument(TOKENS), nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--needles", type=argument(TOKENS), default=50)
    parser.add_argument("--texts", type=argument(TOKENS), default=6)
    parser.add_argument(
        "--long", type=argument(TOKENS), default=12288, help="contexts from here on get a third of the documents"
    )
    parser.add_argument("--text", choices=KINDS, default="code", help="kind of text, of haystacks, too (code)")
    parser.add_argument("--chat", action="store_true", help="ask for needles in the model's chat template")
    parser.add_argument("--text-steps", type=argument(TOKENS), default=64)
    own = suite.arguments(parser) if hasattr(suite, "arguments") else ()
    parser.add_argument("--seed", type=argument(SEED), default=0)
    parser.add_argument("--jobs", type=argument(TOKENS), default=os.cpu_count(), help="processes, one thread each")
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, help="(results/NAME.jsonl)")
    args = parser.parse_args()
    name = name or args.variants
    changed = [flag for flag in ("model", "text", "chat", *own) if getattr(args, flag) != parser.get_default(flag)]
    require(
        args.out is not None or not changed,
        f"--{', --'.join(changed)} would land on the table of all variants on the demo model: add -o FILE",
    )
    args.out = args.out or Path("results", f"{name}.jsonl")
    outputs.check({"-o": args.out}, {"--model": args.model})

    os.environ["OMP_NUM_THREADS"] = "1"
    path = resolve_model(args.model, weights=False)
    asked = {flag: value for flag, value in vars(args).items() if flag not in ("model", "contexts", "jobs", "out")}
    asked["arms"] = name
    first = {
        "type": "run",
        "kind": "table",
        "command": " ".join(["python", *sys.argv]),
        **provenance(load_backend(args.backend).versions()),
        "device": args.device,
        "cpu_count": os.cpu_count(),
        "model": args.model.name,
        "model_id": model_fingerprint(path),
        "head_dim": read_spec(path).head_dim,
        "cache_dtype": "bfloat16",
        "compute_dtype": "float32",
        "seed": args.seed,
        "corpus": KINDS[args.text],
        "asked": asked,
    }
    started = time.time()
    with outputs.Output(args.out) as target:
        part = None if target.file is None else target.file.with_name(f"{target.file.name}.part")
        with outputs.Output(part or args.out) as output, ResumableFile(output, first, IDENTITY) as lines:
            _tables(suite, args, first["head_dim"], lines)
        if part is not None:
            with target.replacing() as whole:
                whole.write(part.read_text("utf-8"))
            part.unlink()
    print(json.dumps({"out": str(args.out), "seconds": round(time.time() - started)}))


def _tables(suite: Any, args: argparse.Namespace, head_dim: int, lines: ResumableFile) -> None:
    """Writes and prints the table of every context that `lines` do not hold yet."""
    source = (suite.__name__, args.model, args.backend, args.device)
    there = {line["context_tokens"] for line in lines.found if line.get("type") == "context"}
    # spawned, so that every process starts with one thread
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for context in args.contexts:
            if context in there:
                print(f"\nContext {context}: measured before\n")
                continue
            part = 3 if context >= args.long else 1
            needles, texts = -(-args.needles // part), -(-args.texts // part)
            same = {"text_steps": args.text_steps, "seed": args.seed, "text": args.text, "chat": args.chat}
            common = {"context_tokens": context, "num_needles": needles, "num_texts": texts, **same}
            plan = suite.plan(args, **common) if hasattr(suite, "plan") else suite.Plan(**common)
            started = time.time()
            futures = [pool.submit(_document, *source, plan, kind, index) for kind, index in plan.documents()]
            results = []
            with Progress(f"context {context}:", "documents") as progress:
                for future in futures:
                    results.append(future.result())
                    progress(len(results), len(futures), f"{duration(time.time() - started)} so far")
            cells = suite.table_cells(plan, head_dim, results)
            for cell in cells:
                lines.write_once({"type": "cell", **(cell if isinstance(cell, dict) else asdict(cell))})
            needles_dense = sum(kind == "needle" and right for kind, _, right in results)
            lines.write({"type": "context", "context_tokens": context, "num_needles": needles, "dense": needles_dense})
            print(f"\nContext {context}: dense answers {needles_dense} of {needles} needles\n")
            print(suite.markdown(cells), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
