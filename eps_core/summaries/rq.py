"""Rotated quantised mean (ours): the sign of each dimension of each group's mean, about the mean of the unit of
`mean_tokens` tokens that the group lies in (an inverted file's residuals, with position as the list), read in stages:
after a random rotation a part of the dimensions is an estimate of them all."""

from functools import cache

import numpy as np

from eps_core.summaries import base
from eps_core.summaries.base import Constants, Field, MethodSpec, Score, Settings, Summary, UnitFacts

# Codes of single tokens find the recent tokens that matter by themselves, so few sink and recent tokens are always
# selected. The floor keeps short prompts nearly exact; measured on real models (results/README.md).
SPEC = MethodSpec(
    group_size=1,
    colour=0,
    coded=True,
    bounds_setting="rq_bounds",
    no_bounds="none without what they need in store: add --eps-bound-bits 8",
    budget_floor=1024,
    sink_recent=(4, 8),
    unit=UnitFacts(mean_tokens=64, cascade=(0.5,), rescore=0.125),
)

# Step of the rescoring bit in mean absolute values: that of the best uniform quantiser of a unit Gaussian with four
# levels (Max 1960), and a Gaussian's mean absolute value
SECOND_STEP = 0.9957 * 1.2533141373155003
QUERY_STEPS = 31  # to each side: four dimensions of a rounded query sum within int8: tables of nibbles are exact
PARTS = {1: ("codes",), 2: ("codes", "rest"), 3: ("codes", "more", "rest")}  # the fields of a code, in their order


def part_dims(settings: Settings, head_dim: int) -> tuple[int, ...]:
    """Dimensions of each part of a code about a unit's mean: (D / 2, D / 2) of two, (D / 4, D / 4, D / 2) of three.
    Fewer parts where one would be under a byte, and one where D is no power of two: blocks of their own are rotated
    there, and a part would speak of some of them alone."""
    parts = min(settings.parts, max(head_dim.bit_length() - 3, 1)) if head_dim & (head_dim - 1) == 0 else 1
    return tuple([head_dim >> max(parts - 1, 0)] + [head_dim >> at for at in range(parts - 1, 0, -1)])


def fields(settings: Settings, head_dim: int) -> dict[str, Field]:
    """Return the arrays of all groups of one mean. The first part of the codes lies byte by byte, that of all groups
    together: every one of them is read. Scales have one byte (`base.to_byte`)."""
    groups = settings.span_tokens // settings.S
    kept = {
        "mean": Field("uint8", (head_dim,)),
        "mean_scale": Field("float16"),
        "scale": Field("uint8", (groups,)),
    }
    dims = part_dims(settings, head_dim)
    for part, name in enumerate(PARTS[len(dims)]):
        num_bytes = -(-dims[part] // 8)
        kept[name] = Field("uint8", (groups, num_bytes) if part else (num_bytes, groups), part=part)
    if settings.second_bit:
        kept["second"] = Field("uint8", (groups, -(-head_dim // 8)), best_only=True)
        kept["second_scale"] = Field("uint8", (groups,), best_only=True)
    return kept | (
        dict.fromkeys(("error", "radius", "norm"), Field("float16", (groups,))) if settings.rq_bounds else {}
    )


def rq_signs(seed: int, head_dim: int) -> np.ndarray:
    """Return the random signs [2, D] float32 of the two rounds of `rotate`."""
    return (np.random.default_rng([seed, 2]).integers(0, 2, (2, head_dim)) * 2 - 1).astype(np.float32)


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    return {"signs": rq_signs(settings.seed, head_dim)}


def hadamard_blocks(head_dim: int) -> list[int]:
    """D as its powers of two, largest first: 96 -> [64, 32]. Each block gets its own Hadamard matrix."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


# ------------------------------------------------------------------------------------------------------------- rotation


@cache
def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotate(x: np.ndarray, seed: int) -> np.ndarray:
    """Return x [.., D] rotated: twice Sylvester-Hadamard blocks, scaled by 1/sqrt(block), over random signs.

    One round would not do for codes that are read in parts: the first D / 4 rows of a Sylvester matrix know nothing of
    four dimensions but a sum of theirs, so a key could hide from the first part. After two rounds the rows of a part
    are those of a random rotation (as the fast Johnson-Lindenstrauss transform composes them)."""
    for signs in rq_signs(seed, x.shape[-1]):
        signed, pieces, start = x * signs, [], 0
        for size in hadamard_blocks(x.shape[-1]):
            pieces.append(signed[..., start : start + size] @ _hadamard(size) / np.sqrt(size))
            start += size
        x = np.concatenate(pieces, axis=-1)
    return x


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [D] in 0 .. 2^bits - 1 -> uint8 [ceil(D bits / 8)]: dimension i in byte i*bits // 8 at bit i*bits % 8."""
    packed = np.zeros(-(-len(codes) * bits // 8), np.uint8)
    for i, code in enumerate(codes):
        packed[i * bits // 8] |= int(code) << (i * bits % 8)
    return packed


def unpack_codes(packed: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """The inverse of `pack_codes`: integers [.., D]."""
    position = np.arange(head_dim) * bits
    return (packed[..., position // 8] >> (position % 8)) & ((1 << bits) - 1)


def _second_bit(x: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """The rescoring bits [D] of signs `levels` [D] of x [D], and their scale."""
    step = SECOND_STEP * np.abs(x).mean()
    second = ((x >= step) | ((x < 0) & (x >= -step))).astype(int)
    finer = levels + (2 * second - 1) / 2
    product = float(x @ finer)
    return second, base.near16(float(x @ x) / product) if product > 0 else np.float16(0)


def build(settings: Settings, constants: Constants, k: np.ndarray) -> Summary:
    """Return the summary of all groups of one mean, k [U, D]: the rotated mean in a byte a dimension, and of each group
    the sign of what its own mean differs from what is stored of that, with one scale that makes <x_hat, x> = |x|^2
    (RaBitQ, arXiv 2405.12497: |x|^2 / |x|_1). `second_bit` adds the bit that makes of each a 2-bit code, levels
    sign + second / 2 of +-1, with a scale of its own."""
    turned = rotate(k.reshape(-1, settings.S, k.shape[1]).mean(axis=1), settings.seed)
    codes, mean_scale = base.mean_codes(turned.mean(axis=0))
    stored_mean = codes * float(mean_scale)
    summary: Summary = {"mean": (codes.astype(int) + base.MEAN_MOST + 1).astype(np.uint8), "mean_scale": mean_scale}
    dims = part_dims(settings, k.shape[1])
    edges = np.cumsum((0, *dims))
    rows: dict[str, list] = {name: [] for name in fields(settings, k.shape[1]) if name not in summary}
    for group, x in enumerate(turned - stored_mean):
        positive = (x >= 0).astype(int)
        levels, size = 2.0 * positive - 1, np.abs(x).sum()
        scale = base.near16(float(x @ x) / size) if size > 0 else np.float16(0)
        rows["scale"].append(base.to_byte(scale))
        for name, start, end in zip(PARTS[len(dims)], edges, edges[1:], strict=False):
            rows[name].append(pack_codes(positive[start:end], 1))
        if settings.second_bit:
            second, second_scale = _second_bit(x, levels)
            rows["second"].append(pack_codes(second, 1))
            rows["second_scale"].append(base.to_byte(second_scale))
        if settings.rq_bounds:
            rounded = levels * base.from_byte(base.to_byte(scale))
            own = k[group * settings.S : (group + 1) * settings.S]
            rows["error"].append(base.up16(float(np.linalg.norm(x - rounded))))
            rows["radius"].append(base.up16(base.key_norm(rotate(own, settings.seed) - stored_mean - rounded)))
            rows["norm"].append(base.up16(base.key_norm(own)))
    summary |= {name: np.stack(values) for name, values in rows.items()}
    summary["codes"] = summary["codes"].T
    return summary


def decode_units(settings: Settings, summary: Summary, head_dim: int) -> np.ndarray:
    """mu_hat [.., N, D] in rotated space of groups about their units' means, from fields [.., *shape]."""
    mean = (base.f64(summary, "mean") - (base.MEAN_MOST + 1)) * base.f64(summary, "mean_scale")[..., None]
    signs = _signs(settings, summary, head_dim, settings.parts)
    return np.asarray(mean[..., None, :] + base.from_byte(summary["scale"])[..., None] * signs)


def rotate_query(a: np.ndarray, seed: int) -> np.ndarray:
    """Return `rotate` of a [D] in float32 with the additions in the backends' order, so that what is rounded of it is
    equal: pairs that are half a block apart are added and subtracted, down to neighbours."""
    x = a.astype(np.float32)
    for signs in rq_signs(seed, len(a)):
        signed, pieces, start = x * signs, [], 0
        for size in hadamard_blocks(len(a)):
            block, half = signed[start : start + size], size // 2
            while half:
                pairs = block.reshape(-1, 2, half)
                block = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
                half //= 2
            pieces.append(block * np.float32(1 / np.sqrt(size)))
            start += size
        x = np.concatenate(pieces)
    return x


def rounded_query(turned: np.ndarray) -> tuple[np.ndarray, float]:
    """(integers [D] within +-QUERY_STEPS, step) of a rotated query [D] float32 ~ integers * step."""
    step = np.float32(np.abs(turned).max()) / np.float32(QUERY_STEPS)
    if not (step > 0 and np.isfinite(step)):
        return np.zeros(len(turned)), float(step)
    return np.rint(turned / step).astype(np.float64), float(step)


def _unit_base(settings: Settings, summary: Summary, a: np.ndarray) -> np.ndarray:
    """log n + m_hat.a of each group of units: [units, N]."""
    codes = base.f64(summary, "mean") - (base.MEAN_MOST + 1)
    # sums row by row: equal units must tie, wherever a library's product would put them
    dots = base.f64(summary, "mean_scale") * (codes * rotate(a, settings.seed)).sum(axis=-1)
    return np.log(settings.S) + np.repeat(dots[:, None], settings.span_tokens // settings.S, axis=1)


def _signs(settings: Settings, summary: Summary, head_dim: int, parts: int) -> np.ndarray:
    """Levels +-1 [units, N, d] of the first `parts` of the codes."""
    dims = part_dims(settings, head_dim)
    names = PARTS[len(dims)][:parts]
    pieces = [summary[name].swapaxes(-1, -2) if name == "codes" else summary[name] for name in names]
    codes = [unpack_codes(piece, 1, own) for piece, own in zip(pieces, dims, strict=False)]
    return 2.0 * np.concatenate(codes, axis=-1) - 1


def _estimate(settings: Settings, summary: Summary, a: np.ndarray, levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """log n + mu_hat.a [units N] from what is known of the first d dimensions of the residuals, scale * levels
    [units, N, d], the query rounded to QUERY_STEPS (as RaBitQ does, with 4 bits)."""
    integers, step = rounded_query(rotate_query(a, settings.seed))
    many = levels.shape[-1]
    # in this order: a sum of whole and half numbers, and a scale of four bits times it, are exact in float32, too
    dots = scale * (levels @ integers[:many]) * (step * len(a) / many)
    estimate = (_unit_base(settings, summary, a) + dots).reshape(-1)
    return np.where(np.isfinite(estimate), estimate, base.LARGEST_ESTIMATE)


def stage(settings: Settings, summary: Summary, a: np.ndarray, parts: int) -> np.ndarray:
    """log n + mu_hat.a from the first `parts` of codes about a unit's mean: [units N]. An estimate; from all parts,
    too."""
    signs = _signs(settings, summary, len(a), parts)
    return _estimate(settings, summary, a, signs, base.from_byte(summary["scale"]))


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """log n + mu_hat.a by the first part of the codes [units, ..]: [units N]; with a stored radius, `ball` about
    mu_hat."""
    estimate = stage(settings, summary, a, 1)
    if not settings.rq_bounds:
        return estimate, None, None
    # bounds are about what is stored, and ask the query as it is
    dots = base.from_byte(summary["scale"]) * (_signs(settings, summary, len(a), 1) @ rotate(a, settings.seed))
    mean = (_unit_base(settings, summary, a) + dots).reshape(-1)
    error, radius, norm = (base.f64(summary, name).reshape(-1) for name in ("error", "radius", "norm"))
    # the mean, at most so large, is added and taken away again, whatever the size of the keys
    most = base.f64(summary, "mean_scale") * base.MEAN_MOST * np.sqrt(len(a))
    stored = np.repeat(most, settings.span_tokens // settings.S)
    size, slack = np.linalg.norm(a), base.rounding_slack(a, norm + radius + stored)
    return estimate, mean - size * error - slack, mean + size * radius + slack


def rescore(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> np.ndarray:
    """log n + mu_hat.a from two bits a dimension: [G]. An estimate, as of one bit."""
    head_dim = len(a)
    signs = _signs(settings, summary, head_dim, settings.parts)
    finer = signs + (2.0 * unpack_codes(summary["second"], 1, head_dim) - 1) / 2
    return _estimate(settings, summary, a, finer, base.from_byte(summary["second_scale"]))
