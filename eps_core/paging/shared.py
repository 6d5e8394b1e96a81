"""What the layers of one step or pass share."""

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class Shared:
    """Of one step or pass. Nothing here may be written to: all layers share it."""

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave at the first call with `key`, which names it and what it depends on besides: counts, arrays
        on a device."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found
