"""A grid of runs: which cells there are, the file that survives a kill, and how one cell is measured.

A cell is one setting of context, batch, method and policy. Its quality and its time are measured on the decode path,
token by token, beside a dense decode of the same documents: a teacher-forced prefill would not exercise the gate. The
dense prefill and the dense decode of a document are shared by every cell that needs them, within one process.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import POLICIES, SCOPES
from eps_core.config.store import EVALUATION_METHODS, METHODS, CacheSpec, coded_methods
from eps_core.decode.forward import Decoder
from eps_core.errors import ConfigError
from eps_core.evaluation.grid_file import GridFile
from eps_core.gate.protocol import Backend
from eps_core.gate.stats import LayerStats
from eps_core.summaries.table import facts
from eps_core.tasks.needle import VALUE_DIGITS, corpus, filler, needle_document
from eps_core.telemetry import files, terminal
from eps_core.telemetry.steps import StepRecord, kl_divergence, percentile, step_record, summarise

MAX_MASS_PAIRS = 200  # (certified, true) pairs that one cell keeps for the report's scatter
HeadModes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Setting:
    """One cell as asked for. None leaves a value to its default; `first_n` and `last_n` are in groups,
    `group_blocks` in pages.

    Under policy threshold the heap (`top_pages`, in groups) is as large as `budget` buys unless it is given.
    """

    context: int = 4096  # tokens that the last decode step attends
    batch: int = 1  # documents decoded together
    method: str = "rq"
    policy: str = "topk"
    dim: int | None = None  # m of jl, l of fd, k of moments
    alpha: float | None = None
    last_n: int | None = None
    group_blocks: int | None = None
    group_tokens: int | None = None
    bits: int | None = None
    budget: float | None = None
    top_pages: int | None = None
    epsilon: float | None = None
    tau: float | None = None
    heads: str = "all"
    strict: bool = False
    bound_bits: int | None = None
    refine: float | None = None
    tail_tokens: int | None = None
    scope: str = "kv-head"
    first_n: int | None = None


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("context", "batch"), (int,)),
    **dict.fromkeys(("dim", "last_n", "group_blocks", "group_tokens", "bits", "top_pages"), (int, type(None))),
    **dict.fromkeys(("bound_bits", "tail_tokens", "first_n"), (int, type(None))),
    **dict.fromkeys(("alpha", "budget", "epsilon", "tau", "refine"), (int, float, type(None))),
    **dict.fromkeys(("method", "policy", "heads", "scope"), (str,)),
    "strict": (bool,),
}
_CHOICES = {
    "method": (*METHODS, *EVALUATION_METHODS),
    "policy": POLICIES,
    "heads": ("all", "retrieval"),
    "scope": SCOPES,
}
STRICT_BITS = 8  # of the codes that certify a strict cell of a method without bounds
# the axes that mean something under one policy, or some, only
_POLICIES_OF = {"alpha": ("threshold",), "tau": ("share",), "budget": ("topk", "threshold")}

# the product requirements' grid, 1,296 cells, and one that the demo model finishes in minutes
PRESETS: dict[str, list[dict[str, Any]]] = {
    "prd": [
        {
            "context": [8192, 32768, 65536, 131072],
            "batch": [1, 4, 8],
            "method": "jl",
            "policy": "threshold",
            "dim": [4, 8, 16],
            "alpha": [1.0, 1.05, 1.1],
            "last_n": [4, 8],
            "heads": ["retrieval", "all"],
            "group_blocks": [4, 8, 16],
        }
    ],
    "small": [
        {
            "context": [2048, 4096],
            "method": ["rq", "box", "meanstd", "ball", "moments", "oracle"],
            "budget": [0.1, 0.15, 0.25],
        },
        {"context": [2048, 4096], "method": ["jl", "1pc", "fd"], "budget": 0.25},
        {"context": 4096, "method": "ball", "strict": True, "epsilon": 0.1},
        {"context": 4096, "method": "rq", "strict": True, "epsilon": [0.01, 0.1]},
        {"context": 2048, "batch": 4, "method": "rq", "budget": 0.1},
        # one axis at a time around m 8, alpha 1.1, the last 4 groups of 8 pages
        *(
            {
                "method": "jl",
                "policy": "threshold",
                **{"dim": 8, "alpha": 1.1, "last_n": 4, "group_blocks": 8},
                **{axis: values},
            }
            for axis, values in {
                "dim": [4, 8, 16],
                "alpha": [1.0, 1.05, 1.1],
                "last_n": [4, 8],
                "group_blocks": [4, 8, 16],
            }.items()
        ),
    ],
}


def load_grid(path: Path) -> tuple[Setting, ...]:
    """The cells of a JSON file: an object of axes, each a value or a list of them, or a list of such objects."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"grid {path} cannot be read ({error.strerror}): give a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"grid {path} is not JSON ({error}): mend it there") from error
    return expand(data, f"grid {path}")


def expand(data: Any, source: str) -> tuple[Setting, ...]:
    """Every combination of the axes, each once, in order; `source` names them in errors."""
    cells: list[Setting] = []
    known = [field.name for field in fields(Setting)]
    blocks = data if isinstance(data, list) else [data]
    if not blocks:
        raise ConfigError(f"{source} holds no cells: give at least one object of axes")
    for block in blocks:
        if not isinstance(block, dict):
            raise ConfigError(f"{source} must be an object of axes, or a list of them, and holds {block!r}")
        unknown = sorted(set(block) - set(known))
        if unknown:
            raise ConfigError(f"{source}: unknown axis {', '.join(unknown)}: known are {', '.join(known)}")
        axes = {name: _axis(name, value, source) for name, value in block.items()}
        cells += [Setting(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return tuple(dict.fromkeys(cells))


def _axis(name: str, value: Any, source: str) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{source}: axis {name} is an empty list: give it a value or leave it out")
    for item in values:
        # bool is an int to Python, and true is no number of tokens
        if type(item) not in _KINDS[name]:
            kinds = " or ".join("null" if kind is type(None) else kind.__name__ for kind in _KINDS[name])
            raise ConfigError(f"{source}: axis {name} holds {item!r}, which is not {kinds}")
        if name in _CHOICES and item not in _CHOICES[name]:
            raise ConfigError(f"{source}: {name} {item!r} is unknown: choose among {', '.join(_CHOICES[name])}")
        if name in ("context", "batch") and item < 1:
            raise ConfigError(f"{source}: {name} {item} must be at least 1")
    return values


def config_of(setting: Setting, head_modes: HeadModes | None) -> EpsConfig:
    """The cell's EpsConfig; ConfigError says why a combination is impossible."""
    if setting.method == "off":
        raise ConfigError("method off is the dense side of every cell")
    for name, policies in _POLICIES_OF.items():
        if getattr(setting, name) is not None and setting.policy not in policies:
            raise ConfigError(f"{name} {getattr(setting, name)} belongs to policy {' or '.join(policies)}")
    if setting.epsilon is not None and setting.policy != "mass" and not setting.strict:
        raise ConfigError(f"epsilon {setting.epsilon} belongs to policy mass or to strict")
    if setting.bits is not None and not facts(setting.method).coded:
        raise ConfigError(f"bits {setting.bits} belongs to method {coded_methods()}")
    if setting.heads == "retrieval" and head_modes is None:
        raise ConfigError("heads retrieval needs --eps-head-policy FILE")
    default = EpsConfig.of()
    # what an axis leaves out is the method's own default
    given = {
        name: getattr(setting, name) for name in ("dim", "bits", "budget", "tau", "bound_bits", "refine", "tail_tokens")
    }
    common: dict[str, Any] = {
        "method": setting.method,
        "policy": setting.policy,
        "scope": setting.scope,
        "group_tokens": setting.group_tokens,
        "group_blocks": setting.group_blocks,
        "head_modes": head_modes if setting.heads == "retrieval" else None,
        **{name: value for name, value in given.items() if value is not None},
    }
    sized = EpsConfig.of(**(common | {"policy": "topk"}))
    if setting.strict and setting.bound_bits is None and not sized.store.has_bounds:
        common["bound_bits"] = STRICT_BITS
    top_pages = setting.top_pages
    if setting.policy == "threshold" and top_pages is None:
        top_pages = sized.budget_groups(setting.context)
    for name, tokens in (("first_n", "first_tokens"), ("last_n", "last_tokens")):
        groups = getattr(setting, name)
        if groups is not None and groups < 0:
            raise ConfigError(f"{name} {groups} is negative")
        if groups is not None:
            common[tokens] = groups * sized.store.S
    return EpsConfig.of(
        **common,
        alpha=default.read.alpha if setting.alpha is None else float(setting.alpha),
        top_pages=top_pages,
        epsilon=default.read.epsilon if setting.epsilon is None else float(setting.epsilon),
        strict=setting.strict,
    )


@dataclass(frozen=True)
class Plan:
    """What every cell of a grid measures."""

    needles: int = 20  # questions
    texts: int = 2  # windows of real text, rounded up to whole batches
    text_steps: int = 64  # decode steps of each window
    repeat: int = 1  # times that each window is decoded, for more timings
    audit_every: int = 16  # steps between dense second reads, which measure the true skipped mass; 0: none
    kv_dtype: str = "bfloat16"
    prefill_chunk: int = 2048  # tokens
    seed: int = 0


def header(
    cells: Sequence[Setting], plan: Plan, head_modes: HeadModes | None, versions: dict[str, str], **identity: Any
) -> dict[str, Any]:
    """The first line: all that is needed to run the grid again."""
    return {
        "type": "run",
        "kind": "grid",
        "grid": [asdict(cell) for cell in cells],
        "plan": asdict(plan),
        "head_modes": head_modes,
        **identity,
        **files.provenance(versions),
    }


# --- one cell ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Document:
    """`prompt` and, of a text, the tokens `forced` after it; of a needle, its answer."""

    prompt: list[int]
    forced: list[int] | None = None
    answer: str | None = None


@dataclass
class Decoded:
    """One decode of a batch: `logits` [steps, B, V] where kept, `fed` [B][steps] greedy tokens."""

    records: list[StepRecord]
    layers: list[list[LayerStats]]
    logits: np.ndarray | None
    fed: list[list[int]]


@dataclass
class _Measured:
    """What the decodes of one cell gave, dense or gated."""

    records: list[StepRecord] = field(default_factory=list)
    layers: list[list[LayerStats]] = field(default_factory=list)
    timings: list[StepRecord] = field(default_factory=list)  # of text, past each decode's first step

    def add(self, decoded: Decoded) -> None:
        self.records += decoded.records
        self.layers += decoded.layers

    def times(self) -> dict[str, float | None]:
        """p50 and p95 of the three clocks, ms a step. Steps timed layer by layer wait for the device in between, so
        whole steps come from the others where there are any."""
        untimed = [r.decode_ms for r in self.timings if not r.timed] or [r.decode_ms for r in self.timings]
        clocks = {
            "prepass_ms": [r.eps_prepass_ms for r in self.timings if r.eps_prepass_ms is not None],
            "attention_ms": [r.attention_ms for r in self.timings if r.attention_ms is not None],
            "decode_ms": untimed,
        }
        return {
            f"{name}_p{percent}": percentile(values, percent) for name, values in clocks.items() for percent in (50, 95)
        }


class Bench:
    """A loaded model that measures cells. `store_bytes` bounds the K and V of prefilled documents that are kept, on
    the device; documents beyond it are prefilled again for every cell."""

    def __init__(
        self, backend: Backend, decoder: Decoder, tokenizer: Any, device: str, plan: Plan, store_bytes: int = 2**32
    ) -> None:
        self.backend, self.decoder, self.tokenizer, self.device, self.plan = backend, decoder, tokenizer, device, plan
        self.spec = decoder.spec
        self.store_bytes = store_bytes
        self._text = corpus(held_out=True)
        sample = self._text[: 2**16].decode("ascii")
        self._bytes_per_token = len(sample) / max(len(self._encode(sample)), 1)
        self._documents: dict[tuple[str, int, int], Document] = {}
        self._stored: dict[tuple[str, int, int], list[tuple[Any, Any]]] = {}
        self._stored_bytes = 0
        self._dense: dict[tuple[str, int, tuple[int, ...]], Decoded] = {}
        self._group: tuple[int, int] | None = None

    def why_not(self, setting: Setting, config: EpsConfig) -> str | None:
        """Why the model or the machine cannot run a cell."""
        steps = max(self.plan.text_steps, VALUE_DIGITS)
        if setting.context > self.spec.max_context:
            return f"context {setting.context} is past the model's {self.spec.max_context} tokens"
        if setting.context <= steps:
            return f"context {setting.context} leaves no prompt before {steps} decode steps"
        if config.read.head_modes is not None:
            shape = (len(config.read.head_modes), len(config.read.head_modes[0]))
            if shape != (self.spec.num_layers, self.spec.num_kv_heads):
                return f"the head policy is of {shape[0]} layers x {shape[1]} kv heads: of another model"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        needed = setting.batch * self._kv_bytes(setting.context)
        if self.device == "cpu" and needed > memory:
            return f"{needed / 2**20:,.0f} MiB of K and V do not fit this machine's {memory / 2**20:,.0f} MiB"
        return None

    def measure(self, setting: Setting, config: EpsConfig) -> dict[str, Any]:
        """The numbers of one cell (see `cell_line`)."""
        if self._group != (setting.context, setting.batch):
            self._group = (setting.context, setting.batch)
            self._dense.clear()  # whole vocabularies: only the cells of one context and batch share them
            for key in [key for key in self._stored if key[1] != setting.context]:
                del self._stored[key]
            self._stored_bytes = sum(map(_stored_size, self._stored.values()))
        plan, batch = self.plan, setting.batch
        gated, dense = _Measured(), _Measured()
        divergences: list[float] = []
        agreements: list[bool] = []
        for indices in _batches(-(-plan.texts // batch) * batch, batch):
            reference = self._decode_dense("text", setting.context, indices)
            dense.timings += _steady(reference.records)
            for repetition in range(plan.repeat):
                decoded = self._decode("text", setting.context, indices, config)
                gated.timings += _steady(decoded.records, plan.audit_every)
                if repetition == 0:
                    gated.add(decoded)
                    assert reference.logits is not None and decoded.logits is not None
                    divergence = kl_divergence(reference.logits, decoded.logits)
                    divergences += np.maximum(divergence, 0).ravel().tolist()
                    agreements += (reference.logits.argmax(-1) == decoded.logits.argmax(-1)).ravel().tolist()
        answered: list[tuple[bool, bool]] = []  # (densely, gated)
        for indices in _batches(plan.needles, batch):
            reference = self._decode_dense("needle", setting.context, indices)
            decoded = self._decode("needle", setting.context, indices, config)
            gated.add(decoded)
            for row, index in enumerate(indices):
                answer = self._document("needle", setting.context, index).answer
                answered.append((self._says(reference.fed[row], answer), self._says(decoded.fed[row], answer)))
        summary = summarise(gated.records)
        pages_total = summary["pages_total"]
        return {
            "bytes_ratio": summary["bytes_ratio"],
            "kv_ratio": summary["kv_ratio"],
            "summary_ratio": summary["summary_ratio"],
            "visit_ratio": summary["visit_ratio"],
            "forced_ratio": summary["pages_forced"] / pages_total if pages_total else None,
            "visit_ratio_by_layer_and_head": summary["visit_ratio_by_layer_and_head"],
            "kl_mean": float(np.mean(divergences)) if divergences else None,
            "kl_max": max(divergences, default=None),
            "top1_agreement": float(np.mean(agreements)) if agreements else None,
            "num_positions": len(divergences),
            "num_needles": len(answered),
            "needles_answered": sum(now for _, now in answered),
            "needles_dense": sum(before for before, _ in answered),
            "needles_lost": sum(before and not now for before, now in answered),
            "needles_gained": sum(now and not before for before, now in answered),
            **gated.times(),
            **{f"dense_{name}": value for name, value in dense.times().items()},
            "timed_steps": len(gated.timings),
            "mass_skipped_est_mean": summary["mass_skipped_est_mean"],
            **masses(gated.layers),
            "escalations": summary["escalations"],
            "fallbacks": summary["fallbacks"],
        }

    # -- documents

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def _says(self, tokens: list[int], answer: str | None) -> bool:
        assert answer is not None
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip().startswith(answer)

    def _document(self, kind: str, context: int, index: int) -> Document:
        key = (kind, context, index)
        if key not in self._documents:
            self._documents[key] = self._new_text(*key[1:]) if kind == "text" else self._new_needle(*key[1:])
        return self._documents[key]

    def _new_text(self, context: int, index: int) -> Document:
        """A window of held-out text, decoded along its own tokens up to `context` of them."""
        rng = np.random.default_rng([self.plan.seed, 1, index])
        num_bytes = math.ceil(1.25 * context * self._bytes_per_token) + 64
        tokens = self._encode(filler(self._text, num_bytes, rng).decode("ascii"))[:context]
        if len(tokens) < context:
            raise ValueError(f"{num_bytes} bytes of text are only {len(tokens)} tokens of the {context} asked for")
        prompt_tokens = context - self.plan.text_steps + 1
        return Document(tokens[:prompt_tokens], forced=tokens[prompt_tokens:])

    def _new_needle(self, context: int, index: int) -> Document:
        """A needle document whose answer ends within `context` tokens; depths spread evenly, 0 to 3 distractors."""
        depth = (index + 0.5) / max(self.plan.needles, 1)
        room = context - VALUE_DIGITS
        num_bytes = int(room * self._bytes_per_token)
        while True:
            made = needle_document(
                self._text, num_bytes, self.plan.seed + 3_000_000 + index, depth, num_distractors=index % 4
            )
            tokens = self._encode(made.prompt)
            if len(tokens) <= room:
                return Document(tokens, answer=made.answer)
            num_bytes -= max(1, math.ceil((len(tokens) - room) * self._bytes_per_token))

    # -- decoding

    def _kv_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V of one document."""
        spec = CacheSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, 1, self.plan.kv_dtype)
        return spec.num_layers * spec.num_kv_heads * num_tokens * spec.kv_token_bytes

    def _new_cache(self, config: EpsConfig, lengths: Sequence[int], room: int) -> tuple[Any, np.ndarray]:
        """(cache, table [B, M]) with as many units for each document as the longest one needs."""
        units = -(-(max(lengths) + room) // config.store.unit_tokens)
        table = np.arange(len(lengths) * units, dtype=np.int32).reshape(len(lengths), units)
        spec = CacheSpec(
            self.spec.num_layers,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            table.size,
            self.plan.kv_dtype,
            max_open_groups=len(lengths),
        )
        return self.backend.new_cache(spec, config.store, self.device), table

    def _prefilled(self, kind: str, context: int, index: int) -> list[tuple[Any, Any]]:
        """K, V [T-1, Hkv, D] of every layer: all of the prompt but its last token, which the decode begins with."""
        key = (kind, context, index)
        if key in self._stored:
            return self._stored[key]
        tokens = self._document(*key).prompt[:-1]
        cache, table = self._new_cache(EpsConfig.of(), [len(tokens)], 0)
        for start in range(0, len(tokens), self.plan.prefill_chunk):
            chunk = np.array(tokens[start : start + self.plan.prefill_chunk])
            slots = np.arange(start, start + len(chunk))
            cache, _ = self.decoder.prefill(cache, chunk, slots, table[0], start + len(chunk))
        stored = [self.backend.read_kv(cache, layer, table[0], len(tokens)) for layer in range(self.spec.num_layers)]
        if self._stored_bytes + self._kv_bytes(len(tokens)) <= self.store_bytes:
            self._stored[key] = stored
            self._stored_bytes += self._kv_bytes(len(tokens))
        return stored

    def _decode_dense(self, kind: str, context: int, indices: tuple[int, ...]) -> Decoded:
        """The dense decode, once for all cells; a text is decoded `repeat` times, for as many timings."""
        key = (kind, context, indices)
        if key not in self._dense:
            decoded = self._decode(*key, EpsConfig.of())
            for _ in range(self.plan.repeat - 1 if kind == "text" else 0):
                decoded.records += self._decode(*key, EpsConfig.of()).records
            self._dense[key] = decoded
        return self._dense[key]

    def _decode(self, kind: str, context: int, indices: tuple[int, ...], config: EpsConfig) -> Decoded:
        """One decode of a batch, from a cache of its own: along the text's tokens, or greedily for an answer."""
        documents = [self._document(kind, context, index) for index in indices]
        num_steps = self.plan.text_steps if kind == "text" else VALUE_DIGITS
        before = np.array([len(document.prompt) - 1 for document in documents])
        cache, table = self._new_cache(config, before.tolist(), num_steps)
        for row, index in enumerate(indices):
            stored = self._prefilled(kind, context, index)
            slots = table[row, 0] * config.store.unit_tokens + np.arange(before[row])
            for layer, (k, v) in enumerate(stored):
                cache = self.backend.write_kv(cache, layer, k, v, slots)
        tokens = [document.prompt[-1] for document in documents]
        decoded = Decoded([], [], None, [[] for _ in indices])
        logits = []
        for step in range(num_steps):
            lengths = before + step + 1
            audit = config.store.enabled and kind == "text" and _is_audit(step, self.plan.audit_every)
            timed = self.device == "cpu" or step % 4 == 0
            self.decoder.timing = timed
            kv_bytes, reread_bytes = cache.kv_bytes_read, cache.bytes_k_reread
            slots = table[:, 0] * config.store.unit_tokens + lengths - 1
            started = time.perf_counter()
            cache, output = self.decoder.step(
                cache, np.array(tokens), slots, table, lengths, config.read if config.store.enabled else None, audit
            )
            decode_ms = 1000 * (time.perf_counter() - started)
            greedy = output.logits.argmax(axis=-1).tolist()
            for row, token in enumerate(greedy):
                decoded.fed[row].append(token)
            if kind == "text":
                logits.append(output.logits)
            tokens = greedy
            if step + 1 < num_steps and documents[0].forced is not None:
                tokens = [document.forced[step] for document in documents if document.forced is not None]
            decoded.records.append(
                step_record(
                    step, range(len(indices)), greedy, lengths.tolist(), output, cache.spec, config, decode_ms,
                    cache.kv_bytes_read - kv_bytes, cache.bytes_k_reread - reread_bytes, timed,
                )
            )  # fmt: skip
            decoded.layers.append(output.layers)
        if logits:
            decoded.logits = np.stack(logits)
        return decoded


def _stored_size(stored: list[tuple[Any, Any]]) -> int:
    return sum(array.nbytes for pair in stored for array in pair)


def _batches(count: int, batch: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, count, batch):
        yield tuple(range(start, min(start + batch, count)))


def _is_audit(step: int, every: int) -> bool:
    return every > 0 and step % every == every - 1


def _steady(records: Sequence[StepRecord], audit_every: int = 0) -> list[StepRecord]:
    """The steps whose time says something: not each decode's first, which may compile kernels, and no audits, which
    attend twice."""
    return [r for r in records if r.step > 0 and not _is_audit(r.step, audit_every)]


def masses(layers: Sequence[Sequence[LayerStats]]) -> dict[str, Any]:
    """Certified and true shares of the softmax left unread, over all steps, layers, sequences and kv heads."""
    flat = [layer for step in layers for layer in step]
    certified = [layer.mass_skipped_cert for layer in flat if layer.mass_skipped_cert is not None]
    true = [layer.mass_skipped_true for layer in flat if layer.mass_skipped_true is not None]
    pairs: list[tuple[float, float]] = []
    for layer in flat:
        if layer.mass_skipped_cert is not None and layer.mass_skipped_true is not None:
            both = zip(layer.mass_skipped_cert.ravel(), layer.mass_skipped_true.ravel(), strict=True)
            pairs += [(float(bound), float(share)) for bound, share in both]
    stride = max(1, -(-len(pairs) // MAX_MASS_PAIRS))
    found: dict[str, Any] = {}
    for name, values in (("cert", certified), ("true", true)):
        joined = np.concatenate([value.ravel() for value in values]) if values else np.zeros(0)
        found[f"mass_skipped_{name}_mean"] = float(joined.mean()) if len(joined) else None
        found[f"mass_skipped_{name}_max"] = float(joined.max()) if len(joined) else None
    return {**found, "mass_pairs": pairs[::stride]}


# --- the whole grid ---------------------------------------------------------------------------------------------------


def cell_line(index: int, setting: Setting, config: EpsConfig | None, numbers: dict[str, Any]) -> dict[str, Any]:
    """One finished cell: what was asked, what it resolved to (None where impossible), what was measured."""
    return {
        "type": "cell",
        "index": index,
        "setting": asdict(setting),
        "context_tokens": setting.context,
        "batch": setting.batch,
        "method": setting.method,
        "policy": setting.policy,
        "dim": config.store.dim if config else setting.dim,
        "bits": config.store.code_bits if config else None,
        "group_tokens": config.store.S if config else setting.group_tokens,
        "alpha": config.read.alpha if config and config.read.policy == "threshold" else None,
        "top_pages": config.read.top_pages if config else setting.top_pages,
        "guards": [config.read.first_tokens, config.read.last_tokens] if config else None,
        "refine": config.read.refine if config else setting.refine,
        "tail_tokens": config.store.tail_tokens if config else setting.tail_tokens,
        "bound_bits": config.store.bound_bits if config else setting.bound_bits,
        "epsilon": config.read.epsilon if config and (config.read.strict or config.read.policy == "mass") else None,
        "scope": setting.scope,
        "heads": setting.heads,
        "strict": setting.strict,
        "skipped": None,
        **numbers,
    }


class Progress:
    """Cells done of all and the time left. `bar` is what shows it."""

    def __init__(self, cells: Sequence[Setting], finished: set[int], stream: Any = None) -> None:
        self.bar = terminal.Progress("grid:", "cells", stream, every_s=0)
        self.total, self.done = len(cells), len(finished)
        # a cell's time grows with the tokens it attends
        self.left = {i: cell.context * cell.batch for i, cell in enumerate(cells) if i not in finished}
        self.seconds = 0.0
        self.measured = 0

    def __call__(self, index: int, seconds: float | None) -> None:
        """`seconds` None: the cell was skipped."""
        weight = self.left.pop(index)
        self.done += 1
        if seconds is not None:
            self.seconds += seconds
            self.measured += weight
        left = ""
        if self.measured and self.left:
            left = f"about {terminal.duration(self.seconds / self.measured * sum(self.left.values()))} left"
        if seconds is not None or not self.left:
            self.bar(self.done, self.total, left)


def run_cells(
    bench: Bench, cells: Sequence[Setting], head_modes: HeadModes | None, file: GridFile, progress: Progress
) -> dict[str, int]:
    """Measures what the file lacks, cells of one context and batch after each other, and writes each when it is done.
    A cell that the machine or the model cannot run is written with the reason, and the grid goes on."""
    counts = {"measured": 0, "skipped": 0}
    pending = [index for index in range(len(cells)) if index not in file.finished]
    plans: dict[int, EpsConfig] = {}

    def skip(index: int, config: EpsConfig | None, reason: str) -> None:
        file.write(cell_line(index, cells[index], config, {"skipped": " ".join(reason.split())}))
        counts["skipped"] += 1
        progress(index, None)

    for index in pending:
        try:
            config = config_of(cells[index], head_modes)
        except ConfigError as error:
            skip(index, None, str(error))
            continue
        reason = bench.why_not(cells[index], config)
        if reason is not None:
            skip(index, config, reason)
        else:
            plans[index] = config
    for index in sorted(plans, key=lambda i: (cells[i].context, cells[i].batch, i)):
        started = time.perf_counter()
        try:
            numbers = bench.measure(cells[index], plans[index])
        except (MemoryError, RuntimeError, ValueError) as error:
            # ValueError: no such document, or NaN in K. Of the others only memory is a property of the cell.
            if isinstance(error, RuntimeError) and "out of memory" not in str(error).lower():
                raise
            skip(index, plans[index], f"out of memory: {error}" if isinstance(error, MemoryError) else str(error))
            continue
        seconds = time.perf_counter() - started
        file.write(cell_line(index, cells[index], plans[index], {**numbers, "seconds": round(seconds, 3)}))
        counts["measured"] += 1
        progress(index, seconds)
    return counts
