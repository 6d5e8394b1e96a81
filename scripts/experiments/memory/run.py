"""Makes the table of codes of K and V, eviction and EPS, alone and together.

    python scripts/experiments/memory/run.py --contexts 4096 8192 --needles 50 --text-steps 48

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import exit_code
from experiments.memory import composition
from experiments.methods.run import main

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("memory", composition, __doc__)))
