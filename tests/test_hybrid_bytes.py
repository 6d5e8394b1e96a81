"""Of a model of which some layers alone are sparse, both ratios are said: of these layers, and of all its KV reads."""

from pathlib import Path

import pytest
import tiny_models
import torch
from command import last as last_line
from command import lines_of, outcome
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from eps_core.integrations.plan import Plan

WINDOW, PROMPT, NEW = 32, "the rain fell in torrents. " * 9, 4


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3: five layers with a sliding window, then one of full attention."""
    path = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    own = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": WINDOW, "pad_token_id": 0}
    config = Gemma3TextConfig(**tiny_models.COMMON | own)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tiny_models.save_tokenizer(path / "tokenizer.json")
    # not Gemma's own, which the family would mean
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.mark.parametrize("engine", ["transformers", "mlx-lm"])
def test_the_table_says_both(engine: str, hybrid: Path, tmp_path: Path) -> None:
    line = ["run", "--engine", engine, "--model", str(hybrid), "--prompt", PROMPT, "--max-new-tokens", str(NEW)]
    line += ["--method", "rq", "--eps-budget", "0.2", "--no-stop", "--dtype", "float32", "--metrics", "m.jsonl"]
    done = outcome(line, tmp_path)
    found = last_line(done)
    _, *steps, last = lines_of(tmp_path / "m.jsonl")
    token_bytes = 2 * 2 * 16 * 4  # of a layer: K and V, heads, dims, float32
    sliding = 5 * WINDOW * token_bytes * len(steps)
    full = sum(step["bytes_kv_dense"] for step in steps)
    read = sum(step["bytes_kv_read_est"] + step["bytes_summary_read"] for step in steps)
    assert found["bytes_ratio"] == pytest.approx(read / full) and found["bytes_ratio"] < 0.5
    assert found["bytes_ratio_model"] == pytest.approx((read + sliding) / (full + sliding)) == last["bytes_ratio_model"]
    said = " ".join(done.out.split())
    assert f"bytes against dense, 1 of 6 layers 1.0000 {found['bytes_ratio']:.4f}" in said
    assert f"of the whole model's KV reads 1.0000 {found['bytes_ratio_model']:.4f}" in said


def test_a_layer_reads_its_window_and_nothing_where_it_has_no_attention() -> None:
    plan = Plan.of(["sliding window", None, "no attention", "soft-capped"], [100, None, 0, None])
    assert [plan.dense_tokens(length) for length in (40, 100, 1000)] == [40 + 40, 100 + 100, 100 + 1000]
    assert Plan.of([None, None]).dense_tokens(1000) == 0
