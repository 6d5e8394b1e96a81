"""Values that the layers of one step or pass share."""

from collections.abc import Callable, Hashable
from functools import cached_property
from threading import get_ident
from typing import Any, TypeVar

T = TypeVar("T")


class Shared:
    """Holds what the layers of one step or pass share: values that none of them writes to, and arrays that each fills
    for itself and none reads after another did (`room`)."""

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    @cached_property
    def _rooms(self) -> dict[tuple[int, Hashable], Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` at the first call with `key`, which names it and what else it depends on:
        counts, arrays on a device."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def room(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` at a thread's first call with `key`: arrays to work in until the layer's call
        ends, which still lie in the CPU's caches when the next layer fills them."""
        own = get_ident(), key
        if own not in self._rooms:
            self._rooms[own] = make()
        found: T = self._rooms[own]
        return found

    def lend_room(self, other: "Shared") -> None:
        """Lets the caller's thread work for `other`, whose arrays have the same shapes, in those of this one."""
        other._rooms.update({(get_ident(), key): made for (_, key), made in self._rooms.items()})
