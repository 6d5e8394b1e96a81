"""Prompts as users give them: texts, files, chat messages; their tokens, of lengths that a model can continue; and how
many of these are read at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.errors import ConfigError, require
from eps_core.io import inputs, records

PREFILL_CHUNK = 2048  # tokens of a prompt that pass through the layers together


def prompt_texts(prompt: str | Path, max_context: int, keep_newline: bool = False) -> list[str]:
    """Return a prompt's text. Of a path it is what the file holds, no more of it than `max_context` tokens could be,
    without one final newline, which editors add, unless `keep_newline`; of a .jsonl file the prompt of each line."""
    if not isinstance(prompt, Path):
        return [prompt]
    if prompt.suffix == ".jsonl":
        return _jsonl_prompts(prompt)
    limit = f"more than the {max_context:,} tokens of the model's context could hold"
    text = inputs.read_text(prompt, "prompt file", "give a text file", inputs.text_bytes(max_context), limit)
    if not keep_newline and text.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    require(text != "", f"prompt file {prompt} is empty: give at least one character")
    return [text]


def encode_prompts(
    given: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    encode: Callable[[Any, int], list[int]],
    max_context: int,
    context_note: str = "",
) -> list[list[int]]:
    """Tokens of prompts, texts or tokens, that a model of `max_context` tokens can continue by `max_new_tokens`; others
    are refused, by their number where there are several. `encode(prompt, most)` gives at most a few more tokens than
    `most` of a text."""
    require(len(given) > 0, "there is no prompt to continue: give at least one")
    records.check("max-new-tokens", max_new_tokens, int)
    require(max_new_tokens >= 1, f"max-new-tokens {max_new_tokens} is below 1: nothing would be generated; use 32")
    prompts, most = [], max_context
    for number, prompt in enumerate(map(_plain, given), start=1):
        which = f"prompt {number}" if len(given) > 1 else "the prompt"
        records.check(which, prompt, tuple[int, ...] | str)
        prompts.append(encode(prompt, most))
        length = len(prompts[-1])
        require(bool(prompt) and length > 0, f"{which} is empty: give at least one character or token")
        require(
            length + max_new_tokens <= most,
            f"{which} of {length if length <= most else f'more than {most}'} tokens and {max_new_tokens} new ones "
            f"exceed the model's context of {most} tokens{context_note}: shorten the prompt or lower max-new-tokens",
        )
    return prompts


def _plain(prompt: Any) -> Any:
    """Return a prompt with Python's numbers where its tokens are NumPy's."""
    if isinstance(prompt, np.ndarray):
        return prompt.tolist()
    if isinstance(prompt, list | tuple):
        return [token.item() if isinstance(token, np.generic) else token for token in prompt]
    return prompt


def _jsonl_prompts(path: Path) -> list[str]:
    """The prompts of a file whose lines are objects with one, or strings."""
    fix = 'give a JSON object with a "prompt" a line'
    prompts = []
    for place, value in inputs.read_values(path, "prompt file", fix):
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise ConfigError(f'{place}: no "prompt" that is text: {fix}')
        require(prompt != "", f"{place}: the prompt is empty: give at least one character, or remove the line")
        prompts.append(prompt)
    require(len(prompts) > 0, f"prompt file {path} has no lines: {fix}")
    return prompts
