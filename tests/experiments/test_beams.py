"""Beam search equals a search that recomputes every text, and returns all forked pages to the pool."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import outcome, program

from eps_core.config.eps import EpsConfig
from eps_core.decode.generate import generate, tokens_of
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from experiments.beams.run import Searched, room, search

MODEL = "llama2"
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 3
RAGGED = [TEXT[:50], "xyz", TEXT[3:131]]
CONFIGS = {
    "dense": EpsConfig(),
    "box": EpsConfig.of(method="box", group_size=4, num_sink_tokens=4, num_recent_tokens=8, budget=0.3),
    "rq": EpsConfig.of(method="rq", num_sink_tokens=4, num_recent_tokens=8, budget=0.3),
}
STEPS = 9


def opened(model: Path) -> Session:
    return Session.open(model, "cuda", "cpu", "float32", kernels="arrays")


def searched(
    session: Session, prompts: list[list[int]], width: int, config: EpsConfig, stop: tuple[int, ...] = (),
    steps: int = STEPS,
) -> tuple[Searched, list[Any]]:  # fmt: skip
    """What a search finds, and its records; every unit must come back."""
    cache, pool = session.cache(
        config.cache_config,
        [n for prompt in prompts for n in room(len(prompt), steps, width, config.cache_config.unit_tokens)],
    )
    found, records = Searched(), []
    for record in search(session.decoder, cache, pool, prompts, steps, width, found, config.selection_config, stop):
        pool.check()
        records.append(record)
    pool.check()
    assert pool.num_free == pool.num_units and not any(pool.ref_counts) and not pool.num_live
    return found, records


def following(session: Session, prompt: list[int], text: list[int], config: EpsConfig) -> np.ndarray:
    """Log probabilities [V] of the token after a text, of a prompt decoded alone and again."""
    cache, pool = session.cache(config.cache_config, len(prompt) + len(text) + 1)
    steps = generate(
        session.decoder, cache, pool, [prompt], len(text) + 1, Sampling(), config.selection_config,
        forced_tokens=[[*text, 0]], keep_logits=True,
    )  # fmt: skip
    logits = list(steps)[-1].logits[0].astype(np.float64)
    return logits - logits.max() - math.log(sum(math.exp(x - logits.max()) for x in logits))


def brute_force(
    session: Session, prompt: list[int], width: int, config: EpsConfig, stop: tuple[int, ...], steps: int
) -> list[tuple[float, list[int]]]:
    """(score, tokens), best first, by nothing but texts and their log probabilities."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(steps):
        candidates = [
            (total + p, [*text, token])
            for total, text in live
            for token, p in enumerate(following(session, prompt, text, config))
        ]
        candidates.sort(key=lambda one: -one[0])
        candidates = candidates[: width * (1 + max(len(stop), 1))]
        ended += [one for rank, one in enumerate(candidates) if one[1][-1] in stop and rank < width]
        live = [one for one in candidates if one[1][-1] not in stop][:width]
        if len(ended) >= width:
            live = []
            break
    every = [(total / len(text), text) for total, text in ended + live]
    return sorted(every, key=lambda one: -one[0])[:width]


@pytest.mark.parametrize("name", CONFIGS)
def test_it_finds_what_a_search_over_whole_texts_finds(model: Path, name: str) -> None:
    session, config, width = opened(model), CONFIGS[name], 3
    (prompt,) = session.encode_prompts([RAGGED[0]], STEPS)
    free = brute_force(session, prompt, width, config, (), 4)
    # a token that some of the texts that go on would end with, so that texts of two lengths compete
    for stop in ((free[-1][1][2],), (free[0][1][1], free[-1][1][3])):
        want = brute_force(session, prompt, width, config, stop, 5)
        found, _ = searched(session, [prompt], width, config, stop, 5)
        (got,) = found.hypotheses
        assert [text.tokens for text in got] == [text for _, text in want]
        np.testing.assert_allclose([text.score for text in got], [score for score, _ in want], atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_beam_is_greedy_decoding(model: Path, name: str) -> None:
    session, config = opened(model), CONFIGS[name]
    prompts = session.encode_prompts(RAGGED, 20)
    cache, pool = session.cache(config.cache_config, [len(prompt) + 20 for prompt in prompts])
    free = tokens_of(
        list(generate(session.decoder, cache, pool, prompts, 20, Sampling(), config.selection_config)), len(prompts)
    )
    for stop in ((), (free[0][7], free[2][3])):
        cache, pool = session.cache(config.cache_config, [len(prompt) + 20 for prompt in prompts])
        records = list(generate(session.decoder, cache, pool, prompts, 20, Sampling(), config.selection_config, stop))
        found, mine = searched(session, prompts, 1, config, stop, 20)
        assert [texts[0].tokens for texts in found.hypotheses] == tokens_of(records, len(prompts))
        assert [r.tokens for r in mine] == [r.tokens for r in records]
        assert [r.lengths for r in mine] == [r.lengths for r in records]
        assert sum(r.bytes_kv_read_est for r in mine) == sum(r.bytes_kv_read_est for r in records)
        assert set(found.units_copied) == {0}


def test_the_command_prints_what_it_found(model: Path, tmp_path: Path) -> None:
    line = ["--model", str(model), "--backend", "numpy", "--prompt", TEXT, "--beams", "3", "--max-new-tokens", "5",
            "--method", "box"]  # fmt: skip
    done = outcome(line, tmp_path, main=program("beams"))
    assert done.code in (None, 0), done.err
    printed, session = json.loads(done.out), Session.open(model, "numpy")
    (prompt,) = session.encode_prompts([TEXT], 5)
    for side, config in (("dense", EpsConfig()), ("eps", EpsConfig.of(method="box"))):
        found, _ = searched(session, [prompt], 3, config, session.spec.eos_token_ids, 5)
        texts = printed[side]["hypotheses"]
        assert [one["tokens"] for one in texts] == [one.tokens for one in found.hypotheses[0]]
        assert printed[side]["units_copied"] == sum(found.units_copied)
    assert printed["dense"]["bytes_ratio"] == 1.0
