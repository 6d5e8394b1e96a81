#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, and the default tier of the suite, which covers the reference,
# array operations and compiled kernels of both array libraries, the commands and every engine installed with them.
# Usage: [EPS_TEST_WORKERS=auto] scripts/test.sh [--rest | --all] [arguments of pytest]
# --rest: what the default tier leaves out (LEFT_OUT in tests/conftest.py): GPU kernels in emulators, engines, servers,
#         long runs; then the tests inside vLLM and SGLang. These and kvpress have environments of their own
#         (scripts/test_vllm.sh, scripts/test_sglang.sh, scripts/setup_kvpress.sh)
# --all:  style, types and both tiers
# Arguments of pytest without --rest or --all choose among the tests of both tiers.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
tier=default
if [ $# -gt 0 ]; then tier=all; fi
case ${1:-} in
  --rest | --all) tier=${1#--}; shift ;;
esac
vllm=
if [ $# = 0 ] && [ "$tier" != default ]; then
  vllm=yes
  start_engines
fi
venv=$(scripts/setup.sh mlx,cuda,dev)
if [ "$tier" != rest ]; then
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
  "$venv/bin/mypy"
fi
if [ -n "$vllm" ]; then
  await_engines
fi
# one thread a worker: more only fight over the cores; worksteal: a file's tests stay together, so that what they share
# (models, compiled kernels) is made once
export OMP_NUM_THREADS=1
"$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-auto}" --dist worksteal --durations=50 --tier "$tier" "$@"
if [ -n "$vllm" ]; then
  scripts/test_vllm.sh --durations=50
  scripts/test_sglang.sh
fi
