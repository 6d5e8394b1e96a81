"""Measures what editing a cached sequence costs: KL against the edited text recomputed, and which value is answered.

    python scripts/experiments/editing/run.py -o results/edit.jsonl            (some minutes on 2 cores)

Lines cut, paragraphs moved, lines computed alone and spliced in, in held-out text; then a needle's value that becomes
another one: overwritten in place in three ways, or by an erratum at the end. Prints two tables; writes a line an edit.

Everything is dense: what differs between variants are K and V alone (edits.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import answer_steps, answers, markdown_table
from shared import cut as cut_text

from eps_core.cli.numbers import SEED, TOKENS, argument
from eps_core.config.cache import CacheConfig
from eps_core.decode.generate import extend, generate, tokens_of
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.statistics import bootstrap_interval
from eps_core.io import outputs
from eps_core.metrics.provenance import provenance
from eps_core.metrics.steps import kl_divergence
from eps_core.metrics.terminal import Progress
from eps_core.models.config import DEMO_MODEL
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import VALUE_DIGITS, draw_key, draw_value, filler, line_start, needle_line, question
from eps_core.tasks.sizing import bytes_per_token
from experiments.editing.edits import Span, cut, move, prefilled, splice, written

PARAGRAPH_LINES = 8
SHORTEST = 20  # characters of what is edited
NEAR_TOKENS = 256  # behind an edit: what follows it closely feels it most
KINDS = ("cut", "move", "splice")
# how a value in the text becomes another one
FIXES = (
    "recomputed", "field alone", "field in context", "line in context", "erratum", "line cut, erratum",
    "left as it was",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Settings of a measurement: `num_edits` of every kind, in texts of `context_tokens` tokens."""

    context_tokens: int = 2048
    num_edits: int = 20
    num_steps: int = 16  # tokens along which distributions are compared
    seed: int = 0


@dataclass(frozen=True)
class Edited:
    """One edit of a text: KL(recomputed || edited) in nats of the next token along the text that follows, and the same
    of a cache that was left as it was."""

    kind: str
    index: int
    tokens_edited: int
    tokens_behind: int  # that stand after the edit, whose K and V are what they were
    kl_mean: float
    kl_max: float
    top1_agreement: float
    kl_unedited: float


@dataclass(frozen=True)
class Answered:
    """One question after a field was set right: whether its new value is answered, the old one, or another."""

    fix: str
    index: int
    answer: str  # new, old, other


def alone(session: Session, tokens: Sequence[int]) -> Span:
    """Return tokens computed after what begins every text, and nothing else."""
    lead = session.encode("")
    return prefilled(session, [*lead, *tokens]).part(len(lead), len(lead) + len(tokens))


def logits(session: Session, text: Span, following: Sequence[int]) -> np.ndarray:
    """Return logits [N, V] after each of the `following` tokens [N]."""
    cache, pool = session.cache(CacheConfig(), len(text) + len(following))
    sequence, cache = written(session, text, cache, pool)
    steps = generate(
        session.decoder, cache, pool, [[*text.tokens, following[0]]], len(following), Sampling(),
        forced_tokens=[[*following[1:], 0]], written=[sequence], keep_logits=True,
    )  # fmt: skip
    return np.concatenate([record.logits for record in steps if record.logits is not None])


def answer(session: Session, text: Span, asked: Sequence[int]) -> str:
    """Return the digits that follow a question's tokens after the text."""
    steps = answer_steps(session.encode, "0" * VALUE_DIGITS, VALUE_DIGITS)
    cache, pool = session.cache(CacheConfig(), len(text) + len(asked) + steps)
    sequence, cache = written(session, text, cache, pool)
    cache = extend(session.decoder, cache, pool, sequence, asked[:-1])
    prompt = [*sequence.tokens, asked[-1]]
    said = list(generate(session.decoder, cache, pool, [prompt], steps, Sampling(), written=[sequence]))
    return session.decode(tokens_of(said, 1)[0])


def measure(session: Session, plan: Plan, report: Callable[[int, int], None] = lambda done, total: None) -> Iterator[
    Edited | Answered
]:  # fmt: skip
    """Every edit of a plan, as soon as it is done."""
    total = plan.num_edits * (len(KINDS) + 1)
    for index in range(plan.num_edits):
        for number, kind in enumerate(KINDS):
            yield _edited(session, plan, kind, index)
            report(index * (len(KINDS) + 1) + number + 1, total)
        yield from _answered(session, plan, index)
        report((index + 1) * (len(KINDS) + 1), total)


def _edited(session: Session, plan: Plan, kind: str, index: int) -> Edited:
    rng = np.random.default_rng([plan.seed, KINDS.index(kind), index])
    lead, length = session.encode(""), plan.context_tokens
    size = int((length + 400) * bytes_per_token(corpus(), session.encode))
    text = filler(corpus(), size, rng).decode("ascii", errors="ignore")
    body = cut_text(text, session.encode, length - len(lead))
    following = text[len(body) :]
    a, b, to = _places(body, kind, rng)
    before, span, behind = (session.encode(part, special=False) for part in (body[:a], body[a:b], body[b:]))
    first, size = len(lead) + len(before), len(span)
    base = prefilled(session, [*lead, *before, *([] if kind == "splice" else span), *behind])
    if kind == "cut":
        edited = cut(base, first, first + size)
    elif kind == "splice":
        edited = splice(base, alone(session, span), first)
    else:
        to = len(lead) + len(session.encode(body[:to], special=False))
        edited = move(base, first, first + size, to)
    last = len(base) - max(first + size, to) if kind == "move" else len(behind)
    after = session.encode(following, special=False)[: plan.num_steps]
    recomputed = prefilled(session, edited.tokens)
    want, got, unedited = (logits(session, one, after) for one in (recomputed, edited, base))
    moved = kl_divergence(want, got)
    return Edited(
        kind, index, size, last, float(moved.mean()), float(moved.max()),
        float((want.argmax(-1) == got.argmax(-1)).mean()), float(kl_divergence(want, unedited).mean()),
    )  # fmt: skip


def _places(body: str, kind: str, rng: np.random.Generator) -> tuple[int, int, int]:
    """A line [a, b) of a text, or a paragraph and the start of a line outside where it may go, as characters; the
    first eighth of the text stays."""
    lines = PARAGRAPH_LINES if kind == "move" else 1
    starts = [0, *(place + 1 for place, letter in enumerate(body) if letter == "\n")]
    starts = [start for start in starts if len(body) / 8 < start]
    spans = [(a, b) for a, b in zip(starts, starts[lines:], strict=False) if b - a > SHORTEST]
    pairs = [(a, b, to) for a, b in spans for to in (starts if kind == "move" else [a]) if not a < to <= b]
    pairs = [one for one in pairs if kind != "move" or one[2] != one[0]]
    require(bool(pairs), f"a text of {len(body)} characters has no paragraph to move: give a longer --context")
    return pairs[int(rng.integers(len(pairs)))]


def _answered(session: Session, plan: Plan, index: int) -> Iterator[Answered]:
    """A needle's value becomes another one, in every way; then it is asked for."""
    rng = np.random.default_rng([plan.seed, len(KINDS), index])
    key, old = draw_key(rng), draw_value(rng)
    new = draw_value(rng)
    line, asked = needle_line(key, old), session.encode(question(key), special=False)
    encode = session.encode
    room = plan.context_tokens - len(encode(line)) - len(asked)  # special tokens are of the line's
    body = filler(corpus(), int(room * bytes_per_token(corpus(), encode)), rng).decode("ascii", "ignore")
    body = cut_text(body, encode, room)
    place = line_start(body, int((index + 0.5) / plan.num_edits * len(body)))
    value = line.index(old)
    texts = body[:place] + line[:value], line[value + len(old) :], body[place:]
    before, rest, behind = (session.encode(text, special=number == 0) for number, text in enumerate(texts))
    was, becomes = (session.encode(digits, special=False) for digits in (old, new))
    base = prefilled(session, [*before, *was, *rest, *behind])
    right = prefilled(session, [*before, *becomes, *rest])
    at, end = len(before), len(before) + len(was)
    new_line = session.encode(needle_line(key, new), special=False)
    no_line = cut(base, len(encode(body[:place])), end + len(rest))
    # of each way: the text, and what is said after it before the question
    ways: tuple[tuple[Span, list[int]], ...] = (
        (prefilled(session, [*before, *becomes, *rest, *behind]), []),
        (splice(base, alone(session, becomes), at, len(was)), []),
        (splice(base, right.part(at, at + len(becomes)), at, len(was)), []),
        (splice(base, right.part(at, len(right)), at, len(was) + len(rest)), []),
        (base, new_line),
        (no_line, new_line),
        (base, []),
    )
    for fix, (text, erratum) in zip(FIXES, ways, strict=True):
        said = answer(session, text, [*erratum, *asked])
        yield Answered(fix, index, "new" if answers(said, new) else "old" if answers(said, old) else "other")


def markdown(results: Sequence[Edited | Answered], seed: int = 0) -> str:
    """Two tables: KL by kind of edit, and answers by how a value was set right."""
    edited, answered = [], []
    for kind in KINDS:
        mine = [one for one in results if isinstance(one, Edited) and one.kind == kind]
        if not mine:
            continue
        interval = bootstrap_interval([one.kl_mean for one in mine], seed)
        within = "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
        names = ("tokens_edited", "kl_unedited", "kl_mean", "top1_agreement")
        size, before, mean, agree = (float(np.mean([getattr(one, name) for one in mine])) for name in names)
        near = [one.kl_mean for one in mine if one.tokens_behind < NEAR_TOKENS]
        close = f"{np.mean(near):.4f} (of {len(near)})" if near else "-"
        edited.append([
            f"{kind} of {size:.0f} tokens", len(mine), f"{before:.4f}", f"{mean:.4f}{within}", close,
            f"{max(one.kl_max for one in mine):.3f}", f"{agree:.3f}",
        ])  # fmt: skip
    for fix in FIXES:
        said = [one.answer for one in results if isinstance(one, Answered) and one.fix == fix]
        if said:
            answered.append([fix, *(said.count(answer) for answer in ("new", "old", "other"))])
    header = ("edit", "of", "KL left as it was", "KL edited (95 %)", f"nearer than {NEAR_TOKENS}", "largest", "top-1")
    fixes = ("value set right by", "new value", "old value", "neither")
    return f"{markdown_table(header, edited)}\n\n{markdown_table(fixes, answered)}"


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
        file.write(outputs.to_json({**run, **provenance(session.backend.versions())}) + "\n")
        for one in results:
            kind = "edit" if isinstance(one, Edited) else "answer"
            file.write(outputs.to_json({"type": kind, **asdict(one)}) + "\n")
    print(markdown(results, plan.seed))


if __name__ == "__main__":
    sys.exit(exit_code(main))
