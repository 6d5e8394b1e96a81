"""How far K and V as codes move the next token: KL by bits of K, bits of V and layer, along a text.

The text's start is prefilled once, in the cache's dtype; of its last tokens every cache answers in one dense pass, so
that all variants see the same keys and values before they are rounded, and differ in nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import AS_THEY_ARE, EXACT, FormatName, KvFormats, formats_for
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import overflow
from eps_core.evaluation.capture import model_name, num_sink_tokens
from eps_core.io import outputs
from eps_core.kv_cache.rows import Rows
from eps_core.metrics import provenance, terminal
from eps_core.metrics.steps import kl_divergence, log_softmax

Variant = tuple[FormatName, FormatName, int | None]  # bits of K, bits of V, the only layer of codes; None: every layer


@dataclass(frozen=True)
class KvMapRequest:
    """Settings that the command line asked for. A `context_tokens` of None is what model and text hold."""

    model: Path | None = None
    text: Path | None = None
    context_tokens: int | None = None
    num_steps: int = 64
    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    output: Path | None = None


@dataclass(frozen=True)
class Moved:
    """Next-token distributions of one variant against those of K and V as they are, over the text's last tokens: KL in
    nats, the share of tokens with the same most likely one, and by how much the text became less likely, nats a
    token."""

    k_bits: FormatName
    v_bits: FormatName
    layer: int | None  # the only one of codes; None: all
    bytes_ratio: float  # of K and V of that layer, or all, against the cache's dtype
    kl_mean: float
    kl_p50: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    nll_delta: float | None  # None: no token of the text follows

    @property
    def part(self) -> str | None:
        """Return where K or V alone lies as codes, that, such as `K 8`."""
        coded = [(which, name) for which, name in (("K", self.k_bits), ("V", self.v_bits)) if name != AS_THEY_ARE]
        return "{} {}".format(*coded[0]) if len(coded) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        return {"type": "kv_map", **asdict(self)}


def by_layer(found: Sequence[Moved]) -> tuple[list[str], dict[int, list[float]]]:
    """(parts, K's first; layer -> the mean KL of each of them): one layer's K or V as codes, all else as it is."""
    alone = {(one.part, one.layer): one.kl_mean for one in found if one.part is not None and one.layer is not None}
    parts = sorted(dict.fromkeys(part for part, _ in alone), key=lambda part: part[0])
    layers = sorted({layer for _, layer in alone})
    return parts, {layer: [alone[part, layer] for part in parts] for layer in layers}


def pairs_of(head_dim: int) -> list[KvFormats]:
    """Bits of K and V to try: every pair that a cache can hold but both as they are."""
    some = formats_for(head_dim)
    return [(k_bits, v_bits) for k_bits in some for v_bits in some if (k_bits, v_bits) != EXACT]


class Reader:
    """A text's start in caches of any bits, and what the model says of its last tokens over each of them."""

    def __init__(self, session: Session, tokens: list[int], context: int) -> None:
        self.session, self.tokens, self.context = session, tokens, context
        self.prefix: Prefix = session.prefix(tokens[:context])
        self.plain = self._filled(EXACT)

    def _filled(self, bits: KvFormats) -> tuple[Any, np.ndarray, Rows]:
        """(cache, slots of the last tokens, rows)."""
        session = replace(self.session, kv_bits=bits)
        cache, pool = session.cache(CacheConfig(), len(self.tokens))
        sequence, cache = self.prefix.into(session.backend, cache, pool)
        session.backend.check_finite(cache)  # float32 holds what no code can say
        slots, _ = pool.append(sequence, self.tokens[self.context :])
        rows = Rows.of(pool.table([sequence]), pool.lengths([sequence]), np.array([len(slots)]))
        return cache, slots, rows

    def logits(self, made: tuple[Any, np.ndarray, Rows]) -> np.ndarray:
        """[N, V] float32 after each of the last tokens."""
        cache, slots, rows = made
        _, verified = self.session.decoder.verify(cache, np.array(self.tokens[self.context :]), slots, rows)
        if not np.isfinite(verified.logits).all():
            raise overflow("the logits", cache.spec.dtype)
        return verified.logits

    def variants(self, bits: KvFormats) -> Iterator[tuple[int | None, np.ndarray]]:
        """(layer, logits [N, V]) with every layer as codes, then each alone."""
        made = self._filled(bits)
        yield None, self.logits(made)
        cache, plain = made[0], self.plain[0]
        codes = list(zip(cache.k, cache.v, strict=True))
        for layer in range(len(codes)):
            for other, pair in enumerate(zip(plain.k, plain.v, strict=True)):
                cache.k[other], cache.v[other] = codes[other] if other == layer else pair
            yield layer, self.logits(made)


def moved(variant: Variant, want: np.ndarray, got: np.ndarray, following: np.ndarray, bytes_ratio: float) -> Moved:
    """Return how far logits `got` [N, V] are from `want`; `following` [M], M <= N: the text's next tokens."""
    kl = np.maximum(kl_divergence(want, got), 0.0)
    rows = np.arange(len(following))
    lost = (log_softmax(want)[rows, following] - log_softmax(got)[rows, following]).tolist()
    p50, p99 = np.percentile(kl, [50, 99]).tolist()
    agree = float((want.argmax(axis=-1) == got.argmax(axis=-1)).mean())
    nll_delta = float(np.mean(lost)) if lost else None
    return Moved(*variant, bytes_ratio, float(kl.mean()), p50, p99, float(kl.max()), agree, nll_delta)


def kv_map(request: KvMapRequest, out: TextIO) -> tuple[list[Moved], dict[str, Any]]:
    """Runs a request, prints its tables to `out` and writes a line for each variant. Returns all variants and the last
    line's object."""
    with ExitStack() as stack:
        output = None
        if request.output is not None:
            output = stack.enter_context(outputs.Output(request.output, "map of bits"))
        # array operations, which alone read every format: variants differ in nothing else
        session = Session.open(
            request.model, request.backend, request.device, request.dtype, request.kv_dtype, "arrays"
        )
        text = num_sink_tokens(session, request.text, request.context_tokens, request.num_steps)
        context = len(text.tokens) - request.num_steps
        session.load()
        write: Callable[[dict[str, Any]], None] = lambda line: None  # noqa: E731
        about = {
            "context_tokens": context,
            "num_steps": request.num_steps,
            "text_sha256": text.sha256,
            "dtype": session.dtype,
        }
        if output is not None:
            write = stack.enter_context(outputs.JsonlWriter(output)).write
            versions = session.backend.versions()
            spec, name = session.one_unit(), model_name(session)
            write(
                provenance.run_line(
                    EpsConfig(), spec, session.backend_name, session.device, name, versions, kind="kv_map", **about
                )
            )
        found = list(_measure(session, text.tokens, context, write))
        out.write(_tables(found, out) + "\n")
        whole = [one.to_dict() for one in found if one.layer is None]
        return found, {
            "model": session.model,
            **about,
            "output": request.output and str(request.output),
            "arms": whole,
        }


def _measure(
    session: Session, tokens: list[int], context: int, write: Callable[[dict[str, Any]], None]
) -> Iterator[Moved]:
    pairs, layers = pairs_of(session.spec.head_dim), session.spec.num_layers
    following, total = np.array(tokens[context + 1 :], np.int64), len(pairs) * (layers + 1)
    as_it_is = session.one_unit().kv_token_bytes
    with terminal.Progress("kv-map:", "passes") as progress:
        reader, done = Reader(session, tokens, context), 0
        want = reader.logits(reader.plain)
        for bits in pairs:
            ratio = replace(session, kv_bits=bits).one_unit().kv_token_bytes / as_it_is
            for layer, got in reader.variants(bits):
                one = moved((*bits, layer), want, got, following, ratio)
                write(one.to_dict())
                done += 1
                progress(done, total)
                yield one


def _tables(found: list[Moved], out: TextIO) -> str:
    """Every layer as codes, by bits; then the mean KL of K or V of each layer alone."""

    whole = [one for one in found if one.layer is None]
    rows = [
        [f"K {one.k_bits}, V {one.v_bits}", f"{one.bytes_ratio:.3f}",
         f"{one.kl_mean:.2e}", f"{one.kl_p99:.2e}", f"{one.kl_max:.2e}",
         f"{one.top1_agreement:.3f}", "-" if one.nll_delta is None else f"{one.nll_delta:+.2e}"]
        for one in whole
    ]  # fmt: skip
    first = terminal.table(rows, ["bits", "bytes", "KL mean", "KL p99", "KL max", "top 1", "nats lost"], out)
    parts, layers = by_layer(found)
    rows = [[f"layer {layer}", *(f"{kl:.2e}" for kl in kls)] for layer, kls in layers.items()]
    second = terminal.table(rows, ["KL mean", *parts], out)
    return f"{first}\n\nK or V of one layer as codes, all else as it is:\n\n{second}"
