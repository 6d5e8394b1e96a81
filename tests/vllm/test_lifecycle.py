"""What vLLM does with its blocks: sharing, preemption, reuse, drafts that are rejected, EPS switched off and on."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from shadow import Shadow

import eps_cuda
from eps_cuda.integrations.vllm import metrics

RQ = {"method": "rq", "budget": 0.1}


def metric(llm: Any, name: str) -> float:
    return next(float(one.value) for one in llm.get_metrics() if one.name == name)


def test_shared_preempted_and_reused_blocks_keep_their_summaries() -> None:
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 256, 400).tolist()
    asked = [
        (shared if i % 2 else []) + rng.integers(0, 256, int(rng.integers(40, 400))).tolist() for i in range(16)
    ]  # fmt: skip
    more = {"num_gpu_blocks_override": 26, "disable_log_stats": False, "max_model_len": 1024}
    with engines.engine(engines.DEMO, RQ, **more) as llm:
        shadow = Shadow(llm)
        engines.say(llm, asked, 120, logprobs=None)
        found = engines.stats(llm)
        assert metric(llm, "vllm:num_preemptions") > 0, "the pool was large enough: nothing was preempted"
        assert metric(llm, "vllm:prefix_cache_hits") > 500
    assert shadow.layer_steps >= 1_000 and shadow.checked > 10_000, (shadow.layer_steps, shadow.checked)
    assert shadow.largest == 0 and shadow.wrong == 0 and shadow.lacking == 0
    assert not found["fallbacks"] and not found["failed_writes"] and found["bytes_ratio"] < 0.2


def test_preempted_text_is_stock_text() -> None:
    asked = engines.prompts(300, 500, 200, 450, 350, 250)
    more = {"num_gpu_blocks_override": 26, "disable_log_stats": False, "max_model_len": 1024}
    with engines.engine(engines.DEMO, **more) as llm:
        dense = engines.say(llm, asked, 150, logprobs=None)
        assert metric(llm, "vllm:num_preemptions") > 0
    with engines.engine(engines.DEMO, {"method": "rq", "budget": 1.0}, **more) as llm:
        assert engines.say(llm, asked, 150, logprobs=None) == dense


def test_rejected_drafts_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # what repeats is drafted, and what does not is rejected
    rng = np.random.default_rng(2)
    phrase = rng.integers(97, 123, 60).tolist()
    asked = [phrase * 6 + rng.integers(97, 123, 5).tolist() for _ in range(3)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    with engines.engine(engines.DEMO, {"method": "rq", "budget": 1.0}) as llm:
        wanted = engines.say(llm, asked, 64, logprobs=None)
    more = {"speculative_config": drafts, "disable_log_stats": False}
    with engines.engine(engines.DEMO, {"method": "rq", "budget": 1.0}, **more) as llm:
        shadow, backend, verified = Shadow(llm), engines.runtime(llm).backend, []
        attend = backend.attend_rows  # a prompt's own attention may round
        monkeypatch.setattr(backend, "attend_rows", lambda *args: (verified.append(len(args[2])), attend(*args))[1])
        assert engines.say(llm, asked, 64, logprobs=None) == wanted
        assert 1 < max(verified) <= 4
        drafted, accepted = (
            metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted")
        )  # fmt: skip
        assert drafted > accepted > 0, (drafted, accepted)
        found = engines.stats(llm)
        assert found["verified_rows"] > 0 and not found["failed_writes"]
        llm.collective_rpc("eps_set", kwargs={"budget": 0.2})
        engines.say(llm, asked, 64, logprobs=None)
    assert shadow.checked > 1000 and shadow.largest == 0 and shadow.wrong == 0 and shadow.lacking == 0


def test_off_and_on_again_reads_what_it_missed_once() -> None:
    asked, _ = engines.needles(1500, 1100)

    def lists(llm: Any) -> Any:
        sparse = engines.runtime(llm).sparse
        assert sparse is not None
        sparse.keep_lists = True
        said = engines.say(llm, asked, 8, logprobs=None)
        engines.stats(llm)
        return said, sparse.lists

    first = engines.prompts(300, seed=7)
    with engines.engine(engines.DEMO, RQ) as llm:
        engines.say(llm, first, 1, logprobs=None)
        engines.say(llm, asked, 1, logprobs=None)
        wanted, wanted_lists = lists(llm)
    with engines.engine(engines.DEMO, RQ) as llm:
        engines.say(llm, first, 1, logprobs=None)
        assert llm.collective_rpc("eps_set", kwargs={"on": False})[0]["on"] is False
        engines.say(llm, asked, 1, logprobs=None)
        engines.say(llm, engines.prompts(200), 5, logprobs=None)
        assert engines.stats(llm)["rows"] == 0
        llm.collective_rpc("eps_set", kwargs={"on": True})
        llm.collective_rpc("eps_reset")
        said, found_lists = lists(llm)
        found = engines.stats(llm)
        layers, row_bytes = 4, 2 * 64 * 4  # of K, both kv heads
        adopted = found["tokens_adopted"]
        assert adopted >= layers * (1472 + 1088) and found["bytes_k_reread"] >= adopted * row_bytes
        llm.collective_rpc("eps_reset")
        engines.say(llm, asked, 8, logprobs=None)
        assert engines.stats(llm)["tokens_adopted"] == 0
    assert said == wanted and len(found_lists) == len(wanted_lists)
    for step, other in zip(found_lists, wanted_lists, strict=True):
        for layer in range(layers):
            for mine, theirs in zip(step[layer], other[layer], strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_knobs_turn_while_it_runs_and_what_is_kept_does_not() -> None:
    asked = engines.prompts(900)
    with engines.engine(engines.DEMO, RQ) as llm:
        ratios = []
        for budget in (0.1, 0.3):
            assert llm.collective_rpc("eps_set", kwargs={"budget": budget})[0]["budget"] == budget
            llm.collective_rpc("eps_reset")
            engines.say(llm, asked, 6, logprobs=None)
            ratios.append(engines.stats(llm)["bytes_ratio"])
        assert 0.1 < ratios[0] < 0.15 < 0.3 < ratios[1] < 0.4
        for wrong in (
            {"group_size": 4}, {"budget": -1.0}, {"budgets": 0.1}, {"kernels": "arrays"}, {"verify": "tokens"},
            {"head_modes": [["dense"] * 3] * 4}, {"on": "no", "budget": 0.9},
        ):  # fmt: skip
            with pytest.raises(Exception, match=r"begin|began|budget|fixed|head modes of 3|not true or false"):
                llm.collective_rpc("eps_set", kwargs=wrong)
        assert llm.collective_rpc("eps_set")[0]["budget"] == 0.3
        found = engines.stats(llm)
        assert found["bytes_kv_read"] > 0 and found["on"]


def test_one_list_for_all_heads_stays_one_list() -> None:
    settings = {"method": "meanstd", "route": "stock", "budget": 0.3}
    with (
        engines.engine(engines.DEMO, settings) as llm,
        pytest.raises(Exception, match="for all kv heads alike, and cannot have scope 'kv-head'"),
    ):
        llm.collective_rpc("eps_set", kwargs={"scope": "kv-head"})


def test_counters_that_cannot_be_written_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv(metrics.FOLDER, str(folder))
    with engines.engine(engines.DEMO, RQ) as llm, caplog.at_level(logging.ERROR, "eps"):
        (said,) = engines.say(llm, engines.prompts(900), 3, logprobs=None)
        assert json.loads((folder / "0.json").read_text())["on"]
        shutil.rmtree(folder)
        monkeypatch.setattr(metrics, "SECONDS", 0)
        llm.reset_prefix_cache()
        assert engines.say(llm, engines.prompts(900), 3, logprobs=None) == [said]
        folder.mkdir()
        llm.collective_rpc("eps_set", kwargs={"on": False})
        assert json.loads((folder / "0.json").read_text())["on"] is False
    assert caplog.text.count("EPS's counters on /metrics are out of date") == 1


def test_a_fault_in_eps_is_dense_counted_and_loud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = engines.prompts(700, 400)

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("a test broke this")

    with engines.engine(engines.DEMO, RQ) as llm:
        wanted = engines.say(llm, asked, 8, logprobs=None)
        llm.reset_prefix_cache()
        llm.collective_rpc("eps_set", kwargs={"on": False})
        dense = engines.say(llm, asked, 8, logprobs=None)
        llm.reset_prefix_cache()
        llm.collective_rpc("eps_set", kwargs={"on": True})
        llm.collective_rpc("eps_reset")
        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "eps"):
            patched.setattr("eps_cuda.kernels.cpu.KERNELS.attend_fused.run", broken)
            assert engines.say(llm, asked, 8, logprobs=None) == dense
        found = engines.stats(llm)
        assert found["fallbacks"] == {"error": 4 * found["rows"]} and found["bytes_ratio"] == 1.0
        assert [one for one in caplog.records if "a test broke this" in one.getMessage() and one.exc_info]
        # a write that fails: K and V are there all the same, and summaries are made up for
        caplog.clear()
        llm.reset_prefix_cache()
        llm.collective_rpc("eps_reset")
        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "eps"):
            patched.setattr(eps_cuda, "write_kv", broken)
            engines.say(llm, asked, 1, logprobs=None)
        assert engines.stats(llm)["failed_writes"] > 0 and "a test broke this" in caplog.text
        assert engines.say(llm, asked, 8, logprobs=None) == wanted
        assert engines.stats(llm)["tokens_adopted"] > 0


def test_blocks_that_only_the_stock_kernel_reads_survive_the_same() -> None:
    """Route stock: shared, preempted and reused blocks; off, on, and what was written meanwhile is always visited."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 320).tolist()
    asked = [shared + rng.integers(0, 256, int(rng.integers(40, 300))).tolist() for _ in range(8)]
    settings = {"method": "meanstd", "route": "stock", "budget": 0.4}
    more = {"num_gpu_blocks_override": 26, "disable_log_stats": False, "max_model_len": 1024}
    with engines.engine(engines.DEMO, settings, **more) as llm:
        runtime = engines.runtime(llm)
        seen: dict[int, Any] = {}
        route, write, attend = runtime.route, runtime.route.write, runtime.attend
        checked = 0

        def watched_write(owner: Any, place: int, key: Any, value: Any, slot_mapping: Any, stock: Any) -> None:
            for row, slot in enumerate(slot_mapping.tolist()):
                seen[place, slot] = key[row].clone()
            write(owner, place, key, value, slot_mapping, stock)

        def watched_attend(place: int, q: Any, plan: Any, dense: Any) -> Any:
            nonlocal checked
            out = attend(place, q, plan, dense)
            cache, size = runtime.cache, plan.config.cache_config.S
            for units, length in zip(plan.table, plan.lengths.tolist(), strict=True):
                unit = int(units[rng.integers(0, length // size)])
                if cache.state[place].valid(np.array([unit]))[0]:
                    checked += 1
                    mean = sum(seen[place, unit * size + i].double() for i in range(size)) / size
                    fields = cache.summaries[place]
                    stored = fields["mean"][unit, :, 0].double() * fields["mean_scale"][unit, :, 0, None].double()
                    assert (stored - mean).abs().max() <= 1.01 * fields["mean_scale"][unit].max()
            return out

        route.write, runtime.attend = watched_write, watched_attend  # type: ignore[method-assign]
        engines.say(llm, asked, 120, logprobs=None)
        assert metric(llm, "vllm:num_preemptions") > 0 and checked > 1000
        found = engines.stats(llm)
        assert not found["fallbacks"] and not found["failed_writes"] and found["bytes_ratio"] < 0.8
