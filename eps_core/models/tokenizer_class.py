"""The tokenizer that transformers 5 makes of a folder's tokenizer files beyond tokenizer.json: its special tokens, and
what the tokenizer class does that the folder names. Some classes build normaliser, pre-tokenizer and decoder again and
take only the vocabulary from tokenizer.json: Qwen2's composes accents (NFC), whatever the file says."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from eps_core.models.fields import read_if_there

TOKENIZER_FILE, CONFIG_FILE, SPECIAL_FILE = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# the split of Qwen2Tokenizer in transformers
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\n\p{L}\p{N}\r]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\n\r]*|\s*[\n\r]+|\s+(?!\S)|\s+"
)
# families whose tokenizer.json is read as it is, whatever class the folder names
_FAMILIES_AS_STORED = ("mistral", "phi3")
_FAMILY_CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma3_text": "GemmaTokenizer"}
AS_STORED = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
# classes of transformers 5.23 that build their own and are not reproduced here; those of text models for the most part
OTHER_CLASSES = tuple(
    f"{name}Tokenizer"
    for name in (
        "Albert Barthez Bert BigBird Blenderbot CLIP Camembert CodeGen CodeLlama Cohere Deberta DebertaV2 Esmc Funnel "
        "GPTNeoX Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MBart MBart50 MLuke MPNet MarkupLM Nllb Nougat "
        "OpenAIGPT Pegasus Qwen3_5 Reformer RemBert RoFormer Roberta SeamlessM4T Siglip2 Splinter T5 Tipsv2 Udop "
        "VideoPrism Whisper XGLM XLMRoberta XLNet"
    ).split()
)


def special_tokens(path: Path) -> dict[str, str]:
    """Return the named special tokens of the tokenizer in a folder, as transformers has them: of its class, of
    tokenizer_config.json and, where that lists no added tokens, of special_tokens_map.json, the last one winning."""
    special = _special(path, read_if_there(path / CONFIG_FILE))
    return {name: token for name, value in special.items() if (token := _content(value)) is not None}


def as_in_transformers(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Return the tokenizer of tokenizer.json changed as transformers does: by the folder's tokenizer class, with the
    special tokens of its other files added, without truncation or padding. A class that is not reproduced is named on
    stderr."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_if_there(path / CONFIG_FILE)
    kind = _class_of(path, config)
    if kind in REPRODUCED and isinstance(tokenizer.model, models.BPE):
        REPRODUCED[kind][0](tokenizer, config)
    elif kind in REPRODUCED or kind in OTHER_CLASSES:
        _say_once(
            f"{path}: what the class {kind} of transformers does to a text is not reproduced: tokenizer.json is read "
            "as it is, and other tokens than in transformers may follow"
        )
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    _add_tokens(tokenizer, path, config)
    return tokenizer


@cache  # a run opens the tokenizer a second time to find the token that ends a text
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def _qwen2(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    prefix = config.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _gpt2(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.get("add_prefix_space") is True)
    tokenizer.decoder = decoders.ByteLevel()


def _llama(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    prefix = config.get("add_prefix_space") in (None, True)
    scheme = ("always" if config.get("legacy") is True else "first") if prefix else "never"
    tokenizer.normalizer = None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = _pieces([decoders.Strip(content=" ", left=1)] if prefix else [])
    _bytes(tokenizer, None)


def _gemma(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    tokenizer.decoder = _pieces([])
    _bytes(tokenizer, "<unk>")


def _pieces(more: list[Any]) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _bytes(tokenizer: Tokenizer, unknown: str | None) -> None:
    model: Any = tokenizer.model
    model.fuse_unk, model.byte_fallback, model.unk_token = True, True, unknown


_END = "<|endoftext|>"
# class -> (what it does to the tokenizer of tokenizer.json, its special tokens where no file names them)
REPRODUCED: dict[str, tuple[Callable[[Tokenizer, dict[str, Any]], None], dict[str, str]]] = {
    "Qwen2Tokenizer": (_qwen2, {"unk_token": _END, "eos_token": _END, "pad_token": _END}),
    "GPT2Tokenizer": (_gpt2, {"unk_token": _END, "bos_token": _END, "eos_token": _END}),
    "LlamaTokenizer": (_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GemmaTokenizer": (
        _gemma,
        {
            "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
}  # fmt: skip


def _class_of(path: Path, config: dict[str, Any]) -> str:
    """The class that transformers 5 takes for a folder, without Fast at its end."""
    model = read_if_there(path / "config.json")
    family, named = model.get("model_type"), config.get("tokenizer_class") or model.get("tokenizer_class")
    if family in _FAMILIES_AS_STORED:
        return AS_STORED[0]
    if named is None or family == "qwen2":  # whose class transformers takes whatever the folder names
        return _FAMILY_CLASSES.get(family, AS_STORED[0]) if isinstance(family, str) else AS_STORED[0]
    named = named.removesuffix("Fast") if isinstance(named, str) else AS_STORED[0]
    # Llama 3's is of bytes, and LlamaTokenizer, which some of its folders name, is not
    return AS_STORED[0] if named == "LlamaTokenizer" and _is_of_bytes(path) else named


def _is_of_bytes(path: Path) -> bool:
    file = path / TOKENIZER_FILE
    return file.is_file() and b'"ByteLevel"' in file.read_bytes()


def _special(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    kind = _class_of(path, config)
    found: dict[str, Any] = dict(REPRODUCED[kind][1]) if kind in REPRODUCED else {}
    files = [config] if "added_tokens_decoder" in config else [config, read_if_there(path / SPECIAL_FILE)]
    for values in files:
        found |= {name: value for name, value in values.items() if name.endswith("_token")}
        named = values.get("extra_special_tokens")
        found |= named if isinstance(named, dict) else {}
    return {name: value for name, value in found.items() if _content(value) is not None}


def _add_tokens(tokenizer: Tokenizer, path: Path, config: dict[str, Any]) -> None:
    """Makes single tokens of those that other files name, and hides the special ones in the text, though tokenizer.json
    does not list them."""
    listed = config.get("added_tokens_decoder")
    for token in listed.values() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and _content(token):
            tokenizer.add_tokens([_added(token, token.get("special") is True)])
    extra = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    several = [one for tokens in extra if isinstance(tokens, list) for one in tokens if _content(one)]
    there = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named = list(_special(path, config).values())
    if _class_of(path, config) == "Qwen2Tokenizer":  # which adds all of them without flags
        there, named = {}, list(map(_content, named))
    for token in named:  # the flags that the file of tokens gives one are kept
        tokenizer.add_special_tokens([there.get(_content(token) or "") or _added(token, True)])
    tokenizer.add_special_tokens([_added(token, True) for token in several if _content(token) not in there])


def _added(token: Any, special: bool) -> AddedToken:
    flags = {key: token.get(key) is True for key in _TOKEN_FLAGS} if isinstance(token, dict) else {"normalized": False}
    return AddedToken(_content(token) or "", special=special, **flags)


def _content(token: Any) -> str | None:
    """A special token as a file has it: text, or an object that holds it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
