"""One `eps-proto run`: checks everything first, prefills once, decodes densely and sparse from there, and compares."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import EXACT, described
from eps_core.decode.cost import Cost, cost_of
from eps_core.decode.forward import Decoder
from eps_core.decode.generate import tokens_of
from eps_core.decode.prompts import prompt_texts
from eps_core.decode.session import Session
from eps_core.decode.stored import check as check_stored
from eps_core.errors import require
from eps_core.evaluation.codes_error import codes_error
from eps_core.evaluation.evicted import EvictedCaches
from eps_core.evaluation.outcomes import Ran, prompt_line, report, summary_line
from eps_core.evaluation.pays import timing
from eps_core.evaluation.prefilled import Caches, Job, Prefilled, prefilled
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import UNVERIFIED, Document, Outcome, decode
from eps_core.evaluation.trace import Reads, Trace, texts_of
from eps_core.io import outputs
from eps_core.metrics import provenance, terminal
from eps_core.metrics.rounds import ROUND_KEYS, RoundRecord
from eps_core.metrics.steps import STEP_KEYS, StepRecord, kl_divergence, write_csv
from eps_core.tasks import needle
from eps_core.tasks.corpus import corpus

DEMO_PROMPT_BYTES = 4095  # with the token that begins a text: 4,096 tokens
DEMO_SEED = 1
WARM_UP_TOKENS = 64


def prepare(request: RunRequest) -> Job:
    """Everything that can be refused is refused here, the weights last; nothing is written."""
    request.check()
    # eviction policies are defined over the model's own keys
    config = EpsConfig() if request.keep.enabled else request.config
    session = Session.open(
        request.model, request.backend, request.device, request.dtype, request.kv_dtype, request.kernels, config,
        kv_bits=request.kv_bits, cache_dir=request.cache_dir, weights=request.weights,
    )  # fmt: skip
    request = replace(request, config=request.config.for_device(session.device))
    spec = session.spec
    texts, answer = texts_and_answer(request, spec.max_context)
    prompts = session.encode_prompts(texts, request.max_new_tokens, request.chat)
    require(request.plot is None or len(prompts) == 1, f"--plot draws one prompt (got {len(prompts)}): give one")
    stop = spec.eos_token_ids if request.stop else ()
    own = request.own_dense
    dense = session if own == session.kv_bits else replace(session, kv_bits=own, checked=set())
    documents = [Document(prompt, request.max_new_tokens, stop=stop) for prompt in prompts]
    caches = EvictedCaches() if request.keep.enabled else Caches()
    job = Job(request, session, dense, documents, answer, caches)
    if request.cache_dir is not None:
        check_stored(request.config.cache_config, len(prompts))
    pool = session.cache_spec(*job.room(request.config.cache_config))
    # the one that takes most kernels first: two processes compile them
    session.check_kernels(request.config.cache_config, request.verify.enabled)
    dense.check_kernels(job.dense_store, request.verify.enabled)
    if request.auto_min_context:
        job.cost, _ = cost_of(
            session.backend, session.device, session.kernels, pool, spec.num_heads, request.config, spec.max_context,
            not spec.windowed,
        )  # fmt: skip
        # where sparse attention never pays, everything that the model can hold is below the least context
        least = spec.max_context + 1 if job.cost.min_context is None else job.cost.min_context
        job.request = replace(request, config=request.config.replace(min_context=least))
    session.load(request.verify)
    if request.kv_bits != EXACT:
        job.codes = codes_error(session, prompts[0])
    _warm_up(job)
    return job


def _warm_up(job: Job) -> None:
    """Takes the model's first steps, which set the array library up, before anything is timed."""
    session, tokens = job.session, job.documents[0].prompt[:WARM_UP_TOKENS]
    cache, pool = session.cache(CacheConfig(), len(tokens) + 2)
    decode(session, cache, pool, [Document(tokens, 2)], None)


def _describe(cost: Cost) -> str:
    rows = zip(cost.contexts, cost.dense_ms, cost.sparse_ms, strict=True)
    measured = ", ".join(f"{context:,} tokens {dense:.2f} / {sparse:.2f}" for context, dense, sparse in rows)
    pays = "at no context" if cost.min_context is None else f"from {cost.min_context:,} tokens on"
    return f"sparse attention pays {pays} (ms of one layer, dense / sparse: {measured})"


def demo_document() -> needle.NeedleDocument:
    return needle.needle_document(corpus(), DEMO_PROMPT_BYTES, DEMO_SEED, depth=0.5, num_distractors=3)


def texts_and_answer(request: RunRequest, max_context: int) -> tuple[list[str], str | None]:
    """(the prompts' texts, None); without prompts the built-in needle document and its answer."""
    if not request.prompts:
        made = demo_document()
        return [made.prompt], made.answer
    return [text for one in request.prompts for text in prompt_texts(one, max_context, request.keep_newline)], None


def _decode(
    job: Job,
    name: str,
    filled: Prefilled,
    on_record: Callable[[Any], None] | None = None,
    forced: list[list[int]] | None = None,
    decoder: Decoder | None = None,
) -> Outcome:
    """One side's decode of the prompts; each step's record is handed over as it comes. What it wrote is taken back."""
    request, held, documents = job.request, filled[name], job.documents
    ttft_ms: float | None = None
    started = time.perf_counter()
    if forced is not None:
        documents = [
            replace(one, num_steps=len(tokens), forced=tokens[:-1])
            for one, tokens in zip(documents, forced, strict=True)
        ]

    def first_of(record: StepRecord | RoundRecord) -> None:
        nonlocal ttft_ms
        ttft_ms = held.ms + 1000 * (time.perf_counter() - started) if ttft_ms is None else ttft_ms
        if on_record is not None:
            on_record(record)

    outcome, held.cache = decode(
        job.session,
        held.cache,
        held.pool,
        documents,
        request.config.selection_config,
        request.sampling,
        first_of,
        time_every=job.session.time_every,
        decoder=decoder or held.decoder,
        written=held.written,
        keep_logits=request.kl and name != "eps",
        audit_every=request.audit_every if name == "eps" else 0,
        audit_factor=request.audit_factor,
        audit_off=request.audit_off,
        verify=request.verify if name == "eps" else UNVERIFIED,
    )
    held.rewind(documents)
    outcome.tokens = tokens_of(outcome.rounds or outcome.records, len(documents))
    outcome.texts = [job.session.decode(one) for one in outcome.tokens]
    outcome.prefill_ms = held.ms
    outcome.stored = None if held.stored is None else {"ttft_ms": ttft_ms}
    return outcome


class Display:
    """The lines that a run writes before and after the text. `report` returns the object of the last line."""

    def header(self, job: Job, out: TextIO) -> None:
        session, spec, request = job.session, job.session.spec, job.request
        heads = f"{spec.num_heads} query / {spec.num_kv_heads} kv heads of {spec.head_dim}"
        out.write(f"model   {session.model} ({spec.family}, {spec.num_layers} layers, {heads})\n")
        for note in spec.notes:
            out.write(f"note    {note}\n")
        held = described(session.kv_dtype, session.kv_bits)
        cache = "" if held == session.dtype else f", cache {held}"
        weights = "" if session.weights == "full" else f", {session.weights} weights in decode steps"
        out.write(
            f"backend {session.backend_name} on {session.device}, {session.dtype}{weights}{cache}, kernels "
            f"{session.kernels}\n"
        )
        if job.codes is not None:
            out.write(f"codes   {job.codes.line(session.kv_dtype)}\n")
        out.write(prompt_line(job.prompt_lengths, job.answer))
        out.write(f"eps     {terminal.describe(request.config)}\n")
        longest = request.keep.most_rows(max(job.prompt_lengths) - 1, job.num_new)
        if request.config.cache_config.enabled and request.config.reads_all(0, [longest]):
            out.write(f"note    every step is dense: the budget covers all of up to {longest:,} tokens\n")
        out.write(job.caches.header(job))
        if request.verify.enabled:
            out.write(f"verify  {terminal.describe_verify(request.verify)}\n")
        if job.cost is not None:
            out.write(f"        {_describe(job.cost)}\n")
        if request.method_is_default and request.config.cache_config.enabled:
            out.write("        (the demo's default; --method off turns it off)\n")
        out.write("\n")
        out.flush()

    def report(self, *args: Any, **more: Any) -> dict[str, Any]:
        """See `outcomes.report`."""
        return report(*args, **more)


def run(request: RunRequest, out: TextIO, display: Display | None = None) -> dict[str, Any]:
    """Runs a request, writing text and table to `out` and metrics where asked. Returns the last line's object."""
    display = display or Display()
    with ExitStack() as stack:
        lines, csv = request.outputs(stack)
        job = prepare(request)
        request, session = job.request, job.session  # its config is settled
        config, changes = request.config, request.changes
        metrics = None
        if lines is not None:
            metrics = stack.enter_context(outputs.JsonlWriter(lines))
            metrics.write(
                provenance.run_line(
                    config,
                    job.caches.spec(job),
                    session.backend_name,
                    session.device,
                    session.model,
                    session.backend.versions(),
                    dtype=session.dtype,
                    weights=session.weights,
                    prompt_tokens=sum(job.prompt_lengths),
                    max_new_tokens=request.max_new_tokens,
                    sampling=vars(request.sampling),
                    kernels=session.kernels,
                    kernels_fault=session.fault,
                    device_name=session.backend.device_name(session.device),
                    min_context_cost=asdict(job.cost) if job.cost else None,
                    verify=request.verify.to_dict() if request.verify.enabled else None,
                    keep=request.keep.to_dict() if request.keep.enabled else None,
                )
            )
        display.header(job, out)
        measured = "eps" if changes else "dense"  # the side that metrics and csv speak of
        # texts of several prompts, or a text and metrics on the same stream, would come mixed: shown at the end
        streams = len(job.documents) == 1 and not (lines is not None and lines.is_stdout)
        reads = None if request.plot is None else Reads(session, job.prompt_lengths[0])

        def streamed(outcome_name: str) -> Outcome:
            name = job.labels[outcome_name].lower()
            text = terminal.Answer(session.tokenizer, out, f"{name:5} > ")
            progress = terminal.Progress(f"{name}: decode", "tokens")
            counts = outcome_name == "eps"
            decoder = None if reads is None else reads.decoder(counts)
            num_said = 0

            def on_record(record: StepRecord | RoundRecord) -> None:
                nonlocal num_said
                if metrics is not None and outcome_name == measured:
                    metrics.write(record.to_dict())
                if reads is not None and counts and isinstance(record, StepRecord):
                    reads.add(record)
                num_said += len(record.tokens)
                if streams:
                    text.add(record.tokens, record.bytes_read)
                else:
                    progress(num_said, request.max_new_tokens * len(job.documents))

            with text if streams else progress:
                side = _decode(job, outcome_name, filled, on_record, decoder=decoder)
            if not streams:
                out.writelines(f"{name:5} {i} > {said}\n" for i, said in enumerate(side.texts, start=1))
                out.flush()
            return side

        dense = eps = None
        divergence = Divergence()
        filled = prefilled(job)
        if request.baseline or not changes:
            dense = streamed("dense")
        if changes:
            if dense is not None and filled["dense"].pool is not filled["eps"].pool:
                del filled["dense"]  # a cache of its own
            eps = streamed("eps")
            if request.kl and dense is not None:
                divergence = _divergence(job, filled, dense)
        held = filled[measured]
        if held.stored is not None:
            held.stored.save(held.cache, held.pool, [one.prompt for one in job.documents])
            for side in (dense, eps):
                if side is not None and side.stored is not None:
                    side.stored = {**asdict(held.stored.counts), **side.stored}
        main = eps or dense
        assert main is not None
        if metrics is not None:
            stored = {} if main.stored is None else {"stored": main.stored}
            metrics.write(summary_line(job.prompt_lengths, dense, eps, {**divergence.summary(), **stored}))
        if csv is not None:
            write_csv(csv, main.rounds or main.records, ROUND_KEYS if main.rounds else STEP_KEYS)
        if request.plot is not None and reads is not None and eps is not None:
            request.plot(_trace(job, reads, dense, eps, divergence))
        layer = None  # last: what was asked for is there and written
        compared = dense is not None and eps is not None
        if request.layer is not None and job.answer is not None and compared and request.method_is_default:
            layer = request.layer(session)
        ran = Ran(
            {
                "backend": session.backend_name,
                "device": session.device,
                "kernels": session.kernels,
                "kernels_fault": session.fault,
                "model": session.model,
                "weights": session.weights,
                "kv_bits": session.kv_bits,
                **({} if job.codes is None else {"kv_bits_kl": job.codes.kl}),
            },
            config,
            job.prompt_lengths,
            request.judged(job.answer),
            request.verify,
            (job.labels["dense"], job.labels["eps"]),
            timing(
                session.backend, session.device, session.kernels, session.one_unit(), session.spec.num_heads, config,
                session.spec.max_context, not session.spec.windowed,
            ),
            watched=reads is not None,
        )  # fmt: skip
        return display.report(ran, dense, eps, out, divergence.summary(), layer)


def _trace(job: Job, reads: Reads, dense: Outcome | None, eps: Outcome, divergence: "Divergence") -> Trace:
    session, config = job.session, job.request.config
    device = session.backend.device_name(session.device)
    settings = {
        "model": session.model,
        "EPS": terminal.describe(config),
        "K and V": described(session.kv_dtype, session.kv_bits),
        "backend": f"{session.backend_name} on {session.device} ({device}), {session.dtype}, kernels {session.kernels}",
    }

    def texts(tokens: list[int]) -> list[str]:
        return texts_of(session.tokenizer, tokens)

    return Trace(
        settings, reads, texts(job.documents[0].prompt), texts(eps.tokens[0]), eps.summary(),
        None if dense is None else texts(dense.tokens[0]), None if dense is None else dense.summary(),
        divergence.kl or None, divergence.agree or None,
    )  # fmt: skip


@dataclass
class Divergence:
    """The divergence of sparse next-token distributions from dense ones, both fed the dense run's tokens: of each token
    KL(dense || sparse) in nats, and whether the likeliest token is the same. Empty where it was not measured."""

    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def summary(self) -> dict[str, float | None]:
        """Return the fields of the last line; none where nothing was measured."""
        if not self.kl:
            return {}
        return {
            "kl_mean": float(np.mean(self.kl)),
            "kl_max": max(self.kl),
            "top1_agreement": float(np.mean(self.agree)),
        }


def _divergence(job: Job, filled: Prefilled, dense: Outcome) -> Divergence:
    found = Divergence()

    def on_record(record: StepRecord) -> None:
        got, want = record.logits, dense.records[record.step].logits
        assert got is not None and want is not None
        found.kl.extend(np.maximum(kl_divergence(want, got), 0.0).tolist())
        found.agree.extend((got.argmax(-1) == want.argmax(-1)).tolist())
        record.logits = None  # a vocabulary a step: not to be held for the whole run

    _decode(job, "kl", filled, on_record, forced=dense.tokens)
    return found
