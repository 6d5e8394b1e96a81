"""Which layers of an engine's model are sparse, and why the others are not."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError, require
from eps_core.metrics.terminal import describe


@dataclass(frozen=True)
class Plan:
    """`sparse` model layers in order: their places are the layers of the cache. `dense`: layer -> why it is left.
    `most_tokens`: dense layer -> tokens of which it holds K and V at most, a sliding window's or 0 without attention;
    absent: of all."""

    sparse: tuple[int, ...]
    dense: dict[int, str]
    most_tokens: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, reasons: Sequence[str | None], most_tokens: Sequence[int | None] = ()) -> Self:
        """`reasons`: why each layer is not sparse, None where it is. `most_tokens`: of each layer, None where it holds
        all. Raises ConfigError where no layer would be sparse."""
        dense = {layer: reason for layer, reason in enumerate(reasons) if reason is not None}
        if len(dense) == len(reasons):
            raise ConfigError(
                f"no layer of this model can be sparse: its {len(reasons)} layers are {_listed(dense)}; run it with "
                "--method off"
            )
        sparse = tuple(layer for layer, reason in enumerate(reasons) if reason is None)
        return cls(sparse, dense, {layer: most for layer, most in enumerate(most_tokens) if most is not None})

    @property
    def num_layers(self) -> int:
        """Return the model's number of layers."""
        return len(self.sparse) + len(self.dense)

    def to_dict(self) -> dict[str, Any]:
        """Return the layers as JSON has them."""
        dense = {str(layer): reason for layer, reason in self.dense.items()}
        return {"sparse_layers": list(self.sparse), "layers_dense": dense}

    def dense_tokens(self, length: int) -> int:
        """Tokens of which a step of a sequence of `length` tokens reads K and V in the layers that stay dense, summed
        over these."""
        return sum(min(length, self.most_tokens.get(layer, length)) for layer in self.dense)

    def ratio_of_model(self, read: int, dense: int, tokens: int, dense_tokens: int) -> float | None:
        """Bytes read over dense of all layers' K and V, from those of the sparse layers, `read` and `dense`, in steps
        of sequences of `tokens` tokens together; `dense_tokens` is the sum of the method of that name. Heads of all
        layers are taken to be like the sparse ones. None where all are sparse or nothing was read."""
        if not self.dense or not dense:
            return None
        rest = dense / (tokens * len(self.sparse)) * dense_tokens
        return (read + rest) / (dense + rest)

    def of_sparse(self, config: EpsConfig) -> EpsConfig:
        """`config` for the layers of the cache: head modes of every layer of the model become those of the sparse ones.
        Raises ConfigError where they are of neither."""
        modes = config.selection_config.head_modes
        if modes is None or not config.cache_config.enabled or len(modes) == len(self.sparse):
            return config
        require(
            len(modes) == self.num_layers,
            f"head modes of {len(modes)} layers do not fit this model of {self.num_layers}, of which "
            f"{len(self.sparse)} are sparse: calibrate it",
        )
        return config.replace(head_modes=tuple(modes[layer] for layer in self.sparse))

    def line(self, config: EpsConfig) -> str:
        """Return the line that a user is told at the start."""
        left = f"; left dense: {_listed(self.dense)}" if self.dense else ""
        return f"eps: {describe(config)}; sparse in {len(self.sparse)} of {self.num_layers} layers{left}"

    @property
    def level(self) -> int:
        """Return the level of `line` in a log: a warning where layers are left dense."""
        return logging.WARNING if self.dense else logging.INFO


def _listed(dense: dict[int, str]) -> str:
    """Reasons, each with its layers as ranges."""
    by_reason: dict[str, list[int]] = {}
    for layer, reason in dense.items():
        by_reason.setdefault(reason, []).append(layer)
    return ", ".join(f"{reason} ({ranges(layers)})" for reason, layers in by_reason.items())


def ranges(layers: Sequence[int]) -> str:
    """Layers as ranges: 0-2 5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
