"""Documents under variants: prefilled once, decoded densely and by each variant, compared step by step.

Variants differ in decode alone, which is all that EPS changes. All but the last token of a document is prefilled, so
that what follows the prompt comes from sparse attention from the first token on.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import generate
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import UNVERIFIED, Session
from eps_core.decode.verified import verified
from eps_core.errors import overflow
from eps_core.metrics.rounds import RoundRecord, summarise_rounds
from eps_core.metrics.steps import StepRecord, kl_divergence, summarise
from eps_core.models.config import ModelSpec
from eps_core.summaries.keys import CENTRE_TOKENS

DENSE = "dense"  # the variant that the others are compared with
GREEDY = Sampling()
DEFAULT_CONTEXT = 4096  # tokens
K = TypeVar("K", bound=Hashable)


def usual_context(spec: ModelSpec, num_steps: int) -> int:
    """Tokens of a context where none is asked for: as many as the model holds besides `num_steps`, at most
    DEFAULT_CONTEXT."""
    return max(1, min(DEFAULT_CONTEXT, spec.max_context - num_steps))


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt and how it goes on for at most `num_steps` steps: by itself, up to a `stop` token, or `forced`."""

    prompt: list[int]
    num_steps: int
    forced: list[int] | None = None  # what the steps after the first are fed
    stop: tuple[int, ...] = ()

    @classmethod
    def along(cls, tokens: list[int], num_steps: int) -> Self:
        """A text whose last `num_steps` tokens are fed one by one."""
        prompt = len(tokens) - num_steps + 1
        return cls(tokens[:prompt], num_steps, tokens[prompt:])


@dataclass
class Outcome:
    """One decode of a batch of documents."""

    records: list[StepRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)  # of a verified decode, which has no `records`
    said: list[list[int]] = field(default_factory=list)  # tokens of each document, a stop token left out
    kl: np.ndarray | None = None  # [steps, B] nats of the next token from dense, along forced tokens
    agree: np.ndarray | None = None  # [steps, B] whether the likeliest token is dense's
    # of a run that is reported:
    tokens: list[list[int]] = field(default_factory=list)  # as `said`, the stop token that ended each included
    texts: list[str] = field(default_factory=list)
    prefill_ms: float | None = None
    # with a cache folder: `decode.stored.StoredCounts`, and ttft_ms from the start of loading to the first new token
    stored: dict[str, Any] | None = None

    @property
    def logits(self) -> np.ndarray:
        """[steps, B, V], where they were kept."""
        return np.array([record.logits for record in self.records])

    def against(self, dense: "Outcome") -> None:
        """Compares step by step with a dense decode that was fed the same; its own logits are dropped. Raises
        ConfigError where a KL is no number, as that of logits of -Inf."""
        want, got = dense.logits, self.logits
        self.kl, self.agree = kl_divergence(want, got), want.argmax(-1) == got.argmax(-1)
        for kl, record in zip(self.kl, self.records, strict=True):
            if not np.isfinite(kl).all():
                raise overflow(f"the logits at position {record.lengths[int(np.isfinite(kl).argmin())]}")
        for record in self.records:
            record.logits = None

    def along_text(self) -> tuple[list[Any], list[bool]]:
        """Return of every step of the first document (KL in nats, whether the likeliest token is dense's)."""
        assert self.kl is not None and self.agree is not None, "only a text is compared step by step"
        return self.kl[:, 0].tolist(), self.agree[:, 0].tolist()

    def summary(self) -> dict[str, Any]:
        """Return totals, percentiles and ratios against dense of the whole decode."""
        made: Callable[..., dict[str, Any]] = summarise_rounds if self.rounds else summarise
        summary = made(self.rounds or self.records, self.prefill_ms)
        if self.tokens:  # an engine's first token may come from its prefill, which is no step
            summary["new_tokens"] = sum(map(len, self.tokens))
        return summary

    @property
    def margins(self) -> list[tuple[int, int, float]]:
        """(document, token, margin: see `sampling.Drawn`) of all that was said, in the order in which it was; nothing
        where an engine's own decoding does not tell."""
        every: Sequence[StepRecord | RoundRecord] = self.rounds or self.records
        return [said for r in every if r.margins for said in zip(r.sequences, r.tokens, r.margins, strict=True)]

    def bytes_read(self, first: int = 0) -> tuple[int, int]:
        """(K, V and summaries read, what dense attention reads) from step `first` on, or of all rounds."""
        total = summarise_rounds(self.rounds) if self.rounds else summarise(self.records[first:])
        return total["bytes_kv_read_est"] + total["bytes_summary_read"], total["bytes_kv_dense"]


def decode(
    session: Session,
    cache: Any,
    pool: Any,
    documents: Sequence[Document],
    selection_config: SelectionConfig | None,
    sampling: Sampling = GREEDY,
    on_record: Callable[[Any], None] | None = None,
    verify: SpeculativeConfig = UNVERIFIED,
    decoder: Decoder | None = None,
    **more: Any,
) -> tuple[Outcome, Any]:
    """(outcome, cache) of one decode of a batch, verified where `verify` says so; `more` goes to `generate`. Each
    step's or round's record is handed over as it comes. `decoder`: another than the session's."""
    prompts, stop = [one.prompt for one in documents], documents[0].stop
    num_steps, outcome = max(one.num_steps for one in documents), Outcome(said=[[] for _ in documents])
    decoder, forced = decoder or session.decoder, documents[0].forced is not None
    steps: Generator[Any, None, Any]
    kept: list[Any] = outcome.records
    if verify.enabled and selection_config is not None and cache.cache_config.enabled:
        assert not forced, "a verified decode says what it says: it cannot be forced"
        session.check_kernels(cache.cache_config, verified=True)
        steps = verified(
            decoder, cache, pool, prompts, num_steps, sampling, selection_config, verify, stop,
            drafter=session.drafter(verify), written=more.get("written"),
        )  # fmt: skip
        kept = outcome.rounds
    else:
        # the token after a text's last one is never fed: any will do
        fed = [[*(one.forced or ()), one.prompt[-1]] for one in documents] if forced else None
        steps = generate(
            decoder, cache, pool, prompts, num_steps, sampling, selection_config, stop_tokens=stop, forced_tokens=fed,
            **more,
        )  # fmt: skip
    while True:
        try:
            record: Any = next(steps)
        except StopIteration as end:
            return outcome, end.value
        kept.append(record)
        for index, token in zip(record.sequences, record.tokens, strict=True):
            if token not in stop:
                outcome.said[index].append(token)
        if on_record is not None:
            on_record(record)


def run_batch(
    session: Session,
    documents: Sequence[Document],
    variants: Mapping[K, EpsConfig],
    prefixes: Sequence[Prefix],
    dense: Outcome | None = None,
    verifies: Mapping[K, SpeculativeConfig] | None = None,
    **more: Any,
) -> dict[K, Outcome]:
    """Every variant's decode of documents whose `prefixes` are at hand; along texts, against `dense` where it is given.
    Variants of `verifies` are verified, so that documents go on by themselves. Variants that keep the same share one
    cache, each writing over what the one before it decoded: each is what it would be alone, but for keys read back to
    finalize the group that a prompt ends in. Where the prompts are too short for key codes' centroid, which the first
    variant's decode would then find for the next one, each has a cache of its own."""
    room = max(one.num_steps for one in documents)
    num_tokens = max(len(prefix.tokens) for prefix in prefixes) + room
    texts = documents[0].forced is not None
    found: dict[K, Outcome] = {}
    short = sum(len(prefix.tokens) for prefix in prefixes) < CENTRE_TOKENS
    shared: dict[Hashable, list[K]] = {}
    for name, config in variants.items():
        apart = name if short and config.cache_config.bound_bits else None
        shared.setdefault((config.cache_config, apart), []).append(name)
    for mine in shared.values():
        cache_config = variants[mine[0]].cache_config
        cache, pool = session.cache(cache_config, [num_tokens] * len(documents))
        written = []
        for prefix in prefixes:
            sequence, cache = prefix.into(session.backend, cache, pool, room)
            written.append(sequence)
        for name in mine:
            found[name], cache = decode(
                session, cache, pool, documents, variants[name].selection_config, written=written, keep_logits=texts,
                verify=(verifies or {}).get(name, UNVERIFIED), **more,
            )  # fmt: skip
            for sequence, prefix in zip(written, prefixes, strict=True):
                pool.rewind(sequence, len(prefix.tokens))
            if texts and dense is not None:
                found[name].against(dense)
    return {name: found[name] for name in variants}


def run_document(
    session: Session,
    document: Document,
    variants: Mapping[Any, EpsConfig],
    report: Callable[[int, int], None] = lambda done, total: None,
    **more: Any,
) -> dict[Any, Outcome]:
    """One document, prefilled once: `DENSE` first, then every variant, along a text compared with it. `report` as
    `generate.prefill` has it."""
    prefixes = [session.prefix(document.prompt[:-1], report=report)]
    outcomes = run_batch(session, [document], {DENSE: EpsConfig()}, prefixes, **more)
    return {**outcomes, **run_batch(session, [document], variants, prefixes, outcomes[DENSE], **more)}
