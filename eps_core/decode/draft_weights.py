"""4-bit weights for drafts: which layers have them, in groups of which size. What they hold is judged by
`reference.draft_weights`; how they are packed is each array library's affair.

With one sequence a step reads more weights than K and V, so that a sparse draft saves little unless its weights shrink,
too (QuantSpec, arXiv 2502.10424, drafts so). The verify pass keeps the full weights, and the text is theirs.
"""

import sys

from eps_core.errors import require
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import weight_names

BITS = 4
GROUP_SIZES = (64, 32)  # weights of a row that share a scale and an offset: the first that divides the row
FLAG = "--eps-draft-weights full"
HEAD = "lm_head"


def group_size(width: int) -> int | None:
    """Return the group size of rows of `width` weights; None where no group divides them."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


def quantised_layers(spec: ModelSpec) -> dict[str, int]:
    """Short name (`models.weights.weight_names`) of every linear layer that drafts read with 4 bits -> its group size.
    The output head is one of them, "lm_head", where it is the embedding, too. Layers whose rows no group divides keep
    their full weights, which one line on stderr says; where none is left, ConfigError."""
    shapes = {name: one.shape for name, one in weight_names(spec).items() if len(one.shape) == 2}
    shapes[HEAD] = shapes.pop("embed")
    sizes = {name: group_size(shape[1]) for name, shape in shapes.items()}
    full = sorted({shapes[name][1] for name, size in sizes.items() if size is None})
    widths = ", ".join(str(width) for width in full)
    require(
        any(sizes.values()),
        f"4-bit drafts need layers with a multiple of {GROUP_SIZES[-1]} weights a row, and this model's rows have "
        f"{widths}: add {FLAG}",
    )
    if full:
        print(
            f"4-bit drafts: layers with {widths} weights a row, no multiple of {GROUP_SIZES[-1]}, keep full weights",
            file=sys.stderr,
        )
    return {name: size for name, size in sizes.items() if size is not None}
