"""Runs compiled kernels on the OpenMP threads of an array library: the same calls as `threads.run`.

After a parallel operation the library's threads spin for milliseconds on the cores that helpers of our own would need
(two cores, matrix products in between: a decode step of 2.6 ms took 4.1). As members of its team they begin at once.
The team is reached through GOMP_parallel, the entry that GCC calls for `#pragma omp parallel` (libgomp's ABI; LLVM's
libomp has it on Linux, too), looked up in the library's own dependencies: another libgomp would be another team.

A team waits for every member, also for one whose core is busy with another program (8 ms a call, measured). Helpers are
not waited for: after a late member they take over for a while.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu import attend, best, compile, forks, fused, layer, rows, rows_amx, threads, units
from eps_core.cpu.threads import CLOCK, FAILED, FINISHED, note_time_at
from eps_core.cpu.vectors import Code, i8, i32, i64

LATE_NS = 500_000  # a member that was awake came within 20 microseconds


@intrinsic
def on_team(typing_context, parallel, num_threads, kernel, args):
    """Calls kernel(*args) once in each of at most num_threads threads, this one included, and returns when all have:
    parallel is the address of GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags).
    args begin with `new_progress`: at FINISHED stands then when the first of them returned, at FAILED of
    every phase whether one raised."""
    kernel.get_call_type(typing_context, tuple(args), {})  # compiles it

    def codegen(context, builder, signature, values):
        _, number_type, kernel_type, args_type = signature.args
        pointer, member_type = i8.as_pointer(), ir.FunctionType(ir.VoidType(), [i8.as_pointer()])
        packed = cgutils.alloca_once_value(builder, values[3])
        member = ir.Function(builder.module, member_type, builder.module.get_unique_name("eps_team_member"))
        member.linkage = "internal"
        inside = Code(ir.IRBuilder(member.append_basic_block("entry")))
        unpacked = cgutils.unpack_tuple(inside, inside.load(inside.bitcast(member.args[0], packed.type)))
        function, about = compile.declare(context, builder.module, kernel_type.dispatcher, tuple(args_type))
        status, _ = context.call_conv.call_function(inside, function, about.restype, about.argtypes, unpacked)
        progress = context.make_array(args_type[0])(context, inside, unpacked[0])
        data, (phases, width) = progress.data, cgutils.unpack_tuple(inside, progress.shape, 2)
        with inside.if_then(status.is_error), cgutils.for_range(inside, phases) as phase:
            inside.store(i64(1), inside.at(data, (phase.index, width), FAILED))
        note_time_at(inside, inside.at(data, FINISHED))
        inside.ret_void()
        parallel_type = ir.FunctionType(ir.VoidType(), [member_type.as_pointer(), pointer, i32, i32])
        address = context.cast(builder, values[0], signature.args[0], types.uintp)
        number = context.cast(builder, values[1], number_type, types.uint32)
        begin = builder.inttoptr(address, parallel_type.as_pointer())
        builder.call(begin, [member, builder.bitcast(packed, pointer), number, i32(0)])
        return context.get_dummy_value()

    return types.void(parallel, num_threads, kernel, args), codegen


def _launcher(kernel: Any) -> Callable[..., None]:
    """Return a function of the address of GOMP_parallel, a number of threads and a kernel's arguments that calls the
    kernel in a team."""

    def launch(parallel, num_threads, *args):
        on_team(parallel, num_threads, kernel, args)

    launch.__qualname__ = f"{kernel.__module__}.{kernel.__name__}"  # by which its code is kept
    compiled: Callable[..., None] = compile.kernel(fastmath=compile.FAST)(launch)
    return compiled


_LAUNCHERS: dict[Any, Callable[..., None]] = {
    kernel: _launcher(kernel)
    for kernel in (
        units.score_units, best.select_topk, attend.attend, attend.attend_correction, attend.skipped_mass,
        rows.attend_rows, rows_amx.attend_rows, fused.score_and_read, layer.before_attention, layer.after_attention,
        layer.head,
    )
}  # fmt: skip


class Patience:
    """Choice between the team and helpers: helpers for 16 calls after a member was late twice in a row, twice as many
    after each further time, up to 1024. Once is no sign: it may have slept."""

    def __init__(self) -> None:
        self.late = self.avoid = self.left = 0

    def asks_team(self) -> bool:
        if self.left:
            self.left -= 1
            return False
        return True

    def note(self, waited_ns: int) -> None:
        """waited_ns: how long the last call of the team took after its work was done."""
        if waited_ns <= LATE_NS:
            self.late, self.avoid = 0, self.avoid // 2
            return
        self.late += 1
        if self.late == 2:
            self.late, self.avoid = 0, min(max(2 * self.avoid, 16), 1024)
            self.left = self.avoid


def team_of(library: Path, num_threads: Callable[[], int]) -> Callable[..., None] | None:
    """`run` of the OpenMP team that the shared `library` uses, of num_threads() threads; None where it has none."""
    found = None
    for scope in (None, str(library)):  # in the linker's order: something preloaded goes first
        try:
            found = ctypes.CDLL(scope).GOMP_parallel
            break
        except (OSError, AttributeError):
            continue
    if found is None:
        return None
    parallel, patience = ctypes.cast(found, ctypes.c_void_p).value, Patience()

    def run(kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        """Calls kernel(progress, *args) here and, unless `alone`, in the rest of the team, and returns when all of them
        have. May be called from several threads at once: each has its own team."""
        number = num_threads()
        if compile.is_preparing() and number > 1 and not forks.forked():
            threads.run(kernel, phases, *args, alone=True)
            _LAUNCHERS[kernel](parallel, number, threads.new_progress(phases), *args)
        if forks.forked() or not (alone or number == 1 or patience.asks_team()):
            threads.run(kernel, phases, *args, alone=alone)
            return
        progress = threads.new_progress(phases)
        if alone or number == 1:
            kernel(progress, *args)
            return
        _LAUNCHERS[kernel](parallel, number, progress, *args)
        threads.check(progress)
        patience.note(time.clock_gettime_ns(CLOCK) - int(progress[0, FINISHED]))

    return run
