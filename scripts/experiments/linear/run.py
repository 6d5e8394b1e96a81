"""Makes the table of linear attention's states and windows, which do not grow with the text.

    python scripts/experiments/linear/run.py --contexts 4096 --needles 20 --texts 4 --text-steps 128

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import exit_code
from experiments.linear import table
from experiments.methods.run import main

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("linear", table, __doc__)))
