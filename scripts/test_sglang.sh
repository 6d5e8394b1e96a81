#!/usr/bin/env bash
# Passes the tests of the hook inside SGLang, on a CPU, in the environment of scripts/test_vllm.sh: what SGLang needs
# beyond that is installed into a folder of its own there, sglang.
# Usage: [EPS_VLLM_VENV=folder] scripts/test_sglang.sh [--install | arguments of pytest]
# --install: makes both environments alone.
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
scripts/test_vllm.sh --install
venv=${EPS_VLLM_VENV:-$PWD/.venv-vllm}
stamp=$venv/sglang/.installed-$(cksum < tests/sglang/requirements.txt | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  echo "installing SGLang into $venv/sglang ..." >&2
  rm -rf "$venv/sglang"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile --no-deps --target "$venv/sglang" \
    -r tests/sglang/requirements.txt >&2
  touch "$stamp"
fi
if [ "${1:-}" = --install ]; then
  exit 0
fi
export PYTHONPATH=$venv/sglang:$PWD/tests/sglang/site
cd tests/sglang
exec "$venv/bin/python" -m pytest "$@"
