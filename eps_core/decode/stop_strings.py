"""Stop strings: text of tokens as they come, which ends before the first of given strings."""

from collections.abc import Sequence
from typing import Any

from eps_core.errors import require
from eps_core.io import records
from eps_core.metrics.terminal import TextStream


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one stop string, or several, as a tuple. Raises ConfigError for what is no text, and for an empty one."""
    found = (stop,) if isinstance(stop, str) else stop
    records.check("stop", found, tuple[str, ...])
    require(all(found), "stop '' has no characters: give at least one, or leave stop out")
    return tuple(found)


class StoppedText:
    """The text of tokens, added one by one, up to the first stop string: the one that is complete first."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.stop = stop
        self.tokens: list[int] = []
        self.text = ""  # without characters that are incomplete, and without what a stop string may begin with
        self._held = ""  # the beginning of a stop string, perhaps
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, self._pieces.append)

    def add(self, token: int) -> bool:
        """Add a token. Returns True, and is to be given no more, where its text completes a stop string."""
        self.tokens.append(token)
        self._stream.add(token)
        return self._take()

    def flush(self) -> bool:
        """Add what was held back, after the last token of a text that met no stop string. Returns True where it
        completes one."""
        self._stream.flush()
        return self._take(last=True)

    def _take(self, last: bool = False) -> bool:
        """Take what has come into the text, up to a stop string; hold back what one may begin with, unless it is the
        `last`. Returns True where a stop string is complete."""
        text = self._held + "".join(self._pieces)
        self._pieces.clear()
        found = [(start + len(word), start) for word in self.stop if (start := text.find(word)) >= 0]
        held = 0 if last else max((_begun(text, word) for word in self.stop), default=0)
        end = min(found)[1] if found else len(text) - held
        self.text, self._held = self.text + text[:end], text[end:]
        return bool(found)


def _begun(text: str, word: str) -> int:
    """Characters at the end of `text` that `word` begins with; fewer than all of its own."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
