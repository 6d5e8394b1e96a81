"""Measures what editing a cached sequence costs: KL against the edited text recomputed, and which value is answered.

    python scripts/experiments/editing/run.py -o results/edit.jsonl            (some minutes on 2 cores)

Lines cut, paragraphs moved, lines computed alone and spliced in, in held-out text; then a needle's value that becomes
another one: overwritten in place in three ways, or by an erratum at the end. Prints two tables; writes a line an edit.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.cli.numbers import SEED, TOKENS, argument
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.io import outputs
from eps_core.metrics.provenance import provenance
from eps_core.metrics.terminal import Progress
from eps_core.models.config import DEMO_MODEL
from experiments.editing.measure import Plan, markdown, measure, records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="as of eps-proto [default: demo]")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=argument(TOKENS), default=Plan.context_tokens)
    parser.add_argument("--edits", type=argument(TOKENS), default=Plan.num_edits, help="of every kind")
    parser.add_argument("--steps", type=argument(TOKENS), default=Plan.num_steps, help="tokens compared after an edit")
    parser.add_argument("--seed", type=argument(SEED), default=Plan.seed)
    parser.add_argument("-o", "--output", dest="out", type=Path, default=Path("results/edit.jsonl"))
    args = parser.parse_args()
    outputs.check({"-o": args.out}, {"--model": Path(args.model) if args.model else DEMO_MODEL})
    session = Session.open(args.model, args.backend, args.device)
    plan = Plan(args.context, args.edits, args.steps, args.seed)
    with Progress("editing", "edits") as progress:
        results = list(measure(session, plan, progress))
    run = {"type": "run", "kind": "edit", "model": session.model, "backend": session.backend_name,
           "device": session.device, "dtype": session.dtype, "plan": asdict(plan)}  # fmt: skip
    with outputs.replacing(args.out) as file:
        for line in ({**run, **provenance(session.backend.versions())}, *records(results)):
            file.write(outputs.to_json(line) + "\n")
    print(markdown(results, plan.seed))


if __name__ == "__main__":
    sys.exit(exit_code(main))
