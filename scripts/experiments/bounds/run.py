"""Checks that bounds, error bounds and strict mode hold, through the real backends against float64.

    python scripts/experiments/bounds/run.py                              (a few minutes on 2 cores)

Hard keys and queries of every kind until --checks (query head, group) bounds were checked, and on top of them q, k, v
of the demo model's decode of held-out text. Prints a table; its last line is one JSON object. Exits with 1 where
anything was violated.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from shared import markdown_table

from eps_core.cli.numbers import SEED, TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import fault
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.capture import record, text_tokens
from eps_core.load import BACKENDS, load_backend
from eps_core.metrics.provenance import provenance
from eps_core.metrics.terminal import Progress
from experiments.bounds.bounds import (
    BOUNDED_ARMS,
    CACHES,
    KEY_CODE_ARMS,
    Tally,
    Trial,
    run_bounds,
    run_capture,
    run_sparse,
    variant_name,
)

GROUP_TOKENS = (1, 128, 2, 64, 4, 32, 8, 16, 3, 5)
HEAD_DIMS = (16, 20, 64, 80, 128)
CONTEXT_TOKENS, STEPS = 2048, 8
KINDS = ("bounds", "share", "error", "strict", "layer")
Target = tuple[str, str]  # backend, device
Layers = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]

_captured: Layers = {}  # of a worker process


def capture(target: Target) -> Layers:
    """q [steps, Hq, D], k, v [T, Hkv, D] float32 of every layer of the demo model."""
    session = Session.open(None, *target, "float32", "float32")
    text = text_tokens(session, None, CONTEXT_TOKENS + STEPS)
    recording = record(session, text.tokens, CONTEXT_TOKENS, range(session.spec.num_layers), EpsConfig())
    return {layer: (q, *recording.keys_values(layer)) for layer, q in recording.q.items()}


def keep(captured: Layers) -> None:
    _captured.update(captured)


def plan(number: int, targets: list[Target], seed: int) -> list[tuple[Target, Trial]]:
    """One round: every method, kind of cache and backend once, at sizes that change from round to round."""
    rng, trials = np.random.default_rng([seed, number]), []
    for arm_index, variant in enumerate((*BOUNDED_ARMS, *KEY_CODE_ARMS)):
        for cache_index, (dtype, bits) in enumerate(CACHES):
            size = GROUP_TOKENS[(number + 3 * arm_index + cache_index) % len(GROUP_TOKENS)]
            fitting = [dim for dim in HEAD_DIMS if all(fault(name, dim) is None for name in bits)]
            head_dim, trial_seed = int(rng.choice(fitting)), int(rng.integers(2**31))
            for target in targets:
                # the numpy backend loops group by group: a small share
                units, sequences, repeat = (16, 2, 4) if target[0] == "numpy" else (96, 8, 32 if size <= 8 else 64)
                shape = size, head_dim, units, repeat, sequences
                trials.append((target, Trial(variant, dtype, *shape, trial_seed, kv_bits=bits)))
    return trials


def run(target: Target, trial: Trial, number: int) -> tuple[dict[str, Tally], dict[str, Tally]]:
    """(of random and hard data, of captured data: one layer a round)."""
    backend, device = load_backend(target[0]), target[1]
    made = run_bounds(backend, device, trial) if trial.config().cache_config.own_bounds else {}
    made |= run_sparse(backend, device, trial)
    if number >= len(_captured):
        return made, {}
    q, k, v = _captured[sorted(_captured)[number]]
    return made, run_capture(backend, device, trial, q[: trial.num_sequences], k, v)


def nats(gap: float) -> str:
    return "-" if math.isinf(gap) else f"{gap:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checks", type=argument(TOKENS), default=10_000_000, help="bounds to check on made-up data at least"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="each on all its devices")
    parser.add_argument("--seed", type=argument(SEED), default=0)
    parser.add_argument("--quick", action="store_true", help="one round, whatever --checks says")
    parser.add_argument("--jobs", type=argument(TOKENS), default=os.cpu_count(), help="processes, one thread each")
    args = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    started = time.time()
    targets = [(name, device) for name in args.backends for device in load_backend(name).devices()]
    # the capture is one for all: whichever backend is fastest at hand
    captured = capture(max(targets, key=lambda target: ("numpy", "mlx", "cuda").index(target[0])))
    cells: dict[tuple, dict[str, Tally]] = defaultdict(lambda: {kind: Tally() for kind in KINDS})
    sums = {"made": {kind: Tally() for kind in KINDS}, "captured": {kind: Tally() for kind in KINDS}}
    rounds = 0
    # spawned, so that every process starts with one thread
    with (
        ProcessPoolExecutor(args.jobs, get_context("spawn"), initializer=keep, initargs=(captured,)) as pool,
        Progress("check:", "bounds") as progress,
    ):
        while rounds == 0 or (not args.quick and sums["made"]["bounds"].checks < args.checks):
            trials = plan(rounds, targets, args.seed)
            futures = [pool.submit(run, target, trial, rounds) for target, trial in trials]
            for (target, trial), future in zip(trials, futures, strict=True):
                for source, tallies in zip(("made", "captured"), future.result(), strict=True):
                    for kind, tally in tallies.items():
                        sums[source][kind].add(tally)
                        cells[variant_name(trial.variant), trial.cache, "-".join(target)][kind].add(tally)
                        if tally.violations:
                            print(f"violated: {source} {kind} {target} {trial} {tally}", file=sys.stderr, flush=True)
            rounds += 1
            progress(sums["made"]["bounds"].checks, args.checks, f"{rounds} rounds")

    print("checks / violations / tightest gap in nats of each; roundings: the tightest bound in float32 roundings of a")
    print("logit; strict: true share unread <= epsilon; layer: both of a whole sparse layer\n")
    rows = []
    for key, tallies in sorted(cells.items(), key=lambda item: item[0]):
        entries = [f"{t.checks:,} / {t.violations} / {nats(t.gap)}" for t in tallies.values()]
        roundings = tallies["bounds"].gap_in_roundings
        rows.append([*key, entries[0], "-" if math.isinf(roundings) else f"{roundings:.0f}", *entries[1:]])
    head = ("bounds", "roundings", "bounded share", "bounded error", "strict", "layer")
    print(markdown_table(("method", "cache", "backend", *head), rows))
    totals = {kind: Tally() for kind in KINDS}
    for kinds in sums.values():
        for kind, tally in kinds.items():
            totals[kind].add(tally)
    violations = sum(tally.violations for tally in totals.values())
    result = {
        "checks": sum(tally.checks for tally in totals.values()),
        "violations": violations,
        "captured_bounds": sums["captured"]["bounds"].checks,
        **{kind: {k: v if math.isfinite(v) else None for k, v in asdict(t).items()} for kind, t in totals.items()},
        "rounds": rounds,
        "seed": args.seed,
        "targets": ["-".join(target) for target in targets],
        **provenance({k: v for name in args.backends for k, v in load_backend(name).versions().items()}),
        "seconds": round(time.time() - started),
    }
    print("\n" + json.dumps(result))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
