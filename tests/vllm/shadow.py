"""A second, plain copy of every key that vLLM writes: what lies in the blocks, and what is summarised, must agree."""

from typing import Any

import numpy as np
import torch
from engines import runtime

from eps_core.backend.summaries.table import build_summary
from eps_cuda.integrations.vllm.forward import on_host
from eps_cuda.ops import OPS

GROUPS = 4  # of each row and layer that are looked at in a step, drawn again; each with all that share its mean


class Shadow:
    """Watches an engine's runtime. `layer_steps` counts decode calls of a layer, `largest` is the largest difference of
    any key, `wrong` the summaries that are not those of the keys, `lacking` full groups without one."""

    def __init__(self, llm: Any) -> None:
        self.runtime = runtime(llm)
        self.keys: dict[int, torch.Tensor] = {}
        self.layer_steps = self.checked = self.wrong = self.lacking = 0
        self.largest = 0.0
        self.rng = np.random.default_rng(0)
        route, attend = self.runtime.route, self.runtime.attend
        write = route.write

        def watched_write(runtime: Any, place: int, key: Any, value: Any, slot_mapping: Any, stock: Any) -> None:
            slots = on_host(slot_mapping).astype(np.int64)
            cache = runtime.cache
            if place not in self.keys:
                tokens = cache.spec.num_units * cache.cache_config.unit_tokens
                self.keys[place] = torch.full((tokens, *key.shape[1:]), torch.nan, dtype=cache.k[place].dtype)
            real = torch.from_numpy(slots >= 0)
            self.keys[place][torch.from_numpy(slots)[real]] = key[: len(slots)][real].to(cache.k[place].dtype)
            write(runtime, place, key, value, slot_mapping, stock)

        def watched_attend(place: int, q: Any, plan: Any, dense: Any) -> Any:
            out = attend(place, q, plan, dense)
            self.check(place, plan)
            return out

        route.write = watched_write
        self.runtime.attend = watched_attend  # type: ignore[method-assign]

    def check(self, place: int, plan: Any) -> None:
        self.layer_steps += 1
        cache, keys = self.runtime.cache, self.keys[place]
        size, per_unit = cache.cache_config.span_tokens, cache.cache_config.spans_per_unit
        drawn = []
        for units, length in zip(plan.table, plan.lengths.tolist(), strict=True):
            index = self.rng.integers(0, max(length // size, 1), GROUPS)
            index[0] = max(length // size - 1, 0)  # the group that filled last
            groups = units[index // per_unit].astype(np.int64) * per_unit + index % per_unit
            drawn.append(groups[(index + 1) * size <= length])
        groups = np.concatenate(drawn)
        if not len(groups):
            return
        rows = keys[torch.from_numpy(groups[:, None] * size + np.arange(size))]  # [F, S, Hkv, D]
        at, sub = np.divmod(groups, per_unit)
        stored = cache.k[place].unflatten(2, (per_unit, size))[torch.from_numpy(at), :, torch.from_numpy(sub)]
        # NaN, an unwritten slot, is a difference, too
        gap = (stored.float() - rows.transpose(1, 2).float()).abs().nan_to_num(torch.inf)
        self.largest = max(self.largest, float(gap.max()))
        self.lacking += int((~cache.state[place].valid(groups)).sum())
        wanted = build_summary(OPS, cache.cache_config, cache.constants(place), rows.transpose(1, 2))
        for name in ("codes", "second"):
            found = cache.summaries[place][name][torch.from_numpy(at), :, torch.from_numpy(sub)]
            self.wrong += int((found != wanted[name]).flatten(2).any(dim=-1).sum())
        self.checked += len(groups)
