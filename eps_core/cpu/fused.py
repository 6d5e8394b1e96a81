"""A whole sparse layer in one call of all threads: score, select, attend, correction, merge.

Called one by one, the parts cost a layer of some thousand tokens more than what they compute: threads that start three
or four times, and what Python does in between, of which caches hold nothing after another layer's weights.
Each part's arguments are its kernel's own, its phases follow those of the part before, and what a part fills is done
when it returns.
"""

from eps_core.cpu.attend import attend, attend_correction, merge, skipped_mass
from eps_core.cpu.best import select_topk
from eps_core.cpu.compile import FAST, kernel
from eps_core.cpu.threads import FAILED, finish, note_time, take, wait
from eps_core.cpu.units import score_units

PHASES = 5  # of what follows the scores


@kernel(fastmath=FAST)
def _read_on(progress, stamps, chosen, attended, has_correction, correction, merged, skipped):
    """Run what follows the scores: arguments of `select_topk` and `attend`, and of `attend_correction` and `_merge_all`
    where it `has_correction`, else of `skipped_mass`. Lists of a thread that failed are not read."""
    if progress[0, FAILED]:
        return
    select_topk(progress[:1], *chosen)
    if progress[0, FAILED]:
        return
    note_time(stamps, 1)
    attend(progress[1:3], *attended)
    if progress[0, FAILED]:
        return
    if has_correction:
        attend_correction(progress[3:4], *correction)
        _merge_all(progress[4:], *merged)
    else:
        skipped_mass(progress[3:4], *skipped)
    note_time(stamps, 2)


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


# below no parameter is starred: `openmp` looks a kernel up by its arguments


@kernel(fastmath=FAST)
def score_and_read(progress, stamps, phases, scored, chosen, attended, has_correction, correction, merged, skipped):
    """`score_units` of `phases` phases, and `_read_on`."""
    note_time(stamps, 0)
    score_units(progress[:phases], *scored)
    _read_on(progress[phases:], stamps, chosen, attended, has_correction, correction, merged, skipped)
