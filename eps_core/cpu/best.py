"""The best of many estimates without a sort: thresholds by halving what a sample says they lie between.

Estimates become uint32 keys in their order, 0 where there is nothing to choose. All that is chosen is what a stable
sort would choose: the largest, the lower index first among equals.
"""

import numpy as np

from eps_core.cpu.best_vectors import count_above, squeeze, squeeze_between
from eps_core.cpu.compile import call_by_name, kernel
from eps_core.cpu.threads import finish, take, wait

SAMPLE = 512  # keys that say where a threshold lies; changes speed only
FIRST = np.uint32(0xFF800000)  # +inf's key


@kernel()
def order(bits, keys):
    """Fills keys uint32 with float32 numbers, given by their bits, in their order. -0 ties with 0."""
    sign = np.uint32(0x80000000)
    for i in range(len(bits)):
        bit = bits[i]
        keys[i] = ~bit if bit > sign else bit | sign


@kernel()
def nth_largest(keys, count, left, low, high):
    """(threshold, how many equal it, how many of these are among the `left` largest, at least 1): keys [count], all
    between low and high, 1 <= left <= count. Each of at most 32 halvings counts sixteen keys at a time: two thirds of
    the time that counts of digits took."""
    least, most = np.int64(low), np.int64(high)
    while least < most:
        middle = (least + most) // 2
        if count_above(keys, count, np.uint32(middle)) < left:
            most = middle
        else:
            least = middle + 1
    above = count_above(keys, count, np.uint32(least))
    equal = (count if least == 0 else count_above(keys, count, np.uint32(least - 1))) - above
    return np.uint32(least), equal, left - above


@kernel()
def bracket(keys, count, num, low, high):
    """(least, most) between which the num-th largest of keys [count] very likely lies, by a sample of them."""
    step = count // SAMPLE
    sample = np.empty(SAMPLE, np.uint32)
    for i in range(SAMPLE):
        sample[i] = keys[i * step]
    share = num / count
    middle, spread = share * SAMPLE, 4 * np.sqrt(SAMPLE * share * (1 - share)) + 2
    least, most, place = low, high, np.int64(middle - spread)
    if place >= 1:
        most, _, _ = nth_largest(sample, np.int64(SAMPLE), place, low, high)
    place = np.int64(middle + spread) + 1
    if place <= SAMPLE:
        least, _, _ = nth_largest(sample, np.int64(SAMPLE), place, low, high)
    return least, most


@kernel()
def _end(keys, count, key, spared):
    """Before which index all of keys [count] that equal `key` lie but the last `spared`."""
    end = count
    while spared > 0:
        end -= 1
        spared -= int(keys[end] == key)
    return end


@kernel()
def threshold(keys, count, num, spare):
    """(key, end): the `num` largest of keys [count] are those above `key` and those that equal it below index `end`; 1
    <= num <= count. spare [count + 16] uint32 is overwritten."""
    low, high = np.uint32(0), np.uint32(0xFFFFFFFF)
    if count >= 8 * SAMPLE:
        least, most = bracket(keys, count, num, low, high)
        found, above = squeeze_between(keys, count, least, most, spare)
        if above < num <= above + found:
            key, equal, wanted = nth_largest(spare, found, num - above, least, most)
            return key, _end(keys, count, key, equal - wanted)
    key, equal, wanted = nth_largest(keys, count, num, low, high)
    return key, _end(keys, count, key, equal - wanted)


@kernel()
def limit(keys, count, num, spare):
    """`threshold` of any num >= 0, above which and at which no key is 0."""
    if num <= 0:
        return np.uint32(0xFFFFFFFF), 0
    if num >= count:
        return np.uint32(1), count
    key, end = threshold(keys, count, num, spare)
    if key == 0:
        return np.uint32(1), count
    return key, end


@kernel()
def list_best(keys, count, num, spare, listed):
    """Lists the indices of the `num` largest of keys [count], ascending, those of keys that are 0 not; listed and spare
    have room for 16 more than count. Returns how many. num >= 0."""
    key, end = limit(keys, count, num, spare)
    last = np.uint32(0xFFFFFFFF)
    taken = squeeze(keys, 0, end, key, last, None, listed, 0)
    if key == last:
        return taken
    return squeeze(keys, end, count, key + np.uint32(1), last, None, listed, taken)


@kernel()
def select_row(row, estimate, count, selectable, ends, groups, selected_mask, keys, spare, listed):
    """`select_topk` of one row (b, h); keys [G] uint32, spare [G + 16] uint32 and listed [G + 16] int32 are
    overwritten."""
    kv_heads = estimate.shape[1]
    b, h = row // kv_heads, row % kv_heads
    end = ends[b]
    order(estimate[b, h, :end].view(np.uint32), keys)
    keys[: selectable[b, 0]] = FIRST
    keys[selectable[b, 1] : end] = FIRST
    taken = list_best(keys, end, count[b], spare, listed)
    own, seen = groups[b, h], selected_mask[b, h]
    own[taken:] = -1
    seen[:] = 0
    for i in range(taken):
        own[i] = listed[i]
        seen[listed[i]] = 1


@kernel()
def room_of_rows(num_groups):
    """Return keys, spare and listed of `select_row`."""
    return np.empty(num_groups, np.uint32), np.empty(num_groups + 16, np.uint32), np.empty(num_groups + 16, np.int32)


@kernel()
def select_topk(progress, estimate, count, selectable, ends, groups, selected_mask):
    """Fills groups [B, Hkv, W] with the `count` [B] best of estimate [B, Hkv, G] within ends [B], the sink and recent
    tokens and +inf first, ascending and then -1; and selected_mask [B, Hkv, G] uint8. One phase."""
    batch, kv_heads, num_groups = estimate.shape
    room = room_of_rows(num_groups)
    while True:
        row = take(progress, 0)
        if row >= batch * kv_heads:
            break
        call_by_name(select_row, (row, estimate, count, selectable, ends, groups, selected_mask, *room))
        finish(progress, 0)
    wait(progress, 0, batch * kv_heads)
