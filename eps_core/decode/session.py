"""A model, a backend, a device and kernels, opened once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec, Store
from eps_core.decode.chat import render
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import prefill
from eps_core.decode.hub import resolve_model
from eps_core.decode.kernel_check import disagreement
from eps_core.decode.model import DEMO_MODEL, read_spec
from eps_core.decode.spec import ModelSpec
from eps_core.decode.tokenizer import encode, load_tokenizer
from eps_core.errors import ConfigError
from eps_core.gate.protocol import Array, Backend
from eps_core.load import backend_name, load_backend, resolve_kernels
from eps_core.paging.pool import PagePool
from eps_core.paging.pool import Sequence as PagedSequence


@dataclass(frozen=True, eq=False)
class Prefix:
    """A document's start after its dense prefill, to be written into any cache of its model, whatever that keeps."""

    tokens: list[int]
    keys_values: list[tuple[Array, Array]]  # of each layer [T, Hkv, D]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for pair in self.keys_values for array in pair)

    def into(self, backend: Backend, cache: Any, pool: PagePool, room: int = 0) -> tuple[PagedSequence, Any]:
        """(sequence, cache) with these tokens written, and units for `room` more side by side with theirs."""
        length = len(self.tokens)
        sequence, _ = pool.open()
        slots, _ = pool.append(sequence, [*self.tokens, *[0] * room])
        pool.rewind(sequence, length)
        for layer, (k, v) in enumerate(self.keys_values):
            cache = backend.write_kv(cache, layer, k, v, slots[:length])
        return sequence, cache


@dataclass
class Session:
    """A loaded model: what every prompt, document and arm has in common."""

    model: str  # as the user named it: a directory, org/name, or demo
    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    backend: Backend
    device: str
    dtype: str
    kv_dtype: str
    kernels: str
    fault: str | None  # why auto took array operations instead of kernels

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        kernels: str = "auto",
        checked: EpsConfig | None = None,
    ) -> Self:
        """A model as `resolve_model` reads it, None for the demo model, on a backend. Everything that can be refused is
        refused here; the weights are read when the decoder is first asked for. dtype auto: float32 on a CPU, else as
        stored; kv_dtype auto: as dtype. Kernels that a GPU has and nobody named are first checked with `checked` (None:
        taken as is)."""
        path = DEMO_MODEL if model is None else resolve_model(model)
        if model is None and not (path / "config.json").is_file():
            raise ConfigError(f"the demo model is not in this installation ({path}): pass --model DIR")
        spec, tokenizer, module = read_spec(path), load_tokenizer(path), load_backend(backend)
        device = choose_device(module, device)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else spec.stored_dtype
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        fault = None
        if checked is None:
            kernels = resolve_kernels(kernels, module.usable_kernels(device), device)
        else:
            one = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 1, kv_dtype)
            kernels, fault = choose_kernels(module, device, kernels, one, spec.num_heads, checked)
        name = "demo" if model is None else str(model)
        return cls(name, path, spec, tokenizer, module, device, dtype, kv_dtype, kernels, fault)

    @cached_property
    def decoder(self) -> Decoder:
        return load_decoder(self.backend, self.path, self.spec, self.dtype, self.device)

    def load(self) -> None:
        """Reads the weights now, while nothing is written yet."""
        _ = self.decoder

    @property
    def backend_name(self) -> str:
        return backend_name(self.backend)

    @property
    def time_every(self) -> int:
        """Steps of which one is timed layer by layer: waiting for the device between layers costs nothing on a CPU."""
        return 1 if self.device == "cpu" else 4

    def encode(self, text: str, special: bool = True) -> list[int]:
        tokens = encode(self.tokenizer, self.path, text, special)
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer gives token {max(tokens)}, its vocabulary ends at "
                f"{self.spec.vocab_size - 1}: tokenizer.json and config.json are of different models"
            )
        return tokens

    def encode_chat(self, text: str) -> list[int]:
        """Tokens of the user's message `text` in the model's chat template, which brings its own special tokens."""
        return self.encode(render(self.path, text), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def cache_spec(self, store: Store, num_tokens: int, batch: int = 1) -> CacheSpec:
        """Of `batch` sequences of up to `num_tokens` tokens. A cache larger than the machine is refused here; on a GPU
        its allocator is asked instead."""
        units = batch * -(-num_tokens // store.unit_tokens)
        spec = CacheSpec(
            self.spec.num_layers,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            units,
            self.kv_dtype,
            max_open_groups=batch,
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device == "cpu" and _cache_bytes(spec, store) > memory:
            raise _too_large(spec, store, f"this machine's {memory / 2**20:,.0f} MiB")
        return spec

    def cache(self, store: Store, num_tokens: int, batch: int = 1) -> tuple[Any, PagePool]:
        """(cache, the pool of its units), empty: see `cache_spec`."""
        spec = self.cache_spec(store, num_tokens, batch)
        try:
            cache = self.backend.new_cache(spec, store, self.device, self.kernels)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            raise _too_large(spec, store, self.device) from error
        return cache, PagePool(spec.num_units, store.unit_tokens)

    def prefix(self, tokens: Sequence[int], prefill_chunk: int = 2048) -> Prefix:
        """`tokens` prefilled, densely."""
        if not tokens:
            return Prefix([], [])
        cache, pool = self.cache(Store(), len(tokens))
        sequence, cache = prefill(self.decoder, cache, pool, tokens, prefill_chunk)
        (table,) = pool.table([sequence])
        layers = range(self.spec.num_layers)
        return Prefix(list(tokens), [self.backend.read_kv(cache, layer, table, len(tokens)) for layer in layers])


def _cache_bytes(spec: CacheSpec, store: Store) -> int:
    return spec.num_layers * spec.num_kv_heads * spec.num_units * store.unit_tokens * spec.kv_token_bytes


def _too_large(spec: CacheSpec, store: Store, where: str) -> ConfigError:
    return ConfigError(
        f"a cache of {_cache_bytes(spec, store) / 2**20:,.0f} MiB does not fit {where}: lower pool-tokens or shorten "
        "the context"
    )


def choose_device(backend: Backend, asked: str) -> str:
    """The asked device, or the backend's GPU where it has one; an absent device is an error, never a fallback."""
    present = backend.devices()
    if asked == "auto":
        return next((device for device in present if device != "cpu"), "cpu")
    if asked not in present:
        raise ConfigError(
            f"device {asked} is not there for backend {backend_name(backend)}, which has {', '.join(present)}: "
            "choose one of them or --device auto"
        )
    return asked


def choose_kernels(
    backend: Backend, device: str, asked: str, spec: CacheSpec, num_heads: int, config: EpsConfig
) -> tuple[str, str | None]:
    """(kernels, why array operations were taken instead or None). A GPU's kernels that nobody asked for by name must
    agree with array operations first; a CPU's are tested on CPUs."""
    kernels = resolve_kernels(asked, backend.usable_kernels(device), device)
    if asked != "auto" or kernels == "arrays" or device == "cpu":
        return kernels, None
    fault = disagreement(backend, device, kernels, spec, num_heads, config)
    if fault is None:
        return kernels, None
    return "arrays", f"kernels {kernels} failed their check on this device ({fault})"
