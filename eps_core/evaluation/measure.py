"""What EPS costs in quality: tasks, benchmark files and plain text, answered densely, with EPS and by an oracle.

Prompts are given to the model as they are, without a chat template. Decoding is greedy.
"""

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.store import CacheSpec
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation import quality
from eps_core.evaluation.quality import Answer
from eps_core.evaluation.runner import DENSE, Document, run_document, usual_context
from eps_core.files.outputs import check_writable, replacing, to_json
from eps_core.tasks import benchmarks
from eps_core.tasks.corpus import corpus
from eps_core.tasks.questions import Question, benchmark_question, generated_questions, text_window
from eps_core.tasks.ruler import check_tasks
from eps_core.telemetry import terminal
from eps_core.telemetry.provenance import run_line

# what selects and what is always visited; how a group is summarised means nothing to an oracle, nor does strictness,
# which needs bounds
_SHARED_WITH_ORACLE = (
    "policy", "budget", "tau", "epsilon", "alpha", "top_pages", "first_tokens", "last_tokens", "scope", "head_modes",
    "min_context", "block_size",
)  # fmt: skip


@dataclass(frozen=True)
class MeasureRequest:
    """What the command line asked for. `model` None is the demo model, `text` None the shipped corpus."""

    config: EpsConfig
    tasks: tuple[str, ...] = ()
    contexts: tuple[int, ...] = ()  # none: see `usual_context`
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
            shared = {name: flat[name] for name in _SHARED_WITH_ORACLE}
            arms["oracle"] = EpsConfig.of(method="oracle", group_tokens=self.config.store.S, **shared)
        return arms


def ask(session: Session, question: Question, arms: dict[str, EpsConfig]) -> dict[str, Answer]:
    """Every arm's answer to one question, `dense` first."""
    document = Document(question.tokens, question.max_new_tokens, stop=session.spec.eos_token_ids)
    answers = {}
    for name, outcome in run_document(session, document, arms).items():
        text = session.decode(outcome.said[0])
        answers[name] = Answer(text, benchmarks.score(question.sample, text), *outcome.bytes_read())
    return answers


def follow_text(
    session: Session, tokens: list[int], steps: int, arms: dict[str, EpsConfig]
) -> dict[str, tuple[np.ndarray, np.ndarray, int, int]]:
    """Each arm's (KL in nats [steps], whether the likeliest token is dense's [steps], bytes read, dense bytes), all
    fed the text's own last `steps` tokens one by one. A teacher-forced prefill would not exercise the gate."""
    outcomes = run_document(session, Document.along(tokens, steps), arms)
    del outcomes[DENSE]
    found = {}
    for name, outcome in outcomes.items():
        assert outcome.kl is not None and outcome.agree is not None
        found[name] = (outcome.kl[:, 0], outcome.agree[:, 0], *outcome.bytes_read())
    return found


def _read_text(path: Path | None) -> bytes:
    if path is None:
        return corpus()
    try:
        text = path.read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"text file {path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"text file {path} is not UTF-8 at byte {error.start}: convert it") from error
    return text


def _questions(request: MeasureRequest, session: Session, text: bytes) -> list[list[Question]]:
    """The questions of every task and context, then of every benchmark file; datasets of one file are apart."""
    found, spec = [], session.spec
    for context in request.contexts:
        if context + request.text_steps > spec.max_context:
            raise ConfigError(
                f"context {context} and {request.text_steps} text-steps exceed the model's context of "
                f"{spec.max_context} tokens: lower --context"
            )
        found += [
            generated_questions(task, context, request.samples, request.seed, text, session.encode)
            for task in request.tasks
        ]
    files = [benchmarks.load_longbench(path, request.longbench_prompts) for path in request.longbench]
    for samples in [*files, *map(benchmarks.load_ruler, request.ruler)]:
        for task in dict.fromkeys(sample.task for sample in samples):
            chosen = [sample for sample in samples if sample.task == task][: request.samples]
            found.append([benchmark_question(sample, session.encode, spec.max_context) for sample in chosen])
    return found


def measure(request: MeasureRequest, out: TextIO) -> dict[str, Any]:
    """Runs everything, prints the table to `out` and returns it as a record; the JSONL appears whole or not at all.

    Everything that can be refused is refused before the weights are loaded.
    """
    check_tasks(request.tasks)
    if request.out is not None:
        check_writable(request.out, "output file")
    session = Session.open(request.model, request.backend, request.device, kv_dtype="bfloat16")
    spec = session.spec
    request = replace(request, contexts=request.contexts or (usual_context(spec, request.text_steps),))
    text = _read_text(request.text) if request.tasks or request.text_steps else b""
    groups = _questions(request, session, text)
    windows = {}
    if request.text_steps:
        for context in request.contexts:
            rngs = [np.random.default_rng([request.seed, 1, index]) for index in range(request.samples)]
            windows[context] = [text_window(text, session.encode, context + request.text_steps, rng) for rng in rngs]
    run = run_line(
        request.config,
        CacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 1, session.kv_dtype),
        session.backend_name,
        session.device,
        session.model,
        session.backend.versions(),
        compute_dtype=session.dtype,
        text_sha256=hashlib.sha256(text).hexdigest() if text else None,
        request=_plain(request),
    )
    session.load()
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
                answers.append(ask(session, question, arms))
                lines.write(to_json(_sample_line(question, answers[-1])) + "\n")
            tasks.append(quality.task_result(questions, answers, request.seed))
            lines.write(to_json({"type": "task", **asdict(tasks[-1])}) + "\n")
        for done, (context, documents) in enumerate(windows.items(), start=len(groups)):
            progress(done, len(groups) + len(windows), f"text at {context:,} tokens")
            followed = [follow_text(session, tokens, request.text_steps, arms) for tokens in documents]
            texts.append(quality.text_result(context, request.text_steps, followed, request.seed))
            lines.write(to_json({"type": "text", **asdict(texts[-1])}) + "\n")
    out.write(quality.table(tasks, texts, out) + "\n")
    return {
        "model": session.model,
        "backend": session.backend_name,
        "device": session.device,
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
