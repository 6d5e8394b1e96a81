"""Models of GGUF files, the format of llama.cpp: transformers makes ordinary weights of them when it loads them."""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from eps_core.errors import ConfigError, install, one_line

_NEEDED = ("gguf", "accelerate")  # packages that transformers reads such files with


def source_of(path: Path) -> dict[str, Any]:
    """Return the arguments of transformers' `from_pretrained` for a model's folder, or for a GGUF file."""
    if path.is_dir():
        return {"pretrained_model_name_or_path": path}
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"reading GGUF needs {package}, which is not installed: {install('models')}")
    return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}


@contextmanager
def without_weights(file: Path) -> Iterator[Path]:
    """A folder with config.json, tokenizer and chat template of a GGUF file, until the block ends."""
    source = source_of(file)
    with tempfile.TemporaryDirectory(prefix="eps-gguf-") as folder:
        try:
            AutoConfig.from_pretrained(**source).save_pretrained(folder)
            AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        except Exception as error:  # of a file that is cut off, or of a model that is not read: no common class
            raise ConfigError(f"transformers cannot read {file}: {one_line(error)}") from error
        yield Path(folder)
