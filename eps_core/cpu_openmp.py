"""Runs compiled kernels on the OpenMP threads of an array library: the same calls as `cpu_threads.run`.

After a parallel operation the library's threads spin for milliseconds on the cores that helpers of our own would need
(two cores, matrix products in between: a decode step of 2.6 ms took 4.1). As members of its team they begin at once.
The team is reached through GOMP_parallel, the entry that GCC calls for `#pragma omp parallel` (libgomp's ABI; LLVM's
libomp has it on Linux, too), looked up in the library's own dependencies: another libgomp would be another team.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from eps_core import cpu_attend, cpu_score, cpu_threads
from eps_core.cpu_score import OPTIONS


@intrinsic
def on_team(typing_context, parallel, num_threads, kernel, args):
    """Calls kernel(*args) once in each of num_threads threads, this one included, and returns when all have: parallel
    is the address of GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags). What a
    kernel raises is lost, so none may raise."""
    kernel.get_call_type(typing_context, tuple(args), {})  # compiles it

    def codegen(context, builder, signature, values):
        _, number_type, kernel_type, args_type = signature.args
        compiled = kernel_type.dispatcher.overloads[tuple(args_type)]
        context.active_code_library.add_linking_library(compiled.library)
        pointer, unsigned = ir.IntType(8).as_pointer(), ir.IntType(32)
        packed = cgutils.alloca_once_value(builder, values[3])
        member_type = ir.FunctionType(ir.VoidType(), [pointer])
        member = ir.Function(builder.module, member_type, builder.module.get_unique_name("eps_team_member"))
        member.linkage = "internal"
        inside = ir.IRBuilder(member.append_basic_block("entry"))
        unpacked = cgutils.unpack_tuple(inside, inside.load(inside.bitcast(member.args[0], packed.type)))
        function, about = context.declare_function(builder.module, compiled.fndesc), compiled.fndesc
        context.call_conv.call_function(inside, function, about.restype, about.argtypes, unpacked)
        inside.ret_void()
        parallel_type = ir.FunctionType(ir.VoidType(), [member_type.as_pointer(), pointer, unsigned, unsigned])
        address = context.cast(builder, values[0], signature.args[0], types.uintp)
        number = context.cast(builder, values[1], number_type, types.uint32)
        begin = builder.inttoptr(address, parallel_type.as_pointer())
        builder.call(begin, [member, builder.bitcast(packed, pointer), number, ir.Constant(unsigned, 0)])
        return context.get_dummy_value()

    return types.void(parallel, num_threads, kernel, args), codegen


# one function each: numba keeps no compiled code of functions made in a loop


@njit(**OPTIONS)
def _score_rq(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_score.score_rq, args)


@njit(**OPTIONS)
def _score_codes(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_score.score_codes, args)


@njit(**OPTIONS)
def _select_topk(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_score.select_topk, args)


@njit(**OPTIONS)
def _attend(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_attend.attend, args)


@njit(**OPTIONS)
def _attend_tail(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_attend.attend_tail, args)


@njit(**OPTIONS)
def _skipped_mass(parallel, num_threads, *args):
    on_team(parallel, num_threads, cpu_attend.skipped_mass, args)


_LAUNCHERS: dict[Any, Callable[..., None]] = {
    cpu_score.score_rq: _score_rq,
    cpu_score.score_codes: _score_codes,
    cpu_score.select_topk: _select_topk,
    cpu_attend.attend: _attend,
    cpu_attend.attend_tail: _attend_tail,
    cpu_attend.skipped_mass: _skipped_mass,
}


_forked = False


def _lose_team() -> None:
    global _forked
    _forked = True


# a forked child has no team but believes that it has (Torch's own parallel operations hang there)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_team)


def team_of(library: Path, num_threads: Callable[[], int]) -> Callable[..., None] | None:
    """`run` of the OpenMP team that the shared `library` uses, of num_threads() threads; None where it has none."""
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel = ctypes.cast(found, ctypes.c_void_p).value

    def run(kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        """Calls kernel(progress, *args) here and, unless `alone`, in the rest of the team, and returns when all of them
        have. May be called from several threads at once: each has its own team."""
        if _forked:
            cpu_threads.run(kernel, phases, *args, alone=alone)
        elif alone:
            kernel(cpu_threads.new_progress(phases), *args)
        else:
            _LAUNCHERS[kernel](parallel, num_threads(), cpu_threads.new_progress(phases), *args)

    return run
