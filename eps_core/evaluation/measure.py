"""What EPS costs in quality: tasks, benchmark files and plain text, answered densely, with EPS and by an oracle.

All arms of one document share its dense prefill and differ in decode alone, which is all that EPS changes; the
prompt's last token is decoded again in each arm, so that the first answer token comes from the gate too. Prompts are
given to the model as they are, without a chat template. Decoding is greedy.
"""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode.forward import load_decoder
from eps_core.decode.model import DEMO_MODEL, Encoder, ModelSpec, read_spec
from eps_core.decode.session import choose_device
from eps_core.errors import ConfigError
from eps_core.evaluation import quality
from eps_core.evaluation.quality import Answer
from eps_core.evaluation.runner import Prompt, Runner
from eps_core.load import backend_name, load_backend
from eps_core.tasks import benchmarks
from eps_core.tasks.needle import corpus
from eps_core.tasks.questions import Question, benchmark_question, generated_questions, text_window
from eps_core.tasks.ruler import check_tasks
from eps_core.telemetry import terminal
from eps_core.telemetry.files import check_writable, replacing, run_line, to_json
from eps_core.telemetry.steps import kl_divergence

# what selects and what is always visited; how a group is summarised means nothing to an oracle, nor does strictness,
# which needs bounds
_SHARED_WITH_ORACLE = (
    "policy", "budget", "tau", "epsilon", "alpha", "top_pages", "first_tokens", "last_tokens", "scope", "head_modes",
    "min_context", "block_size",
)  # fmt: skip


@dataclass(frozen=True)
class MeasureRequest:
    """What the command line asked for. `model` None is the demo model, `text` None the held-out standard library."""

    config: EpsConfig
    tasks: tuple[str, ...] = ()
    contexts: tuple[int, ...] = (4096,)
    samples: int = 20
    text_steps: int = 64
    oracle: bool = True
    seed: int = 0
    longbench: tuple[Path, ...] = ()
    longbench_prompts: Path | None = None
    ruler: tuple[Path, ...] = ()
    model: Path | None = None
    backend: str = "auto"
    device: str = "auto"
    text: Path | None = None
    out: Path | None = None

    def arms(self) -> dict[str, EpsConfig]:
        """The oracle has the same budget and group size, and the true masses in place of estimates."""
        arms = {"eps": self.config}
        if self.oracle:
            flat = self.config.to_dict()
            shared: dict[str, Any] = {name: flat[name] for name in _SHARED_WITH_ORACLE}
            arms["oracle"] = EpsConfig.of(method="oracle", group_tokens=self.config.store.S, **shared)
        return arms


def greedy(
    runner: Runner, cache: Any, table: Any, prompt: Prompt, first: np.ndarray, max_new: int, stop: tuple[int, ...]
) -> tuple[Any, list[int], int, int]:
    """(cache, tokens, bytes read, dense bytes): greedy tokens after the prompt, from `first`, its last logits [V]; ends
    before a stop token."""
    tokens: list[int] = []
    read = dense = 0
    logits = first
    while True:
        token = int(logits.argmax())
        if token in stop:
            break
        tokens.append(token)
        if len(tokens) == max_new:
            break
        so_far = replace(prompt, length=prompt.length + len(tokens) - 1)
        cache, got, _, step_read, step_dense = runner.decode(cache, table, so_far, [token], 1, logits)
        logits, read, dense = got[0], read + step_read, dense + step_dense
    return cache, tokens, read, dense


def ask(runner: Runner, encoder: Encoder, question: Question, arms: dict[str, EpsConfig]) -> dict[str, Answer]:
    """Every arm's answer to one question, `dense` first."""
    stop, max_new = runner.spec.eos_token_ids, question.max_new_tokens
    cache, table, prompt = runner.prefill(question.tokens, max_new)
    runner.backend.check_finite(cache)

    def answer(tokens: list[int], read: int, dense: int) -> Answer:
        text = encoder.decode(tokens)
        return Answer(text, benchmarks.score(question.sample, text), read, dense)

    _, tokens, _, dense = greedy(runner, cache, table, prompt, prompt.logits, max_new, stop)
    answers = {"dense": answer(tokens, dense, dense)}
    before_last = replace(prompt, length=prompt.length - 1)
    for name, config in arms.items():
        cache, table = runner.arm(prompt, config, max_new)
        cache, got, _, read, dense = runner.decode(cache, table, before_last, question.tokens[-1:], 1, prompt.logits)
        _, tokens, more_read, more_dense = greedy(runner, cache, table, prompt, got[0], max_new, stop)
        answers[name] = answer(tokens, read + more_read, dense + more_dense)
    return answers


def follow_text(
    runner: Runner, tokens: list[int], steps: int, arms: dict[str, EpsConfig]
) -> dict[str, tuple[np.ndarray, np.ndarray, int, int]]:
    """Each arm's (KL in nats [steps], whether the likeliest token is dense's [steps], bytes read, dense bytes), all
    fed the text's own last `steps` tokens one by one. A teacher-forced prefill would not exercise the gate."""
    head, tail = tokens[:-steps], tokens[-steps:]
    cache, table, prompt = runner.prefill(head, steps)
    runner.backend.check_finite(cache)
    _, dense, _, _, _ = runner.decode(cache, table, prompt, tail, steps, prompt.logits)
    found = {}
    for name, config in arms.items():
        cache, table = runner.arm(prompt, config, steps)
        _, got, _, read, full = runner.decode(cache, table, prompt, tail, steps, prompt.logits)
        found[name] = (kl_divergence(dense, got), dense.argmax(-1) == got.argmax(-1), read, full)
    return found


def _read_text(path: Path | None) -> bytes:
    if path is None:
        try:
            return corpus(held_out=True)
        except FileNotFoundError as error:
            raise ConfigError(f"{error}".replace("--prompt-file", "--text")) from error
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"text file {path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"text file {path} is not UTF-8 at byte {error.start}: convert it") from error
    return text


def _questions(request: MeasureRequest, spec: ModelSpec, text: bytes, encoder: Encoder) -> list[list[Question]]:
    """The questions of every task and context, then of every benchmark file; datasets of one file are apart."""
    found = []
    for context in request.contexts:
        if context + request.text_steps > spec.max_context:
            raise ConfigError(
                f"context {context} and {request.text_steps} text-steps exceed the model's context of "
                f"{spec.max_context} tokens: lower --context"
            )
        found += [
            generated_questions(task, context, request.samples, request.seed, text, encoder) for task in request.tasks
        ]
    files = [benchmarks.load_longbench(path, request.longbench_prompts) for path in request.longbench]
    for samples in [*files, *map(benchmarks.load_ruler, request.ruler)]:
        for task in dict.fromkeys(sample.task for sample in samples):
            chosen = [sample for sample in samples if sample.task == task][: request.samples]
            found.append([benchmark_question(sample, encoder, spec.max_context) for sample in chosen])
    return found


def measure(request: MeasureRequest, out: TextIO) -> dict[str, Any]:
    """Runs everything, prints the table to `out` and returns it as a record; the JSONL appears whole or not at all.

    Everything that can be refused is refused before the weights are loaded.
    """
    check_tasks(request.tasks)
    if request.out is not None:
        check_writable(request.out, "output file")
    model = request.model or DEMO_MODEL
    spec = read_spec(model)
    encoder = Encoder(model, spec)
    text = _read_text(request.text) if request.tasks or request.text_steps else b""
    groups = _questions(request, spec, text, encoder)
    windows = {}
    if request.text_steps:
        for context in request.contexts:
            rngs = [np.random.default_rng([request.seed, 1, index]) for index in range(request.samples)]
            windows[context] = [text_window(text, encoder, context + request.text_steps, rng) for rng in rngs]
    backend = load_backend(request.backend)
    device = choose_device(backend, request.device)
    dtype = "float32" if device == "cpu" else spec.stored_dtype
    runner = Runner(backend, load_decoder(backend, model, spec, dtype, device), device)
    name = "demo" if request.model is None else str(request.model)
    run = run_line(
        request.config,
        CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 1, "bfloat16"),
        backend_name(backend),
        device,
        name,
        backend.versions(),
        compute_dtype=dtype,
        request=_plain(request),
    )
    arms = request.arms()
    with (
        open(os.devnull, "w") if request.out is None else replacing(request.out) as lines,
        terminal.Progress("evaluate:", "parts") as progress,
    ):
        lines.write(to_json(run) + "\n")
        tasks, texts = [], []
        for done, questions in enumerate(groups):
            progress(done, len(groups) + len(windows), questions[0].sample.task)
            answers = []
            for question in questions:
                answers.append(ask(runner, encoder, question, arms))
                lines.write(to_json(_sample_line(question, answers[-1])) + "\n")
            tasks.append(quality.task_result(questions, answers, request.seed))
            lines.write(to_json({"type": "task", **asdict(tasks[-1])}) + "\n")
        for done, (context, documents) in enumerate(windows.items(), start=len(groups)):
            progress(done, len(groups) + len(windows), f"text at {context:,} tokens")
            followed = [follow_text(runner, tokens, request.text_steps, arms) for tokens in documents]
            texts.append(quality.text_result(context, request.text_steps, followed, request.seed))
            lines.write(to_json({"type": "text", **asdict(texts[-1])}) + "\n")
    out.write(quality.table(tasks, texts, out) + "\n")
    return {
        "model": name,
        "backend": backend_name(backend),
        "device": device,
        "method": request.config.store.method,
        "policy": request.config.read.policy,
        "group_tokens": request.config.store.S,
        "tasks": [asdict(result) for result in tasks],
        "text": [asdict(result) for result in texts],
        "out": None if request.out is None else str(request.out),
    }


def _plain(request: MeasureRequest) -> dict[str, Any]:
    """What was asked for, paths as strings; the config has its own key in a run line."""
    fields = {key: value for key, value in asdict(request).items() if key != "config"}
    for key in ("longbench", "ruler"):
        fields[key] = [str(path) for path in fields[key]]
    return {key: str(value) if isinstance(value, Path) else value for key, value in fields.items()}


def _sample_line(question: Question, answers: dict[str, Answer]) -> dict[str, Any]:
    sample = question.sample
    return {
        "type": "sample",
        "task": sample.task,
        "source": sample.source,
        "context_tokens": question.context_tokens,
        "prompt_tokens": len(question.tokens),
        "truncated": question.truncated,
        "depth": sample.depth,
        "answers": sample.answers,
        **{name: asdict(answer) for name, answer in answers.items()},
    }
