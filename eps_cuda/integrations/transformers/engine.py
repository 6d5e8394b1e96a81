"""`eps-proto run --engine transformers`: prompts through a model's own `generate`, dense and sparse."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError, one_line
from eps_core.integrations.protocol import Step
from eps_core.integrations.settings import Settings
from eps_core.integrations.verified import check_engine
from eps_core.integrations.versions import check_version
from eps_core.load import load_backend, resolve_kernels
from eps_cuda.device import DTYPES, device_of
from eps_cuda.integrations.transformers.attention import NAME
from eps_cuda.integrations.transformers.balance import balance
from eps_cuda.integrations.transformers.cache import EpsCache, make_fused
from eps_cuda.integrations.transformers.gguf import source_of
from eps_cuda.integrations.transformers.names import CACHE
from eps_cuda.integrations.transformers.verified import verifying

PREFILL_TOKENS = 2048  # of a prompt at once; bounds the memory of a padded batch's mask


class TransformersEngine:
    """A causal model and its `generate`."""

    # all but the last token of each prompt are prefilled; `generate` goes on from there with a step of its own
    first_token_is_prefill = False
    computes_ahead = False
    prefill_ms: float | None = None

    def __init__(self, model: Any, settings: Settings, kernels: str) -> None:
        self.model, self.settings, self.kernels = model, settings, kernels
        self.sparse = make_fused(model, settings, keep_records=True)
        model.generation_config = GenerationConfig()  # nothing but what `generate` below is asked for
        # one thread for all runs: libraries keep their teams of workers by the thread that asks
        self._worker = ThreadPoolExecutor(1, "generate")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        sparse: bool,
        stop: Sequence[int] = (),
    ) -> Iterator[Step]:
        """See `integrations.protocol.Engine`. A row that has ended leaves the batch, which `generate` would not do."""
        self.prefill_ms = None
        given: SimpleQueue[tuple[float, list[int], list[int]] | None] = SimpleQueue()
        streamer = _Streamer(given)
        done = self._worker.submit(self._run, prompts, max_new_tokens, sampling, sparse, stop, streamer)
        done.add_done_callback(lambda _: given.put(None))
        try:
            before = None
            while (one := given.get()) is not None:
                at, sequences, tokens = one
                if before is not None:  # the first is the end of the prefill
                    yield Step(sequences, tokens, 1000 * (at - before))
                before = at
            done.result()
        finally:
            streamer.cancelled = True
            with contextlib.suppress(Exception):  # told above, to whoever still listens
                done.result()

    @torch.no_grad()
    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        sparse: bool,
        stop: Sequence[int],
        streamer: "_Streamer",
    ) -> None:
        model, device = self.model, self.model.device
        model.set_attn_implementation(NAME if sparse and self.settings.config.cache_config.enabled else "sdpa")
        if model.config._attn_implementation == NAME:
            cache: Cache = EpsCache(model, sparse=self.sparse, kernels=self.kernels)
        else:
            cache = DynamicCache(config=model.config)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        started = time.perf_counter()
        self._prefill(cache, ids[:, :-1], mask[:, :-1])
        if device.type != "cpu":
            torch.accelerator.synchronize()
        streamer.begin(list(range(len(prompts))))
        self.prefill_ms = 1000 * (streamer.begun - started)
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        devices = [device] if device.type != "cpu" else []
        loop = verifying(model, self.sparse) if sparse and self.sparse.rounds is not None else contextlib.nullcontext()
        with loop, torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            torch.manual_seed(sampling.seed)
            while streamer.sequences and ids.shape[1] < longest + max_new_tokens:
                ids = model.generate(
                    ids, attention_mask=mask, streamer=streamer, use_cache=True,
                    max_new_tokens=longest + max_new_tokens - ids.shape[1],
                    stopping_criteria=StoppingCriteriaList([_AnyEnded(stop)]), **drawn, **{CACHE: cache},
                )  # fmt: skip
                alive = [row for row, last in enumerate(ids[:, -1].tolist()) if last not in stop]
                if len(alive) < len(streamer.sequences):
                    streamer.sequences = [streamer.sequences[row] for row in alive]
                    if alive:
                        cache.batch_select_indices(torch.tensor(alive, device=device))
                    ids, mask = ids[alive], mask[alive]
                mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)

    def _prefill(self, cache: Cache, ids: Tensor, mask: Tensor) -> None:
        """K and V of ids [B, T] into an empty cache, a part of them at once."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = bool((mask == 0).any())
        for start in range(0, ids.shape[1], PREFILL_TOKENS):
            end = min(start + PREFILL_TOKENS, ids.shape[1])
            self.model(
                ids[:, start:end], attention_mask=mask[:, :end] if padded else None,
                position_ids=positions[:, start:end], use_cache=True, logits_to_keep=1, **{CACHE: cache},
            )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "versions": {"transformers": check_version("transformers"), **load_backend("cuda").versions()},
            "device": self.model.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "kernels": self.kernels,
        }

    def close(self) -> None:
        self._worker.shutdown()
        self.sparse.close()


def open_engine(
    path: Path,
    settings: Settings,
    device: str = "auto",
    dtype: str = "auto",
    max_tokens: int = 0,
    num_sequences: int = 1,
) -> TransformersEngine:
    """See `integrations.protocol.EngineModule`; the cache grows as it is filled. dtype auto: float32 on a CPU, else as
    stored."""
    check_version("transformers")
    check_engine(settings.verify, "transformers", num_sequences)
    place = device_of(device)
    kernels = resolve_kernels(settings.kernels, load_backend("cuda").usable_kernels(place.type), place.type)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of auto, {', '.join(DTYPES)}")
    wanted = "auto" if dtype == "auto" and place.type != "cpu" else DTYPES.get(dtype, torch.float32)
    source = source_of(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=wanted, attn_implementation="sdpa")
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load {path}: {one_line(error)}") from error
    model = model.eval().to(place)
    balance(model, path, settings.config.cache_config)
    return TransformersEngine(model, settings, kernels)


class _AnyEnded(StoppingCriteria):
    """Ends `generate` for all rows where one has ended, so that it can leave."""

    def __init__(self, stop: Sequence[int]) -> None:
        self.stop = np.array(list(stop), np.int64)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = torch.isin(input_ids[:, -1], torch.from_numpy(self.stop).to(input_ids.device, non_blocking=True))
        return ended.any().expand(len(input_ids))


class _Cancelled(Exception):
    """Nobody listens any more."""


class _Streamer(BaseStreamer):
    """Tells each step's tokens with their time. `generate` hands over what it starts with first."""

    def __init__(self, given: SimpleQueue[Any]) -> None:
        self.given, self.cancelled, self.skip = given, False, True
        self.sequences: list[int] = []
        self.begun = 0.0

    def begin(self, sequences: list[int]) -> None:
        self.sequences, self.begun = sequences, time.perf_counter()
        self.given.put((self.begun, [], []))

    def put(self, value: Tensor) -> None:
        if self.cancelled:
            raise _Cancelled
        if self.skip:
            self.skip = False
            return
        tokens = value.flatten().tolist()  # of a round: several of the one prompt there is
        rows = self.sequences if len(tokens) == len(self.sequences) else self.sequences * len(tokens)
        self.given.put((time.perf_counter(), list(rows), tokens))

    def end(self) -> None:
        self.skip = True  # the next `generate` begins with what it starts with, too
