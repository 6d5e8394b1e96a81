"""K and V of the units that decode steps are filling, in small arrays beside the pools.

MLX writes a pool in place only where nothing else holds it, and a GPU's command buffer holds what its kernels read
until it is done. An engine makes a step while the GPU computes the one before: if it wrote pools, it would copy them
whole. Kernels write a step's tokens into new arrays of a unit each instead, and attention reads the tokens there. The
step that ends a unit writes the pools, summaries among them, once no kernel holds them.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.backend import pages
from eps_mlx.device import device_of

GPU = "mps"
HELD_BYTES = 2**29  # of K and V of all layers, an estimate (no Mac was at hand to time it); changes speed only
NONE = np.zeros(0, np.int64)


class OpenUnits:
    """The pools of all layers, and of each layer the units that are open: those that the last step wrote to, in the
    order of its tokens. What their rows of the pools hold is out of date until `close`. Pools of codes have none."""

    def __init__(self, k: list[pages.Pool], v: list[pages.Pool], device: str) -> None:
        self.pools, self.device = (k, v), device
        self.units = [NONE] * len(k)  # of each layer [N]
        self.held: list[tuple[mx.array, ...]] = [()] * len(k)  # of each layer K and V [N, Hkv, U, D] of its open units
        self.waited = len(k)  # the layer that asked for the last wait, or was served by it
        # of the last slots: their units if they share none, and offsets
        self._places: tuple[bytes, np.ndarray, Any] = b"", NONE, None

    def wait(self, layer: int) -> None:
        """Waits until no kernel holds the pools, which are about to be written. Steps write layers in rising order: one
        wait serves the layers behind, too."""
        if self.device == GPU and layer <= self.waited:
            mx.synchronize(mx.default_stream(device_of(self.device)))
        self.waited = layer

    def settle(self, layer: int) -> None:
        """Waits before writes that may be as frequent as steps, where copies would take longer."""
        num_bytes = sum(array.nbytes for pools in self.pools for array in pages.arrays_of(pools[0]))
        if num_bytes * len(self.units) >= HELD_BYTES:
            self.wait(layer)

    def open(self, layer: int, slots: np.ndarray) -> tuple[mx.array, mx.array, mx.array] | None:
        """Return (K, V of the units of slots [N], which are the open ones from now on; the slots' offsets [N] int32 on
        the device, copied once for all layers); None where two slots share a unit."""
        if self._places[0] != slots.tobytes():
            units, offsets = np.divmod(slots, self.pools[0][layer].shape[2])
            units = units if len(np.unique(units)) == len(units) else NONE
            self._places = slots.tobytes(), units, mx.array(offsets.astype(np.int32))
        _, units, offsets = self._places
        if not len(units):
            return None
        if not np.array_equal(units, self.units[layer]):
            self.close(layer)
            index = mx.array(units.astype(np.int32))
            self.held[layer] = tuple(pools[layer][index] for pools in self.pools)
            self.units[layer] = units
        k, v = self.held[layer]
        return k, v, offsets

    def close(self, layer: int) -> None:
        """Writes what open units hold into the pools."""
        units, held = self.units[layer], self.held[layer]
        if not len(units):
            return
        self.wait(layer)
        with mx.stream(device_of(self.device)):
            for pools, array in zip(self.pools, held, strict=True):
                pools[layer][mx.array(units.astype(np.int32))] = array
        self.units[layer], self.held[layer] = NONE, ()

    def places(self, layer: int, units: np.ndarray) -> np.ndarray:
        """Return the places of units [..] in the pool [P, ..] and, behind it, the open units: -1 stays."""
        pool_units = len(pages.arrays_of(self.pools[0][layer])[0])
        place = np.append(np.arange(pool_units, dtype=np.int32), np.int32(-1))
        place[self.units[layer]] = pool_units + np.arange(len(self.units[layer]))
        return place[units]

    def arrays(self) -> list[mx.array]:
        """Return all arrays of K and V."""
        pools = [array for one in self.pools for pool in one for array in pages.arrays_of(pool)]
        return pools + [array for held in self.held for array in held]


class Pools:
    """K or V of all layers, as a list that gives a layer's pool once its open units are closed: who reads or writes
    pools need not know of them."""

    def __init__(self, opened: OpenUnits, which: int) -> None:
        self.opened, self.which = opened, which

    def __len__(self) -> int:
        return len(self.opened.units)

    def __getitem__(self, layer: int) -> pages.Pool:
        self.opened.close(layer)
        return self.opened.pools[self.which][layer]

    def __setitem__(self, layer: Any, pool: Any) -> None:
        for one in range(len(self)):
            self.opened.close(one)
        self.opened.pools[self.which][layer] = pool
