"""Folders and files as people have them on disk: what is no model that the chosen decoder reads is named for what it
is, with the way out, before anything is loaded or compiled."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hf_models
import mlx_lm_models
import numpy as np
import pytest
import tiny_models
from command import outcome, refused
from safetensors.numpy import load_file, save_file
from test_model import assert_refused

from eps_core.decode.session import Session
from eps_core.integrations.settings import Settings
from eps_core.load import ENGINES
from eps_core.models.hub import resolve_model
from eps_core.models.registry import ENGINE_FAMILIES, FAMILIES
from eps_cuda.integrations.vllm.asked import Asked, refusals

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LORA = {"peft_type": "LORA", "base_model_name_or_path": "org/base-model"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 269060552\n"
Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    """Returns a function that writes a tiny model, changed."""
    return partial(tiny_models.changed, tmp_path / "model", "llama2-bf16-sharded")


def refused_everywhere(path: Path, *says: str, engines: tuple[str, ...] = ENGINES) -> None:
    """Our own decoders and those engines refuse the model, in one line that says all of it."""
    assert_refused(lambda: Session.open(path, "numpy"), *says)
    for engine in engines:
        assert_refused(lambda engine=engine: resolve_model(path, engine=engine), *says)


# Adapters


def test_an_adapter_beside_base_weights_is_refused_everywhere(folder: Write) -> None:
    """transformers applies it; to compute the base model without a word would be another model's text."""
    path = folder(files={"adapter_config.json": LORA})
    refused_everywhere(path, str(path), "LORA adapter", "adapter_config.json", "base weights", "merge_and_unload")


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_refuses_an_adapter_before_it_is_loaded(
    command: str, engine: str, folder: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "eps_mlx.integrations.mlx_lm", None
    )  # an engine that was imported would fail otherwise
    monkeypatch.setitem(sys.modules, "eps_cuda.integrations.transformers", None)
    monkeypatch.setitem(sys.modules, "eps_cuda.integrations.vllm", None)
    path = folder(files={"adapter_config.json": LORA})
    flags = [command, "--engine", engine, "--model", str(path), "--method", "rq"]
    says = "LORA adapter (adapter_config.json) beside base weights, which EPS cannot apply: merge it first"
    refused([*flags, *(("--prompt", "x") if command == "run" else ())], tmp_path, says)


def test_mlx_lm_refuses_an_adapter_that_python_names(folder: Write) -> None:
    from eps_mlx.integrations.mlx_lm import load, serve

    path = folder(files={"adapter_config.json": LORA})
    says = (str(path), "LORA adapter", "merge")
    assert_refused(lambda: serve(path, Settings.of({"method": "rq"}), "127.0.0.1", 1, ()), *says)
    assert_refused(lambda: load(path, method="rq"), str(path), "LORA adapter", "merge")


def test_a_vllm_server_of_its_own_refuses_an_adapter(folder: Write) -> None:
    """`vllm serve DIR` with EPS in its settings goes past our command line."""
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(folder(files={"adapter_config.json": LORA}))))
    assert_refused(lambda: refusals(config, Asked({"method": "rq"}, "rows")), "LORA adapter", "merge")


def test_a_folder_of_an_adapter_alone_is_named(folder: Write) -> None:
    path = folder("*.json", "model*", files={"adapter_config.json": LORA, "adapter_model.safetensors": b""})
    refused_everywhere(path, str(path), "LORA adapter of 'org/base-model'", "no model of its own", "merge_and_unload")


def test_an_adapter_of_mlx_lm_is_fused(folder: Write) -> None:
    files = {"adapter_config.json": {"fine_tune_type": "lora"}, "adapters.safetensors": b""}
    path = folder("*.json", "model*", files=files)
    refused_everywhere(path, str(path), "LORA adapter of mlx-lm", "mlx_lm.fuse --model BASE --adapter-path DIR")


# Files in other formats


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    for name, content in (("m.gguf", b""), ("m.bin", b"GGUF\3\0\0\0")):
        (tmp_path / name).write_bytes(content)
        says = (str(tmp_path / name), "GGUF", "eps-proto run --engine transformers", "gguf_file", "save_pretrained")
        refused_everywhere(tmp_path / name, *says)


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_broken_gguf_file_is_one_line_of_every_engine(command: str, engine: str, tmp_path: Path) -> None:
    """`run --engine transformers` alone reads it, and says what is wrong with it."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\3\0\0\0")
    flags = [command, "--engine", engine, "--model", str(file), "--method", "rq"]
    done = outcome([*flags, *(("--prompt", "x") if command == "run" else ())], tmp_path)
    assert done.code == 2 and done.err.splitlines()[-1].startswith("error: ") and "Traceback" not in done.err
    reads = (command, engine) == ("run", "transformers")
    assert (f"transformers cannot read {file}" if reads else "eps-proto run --engine transformers") in done.err


def test_another_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(b"x")
    refused_everywhere(tmp_path / WEIGHTS, "is a file", f"give its folder, {tmp_path}")
    (tmp_path / WEIGHTS).write_bytes(POINTER)
    refused_everywhere(tmp_path / WEIGHTS, "Git LFS pointer", "lfs pull")


FOREIGN = {
    "gguf": ("model-Q4_K_M.gguf", ("GGUF", "gguf_file")),
    "original": ("consolidated.safetensors", ("consolidated.safetensors", "own format", "in Hugging Face's format")),
    "original-torch": ("consolidated.00.pth", ("consolidated.00.pth", "own format", "in Hugging Face's format")),
    "npz": ("weights.npz", ("weights.npz", "older MLX", "mlx_lm.convert")),
    "bin": ("pytorch_model.bin", ("pytorch_model.bin", "convert them to safetensors", "save_pretrained")),
    "nothing": ("README.md", ("neither model.safetensors nor model.safetensors.index.json", "download")),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_weights_are_named(kind: str, folder: Write) -> None:
    name, says = FOREIGN[kind]
    path = folder("model*", files={name: b"x"})
    engines = {"bin": ("mlx-lm",), "original": ("mlx-lm", "transformers")}  # the others read them
    refused_everywhere(path, str(path), "no weights", *says, engines=engines.get(kind, ENGINES))


@pytest.mark.parametrize("kind", [kind for kind in FOREIGN if kind != "nothing"])
def test_a_folder_without_config_is_named_for_what_it_holds(kind: str, folder: Write) -> None:
    name, says = FOREIGN[kind]
    path = folder("model*", "config.json", files={name: b"x"})
    refused_everywhere(path, f"{path / 'config.json'} is missing", *says)


def test_a_folder_of_folders_names_the_model_in_it(folder: Write) -> None:
    path = folder()
    refused_everywhere(path.parent, f"{path.parent / 'config.json'} is missing", f"give {path}")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00002-of-00004.safetensors", "generation_config.json", INDEX]
)
def test_a_git_lfs_pointer_is_named(name: str, folder: Write) -> None:
    path = folder(files={name: POINTER})
    refused_everywhere(path, str(path / name), "Git LFS pointer", f"git -C {path} lfs pull")


# Quantised weights

QUANTISED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    # config.json, the name of it, engines that do not read it
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ, 4 bits", ()),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "GPTQ, 8 bits", ()),
    "bnb-4": ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes, 4 bits", ("mlx-lm",)),
    "bnb-8": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "bitsandbytes, 8 bits",
        ("mlx-lm",),
    ),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "FP8, 8 bits", ()),
    "mxfp4": ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4, 4 bits", ()),
    "compressed": (
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            }
        },
        "compressed-tensors, 4 bits",
        (),
    ),
    "mlx": (
        {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}},
        "MLX, 4 bits",
        ("transformers", "vllm"),
    ),
    "other": ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'", ()),
    "none": ({"quantization_config": {"quant_method": 5}}, "5", ()),
    "no object": ({"quantization_config": [4]}, "[4]", ()),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_named(kind: str, folder: Write) -> None:
    config, name, unread = QUANTISED[kind]
    path = folder(config=config)
    other = "--engine mlx-lm" if kind == "mlx" else "--engine transformers"
    refused_everywhere(path, str(path), f"quantised: {name}", "give the unquantised", engines=())
    assert_refused(lambda: Session.open(path, "numpy"), other)
    for engine in ENGINES:
        if engine in unread:
            assert_refused(lambda engine=engine: resolve_model(path, engine=engine), f"quantised: {name}", other)
        else:
            assert resolve_model(path, engine=engine) == path


@pytest.mark.parametrize(
    ("method", "package"), [("awq", "gptqmodel"), ("gptq", "optimum"), ("bitsandbytes", "bitsandbytes")]
)
def test_transformers_names_the_package_that_reads_quantised_weights(
    method: str, package: str, folder: Write, tmp_path: Path
) -> None:
    bits = {"load_in_4bit": True} if method == "bitsandbytes" else {"bits": 4, "group_size": 64}
    path = folder(config={"quantization_config": {"quant_method": method} | bits})
    flags = ["run", "--engine", "transformers", "--model", str(path), "--method", "rq", "--prompt", "x"]
    done = outcome(flags, tmp_path)
    assert done.code == 2 and f"error: transformers cannot load {path}: " in done.err and "Traceback" not in done.err
    assert package in done.err.replace(str(path), "")


@pytest.mark.parametrize(
    ("file", "name"), [("quantize_config.json", "GPTQ, 4 bits"), ("quant_config.json", "AWQ, 4 bits")]
)
def test_quantised_weights_whose_config_is_a_file_of_its_own_are_named(file: str, name: str, folder: Write) -> None:
    path = folder(files={file: {"bits": 4, "w_bit": 4, "q_group_size": 128}})
    assert_refused(lambda: Session.open(path, "numpy"), f"quantised: {name}", file)


# Families


@pytest.mark.parametrize(
    ("family", "says"),
    [("lfm2", "use --engine mlx-lm"), ("gpt2", "--engine transformers, mlx-lm and vllm read more families")],
)
def test_a_family_that_an_engine_supports_names_the_engine(family: str, says: str, folder: Write) -> None:
    path = folder(config={"model_type": family, "architectures": None})
    families = "llama, mistral, qwen2, qwen3, phi3, gemma3_text"
    assert_refused(lambda: Session.open(path, "numpy"), f"model_type {family!r}", families, says)


def test_families_of_engines_are_those_that_are_tested() -> None:
    tested = {hf_models.tiny_config(name).model_type for name in hf_models.FAMILIES}
    assert tested - set(FAMILIES) == set(ENGINE_FAMILIES["transformers"])
    assert (set(mlx_lm_models.FAMILIES) | {"lfm2"}) - set(FAMILIES) == set(ENGINE_FAMILIES["mlx-lm"])
    assert set(ENGINE_FAMILIES) == set(ENGINES)


# Before any work


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a kernel is compiled, or weights are read."""
    work = Mock(side_effect=AssertionError("work was begun"))
    monkeypatch.setattr(Session, "check_kernels", work)
    monkeypatch.setattr(Session, "load", work)


def damage_shape(path: Path) -> str:
    file = path / "model-00002-of-00004.safetensors"
    name = next(iter(load_file(file)))
    save_file(load_file(file) | {name: np.zeros((3, 5), np.float32)}, file)
    return name


def damage_name(path: Path) -> str:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.layers.7.extra"] = next(iter(index["weight_map"].values()))
    (path / INDEX).write_text(json.dumps(index))
    return "model.layers.7.extra"


def damage_bytes(path: Path) -> str:
    file = path / "model-00003-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file.name


def remove_shard(path: Path) -> str:
    (path / "model-00003-of-00004.safetensors").unlink()
    return f"shard 'model-00003-of-00004.safetensors' that {path / INDEX} names is missing"


def remove_tokenizer(path: Path) -> str:
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"x")
    return "tokenizer.model"


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("damage", [damage_shape, damage_name, damage_bytes, remove_shard, remove_tokenizer])
def test_what_can_be_refused_is_refused_before_work(
    damage: Callable[[Path], str], folder: Write, tmp_path: Path
) -> None:
    path = folder()
    says = damage(path)
    for command in (
        ["run", "--prompt", "abc"],
        ["capture", "--text", str(path / "config.json"), "-o", "c.safetensors"],
    ):
        refused([*command, "--model", path, "--backend", "numpy"], tmp_path, says)
