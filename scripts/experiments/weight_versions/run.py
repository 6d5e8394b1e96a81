"""Decode that goes on across weight updates, as in reinforcement learning, without mixing the K and V of two weights.

A session of new weights has caches of its own, so that no page of old weights is read. The prompt and all tokens so far
are prefilled again, as vLLM does when it pauses and clears its cache (`pause_generation(mode, clear_cache)`).

    python scripts/experiments/weight_versions/run.py --model DIR --update DIR2 --method rq

Prints one JSON object: what each stage prefilled and how long it took. Without --update the same weights go on, so that
the text is that of an uninterrupted decode.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.cli.numbers import TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate, tokens_of
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.compare import demo_document
from eps_core.io.outputs import to_json
from eps_core.models.config import read_spec


@dataclass(frozen=True)
class Stage:
    """Decode steps with one set of weights: the new tokens of each prompt, and what it cost to begin."""

    tokens: list[list[int]]
    prefilled_tokens: int  # of all prompts together
    seconds: float  # from an empty cache to the last new token


def with_weights(session: Session, path: Path) -> Session:
    """Return a session like `session` with the weights in `path`. Raises ConfigError where the models differ in more
    than their weights."""
    spec = read_spec(path)
    differing = [name for name, value in vars(spec).items() if value != getattr(session.spec, name)]
    require(not differing, f"{path} is another model than {session.path}: {', '.join(differing)} differ")
    return replace(session, path=path)


def decode_across(
    stages: Sequence[tuple[Session, int]], prompts: Sequence[Sequence[int]], config: EpsConfig
) -> list[Stage]:
    """Decode prompts greedily in one batch through (session, number of new tokens) stages. Each stage prefills the
    prompts and all earlier new tokens in a cache of its own."""
    texts = [list(prompt) for prompt in prompts]
    found = []
    for session, num_new in stages:
        started = time.perf_counter()
        cache, pool = session.cache(config.cache_config, [len(text) + num_new for text in texts])
        records = list(generate(session.decoder, cache, pool, texts, num_new, Sampling(), config.selection_config))
        tokens = tokens_of(records, len(texts))
        prefilled = sum(len(text) - 1 for text in texts)
        found.append(Stage(tokens, prefilled, time.perf_counter() - started))
        texts = [[*text, *new] for text, new in zip(texts, tokens, strict=True)]
    return found


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
