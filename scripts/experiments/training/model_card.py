"""Measure what a model that scripts/experiments/training/run.py wrote knows, and write its card beside it.

    python scripts/experiments/training/model_card.py DIR      (a quarter of an hour on 2 cores)

What training left in training.json stays there; what is measured joins it. `departures` in it, written by hand, is how
the weights came about otherwise than by a plain run of the script.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from shared import markdown_table

from eps_core.cli.numbers import SEED, TOKENS, argument
from eps_core.errors import exit_code
from eps_core.io import inputs
from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import filler
from experiments.training.rows import BOS
from experiments.training.run import CONFIG, Model, exported, needle_answers, predicted, write

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 12288, 16384)
LONGEST, DEPTH_BINS, TEXT_WINDOWS = 16384, 5, 16
MEND = "train it with scripts/experiments/training/run.py"


def held_out_bits_per_byte(model: Model, text: bytes, length: int, seed: int) -> float:
    """Return bits per byte of the last 1,024 of held-out windows of `length`: the same at any length up to LONGEST."""
    rng, losses = np.random.default_rng(seed), []
    for _ in range(TEXT_WINDOWS):
        window = filler(text, LONGEST, rng)[-length:]
        tokens = torch.tensor([BOS, *window])
        losses.append(F.cross_entropy(predicted(model, tokens)[-1024:], tokens[-1024:]).item())
    return float(np.mean(losses)) / math.log(2)


def measured(model: Model, text: bytes, documents: int, seed: int) -> dict[str, Any]:
    """Return needles, with their depths, and bits a byte of text by context, in tokens."""
    found: dict[str, Any] = {
        name: {}
        for name in (
            "needle_documents", "needle_accuracy", "needle_accuracy_by_depth", "held_out_bits_per_byte",
        )
    }  # fmt: skip
    for length in LENGTHS:
        if length > CONFIG["max_position_embeddings"]:
            break
        # a document of 16k costs as much as thirty of 1k: fewer of the longest
        count = -(-documents // (1 if length <= 8192 else 2))
        right = needle_answers(model, text, length, count, 2 * 10**6)
        found["needle_documents"][length] = count
        found["needle_accuracy"][length] = float(np.mean(right))
        found["needle_accuracy_by_depth"][length] = [float(np.mean(x)) for x in np.array_split(right, DEPTH_BINS)]
        if length >= 1024:
            found["held_out_bits_per_byte"][length] = held_out_bits_per_byte(model, text, length, seed)
        print(f"held-out needles at {length}: {np.mean(right):.3f} of {count}", flush=True)
    failing = [str(length) for length, share in found["needle_accuracy"].items() if share < 0.95]
    found["limit"] = (
        f"Under 95 % of needles at {', '.join(failing)} tokens." if failing else "No tested length fell under 95 %."
    )
    return found


def card(record: dict[str, Any]) -> str:
    bits, depths, documents = (
        record[name] for name in ("held_out_bits_per_byte", "needle_accuracy_by_depth", "needle_documents")
    )
    stages = markdown_table(
        ["context of stage (tokens)", "steps", "last loss (nats, answers counted twice)", "answers right in training"],
        [
            [stage["context"], stage["steps"], f"{stage['loss']:.3f}", f"{stage['answer_accuracy']:.3f}"]
            for stage in record["stages"]
        ],
    )
    needles = markdown_table(
        ["context (tokens)", "share answered", "documents", "by depth, from the start", "bits a byte"],
        [
            [length, f"{share:.3f}", documents[length], " ".join(f"{part:.2f}" for part in depths[length]),
             f"{bits[length]:.3f}" if length in bits else "-"]
            for length, share in record["needle_accuracy"].items()
        ],
    )  # fmt: skip
    departures = f"\n{record['departures']}\n" if record.get("departures") else ""
    return f"""# EPS demo model

A byte-level Llama ({record["parameters"] / 1e6:.2f} M parameters: {CONFIG["num_hidden_layers"]} layers, width
{CONFIG["hidden_size"]}, {CONFIG["num_attention_heads"]} query and {CONFIG["num_key_value_heads"]} key/value heads of
{CONFIG["head_dim"]}), trained from nothing by
`scripts/experiments/training/run.py` on Python's standard library source mixed with
needle documents. It knows how to look up `# The code for KEY is VALUE.` in a long text, and little else.
It exists to exercise EPS on real attention patterns; do not use it for anything else.

Seed {record["seed"]}, torch {record["torch"]}, Python {record["python"]}, {record["tokens_seen"] / 1e6:.0f} M tokens,
{record["hours"]:.2f} h on 2 CPU cores.

{stages}

Held-out needles answered exactly (all five digits, dense attention, depths spread evenly, 0 to 3 distractors), and bits
a byte of held-out text, of the last 1,024 bytes of a window:

{needles}

{record["limit"]}
{departures}
Licence: the weights are released under this repository's licence; the training text is under the PSF licence.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder that scripts/experiments/training/run.py wrote")
    parser.add_argument("--needle-documents", type=argument(TOKENS), default=100, help="a context; beyond 8k half")
    parser.add_argument("--seed", type=argument(SEED), default=0)
    args = parser.parse_args()
    record = inputs.read_object(args.model / "training.json", "training record", MEND)
    CONFIG.update(inputs.read_object(args.model / "config.json", "model config", MEND))
    model = Model()
    model.load_state_dict(exported(args.model))
    # as JSON has it, with lengths for keys, whether it was just measured or read again
    record = json.loads(json.dumps({**record, **measured(model, corpus(), args.needle_documents, args.seed)}))
    write(args.model / "training.json", (json.dumps(record, indent=2) + "\n").encode())
    write(args.model / "README.md", card(record).encode())


if __name__ == "__main__":
    sys.exit(exit_code(main))
