"""The tokenizer of a Hugging Face model directory."""

from pathlib import Path

from tokenizers import Tokenizer

from eps_core.errors import ConfigError, one_line
from eps_core.models.tokenizer_class import as_in_transformers, special_tokens

_SLOW_FILES = ("tokenizer.model", "tekken.json", "vocab.json")  # other forms of a tokenizer
_CHARACTERS_PER_TOKEN = 16  # of a text's start that is encoded at first
_CUT_TOKENS = 64  # more than a cut within a word can change


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in tokenizer.json, with what transformers adds to it: see `tokenizer_class`."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        slow = next((name for name in _SLOW_FILES if (file.parent / name).exists()), None)
        beside = f" and {slow} is not read" if slow else ""
        raise ConfigError(
            f"{file} is missing{beside}: save the model's fast tokenizer there "
            "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), of transformers)"
        )
    try:
        return as_in_transformers(Tokenizer.from_file(str(file)), Path(path))
    except ConfigError:
        raise
    except BaseException as error:
        _refuse_other(error)
        raise ConfigError(
            f"{file} is no tokenizer of the tokenizers library ({one_line(error)}): download it again"
        ) from error


def encode(
    tokenizer: Tokenizer, path: Path, text: str, special: bool = True, most_tokens: int | None = None
) -> list[int]:
    """Tokens of `text`; `special`: with those that the tokenizer puts around every text. `path` is what errors name.

    With `most_tokens` no more of a long text is encoded than shows that it has more than these, for a tokenizer takes
    seconds and hundreds of MB for each MB: more than `most_tokens` tokens are of its start, then, and the last ones not
    as they are within the whole."""
    if most_tokens is not None:
        wanted = most_tokens + _CUT_TOKENS
        length = wanted * _CHARACTERS_PER_TOKEN
        while length < len(text):
            tokens = _encode_whole(tokenizer, path, text[:length], special)
            if len(tokens) >= wanted:
                return tokens
            length *= 4
    return _encode_whole(tokenizer, path, text, special)


def _encode_whole(tokenizer: Tokenizer, path: Path, text: str, special: bool) -> list[int]:
    try:
        text = text.encode().decode()
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not valid Unicode ({error}): pass UTF-8 text") from error
    try:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    except BaseException as error:  # a vocabulary without the unknown token that this text needs, say
        _refuse_other(error)
        raise ConfigError(
            f"the tokenizer in {path} fails on this text ({one_line(error)}): it is incomplete, download it again"
        ) from error


def _refuse_other(error: BaseException) -> None:
    """Raises what is not the library's: it has plain Exceptions, and panics that are none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def end_tokens(path: Path) -> tuple[int, ...]:
    """Ids of the token that ends a text to the tokenizer in a folder; none where it names none, or is not there."""
    name = special_tokens(path).get("eos_token")
    if name is None or not (path / "tokenizer.json").is_file():
        return ()
    token = load_tokenizer(path).token_to_id(name)
    return () if token is None else (token,)
