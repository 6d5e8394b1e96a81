#!/usr/bin/env bash
# Makes .venv-kvpress beside this checkout, installs kvpress and the transformers that it needs into it with the pinned
# versions, and prints where it is. tests/test_kvpress.py compares what EPS and kvpress keep.
# Usage: [EPS_KVPRESS_VENV=folder] scripts/setup_kvpress.sh
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 0 "$@"
cd "$(dirname "$0")/.."
venv=${EPS_KVPRESS_VENV:-$PWD/.venv-kvpress}
stamp=$venv/.installed-$(cksum < tests/kvpress/requirements.txt | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  python=${PYTHON:-python3}
  "$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv"
  echo "installing kvpress into $venv ..." >&2
  # all that kvpress needs is listed: nothing is resolved, and what is built for another Torch than the CPU's is left
  # out
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --timeout 15 --retries 1 --no-deps \
    -r tests/kvpress/requirements.txt >&2
  touch "$stamp"
fi
echo "$venv"
