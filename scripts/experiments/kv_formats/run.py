"""Makes the table of formats of K and V that are no pool's, by round trip.

    python scripts/experiments/kv_formats/run.py --contexts 4096 --needles 20 --texts 4 --text-steps 48

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import exit_code
from experiments.kv_formats import rewrites
from experiments.methods.run import main

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("rewrites", rewrites, __doc__)))
