"""Times one attention layer, dense and sparse: `eps-proto bench` without an installation.

python scripts/bench.py --context 4096,32768 -o results/bench.jsonl --plot results
python scripts/bench.py --help
python scripts/bench.py targets results/gpu-*.jsonl        (which of the GPU targets those records meet)
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from targets import main as targets

from eps_core.cli.main import main

if __name__ == "__main__":
    if sys.argv[1:2] == ["targets"]:
        parser = argparse.ArgumentParser("bench.py targets", description="Which of the GPU targets those records meet.")
        parser.add_argument("records", type=Path, nargs="+", metavar="JSONL", help="what bench -o wrote")
        sys.exit(targets(parser.parse_args(sys.argv[2:]).records))
    sys.argv.insert(1, "bench")
    main()
