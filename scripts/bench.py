"""Times one attention layer, dense and sparse: `eps-proto bench` without an installation.

python scripts/bench.py --context 4096,32768 -o results/bench.jsonl --plot results
python scripts/bench.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eps_core.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
