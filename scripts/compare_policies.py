"""Compares the selection policies of `rq` on the demo model: bytes really read against KL, along held-out text.

    OMP_NUM_THREADS=1 python scripts/compare_policies.py --out results/policies.jsonl          (a few minutes)

Writes one JSON object a line, the run first, and prints a Markdown table. One context length, texts as in evaluate.py.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from eps_core.config import EpsConfig
from eps_core.evaluate import Runner, kl_divergence
from eps_core.interface import load_backend
from eps_core.model import load_tokenizer, read_spec
from eps_core.tasks import corpus, filler
from eps_core.telemetry import git_commit

DEMO = Path(__file__).parent.parent / "eps_core" / "demo_model"
SETTINGS = (
    *({"policy": "topk", "budget": budget} for budget in (0.05, 0.08, 0.12, 0.18, 0.26)),
    *({"policy": "mass", "epsilon": epsilon} for epsilon in (0.4, 0.3, 0.2, 0.1, 0.05)),
    *({"policy": "share", "tau": tau} for tau in (3e-3, 1e-3, 5e-4, 2e-4, 1e-4)),
    *({"policy": "topk", "budget": budget, "scope": "union"} for budget in (0.05, 0.08, 0.12)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--text-steps", type=int, default=48)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/policies.jsonl"))
    args = parser.parse_args()

    backend, spec, tokenizer = load_backend(args.backend), read_spec(DEMO), load_tokenizer(DEMO)
    runner = Runner(backend, backend.load_model(DEMO, spec, "float32", "cpu"), "cpu")
    base, text = EpsConfig(method="rq"), corpus(held_out=True)
    found: dict[int, list] = {i: [[], 0, 0] for i in range(len(SETTINGS))}
    for index in range(args.texts):
        window = filler(text, args.context + args.text_steps, np.random.default_rng([0, 1, index])).decode("ascii")
        tokens = tokenizer.encode(window).ids[: args.context + args.text_steps]
        prompt_tokens, rest = tokens[: args.context], tokens[args.context :]
        cache, table, prompt = runner.prefill(prompt_tokens, args.text_steps)
        _, dense, _, _, _ = runner.decode(cache, table, prompt, rest, args.text_steps, prompt.logits)
        cache, table = runner.arm(prompt, base, args.text_steps)
        for i, settings in enumerate(SETTINGS):
            cache.config = replace(base, **settings)
            cache, got, _, read, full = runner.decode(cache, table, prompt, rest, args.text_steps, prompt.logits)
            found[i][0] += kl_divergence(dense, got).tolist()
            found[i][1] += read
            found[i][2] += full
        print(f"text {index + 1} of {args.texts}", file=sys.stderr, flush=True)
    run = {"type": "run", "context_tokens": args.context, "num_positions": args.texts * args.text_steps}
    rows = [run | {"cache_dtype": "bfloat16", "versions": backend.versions(), "git_commit": git_commit()}]
    print("| policy | setting | bytes | KL |\n|---|---|---|---|")
    for i, settings in enumerate(SETTINGS):
        kl, read, full = found[i]
        rows.append({"type": "cell", **settings, "bytes_ratio": read / full, "kl_mean": float(np.mean(kl))})
        name, *values = [f"{key} {value}" for key, value in settings.items()]
        print(f"| {name.split()[1]} | {', '.join(values)} | {read / full:.3f} | {np.mean(kl):.4f} |")
    partial = args.out.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(args.out)


if __name__ == "__main__":
    main()
