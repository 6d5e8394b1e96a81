"""Quality against bytes: methods at equal total bytes, on needles and on the decode of real text.

Every arm of one document shares one dense prefill; its K and V are written into the arm's own cache, so that only the
decode differs, which is all that EPS changes. Bytes are of a bfloat16 cache and count the summaries that scoring
reads. KL is measured token by token along the decode path, never by a teacher-forced prefill, which would not
exercise the gate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from eps_core.config import CacheSpec, EpsConfig, summary_group_bytes
from eps_core.interface import Backend, Decoder
from eps_core.selection import guards, num_groups
from eps_core.tasks import VALUE_DIGITS, corpus, filler, needle_document

BYTE_BUDGETS = (0.07, 0.10, 0.14, 0.20, 0.28)
# the methods of the table: each at its own group size, box and meanstd at their authors', and what is best possible
ARMS = (
    EpsConfig(method="jl"),
    EpsConfig(method="1pc"),
    EpsConfig(method="fd"),
    EpsConfig(method="box", group_tokens=16),
    EpsConfig(method="meanstd", group_tokens=16),
    EpsConfig(method="ball"),
    EpsConfig(method="moments"),
    EpsConfig(method="rq", group_tokens=4, bits=2),
    EpsConfig(method="rq", group_tokens=2, bits=1),
    EpsConfig(method="oracle", group_tokens=16),
    EpsConfig(method="oracle", group_tokens=128),
)


@dataclass(frozen=True)
class Cell:
    """One (method, context, byte budget): `kl_mean` in nats over `num_positions` positions, needles answered exactly.

    `bytes_ratio` is what was really read, K, V and summaries, over dense; None in the figures where the budget has no
    room for the guards, the summaries and one group more.
    """

    context_tokens: int
    method: str
    group_tokens: int
    bits: int | None
    dim: int | None
    byte_budget: float
    bytes_ratio: float | None
    kl_mean: float | None
    kl_max: float | None
    top1_agreement: float | None
    num_positions: int
    needles_answered: int | None
    num_needles: int
    needles_dense: int


def budget_groups(config: EpsConfig, length: int, head_dim: int, fraction: float) -> int | None:
    """Groups (guards included) whose bytes, with all summaries, are at most `fraction` of a dense bfloat16 read.
    None where not even one group beyond the guards fits."""
    kv_token_bytes = 2 * head_dim * 2
    n = num_groups(length, config.S)
    room = fraction * length * kv_token_bytes - n * summary_group_bytes(config, head_dim)
    groups = math.floor(room / (config.S * kv_token_bytes) + 1e-9)
    return groups if groups > int(guards(config, length).sum()) else None


def kl_divergence(dense_logits: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL(dense || gated) in nats over the last axis: [..]."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (dense_logits, logits))
    return (np.exp(p) * (p - q)).sum(axis=-1)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass
class Prompt:
    """A document after its dense prefill: K, V per layer [T, Hkv, D] (backend arrays) and the last token's logits."""

    length: int
    keys_values: list
    logits: np.ndarray


class Runner:
    """Runs one document at a time through a decoder, dense once and gated once per arm."""

    def __init__(self, backend: Backend, decoder: Decoder, device: str, prefill_chunk: int = 2048) -> None:
        self.backend, self.decoder, self.device, self.chunk = backend, decoder, device, prefill_chunk
        self.spec = decoder.spec  # type: ignore[attr-defined]

    def _cache(self, config: EpsConfig, num_tokens: int):
        units = -(-num_tokens // config.unit_tokens)
        spec = CacheSpec(self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim, units, "bfloat16")
        return self.backend.new_cache(spec, config, self.device), np.arange(units, dtype=np.int32)

    def prefill(self, tokens: list[int], room: int):
        """(dense cache, table, Prompt): the prompt once, densely."""
        cache, table = self._cache(EpsConfig(), len(tokens) + room)
        logits = np.zeros(0)
        for start in range(0, len(tokens), self.chunk):
            chunk = np.array(tokens[start : start + self.chunk])
            slots = np.arange(start, start + len(chunk))
            cache, logits = self.decoder.prefill(cache, chunk, slots, table, start + len(chunk))
        stored = [self.backend.read_kv(cache, layer, table, len(tokens)) for layer in range(self.spec.num_layers)]
        return cache, table, Prompt(len(tokens), stored, logits)

    def arm(self, prompt: Prompt, config: EpsConfig, room: int):
        """An arm's cache with the prompt's K and V and their summaries."""
        cache, table = self._cache(config, prompt.length + room)
        for layer, (k, v) in enumerate(prompt.keys_values):
            cache = self.backend.write_kv(cache, layer, k, v, np.arange(prompt.length))
        return cache, table

    def decode(self, cache, table, prompt: Prompt, forced: list[int] | None, num_tokens: int, first: np.ndarray):
        """`num_tokens` steps after the prompt: the forced tokens, or greedily from `first`, the prompt's logits.
        Returns (cache, logits [num_tokens, V] after each step, tokens fed, bytes read, dense bytes)."""
        logits, fed, got, read, dense = first, [], [], 0, 0
        for step in range(num_tokens):
            token = forced[step] if forced is not None else int(logits.argmax())
            length = prompt.length + step + 1
            cache, output = self.decoder.step(
                cache, np.array([token]), np.array([length - 1]), table[None], np.array([length])
            )
            logits = output.logits[0]
            fed.append(token)
            got.append(logits)
            read += sum(layer.kv_bytes_read + layer.summary_bytes_read for layer in output.layers)
            dense += self.spec.num_layers * self.spec.num_kv_heads * length * 4 * self.spec.head_dim
        return cache, np.array(got), fed, read, dense


def compare(
    backend: Backend,
    decoder: Decoder,
    encode: Callable[[str], list[int]],
    device: str,
    context_tokens: int,
    num_needles: int = 50,
    num_texts: int = 4,
    text_steps: int = 64,
    arms: tuple[EpsConfig, ...] = ARMS,
    byte_budgets: tuple[float, ...] = BYTE_BUDGETS,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Cell]:
    """The table at one context length, cell by cell. Held-out text; needles at evenly spread depths with 0 to 3
    distractors, answered greedily; real text decoded along its own bytes."""
    text = corpus(held_out=True)
    runner = Runner(backend, decoder, device)
    head_dim = runner.spec.head_dim
    configs = {}
    for arm in arms:
        for fraction in byte_budgets:
            groups = budget_groups(arm, context_tokens, head_dim, fraction)
            if groups is not None:
                configs[arm, fraction] = replace(arm, top_pages=groups)
    divergences: dict = {key: [] for key in configs}
    agreements: dict = {key: [] for key in configs}
    answered: dict = {key: 0 for key in configs}
    bytes_read: dict = {key: np.zeros(2) for key in configs}

    for index in range(num_texts):
        window = filler(text, context_tokens + text_steps, np.random.default_rng([seed, 1, index])).decode("ascii")
        tokens = encode(window)[: context_tokens + text_steps]
        cache, table, prompt = runner.prefill(tokens[:context_tokens], text_steps)
        _, dense, _, _, _ = runner.decode(cache, table, prompt, tokens[context_tokens:], text_steps, prompt.logits)
        for arm in arms:
            cache, table = runner.arm(prompt, arm, text_steps)
            for fraction in byte_budgets:
                if (arm, fraction) not in configs:
                    continue
                cache.config = configs[arm, fraction]  # only the budget differs: the summaries stay
                cache, got, _, read, full = runner.decode(
                    cache, table, prompt, tokens[context_tokens:], text_steps, prompt.logits
                )
                divergences[arm, fraction] += kl_divergence(dense, got).tolist()
                agreements[arm, fraction] += (dense.argmax(-1) == got.argmax(-1)).tolist()
                bytes_read[arm, fraction] += read, full
        progress(f"context {context_tokens}: text {index + 1} of {num_texts}")

    needles_dense = 0
    for index in range(num_needles):
        doc = needle_document(
            text, context_tokens - 1, seed + 3_000_000 + index, (index + 0.5) / num_needles, num_distractors=index % 4
        )
        answer = encode(doc.prompt + doc.answer)[-VALUE_DIGITS:]
        cache, table, prompt = runner.prefill(encode(doc.prompt), VALUE_DIGITS)
        _, _, fed, _, _ = runner.decode(cache, table, prompt, None, VALUE_DIGITS, prompt.logits)
        needles_dense += fed == answer
        # the first digit comes from the dense prefill: decode the last token of the prompt again, gated
        again = replace(prompt, length=prompt.length - 1)
        last = encode(doc.prompt)[-1]
        for arm in arms:
            cache, table = runner.arm(prompt, arm, VALUE_DIGITS)
            for fraction in byte_budgets:
                if (arm, fraction) not in configs:
                    continue
                cache.config = configs[arm, fraction]
                cache, got, _, _, _ = runner.decode(cache, table, again, [last], 1, prompt.logits)
                cache, _, fed, read, full = runner.decode(cache, table, prompt, None, VALUE_DIGITS, got[0])
                answered[arm, fraction] += fed == answer
                bytes_read[arm, fraction] += read, full
        progress(f"context {context_tokens}: needle {index + 1} of {num_needles}")

    for arm in arms:
        for fraction in byte_budgets:
            key = (arm, fraction)
            known = key in configs
            read, full = bytes_read[key] if known else (0, 1)
            yield Cell(
                context_tokens=context_tokens,
                method=arm.method,
                group_tokens=arm.S,
                bits=arm.bits if arm.method == "rq" else None,
                dim=arm.dim,
                byte_budget=fraction,
                bytes_ratio=float(read / full) if known else None,
                kl_mean=float(np.mean(divergences[key])) if known else None,
                kl_max=float(np.max(divergences[key])) if known else None,
                top1_agreement=float(np.mean(agreements[key])) if known else None,
                num_positions=num_texts * text_steps,
                needles_answered=answered[key] if known else None,
                num_needles=num_needles,
                needles_dense=needles_dense,
            )


def markdown(cells: list[Cell]) -> str:
    """The cells of one context length as the README's table: KL / needles answered at each byte budget."""
    budgets = sorted({cell.byte_budget for cell in cells})
    rows = [f"| method | S | {' | '.join(f'{b:.2f}' for b in budgets)} |", "|---|---|" + "---|" * len(budgets)]
    for name in dict.fromkeys((c.method, c.group_tokens, c.bits) for c in cells):
        label = f"`{name[0]}`" + (f" {name[2]} bit" if name[2] else "")
        entries = []
        for budget in budgets:
            cell = next(c for c in cells if (c.method, c.group_tokens, c.bits) == name and c.byte_budget == budget)
            entries.append("-" if cell.kl_mean is None else f"{cell.kl_mean:.4f} / {cell.needles_answered}")
        rows.append(f"| {label} | {name[1]} | {' | '.join(entries)} |")
    return "\n".join(rows)


def records(cells: list[Cell]) -> list[dict]:
    return [{"type": "cell", **asdict(cell)} for cell in cells]
