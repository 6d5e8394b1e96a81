"""Attention over listed groups of the paged cache: split-KV decode, then a merge of the splits where there are several.

One threadgroup serves one kv head and one split of its tokens, read where they lie: nothing is gathered. The tokens of
the listed groups, one after another, are dealt to simdgroups in equal runs, whatever the group size, so a list of many
pairs of tokens costs what one long run costs. For each 32 tokens every lane finds the place of one (one read of the
list and of the table each, side by side); then rows of K and V are read, several before any arithmetic, 4 elements a
lane. For D of 64 or less several rows share a simdgroup's read.

A simdgroup keeps 4 query heads in registers (8 spill at D = 128: ml-explore/mlx issue 4077). With R > 4 the
simdgroups of one threadgroup that walk the same tokens for the other heads run side by side: each row comes from memory
once and is read R / 4 times from the cache. The alternative, rows passed on through threadgroup memory, costs a barrier
every few rows.

Grids and template values depend on shapes alone: how many groups are listed is read on the device.
"""

import math
from functools import lru_cache

import mlx.core as mx

from eps_core.backend.pages import Pool
from eps_mlx.kernels.launch import Kernel, fitted, integers, launch, threads_of
from eps_mlx.kernels.values import beside, bits_of, elements_of, reading, rows_of, template_of

# all change speed only
SIMDGROUP_HEADS = 4
SIMDGROUPS = 8  # of a threadgroup, about
SPLITS = (1, 2, 4, 8, 16, 32, 64)
THREADGROUPS = 256  # to keep a large GPU busy: six for each core of a 40-core one
SPLIT_ROWS = 32  # tokens below which a simdgroup is not worth starting

# How 32 lanes share rows of D elements: ROWS rows at once, LANES lanes each, CHUNKS times VEC elements a lane
ROW_LANES = """
    constexpr int VEC = D % 4 == 0 ? 4 : 1;
    constexpr int PIECES = D / VEC;
    constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : 4;
    constexpr int ROWS = 32 / LANES;
    constexpr int CHUNKS = (PIECES + LANES - 1) / LANES;
    constexpr int AHEAD = CHUNKS > 4 ? 1 : 4 / CHUNKS;
    const int tid = int(thread_index_in_threadgroup);
    const int lane = int(thread_index_in_simdgroup);
    const int simdgroup = int(simdgroup_index_in_threadgroup);
"""

# The 4 elements (or the one) of this lane in chunk c of a row; lanes past the row's end repeat its last elements
READ_PIECE = """
                    const int piece = min(lane % LANES + c * LANES, PIECES - 1);
                    const size_t from = size_t(place) * D + piece * VEC;
"""

# 2^x is what GPUs compute: q carries log2(e) and logits are base 2 until the merge
_DECODE = (
    ROW_LANES
    + """
    constexpr int PARTS = (R + HEADS - 1) / HEADS;
    constexpr float NONE = -1e30f;
    const int row = int(threadgroup_position_in_grid.y);
    const int split = int(threadgroup_position_in_grid.z);
    const int kv_heads = sizes[0];
    const int units = sizes[1];
    const int width = sizes[2];
    const int group_size = sizes[3];
    const int groups_per_unit = sizes[4];
    const int splits = sizes[5];
    const int pool_rows = sizes[6];
    const int b = row / kv_heads;
    const int first_head = simdgroup % PARTS * HEADS;
    const int walker = split * WALKERS + simdgroup / PARTS;

    // only the last listed group can be the open one, whose unwritten rows are not to be read
    const int length = lengths[b];
    const int count = DENSE ? (length + group_size - 1) / group_size : counts[row];
    int tokens = 0;
    if (count > 0) {
        const int last = DENSE ? count - 1 : groups[size_t(row) * width + count - 1];
        tokens = (count - 1) * group_size + min(group_size, length - last * group_size);
    }
    const int workers = splits * WALKERS;
    const int run = ((tokens + workers - 1) / workers + ROWS * AHEAD - 1) / (ROWS * AHEAD) * (ROWS * AHEAD);
    const int begin = min(walker * run, tokens);
    const int end = min(begin + run, tokens);

    float a[HEADS][CHUNKS * VEC];
    float sum[HEADS][CHUNKS * VEC];
    float largest[HEADS];
    float mass[HEADS];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        largest[h] = NONE;
        mass[h] = 0.0f;
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            const int d = (lane % LANES + i / VEC * LANES) * VEC + i % VEC;
            const bool own = d < D && first_head + h < R;
            a[h][i] = own ? static_cast<float>(q[(size_t(row) * R + first_head + h) * D + d]) * softmax_scale[0] : 0.0f;
            sum[h][i] = 0.0f;
        }
    }

    for (int base = begin; base < end; base += 32) {
        const int token = min(base + lane, end - 1);
        const int entry = token / group_size;
        const int group = DENSE ? entry : groups[size_t(row) * width + entry];
        const int unit = table[b * units + group / groups_per_unit];
        const int tile = (unit * kv_heads + row % kv_heads) * groups_per_unit + group % groups_per_unit;
        const int mine = tile * group_size + token % group_size;
        for (int start = 0; start < min(32, end - base); start += ROWS * AHEAD) {
            Piece<T, VEC> k[AHEAD][CHUNKS];
            Piece<T, VEC> v[AHEAD][CHUNKS];
            #pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int place = simd_shuffle(mine, ushort(start + j * ROWS + lane / LANES));
                #pragma unroll
                for (int c = 0; c < CHUNKS; c++) {"""
    + READ_PIECE
    + """
                    READ_K
                    READ_V
                }
            }
            #pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float weight[AHEAD];
                float top = largest[h];
                #pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    float dot = 0.0f;
                    #pragma unroll
                    for (int i = 0; i < CHUNKS * VEC; i++) {
                        const bool own = PIECES % LANES == 0 || lane % LANES + i / VEC * LANES < PIECES;
                        dot += own ? a[h][i] * static_cast<float>(k[j][i / VEC].v[i % VEC]) : 0.0f;
                    }
                    if (LANES == 32) {
                        dot = simd_sum(dot);
                    } else {
                        #pragma unroll
                        for (int step = LANES / 2; step > 0; step /= 2) {
                            dot += simd_shuffle_xor(dot, ushort(step));
                        }
                    }
                    weight[j] = dot;
                    if (base + start + j * ROWS + lane / LANES < end) {
                        top = max(top, dot);
                    }
                }
                const float rescale = exp2(largest[h] - top);
                largest[h] = top;
                mass[h] *= rescale;
                #pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    const bool listed = base + start + j * ROWS + lane / LANES < end;
                    weight[j] = listed ? exp2(weight[j] - top) : 0.0f;
                    mass[h] += weight[j];
                }
                #pragma unroll
                for (int i = 0; i < CHUNKS * VEC; i++) {
                    sum[h][i] *= rescale;
                    #pragma unroll
                    for (int j = 0; j < AHEAD; j++) {
                        sum[h][i] += weight[j] * static_cast<float>(v[j][i / VEC].v[i % VEC]);
                    }
                }
            }
        }
    }

    // lanes that read other rows for the same elements
    #pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        #pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float top = max(largest[h], simd_shuffle_xor(largest[h], ushort(step)));
            const float rescale = exp2(largest[h] - top);
            largest[h] = top;
            mass[h] *= rescale;
            mass[h] += simd_shuffle_xor(mass[h], ushort(step));
            #pragma unroll
            for (int i = 0; i < CHUNKS * VEC; i++) {
                sum[h][i] *= rescale;
                sum[h][i] += simd_shuffle_xor(sum[h][i], ushort(step));
            }
        }
    }

    // simdgroups that read other rows for the same query heads
    threadgroup float shared_largest[WALKERS * PARTS * HEADS];
    threadgroup float shared_mass[WALKERS * PARTS * HEADS];
    threadgroup float shared_sum[WALKERS * PARTS * D];
    threadgroup float total[R];
    if (lane == 0) {
        #pragma unroll
        for (int h = 0; h < HEADS; h++) {
            shared_largest[simdgroup * HEADS + h] = largest[h];
            shared_mass[simdgroup * HEADS + h] = mass[h];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid < R) {
        float top = NONE;
        float whole = 0.0f;
        for (int w = 0; w < WALKERS; w++) {
            top = max(top, shared_largest[w * PARTS * HEADS + tid]);
        }
        for (int w = 0; w < WALKERS; w++) {
            const int other = w * PARTS * HEADS + tid;
            whole += shared_mass[other] * exp2(shared_largest[other] - top);
        }
        total[tid] = whole;
        const size_t at = ((size_t(row) * R + tid) * splits + split) * 2;
        if (WHOLE) {
            part_mass[at / 2] = whole == 0.0f ? -INFINITY : (top + log2(whole)) * 0.6931471805599453f;
        } else {
            part_mass[at] = top;
            part_mass[at + 1] = whole;
        }
    }
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float top = NONE;
        for (int w = 0; w < WALKERS; w++) {
            top = max(top, shared_largest[(w * PARTS + simdgroup % PARTS) * HEADS + h]);
        }
        const float rescale = exp2(largest[h] - top);
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            const int d = (lane % LANES + i / VEC * LANES) * VEC + i % VEC;
            if (lane < LANES && d < D) {
                shared_sum[simdgroup * D + d] = sum[h][i] * rescale;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = tid; i < PARTS * D; i += WALKERS * PARTS * 32) {
            const int head = i / D * HEADS + h;
            float whole = 0.0f;
            for (int w = 0; w < WALKERS; w++) {
                whole += shared_sum[w * PARTS * D + i];
            }
            if (head < R) {
                const size_t at = ((size_t(row) * R + head) * splits + split) * D + i % D;
                part_sum[at] = static_cast<OUT>(!WHOLE ? whole : total[head] == 0.0f ? 0.0f : whole / total[head]);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
"""
)

_MERGE = """
    const int tid = int(thread_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    const int splits = sizes[0];
    float top = -1e30f;
    for (int s = 0; s < splits; s++) {
        top = max(top, part_mass[(size_t(row) * splits + s) * 2]);
    }
    float mass = 0.0f;
    for (int s = 0; s < splits; s++) {
        const size_t at = (size_t(row) * splits + s) * 2;
        mass += part_mass[at + 1] * exp2(part_mass[at] - top);
    }
    for (int d = tid; d < D; d += THREADS) {
        float sum = 0.0f;
        for (int s = 0; s < splits; s++) {
            const size_t at = size_t(row) * splits + s;
            sum += part_sum[at * D + d] * exp2(part_mass[at * 2] - top);
        }
        out[size_t(row) * D + d] = static_cast<T>(mass == 0.0f ? 0.0f : sum / mass);
    }
    if (tid == 0) {
        lse[row] = mass == 0.0f ? -INFINITY : (top + log2(mass)) * 0.6931471805599453f;
    }
"""

decode = Kernel(
    "eps_attend_decode",
    ("q", "k_pool", "v_pool", "table", "lengths", "groups", "counts", "softmax_scale", "sizes"),
    ("part_sum", "part_mass"),
    _DECODE,
)
merge = Kernel("eps_attend_merge", ("part_sum", "part_mass", "sizes"), ("out", "lse"), _MERGE)


@fitted
def attend_groups(
    q: mx.array,
    k_pool: Pool,
    v_pool: Pool,
    table: mx.array,
    lengths: mx.array,
    groups: mx.array | None,
    counts: mx.array | None,
    *,
    group_size: int,
) -> tuple[mx.array, mx.array]:
    """(out [B, Hq, D] in q's dtype, lse [B, Hq] float32: natural log of the softmax mass read) of q [B, Hq, D]
    unscaled over k_pool, v_pool [P, Hkv, U, D] float32, float16 or bfloat16, with open units or not, or codes of these,
    table [B, M] int32, lengths [B] int32.

    groups [B, Hkv, W] int32 ascending, none past the sequence's end, of which the first counts [B, Hkv] int32 are read;
    None: every token. A kv head without any gets out 0 and lse -inf. Logits and sums are float32; only listed tiles are
    read, each once, and no token at or past the length.
    """
    batch, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    check_shapes(q, k_pool, v_pool, table, lengths, group_size)
    assert (groups is None) == (counts is None)
    repeat, dense = num_heads // kv_heads, groups is None or counts is None
    width = 0 if groups is None else groups.shape[2]
    parts = -(-repeat // SIMDGROUP_HEADS)
    kernel = reading(decode, bits_of(k_pool, v_pool), ("k[j][c]", "v[j][c]"))
    walkers = max(threads_of(kernel, max(SIMDGROUPS // parts, 1) * parts * 32, head_dim) // (parts * 32), 1)
    capacity = table.shape[1] * unit_tokens if dense else width * group_size
    splits = num_splits(batch * kv_heads, capacity, walkers * SPLIT_ROWS)
    threads, whole = walkers * parts * 32, splits == 1
    dtype = q.dtype if whole else mx.float32
    part_sum, part_mass = launch(
        kernel,
        [
            q,
            elements_of(k_pool),
            elements_of(v_pool),
            table,
            lengths,
            lengths if groups is None else groups,
            lengths if counts is None else counts,
            _softmax_scale(head_dim),
            integers(kv_heads, table.shape[1], width, group_size, unit_tokens // group_size, splits, rows_of(k_pool)),
            *beside(k_pool, v_pool),
        ],
        {
            **template_of(k_pool, v_pool),
            "D": head_dim,
            "R": repeat,
            "HEADS": -(-repeat // parts),
            "WALKERS": walkers,
            "DENSE": dense,
            "WHOLE": whole,
            "OUT": dtype,
        },
        grid=(threads, batch * kv_heads, splits),
        threadgroup=(threads, 1, 1),
        output_shapes=[q.shape, q.shape[:2]]
        if whole
        else [(batch, num_heads, splits, head_dim), (batch, num_heads, splits, 2)],
        output_dtypes=[dtype, mx.float32],
    )
    return (part_sum, part_mass) if whole else merge_splits(part_sum, part_mass, q.dtype)


def check_shapes(q: mx.array, k_pool: Pool, v_pool: Pool, table: mx.array, lengths: mx.array, group_size: int) -> None:
    """Asserts that q [.., Hq, D], pools [P, Hkv, U, D], table and lengths are as attention's kernels take them."""
    _, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, pool_dim = k_pool.shape
    assert k_pool.shape == v_pool.shape and k_pool.dtype == v_pool.dtype
    assert head_dim == pool_dim and num_heads % kv_heads == 0 and unit_tokens % group_size == 0
    assert table.dtype == lengths.dtype == mx.int32


def merge_splits(part_sum: mx.array, part_mass: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """(out [N, Hq, D], lse [N, Hq]) of the splits' sums [N, Hq, splits, D] and base-2 masses [N, Hq, splits, 2]."""
    batch, num_heads, splits, head_dim = part_sum.shape
    threads = min(-(-head_dim // 32) * 32, 256)
    out, lse = launch(
        merge,
        [part_sum, part_mass, integers(splits)],
        {"T": dtype, "D": head_dim, "THREADS": threads},
        grid=(threads, batch * num_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, num_heads, head_dim), (batch, num_heads)],
        output_dtypes=[dtype, mx.float32],
    )
    return out, lse


def num_splits(rows: int, capacity: int, least: int) -> int:
    """Threadgroups that share the list of one of `rows` (sequence, kv head) pairs: from a short list, enough to keep a
    GPU busy, none with fewer than `least` of the `capacity` entries that the list can hold."""
    wanted = [splits for splits in SPLITS if splits == 1 or splits * least <= capacity]
    return next((splits for splits in wanted if splits * rows >= THREADGROUPS), wanted[-1])


@lru_cache(maxsize=64)
def _softmax_scale(head_dim: int) -> mx.array:
    return mx.array([math.log2(math.e) / math.sqrt(head_dim)], mx.float32)
