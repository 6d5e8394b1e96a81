"""Captures: the queries, keys and values of a real decode in one safetensors file, so that methods can be compared on a
large model without running it again (`evaluation.replay`).

A text is prefilled densely, then decoded token by token along itself. Every chosen layer i leaves `layers.i.q`
[steps, Hq, D] float32 (unscaled, after norm and RoPE, exactly as attention used it), and `layers.i.k`, `layers.i.v`
[context + steps, Hkv, D] in the cache's dtype; `lengths` [steps] int64 are the tokens that each step attended. What ran
is JSON under `METADATA_KEY` of the file's metadata. Letters as in `attention.protocol`.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy, which safetensors then returns
import numpy as np
from safetensors import SafetensorError, safe_open

from eps_core.attention.protocol import Array, Backend
from eps_core.config.cache import DTYPE_BYTES
from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import prefill
from eps_core.decode.heads import model_fingerprint
from eps_core.decode.session import Session
from eps_core.errors import ConfigError, one_line, shown
from eps_core.evaluation.runner import Document, decode, usual_context
from eps_core.io import inputs, outputs, tensors
from eps_core.io.records import Between, read_record
from eps_core.metrics import provenance, terminal
from eps_core.tasks.corpus import corpus_or_text

Size = Annotated[int, Between(1, 2**40)]
FORMAT_VERSION = 1
METADATA_KEY = "eps_capture"


@dataclass(frozen=True)
class CaptureInfo:
    """Facts about the run of a capture. Written as JSON, read back strictly."""

    format_version: int
    model: str  # name of its directory, or demo
    num_layers: Size  # of the model
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    scale: float  # of the logits, a = scale * q
    layers: tuple[int, ...]  # that the file holds
    context_tokens: Size
    num_steps: Size
    kv_dtype: str
    config: dict[str, Any]  # EpsConfig of the decode; method off: dense
    text_sha256: str
    backend: str
    device: str
    dtype: str  # of weights, and of activations but in steps by compiled calls
    fingerprint: str  # of the model, as in its head policy
    versions: dict[str, str | None] = field(default_factory=dict)
    git_commit: str | None = None


@dataclass(frozen=True)
class Capture:
    """An opened capture. Tensors are read from the file layer by layer, when they are asked for."""

    path: Path
    info: CaptureInfo
    lengths: np.ndarray  # [steps] int64

    def layer(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(q [steps, Hq, D] float32, k, v [context + steps, Hkv, D] in the cache's dtype) of a captured layer."""
        if layer not in self.info.layers:
            held = ", ".join(map(str, self.info.layers))
            raise ConfigError(f"layer {layer} is not in capture {self.path}, which holds {held}: choose among them")
        try:
            with safe_open(self.path, framework="numpy") as opened:
                q, k, v = (opened.get_tensor(f"layers.{layer}.{name}") for name in "qkv")
        except (SafetensorError, OSError) as error:
            raise _corrupt(self.path, error) from error
        return q, k, v


@dataclass
class Recording:
    """A text after its decode: queries on the host, keys and values still in the backend's cache."""

    backend: Backend
    cache: Any
    table: np.ndarray  # [M]
    lengths: np.ndarray  # [steps] int64
    q: dict[int, np.ndarray]  # layer -> [steps, Hq, D] float32

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K, V [context + steps, Hkv, D] of a layer in the cache's dtype, copied to the host."""
        k, v = self.backend.read_kv(self.cache, layer, self.table, int(self.lengths[-1]))
        return self.backend.to_numpy(k), self.backend.to_numpy(v)


@dataclass(frozen=True)
class Text:
    tokens: list[int]
    sha256: str  # of the whole text


@dataclass(frozen=True)
class TextRequest:
    """A decode along a text that the command line asked for. `model` None is the demo model, `text` None the shipped
    corpus."""

    output: Path
    config: EpsConfig = field(default_factory=EpsConfig)
    model: Path | None = None
    text: Path | None = None
    context_tokens: int | None = None  # None: see `num_sink_tokens`
    num_steps: int = 32
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"

    def session(self, config: EpsConfig) -> Session:
        return Session.open(self.model, self.backend, self.device, self.dtype, self.kv_dtype, config=config)


@dataclass(frozen=True)
class CaptureRequest(TextRequest):
    layers: tuple[int, ...] | None = None  # None: all


def text_tokens(session: Session, path: Path | None, context: int | None, num_steps: int = 0) -> Text:
    """Return `context` and `num_steps` tokens from the start of a text, None: of the shipped corpus. A `context` of
    None is `usual_context`, or what the text holds."""
    num_tokens = (usual_context(session.spec, num_steps) if context is None else context) + num_steps
    if num_tokens > session.spec.max_context:
        raise ConfigError(
            f"context and steps are {num_tokens} tokens, the model's context is {session.spec.max_context}"
            f"{session.spec.context_note}: lower {'--steps' if context is None else '--context'}"
        )
    content = corpus_or_text(path)
    tokens = session.encode(content, most_tokens=num_tokens)
    if len(tokens) < num_tokens and (context is not None or len(tokens) <= num_steps):
        wanted = f"more than the {num_steps} steps" if context is None else str(num_tokens)
        raise ConfigError(
            f"the text has {len(tokens)} tokens and {wanted} are wanted: give a longer --text or lower --context"
        )
    return Text(tokens[:num_tokens], hashlib.sha256(content.encode()).hexdigest())


def record(
    session: Session, tokens: list[int], context_tokens: int, layers: Sequence[int], config: EpsConfig
) -> Recording:
    """Prefills a text's first `context_tokens` densely and decodes the rest of it token by token, sparse by `config`;
    queries of the chosen layers are kept."""
    backend, decoder, num_steps = session.backend, session.decoder, len(tokens) - context_tokens
    cache, pool = session.cache(config.cache_config, len(tokens))
    with terminal.Progress("text: prefill", "tokens") as progress:
        sequence, cache = prefill(decoder, cache, pool, tokens[:context_tokens], report=progress)
    taken: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}

    def tap(layer: int, q: Array) -> None:
        if layer in taken:
            taken[layer].append(backend.to_numpy(q)[0].astype(np.float32))

    decoder.tap = tap
    try:
        document = Document.along(tokens, num_steps)
        _, cache = decode(session, cache, pool, [document], config.selection_config, written=[sequence])
    finally:
        decoder.tap = None
    lengths = np.arange(context_tokens + 1, len(tokens) + 1)
    (table,) = pool.table([sequence])
    return Recording(backend, cache, table, lengths, {layer: np.stack(parts) for layer, parts in taken.items()})


def model_name(session: Session) -> str:
    """Return the model's name in a file that others may read: its directory's name, not where it lies."""
    return session.model if session.model == "demo" else session.path.resolve().name


def capture(request: CaptureRequest) -> dict[str, Any]:
    """Runs a request and writes its file. Returns what the last line of stdout says."""
    with outputs.Output(request.output, "capture") as output:
        return _capture(request, output)


def _capture(request: CaptureRequest, output: outputs.Output) -> dict[str, Any]:
    session = request.session(EpsConfig.of(method="rq"))  # whatever decodes, its keys are as codes want them
    config = request.config.for_device(session.device)
    spec = session.spec
    text = text_tokens(session, request.text, request.context_tokens, request.num_steps)
    context = len(text.tokens) - request.num_steps
    layers = spec.full if request.layers is None else tuple(sorted(set(request.layers)))
    unknown = [layer for layer in layers if not 0 <= layer < spec.num_layers]
    if unknown:
        raise ConfigError(f"layer {unknown[0]} is not in the model, which has 0 to {spec.num_layers - 1}: fix --layers")
    windowed = [layer for layer in layers if layer in spec.windowed]
    if windowed or not layers:
        raise ConfigError(
            f"layer {windowed[0] if windowed else 0} of this {spec.family} has a sliding window, and a capture is of "
            "full attention: choose other --layers"
        )
    made = provenance.provenance(session.backend.versions())
    info = CaptureInfo(
        format_version=FORMAT_VERSION,
        model=model_name(session),
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=1 / sqrt(spec.head_dim),
        layers=layers,
        context_tokens=context,
        num_steps=request.num_steps,
        kv_dtype=session.kv_dtype,
        config=config.to_dict(),
        text_sha256=text.sha256,
        backend=session.backend_name,
        device=session.device,
        dtype=session.dtype,
        fingerprint=model_fingerprint(session.path),
        versions=made["versions"],
        git_commit=made["git_commit"],
    )
    _, size = tensors.header({}, _layout(info))
    free = None if output.file is None else shutil.disk_usage(output.file.parent).free
    if free is not None and size > free:
        raise ConfigError(
            f"the capture takes {size / 2**20:,.0f} MiB and {request.output.parent} has {free / 2**20:,.0f} MiB left: "
            "lower --context or choose fewer --layers"
        )
    recording = record(session, text.tokens, context, layers, config)
    return {"capture": str(request.output), "bytes": write_capture(output, info, recording), **vars(info)}


def write_capture(place: Path | outputs.Output, info: CaptureInfo, recording: Recording) -> int:
    """Writes a capture, one layer in memory at a time; it appears whole. Returns its bytes."""

    def held() -> Iterator[tuple[str, np.ndarray]]:
        yield "lengths", recording.lengths.astype(np.int64)
        for layer in info.layers:
            yield f"layers.{layer}.q", recording.q[layer]
            yield from zip((f"layers.{layer}.k", f"layers.{layer}.v"), recording.keys_values(layer), strict=True)

    layout = _layout(info)
    start, size = tensors.header({METADATA_KEY: json.dumps(vars(info))}, layout)
    with outputs.replacing(place, "wb") as file:
        file.write(start)
        for name, array in held():
            assert list(array.shape) == layout[name][0], (name, array.shape)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
    return len(start) + size


def _layout(info: CaptureInfo) -> dict[str, tuple[list[int], str]]:
    """Name -> (shape, dtype) of every tensor, in file order."""
    layout: dict[str, tuple[list[int], str]] = {"lengths": ([info.num_steps], "int64")}
    for layer in info.layers:
        layout[f"layers.{layer}.q"] = ([info.num_steps, info.num_heads, info.head_dim], "float32")
        for name in "kv":
            shape = [info.context_tokens + info.num_steps, info.num_kv_heads, info.head_dim]
            layout[f"layers.{layer}.{name}"] = (shape, info.kv_dtype)
    return layout


def open_capture(path: Path) -> Capture:
    """The capture at `path`. Raises ConfigError for a file that is truncated, no capture, or of another version."""
    try:
        with open(path, "rb"):  # the library does not say why it cannot open a file
            pass
    except FileNotFoundError as error:
        raise ConfigError(f"there is no capture {path}: make one with eps-proto capture") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"capture {path} cannot be read ({reason}): give a file of eps-proto capture") from error
    try:
        with safe_open(path, framework="numpy") as opened:
            metadata = (opened.metadata() or {}).get(METADATA_KEY)
            if metadata is None:
                raise ConfigError(f"{path} is a safetensors file but no EPS capture: make one with eps-proto capture")
            info = _read_info(path, metadata)
            found = {
                name: (list(opened.get_slice(name).get_shape()), opened.get_slice(name).get_dtype())
                for name in opened.keys()  # noqa: SIM118 - no dictionary
            }
            expected = {name: (shape, tensors.NAMES[dtype]) for name, (shape, dtype) in _layout(info).items()}
            if found != expected:
                wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
                raise ConfigError(f"tensor {wrong[0]} of {path} is not what its metadata says: capture again")
            lengths = opened.get_tensor("lengths")
    except (SafetensorError, OSError) as error:
        raise _corrupt(path, error) from error
    last = info.context_tokens + info.num_steps
    if not (np.diff(lengths) > 0).all() or not 1 <= lengths[0] <= lengths[-1] <= last:
        raise ConfigError(f"lengths of {path} do not rise within its {last} tokens: capture again")
    return Capture(path, info, lengths)


def _read_info(path: Path, metadata: str) -> CaptureInfo:
    try:
        values = inputs.parse_json(metadata)
    except ValueError as error:
        raise ConfigError(f"metadata of {path} is not JSON ({error}): capture again") from error
    version = values.get("format_version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise ConfigError(f"{path} has capture format {shown(version)}, this is {FORMAT_VERSION}: capture again")
    info = read_record(CaptureInfo, values, f"metadata of {path}", "capture again")
    if (
        info.num_heads % info.num_kv_heads
        or info.kv_dtype not in DTYPE_BYTES
        or info.scale != 1 / sqrt(info.head_dim)
        or not info.layers
        or list(info.layers) != sorted(set(info.layers))
        or not 0 <= info.layers[0] <= info.layers[-1] < info.num_layers
    ):
        raise ConfigError(f"metadata of {path} contradicts itself: capture again")
    return info


def _corrupt(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"capture {path} is truncated, corrupt or no safetensors file ({one_line(error)}): capture again"
    )
