"""The prompts of a run: what `--prompt` and `--prompt-file` say."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from eps_core.errors import ConfigError


def prompts_of(text: str | None, files: Sequence[Path], needed: bool) -> tuple[str, ...]:
    """The prompts' texts, to be decoded in one batch; none, where none is `needed`, is the demo's needle document."""
    if text is not None and files:
        raise click.UsageError("--prompt and --prompt-file say two things: give one of them")
    if text is None and not files and needed:
        raise click.UsageError("--model needs a prompt: add --prompt or --prompt-file")
    if text is not None:
        return (text,)
    return tuple(prompt for path in files for prompt in _read(path))


def _read(path: Path) -> list[str]:
    """A file's one prompt, or those of a .jsonl file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt file {path} is not UTF-8 at byte {error.start}: convert it") from error
    if path.suffix != ".jsonl":
        return [text]
    # not splitlines(): JSON strings may hold what it takes for the end of a line
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_prompt(path, number, line) for number, line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f'prompt file {path} has no lines: give one JSON object with a "prompt" a line')
    return prompts


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"prompt file {path}, line {number} is not JSON ({error}): mend it") from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(
            f'prompt file {path}, line {number} has no "prompt" that is text: give an object with one, or a string'
        )
    return prompt
