"""Searches for the likeliest continuation of a prompt with several beams, densely and with EPS.

    python scripts/experiments/beams/run.py --beams 4

Prints one JSON object: of each side the texts found, best first, the units copied for beams, and the bytes read.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.cli.numbers import TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.compare import demo_document
from eps_core.io.outputs import to_json
from eps_core.metrics.steps import summarise
from experiments.beams.beams import Searched, room, search


def searched(session: Session, prompt: list[int], num_new: int, width: int, config: EpsConfig) -> dict[str, Any]:
    """Return the findings and reads of a search from one prompt."""
    cache, pool = session.cache(config.cache_config, room(len(prompt), num_new, width, config.cache_config.unit_tokens))
    found, stop = Searched(), session.spec.eos_token_ids
    steps = search(session.decoder, cache, pool, [prompt], num_new, width, found, config.selection_config, stop)
    summary = summarise(list(steps))
    return {
        "units_copied": sum(found.units_copied),
        "most_units_copied": max(found.units_copied, default=0),
        "bytes_ratio": summary["bytes_ratio"],
        "hypotheses": [
            {"text": session.decode(one.tokens), "score": one.score, **asdict(one)} for one in found.hypotheses[0]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as of eps-proto [default: demo]")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", help="[default: the demo's needle document]")
    parser.add_argument("--beams", type=argument(TOKENS), default=4)
    parser.add_argument("--max-new-tokens", type=argument(TOKENS), default=16)
    parser.add_argument("--method", default="rq", help="of EPS [default: rq]")
    args = parser.parse_args()
    session = Session.open(args.model, args.backend, args.device)
    (prompt,) = session.encode_prompts([args.prompt or demo_document().prompt], args.max_new_tokens)
    outcomes = {"dense": EpsConfig(), "eps": EpsConfig.of(method=args.method)}
    found = {
        name: searched(session, prompt, args.max_new_tokens, args.beams, config) for name, config in outcomes.items()
    }
    print(to_json({"model": session.model, "beams": args.beams, **found}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
