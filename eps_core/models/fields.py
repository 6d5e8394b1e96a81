"""A JSON object of a model folder, its fields checked as they are read; errors name the file and the field."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eps_core.errors import ConfigError, shown
from eps_core.io import inputs, records

MOST_SIZE = 2**24  # of hidden layers, vocabularies ..; beyond any model, and refused before memory or time goes


def read_json(file: Path) -> dict[str, Any]:
    if not os.path.lexists(file):
        raise ConfigError(f"{file} is missing: give the folder of a complete Hugging Face model")
    return inputs.read_object(file, "", "give a complete Hugging Face model")


def read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if os.path.lexists(file) else {}


@dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are checked as they are read, and the file that errors name. null is as absent."""

    values: dict[str, Any]
    file: Path

    @classmethod
    def of(cls, file: Path) -> "Fields":
        return cls(read_json(file), file)

    @property
    def text(self) -> "Fields":
        """Those of the text model, in the config.json of one that reads images, too."""
        inner = self.values.get("text_config")
        return Fields(inner, self.file) if isinstance(inner, dict) else self

    def unsupported(self, key: str, supported: str) -> ConfigError:
        value = self.values.get(key)
        text = f"of {len(value)} entries" if isinstance(value, dict) else shown(value)
        return ConfigError(f"{key} {text} of {self.file} is unsupported: EPS reads {supported}")

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{key} {shown(self.values.get(key))} of {self.file} must be {wanted}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.file} lacks {key!r}: give a complete Hugging Face config.json")
        return value

    def integer(self, key: str, default: int | None = None, most: int = MOST_SIZE, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, f"an integer of at least {least} and at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        number = records.number(self._get(key, default))
        if number is None or number <= 0:
            raise self._wrong(key, "a positive number")
        return number

    def number_or_none(self, key: str) -> float | None:
        """A positive number; None where it is absent or 0, which transformers reads alike."""
        return self.number(key) if self.values.get(key) else None

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._get(key, None)
        found = [records.number(item) for item in value] if isinstance(value, list) else [None]
        if not found or not all(number is not None and number > 0 for number in found):
            raise self._wrong(key, "a list of positive numbers")
        return tuple(number for number in found if number is not None)

    def boolean(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def list_of_text(self, key: str) -> list[str]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of names")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)
