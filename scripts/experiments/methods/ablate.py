"""Takes the default apart: what each part of `rq` is worth, as bytes against KL along held-out text.

    python scripts/experiments/methods/ablate.py -o results/ablations.jsonl        (minutes on 2 cores)

Writes one JSON object a line, the run first, and prints a Markdown table. Texts are those of run.py.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from eps_core.cli.numbers import TOKENS, argument
from eps_core.config.eps import EpsConfig
from eps_core.decode.session import Session
from eps_core.errors import exit_code
from eps_core.evaluation.runner import run_document
from eps_core.evaluation.statistics import bytes_at_kl
from eps_core.io import outputs
from eps_core.load import load_backend
from eps_core.metrics.provenance import provenance
from eps_core.metrics.terminal import Progress
from eps_core.models.config import DEMO_MODEL
from eps_core.tasks.corpus import SHA256
from experiments.methods.curves import PAIRS, text_document

DEFAULT = PAIRS
BUDGETS = tuple({"budget": budget} for budget in (0.015, 0.022, 0.03, 0.05, 0.08, 0.12))
WIDER = tuple({"budget": budget} for budget in (0.05, 0.08, 0.12, 0.18, 0.26))
FIRST = DEFAULT.replace(rescore=0.0, correction_tokens=0, num_sink_tokens=16, num_recent_tokens=128)
# (what, the configuration, the settings of its curve)
ARMS = (
    ("default", DEFAULT, BUDGETS),
    ("scope union", DEFAULT.replace(scope="union"), BUDGETS),
    ("no rescoring bit", DEFAULT.replace(rescore=0.0), BUDGETS),
    ("rescoring bit of 1/8", DEFAULT.replace(rescore=0.125), BUDGETS),
    ("rescoring bit of 1/4", DEFAULT.replace(rescore=0.25), BUDGETS),
    ("groups of 1", DEFAULT.replace(group_size=1), BUDGETS),
    ("groups of 4", DEFAULT.replace(group_size=4), BUDGETS),
    ("correction dropped", DEFAULT.replace(correction_tokens=0), BUDGETS),
    ("correction of 32", DEFAULT.replace(correction_tokens=32), BUDGETS),
    ("correction of 64", DEFAULT.replace(correction_tokens=64), BUDGETS),
    ("sink and recent tokens 16 + 128", DEFAULT.replace(num_sink_tokens=16, num_recent_tokens=128), WIDER),
    ("sink and recent tokens 4 + 32", DEFAULT.replace(num_recent_tokens=32), BUDGETS),
    ("1 bit, sink and recent tokens 16 + 128, no correction", FIRST, WIDER),
    ("box, 16", EpsConfig.of(method="box"), WIDER),
    ("box, 16, correction", EpsConfig.of(method="box", correction_tokens=64), WIDER),
)


@cache
def _session(backend: str) -> Session:
    return Session.open(None, backend, "cpu", "float32", "bfloat16")


def one_text(context: int, steps: int, backend: str, index: int) -> list[list[tuple[list[float], int, int]]]:
    """Return, of every variant and setting, divergences [steps], bytes read and dense bytes along one text."""
    session = _session(backend)
    variants = {
        (variant, i): config.replace(**setting)
        for variant, (_, config, settings) in enumerate(ARMS)
        for i, setting in enumerate(settings)
    }
    found = run_document(session, text_document(session, context, steps, 0, index), variants)
    return [
        [(found[variant, i].along_text()[0], *found[variant, i].bytes_read()) for i in range(len(settings))]
        for variant, (_, _, settings) in enumerate(ARMS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=argument(TOKENS), default=4096)
    parser.add_argument("--texts", type=argument(TOKENS), default=6)
    parser.add_argument("--text-steps", type=argument(TOKENS), default=48)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--jobs", type=argument(TOKENS), default=os.cpu_count())
    parser.add_argument("-o", "--output", "--out", dest="out", type=Path, default=Path("results/ablations.jsonl"))
    args = parser.parse_args()
    outputs.check({"-o": args.out}, {"the demo model": DEMO_MODEL})

    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        futures = [
            pool.submit(one_text, args.context, args.text_steps, args.backend, index) for index in range(args.texts)
        ]
        texts = []
        with Progress("ablate:", "texts") as progress:
            for future in futures:
                texts.append(future.result())
                progress(len(texts), args.texts)
    rows = [{"type": "run", "context_tokens": args.context, "num_positions": args.texts * args.text_steps,
             "cache_dtype": "bfloat16", "corpus": SHA256,
             **provenance(load_backend(args.backend).versions())}]  # fmt: skip
    print("| what | bytes: KL | bytes at KL 0.01 | at 0.004 |\n|---|---|---|---|")
    for variant, (name, config, settings) in enumerate(ARMS):
        points = []
        for i, setting in enumerate(settings):
            cells = [text[variant][i] for text in texts]
            points.append((sum(c[1] for c in cells) / sum(c[2] for c in cells), float(np.mean([c[0] for c in cells]))))
            rows.append({"type": "ablation", "what": name, **setting, "config": config.replace(**setting).to_dict(),
                         "bytes_ratio": points[-1][0], "kl_mean": points[-1][1]})  # fmt: skip
        at = [bytes_at_kl(points, kl) for kl in (0.01, 0.004)]
        words = ["-" if value is None else f"{'' if how == 'measured' else how + ' '}{value:.3f}" for value, how in at]
        rows.append({"type": "ablation_bytes", "what": name, "bytes_at_0.01": at[0], "bytes_at_0.004": at[1]})
        curve = ", ".join(f"{ratio:.3f}: {kl:.4f}" for ratio, kl in points)
        print(f"| {name} | {curve} | {words[0]} | {words[1]} |", flush=True)
    with outputs.replacing(args.out) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
