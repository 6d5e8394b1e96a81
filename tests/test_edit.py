"""Edited sequences: K, V, tokens and summaries are those of rows moved and turned by hand, and nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from eps_core.config.eps import EpsConfig
from eps_core.decode import edit
from eps_core.decode.forward import load_decoder
from eps_core.decode.generate import extend, generate, prefill
from eps_core.decode.model import read_spec
from eps_core.decode.prefix import Prefix
from eps_core.decode.rope import inverse_frequencies
from eps_core.decode.sampling import Sampling
from eps_core.decode.session import Session
from eps_core.errors import ConfigError
from eps_core.load import backend_name

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 2
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 256, 75)]
OTHER = [int(token) for token in np.random.default_rng(6).integers(0, 256, 21)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save_model(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return model


class Desk:
    """A session, a cache, its pool and one sequence of `TOKENS`."""

    def __init__(
        self, target: tuple, model: Path, config: EpsConfig | None = None, room: int = 400, **more: Any
    ) -> None:  # fmt: skip
        backend, device = target
        self.session = Session.open(str(model), backend_name(backend), device, "float32", kernels="arrays", **more)
        self.config = config or EpsConfig()
        self.cache, self.pool = self.session.cache(self.config.store, room)
        self.sequence, self.cache = prefill(self.session.decoder, self.cache, self.pool, TOKENS, 30)

    def do(self, what: Callable[..., Any], *args: Any) -> None:
        self.cache = what(self.session.decoder, self.cache, self.pool, self.sequence, *args)
        self.pool.check()

    def rows(self, sequence: Any = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """K, V [T, Hkv, D] float64 of each layer."""
        sequence = sequence or self.sequence
        (table,), eps = self.pool.table([sequence]), self.session.backend
        layers = range(self.session.spec.num_layers)
        pairs = [eps.read_kv(self.cache, layer, table, sequence.length) for layer in layers]
        return [tuple(eps.to_numpy(one).astype(np.float64) for one in pair) for pair in pairs]  # type: ignore[misc]

    def computed(self, tokens: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same of a prefill of tokens alone."""
        prefix = self.session.prefix(tokens)
        to_numpy = self.session.backend.to_numpy
        return [(to_numpy(k).astype(np.float64), to_numpy(v).astype(np.float64)) for k, v in prefix.keys_values]

    def segment(self, tokens: list[int]) -> edit.Segment:
        prefix = self.session.prefix(tokens)
        return edit.Segment(prefix.tokens, prefix.keys_values)


def turned(k: np.ndarray, shifts: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Keys [T, H, D] turned by shifts [T] positions: pairs as complex numbers."""
    half = k.shape[-1] // 2
    pairs = (k[..., :half] + 1j * k[..., half:]) * np.exp(1j * shifts[:, None] * frequencies)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


# what is done, and where each token of the result was: an index of TOKENS, or (index of OTHER,)
HERE = list(range(len(TOKENS)))
NEW: list[Any] = [(i,) for i in range(len(OTHER))]
EDITS: dict[str, tuple[str, tuple, list[Any]]] = {
    "cut": ("cut", (20, 37), HERE[:20] + HERE[37:]),
    "cut-units": ("cut", (16, 48), HERE[:16] + HERE[48:]),
    "cut-start": ("cut", (0, 5), HERE[5:]),
    "cut-end": ("cut", (60, 75), HERE[:60]),
    "cut-all": ("cut", (0, 75), []),
    "cut-nothing": ("cut", (9, 9), HERE),
    "splice": ("splice", (33,), HERE[:33] + NEW + HERE[33:]),
    "splice-at-start": ("splice", (0,), NEW + HERE),
    "splice-at-end": ("splice", (75,), HERE + NEW),
    "splice-over": ("splice", (16, 21), HERE[:16] + NEW + HERE[37:]),
    "splice-over-more": ("splice", (40, 30), HERE[:40] + NEW + HERE[70:]),
    "move-on": ("move", (10, 25, 50), HERE[:10] + HERE[25:50] + HERE[10:25] + HERE[50:]),
    "move-to-end": ("move", (3, 9, 75), HERE[:3] + HERE[9:] + HERE[3:9]),
    "move-back": ("move", (48, 64, 17), HERE[:17] + HERE[48:64] + HERE[17:48] + HERE[64:]),
    "move-nowhere": ("move", (48, 64, 64), HERE),
}


def done(desk: Desk, name: str) -> list[Any]:
    what, args, order = EDITS[name]
    desk.do(getattr(edit, what), *([desk.segment(OTHER)] if what == "splice" else []), *args)
    return order


@pytest.mark.parametrize("name", EDITS)
def test_rows_are_moved_and_turned(target: tuple, models: Any, name: str) -> None:
    desk = Desk(target, models("llama3.1-tied-sharded"))
    before, other = desk.rows(), desk.computed(OTHER)
    order = done(desk, name)
    want_tokens = [OTHER[i[0]] if isinstance(i, tuple) else TOKENS[i] for i in order]
    assert desk.sequence.tokens == want_tokens
    was = np.array([i[0] if isinstance(i, tuple) else i for i in order], np.int64)
    frequencies = inverse_frequencies(desk.session.spec)
    for (k, v), old, new in zip(desk.rows(), before, other, strict=True):
        rows = [[(new if isinstance(i, tuple) else old)[part][was[n]] for n, i in enumerate(order)] for part in (0, 1)]
        keys, values = (np.array(one).reshape(-1, *k.shape[1:]) for one in rows)
        np.testing.assert_allclose(k, turned(keys, np.arange(len(was)) - was, frequencies), atol=2e-5)
        np.testing.assert_array_equal(v, values)
    if not order:
        return
    fresh = desk.computed(want_tokens)
    for mine, recomputed in zip(desk.rows()[0], fresh[0], strict=True):  # the first layer sees a token and its place
        np.testing.assert_allclose(mine, recomputed, atol=5e-5)
    if was.tolist() != sorted(set(was.tolist())) or len(was) < 60:
        assert np.abs(desk.rows()[1][0] - fresh[1][0]).max() > 1e-2 or order == HERE[:60]  # deeper ones, what was read


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_key_is_turned_as_if_it_had_stood_there(target: tuple, models: Any, name: str) -> None:
    """Whatever the scaling of RoPE, its temperature included, which is in the cached key already."""
    backend, device = target
    path = models(name)
    spec = read_spec(path)
    model = load_decoder(backend, path, spec, "float32", device).model
    x = np.random.default_rng(0).standard_normal((6, spec.hidden_size)).astype(np.float32)
    x = backend.from_numpy(x, "float32", device)
    positions = np.array([0, 1, 7, 63, 300, 41])
    for shift in (1, -1, 40, 5000):
        shifts = np.full(6, shift) if shift > 0 else -np.minimum(positions, 1)
        with model.scope():
            _, here, _ = model.project(0, x, model.rotation(positions))
            _, there, _ = model.project(0, x, model.rotation(positions + shifts))
            moved = model.reposition(here, shifts)
            back = model.reposition(moved, -shifts)
        here, there, moved, back = (backend.to_numpy(one).astype(np.float64) for one in (here, there, moved, back))
        scale = np.abs(here).max()
        assert np.abs(moved - there).max() < 2e-6 * scale and np.abs(back - here).max() < 2e-6 * scale
        assert np.abs(there - here).max() > 0.1 * scale


@pytest.mark.parametrize("more", [{"kv_bits": (8, 8)}, {"kv_dtype": "bfloat16"}], ids=["codes", "bfloat16"])
@pytest.mark.parametrize("name", ["cut", "move-back"])
def test_what_is_turned_in_a_small_cache_is_rounded_once_more(target: tuple, models: Any, name: str, more: Any) -> None:
    desk = Desk(target, models("llama2"), **more)
    before, was = desk.rows(), np.array(done(desk, name))
    frequencies = inverse_frequencies(desk.session.spec)
    for (k, v), (old_k, old_v) in zip(desk.rows(), before, strict=True):
        want = turned(old_k[was], np.arange(len(was)) - was, frequencies)
        # half a step of a code of the largest number in the row, or of its own 8 bits, and room for float16 scales
        steps = (
            np.abs(want).max(axis=-1, keepdims=True) / 127 * 0.51 + 1e-6 if "kv_bits" in more else np.abs(want) / 255
        )
        assert (np.abs(k - want) <= steps + 1e-3 * np.abs(want).max()).all()
        np.testing.assert_array_equal(v, old_v[was])


CONFIGS = {
    "box": {"method": "box", "group_tokens": 4, "first_tokens": 4, "last_tokens": 8, "budget": 0.3},
    "jl": {"method": "jl", "group_tokens": 8, "first_tokens": 4, "last_tokens": 8, "budget": 0.3},
    "rq": {"method": "rq", "mean_tokens": 32, "first_tokens": 4, "last_tokens": 8, "budget": 0.2},
    "rq-bounds": {
        "method": "rq", "mean_tokens": 32, "bound_bits": 8, "first_tokens": 4, "last_tokens": 8, "budget": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["cut", "splice", "move-back", "splice-over"])
@pytest.mark.parametrize("config", CONFIGS)
def test_summaries_follow(target: tuple, models: Any, config: str, name: str) -> None:
    """Gated steps read what they read where the same rows were written anew."""
    desk = Desk(target, models("llama2"), EpsConfig.of(**CONFIGS[config]))
    done(desk, name)
    session, layers = desk.session, range(desk.session.spec.num_layers)
    (table,) = desk.pool.table([desk.sequence])
    rows = [session.backend.read_kv(desk.cache, layer, table, desk.sequence.length) for layer in layers]
    prefix = Prefix(list(desk.sequence.tokens), rows)
    cache, pool = session.cache(desk.config.store, 400)
    sequence, cache = prefix.into(session.backend, cache, pool)
    found = []
    for one, its_pool, its_sequence in ((desk.cache, desk.pool, desk.sequence), (cache, pool, sequence)):
        steps = generate(
            session.decoder, one, its_pool, [[*its_sequence.tokens, 7]], 4, Sampling(), desk.config.read,
            written=[its_sequence], keep_logits=True, forced_tokens=[[1, 2, 3, 4]],
        )  # fmt: skip
        found.append([(step.logits, step.visited_by_head.tolist(), step.mass_skipped_est) for step in steps])
    for mine, fresh in zip(*found, strict=True):
        assert mine[1] == fresh[1] and mine[2] == pytest.approx(fresh[2], abs=1e-6) and mine[2] > 0
        np.testing.assert_allclose(mine[0], fresh[0], atol=1e-4)


@pytest.mark.parametrize("name", ["cut", "splice", "move-on", "cut-start"])
def test_forks_keep_what_they_had(target: tuple, models: Any, name: str) -> None:
    desk = Desk(target, models("llama2"), EpsConfig.of(**CONFIGS["box"]))
    fork = desk.pool.fork(desk.sequence)
    before = desk.rows()
    done(desk, name)
    assert fork.tokens == TOKENS
    for (k, v), (old_k, old_v) in zip(desk.rows(fork), before, strict=True):
        np.testing.assert_array_equal(k, old_k)
        np.testing.assert_array_equal(v, old_v)
    for sequence in (fork, desk.sequence):
        desk.pool.free(sequence)
    desk.pool.check()
    assert desk.pool.num_free == desk.pool.num_units


def test_what_is_edited_is_never_found_by_its_tokens(models: Any) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"))
    desk.do(edit.cut, 20, 37)
    desk.do(extend, OTHER)
    fork = desk.pool.fork(desk.sequence)
    tokens = list(fork.tokens)
    assert desk.pool.open([*tokens, 1])[1] == 16  # a unit ends before the cut
    desk.pool.truncate(fork, 20)  # nothing edited is left
    desk.cache = extend(desk.session.decoder, desk.cache, desk.pool, fork, tokens[20:])
    shared, number = desk.pool.open([*tokens, 1])
    assert number == len(tokens) // 16 * 16 and list(shared.table) == list(fork.table)[: number // 16]
    desk.pool.check()


def test_an_erratum_keeps_every_page(models: Any) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"))
    before, table = desk.rows(), list(desk.sequence.table)
    desk.do(extend, OTHER, 8)
    assert list(desk.sequence.table)[: len(table)] == table
    want = desk.computed(TOKENS + OTHER)
    for (k, v), (old_k, old_v), (new_k, new_v) in zip(desk.rows(), before, want, strict=True):
        np.testing.assert_array_equal(k[:75], old_k)
        np.testing.assert_array_equal(v[:75], old_v)
        np.testing.assert_allclose(k, new_k, atol=1e-9)
        np.testing.assert_allclose(v, new_v, atol=1e-9)
    assert desk.pool.open([*TOKENS, *OTHER])[1] == 80


def test_a_segment_is_a_copy_at_its_place(models: Any) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"))
    taken = edit.segment(desk.session.decoder, desk.cache, desk.pool, desk.sequence, 12, 40)
    before = desk.rows()
    desk.do(edit.cut, 12, 40)
    desk.do(edit.splice, taken, 12)
    assert desk.sequence.tokens == TOKENS and (taken.tokens, taken.start) == (TOKENS[12:40], 12)
    for (k, v), (old_k, old_v) in zip(desk.rows(), before, strict=True):
        np.testing.assert_allclose(k, old_k, atol=1e-6)
        np.testing.assert_array_equal(v, old_v)


@pytest.mark.parametrize(
    ("what", "args", "words"),
    [
        ("cut", (5, 3), "tokens 5 to 3 are no span of a sequence of 75"),
        ("cut", (-1, 3), "no span"),
        ("cut", (70, 76), "no span"),
        ("move", (10, 20, 15), "cannot move to 15, which is among them"),
        ("move", (10, 20, 76), "no span"),
        ("splice", (76,), "no span"),
        ("splice", (70, 6), "no span"),
        ("splice", (10,), "units of 16 tokens"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(models: Any, what: str, args: tuple, words: str) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"), room=80)
    before, table = desk.rows(), list(desk.sequence.table)
    with pytest.raises(ConfigError, match=words):
        desk.do(getattr(edit, what), *([desk.segment(OTHER)] if what == "splice" else []), *args)
    assert desk.sequence.tokens == TOKENS and list(desk.sequence.table) == table
    for (k, v), (old_k, old_v) in zip(desk.rows(), before, strict=True):
        np.testing.assert_array_equal(k, old_k)
        np.testing.assert_array_equal(v, old_v)
    desk.pool.check()


def test_no_text_becomes_longer_than_the_model_holds(models: Any) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"), room=800)
    with pytest.raises(ConfigError, match="exceeds the model's context of 512"):
        desk.do(edit.splice, desk.segment(OTHER * 22), 10)
    assert desk.sequence.tokens == TOKENS


def test_an_edit_within_a_full_pool_uses_the_pages_that_it_gives_up(models: Any) -> None:
    from eps_core import oracle

    desk = Desk((oracle, "cpu"), models("llama2"), room=80)
    desk.do(edit.move, 3, 9, 60)
    desk.do(edit.splice, desk.segment(OTHER[:5]), 2)
    assert desk.sequence.length == 80 and not desk.pool.num_free
