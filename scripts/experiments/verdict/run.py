"""Prints the verdict on measured cells: ship, iterate, kill or not decidable.

    python scripts/experiments/verdict/run.py grid.jsonl scores.jsonl

Takes JSONL of the experiments grid and methods and of eps-proto evaluate. Prints one JSON object.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from eps_core.errors import exit_code
from eps_core.io.outputs import to_json
from eps_core.report.load import load_results
from experiments.verdict.verdict import decide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="JSONL")
    results = load_results(parser.parse_args().results)
    for note in results.notes:
        print(f"note: {note}", file=sys.stderr)
    print(to_json(decide(results.cells, results.tasks).to_dict()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
