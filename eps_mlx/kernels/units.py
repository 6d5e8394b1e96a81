"""Metal kernels that estimate masses from codes about units' means, read in stages (`eps_core.summaries.rq`).

`score_units` reads the means and the first part of all codes, and `read_on`, once for each further stage, what it needs
of the groups that `select_best` lists. A list of a list is taken from its values alone, not from all groups again; so
nothing is sorted, and nobody waits.

The sums over rounded queries (`turn_units`) are of whole and half numbers, exact in any order. What is added of a
unit's mean is summed once, by the lanes that share the unit, and is the same for all its groups and stages.

One lane takes PIECE neighbouring groups of a unit: the first part lies plane by plane, so that one read has a byte of
each of them, and a query's number is read once for all.

A group's codes are read once for all R query heads, and not at all where it is open, past the end or without a valid
summary. Groups with equal codes and scales get equal estimates to the bit: every group's sum is added in one order.

Why no tables of what a byte or nibble adds, which serve a CPU best: at D = 128, R = 4 a simdgroup of 32 groups costs 32
reads of 16 bytes a lane of threadgroup memory, 4 to 8 clocks each and more where banks collide; selecting signs costs
128 * (R + 2) instructions at four a clock, as much, and needs none of the 8 to 64 KiB such tables take of the 32 KiB
that a threadgroup has.
"""

import mlx.core as mx

from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_mlx.kernels.launch import Kernel, integers, launch
from eps_mlx.kernels.turn_units import THREADS, Query

THREADGROUP_BYTES = 32 * 1024  # what Apple GPUs have
WORDS = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}  # by their bytes
PIECE = 4  # groups that one lane scores; changes speed only

# of a byte that `to_byte` made; float32 has these numbers, but a GPU may take those below 2^-126 for 0
_NUMBER = "(%s < 8u ? float(%s) * 7.62939453125e-6f : as_type<float>((%s << 20) + (112u << 23)))"


def _number(byte: str) -> str:
    return _NUMBER % (byte, byte, byte)


def _combine(dot: str, base: str) -> str:
    """`best` of the R query heads, by their sums dot[r] over a code of scale `size`: what is not finite becomes the
    largest estimate, then their largest or, where SUM, the log of the sum of their masses."""
    return f"""
    float best = -INFINITY;
    for (int r = 0; r < R; r++) {{
        // a scale times a sum is exact
        const float exact = size * {dot}[r];
        const float x = {base} + exact * (step[row * R + r] * float(STRETCH));
        {dot}[r] = isfinite(x) ? x : {LARGEST_ESTIMATE!r}f;
        best = max(best, {dot}[r]);
    }}
    if (SUM) {{
        float total = 0.0f;
        for (int r = 0; r < R; r++) {{
            total += exp({dot}[r] - best);
        }}
        best += log(total);
    }}
"""


_ROW = """
    const int tid = int(thread_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    const int b = row / HKV;
    const int head = row % HKV;
    const int num_groups = sizes[0];
    const int spans = num_groups / N;
"""

# dimension by dimension, so that the R values of one are neighbours; zeros stand behind the last one
_LOAD = """
    threadgroup float %(name)s[%(many)s * R];
    for (int i = tid; i < %(many)s * R; i += THREADS) {
        const int d = i / R;
        %(name)s[i] = d < D ? %(array)s[(size_t(row) * R + i %% R) * D + d] : 0.0f;
    }
"""

_SCORE_UNITS = (
    """
    constexpr int SHARING = N / PIECE;  // lanes of a span: of what is summarised together
    constexpr int PER_WORD = int(sizeof(WORD));
    constexpr int WORDS = D / PER_WORD;
"""
    + _ROW
    + _LOAD % {"name": "query", "many": "D", "array": "turned"}
    + _LOAD % {"name": "whole", "many": "8 * B0", "array": "rounded"}
    + """
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int part = tid % SHARING;
    const int length = lengths[b];
    const int span = int(threadgroup_position_in_grid.x) * (THREADS / SHARING) + tid / SHARING;
    int tile = -1;
    if (span < length / (N * S)) {
        const int unit = table[b * (spans / SPU) + span / SPU];
        if (valid[unit * SPU + span % SPU] != 0) {
            tile = (unit * HKV + head) * SPU + span % SPU;
        }
    }

    float mean_dot[R];
    for (int r = 0; r < R; r++) {
        mean_dot[r] = 0.0f;
    }
    for (int w = tile < 0 ? WORDS : part; w < WORDS; w += SHARING) {
        const uint word = uint(mean[size_t(tile) * WORDS + w]);
        #pragma unroll
        for (int j = 0; j < PER_WORD; j++) {
            const float level = float((word >> (8 * j)) & 255u) - 128.0f;
            #pragma unroll
            for (int r = 0; r < R; r++) {
                mean_dot[r] += level * query[(w * PER_WORD + j) * R + r];
            }
        }
    }
    for (int apart = 1; apart < SHARING; apart *= 2) {
        for (int r = 0; r < R; r++) {
            mean_dot[r] += simd_shuffle_xor(mean_dot[r], ushort(apart));
        }
    }
    const float mean_step = tile < 0 ? 0.0f : static_cast<float>(mean_scale[tile]);
    for (int r = 0; r < R; r++) {
        mean_dot[r] = log(float(S)) + mean_dot[r] * mean_step;
        if (ANCHORED) {
            mean_dot[r] -= anchor[row * R + r];
        }
        if (part == 0 && span < spans) {
            base[(size_t(row) * spans + span) * R + r] = mean_dot[r];
        }
    }

    float dot[PIECE][R];
    #pragma unroll
    for (int k = 0; k < PIECE; k++) {
        for (int r = 0; r < R; r++) {
            dot[k][r] = 0.0f;
        }
    }
    for (int j = tile < 0 ? B0 : 0; j < B0; j++) {
        const auto plane = load_piece<PIECE>(codes + (size_t(tile) * B0 + j) * N + part * PIECE);
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            #pragma unroll
            for (int r = 0; r < R; r++) {
                const float a = whole[(8 * j + i) * R + r];
                #pragma unroll
                for (int k = 0; k < PIECE; k++) {
                    dot[k][r] += (uint(plane.v[k]) >> i) & 1u ? a : -a;
                }
            }
        }
    }
    #pragma unroll
    for (int k = 0; k < PIECE; k++) {
        const int n = part * PIECE + k;
        const int g = span * N + n;
        if (g < num_groups && tile < 0) {
            estimate[size_t(row) * num_groups + g] = g * S < length ? INFINITY : -INFINITY;
        } else if (g < num_groups) {
            const uint byte = uint(scale[size_t(tile) * N + n]);
"""
    + f"const float size = {_number('byte')};"
    + _combine("dot[k]", "mean_dot[r]")
    + """
            estimate[size_t(row) * num_groups + g] = best;
        }
    }
"""
)


def _listed(place: str) -> str:
    """The group that an entry of the list stands for."""
    return f"(PICKED ? groups[row * above + picked[row * width + {place}]] : picked[row * width + {place}])"


# A threadgroup takes the next THREADS of the list, and of the estimates the run from its first group to the one where
# the next threadgroup starts: it copies the run, then overwrites what is listed.
_READ_ON = (
    _ROW
    + """
    constexpr int BYTES = B0 + B1 + B2;
    const int above = sizes[1];
    const int width = sizes[2];
    const int count = counts[row];
    const int begin = int(threadgroup_position_in_grid.x) * THREADS;
    const int own = begin + tid;
    const int next = begin + THREADS;
"""
    + _LOAD % {"name": "query", "many": "8 * BYTES", "array": "rounded"}
    + f"""
    if (begin < count || begin == 0) {{
        const int from = begin == 0 ? 0 : {_listed("begin")};
        const int to = next < count ? {_listed("next")} : num_groups;
        for (int g = from + tid; g < to; g += THREADS) {{
            refined[size_t(row) * num_groups + g] = estimate[size_t(row) * num_groups + g];
        }}
    }}
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
    if (own >= width) {{
        return;
    }}
    if (own >= count) {{
        values[size_t(row) * width + own] = -INFINITY;
        listed[size_t(row) * width + own] = -1;
        return;
    }}
    const int g = {_listed("own")};
"""
    + """
    const int span = g / N;
    const int n = g % N;
    const size_t tile = size_t(table[b * (spans / SPU) + span / SPU] * HKV + head) * SPU + span % SPU;
    const size_t mine = tile * N + n;
    float dot[R];
    for (int r = 0; r < R; r++) {
        dot[r] = 0.0f;
    }
    for (int j = 0; j < BYTES; j++) {
        uint signs;
        if (j < B0) {
            signs = uint(codes[(tile * B0 + j) * N + n]);
        } else if (j < B0 + B1) {
            signs = uint(more[mine * B1 + (j - B0)]);
        } else {
            signs = uint(rest[mine * B2 + (j - B0 - B1)]);
        }
        const uint halves = SECOND ? uint(second[mine * BYTES + j]) : 0u;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const float sign = (signs >> i) & 1u ? 1.0f : -1.0f;
            const float level = SECOND ? sign + ((halves >> i) & 1u ? 0.5f : -0.5f) : sign;
            #pragma unroll
            for (int r = 0; r < R; r++) {
                dot[r] += level * query[(8 * j + i) * R + r];
            }
        }
    }
"""
    + f"""
    const uint byte = uint(scale[mine]);
    const float size = {_number("byte")};
"""
    + _combine("dot", "base[(size_t(row) * spans + span) * R + r]")
    + """
    refined[size_t(row) * num_groups + g] = best;
    values[size_t(row) * width + own] = best;
    listed[size_t(row) * width + own] = g;
"""
)

_score_units = Kernel(
    "eps_score_units",
    (
        "turned", "rounded", "step", "anchor", "mean", "mean_scale", "scale", "codes", "valid", "table", "lengths",
        "sizes",
    ),
    ("estimate", "base"),
    _SCORE_UNITS,
)  # fmt: skip
_read_on = Kernel(
    "eps_read_on",
    (
        "rounded", "step", "base", "codes", "more", "rest", "second", "scale", "estimate", "groups", "picked", "counts",
        "table", "sizes",
    ),
    ("refined", "values", "listed"),
    _READ_ON,
)  # fmt: skip


def score_units(
    query: Query, summary: dict[str, mx.array], valid: mx.array, table: mx.array, lengths: mx.array, *,
    group_size: int, sums: bool,
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """(estimates [B, Hkv, G] float32 of log masses by the first part of the codes, max over the R query heads; what the
    means say of them [B, Hkv, spans, R] float32, for `read_on`), less the anchor of each query head where there are
    anchors; where it `sums`, the log of the sum of masses takes the place of the max.
    `summary`: a layer's pools by name, fields as in `eps_core.summaries.rq`, [P, Hkv, spans of a unit, ..]; valid
    [P * spans of a unit] uint8 (0: no valid summary), table [B, M] int32, lengths [B] int32."""
    repeat, head_dim = query.turned.shape[2:]
    template, mean = _template(query, summary), summary["mean"]
    assert mean.shape[-1] == head_dim, f"means of {mean.shape[-1]} bytes"
    # the widest words that a mean is a whole number of
    word = next(word for size, word in WORDS.items() if head_dim % size == 0)
    num_groups, finalized = table.shape[1] * template["SPU"] * template["N"], template["N"]
    piece = min(PIECE, finalized)
    held = (head_dim + 8 * template["B0"]) * repeat * 4
    if held > THREADGROUP_BYTES:
        raise ValueError(
            f"{repeat} query heads of {head_dim} dimensions per kv head need {held} bytes of threadgroup memory, more "
            f"than {THREADGROUP_BYTES}: use the array path"
        )
    num_spans, rows = num_groups // finalized, len(table) * template["HKV"]
    estimate, base = launch(
        _score_units,
        [
            *query[:3], query.step if query.anchor is None else query.anchor, mean.view(word),
            *(summary[name] for name in ("mean_scale", "scale", "codes")), valid, table, lengths, integers(num_groups),
        ],
        template | {
            "WORD": word, "S": group_size, "PIECE": piece,
            "STRETCH": _stretch(head_dim, template["B0"]), "ANCHORED": query.anchor is not None, "SUM": sums,
        },
        grid=(THREADS * -(-num_spans * (finalized // piece) // THREADS), rows, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(len(table), template["HKV"], num_groups), (len(table), template["HKV"], num_spans, repeat)],
        output_dtypes=[mx.float32] * 2,
    )  # fmt: skip
    return estimate, base


def read_on(
    query: Query, base: mx.array, summary: dict[str, mx.array], table: mx.array, estimate: mx.array,
    groups: mx.array | None, picked: mx.array, counts: mx.array, *, parts: int | None, sums: bool,
) -> tuple[mx.array, mx.array, mx.array]:  # fmt: skip
    """Better estimates of listed groups, from the first `parts` of their codes or, where that is None, from two bits a
    dimension: (`estimate` [B, Hkv, G] with them, as a new array; they alone [B, Hkv, W] float32, -inf behind the last;
    their groups [B, Hkv, W] int32, then -1). picked [B, Hkv, W] int32 ascending are places in the list `groups`
    [B, Hkv, V] int32, or groups themselves where that is None; counts [B, Hkv] int32 of them, all with a valid summary.
    Only listed groups' codes are read. The rest as for `score_units`."""
    num_groups, width, is_second = estimate.shape[2], picked.shape[2], parts is None
    template = _template(query, summary)
    kept = [name for name in ("codes", "more", "rest") if name in summary][:parts]
    more, rest = (summary[name] if name in kept else None for name in ("more", "rest"))
    template |= {
        "B1": 0 if more is None else more.shape[-1], "B2": 0 if rest is None else rest.shape[-1], "SECOND": is_second,
        "PICKED": groups is not None, "SUM": sums,
    }  # fmt: skip
    num_bytes = template["B0"] + template["B1"] + template["B2"]
    unread = summary["codes"]  # stands for what there is not
    rescored, values, listed = launch(
        _read_on,
        [
            query.rounded, query.step, base, summary["codes"],
            unread if more is None else more, unread if rest is None else rest,
            summary["second"] if is_second else unread, summary["second_scale" if is_second else "scale"], estimate,
            picked if groups is None else groups, picked, counts, table,
            integers(num_groups, width if groups is None else groups.shape[2], width),
        ],
        template | {"STRETCH": _stretch(query.turned.shape[-1], num_bytes)},
        grid=(THREADS * max(-(-width // THREADS), 1), counts.size, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[estimate.shape, picked.shape, picked.shape],
        output_dtypes=[mx.float32, mx.float32, mx.int32],
    )  # fmt: skip
    return rescored, values, listed


def _template(query: Query, summary: dict[str, mx.array]) -> dict:
    """Return the facts of the pools that both kernels must know."""
    repeat, head_dim = query.turned.shape[2:]
    _, kv_heads, spans_per_unit, num_bytes, groups = summary["codes"].shape
    return {
        "D": head_dim, "R": repeat, "HKV": kv_heads, "SPU": spans_per_unit, "N": groups, "B0": num_bytes,
        "THREADS": THREADS,
    }  # fmt: skip


def _stretch(head_dim: int, num_bytes: int) -> int:
    """By how much a sum over the dimensions of so many bytes falls short of one over all."""
    return max(head_dim // (8 * num_bytes), 1)
