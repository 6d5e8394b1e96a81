"""A whole gated layer in one call of all threads: score, select, attend, tail, merge.

Called one by one, the parts cost a layer more than what they compute up to some ten thousand tokens: threads that start
five times, and what Python does in between, of which caches hold nothing after another layer's weights (measured at
2,048 tokens: 0.8 ms, as one call 0.3). Each part's arguments are its kernel's own, its phases follow those of the part
before, and what a part fills is done when it returns.
"""

from eps_core.cpu.attend import attend, attend_tail, merge, skipped_mass
from eps_core.cpu.best import select_topk
from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.score import score_codes, score_rq
from eps_core.cpu.threads import FAILED, finish, take, wait
from eps_core.cpu.units import score_units

PHASES = 5  # of what follows the scores


@kernel(fastmath=FAST)
def _read_on(progress, chosen, attended, has_tail, tail, merged, skipped):
    """What follows the scores: arguments of `select_topk` and `attend`, and of `attend_tail` and `_merge_all` where it
    `has_tail`, else of `skipped_mass`. A thread that failed leaves lists that nobody may follow."""
    select_topk(progress[:1], *chosen)
    if progress[0, FAILED]:
        return
    attend(progress[1:3], *attended)
    if progress[0, FAILED]:
        return
    if has_tail:
        attend_tail(progress[3:4], *tail)
        _merge_all(progress[4:], *merged)
    else:
        skipped_mass(progress[3:4], *skipped)


@kernel(fastmath=FAST)
def _merge_all(progress, out, lse, other_out, other_lse, whole, whole_lse):
    """`merge` of each of B sequences. One phase."""
    while True:
        b = take(progress, 0)
        if b >= len(out):
            break
        merge(out[b], lse[b], other_out[b], other_lse[b], whole[b], whole_lse[b])
        finish(progress, 0)
    wait(progress, 0, len(out))


@kernel(fastmath=FAST)
def gate_units(progress, phases, scored, chosen, attended, has_tail, tail, merged, skipped):
    """`score_units` of `phases` phases, and `_read_on`."""
    score_units(progress[:phases], *scored)
    if not progress[0, FAILED]:
        _read_on(progress[phases:], chosen, attended, has_tail, tail, merged, skipped)


@kernel(fastmath=FAST)
def gate_rq(progress, phases, scored, chosen, attended, has_tail, tail, merged, skipped):
    """`score_rq` of `phases` phases, and `_read_on`."""
    score_rq(progress[:phases], *scored)
    if not progress[0, FAILED]:
        _read_on(progress[phases:], chosen, attended, has_tail, tail, merged, skipped)


@kernel(fastmath=FAST)
def gate_codes(progress, phases, scored, chosen, attended, has_tail, tail, merged, skipped):
    """`score_codes` of `phases` phases, and `_read_on`."""
    score_codes(progress[:phases], *scored)
    if not progress[0, FAILED]:
        _read_on(progress[phases:], chosen, attended, has_tail, tail, merged, skipped)


# no star among the parameters: `openmp` looks a kernel up by its arguments
AFTER = {score_units: gate_units, score_rq: gate_rq, score_codes: gate_codes}  # what scores -> all of it
