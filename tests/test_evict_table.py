"""The table of eviction policies in eps_core/README.md says what the code does."""

from pathlib import Path

from eps_core.cli.main import cli
from eps_core.eviction.base import PolicySpec
from eps_core.eviction.table import POLICIES

PAGE = Path(__file__).parent.parent / "eps_core" / "README.md"


def line(name: str, policy_spec: PolicySpec) -> str:
    newest = (
        f"{policy_spec.num_recent_tokens:g}"
        if policy_spec.num_recent_tokens >= 1
        else f"{policy_spec.num_recent_tokens:g} of the budget"
    )
    return f"| `{name}` | {policy_spec.source} | {policy_spec.window or '-'} | {newest} | {policy_spec.deviations} |"


def test_every_policy_has_its_line() -> None:
    wanted = [line(name, module.SPEC) for name, module in POLICIES.items()]
    text = PAGE.read_text()
    assert "\n".join(wanted) in text, "\n".join(wanted)


def test_deviations_are_not_hidden_in_the_source() -> None:
    for name, module in POLICIES.items():
        assert module.SPEC.deviations and "\n" not in module.SPEC.deviations, name
        assert "reconstruction" not in module.SPEC.source, name


def test_the_flag_names_every_default_that_is_not_32() -> None:
    (flag,) = [param for param in cli.commands["run"].params if "--kv-recent-tokens" in param.opts]
    for name, module in POLICIES.items():
        if module.SPEC.num_recent_tokens != 32:
            assert name in flag.help, name
