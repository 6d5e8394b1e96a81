"""Where a sparse decode step's host time goes: cProfile of steps of the demo model over a long, random cache.

    python scripts/experiments/step_profile/run.py --context 32768 > profile-step.txt

On the CPU the compiled kernels show as single entries; a function whose calls grow with the number of groups would be a
loop over groups in Python, and there is none. Speed only: what the model says of random keys is not looked at.
"""

import cProfile
import pstats
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np
from random_models import MODELS

from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate
from eps_core.decode.prefix import Prefix
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.metrics.provenance import git_commit

WARM_STEPS = 8


@click.command()
@click.option("--context", type=click.IntRange(min=512), default=32768, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--backend", default="cuda", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
def main(context: int, steps: int, backend: str, kernels: str) -> None:
    config, rng = EpsConfig.of(method="rq"), np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        model = MODELS["demo"](Path(folder), context + WARM_STEPS + steps)
        session = Session.open(model, backend, "cpu", "float32", kernels=kernels)
        spec, decoder = session.spec, session.decoder

    def random() -> Any:
        data = rng.standard_normal((context, spec.num_kv_heads, spec.head_dim), np.float32)
        return session.backend.from_numpy(data, "float32", "cpu")

    room = WARM_STEPS + steps
    prefix = Prefix([0] * context, [(random(), random()) for _ in range(spec.num_layers)])
    cache, pool = session.cache(config.cache_config, context + room)
    sequence, cache = prefix.into(session.backend, cache, pool, room)
    decode = generate(
        decoder, cache, pool, [[*prefix.tokens, 65]], room, Sampling(), config.selection_config, written=[sequence],
        forced_tokens=[[65] * room],
    )  # fmt: skip
    profile = cProfile.Profile()
    for record in decode:
        if record.step + 1 >= WARM_STEPS:
            profile.enable()
    profile.disable()
    groups = spec.num_layers * spec.num_kv_heads * (context // config.cache_config.S)
    print(
        f"{steps} steps of the demo model at {context:,} tokens ({groups:,} groups a step), backend {backend}, kernels"
    )
    print(f"{cache.kernels}, commit {git_commit()}; tottime: seconds in the function itself\n")
    stats = pstats.Stats(profile, stream=sys.stdout)
    stats.strip_dirs().sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    sys.exit(exit_code(main))
