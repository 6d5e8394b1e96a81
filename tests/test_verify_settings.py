"""Settings of verified decoding: one line for each mistake, which names the flag."""

from typing import Any

import pytest
from verified_runs import eps

from eps_core.cli.speculative import speculative_of
from eps_core.config.eps import EpsConfig
from eps_core.config.selection import SelectionConfig
from eps_core.config.speculative import DRAFT_BUDGET, DRAFT_BUDGET_FLOOR, SpeculativeConfig
from eps_core.errors import ConfigError
from eps_core.metrics.terminal import describe_verify


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "on"}, "eps-verify 'on' is unknown: choose one of off, tokens"),
        ({"weights": "2bit"}, "eps-draft-weights '2bit' is unknown: choose one of full, 8bit, 4bit"),
        ({"draft": None, "most": 0}, "eps-draft-most 0 is outside 1 to 64 tokens"),
        ({"draft": None, "most": 65}, "eps-draft-most 65 is outside 1 to 64 tokens"),
        ({"draft": -1}, r"eps-draft -1 is outside 0 to 16 \(eps-draft-most\) tokens: or use auto"),
        ({"draft": 17}, r"eps-draft 17 is outside 0 to 16"),
        ({"draft": 4, "most": 3}, r"eps-draft 4 is outside 0 to 3"),
        # of another kind
        ({"draft": 1.5}, "draft"),
        ({"draft": "4"}, "draft"),
        ({"most": True}, "most"),
        ({"mode": 1}, "mode"),
        ({"weights": None}, "weights"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_its_flag(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        SpeculativeConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "verify", "drawn", "said"),
    [
        (EpsConfig.of(), SpeculativeConfig("tokens"), {}, "method off is dense: use rq"),
        (
            eps("box"),
            SpeculativeConfig("tokens"),
            {"temperature": 0.5, "sample_by": "cdf"},
            "sample-by cdf draws otherwise",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(
    config: EpsConfig, verify: SpeculativeConfig, drawn: dict, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        verify.check(config, **drawn)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("eps-")


def test_what_can_be_verified_passes() -> None:
    SpeculativeConfig("tokens").check(eps("box"))
    SpeculativeConfig("tokens").check(eps("box"), 0.0, "cdf")  # greedy draws nothing
    SpeculativeConfig("tokens").check(eps("rq"), 1.0, "gumbel")
    SpeculativeConfig().check(EpsConfig.of(), 1.0, "cdf")  # off


def test_the_last_tokens_of_a_draft_cover_all_drafts() -> None:
    read = SelectionConfig(num_recent_tokens=8)
    assert SpeculativeConfig("tokens", most=16).draft_selection(read).num_recent_tokens == 17
    assert SpeculativeConfig("tokens", 4, 4).draft_selection(read) == read


def test_a_draft_needs_no_safe_budget() -> None:
    """A floor keeps short contexts safe where nothing verifies what was said."""
    verify = SpeculativeConfig("tokens")
    usual = EpsConfig.of(method="rq").selection_config
    assert (usual.budget, usual.budget_floor) == (0.1, 1024)
    drafts = verify.draft_selection(usual)
    assert (drafts.budget, drafts.budget_floor) == (DRAFT_BUDGET, DRAFT_BUDGET_FLOOR)
    for given in ({"budget": 0.2}, {"budget": 900}, {"budget_floor": DRAFT_BUDGET_FLOOR}):
        own = EpsConfig.of(method="rq", **given).selection_config
        drafts = verify.draft_selection(own)
        assert (drafts.budget, drafts.budget_floor) == (own.budget, own.budget_floor)


def test_settings_are_written() -> None:
    for verify in (SpeculativeConfig(), SpeculativeConfig("tokens", 0, 3, "4bit")):
        assert SpeculativeConfig(**verify.to_dict()) == verify
    assert not SpeculativeConfig().enabled and SpeculativeConfig("tokens").enabled


def test_fewer_drafts_at_most_are_fewer_drafts() -> None:
    assert SpeculativeConfig.of(mode="tokens", most=8).draft == 8 and SpeculativeConfig.of(
        mode="tokens", most=16
    ) == SpeculativeConfig("tokens")
    assert (
        SpeculativeConfig.of(mode="tokens", most=8, draft=None).draft is None
        and SpeculativeConfig.of() == SpeculativeConfig()
    )
    for most in (-1, 0, 65, "8"):
        with pytest.raises(ConfigError, match="most"):
            SpeculativeConfig.of(mode="tokens", most=most)


def test_one_line_says_how_a_run_verifies() -> None:
    assert describe_verify(SpeculativeConfig("tokens", 4)) == "tokens: 4 drafts a round"
    assert describe_verify(SpeculativeConfig("tokens", None, 8, "4bit")) == (
        "tokens: up to 8, as they pay, drafts a round, drafted with 4bit weights"
    )


def test_each_flag_sets_its_own_field() -> None:
    flags = {"eps_verify": "tokens", "eps_draft": 3, "eps_draft_most": 9, "eps_draft_weights": "8bit"}
    found = speculative_of(flags, set(flags), EpsConfig.of(method="rq"))
    assert found == SpeculativeConfig.of(mode="tokens", draft=3, most=9, weights="8bit")
