"""A whole sparse layer in one call of all threads: score, select, attend, and the share of the softmax left out.

Called one by one, the parts cost a layer of some thousand tokens more than what they compute: threads that start three
or four times, and what Python does in between, of which caches hold nothing after another layer's weights.
Each part's arguments are its kernel's own, its phases follow those of the part before, and what a part fills is done
when it returns.
"""

from eps_core.cpu.attend import attend, skipped_mass
from eps_core.cpu.best import select_topk
from eps_core.cpu.compile import FAST, call_by_name, kernel
from eps_core.cpu.threads import FAILED, note_time
from eps_core.cpu.units import score_units

PHASES = 4  # of what follows the scores, and one for each row that is scored


# no parameter is starred: `openmp` looks a kernel up by its arguments
@kernel(fastmath=FAST)
def score_and_read(progress, stamps, phases, scored, chosen, attended, skipped):
    """`score_units` of `phases` phases, `select_topk`, `attend` and `skipped_mass`. Where a thread scores whole rows it
    selects them, too, and a thread without a row left attends to rows that are selected. Lists of a thread that failed
    are not read."""
    together, rest = scored[0], progress[phases : phases + PHASES]
    ready = progress[phases + PHASES :]
    note_time(stamps, 0)
    call_by_name(score_units, (progress[:phases], *scored, (*chosen[1:], ready)))
    if rest[0, FAILED]:
        return
    if together:
        call_by_name(select_topk, (rest[:1], *chosen))
        if rest[0, FAILED]:
            return
        ready = ready[:0]
    note_time(stamps, 1)
    call_by_name(attend, (rest[1:3], ready, *attended))
    if rest[0, FAILED]:
        return
    call_by_name(skipped_mass, (rest[3:], *skipped))
    note_time(stamps, 2)
