"""The tokenizer of a Hugging Face model directory."""

from pathlib import Path

from tokenizers import Tokenizer

from eps_core.decode.fields import one_line
from eps_core.errors import ConfigError


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in tokenizer.json."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} is missing: save the model's fast tokenizer there")
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:
        _refuse_other(error)
        raise ConfigError(
            f"{file} is no tokenizer of the tokenizers library ({one_line(error)}): download it again"
        ) from error


def encode(tokenizer: Tokenizer, path: Path, text: str, special: bool = True) -> list[int]:
    """Tokens of `text`; `special`: with those that the tokenizer puts around every text. `path` is what errors name."""
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
