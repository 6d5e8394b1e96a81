"""Sparse verification: drafts are judged by a pass over a part of the tokens, after Dustin (arXiv 2606.24957). Its text
is not the dense one: how often the two are equal, what is accepted and what is read is what is measured here.

One token set serves a whole pass, in all layers and heads: sinks, the latest tokens, and those of the largest beta *
(attention of the draft steps) + (1 - beta) * (running mean of what passes attended to), both on a few score heads. The
paper's abstract says so much; the rest is our reconstruction: the mean over score heads, their query heads and rows,
the running mean's decay, and score heads that give most of their mass outside sinks and latest tokens at a prompt's
end.

A baseline beside `decode.verified`, whose rounds it runs unchanged; drafts are EPS's. Evaluation only. Letters as
in `attention.protocol`; T tokens, N new rows of a pass.

    python scripts/experiments/sparse_verify/run.py --contexts 4096 --needles 10 --text-steps 64

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import markdown_table

from eps_core.attention.layer import collect
from eps_core.attention.protocol import Array
from eps_core.attention.stats import VerifyOutput
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.forward import Decoder
from eps_core.decode.layers import run_layers
from eps_core.decode.observe import Observed
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.evaluation.runner import GREEDY, Document, Outcome, decode
from eps_core.eviction.base import Head, PolicySpec, Rule, best
from experiments.grid.grid_verified import Measured, decode_both, needle_numbers
from experiments.methods.curves import Documents, document_of, says
from experiments.methods.run import main

WINDOW = 16  # of a prompt's last queries, which choose the score heads and begin the running mean


@dataclass(frozen=True)
class Sparse:
    """Settings of a sparse pass: `budget`, the share of the tokens, sinks and latest included; `beta`, what the drafts'
    attention counts against the passes'; `decay`, what a pass leaves of the running mean before it; `score_heads`, of
    all layers' kv heads."""

    budget: float = 0.25
    beta: float = 0.5
    decay: float = 0.5
    score_heads: int = 2
    num_sink_tokens: int = 4
    num_recent_tokens: int = 32

    def __post_init__(self) -> None:
        require(0 < self.budget <= 1, f"budget {self.budget} of a sparse pass is outside (0, 1]")
        for name in ("beta", "decay"):
            require(0 <= getattr(self, name) <= 1, f"{name} {getattr(self, name)} is outside 0 to 1")
        require(self.score_heads >= 1, f"score heads {self.score_heads}: use 1 or more")

    def choose(self, importance: np.ndarray) -> np.ndarray:
        """The rows [n] that a pass reads, ascending, of importance [T]."""
        num_tokens = len(importance)
        wanted = int(np.ceil(self.budget * num_tokens))
        rule = Rule(self.num_sink_tokens, self.num_recent_tokens)
        return best(Head(np.arange(num_tokens), num_tokens), importance, wanted, rule)


class SparseDecoder(Decoder):
    """A decoder of one sequence whose verify passes read what `Sparse.choose` says; its steps are dense. `saw_draft`
    must be the tap of what drafts."""

    def __init__(self, session: Session, sparse: Sparse, prefix: Prefix, observed: Observed, cache: Any) -> None:
        super().__init__(session.backend, session.decoder.model)
        self.spec.require_full_attention("sparse verification")
        self.sparse = sparse
        self.importance, heads = self._of_prompt(cache, prefix, observed)
        # layer -> its kv heads whose attention is looked at
        self.score_heads: dict[int, list[int]] = {}
        for layer, head in heads:
            self.score_heads.setdefault(layer, []).append(head)
        self._queries: dict[int, list[Array]] = {layer: [] for layer in self.score_heads}

    def _of_prompt(self, cache: Any, prefix: Prefix, observed: Observed) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """(importance [T] of a prompt's tokens, the score heads (layer, kv head)), of its last queries' weights."""
        spec, length = self.spec, len(prefix.tokens)
        given, outside = {}, {}
        for layer, (k, _) in enumerate(prefix.keys_values):
            for head in range(spec.num_kv_heads):
                keys = self._of_head(cache, k, head)
                window = observed.head(cache, layer, head, keys, np.arange(length), length).window
                assert window is not None
                mass = window.mean(axis=1)  # [R, T]
                middle = mass[:, self.sparse.num_sink_tokens : max(length - self.sparse.num_recent_tokens, 0)]
                given[layer, head], outside[layer, head] = mass.mean(axis=0), float(middle.sum(axis=1).max())
        heads = sorted(outside, key=lambda place: -outside[place])[: self.sparse.score_heads]
        mean = np.mean([given[place] for place in heads], axis=0) if heads else np.zeros(length)
        return mean, heads

    def saw_draft(self, layer: int, q: Array) -> None:
        """The queries [1, Hq, D] of a draft step in one layer."""
        if layer in self._queries:
            self._queries[layer].append(q)

    def verify(  # type: ignore[override]
        self, cache: Any, tokens: np.ndarray, slots: np.ndarray, rows: Any, *more: Any
    ) -> tuple[Any, VerifyOutput]:
        """`Decoder.verify` of one sequence over a part of what is cached and all of its own rows."""
        assert len(rows.lengths) == 1, "a sparse pass is of one sequence"
        eps, model, (length,), (num_rows,) = self.backend, self.model, rows.lengths.tolist(), rows.num_rows.tolist()
        self._check_tokens(tokens)
        before = length - num_rows
        known = np.zeros(before)
        known[: len(self.importance)] = self.importance[:before]
        drafts, key_bytes = self._draft_attention(cache, rows.table[0], before)
        mixed = known if drafts is None else self.sparse.beta * drafts + (1 - self.sparse.beta) * known
        index = np.concatenate([self.sparse.choose(mixed), np.arange(before, length)])
        kv, attended = [], []

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            nonlocal cache
            cache = eps.write_kv_tentative(cache, layer, k, v, slots)
            keys, values = (eps.take(cache, one, index) for one in eps.read_kv(cache, layer, rows.table[0], length))
            if layer in self.score_heads:
                seen = np.arange(len(index)) <= (len(index) - num_rows + np.arange(num_rows))[:, None]
                attended.append(self._on_score_heads(cache, layer, q, keys, seen))
            kv.append((k, v))
            return eps.attend_chunk(cache, q, keys, values)

        with model.scope():
            model = model.for_rows(cache.kernels, len(tokens))
            x = run_layers(model, model.embed(np.asarray(tokens)), model.rotation(rows.seen - 1), attention)
            _, (logits,) = collect(eps, cache, [], model.logits(x))
        now = np.zeros(length)
        now[index] = self._mean(attended)
        self.importance = (1 - self.sparse.decay) * now
        self.importance[:before] += self.sparse.decay * known
        token_bytes = self.spec.num_layers * self.spec.num_kv_heads * cache.spec.kv_token_bytes
        return cache, VerifyOutput(logits, key_bytes + len(index) * token_bytes, kv)

    def _draft_attention(self, cache: Any, table: np.ndarray, before: int) -> tuple[np.ndarray | None, int]:
        """Return the attention that the draft steps gave to the tokens that were there, over all of these [before],
        None of no draft, and the bytes of the score heads' keys that were read for it."""
        found, num_bytes = [], 0
        for layer, queries in self._queries.items():
            if queries:
                q = np.concatenate(self.backend.to_host(cache, queries)).astype(np.float32)
                asked = self.backend.from_numpy(q, self.model.dtype, self.model.device)
                keys, _ = self.backend.read_kv(cache, layer, table, before)
                found.append(self._on_score_heads(cache, layer, asked, keys, np.ones((len(q), before), bool)))
                num_bytes += before * len(self.score_heads[layer]) * cache.spec.k_token_bytes
                queries.clear()
        return (self._mean(found) if found else None), num_bytes

    def _on_score_heads(self, cache: Any, layer: int, q: Array, keys: Array, seen: np.ndarray) -> list[np.ndarray]:
        """Return [T] of each score head of a layer: the mean weight of keys [T, Hkv, D] over query heads and q
        [N, Hq, D]."""
        weights = self.backend.weights(cache, q, keys, seen)
        (host,) = self.backend.to_host(cache, [weights])
        return [host[head].astype(np.float64).mean(axis=(0, 1)) for head in self.score_heads[layer]]

    @staticmethod
    def _mean(layers: Sequence[list[np.ndarray]]) -> np.ndarray:
        """[T]: over the score heads of all layers, each counting once."""
        found: np.ndarray = np.mean([one for heads in layers for one in heads], axis=0)
        return found

    def _of_head(self, cache: Any, k: Array, head: int) -> Array:
        length, heads, dim = k.shape
        return self.backend.take(cache, k.reshape((length * heads, 1, dim)), np.arange(length) * heads + head)


def decode_sparse(
    session: Session, document: Document, config: EpsConfig, verify: SpeculativeConfig, sparse: Sparse
) -> Outcome:
    """Return how a document of two tokens or more goes on where sparse passes judge EPS's drafts, greedily."""
    observed = Observed(session.backend, session.spec, PolicySpec("of the score heads", window=WINDOW))
    prefix = session.prefix(document.prompt[:-1], observed=observed)
    cache, pool = session.cache(config.cache_config, len(document.prompt) + document.num_steps)
    sequence, cache = prefix.into(session.backend, cache, pool, document.num_steps)
    decoder, drafter = SparseDecoder(session, sparse, prefix, observed, cache), session.drafter(verify)
    drafter.tap = decoder.saw_draft
    try:
        outcome, _ = decode(
            session, cache, pool, [Document(document.prompt, document.num_steps)], config.selection_config,
            verify=verify, decoder=decoder, written=[sequence],
        )  # fmt: skip
    finally:
        drafter.tap = None
    return outcome


# ------------------------------------------------------------------------------------------------------------ the table

BUDGETS = (1.0, 0.5, 0.25, 0.1, 0.05)


@dataclass(frozen=True)
class Plan(Documents):
    """A table's documents under dense verification (None), then sparse passes."""

    variants: tuple[Sparse | None, ...] = (None, *(Sparse(budget) for budget in BUDGETS), Sparse(0.1, beta=1.0))
    config: EpsConfig = field(default_factory=lambda: EpsConfig.of(method="rq"))
    verify: SpeculativeConfig = SpeculativeConfig("tokens", draft=8)  # noqa: RUF009


Decodes = tuple[Outcome, list[Outcome]]  # of one document, densely and by every variant


def tally_document(session: Session, plan: Plan, kind: str, index: int) -> tuple[tuple[Decodes, list[bool]], bool]:
    """One document through every variant: ((decodes, which answer a needle), whether dense attention answered it)."""
    document, answer = document_of(session, plan, kind, index)
    prefix = session.prefix(document.prompt[:-1])
    dense, whole = decode_both(session, [document], [prefix], plan.config, plan.verify, GREEDY)
    outcomes = [
        whole if variant is None else decode_sparse(session, document, plan.config, plan.verify, variant)
        for variant in plan.variants
    ]
    right = [kind == "text" or says(session, one, answer) for one in (dense, *outcomes)]
    return ((dense, outcomes), right[1:]), right[0]


def table_cells(
    plan: Plan, head_dim: int, results: Iterable[tuple[str, tuple[Decodes, list[bool]], bool]]
) -> list[dict[str, Any]]:
    """The table from every document's (kind, decodes, answered densely): of each variant the numbers of
    `grid_verified.Measured` over the texts, and needles."""
    measured = [Measured(plan.seed) for _ in plan.variants]
    answered: list[list[tuple[bool, bool]]] = [[] for _ in plan.variants]
    for kind, ((dense, outcomes), now), before in results:
        for index, outcome in enumerate(outcomes):
            if kind == "text":
                measured[index].add(dense, outcome, 1)
            else:
                answered[index].append((before, now[index]))
    return [
        {
            "context_tokens": plan.context_tokens,
            "sparse": None if variant is None else asdict(variant),
            "draft": plan.verify.draft,
            "config": plan.config.to_dict(),
            **(one.numbers() if plan.num_texts else {}),
            **needle_numbers(pairs),
        }
        for variant, one, pairs in zip(plan.variants, measured, answered, strict=True)
    ]


def markdown(cells: list[dict[str, Any]]) -> str:
    """A line a variant: acceptance, tokens a round, bytes a token over dense, texts and needles as dense."""
    lines = []
    for one in cells:
        sparse, texts = one["sparse"], ["-"] * 4
        passes = f"{sparse['budget']:g} of the tokens, beta {sparse['beta']:g}" if sparse else "all tokens"
        if "acceptance" in one:
            texts = [f"{one['acceptance']:.3f}", f"{one['tokens_per_round']:.1f}", f"{one['bytes_ratio']:.3f}"]
            texts.append(f"{one['documents_equal']} of {one['documents']}")
        lines.append([passes, *texts, f"{one['needles_answered']} of {one['needles_dense']}"])
    head = ["verified by", "accepted", "tokens a round", "bytes", "texts equal to dense", "needles"]
    return markdown_table(head, lines)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("sparse-verify", "experiments.sparse_verify.run", __doc__)))
