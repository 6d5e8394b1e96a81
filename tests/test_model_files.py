"""Model folders as fault and malice leave them: what is in them is read, or one line says what is wrong with it."""

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_model import LLAMA_CONFIG, TOLERANCE, assert_refused, load, refuse_weights, run

from eps_core.config.eps import EpsConfig
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.evaluation.compare import prepare
from eps_core.evaluation.request import RunRequest
from eps_core.io import inputs
from eps_core.models import weights as weights_module
from eps_core.models.chat import render
from eps_core.models.config import read_spec
from eps_core.models.folder import weight_files
from eps_core.models.rope import attention_factor, inverse_frequencies
from eps_core.models.tokenizer import encode, load_tokenizer
from eps_core.models.weights import load_weights, weight_names

FUZZED = int(os.environ.get("EPS_FUZZ", 200))  # folders of each kind; the acceptance takes 2,000
INDEX = "model.safetensors.index.json"


# Tied embeddings


def stored_head(path: Path, change: float) -> np.ndarray:
    """Stores an output projection beside the embedding, `change` away from it; returns it."""
    weights = load_file(path / "model.safetensors")
    head = (weights["model.embed_tokens.weight"] + np.float32(change)).astype(np.float32)
    save_file(weights | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    return head


@pytest.mark.parametrize(("change", "used"), [(0.5, True), (0.0, False)])
def test_a_stored_head_of_tied_embeddings_is_used(
    change: float, used: bool, target: tuple, damaged: Callable, capsys: pytest.CaptureFixture
) -> None:
    """As transformers 5 does, which config.json alone cannot say; a copy of the embedding is dropped in silence."""
    path = damaged("qwen2-tied")
    head = stored_head(path, change)
    capsys.readouterr()
    decoder = load(target, path)
    said = capsys.readouterr().err
    assert ("lm_head.weight" in said and str(path) in said and said.count("\n") == 1) if used else not said
    tokens = [3, 250, 7, 99, 12]
    _, (logits,) = run(target, decoder, np.array(tokens), (5,))
    expected = tiny_models.reference_logits(path, tokens)[-1]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * expected.std())
    weights = load_weights(path, decoder.spec)
    assert ("lm_head" in weights) == used
    if used:
        np.testing.assert_array_equal(weights["lm_head"], head)
        spoiled = load_file(path / "model.safetensors")
        save_file(spoiled | {"lm_head.weight": np.zeros((5, 64), np.float32)}, path / "model.safetensors")
        refuse_weights(path, "lm_head.weight", "(5, 64)", "(300, 64)")


# Files that are no files


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
def test_a_directory_in_the_place_of_a_file_is_named(name: str, damaged: Callable) -> None:
    path = damaged("llama2")
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()

    def read() -> None:
        load_weights(path, read_spec(path))
        load_tokenizer(path)

    with pytest.raises(ConfigError, match=f"{name}.*(Is a directory|is missing)") as caught:
        read()
    assert "corrupt" not in str(caught.value) and "\n" not in str(caught.value)


def test_weights_without_permission_are_not_called_corrupt(damaged: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged("llama2")
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))  # as for a user who is not root
    monkeypatch.setattr(weights_module, "open", refused, raising=False)
    refuse_weights(path, "model.safetensors cannot be read (Permission denied)", "permissions")


def test_a_shard_that_is_a_directory_is_named(damaged: Callable) -> None:
    path = damaged("llama2-bf16-sharded")
    shard = path / "model-00002-of-00004.safetensors"
    shard.unlink()
    shard.mkdir()
    refuse_weights(path, str(shard), "Is a directory")


def test_a_json_file_without_end_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(inputs.MOST_BYTES + 1)  # takes no room on the disk
    assert_refused(lambda: read_spec(tmp_path), "config.json", "is longer than")


# An index names files of its folder


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "a/../../b", "..", "", ".", "a\0b"])
def test_a_shard_outside_of_the_folder_is_refused(shard: str, damaged: Callable, saved: Callable) -> None:
    path = damaged("llama2-bf16-sharded")
    index = json.loads((path / INDEX).read_text())
    shutil.copytree(saved("llama2"), path.parent / "other")
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = shard
    (path / INDEX).write_text(json.dumps(index))
    refuse_weights(path, repr(shard), INDEX, "no file within the model's folder")
    assert_refused(lambda: weight_files(path), repr(shard))


def test_shards_that_are_links_are_read(damaged: Callable, saved: Callable) -> None:
    """A snapshot in the Hub's cache is a folder of links into its blobs."""
    path = damaged("llama2-bf16-sharded")
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for file in list(path.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / "blobs" / file.name)
    read, expected = (load_weights(one, read_spec(one)) for one in (path, saved("llama2-bf16-sharded")))
    assert read.keys() == expected.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, expected[name])


def test_a_context_past_dynamic_scaling_is_refused_with_its_reason(saved: Callable) -> None:
    request = RunRequest(EpsConfig.of(), Sampling(), "numpy", model=saved("llama2-dynamic"), prompts=("x" * 500,))
    assert_refused(lambda: prepare(request), "context of 512 tokens", "dynamic RoPE scaling", "shorten the prompt")


# Tokenizers


def test_a_tokenizer_without_its_unknown_token_is_named(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    tokenizer = load_tokenizer(tmp_path)
    assert encode(tokenizer, tmp_path, "a") == [0]
    assert_refused(lambda: encode(tokenizer, tmp_path, "b"), str(tmp_path), "Missing [UNK] token", "incomplete")


# Whatever JSON says

texts = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(
    [
        "llama",
        "qwen3",
        "mistral",
        "yarn",
        "dynamic",
        "llama3",
        "linear",
        "full_attention",
        "float32",
        "../x",
        "/x",
        "\0",
    ]
)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, 1, 2, 64, 2**31, 2**62, 2**63, 10**400, -(10**400), 1e308, 1e-320, 5e-324, 0.5])
)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate",
    "partial_rotary_factor",
)  # fmt: skip
ropes = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"])},
    optional={key: numbers for key in ROPE_KEYS[2:]},
) | st.dictionaries(st.sampled_from(ROPE_KEYS), values, max_size=8)
CONFIG_KEYS = (
    *LLAMA_CONFIG, "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "layer_types", "sliding_window",
    "use_sliding_window", "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id",
    "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> Any:
    """A config.json that once was right, and other JSON now and then."""
    if draw(st.integers(0, 9)) == 0:
        return draw(values)
    family, architecture = draw(
        st.sampled_from([("llama", "LlamaForCausalLM"), ("mistral", None), ("qwen2", None), ("qwen3", None)])
    )
    config = LLAMA_CONFIG | {"model_type": family, "architectures": architecture and [architecture]}
    config |= {"sliding_window": None}
    config |= draw(st.dictionaries(st.sampled_from(CONFIG_KEYS), values, max_size=3))
    if draw(st.booleans()):
        config[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(ropes | values)
    for key in draw(st.lists(st.sampled_from(sorted(config)), max_size=2)):
        config.pop(key, None)
    return config


fuzzed = settings(
    max_examples=FUZZED,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def one_line_or(read: Callable[[], Any]) -> Any:
    """What `read` gives, or None where it raises a ConfigError of one line that a terminal can show; no other error,
    and neither memory nor time is spent on sizes that cannot be."""
    started = time.process_time()
    try:
        return read()
    except ConfigError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 700, message
        message.encode("utf-8", "backslashreplace")
        return None
    finally:
        assert time.process_time() - started < 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20  # KiB


@fuzzed
@given(config=configs(), generation=st.none() | values | st.fixed_dictionaries({"eos_token_id": values}))
def test_any_config_is_a_model_or_one_line(config: Any, generation: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    spec = one_line_or(lambda: read_spec(tmp_path))
    if spec is None:
        return
    # what is accepted can be computed with
    assert np.isfinite(inverse_frequencies(spec)).all() and 0 < attention_factor(spec) < np.inf
    assert len(weight_names(spec)) >= 2 + 9 * spec.num_layers
    json.dumps(spec.rope_scaling, allow_nan=False)
    assert one_line_or(lambda: load_weights(tmp_path, spec)) is None  # there are none


def test_the_fuzz_accepts_and_refuses(tmp_path: Path) -> None:
    """A generator whose every folder is refused, or none, would test nothing."""
    seen: set[bool] = set()

    @settings(fuzzed, max_examples=100)
    @given(config=configs())
    def look(config: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        seen.add(one_line_or(lambda: read_spec(tmp_path)) is None)

    look()
    assert seen == {True, False}


@fuzzed
@given(index=values | st.fixed_dictionaries({"weight_map": values | st.dictionaries(texts, texts, max_size=4)}))
def test_any_index_is_one_line(index: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert one_line_or(lambda: load_weights(tmp_path, read_spec(tmp_path))) is None
    one_line_or(lambda: weight_files(tmp_path))


TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "added_tokens_decoder",
    "additional_special_tokens",
    "add_prefix_space",
    "legacy",
)
tokenizer_configs = st.fixed_dictionaries(
    {"tokenizer_class": st.sampled_from(["Qwen2Tokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Cohere"]) | values},
    optional={key: values | st.dictionaries(texts, st.fixed_dictionaries({"content": values})) for key in TOKEN_KEYS},
)


@fuzzed
@given(data=st.data())
def test_any_tokenizer_is_one_or_one_line(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    tiny_models.save_tokenizer(file)
    content = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(content)))
        inner = content[key]
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(values)
        else:
            content[key] = data.draw(values)
    file.write_text(json.dumps(content))
    for name in ("tokenizer_config", "special_tokens_map"):
        (tmp_path / f"{name}.json").write_text(json.dumps(data.draw(values | tokenizer_configs)))
    tokenizer = one_line_or(lambda: load_tokenizer(tmp_path))
    if tokenizer is not None:
        one_line_or(lambda: encode(tokenizer, tmp_path, "naïve \ud83d text\n"))
        one_line_or(lambda: encode(tokenizer, tmp_path, "naïve text\n"))


templates = st.text("{}%# abimessages.|()[]'\"+~", max_size=40)


@fuzzed
@given(
    config=values | st.fixed_dictionaries({"chat_template": values | templates}),
    legacy=st.none() | values,
)
def test_any_chat_template_is_text_or_one_line(config: Any, legacy: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.json").unlink(missing_ok=True)
    if legacy is not None:
        (tmp_path / "chat_template.json").write_text(json.dumps(legacy))
    found = one_line_or(lambda: render(tmp_path, "hello"))
    assert found is None or isinstance(found, str)
