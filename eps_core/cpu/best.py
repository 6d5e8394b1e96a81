"""The best of many estimates without a sort: thresholds by digits of what a sample says they lie between.

Estimates become uint32 keys in their order, 0 where there is nothing to choose. All that is chosen is what a stable
sort would choose: the largest, the lower index first among equals.
"""

import numpy as np

from eps_core.cpu.best_vectors import count_above, squeeze
from eps_core.cpu.compile import kernel
from eps_core.cpu.threads import finish, take, wait

SAMPLE = 512  # keys that say where a threshold lies; changes speed only
DIGIT_BITS = 8
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
    between low and high, left <= count; keys are overwritten."""
    span, shift = np.int64(high) - np.int64(low), 0
    while span >> shift >= 1 << DIGIT_BITS:
        shift += DIGIT_BITS
    base, num = np.int64(low), count
    counts = np.empty((4, 1 << DIGIT_BITS), np.int32)
    while True:
        # four counts of each digit: consecutive keys often share a digit, and an increment waits for the last
        counts[:] = 0
        for i in range(num):
            counts[i & 3, ((np.int64(keys[i]) - base) >> shift) & 255] += 1
        digit, above, equal = 1 << DIGIT_BITS, 0, 0
        while above < left:
            digit -= 1
            equal = counts[0, digit] + counts[1, digit] + counts[2, digit] + counts[3, digit]
            above += equal
        left -= above - equal
        base += np.int64(digit) << shift
        if shift == 0:
            return np.uint32(base), equal, left
        last = base + ((np.int64(1) << shift) - 1)
        found = 0
        for i in range(num):
            key = keys[i]
            keys[found] = key
            found += int(base <= np.int64(key) <= last)
        num, shift = found, shift - DIGIT_BITS


@kernel()
def bracket(keys, count, num, low, high):
    """(least, most) between which the num-th largest of keys [count] very likely lies, by a sample of them."""
    step = count // SAMPLE
    sample, copy = np.empty(SAMPLE, np.uint32), np.empty(SAMPLE, np.uint32)
    for i in range(SAMPLE):
        sample[i] = keys[i * step]
    share = num / count
    middle, spread = share * SAMPLE, 4 * np.sqrt(SAMPLE * share * (1 - share)) + 2
    least, most, place = low, high, np.int64(middle - spread)
    if place >= 1:
        copy[:] = sample
        most, _, _ = nth_largest(copy, SAMPLE, place, low, high)
    place = np.int64(middle + spread) + 1
    if place <= SAMPLE:
        least, _, _ = nth_largest(sample, SAMPLE, place, low, high)
    return least, most


@kernel()
def threshold(keys, count, num, spare):
    """(key, end): the `num` largest of keys [count] are those above `key` and those that equal it below index `end`; 1
    <= num <= count. spare [count + 16] uint32 is overwritten."""
    low, high = np.uint32(0), np.uint32(0xFFFFFFFF)
    left, found = num, 0
    if count >= 8 * SAMPLE:
        least, most = bracket(keys, count, num, low, high)
        above = count_above(keys, count, most)
        if above < num:
            found = squeeze(keys, 0, count, least, most, keys, spare, 0)
            if above + found >= num:
                low, high, left = least, most, num - above
            else:
                found = 0
    if found == 0:
        spare[:count] = keys[:count]
        found = count
    key, equal, wanted = nth_largest(spare, found, left, low, high)
    # `wanted` of the keys that equal the threshold: the lowest indices
    end = count
    while equal > wanted:
        end -= 1
        equal -= int(keys[end] == key)
    return key, end


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
def keep_best(keys, count, num, spare):
    """Of keys [count] the `num` largest stay, the others become 0; all stay where no more are there. num >= 0."""
    key, end = limit(keys, count, num, spare)
    for i in range(end):
        keys[i] = keys[i] if keys[i] >= key else np.uint32(0)
    for i in range(end, count):
        keys[i] = keys[i] if keys[i] > key else np.uint32(0)


@kernel()
def list_kept(keys, count, listed):
    """Indices of the keys [count] that are not 0, ascending; listed has room for 16 more. Returns how many."""
    return squeeze(keys, 0, count, np.uint32(1), np.uint32(0xFFFFFFFF), None, listed, 0)


@kernel()
def select_topk(progress, estimate, count, guards, ends, groups, visit):
    """Fills groups [B, Hkv, W] with the `count` [B] best of estimate [B, Hkv, G] within ends [B], the guards and +inf
    first, ascending and then -1; and visit [B, Hkv, G] uint8. One phase."""
    batch, kv_heads, num_groups = estimate.shape
    keys, spare = np.empty(num_groups, np.uint32), np.empty(num_groups + 16, np.uint32)
    listed = np.empty(num_groups + 16, np.int32)
    while True:
        row = take(progress, 0)
        if row >= batch * kv_heads:
            break
        b, h = row // kv_heads, row % kv_heads
        end = ends[b]
        order(estimate[b, h, :end].view(np.uint32), keys)
        keys[: guards[b, 0]] = FIRST
        keys[guards[b, 1] : end] = FIRST
        keep_best(keys, end, count[b], spare)
        taken = list_kept(keys, end, listed)
        own, seen = groups[b, h], visit[b, h]
        own[:taken] = listed[:taken]
        own[taken:] = -1
        for i in range(end):
            seen[i] = keys[i] != 0
        seen[end:] = 0
        finish(progress, 0)
    wait(progress, 0, batch * kv_heads)
