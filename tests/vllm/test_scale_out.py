"""EPS in several processes of vLLM: every worker of a tensor-parallel engine has the summaries of its own kv heads."""

import engines
import pytest

NEW_TOKENS = 8
SETTINGS = {"method": "rq", "budget": 0.05, "budget_floor": 0}


def said(processes: int) -> tuple[list[str], list[dict]]:
    """Return what an engine of so many processes says of two documents, and the counters of each process."""
    asked, _ = engines.needles(1500, 1200)
    more = {"tensor_parallel_size": processes, "distributed_executor_backend": "mp"} if processes > 1 else {}
    with engines.engine(engines.DEMO, SETTINGS, **more) as llm:
        texts = [engines.text(tokens) for tokens, _ in engines.say(llm, asked, NEW_TOKENS, logprobs=None)]
        return texts, llm.collective_rpc("eps_stats")


def test_two_processes_say_and_read_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    _, answers = engines.needles(1500, 1200)
    (alone, [whole]), (together, halves) = said(1), said(2)
    assert together == alone and all(text.startswith(answer) for text, answer in zip(alone, answers, strict=True))
    assert len(halves) == 2
    for name in ("bytes_kv_read", "bytes_kv_dense", "bytes_summary_read", "groups_selected"):
        assert [half[name] for half in halves] == [whole[name] // 2] * 2, name
    assert all(half["steps"] == whole["steps"] > 0 and not half["fallbacks"] for half in halves)
