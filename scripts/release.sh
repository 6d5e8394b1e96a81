#!/usr/bin/env bash
# Builds the source archive and the wheel, installs the wheel in an environment of its own, and tries it there: version,
# types, the demo prompt from the shell and from Python. Nothing of this checkout is imported.
# Usage: scripts/release.sh [EXTRA, e.g. cuda or mlx: the backend to try; default none, the NumPy reference]
# The archives end in dist/.
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 1 "$@"
cd "$(dirname "$0")/.."
unset PYTHONPATH  # nothing of a checkout there, either
root=$PWD
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
python3 -m venv "$made/build" "$made/user"
"$made/build/bin/pip" install -q build
rm -rf dist
"$made/build/bin/python" -m build -o dist . > "$made/log" || { cat "$made/log" >&2; exit 1; }
wheel=$(ls dist/*.whl)
"$made/user/bin/pip" install -qc constraints.txt "$root/$wheel${1:+[$1]}"
cd "$made"
"$made/user/bin/eps-proto" --version
"$made/user/bin/eps-proto" run --backend "${1:-numpy}"
"$made/user/bin/python" - "${1:-numpy}" << 'PYTHON'
import sys
from pathlib import Path

import eps_core
from eps_core import LLM

assert "site-packages" in eps_core.__file__, eps_core.__file__
assert (Path(eps_core.__file__).parent / "py.typed").exists()
result = LLM(method="rq", backend=sys.argv[1]).generate("The code for otter is 31415. " * 99, max_new_tokens=4)
assert len(result.tokens) == 4 and 0 < result.kv_bytes_read <= result.kv_bytes_dense, result
PYTHON
echo "built and tried: $wheel"
