"""The specs of eviction policies, from which the table in docs/memory.md is made."""

from eps_core.cli.main import cli
from eps_core.eviction.table import POLICIES


def test_deviations_are_not_hidden_in_the_source() -> None:
    for name, module in POLICIES.items():
        assert module.SPEC.deviations and "\n" not in module.SPEC.deviations, name
        assert "reconstruction" not in module.SPEC.source, name


def test_the_flag_names_every_default_that_is_not_32() -> None:
    (flag,) = [param for param in cli.commands["run"].params if "--kv-recent-tokens" in param.opts]
    for name, module in POLICIES.items():
        if module.SPEC.num_recent_tokens != 32:
            assert name in flag.help, name
