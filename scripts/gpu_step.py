"""Whole decode steps on a GPU, dense and sparse, of a few layers of Llama 3 8B's shape with random weights.

    python scripts/gpu_step.py -o results/gpu/step.jsonl

Speed only: a cache of random keys and values stands for the prompt, and what the model says of it is not looked at. A
step is the whole of it: projections, attention, the choice of the token on the host, and the launches between them.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.models.config import DEMO_MODEL

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 4096
WARM_STEPS, STEPS = 8, 40


def make_model(folder: Path, layers: int, device: str) -> Path:
    """Random bfloat16 weights in Hugging Face's layout, with the demo model's tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 256,
        "eos_token_id": 257, "torch_dtype": "bfloat16", "max_position_embeddings": 2**20,
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16().cpu()

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": normal(HIDDEN) + 1}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)), ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)), ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
            ("mlp.gate_proj", (INNER, HIDDEN)), ("mlp.up_proj", (INNER, HIDDEN)), ("mlp.down_proj", (HIDDEN, INNER)),
        ):  # fmt: skip
            weights[f"{at}{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = normal(HIDDEN) + 1
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def step_ms(session: Session, prefix: Prefix, batch: int, config: EpsConfig) -> float:
    """The median milliseconds of a step of `batch` sequences that hold the prefix's tokens."""
    room, length = WARM_STEPS + STEPS, len(prefix.tokens)
    cache, pool = session.cache(config.cache_config, batch * (length + room + 128))
    sequences = []
    for _ in range(batch):
        sequence, cache = prefix.into(session.backend, cache, pool, room)
        sequences.append(sequence)
    steps = generate(
        session.decoder, cache, pool, [[*prefix.tokens, 65]] * batch, room, Sampling(), config.selection_config,
        written=sequences, forced_tokens=[[65] * room] * batch,
    )  # fmt: skip
    times = []
    for _ in range(room):
        start = time.perf_counter()
        next(steps)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[WARM_STEPS:])


@click.command()
@click.option("--cells", default="32768x1,131072x1,65536x4", show_default=True, help="context x batch, ...")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(cells: str, layers: int, device: str, output: Path) -> None:
    require(device != "cuda" or torch.cuda.is_available(), "no CUDA device is there: run on a machine with a GPU")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, output.open("w") as out:
        session = Session.open(make_model(Path(folder), layers, device), "cuda", device, "bfloat16", kernels="triton")
        name = torch.cuda.get_device_name() if device == "cuda" else device
        for cell in cells.split(","):
            context, batch = (int(number) for number in cell.split("x"))
            generator = torch.Generator(device).manual_seed(context)

            def random() -> torch.Tensor:
                shape = (context, KV_HEADS, HEAD_DIM)  # noqa: B023  used at once
                return torch.randn(shape, generator=generator, device=device).bfloat16()  # noqa: B023

            prefix = Prefix([65] * context, [(random(), random()) for _ in range(layers)])
            ms: dict[str, float] = {}
            for config in (EpsConfig.of(), EpsConfig.of(method="rq")):
                ms[config.method] = step_ms(session, prefix, batch, config)
            record: dict[str, Any] = {
                "type": "step", "device_name": name, "layers": layers, "context": context, "batch": batch,
                "dense_ms": round(ms["off"], 3), "sparse_ms": round(ms["rq"], 3),
                "weights_bytes": sum(one.nbytes for one in session.decoder.model.weights.values()),
            }  # fmt: skip
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(f"{context} x {batch}, {layers} layers: dense {ms['off']:.2f} ms, sparse {ms['rq']:.2f} ms a step")


if __name__ == "__main__":
    sys.exit(exit_code(main))
