"""Functions that all methods share, float32 in Torch operations.

One file is one method, a module with the functions of its namesake in `eps_core.summaries`, which has the sources and
formulas, and whose facts and fields it shares:

- `build(store, constants, k [.., Hkv, S, D])`: stored arrays [.., Hkv, fields] of keys, float32, exactly as attention
  will read them;
- `score(store, constants, summary [B, Hkv, G, ..], a [B, Hkv, R, D])`, a = scale * q: `(estimate, lower, upper)`, each
  [B, Hkv, R, G] or None, of log A_p, the natural log of the group's softmax mass (scaled logits): `estimate` ranks and
  is no bound, `lower <= log A_p <= upper` for every q. Stored scalars are rounded to their safe side, and `slack` pays
  for float32 arithmetic;
- where its spec says so: `extend` and `finalize`, which follow partial groups, and `rescore`.

`constants`: what a layer keeps apart from its groups, see `eps_core.summaries.table.constants`, and of key codes
`centre`; of methods that score by place, `groups` [G] and `length` [B, 1, 1, 1] of the sequences.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Summary = dict[str, Tensor]
Score = tuple[Tensor, Tensor | None, Tensor | None]


class Part(NamedTuple):
    """Keys of R groups that one write does not make whole, for the methods that follow partial groups."""

    keys: Tensor  # [R, Hkv, L, D] float32
    present: Tensor  # [R, 1, L, 1] bool: which of them are keys
    number: Tensor  # [R, 1, 1] float32: how many
    before: Tensor  # [R, 1, 1] float32: keys of the group that came earlier; 0: it starts here


SCHATTEN_DOUBLINGS = 4
PIECE_GROUPS = 256  # groups that a CPU decodes at once, to stay in its cache; changes speed only


# ------------------------------------------------------------------------------------------------------------- rounding


def up16(x: Tensor) -> Tensor:
    """A float16 that is at least x, for x >= 0. Rounding to nearest loses at most 2^-11; the rest absorbs float32."""
    return (x * (1 + 2.0**-10) + 2.0**-24).to(torch.float16)


def near16(x: Tensor) -> Tensor:
    """The nearest finite float16: for estimates, never for bounds."""
    return x.clamp(-65504.0, 65504.0).to(torch.float16)


def mean_codes(mu: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """int8 codes [.., D] and a float16 scale [..] with mu ~ codes * scale, |codes| <= most."""
    largest = mu.abs().amax(dim=-1)
    scale = up16(largest / most)
    scale = torch.where((largest > 0) & torch.isfinite(scale), scale, 0)
    return rounded_codes(mu, scale, most).to(torch.int8), scale


def to_byte(scale: Tensor) -> Tensor:
    """float16 numbers >= 0 in one byte: five bits of exponent and three of mantissa, to the nearest."""
    return ((scale.view(torch.int16).int() + 64) >> 7).clamp(max=0xF7).to(torch.uint8)


def from_byte(stored: Tensor) -> Tensor:
    """The numbers [..] float32 that `to_byte` stored."""
    return (stored.to(torch.int16) << 7).view(torch.float16).float()


def rounded_codes(x: Tensor, scale: Tensor, most: int) -> Tensor:
    """round(x / scale) within +-most, 0 where the scale [..] is 0; float32 [.., D]."""
    step = scale.float()[..., None]
    codes = (x / torch.where(step > 0, step, 1)).round().clamp(-most, most)
    return torch.where(step > 0, codes, 0)


def norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def key_norm(k: Tensor) -> Tensor:
    return norms(k).amax(dim=-1)


def right_singular(k: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(squared singular values [.., count], right singular vectors as rows [.., count, D]) of k [.., S, D], largest
    first, zeros where there are none; through the smaller Gram matrix."""
    n, head_dim = k.shape[-2:]
    tall = n >= head_dim
    # eigh raises on NaN and Inf, which `check_finite` must be left to report
    gram = torch.nan_to_num(k.mT @ k if tall else k @ k.mT, nan=0.0, posinf=0.0, neginf=0.0)
    try:
        values, vectors = torch.linalg.eigh(gram)
    except torch.linalg.LinAlgError:  # float32 does not converge on some finite matrices
        values, vectors = (part.float() for part in torch.linalg.eigh(gram.double()))
    kept = min(count, n, head_dim)
    values = values.flip(-1)[..., :kept].clamp(min=0)
    rows = vectors.flip(-1)[..., :kept].mT
    if not tall:
        rows = rows @ k
        size = norms(rows)[..., None]
        rows = torch.where(size > 0, rows / torch.where(size > 0, size, 1), 0)
    pad = torch.nn.functional.pad
    return pad(values, (0, count - kept)), pad(rows, (0, 0, 0, count - kept))


def direction_codes(direction: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes as float32 [.., D] of a direction, and 1 / |codes| [..] (0 where the direction is 0)."""
    largest = direction.abs().amax(dim=-1, keepdim=True)
    codes = (direction / torch.where(largest > 0, largest, 1) * 127).round()
    length = norms(codes)
    return codes, torch.where(length > 0, 1 / torch.where(length > 0, length, 1), 0)


def schatten_bound(matrix: Tensor) -> Tensor:
    """(tr E^16)^(1/16) >= the spectral norm of the symmetric E [.., n, n]: valid without an eigensolver. Scaled by the
    Frobenius norm so that the sixteenth power stays within float32; the 1e-4 covers rounding."""
    size = torch.linalg.vector_norm(matrix, dim=(-1, -2))
    power = matrix / torch.where(size > 0, size, 1)[..., None, None]
    for _ in range(SCHATTEN_DOUBLINGS - 1):
        power = power @ power
    # tr (P P) of a symmetric P is its squared Frobenius norm: the last product is not needed
    trace = (power * power).sum(dim=(-1, -2))
    return size * trace ** (0.5**SCHATTEN_DOUBLINGS) * (1 + 1e-4)


# -------------------------------------------------------------------------------------------------------------- scoring


def pieces(codes: Tensor) -> Iterator[Tensor]:
    """Codes [B, Hkv, G, ..] in runs of groups: on a CPU decoded codes must not leave its cache (20 times faster than
    whole at 8,192 groups); a GPU takes all at once."""
    return iter(codes.split(PIECE_GROUPS if codes.device.type == "cpu" else max(codes.shape[2], 1), dim=2))


def all_dots(codes: Tensor, a: Tensor) -> Tensor:
    """Inner products [B, Hkv, R, G] of stored codes [B, Hkv, G, D] with a [B, Hkv, R, D]."""
    columns = a.mT
    return torch.cat([piece.float() @ columns for piece in pieces(codes)], dim=2).mT


def per_group(summary: Summary, name: str) -> Tensor:
    """A stored scalar [B, Hkv, G] as float32 [B, Hkv, 1, G]."""
    return summary[name].float()[..., None, :]


def logit_slack(a: Tensor, norm: Tensor) -> Tensor:
    """Return the error that float32 arithmetic may add to a sum of D products of size |a| * norm (four times the worst
    case); the 1 covers log n."""
    return (a.shape[-1] + 32) * 2.0**-21 * (norms(a)[..., None] * norm + 1)


def bennett(b: Tensor, v: Tensor) -> Tensor:
    """log( b^2/(b^2+v) exp(-v/b) + v/(b^2+v) exp(b) ): the largest log E exp(X) of a centred X <= b with variance <= v
    (Bennett 1962). Monotone in both, so upper bounds may be plugged in. 0 where b or v is 0."""
    spread = (b > 0) & (v > 0)
    b, v = torch.where(spread, b, 1.0), torch.where(spread, v, 1.0)
    # log(b^2/(b^2+v)) and log(v/(b^2+v)) without overflow or cancellation
    ratio = torch.log(v) - 2 * torch.log(b)
    softplus = torch.nn.functional.softplus
    value = torch.logaddexp(-softplus(ratio) - v / b, -softplus(-ratio) + b)
    return torch.where(spread, value, 0.0)


def random_energy(v: Tensor, n: int) -> Tensor:
    """v/2 while sqrt(v) <= sqrt(2 ln n), else sqrt(2 ln n) sqrt(v) - ln n (Derrida 1981)."""
    edge = math.sqrt(2 * math.log(n))
    return torch.where(torch.sqrt(v) <= edge, v / 2, edge * torch.sqrt(v) - math.log(n))
