"""The check that a run makes before it trusts kernels: good ones pass, bad ones are named, all are compiled in it."""

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import pytest

from eps_core.config.cache import CacheConfig, CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode import session as session_module
from eps_core.decode.kernel_check import disagreement
from eps_core.decode.session import Session
from eps_core.errors import ConfigError

CONFIGS = [EpsConfig.of(), EpsConfig.of(method="rq"), EpsConfig.of(method="box", group_size=32)]


@pytest.mark.kernels("numba")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.cache_config.method)
def test_kernels_agree_with_arrays(target, config, dtype) -> None:
    backend, device = target
    for kernels in set(backend.usable_kernels(device)) - {"triton"}:  # slow in the interpreter; conformance has it
        spec = CacheSpec(3, 2, 32, 1, dtype)
        assert disagreement(backend, device, kernels, spec, 6, config, verified=True) is None


@pytest.mark.kernels("numba")
def test_codes_that_round_to_two_sides_are_no_fault(target) -> None:
    """Of thousands of groups of a large model in float32 a few have a key that lies between two codes."""
    backend, device = target
    for kernels in set(backend.usable_kernels(device)) - {"triton"}:
        spec = CacheSpec(1, 8, 64, 1, "float32")
        assert disagreement(backend, device, kernels, spec, 8, EpsConfig.of(method="rq")) is None


def broken(backend, name, change):
    """The backend with one function changed for every cache that does not use array operations."""
    real = getattr(backend, name)

    def function(first, *args, **more):
        result = real(first, *args, **more)
        return change(result) if first.kernels != "arrays" else result

    return function


def raises(result):
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("attend", lambda r: (r[0] * 1.5, r[1]), "dense outputs differ by"),
        ("attend", lambda r: (r[0], r[1] + 0.1), "dense lse differ by"),
        ("attend", lambda r: (r[0] * np.nan, r[1]), "dense outputs differ"),
        ("attend_rows", lambda r: replace(r, out=r.out * 1.5), "verified outputs differ by"),
        ("attend_rows", lambda r: replace(r, selected_lse=r.selected_lse + 0.1), "verified lse of what was selected"),
        (
            "score",
            lambda r: type(r)(r.estimate * 1.01, None, None, r.num_missing, kernels=r.kernels),
            "estimates differ",
        ),
        ("select", lambda r: type(r)(r.groups * 0 + 1, r.counts, r.common_counts, r.always_selected), "groups differ"),
        ("attend", raises, "RuntimeError: no such instruction"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, name, change, expected) -> None:
    import eps_cuda

    monkeypatch.setattr(eps_cuda, name, broken(eps_cuda, name, change))
    config = EpsConfig.of(method="rq")
    fault = disagreement(eps_cuda, "cpu", "numba", CacheSpec(1, 2, 32, 1), 4, config, verified=True)
    assert fault is not None and expected in fault


def test_a_second_process_is_told_of_all_that_the_check_compiles(monkeypatch) -> None:
    """Made without kernels, the calls are those of the check, of the same types."""
    import eps_cuda
    from eps_core.cpu import beside, openmp

    shape = "cpu", "numba", CacheSpec(1, 2, 32, 1, "bfloat16"), 4, EpsConfig.of(method="rq")
    assert disagreement(eps_cuda, *shape, verified=True) is None
    given, recorded, preparing = [], [], beside.preparing
    monkeypatch.setattr(beside, "preparing", lambda calls: given.append(calls) or preparing(calls))
    assert disagreement(eps_cuda, *shape, verified=True) is None
    monkeypatch.setattr(beside._state, "recorded", recorded)
    with preparing(given[0]), np.errstate(all="ignore"), suppress(Exception):
        given[0]()
    kernels = {(module, name, packed) for module, name, packed, _ in recorded}
    for module, name, packed, arg_types in recorded:
        kernel = getattr(importlib.import_module(module), name)
        assert arg_types in (openmp._PACKERS[kernel] if packed else kernel).overloads, (module, name, packed)
    names = ("place_rows", "build_units", "attend_rows", "attend", "score_units", "select_topk", "score_and_read")
    for name in names:
        assert {packed for _, one, packed in kernels if one == name} == {True, False}, name


@pytest.mark.parametrize("found", [None, "wrong"])
@pytest.mark.parametrize("named", ["auto", "numba"])
def test_only_kernels_that_nobody_named_fall_back(monkeypatch, capsys, named, found) -> None:
    checks = []
    monkeypatch.setattr(session_module, "disagreement", lambda *args: checks.append(args) or found)
    session = Session.open(None, "cuda", "cpu", kernels=named)
    line = "kernels numba failed their check on this device (wrong)"
    if found and named != "auto":
        with pytest.raises(ConfigError, match=r"wrong.*choose --kernels arrays"):
            session.cache(CacheConfig(), 64)
        return
    for _ in range(2):
        session.cache(CacheConfig(), 64)
    assert len(checks) == 1, "a cache that keeps the same is checked once"
    assert (session.kernels, session.fault) == (("arrays", line) if found else ("numba", None))
    assert capsys.readouterr().err == (f"{line}: array operations instead\n" if found else "")


@pytest.mark.parametrize("part", ["disagreement", "rows_disagreement"])
def test_kernels_are_checked_until_a_check_has_passed(monkeypatch, part) -> None:
    outcomes = [KeyboardInterrupt, ConfigError, ConfigError, None]
    session = Session.open(None, "cuda", "cpu", kernels="numba")
    session.load()

    def check(*args):
        outcome = outcomes.pop(0)
        if outcome is KeyboardInterrupt:
            raise KeyboardInterrupt
        return "wrong" if outcome else None

    monkeypatch.setattr(session_module, part, check)
    eight_bits = SpeculativeConfig("tokens", weights="8bit")
    while outcomes:
        expected = outcomes[0]
        with nullcontext() if expected is None else pytest.raises(expected):
            session.check_kernels(CacheConfig()) if part == "disagreement" else session.drafter(eight_bits)
    session.check_kernels(CacheConfig())
    session.drafter(eight_bits)


def test_kernels_that_fail_while_a_prompt_is_prefilled_decode_nothing(monkeypatch) -> None:
    monkeypatch.setattr(session_module, "disagreement", lambda *args: "wrong")
    session = Session.open(None, "cuda", "cpu")
    session.prefix([1, 2, 3])  # in a cache of a session of its own
    assert session.cache(CacheConfig(), 64)[0].kernels == "arrays"


def test_arrays_and_emulated_kernels_are_not_checked(monkeypatch) -> None:
    monkeypatch.setattr(session_module, "disagreement", lambda *args: "wrong")
    for kernels in ("arrays", "triton"):
        session = Session.open(None, "cuda", "cpu", kernels=kernels)
        session.check_kernels(CacheConfig())
        assert session.kernels == kernels and session.fault is None


@pytest.mark.parametrize("change", [
    lambda one: replace(one, out=one.out * 1.5), lambda one: replace(one, out=one.out * float("nan")),
    lambda one: replace(one, lse=one.lse + 0.1),
])  # fmt: skip
def test_a_whole_layer_that_is_not_its_parts_is_named(monkeypatch, change) -> None:
    import eps_cuda
    from eps_cuda.kernels.cpu import KERNELS

    kernel = KERNELS.attend_fused
    real = kernel.run
    shape = "cpu", "numba", CacheSpec(1, 2, 32, 1), 4, EpsConfig.of(method="rq")
    assert disagreement(eps_cuda, *shape) is None
    monkeypatch.setattr(kernel, "run", lambda *at: change(real(*at)))
    fault = disagreement(eps_cuda, *shape)
    assert fault is not None and "a whole layer and its parts differ" in fault


# which kernels a process asks its cache for after the check, and so may have to compile
AFTER_THE_CHECK = """
import json
import sys

import numpy as np
import torch

from eps_core.config.eps import EpsConfig
from eps_core.config.cache import CacheConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.cpu import compile, openmp
from eps_core.decode.session import Session
from eps_core.evaluation.runner import Document, decode
from eps_core.kv_cache.rows import Rows

openmp.LATE_NS = 10**12  # a busy machine must not bring helpers
session = Session.open(None, "cuda", "cpu", kv_dtype="bfloat16", kv_bits=json.loads(sys.argv[1]))
config, asked = EpsConfig.of(method="rq"), []
verify = SpeculativeConfig("tokens", weights="8bit")
session.load(verify)
session.check_kernels(CacheConfig())
session.check_kernels(config.cache_config, verified=True)
real = compile._Kept.load_overload
compile._Kept.load_overload = lambda self, *args: asked.append(self._name) or real(self, *args)
tokens = [1 + i % 90 for i in range(5000)]  # past what selection does alone
cache, pool = session.cache(config.cache_config, len(tokens) + 4)
decode(session, cache, pool, [Document(tokens, 4)], config.selection_config)
rows, spec = Rows.of(np.arange(4)[None], np.array([200]), np.array([3])), cache.spec
q, selected_mask = torch.ones(3, session.spec.num_heads, spec.head_dim), torch.ones(3, spec.num_kv_heads, 128) > 0
for query in (q, q.bfloat16()):
    for given in ((), (selected_mask,)):
        session.backend.attend_rows(cache, 0, query, rows, *given)
with session.decoder.model.scope():
    few = session.drafter(verify).model.for_rows("numba", 1)
    x = few.embed(np.array([1]))
    q, k, v = few.project(0, x, few.rotation(np.array([5])))
    few.logits(few.after_attention(0, x, q))
print(asked)
"""


def test_a_check_reads_no_weights_and_sessions_read_theirs_once(monkeypatch) -> None:
    loads = []
    real = session_module.load_decoder
    monkeypatch.setattr(session_module, "load_decoder", lambda *args: loads.append(args) or real(*args))
    session = Session.open(None, "cuda", "cpu")
    session.cache(CacheConfig(), 64)
    assert not loads
    session.prefix([1, 2, 3])
    session.load(SpeculativeConfig("tokens"))
    assert len(loads) == 1


@pytest.mark.parametrize("kv_bits", [(16, 16), (8, 4)])
def test_nothing_is_compiled_after_the_check(kv_bits: tuple[int, int]) -> None:
    """What compiles inside a timed step makes EPS look slow, silently. In a process of its own: another test's kernels
    would be in memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", AFTER_THE_CHECK, json.dumps(kv_bits)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stdout + done.stderr
