"""Models some of whose layers have a sliding window: sparse decoding with everything in its budget equals transformers,
layers with a window read the window alone and say so, and what cannot serve them refuses by name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import outcome
from test_model import Sequences, assert_close, assert_refused, load
from tiny_models import NUM_TOKENS, expected, tokens_of

from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.evicting import evicting
from eps_core.decode.llm import LLM, Generation
from eps_core.decode.session import Session
from eps_core.evaluation.capture import CaptureRequest, capture
from eps_core.eviction.config import EvictionConfig
from eps_core.kv_cache.rows import Rows
from eps_core.load import load_backend
from eps_core.metrics.steps import summarise
from eps_core.models.config import read_spec
from eps_core.models.registry import FAMILIES

NEW = ("phi3", "phi3-short-window", "gemma3", "gemma3-256-scaled-capped", "mistral-window", "qwen2-window")
WHOLE = EpsConfig.of("rq", group_size=4, budget=1.0, num_sink_tokens=4, num_recent_tokens=8)
SPARSE = EpsConfig.of("rq", group_size=4, budget=0.3, num_sink_tokens=4, num_recent_tokens=8)
WINDOW = 24  # of the layers 0 and 2 of "gemma3"


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("config", [EpsConfig.of(), WHOLE], ids=["off", "rq-all"])
@pytest.mark.parametrize("name", NEW)
def test_a_ragged_batch_with_everything_in_its_budget_equals_transformers(
    name: str, config: EpsConfig, target: tuple, saved: Callable
) -> None:
    """Sequences within a window, past it and far past it step together."""
    tokens, starts = tokens_of(name), np.array([0, 22, 63])
    sequences = Sequences(target, load(target, saved(name)), batch=3, config=config)
    for b in (1, 2):
        sequences.prefill(b, tokens[: starts[b]])
    for step in range(NUM_TOKENS - 63):
        assert_close(sequences.step(tokens[starts + step]).logits, expected(name)[starts + step])


@pytest.mark.kernels("numba")
def test_a_window_reads_its_tokens_and_is_counted(target: tuple, saved: Callable) -> None:
    tokens = tokens_of("gemma3")
    sequences = Sequences(target, load(target, saved("gemma3")), batch=2, config=SPARSE)
    sequences.prefill(0, tokens[:10])
    sequences.prefill(1, tokens[:70])
    token_bytes = 2 * sequences.cache.spec.kv_token_bytes
    output = sequences.step(tokens[[10, 70]])  # 11 and 71 tokens: 3 and 18 groups
    assert output.fallbacks == {"sliding_window": 4}
    for layer in (0, 2):
        stats = output.layers[layer]
        np.testing.assert_array_equal(stats.counts, [[3, 3], [6, 6]])
        np.testing.assert_array_equal(stats.groups, [3, 6])
        assert stats.kv_bytes_read == (11 + WINDOW) * token_bytes
        assert stats.summary_bytes_read == 0 and not stats.skipped_mass.any()
    for layer in (1, 3):
        stats = output.layers[layer]
        np.testing.assert_array_equal(stats.groups, [3, 18])
        np.testing.assert_array_equal(stats.counts, [[3, 3], [5, 5]])
        assert stats.summary_bytes_read > 0
        assert stats.kv_bytes_read == (3 + 5) * 4 * token_bytes  # whole groups of 4
    assert output.kv_bytes_read == sum(layer.kv_bytes_read for layer in output.layers)
    assert np.abs(output.logits[1] - expected("gemma3")[70]).max() > 1e-3  # it is sparse
    assert np.isfinite(output.logits).all()


@pytest.mark.kernels("numba")
def test_a_dense_step_is_counted_by_windows(target: tuple, saved: Callable) -> None:
    sequences = Sequences(target, load(target, saved("gemma3")))
    sequences.prefill(0, tokens_of("gemma3")[:70])
    output = sequences.step(np.array([3]))
    spec = CacheSpec(4, 2, 32, 1, windows=(WINDOW, None, WINDOW, None))
    assert output.kv_bytes_read == spec.exact_kv_bytes([71]) == (2 * 71 + 2 * WINDOW) * 2 * spec.kv_token_bytes


def test_a_verify_pass_reads_a_window_once_a_row_and_the_rest_once(saved: Callable) -> None:
    target = load_backend("cuda"), "cpu"
    sequences = Sequences(target, load(target, saved("gemma3")))
    sequences.prefill(0, tokens_of("gemma3")[:70])
    slots = sequences._slots(0, 3)
    rows = Rows.of(sequences._table(np.array([0])), sequences.lengths.copy(), np.array([3]))
    _, output = sequences.decoder.verify(sequences.cache, np.array([3, 4, 5]), slots, rows)
    assert output.kv_bytes_read == (2 * 73 + 2 * 3 * WINDOW) * 2 * sequences.cache.spec.kv_token_bytes


@pytest.mark.parametrize("backend", ["numpy", "cuda", "mlx"])
def test_a_session_generates_audits_and_verifies(backend: str, saved: Callable) -> None:
    path, text = saved("gemma3"), "the key of 7 is 3 and of 9 is 4; " * 5

    def said(config: EpsConfig, speculative: bool = False) -> Generation:
        llm = LLM(path, config=config, backend=backend, device="cpu", speculative=speculative)
        return llm.generate(text, max_new_tokens=8, ignore_eos=True)

    dense, sparse = said(EpsConfig()), said(SPARSE)
    assert dense.kv_bytes_read == dense.kv_bytes_dense == sparse.kv_bytes_dense > sparse.kv_bytes_read
    assert said(WHOLE).tokens == said(SPARSE, speculative=True).tokens == dense.tokens


@pytest.mark.kernels("numba")
def test_an_audit_of_a_step_is_that_of_dense_attention(target: tuple, saved: Callable) -> None:
    tokens = tokens_of("gemma3")
    sequences = Sequences(target, load(target, saved("gemma3")), config=SPARSE)
    sequences.prefill(0, tokens[:70])
    for at in range(70, 73):
        output = sequences.step(tokens[at : at + 1], audit=True)
        true = [layer.skipped_mass_true for layer in output.layers]
        assert not true[0].any() and not true[2].any() and true[1].all()
        assert output.dense_logits is not None
        if at == 70:  # later ones attend to keys of sparse steps
            assert_close(output.dense_logits[0], expected("gemma3")[70])


def test_a_run_says_which_layers_are_dense_and_counts_them(saved: Callable, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("the key of 7 is 3 and of 9 is 4; " * 10)
    line = f"run --model {saved('gemma3')} --backend numpy --prompt-file long.txt --method rq --eps-budget 0.2 "
    found = outcome([*line.split(), *"--eps-sink-tokens 4 --eps-recent-tokens 8 --max-new-tokens 4".split()], tmp_path)
    assert found.code in (None, 0), found.err
    assert "2 of 4 layers have a sliding window of 24 tokens: they read it densely, EPS the other 2" in found.out
    assert '"sliding_window": 8' in found.out


def test_what_needs_full_attention_refuses_by_name(saved: Callable, tmp_path: Path) -> None:
    session = Session.open(saved("gemma3"), "numpy")
    says = "full attention in every layer, and 2 of the 4 layers of this gemma3_text have a sliding window"
    assert_refused(
        lambda: evicting(session, EvictionConfig("snapkv", 0.5), EpsConfig.of().cache_config, [40], 4), "eviction", says
    )
    text = tmp_path / "long.txt"
    text.write_text("the key of 7 is 3; " * 10)
    request = CaptureRequest(
        model=saved("gemma3"), backend="numpy", text=text, output=tmp_path / "c.safetensors", context_tokens=60,
        num_steps=2, layers=(1, 2), config=EpsConfig.of(),
    )  # fmt: skip
    assert_refused(lambda: capture(request), "layer 2 of this gemma3_text has a sliding window", "--layers")


def test_no_cuda_graph_serves_a_window(saved: Callable) -> None:
    from eps_cuda import load_model

    for name, served in (("gemma3", False), ("phi3", True)):
        model = load_model(saved(name), read_spec(saved(name)), "float32", "cpu")
        cached = SimpleNamespace(kernels="triton", cache_config=SimpleNamespace(method="off"), spec=None)
        step = lambda: model.whole_step(cached, None, None, None, False, False, False)  # noqa: B023, E731
        if served:
            with pytest.raises(AttributeError):
                step()  # it looks at the cache
        else:
            assert step() is None


def test_a_ratio_is_against_what_the_model_itself_would_read(saved: Callable) -> None:
    spec = read_spec(saved("gemma3"))
    made = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 1, windows=spec.windows)
    assert made.attended([10, 100]) == [[10, 24], [10, 100], [10, 24], [10, 100]]
    assert made.exact_kv_bytes([10, 100]) == (2 * 34 + 2 * 110) * spec.num_kv_heads * made.kv_token_bytes
    assert summarise([])["bytes_ratio"] is None


def test_the_readme_names_every_family() -> None:
    names = {"llama": "Llama 2/3/3.1", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi-3"}
    names["gemma3_text"] = "Gemma 3 (text)"
    assert set(names) == set(FAMILIES)
    root = Path(__file__).parent.parent
    for page in ("README.md", "docs/models.md"):
        text = " ".join((root / page).read_text().split())
        assert not [name for name in names.values() if name not in text], page
