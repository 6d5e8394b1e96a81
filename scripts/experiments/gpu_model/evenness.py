"""Print how evenly the programs of `attend_best` are busy with a real model's selections.

    python scripts/experiments/gpu_model/evenness.py --model DIR --context 8000

Each program attends to what is selected among its groups. Groups are dealt in pieces of 32 in turn, as the kernel has
them, or in parts of the context in a row. The number is what the busiest program of a (sequence, kv head) attends to
over the mean, and its mean over layers, heads and steps.
"""

import sys
from pathlib import Path

import click
import numpy as np
import torch

from eps_core.errors import exit_code, require
from eps_core.tasks.corpus import corpus

STEPS, CHUNK, PIECE, RUN = 6, 2048, 32, 1024


@click.command()
@click.option("--model", "path", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--context", type=click.IntRange(min=2 * RUN), default=8000, show_default=True, help="Tokens.")
def main(path: Path, context: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eps_cuda.integrations.transformers import EpsCache

    text = corpus().decode("ascii")[: 8 * context]
    ids = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt").input_ids[:, :context]
    require(ids.shape[1] == context, f"the text has {ids.shape[1]} tokens, fewer than --context {context}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eps").eval()
    cache = EpsCache(model, method="rq")
    cache.sparse.keep_lists = True
    with torch.no_grad():
        for start in range(0, context - 1, CHUNK):
            model(ids[:, start : min(start + CHUNK, context - 1)], past_key_values=cache, logits_to_keep=1)
        last = ids[:, -1:]
        for _ in range(STEPS):
            last = model(last, past_key_values=cache).logits[:, -1:].argmax(-1)
    cache.sparse.stats()  # collects what is pending
    lists = [head for step in cache.sparse.lists for layer in step.values() if layer for row in layer for head in row]
    splits = -(-context // RUN)
    for name, owner in (("pieces in turn", lambda g: g // PIECE % splits), ("parts in a row", lambda g: g // RUN)):
        counts = [np.bincount(owner(np.asarray(one)), minlength=splits) for one in lists]
        busiest = np.mean([one.max() / one.mean() for one in counts])
        print(f"{name}: the busiest of {splits} programs has {busiest:.2f} times the mean ({len(lists)} selections)")


if __name__ == "__main__":
    sys.exit(exit_code(main))
