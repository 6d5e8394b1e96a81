"""Whole decode steps at a long context, dense and sparse: `eps-proto run` on the demo model, a random 1B shape, or any
model's folder.

Speed only: the demo model is run past its trained context and the 1B model knows nothing, so what they say is not
looked at. Appends the last line of every run, with the run line's versions and commit, to a JSONL.

    python scripts/whole_step.py --context 32768 --models demo,llama-1b --backend cuda
    python scripts/whole_step.py --context 8000 --models DIR --backend cuda     (scripts/get_model.py smollm2 DIR)
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors.numpy import save_file

from eps_core.errors import exit_code
from eps_core.io import outputs
from eps_core.models.config import DEMO_MODEL
from eps_core.models.tokenizer import load_tokenizer
from eps_core.tasks.corpus import corpus
from eps_core.tasks.sizing import cut

# Llama 3.2 1B, whose prompt the demo's byte tokenizer makes
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128256, "rope_theta": 500000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def longer(source: Path) -> Callable[[Path, int], Path]:
    """Makes a copy of a model that is allowed to run past its context."""

    def make(folder: Path, context: int) -> Path:
        config = json.loads((source / "config.json").read_text())
        for name in ("model.safetensors", "tokenizer.json"):
            shutil.copy(source / name, folder / name)
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
        return folder

    return make


def make_llama_1b(folder: Path, context: int) -> Path:
    """Random weights of LLAMA_1B's shape in bfloat16, 2.5 GB: normal, with a standard deviation of 0.02."""
    import ml_dtypes

    rng, c = np.random.default_rng(0), LLAMA_1B
    hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    heads, kv_heads = c["num_attention_heads"] * head, c["num_key_value_heads"] * head

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    ones = np.ones(hidden, ml_dtypes.bfloat16)
    weights = {"model.embed_tokens.weight": normal(c["vocab_size"], hidden), "model.norm.weight": ones}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (heads, hidden)), ("self_attn.k_proj", (kv_heads, hidden)),
            ("self_attn.v_proj", (kv_heads, hidden)), ("self_attn.o_proj", (hidden, heads)),
            ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)), ("mlp.down_proj", (hidden, inner)),
        ):  # fmt: skip
            weights[f"{at}{name}.weight"] = normal(*shape)
        weights[f"{at}input_layernorm.weight"] = weights[f"{at}post_attention_layernorm.weight"] = ones
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors")
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps({**c, "max_position_embeddings": context}))
    return folder


MODELS = {"demo": longer(DEMO_MODEL), "llama-1b": make_llama_1b}


def prompt_of(model: Path, context: int) -> str:
    """Return text of `context` tokens, the one that begins a text included."""
    tokenizer = load_tokenizer(model)

    def encode(text: str, special: bool = True) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    return cut(corpus().decode("ascii"), encode, context - len(encode("")))


@click.command()
@click.option("--context", type=click.IntRange(min=512), default=32768, show_default=True, help="Tokens of the prompt.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=32, show_default=True)
@click.option("--models", default="demo", show_default=True, help=f"Of {', '.join(MODELS)}, or folders; commas.")
@click.option("--backend", default="cuda,mlx", show_default=True, help="Separated by commas.")
@click.option("--dtype", default="float32,bfloat16", show_default=True, help="Of weights and cache; commas.")
@click.option(
    "-o", "--output", "--out", "out", type=click.Path(path_type=Path), default=Path("results/whole_step.jsonl"),
    show_default=True,
)  # fmt: skip
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(
    context: int, new_tokens: int, models: str, backend: str, dtype: str, out: Path, flags: tuple[str, ...]
) -> None:
    """FLAGS, after --, go to `eps-proto run` as they are."""
    names = [name.strip() for name in models.split(",")]
    unknown = sorted(name for name in set(names) - set(MODELS) if not Path(name).is_dir())
    if unknown:
        raise click.UsageError(f"model {', '.join(unknown)} is no folder: give one, or of {', '.join(MODELS)}")
    outputs.check({"-o": out}, {"the demo model": DEMO_MODEL})
    outputs.check_start("-o", out, b"{", "JSONL")
    with ExitStack() as stack:
        output = stack.enter_context(outputs.Output(out, "-o"))
        kept_bytes = output.file.stat().st_size if output.file is not None and output.file.exists() else 0
        writer = stack.enter_context(outputs.JsonlWriter(output, kept_bytes))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        prompt = Path(scratch) / "prompt.txt"
        for name in names:
            folder = Path(scratch) / "model"
            folder.mkdir()
            model = MODELS[name](folder, context + new_tokens + 1) if name in MODELS else Path(name)
            prompt.write_text(prompt_of(model, context))
            for one in backend.split(","):
                for kind in dtype.split(","):
                    metrics = Path(scratch) / "metrics.jsonl"
                    line = _run(Path(name).name, model, prompt, new_tokens, one, kind, flags, metrics)
                    writer.write(line)
            shutil.rmtree(folder)


def _run(
    name: str,
    model: Path,
    prompt: Path,
    new_tokens: int,
    backend: str,
    dtype: str,
    flags: tuple[str, ...],
    metrics: Path,
) -> dict:
    """One run's last line, without its tokens, and what says how it was made."""
    command = [
        sys.executable, "-m", "eps_core.cli", "run", "--model", model, "--prompt-file", prompt, "--backend", backend,
        "--dtype", dtype, "--max-new-tokens", new_tokens, "--no-stop", "--method", "rq", "--metrics", metrics,
        *flags,
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    if done.returncode:  # it has said why
        sys.exit(done.returncode)
    result = json.loads(done.stdout.splitlines()[-1])
    run_line = json.loads(metrics.read_text().splitlines()[0])
    for side in ("dense", "eps"):
        result[side].pop("tokens")
    made = {key: run_line[key] for key in ("config", "versions", "git_commit", "device_name", "platform")}
    line = {"type": "whole_step", **{k: v for k, v in result.items() if k not in ("text", "tokens")}, **made}
    line["model"], line["dtype"] = name, dtype
    line["speedup"] = result["dense"]["decode_ms_p50"] / result["eps"]["decode_ms_p50"]
    dense_ms, sparse_ms = (result[side]["decode_ms_p50"] for side in ("dense", "eps"))
    print(
        f"{name:9} {backend:5} {dtype:9} {result['prompt_tokens']:,} tokens: dense {dense_ms:.1f} ms, sparse "
        f"{sparse_ms:.1f} ms a step ({line['speedup']:.2f} x), bytes {result['bytes_ratio']:.3f}",
        flush=True,
    )
    return line


if __name__ == "__main__":
    sys.exit(exit_code(main))
