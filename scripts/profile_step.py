"""Where a gated decode step's host time goes: cProfile of steps of the demo model over a long, random cache.

    python scripts/profile_step.py --context 32768 > results/profile-step.txt

On the CPU the compiled kernels show as single entries; a function whose calls grow with the number of groups would be a
loop over groups in Python, and there is none. Speed only: what the model says of random keys is not looked at.
"""

import cProfile
import pstats
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from whole_step import make_demo

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode.model import read_spec
from eps_core.load import load_backend
from eps_core.telemetry.files import git_commit

WARM_STEPS, FILL_TOKENS = 8, 2048


@click.command()
@click.option("--context", type=click.IntRange(min=512), default=32768, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
def main(context: int, steps: int, backend: str, kernels: str) -> None:
    module, config = load_backend(backend), EpsConfig.of(method="rq")
    with tempfile.TemporaryDirectory() as folder:
        model = make_demo(Path(folder), context + WARM_STEPS + steps)
        spec = read_spec(model)
        decoder = module.load_model(model, spec, "float32", "cpu")
    units = -(-(context + WARM_STEPS + steps) // config.store.unit_tokens)
    cache_spec = CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, units)
    cache, rng = module.new_cache(cache_spec, config.store, "cpu", kernels), np.random.default_rng(0)
    for layer in range(spec.num_layers):
        for start in range(0, context, FILL_TOKENS):
            shape = (min(FILL_TOKENS, context - start), spec.num_kv_heads, spec.head_dim)
            k, v = (module.from_numpy(rng.standard_normal(shape, np.float32), "float32", "cpu") for _ in range(2))
            cache = module.write_kv(cache, layer, k, v, np.arange(start, start + shape[0]))
    profile = cProfile.Profile()
    for step in range(WARM_STEPS + steps):
        length = context + step + 1
        table = np.arange(-(-length // config.store.unit_tokens), dtype=np.int32)[None]
        if step >= WARM_STEPS:
            profile.enable()
        cache, _ = decoder.step(cache, np.array([65]), np.array([length - 1]), table, np.array([length]))
        profile.disable()
    groups = spec.num_layers * spec.num_kv_heads * (context // config.store.S)
    print(
        f"{steps} steps of the demo model at {context:,} tokens ({groups:,} groups a step), backend {backend}, kernels"
    )
    print(f"{cache.kernels}, commit {git_commit()}; tottime: seconds in the function itself\n")
    stats = pstats.Stats(profile, stream=sys.stdout)
    stats.strip_dirs().sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
