"""Quality against bytes read and bytes kept: eviction policies and EPS, alone and together, on needles and real text.

A document is prefilled once, and told to one `Observed` for all policies; every arm decodes from what it keeps of that.
Bytes are of a bfloat16 cache over a dense one's; kept ones count K, V and the summaries stored of what is left.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from eps_core.config.bytes import summary_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.observe import Observed
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.evaluation.curves import Documents, Tally, needle, part_of, text_document
from eps_core.evaluation.runner import DENSE, Document, Outcome, decode, run_batch
from eps_core.evaluation.statistics import bootstrap_interval
from eps_core.evict.base import Facts
from eps_core.evict.keep import Keep
from eps_core.evict.table import POLICIES
from eps_core.files.records import Count, Name, Nats, Positive
from eps_core.tasks.needle import VALUE_DIGITS

SHARES = (0.5, 0.25, 0.125, 0.06)  # of the prompt that policies keep
EPS_BUDGETS = (0.02, 0.05, 0.1, 0.2)  # of what is left that EPS reads
EVERY = 16  # rows by which heads grow until they are brought back, so that texts of some tens of tokens see evictions
TOGETHER = ("snapkv", "h2o", "keydiff")  # policies that EPS is set upon, at the larger shares


@dataclass(frozen=True)
class Arm:
    """What is kept, and how that is read."""

    keep: Keep = Keep()  # noqa: RUF009
    config: EpsConfig = EpsConfig()  # noqa: RUF009


def arms() -> tuple[Arm, ...]:
    """EPS alone, every policy alone at every share, and EPS over some of them."""
    gated = [EpsConfig.of(method="rq", budget=budget) for budget in EPS_BUDGETS]
    alone = [Arm(config=config) for config in gated]
    policies = [Arm(Keep(name, share, EVERY)) for name in POLICIES for share in SHARES]
    both = [Arm(Keep(name, share, EVERY), config) for name in TOGETHER for share in SHARES[:2] for config in gated]
    return (*alone, *policies, *both)


@dataclass(frozen=True)
class Cell:
    """One (context, arm): bytes read along the text and kept at its end, over dense; `kl_mean` in nats over
    `num_positions` positions, its 95 % interval over documents; needles answered exactly."""

    context_tokens: Count
    policy: Name
    kept_share: float
    method: Name
    budget: float | None
    bytes_ratio: Positive | None
    needle_bytes_ratio: Positive | None
    bytes_kept_ratio: Positive | None
    kl_mean: Nats | None
    kl_low: Nats | None
    kl_high: Nats | None
    kl_max: Nats | None
    top1_agreement: float | None
    num_positions: int
    needles_answered: int
    num_needles: int
    needles_dense: int


@dataclass(frozen=True)
class Plan(Documents):
    """A table's documents under arms that differ in what they keep, too."""

    arms: tuple[Arm, ...] = field(default_factory=arms)


@dataclass
class Kept(Tally):
    """A `Tally`, and what was kept."""

    bytes_kept: int = 0
    bytes_whole: int = 0


def tally_document(session: Session, plan: Plan, kind: str, index: int) -> tuple[dict[int, Kept], bool]:
    """One document through every arm: (tallies by the arm's index, whether dense attention answered it)."""
    if kind == "text":
        document = text_document(session, plan.context_tokens, plan.text_steps, plan.seed, index)
        answer: list[int] = []
    else:
        document, answer = needle(session, plan, index)
    outcomes = run_arms(session, document, plan.arms)
    dense = outcomes.pop(DENSE)
    tallies = {}
    for key, (outcome, kept) in outcomes.items():
        tally = tallies[key] = Kept(bytes_kept=kept, bytes_whole=outcome.records[-1].bytes_kv_dense)
        if kind == "text":
            assert outcome.kl is not None and outcome.agree is not None
            tally.divergences = outcome.kl[:, 0].tolist()
            tally.documents = [float(np.mean(tally.divergences))]
            tally.agreements = outcome.agree[:, 0].tolist()
            tally.bytes_read, tally.bytes_dense = outcome.bytes_read()
        else:
            tally.answered = int(outcome.said[0][:VALUE_DIGITS] == answer)
            tally.needle_bytes_read, tally.needle_bytes_dense = outcome.bytes_read(first=1)
    return tallies, kind == "text" or dense[0].said[0][:VALUE_DIGITS] == answer


def run_arms(session: Session, document: Document, arms: Iterable[Arm]) -> dict[Any, tuple[Outcome, int]]:
    """(outcome, bytes of K, V and summaries kept at its end) of `DENSE` and of every arm by its index; along a text
    compared with dense."""
    spec, texts = session.spec, document.forced is not None
    observed = Observed(session.backend, spec, union(arm.keep for arm in arms))
    prefix = session.prefix(document.prompt[:-1], observed=observed)
    queries: list[list[Any]] = [[] for _ in range(spec.num_layers)]
    session.decoder.tap = lambda layer, q: queries[layer].append(session.backend.to_numpy(q))
    try:
        dense = run_batch(session, [document], {DENSE: EpsConfig()}, [prefix])[DENSE]
    finally:
        session.decoder.tap = None
    observed.future = _future(session, prefix, queries)
    found: dict[Any, tuple[Outcome, int]] = {DENSE: (dense, dense.records[-1].bytes_kv_dense)}
    plain = {index: arm.config for index, arm in enumerate(arms) if not arm.keep.enabled}
    for index, outcome in run_batch(session, [document], plain, [prefix], dense if texts else None).items():
        last = outcome.records[-1]
        found[index] = outcome, last.bytes_kv_kept + _summaries(session, plain[index], sum(last.lengths))
    for index, arm in enumerate(arms):
        if arm.keep.enabled:
            found[index] = _evicted(session, document, arm, prefix, observed, dense if texts else None)
    return found


def _evicted(
    session: Session, document: Document, arm: Arm, prefix: Prefix, observed: Observed, dense: Outcome | None
) -> tuple[Outcome, int]:
    decoder, cache, pools = session.evicting(arm.keep, arm.config.store, [len(document.prompt)], document.num_steps)
    sequence, cache = decoder.adopt(cache, prefix.keys_values, len(prefix.tokens), observed.of(arm.keep.facts))
    read = arm.config.read if arm.config.store.enabled else None
    outcome, _ = decode(
        session, cache, pools, [document], read, decoder=decoder, written=[sequence], keep_logits=dense is not None
    )
    if dense is not None:
        outcome.against(dense)
    rows = sequence.num_rows / (session.spec.num_layers * session.spec.num_kv_heads)
    return outcome, outcome.records[-1].bytes_kv_kept + _summaries(session, arm.config, round(rows))


def _summaries(session: Session, config: EpsConfig, num_tokens: int) -> int:
    spec = session.spec
    if not config.store.enabled:
        return 0
    return summary_bytes(config.store, spec.num_layers, spec.num_kv_heads, spec.head_dim, num_tokens)


def _future(session: Session, prefix: Prefix, queries: list[list[np.ndarray]]) -> list[np.ndarray]:
    """[L] of [Hkv, R, T]: what queries [1, Hq, D] of a dense decode give to a prompt's tokens, among these alone."""
    eps, found = session.backend, []
    cache, _ = session.cache(EpsConfig().store, 1)
    for (k, _), layer in zip(prefix.keys_values, queries, strict=True):
        q = eps.from_numpy(np.concatenate(layer).astype(np.float32), "float32", session.device)
        given = eps.weights(cache, q, k, np.ones((len(layer), len(k)), bool))
        (host,) = eps.to_host(cache, [given.sum(axis=2)])
        found.append(host.astype(np.float64))
    return found


def union(keeps: Iterable[Keep]) -> Facts:
    """What must be gathered for all of these."""
    every = [keep.facts for keep in keeps if keep.enabled]
    whole = Facts("several policies")
    for facts in every:
        kinds = {name: getattr(whole, name) or getattr(facts, name) for name in vars(whole) if name != "window"}
        whole = replace(whole, **kinds | {"window": max(whole.window, facts.window), "source": whole.source})
    return whole


def table_cells(plan: Plan, head_dim: int, results: Iterable[tuple[str, dict[int, Kept], bool]]) -> list[Cell]:
    """The table from every document's (kind, tallies, answered densely)."""
    totals = {index: Kept() for index in range(len(plan.arms))}
    needles_dense = 0
    for kind, tallies, dense in results:
        needles_dense += kind == "needle" and dense
        for index, tally in tallies.items():
            totals[index].add(tally)
    cells = []
    for index, arm in enumerate(plan.arms):
        total, gated = totals[index], arm.config.store.enabled
        interval = bootstrap_interval(total.documents, plan.seed) if total.documents else None
        low, high = interval or (None, None)
        cells.append(
            Cell(
                context_tokens=plan.context_tokens,
                policy=arm.keep.policy,
                kept_share=arm.keep.share,
                method=arm.config.store.method,
                budget=arm.config.read.budget if gated else None,
                bytes_ratio=part_of(total.bytes_read, total.bytes_dense),
                needle_bytes_ratio=part_of(total.needle_bytes_read, total.needle_bytes_dense),
                bytes_kept_ratio=part_of(total.bytes_kept, total.bytes_whole),
                kl_mean=float(np.mean(total.divergences)) if total.divergences else None,
                kl_low=low,
                kl_high=high,
                kl_max=float(np.max(total.divergences)) if total.divergences else None,
                top1_agreement=float(np.mean(total.agreements)) if total.agreements else None,
                num_positions=plan.num_texts * plan.text_steps,
                needles_answered=total.answered,
                num_needles=plan.num_needles,
                needles_dense=needles_dense,
            )
        )
    return cells


def markdown(cells: list[Cell]) -> str:
    """A line an arm: bytes read and kept, KL with its interval, needles."""
    rows = ["| kept by | share | read by | budget | bytes read | bytes kept | KL (95 %) | needles |", "|---" * 8 + "|"]
    for one in cells:
        interval = "-" if one.kl_low is None else f"{one.kl_mean:.4f} ({one.kl_low:.4f} to {one.kl_high:.4f})"
        numbers = ["-" if x is None else f"{x:.3f}" for x in (one.bytes_ratio, one.bytes_kept_ratio)]
        read = "all" if one.budget is None else f"`{one.method}`"
        kept = "all" if one.policy == "off" else f"`{one.policy}`"
        rows.append(
            f"| {kept} | {one.kept_share:g} | {read} | {'-' if one.budget is None else one.budget} | "
            f"{' | '.join(numbers)} | {interval} | {one.needles_answered} of {one.needles_dense} |"
        )
    return "\n".join(rows)


def records(cells: list[Cell]) -> list[dict]:
    return [{"type": "cell", **asdict(cell)} for cell in cells]
