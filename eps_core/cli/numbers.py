"""Numbers on the command line, checked in one place: ASCII digits, finite, no larger than what the program can hold.
What a number means is checked where it is used (`config`, `Sampling`); here it is made sure to be one."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

import click

from eps_core.config.cache import sized_method
from eps_core.config.formats import KvFormats, formats_of
from eps_core.errors import ConfigError, shown

MOST = 2**31 - 1  # tokens, groups, layers: slots and tables are int32
MOST_SEED = 2**63 - 1
MOST_SECONDS = 86_400.0
_WHOLE = re.compile(r"[+-]?[0-9]+", re.ASCII)


class _Number(click.ParamType):
    """A number from `least` to `most`; None: no limit but the type's own. `above`: more than `least`."""

    kind: str

    def __init__(self, least: float | None = None, most: float | None = None, above: bool = False) -> None:
        self.least, self.most, self.above = least, most, above

    def read(self, text: str) -> float | None:
        """The number, None where it is none."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = self.read(value) if isinstance(value, str) else value
        if number is None or not self._within(number):
            self.fail(f"{shown(value)} is not {self.wanted()}", param, ctx)
        return number

    def _within(self, number: float) -> bool:
        low = self.least is None or (number > self.least if self.above else number >= self.least)
        return low and (self.most is None or abs(number) <= self.most)

    def wanted(self) -> str:
        least, most = (None if limit is None else f"{limit:,}" for limit in (self.least, self.most))
        if least is None:
            return self.kind if most is None else f"{self.kind} up to {most}"
        start = f"above {least}" if self.above else f"from {least} on"
        return f"{self.kind} {start}" if most is None else f"{self.kind} {start.removesuffix(' on')} to {most}"


class Whole(_Number):
    """A whole number up to `most`; of either sign where there is no `least`."""

    name, kind = "N", "a whole number"

    def __init__(self, least: int | None = None, most: int = MOST) -> None:
        super().__init__(least, most)

    def read(self, text: str) -> int | None:
        # Python refuses to read thousands of digits, and reads those of other scripts
        return int(text) if _WHOLE.fullmatch(text) and len(text) <= 30 else None


class Real(_Number):
    """A finite number."""

    name, kind = "X", "a number"

    def read(self, text: str) -> float | None:
        try:
            number = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            return None
        return number if math.isfinite(number) else None


class OrWord(click.ParamType):
    """A number, or one word."""

    def __init__(self, kind: _Number, word: str) -> None:
        self.kind, self.word, self.name = kind, word, f"{kind.name}|{word}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == self.word:
            return value
        number = self.kind.read(value) if isinstance(value, str) else value
        if number is None:
            self.fail(f"{shown(value)} is neither {self.kind.kind} nor {self.word}", param, ctx)
        return self.kind.convert(number, param, ctx)


class ListOf(click.ParamType):
    """A comma list of one kind of value, each named once."""

    name = "LIST"

    def __init__(self, kind: click.ParamType) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = tuple(self.kind.convert(part.strip(), param, ctx) for part in value.split(","))
        if len(set(parts)) < len(parts):
            self.fail(f"{shown(value)} names a value twice: drop one", param, ctx)
        return parts


class KvBits(click.ParamType):
    """How K and V lie: one of KV_BITS for both, or two."""

    name = "BITS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> KvFormats:
        try:
            return formats_of(value)
        except ConfigError as error:
            self.fail(str(error).removeprefix("kv-bits "), param, ctx)


class SizedMethod(click.ParamType):
    """A method and, where not its default, the tokens of its groups: rq@2."""

    name = "METHOD"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            sized_method(value, self.choices)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def argument(kind: click.ParamType) -> Callable[[str], Any]:
    """The same kind for argparse, which the scripts use."""

    def converted(text: str) -> Any:
        try:
            return kind.convert(text, None, None)
        except click.BadParameter as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return converted


TOKENS = Whole(1)
COUNT = Whole(0)
SEED = Whole(0, MOST_SEED)
SHARE = Real(0, 1)
PART = Real(0, 1, above=True)
