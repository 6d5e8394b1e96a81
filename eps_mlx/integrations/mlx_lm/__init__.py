"""EPS inside mlx-lm, nothing of it changed for good:

    with eps(model, method="rq", budget=0.05) as sparse:
        mlx_lm.generate(model, tokenizer, prompt)
    print(sparse.stats())

or `model, tokenizer = load("mlx-community/..", method="rq")`. `generate`, `stream_generate`, `batch_generate`, saved
prompt caches, trimming, speculative decoding and the server work as before; a decode token of a sparse layer reads what
EPS selects, and everything else is mlx-lm's own. Letters as in eps_core.attention.protocol.
"""

from pathlib import Path
from typing import Any

import mlx_lm

from eps_core.errors import require
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.settings import Settings
from eps_core.models.folder import refuse_adapter
from eps_mlx.integrations.mlx_lm.engine import open_engine, serve
from eps_mlx.integrations.mlx_lm.hook import Hook, hook_of

__all__ = ["eps", "hook_of", "load", "open_engine", "serve"]

_LOAD_NAMES = (
    "tokenizer_config", "model_config", "adapter_path", "lazy", "return_config", "revision", "trust_remote_code",
)  # fmt: skip


class eps:
    """`with eps(model, method="rq", budget=0.05, ..) as sparse:` EPS attention in a model of mlx-lm, for as long as the
    block lasts. `sparse` is its `SparseAttention`; call its `stats()` in the thread that generates. Settings are those
    of `EpsConfig.of`, and `metrics`, `audit_every` and `kernels`.

    Meanwhile mlx-lm's `max_kv_size` does nothing, as sparse layers keep every token; prompt caches made without EPS are
    attended densely. Raises ConfigError for settings out of range, a model without a layer that can be sparse (MLA is
    named), and a version of mlx-lm that is not known to work."""

    def __init__(self, model: Any, **settings: Any) -> None:
        require("method" in settings, 'EPS is off by default: name a method, such as method="rq"')
        self._model, self._settings = model, Settings.of(settings)

    def __enter__(self) -> SparseAttention:
        self._hook = Hook(self._model, self._settings)
        return self._hook.sparse

    def __exit__(self, *exc: object) -> None:
        self._hook.close()


def load(path: str | Path, **settings: Any) -> Any:
    """Return the result of `mlx_lm.load(path)`, with EPS on; `hook_of(model)` has the counters (`.sparse`) and takes it
    off (`.close()`). Names of mlx_lm.load's own (`adapter_path`, `lazy`, ..) go there."""
    theirs = {name: settings.pop(name) for name in list(settings) if name in _LOAD_NAMES}
    chosen = Settings.of(settings)
    refuse_adapter(path)
    whole: Any = mlx_lm.load(str(path), **{**theirs, "return_config": True})
    Hook(whole[0], chosen, str(path), config=whole[2])
    return whole if theirs.get("return_config") else whole[:2]
