"""A race of decode steps on this machine: llama.cpp, transformers and EPS, of one real model at several contexts.

Held equal: the model's weights (bfloat16 as stored; "8bit" and "Q8_0" are made of these), a prompt of real text, the
number of threads, 16-bit K and V. llama.cpp has flash attention on; transformers its SDPA and default cache, in
float32 and bfloat16. All hold their caches at once; rounds of a few greedy steps are interleaved in a rotated order.
A step of verified decoding is a round's time over its tokens.

Time to first token is that of the whole prompt, a median of --prefills in turns, of llama.cpp once; beyond
--prefill-up-to, transformers takes the K and V of EPS instead, and llama.cpp still reads the prompt. With --batch 8
every sequence holds the same prompt, and with --ragged the last is whole and the others are shorter, down to a quarter;
llama.cpp takes no part in batches.

    python scripts/race.py --model DIR --context 4096,8000 --llama-python PYTHON -o results/race.jsonl
    python scripts/race.py --table -o results/race.jsonl

PYTHON is an interpreter with `pip install llama-cpp-python gguf numpy`; its check against transformers' logits comes
before any timing.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from shared import CONTEXTS, appended, markdown_table, rows_of

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.cpu import host
from eps_core.decode.balance import factors
from eps_core.decode.generate import generate, prefill
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.decode.verified import verified
from eps_core.errors import exit_code, require
from eps_core.metrics.provenance import package_version, provenance
from eps_core.metrics.terminal import Progress
from eps_core.tasks.corpus import corpus

PEERS = ("float32", "bfloat16")  # of transformers
CHECK_TOKENS, CHECK_KL, WARM_UP = 64, 0.01, 2
OFF, SPARSE = EpsConfig(), EpsConfig.of(method="rq")
OURS = (  # name, config, weights of steps, verified
    ("EPS off", OFF, "full", False), ("EPS", SPARSE, "full", False), ("EPS, verified", SPARSE, "full", True),
    ("EPS off, 8-bit weights", OFF, "8bit", False), ("EPS, 8-bit weights", SPARSE, "8bit", False),
)  # fmt: skip
FILES = (("llama.cpp bf16", "bf16"), ("llama.cpp Q8_0", "q8_0"))  # made of the model's weights
Steps = Callable[[int], list[float]]  # seconds of so many more steps, each a token of every sequence
Contestant = tuple[float | None, Steps]  # seconds to the first token, None where it was not timed


class Llama:
    """A child that runs llama.cpp."""

    def __init__(self, python: str | None, stack: ExitStack) -> None:
        line, pipe = [str(python), "-c", "import race_llama; race_llama.main()"], subprocess.PIPE
        folder = Path(__file__).parent
        self.child = stack.enter_context(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, cwd=folder))
        stack.callback(self.child.kill)

    def ask(self, do: str, **about: Any) -> dict[str, Any]:
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps({"do": do, **about}) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        require(bool(line), f"the llama.cpp child ended at {do!r}: see its message above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def transformers_model(path: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind: torch.dtype = getattr(torch, dtype)
    return AutoModelForCausalLM.from_pretrained(path, dtype=kind, attn_implementation="sdpa").eval()


def run_transformers(model: Any, prompts: list[list[int]], filled: list | None) -> Contestant:
    """`filled`: K and V of each layer of the first prompt but its last token, in the place of a prefill."""
    from transformers import DynamicCache

    from eps_cuda.integrations.transformers.names import CACHE

    batch, cache, seconds = len(prompts), DynamicCache(config=model.config), None
    with torch.inference_mode():
        if filled is None:
            start = time.perf_counter()
            out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1, **{CACHE: cache})
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            seconds = time.perf_counter() - start
        else:
            for layer, pair in enumerate(filled):
                k, v = (one.to(model.dtype).transpose(0, 1)[None].repeat(batch, 1, 1, 1) for one in pair)
                cache.update(k, v, layer)
            token = torch.tensor([[prompt[-1]] for prompt in prompts])

    def steps(number: int) -> list[float]:
        nonlocal token
        times = []
        with torch.inference_mode():
            for _ in range(number):
                start = time.perf_counter()
                out = model(token, use_cache=True, **{CACHE: cache})
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                times.append(time.perf_counter() - start)
        return times

    return seconds, steps


def run_llama(llama: Llama, prompt: list[int], about: dict[str, Any]) -> Contestant:
    llama.ask("open", **about)
    seconds = llama.ask("prefill", tokens=prompt)["seconds"]
    return seconds, lambda number: llama.ask("steps", steps=number)["steps"]


def run_eps(
    session: Session, config: EpsConfig, prompts: list[list[int]], room: int, weights: str, verify: bool, prefix: Any
) -> Contestant:
    """EPS dense or sparse over a cache of its own; with a `prefix`, K and V of the longest prompt but its last token,
    nothing is prefilled or timed."""
    cache, pool = session.cache(config.cache_config, [len(prompt) + room for prompt in prompts])
    decoder = session.decoder if weights == "full" else session.decoder.quantised(8)
    written, seconds = [], None
    if prefix is None:
        start = time.perf_counter()
        sequence, cache = prefill(session.decoder, cache, pool, prompts[0][:-1])
        written.append(sequence)
    for prompt in prompts[len(written) :]:
        length = len(prompt) - 1
        part = type(prefix)(prefix.tokens[:length], [(k[:length], v[:length]) for k, v in prefix.keys_values])
        sequence, cache = part.into(session.backend, cache, pool, room)
        written.append(sequence)
    selection = config.selection_config if config.cache_config.enabled else None
    same = decoder, cache, pool, prompts, room, Sampling()
    if verify:
        assert selection is not None
        records: Iterator[Any] = verified(*same, selection, SpeculativeConfig("tokens", None), written=written)
    else:
        records = generate(*same, selection, written=written)
    if prefix is None:
        next(records)
        seconds = time.perf_counter() - start

    def steps(number: int) -> list[float]:
        times: list[float] = []
        while len(times) < number:
            start = time.perf_counter()
            record = next(records)
            spent, tokens = time.perf_counter() - start, len(record.tokens) // len(prompts)
            times += [spent / tokens] * tokens
        return times

    return seconds, steps


def prefill_in_turns(
    opened: dict[str, Callable[[], Contestant]], times: int, report: Callable[[int, int], None]
) -> tuple[dict[str, Contestant], dict[str, list[float]]]:
    """Open every contestant. Those that time a first token are opened `times` times, in turns; llama.cpp once. Return
    each as it was opened last, and the seconds to its first tokens."""
    runners: dict[str, Contestant] = {}
    firsts: dict[str, list[float]] = {}
    for turn in range(times):
        for number, (name, run) in enumerate(opened.items(), 1):
            if turn and (name not in firsts or name.startswith("llama.cpp")):
                continue
            runners.pop(name, None)  # whose cache would lie beside the new one
            runners[name] = run()
            seconds = runners[name][0]
            if seconds is not None:
                firsts.setdefault(name, []).append(round(seconds, 3))
            report(turn * len(opened) + number, times * len(opened))
    report(times * len(opened), times * len(opened))
    return {name: runners[name] for name in opened}, firsts


def lengths_of(context: int, batch: int, ragged: bool) -> list[int]:
    """Tokens of each prompt: all `context`, or evenly from a quarter of it to all."""
    return [context - (context * 3 // 4) * i // max(batch - 1, 1) if ragged else context for i in range(batch)]


def race(runners: dict[str, Steps], rounds: int, steps: int) -> dict[str, list[float]]:
    """Median ms of a step by runner and round, interleaved; each round begins with another runner."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values() if rounds else ():
        run(WARM_UP)
    names = list(runners)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(1e3 * float(np.median(runners[name](steps))))
    return found


def compare(llama: Llama, model: Path, tokens: list[int], about: dict[str, Any]) -> None:
    """Refuse a llama.cpp that is not the model: next-token KL from transformers in float32 after some tokens."""
    llama.ask("open", **{**about, "room": 256})
    own = torch.tensor(llama.ask("check", tokens=tokens)["logits"]).log_softmax(-1)
    with torch.inference_mode():
        judge = transformers_model(model, "float32")(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
    kl = float((judge.exp() * (judge - own)).sum())
    require(kl < CHECK_KL, f"llama.cpp's next token is {kl:.3f} from transformers' (KL): at most {CHECK_KL}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return ms a step by model, batch and context, medians over rounds, and what a further 1,000 tokens cost."""
    groups: dict[tuple, dict[str, dict[int, dict]]] = {}
    for row in rows:
        key = row["model"], row["batch"], row["ragged"]
        groups.setdefault(key, {}).setdefault(row["runner"], {})[row["context_tokens"]] = row
    parts = []
    for (model, batch, ragged), runners in groups.items():
        contexts = sorted({context for one in runners.values() for context in one})
        stepped = any(row["step_ms"] for one in runners.values() for row in one.values())
        head = ["runner", *(f"ms at {context:,}" for context in contexts), "ms a further 1,000 tokens"]
        head = [*(head if stepped else head[:1]), *(f"first token at {context:,}, s" for context in contexts)]
        lines = []
        for runner, at in runners.items():
            ms, firsts = (
                [np.median(at[context][name]) if context in at and at[context][name] else None for context in contexts]
                for name in ("step_ms", "first_token_s")
            )
            cells = [["-" if one is None else f"{one:.1f}" for one in some] for some in (ms, firsts)]
            known, slope = [(context, one) for context, one in zip(contexts, ms, strict=True) if one is not None], "-"
            if len(known) > 1:
                (first, least), (last, most) = known[0], known[-1]
                slope = f"{1e3 * (most - least) / (last - first):.2f}"
            lines.append([runner, *((*cells[0], slope) if stepped else ()), *cells[1]])
        words = "" if batch == 1 else f", {batch} sequences{' of a quarter of it to all' if ragged else ''}"
        parts.append(f"{model}{words}:\n\n{markdown_table(head, lines)}")
    return "\n\n".join(parts)


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of the model.")
@click.option(
    "--context", "contexts", type=CONTEXTS, default="4096,8000", show_default=True, help="Tokens of the prompt; commas."
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--ragged", is_flag=True, help="Prompts of a quarter of the context to all of it.")
@click.option("--rounds", type=click.IntRange(min=0), default=7, show_default=True, help="Of steps; 0: prompts alone.")
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Steps of each round.")
@click.option("--prefill-up-to", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens.")
@click.option("--prefills", type=click.IntRange(min=1), default=3, show_default=True, help="Times a prompt is timed.")
@click.option("--llama-python", help="Interpreter with llama-cpp-python; without, llama.cpp takes no part.")
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False), help="A further GGUF file of the model to race.")
@click.option("--runner", "only", multiple=True, help="The name of one that takes part; repeatable. Without, all do.")
@click.option("--table", "table_only", is_flag=True, help="Print the table of OUTPUT and measure nothing.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSONL; rows are appended.")
def main(
    model: Path | None, contexts: tuple[int, ...], batch: int, ragged: bool, rounds: int, steps: int,
    prefill_up_to: int, prefills: int, llama_python: str | None, gguf: str | None, only: tuple[str, ...],
    table_only: bool, output: Path,
) -> None:  # fmt: skip
    if table_only:
        print(table(rows_of(output, "race")))
        return
    require(model is not None, "--model is missing: give a Hugging Face folder (scripts/get_model.py)")
    assert model is not None
    peers = [f"transformers {dtype}" for dtype in PEERS if not ragged]  # which it pads
    kinds = [*FILES, *((("llama.cpp, given file", "given"),) if gguf else ())] if llama_python and batch == 1 else []
    names = [*(one[0] for one in OURS), *peers, *(one[0] for one in kinds)]
    chosen = list(only) or names
    unknown = ", ".join(sorted(set(chosen) - set(names)))
    require(not unknown, f"--runner {unknown} takes no part here: choose among {'; '.join(names)}")
    session = Session.open(model, "cuda", "cpu", "bfloat16", config=SPARSE)
    room = WARM_UP + rounds * steps + 64  # a round of verified decoding may run past its steps
    longest = max(contexts) + room
    limit = session.spec.max_context
    require(longest <= limit, f"--context {max(contexts)} and {room} steps are beyond the model's {limit} tokens")
    text = session.encode(corpus().decode("ascii"), special=False)
    require(len(text) > longest, f"the text has {len(text)} tokens, less than {longest}: lower --context")
    session.check_kernels(SPARSE.cache_config)
    threads = host.host_threads()
    versions: dict[str, Any] = {**session.backend.versions(), "transformers": package_version("transformers")}
    with ExitStack() as stack:
        writer = stack.enter_context(appended(output))
        files: dict[str, tuple[Llama, dict[str, Any]]] = {}
        for name, kind in kinds:
            if name in chosen:
                file = str(Path(gguf).resolve()) if gguf and kind == "given" else None
                about = {"model": str(model.resolve()), "kind": kind, "gguf": file, "threads": threads}
                files[name] = Llama(llama_python, stack), {**about, "room": longest + 8}
        if files:
            llama, about = next(iter(files.values()))
            compare(llama, model, text[:CHECK_TOKENS], about)
        asked = {
            "context": contexts, "batch": batch, "ragged": ragged, "rounds": rounds, "steps": steps, "runners": chosen,
            "prefills": prefills,
        }  # fmt: skip
        writer.write({
            "type": "run", **provenance(versions), "device_name": host.host_name(), "threads": threads,
            "model": model.name, "asked": asked,
        })  # fmt: skip
        models = {name: transformers_model(model, name.split()[1]) for name in peers if name in chosen}
        for tokens in contexts:
            prompts = [text[:length] for length in lengths_of(tokens, batch, ragged)]
            timed = batch == 1 and tokens <= prefill_up_to
            opened: dict[str, Callable[[], Contestant]] = {}
            with Progress("prefill:", "runners") as progress:
                prefix = session.prefix(prompts[0][:-1])
                assert session.exponents is not None
                balances = torch.from_numpy(factors(session.exponents)).bfloat16()
                unbalanced = [(k / one, v) for (k, v), one in zip(prefix.keys_values, balances, strict=True)]
                for name, config, weights, verify in OURS:
                    if name not in chosen:
                        continue
                    first = timed and weights == "full" and not verify
                    own = None if first else prefix
                    opened[name] = partial(run_eps, session, config, prompts, room, weights, verify, own)
                for name, peer in models.items():
                    opened[name] = partial(run_transformers, peer, prompts, None if timed else unbalanced)
                for name, (llama, about) in files.items():
                    opened[name] = partial(run_llama, llama, prompts[0], about)
                runners, firsts = prefill_in_turns(opened, prefills, progress)
            found = race({name: one[1] for name, one in runners.items()}, rounds, steps)
            for name, times in found.items():
                writer.write({
                    "type": "race", "model": model.name, "runner": name, "context_tokens": tokens, "batch": batch,
                    "ragged": ragged, "step_ms": [round(one, 3) for one in times], "first_token_s": firsts.get(name),
                })  # fmt: skip
            runners.clear()
            opened.clear()
    print(table([row for row in rows_of(output, "race") if row["model"] == model.name and row["batch"] == batch]))


if __name__ == "__main__":
    sys.exit(exit_code(main))
