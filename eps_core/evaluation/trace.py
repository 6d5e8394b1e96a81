"""The reads of one run's sparse steps: tokens, bytes and times by layer, for `eps-proto run --plot`.

The steps are those of the run itself. Its decoder gets layers that also hand over their reads, and each step's reads
are counted when its record comes, outside of what is timed. Steps that are no calls layer by layer (CUDA graphs) or are
dense after an alarm hand over nothing.

Letters: T tokens of the prompt, L layers, Hkv kv heads, C columns of consecutive tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eps_core.attention.layer import LayerRead
from eps_core.decode.forward import Decoder
from eps_core.decode.layers import FullLayer
from eps_core.decode.session import Session
from eps_core.metrics.steps import StepRecord
from eps_core.metrics.terminal import TextStream

MAX_COLUMNS = 480  # into which a prompt's tokens are counted step by step


class _Handing:
    """A layer whose sparse reads also go to `reads`; all else is the layer's."""

    def __init__(self, layer: FullLayer, reads: list[LayerRead]) -> None:
        self._layer, self._reads = layer, reads

    def sparse(self, *args: Any, **more: Any) -> tuple[Any, LayerRead]:
        out, read = self._layer.sparse(*args, **more)
        self._reads.append(read)
        return out, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@dataclass
class Reads:
    """The reads of a run's sparse steps, of one prompt of `num_tokens` tokens. Sums are over the steps of `records`."""

    session: Session
    num_tokens: int
    records: list[StepRecord] = field(default_factory=list)  # of the steps that handed over their reads
    layer_ms: list[np.ndarray] = field(default_factory=list)  # of each of these [L, 2]: selection, attention
    by_step: list[np.ndarray] = field(default_factory=list)  # of each [C]: share of the (layer, kv head)s that read it
    _reads: list[LayerRead] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        layers, heads = self.session.spec.num_layers, self.session.spec.num_kv_heads
        self.tokens_read = np.zeros((layers, self.num_tokens), np.int64)  # by how many (step, kv head)s
        self.kv_bytes = np.zeros((layers, heads))
        self.summary_bytes = np.zeros(layers)

    @property
    def column_tokens(self) -> int:
        """Tokens of a column; the last one may have fewer."""
        return -(-self.num_tokens // MAX_COLUMNS)

    @property
    def shares(self) -> np.ndarray:
        """[L, T] of the (step, kv head)s the share that read a token."""
        pairs: np.ndarray = self.tokens_read / max(len(self.records) * self.session.spec.num_kv_heads, 1)
        return pairs

    def columns(self, shares: np.ndarray) -> np.ndarray:
        """Shares [.., T] as means of columns [.., C]."""
        starts = np.arange(0, self.num_tokens, self.column_tokens)
        sums: np.ndarray = np.add.reduceat(shares, starts, axis=-1)
        return sums / np.diff([*starts, self.num_tokens])

    def decoder(self, counts: bool) -> Decoder:
        """The session's decoder, whose steps run layer by layer, so that both sides of a run are timed alike; where it
        `counts`, with layers whose sparse reads `add` then counts."""
        decoder = Decoder(self.session.backend, self.session.decoder.model)
        kept: list[Any] = [_Handing(layer, self._reads) if counts else layer for layer in decoder.layers]
        decoder.layers = kept
        return decoder

    def add(self, record: StepRecord) -> None:
        """Counts the reads of the step that `record` is of."""
        reads = self._reads[:]
        self._reads.clear()
        if not reads:
            return
        heads_reading = np.stack([self._heads_reading(read, record.lengths[0]) for read in reads])
        self.tokens_read += heads_reading
        for layer, read in enumerate(reads):
            counts = read.stats.counts[0]
            self.kv_bytes[layer] += read.stats.kv_bytes_read * counts / counts.sum()
            self.summary_bytes[layer] += read.stats.summary_bytes_read
        self.records.append(record)
        self.layer_ms.append(np.array([(one.stats.prepass_ms, one.stats.attention_ms) for one in reads], float))
        pairs = self.session.spec.num_layers * self.session.spec.num_kv_heads
        self.by_step.append(self.columns(heads_reading.sum(axis=0) / pairs))

    def _heads_reading(self, read: LayerRead, length: int) -> np.ndarray:
        """[T] of the prompt's tokens how many kv heads of a layer read each; the step attends to `length` tokens."""
        heads = read.spec.num_kv_heads
        if read.selection is None:  # everything, or a window's last tokens
            return np.where(np.arange(self.num_tokens) >= length - read.plan.lengths[0], heads, 0)
        size = read.plan.config.cache_config.S
        groups = self.session.backend.to_numpy(read.selection.groups)[0]
        counts = np.bincount(groups[groups >= 0], minlength=-(-self.num_tokens // size))
        return np.repeat(counts, size)[: self.num_tokens]


@dataclass(frozen=True)
class Trace:
    """All that the page of a run shows. Texts are of single tokens, in order."""

    settings: dict[str, str]  # name -> value, as a person reads them
    reads: Reads
    prompt: list[str]
    text: list[str]  # the sparse run's
    summary: dict[str, Any]  # of `metrics.steps.summarise`
    dense_text: list[str] | None = None  # None: no dense run
    dense_summary: dict[str, Any] | None = None
    kl: list[float] | None = None  # nats, of each token of `dense_text`; None: not measured
    agree: list[bool] | None = None  # whether the likeliest token is dense's


def texts_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; where a character's bytes are of several tokens, the last of them has
    it."""
    found: list[str] = []

    def write(text: str) -> None:
        found[-1] += text

    stream = TextStream(tokenizer, write, skip_special_tokens=False)
    for token in tokens:
        found.append("")
        stream.add(token)
    stream.flush()
    return found
