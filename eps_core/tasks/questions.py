"""Samples as a model gets them: tokens that fill a context, and what a benchmark's length demands."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eps_core.errors import ConfigError
from eps_core.files.inputs import text_bytes
from eps_core.tasks.needle import Sample, filler
from eps_core.tasks.ruler import DEPTHS, make_sample

# beyond the answer's own tokens: a leading space or line end, and the words between several answers
ANSWER_SLACK_TOKENS = 8
_RATIO_BYTES = 20_000  # of text, to guess how many bytes a token has


@dataclass(frozen=True)
class Question:
    """A sample as the model gets it. `context_tokens`: what was asked for; None for a benchmark's own length."""

    sample: Sample
    tokens: list[int]
    max_new_tokens: int
    context_tokens: int | None
    truncated: bool = False


def fit_question(
    make: Callable[[int], Sample], encode: Callable[..., list[int]], context_tokens: int, bytes_per_token: float
) -> Question:
    """The question of `make(num_bytes)` whose prompt and answer fill `context_tokens` most nearly without exceeding
    them. Found by correcting the number of bytes, since bytes per token differ from task to task."""
    best: Question | None = None
    num_bytes = int(context_tokens * bytes_per_token)
    for _ in range(8):
        sample = make(num_bytes)
        tokens = encode(sample.prompt)
        new_tokens = len(encode(", ".join(sample.answers), special=False)) + ANSWER_SLACK_TOKENS
        spare = context_tokens - len(tokens) - new_tokens
        if spare >= 0 and (best is None or len(tokens) > len(best.tokens)):
            best = Question(sample, tokens, new_tokens, context_tokens)
        if 0 <= spare <= context_tokens // 50:
            break
        num_bytes += int(np.floor(spare * num_bytes / len(tokens)))
    if best is None:
        raise ConfigError(f"a context of {context_tokens} tokens cannot be met: ask for a longer one")
    return best


def generated_questions(
    task: str, context_tokens: int, num_samples: int, seed: int, text: bytes, encode: Callable[..., list[int]]
) -> list[Question]:
    """`num_samples` questions of one task; depths take turns."""
    window = text[:_RATIO_BYTES].decode("utf-8", errors="ignore")
    bytes_per_token = len(window.encode()) / max(1, len(encode(window)))
    questions = []
    for index in range(num_samples):

        def make(num_bytes: int, index: int = index) -> Sample:
            return make_sample(task, text, num_bytes, seed + index, DEPTHS[index % len(DEPTHS)])

        questions.append(fit_question(make, encode, context_tokens, bytes_per_token))
    return questions


def benchmark_question(sample: Sample, encode: Callable[..., list[int]], max_context: int) -> Question:
    """A benchmark's sample as it is. One of LongBench that is too long loses its middle, as in the official code, which
    keeps the first and last half of what the model takes; here tokens are kept, not text that is split anew."""
    assert sample.max_new_tokens is not None
    room = max_context - sample.max_new_tokens
    # what lies further from both ends than all tokens of the context reach is cut before it is encoded
    reach = text_bytes(max_context)
    whole = len(sample.prompt) <= 2 * reach
    tokens = encode(sample.prompt if whole else sample.prompt[:reach] + sample.prompt[-reach:])
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


def text_window(text: bytes, encode: Callable[..., list[int]], num_tokens: int, rng: np.random.Generator) -> list[int]:
    """`num_tokens` tokens of a random window of `text`."""
    num_bytes = num_tokens
    state = rng.bit_generator.state
    while True:
        rng.bit_generator.state = state  # the same window, longer
        tokens = encode(filler(text, num_bytes, rng).decode("utf-8", errors="ignore"))
        if len(tokens) >= num_tokens:
            return tokens[:num_tokens]
        num_bytes *= 2
