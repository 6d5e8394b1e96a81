"""How a cell of verified decoding is measured: every document goes on by itself, densely and verified, and both must
say the same. What varies is the bytes, the drafts that were accepted and the time."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.sampling import Sampling
from eps_core.evaluation.outcomes import partings
from eps_core.evaluation.runner import DENSE, Document, Outcome, run_batch
from eps_core.evaluation.statistics import bootstrap_interval, wilson_interval
from eps_core.metrics.rounds import RoundRecord, summarise_rounds
from eps_core.metrics.steps import StepRecord, summarise

# of the summary of all rounds, as it is
_SUMMED = (
    "bytes_ratio", "draft_ratio", "acceptance", "acceptance_by_depth", "offered_by_depth", "tokens_per_round",
    "tokens_per_round_histogram", "rounds", "rounds_drafted", "new_tokens", "tokens_per_s", "decode_ms_p50",
    "decode_ms_p95", "top2_margin_min", "fallbacks",
)  # fmt: skip


class Measured:
    """Dense and verified decodes of one cell's documents, collected a batch at a time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rounds: list[RoundRecord] = []
        self.dense: list[StepRecord] = []
        self.by_batch: list[dict[str, Any]] = []  # summaries: batches of documents are what was drawn
        self.parted: list[dict[str, Any]] = []
        self.num_documents = 0

    def add(self, dense: Outcome, verified: Outcome, num_documents: int) -> None:
        self.rounds += verified.rounds
        self.dense += dense.records
        self.by_batch.append(summarise_rounds(verified.rounds))
        self.num_documents += num_documents
        dense.tokens, verified.tokens = dense.said, verified.said
        self.parted += [asdict(one) for one in partings(dense, verified)]

    def numbers(self) -> dict[str, Any]:
        summary, plain = summarise_rounds(self.rounds), summarise(self.dense)
        equal = self.num_documents - len(self.parted)
        found: dict[str, Any] = {name: summary[name] for name in _SUMMED}
        for name in ("acceptance", "bytes_ratio", "tokens_per_round"):
            values = [one[name] for one in self.by_batch if one[name] is not None]
            found[f"{name}_interval"] = bootstrap_interval(values, self.seed) if values else None
        return {
            **found,
            "draft_kl_mean": summary["audit_kl_mean"],
            "draft_tv_mean": summary["audit_tv_mean"],
            "draft_skipped_mass_true_mean": summary["skipped_mass_true_mean"],
            "documents": self.num_documents,
            "documents_equal": equal,
            "documents_equal_interval": wilson_interval(equal, self.num_documents),
            "partings": self.parted,
            **{f"dense_{name}": plain[name] for name in ("decode_ms_p50", "decode_ms_p95", "tokens_per_s")},
        }


def decode_both(
    session: Any,
    documents: Sequence[Document],
    prefixes: Sequence[Any],
    config: EpsConfig,
    verify: SpeculativeConfig,
    sampling: Sampling,
) -> tuple[Outcome, Outcome]:
    """(dense, verified) decodes of documents that go on by themselves."""
    free = [Document(one.prompt, one.num_steps) for one in documents]
    dense = run_batch(session, free, {DENSE: EpsConfig()}, prefixes, sampling=sampling)[DENSE]
    return dense, run_batch(session, free, {0: config}, prefixes, verifies={0: verify}, sampling=sampling)[0]


def needle_numbers(answered: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Return the numbers of (densely, verified) answers."""
    now = np.array(answered, bool).reshape(-1, 2)
    return {
        "num_needles": len(now),
        "needles_dense": int(now[:, 0].sum()),
        "needles_answered": int(now[:, 1].sum()),
        "needles_lost": int((now[:, 0] & ~now[:, 1]).sum()),
        "needles_gained": int((~now[:, 0] & now[:, 1]).sum()),
    }
