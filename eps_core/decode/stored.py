"""Prompts that are kept between runs: what a cache holds of them, one safetensors file a sequence (`--cache-dir`).

A file holds whole pool units, as they are held: K and V (16 bits, or codes and scales), summaries, the tokens. It is
named by a chain of hashes over the units' tokens, as the pool names its own units, that begins with the settings, so
that the longest stored prefix is found by names alone. What the settings do not name is checked: the hash of the
model's weights, the format, a hash of the contents. Loaded units are published in the pool, where prefill finds them
like those of any earlier prompt; the last token of a prompt is never among them (as LMCache's prefix chunks, arXiv
2510.09665, with summaries beside K and V). Backend, device and compute dtype belong to the settings: the layouts are
equal, but another library's K differs in its last bits, and a second run must say what the first one said.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheConfig
from eps_core.errors import ConfigError, one_line, require
from eps_core.io import caches, outputs, tensors
from eps_core.kv_cache.pool import PagePool, unit_hash
from eps_core.models.folder import weight_files
from eps_core.models.spec import ModelSpec
from eps_core.summaries.keys import CENTRE_TOKENS

FORMAT_VERSION = 5  # raised when a summary says something else, too: 5 since keys are rotated twice
METADATA_KEY = "eps_prompt"
_DIGESTS = "weights.json"  # of the cache folder: content hashes of weights that were hashed before


@dataclass
class StoredCounts:
    """Counts of what one run took from files and put into them, of all its prompts."""

    tokens_loaded: int = 0
    bytes_loaded: int = 0
    load_ms: float = 0.0
    tokens_stored: int = 0
    bytes_stored: int = 0
    store_ms: float = 0.0


@dataclass
class StoredPrompts:
    """The files of one model under one set of settings (`identity`, all but `weights` of which name the files)."""

    folder: Path
    backend: Backend
    identity: dict[str, Any]
    counts: StoredCounts = field(default_factory=StoredCounts)
    _sound: set[str] = field(default_factory=set, repr=False)  # names of files that were read or written whole

    def load(self, cache: Any, pool: PagePool, prompts: Sequence[Sequence[int]]) -> Any:
        """The cache, with the longest stored prefix of each prompt in it, published in the pool. A file that is not
        what it must be is refused in one line on stderr, and a shorter one is tried."""
        check(cache.cache_config, len(prompts))
        started = time.perf_counter()
        for prompt in prompts:
            names = self._names(prompt, pool.unit_tokens)
            sequence, num_shared = pool.open(prompt[:-1])
            pool.free(sequence)
            for num_units in range(len(names), num_shared // pool.unit_tokens, -1):
                path = self._path(names[num_units - 1])
                if not os.path.exists(path):  # False, too, in a folder that cannot be read
                    continue
                tokens = [int(token) for token in prompt[: num_units * pool.unit_tokens]]
                try:
                    arrays, size = self._read(path, cache, tokens, num_units)
                except (ValueError, OSError) as error:
                    reason = getattr(error, "strerror", None) or one_line(error)
                    print(f"stored prompt {path} is not used ({reason}): it is made again", file=sys.stderr)
                    continue
                cache = self._into(cache, pool, tokens, arrays)
                self._sound.add(path.name)
                self.counts.tokens_loaded += len(tokens)
                self.counts.bytes_loaded += size
                break
        self.counts.load_ms += 1000 * (time.perf_counter() - started)
        return cache

    def save(self, cache: Any, pool: PagePool, prompts: Sequence[Sequence[int]]) -> None:
        """Writes what the pool still holds of each prompt, where no sound file has it. What cannot be written is told
        in one line on stderr, and the run goes on."""
        started = time.perf_counter()
        for prompt in prompts:
            sequence, num_tokens = pool.open(prompt[:-1])
            units = list(sequence.table)
            pool.free(sequence)
            if not units or (cache.cache_config.bound_bits and num_tokens < CENTRE_TOKENS):
                continue
            path = self._path(self._names(prompt, pool.unit_tokens)[len(units) - 1])
            if path.name in self._sound:
                continue
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                size = self._write(path, cache, [int(token) for token in prompt[:num_tokens]], units)
            except (ConfigError, OSError) as error:
                print(f"{one_line(error)} (the prompt is not stored)", file=sys.stderr)
                continue
            self._sound.add(path.name)
            self.counts.tokens_stored += num_tokens
            self.counts.bytes_stored += size
        self.counts.store_ms += 1000 * (time.perf_counter() - started)

    def saving(
        self, steps: Generator[Any, None, Any], pool: PagePool, prompts: Sequence[Sequence[int]]
    ) -> Generator[Any, None, Any]:
        """The same steps; when they have come to their end, the prompts are saved."""
        cache = yield from steps
        self.save(cache, pool, prompts)
        return cache

    def _names(self, prompt: Sequence[int], unit_tokens: int) -> list[str]:
        """Return the names of the files of each number of whole units, from one on, that prefill finds of a prompt."""
        settings = {name: value for name, value in self.identity.items() if name != "weights"}
        parent = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).digest()
        names = []
        for start in range(0, len(prompt) - 1 - unit_tokens, unit_tokens):
            parent = unit_hash(parent, [int(token) for token in prompt[start : start + unit_tokens]])
            names.append(parent.hex())
        return names

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _read(self, path: Path, cache: Any, tokens: list[int], num_units: int) -> tuple[dict[str, np.ndarray], int]:
        """(arrays for `import_units`, bytes of the file). Raises ValueError, which says why, or OSError."""
        metadata, arrays, data = tensors.read(path)
        try:
            given = json.loads(metadata[METADATA_KEY])
            version, identity, content = given["format_version"], given["identity"], given["blake2b"]
            differing = [name for name in self.identity if identity.get(name) != self.identity[name]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError("foreign: a safetensors file, but no stored prompt of EPS") from None
        if version != FORMAT_VERSION:
            raise ValueError(f"stale: it has format {version}, this is {FORMAT_VERSION}")
        if content != _digest(data):
            raise ValueError("damaged: its contents are not those of its hash")
        if differing:
            raise ValueError(f"stale: it is of other {', '.join(differing)}")
        empty = self.backend.export_units(cache, [])
        if {name: (list(array.shape), array.dtype.name) for name, array in arrays.items()} != _layout(
            empty, num_units, len(tokens)
        ):
            raise ValueError("foreign: it holds other arrays than this cache")
        if arrays.pop("tokens").tolist() != tokens:
            raise ValueError("foreign: it is of another prompt")
        return arrays, path.stat().st_size

    def _into(self, cache: Any, pool: PagePool, tokens: list[int], arrays: dict[str, np.ndarray]) -> Any:
        sequence, _ = pool.open()
        try:
            pool.append(sequence, tokens)
            cache = self.backend.import_units(cache, list(sequence.table), arrays)
            pool.publish(sequence)
        finally:
            pool.free(sequence)  # published units stay until prefill opens them
        return cache

    def _write(self, path: Path, cache: Any, tokens: list[int], units: list[int]) -> int:
        """Returns the file's bytes."""
        arrays = {"tokens": np.array(tokens, np.int64), **self.backend.export_units(cache, units)}
        rows = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values()]
        given = {"format_version": FORMAT_VERSION, "identity": self.identity, "blake2b": _digest(*rows)}
        start, size = tensors.header({METADATA_KEY: json.dumps(given)}, _layout(arrays, len(units), len(tokens)))
        with outputs.replacing(path, "wb") as file:
            file.write(start)
            for row in rows:
                file.write(row.data)
        return len(start) + size


def weights_digest(path: Path) -> str:
    """blake2b of all bytes of a model's weights. It is kept in the cache folder under each file's place, size and time
    of change, so that a model is hashed once: a file changed within its own clock tick, of the same size, would not
    be seen."""
    files = [(path / name).resolve() for name in weight_files(path)]
    found = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    key, folder = hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest(), caches.folder()
    known: dict[str, str] = {}
    if folder is not None:
        try:
            read = json.loads((folder / _DIGESTS).read_text())
            known = {str(name): str(value) for name, value in read.items()}
        except (OSError, ValueError, AttributeError):
            known = {}  # remade
    if key not in known:
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            with open(file, "rb") as opened:
                hashlib.file_digest(opened, lambda: digest)
        known[key] = digest.hexdigest()
        if folder is not None:
            caches.keep(folder / _DIGESTS, json.dumps(known).encode())
    return known[key]


def stored_prompts(
    folder: Path, backend: Backend, weights: str, spec: ModelSpec, cache_config: CacheConfig, **settings: Any
) -> StoredPrompts:
    """The files in `folder` of the model whose weights have the digest `weights`, for caches of `cache_config`;
    `settings`: what else its K depends on."""
    identity = {
        "weights": weights,
        "model": asdict(spec),
        "cache_config": asdict(cache_config),
        **settings,
    }
    return StoredPrompts(folder, backend, json.loads(json.dumps(identity)))


def check_folder(folder: Path, model: Path) -> None:
    """Raises ConfigError for what cannot be a folder of stored prompts."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--cache-dir {folder} is no directory: give another path")
    if folder.resolve() == model.resolve():
        raise ConfigError(f"--cache-dir {folder} is the model's own directory: give another path")


def check(cache_config: CacheConfig, num_prompts: int) -> None:
    """Raises ConfigError where prompts of such caches cannot be kept."""
    require(
        num_prompts == 1 or not cache_config.bound_bits,
        "--cache-dir keeps codes about a centroid of one prompt alone, since those of a batch share the centroid of "
        "its first keys: give one prompt, or leave out --eps-bound-bits",
    )


def _layout(arrays: dict[str, np.ndarray], num_units: int, num_tokens: int) -> dict[str, tuple[list[int], str]]:
    """Name -> (shape, dtype) of all that a file holds, from the arrays of any number of units."""
    layout: dict[str, tuple[list[int], str]] = {"tokens": ([num_tokens], "int64")}
    for name, array in arrays.items():
        if name != "tokens":
            shape = list(array.shape) if name.startswith("heads.") else [num_units, *array.shape[1:]]
            layout[name] = shape, array.dtype.name
    return layout


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
