"""llama.cpp in a race (race.py): the child, in an interpreter with llama-cpp-python, gguf and numpy.

Reads a JSON object a line from stdin, and answers each with one on stdout: `open` makes a GGUF file of a Hugging Face
folder's bfloat16 weights, in bfloat16 or Q8_0 (8 bits a weight in blocks of 32), and loads it; `check` gives the logits
after tokens; `prefill` and `steps` give seconds.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.quants import quantize

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
KINDS = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def weights(folder: Path):
    """Yield (name, float32 array) of the folder's one safetensors file."""
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, one in header.items():
        if name != "__metadata__":
            assert one["dtype"] == "BF16", f"{name} is {one['dtype']}: the race takes bfloat16 weights"
            begin, end = one["data_offsets"]
            wide = data[begin:end].view(np.uint16).astype(np.uint32) << 16
            yield name, wide.view(np.float32).reshape(one["shape"])


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k in the order of llama.cpp's Llama: its RoPE turns neighbours, Hugging Face's halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, kind: str, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    for add, value in (
        (writer.add_context_length, config["max_position_embeddings"]), (writer.add_head_count, heads),
        (writer.add_embedding_length, config["hidden_size"]), (writer.add_head_count_kv, kv_heads),
        (writer.add_feed_forward_length, config["intermediate_size"]), (writer.add_rope_freq_base, theta),
        (writer.add_block_count, config["num_hidden_layers"]), (writer.add_vocab_size, config["vocab_size"]),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_rope_dimension_count, config["hidden_size"] // heads),
    ):  # fmt: skip
        add(value)
    # tokens are fed by number: the vocabulary only has to be one
    pieces = {number: piece for piece, number in vocabulary["model"]["vocab"].items()}
    pieces |= {one["id"]: one["content"] for one in vocabulary.get("added_tokens", [])}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.get(number, f"<unused {number}>") for number in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    merges = [one if isinstance(one, str) else " ".join(one) for one in vocabulary["model"]["merges"]]
    writer.add_token_merges(merges)
    for name, weight in weights(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = turned(weight, heads if name.endswith("q_proj.weight") else kv_heads)
        own: Any = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if weight.ndim == 1:
            writer.add_tensor(own, np.ascontiguousarray(weight))
        else:
            writer.add_tensor(own, quantize(np.ascontiguousarray(weight), KINDS[kind]), raw_dtype=KINDS[kind])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def opened(asked: dict) -> llama_cpp.Llama:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(asked["gguf"] or Path(scratch) / "model.gguf")
        if asked["gguf"] is None:
            write_gguf(Path(asked["model"]), asked["kind"], path)
        return llama_cpp.Llama(
            str(path), n_ctx=asked["room"], n_batch=512, n_ubatch=512, n_threads=asked["threads"],
            n_threads_batch=asked["threads"], flash_attn=True, type_k=1, type_v=1, verbose=False, no_perf=True,
            use_mmap=False,
        )  # fmt: skip


def logits_of(model: llama_cpp.Llama) -> np.ndarray:
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),))


def main() -> None:
    model: Any = None
    token = 0
    for line in sys.stdin:
        asked = json.loads(line)
        start, said = time.perf_counter(), {}
        if asked["do"] == "open":
            model = opened(asked)
            said = {"version": llama_cpp.__version__}
        elif asked["do"] == "check":
            model.reset()
            model.eval(asked["tokens"])
            said = {"logits": logits_of(model).tolist()}
        elif asked["do"] == "prefill":
            model.reset()
            model.eval(asked["tokens"])
            token = int(logits_of(model).argmax())
        else:
            times = []
            for _ in range(asked["steps"]):
                begin = time.perf_counter()
                model.eval([token])
                token = int(logits_of(model).argmax())
                times.append(time.perf_counter() - begin)
            said = {"steps": times}
        print(json.dumps({"seconds": time.perf_counter() - start, **said}), flush=True)
