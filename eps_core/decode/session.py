"""A model, a backend, a device and kernels, opened once."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.config.store import CacheSpec, Store
from eps_core.cpu.kernels import why_not
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import prefill
from eps_core.decode.kernel_check import disagreement
from eps_core.decode.model import DEMO_MODEL, ModelSpec, load_tokenizer, read_spec
from eps_core.errors import ConfigError, require
from eps_core.files import inputs
from eps_core.gate.protocol import Array, Backend
from eps_core.load import backend_name, load_backend, resolve_kernels
from eps_core.paging.pool import PagePool
from eps_core.paging.pool import Sequence as PagedSequence
from eps_core.telemetry import terminal

_CHARACTERS_PER_TOKEN = 16  # of a text's start that is encoded at first
_CUT_TOKENS = 64  # more than a cut within a word can change


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

    model: str  # as the user named it: a directory, or demo
    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer
    backend: Backend
    device: str
    dtype: str
    kv_dtype: str
    kernels: str
    named: bool = False  # whether the user named the kernels
    fault: str | None = None  # why auto took array operations instead of kernels
    checked: set[Store] = field(default_factory=set, repr=False)  # whose kernels were compiled and compared

    @classmethod
    def open(
        cls,
        model: Path | None = None,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        kernels: str = "auto",
    ) -> Self:
        """A model directory, None for the demo model, on a backend. Everything that can be refused is refused here; the
        weights are read when the decoder is first asked for. dtype auto: float32 on a CPU, else as stored; kv_dtype
        auto: as dtype."""
        path = model or DEMO_MODEL
        if model is None and not (path / "config.json").is_file():
            raise ConfigError(f"the demo model is not in this installation ({path}): pass --model DIR")
        spec, tokenizer, module = read_spec(path), load_tokenizer(path), load_backend(backend)
        device = choose_device(module, device)
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else spec.stored_dtype
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        named, kernels = kernels != "auto", resolve_kernels(kernels, module.usable_kernels(device), device)
        name = "demo" if model is None else str(model)
        session = cls(name, path, spec, tokenizer, module, device, dtype, kv_dtype, kernels, named)
        reason = why_not()
        if device == "cpu" and not named and session.backend_name != "numpy" and reason is not None:
            session.fall_back(f"CPU kernels cannot be used ({reason})")
        return session

    @cached_property
    def decoder(self) -> Decoder:
        return load_decoder(self.backend, self.path, self.spec, self.dtype, self.device)

    def load(self) -> None:
        """Reads the weights now, while nothing is written yet."""
        _ = self.decoder

    def fall_back(self, fault: str) -> None:
        """Array operations from now on, with one line that says why. Raises ConfigError where kernels were named."""
        if self.named:
            raise ConfigError(f"{fault}: choose --kernels arrays")
        self.kernels, self.fault = "arrays", fault
        print(f"{fault}: array operations instead", file=sys.stderr)

    def check_kernels(self, store: Store) -> None:
        """Compiles the kernels that a cache of `store` takes and compares them with array operations, once: before
        anything is timed or trusted."""
        emulated = self.device == "cpu" and self.kernels != "numba"  # a GPU's kernels in a test
        if self.kernels == "arrays" or emulated or store in self.checked:
            return
        self.checked.add(store)
        spec = CacheSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, 1, self.kv_dtype)
        with terminal.Progress("kernels: compiling and checking", "parts") as progress:
            fault = disagreement(
                self.backend, self.device, self.kernels, spec, self.spec.num_heads, EpsConfig(store, Read()), progress
            )
        if fault is not None:
            self.fall_back(f"kernels {self.kernels} failed their check on this device ({fault})")

    @property
    def backend_name(self) -> str:
        return backend_name(self.backend)

    @property
    def time_every(self) -> int:
        """Steps of which one is timed layer by layer: waiting for the device between layers costs nothing on a CPU."""
        return 1 if self.device == "cpu" else 4

    def prompt_text(self, prompt: str | Path) -> str:
        """A prompt's text, of a path what the file holds: no more of it than the model's context could."""
        if isinstance(prompt, Path):
            context = self.spec.max_context
            limit = f"more than the {context:,} tokens of the model's context could hold"
            prompt = inputs.read_text(prompt, "prompt file", "give a text file", inputs.text_bytes(context), limit)
        require(bool(prompt), "the prompt is empty: give at least one character")
        return prompt

    def encode(self, text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        """The tokens of a text. With `most_tokens` no more of a long text is encoded than shows that it has more than
        these, for a tokenizer takes seconds and hundreds of MB for each MB: more than `most_tokens` tokens are of its
        start, then, and the last ones not as they are within the whole."""
        if most_tokens is None:
            return self._encode(text, special)
        wanted = most_tokens + _CUT_TOKENS
        length = wanted * _CHARACTERS_PER_TOKEN
        while length < len(text):
            tokens = self._encode(text[:length], special)
            if len(tokens) >= wanted:
                return tokens
            length *= 4
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            tokens = list(self.tokenizer.encode(text.encode().decode(), add_special_tokens=special).ids)
        except UnicodeError as error:
            raise ConfigError(f"the prompt is not valid Unicode ({error}): pass UTF-8 text") from error
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer gives token {max(tokens)}, its vocabulary ends at "
                f"{self.spec.vocab_size - 1}: tokenizer.json and config.json are of different models"
            )
        return tokens

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
            self.check_kernels(store)
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
