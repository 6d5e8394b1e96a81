"""Queries of codes about a unit's mean on a CPU: rotated and rounded queries, and the tables of their nibbles."""

import numpy as np

from eps_core.cpu.compile import kernel
from eps_core.cpu.unit_vectors import SCANS, SHUFFLES, WORD, WORD_TABLE
from eps_core.cpu.vectors import HEADS, LANES
from eps_core.cpu.write import largest_size, rotate
from eps_core.summaries.rq import QUERY_STEPS


@kernel()
def rounded_query(turned, integers):
    """Fills integers [D] int8 within +-QUERY_STEPS and returns the float32 step of a rotated query [D] float32 ~
    integers * step. No fastmath: every library rounds the same numbers."""
    step = largest_size(turned) / np.float32(QUERY_STEPS)
    for d in range(len(turned)):
        whole = np.rint(turned[d] / step) if step > 0 and step < np.inf else np.float32(0)
        integers[d] = np.int8(min(max(whole, np.float32(-QUERY_STEPS)), np.float32(QUERY_STEPS)))
    return step


@kernel()
def fill_words(integers, first, dims, table):
    """table: what each value of each nibble of one part of a code, of `dims` dimensions from `first` on, adds to
    integers [HEADS, D] int8 . signs: a table of `scan_planes`. Returns how many words it is of."""
    words = (dims + 8 * WORD - 1) // (8 * WORD)
    entries = np.empty(16, np.int8)
    for nibble in range(2 * WORD * words):
        at, j, side = nibble // (2 * WORD) * WORD_TABLE, nibble // 2 % WORD, nibble % 2
        for r in range(HEADS):
            entries[0] = 0
            for bit in range(4):
                dim = 4 * nibble + bit
                one = integers[r, first + dim] if dim < dims else np.int8(0)
                for value in range(1 << bit):
                    entries[value + (1 << bit)] = entries[value] + one
                    entries[value] -= one
            for value in range(16):
                if SCANS or SHUFFLES:
                    at_value = ((side * HEADS + r) * WORD + j) * 16 + value
                else:
                    at_value = ((side * WORD + j) * 16 + value) * HEADS + r
                table[at + at_value] = entries[value]
    return words


@kernel()
def prepare(q, shrink, signs, blocks, block_scales, dims, words, turned, factors):
    """The tables of one pass of HEADS query heads: q [HEADS, D] float32 unscaled becomes turned [HEADS, D]; words of
    each part of a code and, behind them, of a whole one; factors [parts + 1, HEADS] of each part, and of twice the sum
    of the whole code and of the rescoring bits."""
    head_dim = q.shape[1]
    integers = np.empty((HEADS, head_dim), np.int8)
    columns = np.zeros(head_dim * LANES, np.float32)
    for r in range(HEADS):
        for d in range(head_dim):
            columns[d * LANES + r] = q[r, d] * shrink
    rotate(columns, signs, blocks, block_scales)
    for r in range(HEADS):
        for d in range(head_dim):
            turned[r, d] = columns[d * LANES + r]
        step, many = rounded_query(turned[r], integers[r]), 0
        for part in range(len(dims)):
            many += dims[part]
            factors[part, r] = step * np.float32(head_dim / many)
        factors[len(dims), r] = step * np.float32(0.5)
    word, first, whole = np.int64(0), np.int64(0), True
    for part in range(len(dims)):
        word += fill_words(integers, first, dims[part], words[word * WORD_TABLE :])
        first += dims[part]
        whole &= first % (8 * WORD) == 0
    if whole:  # parts of whole words have the same tables
        for i in range(word * WORD_TABLE):
            words[word * WORD_TABLE + i] = words[i]
    else:
        fill_words(integers, np.int64(0), head_dim, words[word * WORD_TABLE :])
