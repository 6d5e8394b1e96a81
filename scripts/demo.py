"""Asks a small chat model a question about a long document, and answers it twice: densely, then with EPS.

    python scripts/demo.py [flags of `eps-proto run`]

The model is SmolLM2-135M-Instruct, fetched once (scripts/get_model.py); the document is two chapters of the
documentation that Python brings along. With flags it is `eps-proto run` of this model and question, with all that this
prints; a flag of the demo's own (--model, --prompt, ..) takes that flag's place.
"""

import platform
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics
from subprocess import DEVNULL, Popen
from typing import Any, TextIO

import click
import numpy as np
from get_model import NowhereError, get_model, is_there, model_folder, say

from eps_core.cli.main import main, run_command
from eps_core.evaluation.compare import Display
from eps_core.evaluation.outcomes import Ran, alike
from eps_core.evaluation.pays import NOISE
from eps_core.evaluation.prefilled import Job
from eps_core.evaluation.runner import Outcome
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.metrics.terminal import MB, table

MODEL, NAME = "smollm2", "SmolLM2-135M-Instruct"
TOPICS = ("exceptions", "debugger")
CHARACTERS = 28_000  # at most, of about 4 a token: versions of Python differ, and the model holds 8,192 tokens
QUESTION = 'What does the "args" command print?'
MAX_NEW_TOKENS = 48
FAR = 32_768  # tokens, of the closing estimate
COLUMNS = 80


def document() -> str:
    return "\n\n".join(topics[topic].strip() for topic in TOPICS)[:CHARACTERS]


@contextmanager
def compiling_kernels() -> Iterator[None]:
    """Meanwhile, a run of the embedded model compiles what the chat's model needs, too: heads are of the same size."""
    line = [sys.executable, "-m", "eps_core.cli", "run", "--method", "rq", "--max-new-tokens", "1"]
    with Popen(line, stdout=DEVNULL, stderr=DEVNULL) as run:
        try:
            yield
        except BaseException:
            run.kill()
            raise


def demo() -> int | None:
    flags = sys.argv[1:]
    try:
        given = run_command.make_context("eps-proto run", list(flags)).params  # refuses wrong flags before all else
    except click.exceptions.Exit as end:  # --help
        return end.exit_code
    defaults: dict[str, Any] = {}
    if given["model"] is None:
        folder = model_folder(MODEL)
        try:
            if not is_there(MODEL, folder):
                with compiling_kernels():
                    get_model(MODEL, folder)
        except NowhereError:  # which said why
            say(f"{NAME} cannot be fetched now: the embedded model of 3 M parameters answers a question of its own")
            return run_command.main(flags, "eps-proto run", standalone_mode=False)
        defaults |= {"model": str(folder), "chat": True, "eps_method": "rq", "max_new_tokens": MAX_NEW_TOKENS}
    if given["prompt"] is None and not given["prompt_files"]:
        defaults["prompt"] = f"{document()}\n\n{QUESTION}"
    display = None
    if not flags:
        display, defaults["kl"] = Chat(), True
        print(f"document  documentation of Python {platform.python_version()}: {', '.join(TOPICS)}")
        print(f"question  {QUESTION}", flush=True)
        say("loading the model ..")
    return run_command.main(flags, "eps-proto run", standalone_mode=False, default_map=defaults, obj=display)


class Chat(Display):
    """A few lines before the two answers, and a small table after them."""

    def header(self, job: Job, out: TextIO) -> None:
        self.job = job
        session, selection = job.session, job.request.config.selection_config
        (tokens,) = job.prompt_lengths
        held, _ = step_bytes(job, tokens)
        share, floor = 100 * selection.budget, selection.budget_floor
        out.write(f"model     {NAME}, {session.dtype} on {session.device}\n")
        out.write(f"prompt    {tokens:,} tokens, prefilled once for both: {held / MB:.1f} MB of keys and values\n")
        out.write("dense     reads all of them for every new token\n")
        out.write(f"EPS       ranks the tokens by 1-bit codes and reads {share:.0f} % of them, at least {floor:,}\n\n")
        out.flush()

    def report(
        self,
        ran: Ran,
        dense: Outcome | None,
        eps: Outcome | None,
        out: TextIO,
        divergence: dict[str, float | None],
        layer: dict[str, Any] | None,
    ) -> dict[str, Any]:
        assert dense is not None and eps is not None
        first, second = dense.summary(), eps.summary()
        read = [sum(one.bytes_read for one in side.records) / len(side.records) / MB for side in (dense, eps)]
        rows = [
            ["tokens per second", *(f"{one['tokens_per_s']:.1f}" for one in (first, second))],
            ["ms a token, median", *(f"{one['decode_ms_p50']:.1f}" for one in (first, second))],
            ["MB of the KV cache read a token", *(f"{one:.1f}" for one in read)],
            ["  share of dense", "100 %", f"{100 * second['bytes_ratio']:.1f} %"],
            ["KL from dense, nats, mean", "", f"{divergence['kl_mean']:.4f}"],
            ["the same answer", "", "yes" if alike(dense, eps) == [True] else "no"],
        ]
        out.write(f"\n{table(rows, ['', 'dense', 'EPS'], out)}\n\n")
        for line in (self.saved(first, second, *read), self.far()):
            out.write(textwrap.fill(line, COLUMNS) + "\n")
        return {}

    @property
    def weights_mb(self) -> float:
        return self.job.session.decoder.model.weight_bytes / MB

    def saved(self, dense: dict[str, Any], eps: dict[str, Any], dense_mb: float, eps_mb: float) -> str:
        """Return what was saved in this run and what was not: `_mb` are reads of the KV cache a token."""
        weights = self.weights_mb
        of_all = 1 - (weights + eps_mb) / (weights + dense_mb)
        times = eps["tokens_per_s"] / dense["tokens_per_s"]
        time = "It saved no time here" if times < 1 + NOISE else f"A step was {times:.2f} times as fast"
        choosing, attention = eps["prepass_ms_p50"], eps["attention_ms_p50"]
        parts = "" if choosing is None else f", of which choosing took {choosing:.1f} and attention {attention:.1f}"
        return (
            f"EPS saved {100 * (1 - eps['bytes_ratio']):.0f} % of the reads of the KV cache. Every step also reads the "
            f"weights, {weights:.0f} MB, so that it saved {100 * of_all:.0f} % of all reads. {time}: a step took "
            f"{eps['decode_ms_p50']:.1f} ms{parts}, and a dense one {dense['decode_ms_p50']:.1f}."
        )

    def far(self) -> str:
        """Return an estimate at FAR tokens, of byte counts alone."""
        dense, sparse = (num_bytes / MB for num_bytes in step_bytes(self.job, FAR))
        times = (self.weights_mb + dense) / (self.weights_mb + sparse)
        return (
            f"An estimate from byte counts, not measured: at {FAR:,} tokens (this model holds "
            f"{self.job.session.spec.max_context:,}) a step would read {dense:.0f} MB of the KV cache densely and "
            f"{sparse:.0f} MB with EPS, which is {times:.1f} times fewer bytes with the weights."
        )


def step_bytes(job: Job, num_tokens: int) -> tuple[int, int]:
    """Return the bytes of K, V and summaries that a step over `num_tokens` tokens reads, densely and with EPS."""
    spec, layers = job.session.one_unit(), job.session.spec.num_layers
    plan = StepPlan.of(job.request.config, np.zeros((1, 0)), np.array([num_tokens]))
    groups = int(plan.budget(plan.num_always_selected).sum()) * spec.num_kv_heads
    return layers * plan.dense_kv_bytes(spec), layers * (plan.kv_bytes(spec, groups) + plan.summary_bytes(spec))


if __name__ == "__main__":
    main(demo)
