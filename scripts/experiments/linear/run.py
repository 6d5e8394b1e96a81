"""Quality against bytes of what does not grow with the text: linear attention's states and windows, on needles and real
text.

    python scripts/experiments/linear/run.py --contexts 4096 --needles 20 --texts 4 --text-steps 128

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.config.eps import EpsConfig
from eps_core.errors import exit_code
from eps_core.eviction.config import EvictionConfig
from experiments.linear.states import State
from experiments.memory import run as memory
from experiments.memory.run import Variant, markdown, table_cells, tally_document
from experiments.methods.run import main

__all__ = ["Plan", "markdown", "table_cells", "tally_document"]
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


@dataclass(frozen=True)
class Plan(memory.Plan):
    variants: tuple[Variant, ...] = field(default_factory=variants)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("linear", "experiments.linear.run", __doc__)))
