"""The cost of a round of verified decoding here: dense, sparse, draft and verify passes of whole models, in turn.

    python scripts/experiments/verified_speed/run.py --models demo,llama-1b --context 8192,32768 (20 minutes)

Caches hold random keys and values, the models are the demo's past its context, the long one and a random one of Llama
3.2 1B's shape: speed only. A line holds medians of ms: c is a draft step over a dense one, v(g) a verify pass of g + 1
rows, with its commit, over a dense step, v0 a dense step that keeps summaries, which a round without drafts is. What a
model accepts is measured elsewhere (scripts/experiments/real/answers.py); `times_as_fast` is E / (g c + v(g)) for an
acceptance a of each draft, E = (1 - a^(g + 1)) / (1 - a): an estimate.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from random_models import MODELS
from shared import appended

from eps_core.cli.numbers import TOKENS, ListOf
from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.kv_cache.rows import Rows
from eps_core.metrics.provenance import provenance
from eps_core.models.config import DEMO_MODEL

FILL_TOKENS, WARM_UP = 4096, 2
DRAFTS = (2, 4, 8, 16)
ACCEPTANCES = (0.9, 0.95, 0.98)


class Bench:
    """A model with one sequence of random keys and values, in a dense cache and in a sparse one."""

    def __init__(self, session: Session, config: EpsConfig, context: int) -> None:
        self.session, self.config, self.context = session, config, context
        self.decoder, spec = session.decoder, session.spec
        self.selection_config = SpeculativeConfig("tokens").draft_selection(config.selection_config)
        self.caches: dict[str, Any] = {}
        self.slots: dict[str, np.ndarray] = {}
        self.tables: dict[str, np.ndarray] = {}
        room, rng = max(DRAFTS) + 2, np.random.default_rng(0)
        for name, cache_config in (("dense", CacheConfig()), ("sparse", config.cache_config)):
            cache, pool = session.cache(cache_config, context + room)
            sequence, _ = pool.open()
            slots, _ = pool.append(sequence, [0] * (context + room))
            for start in range(0, context, FILL_TOKENS):
                own = slots[start : min(start + FILL_TOKENS, context)]
                for layer in range(spec.num_layers):
                    shape = (len(own), spec.num_kv_heads, spec.head_dim)
                    k, v = (
                        session.backend.from_numpy(
                            rng.standard_normal(shape, np.float32), session.kv_dtype, session.device
                        )
                        for _ in range(2)
                    )
                    cache = session.backend.write_kv(cache, layer, k, v, own)
            self.caches[name], self.slots[name], self.tables[name] = cache, slots, pool.table([sequence])

    def step(self, name: str, decoder: Any, draft: bool = False, dense: bool = False) -> None:
        """One step of the token after the context; it is written over each time."""
        plan = self.slots[name][self.context : self.context + 1]
        lengths, selection_config = np.array([self.context + 1]), None if dense else self.selection_config
        self.caches[name], _ = decoder.step(
            self.caches[name], np.array([5]), plan, self.tables[name], lengths, selection_config, draft=draft
        )

    def verify(self, drafts: int) -> None:
        """A pass of so many drafts and one token more, all of them kept."""
        slots = self.slots["sparse"][self.context : self.context + drafts + 1]
        rows = Rows.of(self.tables["sparse"], np.array([self.context + drafts + 1]), np.array([drafts + 1]))
        tokens = np.full(drafts + 1, 5)
        cache, output = self.decoder.verify(self.caches["sparse"], tokens, slots, rows)
        self.caches["sparse"] = self.decoder.commit(cache, output, np.arange(drafts + 1), slots)


def times(parts: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median ms of every part, run in turn."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + WARM_UP):
        for name, part in parts.items():
            started = time.perf_counter()
            part()
            if turn >= WARM_UP:
                found[name].append(1000 * (time.perf_counter() - started))
    return {name: median(values) for name, values in found.items()}


def measure(session: Session, context: int, rounds: int, quantised: bool) -> dict[str, Any]:
    config = EpsConfig.of(method="rq")
    session.check_kernels(config.cache_config, verified=True)
    bench = Bench(session, config, context)
    parts: dict[str, Callable[[], None]] = {
        "dense": lambda: bench.step("dense", bench.decoder, dense=True),
        # what a round without drafts costs: the cache keeps its summaries up to date
        "dense_kept": lambda: bench.step("sparse", bench.decoder, dense=True),
        "sparse": lambda: bench.step("sparse", bench.decoder),
        "draft": lambda: bench.step("sparse", bench.decoder, draft=True),
    }
    if quantised:
        small = session.drafter(SpeculativeConfig("tokens", weights="4bit"))
        parts["draft_4bit"] = lambda: bench.step("sparse", small, draft=True)
    for drafts in DRAFTS:
        parts[f"verify_{drafts}"] = partial(bench.verify, drafts)
    ms = times(parts, rounds)
    v = {drafts: ms[f"verify_{drafts}"] / ms["dense"] for drafts in DRAFTS}
    costs = {name: ms[name] / ms["dense"] for name in ("draft", "draft_4bit") if name in ms}
    return {
        "context_tokens": context,
        "ms": ms,
        "sparse_times_as_fast": ms["dense"] / ms["sparse"],
        "v0": ms["dense_kept"] / ms["dense"],
        "c": costs,
        "v": v,
        "times_as_fast": {
            name: {f"{a:g}": {g: (1 - a ** (g + 1)) / (1 - a) / (g * c + v[g]) for g in DRAFTS} for a in ACCEPTANCES}
            for name, c in costs.items()
        },
    }


@click.command()
@click.option("--models", type=ListOf(click.Choice(tuple(MODELS))), default="demo,llama-1b", show_default=True)
@click.option("--context", "contexts", type=ListOf(TOKENS), default="8192,32768", show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and cache.")
@click.option("--rounds", type=click.IntRange(min=3), default=9, show_default=True)
@click.option("--quantised/--no-quantised", default=True, show_default=True, help="Drafts with 4-bit weights, too.")
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), default=Path("results/verified_speed.jsonl"),
    show_default=True,
)  # fmt: skip
def main(
    models: tuple[str, ...], contexts: tuple[int, ...], backend: str, dtype: str, rounds: int, quantised: bool,
    out: Path,
) -> None:  # fmt: skip
    """Appends a line a model and context to a JSONL."""
    with appended(out, {"the demo model": DEMO_MODEL}) as writer, tempfile.TemporaryDirectory() as scratch:
        for name in models:
            folder = Path(scratch) / name
            folder.mkdir()
            path = MODELS[name](folder, max(contexts) + max(DRAFTS) + 2)
            session = Session.open(path, backend, "auto", dtype, dtype)
            for one in contexts:
                row = measure(session, one, rounds, quantised)
                made = provenance(session.backend.versions())
                device = session.backend.device_name(session.device)
                writer.write(
                    {"type": "verified_speed", "model": name, "backend": session.backend_name, "dtype": dtype,
                     "kernels": session.kernels, "device_name": device, "rounds": rounds, **row, **made}
                )  # fmt: skip
                v = ", ".join(f"v({g}) {x:.2f}" for g, x in row["v"].items())
                c = ", ".join(f"{cost:.2f}" for cost in row["c"].values())
                print(
                    f"{name} {one:,} tokens: dense {row['ms']['dense']:.1f} ms, sparse "
                    f"{row['sparse_times_as_fast']:.2f} x, v0 {row['v0']:.2f}, c {c}, {v}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(exit_code(main))
