"""Metal kernels that choose groups: the K best of each (sequence, kv head), and masks as ascending lists.

One threadgroup a row. The K-th largest estimate is found by radix selection over the order-preserving image of its
float32 bits, most significant digit first: 11 bits a digit, because the first 8 of a float are its sign and exponent,
where all estimates share a few bins and their atomics would queue. It stops as soon as a whole bin is taken, for
distinct estimates usually after two passes. Then each simdgroup lists a contiguous run of groups at the place that the
counts of the runs before it say. No sort, no data-dependent shape, no synchronisation; ties go to the lower index.

Estimates come as uint32 bits, so infinities survive any math mode.
"""

import mlx.core as mx

from eps_mlx.kernels.launch import Kernel, fitted, integers, launch, threads_of

THREADS = 512  # of a row's threadgroup, a multiple of 32 up to 1024; changes speed only

_ROW = """
    constexpr int SIMDS = THREADS / 32;
    const int tid = int(thread_index_in_threadgroup);
    const int lane = int(thread_index_in_simdgroup);
    const int sg = int(simdgroup_index_in_threadgroup);
    const int row = int(threadgroup_position_in_grid.y);
    const int num_groups = sizes[0];
    const int width = sizes[1];
    // listed are the groups below `limit` with (key >> shift) > digits, and the first `room` of those equal to it
    uint room = 0u;
    uint digits = 0u;
    int shift = 0;
"""

# the groups of [head_end, recent_start) compete, the others below `limit` are always selected; as
# where.always_selected_groups
_SINK_RECENT = """
    const int b = row / HKV;
    const int length = lengths[b];
    const int group_size = rules[0];
    const int limit = min((length + group_size - 1) / group_size, num_groups);
    const int first_end = (min(rules[1], length) + group_size - 1) / group_size;
    const int head_end = length < rules[3] ? limit : first_end;
    const int recent_start = max(length - rules[2], 0) / group_size;  // the partial group too, where rules[2] is 0
"""

_NO_SINK_RECENT = """
    const int b = row / HKV;
    const int limit = num_groups;
"""


def _keys(load: str, key: str) -> str:
    """`key` of groups base + k * STEP, k < 8, below `stop`: rises with the estimate, 0 for what is never listed. Eight
    at a time, so that the loads of a thread wait together."""
    return f"""
                uint bits[8];
                #pragma unroll
                for (int k = 0; k < 8; k++) {{
                    const int g = base + k * STEP;
                    bits[k] = g < stop ? {load} : 0u;
                }}
                #pragma unroll
                for (int k = 0; k < 8; k++) {{
                    const int g = base + k * STEP;
                    const uint held = bits[k];
                    uint key = 0u;
                    if (g < stop) {{
                        {key}
                    }}
"""


_IMAGE = "image[size_t(row) * num_groups + g]"
# -0 ties with 0
_RISING = "key = bits[k] & 0x80000000u ? (bits[k] == 0x80000000u ? bits[k] : ~bits[k]) : bits[k] | 0x80000000u;"
_KEYS = {
    # a forced group counts as +inf
    "topk": _keys(_IMAGE, f"bits[k] = g < head_end || g >= recent_start ? 0x7f800000u : bits[k];\n{' ' * 24}{_RISING}"),
    "best": _keys(_IMAGE, f"{_RISING}\n{' ' * 24}key = (bits[k] & 0x7f800000u) == 0x7f800000u ? 0u : key;"),
    "compact": _keys("uint(mask[size_t(row) * num_groups + g])", "key = bits[k];"),
}

_THRESHOLD = """
    constexpr int BINS = 2048;
    constexpr int OWN = BINS / THREADS;
    threadgroup atomic_uint histogram[BINS];
    threadgroup uint sums[SIMDS];
    threadgroup uint found[3];

    const uint wanted = uint(max(min(counts_wanted[b], width), 0));
    if (wanted < uint(limit)) {
        room = wanted;
        for (int pass = 0; pass < 3; pass++) {
            const int low = pass == 0 ? 21 : (pass == 1 ? 10 : 0);
            const uint last_bin = pass == 2 ? 1023u : 2047u;
            for (int i = tid; i < BINS; i += THREADS) {
                atomic_store_explicit(&histogram[i], 0u, memory_order_relaxed);
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const int STEP = THREADS;
            const int stop = limit;
            for (int base = tid; base < stop; base += 8 * STEP) {%s
                    if (key != 0u && (pass == 0 || (key >> shift) == digits)) {
                        atomic_fetch_add_explicit(&histogram[(key >> low) & last_bin], 1u, memory_order_relaxed);
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // from the highest bin down; each thread owns OWN neighbours
            uint mine[OWN];
            uint own = 0u;
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                mine[i] = atomic_load_explicit(&histogram[BINS - 1 - (tid * OWN + i)], memory_order_relaxed);
                own += mine[i];
            }
            uint before = simd_prefix_exclusive_sum(own);
            if (lane == 31) {
                sums[sg] = before + own;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            before += simd_sum(lane < sg ? sums[lane] : 0u);
            room = min(room, simd_sum(lane < SIMDS ? sums[lane] : 0u));
            if (room == 0u) {
                digits = 0xffffffffu;
                break;
            }
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                if (before < room && room <= before + mine[i]) {
                    found[0] = uint(BINS - 1 - (tid * OWN + i));
                    found[1] = before;
                    found[2] = mine[i];
                }
                before += mine[i];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            digits = pass == 0 ? found[0] : (digits << (shift - low)) | found[0];
            shift = low;
            room -= found[1];
            if (room == found[2]) {
                break;
            }
        }
    }
"""

_LIST = """
    threadgroup uint above_of[SIMDS];
    threadgroup uint tied_of[SIMDS];
    const int STEP = 32;
    const int span = (limit + THREADS - 1) / THREADS * 32;
    const int start = sg * span;
    const int stop = min(start + span, limit);
    uint above = 0u;
    uint tied = 0u;%(begin)s
    for (int base = start + lane; base < stop; base += 8 * STEP) {%(keys)s
                    above += key != 0u && (key >> shift) > digits ? 1u : 0u;
                    tied += key != 0u && (key >> shift) == digits ? 1u : 0u;%(seen)s
                }
    }%(between)s
    above = simd_sum(above);
    tied = simd_sum(tied);
    if (lane == 0) {
        above_of[sg] = above;
        tied_of[sg] = tied;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint above_before = simd_sum(lane < sg ? above_of[lane] : 0u);
    uint tied_before = simd_sum(lane < sg ? tied_of[lane] : 0u);%(top)s
    const uint all_above = simd_sum(lane < SIMDS ? above_of[lane] : 0u);
    const uint all_tied = simd_sum(lane < SIMDS ? tied_of[lane] : 0u);
    uint place = above_before + min(tied_before, room);
    const int count = min(int(all_above + min(all_tied, room)), width);

    for (int run = start; run < stop; run += 8 * STEP) {
        const int base = run + lane;%(keys)s
                    if (run + k * STEP >= stop) {
                        continue;
                    }
                    const bool equal = key != 0u && (key >> shift) == digits;
                    bool listed = key != 0u && (key >> shift) > digits;
                    if (all_tied <= room) {
                        listed = listed || equal;
                    } else {
                        const uint rank = tied_before + simd_prefix_exclusive_sum(equal ? 1u : 0u);
                        tied_before += simd_sum(equal ? 1u : 0u);
                        listed = listed || (equal && rank < room);
                    }
                    const uint at = place + simd_prefix_exclusive_sum(listed ? 1u : 0u);
                    place += simd_sum(listed ? 1u : 0u);
                    if (listed && at < uint(width)) {
                        groups[size_t(row) * width + at] = g;
                    }%(visit)s
                }
    }
    for (int i = count + tid; i < width; i += THREADS) {
        groups[size_t(row) * width + i] = -1;
    }
    if (tid == 0) {
        counts[row] = count;
    }
"""

# and the share of the masses that is not listed, of finite estimates by the largest of them
_WITH_SHARE = {
    "begin": """
    threadgroup float tops[SIMDS];
    threadgroup float masses[2 * SIMDS];
    float top = -3e38f;
    float whole = 0.0f;
    float skipped_mass = 0.0f;""",
    "seen": """
                    if (g < stop && (held & 0x7f800000u) != 0x7f800000u) {
                        top = max(top, as_type<float>(held));
                    }""",
    "between": """
    top = simd_max(top);
    if (lane == 0) {
        tops[sg] = top;
    }""",
    "top": """
    top = simd_max(lane < SIMDS ? tops[lane] : -3e38f);""",
    "visit": """
                    if (g < stop) {
                        visit[size_t(row) * num_groups + g] = listed ? 1 : 0;
                        const bool finite = (held & 0x7f800000u) != 0x7f800000u;
                        const float mass = finite ? exp(as_type<float>(held) - top) : 0.0f;
                        whole += mass;
                        skipped_mass += listed ? 0.0f : mass;
                    }""",
    "end": """
    for (int g = limit + tid; g < num_groups; g += THREADS) {
        visit[size_t(row) * num_groups + g] = 0;
    }
    whole = simd_sum(whole);
    skipped_mass = simd_sum(skipped_mass);
    if (lane == 0) {
        masses[2 * sg] = whole;
        masses[2 * sg + 1] = skipped_mass;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        whole = simd_sum(lane < SIMDS ? masses[2 * lane] : 0.0f);
        skipped_mass = simd_sum(lane < SIMDS ? masses[2 * lane + 1] : 0.0f);
        if (lane == 0) {
            skipped[row] = skipped_mass / max(whole, 1e-30f);
        }
    }
""",
}


def _list(keys: str, **more: str) -> str:
    return _LIST % {"keys": keys, **{name: more.get(name, "") for name in _WITH_SHARE}} + more.get("end", "")


_topk = Kernel(
    "eps_select_topk",
    ("image", "counts_wanted", "lengths", "rules", "sizes"),
    ("groups", "counts", "visit", "skipped"),
    _ROW + _SINK_RECENT + _THRESHOLD % _KEYS["topk"] + _list(_KEYS["topk"], **_WITH_SHARE),
)
_best = Kernel(
    "eps_select_best",
    ("image", "counts_wanted", "sizes"),
    ("groups", "counts"),
    _ROW + _NO_SINK_RECENT + _THRESHOLD % _KEYS["best"] + _list(_KEYS["best"]),
)
_compact = Kernel(
    "eps_compact",
    ("mask", "sizes"),
    ("groups", "counts"),
    _ROW + "    const int limit = num_groups;\n" + _list(_KEYS["compact"]),
)


def select_topk(
    estimate: mx.array, counts_wanted: mx.array, lengths: mx.array, *, group_size: int, num_sink_tokens: int,
    num_recent_tokens: int, min_context: int, width: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:  # fmt: skip
    """(groups [B, Hkv, width] int32 ascending, then -1; counts [B, Hkv] int32; mask [B, Hkv, G] uint8; the estimated
    share of the masses that is left out [B, Hkv] float32, as `selection.skipped_mass`): those of
    `always_selected_groups` and groups at +inf first, then the best by estimate [B, Hkv, G] float32, until
    counts_wanted [B] int32 <= width are listed in all; never past the end of lengths [B] int32 tokens."""
    rules = integers(*(min(rule, 2**31 - 1) for rule in (group_size, num_sink_tokens, num_recent_tokens, min_context)))
    groups, counts, selected_mask, skipped = _select(
        _topk, [estimate.view(mx.uint32), counts_wanted, lengths, rules], width, shares=True
    )
    return groups, counts, selected_mask, skipped


def select_best(estimate: mx.array, counts_wanted: mx.array, *, width: int) -> tuple[mx.array, mx.array]:
    """(groups [B, Hkv, width] int32 ascending, then -1; counts [B, Hkv] int32): the counts_wanted [B] int32 <= width
    best finite estimates [B, Hkv, G] float32, all of them where they are fewer."""
    groups, counts = _select(_best, [estimate.view(mx.uint32), counts_wanted], width)
    return groups, counts


def compact(selected_mask: mx.array, *, width: int) -> tuple[mx.array, mx.array]:
    """(groups [B, Hkv, width] int32 ascending, then -1; counts [B, Hkv] int32) of the groups that a mask [B, Hkv, G]
    (bool or uint8) marks; the lowest `width` where it marks more."""
    groups, counts = _select(_compact, [selected_mask.view(mx.uint8)], width)
    return groups, counts


@fitted
def _select(kernel: Kernel, inputs: list[mx.array], width: int, shares: bool = False) -> list[mx.array]:
    batch, kv_heads, num_groups = inputs[0].shape
    shapes, dtypes = [(batch, kv_heads, width), (batch, kv_heads)], [mx.int32, mx.int32]
    threads = threads_of(kernel, THREADS)
    if shares:
        shapes += [(batch, kv_heads, num_groups), (batch, kv_heads)]
        dtypes += [mx.uint8, mx.float32]
    return launch(
        kernel,
        [*inputs, integers(num_groups, width)],
        {"HKV": kv_heads, "THREADS": threads},
        grid=(threads, batch * kv_heads, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
