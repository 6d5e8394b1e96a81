#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, then the whole suite on every backend.
# Usage: [EPS_TEST_WORKERS=auto] scripts/test.sh [arguments of pytest]
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
venv=$(scripts/setup.sh mlx,cuda,dev)
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# one thread a worker: more only fight over the cores
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-auto}" "$@"
