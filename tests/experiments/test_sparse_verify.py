"""Sparse verification over all tokens equals verified decoding, and reads less over fewer."""

from pathlib import Path

import numpy as np
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.session import Session
from eps_core.evaluation.runner import GREEDY, Document
from experiments.grid.grid_verified import decode_both
from experiments.sparse_verify import run as sparse_verify
from experiments.sparse_verify.run import Plan, Sparse, decode_sparse

CONFIG = EpsConfig.of(method="box", group_size=4, budget=0.3, num_sink_tokens=2, num_recent_tokens=4)
VERIFY = SpeculativeConfig("tokens", draft=4)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCAB_SIZE, count).tolist()


def test_reading_every_token_is_verified_decoding(model: Path) -> None:
    session = Session.open(model, "cuda", "cpu", "float32", kernels="arrays")
    document = Document(tokens(60), 20)
    prefix = session.prefix(document.prompt[:-1])
    dense, exact = decode_both(session, [document], [prefix], CONFIG, VERIFY, GREEDY)
    whole = decode_sparse(session, document, CONFIG, VERIFY, Sparse(1.0))
    assert whole.said == exact.said == dense.said
    for one, other in zip(exact.rounds, whole.rounds, strict=True):
        assert (one.drafted, one.accepted, one.tokens) == (other.drafted, other.accepted, other.tokens)
        np.testing.assert_allclose(other.audit_kl, one.audit_kl, atol=1e-4)
        # besides, the keys of two heads are read for each round's choice
        spec, drafted = session.spec, sum(one.drafted) > 0
        scored = 2 * spec.head_dim * session.one_unit().kv_token_bytes // (2 * spec.head_dim)
        start = 59 + sum(len(r.tokens) for r in whole.rounds[: one.step])
        assert other.bytes_kv_verify == one.bytes_kv_verify + drafted * start * scored
        assert session.decoder.tap is None


def test_a_table_counts_texts_that_are_not_the_dense_ones(model: Path) -> None:
    session = Session.open(model, "numpy")
    variants = (None, Sparse(1.0), Sparse(0.05, num_sink_tokens=1, num_recent_tokens=1))
    plan = Plan(60, num_needles=0, num_texts=2, text_steps=16, variants=variants, config=CONFIG, verify=VERIFY)
    results = [(kind, *sparse_verify.tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    exact, whole, few = sparse_verify.table_cells(plan, session.spec.head_dim, results)
    assert (exact["documents_equal"], whole["documents_equal"]) == (2, 2) > (few["documents_equal"],)
    assert exact["acceptance"] == whole["acceptance"] and few["bytes_ratio"] < whole["bytes_ratio"]
    lines = sparse_verify.markdown([exact, whole, few]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| all tokens", "| 1 of the tokens, beta 0.5", "| 0.05 of the tokens, beta 0.5",
    ]  # fmt: skip
    assert few["sparse"]["budget"] == 0.05
