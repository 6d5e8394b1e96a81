"""Quality against bytes: methods at equal total bytes, on needles and on the decode of real text.

Every variant of one document shares one dense prefill; its K and V are written into the variant's own cache, so that
only the decode differs, which is all that EPS changes. Bytes are of a bfloat16 cache and count the summaries that
scoring reads. KL is measured token by token along the decode path, never by a teacher-forced prefill, which would
be dense.
"""

import argparse
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
from shared import answer_steps, answers, markdown_table

from eps_core.cli.numbers import PART, argument
from eps_core.config.bytes import scoring_bytes
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.evaluation.runner import DENSE, Document, Outcome, run_document
from eps_core.evaluation.statistics import bootstrap_interval
from eps_core.models.chat import in_chat, render_messages
from eps_core.reference.selection import sink_and_recent
from eps_core.summaries.table import method_spec
from eps_core.tasks.needle import VALUE_DIGITS
from eps_core.tasks.questions import text_window
from experiments.methods.texts import conversation, has_template, haystack, needle_tokens, num_topics, plain_chat

Key = tuple[int, float]  # index of a variant, byte budget
BYTE_BUDGETS = (0.04, 0.055, 0.07, 0.10, 0.14, 0.20, 0.28)
# the default, what it is held against, and the best that groups of their size can do: a first look at a model. The
# second oracle has rq's narrow sink and recent tokens, which suit whatever ranks well and ruin what does not.
HEADLINE = (
    EpsConfig.of(method="rq"),
    EpsConfig.of(method="box", group_size=16),
    EpsConfig.of(method="meanstd", group_size=16),
    EpsConfig.of(method="oracle", group_size=16),
    EpsConfig.of(method="oracle", group_size=16, num_sink_tokens=4, num_recent_tokens=32),
)
DEFAULT, BOX, MEANSTD, ORACLE, NARROW_ORACLE = HEADLINE
# the methods of the table: each at its own group size, box and meanstd at 16, what chance finds, and what is best
# possible
ARMS = (
    EpsConfig.of(method="jl"),
    EpsConfig.of(method="1pc"),
    EpsConfig.of(method="fd"),
    EpsConfig.of(method="norm"),
    BOX,
    MEANSTD,
    EpsConfig.of(method="ball"),
    EpsConfig.of(method="moments"),
    EpsConfig.of(method="rq", rescore=0.0, num_sink_tokens=16, num_recent_tokens=128),
    DEFAULT,
    EpsConfig.of(method="random", group_size=16),
    ORACLE,
    NARROW_ORACLE,
    EpsConfig.of(method="oracle", group_size=128),
)
# what each part of the default is worth
PARTS = (
    DEFAULT,
    DEFAULT.replace(group_size=2),
    DEFAULT.replace(mean_tokens=32),
    DEFAULT.replace(cascade=()),
    DEFAULT.replace(cascade=(0.25,)),
    DEFAULT.replace(rescore=0.0),
    DEFAULT.replace(rescore=0.25),
)
SETS = {
    "methods": ARMS, "parts": PARTS, "headline": HEADLINE, "default": (DEFAULT,),
    "others": tuple(variant for variant in ARMS if variant not in HEADLINE),  # where the headline is measured already
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The measured part of a table's cell: `kl_mean` in nats over `num_positions` positions, `kl_low` and `kl_high` its
    95 % interval over documents, needles answered exactly.

    `bytes_ratio` is what was really read along the text, K, V and summaries, over dense, `needle_bytes_ratio` the same
    of the needle documents.
    """

    bytes_ratio: float | None
    needle_bytes_ratio: float | None
    kl_mean: float | None
    kl_low: float | None
    kl_high: float | None
    kl_max: float | None
    top1_agreement: float | None
    num_positions: int
    needles_answered: int | None
    num_needles: int
    needles_dense: int


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The fields that make cells points of one curve."""

    method: str
    group_size: int
    sink_recent: tuple[int, int]
    policy: str
    bits: int | None
    rescore: float | None
    mean_tokens: int | None
    cascade: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Cell(Arm, Numbers):
    """One (method, context, byte budget); None in the figures where the budget has no room for the sink and recent
    tokens, the summaries and one group more."""

    context_tokens: int
    dim: int | None
    byte_budget: float | None


def budget_groups(config: EpsConfig, length: int, num_steps: int, head_dim: int, fraction: float) -> int | None:
    """Groups (sink and recent tokens included) whose bytes, with all summaries, are at most `fraction` of a dense
    bfloat16 read of `length` tokens. None where the sink and recent tokens of any of the next `num_steps` steps leave
    no group to choose: such a cell would measure the sink and recent tokens, not the method."""
    kv_token_bytes = 2 * head_dim * 2

    def cost(groups: int) -> int:  # scoring reads more where more is selected
        scoring = scoring_bytes(config.replace(top_pages=groups), head_dim, [length])
        return scoring + groups * config.cache_config.S * kv_token_bytes

    groups = bisect_right(
        range(1, length // config.cache_config.S + 1), fraction * length * kv_token_bytes + 1e-6, key=cost
    )
    always_selected = max(int(sink_and_recent(config, length + step).sum()) for step in range(num_steps + 1))
    return groups if groups > always_selected else None


@dataclass(frozen=True)
class Documents:
    """The documents of one table at one context, in tokens of the model's tokenizer; documents are independent of each
    other and of their order."""

    context_tokens: int
    num_needles: int = 50
    num_texts: int = 6
    text_steps: int = 64
    seed: int = 0
    text: str = "code"  # kind of it: see `texts.KINDS`
    chat: bool = False  # needles are asked in the model's chat template

    def documents(self) -> list[tuple[str, int]]:
        return [("text", i) for i in range(self.num_texts)] + [("needle", i) for i in range(self.num_needles)]


@dataclass(frozen=True)
class Plan(Documents):
    """A table's documents under variants that differ in how they read."""

    variants: tuple[EpsConfig, ...] = ARMS
    byte_budgets: tuple[float, ...] = BYTE_BUDGETS

    def configs(self, head_dim: int) -> dict[Key, EpsConfig]:
        """Each variant with the groups that a byte budget buys, without an entry where it buys none beyond the
        sink and recent tokens."""
        found = {}
        for arm_index, variant in enumerate(self.variants):
            for fraction in self.byte_budgets:
                steps = max(self.text_steps, VALUE_DIGITS)
                groups = budget_groups(variant, self.context_tokens, steps, head_dim, fraction)
                if groups is not None:
                    found[arm_index, fraction] = variant.replace(top_pages=groups)
        return found


def arguments(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Add the flags of tables of methods. Returns those whose change must not land on a default file of results."""
    parser.add_argument(
        "--variants",
        "--arms",
        choices=tuple(SETS),
        default="methods",
        help="all methods, the default without or with other parts, a first look, the default alone, or the methods "
        "beside the first look",
    )
    parser.add_argument("--budgets", type=argument(PART), nargs="+", default=BYTE_BUDGETS)
    return ()


def plan(args: argparse.Namespace, **common: Any) -> Plan:
    """Return the plan of a table of methods from its parsed flags; `common`: the fields of `Documents`."""
    return Plan(**common, variants=SETS[args.variants], byte_budgets=tuple(args.budgets))


@dataclass
class Tally:
    """The totals of one document, or several, for one variant and budget."""

    divergences: list[float] = field(default_factory=list)
    documents: list[float] = field(default_factory=list)  # mean divergence of each text
    agreements: list[bool] = field(default_factory=list)
    answered: int = 0
    bytes_read: int = 0
    bytes_dense: int = 0
    needle_bytes_read: int = 0
    needle_bytes_dense: int = 0

    def add(self, other: "Tally") -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def tally_document(session: Session, plan: Plan, kind: str, index: int) -> tuple[dict[Key, Tally], bool]:
    """One document through every variant and budget: (tallies, whether dense attention answered it)."""
    return (_text if kind == "text" else _needle)(session, plan, index)


def _text(session: Session, plan: Plan, index: int) -> tuple[dict[Key, Tally], bool]:
    """A window of held-out text, decoded along its own tokens."""
    document, _ = document_of(session, plan, "text", index)
    found = run_document(session, document, plan.configs(session.spec.head_dim))
    del found[DENSE]
    tallies = {}
    for key, outcome in found.items():
        divergences, agree = outcome.along_text()
        tallies[key] = Tally(divergences, [float(np.mean(divergences))], agree, 0, *outcome.bytes_read())
    return tallies, True


def text_document(
    session: Session, context_tokens: int, steps: int, seed: int, index: int, text: str = "code"
) -> Document:
    """Window `index` of text of a kind (see `texts.KINDS`), to be decoded along its last `steps` tokens; of chat
    the start of a conversation, in the model's chat template where it has one."""
    rng, num_tokens = np.random.default_rng([seed, 1, index]), context_tokens + steps
    if text != "chat":
        tokens = text_window(haystack(text), session.encode, num_tokens, rng)
    else:
        messages = conversation(rng.permutation(num_topics()).tolist())
        templated = has_template(session.path)
        said = render_messages(session.path, messages) if templated else plain_chat(messages)
        tokens = session.encode(said, special=not templated, most_tokens=num_tokens)[:num_tokens]
    given = f"a document has {len(tokens)} tokens and {num_tokens} were asked for"
    require(len(tokens) == num_tokens, f"{given}: use another context")
    return Document.along(tokens, steps)


def needle(session: Session, plan: Documents, index: int) -> tuple[Document, str]:
    """(needle document, to be answered greedily; its answer): depths spread evenly, 0 to 3 distractors."""
    depth, seed = (index + 0.5) / plan.num_needles, plan.seed + 3_000_000 + index
    ask = in_chat(session.path, session.encode) if plan.chat else None
    tokens, answer = needle_tokens(
        haystack(plan.text), plan.context_tokens, session.encode, seed, depth, index % 4, ask
    )
    # bytes are of the steps that the answer's own tokens are fed to
    return Document(tokens, answer_steps(session.encode, answer, VALUE_DIGITS) + 1), answer


def document_of(session: Session, plan: Documents, kind: str, index: int) -> tuple[Document, str]:
    """(document of a table, the answer to its needle, none of text)"""
    if kind == "needle":
        return needle(session, plan, index)
    return text_document(session, plan.context_tokens, plan.text_steps, plan.seed, index, plan.text), ""


def says(session: Session, outcome: Outcome, answer: str) -> bool:
    """Return whether the one document of an outcome is continued with the answer to its needle."""
    return answers(session.decode(outcome.said[0]), answer)


def _needle(session: Session, plan: Plan, index: int) -> tuple[dict[Key, Tally], bool]:
    document, answer = needle(session, plan, index)
    found = run_document(session, document, plan.configs(session.spec.head_dim))
    answered = {key: says(session, outcome, answer) for key, outcome in found.items()}
    dense = answered.pop(DENSE)
    tallies = {}
    for key, right in answered.items():
        read, full = found[key].bytes_read(first=1)
        tallies[key] = Tally(answered=int(right), needle_bytes_read=read, needle_bytes_dense=full)
    return tallies, dense


def table_cells(plan: Plan, head_dim: int, results: Iterable[tuple[str, dict[Key, Tally], bool]]) -> list[Cell]:
    """The table from every document's (kind, tallies, answered densely)."""
    totals, needles_dense = added({key: Tally() for key in plan.configs(head_dim)}, results)
    return [
        Cell(
            context_tokens=plan.context_tokens,
            dim=variant.cache_config.dim,
            byte_budget=point,
            **arm_of(variant),
            **numbers(plan, totals.get((index, point)), needles_dense),
        )
        for index, variant in enumerate(plan.variants)
        for point in plan.byte_budgets
    ]


def added(totals: dict[Any, Any], results: Iterable[tuple[str, dict[Any, Any], bool]]) -> tuple[dict[Any, Any], int]:
    """(`totals`, empty tallies by key, with those of all documents added; needles that dense attention answers)"""
    needles_dense = 0
    for kind, tallies, dense in results:
        needles_dense += kind == "needle" and dense
        for key, tally in tallies.items():
            totals[key].add(tally)
    return totals, needles_dense


def numbers(plan: Documents, total: Tally | None, needles_dense: int) -> dict[str, Any]:
    """Return the values of `Numbers` of a variant's documents, None: nothing was measured of it."""
    found = total or Tally()
    interval = bootstrap_interval(found.documents, plan.seed) if found.documents else None
    low, high = interval or (None, None)
    return {
        "bytes_ratio": part_of(found.bytes_read, found.bytes_dense),
        "needle_bytes_ratio": part_of(found.needle_bytes_read, found.needle_bytes_dense),
        "kl_mean": float(np.mean(found.divergences)) if found.divergences else None,
        "kl_low": low,
        "kl_high": high,
        "kl_max": float(np.max(found.divergences)) if found.divergences else None,
        "top1_agreement": float(np.mean(found.agreements)) if found.agreements else None,
        "num_positions": plan.num_texts * plan.text_steps,
        "needles_answered": None if total is None else total.answered,
        "num_needles": plan.num_needles,
        "needles_dense": needles_dense,
    }


def part_of(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def arm_of(variant: EpsConfig) -> dict[str, Any]:
    """Return the values of `Arm`."""
    cache_config, selection_config = variant.cache_config, variant.selection_config
    return {
        "method": cache_config.method,
        "group_size": cache_config.S,
        "sink_recent": (selection_config.num_sink_tokens, selection_config.num_recent_tokens),
        "policy": selection_config.policy,
        "bits": cache_config.code_bits,
        "rescore": selection_config.rescore if cache_config.method_spec.coded else None,
        "mean_tokens": cache_config.mean_tokens or None,
        "cascade": selection_config.cascade or None,
    }


def label(name: Arm) -> str:
    """A variant in words, for a table."""
    words = [f"`{name.method}`", str(name.group_size)]
    if name.bits:
        words.append(f"{name.bits}+1 bit" if name.rescore else f"{name.bits} bit")
    if name.mean_tokens:
        words.append(f"of {name.mean_tokens}")
        words.append("stages " + ",".join(f"{share:g}" for share in name.cascade) if name.cascade else "whole")
        words += [f"second of {name.rescore:g}"] if name.rescore else []
    if name.policy != "topk":
        words.append(name.policy)
    if name.sink_recent != method_spec(name.method).sink_recent:
        words.append(f"sink and recent tokens {name.sink_recent[0]}+{name.sink_recent[1]}")
    return " ".join(words)


def bytes_at_kl(curve: Iterable[tuple[float | None, float | None]], kl: float = 0.01) -> tuple[float | None, str]:
    """(share of the dense bytes at which a curve of (bytes, KL) crosses `kl`, how it is known): by log-log
    interpolation between the first neighbouring points of rising bytes that enclose it, "measured"; "<" or ">" with
    the bytes of the curve's end where it lies wholly below or above; (None, "-") for no points."""
    points = sorted((ratio, found) for ratio, found in curve if ratio is not None and found is not None)
    if not points:
        return None, "-"
    for (bytes0, kl0), (bytes1, kl1) in pairwise(points):
        if kl0 > kl >= kl1:
            weight = math.log(kl0 / kl) / math.log(kl0 / max(kl1, 1e-12))
            return bytes0 * (bytes1 / bytes0) ** weight, "measured"
    return (points[0][0], "<") if points[0][1] <= kl else (points[-1][0], ">")


def markdown(cells: list[Cell]) -> str:
    """The cells of one context length: KL / needles answered at each byte budget, and the bytes at which the KL is
    0.01."""
    budgets = sorted({cell.byte_budget for cell in cells if cell.byte_budget is not None})
    rows = []
    curves: dict[Arm, list[Cell]] = {}
    for cell in cells:
        arm = Arm(**{one.name: getattr(cell, one.name) for one in fields(Arm)})
        curves.setdefault(arm, []).append(cell)
    for name, curve in curves.items():
        value, known = bytes_at_kl((cell.bytes_ratio, cell.kl_mean) for cell in curve)
        at = "-" if value is None else f"{'' if known == 'measured' else known + ' '}{value:.3f}"
        found = {c.byte_budget: c for c in curve if c.kl_mean is not None}
        entries = [f"{found[b].kl_mean:.4f} / {found[b].needles_answered}" if b in found else "-" for b in budgets]
        rows.append([label(name), *entries, at])
    return markdown_table(["method, S", *(f"{b:g}" for b in budgets), "bytes at KL 0.01"], rows)
