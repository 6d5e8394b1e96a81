"""A model, a backend, a device and kernels, opened once."""

import os
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig, config_of
from eps_core.config.formats import EXACT, WEIGHT_BITS, FormatName, KvFormats, formats_of
from eps_core.config.speculative import SpeculativeConfig
from eps_core.cpu import host
from eps_core.cpu.usable import why_not
from eps_core.decode.balance import Measure, balance
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.decode.generate import generate, prefill
from eps_core.decode.heads import check_modes
from eps_core.decode.kernel_check import disagreement, rows_disagreement
from eps_core.decode.observe import Watcher
from eps_core.decode.prefix import Prefix
from eps_core.decode.prompts import PREFILL_CHUNK, encode_prompts
from eps_core.decode.sampling import Sampling
from eps_core.decode.stored import StoredPrompts, check_folder, stored_prompts, weights_digest
from eps_core.decode.verified import verified
from eps_core.errors import ConfigError, require, shown
from eps_core.io import records
from eps_core.kv_cache.pool import PagePool
from eps_core.load import backend_name, choose_device, load_backend, resolve_kernels
from eps_core.metrics.terminal import Progress
from eps_core.models.chat import render
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.models.hub import resolve_model
from eps_core.models.spec import ModelSpec
from eps_core.models.tokenizer import encode, load_tokenizer
from eps_core.models.weights import check_weights

UNVERIFIED = SpeculativeConfig()


@dataclass
class Session:
    """A loaded model: what every prompt, document and variant has in common. `decode.llm` continues prompts with it."""

    model: str  # as the user named it: a directory, org/name, or demo
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
    checked: set[tuple[CacheConfig, bool]] = field(default_factory=set, repr=False)  # see `check_kernels`
    checked_decoders: list[Decoder] = field(default_factory=list, repr=False)
    config: EpsConfig = EpsConfig()  # noqa: RUF009  of `steps`; documents and variants bring their own
    verify: SpeculativeConfig = UNVERIFIED  # the same
    kv_bits: KvFormats = EXACT  # of K and of V in every cache: see `CacheSpec`
    cache_dir: Path | None = None  # where prompts are kept between runs: see `decode.stored`
    weights: str = "full"  # of decode steps: see `config.formats.WEIGHT_BITS`
    exponents: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)  # see `balanced`
    digest: str | None = field(default=None, init=False, repr=False, compare=False)  # of the weights that were read

    @classmethod
    def open(
        cls,
        model: Path | str | None = None,
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        kv_dtype: str = "auto",
        kernels: str = "auto",
        config: EpsConfig | None = None,
        verify: SpeculativeConfig | str = UNVERIFIED,
        kv_bits: FormatName | KvFormats = EXACT,
        cache_dir: Path | str | None = None,
        weights: str = "full",
        **settings: Any,
    ) -> Self:
        """A model as `resolve_model` reads it, None for the demo model, on a backend. EPS as `config` says, or flat
        `settings` of `EpsConfig.of` (method="rq", budget=0.05, ..); off without them. `verify`, a SpeculativeConfig or
        its mode "tokens", makes every text the dense one: sparse steps then only draft. Everything that can be refused
        is refused here; the weights are read when the decoder is first asked for. dtype auto: as stored, but float32 on
        a CPU, unless it is bfloat16 in Torch, the CPU decodes it faster and nothing is verified; kv_dtype auto: as
        dtype; kv_bits of K and of V, 16: as they are (`config.formats`). `cache_dir` keeps prompts between runs;
        `weights` of decode steps, of `WEIGHT_BITS`."""
        for name, value in (
            ("backend", backend), ("device", device), ("dtype", dtype), ("kv_dtype", kv_dtype), ("kernels", kernels),
            ("weights", weights),
        ):  # fmt: skip
            records.check(name, value, str)
        for name, path in (("model", model), ("cache_dir", cache_dir)):
            given = path is None or isinstance(path, str | Path)
            require(given, f"{name} {shown(path)} is not a path: give a text or a Path")
        config = config_of(config, settings)
        verify = SpeculativeConfig(verify) if isinstance(verify, str) else verify
        verify.check(config)
        require(weights in WEIGHT_BITS, f"weights {weights!r} are unknown: choose one of {', '.join(WEIGHT_BITS)}")
        require(cache_dir != "", "--cache-dir '' has no characters: give a folder, or leave it out")
        path = DEMO_MODEL if model is None else resolve_model(model)
        if model is None and not (path / "config.json").is_file():
            raise ConfigError(f"the demo model is not in this installation ({path}): pass --model DIR")
        spec, tokenizer = read_spec(path), load_tokenizer(path)
        check_modes(config, spec)
        check_weights(path, spec)
        module = load_backend(backend)
        device = choose_device(module, device)
        if dtype == "auto":
            short = spec.stored_dtype == "bfloat16" and backend_name(module) == "cuda"
            short = short and (host.computes_bfloat16() or host.widens_bfloat16())
            # in 16 bits a pass over several tokens rounds otherwise than steps do, and near ties end otherwise
            short = short and not verify.enabled
            dtype = spec.stored_dtype if device != "cpu" or short else "float32"
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        named, kernels = kernels != "auto", resolve_kernels(kernels, module.usable_kernels(device), device)
        name = "demo" if model is None else str(model)
        session = cls(
            name, path, spec, tokenizer, module, device, dtype, kv_dtype, kernels, named,
            config=config.for_device(device), verify=verify, kv_bits=formats_of(kv_bits), weights=weights,
            cache_dir=None if cache_dir is None else Path(cache_dir),
        )  # fmt: skip
        if session.cache_dir is not None:
            check_folder(session.cache_dir, path)
        session.one_unit()  # refuses what no cache can be
        reason = why_not()
        if device == "cpu" and not named and session.backend_name != "numpy" and reason is not None:
            session.fall_back(f"CPU kernels cannot be used ({reason})")
        return session

    @property
    def balanced(self) -> bool:
        """Return whether keys are balanced for codes (`decode.balance`). They are not in float16, whose range is small,
        and where K lies in fewer bits: there an outlying dimension costs the others precision."""
        exact = self.kv_bits == EXACT and "float16" not in (self.dtype, self.kv_dtype)
        return self.config.cache_config.mean_tokens > 0 and exact

    @cached_property
    def decoder(self) -> Decoder:
        digest = None if self.cache_dir is None else weights_digest(self.path)
        full = load_decoder(self.backend, self.path, self.spec, self.dtype, self.device)
        if digest is not None and weights_digest(self.path) != digest:
            line = f"weights in {self.path} changed while they were read: no prompts are kept; load the model again"
            print(line, file=sys.stderr)
            digest = None
        self.digest = digest
        if self.balanced:
            self.exponents = self._balance(full)
        return self._checked(full.quantised(WEIGHT_BITS[self.weights]))

    def _balance(self, decoder: Decoder) -> np.ndarray:
        """See `decode.balance.balance`."""
        to_numpy = self.backend.to_numpy

        def run(tokens: Sequence[int], measure: Measure) -> None:
            cache, pool = replace(self, kernels="arrays").cache(CacheConfig(), len(tokens))
            decoder.watch = lambda _, layer, q, k, length: measure(layer, to_numpy(q), to_numpy(k))
            try:
                prefill(decoder, cache, pool, tokens, len(tokens))
            finally:
                decoder.watch = None

        return balance(self.spec, self.config.cache_config.mean_tokens, run, decoder.model.multiply_rows)

    def drafter(self, verify: SpeculativeConfig) -> Decoder:
        """Return the decoder of the drafts of verified decoding: the session's, or one over the same caches with
        quantised weights, made once."""
        return self._checked(self.decoder.quantised(WEIGHT_BITS[verify.weights]))

    def load(self, verify: SpeculativeConfig = UNVERIFIED) -> None:
        """Reads the weights now, and makes what `verify` drafts with, while nothing is decoded or written yet. Raises
        ConfigError where this model or device cannot draft so."""
        _ = self.decoder
        if verify.enabled:
            self.drafter(verify)

    def fall_back(self, fault: str) -> None:
        """Array operations from now on, with one line that says why. Raises ConfigError where kernels were named."""
        if self.named:
            raise ConfigError(f"{fault}: choose --kernels arrays")
        self.kernels, self.fault = "arrays", fault
        print(f"{fault}: array operations instead", file=sys.stderr)

    def check_kernels(self, cache_config: CacheConfig, verified: bool = False) -> None:
        """Compiles the kernels that a cache of `cache_config` takes, in verified decoding too where it is `verified`,
        and compares them with array operations, once: before anything is timed or trusted."""
        emulated = self.device == "cpu" and self.kernels != "numba"  # a GPU's kernels in a test
        if self.kernels == "arrays" or emulated or {(cache_config, verified), (cache_config, True)} & self.checked:
            return
        spec = self.one_unit()
        with Progress("kernels: compiling and checking", "parts") as progress:
            fault = disagreement(
                self.backend,
                self.device,
                self.kernels,
                spec,
                self.spec.num_heads,
                EpsConfig.reading(cache_config, self.device),
                progress,
                verified,
            )
        self._believe(fault)
        if fault is None:  # a session that shares `checked` has not fallen back with this one
            self.checked.add((cache_config, verified))

    def _checked(self, decoder: Decoder) -> Decoder:
        """The decoder, once the kernels that few rows of it take are compiled and compared, too."""
        if decoder not in self.checked_decoders:
            with Progress("kernels: compiling and checking", "parts") as progress:
                progress(0, 1, "a model's rows")
                self._believe(rows_disagreement(self.backend, decoder.model, self.kernels))
            self.checked_decoders.append(decoder)
        return decoder

    def _believe(self, fault: str | None) -> None:
        if fault is not None:
            self.fall_back(f"kernels {self.kernels} failed their check on this device ({fault})")

    @property
    def backend_name(self) -> str:
        return backend_name(self.backend)

    @property
    def time_every(self) -> int:
        """Steps of which one is timed layer by layer: waiting for the device between layers costs nothing on a CPU."""
        return 1 if self.device == "cpu" else 4

    def encode(self, text: str, special: bool = True, most_tokens: int | None = None) -> list[int]:
        """The tokens of a text, at most a few more than `most_tokens`: see `tokenizer.encode`."""
        tokens = encode(self.tokenizer, self.path, text, special, most_tokens)
        if max(tokens, default=0) >= self.spec.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer gives token {max(tokens)}, its vocabulary ends at "
                f"{self.spec.vocab_size - 1}: tokenizer.json and config.json are of different models"
            )
        return tokens

    def encode_chat(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Tokens of the user's message `text` in the model's chat template, which brings its own special tokens."""
        return self.encode(render(self.path, text), special=False, most_tokens=most_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode_prompts(
        self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int, chat: bool = False
    ) -> list[list[int]]:
        """Tokens of prompts, texts or tokens, that the model can continue by `max_new_tokens`; others are refused, by
        their number where there are several. With `chat` each is a user's message, put into the model's chat
        template."""

        def encode(prompt: str | Sequence[int], most: int) -> list[int]:
            if isinstance(prompt, str):
                return (self.encode_chat if chat else self.encode)(prompt, most_tokens=most)
            require(not chat, "a chat template takes text, and this prompt is of tokens: give text, or leave chat out")
            wrong = next((token for token in prompt if not 0 <= token < self.spec.vocab_size), None)
            last = self.spec.vocab_size - 1
            require(wrong is None, f"token {wrong} is not of the model, which has 0 to {last}: use its own tokenizer")
            return list(prompt)

        return encode_prompts(prompts, max_new_tokens, encode, self.spec.max_context, self.spec.context_note)

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Collection[int] = (),
        ends: Callable[[int, int], bool] = lambda prompt, token: False,
    ) -> Generator[Any, None, Any]:
        """Decode prompts of tokens in one batch, in a cache of their own, as `config` and `verify` say. Returns the
        generator of `decode.generate`, or of `decode.verified`; everything that can be refused is refused before."""
        self.verify.check(self.config, sampling.temperature, sampling.by)
        self.load(self.verify)
        self.check_kernels(self.config.cache_config, self.verify.enabled)
        cache, pool = self.cache(self.config.cache_config, [len(prompt) + max_new_tokens for prompt in prompts])
        stored = self.stored(self.config.cache_config)
        if stored is not None:
            cache = stored.load(cache, pool, prompts)
        same = self.decoder, cache, pool, prompts, max_new_tokens, sampling, self.config.selection_config
        if self.verify.enabled:
            drafter = self.drafter(self.verify)
            steps: Generator[Any, None, Any] = verified(*same, self.verify, stop_tokens, drafter=drafter, ends=ends)
        else:
            steps = generate(*same, stop_tokens, ends=ends)
        return steps if stored is None else stored.saving(steps, pool, prompts)

    def stored(self, cache_config: CacheConfig) -> StoredPrompts | None:
        """The files of prompts in caches of `cache_config`, where they are kept."""
        if self.cache_dir is None:
            return None
        self.load()
        if self.digest is None:
            return None
        return stored_prompts(
            self.cache_dir, self.backend, self.digest, self.spec, cache_config, library=self.backend_name,
            device=self.device, dtype=self.dtype, kv_dtype=self.kv_dtype, kv_bits=self.kv_bits, kernels=self.kernels,
            **({} if self.exponents is None else {"balance": blake2b(self.exponents.tobytes()).hexdigest()}),
        )  # fmt: skip

    def one_unit(self) -> CacheSpec:
        """Return the spec of a cache of a single unit."""
        k_bits, v_bits = self.kv_bits
        shape = self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim
        return CacheSpec(*shape, 1, self.kv_dtype, k_bits=k_bits, v_bits=v_bits, windows=self.spec.windows)

    def cache_spec(
        self, cache_config: CacheConfig, num_tokens: int | Sequence[int], pool_tokens: int | None = None
    ) -> CacheSpec:
        """Return the spec of a cache for a sequence of up to `num_tokens` tokens, or of several, each with its own
        number; of `pool_tokens` in all where these are given, which must suffice. A cache larger than the machine is
        refused here; on a GPU its allocator is asked instead."""
        size = cache_config.unit_tokens
        lengths = [num_tokens] if isinstance(num_tokens, int) else num_tokens
        needed = sum(-(-length // size) for length in lengths)
        units = needed if pool_tokens is None else pool_tokens // size
        require(
            units >= needed,
            f"{'a prompt' if len(lengths) == 1 else f'{len(lengths)} sequences'} of {sum(lengths)} tokens, new ones "
            f"included, need{'s' if len(lengths) == 1 else ''} {needed} pool groups of {size} tokens, and pool-tokens "
            f"{pool_tokens} holds {units}: raise it to {needed * size} or shorten the prompt",
        )
        spec = replace(self.one_unit(), num_units=units, max_open_groups=len(lengths))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device == "cpu" and _cache_bytes(spec, cache_config) > memory:
            raise _too_large(spec, cache_config, f"this machine's {memory / 2**20:,.0f} MiB")
        return spec

    def cache(
        self, cache_config: CacheConfig, num_tokens: int | Sequence[int], pool_tokens: int | None = None
    ) -> tuple[Any, PagePool]:
        """(cache, the pool of its units), empty: see `cache_spec`."""
        spec = self.cache_spec(cache_config, num_tokens, pool_tokens)
        try:
            self.check_kernels(cache_config)
            cache = self.backend.new_cache(spec, cache_config, self.device, self.kernels)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
                raise
            raise _too_large(spec, cache_config, self.device) from error
        return cache, PagePool(spec.num_units, cache_config.unit_tokens)

    def prefix(
        self,
        tokens: Sequence[int],
        prefill_chunk: int = PREFILL_CHUNK,
        observed: Watcher | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> Prefix:
        """`tokens` prefilled, densely and in a cache without codes, so that any that they go to rounds them once;
        `observed` is told of their attention. `report` as `generate.prefill` has it."""
        if not tokens:
            return Prefix([], [])
        cache, pool = replace(self, kv_bits=EXACT).cache(CacheConfig(), len(tokens))
        self.decoder.watch = None if observed is None else observed.prompt
        try:
            sequence, cache = prefill(self.decoder, cache, pool, tokens, prefill_chunk, report)
        finally:
            self.decoder.watch = None
        (table,) = pool.table([sequence])
        layers = range(self.spec.num_layers)
        return Prefix(list(tokens), [self.backend.read_kv(cache, layer, table, len(tokens)) for layer in layers])


def _cache_bytes(spec: CacheSpec, cache_config: CacheConfig) -> int:
    return spec.num_layers * spec.num_kv_heads * spec.num_units * cache_config.unit_tokens * spec.kv_token_bytes


def _too_large(spec: CacheSpec, cache_config: CacheConfig, plan: str) -> ConfigError:
    return ConfigError(
        f"a cache of {_cache_bytes(spec, cache_config) / 2**20:,.0f} MiB does not fit {plan}: lower pool-tokens or "
        "shorten the context"
    )
