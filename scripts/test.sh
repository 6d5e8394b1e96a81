#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, the whole suite on every backend, then those inside vLLM, in an
# environment of their own (scripts/test_vllm.sh).
# Usage: [EPS_TEST_WORKERS=auto] scripts/test.sh [arguments of pytest]      (with arguments: the suite alone)
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
if [ $# = 0 ]; then  # installations side by side: each keeps one core busy
  set -m  # a process group of its own, which ends with this script
  scripts/test_vllm.sh --install &
  installing=$!
  set +m
  trap 'kill -- "-$installing" 2> /dev/null || true' EXIT
fi
venv=$(scripts/setup.sh mlx,cuda,dev)
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
if [ $# = 0 ]; then
  wait "$installing" || echo "no environment with vLLM: tried again after the suite" >&2
  trap - EXIT
fi
# one thread a worker: more only fight over the cores
export OMP_NUM_THREADS=1
"$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-auto}" "$@"
if [ $# = 0 ]; then
  scripts/test_vllm.sh
fi
