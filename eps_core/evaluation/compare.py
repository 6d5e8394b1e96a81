"""One `eps-proto run`: checks everything first, then decodes densely and gated in two caches, and compares them."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TextIO

import numpy as np

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.decode.cost import Cost, cost_of
from eps_core.decode.forward import load_decoder
from eps_core.decode.generate import generate
from eps_core.decode.model import DEMO_MODEL, load_tokenizer, read_spec
from eps_core.decode.session import (
    RunRequest,
    Session,
    _refuse_larger_than_memory,
    cache_spec,
    choose_device,
    choose_kernels,
    new_cache,
)
from eps_core.errors import ConfigError
from eps_core.load import backend_name, load_backend
from eps_core.paging.pool import PagePool
from eps_core.tasks import needle
from eps_core.telemetry import files, terminal
from eps_core.telemetry.steps import StepRecord, kl_divergence, summarise, write_csv

DEMO_PROMPT_BYTES = 4095  # with the token that begins a text: 4,096 tokens
DEMO_SEED = 1


@dataclass
class Side:
    """One decode of the prompt, dense or gated."""

    records: list[StepRecord] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prefill_ms: float = 0.0

    def summary(self) -> dict[str, Any]:
        return summarise(self.records, self.prefill_ms)


def prepare(request: RunRequest) -> Session:
    """Everything that can be refused is refused here, the weights last; nothing is written."""
    if request.metrics is not None and request.csv is not None and request.metrics.resolve() == request.csv.resolve():
        raise ConfigError(f"metrics and csv are both {request.metrics}: give two paths")
    for path, what in ((request.metrics, "metrics file"), (request.csv, "csv file")):
        if path is not None:
            files.check_writable(path, what)
    model = request.model or DEMO_MODEL
    if request.model is None and not (model / "config.json").is_file():
        raise ConfigError(f"the demo model is not in this installation ({model}): pass --model DIR")
    spec = read_spec(model)
    tokenizer = load_tokenizer(model)
    text, answer = request.prompt, None
    if text is None:
        document = demo_document()
        text, answer = document.prompt, document.answer
    try:
        prompt_tokens = list(tokenizer.encode(text.encode().decode()).ids)
    except UnicodeError as error:
        raise ConfigError(f"the prompt is not valid Unicode ({error}): pass UTF-8 text") from error
    if max(prompt_tokens, default=0) >= spec.vocab_size:
        raise ConfigError(
            f"{model}: its tokenizer gives token {max(prompt_tokens)}, its vocabulary ends at {spec.vocab_size - 1}: "
            "tokenizer.json and config.json are of different models"
        )
    if not prompt_tokens:
        raise ConfigError("the prompt is empty: give at least one token")
    if len(prompt_tokens) + request.max_new_tokens > spec.max_context:
        raise ConfigError(
            f"a prompt of {len(prompt_tokens)} tokens and {request.max_new_tokens} new ones exceed the model's context "
            f"of {spec.max_context} tokens: shorten the prompt or lower max-new-tokens"
        )
    backend = load_backend(request.backend)
    device = choose_device(backend, request.device)
    dtype = request.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else spec.stored_dtype
    kv_dtype = dtype if request.kv_dtype == "auto" else request.kv_dtype
    pool = cache_spec(request, spec, len(prompt_tokens), kv_dtype, request.config)
    _refuse_larger_than_memory(pool, request.config, device)
    kernels, fault = choose_kernels(backend, device, request.kernels, pool, spec.num_heads, request.config)
    cost = None
    if request.auto_min_context:
        cost, _ = cost_of(backend, device, kernels, pool, spec.num_heads, request.config, spec.max_context)
        # where gating never pays, everything that the model can hold is below the least context
        least = spec.max_context + 1 if cost.min_context is None else cost.min_context
        request = replace(request, config=request.config.replace(min_context=least))
    decoder = load_decoder(backend, model, spec, dtype, device)
    return Session(
        request, backend, decoder, spec, tokenizer, device, dtype, kv_dtype, prompt_tokens, answer, kernels, fault, cost
    )


def _describe(cost: Cost) -> str:
    rows = zip(cost.contexts, cost.dense_ms, cost.gated_ms, strict=True)
    measured = ", ".join(f"{context:,} tokens {dense:.2f} / {gated:.2f}" for context, dense, gated in rows)
    pays = "at no context" if cost.min_context is None else f"from {cost.min_context:,} tokens on"
    return f"gating pays {pays} (ms of one layer, dense / gated: {measured})"


def demo_document() -> needle.NeedleDocument:
    try:
        text = needle.corpus(held_out=True)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error
    return needle.needle_document(text, DEMO_PROMPT_BYTES, DEMO_SEED, depth=0.5, num_distractors=3)


def decode(
    session: Session,
    name: str,
    cache: Any,
    pool: PagePool,
    read: Read | None,
    on_record: Callable[[StepRecord], None],
    forced: list[int] | None = None,
    keep_logits: bool = False,
) -> tuple[Side, Any]:
    """(side, cache) of decoding the prompt; each step's record is handed over as it comes."""
    request = session.request
    side = Side()
    started = time.perf_counter()
    progress = terminal.Progress(f"{name}: prefill", "tokens")

    def on_prefill(prompt: int, done: int, total: int) -> None:
        progress(done, total)
        side.prefill_ms = 1000 * (time.perf_counter() - started)

    steps = generate(
        session.decoder,
        cache,
        pool,
        [session.prompt_tokens],
        request.max_new_tokens,
        request.sampling,
        read,
        stop_tokens=session.spec.eos_token_ids if request.stop else (),
        prefill_chunk=request.prefill_chunk,
        on_prefill=on_prefill,
        forced_tokens=None if forced is None else [forced],
        keep_logits=keep_logits,
        # waiting for the device between layers costs nothing on a CPU, so every step is timed there
        time_every=1 if session.device == "cpu" else 4,
        audit_every=request.audit_every if name == "eps" else 0,
        audit_factor=request.audit_factor,
        audit_off=request.audit_off,
    )
    with progress:
        while True:
            try:
                record = next(steps)
            except StopIteration as end:
                side.text = session.tokenizer.decode(side.tokens, skip_special_tokens=True)
                return side, end.value
            on_record(record)
            side.tokens += record.tokens
            side.records.append(record)


def run(request: RunRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, writing text and table to `out` and metrics where asked. Returns the last line's object."""
    session = prepare(request)
    request = session.request  # its config is settled
    config, gated = request.config, request.config.store.enabled
    name = backend_name(session.backend)
    model = str(request.model or "demo")
    with ExitStack() as stack:
        metrics = None
        if request.metrics is not None:
            metrics = stack.enter_context(files.JsonlWriter(request.metrics))
            metrics.write(
                files.run_line(
                    config,
                    session.cache_spec(config),
                    name,
                    session.device,
                    model,
                    session.backend.versions(),
                    dtype=session.dtype,
                    prompt_tokens=len(session.prompt_tokens),
                    max_new_tokens=request.max_new_tokens,
                    sampling=vars(request.sampling),
                    kernels=session.kernels,
                    kernels_fault=session.fault,
                    device_name=session.backend.device_name(session.device),
                    min_context_cost=asdict(session.cost) if session.cost else None,
                )
            )
        _print_header(session, model, name, out)
        measured = "eps" if gated else "dense"  # the side that metrics and csv speak of

        def streamed(side_name: str, cache: Any, pool: PagePool, keep_logits: bool = False) -> tuple[Side, Any]:
            label = f"{side_name:5} > "
            text = terminal.TextStream(session.tokenizer, lambda piece: (out.write(piece), out.flush()), label)

            def on_record(record: StepRecord) -> None:
                if metrics is not None and side_name == measured:
                    metrics.write(record.to_dict())
                text.add(record.tokens[0])

            decoded = decode(session, side_name, cache, pool, config.read, on_record, keep_logits=keep_logits)
            text.flush()
            out.write("\n")
            return decoded

        dense = eps = None
        divergence: dict[str, float | None] = {}
        if request.baseline or not gated:
            dense, _ = streamed(
                "dense", *new_cache(session, EpsConfig.of(block_size=config.store.block_size)), request.kl
            )
        if gated:
            cache, pool = new_cache(session, config)
            eps, cache = streamed("eps", cache, pool)
            if request.kl and dense is not None:
                divergence = _divergence(session, cache, pool, dense)
        result = _report(session, model, name, dense, eps, divergence, out)
        main = eps or dense
        assert main is not None
        if metrics is not None:
            metrics.write(
                {
                    "type": "summary",
                    **main.summary(),
                    "prompt_tokens": len(session.prompt_tokens),
                    "tokens_equal": result["tokens_equal"],
                    "dense": dense.summary() if dense is not None and eps is not None else None,
                    **divergence,
                }
            )
        if request.csv is not None:
            write_csv(request.csv, main.records)
    return result


def _print_header(session: Session, model: str, backend: str, out: TextIO) -> None:
    spec, request = session.spec, session.request
    heads = f"{spec.num_heads} query / {spec.num_kv_heads} kv heads of {spec.head_dim}"
    out.write(f"model   {model} ({spec.family}, {spec.num_layers} layers, {heads})\n")
    cache = "" if session.kv_dtype == session.dtype else f", cache {session.kv_dtype}"
    out.write(f"backend {backend} on {session.device}, {session.dtype}{cache}, kernels {session.kernels}\n")
    kind = "" if session.answer is None else f", a needle document whose answer is {session.answer}"
    out.write(f"prompt  {len(session.prompt_tokens):,} tokens{kind}\n")
    out.write(f"eps     {terminal.describe(request.config)}\n")
    if session.fault is not None:
        out.write(f"        {session.fault}: array operations instead\n")
    if session.cost is not None:
        out.write(f"        {_describe(session.cost)}\n")
    if request.method_is_default and request.config.store.enabled:
        out.write("        (the demo's default; --eps-method off turns it off)\n")
    out.write("\n")
    out.flush()


def _divergence(session: Session, cache: Any, pool: PagePool, dense: Side) -> dict[str, float | None]:
    """KL(dense || gated) of the next-token distribution in nats, both fed the dense run's tokens through the decode.
    The prompt's pages are still in `cache`."""
    values: list[float] = []
    agree: list[bool] = []

    def on_record(record: StepRecord) -> None:
        gated, reference = record.logits, dense.records[record.step].logits
        assert gated is not None and reference is not None
        values.append(max(float(kl_divergence(reference, gated)[0]), 0.0))
        agree.append(bool(np.argmax(gated[0]) == np.argmax(reference[0])))
        record.logits = None

    decode(session, "kl", cache, pool, session.request.config.read, on_record, forced=dense.tokens, keep_logits=True)
    return {
        "kl_mean": float(np.mean(values)) if values else None,
        "kl_max": max(values, default=None),
        "top1_agreement": float(np.mean(agree)) if agree else None,
    }


def _report(
    session: Session,
    model: str,
    backend: str,
    dense: Side | None,
    eps: Side | None,
    divergence: dict[str, float | None],
    out: TextIO,
) -> dict[str, Any]:
    main = eps or dense
    assert main is not None
    equal = eps.tokens == dense.tokens if eps is not None and dense is not None else None
    checks: list[tuple[str, str | None, str | None]] = []
    if session.answer is not None:
        answered = [_yes(side.text.startswith(session.answer)) if side else None for side in (dense, eps)]
        checks.append(("needle answered", answered[0], answered[1]))
    if equal is not None:
        checks.append(("tokens equal to dense", None, _yes(equal)))
    checks += [
        (name.replace("_", " "), None, f"{value:.5f}") for name, value in divergence.items() if value is not None
    ]
    dense_summary, eps_summary = dense.summary() if dense else None, eps.summary() if eps else None
    out.write("\n" + terminal.run_table(dense_summary, eps_summary, checks, out) + "\n")
    return {
        "backend": backend,
        "device": session.device,
        "kernels": session.kernels,
        "kernels_fault": session.fault,
        "model": model,
        "prompt_tokens": len(session.prompt_tokens),
        "new_tokens": len(main.tokens),
        "text": main.text,
        "tokens": main.tokens,
        "tokens_equal": equal,
        "bytes_ratio": eps_summary["bytes_ratio"] if eps_summary else None,
        "dense": terminal.dense_json(dense.tokens, dense_summary) if dense and dense_summary else None,
        "eps": terminal.eps_json(eps.tokens, eps_summary, session.request.config) if eps and eps_summary else None,
        **divergence,
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
