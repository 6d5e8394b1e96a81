"""Beam search over forks of the paged cache: beams share all full units, and copy the open one where they part.

Which continuations a step weighs, which of them end, and when the search is over are transformers' rules
(`generation/utils.py`, `early_stopping=True`), so that one beam is greedy decoding; sharing is vLLM's (Kwon et al.
2023, section 4.4).

    python scripts/experiments/beams/run.py --beams 4

Prints one JSON object: of each side the texts found, best first, the units copied for beams, and the bytes read.
"""

import argparse
import sys
from collections.abc import Collection, Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from eps_core.cli.numbers import TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import check_prompts, prefill, take_step
from eps_core.decode.sampling import check_logits
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.compare import demo_document
from eps_core.io.outputs import to_json
from eps_core.kv_cache.pool import PagePool
from eps_core.kv_cache.pool import Sequence as PagedSequence
from eps_core.metrics.steps import StepRecord, log_softmax, step_record, summarise

LENGTH_ALPHA = 1.0  # of the length that a text's score is divided by


@dataclass(frozen=True)
class Hypothesis:
    """How a prompt may go on."""

    tokens: list[int]  # the stop token that ended it included
    log_probability: float  # nats, of all of them together, by the model as it was read

    @property
    def score(self) -> float:
        """Return the score of texts of different lengths: log probability over length ** LENGTH_ALPHA."""
        return self.log_probability / max(len(self.tokens), 1) ** LENGTH_ALPHA


@dataclass
class Searched:
    """The findings of a search, filled as it goes."""

    hypotheses: list[list[Hypothesis]] = field(default_factory=list)  # of each prompt, best first, at most `width`
    units_copied: list[int] = field(default_factory=list)  # of each step


@dataclass
class _Beam:
    prompt: int
    sequence: PagedSequence
    text: Hypothesis


def room(length: int, max_new_tokens: int, width: int, unit_tokens: int) -> list[int]:
    """Tokens of the sequences that together take the units that `width` beams of a prompt of `length` tokens can hold:
    one has the prompt, all have their own from the unit in which it ends."""
    return [length + max_new_tokens, *[unit_tokens - 1 + max_new_tokens] * (width - 1)]


def search(
    decoder: Decoder,
    cache: Any,
    pool: PagePool,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    width: int,
    found: Searched,
    selection_config: SelectionConfig | None = None,
    stop_tokens: Collection[int] = (),
) -> Generator[StepRecord, None, Any]:
    """Searches for the likeliest continuations of every prompt with `width` beams each, all in one batch; `found` is
    filled with them. Arguments and value as of `generate.generate`, and steps are sparse as they are there.

    Of a prompt's beams each step weighs the 2 * width best continuations (more where there are several stop tokens) by
    their log probability since the prompt; a tie goes to the better beam, then to the lower token. Those that end in a
    stop token are set aside if they are among the best `width`; of the others the best `width` go on. The search ends
    when `width` texts were set aside, which are then the result, or after `max_new_tokens`, when texts that have not
    ended compete, too.

    A record's `sequences` are the prompts of the beams that go on or end, `tokens` what these say next; its `lengths`
    are of the beams that were attended. A step copies fewer units than a prompt has beams.
    """
    check_prompts(prompts)
    ended: list[list[Hypothesis]] = [[] for _ in prompts]
    live: list[_Beam] = []
    try:
        for index, prompt in enumerate(prompts):
            sequence, cache = prefill(decoder, cache, pool, prompt[:-1])
            live.append(_Beam(index, sequence, Hypothesis([], 0.0)))
        for step in range(max_new_tokens):
            if not live:
                break
            tokens = [beam.text.tokens[-1] if step else int(prompts[beam.prompt][-1]) for beam in live]
            sequences = [beam.sequence for beam in live]
            found.units_copied.append(_shared(pool, sequences))
            cache, output, spent = take_step(decoder, cache, pool, sequences, tokens, selection_config, False)
            for logits, length in zip(output.logits, spent.lengths, strict=True):
                check_logits(logits, int(length))
            said: list[tuple[int, int]] = []  # (prompt, token)
            left: list[_Beam] = []
            for index in range(len(prompts)):
                rows = [row for row, beam in enumerate(live) if beam.prompt == index]
                if not rows:
                    continue
                texts = [live[row].text for row in rows]
                over, on = _weigh(texts, output.logits[rows], width, stop_tokens)
                ended[index] += over
                on = on if len(ended[index]) < width else []
                said += [(index, text.tokens[-1]) for text in (*over, *(text for _, text in on))]
                if step + 1 == max_new_tokens:
                    ended[index] += [text for _, text in on]
                    on = []
                left += _part(pool, [live[row] for row in rows], on)
            live = left
            by = [prompt for prompt, _ in said], [token for _, token in said]
            yield step_record(
                step, *by, spent.lengths.tolist(), output, decoder.spec_of(cache),
                EpsConfig.over(cache.cache_config, selection_config), spent.decode_ms, spent.bytes_k_reread, False,
            )  # fmt: skip
        found.hypotheses = [sorted(texts, key=lambda text: -text.score)[:width] for texts in ended]
        return cache
    finally:
        for beam in live:
            pool.free(beam.sequence)


def _shared(pool: PagePool, sequences: Sequence[PagedSequence]) -> int:
    """Return the number of open units that the next token of each sequence has copied: of those that share one, all but
    the last."""
    size = pool.unit_tokens
    units = {one.table[one.length // size] for one in sequences if one.length % size}
    return sum(pool.ref_counts[unit] - 1 for unit in units)


def _weigh(
    texts: Sequence[Hypothesis], logits: np.ndarray, width: int, stop_tokens: Collection[int]
) -> tuple[list[Hypothesis], list[tuple[int, Hypothesis]]]:
    """(texts that ended, (index of the text that each continues, it) of at most `width` that go on), best first, by
    logits [texts, V]."""
    sums = np.array([text.log_probability for text in texts])[:, None] + log_softmax(logits.astype(np.float64))
    every = sums.ravel()
    # enough that `width` go on whatever ends
    count = min(width * (1 + max(1, len(stop_tokens))), len(every))
    least = np.partition(every, len(every) - count)[len(every) - count]
    best = np.flatnonzero((every >= least) & (every > -np.inf))
    best = best[np.argsort(-every[best], kind="stable")][:count]
    over: list[Hypothesis] = []
    on: list[tuple[int, Hypothesis]] = []
    for rank, place in enumerate(best.tolist()):
        parent, token = divmod(place, sums.shape[1])
        text = Hypothesis([*texts[parent].tokens, token], float(every[place]))
        if token not in stop_tokens:
            on.append((parent, text))
        elif rank < width:
            over.append(text)
        if len(on) == width:
            break
    return over, on


def _part(pool: PagePool, beams: Sequence[_Beam], on: Sequence[tuple[int, Hypothesis]]) -> list[_Beam]:
    """The beams that go `on`: the first continuation of a beam takes its sequence, others fork it, and beams without
    one give theirs up."""
    taken: set[int] = set()
    parted = []
    for parent, text in on:
        sequence = beams[parent].sequence
        parted.append(_Beam(beams[parent].prompt, pool.fork(sequence) if parent in taken else sequence, text))
        taken.add(parent)
    for index, beam in enumerate(beams):
        if index not in taken:
            pool.free(beam.sequence)
    return parted


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
