"""The Metal kernel that writes a decode step's tokens: into new arrays of their units, as no kernel writes in place.

In each step it copies a unit of K and V for each token: 128 KiB each of 64 tokens, 8 heads, 128 dimensions in 16 bits.
"""

import mlx.core as mx

from eps_mlx.kernels.launch import Kernel, fitted, integers, launch, threads_of

THREADS = 256  # of a threadgroup, at most; changes speed only

# The first threadgroup also looks at every number of K, as it is held
_WRITE = """
    constexpr int VEC = D % 4 == 0 ? 4 : 1;
    constexpr int PIECES = D / VEC;
    threadgroup float worst[THREADS / 32];
    const int tid = int(thread_index_in_threadgroup);
    const int group = int(threadgroup_position_in_grid.x);
    const int kv_heads = sizes[0];
    const int unit_tokens = sizes[1];
    const int tokens = sizes[2];
    const int row = (group * THREADS + tid) / PIECES;
    const int piece = (group * THREADS + tid) % PIECES;
    const int pair = row / unit_tokens;  // of a token and a kv head
    if (pair < tokens * kv_heads) {
        const size_t to = size_t(row) * D + piece * VEC;
        Piece<T, VEC> key = load_piece<VEC>(k_before + to);
        Piece<T, VEC> value = load_piece<VEC>(v_before + to);
        if (row % unit_tokens == offsets[pair / kv_heads]) {
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                key.v[i] = static_cast<T>(k[size_t(pair) * D + piece * VEC + i]);
                value.v[i] = static_cast<T>(v[size_t(pair) * D + piece * VEC + i]);
            }
        }
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            k_open[to + i] = key.v[i];
            v_open[to + i] = value.v[i];
        }
    }
    if (group == 0) {
        float bad = 0.0f;
        for (int i = tid; i < tokens * kv_heads * D; i += THREADS) {
            bad = isfinite(static_cast<float>(static_cast<T>(k[i]))) ? bad : 1.0f;
        }
        bad = simd_max(bad);
        if (thread_index_in_simdgroup == 0) {
            worst[simdgroup_index_in_threadgroup] = bad;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (tid == 0) {
            for (int i = 0; i < THREADS / 32; i++) {
                bad = max(bad, worst[i]);
            }
            finite[0] = finite_before && bad == 0.0f;
        }
    }
"""

_write = Kernel(
    "eps_write",
    ("k", "v", "k_before", "v_before", "offsets", "finite_before", "sizes"),
    ("k_open", "v_open", "finite"),
    _WRITE,
)


@fitted
def write_tokens(
    k: mx.array, v: mx.array, k_open: mx.array, v_open: mx.array, offsets: mx.array, finite: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """(K, V of open units, `finite` [] bool, False too where a stored key is NaN or Inf), new arrays: k_open, v_open
    [N, Hkv, U, D] with tokens k, v [N, Hkv, D] of any dtype at offsets [N] int32 of their units."""
    tokens, kv_heads, head_dim = k.shape
    unit_tokens, pieces = k_open.shape[2], head_dim // 4 if head_dim % 4 == 0 else head_dim
    assert v.shape == k.shape and k_open.shape == v_open.shape == (tokens, kv_heads, unit_tokens, head_dim)
    assert finite.ndim == 0, "the kernel reads a reference"
    threads, group = tokens * kv_heads * unit_tokens * pieces, threads_of(_write, THREADS, head_dim)
    new_k, new_v, still_finite = launch(
        _write,
        [k, v, k_open, v_open, offsets, finite, integers(kv_heads, unit_tokens, tokens)],
        {"T": k_open.dtype, "D": head_dim, "THREADS": group},
        grid=(-(-threads // group) * group, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[k_open.shape, v_open.shape, ()],
        output_dtypes=[k_open.dtype, v_open.dtype, mx.bool_],
    )
    return new_k, new_v, still_finite
