"""K and V held as codes: the quantiser on every backend, exact bytes, and that everything else follows from what
attention reads. `test_conformance.py` and `test_error_bounds.py` run their cases over such caches, too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from command import outcome
from test_kv_formats import hard_rows, on_edges

from eps_core import LLM, reference
from eps_core.config.bytes import kv_bytes
from eps_core.config.cache import DTYPE_BYTES, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import FORMATS, FormatName, KvFormats
from eps_core.errors import ConfigError
from eps_core.load import load_backend
from eps_core.reference import codes as oracle_codes

PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 5
CONFIG = EpsConfig.of(method="box", group_size=4, num_sink_tokens=4, num_recent_tokens=8, budget=0.3)


def spec_of(bits: KvFormats, dtype: str = "float32", units: int = 16, head_dim: int = 16) -> CacheSpec:
    return CacheSpec(1, 2, head_dim, units, dtype, k_bits=bits[0], v_bits=bits[1])


# ------------------------------------------------------------------------------------------------------------ quantiser


@pytest.mark.parametrize("bits", FORMATS)
def test_codes_scales_and_values_are_the_same_on_every_backend(target: tuple, bits: FormatName) -> None:
    backend, device = target
    for dtype in DTYPE_BYTES:
        rows = np.concatenate([hard_rows(128, 6e4), np.tile(on_edges(), 4).clip(-6e4, 6e4)])
        rows = np.repeat(rows[:, None], 2, axis=1)
        rows[:, 1] *= -0.5
        spec, config = spec_of((bits, bits), dtype, -(-len(rows) // 16), 128), EpsConfig.of()
        caches = []
        for eps, place in ((backend, device), (reference, "cpu")):
            k = eps.from_numpy(rows, "float32", place)
            caches.append(eps.write_kv(eps.new_cache(spec, config.cache_config, place), 0, k, k, np.arange(len(rows))))
        for pool, want in ((getattr(caches[0], name)[0], getattr(caches[1], name)[0]) for name in "kv"):
            assert (backend.to_numpy(pool.codes) == want.codes).all() and want.codes.shape[-1] == pool.codes.shape[-1]
            assert (backend.to_numpy(pool.scale) == want.scale).all()
        table = np.arange(spec.num_units)
        k, _ = backend.read_kv(caches[0], 0, table, len(rows))
        want, _ = reference.read_kv(caches[1], 0, table, len(rows))
        assert (backend.to_numpy(k).astype(np.float32) == want.astype(np.float32)).all()


def test_float16_values_stay_within_its_range() -> None:
    """The largest float16's scale rounds up, and its code times that is beyond."""
    rows = np.full((1, 8), 65504, np.float16)
    codes, scale = oracle_codes.quantise(rows, 8)
    assert float(codes[0, 0]) * float(scale[0]) > 65519
    assert (oracle_codes.dequantise(codes, scale, 8, np.float16) == rows).all()


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30], ids=["NaN", "Inf", "beyond float16's scales"])
@pytest.mark.kernels("numba")
def test_what_no_code_can_say_is_refused_in_k_and_nan_in_v(target: tuple, bits: FormatName, bad: float) -> None:
    backend, device = target
    rng = np.random.default_rng(0)
    k = rng.standard_normal((2, 20, 2, 16)).astype(np.float32)
    k[1, 3, 0, 5] = bad
    config = EpsConfig.of()

    def write(k: np.ndarray, v: np.ndarray):
        cache = backend.new_cache(spec_of((bits, bits)), config.cache_config, device)
        given = (backend.from_numpy(x, "float32", device) for x in (k, v))
        cache = backend.write_kv(cache, 0, *given, np.arange(20))
        backend.check_finite(cache)
        return cache

    _, v = backend.read_kv(write(k[0], k[1]), 0, np.arange(2), 20)
    assert (np.isnan(backend.to_numpy(v)).nonzero()[0] == 3).all() and np.isnan(backend.to_numpy(v)[3, 0]).all()
    with pytest.raises(ConfigError, match="NaN or Inf in K of layer 0"):
        write(k[1], k[0])


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_bytes_are_codes_and_scales() -> None:
    for dtype, size in DTYPE_BYTES.items():
        for bits, want in (
            ((16, 16), 2 * 64 * size),
            ((8, 8), 132),
            ((4, 4), 68),
            ((8, 4), 100),
            (("fp8", "fp8"), 132),
            (("nvfp4", "nvfp4"), 2 * (32 + 4 + 2)),
            (("fp8", "nvfp4"), 66 + 38),
        ):
            spec = spec_of(bits, dtype, head_dim=64)
            assert spec.kv_token_bytes == want
            assert kv_bytes(3, 2, 64, 10, dtype, bits) == 3 * 2 * 10 * want
    assert spec_of((16, 4), "bfloat16", head_dim=64).kv_token_bytes == 128 + 34
    assert spec_of((16, 4), "bfloat16", head_dim=64).k_token_bytes == 128


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 16), ("fp8", "nvfp4"), ("nvfp4", 16)])
def test_a_pool_takes_the_bytes_that_are_said(target: tuple, bits: KvFormats) -> None:
    backend, device = target
    spec = spec_of(bits, "bfloat16", units=5, head_dim=48)
    cache = backend.new_cache(spec, CONFIG.cache_config, device)
    arrays = [array for pool in (cache.k[0], cache.v[0]) for array in
              ([pool.codes, pool.scale] if hasattr(pool, "codes") else [pool])]  # fmt: skip
    held = sum(array.nbytes for array in arrays)
    assert held == 5 * CONFIG.cache_config.unit_tokens * 2 * spec.kv_token_bytes
    longer = backend.grow(cache, 9)
    pool = longer.k[0]
    assert len(pool.codes) == len(pool.scale) == 9


def test_a_run_counts_them(tmp_path: Path) -> None:
    model = tiny_models.save_model("llama2", tmp_path / "model")
    line = ["run", "--model", str(model), "--prompt", PROMPT, "--max-new-tokens", "4", "--method", "box",
            "--backend", "cuda", "--device", "cpu", "--metrics", "m.jsonl", "--no-stop"]  # fmt: skip
    read = {}
    for bits in ("16", "8", "8,4", "fp8,nvfp4"):
        done = outcome([*line, "--kv-bits", bits, "--kv-dtype", "bfloat16"], tmp_path)
        assert done.code in (None, 0), done.err
        records = [json.loads(one) for one in (tmp_path / "m.jsonl").read_text().splitlines()]
        cache, steps = records[0]["cache"], [one for one in records if one["type"] == "step"]
        assert [cache["k_bits"], cache["v_bits"]] == json.loads(done.out.splitlines()[-1])["kv_bits"]
        read[bits] = [(one["bytes_kv_read_est"], one["bytes_kv_dense"], one["pages_visited"]) for one in steps]
        dim = cache["head_dim"]
        each = {"16": 4 * dim, "8": 2 * dim + 4, "8,4": dim * 3 // 2 + 4, "fp8,nvfp4": dim * 3 // 2 + dim // 16 + 4}
        tokens, size = records[0]["prompt_tokens"], records[0]["config"]["group_size"]
        for i, step in enumerate(steps):
            heads = cache["num_layers"] * cache["num_kv_heads"]
            assert step["bytes_kv_dense"] == (tokens + i) * heads * each["16"]
            assert step["bytes_kv_kept"] == (tokens + i) * heads * each[bits]
            assert step["bytes_kv_read_est"] == step["pages_visited"] * size * each[bits]
        total = records[-1]
        assert total["kv_ratio"] == total["bytes_kv_read_est"] / total["bytes_kv_dense"]
        assert total["kept_ratio"] == pytest.approx(each[bits] / each["16"])
    assert read["16"] != read["8"] != read["8,4"]


# ------------------------------------------------------------------------------------------------------------ attention


def test_a_pool_of_an_engine_holds_no_codes() -> None:
    eps = load_backend("cuda")
    cache_config = EpsConfig.of().cache_config
    pools = [(eps.new_cache(spec_of((16, 16)), cache_config, "cpu").k[0],) * 2]
    with pytest.raises(ValueError, match="no cache of codes can live in them"):
        eps.new_cache(spec_of((8, 8)), cache_config, "cpu", "arrays", pools)


# --------------------------------------------------------------------------------------------------------------- runs


def test_verified_text_is_the_dense_one_of_the_same_cache(tmp_path: Path) -> None:
    model = tiny_models.save_model("llama2", tmp_path / "model")
    plan: dict[str, Any] = {"backend": "cuda", "device": "cpu", "kv_bits": (8, 4)}
    asked = LLM(model, "box", budget=0.2, speculative=True, **plan)
    dense = LLM(model, "off", **plan)
    assert asked.generate(PROMPT, max_new_tokens=24).tokens == dense.generate(PROMPT, max_new_tokens=24).tokens
