"""Dense split-KV attention of several new tokens (rows) of each sequence at once: what a verify pass reads.

The rows of a sequence times the R query heads of a kv head are the queries of a threadgroup, 4 to a simdgroup. It
brings 32 tokens of K and V into its own memory, once for all of them, so up to 64 queries cost the bytes of one; more
are further threadgroups, next to each other on the grid, which read the same tiles while they are in the GPU's cache.

Logits are computed with a token to each lane, so that a maximum or a sum over 32 tokens is one simd operation; weighted
values with 4 channels to each lane. Matrix units (`simdgroup_matrix`) are not used: the emulator of the tests has none.

A row's bits are its own: a simdgroup computes its queries each by itself, tokens are cut at fixed places counted from
token 0 (splits of SPLIT_TOKENS, tiles of whole groups or parts of one), and a tile or split of which a row sees nothing
adds exact zeros. Neither the batch nor the other rows change them. What a row does not see is not multiplied.
"""

import math

import mlx.core as mx

from eps_core.backend.pages import Pool
from eps_mlx.kernels.attend import READ_PIECE, ROW_LANES, SIMDGROUP_HEADS, check_shapes, merge_splits
from eps_mlx.kernels.launch import Kernel, fitted, integers, launch, threads_of
from eps_mlx.kernels.values import beside, bits_of, elements_of, reading, rows_of, template_of

SPLIT_TOKENS = 512  # of one threadgroup; changes speed and the order of float32 sums
SIMDGROUPS = 16  # of a threadgroup, at most; changes speed only

# The weighted values of a tile's chunk c, of tokens for which the condition holds
_ADD_VALUES = """
                    for (int t = 0; t < 32; t += ROWS) {
                        const int token = t + lane / LANES;
                        const Stored value = staged[(step % STAGES * 32 + token) * STRIDE + lane % LANES];
                        #pragma unroll
                        for (int h = 0; h < HEADS; h++) {
                            const float w = simd_shuffle(weight[h], ushort(token));
                            if (CONDITION) {
                                #pragma unroll
                                for (int i = 0; i < VEC; i++) {
                                    sum[h][c * VEC + i] += w * static_cast<float>(value.v[i]);
                                }
                            }
                        }
                    }
"""

_ROWS = (
    ROW_LANES
    + """
    constexpr float NONE = -1e30f;
    constexpr int STRIDE = LANES + 1;  // or lanes that read one column of a tile would meet in a bank
    constexpr int STAGES = sizeof(T) == 2 ? 2 : 1;  // chunks that 17 KiB hold
    using Stored = Piece<T, VEC>;
    threadgroup Stored staged[STAGES * 32 * STRIDE];
    const int kv_heads = sizes[0];
    const int units = sizes[1];
    const int group_size = sizes[2];
    const int groups_per_unit = sizes[3];
    const int splits = sizes[4];
    const int split_tokens = sizes[5];
    const int simdgroups = sizes[6];
    const int pool_rows = sizes[7];
    const int pair = int(threadgroup_position_in_grid.y);
    const int split = int(threadgroup_position_in_grid.z);
    const int b = pair / kv_heads;
    const int kv_head = pair % kv_heads;
    const int length = lengths[b];
    const int rows = starts[b + 1] - starts[b];
    const int first_query = (int(threadgroup_position_in_grid.x) * simdgroups + simdgroup) * HEADS;

    const int capacity = units * groups_per_unit * group_size;
    const int first = split * split_tokens;
    // where groups are asked for, those past the end get their -inf
    const int last = min(first + split_tokens, MASSES ? capacity : length);
    const int tile_groups = max(32 / group_size, 1);
    const int parts = (group_size + 31) / 32;  // tiles of a group
    const int tiles = (last - first + tile_groups * group_size - 1) / (tile_groups * group_size) * parts;

    size_t head[HEADS];  // of all T * Hq
    int seen[HEADS];  // tokens
    float sum[HEADS][CHUNKS * VEC];
    float largest[HEADS];
    float mass[HEADS];
    float group_largest[HEADS];
    float group_mass[HEADS];
    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const int row = min((first_query + h) / R, rows - 1);
        const int r = (first_query + h) % R;
        head[h] = (size_t(starts[b] + row) * kv_heads + kv_head) * R + r;
        seen[h] = length - rows + row + 1;
        largest[h] = NONE;
        mass[h] = 0.0f;
        group_largest[h] = NONE;
        group_mass[h] = 0.0f;
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            sum[h][i] = 0.0f;
        }
    }

    // past the last query: beside others the last row stands in, and is not written; alone nothing is done
    const bool works = first_query < rows * R;
    const bool idle = int(threadgroup_position_in_grid.x) * simdgroups * HEADS >= rows * R;
    for (int tile = 0; tile < (idle ? 0 : tiles); tile++) {
        const int part = tile % parts;
        const int base = first + tile / parts * tile_groups * group_size + part * 32;
        const int listed = min(parts > 1 ? group_size - part * 32 : tile_groups * group_size, min(32, last - base));
        const int count = max(min(listed, length - base), 0);
        const int token = min(base + lane, length - 1);
        const int group = token / group_size;
        const int unit = table[b * units + group / groups_per_unit];
        const int mine = ((unit * kv_heads + kv_head) * groups_per_unit + group % groups_per_unit) * group_size
            + token % group_size;

        float weight[HEADS];  // logits, then weights, of this lane's token
        int visible[HEADS];  // tokens of the tile
        bool whole = true;
        #pragma unroll
        for (int h = 0; h < HEADS; h++) {
            weight[h] = 0.0f;
            visible[h] = min(max(seen[h] - base, 0), count);
            whole = whole && visible[h] == 32;
        }
        #pragma unroll
        for (int step = 0; step < 2 * CHUNKS; step++) {
            const int c = step % CHUNKS;
            if (step % STAGES == 0) {
                threadgroup_barrier(mem_flags::mem_threadgroup);
                #pragma unroll
                for (int next = step; next < step + STAGES; next++) {
                    const int chunk = next % CHUNKS;
                    for (int i = tid; i < 32 * LANES; i += simdgroups * 32) {
                        const int at = i / LANES;
                        const int place = simd_shuffle(mine, ushort(at));
                        if (at < count && lane % LANES + chunk * LANES < PIECES) {
                            const int c = chunk;"""
    + READ_PIECE
    + """
                            const size_t to = (next % STAGES * 32 + at) * STRIDE + lane % LANES;
                            Stored loaded;
                            if (next < CHUNKS) {
                                READ_K
                            } else {
                                READ_V
                            }
                            staged[to] = loaded;
                        }
                    }
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            if (works && step < CHUNKS) {
                #pragma unroll
                for (int p = 0; p < LANES; p++) {
                    if (p + c * LANES < PIECES) {
                        const Stored key = staged[(step % STAGES * 32 + lane) * STRIDE + p];
                        #pragma unroll
                        for (int h = 0; h < HEADS; h++) {
                            const Piece<float, VEC> a = load_piece<VEC>(q + head[h] * D + (p + c * LANES) * VEC);
                            float dot = 0.0f;
                            #pragma unroll
                            for (int i = 0; i < VEC; i++) {
                                dot += a.v[i] * static_cast<float>(key.v[i]);
                            }
                            weight[h] += dot;
                        }
                    }
                }
            }
            if (works && step == CHUNKS - 1) {
                #pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float logit = lane < visible[h] ? weight[h] : NONE;
                    if (MASSES) {
                        float top;
                        float total;
                        if (parts == 1) {
                            // lanes of one group, whose first one speaks for it
                            const int from = lane - lane % group_size;
                            top = NONE;
                            total = 0.0f;
                            for (int s = 0; s < group_size; s++) {
                                top = max(top, simd_shuffle(logit, ushort(min(from + s, 31))));
                            }
                            for (int s = 0; s < group_size; s++) {
                                const float other = simd_shuffle(logit, ushort(min(from + s, 31)));
                                total += from + s < visible[h] ? exp2(other - top) : 0.0f;
                            }
                        } else {
                            top = max(part > 0 ? group_largest[h] : NONE, simd_max(logit));
                            total = simd_sum(lane < visible[h] ? exp2(logit - top) : 0.0f);
                            total += part > 0 ? group_mass[h] * exp2(group_largest[h] - top) : 0.0f;
                            group_largest[h] = top;
                            group_mass[h] = total;
                        }
                        const bool speaks = parts == 1 ? lane % group_size == 0 && lane < listed : lane == 0;
                        if (speaks && part == parts - 1 && first_query + h < rows * R) {
                            const int own = (base - part * 32 + lane) / group_size;
                            masses[head[h] * (units * groups_per_unit) + own] =
                                total == 0.0f ? -INFINITY : (top + log2(total)) * 0.6931471805599453f;
                        }
                    }
                    const float top = max(largest[h], simd_max(logit));
                    const float rescale = exp2(largest[h] - top);
                    largest[h] = top;
                    weight[h] = lane < visible[h] ? exp2(logit - top) : 0.0f;
                    mass[h] = mass[h] * rescale + weight[h];
                    #pragma unroll
                    for (int i = 0; i < CHUNKS * VEC; i++) {
                        sum[h][i] *= rescale;
                    }
                }
            }
            if (works && step >= CHUNKS) {
                if (whole) {"""
    + _ADD_VALUES.replace("CONDITION", "true")
    + """
                } else {"""
    + _ADD_VALUES.replace("CONDITION", "token < visible[h]")
    + """
                }
            }
        }
    }

    #pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float whole = simd_sum(mass[h]);
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            float both = sum[h][i];
            #pragma unroll
            for (int step = LANES; step < 32; step *= 2) {
                both += simd_shuffle_xor(both, ushort(step));
            }
            const int d = (lane % LANES + i / VEC * LANES) * VEC + i % VEC;
            if (first_query + h < rows * R && lane < LANES && d < D) {
                part_sum[(head[h] * splits + split) * D + d] = both;
            }
        }
        if (first_query + h < rows * R && lane == 0) {
            part_mass[(head[h] * splits + split) * 2] = largest[h];
            part_mass[(head[h] * splits + split) * 2 + 1] = whole;
        }
    }
"""
)

rows = Kernel(
    "eps_attend_rows",
    ("q", "k_pool", "v_pool", "table", "lengths", "starts", "sizes"),
    ("part_sum", "part_mass", "masses"),
    _ROWS,
)


@fitted
def attend_rows(
    q: mx.array,
    k_pool: Pool,
    v_pool: Pool,
    table: mx.array,
    lengths: mx.array,
    starts: mx.array,
    *,
    most_rows: int,
    group_size: int,
    selected_mask: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """(out [T, Hq, D] in q's dtype, lse, selected_lse) of `RowsRead` for q [T, Hq, D], unscaled, over k_pool,
    v_pool [P, Hkv, U, D], as they are or codes. Rows starts[b] to starts[b + 1] - 1 are the last tokens of sequence b,
    starts [B + 1] int32, at most `most_rows`; table [B, M] int32, lengths [B] int32, `selected_mask`
    [T, Hkv, M * U / S] bool.

    Every token of a sequence is read once for up to 64 queries, and none at or past its length. The mask
    costs the masses of all groups, query head by query head, [T, Hq, G] float32, and array operations over them."""
    check_shapes(q, k_pool, v_pool, table, lengths, group_size)
    num_rows, num_heads, head_dim = q.shape
    _, kv_heads, unit_tokens, _ = k_pool.shape
    batch, units = table.shape
    repeat, num_groups, asked = num_heads // kv_heads, units * unit_tokens // group_size, selected_mask is not None
    split_tokens = max(SPLIT_TOKENS // _tile_tokens(group_size), 1) * _tile_tokens(group_size)
    splits = max(-(-units * unit_tokens // split_tokens), 1)
    wanted = -(-most_rows * repeat // SIMDGROUP_HEADS)
    kernel = reading(rows, bits_of(k_pool, v_pool), ("loaded", "loaded"))
    simdgroups = threads_of(kernel, 32 * min(wanted, SIMDGROUPS), head_dim) // 32
    pool_rows = rows_of(k_pool)
    part_sum, part_mass, by_head = launch(
        kernel,
        [
            q.astype(mx.float32) * (math.log2(math.e) / math.sqrt(head_dim)),
            elements_of(k_pool),
            elements_of(v_pool),
            table,
            lengths,
            starts,
            integers(
                kv_heads, units, group_size, unit_tokens // group_size, splits, split_tokens, simdgroups, pool_rows
            ),
            *beside(k_pool, v_pool),
        ],
        {**template_of(k_pool, v_pool), "D": head_dim, "R": repeat, "HEADS": SIMDGROUP_HEADS, "MASSES": asked},
        grid=(-(-wanted // simdgroups) * simdgroups * 32, batch * kv_heads, splits),
        threadgroup=(simdgroups * 32, 1, 1),
        output_shapes=[
            (num_rows, num_heads, splits, head_dim),
            (num_rows, num_heads, splits, 2),
            (num_rows, num_heads, num_groups) if asked else (1,),
        ],
        output_dtypes=[mx.float32, mx.float32, mx.float32],
    )
    out, lse = merge_splits(part_sum, part_mass, q.dtype)
    if selected_mask is None:
        return out, lse, None
    by_head = by_head.reshape(num_rows, kv_heads, repeat, num_groups)
    listed = mx.where(selected_mask.astype(mx.bool_)[:, :, None], by_head, -math.inf)
    return out, lse, mx.logsumexp(listed, axis=3).reshape(num_rows, num_heads)


def _tile_tokens(group_size: int) -> int:
    """Tokens of whole groups that fill tiles."""
    return max(32 // group_size, 1) * group_size
