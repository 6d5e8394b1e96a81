"""One `eps-proto run`: checks everything first, then decodes densely and gated in two caches, and compares them."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import numpy as np

from eps_core.config.formats import described
from eps_core.config.store import CacheSpec, Store
from eps_core.decode.beams import room
from eps_core.decode.cost import Cost, cost_of
from eps_core.decode.generate import report_of
from eps_core.decode.observe import Observed
from eps_core.decode.prompts import prompt_texts
from eps_core.decode.session import Session
from eps_core.decode.stored import check as check_stored
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import UNVERIFIED, Document, decode
from eps_core.evaluation.sides import Ran, Side, alike, beams_json, prompt_line, report
from eps_core.files import outputs
from eps_core.paging.heads import HeadPools
from eps_core.paging.pool import PagePool
from eps_core.tasks import needle
from eps_core.tasks.corpus import corpus
from eps_core.telemetry import provenance, terminal
from eps_core.telemetry.rounds import ROUND_KEYS, RoundRecord
from eps_core.telemetry.rounds_shown import describe_verify
from eps_core.telemetry.steps import STEP_KEYS, StepRecord, kl_divergence, write_csv

DEMO_PROMPT_BYTES = 4095  # with the token that begins a text: 4,096 tokens
DEMO_SEED = 1
WARM_UP_TOKENS = 64


@dataclass
class Job:
    """A request whose config is settled, with its session and prompts."""

    request: RunRequest
    session: Session
    documents: list[Document]
    answer: str | None  # of the built-in needle document
    cost: Cost | None  # behind an automatic min_context

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(one.prompt) for one in self.documents]

    @property
    def num_new(self) -> int:
        """Most tokens that a prompt goes on for."""
        return max(one.num_steps for one in self.documents)

    @property
    def cache_spec(self) -> CacheSpec:
        """The cache of the side that metrics speak of."""
        keep, store = self.request.keep, self.request.config.store
        if keep.enabled:
            return self.session.evicting_spec(keep, store, self.prompt_lengths, self.num_new)
        return self.session.cache_spec(*self.room(store))

    def room(self, store: Store) -> tuple[Store, list[int], int | None]:
        """What a cache of the prompts and their continuations is made of."""
        width, size = self.request.beams, store.unit_tokens
        lengths = [n for one in self.documents for n in room(len(one.prompt), one.num_steps, width, size)]
        return store, lengths, self.request.pool_tokens


def prepare(request: RunRequest) -> Job:
    """Everything that can be refused is refused here, the weights last; nothing is written."""
    request.check()
    session = Session.open(
        request.model, request.backend, request.device, request.dtype, request.kv_dtype, request.kernels,
        kv_bits=request.kv_bits, cache_dir=request.cache_dir,
    )  # fmt: skip
    spec, answer = session.spec, None
    texts = [text for prompt in request.prompts for text in prompt_texts(prompt, spec.max_context)]
    if not request.prompts:
        made = demo_document()
        texts, answer = [made.prompt], made.answer
    prompts = session.encode_prompts(texts, request.max_new_tokens, request.chat)
    stop = spec.eos_token_ids if request.stop else ()
    job = Job(
        request, session, [Document(prompt, request.max_new_tokens, stop=stop) for prompt in prompts], answer, None
    )
    if request.cache_dir is not None:
        check_stored(request.config.store, len(prompts))
    pool = session.cache_spec(*job.room(request.config.store))
    for store in (Store(block_size=request.config.store.block_size), request.config.store):
        session.check_kernels(store, request.verify.enabled)
    if request.auto_min_context:
        job.cost, _ = cost_of(
            session.backend, session.device, session.kernels, pool, spec.num_heads, request.config, spec.max_context
        )
        # where gating never pays, everything that the model can hold is below the least context
        least = spec.max_context + 1 if job.cost.min_context is None else job.cost.min_context
        job.request = replace(request, config=request.config.replace(min_context=least))
    session.load(request.verify)
    _warm_up(job)
    return job


def _warm_up(job: Job) -> None:
    """Takes the model's first steps, which set the array library up, before anything is timed."""
    session, tokens = job.session, job.documents[0].prompt[:WARM_UP_TOKENS]
    cache, pool = session.cache(Store(), len(tokens) + 2)
    decode(session, cache, pool, [Document(tokens, 2)], None)


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
    pool: PagePool | HeadPools | None,
    on_record: Callable[[Any], None] | None = None,
    forced: list[list[int]] | None = None,
) -> tuple[Side, Any]:
    """(side, cache) of decoding the prompts; each step's record is handed over as it comes."""
    request, prefill_ms, prompts = job.request, 0.0, [one.prompt for one in job.documents]
    stored = None if name == "kl" or cache is None else job.session.stored(cache.store)
    ttft_ms: float | None = None
    started = time.perf_counter()
    progress = terminal.Progress(f"{name}: prefill", "tokens")

    # all but the last token of each prompt is prefilled
    before = np.cumsum([0, *job.prompt_lengths]) - np.arange(len(job.documents) + 1)

    def on_prefill(prompt: int, done: int, total: int) -> None:
        nonlocal prefill_ms
        progress(int(before[prompt]) + done, int(before[-1]))
        prefill_ms = 1000 * (time.perf_counter() - started)

    documents = job.documents
    if forced is not None:
        documents = [
            replace(one, num_steps=len(tokens), forced=tokens[:-1])
            for one, tokens in zip(documents, forced, strict=True)
        ]

    def first_of(record: StepRecord | RoundRecord) -> None:
        nonlocal ttft_ms
        ttft_ms = 1000 * (time.perf_counter() - started) if ttft_ms is None else ttft_ms
        if on_record is not None:
            on_record(record)

    kept: dict[str, Any] = {}
    with progress:
        if stored is not None:
            assert isinstance(pool, PagePool)
            cache = stored.load(cache, pool, prompts)
        if request.keep.enabled and name != "dense":
            kept, cache, pool = _evicted(job, on_prefill)
            prefill_ms = 1000 * (time.perf_counter() - started)  # evictions included
        outcome, cache = decode(
            job.session,
            cache,
            pool,
            documents,
            request.config.read,
            request.sampling,
            first_of,
            time_every=job.session.time_every,
            prefill_chunk=request.prefill_chunk,
            on_prefill=on_prefill,
            **kept,
            keep_logits=request.kl and name != "eps",
            audit_every=request.audit_every if name == "eps" else 0,
            audit_factor=request.audit_factor,
            audit_off=request.audit_off,
            verify=request.verify if name == "eps" else UNVERIFIED,
            beams=request.beams,
        )
    tokens = outcome.tokens(len(documents))
    texts = [job.session.decode(one) for one in tokens]
    told = None
    if stored is not None:
        assert isinstance(pool, PagePool)
        stored.save(cache, pool, prompts)
        told = {**asdict(stored.counts), "ttft_ms": ttft_ms}
    return Side(outcome, tokens, texts, prefill_ms, told, beams_json(outcome, job.session.decode)), cache


def _evicted(job: Job, on_prefill: Callable[[int, int, int], None]) -> tuple[dict[str, Any], Any, HeadPools]:
    """(what `decode` needs besides, cache, pools) of the prompts prefilled, and evicted as the request says."""
    request, session = job.request, job.session
    decoder, cache, pools = session.evicting(request.keep, request.config.store, job.prompt_lengths, job.num_new)
    written = []
    for index, one in enumerate(job.documents):
        observed = Observed(session.backend, session.spec, request.keep.facts)
        report = report_of(on_prefill, index)
        prefix = session.prefix(one.prompt[:-1], request.prefill_chunk, observed, report)
        sequence, cache = decoder.adopt(cache, prefix.keys_values, len(prefix.tokens), observed)
        written.append(sequence)
    return {"decoder": decoder, "written": written}, cache, pools


def run(request: RunRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, writing text and table to `out` and metrics where asked. Returns the last line's object."""
    with ExitStack() as stack:
        lines, csv = (
            None if path is None else stack.enter_context(outputs.Output(path, what))
            for path, what in ((request.metrics, "metrics file"), (request.csv, "csv file"))
        )
        job = prepare(request)
        request, session = job.request, job.session  # its config is settled
        config, gated = request.config, request.config.store.enabled or request.keep.enabled
        metrics = None
        if lines is not None:
            metrics = stack.enter_context(outputs.JsonlWriter(lines))
            metrics.write(
                provenance.run_line(
                    config,
                    job.cache_spec,
                    session.backend_name,
                    session.device,
                    session.model,
                    session.backend.versions(),
                    dtype=session.dtype,
                    prompt_tokens=sum(job.prompt_lengths),
                    max_new_tokens=request.max_new_tokens,
                    sampling=vars(request.sampling),
                    kernels=session.kernels,
                    kernels_fault=session.fault,
                    device_name=session.backend.device_name(session.device),
                    min_context_cost=asdict(job.cost) if job.cost else None,
                    verify=request.verify.to_dict() if request.verify.enabled else None,
                    keep=request.keep.to_dict() if request.keep.enabled else None,
                    beams=request.beams,
                )
            )
        _print_header(job, out)
        measured = "eps" if gated else "dense"  # the side that metrics and csv speak of

        def streamed(side_name: str, store: Store) -> tuple[Side, Any, PagePool | None]:
            label = f"{side_name:5} > "
            text = terminal.TextStream(session.tokenizer, lambda piece: (out.write(piece), out.flush()), label)
            progress = terminal.Progress(f"{side_name}: decode", "tokens")
            alone = len(job.documents) == 1

            num_said = 0

            def on_record(record: StepRecord | RoundRecord) -> None:
                nonlocal num_said
                if metrics is not None and side_name == measured:
                    metrics.write(record.to_dict())
                num_said += len(record.tokens) if request.beams == 1 else len(job.documents)
                if request.beams > 1:  # nobody knows yet which of them will be the text
                    progress(num_said, request.max_new_tokens * len(job.documents))
                elif alone:
                    for token in record.tokens:
                        text.add(token)
                else:  # their texts would come mixed: shown at the end
                    progress(num_said, request.max_new_tokens * len(job.documents))

            kept = request.keep.enabled and side_name != "dense"
            cache, pool = (None, None) if kept else session.cache(*job.room(store))
            with progress:
                side, cache = _decode(job, side_name, cache, pool, on_record)
            if alone:
                for token in side.tokens[0] if request.beams > 1 else ():
                    text.add(token)
                text.flush()
                out.write("\n")
            else:
                out.writelines(f"{side_name:5} {i} > {said}\n" for i, said in enumerate(side.texts, start=1))
                out.flush()
            return side, None if kept else cache, pool

        dense = eps = None
        divergence: dict[str, float | None] = {}
        if request.baseline or not gated:
            dense, _, _ = streamed("dense", Store(block_size=config.store.block_size))
        if gated:
            eps, cache, pool = streamed("eps", config.store)
            if request.kl and dense is not None:
                divergence = _divergence(job, cache, pool, dense)
        both = alike(dense, eps)
        main = eps or dense
        assert main is not None
        if metrics is not None:
            metrics.write(
                {
                    "type": "summary",
                    **main.summary(),
                    "prompt_tokens": sum(job.prompt_lengths),
                    "tokens_equal": None if both is None else all(both),
                    "dense": dense.summary() if dense is not None and eps is not None else None,
                    **divergence,
                    **({} if main.stored is None else {"stored": main.stored}),
                }
            )
        if csv is not None:
            write_csv(
                csv, main.outcome.rounds or main.outcome.records, ROUND_KEYS if main.outcome.rounds else STEP_KEYS
            )
        layer = None  # last: what was asked for is there and written
        if request.layer is not None and job.answer is not None and both is not None and request.method_is_default:
            layer = request.layer(session)
        ran = Ran(
            {
                "backend": session.backend_name,
                "device": session.device,
                "kernels": session.kernels,
                "kernels_fault": session.fault,
                "model": session.model,
                "kv_bits": session.kv_bits,
            },
            config,
            job.prompt_lengths,
            job.answer,
            request.verify,
        )
        return report(ran, dense, eps, out, divergence, layer)


def _print_header(job: Job, out: TextIO) -> None:
    session, spec, request = job.session, job.session.spec, job.request
    heads = f"{spec.num_heads} query / {spec.num_kv_heads} kv heads of {spec.head_dim}"
    out.write(f"model   {session.model} ({spec.family}, {spec.num_layers} layers, {heads})\n")
    held = described(session.kv_dtype, session.kv_bits)
    cache = "" if held == session.dtype else f", cache {held}"
    out.write(
        f"backend {session.backend_name} on {session.device}, {session.dtype}{cache}, kernels {session.kernels}\n"
    )
    out.write(prompt_line(job.prompt_lengths, job.answer))
    out.write(f"eps     {terminal.describe(request.config)}\n")
    if request.config.fallback:
        out.write(f"note    {request.config.fallback}\n")
    if request.keep.enabled:
        out.write(f"keep    {terminal.describe_keep(request.keep, max(job.prompt_lengths))}\n")
    if request.verify.enabled:
        out.write(f"verify  {describe_verify(request.verify)}\n")
    if request.beams > 1:
        out.write(f"beams   {request.beams}, by log probability over length\n")
    if job.cost is not None:
        out.write(f"        {_describe(job.cost)}\n")
    if request.method_is_default and request.config.store.enabled:
        out.write("        (the demo's default; --method off turns it off)\n")
    out.write("\n")
    out.flush()


def _divergence(job: Job, cache: Any, pool: PagePool | None, dense: Side) -> dict[str, float | None]:
    """KL(dense || gated) of the next-token distribution in nats, both fed the dense run's tokens through the decode.
    The prompts' pages are still in `cache`; where tokens are evicted, the prompts are prefilled and evicted again."""
    values: list[float] = []
    agree: list[bool] = []

    def on_record(record: StepRecord) -> None:
        got, want = record.logits, dense.outcome.records[record.step].logits
        assert got is not None and want is not None
        values.extend(np.maximum(kl_divergence(want, got), 0.0).tolist())
        agree.extend((got.argmax(-1) == want.argmax(-1)).tolist())
        record.logits = None  # a vocabulary a step: not to be held for the whole run

    _decode(job, "kl", cache, pool, on_record, forced=dense.tokens)
    return {
        "kl_mean": float(np.mean(values)) if values else None,
        "kl_max": max(values, default=None),
        "top1_agreement": float(np.mean(agree)) if agree else None,
    }
