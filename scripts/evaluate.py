"""Makes the table of results/README.md: every method at equal total bytes, on the demo model, at each context length.

    python scripts/evaluate.py -o results/methods.jsonl            (half an hour on 2 cores)
    python scripts/evaluate.py --model DIR --text prose --chat -o FILE     (another text; needles in a chat template)
    python scripts/evaluate.py --arms memory -o results/memory.jsonl      (codes, eviction and EPS, alone and together)
    python scripts/evaluate.py --arms rewrites -o results/rewrites.jsonl  (other formats of K and V, by round trip)
    python scripts/evaluate.py --arms linear -o results/linear.jsonl      (linear attention's states, windows)
    python scripts/evaluate.py --arms sparse-verify -o results/sparse-verify.jsonl      (drafts judged over few tokens)

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on where the same is asked again: contexts that it had finished lie in OUTPUT.part until all of them are.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from eps_core.cli.numbers import PART, SEED, TOKENS, argument
from eps_core.decode.heads import model_fingerprint
from eps_core.decode.hub import resolve_model
from eps_core.decode.model import DEMO_MODEL, read_spec
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation import curves, memory, rewrites, sparse_verify
from eps_core.evaluation.curves import BYTE_BUDGETS, SETS
from eps_core.files import outputs
from eps_core.files.resumable import ResumableFile
from eps_core.load import load_backend
from eps_core.tasks.corpus import KINDS
from eps_core.telemetry.provenance import provenance
from eps_core.telemetry.terminal import Progress, duration


@cache
def _session(model: Path, backend: str, device: str) -> Session:
    return Session.open(model, backend, device, "float32", "bfloat16")


MEMORY, LINEAR, REWRITES, SPARSE = "memory", "linear", "rewrites", "sparse-verify"
IDENTITY = ("model_id", "cache_dtype", "compute_dtype", "corpus", "asked")  # of runs that go on with each other
SUITES = {MEMORY: memory, LINEAR: memory, REWRITES: rewrites, SPARSE: sparse_verify}


def _document(model: Path, backend: str, device: str, arms: str, plan: curves.Documents, kind: str, index: int):
    suite = SUITES.get(arms, curves)
    return kind, *suite.tally_document(_session(model, backend, device), plan, kind, index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", type=argument(TOKENS), nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument(
        "--arms",
        choices=(*SETS, *SUITES),
        default="methods",
        help="all methods, the parts of the default's codes, what it may read less, what of that pays, a first look, "
        "the default alone, the methods beside the first look, what is kept, what does not grow, other formats, or "
        "what verifies drafts",
    )
    parser.add_argument("--needles", type=argument(TOKENS), default=50)
    parser.add_argument("--texts", type=argument(TOKENS), default=6)
    parser.add_argument(
        "--long", type=argument(TOKENS), default=12288, help="contexts from here on get a third of the documents"
    )
    parser.add_argument("--text", choices=KINDS, default="code", help="kind of text, of haystacks, too (code)")
    parser.add_argument("--chat", action="store_true", help="ask for needles in the model's chat template")
    parser.add_argument("--text-steps", type=argument(TOKENS), default=64)
    parser.add_argument("--budgets", type=argument(PART), nargs="+", default=BYTE_BUDGETS)
    parser.add_argument(
        "--shares", type=argument(PART), nargs="+", default=memory.SHARES, help="of the prompt that policies keep"
    )
    parser.add_argument("--policies", choices=memory.SHARED, nargs="+", default=memory.SHARED, help="(all of them)")
    parser.add_argument("--seed", type=argument(SEED), default=0)
    parser.add_argument("--jobs", type=argument(TOKENS), default=os.cpu_count(), help="processes, one thread each")
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, help="(results/ARMS.jsonl)")
    args = parser.parse_args()
    require(
        args.arms == MEMORY or (args.policies, args.shares) == (memory.SHARED, memory.SHARES),
        f"--policies and --shares are of --arms {MEMORY}, not {args.arms}: drop them",
    )
    changed = [
        name
        for name in ("model", "policies", "shares", "text", "chat")
        if getattr(args, name) != parser.get_default(name)
    ]
    require(
        args.out is not None or not changed,
        f"--{', --'.join(changed)} would land on the table of all arms on the demo model: add -o FILE",
    )
    args.out = args.out or Path("results", f"{args.arms}.jsonl")
    args.policies, args.shares = (tuple(dict.fromkeys(given)) for given in (args.policies, args.shares))
    outputs.check({"-o": args.out}, {"--model": args.model})

    os.environ["OMP_NUM_THREADS"] = "1"
    path = resolve_model(args.model, weights=False)
    asked = {name: value for name, value in vars(args).items() if name not in ("model", "contexts", "jobs", "out")}
    first = {
        "type": "run",
        "kind": "table",
        "command": " ".join(["python", "scripts/evaluate.py", *sys.argv[1:]]),
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
            _tables(args, first["head_dim"], lines)
        if part is not None:
            with target.replacing() as whole:
                whole.write(part.read_text("utf-8"))
            part.unlink()
    print(json.dumps({"out": str(args.out), "seconds": round(time.time() - started)}))


def _tables(args: argparse.Namespace, head_dim: int, lines: ResumableFile) -> None:
    """Writes and prints the table of every context that `lines` do not hold yet."""
    source = (args.model, args.backend, args.device, args.arms)
    suite = SUITES.get(args.arms, curves)
    there = {line["context_tokens"] for line in lines.found if line.get("type") == "context"}
    # spawned, so that every process starts with one thread
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for context in args.contexts:
            if context in there:
                print(f"\nContext {context}: measured before\n")
                continue
            part = 3 if context >= args.long else 1
            needles, texts = -(-args.needles // part), -(-args.texts // part)
            size = context, needles, texts, args.text_steps
            kinds = {"seed": args.seed, "text": args.text, "chat": args.chat}
            if suite is memory:
                arms = memory.arms(args.shares, args.policies) if args.arms == MEMORY else memory.constant()
                plan = memory.Plan(*size, **kinds, arms=arms)
            elif suite is not curves:
                plan = suite.Plan(*size, **kinds)
            else:
                points = {"arms": SETS[args.arms], "byte_budgets": tuple(args.budgets)}
                plan = curves.Plan(*size, **kinds, **points)
            started = time.time()
            futures = [pool.submit(_document, *source, plan, kind, index) for kind, index in plan.documents()]
            results = []
            with Progress(f"context {context}:", "documents") as progress:
                for future in futures:
                    results.append(future.result())
                    progress(len(results), len(futures), f"{duration(time.time() - started)} so far")
            cells = suite.table_cells(plan, head_dim, results)
            for record in suite.records(cells):
                lines.write_once(record)
            needles_dense = sum(kind == "needle" and right for kind, _, right in results)
            lines.write({"type": "context", "context_tokens": context, "num_needles": needles, "dense": needles_dense})
            print(f"\nContext {context}: dense answers {needles_dense} of {needles} needles\n")
            print(suite.markdown(cells), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
