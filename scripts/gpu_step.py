"""Whole decode steps on a GPU, dense and sparse, of a few layers of Llama 3 8B's shape with random weights.

    python scripts/gpu_step.py -o results/gpu/step.jsonl

Speed only: a cache of random keys and values stands for the prompt, and what the model says of it is not looked at. A
step is the whole of it: projections, attention, the choice of the token on the host, and the launches between them.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from random_models import LLAMA_1B, write_llama
from safetensors.torch import save_file
from shared import CELLS, replaced

import eps_cuda
from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code, require
from eps_core.metrics.provenance import provenance

SHAPES = {  # hidden, inner, query heads, kv heads, head_dim, vocabulary, warm and timed steps
    "8b": (4096, 14336, 32, 8, 128, 4096, 8, 24),
    "tiny": (128, 256, 4, 2, 32, 512, 1, 2),
}
CONFIGS = {"dense": EpsConfig(), "EPS": EpsConfig.of(method="rq").for_device("cuda")}


def make_model(folder: Path, shape: str, layers: int, device: str) -> Path:
    hidden, inner, heads, kv_heads, head_dim, vocabulary, *_ = SHAPES[shape]
    config = {
        **LLAMA_1B, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocabulary,
        "max_position_embeddings": 2**20,
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16().cpu()

    return write_llama(folder, config, normal, save_file)


def step_ms(session: Session, prefix: Prefix, batch: int, config: EpsConfig, warm_steps: int, num_steps: int) -> float:
    """The median milliseconds of a step of `batch` sequences that hold the prefix's tokens."""
    room, length = warm_steps + num_steps, len(prefix.tokens)
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
    return statistics.median(times[warm_steps:])


@click.command()
@click.option(
    "--cells", type=CELLS, default="65536x4,131072x1,131072x4", show_default=True, help="context x batch, ..."
)
@click.option("--layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="8b", show_default=True)
@click.option("--device", default="cuda", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(cells: tuple[tuple[int, int], ...], layers: int, shape: str, device: str, output: Path) -> None:
    require(device != "cuda" or torch.cuda.is_available(), "no CUDA device is there: run on a machine with a GPU")
    with tempfile.TemporaryDirectory() as folder, replaced(output) as out:
        model, dtype = make_model(Path(folder), shape, layers, device), "bfloat16" if device == "cuda" else "float32"
        session = Session.open(model, "cuda", device, dtype, kernels="triton")
        *_, kv_heads, head_dim, _, warm_steps, num_steps = SHAPES[shape]
        name = torch.cuda.get_device_name() if device == "cuda" else device
        out.write({"type": "run", "device_name": name, **provenance(eps_cuda.versions())})
        for context, batch in cells:
            generator = torch.Generator(device).manual_seed(context)

            def random() -> torch.Tensor:
                numbers = torch.randn((context, kv_heads, head_dim), generator=generator, device=device)  # noqa: B023
                return numbers.bfloat16() if device == "cuda" else numbers

            prefix = Prefix([65] * context, [(random(), random()) for _ in range(layers)])
            ms = {
                name: round(step_ms(session, prefix, batch, config, warm_steps, num_steps), 3)
                for name, config in CONFIGS.items()
            }
            out.write({
                "type": "step", "device_name": name, "shape": shape, "layers": layers, "context": context,
                "batch": batch, "step_ms": ms, "weights_bytes": session.decoder.model.weight_bytes,
            })  # fmt: skip
            times = ", ".join(f"{name} {one:.2f}" for name, one in ms.items())
            print(f"{context} x {batch}, {layers} layers, ms a step: {times}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
