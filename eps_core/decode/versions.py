"""Weights that change while caches live, as in reinforcement learning: no page of old weights is ever read with new.

A pool names the weights that its pages come from (`PagePool.version`), and that name is part of every page's hash: old
pages are found by nobody, and come free as the sequences that hold them end. A sequence of old weights is refused the
next token; `generate` prefills its own again, prompt and what was said so far, and `generate.refill` does so for
anybody's (vLLM pauses and clears its cache: `pause_generation(mode, clear_cache)` of its engine).
"""

from pathlib import Path

from eps_core.decode.session import Session
from eps_core.errors import require
from eps_core.models.config import read_spec
from eps_core.paging.pool import PagePool


def update_weights(session: Session, path: Path, *pools: PagePool) -> None:
    """The session computes with the weights in `path`, of a model of the same shape, from now on, and each of `pools`,
    whose caches it goes on with, gets its next version. Raises ConfigError, and changes nothing, for another model's.
    Decoders that evict keep the weights that they were made with; a stream that has begun has a pool that nobody else
    knows: let it end before."""
    spec = read_spec(path)
    differing = [name for name, value in vars(spec).items() if value != getattr(session.spec, name)]
    require(
        not differing,
        f"{path} is of another model than {session.path}: its {', '.join(differing)} "
        f"{'differ' if len(differing) > 1 else 'differs'}; open a session of its own",
    )
    session.decoder.update(session.read_decoder(path).model)
    session.path = path
    for pool in pools:
        pool.version += 1
