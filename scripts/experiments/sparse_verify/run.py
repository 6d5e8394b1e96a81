"""Makes the table of drafts that are verified over a part of the tokens.

    python scripts/experiments/sparse_verify/run.py --contexts 4096 --needles 20 --texts 4 --text-steps 48

Writes one JSON object a line (the run, then every cell) and prints the tables in Markdown. A run that was stopped goes
on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import exit_code
from experiments.methods.run import main
from experiments.sparse_verify import sparse_verify

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main("sparse-verify", sparse_verify, __doc__)))
