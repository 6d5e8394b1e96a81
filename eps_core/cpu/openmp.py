"""Runs compiled kernels on the OpenMP threads of an array library: the same calls as `threads.run`.

After a parallel operation the library's threads spin for milliseconds on the cores that helpers of our own would need
(two cores, matrix products in between: a decode step of 2.6 ms took 4.1). As members of its team they begin at once.
The team is reached through GOMP_parallel, the entry that GCC calls for `#pragma omp parallel` (libgomp's ABI; LLVM's
libomp has it on Linux, too), looked up in the library's own dependencies: another libgomp would be another team.

A team waits for every member, also for one whose core is busy with another program (8 ms a call, measured). Helpers are
not waited for: after a late member they take over for a while.
"""

import ctypes
import importlib
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core.cpu import attend, beside, best, compile, forks, fused, layer, rows, rows_amx, threads, units, write
from eps_core.cpu.calls import Call
from eps_core.cpu.threads import CLOCK, FAILED, FINISHED, note_time_at
from eps_core.cpu.vectors import Code, i8, i32, i64

LATE_NS = 500_000  # a member that was awake came within 20 microseconds


def _disowned(builder, kind: types.Type, value, packed=None, place: tuple[int, ...] = ()):
    """Return a tuple's value with no owner in any of its arrays, which the caller must keep alive: code that counts
    references skips a null owner."""
    packed = value if packed is None else packed
    if isinstance(kind, types.Array):
        for field in (0, 1):  # what owns the memory, and the object
            absent = builder.extract_value(packed, [*place, field]).type(None)
            packed = builder.insert_value(packed, absent, [*place, field])
    elif isinstance(kind, types.BaseTuple):
        for at, one in enumerate(kind):
            packed = _disowned(builder, one, value, packed, (*place, at))
    return packed


@intrinsic
def pack(typing_context, kernel, room, call, args):
    """Puts the arguments of a kernel where room [R] uint8 begins and into call [2] int64 what `on_team` calls: the
    address of a function, and of its arguments. Return how many bytes they take; where room has fewer, nothing is put.
    args begin with `new_progress`. The caller keeps all of them until the kernel was called."""
    kernel.get_call_type(typing_context, tuple(args), {})  # compiles it

    def codegen(context, builder, signature, values):
        kernel_type, room_type, call_type, args_type = signature.args
        member_type = ir.FunctionType(i32, [i8.as_pointer()])
        member = ir.Function(builder.module, member_type, builder.module.get_unique_name("eps_team_member"))
        member.linkage = "internal"
        inside = Code(ir.IRBuilder(member.append_basic_block("entry")))
        packed = _disowned(builder, args_type, values[3])
        unpacked = inside.load(inside.bitcast(member.args[0], packed.type.as_pointer()))
        function, about = compile.declare(context, builder.module, kernel_type.dispatcher, tuple(args_type))
        operands = cgutils.unpack_tuple(inside, unpacked)
        status, _ = context.call_conv.call_function(inside, function, about.restype, about.argtypes, operands)
        inside.ret(inside.zext(status.is_error, i32))
        outer = Code(builder)
        place = context.make_array(room_type)(context, builder, values[1])
        size = i64(context.get_abi_sizeof(packed.type))
        with builder.if_then(builder.icmp_signed(">=", place.nitems, size)):
            builder.store(packed, builder.bitcast(place.data, packed.type.as_pointer()))
            pair = context.make_array(call_type)(context, builder, values[2]).data
            for at, address in enumerate((member, place.data)):
                builder.store(builder.ptrtoint(address, i64), outer.at(pair, at))
        return size

    return types.int64(kernel, room, call, args), codegen


@intrinsic
def on_team(typing_context, parallel, num_threads, calls, progress):
    """Calls each of calls [N, 2] int64, as of `pack`, one after another in each of at most num_threads threads, this
    one included, and returns when all have: parallel is the address of GOMP_parallel(void (*body)(void *), void *data,
    unsigned num_threads, unsigned flags). progress [.., W] begins with the counters of the first call, and those of the
    others follow. At FINISHED stands then when the first thread was through, at FAILED of every phase whether one
    failed, after which no thread begins another call."""

    def codegen(context, builder, signature, values):
        address_type, number_type, *array_types = signature.args
        pointer = i8.as_pointer()
        called, counters = (
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(array_types, values[2:], strict=True)
        )
        width = cgutils.unpack_tuple(builder, counters.shape, 2)[1]
        number = cgutils.unpack_tuple(builder, called.shape, 2)[0]
        about = cgutils.pack_struct(builder, [called.data, number, counters.data, counters.nitems, width])
        data = cgutils.alloca_once_value(builder, about)
        body_type = ir.FunctionType(ir.VoidType(), [pointer])
        body = ir.Function(builder.module, body_type, builder.module.get_unique_name("eps_team_body"))
        body.linkage = "internal"
        inside = Code(ir.IRBuilder(body.append_basic_block("entry")))
        own = inside.load(inside.bitcast(body.args[0], data.type))
        calls_data, number, flags, end, width = (inside.extract_value(own, i) for i in range(5))
        member_type = ir.FunctionType(i32, [pointer]).as_pointer()
        with cgutils.for_range(inside, number) as call:
            member, args = (inside.load(inside.at(calls_data, (call.index, 2), side)) for side in range(2))
            failed = inside.call(inside.inttoptr(member, member_type), [inside.inttoptr(args, pointer)])
            number_failed = inside.select(inside.icmp_signed("!=", failed, i32(0)), inside.udiv(end, width), i64(0))
            with cgutils.for_range(inside, number_failed) as phase:
                inside.store(i64(1), inside.at(flags, (phase.index, width), FAILED))
            broken = inside.load_atomic(inside.at(flags, FAILED), ordering="monotonic", align=8)
            with inside.if_then(inside.icmp_signed("!=", broken, i64(0)), likely=False):
                call.do_break()
        note_time_at(inside, inside.at(flags, FINISHED))
        inside.ret_void()
        parallel_type = ir.FunctionType(ir.VoidType(), [body_type.as_pointer(), pointer, i32, i32])
        address = context.cast(builder, values[0], address_type, types.uintp)
        threads_number = context.cast(builder, values[1], number_type, types.uint32)
        begin = builder.inttoptr(address, parallel_type.as_pointer())
        builder.call(begin, [body, builder.bitcast(data, pointer), threads_number, i32(0)])
        return context.get_dummy_value()

    return types.void(parallel, num_threads, calls, progress), codegen


@compile.kernel(fastmath=compile.FAST)
def _start(parallel, num_threads, calls, progress):
    on_team(parallel, num_threads, calls, progress)


def _packer(kernel: Any) -> Callable[..., int]:
    """Return a function of `room`, `call` and a kernel's arguments that packs them."""

    def packing(room, call, *args):
        return pack(kernel, room, call, args)

    packing.__qualname__ = f"{kernel.__module__}.{kernel.__name__}"  # by which its code is kept
    compiled: Callable[..., int] = compile.kernel(fastmath=compile.FAST)(packing)
    return compiled


_PACKERS: dict[Any, Any] = {
    kernel: _packer(kernel)
    for kernel in (
        units.score_units, best.select_topk, attend.attend, attend.skipped_mass, rows.attend_rows,
        rows_amx.attend_rows, fused.score_and_read, layer.before_attention, layer.after_attention, layer.head,
        write.place_rows, write.build_units,
    )
}  # fmt: skip


def compile_all() -> None:
    """Compiles what stdin lists (`beside`)."""
    for module, name, packed, arg_types in pickle.load(sys.stdin.buffer):
        kernel = getattr(importlib.import_module(module), name)
        (_PACKERS[kernel] if packed else kernel).compile(arg_types)


_NO_ROOM, _NO_CALL = np.empty(0, np.uint8), np.empty((1, 2), np.int64)[0]
_sizes: dict[Any, int] = {}  # bytes of a kernel's arguments, when it was last called


class Calls:
    """Calls of kernels that a team makes one after another, any number of times, with the same arguments each time:
    each in every thread, in turn."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.progress = threads.new_progress(sum(call.phases for call in calls))
        self._calls, self._held, begin = np.empty((len(calls), 2), np.int64), [], 0
        for number, (kernel, phases, args, _) in enumerate(calls):
            own, room = self.progress[begin : begin + phases], np.empty(_sizes.get(kernel, 0), np.uint8)
            size = _PACKERS[kernel](room, self._calls[number], own, *args)
            if size > len(room):
                _sizes[kernel], room = size, np.empty(size, np.uint8)
                _PACKERS[kernel](room, self._calls[number], own, *args)
            self._held.append((room, args))
            begin += phases

    def run(self, parallel: int, number: int) -> int:
        """Make them in a team of `number`. Return for how many nanoseconds other members were waited for at the end.
        Raises RuntimeError where a thread failed."""
        _start(parallel, number, self._calls, self.progress)
        waited = time.clock_gettime_ns(CLOCK) - int(self.progress[0, FINISHED])
        threads.check(self.progress)
        return waited


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


class Team:
    """The OpenMP threads that a library uses: parallel is the address of its GOMP_parallel, num_threads() their
    number. May be called from several threads at once: each has its own team."""

    def __init__(self, parallel: int, num_threads: Callable[[], int]) -> None:
        self.parallel, self.num_threads, self.patience = parallel, num_threads, Patience()

    def run(self, kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        """Calls kernel(progress, *args) here and, unless `alone`, in the rest of the team, and returns when all of them
        have."""
        number = self.num_threads()
        if beside.is_recording():
            given = threads.new_progress(phases), *args
            beside.record(kernel, given)
            beside.record(kernel, (_NO_ROOM, _NO_CALL, given), packed=True)
            return
        if beside.is_preparing() and not forks.forked():
            threads.run(kernel, phases, *args, alone=True)
            Calls([Call(kernel, phases, args)]).run(self.parallel, number)
        if forks.forked() or not (alone or number == 1 or self.patience.asks_team()):
            threads.run(kernel, phases, *args, alone=alone)
        elif alone or number == 1:
            kernel(threads.new_progress(phases), *args)
        else:
            self.patience.note(Calls([Call(kernel, phases, args)]).run(self.parallel, number))

    def serves(self, counted: bool = True) -> bool:
        """Return whether `run_all` may be called: not in a forked child, nor while helpers are preferred (`Patience`,
        which counts the calls; unless `counted`, as where `run` follows if not)."""
        return not forks.forked() and (self.patience.asks_team() if counted else not self.patience.left)

    def run_all(self, calls: Calls) -> None:
        """Makes all the calls again. Not for two threads at a time."""
        calls.progress[:] = 0
        self.patience.note(calls.run(self.parallel, self.num_threads()))


def team_of(library: Path, num_threads: Callable[[], int]) -> Team | None:
    """The OpenMP team that the shared `library` uses, of num_threads() threads; None where it has none."""
    for scope in (None, str(library)):  # in the linker's order: something preloaded goes first
        try:
            found = ctypes.CDLL(scope).GOMP_parallel
        except (OSError, AttributeError):
            continue
        address = ctypes.cast(found, ctypes.c_void_p).value
        return None if address is None else Team(address, num_threads)
    return None
