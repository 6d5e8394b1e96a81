"""What rounds say that they read is what was read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verified_runs import DRAWN, GREEDY, Drafter, Model, eps, judge, prompt, saved

from eps_core.config.bytes import scoring_bytes
from eps_core.config.speculative import SpeculativeConfig
from eps_core.metrics.rounds import RoundRecord, by_depth, divergences, summarise_rounds

CONFIGS = {
    "meanstd": eps("meanstd", budget=0.3),
    "box, bounds": eps("box", policy="threshold", top_pages=2),
    "dense layers": eps("meanstd", budget=0.3, head_modes=(("dense",) * 4, ("sparse",) * 4)),
}
PROMPTS = [prompt(45), prompt(22, 1)]
TOTAL = ("bytes_kv_draft", "bytes_kv_verify")


def count_reads(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every call of the backend's attention adds the bytes of K and V that it was given to read."""
    reads: list[int] = []

    def add(cache: Any, lengths: np.ndarray, selection: Any = None) -> None:
        if selection is None:
            tokens = int(lengths.sum()) * cache.spec.num_kv_heads
        else:
            tokens = int(backend.to_numpy(selection.counts).sum()) * cache.cache_config.S
        reads.append(tokens * cache.spec.kv_token_bytes)

    attend, attend_rows, kernel_of = backend.attend, backend.attend_rows, backend.kernel_of

    def counting(cache: Any, layer: int, q: Any, plan: Any, selection: Any) -> Any:
        add(cache, plan.lengths, selection)
        return attend(cache, layer, q, plan, selection)

    def counting_rows(cache: Any, layer: int, q: Any, rows: Any, *selected_mask: Any) -> Any:
        add(cache, rows.lengths)
        return attend_rows(cache, layer, q, rows, *selected_mask)

    def fused(cache: Any, kernel: Any, *given: Any) -> Any:
        found = kernel(cache, *given)
        if found is not None:
            add(cache, given[-1].lengths, found.selection)
        return found

    def counting_kernel(cache: Any, name: str) -> Any:
        kernel = kernel_of(cache, name)
        return kernel and (lambda cache, *given: fused(cache, kernel, *given))

    monkeypatch.setattr(backend, "attend", counting)
    monkeypatch.setattr(backend, "attend_rows", counting_rows)
    monkeypatch.setattr(backend, "kernel_of", counting_kernel)
    return reads


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_rounds_count_every_read(target: Any, name: str, gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = target
    model, config = Model(backend, device, saved("llama2"), units=16), CONFIGS[name]
    reads = count_reads(backend, monkeypatch)
    model.start(PROMPTS, config)
    reads.clear()  # the start is repeated
    run = model.verified(PROMPTS, config, 8, GREEDY, SpeculativeConfig("tokens", gamma))
    assert sum(reads) == sum(getattr(r, part) for r in run.records for part in TOTAL)
    token_bytes = model.spec.num_layers * model.spec.num_kv_heads * run.cache.spec.kv_token_bytes
    lengths = [len(one) - 1 for one in PROMPTS]
    for record in run.records:
        alive = sorted(set(record.sequences))
        rows = [made + 1 for made in record.drafted]
        # every K and V once for all rows of a sequence
        assert record.bytes_kv_verify == token_bytes * sum(
            lengths[i] + count for i, count in zip(alive, rows, strict=True)
        )
        said = [record.sequences.count(i) for i in alive]
        assert record.emitted == said
        dense = sum(lengths[i] + 1 + k for i, count in zip(alive, said, strict=True) for k in range(count))
        assert record.bytes_kv_dense == token_bytes * dense
        assert record.weight_passes == 1 + max(record.drafted)
        assert record.rolled_back == (sum(rows) - sum(said) if any(record.drafted) else 0)
        for i, count in zip(alive, said, strict=True):
            lengths[i] += count
    assert lengths == [one.length for one in run.sequences]


def test_summaries_of_drafts_are_counted() -> None:
    model, config = judge(), CONFIGS["meanstd"]
    run = model.verified(PROMPTS[:1], config, 8, GREEDY, SpeculativeConfig("tokens", 3))
    length = len(PROMPTS[0]) - 1
    for record in run.records:
        each = [scoring_bytes(config, model.spec.head_dim, [length + 1 + depth]) for depth in range(record.drafted[0])]
        assert record.bytes_summary_draft == model.spec.num_layers * model.spec.num_kv_heads * sum(each)
        length += record.emitted[0]


@pytest.mark.parametrize("gamma", [1, 4, 8])
@pytest.mark.parametrize("right", [True, False])
def test_bytes_a_token_are_those_of_the_formula(gamma: int, right: bool) -> None:
    """(g f + 1) / E: g drafts that read the share f of dense reading, one dense pass, E tokens."""
    model, config = judge(), CONFIGS["meanstd"]
    drafter = Drafter(model) if right else Drafter(model, lambda logits: 1e3 * np.eye(300)[[299] * len(logits)])
    run = model.verified([prompt(120)], config, 28, DRAWN, SpeculativeConfig("tokens", gamma), drafter=drafter)
    records = [r for r in run.records if r.drafted == [gamma]]
    assert len(records) > 2
    spec = run.cache.spec
    token_bytes = spec.num_layers * spec.num_kv_heads * spec.kv_token_bytes
    found = summarise_rounds(records)
    dense_step = found["bytes_kv_verify"] / len(records)
    f = (found["bytes_kv_draft"] + found["bytes_summary_draft"]) / (gamma * len(records)) / dense_step
    expected = found["tokens_per_round"]
    if not right:
        assert expected == 1
    # lengths differ by the rows of a round
    assert found["bytes_ratio"] == pytest.approx((gamma * f + 1) / expected, rel=2 * (gamma + 1) / 120)
    assert dense_step > 120 * token_bytes


def test_the_audit_is_the_divergence_of_the_two_steps() -> None:
    """And none where the draft reads all."""
    run = judge().verified(PROMPTS, eps("meanstd", budget=1.0), 10, GREEDY, SpeculativeConfig("tokens", 4))
    for record in run.records:
        assert len(record.audit_kl) == len(record.audit_tv) == max(record.drafted)
        assert max(record.audit_tv, default=0) < 1e-5 and max(record.audit_kl, default=0) < 1e-6
        assert max(record.skipped_mass_true_max or [0]) < 1e-6
        assert record.accepted == record.drafted
    run = judge().verified(
        PROMPTS, eps("meanstd", budget=0.1, num_recent_tokens=1), 10, GREEDY, SpeculativeConfig("tokens", 1, 1)
    )
    skipped = [share for r in run.records for share in r.skipped_mass_true_max or ()]
    assert min(skipped) > 0.01 and max(skipped) < 1
    assert min(tv for r in run.records for tv in r.audit_tv) > 1e-4
    p, q = np.array([[0.5, 0.3, 0.2]]), np.array([[0.2, 0.3, 0.5]])
    kl, tv = divergences(np.log(p), np.log(q))
    assert kl[0] == pytest.approx(0.3 * np.log(2.5)) and tv[0] == pytest.approx(0.3)
    assert [len(one) for one in divergences(np.zeros((0, 3)), np.zeros((0, 3)))] == [0, 0]


def test_the_time_of_a_token_is_that_of_all_sequences() -> None:
    """A round whose sequences say 7 and 1 tokens gives a sequence 4: not one of them the time of the other's."""
    run = judge().verified(PROMPTS, CONFIGS["meanstd"], 8, GREEDY, SpeculativeConfig("tokens", 6), drafter=None)
    record = replace(run.records[0], sequences=[0] * 7 + [1], tokens=[0] * 8, emitted=[7, 1], round_ms=80.0)
    assert summarise_rounds([record])["decode_ms_p50"] == 20.0


def test_acceptance_by_depth_counts_what_could_be_accepted() -> None:
    assert by_depth([4, 4, 0, 2], [4, 1, 0, 0]) == ([3, 2, 1, 1], [2, 1, 1, 1])
    assert by_depth([0], [0]) == ([], [])


def test_the_margin_of_a_round_is_its_closest() -> None:
    run = judge().verified(PROMPTS, CONFIGS["meanstd"], 10, DRAWN, SpeculativeConfig("tokens", 4))
    for record in run.records:
        assert len(record.margins) == len(record.tokens) and record.top2_margin_min == min(record.margins)
        assert "margins" not in record.to_dict() and record.to_dict()["type"] == "round"


def test_a_record_that_contradicts_itself_is_refused() -> None:
    run = judge().verified(PROMPTS, CONFIGS["meanstd"], 10, GREEDY, SpeculativeConfig("tokens", 4))
    record: RoundRecord = run.records[0]
    record.check()
    for name in ("accepted", "emitted", "tokens", "accepted_by_depth"):
        kept = getattr(record, name)
        setattr(record, name, [*kept[:-1], kept[-1] + 9] if name != "tokens" else kept[:-1])
        with pytest.raises(AssertionError):
            record.check()
        setattr(record, name, kept)
