"""EPS put on one model of mlx-lm, and taken off again."""

import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

import eps_mlx
from eps_core.attention.protocol import Backend
from eps_core.errors import ConfigError
from eps_core.integrations.kernels import checked_kernels
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_version
from eps_mlx.integrations.mlx_lm import names
from eps_mlx.integrations.mlx_lm.cache import CLASSES, make_caches, open_pools
from eps_mlx.integrations.mlx_lm.dropped import check_read
from eps_mlx.integrations.mlx_lm.plan import look_at
from eps_mlx.integrations.mlx_lm.rows import FIRST_TOKENS, OPEN_GROUPS, Rows
from eps_mlx.integrations.mlx_lm.verified import verified_step

logger = logging.getLogger("eps")


class Hook:
    """EPS on one model, from birth to `close`. With method off nothing is touched."""

    def __init__(
        self, model: Any, settings: Settings, name: str | None = None, expected_tokens: int = 0,
        config: dict[str, Any] | None = None, **kept: Any,
    ) -> None:  # fmt: skip
        """`name`: of the model, for metrics. `expected_tokens`: room in the pool from the start, of all sequences
        together. `config`: of its config.json, which is compared with what mlx-lm made of it. `kept`: that of
        `SparseAttention`."""
        check_version("mlx-lm")
        check_engine(settings.verify, "mlx-lm")
        if getattr(model, names.HANDLE, None) is not None:
            raise ConfigError("this model has EPS on already: leave the other `with eps(model)` first")
        self.model, wanted = model, settings.config
        self.pool: Rows | None = None
        self.stock_caches: Callable[[], list[Any]] = lambda: make_prompt_cache(model)
        if not wanted.cache_config.enabled:
            self.sparse = SparseAttention(eps_mlx, wanted, Plan((), {}))
            self.sparse.on = False
            return
        self._before = model.__dict__.get("make_cache")
        self.stock_caches = getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in model.layers])
        names.rebind(CLASSES)
        with ExitStack() as undo:  # where something cannot be
            undo.callback(names.restore)
            plan, spec, num_heads = look_at(model, self.stock_caches())
            if config is not None:
                check_read(model, config, name or "", self.stock_caches())
            device = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "mps"
            kernels = checked_kernels(
                cast(Backend, eps_mlx), settings.kernels, device, spec, num_heads, wanted.cache_config
            )
            units = -(-max(FIRST_TOKENS, expected_tokens) // wanted.cache_config.unit_tokens)
            self.sparse = SparseAttention(
                eps_mlx, wanted, plan, settings.metrics, settings.audit_every,
                model=name or type(model).__module__, device=device, verify=settings.verify,
                weight_bytes=_weight_bytes(model) if settings.verify.enabled else 0, **kept,
            )  # fmt: skip
            undo.callback(self.sparse.close)  # the metrics file is free again
            self.sparse.fits(spec.num_kv_heads)
            spec = replace(spec, num_units=units, max_open_groups=OPEN_GROUPS)
            pool = self.pool = Rows(self.sparse, spec, device, kernels)
            undo.pop_all()
        # a model that is dropped without `close` takes EPS with it; metrics are written at the latest at the end
        self._leave = weakref.finalize(model, _leave, pool)
        self._leave.atexit = settings.metrics is not None
        model.make_cache = self.make_cache
        setattr(model, names.HANDLE, self)
        open_pools.append(self.pool)
        if self.sparse.rounds is not None:
            names.rebind_step(verified_step)
        logger.log(plan.level, plan.line(self.sparse.config))

    def make_cache(self) -> list[Any]:
        """Return the caches of the model's own `make_cache`, with ours in the sparse layers."""
        assert self.pool is not None
        made = list(self.stock_caches())
        for layer, one in zip(self.sparse.plan.sparse, make_caches(self.pool), strict=True):
            made[layer] = one
        return made

    def close(self) -> None:
        """Takes EPS off the model; caches made with it can no longer be used."""
        if self.pool is None:
            return
        self.pool = None
        if self._before is None:
            del self.model.make_cache
        else:
            self.model.make_cache = self._before
        delattr(self.model, names.HANDLE)
        self._leave()


def _leave(pool: Rows) -> None:
    """Close the pool, as far as that does not need the model."""
    pool.closed = True
    open_pools.remove(pool)
    names.restore()
    if pool.sparse.rounds is not None:
        names.restore_step()
    pool.sparse.close()


def _weight_bytes(model: Any) -> int:
    """Return the bytes of all weights, the input embedding left out unless it is the output head, too."""
    flat: Any = tree_flatten(model.parameters())
    tied = not any("lm_head" in name for name, _ in flat)
    return sum(array.nbytes for name, array in flat if tied or "embed_tokens" not in name)


def hook_of(model: Any) -> Hook | None:
    """The hook of a model that has EPS on."""
    found: Hook | None = getattr(model, names.HANDLE, None)
    return found
