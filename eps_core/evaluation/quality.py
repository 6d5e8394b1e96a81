"""Totals of the variants' answers and distributions, with the intervals that say how far to trust them."""

from dataclasses import dataclass
from typing import TextIO

import numpy as np

from eps_core.evaluation import statistics
from eps_core.metrics import terminal
from eps_core.tasks.questions import Question

# a mean score below this is dense failure: no loss can be seen where there is nothing to lose
MIN_DENSE_SCORE = 0.1

MOST_BYTES, MOST_NATS = 2**63, 1e6  # of one answer or text, whatever the model: more is a damaged file

Interval = tuple[float, float] | None


@dataclass
class Answer:
    """The answer of one variant to one question."""

    text: str
    score: float
    bytes_read: int
    bytes_dense: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what a damaged file may hold."""
        self.score, self.bytes_read, self.bytes_dense = float(self.score), int(self.bytes_read), int(self.bytes_dense)
        if not (0 <= self.score <= 1 and 0 <= self.bytes_read < MOST_BYTES and 0 <= self.bytes_dense < MOST_BYTES):
            raise ValueError("a score outside 0 to 1, or impossible bytes")


@dataclass
class Followed:
    """One variant along one text: KL to dense in nats and whether the likeliest token was dense's, step by step."""

    kl: list[float]
    agree: list[bool]
    bytes_read: int
    bytes_dense: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for what a damaged file may hold."""
        if not (isinstance(self.kl, list) and isinstance(self.agree, list) and 0 < len(self.kl) == len(self.agree)):
            raise ValueError("kl and agree are no lists of a value a step each")
        self.kl, self.agree = list(map(float, self.kl)), list(map(bool, self.agree))
        self.bytes_read, self.bytes_dense = int(self.bytes_read), int(self.bytes_dense)
        if not all(abs(one) <= MOST_NATS for one in self.kl):
            raise ValueError("a KL that is no number")
        if not (0 <= self.bytes_read < MOST_BYTES and 0 < self.bytes_dense < MOST_BYTES):
            raise ValueError("impossible bytes")


@dataclass(frozen=True)
class TaskResult:
    """One task at one context. Scores are means, 0 to 1, over the same samples; intervals are 95 %, by bootstrap over
    samples. `*_p`: exact sign test against dense. `says_nothing`: dense itself fails the task."""

    task: str
    source: str
    context_tokens: int | None
    num_samples: int
    num_truncated: int
    dense: float
    dense_interval: Interval
    eps: float
    eps_minus_dense: float
    eps_minus_dense_interval: Interval
    eps_minus_dense_p: float
    num_changed: int  # samples whose score differs between EPS and dense, either way
    changed_share_upper: float  # 95 % Wilson limit of their share: above 0 where none of a few has changed
    oracle: float | None
    oracle_minus_dense: float | None
    oracle_minus_dense_interval: Interval
    eps_minus_oracle: float | None
    eps_minus_oracle_interval: Interval
    bytes_ratio: float | None  # K, V and summaries that EPS read over dense reads, bfloat16; None: nothing decoded
    says_nothing: bool


@dataclass(frozen=True)
class TextResult:
    """Decode along real text, token by token. `*_kl`: mean KL of the next token against dense in nats; intervals are
    95 %, by bootstrap over documents, whose tokens are not independent."""

    context_tokens: int
    num_documents: int
    text_steps: int
    eps_kl: float
    eps_kl_interval: Interval
    eps_kl_max: float
    eps_top1_agreement: float
    eps_top1_agreement_interval: Interval
    oracle_kl: float | None
    oracle_kl_interval: Interval
    oracle_top1_agreement: float | None
    bytes_ratio: float


def task_result(questions: list[Question], answers: list[dict[str, Answer]], seed: int) -> TaskResult:
    """The summary of one task's questions [N] and every variant's answers [N]."""
    scores = {name: np.array([one[name].score for one in answers]) for name in answers[0]}
    sample = questions[0].sample
    difference, interval = statistics.paired_difference(scores["eps"], scores["dense"], seed)
    changed = int((scores["eps"] != scores["dense"]).sum())
    wilson = statistics.wilson_interval(changed, len(questions))
    assert wilson is not None  # there is at least one question
    versus_dense: tuple[float | None, Interval] = (None, None)
    versus_oracle: tuple[float | None, Interval] = (None, None)
    if "oracle" in scores:
        versus_dense = statistics.paired_difference(scores["oracle"], scores["dense"], seed)
        versus_oracle = statistics.paired_difference(scores["eps"], scores["oracle"], seed)
    read, full = (sum(getattr(one["eps"], name) for one in answers) for name in ("bytes_read", "bytes_dense"))
    dense = float(scores["dense"].mean())
    return TaskResult(
        task=sample.task,
        source=sample.source,
        context_tokens=questions[0].context_tokens,
        num_samples=len(questions),
        num_truncated=sum(question.truncated for question in questions),
        dense=dense,
        dense_interval=statistics.bootstrap_interval(scores["dense"], seed),
        eps=float(scores["eps"].mean()),
        eps_minus_dense=difference,
        eps_minus_dense_interval=interval,
        eps_minus_dense_p=statistics.sign_test(scores["eps"], scores["dense"]),
        num_changed=changed,
        changed_share_upper=wilson[1],
        oracle=float(scores["oracle"].mean()) if "oracle" in scores else None,
        oracle_minus_dense=versus_dense[0],
        oracle_minus_dense_interval=versus_dense[1],
        eps_minus_oracle=versus_oracle[0],
        eps_minus_oracle_interval=versus_oracle[1],
        bytes_ratio=read / full if full else None,
        says_nothing=dense < MIN_DENSE_SCORE,
    )


def text_result(context_tokens: int, steps: int, documents: list[dict[str, Followed]], seed: int) -> TextResult:
    def means(variant: str, part: str) -> np.ndarray:
        return np.array([np.array(getattr(document[variant], part), float).mean() for document in documents])

    kl, agreement = means("eps", "kl"), means("eps", "agree")
    oracle_kl = means("oracle", "kl") if "oracle" in documents[0] else None
    return TextResult(
        context_tokens=context_tokens,
        num_documents=len(documents),
        text_steps=steps,
        eps_kl=float(kl.mean()),
        eps_kl_interval=statistics.bootstrap_interval(kl, seed),
        eps_kl_max=max(float(np.array(document["eps"].kl, float).max()) for document in documents),
        eps_top1_agreement=float(agreement.mean()),
        eps_top1_agreement_interval=statistics.bootstrap_interval(agreement, seed),
        oracle_kl=None if oracle_kl is None else float(oracle_kl.mean()),
        oracle_kl_interval=None if oracle_kl is None else statistics.bootstrap_interval(oracle_kl, seed),
        oracle_top1_agreement=None if oracle_kl is None else float(means("oracle", "agree").mean()),
        bytes_ratio=sum(document["eps"].bytes_read for document in documents)
        / sum(document["eps"].bytes_dense for document in documents),
    )


def table(tasks: list[TaskResult], texts: list[TextResult], out: TextIO | None = None) -> str:
    """Return both as a table for a person, for `out` (stdout)."""
    rows, notes = [], []
    for task in tasks:
        changed = f"{task.num_changed} (<= {task.changed_share_upper:.0%})"
        difference = _with_interval(task.eps_minus_dense, task.eps_minus_dense_interval, "+.3f")
        context = "own" if task.context_tokens is None else f"{task.context_tokens:,}"
        scores = [f"{task.dense:.3f}", f"{task.eps:.3f}", _number(task.oracle)]
        rest = ["-"] * 3 if task.says_nothing else [difference, changed, _number(task.bytes_ratio)]
        rows.append([task.task, context, str(task.num_samples), *scores, *rest])
        if task.says_nothing:
            notes.append(f"{task.task}, {context}: says nothing: dense itself fails")
        if task.num_truncated:
            notes.append(
                f"{task.task}, {context}: {task.num_truncated} of {task.num_samples} prompts lost their middle"
            )
    header = ["task", "context", "n", "dense", "EPS", "oracle", "EPS - dense (95 %)", "changed", "bytes"]
    parts = ["\n".join([terminal.table(rows, header, out), *notes])] if tasks else []
    rows = []
    for text in texts:
        shown = _with_interval(text.eps_kl, text.eps_kl_interval, ".5f")
        oracle = "-" if text.oracle_kl is None else f"{text.oracle_kl:.5f}"
        name, context = f"{text.text_steps} steps each", f"{text.context_tokens:,}"
        numbers = [shown, f"{text.eps_top1_agreement:.4f}", oracle, f"{text.bytes_ratio:.3f}"]
        rows.append([name, context, str(text.num_documents), *numbers])
    header = ["text", "context", "n", "KL, nats (95 %)", "top-1", "oracle KL", "bytes"]
    parts += [terminal.table(rows, header, out)] if texts else []
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with_interval(value: float, interval: Interval, form: str) -> str:
    return f"{value:{form}}" + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")
