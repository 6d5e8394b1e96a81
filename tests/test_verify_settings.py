"""Settings of verified decoding: one line for each mistake, which names the flag."""

from typing import Any

import pytest
from verified_runs import eps

from eps_core.config.eps import EpsConfig
from eps_core.config.read import Read
from eps_core.config.verify import DRAFT_FLOOR, Verify
from eps_core.errors import ConfigError
from eps_core.telemetry.terminal import describe_verify


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "on"}, "eps-verify 'on' is unknown: choose one of off, tokens"),
        ({"weights": "8bit"}, "eps-draft-weights '8bit' is unknown: choose one of full, 4bit"),
        ({"draft": None, "most": 0}, "eps-draft-most 0 is outside 1 to 64 tokens"),
        ({"draft": None, "most": 65}, "eps-draft-most 65 is outside 1 to 64 tokens"),
        ({"draft": -1}, r"eps-draft -1 is outside 0 to 16 \(eps-draft-most\) tokens: or use auto"),
        ({"draft": 17}, r"eps-draft 17 is outside 0 to 16"),
        ({"draft": 4, "most": 3}, r"eps-draft 4 is outside 0 to 3"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_its_flag(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        Verify(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"draft": 1.5}, {"draft": "4"}, {"most": True}, {"mode": 1}, {"weights": None}])
def test_a_setting_of_another_kind_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Verify(**settings)


@pytest.mark.parametrize(
    ("config", "verify", "drawn", "said"),
    [
        (EpsConfig.of(), Verify("tokens"), {}, "method off gates nothing: use rq"),
        (eps("box"), Verify("tokens"), {"temperature": 0.5, "sample_by": "cdf"}, "sample-by cdf draws otherwise"),
    ],
)
def test_what_cannot_be_verified_is_refused(config: EpsConfig, verify: Verify, drawn: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        verify.check(config, **drawn)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("eps-")


def test_what_can_be_verified_passes() -> None:
    Verify("tokens").check(eps("box"))
    Verify("tokens").check(eps("box"), 0.0, "cdf")  # greedy draws nothing
    Verify("tokens").check(eps("rq"), 1.0, "gumbel")
    Verify().check(EpsConfig.of(), 1.0, "cdf")  # off


def test_the_last_tokens_of_a_draft_cover_all_drafts() -> None:
    read = Read(last_tokens=8)
    assert Verify("tokens", most=16).draft_read(read).last_tokens == 17
    assert Verify("tokens", 4, 4).draft_read(read) == read


def test_a_draft_needs_no_safe_budget() -> None:
    """A floor keeps short contexts safe where nothing verifies what was said."""
    config = EpsConfig.of(method="rq")
    assert config.read.budget_floor > DRAFT_FLOOR == Verify("tokens").draft_read(config.read).budget_floor
    assert Verify("tokens").draft_read(EpsConfig.of(method="rq", budget=0.1).read).budget_floor == 0


def test_settings_are_written() -> None:
    for verify in (Verify(), Verify("tokens", 0, 3, "4bit")):
        assert Verify(**verify.to_dict()) == verify
    assert not Verify().enabled and Verify("tokens").enabled


def test_fewer_drafts_at_most_are_fewer_drafts() -> None:
    assert Verify.of(mode="tokens", most=8).draft == 8 and Verify.of(mode="tokens", most=16) == Verify("tokens")
    assert Verify.of(mode="tokens", most=8, draft=None).draft is None and Verify.of() == Verify()
    for most in (-1, 0, 65, "8"):
        with pytest.raises(ConfigError, match="most"):
            Verify.of(mode="tokens", most=most)


def test_one_line_says_how_a_run_verifies() -> None:
    assert describe_verify(Verify("tokens", 4)) == "tokens: 4 drafts a round"
    assert describe_verify(Verify("tokens", None, 8, "4bit")) == (
        "tokens: up to 8, as they pay, drafts a round, drafted with 4bit weights"
    )
