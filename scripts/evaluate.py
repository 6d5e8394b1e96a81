"""Makes the README's table: every method at equal total bytes, on the demo model, at each context length, in one run.

    python scripts/evaluate.py --out results/methods.jsonl            (about half an hour on 2 cores)

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from eps_core.evaluate import compare, markdown, records
from eps_core.interface import load_backend
from eps_core.model import load_tokenizer, read_spec

DEMO = Path(__file__).parent.parent / "eps_core" / "demo_model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--needles", type=int, default=50)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--text-steps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/methods.jsonl"))
    args = parser.parse_args()

    backend = load_backend(args.backend)
    decoder = backend.load_model(args.model, read_spec(args.model), "float32", args.device)
    tokenizer = load_tokenizer(args.model)
    partial = args.out.with_suffix(".partial")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    with partial.open("w") as out:
        run = {
            "type": "run",
            "command": " ".join(["python", "scripts/evaluate.py", *sys.argv[1:]]),
            "versions": backend.versions(),
            "device": args.device,
            "cpu_count": os.cpu_count(),
            "model": args.model.name,
            "cache_dtype": "bfloat16",
            "compute_dtype": "float32",
            "seed": args.seed,
            "git_commit": _commit(),
        }
        out.write(json.dumps(run) + "\n")
        for context in args.contexts:
            cells = list(
                compare(
                    backend,
                    decoder,
                    lambda text: tokenizer.encode(text).ids,
                    args.device,
                    context,
                    args.needles,
                    args.texts,
                    args.text_steps,
                    seed=args.seed,
                    progress=lambda line: print(f"{line} ({time.time() - started:.0f} s)", file=sys.stderr, flush=True),
                )
            )
            for record in records(cells):
                out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"\nContext {context}: dense answers {cells[0].needles_dense} of {cells[0].num_needles} needles\n")
            print(markdown(cells), flush=True)
    partial.replace(args.out)
    print(json.dumps({"out": str(args.out), "seconds": round(time.time() - started)}))


def _commit() -> str | None:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or None


if __name__ == "__main__":
    main()
