"""Quality against bytes read and kept: codes of K and V, eviction policies and EPS, alone and together, on needles
and real text.

A document is prefilled once, and told to one `Observed` for all policies; every arm decodes from what it keeps of that.
Bytes are over those of a dense bfloat16 cache; kept ones count K, V and the summaries stored of what is left.

    python scripts/experiments/memory/run.py --contexts 4096 8192 --needles 50 --text-steps 48

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import markdown_table

from eps_core.cli.numbers import PART, argument
from eps_core.config.bytes import summary_bytes
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import as_given
from eps_core.decode.evicting import evicting
from eps_core.decode.observe import Observed
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.runner import DENSE, Document, Outcome, decode, run_batch
from eps_core.eviction.base import Kept, PolicySpec
from eps_core.eviction.config import EvictionConfig
from eps_core.eviction.table import POLICIES
from experiments.linear.states import State, decode_state
from experiments.methods.curves import Documents, Numbers, Tally, added, document_of, numbers, part_of, says
from experiments.methods.run import main

SHARES = (0.5, 0.25, 0.125, 0.06)  # of the prompt that policies keep
EPS_BUDGETS = (0.02, 0.05, 0.1, 0.2)  # of what is left that EPS reads
EVERY = 16  # rows by which heads grow until they are brought back, so that texts of some tens of tokens see evictions
SHARED = tuple(name for name, module in POLICIES.items() if not module.SPEC.prompt)  # policies that keep a share of it
TOGETHER = ("snapkv", "rkv", "keydiff")  # policies that EPS is set upon
OVER = (0.02, 0.1)  # its budgets there
CODES = ((8, 8), (8, 4), (4, 4))  # bits of K and of V
COLUMNS = ("read by", "budget", "bytes read", "bytes kept", "KL (95 %)", "needles")


@dataclass(frozen=True)
class Variant:
    """The rows kept, in how many bits, and how they are read; or the state that takes their place."""

    keep: EvictionConfig = EvictionConfig()  # noqa: RUF009
    config: EpsConfig = EpsConfig()  # noqa: RUF009
    kv_bits: tuple[int, int] = (16, 16)
    state: State | None = None


def variants(shares: Sequence[float] = SHARES, policies: Sequence[str] = SHARED) -> tuple[Variant, ...]:
    """EPS alone, codes alone, each of the policies, which keep a share of the prompt, alone at every share, and what of
    these goes together: EPS over codes, EPS over policies that keep the largest share, EPS over policies over codes."""
    sparse = {budget: EpsConfig.of(method="rq", budget=budget) for budget in EPS_BUDGETS}
    over = [sparse[budget] for budget in OVER]
    kept = [EvictionConfig(name, max(shares), EVERY) for name in TOGETHER if name in policies]
    return (
        *(Variant(config=config) for config in sparse.values()),
        *(Variant(kv_bits=bits) for bits in CODES),
        *(Variant(EvictionConfig(name, share, EVERY)) for name in policies for share in shares),
        *(Variant(config=config, kv_bits=bits) for bits in CODES for config in over),
        *(Variant(keep, config) for keep in kept for config in over),
        *(
            Variant(keep, config, bits)
            for keep in kept
            for bits in (CODES[0], CODES[-1])
            for config in (EpsConfig(), *over)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class KeptNumbers(Numbers):
    """As `Numbers`, and the bytes kept at a document's end over dense."""

    bytes_kept_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Cell(KeptNumbers):
    """One (context, arm)."""

    context_tokens: int
    policy: str
    kept_share: float
    kv_bits: tuple[int, int]
    method: str
    budget: float | None
    state: State | None = None


@dataclass(frozen=True)
class Plan(Documents):
    """A table's documents under arms that differ in what they keep, too."""

    variants: tuple[Variant, ...] = field(default_factory=variants)


def arguments(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Add the flags of this table. Returns those whose change must not land on the default file of results."""
    parser.add_argument("--shares", type=argument(PART), nargs="+", default=SHARES, help="of the prompt that is kept")
    parser.add_argument("--policies", choices=SHARED, nargs="+", default=SHARED, help="(all of them)")
    return "shares", "policies"


def plan(args: argparse.Namespace, **common: Any) -> Plan:
    """Return the plan of this table from its parsed flags; `common`: the fields of `Documents`."""
    return Plan(**common, variants=variants(tuple(dict.fromkeys(args.shares)), tuple(dict.fromkeys(args.policies))))


@dataclass
class KeptTally(Tally):
    """A `Tally`, and what was kept."""

    bytes_kept: int = 0
    bytes_whole: int = 0


def tally_document(session: Session, plan: Plan, kind: str, index: int) -> tuple[dict[int, KeptTally], bool]:
    """One document through every arm: (tallies by the arm's index, whether dense attention answered it)."""
    document, answer = document_of(session, plan, kind, index)
    outcomes = run_arms(session, document, plan.variants)
    dense, _ = outcomes.pop(DENSE)
    tallies = {
        key: tally(outcome, dense, kept, says(session, outcome, answer)) for key, (outcome, kept) in outcomes.items()
    }
    return tallies, kind == "text" or says(session, dense, answer)


def tally(outcome: Outcome, dense: Outcome, kept: int, right: bool, read: int | None = None) -> KeptTally:
    """Return the tally of an outcome that kept so many bytes: along a text compared with dense, else an answer, `right`
    or not; `read`: bytes read, where others count than its records'. A needle's are of the steps after the first."""
    found = KeptTally(bytes_kept=kept, bytes_whole=dense.records[-1].bytes_kv_dense)
    if outcome.kl is not None:
        found.divergences, found.agreements = outcome.along_text()
        found.documents = [float(np.mean(found.divergences))]
        found.bytes_read = outcome.bytes_read()[0] if read is None else read
        found.bytes_dense = dense.bytes_read()[1]
    else:
        found.answered = int(right)
        found.needle_bytes_read = outcome.bytes_read(first=1)[0] if read is None else read
        found.needle_bytes_dense = dense.bytes_read(first=1)[1]
    return found


def run_arms(session: Session, document: Document, variants: Iterable[Variant]) -> dict[Any, tuple[Outcome, int]]:
    """(outcome, bytes of K, V and summaries kept at its end) of `DENSE` and of every variant by its index; along a text
    compared with dense."""
    spec, texts = session.spec, document.forced is not None
    observed = Observed(session.backend, spec, union(variant.keep for variant in variants))
    prefix = session.prefix(document.prompt[:-1], observed=observed)
    queries: list[list[Any]] = [[] for _ in range(spec.num_layers)]
    session.decoder.tap = lambda layer, q: queries[layer].append(session.backend.to_numpy(q))
    try:
        dense = run_batch(session, [document], {DENSE: EpsConfig()}, [prefix])[DENSE]
    finally:
        session.decoder.tap = None
    observed.future = _future(session, prefix, queries)
    found: dict[Any, tuple[Outcome, int]] = {DENSE: (dense, dense.records[-1].bytes_kv_dense)}
    whole: dict[tuple[int, int], dict[int, EpsConfig]] = {}  # arms that keep all tokens, by bits
    chosen: dict[EvictionConfig, Kept] = {}
    for index, variant in enumerate(variants):
        coded = session if variant.kv_bits == session.kv_bits else replace(session, kv_bits=variant.kv_bits)
        if variant.state is not None:
            outcome = decode_state(session, document, variant.state, prefix)
            if texts:
                outcome.against(dense)
            found[index] = outcome, outcome.records[-1].bytes_kv_kept
        elif variant.keep.enabled:
            found[index] = _evicted(coded, document, variant, prefix, observed, dense if texts else None, chosen)
        else:
            whole.setdefault(variant.kv_bits, {})[index] = variant.config
    for bits, configs in whole.items():
        coded = session if bits == session.kv_bits else replace(session, kv_bits=bits)
        for index, outcome in run_batch(coded, [document], configs, [prefix], dense if texts else None).items():
            last = outcome.records[-1]
            found[index] = outcome, last.bytes_kv_kept + summaries_kept(session, configs[index], sum(last.lengths))
    return found


def _evicted(
    session: Session, document: Document, variant: Variant, prefix: Prefix, observed: Observed, dense: Outcome | None,
    chosen: dict[EvictionConfig, Kept],
) -> tuple[Outcome, int]:  # fmt: skip
    """Return the outcome of a variant that evicts; `chosen`: what those before it kept of the prompt, now this one's,
    too."""
    decoder, cache, pools = evicting(
        session, variant.keep, variant.config.cache_config, [len(document.prompt)], document.num_steps
    )
    prompt, seen = (prefix.keys_values, len(prefix.tokens)), observed.of(variant.keep.policy_spec)
    if variant.keep not in chosen:  # whatever reads it, in whatever bits: the prompt is chosen from as it was
        chosen[variant.keep] = decoder.choose(cache, *prompt, seen)
    sequence, cache = decoder.adopt(cache, *prompt, seen, chosen[variant.keep])
    selection_config = variant.config.selection_config if variant.config.cache_config.enabled else None
    outcome, _ = decode(
        session, cache, pools, [document], selection_config, decoder=decoder, written=[sequence],
        keep_logits=dense is not None,
    )  # fmt: skip
    if dense is not None:
        outcome.against(dense)
    rows = sequence.num_rows / (session.spec.num_layers * session.spec.num_kv_heads)
    return outcome, outcome.records[-1].bytes_kv_kept + summaries_kept(session, variant.config, round(rows))


def summaries_kept(session: Session, config: EpsConfig, num_tokens: int) -> int:
    """Bytes stored besides K and V of a sequence of so many tokens."""
    spec = session.spec
    if not config.cache_config.enabled:
        return 0
    return summary_bytes(config.cache_config, spec.num_layers, spec.num_kv_heads, spec.head_dim, num_tokens)


def _future(session: Session, prefix: Prefix, queries: list[list[np.ndarray]]) -> list[np.ndarray]:
    """[L] of [Hkv, R, T]: what queries [1, Hq, D] of a dense decode give to a prompt's tokens, among these alone."""
    eps, found = session.backend, []
    cache, _ = session.cache(EpsConfig().cache_config, 1)
    for (k, _), layer in zip(prefix.keys_values, queries, strict=True):
        q = eps.from_numpy(np.concatenate(layer).astype(np.float32), "float32", session.device)
        given = eps.weights(cache, q, k, np.ones((len(layer), len(k)), bool))
        (host,) = eps.to_host(cache, [given.sum(axis=2)])
        found.append(host.astype(np.float64))
    return found


def union(keeps: Iterable[EvictionConfig]) -> PolicySpec:
    """Return the statistics to gather for all of these."""
    every = [keep.policy_spec for keep in keeps if keep.enabled]
    whole = PolicySpec("several policies")
    for policy_spec in every:
        kinds = {name: getattr(whole, name) or getattr(policy_spec, name) for name in vars(whole) if name != "window"}
        whole = replace(whole, **kinds | {"window": max(whole.window, policy_spec.window), "source": whole.source})
    return whole


def table_cells(plan: Plan, head_dim: int, results: Iterable[tuple[str, dict[int, KeptTally], bool]]) -> list[Cell]:
    """The table from every document's (kind, tallies, answered densely)."""
    return [
        Cell(
            context_tokens=plan.context_tokens,
            policy=variant.keep.policy,
            kept_share=variant.keep.share if variant.keep.enabled else 1.0,
            kv_bits=variant.kv_bits,
            state=variant.state,
            **found,
        )
        for variant, found in measured(plan, results)
    ]


def measured(
    plan: Any, results: Iterable[tuple[str, dict[int, KeptTally], bool]]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (variant, its method, its budget and the values of `KeptNumbers`)."""
    totals, needles_dense = added({index: KeptTally() for index in range(len(plan.variants))}, results)
    for index, variant in enumerate(plan.variants):
        config, total = variant.config, totals[index]
        yield (
            variant,
            {
                "method": config.cache_config.method,
                "budget": config.selection_config.budget if config.cache_config.enabled else None,
                "bytes_kept_ratio": part_of(total.bytes_kept, total.bytes_whole),
                **numbers(plan, total, needles_dense),
            },
        )


def markdown(cells: list[Cell]) -> str:
    """A line an arm: bytes read and kept, KL with its interval, needles."""
    rows = []
    for one in cells:
        kept = "all" if one.policy == "off" else f"`{one.policy}`"
        if one.state is not None:
            kept = f"a state, `{one.state.features}` {one.state.num_features or 'D'}, gamma {one.state.gamma:g}"
        rows.append([kept, f"{one.kept_share:g}", as_given(one.kv_bits), *shown(one)])
    return markdown_table(["kept by", "share", "bits", *COLUMNS], rows)


def shown(one: Any) -> list[str]:
    """A cell's COLUMNS."""
    interval = "-" if one.kl_mean is None else f"{one.kl_mean:.4f}"
    if one.kl_low is not None:  # of several texts
        interval += f" ({one.kl_low:.4f} to {one.kl_high:.4f})"
    ratios = ["-" if x is None else f"{x:.3f}" for x in (one.bytes_ratio, one.bytes_kept_ratio)]
    read = "all" if one.budget is None else f"`{one.method}`"
    budget = "-" if one.budget is None else str(one.budget)
    return [read, budget, *ratios, interval, f"{one.needles_answered} of {one.needles_dense}"]


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("memory", "experiments.memory.run", __doc__)))
