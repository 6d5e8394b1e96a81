"""Quantised weights of decode steps: which layers have them, in groups of which size. What they hold is judged by
`reference.quantised_weights`; how they are packed is each array library's affair.

With one sequence a step reads more weights than K and V, so that sparse attention, and a sparse draft (QuantSpec, arXiv
2502.10424), save little unless the weights shrink, too. Prompts are read with the full weights, which stay in memory:
with many rows a product is bound by arithmetic, not by bytes.
"""

import sys

from eps_core.errors import require
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import weight_names

GROUP_SIZES = (64, 32)  # weights of a row that share 4-bit steps: the first that divides the row
HEAD = "lm_head"


def group_size(width: int) -> int | None:
    """Return the group size of rows of `width` weights; None where no group divides them."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


def quantised_layers(spec: ModelSpec, bits: int) -> dict[str, int]:
    """Return the group size by short name (`models.weights.weight_names`) of every linear layer that steps read with 4
    or 8 bits; with 8 bits a row is one group. The output head is one of them, "lm_head", where it is the embedding,
    too. Layers whose rows no group divides keep their full weights, which one line on stderr says; where none is left,
    ConfigError."""
    shapes = {name: one.shape for name, one in weight_names(spec).items() if len(one.shape) == 2}
    shapes[HEAD] = shapes.pop("embed")
    sizes = {name: group_size(shape[1]) for name, shape in shapes.items()}
    full = sorted({shapes[name][1] for name, size in sizes.items() if size is None})
    widths = ", ".join(str(width) for width in full)
    require(
        any(sizes.values()),
        f"{bits}-bit weights need layers with a multiple of {GROUP_SIZES[-1]} weights a row, and this model's rows "
        f"have {widths}: use full weights",
    )
    if full:
        print(
            f"{bits}-bit weights: layers with {widths} weights a row, no multiple of {GROUP_SIZES[-1]}, keep full ones",
            file=sys.stderr,
        )
    return {name: shapes[name][1] if bits == 8 else size for name, size in sizes.items() if size is not None}
