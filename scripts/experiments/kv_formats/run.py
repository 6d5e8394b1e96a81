"""Quality against bytes of formats that a prompt's K and V may be kept in, on needles and real text.

Measured by round trip: when a document's prefill ends its K and V are replaced by what a format can say of them, in a
cache of 16 bits that is decoded from; there is no pool of the format. Tokens that follow stay as they are. Bytes are
the format's own, over those of a bfloat16 cache: all that is kept is read, unless EPS skips it.

    python scripts/experiments/kv_formats/run.py --contexts 4096 --needles 20 --texts 4 --text-steps 48

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import markdown_table

from eps_core.attention.protocol import Array, Backend
from eps_core.config.eps import EpsConfig
from eps_core.decode.evicting import evicting
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.runner import DENSE, Document, Outcome, decode, run_batch
from eps_core.eviction.config import EvictionConfig
from eps_core.models.rope import inverse_frequencies
from eps_core.models.spec import ModelSpec
from experiments.kv_formats import block_gtq, dar, dmc, per_channel, prq
from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, in_place
from experiments.memory.run import COLUMNS, KeptNumbers, KeptTally, measured, shown, summaries_kept, tally
from experiments.methods.curves import Documents, document_of, says
from experiments.methods.run import main

OFF = "off"
REWRITES: dict[str, ModuleType] = {
    "per-channel": per_channel, "block-gtq": block_gtq, "prq": prq, "dar": dar, "dmc": dmc,
}  # fmt: skip
EPS_BUDGET = 0.05
TAUS = (0.95, 0.9, 0.8)  # of DMC's ablation
Settings = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Variant:
    """The form that K and V are kept in, and how that is read."""

    rewrite: str = OFF
    settings: Settings = ()
    config: EpsConfig = EpsConfig()  # noqa: RUF009


def variants() -> tuple[Variant, ...]:
    """EPS alone, every rewrite alone, and EPS over two whose bytes are the same for every row."""
    sparse = EpsConfig.of(method="rq", budget=EPS_BUDGET)
    alone = [
        *(Variant("per-channel", (("bits", bits),)) for bits in (4, 2)),
        *(Variant("block-gtq", (("bits", bits),)) for bits in (4, 3, 2)),
        *(Variant("prq", (("stages", 1), ("zeros", zeros))) for zeros in (False, True)),
        *(Variant("dar", (("part", part),)) for part in (0.5, 0.25)),
        *(Variant("dmc", (("tau", tau),)) for tau in TAUS),
    ]
    both = [Variant("block-gtq", (("bits", 4),), sparse), Variant("dmc", (("tau", TAUS[0]),), sparse)]
    return (Variant(config=sparse), *alone, *both)


@dataclass(frozen=True, kw_only=True)
class Cell(KeptNumbers):
    """One (context, arm): as `memory.Cell`, of a rewrite and its settings."""

    context_tokens: int
    rewrite: str
    settings: dict[str, float]
    method: str
    budget: float | None


@dataclass(frozen=True)
class Plan(Documents):
    """A table's documents under arms that differ in what K and V are kept as, too."""

    variants: tuple[Variant, ...] = field(default_factory=variants)


class QuerySquares:
    """Sums, over a prompt's queries, of the squares of each RoPE pair (which a rotation does not change): what
    `rewrite.base.Layer.query_squares` is of."""

    def __init__(self, eps: Backend, spec: ModelSpec) -> None:
        self.backend, self.spec = eps, spec
        spec.require_full_attention("rewriting K and V")
        self.sums = np.zeros((spec.num_layers, spec.num_kv_heads, spec.head_dim // 2))
        self.counts = np.zeros(spec.num_layers, np.int64)

    def prompt(self, cache: Any, layer: int, q: Array, k: Array, length: int) -> None:
        """As `decode.observe.Watcher` has it."""
        (host,) = self.backend.to_host(cache, [q])
        squares = host.astype(np.float64).reshape(len(host), self.spec.num_kv_heads, -1, 2, self.spec.head_dim // 2)
        self.sums[layer] += (squares**2).sum(axis=(0, 2, 3))
        self.counts[layer] += len(host) * squares.shape[2]

    def means(self, layer: int) -> np.ndarray:
        """[Hkv, D/2] float64."""
        mean: np.ndarray = self.sums[layer] / max(int(self.counts[layer]), 1)
        return mean


def tally_document(session: Session, plan: Plan, kind: str, index: int) -> tuple[dict[int, KeptTally], bool]:
    """One document through every arm: (tallies by the arm's index, whether dense attention answered it)."""
    document, answer = document_of(session, plan, kind, index)
    dense, outcomes = run_arms(session, document, plan.variants)
    tallies = {}
    for key, one in outcomes.items():
        read = one.bytes_read(first=int(kind == "needle"))
        tallies[key] = tally(one.outcome, dense, one.bytes_kept, says(session, one.outcome, answer), read)
    return tallies, kind == "text" or says(session, dense, answer)


@dataclass(frozen=True, eq=False)
class Run:
    """One arm's decode over `layers`, and what a cache of its format would have read and kept."""

    outcome: Outcome
    layers: list[Rewritten]
    kv_token_bytes: int  # K and V of one token of one kv head of one layer, as they are
    summary_bytes: int  # kept

    @property
    def _plain_bytes(self) -> int:
        """Return the bytes of the prompt's rows, were they kept as they are."""
        return self.kv_token_bytes * sum(len(rows) for layer in self.layers for rows in layer.positions)

    def _decoded_bytes(self, num_steps: int) -> int:
        return num_steps * self.kv_token_bytes * sum(len(layer.positions) for layer in self.layers)

    @property
    def bytes_kept(self) -> int:
        """K, V and summaries at the end."""
        kept = sum(layer.num_bytes for layer in self.layers)
        return kept + self._decoded_bytes(len(self.outcome.records)) + self.summary_bytes

    def bytes_read(self, first: int = 0) -> int:
        """K, V and summaries read from step `first` on: tables whole, rows at the format's mean, decoded tokens as they
        are. EPS may have left some of these unread; they count as read."""
        rows = sum(layer.row_bytes for layer in self.layers) / self._plain_bytes
        read = 0.0
        for step, record in enumerate(self.outcome.records):
            if step >= first:
                of_decoded = (1 - rows) * min(self._decoded_bytes(step + 1), record.bytes_kv_read_est)
                read += rows * record.bytes_kv_read_est + of_decoded + record.bytes_summary_read
                read += sum(layer.table_bytes for layer in self.layers)
        return round(read)


def run_arms(session: Session, document: Document, variants: Iterable[Variant]) -> tuple[Outcome, dict[int, Run]]:
    """(dense, every arm by its index), along a text compared with dense."""
    spec, variants = session.spec, list(variants)
    squares = QuerySquares(session.backend, spec)
    prefix = session.prefix(document.prompt[:-1], observed=squares)
    dense = run_batch(session, [document], {DENSE: EpsConfig()}, [prefix])[DENSE]
    host = [[session.backend.to_numpy(array).astype(np.float32) for array in pair] for pair in prefix.keys_values]
    frequencies = inverse_frequencies(spec)
    layers = [Layer(k, v, frequencies, squares.means(index)) for index, (k, v) in enumerate(host)]
    found: dict[int, Run] = {}
    for name, settings in dict.fromkeys((variant.rewrite, variant.settings) for variant in variants):
        made = plain if name == OFF else REWRITES[name].rewrite
        rewritten = [made(layer, **dict(settings)) for layer in layers]
        for index, variant in enumerate(variants):
            if (variant.rewrite, variant.settings) == (name, settings):
                outcome = _decoded(session, document, variant.config, rewritten)
                if document.forced is not None:
                    outcome.against(dense)
                of_heads = spec.num_layers * spec.num_kv_heads
                rows = sum(len(one) for layer in rewritten for one in layer.positions) // of_heads
                kept = summaries_kept(session, variant.config, rows + len(outcome.records))
                found[index] = Run(outcome, rewritten, session.one_unit().kv_token_bytes, kept)
    return dense, {index: found[index] for index in range(len(variants))}


def plain(layer: Layer) -> Rewritten:
    """A layer as it is."""
    length, heads, dim = layer.keys.shape
    return in_place(layer.keys, layer.values, 2 * length * heads * dim * ELEMENT_BYTES)


def _decoded(session: Session, document: Document, config: EpsConfig, layers: list[Rewritten]) -> Outcome:
    eps, length = session.backend, len(document.prompt) - 1
    decoder, cache, pools = evicting(
        session, EvictionConfig(), config.cache_config, [len(document.prompt)], document.num_steps
    )

    def rows(layer: int, head: int) -> list[Array]:
        both = (layers[layer].keys[head], layers[layer].values[head])
        return [eps.from_numpy(np.ascontiguousarray(one[:, None]), "float32", session.device) for one in both]

    sequence, cache = decoder.place(cache, length, [layer.positions for layer in layers], rows)
    selection_config = config.selection_config if config.cache_config.enabled else None
    texts = document.forced is not None
    outcome, _ = decode(
        session, cache, pools, [document], selection_config, decoder=decoder, written=[sequence], keep_logits=texts
    )
    return outcome


def table_cells(plan: Plan, head_dim: int, results: Iterable[tuple[str, dict[int, KeptTally], bool]]) -> list[Cell]:
    """The table from every document's (kind, tallies, answered densely)."""
    return [
        Cell(context_tokens=plan.context_tokens, rewrite=variant.rewrite, settings=dict(variant.settings), **found)
        for variant, found in measured(plan, results)
    ]


def markdown(cells: list[Cell]) -> str:
    """A line an arm: bytes read and kept, KL with its interval, needles."""
    rows = []
    for one in cells:
        settings = ", ".join(f"{name} {value:g}" for name, value in one.settings.items())
        rows.append(["it is" if one.rewrite == OFF else f"`{one.rewrite}`", settings or "-", *shown(one)])
    return markdown_table(["kept as", "with", *COLUMNS], rows)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("rewrites", "experiments.kv_formats.run", __doc__)))
