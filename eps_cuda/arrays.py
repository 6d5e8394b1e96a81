"""The functions of `eps_core.backend`, over Torch arrays."""

from functools import partial

from eps_core.backend import attention, cache, error_bounds, moves, scoring, selection
from eps_cuda.ops import OPS

attend_own = partial(attention.attend_own, OPS)
attend_rows = partial(attention.attend_rows, OPS)
merge = partial(attention.merge, OPS)
unread_share = partial(attention.unread_share, OPS)
weights = partial(attention.weights, OPS)
check_finite = partial(cache.check_finite, OPS)
finalize = partial(cache.finalize, OPS)
invalidate = partial(cache.invalidate, OPS)
mark_valid = partial(cache.mark_valid, OPS)
read_kv = partial(cache.read_kv, OPS)
write_kv = partial(cache.write_kv, OPS)
write_kv_tentative = partial(cache.write_kv_tentative, OPS)
bound_error = partial(error_bounds.bound_error, OPS)
bounds = partial(error_bounds.bounds, OPS)
extend_selection = partial(error_bounds.extend_selection, OPS)
copy_units = partial(moves.copy_units, OPS)
export_units = partial(moves.export_units, OPS)
move_kv = partial(moves.move_kv, OPS)
take = partial(moves.take, OPS)
visits = partial(moves.visits, OPS)
anchors = partial(scoring.anchors, OPS)
score = partial(scoring.score, OPS)
select = partial(selection.select, OPS)
skipped_mass = partial(selection.skipped_mass, OPS)
import_units = partial(moves.import_units, OPS)
