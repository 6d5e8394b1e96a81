"""Samples as a model gets them: tokens that fill a context, and what a benchmark's length demands."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from eps_core.errors import ConfigError
from eps_core.io.inputs import text_bytes
from eps_core.tasks.benchmarks import NO_CHAT
from eps_core.tasks.needle import Sample, filler
from eps_core.tasks.ruler import DEPTHS, make_sample
from eps_core.tasks.sizing import Encode, bytes_per_token, fit

# beyond the answer's own tokens: a leading space or line end, and the words between several answers
ANSWER_SLACK_TOKENS = 8
Ask = Callable[[str, str], list[int]]  # prompt, the end of it that begins the answer -> tokens


@dataclass(frozen=True)
class Question:
    """A sample as the model gets it. `context_tokens`: what was asked for; None for a benchmark's own length."""

    sample: Sample
    tokens: list[int]
    max_new_tokens: int
    context_tokens: int | None
    truncated: bool = False


def fit_question(
    make: Callable[[int], Sample], encode: Encode, context_tokens: int, size: int, ask: Ask | None = None
) -> Question:
    """The question of `make(num_bytes)` whose prompt and answer fill `context_tokens`, or at most a fiftieth less;
    where no size does, most nearly. `size`: bytes to begin at; `ask`: tokens of a prompt and the lead of its answer."""

    def question(num_bytes: int) -> Question:
        sample = make(num_bytes)
        tokens = encode(sample.prompt) if ask is None else ask(sample.prompt, sample.lead)
        new_tokens = len(encode(", ".join(sample.answers), special=False)) + ANSWER_SLACK_TOKENS
        return Question(sample, tokens, new_tokens, context_tokens)

    found = fit(
        question, lambda one: (len(one.tokens), context_tokens - one.max_new_tokens), size, context_tokens // 50
    )
    if found is None:
        raise ConfigError(f"a context of {context_tokens} tokens cannot be met: raise --context")
    return found


def generated_questions(
    task: str, context_tokens: int, num_samples: int, seed: int, text: bytes, encode: Encode, ask: Ask | None = None
) -> list[Question]:
    """`num_samples` questions of one task; depths take turns. `ask`: as in `fit_question`."""
    size = int((context_tokens - len(encode(""))) * bytes_per_token(text, encode))
    questions = []
    for index in range(num_samples):
        make = partial(make_sample, task, text, seed=seed + index, depth=DEPTHS[index % len(DEPTHS)])
        try:
            questions.append(fit_question(make, encode, context_tokens, size, ask))
        except ConfigError as error:
            raise ConfigError(f"task {task} at {context_tokens:,} tokens: {error}") from error
    return questions


def benchmark_question(sample: Sample, encode: Encode, max_context: int, ask: Ask | None = None) -> Question:
    """A benchmark's sample as it is; in a chat, by `ask`, where its authors put it into one. One of LongBench that is
    too long loses its middle, as in the official code, which keeps the first and last half of what the model takes;
    here tokens are kept, not text that is split again."""
    assert sample.max_new_tokens is not None
    room = max_context - sample.max_new_tokens
    # what lies further from both ends than all tokens of the context reach is cut before it is encoded
    reach = text_bytes(max_context)
    whole = len(sample.prompt) <= 2 * reach
    prompt = sample.prompt if whole else sample.prompt[:reach] + sample.prompt[-reach:]
    tokens = encode(prompt) if ask is None or sample.task in NO_CHAT else ask(prompt, sample.lead)
    if not tokens:
        raise ConfigError(f"a prompt of {sample.task} is empty: remove its line")
    if whole and len(tokens) <= room:
        return Question(sample, tokens, sample.max_new_tokens, None)
    half = room // 2
    if sample.source != "longbench" or half < 1:
        raise ConfigError(
            f"a prompt of {len(tokens)} tokens{'' if whole else ' and more'} of {sample.task} and "
            f"{sample.max_new_tokens} new ones exceed the model's context of {max_context} tokens: use a shorter file "
            "or another model"
        )
    kept = tokens if len(tokens) <= room else tokens[:half] + tokens[-half:]
    return Question(sample, kept, sample.max_new_tokens, None, truncated=True)


def text_window(
    text: bytes, encode: Encode, num_tokens: int, rng: np.random.Generator, num_bytes: int | None = None
) -> list[int]:
    """`num_tokens` tokens of a random window of `text`, of `num_bytes` or as many more as they take."""
    num_bytes = num_bytes or num_tokens
    state = rng.bit_generator.state
    while True:
        rng.bit_generator.state = state  # the same window, longer
        tokens = encode(filler(text, num_bytes, rng).decode("utf-8", errors="ignore"))
        if len(tokens) >= num_tokens:
            return tokens[:num_tokens]
        num_bytes *= 2
