"""Checks of the kinds of JSON values: kinds are type hints, checked in this one place.

A kind is int (of 64 bits), float (an int will do), str, bool, None, Any, a union of kinds, tuple[..] (a list),
dict[str, kind], a dictionary of kinds by name (an object with these fields and any others; one that is missing is
null), a dataclass (an object with exactly its fields), or a type `Annotated` with `Between`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from eps_core.errors import ConfigError, brief, shown

_MOST_INT = 2**63
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class Between:
    """Least and most of a number, both included, or of the characters of a text."""

    least: float
    most: float

    def check(self, value: Any) -> None:
        size = len(value) if isinstance(value, str) else value
        if not self.least <= size <= self.most:
            unit = " characters" if isinstance(value, str) else ""
            raise ValueError(f"{shown(value)} is not within {self.least:g} to {self.most:g}{unit}")


Share = Annotated[float, Between(0, 1)]
Positive = Annotated[float, Between(1e-12, 1e12)]  # what is divided by
Count = Annotated[int, Between(0, 2**48)]
Ratio = Annotated[float, Between(0, 1e6)]
Nats = Annotated[float, Between(0, 1e6)]
Name = Annotated[str, Between(0, 200)]


def number(value: Any) -> float | None:
    """A finite number, None for anything else; true and false are none."""
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def check(name: str, value: Any, kind: Any) -> None:
    """Raises ConfigError unless a value given from Python is of that kind; numpy's numbers are numbers."""
    try:
        convert(value.item() if isinstance(value, np.generic) else value, kind)
    except ValueError as error:
        raise ConfigError(f"{name} {error}: give one") from error


def read_record(kind: Any, values: Any, place: str, fix: str) -> Any:
    """`values` as `kind`; ConfigError names `place`, the field and what is wrong."""
    try:
        return convert(values, kind)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}: {fix}") from error


def convert(value: Any, kind: Any) -> Any:
    """`value` as `kind`, lists as tuples. Raises ValueError, whose line begins with the field where there is one."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        found = convert(value, args[0])
        if found is not None:
            args[1].check(found)
        return found
    if origin in (Union, UnionType):
        return _one_of(value, args)
    if origin is tuple:
        return _tuple(value, args)
    if origin is dict:
        return {name: _within(name, item, args[1]) for name, item in _object(value).items()}
    if isinstance(kind, dict):
        values = _object(value)
        return {**values, **{name: _within(name, values.get(name), one) for name, one in kind.items()}}
    if is_dataclass(kind):
        return _dataclass(kind, _object(value))
    if kind is float:
        if (found := number(value)) is not None:
            return found
    elif kind is int:
        if type(value) is int:
            if not -_MOST_INT <= value < _MOST_INT:
                raise ValueError(f"{shown(value)} is past 64 bits")
            return value
    elif type(value) is kind:
        return value
    raise ValueError(f"{shown(value)} is not {_WORDS[kind]}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not an object")
    return value


def _dataclass(kind: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    wrong = sorted(set(values) ^ set(hints))
    if wrong:
        raise ValueError(f"unknown or missing {', '.join(map(brief, wrong[:20]))}")
    return kind(**{name: _within(name, item, hints[name]) for name, item in values.items()})


def _within(name: str, value: Any, kind: Any) -> Any:
    try:
        return convert(value, kind)
    except ValueError as error:
        raise ValueError(f"{brief(name)} {error}") from error


def _one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    if value is None and NoneType in kinds:
        return None
    reason = ValueError()
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError as error:
            reason = error if kind is not NoneType else reason
    raise reason


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(value)} is not a list")
    if kinds[-1] is Ellipsis:
        return tuple(convert(item, kinds[0]) for item in value)
    if len(value) != len(kinds):
        raise ValueError(f"{shown(value)} is not a list of {len(kinds)}")
    return tuple(convert(item, kind) for item, kind in zip(value, kinds, strict=True))
