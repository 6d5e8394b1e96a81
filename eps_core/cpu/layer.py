"""Compute what a transformer layer does besides attention, for few rows: norms, products with weights, rotary
embeddings and the feed-forward block. There is one call before attention and one after it.

The products of few rows wait for the weights to come from memory. Two dozen calls of one small operation each take as
long again. Here every weight is read once for all rows, before attention in tasks of a head, else of some TASK_BYTES.
Activations stay float32. The bits of a row do not depend on how many rows there are.

Arrays: x [R, hidden]; a weight [N, K] flat, of float32, bfloat16, float16 or 8-bit codes with a step for each of its N
outputs; N of LANES or more, K a multiple of it. An absent step, bias or norm is an empty array.
"""

import numpy as np
from numba.core import cgutils

from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.threads import finish, take, wait
from eps_core.cpu.vectors import LANES, LINE, PERMUTES, emits, i32, i64, item_bytes, splat

OUTPUTS = 4  # of a weight at a time, where several rows share what is read
STEP, AHEAD_BYTES = 64, 2048  # numbers of a weight at a time, and how far ahead memory is asked; changes speed only
# rows that share what is read of a weight: their sums with OUTPUTS fill the registers
TOGETHER = 4 if PERMUTES else 2
TASK_BYTES = 2**17
AROUND, AFTER = 1, 4  # phases


@emits()
def _of_one(builder, kinds, weight, output, size, x, row, out, to, width):
    """out[row, to] = weight[output] . x[row]: weight [N, size], x [R, size], out [R, width]. Weights are read in the
    order in which they lie, which memory serves a quarter faster than several outputs at a time."""
    start, each = builder.at(weight, (output, size)), item_bytes(weight)
    total = cgutils.alloca_once_value(builder, splat(0.0))

    def add(k):
        own = builder.load_lanes(builder.at(x, (row, size), k))
        one = builder.widened(kinds[0].dtype, builder.load_lanes(builder.at(start, k)))
        builder.store(builder.fma(one, own, builder.load(total)), total)

    whole = builder.and_(size, i64(-STEP))
    with builder.steps(0, whole, STEP) as k:
        for line in range(0, STEP * each, LINE):
            builder.prefetch_line(builder.at(start, k, (AHEAD_BYTES + line) // each))
        for at in range(0, STEP, LANES):
            add(builder.total(k, at))
    with builder.steps(whole, size, LANES) as k:
        add(k)
    found = builder.folded(builder.load(total), 1, builder.fadd)
    builder.store(builder.extract_element(found, i32(0)), builder.at(out, (row, width), to))


@emits()
def _of_several(builder, kinds, weight, first, size, x, row, out, to, width):
    """out[row + r, to + i] = weight[first + i] . x[row + r] for i < OUTPUTS and r < TOGETHER, to the bit as `_of_one`
    has it."""
    rows, each = range(TOGETHER), item_bytes(weight)
    totals = [[cgutils.alloca_once_value(builder, splat(0.0)) for _ in range(OUTPUTS)] for _ in rows]
    following = builder.at(weight, (builder.total(first, OUTPUTS), size))
    with builder.steps(0, size, LANES) as k:
        for line in range(0, LANES * OUTPUTS * each, LINE):  # of the next outputs, in the order of memory
            builder.prefetch_line(builder.at(following, (k, OUTPUTS), line // each))
        own = [builder.load_lanes(builder.at(x, (builder.total(row, r), size), k)) for r in rows]
        for i in range(OUTPUTS):
            stored = builder.load_lanes(builder.at(weight, (builder.total(first, i), size), k))
            one = builder.widened(kinds[0].dtype, stored)
            for r in rows:
                builder.store(builder.fma(one, own[r], builder.load(totals[r][i])), totals[r][i])
    for r in rows:
        found = builder.sums([builder.load(place) for place in totals[r]])
        builder.store_lanes(found, builder.at(out, (builder.total(row, r), width), to))


@emits()
def _activate(builder, active, linear, count, is_gelu, out, to):
    """out[to + i] = act(active[i]) linear[i] for i < count, a multiple of LANES: gelu by tanh, else silu; both are
    x sigmoid(z), of z = x, or 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    with builder.steps(0, count, LANES) as at:
        x, one = builder.load_lanes(builder.at(active, at)), splat(1.0)
        cubic = builder.fma(builder.fmul(x, x), splat(0.0713548162726), splat(1.5957691216057308))
        z = builder.fmul(x, builder.select(is_gelu, cubic, one))
        share = builder.fdiv(one, builder.fadd(one, builder.exp(builder.fsub(splat(0.0), z))))
        value = builder.fmul(builder.fmul(x, share), builder.load_lanes(builder.at(linear, at)))
        builder.store_lanes(value, builder.at(out, to, at))


@kernel(fastmath=FAST)
def _multiply(weight, steps, bias, first, count, x, out, to):
    """out[:, to + i] = weight[first + i] . x + bias[first + i] for i < count, which is OUTPUTS or more."""
    rows, size = x.shape
    for start in range(0, count, OUTPUTS):
        i, row = min(start, count - OUTPUTS), 0
        while row + TOGETHER <= rows:
            _of_several(weight, first + i, size, x, row, out, to + i, out.shape[1])
            row += TOGETHER
        while row < rows:
            for own in range(i, i + OUTPUTS):
                _of_one(weight, first + own, size, x, row, out, to + own, out.shape[1])
            row += 1
    for row in range(rows if len(steps) else 0):
        for i in range(count):
            out[row, to + i] *= steps[first + i]
    for row in range(rows if len(bias) else 0):
        for i in range(count):
            out[row, to + i] += bias[first + i]


@kernel(fastmath=FAST)
def _norm(x, weight, epsilon, out):
    """out = RMS norm of every row of x."""
    for row in range(len(x)):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        scale = np.float32(1 / np.sqrt(total / x.shape[1] + epsilon))
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]


@kernel(fastmath=FAST)
def _block(size, item_bytes, most):
    """Outputs of a task, a multiple of LANES but where there are only `most`."""
    return min(most, max(TASK_BYTES // (size * item_bytes) // LANES, 1) * LANES)


@kernel(fastmath=FAST)
def _product(progress, phase, weight, steps, bias, x, out):
    """out [R, N] = x weight^T + bias. One phase."""
    outputs = out.shape[1]
    block = _block(x.shape[1], weight.itemsize, outputs)
    tasks = outputs // block
    while True:
        task = take(progress, phase)
        if task >= tasks:
            break
        count = block if task < tasks - 1 else outputs - task * block
        _multiply(weight, steps, bias, task * block, count, x, out, task * block)
        finish(progress, phase)
    wait(progress, phase, tasks)


@kernel(fastmath=FAST)
def before_attention(progress, x, norm, epsilon, weights, steps, biases, head_norms, cos, sin, outs):
    """outs: q [R, Hq, D], k and v [R, Hkv, D] of the normed x, q and k normed (`head_norms` of these) and rotated by
    cos, sin [R, D]; weights, steps and biases of the three."""
    rows, size = x.shape
    head_dim, total = outs[0].shape[2], 0
    for one in outs:
        total += one.shape[1]
    half = head_dim // 2
    normed = np.empty((rows, size), np.float32)
    _norm(x, norm, epsilon, normed)
    while True:
        head = take(progress, 0)
        if head >= total:
            break
        which, own = 0, head
        while own >= outs[which].shape[1]:
            own -= outs[which].shape[1]
            which += 1
        out = outs[which]
        flat = out.reshape(rows, out.shape[1] * head_dim)
        _multiply(weights[which], steps[which], biases[which], own * head_dim, head_dim, normed, flat, own * head_dim)
        if which < 2:
            for row in range(rows):
                one = out[row, own]
                if len(head_norms[which]):
                    again = one.reshape(1, head_dim)
                    _norm(again, head_norms[which], epsilon, again)
                for d in range(half):
                    low, high = one[d], one[half + d]
                    one[d] = low * cos[row, d] + high * sin[row, d]
                    one[half + d] = high * cos[row, half + d] + low * sin[row, half + d]
        finish(progress, 0)
    wait(progress, 0, total)


@kernel(fastmath=FAST)
def _add(x, added, norm, epsilon, out):
    """out = x + added, which is normed first where there is a norm."""
    if len(norm):
        _norm(added, norm, epsilon, out)
        out += x
    else:
        for row in range(len(x)):
            for i in range(x.shape[1]):
                out[row, i] = x[row, i] + added[row, i]


@kernel(fastmath=FAST)
def after_attention(progress, x, attended, norms, epsilon, weights, steps, biases, is_gelu, added, middle, again, out):
    """out [R, hidden]: x after attention's output `attended` [R, Hq D] and the feed-forward block. weights, steps and
    biases of o, gate, up and down; norms of attention's output, of the block's input and of its output. added, again
    [R, hidden] and middle [R, intermediate] are filled, too."""
    rows, size = x.shape
    zero, two = np.int64(0), np.int64(2)
    _product(progress, zero, weights[0], steps[0], biases[0], attended, added)
    stream, normed = np.empty((rows, size), np.float32), np.empty((rows, size), np.float32)
    _add(x, added, norms[0], epsilon, stream)
    _norm(stream, norms[1], epsilon, normed)
    inner = middle.shape[1]
    block = _block(2 * size, weights[1].itemsize, inner)
    active, linear = np.empty((rows, block), np.float32), np.empty((rows, block), np.float32)
    while True:
        first = take(progress, 1) * block
        if first >= inner:
            break
        count = min(block, inner - first)
        _multiply(weights[1], steps[1], biases[1], first, count, normed, active, zero)
        _multiply(weights[2], steps[2], biases[2], first, count, normed, linear, zero)
        for row in range(rows):
            _activate(active[row], linear[row], count, is_gelu, middle[row], first)
        finish(progress, 1)
    wait(progress, 1, -(-inner // block))
    _product(progress, two, weights[3], steps[3], biases[3], middle, again)
    while True:
        row = take(progress, 3)
        if row >= rows:
            break
        one = slice(row, row + 1)
        _add(stream[one], again[one], norms[2], epsilon, out[one])
        finish(progress, 3)
    wait(progress, 3, rows)


@kernel(fastmath=FAST)
def head(progress, x, norm, epsilon, weight, steps, bias, out):
    """out [R, V] = the product of the normed x."""
    normed = np.empty(x.shape, np.float32)
    _norm(x, norm, epsilon, normed)
    _product(progress, np.int64(0), weight, steps, bias, normed, out)
