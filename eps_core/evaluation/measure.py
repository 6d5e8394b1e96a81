"""The cost of EPS in quality: tasks, benchmark files and plain text, answered densely, with EPS and by an oracle.

A stopped measurement goes on where it was: every answered sample and every followed text is a line of its file.
Prompts are given to the model as they are, or with `chat` as a user's message in its chat template. Decoding is greedy.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.heads import model_fingerprint
from eps_core.decode.session import Session
from eps_core.errors import ConfigError, fault_line, require
from eps_core.evaluation import quality
from eps_core.evaluation.quality import Answer, Followed
from eps_core.evaluation.runner import DENSE, UNVERIFIED, Document, run_document, usual_context
from eps_core.io.outputs import Output
from eps_core.io.resumable import Line, ResumableFile
from eps_core.metrics import terminal
from eps_core.metrics.provenance import run_line
from eps_core.models.chat import in_chat
from eps_core.tasks import benchmarks
from eps_core.tasks.corpus import corpus_or_text
from eps_core.tasks.questions import Question, benchmark_question, generated_questions, text_window
from eps_core.tasks.ruler import check_tasks
from eps_core.tasks.sizing import Encode, bytes_per_token

# what selects and what is always selected; how a group is summarised means nothing to an oracle, nor does strictness,
# which needs bounds
_SHARED_WITH_ORACLE = (
    "policy", "budget", "budget_floor", "epsilon", "alpha", "top_pages", "num_sink_tokens", "num_recent_tokens",
    "scope", "head_modes", "min_context", "block_size",
)  # fmt: skip

# what two runs must share for one to go on with the other's samples; `asked` is of numbers, `questions_sha256` and
# `text_sha256` of all that is read
IDENTITY = (
    "config", "cache", "model", "model_id", "backend", "device", "compute_dtype", "asked", "text_sha256",
    "questions_sha256", "verify", "oracle_config",
)  # fmt: skip
_ASKED = ("tasks", "contexts", "samples", "text_steps", "oracle", "seed")  # and `chat`, where it is asked for


@dataclass(frozen=True)
class MeasureRequest:
    """Settings that the command line asked for. `model` None is the demo model, `text` None the shipped corpus."""

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
    verify: SpeculativeConfig = UNVERIFIED  # of the answers of the EPS variant
    chat: bool = False  # prompts of tasks are messages in the model's chat template

    def __post_init__(self) -> None:
        self.verify.check(self.config, 0.0)
        if self.verify.enabled and self.text_steps:
            raise ConfigError(
                f"text-steps {self.text_steps} measures how far EPS moves a text, and eps-verify moves none: use 0"
            )

    def variants(self) -> dict[str, EpsConfig]:
        """The oracle has the same budget and group size, and the true masses in place of estimates."""
        variants = {"eps": self.config}
        if self.oracle:
            flat = self.config.to_dict()
            shared = {name: flat[name] for name in _SHARED_WITH_ORACLE}
            variants["oracle"] = EpsConfig.of(method="oracle", group_size=self.config.cache_config.S, **shared)
        return variants


def ask(
    session: Session, question: Question, variants: dict[str, EpsConfig], verify: SpeculativeConfig, **more: Any
) -> dict[str, Answer]:
    """Every variant's answer to one question, `dense` first; that of `eps` verified where `verify` says so. `more`
    goes to `run_document`."""
    document = Document(question.tokens, question.max_new_tokens, stop=session.spec.eos_token_ids)
    answers = {}
    for name, outcome in run_document(session, document, variants, verifies={"eps": verify}, **more).items():
        text = session.decode(outcome.said[0])
        answers[name] = Answer(text, benchmarks.score(question.sample, text), *outcome.bytes_read())
    return answers


def follow_text(
    session: Session, tokens: list[int], steps: int, variants: dict[str, EpsConfig], **more: Any
) -> dict[str, Followed]:
    """Return each variant's outcome, fed the text's own last `steps` tokens one by one, as a prefill would be dense."""
    outcomes = run_document(session, Document.along(tokens, steps), variants, **more)
    del outcomes[DENSE]
    return {name: Followed(*one.along_text(), *one.bytes_read()) for name, one in outcomes.items()}


def _questions(request: MeasureRequest, session: Session, text: bytes) -> list[list[Question]]:
    """The questions of every task and context, then of every benchmark file; datasets of one file are apart."""
    found, spec = [], session.spec
    ask = in_chat(session.path, session.encode) if request.chat else None
    for context in request.contexts:
        if context + request.text_steps > spec.max_context:
            raise ConfigError(
                f"context {context} and {request.text_steps} text-steps exceed the model's context of "
                f"{spec.max_context} tokens{spec.context_note}: lower --context"
            )
        found += [
            generated_questions(task, context, request.samples, request.seed, text, session.encode, ask)
            for task in request.tasks
        ]
    most = request.samples
    files = [benchmarks.load_longbench(path, request.longbench_prompts, most) for path in request.longbench]
    for samples in [*files, *(benchmarks.load_ruler(path, most) for path in request.ruler)]:
        for task in dict.fromkeys(sample.task for sample in samples):
            chosen = [sample for sample in samples if sample.task == task]
            found.append([benchmark_question(sample, session.encode, spec.max_context, ask) for sample in chosen])
    return found


def measure(request: MeasureRequest, out: TextIO) -> dict[str, Any]:
    """Runs everything, prints the table to `out` and returns it as a record. The file grows by a line a sample, and one
    of the same measurement is continued.

    Everything that can be refused is refused before the weights are loaded.
    """
    check_tasks(request.tasks)
    with Output(request.out or Path(os.devnull)) as output:
        return _measure(request, output, out)


def _measure(request: MeasureRequest, output: Output, out: TextIO) -> dict[str, Any]:
    session = Session.open(request.model, request.backend, request.device, kv_dtype="bfloat16", config=request.config)
    spec = session.spec
    text = corpus_or_text(request.text).encode() if request.tasks or request.text_steps else b""
    request = replace(
        request, contexts=request.contexts or (usual_context(spec, request.text_steps),),
        config=request.config.for_device(session.device),
    )  # fmt: skip
    groups = _questions(request, session, text)
    windows = {}
    if request.text_steps:
        for context in request.contexts:
            rngs = [np.random.default_rng([request.seed, 1, index]) for index in range(request.samples)]
            drawn = [text_window(text, session.encode, context + request.text_steps, rng) for rng in rngs]
            windows[context] = list(map(list, dict.fromkeys(map(tuple, drawn))))  # a repeated one says nothing more
            out.write(_overlap(context, request, len(windows[context]), text, session.encode))
    files = (*request.longbench, *request.ruler, request.longbench_prompts, request.text)
    variants = request.variants()
    run = run_line(
        request.config,
        session.one_unit(),
        session.backend_name,
        session.device,
        session.model,
        session.backend.versions(),
        compute_dtype=session.dtype,
        model_id=model_fingerprint(session.path),
        text_sha256=hashlib.sha256(text).hexdigest() if text else None,
        questions_sha256=_questions_sha256(groups),
        asked={name: getattr(request, name) for name in _ASKED} | ({"chat": True} if request.chat else {}),
        oracle_config=variants["oracle"].to_dict() if request.oracle else None,
        verify=request.verify.to_dict() if request.verify.enabled else None,
        files=[str(path) for path in files if path is not None],
    )
    file = ResumableFile(output, {"type": "run", "kind": "evaluate", **run}, IDENTITY)
    num_samples, num_documents = sum(map(len, groups)), sum(map(len, windows.values()))
    samples, documents = file.indexed("sample", num_samples), file.indexed("document", num_documents)
    resumed = len(samples) + len(documents)
    if resumed < num_samples + num_documents:
        session.load(request.verify)
    with file, terminal.Progress("evaluate:", "samples") as progress:

        def found(
            line: Line, names: Iterable[str], kind: type, what: str, work: Callable[..., Mapping[str, Any]]
        ) -> Any:
            """{variant: Answer or Followed, the `kind`} of a sample or document: of its line in the file, else of the
            work that is done now, and kept."""
            there, index = samples if kind is Answer else documents, line["index"]
            asked = there.get(index, line).get("context_tokens") == line["context_tokens"]
            require(asked, f"{what} is another one in {request.out}: write to a new file")
            if index not in there:
                tell = partial(progress, len(samples) + len(documents), num_samples + num_documents)
                tell(what)
                try:
                    did = work(
                        report=lambda done, total: tell(f"{what}: {done:,} of {total:,} tokens of its prompt"),
                        on_record=lambda record: tell(f"{what}: decoding"),
                    )
                except (MemoryError, RuntimeError) as error:
                    kept = "" if request.out is None else f"; {request.out} keeps what was found: start again to go on"
                    raise ConfigError(f"{what} failed ({fault_line(error)}){kept}") from error
                there[index] = {**line, **{variant: asdict(one) for variant, one in did.items()}}
                file.write(there[index])
            try:
                return {name: kind(**there[index][name]) for name in names}
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{output.path} is damaged at {line['type']} {index}: give another -o") from error

        work: Callable[..., Mapping[str, Any]]
        tasks, texts, indices = [], [], count()
        for questions in groups:
            answers = []
            for question in questions:
                line = _sample_line(next(indices), question)
                work = partial(ask, session, question, variants, request.verify)
                answers.append(found(line, (DENSE, *variants), Answer, question.sample.task, work))
            tasks.append(quality.task_result(questions, answers, request.seed))
            file.write_once({"type": "task", **asdict(tasks[-1])})
        indices = count()
        for context, of_context in windows.items():
            followed = []
            for tokens in of_context:
                line = {"type": "document", "index": next(indices), "context_tokens": context}
                work = partial(follow_text, session, tokens, request.text_steps, variants)
                followed.append(found(line, variants, Followed, f"text at {context:,} tokens", work))
            texts.append(quality.text_result(context, request.text_steps, followed, request.seed))
            file.write_once({"type": "text", **asdict(texts[-1])})
    out.write(quality.table(tasks, texts, out) + "\n")
    return {
        "model": session.model,
        "backend": session.backend_name,
        "device": session.device,
        "method": request.config.cache_config.method,
        "policy": request.config.selection_config.policy,
        "group_size": request.config.cache_config.S,
        "verify": request.verify.to_dict() if request.verify.enabled else None,
        "resumed": resumed,
        "tasks": [asdict(result) for result in tasks],
        "text": [asdict(result) for result in texts],
        "out": None if request.out is None else str(request.out),
    }


def _overlap(context: int, request: MeasureRequest, num_windows: int, text: bytes, encode: Encode) -> str:
    """A line where windows of the text are no independent documents: drawn twice, or more than it has room for."""
    size = int(num_windows * (context + request.text_steps) * bytes_per_token(text, encode))
    if num_windows < request.samples:
        fault = f"{num_windows} of {request.samples} windows differ, and only these count"
    elif size > len(text):
        fault = f"{num_windows} windows, about {size:,} bytes, overlap in a text of {len(text):,}"
    else:
        return ""
    return f"note    text at {context:,} tokens: {fault}: give a longer --text or fewer --samples\n"


def _questions_sha256(groups: list[list[Question]]) -> str:
    """Return the hash of all that is asked and how it is scored."""
    asked = [[one.tokens, one.max_new_tokens, *astuple(replace(one.sample, prompt=""))] for g in groups for one in g]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _sample_line(index: int, question: Question) -> Line:
    sample = question.sample
    return {
        "type": "sample",
        "index": index,
        "task": sample.task,
        "source": sample.source,
        "context_tokens": question.context_tokens,
        "prompt_tokens": len(question.tokens),
        "truncated": question.truncated,
        "depth": sample.depth,
        "answers": sample.answers,
    }
