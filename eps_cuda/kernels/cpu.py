"""Torch's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back, without copies.

The functions have the signatures of their namesakes over arrays; None says that there is no kernel for the case. What
they give is made of numpy arrays, so nothing is recorded for gradients and no call need enter inference mode.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.config.store import Store
from eps_core.cpu import kernels, write
from eps_core.cpu.calls import Chosen
from eps_core.gate.protocol import GatedRead, RowsRead, Scores, Selection
from eps_core.paging.rows import Rows
from eps_core.paging.where import Where
from eps_core.summaries.rq import part_dims
from eps_cuda.cache import Cache
from eps_cuda.summaries.base import mean_codes, near16, to_byte
from eps_cuda.summaries.rq import pack_codes

State = tuple[Tensor, Tensor]


def _host(array: Tensor) -> np.ndarray:
    """The array's own memory; bfloat16 as uint16."""
    return _memory(array if array.is_contiguous() else array.contiguous())


def _memory(array: Tensor) -> np.ndarray:
    """`_host` without a copy, with the strides that the array has."""
    if array.requires_grad:
        array = array.detach()
    if array.dtype == torch.bfloat16:
        array = array.view(torch.uint16)
    found: np.ndarray = array.numpy()
    return found


def _pools_of(cache: Cache) -> Callable[[Tensor], np.ndarray]:
    """`_memory` of what a cache holds for good, which is found once: a layer asks for a dozen."""

    def view(pool: Tensor) -> np.ndarray:
        found = cache.views.get(id(pool))
        if found is None:
            found = cache.views[id(pool)] = pool, _memory(pool)
        return found[1]

    return view


@functools.cache
def _team() -> tuple[Callable[..., None], Callable[[], int]]:
    """What runs kernels, and how many threads it uses: Torch's own where they can be reached."""
    from eps_core.cpu import openmp, threads

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    run = openmp.team_of(library, torch.get_num_threads)
    return (threads.run, threads.num_threads) if run is None else (run, torch.get_num_threads)


def _run(kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
    _team()[0](kernel, phases, *args, alone=alone)


def kernel_threads() -> int:
    """Threads of the compiled kernels."""
    return _team()[1]()


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _listed(selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    return _host(selection.groups), _host(selection.counts)


def score(cache: Cache, layer: int, q: Tensor, where: Where) -> Scores | None:
    """See `scoring.score`."""
    scored = kernels.score(cache, layer, _host(q.float()), where, _host, _run)
    if scored is None:
        return None
    estimate, lower, upper, num_missing, slack = scored
    return Scores(
        torch.from_numpy(estimate), _tensor(lower), _tensor(upper), num_missing, _tensor(slack), kernels=cache.kernels
    )


def select(scores: Scores, where: Where, layer: int = 0) -> Selection | None:
    """See `selection.select`."""
    chosen = kernels.select(where, _host(scores.estimate), scores.num_missing, layer, _run)
    return None if chosen is None else _selection(chosen)


def _selection(chosen: Chosen) -> Selection:
    groups, counts, uniform, forced, visit = chosen
    return Selection(torch.from_numpy(groups), torch.from_numpy(counts), uniform, forced, visit=torch.from_numpy(visit))


def attend_gated(cache: Cache, layer: int, q: Tensor, where: Where) -> GatedRead | None:
    """Of q [B, Hq, D], unscaled, what `score`, `select`, `attend`, `add_tail` and `skipped_mass` give, to the last bit.
    Out of 16 bits is rounded once, though: they round before the tail is added, too."""
    found = kernels.attend_gated(cache, layer, _host(q.float()), where, _pools_of(cache), _run)
    if found is None:
        return None
    (out, lse), (_, read_lse) = found.whole, found.read
    return GatedRead(
        torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse), torch.from_numpy(read_lse), _selection(found.chosen),
        torch.from_numpy(found.skipped), found.prepass_share,
    )  # fmt: skip


def attend(cache: Cache, layer: int, q: Tensor, where: Where, selection: Selection | None) -> State:
    """See `attention.attend`."""
    listed = None if selection is None else _listed(selection)
    out, lse = kernels.attend(cache, layer, _host(q.float()), where, listed, _memory, _run)
    return torch.from_numpy(out).to(q.dtype), torch.from_numpy(lse)


def attend_rows(cache: Cache, layer: int, q: Tensor, rows: Rows, visit: Tensor | None = None) -> RowsRead:
    """See `attention.attend_rows`."""
    listed = None if visit is None else _host(visit.to(torch.bool))
    is_short = q.dtype == torch.bfloat16
    out, *others = kernels.attend_rows(cache, layer, _host(q.float()), is_short, rows, listed, _memory, _run)
    return RowsRead(torch.from_numpy(out).to(q.dtype), *map(_tensor, others))


def attend_tail(cache: Cache, layer: int, where: Where, scores: Scores, selection: Selection, lse: Tensor) -> State:
    """See `attention.attend_tail`."""
    out, tail, _ = kernels.attend_tail(
        cache, layer, where, _host(scores.estimate), _listed(selection), _host(lse), _host, _run
    )
    return torch.from_numpy(out), torch.from_numpy(tail)


@torch.inference_mode()
def build_summary(store: Store, constants: dict[str, Tensor], k: Tensor) -> dict[str, Tensor] | None:
    """See `summaries.build_summary`: k [F, Hkv, S, D], or of U tokens. Covers rq without bounds."""
    if not store.facts.coded or store.rq_bounds:
        return None
    keys = _host(k.float())
    turned, mean = write.unit_means(keys, store.S, _host(constants["signs"]))
    most = 2 ** (store.mean_bits - 1) - 1
    codes, mean_scale = mean_codes(torch.from_numpy(mean), most)
    stored = codes.float() * mean_scale.float()[..., None]
    summary = write.build_units(turned, _host(stored), part_dims(store, keys.shape[-1]), store.second_bit)
    arrays = {name: torch.from_numpy(array) for name, array in summary.items()}
    rounded = {name: to_byte(near16(x)) if x.dtype == torch.float32 else x for name, x in arrays.items()}
    return rounded | {"mean": pack_codes(codes.int() + (most + 1), store.mean_bits), "mean_scale": mean_scale}


def add_tail(cache: Cache, layer: int, where: Where, scores: Scores, selection: Selection, state: State) -> State:
    """See `attention.add_tail`."""
    out, lse = state
    *tail, share = kernels.attend_tail(
        cache, layer, where, _host(scores.estimate), _listed(selection), _host(lse), _host, _run
    )
    selection.kept["skipped"] = scores.estimate, torch.from_numpy(share)
    whole, whole_lse = kernels.merge(_host(out.float()), _host(lse), *tail)
    return torch.from_numpy(whole).to(out.dtype), torch.from_numpy(whole_lse)


def skipped_mass(scores: Scores, selection: Selection) -> Tensor | None:
    """See `selection.skipped_mass`."""
    of, share = selection.kept.get("skipped", (None, None))
    if of is scores.estimate:  # the tail of the same estimates, which summed them, too
        return share
    if selection.visit is None:
        return None
    return torch.from_numpy(kernels.skipped_mass(_host(scores.estimate), _host(selection.visit), _run))
