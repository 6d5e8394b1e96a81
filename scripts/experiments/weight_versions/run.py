"""Decodes a prompt, swaps the model's weights in the middle, and prints what each stage prefilled and how long it took.

    python scripts/experiments/weight_versions/run.py --model DIR --update DIR2 --method rq

Prints one JSON object. Without --update the same weights go on, so that the text is that of an uninterrupted decode.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.cli.numbers import TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.compare import demo_document
from eps_core.io.outputs import to_json
from experiments.weight_versions.versions import decode_across, with_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as of eps-proto [default: demo]")
    parser.add_argument("--update", type=Path, help="directory of the new weights [default: those of --model]")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prompt", help="[default: the demo's needle document]")
    parser.add_argument("--before", type=argument(TOKENS), default=8, help="new tokens before the update")
    parser.add_argument("--after", type=argument(TOKENS), default=8, help="new tokens after it")
    parser.add_argument("--method", default="rq", help="of EPS, or off")
    args = parser.parse_args()
    session = Session.open(args.model, args.backend)
    updated = with_weights(session, args.update or session.path)
    prompt = args.prompt or demo_document().prompt
    prompts = session.encode_prompts([prompt], args.before + args.after)
    stages = decode_across([(session, args.before), (updated, args.after)], prompts, EpsConfig.of(method=args.method))
    lines = [{**asdict(stage), "text": session.decode(stage.tokens[0])} for stage in stages]
    print(to_json({"model": str(session.path), "update": str(updated.path), "stages": lines}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
