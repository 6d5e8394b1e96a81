"""The map as SVG: KL of the next token by how K lies and how V lies, and by layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eps_core.report.figures import shade
from eps_core.report.style import svg
from experiments.kv_map.kv_map import Moved, by_layer

LEAST = 1e-9  # nats; below it float32 logits say nothing


def figure(found: Sequence[Moved]) -> str:
    """Left every layer in a pair of formats, K's down and V's across; right one layer alone, K or V of it. Colours are
    of the mean KL's logarithm, the same in both."""
    names = list(dict.fromkeys(name for one in found for name in (one.k_bits, one.v_bits)))
    parts, layers = by_layer(found)
    pairs = {(one.k_bits, one.v_bits): one.kl_mean for one in found if one.layer is None}
    whole = _log(np.array([[pairs.get((k_bits, v_bits), np.nan) for v_bits in names] for k_bits in names]))
    alone = _log(np.array(list(layers.values())))
    low = min(np.nanmin(whole), alone.min())
    limits = low, max(np.nanmax(whole), alone.max(), low + 1)

    def plot(canvas: Any) -> None:
        left, right = canvas.subplots(1, 2, width_ratios=(len(names), len(parts)))
        every = list(map(str, names))
        shade(left, whole, limits, every, every, _nats)
        left.set(title="every layer", xlabel="--kv-bits of V", ylabel="--kv-bits of K")
        mesh = shade(right, alone, limits, list(map(str, layers)), parts, _nats)
        right.set(title="one layer alone", xlabel="--kv-bits of K, or of V", ylabel="layer")
        canvas.colorbar(mesh, ax=(left, right), label="KL of the next token, log10 of nats")

    return svg((11.0, min(2.2 + 0.3 * max(len(names), len(layers)), 8.0)), plot)


def _log(nats: np.ndarray) -> np.ndarray:
    return np.log10(np.maximum(nats, LEAST))


def _nats(log: float) -> str:
    """Such as 2e-5."""
    digit, power = f"{10.0**log:.0e}".split("e")
    return f"{digit}e{int(power)}"
