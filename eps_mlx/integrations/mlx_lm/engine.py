"""mlx-lm as an engine of `eps-proto run --engine mlx-lm` and `eps-proto serve`: see eps_core.integrations.protocol."""

import _thread
import gc
import json
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
from huggingface_hub import CacheNotFound, scan_cache_dir
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_config

import eps_mlx
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError, one_line
from eps_core.integrations.protocol import Step
from eps_core.integrations.settings import Settings
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_version
from eps_core.models.folder import refuse_adapter
from eps_mlx.device import DTYPES, device_of
from eps_mlx.integrations.mlx_lm.balance import balance
from eps_mlx.integrations.mlx_lm.cache import EpsKVCache
from eps_mlx.integrations.mlx_lm.hook import Hook
from eps_mlx.integrations.mlx_lm.names import stock_step
from eps_mlx.integrations.mlx_lm.rows import Rows
from eps_mlx.integrations.mlx_lm.verified import verified_step

PREFILL_CHUNK = 2048  # mlx-lm's own
logger = logging.getLogger("eps")


class MlxLmEngine:
    """See `eps_core.integrations.protocol.Engine`. One prompt goes through `generate_step`, several through
    `BatchGenerator`."""

    first_token_is_prefill = False  # mlx-lm gives a prompt's last token a step of its own
    computes_ahead = True

    def __init__(self, hook: Hook, device: str, default: mx.Device) -> None:
        self.hook, self.sparse, self._device, self._default = hook, hook.sparse, device, default
        self.prefill_ms: float | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        sparse: bool,
        stop: Sequence[int] = (),
    ) -> Iterator[Step]:
        """See `Engine.generate`. mlx-lm starts a step before the last one's token is asked for, so the counters show
        one step more than there are tokens."""
        mx.random.seed(sampling.seed)
        top_p = sampling.top_p if sampling.top_p < 1 else 0.0
        sampler = make_sampler(temp=sampling.temperature, top_p=top_p) if sampling.temperature else None
        make = self.hook.model.make_cache if sparse and self.hook.pool is not None else self.hook.stock_caches
        self.prefill_ms = 0.0
        steps = self._one if len(prompts) == 1 else self._batch
        yield from steps([list(map(int, prompt)) for prompt in prompts], max_new_tokens, sampler, make, stop)

    def _one(
        self, prompts: list[list[int]], max_new_tokens: int, sampler: Any, make: Any, stop: Sequence[int]
    ) -> Iterator[Step]:
        started = last = time.perf_counter()

        def on_progress(done: int, total: int) -> None:
            nonlocal last
            if done < total:  # the last of these is before the prompt's last token
                last = time.perf_counter()
                self.prefill_ms = 1000 * (last - started)

        cache, more = make(), dict[str, Any]()
        verified = self.sparse.rounds is not None and any(isinstance(one, EpsKVCache) for one in cache)
        if verified:
            more["stop"] = stop
        steps = (verified_step if verified else stock_step)(
            mx.array(prompts[0]), self.hook.model, _stream(), max_tokens=max_new_tokens, sampler=sampler,
            prompt_cache=cache, prompt_progress_callback=on_progress, **more,
        )  # fmt: skip
        for token, _ in steps:
            now = time.perf_counter()
            yield Step([0], [int(token)], 1000 * (now - last))
            last = time.perf_counter()
            if token in stop:
                break

    def _batch(
        self, prompts: list[list[int]], max_new_tokens: int, sampler: Any, make: Any, stop: Sequence[int]
    ) -> Iterator[Step]:
        started, caches = time.perf_counter(), [make() for _ in prompts]
        with mx.stream(_stream()):
            for prompt, cache in zip(prompts, caches, strict=True):
                for start in range(0, len(prompt) - 1, PREFILL_CHUNK):
                    chunk = prompt[start : min(start + PREFILL_CHUNK, len(prompt) - 1)]
                    self.hook.model(mx.array([chunk]), cache=cache)
                    mx.eval([one.state for one in cache])
        last = time.perf_counter()
        self.prefill_ms = 1000 * (last - started)
        generator = BatchGenerator(
            self.hook.model, stop_tokens=[[token] for token in stop], sampler=sampler,
            completion_batch_size=len(prompts), prefill_batch_size=len(prompts), stream=_stream(),
        )  # fmt: skip
        try:
            # prompts that were read join the batch together; the generator alone would let short ones begin earlier
            numbers = generator.insert(
                [prompt[-1:] for prompt in prompts], [max_new_tokens] * len(prompts), caches=caches,
                all_tokens=[prompt[:-1] for prompt in prompts],
            )  # fmt: skip
            del caches, cache  # the batch has its own
            order, left = {number: index for index, number in enumerate(numbers)}, len(prompts)
            while left:
                _, said = generator.next()
                now = time.perf_counter()
                if said:
                    left -= sum(one.finish_reason is not None for one in said)
                    yield Step([order[one.uid] for one in said], [int(one.token) for one in said], 1000 * (now - last))
                    last = time.perf_counter()
        finally:
            generator.close()

    def describe(self) -> dict[str, Any]:
        """`engine`, `versions`, `device`, `dtype`, `kernels`."""
        pool = self.hook.pool
        return {
            "engine": "mlx-lm",
            "versions": {"mlx-lm": check_version("mlx-lm"), **eps_mlx.versions()},
            "device": self._device,
            "dtype": _dtype(self.hook.model),
            "kernels": None if pool is None else pool.paged.cache.kernels,
        }

    def close(self) -> None:
        self.hook.close()
        mx.set_default_device(self._default)


def _stream() -> Any:
    """mlx-lm's own is of the device that was the default when it was imported."""
    return mx.default_stream(mx.default_device())


def _dtype(model: Any) -> str:
    """Return the dtype of the activations: that of the norms, which are never quantised."""
    named: Any = tree_flatten(model.parameters())
    kinds = [array.dtype for name, array in named if "norm" in name]
    return next((name for name, kind in DTYPES.items() if kinds and kind == kinds[0]), "mixed")


def open_engine(
    path: Path,
    settings: Settings,
    device: str = "auto",
    dtype: str = "auto",
    max_tokens: int = 0,
    num_sequences: int = 1,
) -> MlxLmEngine:
    """See `EngineModule.open_engine`. dtype auto is as stored, as mlx-lm itself has it."""
    check_version("mlx-lm")
    check_engine(settings.verify, "mlx-lm", num_sequences)
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of auto, {', '.join(DTYPES)}")
    default, chosen = mx.default_device(), device_of(device)
    mx.set_default_device(chosen)
    try:
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json: give a model directory")
        try:
            loaded: Any = mlx_lm.load(str(path), return_config=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ConfigError(f"mlx-lm cannot load {path}: {one_line(error)}") from error
        model, _, config = loaded
        if dtype != "auto":
            model.set_dtype(DTYPES[dtype])
        hook = Hook(model, settings, str(path), max_tokens * num_sequences, config, keep_records=True)
        try:
            balance(hook, path)
        except BaseException:
            hook.close()
            raise
    except BaseException:
        mx.set_default_device(default)
        raise
    return MlxLmEngine(hook, "cpu" if chosen == mx.Device(mx.cpu) else "mps", default)


def _check_arguments(arguments: Any) -> None:
    """Check what else mlx-lm's server is asked for. Raises ConfigError for what EPS cannot read; warns of drafts."""
    if arguments.kv_bits is not None:
        raise ConfigError(
            f"EPS does not read a KV cache of {arguments.kv_bits} bits: leave --kv-bits out, or use --method off"
        )
    if arguments.draft_model is not None:
        logger.warning(
            "eps: with --draft-model several tokens are verified at once, and those are attended densely: EPS will "
            "hardly read less"
        )


def _hub_cache(*args: Any, **kwargs: Any) -> Any:
    """The Hub's cache, which need not be there where a folder is served: /v1/models then lists that alone."""
    try:
        return scan_cache_dir(*args, **kwargs)
    except CacheNotFound:
        return SimpleNamespace(repos=())


def _together(counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counters of several models as one. Of their ratios there is `bytes_ratio` alone."""
    if len(counted) < 2:
        return dict(*counted)
    whole: dict[str, Any] = {}

    def add(stats: dict[str, Any], sums: dict[str, Any]) -> None:
        for name, value in stats.items():
            if isinstance(value, dict):
                add(value, sums.setdefault(name, {}))
            elif isinstance(value, bool):
                sums[name] = value
            elif isinstance(value, int):
                sums[name] = sums.get(name, 0) + value

    for stats in counted:
        add(stats, whole)
    read, dense = whole["bytes_kv_read"] + whole["bytes_summary_read"], whole["bytes_kv_dense"]
    return {**whole, "bytes_ratio": read / dense if dense else None}


def serve(path: Path, settings: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """Runs `mlx_lm.server` on a model with EPS on until it is interrupted or terminated, with `more` of its own
    arguments. The last line on stdout is one JSON object: the counters, and what is left in the pool. Raises
    ConfigError where the model cannot be served with EPS."""
    check_version("mlx-lm")
    from mlx_lm import server as module

    server: Any = module
    faults: list[ConfigError] = []
    counted: list[dict[str, Any]] = []  # the counters of each model that was dropped
    pools: list[Rows] = []
    prompt_caches: weakref.WeakSet[Any] = weakref.WeakSet()

    class PromptCache(server.LRUPromptCache):  # type: ignore[misc, name-defined]
        """mlx-lm's own, where `Provider` finds it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            prompt_caches.add(self)

    class Provider(server.ModelProvider):  # type: ignore[misc, name-defined]
        """Puts EPS on whatever model mlx-lm's server loads, and takes it off again, in the thread that generates."""

        def __init__(self, arguments: Any) -> None:
            if settings.config.cache_config.enabled:
                _check_arguments(arguments)
            self.hook: Hook | None = None
            super().__init__(arguments)

        def _load(self, *args: Any, **kwargs: Any) -> None:
            refuse_adapter(str(args[0]))
            try:
                super()._load(*args, **kwargs)
                folder = Path(args[0])
                config = load_config(folder) if folder.is_dir() else None
                self.hook = Hook(
                    self.model, settings, str(args[0]), config=config, append_metrics=bool(counted)
                )  # fmt: skip
                balance(self.hook, folder)
                if self.hook.pool is not None:
                    pools.append(self.hook.pool)
            except Exception:
                self.reset()  # or the next request would find the model, without EPS
                raise

        def load_default(self) -> None:
            try:
                super().load_default()
            except Exception as error:  # nothing to serve
                text = "" if isinstance(error, ConfigError) else f"mlx-lm cannot load {path}: "
                faults.append(ConfigError(text + one_line(error)))
                _thread.interrupt_main(signal.SIGTERM)  # an interrupt; SIGINT itself is ignored in the background
                raise SystemExit from error  # of this thread; mlx-lm prints a traceback of anything else

        def reset(self) -> None:
            if self.hook is not None:
                counted.append(self.hook.sparse.stats())
                pool = self.hook.pool
                self.hook.close()
                self.hook = None
                if pool is not None:
                    for one in prompt_caches:  # whose entries are of the pool that is closed now
                        one.trim_to(n_sequences=0)
                    pool.paged.cache = None  # frees K and V; `pools` counts blocks
            super().reset()

    rebound = {"ModelProvider": Provider, "LRUPromptCache": PromptCache, "scan_cache_dir": _hub_cache}
    before, argv = {name: getattr(server, name) for name in rebound}, sys.argv
    vars(server).update(rebound)
    main = threading.current_thread() is threading.main_thread()
    # a plea to end is an interrupt: what was measured is still to be said and written
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    sys.argv = ["mlx_lm.server", "--model", str(path), "--host", host, "--port", str(port), *more]
    try:
        server.main()
    except KeyboardInterrupt:
        pass
    except SystemExit as error:  # of argparse, which has said why
        return error.code if isinstance(error.code, int) else 2
    finally:
        vars(server).update(before)
        sys.argv = argv
        if main:
            signal.signal(signal.SIGTERM, terminated)
    if faults:
        raise faults[0]
    # what outlived the server's own threads
    gc.collect()
    said = _together(counted)
    for pool in pools:
        said["live_sequences"] = said.get("live_sequences", 0) + pool.num_live
        said["units_in_use"] = said.get("units_in_use", 0) + pool.paged.pool.num_units - pool.paged.pool.num_free
        pool.paged.pool.check()
    print(json.dumps(said))
    return 0
