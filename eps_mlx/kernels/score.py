"""Parts shared by Metal kernels that estimate the masses of groups straight from the paged summaries: nothing is
gathered or unpacked.

Estimates are the array path's (`eps_mlx.summaries`) up to float32 rounding: +inf for a group inside the sequence
without a valid summary, -inf past its end. A group's codes are read once for all R query heads of its kv head, and not
at all where it is open, past the end or without a valid summary. Groups with equal codes and scales get equal
estimates to the bit: every group's sum is added in the same order.

Why no tables of what a byte or nibble adds, which serve a CPU best: at D = 128, R = 4 a simdgroup of 32 groups costs 32
reads of 16 bytes a lane of threadgroup memory, 4 to 8 clocks each and more where banks collide; selecting signs costs
128 * (R + 2) instructions at four a clock, as much, and needs none of the 8 to 64 KiB such tables take of the 32 KiB
that a threadgroup has.

Bodies follow one rule so that a short header of macros can make CUDA of them: `threadgroup` is the only address space
named, and pointers are indexed, never declared. Letters as in `attention.protocol`.
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

WHERE = ("valid", "table", "lengths", "sizes")


def estimates(
    kernel: Kernel, inputs: list[mx.array], num_groups: int, group_size: int, template: dict,
    last: list[mx.array] | None = None,
) -> mx.array:  # fmt: skip
    """Runs a kernel whose inputs are `inputs` (the last three valid, table and lengths), sizes and `last`."""
    batch, kv_heads = inputs[-2].shape[0], template["HKV"]
    tiles = THREADS // template["LANES"] * template["EACH"]
    return launch(
        kernel,
        [*inputs, integers(num_groups), *(last or [])],
        template | {"S": group_size},
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
