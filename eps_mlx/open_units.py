"""K and V of the units that decode steps are filling, in small arrays beside the pools.

MLX writes a pool in place only where nothing else holds it, and a GPU's command buffer holds what its kernels read
until it is done. An engine makes a step while the GPU computes the one before: if it wrote pools, it would copy them
whole. Kernels write a step's tokens into new arrays of a unit each instead, and attention reads the tokens there. Once
in a unit the pools are written.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.backend import pages
from eps_mlx.device import device_of

GPU = "mps"
HELD_BYTES = 2**29  # of K and V of all layers, from which on copying them takes longer than waiting; speed only
NONE = np.zeros(0, np.int64)


class OpenUnits:
    """The pools of all layers, and of each layer the units that are open: those that the last step wrote to, in the
    order of its tokens. What their rows of the pools hold is out of date until `close`. Pools of codes have none."""

    def __init__(self, k: list[pages.Pool], v: list[pages.Pool], device: str) -> None:
        self.pools, self.device = (k, v), device
        self.units = [NONE] * len(k)  # of each layer [N]
        self.held: list[tuple[mx.array, ...]] = [()] * len(k)  # of each layer K and V [N, Hkv, U, D] of its open units
        self._offsets: tuple[bytes, Any] = b"", None

    def wait(self, layer: int) -> None:
        """Waits where the pools, which are about to be written, are large, until no kernel holds them: before the first
        layer is written, for all of them."""
        if layer == 0 and self.device == GPU:
            num_bytes = sum(array.nbytes for pools in self.pools for array in pages.arrays_of(pools[0]))
            if num_bytes * len(self.units) >= HELD_BYTES:
                # by MLX's source; no Mac was at hand to time it
                mx.synchronize()

    def open(self, layer: int, units: np.ndarray, offsets: np.ndarray) -> tuple[mx.array, mx.array, mx.array]:
        """Return (K, V of units [N], no two of them equal, which are the open ones from now on; offsets [N] int32 on
        the device, copied once for all layers)."""
        if not np.array_equal(units, self.units[layer]):
            self.close(layer)
            index = mx.array(units.astype(np.int32))
            self.held[layer] = tuple(pools[layer][index] for pools in self.pools)
            self.units[layer] = units
        if self._offsets[0] != offsets.tobytes():
            self._offsets = offsets.tobytes(), mx.array(offsets.astype(np.int32))
        k, v = self.held[layer]
        return k, v, self._offsets[1]

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
        self.opened.pools[self.which][layer] = pool
