"""Settings that were given and settings that follow from these: what `replace` keeps of a config."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eps_core.config.cache import CacheConfig
from eps_core.config.eps import FLAT, EpsConfig
from eps_core.config.speculative import SpeculativeConfig
from eps_core.decode.sampling import Sampling
from eps_core.errors import ConfigError
from eps_core.evaluation.request import RunRequest
from eps_core.eviction.config import EvictionConfig
from eps_core.integrations.layers import SparseAttention
from eps_core.integrations.plan import Plan
from eps_core.integrations.settings import Settings
from eps_cuda.integrations.paged import PagedRuntime
from eps_cuda.integrations.vllm.asked import Asked, fitted

RQ = EpsConfig.of(method="rq")
THRESHOLD = EpsConfig.of(method="box", policy="threshold", top_pages=5)

# values that differ in what follows from them, of every setting from which something does
VALUES = {
    "method": ["rq", "box", "moments", "off"],
    "mean_tokens": [32, 64],
    "cascade": [(), (0.25,), (0.5, 0.2)],
    "rescore": [0.0, 0.125, 0.5],
    "rq_bounds": [False, True],
    "group_size": [1, 2, 16, 32],
    "block_size": [16, 48],
    "budget": [0.05, 0.1],
    "budget_floor": [0, 1024],
    "num_recent_tokens": [8, 128],
}
FLATS = st.fixed_dictionaries({}, optional={name: st.sampled_from([None, *VALUES[name]]) for name in VALUES})


def made(flat: dict) -> EpsConfig | str:
    try:
        return EpsConfig.of(**flat)
    except ConfigError as error:
        return str(error)


@given(FLATS, FLATS)
def test_replaced_settings_are_as_if_they_had_been_given(first: dict, then: dict) -> None:
    config, want = made(first), made({**first, **then})
    if isinstance(config, str):
        return
    try:
        got = config.replace(**then)
    except ConfigError as error:
        assert str(error) == want
        return
    assert got == want, "nothing else follows"


@pytest.mark.parametrize(("config", "changed", "want"), [
    (RQ, {"rq_bounds": True}, {"mean_tokens": 64, "cascade": []}),
    (RQ, {"block_size": 96}, {"mean_tokens": 32}),
    (RQ, {"rescore": 0.6}, {"cascade": [0.6], "rescore": 0.6}),
    (RQ, {"budget": 0.05}, {"budget": 0.05, "budget_floor": 0}),
    (RQ, {"top_pages": 9}, {"top_pages": 9, "budget_floor": 0}),
    (RQ, {"method": "box"}, {"budget": 0.1, "budget_floor": 0, "group_size": 16, "num_recent_tokens": 128}),
    (RQ.replace(budget=0.2), {"method": "box"}, {"budget": 0.2}),
    (RQ.replace(budget=0.2), {"method": "box", "budget": None}, {"budget": 0.1}),
    (RQ.replace(mean_tokens=32), {"mean_tokens": None}, {"mean_tokens": 64, "cascade": [0.5]}),
    (THRESHOLD, {"policy": "topk"}, {"policy": "topk", "top_pages": 5}),
    (EpsConfig.of(method="box", group_blocks=2), {"group_size": 8}, {"group_size": 8}),
    (EpsConfig.of(method="box", group_blocks=2), {"block_size": 8}, {"group_size": 16}),
    (EpsConfig.of(method="off", mean_tokens=64), {"method": "rq"}, {"mean_tokens": 64, "budget": 0.1}),
], ids=str)  # fmt: skip
def test_what_followed_follows_again(config: EpsConfig, changed: dict, want: dict) -> None:
    assert want.items() <= config.replace(**changed).to_dict().items()


@pytest.mark.parametrize(("config", "changed", "words"), [
    (EpsConfig.of(method="rq", mean_tokens=32), {"method": "box"}, "eps-mean-tokens 32 is for rq codes"),
    (EpsConfig.of(method="rq", cascade=(0.25,)), {"method": "box"}, "eps-cascade reads rq codes"),
    (EpsConfig.of(**RQ.to_dict()), {"method": "box"}, "eps-mean-tokens 64 is for rq codes"),
    (EpsConfig.over(RQ.cache_config, RQ.selection_config), {"method": "box"}, "eps-mean-tokens 64 is for rq codes"),
], ids=str)  # fmt: skip
def test_what_was_given_is_kept_and_refused_where_it_does_not_fit(config, changed: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.replace(**changed)


@pytest.mark.parametrize(("flat", "why"), [
    ({"block_size": 80}, "does not fit whole into the 80 tokens of a page: use pages of 64 tokens"),
    ({"group_size": 64}, "is no multiple of the group of 64 tokens beyond itself: use smaller groups"),
], ids=str)  # fmt: skip
def test_a_default_that_does_not_fit_is_refused(flat: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=f"eps-mean-tokens 64 {why}"):
        EpsConfig.of(**{"method": "rq", **flat})


def test_blocks_of_vllm_that_hold_no_unit_are_refused() -> None:
    for block_tokens in (32, 64, 128):
        config = fitted(Asked({"method": "rq"}, "rows"), block_tokens).config
        assert block_tokens % config.cache_config.unit_tokens == 0
        for own in (config, config.for_device("cuda")):
            assert own.cache_config.mean_tokens == min(block_tokens, 64)
    with pytest.raises(ConfigError, match="blocks of 16 tokens are no multiple of EPS's units of 64"):
        fitted(Asked({"method": "rq"}, "rows"), 16)


@given(FLATS)
def test_what_was_given_makes_no_config_another_one(flat: dict) -> None:
    config = made(flat)
    if isinstance(config, str) or not config.cache_config.enabled:
        return  # off takes what no method would, and keeps none of it
    back = EpsConfig.of(**json.loads(json.dumps(config.to_dict())))
    over = EpsConfig.over(config.cache_config, config.selection_config)
    for other in (back, over, pickle.loads(pickle.dumps(config)), copy.copy(config)):
        assert other == config and hash(other) == hash(config) and repr(other) == repr(config)
        assert other.to_dict() == config.to_dict() and other.replace() == config


def test_a_list_that_was_given_is_not_followed_any_further() -> None:
    cascade = [0.5, 0.2]
    config = EpsConfig.of(method="rq", cascade=cascade)
    cascade.clear()
    assert config.replace(budget=0.1).selection_config.cascade == (0.5, 0.2)


@given(FLATS)
def test_a_config_is_a_dataclass_of_its_settings(flat: dict) -> None:
    config = made(flat)
    if isinstance(config, str):
        return
    named = EpsConfig(**flat)
    assert named == config == dataclasses.replace(config) and named.given == config.given
    assert all(getattr(config, name) == flat.get(name) for name in FLAT if name != "method")


def test_a_config_of_a_store_and_a_read_keeps_them() -> None:
    config = EpsConfig.over(CacheConfig("rq", mean_tokens=32))
    assert config.replace(budget=0.2).cache_config == config.cache_config


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"keep": EvictionConfig("rkv", 0.5), "cache_dir": Path("kept")},
            "--kv-evict and --cache-dir exclude each other",
        ),
        ({"keep": EvictionConfig("rkv", 0.5), "audit_every": 2}, "--kv-evict and --audit-every exclude each other"),
        ({"audit_every": -1}, "audit-every -1"),
        ({"verify": SpeculativeConfig("tokens"), "kl": True}, "--eps-verify moves none"),
        ({"verify": SpeculativeConfig("tokens"), "audit_every": 2}, "audits every draft"),
        ({"kl": True, "baseline": False}, "no --no-baseline"),
        ({"config": EpsConfig(), "baseline": False}, "leaves nothing to run"),
        ({"config": EpsConfig(), "audit_every": 2}, "choose a --method"),
    ],
)
def test_a_request_refuses_what_the_command_line_does(asked: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        RunRequest(**{"config": EpsConfig.of("rq"), "sampling": Sampling(), **asked}).check()
    assert "\n" not in str(error.value)


def test_an_engine_refuses_audits_of_verified_decoding() -> None:
    with pytest.raises(ConfigError, match="audits every draft as it is: drop audit-every"):
        Settings.of({"method": "rq", "verify": "tokens", "audit_every": 4})


def test_what_was_asked_is_told_without_what_followed() -> None:
    """A server fits the tokens of a mean that merely followed to its blocks, and refuses blocks that hold none that was
    given."""
    settings = Settings.of({"method": "rq", "cascade": [0.5], "audit_every": 4})
    named = {"method": "rq", "cascade": [0.5], "audit_every": 4, "kernels": "auto"}
    assert settings.flat(asked=True) == named
    assert Settings.of(settings.flat(asked=True)) == Settings.of(settings.flat()) == settings
    assert settings.flat()["mean_tokens"] == 64
    assert fitted(Asked(settings.flat(asked=True), "rows"), 32).config.cache_config.mean_tokens == 32
    with pytest.raises(ConfigError, match="no multiple of EPS's units of 64"):
        fitted(Asked(settings.flat(), "rows"), 32)


@pytest.mark.parametrize(("first", "live"), [
    ({}, {"budget": 0.02}), ({}, {"num_sink_tokens": 0}), ({}, {"rescore": 0.9}), ({"budget": 0.2}, {"budget": None}),
    ({"audit_every": 4}, {"policy": "threshold", "top_pages": 9}),
], ids=str)  # fmt: skip
def test_live_settings_of_a_server_are_as_if_it_had_started_with_them(first: dict, live: dict) -> None:
    runtime = PagedRuntime()
    runtime.settings = Settings.of({"method": "rq", **first})
    runtime.sparse = SparseAttention(runtime.backend, runtime.settings.config, Plan((0,), {}))
    for flat in (live, {"min_context": 64}):
        runtime.set(**flat)
    want = Settings.of({"method": "rq", **first, **live, "min_context": 64})
    assert runtime.settings == want and runtime.sparse.config == want.config
