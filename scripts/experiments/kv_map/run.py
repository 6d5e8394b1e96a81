"""How far K and V as codes move the next token: KL by bits of K, bits of V and layer, along a text.

The text's start is prefilled once, in the cache's dtype; of its last tokens every cache answers in one dense pass, so
that all variants see the same keys and values before they are rounded, and differ in nothing else.

    python scripts/experiments/kv_map/run.py --plot map.svg
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import click
import numpy as np

from eps_core.cli.captures import context_option, text_option
from eps_core.cli.help import INPUT, OUTPUT, OUTPUT_FILE, command, option
from eps_core.cli.numbers import TOKENS
from eps_core.cli.source import backend_option, device_option, dtype_option, kv_dtype_option, model_option
from eps_core.config.cache import CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import AS_THEY_ARE, EXACT, FormatName, KvFormats, formats_for
from eps_core.decode.prefix import Prefix
from eps_core.decode.session import Session
from eps_core.errors import exit_code, overflow
from eps_core.evaluation.capture import model_name, text_tokens
from eps_core.io import outputs
from eps_core.kv_cache.rows import Rows
from eps_core.metrics import terminal
from eps_core.metrics.provenance import run_line
from eps_core.metrics.steps import kl_divergence, log_softmax
from eps_core.models.config import DEMO_MODEL
from eps_core.report.figures import shade
from eps_core.report.style import need, svg

Variant = tuple[FormatName, FormatName, int | None]  # bits of K, bits of V, the only layer of codes; None: every layer
LEAST = 1e-9  # nats; below it float32 logits say nothing


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


def measured(session: Session, tokens: list[int], context: int) -> Iterator[Moved]:
    """Yield every variant."""
    pairs, layers = pairs_of(session.spec.head_dim), session.spec.num_layers
    following, total = np.array(tokens[context + 1 :], np.int64), len(pairs) * (layers + 1)
    as_it_is = session.one_unit().kv_token_bytes
    with terminal.Progress("kv-map:", "passes") as progress:
        reader, done = Reader(session, tokens, context), 0
        want = reader.logits(reader.plain)
        for bits in pairs:
            ratio = replace(session, kv_bits=bits).one_unit().kv_token_bytes / as_it_is
            for layer, got in reader.variants(bits):
                yield moved((*bits, layer), want, got, following, ratio)
                done += 1
                progress(done, total)


def tables(found: list[Moved]) -> str:
    """Every layer as codes, by bits; then the mean KL of K or V of each layer alone."""
    whole = [one for one in found if one.layer is None]
    rows = [
        [f"K {one.k_bits}, V {one.v_bits}", f"{one.bytes_ratio:.3f}",
         f"{one.kl_mean:.2e}", f"{one.kl_p99:.2e}", f"{one.kl_max:.2e}",
         f"{one.top1_agreement:.3f}", "-" if one.nll_delta is None else f"{one.nll_delta:+.2e}"]
        for one in whole
    ]  # fmt: skip
    first = terminal.table(rows, ["bits", "bytes", "KL mean", "KL p99", "KL max", "top 1", "nats lost"])
    parts, layers = by_layer(found)
    rows = [[f"layer {layer}", *(f"{kl:.2e}" for kl in kls)] for layer, kls in layers.items()]
    second = terminal.table(rows, ["KL mean", *parts])
    return f"{first}\n\nK or V of one layer as codes, all else as it is:\n\n{second}"


def figure(found: Sequence[Moved]) -> str:
    """Left every layer in a pair of formats, K's down and V's across; right one layer alone, K or V of it. Colours are
    of the mean KL's logarithm, the same in both."""
    names = list(dict.fromkeys(name for one in found for name in (one.k_bits, one.v_bits)))
    parts, layers = by_layer(found)
    pairs = {(one.k_bits, one.v_bits): one.kl_mean for one in found if one.layer is None}
    whole = _log(np.array([[pairs.get((k_bits, v_bits), np.nan) for v_bits in names] for k_bits in names]))
    alone = _log(np.array(list(layers.values())))
    low = min(np.nanmin(whole), alone.min())
    limits = low, max(np.nanmax(whole), alone.max(), low + 1)

    def plot(canvas: Any) -> None:
        left, right = canvas.subplots(1, 2, width_ratios=(len(names), len(parts)))
        every = list(map(str, names))
        shade(left, whole, limits, every, every, _nats)
        left.set(title="every layer", xlabel="--kv-bits of V", ylabel="--kv-bits of K")
        mesh = shade(right, alone, limits, list(map(str, layers)), parts, _nats)
        right.set(title="one layer alone", xlabel="--kv-bits of K, or of V", ylabel="layer")
        canvas.colorbar(mesh, ax=(left, right), label="KL of the next token, log10 of nats")

    return svg((11.0, min(2.2 + 0.3 * max(len(names), len(layers)), 8.0)), plot)


def _log(nats: np.ndarray) -> np.ndarray:
    return np.log10(np.maximum(nats, LEAST))


def _nats(log: float) -> str:
    """Such as 2e-5."""
    digit, power = f"{10.0**log:.0e}".split("e")
    return f"{digit}e{int(power)}"


@command(
    "kv-map",
    context_settings={"help_option_names": ["-h", "--help"]},
    examples={
        "run.py --plot map.svg": "the demo model along the shipped text, drawn",
        "run.py --model DIR --text long.txt -o map.jsonl": "yours, a line for each pair and layer",
        "eps-proto run --model DIR --prompt-file long.txt --kv-bits 8,4": "decode with what you chose",
    },
)
@model_option
@text_option
@context_option
@option("--steps", heading=INPUT, type=TOKENS, default=64, show_default=True, help="Tokens whose next one is compared.")
@backend_option
@device_option
@dtype_option
@kv_dtype_option
@option(
    "-o", "--output", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="Write JSONL, a line for each variant."
)
@option("--plot", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="Draw the map there, as SVG.")
def main(**flags: Any) -> None:
    """Measure how far K and V as codes move the next token: KL by --kv-bits of K, of V, and layer.

    The text's first --context tokens are prefilled once. Over caches of every pair of formats, with all layers as codes
    and with each alone, the model then reads the last --steps tokens in one dense pass; what it says next is compared
    with what it says over K and V as they are.

    Prints two tables; the last line of stdout is one JSON object.
    """
    if flags["plot"] is not None:
        need("matplotlib")  # before anything is measured
    outputs.check(
        {"-o": flags["output"], "--plot": flags["plot"]},
        {"--text": flags["text"], "--model": flags["model"] or DEMO_MODEL},
    )
    with ExitStack() as stack:
        plot = None if flags["plot"] is None else stack.enter_context(outputs.Output(flags["plot"], "plot"))
        output = None
        if flags["output"] is not None:
            output = stack.enter_context(outputs.Output(flags["output"], "map of bits"))
        # array operations, which alone read every format: variants differ in nothing else
        session = Session.open(
            flags["model"], flags["backend"], flags["device"], flags["dtype"], flags["kv_dtype"] or "auto", "arrays"
        )
        text = text_tokens(session, flags["text"], flags["context"], flags["steps"])
        context = len(text.tokens) - flags["steps"]
        session.load()
        sizes = {"context_tokens": context, "num_steps": flags["steps"]}
        about = {**sizes, "text_sha256": text.sha256, "dtype": session.dtype}
        lines = None
        if output is not None:
            lines = stack.enter_context(outputs.JsonlWriter(output))
            run = session.one_unit(), session.backend_name, session.device, model_name(session)
            lines.write(run_line(EpsConfig(), *run, session.backend.versions(), kind="kv_map", **about))
        found = []
        for one in measured(session, text.tokens, context):
            found.append(one)
            if lines is not None:
                lines.write({"type": "kv_map", **asdict(one)})
        print(tables(found))
        if plot is not None:
            with outputs.replacing(plot) as file:
                file.write(figure(found))
    whole = [{"type": "kv_map", **asdict(one)} for one in found if one.layer is None]
    made = flags["output"] and str(flags["output"])
    click.echo(outputs.to_json({"model": session.model, **about, "output": made, "arms": whole}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
