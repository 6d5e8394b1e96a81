"""One `eps-proto run`: checks everything first, then decodes densely and gated in two caches, and compares them."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.store import Store
from eps_core.decode.cost import Cost, cost_of
from eps_core.decode.generate import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import Document, Outcome, decode
from eps_core.files import outputs
from eps_core.paging.pool import PagePool
from eps_core.tasks import needle
from eps_core.tasks.corpus import corpus
from eps_core.telemetry import provenance, terminal
from eps_core.telemetry.steps import AUDIT_FACTOR, StepRecord, kl_divergence, write_csv

DEMO_PROMPT_BYTES = 4095  # with the token that begins a text: 4,096 tokens
DEMO_SEED = 1


@dataclass(frozen=True)
class RunRequest:
    """What the command line asked for. `model` None is the demo model; `prompt` None is its needle document."""

    config: EpsConfig
    sampling: Sampling
    backend: str = "auto"
    device: str = "auto"
    model: Path | None = None
    prompt: str | None = None
    max_new_tokens: int = 32
    dtype: str = "auto"
    kv_dtype: str = "auto"
    prefill_chunk: int = 512
    pool_tokens: int | None = None
    baseline: bool = True
    kl: bool = False
    stop: bool = True
    method_is_default: bool = False  # for the header
    metrics: Path | None = None
    csv: Path | None = None
    audit_every: int = 0
    audit_factor: float = AUDIT_FACTOR
    audit_off: bool = False
    kernels: str = "auto"
    auto_min_context: bool = False  # measured by `prepare`, which settles the config


@dataclass
class Side:
    """One decode of the prompt, dense or gated."""

    outcome: Outcome
    text: str
    prefill_ms: float

    @property
    def tokens(self) -> list[int]:
        return [record.tokens[0] for record in self.outcome.records]

    def summary(self) -> dict[str, Any]:
        return self.outcome.summary(self.prefill_ms)


@dataclass
class Job:
    """A request whose config is settled, with its session and prompt."""

    request: RunRequest
    session: Session
    document: Document
    answer: str | None  # of the built-in needle document
    cost: Cost | None  # behind an automatic min_context

    def pool_tokens(self, store: Store) -> int:
        """Tokens of a pool that holds the prompt and its continuation, or as many as were asked for."""
        tokens, asked, unit = len(self.document.prompt), self.request.pool_tokens, store.unit_tokens
        needed = tokens + self.document.num_steps
        units = -(-needed // unit)
        if asked is None:
            return needed
        if asked // unit < units:
            raise ConfigError(
                f"a prompt of {tokens} tokens and {self.document.num_steps} new ones need {units} pool groups of "
                f"{unit} tokens, and pool-tokens {asked} holds {asked // unit}: raise it to {units * unit} or shorten "
                "the prompt"
            )
        return asked // unit * unit


def prepare(request: RunRequest) -> Job:
    """Everything that can be refused is refused here, the weights last; nothing is written."""
    if request.metrics is not None and request.csv is not None and request.metrics.resolve() == request.csv.resolve():
        raise ConfigError(f"metrics and csv are both {request.metrics}: give two paths")
    for path, what in ((request.metrics, "metrics file"), (request.csv, "csv file")):
        if path is not None:
            outputs.check_writable(path, what)
    session = Session.open(
        request.model, request.backend, request.device, request.dtype, request.kv_dtype, request.kernels, request.config
    )
    spec, text, answer = session.spec, request.prompt, None
    if text is None:
        made = demo_document()
        text, answer = made.prompt, made.answer
    prompt = session.encode(text)
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token")
    if len(prompt) + request.max_new_tokens > spec.max_context:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones exceed the model's context "
            f"of {spec.max_context} tokens: shorten the prompt or lower max-new-tokens"
        )
    document = Document(prompt, request.max_new_tokens, stop=spec.eos_token_ids if request.stop else ())
    job = Job(request, session, document, answer, None)
    pool = session.cache_spec(request.config.store, job.pool_tokens(request.config.store))
    if request.auto_min_context:
        job.cost, _ = cost_of(
            session.backend, session.device, session.kernels, pool, spec.num_heads, request.config, spec.max_context
        )
        # where gating never pays, everything that the model can hold is below the least context
        least = spec.max_context + 1 if job.cost.min_context is None else job.cost.min_context
        job.request = replace(request, config=request.config.replace(min_context=least))
    session.load()
    return job


def _describe(cost: Cost) -> str:
    rows = zip(cost.contexts, cost.dense_ms, cost.gated_ms, strict=True)
    measured = ", ".join(f"{context:,} tokens {dense:.2f} / {gated:.2f}" for context, dense, gated in rows)
    pays = "at no context" if cost.min_context is None else f"from {cost.min_context:,} tokens on"
    return f"gating pays {pays} (ms of one layer, dense / gated: {measured})"


def demo_document() -> needle.NeedleDocument:
    return needle.needle_document(corpus(), DEMO_PROMPT_BYTES, DEMO_SEED, depth=0.5, num_distractors=3)


def _decode(
    job: Job,
    name: str,
    cache: Any,
    pool: PagePool,
    on_record: Callable[[StepRecord], None] | None = None,
    forced: list[int] | None = None,
) -> tuple[Side, Any]:
    """(side, cache) of decoding the prompt; each step's record is handed over as it comes."""
    request, prefill_ms = job.request, 0.0
    started = time.perf_counter()
    progress = terminal.Progress(f"{name}: prefill", "tokens")

    def on_prefill(prompt: int, done: int, total: int) -> None:
        nonlocal prefill_ms
        progress(done, total)
        prefill_ms = 1000 * (time.perf_counter() - started)

    document = job.document
    if forced is not None:
        document = replace(document, num_steps=len(forced), forced=forced[:-1])
    with progress:
        outcome, cache = decode(
            job.session,
            cache,
            pool,
            [document],
            request.config.read,
            request.sampling,
            on_record,
            time_every=job.session.time_every,
            prefill_chunk=request.prefill_chunk,
            on_prefill=on_prefill,
            keep_logits=request.kl and name != "eps",
            audit_every=request.audit_every if name == "eps" else 0,
            audit_factor=request.audit_factor,
            audit_off=request.audit_off,
        )
    side = Side(outcome, "", prefill_ms)
    side.text = job.session.decode(side.tokens)
    return side, cache


def run(request: RunRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, writing text and table to `out` and metrics where asked. Returns the last line's object."""
    job = prepare(request)
    request, session = job.request, job.session  # its config is settled
    config, gated = request.config, request.config.store.enabled
    with ExitStack() as stack:
        metrics = None
        if request.metrics is not None:
            metrics = stack.enter_context(outputs.JsonlWriter(request.metrics))
            metrics.write(
                provenance.run_line(
                    config,
                    session.cache_spec(config.store, job.pool_tokens(config.store)),
                    session.backend_name,
                    session.device,
                    session.model,
                    session.backend.versions(),
                    dtype=session.dtype,
                    prompt_tokens=len(job.document.prompt),
                    max_new_tokens=request.max_new_tokens,
                    sampling=vars(request.sampling),
                    kernels=session.kernels,
                    kernels_fault=session.fault,
                    device_name=session.backend.device_name(session.device),
                    min_context_cost=asdict(job.cost) if job.cost else None,
                )
            )
        _print_header(job, out)
        measured = "eps" if gated else "dense"  # the side that metrics and csv speak of

        def streamed(side_name: str, store: Store) -> tuple[Side, Any, PagePool]:
            label = f"{side_name:5} > "
            text = terminal.TextStream(session.tokenizer, lambda piece: (out.write(piece), out.flush()), label)

            def on_record(record: StepRecord) -> None:
                if metrics is not None and side_name == measured:
                    metrics.write(record.to_dict())
                text.add(record.tokens[0])

            cache, pool = session.cache(store, job.pool_tokens(store))
            side, cache = _decode(job, side_name, cache, pool, on_record)
            text.flush()
            out.write("\n")
            return side, cache, pool

        dense = eps = None
        divergence: dict[str, float | None] = {}
        if request.baseline or not gated:
            dense, _, _ = streamed("dense", Store(block_size=config.store.block_size))
        if gated:
            eps, cache, pool = streamed("eps", config.store)
            if request.kl and dense is not None:
                divergence = _divergence(job, cache, pool, dense)
        result = _report(job, dense, eps, divergence, out)
        main = eps or dense
        assert main is not None
        if metrics is not None:
            metrics.write(
                {
                    "type": "summary",
                    **main.summary(),
                    "prompt_tokens": len(job.document.prompt),
                    "tokens_equal": result["tokens_equal"],
                    "dense": dense.summary() if dense is not None and eps is not None else None,
                    **divergence,
                }
            )
        if request.csv is not None:
            write_csv(request.csv, main.outcome.records)
    return result


def _print_header(job: Job, out: TextIO) -> None:
    session, spec, request = job.session, job.session.spec, job.request
    heads = f"{spec.num_heads} query / {spec.num_kv_heads} kv heads of {spec.head_dim}"
    out.write(f"model   {session.model} ({spec.family}, {spec.num_layers} layers, {heads})\n")
    cache = "" if session.kv_dtype == session.dtype else f", cache {session.kv_dtype}"
    out.write(
        f"backend {session.backend_name} on {session.device}, {session.dtype}{cache}, kernels {session.kernels}\n"
    )
    kind = "" if job.answer is None else f", a needle document whose answer is {job.answer}"
    out.write(f"prompt  {len(job.document.prompt):,} tokens{kind}\n")
    out.write(f"eps     {terminal.describe(request.config)}\n")
    if session.fault is not None:
        out.write(f"        {session.fault}: array operations instead\n")
    if job.cost is not None:
        out.write(f"        {_describe(job.cost)}\n")
    if request.method_is_default and request.config.store.enabled:
        out.write("        (the demo's default; --method off turns it off)\n")
    out.write("\n")
    out.flush()


def _divergence(job: Job, cache: Any, pool: PagePool, dense: Side) -> dict[str, float | None]:
    """KL(dense || gated) of the next-token distribution in nats, both fed the dense run's tokens through the decode.
    The prompt's pages are still in `cache`."""
    values: list[float] = []
    agree: list[bool] = []

    def on_record(record: StepRecord) -> None:
        got, want = record.logits, dense.outcome.records[record.step].logits
        assert got is not None and want is not None
        values.append(max(float(kl_divergence(want, got)[0]), 0.0))
        agree.append(bool(np.argmax(got[0]) == np.argmax(want[0])))
        record.logits = None  # a vocabulary a step: not to be held for the whole run

    _decode(job, "kl", cache, pool, on_record, forced=dense.tokens)
    return {
        "kl_mean": float(np.mean(values)) if values else None,
        "kl_max": max(values, default=None),
        "top1_agreement": float(np.mean(agree)) if agree else None,
    }


def _report(
    job: Job, dense: Side | None, eps: Side | None, divergence: dict[str, float | None], out: TextIO
) -> dict[str, Any]:
    session, main = job.session, eps or dense
    assert main is not None
    equal = eps.tokens == dense.tokens if eps is not None and dense is not None else None
    checks: list[tuple[str, str | None, str | None]] = []
    if job.answer is not None:
        answered = [_yes(side.text.startswith(job.answer)) if side else None for side in (dense, eps)]
        checks.append(("needle answered", answered[0], answered[1]))
    if equal is not None:
        checks.append(("tokens equal to dense", None, _yes(equal)))
    checks += [
        (name.replace("_", " "), None, f"{value:.5f}") for name, value in divergence.items() if value is not None
    ]
    dense_summary, eps_summary = dense.summary() if dense else None, eps.summary() if eps else None
    out.write("\n" + terminal.run_table(dense_summary, eps_summary, checks, out) + "\n")
    return {
        "backend": session.backend_name,
        "device": session.device,
        "kernels": session.kernels,
        "kernels_fault": session.fault,
        "model": session.model,
        "prompt_tokens": len(job.document.prompt),
        "new_tokens": len(main.tokens),
        "text": main.text,
        "tokens": main.tokens,
        "tokens_equal": equal,
        "bytes_ratio": eps_summary["bytes_ratio"] if eps_summary else None,
        "dense": terminal.dense_json(dense.tokens, dense_summary) if dense and dense_summary else None,
        "eps": terminal.eps_json(eps.tokens, eps_summary, job.request.config) if eps and eps_summary else None,
        **divergence,
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
