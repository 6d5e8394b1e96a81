"""Balanced keys (`decode.balance`): the exponents against their mathematics, dense decoding bit for bit as without."""

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from command import last, outcome, refused
from tiny_models import VOCAB_SIZE, changed, save_model, saved
from transformers import AutoModelForCausalLM

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.decode.balance import MOST, TOKENS, exponents
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.evaluation.compare import prepare
from eps_core.evaluation.request import RunRequest
from eps_core.eviction.config import EvictionConfig
from eps_core.load import backend_name
from eps_core.metrics import terminal
from eps_core.models.config import read_spec
from eps_core.models.folder import weight_files
from eps_core.models.weights import load_weights, opened_weights
from eps_cuda.model import TOGETHER, Model

SPEC = replace(read_spec(saved("llama2")), num_heads=6, num_kv_heads=2, head_dim=16)
# all that makes keys: biases, norms, windows, stacked weights, one kv head, heads of their own
_FOLDER = TemporaryDirectory(prefix="eps-tests-")
MODELS = "llama2", "qwen2-tied", "qwen3", "phi3", "gemma3-256-scaled-capped"


@cache
def uneven(name: str) -> Path:
    """The directory of a tiny model whose keys' dimensions are not alike in size, as drawn ones are."""

    def change(model) -> None:
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("k_proj", "qkv_proj", "k_norm")):
                sizes = torch.randn(len(parameter), generator=torch.Generator().manual_seed(0)).exp()
                parameter.mul_(sizes.view(-1, *[1] * (parameter.ndim - 1)))

    return save_model(name, Path(_FOLDER.name) / name, change=change)


def unlike(seed: int, spec=SPEC, nats: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Queries [T, Hq, D] and keys [T, Hkv, D] whose RoPE pairs differ in size by head."""
    rng, half = np.random.default_rng(seed), spec.head_dim // 2

    def drawn(heads: int) -> np.ndarray:
        sizes = np.tile(np.exp(rng.normal(0, nats, (heads, half))), 2)
        return rng.standard_normal((128, heads, spec.head_dim)) * sizes

    return drawn(spec.num_heads), drawn(spec.num_kv_heads)


def energies(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(of queries, of keys about the means of 64): [Hkv, D] mean squares, each written out head by head."""
    group, spans = queries.shape[1] // keys.shape[1], keys.reshape(2, 64, *keys.shape[1:])
    rest = (spans - spans.mean(axis=1, keepdims=True)).reshape(keys.shape)
    asked = [(queries[:, head * group : (head + 1) * group] ** 2).mean(axis=(0, 1)) for head in range(keys.shape[1])]
    return np.array(asked), (rest**2).mean(axis=0)


@pytest.mark.parametrize("seed", range(5))
def test_exponents_make_the_error_of_codes_nearly_least(seed: int):
    """Weights within a factor of sqrt 2 of the best ones: of the least error (Cauchy and Schwarz), with one weight a
    pair, at most (4 + 1)^2 / 16 (Kantorovich), and never more than without."""
    queries, keys = unlike(seed, nats=1.0)
    found = exponents(SPEC, queries, keys, 64)
    asked, coded = energies(queries, keys)
    pairs = [one.reshape(2, 2, -1).mean(axis=1) for one in (asked, coded)]
    least = np.sqrt(pairs[0] * pairs[1]).sum(axis=-1) ** 2
    error = (pairs[1] * 4.0**found).sum(axis=-1) * (pairs[0] * 4.0**-found).sum(axis=-1)
    assert found.dtype == np.int8 and np.abs(found).max() < MOST and np.abs(found).max() > 0
    assert (error <= 25 / 16 * least).all() and (error >= least * (1 - 1e-9)).all()
    assert (error <= pairs[1].sum(axis=-1) * pairs[0].sum(axis=-1)).all()


def test_exponents_are_of_the_energies_and_nothing_else():
    queries, keys = unlike(7)
    found = exponents(SPEC, queries, keys, 64)
    assert np.array_equal(found, exponents(SPEC, 1000 * queries, keys / 7, 64)), "a factor of all dimensions"
    offsets = np.repeat(np.random.default_rng(0).normal(0, 50, (2, *keys.shape[1:])), 64, axis=0)
    assert np.array_equal(found, exponents(SPEC, queries, keys + offsets, 64)), "means of 64 are not coded"
    assert not np.array_equal(found, exponents(SPEC, queries, keys + offsets, 32 * 4)), "means of 128 are others"
    balanced = np.tile(2.0**found, 2)
    again = exponents(SPEC, queries / np.repeat(balanced, 3, axis=0), keys * balanced, 64)
    assert found.any() and not again.any(), "what is balanced stays so"


def test_energies_of_nothing_and_of_extremes_are_no_exponents():
    queries, keys = unlike(3)
    queries[..., [0, 8]] = 0  # a pair that is never asked
    keys[..., [1, 9]] = 5  # one that never varies
    keys[..., [2, 10]] *= 1e30
    found = exponents(SPEC, queries, keys, 64)
    assert np.abs(found).max() <= MOST and (found[:, 2] == -MOST).all()
    assert not exponents(SPEC, 0 * queries, keys, 64).any() and not exponents(SPEC, queries, 0 * keys, 64).any()


def test_heads_that_share_a_norm_share_exponents():
    spec = replace(SPEC, qk_norm=True)
    found = exponents(spec, *unlike(5), 64)
    assert np.array_equal(found[0], found[1]) and found.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_dense_decoding_keeps_its_bits(target, name: str, dtype: str):
    """K is that of the weights as they are, times powers of two; logits are the same bits, also with weights that are
    quantised after."""
    backend, device = target
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 150).tolist()
    path, settings = uneven(name), (backend_name(backend), device, dtype, dtype, "arrays")
    plain, balanced = Session.open(path, *settings), Session.open(path, *settings, method="rq")
    before, after = plain.prefix(tokens), balanced.prefix(tokens)
    found = balanced.exponents
    assert plain.exponents is None and found is not None
    assert found.shape == (plain.spec.num_layers, plain.spec.num_kv_heads, plain.spec.head_dim // 2)
    assert set(np.flatnonzero(np.abs(found).sum(axis=(1, 2)))) == set(plain.spec.full)
    for layer, (own, other) in enumerate(zip(before.keys_values, after.keys_values, strict=True)):
        (k, v), (its_k, its_v) = ([backend.to_numpy(x).astype(np.float64) for x in pair] for pair in (own, other))
        assert np.array_equal(k * 2.0 ** np.tile(found[layer], 2), its_k) and np.array_equal(v, its_v)
    for bits in (None, 8):
        if bits and name.startswith("gemma3") and device != "cpu":
            continue
        logits = [step_logits(session, bits, tokens[:40]) for session in (plain, balanced)]
        assert np.array_equal(*logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_steps_keep_their_bits(dtype: str):
    """Whole steps and rows of few tokens read the same weights as prefills, with full weights and with 8 and 4 bits."""
    settings = uneven("qwen2-tied"), "cuda", "cpu", dtype, dtype, "numba"
    plain, balanced = Session.open(*settings), Session.open(*settings, method="rq")
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 70).tolist()
    for bits in (None, 8, 4):
        assert np.array_equal(*(step_logits(session, bits, tokens) for session in (plain, balanced))), bits
    assert balanced.exponents is not None and balanced.exponents.any()


def test_rows_are_multiplied_where_steps_read_them():
    """Parts of joined weights are views of them, also where a part does not begin at a cache line."""
    rng, names = np.random.default_rng(0), [f"layers.0.{name}" for together in TOGETHER for name in together]
    drawn = {name: rng.standard_normal((48, 40)) for name in (*names, "embed")}
    drawn |= {f"{name}_bias": rng.standard_normal(48) for name in names[:3]}
    weights = {name: torch.from_numpy(array).bfloat16() for name, array in drawn.items()}
    model = Model(replace(SPEC, num_layers=1, num_heads=3, num_kv_heads=3), dict(weights), "bfloat16", "cpu")
    for name in ("layers.0.k", "layers.0.k_bias"):
        model.multiply_rows(name, np.full(48, 4.0, np.float32))
        assert torch.equal(model.weights[name], 4 * weights[name])
    joined = model.joined["layers.0.q"]
    assert torch.equal(joined.weight, torch.cat([model.weights[name] for name in names[:3]]))
    assert torch.equal(joined.bias, torch.cat([model.weights[f"{name}_bias"] for name in names[:3]]))


def step_logits(session: Session, bits: int | None, tokens: list[int]) -> np.ndarray:
    """The logits of a dense step after a prompt."""
    cache, pool = session.cache(CacheConfig(), len(tokens))
    decoder = session.decoder.quantised(bits)
    sequence, _ = pool.open()
    slots, _ = pool.append(sequence, tokens)
    table = pool.table([sequence])
    cache, _ = decoder.prefill(cache, np.array(tokens[:-1]), slots[:-1], table[0], len(tokens) - 1)
    _, output = decoder.step(cache, np.array(tokens[-1:]), slots[-1:], table, np.array([len(tokens)]))
    return output.logits


def test_only_sessions_that_code_keys_balance_them(target):
    backend, device = target
    settings = backend_name(backend), device, "float32", "float32", "arrays"
    path = saved("llama2")
    for config, kv_bits, expected in (
        (EpsConfig(), (16, 16), False), (EpsConfig("box"), (16, 16), False), (EpsConfig("rq"), (16, 16), True),
        (EpsConfig("rq"), (8, 8), False),
    ):  # fmt: skip
        half = Session.open(path, *settings[:2], "float32", "float16", "arrays", config, kv_bits=kv_bits)
        assert not half.balanced
        session = Session.open(path, *settings, config, kv_bits=kv_bits)
        session.load()
        assert session.balanced == expected == (session.exponents is not None)


def test_stored_prompts_of_other_exponents_are_others(tmp_path: Path):
    session = Session.open(uneven("llama2"), "numpy", method="rq", cache_dir=tmp_path)
    session.load()
    before = session.stored(session.config.cache_config)
    session.exponents[0, 0, 0] += 1
    after = session.stored(session.config.cache_config)
    assert before is not None and after is not None
    assert [name for name in before.identity if before.identity[name] != after.identity[name]] == ["balance"]


@pytest.mark.parametrize(("keep", "balanced"), [(EvictionConfig(), True), (EvictionConfig("streaming", 0.5), False)])
def test_a_run_that_evicts_reads_the_models_own_keys(keep: EvictionConfig, balanced: bool):
    asked = {"model": uneven("llama2"), "prompts": ("x" * 200,), "backend": "numpy", "keep": keep}
    job = prepare(RunRequest(EpsConfig.of(method="rq"), Sampling(), **asked))
    assert (job.session.exponents is not None) == balanced


def logits_of(path: Path, dtype: torch.dtype) -> np.ndarray:
    """transformers' logits along some tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits[0].float().numpy()


@pytest.mark.parametrize("name", ["llama2-bf16-sharded", "qwen2-tied", "qwen3", "phi3"])
def test_a_balanced_copy_is_the_same_model_for_an_engine(name: str, tmp_path: Path):
    """Its logits have the same bits in transformers, and only weights that make queries and keys differ."""
    source, out = uneven(name), tmp_path / "balanced"
    done = last(outcome(["balance", "--model", str(source), "-o", "balanced", "--backend", "numpy"], tmp_path))
    spec = read_spec(source)
    assert done["out"] == "balanced" and done["of"] == spec.num_layers * spec.num_kv_heads * spec.head_dim // 2
    assert 0 < done["pairs"] <= done["of"] and sorted(os.listdir(tmp_path)) == ["balanced"]
    assert sorted(os.listdir(source)) == sorted(os.listdir(out))
    file = weight_files(source)[0]
    with opened_weights(source / file) as its, opened_weights(out / file) as copied:
        assert its.metadata() == copied.metadata() and its.metadata()
    dtype = getattr(torch, read_spec(source).stored_dtype)
    assert np.array_equal(logits_of(source, dtype), logits_of(out, dtype))
    before, after = load_weights(source, spec), load_weights(out, spec)
    differing = {key.rsplit(".", 1)[-1] for key in before if not np.array_equal(before[key], after[key])}
    assert differing == {f"{one}{kind}" for one in "qk" for kind in (("_norm",) if spec.qk_norm else KINDS[name])}
    again = Session.open(out, "numpy", method="rq")
    again.load()
    assert not again.exponents.any(), "it is balanced already"


KINDS = {"llama2-bf16-sharded": ("",), "qwen2-tied": ("", "_bias"), "phi3": ("",)}


def test_what_cannot_be_balanced_in_its_files_is_refused_and_nothing_is_written(tmp_path: Path):
    gemma, there = ["balance", "--model", str(uneven(MODELS[-1])), "--backend", "numpy", "-o"], tmp_path / "there"
    refused([*gemma, "out"], tmp_path, "stores its norms about 1")
    there.mkdir()
    refused(["balance", "--model", str(uneven("llama2")), "-o", "there"], tmp_path, "there exists: give a new folder")
    refused(["balance", "--model", str(saved("qwen2-fp16")), "-o", "out"], tmp_path, "stored in float16")
    unsaid = changed(tmp_path / "unsaid", "qwen2-fp16", config={"dtype": None})
    refused(["balance", "--model", str(unsaid), "-o", "out", "--backend", "numpy"], tmp_path, "stored in float16")
    own = shutil.copytree(uneven("llama2"), tmp_path / "model")
    refused(["balance", "--model", str(own), "-o", "model/out"], tmp_path, "lies in the model's own folder")


def test_files_of_other_writers_are_read(tmp_path: Path):
    """MLX's files list their tensors in another order than they lie in."""
    mx = pytest.importorskip("mlx.core")
    model = shutil.copytree(uneven("llama2"), tmp_path / "model")
    mx.save_safetensors(str(model / "model.safetensors"), mx.load(str(model / "model.safetensors")), {"format": "pt"})
    last(outcome(["balance", "--model", str(model), "-o", "out", "--backend", "numpy"], tmp_path))
    assert np.array_equal(logits_of(model, torch.float32), logits_of(tmp_path / "out", torch.float32))


def test_models_of_few_positions_are_balanced_by_as_many_tokens(tmp_path):
    shutil.copytree(uneven("llama2"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": TOKENS // 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    session = Session.open(tmp_path, "numpy", method="rq")
    session.load()
    assert session.exponents is not None and session.exponents.any()


def test_balancing_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: False)
    monkeypatch.setattr(terminal.Progress.__init__, "__defaults__", (None, 0.0))
    session = Session.open(uneven("llama2"), "numpy", method="rq")
    session.load()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("keys: balancing")]
    layers = session.spec.num_layers
    assert said == [f"keys: balancing {layer} of {layers} layers" for layer in range(layers)]
