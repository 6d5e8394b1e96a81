"""Model directories and decoders: what is read, what is refused and how it says so, and every backend's logits
against transformers and mlx-lm on the same saved models."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import NUM_TOKENS, expected, tokens_of
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import eps_cuda
from eps_core import reference
from eps_core.config.cache import DTYPE_BYTES, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.cpu import host
from eps_core.decode.forward import Decoder, load_decoder
from eps_core.errors import ConfigError
from eps_core.models.config import read_limits, read_spec
from eps_core.models.rope import attention_factor, inverse_frequencies
from eps_core.models.spec import ModelSpec
from eps_core.models.tokenizer import load_tokenizer
from eps_core.models.weights import load_weights, weight_names
from eps_core.reference.model import Model

CHUNKS = (37, 23)  # prefilled; the rest of the tokens come one at a time
# Of the standard deviation of the logits. Both sides compute in float32: a handful of sums of ~100 products each way,
# 1e-5 as measured; `test_tolerance_notices` shows that a one percent change of one setting is far outside.
TOLERANCE = 2e-4


def in_older_form(source: Path, target: Path) -> Path:
    """A copy whose config.json is as transformers 4 writes it: rope_theta, rope_scaling and torch_dtype on top."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    if tiny_models.SLIDING in rope:
        rope, config["rope_local_base_freq"] = rope[tiny_models.GLOBAL], rope[tiny_models.SLIDING]["rope_theta"]
    config["rope_theta"] = rope.pop("rope_theta")
    # some families of mlx-lm know the first name of the key alone
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope | {"type": rope["rope_type"]}
    config["torch_dtype"] = config.pop("dtype")
    (target / "config.json").write_text(json.dumps(config))
    return target


class Sequences:
    """A decoder, its cache and B growing sequences whose units lie scattered over the pool."""

    def __init__(
        self, target: tuple, decoder: Decoder, batch: int = 1, config: EpsConfig | None = None, dtype: str = "float32"
    ) -> None:
        backend, device = target
        self.decoder, self.config = decoder, config or EpsConfig.of()
        units_each = -(-NUM_TOKENS // self.config.cache_config.unit_tokens)
        spec = decoder.spec
        cache_spec = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, batch * units_each, dtype)
        self.cache = backend.new_cache(cache_spec, self.config.cache_config, device)
        self.table = np.random.default_rng(0).permutation(batch * units_each).reshape(batch, units_each)
        self.lengths = np.zeros(batch, np.int64)

    def _slots(self, b: int, count: int) -> np.ndarray:
        units, offsets = np.divmod(np.arange(count) + self.lengths[b], self.config.cache_config.unit_tokens)
        self.lengths[b] += count
        return self.table[b, units] * self.config.cache_config.unit_tokens + offsets

    def _table(self, rows: np.ndarray) -> np.ndarray:
        """What an allocator would show: the units in use, then -1."""
        used = -(-self.lengths[rows] // self.config.cache_config.unit_tokens)
        table = self.table[rows, : used.max()].copy()
        table[np.arange(used.max()) >= used[:, None]] = -1
        return table

    def prefill(self, b: int, tokens: np.ndarray) -> np.ndarray:
        slots = self._slots(b, len(tokens))
        table = self._table(np.array([b]))[0]
        self.cache, logits = self.decoder.prefill(self.cache, tokens, slots, table, int(self.lengths[b]))
        assert logits.shape == (tiny_models.VOCAB_SIZE,) and logits.dtype == np.float32
        return logits

    def step(self, tokens: np.ndarray, audit: bool = False):
        rows = np.arange(len(self.table))
        slots = np.concatenate([self._slots(b, 1) for b in rows])
        self.cache, output = self.decoder.step(
            self.cache, tokens, slots, self._table(rows), self.lengths.copy(), self.config.selection_config, audit
        )
        assert output.logits.shape == (len(rows), tiny_models.VOCAB_SIZE) and output.logits.dtype == np.float32
        return output


def load(target: tuple, path: Path, dtype: str = "float32") -> Decoder:
    backend, device = target
    return load_decoder(backend, path, read_spec(path), dtype, device)


def run(target: tuple, decoder: Decoder, tokens: np.ndarray, chunks: tuple[int, ...] = CHUNKS, dtype: str = "float32"):
    """(positions, logits): those that the decoder gives for `tokens`, prefilled in chunks, then one at a time."""
    sequences, positions, logits = Sequences(target, decoder, dtype=dtype), [], []
    for end, size in zip(np.cumsum(chunks, dtype=int), chunks, strict=True):
        chunk = tokens[end - size : end]
        logits.append(sequences.prefill(0, chunk))
        positions.append(sequences.lengths[0] - 1)
    for token in tokens[sum(chunks) :]:
        logits.append(sequences.step(np.array([token])).logits[0])
        positions.append(sequences.lengths[0] - 1)
    return np.array(positions), np.array(logits)


def assert_close(logits: np.ndarray, ref_cache: np.ndarray, tolerance: float = TOLERANCE) -> None:
    spread = ref_cache.std()
    assert spread > 0.5, "the reference's logits are nearly constant: this comparison says nothing"
    np.testing.assert_allclose(logits, ref_cache, rtol=0, atol=tolerance * spread)


# Decoders


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_logits_match_transformers(name: str, target: tuple, saved: Callable) -> None:
    positions, logits = run(target, load(target, saved(name)), tokens_of(name))
    assert_close(logits, expected(name)[positions])


@pytest.mark.parametrize("name", ["llama3.1-tied-sharded", "qwen3"])
def test_prefill_and_steps_agree(name: str, target: tuple, saved: Callable) -> None:
    decoder, tokens = load(target, saved(name)), tokens_of(name)
    _, stepped = run(target, decoder, tokens, chunks=())
    for chunks in [(NUM_TOKENS,), (1, 16, 58), (16, 1, 1, 57)]:
        positions, logits = run(target, decoder, tokens, chunks)
        assert_close(logits, stepped[positions])


def test_sparse_step_reports_what_it_read(target: tuple, saved: Callable) -> None:
    config = EpsConfig.of(
        "meanstd", group_size=4, budget=0.5, num_sink_tokens=4, num_recent_tokens=8, min_context=20, block_size=8
    )
    name = "llama2"  # as many kv heads as query heads
    decoder = load(target, saved(name))
    sequences = Sequences(target, decoder, batch=2, config=config)
    sequences.prefill(0, tokens_of(name)[:10])
    sequences.prefill(1, tokens_of(name)[:61])
    output = sequences.step(np.array([3, 4]))  # lengths 11 and 62: 3 groups (too short to be sparse) and 16
    assert output.fallbacks == {"min_context": 2}
    assert len(output.layers) == 2
    for layer in output.layers:
        np.testing.assert_array_equal(layer.groups, [3, 16])
        np.testing.assert_array_equal(layer.counts, [[3] * 4, [7] * 4])  # 62 tokens * 0.5 / 4
        np.testing.assert_array_equal(layer.always_selected, [3, 4])  # all; the first, and those of the last 8 tokens
        assert layer.skipped_mass is not None and layer.skipped_mass.shape == (2, 4)
        np.testing.assert_array_equal(layer.skipped_mass[0], 0)
        assert (layer.skipped_mass[1] > 0).all() and (layer.skipped_mass[1] < 1).all()
        assert layer.kv_bytes_read == 4 * (3 + 7) * 4 * sequences.cache.spec.kv_token_bytes
        # of each sequence its own groups: the short one's padding is not counted
        assert layer.summary_bytes_read == 4 * (3 + 16) * (2 * 16 + 4)
        assert layer.prepass_ms is None and layer.attention_ms is None
    assert output.kv_bytes_read == sum(layer.kv_bytes_read for layer in output.layers)
    decoder.timing = True  # type: ignore[attr-defined]
    for layer in sequences.step(np.array([3, 4])).layers:
        assert layer.prepass_ms is not None and layer.prepass_ms > 0
        assert layer.attention_ms is not None and layer.attention_ms > 0


def test_dense_step_reports_no_layers(target: tuple, saved: Callable) -> None:
    sequences = Sequences(target, load(target, saved("llama2")), config=EpsConfig.of(min_context=50))
    sequences.prefill(0, tokens_of("llama2")[:20])
    output = sequences.step(np.array([3]))
    assert output.layers == [] and output.fallbacks == {}
    assert output.kv_bytes_read == 2 * 4 * 21 * sequences.cache.spec.kv_token_bytes


@pytest.mark.parametrize("name", ["llama2-bf16-sharded", "qwen2-fp16"])
def test_half_precision_is_as_accurate_as_transformers(name: str, target: tuple, saved: Callable) -> None:
    """In the stored dtype the error against float32 stays within a small multiple of transformers' own."""
    path, dtype, truth = saved(name), tiny_models.MODELS[name].dtype, expected(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens_of(name)[None])).logits[0].float().numpy()
    positions, ours = run(target, load(target, path, dtype), tokens_of(name), dtype=dtype)
    error, allowed = np.abs(ours - truth[positions]), np.abs(theirs - truth)
    assert error.mean() <= 2 * allowed.mean()
    assert error.max() <= 3 * allowed.max()


def test_a_cpu_that_widens_bfloat16_multiplies_many_rows_in_float32(
    saved: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "widens_bfloat16", lambda: True)
    path = saved("llama2-bf16-sharded")
    model = eps_cuda.load_model(path, read_spec(path), "bfloat16", "cpu")
    name, rows = "layers.0.down", np.random.default_rng(0).standard_normal((eps_cuda.model.WIDE_ROWS, 96), np.float32)
    weight, x = model.weights[name], torch.from_numpy(rows).bfloat16()
    product = x.float() @ weight.float().T
    assert torch.equal(model.linear(x, weight, None), product.bfloat16())
    bias = torch.linspace(-1, 1, len(weight)).bfloat16()
    assert torch.equal(model.linear(x, weight, bias), (product + bias.float()).bfloat16())
    q, k, v = (torch.from_numpy(rows).bfloat16().view(10, 4, 24)[:, :n] for n in (4, 2, 2))
    wide = eps_cuda.attend_chunk(None, q.float(), k.float(), v.float())
    assert torch.equal(eps_cuda.attend_chunk(None, q, k, v), wide.bfloat16())
    few = model.linear(x[:1], weight, None)  # the weight is read as it is
    assert few.dtype == torch.bfloat16 and torch.allclose(few.float(), product[:1], rtol=1e-2, atol=1e-2)


def test_a_long_prompt_is_attended_in_pieces_in_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    from eps_mlx import attention

    rng, cache = np.random.default_rng(0), SimpleNamespace(stream=attention.mx.cpu)
    q, k, v = (attention.mx.array(rng.normal(size=(n, h, 16)).astype(np.float32)) for n, h in ((20, 4), *[(33, 2)] * 2))
    whole, calls = attention.attend_chunk(cache, q, k, v), []
    attend = attention.mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.mx.fast, "scaled_dot_product_attention",
        lambda q, *args, **more: (calls.append(q.shape[2]), attend(q, *args, **more))[1],
    )  # fmt: skip
    monkeypatch.setattr(attention, "MOST_LOGITS", 7 * 4 * 33)
    np.testing.assert_allclose(attention.attend_chunk(cache, q, k, v), whole, rtol=1e-5, atol=1e-6)
    assert calls == [7, 7, 6]


def test_nan_in_keys_is_named(target: tuple, saved: Callable, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(saved("llama2"), path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = np.nan
    save_file(weights, path / "model.safetensors")
    for dtype, fix in (
        ("float32", "weights are damaged"),
        ("bfloat16", "bfloat16 cache overflows; try float32"),
    ):
        sequences = Sequences(target, load(target, path, dtype), dtype=dtype)
        with pytest.raises(ConfigError, match=f"NaN or Inf in K of layer 1: .*{fix}"):
            sequences.prefill(0, tokens_of("llama2")[:5])


def _no_bias(short: str) -> Callable[[ModelSpec, dict[str, np.ndarray]], ModelSpec]:
    def change(spec: ModelSpec, weights: dict[str, np.ndarray]) -> ModelSpec:
        weights.pop(f"layers.1.{short}_bias")
        return spec

    return change


def _with(**settings: Any) -> Callable[[ModelSpec, dict[str, np.ndarray]], ModelSpec]:
    """Other settings; one that can be called is what it makes of the spec."""
    return lambda spec, weights: replace(spec, **{k: v(spec) if callable(v) else v for k, v in settings.items()})


def _rope(**settings: Any) -> Callable[[ModelSpec, dict[str, np.ndarray]], ModelSpec]:
    return _with(rope_scaling=lambda spec: spec.rope_scaling | settings)


def _other_query_scale(spec: ModelSpec, weights: dict[str, np.ndarray]) -> ModelSpec:
    weights["layers.1.q_norm"] = weights["layers.1.q_norm"] / np.float32(spec.query_scale)
    return spec


def _swapped_gate(spec: ModelSpec, weights: dict[str, np.ndarray]) -> ModelSpec:
    weights["layers.0.gate"], weights["layers.0.up"] = weights["layers.0.up"], weights["layers.0.gate"]
    return spec


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("llama2", _with(norm_eps=1e-3), id="norm_eps"),
        pytest.param("mistral", _with(rope_theta=lambda spec: spec.rope_theta * 1.01), id="rope_theta"),
        pytest.param("llama3.1-tied-sharded", _with(rope_scaling=None), id="llama3-scaling"),
        pytest.param("llama2-linear-biased", _with(rope_scaling=None), id="linear-scaling"),
        pytest.param("qwen2-yarn", _with(rope_scaling=None), id="yarn-scaling"),
        pytest.param("qwen2-yarn", _rope(attention_factor=1.0), id="yarn-attention-factor"),
        pytest.param("llama2-yarn-numbers", _rope(truncate=True), id="yarn-truncate"),
        pytest.param("qwen3", _with(qk_norm=False), id="qk_norm"),
        pytest.param("llama2", _swapped_gate, id="gate-and-up"),
        pytest.param("phi3", _swapped_gate, id="stacked gate-and-up"),
        pytest.param("phi3", _rope(attention_factor=1.0), id="longrope-attention-factor"),
        pytest.param("phi3", _rope(factors=tuple(tiny_models.LONGROPE["short_factor"])), id="longrope-short-factors"),
        *[
            pytest.param("gemma3", _with(**{setting: value}), id=setting)
            for setting, value in {
                "windows": (23, None, 23, None),
                "window_rope": None,
                "output_norms": False,
                "activation": "silu",
                "embed_scale": 7.9,
            }.items()
        ],
        pytest.param("gemma3", _other_query_scale, id="query_scale"),
        pytest.param("gemma3-256-scaled-capped", _with(logit_cap=None), id="logit_cap"),
        # a bias of k alone cancels in the softmax where RoPE does not turn it; it must show here
        *[
            pytest.param("llama2-linear-biased", _no_bias(b), id=f"{b}_bias")
            for b in ("q", "k", "v", "o", "up", "down")
        ],
    ],
)
def test_tolerance_notices(name: str, change: Callable, saved: Callable) -> None:
    """The comparison of `test_logits_match_transformers` fails for a decoder that is slightly wrong."""
    spec, weights = read_spec(saved(name)), load_weights(saved(name), read_spec(saved(name)))
    positions, logits = run(
        (reference, "cpu"), Decoder(reference, Model(change(spec, weights), weights)), tokens_of(name)
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(logits, expected(name)[positions])


def test_numpy_decoder_refuses_unknown_tokens_and_dtypes(saved: Callable) -> None:
    spec = read_spec(saved("llama2"))
    weights = load_weights(saved("llama2"), spec)
    with pytest.raises(ValueError, match="tokens run from 1 to 300: the vocabulary has 0 to 299"):
        Sequences((reference, "cpu"), Decoder(reference, Model(spec, weights))).prefill(0, np.array([1, 300]))
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        Model(spec, weights, "int8")


# Specifications and weights


def test_what_a_spec_says_beside_the_logits(saved: Callable) -> None:
    biased = read_spec(saved("llama2-linear-biased"))
    assert (biased.max_context, biased.bos_token_id, biased.eos_token_ids) == (512, 256, (257,))
    stored = {name: read_spec(saved(name)).stored_dtype for name in ("mistral", "qwen2-fp16", "llama2-bf16-sharded")}
    assert [*stored.values()] == ["float32", "float16", "bfloat16"]
    assert "transformers takes the short ones up to 64 tokens" in read_spec(saved("phi3")).notes[0]
    (note,) = read_spec(saved("phi3-short-window")).notes
    assert "2 of 2 layers have a sliding window of 30 tokens" in note


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_older_config_form_is_the_same_model(name: str, saved: Callable, tmp_path: Path) -> None:
    assert read_spec(in_older_form(saved(name), tmp_path / "older")) == read_spec(saved(name))


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_weights_are_the_stored_ones(name: str, saved: Callable) -> None:
    """Every row that transformers saved is read once: bit for bit in its stored dtype, unless a family adds to it."""
    path, spec = saved(name), read_spec(saved(name))
    stored = {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}
    weights, names = load_weights(path, spec), weight_names(spec)
    assert list(weights) == list(names)
    assert {one.name for one in names.values()} == set(stored) - ({"lm_head.weight"} if spec.tie_embeddings else set())
    dtype = ml_dtypes.bfloat16 if spec.stored_dtype == "bfloat16" else np.dtype(spec.stored_dtype)
    rows_read = dict.fromkeys(stored, 0)
    for short, array in weights.items():
        one = names[short]
        rows = stored[one.name][one.first : one.first + one.shape[0]]
        rows_read[one.name] += len(rows)
        assert array.shape == one.shape
        if one.offset or one.scale != 1:
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, one.scale * (one.offset + rows.astype(np.float64)), rtol=1e-6)
        else:
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, rows)
    left = {} if not spec.tie_embeddings else {"lm_head.weight": 0}
    assert rows_read == {name: len(array) for name, array in stored.items()} | {k: 0 for k in left if k in stored}


REAL_ROPES = {
    "llama 3.1": tiny_models.LLAMA3_SCALING | {"original_max_position_embeddings": 8192},
    "qwen2.5": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    "no original": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 10_000.0},
    "no factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10_000.0}
    | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 0, "beta_slow": None},
    "attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.9, "rope_theta": 10_000.0}
    | {"truncate": False, "mscale": 0},
    "no blend": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 1, "rope_theta": 10_000.0},
    "betas that cross": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32, "rope_theta": 10_000.0},
    "a factor below one": {"rope_type": "yarn", "factor": 0.5, "rope_theta": 10_000.0},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REAL_ROPES)
def test_scaling_of_every_form_matches_transformers(name: str, tmp_path: Path) -> None:
    rope = dict(REAL_ROPES[name])
    config = tiny_models.transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, head_dim=128, max_position_embeddings=32768, rope_parameters=dict(rope)
    )
    theirs = LlamaRotaryEmbedding(config)
    spec = read_spec(write_config(tmp_path, head_dim=128, max_position_embeddings=32768, rope_parameters=rope))
    ours = inverse_frequencies(spec)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=2e-6 if name == "llama 3.1" else 5e-6)
    if name == "llama 3.1":  # all three ranges of its scaling are in use
        stretch = 500_000.0 ** -(np.arange(0, 128, 2) / 128) / ours
        assert stretch.min() == 1 and np.isclose(stretch.max(), 8) and ((stretch > 1.1) & (stretch < 7.9)).any()
    assert attention_factor(spec) == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_dynamic_scaling_is_none_within_the_context(tmp_path: Path) -> None:
    """transformers turns positions past the context by other frequencies, again at every step; EPS ends before."""
    config = tiny_models.make_config("llama2-dynamic")
    rope, last = LlamaRotaryEmbedding(config), config.max_position_embeddings - 1
    within, _ = rope(torch.zeros(1), torch.tensor([[last]]))
    ours = inverse_frequencies(read_spec(write_config(tmp_path, rope_parameters=config.rope_parameters)))
    np.testing.assert_allclose(within[0, 0, : len(ours)], np.cos(last * ours), atol=1e-4)
    beyond, _ = rope(torch.zeros(1), torch.tensor([[last, 4 * last]]))
    assert not np.allclose(beyond[0, 0, : len(ours)], np.cos(last * ours), atol=1e-2)


# What a config.json may say, and what is refused

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


MISTRAL: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
PHI3: dict[str, Any] = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_act": None}
FULL = ["full_attention"] * 2
MIXED = ["full_attention", "sliding_attention"]
LONGROPE = {key: value for key, value in tiny_models.LONGROPE.items() if key != "rope_theta"}
LONG = {"max_position_embeddings": 8192}
LLAMA3_OLD = {key: value for key, value in tiny_models.LLAMA3_SCALING.items() if key != "rope_theta"}
YARN_OLD = {key: value for key, value in tiny_models.YARN_SCALING.items() if key != "rope_theta"}
ORIGINAL = "original_max_position_embeddings"


def scaled(positions: int, kind: str, factor: float, **original: int) -> dict[str, Any]:
    rope = {"rope_type": kind, "factor": factor, **original}
    return {"max_position_embeddings": positions, "rope_scaling": rope}


def write_config(path: Path, without: tuple[str, ...] = (), **changes: Any) -> Path:
    config = {key: value for key, value in (LLAMA_CONFIG | changes).items() if key not in without}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_defaults_of_a_spare_config(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path, without=("num_key_value_heads", "rope_theta", "architectures")))
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta, spec.rope_scaling) == (4, 16, 10_000.0, None)
    assert (spec.tie_embeddings, spec.qkv_bias, spec.stored_dtype) == (False, False, "float32")
    assert (spec.bos_token_id, spec.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": None}, "head_dim", 16),
        ({"head_dim": 24}, "head_dim", 24),
        ({"dtype": "bfloat16"}, "stored_dtype", "bfloat16"),
        ({"torch_dtype": "float16"}, "stored_dtype", "float16"),
        ({"eos_token_id": [2, 5, 2]}, "eos_token_ids", (2, 5)),
        ({"bos_token_id": 0}, "bos_token_id", 0),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_scaling", None),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta", 5e5),
        # Qwen 2.5 as its README has it: the context in config.json is the one before YaRN
        (scaled(32768, "yarn", 4.0, **{ORIGINAL: 32768}), "max_context", 131072),
        (scaled(40960, "yarn", 4.0, **{ORIGINAL: 32768}), "max_context", 131072),  # Qwen 3: a little more than that
        (scaled(131072, "yarn", 2.0, **{ORIGINAL: 8192}), "max_context", 131072),
        # where config.json names no original context, what it says is all that there is
        (scaled(32768, "yarn", 4.0), "max_context", 32768),
        (scaled(4096, "dynamic", 4.0), "max_context", 4096),
        (scaled(32768, "linear", 8.0), "max_context", 32768),
        (scaled(32768, "linear", 8.0), "context_note", ""),  # that of dynamic scaling: test_model_files.py
        # an original context beside the set comes first, and absent it is the whole one
        ({"rope_scaling": LLAMA3_OLD, ORIGINAL: 128}, "rope_scaling", LLAMA3_OLD | {ORIGINAL: 128}),
        ({"rope_scaling": LLAMA3_OLD | {ORIGINAL: None}}, "rope_scaling", LLAMA3_OLD | {ORIGINAL: 512}),
        ({"partial_rotary_factor": 1.0}, "head_dim", 16),
        ({"model_type": "mistral", "architectures": None, "sliding_window": None}, "family", "mistral"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": False, "sliding_window": 4096},
            "qkv_bias",
            True,
        ),
        ({"model_type": "qwen3", "architectures": None}, "head_dim", 128),
        # windows that transformers computes as full attention in every layer
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}, "family", "qwen2"),
        (QWEN2 | {"use_sliding_window": True}, "family", "qwen2"),  # transformers' default: from layer 28 on
        (QWEN2 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, "family", "qwen2"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "layer_types": FULL}, "windows", ()),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, "family", "qwen2"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 512}, "windows", ()),
        (PHI3 | {"sliding_window": 512}, "windows", ()),
        # windows that cut, of the default size where the key is missing
        (LONG | MISTRAL | {"sliding_window": 4000}, "windows", (4000, 4000)),
        (LONG | MISTRAL, "windows", (4096, 4096)),
        # layer_types come first, as in transformers, which takes Ministral's class then
        (MISTRAL | {"sliding_window": 20, "layer_types": FULL}, "windows", ()),
        (MISTRAL | {"sliding_window": 20, "layer_types": MIXED}, "windows", (None, 20)),
        (MISTRAL | {"sliding_window": None, "layer_types": FULL}, "windows", ()),
        # transformers begins the window at layer 28 where max_window_layers is missing
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 29},
            "windows",
            (None,) * 28 + (64,),
        ),
        (LONG | QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, "windows", (4096, 4096)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "layer_types": MIXED}, "windows", (None, 64)),
        (LONG | PHI3 | {"sliding_window": 2047}, "windows", (2047, 2047)),
        (PHI3, "num_kv_heads", 2),
        (PHI3 | {"rms_norm_eps": None}, "norm_eps", 1e-5),
        (PHI3 | {"num_key_value_heads": None}, "num_kv_heads", 4),
        (GEMMA3, "head_dim", 256),
        (GEMMA3, "tie_embeddings", True),
        (GEMMA3 | {"num_hidden_layers": 7, "sliding_window": 9}, "windows", (9, 9, 9, 9, 9, None, 9)),
        (GEMMA3 | {"sliding_window_pattern": 2, "sliding_window": 9}, "windows", (9, None)),
        (GEMMA3 | {"head_dim": 168, "query_pre_attn_scalar": 42}, "query_scale", 2.0),
        (GEMMA3 | {"rope_local_base_freq": 7e3}, "rope_theta", 1e4),
        (GEMMA3 | {"rope_theta": None}, "rope_theta", 1e6),
    ],
)
def test_config_field(changes: dict, field: str, value: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, **changes)
    assert getattr(read_spec(path), field) == value
    assert field != "max_context" or read_limits(path)[0] == value  # engines hold as much


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 16, "max_window_layers": 2},
        {"sliding_window": None, "max_window_layers": 0},
        {"sliding_window": 512, "max_window_layers": 0},
    ],
)
def test_a_window_of_no_layer_is_full_attention_as_in_transformers(
    changes: dict, saved: Callable, tmp_path: Path
) -> None:
    path = shutil.copytree(saved("qwen2-fp16"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"use_sliding_window": True} | changes
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    tokens = tokens_of("qwen2-fp16")
    positions, logits = run(
        (reference, "cpu"), load_decoder(reference, path, read_spec(path), "float32", "cpu"), tokens
    )
    assert_close(logits, tiny_models.reference_logits(path, tokens.tolist())[positions])


def test_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_spec(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, ("model_type 'gpt2'", "llama, mistral, qwen2, qwen3, phi3, gemma3_text")),
        ({"model_type": None}, ("model_type None", "llama, mistral, qwen2, qwen3, phi3, gemma3_text")),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            ("'LlamaForSequenceClassification'", "EPS reads LlamaForCausalLM"),
        ),
        ({"hidden_act": "gelu"}, ("hidden_act 'gelu'", "EPS reads silu")),
        ({"layer_types": MIXED}, ("layer_types", "'sliding_attention'")),
        (MISTRAL | {"sliding_window": None, "layer_types": MIXED}, ("layer_types", "'sliding_attention'")),
        (QWEN2 | {"layer_types": MIXED}, ("layer_types", "'sliding_attention'", "use_sliding_window")),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["linear"] * 2}, ("layer_types", "'linear'")),
        (QWEN2 | {"use_sliding_window": True, "layer_types": MIXED * 2}, ("layer_types", "each of 2 layers")),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, ("long_factor", "same length")),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7, "short_factor": [1.0] * 7}},
            ("long_factor", "each of 8 pairs"),
        ),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": 2.0}}, ("short_factor 2.0", "list of positive numbers")),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 8}}, ("long_factor", "list of positive numbers")),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": None}}, ("lacks 'long_factor'",)),
        (PHI3 | {"partial_rotary_factor": 0.75}, ("partial_rotary_factor 0.75", "EPS reads 1")),
        (GEMMA3 | {"hidden_activation": "gelu"}, ("hidden_activation 'gelu'", "EPS reads gelu_pytorch_tanh")),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping 50.0", "none")),
        (GEMMA3 | {"use_bidirectional_attention": True}, ("use_bidirectional_attention True", "none")),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, ("query_pre_attn_scalar 0", "positive")),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 5.0}}, ("rope_parameters", "a set for each kind of layer")),
        (GEMMA3 | {"rope_scaling": 5}, ("rope_scaling 5", "the set of the global layers")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "unquantised")),
        ({"quantization": {"bits": 4}}, ("quantised: MLX, 4 bits (quantization of", "unquantised")),
        ({"rope_parameters": {"rope_type": "su"}}, ("rope type 'su'", "linear, dynamic, llama3, yarn, longrope")),
        ({"rope_scaling": {"rope_type": "yarn"}}, ("lacks 'factor'",)),
        ({"rope_scaling": {"type": "dynamic"}}, ("lacks 'factor'",)),
        ({"rope_scaling": YARN_OLD | {"truncate": 1}}, ("truncate 1", "true or false")),
        ({"rope_scaling": YARN_OLD | {"attention_factor": 0}}, ("attention_factor 0", "positive")),
        ({"rope_scaling": YARN_OLD | {"mscale": "much"}}, ("mscale 'much'", "positive")),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, ("rotary embeddings", "overflow")),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, ("0000... is past what a float64 holds",)),
        ({"rope_theta": 10**400}, ("0000... is past what a float64 holds",)),
        ({"rms_norm_eps": 10**400}, ("0000... is past what a float64 holds",)),
        ({"architectures": 5}, ("architectures 5", "list of names")),
        ({"architectures": "LlamaForCausalLM"}, ("architectures 'LlamaForCausalLM'", "list of names")),
        ({"layer_types": 5}, ("layer_types 5", "list of names")),
        ({"num_hidden_layers": 2**62}, ("num_hidden_layers 4611686018427387904", "at most 4096")),
        ({"hidden_size": 2**62}, ("hidden_size 4611686018427387904", "at most 16777216")),
        ({"head_dim": 2**40}, ("head_dim 1099511627776", "at most 65536")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ("rope_parameters", "one flat set")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("lacks 'factor'",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ("factor 0", "positive")),
        ({"rope_scaling": LLAMA3_OLD | {"high_freq_factor": 1.0}}, ("low_freq_factor 1.0", "below")),
        ({"rope_theta": -1.0}, ("rope_theta -1.0", "positive")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5", "EPS reads 1")),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, ("partial_rotary_factor 0.25",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads 3", "divisor of num_attention_heads 4")),
        ({"head_dim": 15}, ("head_dim 15", "even")),
        ({"hidden_size": "64"}, ("hidden_size '64'", "integer of at least 1")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers 0", "at least 1")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps 0", "positive")),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings 'no'", "true or false")),
        ({"eos_token_id": ["</s>"]}, ("eos_token_id ['</s>']", "token id")),
        ({"dtype": "float64"}, ("dtype 'float64'", "float32, float16, bfloat16")),
    ],
)
def test_unsupported_config_is_named(changes: dict, says: tuple[str, ...], tmp_path: Path) -> None:
    assert_refused(lambda: read_spec(write_config(tmp_path, **changes)), "config.json", *says)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
def test_missing_config_field_is_named(key: str, tmp_path: Path) -> None:
    assert_refused(lambda: read_spec(write_config(tmp_path, without=(key,))), "config.json", f"lacks '{key}'")


def assert_refused(call: Callable[[], Any], *says: str) -> None:
    """`call` raises a ConfigError of one line that says all of it."""
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    for part in says:
        assert part in message, message


def test_unreadable_config_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert_refused(lambda: read_spec(tmp_path / "absent"), "absent", "is missing", "config.json")
    assert_refused(lambda: read_spec(tmp_path), str(file), "is missing")
    file.write_text('{"model_type": ')
    assert_refused(lambda: read_spec(tmp_path), str(file), "is not JSON")
    file.write_bytes(b"\xff\xfe\x00{")
    assert_refused(lambda: read_spec(tmp_path), str(file), "is UTF-16, not UTF-8")
    file.write_text("[1, 2]")
    assert_refused(lambda: read_spec(tmp_path), str(file), "holds a JSON list")
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    assert_refused(lambda: read_spec(tmp_path), "generation_config.json", "is not JSON")


def refuse_weights(path: Path, *says: str) -> None:
    assert_refused(lambda: load_weights(path, read_spec(path)), *says)


def test_absent_weights_are_named(damaged: Callable) -> None:
    path = damaged("llama2")
    (path / "model.safetensors").unlink()
    refuse_weights(path, str(path), "no weights", "model.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"")
    refuse_weights(path, str(path), "pytorch_model.bin", "convert them to safetensors")


def test_broken_index_is_named(damaged: Callable) -> None:
    path = damaged("llama2-bf16-sharded")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text("{}")
    refuse_weights(path, str(index), "lacks a 'weight_map'")
    index.write_text("{")
    refuse_weights(path, str(index), "is not JSON")
    shards = sorted(set(content["weight_map"].values()))
    moved = next(name for name, shard in content["weight_map"].items() if shard == shards[0])
    content["weight_map"][moved] = shards[1]
    index.write_text(json.dumps(content))
    refuse_weights(path, moved, "missing in the shard")


@pytest.mark.parametrize("name", ["llama2", "llama2-bf16-sharded"])
@pytest.mark.parametrize(
    "spoil", [*(lambda data, n=n: data[:n] for n in (0, 5, 100, 20_000)), lambda data: data[:8] + bytes(32) + data[40:]]
)
def test_truncated_and_corrupt_weights_are_named(name: str, spoil: Callable, damaged: Callable) -> None:
    path = damaged(name)
    file = sorted(path.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    assert len(content) > 20_000
    file.write_bytes(spoil(content))
    refuse_weights(path, str(file), "truncated or corrupt")


def test_mismatched_weights_are_named(damaged: Callable) -> None:
    path = damaged("llama2")
    file, name = path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)

    save_file({key: value for key, value in weights.items() if key != name}, file)
    refuse_weights(path, name, "is missing")
    save_file(weights | {name: np.zeros((95, 64), np.float32)}, file)
    refuse_weights(path, name, "(95, 64)", "(96, 64)")
    save_file(weights | {name: np.zeros((96, 64), np.int8)}, file)
    refuse_weights(path, name, "dtype I8", "F32, F16, BF16")
    save_file(weights | {"model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32)}, file)
    refuse_weights(path, "model.layers.1.self_attn.q_proj.bias", "has no place")
    # what old checkpoints carry along changes nothing
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}, file)
    assert load_weights(path, read_spec(path)).keys() == weight_names(read_spec(path)).keys()


def test_bad_tokenizer_is_named(damaged: Callable) -> None:
    file = damaged("llama2") / "tokenizer.json"
    file.write_text('{"version": "1.0"}')
    assert_refused(lambda: load_tokenizer(file.parent), str(file), "no tokenizer")
    file.unlink()
    assert_refused(lambda: load_tokenizer(file.parent), str(file), "is missing")


def test_every_cache_dtype_can_be_stored() -> None:
    assert {model.dtype for model in tiny_models.MODELS.values()} == set(DTYPE_BYTES)


@pytest.mark.parametrize(
    ("settings", "lengths", "expected"),
    [
        ({"budget": 1.0}, [100, 7], True),
        ({"budget": 0.5}, [100], False),
        ({"budget": 50.0}, [50, 51], False),
        ({"min_context": 60, "budget": 0.1}, [59], True),
        ({"min_context": 60, "budget": 0.1}, [59, 60], False),
        ({"policy": "threshold", "top_pages": 50}, [100], False),
        (
            {"budget": 1.0, "head_modes": (("sparse", "window"),)},
            [100],
            False,
        ),  # a window head reads its sink and recent tokens alone
        ({"budget": 0.1, "head_modes": (("dense", "dense"),)}, [100], True),
    ],
)
def test_what_needs_no_score(settings, lengths, expected):
    assert EpsConfig.of(method="box", group_size=4, **settings).reads_all(0, lengths) is expected
