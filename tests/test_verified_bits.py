"""Mode bits: logits and cache are the same to the last bit for every number of drafts, alone and in any batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from verified_runs import DRAWN, Drafter, Model, eps, prompt, saved

from eps_core.config.verify import Verify
from eps_core.decode import verified
from eps_core.decode.accept import Said
from eps_core.decode.generate import prefill
from eps_core.decode.verified import Verifier

CONFIG = eps("meanstd", budget=0.3)
PROMPTS = (prompt(45), prompt(22, 1), prompt(9, 2))
TOKENS, MOST = 9, 8


@dataclass
class Bits:
    """Of each prompt: what was said, the logits of each token [TOKENS, V], and K and V of each layer [T, Hkv, D]."""

    said: dict[int, list[int]]
    logits: dict[int, np.ndarray]
    kv: dict[int, list[np.ndarray]] = field(default_factory=dict)


def decode(model: Model, monkeypatch: pytest.MonkeyPatch, order: Sequence[int], gamma: int, change: Any = None) -> Bits:
    """The prompts of `order`, prefilled in that order."""
    (cache, pool, _), sequences = model.start([], CONFIG), {}
    for index in order:
        sequences[index], cache = prefill(model.decoder, cache, pool, PROMPTS[index][:-1], 64)
    seen: dict[int, list[np.ndarray]] = {index: [] for index in order}

    def accept(logits: np.ndarray, drafts: Any, sampling: Any, index: int, *more: Any) -> Said:
        said = right(logits, drafts, sampling, index, *more)
        seen[index] += list(logits[: len(said.tokens)].copy())
        return said

    right = verified.accept
    with monkeypatch.context() as patch:
        patch.setattr(verified, "accept", accept)
        drafter = Drafter(model, change) if change is not None else None
        run = Verifier(
            model.decoder,
            cache,
            pool,
            DRAWN,
            CONFIG.read,
            Verify("bits", gamma, MOST),
            drafter=drafter,  # type: ignore
        )
        fed, room, alive = {i: PROMPTS[i][-1] for i in order}, dict.fromkeys(order, TOKENS), dict(sequences)
        said: dict[int, list[int]] = {index: [] for index in order}
        while alive:
            record = run.round(alive, fed, room)
            for index, token in zip(record.sequences, record.tokens, strict=True):
                said[index].append(token)
                fed[index], room[index] = token, room[index] - 1
            alive = {index: one for index, one in alive.items() if room[index]}
    found = Bits(said, {index: np.stack(rows) for index, rows in seen.items()})
    for index, one in sequences.items():
        table = pool.table([one])[0]
        found.kv[index] = [
            np.asarray(model.backend.to_numpy(part), np.float32)
            for layer in range(model.spec.num_layers)
            for part in model.backend.read_kv(run.cache, layer, table, one.length)
        ]
    return found


def assert_same_bits(got: Bits, want: dict[int, Bits]) -> None:
    for index in got.said:
        one = want[index]
        assert got.said[index] == one.said[index]
        np.testing.assert_array_equal(got.logits[index], one.logits[index])
        for a, b in zip(got.kv[index], one.kv[index], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.kernels("numba")
@pytest.mark.parametrize(("kv_dtype", "kv_bits"), [("float32", (16, 16)), ("bfloat16", (16, 16)), ("bfloat16", (8, 4))])
def test_bits_do_not_depend_on_drafts_or_batch(
    target: Any, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, kv_bits: tuple[int, int]
) -> None:
    backend, device = target
    model = Model(backend, device, saved("llama2"), kv_dtype, units=16, kv_bits=kv_bits)
    want = {index: decode(model, monkeypatch, [index], 0) for index in range(3)}
    for order, gamma, change in (
        ([0], 1, None), ([0], 8, None), ([1], 3, np.negative), ([0, 1, 2], 0, None), ([0, 1, 2], 3, None),
        ([2, 0, 1], 8, None), ([1, 0], 1, np.negative),
    ):  # fmt: skip
        assert_same_bits(decode(model, monkeypatch, order, gamma, change), want)


def test_bits_count_what_they_read(target: Any) -> None:
    """Array operations read K and V once a row there: the record says so."""
    backend, device = target
    model = Model(backend, device, saved("llama2"), units=16)
    run = model.verified(PROMPTS[:1], CONFIG, TOKENS, DRAWN, Verify("bits", 3, MOST))
    for record, before in zip(run.records, np.cumsum([0] + [len(r.tokens) for r in run.records]), strict=False):
        rows = record.drafted[0] + 1
        first = len(PROMPTS[0]) + before
        token_bytes = model.spec.num_layers * model.spec.num_kv_heads * run.cache.spec.kv_token_bytes
        assert record.bytes_kv_verify == sum(range(first, first + rows)) * token_bytes
