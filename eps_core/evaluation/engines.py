"""`eps-proto run --engine`: a model inside another engine, as that engine runs it and with EPS in it, side by side."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tokenizers import Tokenizer

from eps_core.attention.stats import StepOutput
from eps_core.config.cache import DTYPE_BYTES, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.prompts import encode_prompts
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.evaluation.compare import texts_and_answer
from eps_core.evaluation.outcomes import Ran, prompt_line, report, summary_line
from eps_core.evaluation.pays import PaysFrom, timing
from eps_core.evaluation.request import RunRequest
from eps_core.evaluation.runner import Outcome
from eps_core.integrations.plan import Plan
from eps_core.integrations.protocol import Engine
from eps_core.integrations.settings import Settings
from eps_core.io import outputs
from eps_core.load import backend_of
from eps_core.metrics import provenance, terminal
from eps_core.metrics.rounds import ROUND_KEYS
from eps_core.metrics.steps import STEP_KEYS, StepRecord, step_record, write_csv
from eps_core.models.chat import render
from eps_core.models.config import read_heads, read_limits
from eps_core.models.hub import resolve_for_engine
from eps_core.models.tokenizer import encode, load_tokenizer

# before anything is timed: engines set themselves up, too
WARM_UP_TOKENS, WARM_UP_NEW = 256, 3


@dataclass(frozen=True)
class _Row:
    """A token that came of a decode step."""

    sequence: int
    token: int
    length: int  # tokens that the step attended for it


_Steps = list[tuple[list[_Row], float]]  # rows and ms of each step; those that a prefill alone made are left out


def run(request: RunRequest, out: TextIO) -> dict[str, Any]:
    """Runs a request, writing text and table to `out` and metrics where asked. Returns the last line's object."""
    settings = Settings(request.config, None, request.audit_every, request.kernels, request.verify)
    path, module = resolve_for_engine(request.model, request.engine, gguf=True)
    with ExitStack() as stack:
        # of its config.json and tokenizer; `path` is what the engine loads
        folder = path if path.is_dir() else stack.enter_context(module.without_weights(path))
        tokenizer, (context, ends) = load_tokenizer(folder), read_limits(folder)
        texts, answer = texts_and_answer(request, context)

        def tokens_of(text: str, most: int) -> list[int]:
            return encode(tokenizer, folder, render(folder, text) if request.chat else text, not request.chat, most)

        prompts = encode_prompts(texts, request.max_new_tokens, tokens_of, context)
        lines, csv = request.outputs(stack)
        engine: Engine = module.open_engine(
            path, settings, request.device, request.dtype,
            max_tokens=max(map(len, prompts)) + request.max_new_tokens, num_sequences=len(prompts),
        )  # fmt: skip
        stack.callback(engine.close)
        lengths, known = [len(prompt) for prompt in prompts], engine.describe()
        identity = {**known, "model": "demo" if request.model is None else str(request.model)}
        _print_header(request, identity, engine, lengths, answer, out)
        verified = settings.verify.enabled
        warm_up_new = WARM_UP_NEW + (2 * settings.verify.most if verified else 0)
        for _ in engine.generate([prompts[0][:WARM_UP_TOKENS]], warm_up_new, Sampling(), True):
            pass
        decoded: dict[str, tuple[_Steps, Outcome]] = {}
        for side in ("dense", "eps") if request.baseline else ("eps",):
            engine.sparse.take_records()
            engine.sparse.take_rounds()
            engine.sparse.reset()
            decoded[side] = _decode(request, engine, prompts, ends, side, tokenizer, out)
        steps, sparse = decoded["eps"]
        if verified:
            sparse.rounds = engine.sparse.take_rounds()
        else:
            sparse.records = _sparse_records(steps, engine)
        dense = None
        if request.baseline:
            steps, dense = decoded["dense"]
            dense.records = _dense_records(steps, engine)
        plan = engine.sparse.plan
        whole = None if verified else _ratio_of_model(plan, sparse.records)
        if whole is not None:
            identity |= {"sparse_layers": len(plan.sparse), "num_layers": plan.num_layers, "bytes_ratio_model": whole}
        if lines is not None:
            writer = stack.enter_context(outputs.JsonlWriter(lines))
            _write_metrics(writer, request, plan, identity, lengths, dense, sparse)
        if csv is not None:
            write_csv(csv, sparse.rounds or sparse.records, ROUND_KEYS if verified else STEP_KEYS)
        ran = Ran(
            identity, settings.config, lengths, request.judged(answer), settings.verify,
            pays=_timing(folder, engine.sparse.config, known, context),
            sparse_layers_of=None if whole is None else f"{len(plan.sparse)} of {plan.num_layers} layers",
            of_model=whole,
        )  # fmt: skip
        return report(ran, dense, sparse, out)


def _ratio_of_model(plan: Plan, records: Sequence[StepRecord]) -> float | None:
    """Return the sparse steps' reads over the whole model's dense reads of K and V, see `Plan.ratio_of_model`."""
    read = sum(record.bytes_kv_read_est + record.bytes_summary_read for record in records)
    lengths = [length for record in records for length in record.lengths]
    dense = sum(record.bytes_kv_dense for record in records)
    return plan.ratio_of_model(read, dense, sum(lengths), sum(map(plan.dense_tokens, lengths)))


def _timing(path: Path, config: EpsConfig, known: dict[str, Any], max_context: int) -> PaysFrom | None:
    """Return the timing function of a layer of an engine's model in our own attention; None where its config.json does
    not say how many heads it has."""
    dtype = known["dtype"] if known["dtype"] in DTYPE_BYTES else "bfloat16"
    try:
        heads, kv_heads, head_dim = read_heads(path)
        spec = CacheSpec(1, kv_heads, head_dim, 1, dtype)
    except ConfigError:
        return None
    backend, kernels = backend_of(known["engine"]), known["kernels"]
    return timing(backend, known["device"], kernels, spec, heads, config, max_context)


def _decode(
    request: RunRequest,
    engine: Engine,
    prompts: list[list[int]],
    ends: Sequence[int],
    side: str,
    tokenizer: Tokenizer,
    out: TextIO,
) -> tuple[_Steps, Outcome]:
    """One run of all prompts, and what it said; a single one's text is shown as it comes."""
    found: _Steps = []
    done, alone = Outcome(tokens=[[] for _ in prompts]), len(prompts) == 1
    text = terminal.TextStream(tokenizer, lambda piece: (out.write(piece), out.flush()), f"{side:5} > ")
    progress = terminal.Progress(f"{side}: prefill and decode", "tokens")
    first = 1 if engine.first_token_is_prefill else 0
    with progress:
        steps = engine.generate(
            prompts, request.max_new_tokens, request.sampling, side == "eps", ends if request.stop else ()
        )
        for step in steps:
            rows = []
            for sequence, token in zip(step.sequences, step.tokens, strict=True):
                said = done.tokens[sequence]
                if len(said) >= first:
                    rows.append(_Row(sequence, token, len(prompts[sequence]) + len(said)))
                said.append(token)
                if alone:
                    text.add(token)
            if rows:
                found.append((rows, step.ms))
            if not alone:
                progress(sum(map(len, done.tokens)), request.max_new_tokens * len(prompts))
    done.prefill_ms = engine.prefill_ms
    done.texts = [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in done.tokens]
    if alone:
        text.flush()
        out.write("\n")
    else:
        out.writelines(f"{side:5} {i} > {said}\n" for i, said in enumerate(done.texts, start=1))
    out.flush()
    return found, done


def _sparse_records(steps: _Steps, engine: Engine) -> list[StepRecord]:
    """EPS's records of the steps that said something, with what they said and their times."""
    records = iter(engine.sparse.take_records())
    found: list[StepRecord] = []
    for rows, ms in steps:
        wanted, k_reread = Counter(row.length for row in rows), 0
        # a prompt's chunk of one token is sparse as any token, and no step
        while wanted - Counter((record := next(records)).lengths):
            k_reread += record.bytes_k_reread
        record.sequences, record.tokens = [row.sequence for row in rows], [row.token for row in rows]
        ended = Counter(record.lengths) - wanted
        record.lengths = [*(row.length for row in rows), *ended.elements()]
        record.decode_ms, record.step = ms, len(found)
        record.bytes_k_reread += k_reread
        found.append(record)
    return found


def _dense_records(steps: _Steps, engine: Engine) -> list[StepRecord]:
    """Return the records of steps of the engine alone: every byte of the sparse layers was read, of sequences that have
    just ended too."""
    spec = engine.sparse.spec
    assert spec is not None
    found, before = [], list[_Row]()
    for index, (rows, ms) in enumerate(steps):
        sequences, tokens = [row.sequence for row in rows], [row.token for row in rows]
        ended = [row.length + 1 for row in before if engine.computes_ahead and row.sequence not in sequences]
        lengths, before = [row.length for row in rows] + ended, rows
        output = StepOutput(np.zeros((0, 0), np.float32), spec.exact_kv_bytes(lengths))
        found.append(step_record(index, sequences, tokens, lengths, output, spec, engine.sparse.config, ms, 0))
    return found


def _print_header(
    request: RunRequest, known: dict[str, Any], engine: Engine, lengths: list[int], answer: str | None, out: TextIO
) -> None:
    versions = known["versions"].get(request.engine, "")
    out.write(f"model   {known['model']}\n")
    out.write(
        f"engine  {request.engine} {versions} on {known['device']}, {known['dtype']}, kernels {known['kernels']}\n"
    )
    out.write(prompt_line(lengths, answer))
    out.write(f"{engine.sparse.plan.line(engine.sparse.config)}\n")
    if request.verify.enabled:
        out.write(f"verify  {terminal.describe_verify(request.verify)}\n")
    if request.method_is_default:
        out.write("        (the demo's default)\n")
    out.write("\n")
    out.flush()


def _write_metrics(
    writer: outputs.JsonlWriter, request: RunRequest, plan: Plan, identity: dict[str, Any], lengths: list[int],
    dense: Outcome | None, sparse: Outcome,
) -> None:  # fmt: skip
    """The same lines as of our own decoders: a run, its sparse steps, a summary."""
    writer.write(
        {
            "type": "run",
            "config": request.config.to_dict(),
            "verify": request.verify.to_dict() if request.verify.enabled else None,
            **identity,
            **plan.to_dict(),
            "sampling": vars(request.sampling),
            "prompt_tokens": sum(lengths),
            "max_new_tokens": request.max_new_tokens,
            **provenance.provenance(identity["versions"]),
        }
    )
    for record in sparse.rounds or sparse.records:
        writer.write(record.to_dict())
    whole = {name: identity[name] for name in ("bytes_ratio_model",) if name in identity}
    writer.write(summary_line(lengths, dense, sparse, whole))
