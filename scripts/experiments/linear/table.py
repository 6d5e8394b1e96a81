"""Quality against bytes of what does not grow with the text: linear attention's states and windows, on needles and real
text."""

import argparse
from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.eviction.config import EvictionConfig
from experiments.linear.states import State
from experiments.memory.composition import Plan, Variant, markdown, records, table_cells, tally_document

__all__ = ["arguments", "markdown", "plan", "records", "table_cells", "tally_document"]
FAVOR = (64, 256, 1024)  # random features of a state
RINGS = (("streaming", 65.0), ("rswa", 8.0), ("rswa", 32.0))  # policies, and the rows that they keep
EPS_BUDGET = 0.02


def variants() -> tuple[Variant, ...]:
    """Return states, a window beside sinks with about the bytes of the smallest state (at a head dim of 64), the prompt
    with a window of what follows, and EPS, whose bytes grow."""
    states = (State(), State(gamma=0.99), *(State("favor", features) for features in FAVOR))
    rings = [Variant(EvictionConfig(name, window, 1, num_recent_tokens=1)) for name, window in RINGS]
    return (
        *(Variant(state=state) for state in states),
        *rings,
        Variant(config=EpsConfig.of(method="rq", budget=EPS_BUDGET)),
    )


def arguments(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Add no flag: the arms of this table are fixed."""
    return ()


def plan(args: argparse.Namespace, **common: Any) -> Plan:
    """Return the plan of this table from its parsed flags; `common`: the fields of `Documents`."""
    return Plan(**common, variants=variants())
