"""Metal kernels that estimate the masses of groups straight from the paged summaries: nothing is gathered or unpacked.

Estimates are the array path's (`eps_mlx.summaries`) up to float32 rounding: +inf for a group inside the sequence
without a valid summary, -inf past its end. A group's codes are read once for all R query heads of its kv head, and not
at all where it is open, past the end or without a valid summary. Groups with equal codes and scales get equal
estimates to the bit: every group's sum is added in the same order.

Why no tables of what a byte or nibble adds, which serve a CPU best: at D = 128, R = 4 a simdgroup of 32 groups costs 32
reads of 16 bytes a lane of threadgroup memory, 4 to 8 clocks each and more where banks collide; selecting signs costs
128 * (R + 2) instructions at four a clock, as much, and needs none of the 8 to 64 KiB such tables take of the 32 KiB
that a threadgroup has.

Bodies follow one rule so that a short header of macros can make CUDA of them: `threadgroup` is the only address space
named, and pointers are indexed, never declared. Letters as in `gate.protocol`.
"""

import math
from functools import cache

import mlx.core as mx

from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_mlx.kernels.launch import Kernel, integers, launch

THREADS = 256  # of a threadgroup; changes speed only
LANE_BYTES = 16  # of a group's codes that one lane reads, about; changes speed only
THREADGROUP_BYTES = 32 * 1024  # what Apple GPUs have

_WORDS = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}

# (sequence, kv head) of this threadgroup, and which of the LANES neighbours that share a group this thread is
PLACE = """
    constexpr int PER_WORD = 8 * int(sizeof(WORD)) / BITS;
    constexpr int WORDS = (D * BITS + 7) / 8 / int(sizeof(WORD));
    constexpr int WIDE = WORDS % 4 == 0 ? 4 : (WORDS % 2 == 0 ? 2 : 1);  // words that a lane reads at once
    constexpr int TILES = THREADS / LANES;
    const int tid = int(thread_index_in_threadgroup);
    const int part = tid % LANES;
    const int row = int(threadgroup_position_in_grid.y);
    const int b = row / HKV;
    const int head = row % HKV;
    const int num_groups = sizes[0];
"""

# channel by channel, so that the R values of one are neighbours; zeros stand behind the last channel
LOAD_QUERY = """
    threadgroup float query[WORDS * PER_WORD * R];
    for (int i = tid; i < WORDS * PER_WORD * R; i += THREADS) {
        const int d = i / R;
        query[i] = d < D ? %s : 0.0f;
    }
"""

# the EACH groups of this thread as tiles of the pool, -1 where nothing is to be read
FIND_TILES = """
    const int length = lengths[b];
    const int first = int(threadgroup_position_in_grid.x) * TILES * EACH + tid / LANES;
    int tile[EACH];
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int g = first + k * TILES;
        tile[k] = -1;
        if (g < length / S) {
            const int unit = table[b * (num_groups / GPU) + g / GPU];
            if (valid[unit * GPU + g % GPU] != 0) {
                tile[k] = (unit * HKV + head) * GPU + g % GPU;
            }
        }
    }
"""

ZERO_DOTS = """
    float dot[EACH][R];
    #pragma unroll
    for (int k = 0; k < EACH; k++) {
        for (int r = 0; r < R; r++) {
            dot[k][r] = 0.0f;
        }
    }
"""

SUM_LANES = """
    for (int step = 1; step < LANES; step *= 2) {
        for (int k = 0; k < EACH; k++) {
            for (int r = 0; r < R; r++) {
                dot[k][r] += simd_shuffle_xor(dot[k][r], ushort(step));
            }
        }
    }
"""

STORE = f"""
    #pragma unroll
    for (int k = 0; k < EACH; k++) {{
        const int g = first + k * TILES;
        if (part == 0 && g < num_groups) {{
            float best = g * S < length && tile[k] < 0 ? INFINITY : -INFINITY;
            for (int r = 0; r < R && tile[k] >= 0; r++) {{
                const float x = %s;
                best = max(best, isfinite(x) ? x : {LARGEST_ESTIMATE!r}f);
            }}
            estimate[size_t(row) * num_groups + g] = best;
        }}
    }}
"""

_TURN = """
    const int tid = int(thread_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    const int head = row / R % HKV;
    threadgroup float a[D];
    for (int d = tid; d < D; d += THREADS) {
        a[d] = static_cast<float>(q[size_t(row) * D + d]) * softmax_scale[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = tid; i < D; i += THREADS) {
        float sum = 0.0f;
        for (int d = 0; d < D; d++) {
            sum += a[d] * rotation[d * D + i];
        }
        turned[size_t(row) * D + i] = sum;
    }
    if (tid < 32) {
        float sum = 0.0f;
        for (int d = tid; d < D; d += 32) {
            sum += a[d] * static_cast<float>(centre[head * D + d]);
        }
        sum = simd_sum(sum);
        if (tid == 0) {
            offset[row] = sum;
        }
    }
"""

_SCORE_RQ = (
    PLACE
    + LOAD_QUERY % "turned[(size_t(row) * R + i % R) * D + d]"
    + "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    + FIND_TILES
    + ZERO_DOTS
    + """
    constexpr float HALF = 0.5f * float((1 << BITS) - 1);  // the middle of the codes
    for (int w = part * WIDE; w < WORDS; w += LANES * WIDE) {
        uint word[EACH][WIDE];
        #pragma unroll
        for (int k = 0; k < EACH; k++) {
            for (int i = 0; i < WIDE; i++) {
                word[k][i] = 0u;
            }
            if (tile[k] >= 0) {
                const auto piece = load_piece<WIDE>(codes + size_t(tile[k]) * WORDS + w);
                for (int i = 0; i < WIDE; i++) {
                    word[k][i] = uint(piece.v[i]);
                }
            }
        }
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            #pragma unroll 8
            for (int j = 0; j < PER_WORD; j++) {
                #pragma unroll
                for (int k = 0; k < EACH; k++) {
                    const uint code = (word[k][i] >> (BITS * j)) & ((1u << BITS) - 1u);
                    const float level = BITS == 1 ? (code != 0u ? 1.0f : -1.0f) : float(code) - HALF;
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        dot[k][r] += level * query[((w + i) * PER_WORD + j) * R + r];
                    }
                }
            }
        }
    }
"""
    + SUM_LANES
    + STORE % "log(float(S)) + (offset[row * R + r] + dot[k][r] * static_cast<float>(scale[tile[k]]))"
)

# A threadgroup takes the next TILES of the list, and of the estimates the run from its first group to the one where
# the next threadgroup starts: it copies the run, then overwrites what is listed. Reads only the codes of listed groups.
_REFINE_RQ = (
    PLACE
    + """
    const int width = sizes[1];
    const int count = counts[row];
    const int begin = int(threadgroup_position_in_grid.x) * TILES;
    if (begin >= count && begin > 0) {
        return;
    }
    const int from = begin > 0 ? groups[row * width + begin] : 0;
    const int to = begin + TILES < count ? groups[row * width + begin + TILES] : num_groups;
    for (int g = from + tid; g < to; g += THREADS) {
        refined[size_t(row) * num_groups + g] = estimate[size_t(row) * num_groups + g];
    }
"""
    + LOAD_QUERY % "turned[(size_t(row) * R + i % R) * D + d]"
    + """
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);

    const int entry = begin + tid / LANES;
    const int g = entry < count ? groups[row * width + entry] : -1;
    int tile = 0;
    if (g >= 0) {
        tile = (table[b * (num_groups / GPU) + g / GPU] * HKV + head) * GPU + g % GPU;
    }
"""
    + ZERO_DOTS
    + """
    for (int w = g < 0 ? WORDS : part * WIDE; w < WORDS; w += LANES * WIDE) {
        const auto signs = load_piece<WIDE>(codes + size_t(tile) * WORDS + w);
        const auto halves = load_piece<WIDE>(second + size_t(tile) * WORDS + w);
        #pragma unroll
        for (int i = 0; i < WIDE; i++) {
            #pragma unroll 8
            for (int j = 0; j < PER_WORD; j++) {
                const float sign = (signs.v[i] >> j) & 1u ? 1.0f : -1.0f;
                const float level = sign + ((halves.v[i] >> j) & 1u ? 0.5f : -0.5f);
                #pragma unroll
                for (int r = 0; r < R; r++) {
                    dot[0][r] += level * query[((w + i) * PER_WORD + j) * R + r];
                }
            }
        }
    }
"""
    + SUM_LANES
    + f"""
    if (part == 0 && g >= 0) {{
        float best = -INFINITY;
        for (int r = 0; r < R; r++) {{
            const float x = log(float(S)) + (offset[row * R + r] + dot[0][r] * static_cast<float>(second_scale[tile]));
            best = max(best, isfinite(x) ? x : {LARGEST_ESTIMATE!r}f);
        }}
        refined[size_t(row) * num_groups + g] = best;
    }}
"""
)


WHERE = ("valid", "table", "lengths", "sizes")
_turn = Kernel("eps_turn_queries", ("q", "rotation", "centre", "softmax_scale"), ("turned", "offset"), _TURN)
_score_rq = Kernel("eps_score_rq", ("turned", "offset", "codes", "scale", *WHERE), ("estimate",), _SCORE_RQ)
_refine_rq = Kernel(
    "eps_refine_rq",
    ("turned", "offset", "codes", "second", "second_scale", "estimate", "groups", "counts", "table", "sizes"),
    ("refined",),
    _REFINE_RQ,
)


def turn_queries(q: mx.array, rotation: mx.array, centre: mx.array) -> tuple[mx.array, mx.array]:
    """What `rq` scores with: q [B, Hq, D] unscaled, rotation [D, D] float32 whose row d is the turned unit vector d,
    centre [Hkv, D] float16 -> (turned [B, Hkv, R, D], offset [B, Hkv, R]) float32: a @ rotation and c.a, a = q /
    sqrt(D). One dispatch instead of the array path's five; and a library's matrix product may round float32 to fewer
    bits, a kernel's sum does not."""
    batch, num_heads, head_dim = q.shape
    kv_heads = centre.shape[0]
    repeat = heads_per_kv_head(q, kv_heads)
    threads = min(THREADS, -(-head_dim // 32) * 32)
    turned, offset = launch(
        _turn,
        [q, rotation, centre, softmax_scale(head_dim)],
        {"D": head_dim, "R": repeat, "HKV": kv_heads, "THREADS": threads},
        grid=(threads, batch * num_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, kv_heads, repeat, head_dim), (batch, kv_heads, repeat)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return turned, offset


def score_rq(
    turned: mx.array, offset: mx.array, codes: mx.array, scale: mx.array, valid: mx.array, table: mx.array,
    lengths: mx.array, *, group_tokens: int, bits: int,
) -> mx.array:  # fmt: skip
    """Estimates [B, Hkv, G] float32 of log masses, max over the R query heads: turned [B, Hkv, R, D] and offset
    [B, Hkv, R] of `turn_queries`, codes [P, Hkv, GPU, bytes] uint8 of `bits` (1, 2, 4 or 8) a dimension, scale
    [P, Hkv, GPU] float16, valid [P * GPU] uint8 (0: no valid summary), table [B, M] int32, lengths [B] int32."""
    repeat, head_dim = turned.shape[2:]
    num_groups = table.shape[1] * codes.shape[2]
    words, template = layout(codes, bits, head_dim, repeat)
    return estimates(
        _score_rq, [turned, offset, words, scale, valid, table, lengths], num_groups, group_tokens, template
    )


def refine_rq(
    turned: mx.array, offset: mx.array, codes: mx.array, second: mx.array, second_scale: mx.array, table: mx.array,
    estimate: mx.array, groups: mx.array, counts: mx.array, *, group_tokens: int,
) -> mx.array:  # fmt: skip
    """`estimate` [B, Hkv, G] float32 with two-bit estimates of the listed groups, as a new array: groups [B, Hkv, W]
    int32 ascending then -1, counts [B, Hkv] int32, all of groups with a valid summary; second (a bit a dimension, laid
    out as the 1-bit codes) and second_scale as in the pool. Only listed groups' codes are read."""
    repeat, head_dim = turned.shape[2:]
    batch, kv_heads, width = groups.shape
    words, template = layout(codes, 1, head_dim, repeat)
    template |= {"S": group_tokens, "EACH": 1}
    blocks = max(-(-width // (THREADS // template["LANES"])), 1)
    return launch(
        _refine_rq,
        [
            turned, offset, words, second.view(words.dtype), second_scale, estimate, groups, counts, table,
            integers(estimate.shape[2], width),
        ],
        template,
        grid=(THREADS * blocks, batch * kv_heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[estimate.shape],
        output_dtypes=[mx.float32],
    )[0]  # fmt: skip


def estimates(
    kernel: Kernel, inputs: list[mx.array], num_groups: int, group_tokens: int, template: dict,
    last: list[mx.array] | None = None,
) -> mx.array:  # fmt: skip
    """Runs a kernel whose inputs are `inputs` (the last three valid, table and lengths), sizes and `last`."""
    batch, kv_heads = inputs[-2].shape[0], template["HKV"]
    tiles = THREADS // template["LANES"] * template["EACH"]
    return launch(
        kernel,
        [*inputs, integers(num_groups), *(last or [])],
        template | {"S": group_tokens},
        grid=(THREADS * -(-num_groups // tiles), batch * kv_heads, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, kv_heads, num_groups)],
        output_dtypes=[mx.float32],
    )[0]


def layout(codes: mx.array, bits: int, head_dim: int, repeat: int) -> tuple[mx.array, dict]:
    """The codes [P, Hkv, GPU, bytes] in the widest words that their rows are whole numbers of (the same buffer), and
    what kernels must know of them."""
    _, kv_heads, per_unit, num_bytes = codes.shape
    if num_bytes != -(-head_dim * bits // 8):
        raise ValueError(f"codes of {num_bytes} bytes a group: {bits} bits of {head_dim} dimensions are another number")
    size = next(size for size in _WORDS if num_bytes % size == 0)
    if num_bytes * 8 // bits * repeat * 4 > THREADGROUP_BYTES:
        raise ValueError(
            f"{repeat} query heads of {head_dim} dimensions per kv head need more than {THREADGROUP_BYTES} bytes of "
            "threadgroup memory: use the array path"
        )
    lanes = 1 << min(max((num_bytes // LANE_BYTES).bit_length() - 1, 0), 3)
    template = {
        "WORD": _WORDS[size], "BITS": bits, "D": head_dim, "R": repeat, "HKV": kv_heads, "GPU": per_unit,
        "LANES": lanes, "EACH": max(min(8 // repeat, 4), 1), "THREADS": THREADS,
    }  # fmt: skip
    return codes.view(_WORDS[size]), template


def heads_per_kv_head(q: mx.array, kv_heads: int) -> int:
    """R of q [B, Hq, D]."""
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {kv_heads} kv heads")
    return q.shape[1] // kv_heads


@cache
def softmax_scale(head_dim: int) -> mx.array:
    return mx.array([1 / math.sqrt(head_dim)], mx.float32)
