"""The correction of sparse attention: skipped groups count with their estimated mass and the mean value around them.

A correction group (`correction_tokens` long) is to this kernel what a token is to attention: its logit is the log mass
of its skipped groups, its value the mean of V. A lane sums one correction group's estimates, so that a simdgroup has 32
of them; then it reads the means of those that have any mass, several rows at once. What the estimates say of the groups
that were read is summed on the way.
"""

import mlx.core as mx

from eps_mlx.kernels.attend import READ_PIECE, ROW_LANES, SIMDGROUPS, num_splits
from eps_mlx.kernels.launch import Kernel, integers, launch

SPLIT_CORRECTIONS = 32  # correction groups below which a simdgroup is not worth starting; changes speed only

_PARTS = (
    ROW_LANES
    + """
    constexpr float NONE = -1e30f;
    const int row = int(threadgroup_position_in_grid.y);
    const int split = int(threadgroup_position_in_grid.z);
    const int kv_heads = sizes[0];
    const int units = sizes[1];
    const int corrections_per_unit = sizes[2];
    const int correction_groups = sizes[3];
    const int correction_tokens = sizes[4];
    const int splits = sizes[5];
    const int b = row / kv_heads;
    const int usable = lengths[b] / correction_tokens;
    const int corrections = min((lengths[b] + correction_tokens - 1) / correction_tokens, units * corrections_per_unit);
    const int workers = splits * WALKERS;
    const int run = ((corrections + workers - 1) / workers + 31) / 32 * 32;
    const int begin = min((split * WALKERS + simdgroup) * run, corrections);
    const int end = min(begin + run, corrections);

    float sum[CHUNKS * VEC];
    #pragma unroll
    for (int i = 0; i < CHUNKS * VEC; i++) {
        sum[i] = 0.0f;
    }
    float largest = NONE;  // of the correction groups' log masses, over the simdgroup
    float mass = 0.0f;
    float seen_largest = NONE;  // of what was read, lane by lane
    float seen = 0.0f;
    for (int base = begin; base < end; base += 32) {
        const int correction = base + lane;
        const size_t first =
            (size_t(row) * units * corrections_per_unit + min(correction, end - 1)) * correction_groups;
        int mine = 0;
        bool valid = false;
        if (correction < min(usable, end)) {
            const int unit = table[b * units + correction / corrections_per_unit];
            valid = correction_valid[size_t(unit) * corrections_per_unit + correction % corrections_per_unit] != 0;
            mine = (unit * kv_heads + row % kv_heads) * corrections_per_unit + correction % corrections_per_unit;
        }
        float top = NONE;
        float seen_top = seen_largest;
        for (int g = 0; g < correction_groups && correction < end; g++) {
            const float logit = estimate[first + g];
            if (isfinite(logit)) {
                if (visit[first + g] != 0) {
                    seen_top = max(seen_top, logit);
                } else {
                    top = max(top, logit);
                }
            }
        }
        float skipped = 0.0f;
        seen *= exp(seen_largest - seen_top);
        seen_largest = seen_top;
        for (int g = 0; g < correction_groups && correction < end; g++) {
            const float logit = estimate[first + g];
            if (isfinite(logit)) {
                if (visit[first + g] != 0) {
                    seen += exp(logit - seen_top);
                } else {
                    skipped += exp(logit - top);
                }
            }
        }
        if (!valid) {
            skipped = 0.0f;
        }
        const float before = largest;
        largest = max(before, simd_max(skipped > 0.0f ? top : NONE));
        const float weight = skipped > 0.0f ? skipped * exp(top - largest) : 0.0f;
        const float rescale = exp(before - largest);
        mass = mass * rescale + simd_sum(weight);
        const float scaled = weight > 0.0f ? weight * static_cast<float>(mean_scale[mine]) : 0.0f;
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            sum[i] *= rescale;
        }
        for (int start = 0; start < min(32, end - base); start += ROWS * AHEAD) {
            Piece<int8_t, VEC> value[AHEAD][CHUNKS];
            float factor[AHEAD];
            #pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int place = simd_shuffle(mine, ushort(start + j * ROWS + lane / LANES));
                factor[j] = simd_shuffle(scaled, ushort(start + j * ROWS + lane / LANES));
                #pragma unroll
                for (int c = 0; c < CHUNKS; c++) {"""
    + READ_PIECE
    + """
                    if (factor[j] != 0.0f) {
                        value[j][c] = load_piece<VEC>(mean + from);
                    }
                }
            }
            #pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                #pragma unroll
                for (int i = 0; i < CHUNKS * VEC; i++) {
                    sum[i] += factor[j] != 0.0f ? factor[j] * float(value[j][i / VEC].v[i % VEC]) : 0.0f;
                }
            }
        }
    }

    #pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        #pragma unroll
        for (int i = 0; i < CHUNKS * VEC; i++) {
            sum[i] += simd_shuffle_xor(sum[i], ushort(step));
        }
    }
    const float seen_all = simd_max(seen_largest);
    seen = simd_sum(seen * exp(seen_largest - seen_all));

    threadgroup float shared_state[WALKERS * 4];
    threadgroup float shared_sum[WALKERS * D];
    if (lane == 0) {
        shared_state[simdgroup * 4] = largest;
        shared_state[simdgroup * 4 + 1] = mass;
        shared_state[simdgroup * 4 + 2] = seen_all;
        shared_state[simdgroup * 4 + 3] = seen;
    }
    #pragma unroll
    for (int i = 0; i < CHUNKS * VEC; i++) {
        const int d = (lane % LANES + i / VEC * LANES) * VEC + i % VEC;
        if (lane < LANES && d < D) {
            shared_sum[simdgroup * D + d] = sum[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float top = NONE;
    float seen_top = NONE;
    for (int w = 0; w < WALKERS; w++) {
        top = max(top, shared_state[w * 4]);
        seen_top = max(seen_top, shared_state[w * 4 + 2]);
    }
    for (int d = tid; d < D; d += WALKERS * 32) {
        float whole = 0.0f;
        for (int w = 0; w < WALKERS; w++) {
            whole += shared_sum[w * D + d] * exp(shared_state[w * 4] - top);
        }
        part_sum[(size_t(row) * splits + split) * D + d] = whole;
    }
    if (tid == 0) {
        float whole = 0.0f;
        float seen_whole = 0.0f;
        for (int w = 0; w < WALKERS; w++) {
            whole += shared_state[w * 4 + 1] * exp(shared_state[w * 4] - top);
            seen_whole += shared_state[w * 4 + 3] * exp(shared_state[w * 4 + 2] - seen_top);
        }
        const size_t at = (size_t(row) * splits + split) * 4;
        part_mass[at] = top;
        part_mass[at + 1] = whole;
        part_mass[at + 2] = seen_top;
        part_mass[at + 3] = seen_whole;
    }
"""
)

# Estimates that were too high for what was read are lowered as much for what was not
_MERGE = """
    const int tid = int(thread_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    const int splits = sizes[0];
    float top = -1e30f;
    float seen_top = -1e30f;
    for (int s = 0; s < splits; s++) {
        const size_t at = (size_t(row) * splits + s) * 4;
        top = max(top, part_mass[at]);
        seen_top = max(seen_top, part_mass[at + 2]);
    }
    float mass = 0.0f;
    float seen = 0.0f;
    for (int s = 0; s < splits; s++) {
        const size_t at = (size_t(row) * splits + s) * 4;
        mass += part_mass[at + 1] * exp(part_mass[at] - top);
        seen += part_mass[at + 3] * exp(part_mass[at + 2] - seen_top);
    }
    for (int d = tid; d < D; d += THREADS) {
        float sum = 0.0f;
        for (int s = 0; s < splits; s++) {
            const size_t at = size_t(row) * splits + s;
            sum += part_sum[at * D + d] * exp(part_mass[at * 4] - top);
        }
        sum = mass == 0.0f ? 0.0f : sum / mass;
        for (int r = 0; r < R; r++) {
            out[(size_t(row) * R + r) * D + d] = sum;
        }
    }
    if (tid < R) {
        const size_t head = size_t(row) * R + tid;
        const float over = seen == 0.0f ? 0.0f : max(seen_top + log(seen) - lse[head], 0.0f);
        correction_lse[head] = mass == 0.0f ? -INFINITY : top + log(mass) - over;
    }
"""

parts = Kernel(
    "eps_correction_parts",
    ("estimate", "visit", "mean", "mean_scale", "correction_valid", "table", "lengths", "sizes"),
    ("part_sum", "part_mass"),
    _PARTS,
)
merge = Kernel("eps_correction_merge", ("part_sum", "part_mass", "lse", "sizes"), ("out", "correction_lse"), _MERGE)


def attend_correction(
    estimate: mx.array,
    selected_mask: mx.array,
    lse: mx.array,
    mean: mx.array,
    mean_scale: mx.array,
    correction_valid: mx.array,
    table: mx.array,
    lengths: mx.array,
    *,
    group_size: int,
    correction_tokens: int,
) -> tuple[mx.array, mx.array]:
    """(out [B, Hq, D], lse [B, Hq]) float32: an estimate of attention over the groups that were not selected, as
    `eps_mlx.attention.attend_correction` describes it; an estimate, no bound.

    estimate [B, Hkv, G] float32 log masses, infinite where unknown; selected_mask [B, Hkv, G] bool or uint8;
    lse [B, Hq] float32 of what was read; mean [P, Hkv, T, D] int8 times mean_scale [P, Hkv, T] float16 the means of V
    over the T = U / correction_tokens correction groups of a unit, correction_valid [P, T] bool or uint8 those that are
    up to date; table [B, M] int32; lengths [B] int32. Only full, valid correction groups count; only means with mass
    are read.
    """
    batch, kv_heads, groups = estimate.shape
    num_units, _, corrections_per_unit, head_dim = mean.shape
    assert correction_tokens % group_size == 0 and selected_mask.shape == estimate.shape
    assert groups == table.shape[1] * corrections_per_unit * (correction_tokens // group_size), "whole units are listed"
    assert correction_valid.size == num_units * corrections_per_unit and table.dtype == lengths.dtype == mx.int32
    repeat = lse.shape[1] // kv_heads
    units = table.shape[1]
    splits = num_splits(batch * kv_heads, units * corrections_per_unit, SIMDGROUPS * SPLIT_CORRECTIONS)
    part_sum, part_mass = launch(
        parts,
        [
            estimate,
            selected_mask,
            mean,
            mean_scale,
            correction_valid,
            table,
            lengths,
            integers(kv_heads, units, corrections_per_unit, correction_tokens // group_size, correction_tokens, splits),
        ],
        {"D": head_dim, "WALKERS": SIMDGROUPS},
        grid=(SIMDGROUPS * 32, batch * kv_heads, splits),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[(batch, kv_heads, splits, head_dim), (batch, kv_heads, splits, 4)],
        output_dtypes=[mx.float32, mx.float32],
    )
    threads = max(min(-(-head_dim // 32) * 32, 256), -(-repeat // 32) * 32)
    out, correction_lse = launch(
        merge,
        [part_sum, part_mass, lse, integers(splits)],
        {"D": head_dim, "R": repeat, "THREADS": threads},
        grid=(threads, batch * kv_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*lse.shape, head_dim), lse.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return out, correction_lse
