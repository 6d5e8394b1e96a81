"""Sparse verification: over all tokens it is verified decoding; over fewer it reads what its formula says, and less."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.config.verify import Verify
from eps_core.decode.observe import Observed
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import GREEDY, Document
from eps_core.evict.base import Facts
from eps_core.load import backend_name, load_backend
from eps_core.paging.rows import Rows
from experiments.grid.grid_verified import decode_both
from experiments.sparse_verify import sparse_verify
from experiments.sparse_verify.sparse_verify import Plan, Sparse, SparseDecoder, decode_sparse

CONFIG = EpsConfig.of(method="box", group_tokens=4, budget=0.3, first_tokens=2, last_tokens=4)
VERIFY = Verify("tokens", draft=4)
PINS = {"first_tokens": 2, "last_tokens": 3}


@pytest.fixture
def target() -> tuple[Any, str]:
    """One backend: what an experiment takes from all of them is tested in their own suite."""
    return load_backend("cuda"), "cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_model("mistral", tmp_path_factory.mktemp("model"))


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny_models.VOCAB_SIZE, count).tolist()


def test_reading_every_token_is_verified_decoding(target, model: Path) -> None:
    backend, device = target
    session = Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays")
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


def softmax(x: np.ndarray) -> np.ndarray:
    mass = np.exp(x - x.max())
    return mass / mass.sum()


class Judge:
    """A sparse pass from the formulas: K and V of all tokens are here, float64 sums in loops."""

    def __init__(self, session: Session, prompt: list[int], sparse: Sparse) -> None:
        self.session, self.spec, self.sparse = session, session.spec, sparse
        self.queries: list[list[np.ndarray]] = [[] for _ in range(self.spec.num_layers)]
        told = SimpleNamespace(prompt=lambda cache, layer, q, k, n: self.queries[layer].extend(np.asarray(q)))
        prefix = session.prefix(prompt, observed=told)  # type: ignore[arg-type]
        self.kv = [[list(side) for side in pair] for pair in prefix.keys_values]  # [L][2] of [Hkv, D] a token
        self.repeat = self.spec.num_heads // self.spec.num_kv_heads
        places = [(a, h) for a in range(self.spec.num_layers) for h in range(self.spec.num_kv_heads)]
        count = len(prompt)
        given, outside = {}, {}
        for layer, head in places:
            by_query = np.zeros((self.repeat, count))
            window = range(count - 16, count)
            for r in range(self.repeat):
                for t in window:
                    q = self.queries[layer][t][head * self.repeat + r]
                    by_query[r, : t + 1] += self.weigh(layer, head, q, range(t + 1)) / 16
            given[layer, head] = by_query.mean(0)
            middle = [p for p in range(count) if sparse.first_tokens <= p < count - sparse.last_tokens]
            outside[layer, head] = max(by_query[r][middle].sum() for r in range(self.repeat))
        self.heads = sorted(places, key=lambda place: -outside[place])[: sparse.score_heads]
        self.mean = sum(given[place] for place in self.heads) / len(self.heads)

    def weigh(self, layer: int, head: int, q: np.ndarray, rows) -> np.ndarray:
        return softmax(np.array([self.kv[layer][0][t][head] @ q for t in rows]) / np.sqrt(self.spec.head_dim))

    def attention(self, queries: dict[int, list[np.ndarray]], rows: list[list[int]], size: int) -> np.ndarray:
        """[size]: mean over score heads, query heads and queries [l][n] [Hq, D], each over its `rows`."""
        total, calls = np.zeros(size), 0
        for layer, head in self.heads:
            for q, seen in zip(queries[layer], rows, strict=True):
                for r in range(self.repeat):
                    total[seen] += self.weigh(layer, head, q[head * self.repeat + r], seen)
                    calls += 1
        return total / calls

    def chosen(self, drafts: np.ndarray | None, before: int) -> list[int]:
        known = np.array([self.mean[t] if t < len(self.mean) else 0.0 for t in range(before)])
        beta = self.sparse.beta
        score = known if drafts is None else beta * drafts + (1 - beta) * known
        first = [*range(before - self.sparse.last_tokens, before), *range(self.sparse.first_tokens)]
        others = sorted((t for t in range(before) if t not in first), key=lambda t: (-np.float32(score[t]), t))
        return sorted((first + others)[: int(np.ceil(self.sparse.budget * before))])

    def verify(self, fed: list[int], drafted: dict[int, list[np.ndarray]]) -> tuple[np.ndarray, list[int]]:
        """(logits [N, V], the tokens that are read); K and V of the new ones stay."""
        before, model = len(self.kv[0][0]), self.session.decoder.model
        drafts = self.attention(drafted, [list(range(before))] * len(drafted[0]), before) if drafted else None
        chosen = self.chosen(drafts, before)
        x = model.embed(np.array(fed))
        turn = model.rotation(np.arange(before, before + len(fed)))
        seen = [[*chosen, *range(before, before + i + 1)] for i in range(len(fed))]
        queries = {}
        for layer in range(self.spec.num_layers):
            q, k, v = (np.asarray(one) for one in model.project(layer, x, turn))
            self.kv[layer][0].extend(k)
            self.kv[layer][1].extend(v)
            queries[layer] = list(q)
            out = np.zeros(q.shape, np.float32)
            for i, rows in enumerate(seen):
                for head in range(self.spec.num_heads):
                    own = head // self.repeat
                    weights = self.weigh(layer, own, q[i, head], rows)
                    out[i, head] = sum(w * self.kv[layer][1][t][own] for w, t in zip(weights, rows, strict=True))
            x = model.feed_forward(layer, model.add_attention(layer, x, out))
        now, decay = self.attention(queries, seen, before + len(fed)), self.sparse.decay
        known = np.array([self.mean[t] if t < len(self.mean) else 0.0 for t in range(before)])
        self.mean = (1 - decay) * now
        self.mean[:before] += decay * known
        return np.asarray(model.logits(x)), chosen


@pytest.mark.parametrize("sparse", [Sparse(0.3, **PINS), Sparse(0.5, 0.9, 0.2, 3, **PINS)], ids=["few", "more"])
def test_two_passes_read_what_the_formula_says(target, model: Path, sparse: Sparse) -> None:
    backend, device = target
    session = Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays")
    prompt, fed = tokens(50, 1), [tokens(4, 2), tokens(3, 3)]
    judge = Judge(Session.open(model, "numpy"), prompt, sparse)
    observed = Observed(session.backend, session.spec, Facts("", window=sparse_verify.WINDOW))
    prefix = session.prefix(prompt, observed=observed)
    cache, pool = session.cache(CONFIG.store, 64)
    sequence, cache = prefix.into(session.backend, cache, pool, 14)
    decoder = SparseDecoder(session, sparse, prefix, observed, cache)
    assert {(layer, head) for layer, heads in decoder.score_heads.items() for head in heads} == set(judge.heads)
    np.testing.assert_allclose(decoder.importance, judge.mean, atol=1e-5)
    rng, spec, length = np.random.default_rng(4), session.spec, len(prompt)
    for depth, news in enumerate(fed):
        drafted: dict[int, list[np.ndarray]] = {}
        if not depth:  # the second pass has no drafts
            drafted = {a: [*rng.normal(size=(2, spec.num_heads, spec.head_dim))] for a in range(spec.num_layers)}
            for layer, queries in drafted.items():
                for q in queries:
                    decoder.saw_draft(layer, session.backend.from_numpy(q[None].astype(np.float32), "float32", device))
        slots, _ = pool.append(sequence, news)
        rows = Rows.of(pool.table([sequence]), np.array([length + len(news)]), np.array([len(news)]))
        read = cache.kv_bytes_read
        cache, output = decoder.verify(cache, np.array(news), slots, rows)
        want, chosen = judge.verify(news, drafted)
        np.testing.assert_allclose(output.logits, want, rtol=0, atol=5e-4)
        np.testing.assert_allclose(decoder.importance, judge.mean, atol=1e-5)
        token_bytes = cache.spec.kv_token_bytes
        whole = spec.num_layers * spec.num_kv_heads * token_bytes * (len(chosen) + len(news))
        scored = 0 if depth else sparse.score_heads * length * token_bytes // 2
        assert cache.kv_bytes_read - read == whole + scored
        cache = decoder.commit(cache, output, np.arange(len(news)), slots)
        length += len(news)


def test_a_table_counts_texts_that_are_not_the_dense_ones(model: Path) -> None:
    session = Session.open(model, "numpy")
    arms = (None, Sparse(1.0), Sparse(0.05, first_tokens=1, last_tokens=1))
    plan = Plan(60, num_needles=0, num_texts=2, text_steps=16, arms=arms, config=CONFIG, verify=VERIFY)
    results = [(kind, *sparse_verify.tally_document(session, plan, kind, index)) for kind, index in plan.documents()]
    exact, whole, few = sparse_verify.table_cells(plan, session.spec.head_dim, results)
    assert (exact["documents_equal"], whole["documents_equal"]) == (2, 2) > (few["documents_equal"],)
    assert exact["acceptance"] == whole["acceptance"] and few["bytes_ratio"] < whole["bytes_ratio"]
    lines = sparse_verify.markdown([exact, whole, few]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| all tokens", "| 1 of the tokens, beta 0.5", "| 0.05 of the tokens, beta 0.5",
    ]  # fmt: skip
    assert sparse_verify.records([few])[0]["sparse"]["budget"] == 0.05


@pytest.mark.parametrize(
    "wrong, said", [({"budget": 0.0}, "budget 0.0"), ({"beta": 2.0}, "beta 2.0"), ({"score_heads": 0}, "score heads 0")]
)
def test_what_is_no_sparse_pass_is_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sparse(**wrong)
