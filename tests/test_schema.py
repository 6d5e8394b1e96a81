"""Old names of settings, flags and JSONL keys are still taken, and nothing shows them."""

import json
from pathlib import Path

import pytest
from command import last, lines_of, outcome

from eps_core.cli.main import cli
from eps_core.config.eps import FLAT, EpsConfig
from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings, from_environment
from eps_core.io.resumable import difference
from eps_core.io.schema import KEYS, SCHEMA, SETTINGS, current
from eps_core.metrics.steps import STEP_KEYS, summarise
from eps_core.report.load import load_results

OLD_FLAGS = {
    "--eps-first-tokens": ("8", "num_sink_tokens"),
    "--eps-last-tokens": ("32", "num_recent_tokens"),
    "--eps-group-tokens": ("2", "group_size"),
    "--eps-unit-tokens": ("32", "mean_tokens"),
    "--eps-stages": ("0.25", "cascade"),
    "--eps-refine": ("0.25", "rescore"),
}


def test_every_new_name_is_in_use() -> None:
    assert set(SETTINGS.values()) <= set(FLAT) and not set(SETTINGS) & set(FLAT)
    written = set(STEP_KEYS) | set(summarise([])) | set(FLAT)
    elsewhere = {
        "sink_recent", "always_selected_ratio", "skipped_mass_bound_mean", "skipped_mass_true_mean",  # cells of grids
        "sparse_exceeds_last_cache",  # bench
        "eps_tokens_per_s",  # of engines
        "error_bound", "bounded_share", "bound_violations",  # replays, tables of bounds
    }  # fmt: skip
    assert set(KEYS.values()) - written == elsewhere and not set(KEYS) & written


def test_settings_of_schema_1_make_the_same_config() -> None:
    old = {"method": "rq", "first_tokens": 8, "last_tokens": 32, "refine": 0.25, "stages": [0.5], "group_tokens": 2}
    new = EpsConfig("rq", num_sink_tokens=8, num_recent_tokens=32, rescore=0.25, cascade=(0.5,), group_size=2)
    assert EpsConfig.of(**old) == EpsConfig.of(**from_environment({"EPS_METHOD": "rq"} | {
        f"EPS_{name.upper()}": json.dumps(value) for name, value in old.items() if name != "method"
    })) == new  # fmt: skip
    assert Settings.of(old).config == new


def test_head_modes_have_a_former_name() -> None:
    new = EpsConfig("rq", head_modes=(("sparse", "dense"),))
    old = new.to_dict() | {"head_modes": [["gate", "dense"]]}
    read = Settings.of(from_environment({"EPS_METHOD": "rq", "EPS_HEAD_MODES": json.dumps(old["head_modes"])})).config
    assert EpsConfig.of(**old) == read == new and read.to_dict()["head_modes"] == (("sparse", "dense"),)
    now = json.loads(json.dumps(new.to_dict()))
    assert difference("config", old, now) is None  # a run is resumed
    assert difference("config", old | {"head_modes": [["dense", "gate"]]}, now)


def test_an_old_name_replaces_and_two_names_of_one_setting_are_refused() -> None:
    config = EpsConfig("rq", num_recent_tokens=99).replace(last_tokens=7)
    assert config.selection_config.num_recent_tokens == 7
    for make in (lambda **both: EpsConfig.of("rq", **both), lambda **both: Settings.of({"method": "rq", **both})):
        with pytest.raises(ConfigError, match="last_tokens is the former name of num_recent_tokens"):
            make(last_tokens=7, num_recent_tokens=8)


@pytest.mark.parametrize("old", OLD_FLAGS)
def test_old_flags_are_taken_and_not_shown(old: str, tmp_path: Path) -> None:
    value, setting = OLD_FLAGS[old]
    path = tmp_path / "m.jsonl"
    args = ["run", "--backend", "numpy", "--prompt", "a b", "--max-new-tokens", 1, "--no-baseline", "--metrics", path]
    last(outcome([*map(str, args), "--method", "rq", old, value], tmp_path))
    first = lines_of(path)[0]
    assert first["schema"] == SCHEMA
    assert EpsConfig.of(**first["config"]).to_dict()[setting] != EpsConfig("rq").to_dict()[setting]
    names = {name for command in cli.commands.values() for param in command.params for name in param.opts}
    assert old not in names


def test_results_of_schema_1_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    old = {"mass_skipped_est": 0.5, "mass_skipped_cert": 0.75, "mass_skipped_true": 0.25, "pages_forced": 3}
    new = {"skipped_mass_mean": 0.5, "skipped_mass_bound_max": 0.75, "skipped_mass_true_max": 0.25}
    step = {"type": "step", **old}
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"type": "run", "config": {"refine": 0.5}}, step)))
    run_read = load_results([path]).runs[0]
    assert run_read["run"]["config"] == {"rescore": 0.5}
    assert run_read["steps"] == [{"type": "step", **new, "pages_always_selected": 3}]
    assert current({"settings": {"stages": 1}}) == {"settings": {"stages": 1}}  # of a KV format
    assert current([{"guards": {"escalations": 1}}]) == [{"sink_recent": {"extensions": 1}}]


@pytest.mark.parametrize("name", ["correction_tokens", "tail_tokens"])
def test_a_setting_that_is_gone_is_dropped_where_it_was_off_and_refused_where_it_was_on(
    name: str, tmp_path: Path
) -> None:
    path, new = tmp_path / "old.jsonl", json.loads(json.dumps(EpsConfig("rq").to_dict()))
    for off in (0, None):
        old = new | {name: off}
        assert EpsConfig.of(**old) == EpsConfig.of(**from_environment({"EPS_METHOD": "rq"})) == EpsConfig("rq")
        assert from_environment({f"EPS_{name.upper()}": json.dumps(off)}) == {}
        assert difference("config", old, new) is None
        path.write_text(json.dumps({"type": "run", "config": old}) + "\n" + '{"type": "step"}\n')
        assert load_results([path]).runs[0]["run"]["config"] == new
    on = new | {name: 64}
    path.write_text(json.dumps({"type": "run", "config": on}) + "\n")
    results = load_results([path])
    assert not results.runs and f"{name} 64: EPS has no skipped-mass correction" in results.notes[0]
    assert difference("config", on, new) == f"config.{name} differs (64 there, None now)"
    for read in (
        lambda: EpsConfig.of(**on),
        lambda: Settings.of(on),
        lambda: from_environment({f"EPS_{name.upper()}": "64"}),
    ):
        with pytest.raises(ConfigError, match=f"{name} 64: EPS has no skipped-mass correction") as error:
            read()
        assert "\n" not in str(error.value)


def test_means_of_other_bits_are_read_and_not_run(tmp_path: Path) -> None:
    """Every method wrote `mean_bits`: 4 where it has no codes."""
    new = json.loads(json.dumps(EpsConfig("rq").to_dict()))
    eight, four, box = new | {"mean_bits": 8}, new | {"mean_bits": 4}, EpsConfig("box").to_dict() | {"mean_bits": 4}
    assert EpsConfig.of(**eight) == EpsConfig("rq") and EpsConfig.of(**box) == EpsConfig("box")
    assert difference("config", eight, new) is None
    assert difference("config", four, new) == "config.mean_bits differs (4 there, None now)"
    (tmp_path / "old.jsonl").write_text(json.dumps({"type": "run", "config": four}) + "\n" + '{"type": "step"}\n')
    assert load_results([tmp_path / "old.jsonl"]).runs[0]["run"]["config"] == new
    for read in (
        lambda: EpsConfig.of(**four),
        lambda: Settings.of(four),
        lambda: from_environment({"EPS_METHOD": "rq", "EPS_MEAN_BITS": "4"}),
    ):
        with pytest.raises(ConfigError, match="mean_bits 4: means of codes have 8 bits"):
            read()
