"""The model of `--model`: a directory, or a repository of the Hugging Face Hub, fetched into its shared cache."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from eps_core.errors import ConfigError, one_line
from eps_core.load import OWN, load_engine
from eps_core.models.config import DEMO_MODEL, read_spec
from eps_core.models.folder import (
    ADAPTER_FILE,
    CONFIG_FILE,
    QUANTISED_FILES,
    check_folder,
    is_gguf,
    refuse_file,
    weight_choices,
)

_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w][\w./-]*))?")
# all that is read of a model but its weights
_SMALL_FILES = (
    CONFIG_FILE, "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "chat_template.*",
    "*.index.json", ADAPTER_FILE, *QUANTISED_FILES,
)  # fmt: skip


def resolve_model(model: str | Path, weights: bool = True, engine: str = OWN) -> Path:
    """The folder of a model that is named by its folder or by org/name[@revision]. A folder that is there wins. Without
    `weights` nothing but the small files is fetched, or must be there; with them, they are fetched after the model was
    found to be one that `engine` may read. Raises ConfigError for what is no such model."""
    if os.path.isdir(model):
        check_folder(Path(model), engine, weights)
        return Path(model)
    if os.path.isfile(model):
        raise refuse_file(Path(model))
    named = _REPOSITORY.fullmatch(str(model))
    if named is None or os.path.lexists(model):
        raise ConfigError(
            f"model {str(model)!r} is no directory: give the folder with config.json and weights, or org/name of the "
            "Hugging Face Hub"
        )
    folder = _fetch(named["name"], named["revision"], _SMALL_FILES)
    check_folder(folder, engine, weights=False, more=() if (folder / CONFIG_FILE).exists() else _names(named["name"]))
    if weights:
        if engine == OWN:
            read_spec(folder)
        folder = _with_weights(named["name"], folder, engine)
        check_folder(folder, engine)
    return folder


def resolve_for_engine(model: str | Path | None, engine: str, gguf: bool = False) -> tuple[Path, Any]:
    """(folder, hook) of a model, None for the demo model, and of the engine that runs it. What is on this machine is
    checked before the engine is loaded, which takes seconds; what is not is fetched after it. With `gguf` a GGUF file
    in place of the folder is returned as it is for transformers, which reads such files."""
    if gguf and engine == "transformers" and model is not None and is_gguf(Path(model)):
        return Path(model), load_engine(engine)
    here = model is None or os.path.lexists(model)
    path = DEMO_MODEL if model is None else resolve_model(model, weights=here, engine=engine)
    module = load_engine(engine)
    return (path if here or model is None else resolve_model(model, engine=engine)), module


def _with_weights(name: str, folder: Path, engine: str) -> Path:
    """Return the snapshot `folder` with its weights as `engine` reads them. Raises ConfigError where the repository
    has none."""
    for files in weight_choices(folder, engine):
        if not all(os.path.exists(folder / file) for file in files):
            # the snapshot's own name is its commit: the branch may have moved since
            folder = _fetch(name, folder.name, (*_SMALL_FILES, *files))
        if any(fnmatch(there, file) for there in os.listdir(folder) for file in files):
            return folder
    check_folder(folder, engine, more=_names(name))
    return folder


def _names(name: str) -> list[str]:
    """Names of the files that a repository of the Hub has; none where it cannot say."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return []
    try:
        return HfApi().list_repo_files(name)
    except (errors.HfHubHTTPError, OSError):
        return []


def _fetch(name: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """The cached snapshot with what the repository has of `files` (glob patterns); progress goes to stderr."""
    from huggingface_hub import constants, snapshot_download  # late: it takes a while, and folders do not need it

    offline = constants.HF_HUB_OFFLINE
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files), local_files_only=offline))
    except Exception as error:  # HTTP errors, timeouts, full disks: no common class
        _refuse(name, revision, error)


def _refuse(name: str, revision: str | None, error: Exception) -> NoReturn:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        fix = f"is restricted: accept its terms on {constants.ENDPOINT}/{name}; set HF_TOKEN or run `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        fix = "is neither a directory here nor a repository of the Hub: check the name; a private one needs HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        fix = f"has no revision {revision!r}: name a branch, a tag or a commit"
    elif isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        fix = (
            f"is no directory here and not (whole) in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it, "
            "or give a folder"
        )
    else:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        fix = (
            f"is no directory here and cannot be fetched from {constants.ENDPOINT} ({one_line(cause)}): check the "
            "network, the disk and the name"
        )
    raise ConfigError(f"model {name} {fix}") from error
