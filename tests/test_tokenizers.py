"""What transformers makes of a folder's tokenizer files beyond tokenizer.json: special tokens, the behaviour of a
tokenizer class, truncation, and the tokens that end a text. The same ids, from the same folder."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from eps_core.decode.session import Session
from eps_core.models.chat import render
from eps_core.models.config import read_limits, read_spec
from eps_core.models.tokenizer import encode, load_tokenizer
from eps_core.models.tokenizer_class import AS_STORED, OTHER_CLASSES, REPRODUCED, special_tokens

DECOMPOSED = "cafe\u0301 A\u030angstro\u0308m"  # accents as characters of their own, as macOS writes file names
TEXTS = (
    DECOMPOSED, "It's 2024, isn't it?\n\n  Yes:\t12,345.67 ", "<s>hello</s> world<|x|>  y", "", " ",
    "naïve \u65e5\u672c \U0001f600 \ufb01",
)  # fmt: skip
Write = Callable[..., Path]


def byte_level() -> tokenizers.Tokenizer:
    """Of bytes, with some merges, so that where a text is cut shows."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ("e l", "l o", "1 2", "3 4", "2 0", "' t", "Ġ w", ". 6", "Ċ Ċ", "Ã ©", "Ġ Ġ")
    merges = [(first, second) for first, second in (pair.split() for pair in pairs)]
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's and Gemma's: words begin with a mark, and what is not in the vocabulary is bytes."""
    pieces = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁abcdefghilnorstuvwyIYT'2024,?.:é", "▁h", "he", "▁w", "or", "▁▁"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*pieces, *letters]))}
    merges = [("▁", "h"), ("h", "e"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Write:
    """Returns a function that writes config.json, tokenizer.json and what else is named, an object as JSON."""

    def write(
        tokenizer: tokenizers.Tokenizer | None = None, config: dict[str, Any] | None = None, **files: Any
    ) -> Path:
        named = {f"{name}.json": content for name, content in files.items()}
        return tiny_models.changed(tmp_path / "model", "llama2", config=config, files=named, tokenizer=tokenizer)

    return write


def check_ids(path: Path) -> None:
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            ids = encode(ours, path, text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), (text, special)
            assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text


# Special tokens

TEMPLATE = (
    "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}{{ im_start }}{{ unk_token is defined }}"
)
OBJECT = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
ADDED = {"258": {**OBJECT, "content": "<|x|>", "special": True}}
MAPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "map alone": ({}, {"bos_token": "<s>", "eos_token": "</s>"}),
    "objects": ({}, {"bos_token": OBJECT, "eos_token": "</s>"}),
    "both": ({"bos_token": "</s>"}, {"bos_token": "<s>", "pad_token": "</s>"}),
    "beside added_tokens_decoder": (
        {"bos_token": "</s>", "eos_token": "</s>", "added_tokens_decoder": ADDED},
        {"bos_token": "<s>", "pad_token": "<s>"},
    ),
    "no map": ({"bos_token": "<s>", "eos_token": "</s>"}, {}),
    "a token of its own": ({"eos_token": "<|end|>"}, {}),
    "named by an object": ({"extra_special_tokens": {"im_start": "<|x|>"}}, {"pad_token": "</s>"}),
    "named by an object of the map": ({}, {"extra_special_tokens": {"im_start": "<|x|>"}, "eos_token": "<s>"}),
    "llama's defaults": ({"tokenizer_class": "LlamaTokenizerFast"}, {"eos_token": "<s>"}),
}


@pytest.mark.parametrize("name", MAPS)
def test_special_tokens_are_those_of_transformers(name: str, folder: Write) -> None:
    """A template that begins with {{ bos_token }} must not render it empty."""
    config, special = MAPS[name]
    made = sentencepiece() if "llama" in name else None
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    path = folder(made, tokenizer_config=common | config, special_tokens_map=special)
    theirs = AutoTokenizer.from_pretrained(path)
    assert special_tokens(path) == theirs.special_tokens_map
    messages = [{"role": "user", "content": "hello"}]
    assert render(path, "hello") == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert encode(load_tokenizer(path), path, render(path, "hello"), special=False) == expected
    check_ids(path)


FLAGS = ({"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"special": False, "normalized": True})
NAMED: dict[str, dict[str, Any]] = {
    "a name": {"eos_token": "<|x|>"},
    "an object": {"eos_token": {"__type": "AddedToken", "content": "<|x|>", "rstrip": True, "normalized": False}},
    "additional": {"additional_special_tokens": ["<|x|>"]},
    "extra": {"extra_special_tokens": ["<|x|>"]},
    "extra by name": {"extra_special_tokens": {"im_start": "<|x|>"}},
}


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_a_token_that_is_named_keeps_its_flags(kind: str, flags: dict, named: dict, folder: Write) -> None:
    """Phi-3's <|end|> takes the line break after it along, and its tokenizer_config.json names it alone."""
    made = sentencepiece() if "Llama" in kind else byte_level()
    made.add_special_tokens(["<|endoftext|>", "<unk>", "<s>", "</s>"])
    made.add_tokens([tokenizers.AddedToken("<|x|>", **{"special": True, "normalized": False, **flags})])
    check_ids(folder(made, tokenizer_config={"tokenizer_class": kind, **named}))


# Tokenizer classes

CLASSES = {
    "qwen2 without normaliser": (byte_level, "qwen2", "Qwen2Tokenizer"),
    "qwen2 by its model": (byte_level, "qwen2", None),
    "qwen2 of another name": (byte_level, "qwen2", "LlamaTokenizerFast"),
    "qwen3": (byte_level, "qwen3", "Qwen2TokenizerFast"),
    "qwen3 as stored": (byte_level, "qwen3", "PreTrainedTokenizerFast"),
    "gpt2 in llama": (byte_level, "llama", "GPT2TokenizerFast"),
    "llama": (sentencepiece, "llama", "LlamaTokenizer"),
    "llama of bytes": (byte_level, "llama", "LlamaTokenizerFast"),
    "llama in mistral": (sentencepiece, "mistral", "LlamaTokenizerFast"),
    "llama in phi3": (sentencepiece, "phi3", "LlamaTokenizerFast"),
    "gemma": (sentencepiece, "gemma3_text", "GemmaTokenizer"),
    "as stored": (sentencepiece, "llama", "PreTrainedTokenizerFast"),
    "unknown": (sentencepiece, "llama", "SomebodysTokenizer"),
    "unnamed": (sentencepiece, "llama", None),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_does_what_it_does_in_transformers(name: str, folder: Write, capsys: pytest.CaptureFixture) -> None:
    make, family, kind = CLASSES[name]
    config = {} if kind is None else {"tokenizer_class": kind}
    path = folder(make(), {"model_type": family, "architectures": None}, tokenizer_config=config)
    check_ids(path)
    assert not [line for line in capsys.readouterr().err.splitlines() if "not reproduced" in line]


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_within_a_text_are_split_where_the_folder_says_so(split: bool, folder: Write) -> None:
    check_ids(folder(byte_level(), tokenizer_config={"eos_token": "</s>", "split_special_tokens": split}))


@pytest.mark.parametrize("settings", [{"legacy": True}, {"add_prefix_space": False}])
def test_settings_of_the_llama_class_are_read(settings: dict[str, bool], folder: Write) -> None:
    check_ids(folder(sentencepiece(), tokenizer_config={"tokenizer_class": "LlamaTokenizer"} | settings))


def test_a_class_that_is_not_reproduced_is_named_once(folder: Write, capsys: pytest.CaptureFixture) -> None:
    path = folder(
        None, {"eos_token_id": None}, tokenizer_config={"tokenizer_class": "CohereTokenizerFast", "eos_token": "</s>"}
    )
    (path / "generation_config.json").unlink(missing_ok=True)
    Session.open(path, "numpy")  # which asks the tokenizer what ends a text, too
    said = capsys.readouterr().err
    assert "CohereTokenizer" in said and "not reproduced" in said and said.count("\n") == 1
    # a class of another kind of model than the file has
    model = models.WordLevel({"a": 0}, "a")
    folder(tokenizers.Tokenizer(model), tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    load_tokenizer(path)
    assert "GPT2Tokenizer" in capsys.readouterr().err


def test_every_class_that_builds_its_own_tokenizer_is_known() -> None:
    known = {*REPRODUCED, *OTHER_CLASSES}
    folder = Path(transformers.__file__).parent / "models"
    sources = "\n".join(file.read_text() for file in folder.glob("*/tokenization_*.py"))
    names = set(re.findall(r"^class (\w+)\(TokenizersBackend\)", sources, re.MULTILINE))
    builds = set()
    for name in names:
        kind = tokenizer_class_from_name(name)
        if kind is not None and "__init__" in kind.__dict__:
            builds.add(kind.__name__.removesuffix("Fast"))
    assert len(builds) > 30 and builds <= known, builds - known
    assert not known & set(AS_STORED)


def test_a_tokenizer_file_that_truncates_and_pads_does_neither(folder: Write) -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=16)
    path = folder(made)
    check_ids(path)
    assert len(encode(load_tokenizer(path), path, "x" * 10)) == 10


# Where a text ends

ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "tokenizer_config": ({"eos_token": "</s>"}, {}, (257,)),
    "special_tokens_map": ({}, {"eos_token": {"content": "</s>"}}, (257,)),
    "neither": ({}, {}, ()),
    "a new token": ({"eos_token": "<|new|>"}, {}, (258,)),  # as transformers numbers it
}


@pytest.mark.parametrize("name", ENDS)
def test_without_an_id_the_tokenizer_says_what_ends_a_text(name: str, folder: Write) -> None:
    """As mlx-lm takes it; a chat would go on and answer itself."""
    config, special, ends = ENDS[name]
    path = folder(None, {"eos_token_id": None}, tokenizer_config=config, special_tokens_map=special)
    (path / "generation_config.json").unlink(missing_ok=True)
    assert read_spec(path).eos_token_ids == read_limits(path)[1] == ends
    assert Session.open(path, "numpy").spec.eos_token_ids == ends
    (path / "tokenizer.json").unlink()
    assert read_spec(path).eos_token_ids == ()  # `info` needs none


def test_the_server_of_transformers_ends_there_too(folder: Write) -> None:
    from eps_cuda.integrations.transformers.server import set_ends

    path = folder(None, {"eos_token_id": None}, tokenizer_config={"eos_token": "</s>"})
    (path / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.generation_config.eos_token_id is None
    set_ends(model, path)
    assert model.generation_config.eos_token_id == [257]


def test_an_id_of_the_model_is_not_added_to(folder: Write) -> None:
    path = folder(None, {"eos_token_id": 7}, tokenizer_config={"eos_token": "</s>"})
    (path / "generation_config.json").unlink(missing_ok=True)
    assert read_spec(path).eos_token_ids == (7,)
