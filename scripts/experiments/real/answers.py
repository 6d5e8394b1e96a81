"""Ask a real pretrained model look-up questions, and decode verified beside dense: what a user of the default gets.

    python scripts/experiments/real/answers.py --model DIR --context 4096 --documents 2 -o rows.jsonl
    python scripts/experiments/real/answers.py --tables -o rows.jsonl    # tables of all that is in it, as Markdown

A document has lines "The code for KEY is VALUE." spread evenly over real text (of the kinds of run.py), and is
prefilled once; every question about one of them is answered greedily, densely and by EPS at its default, from the same
K and V. Then each document's text is continued by itself, densely and verified, at each temperature: the texts must be
equal. Contexts are counted in the model's own tokens. Documents that OUTPUT holds are not measured again.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import answers, markdown_table, rows_of

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.generate import extend
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.runner import DENSE, Document, run_batch
from eps_core.evaluation.statistics import wilson_interval
from eps_core.tasks.needle import draw_key, draw_value, needle_line, question
from experiments.grid.grid_verified import Measured, decode_both
from experiments.real.run import KINDS, command_line, opened, resumed, text

ANSWER_TOKENS = 8
CONFIG = EpsConfig.of(method="rq")


def asked(session: Session, context: int, number: int, index: int, seed: int) -> tuple[list[int], dict[str, str]]:
    """Return the tokens of a document of `context` tokens, longest question included, and its values by key."""
    rng = np.random.default_rng([seed, index])
    codes: dict[str, str] = {}
    while len(codes) < number:
        codes.setdefault(draw_key(rng), draw_value(rng))

    def encode(words: str) -> list[int]:
        return session.encode(words, special=False)

    lines = [encode(needle_line(key, value)) for key, value in codes.items()]
    longest = max(len(encode(question(key).rstrip())) for key in codes)
    filler = encode(text(KINDS[index % len(KINDS)]))
    room = context - longest - sum(map(len, lines))
    require(0 < room < len(filler), f"--context {context} does not hold {number} codes and a question: raise it")
    start = int(rng.integers(0, len(filler) - room))
    tokens, piece = [], room / number
    for at, line in enumerate(lines):
        tokens += filler[start + int(at * piece) : start + int((at + 0.5) * piece)] + line
        tokens += filler[start + int((at + 0.5) * piece) : start + int((at + 1) * piece)]
    return tokens, codes


def longer(session: Session, prefix: Prefix, more: list[int]) -> Prefix:
    """Return the prefix of a text that goes on by `more` tokens, prefilled densely."""
    tokens = prefix.tokens + more
    cache, pool = session.cache(CacheConfig(), [len(tokens)])
    sequence, cache = prefix.into(session.backend, cache, pool, len(more))
    cache = extend(session.decoder, cache, pool, sequence, more)
    (table,) = pool.table([sequence])
    layers = range(session.spec.num_layers)
    return Prefix(tokens, [session.backend.read_kv(cache, layer, table, len(tokens)) for layer in layers])


def lookups(session: Session, tokens: list[int], codes: dict[str, str], prefix: Prefix) -> dict[str, Any]:
    """Return which questions are answered densely and by EPS."""
    found: dict[str, list[bool]] = {"dense": [], "eps": []}
    for key, value in codes.items():
        prompt = tokens + session.encode(question(key).rstrip(), special=False)
        document, whole = Document(prompt, ANSWER_TOKENS), longer(session, prefix, prompt[len(prefix.tokens) : -1])
        for name, config in (("dense", EpsConfig()), ("eps", CONFIG)):
            said = run_batch(session, [document], {DENSE: config}, [whole])[DENSE].said[0]
            found[name].append(answers(session.decode(said), value))
    return found


def verified(
    session: Session, tokens: list[int], prefix: Prefix, steps: int, temperature: float, draft_budget: float | None
) -> dict[str, Any]:
    """Return how a verified text went beside the dense one, drafted by the default or another budget."""
    config, verify = EpsConfig.of(method="rq", budget=draft_budget), SpeculativeConfig(mode="tokens")
    measured = Measured(0)
    document, sampling = Document(tokens, steps), Sampling(temperature, seed=0)
    measured.add(*decode_both(session, [document], [prefix], config, verify, sampling), 1)
    numbers = measured.numbers()
    names = (
        "bytes_ratio", "acceptance", "acceptance_by_depth", "offered_by_depth", "tokens_per_round", "new_tokens",
        "partings",
    )  # fmt: skip
    return {**{name: numbers[name] for name in names}, "equal": numbers["documents_equal"] == 1}


def grouped(rows: list[dict], kind: str, *fields: str) -> dict[tuple, list[dict]]:
    """Return the rows of a type by model, context and `fields`: SmolLM2 first, contexts rising."""
    found: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["model"] != "smollm2", row["model"], row["context_tokens"])):
        if row["type"] == kind:
            found.setdefault(tuple(row[name] for name in ("model", "context_tokens", *fields)), []).append(row)
    return found


def lookups_table(rows: list[dict]) -> str:
    """Return how many look-ups are answered densely and by EPS, with Wilson's 95 % interval of the share."""
    lines = []
    for (model, context), same in grouped(rows, "lookups").items():
        dense, eps = ([one for row in same for one in row[name]] for name in ("dense", "eps"))
        shares = []
        for right in (dense, eps):
            low, high = wilson_interval(sum(right), len(right)) or (0.0, 1.0)
            shares.append(f"{sum(right)} of {len(right)} ({low:.2f} to {high:.2f})")
        lost, won = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in ((dense, eps), (eps, dense)))
        lines.append([model, f"{context:,}", f"{len(same)}", *shares, f"{lost}", f"{won}"])
    head = ["model", "context", "documents", "dense", "EPS", "lost", "won"]
    return markdown_table(head, lines)


def verified_table(rows: list[dict]) -> str:
    """Return what verified texts read, accept and say, means over documents, at the default draft budget."""
    lines = []
    default = [row for row in rows if row.get("draft_budget") is None]
    for (model, context, temperature), same in grouped(default, "verified", "temperature").items():
        share, accepted, a_round = (
            np.mean([row[name] for row in same]) for name in ("bytes_ratio", "acceptance", "tokens_per_round")
        )
        lines.append([
            model, f"{context:,}", f"{temperature:g}", f"{len(same)} x {same[0]['steps']}", f"{share:.3f}",
            f"{accepted:.3f}", f"{a_round:.1f}", f"{sum(row['equal'] for row in same)} of {len(same)}",
        ])  # fmt: skip
    head = ["model", "context", "temperature", "documents x tokens", "bytes a token, of dense"]
    return markdown_table([*head, "drafts accepted", "tokens a round", "texts equal to dense"], lines)


TABLES = {"lookups": lookups_table, "verified": verified_table}


def main() -> None:
    parser = command_line(__doc__, 2, "tokens of each verified text; 0: none", tuple(TABLES), "both")
    parser.add_argument("--questions", type=int, default=20, help="about each document (default 20)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--draft-budgets", type=float, nargs="*", default=[], help="of drafts, beside the default")
    args = parser.parse_args()
    if args.tables is not None:
        rows = rows_of(args.output, *TABLES)
        print("\n\n".join(TABLES[name](rows) for name in args.tables or TABLES))
        return
    session = opened(args, max(args.steps, ANSWER_TOKENS), "questions")
    cell = {"model": args.model.name, "context_tokens": args.context, "seed": args.seed}
    with resumed(args, session, tuple(TABLES), cell) as (there, add):
        for index in set(range(args.documents)) - {row["document"] for row in there}:
            tokens, codes = asked(session, args.context, args.questions, index, args.seed)
            prefix = session.prefix(tokens[:-1])
            same = {**cell, "document": index, "kind": KINDS[index % len(KINDS)]}
            rows = [{"type": "lookups", **same, **lookups(session, tokens, codes, prefix)}]
            for heat, budget in product(args.temperatures if args.steps else (), (None, *args.draft_budgets)):
                numbers = verified(session, tokens, prefix, args.steps, heat, budget)
                given = {"temperature": heat, "draft_budget": budget, "steps": args.steps}
                rows.append({"type": "verified", **same, **given, **numbers})
            add(rows)
            print(f"document {index + 1} of {args.documents}", file=sys.stderr)
    print("\n" + "\n\n".join(table(there) for table in TABLES.values()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
