"""The table of eviction policies in eps_core/README.md says what the code does."""

from pathlib import Path

from eps_core.cli.main import cli
from eps_core.evict.base import Facts
from eps_core.evict.table import POLICIES

PAGE = Path(__file__).parent.parent / "eps_core" / "README.md"


def line(name: str, facts: Facts) -> str:
    newest = f"{facts.last_tokens:g}" if facts.last_tokens >= 1 else f"{facts.last_tokens:g} of the budget"
    return f"| `{name}` | {facts.source} | {facts.window or '-'} | {newest} | {facts.deviations} |"


def test_every_policy_has_its_line() -> None:
    wanted = [line(name, module.FACTS) for name, module in POLICIES.items()]
    text = PAGE.read_text()
    assert "\n".join(wanted) in text, "\n".join(wanted)


def test_deviations_are_not_hidden_in_the_source() -> None:
    for name, module in POLICIES.items():
        assert module.FACTS.deviations and "\n" not in module.FACTS.deviations, name
        assert "reconstruction" not in module.FACTS.source, name


def test_the_flag_names_every_default_that_is_not_32() -> None:
    (flag,) = [param for param in cli.commands["run"].params if "--kv-last-tokens" in param.opts]
    for name, module in POLICIES.items():
        if module.FACTS.last_tokens != 32:
            assert name in flag.help, name
