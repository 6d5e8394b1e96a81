"""The content of a model folder, found out before anything is loaded or compiled. What the chosen decoder does not read
is refused by its name, with the way out."""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from eps_core.errors import ConfigError, shown
from eps_core.load import OWN
from eps_core.models.fields import read_json

ADAPTER_FILE, CONFIG_FILE = "adapter_config.json", "config.json"
WEIGHT_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# a file that says how weights are quantised, where config.json does not -> the kind
QUANTISED_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
# who reads a folder -> the files that hold its weights, where no index names them
_WEIGHTS = {
    OWN: (WEIGHT_FILE,),
    "mlx-lm": ("model*.safetensors",),
    "transformers": (WEIGHT_FILE, "pytorch_model*.bin"),
    "vllm": ("*.safetensors", "*.bin", "*.pt"),
    "sglang": ("*.safetensors", "*.bin", "*.pt"),
}
_GGUF = "GGUF, the format of llama.cpp"
_GGUF_FIX = (
    "give the file to eps-proto run --engine transformers, or convert it with transformers (from_pretrained(DIR, "
    "gguf_file=NAME) and save_pretrained(NEW), of AutoModelForCausalLM and of AutoTokenizer) and give NEW"
)
_ORIGINAL_FIX = "give the folder or repository of this model in Hugging Face's format"
# weights in other forms: pattern, what they are, the fix; the first that is there is named
_FOREIGN = (
    ("*.gguf", _GGUF, _GGUF_FIX),
    ("consolidated*", "the model maker's own format", _ORIGINAL_FIX),
    ("*.npz", "an older MLX format", "convert the original model again with mlx_lm.convert, unquantised"),
    (
        "*.bin",
        "pickles of PyTorch",
        "convert them to safetensors (AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)) and give NEW",
    ),
)
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # how one begins; it is no longer
_METHODS = {
    "awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "fbgemm_fp8": "FP8", "mxfp4": "MXFP4", "modelopt": "ModelOpt",
    "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed-tensors",
}  # fmt: skip
# kind of quantised weights -> the engines that read it; others are the engine's to say
_READERS = {"MLX": ("mlx-lm",), "bitsandbytes": ("transformers", "vllm")}
_METHOD_BITS = {"FP8": 8, "MXFP4": 4}
_BIT_KEYS = ("bits", "w_bit", "num_bits", "nbits")


def refuse_file(path: Path) -> ConfigError:
    """Return the error for a model that is named by a file: what the file is, and the fix."""
    if _begins(path, _POINTER):
        return _pointer(path)
    if is_gguf(path):
        return ConfigError(f"model {path} is {_GGUF}, which is not read here: {_GGUF_FIX}")
    return ConfigError(f"model {path} is a file, not a directory: give its folder, {path.parent}")


def is_gguf(path: Path) -> bool:
    """Return whether a file is of the GGUF format, or named so."""
    return path.is_file() and (_begins(path, b"GGUF") or path.suffix.lower() == ".gguf")


def check_folder(path: Path, engine: str = OWN, weights: bool = True, more: Iterable[str] = ()) -> None:
    """Raises ConfigError where a folder is no model that `engine` can read; with `weights`, where they are not there,
    too. `more` names files that its repository has and the folder has not."""
    names = sorted({*(os.listdir(path) if path.is_dir() else ()), *more})
    refuse_adapter(path)
    if CONFIG_FILE not in names:
        raise ConfigError(f"{path / CONFIG_FILE} is missing: {_instead(path, names)}")
    for name in names:
        if name.endswith((".json", ".jinja", ".safetensors", ".bin", ".model")) and _begins(path / name, _POINTER):
            raise _pointer(path / name)
    if engine != OWN:
        kind = quantisation(path, read_json(path / CONFIG_FILE))
        if kind is not None and engine not in _readers(kind):
            raise ConfigError(f"{path} is quantised: {kind}, which {engine} does not read: {quantisation_fix(kind)}")
    if weights:
        check_weights_there(path, engine, more)


def refuse_adapter(model: str | Path) -> None:
    """Raises ConfigError where a folder holds an adapter: transformers applies it to the base weights, and to leave it
    out without a word would be another model's text."""
    path = Path(model)
    if not os.path.lexists(path / ADAPTER_FILE):  # a name of the Hub is no folder
        return
    settings = read_json(path / ADAPTER_FILE)
    kind, base = settings.get("peft_type") or settings.get("fine_tune_type"), settings.get("base_model_name_or_path")
    name = f"{kind.upper()} adapter" if isinstance(kind, str) else "adapter"
    fix = (
        "merge it first (AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW), of "
        "peft) and give NEW"
    )
    if settings.get("fine_tune_type") is not None:
        name += " of mlx-lm"
        fix = "merge it first (mlx_lm.fuse --model BASE --adapter-path DIR --save-path NEW) and give NEW"
    if os.path.lexists(path / CONFIG_FILE):
        raise ConfigError(f"{path} holds a {name} ({ADAPTER_FILE}) beside base weights, which EPS cannot apply: {fix}")
    of = f" of {shown(base)}" if isinstance(base, str) and base else ""
    raise ConfigError(f"{path} holds a {name}{of} and no model of its own: {fix}")


def quantisation(path: Path, config: dict[str, Any]) -> str | None:
    """Return how the weights in a folder are quantised: the kind, the bits, and what says so. None: they are not."""
    # mlx-lm writes both of the same content, the others the first
    for key in ("quantization", "quantization_config"):
        if config.get(key) is not None:
            return f"{_kind_and_bits(config[key])} ({key} of {CONFIG_FILE})"
    for name, kind in QUANTISED_FILES.items():
        if os.path.lexists(path / name):
            return f"{_kind_and_bits(read_json(path / name), kind)} ({name})"
    return None


def quantisation_fix(kind: str) -> str:
    *others, last = _readers(kind)
    engines = f"{', '.join(others)} or {last}" if others else last
    return f"give the unquantised float32, float16 or bfloat16 weights, or use --engine {engines}"


def _readers(kind: str) -> tuple[str, ...]:
    """Return the engines that may read weights of a kind, as `quantisation` says it."""
    return next(
        (found for name, found in _READERS.items() if kind.startswith(name)), ("transformers", "vllm", "mlx-lm")
    )


def _kind_and_bits(settings: Any, kind: str | None = None) -> str:
    if not isinstance(settings, dict):
        return shown(settings)
    method = settings.get("quant_method")
    if isinstance(method, str) and method in _METHODS:
        kind = _METHODS[method]
    elif method is not None:
        kind = shown(method)
    elif kind is None:
        kind = "bitsandbytes" if "load_in_4bit" in settings or "load_in_8bit" in settings else "MLX"
    bits = 4 if settings.get("load_in_4bit") is True else 8 if settings.get("load_in_8bit") is True else None
    bits = bits or _bits(settings) or _METHOD_BITS.get(kind)
    return kind if bits is None else f"{kind}, {bits} bits"


def _bits(settings: dict[str, Any]) -> int | None:
    """The first number of bits in settings, or in what they hold."""
    found = [settings.get(key) for key in _BIT_KEYS]
    found += [_bits(value) for value in settings.values() if isinstance(value, dict)]
    return next((bits for bits in found if isinstance(bits, int) and 0 < bits <= 64), None)


def weight_files(path: Path) -> list[str]:
    """Names of the files that hold a folder's weights, there or yet to be fetched, as EPS's own decoders read them."""
    index = path / INDEX_FILE
    if os.path.lexists(path / WEIGHT_FILE) or not os.path.lexists(index):
        return [WEIGHT_FILE]
    return sorted(set(weight_map(index).values()))


def weight_choices(path: Path, engine: str) -> list[list[str]]:
    """Return the files that may hold the weights of a folder as `engine` reads them, as names or patterns: the first
    ones that are there do."""
    if os.path.lexists(path / INDEX_FILE):
        return [weight_files(path)]
    return [[pattern] for pattern in dict.fromkeys((WEIGHT_FILE, *_WEIGHTS[engine]))]


def weight_map(index: Path) -> dict[str, str]:
    """Hugging Face name of every tensor -> its shard, a file within the model's folder."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise ConfigError(f"{index} lacks a 'weight_map' of tensor names to files: download it again")
    for shard in set(found.values()):
        path = PurePosixPath(shard)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in shard:
            raise ConfigError(
                f"shard {shown(shard)} that {index} names is no file within the model's folder: EPS reads nothing "
                "outside of it; download the model again"
            )
    return found


def check_weights_there(path: Path, engine: str = OWN, more: Iterable[str] = ()) -> None:
    """Raises ConfigError where the files are missing that hold the weights as `engine` reads them; `more` as in
    `check_folder`."""
    if os.path.lexists(path / WEIGHT_FILE):
        return
    index = path / INDEX_FILE
    if os.path.lexists(index):
        for shard in weight_files(path):
            if not os.path.exists(path / shard):
                raise ConfigError(f"shard {shown(shard)} that {index} names is missing: download it again")
        return
    names = sorted(os.listdir(path))
    if any(fnmatch(name, pattern) for name in names for pattern in _WEIGHTS[engine]):
        return
    found = _foreign(sorted({*names, *more}))
    what = f"only {found[0]}" if found else f"neither {WEIGHT_FILE} nor {INDEX_FILE} is there"
    reader = "EPS" if engine == OWN else engine
    fix = found[1] if found else "download the model again, with its weights"
    raise ConfigError(f"{path} holds no weights that {reader} reads, {what}: {fix}")


def _instead(path: Path, names: list[str]) -> str:
    """Return the content of a folder without config.json, and the fix."""
    found = _foreign(names)
    if found is not None:
        return f"the folder holds {found[0]}; {found[1]}"
    inner = next((name for name in names if os.path.lexists(path / name / CONFIG_FILE)), None)
    return "give the folder of a complete Hugging Face model" + (f"; give {path / inner}" if inner else "")


def _foreign(names: list[str]) -> tuple[str, str] | None:
    """(the first file of weights in another form and what it is, the fix)."""
    for pattern, what, fix in _FOREIGN:
        for name in names:
            if fnmatch(name, pattern):
                return f"{shown(name)}, {what}", fix
    return None


def _begins(file: Path, mark: bytes) -> bool:
    """Return whether a file begins with `mark`; False where it cannot be read, which its own reader then says."""
    try:
        if mark == _POINTER and os.stat(file).st_size > _POINTER_BYTES:
            return False
        with open(file, "rb") as opened:
            return opened.read(len(mark)) == mark
    except (OSError, ValueError):
        return False


def _pointer(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is a Git LFS pointer, not the file itself: fetch the files (git -C {file.parent} lfs pull), or "
        "download the model again"
    )
